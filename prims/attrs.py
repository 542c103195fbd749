"""The attributes of primitives: one frozen dataclass for each kind of payload.

Invariant: an FX node's kwargs are exactly the fields of its primitive's attrs class, and `check` accepts them.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx
from torchlazy.prims.errors import MetaError
from torchlazy.prims.meta import Dim, ScalarMeta

Dims: TypeAlias = tuple[Dim, ...]
Axes: TypeAlias = tuple[int, ...]
Number: TypeAlias = "bool | int | float"
Scalar: TypeAlias = "Number | fx.Node"  # a Node stands for a runtime scalar
Flags: TypeAlias = tuple[bool, ...]
Names: TypeAlias = tuple[str, ...]
OptionalDims: TypeAlias = "Dims | None"
OptionalInt: TypeAlias = "int | None"
OptionalNumber: TypeAlias = "Number | None"


@dataclass(frozen=True)
class NoAttrs:
    """No attributes."""


@dataclass(frozen=True)
class DtypeAttrs:
    """The dtype to convert to."""

    dtype: torch.dtype


@dataclass(frozen=True)
class CheckAttrs:
    """What the error says where the condition does not hold."""

    message: str


@dataclass(frozen=True)
class FullAttrs:
    """One value everywhere; `value` may be a runtime scalar."""

    shape: Dims
    value: Scalar
    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class IotaAttrs:
    """`start + i * step` for i in 0 .. length - 1."""

    length: Dim
    start: Number
    step: Number
    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class RandomBitsAttrs:
    """Philox bits of one (seed, stream)."""

    shape: Dims
    seed: Scalar
    stream: int
    device: str


@dataclass(frozen=True)
class ShapeAttrs:
    """The new shape."""

    shape: Dims


@dataclass(frozen=True)
class PermuteAttrs:
    """Dimension i of the result is dimension `dims[i]` of the operand."""

    dims: Axes


@dataclass(frozen=True)
class SliceAttrs:
    """One (start, stop, step) for each dimension: 0 <= start <= stop <= size, step >= 1."""

    starts: Dims
    stops: Dims
    steps: Dims


@dataclass(frozen=True)
class AxesAttrs:
    """Distinct non-negative axes."""

    axes: Axes


@dataclass(frozen=True)
class PadAttrs:
    """Elements added below and above in each dimension (>= 0), and their value."""

    low: Dims
    high: Dims
    value: Scalar


@dataclass(frozen=True)
class AxisAttrs:
    """One non-negative axis."""

    axis: int


@dataclass(frozen=True)
class AsStridedAttrs:
    """A window on the operand as laid out by its meta strides; offset from its element 0."""

    shape: Dims
    strides: Dims
    offset: Dim


@dataclass(frozen=True)
class IndexAttrs:
    """The dimensions that are indexed: adjacent and increasing, one for each index tensor; whether -1 is the last."""

    dims: Axes
    wrap: bool = True


@dataclass(frozen=True)
class GatherAttrs:
    """One non-negative axis; whether position -1 is the last one, or out of range."""

    axis: int
    wrap: bool = True


def is_dim(value: object) -> bool:
    """Whether `value` is a size: an int (not bool) or a symbolic expression."""
    return (isinstance(value, int) and not isinstance(value, bool)) or isinstance(value, sympy.Expr)


def is_runtime_scalar(value: object) -> bool:
    """Whether `value` is an FX node that stands for a runtime scalar."""
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), ScalarMeta)


_CHECKS = {
    "Dim": is_dim,
    "Dims": lambda v: isinstance(v, tuple) and all(map(is_dim, v)),
    "Axes": lambda v: isinstance(v, tuple) and all(type(i) is int for i in v),
    "Number": lambda v: isinstance(v, (bool, int, float, sympy.Expr)),
    "Scalar": lambda v: isinstance(v, (bool, int, float)) or is_runtime_scalar(v),
    "int": lambda v: type(v) is int,
    "bool": lambda v: isinstance(v, bool),
    "bool | None": lambda v: v is None or isinstance(v, bool),
    "float": lambda v: isinstance(v, (int, float)) and not isinstance(v, bool),
    "str": lambda v: isinstance(v, str),
    "str | None": lambda v: v is None or isinstance(v, str),
    "Flags": lambda v: isinstance(v, tuple) and all(isinstance(i, bool) for i in v),
    "Names": lambda v: isinstance(v, tuple) and all(isinstance(i, str) for i in v),
    "OptionalDims": lambda v: v is None or (isinstance(v, tuple) and all(map(is_dim, v))),
    "OptionalInt": lambda v: v is None or type(v) is int,
    "OptionalNumber": lambda v: v is None or isinstance(v, (bool, int, float, sympy.Expr)),
    "torch.dtype": lambda v: isinstance(v, torch.dtype),
}


@cache
def _expected(attrs_type: type) -> dict[str, str]:
    """The names and kinds of the fields, in order."""
    return {field.name: str(field.type) for field in fields(attrs_type)}


@cache
def _defaulted(attrs_type: type) -> frozenset[str]:
    """The names of the fields that may be left out, all of them or none."""
    return frozenset(field.name for field in fields(attrs_type) if field.default is not MISSING)


def make_attrs(name: str, attrs_type: type, kwargs: dict[str, Any]) -> Any:
    """The attrs object of a node's kwargs; MetaError where a field is missing, unknown or of a wrong type."""
    expected = _expected(attrs_type)
    if expected.keys() != kwargs.keys() and expected.keys() - _defaulted(attrs_type) != kwargs.keys():
        raise MetaError(f"{name}: attributes are {sorted(kwargs)}, expected {sorted(expected)}")
    for key, value in kwargs.items():
        if not _CHECKS[expected[key]](value):
            raise MetaError(f"{name}: attribute {key}={value!r} is not a {expected[key]}")
    return attrs_type(**kwargs)

"""Registry of our own shape rules: one small function for each hot operator, asked before torch's kernels.

A first step meets hundreds of new operators and lists; torch's meta and fake kernels need 0.1 to 60 ms for each. A rule
needs a few microseconds, and a list costs as much as its distinct elements.

Invariant: a rule that answers gives exactly eager's shape, strides and dtype, for a call that eager accepts. A rule
that is not sure returns None, and torch is asked instead; so errors stay eager's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torchlazy.lazy.shapes.strides import Shape, is_dense, plain_strides
from torchlazy.lazy.trace.geometry import Geometry, geometry
from torchlazy.lazy.trace.op_schema import plan_of


class Result(NamedTuple):
    """A result in memory of its own, at storage offset 0."""

    shape: Shape
    strides: Shape
    dtype: torch.dtype


Rule = Callable[
    ..., Any
]  # the operator's arguments, Geometry for tensors -> Result, tuple of Results and None, or None
F = TypeVar("F", bound=Rule)
_RULES: dict[torch._ops.OpOverload, Rule] = {}


class On(NamedTuple):
    """Where a call computes; passed as `on` to rules that are registered with `placed`."""

    is_cpu: bool


_PLACED: set[torch._ops.OpOverload] = set()


def rule(*names: str, placed: bool = False) -> Callable[[F], F]:
    """Register a rule under overloads such as "add.Tensor" (those that this torch has). `placed`: it gets `on`."""

    def register(function: F) -> F:
        for name in names:
            op = overload(name)
            if op is not None:
                _RULES[op] = function
                if placed:
                    _PLACED.add(op)
        return function

    return register


_NUMBERS = frozenset({bool, int, float, complex})


def overload(name: str) -> torch._ops.OpOverload | None:
    """The overload of that name, in aten unless it names another library; None where this torch has none."""
    library, _, own = name.rpartition("::")
    packet, _, variant = own.partition(".")
    found = getattr(getattr(torch.ops, library or "aten"), packet, None)
    return getattr(found, variant or "default", None)


def has_rule(op: torch._ops.OpOverload) -> bool:
    """Whether there is a rule for this operator, or for its functional form."""
    return op in _RULES or _functional_form(op) in _RULES


def plain(shape: Shape, dtype: torch.dtype) -> Result:
    """A row-major result."""
    return Result(shape, plain_strides(shape), dtype)


def is_plain(geom: Geometry) -> bool:
    """Row-major with the very strides that a new tensor of this shape has."""
    return geom.strides == plain_strides(geom.shape)


def infer_by_rule(
    op: torch._ops.OpOverload, args: Any, kwargs: dict[str, Any], device: torch.device, compute: str
) -> tuple[Any, Any] | None:
    """What `infer` returns for this call, if a rule knows: results, then arguments afterwards; else None."""
    found = _RULES.get(op)
    target: Geometry | list[Geometry] | None = None
    asked = op
    if found is None:
        functional = _functional_form(op)
        found = _RULES.get(functional) if functional is not None else None
        if found is None or functional is None:
            return None
        asked, target = functional, args[0]
    if not _is_known_place(compute) or not all(_is_on(compute, device, value) for value in (*args, *kwargs.values())):
        return None
    if type(args[0] if args else None) in _NUMBERS and str(asked._schema.arguments[0].type) == "Tensor":
        return None  # `torch.mul(2.5, x)`: rules expect a tensor first
    named = {**kwargs, "on": On(compute == "cpu")} if asked in _PLACED else kwargs
    results = found(*args, **named)
    if results is None:
        return None
    if target is not None and not _fits(target, results):
        return None
    return _geometries(results, device, compute), (list(args), dict(kwargs))


@functools.cache
def _functional_form(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """What an in-place operator on its first argument computes before it writes."""
    plan = plan_of(op)
    return plan.functional if plan.kind == "inplace" and plan.written == (0,) else None


def _is_known_place(compute: str) -> bool:
    return compute == "cpu" or compute.startswith("cuda")


def _is_on(compute: str, device: torch.device, value: Any) -> bool:
    if type(value) is Geometry:
        return value.compute == compute and (value.device == device or not value.shape)
    if isinstance(value, (list, tuple)):
        return all(_is_on(compute, device, item) for item in value)
    if isinstance(value, torch.device):
        return str(value) == compute
    return not isinstance(value, torch.Generator)


def _fits(target: Any, results: Any) -> bool:
    """Whether a write of `results` into `target` changes neither shape nor dtype, and no address is written twice."""
    if type(target) is Geometry:
        return (
            type(results) is Result
            and results.shape == target.shape
            and results.dtype == target.dtype
            and is_dense(target.shape, target.strides)
        )
    return len(target) == len(results) and all(map(_fits, target, results))


def _geometries(results: Any, device: torch.device, compute: str) -> Any:
    if type(results) is Result:
        return geometry(results.shape, results.strides, 0, results.dtype, device, compute)
    if results is None:
        return None
    return tuple([_geometries(item, device, compute) for item in results])

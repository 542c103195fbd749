"""What a primitive is, and the registry of all of them; `prims/ops.py` and `prims/library/ops.py` fill it.

Invariant: a name is registered once; a primitive with an `overload` is one call of that ATen operator, any other is
computed by generated code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from typing import Any

import torch
from torchlazy.prims import attrs as at
from torchlazy.prims import schema_form
from torchlazy.prims.errors import MetaError
from torchlazy.prims.meta import TensorMeta

MetaRule = Callable[..., "TensorMeta | tuple[TensorMeta | None, ...]"]


class Kind(Enum):
    """What a primitive is, for passes and schedulers."""

    __hash__ = object.__hash__  # kinds are looked up all the time, and the hash of an Enum is a Python function

    POINTWISE = auto()
    REDUCTION = auto()
    SCAN = auto()
    VIEW = auto()
    CREATION = auto()
    CONTRACTION = auto()
    INDEXING = auto()
    RANDOM = auto()
    EXTERN = auto()
    COLLECTIVE = auto()
    SORT = auto()
    WINDOW = auto()
    LINALG = auto()


@dataclass(frozen=True, eq=False)
class Prim:
    """One primitive. Calling it runs the eager reference."""

    __module__ = "torchlazy.prims.ops"  # where printed FX code finds primitives by name

    name: str
    kinds: frozenset[Kind]
    attrs: type
    rule: MetaRule
    reference: Callable[..., Any]
    doc: str
    overload: torch._ops.OpOverload | None = None  # the ATen operator that it is a call of
    operands: int | None = None  # how many, where it is fixed

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        return self.doc

    @property
    def is_anonymous(self) -> bool:
        """Whether this is an ATen call outside of the closed set: its arguments stand as in the operator's schema."""
        return self.overload is not None and PRIMS.get(self.name) is not self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.reference(*args, **kwargs)

    def __repr__(self) -> str:
        return f"prims.{self.name}"

    def __reduce__(self) -> tuple[Any, ...]:
        if self.is_anonymous:
            return _extern_by_name, (str(self.overload),)
        return prim_by_name, (self.name,)

    def is_kind(self, kind: Kind) -> bool:
        """Whether this primitive is of that kind."""
        return kind in self.kinds

    def meta(self, *operands: TensorMeta, **attrs: Any) -> Any:
        """The result's metadata (a tuple for several results); MetaError says which operand or attribute is wrong."""
        checked = at.make_attrs(self.name, self.attrs, attrs)
        if self.operands not in (None, len(operands)):
            raise MetaError(f"{self.name} takes {self.operands} operands, not {len(operands)}")
        try:
            return self.rule(checked, *operands)
        except MetaError as error:
            raise MetaError(f"{self.name}({', '.join(map(str, operands))}): {error}") from None
        except TypeError as error:
            raise MetaError(f"{self.name} does not take {len(operands)} operands ({error})") from None

    def aten_call(self, operands: Sequence[Any], attrs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) of the ATen call that this primitive is, for its operands and attributes."""
        assert self.overload is not None, f"{self.name} is no ATen call"
        if self.is_anonymous:
            return tuple(operands), dict(attrs)
        return schema_form.aten_form(self.overload, operands, attrs)


PRIMS: dict[str, Prim] = {}


def register(prim: Prim) -> Prim:
    """Put a primitive into the set."""
    if prim.name in PRIMS:
        raise ValueError(f"primitive {prim.name} is defined twice")
    PRIMS[prim.name] = prim
    return prim


def prim_by_name(name: str) -> Prim:
    """The primitive of that name."""
    return PRIMS[name]


def _extern_meta(attrs: Any, *operands: TensorMeta) -> TensorMeta:
    raise MetaError("an extern's metadata comes from meta_infer, its arguments are not all tensors")


@cache
def extern(overload: torch._ops.OpOverload) -> Prim:
    """One ATen operator called as it is; args and kwargs stay in the form of its schema."""
    kinds = {Kind.EXTERN}
    if overload.namespace in ("c10d", "_c10d_functional"):
        kinds.add(Kind.COLLECTIVE)
    if torch.Tag.nondeterministic_seeded in overload.tags:
        kinds.add(Kind.RANDOM)
    name = "extern_" + str(overload).replace(".", "_")
    doc = f"{overload} called as it is: {overload._schema}"
    return Prim(name, frozenset(kinds), at.NoAttrs, _extern_meta, overload, doc, overload)


def _extern_by_name(text: str) -> Prim:
    namespace, name, overload = text.split(".")
    return extern(getattr(getattr(getattr(torch.ops, namespace), name), overload))

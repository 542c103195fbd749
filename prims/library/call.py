"""Table rows of primitives that are one ATen call each, and the conversion from ATen's form to theirs.

Operands of such a call are handed over in the layout of their metadata.

Invariant: attributes are the operator's arguments that are no tensors (`prims/schema_form.py`); an operator has one
primitive at most. An operator that this torch does not have leaves its primitive out of the set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torchlazy.prims.prim import Kind, MetaRule, Prim, register
from torchlazy.prims.schema_form import aten_form, prim_form

# The primitive of an operator; of a second overload of the same meaning, with the attributes that it leaves out.
LIBRARY: dict[torch._ops.OpOverload, tuple[Prim, Mapping[str, Any]]] = {}

_WHY: dict[Kind, str] = {
    Kind.CONTRACTION: "a contraction: the vendor library's kernel, with scale and bias in its epilogue",
    Kind.SCAN: "a scan: each element needs those before it, which no loop body of ours does",
    Kind.SORT: "an order of data: ATen's sort",
    Kind.INDEXING: "several sources may meet in one target: needs atomics or a sort, which ATen's kernel has",
    Kind.WINDOW: "overlapping windows, or positions that collide: ATen's kernel",
    Kind.LINALG: "a factorization or transform: LAPACK's, MKL's or cuFFT's kernel",
    Kind.POINTWISE: "a series or recurrence with branches that no scalar operation of ours covers: ATen's kernel",
    Kind.VIEW: "another reading of the same memory, of complex numbers, which loops do not have",
    Kind.COLLECTIVE: "communication between processes",
}


def _find(name: str) -> torch._ops.OpOverload | None:
    namespace, _, rest = name.rpartition("::")
    packet_name, _, overload = rest.partition(".")
    space = getattr(torch.ops, namespace or "aten")
    packet = getattr(space, packet_name, None)
    return getattr(packet, overload or "default", None) if packet is not None else None


def _reference(overload: torch._ops.OpOverload) -> Callable[..., Any]:
    def run(*operands: Any, **attrs: Any) -> Any:
        args, kwargs = aten_form(overload, operands, attrs)
        return overload(*args, **kwargs)

    return run


def call_of(
    name: str, operator: str, kind: Kind, attrs: type, rule: MetaRule, what: str, also: tuple[tuple[str, Any], ...] = ()
) -> Prim:
    """One row. `also`: further overloads of the same meaning, each with the attributes that it leaves out."""
    overload = _find(operator)
    shapes = (rule.__doc__ or "-").strip().splitlines()[0]  # `python -OO` has none
    source = operator.replace("::", ".") if "::" in operator else f"aten.{operator}"
    text = f"{what}\n\n{shapes} Broadcasting: none. Promotion: none. Source: {source}"
    kinds = frozenset({kind, Kind.EXTERN})
    if overload is None:
        return Prim(name, kinds, attrs, rule, _missing(name, operator), text)
    if torch.Tag.nondeterministic_seeded in overload.tags:
        kinds |= {Kind.RANDOM}
    prim = register(Prim(name, kinds, attrs, rule, _reference(overload), text, overload))
    LIBRARY[overload] = (prim, {})
    for other, left_out in also:
        found = _find(other)
        if found is not None:
            LIBRARY[found] = (prim, left_out)
    return prim


def _missing(name: str, operator: str) -> Callable[..., Any]:
    def run(*operands: Any, **attrs: Any) -> Any:
        raise NotImplementedError(f"{name}: this torch has no {operator}; a newer torch has it")

    return run


def library_form(
    overload: torch._ops.OpOverload, args: Any, kwargs: Any
) -> tuple[Prim, list[Any], dict[str, Any]] | None:
    """(primitive, operands, attributes) of an ATen call; None where the set has no primitive for it."""
    found = LIBRARY.get(overload)
    if found is None:
        return None
    prim, left_out = found
    operands, attrs = prim_form(overload, args, kwargs)
    return prim, operands, {**left_out, **attrs}


def why_library(overload: torch._ops.OpOverload) -> str | None:
    """Why the operator is a library call, if it is a primitive of this table."""
    found = LIBRARY.get(overload)
    return None if found is None else next(_WHY[kind] for kind in _WHY if found[0].is_kind(kind))

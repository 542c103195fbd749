"""Scans, and places in sorted sequences: the operand brought to the dtype that ATen works in, then one primitive.

Invariant: a scan's operand has the result's dtype; integers and bool scan as int64 unless another dtype is asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torchlazy.prims import ops as P
from torchlazy.prims.builder import Builder, ExternByChoice, rule
from torchlazy.prims.decomps.value import Number, Value, canonical_axis, sum_dtype, value

aten = torch.ops.aten

# Elements of a set up to this many are compared one by one; ATen sorts larger sets.
MAX_COMPARED_SET = 64


def _register_scan(name: str) -> None:
    prim = P.prim_by_name(name)

    @rule(f"{name}.default")
    def scan(b: Builder, x: Node, dim: int, *, dtype: torch.dtype | None = None) -> Node:
        result = dtype or sum_dtype(b.dtype(x))
        return b.prim(prim, b.convert(x, result), dim=canonical_axis(dim, len(b.shape(x))), dtype=result)


_register_scan("cumsum")
_register_scan("cumprod")


@rule("bucketize.Tensor")
def bucketize(b: Builder, x: Node, boundaries: Node, *, out_int32: bool = False, right: bool = False) -> Node:
    """searchsorted with the operands exchanged"""
    found = P.library_form(aten.searchsorted.Tensor, (boundaries, x), {"out_int32": out_int32, "right": right})
    assert found is not None  # two tensors and two flags
    prim, operands, attrs = found
    return b.prim(prim, *operands, **attrs)


def _is_in(x: Value, elements: Value, invert: bool) -> Node:
    """Whether each element of x equals any of the elements, by comparing all pairs."""
    count = elements.meta.numel
    common = torch.promote_types(x.dtype, elements.dtype)
    line = elements.to(common).reshape((*(1 for _ in x.shape), count))
    pairs = x.to(common).unsqueeze(x.rank).eq(line)
    found = pairs.any((x.rank,))
    return found.eq(False).node if invert else found.node


@rule("isin.Tensor_Tensor")
def isin(b: Builder, x: Node, elements: Node, *, assume_unique: bool = False, invert: bool = False) -> Node:
    v, e = value(b, x), value(b, elements)
    count = e.meta.numel
    if not isinstance(count, int) or count > MAX_COMPARED_SET:
        raise ExternByChoice("a large set: ATen sorts both operands")
    if count == 0:
        return b.full_like(x, invert, torch.bool)
    return _is_in(v, e, invert)


@rule("isin.Tensor_Scalar")
def isin_scalar(b: Builder, x: Node, element: Number, *, assume_unique: bool = False, invert: bool = False) -> Node:
    """x == element"""
    compare: Any = aten.ne.Scalar if invert else aten.eq.Scalar
    return b.aten(compare, x, element)

"""The sum along a row in which at most one element is not zero: no pass over the row is needed.

The gradient of a cross-entropy is made of such rows (the slope where the class is the target, else 0), and the backward
of log-softmax sums them: at a vocabulary of 50257 that is as many comparisons as the loss itself costs.

Invariant: the same numbers. A sum of zeros and one value is that value; a position outside of the row adds nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torchlazy.prims import ops
from torchlazy.prims.size_int import is_tracked

if TYPE_CHECKING:
    from torchlazy.prims.passes.graph_passes import Rewriter


def fold_sum_of_one_hot(new: Rewriter, node: fx.Node) -> fx.Node | None:
    """sum(where(iota == t & c, v, 0)) along iota's axis, t, c, v constant along it -> where(t in range & c, v, 0)"""
    axes: Any = node.kwargs.get("axes", ())
    if node.target is not ops.sum or len(axes) != 1:
        return None
    chosen: Any = node.args[0]
    if chosen.target is not ops.where or not _is_zero(chosen.args[2]):
        return None
    row = _Rows(new, node, axes[0], chosen.meta["val"].shape)
    found = row.condition(chosen.args[0])
    value = row.of(chosen.args[1]) if found is not None else None
    if found is None or value is None:
        return None
    meta = value.meta["val"]
    zero = row.call(ops.full, shape=meta.shape, value=0, dtype=meta.dtype, device=meta.device)
    summed = row.call(ops.where, found, value, zero)
    return new.prim(node, ops.reshape, summed, shape=node.meta["val"].shape)


def _is_zero(x: Any) -> bool:
    if x.target is ops.expand:
        x = x.args[0]
    return x.target is ops.full and not isinstance(x.kwargs["value"], fx.Node) and x.kwargs["value"] == 0


class _Rows:
    """Values that are constant along `axis`, as values of size 1 there."""

    def __init__(self, new: Rewriter, like: fx.Node, axis: int, shape: tuple[Any, ...]) -> None:
        self.new = new
        self.like = like
        self.axis = axis
        self.shape = shape
        self.kept = tuple(1 if i == axis else size for i, size in enumerate(shape))

    def call(self, prim: ops.Prim, *operands: fx.Node, **attrs: Any) -> fx.Node:
        node = self.new.prim(self.like, prim, *operands, **attrs)
        node.meta["val"] = prim.meta(*(operand.meta["val"] for operand in operands), **attrs)
        return node

    def of(self, x: Any) -> fx.Node | None:
        """`x` of shape `kept`; None where it may change along the axis."""
        meta = x.meta["val"]
        if x.target is ops.full:
            return self.call(ops.full, **{**x.kwargs, "shape": self.kept})
        if x.target is not ops.expand:
            return None
        source = x.args[0]
        shape = source.meta["val"].shape
        if is_tracked(shape[self.axis]) or shape[self.axis] != 1 or meta.shape != self.shape:
            return None
        return source if shape == self.kept else self.call(ops.expand, source, shape=self.kept)

    def condition(self, x: Any) -> fx.Node | None:
        """Whether the row holds its one value: the position is in range, and what else is asked for."""
        if x.target is ops.bitwise_and:
            for hit, other in (x.args, x.args[::-1]):
                found = self.in_range(hit)
                along = self.of(other) if found is not None else None
                if found is not None and along is not None:
                    return self.call(ops.bitwise_and, found, along)
            return None
        return self.in_range(x)

    def in_range(self, x: Any) -> fx.Node | None:
        if x.target is not ops.eq:
            return None
        for positions, wanted in (x.args, x.args[::-1]):
            bounds = self.positions(positions)
            target = self.of(wanted) if bounds is not None else None
            if bounds is None or target is None:
                continue
            meta = target.meta["val"]
            first, end = (self.call(ops.full, shape=meta.shape, value=bound, dtype=meta.dtype, device=meta.device)
                          for bound in bounds)  # fmt: skip
            return self.call(ops.bitwise_and, self.call(ops.ge, target, first), self.call(ops.lt, target, end))
        return None

    def positions(self, x: Any) -> tuple[int, int] | None:
        """The first number and the end, where `x` counts along the axis and is constant along the others."""
        if x.target is ops.expand:
            x = x.args[0]
        along = tuple(size if i == self.axis else 1 for i, size in enumerate(self.shape))
        if x.meta["val"].shape != along:
            return None
        if x.target is ops.reshape:
            x = x.args[0]
        if x.target is not ops.iota or x.meta["val"].dtype not in (torch.int64, torch.int32):
            return None
        start, step, length = x.kwargs["start"], x.kwargs["step"], x.kwargs["length"]
        if any(isinstance(n, fx.Node) or is_tracked(n) for n in (start, step, length)) or step != 1:
            return None
        return int(start), int(start) + int(length)


__all__ = ["fold_sum_of_one_hot"]

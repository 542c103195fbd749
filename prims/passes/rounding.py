"""Which roundings to half precision a fused chain must keep: those that a comparison, or another jump, reads.

Between smooth operations an unrounded float32 is only closer to the exact value. A jump is different: `y == y.amax()`
holds nowhere if one side is rounded and the other is not, and what overflows a half is infinite for `isinf`.

Invariant: marking changes no graph; a marked node is a convert from a half to float32.
"""

from __future__ import annotations

import torch
from torch import fx
from torchlazy.prims import ops
from torchlazy.prims.promotion import HALVES, is_integral

_JUMPS = frozenset(
    {
        ops.eq, ops.ne, ops.lt, ops.le, ops.gt, ops.ge, ops.floor, ops.ceil, ops.trunc, ops.round, ops.sign,
        ops.floor_div, ops.trunc_div, ops.remainder, ops.fmod, ops.argmax, ops.argmin, ops.isinf, ops.isnan,
        ops.nextafter, ops.logical_not,
    }
)  # fmt: skip
# What these return are values of their operands (or their negatives): the rounding is looked for behind them.
_SELECTIONS = frozenset(
    {
        ops.abs, ops.neg, ops.maximum, ops.minimum, ops.fmax, ops.fmin, ops.amax, ops.amin, ops.where, ops.reshape,
        ops.permute, ops.expand, ops.slice, ops.flip, ops.pad, ops.cat, ops.gather, ops.index, ops.checked,
    }
)  # fmt: skip
_ORDERINGS = frozenset({ops.lt, ops.le, ops.gt, ops.ge})


def roundings_to_keep(graph: fx.Graph) -> frozenset[fx.Node]:
    """The converts from a half to float32 whose rounded values a jump sees."""
    kept: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and _is_jump(node) and not _is_ordering_against_zero(node):
            for operand in node.all_input_nodes:
                _walk(operand, kept, seen)
    return frozenset(kept)


def _dtype(node: fx.Node) -> torch.dtype | None:
    return getattr(node.meta.get("val"), "dtype", None)


def _is_jump(node: fx.Node) -> bool:
    if node.target is ops.convert:
        dtype = _dtype(node)
        return dtype is not None and is_integral(dtype)
    return node.target in _JUMPS


def _is_ordering_against_zero(node: fx.Node) -> bool:
    """Rounding keeps the sign: no rectifier has to see the rounded value."""
    return node.target in _ORDERINGS and any(
        operand.target is ops.full and operand.kwargs["value"] == 0 for operand in node.all_input_nodes
    )


def _walk(start: fx.Node, kept: set[fx.Node], seen: set[fx.Node]) -> None:
    pending = [start]
    while pending:
        node = pending.pop()
        if node in seen or _dtype(node) != torch.float32:
            continue
        seen.add(node)
        if node.target is ops.convert:
            if _dtype(node.all_input_nodes[0]) in HALVES:
                kept.add(node)
        elif node.target in _SELECTIONS:
            pending.extend(node.all_input_nodes)

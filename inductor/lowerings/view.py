"""Views: index maps over recipes, strided views of memory.

Invariant: a view of a value that lies in memory stays a window wherever strides can say it, so that extern calls and
outputs get it without a copy; nothing here emits a loop, except for `as_strided`, which needs its operand in memory.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torchlazy.inductor.index import ZERO, Index, reshape_index, reshape_strides
from torchlazy.inductor.lowerings.context import Context, Rule
from torchlazy.inductor.lowerings.value import LoweredValue, MemoryView, Scope, computed, window_value
from torchlazy.prims.meta import Dim
from torchlazy.prims.size_int import same_sizes


def lower_reshape(context: Context, node: fx.Node, operands: tuple[LoweredValue, ...]) -> LoweredValue:
    """Row-major order kept."""
    (x,) = operands
    meta, source = node.meta["val"], x.shape
    if x.window is not None:
        strides = reshape_strides(source, x.window.strides, meta.shape)
        if strides is not None:
            return window_value(meta, MemoryView(x.window.root, meta.shape, strides, x.window.offset))
    shape = meta.shape
    value = computed(meta, lambda scope, index: scope.load(x, reshape_index(index, shape, source)), operands)
    layout = None if x.layout is None else reshape_strides(source, x.layout, shape)
    return LoweredValue(meta, value.loader, None, value.chain, value.reads, layout)


def lower_permute(context: Context, node: fx.Node, operands: tuple[LoweredValue, ...]) -> LoweredValue:
    """Dimension d of the result is dimension dims[d] of the operand."""
    (x,) = operands
    meta, dims = node.meta["val"], _dims(node, "dims")
    if x.window is not None:
        strides = tuple(x.window.strides[d] for d in dims)
        return window_value(meta, MemoryView(x.window.root, meta.shape, strides, x.window.offset))
    places = tuple(dims.index(d) for d in range(len(dims)))
    value = computed(meta, lambda scope, index: scope.load(x, tuple(index[p] for p in places)), operands)
    layout = None if x.layout is None else tuple(x.layout[d] for d in dims)
    return LoweredValue(meta, value.loader, None, value.chain, value.reads, layout)


def lower_expand(context: Context, node: fx.Node, operands: tuple[LoweredValue, ...]) -> LoweredValue:
    """Sizes of 1 repeated."""
    (x,) = operands
    meta = node.meta["val"]
    grown = tuple(a != b for a, b in zip(x.shape, meta.shape, strict=True))
    if x.window is not None:
        strides = tuple(0 if grow else stride for grow, stride in zip(grown, x.window.strides, strict=True))
        return window_value(meta, MemoryView(x.window.root, meta.shape, strides, x.window.offset))

    def loader(scope: Scope, index: Index) -> object:
        return scope.load(x, tuple(ZERO if grow else i for grow, i in zip(grown, index, strict=True)))

    return computed(meta, loader, operands)


def lower_slice(context: Context, node: fx.Node, operands: tuple[LoweredValue, ...]) -> LoweredValue:
    """Every step-th element from start, in each dimension."""
    (x,) = operands
    meta, starts, steps = node.meta["val"], _dims(node, "starts"), _dims(node, "steps")
    if x.window is not None:
        offset: Dim = x.window.offset
        for start, stride in zip(starts, x.window.strides, strict=True):
            offset = offset + start * stride
        strides = tuple(step * stride for step, stride in zip(steps, x.window.strides, strict=True))
        return window_value(meta, MemoryView(x.window.root, meta.shape, strides, offset))

    def loader(scope: Scope, index: Index) -> object:
        return scope.load(x, tuple(i * step + start for i, start, step in zip(index, starts, steps, strict=True)))

    return computed(meta, loader, operands)


def lower_flip(context: Context, node: fx.Node, operands: tuple[LoweredValue, ...]) -> LoweredValue:
    """Reversed along the axes; torch has no negative strides, so this is never a window."""
    (x,) = operands
    axes = set(_dims(node, "axes"))

    def loader(scope: Scope, index: Index) -> object:
        return scope.load(x, tuple(x.shape[d] - 1 - i if d in axes else i for d, i in enumerate(index)))

    return computed(node.meta["val"], loader, operands)


def lower_as_strided(context: Context, node: fx.Node, operands: tuple[LoweredValue, ...]) -> LoweredValue:
    """A window on the operand's memory, laid out as its metadata says."""
    x = context.in_memory(operands[0])
    window = x.window
    assert window is not None
    if not same_sizes(
        window.strides, x.meta.strides
    ):  # dimensions of size 1 may differ, and an overlapping operand is stored compact
        x = context.store(x, x.meta.strides)
        window = x.window
        assert window is not None
    offset = window.offset + node.kwargs["offset"]  # type: ignore[operator]
    meta = node.meta["val"]
    return window_value(meta, MemoryView(window.root, meta.shape, _dims(node, "strides"), offset))


def _dims(node: fx.Node, name: str) -> tuple[Any, ...]:
    return tuple(node.kwargs[name])  # type: ignore[arg-type]


RULES: dict[str, Rule] = {
    "reshape": lower_reshape,
    "permute": lower_permute,
    "expand": lower_expand,
    "slice": lower_slice,
    "flip": lower_flip,
    "as_strided": lower_as_strided,
}

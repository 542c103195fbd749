"""Rules of strided views of memory: as_strided and as_strided_scatter, as slices where the view is one.

Dense memory is a grid for any strides that divide one another from the largest down, its sides the quotients. A window
(sizes, strides, offset) is a box in such a grid, with steps, if no row of it runs into the next.
Invariant: what is no such box (overlapping or wrapping windows, operands that are not dense) stays a primitive.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torchlazy.prims import ops
from torchlazy.prims.builder import Builder, rule
from torchlazy.prims.meta import TensorMeta, product

aten = torch.ops.aten


@dataclass(frozen=True)
class StridedBox:
    """A window as a box: `segment` of the flat memory, seen as a grid of `sides`, holds it at `starts:stops:steps`.

    `axes` are the window's dimensions of size > 1 and stride > 0, from the largest stride down: the box's axes, after
    which one more axis of count 1 stands where the grid's last stride would be > 1.
    """

    segment: tuple[int, int]
    sides: tuple[int, ...]
    starts: tuple[int, ...]
    stops: tuple[int, ...]
    steps: tuple[int, ...]
    counts: tuple[int, ...]
    axes: tuple[int, ...]

    @property
    def attrs(self) -> dict[str, Any]:
        """The attributes of `slice` and `slice_scatter`."""
        return {"starts": self.starts, "stops": self.stops, "steps": self.steps}


def find_box(meta: TensorMeta, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> StridedBox | None:
    """The box of a window on a dense tensor; None where it is none."""
    moving = [i for i, (size, stride) in enumerate(zip(shape, strides, strict=True)) if size > 1 and stride > 0]
    axes = sorted(moving, key=lambda i: -strides[i])
    counts = [shape[i] for i in axes]
    units: list[int] = []
    steps: list[int] = []
    for i in axes:
        outer = units[-1] if units else None
        unit: int | None = strides[i]
        whole_rows = (offset // strides[i] + shape[i]) * strides[i] <= meta.numel
        if (outer is None and not whole_rows) or (outer is not None and outer % strides[i]):
            # Steps within an axis of the tensor itself, such as every second of seven
            fitting = [u for u in meta.strides if 0 < u < strides[i] and strides[i] % u == 0 and (outer or 0) % u == 0]
            unit = max(fitting, default=None)
        if unit is None or unit == outer:
            return None
        units.append(unit)
        steps.append(strides[i] // unit)
    if not units or units[-1] != 1:
        units, counts, steps = [*units, 1], [*counts, 1], [*steps, 1]
    starts, rest = [], offset
    for unit in units:
        starts.append(rest // unit)
        rest %= unit
    extents = [(count - 1) * step + 1 for count, step in zip(counts, steps, strict=True)]
    segment = (starts[0] * units[0], (starts[0] + extents[0]) * units[0])
    sides = [extents[0], *(outer // inner for outer, inner in pairwise(units))]
    starts[0] = 0
    stops = [start + extent for start, extent in zip(starts, extents, strict=True)]
    if segment[1] > meta.numel or any(stop > side for stop, side in zip(stops, sides, strict=True)):
        return None
    return StridedBox(segment, tuple(sides), tuple(starts), tuple(stops), tuple(steps), tuple(counts), tuple(axes))


def memory_order(meta: TensorMeta) -> tuple[int, ...] | None:
    """The permutation that makes a dense tensor row-major; None where memory has gaps or overlaps."""
    order = sorted(range(meta.rank), key=lambda i: (-meta.strides[i], i if meta.shape[i] != 1 else -1))
    step = 1
    for i in reversed(order):
        if meta.shape[i] != 1 and meta.strides[i] != step:
            return None
        step *= meta.shape[i]
    return tuple(order)


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(i) for i in range(len(order)))


def _plan(meta: TensorMeta, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> StridedBox | None:
    if meta.numel == 0 or product(shape) == 0 or memory_order(meta) is None:
        return None
    return find_box(meta, shape, strides, offset)


def _flat(b: Builder, x: fx.Node) -> fx.Node:
    order = memory_order(b.meta(x))
    assert order is not None
    return b.reshape(b.permute(x, order) if order else x, (b.meta(x).numel,))


@rule(aten.as_strided.default, "as_strided_copy.default")
def as_strided(
    b: Builder, x: fx.Node, size: tuple[int, ...], stride: tuple[int, ...], offset: int | None = None
) -> fx.Node:
    """A window on x as its meta strides lay it out; x is taken to start at the beginning of its storage"""
    meta, offset = b.meta(x), offset or 0
    if (size, stride, offset) == (meta.shape, meta.strides, 0):
        return x
    box = _plan(meta, size, stride, offset)
    if box is None:
        return b.prim(ops.as_strided, x, shape=size, strides=stride, offset=offset)
    dims = _as_permutation(meta, size, stride)
    if dims is not None and offset == 0:
        return b.permute(x, dims)
    grid = b.reshape(b.slice(_flat(b, x), 0, *box.segment), box.sides)
    if box.counts != box.sides:
        grid = b.prim(ops.slice, grid, **box.attrs)
    moved = b.reshape(grid, tuple(size[i] for i in box.axes))
    if box.axes:
        moved = b.permute(moved, _inverse(_rank_of(box.axes)))
    spread = b.reshape(moved, tuple(n if i in box.axes else 1 for i, n in enumerate(size)))
    return b.broadcast(spread, size)


def _rank_of(axes: tuple[int, ...]) -> tuple[int, ...]:
    """(5, 2, 9) -> (1, 0, 2): the axes counted among themselves."""
    ordered = sorted(axes)
    return tuple(ordered.index(axis) for axis in axes)


def _as_permutation(meta: TensorMeta, size: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...] | None:
    """The permutation of x's own dimensions that the window is, if it is one."""
    if len(size) != meta.rank or len(set(meta.strides)) != meta.rank:
        return None
    places = {(n, s): i for i, (n, s) in enumerate(zip(meta.shape, meta.strides, strict=True))}
    dims = tuple(places.get(pair, -1) for pair in zip(size, stride, strict=True))
    return dims if sorted(dims) == list(range(meta.rank)) else None


@rule(aten.as_strided_scatter.default)
def as_strided_scatter(
    b: Builder, x: fx.Node, src: fx.Node, size: tuple[int, ...], stride: tuple[int, ...], offset: int | None = None
) -> fx.Node:
    """x with a window on its memory replaced by src"""
    meta, offset = b.meta(x), offset or 0
    src = b.broadcast(b.convert(src, meta.dtype), size)
    if (size, stride, offset) == (meta.shape, meta.strides, 0) and memory_order(meta) is not None:
        return src
    box = _plan(meta, size, stride, offset)
    if box is None or product(box.counts) != product(size):
        return b.prim(ops.as_strided_scatter, x, src, shape=size, strides=stride, offset=offset)
    order = memory_order(meta)
    assert order is not None
    flat = _flat(b, x)
    part = b.reshape(src, tuple(size[i] for i in sorted(box.axes)))
    part = b.reshape(b.permute(part, _rank_of(box.axes)) if box.axes else part, box.counts)
    if box.counts != box.sides:
        grid = b.reshape(b.slice(flat, 0, *box.segment), box.sides)
        part = b.prim(ops.slice_scatter, grid, part, **box.attrs)
    whole = b.reshape(part, (box.segment[1] - box.segment[0],))
    if box.segment != (0, meta.numel):
        attrs = {"starts": box.segment[:1], "stops": box.segment[1:], "steps": (1,)}
        whole = b.prim(ops.slice_scatter, flat, whole, **attrs)
    dense = b.reshape(whole, tuple(meta.shape[i] for i in order))
    return b.permute(dense, _inverse(order)) if order else dense

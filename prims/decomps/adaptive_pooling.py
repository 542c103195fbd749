"""Adaptive pooling: a given number of windows in one to three dimensions, forward and backward.

Windows tile where sizes divide; else they are rows of computed positions, masked at their ends and reduced. Backwards
are the same with the roles exchanged: the windows that cover a position are a row, too.

Invariant: as in `pooling`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from torch.fx import Node
from torchlazy.prims import ops as P
from torchlazy.prims.builder import Builder, rule
from torchlazy.prims.decomps.cpu_kernels import leave_to_aten
from torchlazy.prims.decomps.indexing import index_along
from torchlazy.prims.decomps.pooling import (
    Geometry,
    Pooled,
    flat_positions,
    floor_div,
    is_concrete,
    least,
    remainder,
    spread,
    tile_sum,
    vary_along,
)
from torchlazy.prims.decomps.value import Value, compute, iota, value
from torchlazy.prims.meta import Dim


@dataclass(frozen=True)
class Rows:
    """Windows of several lengths along one dimension, as rows of equal length: int64[count, longest] positions, and
    whether each counts."""

    positions: Value
    counts: Value
    sizes: Value  # int64[count]
    longest: int


def _adaptive_rows(b: Builder, size: int, output: int, device: str) -> Rows:
    """Window o runs from floor(o * size / output) to ceil((o + 1) * size / output)."""
    longest = max(-(-(o + 1) * size // output) - o * size // output for o in range(output))
    windows = iota(b, output, device)
    start = floor_div(windows * size, output)
    stop = floor_div((windows + 1) * size + (output - 1), output)
    positions = start.unsqueeze(1) + iota(b, longest, device).unsqueeze(0)
    return Rows(positions.minimum(size - 1), positions.lt(stop.unsqueeze(1)), stop - start, longest)


def _adaptive_windows(b: Builder, x: Value, output: Sequence[int], fill: int | float) -> tuple[Value, list[Rows]]:
    """[*batch, *(count, longest)] with `fill` where a window is shorter."""
    n = len(output)
    first = x.rank - n
    rows = [
        _adaptive_rows(b, size, o, x.meta.device)
        for size, o in zip(x.shape[first:], output, strict=True)  # type: ignore[arg-type]
    ]
    for i, each in enumerate(rows):
        x = index_along(x, [each.positions], first + 2 * i)
    inside = [
        each.counts.reshape(tuple(s for j in range(n) for s in (each.counts.shape if j == i else (1, 1))))
        for i, each in enumerate(rows)
    ]
    shape = tuple(s for each in rows for s in each.counts.shape)
    mask = reduce(Value.both, (part.broadcast(shape) for part in inside))
    return mask.where(x, fill), rows


def _even_geometry(sizes: Sequence[Dim], output: Sequence[Dim]) -> Geometry | None:
    """The windows with which adaptive pooling tiles, if it does."""
    if any(o == 0 or s % o for s, o in zip(sizes, output, strict=True)):
        return None
    return tuple(Pooled(s, s // o, s // o, 0, 1, o) for s, o in zip(sizes, output, strict=True))  # type: ignore[operator, arg-type]


def _adaptive_avg_pool(b: Builder, x: Node, output: Sequence[Dim]) -> Node | None:
    """The sum over each window / its number of elements."""
    n = len(output)
    v = compute(b, x)
    if not is_concrete(*v.shape[-n:], *output):
        return None
    even = _even_geometry(v.shape[-n:], output)
    if even is not None:
        return (tile_sum(v, even) / math.prod(along.kernel for along in even)).to(b.dtype(x)).node
    if v.meta.numel == 0 or 0 in output:
        return None
    windows, rows = _adaptive_windows(b, v, output, 0)  # type: ignore[arg-type]
    total = windows.sum(tuple(windows.rank - 1 - 2 * i for i in range(n)))
    extents = [vary_along(each.sizes, axis, n) for axis, each in enumerate(rows)]
    return (total / reduce(operator.mul, extents).to(total.dtype)).to(b.dtype(x)).node


def _adaptive_avg_pool_backward(b: Builder, grad: Node, x: Node, n: int) -> Node | None:
    """Each position gets the sum, over the windows that it lies in, of gradient / window size."""
    g, sizes = compute(b, grad), b.shape(x)[-n:]
    output = g.shape[-n:]
    if not is_concrete(*sizes, *output):
        return None
    even = _even_geometry(sizes, output)
    if even is not None:
        return spread(g / math.prod(along.kernel for along in even), even).to(b.dtype(x)).node
    if g.meta.numel == 0:
        return None
    leave_to_aten(b, grad)
    device = g.meta.device
    extents = [
        vary_along(_adaptive_rows(b, s, o, device).sizes, axis, n)  # type: ignore[arg-type]
        for axis, (s, o) in enumerate(zip(sizes, output, strict=True))
    ]
    shared = g / reduce(operator.mul, extents).to(g.dtype)
    owners, _ = _adaptive_windows(b, shared, sizes, 0)  # type: ignore[arg-type]
    return owners.sum(tuple(owners.rank - 1 - 2 * i for i in range(n))).to(b.dtype(x)).node


def _adaptive_max_pool(b: Builder, x: Node, output: Sequence[Dim]) -> tuple[Node, Node] | None:
    """The maximum of each window, and its flat position: that of the last NaN, else of the first largest."""
    n = len(output)
    v = compute(b, x)
    sizes = v.shape[-n:]
    if not is_concrete(*sizes, *output) or v.meta.numel == 0 or 0 in output:
        return None
    windows, rows = _adaptive_windows(b, v, output, least(v.dtype))  # type: ignore[arg-type]
    axes = tuple(windows.rank - 1 - 2 * i for i in reversed(range(n)))
    positions = [
        each.positions.reshape(tuple(s for j in range(n) for s in (each.positions.shape if j == i else (1, 1))))
        for i, each in enumerate(rows)
    ]
    flat = _row_major(positions, sizes)
    flat = flat.broadcast(windows.shape)
    largest = windows.amax(axes)
    first = Value(b, b.prim(P.argmax, windows.node, axes=axes))
    lengths = [each.longest for each in rows]
    where = _positions_in_rows(first, rows, lengths, sizes)
    if v.dtype.is_floating_point:
        last_nan = windows.isnan().where(flat, -1).amax(axes)
        where = last_nan.ge(0).where(last_nan, where)
    return largest.to(b.dtype(x)).node, where.node


def _row_major(parts: Sequence[Value], sizes: Sequence[Dim]) -> Value:
    """Positions in a plane of `sizes`, from the positions along each dimension."""
    total = parts[0]
    for size, part in zip(sizes[1:], parts[1:], strict=True):
        total = total * size + part  # type: ignore[operator]
    return total


def _positions_in_rows(number: Value, rows: Sequence[Rows], lengths: Sequence[int], sizes: Sequence[Dim]) -> Value:
    """Flat positions of the elements with these numbers in their windows, whose rows are `lengths` long."""
    n = len(rows)
    below = 1
    parts: list[Value] = []
    for axis in reversed(range(n)):
        offset = floor_div(number, below)
        offset = offset if axis == 0 else remainder(offset, lengths[axis])
        below *= lengths[axis]
        start = rows[axis].positions.narrow(1, 0, 1).reshape((rows[axis].positions.shape[0],))
        parts.insert(0, vary_along(start, axis, n) + offset)
    return _row_major(parts, sizes)


def _adaptive_max_pool_backward(b: Builder, grad: Node, x: Node, indices: Node, n: int) -> Node | None:
    """At each position the sum of the gradients of those windows that name it."""
    g, names, sizes = compute(b, grad), value(b, indices), b.shape(x)[-n:]
    if not is_concrete(*sizes, *g.shape[-n:]) or g.meta.numel == 0:
        return None
    leave_to_aten(b, grad, also_on_gpus=True)
    parts, _ = _adaptive_windows(b, g, sizes, 0)  # type: ignore[arg-type]
    owners, _ = _adaptive_windows(b, names, sizes, -1)  # type: ignore[arg-type]
    own = flat_positions([iota(b, size, g.meta.device) for size in sizes], sizes)  # type: ignore[arg-type]
    own = own.reshape(tuple(s for size in sizes for s in (size, 1)))
    axes = tuple(parts.rank - 1 - 2 * i for i in range(n))
    return owners.eq(own).where(parts, 0).sum(axes).to(b.dtype(x)).node


def _register_adaptive(n: int) -> None:
    @rule(f"_adaptive_avg_pool{n}d.default")
    def adaptive_avg_pool(b: Builder, x: Node, output_size: Sequence[Dim]) -> Node | None:
        return _adaptive_avg_pool(b, x, output_size)

    @rule(f"_adaptive_avg_pool{n}d_backward.default")
    def adaptive_avg_pool_backward(b: Builder, grad: Node, x: Node) -> Node | None:
        return _adaptive_avg_pool_backward(b, grad, x, n)

    @rule(f"adaptive_max_pool{n}d.default")
    def adaptive_max_pool(b: Builder, x: Node, output_size: Sequence[Dim]) -> tuple[Node, Node] | None:
        return _adaptive_max_pool(b, x, output_size)

    @rule(f"adaptive_max_pool{n}d_backward.default")
    def adaptive_max_pool_backward(b: Builder, grad: Node, x: Node, indices: Node) -> Node | None:
        return _adaptive_max_pool_backward(b, grad, x, indices, n)


_register_adaptive(2)
_register_adaptive(3)

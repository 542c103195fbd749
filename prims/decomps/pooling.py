"""Pooling: windows of one to three dimensions, and their means forward and backward; maxima stand in `max_pooling`.

Small windows are unrolled: one strided slice of the padded operand for each element of the window. Backwards gather: an
input position looks at the few windows that cover it, which are shifted slices of the gradient repeated by the stride.
Large windows that overlap stay with ATen.

Invariant: sums of halves are computed in float32 and rounded once.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import TypeAlias

import torch
from torch.fx import Node
from torchlazy.prims import ops as P
from torchlazy.prims.builder import Builder, rule
from torchlazy.prims.decomps.cpu_kernels import leave_to_aten
from torchlazy.prims.decomps.value import Value, compute, iota
from torchlazy.prims.meta import Dim
from torchlazy.prims.size_int import clamped, surely_equal
from torchlazy.prims.window_meta import pooled_size

aten = torch.ops.aten

# Windows of more elements than this are not unrolled: every element of the window is one read in the loop body.
MAX_UNROLLED_WINDOW = 27

Sizes: TypeAlias = "int | Sequence[int]"


@dataclass(frozen=True)
class Pooled:
    """The windows along one dimension: `count` of them, over `size` elements."""

    size: int
    kernel: int
    stride: int
    padding: int
    dilation: int
    count: int

    @property
    def extent(self) -> int:
        """Elements from a window's first to its last."""
        return (self.kernel - 1) * self.dilation + 1

    @property
    def overhang(self) -> int:
        """Elements of the last window beyond the operand's end."""
        return clamped((self.count - 1) * self.stride + self.extent - self.size - self.padding, 0)

    @property
    def covering(self) -> int:
        """How many windows may cover one element."""
        return -(-self.extent // self.stride)


Geometry: TypeAlias = "tuple[Pooled, ...]"


def is_concrete(*sizes: Dim) -> bool:
    """Whether all sizes are numbers."""
    return all(isinstance(size, int) for size in sizes)


def _each(values: Sizes, n: int) -> tuple[int, ...]:
    listed = (values,) if isinstance(values, int) else tuple(values)
    return listed * n if len(listed) == 1 else listed


def geometry_of(
    sizes: Sequence[Dim], kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, ceil_mode: bool
) -> Geometry:
    n = len(sizes)
    kernel = _each(kernel, n)
    stride = _each(stride, n) if isinstance(stride, int) or len(stride) else kernel
    rows = zip(sizes, kernel, stride, _each(padding, n), _each(dilation, n), strict=True)
    return tuple(Pooled(*row, pooled_size(*row, ceil_mode)) for row in rows)  # type: ignore[arg-type]


def is_small(geometry: Geometry) -> bool:
    return math.prod(along.kernel for along in geometry) <= MAX_UNROLLED_WINDOW


def padded_by(x: Value, geometry: Geometry, number: bool | int | float) -> Value:
    """x with `number` wherever a window sticks out."""
    batch = (0,) * (x.rank - len(geometry))
    low, high = [along.padding for along in geometry], [along.overhang for along in geometry]
    if all(surely_equal(amount, 0) for amount in (*low, *high)):
        return x
    return x.pad((*batch, *low), (*batch, *high), number)


def offsets_in(geometry: Geometry) -> list[tuple[int, ...]]:
    """The positions in a window, row by row."""
    return list(product(*(range(along.kernel) for along in geometry)))


def at_offset(padded: Value, geometry: Geometry, offset: Sequence[int]) -> Value:
    """[*batch, *counts]: of each window the element at `offset`."""
    batch = padded.shape[: padded.rank - len(geometry)]
    starts = [k * along.dilation for k, along in zip(offset, geometry, strict=True)]
    stops = [start + (along.count - 1) * along.stride + 1 for start, along in zip(starts, geometry, strict=True)]
    zeros, ones = (0,) * len(batch), (1,) * len(batch)
    return padded.slice((*zeros, *starts), (*batch, *stops), (*ones, *(along.stride for along in geometry)))


def vary_along(x: Value, axis: int, rank: int) -> Value:
    """A vector as a tensor of `rank` dimensions that varies along one axis."""
    return x.reshape(tuple(x.shape[0] if i == axis else 1 for i in range(rank)))


def flat_positions(parts: Sequence[Value], sizes: Sequence[int]) -> Value:
    """Row-major positions in a plane of `sizes`, from one vector of positions for each dimension."""
    n = len(parts)
    total = vary_along(parts[0], 0, n)
    for axis in range(1, n):
        total = total * sizes[axis] + vary_along(parts[axis], axis, n)
    return total


def least(dtype: torch.dtype) -> int | float:
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def floor_div(x: Value, number: int) -> Value:
    return x if number == 1 else Value(x.b, x.b.prim(P.floor_div, x.node, x.like(number).node))


def remainder(x: Value, number: int) -> Value:
    return Value(x.b, x.b.prim(P.remainder, x.node, x.like(number).node))


def covering_shifts(x: Value, geometry: Geometry, fill: int | float) -> list[Value]:
    """[*batch, *sizes] each: at a position the value of one of the windows that may cover it, or `fill`.

    The windows that may cover position i are (i + padding) // stride - t for t = covering - 1 .. 0: in the repeated
    operand r[j] = x[j // stride] that is r[i + padding - t * stride]. In this order windows come as ATen adds them.
    """
    batch = x.rank - len(geometry)
    for axis, along in enumerate(geometry, start=batch):
        before, after = x.shape[:axis], x.shape[axis + 1 :]
        if along.stride > 1:
            spread = x.reshape((*before, along.count, 1, *after))
            spread = spread.broadcast((*before, along.count, along.stride, *after))
            x = spread.reshape((*before, along.count * along.stride, *after))
    low = [clamped((along.covering - 1) * along.stride - along.padding, 0) for along in geometry]
    high = [clamped(along.size + along.padding - along.count * along.stride, 0) for along in geometry]
    zeros = (0,) * batch
    is_padded = not all(surely_equal(n, 0) for n in (*low, *high))
    padded = x.pad((*zeros, *low), (*zeros, *high), fill) if is_padded else x
    shifts = []
    for ts in product(*(range(along.covering - 1, -1, -1) for along in geometry)):
        part = padded
        for axis, (t, along, lo) in enumerate(zip(ts, geometry, low, strict=True), start=batch):
            part = part.narrow(axis, lo + along.padding - t * along.stride, along.size)
        shifts.append(part)
    return shifts


# --- means ---


def _window_extent(b: Builder, device: str, along: Pooled, include_pad: bool) -> Value:
    """int64[count]: how many positions of each window along one dimension the divisor counts."""
    low = iota(b, along.count, device) * along.stride - along.padding
    high = (low + along.kernel).minimum(along.size + along.padding)
    return high - low if include_pad else high.minimum(along.size) - low.maximum(0)


def _divisor(b: Builder, windows: Value, geometry: Geometry, include_pad: bool, override: int | None) -> Value | int:
    """What the sum over each window is divided by; `windows` is [*batch, *counts]."""
    if override is not None:
        return override
    if all(along.padding == 0 and along.overhang == 0 for along in geometry):
        return math.prod(along.kernel for along in geometry)
    n = len(geometry)
    extents = [
        vary_along(_window_extent(b, windows.meta.device, along, include_pad), axis, n)
        for axis, along in enumerate(geometry)
    ]
    return reduce(operator.mul, extents).to(windows.dtype)


def _is_tiling(geometry: Geometry) -> bool:
    """Windows side by side that cover the operand."""
    return all(a.kernel == a.stride and a.padding == 0 and surely_equal(a.count * a.kernel, a.size) for a in geometry)


def _tiles(x: Value, geometry: Geometry) -> Value:
    """[*batch, *(count, kernel)]."""
    batch = x.shape[: x.rank - len(geometry)]
    return x.reshape((*batch, *(size for along in geometry for size in (along.count, along.kernel))))


def tile_sum(x: Value, geometry: Geometry) -> Value:
    tiles = _tiles(x, geometry)
    return tiles.sum(tuple(tiles.rank - 1 - 2 * i for i in range(len(geometry))))


def spread(grad: Value, geometry: Geometry) -> Value:
    """The backward of a sum over tiles: each element of a tile gets the same."""
    batch = grad.shape[: grad.rank - len(geometry)]
    apart = grad.reshape((*batch, *(size for along in geometry for size in (along.count, 1))))
    shared = apart.broadcast((*batch, *(size for along in geometry for size in (along.count, along.kernel))))
    return shared.reshape((*batch, *(along.size for along in geometry)))


def _avg_pool(
    b: Builder, x: Node, kernel_size: Sizes, stride: Sizes, padding: Sizes, ceil_mode: bool, include_pad: bool,
    override: int | None, n: int,
) -> Node | None:  # fmt: skip
    """The sum over each window / its number of positions; small overlapping windows are a sum of strided slices."""
    v = compute(b, x)
    sizes = v.shape[-n:]
    if not is_concrete(*sizes) or not b.dtype(x).is_floating_point:
        return None
    geometry = geometry_of(sizes, kernel_size, stride, padding, 1, ceil_mode)
    if _is_tiling(geometry):
        total = tile_sum(v, geometry)
    elif is_small(geometry):
        padded = padded_by(v, geometry, 0.0)
        total = reduce(operator.add, (at_offset(padded, geometry, offset) for offset in offsets_in(geometry)))
    else:
        return None
    return (total / _divisor(b, total, geometry, include_pad, override)).to(b.dtype(x)).node


def _avg_pool_backward(
    b: Builder, grad: Node, x: Node, kernel_size: Sizes, stride: Sizes, padding: Sizes, ceil_mode: bool,
    include_pad: bool, override: int | None, n: int,
) -> Node | None:  # fmt: skip
    """Each window shares its gradient / divisor out: as copies where windows tile, else position by position the sum
    over the windows that cover it, one dimension after the other."""
    g = compute(b, grad)
    sizes = b.shape(x)[-n:]
    if not is_concrete(*sizes, *g.shape[-n:]):
        return None
    geometry = geometry_of(sizes, kernel_size, stride, padding, 1, ceil_mode)
    shared = g / _divisor(b, g, geometry, include_pad, override)
    if _is_tiling(geometry):
        return spread(shared, geometry).to(b.dtype(x)).node
    if math.prod(along.covering for along in geometry) > MAX_UNROLLED_WINDOW:
        return None
    leave_to_aten(b, grad)
    batch = g.rank - n
    for axis, along in enumerate(geometry, start=batch):
        shared = _covered_sum(shared, axis, along)
    return shared.to(b.dtype(x)).node


def _covered_sum(x: Value, axis: int, along: Pooled) -> Value:
    """At each position along one axis the sum of x over the windows that cover it."""
    last = x.rank - 1
    order = (*(i for i in range(x.rank) if i != axis), axis)
    turned = x.permute(order) if axis != last else x
    shifts = covering_shifts(turned, (along,), 0.0)
    if along.kernel % along.stride:  # the earliest of the windows may end before the position
        within = remainder(iota(x.b, along.size, x.meta.device) + along.padding, along.stride)
        reaches = within.lt(along.kernel - (along.covering - 1) * along.stride)
        shifts[0] = reaches.where(shifts[0], 0.0)
    total = reduce(operator.add, shifts)
    back = (*range(axis), last, *range(axis, last))
    return total.permute(back) if axis != last else total


def _register_avg_pool(n: int) -> None:
    @rule(f"avg_pool{n}d.default")
    def avg_pool(
        b: Builder, x: Node, kernel_size: Sizes, stride: Sizes = (), padding: Sizes = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> Node | None:  # fmt: skip
        return _avg_pool(b, x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override, n)

    @rule(f"avg_pool{n}d_backward.default")
    def avg_pool_backward(
        b: Builder, grad: Node, x: Node, kernel_size: Sizes, stride: Sizes, padding: Sizes, ceil_mode: bool,
        count_include_pad: bool, divisor_override: int | None,
    ) -> Node | None:  # fmt: skip
        return _avg_pool_backward(
            b, grad, x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override, n
        )


_register_avg_pool(2)
_register_avg_pool(3)

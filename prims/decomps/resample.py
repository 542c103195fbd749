"""Reading between elements: linear and cubic resampling, forward and backward, and sampling at the places of a grid.

Along one dimension an output position reads a few taps: positions of the operand, each with a weight. Forward sums
what the taps read. Backward is the same table read the other way: an operand position looks at the row of output
positions that may read it and sums gradient * weight, so nothing is written where it could collide.

Invariant: source positions are computed in float32 (float64 for float64) with ATen's formulas; weights and sums too.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import TypeAlias

import numpy as np
import torch
from torch.fx import Node
from torchlazy.prims import ops as P
from torchlazy.prims.builder import Builder, rule
from torchlazy.prims.decomps.cpu_kernels import leave_to_aten
from torchlazy.prims.decomps.indexing import index_along
from torchlazy.prims.decomps.pooling import is_concrete, vary_along
from torchlazy.prims.decomps.value import Number, Value, compute, iota
from torchlazy.prims.meta import Dim
from torchlazy.prims.size_int import is_tracked

CUBIC = -0.75
"""The free coefficient of ATen's cubic interpolation."""


@dataclass(frozen=True)
class ResampledAxis:
    """How one dimension is resampled: output o reads around (o + 0.5) * ratio - 0.5, aligned at o * ratio."""

    size: int
    output: int
    ratio: float
    align_corners: bool
    is_cubic: bool

    @property
    def reach(self) -> int:
        """How far from its source position a tap may lie."""
        return 2 if self.is_cubic else 1


Taps: TypeAlias = "list[tuple[Value, Value]]"  # int64 positions and weights, of one shape


def _axis(
    size: int, output: int, scale: float | None, align_corners: bool, is_cubic: bool, dtype: torch.dtype
) -> ResampledAxis:
    """Ratios of tracked sizes follow them: a quotient of small ints is the same rounded once or by way of float64."""
    exact = np.float64 if dtype == torch.float64 else np.float32
    if align_corners and (is_tracked(size) or is_tracked(output)):
        return ResampledAxis(size, output, (size - 1) / (output - 1) if output > 1 else 0.0, align_corners, is_cubic)
    if align_corners:
        ratio = exact(size - 1) / exact(output - 1) if output > 1 else exact(0)
    elif scale is not None and scale > 0:
        ratio = exact(1.0 / scale)
    elif is_tracked(size) or is_tracked(output):
        return ResampledAxis(size, output, size / output, align_corners, is_cubic)
    else:
        ratio = exact(size) / exact(output)
    return ResampledAxis(size, output, float(ratio), align_corners, is_cubic)


def _source(axis: ResampledAxis, o: Value) -> Value:
    """The source position of output positions, given as floats."""
    if axis.align_corners:
        return o * axis.ratio
    source = (o + 0.5) * axis.ratio - 0.5
    return source if axis.is_cubic else source.maximum(0.0)


def cubic_weights(t: Value) -> list[Value]:
    """The weights of the elements at -1, 0, 1 and 2 for a position at t in [0, 1)."""

    def near(x: Value) -> Value:  # |distance| <= 1
        return ((x * (CUBIC + 2.0) - (CUBIC + 3.0)) * x) * x + 1.0

    def far(x: Value) -> Value:  # 1 < |distance| < 2
        return ((x * CUBIC - 5.0 * CUBIC) * x + 8.0 * CUBIC) * x - 4.0 * CUBIC

    rest = 1.0 - t
    return [far(t + 1.0), near(t), near(rest), far(rest + 1.0)]


def _taps(axis: ResampledAxis, o: Value) -> Taps:
    """What output positions (floats of any shape) read along one dimension."""
    source = _source(axis, o)
    first = source.floor()
    last = axis.size - 1
    if axis.is_cubic:
        start = first.to(torch.int64)
        weights = cubic_weights(source - first)
        return [((start + k).maximum(0).minimum(last), weight) for k, weight in zip(range(-1, 3), weights, strict=True)]
    first = first.minimum(last * 1.0)
    fraction = (source - first).maximum(0.0).minimum(1.0)
    start = first.to(torch.int64)
    return [(start, 1.0 - fraction), ((start + 1).minimum(last), fraction)]


def _float_iota(x: Value, length: int) -> Value:
    return iota(x.b, length, x.meta.device, dtype=x.dtype)


def _read(x: Value, axes: Sequence[ResampledAxis], first: int) -> Value:
    """The sum over all taps of all dimensions, innermost first, as ATen sums."""
    n = len(axes)
    taps = [_taps(axis, _float_iota(x, axis.output)) for axis in axes]

    def total(chosen: tuple[tuple[Value, Value], ...]) -> Value:
        depth = len(chosen)
        if depth == n:
            return index_along(x, [vary_along(position, i, n) for i, (position, _) in enumerate(chosen)], first)
        parts = [total((*chosen, tap)) * vary_along(tap[1], depth, n) for tap in taps[depth]]
        return reduce(operator.add, parts)

    return total(())


def _rows(axis: ResampledAxis) -> int:
    """How many outputs, at most, read an element."""
    if not is_tracked(axis.ratio):
        return math.ceil(2 * axis.reach / axis.ratio) + 4
    inner, outer = (axis.size - 1, axis.output - 1) if axis.align_corners else (axis.size, axis.output)
    return (2 * axis.reach * outer + inner - 1) // inner + 4


def _read_back(grad: Value, axis: ResampledAxis, at: int) -> Value:
    """The gradient along one dimension: [..., size, ...] from [..., output, ...]."""
    varies = is_tracked(axis.size) or is_tracked(axis.output)
    if not varies and (axis.ratio == 0.0 or axis.output <= 4):
        rows, start = axis.output, iota(grad.b, axis.size, grad.meta.device) * 0
    else:
        rows = _rows(axis)
        centre = 0.0 if axis.align_corners else 0.5
        lowest = (_float_iota(grad, axis.size) + (centre - axis.reach)) / axis.ratio - centre
        start = (lowest.floor().to(torch.int64) - 1).maximum(0)
        rows = rows if varies else min(rows, axis.output)  # those beyond the output weigh nothing
    o = start.unsqueeze(1) + iota(grad.b, rows, grad.meta.device).unsqueeze(0)
    is_output = o.lt(axis.output)
    own = iota(grad.b, axis.size, grad.meta.device).unsqueeze(1)
    weights = [position.eq(own).where(weight, 0.0) for position, weight in _taps(axis, o.to(grad.dtype))]
    weight = is_output.where(reduce(operator.add, weights), 0.0)
    read = index_along(grad, [o.minimum(axis.output - 1)], at)
    return (read * weight.reshape((*weight.shape, *(1,) * (grad.rank - 1 - at)))).sum((at + 1,))


def _literals(scales: Sequence[Number | None], count: int) -> list[float | None] | None:
    """The scales as numbers, unless one changes from run to run."""
    if any(isinstance(scale, Node) for scale in scales):
        return None
    listed = [None if scale is None else float(scale) for scale in scales]  # type: ignore[arg-type]
    return listed + [None] * (count - len(listed))


def _axes_of(
    sizes: Sequence[Dim], output: Sequence[Dim], scales: Sequence[Number | None], align_corners: bool, is_cubic: bool,
    dtype: torch.dtype,
) -> list[ResampledAxis] | None:  # fmt: skip
    literals = _literals(scales, len(output))
    if literals is None or not is_concrete(*sizes, *output) or 0 in (*sizes, *output) or not dtype.is_floating_point:
        return None
    return [
        _axis(size, o, scale, align_corners, is_cubic, dtype)  # type: ignore[arg-type]
        for size, o, scale in zip(sizes, output, literals, strict=True)
    ]


def _register(name: str, n: int, is_cubic: bool) -> None:
    @rule(f"{name}.default")
    def resample(
        b: Builder, x: Node, output_size: Sequence[Dim], align_corners: bool, *scales: Number | None
    ) -> Node | None:
        v = compute(b, x)
        axes = _axes_of(v.shape[2:], output_size, scales, align_corners, is_cubic, b.dtype(x))
        if axes is None:
            return None
        if is_cubic:  # 16 reads an element would be too many
            for i in reversed(range(n)):
                v = _read(v, axes[i : i + 1], 2 + i) if i == n - 1 else _read_outer(v, axes[i], 2 + i)
            return v.to(b.dtype(x)).node
        leave_to_aten(b, x)
        return _read(v, axes, 2).to(b.dtype(x)).node

    @rule(f"{name}_backward.default")
    def resample_backward(
        b: Builder, grad: Node, output_size: Sequence[Dim], input_size: Sequence[Dim], align_corners: bool,
        *scales: Number | None,
    ) -> Node | None:  # fmt: skip
        g = compute(b, grad)
        axes = _axes_of(input_size[2:], output_size, scales, align_corners, is_cubic, b.dtype(grad))
        if axes is None or g.meta.numel == 0:
            return None
        if not is_cubic:
            leave_to_aten(b, grad)
        for i, axis in enumerate(axes):
            g = _read_back(g, axis, 2 + i)
        return g.to(b.dtype(grad)).node


def _read_outer(x: Value, axis: ResampledAxis, at: int) -> Value:
    """The sum over the taps of one dimension that is not the last."""
    trailing = (1,) * (x.rank - 1 - at)
    parts = [
        index_along(x, [position], at) * weight.reshape((*weight.shape, *trailing))
        for position, weight in _taps(axis, _float_iota(x, axis.output))
    ]
    return reduce(operator.add, parts)


_register("upsample_linear1d", 1, False)
_register("upsample_bilinear2d", 2, False)
_register("upsample_trilinear3d", 3, False)
_register("upsample_bicubic2d", 2, True)


# --- grids ---

LINEAR, NEAREST, BICUBIC = 0, 1, 2
ZEROS, BORDER, REFLECTION = 0, 1, 2


def _unnormalised(coordinate: Value, size: int, align_corners: bool) -> Value:
    """From [-1, 1] to positions: the centres of the first and last element, or their outer edges, are the ends."""
    if align_corners:
        return ((coordinate + 1.0) / 2.0) * float(size - 1)
    return ((coordinate + 1.0) * float(size) - 1.0) / 2.0


def _clipped(x: Value, size: int) -> Value:
    """Into [0, size - 1]; a NaN becomes the end."""
    x = x.maximum(0.0)
    return Value(x.b, x.b.prim(P.fmin, x.node, x.like(float(size - 1)).node))


def _mirrored(x: Value, size: int, align_corners: bool) -> Value:
    """Reflected at the ends until it lies between them."""
    low, span = (0.0, float(size - 1)) if align_corners else (-0.5, float(size))
    if span <= 0.0:
        return x * 0.0
    distance = abs(x - low)
    extra = Value(x.b, x.b.prim(P.fmod, distance.node, x.like(span).node))
    flips = (distance / span).floor()
    is_even = Value(x.b, x.b.prim(P.fmod, flips.node, x.like(2.0).node)).eq(0.0)
    return is_even.where(extra + low, (span - extra) + low)


def _bounded(x: Value, size: int, padding_mode: int, align_corners: bool) -> Value:
    if padding_mode == ZEROS:
        return x
    if padding_mode == REFLECTION:
        x = _mirrored(x, size, align_corners)
    return _clipped(x, size)


@dataclass(frozen=True)
class Plane:
    """The operand with its channels last, and the number of the sample at each grid place."""

    x: Value  # [n, *size, c]
    samples: Value  # int64[n, *output]
    sizes: tuple[int, ...]

    def read(self, positions: Sequence[Value]) -> Value:
        """[n, *output, c]: the elements at float positions, 0 outside of the operand."""
        inside = [p.ge(0.0).both(p.le(float(size - 1))) for p, size in zip(positions, self.sizes, strict=True)]
        is_inside = reduce(Value.both, inside)
        indices = [is_inside.where(p, 0.0).to(torch.int64) for p in positions]
        found = index_along(self.x, [self.samples, *indices], 0)
        return is_inside.unsqueeze(is_inside.rank).where(found, 0.0)


def _weighted(plane: Plane, corners: Sequence[tuple[list[Value], Value]]) -> Value:
    parts = [plane.read(positions) * weight.unsqueeze(weight.rank) for positions, weight in corners]
    return reduce(operator.add, parts)


def _linear_corners(places: Sequence[Value]) -> list[tuple[list[Value], Value]]:
    """The corners around each place, the last dimension changing fastest, and their weights."""
    lows = [place.floor() for place in places]
    corners = []
    for sides in product((0, 1), repeat=len(places)):
        positions = [low + 1.0 if side else low for low, side in zip(lows, sides, strict=True)]
        weights = [
            place - low if side else (low + 1.0) - place for place, low, side in zip(places, lows, sides, strict=True)
        ]
        corners.append((positions, reduce(operator.mul, reversed(weights))))
    return corners


def _cubic_read(plane: Plane, places: Sequence[Value], bound: Callable[[Value, int], Value]) -> Value:
    """Four rows of four elements; positions are bounded one by one."""
    lows = [place.floor() for place in places]
    rows, columns = (cubic_weights(place - low) for place, low in zip(places, lows, strict=True))
    total: list[Value] = []
    for i, row in enumerate(rows):
        y = bound(lows[0] + float(i - 1), 0)
        line = [([y, bound(lows[1] + float(j - 1), 1)], column) for j, column in enumerate(columns)]
        total.append(_weighted(plane, line) * row.unsqueeze(row.rank))
    return reduce(operator.add, total)


def _grid_sample(b: Builder, x: Node, grid: Node, mode: int, padding_mode: int, align_corners: bool) -> Node | None:
    """Reads at the places of a grid, whose last dimension counts coordinates from the last dimension on."""
    v, g = compute(b, x), compute(b, grid)
    n = v.rank - 2
    sizes = v.shape[2:]
    if not is_concrete(*v.shape, *g.shape) or v.meta.numel == 0 or g.meta.numel == 0:
        return None
    if v.dtype != g.dtype or (mode == BICUBIC and n != 2):
        return None
    leave_to_aten(b, x)
    last_axis = g.rank - 1
    coordinates = [g.narrow(last_axis, n - 1 - d, 1).reshape(g.shape[:-1]) for d in range(n)]
    samples = vary_along(iota(b, g.shape[0], g.meta.device), 0, last_axis).broadcast(g.shape[:-1])
    plane = Plane(v.permute((0, *range(2, v.rank), 1)), samples, sizes)  # type: ignore[arg-type]
    places = [_unnormalised(c, size, align_corners) for c, size in zip(coordinates, sizes, strict=True)]  # type: ignore[arg-type]
    if mode == BICUBIC:
        read = _cubic_read(plane, places, lambda p, d: _bounded(p, sizes[d], padding_mode, align_corners))  # type: ignore[arg-type]
    else:
        places = [_bounded(p, size, padding_mode, align_corners) for p, size in zip(places, sizes, strict=True)]  # type: ignore[arg-type]
        if mode == NEAREST:
            read = plane.read([Value(b, b.prim(P.round, place.node)) for place in places])
        else:
            read = _weighted(plane, _linear_corners(places))
    return read.permute((0, read.rank - 1, *range(1, read.rank - 1))).to(b.dtype(x)).node


@rule("grid_sampler_2d.default")
def grid_sampler_2d(b: Builder, x: Node, grid: Node, mode: int, padding_mode: int, align_corners: bool) -> Node | None:
    return _grid_sample(b, x, grid, mode, padding_mode, align_corners)


@rule("grid_sampler_3d.default")
def grid_sampler_3d(b: Builder, x: Node, grid: Node, mode: int, padding_mode: int, align_corners: bool) -> Node | None:
    return _grid_sample(b, x, grid, mode, padding_mode, align_corners)

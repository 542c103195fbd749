"""Layers that are neither elementwise nor products: dropout, gated units, pooling, resampling, padding by reflection.

Invariant: pooling is a mean over windows written as views and reductions, resampling and padding read through computed
positions; what would write through positions (most backwards) stays extern, see EXTERN_REASONS.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import TypeAlias

import numpy as np
import torch
from torch.fx import Node
from torchlazy.prims import builder
from torchlazy.prims import ops as P
from torchlazy.prims.builder import Builder, NotApplicable, rule
from torchlazy.prims.decomps.indexing import index_along
from torchlazy.prims.decomps.value import Number, Value, canonical_axis, compute, iota, value
from torchlazy.prims.meta import Dim
from torchlazy.prims.promotion import compute_dtype
from torchlazy.prims.size_int import is_tracked

aten = torch.ops.aten

_ARGMAX_WINDOW = "windows overlap and positions are wanted: no primitive has windows"
_SCATTERS = "writes through computed positions: overlapping contributions are added"
_LIBRARY = "a library kernel is far ahead of generated code"

# Why these operators have no rule.
EXTERN_REASONS: dict[torch._ops.OpOverload, str] = {
    aten.max_pool2d_with_indices.default: _ARGMAX_WINDOW,
    aten.max_pool2d_with_indices_backward.default: _SCATTERS,
    aten.max_pool3d_with_indices.default: _ARGMAX_WINDOW,
    aten.max_pool3d_with_indices_backward.default: _SCATTERS,
    aten.convolution.default: _LIBRARY,
    aten.convolution_backward.default: _LIBRARY,
    aten.grid_sampler_2d.default: _LIBRARY,
    aten.grid_sampler_2d_backward.default: _SCATTERS,
    aten.upsample_bilinear2d.default: _LIBRARY,
    aten.upsample_bilinear2d_backward.default: _SCATTERS,
    aten.reflection_pad1d_backward.default: _SCATTERS,
    aten.reflection_pad2d_backward.default: _SCATTERS,
    aten.reflection_pad3d_backward.default: _SCATTERS,
    aten.replication_pad1d_backward.default: _SCATTERS,
    aten.replication_pad2d_backward.default: _SCATTERS,
    aten.replication_pad3d_backward.default: _SCATTERS,
}
builder.EXTERN_REASONS.update(EXTERN_REASONS)

# (size, kernel, stride, padding) of each pooled dimension.
Geometry: TypeAlias = "tuple[tuple[int, int, int, int], ...]"

# Windows of more elements than this are not unrolled: every element of the window is one read in the loop body.
MAX_UNROLLED_WINDOW = 25


def _is_concrete(*sizes: Dim) -> bool:
    return all(isinstance(size, int) for size in sizes)


# --- dropout ---


@rule(aten.native_dropout.default)
def native_dropout(b: Builder, x: Node, p: Number, train: bool | None) -> tuple[Node, Node]:
    """The identity and a mask of ones outside training; in training it draws from torch's generator: no rule."""
    if train is not False:
        raise NotApplicable("draws from torch's generator")
    return x, b.full_like(x, True, torch.bool)


@rule(aten.native_dropout_backward.default)
def native_dropout_backward(b: Builder, grad: Node, mask: Node, scale: Number) -> Node:
    """grad * mask * scale"""
    wide = compute_dtype(b.wanted.dtype)
    return (value(b, grad, wide) * value(b, mask, wide) * scale).to(b.wanted.dtype).node


# --- gated and parametric activations ---


def _halves(x: Value, dim: int) -> tuple[Value, Value]:
    axis = canonical_axis(dim, x.rank)
    half = x.shape[axis] // 2
    return x.narrow(axis, 0, half), x.narrow(axis, half, half)


@rule(aten.glu.default)
def glu(b: Builder, x: Node, dim: int = -1) -> Node:
    """first half * sigmoid(second half)"""
    first, second = _halves(compute(b, x), dim)
    return (first * second.sigmoid()).to(b.dtype(x)).node


@rule(aten.glu_backward.default)
def glu_backward(b: Builder, grad: Node, x: Node, dim: int) -> Node:
    """s * g beside (1 - s) * s * g * first half, with s = sigmoid(second half)"""
    v, g = compute(b, x), compute(b, grad)
    first, second = _halves(v, dim)
    s = second.sigmoid()
    parts = (s * g, (1.0 - s) * s * g * first)
    joined = b.prim(P.cat, *(part.to(b.dtype(x)).node for part in parts), axis=canonical_axis(dim, v.rank))
    return joined


@rule(aten._prelu_kernel.default)
def prelu(b: Builder, x: Node, weight: Node) -> Node:
    """x where x > 0, else weight * x"""
    v = compute(b, x)
    return v.gt(0.0).where(v, value(b, weight, v.dtype) * v).to(b.dtype(x)).node


@rule(aten._prelu_kernel_backward.default)
def prelu_backward(b: Builder, grad: Node, x: Node, weight: Node) -> tuple[Node, Node]:
    """(g, 0) where x > 0, else (weight * g, x * g)"""
    v, dtype = compute(b, x), b.dtype(x)
    g = value(b, grad, v.dtype)
    positive = v.gt(0.0)
    dx = positive.where(g, value(b, weight, v.dtype) * g)
    return dx.to(dtype).node, positive.where(0.0, v * g).to(dtype).node


# --- shuffles ---
@rule(aten.pixel_shuffle.default)
def pixel_shuffle(b: Builder, x: Node, upscale_factor: int) -> Node:
    """[..., c * r * r, h, w] -> [..., c, h * r, w * r]"""
    v, r = value(b, x), upscale_factor
    *batch, c, h, w = v.shape
    n = len(batch)
    split = v.reshape((*batch, c // (r * r), r, r, h, w))
    return split.permute((*range(n), n, n + 3, n + 1, n + 4, n + 2)).reshape((*batch, c // (r * r), h * r, w * r)).node


@rule(aten.pixel_unshuffle.default)
def pixel_unshuffle(b: Builder, x: Node, downscale_factor: int) -> Node:
    """[..., c, h * r, w * r] -> [..., c * r * r, h, w]"""
    v, r = value(b, x), downscale_factor
    *batch, c, h, w = v.shape
    n = len(batch)
    split = v.reshape((*batch, c, h // r, r, w // r, r))
    return split.permute((*range(n), n, n + 2, n + 4, n + 1, n + 3)).reshape((*batch, c * r * r, h // r, w // r)).node


@rule("channel_shuffle.default", "native_channel_shuffle.default")
def channel_shuffle(b: Builder, x: Node, groups: int) -> Node:
    """[n, g * c, ...] seen as [n, g, c, ...], the two swapped"""
    v = value(b, x)
    n, channels, *rest = v.shape
    split = v.reshape((n, groups, channels // groups, *rest))
    return split.permute((0, 2, 1, *range(3, split.rank))).reshape(v.shape).node


# --- average pooling ---


def _pair(values: int | Sequence[int]) -> tuple[int, int]:
    listed = (values,) if isinstance(values, int) else tuple(values)
    return (listed[0], listed[0]) if len(listed) == 1 else (listed[0], listed[1])


def _windows(x: Value, kernel: tuple[int, int]) -> Value:
    """[..., h, w] as [..., h / kh, kh, w / kw, kw]"""
    *batch, h, w = x.shape
    return x.reshape((*batch, h // kernel[0], kernel[0], w // kernel[1], kernel[1]))


def _window_mean(x: Value, kernel: tuple[int, int]) -> Value:
    """The mean over windows that tile the plane."""
    windows = _windows(x, kernel)
    return windows.mean((windows.rank - 3, windows.rank - 1))


def _spread(grad: Value, kernel: tuple[int, int], divisor: int) -> Value:
    """The backward of a sum over tiling windows, divided: each element of a window gets the same."""
    *batch, h, w = grad.shape
    shared = (grad / divisor).reshape((*batch, h, 1, w, 1)).broadcast((*batch, h, kernel[0], w, kernel[1]))
    return shared.reshape((*batch, h * kernel[0], w * kernel[1]))


def _pooled_size(size: int, kernel: int, stride: int, padding: int, ceil_mode: bool) -> int:
    """How many windows fit; in ceil mode the last may stick out, if it starts inside the input or its left padding."""
    span = size + 2 * padding - kernel
    if not ceil_mode:
        return span // stride + 1
    count = -(-span // stride) + 1
    return count - 1 if (count - 1) * stride >= size + padding else count


def _window_extent(
    b: Builder, device: str, count: int, size: int, kernel: int, stride: int, padding: int, include_pad: bool
) -> Value:
    """int64[count]: how many positions of each window along one dimension the divisor counts."""
    low = iota(b, count, device) * stride - padding
    high = (low + kernel).minimum(size + padding)
    return high - low if include_pad else high.minimum(size) - low.maximum(0)


def _window_divisor(
    b: Builder, windows: Value, geometry: Geometry, include_pad: bool, override: int | None
) -> Value | int:
    """What the sum over each window is divided by; `windows` is [..., rows, columns] of windows."""
    if override is not None:
        return override
    counts = windows.shape[-2:]
    inside = all(
        (count - 1) * s + k <= size and p == 0 for count, (size, k, s, p) in zip(counts, geometry, strict=True)
    )
    if inside:
        return math.prod(k for _, k, _, _ in geometry)
    rows, columns = (
        _window_extent(b, windows.meta.device, count, *along, include_pad)
        for count, along in zip(counts, geometry, strict=True)
    )
    return (rows.unsqueeze(1) * columns.unsqueeze(0)).to(windows.dtype)


def _is_tiling(
    sizes: Sequence[Dim], kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]
) -> bool:
    """Windows side by side that cover the plane."""
    return kernel == stride and padding == (0, 0) and all(s % k == 0 for s, k in zip(sizes, kernel, strict=True))


@rule(aten.avg_pool2d.default)
def avg_pool2d(
    b: Builder,
    x: Node,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Node | None:
    """The sum over each window / its number of positions; small overlapping windows are a sum of strided slices."""
    v = compute(b, x)
    sizes = v.shape[-2:]
    if not _is_concrete(*sizes) or not b.dtype(x).is_floating_point:
        return None
    kernel, padding = _pair(kernel_size), _pair(padding)
    stride = _pair(stride) if stride else kernel
    if _is_tiling(sizes, kernel, stride, padding) and divisor_override is None:
        return _window_mean(v, kernel).to(b.dtype(x)).node
    if math.prod(kernel) > MAX_UNROLLED_WINDOW:
        return None
    geometry = tuple(zip(sizes, kernel, stride, padding, strict=True))
    counts = tuple(_pooled_size(*along, ceil_mode) for along in geometry)
    high = tuple(
        max((count - 1) * s + k - size - p, 0) for count, (size, k, s, p) in zip(counts, geometry, strict=True)
    )
    batch = (0,) * (v.rank - 2)
    padded = v.pad((*batch, *padding), (*batch, *high), 0.0) if any((*padding, *high)) else v
    parts = []
    for dy in range(kernel[0]):
        for dx in range(kernel[1]):
            stops = (dy + (counts[0] - 1) * stride[0] + 1, dx + (counts[1] - 1) * stride[1] + 1)
            steps = (*(1 for _ in batch), *stride)
            parts.append(padded.slice((*batch, dy, dx), (*padded.shape[:-2], *stops), steps))
    total = reduce(operator.add, parts)
    return (total / _window_divisor(b, total, geometry, count_include_pad, divisor_override)).to(b.dtype(x)).node


@rule(aten.avg_pool2d_backward.default)
def avg_pool2d_backward(
    b: Builder,
    grad: Node,
    x: Node,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Node | None:
    """Each window shares its gradient / divisor out: as copies where windows tile the plane, else position by position
    the sum over the windows that cover it, which are shifted slices of the gradient spread out by the stride."""
    v = compute(b, grad)
    kernel, padding = _pair(kernel_size), _pair(padding)
    stride = _pair(stride) if stride else kernel
    sizes = b.shape(x)[-2:]
    if not _is_concrete(*sizes, *v.shape[-2:]):
        return None
    if _is_tiling(sizes, kernel, stride, padding):
        divisor = math.prod(kernel) if divisor_override is None else divisor_override
        return _spread(v, kernel, divisor).to(b.dtype(x)).node
    if math.prod(kernel) > MAX_UNROLLED_WINDOW:
        return None
    geometry = tuple(zip(sizes, kernel, stride, padding, strict=True))
    shared = v / _window_divisor(b, v, geometry, count_include_pad, divisor_override)
    for axis, (size, k, s, p) in enumerate(geometry, start=v.rank - 2):
        shared = _shifted_sum(_dilated(shared, axis, s), axis, size, k, p)
    return shared.to(b.dtype(x)).node


def _dilated(x: Value, axis: int, stride: int) -> Value:
    """x with `stride` - 1 zeros after each element of one axis."""
    if stride == 1:
        return x
    before, size, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    split = x.reshape((*before, size, 1, *after))
    zeros = (0,) * split.rank
    high = tuple(stride - 1 if i == axis + 1 else 0 for i in range(split.rank))
    return split.pad(zeros, high, 0.0).reshape((*before, size * stride, *after))


def _shifted_sum(x: Value, axis: int, size: int, kernel: int, padding: int) -> Value:
    """[size]: at i the sum of x over the last `kernel` positions up to i + `padding`."""
    low, high = kernel - 1 - padding, max(size + padding - x.shape[axis], 0)
    lows, highs = (tuple(n if i == axis else 0 for i in range(x.rank)) for n in (low, high))
    x = x.pad(lows, highs, 0.0)
    return reduce(operator.add, (x.narrow(axis, shift, size) for shift in range(kernel)))


def _even_kernel(sizes: Sequence[Dim], output: Sequence[Dim]) -> tuple[int, int] | None:
    """The window with which adaptive pooling tiles the plane, if it does."""
    if not _is_concrete(*sizes, *output) or any(o == 0 or s % o for s, o in zip(sizes, output, strict=True)):
        return None
    return sizes[0] // output[0], sizes[1] // output[1]


@rule(aten._adaptive_avg_pool2d.default)
def adaptive_avg_pool2d(b: Builder, x: Node, output_size: Sequence[Dim]) -> Node | None:
    """The mean over tiles, where the output divides the input."""
    kernel = _even_kernel(b.shape(x)[-2:], output_size)
    return None if kernel is None else _window_mean(compute(b, x), kernel).to(b.dtype(x)).node


@rule(aten._adaptive_avg_pool2d_backward.default)
def adaptive_avg_pool2d_backward(b: Builder, grad: Node, x: Node) -> Node | None:
    kernel = _even_kernel(b.shape(x)[-2:], b.shape(grad)[-2:])
    return None if kernel is None else _spread(compute(b, grad), kernel, math.prod(kernel)).to(b.dtype(x)).node


# --- nearest-neighbour resampling ---


def _nearest_table(size: int, output: int, scale: float | None, offset: float) -> np.ndarray:
    """int64[output]: the source position of each output position, in ATen's float32 arithmetic."""
    ratio = np.float32(1.0 / scale) if scale is not None and scale > 0 else np.float32(size) / np.float32(output)
    positions = np.floor((np.arange(output, dtype=np.float32) + np.float32(offset)) * ratio)
    return np.minimum(positions.astype(np.int64), size - 1)


def _literal_scales(scales: Sequence[Number | None]) -> list[float | None] | None:
    """The scales, unless one changes from run to run."""
    literals = [scale for scale in scales if not isinstance(scale, Node)]
    return literals if len(literals) == len(scales) else None


def _upsample_nearest(
    b: Builder, x: Node, output_size: Sequence[Dim], given_scales: Sequence[Number | None], offset: float
) -> Node | None:
    """Whole factors repeat each element (views that fuse); other ratios read through computed positions."""
    n = len(output_size)
    v = value(b, x)
    sizes = v.shape[-n:]
    scales = _literal_scales(given_scales)
    if not _is_concrete(*sizes, *output_size) or scales is None:
        return None
    for i, (size, output, scale) in enumerate(zip(sizes, output_size, scales, strict=True)):
        axis = v.rank - n + i
        factor = output // size
        if is_tracked(size) or is_tracked(output):
            if not _doubles(factor, scale):
                return None
            v = _repeat_each(v, axis, factor)
            continue
        table = _nearest_table(size, output, scale, offset)
        if output == size * factor and np.array_equal(table, np.arange(output) // factor):
            v = _repeat_each(v, axis, factor)
        else:
            ratio = float(np.float32(1.0 / scale)) if scale is not None and scale > 0 else None
            ratio = float(np.float32(size) / np.float32(output)) if ratio is None else ratio
            reached = (iota(b, output, v.meta.device, dtype=torch.float32) + offset) * ratio
            v = index_along(v, [reached.floor().to(torch.int64).minimum(size - 1)], axis)
    return v.node


def _repeat_each(v: Value, axis: int, factor: int) -> Value:
    size, before, after = v.shape[axis], v.shape[:axis], v.shape[axis + 1 :]
    repeated = v.reshape((*before, size, 1, *after)).broadcast((*before, size, factor, *after))
    return repeated.reshape((*before, size * factor, *after))


def _doubles(factor: int, scale: float | None) -> bool:
    """Whether each element is repeated `factor` times whatever the size: halving is exact in float32 for every
    position, other ratios have to be looked at one by one."""
    if is_tracked(factor) or factor < 1 or factor & (factor - 1):
        return False
    return scale is None or scale == factor


def _register_upsample(name: str, offset: float) -> None:
    @rule(f"{name}1d.default", f"{name}2d.default", f"{name}3d.default")
    def upsample(b: Builder, x: Node, output_size: Sequence[Dim], *scales: Number | None) -> Node | None:
        return _upsample_nearest(b, x, output_size, scales, offset)

    @rule(f"{name}1d_backward.default", f"{name}2d_backward.default", f"{name}3d_backward.default")
    def upsample_backward(
        b: Builder, grad: Node, output_size: Sequence[Dim], input_size: Sequence[Dim], *scales: Number | None
    ) -> Node | None:
        return _upsample_nearest_backward(b, grad, output_size, input_size, scales, offset)


def _upsample_nearest_backward(
    b: Builder,
    grad: Node,
    output_size: Sequence[Dim],
    input_size: Sequence[Dim],
    given_scales: Sequence[Number | None],
    offset: float,
) -> Node | None:
    """Whole factors: the sum over each block of copies."""
    n = len(output_size)
    sizes = input_size[-n:]
    scales = _literal_scales(given_scales)
    if not _is_concrete(*sizes, *output_size) or scales is None:
        return None
    shape: list[Dim] = list(input_size[:-n])
    blocks = []
    for size, output, scale in zip(sizes, output_size, scales, strict=True):
        factor = output // size
        if is_tracked(size) or is_tracked(output):
            if not _doubles(factor, scale):
                return None
            shape += [size, factor]
            blocks.append(len(shape) - 1)
            continue
        table = _nearest_table(size, output, scale, offset)
        if output != size * factor or not np.array_equal(table, np.arange(output) // factor):
            return None
        shape += [size, factor]
        blocks.append(len(shape) - 1)
    return compute(b, grad).reshape(shape).sum(blocks).to(b.dtype(grad)).node


_register_upsample("upsample_nearest", 0.0)
_register_upsample("_upsample_nearest_exact", 0.5)


# --- padding from the inside ---


def _reflected(position: Value, size: int) -> Value:
    """0 1 2 continues as ... 2 1 | 0 1 2 | 1 0 ..."""
    return size - 1 - abs(size - 1 - abs(position))


def _replicated(position: Value, size: int) -> Value:
    """0 1 2 continues as ... 0 0 | 0 1 2 | 2 2 ..."""
    return position.maximum(0).minimum(size - 1)


def _register_pad(name: str, source: Callable[[Value, int], Value]) -> None:
    @rule(f"{name}_pad1d.default", f"{name}_pad2d.default", f"{name}_pad3d.default")
    def inner_pad(b: Builder, x: Node, padding: Sequence[Dim]) -> Node | None:
        v = value(b, x)
        n = len(padding) // 2
        if not _is_concrete(*v.shape[-n:], *padding):
            return None
        for i in range(n):
            axis, low, high = v.rank - 1 - i, padding[2 * i], padding[2 * i + 1]
            size = v.shape[axis]
            if (low, high) != (0, 0):
                v = index_along(v, [source(iota(b, size + low + high, v.meta.device) - low, size)], axis)
        return v.node


_register_pad("reflection", _reflected)
_register_pad("replication", _replicated)

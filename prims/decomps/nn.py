"""Layers that are neither elementwise nor products: dropout, gated units, resampling, padding by reflection.

Invariant: resampling and padding read through computed positions; what would write through positions (most backwards)
stays with ATen; `resample` and `padding` have the rest of this family.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.fx import Node
from torchlazy.prims import ops as P
from torchlazy.prims.builder import Builder, NotApplicable, rule
from torchlazy.prims.decomps.indexing import index_along
from torchlazy.prims.decomps.value import Number, Value, canonical_axis, compute, iota, value
from torchlazy.prims.meta import Dim
from torchlazy.prims.promotion import compute_dtype
from torchlazy.prims.size_int import is_tracked

aten = torch.ops.aten


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

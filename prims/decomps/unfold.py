"""Sliding windows as columns and back: im2col, col2im, and the gradient of unfold.

Invariant: columns are reads at computed positions; the way back adds, at each position, the elements of the windows
that cover it, as slices of the columns spread out by the stride: nothing is written where it could collide.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import reduce
from itertools import product

from torch.fx import Node
from torchlazy.prims.builder import Builder, rule
from torchlazy.prims.decomps.indexing import index_along
from torchlazy.prims.decomps.pooling import MAX_UNROLLED_WINDOW, is_concrete
from torchlazy.prims.decomps.value import Value, canonical_axis, compute, iota, value
from torchlazy.prims.meta import Dim
from torchlazy.prims.window_meta import pooled_size


def _pair(values: int | Sequence[int]) -> tuple[int, int]:
    listed = (values,) if isinstance(values, int) else tuple(values)
    return (listed[0], listed[0]) if len(listed) == 1 else (listed[0], listed[1])


def dilated(x: Value, axis: int, step: int) -> Value:
    """x with `step` - 1 zeros after each element of one axis."""
    if step == 1:
        return x
    before, size, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    apart = x.reshape((*before, size, 1, *after))
    high = tuple(step - 1 if i == axis + 1 else 0 for i in range(apart.rank))
    spread = apart.pad((0,) * apart.rank, high, 0)
    return spread.reshape((*before, size * step, *after))


def shifted(x: Value, axis: int, start: int, size: int) -> Value:
    """[size] along one axis: x from `start` on (which may be negative), zeros where x has no element."""
    length = x.shape[axis]
    assert isinstance(length, int)
    low, high = max(-start, 0), max(start + size - length, 0)
    if low or high:
        lows, highs = (tuple(amount if i == axis else 0 for i in range(x.rank)) for amount in (low, high))
        x = x.pad(lows, highs, 0)
    return x.narrow(axis, start + low, size)


@rule("im2col.default")
def im2col(
    b: Builder, x: Node, kernel_size: Sequence[int], dilation: Sequence[int], padding: Sequence[int],
    stride: Sequence[int],
) -> Node | None:  # fmt: skip
    """[*batch, c, h, w] -> [*batch, c * kh * kw, rows * columns]: each window as a column"""
    v = value(b, x)
    if not is_concrete(*v.shape) or v.meta.numel == 0:
        return None
    *batch, channels, h, w = v.shape
    kernel, dilate, pad, step = map(_pair, (kernel_size, dilation, padding, stride))
    zeros = (0,) * (v.rank - 2)
    padded = v.pad((*zeros, *pad), (*zeros, *pad), 0) if any(pad) else v
    counts = []
    for i, size in enumerate((h, w)):
        count = pooled_size(size, kernel[i], step[i], pad[i], dilate[i], False)
        assert isinstance(count, int)
        counts.append(count)
        offsets = iota(b, kernel[i], v.meta.device) * dilate[i]
        starts = iota(b, count, v.meta.device) * step[i]
        padded = index_along(padded, [offsets.unsqueeze(1) + starts.unsqueeze(0)], v.rank - 2 + 2 * i)
    n = len(batch)
    windows = padded.permute((*range(n + 1), n + 1, n + 3, n + 2, n + 4))
    return windows.reshape((*batch, channels * kernel[0] * kernel[1], counts[0] * counts[1])).node


@rule("col2im.default")
def col2im(
    b: Builder, x: Node, output_size: Sequence[Dim], kernel_size: Sequence[int], dilation: Sequence[int],
    padding: Sequence[int], stride: Sequence[int],
) -> Node | None:  # fmt: skip
    """[*batch, c * kh * kw, rows * columns] -> [*batch, c, h, w]: columns added where their windows lie"""
    v = compute(b, x)
    kernel, dilate, pad, step = map(_pair, (kernel_size, dilation, padding, stride))
    if not is_concrete(*v.shape, *output_size) or v.meta.numel == 0 or math.prod(kernel) > MAX_UNROLLED_WINDOW:
        return None
    *batch, rows, _ = v.shape
    n = len(batch)
    counts = tuple(pooled_size(output_size[i], kernel[i], step[i], pad[i], dilate[i], False) for i in range(2))
    channels = rows // (kernel[0] * kernel[1])  # type: ignore[operator]
    windows = v.reshape((*batch, channels, *kernel, *counts))
    parts = []
    for i, j in product(range(kernel[0]), range(kernel[1])):
        part = windows.narrow(n + 1, i, 1).narrow(n + 2, j, 1).reshape((*batch, channels, *counts))
        for axis, k in ((0, i), (1, j)):
            spread = dilated(part, n + 1 + axis, step[axis])
            part = shifted(spread, n + 1 + axis, pad[axis] - k * dilate[axis], output_size[axis])  # type: ignore[arg-type]
        parts.append(part)
    return reduce(operator.add, parts).to(b.dtype(x)).node


@rule("unfold_backward.default")
def unfold_backward(b: Builder, grad: Node, input_sizes: Sequence[Dim], dim: int, size: int, step: int) -> Node | None:
    """[..., windows, ..., size] -> input_sizes: windows apart lie side by side, overlapping ones are added"""
    g = compute(b, grad)
    axis, last = canonical_axis(dim, len(input_sizes)), g.rank - 1
    if not is_concrete(*g.shape, *input_sizes) or g.meta.numel == 0 or not input_sizes:
        return None
    length = input_sizes[axis]
    assert isinstance(length, int)
    if size <= step:
        order = (*range(axis + 1), last, *range(axis + 1, last))
        windows = g.permute(order)
        high = tuple(step - size if i == axis + 1 else 0 for i in range(windows.rank))
        windows = windows.pad((0,) * windows.rank, high, 0) if step > size else windows
        count = windows.shape[axis]
        line = windows.reshape((*windows.shape[:axis], count * step, *windows.shape[axis + 2 :]))
        return shifted(line, axis, 0, length).to(b.dtype(grad)).node
    if size > MAX_UNROLLED_WINDOW:
        return None
    parts = [
        shifted(dilated(g.narrow(last, k, 1).reshape(g.shape[:-1]), axis, step), axis, -k, length) for k in range(size)
    ]
    return reduce(operator.add, parts).to(b.dtype(grad)).node

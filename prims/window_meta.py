"""Metadata rules of pooling, unfolding and resampling primitives: (attrs, operand metas...) -> result metas.

Invariant: as in `prims/library/meta.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchlazy.prims.errors import MetaError
from torchlazy.prims.library import attrs as la
from torchlazy.prims.library.meta import Metas, Shape, laid_like, need, need_one_dtype, need_rank, spread
from torchlazy.prims.meta import Dim, TensorMeta
from torchlazy.prims.meta_rules import like


def pooled_size(size: Dim, kernel: Dim, stride: Dim, padding: Dim, dilation: Dim, ceil_mode: bool) -> Dim:
    """How many windows fit; in ceil mode the last may stick out, if it starts inside the input or its left padding."""
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    if not ceil_mode:
        return span // stride + 1
    if not all(isinstance(v, int) for v in (size, kernel, stride, padding, dilation)):
        raise MetaError("ceil_mode on a symbolic size: whether the last window starts inside is not known")
    count = -(-span // stride) + 1
    return count - 1 if (count - 1) * stride >= size + padding else count


def _pooled(
    x: TensorMeta, n: int, kernel: Shape, stride: Shape, padding: Shape, dilation: Shape, ceil_mode: bool
) -> Shape:
    need_rank(x, n + 1, n + 2)
    kernel = spread(kernel, n)
    rows = (x.shape[-n:], kernel, spread(stride or kernel, n), spread(padding, n), spread(dilation, n))
    return (*x.shape[:-n], *(pooled_size(*row, ceil_mode) for row in zip(*rows, strict=True)))


def max_pool(n: int) -> Callable[..., Metas]:
    """Of rank n: maxima and their int64 flat positions in the plane."""

    def rule(attrs: la.MaxPoolAttrs, x: TensorMeta) -> Metas:
        """[*batch, *size] -> [*batch, *windows], twice."""
        shape = _pooled(x, n, attrs.kernel_size, attrs.stride, attrs.padding, attrs.dilation, attrs.ceil_mode)
        values = laid_like(like(x, shape), x)
        return values, laid_like(like(x, shape, torch.int64), x)

    return rule


def avg_pool(n: int) -> Callable[..., TensorMeta]:
    """Of rank n."""

    def rule(attrs: la.AvgPoolAttrs, x: TensorMeta) -> TensorMeta:
        """[*batch, *size] -> [*batch, *windows]."""
        shape = _pooled(x, n, attrs.kernel_size, attrs.stride, attrs.padding, (1,), attrs.ceil_mode)
        return laid_like(like(x, shape), x)

    return rule


def pool_backward(attrs: Any, grad: TensorMeta, x: TensorMeta, *indices: TensorMeta) -> TensorMeta:
    """The gradient of the pooled operand."""
    return laid_like(like(x), x)


def adaptive_max_pool(attrs: la.OutputSizeAttrs, x: TensorMeta) -> Metas:
    """[*batch, *size] -> [*batch, *output_size], maxima and their int64 flat positions."""
    shape = (*x.shape[: x.rank - len(attrs.output_size)], *attrs.output_size)
    return laid_like(like(x, shape), x), laid_like(like(x, shape, torch.int64), x)


def adaptive_avg_pool(attrs: la.OutputSizeAttrs, x: TensorMeta) -> TensorMeta:
    """[*batch, *size] -> [*batch, *output_size]."""
    return like(x, (*x.shape[: x.rank - len(attrs.output_size)], *attrs.output_size))


def fractional_max_pool(attrs: la.FractionalPoolAttrs, x: TensorMeta, samples: TensorMeta) -> Metas:
    """[*batch, *size] -> [*batch, *output_size], maxima and their int64 flat positions."""
    shape = (*x.shape[: x.rank - len(attrs.output_size)], *attrs.output_size)
    return like(x, shape), like(x, shape, torch.int64)


def unpool(attrs: Any, x: TensorMeta, indices: TensorMeta) -> TensorMeta:
    """[*batch, *size] -> [*batch, *output_size], zeros but at the positions."""
    result = like(x, (*x.shape[: x.rank - len(attrs.output_size)], *attrs.output_size))
    return laid_like(result, x) if len(attrs.output_size) == 2 else result


def unfold(attrs: la.UnfoldAttrs, x: TensorMeta) -> TensorMeta:
    """[*batch, c, h, w] -> [*batch, c * window, windows]."""
    need_rank(x, 3, 4)
    windows: Dim = 1
    window: Dim = 1
    rows = (x.shape[-2:], *(spread(v, 2) for v in (attrs.kernel_size, attrs.stride, attrs.padding, attrs.dilation)))
    for size, k, s, p, d in zip(*rows, strict=True):
        windows, window = windows * pooled_size(size, k, s, p, d, False), window * k
    return like(x, (*x.shape[:-3], x.shape[-3] * window, windows))


def fold(attrs: la.FoldAttrs, x: TensorMeta) -> TensorMeta:
    """[*batch, c * window, windows] -> [*batch, c, *output_size]."""
    need_rank(x, 2, 3)
    kernel = spread(attrs.kernel_size, 2)
    return like(x, (*x.shape[:-2], x.shape[-2] // (kernel[0] * kernel[1]), *attrs.output_size))


def grid_sample(attrs: la.GridSampleAttrs, x: TensorMeta, grid: TensorMeta) -> TensorMeta:
    """[n, c, *size] and [n, *output, dimensions] -> [n, c, *output]."""
    need_one_dtype(x, grid)
    need(grid.rank == x.rank, f"the grid {grid} has another rank than {x}")
    return like(x, (x.shape[0], x.shape[1], *grid.shape[1:-1]))


def grid_sample_backward(attrs: la.GridSampleBackwardAttrs, grad: TensorMeta, x: TensorMeta, grid: TensorMeta) -> Metas:
    """The gradients of operand (None if not asked for) and grid."""
    return (like(x) if attrs.output_mask[0] else None), like(grid)


def resample(attrs: Any, x: TensorMeta) -> TensorMeta:
    """[n, c, *size] -> [n, c, *output_size]."""
    return laid_like(like(x, (*x.shape[:2], *attrs.output_size)), x)


def resample_backward(attrs: Any, grad: TensorMeta) -> TensorMeta:
    """[n, c, *output_size] -> [n, c, *size]."""
    return laid_like(like(grad, attrs.input_size), grad)

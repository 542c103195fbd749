"""Shape rules of matrix products, reductions, norms, softmax, embeddings, losses, attention, convolutions and FFTs.

Results are row-major, but those of FFTs, which are covered on a CPU with MKL: the transformed dimensions are innermost
(meta kernels of some torch releases make them row-major).

Invariant: operands are of one floating dtype; where kernels differ by device (the dtype of a norm's statistics), a rule
answers for one device only. For FFTs the answer is what MKL's kernels return; without MKL, and on other devices, there
is no answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torchlazy.lazy.shapes.pointwise import FLOATS, INTEGERS
from torchlazy.lazy.shapes.registry import On, Result, is_plain, plain, rule
from torchlazy.lazy.shapes.strides import Shape, broadcast, dense_in_order, is_contiguous
from torchlazy.lazy.trace.geometry import Geometry

_WIDE = frozenset({torch.float32, torch.float64})
_INDICES = frozenset({torch.int64, torch.int32})


def _one_dtype(*geoms: Geometry | None) -> torch.dtype | None:
    """The floating dtype that all given tensors share."""
    found = {g.dtype for g in geoms if g is not None}
    return next(iter(found)) if len(found) == 1 and found <= FLOATS else None


@rule("mm")
def _mm(a: Geometry, b: Geometry) -> Result | None:
    dtype = _one_dtype(a, b)
    if dtype is None or len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0]:
        return None
    return plain((a.shape[0], b.shape[1]), dtype)


@rule("addmm")
def _addmm(bias: Geometry, a: Geometry, b: Geometry, *, beta: Any = 1, alpha: Any = 1) -> Result | None:
    product = _mm(a, b)
    if product is None or bias.dtype is not product.dtype or not {type(beta), type(alpha)} <= {int, float}:
        return None
    return product if broadcast((bias.shape, product.shape)) == product.shape else None


@rule("bmm")
def _bmm(a: Geometry, b: Geometry) -> Result | None:
    dtype = _one_dtype(a, b)
    if dtype is None or len(a.shape) != 3 or len(b.shape) != 3:
        return None
    if a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        return None
    return plain((a.shape[0], a.shape[1], b.shape[2]), dtype)


@rule("baddbmm")
def _baddbmm(bias: Geometry, a: Geometry, b: Geometry, *, beta: Any = 1, alpha: Any = 1) -> Result | None:
    product = _bmm(a, b)
    if product is None or bias.dtype is not product.dtype or not {type(beta), type(alpha)} <= {int, float}:
        return None
    return product if broadcast((bias.shape, product.shape)) == product.shape else None


def _axes(rank: int, dims: Any) -> set[int] | None:
    """Dimensions as a set of positions; all of them for None and []; None where eager refuses them."""
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return set(range(rank))
    given = [dims] if type(dims) is int else list(dims)
    if not rank or any(type(d) is not int or not -rank <= d < rank for d in given):
        return None
    found = {d % rank for d in given}
    return found if len(found) == len(given) else None


def _reduced(x: Geometry, dims: Any, keepdim: Any, dtype: torch.dtype) -> Result | None:
    axes = _axes(len(x.shape), dims)
    if axes is None:
        return None
    if keepdim:
        return plain(tuple(1 if d in axes else n for d, n in enumerate(x.shape)), dtype)
    return plain(tuple(n for d, n in enumerate(x.shape) if d not in axes), dtype)


@rule("sum.dim_IntList", "mean.dim")
def _total(x: Geometry, dims: Any, keepdim: bool = False, *, dtype: Any = None) -> Result | None:
    if x.dtype not in FLOATS or (dtype is not None and dtype not in FLOATS):
        return None
    return _reduced(x, dims, keepdim, dtype or x.dtype)


@rule("sum", "mean")
def _grand_total(x: Geometry, *, dtype: Any = None) -> Result | None:
    if x.dtype not in FLOATS or (dtype is not None and dtype not in FLOATS):
        return None
    return plain((), dtype or x.dtype)


@rule("amax", "amin")
def _extreme(x: Geometry, dims: Any = (), keepdim: bool = False) -> Result | None:
    return _reduced(x, dims, keepdim, x.dtype) if x.dtype in FLOATS and x.numel else None


@rule("_aminmax")
def _extremes(x: Geometry) -> tuple[Result, Result] | None:
    return (plain((), x.dtype),) * 2 if x.dtype in FLOATS and x.numel else None


@rule("_aminmax.dim")
def _extremes_along(x: Geometry, dim: int, keepdim: bool = False) -> tuple[Result, Result] | None:
    found = _extreme(x, [dim], keepdim)
    return None if found is None else (found, found)


@rule("linalg_vector_norm")
def _length(x: Geometry, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Result | None:
    """torch 2.11's meta kernel keeps a dimension of size 1, whatever `keepdim` says."""
    return _reduced(x, dim, keepdim, x.dtype) if x.dtype in FLOATS and x.numel and dtype is None else None


@rule("any.dim", "all.dim", "any", "all")
def _truth(x: Geometry, dim: Any = None, keepdim: bool = False) -> Result | None:
    return _reduced(x, dim, keepdim, torch.bool) if x.dtype is torch.bool else None


@rule("argmax", "argmin")
def _position(x: Geometry, dim: Any = None, keepdim: bool = False) -> Result | None:
    if x.dtype not in FLOATS or not x.numel or (dim is None and keepdim):
        return None
    return _reduced(x, dim, keepdim, torch.int64)


@rule("_softmax", "_log_softmax")
def _softmax(x: Geometry, dim: int, half_to_float: bool) -> Result | None:
    rank = len(x.shape)
    return plain(x.shape, x.dtype) if x.dtype in FLOATS and not half_to_float and -rank <= dim < rank else None


@rule("_softmax_backward_data", "_log_softmax_backward_data")
def _softmax_backward(grad: Geometry, output: Geometry, dim: int, dtype: torch.dtype) -> Result | None:
    rank = len(grad.shape)
    if grad.shape != output.shape or _one_dtype(grad, output) is not dtype or not -rank <= dim < rank:
        return None
    return plain(grad.shape, dtype)


def _dtypes_of_layer_norm(
    x: Geometry, weight: Geometry | None, bias: Geometry | None, on: On
) -> tuple[torch.dtype, torch.dtype] | None:
    """Of the statistics, and of gradients of weight and bias: the CPU takes these in float32 beside halves, too."""
    if on.is_cpu and x.dtype not in _WIDE and weight is not None and _one_dtype(weight, bias) is torch.float32:
        return torch.float32, torch.float32
    if _one_dtype(x, weight, bias) is None:
        return None
    return x.dtype if on.is_cpu or x.dtype in _WIDE else torch.float32, x.dtype


@rule("native_layer_norm", placed=True)
def _layer_norm(
    x: Geometry, normalized: Sequence[int], weight: Geometry | None, bias: Geometry | None, eps: float, *, on: On
) -> tuple[Result, ...] | None:
    rank = len(x.shape) - len(normalized)
    dtypes, inner = _dtypes_of_layer_norm(x, weight, bias, on), tuple(normalized)
    if dtypes is None or x.dtype not in FLOATS or rank < 0 or not inner or x.shape[rank:] != inner or not x.numel:
        return None
    if any(g is not None and g.shape != inner for g in (weight, bias)):
        return None
    statistics = plain((*x.shape[:rank], *[1] * len(inner)), dtypes[0])
    return plain(x.shape, x.dtype), statistics, statistics


@rule("native_layer_norm_backward", placed=True)
def _layer_norm_backward(
    grad: Geometry, x: Geometry, normalized: Sequence[int], mean: Geometry, rstd: Geometry,
    weight: Geometry | None, bias: Geometry | None, mask: Sequence[bool], *, on: On,
) -> tuple[Result | None, ...] | None:  # fmt: skip
    forward = _layer_norm(x, normalized, weight, bias, 0.0, on=on)
    if forward is None or grad.shape != x.shape or grad.dtype is not x.dtype:
        return None
    if not all(g.shape == forward[1].shape and g.dtype is forward[1].dtype for g in (mean, rstd)):
        return None
    if (mask[1] and weight is None) or (mask[2] and bias is None):
        return None
    dtypes = _dtypes_of_layer_norm(x, weight, bias, on)
    assert dtypes is not None
    inner = plain(tuple(normalized), dtypes[1])
    return plain(x.shape, x.dtype) if mask[0] else None, inner if mask[1] else None, inner if mask[2] else None


@rule("embedding")
def _embedding(
    weight: Geometry, indices: Geometry, padding: int = -1, scale: bool = False, sparse: bool = False
) -> Result | None:
    if len(weight.shape) != 2 or indices.dtype not in _INDICES or weight.dtype not in FLOATS:
        return None
    return plain((*indices.shape, weight.shape[1]), weight.dtype)


@rule("embedding_dense_backward")
def _embedding_backward(grad: Geometry, indices: Geometry, rows: int, padding: int, scale: bool) -> Result | None:
    if indices.dtype not in _INDICES or grad.dtype not in FLOATS or grad.shape[:-1] != indices.shape or not grad.numel:
        return None
    return plain((rows, grad.shape[-1]), grad.dtype)


def _are_scores(x: Geometry, target: Geometry, weight: Geometry | None) -> bool:
    return (
        len(x.shape) == 2
        and x.dtype in FLOATS
        and target.dtype is torch.int64
        and target.shape == x.shape[:1]
        and (weight is None or (weight.dtype is x.dtype and weight.shape == x.shape[1:]))
    )


@rule("nll_loss_forward")
def _nll_loss(
    x: Geometry, target: Geometry, weight: Geometry | None, reduction: int, ignored: int
) -> tuple[Result, Result] | None:
    if not _are_scores(x, target, weight) or reduction not in (0, 1, 2):
        return None
    return plain(() if reduction else x.shape[:1], x.dtype), plain((), x.dtype)


@rule("nll_loss_backward")
def _nll_loss_backward(
    grad: Geometry, x: Geometry, target: Geometry, weight: Geometry | None, reduction: int, ignored: int,
    total: Geometry,
) -> Result | None:  # fmt: skip
    if not _are_scores(x, target, weight) or grad.dtype is not x.dtype or total.dtype is not x.dtype or total.shape:
        return None
    return plain(x.shape, x.dtype) if grad.shape == (() if reduction else x.shape[:1]) else None


@rule("mse_loss")
def _squared_error(x: Geometry, y: Geometry, reduction: int = 1) -> Result | None:
    if x.shape != y.shape or _one_dtype(x, y) is None or reduction not in (0, 1, 2):
        return None
    if reduction:
        return plain((), x.dtype)
    return plain(x.shape, x.dtype) if is_plain(x) and is_plain(y) else None


@rule("cat")
def _joined(tensors: Sequence[Geometry], dim: int = 0) -> Result | None:
    if not tensors or any(t.dtype is not tensors[0].dtype for t in tensors):
        return None
    first = tensors[0].shape
    rank = len(first)
    if not rank or not -rank <= dim < rank or any(len(t.shape) != rank or 0 in t.shape for t in tensors):
        return None
    if rank > 3 and any(n == 1 for t in tensors for n in t.shape):
        return None  # such sizes could be read as a memory format
    axis = dim % rank
    if not all(is_contiguous(t.shape, t.strides) for t in tensors):
        return None
    if any(t.shape[:axis] != first[:axis] or t.shape[axis + 1 :] != first[axis + 1 :] for t in tensors):
        return None
    return plain((*first[:axis], sum(t.shape[axis] for t in tensors), *first[axis + 1 :]), tensors[0].dtype)


@rule("index_select")
def _selected(x: Geometry, dim: int, index: Geometry) -> Result | None:
    rank = len(x.shape)
    if not rank or not -rank <= dim < rank or len(index.shape) != 1 or index.dtype not in _INDICES:
        return None
    if x.dtype not in FLOATS | INTEGERS or not x.numel or not index.numel:
        return None
    shape = list(x.shape)
    shape[dim] = index.shape[0]
    return plain(tuple(shape), x.dtype)


@rule("_scaled_dot_product_flash_attention_for_cpu", placed=True)
def _attention(
    q: Geometry, k: Geometry, v: Geometry, dropout: float = 0.0, causal: bool = False, *,
    attn_mask: Geometry | None = None, scale: float | None = None, on: On,
) -> tuple[Result, Result] | None:  # fmt: skip
    """The result has the layout of the queries: sure where their length is outside the heads, as in most models."""
    if not on.is_cpu or not _is_attention(q, k, v) or attn_mask is not None or dropout:
        return None
    order = (3, 1, 2, 0)
    lies_so = all(0 < q.strides[a] < q.strides[b] for a, b in pairwise(order))
    if min(q.shape) < 2 or not lies_so:
        return None
    return Result(q.shape, dense_in_order(q.shape, order), q.dtype), _log_sums(q)


def _log_sums(q: Geometry) -> Result:
    batch, heads, length, _ = q.shape
    return Result((batch, heads, length), dense_in_order((batch, heads, length), (1, 2, 0)), _summed(q))


def _summed(q: Geometry) -> torch.dtype:
    return q.dtype if q.dtype in _WIDE else torch.float32


def _is_attention(q: Geometry, k: Geometry, v: Geometry) -> bool:
    if _one_dtype(q, k, v) is None or not len(q.shape) == len(k.shape) == len(v.shape) == 4 or not q.numel:
        return False
    return k.shape == v.shape and q.shape[:2] == k.shape[:2] and q.shape[3] == k.shape[3] and bool(k.numel)


@rule("_scaled_dot_product_flash_attention_for_cpu_backward", placed=True)
def _attention_backward(
    grad: Geometry, q: Geometry, k: Geometry, v: Geometry, out: Geometry, logsumexp: Geometry, dropout: float,
    causal: bool, *, attn_mask: Geometry | None = None, scale: float | None = None, on: On,
) -> tuple[Result, ...] | None:  # fmt: skip
    if not on.is_cpu or not _is_attention(q, k, v) or attn_mask is not None or dropout:
        return None
    if _one_dtype(grad, q, out) is None or not grad.shape == out.shape == q.shape:
        return None
    if logsumexp.shape != q.shape[:3] or logsumexp.dtype is not _summed(q):
        return None
    return tuple(Result(g.shape, dense_in_order(g.shape, (3, 1, 2, 0)), g.dtype) for g in (q, k, v))


def _convolved(x: Geometry, weight: Geometry, stride: Any, padding: Any, dilation: Any, groups: int) -> Shape | None:
    """The shape of a convolution of row-major images of more than one pixel and channel."""
    if _one_dtype(x, weight) is None or len(x.shape) != 4 or len(weight.shape) != 4:
        return None
    if not (is_plain(x) and is_plain(weight)) or x.shape[1] != weight.shape[1] * groups or weight.shape[0] % groups:
        return None
    spatial = []
    for axis in range(2):
        s, p, d = (value[axis if len(value) > 1 else 0] for value in (stride, padding, dilation))
        if s < 1 or p < 0 or d < 1:
            return None
        spatial.append((x.shape[2 + axis] + 2 * p - d * (weight.shape[2 + axis] - 1) - 1) // s + 1)
    shape = (x.shape[0], weight.shape[0], *spatial)
    return shape if min(*x.shape[1:], *shape[1:]) > 1 and min(*x.shape, *shape) > 0 else None


@rule("convolution")
def _convolution(
    x: Geometry, weight: Geometry, bias: Geometry | None, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> Result | None:  # fmt: skip
    if transposed or any(output_padding) or x.dtype not in _WIDE:
        return None
    if bias is not None and (bias.dtype is not x.dtype or bias.shape != weight.shape[:1]):
        return None
    shape = _convolved(x, weight, stride, padding, dilation, groups)
    return None if shape is None else plain(shape, x.dtype)


@rule("convolution_backward")
def _convolution_backward(
    grad: Geometry, x: Geometry, weight: Geometry, bias_sizes: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, mask: Sequence[bool],
) -> tuple[Result | None, ...] | None:  # fmt: skip
    if transposed or any(output_padding) or x.dtype not in _WIDE or grad.dtype is not x.dtype or not is_plain(grad):
        return None
    if _convolved(x, weight, stride, padding, dilation, groups) != grad.shape:
        return None
    shapes = (x.shape, weight.shape, weight.shape[:1])
    return tuple(plain(shape, x.dtype) if wanted else None for shape, wanted in zip(shapes, mask, strict=True))


def _by_stride(dims: Sequence[int], strides: Shape) -> list[int]:
    """Outermost first; of equal strides the earlier one."""
    return sorted(dims, key=lambda dim: -strides[dim])


def _batches(rank: int, dims: Sequence[int]) -> list[int]:
    """The dimensions that are not transformed, in the order that counts among equal strides: the last ones fill the
    places of transformed ones before them."""
    order, first, last = list(range(rank)), 0, rank - 1
    while True:
        while first <= last and order[first] not in dims:
            first += 1
        while first < last and order[last] in dims:
            last -= 1
        if first >= last:
            return order[:first]
        order[first], order[last] = order[last], order[first]


def _transformed(shape: Shape, strides: Shape, dims: Sequence[int]) -> Shape:
    """Strides of a result of this shape: batch dimensions in their old order, then `dims`, the last one innermost."""
    batch = _by_stride(_batches(len(shape), dims), strides)
    return dense_in_order(shape, tuple(reversed((*batch, *dims))))


def _canonical(x: Geometry, dims: Sequence[int]) -> list[int] | None:
    """Dimensions counted from 0; None where these rules do not cover the call."""
    rank = len(x.shape)
    if not dims or not all(x.shape) or not all(-rank <= dim < rank for dim in dims):
        return None
    found = [dim % rank for dim in dims]
    return found if len(set(found)) == len(found) else None


def _is_mkl(on: On) -> bool:
    return on.is_cpu and torch.backends.mkl.is_available()


@rule("_fft_c2c", placed=True)
def _complex(x: Geometry, dims: Sequence[int], normalization: int, forward: bool, *, on: On) -> Result | None:
    found = _canonical(x, dims)
    if found is None or not x.dtype.is_complex or not _is_mkl(on):
        return None
    return Result(x.shape, _transformed(x.shape, x.strides, _by_stride(found, x.strides)), x.dtype)


@rule("_fft_r2c", placed=True)
def _from_real(x: Geometry, dims: Sequence[int], normalization: int, onesided: bool, *, on: On) -> Result | None:
    found = _canonical(x, dims)
    if found is None or x.dtype not in (torch.float32, torch.float64) or not _is_mkl(on):
        return None
    *others, last = found
    size = x.shape[last] // 2 + 1 if onesided else x.shape[last]
    shape = (*x.shape[:last], size, *x.shape[last + 1 :])
    return Result(shape, _transformed(shape, x.strides, [*_by_stride(others, x.strides), last]), x.dtype.to_complex())


@rule("_fft_c2r", placed=True)
def _to_real(x: Geometry, dims: Sequence[int], normalization: int, last_size: int, *, on: On) -> Result | None:
    found = _canonical(x, dims)
    if found is None or x.dtype not in (torch.complex64, torch.complex128) or last_size < 1 or not _is_mkl(on):
        return None
    *others, last = found
    strides = _transformed(x.shape, x.strides, _by_stride(others, x.strides)) if others else x.strides
    shape = (*x.shape[:last], last_size, *x.shape[last + 1 :])
    return Result(shape, _transformed(shape, strides, [last]), x.dtype.to_real())


__all__: list[str] = []

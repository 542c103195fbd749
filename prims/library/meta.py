"""Metadata rules of primitives that are one library call: (attrs, operand metas...) -> result metas.

Invariant: as in `prims/meta_rules.py`, sizes are computed with +, -, *, // and ==, so that a symbolic size is as good
as an int. Strides are those that ATen gives operands that lie without gaps in a common layout: row-major, channels
last where the operand lies so, column-major where LAPACK writes the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchlazy.prims.errors import MetaError
from torchlazy.prims.library import attrs as la
from torchlazy.prims.meta import Dim, TensorMeta, contiguous_strides
from torchlazy.prims.meta_rules import like

Metas = tuple[TensorMeta | None, ...]
Shape = tuple[Dim, ...]


def need(holds: object, what: str) -> None:
    """MetaError unless it holds; a relation between symbols that nobody can decide is let through."""
    if holds is False or holds == False:  # noqa: E712 - sympy's false is another object
        raise MetaError(what)


def need_rank(x: TensorMeta, *ranks: int) -> None:
    need(x.rank in ranks, f"{x} has rank {x.rank}, needed: {' or '.join(map(str, ranks))}")


def is_floating(x: TensorMeta) -> None:
    """MetaError unless x is real floating point."""
    need(x.dtype.is_floating_point, f"the operand must be floating point, not {x.dtype}; convert it first")


def need_one_dtype(*xs: TensorMeta) -> None:
    for x in xs[1:]:
        need(x.dtype == xs[0].dtype, f"dtypes {xs[0].dtype} and {x.dtype} differ; convert the operands first")


def channels_last_strides(shape: Shape) -> Shape:
    """Strides of (n, c, *spatial) with the channel innermost."""
    inner = contiguous_strides((shape[0], *shape[2:], shape[1]))
    return (inner[0], inner[-1], *inner[1:-1])


def is_channels_last(x: TensorMeta) -> bool:
    """Whether x has rank 4 or 5, lies with its channels innermost, and not row-major as well."""
    if x.rank not in (4, 5) or x.strides == contiguous_strides(x.shape):
        return False
    pairs = zip(x.shape, x.strides, channels_last_strides(x.shape), strict=True)
    return all(size == 1 or a == b for size, a, b in pairs)


def laid_like(result: TensorMeta, *xs: TensorMeta) -> TensorMeta:
    """`result` with its channels innermost where one of `xs` lies so."""
    if result.rank in (4, 5) and any(map(is_channels_last, xs)):
        return TensorMeta(result.shape, result.dtype, channels_last_strides(result.shape), result.device)
    return result


def column_major(result: TensorMeta) -> TensorMeta:
    """Matrices one column after the other, as LAPACK writes them."""
    *batch, rows, columns = result.shape
    turned = contiguous_strides((*batch, columns, rows))
    return TensorMeta(result.shape, result.dtype, (*turned[:-2], turned[-1], turned[-2]), result.device)


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of absolute values."""
    return dtype.to_real() if dtype.is_complex else dtype


# --- pointwise and like the operand ---


def same(attrs: Any, x: TensorMeta, *rest: TensorMeta) -> TensorMeta:
    """The shape and dtype of the first operand, which its other operands write into or stand beside."""
    return kept(x)


def kept(x: TensorMeta, dtype: torch.dtype | None = None) -> TensorMeta:
    """x in the layout that elementwise operators keep: its own if it is row-major or channels last."""
    return laid_like(like(x, dtype=dtype), x)


def floats(attrs: Any, *xs: TensorMeta) -> TensorMeta:
    """Floating-point operands of one shape and dtype, result the same."""
    is_floating(xs[0])
    need_one_dtype(*xs)
    for x in xs[1:]:
        need(x.shape == xs[0].shape, f"shapes {xs[0].shape} and {x.shape} differ; broadcast the operands first")
    return kept(xs[0])


def integers(attrs: Any, x: TensorMeta, y: TensorMeta) -> TensorMeta:
    """Integer operands of one shape and dtype, result the same."""
    need(not x.dtype.is_floating_point and x.dtype != torch.bool, f"the operands must be integers, not {x.dtype}")
    need_one_dtype(x, y)
    need(x.shape == y.shape, f"shapes {x.shape} and {y.shape} differ; broadcast the operands first")
    return kept(x)


def frexp(attrs: Any, x: TensorMeta) -> Metas:
    """Floating point in; mantissa, and exponent as int32."""
    is_floating(x)
    return kept(x), kept(x, torch.int32)


# --- products ---


def mm(attrs: Any, a: TensorMeta, b: TensorMeta) -> TensorMeta:
    """[n, k] and [k, m] -> [n, m]."""
    need_rank(a, 2)
    need_rank(b, 2)
    need_one_dtype(a, b)
    need(a.shape[1] == b.shape[0], f"inner sizes {a.shape[1]} and {b.shape[0]} differ; transpose an operand?")
    return like(a, (a.shape[0], b.shape[1]))


def int_mm(attrs: Any, a: TensorMeta, b: TensorMeta) -> TensorMeta:
    """int8 [n, k] and [k, m] -> int32 [n, m]."""
    need(a.dtype == torch.int8, f"the operands must be int8, not {a.dtype}")
    return like(mm(attrs, a, b), dtype=torch.int32)


def mm_out_dtype(attrs: la.OutDtypeAttrs, a: TensorMeta, b: TensorMeta) -> TensorMeta:
    """[n, k] and [k, m] -> [n, m] of the dtype asked for."""
    return like(mm(attrs, a, b), dtype=attrs.out_dtype)


def bmm(attrs: Any, a: TensorMeta, b: TensorMeta) -> TensorMeta:
    """[batch, n, k] and [batch, k, m] -> [batch, n, m]."""
    need_rank(a, 3)
    need_rank(b, 3)
    need_one_dtype(a, b)
    need(a.shape[0] == b.shape[0], f"batches {a.shape[0]} and {b.shape[0]} differ")
    need(a.shape[2] == b.shape[1], f"inner sizes {a.shape[2]} and {b.shape[1]} differ; transpose an operand?")
    return like(a, (a.shape[0], a.shape[1], b.shape[2]))


def mv(attrs: Any, a: TensorMeta, b: TensorMeta) -> TensorMeta:
    """[n, k] and [k] -> [n]."""
    need_rank(a, 2)
    need_rank(b, 1)
    need_one_dtype(a, b)
    need(a.shape[1] == b.shape[0], f"inner sizes {a.shape[1]} and {b.shape[0]} differ")
    return like(a, a.shape[:1])


def _with_bias(product: Callable[..., TensorMeta]) -> Callable[..., TensorMeta]:
    def biased(attrs: Any, bias: TensorMeta, a: TensorMeta, b: TensorMeta) -> TensorMeta:
        """The product's shape; the bias has it too, or broadcasts to it inside of the library."""
        need_one_dtype(bias, a)
        result = product(attrs, a, b)
        need(bias.rank <= result.rank, f"the bias {bias} has more dimensions than the product {result}")
        for size, wanted in zip(reversed(bias.shape), reversed(result.shape), strict=False):
            need(size == 1 or size == wanted, f"the bias {bias} does not broadcast to the product {result}")
        return result

    return biased


addmm, baddbmm, addmv = _with_bias(mm), _with_bias(bmm), _with_bias(mv)


def spread(values: Shape, count: int) -> Shape:
    """One number for each dimension; a single one counts for all."""
    return values * count if len(values) == 1 else values


def convolution(attrs: la.ConvolutionAttrs, x: TensorMeta, weight: TensorMeta, *bias: TensorMeta) -> TensorMeta:
    """[n, c, *size] and [o, c / groups, *kernel] -> [n, o, *windows]; transposed: weight [c, o / groups, *kernel]."""
    need(x.rank == weight.rank and x.rank >= 3, f"input {x} and weight {weight} must have one rank, 3 to 5")
    need_one_dtype(x, weight, *bias)
    n = x.rank - 2
    stride, padding, dilation, extra = (
        spread(v, n) for v in (attrs.stride, attrs.padding, attrs.dilation, attrs.output_padding)
    )
    sizes: list[Dim] = []
    for size, k, s, p, d, e in zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, extra, strict=True):
        if attrs.transposed:
            sizes.append((size - 1) * s - 2 * p + d * (k - 1) + e + 1)
        else:
            sizes.append((size + 2 * p - d * (k - 1) - 1) // s + 1)
    channels = weight.shape[1] * attrs.groups if attrs.transposed else weight.shape[0]
    return laid_like(like(x, (x.shape[0], channels, *sizes)), x, weight)


def convolution_backward(
    attrs: la.ConvolutionBackwardAttrs, grad: TensorMeta, x: TensorMeta, weight: TensorMeta
) -> Metas:
    """The gradients of input, weight and bias; None for those not asked for."""
    need_one_dtype(grad, x, weight)
    parts = (laid_like(like(x), x, weight), laid_like(like(weight), x, weight), like(grad, (grad.shape[1],)))
    return tuple(part if wanted else None for part, wanted in zip(parts, attrs.output_mask, strict=True))


def cdist(attrs: la.CdistAttrs, x: TensorMeta, y: TensorMeta) -> TensorMeta:
    """[*batch, n, k] and [*batch, m, k] -> [*batch, n, m]."""
    need_one_dtype(x, y)
    need(x.shape[:-2] == y.shape[:-2], f"batches {x.shape[:-2]} and {y.shape[:-2]} differ; broadcast them first")
    return like(x, (*x.shape[:-1], y.shape[-2]))


def cdist_backward(
    attrs: la.NormOrderAttrs, grad: TensorMeta, x: TensorMeta, y: TensorMeta, distance: TensorMeta
) -> TensorMeta:
    """The gradient of the first operand."""
    return like(x)


def attention(
    attrs: la.AttentionAttrs, query: TensorMeta, key: TensorMeta, value: TensorMeta, *mask: TensorMeta
) -> Metas:
    """[batch, heads, length, width] -> the same, laid out as query, and logsumexp of the rows."""
    need_rank(query, 4)
    need_one_dtype(query, key, value)
    batch, heads, length, width = query.shape
    need(key.shape[-1] == width, f"widths {width} and {key.shape[-1]} of query and key differ")
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    rows = contiguous_strides((batch, length, heads))
    sums = TensorMeta((batch, heads, length), wide, (rows[0], rows[2], rows[1]), query.device)
    return query, sums


def attention_backward(
    attrs: la.AttentionAttrs, grad: TensorMeta, query: TensorMeta, key: TensorMeta, value: TensorMeta,
    *rest: TensorMeta,
) -> Metas:  # fmt: skip
    """The gradients of query, key and value, laid out [batch, length, heads, width]."""

    def turned(x: TensorMeta) -> TensorMeta:
        batch, heads, length, width = x.shape
        inner = contiguous_strides((batch, length, heads, width))
        return TensorMeta(x.shape, x.dtype, (inner[0], inner[2], inner[1], inner[3]), x.device)

    return turned(query), turned(key), turned(value)


# --- scans and order ---


def _axis(dim: int, x: TensorMeta) -> int:
    need(0 <= dim < max(x.rank, 1), f"dim {dim} of {x}")
    return dim


def scan(attrs: la.DimAttrs, x: TensorMeta) -> TensorMeta:
    """Shape and dtype kept."""
    _axis(attrs.dim, x)
    return kept(x)


def accumulate(attrs: la.AccumulateAttrs, x: TensorMeta) -> TensorMeta:
    """Shape and dtype kept; the dtype is told beside."""
    need(attrs.dtype == x.dtype, f"the attribute dtype is {attrs.dtype}, the operand's {x.dtype}; convert it first")
    _axis(attrs.dim, x)
    return kept(x)


def scan_positions(attrs: la.DimAttrs, x: TensorMeta) -> Metas:
    """Values, and their int64 positions, row-major."""
    _axis(attrs.dim, x)
    return like(x), like(x, dtype=torch.int64)


def sort(attrs: la.SortAttrs, x: TensorMeta) -> Metas:
    """Values, and the int64 positions that they come from."""
    _axis(attrs.dim, x)
    return kept(x), kept(x, torch.int64)


def topk(attrs: la.TopkAttrs, x: TensorMeta) -> Metas:
    """k values along the axis, and the int64 positions that they come from."""
    axis = _axis(attrs.dim, x)
    shape = (*x.shape[:axis], attrs.k, *x.shape[axis + 1 :]) if x.rank else ()
    return like(x, shape), like(x, shape, torch.int64)


def _dropped(x: TensorMeta, dim: int, keepdim: bool) -> Shape:
    axis = _axis(dim, x)
    if not x.rank:
        return ()
    return (*x.shape[:axis], *((1,) if keepdim else ()), *x.shape[axis + 1 :])


def select(attrs: la.KthAttrs | la.KeptDimAttrs, x: TensorMeta) -> Metas:
    """One value for each line along the axis, and its int64 position."""
    shape = _dropped(x, attrs.dim, attrs.keepdim)
    return like(x, shape), like(x, shape, torch.int64)


def select_all(attrs: Any, x: TensorMeta) -> TensorMeta:
    """One value."""
    return like(x, ())


def search(attrs: la.SearchAttrs, sequence: TensorMeta, x: TensorMeta, *sorter: TensorMeta) -> TensorMeta:
    """For each element of x its place in the sequence, int64 or int32."""
    return like(x, dtype=torch.int32 if attrs.out_int32 else torch.int64)


def histogram(attrs: la.HistcAttrs, x: TensorMeta) -> TensorMeta:
    """One count for each bin, in the operand's dtype."""
    return like(x, (attrs.bins,))


# --- positions ---


def scatter(attrs: Any, x: TensorMeta, index: TensorMeta, *source: TensorMeta) -> TensorMeta:
    """The first operand with elements replaced: its shape, dtype and layout."""
    need(not index.dtype.is_floating_point, f"positions must be integers, not {index.dtype}")
    for src in source:
        need(src.dtype == x.dtype, f"values of {src.dtype} into {x.dtype}; convert them first")
    return kept(x)


def masked_scatter(attrs: Any, x: TensorMeta, mask: TensorMeta, source: TensorMeta) -> TensorMeta:
    """The first operand with the elements under the mask replaced one after the other."""
    need(mask.dtype == torch.bool, f"the mask must be bool, not {mask.dtype}")
    need(source.dtype == x.dtype, f"values of {source.dtype} into {x.dtype}; convert them first")
    need(mask.shape == x.shape, f"mask {mask.shape} and operand {x.shape} differ; broadcast them first")
    return kept(x)


def index_put(attrs: la.IndexPutAttrs, x: TensorMeta, *rest: TensorMeta) -> TensorMeta:
    """The first operand with elements replaced; between it and the values the index tensors."""
    *indices, values = rest
    need(len(indices) == len(attrs.places), f"{len(indices)} index tensors for places {attrs.places}")
    need(values.dtype == x.dtype, f"values of {values.dtype} into {x.dtype}; convert them first")
    return kept(x)


def embedding_backward(attrs: la.EmbeddingBackwardAttrs, grad: TensorMeta, indices: TensorMeta) -> TensorMeta:
    """[*indices, width] and [*indices] -> [rows, width]."""
    return like(grad, (attrs.num_weights, grad.shape[-1]))


def embedding_bag(
    attrs: la.EmbeddingBagAttrs, weight: TensorMeta, indices: TensorMeta, offsets: TensorMeta, *samples: TensorMeta
) -> Metas:
    """[rows, width], [count], [bags] -> [bags, width], the bag of each index (unless it is not needed), bag sizes, and
    what the maximum was taken at."""
    bags = offsets.shape[0] - 1 if attrs.include_last_offset else offsets.shape[0]
    width = weight.shape[1]
    is_plain_sum = attrs.mode == 0 and attrs.padding_idx < 0 and weight.dtype != torch.float64
    each = like(indices, (0,) if is_plain_sum else indices.shape)
    sizes = like(indices, (bags,))
    return like(weight, (bags, width)), each, sizes, like(sizes, (bags, width) if attrs.mode == 2 else (bags,))


def embedding_bag_backward(attrs: la.EmbeddingBagDenseBackwardAttrs, grad: TensorMeta, *rest: TensorMeta) -> TensorMeta:
    """[bags, width] -> [rows, width]."""
    return like(grad, (attrs.num_weights, grad.shape[1]))


def embedding_bag_weights_backward(
    attrs: la.EmbeddingBagWeightsBackwardAttrs, grad: TensorMeta, weight: TensorMeta, indices: TensorMeta,
    offsets: TensorMeta, bags: TensorMeta,
) -> TensorMeta:  # fmt: skip
    """The gradient of each sample's weight."""
    return like(grad, indices.shape)

"""Reductions of ATen as reductions of prims, which always drop their axes.

Invariant: sums and products run in the accumulation dtype (float32 for the halves, int64 for integers and bool; of
squared deviations float64 on the CPU) and the result is rounded once; `keepdim` is a reshape. An empty list of axes
means all axes, except for `any` and `all`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch.fx import Node
from torchlazy.prims import ops as P
from torchlazy.prims.builder import Builder, rule
from torchlazy.prims.decomps.value import (
    Number,
    Value,
    canonical_axes,
    canonical_axis,
    compute,
    sum_dtype,
    value,
    welford,
)
from torchlazy.prims.promotion import compute_dtype
from torchlazy.prims.size_int import same_sizes

aten = torch.ops.aten
Axes: TypeAlias = "int | Sequence[int] | None"


def _float_result(dtype: torch.dtype) -> torch.dtype:
    """What integers become where ATen answers in floating point."""
    return dtype if dtype.is_floating_point else torch.get_default_dtype()


def _sum(x: Value, axes: Axes, keepdim: bool, dtype: torch.dtype | None) -> Node:
    """sum(x), in `dtype` when it is given: the input is rounded to it first, as ATen does."""
    result = dtype or sum_dtype(x.dtype)
    total = x.to(result).to(compute_dtype(result)).sum(canonical_axes(axes, x.rank), keepdim=keepdim)
    return total.to(result).node


@rule(aten.sum.default)
def sum_all(b: Builder, x: Node, *, dtype: torch.dtype | None = None) -> Node:
    return _sum(value(b, x), None, False, dtype)


@rule(aten.sum.dim_IntList)
def sum_dims(b: Builder, x: Node, dim: Axes, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Node:
    return _sum(value(b, x), dim, keepdim, dtype)


@rule(aten.nansum.default)
def nansum(b: Builder, x: Node, dim: Axes = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Node:
    """sum(where(isnan(x), 0, x))"""
    v = value(b, x)
    if v.dtype.is_floating_point:
        wide = compute(b, x)
        v = wide.isnan().where(0, wide).to(v.dtype)
    return _sum(v, dim, keepdim, dtype)


def _mean(x: Value, axes: Axes, keepdim: bool, dtype: torch.dtype | None) -> Node:
    """sum(x) / n, rounded once"""
    result = dtype or x.dtype
    mean = x.to(result).to(compute_dtype(result)).mean(canonical_axes(axes, x.rank), keepdim=keepdim)
    return mean.to(result).node


@rule(aten.mean.default)
def mean_all(b: Builder, x: Node, *, dtype: torch.dtype | None = None) -> Node:
    return _mean(value(b, x), None, False, dtype)


@rule(aten.mean.dim)
def mean_dims(b: Builder, x: Node, dim: Axes, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Node:
    return _mean(value(b, x), dim, keepdim, dtype)


def _prod(x: Value, axes: Axes, keepdim: bool, dtype: torch.dtype | None) -> Node:
    result = dtype or sum_dtype(x.dtype)
    product = x.to(result).to(compute_dtype(result)).prod(canonical_axes(axes, x.rank), keepdim=keepdim)
    return product.to(result).node


@rule(aten.prod.default)
def prod_all(b: Builder, x: Node, *, dtype: torch.dtype | None = None) -> Node:
    return _prod(value(b, x), None, False, dtype)


@rule(aten.prod.dim_int)
def prod_dim(b: Builder, x: Node, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Node:
    return _prod(value(b, x), dim, keepdim, dtype)


def _extreme(x: Value, axes: Sequence[int], keepdim: bool, *, largest: bool) -> Node:
    """The largest or smallest element; over bool that is `any` or `all`, the halves compare exactly in float32."""
    if x.dtype == torch.bool:
        return (x.any if largest else x.all)(axes, keepdim=keepdim).node
    wide = x.to(compute_dtype(x.dtype))
    return (wide.amax if largest else wide.amin)(axes, keepdim=keepdim).to(x.dtype).node


@rule(aten.amax.default)
def amax(b: Builder, x: Node, dim: Axes = (), keepdim: bool = False) -> Node:
    v = value(b, x)
    return _extreme(v, canonical_axes(dim, v.rank), keepdim, largest=True)


@rule(aten.amin.default)
def amin(b: Builder, x: Node, dim: Axes = (), keepdim: bool = False) -> Node:
    v = value(b, x)
    return _extreme(v, canonical_axes(dim, v.rank), keepdim, largest=False)


@rule(aten.max.default)
def max_all(b: Builder, x: Node) -> Node:
    v = value(b, x)
    return _extreme(v, range(v.rank), False, largest=True)


@rule(aten.min.default)
def min_all(b: Builder, x: Node) -> Node:
    v = value(b, x)
    return _extreme(v, range(v.rank), False, largest=False)


@rule(aten.aminmax.default)
def aminmax(b: Builder, x: Node, *, dim: int | None = None, keepdim: bool = False) -> tuple[Node, Node]:
    v = value(b, x)
    axes = canonical_axes(dim, v.rank)
    return _extreme(v, axes, keepdim, largest=False), _extreme(v, axes, keepdim, largest=True)


def _position(x: Value, dim: int | None, keepdim: bool, *, largest: bool) -> Node:
    """The index of the first extreme element (a NaN is more extreme than any number)."""
    prim = P.argmax if largest else P.argmin
    axes = tuple(range(x.rank)) if dim is None else canonical_axes(dim, x.rank)
    if not axes:
        return x.b.full_like(x.node, 0, torch.int64)
    ordered = x.to(torch.uint8 if x.dtype == torch.bool else compute_dtype(x.dtype))
    found = Value(x.b, x.b.prim(prim, ordered.node, axes=axes))
    return found.reshape(x.kept_shape(axes)).node if keepdim else found.node


@rule(aten.argmax.default)
def argmax(b: Builder, x: Node, dim: int | None = None, keepdim: bool = False) -> Node:
    return _position(value(b, x), dim, keepdim, largest=True)


@rule(aten.argmin.default)
def argmin(b: Builder, x: Node, dim: int | None = None, keepdim: bool = False) -> Node:
    return _position(value(b, x), dim, keepdim, largest=False)


@rule(aten.max.dim)
def max_dim(b: Builder, x: Node, dim: int, keepdim: bool = False) -> tuple[Node, Node]:
    v = value(b, x)
    extreme = _extreme(v, canonical_axes(dim, v.rank), keepdim, largest=True)
    return extreme, _position(v, dim, keepdim, largest=True)


@rule(aten.min.dim)
def min_dim(b: Builder, x: Node, dim: int, keepdim: bool = False) -> tuple[Node, Node]:
    v = value(b, x)
    extreme = _extreme(v, canonical_axes(dim, v.rank), keepdim, largest=False)
    return extreme, _position(v, dim, keepdim, largest=False)


def _logical(b: Builder, x: Node, axes: tuple[int, ...], keepdim: bool, *, every: bool) -> Node:
    """any or all of x != 0; the result is bool, except that uint8 stays uint8."""
    v = value(b, x)
    holds = v.to(torch.bool)
    found = (holds.all if every else holds.any)(axes, keepdim=keepdim)
    return found.to(torch.uint8 if v.dtype == torch.uint8 else torch.bool).node


@rule(aten.any.default)
def any_all(b: Builder, x: Node) -> Node:
    return _logical(b, x, canonical_axes(None, b.meta(x).rank), False, every=False)


@rule(aten.any.dim, aten.any.dims)
def any_dims(b: Builder, x: Node, dim: Axes = None, keepdim: bool = False) -> Node:
    return _logical(b, x, canonical_axes(dim, b.meta(x).rank, empty_means_all=False), keepdim, every=False)


@rule(aten.all.default)
def all_all(b: Builder, x: Node) -> Node:
    return _logical(b, x, canonical_axes(None, b.meta(x).rank), False, every=True)


@rule(aten.all.dim, aten.all.dims)
def all_dims(b: Builder, x: Node, dim: Axes = None, keepdim: bool = False) -> Node:
    return _logical(b, x, canonical_axes(dim, b.meta(x).rank, empty_means_all=False), keepdim, every=True)


def _count_nonzero(b: Builder, x: Node, axes: Axes) -> Node:
    v = value(b, x)
    return v.to(torch.bool).to(torch.int64).sum(canonical_axes(axes, v.rank)).node


@rule(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def count_nonzero(b: Builder, x: Node, dim: Axes = None) -> Node:
    return _count_nonzero(b, x, dim)


def _moments(b: Builder, x: Node, dim: Axes, correction: Number | None, keepdim: bool) -> tuple[Value, Value] | None:
    """Variance (sum of squared distances / max(n - correction, 0)) and mean, in the dtype that ATen accumulates in.

    That is float64 on the CPU, whatever the operand: the deviation of float32 numbers near 1e20 is finite there,
    although the square of it is none of float32's. On a GPU it is float32."""
    v = value(b, x, torch.float64) if b.meta(x).device == "cpu" else compute(b, x)
    if isinstance(correction, Node):
        return None  # a correction that changes from run to run is not worth a runtime scalar
    axes = canonical_axes(dim, v.rank)
    freedom = max(v.count(axes) - (1 if correction is None else correction), 0)
    if v.count(axes) == 0:
        empty = v.sum(axes, keepdim=keepdim) + math.nan
        return empty, empty
    mean, m2 = welford(v, axes, keepdim=keepdim)
    if axes and v.count(axes) != 1:
        mean = m2.isnan().where(math.nan, mean)  # beside an infinity, as ATen updates it by differences
    return m2 / freedom, mean


def _variance(b: Builder, x: Node, dim: Axes, correction: Number | None, keepdim: bool, *, root: bool) -> Node | None:
    moments = _moments(b, x, dim, correction, keepdim)
    if moments is None:
        return None
    spread = moments[0].sqrt() if root else moments[0]
    return spread.to(b.meta(x).dtype).node


def _variance_mean(
    b: Builder, x: Node, dim: Axes, correction: Number | None, keepdim: bool, *, root: bool
) -> tuple[Node, Node] | None:
    moments = _moments(b, x, dim, correction, keepdim)
    if moments is None:
        return None
    spread, mean = moments
    dtype = b.meta(x).dtype
    return (spread.sqrt() if root else spread).to(dtype).node, mean.to(dtype).node


def _register_variance(name: str, rule_body: Callable[..., object], root: bool) -> None:
    """The three overloads of var, std, var_mean and std_mean, as one body with a correction."""
    packet = getattr(aten, name)

    @rule(packet.default)
    def over_all(b: Builder, x: Node, unbiased: bool = True) -> object:
        return rule_body(b, x, None, int(unbiased), False, root=root)

    @rule(packet.dim)
    def over_dims(b: Builder, x: Node, dim: Axes, unbiased: bool = True, keepdim: bool = False) -> object:
        return rule_body(b, x, dim, int(unbiased), keepdim, root=root)

    @rule(packet.correction)
    def corrected(
        b: Builder, x: Node, dim: Axes = None, *, correction: Number | None = None, keepdim: bool = False
    ) -> object:
        return rule_body(b, x, dim, correction, keepdim, root=root)


_register_variance("var", _variance, root=False)
_register_variance("std", _variance, root=True)
_register_variance("var_mean", _variance_mean, root=False)
_register_variance("std_mean", _variance_mean, root=True)


def norm_over(x: Value, order: float, axes: tuple[int, ...], keepdim: bool) -> Value:
    """(sum |x|^p)^(1/p) in the dtype of `x`, with the limits for 0 (count of nonzeros) and the infinities."""
    if order == 0:
        return x.ne(0).to(x.dtype).sum(axes, keepdim=keepdim)
    if axes and same_sizes((1,) * len(axes), [x.shape[axis] for axis in axes]):
        return abs(x).amax(axes, keepdim=keepdim)  # of one element: no power of it can overflow
    if order == math.inf:
        return abs(x).amax(axes, keepdim=keepdim)
    if order == -math.inf:
        return abs(x).amin(axes, keepdim=keepdim)
    if order == 1:
        return abs(x).sum(axes, keepdim=keepdim)
    if order == 2:
        return (x * x).sum(axes, keepdim=keepdim).sqrt()
    return (abs(x) ** order).sum(axes, keepdim=keepdim) ** (1.0 / order)


@rule(aten.linalg_vector_norm.default)
def vector_norm(
    b: Builder, x: Node, ord: Number = 2, dim: Axes = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Node | None:
    v = value(b, x)
    if isinstance(ord, Node):
        return None
    result = dtype or v.dtype
    wide = v.to(result).to(compute_dtype(result))
    return norm_over(wide, float(ord), canonical_axes(dim, v.rank), keepdim).to(result).node


@rule(aten.norm.Scalar)
def norm_all(b: Builder, x: Node, p: Number = 2) -> Node | None:
    return vector_norm(b, x, p)


@rule(aten.norm.ScalarOpt_dim)
def norm_dims(b: Builder, x: Node, p: Number | None, dim: Axes, keepdim: bool = False) -> Node | None:
    return vector_norm(b, x, 2 if p is None else p, dim, keepdim)


@rule(aten.norm.ScalarOpt_dim_dtype)
def norm_dims_dtype(
    b: Builder, x: Node, p: Number | None, dim: Axes, keepdim: bool, *, dtype: torch.dtype
) -> Node | None:
    return vector_norm(b, x, 2 if p is None else p, dim, keepdim, dtype=dtype)


@rule(aten.norm.ScalarOpt_dtype)
def norm_all_dtype(b: Builder, x: Node, p: Number | None, *, dtype: torch.dtype) -> Node | None:
    return vector_norm(b, x, 2 if p is None else p, dtype=dtype)


@rule(aten.dist.default)
def dist(b: Builder, x: Node, other: Node, p: Number = 2) -> Node | None:
    """norm(x - other)"""
    return None if isinstance(p, Node) else vector_norm(b, b.aten(aten.sub.Tensor, x, other), p)


@rule(aten.logsumexp.default)
def logsumexp(b: Builder, x: Node, dim: Axes, keepdim: bool = False) -> Node:
    """m + log(sum(exp(x - m))) with m = max(x), or 0 where the maximum is infinite"""
    result = _float_result(b.meta(x).dtype)
    v = value(b, x, compute_dtype(result))
    axes = canonical_axes(dim, v.rank)
    if v.count(axes) == 0:
        return v.sum(axes, keepdim=keepdim).log().to(result).node
    largest, total = (Value(b, part) for part in b.prim(P.logsumexp, v.node, axes=axes))
    found = (total.log() + largest.isinf().where(0, largest)).to(result)
    return (found.reshape(v.kept_shape(axes)) if keepdim else found).node


@rule("_aminmax.default")
def aminmax_all(b: Builder, x: Node) -> tuple[Node, Node]:
    return aminmax(b, x)


@rule("_aminmax.dim")
def aminmax_dim(b: Builder, x: Node, dim: int, keepdim: bool = False) -> tuple[Node, Node]:
    return aminmax(b, x, dim=dim, keepdim=keepdim)


@rule("_is_all_true.default")
def is_all_true(b: Builder, x: Node) -> Node:
    return all_all(b, x)


@rule("_is_any_true.default")
def is_any_true(b: Builder, x: Node) -> Node:
    return any_all(b, x)


@rule("renorm.default")
def renorm(b: Builder, x: Node, p: Number, dim: int, maxnorm: Number) -> Node | None:
    """Each slice along `dim` whose p-norm is above the maximum times maximum / (norm + 1e-7)"""
    if isinstance(p, Node) or isinstance(maxnorm, Node):
        return None
    v = compute(b, x)
    axis = canonical_axis(dim, v.rank)
    norm = norm_over(v, float(p), tuple(i for i in range(v.rank) if i != axis), True)
    factor = norm.gt(float(maxnorm)).where(float(maxnorm) / (norm + 1e-7), 1.0)
    return (v * factor.broadcast(v.shape)).to(b.dtype(x)).node

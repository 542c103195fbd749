"""Metadata rules of the primitives: (attrs, operand metas...) -> result meta.

Invariant: rules compute on sizes only with +, -, *, // and ==, so that a symbolic size is as good as an int. Result
strides are contiguous: whoever stands for an ATen result gets eager's strides stamped on afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchlazy.prims import attrs as at
from torchlazy.prims.errors import MetaError
from torchlazy.prims.meta import Dim, TensorMeta, contiguous_strides, product

MetaRule = Callable[..., "TensorMeta | tuple[TensorMeta, ...]"]


def make(shape: tuple[Dim, ...], dtype: torch.dtype, device: str) -> TensorMeta:
    """A contiguous TensorMeta."""
    shape = tuple(shape)
    return TensorMeta(shape, dtype, contiguous_strides(shape), device)


def like(x: TensorMeta, shape: tuple[Dim, ...] | None = None, dtype: torch.dtype | None = None) -> TensorMeta:
    """`x` with another shape or dtype, contiguous."""
    return make(x.shape if shape is None else shape, x.dtype if dtype is None else dtype, x.device)


def _is_integral(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex


def _same(*xs: TensorMeta) -> TensorMeta:
    first = xs[0]
    for x in xs[1:]:
        if x.shape != first.shape:
            raise MetaError(f"shapes {first.shape} and {x.shape} differ; broadcast the operands first")
        if x.dtype != first.dtype:
            raise MetaError(f"dtypes {first.dtype} and {x.dtype} differ; convert the operands first")
        if x.device != first.device:
            raise MetaError(f"devices {first.device} and {x.device} differ; move one operand first")
    return first


def same(attrs: Any, *xs: TensorMeta) -> TensorMeta:
    """Equal operands, same shape and dtype out."""
    return like(_same(*xs))


def floats(attrs: Any, *xs: TensorMeta) -> TensorMeta:
    """Equal floating-point operands, same dtype out."""
    if not xs[0].dtype.is_floating_point:
        raise MetaError(f"operands must be floating point, not {xs[0].dtype}; convert them first")
    return like(_same(*xs))


def integral(attrs: Any, *xs: TensorMeta) -> TensorMeta:
    """Equal integer or bool operands, same dtype out."""
    if not _is_integral(xs[0].dtype):
        raise MetaError(f"operands must be integers or bool, not {xs[0].dtype}")
    return like(_same(*xs))


def predicate(attrs: Any, *xs: TensorMeta) -> TensorMeta:
    """Equal operands, bool out."""
    return like(_same(*xs), dtype=torch.bool)


def where(attrs: Any, condition: TensorMeta, a: TensorMeta, b: TensorMeta) -> TensorMeta:
    """bool condition, equal branches."""
    if condition.dtype != torch.bool:
        raise MetaError(f"the condition must be bool, not {condition.dtype}; compare it with 0 first")
    if condition.shape != a.shape:
        raise MetaError(f"condition has shape {condition.shape}, branches {a.shape}; broadcast them first")
    return like(_same(a, b))


def checked(attrs: at.CheckAttrs, x: TensorMeta, holds: TensorMeta) -> TensorMeta:
    """A value and a bool condition of its shape, the value's dtype out."""
    if holds.dtype != torch.bool:
        raise MetaError(f"the condition must be bool, not {holds.dtype}; compare it with 0 first")
    if holds.shape != x.shape:
        raise MetaError(f"condition has shape {holds.shape}, the value {x.shape}; broadcast them first")
    return like(x)


def convert(attrs: at.DtypeAttrs, x: TensorMeta) -> TensorMeta:
    """Another dtype."""
    return like(x, dtype=attrs.dtype)


def bitcast(attrs: at.DtypeAttrs, x: TensorMeta) -> TensorMeta:
    """Another dtype of the same size."""
    if attrs.dtype.itemsize != x.dtype.itemsize:
        raise MetaError(f"{x.dtype} and {attrs.dtype} have different sizes")
    return like(x, dtype=attrs.dtype)


def full(attrs: at.FullAttrs) -> TensorMeta:
    """The shape and dtype asked for."""
    return make(attrs.shape, attrs.dtype, attrs.device)


def iota(attrs: at.IotaAttrs) -> TensorMeta:
    """One dimension."""
    return make((attrs.length,), attrs.dtype, attrs.device)


def random_bits(attrs: at.RandomBitsAttrs) -> TensorMeta:
    """int32."""
    return make(attrs.shape, torch.int32, attrs.device)


def reshape(attrs: at.ShapeAttrs, x: TensorMeta) -> TensorMeta:
    """Same number of elements."""
    if product(attrs.shape) != x.numel:
        raise MetaError(f"shape {attrs.shape} has another number of elements than {x.shape}")
    return like(x, attrs.shape)


def permute(attrs: at.PermuteAttrs, x: TensorMeta) -> TensorMeta:
    """Dimensions reordered."""
    if sorted(attrs.dims) != list(range(x.rank)):
        raise MetaError(f"dims {attrs.dims} are not a permutation of {x.rank} dimensions")
    return like(x, tuple(x.shape[d] for d in attrs.dims))


def expand(attrs: at.ShapeAttrs, x: TensorMeta) -> TensorMeta:
    """Same rank; only sizes of 1 change."""
    if len(attrs.shape) != x.rank:
        raise MetaError(f"shape {attrs.shape} has another rank than {x.shape}; reshape first")
    for old, new in zip(x.shape, attrs.shape, strict=True):
        if old != new and old != 1:
            raise MetaError(f"size {old} cannot grow to {new}; only 1 can")
    return like(x, attrs.shape)


def _window(attrs: at.SliceAttrs, x: TensorMeta) -> tuple[Dim, ...]:
    if not len(attrs.starts) == len(attrs.stops) == len(attrs.steps) == x.rank:
        raise MetaError(f"starts, stops and steps must have {x.rank} entries each")
    sizes: list[Dim] = []
    for start, stop, step, size in zip(attrs.starts, attrs.stops, attrs.steps, x.shape, strict=True):
        concrete = all(isinstance(v, int) for v in (start, stop, step, size))
        if concrete and not (0 <= start <= stop <= size and step >= 1):
            raise MetaError(f"slice {start}:{stop}:{step} does not lie within size {size}")
        sizes.append((stop - start + step - 1) // step)
    return tuple(sizes)


def slice_(attrs: at.SliceAttrs, x: TensorMeta) -> TensorMeta:
    """ceil((stop - start) / step) in each dimension."""
    return like(x, _window(attrs, x))


def slice_scatter(attrs: at.SliceAttrs, x: TensorMeta, src: TensorMeta) -> TensorMeta:
    """`src` has the shape of the slice; the result that of `x`."""
    window = _window(attrs, x)
    if src.shape != window or src.dtype != x.dtype:
        raise MetaError(f"src is {src}, the slice of {x} has shape {window}")
    return like(x)


def axes_of(attrs: at.AxesAttrs, x: TensorMeta) -> tuple[int, ...]:
    """The axes, checked against the rank."""
    if len(set(attrs.axes)) != len(attrs.axes) or not all(0 <= axis < x.rank for axis in attrs.axes):
        raise MetaError(f"axes {attrs.axes} are not distinct axes of {x}")
    return attrs.axes


def flip(attrs: at.AxesAttrs, x: TensorMeta) -> TensorMeta:
    """Same shape."""
    axes_of(attrs, x)
    return like(x)


def pad(attrs: at.PadAttrs, x: TensorMeta) -> TensorMeta:
    """low + size + high in each dimension."""
    if not len(attrs.low) == len(attrs.high) == x.rank:
        raise MetaError(f"low and high must have {x.rank} entries each")
    if any(isinstance(v, int) and v < 0 for v in (*attrs.low, *attrs.high)):
        raise MetaError(f"negative padding {attrs.low}, {attrs.high}; slice instead")
    return like(x, tuple(lo + s + hi for lo, s, hi in zip(attrs.low, x.shape, attrs.high, strict=True)))


def cat(attrs: at.AxisAttrs, *xs: TensorMeta) -> TensorMeta:
    """Sizes add up along the axis; all else equal."""
    if not xs or not 0 <= attrs.axis < xs[0].rank:
        raise MetaError(f"axis {attrs.axis} of {len(xs)} operands")
    first, axis = xs[0], attrs.axis
    total: Dim = 0
    for x in xs:
        if (
            x.dtype != first.dtype
            or x.shape[:axis] + x.shape[axis + 1 :] != first.shape[:axis] + first.shape[axis + 1 :]
        ):
            raise MetaError(f"{first} and {x} differ in more than axis {axis}")
        total = total + x.shape[axis]
    return like(first, (*first.shape[:axis], total, *first.shape[axis + 1 :]))


def as_strided(attrs: at.AsStridedAttrs, x: TensorMeta) -> TensorMeta:
    """The window's shape; its last element must lie in the operand's memory."""
    if len(attrs.shape) != len(attrs.strides):
        raise MetaError(f"shape {attrs.shape} and strides {attrs.strides} have different ranks")
    return like(x, attrs.shape)


def as_strided_scatter(attrs: at.AsStridedAttrs, x: TensorMeta, src: TensorMeta) -> TensorMeta:
    """`src` has the window's shape; the result that of `x`."""
    if src.shape != attrs.shape or src.dtype != x.dtype:
        raise MetaError(f"src is {src}, the window has shape {attrs.shape} and dtype {x.dtype}")
    return like(x)


def _reduced(attrs: at.AxesAttrs, x: TensorMeta) -> tuple[Dim, ...]:
    axes = axes_of(attrs, x)
    return tuple(size for i, size in enumerate(x.shape) if i not in axes)


def reduce_same(attrs: at.AxesAttrs, x: TensorMeta) -> TensorMeta:
    """The axes are dropped, the dtype stays."""
    return like(x, _reduced(attrs, x))


def reduce_index(attrs: at.AxesAttrs, x: TensorMeta) -> TensorMeta:
    """The axes are dropped, int64."""
    return like(x, _reduced(attrs, x), torch.int64)


def reduce_bool(attrs: at.AxesAttrs, x: TensorMeta) -> TensorMeta:
    """bool in, the axes are dropped, bool out."""
    if x.dtype != torch.bool:
        raise MetaError(f"the operand must be bool, not {x.dtype}; compare it with 0 first")
    return like(x, _reduced(attrs, x))


def welford(attrs: at.AxesAttrs, x: TensorMeta) -> tuple[TensorMeta, ...]:
    """Floating point in; three results of the same dtype."""
    if not x.dtype.is_floating_point:
        raise MetaError(f"the operand must be floating point, not {x.dtype}")
    return (reduce_same(attrs, x),) * 3


def logsumexp(attrs: at.AxesAttrs, x: TensorMeta) -> tuple[TensorMeta, ...]:
    """Floating point in; two results of the same dtype."""
    return welford(attrs, x)[:2]


def gather(attrs: at.GatherAttrs, x: TensorMeta, index: TensorMeta) -> TensorMeta:
    """The shape of the index, the dtype of x."""
    if index.rank != x.rank or not 0 <= attrs.axis < x.rank or not _is_integral(index.dtype):
        raise MetaError(f"index {index} does not fit {x} at axis {attrs.axis}")
    return like(x, index.shape)


def index(attrs: at.IndexAttrs, x: TensorMeta, *indices: TensorMeta) -> TensorMeta:
    """The indexed dimensions give way to the common shape of the indices."""
    dims = attrs.dims
    if len(dims) != len(indices) or not dims:
        raise MetaError(f"{len(indices)} indices for dims {dims}")
    if dims != tuple(range(dims[0], dims[0] + len(dims))) or not 0 <= dims[0] <= dims[-1] < x.rank:
        raise MetaError(f"dims {dims} of {x} are not adjacent and increasing; permute first")
    for i in indices:
        if i.shape != indices[0].shape or not _is_integral(i.dtype) or i.dtype == torch.bool:
            raise MetaError(f"indices {indices[0]} and {i}: integers of one shape are needed")
    return like(x, x.shape[: dims[0]] + indices[0].shape + x.shape[dims[-1] + 1 :])

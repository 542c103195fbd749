"""Rules of operators that show the same elements under another shape.

Invariant: only view primitives are used, so that lowering can turn each into index arithmetic; sizes come from the
shape of the ATen result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torchlazy.prims import ops
from torchlazy.prims.builder import Builder, rule
from torchlazy.prims.meta import Dim
from torchlazy.prims.promotion import HALVES
from torchlazy.prims.size_int import clamped

aten = torch.ops.aten


def axis_of(axis: int, rank: int) -> int:
    """`axis` counted from the front; a 0-dim tensor has the axes 0 and -1."""
    return axis % max(rank, 1)


def bounds_of(size: Dim, start: int | None, stop: int | None) -> tuple[Dim, Dim]:
    """Python's slice bounds for a positive step, clamped to 0 <= start <= stop <= size."""

    def within(bound: int) -> Dim:
        return clamped(bound + size if bound < 0 else bound, 0, size)  # type: ignore[arg-type, operator]

    first = 0 if start is None else within(start)
    last = size if stop is None else within(stop)
    return first, clamped(last, first)  # type: ignore[arg-type]


def transposed(rank: int, first: int, second: int) -> tuple[int, ...]:
    """The permutation that exchanges two axes."""
    dims = list(range(rank))
    dims[first], dims[second] = dims[second], dims[first]
    return tuple(dims)


# --- other sizes ---


@rule(
    aten.view.default, aten._unsafe_view.default, "reshape.default", "_reshape_alias.default", "view_copy.default",
    "_reshape_copy.default", "_reshape_alias_copy.default", aten.unsqueeze.default, "unsqueeze_copy.default",
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, "squeeze_copy.default", "squeeze_copy.dim",
    "squeeze_copy.dims", "flatten.using_ints", "unflatten.int",
)  # fmt: skip
def reshape(b: Builder, x: fx.Node, *_: Any) -> fx.Node:
    """The elements in row-major order, in the result's shape"""
    return b.reshape(x, b.wanted.shape)


@rule(aten.expand.default, "expand_copy.default")
def expand(b: Builder, x: fx.Node, size: tuple[int, ...], *, implicit: bool = False) -> fx.Node:
    """Sizes of 1 and new leading dimensions repeated"""
    return b.broadcast(x, b.wanted.shape)


@rule("view.dtype", "view_copy.dtype")
def view_dtype(b: Builder, x: fx.Node, dtype: torch.dtype) -> fx.Node | None:
    """The same bits, where both dtypes have one size"""
    old = b.dtype(x)
    if old == dtype:
        return x
    if old.itemsize != dtype.itemsize or old.is_complex or dtype.is_complex:
        return None
    if any(other in (old, dtype) for other in (torch.bool, *HALVES)):  # in loops a half is float32: a NaN's bits change
        return None
    return b.prim(ops.bitcast, x, dtype=dtype)


# --- another order of axes ---


@rule(aten.permute.default, "permute_copy.default")
def permute(b: Builder, x: fx.Node, dims: tuple[int, ...]) -> fx.Node:
    """Axes reordered"""
    return b.permute(x, tuple(axis_of(d, len(dims)) for d in dims))


@rule(aten.transpose.int, "transpose_copy.int", "swapaxes.default", "swapdims.default")
def transpose(b: Builder, x: fx.Node, first: int, second: int) -> fx.Node:
    """Two axes exchanged"""
    rank = len(b.shape(x))
    return b.permute(x, transposed(rank, axis_of(first, rank), axis_of(second, rank))) if rank else x


@rule(aten.t.default, "t_copy.default")
def t(b: Builder, x: fx.Node) -> fx.Node:
    """A matrix transposed; vectors stay"""
    return b.permute(x, (1, 0)) if len(b.shape(x)) == 2 else x


@rule(aten.flip.default)
def flip(b: Builder, x: fx.Node, dims: tuple[int, ...]) -> fx.Node:
    """Reversed along axes"""
    rank = len(b.shape(x))
    axes = tuple(sorted({axis_of(d, rank) for d in dims}))
    return b.prim(ops.flip, x, axes=axes) if axes and rank else x


@rule("rot90.default")
def rot90(b: Builder, x: fx.Node, k: int = 1, dims: tuple[int, ...] = (0, 1)) -> fx.Node:
    """Turned by k quarters in the plane of two axes"""
    rank = len(b.shape(x))
    first, second = (axis_of(d, rank) for d in dims)
    if k % 4 == 0:
        return x
    if k % 4 == 2:
        return b.prim(ops.flip, x, axes=tuple(sorted((first, second))))
    flipped = b.prim(ops.flip, x, axes=(second if k % 4 == 1 else first,))
    return b.permute(flipped, transposed(rank, first, second))


# --- parts ---


@rule(aten.select.int, "select_copy.int")
def select(b: Builder, x: fx.Node, dim: int, index: int) -> fx.Node:
    """x[..., index, ...]"""
    axis = axis_of(dim, len(b.shape(x)))
    start = index + b.shape(x)[axis] if index < 0 else index
    return b.reshape(b.slice(x, axis, start, start + 1), b.wanted.shape)


@rule(aten.slice.Tensor, "slice_copy.Tensor")
def slice_(
    b: Builder, x: fx.Node, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> fx.Node:
    """x[..., start:end:step, ...]"""
    axis = axis_of(dim, len(b.shape(x)))
    return b.slice(x, axis, *bounds_of(b.shape(x)[axis], start, end), step)


@rule("narrow.default", "narrow_copy.default")
def narrow(b: Builder, x: fx.Node, dim: int, start: int, length: int) -> fx.Node:
    """`length` elements from `start` on"""
    axis = axis_of(dim, len(b.shape(x)))
    start = start + b.shape(x)[axis] if start < 0 else start
    return b.slice(x, axis, start, start + length)


@rule(
    aten.split.Tensor, aten.split_with_sizes.default, "split_copy.Tensor", "split_with_sizes_copy.default",
    "unsafe_split.Tensor", "unsafe_split_with_sizes.default", "chunk.default", "unsafe_chunk.default",
    "split.sizes",
)  # fmt: skip
def split(b: Builder, x: fx.Node, sizes: Any, dim: int = 0) -> tuple[fx.Node, ...]:
    """Consecutive parts along an axis, as long as the results say"""
    axis = axis_of(dim, len(b.shape(x)))
    parts, start = [], 0
    for meta in b.wanted:
        parts.append(b.slice(x, axis, start, start + meta.shape[axis]))
        start += meta.shape[axis]
    return tuple(parts)


@rule(aten.unbind.int, "unbind_copy.int")
def unbind(b: Builder, x: fx.Node, dim: int = 0) -> tuple[fx.Node, ...]:
    """Every element of an axis as a tensor"""
    axis = axis_of(dim, len(b.shape(x)))
    return tuple(b.reshape(b.slice(x, axis, i, i + 1), meta.shape) for i, meta in enumerate(b.wanted))


@rule(aten.diagonal.default, "diagonal_copy.default")
def diagonal(b: Builder, x: fx.Node, offset: int = 0, dim1: int = 0, dim2: int = 1) -> fx.Node:
    """x[..., i, i + offset]: every (L + 1)-th element of the L x L square that the diagonal crosses"""
    shape = b.shape(x)
    rows, columns = axis_of(dim1, len(shape)), axis_of(dim2, len(shape))
    length = b.wanted.shape[-1]
    kept = tuple(i for i in range(len(shape)) if i not in (rows, columns))
    row, column = (0, offset) if offset >= 0 else (-offset, 0)
    if length == 0:
        return b.full(b.wanted.shape, 0, b.dtype(x), b.meta(x).device)
    square = b.slice(b.slice(x, rows, row, row + length), columns, column, column + length)
    flat = b.reshape(b.permute(square, (*kept, rows, columns)), (*(shape[i] for i in kept), length * length))
    return b.slice(flat, len(kept), 0, length * length, length + 1)


# --- windows on memory ---


@rule(aten.unfold.default, "unfold_copy.default")
def unfold(b: Builder, x: fx.Node, dim: int, size: int, step: int) -> fx.Node | None:
    """Windows of `size` elements, `step` apart, as a new last axis"""
    meta = b.meta(x)
    if meta.rank == 0 or any(s == 0 and n != 1 for s, n in zip(meta.strides, meta.shape, strict=True)):
        return None
    axis = axis_of(dim, meta.rank)
    strides = (*meta.strides[:axis], meta.strides[axis] * step, *meta.strides[axis + 1 :], meta.strides[axis])
    return b.prim(ops.as_strided, x, shape=b.wanted.shape, strides=strides, offset=0)

"""Rules of operators that assemble elements: joining, repeating, padding, and writing a part of a tensor.

Invariant: what writes a part is a function of the whole: the result is a new value, no operand is written into.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torchlazy.prims import ops
from torchlazy.prims.builder import Builder, rule
from torchlazy.prims.decomps.view import axis_of, bounds_of
from torchlazy.prims.meta import Dim
from torchlazy.prims.size_int import surely_at_least, surely_equal

aten = torch.ops.aten


# --- joining and repeating ---


@rule(aten.cat.default, "concat.default", "concatenate.default")
def cat(b: Builder, tensors: tuple[fx.Node, ...], dim: int = 0) -> fx.Node:
    """Joined along an axis; 1-D tensors of no elements are left out, as in torch"""
    wanted = b.wanted
    parts = [x for x in tensors if len(b.shape(x)) == wanted.rank and not (wanted.rank != 1 and b.shape(x) == (0,))]
    axis = axis_of(dim, wanted.rank)
    parts = [b.convert(x, wanted.dtype) for x in parts if b.shape(x)[axis] != 0]
    if not parts:
        return b.full(wanted.shape, 0, wanted.dtype, wanted.device)
    return parts[0] if len(parts) == 1 else b.prim(ops.cat, *parts, axis=axis)


@rule(aten.stack.default, "_stack.default")
def stack(b: Builder, tensors: tuple[fx.Node, ...], dim: int = 0) -> fx.Node:
    """Joined along a new axis"""
    wanted = b.wanted
    axis = axis_of(dim, wanted.rank)
    parts = [b.unsqueeze(b.convert(x, wanted.dtype), axis) for x in tensors]
    return parts[0] if len(parts) == 1 else b.prim(ops.cat, *parts, axis=axis)


@rule(aten.repeat.default, "tile.default")
def repeat(b: Builder, x: fx.Node, repeats: tuple[int, ...]) -> fx.Node:
    """Tiled: each axis of size s as (times, s)"""
    wanted, shape = b.wanted, b.shape(x)
    shape = (1,) * (wanted.rank - len(shape)) + shape
    times = (1,) * (wanted.rank - len(repeats)) + tuple(repeats)
    if any(size == 0 for size in wanted.shape):
        return b.full(wanted.shape, 0, wanted.dtype, wanted.device)
    spread = b.reshape(x, tuple(size for s in shape for size in (1, s)))
    tiled = b.broadcast(spread, tuple(size for n, s in zip(times, shape, strict=True) for size in (n, s)))
    return b.reshape(tiled, wanted.shape)


@rule(aten.roll.default)
def roll(b: Builder, x: fx.Node, shifts: tuple[int, ...], dims: tuple[int, ...] = ()) -> fx.Node:
    """Rotated along axes; without axes along the flattened tensor"""
    shape = b.shape(x)
    if any(size == 0 for size in shape):
        return x
    if not dims:
        flat = b.reshape(x, (b.meta(x).numel,))
        return b.reshape(_rolled(b, flat, shifts[0], 0), shape)
    for shift, dim in zip(shifts, dims, strict=True):
        x = _rolled(b, x, shift, axis_of(dim, len(shape)))
    return x


def _rolled(b: Builder, x: fx.Node, shift: int, axis: int) -> fx.Node:
    size = b.shape(x)[axis]
    start = (size - shift) % size
    if start == 0:
        return x
    return b.prim(ops.cat, b.slice(x, axis, start, size), b.slice(x, axis, 0, start), axis=axis)


# --- padding and masks ---


def _cut_off(amount: int) -> int:
    """`max(-amount, 0)`. Asked is only what is sure of no sign: amounts of 0 and more are one program for all sizes,
    and so are their negatives, by which a gradient is cut."""
    return -amount if surely_at_least(0, amount) or amount < 0 else 0


@rule(aten.constant_pad_nd.default)
def constant_pad_nd(b: Builder, x: fx.Node, pad: tuple[int, ...], value: Any = 0) -> fx.Node:
    """A constant border; negative amounts cut off"""
    shape = b.shape(x)
    low, high = [0] * len(shape), [0] * len(shape)
    for i in range(len(pad) // 2):
        low[-1 - i], high[-1 - i] = pad[2 * i], pad[2 * i + 1]
    for axis, size in enumerate(shape):
        x = b.slice(x, axis, _cut_off(low[axis]), size - _cut_off(high[axis]))
    low, high = [[n + _cut_off(n) for n in amounts] for amounts in (low, high)]
    if all(surely_equal(n, 0) for n in (*low, *high)):
        return x
    return b.prim(ops.pad, x, low=tuple(low), high=tuple(high), value=value)


def offsets(b: Builder, rows: Dim, columns: Dim, device: str) -> fx.Node:
    """int64[rows, columns]: j - i"""
    i, j = (b.prim(ops.iota, length=n, start=0, step=1, dtype=torch.int64, device=device) for n in (rows, columns))
    shape = (rows, columns)
    return b.prim(ops.sub, b.broadcast(j, shape), b.broadcast(b.unsqueeze(i, 1), shape))


def _triangle(b: Builder, x: fx.Node, prim: ops.Prim, diagonal: int) -> fx.Node:
    shape = b.shape(x)
    inside = b.prim(prim, offsets(b, shape[-2], shape[-1], b.meta(x).device), diagonal)
    return b.prim(ops.where, b.broadcast(inside, shape), x, 0)


@rule(aten.tril.default)
def tril(b: Builder, x: fx.Node, diagonal: int = 0) -> fx.Node:
    """The elements with j - i <= diagonal, others 0"""
    return _triangle(b, x, ops.le, diagonal)


@rule(aten.triu.default)
def triu(b: Builder, x: fx.Node, diagonal: int = 0) -> fx.Node:
    """The elements with j - i >= diagonal, others 0"""
    return _triangle(b, x, ops.ge, diagonal)


# --- a part replaced ---


def _scatter_slice(b: Builder, x: fx.Node, src: fx.Node, axis: int, start: Dim, stop: Dim, step: Dim) -> fx.Node:
    shape = b.shape(x)
    src = b.convert(src, b.dtype(x))
    if (start, stop, step) == (0, shape[axis], 1):
        return b.broadcast(src, shape)
    starts, stops, steps = [0] * len(shape), list(shape), [1] * len(shape)
    starts[axis], stops[axis], steps[axis] = start, stop, step
    window = (*shape[:axis], (stop - start + step - 1) // step, *shape[axis + 1 :])
    attrs = {"starts": tuple(starts), "stops": tuple(stops), "steps": tuple(steps)}
    return b.prim(ops.slice_scatter, x, b.broadcast(src, window), **attrs)


@rule(aten.slice_scatter.default)
def slice_scatter(
    b: Builder, x: fx.Node, src: fx.Node, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> fx.Node:
    """x with x[..., start:end:step, ...] replaced by src"""
    axis = axis_of(dim, len(b.shape(x)))
    first, last = bounds_of(b.shape(x)[axis], start, end)
    return _scatter_slice(b, x, src, axis, first, last, step)


@rule(aten.select_scatter.default)
def select_scatter(b: Builder, x: fx.Node, src: fx.Node, dim: int, index: int) -> fx.Node:
    """x with x[..., index, ...] replaced by src"""
    axis = axis_of(dim, len(b.shape(x)))
    start = index + b.shape(x)[axis] if index < 0 else index
    return _scatter_slice(b, x, b.unsqueeze(src, axis), axis, start, start + 1, 1)


@rule(aten.diagonal_scatter.default)
def diagonal_scatter(b: Builder, x: fx.Node, src: fx.Node, offset: int = 0, dim1: int = 0, dim2: int = 1) -> fx.Node:
    """x where j - i != offset, else src at the position along the diagonal"""
    shape = b.shape(x)
    rank = len(shape)
    rows, columns = axis_of(dim1, rank), axis_of(dim2, rank)
    kept = tuple(i for i in range(rank) if i not in (rows, columns))
    order = (*kept, rows, columns)
    n, m = shape[rows], shape[columns]
    length = b.shape(src)[-1]
    if length == 0:
        return x
    # src[..., k] stands in row k (+ -offset below the main diagonal), the same in every column
    low = max(0, -offset)
    amounts = {"low": (0,) * len(kept) + (low,), "high": (0,) * len(kept) + (n - low - length,)}
    placed = b.prim(ops.pad, b.convert(src, b.dtype(x)), **amounts, value=0)
    full_shape = (*(shape[i] for i in kept), n, m)
    placed = b.broadcast(b.unsqueeze(placed, rank - 1), full_shape)
    on_diagonal = b.broadcast(b.prim(ops.eq, offsets(b, n, m, b.meta(x).device), offset), full_shape)
    result = b.prim(ops.where, on_diagonal, placed, b.permute(x, order))
    return b.permute(result, tuple(order.index(i) for i in range(rank)))


@rule("diag_embed.default")
def diag_embed(b: Builder, x: fx.Node, offset: int = 0, dim1: int = -2, dim2: int = -1) -> fx.Node:
    """Zeros with x on a diagonal"""
    wanted = b.wanted
    zeros = b.full(wanted.shape, 0, wanted.dtype, wanted.device)
    return diagonal_scatter(b, zeros, x, offset, dim1, dim2)


# --- gradients of parts: zeros with the gradient in its place ---


@rule(aten.slice_backward.default)
def slice_backward(
    b: Builder, grad: fx.Node, sizes: tuple[int, ...], dim: int, start: int, end: int, step: int
) -> fx.Node:
    """Zeros with x[..., start:end:step, ...] = grad"""
    axis = axis_of(dim, len(sizes))
    first, last = bounds_of(sizes[axis], start, end)
    if step != 1:
        zeros = b.full(sizes, 0, b.dtype(grad), b.meta(grad).device)
        return _scatter_slice(b, zeros, grad, axis, first, last, step)
    return _padded(b, grad, axis, first, sizes[axis] - last)


@rule(aten.select_backward.default)
def select_backward(b: Builder, grad: fx.Node, sizes: tuple[int, ...], dim: int, index: int) -> fx.Node:
    """Zeros with x[..., index, ...] = grad"""
    axis = axis_of(dim, len(sizes))
    start = index + sizes[axis] if index < 0 else index
    return _padded(b, b.unsqueeze(grad, axis), axis, start, sizes[axis] - start - 1)


def _padded(b: Builder, x: fx.Node, axis: int, low: Dim, high: Dim) -> fx.Node:
    if (low, high) == (0, 0):
        return x
    rank = len(b.shape(x))
    lows, highs = [0] * rank, [0] * rank
    lows[axis], highs[axis] = low, high
    return b.prim(ops.pad, x, low=tuple(lows), high=tuple(highs), value=0)


@rule(aten.diagonal_backward.default)
def diagonal_backward(b: Builder, grad: fx.Node, sizes: tuple[int, ...], offset: int, dim1: int, dim2: int) -> fx.Node:
    """Zeros with grad on the diagonal"""
    zeros = b.full(sizes, 0, b.dtype(grad), b.meta(grad).device)
    return diagonal_scatter(b, zeros, grad, offset, dim1, dim2)


@rule("block_diag.default")
def block_diag(b: Builder, tensors: tuple[fx.Node, ...]) -> fx.Node:
    """Matrices along the diagonal, zeros beside them; a vector is a row, a number a matrix of one element"""
    wanted = b.wanted
    blocks = [b.reshape(x, (1,) * (2 - len(b.shape(x))) + b.shape(x)) for x in tensors]
    bands, before = [], 0
    for block in blocks:
        columns = b.shape(block)[1]
        after = wanted.shape[1] - before - columns
        block = b.convert(block, wanted.dtype)
        bands.append(b.prim(ops.pad, block, low=(0, before), high=(0, after), value=0) if before or after else block)
        before = before + columns
    return bands[0] if len(bands) == 1 else b.prim(ops.cat, *bands, axis=0)


@rule("_chunk_cat.default")
def chunk_cat(b: Builder, tensors: tuple[fx.Node, ...], dim: int, num_chunks: int) -> fx.Node:
    """Each tensor's axis filled up with zeros and cut into chunks of one row each; the rows joined"""
    dim = axis_of(dim, len(b.shape(tensors[0])))
    rows = []
    for x in tensors:
        shape = b.shape(x)
        missing = -shape[dim] % num_chunks
        if missing:
            high = tuple(missing if i == dim else 0 for i in range(len(shape)))
            x = b.prim(ops.pad, x, low=(0,) * len(shape), high=high, value=0)
        tail: Dim = (shape[dim] + missing) // num_chunks
        for size in shape[dim + 1 :]:
            tail = tail * size
        rows.append(b.reshape(x, (*shape[:dim], num_chunks, tail)))
    return rows[0] if len(rows) == 1 else b.prim(ops.cat, *rows, axis=dim + 1)

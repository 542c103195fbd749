"""Reading at computed positions, and writing at one position a row or at few; most other writes stay with ATen.

Invariant: index tensors reach the primitives as int64 or int32 of one shape on the operand's device; boolean masks have
a data-dependent result shape and never do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch.fx import Node
from torchlazy.prims import ops as P
from torchlazy.prims.builder import Builder, ExternByChoice, NotApplicable, rule
from torchlazy.prims.decomps.value import Number, Value, canonical_axis, compute, iota, value
from torchlazy.prims.promotion import broadcast_shapes

aten = torch.ops.aten

_COLLIDES = "several sources may meet in one target: needs atomics or a sort, which ATen's kernel has"


def _positions(b: Builder, index: Node, device: str) -> Value:
    """An index tensor as the primitives take it."""
    meta = b.meta(index)
    if meta.dtype in (torch.bool, torch.uint8):
        raise NotApplicable("a mask as index: the result's shape depends on data")
    if meta.device != device:
        index = b.to_device(index, device)
    return value(b, index).to(meta.dtype if meta.dtype in (torch.int32, torch.int64) else torch.int64)


def index_along(x: Value, positions: Sequence[Value], first: int, *, wrap: bool = True) -> Value:
    """x indexed at dimensions `first`, `first` + 1, ... by tensors that broadcast together; `wrap`: -1 is the last."""
    shape = broadcast_shapes(p.shape for p in positions)
    dtype = torch.int64 if any(p.dtype == torch.int64 for p in positions) else torch.int32
    operands = [p.to(dtype).broadcast(shape).node for p in positions]
    dims = tuple(range(first, first + len(operands)))
    return Value(x.b, x.b.prim(P.index, x.node, *operands, dims=dims, wrap=wrap))


@rule(aten.embedding.default)
def embedding(
    b: Builder,
    weight: Node,
    indices: Node,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Node:
    """weight[indices]; the other arguments concern the gradient"""
    table = value(b, weight)
    return index_along(table, [_positions(b, indices, table.meta.device)], 0, wrap=False).node


@rule(aten.index_select.default)
def index_select(b: Builder, x: Node, dim: int, index: Node) -> Node:
    """x[:, ..., index] at `dim`; a 0-dim index counts as one of length 1"""
    v = value(b, x)
    positions = _positions(b, index, v.meta.device)
    if v.rank == 0:
        return v.node  # the index holds one 0
    positions = positions if positions.rank else positions.reshape((1,))
    return index_along(v, [positions], canonical_axis(dim, v.rank), wrap=False).node


@rule(aten.gather.default)
def gather(b: Builder, x: Node, dim: int, index: Node, *, sparse_grad: bool = False) -> Node:
    """x[i0, ..., index[i0, ..., i(n-1)], ...] with the index in place of dimension `dim`"""
    v = value(b, x)
    positions = _positions(b, index, v.meta.device)
    if v.rank == 0:
        v = v.reshape((1,))
    flat = positions if positions.rank else positions.reshape((1,))
    if flat.rank != v.rank:
        raise NotApplicable("an index of another rank")
    axis = canonical_axis(dim, v.rank)
    return Value(b, b.prim(P.gather, v.node, flat.node, axis=axis, wrap=False)).reshape(positions.shape).node


@rule(aten.take.default)
def take(b: Builder, x: Node, index: Node) -> Node:
    """The elements of flattened x at `index`"""
    v = value(b, x)
    return index_along(v.reshape((v.meta.numel,)), [_positions(b, index, v.meta.device)], 0).node


@rule("index.Tensor", "index.Tensor_hacked_twin", "_unsafe_index.Tensor")
def index_tensor(b: Builder, x: Node, indices: Sequence[Node | None]) -> Node:
    """Advanced indexing: index tensors apart from each other put their common shape first, adjacent ones in place."""
    v = value(b, x)
    dims = [axis for axis, index in enumerate(indices) if index is not None]
    if not dims:
        return v.to(v.dtype).node
    positions = [_positions(b, index, v.meta.device) for index in indices if index is not None]
    first = dims[0]
    if dims != list(range(first, first + len(dims))):
        v = v.permute((*dims, *(axis for axis in range(v.rank) if axis not in dims)))
        first = 0
    return index_along(v, positions, first).node


@rule(aten.take_along_dim.default)
def take_along_dim(b: Builder, x: Node, indices: Node, dim: int | None = None) -> Node:
    """gather, with all dimensions but `dim` broadcast; without `dim`, on the flattened operands"""
    v = value(b, x)
    positions = _positions(b, indices, v.meta.device)
    if dim is None:
        return index_along(v.reshape((v.meta.numel,)), [positions.reshape((positions.meta.numel,))], 0).node
    axis = canonical_axis(dim, v.rank)
    common = broadcast_shapes((v.kept_shape((axis,)), positions.kept_shape((axis,))))
    v = v.broadcast((*common[:axis], v.shape[axis], *common[axis + 1 :]))
    positions = positions.broadcast((*common[:axis], positions.shape[axis], *common[axis + 1 :]))
    return Value(b, b.prim(P.gather, v.node, positions.node, axis=axis, wrap=False)).node


def _hits(b: Builder, x: Value, dim: int, index: Node) -> tuple[Value, int]:
    """Where each element of x is the one that its line's single position names: bool of x's shape, and the axis.

    With one position a line nothing collides, so writing is a choice at each element: pointwise work.
    """
    positions = _positions(b, index, x.meta.device)
    axis = canonical_axis(dim, x.rank)
    if x.rank == 0 or positions.shape != x.kept_shape((axis,)):
        raise ExternByChoice(_COLLIDES)
    along = tuple(size if i == axis else 1 for i, size in enumerate(x.shape))
    lines = iota(b, x.shape[axis], x.meta.device, dtype=positions.dtype)
    if x.meta.device == "cpu":  # the lookup of a number by itself, which raises where it is out of range
        positions = index_along(lines, [positions], 0, wrap=False)
    return lines.reshape(along).eq(positions), axis


def _source(x: Value, axis: int, source: Value) -> Value:
    """The part of the source beside the index, one element a line."""
    for i, size in enumerate(x.kept_shape((axis,))):
        source = source.narrow(i, 0, size)
    return source


@rule(aten.scatter.src)
def scatter(b: Builder, x: Node, dim: int, index: Node, src: Node) -> Node:
    """src where the position is the index, else x (one position a line)"""
    v = value(b, x)
    hits, axis = _hits(b, v, dim, index)
    return hits.where(_source(v, axis, value(b, src, v.dtype)), v).node


@rule(aten.scatter.value)
def scatter_value(b: Builder, x: Node, dim: int, index: Node, number: Number) -> Node:
    """The number where the position is the index, else x (one position a line): also what one_hot is made of"""
    v = value(b, x)
    hits, _ = _hits(b, v, dim, index)
    return hits.where(number, v).node


@rule(aten.scatter_add.default)
def scatter_add(b: Builder, x: Node, dim: int, index: Node, src: Node) -> Node:
    """x + src where the position is the index, else x (one position a line)"""
    v = compute(b, x)
    if v.dtype == torch.bool:
        raise NotApplicable("a sum of bools")
    hits, axis = _hits(b, v, dim, index)
    return hits.where(v + _source(v, axis, value(b, src, v.dtype)), v).to(b.dtype(x)).node


MOST_COMPARED = 8  # positions of one dimension that every element is compared with


def _named(b: Builder, x: Value, dim: int, index: Node, most: int, *, wrap: bool) -> tuple[Value, int]:
    """Where along one dimension each element of x is one of a few positions, and the axis: bool of size 1 elsewhere."""
    positions = _positions(b, index, x.meta.device)
    count = positions.meta.numel
    if x.rank == 0 or positions.rank > 1 or type(count) is not int or not 1 <= count <= most:
        raise ExternByChoice(_COLLIDES)
    axis = canonical_axis(dim, x.rank)
    positions = positions.reshape((count,))
    size = x.shape[axis]
    if wrap:
        positions = positions.lt(0).where(positions + size, positions)
    lines = iota(b, size, x.meta.device, dtype=positions.dtype)
    if x.meta.device == "cpu":  # raises where one is out of range
        positions = index_along(lines, [positions], 0, wrap=False)
    along = tuple(size if i == axis else 1 for i in range(x.rank))
    each = [lines.reshape(along).eq(positions.narrow(0, k, 1).reshape((1,) * x.rank)) for k in range(count)]
    return reduce(Value.either, each), axis


def _one_row(b: Builder, x: Value, axis: int, source: Node) -> Value:
    """A source of size 1 along the axis."""
    row = value(b, source)
    if row.shape != x.kept_shape((axis,)) or row.meta.device != x.meta.device:
        raise ExternByChoice(_COLLIDES)
    return row


@rule("index_fill.int_Scalar", "index_fill.int_Tensor")
def index_fill(b: Builder, x: Node, dim: int, index: Node, number: Number) -> Node:
    """The number at a few positions of one dimension, else x"""
    v = value(b, x)
    hits, _ = _named(b, v, dim, index, MOST_COMPARED, wrap=True)
    if b.is_tensor(number):
        if b.shape(number) or b.dtype(number) != v.dtype:
            raise ExternByChoice(_COLLIDES)
        filled = value(b, b.to_device(number, v.meta.device)).broadcast(v.shape)
        return hits.broadcast(v.shape).where(filled, v).node
    return hits.broadcast(v.shape).where(number, v).node


@rule("index_copy.default")
def index_copy(b: Builder, x: Node, dim: int, index: Node, source: Node) -> Node:
    """The source at one position of one dimension, else x: a step's entry in a cache"""
    v = value(b, x)
    hits, axis = _named(b, v, dim, index, 1, wrap=False)
    row = _one_row(b, v, axis, source)
    if row.dtype != v.dtype:
        raise ExternByChoice(_COLLIDES)
    return hits.broadcast(v.shape).where(row.broadcast(v.shape), v).node


@rule("index_add.default")
def index_add(b: Builder, x: Node, dim: int, index: Node, source: Node, *, alpha: Number = 1) -> Node:
    """x + alpha * source at one position of one dimension, else x"""
    v = compute(b, x)
    if v.dtype == torch.bool or b.dtype(source) != b.dtype(x):
        raise ExternByChoice(_COLLIDES)
    hits, axis = _named(b, v, dim, index, 1, wrap=False)
    row = _one_row(b, v, axis, source).to(v.dtype)
    row = row if not isinstance(alpha, Node) and alpha == 1 else row * alpha
    return hits.broadcast(v.shape).where(v + row.broadcast(v.shape), v).to(b.dtype(x)).node


@rule("index_put.default", "index_put.hacked_twin", "_unsafe_index_put.default")
def index_put(b: Builder, x: Node, indices: Sequence[Node | None], values: Node, accumulate: bool = False) -> Node:
    """values where a mask holds, else x: x[mask] = value, and x[mask] += value, of one value for all places.

    The mask covers some dimensions, those behind it are written whole; values that differ from place to place, and
    positions, collide or are counted off: ATen's kernel.
    """
    masks = [(place, index) for place, index in enumerate(indices) if index is not None]
    if len(masks) != 1 or b.dtype(masks[0][1]) != torch.bool or not b.meta(masks[0][1]).rank:
        raise ExternByChoice(_COLLIDES)
    first, index = masks[0]
    v = value(b, x)
    written = value(b, values)
    mask = value(b, b.to_device(index, v.meta.device))
    behind = v.rank - first - mask.rank
    leading = written.shape[: max(written.rank - behind, 0)]
    if (first and written.meta.numel != 1) or any(size != 1 for size in leading):
        raise ExternByChoice("values for each place of a mask: they are counted off, which ATen's kernel does")
    if written.dtype != v.dtype or v.shape[first : first + mask.rank] != mask.shape:
        raise NotApplicable("values of another dtype, or a mask that does not fit: ATen's own error")
    written = value(b, b.to_device(values, v.meta.device))
    shape = written.shape[len(leading) :] if written.meta.numel != 1 else ()
    written = written.reshape(shape).broadcast(v.shape)
    holds = mask.reshape((*(1,) * first, *mask.shape, *(1,) * behind)).broadcast(v.shape)
    if accumulate:
        wide = compute(b, x)
        return holds.where(wide + written.to(wide.dtype), wide).to(v.dtype).node
    return holds.where(written, v).node

"""Reductions: one loop node, or two where one would leave the target idle.

Invariant: every result lies in memory (welford's mean and count may stay recipes over what does); a reduction over no
element is its identity, over no axis its operand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import fx
from torchlazy.inductor import choices
from torchlazy.inductor.analyses import ReadsWrites
from torchlazy.inductor.index import Index, axis_index, flatten, stride_of, unflatten
from torchlazy.inductor.ir import Buffer, LoopNode
from torchlazy.inductor.lowerings.assemble import condition
from torchlazy.inductor.lowerings.context import Context, LoweringError, Rule
from torchlazy.inductor.lowerings.pointwise import literal
from torchlazy.inductor.lowerings.value import LoweredValue, Scope, buffer_value, computed, count
from torchlazy.inductor.ops_handler import OpsHandler, ReductionKind
from torchlazy.prims.meta import Dim, TensorMeta, contiguous_strides
from torchlazy.prims.size_int import divides, hint, integer_of, is_tracked

KINDS: dict[str, ReductionKind] = {
    "sum": "sum", "prod": "prod", "amax": "max", "amin": "min", "argmax": "argmax", "argmin": "argmin",
    "any": "any", "all": "all", "welford": "welford",
}  # fmt: skip
_IDENTITY: dict[ReductionKind, Any] = {"sum": 0, "prod": 1, "any": False, "all": True}

RowLoader: TypeAlias = "Callable[[Scope, Index, Index], Any]"  # (scope, kept index, reduced index)


def accumulate_dtype(kind: ReductionKind, dtype: torch.dtype) -> torch.dtype:
    """The accumulator of a reduction over elements of `dtype`."""
    if kind in ("any", "all") or dtype == torch.bool:
        return torch.bool
    if dtype == torch.float64:
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.int64


def row_loader(x: LoweredValue, axes: tuple[int, ...]) -> RowLoader:
    """The operand by kept and reduced index apart."""
    kept = [d for d in range(len(x.shape)) if d not in axes]

    def load(scope: Scope, index: Index, reduce_index: Index) -> Any:
        at: list[Any] = [None] * len(x.shape)
        for d, i in zip(kept, index, strict=True):
            at[d] = i
        for d, i in zip(axes, reduce_index, strict=True):
            at[d] = i
        return scope.load(x, tuple(at))

    return load


def _body(load: RowLoader) -> Callable[[OpsHandler[Any], Index, Index], Any]:
    return lambda ops, index, reduce_index: load(Scope(ops), index, reduce_index)


def reduction_order(load: RowLoader, kept: tuple[Dim, ...], reduced: tuple[Dim, ...]) -> str:
    """ "row" if most loads are contiguous along a reduced axis, "column" if along a kept one.

    A load that moves along axes of one kind only (a row's mean, a column's weight) is served by registers and the
    cache: it has no say where another load moves along both.
    """
    index, reduce_index = axis_index("i", kept), axis_index("r", reduced)
    handler = ReadsWrites()
    load(Scope(handler), index, reduce_index)  # type: ignore[arg-type]
    votes = 0
    moved = [read for read in handler.reads if not read.index.free_symbols.isdisjoint(reduce_index)]
    both = [read for read in moved if read.indirect or not read.index.free_symbols.isdisjoint(index)]
    for read in both or moved:
        votes += any(s.is_Symbol and stride_of(read.index, s) == 1 for s in reduce_index)
        votes -= any(s.is_Symbol and stride_of(read.index, s) == 1 for s in index)
    return "column" if votes < 0 else "row"


def lower_reduction(context: Context, node: fx.Node, operands: tuple[LoweredValue, ...]) -> LoweredValue:
    """A reduction with one result."""
    (x,) = operands
    kind = KINDS[node.target.__name__]  # type: ignore[union-attr]
    meta: TensorMeta = node.meta["val"]
    axes = _axes(node)
    reduced = tuple(x.shape[d] for d in axes)
    if x.meta.dtype == torch.bool:
        kind = {"max": "any", "min": "all"}.get(kind, kind)  # type: ignore[assignment]
    if not axes:
        if kind in ("argmax", "argmin"):
            return _constant(context, node, meta, 0)
        return context.store(computed(meta, x.loader, operands, node.name))
    if count(reduced) == 0 and count(meta.shape) != 0:
        if kind not in _IDENTITY:
            raise LoweringError.at(node, f"{kind} over no element has no value", "give it a non-empty axis")
        return _constant(context, node, meta, _IDENTITY[kind])
    load, chain = row_loader(x, axes), x.chain | {node.name}
    splits = _splits(context, kind, load, meta.shape, reduced)
    buffer = context.new_buffer(meta)
    if splits is None:
        _emit(context, (buffer,), load, reduced, kind, x.meta.dtype, chain)
    else:
        _emit_split(context, buffer, load, reduced, kind, x.meta.dtype, chain, *splits)
    return buffer_value(buffer)


def _constant(context: Context, node: fx.Node, meta: TensorMeta, value: Any) -> LoweredValue:
    recipe = computed(meta, lambda scope, index: literal(scope.ops, value, meta.dtype), (), node.name)
    return context.store(recipe)


def _emit(
    context: Context, buffers: tuple[Buffer, ...], load: RowLoader, reduced: tuple[Dim, ...], kind: ReductionKind,
    dtype: torch.dtype, chain: frozenset[str],
) -> None:  # fmt: skip
    if count(buffers[0].shape) == 0:
        for buffer in buffers:
            context.emit_empty(buffer)
        return
    node = LoopNode(
        buffers, buffers[0].shape, _body(load), reduced, kind, accumulate_dtype(kind, dtype), context.origins(chain)
    )
    context.nodes.append(node)


# --- two stages ---


def _splits(
    context: Context, kind: ReductionKind, load: RowLoader, kept: tuple[Dim, ...], reduced: tuple[Dim, ...]
) -> tuple[int, str] | None:
    """(number of partial results, "row" or "column"), None where one node does."""
    outputs, size = hint(count(kept)), hint(count(reduced))
    if kind in ("argmax", "argmin") or not isinstance(outputs, int) or not isinstance(size, int):
        return None
    if outputs * size < choices.MIN_SPLIT_POINTS:
        return None
    order = reduction_order(load, kept, reduced)
    wanted = choices.split_count(context.device, outputs, size, order)
    if wanted <= 1:
        return None
    is_tracked_size = any(map(is_tracked, reduced))
    chunk = choices.flat_chunk(context.device, size) if kept == () and not is_tracked_size else 0
    if chunk and _is_flat_in_chunks(load, reduced, size // chunk):
        return size // chunk, order
    return _clean_split(reduced, wanted), order


def _is_flat_in_chunks(load: RowLoader, reduced: tuple[Dim, ...], splits: int) -> bool:
    """Whether a reduction of everything, cut into `splits` chunks, reads memory in one line."""
    chunk_load, chunk = _chunked(load, reduced, splits, "sum", torch.float32)
    index, reduce_index = axis_index("i", (splits,)), axis_index("r", (chunk,))
    handler = ReadsWrites()
    chunk_load(Scope(handler), index, reduce_index)  # type: ignore[arg-type]
    return all(
        stride_of(r.index, s) in (0, d) for r in handler.reads for s, d in ((index[0], chunk), (reduce_index[0], 1))
    )


def _clean_split(reduced: tuple[Dim, ...], wanted: int) -> int:
    """A number of chunks near `wanted` that cuts between whole inner axes, so that indices stay affine; else
    `wanted`."""
    outer = 1
    for size in reduced:
        for divisor in range(1, min(int(hint(size)), wanted * 2 // outer) + 1):
            if wanted // 2 <= outer * divisor and divides(divisor, integer_of(size)):
                return outer * divisor
        if is_tracked(size):
            break
        outer *= int(size)
        if outer > wanted * 2:
            break
    return wanted


def _chunked(
    load: RowLoader, reduced: tuple[Dim, ...], splits: int, kind: ReductionKind, dtype: torch.dtype
) -> tuple[RowLoader, int]:
    """The loader of one chunk, its index (chunk, *kept) over a reduced index (position in the chunk,), and the chunk
    size."""
    total = integer_of(count(reduced))
    chunk = -(-total // splits)

    def chunk_load(scope: Scope, index: Index, reduce_index: Index) -> Any:
        split, kept = index[0], index[1:]
        flat = flatten((split, reduce_index[0]), (splits, chunk))
        load_one = lambda inner: load(inner, kept, unflatten(flat, reduced))  # noqa: E731
        holds = condition(scope.ops, [("lt", flat, total)])
        return load_one(scope) if holds is True else scope.masked(holds, load_one, _neutral(kind, dtype))

    return chunk_load, chunk


def _neutral(kind: ReductionKind, dtype: torch.dtype) -> Any:
    """The element that changes nothing, as a value inside a body."""
    if kind in _IDENTITY:
        value = _IDENTITY[kind]
        return float(value) if dtype.is_floating_point else value
    least = kind == "max"
    if dtype.is_floating_point:
        return float("-inf") if least else float("inf")
    return torch.iinfo(dtype).min if least else torch.iinfo(dtype).max


def _emit_split(
    context: Context, buffer: Buffer, load: RowLoader, reduced: tuple[Dim, ...], kind: ReductionKind,
    dtype: torch.dtype, chain: frozenset[str], splits: int, order: str,
) -> None:  # fmt: skip
    chunk_load, chunk = _chunked(load, reduced, splits, kind, dtype)
    partial = _partial_buffer(context, buffer.shape, splits, order, accumulate_dtype(kind, dtype))
    _emit(context, (partial,), chunk_load, (chunk,), kind, dtype, chain)
    partials = buffer_value(partial)
    _emit(context, (buffer,), row_loader(partials, (0,)), (splits,), kind, partial.dtype, chain)


def _partial_buffer(context: Context, kept: tuple[Dim, ...], splits: int, order: str, dtype: torch.dtype) -> Buffer:
    """Memory of (splits, *kept): neighbouring outputs adjacent for columns, an output's partials adjacent for rows."""
    shape = (splits, *kept)
    inner = contiguous_strides(kept)
    strides = contiguous_strides(shape) if order == "column" else (1, *(stride * splits for stride in inner))
    partial = context.new_buffer(TensorMeta(shape, dtype, strides, context.device))
    return partial


# --- mean and squared deviations ---


def lower_welford(
    context: Context, node: fx.Node, operands: tuple[LoweredValue, ...]
) -> tuple[LoweredValue, LoweredValue, LoweredValue]:
    """(mean, m2, count), by the strategy that choices.py names."""
    (x,) = operands
    metas: tuple[TensorMeta, TensorMeta, TensorMeta] = node.meta["val"]
    axes = _axes(node)
    reduced = tuple(x.shape[d] for d in axes)
    size = count(reduced)
    total = computed(metas[2], lambda scope, index: literal(scope.ops, integer_of(size), metas[2].dtype), ())
    if size == 0:
        nan = computed(metas[0], lambda scope, index: literal(scope.ops, float("nan"), metas[0].dtype), ())
        return nan, _constant(context, node, metas[1], 0.0), total
    load, chain = row_loader(x, axes), x.chain | {node.name}
    splits = _splits(context, "welford", load, metas[0].shape, reduced) or (1, "row")
    is_even = isinstance(size, int) and divides(splits[0], size)
    match choices.welford_strategy(hint(size), splits[0], is_even):
        case "welford":
            buffers = tuple(context.new_buffer(meta) for meta in metas)
            _emit(context, buffers, load, reduced, "welford", x.meta.dtype, chain)
            mean, m2, _ = map(buffer_value, buffers)
        case "two_pass":
            mean, m2 = _two_pass(context, node, x, load, reduced, axes)
        case "split":
            mean, m2 = _split_welford(context, metas, x, load, reduced, chain, *splits)
    return mean, m2, total


def _reduce_now(
    context: Context, meta: TensorMeta, load: RowLoader, reduced: tuple[Dim, ...], chain: frozenset[str],
    kind: ReductionKind = "sum",
) -> LoweredValue:  # fmt: skip
    """The sum (or maximum) of a recipe, split where that pays."""
    buffer = context.new_buffer(meta)
    splits = _splits(context, kind, load, meta.shape, reduced)
    if splits is None:
        _emit(context, (buffer,), load, reduced, kind, meta.dtype, chain)
    else:
        _emit_split(context, buffer, load, reduced, kind, meta.dtype, chain, *splits)
    return buffer_value(buffer)


def _scaled(meta: TensorMeta, x: LoweredValue, factor: float) -> LoweredValue:
    """x * factor as a recipe."""
    return computed(
        meta, lambda scope, index: scope.ops.mul(scope.load(x, index), literal(scope.ops, factor, meta.dtype)), (x,)
    )


def _two_pass(
    context: Context, node: fx.Node, x: LoweredValue, load: RowLoader, reduced: tuple[Dim, ...], axes: tuple[int, ...]
) -> tuple[LoweredValue, LoweredValue]:
    mean_meta, m2_meta, _ = node.meta["val"]
    chain = x.chain | {node.name}
    total = _reduce_now(context, mean_meta, load, reduced, chain)
    mean = _scaled(mean_meta, total, 1 / integer_of(count(reduced)))

    def squared(scope: Scope, index: Index, reduce_index: Index) -> Any:
        deviation = scope.ops.sub(load(scope, index, reduce_index), scope.load(mean, index))
        return scope.ops.mul(deviation, deviation)

    return mean, _reduce_now(context, m2_meta, squared, reduced, chain)


def _split_welford(
    context: Context, metas: tuple[TensorMeta, ...], x: LoweredValue, load: RowLoader, reduced: tuple[Dim, ...],
    chain: frozenset[str], splits: int, order: str,
) -> tuple[LoweredValue, LoweredValue]:  # fmt: skip
    """Chunks of equal size n: mean = average of means; m2 = sum of m2 + n * sum of (chunk mean - mean)**2."""
    chunk_load, chunk = _chunked(load, reduced, splits, "welford", x.meta.dtype)
    dtype = accumulate_dtype("welford", x.meta.dtype)
    partials = tuple(_partial_buffer(context, metas[0].shape, splits, order, dtype) for _ in range(3))
    _emit(context, partials, chunk_load, (chunk,), "welford", x.meta.dtype, chain)
    means, squares, _ = map(buffer_value, partials)
    total = _reduce_now(context, metas[0], row_loader(means, (0,)), (splits,), chain)
    mean = _scaled(metas[0], total, 1.0 / splits)

    def combined(scope: Scope, index: Index, reduce_index: Index) -> Any:
        ops, at = scope.ops, (reduce_index[0], *index)
        deviation = ops.sub(scope.load(means, at), scope.load(mean, index))
        spread = ops.mul(ops.mul(deviation, deviation), literal(ops, chunk, dtype))
        return ops.add(scope.load(squares, at), spread)

    return mean, _reduce_now(context, metas[1], combined, (splits,), chain)


# --- largest element and sum of exponentials ---


def lower_logsumexp(
    context: Context, node: fx.Node, operands: tuple[LoweredValue, ...]
) -> tuple[LoweredValue, LoweredValue]:
    """Two passes: the maximum, then the sum of exp(x - maximum); an infinite maximum counts as 0 there."""
    (x,) = operands
    largest_meta, total_meta = node.meta["val"]
    axes = _axes(node)
    reduced = tuple(x.shape[d] for d in axes)
    if count(reduced) == 0:
        least = _constant(context, node, largest_meta, float("-inf"))
        return least, _constant(context, node, total_meta, 0.0)
    load, chain = row_loader(x, axes), x.chain | {node.name}
    largest = _reduce_now(context, largest_meta, load, reduced, chain, "max") if axes else context.store(x)

    def shifted(scope: Scope, index: Index, reduce_index: Index) -> Any:
        ops, top = scope.ops, scope.load(largest, index)
        base = ops.where(ops.isinf(top), literal(ops, 0.0, largest_meta.dtype), top)
        return ops.exp(ops.sub(load(scope, index, reduce_index), base))

    if not axes:
        return largest, computed(total_meta, lambda scope, index: shifted(scope, index, ()), (x, largest), node.name)
    return largest, _reduce_now(context, total_meta, shifted, reduced, chain)


def _axes(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.kwargs["axes"])  # type: ignore[arg-type]


RULES: dict[str, Rule] = {
    **dict.fromkeys(KINDS, lower_reduction),
    "welford": lower_welford,
    "logsumexp": lower_logsumexp,
}

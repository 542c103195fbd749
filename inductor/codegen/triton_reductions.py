"""Reductions inside a Triton kernel: how a block is accumulated in a loop and folded at its end.

Invariant: lanes past the end of the reduced axes contribute the identity (or, for welford, nothing), so masks of loads
never matter for the result. A persistent kernel folds one block; a looping kernel keeps one accumulator per lane and
folds once, after the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torchlazy.inductor.codegen.triton_ops import FORMULAS, TritonValue, highest, literal, lowest, tl_dtype
from torchlazy.inductor.codegen.triton_writer import TritonWriter, X
from torchlazy.inductor.index import flatten
from torchlazy.inductor.ir import Statement
from torchlazy.prims.size_int import is_tracked

BLOCK = "[XBLOCK, RBLOCK]"
Finish = Callable[[], "tuple[TritonValue, ...]"]


@dataclass(frozen=True)
class Fold:
    """One associative reduction: identity, text of combining an accumulator with a block, text of folding a block."""

    identity: str
    combine: str
    fold: str


def _fold_of(kind: str, dtype: torch.dtype) -> Fold:
    """Floats propagate NaN through max and min, which Triton's own tl.max does not."""
    if kind == "sum":
        return Fold("0", "{a} + {b}", "tl.sum({a}, 1)")
    if kind == "prod":
        return Fold("1", "{a} * {b}", "tl.reduce({a}, 1, multiply)")
    if kind == "any":
        return Fold("0", "{a} | {b}", "tl.max({a}, 1)")
    if kind == "all":
        return Fold("1", "{a} & {b}", "tl.min({a}, 1)")
    if kind in ("max", "min"):
        identity = literal(lowest(dtype) if kind == "max" else highest(dtype), dtype)
        if dtype.is_floating_point:
            return Fold(identity, f"{kind}_with_nan({{a}}, {{b}})", f"tl.reduce({{a}}, 1, {kind}_with_nan)")
        return Fold(identity, f"tl.{kind}imum({{a}}, {{b}})", f"tl.{kind}({{a}}, 1)")
    raise ValueError(f"triton: no reduction {kind!r}; known: sum prod max min any all argmax argmin welford")


def reduce_statement(writer: TritonWriter, statement: Statement, rnumel: int, rblock: int) -> Finish:
    """Run the statement's body and accumulate it; calling the result (after the loop, if any) folds the accumulator."""
    node = statement.node
    kind = node.reduction
    value: TritonValue = node.body(writer, statement.index, statement.reduce_index)
    if kind in ("any", "all"):
        value = writer.to_dtype(writer.to_dtype(value, torch.bool), torch.int32)
        return _associative(writer, value, _fold_of(kind, torch.int32), lambda v: writer.to_dtype(v, torch.bool))
    if kind in ("argmax", "argmin"):
        if value.dtype == torch.bool:
            value = writer.to_dtype(value, torch.int32)
        return _arg_extremum(writer, value, kind, statement)
    if node.accumulate_dtype is not None:
        value = writer.to_dtype(value, node.accumulate_dtype)
    if kind == "welford":
        return _welford(writer, value, rnumel, rblock)
    if value.dtype == torch.bool:
        value = writer.to_dtype(value, torch.int32)
        fold = _fold_of({"max": "any", "min": "all"}.get(str(kind), str(kind)), torch.int32)
        return _associative(writer, value, fold, lambda v: writer.to_dtype(v, torch.bool))
    return _associative(writer, value, _fold_of(str(kind), value.dtype), lambda v: v)


def _block(writer: TritonWriter, value: TritonValue, identity: str) -> str:
    """The value as a whole block with `identity` in the lanes past the end."""
    text = value.text
    if "rmask" in writer.mask_names:
        text = f"tl.where(rmask, {text}, {identity})"
        if "x" in value.deps:
            return text
    elif value.deps == frozenset("xr"):
        return text
    return f"tl.broadcast_to({text}, {BLOCK})"


def _full(identity: str, dtype: torch.dtype) -> str:
    return f"tl.full({BLOCK}, {identity}, {tl_dtype(dtype)})"


def _associative(
    writer: TritonWriter, value: TritonValue, fold: Fold, convert: Callable[[TritonValue], TritonValue]
) -> Finish:
    block = _block(writer, value, fold.identity)
    if writer.loop_lines is None:
        accumulator = writer.let(block, value.deps | {"r"})
    else:
        accumulator = writer.fresh("acc")
        writer.point_lines.append(f"{accumulator} = {_full(fold.identity, value.dtype)}")
        writer.line(f"{accumulator} = {fold.combine.format(a=accumulator, b=block)}")

    def finish() -> tuple[TritonValue, ...]:
        total = writer.let(f"{fold.fold.format(a=accumulator)}[:, None]", X)
        return (convert(TritonValue(total, value.dtype, X)),)

    return finish


def _arg_extremum(writer: TritonWriter, value: TritonValue, kind: str, statement: Statement) -> Finish:
    """Pairs of value and flat position within the node's own reduce ranges; the first extremum wins, NaN before all."""
    identity = literal(lowest(value.dtype) if kind == "argmax" else highest(value.dtype), value.dtype)
    position, deps = writer.index_text(flatten(statement.reduce_index, statement.node.reduce_ranges))
    far = str(torch.iinfo(torch.int64 if writer.index_dtype == "tl.int64" else torch.int32).max)
    where = TritonValue(position, torch.int64, deps)
    values, places = _block(writer, value, identity), _block(writer, where, far)
    if not deps:
        places = f"tl.full({BLOCK}, {position}, {writer.index_dtype})"
    if writer.loop_lines is None:
        best, at = writer.let(values, value.deps | {"r"}), writer.let(f"tl.broadcast_to({places}, {BLOCK})", X | {"r"})
    else:
        best, at = writer.fresh("best"), writer.fresh("at")
        writer.point_lines.append(f"{best} = {_full(identity, value.dtype)}")
        writer.point_lines.append(f"{at} = tl.full({BLOCK}, {far}, {writer.index_dtype})")
        writer.line(f"{best}, {at} = {kind}_pair({best}, {at}, {values}, tl.broadcast_to({places}, {BLOCK}))")

    def finish() -> tuple[TritonValue, ...]:
        extremum, first = writer.fresh("extremum"), writer.fresh("first")
        writer.line(f"{extremum}, {first} = tl.reduce(({best}, {at}), 1, {kind}_pair)")
        return (TritonValue(writer.let(f"{first}[:, None].to(tl.int64)", X), torch.int64, X),)

    return finish


def _at_least_one(rnumel: int, dtype: torch.dtype) -> str:
    """The number of reduced points as a divisor."""
    if is_tracked(rnumel):
        return f"tl.full([XBLOCK, 1], tl.maximum(size1, 1), {tl_dtype(dtype)})"
    return repr(float(max(rnumel, 1)))


def _welford(writer: TritonWriter, value: TritonValue, rnumel: int, rblock: int) -> Finish:
    """mean, sum of squared deviations, count. Persistent: two passes over registers. Looping: each lane keeps a running
    mean and m2; all lanes have seen equally many elements (but for the last block), so 1/k is one scalar a block."""
    dtype = value.dtype
    full = X | {"r"}
    length = "size1" if is_tracked(rnumel) else repr(float(rnumel))
    count = f"tl.full([XBLOCK, 1], {length}, {tl_dtype(dtype)})"
    if writer.loop_lines is None:
        total = writer.let(f"tl.sum({_block(writer, value, '0')}, 1)[:, None]", X)
        mean = writer.let(FORMULAS["div"](dtype, total, _at_least_one(rnumel, dtype)), X)
        away = writer.let(_block(writer, TritonValue(f"({value.text} - {mean})", dtype, full), "0"), full)

        def finish_persistent() -> tuple[TritonValue, ...]:
            m2 = writer.let(f"tl.sum({away} * {away}, 1)[:, None]", X)
            return TritonValue(mean, dtype, X), TritonValue(m2, dtype, X), TritonValue(writer.let(count, X), dtype, X)

        return finish_persistent
    mean, m2 = writer.fresh("mean"), writer.fresh("m2_")
    for accumulator in (mean, m2):
        writer.point_lines.append(f"{accumulator} = {_full('0', dtype)}")
    share = writer.let(f"tl.full([1, 1], 1.0, {tl_dtype(dtype)}) / (roffset // RBLOCK + 1)", full)
    delta = writer.let(f"{value.text} - {mean}", full)
    if "rmask" in writer.mask_names:
        delta = writer.let(f"tl.where(rmask, {delta}, 0)", full)
    writer.line(f"{mean} = {mean} + {delta} * {share}")
    again = f"({value.text} - {mean})"
    if "rmask" in writer.mask_names:
        again = f"tl.where(rmask, {again}, 0)"
    writer.line(f"{m2} = {m2} + {delta} * {again}")

    def finish_loop() -> tuple[TritonValue, ...]:
        if not is_tracked(rnumel) and rnumel % rblock == 0:
            seen = f"{float(rnumel // rblock)!r}"
        else:
            seen = writer.let(f"((size1 - rbase + (RBLOCK - 1)) // RBLOCK).to({tl_dtype(dtype)})", X)
        weighted = f"{mean} * {seen}"
        whole = writer.let(f"tl.sum({weighted}, 1)[:, None] / {_at_least_one(rnumel, dtype)}", X)
        apart = writer.let(f"{mean} - {whole}", X)
        spread = writer.let(f"tl.sum({m2} + {apart} * {apart} * {seen}, 1)[:, None]", X)
        return TritonValue(whole, dtype, X), TritonValue(spread, dtype, X), TritonValue(writer.let(count, X), dtype, X)

    return finish_loop

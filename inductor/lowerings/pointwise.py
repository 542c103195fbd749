"""Elementwise primitives and creations: recipes, one scalar op each.

Invariant: halves are float32 inside a body; a value whose dtype is a half holds float32 numbers that are exact in that
half.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch import fx
from torchlazy.inductor.index import Index, flatten
from torchlazy.inductor.lowerings.context import Context, LoweringError, Rule
from torchlazy.inductor.lowerings.value import HALVES, LoweredValue, Scope, computed, window_value
from torchlazy.inductor.ops_handler import POINTWISE_OPS
from torchlazy.prims.attrs import is_runtime_scalar
from torchlazy.prims.eager import full as full_reference
from torchlazy.prims.scalar_memory import MARK
from torchlazy.prims.size_int import is_tracked, same_sizes
from torchlazy.runtime.program.program import VALUE_CHECK


def inner_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a value of `dtype` has inside a loop body."""
    return torch.float32 if dtype in HALVES else dtype


def converted(ops: Any, value: Any, source: torch.dtype, target: torch.dtype) -> Any:
    """A body value of a tensor of dtype `source` as one of dtype `target`, rounded as Tensor.to does."""
    if target in HALVES:  # by way of float32, as torch converts to a half
        value = converted(ops, value, source, torch.float32)
        return value if source == target else ops.to_dtype(value, target)
    return value if inner_dtype(source) == target else ops.to_dtype(value, target)


def exact_number(value: bool | int | float, dtype: torch.dtype) -> Any:
    """A number as a tensor of dtype `dtype` holds it: wrapped, truncated or rounded as torch.full does."""
    return _exact_number(value, dtype, math.copysign(1.0, value) if value == 0 else 0.0)


@lru_cache(maxsize=4096, typed=True)
def _exact_number(value: bool | int | float, dtype: torch.dtype, sign_of_zero: float) -> Any:
    """`sign_of_zero` keeps 0.0 and -0.0, which are equal, apart in the cache."""
    return full_reference(shape=(), value=value, dtype=dtype, device="cpu").item()


def literal(ops: Any, value: bool | int | float, dtype: torch.dtype) -> Any:
    """A number as an element of a tensor of dtype `dtype`."""
    if is_tracked(value):
        inner = inner_dtype(dtype)
        held = ops.index_expr(sympy.sympify(value), inner) if isinstance(value, int) else ops.constant(value, inner)
        return ops.to_dtype(held, dtype) if dtype in HALVES else held
    return ops.constant(exact_number(value, dtype), inner_dtype(dtype))


def number(ops: Any, value: Any, dtype: torch.dtype) -> Any:
    """A literal or a runtime scalar (an argument, or a tensor of one element) as an element of dtype `dtype`."""
    inner = inner_dtype(dtype)
    if isinstance(value, fx.Node) and MARK in value.meta:
        loaded = ops.load(value.name, sympy.Integer(0))
        loaded = loaded if value.meta["val"].dtype == inner else ops.to_dtype(loaded, inner)
    elif not is_runtime_scalar(value):
        return literal(ops, value, dtype)
    else:
        loaded = ops.scalar(value.name, inner)
    return ops.to_dtype(loaded, dtype) if dtype in HALVES else loaded


def lower_elementwise(context: Context, node: fx.Node, operands: tuple[LoweredValue, ...]) -> LoweredValue:
    """The scalar op of the same name at every index."""
    op = node.target.__name__  # type: ignore[union-attr]

    def loader(scope: Scope, index: Index) -> Any:
        return getattr(scope.ops, op)(*[scope.load(operand, index) for operand in operands])

    return computed(node.meta["val"], loader, operands, node.name)


def lower_convert(context: Context, node: fx.Node, operands: tuple[LoweredValue, ...]) -> LoweredValue:
    """Another dtype; its own dtype is a copy for the sake of the layout, and costs nothing inlined."""
    (x,) = operands
    meta = node.meta["val"]
    source, target = x.meta.dtype, meta.dtype
    if source == target:
        same = computed(meta, lambda scope, index: scope.load(x, index), operands, node.name)
        in_place = x.window is not None and same_sizes(x.window.strides, meta.strides)
        return LoweredValue(meta, x.loader, x.window, x.chain, x.reads, x.layout) if in_place else same
    if x.window is not None and x.window.root.dtype == target:
        return window_value(meta, x.window)  # a float32 value that lies in memory rounded

    def loader(scope: Scope, index: Index) -> Any:
        return converted(scope.ops, scope.load(x, index), source, target)

    return computed(meta, loader, operands, node.name)


def stored_rounded(context: Context, value: LoweredValue, dtype: torch.dtype) -> LoweredValue:
    """A float32 value that lies in memory as a half, with the layout of its metadata."""
    meta = replace(value.meta, dtype=dtype)
    source = value.meta.dtype
    loader = lambda scope, index: converted(scope.ops, scope.load(value, index), source, dtype)  # noqa: E731
    window = context.store(LoweredValue(meta, loader, None, value.chain, value.reads, value.layout)).window
    assert window is not None
    return window_value(value.meta, window)


def lower_bitcast(context: Context, node: fx.Node, operands: tuple[LoweredValue, ...]) -> LoweredValue:
    """The same bits; a half is float32 inside a body and has no bits of its own there."""
    (x,) = operands
    meta = node.meta["val"]
    if x.meta.dtype in HALVES or meta.dtype in HALVES:
        raise LoweringError.at(node, "bitcast of a half has no loop form", "decompose it to an extern aten.view.dtype")
    loader = lambda scope, index: scope.ops.bitcast(scope.load(x, index), meta.dtype)  # noqa: E731
    return computed(meta, loader, operands, node.name)


def lower_checked(context: Context, node: fx.Node, operands: tuple[LoweredValue, ...]) -> LoweredValue:
    """The value, and a position that is out of range where the condition does not hold."""
    x, holds = operands
    frame = node.meta.get("frame")
    what = VALUE_CHECK + str(node.kwargs["message"]) + (f" at {frame}" if frame else "")

    def loader(scope: Scope, index: Index) -> Any:
        ops = scope.ops
        place = ops.where(scope.load(holds, index), ops.constant(0, torch.int32), ops.constant(2, torch.int32))
        ops.indirect(place, sympy.Integer(2), what)
        return scope.load(x, index)

    return computed(node.meta["val"], loader, operands, node.name)


def lower_full(context: Context, node: fx.Node, operands: tuple[LoweredValue, ...]) -> LoweredValue:
    """A literal or runtime scalar, inlined."""
    meta, value = node.meta["val"], node.kwargs["value"]
    return computed(meta, lambda scope, index: number(scope.ops, value, meta.dtype), ())


def lower_iota(context: Context, node: fx.Node, operands: tuple[LoweredValue, ...]) -> LoweredValue:
    """start + i * step: in index arithmetic for ints, with a rounding for each operation for floats."""
    meta, start, step = node.meta["val"], node.kwargs["start"], node.kwargs["step"]
    if isinstance(start, int) and isinstance(step, int) and not meta.dtype.is_floating_point:
        return computed(meta, lambda scope, index: scope.ops.index_expr(start + index[0] * step, meta.dtype), ())
    wide = inner_dtype(meta.dtype) if meta.dtype.is_floating_point else torch.float32

    def loader(scope: Scope, index: Index) -> Any:
        ops = scope.ops
        scaled = ops.mul(ops.index_expr(index[0], wide), literal(ops, step, wide))  # type: ignore[arg-type]
        total = ops.add(scaled, literal(ops, start, wide))  # type: ignore[arg-type]
        return converted(ops, total, wide, meta.dtype)

    return computed(meta, loader, (), node.name)


def lower_random_bits(context: Context, node: fx.Node, operands: tuple[LoweredValue, ...]) -> LoweredValue:
    """Philox at the flat index of the element."""
    meta, seed, stream = node.meta["val"], node.kwargs["seed"], node.kwargs["stream"]

    def loader(scope: Scope, index: Index) -> Any:
        ops = scope.ops
        counter = ops.index_expr(flatten(index, meta.shape), torch.int64)
        return ops.random_bits(number(ops, seed, torch.int64), ops.constant(stream, torch.int32), counter)

    return computed(meta, loader, (), node.name)


RULES: dict[str, Rule] = {
    **dict.fromkeys(POINTWISE_OPS, lower_elementwise),
    "convert": lower_convert,
    "bitcast": lower_bitcast,
    "checked": lower_checked,
    "full": lower_full,
    "iota": lower_iota,
    "random_bits": lower_random_bits,
}

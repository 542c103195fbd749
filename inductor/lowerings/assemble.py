"""Primitives whose elements come from one of several places: cat, pad, slice_scatter, as_strided_scatter.

Invariant: a branch that is not taken loads nothing (its index may point anywhere); conditions are comparisons of index
expressions, so code generators can split or hoist them.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import sympy
import torch
from torch import fx
from torchlazy.inductor import choices
from torchlazy.inductor.index import ZERO, FloorDiv, Index, Mod, bounds, unflatten
from torchlazy.inductor.lowerings.context import Context, Rule
from torchlazy.inductor.lowerings.pointwise import exact_number, literal, number
from torchlazy.inductor.lowerings.value import LoweredValue, Scope, buffer_value, computed, count, is_dense
from torchlazy.prims.attrs import is_runtime_scalar
from torchlazy.prims.meta import Dim, TensorMeta
from torchlazy.prims.size_int import hint, surely_at_least, surely_equal, surely_less

Test: TypeAlias = "tuple[str, sympy.Expr, Dim]"  # comparison, index expression, bound


def _holds(test: Test) -> bool | None:
    """Whether a comparison is decided by the ranges of its axes."""
    op, expr, bound = test
    low, high = bounds(sympy.sympify(expr))
    if not isinstance(bound, int):
        return None
    match op:
        case "ge" | "lt":
            if low is not None and surely_at_least(low, bound):
                return op == "ge"
            if high is not None and surely_less(high, bound):
                return op == "lt"
            return None
        case "eq":
            if low is None or high is None:
                return None
            return True if surely_equal(low, high) and surely_equal(low, bound) else None
    raise AssertionError(op)


def condition(ops: Any, tests: list[Test]) -> Any:
    """All tests hold, as a bool value; True or False itself where the axes' ranges decide."""
    result: Any = True
    for test in tests:
        decided = _holds(test)
        if decided is False:
            return False
        if decided:
            continue
        op, expr, bound = test
        value = getattr(ops, op)(
            ops.index_expr(sympy.sympify(expr), torch.int64), ops.index_expr(sympy.sympify(bound), torch.int64)
        )
        result = value if result is True else ops.bitwise_and(result, value)
    return result


def choose(scope: Scope, holds: Any, inside: LoweredValue, at: Index, otherwise: Any) -> Any:
    """`inside` at `at` where `holds`, else the value `otherwise` (a callable)."""
    if holds is True:
        return scope.load(inside, at)
    if holds is False:
        return otherwise()
    masked = scope.masked(holds, lambda inner: inner.load(inside, at), _zero(inside.meta.dtype))
    return scope.ops.where(holds, masked, otherwise())


def _zero(dtype: torch.dtype) -> bool | int | float:
    return False if dtype == torch.bool else 0.0 if dtype.is_floating_point else 0


def lower_pad(context: Context, node: fx.Node, operands: tuple[LoweredValue, ...]) -> LoweredValue:
    """The operand inside the border, `value` on it."""
    (x,) = operands
    low, high = _dims(node, "low"), _dims(node, "high")
    meta = node.meta["val"]
    value: Any = node.kwargs["value"]

    def loader(scope: Scope, index: Index) -> Any:
        tests: list[Test] = []
        for i, below, size, above in zip(index, low, x.shape, high, strict=True):
            tests += [] if surely_equal(below, 0) else [("ge", i, below)]
            tests += [] if surely_equal(above, 0) and size != 0 else [("lt", i, below + size)]
        holds = condition(scope.ops, tests)
        at = tuple(i - below for i, below in zip(index, low, strict=True))
        if holds is True or holds is False or is_runtime_scalar(value):
            return choose(scope, holds, x, at, lambda: number(scope.ops, value, meta.dtype))
        return scope.masked(holds, lambda inner: inner.load(x, at), exact_number(value, meta.dtype))

    return computed(meta, loader, operands, node.name)


def lower_cat(context: Context, node: fx.Node, operands: tuple[LoweredValue, ...]) -> LoweredValue:
    """Nested choices by the position along the axis; many operands are one aten.cat."""
    axis: int = node.kwargs["axis"]  # type: ignore[assignment]
    meta = node.meta["val"]
    operands = tuple(x for x in operands if x.shape[axis] != 0) or operands[:1]
    if len(operands) == 1:
        return computed(meta, lambda scope, index: scope.load(operands[0], index), operands, node.name)
    if len(operands) > choices.MAX_INLINE_CAT and count(meta.shape) != 0:
        buffer = context.new_buffer(meta)
        refs = tuple(context.operand_ref(x) for x in operands)
        context.emit_extern(torch.ops.aten.cat.default, (refs, axis), {}, (buffer,), node.name)
        return buffer_value(buffer)
    starts: list[Dim] = [0]
    for x in operands:
        starts.append(starts[-1] + x.shape[axis])

    def loader(scope: Scope, index: Index, first: int = 0) -> Any:
        x, start = operands[first], starts[first]
        at = tuple(i - start if d == axis else i for d, i in enumerate(index))
        if first == len(operands) - 1:
            holds = condition(scope.ops, [("ge", index[axis], start)])
            if holds is True:
                return scope.load(x, at)
            return scope.masked(holds, lambda inner: inner.load(x, at), _zero(meta.dtype))
        # Outside of its own part no operand loads: the tests before this one are implied by the nesting of `where`.
        tests: list[Test] = [("ge", index[axis], start), ("lt", index[axis], starts[first + 1])]
        upper = condition(scope.ops, tests[1:])
        holds = condition(scope.ops, tests)
        if upper is False:
            return loader(scope, index, first + 1)
        if upper is True:
            return scope.load(x, at) if holds is True else _guarded(scope, holds, x, at)
        return scope.ops.where(upper, _guarded(scope, holds, x, at), loader(scope, index, first + 1))

    return computed(meta, loader, operands, node.name)


def _guarded(scope: Scope, holds: Any, x: LoweredValue, at: Index) -> Any:
    if holds is False:
        return literal(scope.ops, 0, x.meta.dtype)
    return scope.masked(holds, lambda inner: inner.load(x, at), _zero(x.meta.dtype))


def _scatter(
    node: fx.Node, x: LoweredValue, src: LoweredValue,
    starts: tuple[Dim, ...], steps: tuple[Dim, ...], sizes: tuple[Dim, ...], axis_of: tuple[int | None, ...],
) -> LoweredValue:  # fmt: skip
    """x with `src` at start + k * step (k < size) in every dimension; dimension d of x is dimension axis_of[d] of
    src."""

    def loader(scope: Scope, index: Index) -> Any:
        tests: list[Test] = []
        at: list[sympy.Expr] = [ZERO] * len(src.shape)
        for i, start, step, size, axis, whole in zip(index, starts, steps, sizes, axis_of, x.shape, strict=True):
            if axis is not None:
                at[axis] = FloorDiv(i - start, step)
            if start == 0 and step == 1 and size == whole:
                continue
            shifted = i - start
            tests += [("ge", i, start)] if start != 0 else []
            tests += [("lt", i, start + step * size)] if start + step * size < whole else []
            tests += [("eq", Mod(shifted, step), 0)] if step != 1 else []
        return choose(scope, condition(scope.ops, tests), src, tuple(at), lambda: scope.load(x, index))

    return computed(node.meta["val"], loader, (x, src), node.name)


def lower_slice_scatter(context: Context, node: fx.Node, operands: tuple[LoweredValue, ...]) -> LoweredValue:
    """x with the slice replaced."""
    x, src = operands
    starts, steps = _dims(node, "starts"), _dims(node, "steps")
    return _scatter(node, x, src, starts, steps, src.shape, tuple(range(len(src.shape))))


def lower_as_strided_scatter(context: Context, node: fx.Node, operands: tuple[LoweredValue, ...]) -> LoweredValue:
    """x with a window of its layout replaced: per dimension where the window follows x's dimensions, by a walk over the
    flat position where it is contiguous, else the ATen op."""
    x, src = operands
    shape, strides = _dims(node, "shape"), _dims(node, "strides")
    offset: Dim = node.kwargs["offset"]  # type: ignore[assignment]
    if count(shape) == 0:
        return computed(node.meta["val"], lambda scope, index: scope.load(x, index), (x,), node.name)
    aligned = _align(x.meta, shape, strides, offset)
    if aligned is not None:
        return _scatter(node, x, src, *aligned)
    if is_dense(shape, strides) and is_dense(x.shape, x.meta.strides) and isinstance(offset, int):
        return _scatter_run(node, x, src, shape, strides, offset)
    buffer = context.new_buffer(node.meta["val"], x.meta.strides)
    refs = context.operand_ref(x), context.operand_ref(src)
    arguments = (*refs, shape, strides, offset)
    context.emit_extern(torch.ops.aten.as_strided_scatter.default, arguments, {}, (buffer,), node.name)
    return buffer_value(buffer)


_Alignment: TypeAlias = "tuple[tuple[Dim, ...], tuple[Dim, ...], tuple[Dim, ...], tuple[int | None, ...]]"


def _align(x: TensorMeta, shape: tuple[Dim, ...], strides: tuple[Dim, ...], offset: Dim) -> _Alignment | None:
    """(starts, steps, sizes, axis_of) if the window is a slice of each dimension of x, permuted; else None."""
    if not all(isinstance(d, int) for d in (*shape, *strides, offset, *x.shape, *x.strides)):
        return None
    if not is_dense(x.shape, x.strides):
        return None
    starts, steps, sizes = [0] * x.rank, [1] * x.rank, [1] * x.rank
    axis_of: list[int | None] = [None] * x.rank
    dims = sorted((d for d in range(x.rank) if x.shape[d] != 1), key=lambda d: -hint(x.strides[d]))
    for d in dims:
        starts[d], offset = divmod(offset, x.strides[d])
        if starts[d] >= x.shape[d]:
            return None
    for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        if size == 1:
            continue
        owner = next((d for d in dims if stride >= x.strides[d]), None)
        if owner is None or axis_of[owner] is not None or stride % x.strides[owner] != 0:
            return None
        step = stride // x.strides[owner]
        if starts[owner] + step * (size - 1) >= x.shape[owner]:
            return None
        steps[owner], sizes[owner], axis_of[owner] = step, size, axis
    return tuple(starts), tuple(steps), tuple(sizes), tuple(axis_of)


def _scatter_run(
    node: fx.Node, x: LoweredValue, src: LoweredValue, shape: tuple[Dim, ...], strides: tuple[Dim, ...], offset: int
) -> LoweredValue:
    """A window without gaps covers the run offset .. offset + numel - 1 of x's memory."""
    order = sorted((d for d in range(len(shape)) if shape[d] != 1), key=lambda d: -hint(strides[d]))
    sizes = tuple(shape[d] for d in order)
    total = count(sizes)

    def loader(scope: Scope, index: Index) -> Any:
        place = sum((i * stride for i, stride in zip(index, x.meta.strides, strict=True)), ZERO)
        holds = condition(scope.ops, [("ge", place, offset), ("lt", place, offset + total)])
        at: list[sympy.Expr] = [ZERO] * len(shape)
        for d, i in zip(order, unflatten(place - offset, sizes), strict=True):
            at[d] = i
        return choose(scope, holds, src, tuple(at), lambda: scope.load(x, index))

    return computed(node.meta["val"], loader, (x, src), node.name)


def _dims(node: fx.Node, name: str) -> tuple[Dim, ...]:
    return tuple(node.kwargs[name])  # type: ignore[arg-type]


RULES: dict[str, Rule] = {
    "pad": lower_pad,
    "cat": lower_cat,
    "slice_scatter": lower_slice_scatter,
    "as_strided_scatter": lower_as_strided_scatter,
}

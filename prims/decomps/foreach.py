"""`_foreach_*`: the same operator on each tensor of a list, as that many single operators.

Invariant: a rule gives one value for each tensor of the list, made by the rule of the single operator, whose
promotion and rounding ATen's own slow path has. That the values become few kernels is the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any

import torch
from torch.fx import Node
from torchlazy.prims.builder import Builder, rule
from torchlazy.prims.decomps.reduction import norm_over
from torchlazy.prims.decomps.value import Number, Value, value
from torchlazy.prims.promotion import compute_dtype

aten = torch.ops.aten

Tensors = Sequence[Node]
Numbers = Sequence[Number]

# Operators of one tensor and no other argument: _foreach_x of a list is x of each.
UNARY = (
    "abs", "acos", "asin", "atan", "ceil", "clone", "cos", "cosh", "erf", "erfc", "exp", "expm1", "floor", "frac",
    "lgamma", "log", "log10", "log1p", "log2", "max", "neg", "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin",
    "sinh", "sqrt", "tan", "tanh", "trunc",
)  # fmt: skip

# Operators of a tensor and a number or tensor: the single overload for each form of the second operand.
# `maximum` has no overload for numbers; `clamp_min` is the same function.
BINARY: dict[str, tuple[str, str]] = {
    "add": ("add.Tensor", "add.Scalar"),
    "sub": ("sub.Tensor", "sub.Scalar"),
    "mul": ("mul.Tensor", "mul.Scalar"),
    "div": ("div.Tensor", "div.Scalar"),
    "pow": ("pow.Tensor_Tensor", "pow.Tensor_Scalar"),
    "clamp_max": ("clamp_max.Tensor", "clamp_max.default"),
    "clamp_min": ("clamp_min.Tensor", "clamp_min.default"),
    "maximum": ("maximum.default", "clamp_min.default"),
    "minimum": ("minimum.default", "clamp_max.default"),
}


def _single(text: str) -> torch._ops.OpOverload:
    name, overload = text.split(".")
    return getattr(getattr(aten, name), overload)


def _each(b: Builder, single: torch._ops.OpOverload, *columns: Iterable[Any], **kwargs: Any) -> tuple[Node, ...]:
    """`single` on each row of the columns; its result is one of the list's, so nothing is inferred anew."""
    return tuple(b.apply(single, tuple(row), kwargs, wanted) for wanted, *row in zip(b.wanted, *columns))


def _register_unary(name: str) -> None:
    @rule(f"_foreach_{name}.default")
    def each(b: Builder, tensors: Tensors, **layout: Any) -> tuple[Node, ...]:  # clone takes a memory format
        return _each(b, _single(f"{name}.default"), tensors, **layout)


def _register_binary(name: str, with_tensor: str, with_number: str) -> None:
    # `alpha` exists for add and sub only, and only beside tensors.
    @rule(f"_foreach_{name}.List")
    def each_list(b: Builder, tensors: Tensors, others: Tensors, **alpha: Number) -> tuple[Node, ...]:
        return _each(b, _single(with_tensor), tensors, others, **alpha)

    @rule(f"_foreach_{name}.Tensor")
    def each_tensor(b: Builder, tensors: Tensors, other: Node, **alpha: Number) -> tuple[Node, ...]:
        return _each(b, _single(with_tensor), tensors, repeat(other), **alpha)

    @rule(f"_foreach_{name}.Scalar")
    def each_scalar(b: Builder, tensors: Tensors, number: Number) -> tuple[Node, ...]:
        return _each(b, _single(with_number), tensors, repeat(number))

    @rule(f"_foreach_{name}.ScalarList")
    def each_scalar_list(b: Builder, tensors: Tensors, numbers: Numbers) -> tuple[Node, ...]:
        return _each(b, _single(with_number), tensors, numbers)


for _name in UNARY:
    _register_unary(_name)
for _name, (_with_tensor, _with_number) in BINARY.items():
    _register_binary(_name, _with_tensor, _with_number)


@rule("_foreach_pow.ScalarAndTensor")
def pow_of_number(b: Builder, base: Number, exponents: Tensors) -> tuple[Node, ...]:
    """base ** exponent"""
    return _each(b, aten.pow.Scalar, repeat(base), exponents)


def _register_pointwise_ternary(name: str, combine: Callable[[Value, Value], Value]) -> None:
    """addcmul and addcdiv: self + value * combine(first, second)"""
    single = _single(f"{name}.default")

    @rule(f"_foreach_{name}.Scalar")
    def each_scalar(b: Builder, tensors: Tensors, first: Tensors, second: Tensors, number: Number) -> tuple[Node, ...]:
        return _each(b, single, tensors, first, second, value=number)

    @rule(f"_foreach_{name}.ScalarList")
    def each_scalar_list(
        b: Builder, tensors: Tensors, first: Tensors, second: Tensors, numbers: Numbers
    ) -> tuple[Node, ...]:
        rows = zip(b.wanted, numbers, tensors, first, second, strict=True)
        return tuple(b.apply(single, tuple(row), {"value": number}, wanted) for wanted, number, *row in rows)

    @rule(f"_foreach_{name}.Tensor")
    def each_tensor(
        b: Builder, tensors: Tensors, first: Tensors, second: Tensors, numbers: Node
    ) -> tuple[Node, ...] | None:
        """The factors are the elements of one 1-D tensor (on the CPU, as ATen has it)."""
        results = []
        for i, operands in enumerate(zip(tensors, first, second, strict=True)):
            dtype = b.dtype(operands[0])
            if any(b.dtype(x) != dtype for x in operands) or not dtype.is_floating_point:
                return None
            x, y, z = (value(b, operand, compute_dtype(dtype)) for operand in operands)
            moved = value(b, b.to_device(numbers, x.meta.device)).to(x.dtype)
            factor = moved.narrow(0, i, 1).reshape(())
            results.append((x + factor * combine(y, z)).to(dtype).node)
        return tuple(results)


_register_pointwise_ternary("addcmul", lambda y, z: y * z)
_register_pointwise_ternary("addcdiv", lambda y, z: y / z)


@rule("_foreach_lerp.List")
def lerp_list(b: Builder, tensors: Tensors, ends: Tensors, weights: Tensors) -> tuple[Node, ...]:
    return _each(b, aten.lerp.Tensor, tensors, ends, weights)


@rule("_foreach_lerp.Scalar")
def lerp_scalar(b: Builder, tensors: Tensors, ends: Tensors, weight: Number) -> tuple[Node, ...]:
    return _each(b, aten.lerp.Scalar, tensors, ends, repeat(weight))


@rule("_foreach_lerp.ScalarList")
def lerp_scalar_list(b: Builder, tensors: Tensors, ends: Tensors, weights: Numbers) -> tuple[Node, ...]:
    return _each(b, aten.lerp.Scalar, tensors, ends, weights)


@rule("_foreach_norm.Scalar")
def norm(b: Builder, tensors: Tensors, ord: Number = 2, dtype: torch.dtype | None = None) -> tuple[Node, ...]:
    """The norm of each tensor over all its axes."""
    every = (repeat(x) for x in (ord, None, False))
    return _each(b, aten.linalg_vector_norm.default, tensors, *every, dtype=dtype)


@rule("_foreach_powsum.Scalar")
def powsum(b: Builder, tensors: Tensors, ord: Number = 2, dtype: torch.dtype | None = None) -> tuple[Node, ...] | None:
    """sum |x|^p of each tensor: a norm without its root"""
    if isinstance(ord, Node):
        return None
    results = []
    for tensor in tensors:
        result = dtype or b.dtype(tensor)
        x = value(b, tensor, result).to(compute_dtype(result))
        axes = tuple(range(x.rank))
        if ord in (0, 1):
            total = norm_over(x, float(ord), axes, False)
        else:
            total = (x * x if ord == 2 else abs(x) ** float(ord)).sum(axes)
        results.append(total.to(result).node)
    return tuple(results)


@rule("_foreach_zero.default")
def zero(b: Builder, tensors: Tensors) -> tuple[Node, ...]:
    return tuple(b.full_like(x, 0) for x in tensors)


@rule("_foreach_copy.default")
def copy(b: Builder, tensors: Tensors, sources: Tensors, non_blocking: bool = False) -> tuple[Node, ...]:
    """Each source with the dtype and shape of the tensor that it is written over."""
    return tuple(
        b.result(b.to_device(source, b.meta(x).device), b.meta(x)) for x, source in zip(tensors, sources, strict=True)
    )


@rule("_foreach_mm.default")
def mm(b: Builder, tensors: Tensors, others: Tensors) -> tuple[Node, ...]:
    return _each(b, aten.mm.default, tensors, others)

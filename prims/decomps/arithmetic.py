"""Rules of arithmetic on two or more operands.

Invariant: halves compute in float32, and numbers beside them are rounded or not as in ATen's kernels; sums and products
of bools are `or` and `and`, so that no primitive does arithmetic on bool.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torchlazy.prims import ops
from torchlazy.prims.builder import Builder, NotApplicable, rule
from torchlazy.prims.decomps.checks import checked_divisor
from torchlazy.prims.decomps.pointwise import elementwise
from torchlazy.prims.decomps.value import Value, value
from torchlazy.prims.promotion import HALVES, compute_dtype, is_integral

aten = torch.ops.aten


def _is_one(value: Any) -> bool:
    return not isinstance(value, fx.Node) and value == 1


def _rounds_numbers(b: Builder) -> bool:
    """Sums beside a half: ATen's CPU kernels round a number to the half first, its CUDA kernels do not."""
    return b.wanted.device == "cpu"


def scaled(b: Builder, x: fx.Node, factor: Any) -> fx.Node:
    """factor * x in x's dtype; x itself for the literal 1"""
    if _is_one(factor):
        return x
    return b.prim(ops.bitwise_and if b.dtype(x) == torch.bool else ops.mul, x, factor)


def _times_alpha(b: Builder, y: fx.Node, alpha: Any, dtype: torch.dtype) -> fx.Node:
    if _is_one(alpha) or not _rounds_numbers(b):
        return scaled(b, y, alpha)
    return scaled(b, y, b.convert(b.full_like(y, alpha, dtype), b.dtype(y)))


@rule(aten.add.Tensor, aten.add.Scalar)
def add(b: Builder, x: Any, y: Any, alpha: Any = 1) -> fx.Node:
    """x + alpha * y"""
    (x, y), dtype = b.promote(x, y, round_numbers=_rounds_numbers(b))
    prim = ops.bitwise_or if dtype == torch.bool else ops.add
    return b.convert(b.prim(prim, x, _times_alpha(b, y, alpha, dtype)), dtype)


@rule(aten.sub.Tensor, aten.sub.Scalar)
def sub(b: Builder, x: Any, y: Any, alpha: Any = 1) -> fx.Node:
    """x - alpha * y"""
    (x, y), dtype = b.promote(x, y, round_numbers=_rounds_numbers(b))
    return b.convert(b.prim(ops.sub, x, _times_alpha(b, y, alpha, dtype)), dtype)


@rule(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(b: Builder, x: Any, y: Any, alpha: Any = 1) -> fx.Node:
    """y - alpha * x"""
    return sub(b, y, x, alpha)


@rule(aten.mul.Tensor, aten.mul.Scalar)
def mul(b: Builder, x: Any, y: Any) -> fx.Node:
    """x * y"""
    (x, y), dtype = b.promote(x, y, round_numbers=False)
    return b.convert(b.prim(ops.bitwise_and if dtype == torch.bool else ops.mul, x, y), dtype)


@rule(
    aten.div.Tensor, aten.div.Scalar, aten.div.Tensor_mode, aten.div.Scalar_mode,
    "true_divide.Tensor", "true_divide.Scalar", "divide.Tensor", "divide.Scalar",
)  # fmt: skip
def div(b: Builder, x: Any, y: Any, *, rounding_mode: str | None = None) -> fx.Node:
    """x / y, in the default float dtype for integers; rounded towards zero ("trunc") or down ("floor")"""
    if rounding_mode is None:
        return elementwise(b, ops.div, x, y, kind="int_to_float", round_numbers=False)
    if rounding_mode == "floor":
        return floor_divide(b, x, y)
    (x_node, y_node), dtype = b.promote(x, y, round_numbers=False)
    if dtype in HALVES and b.is_tensor(y) and b.shape(y):
        # ATen rounds the quotient of two tensors to the half before it truncates
        quotient = b.convert(b.convert(b.prim(ops.div, x_node, y_node), dtype), torch.float32)
        return b.convert(b.prim(ops.trunc, quotient), dtype)
    return divided(b, ops.trunc_div, x, y, round_numbers=False)


def divided(b: Builder, prim: ops.Prim, x: Any, y: Any, *, round_numbers: bool = True) -> fx.Node:
    """A division with remainder: not defined for bools, nor for integers by 0."""
    (x, y), dtype = b.promote(x, y, round_numbers=round_numbers)
    if dtype == torch.bool:
        raise NotApplicable("division with remainder of bools")
    if not dtype.is_floating_point:
        y = checked_divisor(Value(b, y)).node
    return b.convert(b.prim(prim, x, y), dtype)


@rule(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(b: Builder, x: Any, y: Any) -> fx.Node:
    """Python's x // y"""
    (v, w), dtype = b.promote(x, y, round_numbers=False)
    if dtype in HALVES and b.is_tensor(y) and b.shape(y):
        return _floor_division_of_halves(Value(b, v), Value(b, w), dtype)
    return divided(b, ops.floor_div, x, y, round_numbers=False)


def _floor_division_of_halves(x: Value, y: Value, dtype: torch.dtype) -> fx.Node:
    """(x - fmod(x, y)) / y, one less where the signs differ, to the nearest integer

    ATen rounds each step to the half. The question for NaN answers nothing new: a rounding that is looked at stays.
    """

    def rounded(value: Value) -> Value:
        return value.to(dtype).to(torch.float32)

    x = rounded(x)  # a number too
    rest = Value(x.b, x.b.prim(ops.fmod, x.node, y.node))
    multiple = rounded(x - rest)
    quotient = rounded(multiple / y)
    quotient = rest.ne(0.0).both(y.lt(0.0).ne(rest.lt(0.0))).where(rounded(quotient - 1.0), quotient)
    low = quotient.floor()
    nearest = (quotient - low).gt(0.5).where(low + 1.0, low)
    zero = Value(x.b, x.b.prim(ops.copysign, x.like(0.0).node, (x / y).node))
    found = multiple.isnan().where(multiple, quotient.eq(0.0).where(zero, nearest))
    return y.eq(0.0).where(x / y, found).to(dtype).node


@rule(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(b: Builder, x: Any, y: Any) -> fx.Node:
    """Python's x % y"""
    return divided(b, ops.remainder, x, y)


@rule(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(b: Builder, x: Any, y: Any) -> fx.Node:
    """C's x % y"""
    return divided(b, ops.fmod, x, y)


@rule(aten.atan2.default)
def atan2(b: Builder, x: Any, y: Any) -> fx.Node:
    """The angle of the point (y, x)"""
    return elementwise(b, ops.atan2, x, y, kind="int_to_float")


@rule(aten.copysign.Tensor, aten.copysign.Scalar)
def copysign(b: Builder, x: Any, y: Any) -> fx.Node:
    """|x| with the sign of y"""
    return elementwise(b, ops.copysign, x, y, kind="int_to_float")


@rule(aten.hypot.default)
def hypot(b: Builder, x: Any, y: Any) -> fx.Node:
    """sqrt(x*x + y*y)"""
    return elementwise(b, ops.hypot, x, y)


@rule(aten.nextafter.default)
def nextafter(b: Builder, x: Any, y: Any) -> fx.Node:
    """The float after x towards y; a half's neighbour is not a float32's"""
    (x, y), dtype = b.promote(x, y)
    if dtype.itemsize < 4:
        raise NotApplicable(f"nextafter of {dtype}")
    return b.prim(ops.nextafter, x, y)


# --- powers ---


@rule(aten.pow.Tensor_Tensor)
def pow_(b: Builder, x: fx.Node, y: fx.Node) -> fx.Node:
    """x ** y"""
    return _power(b, x, y)


def _power(b: Builder, x: Any, y: Any) -> fx.Node:
    (x, y), dtype = b.promote(x, y)
    if dtype == torch.bool:
        raise NotApplicable("power of bools")
    return b.convert(b.prim(ops.pow, x, y), dtype)


@rule(aten.pow.Tensor_Scalar)
def pow_scalar(b: Builder, x: fx.Node, y: Any) -> fx.Node:
    """x ** y; the exponents that ATen computes without a power, in the same way"""
    if isinstance(y, fx.Node):
        return _power(b, x, y)
    (base, _), dtype = b.promote(x, y)
    if y == 0:
        return b.full_like(base, 1, dtype)
    if y == 1:
        return b.convert(base, dtype)
    # ATen's CPU kernels take the square root of no half, which shows at -inf and -0.0
    result = None if abs(y) == 0.5 and dtype in HALVES and b.wanted.device == "cpu" else _small_power(b, base, y)
    if result is None:
        result = b.prim(ops.pow, base, y)
    return b.convert(result, dtype)


def _small_power(b: Builder, x: fx.Node, y: float) -> fx.Node | None:
    if y == 2:
        return b.prim(ops.mul, x, x)
    if y == 3:
        return b.prim(ops.mul, b.prim(ops.mul, x, x), x)
    if is_integral(b.dtype(x)):
        return None
    if y == 0.5:
        return b.prim(ops.sqrt, x)
    if y == -0.5:
        return b.prim(ops.rsqrt, x)
    if y == -1:
        return b.prim(ops.reciprocal, x)
    if y == -2:
        return b.prim(ops.reciprocal, b.prim(ops.mul, x, x))
    return None


@rule(aten.pow.Scalar)
def pow_of_scalar(b: Builder, x: Any, y: fx.Node) -> fx.Node:
    """x ** y"""
    if _is_one(x):
        return b.full_like(y, 1, b.wanted.dtype)
    return _power(b, x, y)


@rule("float_power.Tensor_Tensor", "float_power.Scalar", "float_power.Tensor_Scalar")
def float_power(b: Builder, x: Any, y: Any) -> fx.Node:
    """x ** y in float64"""
    x, y = (b.convert(v, torch.float64) if b.is_tensor(v) else v for v in (x, y))
    if not b.is_tensor(x):
        return pow_of_scalar(b, float(x), y)
    return pow_(b, x, y) if b.is_tensor(y) else pow_scalar(b, x, y if isinstance(y, fx.Node) else float(y))


@rule("square.default")
def square(b: Builder, x: fx.Node) -> fx.Node:
    """x * x"""
    return pow_scalar(b, x, 2)


@rule(aten.ldexp.Tensor)
def ldexp(b: Builder, x: fx.Node, y: fx.Node) -> fx.Node:
    """x * 2**y"""
    wanted = b.wanted
    dtype = compute_dtype(wanted.dtype)
    if b.dtype(x).is_floating_point and is_integral(b.dtype(y)):
        exponent = value(b, y, torch.int32).to(torch.float64)  # ATen's kernel takes an int
        return _times_whole_power(b, value(b, x, dtype), exponent).to(wanted.dtype).node
    power = b.aten(aten.pow.Scalar, 2.0, y)
    x, power = (b.broadcast(b.convert(v, dtype), wanted.shape) for v in (x, power))
    return b.convert(b.prim(ops.mul, x, power), wanted.dtype)


def _times_whole_power(b: Builder, x: Value, y: Value) -> Value:
    """x * 2**y, rounded once: the power alone may lie far beyond what float32, or float64, can hold"""
    shape, dtype = b.wanted.shape, x.dtype
    x, y = x.to(torch.float64).broadcast(shape), y.broadcast(shape)
    two = y.like(2.0)
    if dtype == torch.float32:
        power = b.prim(ops.pow, two.node, b.prim(ops.minimum, b.prim(ops.maximum, y.node, -300.0), 300.0))
        return (x * Value(b, power)).to(dtype)
    rest = Value(b, b.prim(ops.minimum, b.prim(ops.maximum, y.node, -2200.0), 2200.0))
    for _ in range(3):
        step = Value(b, b.prim(ops.minimum, b.prim(ops.maximum, rest.node, -750.0), 750.0))
        x, rest = x * Value(b, b.prim(ops.pow, two.node, step.node)), rest - step
    return x


# --- three operands ---


@rule(aten.addcmul.default)
def addcmul(b: Builder, x: Any, t1: Any, t2: Any, *, value: Any = 1) -> fx.Node:
    """x + value * t1 * t2, from left to right"""
    (x, t1, t2), dtype = b.promote(x, t1, t2)
    if dtype == torch.bool:
        raise NotApplicable("addcmul of bools")
    return b.convert(b.prim(ops.add, x, b.prim(ops.mul, scaled(b, t1, value), t2)), dtype)


@rule(aten.addcdiv.default)
def addcdiv(b: Builder, x: Any, t1: Any, t2: Any, *, value: Any = 1) -> fx.Node:
    """x + value * t1 / t2, from left to right"""
    (x, t1, t2), dtype = b.promote(x, t1, t2)
    return b.convert(b.prim(ops.add, x, b.prim(ops.div, scaled(b, t1, value), t2)), dtype)


@rule(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(b: Builder, start: fx.Node, end: fx.Node, weight: Any) -> fx.Node:
    """start + weight * (end - start), from the nearer end: exact at weights 0 and 1"""
    (start, end, weight_node), dtype = b.promote(start, end, weight, kind="no_promotion", round_numbers=False)
    distance = b.prim(ops.sub, end, start)

    def from_start() -> fx.Node:
        return b.prim(ops.add, start, b.prim(ops.mul, weight_node, distance))

    def from_end() -> fx.Node:
        rest = b.prim(ops.sub, b.full_like(weight_node, 1), weight_node)
        return b.prim(ops.sub, end, b.prim(ops.mul, distance, rest))

    if isinstance(weight, fx.Node):
        near = b.prim(ops.lt, b.prim(ops.abs, weight_node), 0.5)
        result = b.prim(ops.where, near, from_start(), from_end())
    else:
        result = from_start() if abs(weight) < 0.5 else from_end()
    return b.convert(result, dtype)

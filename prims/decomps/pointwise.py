"""Rules of elementwise operators that are one primitive, or a choice between values.

Invariant: the prims compute what ATen's CPU kernels compute, element for element: in float32 for halves, rounded once
at the end of each ATen operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torchlazy.prims import ops
from torchlazy.prims.builder import Builder, NotApplicable, Promotion, Rule, rule
from torchlazy.prims.decomps.checks import checked_number
from torchlazy.prims.decomps.value import Value
from torchlazy.prims.promotion import is_integral

aten = torch.ops.aten


def elementwise(
    b: Builder, prim: ops.Prim, *operands: Any, kind: Promotion = "default", round_numbers: bool = True
) -> fx.Node:
    """One primitive on promoted operands, converted to ATen's result dtype."""
    nodes, dtype = b.promote(*operands, kind=kind, round_numbers=round_numbers)
    return b.convert(b.prim(prim, *nodes), dtype)


# --- one operand ---

FLOAT_UNARY = (
    "sqrt", "rsqrt", "reciprocal", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan",
    "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "erfinv", "lgamma",
)  # fmt: skip


def _float_unary(prim: ops.Prim) -> Rule:
    def float_unary(b: Builder, x: fx.Node) -> fx.Node:
        return elementwise(b, prim, x, kind="int_to_float")

    return float_unary


for _name in FLOAT_UNARY:
    rule(f"{_name}.default")(_float_unary(ops.PRIMS[_name]))


def _rounding(prim: ops.Prim) -> Rule:
    def rounding(b: Builder, x: fx.Node) -> fx.Node:
        """Integers are their own floor, ceiling and so on."""
        return x if is_integral(b.dtype(x)) else elementwise(b, prim, x)

    return rounding


for _name in ("ceil", "floor", "trunc", "round"):
    rule(f"{_name}.default")(_rounding(ops.PRIMS[_name]))


@rule(aten.neg.default)
def neg(b: Builder, x: fx.Node) -> fx.Node:
    """-x"""
    return elementwise(b, ops.neg, x)


@rule(aten.abs.default)
def abs_(b: Builder, x: fx.Node) -> fx.Node:
    """|x|"""
    return x if b.dtype(x) in (torch.bool, torch.uint8) else elementwise(b, ops.abs, x)


@rule(aten.sign.default, aten.sgn.default)
def sign(b: Builder, x: fx.Node) -> fx.Node:
    """-1, 0 or 1"""
    return x if b.dtype(x) == torch.bool else elementwise(b, ops.sign, x)


def _predicate(prim: ops.Prim) -> Rule:
    def predicate(b: Builder, x: fx.Node) -> fx.Node:
        """Integers are never NaN or infinite."""
        if is_integral(b.dtype(x)):
            return b.full_like(x, False, torch.bool)
        return elementwise(b, prim, x, kind="bool_result")

    return predicate


for _name in ("isnan", "isinf"):
    rule(f"{_name}.default")(_predicate(ops.PRIMS[_name]))


@rule(aten.signbit.default)
def signbit(b: Builder, x: fx.Node) -> fx.Node:
    """The sign bit; for integers x < 0."""
    dtype = b.dtype(x)
    if dtype in (torch.bool, torch.uint8):
        return b.full_like(x, False, torch.bool)
    return b.prim(ops.lt, x, 0) if is_integral(dtype) else elementwise(b, ops.signbit, x, kind="bool_result")


@rule(aten.isfinite.default)
def isfinite(b: Builder, x: fx.Node) -> fx.Node:
    """|x| < inf, which is false for NaN too"""
    if is_integral(b.dtype(x)):
        return b.full_like(x, True, torch.bool)
    (x,), _ = b.promote(x)
    return b.prim(ops.lt, b.prim(ops.abs, x), float("inf"))


@rule(aten.isposinf.default)
def isposinf(b: Builder, x: fx.Node) -> fx.Node:
    """x == inf"""
    return _is_value(b, x, float("inf"))


@rule(aten.isneginf.default)
def isneginf(b: Builder, x: fx.Node) -> fx.Node:
    """x == -inf"""
    return _is_value(b, x, -float("inf"))


def _is_value(b: Builder, x: fx.Node, value: float) -> fx.Node:
    if is_integral(b.dtype(x)):
        return b.full_like(x, False, torch.bool)
    return elementwise(b, ops.eq, x, value, kind="bool_result")


@rule(aten.logical_not.default)
def logical_not(b: Builder, x: fx.Node) -> fx.Node:
    """x == 0"""
    return b.prim(ops.logical_not, b.convert(x, torch.bool))


@rule(aten.bitwise_not.default)
def bitwise_not(b: Builder, x: fx.Node) -> fx.Node:
    """~x"""
    return b.prim(ops.bitwise_not, x)


@rule(
    aten.positive.default, aten.alias.default, aten.detach.default, aten.lift_fresh.default, aten.lift.default,
    "_conj_physical.default", "_conj.default", "resolve_conj.default", "resolve_neg.default", "real.default",
    "alias_copy.default", "detach_copy.default", "lift_fresh_copy.default", "conj_physical.default",
)  # fmt: skip
def identity(b: Builder, x: fx.Node) -> fx.Node:
    """The same value; only a complex number has a conjugate of its own."""
    if b.dtype(x).is_complex:
        raise NotApplicable("complex dtype")
    return x


# --- comparisons, logic, bits ---


def _comparison(prim: ops.Prim) -> Rule:
    def comparison(b: Builder, x: Any, y: Any) -> fx.Node:
        """A number is first rounded to the tensor's dtype, as ATen wraps it."""
        nodes, _ = b.promote(x, y, kind="bool_result")
        return b.prim(prim, *nodes)

    return comparison


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    rule(f"{_name}.Tensor", f"{_name}.Scalar")(_comparison(ops.PRIMS[_name]))


def _logical(prim: ops.Prim) -> Rule:
    def logical(b: Builder, x: fx.Node, y: fx.Node) -> fx.Node:
        """The operands as bools, each from its own dtype."""
        (x, y), _ = b.promote(b.convert(x, torch.bool), b.convert(y, torch.bool))
        return b.prim(prim, x, y)

    return logical


for _name in ("and", "or", "xor"):
    rule(f"logical_{_name}.default")(_logical(ops.PRIMS[f"bitwise_{_name}"]))


def _bitwise(prim: ops.Prim) -> Rule:
    def bitwise(b: Builder, x: Any, y: Any) -> fx.Node:
        """The same on every bit."""
        return elementwise(b, prim, x, y)

    return bitwise


for _name in ("and", "or", "xor"):
    rule(f"bitwise_{_name}.Tensor", f"bitwise_{_name}.Scalar", f"bitwise_{_name}.Scalar_Tensor",
         f"__{_name}__.Tensor", f"__{_name}__.Scalar")(_bitwise(ops.PRIMS[f"bitwise_{_name}"]))  # fmt: skip


def _shift(prim: ops.Prim) -> Rule:
    def shift(b: Builder, x: Any, y: Any) -> fx.Node:
        """Integers only: ATen's shift of floats is a multiplication that few mean."""
        (x, y), dtype = b.promote(x, y)
        if not is_integral(dtype) or dtype == torch.bool:
            raise NotApplicable(f"shift of {dtype}")
        return b.prim(prim, x, y)

    return shift


for _name in ("left", "right"):
    rule(f"bitwise_{_name}_shift.Tensor", f"bitwise_{_name}_shift.Tensor_Scalar",
         f"bitwise_{_name}_shift.Scalar_Tensor", f"__{_name[0]}shift__.Tensor",
         f"__{_name[0]}shift__.Scalar")(_shift(ops.PRIMS[f"shift_{_name}"]))  # fmt: skip


# --- choices ---


@rule(aten.where.self, "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def where(b: Builder, condition: fx.Node, x: Any, y: Any) -> fx.Node:
    """x where the condition holds, else y"""
    (x, y), _ = b.promote(x, y, widen=False)
    device = b.wanted.device  # 0-dim operands may be elsewhere
    return select(b, *(v if b.shape(v) else b.to_device(v, device) for v in (condition, x, y)))


def select(b: Builder, condition: fx.Node, x: fx.Node, y: fx.Node) -> fx.Node:
    """`where` on operands of one dtype, broadcast together."""
    shape = b.wanted.shape
    operands = (b.broadcast(node, shape) for node in (b.convert(condition, torch.bool), x, y))
    return b.prim(ops.where, *operands)


@rule(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(b: Builder, x: fx.Node, mask: fx.Node, value: Any) -> fx.Node:
    """where(mask, value, x) in x's dtype"""
    meta = b.meta(x)
    if b.is_tensor(value):
        number = checked_number(Value(b, value), meta.dtype).node if b.dtype(value) != meta.dtype else value
        value = b.to_device(b.convert(number, meta.dtype), meta.device)
    else:
        value = b.full((), value, meta.dtype, meta.device)
    return select(b, mask, value, x)


@rule(aten.maximum.default, "max.other")
def maximum(b: Builder, x: fx.Node, y: fx.Node) -> fx.Node:
    """The larger; NaN wins"""
    return _extremum(b, ops.maximum, ops.bitwise_or, x, y)


@rule(aten.minimum.default, "min.other")
def minimum(b: Builder, x: fx.Node, y: fx.Node) -> fx.Node:
    """The smaller; NaN wins"""
    return _extremum(b, ops.minimum, ops.bitwise_and, x, y)


@rule(aten.fmax.default)
def fmax(b: Builder, x: fx.Node, y: fx.Node) -> fx.Node:
    """The larger; NaN loses"""
    return _extremum(b, ops.fmax, ops.bitwise_or, x, y)


@rule(aten.fmin.default)
def fmin(b: Builder, x: fx.Node, y: fx.Node) -> fx.Node:
    """The smaller; NaN loses"""
    return _extremum(b, ops.fmin, ops.bitwise_and, x, y)


def _extremum(b: Builder, prim: ops.Prim, on_bools: ops.Prim, x: Any, y: Any) -> fx.Node:
    nodes, dtype = b.promote(x, y)
    if is_integral(dtype) and prim in (ops.fmax, ops.fmin):
        prim = ops.maximum if prim is ops.fmax else ops.minimum
    return b.convert(b.prim(on_bools if dtype == torch.bool else prim, *nodes), dtype)


@rule(
    aten.clamp.default, aten.clamp.Tensor, "clip.default", "clip.Tensor",
)  # fmt: skip
def clamp(b: Builder, x: fx.Node, low: Any = None, high: Any = None) -> fx.Node:
    """minimum(high, maximum(low, x)): where low > high the result is high; a NaN anywhere is the result

    Bounds stand first: of two zeros the second stays, so that -0.0 passes a bound of 0 as eager lets it.
    """
    bounds = [bound for bound in (low, high) if bound is not None]
    nodes, dtype = b.promote(x, *bounds)
    result = nodes[0]
    if low is not None:
        result = b.prim(ops.maximum, nodes[1], result)
    if high is not None:
        result = b.prim(ops.minimum, nodes[-1], result)
    return b.convert(result, dtype)


@rule(aten.clamp_min.default, aten.clamp_min.Tensor)
def clamp_min(b: Builder, x: fx.Node, low: Any) -> fx.Node:
    """maximum(x, low)"""
    return clamp(b, x, low, None)


@rule(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(b: Builder, x: fx.Node, high: Any) -> fx.Node:
    """minimum(x, high)"""
    return clamp(b, x, None, high)


# --- copies ---


@rule(aten.clone.default)
def clone(b: Builder, x: fx.Node, *, memory_format: Any = None) -> fx.Node:
    """The same value; another memory format shows only in the strides that the result must have"""
    return identity(b, x)


@rule(aten._to_copy.default)
def _to_copy(
    b: Builder, x: fx.Node, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    non_blocking: bool = False, memory_format: Any = None,
) -> fx.Node | None:  # fmt: skip
    """x in another dtype; another device, layout or pinned memory is ATen's work"""
    if b.wanted.device != b.meta(x).device or pin_memory or layout not in (None, torch.strided):
        return None
    return b.convert(identity(b, x), b.wanted.dtype)


@rule(aten.copy.default)
def copy(b: Builder, x: fx.Node, src: fx.Node, non_blocking: bool = False) -> fx.Node | None:
    """src in x's dtype and shape"""
    if b.meta(src).device != b.meta(x).device:
        return None
    return b.result(src, b.meta(x))


@rule(aten.fill.Scalar, aten.fill.Tensor)
def fill(b: Builder, x: fx.Node, value: Any) -> fx.Node:
    """One value in x's dtype and shape"""
    if not b.is_tensor(value):
        return b.full_like(x, value)
    return b.result(b.to_device(value, b.meta(x).device), b.meta(x))


@rule(aten.zero.default)
def zero(b: Builder, x: fx.Node) -> fx.Node:
    """Zeros in x's dtype and shape"""
    return b.full_like(x, 0)

"""Shape rules of elementwise operators: broadcasting, promotion of dtypes, and the strides of the result.

Invariant: the operands' dtypes are ones that every device computes; complex numbers and quantized dtypes are never
sure here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torchlazy.lazy.shapes import strides
from torchlazy.lazy.shapes.registry import On, Result, is_plain, plain, rule
from torchlazy.lazy.shapes.strides import Layout, broadcast, elementwise_strides, is_dense, plain_strides
from torchlazy.lazy.trace.geometry import Geometry, geometry
from torchlazy.prims.promotion import result_dtype

FLOATS = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})
REALS = FLOATS | INTEGERS | {torch.bool}
_RECTIFIED = frozenset({torch.float32, torch.float64, torch.int64, torch.int32})  # eager's kernel has these
_NUMBERS = (int, float)  # by exact type: a bool is none


def combined(operands: Sequence[Any], dtype: torch.dtype, common: torch.dtype | None = None) -> Result | None:
    """The result over tensors and numbers; `common`: what the operands are converted to before, if they are."""
    geoms = [value for value in operands if type(value) is Geometry]
    shape = geoms[0].shape
    for geom in geoms:
        if geom.shape != shape:
            found = broadcast([g.shape for g in geoms])
            if found is None:
                return None
            shape = found
            break
    layouts = [(g.shape, g.strides) if common is None else _converted(g, common) for g in geoms]
    return Result(shape, elementwise_strides(shape, layouts, len(geoms) < len(operands)), dtype)


def _converted(geom: Geometry, common: torch.dtype) -> Layout:
    """The layout of an operand in the common dtype: on the CPU it is first copied into dense memory."""
    if geom.dtype is common or geom.compute != "cpu" or is_dense(geom.shape, geom.strides):
        return geom.shape, geom.strides
    return geom.shape, elementwise_strides(geom.shape, [(geom.shape, geom.strides)])


def _common(operands: Sequence[Any]) -> torch.dtype | None:
    """The common dtype of real operands; None where these rules do not cover it."""
    first = operands[0].dtype
    if all(type(v) is Geometry and v.dtype is first for v in operands):
        return first if first in REALS else None
    for value in operands:
        if type(value) is Geometry:
            if value.dtype not in REALS:
                return None
        elif type(value) not in (int, float, bool):
            return None
    return result_dtype([v.meta if type(v) is Geometry else v for v in operands])


def _is_number_for(value: Any, dtype: torch.dtype) -> bool:
    """Whether `value` may scale operands of `dtype`: no fraction for integers, no truth value at all."""
    return type(value) is int if dtype not in FLOATS else type(value) in _NUMBERS


@rule("add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar")
def _sum(a: Geometry, b: Any, scalar_alpha: Any = 1, *, alpha: Any = 1) -> Result | None:
    common = _common((a, b))
    if common is None or common is torch.bool:
        return None
    if not _is_number_for(alpha, common) or not _is_number_for(scalar_alpha, common) or _is_truth(a, b):
        return None
    return combined((a, b), common, common)


@rule("_add_relu.Scalar")
def _rectified_sum(a: Geometry, b: Any, alpha: Any = 1) -> Result | None:
    return _sum(a, b, alpha) if a.dtype in _RECTIFIED else None


def _is_truth(*operands: Any) -> bool:
    """Whether an operand is a bool: eager refuses differences with one, also beside a number."""
    return any(v.dtype is torch.bool if type(v) is Geometry else type(v) is bool for v in operands)


@rule("rsub.Scalar", "rsub.Tensor")
def _difference(a: Geometry, b: Any, scalar_alpha: Any = 1, *, alpha: Any = 1) -> Result | None:
    common = _common((a, b))
    if common not in FLOATS or _is_truth(a, b) or (type(b) is Geometry and b is not a):
        return None
    if not _is_number_for(alpha, common) or not _is_number_for(scalar_alpha, common):
        return None
    return combined((a, b), common, common)


@rule("mul.Tensor", "mul.Scalar")
def _product(a: Geometry, b: Any) -> Result | None:
    common = _common((a, b))
    return None if common is None else combined((a, b), common, common)


@rule("div.Tensor", "div.Scalar")
def _quotient(a: Geometry, b: Any) -> Result | None:
    common = _common((a, b))
    if common is None:
        return None
    common = common if common in FLOATS else torch.get_default_dtype()
    return combined((a, b), common, common)


@rule("div.Tensor_mode", "div.Scalar_mode", "floor_divide", "floor_divide.Scalar")
def _whole_quotient(a: Geometry, b: Any, *, rounding_mode: str | None = "floor") -> Result | None:
    common = _common((a, b))
    if rounding_mode is None:
        return _quotient(a, b)
    if rounding_mode not in ("floor", "trunc") or common is None or common is torch.bool:
        return None
    return combined((a, b), common, common)


@rule("copysign.Tensor", "copysign.Scalar", "xlogy.Tensor", "xlogy.Scalar_Other", "special_xlog1py")
def _in_floating_point(a: Geometry, b: Any) -> Result | None:
    return _quotient(a, b)


@rule("logaddexp", "logaddexp2")
def _logarithm_of_sum(a: Geometry, b: Geometry) -> Result | None:
    common = _common((a, b))
    return combined((a, b), common, common) if common in FLOATS else None


@rule("pow.Tensor_Tensor", "remainder.Tensor", "fmod.Tensor", "fmax", "fmin", "hypot")
def _in_common(a: Geometry, b: Geometry) -> Result | None:
    common = _common((a, b))
    return None if common is None or common is torch.bool else combined((a, b), common, common)


@rule("atan2")
def _angle(a: Geometry, b: Geometry) -> Result | None:
    return _quotient(a, b)


@rule("heaviside")
def _step(a: Geometry, b: Geometry) -> Result | None:
    return combined((a, b), a.dtype) if a.dtype is b.dtype and a.dtype in REALS else None


@rule("isin.Tensor_Tensor", "isin.Tensor_Scalar")
def _contained(a: Geometry, b: Any, **_: Any) -> Result | None:
    return plain(a.shape, torch.bool)


@rule("maximum", "minimum")
def _extreme(a: Geometry, b: Geometry) -> Result | None:
    common = _common((a, b))
    return None if common is None else combined((a, b), common, common)


@rule(
    "eq.Tensor", "eq.Scalar", "ne.Tensor", "ne.Scalar", "lt.Tensor", "lt.Scalar", "le.Tensor", "le.Scalar",
    "gt.Tensor", "gt.Scalar", "ge.Tensor", "ge.Scalar",
)  # fmt: skip
def _comparison(a: Geometry, b: Any) -> Result | None:
    common = _common((a, b))
    if common is None or (type(b) is int and a.dtype in INTEGERS and abs(b) >= 1 << 7):
        return None  # some releases refuse numbers that do not fit the tensor's dtype
    return combined((a, b), torch.bool, common)


@rule("bitwise_and.Tensor", "bitwise_or.Tensor", "bitwise_xor.Tensor")
def _bits(a: Geometry, b: Geometry) -> Result | None:
    if a.dtype is not b.dtype or a.dtype not in INTEGERS | {torch.bool}:
        return None
    return combined((a, b), a.dtype)


@rule("bitwise_and.Scalar")
def _masked_bits(a: Geometry, b: Any) -> Result | None:
    if a.dtype not in INTEGERS or type(b) is not int or a.dtype.itemsize < 4:
        return None
    return combined((a, b), a.dtype)


@rule("bitwise_not", "logical_not")
def _inverted(a: Geometry) -> Result | None:
    return combined((a,), torch.bool) if a.dtype is torch.bool else None


@rule("logical_and", "logical_or", "logical_xor")
def _logic(a: Geometry, b: Geometry) -> Result | None:
    common = _common((a, b))
    return None if common is None else combined((a, b), torch.bool, common)


@rule(
    "neg", "abs", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal", "sin", "cos",
    "tan", "sinh", "cosh", "tanh", "sigmoid", "erf", "erfc", "floor", "ceil", "round", "trunc", "sign", "relu",
    "square",
)  # fmt: skip
def _unary(a: Geometry) -> Result | None:
    if a.dtype not in FLOATS:
        return None
    return combined((a,), a.dtype)


@rule("gelu")
def _gelu(a: Geometry, *, approximate: str = "none") -> Result | None:
    return _unary(a) if approximate in ("none", "tanh") else None


@rule("silu")
def _silu(a: Geometry) -> Result | None:
    return _unary(a)


@rule("leaky_relu")
def _leaky(a: Geometry, slope: Any = 0.01) -> Result | None:
    return _unary(a) if type(slope) in _NUMBERS else None


@rule("clamp", "clamp_min", "clamp_max")
def _clamped(a: Geometry, low: Any = None, high: Any = None) -> Result | None:
    if (low is None and high is None) or not {type(low), type(high)} <= {int, float, type(None)}:
        return None
    return _unary(a)


@rule("hardtanh")
def _clipped(a: Geometry, low: Any = -1, high: Any = 1) -> Result | None:
    """Its kernel writes into a tensor made like the operand."""
    return _clamped(a, low, high) if is_plain(a) else None


@rule("pow.Scalar")
def _power_of_number(base: Any, exponent: Geometry) -> Result | None:
    """Unlike all others its result is contiguous, whatever the operand's strides; fake tensors get it wrong."""
    if type(base) not in (int, float, bool) or (type(base) is bool and exponent.dtype is torch.bool):
        return None
    return Result(exponent.shape, plain_strides(exponent.shape), result_dtype([exponent.meta, base]))


@rule("ldexp.Tensor")
def _times_power_of_two(a: Geometry, b: Geometry) -> Result | None:
    """a * 2 ** b, as two operators: a 0-dim power counts less than a tensor in promotion, but more than a number."""
    if type(a) is not Geometry or type(b) is not Geometry or a.dtype not in REALS or b.dtype not in FLOATS:
        return None
    power = result_dtype([b.meta, 2.0])
    common = result_dtype([a.meta, replace(b.meta, dtype=power)])
    b = geometry(b.shape, plain_strides(b.shape), 0, power, b.device, b.compute)  # what a number's power gives
    return combined((a, b), common, common)


@rule("log_sigmoid_forward", placed=True)
def _log_sigmoid(a: Geometry, *, on: On) -> tuple[Result, Result] | None:
    """Row-major on a CPU whatever the operand, unlike with fake tensors; the second result is for the backward."""
    return (plain(a.shape, a.dtype), plain(a.shape, a.dtype)) if on.is_cpu and a.dtype in FLOATS else None


@rule("pow.Tensor_Scalar")
def _power(a: Geometry, exponent: Any) -> Result | None:
    if a.dtype is torch.bool and type(exponent) is bool:
        return combined((a,), torch.bool)
    return _unary(a) if type(exponent) in _NUMBERS else None


@rule("gelu_backward")
def _gelu_backward(grad: Geometry, x: Geometry, *, approximate: str = "none") -> Result | None:
    return _alike(grad, x) if approximate in ("none", "tanh") else None


@rule("silu_backward", "sigmoid_backward", "tanh_backward")
def _alike(grad: Geometry, x: Geometry) -> Result | None:
    """Operands of one geometry; their order, which strides could depend on, is each operator's own."""
    if grad.shape != x.shape or grad.strides != x.strides or grad.dtype is not x.dtype or x.dtype not in FLOATS:
        return None
    return combined((grad, x), x.dtype)


@rule("threshold_backward")
def _threshold_backward(grad: Geometry, x: Geometry, threshold: Any) -> Result | None:
    return _alike(grad, x) if type(threshold) in _NUMBERS else None


@rule("where.self")
def _chosen(condition: Geometry, a: Geometry, b: Geometry) -> Result | None:
    if condition.dtype is not torch.bool or a.dtype is not b.dtype or a.dtype not in REALS:
        return None
    return combined((condition, a, b), a.dtype)


@rule("masked_fill.Scalar")
def _filled_where(a: Geometry, mask: Geometry, value: Any) -> Result | None:
    """In place on a copy: only a copy that keeps its shape and is row-major is sure."""
    if a.dtype not in FLOATS or mask.dtype is not torch.bool or type(value) not in _NUMBERS or not is_plain(a):
        return None
    return plain(a.shape, a.dtype) if broadcast((a.shape, mask.shape)) == a.shape else None


@rule("addcmul", "addcdiv")
def _added(a: Geometry, b: Geometry, c: Geometry, *, value: Any = 1) -> Result | None:
    if not (a.dtype is b.dtype is c.dtype) or a.dtype not in FLOATS or type(value) not in _NUMBERS:
        return None
    return combined((a, b, c), a.dtype)


@rule("lerp.Scalar")
def _between(a: Geometry, b: Geometry, weight: Any) -> Result | None:
    if a.dtype is not b.dtype or a.dtype not in FLOATS or type(weight) not in _NUMBERS:
        return None
    return combined((a, b), a.dtype)


@rule("lerp.Tensor")
def _between_by(a: Geometry, b: Geometry, weight: Geometry) -> Result | None:
    if not (a.dtype is b.dtype is weight.dtype) or a.dtype not in FLOATS:
        return None
    return combined((a, b, weight), a.dtype)


@rule("complex", "polar")
def _of_parts(real: Geometry, imaginary: Geometry) -> Result | None:
    """`complex`, and `polar` of a length and an angle."""
    if real.dtype is not imaginary.dtype or real.dtype not in (torch.float32, torch.float64):
        return None
    return combined((real, imaginary), torch.complex64 if real.dtype is torch.float32 else torch.complex128)


@rule("roll")
def _rolled(a: Geometry, shifts: Any, dims: Any = ()) -> Result | None:
    """Two pieces joined: row-major, but for images that lie channels-last and are rolled along a dimension."""
    rank = len(a.shape)
    if not isinstance(shifts, (list, tuple)) or len(shifts) != (len(dims) or 1):
        return None
    if 0 in a.shape or not rank or any(not -rank <= dim < rank for dim in dims):
        return None
    if not dims or rank not in (4, 5):
        return plain(a.shape, a.dtype)
    if 1 in a.shape:
        return None  # several layouts at once
    if strides.is_channels_last(a.shape, a.strides):
        return Result(a.shape, a.strides, a.dtype)
    return plain(a.shape, a.dtype) if is_plain(a) else None

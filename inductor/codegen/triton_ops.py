"""What each pointwise op is in Triton: a table from op name to (dtype of the operands, operand texts) -> text.

Invariant: operands are names or literals in parentheses, results are one expression; where a formula needs more than
that it is a helper of `triton_prelude`. Accuracy: division and square root of float32 are IEEE (`div_rn`, `sqrt_rn`);
exp, log and the rest are libdevice's, at most 2 ulp (Triton's own `tl.exp` loses up to 1e-5 relative far from zero).
libdevice runs with denormals flushed to zero, as Triton builds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torchlazy.inductor.ops_handler import POINTWISE_OPS

TL_DTYPE = {
    torch.bool: "tl.int1",
    torch.uint8: "tl.uint8",
    torch.int8: "tl.int8",
    torch.int16: "tl.int16",
    torch.int32: "tl.int32",
    torch.int64: "tl.int64",
    torch.uint16: "tl.uint16",
    torch.uint32: "tl.uint32",
    torch.uint64: "tl.uint64",
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
}
HALVES = (torch.float16, torch.bfloat16)
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
TO_BOOL = (*COMPARISONS, "isnan", "isinf", "signbit", "logical_not")


@dataclass(frozen=True, slots=True)
class TritonValue:
    """A value inside a kernel: its text, its dtype, and the block axes ("x", "r") that it varies over.

    `half` is the same value as text of dtype `half_dtype`: set where the value is known to be exact in it.
    """

    text: str
    dtype: torch.dtype
    deps: frozenset[str]
    half: str | None = None
    half_dtype: torch.dtype | None = None


def tl_dtype(dtype: torch.dtype) -> str:
    """The Triton name of a dtype."""
    if dtype not in TL_DTYPE:
        raise TypeError(f"triton: no kernel arithmetic on {dtype}; keep such tensors in extern calls")
    return TL_DTYPE[dtype]


def memory_dtype(dtype: torch.dtype) -> str:
    """The Triton name of a dtype in memory: a bool is one byte."""
    return "tl.int8" if dtype == torch.bool else tl_dtype(dtype)


def literal(value: bool | int | float, dtype: torch.dtype) -> str:
    """A number as Python text that Triton reads back exactly in `dtype`."""
    if dtype == torch.bool:
        return str(bool(value))
    if not dtype.is_floating_point:
        return str(int(value))
    value = float(value)
    if math.isnan(value):
        return 'float("nan")'
    if math.isinf(value):
        return 'float("inf")' if value > 0 else 'float("-inf")'
    return repr(value)


def lowest(dtype: torch.dtype) -> bool | int | float:
    """The identity of max."""
    if dtype == torch.bool:
        return False
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> bool | int | float:
    """The identity of min."""
    if dtype == torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


Formula = Callable[..., str]


def _is_unsigned(dtype: torch.dtype) -> bool:
    return dtype in (torch.uint8, torch.bool)


def _libdevice(name: str) -> Formula:
    """A libdevice function of floats."""
    return lambda dtype, *operands: f"libdevice.{name}({', '.join(operands)})"


def _rounding(name: str) -> Formula:
    """A rounding of floats; ints are whole already."""
    return lambda dtype, x: f"{name}({x})" if dtype.is_floating_point else x


def _infix(symbol: str, on_bool: str | None = None) -> Formula:
    """a symbol b; `on_bool` where bool wants another one."""
    return lambda dtype, a, b: f"{a} {on_bool if on_bool and dtype == torch.bool else symbol} {b}"


def _compare(symbol: str) -> Formula:
    """A comparison; bools compare as 0 and 1 (Triton's one-bit integer is signed)."""

    def formula(dtype: torch.dtype, a: str, b: str) -> str:
        return f"{a}.to(tl.int8) {symbol} {b}.to(tl.int8)" if dtype == torch.bool else f"{a} {symbol} {b}"

    return formula


def _neg(dtype: torch.dtype, x: str) -> str:
    """Times -1: `-x` is 0 - x in older Tritons, which loses the sign of zero."""
    return f"{x} * -1.0" if dtype.is_floating_point else f"-{x}"


def _abs(dtype: torch.dtype, x: str) -> str:
    return x if _is_unsigned(dtype) else f"tl.abs({x})"


def _sign(dtype: torch.dtype, x: str) -> str:
    return x if dtype == torch.bool else f"({x} > 0).to({tl_dtype(dtype)})" if _is_unsigned(dtype) else f"sign_of({x})"


def _sqrt(dtype: torch.dtype, x: str) -> str:
    return f"tl.sqrt_rn({x})" if dtype == torch.float32 else f"tl.sqrt({x})"


def _div(dtype: torch.dtype, a: str, b: str) -> str:
    return f"tl.div_rn({a}, {b})" if dtype == torch.float32 else f"{a} / {b}"


def _isinf(dtype: torch.dtype, x: str) -> str:
    return f'tl.abs({x}) == float("inf")' if dtype.is_floating_point else f"{x} != {x}"


def _signbit(dtype: torch.dtype, x: str) -> str:
    if dtype.is_floating_point:
        return f"float_signbit({x}, {'tl.int64' if dtype == torch.float64 else 'tl.int32'})"
    return f"{x} != {x}" if _is_unsigned(dtype) else f"{x} < 0"


def _logical_not(dtype: torch.dtype, x: str) -> str:
    return f"~{x}" if dtype == torch.bool else f"{x} == 0"


def _floor_div(dtype: torch.dtype, a: str, b: str) -> str:
    if dtype.is_floating_point:
        return f"float_floor_div({a}, {b})"
    return f"{a} // {b}" if _is_unsigned(dtype) else f"int_floor_div({a}, {b})"


def _trunc_div(dtype: torch.dtype, a: str, b: str) -> str:
    return f"libdevice.trunc({_div(dtype, a, b)})" if dtype.is_floating_point else f"{a} // {b}"


def _remainder(dtype: torch.dtype, a: str, b: str) -> str:
    if dtype.is_floating_point:
        return f"float_remainder({a}, {b})"
    return f"{a} % {b}" if _is_unsigned(dtype) else f"int_remainder({a}, {b})"


def _fmod(dtype: torch.dtype, a: str, b: str) -> str:
    return f"libdevice.fmod({a}, {b})" if dtype.is_floating_point else f"{a} % {b}"


def _pow(dtype: torch.dtype, a: str, b: str) -> str:
    if dtype.is_floating_point:
        return f"libdevice.pow({a}, {b})"
    return f"uint_pow({a}, {b})" if _is_unsigned(dtype) else f"int_pow({a}, {b})"


def _extremum(name: str, on_bool: str, nan_wins: bool) -> Formula:
    """The greater or lesser; what a NaN does is chosen for floats only."""

    def formula(dtype: torch.dtype, a: str, b: str) -> str:
        if dtype == torch.bool:
            return f"{a} {on_bool} {b}"
        nan = ", propagate_nan=tl.PropagateNan.ALL" if nan_wins and dtype.is_floating_point else ""
        return f"tl.{name}({a}, {b}{nan})"

    return formula


def _shift_left(dtype: torch.dtype, a: str, b: str) -> str:
    return f"shift_left_checked({a}, {b}, {torch.iinfo(dtype).bits})"


def _shift_right(dtype: torch.dtype, a: str, b: str) -> str:
    """Past the width: the sign of a signed int, 0 of an unsigned one."""
    bits = torch.iinfo(dtype).bits
    if _is_unsigned(dtype):
        return f"tl.where({b} < {bits}, {a} >> ({b} & {bits - 1}), {a} * 0)"
    return f"shift_right_checked({a}, {b}, {bits - 1})"


_SPECIAL: dict[str, Formula] = {
    "neg": _neg,
    "abs": _abs,
    "sign": _sign,
    "ceil": _rounding("tl.ceil"),
    "floor": _rounding("tl.floor"),
    "trunc": _rounding("libdevice.trunc"),
    "round": _rounding("libdevice.nearbyint"),
    "sqrt": _sqrt,
    "reciprocal": lambda dtype, x: _div(dtype, "1.0", x),
    "isnan": lambda dtype, x: f"{x} != {x}",
    "isinf": _isinf,
    "signbit": _signbit,
    "logical_not": _logical_not,
    "bitwise_not": lambda dtype, x: f"~{x}",
    "add": _infix("+", "|"),
    "sub": _infix("-", "^"),
    "mul": _infix("*", "&"),
    "div": _div,
    "floor_div": _floor_div,
    "trunc_div": _trunc_div,
    "remainder": _remainder,
    "fmod": _fmod,
    "pow": _pow,
    "maximum": _extremum("maximum", "|", nan_wins=True),
    "minimum": _extremum("minimum", "&", nan_wins=True),
    "fmax": _extremum("maximum", "|", nan_wins=False),
    "fmin": _extremum("minimum", "&", nan_wins=False),
    "eq": _compare("=="),
    "ne": _compare("!="),
    "lt": _compare("<"),
    "le": _compare("<="),
    "gt": _compare(">"),
    "ge": _compare(">="),
    "bitwise_and": _infix("&"),
    "bitwise_or": _infix("|"),
    "bitwise_xor": _infix("^"),
    "shift_left": _shift_left,
    "shift_right": _shift_right,
    "where": lambda dtype, condition, a, b: f"tl.where({condition}, {a}, {b})",
}
_FROM_LIBDEVICE = (
    "rsqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan",
    "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "erfinv", "lgamma", "atan2", "copysign", "hypot",
    "nextafter",
)  # fmt: skip
FORMULAS: dict[str, Formula] = {name: _SPECIAL.get(name) or _libdevice(name) for name in POINTWISE_OPS
                                if name in _SPECIAL or name in _FROM_LIBDEVICE}  # fmt: skip


def convert_text(text: str, source: torch.dtype, target: torch.dtype) -> str:
    """`text` of dtype `source` as an expression of `target` (neither a half); truncation and wrapping as torch's."""
    if source == target:
        return text
    if target == torch.bool:
        return f"({text} != 0)"
    if source.is_floating_point and not target.is_floating_point and target.itemsize < 4:
        # Through a wider int: what does not fit wraps, it does not saturate.
        return f"{text}.to({'tl.int64' if target == torch.uint8 else 'tl.int32'}).to({tl_dtype(target)})"
    return f"{text}.to({tl_dtype(target)})"

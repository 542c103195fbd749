"""The closed set of primitives, one table: each row a name, its kinds, attributes, metadata rule and eager reference.

Invariants: primitives are pure functions of values; they neither broadcast nor promote; reductions drop their axes. An
FX node of this dialect has a `Prim` as its target, tensor Nodes as args and attributes as kwargs; only externs, which
are outside of the set, keep the argument form of their ATen schema. Shapes say what a value is, strides only how it
should lie in memory. The rows that are one ATen call each stand in `prims/library_*ops.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torchlazy.prims import attrs as at
from torchlazy.prims import eager, meta_rules
from torchlazy.prims.prim import PRIMS, Kind, Prim, extern, prim_by_name, register


def _op(
    name: str, kind: Kind, rule: meta_rules.MetaRule, reference: Callable[..., Any], doc: str,
    attrs: type = at.NoAttrs, *, operands: int | None = None,
) -> Prim:  # fmt: skip
    if "Broadcasting" not in doc:
        what, _, source = doc.partition("Source: ")
        shapes = (rule.__doc__ or "-").strip().splitlines()[0]  # `python -OO` has none
        doc = f"{what.strip()}\n\n{shapes} Broadcasting: none. Promotion: none. Source: {source}"
    return register(Prim(name, frozenset({kind}), attrs, rule, reference, doc, operands=operands))


def _pointwise(
    name: str, rule: meta_rules.MetaRule, reference: Callable[..., Any], what: str, *, operands: int
) -> Prim:
    dtypes: dict[meta_rules.MetaRule, str] = {
        meta_rules.floats: "floating dtype in and out",
        meta_rules.integral: "integers or bool in and out",
        meta_rules.predicate: "any dtype in, bool out",
    }
    dtype = dtypes.get(rule, "dtype kept")
    doc = f"{what}\n\nShape kept; {dtype}. Broadcasting: none. Promotion: none. Source: torch.{name} on equal operands."
    return _op(name, Kind.POINTWISE, rule, reference, doc, operands=operands)


_unary = partial(_pointwise, operands=1)
_binary = partial(_pointwise, operands=2)
_same, _floats, _integral, _predicate = (
    meta_rules.same, meta_rules.floats, meta_rules.integral, meta_rules.predicate,
)  # fmt: skip

# --- pointwise, one operand ---
neg = _unary("neg", _same, torch.neg, "-x")
abs = _unary("abs", _same, torch.abs, "|x|; the smallest integer stays itself")
sign = _unary("sign", _same, torch.sign, "-1, 0 or 1; NaN gives 0")
ceil = _unary("ceil", _floats, torch.ceil, "least integer >= x")
floor = _unary("floor", _floats, torch.floor, "greatest integer <= x")
trunc = _unary("trunc", _floats, torch.trunc, "towards zero")
round = _unary("round", _floats, torch.round, "nearest integer, half to even")
sqrt = _unary("sqrt", _floats, torch.sqrt, "square root")
rsqrt = _unary("rsqrt", _floats, torch.rsqrt, "1 / sqrt(x)")
reciprocal = _unary("reciprocal", _floats, torch.reciprocal, "1 / x")
exp = _unary("exp", _floats, torch.exp, "e ** x")
exp2 = _unary("exp2", _floats, torch.exp2, "2 ** x")
expm1 = _unary("expm1", _floats, torch.expm1, "e ** x - 1, exact near 0")
log = _unary("log", _floats, torch.log, "natural logarithm")
log2 = _unary("log2", _floats, torch.log2, "logarithm to base 2")
log10 = _unary("log10", _floats, torch.log10, "logarithm to base 10")
log1p = _unary("log1p", _floats, torch.log1p, "log(1 + x), exact near 0")
sin = _unary("sin", _floats, torch.sin, "sine")
cos = _unary("cos", _floats, torch.cos, "cosine")
tan = _unary("tan", _floats, torch.tan, "tangent")
asin = _unary("asin", _floats, torch.asin, "inverse sine")
acos = _unary("acos", _floats, torch.acos, "inverse cosine")
atan = _unary("atan", _floats, torch.atan, "inverse tangent")
sinh = _unary("sinh", _floats, torch.sinh, "hyperbolic sine")
cosh = _unary("cosh", _floats, torch.cosh, "hyperbolic cosine")
tanh = _unary("tanh", _floats, torch.tanh, "hyperbolic tangent")
asinh = _unary("asinh", _floats, torch.asinh, "inverse hyperbolic sine")
acosh = _unary("acosh", _floats, torch.acosh, "inverse hyperbolic cosine")
atanh = _unary("atanh", _floats, torch.atanh, "inverse hyperbolic tangent")
erf = _unary("erf", _floats, torch.erf, "error function")
erfc = _unary("erfc", _floats, torch.erfc, "1 - erf(x)")
erfinv = _unary("erfinv", _floats, torch.erfinv, "inverse of erf")
lgamma = _unary("lgamma", _floats, torch.lgamma, "log of |gamma(x)|")
isnan = _unary("isnan", _predicate, torch.isnan, "x != x")
isinf = _unary("isinf", _predicate, torch.isinf, "x is +inf or -inf")
signbit = _unary("signbit", _predicate, torch.signbit, "x < 0, or x is -0.0 or a NaN with its sign set")
logical_not = _unary("logical_not", _predicate, torch.logical_not, "x == 0")
bitwise_not = _unary("bitwise_not", _integral, torch.bitwise_not, "~x; for bool, not x")

# --- pointwise, two operands ---
add = _binary("add", _same, torch.add, "a + b; integers wrap")
sub = _binary("sub", _same, torch.sub, "a - b; integers wrap")
mul = _binary("mul", _same, torch.mul, "a * b; integers wrap")
div = _binary("div", _floats, torch.div, "a / b")
floor_div = _binary("floor_div", _same, eager.floor_div, "Python's a // b; an integer division by 0 raises on CPU")
trunc_div = _binary("trunc_div", _same, eager.trunc_div, "C's a / b; trunc(a / b) for floats")
remainder = _binary("remainder", _same, torch.remainder, "Python's a % b: sign of b")
fmod = _binary("fmod", _same, torch.fmod, "C's a % b: sign of a")
pow = _binary("pow", _same, torch.pow, "a ** b")
atan2 = _binary("atan2", _floats, torch.atan2, "angle of the point (b, a)")
copysign = _binary("copysign", _floats, torch.copysign, "|a| with the sign of b")
hypot = _binary("hypot", _floats, torch.hypot, "sqrt(a*a + b*b)")
nextafter = _binary("nextafter", _floats, torch.nextafter, "the float after a towards b")
maximum = _binary("maximum", _same, torch.maximum, "the larger; NaN wins")
minimum = _binary("minimum", _same, torch.minimum, "the smaller; NaN wins")
fmax = _binary("fmax", _same, torch.fmax, "the larger; NaN loses")
fmin = _binary("fmin", _same, torch.fmin, "the smaller; NaN loses")
eq = _binary("eq", _predicate, torch.eq, "a == b")
ne = _binary("ne", _predicate, torch.ne, "a != b")
lt = _binary("lt", _predicate, torch.lt, "a < b")
le = _binary("le", _predicate, torch.le, "a <= b")
gt = _binary("gt", _predicate, torch.gt, "a > b")
ge = _binary("ge", _predicate, torch.ge, "a >= b")
bitwise_and = _binary("bitwise_and", _integral, torch.bitwise_and, "a & b")
bitwise_or = _binary("bitwise_or", _integral, torch.bitwise_or, "a | b")
bitwise_xor = _binary("bitwise_xor", _integral, torch.bitwise_xor, "a ^ b")
shift_left = _binary("shift_left", _integral, torch.bitwise_left_shift, "a << b")
shift_right = _binary("shift_right", _integral, torch.bitwise_right_shift, "a >> b, arithmetic for signed integers")

where = _pointwise("where", meta_rules.where, torch.where, "a where the bool condition holds, else b", operands=3)
checked = _op(
    "checked", Kind.POINTWISE, meta_rules.checked, eager.checked,
    "x itself; RuntimeError with the message where the condition does not hold somewhere. On the CPU only: elsewhere "
    "it is x.\n\nSource: the checks of ATen's CPU kernels on the numbers of their operands.",
    at.CheckAttrs, operands=2,
)  # fmt: skip
convert = _op(
    "convert", Kind.POINTWISE, meta_rules.convert, eager.convert,
    "x in another dtype: float to int truncates, to bool is x != 0, to a half rounds to nearest even.\n\n"
    "To its own dtype it is a copy, wanted where a value shall lie otherwise in memory. Source: Tensor.to.",
    at.DtypeAttrs,
)  # fmt: skip
bitcast = _op(
    "bitcast", Kind.POINTWISE, meta_rules.bitcast, eager.bitcast,
    "The same bits under another dtype of equal size. Source: Tensor.view(dtype).", at.DtypeAttrs,
)  # fmt: skip

# --- creation ---
full = _op("full", Kind.CREATION, meta_rules.full, eager.full, "`value` everywhere. Source: torch.full.", at.FullAttrs)
iota = _op(
    "iota", Kind.CREATION, meta_rules.iota, eager.iota,
    "[length]: start + i * step, one rounding for each operation. Source: torch.arange.", at.IotaAttrs,
)  # fmt: skip
random_bits = _op(
    "random_bits", Kind.RANDOM, meta_rules.random_bits, eager.random_bits,
    "int32 bits of Philox4x32-10; pure. Source: prims/random_bits.py.", at.RandomBitsAttrs,
)  # fmt: skip

# --- views: another shape over the same values ---
reshape = _op(
    "reshape", Kind.VIEW, meta_rules.reshape, eager.reshape,
    "The elements in row-major order under another shape. Source: torch.reshape.", at.ShapeAttrs,
)  # fmt: skip
permute = _op(
    "permute", Kind.VIEW, meta_rules.permute, eager.permute,
    "result.shape[i] = x.shape[dims[i]]. Source: torch.permute.", at.PermuteAttrs,
)  # fmt: skip
expand = _op(
    "expand", Kind.VIEW, meta_rules.expand, eager.expand,
    "Dimensions of size 1 repeated; the rank stays. Source: torch.Tensor.expand.", at.ShapeAttrs,
)  # fmt: skip
slice = _op(
    "slice", Kind.VIEW, meta_rules.slice_, eager.slice_,
    "x[start:stop:step] in every dimension, 0 <= start <= stop <= size. Source: basic indexing.", at.SliceAttrs,
)  # fmt: skip
flip = _op("flip", Kind.VIEW, meta_rules.flip, eager.flip, "Reversed along axes. Source: torch.flip.", at.AxesAttrs)
pad = _op(
    "pad", Kind.VIEW, meta_rules.pad, eager.pad,
    "A constant border. Source: torch.constant_pad_nd with amounts >= 0.", at.PadAttrs,
)  # fmt: skip
cat = _op("cat", Kind.VIEW, meta_rules.cat, eager.cat, "Joined along one axis. Source: torch.cat.", at.AxisAttrs)
as_strided = _op(
    "as_strided", Kind.VIEW, meta_rules.as_strided, eager.as_strided,
    "A window on x as it lies in memory by its meta strides. Source: torch.as_strided.", at.AsStridedAttrs,
)  # fmt: skip
as_strided_scatter = _op(
    "as_strided_scatter", Kind.VIEW, meta_rules.as_strided_scatter, eager.as_strided_scatter,
    "x with that window replaced by src. Source: torch.as_strided_scatter.", at.AsStridedAttrs,
)  # fmt: skip
slice_scatter = _op(
    "slice_scatter", Kind.VIEW, meta_rules.slice_scatter, eager.slice_scatter,
    "x with the slice replaced by src. Source: torch.slice_scatter, all dimensions at once.", at.SliceAttrs,
)  # fmt: skip


def _reduction(name: str, rule: meta_rules.MetaRule, reference: Callable[..., Any], what: str) -> Prim:
    doc = f"{what}\n\nThe axes are dropped; none given, none reduced. Source: torch.{name}."
    return _op(name, Kind.REDUCTION, rule, reference, doc, at.AxesAttrs)


# --- reductions ---
sum = _reduction("sum", meta_rules.reduce_same, eager.sum_, "Sum in the operand's dtype; convert before to widen it.")
prod = _reduction(
    "prod", meta_rules.reduce_same, eager.prod, "Product in the operand's dtype; convert before to widen."
)
amax = _reduction("amax", meta_rules.reduce_same, eager.amax, "Largest element; NaN wins.")
amin = _reduction("amin", meta_rules.reduce_same, eager.amin, "Smallest element; NaN wins.")
argmax = _reduction("argmax", meta_rules.reduce_index, eager.argmax, "int64 flat position over the axes in order.")
argmin = _reduction("argmin", meta_rules.reduce_index, eager.argmin, "int64 flat position over the axes in order.")
any = _reduction("any", meta_rules.reduce_bool, eager.any_, "Logical or of bools.")
all = _reduction("all", meta_rules.reduce_bool, eager.all_, "Logical and of bools.")
welford = _reduction(
    "welford",
    meta_rules.welford,
    eager.welford,
    "(mean, sum of squared deviations, count), each in the operand's dtype.",
)

logsumexp = _reduction(
    "logsumexp",
    meta_rules.logsumexp,
    eager.logsumexp,
    "(largest element, sum of exp(x - largest)), each in the operand's dtype; an infinite largest counts as 0 there.",
)

# --- indexing ---
gather = _op(
    "gather", Kind.INDEXING, meta_rules.gather, eager.gather,
    "x[..., index[...], ...] along one axis; with `wrap` negative positions count from the end. Source: torch.gather.",
    at.GatherAttrs,
)  # fmt: skip
index = _op(
    "index", Kind.INDEXING, meta_rules.index, eager.index,
    "Adjacent dims indexed together by index tensors of one shape; that shape takes their place.\n\n"
    "With `wrap` negative positions count from the end; out of range: IndexError. Source: advanced indexing.",
    at.IndexAttrs,
)  # fmt: skip


# Last, because it fills the same set: the primitives that are one ATen call each.
from torchlazy.prims.library import math_ops as library_math_ops  # noqa: E402
from torchlazy.prims.library import ops as library_ops  # noqa: E402
from torchlazy.prims.library import window_ops as library_window_ops  # noqa: E402
from torchlazy.prims.library.call import LIBRARY, library_form, why_library  # noqa: E402


def __getattr__(name: str) -> Prim:
    """`ops.mm`: a primitive of the library tables by its name, as printed graphs call it."""
    try:
        return PRIMS[name]
    except KeyError:
        raise AttributeError(f"there is no primitive {name}; PRIMS lists them") from None


__all__ = [
    "LIBRARY", "PRIMS", "Kind", "Prim", "extern", "library_form", "library_math_ops", "library_ops",
    "library_window_ops", "prim_by_name", "why_library",
]  # fmt: skip

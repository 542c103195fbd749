"""Rules of elementwise special functions, and of NaN and infinities.

Invariant: where ATen treats NaN, infinities or zeros separately, so do these; each docstring is the formula.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torchlazy.prims import ops
from torchlazy.prims.builder import Builder, rule
from torchlazy.prims.decomps.activations import call, result, values
from torchlazy.prims.decomps.value import Value
from torchlazy.prims.promotion import is_integral

aten = torch.ops.aten
INF, NAN = float("inf"), float("nan")


@rule(aten.frac.default)
def frac(b: Builder, x: fx.Node) -> fx.Node:
    """x - trunc(x)"""
    (v,), dtype = values(b, x)
    return result(v - call(ops.trunc, v), dtype)


@rule(aten.round.decimals)
def round_decimals(b: Builder, x: fx.Node, *, decimals: int) -> fx.Node | None:
    """round(x * 10**decimals) / 10**decimals; for negative decimals round(x / 10**-decimals) * 10**-decimals"""
    if is_integral(b.dtype(x)) or b.dtype(x).itemsize < 4:
        return None
    (v,), dtype = values(b, x)
    scale = float(10 ** abs(decimals))
    if decimals == 0:
        return result(call(ops.round, v), dtype)
    if decimals > 0:
        return result(call(ops.round, v * scale) / scale, dtype)
    return result(call(ops.round, v / scale) * scale, dtype)


@rule("deg2rad.default")
def deg2rad(b: Builder, x: fx.Node) -> fx.Node:
    """x * (pi / 180)"""
    (v,), dtype = values(b, x, kind="int_to_float")
    return result(v * (math.pi / 180.0), dtype)


@rule("rad2deg.default")
def rad2deg(b: Builder, x: fx.Node) -> fx.Node:
    """x * (180 / pi)"""
    (v,), dtype = values(b, x, kind="int_to_float")
    return result(v * (180.0 / math.pi), dtype)


@rule("angle.default")
def angle(b: Builder, x: fx.Node) -> fx.Node:
    """x < 0 ? pi : x is NaN ? NaN : 0"""
    (v,), dtype = values(b, x, kind="int_to_float")
    return result(v.lt(0.0).where(math.pi, v.isnan().where(v, 0.0)), dtype)


@rule("sinc.default")
def sinc(b: Builder, x: fx.Node) -> fx.Node:
    """x == 0 ? 1 : sin(pi * x) / (pi * x)"""
    (v,), dtype = values(b, x, kind="int_to_float")
    product = v * math.pi
    return result(v.eq(0.0).where(1.0, call(ops.sin, product) / product), dtype)


@rule(aten.nan_to_num.default)
def nan_to_num(
    b: Builder, x: fx.Node, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> fx.Node:
    """NaN -> 0, inf -> the largest, -inf -> the smallest finite number, or what is given"""
    dtype = b.dtype(x)
    if is_integral(dtype):
        return x
    (v,), _ = values(b, x)
    limits = torch.finfo(dtype)
    y = v.eq(-INF).where(limits.min if neginf is None else neginf, v)
    y = v.eq(INF).where(limits.max if posinf is None else posinf, y)
    return result(v.isnan().where(0.0 if nan is None else nan, y), dtype)


@rule(aten.heaviside.default)
def heaviside(b: Builder, x: fx.Node, at_zero: fx.Node) -> fx.Node:
    """x == 0 ? at_zero : x > 0"""
    (v, w), dtype = values(b, x, at_zero)
    return result(v.eq(0).where(w, v.gt(0).to(v.dtype)), dtype)


# --- logarithms ---


def _rounded(v: Value, dtype: torch.dtype) -> Value:
    """`v` as ATen's kernels for halves have it here in between: they compute these in the half itself."""
    return v.to(dtype).to(v.dtype) if dtype in (torch.float16, torch.bfloat16) else v


@rule("logit.default")
def logit(b: Builder, x: fx.Node, eps: float | None = None) -> fx.Node:
    """log(z / (1 - z)), z = x clamped to [eps, 1 - eps] if eps is given"""
    (v,), dtype = values(b, x, kind="int_to_float")
    if eps is not None:
        low = torch.tensor(eps, dtype=dtype).item()
        high = torch.tensor(1.0 - low, dtype=dtype).item()
        v = v.lt(low).where(low, v.gt(high).where(high, v))
    return result(_rounded(v / _rounded(1.0 - v, dtype), dtype).log(), dtype)


@rule("logit_backward.default")
def logit_backward(b: Builder, grad: fx.Node, x: fx.Node, eps: float | None = None) -> fx.Node:
    """grad / (x * (1 - x)) inside; outside [eps, 1 - eps] 0, or without eps NaN outside [0, 1]"""
    (g, v), dtype = values(b, grad, x)
    low, high, outside = 0.0, 1.0, NAN
    if eps is not None:
        low = torch.tensor(eps, dtype=dtype).item()
        high, outside = 1.0 - low, 0.0
    beyond = call(ops.bitwise_or, v.lt(low), v.gt(high))
    return result(beyond.where(outside, g / (v * (1.0 - v))), dtype)


def _xlog(x: Value, y: Value, log_y: Value) -> Value:
    """NaN where y is, else 0 where x is 0, else x * log_y"""
    product = x.eq(0.0).where(0.0, x * log_y)
    return y.isnan().where(y, product)


@rule(aten.xlogy.Tensor, aten.xlogy.Scalar_Other, aten.xlogy.Scalar_Self)
def xlogy(b: Builder, x: Any, y: Any) -> fx.Node:
    """x * log(y), 0 where x is 0"""
    (v, w), dtype = values(b, x, y, kind="int_to_float")
    return result(_xlog(v, w, _rounded(w.log(), dtype)), dtype)


@rule("special_xlog1py.default", "special_xlog1py.other_scalar", "special_xlog1py.self_scalar")
def xlog1py(b: Builder, x: Any, y: Any) -> fx.Node:
    """x * log1p(y), 0 where x is 0"""
    (v, w), dtype = values(b, x, y, kind="int_to_float")
    return result(_xlog(v, w, _rounded(w.log1p(), dtype)), dtype)


@rule("special_entr.default")
def entr(b: Builder, x: fx.Node) -> fx.Node:
    """-x * log(x) for x > 0, 0 at 0, -inf below"""
    (v,), dtype = values(b, x, kind="int_to_float")
    rest = v.eq(0.0).where(0.0, v.isnan().where(v, -INF))
    return result(v.gt(0.0).where(-v * _rounded(v.log(), dtype), rest), dtype)


@rule(aten.logaddexp.default)
def logaddexp(b: Builder, x: fx.Node, y: fx.Node) -> fx.Node:
    """m + log1p(exp(-|x - y|)), m = maximum(x, y); equal infinities stay"""
    (v, w), dtype = values(b, x, y, kind="int_to_float")
    sum_ = v.maximum(w) + (-abs(v - w)).exp().log1p()
    return result(v.isinf().both(v.eq(w)).where(v, sum_), dtype)


@rule(aten.logaddexp2.default)
def logaddexp2(b: Builder, x: fx.Node, y: fx.Node) -> fx.Node:
    """m + log1p(2 ** -|x - y|) / log(2), m = maximum(x, y); equal infinities stay"""
    (v, w), dtype = values(b, x, y, kind="int_to_float")
    sum_ = v.maximum(w) + call(ops.exp2, -abs(v - w)).log1p() * (1.0 / math.log(2.0))
    return result(v.isinf().both(v.eq(w)).where(v, sum_), dtype)


@rule("mvlgamma.default")
def mvlgamma(b: Builder, x: fx.Node, p: int) -> fx.Node | None:
    """sum over j < p of lgamma(x - j / 2), plus p * (p - 1) / 4 * log(pi)"""
    if p > 16:
        return None  # as many calls of lgamma in one loop body
    (v,), dtype = values(b, x, kind="int_to_float")
    total = call(ops.lgamma, v + (-p * 0.5 + 0.5))
    for j in range(1, p):
        total = total + call(ops.lgamma, v + (-p * 0.5 + 0.5 + 0.5 * j))
    return result(total + p * (p - 1) * math.log(math.pi) / 4.0, dtype)

"""Rules of activation functions and their backward operators.

Invariant: formulas are those of ATen's CPU kernels, with their branches at the same points: NaN, infinities and the
points where a branch changes give the same values and gradients. Each docstring is the formula.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torchlazy.prims import ops
from torchlazy.prims.builder import Builder, Promotion, rule
from torchlazy.prims.decomps.pointwise import clamp
from torchlazy.prims.decomps.value import Value

aten = torch.ops.aten

GELU_TANH_SCALE = math.sqrt(2.0 / math.pi)
GELU_TANH_CUBIC = 0.044715
SELU_ALPHA = 1.6732632423543772848170429916717
SELU_SCALE = 1.0507009873554804934193349852946


def values(b: Builder, *operands: fx.Node, kind: Promotion = "default") -> tuple[list[Value], torch.dtype]:
    """Operands as formulas in the computation dtype, and the result dtype."""
    nodes, dtype = b.promote(*operands, kind=kind)
    return [Value(b, node) for node in nodes], dtype


def result(y: Value, dtype: torch.dtype) -> fx.Node:
    """A formula's node in ATen's result dtype."""
    return y.to(dtype).node


def call(prim: ops.Prim, *operands: Value) -> Value:
    """A primitive that `Value` has no method for."""
    b = operands[0].b
    return Value(b, b.prim(prim, *(x.node for x in operands)))


# --- rectifiers ---


@rule(aten.relu.default)
def relu(b: Builder, x: fx.Node) -> fx.Node:
    """maximum(x, 0)"""
    return clamp(b, x, 0, None)


@rule("relu6.default")
def relu6(b: Builder, x: fx.Node) -> fx.Node:
    """clamp(x, 0, 6)"""
    return clamp(b, x, 0, 6)


@rule(aten.threshold.default)
def threshold(b: Builder, x: fx.Node, threshold: Any, value: Any) -> fx.Node:
    """x <= threshold ? value : x"""
    (v,), dtype = values(b, x)
    return result(v.le(threshold).where(value, v), dtype)


@rule(aten.threshold_backward.default)
def threshold_backward(b: Builder, grad: fx.Node, x: fx.Node, threshold: Any) -> fx.Node:
    """x <= threshold ? 0 : grad"""
    (g, v), dtype = values(b, grad, x)
    return result(v.le(threshold).where(0, g), dtype)


@rule(aten.leaky_relu.default)
def leaky_relu(b: Builder, x: fx.Node, slope: Any = 0.01) -> fx.Node:
    """x > 0 ? x : x * slope"""
    (v,), dtype = values(b, x)
    return result(v.gt(0).where(v, v * slope), dtype)


@rule(aten.leaky_relu_backward.default)
def leaky_relu_backward(b: Builder, grad: fx.Node, x: fx.Node, slope: Any, is_result: bool) -> fx.Node:
    """x > 0 ? grad : grad * slope; the result has the sign of x"""
    (g, v), dtype = values(b, grad, x)
    return result(v.gt(0).where(g, g * slope), dtype)


@rule(aten.hardtanh.default)
def hardtanh(b: Builder, x: fx.Node, low: Any = -1, high: Any = 1) -> fx.Node:
    """clamp(x, low, high) in x's dtype"""
    return b.convert(clamp(b, x, low, high), b.dtype(x))


@rule(aten.hardtanh_backward.default)
def hardtanh_backward(b: Builder, grad: fx.Node, x: fx.Node, low: Any, high: Any) -> fx.Node:
    """low < x < high ? grad : 0"""
    (g, v), dtype = values(b, grad, x)
    return result(v.gt(low).both(v.lt(high)).where(g, 0), dtype)


# --- exponential units ---


@rule(aten.elu.default)
def elu(b: Builder, x: fx.Node, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> fx.Node:
    """x <= 0 ? expm1(x * input_scale) * (alpha * scale) : x * scale"""
    (v,), dtype = values(b, x)
    negative = (v * input_scale).expm1() * (alpha * scale)
    return result(v.le(0).where(negative, v * scale), dtype)


@rule("celu.default")
def celu(b: Builder, x: fx.Node, alpha: Any = 1.0) -> fx.Node:
    """elu(x, alpha) with input_scale 1 / alpha"""
    return elu(b, x, alpha, 1, 1.0 / alpha)


@rule("selu.default")
def selu(b: Builder, x: fx.Node) -> fx.Node:
    """elu with the self-normalising constants"""
    return elu(b, x, SELU_ALPHA, SELU_SCALE)


@rule(aten.elu_backward.default)
def elu_backward(
    b: Builder, grad: fx.Node, alpha: Any, scale: Any, input_scale: Any, is_result: bool, x: fx.Node
) -> fx.Node:
    """The derivative from the result y, x > 0 ? scale : input_scale * (y + alpha * scale), or from the operand"""
    (g, v), dtype = values(b, grad, x)
    if is_result:
        negative = g * input_scale * (v + alpha * scale)
    else:
        negative = g * input_scale * (alpha * scale) * (v * input_scale).exp()
    return result(v.gt(0).where(g * scale, negative), dtype)


@rule(aten.softplus.default)
def softplus(b: Builder, x: fx.Node, beta: Any = 1, threshold: Any = 20) -> fx.Node:
    """x * beta > threshold ? x : log1p(exp(x * beta)) / beta"""
    (v,), dtype = values(b, x)
    z = v * beta
    return result(z.gt(threshold).where(v, z.exp().log1p() / beta), dtype)


@rule(aten.softplus_backward.default)
def softplus_backward(b: Builder, grad: fx.Node, x: fx.Node, beta: Any, threshold: Any) -> fx.Node:
    """x * beta > threshold ? grad : grad * z / (z + 1), z = exp(x * beta)"""
    (g, v), dtype = values(b, grad, x)
    z = (v * beta).exp()
    return result((v * beta).gt(threshold).where(g, g * z / (z + 1.0)), dtype)


# --- sigmoids ---


@rule(aten.sigmoid.default)
def sigmoid(b: Builder, x: fx.Node) -> fx.Node:
    """1 / (1 + exp(-x))"""
    (v,), dtype = values(b, x, kind="int_to_float")
    return result(v.sigmoid(), dtype)


@rule(aten.sigmoid_backward.default)
def sigmoid_backward(b: Builder, grad: fx.Node, y: fx.Node) -> fx.Node:
    """grad * (1 - y) * y"""
    (g, v), dtype = values(b, grad, y)
    return result(g * (1.0 - v) * v, dtype)


@rule(aten.tanh_backward.default)
def tanh_backward(b: Builder, grad: fx.Node, y: fx.Node) -> fx.Node:
    """grad * (1 - y * y)"""
    (g, v), dtype = values(b, grad, y)
    return result(g * (1.0 - v * v), dtype)


@rule(aten.log_sigmoid_forward.default)
def log_sigmoid_forward(b: Builder, x: fx.Node) -> tuple[fx.Node, fx.Node]:
    """minimum(x, 0) - log1p(z), z = exp(-|x|); the second result is z on CPU and unused elsewhere"""
    (v,), dtype = values(b, x)
    z = (-abs(v)).exp()
    buffer = b.wanted[1]
    kept = result(z, dtype) if buffer.shape == v.shape else b.full(buffer.shape, 0, buffer.dtype, buffer.device)
    return result(v.minimum(0.0) - z.log1p(), dtype), kept


@rule(aten.log_sigmoid_backward.default)
def log_sigmoid_backward(b: Builder, grad: fx.Node, x: fx.Node, buffer: fx.Node) -> fx.Node:
    """x < 0 ? grad * (1 - z / (1 + z)) : grad * z / (1 + z), z = exp(-|x|)"""
    (g, v), dtype = values(b, grad, x)
    z = (-abs(v)).exp()
    share = z / (z + 1.0)
    return result(g * v.lt(0).where(1.0 - share, share), dtype)


@rule("logsigmoid.default", "log_sigmoid.default")
def log_sigmoid(b: Builder, x: fx.Node) -> fx.Node:
    """minimum(x, 0) - log1p(exp(-|x|))"""
    (v,), dtype = values(b, x)
    return result(v.minimum(0.0) - (-abs(v)).exp().log1p(), dtype)


@rule(aten.hardsigmoid.default)
def hardsigmoid(b: Builder, x: fx.Node) -> fx.Node:
    """clamp(x + 3, 0, 6) / 6"""
    (v,), dtype = values(b, x)
    return result((v + 3.0).maximum(0.0).minimum(6.0) / 6.0, dtype)


@rule(aten.hardsigmoid_backward.default)
def hardsigmoid_backward(b: Builder, grad: fx.Node, x: fx.Node) -> fx.Node:
    """-3 < x < 3 ? grad / 6 : 0"""
    (g, v), dtype = values(b, grad, x)
    return result(v.gt(-3.0).both(v.lt(3.0)).where(g / 6.0, 0.0), dtype)


# --- x times a sigmoid ---


@rule(aten.silu.default)
def silu(b: Builder, x: fx.Node) -> fx.Node:
    """x / (1 + exp(-x))"""
    (v,), dtype = values(b, x)
    return result(v / ((-v).exp() + 1.0), dtype)


@rule("silu_backward.default")
def silu_backward(b: Builder, grad: fx.Node, x: fx.Node) -> fx.Node:
    """grad * s * (1 + x * (1 - s)), s = sigmoid(x)"""
    (g, v), dtype = values(b, grad, x)
    s = v.sigmoid()
    return result(g * s * (v * (1.0 - s) + 1.0), dtype)


@rule(aten.hardswish.default)
def hardswish(b: Builder, x: fx.Node) -> fx.Node:
    """x * clamp(x + 3, 0, 6) / 6"""
    (v,), dtype = values(b, x)
    return result(v * (v + 3.0).maximum(0.0).minimum(6.0) / 6.0, dtype)


@rule(aten.hardswish_backward.default)
def hardswish_backward(b: Builder, grad: fx.Node, x: fx.Node) -> fx.Node:
    """x <= -3 ? 0 : x < 3 ? grad * (x / 3 + 0.5) : grad"""
    (g, v), dtype = values(b, grad, x)
    middle = v.lt(3.0).where(g * (v / 3.0 + 0.5), g)
    return result(v.le(-3.0).where(0.0, middle), dtype)


@rule("mish.default")
def mish(b: Builder, x: fx.Node) -> fx.Node:
    """x * tanh(log1p(exp(x)))"""
    (v,), dtype = values(b, x)
    return result(v * call(ops.tanh, v.exp().log1p()), dtype)


@rule("mish_backward.default")
def mish_backward(b: Builder, grad: fx.Node, x: fx.Node) -> fx.Node:
    """grad * (t + x * sigmoid(x) * (1 - t * t)), t = tanh(log1p(exp(x)))"""
    (g, v), dtype = values(b, grad, x)
    t = call(ops.tanh, v.exp().log1p())
    return result(g * (t + v * v.sigmoid() * (1.0 - t * t)), dtype)


@rule(aten.gelu.default)
def gelu(b: Builder, x: fx.Node, *, approximate: str = "none") -> fx.Node:
    """x / 2 * (1 + erf(x / sqrt 2)); "tanh": x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))"""
    (v,), dtype = values(b, x)
    if approximate == "tanh":
        inner = (v + v * v * v * GELU_TANH_CUBIC) * GELU_TANH_SCALE
        return result(v * 0.5 * (call(ops.tanh, inner) + 1.0), dtype)
    return result(v * 0.5 * (call(ops.erf, v * math.sqrt(0.5)) + 1.0), dtype)


@rule(aten.gelu_backward.default)
def gelu_backward(b: Builder, grad: fx.Node, x: fx.Node, *, approximate: str = "none") -> fx.Node:
    """grad * (cdf(x) + x * pdf(x)), or the derivative of the tanh form by the product rule"""
    (g, v), dtype = values(b, grad, x)
    if approximate == "tanh":
        t = call(ops.tanh, (v + v * v * v * GELU_TANH_CUBIC) * GELU_TANH_SCALE)
        inner_derivative = (v * v * (3.0 * GELU_TANH_CUBIC) + 1.0) * GELU_TANH_SCALE
        return result(g * ((t + 1.0) * 0.5 + v * 0.5 * (1.0 - t * t) * inner_derivative), dtype)
    cdf = (call(ops.erf, v * math.sqrt(0.5)) + 1.0) * 0.5
    pdf = (v * v * -0.5).exp() * (1.0 / math.sqrt(2.0 * math.pi))
    return result(g * (cdf + v * pdf), dtype)


# --- shrinking ---


def _within(v: Value, bound: Any) -> Value:
    return v.ge(-bound).both(v.le(bound))


@rule(aten.hardshrink.default)
def hardshrink(b: Builder, x: fx.Node, lambd: Any = 0.5) -> fx.Node:
    """-lambd <= x <= lambd ? 0 : x"""
    (v,), dtype = values(b, x)
    return result(_within(v, lambd).where(0.0, v), dtype)


@rule(aten.softshrink.default)
def softshrink(b: Builder, x: fx.Node, lambd: Any = 0.5) -> fx.Node:
    """x > lambd ? x - lambd : x < -lambd ? x + lambd : x * 0, which keeps NaN"""
    (v,), dtype = values(b, x)
    below = v.lt(-lambd).where(v + lambd, v * 0.0)
    return result(v.gt(lambd).where(v - lambd, below), dtype)


@rule(aten.hardshrink_backward.default, aten.softshrink_backward.default)
def shrink_backward(b: Builder, grad: fx.Node, x: fx.Node, lambd: Any) -> fx.Node:
    """x > lambd or x < -lambd ? grad : 0"""
    (g, v), dtype = values(b, grad, x)
    return result(call(ops.bitwise_or, v.gt(lambd), v.lt(-lambd)).where(g, 0.0), dtype)


@rule("_add_relu.Tensor", "_add_relu.Scalar")
def add_relu(b: Builder, x: fx.Node, other: Any, alpha: Any = 1) -> fx.Node:
    """relu(x + alpha * other)"""
    overload = aten.add.Tensor if b.is_tensor(other) else aten.add.Scalar
    total = b.aten(overload, x, other, alpha=alpha) if b.is_tensor(other) else b.aten(overload, x, other, alpha)
    return b.aten(aten.relu.default, total)


@rule("rrelu_with_noise_backward.default")
def rrelu_backward(
    b: Builder, grad: fx.Node, x: fx.Node, noise: fx.Node, lower: Any, upper: Any, training: bool, is_result: bool
) -> fx.Node | None:
    """Training draws slopes, kept in the noise: grad * noise; else one slope (lower + upper) / 2 below 0"""
    if isinstance(lower, fx.Node) or isinstance(upper, fx.Node):
        return None
    if training and upper - lower > 1e-6:
        return b.aten(aten.mul.Tensor, grad, noise)
    return b.aten(aten.leaky_relu_backward.default, grad, x, (lower + upper) / 2, is_result)

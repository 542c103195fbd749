"""Loss functions, forward and backward.

Invariant: the loss of each element is computed in the compute dtype and reduced there ("mean" divides the sum), so a
half is rounded once, at the end. Targets that are class indices become comparisons with an iota in backward, not
scatters: that is pointwise work, and fuses with the softmax backward that follows it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node
from torchlazy.prims import ops as P
from torchlazy.prims.builder import Builder, rule
from torchlazy.prims.decomps.checks import checked_probability
from torchlazy.prims.decomps.value import Number, Value, compute, iota, value
from torchlazy.prims.promotion import compute_dtype

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2  # ATen's Reduction


def _reduced(loss: Value, reduction: int, dtype: torch.dtype) -> Node:
    """The loss of each element reduced as asked for, in the result's dtype."""
    axes = range(loss.rank)
    result = {NONE: lambda: loss, MEAN: lambda: loss.mean(axes), SUM: lambda: loss.sum(axes)}[reduction]()
    return result.to(dtype).node


def _operands(b: Builder, *nodes: Node) -> tuple[tuple[Value, ...], torch.dtype]:
    """The operands in one compute dtype, and the dtype that ATen promotes them to."""
    dtype = b.meta(nodes[0]).dtype
    for node in nodes[1:]:
        dtype = torch.promote_types(dtype, b.meta(node).dtype)
    return tuple(value(b, node, compute_dtype(dtype)) for node in nodes), dtype


def _scaled(grad: Value, x: Value, reduction: int) -> Value:
    """The gradient of each element's loss: that of the mean is shared out."""
    return grad / x.meta.numel if reduction == MEAN else grad


def _register_loss(forward: torch._ops.OpOverload | str, loss: Callable[..., Value]) -> None:
    """A loss of (input, target, reduction, further parameters)."""

    @rule(forward)
    def reduced_loss(b: Builder, x: Node, target: Node, reduction: int = MEAN, *parameters: Number) -> Node | None:
        if any(isinstance(parameter, Node) for parameter in parameters):
            return None
        (v, t), dtype = _operands(b, x, target)
        return _reduced(loss(v, t, *parameters), reduction, dtype)


def _register_backward(backward: torch._ops.OpOverload | str, slope: Callable[..., Value]) -> None:
    """grad * slope(input, target), for ops of (grad, input, target, reduction, further parameters)."""

    @rule(backward)
    def loss_backward(
        b: Builder, grad: Node, x: Node, target: Node, reduction: int, *parameters: Number
    ) -> Node | None:
        if any(isinstance(parameter, Node) for parameter in parameters):
            return None
        (g, v, t), dtype = _operands(b, grad, x, target)
        result = _scaled(g, v, reduction) * slope(v, t, *parameters)
        return result.to(dtype).node


def _smooth_l1(x: Value, t: Value, beta: float = 1.0) -> Value:
    """|d|^2 / (2 beta) near 0, |d| - beta / 2 elsewhere"""
    distance = abs(x - t)
    if beta == 0:
        return distance
    return distance.lt(beta).where(distance * distance * 0.5 / beta, distance - 0.5 * beta)


def _smooth_l1_slope(x: Value, t: Value, beta: float) -> Value:
    """d / beta near 0, -1 or 1 elsewhere (-1 wins at 0 when beta is 0, as in ATen)"""
    d = x - t
    outside = d.le(-beta).where(-1.0, d.like(1.0))
    return outside if beta == 0 else abs(d).lt(beta).where(d / beta, outside)


def _huber(x: Value, t: Value, delta: float = 1.0) -> Value:
    """d^2 / 2 near 0, delta * (|d| - delta / 2) elsewhere"""
    distance = abs(x - t)
    return distance.le(delta).where(distance * distance * 0.5, (distance - 0.5 * delta) * delta)


def _huber_slope(x: Value, t: Value, delta: float) -> Value:
    """d clipped to [-delta, delta]"""
    return (x - t).maximum(-delta).minimum(delta)


def _soft_margin(x: Value, t: Value) -> Value:
    """log(1 + exp(-t * x))"""
    return (-t * x).exp().log1p()


def _soft_margin_slope(x: Value, t: Value) -> Value:
    """-t * z / (1 + z) with z = exp(-t * x)"""
    z = (-t * x).exp()
    return -t * z / (z + 1.0)


_register_loss(aten.mse_loss.default, lambda x, t: (x - t) * (x - t))
_register_backward(aten.mse_loss_backward.default, lambda x, t: (x - t) * 2.0)
_register_loss(aten.l1_loss.default, lambda x, t: abs(x - t))
_register_loss(aten.smooth_l1_loss.default, _smooth_l1)
_register_backward(aten.smooth_l1_loss_backward.default, _smooth_l1_slope)
_register_loss(aten.huber_loss.default, _huber)
_register_backward(aten.huber_loss_backward.default, _huber_slope)
_register_loss(aten.soft_margin_loss.default, _soft_margin)
_register_backward(aten.soft_margin_loss_backward.default, _soft_margin_slope)


@rule(aten.kl_div.default)
def kl_div(b: Builder, x: Node, target: Node, reduction: int = MEAN, *, log_target: bool = False) -> Node:
    """t * (log t - x), where 0 * log 0 is 0; with log_target, exp(t) * (t - x)"""
    (v, t), dtype = _operands(b, x, target)
    if log_target:
        return _reduced(t.exp() * (t - v), reduction, dtype)
    entropy = t.eq(0.0).where(0.0, t * t.log())
    return _reduced(entropy - t * v, reduction, dtype)


def _weighted(b: Builder, x: Value, weight: Node | None) -> Value:
    return x if weight is None else x * value(b, weight, x.dtype)


@rule(aten.binary_cross_entropy.default)
def binary_cross_entropy(b: Builder, x: Node, target: Node, weight: Node | None = None, reduction: int = MEAN) -> Node:
    """(t - 1) * max(log(1 - x), -100) - t * max(log x, -100)"""
    (v, t), dtype = _operands(b, x, target)
    v = checked_probability(v, "all elements of input should be between 0 and 1")
    t = checked_probability(t, "all elements of target should be between 0 and 1")
    loss = (t - 1.0) * (-v).log1p().maximum(-100.0) - t * v.log().maximum(-100.0)
    return _reduced(_weighted(b, loss, weight), reduction, dtype)


@rule(aten.binary_cross_entropy_backward.default)
def binary_cross_entropy_backward(
    b: Builder, grad: Node, x: Node, target: Node, weight: Node | None = None, reduction: int = MEAN
) -> Node:
    """g * (x - t) / max(x * (1 - x), 1e-12)"""
    (g, v, t), dtype = _operands(b, grad, x, target)
    slope = (v - t) / ((1.0 - v) * v).maximum(1e-12)
    return _weighted(b, _scaled(g, v, reduction) * slope, weight).to(dtype).node


@rule(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(
    b: Builder,
    x: Node,
    target: Node,
    weight: Node | None = None,
    pos_weight: Node | None = None,
    reduction: int = MEAN,
) -> Node:
    """(1 - t) * x - c * log(sigmoid(x)) with c = 1 + (pos_weight - 1) * t"""
    (v, t), dtype = _operands(b, x, target)
    minus_log_sigmoid = (-abs(v)).exp().log1p() + (-v).maximum(0.0)
    if pos_weight is not None:
        minus_log_sigmoid = minus_log_sigmoid * ((value(b, pos_weight, v.dtype) - 1.0) * t + 1.0)
    return _reduced(_weighted(b, (1.0 - t) * v + minus_log_sigmoid, weight), reduction, dtype)


def _class_axis(x: Value) -> int:
    """Scores are [classes] or [batch, classes, positions...]."""
    return 0 if x.rank == 1 else 1


@rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss(
    b: Builder, x: Node, target: Node, weight: Node | None, reduction: int, ignore_index: int
) -> tuple[Node, Node]:
    """-weight[t] * x[t] where t != ignore_index, else 0; the mean divides by the sum of the weights that count"""
    v, t = compute(b, x), value(b, target, torch.int64)
    axis = _class_axis(v)
    t = t.reshape((*v.shape[:axis], *v.shape[axis + 1 :]))
    counts = t.ne(ignore_index)
    chosen = counts.where(t, 0)
    picked = Value(b, b.prim(P.gather, v.node, chosen.unsqueeze(axis).node, axis=axis, wrap=False)).reshape(t.shape)
    if weight is None:
        loss, weights = counts.where(-picked, 0.0), counts.to(v.dtype)
    else:
        by_class = value(b, weight, v.dtype)
        w = Value(b, b.prim(P.index, by_class.node, chosen.node, dims=(0,), wrap=False))
        loss, weights = counts.where(-picked * w, 0.0), counts.where(w, 0.0)
    dtype = b.meta(x).dtype
    if reduction == NONE and v.rank > 1:
        return loss.to(dtype).node, b.full((), 0.0, dtype, v.meta.device)
    axes = range(t.rank)
    total, total_weight = loss.sum(axes), weights.sum(axes)
    result = total / total_weight if reduction == MEAN else total
    return result.to(dtype).node, total_weight.to(dtype).node


@rule(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(
    b: Builder,
    grad: Node,
    x: Node,
    target: Node,
    weight: Node | None,
    reduction: int,
    ignore_index: int,
    total_weight: Node,
) -> Node:
    """-weight[c] * g where c == t and t != ignore_index, else 0; g is divided by the total weight for the mean"""
    v = compute(b, x)
    axis = _class_axis(v)
    kept = v.kept_shape((axis,))
    t, g = value(b, target, torch.int64).reshape(kept), value(b, grad, v.dtype)
    if reduction == MEAN:
        g = g / value(b, total_weight, v.dtype)
    if g.rank:
        g = g.reshape(kept)
    along = tuple(size if i == axis else 1 for i, size in enumerate(v.shape))
    classes = iota(b, v.shape[axis], v.meta.device).reshape(along)
    slope = -g if weight is None else -g * value(b, weight, v.dtype).reshape(along)
    hit = classes.eq(t).both(t.ne(ignore_index))
    return hit.where(slope, v.like(0.0)).to(b.meta(x).dtype).node


# --- margins between classes ---


def _margins(b: Builder, x: Node, target: Node, margin: Number) -> tuple[Value, Value, Value]:
    """(margin - x[target] + x, whether each element is the target's, int64 targets), of [rows, classes]."""
    v, t = compute(b, x), value(b, target, torch.int64)
    rows = v if v.rank == 2 else v.reshape((1, v.meta.numel))
    t = t.reshape((rows.shape[0], 1))
    classes = iota(b, rows.shape[1], v.meta.device).unsqueeze(0)
    is_target = classes.broadcast(rows.shape).eq(t)
    own = Value(b, b.prim(P.gather, rows.node, t.node, axis=1, wrap=False))
    return rows - own + margin, is_target, t


def _row_weights(b: Builder, weight: Node | None, targets: Value, dtype: torch.dtype) -> Value | None:
    """[rows, 1]: the weight of each row's class."""
    if weight is None:
        return None
    flat = targets.reshape((targets.shape[0],))
    found = b.prim(P.index, value(b, weight, dtype).node, flat.node, dims=(0,), wrap=False)
    return Value(b, found).reshape(targets.shape)


@rule("multi_margin_loss.default")
def multi_margin_loss(
    b: Builder, x: Node, target: Node, p: Number = 1, margin: Number = 1, weight: Node | None = None,
    reduction: int = MEAN,
) -> Node | None:  # fmt: skip
    """sum over the other classes of max(0, margin - x[target] + x)^p * weight[target] / classes"""
    if isinstance(p, Node) or b.meta(x).numel == 0:
        return None
    z, is_target, targets = _margins(b, x, target, margin)
    each = z.maximum(0.0)
    each = each if p == 1 else each * each
    weights = _row_weights(b, weight, targets, z.dtype)
    each = each if weights is None else each * weights
    loss = is_target.where(0.0, each).sum((1,)) / z.shape[1]
    return _reduced(loss.reshape(b.shape(target)), reduction, b.dtype(x))


@rule("multi_margin_loss_backward.default")
def multi_margin_loss_backward(
    b: Builder, grad: Node, x: Node, target: Node, p: Number, margin: Number, weight: Node | None = None,
    reduction: int = MEAN,
) -> Node | None:  # fmt: skip
    """Each class above the margin is pushed down by what the target is pulled up."""
    if isinstance(p, Node) or b.meta(x).numel == 0:
        return None
    z, is_target, targets = _margins(b, x, target, margin)
    rows, classes = z.shape
    share = 1.0 / (rows * classes if reduction == MEAN else classes)  # type: ignore[operator]
    slope = z.gt(0.0).where(share if p == 1 else z * (2.0 * share), 0.0) if p != 1 else z.gt(0.0).to(z.dtype) * share
    weights = _row_weights(b, weight, targets, z.dtype)
    slope = slope if weights is None else slope * weights
    slope = is_target.where(0.0, slope)
    slope = is_target.where(-slope.sum((1,), keepdim=True), slope)
    g = compute(b, grad)
    g = g.reshape((rows, 1)) if reduction == NONE else g.reshape((1, 1))
    return (slope * g).reshape(b.shape(x)).to(b.dtype(x)).node

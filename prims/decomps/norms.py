"""Normalisation: layer, group, batch and root-mean-square norms, forward and backward.

With xhat = (x - mean) * rstd over the normalised axes and h = g * weight, all centred backwards are one formula:
    dx = rstd * (h - mean(h) - xhat * mean(h * xhat)),  dweight = sum(g * xhat),  dbias = sum(g).
Invariant: everything runs in the input's compute dtype; each output is rounded once, to the dtype of ATen's result.
Running statistics are values: a form of batch norm that would update them in place has no rule here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node
from torchlazy.prims.builder import Builder, NotApplicable, rule
from torchlazy.prims.decomps.norm_statistics import normalised, statistics
from torchlazy.prims.decomps.value import Number, Value, compute, value
from torchlazy.prims.meta import Dim

aten = torch.ops.aten

_IN_PLACE = "this form updates the running statistics in place; its functional form decomposes"


def _as_result(b: Builder, position: int, x: Value) -> Node:
    """`x` in the dtype and shape of output `position` of the ATen op."""
    wanted = b.wanted[position]
    return x.to(wanted.dtype).reshape(wanted.shape).node


def _statistic(b: Builder, position: int, x: Value) -> Node:
    """A saved statistic; in evaluation some devices save an empty tensor in its place."""
    wanted = b.wanted[position]
    if 0 in wanted.shape and 0 not in x.shape:
        return b.full(wanted.shape, 0, wanted.dtype, wanted.device)
    return _as_result(b, position, x)


def _affine(x: Value, weight: Value | None, bias: Value | None) -> Value:
    """x * weight + bias, either of them optional"""
    scaled = x if weight is None else x * weight
    return scaled if bias is None else scaled + bias


def _parameter(b: Builder, node: Node | None, dtype: torch.dtype, shape: Sequence[Dim]) -> Value | None:
    """An optional parameter in the compute dtype, laid along the dimensions that it belongs to."""
    return None if node is None else value(b, node, dtype).reshape(shape)


def _centred_input_grad(h: Value, xhat: Value, rstd: Value, axes: Sequence[int]) -> Value:
    """rstd * (h - mean(h) - xhat * mean(h * xhat))"""
    return rstd * (h - h.mean(axes, keepdim=True) - xhat * (h * xhat).mean(axes, keepdim=True))


# --- layer norm ---


@rule(aten.native_layer_norm.default)
def layer_norm(
    b: Builder, x: Node, normalized_shape: Sequence[Dim], weight: Node | None, bias: Node | None, eps: Number
) -> tuple[Node, Node, Node]:
    v = compute(b, x)
    inner = v.shape[v.rank - len(normalized_shape) :]
    axes = range(v.rank - len(inner), v.rank)
    xhat, mean, rstd = normalised(v, axes, eps)
    w, c = _parameter(b, weight, v.dtype, inner), _parameter(b, bias, v.dtype, inner)
    out = _affine(xhat, w, c)
    return _as_result(b, 0, out), _as_result(b, 1, mean), _as_result(b, 2, rstd)


@rule(aten.native_layer_norm_backward.default)
def layer_norm_backward(
    b: Builder,
    grad: Node,
    x: Node,
    normalized_shape: Sequence[Dim],
    mean: Node,
    rstd: Node,
    weight: Node | None,
    bias: Node | None,
    output_mask: Sequence[bool],
) -> tuple[Node | None, ...]:
    v = compute(b, x)
    g, mu, scale = (value(b, node, v.dtype) for node in (grad, mean, rstd))
    inner = v.shape[v.rank - len(normalized_shape) :]
    outer_axes, axes = range(v.rank - len(inner)), range(v.rank - len(inner), v.rank)
    xhat = (v - mu) * scale
    w = _parameter(b, weight, v.dtype, inner)
    dx = dw = db = None
    if output_mask[0]:
        dx = _as_result(b, 0, _centred_input_grad(_affine(g, w, None), xhat, scale, axes))
    if output_mask[1]:
        dw = _as_result(b, 1, (g * xhat).sum(outer_axes))
    if output_mask[2]:
        db = _as_result(b, 2, g.sum(outer_axes))
    return dx, dw, db


# --- group norm ---


@rule(aten.native_group_norm.default)
def group_norm(
    b: Builder,
    x: Node,
    weight: Node | None,
    bias: Node | None,
    N: Dim,
    C: Dim,
    HxW: Dim,
    group: int,
    eps: Number,
) -> tuple[Node, Node, Node]:
    """Over (channels of the group, positions) of the input seen as [N, group, C / group, HxW]."""
    v = compute(b, x).reshape((N, group, C // group, HxW))
    xhat, mean, rstd = normalised(v, (2, 3), eps)
    along = (1, group, C // group, 1)
    w, c = _parameter(b, weight, v.dtype, along), _parameter(b, bias, v.dtype, along)
    out = _affine(xhat, w, c)
    return _as_result(b, 0, out), _as_result(b, 1, mean), _as_result(b, 2, rstd)


@rule(aten.native_group_norm_backward.default)
def group_norm_backward(
    b: Builder,
    grad: Node,
    x: Node,
    mean: Node,
    rstd: Node,
    weight: Node | None,
    N: Dim,
    C: Dim,
    HxW: Dim,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[Node | None, ...]:
    split = (N, group, C // group, HxW)
    v = compute(b, x).reshape(split)
    g = value(b, grad, v.dtype).reshape(split)
    mu, scale = (value(b, node, v.dtype).reshape((N, group, 1, 1)) for node in (mean, rstd))
    xhat = (v - mu) * scale
    w = _parameter(b, weight, v.dtype, (1, group, C // group, 1))
    dx = dw = db = None
    if output_mask[0]:
        dx = _as_result(b, 0, _centred_input_grad(_affine(g, w, None), xhat, scale, (2, 3)))
    if output_mask[1]:
        dw = _as_result(b, 1, (g * xhat).sum((0, 3)))
    if output_mask[2]:
        db = _as_result(b, 2, g.sum((0, 3)))
    return dx, dw, db


# --- batch norm ---


def _channel_axes(x: Value) -> tuple[tuple[int, ...], tuple[Dim, ...]]:
    """The axes normalised over (all but 1), and the shape of a per-channel vector beside the input."""
    axes = tuple(axis for axis in range(x.rank) if axis != 1)
    return axes, x.kept_shape(axes)


class _BatchNorm:
    """One batch norm: the output, the statistics used and (in training) the updated running statistics."""

    def __init__(
        self,
        b: Builder,
        x: Node,
        weight: Node | None,
        bias: Node | None,
        running: tuple[Node | None, Node | None],
        training: bool,
        momentum: Number,
        eps: Number,
    ) -> None:
        v = compute(b, x)
        axes, along = _channel_axes(v)
        old_mean, old_var = (_parameter(b, node, v.dtype, along) for node in running)
        self.running_mean, self.running_var = old_mean, old_var
        if training:
            mean, m2 = statistics(v, axes)
            count = v.count(axes)
            self.mean, self.rstd = mean.to(v.dtype), (m2 / count + eps).rsqrt().to(v.dtype)
            if old_mean is not None and old_var is not None:
                self.running_mean = _moved_towards(old_mean.to(mean.dtype), mean, momentum)
                self.running_var = _moved_towards(old_var.to(mean.dtype), m2 / (count - 1), momentum)
        else:
            assert old_mean is not None and old_var is not None, "batch norm: evaluation needs running statistics"
            self.mean, self.rstd = old_mean, (old_var + eps).rsqrt()
        w, c = _parameter(b, weight, v.dtype, along), _parameter(b, bias, v.dtype, along)
        self.out = _affine((v - self.mean) * self.rstd, w, c)

    def forward_results(self, b: Builder) -> tuple[Node, Node, Node]:
        """(output, saved mean, saved reciprocal deviation)"""
        return _as_result(b, 0, self.out), _statistic(b, 1, self.mean), _statistic(b, 2, self.rstd)

    def running_results(self, b: Builder, position: int) -> tuple[Node, Node]:
        """(running mean, running variance) as outputs `position` and the one after it"""
        assert self.running_mean is not None and self.running_var is not None
        return _as_result(b, position, self.running_mean), _as_result(b, position + 1, self.running_var)


def _moved_towards(old: Value, new: Value, momentum: Number) -> Value:
    """(1 - momentum) * old + momentum * new"""
    keep = 1.0 - old.like(momentum) if isinstance(momentum, Node) else 1.0 - momentum
    return old * keep + new * momentum


@rule(aten.native_batch_norm.default)
def native_batch_norm(
    b: Builder,
    x: Node,
    weight: Node | None,
    bias: Node | None,
    running_mean: Node | None,
    running_var: Node | None,
    training: bool,
    momentum: Number,
    eps: Number,
) -> tuple[Node, ...] | None:
    """In training with running statistics this overload updates them in place: not a value, so not decomposed."""
    if training and (running_mean is not None or running_var is not None):
        raise NotApplicable(_IN_PLACE)
    norm = _BatchNorm(b, x, weight, bias, (running_mean, running_var), training, momentum, eps)
    return norm.forward_results(b)


@rule(aten._native_batch_norm_legit.no_stats)
def batch_norm_no_stats(
    b: Builder, x: Node, weight: Node | None, bias: Node | None, training: bool, momentum: Number, eps: Number
) -> tuple[Node, ...]:
    return _BatchNorm(b, x, weight, bias, (None, None), True, momentum, eps).forward_results(b)


@rule(aten._native_batch_norm_legit_no_training.default)
def batch_norm_no_training(
    b: Builder,
    x: Node,
    weight: Node | None,
    bias: Node | None,
    running_mean: Node,
    running_var: Node,
    momentum: Number,
    eps: Number,
) -> tuple[Node, ...]:
    norm = _BatchNorm(b, x, weight, bias, (running_mean, running_var), False, momentum, eps)
    return norm.forward_results(b)


@rule(aten._native_batch_norm_legit_functional.default)
def batch_norm_functional(
    b: Builder,
    x: Node,
    weight: Node | None,
    bias: Node | None,
    running_mean: Node,
    running_var: Node,
    training: bool,
    momentum: Number,
    eps: Number,
) -> tuple[Node, ...]:
    norm = _BatchNorm(b, x, weight, bias, (running_mean, running_var), training, momentum, eps)
    return (*norm.forward_results(b), *norm.running_results(b, 3))


@rule(aten._batch_norm_with_update_functional.default)
def batch_norm_with_update(
    b: Builder,
    x: Node,
    weight: Node | None,
    bias: Node | None,
    running_mean: Node,
    running_var: Node,
    momentum: Number,
    eps: Number,
) -> tuple[Node, ...]:
    """The reserve (output 3) is scratch of a vendor library's backward: `batch_norm_backward` below ignores it."""
    norm = _BatchNorm(b, x, weight, bias, (running_mean, running_var), True, momentum, eps)
    return (*norm.forward_results(b), _reserve(b), *norm.running_results(b, 4))


@rule(aten._batch_norm_no_update.default)
def batch_norm_no_update(
    b: Builder,
    x: Node,
    weight: Node | None,
    bias: Node | None,
    running_mean: Node | None,
    running_var: Node | None,
    momentum: Number,
    eps: Number,
) -> tuple[Node, ...]:
    norm = _BatchNorm(b, x, weight, bias, (running_mean, running_var), False, momentum, eps)
    return (*norm.forward_results(b), _reserve(b))


def _reserve(b: Builder) -> Node:
    return b.full(b.wanted[3].shape, 0, b.wanted[3].dtype)


@rule(aten.cudnn_batch_norm.default)
def cudnn_batch_norm(
    b: Builder,
    x: Node,
    weight: Node,
    bias: Node | None,
    running_mean: Node | None,
    running_var: Node | None,
    training: bool,
    exponential_average_factor: Number,
    epsilon: Number,
) -> tuple[Node, ...] | None:
    """As `native_batch_norm`, with a reserve."""
    if training and (running_mean is not None or running_var is not None):
        raise NotApplicable(_IN_PLACE)
    running = (running_mean, running_var)
    norm = _BatchNorm(b, x, weight, bias, running, training, exponential_average_factor, epsilon)
    return (*norm.forward_results(b), _reserve(b))


def _batch_norm_backward(
    b: Builder,
    grad: Node,
    x: Node,
    weight: Node | None,
    running: tuple[Node | None, Node | None],
    saved: tuple[Node | None, Node | None],
    training: bool,
    eps: Number,
    output_mask: Sequence[bool],
) -> tuple[Node | None, ...] | None:
    """dx = weight * rstd * (g - mean(g) - (x - mean) * rstd**2 * mean(g * (x - mean))): the weight is one number of a
    channel, so that two sums over the operands, which one loop makes, serve all three gradients. In evaluation the
    statistics are constants: dx = g * weight * rstd."""
    mean_node, scale_node = saved if training else running
    if mean_node is None or scale_node is None:
        return None
    v = compute(b, x)
    axes, along = _channel_axes(v)
    g = value(b, grad, v.dtype)
    mu, scale = (value(b, node, v.dtype).reshape(along) for node in (mean_node, scale_node))
    if not training:
        scale = (scale + eps).rsqrt()
    centred, rate = v - mu, _affine(scale, _parameter(b, weight, v.dtype, along), None)
    needs_sums = output_mask[0] and training
    dx = dw = db = None
    if output_mask[1] or needs_sums:
        along_x = (g * centred).sum(axes)
        dw = _as_result(b, 1, along_x * scale.reshape(along_x.shape)) if output_mask[1] else None
    if output_mask[2] or needs_sums:
        total = g.sum(axes)
        db = _as_result(b, 2, total) if output_mask[2] else None
    if needs_sums:
        count = v.count(axes)
        slope = scale * scale * (along_x.reshape(along) / count)
        g = g - total.reshape(along) / count - centred * slope
    if output_mask[0]:
        dx = _as_result(b, 0, g * rate)
    return dx, dw, db


@rule(aten.native_batch_norm_backward.default)
def native_batch_norm_backward(
    b: Builder,
    grad: Node,
    x: Node,
    weight: Node | None,
    running_mean: Node | None,
    running_var: Node | None,
    save_mean: Node | None,
    save_invstd: Node | None,
    train: bool,
    eps: Number,
    output_mask: Sequence[bool],
) -> tuple[Node | None, ...] | None:
    running, saved = (running_mean, running_var), (save_mean, save_invstd)
    return _batch_norm_backward(b, grad, x, weight, running, saved, train, eps, output_mask)


@rule(aten.batch_norm_backward.default)
def batch_norm_backward(
    b: Builder,
    grad: Node,
    x: Node,
    weight: Node,
    running_mean: Node | None,
    running_var: Node | None,
    save_mean: Node | None,
    save_var: Node | None,
    update: bool,
    eps: Number,
    output_mask: Sequence[bool],
    reserve: Node,
) -> tuple[Node | None, ...] | None:
    """`save_var` holds the reciprocal deviation on every backend."""
    running, saved = (running_mean, running_var), (save_mean, save_var)
    return _batch_norm_backward(b, grad, x, weight, running, saved, update, eps, output_mask)


@rule(aten.cudnn_batch_norm_backward.default)
def cudnn_batch_norm_backward(
    b: Builder,
    x: Node,
    grad: Node,
    weight: Node,
    running_mean: Node | None,
    running_var: Node | None,
    save_mean: Node | None,
    save_var: Node | None,
    epsilon: Number,
    reserve: Node,
) -> tuple[Node | None, ...] | None:
    """`save_var` holds the reciprocal deviation; this op exists for training only."""
    running, saved = (running_mean, running_var), (save_mean, save_var)
    return _batch_norm_backward(b, grad, x, weight, running, saved, True, epsilon, (True, True, True))


# --- root-mean-square norm ---


@rule(aten._fused_rms_norm.default)
def fused_rms_norm(
    b: Builder, x: Node, normalized_shape: Sequence[int], weight: Node | None, eps: Number | None
) -> tuple[Node, Node]:
    """x * rstd * weight with rstd = 1 / sqrt(mean(x * x) + eps); eps defaults to the compute dtype's epsilon"""
    v = compute(b, x)
    inner = v.shape[v.rank - len(normalized_shape) :]
    axes = range(v.rank - len(inner), v.rank)
    rstd = ((v * v).mean(axes, keepdim=True) + (torch.finfo(v.dtype).eps if eps is None else eps)).rsqrt()
    out = _affine(v * rstd, _parameter(b, weight, v.dtype, inner), None)
    return _as_result(b, 0, out), _as_result(b, 1, rstd)


@rule(aten._fused_rms_norm_backward.default)
def fused_rms_norm_backward(
    b: Builder,
    grad: Node,
    x: Node,
    normalized_shape: Sequence[int],
    rstd: Node,
    weight: Node | None,
    output_mask: Sequence[bool],
) -> tuple[Node | None, ...]:
    """dx = rstd * (h - xhat * mean(h * xhat)) with xhat = x * rstd"""
    v = compute(b, x)
    g, scale = value(b, grad, v.dtype), value(b, rstd, v.dtype)
    inner = v.shape[v.rank - len(normalized_shape) :]
    outer_axes, axes = range(v.rank - len(inner)), range(v.rank - len(inner), v.rank)
    xhat = v * scale
    h = _affine(g, _parameter(b, weight, v.dtype, inner), None)
    dx = dw = None
    if output_mask[0]:
        dx = _as_result(b, 0, scale * (h - xhat * (h * xhat).mean(axes, keepdim=True)))
    if output_mask[1] and weight is not None:
        dw = _as_result(b, 1, (g * xhat).sum(outer_axes))
    return dx, dw


@rule(aten.rms_norm.default)
def rms_norm(
    b: Builder, x: Node, normalized_shape: Sequence[int], weight: Node | None = None, eps: Number | None = None
) -> Node:
    return b.aten(aten._fused_rms_norm.default, x, normalized_shape, weight, eps)[0]


# --- weight norm ---


def _along(x: Value, dim: int) -> tuple[int, ...]:
    return tuple(axis for axis in range(x.rank) if axis != dim % x.rank)


@rule(aten._weight_norm_interface.default)
def weight_norm(b: Builder, v: Node, g: Node, dim: int = 0) -> tuple[Node, Node]:
    """(v * g / |v|, |v|), the norm of each slice at `dim`"""
    direction = compute(b, v)
    norms = (direction * direction).sum(_along(direction, dim), keepdim=True).sqrt()
    scale = value(b, g, direction.dtype) / norms
    return _as_result(b, 0, direction * scale), _as_result(b, 1, norms)


@rule(aten._weight_norm_interface_backward.default)
def weight_norm_backward(b: Builder, grad: Node, v: Node, g: Node, norms: Node, dim: int) -> tuple[Node, Node]:
    """dv = g / |v| * (grad - v * s / |v|), dg = s, with s = sum(grad * v) / |v|"""
    direction = compute(b, v)
    w, size, length = (value(b, node, direction.dtype) for node in (grad, g, norms))
    along = (w * direction).sum(_along(direction, dim), keepdim=True) / length
    dv = size / length * (w - direction * (along / length))
    return _as_result(b, 0, dv), _as_result(b, 1, along)

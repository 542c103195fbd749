"""Softmax and log-softmax over one axis, forward and backward.

Invariant: the maximum is subtracted before the exponential, everything runs in float32 for half inputs, and the result
is rounded once, to the input's dtype or (half_to_float) not at all.
"""

from __future__ import annotations

import math

import torch
from torch.fx import Node
from torchlazy.prims.builder import Builder, rule
from torchlazy.prims.decomps.value import Value, canonical_axis, compute, value

aten = torch.ops.aten


def _over_axis(x: Value, dim: int) -> tuple[Value, tuple[int]]:
    """The input with at least one axis, and the axis meant by `dim`."""
    return (x if x.rank else x.reshape((1,))), (canonical_axis(dim, x.rank),)


def _softmax_value(x: Value, dim: int) -> Value:
    """exp(x - max x) / sum(exp(x - max x)), in the dtype of `x`"""
    row, axes = _over_axis(x, dim)
    if row.meta.numel == 0:
        return x
    weight = (row - row.amax(axes, keepdim=True)).exp()
    return (weight / weight.sum(axes, keepdim=True)).reshape(x.shape)


@rule(aten._softmax.default)
def softmax(b: Builder, x: Node, dim: int, half_to_float: bool) -> Node:
    wide = compute(b, x)
    return _softmax_value(wide, dim).to(wide.dtype if half_to_float else b.meta(x).dtype).node


@rule(aten._log_softmax.default)
def log_softmax(b: Builder, x: Node, dim: int, half_to_float: bool) -> Node:
    """(x - max x) - log(sum(exp(x - max x)))"""
    wide = compute(b, x)
    result = wide.dtype if half_to_float else b.meta(x).dtype
    row, axes = _over_axis(wide, dim)
    if row.meta.numel == 0:
        return wide.to(result).node
    shifted = row - row.amax(axes, keepdim=True)
    total = shifted.exp().sum(axes, keepdim=True)
    return (shifted - total.log()).reshape(wide.shape).to(result).node


@rule(aten._softmax_backward_data.default)
def softmax_backward(b: Builder, grad: Node, output: Node, dim: int, input_dtype: torch.dtype) -> Node:
    """(g - sum(g * y)) * y"""
    y, g = compute(b, output), compute(b, grad)
    row, axes = _over_axis(y, dim)
    g = g.reshape(row.shape)
    return ((g - (g * row).sum(axes, keepdim=True)) * row).reshape(y.shape).to(input_dtype).node


@rule(aten._log_softmax_backward_data.default)
def log_softmax_backward(b: Builder, grad: Node, output: Node, dim: int, input_dtype: torch.dtype) -> Node:
    """g - exp(y) * sum(g)"""
    y, g = compute(b, output), compute(b, grad)
    row, axes = _over_axis(y, dim)
    g = g.reshape(row.shape)
    return (g - row.exp() * g.sum(axes, keepdim=True)).reshape(y.shape).to(input_dtype).node


@rule(aten._safe_softmax.default)
def safe_softmax(b: Builder, x: Node, dim: int, dtype: torch.dtype | None = None) -> Node:
    """Softmax that answers 0 for a row in which every element is -inf (a row that is masked out)."""
    result = dtype or b.meta(x).dtype
    wide = compute(b, value(b, x, result).node)
    row, axes = _over_axis(wide, dim)
    masked_out = row.eq(-math.inf).all(axes, keepdim=True)
    return masked_out.where(0.0, _softmax_value(wide, dim).reshape(row.shape)).reshape(wide.shape).to(result).node

"""The functional fused optimizers: one call for all parameters becomes the pointwise update of each.

Invariant: an update runs in the compute dtype of its parameter and each result is rounded once, to the dtype of the
value that it replaces. A result list holds what the in-place operator leaves in that argument: gradients come back
divided by `grad_scale`, and where `found_inf` is 1 everything comes back as it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node
from torchlazy.prims.builder import Builder, rule
from torchlazy.prims.decomps.value import Number, Value, compute, value

Tensors = Sequence[Node]


@dataclass(frozen=True)
class _Common:
    """What all updates of one call share."""

    b: Builder
    weight_decay: Number
    maximize: bool
    grad_scale: Node | None
    found_inf: Node | None

    def scalar(self, number: Number, like: Value) -> Value:
        """A hyperparameter (number, runtime scalar or 0-dim tensor) in the dtype of the computation."""
        if self.b.is_tensor(number):
            return value(self.b, self.b.to_device(number, like.meta.device), like.dtype).reshape(())
        return Value(self.b, self.b.full((), number, like.dtype, like.meta.device))

    def unscaled(self, grad: Node, like: Value) -> Value:
        """The gradient divided by the loss scale: also what the caller finds in `grads` afterwards."""
        g = value(self.b, grad, like.dtype)
        return g if self.grad_scale is None else g / self.scalar(self.grad_scale, like)

    def descent(self, unscaled: Value, param: Value, *, coupled_decay: bool) -> Value:
        """The gradient to go down along: sign turned for `maximize`, L2 penalty added where the decay is coupled."""
        g = -unscaled if self.maximize else unscaled
        return g + param * self.weight_decay if coupled_decay and self.has_decay else g

    @property
    def has_decay(self) -> bool:
        return isinstance(self.weight_decay, Node) or self.weight_decay != 0

    def settle(self, new: Value, old: Node) -> Node:
        """`new` in the dtype of `old`, or `old` itself when an infinity was found."""
        rounded = new.to(self.b.dtype(old))
        if self.found_inf is None:
            return rounded.node
        kept = value(self.b, old)
        found = value(self.b, self.b.to_device(self.found_inf, kept.meta.device)).reshape(()).eq(1.0)
        return found.where(kept, rounded).node

    def settle_grad(self, new: Value, old: Node) -> Node:
        return old if self.grad_scale is None else self.settle(new, old)


def _complement_of_power(common: _Common, beta: Number, step: Value) -> Value:
    """1 - beta ** step, as -expm1(step * log(beta)): exact near 0 in float32 too"""
    if isinstance(beta, Node):
        return -(step * common.scalar(beta, step).log()).expm1()
    return -(step * math.log(beta)).expm1() if beta > 0 else step.like(1.0)


def _lerp(start: Value, end: Value, weight: Number) -> Value:
    """start + weight * (end - start), from the nearer end"""
    if isinstance(weight, Node) or weight < 0.5:
        return start + (end - start) * weight
    return end - (end - start) * (1.0 - weight)


def _one_minus(number: Number, like: Value) -> Number | Value:
    return 1.0 - like.like(number) if isinstance(number, Node) else 1.0 - number


def _adam(
    common: _Common,
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
    steps: Tensors,
    lr: Number,
    betas: tuple[Number, Number],
    eps: Number,
    *,
    amsgrad: bool,
    decoupled: bool,
) -> tuple[tuple[Node, ...], ...]:
    """m = lerp(m, g, 1 - beta1), v = beta2 v + (1 - beta2) g^2, p -= lr / c1 * m / (sqrt(v) / sqrt(c2) + eps).

    c = 1 - beta ** step is the bias correction; with amsgrad the largest v so far takes the place of v.
    """
    b = common.b
    results: list[list[Node]] = [[] for _ in range(5)]
    for i, (param, grad, exp_avg, exp_avg_sq, step_node) in enumerate(
        zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True)
    ):
        p = compute(b, param)
        unscaled = common.unscaled(grad, p)
        rate, step = common.scalar(lr, p), common.scalar(step_node, p)
        start = p
        if decoupled and common.has_decay:
            start = p * (1.0 - rate * common.weight_decay)
        g = common.descent(unscaled, p, coupled_decay=not decoupled)
        m, v = value(b, exp_avg, p.dtype), value(b, exp_avg_sq, p.dtype)
        keep1 = _one_minus(betas[0], g)
        m = m + (g - m) * keep1 if isinstance(keep1, Value) else _lerp(m, g, keep1)
        v = v * betas[1] + g * g * _one_minus(betas[1], g)
        largest = v
        if amsgrad:
            largest = value(b, max_exp_avg_sqs[i], p.dtype).maximum(v)
            results[4].append(common.settle(largest, max_exp_avg_sqs[i]))
        root_correction = _complement_of_power(common, betas[1], step).sqrt()
        step_size = rate / _complement_of_power(common, betas[0], step)
        denominator = largest.sqrt() / root_correction + eps
        results[0].append(common.settle(start - step_size * m / denominator, param))
        results[1].append(common.settle_grad(unscaled, grad))
        results[2].append(common.settle(m, exp_avg))
        results[3].append(common.settle(v, exp_avg_sq))
    return tuple(map(tuple, results))


def _register_adam(name: str, *, decoupled: bool) -> None:
    @rule(f"{name}.default", f"{name}.tensor_lr")
    def fused_adam(
        b: Builder,
        params: Tensors,
        grads: Tensors,
        exp_avgs: Tensors,
        exp_avg_sqs: Tensors,
        max_exp_avg_sqs: Tensors,
        state_steps: Tensors,
        *,
        lr: Number,
        beta1: Number,
        beta2: Number,
        weight_decay: Number,
        eps: Number,
        amsgrad: bool,
        maximize: bool,
        grad_scale: Node | None = None,
        found_inf: Node | None = None,
    ) -> tuple[tuple[Node, ...], ...]:
        common = _Common(b, weight_decay, maximize, grad_scale, found_inf)
        state = (exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps)
        return _adam(common, params, grads, *state, lr, (beta1, beta2), eps, amsgrad=amsgrad, decoupled=decoupled)


_register_adam("_fused_adam", decoupled=False)
_register_adam("_fused_adamw", decoupled=True)


@rule("_fused_sgd.default", "_fused_sgd.tensor_lr")
def fused_sgd(
    b: Builder,
    params: Tensors,
    grads: Tensors,
    momentum_buffers: Tensors,
    *,
    weight_decay: Number,
    momentum: Number,
    lr: Number,
    dampening: Number,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Node | None = None,
    found_inf: Node | None = None,
) -> tuple[tuple[Node, ...], ...]:
    """u = momentum * u + (1 - dampening) * g (u = g at first), p -= lr * u; nesterov goes along g + momentum * u"""
    common = _Common(b, weight_decay, maximize, grad_scale, found_inf)
    results: list[list[Node]] = [[], [], []]
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        p = compute(b, param)
        unscaled = common.unscaled(grad, p)
        g = common.descent(unscaled, p, coupled_decay=True)
        if momentum_buffers:
            buffer = value(b, momentum_buffers[i], p.dtype)
            buffer = g if is_first_step else buffer * momentum + g * _one_minus(dampening, g)
            results[2].append(common.settle(buffer, momentum_buffers[i]))
            g = g + buffer * momentum if nesterov else buffer
        results[0].append(common.settle(p - common.scalar(lr, p) * g, param))
        results[1].append(common.settle_grad(unscaled, grad))
    return tuple(map(tuple, results))


@rule("_fused_adagrad.default", "_fused_adagrad.tensor_lr")
def fused_adagrad(
    b: Builder,
    params: Tensors,
    grads: Tensors,
    state_sums: Tensors,
    state_steps: Tensors,
    *,
    lr: Number,
    lr_decay: Number,
    weight_decay: Number,
    eps: Number,
    maximize: bool,
    grad_scale: Node | None = None,
    found_inf: Node | None = None,
) -> tuple[tuple[Node, ...], ...]:
    """s += g^2, p -= lr / (1 + (step - 1) * lr_decay) * g / (sqrt(s) + eps)"""
    common = _Common(b, weight_decay, maximize, grad_scale, found_inf)
    results: list[list[Node]] = [[], [], []]
    for param, grad, state_sum, step_node in zip(params, grads, state_sums, state_steps, strict=True):
        p = compute(b, param)
        unscaled = common.unscaled(grad, p)
        g = common.descent(unscaled, p, coupled_decay=True)
        step = common.scalar(step_node, p)
        rate = common.scalar(lr, p) / ((step - 1.0) * lr_decay + 1.0)
        total = value(b, state_sum, p.dtype) + g * g
        results[0].append(common.settle(p - rate * g / (total.sqrt() + eps), param))
        results[1].append(common.settle_grad(unscaled, grad))
        results[2].append(common.settle(total, state_sum))
    lists = list(map(tuple, results))
    # The overload with a number for `lr` also lists the steps, which the operator leaves alone.
    return tuple(lists) if len(b.wanted) == 3 else (*lists, tuple(state_steps))

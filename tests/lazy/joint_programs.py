"""Programs around one function that is differentiated: each observes what eager autograd would let it observe.

A program gets `wrap`, which stands for the way of running (eager, through a joint, compiled), and a device. It calls
the wrapped function several times and returns everything that it saw, as plain tensors and values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Wrap = Callable[..., Callable[..., Any]]
Program = Callable[[Wrap, str], list[Any]]
TURNS = 6


def leaf(device: str, *shape: int, seed: int = 0) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(device).requires_grad_()


def seen(*values: Any) -> list[Any]:
    """What a program saw, on the host."""
    return [v.detach().cpu().clone() if isinstance(v, torch.Tensor) else v for v in values]


# --- inputs and outputs of every kind ---


def integer_inputs(wrap: Wrap, device: str) -> list[Any]:
    call = wrap(lambda x, at, keep: (x[at] * at.unsqueeze(1), torch.where(keep, x.sum(1), 0.0), at + 1))
    found: list[Any] = []
    for turn in range(TURNS):
        x = leaf(device, 4, 3, seed=turn)
        at = torch.tensor([3, 0, turn % 4]).to(device)
        keep = torch.tensor([True, False, True, turn % 2 == 1]).to(device)
        a, b, c = call(x, at, keep)
        (a.sum() + b.square().sum()).backward()
        found += seen(a, b, c, x.grad, at.grad, c.requires_grad)
    return found


def none_gradients(wrap: Wrap, device: str) -> list[Any]:
    def function(x: torch.Tensor, unused: torch.Tensor, plain: torch.Tensor, cut: torch.Tensor) -> Any:
        with torch.no_grad():
            scale = cut.sum()
        return x * scale + plain, plain * 2, x.cos()

    call = wrap(function)
    found: list[Any] = []
    for turn in range(TURNS):
        x, unused, cut = (leaf(device, 3, seed=10 * turn + i) for i in range(3))
        plain = leaf(device, 3, seed=turn + 5).detach()
        first, second, third = call(x, unused, plain, cut)
        used = first if turn != 1 else third
        grads = torch.autograd.grad(used.sum(), (x, unused, cut), allow_unused=True)
        found += seen(first, second, third, *grads, second.requires_grad)
    return found


def outputs_without_gradient(wrap: Wrap, device: str) -> list[Any]:
    def function(x: torch.Tensor) -> Any:
        return {
            "values": x.sin(),
            "order": x.argsort(0),
            "mask": x > 0,
            "cut": (x * 2).detach(),
            "size": len(x),
            "no": None,
        }

    call = wrap(function)
    found: list[Any] = []
    for turn in range(TURNS):
        x = leaf(device, 4, seed=turn)
        out = call(x)
        out["values"].square().sum().backward()
        found += seen(*out.values(), x.grad, *(v.requires_grad for v in out.values() if isinstance(v, torch.Tensor)))
    return found


def some_outputs_are_dropped(wrap: Wrap, device: str) -> list[Any]:
    call = wrap(lambda x, y: (x * y, x.exp(), y.sin() @ x))
    found: list[Any] = []
    for turn in range(TURNS):
        x, y = leaf(device, 3, 3, seed=turn), leaf(device, 3, 3, seed=turn + 9)
        out = call(x, y)[turn % 3]
        out.sum().backward()
        found += seen(out, x.grad, y.grad)
    return found


def written_buffer(wrap: Wrap, device: str) -> list[Any]:
    def function(x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            mean.lerp_(x.mean(0), 0.1)
        return (x - mean).square()

    call = wrap(function)
    found, mean = [], torch.zeros(3).to(device)
    for turn in range(TURNS):
        x = leaf(device, 4, 3, seed=turn)
        out = call(x, mean)
        out.sum().backward()
        found += seen(out, mean, x.grad)
    return found


def written_under_autograd(wrap: Wrap, device: str) -> list[Any]:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x[1:].mul_(y[1:])
        return x.sin().sum(0)

    call = wrap(function)
    found: list[Any] = []
    for turn in range(TURNS):
        x, y = leaf(device, 4, 3, seed=turn), leaf(device, 4, 3, seed=turn + 9)
        inner = x * 2
        out = call(inner, y)
        (out.sum() + inner.square().sum()).backward()
        found += seen(out, inner, x.grad, y.grad)
    return found


# --- outputs that share memory ---


def views_of_an_input(wrap: Wrap, device: str) -> list[Any]:
    call = wrap(lambda x: (x.t(), x.view(-1)[2:7], x, x.exp()))
    found: list[Any] = []
    for turn in range(TURNS):
        x = leaf(device, 3, 4, seed=turn)
        inner = x * 1
        turned, window, same, value = call(inner)
        (turned.sin().sum() + window.sum() + value.sum()).backward()
        found += seen(turned, window, value, x.grad, same is inner, turned._is_view(), window._is_view())
        with torch.no_grad():
            inner.zero_()
        found += seen(turned, window)
    return found


def views_of_one_result(wrap: Wrap, device: str) -> list[Any]:
    def function(x: torch.Tensor) -> Any:
        y = x.exp()
        return y[0], y[1:], y, y.t()

    call = wrap(function)
    found: list[Any] = []
    for turn in range(TURNS):
        x = leaf(device, 3, 4, seed=turn)
        first, rest, whole, turned = call(x)
        (first.sum() + rest.square().sum() + turned.sin().sum()).backward()
        found += seen(first, rest, whole, turned, x.grad)
        with torch.no_grad():
            first.zero_()
        found += seen(whole, turned)
    return found


def one_result_twice(wrap: Wrap, device: str) -> list[Any]:
    def function(x: torch.Tensor) -> Any:
        y = x.tanh()
        return y, [y, y * 2], y

    call = wrap(function)
    found: list[Any] = []
    for turn in range(TURNS):
        x = leaf(device, 5, seed=turn)
        first, (second, double), third = call(x)
        (first.sum() + second.square().sum() + third.sin().sum() + double.sum()).backward()
        found += seen(first, double, x.grad, first is second, first is third)
    return found


def results_are_changed_in_place(wrap: Wrap, device: str) -> list[Any]:
    def function(x: torch.Tensor) -> Any:
        y = x * 3
        return y, x.t() * 2

    call = wrap(function)
    found: list[Any] = []
    for turn in range(TURNS):
        x = leaf(device, 3, 4, seed=turn)
        first, second = call(x)
        second.add_(1)
        first[0].mul_(second[:, 0])
        (first.square().sum() + second.sin().sum()).backward()
        found += seen(first, second, x.grad)
    return found


def in_place_on_views_inside(wrap: Wrap, device: str) -> list[Any]:
    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        y = x * 1
        y[0].mul_(w[1])
        y.t()[1:].add_(x.t()[1:].sin())
        y.view(-1)[5:9].mul_(w.view(-1)[5:9])
        y.select(1, 2).copy_(w[:, 0])
        z = torch.zeros_like(y)
        z[1:] = y[:-1] * w[1:]
        z.diagonal().mul_(2)
        return y, z

    call = wrap(function)
    found: list[Any] = []
    for turn in range(TURNS):
        x, w = leaf(device, 3, 4, seed=turn), leaf(device, 3, 4, seed=turn + 9)
        y, z = call(x, w)
        (y.square().sum() + z.sum()).backward()
        found += seen(y, z, x.grad, w.grad)
    return found


# --- several backward calls ---


def several_backwards(wrap: Wrap, device: str) -> list[Any]:
    call = wrap(lambda x, w: (torch.tanh(x @ w), (x * w).sum(0)))
    found: list[Any] = []
    for turn in range(TURNS):
        x, w = leaf(device, 3, 3, seed=turn), leaf(device, 3, 3, seed=turn + 9)
        first, second = call(x, w)
        first.sum().backward(retain_graph=True)
        found += seen(x.grad)
        second.sum().backward(retain_graph=True)
        (first.square().sum() + second.sum()).backward(retain_graph=True)
        found += seen(x.grad, w.grad)
        first.backward(torch.ones_like(first) * 2)
        found += seen(x.grad, w.grad)
        try:
            first.sum().backward()
        except RuntimeError as error:
            found.append("second time" in str(error))
    return found


class _Attributes(Function):
    """Its backward reads what its forward left in attributes, which no backward frees."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.sign = x.sign()
        return x.abs()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient * ctx.sign


def _set_row(x: torch.Tensor) -> torch.Tensor:
    y = x + 0
    y[0] = 1
    return y


def backwards_that_free_nothing(wrap: Wrap, device: str) -> list[Any]:
    """Eager frees what nodes saved, and nodes that saved nothing run any number of times."""
    functions: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
        lambda x, w: (x.sum(), x),
        lambda x, w: (torch.cat([x, w])[:3] + x.mean() - w.t(),),
        lambda x, w: (x * 2, x + w),
        lambda x, w: (x * w, w + 1),
        lambda x, w: (x.exp(), w.cos()),
        lambda x, w: (x.exp(), w.cos(), (x + w).t()),
        lambda x, w: (x.exp().t(), w.sum(), x.tanh() * w),
        lambda x, w: (_set_row(x), x[0], w.sum()),
        lambda x, w: (_Attributes.apply(x), w.exp()),
        lambda x, w: (x, w.add_(x.detach().sum()), x.sum(0)),
    ]
    found: list[Any] = []
    for function in functions:

        def made(x: torch.Tensor, w: torch.Tensor, function: Any = function) -> Any:
            return function(x, w + 0)

        call = wrap(made)
        for turn in range(TURNS + 3):
            x, w = leaf(device, 3, 3, seed=turn), leaf(device, 3, 3, seed=turn + 9)
            results = [result for result in call(x, w) if result is not x]
            for number in (0, 0, *range(len(results)), *range(len(results))):
                keep = turn % 3 == 1 and number == 0
                try:
                    results[number].sum().backward(retain_graph=keep)
                except RuntimeError as error:
                    found.append("second time" in str(error))
                found += seen(x.grad, w.grad)
            try:
                sum(result.sum() for result in results).backward()
            except RuntimeError as error:
                found.append("second time" in str(error))
    return found


def backwards_by_what_changed(wrap: Wrap, device: str) -> list[Any]:
    """Of results that free nothing for each other, one notices that what it saved has been written to."""
    call = wrap(lambda x, w: (x.exp(), w.square(), x.sum() + w.sum()))
    found: list[Any] = []
    for _ in range(TURNS):
        x, w = leaf(device, 3), leaf(device, 3, seed=9)
        first, second, total = call(x, w)
        total.backward()
        with torch.no_grad():
            first.add_(1)
        try:
            first.sum().backward()
        except RuntimeError as error:
            found.append("inplace" in str(error))
        found += seen(x.grad, w.grad, second)
    return found


def gradients_of_gradients_again(wrap: Wrap, device: str) -> list[Any]:
    call = wrap(lambda x, w: (x.sum(), (x * x * x).sum(), w.exp()))
    found: list[Any] = []
    for _ in range(TURNS):
        x, w = leaf(device, 3), leaf(device, 3, seed=9)
        for result in call(x, w)[1:]:
            by = x if result.dim() == 0 else w
            (first,) = torch.autograd.grad(result.sum(), by, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), by, create_graph=True)
            second.sum().backward()
            found += seen(first, second, by.grad)
            try:
                second.sum().backward()
            except RuntimeError as error:
                found.append("second time" in str(error))
    return found


def two_calls_one_backward(wrap: Wrap, device: str) -> list[Any]:
    call = wrap(lambda x, w: torch.tanh(x @ w))
    found: list[Any] = []
    w = leaf(device, 3, 3, seed=50)
    for turn in range(TURNS):
        x = leaf(device, 2, 3, seed=turn)
        out = call(call(x, w), w) + call(x * 2, w)
        out.sum().backward()
        found += seen(out, x.grad, w.grad)  # w's gradient accumulates
    return found


# --- hooks ---


def tensor_hooks(wrap: Wrap, device: str) -> list[Any]:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.register_hook(lambda g: g * 5)
        return y.sin()

    call = wrap(function)
    found: list[Any] = []
    for turn in range(TURNS):
        x = leaf(device, 4, seed=turn)
        inner = x * 1
        calls: list[str] = []
        x.register_hook(lambda g, calls=calls: calls.append("leaf"))
        inner.register_hook(lambda g, calls=calls: calls.append("inner") or g + 1)
        out = call(inner)
        out.register_hook(lambda g, calls=calls: calls.append("result") or g * 3)
        inner.retain_grad()
        out.retain_grad()
        out.sum().backward()
        found += seen(out, inner.grad, out.grad, x.grad, tuple(calls))
    return found


def parameter_hooks(wrap: Wrap, device: str) -> list[Any]:
    module = _module(device)
    found: list[Any] = []
    module[0].weight.register_hook(lambda g: g * 2)
    module[2].bias.register_post_accumulate_grad_hook(lambda p: found.extend(seen(p.grad)))
    call = wrap(module, module)
    for turn in range(TURNS):
        x = leaf(device, 2, 3, seed=turn)
        call(x).square().sum().backward()
        found += seen(x.grad, *(p.grad for p in module.parameters()))
        module.zero_grad()
    return found


def module_hooks(wrap: Wrap, device: str) -> list[Any]:
    module = _module(device)
    module[0].register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    module[0].register_forward_hook(lambda m, args, out: out * 2)
    module[1].register_full_backward_hook(lambda m, into, out: (into[0] * 3,))
    module[2].register_full_backward_pre_hook(lambda m, out: (out[0].cos(),))
    call = wrap(module, module)
    found: list[Any] = []
    for turn in range(TURNS):
        x = leaf(device, 2, 3, seed=turn)
        out = call(x)
        out.square().sum().backward()
        found += seen(out, x.grad, *(p.grad for p in module.parameters()))
    return found


def _module(device: str) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)


# --- autograd.Function ---


class Scaled(Function):
    """With setup_context, a number among the arguments, and gradients that are asked for or not."""

    @staticmethod
    def forward(x: torch.Tensor, scale: float, w: torch.Tensor) -> torch.Tensor:
        return x * scale * w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.scale, w = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        by_w = gradient * x * ctx.scale if ctx.needs_input_grad[2] else None
        return gradient * ctx.scale * w * 2, None, by_w


class Doubled(Function):
    """Writes its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2.5


class Parted(Function):
    """Several results, one without gradient; missing gradients stay missing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        order = x.argsort()
        ctx.mark_non_differentiable(order)
        result = x.exp()
        ctx.save_for_backward(result)
        return result, x * 2, order

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any, third: Any) -> Any:
        (result,) = ctx.saved_tensors
        total = torch.zeros_like(result)
        if first is not None:
            total = total + first * result
        if second is not None:
            total = total + second * 7
        return total


def own_functions(wrap: Wrap, device: str) -> list[Any]:
    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        y = Scaled.apply(x, 1.5, w)
        z = Doubled.apply(y * 1)
        first, second, order = Parted.apply(z)
        return first.sin(), second, order

    call = wrap(function)
    found: list[Any] = []
    for turn in range(TURNS):
        x, w = leaf(device, 4, seed=turn), leaf(device, 4, seed=turn + 9)
        w.requires_grad_(turn != 1)
        first, second, order = call(x, w)
        (first.sum() if turn else first.sum() + second.sum()).backward()
        found += seen(first, second, order, x.grad, w.grad)
    return found


def own_function_writes_an_argument(wrap: Wrap, device: str) -> list[Any]:
    call = wrap(lambda x: Doubled.apply(x).sin())
    found: list[Any] = []
    for turn in range(TURNS):
        x = leaf(device, 4, seed=turn)
        inner = x * 3
        out = call(inner)
        (out.sum() + inner.sum()).backward()
        found += seen(out, inner, x.grad)
    return found


def once_differentiable_twice(wrap: Wrap, device: str) -> list[Any]:
    call = wrap(lambda x: Doubled.apply(x * 1).sin())
    found: list[Any] = []
    for turn in range(TURNS):
        x = leaf(device, 4, seed=turn)
        (g,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        found += seen(g)
        try:
            found += seen(*torch.autograd.grad(g.sum(), x))
        except RuntimeError as error:
            found.append("once_differentiable" in str(error))
    return found


# --- regions, modes ---


def checkpoints(wrap: Wrap, device: str, reentrant: bool = False) -> list[Any]:
    def region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.tanh(x @ w), 0.5)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = checkpoint(region, x, w, use_reentrant=reentrant)
        return checkpoint(region, y, w, use_reentrant=reentrant) * 2

    call = wrap(function)
    found: list[Any] = []
    for turn in range(TURNS):
        torch.manual_seed(turn)
        x, w = leaf(device, 4, 4, seed=turn), leaf(device, 4, 4, seed=turn + 9)
        out = call(x, w)
        out.square().sum().backward()
        found += seen(out, x.grad, w.grad)
    return found


def reentrant_checkpoints(wrap: Wrap, device: str) -> list[Any]:
    return checkpoints(wrap, device, reentrant=True)


def autocast_inside(wrap: Wrap, device: str) -> list[Any]:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return torch.relu(x @ w).float() @ w

    call = wrap(function)
    found: list[Any] = []
    for turn in range(TURNS):
        x, w = leaf(device, 4, 4, seed=turn), leaf(device, 4, 4, seed=turn + 9)
        out = call(x, w)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=turn == 1):
            out.float().sum().backward()
        found += seen(out, x.grad, w.grad, out.dtype, x.grad.dtype)
    return found


def autocast_around(wrap: Wrap, device: str) -> list[Any]:
    call = wrap(lambda x, w: torch.relu(x @ w) @ w)
    found: list[Any] = []
    for turn in range(TURNS + 1):
        x, w = leaf(device, 4, 4, seed=turn), leaf(device, 4, 4, seed=turn + 9)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=turn % 2 == 0):
            out = call(x, w)
        out.float().sum().backward()
        found += seen(out, x.grad, w.grad, out.dtype)
    return found


def saved_tensor_hooks(wrap: Wrap, device: str) -> list[Any]:
    call = wrap(lambda x, w: torch.tanh(x @ w).exp())
    found: list[Any] = []
    for turn in range(TURNS):
        x, w = leaf(device, 4, 4, seed=turn), leaf(device, 4, 4, seed=turn + 9)
        packed: list[int] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t, packed=packed: packed.append(1) or t.detach().clone(), lambda t: t
        )
        with hooks:
            out = call(x, w)
        out.sum().backward()
        found += seen(out, x.grad, w.grad, bool(packed))
    return found


def anomalies(wrap: Wrap, device: str) -> list[Any]:
    call = wrap(lambda x: torch.sqrt(x * 0) * x)
    found: list[Any] = []
    for turn in range(TURNS):
        x = leaf(device, 3, seed=turn)
        with torch.autograd.detect_anomaly(check_nan=turn != 1):
            out = call(x)
            try:
                out.sum().backward()
                found += seen(out, x.grad)
            except RuntimeError as error:
                found.append("returned nan values" in str(error))
    return found


def grad_modes(wrap: Wrap, device: str) -> list[Any]:
    call = wrap(lambda x, w: torch.tanh(x @ w) * x)
    found: list[Any] = []
    for turn in range(2 * TURNS):
        x, w = leaf(device, 3, 3, seed=turn), leaf(device, 3, 3, seed=turn + 9)
        if turn % 3 == 0:
            out = call(x, w)
            out.sum().backward()
            found += seen(out, x.grad, w.grad)
        elif turn % 3 == 1:
            with torch.no_grad():
                out = call(x, w)
            found += seen(out, out.requires_grad)
        else:
            out = call(x.detach(), w)
            out.sum().backward()
            found += seen(out, w.grad)
    return found


PROGRAMS: list[Program] = [
    integer_inputs, none_gradients, outputs_without_gradient, some_outputs_are_dropped, written_buffer,
    written_under_autograd, views_of_an_input, views_of_one_result, one_result_twice, results_are_changed_in_place,
    in_place_on_views_inside, several_backwards, backwards_that_free_nothing, backwards_by_what_changed,
    gradients_of_gradients_again, two_calls_one_backward, tensor_hooks, parameter_hooks, module_hooks,
    own_functions, own_function_writes_an_argument, once_differentiable_twice, autocast_inside, autocast_around,
    saved_tensor_hooks, anomalies, grad_modes,
]  # fmt: skip
"""Programs without random numbers."""

RANDOM_PROGRAMS: list[Program] = [checkpoints, reentrant_checkpoints]

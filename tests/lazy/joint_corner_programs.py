"""More programs around one function that is differentiated (`joint_programs.py` says how they are called): code that
may run once in a backward, state that a backward writes, gradients of many tangents, views with rules of their own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd import forward_ad as forward
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.lazy.joint_programs import Program, Wrap, leaf, seen

TURNS = 5


def _turned(call: Callable[..., Any], device: str, shapes: tuple[tuple[int, ...], ...], state: Any = ()) -> list[Any]:
    """Calls with new leaves of these shapes; the results, the leaves' gradients and the state, of each turn."""
    found: list[Any] = []
    for turn in range(TURNS):
        leaves = [leaf(device, *shape, seed=10 * turn + i) for i, shape in enumerate(shapes)]
        out = call(*leaves)
        results = out if isinstance(out, tuple) else (out,)
        sum((i + 1) * r.square().sum() for i, r in enumerate(results) if r.requires_grad).backward()
        found += seen(*results, *(x.grad for x in leaves), *(r.requires_grad for r in results))
        found += seen(*(x if isinstance(x, torch.Tensor) else x() for x in state))
    return found


def _region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w) * x


# --- checkpoints ---


def _checkpointed(**settings: Any) -> Program:
    def program(wrap: Wrap, device: str) -> list[Any]:
        def function(x: torch.Tensor, w: torch.Tensor) -> Any:
            return checkpoint(_region, checkpoint(_region, x, w, **settings), w, **settings)

        return _turned(wrap(function), device, ((4, 4), (4, 4)))

    return program


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = op is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoints_by_a_policy(wrap: Wrap, device: str) -> list[Any]:
    contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
    return _checkpointed(use_reentrant=False, context_fn=contexts)(wrap, device)


@contextlib.contextmanager
def _once() -> Iterator[None]:
    yield


def checkpoints_whose_context_is_a_generator(wrap: Wrap, device: str) -> list[Any]:
    return _checkpointed(use_reentrant=False, context_fn=lambda: (_once(), _once()))(wrap, device)


def checkpoints_in_checkpoints(wrap: Wrap, device: str) -> list[Any]:
    def inner(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return checkpoint(_region, x, w, use_reentrant=False).sin()  # type: ignore[no-any-return]

    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        return checkpoint(inner, x, w, use_reentrant=False) + checkpoint(inner, x * 2, w, use_reentrant=False)

    return _turned(wrap(function), device, ((4, 4), (4, 4)))


def checkpointed_statistics(wrap: Wrap, device: str) -> list[Any]:
    """What the second computation writes: running statistics move twice a step."""
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(device)
    call = wrap(lambda x: checkpoint(net, x, use_reentrant=False), net)
    return _turned(call, device, ((5, 3),), state=tuple(net.buffers()))


# --- functions ---


class Mirrored(Function):
    """The same elements, the gradient turned around."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


class Given(Function):
    """Gives the very tensor that it was given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


class KeepsAGraph(Function):
    """Its backward uses a graph up that its forward made."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = (ctx.x * ctx.x).sin()
        return ctx.y.detach()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(ctx.y, ctx.x, gradient)[0]


class RunsBackward(Function):
    """Its backward runs another one, which adds to the parameters' gradients itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.module(x)
        torch.autograd.backward(y, gradient)
        return x.grad, None


def views_that_functions_give(wrap: Wrap, device: str) -> list[Any]:
    def of_an_input(x: torch.Tensor) -> Any:
        return Mirrored.apply(x), Given.apply(x), x.t()

    def of_a_result(x: torch.Tensor) -> Any:
        y = x * 2
        return y, Mirrored.apply(y)

    return _turned(wrap(of_an_input), device, ((2, 3),)) + _turned(wrap(of_a_result), device, ((2, 3),))


def views_with_hooks(wrap: Wrap, device: str) -> list[Any]:
    def of_an_input(x: torch.Tensor) -> Any:
        view = x.view(-1)
        view.register_hook(lambda g: g * 5)
        return view

    def of_a_result(x: torch.Tensor) -> Any:
        y = x * 2
        view = y.view(-1)
        view.register_hook(lambda g: g * 5)
        return y, view

    return _turned(wrap(of_an_input), device, ((2, 3),)) + _turned(wrap(of_a_result), device, ((2, 3),))


def functions_that_use_up_a_graph(wrap: Wrap, device: str) -> list[Any]:
    return _turned(wrap(lambda x: KeepsAGraph.apply(x) * 2), device, ((4,),))


def functions_that_run_backward(wrap: Wrap, device: str) -> list[Any]:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)
    grads = tuple(lambda p=p: p.grad for p in net.parameters())
    return _turned(wrap(lambda x: RunsBackward.apply(x, net), net), device, ((4, 3),), state=grads)


# --- gradients ---


def kept_gradients(wrap: Wrap, device: str) -> list[Any]:
    """`retain_grad` inside, of a result and of what a module's hook keeps."""

    def function(x: torch.Tensor) -> Any:
        y = x * 2
        y.retain_grad()
        return y, y.exp()

    call = wrap(function)
    found: list[Any] = []
    for turn in range(TURNS):
        x = leaf(device, 3, seed=turn)
        y, z = call(x)
        z.sum().backward()
        found += seen(y.grad, x.grad, y.retains_grad)
    return found


def many_tangents(wrap: Wrap, device: str) -> list[Any]:
    call = wrap(lambda x: (x.exp(), x * x.sum()))
    found: list[Any] = []
    for turn in range(TURNS):
        x = leaf(device, 3, seed=turn)
        a, b = call(x)
        each = torch.eye(3).to(device)
        found += seen(*torch.autograd.grad([a, b], x, [each, each], retain_graph=True, is_grads_batched=True))
        one = lambda v, a=a, b=b, x=x: torch.autograd.grad([a, b], x, [v, v * 2], retain_graph=True)[0]  # noqa: E731
        found += seen(torch.func.vmap(one)(each))
        found += seen(torch.func.vmap(torch.func.vmap(one))(torch.stack([each, each * 2])))
    return found


def forward_mode(wrap: Wrap, device: str) -> list[Any]:
    call = wrap(lambda x: x.sin() * x)
    found: list[Any] = []
    for turn in range(TURNS):
        x, v = leaf(device, 3, seed=turn).detach(), leaf(device, 3, seed=turn + 9).detach()
        found += seen(call(x))
        with forward.dual_level():
            value, tangent = forward.unpack_dual(call(forward.make_dual(x, v)))
            found += seen(value, tangent)
    return found


PROGRAMS: list[Program] = [
    checkpoints_by_a_policy, checkpoints_whose_context_is_a_generator, checkpoints_in_checkpoints,
    checkpointed_statistics, views_that_functions_give, views_with_hooks, functions_that_use_up_a_graph,
    functions_that_run_backward, kept_gradients, many_tangents, forward_mode,
]  # fmt: skip

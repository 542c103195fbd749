"""Gradients of gradients of gradients: every order through joints, the bridge and compiled calls, as in eager."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torchlazy
from torch.nn import functional as F
from torchlazy.lazy.dynamo.backend import GraphCall, torchlazy_backend

from tests.lazy.joint_path import JointCall

Function = Callable[..., torch.Tensor]


pytestmark = pytest.mark.usefixtures("device_in_python", "fresh_capture")


def mlp(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.tanh(x @ w) @ v)


def layer_norm(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x @ w, (4,), v[0], v[1]).sin()


def attention(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k = (x @ w).view(3, 2, 2).transpose(0, 1), (x @ v).view(3, 2, 2).transpose(0, 1)
    out = torch.softmax(q @ k.transpose(1, 2) / 2**0.5, -1) @ k
    return x + out.transpose(0, 1).reshape(3, 4)


BLOCKS = [mlp, layer_norm, attention]


def arguments(device: str) -> list[torch.Tensor]:
    made = [torch.randn(n, 4, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (3, 4, 4)]
    return [t.to(device).requires_grad_() for t in made]


def derivatives(function: Function, args: list[torch.Tensor], orders: int) -> list[torch.Tensor]:
    """The gradients by all arguments, those of a sum of their squares, and so on; `orders` times."""
    found: list[torch.Tensor] = []
    out: Any = [function(*args)]
    for order in range(orders):
        loss = sum((t * t).sum() for t in out)
        out = torch.autograd.grad(loss, args, create_graph=order + 1 < orders)
        found += [t.detach().cpu() for t in out]
    return found


def assert_derivatives(function: Function, want: list[torch.Tensor], orders: int, device: str) -> None:
    got = derivatives(function, arguments(device), orders)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda f: f.__name__)
def test_a_joint_of_three_orders(block: Function, tier: str) -> None:
    want = derivatives(block, arguments("cpu"), 3)
    call = JointCall(block, orders=3)
    for _ in range(2):
        assert_derivatives(call, want, 3, "lazy")
    assert call.recorded is not None and call.recorded.joint.double is not None
    inner = call.recorded.joint.double.joint
    assert inner.double is not None and inner.double.joint.double is None


def test_a_joint_of_five_orders() -> None:
    def function(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.sin(x * w[:3]) * v[:3]

    want = derivatives(function, arguments("cpu"), 5)
    assert_derivatives(JointCall(function, orders=5), want, 5, "lazy")
    with pytest.raises(RuntimeError, match="gradients of order 2"):
        derivatives(JointCall(function, orders=2), arguments("lazy"), 3)


def test_orders_end_where_nothing_is_left_to_differentiate() -> None:
    call = JointCall(lambda x, w, v: (x * 2) + w[:3], orders=4)
    (found,) = torch.autograd.grad(call(*(args := arguments("lazy"))).sum(), args[:1], create_graph=True)
    torch.testing.assert_close(found.detach().cpu(), torch.full((3, 4), 2.0, dtype=torch.float64))
    assert not found.requires_grad


def test_gradgradcheck_of_a_gradient() -> None:
    call = JointCall(lambda x, w: torch.tanh(x @ w) * x, orders=3)
    x, w = (torch.randn(2, 2, dtype=torch.float64).to("lazy").requires_grad_() for _ in range(2))

    def gradient(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.autograd.grad(call(x, w).square().sum(), x, create_graph=True)[0]
        return found

    assert torch.autograd.gradcheck(gradient, (x, w))
    assert torch.autograd.gradgradcheck(gradient, (x, w))


@pytest.mark.parametrize("block", BLOCKS, ids=lambda f: f.__name__)
def test_the_bridge_records_the_orders_that_are_asked_for(block: Function, tier: str) -> None:
    graph = torch.fx.symbolic_trace(block)
    call = torchlazy_backend(graph, [])
    assert isinstance(call, GraphCall)
    for orders in (1, 3, 3, 2, 1):
        assert_derivatives(call, derivatives(block, arguments("cpu"), orders), orders, "cpu")
    assert call.orders == 3 and not call.why_eager
    (recorded,) = call.kinds.values()
    assert recorded.joint.double is not None and recorded.joint.double.joint.double is not None


def test_the_bridge_under_torchs_capture() -> None:
    program = torch.compile(mlp, backend="torchlazy", fullgraph=True)
    want = derivatives(mlp, arguments("cpu"), 3)
    for _ in range(3):
        assert_derivatives(program, want, 3, "cpu")


def test_the_bridge_keeps_autocast_where_it_computes_again() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ w).float()

    def second(function: Function) -> list[torch.Tensor]:
        x, w = (torch.linspace(-1, 1, 16).view(4, 4).requires_grad_() for _ in range(2))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = function(x, w)
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return list(torch.autograd.grad(g.square().sum(), (x, w)))

    call = torchlazy_backend(torch.fx.symbolic_trace(function), [])
    for _ in range(2):
        for a, b in zip(second(call), second(function), strict=True):
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * y).sin() * y


def of_dependent(function: Function, device: str, orders: int) -> torch.Tensor:
    x = torch.linspace(0, 1, 5).to(device).requires_grad_()
    found = function(x, x * 2).sum()
    for order in range(orders):
        found = torch.autograd.grad(found.square().sum(), x, create_graph=order + 1 < orders)[0]
    return found.detach().cpu()


@pytest.mark.parametrize("orders", [1, 2, 3])
def test_an_input_that_is_computed_from_another(orders: int) -> None:
    want = of_dependent(product, "cpu", orders)
    bridge = torch.compile(product, backend="torchlazy")
    for function, device in (
        (torchlazy.compile(product), "lazy"), (torchlazy.compile(product), "cpu"),
        (JointCall(product, orders=orders), "lazy"), (bridge, "cpu"),
    ):  # fmt: skip
        for _ in range(4):
            torch.testing.assert_close(of_dependent(function, device, orders), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_compiled_calls(device: str) -> None:
    program = torchlazy.compile(mlp)
    want = derivatives(mlp, arguments("cpu"), 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for _ in range(4):
            assert_derivatives(program, want, 4, device)


def test_hooks_of_saved_tensors_do_not_see_that_a_backward_is_recorded() -> None:
    call, counts = torchlazy.compile(lambda x: (x.exp() * x).sum()), []
    keep = lambda tensor: counts.append(counts.pop() + 1) or tensor  # noqa: E731
    for _ in range(8):
        x = torch.ones(3, device="lazy", requires_grad=True)
        counts.append(0)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = call(x)
        (first,) = torch.autograd.grad(out, x, create_graph=True)
        first.sum().backward()
    assert call.report().replays and max(counts) == 3  # as in eager; a replay saves what its backward reads

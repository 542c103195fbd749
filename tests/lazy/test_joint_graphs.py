"""A compiled module's forward and backward as CUDA graphs, in an ordinary loop; graphs are stood in for on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch import nn
from torch.nn import functional as F

from tests.lazy.cpu_graphs import GraphDevice, cpu_graphs


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> GraphDevice:
    monkeypatch.setattr(torchlazy.config, "tiers", "foreground")
    torchlazy.reset_metrics()
    return cpu_graphs(monkeypatch)


class Net(nn.Module):
    """A convolution with a batch norm, and a linear layer; `reads`: it looks at its input on the host first."""

    def __init__(self, reads: bool = False, p: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.drop, self.last = nn.Dropout(p), nn.Linear(8 * 36, 10)
        self.reads = reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reads and bool((x > 1e6).any()):
            raise ValueError("an input has exploded")
        return self.last(self.drop(F.gelu(self.norm(self.conv(x))).flatten(1)))  # type: ignore[no-any-return]


Loop = Callable[[nn.Module, Any, torch.optim.Optimizer, int], Any]


def plain(model: nn.Module, forward: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
    loss = F.cross_entropy(forward(images(model)), labels(model))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def images(model: nn.Module) -> torch.Tensor:
    return torch.randn(4, 3, 8, 8).to(next(model.parameters()).device)


def labels(model: nn.Module) -> torch.Tensor:
    return torch.randint(10, (4,)).to(next(model.parameters()).device)


def run(model: nn.Module, forward: Any, loop: Loop, steps: int) -> tuple[list[Any], dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return [loop(model, forward, optimizer, number) for number in range(steps)], model.state_dict()


def check(loop: Loop, reads: bool, steps: int = 24, on: str = "cpu", mode: str = "reduce-overhead") -> dict[str, Any]:
    """The loop trains as in eager; the metrics."""
    model = Net(reads).to(on)
    other = copy.deepcopy(model)
    wanted = run(model, model, loop, steps)
    torchlazy.reset_metrics()
    found = run(other, torchlazy.compile(other, mode=mode, audit=False), loop, steps)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    return torchlazy.metrics()


both = pytest.mark.parametrize("reads", [False, True], ids=["native", "python"])


@both
def test_each_half_is_replayed(device: GraphDevice, reads: bool) -> None:
    metrics = check(plain, reads)
    assert metrics["graph_replays"] >= 2 * 15 and device.captures == 2 + reads
    assert not any("no CUDA graph" in reason for reason in metrics["fallbacks"])


def two_forwards(model: nn.Module, forward: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
    first, second = forward(images(model)), forward(images(model))
    loss = F.cross_entropy(first, labels(model)) + F.cross_entropy(second, labels(model))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def backward_twice(model: nn.Module, forward: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
    loss = F.cross_entropy(forward(images(model)), labels(model))
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def never_backward(model: nn.Module, forward: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
    kept = forward(images(model)) if number % 3 == 0 else None
    return plain(model, forward, optimizer, number), None if kept is None else kept.sum().item()


def accumulates(model: nn.Module, forward: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
    loss = F.cross_entropy(forward(images(model)), labels(model))
    loss.backward()
    kept = {name: p.grad for name, p in model.named_parameters()}
    before = {name: grad.clone() for name, grad in kept.items() if grad is not None}
    if number % 3 == 2:
        optimizer.step()
        optimizer.zero_grad()
    forward(images(model)).sum().backward()
    return loss.item(), {name: float(value.sum()) for name, value in before.items()}


def moves_state(model: nn.Module, forward: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
    if number in (10, 16):
        for p in model.parameters():
            p.data = p.data.clone()
    return plain(model, forward, optimizer, number)


def evaluates(model: nn.Module, forward: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
    found = plain(model, forward, optimizer, number)
    model.eval()
    loss = forward(images(model)).square().mean()
    loss.backward()
    with torch.no_grad():
        value = forward(images(model)).sum().item()
    model.train()
    return found, loss.item(), value


def frozen_norms(model: nn.Module, forward: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
    model.norm.eval()  # type: ignore[union-attr]
    if number == 15:
        model.norm.running_var = model.norm.running_var + 0.5  # type: ignore[union-attr,operator]
    return plain(model, forward, optimizer, number)


def under_hooks(model: nn.Module, forward: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.clone(), lambda t: t * 1.0 if t.is_floating_point() else t
    ):
        return plain(model, forward, optimizer, number)


def without_a_tangent(model: nn.Module, forward: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
    out = forward(images(model))
    out.retain_grad()
    grads = torch.autograd.grad(out[:, :5].sum(), list(model.parameters()), is_grads_batched=False)
    return [float(g.sum()) for g in grads]


def batched(model: nn.Module, forward: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
    out = forward(images(model))
    if number % 4:
        out.sum().backward()
        return float(out.detach().sum())
    tangents = torch.ones(3, 4, 10, device=out.device)
    grads = torch.autograd.grad(out, list(model.parameters()), tangents, is_grads_batched=True)
    return [float(g.sum()) for g in grads]


LOOPS = (
    two_forwards, backward_twice, never_backward, accumulates, moves_state, evaluates, frozen_norms, under_hooks,
    without_a_tangent, batched,
)  # fmt: skip


@both
@pytest.mark.parametrize("loop", LOOPS)
def test_loops(device: GraphDevice, loop: Loop, reads: bool) -> None:
    metrics = check(loop, reads)
    assert device.captures >= 2
    if loop is not under_hooks:
        assert metrics["graph_replays"] >= 5


@both
def test_masks_of_both_halves_agree_and_differ_between_calls(device: GraphDevice, reads: bool) -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(512))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if reads and bool((x > 1e6).any()):
                raise ValueError
            return F.dropout(x * self.scale, 0.5)

    model = Drops()
    forward = torchlazy.compile(model, mode="reduce-overhead", audit=False)
    seen = []
    for _ in range(12):
        out = forward(torch.ones(512))
        out.sum().backward()
        assert torch.equal(model.scale.grad, out.detach())  # 0 or 2 in both
        seen.append(out.detach())
        model.scale.grad = None
    assert torchlazy.metrics()["graph_replays"] >= 10
    assert all(not torch.equal(one, other) for n, one in enumerate(seen) for other in seen[:n])


@both
def test_a_result_that_is_changed_before_the_backward_is_noticed(device: GraphDevice, reads: bool) -> None:
    class Exp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if reads and bool((x > 1e6).any()):
                raise ValueError
            return (x * self.scale).exp()

    model = Exp()
    forward = torchlazy.compile(model, mode="reduce-overhead", audit=False)
    for _ in range(10):
        forward(torch.randn(8)).sum().backward()
    replays = torchlazy.metrics()["graph_replays"]
    assert replays >= 8
    out = forward(torch.randn(8))
    with torch.no_grad():
        out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    assert torchlazy.metrics()["graph_replays"] == replays + 1 + reads  # the look at the input is a graph, too
    x = torch.randn(8)
    model.scale.grad = None
    forward(x).sum().backward()
    torch.testing.assert_close(model.scale.grad, x * (x * model.scale).exp().detach())


def test_a_capture_that_is_refused_once_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of gradients was not there yet when both halves ran first."""
    monkeypatch.setattr(torchlazy.config, "tiers", "foreground")
    device = cpu_graphs(monkeypatch, refusals=1)
    metrics = check(plain, False)
    assert device.beside == 1 and metrics["graph_replays"] >= 30
    assert not [reason for reason in metrics["fallbacks"] if "no CUDA graph" in reason]


def test_empty_results_are_no_inputs(device: GraphDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """All empty tensors lie at address 0."""
    monkeypatch.setattr(torchlazy.config, "tiers", "foreground")
    model = nn.Linear(3, 3)
    run = torchlazy.compile(lambda x, none, other: (model(x), none * 2, other + 1), mode="reduce-overhead", audit=False)
    for _ in range(12):
        y, none, other = run(torch.ones(2, 3), torch.ones(5, 0), torch.ones(0, 4, 2))
        assert (tuple(none.shape), tuple(other.shape)) == ((5, 0), (0, 4, 2))
        y.sum().backward()
    assert torchlazy.metrics()["graph_replays"]


def test_a_setting_makes_graphs_in_the_default_mode(device: GraphDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(plain, False, mode="default")["graph_replays"] == 0
    monkeypatch.setattr(torchlazy.config, "cuda_graphs", "on")
    assert check(plain, False, mode="default")["graph_replays"] >= 20


def test_graphs_can_be_switched_off(device: GraphDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchlazy.config, "cuda_graphs", "off")
    assert check(plain, False)["graph_replays"] == 0 and not device.captures


def test_graphs_that_are_switched_off_later_do_not_keep_replays_in_python(
    device: GraphDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net()
    forward: Any = torchlazy.compile(model, mode="reduce-overhead", audit=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    plain(model, forward, optimizer, 0)
    monkeypatch.setattr(torchlazy.config, "cuda_graphs", "off")
    for number in range(20):
        plain(model, forward, optimizer, number)
    assert "were done in C++" in str(forward.report()) and not device.captures


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@both
@pytest.mark.parametrize("loop", (plain, *LOOPS))
def test_loops_on_a_gpu(loop: Loop, reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchlazy.config, "tiers", "foreground")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    metrics = check(loop, reads, on="cuda")
    assert not [reason for reason in metrics["fallbacks"] if "no CUDA graph" in reason]
    if loop is not under_hooks:
        assert metrics["graph_replays"] >= 5

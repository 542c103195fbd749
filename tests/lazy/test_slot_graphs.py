"""Compiled calls whose state holds tensors that carry graphs: hidden states that are detached where they are next used.

Invariant: values and gradients are eager's; such calls are replayed where no gradient flows through an earlier graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("operator_by_operator")
Step = Callable[[Tensor], Tensor]


class Recurrent(nn.Module):
    """Keeps its hidden state, graph and all."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.RNNCell(3, 4), nn.Linear(4, 1)
        self.hidden: Any = None
        self.held: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.zeros(2, 4, device=x.device) if self.hidden is None else self.hidden.detach()
        self.hidden = self.cell(x, hidden)
        return self.out(self.hidden)


class Added(Recurrent):
    """The gradient of each call flows through the graphs of all before."""

    def forward(self, x: Tensor) -> Tensor:
        made = self.out.bias + self.cell.bias_ih
        self.hidden = made if self.hidden is None else self.hidden + made
        return self.hidden.sum() + (self.out(x.new_ones(2, 4)) * x.sum()).sum()


class Overwritten(Recurrent):
    """The state is set before it is read, as a model does that makes its cache anew."""

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = torch.zeros(2, 4, device=x.device)
        for _ in range(2):
            self.hidden = self.cell(x, self.hidden)
        return self.out(self.hidden)


class ReadInPlace(Recurrent):
    """What an earlier call left is written to."""

    def forward(self, x: Tensor) -> Tensor:
        if self.hidden is not None:
            with torch.no_grad():
                self.hidden.mul_(0.5)
            x = x + self.hidden.detach().mean()
        self.hidden = self.cell(x, torch.zeros(2, 4, device=x.device))
        return self.out(self.hidden)


def whole_step(model: Recurrent) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward(retain_graph=type(model) is Added)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _trained(kind: type[Recurrent], device: str, way: str) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    model = kind().to(device)
    if way == "step":
        run: Any = torchlazy.compile(whole_step(model), audit=False)
    else:
        run = torchlazy.compile(model.forward, audit=False) if way == "module" else model.forward
    eager = whole_step(model)
    found = []
    for i in range(10):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(i)).to(device)
        if way == "step" or way == "eager step":
            found.append((run if way == "step" else eager)(x).cpu())
        else:
            loss = run(x).square().mean()
            loss.backward(retain_graph=kind is Added)
            found += [p.grad.cpu().clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
        found.append(model.hidden.detach().cpu().clone())
        assert model.hidden.requires_grad
    return [*found, *[p.detach().cpu() for p in model.parameters()]], run


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("way", ["step", "module"])
@pytest.mark.parametrize("kind", [Recurrent, Overwritten, Added, ReadInPlace])
def test_values_are_eagers_and_graphs_of_earlier_calls_do_not_hinder_replays(
    kind: type[Recurrent], device: str, way: str
) -> None:
    found, run = _trained(kind, device, way)
    wanted, _ = _trained(kind, "cpu", "eager step" if way == "step" else "eager")
    torch.testing.assert_close(found, wanted)
    if kind is Added:
        assert not run.report().replays, run.report()
    elif kind is not ReadInPlace:
        assert run.report().replays >= 6, run.report()


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_a_backward_through_the_graph_of_an_argument(device: str) -> None:
    """It is another one at each call, and its leaves get their gradients."""

    def step(x: torch.Tensor) -> torch.Tensor:
        x.sum().backward(retain_graph=True)
        return x + 1

    run = torchlazy.compile(step, audit=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # it is refused
        for _ in range(5):
            leaf = torch.ones(3).to(device).requires_grad_()
            run(leaf * 2).sum().backward()
            assert leaf.grad is not None and leaf.grad.tolist() == [4.0] * 3

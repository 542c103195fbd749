"""Gradients that a step adds to in place, under CUDA graphs: where they stay, and where each cycle has new ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchlazy
from torchlazy.lazy.run.segments import watch

from tests.lazy.cpu_graphs import GraphDevice, cpu_graphs


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, compiled: None) -> GraphDevice:
    monkeypatch.setattr(watch, "LEAST_BYTES", 0)
    return cpu_graphs(monkeypatch)


def _trained(mode: str | None, reads: bool, rounds: int, set_to_none: bool, steps: int = 7) -> list[torch.Tensor]:
    """`rounds`: calls whose gradients are added up; 0: a call is the whole step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.GELU(), torch.nn.Linear(8, 2)).to("lazy")
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, foreach=True)

    def add(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        if reads:
            loss.item()
        loss.backward()
        return loss.detach()

    def whole(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = add(x)
        optimizer.step()
        return loss

    function: Any = add if rounds else whole
    call = function if mode is None else torchlazy.compile(function, mode=mode, audit=False)
    numbers = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        for _ in range(max(rounds, 1)):
            found.append(call(torch.randn(4, 3, generator=numbers).to("lazy")).cpu())
        if rounds:
            found += [p.grad.cpu() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    return found + [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("reads", [False, True], ids=["one graph", "two halves"])
@pytest.mark.parametrize(
    ("rounds", "set_to_none", "captures"),
    [(0, False, 1), (3, False, 1), (3, True, 3)],
    ids=["a step that clears them", "they stay", "new ones each cycle"],
)
def test_gradients_that_are_added_to(
    rounds: int, set_to_none: bool, captures: int, reads: bool, device: GraphDevice
) -> None:
    wanted = _trained(None, reads, rounds, set_to_none)
    torchlazy.reset_metrics()
    found = _trained("reduce-overhead", reads, rounds, set_to_none)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    metrics = torchlazy.metrics()
    assert not metrics["fallbacks"]
    assert device.captures == captures * (2 if reads else 1)  # first seen, gradients there, gradients that moved
    assert metrics["graph_replays"] >= 3

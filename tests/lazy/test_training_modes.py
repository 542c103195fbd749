"""Training steps under `mode="reduce-overhead"`, which on the CPU is as the default mode, with numbers that move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("compiled")
STEPS = 8

# How each program's number moves from step to step.
MOVES: dict[str, Callable[[int], float]] = {
    "learning rate": lambda i: 0.1 / (i + 1),
    "momentum": lambda i: 0.9 - 0.05 * i,
    "temperature": lambda i: 1 + 0.25 * i,
    "clipped norm": lambda i: 0.2 + 0.1 * i,
    "decay of an average": lambda i: 0.5 + 0.05 * i,
}


def _train(number: str, device: str, mode: str | None) -> tuple[list[torch.Tensor], Any, int]:
    """Losses, parameters and averages at the end, the callable, and how many programs its steps compiled."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
    average = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    group = optimizer.param_groups[0]

    def step(x: torch.Tensor, y: torch.Tensor, value: float) -> torch.Tensor:
        logits = model(x) / value if number == "temperature" else model(x)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        if number == "clipped norm":
            nn.utils.clip_grad_norm_(model.parameters(), value)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            decay = value if number == "decay of an average" else 0.9
            for mean, p in zip(average, model.parameters(), strict=True):
                mean.mul_(decay).add_(p, alpha=1 - decay)
        return loss.detach()

    run = step if mode is None else torchlazy.compile(step, mode=mode)
    inputs, labels = torch.randn(STEPS, 6, 4), torch.randint(0, 3, (STEPS, 6))
    found = []
    torchlazy.flush()
    before = torchlazy.metrics()["compiles"]
    for i in range(STEPS):
        value = MOVES[number](i)
        if number in ("learning rate", "momentum"):
            group["lr" if number == "learning rate" else "momentum"] = value
        found.append(run(inputs[i].to(device), labels[i].to(device), value).cpu())
    compiles = torchlazy.metrics()["compiles"] - before
    state = [*model.parameters(), *average]
    return [*found, *(p.detach().cpu() for p in state)], run, compiles


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("device", ["lazy", "cpu"])
@pytest.mark.parametrize("number", MOVES)
def test_moving_numbers(number: str, device: str, mode: str) -> None:
    wanted, _, _ = _train(number, "cpu", None)
    found, run, compiles = _train(number, device, mode)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    assert compiles <= 2 + (device == "lazy")  # there the first call, in Python, is a program, too
    report = run.report()
    if number == "clipped norm":  # clip_grad_norm_ turns its argument into a plain float: each norm is a capture
        return
    assert report.captures <= 3 and report.variants <= 2 and report.verified <= 1 and not report.alarm, str(report)
    # The first step makes the optimizer's state; a number of a setting is followed once it has moved.
    assert report.captures + report.replays + report.audits + report.verified == STEPS

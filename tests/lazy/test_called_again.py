"""`create_graph=True` asked for the first time of a replayed call: it runs once more, and gives what eager does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torchlazy

pytestmark = pytest.mark.usefixtures("compiled")


def tower(device: str) -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).to(device)


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_the_first_double_backward_of_a_replay(device: str) -> None:
    mine = tower(device)
    plain = copy.deepcopy(mine)
    run = torchlazy.compile(mine)
    for step in range(9):
        data = torch.randn(5, 3)
        found = []
        for model, call in ((mine, run), (plain, plain)):
            model.zero_grad()
            x = data.clone().to(device).requires_grad_()
            y = call(x)
            if step < 5:
                y.sum().backward()
            else:
                (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
                (g.square().sum() + y.mean()).backward()
            found.append([x.grad.cpu(), *(p.grad.cpu() for p in model.parameters())])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other)
    report = run.report()
    assert report.captures == 2 and report.replays >= 2 and "create_graph" in " ".join(report.reasons), report


def test_not_after_a_parameter_was_written_to() -> None:
    """Running the call again would give other gradients: that is an error, which says what to do."""
    model = tower("cpu")
    run = torchlazy.compile(model)
    for _ in range(5):
        run(torch.randn(5, 3).requires_grad_()).sum().backward()
    x = torch.randn(5, 3).requires_grad_()
    y = run(x)
    with torch.no_grad():
        model[2].bias.add_(1.0)
    with pytest.raises(RuntimeError, match="call it again"):
        torch.autograd.grad(y.sum(), x, create_graph=True)

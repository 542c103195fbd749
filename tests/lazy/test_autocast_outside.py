"""Programs know autocast's casts: autocast around a call, or around its backward, changes nothing in them, however they
are run."""

from __future__ import annotations

import copy

import pytest
import torch
import torchlazy
from torch import nn
from torchlazy.runtime.executor import Executable


class Attention(nn.Module):
    """Products of float32 beside those that autocast narrows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        q = self.first(x)
        with torch.autocast(x.device.type, enabled=False):
            found = torch.bmm(q.float(), x.transpose(1, 2)).softmax(-1) @ x.exp()
        return self.last(found), found


@pytest.fixture(params=["native", "python"])
def run_in(request, monkeypatch):
    """How programs run: in C++, or in Python, as those do that have a step that C++ cannot call."""
    if request.param == "python":
        monkeypatch.setattr(Executable, "native", None)
    return request.param


@pytest.fixture(autouse=True)
def compiled_at_once(monkeypatch):
    monkeypatch.setattr(torchlazy.config, "tiers", "off")


@pytest.mark.parametrize("around_backward", [False, True])
@pytest.mark.parametrize("door", ["module", "step", "inference", "backend", "bridge", "mode", "device"])
def test_products_of_float32(run_in, door, around_backward):
    torch.manual_seed(0)
    eager = Attention()
    ours = copy.deepcopy(eager).to("lazy" if door == "device" else "cpu")
    device = "lazy" if door == "device" else "cpu"
    forward = torchlazy.compile(ours) if door in ("module", "inference") else ours
    if door == "backend":
        forward = torchlazy.compile(ours, backend=lambda graph, inputs: graph.forward)
    elif door == "bridge":
        forward = torch.compile(ours, backend="torchlazy")

    def step(model, call, x):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            y, found = call(x)
            loss = y.float().square().mean() + found.sum()
            if around_backward and loss.requires_grad:
                float(loss)  # what is deferred runs here
                loss.backward()
                float(model.last.bias.grad.sum())
        if not around_backward and loss.requires_grad:
            loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        return [loss.detach(), y.detach(), found.detach(), *grads]

    run = torchlazy.compile(step) if door == "step" else step
    for number in range(7):
        x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(number))
        eager.zero_grad()
        ours.zero_grad()
        with torch.set_grad_enabled(door != "inference"):
            wanted = step(eager, eager, x)
            if door == "mode":
                with torchlazy.lazy_mode():
                    found = run(ours, forward, x)
            else:
                found = run(ours, forward, x.to(device))
        for a, b in zip(found, wanted, strict=True):
            assert a.dtype == b.dtype
            assert float((a.cpu().float() - b.float()).norm()) <= 3e-2 * float(b.float().norm())
    if door in ("module", "inference", "backend"):
        assert forward.report().replays

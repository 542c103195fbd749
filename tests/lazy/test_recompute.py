"""The recompute stage in the pipeline: less memory held for backward, the same values."""

from __future__ import annotations

import pytest
import torch
import torchlazy
from torch import nn
from torch.nn import functional as F
from torchlazy.lazy.api import driver, recorder
from torchlazy.lazy.trace.to_fx import backward_begins
from torchlazy.runtime.program.memory_plan import plan_report


def train(recompute: str) -> tuple[list[float], list[torch.Tensor], int]:
    """Losses, parameters and the largest program's planned peak, after four steps with dropout."""
    torchlazy.config.recompute = recompute
    driver.forget()
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 32))
        for _ in range(3)
    ]
    model = nn.Sequential(*blocks).to("lazy")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(64, 32).to("lazy")
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    programs = [known.compiled.program for known in driver.tiers._known.values() if known.compiled]
    peak = max(plan_report(program.steps).peak_bytes for program in programs)
    return losses, [p.detach().cpu() for p in model.parameters()], peak


@pytest.fixture(autouse=True)
def _compiled() -> None:
    torchlazy.config.tiers, torchlazy.config.strict = "off", True


def test_recomputing_changes_no_value_and_holds_less() -> None:
    kept = train("off")
    try:
        recomputed = train("on")
    finally:
        torchlazy.config.recompute = "on"
    torch.testing.assert_close(recomputed[0], kept[0], rtol=1e-6, atol=0)
    for a, b in zip(recomputed[1], kept[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert recomputed[2] < 0.9 * kept[2]


def test_the_backward_begins_at_the_seed_of_the_loss() -> None:
    traces = []
    original = recorder.driver
    recorder.driver = lambda trace, *rest: (traces.append(trace), original(trace, *rest))[1]
    try:
        w = torch.rand(4, 4).to("lazy").requires_grad_()
        x = torch.rand(2, 4).to("lazy")
        (x @ w).tanh().sum().backward()
        torchlazy.flush()
        (x * 2).tolist()
    finally:
        recorder.driver = original
    step, plain = traces
    start = backward_begins(step)
    assert start is not None and step.entries[start].op is torch.ops.aten.ones_like.default
    assert any("tanh_backward" in str(entry.op) for entry in step.entries[start:])
    assert backward_begins(plain) is None


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="recompute must be 'on' or 'off', not 'maybe'"):
        torchlazy.config.recompute = "maybe"

"""`config.memory_budget`: less is held for backward, the values stay, and every budget has a program of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchlazy
from torch import nn
from torch.nn import functional as F
from torchlazy.lazy.api import driver
from torchlazy.lazy.config import budget_of, parse_budget, recompute_text
from torchlazy.runtime.program.memory_plan import plan_report


@pytest.fixture(autouse=True)
def _compiled() -> Iterator[None]:
    torchlazy.config.tiers, torchlazy.config.strict = "off", True
    yield
    torchlazy.config.memory_budget = None


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (None, None), (0.5, 0.5), (1, 1.0), (0, 0.0), (4096, 4096), ("8GiB", 8 << 30), ("1.5 MiB", 3 << 19),
        ("0.25", 0.25), ("2gb", 2 * 10**9), ("512", 512),
    ],
)  # fmt: skip
def test_budgets_as_users_write_them(given: Any, meant: Any) -> None:
    assert parse_budget(given) == meant and type(parse_budget(given)) is type(meant)
    assert budget_of(recompute_text(parse_budget(given))) == meant


@pytest.mark.parametrize("given", [1.5, -0.1, float("nan"), -5, "much", "8 parsecs", ""])
def test_what_is_no_budget_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"torchlazy\.config\.memory_budget"):
        torchlazy.config.memory_budget = given


@pytest.mark.parametrize("given", [True, [1], 3j])
def test_what_is_no_number_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match="memory_budget"):
        torchlazy.config.memory_budget = given


def test_a_budget_is_a_value_of_recompute() -> None:
    torchlazy.config.memory_budget = 0.5
    assert torchlazy.config.recompute == "0.5" and torchlazy.config.memory_budget == 0.5
    torchlazy.config.memory_budget = None
    assert torchlazy.config.recompute == "on" and torchlazy.config.memory_budget is None
    torchlazy.config.recompute = "off"
    assert torchlazy.config.memory_budget is None


WIDE = 4096  # rows, so that activations are larger than what kernels that share a launch may hold while they wait


def train(budget: Any) -> tuple[list[float], list[torch.Tensor], int]:
    """Losses, parameters and the largest program's planned peak, after three steps with dropout."""
    torchlazy.config.memory_budget = budget
    driver.forget()
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.2), nn.Linear(256, 64))
        for _ in range(4)
    ]
    model = nn.Sequential(*blocks).to("lazy")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x = torch.randn(WIDE, 64).to("lazy")
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    programs = [known.compiled.program for known in driver.tiers._known.values() if known.compiled]
    peak = max(plan_report(program.steps).peak_bytes for program in programs)
    return losses, [p.detach().cpu() for p in model.parameters()], peak


def test_less_budget_less_memory_the_same_values() -> None:
    budgets = (1.0, 0.75, 0.5, 0.25, 0.0)
    found = {budget: train(budget) for budget in budgets}
    peaks = [found[budget][2] for budget in budgets]
    assert peaks == sorted(peaks, reverse=True), peaks
    assert peaks[0] > 1.2 * peaks[2] and peaks[2] > 1.2 * peaks[4]
    for budget in budgets[1:]:
        torch.testing.assert_close(found[budget][0], found[1.0][0], rtol=1e-6, atol=0)
        for a, b in zip(found[budget][1], found[1.0][1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_bytes_bound_what_is_held() -> None:
    whole, small = train(1.0)[2], train("20MiB")[2]
    assert small < 0.8 * whole


def test_the_dump_tells_what_is_held_and_why(tmp_path: Path) -> None:
    torchlazy.config.memory_budget = 0.0
    w = torch.rand(64, 64).to("lazy").requires_grad_()
    x = torch.rand(64, 64).to("lazy")
    with torchlazy.dump(str(tmp_path)):
        torch.tanh(torch.tanh(x @ w) @ w).exp().sum().backward()
        torchlazy.flush()
    text = next(tmp_path.rglob("08_memory.txt")).read_text()
    assert "from forward to backward" in text and "  again  " in text

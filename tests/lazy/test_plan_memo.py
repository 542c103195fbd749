"""What planning remembers changes no program: text by text the same as without, however often layers repeat."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torchlazy
from torch import nn
from torch.nn import functional as F
from torchlazy.inductor import scheduler
from torchlazy.inductor.access import collect_facts
from torchlazy.lazy.api import driver
from torchlazy.lazy.plan import pipeline
from torchlazy.lazy.plan.loaded import CompileOptions
from torchlazy.lazy.trace.trace import CutTrace
from torchlazy.prims.decompose import decompose


class Block(nn.Module):
    """Attention and a perceptron, with residuals."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(self.first(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + F.dropout(self.down(F.gelu(self.up(self.second(x)))), 0.1)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(Block(8) for _ in range(4)), nn.Linear(8, 5)), torch.rand(2, 6, 8)


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(*layers, nn.MaxPool2d(2), layers[0], nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 5)), (
        torch.rand(2, 4, 8, 8)
    )


def recurrence() -> tuple[nn.Module, torch.Tensor]:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRUCell(4, 6), nn.Linear(6, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = x.new_zeros(x.shape[0], 6)
            for part in x.unbind(1):
                state = self.cell(part, state)
            return self.head(state)

    return Last(), torch.rand(3, 7, 4)


def step_of(make: Callable[[], tuple[nn.Module, torch.Tensor]], monkeypatch: pytest.MonkeyPatch) -> CutTrace:
    """The trace of a whole training step."""
    monkeypatch.setattr(torchlazy.config, "tiers", "off")
    torch.manual_seed(0)
    model, x = make()
    model, x = model.to("lazy"), x.to("lazy")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    model(x).square().mean().backward()
    optimizer.step()
    torchlazy.flush()
    assert driver.last_compiled is not None
    return driver.last_compiled.trace


@pytest.mark.parametrize("make", [transformer, convolutions, recurrence])
@pytest.mark.parametrize("language", ["cpp", "triton"])
def test_programs_are_the_same_without_memory(
    make: Callable[[], tuple[nn.Module, torch.Tensor]], language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = step_of(make, monkeypatch)
    options = CompileOptions(language, "fused")
    with_memory = pipeline.plan_trace(trace, options)
    monkeypatch.setattr(pipeline, "decompose", partial(decompose, memoise=False))
    monkeypatch.setattr(scheduler, "collect_facts", lambda node, known=None: collect_facts(node))
    without = pipeline.plan_trace(trace, options)
    assert with_memory.program.kernels
    assert with_memory.program == without.program
    assert repr(with_memory.program) == repr(without.program)
    assert with_memory.fallbacks == without.fallbacks
    assert with_memory.forms.held == without.forms.held
    decisions = [list(map(str, planned.forms.schedule.decisions)) for planned in (with_memory, without)]
    assert decisions[0] == decisions[1]

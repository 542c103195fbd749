"""Real training steps of many equal layers are planned by way of a few, on both targets."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchlazy.lazy.plan import pipeline
from torchlazy.lazy.plan.layers import shorten
from torchlazy.lazy.trace.trace import CutTrace

from tests.lazy.recorded_traces import OPTIONS, TARGETS, assert_same, longest_of, on_lazy, recorded

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import compile_time

WIDTH = 64


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("steps", [1, 2])
def test_the_benchmark_of_compile_seconds(target: str, steps: int) -> None:
    """Its width decides that sums are taken in parts; the first step has no optimizer states yet."""
    with recorded(target) as found:
        model, codes = on_lazy(lambda: compile_time.gpt_and_codes(20, 128))
        trace = longest_of(compile_time.training_step(model, model, codes), found, steps)
    assert_same(trace, TARGETS[target])


class RootNorm(nn.Module):
    """As Llama's: computed in float32, given in the dtype that came."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class GatedBlock(nn.Module):
    """Attention and a gated perceptron after norms by the root of the mean square, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = RootNorm(), RootNorm()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.first(x)
        q, k, v = (part(normed).unflatten(-1, (2, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        normed = self.second(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Decoder(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(96, WIDTH)
        self.blocks = nn.Sequential(*(GatedBlock() for _ in range(layers)))
        self.norm, self.head = RootNorm(), nn.Linear(WIDTH, 96, bias=False)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.tokens(codes))))


def decoder_step(target: str) -> CutTrace:
    """A training step of the decoder under autocast."""
    with recorded(target) as found:
        model, codes = on_lazy(lambda: (Decoder(36), torch.zeros(4, 32, dtype=torch.int64)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

        def step() -> torch.Tensor:
            with torch.autocast("lazy", torch.bfloat16):
                loss = F.cross_entropy(model(codes).flatten(0, 1).float(), codes.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return longest_of(step, found)


@pytest.mark.parametrize("target", TARGETS)
def test_a_decoder_under_autocast(target: str) -> None:
    """Every third sum of its stream is kept, two in three layers; what is done for each norm after the backward begins
    with the last norm, which is of no layer."""
    assert_same(decoder_step(target), TARGETS[target])


def test_a_schedule_that_cannot_repeat_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few layers of a decoder under autocast, one by one, are left before loops are fused; they are tried first only
    where nobody sees that layers round."""
    tried: list[int] = []
    fused: list[int] = []
    look, fuse = pipeline.check_loops, pipeline.scheduler.schedule
    monkeypatch.setattr(pipeline, "check_loops", lambda *given: (tried.append(1), look(*given)))
    monkeypatch.setattr(pipeline.scheduler, "schedule", lambda *given: (fused.append(1), fuse(*given))[1])
    trace = decoder_step("cpu")
    assert pipeline.plan_repeated(trace, OPTIONS["cpp"]) is not None
    assert len(tried) == len(fused) == 1
    monkeypatch.setattr(shorten, "_rounds", lambda *_: False)
    assert pipeline.plan_repeated(trace, OPTIONS["cpp"]) is not None
    assert len(tried) == 3 and len(fused) == 2

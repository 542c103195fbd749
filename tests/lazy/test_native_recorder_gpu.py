"""The native recorder on a GPU: streams, generators and CUDA graphs."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torchlazy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchlazy.runtime.native.recorder_library import LIBRARY
from torchlazy.runtime.program import stages

from tests.lazy.test_native_recorder import _followed, assert_same, by_the_driver, counts

__all__ = ["_followed"]  # the fixture

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


class Layer(nn.Module):
    """Attention and dropout as GPT has them."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.inside, self.outside, self.norm = nn.Linear(64, 192), nn.Linear(64, 64), nn.LayerNorm(64)
        self.checkpointed = checkpointed

    def attend(self, x: Tensor) -> Tensor:
        parts = self.inside(self.norm(x)).view(*x.shape[:2], 3, 2, 32).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(*parts, dropout_p=0.25, is_causal=True)
        return F.dropout(self.outside(found.transpose(1, 2).flatten(2)), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.attend, x, use_reentrant=False) if self.checkpointed else self.attend(x))


def trained(native: bool, *, checkpointed: bool = False, reseeds: bool = False, half: bool = True) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(checkpointed), Layer(checkpointed)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Any] = []
    for turn in range(8):
        x = torch.randn(2, 16, 64, device="cuda")
        if reseeds and turn % 3 == 0:
            torch.manual_seed(5)
        block = torchlazy.lazy_mode() if native else contextlib.nullcontext()
        cast = torch.autocast("cuda", torch.bfloat16) if half else contextlib.nullcontext()
        with block:
            with cast:
                loss = model(x).square().mean()
            if reseeds and turn % 2:
                torch.cuda.manual_seed(turn)
                loss = loss + F.dropout(x, 0.5).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found += [loss.detach(), torch.cuda.get_rng_state()]
    return [*found, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("how", [{}, {"half": False}, {"checkpointed": True}, {"reseeds": True}], ids=str)
def test_what_is_drawn_is_eagers_bit_for_bit(how: dict[str, bool]) -> None:
    assert_same(trained(True, **how), trained(False, **how))
    assert counts()["deferred"] > 100 and not LIBRARY.module.ran_at_once()


@pytest.mark.parametrize("in_stages", [False, True])
def test_graphs_draw_eagers_numbers(in_stages: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    by_the_driver()
    monkeypatch.setattr(stages, "LEAST_WORK", 1 if in_stages else 10**6)

    def dropped(native: bool) -> list[Any]:
        torch.manual_seed(0)
        w, found = torch.ones(32, 32, device="cuda", requires_grad=True), []
        for turn in range(12):
            x = torch.full((8, 32), turn + 1.0, device="cuda")
            with torchlazy.lazy_mode() if native else contextlib.nullcontext():
                y = F.dropout(F.dropout(x * w.sum(), 0.5) * 2 + 1, 0.25)
                for _ in range(12 if in_stages else 0):
                    y = F.dropout(y @ w, 0.1) * 0.1
                y.sum().backward()
            found += [y.detach(), w.grad, torch.cuda.get_rng_state()]
            w.grad = None
            torchlazy.wait_for_compile()
        return found

    torchlazy.reset_metrics()
    have = dropped(True)
    assert torchlazy.metrics()["graph_replays"] >= 3, torchlazy.metrics()["fallbacks"]
    assert (torchlazy.metrics()["launched_ahead"] >= 6) == in_stages, torchlazy.metrics()
    for a, b in zip(have, dropped(False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("in_stages", [False, True])
def test_graphs_of_a_training_step(in_stages: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    by_the_driver()
    monkeypatch.setattr(stages, "LEAST_WORK", 1 if in_stages else 10**6)

    def train(native: bool) -> list[Any]:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)) for _ in range(4)]
        model = nn.Sequential(*layers, nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        found: list[Any] = []
        for turn in range(14):
            x = torch.randn(8, 16, device="cuda")
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (turn + 1)
            with torchlazy.lazy_mode() if native else contextlib.nullcontext():
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.detach())
            torchlazy.wait_for_compile()
        return [*found, *(p.detach() for p in model.parameters())]

    torchlazy.reset_metrics()
    have = train(True)
    assert torchlazy.metrics()["graph_replays"] >= 4, torchlazy.metrics()["fallbacks"]
    assert (torchlazy.metrics()["launched_ahead"] >= 6) == in_stages, torchlazy.metrics()
    for a, b in zip(have, train(False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_streams() -> None:
    side = torch.cuda.Stream()

    def program(x: Tensor, native: bool) -> list[Tensor]:
        with torchlazy.lazy_mode() if native else contextlib.nullcontext():
            y = x
            for _ in range(6):
                y = (y * 1.5).sin()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                z = (y * 2 + 1).cos().exp() * y
            done = side.record_event()
            w = y * 3
            torch.cuda.current_stream().wait_event(done)
            return [y, z, w + z]

    for turn in range(8):
        x = torch.randn(1 << 20, device="cuda") + turn
        want = program(x, False)
        have = program(x, True)
        torch.cuda.synchronize()
        assert_same(have, want)
    assert counts()["deferred"] > 0


def test_attention_has_no_plans_where_sizes_vary() -> None:
    """cuDNN builds one for each size: from the third size on torch chooses another kernel, within the block."""
    if not torch.backends.cuda.cudnn_sdp_enabled():
        pytest.skip("cuDNN attention is switched off")
    LIBRARY.module.forget()
    w = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    for size in (24, 40, 56, 32, 48, 72, 64, 80, 88, 96, 104, 112, 120, 128, 136, 144, 152, 160, 168, 176):
        x = torch.randn(2, 2, size, 64, device="cuda", dtype=torch.bfloat16)
        with torchlazy.lazy_mode():
            have = F.scaled_dot_product_attention(x @ w, x, x, is_causal=True).sum(-2) * 2
        assert torch.backends.cuda.cudnn_sdp_enabled()
        want = F.scaled_dot_product_attention(x @ w, x, x, is_causal=True).sum(-2) * 2
        torch.testing.assert_close(have, want, rtol=0.05, atol=0.5)
    assert LIBRARY.module.varies_in_planned_sizes()
    assert sum(follows for *_, follows in LIBRARY.module.families()) >= 3, LIBRARY.module.families()


def test_the_generator_is_where_eager_has_it_at_any_size() -> None:
    """By how much a dropout moves it depends on how many numbers it draws."""
    by_the_driver()
    LIBRARY.module.forget()
    states: list[list[Tensor]] = []
    for block in (contextlib.nullcontext, torchlazy.lazy_mode):
        torch.cuda.manual_seed(0)
        found = []
        for size in (300, 500, 700, 400, 600, 800, 450, 550, 1300, 5000, 3000, 4000, 350, 2500, 6000, 7000, 1000, 2000):
            x = torch.ones(size, 1000, device="cuda")
            with block():
                y = F.dropout(F.dropout(x * 2, 0.5).relu() + 1, 0.25).sum(0)
            found += [y, torch.cuda.get_rng_state()]
            if size in (800, 450, 550):
                torchlazy.wait_for_compile()
        states.append(found)
    assert_same(states[1][1::2], states[0][1::2])
    torch.testing.assert_close(states[1][::2], states[0][::2])
    assert sum(follows for *_, follows in LIBRARY.module.families()) >= 4, LIBRARY.module.families()

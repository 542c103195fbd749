"""Calls whose replays are slower than their Python: found out by turns, against a clock that the tests move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch import nn
from torch.nn import functional as F
from torchlazy.lazy.compiled import race
from torchlazy.runtime.native.recorder_library import LIBRARY
from torchlazy.runtime.toolchains.toolchain_cpp import has_cpp

pytestmark = pytest.mark.skipif(not has_cpp(), reason="needs a C++ compiler")

Step = Callable[[], Any]


class Clock:
    """Each replay of `called` takes `replay`, each run of its Python `python`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, replay: float, python: float) -> None:
        self.now, self.takes = 0.0, (python, replay)
        monkeypatch.setattr(race, "BEGINS", 8)
        monkeypatch.setattr(race, "perf_counter", lambda: self.now)

    def loop(self, called: Any, step: Step, times: int) -> int:
        """How many of so many steps were replayed."""
        found = 0
        for _ in range(times):
            before = called.report().replays
            step()
            is_replay = called.report().replays > before
            self.now += self.takes[is_replay]
            found += is_replay
            torchlazy.wait_for_compile()
        return found


@pytest.fixture(autouse=True)
def _library() -> None:
    assert LIBRARY.wait() is not None


@pytest.mark.parametrize(("replay", "python", "wins"), [(1.0, 2.0, True), (2.0, 1.0, False), (1.0, 1.0, True)])
def test_the_faster_one_runs(monkeypatch: pytest.MonkeyPatch, replay: float, python: float, wins: bool) -> None:
    clock = Clock(monkeypatch, replay, python)
    weight = torch.randn(4, 4)
    called = torchlazy.compile(lambda x: F.gelu(x @ weight) * 2, audit=False)
    x = torch.randn(3, 4)

    def step() -> None:
        torch.testing.assert_close(called(x), F.gelu(x @ weight) * 2)

    replayed = clock.loop(called, step, 150)
    assert clock.loop(called, step, 20) == 20 * wins
    if replay < python:  # few calls are spent on what is clear
        assert replayed > 130
    assert ("faster than its replays" in str(called.report())) == (not wins)
    other = torch.randn(5, 4)  # another kind of call has a race of its own
    torch.testing.assert_close(called(other), F.gelu(other @ weight) * 2)


@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.parametrize("takes", [(1.0, 2.0), (2.0, 1.0)])
def test_a_training_loop_is_eagers_whoever_wins(
    monkeypatch: pytest.MonkeyPatch, takes: tuple[float, float], casts: bool
) -> None:
    clock = Clock(monkeypatch, *takes)

    def train(compiled: bool) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        called: Any = torchlazy.compile(model, audit=False) if compiled else model
        losses = []

        def step() -> None:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=casts):
                loss = called(torch.randn(8, 6)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

        if compiled:
            clock.loop(called, step, 150)
            assert clock.loop(called, step, 10) == (10 if takes[0] < takes[1] else 0)
        else:
            for _ in range(160):
                step()
        return [*losses, *(p.detach() for p in model.parameters()), *model.buffers()]

    tolerance = {"rtol": 0.05, "atol": 0.02} if casts else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(train(True), train(False), **tolerance)


@pytest.mark.parametrize("takes", [(1.0, 2.0), (2.0, 1.0)])
def test_calls_in_a_block_are_eagers_whoever_wins(monkeypatch: pytest.MonkeyPatch, takes: tuple[float, float]) -> None:
    clock = Clock(monkeypatch, *takes)
    weight = torch.randn(4, 4)
    called = torchlazy.compile(lambda x: (F.gelu(x @ weight), {"sum": x.sum()}), audit=False)

    def step() -> None:
        x = torch.randn(3, 4)
        with torchlazy.lazy_mode():
            y, others = called(x)
            y = y * 2
        torch.testing.assert_close(y, F.gelu(x @ weight) * 2)
        torch.testing.assert_close(others, {"sum": x.sum()})

    clock.loop(called, step, 150)


def test_what_draws_is_not_raced(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 2.0, 1.0)
    called = torchlazy.compile(lambda x: F.dropout(x, 0.5), audit=False)
    x = torch.ones(64)
    clock.loop(called, lambda: called(x), 150)
    assert clock.loop(called, lambda: called(x), 20) == 20

"""Handlers of signals that compute on lazy tensors, in the midst of the recorder: everybody's values are right."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torchlazy
from torchlazy.lazy.record import lock

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="needs SIGUSR1")
_RECORDER = str(Path(lock.__file__).parents[1])


class Signalling:
    """Raises the signal at one of the events at which CPython looks for signals, of those in the recorder."""

    def __init__(self, at: int) -> None:
        self.at, self.seen = at, 0

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(_RECORDER):
            self.seen += 1
            if self.seen == self.at:
                signal.raise_signal(signal.SIGUSR1)


def _program(w: Any, x: Any) -> list[Any]:
    h = torch.relu(x @ w) * 2 - 1
    h[1:].mul_(0.5)
    w.add_(torch.tanh(h).sum(0), alpha=0.01)
    return [h, h.sum(0), w.view(-1)[3:]]


@pytest.fixture
def handler():
    """Sets a handler of SIGUSR1 for the test."""
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda function: signal.signal(signal.SIGUSR1, function)
    signal.signal(signal.SIGUSR1, before)


def _wait_for(seen: list[Any], count: int) -> None:
    until = time.monotonic() + 120
    while len(seen) < count and time.monotonic() < until:
        time.sleep(0.001)


@pytest.mark.usefixtures("device_in_python")
@pytest.mark.parametrize("cuts", [False, True])
def test_a_handler_computes_in_the_midst_of_an_operator(operator_by_operator, handler, cuts) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(3, 4), torch.randn(4, 4)
    mine = torch.arange(4.0).to("lazy")
    seen: list[Any] = []

    def compute(number: int, frame: Any) -> None:
        mine.add_(1)
        seen.append((mine * 2).sum().item() if cuts else (mine * 2).sum())

    handler(compute)
    expected_w = w.clone()
    expected = _program(expected_w, x)
    raised = 0
    for at in range(1, 400, 4):
        lazy_w, lazy_x = w.to("lazy"), x.to("lazy")
        found = Signalling(at)
        sys.setprofile(found)
        try:
            values = _program(lazy_w, lazy_x)
        finally:
            sys.setprofile(None)
        raised += found.seen >= at
        _wait_for(seen, raised)
        torch.testing.assert_close([value.cpu() for value in values], expected)
        torch.testing.assert_close(lazy_w.cpu(), expected_w)
        if found.seen < at:
            break
    assert len(seen) == raised > 5
    totals = [float(value) for value in seen]
    assert totals == [12.0 + 8 * (i + 1) for i in range(len(seen))]
    torch.testing.assert_close(mine.cpu(), torch.arange(4.0) + len(seen))


def test_handlers_are_the_users_own(handler) -> None:
    def mine(number: int, frame: Any) -> None:
        seen.append(number)

    seen: list[int] = []
    handler(mine)
    assert signal.getsignal(signal.SIGUSR1) is mine
    assert signal.signal(signal.SIGUSR1, signal.SIG_IGN) is mine
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    handler(mine)
    signal.raise_signal(signal.SIGUSR1)
    assert seen == [signal.SIGUSR1]


def test_a_handler_that_raises_raises(handler) -> None:
    def late(number: int, frame: Any) -> None:
        raise TimeoutError("too late")

    handler(late)
    with pytest.raises(TimeoutError, match="too late"):
        signal.raise_signal(signal.SIGUSR1)
        time.sleep(1)


def test_a_handler_within_a_captured_call_comes_after_it(handler) -> None:
    """What it does is no part of the call, whose replays do not do it again."""
    mine, seen = torch.zeros(2).to("lazy"), []

    def compute(number: int, frame: Any) -> None:
        mine.add_(1)
        seen.append(number)

    handler(compute)

    @torchlazy.compile
    def call(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        if not seen:
            signal.raise_signal(signal.SIGUSR1)
        return y * 2

    x = torch.ones(2).to("lazy")
    assert call(x).tolist() == [4.0, 4.0]
    _wait_for(seen, 1)
    for _ in range(3):
        assert call(x).tolist() == [4.0, 4.0]
    assert mine.tolist() == [len(seen)] * 2

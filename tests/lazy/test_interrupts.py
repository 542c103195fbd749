"""Ctrl-C, or a timer's handler that raises, anywhere in the recorder: what comes afterwards is right.

Invariant: an interrupt is put behind calls of Python and C code in turn that the recorder makes for a program: that is
where CPython looks for one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchlazy
from torchlazy.lazy.record import lock
from torchlazy.lazy.record.tensor import LazyTensor

pytestmark = [
    pytest.mark.usefixtures("operator_by_operator"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # in a generator that is let go
]
_RECORDER = str(Path(lock.__file__).parents[1])


class Interrupt(BaseException):
    pass


class Interrupting:
    """Raises at one of the events at which CPython looks for signals, of those in the recorder."""

    def __init__(self, at: int) -> None:
        self.at, self.seen, self.place = at, 0, ""

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(_RECORDER):
            self.seen += 1
            if self.seen == self.at:
                self.place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {event} {argument}"
                raise Interrupt


def program(w: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    h = torch.relu(x @ w) * 2 - 1
    h[1:].mul_(0.5)
    total = torch.tanh(h).sum(0)
    w = w.clone()
    w.add_(total, alpha=0.01)
    return [w, h, *h.unbind(0), w.view(-1)[3:]]


def interrupted(run: Callable[[], Any], at: int) -> Interrupting:
    found = Interrupting(at)
    sys.setprofile(found)
    try:
        run()
    except Interrupt:
        pass
    finally:
        sys.setprofile(None)
    return found


def in_another_way(tensor: torch.Tensor, number: int) -> torch.Tensor:
    """Other operators for each number: a trace that only differs in a number would be followed once that varies."""
    for bit in f"{number:b}":
        tensor = tensor.neg() if bit == "1" else tensor.abs()
    return tensor


@pytest.mark.parametrize(
    ("walks", "cuts", "stride"), [(True, False, 2), (False, False, 5), (True, True, 17)],
    ids=["walked", "first seen", "cut"],
)  # fmt: skip
def test_an_interrupt_anywhere_leaves_the_recorder_right(walks: bool, cuts: bool, stride: int) -> None:
    """At every place, or at every so many where there are thousands."""
    recorder = LazyTensor.recorder
    torch.manual_seed(0)
    host = torch.randn(8, 8), torch.randn(4, 8)
    expected = [y.clone() for y in program(*host)]
    w, x = (t.to("lazy") for t in host)

    def again() -> list[list[float]]:
        found = [y.tolist() for y in program(w, x)]
        torchlazy.sync()
        return found

    reference = again()
    for mine, theirs in zip(reference, expected, strict=True):
        torch.testing.assert_close(torch.tensor(mine), theirs)
    again()
    held: list[torch.Tensor] = []

    def run() -> None:
        held[:] = program(w * 1.0 if walks else in_another_way(w, at), x)
        if cuts:
            torchlazy.sync()

    at, places = 1, []
    while True:
        found = interrupted(run, at)
        if not found.place:
            break
        places.append(found.place)
        depth = recorder.lock._depth
        assert not depth or found.place.endswith("call None"), found.place  # nothing can be done before the first line
        while recorder.lock._depth:
            recorder.lock.release()
        assert again() == reference, found.place
        at += stride
    assert len(places) > 15


def test_training_goes_on_after_an_interrupted_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a step runs: parameters stand as they were, lost gradients say what to do."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3).to("lazy")
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    x = torch.randn(5, 4).to("lazy")

    def step() -> float:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step()
    before = [p.detach().cpu() for p in model.parameters()]

    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(LazyTensor.recorder, "run_cut", interrupt)
        with pytest.raises(KeyboardInterrupt):
            step()
    for now, then in zip(model.parameters(), before, strict=True):
        assert torch.equal(now.detach().cpu(), then)
    with pytest.raises(RuntimeError, match=r"lost to a KeyboardInterrupt .*optimizer.zero_grad\(\)"):
        step()
    optimizer.zero_grad()
    losses = [step() for _ in range(4)]
    assert losses[-1] < losses[0]

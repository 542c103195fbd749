"""Ctrl-C, or a timer's handler that raises, anywhere in the recorder: what comes afterwards is right.

Invariant: an interrupt is put behind calls of Python and C code in turn that the recorder makes for a program: that is
where CPython looks for one.
"""

from __future__ import annotations

import contextlib
import copy
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
import torchlazy
from torch.overrides import TorchFunctionMode
from torchlazy.lazy.device.outside_mode import outside_lazy_mode
from torchlazy.lazy.native.block import BLOCKS
from torchlazy.lazy.record import lock, signals
from torchlazy.lazy.record.tensor import LazyTensor
from torchlazy.lazy.torch_private.dispatch import (
    handed_to,
    past_function_mode,
    uppermost_function_mode,
    uppermost_mode,
)
from torchlazy.lazy.torch_private.patches import UnwrappedDispatchMode

pytestmark = [
    pytest.mark.usefixtures("device_in_python"),
    pytest.mark.usefixtures("operator_by_operator"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # in a generator that is let go
]
_RECORDER = str(Path(lock.__file__).parents[1])


class Interrupt(BaseException):
    pass


class Interrupting:
    """Raises at one of the events at which CPython looks for signals, of those in the recorder, or in the code `of`."""

    def __init__(self, at: int, of: CodeType | None = None) -> None:
        self.at, self.of, self.seen, self.place = at, of, 0, ""

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        is_inside = code.co_filename.startswith(_RECORDER) if self.of is None else code is self.of
        if is_inside and event in ("call", "c_return"):
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


def interrupted(run: Callable[[], Any], at: int, of: CodeType | None = None) -> Interrupting:
    found = Interrupting(at, of)
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


def train(model: torch.nn.Module, x: torch.Tensor, run: Callable[[Callable[[], float]], Any]) -> Callable[[], Any]:
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)

    def step() -> float:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return run(step)


def in_mode(step: Callable[[], float]) -> Callable[[], float]:
    def inside() -> float:
        with torchlazy.lazy_mode():
            return step()

    return inside


WAYS: dict[str, tuple[str, Any]] = {
    "device": ("lazy", lambda step: step), "mode": ("cpu", in_mode),
    "compiled": ("cpu", torchlazy.compile), "compiled on the device": ("lazy", torchlazy.compile),
}  # fmt: skip


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a step may be slow; pytest has a handler of its own for Ctrl-C."""
    monkeypatch.setattr(signals, "_PATIENCE", 600.0)


@pytest.fixture
def pythons_own_handler(patient: None) -> Any:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_within_a_cut_loses_nothing(monkeypatch: pytest.MonkeyPatch, pythons_own_handler: None) -> None:
    """It comes behind the cut: what was being computed is there, gradients too."""
    torch.manual_seed(0)
    plain = torch.nn.Linear(4, 3)
    model = copy.deepcopy(plain).to("lazy")
    x = torch.randn(5, 4)
    for mine, data in ((plain, x), (model, x.to("lazy"))):
        mine(data).square().mean().backward()
    real, cuts = LazyTensor.recorder.run_cut, []

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        values = real(*args, **kwargs)
        end = time.monotonic() + 0.05  # Python looks for signals here
        while time.monotonic() < end:
            pass
        cuts.append(len(values))
        return values

    with monkeypatch.context() as patched:
        patched.setattr(LazyTensor.recorder, "run_cut", interrupt)
        with pytest.raises(KeyboardInterrupt):
            start = time.monotonic()
            model.weight.grad.sum().item()
            time.sleep(60)
    assert cuts and time.monotonic() - start < 30, "it ends what is waited for"
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad)
        torch.testing.assert_close(mine.detach().cpu(), theirs.detach())


def test_ctrl_c_comes_when_the_lock_is_released(pythons_own_handler: None) -> None:
    """Not at a moment in which a thread finds it free: in a loop of compiled calls that hardly ever comes."""
    start = time.monotonic()
    pressed = threading.Timer(0.05, signal.raise_signal, (signal.SIGINT,))
    with pytest.raises(KeyboardInterrupt):
        pressed.start()
        while time.monotonic() - start < 60:
            with LazyTensor.recorder.lock, LazyTensor.recorder.lock:
                time.sleep(0.01)
    assert time.monotonic() - start < 30 and not LazyTensor.recorder.lock.is_mine()


def test_a_second_ctrl_c_does_not_wait(pythons_own_handler: None) -> None:
    waited, late = [], []
    with pytest.raises(KeyboardInterrupt):
        with LazyTensor.recorder.lock:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            waited.append(True)
        time.sleep(60)  # one that waits ends this
    signal.signal(signal.SIGINT, lambda number, frame: late.append(number))
    x = torch.ones(3).to("lazy")
    for _ in range(50):
        assert (x + 1).sum().item() == 6
        time.sleep(0.001)
    assert not waited and not late


def test_a_second_ctrl_c_is_not_taken_for_the_first_one(
    monkeypatch: pytest.MonkeyPatch, pythons_own_handler: None
) -> None:
    """Python makes one call of two signals: none is sent while the first one waits."""
    sent: list[float] = []
    send = signal.pthread_kill

    def note_and_send(thread: int, number: int) -> None:
        sent.append(time.monotonic())
        send(thread, number)

    monkeypatch.setattr(signal, "pthread_kill", note_and_send)
    with pytest.raises(KeyboardInterrupt):
        with LazyTensor.recorder.lock:
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.05)
            released = time.monotonic()
        time.sleep(60)
    assert all(at > released for at in sent)


@pytest.mark.parametrize("way", WAYS)
def test_training_interrupted_at_random(way: str, pythons_own_handler: None) -> None:
    """After each Ctrl-C parameters and gradients are there, and the next step is eager's from them."""
    device, run = WAYS[way]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).to(device)
    x, dice = torch.randn(12, 8), random.Random(0)
    step = train(model, x.to(device), run)
    for _ in range(4):
        step()
    start = time.perf_counter()
    step()
    duration, interrupted = time.perf_counter() - start, 0
    for _ in range(10 if "compiled" in way else 50):
        wait = max(1e-5, dice.random() * duration)
        pressed = threading.Timer(wait, signal.raise_signal, (signal.SIGINT,))
        try:
            pressed.start()
            end = time.monotonic() + duration + 2
            while time.monotonic() < end:
                step()
            pressed.join()
            while signals._get(signal.SIGINT)._until:  # one that waits for a long step comes a moment after it
                time.sleep(0.001)
        except KeyboardInterrupt:
            interrupted += 1
        assert not BLOCKS.depth, "Python does not leave what was interrupted as it began"
        assert BLOCKS.library is None or not BLOCKS.library.is_recording()
        plain = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        with torch.no_grad():
            for mine, theirs in zip(plain.parameters(), model.parameters(), strict=True):
                mine.copy_(theirs.detach().cpu())
                assert theirs.grad is None or bool(theirs.grad.detach().cpu().isfinite().all())
            expected = plain(x).square().mean().item()
        assert step() == pytest.approx(expected, rel=1e-3, abs=1e-6)
    least = 9 if "compiled" in way else 45  # one in other finalizers is printed and lost, as ever in Python
    assert interrupted >= least


@pytest.mark.parametrize("block", ["class", "generator"])
def test_a_signal_waits_while_a_block_begins_or_ends(block: str, pythons_own_handler: None) -> None:
    """At every place of its beginning and of its end: Python would never leave it."""
    linear, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    files = (_RECORDER, contextlib.__file__)

    def run() -> None:
        with torchlazy.lazy_mode() if block == "class" else outside_lazy_mode(LazyTensor.recorder):
            linear(x)

    class Signalling(Interrupting):
        def __call__(self, frame: Any, event: str, argument: Any) -> None:
            if event in ("call", "c_return") and frame.f_code.co_filename.startswith(files):
                self.seen += 1
                if self.seen == self.at:
                    self.place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {event} {argument}"
                    signal.raise_signal(signal.SIGINT)

    torchlazy.config.tiers = "on"
    with torchlazy.lazy_mode() if block == "generator" else contextlib.nullcontext():
        run()
        expected = BLOCKS.depth, BLOCKS.library.is_recording()
        at, places = 1, []
        while True:
            found = Signalling(at)
            with contextlib.suppress(KeyboardInterrupt):
                sys.setprofile(found)
                try:
                    run()
                finally:
                    sys.setprofile(None)
                if found.place:
                    time.sleep(60)  # one that waits ends this
            assert (BLOCKS.depth, BLOCKS.library.is_recording()) == expected, found.place
            if not found.place:
                break
            places.append(found.place)
            at += 1
    assert len(places) > 8


class _Passes(UnwrappedDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _PassesFunctions(TorchFunctionMode):
    """One that does nothing."""


@pytest.mark.parametrize("kind", ["dispatch", "function"])
def test_a_mode_that_is_off_meanwhile_is_on_again(kind: str) -> None:
    """Wherever the interrupt comes: before it is off, while it is, or behind that."""
    mode: Any = _Passes() if kind == "dispatch" else _PassesFunctions()
    top = uppermost_mode if kind == "dispatch" else uppermost_function_mode
    code = (handed_to if kind == "dispatch" else past_function_mode).__code__
    seen = []

    def off() -> None:
        assert top() is None
        seen.append("off")

    def run() -> None:
        handed_to(mode, off) if kind == "dispatch" else past_function_mode(mode, off, (), {})

    for at in range(1, 12):
        with mode:
            found = interrupted(run, at, code)
            assert top() is mode
        if found.seen < at:
            break
    assert found.seen >= 3
    assert seen

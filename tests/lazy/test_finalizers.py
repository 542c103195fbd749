"""Code that runs when objects die (`__del__`, callbacks of weak references) and computes on lazy tensors, whenever the
cycle collector comes: everybody's values are right."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchlazy
from torchlazy.lazy.api import recorder
from torchlazy.runtime.collector import is_on, paused_collector


@pytest.fixture
def often() -> Iterator[None]:
    """The collector comes at nearly every object that is made."""
    before = gc.get_threshold()
    gc.collect()
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*before)
    assert gc.isenabled()


class Node:
    """One object of a cycle; calls what it is given when it dies."""

    def __init__(self, end: Callable[[], object] | None) -> None:
        self.me = self
        self.end = end

    def __del__(self) -> None:
        if self.end is not None:
            self.end()


def leave_garbage(way: str, kept: list[Any], end: Callable[[], object]) -> None:
    if way == "del":
        Node(end)
    else:
        kept.append(weakref.ref(Node(None), lambda _: end()))


def _program(w: Any, x: Any, garbage: Callable[[], None]) -> list[Any]:
    garbage()
    h = torch.relu(x @ w) * 2 - 1
    garbage()
    h[1:].mul_(0.5)
    garbage()
    w.add_(torch.tanh(h).sum(0), alpha=0.01)
    first, second = torch.split(h, 2, 1)
    garbage()
    return [h, h.sum(0), w.view(-1)[3:], first * second, torch.cat([h, h])]


@pytest.mark.parametrize("way", ["del", "weakref"])
@pytest.mark.parametrize("cuts", [False, True])
def test_finalizers_compute_in_the_midst_of_operators(way: str, cuts: bool, often: None) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(3, 4), torch.randn(4, 4)
    mine, lazy_x, lazy_w = torch.arange(4.0).to("lazy"), x.to("lazy"), w.to("lazy")
    depths: list[int] = []
    made: list[Any] = []
    kept: list[Any] = []

    def end() -> None:
        depths.append(recorder.lock.depth)
        mine.add_(1)
        value = (mine * 2).view(2, 2).t() + 1
        made.append((len(depths), value.sum().item() if cuts else value))

    wanted_w = w.clone()
    for _ in range(4):
        wanted = _program(wanted_w, x, lambda: None)
        found = _program(lazy_w, lazy_x, lambda: leave_garbage(way, kept, end))
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a.cpu(), b)
        torch.testing.assert_close(lazy_w.cpu(), wanted_w)
    gc.collect()
    assert len(depths) == 16 and not any(depths), "each ran, between two operators"
    torch.testing.assert_close(mine.cpu(), torch.arange(4.0) + 16)
    for count, value in made:
        expected = ((torch.arange(4.0) + count) * 2).view(2, 2).t() + 1
        assert value == expected.sum().item() if cuts else torch.equal(value.cpu(), expected)


def test_a_training_step_with_finalizers(often: None) -> None:
    def losses(device: str, way: str) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        x = torch.randn(5, 4).to(device)
        other = torch.zeros(3).to(device)
        found = []
        for _ in range(4):
            if way:
                leave_garbage(way, kept, lambda: other.add_(torch.ones(3, device=device)))
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        gc.collect()
        assert other.sum().item() == (12 if way else 0)
        return found

    kept: list[Any] = []
    eager = losses("cpu", "")
    for way in ("del", "weakref"):
        torch.testing.assert_close(losses("lazy", way), eager)


def test_finalizers_in_compiled_calls(often: None) -> None:
    torch.manual_seed(0)
    other, ran = torch.zeros(3).to("lazy"), []

    def end() -> None:
        ran.append(recorder.capture is None)
        other.add_(1)

    @torchlazy.compile
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * 2).sum(0) + x[0]

    x = torch.randn(3, 4)
    for _ in range(6):
        Node(end)
        torch.testing.assert_close(compiled(x.to("lazy")).cpu(), torch.tanh(x * 2).sum(0) + x[0])
    gc.collect()
    assert ran == [True] * 6 and other.sum().item() == 18


def test_the_collector_is_as_it_was() -> None:
    x = torch.ones(3).to("lazy")
    seen: list[bool] = []
    asked: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(is_on())
        y = x + 1
        seen.append(is_on())
        asked.append(gc.isenabled())
        return y * 2

    look(x)
    torchlazy.compile(look)(x)
    assert seen == [True, True, False, False] and is_on(), "it waits while a call is captured"
    assert asked == [True, True], "which the program does not see"
    with recorder.lock:
        assert not is_on()
        with recorder.lock:
            assert not is_on()
        assert not is_on()
        saved = recorder.lock._release_save()
        assert is_on(), "others have the lock"
        recorder.lock._acquire_restore(saved)
        assert not is_on()
    assert is_on()
    with pytest.raises(ZeroDivisionError), recorder.lock:
        raise ZeroDivisionError
    assert is_on()
    with pytest.raises(RuntimeError):
        x.view(7)
    assert is_on()


def test_compiled_calls_ask_for_the_collector_and_switch_it() -> None:
    def asks(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if gc.isenabled() else x * 3

    def stops(x: torch.Tensor) -> torch.Tensor:
        gc.disable()
        return x * 2

    def starts(x: torch.Tensor) -> torch.Tensor:
        gc.enable()
        return x * (4 if gc.isenabled() else 5)

    def waits(x: torch.Tensor) -> torch.Tensor:
        was_on = gc.isenabled()
        gc.disable()
        try:
            return x * (5 if gc.isenabled() else 6)
        finally:
            if was_on:
                gc.enable()

    try:
        for device in ("cpu", "lazy"):
            for program in (asks, stops, starts, waits):
                compiled = torchlazy.compile(program)
                for is_wanted in (True, True, True, True, False, False, True, False):
                    found = []
                    for run, place in ((program, "cpu"), (compiled, device)):
                        (gc.enable if is_wanted else gc.disable)()
                        found.append((run(torch.ones(1, device=place)).item(), gc.isenabled(), is_on()))
                    assert found[0] == found[1], (device, program.__name__)
    finally:
        gc.enable()


def test_a_collector_that_the_user_stopped_stays_so() -> None:
    x = torch.ones(3).to("lazy")

    gc.disable()
    try:
        assert (x * 2).sum().item() == 6
        assert torchlazy.compile(lambda x: x + 1)(x).sum().item() == 6
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_pause_that_another_thread_began_ends_after_the_operator() -> None:
    planning, recording = threading.Event(), threading.Event()

    def plan() -> None:
        with paused_collector():
            planning.set()
            recording.wait(600)

    thread = threading.Thread(target=plan)
    thread.start()
    planning.wait(600)
    assert not is_on()
    with recorder.lock:
        with recorder.lock:
            recording.set()
            thread.join(600)
            assert not is_on(), "the recorder is in the midst of something"
        assert not is_on()
    assert is_on()
    with paused_collector(), recorder.lock:
        pass
    assert is_on()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_that_is_forked_in_an_operator_collects() -> None:
    with recorder.lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if is_on() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and is_on()


def test_threads_record_while_the_collector_comes(often: None) -> None:
    x = torch.arange(4.0)
    results: dict[int, Any] = {}

    def work(number: int) -> None:
        mine, kept = x.to("lazy"), torch.zeros(4).to("lazy")
        for _ in range(20):
            Node(lambda: kept.add_(1))
            mine = mine * 1.5 + number
            mine = mine - number
        results[number] = mine.cpu()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    for number in range(3):
        wanted = x
        for _ in range(20):
            wanted = wanted * 1.5 + number - number
        torch.testing.assert_close(results[number], wanted)

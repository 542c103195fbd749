"""Threads in the background sleep as long as they work, but while somebody waits for them."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torchlazy.runtime.toolchains import background_priority, capture_pause
from torchlazy.runtime.toolchains.background_priority import breathe, without_yielding


class Clock:
    """Each look at it is so many seconds later; who sleeps is told."""

    def __init__(self, step: float, slept: Callable[[float], None]) -> None:
        self.now, self.step, self.sleep = 0.0, step, slept

    def perf_counter(self) -> float:
        self.now += self.step
        return self.now


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The threads that slept; each look at the clock is a second later."""
    found: list[str] = []
    clock = Clock(step=1.0, slept=lambda seconds: found.append(threading.current_thread().name))
    monkeypatch.setattr(background_priority, "time", clock)  # of nobody else
    yield found


def test_only_a_thread_that_gives_way_sleeps(sleeps: list[str]) -> None:
    breathe()
    with background_priority.giving_way():
        breathe()
        other = threading.Thread(target=breathe, name="other")
        other.start()
        other.join()
        with without_yielding():
            breathe()
        breathe()
    breathe()
    assert sleeps == [threading.current_thread().name] * 2


def test_it_sleeps_between_imports(sleeps: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        (tmp_path / f"imported_while_giving_way_{name}.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)
    with background_priority.giving_way(), background_priority.giving_way():
        for name in ("one", "two"):
            importlib.import_module(f"imported_while_giving_way_{name}")
    assert len(sleeps) == 2 and sys.meta_path == before


def test_the_time_that_is_worked_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    clock = Clock(step=background_priority.SECONDS * 0.3, slept=naps.append)
    monkeypatch.setattr(background_priority, "time", clock)
    with background_priority.giving_way():
        for _ in range(60):
            breathe()
    assert set(naps) == {background_priority.SECONDS} and len(naps) == 60 // 4


def test_beside_captures_the_threads_own_mode_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    modes, now = [], [0]

    def exchange(mode: object) -> int:
        value = mode._obj  # type: ignore[attr-defined]
        now[0], value.value = value.value, now[0]
        modes.append(now[0])
        return 0

    monkeypatch.setattr(capture_pause, "_exchange", lambda: exchange)
    with pytest.raises(KeyError), capture_pause.beside_captures():
        assert modes == [2]
        raise KeyError
    assert modes == [2, 0]
    monkeypatch.setattr(capture_pause, "_exchange", lambda: None)
    with capture_pause.beside_captures():
        assert modes == [2, 0]

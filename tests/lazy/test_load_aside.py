"""Programs are loaded in the background: no step waits for it, and a failure is told where the program would run."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torchlazy
from torchlazy.lazy.api import driver
from torchlazy.lazy.run import loading, programs
from torchlazy.lazy.run.driver import CutEvent
from torchlazy.lazy.run.loading import BackgroundLoader
from torchlazy.runtime.toolchains.kernel_cache import open_cache

from tests.lazy.held_jobs import HeldJobs


@pytest.fixture
def outcomes(tmp_path: Path) -> Iterator[list[str]]:
    """What came of each cut, with an empty store."""
    torchlazy.config.tiers, torchlazy.config.store = "on", "on"
    kept = driver.tiers._cache, driver.tiers._store
    driver.tiers._cache, driver.tiers._store = open_cache(tmp_path / "cache"), None
    seen: list[str] = []

    def listen(event: CutEvent) -> None:
        seen.append(event.outcome)

    driver.listeners.append(listen)
    yield seen
    driver.listeners.remove(listen)
    torchlazy.wait_for_compile()
    driver.tiers._cache, driver.tiers._store = kept


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Programs are loaded once it is set; by which threads is in `loaders`."""
    torchlazy.wait_for_compile()  # for what other tests left
    opened = threading.Event()
    original = programs.load_stored

    def load(*args: object) -> object:
        loaders.append(threading.current_thread())
        assert opened.wait(600)
        return original(*args)  # type: ignore[arg-type]

    loaders.clear()
    monkeypatch.setattr(programs, "load_stored", load)
    yield opened
    opened.set()


loaders: list[threading.Thread] = []


def cut() -> None:
    x, y = torch.arange(5.0, device="lazy"), torch.arange(5.0)
    assert torch.allclose((x.sin() * 2 + 1).cos().cpu(), (y.sin() * 2 + 1).cos(), atol=1e-5)


def stored() -> None:
    """The program is on disk, and this process knows nothing of it."""
    torchlazy.config.tiers = "off"  # a worker that starts after a file of the package was edited stores nothing
    cut()
    driver.forget()
    torchlazy.reset_metrics()
    torchlazy.config.tiers = "on"


def test_no_step_waits_for_a_stored_program(outcomes: list[str], gate: threading.Event) -> None:
    stored()
    outcomes.clear()
    cut(), cut(), cut()
    assert outcomes == ["tier 0: first sight", *["tier 0: loading its stored program"] * 2]
    gate.set()
    torchlazy.wait_for_compile()
    cut(), cut()
    assert outcomes[3:] == ["stored", "hit"] and torchlazy.metrics()["compiles"] == 0
    assert threading.main_thread() not in loaders and len(loaders) == 1


def test_no_step_waits_while_a_compiled_program_is_loaded(
    outcomes: list[str], gate: threading.Event, held_jobs: HeldJobs
) -> None:
    cut(), cut()
    held_jobs.begin()
    while not loaders:
        threading.Event().wait(0.01)
    cut()
    assert outcomes[-1] == "tier 0: compiling in the background"
    gate.set()
    torchlazy.wait_for_compile()
    cut()
    assert outcomes[-1] == "hit" and threading.main_thread() not in loaders


def test_a_stored_program_that_does_not_load_is_compiled_again(outcomes: list[str], monkeypatch) -> None:
    stored()

    def fail(*args: object) -> None:
        raise ValueError("of another world")

    monkeypatch.setattr(programs, "load_stored", fail)
    monkeypatch.setattr(driver.tiers, "_warned", set())
    cut()
    driver.tiers.loads.wait()
    with pytest.warns(RuntimeWarning, match="does not load and is compiled again: ValueError: of another world"):
        cut()
    monkeypatch.undo()
    torchlazy.wait_for_compile()


@pytest.mark.parametrize("setting", ["foreground", "off"])
def test_where_steps_wait_for_compilers_they_wait_for_the_loader(outcomes: list[str], setting: str) -> None:
    stored()
    outcomes.clear()
    torchlazy.config.tiers = setting
    cut(), cut()
    assert outcomes == ["stored", "hit"]


def test_a_loader_whose_thread_cannot_start_loads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    loads = BackgroundLoader()
    assert loads.submit(lambda: 7).value == 7
    loads.wait()


def test_loads_are_made_in_turn_and_their_errors_kept() -> None:
    loads, order = BackgroundLoader(), list[int]()
    first, bad, last = (
        loads.submit(make) for make in (lambda: order.append(1), lambda: 1 // 0, lambda: order.append(2))
    )
    loads.wait()
    assert order == [1, 2] and type(bad.error) is ZeroDivisionError
    assert first.is_done and bad.is_done and last.is_done and first.error is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_is_not_forked_while_something_is_being_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_PATIENCE", 600.0)
    loads, begun, order = BackgroundLoader(), threading.Event(), list[str]()

    def load() -> None:
        begun.set()
        threading.Event().wait(0.2)
        order.append("loaded")

    loads.submit(load)
    assert begun.wait(600)
    child = os.fork()
    if not child:
        mine = BackgroundLoader()
        mine.submit(lambda: order.append("child"))
        mine.wait()
        os._exit(0 if order == ["loaded", "child"] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_process_that_ends_waits_for_what_is_half_loaded() -> None:
    body = """
    import threading
    from torchlazy.lazy.run import loading
    from torchlazy.lazy.run.loading import BackgroundLoader
    loading._PATIENCE = 600.0
    begun = threading.Event()
    def load():
        begun.set()
        while not loading._ended:  # the process is at its end
            threading.Event().wait(0.01)
        print("loaded", flush=True)
    loads = BackgroundLoader()
    loads.submit(load), loads.submit(lambda: print("too late", flush=True))
    begun.wait()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(body)], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (0, "loaded\n", "")

"""Compilers that nobody waits for take what time is left over, in a group of their own; whoever comes to wait has them
begun anew with a share."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torchlazy.runtime.toolchains import background_compilers
from torchlazy.runtime.toolchains.background_compilers import hurry, run_in_background
from torchlazy.runtime.toolchains.background_priority import NICE, without_yielding

pytestmark = pytest.mark.skipif(
    not shutil.which("nice") or os.nice(0) + NICE >= 19, reason="needs `nice`, and to be able to give way"
)

# Tells how it runs, each time in a file of its own; waits for a file where it takes what is left over.
_COMPILER = """
import os, pathlib, sys, time
way = "rest" if os.nice(0) == 19 else "share"
told = f"{os.getpgid(0) == os.getpid()} {os.getsid(0)} {os.nice(0)}"
begun = pathlib.Path(sys.argv[1], way)
begun.with_suffix(".new").write_text(told)
begun.with_suffix(".new").rename(begun)
while way == "rest" and not pathlib.Path(sys.argv[1], "go on").exists():
    time.sleep(0.01)
print(way)
"""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy host one that takes what is left over is slow."""
    monkeypatch.setattr(background_compilers, "_PATIENCE", 600)


class Compiling(threading.Thread):
    """A compiler of the test's own, run aside."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder = folder
        self.done: subprocess.CompletedProcess[str] | None = None
        self.start()

    def run(self) -> None:
        self.done = run_in_background([sys.executable, "-I", "-c", _COMPILER, str(self.folder)], str(self.folder))

    def said(self) -> str:
        self.join(600)
        assert self.done is not None and self.done.returncode == 0, self.done
        return self.done.stdout.strip()

    def told(self, way: str) -> list[str]:
        """What it told of how it runs, once it does."""
        until((self.folder / way).exists)
        return (self.folder / way).read_text().split()


def until(is_so: Callable[[], bool]) -> None:
    for _ in range(60000):
        if is_so():
            return
        time.sleep(0.01)
    raise AssertionError("it never is")


def test_it_takes_what_is_left_over_in_the_session_of_the_program(tmp_path: Path) -> None:
    compiling = Compiling(tmp_path)
    leads, session, _ = compiling.told("rest")
    (tmp_path / "go on").touch()
    assert compiling.said() == "rest"
    assert leads == "True"
    assert (int(session) == os.getsid(0)) == (sys.version_info >= (3, 11))


def test_whoever_comes_to_wait_has_it_begun_anew(tmp_path: Path) -> None:
    compiling = Compiling(tmp_path)
    compiling.told("rest")
    with without_yielding():
        hurry()
        assert compiling.said() == "share"
    assert int(compiling.told("share")[-1]) == os.nice(0) + NICE


def test_one_that_finds_no_time_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_compilers, "_PATIENCE", 0.01)
    assert Compiling(tmp_path).said() == "share"  # it may have been ended before it could tell anything


def test_where_somebody_waits_already_it_has_its_share_at_once(tmp_path: Path) -> None:
    with without_yielding():
        assert Compiling(tmp_path).said() == "share"
    assert not (tmp_path / "rest").exists()


def test_without_nice_it_runs_as_the_program_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    compiling = Compiling(tmp_path)
    assert compiling.said() == "share" and int(compiling.told("share")[-1]) == os.nice(0)


def test_what_fails_is_told_once(tmp_path: Path) -> None:
    script = f"open({str(tmp_path / 'runs')!r}, 'a').write('.'); raise SystemExit('no such thing')"
    done = run_in_background([sys.executable, "-I", "-c", script], str(tmp_path))
    assert (done.returncode, done.stderr.strip()) == (1, "no such thing")
    assert (tmp_path / "runs").read_text() == "."

"""Background compilers: they take what processor time is left over, and end with this process.

Each leads a group of processes, not a session: Linux shares the processor among sessions first (`sched_autogroup`). One
in a session of its own got three quarters of a core that a program of two threads on two cores used as well, at nice 7.

Invariant: a compiler that is at work when the process ends is ended, and leaves nothing. One that somebody has come to
wait for, or that has not found the time for long, is begun anew with a share of its own: it cannot be given one later.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from torchlazy.runtime.toolchains import compiler_run
from torchlazy.runtime.toolchains.background_priority import NICE, has_waiters

_LEAST = 19  # a seventieth of a core that the program uses as well
_PATIENCE = 10.0  # seconds, of one that takes what is left over
_changes = threading.Lock()
_at_work: set[subprocess.Popen[str]] = set()
_left_over: set[subprocess.Popen[str]] = set()  # those of them that take what is left over
_ended = False


def run_in_background(command: list[str], folder: str) -> subprocess.CompletedProcess[str]:
    """What the compiler says, once it has ended: within `compile_seconds`, and as long before as it gave way."""
    if compiler_run.has_hung(command[0]):
        return compiler_run.run_compiler(command, folder, 0)
    done = _run(command, folder, is_left_over=True)
    if done is None:
        done = _run(command, folder, is_left_over=False)
        assert done is not None
    return done


def hurry() -> None:
    """A thread waits from now on (`without_yielding`): restart those that run on left-over time only."""
    with _changes:
        for process in list(_left_over):
            _end(process)


def end_background_compilers(number: int = signal.SIGTERM) -> None:
    """This process ends: end the background compilers, with what they started, and start no more."""
    global _ended
    with _changes:
        _ended = True
        for process in _at_work:
            _end(process, number)


def has_ended() -> bool:
    """Whether background compilers were ended with this process."""
    return _ended


def forget_background_compilers() -> None:
    """In a forked child: they are its parent's."""
    global _changes
    _at_work.clear()
    _left_over.clear()
    _changes = threading.Lock()


def _run(command: list[str], folder: str, is_left_over: bool) -> subprocess.CompletedProcess[str] | None:
    """The same; None for one that takes what is left over and was ended, or cannot be run this way."""
    way = _nice(_LEAST if is_left_over else NICE)
    with _changes:
        if _ended:
            return subprocess.CompletedProcess(command, 1, "", "this process ends")
        if is_left_over and (not way or has_waiters()):
            return None
        process = subprocess.Popen([*way, *command], cwd=folder, **compiler_run.PIPES, **_APART)
        _leave_to_others(process.pid)
        _at_work.add(process)
        if is_left_over:
            _left_over.add(process)
    try:
        seconds = _PATIENCE if is_left_over else compiler_run.compile_seconds()
        output, errors, is_late = _communicate(process, seconds)
    finally:
        with _changes:
            _at_work.discard(process)
            was_ended = is_left_over and process not in _left_over
            _left_over.discard(process)
    if was_ended and process.returncode and not _ended:
        return None
    if is_late and not is_left_over:
        compiler_run.note_hung(command[0], seconds, command)
        return subprocess.CompletedProcess(command, compiler_run.TIMED_OUT, output, errors)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def _communicate(process: subprocess.Popen[str], seconds: float) -> tuple[str, str, bool]:
    try:
        return (*process.communicate(timeout=seconds), False)
    except subprocess.TimeoutExpired:
        with _changes:
            _end(process)
        return (*compiler_run.communicate(process, 0.5)[:2], True)


def _end(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> None:
    """At SIGTERM they remove what they wrote."""
    _left_over.discard(process)
    with contextlib.suppress(OSError):
        os.killpg(process.pid, number)


def _nice(by: int) -> tuple[str, ...]:
    return ("nice", "-n", str(by)) if shutil.which("nice") else ()


_HAS_GROUPS = sys.version_info >= (3, 11)
_APART: dict[str, Any] = {"process_group": 0} if _HAS_GROUPS else {"start_new_session": True}


def _leave_to_others(process: int) -> None:
    """Where it has got a session of its own, give that the least share."""
    if not _HAS_GROUPS:
        with contextlib.suppress(OSError):
            Path(f"/proc/{process}/autogroup").write_text("19")

"""Runs a compiler for whoever waits for it, for a stated time at most.

Invariant: a run ends within its time and a few seconds, whatever the compiler does: one that hangs is ended with all
that it started, and what it says is text, whichever bytes it prints. A compiler that has hung once is not asked again
in this process. One that is at work when the process is killed ends within its time too, where there is `timeout`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Collection, Sequence
from typing import Any

PROBE_SECONDS = 10.0
"""For `--version`, once a process."""

_DEFAULT_SECONDS = 300.0
_SECONDS_TO_END = 2.0
TIMED_OUT = 124

# What both ways to run compilers give `Popen`.
PIPES: dict[str, Any] = {
    "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True,
    "encoding": "utf-8", "errors": "replace",
}  # fmt: skip

_hung: dict[str, str] = {}  # compilers that did not end, and what they were asked
_own_group = hasattr(os, "killpg")
_at_work: dict[subprocess.Popen[str], int] = {}  # and the threads that wait for them


def compile_seconds() -> float:
    """How long one run of a compiler may take: TORCHLAZY_COMPILE_SECONDS, else five minutes."""
    try:
        return max(0.1, float(os.environ["TORCHLAZY_COMPILE_SECONDS"]))
    except (KeyError, ValueError):
        return _DEFAULT_SECONDS


def stay_in_this_group() -> None:
    """This process leads a group that is ended as a whole: compilers belong to it."""
    global _own_group
    _own_group = False


def run_compiler(command: Sequence[str], folder: str | None, seconds: float) -> subprocess.CompletedProcess[str]:
    """What the compiler says; exit status 124 where it did not end in time, now or before. OSError where it cannot be
    started."""
    name = command[0]
    if name in _hung:
        return subprocess.CompletedProcess(list(command), TIMED_OUT, "", _hung[name])
    way: tuple[str, ...] = ()
    if _own_group and shutil.which("timeout"):
        way = ("timeout", "-s", "KILL", str(int(seconds) + 5))
    process = subprocess.Popen([*way, *command], cwd=folder, start_new_session=_own_group, **PIPES)
    _at_work[process] = threading.get_ident()
    try:
        output, errors, is_late = communicate(process, seconds)
    except BaseException:  # Ctrl-C
        end(process, signal.SIGKILL)
        raise
    finally:
        _at_work.pop(process, None)
    if is_late:
        note_hung(name, seconds, command)
        return subprocess.CompletedProcess(list(command), TIMED_OUT, output, _hung[name])
    return subprocess.CompletedProcess(list(command), process.returncode, output, errors)


def end_runs_of(threads: Collection[int]) -> None:
    """End the compilers that these threads wait for."""
    for process, thread in list(_at_work.items()):
        if thread in threads:
            end(process, signal.SIGKILL)


@atexit.register
def _at_exit() -> None:
    end_runs_of(set(_at_work.values()))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_at_work.clear)


def note_hung(name: str, seconds: float, command: Sequence[str]) -> None:
    """Do not ask this compiler again."""
    _hung[name] = f"{name} did not end within {seconds:g} s ({' '.join(command[1:3])}) and is not asked again"


def has_hung(name: str) -> bool:
    """Whether this compiler did not end in time before."""
    return name in _hung


def communicate(process: subprocess.Popen[str], seconds: float | None) -> tuple[str, str, bool]:
    """What the process says, and whether it took longer and was ended: politely first, for it removes what it wrote."""
    try:
        return (*process.communicate(timeout=seconds), False)
    except subprocess.TimeoutExpired:
        pass
    for number in (signal.SIGTERM, signal.SIGKILL):
        end(process, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return (*process.communicate(timeout=_SECONDS_TO_END), True)
    for pipe in (process.stdout, process.stderr):  # somebody else holds their other ends
        if pipe is not None:
            pipe.close()
    return "", "", True


def end(process: subprocess.Popen[str], number: int) -> None:
    """Send the signal to the process, with its group where it leads one."""
    with contextlib.suppress(OSError):
        if os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)

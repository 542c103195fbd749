"""Child processes that compile Triton kernels side by side: its compiler holds the interpreter lock most of the time.

Invariant: a crew leaves nothing but files in Triton's cache. A kernel whose child fails or dies is compiled by whoever
asked, who can say what is wrong with it; a closed crew has no processes.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from torchlazy.runtime.toolchains import triton_worker
from torchlazy.runtime.toolchains.toolchain_cpp import available_cores

# A child takes half a second to a second of processor time to start, a kernel a quarter to half of one. The convnet of
# cold_start.py has 56 of them (26 s on a busy machine) for 171 operators: two children were half of its cold start.
_OPERATORS_A_CHILD = 32
_KERNELS_A_CHILD = 4
_MOST_CHILDREN = 16
_ahead: TritonCrew | None = None


class TritonCrew:
    """Children that have started, and import triton while their parent still plans: half a second to a second each."""

    def __init__(self, size: int) -> None:
        self.children: list[subprocess.Popen[str]] = []
        self.grow(size)

    def grow(self, size: int) -> None:
        """Start children until there are so many."""
        command = [sys.executable, triton_worker.__file__]
        while len(self.children) < size:
            self.children.append(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
            )

    def compile(self, jobs: Sequence[dict[str, Any]]) -> None:
        """Compile the jobs, each by the first child that is free; returns when all are done or have failed."""
        waiting = deque(jobs)
        name = "torchlazy compiles for a GPU"
        threads = [
            threading.Thread(target=_feed, args=(child, waiting), name=name, daemon=True) for child in self.children
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def close(self) -> None:
        """End the children, idle or not."""
        for child in self.children:
            child.kill()
        for child in self.children:
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        self.children = []


def _feed(child: subprocess.Popen[str], waiting: deque[dict[str, Any]]) -> None:
    assert child.stdin is not None and child.stdout is not None
    while True:
        try:
            job = waiting.popleft()
        except IndexError:
            return
        try:
            child.stdin.write(json.dumps(job) + "\n")
            child.stdin.flush()
        except OSError:  # it died before, of another
            waiting.appendleft(job)
            return
        if not child.stdout.readline():
            return  # it died of this one, which its parent compiles again


@contextlib.contextmanager
def crew_ahead(operators: int) -> Any:
    """A block in which a program of so many operators is planned and its kernels are compiled: children for these start
    at once. Nothing where there is but one core, or little to compile."""
    global _ahead
    size = min(available_cores(), operators // _OPERATORS_A_CHILD, _MOST_CHILDREN)
    if size < 2:
        yield
        return
    _ahead = crew = TritonCrew(size)
    try:
        yield
    finally:
        _ahead = None
        crew.close()


def compile_with_crew(jobs: Sequence[dict[str, Any]]) -> None:
    """Have the crew that waits compile the jobs, or one made for them; it grows where the kernels are many. Those that
    take longest should come first."""
    crew = _ahead or TritonCrew(min(available_cores(), len(jobs) // 2, _MOST_CHILDREN))
    try:
        crew.grow(min(available_cores(), len(jobs) // _KERNELS_A_CHILD, _MOST_CHILDREN))
        crew.compile(jobs)
    finally:
        if crew is not _ahead:
            crew.close()

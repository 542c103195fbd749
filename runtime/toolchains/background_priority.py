"""Background work in Python that yields: after each millisecond of work it sleeps as long.

Python's threads take turns by the interpreter's lock. A thread that computes keeps it for five milliseconds at a time,
and takes it whenever another one releases it for a moment, as torch does in each operator: a step of some hundred
operators would wait for as many turns. One that sleeps in between costs a step hardly more than its own time again.

It sleeps between two imports, and where such work calls `breathe`.

Invariant: what is done inside does not depend on it; while another thread waits for it (`without_yielding`) it does not
sleep.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# At nice 7 a worker gets a sixth of a core that the program uses as well: the step waits little, the compiler gets on.
# `benchmarks/cold_start.py --nice` shows both: on two busy cores steps took 1.40 and 1.45 of their time at nice 5 (full
# speed after 13 and 11 s), 1.24 and 1.21 at 7 (17 and 22 s), 1.17 and 1.25 at 10 (41 and 28 s).
NICE = int(os.environ.get("TORCHLAZY_WORKER_NICE", "7"))
SECONDS = 0.001  # of work, and of sleep, in turns
_waiting: list[None] = []  # one for each who waits
_thread = threading.local()


def breathe() -> None:
    """Sleep, in a thread that gives way, if it has worked for long enough."""
    end = getattr(_thread, "end", None)
    if end is not None and time.perf_counter() > end:
        if not _waiting:
            time.sleep(SECONDS)
        _thread.end = time.perf_counter() + SECONDS


class _BetweenImports:
    """Finds no module, but is asked for each. It is put among those who find them once and stays: compiled calls may be
    guarded on that list, and other threads walk it."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        breathe()


sys.meta_path.insert(0, _BetweenImports)


@contextmanager
def giving_way() -> Iterator[None]:
    """This thread gives way inside."""
    before, _thread.end = getattr(_thread, "end", None), time.perf_counter() + SECONDS
    try:
        yield
    finally:
        _thread.end = before


def has_waiters() -> bool:
    """Whether a thread waits for what is done in the background."""
    return bool(_waiting)


@contextmanager
def without_yielding() -> Iterator[None]:
    """Somebody waits for what is done in the background."""
    _waiting.append(None)
    try:
        yield
    finally:
        _waiting.pop()

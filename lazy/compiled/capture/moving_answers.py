"""What answers differently from call to call: clocks, files, random bytes, what an allocator holds.

No guard can tell what they will say, so a captured call that asks one of them is refused: it runs its Python. The
native library leads these functions through its own; without it the interpreter tells of each call of a function in C,
as it tells profilers, which doubles the time of a capture. The names in code would not do, since much code names `open`
and seldom gets there.

Invariant: where the answer goes is not looked at, but what libraries ask to their own ends is left out (`_INNER`).
Without the native library nothing is seen under a profiler of Python's (`cProfile`).
"""

from __future__ import annotations

import builtins
import datetime
import functools
import gc
import io
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torchlazy.lazy.torch_private.dispatch import readers_of_devices
from torchlazy.runtime.native.recorder_library import LIBRARY

_CLOCKS = (
    "time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time",
    "process_time_ns", "thread_time", "thread_time_ns", "clock_gettime", "clock_gettime_ns", "localtime", "gmtime",
    "ctime", "asctime", "strftime",
)  # fmt: skip
_OF_SYSTEM = (
    "open", "read", "stat", "lstat", "fstat", "access", "listdir", "scandir", "readlink", "statvfs", "urandom",
    "getrandom", "getloadavg", "times",
)  # fmt: skip
_READS = ("read", "read1", "readinto", "readline", "readlines", "readall")
_INNER = frozenset({
    "torchlazy", "torch", "importlib", "zipimport", "linecache", "inspect", "tokenize", "traceback", "warnings",
    "logging", "threading", "queue", "concurrent", "multiprocessing", "asyncio",
})  # fmt: skip
_HANDED_ON = ("torch.serialization", "torch.cuda", "torch.hub", "torch.utils.data")  # their callers get the answers
_PASSED_THROUGH = frozenset({*sys.stdlib_module_names, "triton", "sympy"}) - {"__main__"}


@functools.cache
def _askers() -> dict[Any, str]:
    """Functions and methods in C, and what each reads."""
    found: dict[Any, str] = {}

    def add(what: str, owner: Any, names: tuple[str, ...]) -> None:
        found.update((getattr(owner, name), what) for name in names if hasattr(owner, name))

    add("a clock", time, _CLOCKS)
    add("a clock", datetime.datetime, ("now", "utcnow", "today"))
    add("a clock", datetime.date, ("today",))
    add("the file system or random bytes", os, _OF_SYSTEM)
    add("a file", builtins, ("open", "input"))
    for kind in (io.FileIO, io.BufferedReader, io.BufferedRandom, io.TextIOWrapper):
        add("a file", kind, _READS)
    add("another process", sys.modules.get("_posixsubprocess"), ("fork_exec",))
    add("a socket", socket.SocketType, ("recv", "recv_into", "recvfrom", "recvfrom_into", "accept"))
    add("a socket", select, ("select", "poll"))
    add("Python's memory", sys, ("getrefcount", "getallocatedblocks"))
    add("Python's memory", gc, ("get_count", "get_objects", "get_stats", "get_referrers"))
    found.update(dict.fromkeys(readers_of_devices(), "an allocator or an event of the device"))
    return found


@contextmanager
def moving_answers(refuse: Callable[[str], None]) -> Iterator[None]:
    """Inside, `refuse` is told that the code of this thread asks for what may have changed at the next call."""
    askers = _askers()
    names = {asker.__name__ for asker in askers}

    def told(function: Any, frame: FrameType | None = None) -> None:
        if not _asks_for_itself(frame or sys._getframe(1)):
            refuse(f"it asks what changes unseen: {_what(function)} (`{function.__name__}`)")

    def saw(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and function.__name__ in names and _what(function):
            told(function, frame)

    native = LIBRARY.at_once()
    if native is None:
        is_on, end = sys.getprofile() is None, functools.partial(sys.setprofile, None)
        if is_on:
            sys.setprofile(saw)
    else:
        is_on, end = native.watch_calls(list(askers), told), native.end_watch
        if not is_on:
            refuse("another thread is captured at the same time")
    try:
        yield
    finally:
        if is_on:
            end()


def _what(function: Any) -> str:
    """What the function reads, be it bound to an object or to a subclass; empty for others."""
    owner = getattr(function, "__self__", None)
    kinds = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
    same = [function, *(getattr(kind, function.__name__, None) for kind in kinds)]
    return next((found for one in same if (found := _askers().get(one))), "")


def _asks_for_itself(frame: FrameType | None) -> bool:
    """Whether the answer stays in a library: the innermost code that is not the standard library's decides."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        package = name.partition(".")[0]
        if package in _INNER:
            return not name.startswith(_HANDED_ON)
        if package not in _PASSED_THROUGH:
            return False
        frame = frame.f_back
    return True


__all__ = ["moving_answers"]

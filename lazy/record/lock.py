"""The recorder's lock: whoever holds it has the running trace for itself.

Invariant: while any thread holds the lock nobody walks (record/follow/compiled_step.py), and what was walked before
stands in the trace's lists. A walk itself takes no lock; it is the last release that lets the next one begin.

Python's cycle collector waits while the lock is held: it calls what the user wrote (`__del__`, callbacks of weak
references) wherever objects are made, and what computes there on lazy tensors would record into half an operator, or
into a captured call that is no part of it; to look through all that a capture makes took a quarter of its time, too.
Walks need no such care.

Interrupts (Ctrl-C, a timer's handler that raises) come between any two calls. One that comes while the lock is taken or
given back leaves it as it was before, or given back: a lock that nobody holds would stop other threads for ever.
"""

from __future__ import annotations

import _thread
import gc
import re
import weakref
from typing import Any, Protocol

from torchlazy.runtime.collector import taken_over_by

_collects, _collect, _wait = gc.isenabled, gc.enable, gc.disable


class Trace(Protocol):
    """What is locked."""

    def halt(self) -> None:
        """No walk from here on; what was walked is written down."""

    def go_on(self) -> None:
        """Walks may begin, if the trace stands where one can."""


class TraceLock:
    """A re-entrant lock that halts the trace's walks while it is held."""

    __slots__ = ("__weakref__", "_depth", "_lock", "_pauses", "_trace")

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._lock: Any = _thread.RLock()
        self._depth = 0  # how often the thread that holds the lock has taken it
        self._pauses = 0  # the depth at which the cycle collector was told to wait; 0 where it was not
        _locks.add(self)

    def __enter__(self) -> bool:
        entered = False
        try:
            self._lock.acquire()
            self._depth += 1
            entered = True
            if _collects():
                self._pauses = self._depth
                _wait()
            if self._depth == 1:
                self._trace.halt()
            return True
        except BaseException:
            if entered:
                self.__exit__()
            else:
                self._forget_uncounted()
            raise

    def __exit__(self, *raised: object) -> None:
        try:
            if self._depth == 1:
                self._trace.go_on()
        finally:
            try:
                if self._pauses == self._depth:
                    _collect()
                    self._pauses = 0
            finally:
                self._depth -= 1
                self._lock.release()

    def end_pause(self) -> None:
        """The process is a copy of one whose thread held the lock: what was told to wait goes on."""
        self._resume()

    def takes_over_pause(self) -> bool:
        """Whether somebody holds the lock: the collector, which another thread stopped before, goes on after that."""
        if not self._depth:
            return False
        self._pauses = self._pauses or 1
        return True

    def _resume(self) -> int:
        pauses, self._pauses = self._pauses, 0
        if pauses:
            _collect()
        return pauses

    def _pause_again(self, pauses: int) -> None:
        if pauses and _collects():
            self._pauses = pauses
            _wait()

    @property
    def depth(self) -> int:
        """How often the thread that holds the lock has taken it; for that thread to ask."""
        return self._depth

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock as `threading.RLock` does; False where it was not free in time."""
        if not self._lock.acquire(blocking, timeout):
            return False
        self._depth += 1
        if self._depth == 1:
            self._trace.halt()
        return True

    def release(self) -> None:
        """Give the lock back once. RuntimeError where this thread does not hold it."""
        if not self._lock._is_owned():
            raise RuntimeError("the recorder's lock is released by a thread that does not hold it")
        self.__exit__()

    def is_mine(self) -> bool:
        """Whether this thread holds the lock."""
        return bool(self._lock._is_owned())

    def _forget_uncounted(self) -> None:
        """An interrupt came as the lock had just been taken, before that was counted: give it back."""
        if self._lock._is_owned():
            taken = re.search(r"count=(\d+)", repr(self._lock))
            if taken is not None and int(taken[1]) > self._depth:
                self._lock.release()

    def _release_save(self) -> tuple[int, int, Any]:
        """Give the lock back as often as it was taken, as a Condition does to wait."""
        depth, pauses = self._depth, self._resume()
        self._trace.go_on()
        self._depth = 0
        return depth, pauses, self._lock._release_save()

    def _acquire_restore(self, saved: tuple[int, int, Any]) -> None:
        depth, pauses, state = saved
        self._lock._acquire_restore(state)
        self._depth = depth
        self._pause_again(pauses)
        self._trace.halt()


_locks: weakref.WeakSet[TraceLock] = weakref.WeakSet()
taken_over_by.append(lambda: any([lock.takes_over_pause() for lock in _locks]))

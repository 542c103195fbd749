"""The recorder's lock: the thread that holds it has the running trace to itself.

Python's cycle collector is paused while the lock is held: it calls user code (`__del__`, callbacks of weak references)
wherever objects are made, and lazy operators in there would be recorded into half an operator, or into a captured call
that they do not belong to. Scanning all that a capture makes also took a quarter of its time.

Interrupts (Ctrl-C, a timer's handler that raises) may come between any two calls. One that comes while the lock is
acquired or released leaves it as it was before, or released: a lock without an owner would block other threads forever.

Invariant: when a thread releases the lock for the last time, the trace is as its operators left it.
"""

from __future__ import annotations

import _thread
import re
from collections.abc import Callable
from typing import Any, Protocol

from torchlazy.runtime.collector import is_on, pausing, turn_off, turn_on


class Trace(Protocol):
    """The trace that is locked."""

    def settle(self) -> None:
        """An operator was recorded: run what others may read in memory that they share."""


class TraceLock:
    """A re-entrant lock; the trace settles when it is released."""

    __slots__ = ("__weakref__", "_depth", "_lock", "_pauses", "_trace", "at_release")

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._lock: Any = _thread.RLock()
        self._depth = 0  # how often the thread that holds the lock has acquired it
        self._pauses = 0  # the depth at which the cycle collector was paused; 0: it was not
        self.at_release: Callable[[], Any] | None = None  # called once the thread that holds the lock has released it
        pausing.add(self)

    def __enter__(self) -> bool:
        entered = False
        try:
            self._lock.acquire()
            self._depth += 1
            entered = True
            if is_on():
                self._pauses = self._depth
                turn_off()
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
                self._trace.settle()
        finally:
            try:
                if self._pauses == self._depth:
                    turn_on()
                    self._pauses = 0
            finally:
                self._depth -= 1
                self._lock.release()
        if self.at_release is not None and not self._lock._is_owned():
            waiting, self.at_release = self.at_release, None
            if waiting is not None:
                waiting()

    def end_pause(self) -> None:
        """After a fork by a thread that held the lock: the cycle collector continues."""
        self._resume()

    def will_collect(self) -> bool:
        """Whether the cycle collector continues when this lock is released."""
        return self._pauses > 0

    def stays_off(self) -> None:
        """The program turned the cycle collector off meanwhile."""
        self._pauses = 0

    def takes_over_pause(self) -> bool:
        """Whether a thread holds the lock: its release then ends the pause that another thread began."""
        if not self._depth:
            return False
        self._pauses = self._pauses or 1
        return True

    def _resume(self) -> int:
        pauses, self._pauses = self._pauses, 0
        if pauses:
            turn_on()
        return pauses

    def _pause_again(self, pauses: int) -> None:
        if pauses and is_on():
            self._pauses = pauses
            turn_off()

    @property
    def depth(self) -> int:
        """How often the thread that holds the lock has acquired it; only that thread may ask."""
        return self._depth

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire the lock as `threading.RLock` does; False where it was not free in time."""
        if not self._lock.acquire(blocking, timeout):
            return False
        self._depth += 1
        return True

    def release(self) -> None:
        """Release the lock once. RuntimeError where this thread does not hold it."""
        if not self._lock._is_owned():
            raise RuntimeError("the recorder's lock is released by a thread that does not hold it")
        self.__exit__()

    def is_mine(self) -> bool:
        """Whether this thread holds the lock."""
        return bool(self._lock._is_owned())

    def is_held_by(self, thread: int) -> bool:
        """Whether the thread of this identity holds the lock; any thread may ask."""
        return f" owner={thread} " in repr(self._lock)

    def _forget_uncounted(self) -> None:
        """An interrupt came after the lock was acquired and before that was counted: release it."""
        if self._lock._is_owned():
            taken = re.search(r"count=(\d+)", repr(self._lock))
            if taken is not None and int(taken[1]) > self._depth:
                self._lock.release()

    def _release_save(self) -> tuple[int, int, Any]:
        """Release the lock as often as it was acquired, as a Condition does to wait."""
        depth, pauses = self._depth, self._resume()
        self._trace.settle()
        self._depth = 0
        return depth, pauses, self._lock._release_save()

    def _acquire_restore(self, saved: tuple[int, int, Any]) -> None:
        depth, pauses, state = saved
        self._lock._acquire_restore(state)
        self._depth = depth
        self._pause_again(pauses)

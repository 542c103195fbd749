"""Loads programs in the background: from a worker's answer or a stored file to the step that swaps them in.

Loading reads files, makes a function of a program's text, imports Triton and brings kernels to the GPU. The thread that
talks to the compile worker does it, or for stored programs a thread of its own; it yields to the step.

Invariant: one program is loaded at a time, none during a fork, and none is left half loaded at exit: a thread that is
ended inside of torch would take the process with it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchlazy.lazy.torch_private.dispatch import below_autograd
from torchlazy.runtime.toolchains.background_priority import giving_way, without_yielding
from torchlazy.runtime.toolchains.capture_pause import beside_captures

_PATIENCE = 5.0  # seconds, before a fork and at the end of the process
_ended = False


class _Loading:
    """The right to load."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_forking = threading.local()


_loading = _Loading()


@dataclass(eq=False)
class Load:
    """Something that is loaded: `value` or `error` is set once it `is_done`."""

    make: Callable[[], Any] | None
    is_done: bool = False
    value: Any = None
    error: Exception | None = None
    seconds: float = 0.0

    def run(self) -> Load:
        """Load it, in this thread."""
        start = time.perf_counter()
        assert self.make is not None
        try:
            with _loading.lock:
                if _ended:
                    raise RuntimeError("the process ends")
                with giving_way(), beside_captures(), below_autograd():
                    self.value = self.make()
        except Exception as error:  # reported by the caller that asks for it
            self.error = error
        self.make = None
        self.seconds = time.perf_counter() - start
        self.is_done = True
        return self


class BackgroundLoader:
    """A thread that loads what is submitted, one after the other, and ends when nothing is left."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Load] = deque()
        self._is_running = False

    def submit(self, make: Callable[[], Any]) -> Load:
        """Have it loaded; returns at once."""
        load = Load(make)
        with self._changed:
            self._waiting.append(load)
            if self._is_running:
                return load
            self._is_running = True
        try:
            threading.Thread(target=self._serve, name="torchlazy load", daemon=True).start()
        except RuntimeError:  # the interpreter is ending, or the system has no threads left
            self._serve()
        return load

    def wait(self) -> None:
        """Return when nothing is being loaded."""
        with without_yielding(), self._changed:
            self._changed.wait_for(lambda: not self._is_running)

    def _serve(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._is_running = False
                    self._changed.notify_all()
                    return
                load = self._waiting.popleft()
            load.run()


@atexit.register
def _at_exit() -> None:
    global _ended
    _ended = True
    with without_yielding():
        if _loading.lock.acquire(timeout=_PATIENCE):
            _loading.lock.release()


def _before_fork() -> None:
    with without_yielding():
        _loading.is_forking.held = _loading.lock.acquire(timeout=_PATIENCE)


def _after_fork() -> None:
    if getattr(_loading.is_forking, "held", False):
        _loading.is_forking.held = False
        with contextlib.suppress(RuntimeError):
            _loading.lock.release()


def _after_fork_in_child() -> None:
    _loading.lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)

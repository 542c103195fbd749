"""Signal handlers run between operators: one inside of an operator would record into half of it.

CPython calls a handler between any two calls of the main thread, those of the recorder too. A handler that comes while
this thread holds the recorder's lock (an operator, a cut, a call that is being captured) is called when it releases the
lock; after `_PATIENCE` it runs in any case, for a wait may be what it is meant to end.

So does one that comes in a finalizer, where Python prints what is raised and goes on: the end of an operator lets go of
what it computed with, and that is where a signal is often looked for (three of ten Ctrl-C were lost in training steps).
So does one that comes while a block of ours begins or ends, such as `lazy_mode`: Python would not leave a block that
was interrupted after it had begun, and everything that the program did afterwards would be recorded.

Python's own Ctrl-C is such a handler too: inside of a cut it would lose the values that are being computed, gradients
among them. A second Ctrl-C does not wait.

Invariant: `signal.signal` and `signal.getsignal` deal in the user's handlers. No signal of ours is sent while the lock
is held (Python makes one call of two signals: a second Ctrl-C would be lost), nor for a handler that has run.
"""

from __future__ import annotations

import _thread
import _weakrefset
import contextlib
import functools
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from torchlazy.lazy.record.recorder import Recorder

_PATIENCE = 5.0  # seconds
_MOMENT = 0.001  # seconds
_CALLBACKS = frozenset({_weakrefset.__file__, weakref.__file__})  # all that they call back is named so:
_FINALIZERS = frozenset({"__del__", "_remove", "remove"})
_ENDS = frozenset({"__enter__", "__exit__"})  # of blocks
_PACKAGE = str(Path(__file__).parents[2])
_set, _get = signal.signal, signal.getsignal


def _is_in_finalizer(frame: FrameType | None) -> bool:
    """Whether what is raised in this frame would be printed and lost."""
    code = frame.f_code if frame is not None else None
    return code is not None and (
        code.co_name == "__del__" or (code.co_name in _FINALIZERS and code.co_filename in _CALLBACKS)
    )


def _begins_or_ends_block(frame: FrameType | None) -> bool:
    """Whether a block of this package begins or ends in the frame, or in one that waits for it."""
    while frame is not None:
        code = frame.f_code
        if code.co_name in _ENDS:
            if code.co_filename == contextlib.__file__:
                code = getattr(getattr(frame.f_locals.get("self"), "gen", None), "gi_code", None) or code
            if code.co_filename.startswith(_PACKAGE):
                return True
        frame = frame.f_back
    return False


class BetweenOperators:
    """A handler that waits until the recorder is between two operators."""

    def __init__(self, handler: Callable[[int, Any], Any], recorder: Recorder) -> None:
        self.handler = handler
        self._recorder = recorder
        self._until = 0.0  # when patience ends; 0: nothing waits
        self._is_repeated = False  # the next call is ours, not the user's

    def __call__(self, number: int, frame: Any) -> Any:
        is_new, self._is_repeated = not self._is_repeated, False
        is_second = is_new and self._until and self.handler is signal.default_int_handler
        is_inside = self._recorder.lock.is_mine() or _begins_or_ends_block(frame)
        if _is_in_finalizer(frame) or (is_inside and not is_second):
            now = time.monotonic()
            self._until = self._until or now + _PATIENCE
            if now < self._until:
                if self._recorder.lock.is_mine():
                    self._recorder.lock.at_release = functools.partial(self._at_release, number)
                _thread.start_new_thread(self._once_more, (number,))
                return None
        elif not is_new and not self._until:
            return None  # a second Ctrl-C came before
        self._until = 0.0
        return self.handler(number, frame)

    def _at_release(self, number: int) -> None:
        frame = sys._getframe(2)  # behind the lock's own
        if self._until and not (_is_in_finalizer(frame) or _begins_or_ends_block(frame)):
            self._until = 0.0
            self.handler(number, frame)

    def _once_more(self, number: int) -> None:
        main = threading.main_thread().ident or 0
        send = functools.partial(_thread.interrupt_main, signal.Signals(number))
        if hasattr(signal, "pthread_kill"):  # it also ends what the main thread waits for meanwhile, such as a sleep
            send = functools.partial(signal.pthread_kill, main, number)
        time.sleep(_MOMENT)
        while self._recorder.lock.is_held_by(main) and time.monotonic() < self._until:
            time.sleep(_MOMENT)
        if self._until:  # from here CPython changes to no other thread until the signal is sent
            self._is_repeated = True
            send()


def _theirs(handler: Any) -> Any:
    return handler.handler if isinstance(handler, BetweenOperators) else handler


def _is_users(handler: Any) -> bool:
    is_ours = isinstance(handler, BetweenOperators)
    return callable(handler) and not is_ours


def install(recorder: Recorder) -> None:
    """Make handlers wait for the recorder: those set already, and those set from now on."""

    @functools.wraps(_set)
    def set_handler(signalnum: int, handler: Any) -> Any:
        is_users = _is_users(handler) and not isinstance(handler, signal.Handlers)
        return _theirs(_set(signalnum, BetweenOperators(handler, recorder) if is_users else handler))

    @functools.wraps(_get)
    def get_handler(signalnum: int) -> Any:
        return _theirs(_get(signalnum))

    signal.signal, signal.getsignal = set_handler, get_handler
    if threading.current_thread() is threading.main_thread():
        for number in signal.valid_signals():
            found = _get(number)
            if _is_users(found) and not isinstance(found, signal.Handlers):
                set_handler(number, found)


__all__ = ["install"]

"""Signal handlers run between operators: one inside of an operator would record into half of it.

CPython calls a handler between any two calls of the main thread, those of the recorder too. A handler that comes while
this thread holds the recorder's lock (an operator, a cut, a call that is being captured) is called again a moment
later, until the lock is free; after `_PATIENCE` it runs in any case, for a wait may be what it is meant to end.

Invariant: `signal.signal` and `signal.getsignal` deal in the user's handlers. Python's own Ctrl-C is not delayed.
"""

from __future__ import annotations

import _thread
import functools
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from torchlazy.lazy.record.recorder import Recorder

_PATIENCE = 5.0  # seconds
_MOMENT = 0.001  # seconds
_set, _get = signal.signal, signal.getsignal


class BetweenOperators:
    """A handler that waits until the recorder is between two operators."""

    def __init__(self, handler: Callable[[int, Any], Any], recorder: Recorder) -> None:
        self.handler = handler
        self._recorder = recorder
        self._until = 0.0  # when patience ends; 0: nothing waits

    def __call__(self, number: int, frame: Any) -> Any:
        if self._recorder.lock.is_mine():
            now = time.monotonic()
            self._until = self._until or now + _PATIENCE
            if now < self._until:
                _thread.start_new_thread(_once_more, (number,))
                return None
        self._until = 0.0
        return self.handler(number, frame)


def _once_more(number: int) -> None:
    time.sleep(_MOMENT)
    _thread.interrupt_main(signal.Signals(number))


def _theirs(handler: Any) -> Any:
    return handler.handler if isinstance(handler, BetweenOperators) else handler


def _is_users(handler: Any) -> bool:
    is_ours = isinstance(handler, BetweenOperators)
    return callable(handler) and not is_ours and handler is not signal.default_int_handler


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

"""A captured call has the running trace for itself, but for threads that it starts or that work for it.

Invariant: other threads wait until the capture is over; no thread waits for ever. A call that starts a thread gives the
recorder free for the rest of it, and has no template; so does a backward on a GPU, which torch runs in a thread of its
own, only that this one records for the call.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchlazy.lazy.recorder import Recorder

_start = threading.Thread.start


@contextmanager
def alone(recorder: Recorder) -> Iterator[None]:
    """The recorder's lock is held, by the caller, and stays so unless the block starts a thread."""
    owner = threading.get_ident()
    lock: Any = recorder.lock
    released: list[Any] = []

    def start(thread: threading.Thread) -> None:
        is_ours = recorder.busy  # a cut compiles and runs: its threads record nothing, and the lock is in use
        if threading.get_ident() == owner and recorder.capture is not None and not released and not is_ours:
            recorder.capture.refuse("it starts a thread")
            released.append(lock._release_save())  # as a Condition does to wait
        _start(thread)

    threading.Thread.start = start  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        threading.Thread.start = _start  # type: ignore[method-assign]
        if released:
            lock._acquire_restore(released[0])


@contextmanager
def given_free(recorder: Recorder) -> Iterator[None]:
    """The recorder's lock is free inside, for the threads in which torch runs backwards on GPUs."""
    lock: Any = recorder.lock
    held = lock._release_save()
    try:
        yield
    finally:
        lock._acquire_restore(held)

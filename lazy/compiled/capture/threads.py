"""A captured call has the running trace for itself, but for threads that it starts or that work for it.

Also here: frames of Python that stand between an operator of a captured call and its caller.

Invariant: other threads wait until the capture is over; no thread waits for ever. A call that starts a thread releases
the recorder for the rest of it, and has no template; so does one that leaves a function to a future, which a thread of
torch's calls. A backward on a GPU, which torch runs in a thread of its own, gets it too, and records for the call.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.trace.user_frames import LAZY_FOLDER
from torchlazy.runtime.collector import paused_collector

_start = threading.Thread.start
_FUTURE: Any = torch._C.Future
_CALLBACKS = ("then", "add_done_callback")
_OUR_THREADS = "torchlazy "  # which compile and load: the first capture of a process begins some of them


@contextmanager
def exclusive(recorder: Recorder) -> Iterator[None]:
    """The recorder's lock is held, by the caller, and stays so unless the block gives work to a thread."""
    owner = threading.get_ident()
    lock: Any = recorder.lock
    released: list[Any] = []
    entered = lock.depth
    callbacks = {name: getattr(_FUTURE, name) for name in _CALLBACKS}

    def let_go(why: str) -> None:
        # A cut compiles and runs, or an operator is recorded: these threads record nothing, and the lock is in use.
        is_ours = recorder.busy or lock.depth > entered
        if threading.get_ident() == owner and recorder.capture is not None and not released and not is_ours:
            recorder.capture.refuse(why)
            if lock.is_mine():  # not where it is released for the whole call
                released.append(lock._release_save())  # as a Condition does to wait

    def start(thread: threading.Thread) -> None:
        if not thread.name.startswith(_OUR_THREADS):
            let_go("it starts a thread")
        _start(thread)

    def leaving(name: str) -> Callable[..., Any]:
        def leave(future: Any, callback: Any) -> Any:
            let_go("it leaves a function to a future")
            return callbacks[name](future, callback)

        return leave

    threading.Thread.start = start  # type: ignore[method-assign,assignment]
    for name in _CALLBACKS:
        setattr(_FUTURE, name, leaving(name))
    try:
        yield
    finally:
        threading.Thread.start = _start  # type: ignore[method-assign]
        for name, function in callbacks.items():
            setattr(_FUTURE, name, function)
        if released:
            lock._acquire_restore(released[0])


@contextmanager
def recorder_released(recorder: Recorder) -> Iterator[None]:
    """The recorder's lock is released inside, for the threads in which torch runs backwards on GPUs. Python's collector
    stays paused, so that the call's garbage is young when it is looked for: a full collection takes 0.3 s."""
    lock: Any = recorder.lock
    held = lock._release_save()
    try:
        with paused_collector():
            yield
    finally:
        lock._acquire_restore(held)


_TORCH = str(Path(torch.__file__).parent)


def is_read_by_torch() -> bool:
    """Whether torch's own Python asked for the number (a step count): it tests floats by `isinstance`."""
    frame = sys._getframe(1)
    while frame is not None:
        if not is_passing(frame):
            return frame.f_code.co_filename.startswith(_TORCH)
        frame = frame.f_back  # type: ignore[assignment]
    return False


def is_passing(frame: FrameType) -> bool:
    """Whether a frame stands between an operator and its caller."""
    name = frame.f_code.co_filename
    if name.endswith("torch/_library/autograd.py"):
        return frame.f_code.co_name != "forward"  # which passes the operator's numbers to its backward, too
    return name.startswith(LAZY_FOLDER) or name.endswith(_PASSING)


# Python of torch that stands between an operator and its caller.
_PASSING = (
    "torch/_ops.py", "torch/overrides.py", "torch/_tensor.py", "torch/_compile.py", "utils/_python_dispatch.py",
    "_dynamo/eval_frame.py", "torch/_library/custom_ops.py",
)  # fmt: skip


__all__ = ["is_passing", "is_read_by_torch"]

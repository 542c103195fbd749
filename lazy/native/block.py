"""`lazy_mode` by the native recorder: a dispatch key of this thread, and methods that read memory without an operator.

Invariant: a block that begins natively ends natively, whatever is switched meanwhile; inside, tensors are of the
ordinary classes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torchlazy.lazy.config import config
from torchlazy.lazy.native.programs import Programs
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.runtime.native.recorder_library import LIBRARY

# They read memory or give its address away, and may be called on an alias that was there before the memory was written.
_READERS = (
    "tolist", "numpy", "__array__", "data_ptr", "const_data_ptr", "mutable_data_ptr", "untyped_storage", "storage",
    "_typed_storage", "__dlpack__", "__reduce_ex__", "__deepcopy__", "__repr__", "__format__", "share_memory_",
    "pin_memory", "is_shared",
)  # fmt: skip


class NativeBlocks:
    """The native recorder's blocks. `library` is the loaded C++, None before."""

    def __init__(self) -> None:
        self.library: Any = None
        self.depth = 0  # of blocks in all threads

    def is_ready(self, recorder: Recorder, driver: Any) -> bool:
        """Whether the next block may be native: the library is there, and nobody looks at each cut."""
        if config.native != "on" or config.tiers != "on" or config.debug:
            return False
        if recorder.capture is not None or recorder.gate is not None:
            return False
        if recorder.mode_depth:
            with recorder.lock:  # a thread that learns a trace is in a block of its own as long as it has the lock
                if recorder.mode_depth:
                    return False
        if driver.is_loaded and (driver.listeners or driver.shadow is not None):
            return False
        if self.library is None:
            library = LIBRARY.if_there()
            if library is None:
                return False
            library.set_hooks(Programs(recorder, driver, library))
            self.library = library
            _watch_readers(library)
        return True

    def enter(self) -> bool:
        """Record this thread's operators; returns whether they were recorded before."""
        self.depth += 1
        return bool(self.library.include(True))

    def leave(self, was_on: bool, cause: str) -> None:
        """End what `enter` began. Raises what the program raises that runs now."""
        self.depth -= 1
        if was_on:
            return
        self.library.include(False)
        self.library.cut(cause)

    def cut(self, cause: str) -> None:
        """Run what is deferred."""
        if self.depth:
            self.library.cut(cause)

    def suspend(self, cause: str) -> bool:
        """From here this thread's operators run at once and are not recorded; returns whether they were."""
        if not self.depth:
            return False
        self.library.cut(cause)
        return bool(self.library.include(False))

    def resume(self, was_on: bool) -> None:
        """End what `suspend` began."""
        if was_on:
            self.library.include(True)

    @contextmanager
    def suspended(self, cause: str) -> Iterator[None]:
        """Inside, operators of this thread run at once and are not recorded."""
        was_on = self.suspend(cause)
        try:
            yield
        finally:
            self.resume(was_on)


BLOCKS = NativeBlocks()


def _watch_readers(library: Any) -> None:
    """Why wrapped: an alias of memory that was written since gives its address without asking for the value."""
    before_read, include = library.before_read, library.include

    def reading(method: Any) -> Any:
        @functools.wraps(method)
        def read(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not before_read():
                return method(self, *args, **kwargs)
            try:
                return method(self, *args, **kwargs)
            finally:
                include(True)

        return read

    for name in _READERS:
        method = getattr(torch.Tensor, name, None)
        if method is not None:
            setattr(torch.Tensor, name, reading(method))

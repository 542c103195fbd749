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
    "pin_memory", "is_shared", "apply_", "map_", "map2_",
)  # fmt: skip


class NativeBlocks:
    """The native recorder's blocks. `library` is the loaded C++, None before."""

    def __init__(self) -> None:
        self.library: Any = None
        self.depth = 0  # of blocks in all threads
        self._readers: dict[str, Any] = {}  # methods of torch.Tensor while a block is open
        self._is_watching = False
        self._kept: dict[str, Any] = {}  # those that it has of its own otherwise

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
            self._readers = _reading(library)
        return True

    def enter(self) -> bool:
        """Record this thread's operators; returns whether they were recorded before."""
        self.depth += 1
        if self.depth == 1:
            self._watch_readers()
        return bool(self.library.include(True))

    def leave(self, was_on: bool, cause: str) -> None:
        """End what `enter` began. Raises what the program raises that runs now."""
        try:
            if not was_on:
                self.library.include(False)
                self.library.cut(cause)
        finally:
            self.depth -= 1
            if not self.depth:
                self._leave_readers()

    def _watch_readers(self) -> None:
        """Why wrapped: an alias of memory that was written since gives its address without asking for the value."""
        if self._is_watching:
            return
        self._is_watching = True
        own = torch.Tensor.__dict__
        self._kept = {name: own[name] for name in self._readers if name in own}
        for name, method in self._readers.items():
            setattr(torch.Tensor, name, method)

    def _leave_readers(self) -> None:
        if not self._is_watching:  # another thread has suspended its block, too
            return
        self._is_watching = False
        for name in self._readers:
            if name in self._kept:
                setattr(torch.Tensor, name, self._kept[name])
            else:
                delattr(torch.Tensor, name)

    def cut(self, cause: str) -> None:
        """Run what is deferred."""
        if self.depth:
            self.library.cut(cause)

    def suspend(self, cause: str) -> bool:
        """From here this thread's operators run at once and are not recorded; returns whether they were."""
        if not self.depth:
            return False
        self.library.cut(cause)
        was_on = bool(self.library.include(False))
        if was_on:
            self._leave_readers()
        return was_on

    def resume(self, was_on: bool) -> None:
        """End what `suspend` began."""
        if was_on:
            self._watch_readers()
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


def _reading(library: Any) -> dict[str, Any]:
    """The methods of `_READERS`, which compute what is deferred first, and record nothing of their own."""
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

    return {name: reading(getattr(torch.Tensor, name)) for name in _READERS if hasattr(torch.Tensor, name)}

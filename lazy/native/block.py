"""`lazy_mode` by the native recorder: a dispatch key of this thread, and methods that read memory without an operator.

Invariant: a block that begins natively ends natively, whatever is switched meanwhile; inside, tensors are of the
ordinary classes.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torchlazy.lazy.config import config
from torchlazy.lazy.native.programs import Programs
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.report import metrics
from torchlazy.runtime.native.recorder_library import LIBRARY

# They read memory or give its address away, and may be called on an alias that was there before the memory was written.
_READERS = (
    "tolist", "numpy", "__array__", "data_ptr", "const_data_ptr", "mutable_data_ptr", "untyped_storage", "storage",
    "_typed_storage", "__dlpack__", "__reduce_ex__", "__deepcopy__", "__repr__", "__format__", "share_memory_",
    "pin_memory", "is_shared", "apply_", "map_", "map2_",
)  # fmt: skip
# They tell one stream of a GPU what another has launched: what is deferred is launched before.
_STREAM_CALLS = (
    (torch.cuda.Stream, ("wait_stream", "wait_event", "record_event")),
    (torch.cuda.Event, ("record", "wait")),
)


_FORK_PATIENCE = 2000  # milliseconds


class NativeBlocks:
    """The native recorder's blocks. `library` is the loaded C++, None before."""

    def __init__(self) -> None:
        self.library: Any = None
        self.depth = 0  # of blocks in all threads
        self.has_device = False  # whether there are lazy tensors that are recorded natively
        self.may_record = False  # whether anything is, in any thread
        self._readers: list[tuple[type, str, Any]] = []  # methods of a class while a block is open
        self._is_watching = False
        self._suspended = self._suspended_blocks = 0  # parts that do not come here; those of them inside a block
        self._gate: Callable[[str], bool] | None = None
        self._switching = threading.Lock()  # of the readers
        self._has_gpu = False
        self._is_without_cudnn = False
        self._kept: dict[tuple[type, str], Any] = {}  # those that it has of its own otherwise

    def way(self, recorder: Recorder, driver: Any) -> Literal["native", "python", "at once"]:
        """How the next block runs: "python" where somebody looks at each cut, or there is no compiler; "at once", as
        without a block, while the library is compiled."""
        if not self.serves(driver) or recorder.capture is not None or recorder.gate not in (None, self._gate):
            return "python"
        if recorder.mode_depth:
            with recorder.lock:  # a thread that learns a trace is in a block of its own as long as it has the lock
                if recorder.mode_depth:
                    return "python"
        if self.library is None and not self._use(LIBRARY.if_there(), recorder, driver):
            return "python" if LIBRARY.reason else "at once"
        return "native"

    def serves(self, driver: Any) -> bool:
        """Whether the settings are such that programs are recorded natively, and nobody looks at each cut."""
        if config.native != "on" or config.tiers != "on" or config.debug:
            return False
        if not hasattr(driver, "is_loaded"):  # a function that catches traces, and runs none
            return False
        return not (driver.is_loaded and (driver.listeners or driver.shadow is not None))

    def _use(self, library: Any, recorder: Recorder, driver: Any) -> bool:
        if library is None:
            return False
        library.set_hooks(Programs(recorder, driver, library))
        self.library = library
        recorder.compute_others = functools.partial(self.cut, "operators that are recorded in Python")
        self._readers = _watched(library)
        if self._gate is not None:
            self.watch_syncs(self._gate)
        self._has_gpu = torch.cuda.is_available()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=functools.partial(library.before_fork, _FORK_PATIENCE),
                after_in_parent=functools.partial(library.after_fork, False),
                after_in_child=self._after_fork,
            )
        return True

    def _after_fork(self) -> None:
        self._switching = threading.Lock()
        self.library.after_fork(True)

    def load(self, recorder: Recorder, driver: Any) -> bool:
        """Whether the library is there; else it is compiled in the background, for a later process."""
        return self.library is not None or self._use(LIBRARY.if_kept(), recorder, driver)

    def use_device(self, target: str) -> None:
        """From here on there are lazy tensors, in all threads, which `target` computes."""
        self.library.use_device(target, torch.Tensor)
        self.has_device = self.may_record = True
        self._set_readers()

    def is_open_here(self) -> bool:
        """Whether this thread's operators are recorded natively now."""
        return self.depth > 0 and bool(self.library.is_recording())

    def enter(self) -> bool:
        """Record this thread's operators; returns whether they were recorded before."""
        self.depth += 1
        self.may_record = True
        if self.depth == 1:
            self._set_readers()
            if self._has_gpu and self.library.varies_in_planned_sizes():
                self._leave_cudnn_attention()
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
                self.may_record = self.has_device
                self._set_readers()
                if self._is_without_cudnn:
                    self._is_without_cudnn = False
                    torch.backends.cuda.enable_cudnn_sdp(True)

    def _leave_cudnn_attention(self) -> None:
        """For this block: cuDNN builds a plan for each new size, 150 ms a step of GPT-2; where sizes vary torch chooses
        among the others."""
        if not torch.backends.cuda.cudnn_sdp_enabled():
            return
        torch.backends.cuda.enable_cudnn_sdp(False)
        self._is_without_cudnn = True
        metrics.fallbacks["cuDNN attention, which builds a plan for each size: others where sizes vary"] += 1

    def _set_readers(self) -> None:
        """Why wrapped: an alias of memory that was written since gives its address without asking for the value. Only
        while a block is open: torch hands the exchanged method to function modes, which know torch's own."""
        with self._switching:
            in_block = self.depth > 0 and not self._suspended_blocks
            wanted = self.may_record and (in_block or (self._gate is not None and not self._suspended))
            if wanted == self._is_watching:
                return
            self._is_watching = wanted
            if wanted:
                self._kept = {(kind, name): vars(kind)[name] for kind, name, _ in self._readers if name in vars(kind)}
                for kind, name, method in self._readers:
                    setattr(kind, name, method)
                return
            for kind, name, method in self._readers:
                if vars(kind).get(name) is not method:  # somebody else has exchanged it since
                    continue
                if (kind, name) in self._kept:
                    setattr(kind, name, self._kept[kind, name])
                else:
                    delattr(kind, name)

    def watch_syncs(self, gate: Callable[[str], bool] | None) -> None:
        """Ask `gate` before values are read, of lazy tensors and in blocks; None: no more."""
        self._gate = gate
        if self.library is None:
            return
        self.library.set_gate(gate)
        self._set_readers()

    def cut(self, cause: str) -> None:
        """Run what is deferred."""
        if self.may_record:
            if self._gate is not None:
                self._gate(cause)
            self.library.cut(cause)

    def suspend(self, cause: str) -> int:
        """From here this thread's operators run at once and are not recorded; returns what `resume` takes."""
        if not self.may_record:
            return -1
        self.library.cut(cause)
        before, counts = int(self.library.pause()), (self._suspended, self._suspended_blocks)
        try:
            self._suspended += 1
            self._suspended_blocks += before & 1
            if self._is_watching:
                self._set_readers()
        except BaseException:  # an interrupt
            self.library.restore(before)
            self._suspended, self._suspended_blocks = counts
            raise
        return before

    def resume(self, before: int) -> None:
        """End what `suspend` began."""
        if before >= 0:
            self.library.restore(before)  # first: an interrupt may come at each call
            self._suspended -= 1
            self._suspended_blocks -= before & 1
            if self.depth or self._gate is not None:
                self._set_readers()

    @contextmanager
    def suspended(self, cause: str) -> Iterator[None]:
        """Inside, operators of this thread run at once and are not recorded."""
        before = self.suspend(cause)
        try:
            yield
        finally:
            self.resume(before)


BLOCKS = NativeBlocks()


def _watched(library: Any) -> list[tuple[type, str, Any]]:
    """The methods of `_READERS` and `_STREAM_CALLS`, which compute what is deferred first. Readers' own operators are
    not recorded."""
    before_read, pause, restore = library.before_read, library.pause, library.restore

    def reading(name: str, method: Any) -> Any:
        cause = {"__repr__": "print", "__format__": "format"}.get(name, name)

        @functools.wraps(method)
        def read(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not before_read(cause, self):
                return method(self, *args, **kwargs)
            before = pause()
            try:
                return method(self, *args, **kwargs)
            finally:
                restore(before)

        return read

    def telling(method: Any) -> Any:
        @functools.wraps(method)
        def tell(*args: Any, **kwargs: Any) -> Any:
            library.cut("a stream is told what to wait for")
            return method(*args, **kwargs)

        return tell

    found: list[tuple[type, str, Any]] = [
        (torch.Tensor, name, reading(name, method))
        for name in _READERS
        if (method := getattr(torch.Tensor, name, None))
    ]
    if torch.cuda.is_available():
        found += [(kind, name, telling(getattr(kind, name))) for kind, names in _STREAM_CALLS for name in names]
    return found

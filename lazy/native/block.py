"""`lazy_mode` by the native recorder: a dispatch key of this thread.

Invariant: a block that begins natively ends natively, whatever is switched meanwhile; inside, tensors are of the
ordinary classes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torchlazy.lazy.config import config
from torchlazy.lazy.native.programs import Programs
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.report import metrics
from torchlazy.lazy.torch_private.readers import watch_methods
from torchlazy.runtime.native.recorder_library import LIBRARY

_FORK_PATIENCE = 2000  # milliseconds


class NativeBlocks:
    """The native recorder's blocks. `library` is the loaded C++, None before."""

    def __init__(self) -> None:
        self.library: Any = None
        self.depth = 0  # of blocks in all threads
        self.has_device = False  # whether there are lazy tensors that are recorded natively
        self.may_record = False  # whether anything is, in any thread
        self._gate: Callable[[str], bool] | None = None
        self._has_gpu = False
        self._is_without_cudnn = False

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
        watch_methods(library)
        if self._gate is not None:
            self.watch_syncs(self._gate)
        self._has_gpu = torch.cuda.is_available()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=functools.partial(library.before_fork, _FORK_PATIENCE),
                after_in_parent=functools.partial(library.after_fork, False),
                after_in_child=functools.partial(library.after_fork, True),
            )
        return True

    def load(self, recorder: Recorder, driver: Any) -> bool:
        """Whether the library is there; else it is compiled in the background, for a later process."""
        return self.library is not None or self._use(LIBRARY.if_kept(), recorder, driver)

    def use_device(self, target: str) -> None:
        """From here on there are lazy tensors, in all threads, which `target` computes."""
        self.library.use_device(target, torch.Tensor)
        self.has_device = self.may_record = True

    def is_open_here(self) -> bool:
        """Whether this thread's operators are recorded natively now."""
        return self.depth > 0 and bool(self.library.is_recording())

    def enter(self) -> bool:
        """Record this thread's operators; returns whether they were recorded before."""
        self.depth += 1
        self.may_record = True
        if self._has_gpu and self.depth == 1 and self.library.varies_in_planned_sizes():
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

    def watch_syncs(self, gate: Callable[[str], bool] | None) -> None:
        """Ask `gate` before values are read, of lazy tensors and in blocks; None: no more."""
        self._gate = gate
        if self.library is not None:
            self.library.set_gate(gate)

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
        return int(self.library.pause())

    def resume(self, before: int) -> None:
        """End what `suspend` began."""
        if before >= 0:
            self.library.restore(before)

    @contextmanager
    def suspended(self, cause: str) -> Iterator[None]:
        """Inside, operators of this thread run at once and are not recorded."""
        before = self.suspend(cause)
        try:
            yield
        finally:
            self.resume(before)


BLOCKS = NativeBlocks()

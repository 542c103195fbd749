"""Blocks that are outside of `lazy_mode` although called inside: compiled calls, and their backward.

Invariant: what was recorded inside has been run when the block begins, and the mode continues when it ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchlazy.lazy.native.block import BLOCKS
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.torch_private.dispatch import without_our_modes


@contextmanager
def outside_lazy_mode(recorder: Recorder) -> Iterator[None]:
    """Inside, operators on ordinary tensors run, until `lazy_mode` is entered again. A no-op outside of it."""
    if not recorder.mode_depth:
        with BLOCKS.suspended("compiled call"):
            yield
        return
    lock: Any = recorder.lock
    with lock:
        recorder.cut("compiled call")
        depth, recorder.mode_depth = recorder.mode_depth, 0
        try:
            with without_our_modes():
                yield
        finally:
            recorder.mode_depth = depth

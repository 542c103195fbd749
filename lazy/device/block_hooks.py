"""Hooks of other packages for the begin and end of a `lazy_mode` block, and before a capture.

Invariant: each hook is registered when the package starts, and does nothing where its feature is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchlazy.lazy.record.recorder import Recorder


@dataclass(frozen=True, slots=True)
class BlockHooks:
    """`begin` and `leave` run as a block is entered and left; `before_capture` returns whether it changed memory that a
    capture reads, so that the call starts again."""

    begin: Callable[[Recorder], None]
    leave: Callable[[Recorder], None]
    before_capture: Callable[[], bool]


HOOKS: list[BlockHooks] = []

__all__ = ["HOOKS", "BlockHooks"]

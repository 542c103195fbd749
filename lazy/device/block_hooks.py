"""What other rooms do when a block of `lazy_mode` begins and ends, and before a call is captured.

Invariant: each entry is there from the start of the package on, and does nothing where its feature is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchlazy.lazy.record.recorder import Recorder


@dataclass(frozen=True, slots=True)
class BlockHooks:
    """`begin` and `leave` run as a block is entered and left; `before_capture` says whether it changed memory that a
    capture reads, so that the call begins anew."""

    begin: Callable[[Recorder], None]
    leave: Callable[[Recorder], None]
    before_capture: Callable[[], bool]


HOOKS: list[BlockHooks] = []

__all__ = ["HOOKS", "BlockHooks"]

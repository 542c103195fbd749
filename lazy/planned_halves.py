"""What was found out in planning one half of a joined trace is there for the other, which is asked for next.

Invariant: nothing is kept but what the last half that was planned has left for its other half, until that takes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from torchlazy.lazy.loaded import CompileOptions
from torchlazy.lazy.trace import CutTrace, Half

Found = TypeVar("Found")

_kept: dict[str, tuple[CompileOptions, Any, Any]] = {}
"""By stage: the options and the signature of the half that will take it, and what was found."""


def for_both(stage: str, trace: CutTrace, half: Half, options: CompileOptions, find: Callable[[], Found]) -> Found:
    """What `find` gives for both halves of the trace; not asked where it was for the other one just now."""
    kept = _kept.pop(stage, None)
    if kept is not None and kept[0] == options and kept[1] == trace.signature():
        found: Found = kept[2]
        return found
    found = find()
    other = replace(trace, half=replace(half, is_second=not half.is_second))
    _kept[stage] = options, other.signature(), found
    return found

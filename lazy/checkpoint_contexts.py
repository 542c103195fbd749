"""Checkpoint regions whose context may be entered once, entered once more for a backward that is only recorded.

Where a joint is recorded, torch's engine computes the regions again, and so it does when the call's own backward comes.
Eager has one backward for such regions: contexts written as generators, and the values that a policy kept
(`create_selective_checkpoint_contexts`), are used up by it.

Invariant: after a recording each region is as it was before.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from types import CellType
from typing import Any

import torch.utils.checkpoint

_CONTEXT = "recompute_context"
"""What torch calls the context of the second computation, in the function that does it; torch has no public name."""

_frames: weakref.WeakSet[Any] = weakref.WeakSet()


def install() -> None:
    """Let regions be found while they wait for their backward."""
    kind: Any = torch.utils.checkpoint._CheckpointFrame
    init = kind.__init__

    @functools.wraps(init)
    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if _cell(self) is not None:
            _frames.add(self)

    kind.__init__ = noted


@contextlib.contextmanager
def entered_once_more() -> Iterator[None]:
    """Inside, regions may be computed again as if it were the first time; afterwards they may be once more."""
    contexts: list[tuple[CellType, Any]] = []
    values: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
    for frame in list(_frames):
        cell = _cell(frame)
        if cell is None:
            continue
        context = cell.cell_contents
        if isinstance(context, contextlib._GeneratorContextManager):
            if hasattr(context, "args"):  # it was not entered yet
                contexts.append((cell, context))
                cell.cell_contents = context._recreate_cm()  # type: ignore[attr-defined]  # as a decorator does
        elif isinstance(getattr(context, "storage", None), dict):
            kept = {key: value.copy() for key, value in context.storage.items() if isinstance(value, (dict, list))}
            values.append((context.storage, kept))
    try:
        yield
    finally:
        for cell, context in contexts:
            cell.cell_contents = context
        for storage, kept in values:
            storage.update(kept)


def _cell(frame: Any) -> CellType | None:
    """Where the function that computes the region again finds its context; None where it has the default one."""
    function = frame.recompute_fn
    code = getattr(function, "__code__", None)
    if code is None or _CONTEXT not in code.co_freevars:
        return None
    cell: CellType = function.__closure__[code.co_freevars.index(_CONTEXT)]
    return None if isinstance(cell.cell_contents, contextlib.nullcontext) else cell


__all__ = ["entered_once_more", "install"]

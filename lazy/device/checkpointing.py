"""Checkpoint regions: recomputed as they were first computed, also for a backward that is only recorded.

A region that was recorded under `lazy_mode` is also recorded when it is recomputed, whether the backward comes within
the mode or after it: else it would draw other random numbers.

Contexts of a region may be entered once. Where a joint trace is recorded, torch's engine recomputes the regions, and it
does so again when the call's own backward comes. Eager has one backward for such regions: it uses up contexts written
as generators, and the values that a policy kept (`create_selective_checkpoint_contexts`).

Invariant: a region's second computation equals its first one. After a recording each region is as it was before.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from types import CellType
from typing import Any

import torch.utils.checkpoint
from torchlazy.lazy.device.mode import RecordedBlock
from torchlazy.lazy.record.recorder import Recorder

_CONTEXT = "recompute_context"
"""Torch's name for the context of the recomputation, in the function that does it; there is no public name."""

_frames: weakref.WeakSet[Any] = weakref.WeakSet()


def install(recorder: Recorder) -> None:
    """Track regions until their backward, and record their recomputation where they were recorded before."""
    kind: Any = torch.utils.checkpoint._CheckpointFrame
    init = kind.__init__

    @functools.wraps(init)
    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if recorder.mode_depth:
            self.recompute_fn = _recorded(recorder, self.recompute_fn)
        if _cell(self) is not None:
            _frames.add(self)

    kind.__init__ = noted
    reentrant: Any = torch.utils.checkpoint.CheckpointFunction
    forward = reentrant.forward

    @functools.wraps(forward)
    def first(ctx: Any, run_function: Any, *args: Any) -> Any:
        found = forward(ctx, run_function, *args)
        if recorder.mode_depth:
            ctx.run_function = _recorded(recorder, run_function)
        return found

    reentrant.forward = staticmethod(first)


def _recorded(recorder: Recorder, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, made to be recorded as it was: a native block draws torch's numbers, and needs nothing of that."""

    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext() if recorder.mode_depth else RecordedBlock():
            return function(*args, **kwargs)

    return recorded


@contextlib.contextmanager
def entered_once_more() -> Iterator[None]:
    """Inside, regions may be recomputed without being used up; afterwards they may be recomputed once more."""
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
    """The closure cell with the context of the function that recomputes the region; None for the default context."""
    function = inspect.unwrap(frame.recompute_fn)
    code = getattr(function, "__code__", None)
    if code is None or _CONTEXT not in code.co_freevars:
        return None
    cell: CellType = function.__closure__[code.co_freevars.index(_CONTEXT)]
    return None if isinstance(cell.cell_contents, contextlib.nullcontext) else cell


__all__ = ["entered_once_more", "install"]

"""Whether this thread is running the Python of a compiled call: captured, audited, or eagerly.

Invariant: what depends on this is the same in all three cases, so that the processes of a group that run one program
agree, whichever case each of them is in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Running(threading.local):
    depth = 0


_RUNNING = _Running()
_AT_END: list[Callable[[], None]] = []


@contextmanager
def running_compiled() -> Iterator[None]:
    """Inside, the Python of a compiled call runs."""
    _RUNNING.depth += 1
    try:
        yield
    finally:
        _RUNNING.depth -= 1
        if not _RUNNING.depth:
            for tidy in _AT_END:
                tidy()


def at_end_of_calls(tidy: Callable[[], None]) -> None:
    """Call `tidy` after each outermost such block, in the thread of the call."""
    _AT_END.append(tidy)


def runs_compiled() -> bool:
    """Whether a block of `running_compiled` is open in this thread."""
    return _RUNNING.depth > 0


__all__ = ["at_end_of_calls", "running_compiled", "runs_compiled"]

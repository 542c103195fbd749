"""Whether this thread runs the Python of a compiled call: captured, audited, or as ever.

Invariant: what depends on it is the same in all of these ways, so that processes of a group that run one program agree,
whichever way each of them takes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Running(threading.local):
    depth = 0


_RUNNING = _Running()


@contextmanager
def running_compiled() -> Iterator[None]:
    """Inside, the Python of a compiled call runs."""
    _RUNNING.depth += 1
    try:
        yield
    finally:
        _RUNNING.depth -= 1


def runs_compiled() -> bool:
    """Whether a block of `running_compiled` is open in this thread."""
    return _RUNNING.depth > 0


__all__ = ["running_compiled", "runs_compiled"]

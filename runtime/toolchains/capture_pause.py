"""Loading kernels while another thread captures a CUDA graph.

A capture that was begun in CUDA's strictest mode, which is torch's default, forbids every thread what might disturb it,
and is lost where one does it all the same: loading a module is such a thing. A thread may say that what it does has
nothing to do with anybody's capture, as torch's allocator says when it asks for memory.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@contextmanager
def beside_captures() -> Iterator[None]:
    """What this thread does inside disturbs no capture in another one."""
    exchange = _exchange()
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    status = exchange(ctypes.byref(mode))  # `mode` is then the one before
    try:
        yield
    finally:
        if not status:
            exchange(ctypes.byref(mode))


@functools.cache
def _exchange() -> Any:
    """The driver's function; None where there is no driver."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None

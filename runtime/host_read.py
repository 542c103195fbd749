"""Reading one number of a device without waiting for what is launched behind it.

Invariant: the number is the value that the memory had when the read was begun.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def begin_read(value: torch.Tensor) -> Callable[[], Any]:
    """Begin to read a tensor of one element; the number itself comes from the function that is returned.

    On a GPU the copy is queued now, on the current stream, and whoever asks for the number waits for that copy only:
    work that is launched in between runs on. Elsewhere the number is read at once.
    """
    if value.device.type != "cuda":
        number = value.item()
        return lambda: number
    # Pinned memory goes back to torch's allocator, which waits for the copy before it gives it out again.
    host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    host.copy_(value, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(value.device))

    def wait() -> Any:
        copied.synchronize()
        return host.item()

    return wait

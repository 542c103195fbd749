"""What a cut computed goes to the storages that waited for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torchlazy.lazy.promises import Promise, promise_to
from torchlazy.lazy.storage import LazyStorage
from torchlazy.lazy.torch_private import address_of, below_autograd

if TYPE_CHECKING:
    from torchlazy.lazy.recorder import Recorder


def take_values(recorder: Recorder, live: Sequence[LazyStorage], values: Sequence[Any]) -> BaseException | None:
    """Each storage has its value, a promise of it, or the error that stands for it; returns the first error."""
    error: BaseException | None = None
    is_on_lazy = not recorder.has_mode_tensors
    for storage, value in zip(live, values, strict=True):
        storage.dirty = False
        storage.slot = None
        if type(value) is torch.Tensor and is_on_lazy and not storage.pinned:  # mostly
            if storage.poison is not None:
                storage.poison = None
            storage.real = value
            continue
        if isinstance(value, BaseException):
            error = error or value
            if storage.real is None:
                storage.poison = value  # else the write never happened: the old value stands, as in eager
            continue
        storage.poison = None
        if type(value) is Promise:
            value.source.promised[value.output] = promise_to(storage, value)
            continue
        if storage.pinned and storage.real is not None:
            if address_of(value) != address_of(storage.real):
                with below_autograd():
                    storage.real.copy_(value)
        else:
            storage.real = value
            recorder.found_at(storage)
    return error

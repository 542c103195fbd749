"""Lazy storages: one object for each piece of memory that the program believes to exist.

Invariant: a storage's current value is `real` (memory), or, while `epoch` is the recorder's current epoch and
`dirty`, the slot of the running trace. `version` counts writes: a view whose cached slot is older regenerates itself.
"""

from __future__ import annotations

import weakref

import torch
from torchlazy.lazy.trace.geometry import Geometry
from torchlazy.lazy.trace.trace import Slot


class LazyStorage:
    """Memory that may not exist yet, with the geometry `base` that its value has when it does.

    A new one has no value yet: its maker sets `base`, `slot`, `epoch`, `version` and `dirty`, which each operator
    reads. The other fields default to the class's, because a storage is made for nearly each operator; `storage_of`
    makes one for an existing value.

    `pinned` storages belong to tensors that the user holds (`lazy_mode`): their new values must be written into `real`.
    `poison` is the error that the value's computation raised; reading it raises it again.
    """

    __slots__ = ("__dict__", "__weakref__", "base", "dirty", "epoch", "slot", "version")

    base: Geometry
    slot: Slot | None
    epoch: int
    dirty: bool
    version: int
    real: torch.Tensor | None = None
    pinned: bool = False
    poison: BaseException | None = None
    saved: tuple[object, weakref.ref[torch.Tensor]] | None = None  # the host copy in a file (record/saving.py)


def storage_of(base: Geometry, real: torch.Tensor | None = None, pinned: bool = False) -> LazyStorage:
    """The storage of existing memory, or of memory that does not exist yet, for a value that no trace computes."""
    storage = LazyStorage()
    storage.base, storage.slot, storage.epoch, storage.version, storage.dirty = base, None, -1, 0, False
    storage.real, storage.pinned = real, pinned
    return storage

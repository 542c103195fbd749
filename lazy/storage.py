"""Lazy storages: one object for each piece of memory that the program believes to have.

Invariant: a storage's current value is `real` (memory), or, while `epoch` is the recorder's current epoch and
`dirty`, the slot of the running trace. `version` counts writes: a view whose cached slot is older regenerates itself.
"""

from __future__ import annotations

import torch
from torchlazy.lazy.geometry import Geometry
from torchlazy.lazy.trace import Slot


class LazyStorage:
    """Memory that may not exist yet, with the geometry `base` that its value has when it does.

    `pinned` storages belong to tensors that the user holds (`lazy_mode`): their new values must be written into `real`.
    `poison` is the error that the value's computation raised; reading it raises it again.
    """

    __slots__ = ("__weakref__", "base", "dirty", "epoch", "pinned", "poison", "real", "slot", "version")

    def __init__(
        self,
        base: Geometry,
        real: torch.Tensor | None = None,
        pinned: bool = False,
        slot: Slot | None = None,  # with a slot, of trace `epoch`: a value that is yet to be computed
        epoch: int = -1,
    ) -> None:
        self.base = base
        self.real = real
        self.slot = slot
        self.epoch = epoch
        self.dirty = slot is not None
        self.version = 0
        self.pinned = pinned
        self.poison: BaseException | None = None

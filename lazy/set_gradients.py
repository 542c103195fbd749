"""Gradients that replays leave in tensors of the state: how each is stored."""

from __future__ import annotations

from typing import Any

import torch
from torchlazy.lazy.tensor_parts import whole_of


class SetGrad:
    """Stores a gradient."""

    def __init__(self, owner: torch.Tensor) -> None:
        self._owner = owner

    def __call__(self, value: Any) -> None:
        self._owner.grad = value


class SetDistributedGrad(SetGrad):
    """Stores a part of a gradient as the gradient that it is a part of."""

    def __init__(self, owner: torch.Tensor, like: Any) -> None:
        super().__init__(owner)
        self._whole = whole_of(like)

    def __call__(self, value: Any) -> None:
        super().__call__(self._whole(value))


__all__ = ["SetDistributedGrad", "SetGrad"]

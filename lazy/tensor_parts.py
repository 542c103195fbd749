"""Distributed tensors (`DTensor`): they hold no memory, but a tensor that does, and how it is a part of a whole.

torch turns an operator on one into operators on its part, and those are what is recorded.

Invariant: nothing of `torch.distributed.tensor` is imported here; where nobody imported it, there is no such tensor.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

PART = "_local_tensor"
FIELDS = (PART, "_spec")
_MODULE = "torch.distributed.tensor"


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a part of one that several processes hold."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(tensor, getattr(module, "DTensor", ()))


def any_distributed(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether one of the tensors is such a part."""
    kind = getattr(sys.modules.get(_MODULE), "DTensor", None)
    return kind is not None and any(isinstance(tensor, kind) for tensor in tensors)


def part_of(tensor: Any) -> Any:
    """The tensor that holds this process's part of a distributed one; any other as it is."""
    return getattr(tensor, PART) if is_distributed(tensor) else tensor


def how_distributed(tensor: Any) -> tuple[Any, ...]:
    """Over which processes, and how."""
    return tensor.device_mesh, tensor.placements


def whole_of(like: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Makes, of this process's part, distributed tensors that are so distributed."""
    return functools.partial(sys.modules[_MODULE].DTensor, spec=like._spec, requires_grad=False)


__all__ = ["FIELDS", "any_distributed", "how_distributed", "is_distributed", "part_of", "whole_of"]

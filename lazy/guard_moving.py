"""Tensors of the state whose memory calls exchange (`p.data = q` in sharpness-aware minimisation): where they are now.

What such a tensor is on is to a captured call what an argument is: its form matters, and who shares it.

Invariant: tensors that this finds as they were are of the geometry, on memory of the size, and share it with whom they
did when this was made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torchlazy.lazy.geometry import has_memory, is_dense
from torchlazy.lazy.guard_reached import Reached
from torchlazy.lazy.tensor import LazyTensor


def memory_of(tensor: torch.Tensor) -> int:
    """What tells the tensor's memory from another's."""
    if isinstance(tensor, LazyTensor):
        return id(tensor._storage_)
    return int(tensor.untyped_storage()._cdata) if has_memory(tensor) else id(tensor)


def moving_in(reached: Reached, names: frozenset[str]) -> list[tuple[torch.Tensor, str]]:
    """Those of these names that can be told by their form."""
    found = [(tensor, name) for tensor, name in reached.tensors.values() if name in names] if names else []
    return [(x, name) for x, name in found if isinstance(x, LazyTensor) or (is_dense(x) and x.dim())]


class MovingTensors:
    """The tensors, in order, among others of the state that stay where they are."""

    def __init__(self, found: Sequence[tuple[torch.Tensor, str]], others: Sequence[torch.Tensor]) -> None:
        """`others`: all that are reached beside the moving ones."""
        self.tensors = [tensor for tensor, _ in found]
        self.names = frozenset(name for _, name in found)
        self.ids = frozenset(map(id, self.tensors))
        self._names = [name for _, name in found]
        self._fixed: dict[int, int] = {}
        for tensor in others:
            self._fixed.setdefault(memory_of(tensor), len(self._fixed))
            self._fixed[-id(tensor)] = len(self._fixed)
        self._then = self._facts()

    def memories(self) -> dict[int, int]:
        """All memories by identity, numbered, and by the negative of their identities the tensors themselves."""
        if not self.tensors:
            return self._fixed
        found = dict(self._fixed)
        for tensor in self.tensors:
            found.setdefault(memory_of(tensor), len(found))
            found[-id(tensor)] = len(found)
        return found

    def hold(self) -> bool:
        """Whether they are as they were."""
        return not self.tensors or self._facts() == self._then

    def broken(self) -> list[tuple[str, Any, Any]]:
        """Those that are not: (name, fact then, fact now)."""
        rows = zip(self._names, self._then, self._facts(), strict=True)
        return [(name, then, now) for name, then, now in rows if then != now]

    def _facts(self) -> list[Any]:
        numbers = self.memories()
        return [(*_form(tensor), numbers[memory_of(tensor)]) for tensor in self.tensors]


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    flags = (tensor.requires_grad, tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
    if isinstance(tensor, LazyTensor):
        return (tensor._geometry, tensor._storage_.base, *flags)
    if not is_dense(tensor):
        return (tensor.layout, tensor.shape, *flags)
    place = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes())
    return (*place, tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg(), *flags)


__all__ = ["MovingTensors", "memory_of", "moving_in"]

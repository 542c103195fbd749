"""New lazy tensors among what a replay gives, most of them gradients: all that one run has in common with the last is
found out before.

Invariant: the tensor and its storage are those that a cut would have made over the memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torchlazy.lazy import call_template as t
from torchlazy.lazy.geometry import Geometry
from torchlazy.lazy.running_trace import storage_over
from torchlazy.lazy.storage import storage_of
from torchlazy.lazy.tensor import LazyTensor, wrap


def fresh_tensors(results: Iterable[t.Result]) -> dict[int, Callable[[Any], torch.Tensor]]:
    """By the number of each result that is a new lazy tensor over memory of its own: what makes it.

    Given is what has the values of the run's `places`. What shares a place or a number with another result is not
    among them.
    """
    tensors = [result for result in results if type(result) is t.TensorResult]
    numbers = Counter(result.number for result in tensors)
    places = Counter(result.memory.place for result in tensors if type(result.memory) is t.FromStep)
    return {
        result.number: _Fresh(result.memory.place, result.geometry, result.requires_grad).make
        for result in tensors
        if type(result.memory) is t.FromStep
        and result.geometry.device.type == "lazy"
        and not result.freed
        and numbers[result.number] == places[result.memory.place] == 1
    }


class _Fresh:
    """Makes one tensor a run, of this geometry over the memory at a place. The memory mostly lies as it did before."""

    __slots__ = ("_base", "_geometry", "_nbytes", "_place", "_requires_grad")

    def __init__(self, place: int, geometry: Geometry, requires_grad: bool) -> None:
        self._place, self._geometry, self._requires_grad = place, geometry, requires_grad
        self._base, self._nbytes = geometry, geometry.nbytes

    def make(self, state: Any) -> LazyTensor:
        real, base, geometry = state.places[self._place], self._base, self._geometry
        if (
            real.shape == base.shape
            and real.stride() == base.strides
            and real.dtype is base.dtype
            and not base.offset
            and not real.storage_offset()
            and real.untyped_storage().nbytes() == self._nbytes
        ):
            storage = storage_of(base, real)
        else:
            storage = storage_over(real, geometry.device)
            if storage.real is real:
                self._base, self._nbytes = storage.base, storage.base.nbytes
        tensor = wrap(storage, geometry, None, -1)
        return tensor.requires_grad_() if self._requires_grad else tensor  # type: ignore[no-any-return]

"""Tensors from outside that a captured call leaves on other memory (`p.data = q`, `x.set_()`) or in another form
(`x.t_()`): a replay gives them that memory as well.

Invariant: what a tensor is on after a replay is what it is on after the call, and so is who shares it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torchlazy.lazy import call_template as t
from torchlazy.lazy.geometry import geometry_like, is_dense
from torchlazy.lazy.outside_tensors import OutsideTensors
from torchlazy.lazy.storage import LazyStorage
from torchlazy.lazy.tensor import LazyTensor
from torchlazy.lazy.torch_private import flatten_tree

if TYPE_CHECKING:
    from torchlazy.lazy.call_outcome import Outcome
    from torchlazy.lazy.capture import Capture
    from torchlazy.lazy.guard_reached import Reached
    from torchlazy.lazy.recorder import Recorder

_PAIR = flatten_tree((0, 0))[1]


class Memories:
    """Where the arguments and the tensors of the state lay before the call."""

    def __init__(self, recorder: Recorder, reached: Reached, leaves: Sequence[Any]) -> None:
        self._recorder = recorder
        self._outside = OutsideTensors(reached, leaves, _place)
        self.moved: frozenset[str] = frozenset()  # names of tensors of the state that lie elsewhere now

    def effects(self, capture: Capture, outcome: Outcome) -> list[t.Effect]:
        """One for each tensor that lies elsewhere now."""
        found: list[t.Effect] = []
        for changed in self._outside.changed():
            position, named = changed.position, changed.named
            stands_for_itself = position is None or outcome.call.given[position] is changed.tensor
            value = self._memory(changed.tensor, outcome) if stands_for_itself else None
            if value is None:
                capture.refuse(f"it gives {named} other memory, which is not followed")
                continue
            found.append(t.Effect(f"memory of {named}", set_memory, (changed.result, value), _PAIR))
            if position is None:
                self.moved |= {named}
        return found

    def _memory(self, tensor: torch.Tensor, outcome: Outcome) -> t.TensorResult | None:
        storage: LazyStorage
        if isinstance(tensor, LazyTensor):
            storage, geom = tensor._storage_, tensor._geometry
        elif is_dense(tensor) and outcome.call.plain:
            storage = self._recorder.storage_of_plain(tensor)
            geom = geometry_like(tensor.detach(), tensor.device, str(tensor.device))
        else:
            return None
        return outcome.on_memory(storage, geom)


def set_memory(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Let the first tensor be on the memory of the second."""
    tensor, value = pair
    tensor.data = value


def _place(tensor: torch.Tensor) -> Any:
    if isinstance(tensor, LazyTensor):
        return tensor._storage_, tensor._geometry
    if not is_dense(tensor):
        return None
    return tensor.untyped_storage()._cdata, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype

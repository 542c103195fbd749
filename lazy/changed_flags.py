"""`requires_grad` of tensors from outside that a captured call leaves changed: a replay sets it as well.

Invariant: a flag is set when the values are there, so a result that needs a gradient of the tensor is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torchlazy.lazy import call_template as t
from torchlazy.lazy.outside_tensors import OutsideTensors
from torchlazy.lazy.torch_private import flatten_tree

if TYPE_CHECKING:
    from torchlazy.lazy.capture import Capture
    from torchlazy.lazy.guard_reached import Reached

_LEAF = flatten_tree(0)[1]


class Flags:
    """What `requires_grad` of the arguments and of the state said before the call."""

    def __init__(self, reached: Reached, leaves: Sequence[Any]) -> None:
        self._outside = OutsideTensors(reached, leaves, lambda tensor: tensor.requires_grad)

    def effects(self, capture: Capture, needs_gradients: bool) -> list[t.Effect]:
        """One for each tensor that says something else now; `needs_gradients`: a result of the call does."""
        found: list[t.Effect] = []
        for changed in self._outside.changed():
            named, flag = changed.named, changed.now
            if needs_gradients or not changed.tensor.is_leaf:
                capture.refuse(f"it changes requires_grad of {named}, which a result may need a gradient of")
            found.append(t.Effect(f"requires_grad of {named}: {flag}", SetFlag(flag), (changed.result,), _LEAF))
        return found


class SetFlag:
    """Sets the flag of a tensor."""

    def __init__(self, flag: bool) -> None:
        self._flag = flag

    def __call__(self, tensor: torch.Tensor) -> None:
        tensor.requires_grad_(self._flag)

"""What the arguments of a captured call and the tensors of its state said before it, and which say something else now.

Invariant: each tensor is looked at once, whichever ways lead to it, and is named as a replay finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torchlazy.lazy import call_template as t

if TYPE_CHECKING:
    from torchlazy.lazy.guard_reached import Reached


@dataclass(frozen=True, slots=True, eq=False)
class Changed:
    """A tensor that says something else now. `position`: of the argument that it is, None for one of the state."""

    tensor: torch.Tensor
    position: int | None
    named: str
    now: Any

    @property
    def result(self) -> t.SameObject | t.SameArgument:
        return t.SameObject(self.tensor) if self.position is None else t.SameArgument(self.position)


class OutsideTensors:
    """The tensors that a call was given or reaches, and what `fact` said of each."""

    def __init__(self, reached: Reached, leaves: Sequence[Any], fact: Callable[[torch.Tensor], Any]) -> None:
        self._leaves, self._reached, self._fact = leaves, reached, fact
        self._before = {id(tensor): fact(tensor) for tensor in self._tensors()}

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from (leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor))
        yield from (tensor for tensor, _ in self._reached.tensors.values())

    def changed(self) -> Iterator[Changed]:
        positions = {id(leaf): at for at, leaf in enumerate(self._leaves) if isinstance(leaf, torch.Tensor)}
        for tensor in {id(tensor): tensor for tensor in self._tensors()}.values():
            now = self._fact(tensor)
            if now == self._before[id(tensor)]:
                continue
            position = positions.get(id(tensor))
            named = f"argument {position}" if position is not None else self._reached.tensors[id(tensor)][1]
            yield Changed(tensor, position, named, now)

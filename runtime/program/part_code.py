"""The function of a part of a program: its text, how it is called, and what is known of its names afterwards.

Invariant: whoever calls the function keeps nothing alive that the part frees: such tensors come in a list, which the
function empties at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torchlazy.prims.meta import TensorMeta

Place = tuple[int, bool]
"""A variable of a part: the number of its name, and whether it is the name's address rather than its tensor."""


@dataclass(frozen=True)
class PartCode:
    """What parts of one kind have in common. Names are told by number. After the part a name has a tensor variable of
    the dtype in `dtypes`; one that has none may have an address. `metas` is of what the part makes."""

    name: str  # empty: the part has no code
    given: tuple[int, ...]  # tensors that are there before the part, and not after it
    takes: tuple[Place, ...]
    gives: tuple[Place, ...]
    same: tuple[tuple[int, int], ...]  # names that it makes for a tensor that it only reads, and that tensor's name
    outer: tuple[str, ...]  # variables beside those of names: the stream, the memory of small values
    dtypes: tuple[torch.dtype | None, ...]
    addresses: tuple[bool, ...]
    metas: tuple[TensorMeta | None, ...]

    def function_lines(self, variables: Sequence[str], body: Sequence[str]) -> list[str]:
        """The function's text; `variables` are those of `body` by number of the name."""
        lines = [f"def {self.name}({self._parameters(variables)}):"]
        if self.given:
            lines += [f"    {_several(variables[number] for number in self.given)} = given", "    given.clear()"]
        lines += [f"    {line}" for line in body]
        return [*lines, f"    return {_several(place_variable(variables, place) for place in self.gives)}"]

    def call_lines(self, variables: Sequence[str]) -> list[str]:
        """A call, of the part whose names have these variables."""
        lines = []
        if self.given:
            handed = ", ".join(variables[number] for number in self.given)
            lines += [f"given = [{handed}]", f"del {handed}"]
        call = f"{self.name}({self._parameters(variables)})"
        results = _several(place_variable(variables, place) for place in self.gives)
        return [*lines, f"{results} = {call}" if self.gives else call]

    def _parameters(self, variables: Sequence[str]) -> str:
        names = [place_variable(variables, place) for place in self.takes]
        return ", ".join([*(("given",) if self.given else ()), *self.outer, *names])


def place_variable(variables: Sequence[str], place: Place) -> str:
    """The Python variable of a place."""
    number, is_address = place
    return f"{variables[number]}_p" if is_address else variables[number]


def _several(names: Sequence[str] | object) -> str:
    listed = ", ".join(names)  # type: ignore[arg-type]
    return f"({listed},)" if listed else "()"

"""Recipes of outputs that kernels compute from a program's inputs alone: equal recipes on equal memory, equal values.

Half-precision copies of weights are such outputs: forwards that wait for their backward keep them once.

Invariant: outputs of one recipe, of whatever programs, are equal bit for bit where the inputs that it names are.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torchlazy.runtime.program.program import Allocate, ForeachLaunch, Launch, Program, Reinterpret

_DEEPEST = 3  # kernels, one upon the other

_Known: TypeAlias = "tuple[Hashable, int]"
"""How a value is made, and by how many kernels one upon the other."""


@dataclass(frozen=True)
class Recipe:
    """`inputs`: positions of the inputs that the value is made of, in the order in which the key mentions them."""

    key: Hashable
    inputs: tuple[int, ...]


def output_recipes(program: Program) -> dict[int, Recipe]:
    """By output its recipe. None is of numbers, of library calls, or of inputs that the program overwrites."""
    if program.symbols or program.sizes:
        return {}
    lost = {given for _, given in program.donations}
    known: dict[str, _Known] = {
        name: (_Input(place), 0) for place, (name, _) in enumerate(program.inputs) if place not in lost
    }
    new: set[str] = set()  # memory that nobody has written to yet

    def launched(kernel: int, buffers: Sequence[str], sizes: Hashable) -> None:
        made = {name: place for place, name in enumerate(buffers) if name in new}
        new.difference_update(made)
        read = [known.get(name) for name in buffers if name not in made]
        depth = 1 + max((found[1] for found in read if found is not None), default=0)
        if None in read or depth > _DEEPEST:
            return
        parts = tuple(None if name in made else known[name][0] for name in buffers)
        for name, place in made.items():
            known[name] = (program.kernels[kernel].key, sizes, parts, place), depth

    for step in program.steps:
        if isinstance(step, Allocate):
            new.add(step.name)
        elif isinstance(step, Reinterpret):
            if step.source in known:
                key, depth = known[step.source]
                known[step.name] = ("window", key, step.meta, step.offset), depth
        elif isinstance(step, Launch):
            if step.scalars:
                new.difference_update(step.buffers)
            else:
                launched(step.kernel, step.buffers, step.sizes)
        elif isinstance(step, ForeachLaunch):
            for buffers, sizes, scalars in step.rows:
                if scalars or step.scalars:
                    new.difference_update(buffers)
                else:
                    launched(step.kernel, buffers, sizes)
    found = {place: known[name] for place, name in enumerate(program.outputs) if name in known}
    return {place: _recipe(key) for place, (key, depth) in found.items() if depth}


@dataclass(frozen=True)
class _Input:
    place: int


def _recipe(key: Hashable) -> Recipe:
    numbers: dict[int, int] = {}

    def without_places(value: Any) -> Any:
        if isinstance(value, _Input):
            return _Input(numbers.setdefault(value.place, len(numbers)))
        return tuple(map(without_places, value)) if type(value) is tuple else value

    return Recipe(without_places(key), tuple(numbers))

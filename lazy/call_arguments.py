"""The arguments of a call, flat, and back in the containers that the caller passed.

Invariant: a function gets the caller's own containers wherever none of their leaves stands for another; where one does,
what the function did to the copy of a container is done to the caller's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torchlazy.lazy.plain_objects import closed, is_plain, opened
from torchlazy.lazy.tensor import LazyTensor
from torchlazy.lazy.torch_private import flatten_tree, unflatten_tree

# Types that are certainly no containers: calls with nothing else among their arguments are flat as they are.
_LEAVES = frozenset({torch.Tensor, torch.nn.Parameter, LazyTensor, int, float, bool, str, bytes, type(None)})

_CONTAINERS = (dict, list, tuple)
_SPELLED = frozenset({int, bool, float, complex})  # equal ones may be of other types, or of other signs


@dataclass(frozen=True, slots=True)
class Flat:
    """Arguments without containers: so many by position, these by name."""

    positional: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Nested:
    """Arguments in containers. `oddities` are what no spec tells apart: keys that are equal (1, True and 1.0), one
    container in two places."""

    spec: Any
    oddities: tuple[str, ...] = ()


Structure: TypeAlias = "Flat | Nested"


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Structure]:
    """The leaves of the arguments, and the structure around them, which hashes."""
    leaves = [*args, *kwargs.values()]
    if _LEAVES.issuperset(map(type, leaves)):
        return leaves, Flat(len(args), tuple(kwargs))
    leaves, spec = flatten_tree((opened(args), opened(kwargs)))
    return leaves, Nested(spec, tuple(_oddities((args, kwargs), {})))


def _oddities(value: Any, seen: dict[int, int]) -> Iterator[str]:
    """Spelled: keys of dictionaries that are no strings, and lists and dictionaries that come again."""
    if type(value) is not tuple:
        if id(value) in seen:
            yield f"container {seen[id(value)]} again"
            return
        seen[id(value)] = len(seen)
    if isinstance(value, dict):
        for key in value:
            if type(key) is not str:
                yield f"{type(key).__qualname__} {key!r}" if type(key) in _SPELLED else type(key).__qualname__
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, _CONTAINERS):
            yield from _oddities(item, seen)


def rebuild(structure: Structure, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of this structure with these leaves, in new containers."""
    if isinstance(structure, Flat):
        count = structure.positional
        return tuple(leaves[:count]), dict(zip(structure.names, leaves[count:], strict=True))
    args, kwargs = unflatten_tree(list(leaves), structure.spec)
    return closed(args), closed(kwargs)


@dataclass(frozen=True, slots=True, eq=False)
class Passed:
    """The arguments of one call: as the caller passed them (`given`: flat), and `leaves` as programs take them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    structure: Structure
    given: tuple[Any, ...]
    leaves: tuple[Any, ...]  # copies in place of windows on larger memory


class Handed:
    """The arguments as the function of a captured call gets them: `leaves` in place of those that the caller passed."""

    def __init__(self, passed: Passed, leaves: Sequence[Any]) -> None:
        given, self._structure, self._leaves = passed.given, passed.structure, list(leaves)
        self._own = all(now is then for now, then in zip(leaves, given, strict=True))
        self._original = (passed.args, passed.kwargs)
        self._back = {id(now): then for now, then in zip(leaves, given, strict=True)}
        self.args, self.kwargs = self._original if self._own else rebuild(passed.structure, leaves)

    def settle(self) -> bool:
        """After the call: whether it changed a container, which the caller's containers then show too."""
        if isinstance(self._structure, Flat):
            return False
        leaves, spec = flatten_tree((opened(self.args), opened(self.kwargs)))
        same = spec == self._structure.spec and len(leaves) == len(self._leaves)
        if same and all(now is then for now, then in zip(leaves, self._leaves, strict=True)):
            return False
        if not self._own:
            self._show((self.args, self.kwargs), self._original)
        return True

    def _show(self, copy: Any, original: Any) -> None:
        if type(copy) is not type(original):
            return
        if isinstance(copy, list):
            items = [self._one(item, original, i) for i, item in enumerate(copy)]
            original[:] = items
        elif isinstance(copy, dict):
            fresh = {key: self._one(item, original, key) for key, item in copy.items()}
            original.clear()
            original.update(fresh)
        elif is_plain(original):
            for name, item in vars(copy).items():
                setattr(original, name, self._one(item, vars(original), name))
        elif isinstance(copy, tuple):
            for mine, theirs in zip(copy, original, strict=False):
                self._show(mine, theirs)

    def _one(self, item: Any, original: Any, place: Any) -> Any:
        if id(item) in self._back:
            return self._back[id(item)]
        try:
            theirs = original[place]
        except (IndexError, KeyError):
            return item
        if (isinstance(item, (list, dict, tuple)) or is_plain(item)) and type(item) is type(theirs):
            self._show(item, theirs)
            return theirs
        return item

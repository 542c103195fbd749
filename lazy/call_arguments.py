"""The arguments of a call, flat, and back in the containers that the caller passed.

Invariant: a function gets the caller's own containers wherever none of their leaves stands for another; where one does,
what the function did to the copy of a container is done to the caller's.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torchlazy.lazy.argument_facts import facts_of
from torchlazy.lazy.call_contents import ContentsBefore, containers_in, exchanged, holders_of, refill
from torchlazy.lazy.plain_objects import NAMESPACES, Test, flatten_open, is_data, is_object, kinds_in, unflatten_open
from torchlazy.lazy.tensor import LazyTensor

# Types that are certainly no containers: calls with nothing else among their arguments are flat as they are.
_LEAVES = frozenset({torch.Tensor, torch.nn.Parameter, LazyTensor, int, float, bool, str, bytes, type(None)})

_CONTAINERS = (dict, list, tuple)
_MOST_SEEN = 4096  # structures, and places of objects in the arguments, that are remembered
_SPELLED = frozenset({int, bool, float, complex})  # equal ones may be of other types, or of other signs


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """Arguments without containers: so many by position, these by name. One object for each (`_flat`)."""

    positional: int
    names: tuple[str, ...]


@functools.lru_cache(_MOST_SEEN)
def _flat(positional: int, names: tuple[str, ...]) -> Flat:
    return Flat(positional, names)


@dataclass(frozen=True, slots=True)
class Nested:
    """Arguments in containers. `oddities` are what no spec tells apart: keys that are equal (1, True and 1.0), one
    container in two places."""

    spec: Any
    oddities: tuple[str, ...] = ()


Structure: TypeAlias = "Flat | Nested"


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any], opens: Test = is_data) -> tuple[list[Any], Structure]:
    """The leaves of the arguments, and the structure around them, which hashes. `opens`: objects taken apart."""
    leaves = [*args, *kwargs.values()]
    if _LEAVES.issuperset(map(type, leaves)):
        return leaves, _flat(len(args), tuple(kwargs))
    leaves, spec = flatten_open((args, kwargs), opens)
    return leaves, Nested(spec, tuple(_oddities((args, kwargs), opens, {})))


def _oddities(value: Any, opens: Test, seen: dict[int, int]) -> Iterator[str]:
    """Spelled: keys of dictionaries that are no strings; lists, dictionaries and objects that come again."""
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
            yield from _oddities(item, opens, seen)
        elif type(item) not in _LEAVES and opens(item):
            if id(item) in seen:
                yield f"object {seen[id(item)]} again"
            else:
                seen[id(item)] = len(seen)
                yield from _oddities(tuple(vars(item).values()), is_object, seen)


def rebuild(structure: Structure, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of this structure with these leaves, in new containers."""
    if isinstance(structure, Flat):
        count = structure.positional
        return tuple(leaves[:count]), dict(zip(structure.names, leaves[count:], strict=True))
    args, kwargs = unflatten_open(list(leaves), structure.spec)
    return args, kwargs


def containers_of(args: tuple[Any, ...], kwargs: dict[str, Any], opens: Test) -> list[Any]:
    """The lists, dictionaries and opened objects among the arguments, in order."""
    return containers_in((args, tuple(kwargs.values())), opens)


class OpenKinds:
    """Classes of arguments whose objects come and go (a cache for each prompt): what these hold is an argument, not
    which one it is. Objects that stay (a configuration, a model's state) are looked at where they are."""

    def __init__(self) -> None:
        self._kinds: set[type] = set()
        self._stay: set[type] = set()  # classes of objects that hold what no fact can be told of
        self._seen: dict[tuple[Structure, int], tuple[type, weakref.ref[Any]]] = {}

    def opens(self, value: Any) -> bool:
        """Whether the attributes of this object are arguments: those of data classes and namespaces always are."""
        return is_data(value) or ((type(value) in self._kinds or type(value) in NAMESPACES) and is_object(value))

    def makes(self, spec: Any) -> None:
        """A call gave a value of this structure: objects that calls make come and go."""
        self._kinds |= kinds_in(spec) - self._stay

    def learns(self, leaves: Sequence[Any], structure: Structure) -> bool:
        """Whether an object among the leaves is another one than at the last such call, so that its class counts."""
        if _LEAVES.issuperset(map(type, leaves)):
            return False
        found = False
        for position, leaf in enumerate(leaves):
            kind = type(leaf)
            if kind in _LEAVES or kind in self._stay or not is_object(leaf):
                continue
            last = self._seen.get((structure, position))
            if last is None or last[1]() is not leaf:
                self._seen[structure, position] = kind, weakref.ref(leaf)
                if last is None or last[0] is not kind:
                    continue
                fits = not isinstance(facts_of(flatten_open(leaf)[0], set()), str)
                (self._kinds if fits else self._stay).add(kind)
                found |= fits
        if len(self._seen) > _MOST_SEEN:
            self._seen.clear()
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Passed:
    """The arguments of one call: as the caller passed them (`given`: flat), and `leaves` as programs take them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    structure: Structure
    given: tuple[Any, ...]
    leaves: tuple[Any, ...]  # copies in place of windows on larger memory
    opens: Test = is_data

    @property
    def containers(self) -> list[Any]:
        """The lists, dictionaries and opened objects, in order."""
        if isinstance(self.structure, Flat):
            return []
        return containers_in((self.args, tuple(self.kwargs.values())), self.opens)


class Handed:
    """The arguments as the function of a captured call gets them: `leaves` in place of those that the caller passed."""

    def __init__(self, passed: Passed, leaves: Sequence[Any]) -> None:
        given, self._structure, self._leaves = passed.given, passed.structure, list(leaves)
        self._own = all(now is then for now, then in zip(leaves, given, strict=True))
        self._opens = passed.opens
        self._back = {id(now): then for now, then in zip(leaves, given, strict=True)}
        self.args, self.kwargs = (passed.args, passed.kwargs) if self._own else rebuild(passed.structure, leaves)
        self.originals = passed.containers
        mine = self.originals
        if not self._own and mine:
            mine = containers_in((self.args, tuple(self.kwargs.values())), self._opens)
        self._before = ContentsBefore(mine)
        self.numbers = self._before.numbers  # of the containers, by identity

    @property
    def containers(self) -> tuple[Any, ...]:
        """The containers as the function has them, by number."""
        return self._before.containers

    @property
    def back(self) -> dict[int, Any]:
        """The caller's containers, by the identities of the function's."""
        return dict(zip(map(id, self.containers), self.originals, strict=False))

    def holders(self) -> list[Any]:
        """What holds the items of the containers."""
        return [held for found in (self.containers, self.originals) for held in holders_of(found)]

    def changes(self) -> list[tuple[int, Any]]:
        """After the call: which containers hold something else, and what."""
        return list(self._before.changes())

    def has_changed_otherwise(self, changes: Sequence[tuple[int, Any]]) -> bool:
        """Whether the call changed what cannot be written down as the contents of these containers."""
        if isinstance(self._structure, Flat):
            return False
        if changes:  # copies of one container in two places are two: what was done to both cannot be told
            return not self._own and any(found.startswith("container") for found in self._structure.oddities)
        leaves, structure = flatten_call(self.args, self.kwargs, self._opens)
        same = structure == self._structure and len(leaves) == len(self._leaves)
        return not (same and all(now is then for now, then in zip(leaves, self._leaves, strict=True)))

    def show(self, changes: Sequence[tuple[int, Any]], plainly: Callable[[Any], Any]) -> None:
        """Let the caller's containers hold what the function's do, with these leaves in place of its own."""
        back = self.back

        def leaf(value: Any) -> Any:
            if id(value) in back:
                return back[id(value)]
            return self._back[id(value)] if id(value) in self._back else plainly(value)

        for number, contents in changes:
            if number < len(self.originals):
                refill(self.originals[number], exchanged(contents, leaf, but=back))

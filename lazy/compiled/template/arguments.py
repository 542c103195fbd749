"""The arguments of a call as flat leaves and a structure, and what the call does to containers among them.

A call may append to a list of losses, or grow a cache that the caller passed: containers are arguments, too.

Invariant: containers are numbered in the order in which the arguments hold them, so that a call of the same structure
has the same ones under the same numbers; what is recorded of a call is what each holds afterwards. A function gets the
caller's own containers where no leaf in them is replaced; otherwise what the function did to the copy of a container
is done to the caller's.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torchlazy.lazy.compiled.template.argument_facts import facts_of
from torchlazy.lazy.compiled.template.objects import (
    NAMESPACES,
    Test,
    flatten_open,
    is_data,
    is_object,
    kinds_in,
    unflatten_open,
)
from torchlazy.lazy.record.tensor import LazyTensor
from torchlazy.lazy.torch_private.dispatch import flatten_tree, unflatten_tree

_ATOMS = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, str, bytes, type(None)})
_VALUES = frozenset({int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device})
_LISTS = (list, deque)
_DICTS = (dict, OrderedDict, defaultdict)


def containers_in(value: Any, opens: Test) -> list[Any]:
    """The lists, deques, dictionaries and opened objects in the value. Objects are listed once, others as often as
    they occur."""
    found: list[Any] = []
    _collect(value, opens, found, set())
    return found


def _collect(value: Any, opens: Test, found: list[Any], seen: set[int]) -> None:
    kind = type(value)
    if kind in _ATOMS:
        return
    items: Iterable[Any]
    if kind in _LISTS:
        items = value
    elif kind in _DICTS:
        items = value.values()
    elif isinstance(value, tuple):
        for item in value:
            _collect(item, opens, found, seen)
        return
    elif id(value) not in seen and opens(value):
        seen.add(id(value))
        items, opens = vars(value).values(), is_object
    else:
        return
    found.append(value)
    for item in items:
        _collect(item, opens, found, seen)


def contents_of(container: Any) -> Any:
    """What the container holds now: a list, or a dictionary of items or attributes."""
    kind = type(container)
    return list(container) if kind in _LISTS else dict(container if kind in _DICTS else vars(container))


def holders_of(containers: Iterable[Any]) -> Iterator[Any]:
    """The objects that hold the items of the containers: the containers, or an object's dictionary."""
    for container in containers:
        yield container
        if type(container) not in _LISTS and type(container) not in _DICTS:
            yield vars(container)


def refill(container: Any, contents: Any) -> None:
    """Replace what the container holds."""
    kind = type(container)
    if kind in _LISTS:
        container.clear()
        container.extend(contents)
        return
    own = container if kind in _DICTS else vars(container)
    own.clear()
    own.update(contents)


def exchanged(value: Any, leaf_of: Callable[[Any], Any], but: Container[int] = ()) -> Any:
    """The value with other leaves: containers and objects are changed in place, tuples are made anew.

    `but`: identities of containers that are passed to `leaf_of`, too.
    """
    return _exchanged(value, leaf_of, but, set())


def _exchanged(value: Any, leaf_of: Callable[[Any], Any], but: Container[int], seen: set[int]) -> Any:
    kind = type(value)
    if kind in _ATOMS or id(value) in but:
        return leaf_of(value)
    if isinstance(value, tuple):
        items = [_exchanged(item, leaf_of, but, seen) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return kind(items) if not hasattr(kind, "_fields") else kind(*items)
    if kind not in _LISTS and kind not in _DICTS and not is_object(value):
        leaves, spec = flatten_tree(value)
        if len(leaves) == 1 and leaves[0] is value:
            return leaf_of(value)
        fresh = [_exchanged(leaf, leaf_of, but, seen) for leaf in leaves]
        return value if all(a is b for a, b in zip(fresh, leaves, strict=True)) else unflatten_tree(fresh, spec)
    if id(value) in seen:
        return value
    seen.add(id(value))
    if kind in _LISTS:
        for position, item in enumerate(value):
            fresh = _exchanged(item, leaf_of, but, seen)
            if fresh is not item:
                value[position] = fresh
        return value
    own = value if kind in _DICTS else vars(value)
    for key, item in list(own.items()):
        fresh = _exchanged(item, leaf_of, but, seen)
        if fresh is not item:
            own[key] = fresh
    return value


class ContentsBefore:
    """What the containers among the arguments held before the call."""

    def __init__(self, containers: Sequence[Any]) -> None:
        self.containers = tuple(containers)
        self.numbers = {id(container): number for number, container in enumerate(containers)}
        self._before = [contents_of(container) for container in containers]

    def changes(self) -> Iterator[tuple[int, Any]]:
        """Containers that hold something else now, by number, with what they hold."""
        for number, (container, before) in enumerate(zip(self.containers, self._before, strict=True)):
            now = contents_of(container)
            if not _is_same(before, now):
                yield number, now


def _is_same(before: Any, now: Any) -> bool:
    if len(before) != len(now):
        return False
    if isinstance(now, list):
        return all(a is b for a, b in zip(before, now, strict=True))
    return all(a is b for a, b in zip(before, now, strict=True)) and all(
        a is b for a, b in zip(before.values(), now.values(), strict=True)
    )


# Types that are certainly no containers: calls with nothing else among their arguments are already flat.
_LEAVES = frozenset({torch.Tensor, torch.nn.Parameter, LazyTensor, int, float, bool, str, bytes, type(None)})

_CONTAINERS = (dict, list, tuple)
_MOST_SEEN = 4096  # structures, and places of objects in the arguments, that are remembered
_SPELLED = frozenset({int, bool, float, complex})  # equal ones may be of other types, or of other signs


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """Arguments without containers: their number by position, and names. Equal ones are one object (`flat`)."""

    positional: int
    names: tuple[str, ...]


@functools.lru_cache(_MOST_SEEN)
def flat(positional: int, names: tuple[str, ...] = ()) -> Flat:
    """The structure of so many arguments by position, and these by name."""
    return Flat(positional, names)


@dataclass(frozen=True, slots=True)
class Nested:
    """Arguments in containers. `oddities` are what no spec distinguishes: keys that are equal (1, True and 1.0),
    one container in two places."""

    spec: Any
    oddities: tuple[str, ...] = ()


Structure: TypeAlias = "Flat | Nested"


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any], opens: Test = is_data) -> tuple[list[Any], Structure]:
    """The leaves of the arguments, and the structure around them, which hashes. `opens`: objects to flatten."""
    leaves = [*args, *kwargs.values()]
    if _LEAVES.issuperset(map(type, leaves)):
        return leaves, flat(len(args), tuple(kwargs))
    leaves, spec = flatten_open((args, kwargs), opens)
    return leaves, Nested(spec, tuple(_oddities((args, kwargs), opens, {})))


def _oddities(value: Any, opens: Test, seen: dict[int, int]) -> Iterator[str]:
    """As texts: keys of dictionaries that are no strings; lists, dictionaries and objects that occur again."""
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
    """Classes of arguments whose objects come and go (a cache for each prompt): their contents are arguments, their
    identity does not matter. Objects that stay (a configuration, a model's state) are guarded instead."""

    def __init__(self) -> None:
        self._kinds: set[type] = set()
        self._stay: set[type] = set()  # classes of objects that hold something without facts
        self._seen: dict[tuple[Structure, int], tuple[type, weakref.ref[Any]]] = {}

    def opens(self, value: Any) -> bool:
        """Whether the attributes of this object are arguments: those of data classes and namespaces always are."""
        return is_data(value) or ((type(value) in self._kinds or type(value) in NAMESPACES) and is_object(value))

    def makes(self, spec: Any) -> None:
        """A call returned a value of this structure: objects that calls make come and go."""
        self._kinds |= kinds_in(spec) - self._stay

    def learns(self, leaves: Sequence[Any], structure: Structure) -> bool:
        """Whether an object among the leaves differs from that of the last such call, so that its class is opened."""
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
    """The arguments of one call: as the caller passed them (`given`: flat), and `leaves` as programs receive them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    structure: Structure
    given: tuple[Any, ...]
    leaves: tuple[Any, ...]  # copies in place of argument views
    opens: Test = is_data

    @property
    def containers(self) -> list[Any]:
        """The lists, dictionaries and opened objects, in order."""
        if isinstance(self.structure, Flat):
            return []
        return containers_in((self.args, tuple(self.kwargs.values())), self.opens)


class FunctionArguments:
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

    def identities(self, others: dict[int, Any], state: Container[int]) -> dict[int, Any]:
        """The caller's objects, by the identities of those that the function has: these, and `others`, as far as they
        are none of the state's and no plain values."""
        leaves = {key: then for key, then in {**self._back, **others}.items() if key not in state}
        return {key: then for key, then in leaves.items() if type(then) not in _VALUES} | self.back

    def holders(self) -> list[Any]:
        """The objects that hold the items of the containers."""
        return [held for found in (self.containers, self.originals) for held in holders_of(found)]

    def changes(self) -> list[tuple[int, Any]]:
        """After the call: which containers hold something else, and what."""
        return list(self._before.changes())

    def has_changed_otherwise(self, changes: Sequence[tuple[int, Any]]) -> bool:
        """Whether the call changed something else than the contents of these containers."""
        if isinstance(self._structure, Flat):
            return False
        if changes:  # one container in two places has two copies: their changes cannot be united
            return not self._own and any(found.startswith("container") for found in self._structure.oddities)
        leaves, structure = flatten_call(self.args, self.kwargs, self._opens)
        same = structure == self._structure and len(leaves) == len(self._leaves)
        return not (same and all(now is then for now, then in zip(leaves, self._leaves, strict=True)))

    def show(self, changes: Sequence[tuple[int, Any]], plainly: Callable[[Any], Any]) -> None:
        """Let the caller's containers hold what the function's do, with the caller's leaves in place of its own."""
        back = self.back

        def leaf(value: Any) -> Any:
            if id(value) in back:
                return back[id(value)]
            return self._back[id(value)] if id(value) in self._back else plainly(value)

        for number, contents in changes:
            if number < len(self.originals):
                refill(self.originals[number], exchanged(contents, leaf, but=back))

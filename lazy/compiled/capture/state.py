"""What the guarded places and slots held before a captured call, and which of them hold something else after it.

Invariant: a changed place either comes with a way to store its value, or is reported to the capture as a reason.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torchlazy.lazy.compiled.guards.bare_containers import BareItems, base_of
from torchlazy.lazy.compiled.guards.growing import Appended
from torchlazy.lazy.compiled.guards.reached import GuardedPlace, NotYet, Reached, copy_of, has_plain_keys, refill
from torchlazy.lazy.compiled.guards.values import same_or_equal
from torchlazy.lazy.numbers.questions import plain_size
from torchlazy.lazy.numbers.tracked import node_of
from torchlazy.lazy.torch_private.dispatch import flatten_tree

MAKES_STATE = "it makes new state"


@dataclass(frozen=True, eq=False)
class Change:
    """A place that holds something else after the call. `slot`, `number`: the name by which later captures know
    it. `stays`: it holds what it held, and is listed because it was asked for."""

    name: str
    value: Any
    store: Callable[[Any], None] | None
    slot: str = ""
    number: str = ""
    appends: bool = False  # a list that has new items at its end, and is otherwise unchanged
    stays: bool = False


class StateBefore:
    """What the guarded places and slots held before the call."""

    def __init__(self, reached: Reached) -> None:
        self.reached = reached
        self.values: dict[tuple[int, str], Any] = {
            (id(place.owner), name): value
            for place in reached.places
            for name, value in zip(place.names, place.values(), strict=True)
        }
        self.tables = [list(table.values()) for table, _ in reached.views]
        self.contents = {id(container): copy_of(container) for container, _ in reached.containers}
        self.appended = [list(container) for container, _ in reached.appended]
        self.rewritten: set[str] = set()  # lists that were assumed to be only appended to, and were not
        self.slots = [(slot.read(), *_contents(slot.read())) for slot in reached.slots]
        self.slot_names = frozenset(slot.name for slot in reached.slots)
        self.kept = {id(value) for value in reached.keep} | {id(container) for container, _ in reached.containers}

    def forget(self) -> None:
        """Let go of values that the call replaced."""
        self.values.clear()
        self.contents.clear()
        self.appended.clear()
        self.slots.clear()
        self.tables.clear()

    def changes(
        self, after: Reached, refuse: Callable[[str], None], stored: Collection[str], asked: Collection[str] = ()
    ) -> Iterator[Change]:
        """What is different now, each place once; `after` is what is reached now. `stored`: names of numbers that vary
        and of slots to which the call gave a value, be it the one that was there. `asked`: names listed anyway."""
        asked = set(asked).difference(path for _, path in (*self.reached.containers, *self.reached.appended))
        optimizers = {id(optimizer.state) for optimizer, _ in self.reached.optimizers}
        fresh: set[int] = set()  # containers that a change brought: what they hold came with them
        for container, path in self.reached.containers:
            before, now = self.contents[id(container)], copy_of(container)
            if _same_keys(container, before, now) and (isinstance(container, (list, dict)) or _is_same(before, now)):
                continue
            if not has_plain_keys(container):  # of an optimizer's state new entries are new state
                if not _same_keys(container, before, now) and id(container) not in optimizers:
                    refuse(f"it changes the keys of {path}, which are no plain values")
                continue
            fresh.add(id(container))
            value = dict(now) if isinstance(container, dict) else list(now)
            fresh |= _containers_in(value, self.kept)
            store = lambda item, container=container: refill(container, item)  # noqa: E731
            yield Change(path, value, store, slot=path, appends=type(container) is list and _begins_with(now, before))
        for (items, path), known in zip(self.reached.appended, self.appended, strict=True):
            if not _begins_with(items, known):
                self.rewritten.add(path)
                refuse(f"it does more than append to {path}")
            elif len(items) > len(known):
                yield Change(path, items[len(known) :], Appended(items), appends=True)
        for slot, (held, spec, leaves) in zip(self.reached.slots, self.slots, strict=True):
            value = slot.held()
            spec_now, leaves_now = _contents(value)
            stays = spec_now == spec and _is_same(leaves, leaves_now) and slot.name not in stored
            if stays and slot.name not in asked:
                continue
            if value is held and slot.can_refill():  # others may hold that very container
                yield Change(slot.name, copy.copy(value), slot.refill, slot=slot.name, stays=stays)
            else:
                yield Change(slot.name, value, slot.write, slot=slot.name, stays=stays)
        left = set(self.values)
        for place in after.places:
            left.difference_update((id(place.owner), name) for name in place.names)
            if id(place.owner) in fresh:
                continue
            yield from self._of_place(place, fresh, refuse, stored, asked)
        there = {id(value) for value in after.keep} | {id(place.owner) for place in after.places}
        gone = [name for owner, name in left if owner in there and owner not in fresh and not name.startswith("key ")]
        if gone:
            refuse(f"it removes state: {min(gone)}")
        for (table, names), (_, now), before in zip(self.reached.views, after.views, self.tables, strict=False):
            if names != now:
                refuse("it changes the parameters, buffers or modules of a module")
                continue
            for name, key, was in zip(names, list(table), before, strict=True):
                if table[key] is not was:
                    yield Change(name, table[key], _Item(table, key), slot=name)

    def _of_place(
        self,
        place: GuardedPlace,
        fresh: set[int],
        refuse: Callable[[str], None],
        stored: Collection[str],
        asked: Collection[str],
    ) -> Iterator[Change]:
        try:
            values = place.values()
        except NotYet as why:  # the call has run, and is not to run again
            refuse(str(why))
            return
        for position, (name, value) in enumerate(zip(place.names, map(plain_size, values), strict=True)):
            key = (id(place.owner), name)
            if name in self.slot_names:
                continue
            if key not in self.values:
                attribute = self._attribute_of(place, name)
                if attribute is None:
                    refuse(f"{MAKES_STATE}: {name}")
                    continue
                fresh |= _containers_in(value, self.kept)
                yield Change(name, value, attribute)
                continue
            was = self.values[key]
            stays = same_or_equal(value, was) and name not in stored
            if stays and name not in asked:
                continue
            store = None if place.store is None else _Store(place, position)
            fresh |= _containers_in(value, self.kept)
            if type(was) in (int, float) and (type(value) is type(was) or node_of(value) is not None):
                yield Change(name, value, store, number=name, stays=stays)
            else:
                yield Change(name, value, store, slot=name, stays=stays)

    def _attribute_of(self, place: GuardedPlace, name: str) -> Callable[[Any], None] | None:
        """How a new attribute of an object that was there before is set."""
        for own, path in self.reached.attributes:
            if place.of is own and name.startswith(f"{path}."):
                return _Item(own, name[len(path) + 1 :])
        return None


class _Store:
    def __init__(self, place: GuardedPlace, position: int) -> None:
        self._place, self._position = place, position

    def __call__(self, value: Any) -> None:
        assert self._place.store is not None
        self._place.store(self._position, value)


class _Item:
    def __init__(self, table: dict[str, Any], key: str) -> None:
        self._table, self._key = table, key

    def __call__(self, value: Any) -> None:
        self._table[self._key] = value


def _contents(value: Any) -> tuple[Any, list[Any]]:
    leaves, spec = flatten_tree(value)
    return spec, leaves


def _same_keys(container: Any, before: list[Any], now: list[Any]) -> bool:
    if len(before) != len(now):
        return False
    pairs = zip(before, now, strict=True)
    return not isinstance(container, dict) or all(same_or_equal(a, b) for (a, _), (b, _) in pairs)


def _begins_with(now: Sequence[Any], before: Sequence[Any]) -> bool:
    return len(now) >= len(before) and _is_same(before, now[: len(before)])


def _is_same(before: Sequence[Any], now: Sequence[Any]) -> bool:
    return len(before) == len(now) and all(a is b for a, b in zip(before, now, strict=True))


def _containers_in(value: Any, kept: set[int]) -> set[int]:
    """The containers in a new value, itself among them, that were not there before."""
    if (not isinstance(value, (list, tuple, dict)) and type(value).__name__ != "deque") or id(value) in kept:
        return set()
    items = base_of(value).values(value) if isinstance(value, dict) else BareItems(value)
    return {id(value)}.union(*(_containers_in(item, kept) for item in items))


__all__ = ["Change", "StateBefore"]

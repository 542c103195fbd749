"""The walk behind guards, as far as it knows no kinds of things: what is still to be looked at, and places with names.

Invariant: each thing is looked at once, by the first way that leads to it.
"""

from __future__ import annotations

import abc
import functools
import operator
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torchlazy.lazy.guard_names import NamesAskedFor
from torchlazy.lazy.guard_reached import Place, Reached
from torchlazy.lazy.state_slots import Slot, is_simple

_MAX_PLACES = 50_000


class TooMuch(Exception):
    """More state than guards can check in reasonable time."""


class NotYet(TooMuch):
    """What the first call leads to is not made yet; the next one may be captured."""


class _Gone:
    def __repr__(self) -> str:
        return "nothing (it was deleted)"


GONE = _Gone()


class Places:
    """What was found so far, and what is still to be looked at."""

    def __init__(self, slots: frozenset[str], appended: frozenset[str]) -> None:
        self.reached = Reached()
        self.slots, self.appended = slots, appended
        self.seen: set[int] = set()
        self.pending: list[tuple[Any, str, int, bool]] = []
        self.count = 0
        self.names = NamesAskedFor()
        self.abstract: dict[type, None] = {}  # classes that others may be registered with

    def visit(self, value: Any, path: str, depth: int, *, rooted: bool, runs: bool = True) -> None:
        """`rooted`: found from the callable, its closure or its arguments; else by a global name, and walked less.
        `runs`: if it is code, the call may run it."""
        if value is None or type(value) in _ATOMS:
            return
        if runs and isinstance(value, (types.FunctionType, type)):
            self.names.runs(value)
        if isinstance(value, abc.ABCMeta):
            self.abstract[value] = None
        if id(value) in self.seen:
            return
        self.seen.add(id(value))
        self.reached.keep.append(value)
        self.pending.append((value, path, depth, rooted))

    def place(
        self,
        owner: Any,
        read: Callable[[], Iterable[Any]],
        names: Iterable[str],
        depth: int,
        rooted: bool,
        store: Callable[[int, Any], None] | None = None,
        *,
        live: Iterable[Any] | None = None,
        of: Any = None,
        keys: Iterable[Any] = (),
        attributes: Iterable[str] = (),
        cells: Iterable[types.CellType] = (),
        runs: bool = True,
    ) -> None:
        """A place that the call may read, and change where `store` is given. Raises TooMuch."""
        names = tuple(names)
        self._count(names)
        found = Place(owner, read, names, store, live, of, tuple(keys), tuple(attributes), tuple(cells))
        self.reached.places.append(found)
        for position, (name, value) in enumerate(zip(names, read(), strict=True)):
            if name in self.slots and is_simple(value):
                self.reached.slots.append(_slot(found, position))
            else:
                self.visit(value, name, depth, rooted=rooted, runs=runs)

    def fixture(self, space: dict[str, Any], names: Iterable[tuple[str, str]]) -> None:
        """Entries of a dict that the call may read and is not expected to change, each with its name to a user: what
        is another thing there, another program reads. What is in them is not looked at."""
        found = list(names)
        if found:
            self._count([name for _, name in found])
            keys = [key for key, _ in found]
            told = tuple(name for _, name in found)
            self.reached.fixtures.append(Place(space, getter(space, keys), told, of=space, keys=tuple(keys)))

    def _count(self, names: Iterable[str]) -> None:
        names = list(names)
        self.count += len(names)
        if self.count > _MAX_PLACES:
            raise TooMuch(f"more than {_MAX_PLACES} values to guard, the last ones at {names[0]}")


def _slot(place: Place, position: int) -> Slot:
    """The slot that one of the place's values is in."""
    store = place.store
    read = functools.partial(place.read_one, position)
    write = None if store is None else lambda value: store(position, value)
    return Slot(place.names[position], read, write)


_ATOMS = frozenset(
    {int, float, bool, str, bytes, complex, type(None), type(...), torch.dtype, torch.device, slice, types.CodeType}
)


def getter(space: Any, names: list[str]) -> Callable[[], Iterable[Any]]:
    """Reads the named entries of a mapping as they are now; GONE where there is none."""
    if len(names) == 1:
        (name,) = names
        return lambda: (space.get(name, GONE),)
    get = operator.itemgetter(*names)

    def read() -> Iterable[Any]:
        try:
            found: tuple[Any, ...] = get(space)
        except KeyError:
            return tuple(space.get(name, GONE) for name in names)
        return found

    return read

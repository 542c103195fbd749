"""What can be reached from a callable, as data: places and what is in them, tensors, optimizers, containers.

Invariant: a place always tells what is there now; nothing in here is a copy of the user's state.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torchlazy.lazy.state_slots import Slot


@dataclass(frozen=True, eq=False)
class Place:
    """Where some values are: `read()` gives them as they are now, `names` says what each is to a user.

    How they are read fast: `live` is an iterable that always gives the values as they are (a list, a dictionary's
    view); else they are entries of the dict `of` under `keys`, `attributes` of the object `of`, or what `cells` hold.
    """

    owner: Any
    read: Callable[[], Iterable[Any]]
    names: tuple[str, ...]
    store: Callable[[int, Any], None] | None = None
    live: Iterable[Any] | None = None
    of: Any = None
    keys: tuple[Any, ...] = ()
    attributes: tuple[str, ...] = ()
    cells: tuple[types.CellType, ...] = ()
    absent: tuple[dict[str, Any], tuple[str, ...]] | None = None  # the one value: that the dict has none of the names

    def read_one(self, position: int) -> Any:
        """One of the values as it is now; LookupError, AttributeError or ValueError where there is none."""
        if self.keys:
            return self.of[self.keys[position]]
        if self.attributes:
            return getattr(self.of, self.attributes[position])
        return list(self.read())[position]


@dataclass(eq=False)
class Reached:
    """What the walk found. `tensors` and `optimizers` are listed once each, with the name of the first way to them."""

    places: list[Place] = field(default_factory=list)
    fixtures: list[Place] = field(default_factory=list)  # which calls do not change: a library's functions
    classes: list[tuple[dict[str, Any], str]] = field(default_factory=list)  # of which some instance was found
    views: list[tuple[Any, tuple[str, ...]]] = field(default_factory=list)
    tensors: dict[int, tuple[torch.Tensor, str]] = field(default_factory=dict)
    optimizers: list[tuple[torch.optim.Optimizer, str]] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    containers: list[tuple[Any, str]] = field(default_factory=list)  # lists, deques and dicts
    attributes: list[tuple[dict[str, Any], str]] = field(default_factory=list)  # of modules and plain objects
    instances: list[tuple[Any, str]] = field(default_factory=list)  # modules and plain objects: of a class
    codes: list[types.CodeType] = field(default_factory=list)
    arrays: list[tuple[Any, str]] = field(default_factory=list)  # of NumPy, and other memory of plain bytes
    unrepeatable: list[str] = field(default_factory=list)  # why a call that reads something must run its Python
    generators: list[tuple[Callable[[], Any], str]] = field(default_factory=list)  # of random numbers, not torch's
    sized: list[tuple[Any, str]] = field(default_factory=list)
    appended: list[tuple[list[Any], str]] = field(default_factory=list)  # lists that calls only append to
    caches: list[tuple[Any, str]] = field(default_factory=list)  # functions that keep their results
    empty_hooks: list[Any] = field(default_factory=list)
    keep: list[Any] = field(default_factory=list)  # what the identities in here belong to


def stored_in(places: Iterable[Place], name: str) -> tuple[Place, int] | None:
    """The place and position of a named value."""
    for place in places:
        if name in place.names:
            return place, place.names.index(name)
    return None

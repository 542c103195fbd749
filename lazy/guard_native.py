"""Guards as one native pass over what they name, and a little Python for what it cannot see.

Invariant: where this says that nothing changed, the guards' own comparison would say so too. It compares identities
alone: that something else is there which is equal, and what it is that changed, is for the guards to find.
"""

from __future__ import annotations

import ast
import functools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from types import FunctionType
from typing import Any

from torchlazy.lazy.guard_reached import Place
from torchlazy.lazy.guard_tensors import TensorGuards
from torchlazy.lazy.guard_values import SingleValues, WholeContainers
from torchlazy.lazy.torch_private import tensor_readers
from torchlazy.runtime.identity_check import IdentityCheck, keeps_order

Table = tuple[Any, tuple[str, ...]]
_DICT_KEYS: tuple[type, ...] = (type({}.keys()), type(OrderedDict().keys()))


class Native:
    """A native pass over what is there now, which the guards have just found to be as it was.

    `live` and `tables` are looked at whole, of `single` the values whose names are not `free`; of `sized` the lengths,
    `empty` is to stay so, and `instances` are to keep their classes.
    """

    def __init__(
        self,
        live: Iterable[Place],
        tables: Iterable[Table],
        single: Iterable[Place],
        free: frozenset[str],
        sized: Iterable[Any],
        empty: Iterable[Any],
        instances: Sequence[Any],
        tensors: TensorGuards,
    ) -> None:
        self._check = IdentityCheck(tensor_readers())
        self._whole: set[int] = set()  # containers whose lengths are seen with their values
        left = [place for place in live if not self._enter_whole(place)]
        left_tables = [(table, names) for table, names in tables if names and not self._enter_table(table)]
        self._live = WholeContainers(
            [*(p.live for p in left if p.live is not None), *(table.values() for table, _ in left_tables)],
            [name for names in (*(p.names for p in left), *(names for _, names in left_tables)) for name in names],
        )
        self._single = SingleValues([place for place in single if not self._enter_entries(place, free)], free)
        self._sized = [container for container in sized if not self._enter_length(container)]
        self._sizes = list(map(len, self._sized))
        self._empty = [container for container in empty if not self._enter_length(container)]
        self._instances = [] if self._check.classes(instances) else instances
        self._classes = list(map(type, self._instances))
        self._tensors = tensors
        tensors.enter(self._check)

    def holds(self) -> bool:
        """Whether everything is the very thing that it was."""
        return (
            self._tensors.entered_hold(self._check)
            and self._single.holds_very_same()
            and not any(self._empty)
            and list(map(len, self._sized)) == self._sizes
            and list(map(type, self._instances)) == self._classes
            and self._live.holds_very_same()
        )

    def _enter_whole(self, place: Place) -> bool:
        owner = place.owner
        if type(owner) is list and place.live is owner:
            self._check.items(owner, owner)
        elif not keeps_order(owner):
            return False
        elif isinstance(place.live, _DICT_KEYS):
            self._check.keys(owner, list(owner))
        else:
            self._check.values(owner, list(owner.values()))
        self._whole.add(id(owner))
        return True

    def _enter_table(self, table: Any) -> bool:
        if not keeps_order(table):
            return False
        self._check.values(table, list(table.values()))
        self._whole.add(id(table))
        return True

    def _enter_entries(self, place: Place, free: frozenset[str]) -> bool:
        if place.absent is not None and keeps_order(place.absent[0]):
            self._check.absent(*place.absent)
            return True
        if type(place.of) is FunctionType or (type(place.of) is type and place.sources == ("of.__mro__",)):
            for source in place.sources:  # each gives what it has, and makes nothing
                name = source.removeprefix("of.")
                self._check.attribute(place.of, name, getattr(place.of, name))
            return True
        if type(place.of) is not dict or not place.sources:
            return False
        keys = [_key_of(source) for name, source in zip(place.names, place.sources, strict=True) if name not in free]
        self._check.entries(place.of, {key: place.of[key] for key in keys})
        return True

    def _enter_length(self, container: Any) -> bool:
        if id(container) in self._whole:
            return True
        if not keeps_order(container) and type(container) is not OrderedDict:
            return False
        self._check.size(container, len(container))
        return True


@functools.lru_cache(maxsize=65536)
def _key_of(source: str) -> Any:
    """The key in a source such as `of['training']`."""
    return ast.literal_eval(source.removeprefix("of[").removesuffix("]"))

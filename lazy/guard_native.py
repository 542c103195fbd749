"""Guards as one native pass over what they name, and a little Python for what it cannot see.

Invariant: where this says that nothing changed, the guards' own comparison would say so too. It compares identities
alone: that something else is there which is equal, and what it is that changed, is for the guards to find.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from types import FunctionType, MemberDescriptorType
from typing import Any

from torchlazy.lazy.guard_classes import BASES
from torchlazy.lazy.guard_kinds import Registrations
from torchlazy.lazy.guard_places import GONE
from torchlazy.lazy.guard_process import Steady
from torchlazy.lazy.guard_reached import Place
from torchlazy.lazy.guard_tensors import TensorGuards
from torchlazy.lazy.guard_values import SingleValues, WholeContainers
from torchlazy.lazy.guard_walk import DICT, FUNCTION_PARTS
from torchlazy.lazy.torch_private import tensor_readers, without_torch_function
from torchlazy.lazy.torch_private_settings import enter_question
from torchlazy.runtime.dict_views import keeps_order, shows_all
from torchlazy.runtime.identity_check import IdentityCheck

Table = tuple[Any, tuple[str, ...]]
_GENERIC = (object.__getattribute__, dict.__getattribute__, defaultdict.__getattribute__)
_DICT_KEYS: tuple[type, ...] = (type({}.keys()), type(OrderedDict().keys()))


class Native:
    """A native pass over what is there now, which the guards have just found to be as it was.

    `live` and `tables` are looked at whole, of `single` the values whose names are not `free`; of `sized` the lengths,
    `empty` is to stay so, and `instances` are to keep their classes; `results` are tables of functions' caches.
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
        results: Iterable[dict[Any, Any]],
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
        for table in results:
            if table:
                self._check.values(table, list(table.values()))
        self._tensors = tensors
        tensors.enter(self._check)
        left_over = (len(self._single), len(self._live), self._empty, self._sized, self._instances)
        self._is_all = not any(left_over) and not tensors.left_by(self._check)
        # Where attributes of tensors are asked for, their classes are not to be asked.
        self._passes = self._check.complete() if self._check.reads_tensors else self._passes_without_torch_function

    def holds(self) -> bool:
        """Whether everything is the very thing that it was."""
        return self._passes() and self._tensors.rest_holds() and (self._is_all or self._left_holds())

    def _passes_without_torch_function(self) -> bool:
        with without_torch_function():
            return self._check.holds()

    def _left_holds(self) -> bool:
        """The same of what was not entered."""
        return (
            self._tensors.left_holds(self._check)
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
        elif type(owner) is set and place.live is owner and self._check.reads_sets:
            self._check.members(owner, list(owner))
        else:
            kind = shows_all(owner)
            if kind is None or (kind is OrderedDict and not self._check.order(owner)):
                return False
            if isinstance(place.live, _DICT_KEYS):
                self._check.keys(owner, list(dict.keys(owner)))
            else:
                self._check.values(owner, list(dict.values(owner)))
        self._whole.add(id(owner))
        return True

    def _enter_table(self, table: Any) -> bool:
        if not keeps_order(table):
            return False
        self._check.values(table, list(table.values()))
        self._whole.add(id(table))
        return True

    def _enter_entries(self, place: Place, free: frozenset[str]) -> bool:
        if place.absent is not None:
            is_native = keeps_order(place.absent[0])
            if is_native:
                self._check.absent(*place.absent)
            return is_native
        positions = [position for position, name in enumerate(place.names) if name not in free]
        if place.cells:
            for position in positions:
                cell = place.cells[position]
                self._check.cell(cell, cell.cell_contents)
        elif place.keys:
            if not keeps_order(place.of):
                return False
            self._check.entries(place.of, {place.keys[i]: place.of[place.keys[i]] for i in positions})
        elif place.attributes == FUNCTION_PARTS and type(place.of) is FunctionType:
            self._check.function(place.of)
        elif place.attributes == BASES and isinstance(place.of, type):
            self._check.bases(place.of)
        elif place.attributes == DICT:
            self._check.dict_of(place.of, place.of.__dict__)
        elif isinstance(place.read, Steady | Registrations) and place.read.questions:
            return all(enter_question(self._check, *question) for question in place.read.questions)
        elif type(place.owner) is ContextVar:
            self._check.context_value(place.owner, GONE)
        elif place.attributes and _gives_what_it_has(place.of, place.attributes):
            for position in positions:
                name = place.attributes[position]
                self._check.attribute(place.of, name, getattr(place.of, name))
        else:
            return False
        return True

    def _enter_length(self, container: Any) -> bool:
        if id(container) in self._whole:
            return True
        if type(container) is set:
            return self._check.set_size(container)
        if not isinstance(container, dict) or type(container).__len__ is not dict.__len__:
            return False
        self._check.size(container, len(container))
        return True


def _gives_what_it_has(owner: Any, names: Sequence[str]) -> bool:
    """Whether the attributes are values that C code keeps for the object, and gives without making new ones."""
    kind = type(owner)
    if kind is functools.partial:
        return True
    own_way = kind.__getattribute__ in _GENERIC
    return own_way and all(isinstance(getattr(kind, name, None), MemberDescriptorType) for name in names)

"""Guards: whether everything that a captured call read by name is as it was, as one native pass where possible.

Invariant: `holds()` is one native pass and a little Python for what that cannot see; or else a generated function and a
handful of C-level passes over flat lists, whatever the number of operators. Only after one of them fails does Python
compare single values, to say which one changed or to find that it is equal after all. Where the native pass finds that
nothing changed, the comparison by value would find the same: the native pass compares identities only.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from operator import is_
from types import FunctionType, MemberDescriptorType
from typing import Any

import numpy
import torch
from torchlazy.lazy.compiled.guards.classes import BASES
from torchlazy.lazy.compiled.guards.discover import DICT, FUNCTION_PARTS
from torchlazy.lazy.compiled.guards.library_state import Registrations, results_in, results_kept, table_of_results
from torchlazy.lazy.compiled.guards.process import Steady
from torchlazy.lazy.compiled.guards.reached import GONE, GuardedPlace, NotYet, Reached
from torchlazy.lazy.compiled.guards.tensors import TensorGuards
from torchlazy.lazy.compiled.guards.values import SingleValues, WholeContainers
from torchlazy.lazy.torch_private.dispatch import tensor_readers, without_torch_function
from torchlazy.lazy.torch_private.settings import enter_question
from torchlazy.runtime.native.dict_views import keeps_order, shows_all
from torchlazy.runtime.native.identity_check import IdentityCheck, is_ready

Table = tuple[Any, tuple[str, ...]]
_GENERIC = (object.__getattribute__, dict.__getattribute__, defaultdict.__getattribute__)
_DICT_KEYS: tuple[type, ...] = (type({}.keys()), type(OrderedDict().keys()))


class Native:
    """A native pass over the current values, which the guards have just found to be as they were.

    `live` and `tables` are compared whole, of `single` the values whose names are not `free`; of `sized` the lengths,
    `empty` must stay so, and `instances` must keep their classes; `results` are tables of functions' caches.
    """

    def __init__(
        self,
        live: Iterable[GuardedPlace],
        tables: Iterable[Table],
        single: Iterable[GuardedPlace],
        free: frozenset[str],
        sized: Iterable[Any],
        empty: Iterable[Any],
        instances: Sequence[Any],
        tensors: TensorGuards,
        results: Iterable[dict[Any, Any]],
    ) -> None:
        self._check = IdentityCheck(tensor_readers())
        self._whole: set[int] = set()  # containers whose lengths are compared with their values
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
        # Reading attributes of tensors must not call `__torch_function__` of their classes.
        self._passes = self._check.complete() if self._check.reads_tensors else self._passes_without_torch_function

    def holds(self) -> bool:
        """Whether everything is the same object as before."""
        return self._passes() and self._tensors.rest_holds() and (self._is_all or self._left_holds())

    def _passes_without_torch_function(self) -> bool:
        with without_torch_function():
            return self._check.holds()

    def _left_holds(self) -> bool:
        """The same of what the native pass could not include."""
        return (
            self._tensors.left_holds(self._check)
            and self._single.holds_very_same()
            and not any(self._empty)
            and list(map(len, self._sized)) == self._sizes
            and list(map(type, self._instances)) == self._classes
            and self._live.holds_very_same()
        )

    def _enter_whole(self, place: GuardedPlace) -> bool:
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

    def _enter_entries(self, place: GuardedPlace, free: frozenset[str]) -> bool:
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
    """Whether the attributes are values that C code stores in the object, and returns without making new ones."""
    kind = type(owner)
    if kind is functools.partial:
        return True
    own_way = kind.__getattribute__ in _GENERIC
    return own_way and all(isinstance(getattr(kind, name, None), MemberDescriptorType) for name in names)


_NUMBERS = (int, float, bool)
_FIRST_PATIENCE = 2  # calls that held before their guards become native
_LONGEST_PATIENCE = 4096


class Guards:
    """What was read when the guards were made. `free` names values that are inputs of the program instead, `moving`
    tensors whose memory calls replace."""

    def __init__(
        self, reached: Reached, free: frozenset[str] = frozenset(), moving: frozenset[str] = frozenset()
    ) -> None:
        self.reached, self._keep = reached, reached.keep
        self._free = free
        every = (*reached.places, *reached.fixtures)
        places = [place for place in every if not free.issuperset(place.names)]
        self._free_places = [place for place in every if not free.isdisjoint(place.names)]
        self._live_places = [p for p in places if p.live is not None and free.isdisjoint(p.names)]
        self._single_places = [p for p in places if p.live is None or not free.isdisjoint(p.names)]
        self._views = reached.views
        self._live = _whole(self._live_places)
        self._tables = _whole_tables(self._views)
        self._single = SingleValues(self._single_places, free)
        self._empty = [*reached.empty_hooks, *(table for table, names in reached.views if not names)]
        sized = [
            *reached.sized,
            *reached.classes,
            *((table, "the number of its entries") for table, names in reached.views if names),
        ]
        self._sized = [container for container, _ in sized]
        self._sizes = list(map(len, self._sized))
        self._size_names = [name for _, name in sized]
        self._arrays = [(array, _array_facts(array), name) for array, name in reached.arrays]
        self._instances = [value for value, _ in reached.instances]
        self._classes = list(map(type, self._instances))
        self._instance_names = [name for _, name in reached.instances]
        self._caches: list[tuple[Callable[[], bool], str]] = []
        self._results = [results_in(function) for function, _ in reached.caches]
        self._cache_tables: list[dict[Any, Any]] = []
        self._tensors = TensorGuards(reached, moving)
        self._native: Native | None = None
        self._held, self._patience = 0, _FIRST_PATIENCE

    @property
    def memories(self) -> dict[int, int]:
        """The memories of the tensors that were reached, by identity, numbered."""
        return self._tensors.memories

    @property
    def moving(self) -> frozenset[str]:
        """The names of the tensors whose memory may be different at each call."""
        return self._tensors.moving.names

    @property
    def kept(self) -> frozenset[int]:
        """The identities of all that was reached."""
        return frozenset(map(id, self._keep))

    def keep_results(self, caches: Iterable[tuple[Any, str]]) -> None:
        """The call found or left results in these functions' caches: guard that no cache is cleared."""
        caches = list(caches)
        found = [(results_kept(function), name) for function, name in caches]
        self._caches = [(kept, name) for kept, name in found if kept is not None]
        self._cache_tables = [table_of_results(function) for function, _ in caches]

    def ignore_gradients(self) -> None:
        """The call neither read nor set a gradient of what it reached."""
        self._tensors.ignore_gradients()

    def keep_gradients(self, found: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """The template names these gradients of tensors themselves: guard that they stay."""
        self._tensors.kept_gradients = list(found)

    def __len__(self) -> int:
        """How many values are compared."""
        tensors = self._tensors
        count = len(self._live) + len(self._tables) + len(self._single) + len(self._sized) + len(self._empty)
        count += len(tensors.lazy.tensors) + len(tensors.plain.tensors) + len(tensors.constants)
        return (
            count
            + len(self._instances)
            + len(tensors.plain_constants)
            + (len(tensors.leaves) if tensors.watches_gradients else 0)
        )

    def holds(self) -> bool:
        """Whether nothing changed."""
        native = self._native
        if native is not None and native.holds() and (not self._arrays or self._arrays_hold()):
            return True
        if not self._hold_by_value():
            return False
        self._go_native()
        return True

    def _hold_by_value(self) -> bool:
        return (
            self._single.holds()
            and not any(self._empty)
            and list(map(len, self._sized)) == self._sizes
            and list(map(type, self._instances)) == self._classes
            and self._live.holds()
            and self._tables.holds()
            and self._arrays_hold()
            and self._results_are_kept()
            and self._tensors.holds()
        )

    def _arrays_hold(self) -> bool:
        return all(_array_facts(array) == facts for array, facts, _ in self._arrays)

    def _results_are_kept(self) -> bool:
        return not self._caches or all(kept() for kept, _ in self._caches)

    def _go_native(self) -> None:
        """After some calls that held: make a native pass for later ones. Where other objects replaced equal ones it is
        made anew, each time after more calls."""
        if self._native is not None:
            self._native, self._patience = None, min(2 * self._patience, _LONGEST_PATIENCE)
        self._held += 1
        if self._held >= self._patience and is_ready():
            self._held = 0
            self._native = Native(
                self._live_places, self._views, self._single_places, self._free, self._sized, self._empty,
                self._instances, self._tensors, self._cache_tables,
            )  # fmt: skip

    def broken(self) -> list[tuple[str, Any, Any]]:
        """What does not hold: (name, value then, value now), the first few."""
        found = [*self._single.broken(), *self._live.broken(), *self._tables.broken()]
        sizes = map(len, self._sized)
        found += [(n, a, b) for n, a, b in zip(self._size_names, self._sizes, sizes, strict=True) if a != b]
        found += [(n, "other values", "these") for a, facts, n in self._arrays if _array_facts(a) != facts]
        found += [(f"whether {name} keeps its results", True, False) for kept, name in self._caches if not kept()]
        classes = map(type, self._instances)
        rows = zip(self._instance_names, self._classes, classes, strict=True)
        found += [(f"the class of {name}", a, b) for name, a, b in rows if a is not b]
        if any(self._empty):
            found.append(("hooks or entries of a module", "none", "some"))
        return [*found, *self._tensors.broken()][:32]

    def are_very_same(self) -> bool:
        """Whether discovery would find the same again: the very same objects, but for numbers that are free."""
        if self.reached.slots:
            return False  # what a slot holds may be something that is visited
        holds = (
            not any(self._empty)
            and list(map(len, self._sized)) == self._sizes
            and list(map(type, self._instances)) == self._classes
            and self._live.holds_very_same()
            and self._tables.holds_very_same()
            and self._single.holds_very_same()
        )
        results = [results_in(function) for function, _ in self.reached.caches] if holds else []
        for now, then in zip(results, self._results, strict=False):  # tensors among them are visited
            holds = holds and len(now) == len(then) and all(map(is_, now, then))
        return holds and all(map(self._has_numbers, self._free_places))

    def _has_numbers(self, place: GuardedPlace) -> bool:
        """Whether what is free of the place is there, and plain numbers."""
        try:
            values = place.values()
        except (NotYet, LookupError, AttributeError):
            return False
        return all(n not in self._free or type(v) in _NUMBERS for n, v in zip(place.names, values, strict=True))

    def changed_numbers(self) -> list[str]:
        """Names of the guarded plain numbers whose values changed."""
        return [
            name
            for name, then, now in self.broken()
            if type(then) in (int, float) and type(now) is type(then) and not name.startswith(("the ", "key "))
        ]


def _whole(places: Iterable[GuardedPlace]) -> WholeContainers:
    return WholeContainers([p.live for p in places if p.live is not None], [n for p in places for n in p.names])


def _whole_tables(views: Iterable[tuple[Any, tuple[str, ...]]]) -> WholeContainers:
    filled = [(table, names) for table, names in views if names]
    return WholeContainers([table.values() for table, _ in filled], [n for _, names in filled for n in names])


MAX_ARRAY_BYTES = 4096  # of a NumPy array, or other plain memory, that are compared at each call


def why_not_compared(array: Any) -> str:
    """Why guards do not compare the contents of a NumPy array or other memory; empty where they do."""
    if isinstance(array, numpy.ndarray):
        if array.dtype.hasobject:
            return "an array of objects"
        size = array.nbytes
    else:
        try:
            size = memoryview(array).nbytes
        except (ValueError, TypeError, BufferError):
            return "memory that cannot be read"
    return f"{size} bytes" if size > MAX_ARRAY_BYTES else ""


def _array_facts(array: Any) -> Any:
    is_left = bool(why_not_compared(array))
    if isinstance(array, numpy.ndarray):
        return array.shape, array.dtype.str, b"" if is_left else array.tobytes()
    try:
        view = memoryview(array)
    except (ValueError, TypeError, BufferError):
        return None
    return view.shape, view.format, b"" if is_left else view.tobytes()

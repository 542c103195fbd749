"""Guards: whether everything that a captured call read by name is as it was.

Invariant: `holds()` is one native pass, or where there is none a generated function and a handful of C-level passes
over flat lists, whatever the number of operators; only after one of them fails does Python look at single values, to
say which one changed or to find that it is equal after all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy
from torchlazy.lazy.guard_kinds import results_kept, table_of_results
from torchlazy.lazy.guard_native import Native
from torchlazy.lazy.guard_reached import Place, Reached
from torchlazy.lazy.guard_tensors import TensorGuards
from torchlazy.lazy.guard_values import SingleValues, WholeContainers
from torchlazy.runtime.identity_check import is_ready

_FIRST_PATIENCE = 2  # calls that held before their guards are made native
_LONGEST_PATIENCE = 4096


class Guards:
    """What was read when the guards were made. `free` names values that the program takes as inputs instead, `moving`
    tensors whose memory calls exchange."""

    def __init__(
        self, reached: Reached, free: frozenset[str] = frozenset(), moving: frozenset[str] = frozenset()
    ) -> None:
        self._keep = reached.keep
        self._free = free
        places = [place for place in (*reached.places, *reached.fixtures) if not free.issuperset(place.names)]
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
        """The names of the tensors whose memory may be another one at each call."""
        return self._tensors.moving.names

    @property
    def kept(self) -> frozenset[int]:
        """The identities of all that was reached."""
        return frozenset(map(id, self._keep))

    def keep_results(self, caches: Iterable[tuple[Any, str]]) -> None:
        """The call found results in these functions' caches, or left some there: whoever clears one is noticed."""
        caches = list(caches)
        found = [(results_kept(function), name) for function, name in caches]
        self._caches = [(kept, name) for kept, name in found if kept is not None]
        self._cache_tables = [table_of_results(function) for function, _ in caches]

    def ignore_gradients(self) -> None:
        """The call neither read nor set a gradient of what it reached."""
        self._tensors.ignore_gradients()

    def __len__(self) -> int:
        """How many values are looked at."""
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
        """After some calls that held: a native pass for those to come. It is made anew, ever more seldom, where other
        objects took the place of equal ones."""
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

    def changed_numbers(self) -> list[str]:
        """Names of the guarded plain numbers whose values are others now."""
        return [
            name
            for name, then, now in self.broken()
            if type(then) in (int, float) and type(now) is type(then) and not name.startswith(("the ", "key "))
        ]


def _whole(places: Iterable[Place]) -> WholeContainers:
    return WholeContainers([p.live for p in places if p.live is not None], [n for p in places for n in p.names])


def _whole_tables(views: Iterable[tuple[Any, tuple[str, ...]]]) -> WholeContainers:
    filled = [(table, names) for table, names in views if names]
    return WholeContainers([table.values() for table, _ in filled], [n for _, names in filled for n in names])


MAX_ARRAY_BYTES = 4096  # of a NumPy array, or other plain memory, that is compared at each call


def why_not_compared(array: Any) -> str:
    """Why guards do not look at the contents of a NumPy array or other memory; empty where they do."""
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

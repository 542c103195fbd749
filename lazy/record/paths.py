"""Paths: known traces from cut to cut, whose objects a trace that is equal to one shares.

A match reuses the entry, the slot and the geometry of last time. The first operator that differs leaves the path, for
another known one with the same beginning or for none: what was recorded so far stays, because its entries are the very
objects of the path. A cut at the end of a path is compared with the last one by a few comparisons of lists, and then is
the same trace, whose program is found at once.

Invariant: while a path is followed, the running trace's entries and geometries are a prefix of the path's, object by
object. A `KnownCut` matches only where a new `CutTrace` would be equal to its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any

from torchlazy.lazy.trace.geometry import Geometry
from torchlazy.lazy.trace.storage import LazyStorage
from torchlazy.lazy.trace.trace import CutTrace, Entry, Slot, slots_in


class KnownCut:
    """A trace as it was cut, decomposed into lists."""

    __slots__ = ("_bases", "_given", "_given_bases", "_given_slots", "_slots", "_taken_over", "trace")

    def __init__(self, trace: CutTrace) -> None:
        self.trace = trace
        self._slots = [slot for slot, _ in trace.outputs]
        self._bases = [base for _, base in trace.outputs]
        self._given_slots = [slot for slot, _ in trace.inputs]
        self._given_bases = [base for _, base in trace.inputs]
        self._given = _items([position for _, position in trace.donations])
        self._taken_over = _items([output for output, _ in trace.donations])

    def matches(
        self,
        live: Sequence[LazyStorage],
        inputs: Sequence[tuple[Slot, LazyStorage]],
        scalars: Sequence[Any],
        values: int,
    ) -> bool:
        """Whether a cut of the same entries, with so many values, gives this trace again."""
        trace = self.trace
        given = [storage for _, storage in inputs]
        return (
            values == len(trace.geometries)
            and tuple(map(type, scalars)) == trace.scalar_kinds
            and [storage.slot for storage in live] == self._slots
            and [slot for slot, _ in inputs] == self._given_slots
            and [storage.base for storage in live] == self._bases
            and [storage.base for storage in given] == self._given_bases
            # As many inputs are written, and so among the live storages, as before.
            and [storage.dirty for storage in given].count(True) == len(trace.donations)
            and self._taken_over(live) == self._given(given)
        )


def _items(places: Sequence[int]) -> Callable[[Sequence[Any]], Any]:
    """A function that gives the items at these places of a sequence, for comparison."""
    return itemgetter(*places) if places else lambda _: ()


_KEPT_PATHS = 32


class Path:
    """A trace from cut to cut as it was recorded once. `successor` is the path that came after it last time, `cut` the
    trace as it was cut last time, with its inputs and outputs.
    """

    __slots__ = ("cut", "entries", "geometries", "reads", "successor")

    def __init__(self, entries: list[Entry], geometries: list[Geometry]) -> None:
        self.entries = entries
        self.geometries = geometries
        self.successor: Path | None = None
        self.cut: KnownCut | None = None
        self.reads: dict[int, Any] = {}  # by slot: the slices of numbers that were read (record/sliced_read.py)


class Paths:
    """The known paths, the last used first, and a guess which one comes next."""

    def __init__(self) -> None:
        self._known: list[Path] = []
        self._last: Path | None = None

    def begin(self) -> Path | None:
        """The path to follow from the start of a new trace."""
        return None if self._last is None else self._last.successor or self._last

    def finish(self, followed: Path | None, entries: list[Entry], geometries: list[Geometry]) -> None:
        """A trace was cut: remember it, and that it came after the one before."""
        path = followed
        if path is None or len(path.entries) != len(entries):
            path = next((k for k in self._known if k.geometries == geometries and k.entries == entries), None)
            path = path if path is not None else Path(self._shared(entries, geometries), geometries)
        if path in self._known:
            self._known.remove(path)
        self._known.insert(0, path)
        del self._known[_KEPT_PATHS:]
        if self._last is not None:
            self._last.successor = path
        self._last = path

    def with_geometry(self, entries: list[Entry], geometries: list[Geometry]) -> Path | None:
        """A known path that begins with `entries`, the very objects, over values of these geometries."""
        length, values = len(entries), len(geometries)
        for path in self._known:
            if len(path.entries) < length or path.geometries[:values] != geometries:
                continue
            if length == 0 or path.entries[length - 1] is entries[-1]:
                return path
        return None

    def _shared(self, entries: list[Entry], geometries: list[Geometry]) -> list[Entry]:
        """The entries, those of the longest common beginning with a known path being that path's own objects.

        Equal entries are the same only where their results are: 1 and True are equal, and add to two dtypes.
        """
        best: list[Entry] = []
        for path in self._known:
            length = 0
            for mine, theirs in zip(entries, path.entries, strict=False):
                if mine is not theirs and mine != theirs:
                    break
                if any(path.geometries[s.number] is not geometries[s.number] for s in slots_in(mine.outputs)):
                    break
                length += 1
            if length > len(best):
                best = path.entries[:length]
        return [*best, *entries[len(best) :]]

    def alternatives(self, followed: Path, entries: list[Entry], op: object) -> Iterator[Path]:
        """The followed path, then others that begin with `entries`, the very objects; all continue with `op`."""
        length = len(entries)
        for path in (followed, *self._known):
            if len(path.entries) <= length or path.entries[length].op is not op:
                continue
            if path is followed or length == 0 or path.entries[length - 1] is entries[-1]:
                yield path

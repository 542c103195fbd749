"""Splits cuts of the lazy device that hold more than one backward with its forward, and runs the parts in order.

With accumulated gradients, what lies between two reads is the backward of one micro-batch and the forward of the next;
after several forwards one backward goes through all of them. Each part then belongs to one forward, and is planned with
it (run/segments/device.py).

Invariant: the parts, run one after the other, give what the cut gives. What an earlier part could not compute, later
ones do not have either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchlazy.lazy.record.rematerialize import held_elsewhere
from torchlazy.lazy.run.segments import watch
from torchlazy.lazy.run.segments.watch import WatchedCut, is_new, starts_with_backward
from torchlazy.lazy.trace.split import INPUT, SLOT, TracePart, borders_between, end_of_dependents, parts_of
from torchlazy.lazy.trace.storage import LazyStorage, storage_of
from torchlazy.lazy.trace.trace import CutTrace

_MOST_KNOWN = 32


@dataclass(frozen=True)
class CutPartition:
    """The parts of a trace; the first `backwards` of them are of a backward."""

    all: tuple[TracePart, ...]
    backwards: int


@dataclass(frozen=True)
class _KnownCut:
    trace: CutTrace
    held: tuple[Mapping[int, int], ...]
    is_new: tuple[bool, ...]
    parts: CutPartition | None


class CutParts:
    """Splits traces, and remembers how."""

    def __init__(self) -> None:
        self._known: list[_KnownCut] = []  # those asked for last in front

    def of(
        self, trace: CutTrace, given: Sequence[LazyStorage], versions: Sequence[int], live: Sequence[LazyStorage],
        forwards: Iterable[WatchedCut],
    ) -> CutPartition | None:  # fmt: skip
        """The parts of a cut; None where it stays whole. What only this cut reads is referred to by `given` alone;
        `forwards`: those whose backward has not come yet."""
        if trace.writes or not starts_with_backward(trace):
            return None
        shared = set(map(id, held_elsewhere(given)))
        held: list[dict[int, int]] = []
        for forward in forwards:
            made, _ = forward.places.of(given, versions)
            group = {
                number.number: geom.nbytes
                for (number, geom), output, storage in zip(trace.inputs, made, given, strict=True)
                if output in forward.outputs and id(storage) not in shared
            }
            if sum(group.values()) >= watch.LEAST_BYTES and group:
                held.append(group)
        if not held:
            return None
        held.sort(key=min)
        new = tuple(map(is_new, live))
        for known in self._known:
            if known.trace is trace and known.held == tuple(held) and known.is_new == new:
                if self._known[0] is not known:
                    self._known.remove(known)
                    self._known.insert(0, known)
                return known.parts
        parts = _parts(trace, held, new)
        self._known.insert(0, _KnownCut(trace, tuple(held), new, parts))
        del self._known[_MOST_KNOWN:]
        return parts


def _parts(trace: CutTrace, held: Sequence[Mapping[int, int]], new: Sequence[bool]) -> CutPartition | None:
    borders = borders_between(trace, held)
    backwards = len(borders) + 1
    everything = {number: size for group in held for number, size in group.items()}
    state = {trace.outputs[output][0].number for output, _ in trace.donations}
    end = end_of_dependents(trace, everything, state)
    if end is not None and end > max(borders, default=0):
        borders.append(end)
    if not borders:
        return None
    parts = parts_of(trace, borders)
    if parts is None or len(parts) == backwards:
        return None if parts is None else CutPartition(parts, backwards)
    size = sum(trace.outputs[output][1].nbytes for output in parts[-1].outputs if new[output])
    if size and size >= watch.LEAST_BYTES:
        return CutPartition(parts, backwards)
    parts = parts_of(trace, borders[:-1]) if backwards > 1 else None
    return None if parts is None else CutPartition(parts, backwards)


Run = Callable[
    [CutTrace, "list[LazyStorage]", "list[int]", "list[LazyStorage]", "list[Any]", "list[Any]", bool], "list[Any]"
]


def run_parts(
    parts: CutPartition, run: Run, trace: CutTrace, given: list[LazyStorage], versions: Sequence[int],
    live: Sequence[LazyStorage], memory: list[Any], scalars: Sequence[Any],
) -> list[Any]:  # fmt: skip
    """The outputs of the trace. `run` takes what `CutHalves.run` takes, and whether the part continues a backward.
    Empties `given` and `memory`; each value is released with the last part that reads it."""
    whole = _Values(parts.all, trace, given, versions, live, memory)
    given.clear()
    memory.clear()
    values: list[Any] = [None] * len(trace.outputs)
    for number, part in enumerate(parts.all):
        storages, their_versions, theirs = whole.taken(number)
        targets = whole.targets(part)
        lost = next((value for value in theirs if isinstance(value, BaseException)), None)
        made = [lost] * len(targets)
        if lost is None:
            continues = 0 < number < parts.backwards
            made = run(
                part.trace, storages, their_versions, targets, theirs, [scalars[i] for i in part.scalars], continues
            )
        for output, value in zip(part.outputs, made, strict=False):
            values[output] = value
        whole.add(part, made)
    return values


class _Values:
    """What parts read: the inputs of the whole trace, and what earlier parts have made."""

    def __init__(
        self, parts: Sequence[TracePart], trace: CutTrace, given: Sequence[LazyStorage], versions: Sequence[int],
        live: Sequence[LazyStorage], memory: Sequence[Any],
    ) -> None:  # fmt: skip
        self._parts = parts
        self._trace = trace
        self._live = live
        everything = zip(given, versions, memory, strict=True)
        self._known: dict[tuple[str, int], tuple[LazyStorage, int, Any]] = {
            (INPUT, number): found for number, found in enumerate(everything)
        }
        self._last = {source: number for number, part in enumerate(parts) for source in part.sources}
        self._extra: dict[int, LazyStorage] = {}

    def taken(self, number: int) -> tuple[list[LazyStorage], list[int], list[Any]]:
        """The inputs of a part: storages, versions and memory; those that no later part reads are released."""
        sources = self._parts[number].sources
        found = [self._known[s] if self._last[s] > number else self._known.pop(s) for s in sources]
        return [storage for storage, _, _ in found], [n for _, n, _ in found], [value for _, _, value in found]

    def targets(self, part: TracePart) -> list[LazyStorage]:
        """The storages that get a part's outputs."""
        extra = {number: storage_of(self._trace.geometries[number]) for number in part.extra}
        self._extra |= extra
        return [*(self._live[output] for output in part.outputs), *extra.values()]

    def add(self, part: TracePart, made: Sequence[Any]) -> None:
        """What a part has made, as far as later ones read it."""
        known = []
        for output, value in zip(part.outputs, made, strict=False):
            slot, geom = self._trace.outputs[output]
            if geom is self._trace.geometries[slot.number]:
                known.append((slot.number, self._live[output], value))
        for number, value in zip(part.extra, made[len(part.outputs) :], strict=True):
            known.append((number, self._extra.pop(number), value))
        for number, storage, value in known:
            if (SLOT, number) in self._last:
                self._known.setdefault((SLOT, number), (storage, storage.version, value))

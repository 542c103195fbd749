"""Splits a trace into traces that are run one after the other.

Invariant: the parts, run in order, do what the trace does. A part whose entries are those of a trace that was recorded
by itself equals that trace: slots, inputs and numbers are in the order in which its entries mention them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torchlazy.lazy.trace.trace import CutTrace, Entry, ScalarSlot, Slot, operands, scalar_slot, slot, slots_in

INPUT = "input"
SLOT = "slot"
_FEW = 16
"""One of this many bytes that a forward keeps may be read before its backward begins."""


@dataclass(frozen=True)
class TracePart:
    """A part of a trace; all numbers are those of the whole trace.

    `sources`: for each input of the part the INPUT that it is, or the SLOT that an earlier part makes. `outputs`: those
    of the whole trace that it returns; after them it returns the slots in `extra`, which later parts read.
    """

    trace: CutTrace
    sources: tuple[tuple[str, int], ...]
    outputs: tuple[int, ...]
    extra: tuple[int, ...]
    scalars: tuple[int, ...]


def parts_of(trace: CutTrace, borders: Sequence[int]) -> tuple[TracePart, ...] | None:
    """The parts between these positions, in order; None where they cannot be run one after the other."""
    edges = (0, *borders, len(trace.entries))
    spans = list(pairwise(edges))
    made_at = {found.number: at for at, entry in enumerate(trace.entries) for found in slots_in(entry.outputs)}
    given = {number.number for number, _ in trace.inputs}

    def part_of(number: int) -> int:
        at = made_at.get(number, 0)
        return next(part for part, (_, end) in enumerate(spans) if at < end)

    outputs: list[list[int]] = [[] for _ in spans]
    for output, (number, _) in enumerate(trace.outputs):
        outputs[part_of(number.number)].append(output)
    lost = {trace.inputs[at][0].number: part_of(trace.outputs[output][0].number) for output, at in trace.donations}

    found: list[TracePart] = []
    crossing: set[int] = set()  # what later parts read of earlier ones
    for part in range(len(spans) - 1, -1, -1):
        start, end = spans[part]
        extra = _missing_in_outputs(trace, outputs[part], [n for n in sorted(crossing) if start <= made_at[n] < end])
        wanted = {trace.outputs[i][0].number for i in outputs[part]}.union(extra)
        needed = _needed(trace, start, end, wanted)
        again = _remade_views(trace, wanted, made_at, start)
        across = {number for number in wanted if number not in given and made_at[number] < start} - {
            made.number for at in again for made in slots_in(trace.entries[at].outputs)
        }
        if any(lost.get(number, part) < part for number in wanted & given):
            return None  # it reads what an earlier part has overwritten
        if any(not has_own_memory(trace.geometries[number]) for number in across):
            return None
        positions = _with_dead(trace, [*again, *range(start, end)], {*again, *needed}, (wanted & given) | across)
        found.insert(0, part_at(trace, positions, outputs[part], extra))
        crossing = {number for number in crossing if made_at[number] < start} | across
    return tuple(found)


def part_at(trace: CutTrace, positions: Sequence[int], outputs: Sequence[int], extra: Sequence[int] = ()) -> TracePart:
    """The part of the entries at these positions; slots that none of them makes are its inputs."""
    numbers = Renumbering(trace)
    entries = [numbers.entry(trace.entries[position]) for position in positions]
    results = [(numbers.of(trace.outputs[i][0]), trace.outputs[i][1]) for i in outputs]
    results += [(numbers.of(slot(number)), trace.geometries[number]) for number in extra]
    place_of = {number.number: i for i, (number, _) in enumerate(trace.inputs)}
    into = dict(trace.donations)
    for output in outputs:
        if output in into:
            numbers.of(trace.inputs[into[output]][0])
    sources = tuple((INPUT, place_of[n]) if n in place_of else (SLOT, n) for n in numbers.given)
    at = {place: i for i, (kind, place) in enumerate(sources) if kind == INPUT}
    part = CutTrace(
        tuple(entries),
        tuple(numbers.geometries),
        tuple((numbers.of(slot(number)), trace.geometries[number]) for number in numbers.given),
        tuple(trace.scalar_kinds[number] for number in numbers.scalars),
        tuple(results),
        tuple((new, at[into[i]]) for new, i in enumerate(outputs) if i in into),
        tuple(trace.frames[position] for position in positions if position < len(trace.frames)),
    )
    return TracePart(part, sources, tuple(outputs), tuple(extra), tuple(numbers.scalars))


# --- where to split ---


def first_read(trace: CutTrace, held: Mapping[int, int]) -> int:
    """Where the trace begins to read these slots, given with their bytes: the position of the first entry that reads
    one, not counting a few small ones (losses, which the end of the forward combines)."""
    unread = dict(held)
    few = sum(unread.values()) // _FEW
    for position, entry in enumerate(trace.entries):
        for found in operands(entry):
            few -= unread.pop(found.number, 0)
            if few < 0:
                return position
    return len(trace.entries)


def end_of_dependents(trace: CutTrace, held: Mapping[int, int], state: set[int]) -> int | None:
    """The position after the last entry that depends on these slots, except through `state` that is written in between
    (parameters after an optimizer's step); None where that is the trace's end, or none does."""
    tainted = set(held)
    border = None
    for position, entry in enumerate(trace.entries):
        if any(found.number in tainted for found in operands(entry)):
            tainted |= {found.number for found in slots_in(entry.outputs)} - state
            border = position + 1
    return None if border is None or border >= len(trace.entries) else border


def borders_between(trace: CutTrace, groups: Sequence[Mapping[int, int]]) -> list[int]:
    """Where a backward through several forwards changes from one to the next; `groups`: what each forward keeps for it,
    slots with their bytes."""
    waiting = sorted(groups, key=lambda held: first_read(trace, held))
    borders: list[int] = []
    for before, held in pairwise(waiting):
        border = first_read(trace, held)
        if border < len(trace.entries) and border > max(first_read(trace, before), *borders[-1:], 0):
            borders.append(border)
    return borders


# --- what goes into a part ---


def _needed(trace: CutTrace, start: int, end: int, wanted: set[int]) -> set[int]:
    """The entries between two positions that lead to these slots; adds what they read to `wanted`."""
    needed = set()
    for position in range(end - 1, start - 1, -1):
        entry = trace.entries[position]
        if any(made.number in wanted for made in slots_in(entry.outputs)):
            needed.add(position)
            wanted.update(found.number for found in operands(entry))
    return needed


def _remade_views(trace: CutTrace, wanted: set[int], made_at: Mapping[int, int], start: int) -> list[int]:
    """The views before `start` that are made again instead of passed on; adds what they are views of to `wanted`."""
    again: set[int] = set()
    waiting = list(wanted)
    while waiting:
        at = made_at.get(waiting.pop(), start)
        if at < start and at not in again and is_view(trace.entries[at].op):
            again.add(at)
            shown = [found.number for found in operands(trace.entries[at])]
            wanted.update(shown)
            waiting += shown
    return sorted(again)


def _with_dead(trace: CutTrace, positions: Sequence[int], needed: set[int], there: set[int]) -> list[int]:
    """The entries that are needed, and dead ones whose operands are all known here: a trace that is recorded by itself
    has these, too."""
    found = []
    known = set(there)
    for position in positions:
        entry = trace.entries[position]
        if position in needed or all(read.number in known for read in operands(entry)):
            found.append(position)
            known.update(made.number for made in slots_in(entry.outputs))
    return found


def _missing_in_outputs(trace: CutTrace, outputs: Sequence[int], crossing: Sequence[int]) -> list[int]:
    """Those of the slots that are not among the outputs with their own geometry."""
    whole = {trace.outputs[i][0].number for i in outputs if trace.outputs[i][1] is _geometry(trace, i)}
    return [number for number in crossing if number not in whole]


def _geometry(trace: CutTrace, output: int) -> Any:
    return trace.geometries[trace.outputs[output][0].number]


def has_own_memory(geom: Any) -> bool:
    """Whether it is no view of larger memory."""
    return not geom.offset and math.prod(geom.shape) == geom.span


@cache
def is_view(op: torch._ops.OpOverload) -> bool:
    returns = op._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None and not returns[0].alias_info.is_write


class Renumbering:
    """Numbers slots and scalars of a trace anew for a part of it, in the order of their first mention."""

    def __init__(self, trace: CutTrace) -> None:
        self.given: list[int] = []  # slots of the trace that are mentioned before they are made
        self.scalars: list[int] = []
        self.geometries: list[Any] = []
        self._trace = trace
        self._numbers: dict[int, Slot] = {}

    def of(self, number: Slot) -> Slot:
        """A slot that is read."""
        found = self._numbers.get(number.number)
        if found is None:
            self.given.append(number.number)
            found = self._new(number)
        return found

    def _new(self, number: Slot) -> Slot:
        found = self._numbers[number.number] = slot(len(self.geometries))
        self.geometries.append(self._trace.geometries[number.number])
        return found

    def entry(self, entry: Entry) -> Entry:
        args = tuple(self._read(value) for value in entry.args)
        kwargs = tuple((name, self._read(value)) for name, value in entry.kwargs)
        return Entry(entry.op, args, kwargs, self._made(entry.outputs))

    def _read(self, value: Any) -> Any:
        kind = type(value)
        if kind is Slot:
            return self.of(value)
        if kind is ScalarSlot:
            if value.number not in self.scalars:
                self.scalars.append(value.number)
            return scalar_slot(self.scalars.index(value.number), value.kind)
        return tuple(self._read(item) for item in value) if kind is tuple else value

    def _made(self, value: Any) -> Any:
        if type(value) is Slot:
            return self._new(value)
        return tuple(self._made(item) for item in value) if type(value) is tuple else value

"""Splits a trace of many equal layers into units: a layer's forward together with its backward, or what is between.

    entries -> runs of equal calls -> borders where least crosses -> ranges -> units (a range, or two that belong
    together) -> each distinct unit planned once -> plan/layers/link.py

Invariant: each entry is of one unit; a view of what another unit makes, or that in a wider dtype, is made again by the
unit that reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torchlazy.lazy.plan.layers.rows import by_groups
from torchlazy.lazy.plan.layers.runs import Run, find_runs
from torchlazy.lazy.trace.split import INPUT, SLOT, Renumbering, has_own_memory, is_view
from torchlazy.lazy.trace.to_fx import backward_begins
from torchlazy.lazy.trace.trace import CutTrace, Entry, Half, ScalarSlot, Slot, operands, slot, slots_in

LEAST_LAYERS = 3
_LEAST_ENTRIES = 4  # of a period: shorter ones are planned as quickly whole
_APART = 4
"""A byte that is read by a layer of the backward and made in another layer than its own weighs so much: whether to
keep it or to compute it again is decided within a unit."""
_COMPUTED = 1.5
"""So much more a byte weighs that no library call makes: a backward in the same unit might compute it again."""
_LIBRARY = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_dot_product")
_CASTS = (torch.ops.aten._to_copy.default,)
_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten._convolution.default)


@dataclass(frozen=True)
class Unit:
    """A part of a trace; numbers are those of the whole trace.

    `trace` has a `half` where it is of two ranges. `sources`: for each input of it the INPUT that it is, or the SLOT
    that another unit makes; `outputs`: for each output the OUTPUT of the whole that it is, or the SLOT. `at` is where
    each range begins, and `backward` how many of its entries are before the backward (None: there is none).
    """

    trace: CutTrace
    sources: tuple[tuple[str, int], ...]
    scalars: tuple[int, ...]
    outputs: tuple[tuple[str, int], ...]
    at: tuple[int, ...]
    backward: int | None

    def key(self) -> Hashable:
        """Equal for units that are planned alike."""
        return self.trace.signature(), self.backward


@dataclass(frozen=True)
class Split:
    """The units of a trace in the order of their first entries; ranges from `cut` on are of the second half of a
    joined trace."""

    units: tuple[Unit, ...]
    cut: int | None


OUTPUT = "output"


def split(trace: CutTrace) -> Split | str:
    """The units, or why the trace is planned as a whole."""
    facts = _Facts(trace)
    edges = {0, len(facts.live), *_borders(facts)}
    if len(edges) == 2:
        return "no equal layers"
    if trace.half is not None:
        edges.add(facts.backward)
    ranges = [range(a, b) for a, b in pairwise(sorted(edges))]
    range_of = {at: number for number, one in enumerate(ranges) for at in one}
    maker = {number: range_of[at] for number, at in facts.made_at.items()}
    by_rows, borders, moved = by_groups(trace, facts.live, maker, LEAST_LAYERS)
    if borders:
        facts = _Facts(by_rows)
        edges = {moved[edge] for edge in edges if edge in moved} | {*borders, len(by_rows.entries)}
        ranges = [range(a, b) for a, b in pairwise(sorted(edges))]
    groups = _paired(facts, ranges)
    units = facts.units(groups)
    if isinstance(units, str):
        return units
    counts = Counter(unit.key() for unit in units)
    if len(units) - len(counts) < LEAST_LAYERS - 1:
        return "layers that look equal are not"
    if any(counts[unit.key()] > 1 and any(entry.op in _CONVOLUTIONS for entry in unit.trace.entries) for unit in units):
        return "the layout of convolutions is chosen for all of them"
    alone = (unit for unit, ranges in zip(units, groups, strict=True) if len(ranges) == 1 and facts.is_alone(*ranges))
    if any(counts[unit.key()] > 1 for unit in alone):
        return "layers' backwards have no forwards of their own"
    return Split(units, None if trace.half is None else facts.backward)


class _Facts:
    """The entries that some output needs, by their numbers among these: who makes and who reads which slot."""

    def __init__(self, trace: CutTrace) -> None:
        self.trace = trace
        self.live = sorted(trace.needed)
        self.entries = [trace.entries[position] for position in self.live]
        self.reads = [[found.number for found in operands(entry)] for entry in self.entries]
        self.made_at = {made.number: at for at, entry in enumerate(self.entries) for made in slots_in(entry.outputs)}
        self.base: dict[int, int] = {}
        """By slot what it is a view or a wider form of."""
        for at, entry in enumerate(self.entries):
            if self.reads[at] and (is_view(entry.op) or self._widens(entry, self.reads[at][0])):
                shown = self.reads[at][0]
                self.base |= {made.number: self.base.get(shown, shown) for made in slots_in(entry.outputs)}
        self._places = {number.number: place for place, (number, _) in enumerate(trace.inputs)}
        self._into = dict(trace.donations)
        begins = trace.half.entries if trace.half is not None else backward_begins(trace)
        self.backward = len(self.live) if begins is None else sum(position < begins for position in self.live)

    def _widens(self, entry: Entry, read: int) -> bool:
        if entry.op not in _CASTS or type(entry.outputs) is not Slot:
            return False
        before, after = (self.trace.geometries[number] for number in (read, entry.outputs.number))
        return before.compute == after.compute and before.dtype.is_floating_point and before.nbytes < after.nbytes

    def keys(self) -> list[Hashable]:
        """Equal for entries that do the same on values of equal geometries."""
        kinds: dict[Hashable, int] = {}
        of_geometry = [kinds.setdefault((geom.meta, geom.offset), len(kinds)) for geom in self.trace.geometries]

        def form(value: Any) -> Hashable:
            kind = type(value)
            if kind is Slot:
                return Slot, of_geometry[value.number]
            if kind is ScalarSlot:
                return ScalarSlot, value.kind
            return tuple([form(item) for item in value]) if kind is tuple else value  # type: ignore[no-any-return]

        return [(e.op, form(e.args), form(e.kwargs), form(e.outputs)) for e in self.entries]

    def sources(self, positions: range) -> set[int]:
        """What entries read: of a view what it is a view of."""
        return {self.base.get(number, number) for at in positions for number in self.reads[at]}

    def is_alone(self, one: range) -> bool:
        """Whether a range of the backward reads of the forward without belonging to any range of it."""
        return one.start > self.backward and any(
            0 <= self.made_at.get(number, -1) < self.backward for number in self.sources(one)
        )

    def size(self, number: int) -> int:
        return self.trace.geometries[number].nbytes

    def units(self, groups: Sequence[tuple[range, ...]]) -> tuple[Unit, ...] | str:
        unit_of = {at: number for number, ranges in enumerate(groups) for one in ranges for at in one}
        results: list[list[int]] = [[] for _ in groups]
        for output, (given, _) in enumerate(self.trace.outputs):
            results[unit_of[self.made_at[given.number]] if given.number in self.made_at else 0].append(output)
        crossing: list[dict[int, None]] = [{} for _ in groups]
        again: list[set[int]] = [set() for _ in groups]
        for at, numbers in enumerate(self.reads):
            waiting = list(numbers)
            while waiting:
                number = waiting.pop()
                maker = self.made_at.get(number)
                if maker is None or unit_of[maker] == unit_of[at]:
                    continue
                if number in self.base:
                    again[unit_of[at]].add(maker)
                    waiting += self.reads[maker]
                elif has_own_memory(self.trace.geometries[number]):
                    crossing[unit_of[maker]][number] = None
                else:
                    return f"{self.entries[maker].op} gives a part of larger memory to another layer"
        units = tuple(self._unit(*of) for of in zip(groups, again, results, map(list, crossing), strict=True))
        strange = {unit.trace.device for unit in units if unit.trace.device != self.trace.device}
        return f"layers on {strange.pop()}" if strange else units

    def _unit(self, ranges: tuple[range, ...], again: set[int], results: list[int], crossing: list[int]) -> Unit:
        trace, into = self.trace, self._into
        numbers = Renumbering(trace)
        lists = list(self._with_views(ranges, again))
        entries: list[Entry] = []
        outputs: list[tuple[str, int]] = []
        donations: list[tuple[int, Slot]] = []
        half = None
        for late, positions in enumerate(lists):
            entries += [numbers.entry(self.entries[at]) for at in positions]
            for i in results:
                number = trace.outputs[i][0]
                if self._side(number.number, ranges) == late:
                    numbers.of(number)
                    if i in into:
                        donations.append((len(outputs), numbers.of(trace.inputs[into[i]][0])))
                    outputs.append((OUTPUT, i))
            given_out = {trace.outputs[i][0].number for kind, i in outputs if kind == OUTPUT and self._is_whole(i)}
            waiting = (number for number in crossing if number not in given_out)  # else a copy would be made for it
            outputs += [(SLOT, number) for number in waiting if self._side(number, ranges) == late]
            if len(lists) == 2 and not late:
                half = Half(False, len(entries), len(numbers.given), len(numbers.scalars), len(outputs))
        given = [numbers.of(slot(number)) for number in numbers.given]
        gives = [trace.outputs[i] if kind == OUTPUT else (slot(i), trace.geometries[i]) for kind, i in outputs]
        part = CutTrace(
            tuple(entries),
            tuple(numbers.geometries),
            tuple(zip(given, (trace.geometries[number] for number in numbers.given), strict=True)),
            tuple(trace.scalar_kinds[number] for number in numbers.scalars),
            tuple((numbers.of(number), geom) for number, geom in gives),
            tuple((output, given.index(number)) for output, number in donations),
            tuple(trace.frames[self.live[at]] for group in lists for at in group) if trace.frames else (),
            half=half,
        )
        sources = tuple((INPUT, self._places[n]) if n in self._places else (SLOT, n) for n in numbers.given)
        before = sum(at < self.backward for group in lists for at in group)
        backward = before if self.backward < len(self.live) else None
        return Unit(part, sources, tuple(numbers.scalars), tuple(outputs), tuple(one.start for one in ranges), backward)

    def _is_whole(self, output: int) -> bool:
        number, geom = self.trace.outputs[output]
        return geom is self.trace.geometries[number.number]

    def _side(self, number: int, ranges: Sequence[range]) -> int:
        return int(self.made_at.get(number, -1) >= ranges[0].stop) if len(ranges) == 2 else 0

    def _with_views(self, ranges: Sequence[range], again: set[int]) -> Iterator[list[int]]:
        """The entries of each range, after those made again that it is the first to read."""
        left = set(again)
        for one in ranges:
            waiting = [number for at in one for number in self.reads[at]]
            mine = set()
            while waiting:
                at = self.made_at.get(waiting.pop())
                if at in left:
                    left.remove(at)
                    mine.add(at)
                    waiting += self.reads[at]
            yield [*sorted(mine), *one]


# --- where layers begin, and which belong together ---


def _borders(facts: _Facts) -> set[int]:
    """Where layers begin: where least crosses from one to the next, and from a forward to another layer's backward."""
    keys = facts.keys()
    borders: set[int] = set()
    forward: list[tuple[Run, int]] = []
    for begin, end in ((0, facts.backward), (facts.backward, len(keys))):
        for found in find_runs(keys[begin:end], LEAST_LAYERS):
            if found.period < _LEAST_ENTRIES:
                continue
            run = replace(found, start=found.start + begin)
            shift = min(range(run.period), key=lambda s: (_crossing(facts, run, s, forward), s))
            if not begin:
                forward.append((run, shift))
            first = run.start + shift
            if first - run.period >= begin:
                first -= run.period  # a layer that differs from the others
            borders.update(range(first, run.end + 1, run.period))
    return borders


def _crossing(facts: _Facts, run: Run, shift: int, forward: Sequence[tuple[Run, int]]) -> float:
    """The bytes that a layer in the middle reads of the one before, and of forward layers other than its own."""
    border = run.start + shift + run.period * (run.count // 2)
    owners: dict[range, int] = {}
    found = 0.0
    kept: list[int] = []
    for number in facts.sources(range(border, min(border + run.period, run.end))):
        at = facts.made_at.get(number, -1)
        if border - run.period <= at < border:
            is_library = facts.entries[at].op.name().startswith(_LIBRARY)
            found += facts.size(number) * (1.0 if is_library else _COMPUTED)
        for one, off in forward:
            if one.start <= at < one.end:
                start = at - (at - one.start - off) % one.period
                owner = range(start, start + one.period)
                owners[owner] = owners.get(owner, 0) + facts.size(number)
                kept.append(number)
    if owners:
        own = max(owners, key=owners.__getitem__)
        there = facts.sources(own)
        found += _APART * sum(facts.size(n) for n in kept if facts.made_at[n] not in own and n not in there)
    return found


def _paired(facts: _Facts, ranges: Sequence[range]) -> list[tuple[range, ...]]:
    """Each range of the backward with the range of the forward whose parameters and results it reads most of."""
    number_of = {at: number for number, one in enumerate(ranges) for at in one}
    reader: dict[int, int | None] = {}  # of what is given, and read by one range of the forward alone: a parameter
    for number, one in enumerate(ranges):
        for given in facts.sources(one) if one.stop <= facts.backward else ():
            if given not in facts.made_at:
                reader[given] = None if given in reader else number
    read: dict[tuple[int, int], tuple[int, int]] = {}
    for number, one in enumerate(ranges):
        sources = facts.sources(one) if one.start >= facts.backward else set()
        if all(facts.made_at.get(found, facts.backward) >= facts.backward for found in sources):
            continue  # an optimizer's update reads parameters, too
        for found in sources:
            at = facts.made_at.get(found)
            maker = reader.get(found) if at is None else number_of[at]
            if maker is not None and ranges[maker].stop <= facts.backward:
                shared, made = read.get((maker, number), (0, 0))
                size = facts.size(found)
                read[maker, number] = (shared + size, made) if at is None else (shared, made + size)
    partner: dict[int, int] = {}
    taken: set[int] = set()
    for maker, number in sorted(read, key=read.__getitem__, reverse=True):
        if maker not in partner and number not in taken:
            partner[maker] = number
            taken.add(number)
    return [
        (one, ranges[partner[number]]) if number in partner else (one,)
        for number, one in enumerate(ranges)
        if number not in taken
    ]

"""Segments that hold the end of one round and the beginning of the next, taken apart between the two.

Where each round of a call reads its loss (accumulated gradients, the two losses of a GAN), a segment is the backward of
one round and the forward of the next. One plan has one border between forward and backward: taken apart, each forward
is planned together with its own backward (lazy/cut_pairs.py).

Invariant: the parts, run one after the other, do what the segment does. Nothing that the second reads is memory to
which the first has written something else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchlazy.lazy import call_template as t
from torchlazy.lazy import cut_watch
from torchlazy.lazy.cut_pairs import memory_identity, memory_read
from torchlazy.lazy.trace import CutTrace, Entry, Slot, operands, slot, slots_in


def rounds_apart(template: t.CallTemplate) -> t.CallTemplate:
    """The template with such segments in two; itself where there are none."""
    segments = [step for step in template.steps if isinstance(step, t.Segment)]
    if len(segments) < 3:
        return template
    readers = readers_of(template)
    places = template.places
    parts: dict[int, tuple[t.Segment, t.Segment]] = {}
    for before, segment, after in zip(segments, segments[1:], segments[2:], strict=False):
        border = _border(before, segment, after, readers)
        if border is None:
            continue
        splitting = Splitting(segment, border, places)
        found = splitting.parts() if splitting.is_worth_it(after, readers) else None
        if found is not None:
            parts[id(segment)] = found.first, found.second
            places = found.places
    if not parts:
        return template
    steps = [part for step in template.steps for part in parts.get(id(step), (step,))]
    return replace(template, steps=tuple(steps), places=places)


def readers_of(template: t.CallTemplate) -> dict[int, list[Any]]:
    """Who reads each place: steps, and results (as None)."""
    found: dict[int, list[Any]] = {}
    for step in template.steps:
        for memory in memory_read(step):
            if isinstance(memory, t.FromStep):
                found.setdefault(memory.place, []).append(step)
    for result in (*template.results, *(r for effect in template.effects for r in effect.results)):
        if isinstance(result, t.TensorResult) and isinstance(result.memory, t.FromStep):
            found.setdefault(result.memory.place, []).append(None)
    return found


def is_for(memory: t.Memory, reader: t.Segment, readers: dict[int, list[Any]]) -> bool:
    """Whether nobody else reads it."""
    return isinstance(memory, t.FromStep) and all(step is reader for step in readers.get(memory.place, [None]))


def _border(before: t.Segment, segment: t.Segment, after: t.Segment, readers: dict[int, list[Any]]) -> int | None:
    """The position behind the last entry of the backward: the last that depends on what the forward before holds for
    it, but through state that was written in between (parameters after an optimizer's step)."""
    trace = segment.trace
    starts = cut_watch.starts_with_backward(trace) and cut_watch.starts_with_backward(after.trace)
    if not starts:
        return None
    made = {target.place for target in before.targets if isinstance(target, t.FromStep)}
    tainted = {
        number.number
        for (number, _), source in zip(trace.inputs, segment.inputs, strict=True)
        if isinstance(source, t.FromStep) and source.place in made and is_for(source, segment, readers)
    }
    state = {
        number.number
        for (number, _), target in zip(trace.outputs, segment.targets, strict=True)
        if not isinstance(target, t.FromStep)
    }
    border = None
    for position, entry in enumerate(trace.entries):
        if any(found.number in tainted for found in operands(entry)):
            tainted |= {found.number for found in slots_in(entry.outputs)} - state
            border = position + 1
    return None if border is None or border >= len(trace.entries) else border


@dataclass(frozen=True)
class Parts:
    first: t.Segment
    second: t.Segment
    places: int


class Splitting:
    """A segment, and the position in its trace at which it is taken apart."""

    def __init__(self, segment: t.Segment, border: int, places: int) -> None:
        self.segment = segment
        self.trace = segment.trace
        self.border = border
        self.places = places
        early = self.trace.entries[:border]
        self._early = {found.number for entry in early for found in slots_in(entry.outputs)}
        self._early |= {number.number for number, _ in self.trace.inputs}

    def is_worth_it(self, after: t.Segment, readers: dict[int, list[Any]]) -> bool:
        """Whether `after` alone reads enough of what the second part makes."""
        outputs = zip(self.trace.outputs, self.segment.targets, strict=True)
        late = (
            geom
            for (made, geom), target in outputs
            if made.number not in self._early and is_for(target, after, readers)
        )
        return sum(geom.nbytes for geom in late) >= cut_watch.LEAST_BYTES

    def parts(self) -> Parts | None:
        """The two; None where they cannot be run one after the other."""
        trace, segment = self.trace, self.segment
        outputs = list(range(len(trace.outputs)))
        first_outputs = [i for i in outputs if trace.outputs[i][0].number in self._early]
        second_outputs = [i for i in outputs if trace.outputs[i][0].number not in self._early]
        wanted = {trace.outputs[i][0].number for i in second_outputs}
        needed: list[int] = []
        for position in range(len(trace.entries) - 1, self.border - 1, -1):
            entry = trace.entries[position]
            if any(found.number in wanted for found in slots_in(entry.outputs)):
                needed.insert(0, position)
                wanted |= {found.number for found in operands(entry)}
        given = {number.number for number, _ in trace.inputs}
        crossing = sorted(number for number in wanted if number in self._early and number not in given)
        sources, extra = self._crossing_memory(crossing, first_outputs)
        if sources is None:
            return None
        late = [i for i, (number, _) in enumerate(trace.inputs) if number.number in wanted]
        donated = dict(trace.donations)
        late = sorted({*late, *(donated[i] for i in second_outputs if i in donated)})
        written = {memory_identity(segment.targets[i]) for i in first_outputs}
        if any(memory_identity(segment.inputs[i]) in written for i in late):
            return None  # the second part reads what the first has overwritten
        first = self.part(range(self.border), None, first_outputs, extra, [])
        second = self.part(needed, late, second_outputs, [], [(number, sources[number]) for number in crossing])
        return Parts(first, second, self.places)

    def _crossing_memory(
        self, crossing: Sequence[int], first_outputs: Sequence[int]
    ) -> tuple[dict[int, t.Memory] | None, list[tuple[int, t.FromStep]]]:
        """Where the second part finds each value that the first makes; and those that are no outputs as it is."""
        trace, segment = self.trace, self.segment
        known: dict[int, t.Memory] = {}
        for output in first_outputs:
            made, geom = trace.outputs[output]
            if geom is trace.geometries[made.number]:
                known.setdefault(made.number, segment.targets[output])
        extra: list[tuple[int, t.FromStep]] = []
        for number in crossing:
            if number in known:
                continue
            geom = trace.geometries[number]
            if geom.offset or math.prod(geom.shape) != geom.span:
                return None, []  # a window: it has no memory of its own
            place = t.FromStep(self.places)
            self.places += 1
            known[number] = place
            extra.append((number, place))
        return known, extra

    def part(
        self,
        positions: Sequence[int],
        inputs: Sequence[int] | None,
        outputs: Sequence[int],
        extra: Sequence[tuple[int, t.FromStep]],
        crossing: Sequence[tuple[int, t.Memory]],
    ) -> t.Segment:
        """The segment of the entries at these positions. `inputs`: of the whole trace, by number (None: those that it
        reads or writes to); `extra`: slots that are outputs besides; `crossing`: slots that are inputs besides."""
        trace, segment = self.trace, self.segment
        entries = [trace.entries[position] for position in positions]
        donated = dict(trace.donations)
        if inputs is None:
            read = {found.number for entry in entries for found in operands(entry)}
            read |= {trace.outputs[i][0].number for i in outputs}
            inputs = [i for i, (number, _) in enumerate(trace.inputs) if number.number in read]
            inputs = sorted({*inputs, *(donated[i] for i in outputs if i in donated)})
        place_of = {given: place for place, given in enumerate(inputs)}
        numbers = _Renumbering(trace)
        given = [(numbers.of(trace.inputs[i][0]), trace.inputs[i][1]) for i in inputs]
        given += [(numbers.of(slot(number)), trace.geometries[number]) for number, _ in crossing]
        made = [numbers.entry(entry) for entry in entries]
        results = [(numbers.of(trace.outputs[i][0]), trace.outputs[i][1]) for i in outputs]
        results += [(numbers.of(slot(number)), trace.geometries[number]) for number, _ in extra]
        part = CutTrace(
            tuple(made),
            tuple(numbers.geometries),
            tuple(given),
            trace.scalar_kinds,
            tuple(results),
            tuple((new, place_of[donated[i]]) for new, i in enumerate(outputs) if i in donated),
            tuple(trace.frames[position] for position in positions if position < len(trace.frames)),
        )
        return replace(
            segment,
            trace=part,
            inputs=(*(segment.inputs[i] for i in inputs), *(memory for _, memory in crossing)),
            targets=(*(segment.targets[i] for i in outputs), *(place for _, place in extra)),
        )


class _Renumbering:
    """Slots of a trace under the numbers of a part of it, in the order of their first mention."""

    def __init__(self, trace: CutTrace) -> None:
        self._trace = trace
        self._numbers: dict[int, Slot] = {}
        self.geometries: list[Any] = []

    def of(self, number: Slot) -> Slot:
        found = self._numbers.get(number.number)
        if found is None:
            found = self._numbers[number.number] = slot(len(self.geometries))
            self.geometries.append(self._trace.geometries[number.number])
        return found

    def entry(self, entry: Entry) -> Entry:
        args = tuple(self._renamed(value) for value in entry.args)
        kwargs = tuple((name, self._renamed(value)) for name, value in entry.kwargs)
        return Entry(entry.op, args, kwargs, self._renamed(entry.outputs))

    def _renamed(self, value: Any) -> Any:
        if type(value) is Slot:
            return self.of(value)
        return tuple(self._renamed(item) for item in value) if type(value) is tuple else value

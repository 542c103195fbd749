"""Splits segments so that each forward of a call is planned with its own backward; forwards share equal values.

Micro-batches: where each reads its loss (accumulated gradients, the two losses of a GAN), a segment is the backward of
one micro-batch and the forward of the next. One plan has one border between forward and backward, so the segment is
split there, and each forward is paired with its own backward (compiled/replay/pairs.py).

One backward of several forwards that were cut separately (a loop asks an environment after each): torch's engine goes
back from the last forward to the first. The backward is split where it comes to the next forward, and each forward is
paired with its own part, pair within pair.

Shared values: under autocast each forward makes half-precision copies of the weights, which its backward reads.
Recorded as one graph these are equal expressions, of which one stays. Where forwards are cut separately, each would
hold its own copies until the backward comes; they are computed and kept once.

Invariant: the parts, run one after the other, do what the segment does. Nothing that the second reads is memory to
which the first has written something else. A value is shared with an earlier segment only where it is the same operator
on the same values, of memory that nothing has written to in between; results of the call are never shared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchlazy.lazy.compiled.replay.pairs import leaves_memory, memory_identity, memory_read
from torchlazy.lazy.compiled.template import template as t
from torchlazy.lazy.compiled.template.custom_ops import memory_written
from torchlazy.lazy.run.segments import watch
from torchlazy.lazy.trace.split import INPUT, TracePart, borders_between, end_of_dependents, part_at, parts_of
from torchlazy.lazy.trace.to_fx import backward_begins
from torchlazy.lazy.trace.trace import Entry, ScalarSlot, Slot, operands, slots_in


def split_micro_batches(template: t.CallTemplate) -> t.CallTemplate:
    """The template with segments split between micro-batches; itself where there are none."""
    segments = [step for step in template.steps if isinstance(step, t.Segment)]
    if len(segments) < 3:
        return template
    readers = readers_of(template)
    places = template.places
    parts: dict[int, list[t.Segment]] = {}
    for before, segment, after in zip(segments, segments[1:], segments[2:], strict=False):
        border = _border(before, segment, after, readers)
        if border is None:
            continue
        found, more = split_segment(segment, [border], places)
        if len(found) > 1 and _is_worth_it(found[1], after, readers):
            parts[id(segment)], places = found, more
    if not parts:
        return template
    steps = [part for step in template.steps for part in parts.get(id(step), [step])]
    return replace(template, steps=tuple(steps), places=places)


def readers_of(template: t.CallTemplate) -> dict[int, list[Any]]:
    """The readers of each place: steps, and results (as None)."""
    found: dict[int, list[Any]] = {}
    for step in template.steps:
        for memory in memory_read(step):
            if isinstance(memory, t.FromStep):
                found.setdefault(memory.place, []).append(step)
    for result in (*template.results, *(r for effect in template.effects for r in effect.results)):
        if isinstance(result, t.TensorResult) and isinstance(result.memory, t.FromStep):
            found.setdefault(result.memory.place, []).append(None)
    return found


def has_only_reader(memory: t.Memory, reader: t.Segment, readers: dict[int, list[Any]]) -> bool:
    """Whether nothing else reads it."""
    return isinstance(memory, t.FromStep) and all(step is reader for step in readers.get(memory.place, [None]))


def _border(before: t.Segment, segment: t.Segment, after: t.Segment, readers: dict[int, list[Any]]) -> int | None:
    """The position behind the last entry of the backward: the last that depends on what the forward before holds for
    it, other than through state that was written in between (parameters after an optimizer's step)."""
    trace = segment.trace
    starts = watch.starts_with_backward(trace) and watch.starts_with_backward(after.trace)
    if not starts:
        return None
    made = {target.place for target in before.targets if isinstance(target, t.FromStep)}
    held = {
        number.number: geom.nbytes
        for (number, geom), source in zip(trace.inputs, segment.inputs, strict=True)
        if isinstance(source, t.FromStep) and source.place in made and has_only_reader(source, segment, readers)
    }
    state = {
        number.number
        for (number, _), target in zip(trace.outputs, segment.targets, strict=True)
        if not isinstance(target, t.FromStep)
    }
    return end_of_dependents(trace, held, state)


def _is_worth_it(part: t.Segment, after: t.Segment, readers: dict[int, list[Any]]) -> bool:
    """Whether `after` alone reads enough of what the part makes."""
    outputs = zip(part.trace.outputs, part.targets, strict=True)
    return (
        sum(geom.nbytes for (_, geom), target in outputs if has_only_reader(target, after, readers))
        >= watch.LEAST_BYTES
    )


def split_segment(segment: t.Segment, borders: Sequence[int], places: int) -> tuple[list[t.Segment], int]:
    """The segment in parts between these positions of its trace, itself where they cannot be run one after the other;
    and the number of places then."""
    parts = parts_of(segment.trace, borders)
    if parts is None:
        return [segment], places
    where: dict[int, t.Memory] = {}
    for part in parts:
        for output in part.outputs:
            made, geom = segment.trace.outputs[output]
            if geom is segment.trace.geometries[made.number]:
                where.setdefault(made.number, segment.targets[output])
        for number in part.extra:
            where[number] = t.FromStep(places)
            places += 1
    written: set[tuple[str, int]] = set()
    for part in parts:
        given = [segment.inputs[number] for kind, number in part.sources if kind == INPUT]
        if any(memory_identity(memory) in written for memory in given):
            return [segment], places  # it reads what an earlier part has overwritten
        written |= {memory_identity(segment.targets[output]) for output in part.outputs}
    return [segment_of(segment, part, where) for part in parts], places


def segment_of(segment: t.Segment, part: TracePart, where: Mapping[int, t.Memory]) -> t.Segment:
    """A part as a segment; `where`: the memory of slots that it passes on, or gets from others."""
    return replace(
        segment,
        trace=part.trace,
        inputs=tuple(segment.inputs[n] if kind == INPUT else where[n] for kind, n in part.sources),
        scalars=tuple(segment.scalars[number] for number in part.scalars),
        targets=(*(segment.targets[i] for i in part.outputs), *(where[number] for number in part.extra)),
    )


def with_shared_values(template: t.CallTemplate, forwards: Collection[int]) -> t.CallTemplate:
    """The template, in which the segments of these identities share the values that they compute alike."""
    readers = readers_of(template)
    written = Counter(
        target.place for step in template.steps for target in _targets_of(step) if isinstance(target, t.FromStep)
    )
    known = _SegmentValues()
    renamed: dict[int, t.FromStep] = {}
    steps: list[t.Step] = []
    for step in template.steps:
        if not isinstance(step, t.Segment):
            steps.append(step)
            if isinstance(step, t.Collective) or not leaves_memory(step, known.read):
                known.forget()
            continue
        inputs = tuple(renamed.get(m.place, m) if isinstance(m, t.FromStep) else m for m in step.inputs)
        segment = step if inputs == step.inputs else replace(step, inputs=inputs)
        if id(step) in forwards:
            values = known.values_of(segment)
            taken: dict[int, t.FromStep] = {}
            for (made, geom), target in zip(segment.trace.outputs, segment.targets, strict=True):
                if not isinstance(target, t.FromStep) or written[target.place] > 1:
                    continue
                if None in readers.get(target.place, [None]) or made.number not in values:
                    continue
                earlier = known.places.setdefault((values[made.number], geom), target)
                if earlier is not target and made.number not in taken:
                    taken[made.number] = renamed[target.place] = earlier
            if taken:
                segment = _taking(segment, taken, renamed)
        known.have_been_written(segment)
        steps.append(segment)
    return replace(template, steps=tuple(steps)) if renamed else template


def _targets_of(step: t.Step) -> Sequence[t.Memory]:
    if isinstance(step, t.LazyCall):
        return memory_written(step)
    return step.targets if isinstance(step, t.Segment) else ()


def _taking(segment: t.Segment, taken: dict[int, t.FromStep], renamed: dict[int, t.FromStep]) -> t.Segment:
    """The segment with these slots as inputs, from earlier places, and without them among its outputs."""
    trace = segment.trace
    outputs = [
        i
        for i, target in enumerate(segment.targets)
        if not (isinstance(target, t.FromStep) and target.place in renamed)
    ]
    wanted = {trace.outputs[i][0].number for i in outputs}
    needed: list[int] = []
    for position in range(len(trace.entries) - 1, -1, -1):
        entry = trace.entries[position]
        if any(made.number in wanted and made.number not in taken for made in slots_in(entry.outputs)):
            needed.insert(0, position)
            wanted |= {found.number for found in operands(entry)}
    return segment_of(segment, part_at(trace, needed, outputs), taken)


class _SegmentValues:
    """The values of segments so far, by number: equal values have one. `read`: the memory that they were read from."""

    def __init__(self) -> None:
        self.places: dict[Any, t.FromStep] = {}
        self.read: list[t.Memory] = []
        self._numbers: dict[Any, int] = {}
        self._versions: Counter[Any] = Counter()

    def forget(self) -> None:
        """A step may have written to what was read."""
        self.places.clear()
        self._numbers.clear()
        self.read.clear()

    def have_been_written(self, segment: t.Segment) -> None:
        self._versions.update(map(memory_identity, segment.targets))

    def values_of(self, segment: t.Segment) -> dict[int, int]:
        """The number of the value of each slot of the trace, where it is known."""
        trace = segment.trace
        found: dict[int, int] = {}
        for (slot, geom), memory in zip(trace.inputs, segment.inputs, strict=True):
            identity = memory_identity(memory)
            found[slot.number] = self._number(("memory", identity, self._versions[identity], geom))
            self.read.append(memory)
        for entry in trace.entries:
            if entry.op.namespace not in ("aten", "torchlazy"):
                continue
            key = _key(entry, found, segment.scalars)
            if key is None:
                continue
            for path, slot in enumerate(slots_in(entry.outputs)):
                found[slot.number] = self._number((key, path))
        return found

    def _number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))


def _key(entry: Entry, values: dict[int, int], scalars: Any) -> Any:
    """What the entry computes, by the numbers of its operands; None where one of these has none."""

    def argument(value: Any) -> Any:
        kind = type(value)
        if kind is Slot:
            return "value", values[value.number]
        if kind is ScalarSlot:
            return "number", scalars[value.number]
        return tuple(map(argument, value)) if kind is tuple else (kind, value)

    try:
        key = (entry.op, argument(entry.args), argument(entry.kwargs))
        hash(key)
    except (KeyError, IndexError, TypeError):
        return None
    return key


def split_by_forward(template: t.CallTemplate) -> t.CallTemplate:
    """The template with the backward of several forwards in parts, and forwards that share equal values; itself where
    there are none."""
    several = {id(forward) for _, own in _groups(template) if len(own) > 1 for forward in own}
    if not several:
        return template
    template = with_shared_values(template, several)
    readers = readers_of(template)
    places = template.places
    parts: dict[int, list[t.Segment]] = {}
    for segment, own in _groups(template):
        found, places = _parts(segment, own, readers, places)
        if len(found) > 1:
            parts[id(segment)] = found
    steps = [part for step in template.steps for part in parts.get(id(step), (step,))]
    return replace(template, steps=tuple(steps), places=places)


def _groups(template: t.CallTemplate) -> Iterator[tuple[t.Segment, list[t.Segment]]]:
    """The segments that begin with a backward, each with the forwards before it that hold enough for it."""
    segments = [step for step in template.steps if isinstance(step, t.Segment)]
    readers = readers_of(template) if len(segments) > 2 else {}
    forwards: list[t.Segment] = []
    for segment in segments:
        if watch.starts_with_backward(segment.trace):
            yield segment, [f for f in forwards if sum(_private(f, segment, readers).values()) >= watch.LEAST_BYTES]
            forwards = []
        elif backward_begins(segment.trace) is None:
            forwards.append(segment)


def _private(forward: t.Segment, segment: t.Segment, readers: dict[int, list[Any]]) -> dict[int, int]:
    """The places that the forward makes, and only the segment reads, with their bytes."""
    outputs = zip(forward.trace.outputs, forward.targets, strict=True)
    return {
        target.place: geom.nbytes
        for (_, geom), target in outputs
        if isinstance(target, t.FromStep) and has_only_reader(target, segment, readers)
    }


def _parts(
    segment: t.Segment, forwards: Sequence[t.Segment], readers: dict[int, list[Any]], places: int
) -> tuple[list[t.Segment], int]:
    """The segment in as many parts as can be separated, in order; and the number of places then."""
    groups = [_held(segment, _private(forward, segment, readers)) for forward in forwards]
    parts, places = split_segment(segment, borders_between(segment.trace, groups), places)
    return [parts[0], *(replace(part, goes_on=True) for part in parts[1:])], places


def _held(segment: t.Segment, made: dict[int, int]) -> dict[int, int]:
    """The slots of the segment's trace that are at these places, with their bytes."""
    inputs = zip(segment.trace.inputs, segment.inputs, strict=True)
    return {
        number.number: made[source.place]
        for (number, _), source in inputs
        if isinstance(source, t.FromStep) and source.place in made
    }


__all__ = ["with_shared_values"]

"""Segments that hold the end of one round and the beginning of the next, taken apart between the two.

Where each round of a call reads its loss (accumulated gradients, the two losses of a GAN), a segment is the backward of
one round and the forward of the next. One plan has one border between forward and backward: taken apart, each forward
is planned together with its own backward (lazy/cut_pairs.py).

Invariant: the parts, run one after the other, do what the segment does. Nothing that the second reads is memory to
which the first has written something else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchlazy.lazy import call_template as t
from torchlazy.lazy import cut_watch
from torchlazy.lazy.cut_pairs import memory_identity, memory_read
from torchlazy.lazy.trace_parts import INPUT, Part, behind_the_last, parts_of


def rounds_apart(template: t.CallTemplate) -> t.CallTemplate:
    """The template with such segments in two; itself where there are none."""
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
        found, more = taken_apart(segment, [border], places)
        if len(found) > 1 and _is_worth_it(found[1], after, readers):
            parts[id(segment)], places = found, more
    if not parts:
        return template
    steps = [part for step in template.steps for part in parts.get(id(step), [step])]
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
    held = {
        number.number: geom.nbytes
        for (number, geom), source in zip(trace.inputs, segment.inputs, strict=True)
        if isinstance(source, t.FromStep) and source.place in made and is_for(source, segment, readers)
    }
    state = {
        number.number
        for (number, _), target in zip(trace.outputs, segment.targets, strict=True)
        if not isinstance(target, t.FromStep)
    }
    return behind_the_last(trace, held, state)


def _is_worth_it(part: t.Segment, after: t.Segment, readers: dict[int, list[Any]]) -> bool:
    """Whether `after` alone reads enough of what the part makes."""
    outputs = zip(part.trace.outputs, part.targets, strict=True)
    return sum(geom.nbytes for (_, geom), target in outputs if is_for(target, after, readers)) >= cut_watch.LEAST_BYTES


def taken_apart(segment: t.Segment, borders: Sequence[int], places: int) -> tuple[list[t.Segment], int]:
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


def segment_of(segment: t.Segment, part: Part, where: Mapping[int, t.Memory]) -> t.Segment:
    """A part as a segment; `where`: the memory of slots that it hands on, or is given by others."""
    return replace(
        segment,
        trace=part.trace,
        inputs=tuple(segment.inputs[n] if kind == INPUT else where[n] for kind, n in part.sources),
        scalars=tuple(segment.scalars[number] for number in part.scalars),
        targets=(*(segment.targets[i] for i in part.outputs), *(where[number] for number in part.extra)),
    )

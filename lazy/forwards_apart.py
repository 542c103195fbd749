"""The backward of several forwards that were cut one from the other, taken apart between them.

A loop asks an environment after each forward, and one backward goes through all of them. torch's engine works its way
back from the last forward to the first. Taken apart where it comes to the next one, each part belongs to one forward,
and each forward is planned together with its own part (lazy/cut_pairs.py), pair within pair.

Invariant: the parts, run one after the other, do what the segment does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torchlazy.lazy import call_template as t
from torchlazy.lazy import cut_watch
from torchlazy.lazy.fx_graph import backward_begins
from torchlazy.lazy.rounds_apart import is_for, readers_of, taken_apart
from torchlazy.lazy.shared_values import with_shared_values
from torchlazy.lazy.trace_parts import borders_between


def forwards_apart(template: t.CallTemplate) -> t.CallTemplate:
    """The template with such backwards in several segments, and forwards that share what they keep alike
    (lazy/shared_values.py); itself where there are none."""
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
        if cut_watch.starts_with_backward(segment.trace):
            yield segment, [f for f in forwards if sum(_private(f, segment, readers).values()) >= cut_watch.LEAST_BYTES]
            forwards = []
        elif backward_begins(segment.trace) is None:
            forwards.append(segment)


def _private(forward: t.Segment, segment: t.Segment, readers: dict[int, list[Any]]) -> dict[int, int]:
    """The places that the forward makes, and nobody but the segment reads, with their bytes."""
    outputs = zip(forward.trace.outputs, forward.targets, strict=True)
    return {
        target.place: geom.nbytes
        for (_, geom), target in outputs
        if isinstance(target, t.FromStep) and is_for(target, segment, readers)
    }


def _parts(
    segment: t.Segment, forwards: Sequence[t.Segment], readers: dict[int, list[Any]], places: int
) -> tuple[list[t.Segment], int]:
    """The segment in as many parts as can be told apart, in order; and the number of places then."""
    groups = [_held(segment, _private(forward, segment, readers)) for forward in forwards]
    parts, places = taken_apart(segment, borders_between(segment.trace, groups), places)
    return [parts[0], *(replace(part, goes_on=True) for part in parts[1:])], places


def _held(segment: t.Segment, made: dict[int, int]) -> dict[int, int]:
    """The slots of the segment's trace that are at these places, with their bytes."""
    inputs = zip(segment.trace.inputs, segment.inputs, strict=True)
    return {
        number.number: made[source.place]
        for (number, _), source in inputs
        if isinstance(source, t.FromStep) and source.place in made
    }

"""Values that several forwards of a call compute alike and keep: computed and kept once.

Under autocast each forward makes half-precision copies of the weights, which its backward reads. Recorded as one graph
these are equal expressions, of which one stays. Where forwards are cut one from the other, each would hold its own
copies until the backward comes.

Invariant: a value is shared with an earlier segment only where it is the same operator on the same values, of memory
that nobody has written to in between; results of the call are never shared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from torchlazy.lazy import call_template as t
from torchlazy.lazy.cut_pairs import leaves_memory, memory_identity
from torchlazy.lazy.own_operators import memory_written
from torchlazy.lazy.rounds_apart import readers_of, segment_of
from torchlazy.lazy.trace import Entry, ScalarSlot, Slot, operands, slots_in
from torchlazy.lazy.trace_parts import part_at


def with_shared_values(template: t.CallTemplate, forwards: Collection[int]) -> t.CallTemplate:
    """The template, in which the segments of these identities take from each other what they compute alike."""
    readers = readers_of(template)
    written = Counter(
        target.place for step in template.steps for target in _targets_of(step) if isinstance(target, t.FromStep)
    )
    known = _Known()
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


class _Known:
    """The values of segments so far, by number: equal values have one. `read`: the memory that they were read from."""

    def __init__(self) -> None:
        self.places: dict[Any, t.FromStep] = {}
        self.read: list[t.Memory] = []
        self._numbers: dict[Any, int] = {}
        self._versions: Counter[Any] = Counter()

    def forget(self) -> None:
        """Somebody may have written to what was read."""
        self.places.clear()
        self._numbers.clear()
        self.read.clear()

    def have_been_written(self, segment: t.Segment) -> None:
        self._versions.update(map(memory_identity, segment.targets))

    def values_of(self, segment: t.Segment) -> dict[int, int]:
        """The number of the value of each slot of the trace that can be told."""
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


__all__ = ["with_shared_values"]

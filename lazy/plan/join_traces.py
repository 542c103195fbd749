"""Joins two traces that run one after the other: planned as a whole, run as two programs.

Where the loss is read before `backward()`, the trace is cut there. Joined again, forward and backward are planned as in
a graph without the cut: the partition over both chooses what is held, not autograd, and values that cross have the
layout that their readers want.

Invariant: a joined trace computes what the two compute one after the other, if nothing in between writes to memory that
both read. An output of the first that only the second reads is no output of the joined trace.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torchlazy.autograd.halves import HELD, RESULT, split_step
from torchlazy.lazy.trace.geometry import Geometry
from torchlazy.lazy.trace.trace import CutTrace, Entry, Half, ScalarSlot, Slot, scalar_slot, slot
from torchlazy.runtime.program.program import Program

INPUT = "in"
"""Placeholders that are inputs of the joined trace, as trace/to_fx.py names them; others: autograd/halves.py."""
SCALAR = "scalar"
"""Scalars of the joined trace, where a program reads them from memory."""

BUFFER = "buf"
"""What the first program makes, by its name there."""

_copy = torch.ops.aten.copy.default
_empty_strided = torch.ops.aten.empty_strided.default


@dataclass(frozen=True)
class Joined:
    """The joined trace, as the first and as the second half is compiled from it.

    `visible`: which outputs of the first trace are outputs of the joined one, in order. `second_inputs`: for each input
    of the second trace the joined trace's; None for what the first makes.
    """

    first: CutTrace
    second: CutTrace
    visible: tuple[int, ...]
    second_inputs: tuple[int | None, ...]


def join(
    first: CutTrace,
    second: CutTrace,
    *,
    made: Sequence[int | None],
    given: Sequence[int | None],
    visible: Collection[int],
) -> Joined | None:
    """The two as one; None where they cannot be.

    For each input of the second trace, `made` is the output of the first that it is, `given` the input of the first
    whose memory it is. `visible`: outputs of the first that anything but the second reads.
    """
    shown = tuple(i for i in range(len(first.outputs)) if i in visible)
    into = dict(second.donations)
    if any(made[position] is not None for position in into.values()):
        return None  # memory that the first trace made, and that the second overwrites
    builder = _JoinBuilder(first, second)
    places: list[int | None] = []
    for position, (number, geom) in enumerate(second.inputs):
        output, same = made[position], given[position]
        if output is not None:
            builder.bind(number, builder.as_read(output))
            places.append(None)
            continue
        if same is None or first.inputs[same][1] is not geom:
            if same is not None:
                return None  # one memory seen in two dtypes
            same = builder.add_input(geom)
        builder.bind(number, builder.inputs[same][0])
        places.append(same)
    half = Half(False, len(builder.entries), len(first.inputs), len(first.scalar_kinds), len(shown))
    for entry in second.entries:
        builder.append(entry)
    own = {output: given for output, given in first.donations}
    donations = [(at, own[output]) for at, output in enumerate(shown) if output in own]
    if len(donations) != len(own):
        return None  # a write that is no visible output
    for output, position in second.donations:
        place = places[position]
        assert place is not None
        if any(place == taken for _, taken in donations):
            return None  # written by both
        donations.append((len(shown) + output, place))
    trace = CutTrace(
        tuple(builder.entries),
        tuple(builder.geometries),
        tuple(builder.inputs),
        (*first.scalar_kinds, *second.scalar_kinds),
        (*(first.outputs[i] for i in shown), *((builder.slot_of(number), geom) for number, geom in second.outputs)),
        tuple(donations),
        half=half,
    )
    return Joined(trace, replace(trace, half=replace(half, is_second=True)), shown, tuple(places))


class _JoinBuilder:
    """The first trace, to which the second is appended under new numbers."""

    def __init__(self, first: CutTrace, second: CutTrace) -> None:
        self.first = first
        self._second = second.geometries
        self.entries = list(first.entries)
        self.geometries = list(first.geometries)
        self.inputs = list(first.inputs)
        self._scalars = len(first.scalar_kinds)
        self._slots: dict[int, Slot] = {}

    def new_slot(self, geom: Geometry) -> Slot:
        self.geometries.append(geom)
        return slot(len(self.geometries) - 1)

    def add_input(self, geom: Geometry) -> int:
        self.inputs.append((self.new_slot(geom), geom))
        return len(self.inputs) - 1

    def bind(self, number: Slot, value: Slot) -> None:
        """A slot of the second trace is this value."""
        self._slots[number.number] = value

    def as_read(self, output: int) -> Slot:
        """An output of the first trace in the geometry in which the second one gets it."""
        value, geom = self.first.outputs[output]
        if self.geometries[value.number].meta == geom.meta:
            return value
        room, laid = self.new_slot(geom), self.new_slot(geom)
        facts = (("device", torch.device(geom.compute)), ("dtype", geom.dtype))
        self.entries.append(Entry(_empty_strided, (tuple(geom.shape), tuple(geom.strides)), facts, room))
        self.entries.append(Entry(_copy, (room, value), (), laid))
        return laid

    def append(self, entry: Entry) -> None:
        """An operator of the second trace."""
        args = tuple(self._argument(value) for value in entry.args)
        kwargs = tuple((name, self._argument(value)) for name, value in entry.kwargs)
        self.entries.append(Entry(entry.op, args, kwargs, self._outputs(entry.outputs)))

    def slot_of(self, number: Slot) -> Slot:
        return self._slots[number.number]

    def _argument(self, value: Any) -> Any:
        kind = type(value)
        if kind is Slot:
            return self._slots[value.number]
        if kind is ScalarSlot:
            return scalar_slot(self._scalars + value.number, value.kind)
        return tuple(self._argument(item) for item in value) if kind is tuple else value

    def _outputs(self, value: Any) -> Any:
        if type(value) is Slot:
            made = self._slots[value.number] = self.new_slot(self._second[value.number])
            return made
        return tuple(self._outputs(item) for item in value) if type(value) is tuple else None


# --- planning ---


def overwritten(trace: CutTrace) -> frozenset[str]:
    """The placeholders whose memory the first half writes to."""
    half = trace.half
    assert half is not None
    return frozenset(f"in{given}" for output, given in trace.donations if output < half.outputs)


@dataclass(frozen=True)
class BothHalves:
    """The halves of a planned graph, with the donations of each: an output's position -> the placeholder."""

    first: fx.Graph
    second: fx.Graph
    early: dict[int, str]
    late: dict[int, str]

    def of(self, trace: CutTrace) -> tuple[fx.Graph, dict[int, str]]:
        """The half that the trace names, and its donations."""
        assert trace.half is not None
        return (self.second, self.late) if trace.half.is_second else (self.first, self.early)


def halves_of(graph: fx.Graph, trace: CutTrace) -> BothHalves:
    """The halves of the planned graph of all of a joined trace."""
    half = trace.half
    assert half is not None
    inputs = [f"in{i}" for i in range(half.inputs)] + [f"scalar{i}" for i in range(half.scalars)]
    late = {output - half.outputs: f"in{given}" for output, given in trace.donations if output >= half.outputs}
    found = split_step(graph, inputs=inputs, results=half.outputs, lost=overwritten(trace), written=late.values())
    early = {output: f"in{given}" for output, given in trace.donations if output < half.outputs}
    return BothHalves(found.first, found.second, early, late)


# --- running ---


@dataclass(frozen=True)
class SecondInputs:
    """Where the second program's inputs come from, in its order: values held for it (HELD), results of the first
    (RESULT), inputs of the joined trace (INPUT), scalars in memory (SCALAR), each by number. And its scalar arguments,
    by their numbers in the joined trace."""

    inputs: tuple[tuple[str, int], ...]
    scalars: tuple[int, ...]


def match_programs(joined: Joined, first: Program, second: Program) -> SecondInputs | None:
    """How the second program is fed; None where the two do not match (planned separately, with other decisions). Where
    both were linked by layers (plan/layers/link.py), what crosses has the same name in both."""
    shown = len(joined.visible)
    metas = first.output_metas[shown:]
    place_of = {name: place for place, name in reversed(list(enumerate(first.outputs)))}
    inputs = []
    for name, meta in second.inputs:
        if name.startswith(BUFFER):
            place = place_of.get(name)
            if place is None:
                return None
            kind, number = (RESULT, place) if place < shown else (HELD, place - shown)
        else:
            kind = next(kind for kind in (HELD, RESULT, INPUT, SCALAR) if name.startswith(kind))
            number = int(name.removeprefix(kind))
        if kind == HELD and (number >= len(metas) or metas[number] != meta):
            return None
        inputs.append((kind, number))
    if sum(kind == HELD for kind, _ in inputs) != len(metas):
        return None
    return SecondInputs(tuple(inputs), tuple(int(name.removeprefix(SCALAR)) for name, _ in second.scalars))

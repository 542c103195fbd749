"""Splits the trace of a recorded joint into two programs, forward and backward, at what the split saves.

Where gradients of gradients were recorded too, the same is done once more: the backward half is the forward of a
second joint, whose backward is the double backward.

Invariant: a sliced trace has slots and scalars of its own numbers, its inputs first, and only entries that its outputs
depend on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx
from torchlazy.autograd.joint import JointGraph, JointSplit, split_joint
from torchlazy.lazy.plan.joint import Double, ForwardResult, Joint, Output, ScalarSource, Source, Update, Write, dense
from torchlazy.lazy.plan.saved_layout import as_channels_last, channels_last_values
from torchlazy.lazy.trace.geometry import Geometry
from torchlazy.lazy.trace.to_fx import trace_to_graph
from torchlazy.lazy.trace.trace import CutTrace, Entry, ScalarSlot, Slot, scalar_slot, slot, slots_in

Value = tuple[Slot, Geometry]


@dataclass(frozen=True)
class Section:
    """The length of the trace at one moment."""

    entries: int
    slots: int
    inputs: int
    scalars: int


@dataclass(frozen=True)
class Recording:
    """A trace of a forward and its backward. `writes`, `late_writes`: values that inputs take in the forward and in the
    backward, with the input's number. `later`: what deeper backwards compute, in the same trace."""

    trace: CutTrace  # without outputs
    scalars: tuple[Any, ...]
    forward: Section
    values: tuple[Value, ...]
    results: tuple[ForwardResult, ...]  # which of `values` they are; `position` counts there
    writes: tuple[tuple[Slot, Geometry, int], ...]
    changed: tuple[int, ...]  # inputs
    tangents: tuple[Slot, ...]
    gradients: tuple[Value | None, ...]
    late_writes: tuple[tuple[Slot, Geometry, int], ...] = ()
    later: tuple[Value, ...] = ()
    later_tangents: tuple[Slot, ...] = ()
    given: tuple[int, ...] = ()  # scalars of the backward that the caller passes after those of the forward


@dataclass(frozen=True)
class Built:
    """A joint, the numbers of the trace's inputs that are its inputs, and what its backward half may read."""

    joint: Joint
    inputs: tuple[int, ...]
    half: BackwardReads


@dataclass(frozen=True)
class BackwardReads:
    """What the backward may read: slots with their sources, in order."""

    slots: tuple[Value, ...]
    sources: tuple[Source, ...]


def build_joint(
    recording: Recording, outputs: tuple[Output, ...], updates: tuple[Update, ...], budget: float | int | None
) -> Built:
    """The two programs of a recording."""
    trace, forward = recording.trace, recording.forward
    is_tangent = {number.number: i for i, number in enumerate(recording.tangents)}
    deeper = {number.number for number in recording.later_tangents}
    numbers = [i for i, (n, _) in enumerate(trace.inputs) if n.number not in is_tangent and n.number not in deeper]
    place = {i: at for at, i in enumerate(numbers)}
    first = (*recording.values, *((value, geom) for value, geom, _ in recording.writes))
    gradients = [found for found in recording.gradients if found is not None]
    second = (*gradients, *((value, geom) for value, geom, _ in recording.late_writes))

    graph, nodes = _graph(recording, first, (*second, *recording.later))
    split = _split(recording, graph, nodes, len(first), budget)
    slot_of = {node: slot(number) for number, node in nodes.items()}
    half, saved = _half(recording, split, slot_of, channels_last_values(graph), is_tangent, place)
    donations = tuple((len(recording.values) + k, number) for k, (_, _, number) in enumerate(recording.writes))
    forward_inputs = [i for i in numbers if i < forward.inputs]
    program = CutTrace(
        trace.entries[: forward.entries],
        trace.geometries[: forward.slots],
        tuple(trace.inputs[i] for i in forward_inputs),
        trace.scalar_kinds[: forward.scalars],
        (*first, *saved),
        tuple((output, forward_inputs.index(number)) for output, number in donations),
        trace.frames[: forward.entries],
    )
    backward, sources = None, half.sources
    scalars: tuple[ScalarSource, ...] = ()
    if second:
        sliced = slice_trace(trace, second, half.slots)
        backward, scalars = sliced.trace, scalar_sources(recording, sliced.scalars)
        read = [i for i, found in enumerate(sliced.used) if found]
        sources = tuple(half.sources[i] for i in read)
    at = iter(range(len(gradients)))
    joint = Joint(
        program, tuple(place[i] for i in forward_inputs), recording.results, outputs, updates,
        tuple(Write(output, place[number]) for output, number in donations),
        tuple(range(len(first), len(first) + len(saved))),
        backward, sources, scalars,
        tuple(Write(len(gradients) + k, place[n]) for k, (_, _, n) in enumerate(recording.late_writes)),
        tuple(None if found is None else next(at) for found in recording.gradients),
        _needs(recording, is_tangent), split.saved_bytes, tuple(split.reasons[node] for node in split.saved),
    )  # fmt: skip
    return Built(joint, tuple(numbers), half)


def build_double(first: Recording, built: Built, levels: Sequence[Recording], budget: float | int | None) -> Double:
    """The joint of the backward half, from the recordings of its own backward in the same trace, and of that one's."""
    trace = first.trace
    gradients = [found for found in first.gradients if found is not None]
    wanted = [found for level in levels for found in level.gradients if found is not None]
    is_tangent = {number.number for level in levels for number in level.tangents}
    late = [(number, geom) for number, geom in trace.inputs if number.number in is_tangent]
    sliced = slice_trace(trace, (*gradients, *wanted), (*built.half.slots, *late), keep=len(late))
    known = sum(sliced.used[: len(built.half.slots)])
    values = tuple((sliced.renamed[number.number], geom) for number, geom in gradients)
    scalars = tuple(first.scalars[i] for i in sliced.scalars)
    inner, *deeper = [_within(level, sliced, known, scalars, values if level is levels[0] else ()) for level in levels]
    made = build_joint(inner, (), (), budget)
    joint = made.joint
    if deeper:
        joint = replace(joint, double=build_double(inner, made, deeper, budget))
    sources = tuple(s for s, is_read in zip(built.half.sources, sliced.used, strict=False) if is_read)
    return Double(joint, sources, scalar_sources(first, sliced.scalars[: inner.forward.scalars]))


def _within(
    level: Recording, sliced: Sliced, known: int, scalars: tuple[Any, ...], values: tuple[Value, ...]
) -> Recording:
    """A recording in terms of a trace that was cut out of its own; `known`: how many inputs are no tangents."""
    rename = lambda number: sliced.renamed[number.number]  # noqa: E731
    entries = sum(1 for position in sliced.positions if position < level.forward.entries)
    slots = sum(len(slots_in(entry.outputs)) for entry in sliced.trace.entries[:entries])
    section = Section(entries, len(sliced.trace.inputs) + slots, known, _scalars_read(sliced.trace, entries))
    return Recording(
        sliced.trace, scalars, section, values, level.results, (), (), tuple(map(rename, level.tangents)),
        tuple(None if found is None else (rename(found[0]), found[1]) for found in level.gradients), (),
        tuple((rename(number), geom) for number, geom in level.later), tuple(map(rename, level.later_tangents)),
    )  # fmt: skip


def _scalars_read(trace: CutTrace, entries: int) -> int:
    """How many scalars the first entries read; scalars are numbered in the order in which they occur."""

    def highest(value: Any) -> int:
        if type(value) is ScalarSlot:
            return value.number + 1
        return max(map(highest, value), default=0) if type(value) is tuple else 0

    return max((highest((entry.args, entry.kwargs)) for entry in trace.entries[:entries]), default=0)


# --- the split, in terms of slots ---


def _graph(
    recording: Recording, first: Sequence[Value], second: Sequence[Value]
) -> tuple[fx.Graph, dict[int, fx.Node]]:
    """All of the trace with these results, in any layout; and the node of each slot."""
    trace = recording.trace
    nodes: dict[int, fx.Node] = {}
    results = tuple((number, trace.geometries[number.number]) for number, _ in (*first, *second))
    whole = CutTrace(trace.entries, trace.geometries, trace.inputs, trace.scalar_kinds, results, (), trace.frames)
    return trace_to_graph(whole, backward=recording.forward.entries, nodes=nodes), nodes


def _split(
    recording: Recording, graph: fx.Graph, nodes: dict[int, fx.Node], first: int, budget: float | int | None
) -> JointSplit:
    joint = JointGraph(
        graph,
        first,
        tuple(nodes[number.number] for number in (*recording.tangents, *recording.later_tangents)),
        tuple(nodes[recording.trace.inputs[i][0].number] for i in recording.changed),
    )
    return split_joint(joint, budget)


def _half(
    recording: Recording,
    split: JointSplit,
    slot_of: dict[fx.Node, Slot],
    channels_last: set[fx.Node],
    is_tangent: dict[int, int],
    place: dict[int, int],
) -> tuple[BackwardReads, list[Value]]:
    """What the backward may read, and the values that the forward returns only for it, laid out without gaps: these
    nodes channels-last."""
    trace = recording.trace
    of_result = {
        number.number: i
        for i, ((number, geom), result) in enumerate(zip(recording.values, recording.results, strict=True))
        if result.tangent is not None and geom is trace.geometries[number.number]
    }
    slots: list[Value] = []
    sources: list[Source] = []
    saved: list[Value] = []
    for node in split.saved:
        number = slot_of[node]
        geom = trace.geometries[number.number]
        if number.number in of_result:
            sources.append(Source("result", of_result[number.number]))
            slots.append((number, geom))
        else:
            sources.append(Source("saved", len(saved)))
            saved.append((number, as_channels_last(geom) if node in channels_last else dense(geom)))
            slots.append(saved[-1])
    given = {slot_of[node].number for node in split.given if node in slot_of}
    taken = {number.number for number, _ in slots}
    for i, (number, geom) in enumerate(trace.inputs):
        if number.number not in given or number.number in taken:
            continue
        if number.number in is_tangent:
            sources.append(Source("tangent", is_tangent[number.number]))
            slots.append((number, geom))
        elif i in place:
            sources.append(Source("input", place[i]))
            slots.append((number, geom))
    return BackwardReads(tuple(slots), tuple(sources)), saved


# --- slicing ---


@dataclass(frozen=True)
class Sliced:
    """A trace cut out of another one. `renamed`: old slot numbers to new slots; `scalars`, `positions`: the old numbers
    of its scalars and entries; `used`: which of the inputs offered it has."""

    trace: CutTrace
    renamed: dict[int, Slot]
    scalars: tuple[int, ...]
    positions: tuple[int, ...]
    used: tuple[bool, ...]


def slice_trace(trace: CutTrace, results: Sequence[Value], inputs: Sequence[Value], *, keep: int = 0) -> Sliced:
    """The entries that `results` depend on when the slots `inputs` are given; unread inputs but the last `keep` go."""
    given = {number.number for number, _ in inputs}
    wanted = {number.number for number, _ in results}
    needed: list[int] = []
    for position in range(len(trace.entries) - 1, -1, -1):
        entry = trace.entries[position]
        if any(found.number in wanted and found.number not in given for found in slots_in(entry.outputs)):
            needed.append(position)
            wanted.update(found.number for found in slots_in((*entry.args, *(value for _, value in entry.kwargs))))
    used = tuple(number.number in wanted or i >= len(inputs) - keep for i, (number, _) in enumerate(inputs))
    renamed: dict[int, Slot] = {}
    geometries: list[Geometry] = []
    own: list[Value] = []
    for (number, geom), is_used in zip(inputs, used, strict=True):
        if is_used:
            renamed[number.number] = slot(len(geometries))
            own.append((renamed[number.number], geom))
            geometries.append(trace.geometries[number.number])  # as recorded: views are of that layout
    scalar_numbers: dict[int, ScalarSlot] = {}

    def argument(value: Any) -> Any:
        kind = type(value)
        if kind is Slot:
            return renamed[value.number]
        if kind is ScalarSlot:
            if value.number not in scalar_numbers:
                scalar_numbers[value.number] = scalar_slot(len(scalar_numbers), value.kind)
            return scalar_numbers[value.number]
        return tuple(argument(item) for item in value) if kind is tuple else value

    def output(value: Any) -> Any:
        if type(value) is Slot:
            new = slot(len(geometries))
            geometries.append(trace.geometries[value.number])
            renamed.setdefault(value.number, new)  # an output that is given as an input stays the given one
            return new
        return tuple(output(item) for item in value) if type(value) is tuple else None

    entries: list[Entry] = []
    positions = tuple(reversed(needed))
    for position in positions:
        entry = trace.entries[position]
        args = tuple(argument(a) for a in entry.args)
        kwargs = tuple((name, argument(value)) for name, value in entry.kwargs)
        entries.append(Entry(entry.op, args, kwargs, output(entry.outputs)))
    sliced = CutTrace(
        tuple(entries), tuple(geometries), tuple(own), tuple(s.kind for s in scalar_numbers.values()),
        tuple((renamed[number.number], geom) for number, geom in results), (),
        tuple(trace.frames[i] for i in positions) if trace.frames else (),
    )  # fmt: skip
    return Sliced(sliced, renamed, tuple(scalar_numbers), positions, used)


def scalar_sources(recording: Recording, numbers: Sequence[int]) -> tuple[ScalarSource, ...]:
    """Where the backward's scalars come from. A seed of the forward that was drawn again, as a checkpoint does that
    replays its random numbers, is that very seed."""
    values, known = recording.scalars, recording.forward.scalars
    seeds = {values[i]: i for i in reversed(range(known)) if type(values[i]) is int}
    found = []
    for number in numbers:
        value = values[number]
        if number < known:
            found.append(ScalarSource("forward", number))
        elif number in recording.given:
            found.append(ScalarSource("forward", known + recording.given.index(number)))
        elif type(value) is int:
            found.append(ScalarSource("forward", seeds[value]) if value in seeds else ScalarSource("seed", number))
        else:
            found.append(ScalarSource("constant", value))
    return tuple(found)


def _needs(recording: Recording, is_tangent: dict[int, int]) -> tuple[frozenset[int], ...]:
    """For each gradient the tangents that it depends on."""
    empty: frozenset[int] = frozenset()
    of: dict[int, frozenset[int]] = {number: frozenset((i,)) for number, i in is_tangent.items()}
    for entry in recording.trace.entries:
        arguments = slots_in((*entry.args, *(value for _, value in entry.kwargs)))
        found = empty.union(*(of.get(s.number, empty) for s in arguments))
        if found:
            of.update((s.number, found) for s in slots_in(entry.outputs))
    return tuple(empty if g is None else of.get(g[0].number, empty) for g in recording.gradients)

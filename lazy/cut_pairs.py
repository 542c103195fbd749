"""Programs of a replay that belong together: a forward and, after a read on the host, its backward, planned as one.

The call's Python reads the loss before `backward()`, so that it was captured as two segments. Nobody but the second
reads what autograd held of the first; the two are joined (lazy/joined_trace.py) and compiled as halves of one plan.
Until both halves are there, and wherever somebody looks at single cuts, the segments run as they were cut.

Invariant: a pair's results are those of its segments. Nothing between the two writes to memory that they read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchlazy.autograd.halves import HELD, RESULT
from torchlazy.lazy import call_template as t
from torchlazy.lazy.fx_graph import backward_begins
from torchlazy.lazy.joined_trace import INPUT, Joined, Takes, join, takes
from torchlazy.lazy.program_handle import ProgramHandle
from torchlazy.lazy.trace import CutTrace

_SOON = 16
_ones_like = torch.ops.aten.ones_like.default
LEAST_BYTES = 8 << 20
"""What must cross at least, all in all, for two more programs to be compiled."""


@dataclass(frozen=True)
class CutPair:
    """Two segments of a template and the trace that they are together; `hidden`: outputs of the first that only the
    second reads."""

    first: t.Segment
    second: t.Segment
    joined: Joined
    hidden: frozenset[int]


def cut_pairs(template: t.CallTemplate) -> list[CutPair]:
    """The pairs of a template; no segment is in two of them."""
    found: list[CutPair] = []
    last: int | None = None
    for position, step in enumerate(template.steps):
        if isinstance(step, t.Segment):
            pair = None if last is None else _pair(template, last, position)
            if pair is not None:
                found.append(pair)
            last = None if pair is not None else position
        elif isinstance(step, t.JointRun):
            last = None
    return found


def _pair(template: t.CallTemplate, at: int, then: int) -> CutPair | None:
    first, second = template.steps[at], template.steps[then]
    assert isinstance(first, t.Segment) and isinstance(second, t.Segment)
    if backward_begins(first.trace) is not None or not _starts_with_backward(second.trace):
        return None  # one plan has one border between forward and backward
    if not all(_leaves_memory(step, (*first.inputs, *second.inputs)) for step in template.steps[at + 1 : then]):
        return None
    made = {_identity(target): output for output, target in enumerate(first.targets)}
    given = {_identity(source): position for position, source in enumerate(first.inputs)}
    ours = [made.get(_identity(source)) for source in second.inputs]
    read = _places_read(template, but=second)
    hidden = frozenset(
        output
        for output, target in enumerate(first.targets)
        if type(target) is t.FromStep and target.place not in read and output in ours
    )
    if sum(first.trace.outputs[output][1].nbytes for output in hidden) < LEAST_BYTES:
        return None
    theirs = [given.get(_identity(s)) if o is None else None for s, o in zip(second.inputs, ours, strict=True)]
    visible = frozenset(range(len(first.targets))) - hidden
    joined = join(first.trace, second.trace, made=ours, given=theirs, visible=visible)
    return None if joined is None else CutPair(first, second, joined, hidden)


def _starts_with_backward(trace: CutTrace) -> bool:
    """Whether autograd's engine soon begins: with ones in the shape of the loss."""
    return any(entry.op is _ones_like for entry in trace.entries[:_SOON])


def _identity(memory: t.Memory) -> tuple[str, int]:
    """What tells one piece of memory from another during a call."""
    if isinstance(memory, t.FromState):
        return "state", id(memory.storage)
    if isinstance(memory, t.FromArgument):
        return "argument", memory.leaf
    if isinstance(memory, t.FromGradient):
        return "gradient", id(memory.owner)
    return "step", memory.place


def _leaves_memory(step: t.Step, inputs: Sequence[t.Memory]) -> bool:
    """Whether a step between two segments surely writes to none of the memory that they read."""
    if not isinstance(step, t.HostCall):
        return True
    ours = {
        memory.storage.real.untyped_storage()._cdata
        for memory in inputs
        if isinstance(memory, t.FromState) and memory.storage.real is not None
    }
    return all(
        isinstance(host, t.HostMade)
        or (isinstance(host, t.HostKept) and host.tensor.untyped_storage()._cdata not in ours)
        for host in step.written
    )


def _places_read(template: t.CallTemplate, *, but: t.Segment) -> set[int]:
    """The places that anybody reads but one segment."""
    results = [*template.results, *(result for effect in template.effects for result in effect.results)]
    memory: list[Any] = [result.memory for result in results if isinstance(result, t.TensorResult)]
    for step in template.steps:
        if step is not but:
            memory += memory_read(step)
    return {found.place for found in memory if isinstance(found, t.FromStep)}


def memory_read(step: t.Step) -> tuple[t.Memory, ...]:
    """The memory that a step reads."""
    if isinstance(step, t.Segment):
        return step.inputs
    if isinstance(step, t.JointRun):
        return tuple(memory for memory, _ in step.inputs)
    if isinstance(step, t.LazyItem):
        return (step.memory,)
    return (step.source,) if isinstance(step, t.ToHost) else ()


def last_reads(template: t.CallTemplate) -> dict[int, list[int]]:
    """For each segment, by identity, the places that nobody reads after it."""
    results = [*template.results, *(result for effect in template.effects for result in effect.results)]
    read_later = {r.memory.place for r in results if isinstance(r, t.TensorResult) and type(r.memory) is t.FromStep}
    found: dict[int, list[int]] = {}
    for step in reversed(template.steps):
        places = dict.fromkeys(m.place for m in memory_read(step) if type(m) is t.FromStep)
        if isinstance(step, t.Segment):
            found[id(step)] = [place for place in places if place not in read_later]
        read_later |= places.keys()
    return found


class Crossing:
    """What is on its way from the first half of a pair to the second, in one call."""

    def __init__(self, pair: PairRun, memory: list[torch.Tensor], made: list[Any], scalars: list[Any]) -> None:
        """`memory`: what the first half was given; `made`: its results, and what it holds for the second."""
        self.second = pair.pair.second
        self._pair = pair
        self._made = made
        self._memory = memory
        self._scalars = scalars

    def run(self, memory: list[Any], scalars: list[Any]) -> list[Any]:
        """The second segment's outputs; what crosses is handed over, so that only the program holds it then."""
        return self._pair.run_second(self._made, self._memory, memory, [*self._scalars, *scalars])


class PairRun:
    """Runs a pair, once both of its programs are there."""

    def __init__(self, driver: Any, pair: CutPair, handles: Sequence[ProgramHandle]) -> None:
        self.pair = pair
        self._driver = driver
        self._handles = handles
        self._programs: tuple[Any, Any] | None = None
        self._takes: Takes | None = None
        self._known: list[Any] = []
        self._is_given_up = False
        # Of a joined trace's input its place among those of the second segment.
        self._place_of = {place: i for i, place in enumerate(pair.joined.second_inputs) if place is not None}

    @property
    def has_programs(self) -> bool:
        """Whether both programs are there, and belong together."""
        return self._takes is not None

    def is_ready(self) -> bool:
        """Whether both programs are there now. They are asked for once the segments have programs of their own."""
        if self._is_given_up or self._driver.listeners or self._driver.shadow is not None:
            return False
        if self._takes is None and all(handle.has_program for handle in self._handles):
            self._find()
        return self._takes is not None

    def _find(self) -> None:
        if any(known.pending is not None and known.pending.job.answer is None for known in self._known):
            return
        if any(handle.is_for_all_sizes for handle in self._handles):
            self._is_given_up = True  # sizes vary: what serves them all is not compiled for each
            return
        joined = self.pair.joined
        self._known = [
            self._driver.program_of_half(trace, self.pair.second.frame) for trace in (joined.first, joined.second)
        ]
        if any(known.failure for known in self._known):
            self._is_given_up = True
        elif all(known.compiled is not None for known in self._known):
            first, second = (known.compiled for known in self._known)
            self._programs = first, second
            self._takes = takes(joined, first.program, second.program)
            self._is_given_up = self._takes is None

    def run_first(self, memory: list[torch.Tensor], scalars: list[Any]) -> tuple[list[Any], Crossing]:
        """The first segment's outputs, None for hidden ones, and what is kept for the second half."""
        assert self._programs is not None and self._takes is not None
        visible = self.pair.joined.visible
        kept: list[Any] = [None] * len(memory)
        for kind, number in self._takes.inputs:
            if kind == INPUT and number not in self._place_of:
                kept[number] = memory[number]
        made = self._driver.run_half(self._programs[0], self.pair.first.trace, memory, scalars)
        values: list[Any] = [None] * len(self.pair.first.targets)
        for output, value in zip(visible, made, strict=False):
            values[output] = value
        return values, Crossing(self, kept, made, scalars)

    def run_second(self, made: list[Any], kept: list[Any], memory: list[Any], scalars: list[Any]) -> list[Any]:
        """The second segment's outputs. Empties `made` and `memory`: the program alone holds what it reads."""
        assert self._programs is not None and self._takes is not None
        shown = len(self.pair.joined.visible)
        inputs: list[Any] = []
        for kind, number in self._takes.inputs:
            if kind == HELD:
                inputs.append(made[shown + number])
            elif kind == RESULT:
                inputs.append(made[number])
            else:
                place = self._place_of.get(number)
                inputs.append(kept[number] if place is None else memory[place])
        made.clear()
        kept.clear()
        memory.clear()
        wanted = [scalars[number] for number in self._takes.scalars]
        values: list[Any] = self._driver.run_half(self._programs[1], None, inputs, wanted)
        return values

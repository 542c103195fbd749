"""Pairs in a replay: a forward and, after a read on the host, its backward, planned as one; also as CUDA graphs.

The call's Python reads the loss before `backward()`, so that it was captured as two segments. Only the second reads
what autograd held of the first; the two are joined (plan/join_traces.py) and compiled as halves of one plan. Until both
halves are there, and wherever single cuts are listened to, the segments run as they were cut. CUDA graphs of the halves
are captured together once both programs are there, and again when state has moved.

Invariant: a pair's results are those of its segments, and nothing between the two writes to memory that they read.
Before the first graph runs it is certain that the second can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torchlazy.lazy.compiled.replay.handle import MAX_CAPTURES, ProgramHandle, inputs_that_stay, moving_inputs
from torchlazy.lazy.compiled.template import template as t
from torchlazy.lazy.compiled.template.custom_ops import memory_written
from torchlazy.lazy.compiled.template.template import FromData, FromGradient, FromState, Memory, Segment
from torchlazy.lazy.plan.join_traces import Joined, join
from torchlazy.lazy.record.tensor import LazyTensor
from torchlazy.lazy.report import metrics
from torchlazy.lazy.run.segments import watch
from torchlazy.lazy.run.segments.programs import HalfFailed, HalfPrograms
from torchlazy.lazy.trace.to_fx import backward_begins
from torchlazy.runtime.cuda.graphed_pair import GraphedPair


class PairGraphs:
    """The graphs of one pair. `is_given_up`: there will be none; its segments know why."""

    def __init__(
        self, driver: Any, joined: Joined, first: Segment, second: Segment, handles: Sequence[ProgramHandle],
        *, is_nested: bool = False,
    ) -> None:  # fmt: skip
        """`is_nested`: other segments run between the two."""
        self._programs = HalfPrograms(driver, joined, first.trace, second.frame, scalars="memory")
        self._joined = joined
        self._first = first
        self._second = second
        # Inputs whose memory moved between calls.
        self._moving: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())
        self._handles = handles
        self._is_nested = is_nested
        self._graphs: GraphedPair | None = None
        self._captures = 0
        self.is_given_up = False

    @property
    def are_there(self) -> bool:
        """Whether both programs are there."""
        return self._programs.are_there and not self.is_given_up

    def find(self) -> bool:
        """Ask for the programs, or see whether they have come by now; whether they are there."""
        if not self._programs.find() and self._programs.is_given_up:
            self._give_up("the halves of the step have no programs that read their numbers from memory")
        return self.are_there

    def run_first(self, memory: list[torch.Tensor], scalars: list[Any]) -> list[Any] | None:
        """The first segment's outputs, None for hidden ones; None, and nothing was run, where there are no graphs."""
        later = self._later()
        made = None
        if self._graphs is not None:
            try:
                made = self._graphs.run_first(memory, scalars, later)
            except ValueError:  # parameters were moved, or gradients
                moved = zip(self._moving, (self._first, self._second), self._graphs.moved(memory, later), strict=True)
                early, late = (known | moving_inputs(segment, found) for known, segment, found in moved)
                self._moving = early, late
                later = self._later()
                self._graphs = None
        if made is None:
            self._graphs = self._captured(memory, scalars, later)
            if self._graphs is None:
                return None
            made = self._graphs.run_first(memory, scalars, later)
        metrics.graph_replays += 1
        metrics.hits += 1
        memory.clear()
        return self._programs.visible(made)

    def run_second(self, memory: list[torch.Tensor], scalars: Sequence[Any]) -> list[Any]:
        """The second segment's outputs. `scalars`: of both. Empties `memory`."""
        assert self._graphs is not None
        values = self._graphs.run_second(memory, scalars)
        metrics.graph_replays += 1
        metrics.hits += 1
        memory.clear()
        return values

    def _captured(
        self, memory: Sequence[torch.Tensor], scalars: Sequence[Any], later: Sequence[torch.Tensor | None]
    ) -> GraphedPair | None:
        if self._captures >= MAX_CAPTURES:
            self._give_up("memory that was assumed to stay in place has moved again and again")
            return None
        self._captures += 1
        runs = zip(self._handles, self._programs.executables, strict=True)
        first, second = (handle.with_tuned_kernels(run) for handle, run in runs)
        try:
            shown = range(len(self._joined.visible))
            found = GraphedPair(first, second, self._programs.wires, shown, is_nested=self._is_nested)
            found.capture(memory, inputs_that_stay(self._first, self._moving[0]), scalars, later)
        except Exception as error:  # a library call that a capture refuses: the programs run as they are
            self._give_up(f"{type(error).__name__}: {error}")
            return None
        return found

    def _later(self) -> list[torch.Tensor | None]:
        """What the second half will be given, if it stays and is not made by the first half."""
        stays = inputs_that_stay(self._second, self._moving[1])
        return [
            _real(source) if stay and place is not None else None
            for source, stay, place in zip(self._second.inputs, stays, self._joined.second_inputs, strict=True)
        ]

    def _give_up(self, reason: str) -> None:
        self.is_given_up = True
        for handle in self._handles:
            handle.without_graph(reason)


def _real(source: Memory) -> torch.Tensor | None:
    """The memory of what stays, before the first half runs; None for what only the call's state knows."""
    if isinstance(source, FromState):
        return source.storage.real
    found = source.tensor(()) if isinstance(source, (FromData, FromGradient)) else None
    return found._storage_.real if isinstance(found, LazyTensor) else found


HOT = 16
"""How often a call of certain sizes is replayed before its halves are compiled for them, where one program for all
sizes serves it."""


@dataclass(frozen=True)
class CutPair:
    """Two segments of a template and the trace that they are together; `hidden`: outputs of the first that only the
    second reads; `is_whole`: no other segment runs between the two."""

    first: t.Segment
    second: t.Segment
    joined: Joined
    hidden: frozenset[int]
    is_whole: bool = True


def cut_pairs(template: t.CallTemplate) -> list[CutPair]:
    """The pairs of a template; no segment is in two of them."""
    found: list[CutPair] = []
    waiting: list[int] = []  # segments that are in no pair yet, the last one at the end
    for position, step in enumerate(template.steps):
        if isinstance(step, t.Segment):
            pair = _pair(template, waiting[-1], position) if waiting else None
            if pair is not None:
                found.append(pair)
                waiting.pop()
            else:
                waiting.append(position)
        elif isinstance(step, t.JointRun):
            waiting.clear()
    return found


def _pair(template: t.CallTemplate, at: int, then: int) -> CutPair | None:
    first, second = template.steps[at], template.steps[then]
    assert isinstance(first, t.Segment) and isinstance(second, t.Segment)
    is_second = second.goes_on or watch.starts_with_backward(second.trace)
    if backward_begins(first.trace) is not None or first.goes_on or not is_second:
        return None  # one plan has one border between forward and backward
    between = template.steps[at + 1 : then]
    if not all(leaves_memory(step, (*first.inputs, *second.inputs)) for step in between):
        return None
    segments = [step for step in between if isinstance(step, t.Segment)]
    written = {
        memory_identity(target) for step in segments for target in step.targets if type(target) is not t.FromStep
    }
    lost = written.difference(map(memory_identity, first.targets))
    if any(memory_identity(source) in written for source in second.inputs):
        return None
    if any(memory_identity(source) in lost for source in first.inputs):
        return None
    made = {memory_identity(target): output for output, target in enumerate(first.targets)}
    given = {memory_identity(source): position for position, source in enumerate(first.inputs)}
    ours = [made.get(memory_identity(source)) for source in second.inputs]
    read = _places_read(template, but=second)
    hidden = frozenset(
        output for output, target in enumerate(first.targets) if type(target) is t.FromStep and target.place not in read
    )
    if sum(first.trace.outputs[output][1].nbytes for output in hidden) < watch.LEAST_BYTES:
        return None
    theirs = [given.get(memory_identity(s)) if o is None else None for s, o in zip(second.inputs, ours, strict=True)]
    visible = frozenset(range(len(first.targets))) - hidden
    joined = join(first.trace, second.trace, made=ours, given=theirs, visible=visible)
    return None if joined is None else CutPair(first, second, joined, hidden, is_whole=not segments)


def memory_identity(memory: t.Memory) -> tuple[str, int]:
    """What identifies a piece of memory during a call."""
    if isinstance(memory, t.FromState):
        return "state", id(memory.storage)
    if isinstance(memory, t.FromArgument):
        return "argument", memory.leaf
    if isinstance(memory, t.FromData):
        return "data", id(memory.owner)
    if isinstance(memory, t.FromGradient):
        return "gradient", id(memory.owner)
    return "step", memory.place


def leaves_memory(step: t.Step, inputs: Sequence[t.Memory]) -> bool:
    """Whether a step between two segments surely writes to none of the memory that they read."""
    if isinstance(step, t.Collective):
        return not {memory_identity(w.memory) for w in step.windows}.intersection(map(memory_identity, inputs))
    if isinstance(step, t.LazyCall):
        return not set(map(memory_identity, memory_written(step))).intersection(map(memory_identity, inputs))
    if not isinstance(step, t.HostCall):
        return True
    if any(isinstance(memory, t.FromData) for memory in inputs):
        return all(isinstance(host, t.HostMade) for host in step.written)
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
    """The places that anything but one segment reads."""
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
    if isinstance(step, t.LazyCall):
        return tuple(window.memory for window in views_in((step.args, step.kwargs)))
    if isinstance(step, t.Collective):
        return tuple(found.memory for found in step.windows)
    return (step.source,) if isinstance(step, t.ToHost) else ()


def views_in(value: Any) -> Iterator[t.TensorOperand]:
    """The views among the arguments of a `LazyCall`."""
    if isinstance(value, t.TensorOperand):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from views_in(item)


def last_reads(template: t.CallTemplate) -> dict[int, list[int]]:
    """For each segment and collective, by identity, the places that nothing reads after it."""
    results = [*template.results, *(result for effect in template.effects for result in effect.results)]
    read_later = {r.memory.place for r in results if isinstance(r, t.TensorResult) and type(r.memory) is t.FromStep}
    found: dict[int, list[int]] = {}
    for step in reversed(template.steps):
        places = dict.fromkeys(m.place for m in memory_read(step) if type(m) is t.FromStep)
        if isinstance(step, (t.Segment, t.Collective)):
            found[id(step)] = [place for place in places if place not in read_later]
        read_later |= places.keys()
    return found


class PairCrossing:
    """What is on its way from the first half of a pair to the second, in one call."""

    def __init__(self, second: t.Segment, finish: Callable[[list[Any], list[Any]], list[Any]]) -> None:
        """`finish`: from the second segment's memory and scalars to its outputs."""
        self.second = second
        self._finish = finish

    def run(self, memory: list[Any], scalars: list[Any]) -> list[Any]:
        """The second segment's outputs; what crosses is handed over, so that only the program holds it then."""
        return self._finish(memory, scalars)


class PairRun:
    """Runs a pair, once both of its programs are there; as CUDA graphs where both segments are to be."""

    def __init__(self, driver: Any, pair: CutPair, handles: Sequence[ProgramHandle]) -> None:
        self.pair = pair
        self._driver = driver
        self._handles = handles
        self._programs = HalfPrograms(driver, pair.joined, pair.first.trace, pair.second.frame)
        self._asked = 0
        self._graphs: PairGraphs | None = None
        if all(handle.wants_graph for handle in handles):
            graphs = PairGraphs(driver, pair.joined, pair.first, pair.second, handles, is_nested=not pair.is_whole)
            self._graphs = graphs
        for handle in handles:  # separately they would copy everything that crosses, twice
            handle.waits_for_pair = handle.wants_graph

    @property
    def has_programs(self) -> bool:
        """Whether both programs are there, and belong together."""
        return self._programs.are_there or (self._graphs is not None and self._graphs.are_there)

    def is_ready(self) -> bool:
        """Whether both programs are there now. They are asked for once the segments have programs of their own."""
        programs = self._programs
        if programs.is_given_up or self._driver.listeners or self._driver.shadow is not None:
            return False
        if self.has_programs:
            return True
        if not all(handle.has_program for handle in self._handles):
            return False
        if any(handle.is_for_all_sizes for handle in self._handles):
            self._asked += 1  # sizes vary, perhaps only between micro-batches of a call
            if self._asked < HOT:
                return False
        if self._graphs is not None:
            if self._graphs.find():
                return True
            if not self._graphs.is_given_up:
                return False
            self._graphs = None
        if not programs.find() and programs.is_given_up:
            self._give_up()
        return programs.are_there

    def run_first(self, memory: list[torch.Tensor], scalars: list[Any]) -> tuple[list[Any], PairCrossing | None]:
        """The first segment's outputs, None for hidden ones, and what is kept for the second half (None: the segments
        run as they were cut after all)."""
        if self._graphs is not None:
            values = self._graphs.run_first(memory, scalars)
            if values is None:
                self._graphs = None if self._graphs.is_given_up else self._graphs
                return self._handles[0].run(memory, scalars), None
            return values, PairCrossing(self.pair.second, partial(self.run_second, None, [], scalars))
        kept: list[Any] = [None] * len(memory)
        for number in self._programs.inputs_kept:
            kept[number] = memory[number]
        try:
            made = self._programs.run_first(memory, scalars)
        except HalfFailed as failed:  # as in eager
            errors = (value for value in failed.values if isinstance(value, BaseException))
            raise next(errors, failed.error) from None
        return self._programs.visible(made), PairCrossing(
            self.pair.second, partial(self.run_second, made, kept, scalars)
        )

    def run_second(
        self, made: list[Any] | None, kept: list[Any], early: list[Any], memory: list[Any], scalars: list[Any]
    ) -> list[Any]:
        """The second segment's outputs. `made`, `kept`: what the first program gave (None: a graph did), and what it
        was given; `early`: its scalars. Empties `made`, `kept` and `memory`: the program alone holds what it reads."""
        both = [*early, *scalars]
        if made is None:
            assert self._graphs is not None
            return self._graphs.run_second(memory, both)
        return self._programs.run_second(made, kept, memory, both)

    def _give_up(self) -> None:
        self._programs.is_given_up = True
        for handle in self._handles:
            handle.waits_for_pair = False

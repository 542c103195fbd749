"""Steps of a replay on ordinary tensors that need not wait for the programs before them: they run first.

A call that reads its loss before `backward()` counts its optimizer's steps after the read. Run there, that is time in
which the device waits; and a branch on a count would be a check after the first program, whose changes to the state
would have to be held back until then.

Invariant: every step gets the values that it would get in its own place. Where a program raises, the ordinary tensors
written by steps that stand behind it are as they were before the call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchlazy.lazy import call_template as t
from torchlazy.lazy.capture_scalars import places_in
from torchlazy.lazy.cut_pairs import memory_read
from torchlazy.lazy.geometry import is_dense
from torchlazy.lazy.op_plan import is_random
from torchlazy.lazy.tensor import LazyTensor


@dataclass(frozen=True, eq=False)
class OrderedSteps:
    """The steps in the order in which they are run. `until`: for each step that was moved, by identity, the position of
    the segment before which it stood; the last step's where there was none."""

    steps: tuple[t.Step, ...]
    until: dict[int, int]

    def moved(self) -> dict[int, list[t.Step]]:
        """The steps that were moved, by that position."""
        found: dict[int, list[t.Step]] = {}
        for step in self.steps:
            if id(step) in self.until:
                found.setdefault(self.until[id(step)], []).append(step)
        return found


def host_steps_first(template: t.CallTemplate) -> OrderedSteps:
    """The template's steps, those in front that only need ordinary tensors and numbers known before any program."""
    steps = template.steps
    first = next((i for i, step in enumerate(steps) if isinstance(step, (t.Segment, t.JointRun))), len(steps))
    known = set(range(len(template.free)))
    known |= {step.source for step in steps[:first] if isinstance(step, (t.HostItem, t.Seed))}
    roots: dict[int, frozenset[int]] = {}  # of a host tensor that a step made: the memory that it may share
    written: dict[int, int] = {}  # memory -> after how many programs it was written
    for step in steps[:first]:
        _note_roots(step, roots)
        written.update(dict.fromkeys(_memory_written(step, roots), 0))
    taken = _program_memory(steps) | {_ANY}
    moved: list[t.Step] = []
    stayed: list[t.Step] = []
    programs = 0
    for step in steps[first:]:
        programs += isinstance(step, (t.Segment, t.JointRun))
        used, writes = _memory_used(step, roots), _memory_written(step, roots)
        # What is written twice, a program in between, has two values to go back to.
        is_once = all(written.get(memory, programs) == programs for memory in writes)
        if is_once and not used & taken and _can_be_moved(step, known):
            moved.append(step)
            _note_roots(step, roots)
            written.update(dict.fromkeys(writes, programs))
            if isinstance(step, t.HostItem):
                known.add(step.source)
            continue
        stayed.append(step)
        taken |= used
        if _ANY in writes:
            break  # what it writes may be anything
    stayed += [step for step in steps[first:] if all(step is not other for other in (*moved, *stayed))]
    ordered = (*steps[:first], *moved, *stayed)
    segments = [i for i, step in enumerate(steps) if isinstance(step, (t.Segment, t.JointRun))]
    until = {}
    for step in moved:
        at = next(i for i, other in enumerate(steps) if other is step)
        later = next((steps[i] for i in segments if i > at), ordered[-1])
        until[id(step)] = next(i for i, other in enumerate(ordered) if other is later)
    return OrderedSteps(ordered, until)


def sources_needed(template: t.CallTemplate) -> set[int]:
    """The number sources that checks and steps read: all but those of which only the caller is told."""
    expressions = [expression for expression, _ in template.checks]
    needed: set[int] = set()
    for step in template.steps:
        if isinstance(step, (t.Segment, t.JointRun)):
            expressions += step.scalars
        elif isinstance(step, (t.HostCall, t.LazyCall)):
            needed |= _numbers_of(step)
    return needed.union(*(places_in(expression) for expression in expressions))


_ANY = -1  # memory of which it is not known whose it is


def _can_be_moved(step: t.Step, known: Collection[int]) -> bool:
    if isinstance(step, t.HostCall):
        return not is_random(step.op) and _numbers_of(step) <= set(known)
    return isinstance(step, t.HostItem)


def _memory_used(step: t.Step, roots: Mapping[int, frozenset[int]]) -> set[int]:
    return {memory for host in _hosts_of(step) for memory in _memory_of(host, roots)}


def _memory_written(step: t.Step, roots: Mapping[int, frozenset[int]]) -> set[int]:
    return {m for host in step.written for m in _memory_of(host, roots)} if isinstance(step, t.HostCall) else set()


def _memory_of(host: t.Host, roots: Mapping[int, frozenset[int]]) -> frozenset[int]:
    if isinstance(host, t.HostKept):
        if not is_dense(host.tensor):  # a sparse tensor lies in several pieces of memory
            return frozenset({_ANY})
        return frozenset({host.tensor.untyped_storage()._cdata})
    return roots.get(host.place, frozenset({_ANY})) if isinstance(host, t.HostMade) else frozenset({_ANY})


def _note_roots(step: t.Step, roots: dict[int, frozenset[int]]) -> None:
    """What a host call makes may be a view of what it was given."""
    if isinstance(step, t.HostCall):
        used = frozenset(_memory_used(step, roots))
        roots.update({place: used for place in step.made if place is not None})


def _program_memory(steps: Iterable[t.Step]) -> set[int]:
    """The memory of the state that programs read or write, as far as it is the same at each call."""
    found: set[int] = set()
    for step in steps:
        inputs: Sequence[t.Memory] = ()
        if isinstance(step, t.Segment):
            inputs = (*step.inputs, *step.targets)
        elif isinstance(step, (t.JointRun, t.LazyCall, t.Collective)):
            inputs = memory_read(step)
        for memory in inputs:
            if isinstance(memory, t.FromState) and memory.storage.real is not None:
                found.add(memory.storage.real.untyped_storage()._cdata)
            elif isinstance(memory, t.FromData) and not isinstance(memory.owner, LazyTensor):
                found.add(memory.owner.untyped_storage()._cdata)
    return found


def _hosts_of(step: t.Step) -> list[t.Host]:
    """The ordinary tensors that a step reads or writes."""
    if isinstance(step, t.HostCall):
        return [*_found((step.args, step.kwargs), (t.HostKept, t.HostArgument, t.HostMade)), *step.written]
    if isinstance(step, t.HostItem):
        return [step.tensor]
    return [step.source] if isinstance(step, t.ToLazy) else []


def _numbers_of(step: t.HostCall | t.LazyCall) -> set[int]:
    numbers = _found((step.args, step.kwargs), (t.HostNumber,))
    return {place for number in numbers for place in places_in(number.expression)}


def _found(value: Any, kinds: tuple[type, ...]) -> list[Any]:
    if isinstance(value, kinds):
        return [value]
    if isinstance(value, (tuple, list)):
        return [found for item in value for found in _found(item, kinds)]
    return []

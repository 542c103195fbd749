"""Ordinary tensors in a replay: arguments of operators, values to restore on failure, and which steps run first.

Steps on ordinary tensors that need not wait for the programs before them run first. A call that reads its loss before
`backward()` counts its optimizer's steps after the read. Run there, that is time in which the device waits; and a
branch on a count would be a check after the first program, whose changes to the state would have to be held back until
then.

Invariant: what is remembered is what host steps write and what was there before the call; what they make is dropped.
Every step gets the values that it would get in its own place. Where a program raises, the ordinary tensors written by
steps that stand behind it are as they were before the call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torchlazy.lazy.compiled.replay.pairs import memory_read
from torchlazy.lazy.compiled.template import template as t
from torchlazy.lazy.numbers.expr import evaluator, places_in
from torchlazy.lazy.record.tensor import LazyTensor
from torchlazy.lazy.torch_private.autograd_layout import set_versions
from torchlazy.lazy.torch_private.dispatch import below_autograd
from torchlazy.lazy.trace.geometry import is_dense
from torchlazy.lazy.trace.op_schema import is_random

BEGINNING = -1  # the phase before the first program


@dataclass(frozen=True, eq=False)
class Hosts:
    """Host tensors to remember: groups of equal ones that are there, and those that are found at each call."""

    kept: tuple[Sequence[torch.Tensor], ...]
    passed: tuple[t.Host, ...]


def hosts(hosts: Sequence[t.Host], twins: Mapping[int, Sequence[torch.Tensor]]) -> Hosts:
    """The tensors of `hosts`, grouped by the value they hold; twins that are not among them are left out."""
    kept = {id(host.tensor): host.tensor for host in hosts if isinstance(host, t.HostKept)}
    groups: list[Sequence[torch.Tensor]] = []
    grouped: set[int] = set()
    for number, tensor in kept.items():
        if number not in grouped:
            group = [twin for twin in twins.get(number, (tensor,)) if id(twin) in kept]
            grouped.update(map(id, group))
            groups.append(group)
    return Hosts(tuple(groups), tuple(host for host in hosts if not isinstance(host, t.HostKept)))


class HostArguments:
    """The arguments of a host call: what is the same at each call is made once."""

    def __init__(self, step: t.HostCall) -> None:
        quietly = step.written if step.keeps_versions else ()
        self._args = [_getter(value, quietly) for value in step.args]
        self._kwargs = [(name, _getter(value, quietly)) for name, value in step.kwargs]

    def of(self, state: Any) -> tuple[list[Any], dict[str, Any]]:
        return [get(state) for get in self._args], {name: get(state) for name, get in self._kwargs}


def _getter(value: Any, quietly: Sequence[t.Host]) -> Callable[[Any], Any]:
    """How an argument of a host call is found in a run. `quietly`: those whose versions do not move."""
    kind = type(value)
    if kind in (t.HostArgument, t.HostKept, t.HostMade) and value in quietly:
        return lambda state: state.host(value).data
    if kind in (t.HostArgument, t.HostMade):
        return lambda state: state.host(value)
    if kind is t.HostKept:
        return lambda state: value.tensor
    if kind is tuple:
        if all(type(item) is t.HostKept and item not in quietly for item in value):
            tensors = [item.tensor for item in value]
            return lambda state: tensors
        parts = [_getter(item, quietly) for item in value]
        return lambda state: [part(state) for part in parts]
    if kind is t.HostNumber:
        number = evaluator([value.expression])
        return lambda state: number(state.sources)[0]
    return lambda state: value


def counts_together(steps: Sequence[t.Step], stops: Collection[int]) -> dict[int, tuple[list[torch.Tensor], Any]]:
    """Steps in a row that add one number to a tensor each, such as an optimizer's counts: by the number of the first,
    the tensors, for one `_foreach_add_`, and the number. None goes on behind one of `stops`."""
    found: dict[int, tuple[list[torch.Tensor], Any]] = {}
    first = 0
    for at, step in enumerate(steps):
        if (counted := _counted(step)) is None:
            continue
        before, number = found.get(first, ((), None))
        is_next = first + len(before) == at and at - 1 not in stops and type(number) is type(counted[1])
        if not (is_next and number == counted[1]):
            first = at
            found[first] = [], counted[1]
        found[first][0].append(counted[0])
    return {at: batch for at, batch in found.items() if len(batch[0]) > 1}


def _counted(step: t.Step) -> tuple[torch.Tensor, Any] | None:
    """The tensor to which the step adds a number, and that, if it is such a step."""
    if type(step) is not t.HostCall or step.op is not torch.ops.aten.add_.Tensor or step.kwargs or len(step.args) != 2:
        return None
    if step.keeps_versions:
        return None
    kept, number = step.args
    is_count = type(kept) is t.HostKept and type(number) in (int, float) and not any(p is not None for p in step.made)
    return (kept.tensor, number) if is_count else None


def generators_of(step: t.Step) -> tuple[torch.Generator | None, ...]:
    """Those that the step draws from."""
    if isinstance(step, t.LazyCall):
        return step.drawn_from
    if isinstance(step, t.Seed):
        return (step.generator,)
    return (generator_in(step.kwargs),) if isinstance(step, t.HostCall) and is_random(step.op) else ()


def generator_in(kwargs: Sequence[tuple[str, Any]]) -> torch.Generator | None:
    """The generator that an operator on ordinary tensors draws from."""
    found: torch.Generator | None = dict(kwargs).get("generator")
    return found


def written(steps: Sequence[t.Step]) -> list[t.Host]:
    """The host tensors that the steps write and that were there before the call."""
    found: dict[Any, t.Host] = {}
    for step in steps:
        if isinstance(step, t.HostCall):
            for host in step.written:
                if isinstance(host, t.HostKept) and not host.constant:
                    found[id(host.tensor)] = host
                elif isinstance(host, t.HostArgument):
                    found[host] = host
    return list(found.values())


def phases(steps: Sequence[t.Step], but: Collection[int] = ()) -> dict[int, list[t.Host]]:
    """What host steps write until the next program: from the beginning, and after each program, by its number. `but`:
    steps to leave out, by identity."""
    starts = [i for i, step in enumerate(steps) if isinstance(step, t.Segment)]
    ends = [*starts, len(steps)]

    def within(start: int, end: int) -> list[t.Host]:
        return written([step for step in steps[start:end] if id(step) not in but])

    return {BEGINNING: within(0, ends[0])} | {
        start: within(start + 1, end) for start, end in zip(starts, ends[1:], strict=True)
    }


HostValues: TypeAlias = tuple[Sequence[torch.Tensor], torch.Tensor, Sequence[int]]


def restore(values: Sequence[HostValues]) -> None:
    """Let the tensors be as they were, as if nobody had written to them."""
    with below_autograd():
        for tensors, value, versions in values:
            for tensor in tensors:
                tensor.copy_(value)
            if versions:
                set_versions(tensors, versions)


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
    """The number sources that checks and steps read: all but those that only the caller gets."""
    expressions = [expression for expression, _ in template.checks]
    needed: set[int] = set()
    for step in template.steps:
        if isinstance(step, (t.Segment, t.JointRun)):
            expressions += step.scalars
        elif isinstance(step, (t.HostCall, t.LazyCall)):
            needed |= _numbers_of(step)
    return needed.union(*(places_in(expression) for expression in expressions))


_ANY = -1  # memory whose owner is not known


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

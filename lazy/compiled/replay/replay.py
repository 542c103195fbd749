"""Replay: do what a captured call did, from its template, without its Python.

Invariant: either every step ran, or (a check does not hold on a number that the call read) none left a trace: host
tensors and random generators are as they were before, and what programs made of the state was held back. Where a
program raises, what ran before it stands, as in eager, and so do its own writes before the operator that failed
(run/failure.py), but for memory that it had already overwritten in place; the host steps since the program before
it left no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torchlazy.lazy.compiled.capture.host_values import tensors_in, value_of
from torchlazy.lazy.compiled.capture.random import set_state, state_of
from torchlazy.lazy.compiled.replay.again import can_be_called_again, has_only_plain_leaves
from torchlazy.lazy.compiled.replay.collectives import run_collective
from torchlazy.lazy.compiled.replay.handle import ProgramHandle
from torchlazy.lazy.compiled.replay.hosts import (
    BEGINNING,
    HostArguments,
    Hosts,
    HostValues,
    counts_together,
    generators_of,
    host_steps_first,
    hosts,
    phases,
    restore,
    sources_needed,
    written,
)
from torchlazy.lazy.compiled.replay.pairs import PairRun, cut_pairs, last_reads
from torchlazy.lazy.compiled.replay.results import Ending
from torchlazy.lazy.compiled.replay.shared_steps import Steps
from torchlazy.lazy.compiled.replay.split import split_by_forward, split_micro_batches
from torchlazy.lazy.compiled.replay.state import ReplayState, copied, memory_copied, view_over
from torchlazy.lazy.compiled.template import template as t
from torchlazy.lazy.compiled.template.arguments import flat
from torchlazy.lazy.joint.function import DeeperBackward, JointBackward, JointHandles, each_its_own, run_joint
from torchlazy.lazy.joint.graphs import GraphRooms, JointGraphs
from torchlazy.lazy.numbers.expr import evaluator, hold, places_in
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.torch_private.dispatch import below_autograd, tensor_readers
from torchlazy.lazy.torch_private.settings import draw_seed
from torchlazy.lazy.trace.storage import LazyStorage
from torchlazy.runtime.host_read import begin_read
from torchlazy.runtime.native.tensor_versions import TensorVersions

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})  # exactly of these classes: no errors
# From a template, the arguments' structure (None: the call cannot be run again), the arguments, and the joint's wanted
# inputs to what computes gradients of an order that was not recorded.
Deeper = Callable[..., DeeperBackward]
# From a replay, the number of the step behind which it cannot continue, and the state to the replay that can.
Elsewhere: TypeAlias = "Callable[[Replay, int, ReplayState], Replay | None]"
Handles = Callable[[t.Segment, bool], ProgramHandle]  # the bool: whether memory of the state stays where it is


class CheckFailed(Exception):
    """A number is not what it was in the captured call; nothing was done."""


# Stands for an input that no gradient reaches: torch would call the hooks of the input itself with None.
_NOBODY = torch.empty(0)


def _state_among(inputs: Sequence[tuple[t.Memory, Any]], number: int) -> torch.Tensor | None:
    memory = inputs[number][0]
    return memory.storage.real if isinstance(memory, t.FromState) else None


class Replay:
    """Runs one template. Not re-entrant: the recorder's lock is held."""

    is_late = False  # whether sizes that the data decides are bound while it runs

    def __init__(
        self,
        recorder: Recorder,
        template: t.CallTemplate,
        handles: Handles,
        deeper: Deeper | None = None,
        backend: Callable[..., Any] | None = None,
        graphs: GraphRooms | None = None,
    ) -> None:
        """`graphs`: the memory of the callable's CUDA graphs, where joints are to be such."""
        self._deeper = deeper
        self._can_be_called_again = can_be_called_again(template)
        self.recorder = recorder
        self.template = template
        self._planned = template = split_by_forward(split_micro_batches(template))
        ordered = host_steps_first(template)
        steps = ordered.steps
        runs = (t.Segment, t.LazyCall, t.Collective, t.JointRun)
        first = next((i for i, step in enumerate(steps) if isinstance(step, runs)), len(steps))
        self.steps = Steps(template, steps)
        self._first = first
        self._ends_with_joint = bool(steps) and type(steps[-1]) is t.JointRun
        self._joints = {id(step): JointHandles(backend=backend) for step in steps if isinstance(step, t.JointRun)}
        for step in steps if graphs is not None else ():
            if isinstance(step, t.JointRun):
                state = partial(_state_among, step.inputs)
                self._joints[id(step)].graphs = graphs.graphs_of(step.joint, state)  # type: ignore[union-attr]
        segments = [step for step in steps if isinstance(step, t.Segment)]
        self._kept = {id(step): list(map(_storage_of, step.inputs)) for step in segments}
        self._written = {id(step): list(map(_storage_of, step.targets)) for step in segments}
        self._last_reads = last_reads(replace(template, steps=steps))
        self._scalars = {id(s): _numbers_of(s) for s in steps if isinstance(s, (t.Segment, t.JointRun))}
        free = len(template.free)
        self._early = [c for c in template.checks if all(p < free for p in places_in(c[0]))]
        known_at = {
            step.source: i for i, step in enumerate(steps) if isinstance(step, (t.HostItem, t.LazyItem, t.Seed))
        }
        known_at.update((s, i) for i, step in enumerate(steps) if isinstance(step, t.LazyCall) for s in step.sources)
        # A number that nothing depends on within the call is waited for at its end: programs behind the read, such as
        # the backward of a loss that is printed, are launched while the device still computes it.
        needed = sources_needed(template)
        self._read_later = {id(s) for s in steps if isinstance(s, t.LazyItem) and s.source not in needed}
        # Checks on numbers that are known only after some step, by that step; those before the first program at once.
        checks: dict[int, list[tuple[Any, Any]]] = {}
        for expression, then in template.checks:
            at = max((known_at.get(p, -1) for p in places_in(expression)), default=-1)
            if at >= 0:
                checks.setdefault(max(at, first - 1), []).append((expression, then))
        self._midway = {at: (evaluator([e for e, _ in found]), found) for at, found in checks.items()}
        last = max(self._midway, default=first - 1) + 1  # what happens before may have to be undone
        # Programs before the last check change the state only once it holds: until then their results are held back.
        self._settled_at = max(self._midway, default=-1)
        self._held = {
            id(step)
            for step in steps[: self._settled_at + 1]
            if isinstance(step, t.Segment) and any(type(target) is not t.FromStep for target in step.targets)
        }
        self._handles = {id(step): handles(step, id(step) not in self._held) for step in segments}
        self._pairs: dict[int, PairRun] = {}  # by the first segment
        for pair in cut_pairs(replace(template, steps=steps)):
            handle = self._handles[id(pair.first)], self._handles[id(pair.second)]
            if all(found.can_be_paired for found in handle):
                self._pairs[id(pair.first)] = PairRun(recorder.driver, pair, handle)
        self._early_of = evaluator([expression for expression, _ in self._early])
        self._holds_always = not (template.read_free or template.twins or template.kinds or self._early)
        self._ending = Ending(template)
        # As they were when they surely were twins.
        self._twin_versions = [TensorVersions(group, tensor_readers) for group in template.twins]
        self._hidden = {
            id(pair.pair.second): [pair.pair.first.targets[output] for output in pair.pair.hidden]
            for pair in self._pairs.values()
        }
        self._raised = [found for found in template.versions if not isinstance(found, int)]
        self._raised_leaves = [found for found in template.versions if isinstance(found, int)]
        twins = {id(tensor): group for group in template.twins for tensor in group}
        self._checked_hosts = hosts(written(steps[:last]), twins)
        # Twins are equal when a call begins; host steps may change one of them.
        self._phases = {
            number: hosts(found, twins if number == BEGINNING else {})
            for number, found in phases(steps, but=ordered.until).items()
        }
        self._until = {number: hosts(written(found), twins) for number, found in ordered.moved().items()}
        self._calls = {id(step): HostArguments(step) for step in steps if isinstance(step, t.HostCall)}
        self._counts = counts_together(self.steps.steps, self._midway)
        drawn = [generator for step in steps[:last] for generator in generators_of(step)]
        self._generators = list({id(generator): generator for generator in drawn}.values())

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """The generators that the steps draw from, but for torch's default one."""
        found = [generator for step in self.template.steps for generator in generators_of(step)]
        return tuple({id(generator): generator for generator in found if generator is not None}.values())

    def program_of(self, segment: t.Segment) -> Any:
        """The program that ran the segment last; None where none did."""
        return self._handles[id(segment)].compiled

    def runs_graph(self, segment: t.Segment) -> bool:
        """Whether the segment is to be a CUDA graph."""
        return self._handles[id(segment)].wants_graph

    def graphs_of(self, step: t.JointRun) -> JointGraphs | None:
        """The CUDA graphs that are to run the joint, if any."""
        return self._joints[id(step)].graphs

    def programs_of(self, step: t.JointRun) -> tuple[Any, Any]:
        """The same of the joint's forward and backward."""
        handles = self._joints[id(step)]
        return handles.forward.compiled, handles.backward.compiled

    def backward_of(
        self,
        step: t.JointRun,
        held: Sequence[Any],
        given: tuple[Any, ...],
        versions: tuple[int, ...],
        scalars: list[Any],
    ) -> JointBackward:
        """The backward of a joint that was run without Python. `held`: what its node saved, `versions`: see
        `called_again`."""
        wanted = self.wanted_of(step, given)
        deeper = None
        if self._deeper is not None:
            knows = self._can_be_called_again and has_only_plain_leaves(given)
            structure = flat(len(given)) if knows else None
            deeper = self._deeper(self.template, structure, given, wanted, versions)
        return JointBackward(self.recorder, step.joint, held, wanted, scalars, self._joints[id(step)], deeper)

    @staticmethod
    def wanted_of(step: t.JointRun, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """The tensors that the joint's gradients flow to."""
        return [
            _NOBODY if at is None else leaves[w] if isinstance(w, int) else w
            for w, at in zip(step.wanted, step.joint.gradients, strict=True)
        ]

    def holds(self, leaves: Sequence[Any]) -> bool:
        """Whether the free numbers pass the checks as in the captured call, and twins are equal."""
        if self._holds_always:
            return True
        numbers: list[Any] = []
        for read in self.template.read_free:
            numbers.append(read(leaves))
        if tuple(map(type, numbers)) != self.template.kinds:
            return False
        if self._early and not hold(self._early_of, numbers, self._early):
            return False
        return self.twins_hold()

    def twins_hold(self) -> bool:
        """Whether host tensors that were equal are."""
        for number, versions in enumerate(self._twin_versions):
            if not versions.hold() and not self._still_twins(self.template.twins[number]):
                return False
        return True

    def note_twins(self) -> None:
        """They are equal now."""
        for versions in self._twin_versions:
            versions.note()

    @staticmethod
    def _still_twins(group: Sequence[torch.Tensor]) -> bool:
        first = group[0].item()
        return all(other.item() == first for other in group)

    def run(
        self,
        leaves: Sequence[Any],
        given: Sequence[Any],
        containers: Sequence[Any] = (),
        structure: Any = None,
        elsewhere: Elsewhere | None = None,
    ) -> tuple[Replay, list[Any]]:
        """The results in flat order, and the replay that gave them. Raises CheckFailed where nothing was done.

        `leaves` are the arguments as the programs get them, `given` as the caller passed them, in these `containers`
        and this structure. `elsewhere` finds the replay to continue with where a number is not what it was; where
        it gives None, all is undone.
        """
        recorder = self.recorder
        if recorder.entries or recorder.inputs:  # what is pending is computed first: it may read memory written here
            recorder.cut("compiled call")
        recorder.rematerialize_pending()
        state = ReplayState(self.recorder, leaves, given, self._planned)
        state.containers, state.structure = containers, structure
        ran: Replay = self
        ran._prepare(state)
        start = 0
        while (stopped := ran._go(state, start)) is not None:
            found = None if elsewhere is None else elsewhere(ran, stopped, state)
            if found is None or not found._continue_from(ran, stopped, state):
                state.undo()
                raise CheckFailed
            ran, start = found, stopped + 1
        return ran, ran._finish(state)

    def _prepare(self, state: ReplayState) -> None:
        """What the steps overwrite is remembered."""
        if self._midway:
            state.is_open = True
            state.undos.append(self._remember(state))
        state.until = {number: self._values(found, state) for number, found in self._until.items()}
        state.back = [*self._values(self._phases[BEGINNING], state), *chain.from_iterable(state.until.values())]

    def _go(self, state: ReplayState, start: int) -> int | None:
        """Run the steps from `start` on; the number of the step after which a number differed, if there is one."""
        steps = self.steps.steps
        midway = self._midway
        done = start
        try:
            with below_autograd():
                for number in range(start, len(steps)):
                    step = steps[number]
                    if number in self._counts:
                        tensors, more = self._counts[number]
                        torch.ops.aten._foreach_add_.Scalar(tensors, more)
                        done = number + len(tensors)
                    elif number >= done and type(step) is not t.JointRun:
                        self._run(step, state)
                    if type(step) is t.Segment:
                        state.until.pop(number, None)
                        state.back = [
                            *self._values(self._phases[number], state), *chain.from_iterable(state.until.values())
                        ]  # fmt: skip
                    if number in midway and not self._goes_on(state, number):
                        return number
                    if number == self._settled_at:
                        state.commit()
            if self._ends_with_joint:
                self._raise_versions(state)
                state.outputs = each_its_own(self._joint(steps[-1], state))  # type: ignore[arg-type]
        except BaseException:
            with below_autograd():
                state.commit()
            restore(state.back)
            raise
        return None

    def agrees(self, state: ReplayState, number: int) -> bool:
        """Whether the numbers known after step `number` are what this template continues with."""
        return all(self._goes_on(state, at) for at in self._midway if at <= number)

    def _goes_on(self, state: ReplayState, number: int) -> bool:
        """The same of those that were not known before."""
        values_of, checks = self._midway[number]
        return hold(values_of, state.sources, checks)

    def _continue_from(self, other: Replay, number: int, state: ReplayState) -> bool:
        """Continue behind step `number` with what another replay's equal steps made; False where one is missing."""
        for crossing in state.crossing:  # what the other's programs keep for their own second halves is missing
            for target in other._hidden[id(crossing.second)]:
                if type(target) is t.FromStep:
                    state.places[target.place] = None
        if any(state.places[place] is None for place in self.steps.read_from(number + 1)):
            return False
        state.crossing.clear()
        state.take_form(self._planned)
        for source, read in state.reads:
            state.sources[source] = read()
        state.reads.clear()
        step = self.steps.steps[number]
        if type(step) is t.LazyCall:
            state.lay_out(step)
        if self._midway:
            state.undos.append(self._remember(state))
        segments = [at for at in range(number + 1) if type(self.steps.steps[at]) is t.Segment]
        phase = self._phases[segments[-1] if segments else BEGINNING]
        state.back = [*self._values(phase, state), *state.back]
        if number >= self._settled_at:
            with below_autograd():
                state.commit()
        return True

    def _finish(self, state: ReplayState) -> list[Any]:
        if not self._ends_with_joint:
            self._raise_versions(state)
        for source, read in state.reads:
            state.sources[source] = read()
        results = self._ending_of(state).give(state)
        self.note_twins()
        self.recorder.let_go()
        return results

    def _raise_versions(self, state: ReplayState) -> None:
        if self._raised or self._raised_leaves:
            torch.autograd.graph.increment_version(self._raised + [state.given[leaf] for leaf in self._raised_leaves])

    def _ending_of(self, state: ReplayState) -> Ending:
        return self._ending

    # ---------------------------------------------------------------- steps

    def _run(self, step: t.Step, state: ReplayState) -> None:
        kind = type(step)
        if kind is t.Segment:
            self._segment(step, state)  # type: ignore[arg-type]
        elif kind is t.HostItem:
            state.sources[step.source] = value_of(state.host(step.tensor))  # type: ignore[union-attr,index]
        elif kind is t.HostCall:
            self._host_call(step, state)  # type: ignore[arg-type]
        elif kind is t.Seed:
            state.sources[step.source] = draw_seed(step.generator)  # type: ignore[union-attr,index]
        elif kind is t.KeepState:
            state.generators[step.number] = state_of(step.generator)  # type: ignore[union-attr]
        elif kind is t.Rewind:
            set_state(step.generator, state.generators[step.number])  # type: ignore[union-attr]
        elif kind is t.ToLazy:
            self._to_lazy(step, state)  # type: ignore[arg-type]
        elif kind is t.LazyCall:
            state.call_at_once(step)  # type: ignore[arg-type]
        elif kind is t.Collective:
            run_collective(step, state)  # type: ignore[arg-type]
            for place in self._last_reads[id(step)]:
                state.places[place] = None
        elif kind is t.ToHost:
            real = view_over(state.memory(step.source), step.geometry)  # type: ignore[union-attr,arg-type]
            state.hosts[step.made] = step.op(real, **dict(step.kwargs))  # type: ignore[union-attr,index,misc]
        else:
            assert isinstance(step, t.LazyItem)
            value = view_over(state.memory(step.memory), step.geometry)
            if id(step) in self._read_later:
                state.reads.append((step.source, begin_read(value)))
            else:
                state.sources[step.source] = value_of(value)

    def _segment(self, step: t.Segment, state: ReplayState) -> None:
        held = id(step) in self._held
        if held or state.held:
            seen = zip(step.inputs, step.trace.inputs, strict=True)
            memory: list[Any] = [state.memory(source, geom) for source, (_, geom) in seen]
            for output, given in step.trace.donations if held else ():
                if type(step.targets[output]) is not t.FromStep:
                    memory[given] = copied(memory[given])
        else:
            memory = [
                storage.real if storage is not None and storage.poison is None else state.memory(source, geom)
                for storage, source, (_, geom) in zip(self._kept[id(step)], step.inputs, step.trace.inputs, strict=True)
            ]
        for place in self._last_reads[id(step)]:
            state.places[place] = None  # the program is now the only one that holds it, and frees it when it is read
        values = self._outputs(step, memory, self._scalars[id(step)](state.sources), state)
        failed = None
        if not _TENSORS.issuperset(map(type, values)):
            failed = next((value for value in values if isinstance(value, BaseException)), None)
        if failed is not None and not step.trace.writes:  # which of the values stand is not known
            raise failed
        targets = zip(self._written[id(step)], step.targets, values, step.trace.outputs, strict=True)
        if failed is None and not held:  # nearly always: kept short
            for storage, target, value, (_, geom) in targets:
                if storage is not None and storage.real is value:  # written in place, as parameters are
                    storage.version += 1
                else:
                    state.put(target, value, geom)
            return
        for storage, target, value, (_, geom) in targets:
            if isinstance(value, BaseException) or (failed is not None and type(target) is t.FromStep):
                continue
            if held and type(target) is not t.FromStep:
                state.hold(target, value, geom)
            elif storage is not None and storage.real is value:
                storage.version += 1
            else:
                state.put(target, value, geom)
        if failed is not None:
            raise failed

    def _outputs(self, step: t.Segment, memory: list[Any], scalars: list[Any], state: ReplayState) -> list[Any]:
        for position, crossing in enumerate(state.crossing):
            if crossing.second is step:
                return state.crossing.pop(position).run(memory, scalars)
        pair = self._pairs.get(id(step))
        if pair is not None and pair.is_ready():
            values, begun = pair.run_first(memory, scalars)
            if begun is not None:
                state.crossing.append(begun)
            return values
        return self._handles[id(step)].run(memory, scalars)

    def _joint(self, step: t.JointRun, state: ReplayState) -> list[torch.Tensor]:
        inputs = [tensor if tensor is not None else state.tensor(memory) for memory, tensor in step.inputs]
        wanted = self.wanted_of(step, state.leaves)
        scalars = self._scalars[id(step)](state.sources)
        deeper = None
        if self._deeper is not None:
            knows = self._can_be_called_again and state.structure is not None and has_only_plain_leaves(state.given)
            deeper = self._deeper(self.template, state.structure if knows else None, state.given, wanted)
        return run_joint(
            self.recorder, step.joint, inputs, wanted, scalars, cause="compiled call", deeper=deeper,
            unraised=step.unraised, handles=self._joints[id(step)],
        )  # fmt: skip

    def _host_call(self, step: t.HostCall, state: ReplayState) -> None:
        args, kwargs = self._calls[id(step)].of(state)
        result = step.op(*args, **kwargs)
        if step.made:
            flat = (result,) if isinstance(result, torch.Tensor) else tensors_in(result)
            for place, value in zip(step.made, flat, strict=True):
                if place is not None:
                    state.hosts[place] = value

    def _to_lazy(self, step: t.ToLazy, state: ReplayState) -> None:
        host = state.host(step.source)
        if step.op is None:
            state.places[step.place] = host.detach().clone() if not host.dim() else memory_copied(host)
            return
        kwargs = dict(step.kwargs)
        kwargs["device"] = torch.device(self.recorder.target)
        real = step.op(host.detach(), **kwargs)
        if real.untyped_storage()._cdata == host.untyped_storage()._cdata:
            real = real.clone()
        state.places[step.place] = real

    # ---------------------------------------------------------------- undoing

    def _values(self, hosts: Hosts, state: ReplayState) -> list[HostValues]:
        """Host tensors in groups, with copies of the values that all of a group have, and their versions."""
        found: list[HostValues] = []
        for tensors in (*hosts.kept, *zip(map(state.host, hosts.passed), strict=True)):
            try:
                versions = tuple(map(_version, tensors))
            except RuntimeError:  # inference tensors have none
                versions = ()
            found.append((tensors, tensors[0].detach().clone(), versions))
        return found

    def _remember(self, state: ReplayState) -> Callable[[], None]:
        hosts = self._values(self._checked_hosts, state)
        generators = [(generator, state_of(generator)) for generator in self._generators]

        def undo() -> None:
            restore(hosts)
            for generator, was in generators:
                set_state(generator, was)

        return undo


_version = attrgetter("_version")


def _numbers_of(segment: t.Segment | t.JointRun) -> Callable[[Sequence[Any]], list[Any]]:
    return evaluator(segment.scalars)


def _storage_of(memory: t.Memory) -> LazyStorage | None:
    """The storage, where it is the same one at each call."""
    return memory.storage if isinstance(memory, t.FromState) else None

"""Captures one call: what it can read, what it does, what it returns, and what it leaves behind.

Invariant: a template is made only where everything that outlives the call is accounted for: results, gradients, and
tensors that guarded places hold. Python state that changed in another way is a reason for having no template.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torchlazy.lazy.compiled.capture.autograd_facts import SlotGraphs
from torchlazy.lazy.compiled.capture.backward import BackwardEffects, collect_garbage, collector_runs, runs_python
from torchlazy.lazy.compiled.capture.escaped_numbers import EscapedNumbers
from torchlazy.lazy.compiled.capture.joint import gradient_edges, graphs_of, joint_run, refuse_changed_under_autograd
from torchlazy.lazy.compiled.capture.moving_answers import moving_answers
from torchlazy.lazy.compiled.capture.outcome import Outcome
from torchlazy.lazy.compiled.capture.own_view import identities_asked_by, watched_identities
from torchlazy.lazy.compiled.capture.random import Outside
from torchlazy.lazy.compiled.capture.reads import TensorReads
from torchlazy.lazy.compiled.capture.session import END, Capture
from torchlazy.lazy.compiled.capture.state import StateBefore
from torchlazy.lazy.compiled.capture.tensor_effects import Flags, Marks, Memories, Versions, raised_apart
from torchlazy.lazy.compiled.capture.threads import recorder_released
from torchlazy.lazy.compiled.guards.code import looks_at_types, may_seed
from torchlazy.lazy.compiled.guards.conversions import calls_otherwise, spaces_calling
from torchlazy.lazy.compiled.guards.discover import TooMuch, discover
from torchlazy.lazy.compiled.guards.growing import Size, size_of
from torchlazy.lazy.compiled.guards.guards import Guards
from torchlazy.lazy.compiled.guards.library_state import results_in
from torchlazy.lazy.compiled.guards.reached import GuardedPlace, NotYet, Reached, StateSlots, stored_in
from torchlazy.lazy.compiled.guards.tensors import aliases_in, memory_of, moving_tensors
from torchlazy.lazy.compiled.template import template as t
from torchlazy.lazy.compiled.template.argument_facts import facts_of
from torchlazy.lazy.compiled.template.arguments import FunctionArguments, Passed
from torchlazy.lazy.compiled.template.views import ArgumentView, are_on
from torchlazy.lazy.device.mode import RecordedBlock
from torchlazy.lazy.numbers.expr import is_many_to_one, places_in
from torchlazy.lazy.numbers.questions import SizeQuestions
from torchlazy.lazy.numbers.tracked import node_of, tracked_conversions, tracked_math
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.record.tensor import LazyTensor
from torchlazy.lazy.torch_private.dispatch import unseen_by_functions
from torchlazy.lazy.torch_private.distributed import (
    groups_of,
    is_begun,
    is_sharded,
    make_sharded,
    part_of,
    unsupported_sharding,
)
from torchlazy.lazy.torch_private.patches import hooks_on_nodes
from torchlazy.lazy.trace.geometry import is_dense
from torchlazy.lazy.trace.storage import LazyStorage


@dataclass(frozen=True, eq=False)
class Captured:
    """A call that ran, perhaps until it raised. `template` is None where `refused` says why it cannot be replayed."""

    value: Any  # None where its Python raised
    error: BaseException | None  # that it raised
    template: t.CallTemplate | None
    guards: Guards
    refused: str
    wrote_views: bool  # it wrote to a copy of an argument view, gave a view of it away, or asked for its address
    coincidences: frozenset[Any]  # expressions fixed only because a constant had the same value
    aliases: tuple[tuple[int, int] | None, ...]  # for each argument which memory of the state it is on
    slots: StateSlots
    slot_facts: Any  # of arguments and slots together, as `facts_of` gives them; None where there are no slots
    replaces: frozenset[str]  # names of places whose values the call replaced: slots of later captures
    counts: frozenset[str]  # names of numbers that the call changed: they vary
    reached: Reached
    sizes: dict[str, Size]  # of the slots when it began
    appends: frozenset[str]  # names of lists that the call appended to
    rewritten: frozenset[str]  # of lists that were assumed to be only appended to, and were not
    checks: tuple[Any, ...] = ()  # its branches on numbers, with or without a template
    moves: frozenset[str] = frozenset()  # names of tensors that the call left on other memory
    values: Mapping[int, Any] = field(default_factory=dict)  # of number sources
    stays: frozenset[str] = frozenset()  # effects that are there to compare with an audited template's: nothing changed

    def by_itself(self) -> Captured:
        """As it would be without the comparison: a template writes what its call wrote, not what was there."""
        if self.template is None or not self.stays:
            return self
        effects = tuple([effect for effect in self.template.effects if effect.name not in self.stays])
        return replace(self, template=replace(self.template, effects=effects), stays=frozenset())


@dataclass(frozen=True, eq=False)
class CallToCapture:
    """What is called: the function, its arguments flat, and the names of numbers that may vary from call to call."""

    function: Callable[..., Any]
    passed: Passed
    leaf_names: tuple[str, ...]
    free: frozenset[str]
    fixed: frozenset[str]  # numbers whose values the program asked for
    free_learning_rates: bool
    is_plain: Callable[[Iterable[torch.Tensor]], bool]  # `plain`, where the call reaches these tensors
    fullgraph: bool
    orders: int  # of gradients that are asked for: 2 with gradients of gradients
    slots: frozenset[str]  # names of places whose values calls replace
    follows: bool  # tracked numbers go through its Python
    draws_from: tuple[torch.Generator, ...] = ()  # generators of its own that it is known to draw from
    plain: bool = False  # ordinary tensors are recorded, under lazy_mode
    in_slots: tuple[Any, ...] = ()  # what these hold, flat
    appended: frozenset[str] = frozenset()  # names of lists that calls only append to
    asked: SizeQuestions | None = None  # listens to what its Python asks of sizes
    moving: frozenset[str] = frozenset()  # names of tensors of the state whose memory calls exchange
    writes: frozenset[str] = frozenset()  # names of state that the audited template writes, be it what is there
    like: Guards | None = None  # of the variant that is audited

    @property
    def leaves(self) -> tuple[Any, ...]:
        """The arguments, and after them what the slots hold."""
        return self.passed.leaves + self.in_slots

    @property
    def given(self) -> tuple[Any, ...]:
        return self.passed.given + self.in_slots

    @property
    def paired(self) -> list[tuple[Any, Any]]:
        """Each as the programs get it, and as the caller passed it."""
        return list(zip(self.leaves, self.given, strict=True))

    @property
    def named(self) -> list[tuple[str, Any]]:
        """The arguments that discovery goes through, with their names."""
        pairs = zip(self.leaf_names, self.passed.leaves, strict=True)
        return [(name, leaf) for name, leaf in pairs if not isinstance(leaf, torch.Tensor)]

    def leaves_lazy(self) -> list[torch.Tensor]:
        """The tensor arguments."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]


def _reached_before(call: CallToCapture) -> Reached:
    """What the call reaches. An audit's guards know, where nothing has changed since: discovery is a tenth of its time,
    with a large library's model a fifth."""
    known = call.like
    is_plain = all(type(value) in _ATOMS for _, value in call.named)  # else other objects may be given now
    if (
        known is not None
        and is_plain
        and known.reached.assumed == (call.slots, call.appended)
        and known.are_very_same()
    ):
        return known.reached
    return discover(call.function, call.named, call.slots, call.appended)


_ATOMS = frozenset({int, float, bool, str, bytes, type(None)})


def _reached_after(call: CallToCapture, before: Reached, guards: Guards, refuse: Callable[[str], None]) -> Reached:
    """What the call reaches once it has run: whatever is found then, it must not run again."""
    if guards.are_very_same():
        return before
    try:
        return discover(call.function, call.named, call.slots, call.appended)
    except TooMuch as why:
        refuse(str(why))
        return before


class ViewOnState(Exception):
    """A copy stands in for an argument view on memory that is part of the state too, or whose identity it asks for:
    the call needs the view itself."""


def capture_call(recorder: Recorder, call: CallToCapture) -> Captured:
    """Run the call once, recorded."""
    numbers = EscapedNumbers()
    try:
        return _capture_call(recorder, call, numbers)
    finally:
        numbers.settle()


def _capture_call(recorder: Recorder, call: CallToCapture, numbers: EscapedNumbers) -> Captured:
    recorder.cut("compiled call")
    edges = gradient_edges(call.leaves)
    recorder.cut("compiled call")  # a leaf's edge is found by a view of it, which would be the trace's first input
    reached = _reached_before(call)
    sharded = [one for one, _ in reached.instances if is_sharded(one)]
    if sharded:
        if any([make_sharded(group) for one in sharded for group in groups_of(one)]):
            reached = discover(call.function, call.named, call.slots, call.appended)
        if why := next(filter(None, map(unsupported_sharding, chain.from_iterable(map(groups_of, sharded)))), ""):
            raise TooMuch(f"a module under fully_shard {why} keeps torch's own way, which frees memory by address")
        if not all(map(is_begun, sharded)):
            raise NotYet("fully_shard makes the rest of its state in a module's first forward pass")
    if any(isinstance(tensor, (UninitializedParameter, UninitializedBuffer)) for tensor, _ in reached.tensors.values()):
        raise NotYet("a lazy module gets its parameters in its first call")
    if call.follows and looks_at_types(reached.codes):
        raise TrackedNumberSeen
    slots = StateSlots(reached.slots)
    sizes = {slot.name: size_of(slot) for slot in slots.slots}
    tensors = chain((tensor for tensor, _ in reached.tensors.values()), filter(torch.is_tensor, slots.leaves))
    call = replace(call, in_slots=slots.leaves, plain=call.is_plain(tensors))
    slot_graphs = SlotGraphs(slots.leaves, call.passed.leaves)
    moving = moving_tensors(reached, call.moving)
    aliases = aliases_in(call.given, moving.memories())
    asked = identities_asked_by(reached.codes)
    needs_views = bool(asked or reached.unrepeatable) or are_on(slots.leaves, call.given, call.leaves)
    if any(a is not b and (needs_views or at) for at, a, b in zip(aliases, call.leaves, call.given, strict=True)):
        raise ViewOnState
    free = _free_places(reached, call, slots)
    slot_facts = None
    if slots.slots:
        slot_facts = facts_of(call.leaves, {f"argument {at}" for _, place, at in free if place is None})
        if isinstance(slot_facts, str):
            raise UnfitSlots(slot_facts)
    named = frozenset(name for name, _, _ in free) | {slot.name for slot in slots.slots}
    guards = Guards(reached, named, moving.names)
    known, hosts, keep, holders = _known(recorder, reached, call, moving.ids)
    before = StateBefore(reached)
    grads = {id(tensor): tensor.grad for tensor, _ in reached.tensors.values() if tensor.is_leaf}
    given_grads = {id(leaf): leaf.grad for leaf in call.leaves_lazy() if leaf.is_leaf and leaf.grad is not None}
    grads.update(given_grads)
    versions = Versions(recorder, reached, call.leaves)
    flags = Flags(reached, call.leaves)
    marks = Marks(reached, [*call.leaves, *(given for leaf, given in call.paired if given is not leaf)])
    memories = Memories(recorder, reached, call.leaves)
    capture = Capture(recorder, known, hosts, fullgraph=call.fullgraph)
    capture.holders = holders
    memories_of_gradients = {
        memory_of(part_of(x.grad)) for x, _ in reached.tensors.values() if grads.get(id(x)) is not None
    }
    capture.gradients = {id(x.grad): x for x, _ in reached.tensors.values() if grads.get(id(x)) is not None}
    capture.follows = call.follows
    capture.windows = [ArgumentView(given, leaf, leaf.detach()) for leaf, given in call.paired if leaf is not given]
    capture.draws_from = call.draws_from
    capture.generators.may_be_seeded = may_seed(reached.codes)
    capture.needs_gradients = any(
        x.requires_grad for x in (*call.leaves_lazy(), *(x for x, _ in reached.tensors.values()))
    )
    capture.numbers_left = numbers
    capture.asked = numbers.sizes = call.asked
    outside = Outside(reached, capture.refuse)
    capture.arrays.reach(reached.arrays, keep, [x for x, _ in reached.tensors.values()] + call.leaves_lazy())
    leaves = list(call.leaves)
    restore: list[tuple[GuardedPlace, int, Any, Any]] = []
    frames_were, recorder.keep_frames = recorder.keep_frames, True
    read_free: list[Callable[[Sequence[Any]], Any]] = []
    kinds: list[type] = []
    try:
        for name, place, position in free:
            if place is None:
                kinds.append(type(leaves[position]))
                leaves[position] = capture.new_source(leaves[position])
                read_free.append(_Argument(position))
            else:
                number = list(place.read())[position]
                kinds.append(type(number))
                traced = capture.new_source(number)
                assert place.store is not None, name
                place.store(position, traced)
                restore.append((place, position, number, traced))
                read_free.append(_Reader(place, position))
        own = len(call.passed.leaves)
        if call.asked is not None:
            for position in (*sorted(call.asked.arguments), *range(own, len(leaves))):
                if type(leaves[position]) is int and leaves[position] > 1:
                    leaves[position] = call.asked.track_argument(leaves[position])
        slots.fill(leaves[own:])
        handed = FunctionArguments(call.passed, leaves[:own])
        with ExitStack() as stack:
            if call.plain:
                stack.enter_context(RecordedBlock())
                if recorder.target != "cpu":
                    stack.enter_context(recorder_released(recorder))
            stack.enter_context(capture)
            stack.enter_context(moving_answers(capture.refuse))
            reads = stack.enter_context(TensorReads(capture))
            on_node = partial(capture.refuse, "it puts a hook on a node of the graph of autograd")
            stack.enter_context(hooks_on_nodes(on_node))
            graphs = [*graphs_of(reached), *slot_graphs.nodes]
            runs = collector_runs()
            given = handed.identities({id(x): x for x in slots.leaves}, reached.tensors)
            spaces = spaces_calling(reached.functions, ("float", "int")) if call.follows else []
            if call.asked is not None:
                counted = spaces_calling(reached.functions, ("range",))
                call.asked.all_stay = calls_otherwise(reached.functions, "range", counted)
                spaces += counted
            watched = watched_identities(asked, reached.functions, given, capture.refuse)
            with watched, tracked_conversions(spaces), tracked_math():
                try:
                    value, error = call.function(*handed.args, **handed.kwargs), None
                except BaseException as raised_by_call:  # what it did until then is done all the same
                    value, error = None, raised_by_call
                    capture.refuse(f"it raised {type(error).__name__}")
            if call.asked is not None:
                call.asked.listens = False
            stored = _stored(restore, slots, leaves)
            _restore(restore, slots, leaves)
            reach = partial(_reached_after, call, reached, guards, capture.refuse)
            own_reads = stack.enter_context(ExitStack())
            own_reads.enter_context(unseen_by_functions())  # the program did not ask for these
            after = reach()
            changes = list(before.changes(after, capture.refuse, stored, call.writes))
            guards.keep_results(after.caches)
            for function, name in after.caches:
                if any(node_of(result) is not None for result in results_in(function)):
                    capture.refuse(f"{name} keeps a number that varies from call to call")
            lazies = [tensor for tensor, _ in after.tensors.values() if type(tensor) is LazyTensor]
            del after
            before.forget()
            raised = moved = versions.raised()
            marks.refuse_changed(capture.refuse)
            refuse_changed_under_autograd(capture, call, edges, graphs)
            own_reads.close()
            contents = handed.changes()
            kept = [value, [c.value for c in changes], [held for _, held in contents]]
            slot_graphs.refuse_used(capture.refuse, kept)
            gradients_read = reads.gradients
            within = [*(x for x, _ in reached.tensors.values()), *call.leaves_lazy()]
            collect_garbage(recorder, known, kept, within, runs)
            reads.gradients = gradients_read  # the program did not ask for this one
            backward = BackwardEffects(reach) if capture.hooked or runs_python(kept) else None
            with tracked_math():
                joint = joint_run(recorder, call, reached, capture, kept, edges)
            if backward is not None:
                backward.refuse(capture.refuse)
            del kept, backward
            if joint is None:
                recorder.cut(END)
    finally:
        recorder.keep_frames = frames_were
        _restore(restore, slots, leaves)
    outside.refuse_changes()
    capture.refuse_scattered_reads()
    if handed.has_changed_otherwise(contents):
        capture.refuse("it changes a container among its arguments in a way that is not followed")
    if joint is not None:
        raised = versions.raised_by(capture.steps, joint.step)
    found = Outcome(recorder, call, reached, capture, value, grads, joint, raised, handed)
    found.refuse_held(value)
    step = None if joint is None else versions.with_unraised(joint.step)
    del grads, given_grads
    results = found.results()
    value = found.handed_out(value)
    effects = found.effects(changes) + found.contents(contents) + flags.effects(capture, joint is not None)
    effects += memories.effects(capture, found)
    found.show(contents)
    del keep, contents, handed
    if not capture.refused:
        found.account()
    if joint is None or capture.windows:
        found.settle(changes)
    if joint is None:
        found.settle_new(lazies)
    del lazies
    template = None
    if not reads.gradients and not capture.gradients_used and not any(e.name.endswith(".grad") for e in effects):
        guards.ignore_gradients()
    elif not memories_of_gradients.isdisjoint(map(memory_of, call.leaves_lazy())):
        capture.refuse("an argument, or a value that calls replace, is a gradient of the state, too")
    guards.keep_gradients([(capture.gradients[key], grad) for key, grad in capture.gradients_on_host.items()])
    if not capture.refused:
        raised, steps = raised_apart(found.versions(), moved, capture.steps)
        template = t.CallTemplate(
            steps=steps if step is None else (*steps, step),
            free=tuple(name for name, _, _ in free),
            read_free=tuple(read_free),
            kinds=tuple(kinds),
            sources=capture.sources,
            checks=tuple(capture.checks),
            results=tuple(results),
            spec=found.spec,
            effects=tuple(effects),
            versions=raised,
            twins=tuple(tuple(group) for group in capture.twins.values() if len(group) > 1),
            places=capture.places,
            hosts=capture.hosts,
            operators=capture.operators,
        )
    slots.forget()
    written_back = found.write_back_views()
    capture.forget()
    return Captured(
        value,
        error,
        template,
        guards,
        capture.refused,
        written_back or capture.asked_of_views,
        frozenset(capture.coincidences),
        aliases,
        slots,
        slot_facts,
        frozenset(change.slot for change in changes if change.slot and not change.stays),
        frozenset(change.number for change in changes if change.number and not change.stays),
        reached,
        sizes,
        frozenset(change.name for change in changes if change.appends),
        frozenset(before.rewritten),
        tuple(capture.checks),
        memories.moved,
        capture.values,
        frozenset(change.name for change in changes if change.stays),
    )


def _stored(restore: list[tuple[GuardedPlace, int, Any, Any]], slots: StateSlots, leaves: Sequence[Any]) -> set[str]:
    """The names of varying numbers, and of slots that hold such ones, to which the call gave a value."""
    found = {
        place.names[position]
        for place, position, _, traced in restore
        if len(values := list(place.read())) > position and values[position] is not traced
    }
    return found | slots.stored(leaves[len(leaves) - len(slots.leaves) :])


def _restore(restore: list[tuple[GuardedPlace, int, Any, Any]], slots: StateSlots, leaves: Sequence[Any]) -> None:
    """Put plain numbers back where the tracked ones that stood for them still are."""
    for place, position, number, traced in restore:
        if list(place.read())[position] is traced and place.store is not None:
            place.store(position, number)
    slots.give_back(leaves[len(leaves) - len(slots.leaves) :])


class TrackedNumberSeen(Exception):
    """The call's Python distinguishes a tracked number from a plain one."""


class UnfitSlots(Exception):
    """Facts cannot distinguish what the slots hold."""


class _Reader:
    """The value of a free number now."""

    def __init__(self, place: GuardedPlace, position: int) -> None:
        self._read, self._position = place.read, position
        # The others among a dict's values need not be touched.
        self._table: dict[Any, Any] | None = place.of if place.keys and type(place.of) is dict else None
        self._key: Any = place.keys[position] if self._table is not None else None

    def __call__(self, leaves: Sequence[Any]) -> Any:
        if self._table is not None:
            return self._table[self._key]
        values = self._read()
        return values[self._position] if isinstance(values, (tuple, list)) else list(values)[self._position]


class _Argument:
    def __init__(self, leaf: int) -> None:
        self.leaf = leaf

    def __call__(self, leaves: Sequence[Any]) -> Any:
        return leaves[self.leaf]


def _free_places(
    reached: Reached, call: CallToCapture, slots: StateSlots
) -> list[tuple[str, GuardedPlace | None, int]]:
    found: list[tuple[str, GuardedPlace | None, int]] = []
    names = set(call.free)
    if call.free_learning_rates:
        groups = {id(group) for optimizer, _ in reached.optimizers for group in optimizer.param_groups}
        rates = {
            n for place in reached.places if id(place.owner) in groups for n in place.names if n.endswith("['lr']")
        }
        names |= rates - call.fixed
    for position, (name, leaf) in enumerate(zip(slots.names, slots.leaves, strict=True), len(call.passed.leaves)):
        if type(leaf) is float and (name in call.free or (call.free_learning_rates and name not in call.fixed)):
            found.append((name, None, position))
    for name in sorted(names):
        if name in call.leaf_names:
            position = call.leaf_names.index(name)
            if type(call.leaves[position]) in (int, float):
                found.append((name, None, position))
            continue
        stored = stored_in(reached.places, name)
        if stored is None or stored[0].store is None:
            continue
        place, position = stored
        if type(list(place.read())[position]) in (int, float):
            found.append((name, place, position))
    return found


def _known(
    recorder: Recorder, reached: Reached, call: CallToCapture, moving: Collection[int]
) -> tuple[dict[int, t.Memory], dict[int, t.Host], list[LazyStorage], dict[int, torch.Tensor]]:
    """Where the storages and host tensors that exist before the call come from."""
    memory: dict[int, t.Memory] = {}
    hosts: dict[int, t.Host] = {}
    keep: list[LazyStorage] = []
    holders: dict[int, torch.Tensor] = {}

    def enter(tensor: torch.Tensor, source: Callable[[LazyStorage], t.Memory], host: t.Host) -> None:
        if isinstance(tensor, LazyTensor):
            storage = tensor._storage_
        elif call.plain and is_dense(tensor) and type(tensor) in (torch.Tensor, torch.nn.Parameter):
            storage = recorder.storage_of_plain(tensor)
            hosts.setdefault(id(tensor), host)
        else:
            hosts.setdefault(id(tensor), host)
            return
        keep.append(storage)
        held = holders.get(id(storage))
        if held is None or held.numel() < tensor.numel():
            holders[id(storage)] = tensor
        memory.setdefault(id(storage), source(storage))

    for tensor, _ in reached.tensors.values():
        if id(tensor) not in moving:
            enter(tensor, t.FromState, t.HostKept(tensor))
    for tensor, _ in reached.tensors.values():
        if id(tensor) in moving:
            enter(tensor, lambda _, owner=tensor: t.FromData(owner), t.HostKept(tensor))  # type: ignore[misc]
        if tensor.is_leaf and tensor.grad is not None:
            part = part_of(tensor.grad)
            found = t.FromGradient(tensor, part is not tensor.grad)
            enter(part, lambda _, found=found: found, t.HostKept(part))  # type: ignore[misc]
    for position, leaf in enumerate(call.leaves):
        if isinstance(leaf, torch.Tensor):
            enter(leaf, lambda _, position=position: t.FromArgument(position), t.HostArgument(position))  # type: ignore[misc]
    return memory, hosts, keep, holders


def fixed_numbers(template: t.CallTemplate, coincidences: frozenset[Any]) -> frozenset[str]:
    """Free numbers whose values the call asked for, so that the template holds for one value of them.

    Not those that had the value of a constant by coincidence: elsewhere they may vary. Nor those that are only
    compared, or asked for a remainder (a place in a ring): there the template holds for all values that compare alike.
    """
    used = {
        place
        for expression, value in template.checks
        if type(value) is not bool and expression not in coincidences and not is_many_to_one(expression)
        for place in places_in(expression)
    }
    return frozenset(name for number, name in enumerate(template.free) if number in used)


__all__ = ["CallToCapture", "Captured", "capture_call", "fixed_numbers"]

"""One call captured whole: what it can read, what it does, what it gives back, and what it leaves behind.

Invariant: a template is made only where everything that outlives the call is accounted for: results, gradients, and
tensors that guarded places hold. Python state that changed in another way is a reason for having no template.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torchlazy.lazy import call_template as t
from torchlazy.lazy.call_arguments import Handed, Passed
from torchlazy.lazy.capture import END, Capture
from torchlazy.lazy.capture_joint import JointCall, gradient_edges, held_by_graph, is_freed, joint_run
from torchlazy.lazy.capture_reads import TensorReads
from torchlazy.lazy.capture_scalars import places_in
from torchlazy.lazy.capture_threads import given_free
from torchlazy.lazy.guard_walk import Place, Reached, walk
from torchlazy.lazy.guards import Guards, aliases_in, memories_of, stored_in
from torchlazy.lazy.mode import lazy_mode
from torchlazy.lazy.recorder import Recorder
from torchlazy.lazy.storage import LazyStorage
from torchlazy.lazy.tensor import LAZY, LazyTensor
from torchlazy.lazy.torch_private import flatten_tree, unflatten_tree
from torchlazy.lazy.traced_numbers import node_of

_ATOMS = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, type(...))


@dataclass(frozen=True, eq=False)
class Captured:
    """A call that ran. `template` is None where `refused` says why it cannot be replayed."""

    value: Any
    template: t.CallTemplate | None
    guards: Guards
    refused: str
    wrote_windows: bool  # it wrote to a copy of a window; the window has been written to as well
    coincidences: frozenset[Any]  # expressions fixed only because a constant had the same value
    aliases: tuple[int | None, ...]  # for each argument which memory of the state it is on


@dataclass(frozen=True, eq=False)
class Call:
    """What is called: the function, its arguments flat, and the names of numbers that may vary from call to call."""

    function: Callable[..., Any]
    passed: Passed
    leaf_names: tuple[str, ...]
    free: frozenset[str]
    fixed: frozenset[str]  # numbers whose values the program asked for
    free_learning_rates: bool
    plain: bool  # ordinary tensors are recorded, under lazy_mode
    fullgraph: bool
    double: bool  # gradients of gradients are asked for

    @property
    def leaves(self) -> tuple[Any, ...]:
        return self.passed.leaves

    @property
    def given(self) -> tuple[Any, ...]:
        return self.passed.given

    def leaves_lazy(self) -> list[torch.Tensor]:
        """The tensor arguments."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]


class WindowOnState(Exception):
    """An argument stands in for a window on memory that is part of the state too: it must be that window itself."""


def capture_call(recorder: Recorder, call: Call) -> Captured:
    """Run the call once, recorded."""
    recorder.cut("compiled call")
    named = [(name, leaf) for name, leaf in zip(call.leaf_names, call.leaves, strict=True)]
    reached = walk(call.function, [pair for pair in named if not isinstance(pair[1], torch.Tensor)])
    aliases = aliases_in(call.given, memories_of(reached))
    if any(at is not None and a is not b for at, a, b in zip(aliases, call.leaves, call.given, strict=True)):
        raise WindowOnState
    free = _free_places(reached, call)
    guards = Guards(reached, frozenset(name for name, _, _ in free))
    known, hosts, keep, holders = _known(recorder, reached, call)
    before = _values_of(reached)
    grads = {id(tensor): tensor.grad for tensor, _ in reached.tensors.values() if tensor.is_leaf}
    given_grads = {id(leaf): leaf.grad for leaf in call.leaves_lazy() if leaf.is_leaf and leaf.grad is not None}
    grads.update(given_grads)
    capture = Capture(recorder, known, hosts, fullgraph=call.fullgraph)
    capture.holders = holders
    leaves = list(call.leaves)
    restore: list[tuple[Place, int, Any, Any]] = []
    frames_were, recorder.keep_frames = recorder.keep_frames, True
    read_free: list[Callable[[Sequence[Any]], Any]] = []
    try:
        for name, place, position in free:
            if place is None:
                leaves[position] = capture.new_source(leaves[position])
                read_free.append(_Argument(position))
            else:
                number = list(place.read())[position]
                traced = capture.new_source(number)
                assert place.store is not None, name
                place.store(position, traced)
                restore.append((place, position, number, traced))
                read_free.append(_Reader(place, position))
        handed = Handed(call.passed, leaves)
        with ExitStack() as stack:
            if call.plain:
                stack.enter_context(lazy_mode())
                if recorder.target != "cpu":
                    stack.enter_context(given_free(recorder))
            stack.enter_context(capture)
            reads = stack.enter_context(TensorReads())
            edges = gradient_edges(call.leaves)
            value = call.function(*handed.args, **handed.kwargs)
            joint = joint_run(recorder, call, reached, capture, value, edges)
            if joint is None:
                recorder.cut(END)
    finally:
        recorder.keep_frames = frames_were
        for place, position, number, traced in restore:
            if list(place.read())[position] is traced and place.store is not None:
                place.store(position, number)
    if handed.settle():
        capture.refuse("it changes a list or a dictionary among its arguments")
    del handed
    found = _Outcome(recorder, call, reached, capture, value, before, grads, joint)
    del grads, given_grads
    results, spec = found.results()
    value = found.handed_out()
    effects = found.effects()
    del keep
    if not capture.refused:
        found.account(results)
    template = None
    if not reads.gradients and not capture.gradients_used and not any(e.name.endswith(".grad") for e in effects):
        guards.ignore_gradients()
    if not capture.refused:
        template = t.CallTemplate(
            steps=(*capture.steps, joint.step) if joint is not None else tuple(capture.steps),
            free=tuple(name for name, _, _ in free),
            read_free=tuple(read_free),
            sources=capture.sources,
            checks=tuple(capture.checks),
            results=tuple(results),
            spec=spec,
            effects=tuple(effects),
            versions=found.versions(),
            twins=tuple(tuple(group) for group in capture.twins.values() if len(group) > 1),
            places=capture.places,
            hosts=capture.hosts,
            operators=capture.operators,
        )
    return Captured(
        value, template, guards, capture.refused, found.write_windows(), frozenset(capture.coincidences), aliases
    )


class _Reader:
    """The value of a free number now."""

    def __init__(self, place: Place, position: int) -> None:
        self._read, self._position = place.read, position

    def __call__(self, leaves: Sequence[Any]) -> Any:
        values = self._read()
        return values[self._position] if isinstance(values, (tuple, list)) else list(values)[self._position]


class _Argument:
    def __init__(self, leaf: int) -> None:
        self._leaf = leaf

    def __call__(self, leaves: Sequence[Any]) -> Any:
        return leaves[self._leaf]


def _values_of(reached: Reached) -> dict[tuple[int, str], Any]:
    return {
        (id(place.owner), name): value
        for place in reached.places
        for name, value in zip(place.names, place.read(), strict=True)
    }


def _free_places(reached: Reached, call: Call) -> list[tuple[str, Place | None, int]]:
    found: list[tuple[str, Place | None, int]] = []
    names = set(call.free)
    if call.free_learning_rates:
        groups = {id(group) for optimizer, _ in reached.optimizers for group in optimizer.param_groups}
        rates = {
            n for place in reached.places if id(place.owner) in groups for n in place.names if n.endswith("['lr']")
        }
        names |= rates - call.fixed
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
    recorder: Recorder, reached: Reached, call: Call
) -> tuple[dict[int, t.Memory], dict[int, t.Host], list[LazyStorage], dict[int, torch.Tensor]]:
    """Where the storages and host tensors that exist before the call come from."""
    memory: dict[int, t.Memory] = {}
    hosts: dict[int, t.Host] = {}
    keep: list[LazyStorage] = []
    holders: dict[int, torch.Tensor] = {}

    def enter(tensor: torch.Tensor, source: Callable[[LazyStorage], t.Memory], host: t.Host) -> None:
        if isinstance(tensor, LazyTensor):
            storage = tensor._storage_
        elif call.plain and tensor.layout is torch.strided and type(tensor) in (torch.Tensor, torch.nn.Parameter):
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
        enter(tensor, t.FromState, t.HostKept(tensor))
        if tensor.grad is not None and tensor.is_leaf:
            enter(tensor.grad, lambda _, owner=tensor: t.FromGradient(owner), t.HostKept(tensor.grad))  # type: ignore[misc]
    for position, leaf in enumerate(call.leaves):
        if isinstance(leaf, torch.Tensor):
            enter(leaf, lambda _, position=position: t.FromArgument(position), t.HostArgument(position))  # type: ignore[misc]
    return memory, hosts, keep, holders


class _Outcome:
    """What a call gave back and left behind."""

    def __init__(
        self,
        recorder: Recorder,
        call: Call,
        reached: Reached,
        capture: Capture,
        value: Any,
        before: dict[tuple[int, str], Any],
        grads: dict[int, torch.Tensor | None],
        joint: JointCall | None,
    ) -> None:
        self._joint = joint
        self.recorder, self.call, self.reached, self.capture = recorder, call, reached, capture
        self._before, self._grads = before, grads
        self.flat, self.spec = flatten_tree(value)
        self._accounted: set[int] = set()

    def results(self) -> tuple[list[t.Result], Any]:
        return [self._result(leaf) for leaf in self.flat], self.spec

    def _result(self, leaf: Any) -> t.Result:
        for position, given in enumerate(self.call.leaves):
            if leaf is given and isinstance(leaf, torch.Tensor):
                return t.SameArgument(position)
        node = node_of(leaf)
        if node is not None:
            return t.NumberResult(node.expression)
        if isinstance(leaf, torch.Tensor):
            if id(leaf) in self.reached.tensors:
                return t.SameObject(leaf)
            if self._joint is not None and id(leaf) in self._joint.numbers:
                return t.JointResult(self._joint.numbers[id(leaf)])
            if isinstance(leaf, LazyTensor):
                return self._lazy(leaf, "a result")
            host = self.capture.host_of(leaf)
            if host is None or leaf.requires_grad:
                self.capture.refuse("it returns an ordinary tensor that its operators did not make")
                host = t.HostKept(leaf)
            return t.HostResult(host)
        if not isinstance(leaf, _ATOMS) and not any(leaf is kept for kept in self.reached.keep):
            self.capture.refuse(f"it returns an object of type {type(leaf).__name__}")
        return t.SameObject(leaf)

    def _lazy(self, tensor: LazyTensor, what: str) -> t.TensorResult:
        memory = self.capture.memory_of(tensor._storage_)
        if memory is None:
            self.capture.refuse(f"{what} is a tensor that the call did not make")
            memory = t.FromStep(0)
        self._accounted.add(id(tensor._storage_))
        requires_grad = tensor.requires_grad
        freed = False
        if tensor.grad_fn is not None:
            freed = is_freed(tensor.grad_fn)
            if not freed:
                self.capture.refuse(f"{what} needs a gradient")
            self._accounted |= {id(held._storage_) for held in held_by_graph(tensor.grad_fn)}
        return t.TensorResult(memory, tensor._geometry, requires_grad, freed)

    def handed_out(self) -> Any:
        """The call's value for its caller: numbers are plain ones; ordinary programs get ordinary tensors."""
        originals = {id(leaf): given for leaf, given in zip(self.call.leaves, self.call.given, strict=True)}
        leaves = [originals.get(id(leaf), self._plainly(leaf)) for leaf in self.flat]
        return unflatten_tree(leaves, self.spec)

    def _plainly(self, leaf: Any) -> Any:
        node = node_of(leaf)
        if node is not None:
            return node.value
        if isinstance(leaf, LazyTensor) and leaf._geometry.device != LAZY and leaf.grad_fn is None:
            real = self.recorder.real(leaf, "result of a compiled call")
            return real.requires_grad_() if leaf.requires_grad else real
        return leaf

    def write_windows(self) -> bool:
        """Bring what the call wrote to copies of windows into the windows; whether there was any."""
        found = False
        for leaf, given in zip(self.call.leaves, self.call.given, strict=True):
            if leaf is not given and leaf._version:  # it was new when the call began
                given.copy_(leaf)
                found = True
        return found

    def effects(self) -> list[t.Effect]:
        """What the call left in places that are guarded."""
        call, found = self.call, []
        named = [
            pair for pair in zip(call.leaf_names, call.leaves, strict=True) if not isinstance(pair[1], torch.Tensor)
        ]
        after = walk(call.function, named)
        left = set(self._before)
        for place in after.places:
            left.difference_update((id(place.owner), name) for name in place.names)
            for position, (name, value) in enumerate(zip(place.names, place.read(), strict=True)):
                key = (id(place.owner), name)
                if key not in self._before:
                    self.capture.refuse(f"it makes new state: {name}")
                    continue
                was = self._before[key]
                if value is was or (type(value) in _ATOMS and type(value) is type(was) and value == was):
                    continue
                if isinstance(value, LazyTensor) and place.store is not None and self._joint is None:
                    result = self._lazy(value, name)
                    found.append(t.Effect(name, _Store(place, position), result))
                else:
                    self.capture.refuse(f"it changes {name}: {_short(was)} -> {_short(value)}")
        if left:
            self.capture.refuse(f"it removes state: {min(name for _, name in left)}")
        for (_, names), (_, now) in zip(self.reached.views, after.views, strict=False):
            if names != now:
                self.capture.refuse("it changes the parameters, buffers or modules of a module")
        found += self._gradients()
        return found

    def _gradients(self) -> list[t.Effect]:
        found = []
        for tensor, name in self.reached.tensors.values():
            if not (tensor.is_leaf and tensor.requires_grad):
                continue
            before, after = self._grads.get(id(tensor)), tensor.grad
            if after is before:
                continue
            result = None
            if isinstance(after, LazyTensor):
                result = self._lazy(after, f"{name}.grad")
            elif after is not None:
                self.capture.refuse(f"{name}.grad is an ordinary tensor")
            found.append(t.Effect(f"{name}.grad", _SetGrad(tensor), result))
        for position, leaf in enumerate(self.call.leaves):
            if isinstance(leaf, torch.Tensor) and leaf.is_leaf and leaf.requires_grad:
                after = leaf.grad
                if after is self._grads.get(id(leaf)) or id(leaf) in self.reached.tensors:
                    continue
                if id(leaf) in self._grads or not isinstance(after, LazyTensor):  # it had another one before
                    self.capture.refuse(f"it changes the gradient of argument {position}")
                    continue
                name = f"argument {position}.grad"
                found.append(t.Effect(name, t.ArgumentGradient(position), self._lazy(after, name)))
        return found

    def account(self, results: Sequence[t.Result]) -> None:
        """Refuse where memory that the call made is still alive and nothing known holds it."""
        for storages in (self._unaccounted, self._after_collection):
            if not storages():
                return
        self.capture.refuse("a tensor that it made outlives it, held by something that guards do not see")

    def _unaccounted(self) -> bool:
        known = self._accounted | set(self.capture.known_before)
        return any((storage := ref()) is not None and id(storage) not in known for ref in self.capture.outputs)

    def _after_collection(self) -> bool:
        gc.collect()
        return self._unaccounted()

    def versions(self) -> tuple[torch.Tensor, ...]:
        written = {
            id(target.storage)
            for step in self.capture.steps
            if isinstance(step, t.Segment)
            for target in step.targets
            if isinstance(target, t.FromState)
        }
        return tuple(
            tensor
            for tensor, _ in self.reached.tensors.values()
            if isinstance(tensor, LazyTensor) and id(tensor._storage_) in written and not tensor.is_inference()
        )


class _Store:
    def __init__(self, place: Place, position: int) -> None:
        self._place, self._position = place, position

    def __call__(self, value: Any) -> None:
        assert self._place.store is not None
        self._place.store(self._position, value)


class _SetGrad:
    def __init__(self, owner: torch.Tensor) -> None:
        self._owner = owner

    def __call__(self, value: Any) -> None:
        self._owner.grad = value


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, _ATOMS) else f"a {type(value).__name__}"
    return text if len(text) < 60 else text[:57] + "..."


def fixed_numbers(template: t.CallTemplate, coincidences: frozenset[Any]) -> frozenset[str]:
    """Free numbers whose values the call asked for, so that the template holds for one value of them.

    Not those that had the value of a constant by coincidence: elsewhere they may vary. Nor those that are only
    compared: there the template holds for all values that compare alike.
    """
    used = {
        place
        for expression, value in template.checks
        if type(value) is not bool and expression not in coincidences
        for place in places_in(expression)
    }
    return frozenset(name for number, name in enumerate(template.free) if number in used)


__all__ = ["Call", "Captured", "capture_call", "fixed_numbers"]

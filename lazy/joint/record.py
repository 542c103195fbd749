"""Records a joint graph: torch's own autograd engine runs over a recorded forward, and its operators are recorded too.

`record_joint` is called when a function has run under the recorder, with gradients on and nothing cut. It runs
`torch.autograd.grad` with lazy tangents that have no memory, splits forward and backward at what the split of
`autograd/joint.py` saves, and leaves the recorder as it found it: the forward is pending, its autograd graph intact.

A function of `x` and `y` has a gradient by each, even where `y` is computed from `x`. torch's engine sees one graph:
asked for both at once, what reaches `y` flows on to `x`, and is counted twice once the function's own gradients are
sent back. `as_independent_variables` stops it there: each is a variable of its own.

Invariant: a joint depends on structure alone, it holds no memory. Where the backward cannot be recorded (it reads a
value on the host, its operators need memory, the trace is cut) `CannotRecordJoint` is raised and nothing has run.
Inside `as_independent_variables`, no gradient flows from one of the tensors into what it was computed from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torchlazy.lazy.config import config
from torchlazy.lazy.device import checkpointing
from torchlazy.lazy.joint.apart import freed_apart
from torchlazy.lazy.joint.inner_backward import (
    gradients_of,
    keep_versions,
    nodes_from,
    retain_graphs,
    without_gradients,
)
from torchlazy.lazy.plan.joint import CannotRecordJoint, ForwardResult, Joint, Output, RecordedJoint, Update, dense
from torchlazy.lazy.plan.split_joint import Recording, Section, Value, build_double, build_joint
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.record.tensor import LazyTensor, wrap
from torchlazy.lazy.torch_private.saved import unseen_by_hooks
from torchlazy.lazy.trace.geometry import Geometry
from torchlazy.lazy.trace.storage import storage_of
from torchlazy.lazy.trace.trace import CutTrace, Slot


@contextlib.contextmanager
def as_independent_variables(wanted: Sequence[Any]) -> Iterator[None]:
    """`wanted`: tensors or gradient edges. CannotRecordJoint where Python code stands between two of them: it would run
    without a gradient."""
    edges = [torch.autograd.graph.get_gradient_edge(w) if isinstance(w, torch.Tensor) else w for w in wanted]
    dependent = _dependent(edges)
    hooks = [edge.node.register_prehook(_without(edge.output_nr)) for edge in dependent]
    try:
        yield
    except CannotRecordJoint:
        raise
    except Exception as error:  # a hook between the two got no gradient
        if dependent:
            raise CannotRecordJoint(f"one input is computed from another, with code between them: {error}") from error
        raise
    finally:
        for hook in hooks:
            hook.remove()


def _without(number: int) -> Any:
    """A hook that stops the gradient of one output of a node."""
    return lambda gradients: tuple(None if i == number else g for i, g in enumerate(gradients))


def _is_of_a_user(node: Any) -> bool:
    """Whether the node runs the user's code: the backward of an earlier compiled call runs nothing where no
    gradient reaches it."""
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return False
    made_by = getattr(type(node), "_forward_cls", None)
    return made_by is None or not made_by.__module__.startswith("torchlazy.")


def _dependent(edges: Sequence[Any]) -> list[Any]:
    """The edges from which others are reached."""
    inner = [edge for edge in edges if edge.node.next_functions]
    if not inner or len(edges) < 2:
        return []
    nodes = {edge.node for edge in edges}
    found = []
    for edge in inner:
        seen: set[Any] = set()
        stack = [following for following, _ in edge.node.next_functions]
        reaches = False
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            reaches = reaches or node in nodes
            stack.extend(following for following, _ in node.next_functions)
        if not reaches:
            continue
        if any(map(_is_of_a_user, (*seen, edge.node))):
            raise CannotRecordJoint("one input is computed from another by an autograd.Function")
        found.append(edge)
    return found


Wanted = Any
"""A LazyTensor, or a `torch.autograd.graph.GradientEdge`: what a gradient is wanted for."""


def record_joint(
    recorder: Recorder,
    outputs: Sequence[LazyTensor],
    wanted: Sequence[Wanted],
    *,
    arguments: Sequence[torch.Tensor] = (),
    budget: float | int | None = None,
    orders: int = 1,
    epoch: int | None = None,
    made: Collection[int] = (),
    known: Collection[int] | None = None,
) -> RecordedJoint:
    """The joint of what is recorded: `outputs` of it, and their gradients by `wanted`.

    `outputs`: every tensor that the function returned or leaves behind, and every argument that it changed in place
    under autograd. `wanted`: tensors or gradient edges; take the edge of an argument that is changed in place before
    the function runs. `arguments`: tensors whose own hooks wait for the real gradient (those of leaves in `wanted` do
    in any case). `budget` as for `split_joint`; None stands for `config.memory_budget`. `orders`: 2 records gradients
    of gradients too, 3 theirs, and so on. `epoch`: the recorder's when the function began, so that a cut within the
    function is noticed. `made`: storages, by identity, that cuts before this trace have computed of the same function.
    `known`: the caller's own tensors, by identity: an output on an input's memory that is none of them, nor a view of
    one, is a detached alias. None: there are no such aliases.

    Gradients come dense, in memory of their own, where eager's may be views of larger ones.
    """
    with recorder.lock:
        if epoch is not None and epoch != recorder.epoch:
            raise CannotRecordJoint("the forward was cut")
        before = _RecorderMark(recorder, outputs)
        plan = _plan_results(recorder, outputs, wanted, before, made, known)
        sections = [_section(recorder)]
        tangents = [_tangent(recorder, geom) for geom in plan.tangents]
        first = [t._slot for t in tangents]
    grads: Sequence[torch.Tensor | None] = [None] * len(wanted)
    deeper: list[_Deeper] = []
    try:
        if tangents and wanted:
            with (
                _nothing_runs(recorder),
                _no_modes(),
                unseen_by_hooks(),
                _without_hooks((*wanted, *arguments)),
                keep_versions(plan.differentiable),
                as_independent_variables(wanted),
            ):
                for tangent in tangents if orders > 1 else ():
                    tangent.requires_grad_()
                grads = _gradients(plan.differentiable, wanted, tangents, create_graph=orders > 1)
                deeper = _record_deeper(recorder, grads, [*wanted, *tangents], orders - 1)
        with recorder.lock:
            wish = config.memory_budget if budget is None else budget
            return _build(recorder, before, plan, sections[0], first, grads, deeper, wish)
    finally:
        with recorder.lock:
            before.restore(recorder)


def _build(
    recorder: Recorder,
    before: _RecorderMark,
    plan: _Results,
    forward: Section,
    tangents: list[Slot],
    grads: Sequence[torch.Tensor | None],
    deeper: Sequence[_Deeper],
    budget: float | int | None,
) -> RecordedJoint:
    slots = tuple(None if g is None else _slot_of_gradient(recorder, g) for g in grads)
    levels = [tuple(None if g is None else _slot_of_gradient(recorder, g) for g in level.grads) for level in deeper]
    late = tuple(_late_writes(recorder, before))
    trace = CutTrace(
        tuple(recorder.entries), tuple(recorder.geometries),
        tuple((number, storage.base) for number, storage in recorder.inputs),
        tuple(type(value) for value in recorder.scalars), (), (), tuple(recorder.frames),
    )  # fmt: skip
    changed = (*(number for _, _, number in plan.writes), *(u.input for u in plan.updates))
    recording = Recording(
        trace, tuple(recorder.scalars), forward, plan.slots, plan.results, plan.writes, changed, tuple(tangents), slots,
        late, *_later(levels, deeper),
    )  # fmt: skip
    if not deeper and recorder.capture is not None:
        recording = replace(recording, given=recorder.capture.scalars_followed(forward.scalars))
    built = build_joint(recording, plan.outputs, plan.updates, budget)
    joint: Joint = replace(built.joint, inner=plan.inner)
    if deeper:
        if late:
            raise CannotRecordJoint("gradients of gradients of a backward that writes in place")
        inner = [
            Recording(
                trace, recording.scalars, level.section, (), level.results, (), (), tuple(level.tangents), levels[i],
                (), *_later(levels[i + 1 :], deeper[i + 1 :]),
            )
            for i, level in enumerate(deeper)
        ]  # fmt: skip
        joint = replace(joint, double=build_double(recording, built, inner, budget))
    storages = tuple(recorder.inputs[i][1] for i in built.inputs)
    return RecordedJoint(
        joint,
        storages,
        tuple(recorder.scalars[: forward.scalars]),
        recording.given,
        tuple(recorder.scalars[n] for n in recording.given),
    )


@dataclass(frozen=True)
class _Deeper:
    """The backward of a backward, in the same trace."""

    section: Section
    results: tuple[ForwardResult, ...]
    tangents: list[Slot]
    grads: Sequence[torch.Tensor | None]


def _later(
    levels: Sequence[tuple[Value | None, ...]], deeper: Sequence[_Deeper]
) -> tuple[tuple[Value, ...], tuple[Slot, ...]]:
    """What deeper levels compute, and their tangents."""
    values = tuple(found for level in levels for found in level if found is not None)
    return values, tuple(tangent for level in deeper for tangent in level.tangents)


def _record_deeper(
    recorder: Recorder, grads: Sequence[torch.Tensor | None], targets: Sequence[Wanted], levels: int
) -> list[_Deeper]:
    """The gradients of the gradients, by what the first ones were wanted of and by their tangents: `targets`. Then
    those of these, by the same and by the tangents of the first ones; and so on."""
    recorded: list[_Deeper] = []
    for remaining in range(levels - 1, -1, -1):
        found = [g for g in grads if g is not None]
        with recorder.lock:
            values = [_slot_of_gradient(recorder, g) for g in found]
            section = _section(recorder)
            results: list[ForwardResult] = []
            tangents: list[LazyTensor] = []
            for i, (gradient, (_, geom)) in enumerate(zip(found, values, strict=True)):
                results.append(ForwardResult(i, geom, len(tangents) if gradient.requires_grad else None))
                if gradient.requires_grad:
                    tangents.append(_tangent(recorder, dense(geom)))
            slots = [t._slot for t in tangents]
            results = _with_freed(results, [g for g in found if g.requires_grad], _nodes_of_wanted(targets))
        for tangent in tangents if remaining else ():
            tangent.requires_grad_()
        deeper: Sequence[torch.Tensor | None] = [None] * len(targets)
        if tangents:
            differentiable = [g for g in found if g.requires_grad]
            deeper = _gradients(differentiable, targets, tangents, create_graph=remaining > 0)
        recorded.append(_Deeper(section, tuple(results), slots, deeper))
        if not tangents:
            break
        targets, grads = [*targets, *tangents], deeper
    return recorded


def _section(recorder: Recorder) -> Section:
    return Section(len(recorder.entries), len(recorder.geometries), len(recorder.inputs), len(recorder.scalars))


# --- the recorder's state ---


class _RecorderMark:
    """The running trace as it stands, so that what is recorded from here on can be taken back."""

    def __init__(self, recorder: Recorder, outputs: Sequence[LazyTensor]) -> None:
        for tensor in outputs:
            recorder.read(tensor)
        self.entries, self.geometries = len(recorder.entries), len(recorder.geometries)
        self.inputs, self.scalars = len(recorder.inputs), len(recorder.scalars)
        self.frames, self.written = len(recorder.frames), len(recorder._written)
        self.numbers = dict(recorder._scalar_numbers)
        held = [ref() for ref in recorder._written] + [storage for _, storage in recorder.inputs]
        self.states = {
            id(s): (s, s.slot, s.dirty, s.version) for s in held if s is not None and s.epoch == recorder.epoch
        }
        self.input_numbers = {id(storage): i for i, (_, storage) in enumerate(recorder.inputs)}

    def restore(self, recorder: Recorder) -> None:
        """Forget what was recorded since. Tensors that were read since are read anew: their slots no longer exist."""
        for _, storage in recorder.inputs[self.inputs :]:
            storage.epoch, storage.slot, storage.dirty = -1, None, False
        for ref in recorder._written[self.written :]:
            found = ref()
            if found is not None and id(found) not in self.states:
                if found.epoch == recorder.epoch and found.real is None:
                    found.poison = CannotRecordJoint("this value belongs to a backward that was only recorded")
                found.epoch, found.slot, found.dirty = -1, None, False
        for name in ("entries", "geometries", "inputs", "scalars", "frames"):
            del getattr(recorder, name)[getattr(self, name) :]
        del recorder.input_memory[self.inputs :]
        del recorder._written[self.written :]
        recorder._scalar_numbers = self.numbers
        recorder.path = None
        recorder.epoch += 1
        for storage, number, dirty, version in self.states.values():
            storage.epoch, storage.slot, storage.dirty = recorder.epoch, number, dirty
            storage.version = max(version, storage.version)


@contextlib.contextmanager
def _nothing_runs(recorder: Recorder) -> Iterator[None]:
    """Inside, a cut or an operator that needs memory raises instead."""
    before = {name: getattr(recorder, name) for name in ("on_cut", "on_eager", "on_draw", "on_host_write")}

    def refuse_cut(cause: str, frame: str, entries: int) -> None:
        raise CannotRecordJoint(f"the backward needs a value: {cause}" + (f" at {frame}" if frame else ""))

    def refuse_eager(op: torch._ops.OpOverload, reason: str) -> None:
        raise CannotRecordJoint(f"the backward calls {op}, which cannot be recorded: {reason}")

    def refuse_draw(op: torch._ops.OpOverload) -> None:
        raise CannotRecordJoint(f"the backward calls {op}, which draws its numbers at once")

    def refuse_write(op: torch._ops.OpOverload) -> None:
        raise CannotRecordJoint(f"the backward calls {op} on ordinary tensors, which writes at once")

    recorder.on_cut, recorder.on_eager = refuse_cut, refuse_eager  # type: ignore[method-assign,assignment]
    recorder.on_draw, recorder.on_host_write = refuse_draw, refuse_write  # type: ignore[method-assign]
    try:
        with checkpointing.entered_once_more(), retain_graphs():
            yield
    finally:
        for name, hook in before.items():
            setattr(recorder, name, hook)


@contextlib.contextmanager
def _no_modes() -> Iterator[None]:
    """A backward is called outside autocast; regions that bring their own state (checkpoint) set it themselves. Anomaly
    detection is off: there are no values to check yet."""
    with contextlib.ExitStack() as stack:
        if torch.is_anomaly_enabled():
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
        for device in ("lazy", "cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextlib.contextmanager
def _without_hooks(wanted: Sequence[Wanted]) -> Iterator[None]:
    """Hooks on the inputs themselves run when the real gradient reaches them, not here."""
    taken = []
    for found in wanted:
        tensor = found if isinstance(found, torch.Tensor) else _leaf_of(found)
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = getattr(tensor, name, None)
            if hooks:
                taken.append((hooks, dict(hooks)))
                hooks.clear()
    try:
        yield
    finally:
        for hooks, held in taken:
            hooks.update(held)


def _leaf_of(wanted: Wanted) -> torch.Tensor | None:
    """The leaf that the gradient is wanted of, if it is one."""
    if isinstance(wanted, torch.Tensor):
        return wanted if wanted.is_leaf else None
    return getattr(wanted.node, "variable", None)


def _gradients(
    outputs: Sequence[torch.Tensor],
    wanted: Sequence[Wanted],
    tangents: Sequence[torch.Tensor],
    *,
    create_graph: bool = False,
) -> Sequence[torch.Tensor | None]:
    """The gradients by `wanted`, from torch's engine."""
    leaves = [leaf for leaf in map(_leaf_of, wanted) if leaf is not None]
    if not _has_reentrant_checkpoint(outputs):
        with without_gradients(leaves):
            found = torch.autograd.grad(
                list(outputs),
                list(wanted),
                list(tangents),
                retain_graph=True,
                create_graph=create_graph,
                allow_unused=True,
            )
            added = gradients_of([_leaf_of(one) for one in wanted])  # by a backward within the backward
            return [g if a is None else a if g is None else g + a for g, a in zip(found, added, strict=True)]
    # Such a region refuses `autograd.grad`: gradients are accumulated in the leaves, whose own are restored afterwards.
    if len(leaves) != len(wanted):
        raise CannotRecordJoint("checkpoint(use_reentrant=True) with inputs that are results of other operators")
    with without_gradients(leaves):
        torch.autograd.backward(list(outputs), list(tangents), retain_graph=True, create_graph=create_graph)
        return gradients_of(leaves)


def _has_reentrant_checkpoint(outputs: Sequence[torch.Tensor]) -> bool:
    return any(type(node).__name__ == "CheckpointFunctionBackward" for t in outputs for node in nodes_from(t.grad_fn))


def _tangent(recorder: Recorder, geom: Geometry) -> LazyTensor:
    """An input of the trace without memory."""
    storage = storage_of(geom)
    storage.slot, storage.epoch = recorder._new_slot(geom), recorder.epoch
    storage.poison = CannotRecordJoint("the backward reads a gradient on the host")
    recorder.inputs.append((storage.slot, storage))
    recorder.input_memory.append(None)  # type: ignore[arg-type]  # nothing runs before the trace is restored
    return wrap(storage, geom, storage.slot, recorder.epoch)


def _slot_of_gradient(recorder: Recorder, gradient: torch.Tensor) -> Value:
    if not isinstance(gradient, LazyTensor):
        raise CannotRecordJoint(f"a gradient is a {type(gradient).__name__} on {gradient.device}, not a lazy tensor")
    return recorder.read(gradient), dense(gradient._geometry)


# --- results, and what the outputs are of them ---


@dataclass(frozen=True)
class _Results:
    slots: tuple[Value, ...]
    results: tuple[ForwardResult, ...]
    outputs: tuple[Output, ...]
    updates: tuple[Update, ...]
    writes: tuple[tuple[Slot, Geometry, int], ...]  # the value, and the input whose memory it takes
    differentiable: list[torch.Tensor]
    tangents: tuple[Geometry, ...]
    inner: tuple[tuple[int, tuple[int, ...]], ...]


def _is_known(tensor: torch.Tensor, wanted: Sequence[Wanted]) -> bool:
    """Whether a tensor over an input's memory is a view, or one of the inputs itself."""
    if tensor._is_view():
        return True
    return any(found is tensor or getattr(found, "node", None) is tensor.grad_fn for found in wanted)


def _is_detached(tensor: LazyTensor, known: Collection[int]) -> bool:
    """Whether a tensor over an input's memory is an alias that autograd does not know as one of the input."""
    base = tensor._base if tensor._is_view() else None
    if id(tensor if base is None else base) in known:
        return False
    if base is not None or tensor._geometry.numel != tensor._storage_.base.numel:
        raise CannotRecordJoint("an output is a part of an input that the function changes by a detached alias")
    return True


def _is_of_unchanged(tensor: LazyTensor, known: Collection[Any]) -> bool:
    """Whether the tensor is a view of one whose history is that of an input: what wrote to their memory did so outside
    autograd."""
    base = tensor._base if tensor._is_view() else None
    return base is not None and (base.is_leaf or base.grad_fn in known)


def _refuse_own_rules(tensor: LazyTensor, known: Collection[Any]) -> None:
    """A view of a tensor of `known` nodes is made again by `as_strided`: hooks on it, and user functions that made it,
    would be left out of its gradient."""
    if not tensor.requires_grad or tensor.grad_fn in known:
        return
    if tensor._backward_hooks:
        raise CannotRecordJoint("an output is a view with hooks")
    node = tensor.grad_fn
    while node is not None and node not in known:
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            raise CannotRecordJoint(f"an output is a view that {type(node).__name__.removesuffix('Backward')} gave")
        following = [found for found, _ in node.next_functions if found is not None]
        node = following[0] if len(following) == 1 else None


def _plan_results(
    recorder: Recorder,
    outputs: Sequence[LazyTensor],
    wanted: Sequence[Wanted],
    before: _RecorderMark,
    computed: Collection[int],
    known: Collection[int] | None,
) -> _Results:
    slots: list[Value] = []
    results: list[ForwardResult] = []
    described: list[Output] = []
    updates: list[Update] = []
    differentiable: list[torch.Tensor] = []
    tangents: list[Geometry] = []
    of_storage: dict[int, list[LazyTensor]] = {}
    for tensor in outputs:
        of_storage.setdefault(id(tensor._storage_), []).append(tensor)
    nodes = _nodes_of_wanted(wanted)
    number_of: dict[int, int] = {}
    updated: dict[int, None] = {}

    def result(value: Slot, geom: Geometry, source: LazyTensor) -> int:
        tangent = None
        if source.requires_grad and not source.is_leaf:  # nothing is behind a leaf: whoever has it makes it one again
            tangent = len(tangents)
            tangents.append(dense(geom))
            differentiable.append(source)
        results.append(ForwardResult(len(slots), geom, tangent))
        slots.append((value, geom))
        return len(results) - 1

    for tensor in outputs:
        storage, geom = tensor._storage_, tensor._geometry
        number = None if id(storage) in computed else before.input_numbers.get(id(storage))
        base = storage.base.dtype
        is_part = geom.dtype != base  # of complex numbers
        if is_part and (number is not None or not base.is_complex or base.to_real() != geom.dtype):
            raise CannotRecordJoint("an output is a view of a tensor in another dtype")
        if number is not None and not storage.dirty and tensor.grad_fn is not None and not _is_known(tensor, wanted):
            raise CannotRecordJoint("an output was computed at once, by an operator that is not recorded")
        if number is not None:
            under_autograd = tensor.requires_grad and tensor.grad_fn is not None and not _is_of_unchanged(tensor, nodes)
            if storage.dirty and under_autograd:
                if geom.bits:
                    raise CannotRecordJoint("an output is a conjugated view of an input that the function changes")
                if len(of_storage[id(storage)]) > 1:
                    raise CannotRecordJoint("two outputs are views of one input that the function changes")
                detached = known is not None and _is_detached(tensor, known)
                updates.append(Update(number, result(recorder.read(tensor), dense(geom), tensor), geom, detached))
                updated[number] = None
            else:
                _refuse_own_rules(tensor, nodes)
            is_whole = geom is storage.base
            described.append(Output("input", number, geom, is_whole, tensor.requires_grad))
            continue
        if id(storage) not in number_of:
            group = of_storage[id(storage)]
            of = tensor._base if tensor._is_view() else None
            if tensor.requires_grad and not tensor.is_leaf and of is not None and of.is_leaf:
                raise CannotRecordJoint("an output is a view of a leaf that the function makes")
            is_compact = not is_part and len(group) == 1 and dense(geom) is geom and geom.span == storage.base.span
            if is_compact:
                number_of[id(storage)] = result(recorder.read(tensor), geom, tensor)
            else:
                number_of[id(storage)] = result(recorder.base_slot(storage), storage.base, _base_of(group))
        index = number_of[id(storage)]
        described.append(Output("result", index, geom, results[index].geometry is geom, tensor.requires_grad))
    writes = tuple(
        (storage.slot, storage.base, number)
        for number, (_, storage) in enumerate(recorder.inputs)
        if storage.dirty and number not in updated and storage.slot is not None and id(storage) not in computed
    )
    numbers = [i for i, found in enumerate(results) if found.tangent is not None]
    return _Results(
        tuple(slots), tuple(_with_freed(results, differentiable, nodes)), tuple(described), tuple(updates), writes,
        differentiable, tuple(tangents), tuple(_inner(dict(zip(numbers, differentiable, strict=True)))),
    )  # fmt: skip


def _nodes_of_wanted(wanted: Sequence[Wanted]) -> set[Any]:
    return {found.grad_fn if isinstance(found, torch.Tensor) else found.node for found in wanted}


def _with_freed(
    results: list[ForwardResult], differentiable: Sequence[torch.Tensor], ends: Collection[Any]
) -> list[ForwardResult]:
    freed = freed_apart(differentiable, ends)
    if freed is None:
        return results
    return [r if r.tangent is None else replace(r, freed=freed[r.tangent]) for r in results]


def _inner(results: dict[int, torch.Tensor]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The results, by number, whose gradient others' pass through, with the numbers of these."""
    if len(results) < 2:
        return
    above = {number: nodes_from(tensor.grad_fn) for number, tensor in results.items()}
    for number, tensor in results.items():
        users = tuple(other for other, nodes in above.items() if other != number and tensor.grad_fn in nodes)
        if users:
            yield number, users


def _base_of(group: list[LazyTensor]) -> LazyTensor:
    """The tensor whose gradient stands for those of all outputs over one new storage."""
    tracked = [t for t in group if t.requires_grad]
    if not tracked:
        return group[0]
    bases = {id(b): b for b in (t._base if t._base is not None else t for t in tracked)}
    base = next(iter(bases.values()))
    for tensor in tracked:
        _refuse_own_rules(tensor, {base.grad_fn})
    if len(bases) > 1 or not isinstance(base, LazyTensor) or base._geometry is not base._storage_.base:
        raise CannotRecordJoint("outputs share memory, but not as views of one tensor")
    return base


def _late_writes(recorder: Recorder, before: _RecorderMark) -> Iterator[tuple[Slot, Geometry, int]]:
    """What the backward wrote to storages that are there after it: inputs take their new value, others raise."""
    for number, (_, storage) in enumerate(recorder.inputs):
        known = before.states.get(id(storage))
        if storage.dirty and storage.slot is not None and (known is None or known[1] is not storage.slot):
            yield storage.slot, storage.base, number
    numbers = {id(storage) for _, storage in recorder.inputs}
    for storage, number_before, _, _ in before.states.values():
        if id(storage) not in numbers and storage.slot is not number_before:
            raise CannotRecordJoint("the backward writes to a value of the forward in place")


__all__ = ["CannotRecordJoint", "record_joint"]

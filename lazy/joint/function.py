"""Runs a joint: an autograd Function whose forward and backward are the two programs of the joint.

`run_joint` takes real tensors in the order of the joint's inputs, runs the forward program at once, and returns what
the recorded function returned. Only what the split chose is held for the backward; torch's saved tensors hold it, so
that a backward after an in-place change, or a second one without `retain_graph`, raises as in eager. `JointHandles`
keep the programs from call to call without a lookup.

A joint's backward is a program for one tangent. For a batch of tangents (`torch.autograd.grad(...,
is_grads_batched=True)`, or `vmap`) it runs once for each, and the gradients are stacked.

Invariant: results are those of a cut of the same trace, batched as the tangents were, at the same level. Programs run
through the recorder's driver, with nothing pending: what was recorded before has run before.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchlazy.lazy.config import config
from torchlazy.lazy.device.outside_mode import outside_lazy_mode
from torchlazy.lazy.joint.apart import Kept
from torchlazy.lazy.joint.graphs import JointGraphs
from torchlazy.lazy.native.device import DEVICE
from torchlazy.lazy.plan.joint import Joint, Output, ScalarSource, Source
from torchlazy.lazy.record.lent_memory import is_pinned
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.record.tensor import LAZY, LazyTensor
from torchlazy.lazy.run.foreign_backend import ForeignProgram, compile_with
from torchlazy.lazy.torch_private.dispatch import below_autograd
from torchlazy.lazy.torch_private.patches import exclude_from_dynamo
from torchlazy.lazy.torch_private.settings import draw_seed
from torchlazy.lazy.trace.geometry import Geometry, show_bits
from torchlazy.lazy.trace.storage import LazyStorage
from torchlazy.lazy.trace.trace import CutTrace

Maybe = torch.Tensor | None
# torch has no public API to see whether a tensor is batched, and in which dimension. Of its two implementations the
# older one serves `is_grads_batched`, the newer one `torch.func`.
_newer: Any = torch._C._functorch
_private: Any = torch._C
_OLDER_KEY: Any = torch._C._dispatch_key_parse("Batched")
_OLDER_LEVELS = 64  # kVmapNumLevels


def is_batched(tangents: Sequence[Maybe]) -> bool:
    """Whether some tangent is batched."""
    plain = (g for g in tangents if type(g) is torch.Tensor)  # a batched lazy tensor is no LazyTensor
    return any(_newer.is_batchedtensor(g) or _is_of_older(g) for g in plain)


def one_by_one(backward: Callable[[list[Maybe]], Sequence[Maybe]], tangents: Sequence[Maybe]) -> list[Maybe]:
    """The gradients for the innermost batch: `backward` is called for each of its elements."""
    levels = [_newer.maybe_get_level(g) for g in tangents if g is not None and _newer.is_batchedtensor(g)]
    if levels:
        level = max(levels)
        parts = [_of_newer(g, level) for g in tangents]
    else:
        level = _older_level(tangents)
        parts = [_of_older(g, level) for g in tangents]
    size = next(len(part) for part in parts if isinstance(part, tuple))
    found = []
    for number in range(size):
        found.append(list(backward([part[number] if isinstance(part, tuple) else part for part in parts])))
    together = _newer._add_batch_dim if levels else torch._add_batch_dim
    return [_stack_batch(values, level, together) for values in zip(*found, strict=True)]


def _of_newer(tangent: Maybe, level: int) -> tuple[torch.Tensor, ...] | Maybe:
    if tangent is None or not _newer.is_batchedtensor(tangent) or _newer.maybe_get_level(tangent) != level:
        return tangent
    parts: tuple[torch.Tensor, ...] = _newer.get_unwrapped(tangent).unbind(_newer.maybe_get_bdim(tangent))
    return parts


def _is_of_older(tensor: torch.Tensor) -> bool:
    return bool(_private._dispatch_keys(tensor).has(_OLDER_KEY))


def _older_level(tangents: Sequence[Maybe]) -> int:
    """The innermost level of these. The nesting that torch counts is the calling thread's, and gradients on a GPU are
    computed in another one."""
    batched = [g for g in tangents if g is not None and _is_of_older(g)]
    has = lambda level: any(len(torch._remove_batch_dim(g, level, 0, 0)) for g in batched)  # noqa: E731
    return next((level for level in range(_OLDER_LEVELS - 1, 0, -1) if has(level)), 1)


def _of_older(tangent: Maybe, level: int) -> tuple[torch.Tensor, ...] | Maybe:
    if tangent is None or not _is_of_older(tangent):
        return tangent
    parts: tuple[torch.Tensor, ...] = torch._remove_batch_dim(tangent, level, 1, 0).unbind()
    return parts


def _stack_batch(values: Sequence[Maybe], level: int, batch: Callable[..., torch.Tensor]) -> Maybe:
    there = [value for value in values if value is not None]
    if not there:
        return None
    filled = [torch.zeros_like(there[0]) if value is None else value for value in values]
    return batch(torch.stack(filled), 0, level)


class JointHandles:
    """The programs of one joint, and of its deeper orders.

    `sizes_vary`: programs for all sizes serve it, as if `config.dynamic` were on. `same_inputs`: the caller has
    checked that inputs and their memory have the geometry that they had at the first run. `backend`: what compiles
    the programs instead of this package.
    """

    def __init__(
        self, sizes_vary: bool = False, same_inputs: bool = False, backend: Callable[..., Any] | None = None
    ) -> None:
        self.same_inputs = same_inputs
        self.graphs: JointGraphs | None = None
        self._backend = backend
        self.is_whole: list[
            bool
        ] = []  # for each of the forward's inputs: it is all of its memory, in the program's layout
        self.forward = _Handle(sizes_vary, backend)
        self.backward = _Handle(sizes_vary, backend)
        self.sizes_vary = sizes_vary
        self._double: JointHandles | None = None
        self._held: tuple[Source, ...] | None = None
        self._freed: Sequence[frozenset[int]] | None = None

    def freed(self, joint: Joint) -> Sequence[frozenset[int]]:
        """By tangent, the `freed` of the results that have some."""
        if self._freed is None:
            self._freed = [r.freed for r in joint.results if r.freed is not None]
        return self._freed

    def held(self, joint: Joint) -> tuple[Source, ...]:
        """What is kept between the halves: all that the backward or the double backward reads but the tangents."""
        if self._held is None:
            sources = (*joint.backward_inputs, *(joint.double.inputs if joint.double is not None else ()))
            self._held = tuple(dict.fromkeys(source for source in sources if source.kind != "tangent"))
        return self._held

    @property
    def double(self) -> JointHandles:
        if self._double is None:
            self._double = JointHandles(self.sizes_vary, backend=self._backend)
        return self._double


class _Handle:
    """The program of one trace. A setting that programs depend on belongs to the key under which a joint is held."""

    def __init__(self, sizes_vary: bool, backend: Callable[..., Any] | None) -> None:
        self.compiled: Any = None  # the program that ran it last
        self._backend = backend
        self._foreign: ForeignProgram | None = None
        self._sizes_vary = sizes_vary

    def run(
        self, recorder: Recorder, trace: CutTrace, memory: list[torch.Tensor], scalars: list[Any], cause: str
    ) -> list[torch.Tensor]:
        """The trace's outputs for this memory, which is taken; the first error of one that has none is raised."""
        driver: Any = recorder.driver
        was_busy, recorder.busy = recorder.busy, True
        try:
            if self._backend is not None:
                self._foreign = self._foreign or compile_with(self._backend, trace)
                values = self._foreign.run([DEVICE.unmarked(one) for one in memory], scalars)
            elif self.compiled is not None and not driver.listeners and driver.shadow is None and not config.debug:
                with below_autograd():
                    values = driver.run_compiled(self.compiled, trace, memory, scalars)
            else:
                kept, driver.tiers.sizes_vary = driver.tiers.sizes_vary, self._sizes_vary
                try:
                    values = driver(trace, memory, scalars, cause, "")
                finally:
                    driver.tiers.sizes_vary = kept
                self.compiled = driver.last_compiled
        finally:
            recorder.busy = was_busy
        for value in values:
            if isinstance(value, BaseException):
                raise value
        return values  # type: ignore[no-any-return]


DeeperBackward = Callable[[Sequence[Sequence[torch.Tensor | None]]], Sequence[torch.Tensor | None]]
"""Gradients of an order that was not recorded, differentiable: from the tangents of each order up to it, first to
last, to the gradients in the recorded order. The tangents of a second order belong to the first one's gradients."""


@dataclass
class _JointCall:
    """One call of a joint. `outer`: how many tangents each order before this one had: the last of its wanted inputs."""

    recorder: Recorder
    joint: Joint
    inputs: tuple[torch.Tensor, ...]
    scalars: list[Any]
    cause: str
    handles: JointHandles
    deeper: DeeperBackward | None = None
    outer: tuple[int, ...] = ()
    unraised: Collection[int] = ()  # inputs that the function writes to without raising their version
    lease: Any = None  # of the memory of the graphs that ran the forward


def run_joint(
    recorder: Recorder,
    joint: Joint,
    inputs: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor],
    scalars: Sequence[Any],
    *,
    cause: str = "compiled function",
    handles: JointHandles | None = None,
    deeper: DeeperBackward | None = None,
    unraised: Collection[int] = (),
) -> list[torch.Tensor]:
    """What the recorded function returned, computed anew from `inputs`.

    `inputs`: for each input of the joint a tensor over the memory that takes its place (any view of it). `wanted`:
    the tensors that gradients flow to, in the order of the recording. `scalars`: the forward's runtime scalars
    (`new_seeds` draws those that are random seeds). `deeper` computes gradients under autograd where `create_graph`
    asks for an order that was not recorded. `unraised`: numbers of inputs that operators write to without
    raising their version (the running mean of a batch norm). `handles`: the joint's programs, kept from call to call.
    """
    handles = handles or JointHandles()
    recorder.rematerialize_pending()
    call = _JointCall(recorder, joint, tuple(inputs), list(scalars), cause, handles, deeper, unraised=unraised)
    if None in joint.gradients:  # no result depends on these: a backward must not come to what is behind them
        wanted = [x if at is not None else x.detach() for x, at in zip(wanted, joint.gradients, strict=True)]
    if any(r.tangent is not None for r in joint.results) and not any(x.requires_grad for x in wanted):
        wanted = (*wanted, torch.empty(0, requires_grad=True))  # its gradients lead to leaves of its own alone
    results = _JointFunction.apply(call, *wanted) if joint.results else ()
    if not joint.results:
        _run_forward(call)
    aliases: dict[int, torch.Tensor] = {}
    for update in joint.updates:
        target = call.inputs[update.input]
        if update.detached:
            target = target.data if update.input in unraised else target.detach()
        window = target if _has(target, update.geometry) else _view_as(target, update.geometry)
        if update.detached:
            window = aliases[update.input] = window.detach()
        window.copy_(results[update.result])
    return [_output(call, output, results, aliases) for output in joint.outputs]


def each_its_own(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """A joint's outputs for as many objects of the call, where some show one result as it is."""
    seen: set[int] = set()
    for position, output in enumerate(outputs):
        if id(output) in seen:
            outputs[position] = output.view_as(output) if output.requires_grad else output.detach()
        seen.add(id(output))
    return outputs


@dataclass(frozen=True, eq=False)
class JointBackward:
    """The backward of a joint whose forward ran in C++, where gradients are batched or are to have a graph.

    `held`: the sources of what the node saved; `wanted`, `scalars`, `handles` and `deeper` as for `run_joint`.
    """

    recorder: Recorder
    joint: Joint
    held: Sequence[Source]
    wanted: Sequence[torch.Tensor]
    scalars: list[Any]
    handles: JointHandles
    deeper: DeeperBackward | None

    def run(self, saved: Sequence[torch.Tensor], gradients: Sequence[Maybe], needed: Sequence[bool]) -> list[Maybe]:
        """The gradients of the wanted inputs, for what was saved and the gradients of the results."""
        found = dict(zip(self.held, saved, strict=True))
        cause = "compiled call"
        call = _JointCall(self.recorder, self.joint, (), self.scalars, cause, self.handles, self.deeper)
        ctx = types.SimpleNamespace(call=call, needs_input_grad=(False, *needed), inner=(), write_targets=())
        values = [found[source] for source in self.handles.held(self.joint)]
        return list(_backward(ctx, [*values, *self.wanted], gradients))


def new_seeds(joint: Joint, scalars: Sequence[Any]) -> list[Any]:
    """The forward's scalars of a new run: the numbers as they were, and a fresh seed for each random operator."""
    kinds = joint.forward.scalar_kinds
    return [draw_seed(None) if kind is int else value for kind, value in zip(kinds, scalars, strict=True)]


def _output(
    call: _JointCall, output: Output, results: Sequence[torch.Tensor], aliases: dict[int, torch.Tensor]
) -> torch.Tensor:
    if output.source == "input" and output.index in aliases:
        return aliases[output.index]
    source = results[output.index] if output.source == "result" else call.inputs[output.index]
    is_result = output.source == "result" and output.is_whole
    found = source if is_result else _view_as(source, output.geometry)
    return found if output.requires_grad or not found.requires_grad else found.detach()


def _view_as(tensor: torch.Tensor, geom: Geometry) -> torch.Tensor:
    if tensor.dtype.is_complex and tensor.dtype.to_real() == geom.dtype:
        tensor = torch.view_as_real(tensor)
    if tensor.dtype != geom.dtype:
        raise RuntimeError("torchlazy: internal error: an output is a view in another dtype; please report this")
    return show_bits([tensor.as_strided(geom.shape, geom.strides, geom.offset)], geom.bits)[0]


def _has(tensor: torch.Tensor, geom: Geometry) -> bool:
    return tensor.shape == geom.shape and tensor.stride() == geom.strides and tensor.storage_offset() == geom.offset


class _JointFunction(torch.autograd.Function):
    """Forward and backward of one call."""

    @staticmethod
    def forward(ctx: Any, call: _JointCall, *wanted: torch.Tensor) -> tuple[torch.Tensor, ...]:
        joint = call.joint
        values = _run_forward(call)
        results = tuple(_wrapped(call.recorder, values[r.position], r.geometry) for r in joint.results)
        ctx.set_materialize_grads(False)
        reached = _reached(joint, ctx.needs_input_grad[1:]) if call.outer else None
        ctx.mark_non_differentiable(
            *(
                t
                for t, r in zip(results, joint.results, strict=True)
                if r.tangent is None or (reached is not None and r.tangent not in reached)
            )
        )
        freed = call.handles.freed(joint)
        own = [result.detach() for result in results] if freed else results
        places = {"input": call.inputs, "result": own, "saved": [values[i] for i in joint.saved]}
        held = [places[source.kind][source.index] for source in call.handles.held(joint)]
        held += wanted if joint.double is not None or call.outer else ()
        ctx.kept = Kept(freed, held) if freed else ctx.save_for_backward(*held)
        ctx.call = _JointCall(call.recorder, joint, (), call.scalars, call.cause, call.handles, call.deeper, call.outer)
        ctx.call.lease, call.lease = call.lease, None
        ctx.write_targets = [call.inputs[write.input] for write in joint.backward_writes]
        ctx.inner = [] if call.outer else [(weakref.ref(results[i]), users) for i, users in joint.inner]
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, *_backward(ctx, _saved(ctx, gradients), gradients))


def _saved(ctx: Any, gradients: Sequence[Maybe]) -> Sequence[Maybe]:
    """What a backward that is given these gradients reads."""
    if ctx.kept is not None:
        results = ctx.call.joint.results
        found = ctx.kept.read(r.tangent for r, g in zip(results, gradients, strict=True) if g is not None)
        if found is not None:
            return found  # type: ignore[no-any-return]
    return ctx.saved_tensors  # type: ignore[no-any-return]  # it raises where it was freed


def _backward(ctx: Any, saved: Sequence[Maybe], gradients: Sequence[Maybe]) -> Sequence[Maybe]:
    call: _JointCall = ctx.call
    if is_batched(gradients):
        lease, call.lease = call.lease, None  # a graph's backward runs once
        found = one_by_one(lambda one: _backward(ctx, saved, one), gradients)
        call.lease = lease if lease is not None and lease.is_kept() else None
        return found
    joint, recorder = call.joint, call.recorder
    needed = ctx.needs_input_grad[1 : 1 + len(joint.gradients)]
    unasked = [None] * (len(ctx.needs_input_grad) - 1 - len(needed))  # of a leaf that `run_joint` added
    _refuse_looks_inside(ctx.inner, gradients)
    sources = call.handles.held(joint)
    held = dict(zip(sources, saved, strict=False))
    tangents = [gradients[i] for i, r in enumerate(joint.results) if r.tangent is not None]
    if joint.backward is None or all(g is None for g in tangents):
        return (*(None for _ in joint.gradients), *unasked)
    if torch.is_grad_enabled():
        wanted = saved[len(sources) : len(saved) - len(unasked)]
        differentiable = _differentiably(call, held, tangents, wanted)
        return (*_by_wanted(joint, tangents, differentiable, needed), *unasked)
    recorder.rematerialize_pending()
    with recorder.lock, outside_lazy_mode(recorder):
        _settle(recorder, call.cause)
        scalars = _scalars(call, joint.backward_scalars)
        graphs, call.lease = call.lease, None
        if graphs is not None and not graphs.is_kept():
            values = graphs.backward([None if g is None else _real(recorder, g) for g in tangents], scalars)
        else:
            memory = [
                _memory(recorder, tangents[s.index] if s.kind == "tangent" else held[s], geom, s.kind)
                for s, (_, geom) in zip(joint.backward_inputs, joint.backward.inputs, strict=True)
            ]
            handle, cause = call.handles.backward, f"backward of {call.cause}"
            values = handle.run(recorder, joint.backward, memory, scalars, cause)
            call.lease = graphs
        for write, target in zip(joint.backward_writes, ctx.write_targets, strict=True):
            _overwrite(recorder, target, values[write.position])
        recorder.let_go()
    found = [_wrapped(recorder, v, geom) for v, (_, geom) in zip(values, joint.backward.outputs, strict=True)]
    return (*_by_wanted(joint, tangents, found, needed), *unasked)


def _refuse_looks_inside(inner: Sequence[Any], gradients: Sequence[torch.Tensor | None]) -> None:
    """Raises where a result that other results are computed from has a hook: to torch the results are separate, so the
    gradient that passes through it on the way from the others is not seen at it."""
    for ref, users in inner:
        result = ref()
        if result is None or all(gradients[i] is None for i in users):
            continue
        if result.retains_grad or result._backward_hooks:
            raise RuntimeError(
                "torchlazy: a result of a compiled call has a hook or retains its gradient, and other results of the "
                "call are computed from it: the gradient that comes by way of these is not seen there / register the "
                "hook inside the function, or compute what is differentiated outside of it"
            )


def _reached(joint: Joint, needs_gradient: Sequence[bool]) -> set[int]:
    """Numbers of the results that depend on wanted inputs which need gradients: unlike those of a function, the
    tangents of a backward may or may not."""
    return {i for needs, is_needed in zip(joint.needs, needs_gradient, strict=True) if is_needed for i in needs}


def _by_wanted(
    joint: Joint,
    tangents: Sequence[torch.Tensor | None],
    values: Sequence[torch.Tensor | None],
    needs_gradient: Sequence[bool],
) -> Iterator[torch.Tensor | None]:
    """The gradients in the order of the wanted inputs; None where no path led, where all tangents on it are missing, or
    where it is not needed (a tangent among the inputs may be missing itself)."""
    missing = {i for i, g in enumerate(tangents) if g is None}
    for at, needs, is_needed in zip(joint.gradients, joint.needs, needs_gradient, strict=True):
        yield None if at is None or not is_needed or (needs and needs <= missing) else values[at]


def _differentiably(
    call: _JointCall,
    held: Mapping[Source, torch.Tensor | None],
    tangents: Sequence[torch.Tensor | None],
    wanted: Sequence[Any],
) -> Sequence[torch.Tensor | None]:
    """The gradients under autograd, for `create_graph=True`."""
    double = call.joint.double
    if double is None:
        return _not_recorded(call, tangents, wanted)
    geometries = [geom for _, geom in double.joint.forward.inputs]
    inputs: list[torch.Tensor] = []
    for source, geom in zip(double.inputs, geometries, strict=True):
        tangent = tangents[source.index] if source.kind == "tangent" else None
        if source.kind != "tangent":
            inputs.append(held[source])  # type: ignore[arg-type]
        elif isinstance(tangent, LazyTensor) and tangent._storage_.base.meta == geom.meta == tangent._geometry.meta:
            inputs.append(tangent)  # itself, so that torch notices if it is changed in place
        else:
            inputs.append(_memory(call.recorder, tangent, geom, "tangent"))
    scalars = _scalars(call, double.scalars)
    outer = (*call.outer, len(tangents))
    cause = f"backward of {call.cause}"
    inner = _JointCall(
        call.recorder, double.joint, tuple(inputs), scalars, cause, call.handles.double, call.deeper, outer
    )
    return _JointFunction.apply(inner, *wanted, *tangents)


def _not_recorded(
    call: _JointCall, tangents: Sequence[torch.Tensor | None], wanted: Sequence[Any]
) -> Sequence[torch.Tensor | None]:
    """The same where this order of gradients was not recorded."""
    order = len(call.outer) + 1
    if call.deeper is None:
        raise RuntimeError(
            f"torchlazy: this compiled function was recorded with gradients of order {order}, without a double "
            "backward of them, and they are asked for with create_graph=True / call the function uncompiled where "
            "gradients of gradients are needed"
        )
    levels: list[Sequence[torch.Tensor | None]] = [tangents]
    end = len(wanted)
    for count in reversed(call.outer):
        levels.insert(0, wanted[end - count : end])
        end -= count
    return call.deeper(levels)


def _scalars(call: _JointCall, sources: Sequence[ScalarSource]) -> list[Any]:
    return [
        call.scalars[s.value] if s.kind == "forward" else draw_seed(None) if s.kind == "seed" else s.value
        for s in sources
    ]


def _run_forward(call: _JointCall) -> list[torch.Tensor]:
    recorder, joint = call.recorder, call.joint
    with recorder.lock:
        _settle(recorder, call.cause)
        handles, inputs = call.handles, call.inputs
        if handles.is_whole:
            memory = [
                inputs[i].data if whole else _memory(recorder, inputs[i], geom, "input")
                for whole, i, (_, geom) in zip(
                    handles.is_whole, joint.forward_inputs, joint.forward.inputs, strict=True
                )
            ]
        else:
            pairs = [(inputs[i], geom) for i, (_, geom) in zip(joint.forward_inputs, joint.forward.inputs, strict=True)]
            memory = [_memory(recorder, tensor, geom, "input") for tensor, geom in pairs]
            handles.is_whole = [_is_whole(tensor, geom) for tensor, geom in pairs] if handles.same_inputs else []
        scalars = call.scalars[: len(joint.forward.scalar_kinds)]
        found = None if handles.graphs is None else handles.graphs.forward(recorder, joint, handles, memory, scalars)
        if found is not None:
            values, call.lease = found
        else:
            values = handles.forward.run(recorder, joint.forward, memory, scalars, call.cause)
        for write in joint.writes:
            target = call.inputs[write.input]
            _overwrite(recorder, target, values[write.position], raises=write.input not in call.unraised)
        recorder.let_go()
    return values


def _settle(recorder: Recorder, cause: str) -> None:
    """Run what is pending, and let the trace start anew: programs write into memory that it may have taken as input."""
    if recorder.entries or recorder.inputs:
        recorder.cut(cause)


def _storage(recorder: Recorder, tensor: torch.Tensor) -> LazyStorage:
    return tensor._storage_ if isinstance(tensor, LazyTensor) else recorder.storage_of_plain(tensor)


def _memory(recorder: Recorder, tensor: torch.Tensor | None, geom: Geometry, kind: str) -> torch.Tensor:
    """The memory of a program's input, in the geometry that the program was made for."""
    if tensor is None:
        return torch.zeros(geom.shape, dtype=geom.dtype, device=geom.compute).as_strided(geom.shape, geom.strides)
    if kind == "saved":
        return tensor.detach()
    if kind == "tangent":
        real = _real(recorder, tensor)
        with below_autograd():
            if real.stride() == geom.strides and real.dtype == geom.dtype and not _has_gaps(real, geom):
                return real
            return torch.empty_strided(geom.shape, geom.strides, dtype=geom.dtype, device=geom.compute).copy_(real)
    if _is_whole(tensor, geom):
        return tensor.data  # not a detached view: the program's write would raise the tensor's version
    storage = _storage(recorder, tensor)
    if storage.poison is not None:
        raise storage.poison
    base = storage.base
    if storage.real is None or base.meta != geom.meta:
        raise RuntimeError(
            f"torchlazy: a compiled function was made for an input of {geom.meta} with strides {geom.strides} and is "
            f"given {base.meta} with strides {base.strides} / check its guards before running it"
        )
    return storage.real


def _real(recorder: Recorder, tangent: torch.Tensor) -> torch.Tensor:
    return recorder.real(tangent, "gradient") if isinstance(tangent, LazyTensor) else tangent.detach()


def _is_whole(tensor: torch.Tensor, geom: Geometry) -> bool:
    """Whether this is an ordinary tensor that is all of its memory, in this geometry."""
    return not isinstance(tensor, LazyTensor) and _has(tensor, geom) and not _has_gaps(tensor, geom)


def _has_gaps(real: torch.Tensor, geom: Geometry) -> bool:
    """Whether this is a view of larger memory, which programs do not accept."""
    return real.storage_offset() != 0 or real.untyped_storage().nbytes() != geom.nbytes


def _overwrite(recorder: Recorder, tensor: torch.Tensor, value: torch.Tensor, *, raises: bool = True) -> None:
    """The memory of `tensor` holds `value` now: donated memory does so already."""
    storage = _storage(recorder, tensor)
    storage.version += 1
    pinned = is_pinned(storage)
    if storage.real is None or pinned or value.data_ptr() != storage.real.data_ptr():
        with below_autograd():
            if storage.real is not None and pinned:
                if value.data_ptr() != storage.real.data_ptr():
                    storage.real.copy_(value)
            else:
                storage.real = value
    if raises:
        torch.autograd.graph.increment_version(tensor)


def _wrapped(recorder: Recorder, real: torch.Tensor, geom: Geometry) -> torch.Tensor:
    """A program's output as the kind of tensor that the function returned."""
    return recorder.new_real_tensor(real, LAZY) if geom.device == LAZY else real


exclude_from_dynamo(_JointFunction.forward, _JointFunction.backward, JointBackward.run)

__all__ = ["each_its_own", "is_batched", "new_seeds", "one_by_one", "run_joint"]

"""Replays without Python: a template that is one program, or one joint, as the native library runs it.

Invariant: what it gives is what `Replay.run` would give. It does nothing where it is not sure, and where a program that
writes nothing raises: the replay in Python does it again, and says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torchlazy.lazy.compiled.replay.hosts import counts_together
from torchlazy.lazy.compiled.replay.replay import Replay
from torchlazy.lazy.compiled.template import template as t
from torchlazy.lazy.numbers.expr import evaluator
from torchlazy.lazy.plan.joint import Joint
from torchlazy.lazy.plan.loaded import Compiled
from torchlazy.lazy.record.lent_memory import is_pinned
from torchlazy.lazy.run.dynamic_program import BoundRun, native_of
from torchlazy.lazy.torch_private.dispatch import below_autograd
from torchlazy.lazy.torch_private.settings import draw_seed
from torchlazy.lazy.trace.geometry import Geometry
from torchlazy.lazy.trace.op_schema import is_random
from torchlazy.lazy.trace.storage import LazyStorage
from torchlazy.runtime.executor import Executable

Row = tuple[Any, ...]
_COMPUTES = ("cpu", "cuda")
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True, eq=False)
class NativeReplay:
    """A `ReplayedCall`, its program, the storages of the state that this writes, and what is done after a run: also
    whether another program is there by now, where it serves all sizes."""

    call: Any
    compiled: Compiled
    written: tuple[LazyStorage, ...] = ()
    after: Callable[[], None] | None = None
    is_overtaken: Callable[[], bool] | None = None


class NeedsPython(Exception):
    """The replay cannot run in C++; the message says why."""


class _NotYet(Exception):
    """A program is not there yet."""


def native_replay(library: Any, replay: Replay, check: Any, holds: Any) -> NativeReplay | None:
    """The replay of calls that fit `check` where `holds()`; None before its program is there. Raises NeedsPython."""
    try:
        spec, compiled, written = _described(replay)
    except _NotYet:
        return None
    if replay.template.twins:
        guards_hold = holds
        holds = lambda: guards_hold() and replay.twins_hold()  # noqa: E731
    call = library.ReplayedCall({"arguments": check, "holds": holds, **spec})
    run: Any = compiled.run
    is_overtaken = partial(run.is_overtaken, run.executable_now) if type(run) is BoundRun else None
    if spec["graphs"] is not None:
        last = replay.steps.steps[-1]
        is_overtaken = partial(_is_another, replay.graphs_of(last), spec["graphs"])  # type: ignore[arg-type]
    return NativeReplay(call, compiled, written, replay.note_twins if replay.template.twins else None, is_overtaken)


def _is_another(graphs: Any, then: Any) -> bool:
    return graphs.current is not then


def _described(replay: Replay) -> tuple[dict[str, Any], Compiled, tuple[LazyStorage, ...]]:
    template = replay.template
    *others, step = replay.steps.steps or (None,)
    seeds = [other for other in others if type(other) is t.Seed]
    calls = [other for other in others if type(other) is t.HostCall]
    if template.checks or template.effects or template.hosts or len(seeds) + len(calls) < len(others):
        raise NeedsPython("it checks numbers, leaves effects, or runs operators on ordinary tensors")
    if any(not hasattr(read, "leaf") for read in template.read_free):
        raise NeedsPython("it reads numbers that are no arguments")
    scalars = _scalars(template, seeds, step)
    if type(step) is t.Segment:
        spec, compiled, written = _of_segment(replay, step, scalars)
    elif type(step) is t.JointRun:
        spec, compiled, written = _of_joint(replay, step, scalars)
    else:
        raise NeedsPython("it is not one program at its end")
    spec.setdefault("graphs", None)
    spec |= {"before": _on_host(calls), "writes": spec["writes"] or bool(calls)}
    return spec, compiled, written


def _on_host(steps: Sequence[t.HostCall]) -> Callable[[], None] | None:
    """Runs these operators on ordinary tensors of the state, such as counts of batches."""
    calls: list[tuple[Any, list[Any], dict[str, Any]]] = []
    together, done = counts_together(steps, ()), 0
    for at, step in enumerate(steps):
        if at in together:
            calls.append((torch.ops.aten._foreach_add_.Scalar, list(together[at]), {}))
            done = at + len(together[at][0])
        elif at >= done:
            calls.append((step.op, *_host_arguments(step)))

    def run() -> None:
        with below_autograd():
            for op, args, kwargs in calls:
                op(*args, **kwargs)

    return run if calls else None


def _host_arguments(step: t.HostCall) -> tuple[list[Any], dict[str, Any]]:
    if any(place is not None for place in step.made) or is_random(step.op) or step.keeps_versions:
        raise NeedsPython("it runs operators on ordinary tensors that give others")

    def argument(value: Any) -> Any:
        if type(value) is t.HostKept:
            return value.tensor
        if type(value) in (list, tuple):
            return [argument(item) for item in value]
        if not isinstance(value, _PLAIN):
            raise NeedsPython("it runs operators on ordinary tensors that give others")
        return value

    return [argument(value) for value in step.args], {name: argument(value) for name, value in step.kwargs}


def _scalars(template: t.CallTemplate, seeds: Sequence[t.Seed], step: Any) -> Any:
    """The program's scalars, or what gives them for the arguments: numbers among these, and fresh seeds."""
    evaluate = evaluator(getattr(step, "scalars", ()))
    if not template.sources:
        return evaluate([])
    read_free, count = template.read_free, template.sources
    if len(read_free) + len(seeds) != count:
        raise NeedsPython("it draws from generators whose state it keeps")

    def scalars(given: tuple[Any, ...]) -> list[Any]:
        sources: list[Any] = [None] * count
        for number, read in enumerate(read_free):
            sources[number] = read(given)
        for seed in seeds:
            sources[seed.source] = draw_seed(seed.generator)
        return evaluate(sources)

    return scalars


def _native(compiled: Compiled | None) -> tuple[Any, tuple[Any, ...]]:
    """The program in C++, and its scalars behind the trace's."""
    if compiled is None:
        raise _NotYet
    found = native_of(compiled.run)
    if found is None:
        raise NeedsPython("its program calls what C++ cannot")
    return found[:2]


def _with(scalars: Any, last: tuple[Any, ...]) -> Any:
    """The scalars, or what gives them, with these behind them."""
    if callable(scalars):
        return (lambda given: [*scalars(given), *last]) if last else scalars
    return [*scalars, *last]


# ---- one program


def _of_segment(
    replay: Replay, segment: t.Segment, scalars: Any
) -> tuple[dict[str, Any], Compiled, tuple[LazyStorage, ...]]:
    trace, template = segment.trace, replay.template
    if trace.donations or trace.writes or template.versions:
        raise NeedsPython("it writes to its state")
    if replay.runs_graph(segment):
        raise NeedsPython("it is a CUDA graph")
    compiled = replay.program_of(segment)
    program, last = _native(compiled)
    made: list[Row] = []
    spec = {
        "program": program, "scalars": _with(scalars, last), "joint": None, "raised": [], "writes": False,
        "inputs": [_input(memory, geom) for memory, (_, geom) in zip(segment.inputs, trace.inputs, strict=True)],
        "results": list(_results_of_segment(template, segment, made)), "made": made,
    }  # fmt: skip
    return spec, compiled, ()


def _input(memory: t.Memory, geom: Geometry) -> Row:
    if not geom.bits and not geom.offset:
        if type(memory) is t.FromArgument:
            return memory.leaf, _layout(geom)
        if type(memory) is t.FromState and _stays(memory.storage):
            return memory.storage.real, _layout(geom)
    raise NeedsPython("it reads memory that is not an ordinary tensor's, all of it")


def _stays(storage: LazyStorage) -> bool:
    """Whether it stands for an ordinary tensor's memory, which it has as long as the guards hold."""
    return storage.base.device.type != "lazy" and is_pinned(storage) and storage.poison is None


def _results_of_segment(template: t.CallTemplate, segment: t.Segment, made: list[Row]) -> Iterator[Row]:
    outputs = {target.place: n for n, target in enumerate(segment.targets) if type(target) is t.FromStep}
    if len(outputs) < len(segment.targets):
        raise NeedsPython("it writes to its state")
    for result in template.results:
        if type(result) is t.TensorResult and type(result.memory) is t.FromStep:
            number = outputs.pop(result.memory.place, None)
            if number is None or not _is_plain(result, segment.trace.outputs[number][1]):
                raise NeedsPython("a result shares memory")
            yield "made", len(made)
            made.append((number, _layout(result.geometry), result.geometry.offset, result.is_marked))
        else:
            yield _as_it_is(result)


def _as_it_is(result: t.Result) -> Row:
    if type(result) is t.SameArgument:
        return "argument", result.leaf
    if type(result) is t.SameObject:
        return "object", result.value
    raise NeedsPython("a result is no new tensor")


def _is_plain(result: t.TensorResult, made: Geometry) -> bool:
    geom = result.geometry
    return (
        not (result.requires_grad or result.freed or result.is_detached or geom.bits)
        and result.base is None
        and geom.device.type in _COMPUTES
        and geom.dtype == made.dtype
        and result.is_inference == torch.is_inference_mode_enabled()
    )


def _layout(geom: Geometry) -> Row:
    return list(geom.shape), list(geom.strides), geom.dtype


# ---- a joint


def _of_joint(
    replay: Replay, step: t.JointRun, scalars: Any
) -> tuple[dict[str, Any], Compiled, tuple[LazyStorage, ...]]:
    joint, template = step.joint, replay.template
    if joint.updates or joint.backward_writes or template.versions or joint.backward is None:
        raise NeedsPython("its backward writes, or it writes under autograd")
    if joint.backward.donations or any(result.freed is not None for result in joint.results):
        raise NeedsPython("parts of its graph are freed each by a backward of its own")
    forward, backward = replay.programs_of(step)
    program, last = _native(forward)
    graphs = replay.graphs_of(step)
    if graphs is not None and graphs.are_to_come and type(forward.run) is Executable:
        raise _NotYet
    raised, written = _written(step)
    marked = {result.index for result in template.results if type(result) is t.JointResult and result.is_marked}
    of_outputs = {joint.outputs[index].index for index in marked}
    made = [(r.position, _layout(_plain(r.geometry)), 0, n in of_outputs) for n, r in enumerate(joint.results)]
    spec = {
        "program": program, "scalars": _with(scalars, last), "raised": raised, "writes": bool(written), "made": made,
        "inputs": [
            _input(step.inputs[n][0], geom)
            for n, (_, geom) in zip(joint.forward_inputs, joint.forward.inputs, strict=True)
        ],
        "results": [_result_of_joint(joint, result) for result in template.results],
        "joint": _backward(replay, step, *_native(backward)), "graphs": None if graphs is None else graphs.current,
    }  # fmt: skip
    return spec, forward, written


def _plain(geom: Geometry) -> Geometry:
    if geom.bits or geom.offset or geom.device.type not in _COMPUTES:
        raise NeedsPython("a result is a view, or on a device that computes nothing")
    return geom


def _written(step: t.JointRun) -> tuple[list[torch.Tensor], tuple[LazyStorage, ...]]:
    """Of what the forward writes outside of autograd, all in place: tensors whose version it raises, and storages."""
    joint = step.joint
    places = {output: joint.forward_inputs[given] for output, given in joint.forward.donations}
    if places != {write.position: write.input for write in joint.writes}:
        raise NeedsPython("it writes to memory that is not its state's")
    raised, written = [], []
    for number in places.values():
        memory, tensor = step.inputs[number]
        if type(memory) is not t.FromState:
            raise NeedsPython("it writes to memory that is not its state's")
        written.append(memory.storage)
        if number not in step.unraised:
            if tensor is None:
                raise NeedsPython("it writes to memory that is not its state's")
            raised.append(tensor)
    return raised, tuple(written)


def _result_of_joint(joint: Joint, result: t.Result) -> Row:
    if type(result) is not t.JointResult:
        return _as_it_is(result)
    output = joint.outputs[result.index]
    if output.source != "result" or not output.is_whole:
        raise NeedsPython("a result is a view")
    has_graph = joint.results[output.index].tangent is not None
    if result.is_leaf and not has_graph:
        return "leaf" if result.requires_grad else "made", output.index
    if result.requires_grad != has_graph:
        raise NeedsPython("a result is detached")
    return "made", output.index


def _backward(replay: Replay, step: t.JointRun, program: Any, last: tuple[Any, ...]) -> dict[str, Any]:
    joint = step.joint
    assert joint.backward is not None
    held = tuple(dict.fromkeys(source for source in joint.backward_inputs if source.kind != "tangent"))
    in_python = dict.fromkeys(
        source for source in (joint.double.inputs if joint.double else ()) if source.kind != "tangent"
    )
    held += tuple(source for source in in_python if source not in held)  # what an order above this one reads
    reads = [
        (True, source.index, _layout(geom)) if source.kind == "tangent" else (False, held.index(source), _layout(geom))
        for source, (_, geom) in zip(joint.backward_inputs, joint.backward.inputs, strict=True)
    ]
    positions = [w if isinstance(w, int) else None for w in step.wanted]
    leaves = dict.fromkeys(position for position in positions if position is not None)
    wanted = Replay.wanted_of(step, {position: position for position in leaves})  # type: ignore[arg-type]
    return {
        "backward": program,
        "wanted": wanted,
        "inputs": [_tensor(*step.inputs[source.index]) for source in held if source.kind == "input"],
        "tangents": [-1 if r.tangent is None else r.tangent for r in joint.results],
        "held": [
            (source.kind, joint.saved[source.index] if source.kind == "saved" else source.index) for source in held
        ],
        "reads": reads,
        "scalars": [*_backward_scalars(joint), *((-1, value) for value in last)],
        "gradients": [-1 if at is None else at for at in joint.gradients],
        "needs": [sorted(needs) for needs in joint.needs],
        "inner": list(joint.inner),
        "python": _python_backward(replay, step, held),
    }


def _tensor(memory: t.Memory, tensor: torch.Tensor | None) -> Any:
    if tensor is not None:
        return tensor
    if type(memory) is t.FromArgument:
        return memory.leaf
    raise NeedsPython("it reads memory that is not an ordinary tensor's, all of it")


def _backward_scalars(joint: Joint) -> Iterator[Row]:
    for scalar in joint.backward_scalars:
        if scalar.kind == "seed":
            raise NeedsPython("its backward draws random numbers")
        yield (scalar.value, None) if scalar.kind == "forward" else (-1, scalar.value)


def _python_backward(replay: Replay, step: t.JointRun, held: Sequence[Any]) -> Callable[..., list[Any]]:
    """The backward for gradients that are batched or are to have a graph of their own."""

    def backward(
        given: tuple[Any, ...],
        versions: list[int],
        scalars: list[Any] | None,
        saved: list[Any],
        gradients: list[Any],
        needed: list[bool],
    ) -> list[Any]:
        numbers = evaluator(step.scalars)([]) if scalars is None else scalars[: len(step.scalars)]
        return replay.backward_of(step, held, given, tuple(versions), numbers).run(saved, gradients, needed)

    return backward

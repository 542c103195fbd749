"""`torchlazy.export(fn, args)`: one whole graph of a function or module, with its state, sizes and guards.

The program is recorded, not run (export/record.py), once for each of a few sizes where `dynamic` names some
(export/sizes.py), and the recordings are unified into one graph (export/unify.py), which torch's exporter then traces
(export/program.py).

Invariant: a program that is no one whole graph for its sizes raises `ExportError`, with the user's line.
"""

from __future__ import annotations

import functools
import inspect
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torchlazy.lazy.export.check import is_equal, with_bounds
from torchlazy.lazy.export.expressions import evaluate, mul
from torchlazy.lazy.export.front_door import ExportError
from torchlazy.lazy.export.graph import ExportedGraph, InputSpec, StateSpec, TensorSpec, refs_in
from torchlazy.lazy.export.program import to_exported_program
from torchlazy.lazy.export.record import InputOrigin, RecordedCall, WholeGraph, state_as_twins, value_of
from torchlazy.lazy.export.sizes import Dynamic, points_for, read_dynamic
from torchlazy.lazy.export.tree import NotPlain, Tree, flatten_plain
from torchlazy.lazy.export.unify import Unified
from torchlazy.lazy.native.device import DEVICE
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.record.tensor import LAZY, LazyTensor
from torchlazy.lazy.torch_private.dispatch import exporting_flags
from torchlazy.lazy.trace.to_fx import trace_to_graph
from torchlazy.prims.verify import ATEN, verify


@dataclass(frozen=True)
class _ExportCall:
    """The call to export: bound arguments flattened to leaves, the modules whose state it uses."""

    function: Callable[..., Any]
    signature: inspect.Signature
    bound: dict[str, Any]
    modules: dict[str, torch.nn.Module]
    module_arguments: tuple[str, ...]
    leaves: list[tuple[str, torch.Tensor]]
    trees: dict[str, Tree]
    keywords: tuple[str, ...]  # of the arguments those given by keyword


@dataclass(frozen=True)
class _Sample:
    """One recording, at one point."""

    recorded: RecordedCall
    results: Tree
    graph: fx.Graph


def export(
    recorder: Recorder,
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic: Any = None,
) -> torch.export.ExportedProgram:
    """See `torchlazy.export`, which is this with the one recorder."""
    if not callable(fn):
        raise TypeError(f"torchlazy.export: a {type(fn).__name__} cannot be called; pass a function, method or module")
    if not isinstance(args, (tuple, list)):
        kind = "tensor" if isinstance(args, torch.Tensor) else type(args).__name__
        raise TypeError(f"torchlazy.export: args is a {kind}; pass a tuple of arguments: (x,)")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"torchlazy.export: kwargs is a {type(kwargs).__name__}; pass a dict of arguments by name")
    call = _bind(fn, tuple(args), dict(kwargs or {}))
    wishes = read_dynamic(dynamic, call.leaves, list(call.bound))
    samples: dict[tuple[tuple[str, int], ...], _Sample] = {}

    def record(point: Mapping[str, int]) -> _Sample:
        key = tuple(sorted(point.items()))
        if key not in samples:
            samples[key] = _record(recorder, call, wishes, point)
        return samples[key]

    def error_at(point: dict[str, int]) -> Exception | None:
        try:
            record(point)
        except Exception as error:
            return error
        return None

    def assemble(points: Sequence[Mapping[str, int]]) -> tuple[ExportedGraph, dict[str, torch.Tensor]]:
        return _assemble(call, wishes, [record(point) for point in points], points)

    base = {name: size.example for name, size in wishes.sizes.items()}
    record(base)  # its own errors first
    if not wishes.sizes:
        return to_exported_program(*assemble([base]))
    return to_exported_program(*with_bounds(assemble, wishes.sizes, points_for(wishes.sizes, error_at)))


# ---------------------------------------------------------------- the call

_EITHER = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _bind(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _ExportCall:
    target = fn.forward if isinstance(fn, torch.nn.Module) else fn
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        signature = inspect.signature(lambda *args, **kwargs: None)
    try:
        bound = dict(signature.bind(*args, **kwargs).arguments)
    except TypeError as error:
        raise TypeError(f"torchlazy.export: {getattr(fn, '__name__', type(fn).__name__)}: {error}") from None
    modules = {_module_name(name): module for name, module in _modules_of(fn).items()}
    module_arguments = tuple(name for name, value in bound.items() if isinstance(value, torch.nn.Module))
    for name in module_arguments:
        modules.setdefault(_module_name(name), bound[name])
    leaves: list[tuple[str, torch.Tensor]] = []
    trees: dict[str, Tree] = {}
    for name, value in bound.items():
        if name in module_arguments:
            continue
        try:
            found, trees[name] = flatten_plain(value, name)
        except NotPlain as error:
            raise ExportError(
                f"torchlazy.export: argument {error}\nremedy: pass tensors, numbers, strings, None, and lists, tuples "
                "and dicts of those; wrap the rest in a function of tensors"
            ) from None
        leaves += found
    keywords = tuple(name for name in trees if name in kwargs and signature.parameters[name].kind in _EITHER)
    return _ExportCall(fn, signature, bound, modules, module_arguments, leaves, trees, keywords)


def _module_name(name: str) -> str:
    """A name that a module can have among a module's attributes: not that of one of its methods."""
    return f"{name}_" if hasattr(torch.nn.Module, name) else name


def _modules_of(fn: Callable[..., Any]) -> dict[str, torch.nn.Module]:
    """The modules that a callable names: itself, its object, what it closes over, globals that its code mentions."""
    if isinstance(fn, torch.nn.Module):
        return {"": fn}
    if isinstance(fn, functools.partial):
        found = _modules_of(fn.func)
        given = {**{f"arg{i}": a for i, a in enumerate(fn.args)}, **fn.keywords}
        return {**found, **{name: m for name, m in given.items() if isinstance(m, torch.nn.Module)}}
    if isinstance(getattr(fn, "__self__", None), torch.nn.Module):
        return {"": fn.__self__}  # type: ignore[attr-defined]
    inner = getattr(fn, "__wrapped__", None)
    named: dict[str, torch.nn.Module] = _modules_of(inner) if callable(inner) else {}
    code = getattr(fn, "__code__", None)
    if code is None:
        return named
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):  # type: ignore[attr-defined]
        try:
            value = cell.cell_contents
        except ValueError:
            continue  # a cell that is not filled yet
        if isinstance(value, torch.nn.Module):
            named[name] = value
    for name in code.co_names:
        value = fn.__globals__.get(name)  # type: ignore[attr-defined]
        if isinstance(value, torch.nn.Module):
            named[name] = value
    return named


# ---------------------------------------------------------------- one recording


def _record(recorder: Recorder, call: _ExportCall, wishes: Dynamic, point: Mapping[str, int]) -> _Sample:
    tensors = [tensor for _, tensor in call.leaves]
    tensors += [t for module in call.modules.values() for t in (*module.parameters(), *module.buffers())]
    on_lazy = any(isinstance(t, LazyTensor) and t.device == LAZY for t in tensors)
    whole = WholeGraph(recorder, "torchlazy.export", on_lazy)
    replaced: dict[str, tuple[torch.Tensor, Any]] = {}

    def changed(key: str, twin: torch.Tensor, found: Any) -> None:
        same = isinstance(found, LazyTensor) and (found.shape, found.dtype) == (twin.shape, twin.dtype)
        if not same or isinstance(twin, torch.nn.Parameter):
            raise ExportError(
                f"torchlazy.export: the program replaces {key} by {_kind(found)}\nremedy: update it in place, or "
                "replace a buffer by a computed tensor of its shape and dtype"
            )
        replaced[key] = (twin, found)

    with whole.recording():
        with state_as_twins(whole, call.modules, changed):
            arguments = _twin_arguments(whole, call, wishes, point)
            with exporting_flags():
                result = _invoke(call, arguments)
            try:
                found, results = flatten_plain(result, "the result")
            except NotPlain as error:
                raise ExportError(
                    f"torchlazy.export: {error}\nremedy: return tensors, numbers, strings, None, and lists, tuples, "
                    "dicts and dataclasses of those (for a language model: use_cache=False)"
                ) from None
            del result, arguments
        with torch.no_grad():
            for twin, value in replaced.values():
                twin.copy_(value)
            recorded = whole.finish([tensor for _, tensor in found])
    graph = trace_to_graph(recorded.trace)
    verify(graph, ATEN)
    return _Sample(recorded, results, graph)


def _kind(value: Any) -> str:
    return f"a tensor of {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _twin_arguments(whole: WholeGraph, call: _ExportCall, wishes: Dynamic, point: Mapping[str, int]) -> dict[str, Any]:
    def twin(place: str, tensor: torch.Tensor) -> torch.Tensor:
        shape = [evaluate(n, point) for n in wishes.shape_of(place, tensor)]
        return whole.twin(tensor, "argument", place, shape)

    twins = iter([twin(place, tensor) for place, tensor in call.leaves])
    return {name: value if name in call.module_arguments else _like(value, twins) for name, value in call.bound.items()}


def _like(value: Any, twins: Any) -> Any:
    """`value` with each tensor replaced, in containers of the very types that the program expects."""
    if isinstance(value, torch.Tensor):
        return next(twins)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_like(v, twins) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_like(v, twins) for v in value)
    if type(value) in (dict,) or isinstance(value, Mapping):
        parts = {k: _like(v, twins) for k, v in value.items()}
        return parts if type(value) is dict else type(value)(parts)  # type: ignore[call-arg]
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        return replace(value, **{n: _like(getattr(value, n), twins) for n in value.__dataclass_fields__})
    return value


def _invoke(call: _ExportCall, arguments: dict[str, Any]) -> Any:
    bound = inspect.BoundArguments(call.signature, arguments)  # type: ignore[arg-type]
    return call.function(*bound.args, **bound.kwargs)


# ---------------------------------------------------------------- the graph


def _assemble(
    call: _ExportCall, wishes: Dynamic, samples: Sequence[_Sample], points: Sequence[Mapping[str, int]]
) -> tuple[ExportedGraph, dict[str, torch.Tensor]]:
    first = samples[0]
    taken: set[str] = set()
    argument_names = [_graph_name(place, taken) for place, _ in call.leaves]
    names, state_specs, state = _name_inputs(call, samples, argument_names, taken)
    scalars = {}
    for number, value in enumerate(first.recorded.scalars):
        if number in first.recorded.seeds:  # equal ones are one draw that was repeated (a checkpoint's)
            names[f"scalar{number}"] = f"seed{first.recorded.scalars.index(value)}"
        else:
            scalars[f"scalar{number}"] = [s.recorded.scalars[number] for s in samples]
    unified = Unified([s.graph for s in samples], points, names)
    nodes = unified.nodes(scalars)
    results = _same_results(samples, unified)
    outputs, news = unified.outputs[: first.recorded.results], unified.outputs[first.recorded.results :]
    targets = [names[f"in{position}"] for position in first.recorded.updated]
    _check_shared_memory(call, targets, argument_names)
    inputs = []
    for number, (place, tensor) in enumerate(call.leaves):
        shape = wishes.shape_of(place, tensor)
        inputs.append(_input_spec(argument_names[number], tensor, shape))
    used = (
        {name for n in nodes for name in refs_in([n.args, [v for _, v in n.kwargs]])}
        | {n for n, _ in outputs}
        | set(targets)
    )
    kept = tuple(s for s in state_specs if s.name in used)
    parameters = tuple(
        (name, call.signature.parameters[name].kind.name) for name in call.bound if name not in call.module_arguments
    )
    graph = ExportedGraph(
        parameters=parameters,
        arguments=Tree("dict", tuple(call.trees.values()), tuple(call.trees)),
        inputs=tuple(inputs),
        state=kept,
        sizes=(),
        nodes=tuple(nodes),
        outputs=tuple(outputs),
        results=results,
        updates=tuple(zip(targets, (name for name, _ in news), strict=True)),
        keywords=call.keywords,
    )
    return graph, {s.key: state[s.key] for s in kept}


def _graph_name(place: str, taken: set[str]) -> str:
    """A name in the graph for an argument or state at `place`; never one that values and seeds have."""
    plain = re.sub(r"\W+", "_", place).strip("_") or "value"
    if plain[0].isdigit() or keyword.iskeyword(plain) or re.fullmatch(r"(v|seed)\d+", plain):
        plain = f"_{plain}"
    name, number = plain, 1
    while name in taken:
        number += 1
        name = f"{plain}_{number}"
    taken.add(name)
    return name


def _name_inputs(
    call: _ExportCall, samples: Sequence[_Sample], argument_names: Sequence[str], taken: set[str]
) -> tuple[dict[str, str], list[StateSpec], dict[str, torch.Tensor]]:
    """Names of the trace's inputs: arguments, state by its key, constants by number; with the state's values."""
    order = {place: number for number, (place, _) in enumerate(call.leaves)}
    names: dict[str, str] = {}
    specs: list[StateSpec] = []
    state: dict[str, torch.Tensor] = {}
    rows = list(zip(*(s.recorded.places for s in samples), strict=False))
    if len({len(s.recorded.places) for s in samples}) > 1:
        raise ExportError(
            "torchlazy.export: the program uses other tensors at other sizes\nremedy: leave that size out of `dynamic`"
        )
    for position, row in enumerate(rows):
        place = row[0]
        if any((p.kind, p.key) != (place.kind, place.key) for p in row):
            raise ExportError(
                f"torchlazy.export: the program meets its inputs in another order at another size ({place.key})\n"
                "remedy: leave that size out of `dynamic`"
            )
        geom = samples[0].recorded.trace.inputs[position][1]
        if place.kind == "argument":
            names[f"in{position}"] = argument_names[order[place.key]]
            continue
        key, kind = place.key, "buffer"
        if place.kind == "constant":
            key, kind = f"constant{len(specs)}", "constant"
            while key in state:
                key = f"_{key}"
            _check_same_constant([(p, s.recorded.trace.inputs[position][1]) for p, s in zip(row, samples)])
        elif isinstance(place.memory, torch.nn.Parameter):
            kind = "parameter"
        assert place.memory is not None
        memory = place.memory
        if isinstance(memory, LazyTensor):
            memory = memory.recorder.real(memory, "export")
        held = _graph_name(key, taken)
        names[f"in{position}"] = held
        spec = TensorSpec(tuple(geom.shape), tuple(geom.strides), geom.dtype, geom.compute)
        specs.append(StateSpec(held, key, kind, spec))
        state[key] = value_of(memory.detach(), geom)
    return names, specs, state


def _check_same_constant(row: Sequence[tuple[InputOrigin, Any]]) -> None:
    """A tensor that the program made of Python numbers must not depend on the sizes."""
    (first, geom), *others = row
    assert first.memory is not None
    for place, other in others:
        if place.memory is first.memory:
            continue
        assert place.memory is not None
        if other is geom and is_equal(value_of(place.memory, geom), value_of(first.memory, geom)):
            continue
        raise ExportError(
            f"torchlazy.export: the program makes a tensor of {geom.meta} from Python numbers that depend on a size\n"
            "remedy: make it with torch.arange or torch.full, which are recorded, or leave that size out of `dynamic`"
        )


def _input_spec(name: str, tensor: torch.Tensor, shape: tuple[Any, ...]) -> InputSpec:
    """What an argument must be; its strides without gaps, in the order of the example's."""
    have = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda axis: (-have[axis], axis)))
    strides: list[Any] = [0] * tensor.dim()
    step: Any = 1
    for axis in reversed(order):
        strides[axis] = step
        step = mul(step, shape[axis] or 1)
    if isinstance(tensor, LazyTensor):
        device = tensor._geometry.compute if tensor.device == LAZY else str(tensor.device)
    else:
        device = DEVICE.target if DEVICE.is_marked(tensor) else str(tensor.device)
    return InputSpec(name, TensorSpec(tuple(shape), tuple(strides), tensor.dtype, device), order)


def _check_shared_memory(call: _ExportCall, targets: Sequence[str], argument_names: Sequence[str]) -> None:
    """An argument that is written to must not share memory with another one: the export assumed separate memory."""
    named = zip(argument_names, call.leaves, strict=True)
    tensors = [(name, place, tensor) for name, (place, tensor) in named if not isinstance(tensor, LazyTensor)]
    for name, place, tensor in tensors:
        if name not in targets:
            continue
        for other, other_place, value in tensors:
            if other != name and value.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
                raise ExportError(
                    f"torchlazy.export: the program writes to {place}, which shares memory with {other_place}\n"
                    "remedy: pass tensors with memory of their own"
                )


def _same_results(samples: Sequence[_Sample], unified: Unified) -> Tree:
    """The results' structure, with numbers that move as expressions."""

    def unify(trees: Sequence[Tree], place: str) -> Tree:
        first = trees[0]
        if any((t.kind, t.keys, len(t.children)) != (first.kind, first.keys, len(first.children)) for t in trees):
            raise ExportError(f"torchlazy.export: {place} has another structure at another size")
        if first.kind == "constant":
            return replace(first, value=unified.number([t.value for t in trees], place))
        children = zip(*(t.children for t in trees), strict=True)
        return replace(first, children=tuple(unify(parts, place) for parts in children))

    return unify([s.results for s in samples], "the result")


__all__ = ["ExportError", "export"]

"""Runs exported programs with torch's operators alone: no compiler, no recorder, none of the model's code.

Invariant: every call first checks the guards (structure, dtypes, devices, sizes) and says which argument breaks one;
every value made on the way has the shape that the export predicted, or the run stops with an error. Updated state and
written arguments take their new values only after everything was computed.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torchlazy.prims.checked import checked as _define_check  # noqa: F401  (defines torchlazy::checked)
from torchlazy.prims.random_bits import random_bits as _define_op  # noqa: F401  (defines torchlazy::random_bits)
from torchlazy.runtime.errors import RuntimeLayerError
from torchlazy.runtime.exported import file, fx, program
from torchlazy.runtime.exported.graph import BY_ADDRESS, ExportedGraph, Node, Ref, TensorSpec, output_names, refs_in
from torchlazy.runtime.exported.sizes import SizeExpr, evaluate, names_in, solve
from torchlazy.runtime.exported.tree import NotPlain, differing, flatten_plain, unflatten_plain


class GuardError(RuntimeLayerError):
    """An argument of an exported program is not what the program was exported for.

    Cause: another dtype, device, rank or size, another constant, a missing or surplus argument; one that is written to
    and shares memory with another.
    Fix: pass what the message asks for, or export again: `dynamic={"x": {0: "batch"}}` lets a size vary.
    """


class ExportedRunError(RuntimeLayerError):
    """A value on the way has another shape than the export predicted.

    Cause: a size outside of what the program was recorded at takes another path through an operator.
    Fix: export again with example arguments of that size, or bound the size: `torch.export.Dim("batch", max=...)`.
    """


@dataclass(frozen=True)
class _Step:
    """A node made ready: its callable, and the values that nobody reads after it."""

    node: Node
    function: Callable[..., Any]
    dead: tuple[str, ...]


class Exported:
    """A whole program as a graph, with its state: call it as the function that was exported.

    `graph` is the program as data, `state` its parameters, buffers and constants by name ("layer.weight").
    """

    def __init__(self, graph: ExportedGraph, state: Mapping[str, torch.Tensor]) -> None:
        self.graph = graph
        self.state = dict(state)
        self._steps = _prepared(graph)
        self._signature = inspect.Signature(
            [inspect.Parameter(name, _KINDS[kind]) for name, kind in graph.parameters]  # type: ignore[arg-type]
        )

    # ---------------------------------------------------------------- running

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result. State that the function updates (running statistics) is updated in `state`.

        GuardError for arguments that the program was not exported for. Nothing is recorded for gradients.
        """
        results, updates = self._run(args, kwargs)
        with torch.no_grad():
            for key, value in updates.items():
                self.state[key].copy_(value)
        return results

    def run(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        """(result, new values of the state that the function updates, by name); `state` itself stays as it is.

        Arguments that the function writes to are written to.
        """
        return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
        graph = self.graph
        values, sizes = self._checked(args, kwargs)
        given = {spec.name: values[spec.name] for spec in graph.inputs}
        self._check_separate_memory(given)
        with _plainly({one.spec.device for one in graph.inputs} | {held.spec.device for held in graph.state}):
            for one in graph.inputs:
                values[one.name] = _laid_out(values[one.name], one.spec, sizes)
            for held in graph.state:
                values[held.name] = self.state[held.key]
            for name in graph.seeds:
                values[name] = fx.draw_seed()
            keys = {held.name: held.key for held in graph.state}
            news = {target: name for target, name in graph.updates}
            _interpret(self._steps, values, sizes)
            owned = {_memory(self.state[held.key]) for held in graph.state}
            owned |= {_memory(given[target]) for target in news if target in given}
            owned.add(None)  # memory that nobody can name may be anyone's
            results = []
            for name, spec in graph.outputs:
                value = _laid_out(values[name], spec, sizes)
                results.append(value.clone() if _memory(value) in owned else value)
            # Values before writes: a new value may be a window on what another write replaces.
            fresh = {t: values[n].clone() if len(news) > 1 else values[n] for t, n in news.items()}
            updates = {keys[target]: value.clone() for target, value in fresh.items() if target in keys}
            for target, value in fresh.items():
                if target in given:
                    given[target].copy_(value)
        constants = lambda value: evaluate(value, sizes)  # noqa: E731
        return unflatten_plain(graph.results, iter(results), constants), updates

    def _checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
        """The arguments' tensors by the graph's names, and the sizes that they have."""
        graph = self.graph
        try:
            bound = dict(self._signature.bind(*args, **kwargs).arguments)
        except TypeError as error:
            names = ", ".join(name for name, _ in graph.parameters)
            raise GuardError(f"the program was exported for the arguments ({names}): {error}") from None
        leaves: list[tuple[str, torch.Tensor]] = []
        for name, want in zip(graph.arguments.keys, graph.arguments.children, strict=True):
            if name not in bound:  # an empty *args or **kwargs
                bound[name] = () if dict(graph.parameters)[name] == "VAR_POSITIONAL" else {}
            try:
                found, have = flatten_plain(bound[name], str(name))
            except NotPlain as error:
                raise GuardError(f"argument {error.place} is a {type(error.value).__name__}: {_HELP_PLAIN}") from None
            if difference := differing(have, want, f"argument {name}"):
                raise GuardError(f"{difference}; export again for this call")
            leaves += found
        if torch.get_default_dtype() != graph.default_dtype:
            raise GuardError(
                f"the default dtype is {torch.get_default_dtype()}, it was {graph.default_dtype} at the export; "
                f"call torch.set_default_dtype({graph.default_dtype})"
            )
        values = {spec.name: tensor for spec, (_, tensor) in zip(graph.inputs, leaves, strict=True)}
        return values, self._sizes(values)

    def _check_separate_memory(self, given: Mapping[str, torch.Tensor]) -> None:
        """What the program writes to is memory that nothing else of the call lies in: it was recorded so."""
        graph = self.graph
        if not graph.updates:
            return
        updated = {target for target, _ in graph.updates}
        places = {spec.name: f"argument {spec.place}" for spec in graph.inputs}
        tensors = dict(given)
        for held in graph.state:
            places[held.name], tensors[held.name] = f"the {held.kind} {held.key}", self.state[held.key]
        arguments = [spec.name for spec in graph.inputs]
        for name in arguments:
            for other in arguments if name in updated else ():
                if other != name and _overlap(tensors[name], tensors[other]):
                    raise GuardError(
                        f"{places[name]}, which the program writes to, shares memory with {places[other]}, as it did "
                        "not at the export; pass tensors with memory of their own (tensor.clone())"
                    )
        for held in graph.state:
            for name in arguments:
                if (name in updated or held.name in updated) and _overlap(tensors[name], tensors[held.name]):
                    written = places[name] if name in updated else places[held.name]
                    raise GuardError(
                        f"{places[name]} shares memory with {places[held.name]}, and the program writes to {written}; "
                        "pass a copy (tensor.clone())"
                    )

    def _sizes(self, values: Mapping[str, torch.Tensor]) -> dict[str, int]:
        sizes: dict[str, int] = {}
        first: dict[str, str] = {}
        for given in self.graph.inputs:
            _check_tensor(values[given.name], given.place, given.spec)
        # Plain symbols first, so that every relation between sizes is checked with what it is made of known.
        pairs = [(g, axis, want) for g in self.graph.inputs for axis, want in enumerate(g.spec.shape)]
        pairs.sort(key=lambda pair: 0 if isinstance(pair[2], SizeExpr) and pair[2].op == "size" else 1)
        for given, axis, want in pairs:
            actual = values[given.name].shape[axis]
            place = f"argument {given.place}: dimension {axis}"
            try:
                solved = solve(want, actual, sizes)
            except ValueError:
                raise GuardError(
                    f"{place} is {actual}, which is not {want} for any whole number; pass another"
                ) from None
            if solved is not None:
                sizes[solved[0]] = solved[1]
                first[solved[0]] = f"dimension {axis} of {given.place}"
                self._check_size(place, actual, solved[0], solved[1])
                continue
            expected = evaluate(want, sizes)
            if actual == expected:
                continue
            if isinstance(want, SizeExpr):
                origins = ", ".join(f"{name} = {sizes[name]} from {first[name]}" for name in sorted(names_in(want)))
                raise GuardError(f"{place} is {actual}, not {want} = {expected} ({origins}); pass tensors that agree")
            raise GuardError(
                f"{place} is {actual}, it was {expected} at the export; export again, or let it vary: "
                f"dynamic={{{_root(given.place)!r}: {{{axis}: 'name'}}}}"
            )
        return sizes

    def _check_size(self, place: str, actual: int, name: str, size: int) -> None:
        spec = next(s for s in self.graph.sizes if s.name == name)
        if size < spec.low or (spec.high is not None and size > spec.high) or size % spec.step != spec.rest:
            raise GuardError(f"{place} is {actual}, so {name} = {size}; the program was exported for {spec}")

    # ---------------------------------------------------------------- other forms

    def __getstate__(self) -> dict[str, Any]:
        """For copies and for other processes: the program as data; what runs it is made anew there."""
        return {"graph": self.graph, "state": self.state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["graph"], state["state"])  # type: ignore[misc]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the program and its state to one file, without pickle; `torchlazy.load(path)` reads it."""
        file.write(path, self.graph, self.state)

    def graph_module(self) -> torch.fx.GraphModule:
        """The program as an FX module that runs as it is: inputs are the tensors among the arguments, in order."""
        return fx.graph_module(self.graph, self.state)

    def to_exported_program(self) -> torch.export.ExportedProgram:
        """The program as torch's own exported program, called as the exported function was: what was given by keyword
        is given so, in the same containers; named tuples and data classes are tuples and dicts there.

        Its parameters, buffers and constants are those of `state`, by name. NotConvertible where it draws random
        numbers, or takes a dtype or device as argument.
        """
        return program.to_exported_program(self.graph, self.state)

    @property
    def guards(self) -> list[str]:
        """What a call must keep, in words."""
        return self.graph.guards()

    def __repr__(self) -> str:
        inputs = ", ".join(f"{i.place}: {i.spec}" for i in self.graph.inputs)
        sizes = f"; {'; '.join(map(str, self.graph.sizes))}" if self.graph.sizes else ""
        return f"Exported({len(self.graph.nodes)} {self.graph.dialect} calls; {inputs}{sizes})"


_KINDS = {
    name: getattr(inspect.Parameter, name)
    for name in ("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD", "VAR_POSITIONAL", "KEYWORD_ONLY", "VAR_KEYWORD")
}
_HELP_PLAIN = "arguments are tensors, numbers, strings, None, and lists, tuples and dicts of those"


def load(
    path: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    operators: Collection[str] = (),
) -> Exported:
    """The program that `exported.save(path)` wrote; ExportedFileError where the file is no such thing.

    Its state goes to the device that it was exported on, or with everything else to `device` ("cpu", "cuda:0").
    ValueError for a device that there is none of. `operators` are names of operators ("mylib.scaled.default") that the
    file may call beside those of torch that compute on tensors alone.
    """
    try:
        place = None if device is None else str(torch.device(device))
    except (RuntimeError, TypeError) as error:
        raise ValueError(f'torchlazy.load: device {device!r} is none; use "cpu", "cuda" or "cuda:0"') from error
    if isinstance(operators, str):
        raise TypeError("torchlazy.load: operators is a str; pass a list of names")
    graph, state = file.read(path, operators)
    if place is not None:
        graph = fx.on_device(graph, place)
        return Exported(graph, {held.key: state[held.key].to(held.spec.device) for held in graph.state})
    try:
        return Exported(graph, {held.key: state[held.key].to(held.spec.device) for held in graph.state})
    except Exception as error:
        used = ", ".join(sorted({held.spec.device for held in graph.state} - {"cpu"}))
        raise file.ExportedFileError(
            f"{path}: its state cannot be put on {used or 'the CPU'} ({str(error)[:300]}); pass "
            'torchlazy.load(path, device="cpu")'
        ) from error


def _memory(tensor: torch.Tensor) -> int | None:
    """Which memory a tensor lies in; None where torch does not say: under a function transform, or in a recording."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors may have an element in common: their reaches within one memory meet."""
    if not a.numel() or not b.numel() or (found := _memory(a)) is None or found != _memory(b):
        return False
    (low_a, high_a), (low_b, high_b) = _reach(a), _reach(b)
    return low_a < high_b and low_b < high_a


def _reach(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its memory from its first element to behind its last."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    return start * tensor.element_size(), (start + last + 1) * tensor.element_size()


def _root(place: str) -> str:
    return place.split("[")[0].split(".")[0]


def _check_tensor(value: torch.Tensor, place: str, spec: TensorSpec) -> None:
    where = f"argument {place}"
    if value.dtype != spec.dtype:
        raise GuardError(f"{where} is {value.dtype}, the program was exported for {spec.dtype}; cast it")
    if value.layout is not torch.strided:
        raise GuardError(f"{where} is a {value.layout} tensor; pass a dense one")
    if value.device != torch.device(spec.device):
        raise GuardError(
            f"{where} is on {value.device}, the program was exported for {spec.device}; move it, or "
            f"load the program with device={str(value.device)!r}"
        )
    if value.dim() != len(spec.shape):
        raise GuardError(f"{where} has {value.dim()} dimensions, the program was exported for {len(spec.shape)}")


@contextmanager
def _plainly(devices: set[str]) -> Iterator[None]:
    """No gradients, and no autocast: its casts are in the graph already."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for kind in {torch.device(device).type for device in devices} | {"cpu"}:
            if torch.amp.is_autocast_available(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _prepared(graph: ExportedGraph) -> list[_Step]:
    last: dict[str, int] = {}
    for position, node in enumerate(graph.nodes):
        for name in (*refs_in(node.args), *refs_in([value for _, value in node.kwargs])):
            last[name] = position
        for name in output_names(node.outputs):
            last.setdefault(name, position)
    kept = {name for name, _ in graph.outputs} | {name for _, name in graph.updates}
    dying: dict[int, list[str]] = {}
    for name, position in last.items():
        if name not in kept:
            dying.setdefault(position, []).append(name)
    return [_Step(node, fx.callable_of(node.op), tuple(dying.get(i, ()))) for i, node in enumerate(graph.nodes)]


def _interpret(steps: list[_Step], values: dict[str, Any], sizes: Mapping[str, int]) -> None:
    """Run every step; `values` then holds what the outputs and updates name."""

    def value_of(argument: Any) -> Any:
        kind = type(argument)
        if kind is Ref:
            return values[argument.name]
        if kind is SizeExpr:
            return evaluate(argument, sizes)
        if kind is tuple or kind is list:
            return kind(value_of(item) for item in argument)
        return argument

    for step in steps:
        node = step.node
        args = [value_of(a) for a in node.args]
        if node.layout is not None:
            by_address = node.op in BY_ADDRESS
            args[0] = _laid_out(args[0], node.layout, sizes, at_start=by_address)
        result = step.function(*args, **{name: value_of(v) for name, v in node.kwargs})
        _bind(node, node.outputs, result, values)
        for name, (shape, dtype) in zip(output_names(node.outputs), node.specs, strict=True):
            value = values[name]
            if value is None:
                continue  # a helper result that this call does not need (oneDNN's workspace)
            if value.dtype != dtype or any(n != evaluate(want, sizes) for n, want in zip(value.shape, shape)):
                wanted = [evaluate(n, sizes) for n in shape]
                raise ExportedRunError(
                    f"{node.op} gave {value.dtype} of shape {list(value.shape)}, the export predicted {dtype} of "
                    f"{wanted}\nwhere: {node.frame or '?'}, at the sizes {dict(sizes)}\n"
                    "remedy: export again with example arguments of these sizes"
                )
        for name in step.dead:
            values.pop(name, None)


def _bind(node: Node, outputs: Any, result: Any, values: dict[str, Any]) -> None:
    if isinstance(outputs, str):
        values[outputs] = result
    elif isinstance(outputs, (tuple, list)):
        for item, value in zip(outputs, result, strict=False):
            _bind(node, item, value, values)


def _laid_out(value: torch.Tensor, spec: TensorSpec, sizes: Mapping[str, int], at_start: bool = False) -> torch.Tensor:
    shape = tuple(evaluate(n, sizes) for n in spec.shape)
    strides = tuple(evaluate(n, sizes) for n in spec.strides)
    return fx.lay_out(value, shape, strides, at_start)


__all__ = ["Exported", "ExportedRunError", "GuardError", "load"]

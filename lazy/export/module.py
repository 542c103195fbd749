"""An exported graph as a module that torch's exporter can trace: its calls in order, by torch's operators.

Invariant: only operators of torch (and of the user's own libraries) are called, so that the traced program needs
nothing of this package. Written arguments and state take their new values after everything was computed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import traceback
from torchlazy.lazy.export.expressions import SizeExpr, evaluate, solve
from torchlazy.lazy.export.front_door import ExportError
from torchlazy.lazy.export.graph import BY_ADDRESS, ExportedGraph, Node, Ref, TensorSpec
from torchlazy.lazy.export.tree import Tree, flatten_plain, unflatten_plain
from torchlazy.runtime.program.steps import may_alias, resolve_overload

aten = torch.ops.aten
FRAME = "torchlazy_frame"  # the user's line, among the `custom` metadata of a traced node


@dataclass(frozen=True)
class Parameter:
    """An argument that was given: its `inspect` kind, a keyword where it was given by keyword; its structure."""

    name: str
    kind: str
    tree: Tree


def in_order(parameters: Sequence[Parameter]) -> list[Parameter]:
    """As a signature lists them: keywords after all others."""
    return sorted(parameters, key=lambda parameter: parameter.kind == "KEYWORD_ONLY")


class GraphCalls(torch.nn.Module):
    """The graph with its state, called as the exported function is.

    Parameters keep their kind unless the program writes to them, which makes them buffers. `asserts_sizes`: the bounds
    of sizes and the relations between them are assertions of the program (`torch._check`).
    """

    def __init__(
        self,
        graph: ExportedGraph,
        state: Mapping[str, torch.Tensor],
        parameters: Sequence[Parameter],
        asserts_sizes: bool,
    ) -> None:
        super().__init__()
        updated = {target for target, _ in graph.updates}
        for held in graph.state:
            _attach(self, held.key, state[held.key], held.kind == "parameter" and held.name not in updated)
        signature = inspect.Signature(
            [inspect.Parameter(p.name, getattr(inspect.Parameter, p.kind)) for p in in_order(parameters)]
        )

        def forward(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs).arguments
            tensors = [t for p in parameters for _, t in flatten_plain(bound.get(p.name, ()))[0]]
            return _Run(graph, self, tensors, asserts_sizes).result()

        forward.__signature__ = signature  # type: ignore[attr-defined]
        self.__dict__["forward"] = forward


class _Run:
    """One run of the graph, on tensors with numbers or with symbolic sizes."""

    def __init__(
        self, graph: ExportedGraph, module: torch.nn.Module, tensors: Sequence[torch.Tensor], asserts_sizes: bool
    ) -> None:
        self.graph = graph
        self.memory: dict[str, torch.Tensor] = {}  # arguments and state, as updates write to them
        self.values: dict[str, Any] = {}
        updated = {target for target, _ in graph.updates}
        for given, tensor in zip(graph.inputs, tensors, strict=True):
            aten._assert_tensor_metadata.default(tensor, dtype=given.spec.dtype)
            self.memory[given.name] = tensor
            # Another tensor than the one that is written to: the tracer knows values by their tensors.
            source = aten.alias.default(tensor) if given.name in updated else tensor
            self.values[given.name] = _dense(source, given.order)
        for held in graph.state:
            found: Any = functools.reduce(getattr, held.key.split("."), module)
            self.memory[held.name] = self.values[held.name] = found
        self.aliasing = set(self.values)  # values that may be windows on what an update writes to
        self.drawn: dict[Any, torch.Tensor] = {}
        self.sizes = self._read_sizes(tensors)
        if asserts_sizes:
            self._assert_sizes(tensors)

    def _read_sizes(self, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Symbolic sizes, each read off the first dimension that tells it."""
        pairs = [
            (want, tensor.shape[axis])
            for given, tensor in zip(self.graph.inputs, tensors, strict=True)
            for axis, want in enumerate(given.spec.shape)
        ]
        sizes: dict[str, Any] = {}
        for want, actual in sorted(
            pairs, key=lambda pair: not (isinstance(pair[0], SizeExpr) and pair[0].op == "size")
        ):
            solved = solve(want, actual, sizes)
            if solved is not None:
                sizes[solved[0]] = solved[1]
        return sizes

    def _assert_sizes(self, tensors: Sequence[torch.Tensor]) -> None:
        for spec in self.graph.sizes:
            size = self.sizes[spec.name]
            torch._check(size >= spec.low)
            if spec.high is not None:
                torch._check(size <= spec.high)
            if spec.step > 1:
                torch._check(size % spec.step == spec.rest)
        for given, tensor in zip(self.graph.inputs, tensors, strict=True):
            for axis, want in enumerate(given.spec.shape):
                torch._check(tensor.shape[axis] == evaluate(want, self.sizes))

    def result(self) -> Any:
        """The function's result, once arguments and state have their new values."""
        for node in self.graph.nodes:
            with traceback.annotate({FRAME: node.frame}):
                self._call(node)
        results = [self._own(name) for name, _ in self.graph.outputs]
        news = [(target, self._own(name)) for target, name in self.graph.updates]
        for target, value in news:
            self.memory[target].copy_(value)
        return unflatten_plain(self.graph.results, iter(results), self._value)

    def _call(self, node: Node) -> None:
        args = [self._value(a) for a in node.args]
        kwargs = {name: self._value(value) for name, value in node.kwargs}
        if node.op == "torchlazy.random_bits.default":
            made = self._draw(node, args, kwargs["device"])
        elif node.op == "torchlazy.checked.default":
            aten._assert_async.msg(args[1].all(), args[2])
            made = args[0].clone()
        else:
            if node.op.startswith("torchlazy."):
                raise ExportError(f"torchlazy.export: {node.op} is no operator of torch\nwhere: {node.frame or '?'}")
            if node.op in BY_ADDRESS and node.layout is not None:
                args[0] = self._laid_out(args[0], node.layout)
            made = resolve_overload(node.op)(*args, **kwargs)
            if _takes_default_dtype(args, kwargs, made):
                aten._assert_tensor_metadata.default(made, dtype=made.dtype)
        self._bind(node, node.outputs, made)

    def _draw(self, node: Node, args: Sequence[Any], device: torch.device) -> torch.Tensor:
        """32 random bits for each element, by torch's own generator; the same ones for the same seed and stream."""
        key = str(node.args)
        if key not in self.drawn:
            self.drawn[key] = torch.randint(-(1 << 31), 1 << 31, args[0], dtype=torch.int32, device=device)
        return self.drawn[key]

    def _value(self, argument: Any) -> Any:
        if isinstance(argument, Ref):
            return self.values.get(argument.name)  # a seed has no value: torch's generator is the program's
        if isinstance(argument, SizeExpr):
            return evaluate(argument, self.sizes)
        if isinstance(argument, (list, tuple)):
            return type(argument)(self._value(item) for item in argument)
        return argument

    def _bind(self, node: Node, outputs: Any, made: Any) -> None:
        if isinstance(outputs, str):
            self.values[outputs] = made
            if node.op == "aten._unsafe_view.default" or may_alias(node.op):
                self.aliasing.add(outputs)
        elif isinstance(outputs, (list, tuple)):
            for item, part in zip(outputs, made, strict=False):
                self._bind(node, item, part)

    def _own(self, name: str) -> torch.Tensor:
        """The value; a copy where it may be a window on what an update writes to."""
        value: torch.Tensor = self.values[name]
        return value.clone() if self.graph.updates and name in self.aliasing else value

    def _laid_out(self, value: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        """`value` in the layout of the export, at the start of its memory."""
        shape, strides = self._value(spec.shape), self._value(spec.strides)
        if value.stride() == strides and value.storage_offset() == 0:
            return value
        return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device).copy_(value)


def _dense(tensor: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """The tensor without gaps, its axes in this order in memory, as the recording had it; itself where it lies so."""
    if order == tuple(range(tensor.dim())):
        return aten.contiguous.default(tensor)  # type: ignore[no-any-return]
    back = sorted(range(tensor.dim()), key=order.__getitem__)
    return aten.contiguous.default(tensor.permute(order)).permute(back)  # type: ignore[no-any-return]


def _takes_default_dtype(args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> bool:
    """Whether torch's default dtype decides that of the result: nothing among the operands does."""
    if not isinstance(made, torch.Tensor) or not (made.is_floating_point() or made.is_complex()):
        return False
    given = [*_parts(args), *_parts(list(kwargs.values()))]
    return not any(
        isinstance(v, torch.dtype) or (isinstance(v, torch.Tensor) and (v.is_floating_point() or v.is_complex()))
        for v in given
    )


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _parts(item)
    else:
        yield value


def _attach(root: torch.nn.Module, key: str, tensor: torch.Tensor, is_parameter: bool) -> None:
    """Put a tensor at a dotted name, with a bare module for each part of the way."""
    *way, name = key.split(".")
    place = root
    for part in way:
        if not hasattr(place, part):
            place.add_module(part, torch.nn.Module())
        place = getattr(place, part)
    if is_parameter:
        place.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    else:
        place.register_buffer(name, tensor)


__all__ = ["FRAME", "GraphCalls", "Parameter", "in_order"]

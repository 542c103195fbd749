"""Exported graphs as FX modules that run as they are, and what these share with the loader's own way of running.

Invariant: the module computes what `exported_run` computes, with sizes read off its inputs; it does not check guards.
"""

from __future__ import annotations

import importlib
import math
import operator
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import fx
from torchlazy.runtime.errors import RuntimeLayerError
from torchlazy.runtime.exported.graph import BY_ADDRESS, ExportedGraph, Node, Ref
from torchlazy.runtime.exported.sizes import SizeExpr, names_in
from torchlazy.runtime.exported.tree import unflatten_plain
from torchlazy.runtime.program.steps import may_alias, resolve_overload

aten = torch.ops.aten


def rsqrt(x: Any) -> Any:
    """1 / sqrt(x), as Python's power computes it."""
    return x**-0.5


OPERATORS: dict[str, Any] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv,
    "truediv": operator.truediv, "sqrt": getattr(torch, "sym_sqrt", math.sqrt), "rsqrt": rsqrt,
    "float": torch.sym_float,
}  # fmt: skip


def lay_out(value: torch.Tensor, shape: Any, strides: Any, at_start: bool = False) -> torch.Tensor:
    """`value` with these strides, in other memory where it has others; `at_start`: at the start of its memory."""
    pairs = zip(shape, value.stride(), strides, strict=True)
    same = all(n == 1 or have == want for n, have, want in pairs)
    if same and not at_start:
        return value
    if same and value.storage_offset() == 0 and value.stride() == tuple(strides):
        return value
    return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device).copy_(value)


def draw_seed() -> int:
    """63 bits from torch's CPU generator, as the lazy device draws them: `torch.manual_seed` rules the numbers."""
    return int(torch.empty((), dtype=torch.int64).random_().item())


def callable_of(op: str) -> Any:
    """The operator or primitive that a node names."""
    if op.startswith("prims."):
        # Only programs in that dialect need the table of primitives.
        name = op.removeprefix("prims.")
        found = importlib.import_module("torchlazy.prims.ops").PRIMS.get(name)
        if found is None:
            raise RuntimeLayerError(f"no primitive {name!r} in this torchlazy; export the program again")
        return found
    overload = resolve_overload(op)
    if overload._schema.is_mutable:
        raise RuntimeLayerError(f"{op} writes to its arguments, which no exported graph does; export the program again")
    return overload


def graph_module(graph: ExportedGraph, state: Mapping[str, torch.Tensor]) -> fx.GraphModule:
    """The program as an FX module: a placeholder for each tensor argument, `get_attr` for its state."""
    return _FxBuilder(graph, state).build()


def on_device(graph: ExportedGraph, device: str) -> ExportedGraph:
    """The same program for another device: everything that stands on the accelerator, or else on the CPU, moves."""
    used = {spec.spec.device for spec in graph.inputs} | {held.spec.device for held in graph.state}
    used |= {str(c) for node in graph.nodes for c in _devices((node.args, node.kwargs))}
    accelerators = used - {"cpu"}
    moving = accelerators or {"cpu"}

    def moved(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device(device) if str(value) in moving else value
        if isinstance(value, (list, tuple)):
            return type(value)(moved(item) for item in value)
        if is_dataclass(value) and not isinstance(value, type):
            changed = {f.name: moved(getattr(value, f.name)) for f in fields(value)}
            if changed.get("device") in moving:
                changed["device"] = device
            return replace(value, **changed)
        return value

    return moved(graph)


def _devices(value: Any) -> list[torch.device]:
    if isinstance(value, torch.device):
        return [value]
    return [found for item in value for found in _devices(item)] if isinstance(value, (list, tuple)) else []


class _FxBuilder:
    """One FX graph in the making."""

    def __init__(self, graph: ExportedGraph, state: Mapping[str, torch.Tensor]) -> None:
        self.source = graph
        self.state = state
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        self.values: dict[str, fx.Node] = {}
        self.numbers: dict[SizeExpr, Any] = {}
        self.aliasing: set[str] = set()

    def build(self) -> fx.GraphModule:
        source = self.source
        for given in source.inputs:
            self.values[given.name] = self.graph.placeholder(given.name)
        updated = {target for target, _ in source.updates}
        for held in source.state:
            tensor = self.state[held.key]
            _attach(self.root, held.key, tensor, held.kind == "parameter" and held.name not in updated)
            self.values[held.name] = self.graph.get_attr(held.key)
        self.aliasing |= set(self.values)
        for name in source.seeds:
            self.values[name] = self.graph.call_function(draw_seed)
        for node in source.nodes:
            self._add(node)
        self._finish()
        module = fx.GraphModule(self.root, self.graph)
        module.graph.lint()
        module.recompile()
        return module

    def _size(self, name: str) -> Any:
        """A symbolic size, read off the first dimension that tells it."""
        telling = [
            (given, axis, expr)
            for given in self.source.inputs
            for axis, expr in enumerate(given.spec.shape)
            if isinstance(expr, SizeExpr) and names_in(expr) == {name}
        ]
        given, axis, expr = min(telling, key=lambda found: found[2].op != "size")
        return self._inverted(expr, self.graph.call_function(aten.sym_size.int, (self.values[given.name], axis)))

    def _inverted(self, expr: Any, actual: Any) -> Any:
        """The symbol in `expr`, which sums and products with constants are made around, given its value."""
        if expr.op == "size":
            return actual
        a, b = expr.args
        inner, known = (a, b) if isinstance(a, SizeExpr) else (b, a)
        if expr.op == "add":
            return self._inverted(inner, self.graph.call_function(operator.sub, (actual, known)))
        if expr.op == "sub":
            step = (actual, known) if inner is a else (known, actual)
            return self._inverted(inner, self.graph.call_function(operator.add if inner is a else operator.sub, step))
        return self._inverted(inner, self.graph.call_function(operator.floordiv, (actual, known)))

    def _value(self, argument: Any) -> Any:
        if isinstance(argument, Ref):
            return self.values[argument.name]
        if isinstance(argument, SizeExpr):
            found = self.numbers.get(argument)
            if found is None and argument.op == "size":
                found = self.numbers[argument] = self._size(argument.args[0])
            elif found is None:
                parts = tuple(self._value(a) for a in argument.args)
                found = self.numbers[argument] = self.graph.call_function(OPERATORS[argument.op], parts)
            return found
        if isinstance(argument, (list, tuple)):
            return type(argument)(self._value(item) for item in argument)
        return argument

    def _add(self, node: Node) -> None:
        args = [self._value(a) for a in node.args]
        if node.layout is not None and (node.op in BY_ADDRESS or node.op == "prims.convert"):
            shape, strides = self._value(node.layout.shape), self._value(node.layout.strides)
            args[0] = self.graph.call_function(lay_out, (args[0], shape, strides, node.op in BY_ADDRESS))
        kwargs = {name: self._value(value) for name, value in node.kwargs}
        made = self.graph.call_function(callable_of(node.op), tuple(args), kwargs)
        made.meta["frame"] = node.frame
        self._bind(node, node.outputs, made)

    def _bind(self, node: Node, outputs: Any, made: fx.Node) -> None:
        if isinstance(outputs, str):
            self.values[outputs] = made
            if node.op.startswith("prims.") or node.op == "aten._unsafe_view.default" or may_alias(node.op):
                self.aliasing.add(outputs)
        elif isinstance(outputs, (list, tuple)):
            for position, item in enumerate(outputs):
                if item is not None:
                    self._bind(node, item, self.graph.call_function(operator.getitem, (made, position)))

    def _own(self, name: str) -> fx.Node:
        """The value; a copy where it may be a window on what an update writes to."""
        if not self.source.updates or name not in self.aliasing:
            return self.values[name]
        return self.graph.call_function(aten.clone.default, (self.values[name],))

    def _finish(self) -> None:
        results = [self._own(name) for name, _ in self.source.outputs]
        news = [(target, self._own(name)) for target, name in self.source.updates]
        for target, value in news:
            self.graph.call_function(aten.copy_.default, (self.values[target], value))
        self.graph.output(unflatten_plain(self.source.results, iter(results), self._value))  # type: ignore[arg-type]


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

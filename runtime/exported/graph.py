"""An exported graph as data: one whole graph of functional operators, its inputs, state, sizes and guards.

Invariant: nothing here is code and nothing refers to the model's classes. Values have names; a name is given once,
before it is read; numbers that depend on sizes are `SizeExpr`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torchlazy.runtime.exported.sizes import SizeExpr
from torchlazy.runtime.exported.tree import Tree

# They count in memory: their first operand must lie as it did at the export.
BY_ADDRESS = frozenset(
    {"aten.as_strided.default", "aten.as_strided_scatter.default", "prims.as_strided", "prims.as_strided_scatter"}
)


@dataclass(frozen=True, slots=True)
class Ref:
    """A value of the graph, by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor must be: shape and strides (ints or SizeExpr; elements), dtype, device."""

    shape: tuple[int | SizeExpr, ...]
    strides: tuple[int | SizeExpr, ...]
    dtype: torch.dtype
    device: str

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}] on {self.device}"


@dataclass(frozen=True, slots=True)
class InputSpec:
    """A tensor among the arguments: `place` is how the caller reaches it ("x", "batch['ids']")."""

    name: str
    place: str
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A tensor that the graph brings along: `key` names it ("layer.weight"); `kind` is "parameter", "buffer" or
    "constant" (a tensor that the program found elsewhere)."""

    name: str
    key: str
    kind: str
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class SizeSpec:
    """A symbolic size: at least `low`, at most `high` (None: no bound), a multiple of `step` plus `rest`.

    `seen` are the sizes that the program was recorded at.
    """

    name: str
    low: int
    high: int | None
    step: int = 1
    rest: int = 0
    seen: tuple[int, ...] = ()

    def __str__(self) -> str:
        bound = f"{self.low} <= {self.name}" + (f" <= {self.high}" if self.high is not None else "")
        return bound + (f", {self.name} % {self.step} == {self.rest}" if self.step > 1 else "")


@dataclass(frozen=True, slots=True)
class Node:
    """One call. `op` is "aten.add.Tensor" or, in the prims dialect, "prims.add".

    `outputs` is a name, None, or a tuple of those; `specs` the (shape, dtype) of each named output in order. `layout`
    is how the first operand must lie in memory where the operator counts in memory, or is a copy into that layout.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: Any
    specs: tuple[tuple[tuple[int | SizeExpr, ...], torch.dtype], ...]
    frame: str = ""
    layout: TensorSpec | None = None


@dataclass(frozen=True, slots=True)
class ExportedGraph:
    """Everything about an exported program but the numbers in its state."""

    dialect: str  # "aten" or "prims"
    parameters: tuple[tuple[str, str], ...]  # (name, kind) of the arguments that were given, kinds as in `inspect`
    arguments: Tree  # a dict: argument name -> structure
    inputs: tuple[InputSpec, ...]
    state: tuple[StateSpec, ...]
    seeds: tuple[str, ...]  # numbers drawn anew for each run
    sizes: tuple[SizeSpec, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[tuple[str, TensorSpec], ...]  # the result's tensors, laid out as the program laid them out
    results: Tree
    updates: tuple[tuple[str, str], ...]  # (input or state, the value that it holds afterwards)
    default_dtype: torch.dtype = torch.float32
    notes: tuple[tuple[str, str], ...] = field(default=())
    keywords: tuple[str, ...] = ()  # of the parameters those that were given by keyword

    def guards(self) -> list[str]:
        """What a call must keep, in words."""
        lines = []
        for given in self.inputs:
            lines.append(f"{given.place}: {given.spec}")
        for tree, place in _constants(self.arguments, ""):
            lines.append(f"{place} is {tree.value!r}")
        lines += [str(size) for size in self.sizes]
        return lines

    def text(self) -> str:
        """The graph for people: one call a line with shapes and the user's lines."""
        lines = [f"exported graph, {self.dialect} dialect: {len(self.nodes)} calls"]
        lines += [f"size {size}" for size in self.sizes]
        lines += [f"{i.name} = argument {i.place}: {i.spec}" for i in self.inputs]
        lines += [f"{s.name} = {s.kind} {s.key}: {s.spec}" for s in self.state]
        lines += [f"{name} = a seed, drawn anew for each run" for name in self.seeds]
        for node in self.nodes:
            arguments = [show(a) for a in node.args] + [f"{name}={show(v)}" for name, v in node.kwargs]
            metas = ", ".join(
                f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]" for shape, dtype in node.specs
            )
            frame = f"  # {node.frame}" if node.frame else ""
            lines.append(f"{_names(node.outputs)} = {node.op}({', '.join(arguments)})  : {metas}{frame}")
        lines += [f"{target} becomes {value}" for target, value in self.updates]
        lines.append(f"return {', '.join(name for name, _ in self.outputs)}")
        return "\n".join(lines) + "\n"


def show(value: Any) -> str:
    """An argument as text."""
    if isinstance(value, Ref):
        return value.name
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(show, value))}]"
    return str(value)


def refs_in(value: Any) -> Iterator[str]:
    """The names of the values inside an argument."""
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from refs_in(item)


def output_names(outputs: Any) -> Iterator[str]:
    """The names of a node's results, in order."""
    if isinstance(outputs, str):
        yield outputs
    elif isinstance(outputs, (list, tuple)):
        for item in outputs:
            yield from output_names(item)


def _names(outputs: Any) -> str:
    if outputs is None or isinstance(outputs, str):
        return outputs or "_"
    return ", ".join(map(_names, outputs))


def _constants(tree: Tree, place: str) -> Iterator[tuple[Tree, str]]:
    if tree.kind == "constant":
        yield tree, place
    for position, child in enumerate(tree.children):
        if tree.kind == "dict":
            inner = f"{place}[{tree.keys[position]!r}]" if place else str(tree.keys[position])
        else:
            inner = f"{place}.{tree.keys[position]}" if tree.keys else f"{place}[{position}]"
        yield from _constants(child, inner)

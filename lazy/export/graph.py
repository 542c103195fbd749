"""An exported graph as data: one whole graph of functional operators, its inputs, state, sizes and results.

Invariant: nothing here is code and nothing refers to the model's classes. Values have names; a name is given once,
before it is read; numbers that depend on sizes are `SizeExpr`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchlazy.lazy.export.expressions import SizeExpr
from torchlazy.lazy.export.tree import Tree

# They count in memory: their first operand must lie as it did at the export.
BY_ADDRESS = frozenset({"aten.as_strided.default", "aten.as_strided_scatter.default"})


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


@dataclass(frozen=True, slots=True)
class InputSpec:
    """A tensor among the arguments; `order` are its axes as they lie in memory, the outermost first."""

    name: str
    spec: TensorSpec
    order: tuple[int, ...]


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


@dataclass(frozen=True, slots=True)
class Node:
    """One call of an ATen operator ("aten.add.Tensor").

    `outputs` is a name, None, or a tuple of those; `specs` the (shape, dtype) of each named output in order. `layout`
    is how the first operand must lie in memory where the operator counts in memory.
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

    parameters: tuple[tuple[str, str], ...]  # (name, kind) of the arguments that were given, kinds as in `inspect`
    arguments: Tree  # a dict: argument name -> structure
    inputs: tuple[InputSpec, ...]
    state: tuple[StateSpec, ...]
    sizes: tuple[SizeSpec, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[tuple[str, TensorSpec], ...]  # the result's tensors, laid out as the program laid them out
    results: Tree
    updates: tuple[tuple[str, str], ...]  # (input or state, the value that it holds afterwards)
    keywords: tuple[str, ...] = ()  # of the parameters those that were given by keyword


def refs_in(value: Any) -> Iterator[str]:
    """The names of the values inside an argument."""
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from refs_in(item)

"""Unifies recordings of one program at several sizes: one graph whose numbers are expressions of the sizes.

Invariant: at each recorded size the graph is that recording, call by call and number by number; where no expression
says so, or two recordings differ in more than numbers, an `ExportError` names the line.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torchlazy.lazy.export.fit import Fit, NoFit
from torchlazy.lazy.export.front_door import ExportError
from torchlazy.lazy.export.graph import BY_ADDRESS, Node, Ref, TensorSpec
from torchlazy.prims.meta import TensorMeta


class NoExpression(ExportError):
    """A number of the program is none of the expressions of its sizes that are looked for."""


class Unified:
    """The calls of several graphs of one structure as one; `names` gives placeholders their names in the result."""

    def __init__(self, graphs: Sequence[fx.Graph], points: Sequence[Mapping[str, int]], names: Mapping[str, str]):
        self.points = points
        self.fit = Fit(points)
        self._rows = list(zip(*(list(graph.nodes) for graph in graphs), strict=False))
        self._positions = {node: i for i, row in enumerate(self._rows) for node in row}
        self._counts = [len(graph.nodes) for graph in graphs]
        self._names: dict[fx.Node, Any] = {}
        self._number = 0
        self._placeholders = dict(names)
        self.outputs: list[tuple[str, TensorSpec]] = []

    def nodes(self, scalars: Mapping[str, Sequence[float]]) -> list[Node]:
        """All calls in order. `scalars` are the values of the placeholders that are numbers, at each point."""
        self._check_structure()
        if len(self.points) > 1:
            self.fit.prepare(self._all_numbers())
        made: list[Node] = []
        for row in self._rows:
            first = row[0]
            if first.op == "placeholder":
                self._bind_placeholder(row, scalars)
            elif first.op == "output":
                for parts in zip(*(n.args[0] for n in row), strict=True):
                    self.outputs.append((self._names[parts[0]], self._spec(parts)))
            elif first.target is operator.getitem:
                self._names[first] = self._names[first.args[0]][first.args[1]]
            else:
                made.append(self._node(row))
        return made

    def number(self, values: Sequence[Any], where: str) -> Any:
        """The expression of a number with these values at the points."""
        first = values[0]
        if all(type(v) is type(first) and (v == first or v is first) for v in values) and not isinstance(first, float):
            return first
        try:
            if all(type(v) is int for v in values):
                return self.fit.of(values)
            if all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values):
                return self.fit.of_float([float(v) for v in values])
        except NoFit:
            pass
        pairs = ", ".join(f"{value} at {dict(point)}" for value, point in list(zip(values, self.points))[:4])
        raise NoExpression(
            f"torchlazy.export: a number moves with the sizes in a way that no expression was found for: {pairs}\n"
            f"where: {where or '?'}\nremedy: leave that size out of `dynamic`, or compute the number on tensors"
        )

    def spec(self, metas: Sequence[TensorMeta], where: str) -> TensorSpec:
        """A tensor's metadata over the points."""
        first = metas[0]
        if any((m.dtype, m.device, m.rank) != (first.dtype, first.device, first.rank) for m in metas):
            raise ExportError(f"torchlazy.export: a value has another dtype or rank at another size\nwhere: {where}")
        return TensorSpec(
            tuple(self.number(ns, where) for ns in zip(*(m.shape for m in metas), strict=True)),
            tuple(self.number(ns, where) for ns in zip(*(m.strides for m in metas), strict=True)),
            first.dtype,
            first.device,
        )

    # ---------------------------------------------------------------- structure

    def _check_structure(self) -> None:
        for row in self._rows:
            first = row[0]
            for position, other in enumerate(row[1:], 1):
                if "output" in (other.op, first.op) and other.op != first.op:
                    break  # one graph continues where the other ends
                if other.op != first.op or (other.op != "placeholder" and other.target is not first.target):
                    raise ExportError(
                        f"torchlazy.export: the program takes another path at {dict(self.points[position])} than at "
                        f"{dict(self.points[0])}: {_called(other)} instead of {_called(first)}\n"
                        f"where: {other.meta.get('frame') or first.meta.get('frame') or '?'}\n"
                        "remedy: leave that size out of `dynamic`, or bound it: torch.export.Dim(name, min=, max=)"
                    )
        if len(set(self._counts)) > 1:
            raise ExportError(
                f"torchlazy.export: the program makes another number of calls at other sizes: {self._counts}\n"
                "remedy: leave that size out of `dynamic` (a loop over a size is as long as the size)"
            )

    def _all_numbers(self) -> Iterator[tuple[int, ...]]:
        """Every whole number of the graphs that moves, small ones among shapes first."""
        for row in self._rows:
            metas = [n.meta.get("val") for n in row]
            several = isinstance(metas[0], (tuple, list))
            read = _results_read(row) if several else {0}
            for position, parts in enumerate(zip(*(_parts(m) for m in metas), strict=False)):
                if position in read and all(isinstance(p, TensorMeta) for p in parts):
                    yield from zip(*(p.shape for p in parts), strict=False)
            yield from zip(*(_ints(n.args) + _ints(n.kwargs) for n in row), strict=False)

    # ---------------------------------------------------------------- values

    def _bind_placeholder(self, row: Sequence[fx.Node], scalars: Mapping[str, Sequence[float]]) -> None:
        name = str(row[0].target)
        if name in scalars:
            self._names[row[0]] = self.number(scalars[name], "a number of the program")
        else:
            self._names[row[0]] = self._placeholders[name]

    def _node(self, row: Sequence[fx.Node]) -> Node:
        first = row[0]
        frame = first.meta.get("frame", "")
        where = f"{_called(first)} at {frame or '?'}"
        args = tuple(self._argument([n.args[i] for n in row], where) for i in range(len(first.args)))
        kwargs = tuple((k, self._argument([n.kwargs[k] for n in row], where)) for k in first.kwargs)
        specs: list[Any] = []
        metas = [n.meta["val"] for n in row]
        if isinstance(metas[0], (tuple, list)):
            read = _results_read(row)
            outputs: Any = tuple(
                self._fresh(parts, specs, where) if position in read else None
                for position, parts in enumerate(zip(*metas, strict=True))
            )
        else:
            outputs = self._fresh(metas, specs, where)
        self._names[first] = outputs
        op = _called(first)
        layout = None
        if op in BY_ADDRESS and isinstance(first.args[0], fx.Node):
            layout = self._spec([n.args[0] for n in row])  # type: ignore[misc]
        return Node(op, args, kwargs, outputs, tuple(specs), frame, layout)

    def _fresh(self, metas: Sequence[Any], specs: list[Any], where: str) -> Any:
        """Names for a call's results, and the shape and dtype of each."""
        first = metas[0]
        if isinstance(first, TensorMeta):
            self._number += 1
            shape = tuple(self.number(ns, where) for ns in zip(*(m.shape for m in metas), strict=True))
            specs.append((shape, first.dtype))
            return f"v{self._number}"
        if first is None or not isinstance(first, (tuple, list)):
            return None
        return tuple(self._fresh(parts, specs, where) for parts in zip(*metas, strict=True))

    def _argument(self, values: Sequence[Any], where: str) -> Any:
        first = values[0]
        if isinstance(first, fx.Node):
            found = self._names[first]
            if any(self._positions[v] != self._positions[first] for v in values[1:]):
                raise ExportError(f"torchlazy.export: another operand at another size\nwhere: {where}")
            return Ref(found) if isinstance(found, str) else found
        if isinstance(first, (list, tuple)):
            if any(len(v) != len(first) for v in values):
                raise ExportError(f"torchlazy.export: a list has another length at another size\nwhere: {where}")
            made = [self._argument(parts, where) for parts in zip(*values, strict=True)]
            return made if isinstance(first, list) else tuple(made)
        if isinstance(first, (bool, str, type(None), complex, torch.dtype, torch.device, torch.layout)):
            if any(v != first for v in values):
                raise ExportError(
                    f"torchlazy.export: an argument is {first} at one size and another at others\nwhere: {where}"
                )
            return first
        if isinstance(first, torch.memory_format):
            return first
        return self.number(values, where)

    def _spec(self, row: Sequence[fx.Node]) -> TensorSpec:
        return self.spec([n.meta["val"] for n in row], row[0].meta.get("frame", ""))


def _results_read(row: Sequence[fx.Node]) -> set[Any]:
    """Which of a call's several results are read at all: the others need no expressions (the workspace that oneDNN's
    recurrent layers keep for a backward)."""
    return {user.args[1] for node in row for user in node.users if user.target is operator.getitem and user.users}


def _called(node: fx.Node) -> str:
    """A node's operator by its name ("aten.add.Tensor")."""
    if node.op != "call_function":
        return node.op
    return "getitem" if node.target is operator.getitem else str(node.target)


def _parts(meta: Any) -> list[Any]:
    return list(meta) if isinstance(meta, (tuple, list)) else [meta]


def _ints(value: Any) -> list[int]:
    if isinstance(value, (list, tuple)):
        return [found for item in value for found in _ints(item)]
    if isinstance(value, Mapping):
        return [found for item in value.values() for found in _ints(item)]
    return [value] if type(value) is int else []

"""Checks of an exported graph: the sizes between which it is valid, and whether two graphs compute the same values.

At a size of 1 torch's operators choose other layouts (a view where they copied before), which changes what is recorded
but no value; such graphs are compared by their values.

Invariant: two graphs are the same if they apply the same operators to the same operands with the same numbers, except
for copies, reshapes, and whether a linear layer's bias is added within its product. Where a number of the graph is
rounded (a floor division), the graph equals recordings at sizes of every small remainder, near the example and far from
it; if it is wrong at one, its expressions are found again with that recording.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeAlias

import torch
from torchlazy.lazy.export.expressions import SizeExpr, evaluate
from torchlazy.lazy.export.front_door import ExportError
from torchlazy.lazy.export.graph import ExportedGraph, Node, Ref, SizeSpec, TensorSpec
from torchlazy.lazy.export.sizes import Size, farthest, find_bounds, probes
from torchlazy.lazy.export.tree import Tree
from torchlazy.lazy.export.unify import NoExpression

_COPIES = frozenset({"aten.clone.default", "aten.alias.default", "aten.detach.default", "aten.lift_fresh.default"})
_RESHAPES = frozenset(
    {"aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten.squeeze.dim",
     "aten.unsqueeze.default", "aten.squeeze.dims"}
)  # fmt: skip
_MAYBE_NOTHING = frozenset(
    {
        "aten.expand.default",
        "aten._to_copy.default",
        "aten.slice.Tensor",
    }
)


def same_values(a: ExportedGraph, b: ExportedGraph, sizes: Mapping[str, int]) -> bool:
    """Whether both graphs, of one function, compute the same results in the same layouts at `sizes`."""
    known: dict[Any, int] = {}
    mine, theirs = _Canon(known, sizes), _Canon(known, sizes)
    mine.read(a)
    theirs.read(b)
    if len(a.outputs) != len(b.outputs) or not _same_tree(a.results, b.results, sizes):
        return False
    news = [(target, mine.of(value)) for target, value in a.updates]
    if news != [(target, theirs.of(value)) for target, value in b.updates]:
        return False
    return all(
        mine.of(x) == theirs.of(y) and _layout(p, sizes) == _layout(q, sizes)
        for (x, p), (y, q) in zip(a.outputs, b.outputs, strict=True)
    )


def _same_tree(a: Tree, b: Tree, sizes: Mapping[str, int]) -> bool:
    if (a.kind, a.keys, len(a.children)) != (b.kind, b.keys, len(b.children)):
        return False
    if a.kind == "constant" and evaluate(a.value, sizes) != evaluate(b.value, sizes):
        return False
    return all(_same_tree(x, y, sizes) for x, y in zip(a.children, b.children, strict=True))


def _layout(spec: TensorSpec, sizes: Mapping[str, int]) -> Any:
    shape = [evaluate(n, sizes) for n in spec.shape]
    strides = [evaluate(n, sizes) for n in spec.strides]
    return shape, [s for n, s in zip(shape, strides, strict=True) if n != 1], spec.dtype, spec.device


class _Canon:
    """Values of one graph as numbers: equal numbers, equal values."""

    def __init__(self, known: dict[Any, int], sizes: Mapping[str, int]) -> None:
        self.known = known
        self.sizes = sizes
        self.values: dict[str, int] = {}
        self.facts: dict[int, tuple[Any, ...]] = {}  # (shape, dtype) of a value
        self.reshaped: dict[int, int] = {}  # a reshape -> what it is a reshape of
        self.products: dict[int, tuple[Any, ...]] = {}  # matrix products, and the facts of each

    def of(self, name: str) -> int:
        """The number of a value; a name that no node makes has its own."""
        return self.values.get(name) or self._intern(("given", name))

    def read(self, graph: ExportedGraph) -> None:
        """Number every value of the graph."""
        given = [(one.name, one.spec) for one in graph.inputs] + [(held.name, held.spec) for held in graph.state]
        for name, spec in given:
            self.facts[self.of(name)] = (self._plain(spec.shape), str(spec.dtype))
        for node in graph.nodes:
            specs = iter(node.specs)
            self._bind(node, node.outputs, self._number(node), (), specs)

    def _bind(self, node: Node, outputs: Any, number: int, way: tuple[int, ...], specs: Any) -> None:
        if isinstance(outputs, str):
            shape, dtype = next(specs)
            found = self._intern(("part", number, way)) if way else number
            self.values[outputs] = found
            self.facts.setdefault(found, (self._plain(shape), str(dtype)))
        elif isinstance(outputs, (list, tuple)):
            for position, item in enumerate(outputs):
                self._bind(node, item, number, (*way, position), specs)

    def _number(self, node: Node) -> int:
        args = [self._plain(a) for a in node.args]
        if node.op in _COPIES:
            return args[0][1]
        facts = (self._plain(node.specs[0][0]), str(node.specs[0][1])) if node.specs else ()
        if node.op == "aten.copy.default" and self.facts.get(args[1][1]) == facts:
            return args[1][1]  # how a result is copied into its layout
        if node.op in _MAYBE_NOTHING and self.facts.get(args[0][1]) == facts:
            return args[0][1]
        if node.op in _RESHAPES:
            return self._reshape(self.reshaped.get(args[0][1], args[0][1]), facts)
        if node.op == "aten.mm.default":
            return self._product(args[0], args[1], facts)
        if node.op == "aten.addmm.default" and len(args) == 3 and not node.kwargs:
            return self._intern(("biased", self._product(args[1], args[2], facts), args[0]))
        if node.op == "aten.add.Tensor" and len(args) == 2 and not node.kwargs and type(node.args[1]) is Ref:
            source = self.reshaped.get(args[0][1], args[0][1])
            if source in self.products and len(self.facts.get(args[1][1], ((0, 0),))[0]) == 1:
                biased = self._intern(("biased", source, args[1]))
                self.facts.setdefault(biased, self.products[source])
                return self._reshape(biased, facts)
        kwargs = tuple((name, self._plain(value)) for name, value in node.kwargs if name != "memory_format")
        return self._intern((node.op, tuple(args), kwargs))

    def _reshape(self, source: int, facts: tuple[Any, ...]) -> int:
        if self.facts.get(source) == facts:
            return source
        found = self._intern(("reshape", source, facts))
        self.reshaped[found] = source
        return found

    def _product(self, a: Any, b: Any, facts: tuple[Any, ...]) -> int:
        """A matrix product; a linear layer adds its bias within it or after it, as the layout of its input suits."""
        found = self._intern(("product", a, b))
        self.products[found] = facts
        return found

    def _plain(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return ("value", self.of(value.name))
        if isinstance(value, SizeExpr):
            return self._plain(evaluate(value, self.sizes))
        if isinstance(value, (list, tuple)):
            return tuple(self._plain(item) for item in value)
        if isinstance(value, float):
            return ("float", value.hex())
        if isinstance(value, (torch.dtype, torch.device)):
            return str(value)
        return value

    def _intern(self, key: Any) -> int:
        return self.known.setdefault((type(key), str(key)), len(self.known) + 1)


Point: TypeAlias = Mapping[str, int]
State: TypeAlias = dict[str, torch.Tensor]
Assemble: TypeAlias = Callable[[Sequence[Point]], tuple[ExportedGraph, State]]
"""The graph of recordings at these points, with its state; or an error."""

_PROBINGS = 4


class _AnotherPath(ExportError):
    """The program was recorded at a point, and is not the graph there."""


def with_bounds(assemble: Assemble, sizes: Mapping[str, Size], points: Sequence[Point]) -> tuple[ExportedGraph, State]:
    """The graph of these points with the bounds of its sizes, and its state. ExportError where none is right."""
    points = list(points)
    if _rounds(assemble(points)[0]):
        points = _with_far(assemble, sizes, points)
    for _ in range(_PROBINGS):
        graph, state = assemble(points)
        specs = _bounded(assemble, sizes, graph, state, points)
        wrong = _wrong_at(assemble, sizes, graph, state, points[0], specs) if _rounds(graph) else []
        if not wrong:
            return replace(graph, sizes=specs), state
        points += wrong
    raise ExportError(
        "torchlazy.export: how the program's numbers move with the sizes was not found; they differ at "
        f"{dict(wrong[0])}\nremedy: leave that size out of `dynamic`, or bound it: torch.export.Dim(name, min=, max=)"
    )


def _with_far(assemble: Assemble, sizes: Mapping[str, Size], points: Sequence[Point]) -> list[Point]:
    """The points, and far ones at which the program is one graph with these: they separate expressions that are nearly
    equal near the example."""
    graph, state = assemble(points)
    found = list(points)
    for name, size in sizes.items():
        far = {**points[0], name: farthest(size)}
        if isinstance(_difference(assemble, graph, state, far), _AnotherPath):
            try:
                graph, state = assemble([*found, far])
                found.append(far)
            except NoExpression:
                raise
            except ExportError:  # another path there: a bound of the size
                continue
    return found


def _bounded(
    assemble: Assemble, sizes: Mapping[str, Size], graph: ExportedGraph, state: State, points: Sequence[Point]
) -> tuple[SizeSpec, ...]:
    """Each size with the bounds between which the program is the graph, as far as recordings show."""
    specs = []
    for name, size in sizes.items():
        seen = tuple(dict.fromkeys(point[name] for point in points))

        def works(at: int, name: str = name) -> Exception | None:
            return _difference(assemble, graph, state, {**points[0], name: at})

        low, high = find_bounds(size, seen, works)
        specs.append(SizeSpec(name, low, high, size.step, size.example % size.step, seen))
    return tuple(specs)


def _wrong_at(
    assemble: Assemble,
    sizes: Mapping[str, Size],
    graph: ExportedGraph,
    state: State,
    base: Point,
    specs: Sequence[SizeSpec],
) -> list[Point]:
    """Points within the bounds at which the program is a different graph."""
    tried = [
        {**base, spec.name: at} for spec in specs for at in probes(sizes[spec.name], (spec.low, spec.high), spec.seen)
    ]
    return [at for at in tried if isinstance(_difference(assemble, graph, state, at), _AnotherPath)]


def _difference(assemble: Assemble, graph: ExportedGraph, state: State, point: Point) -> Exception | None:
    """Why the program is not the graph at this point."""
    try:
        alone, alone_state = assemble([point])
    except Exception as error:
        return error
    constants = {held.key for held in (*alone.state, *graph.state) if held.kind == "constant"}
    same = all(k in state and k in alone_state and is_equal(state[k], alone_state[k]) for k in constants)
    if same and same_values(graph, alone, point):
        return None
    return _AnotherPath(f"torchlazy.export: the program takes another path at {dict(point)}")


def _rounds(value: Any) -> bool:
    """Whether a number of the graph is rounded: its expression may fit by chance where few sizes were recorded."""
    if isinstance(value, SizeExpr):
        return value.op == "floordiv" or any(map(_rounds, value.args))
    if isinstance(value, (tuple, list)):
        return any(map(_rounds, value))
    return is_dataclass(value) and any(_rounds(getattr(value, field.name)) for field in fields(value))


def is_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit: a NaN that the program writes down is the same at each size."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    if not a.numel():
        return True
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


__all__ = ["is_equal", "with_bounds"]

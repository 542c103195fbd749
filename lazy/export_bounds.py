"""Between which sizes an exported program is one graph, and whether it is the graph at sizes not recorded yet.

Invariant: where a number of the graph is rounded (a floor division), the graph equals recordings at sizes of every
small remainder, near the example and far from it; what it gets wrong at one is found anew, with that one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeAlias

import torch
from torchlazy.lazy.export_capture import ExportError
from torchlazy.lazy.export_same import same_values
from torchlazy.lazy.export_sizes import Size, farthest, find_bounds, probes
from torchlazy.lazy.export_unify import NoExpression
from torchlazy.runtime.exported_graph import ExportedGraph, SizeSpec
from torchlazy.runtime.exported_sizes import SizeExpr

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
    """The points, and those far away at which the program is one graph with these: they tell apart what is nearly equal
    near the example."""
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
            except ExportError:  # really another path: a bound of the size
                continue
    return found


def _bounded(
    assemble: Assemble, sizes: Mapping[str, Size], graph: ExportedGraph, state: State, points: Sequence[Point]
) -> tuple[SizeSpec, ...]:
    """Each size with the bounds between which the program is the graph, as far as recordings tell."""
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
    """Points within the bounds at which the program is another graph."""
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

"""What one node touches: its loads and stores as forms over its own atoms.

A node's atoms are its ranges, then its reduce ranges, without those of size 1; a range that an index divides (`i // 64`
beside `i % 64`, what a reshape leaves behind) is split there, so that most indices are affine.

Invariant: facts depend on the node alone and are computed once; fusion and scheduling never run a body again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias

import sympy
import torch
from torchlazy.inductor.analyses import ReadsWrites, node_index, work_of
from torchlazy.inductor.index_form import Digits, Form, to_form, wanted_splits
from torchlazy.inductor.ir import LoopNode
from torchlazy.prims.size_int import divides, hint, integer_of, is_tracked, surely_equal

_ORDERED_REDUCTIONS = ("argmax", "argmin")


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """`digits` places the body's symbols on the atoms; `loads` and `stores` are (buffer, element offset)."""

    sizes: tuple[int, ...]
    reduced: tuple[bool, ...]
    digits: dict[sympy.Symbol, Digits]
    loads: tuple[tuple[str, Form], ...]
    stores: tuple[tuple[str, Form], ...]
    values: tuple[Form, ...]  # indices used as numbers
    scalars: tuple[str, ...]
    work: int  # one point, in additions
    device: str
    is_reduction: bool
    keeps_order: bool  # the reduce axes must stay in order: the result is a position

    @property
    def points(self) -> int:
        return prod(size for size, reduced in zip(self.sizes, self.reduced, strict=True) if not reduced)

    @property
    def reduce_points(self) -> int:
        return prod(size for size, reduced in zip(self.sizes, self.reduced, strict=True) if reduced)

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for name, _ in self.loads))


class _Collector(ReadsWrites):
    """Collects the indices that a body uses as numbers, beside its loads."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[sympy.Expr, None] = {}

    def index_expr(self, expr: sympy.Expr, dtype: torch.dtype) -> None:
        self.values[sympy.sympify(expr)] = None


@dataclass(frozen=True, slots=True)
class _Placed:
    """Indices as forms over the atoms of their loops."""

    sizes: tuple[int, ...]
    reduced: tuple[bool, ...]
    digits: dict[sympy.Symbol, Digits]
    forms: tuple[Form, ...]


Known: TypeAlias = "dict[Any, Any]"
"""What indices over loops came to, for one graph: index expressions name tracked sizes, and names serve one graph. And
the facts of nodes that others are like."""


def collect_facts(node: LoopNode, known: Known | None = None) -> NodeFacts:
    """Run the node's body once and place what it touches on the node's atoms; equal layers find theirs `known`."""
    if node.like is not None and known is not None:
        return _facts_like(*node.like, known)
    index, reduce_index = node_index(node)
    collector = _Collector()
    node.body(collector, index, reduce_index)
    loads = list(dict.fromkeys((read.name, sympy.sympify(read.index)) for read in collector.reads))
    stores = [(output.name, output.element(index)) for output in node.outputs]
    indices = (*(expr for _, expr in loads), *(expr for _, expr in stores), *collector.values)

    key = (indices, tuple(index), tuple(reduce_index), tuple(node.ranges), tuple(node.reduce_ranges))
    if any(map(is_tracked, (*key[3], *key[4]))):
        known = None  # to compare tracked sizes is to decide something about them
    placed = known.get(key) if known is not None else None
    if placed is None:
        placed = _place(node, indices, [s for s in (*index, *reduce_index) if s.is_Symbol])
        if known is not None:
            known[key] = placed
    forms = placed.forms
    first_value = len(loads) + len(stores)
    return NodeFacts(
        sizes=placed.sizes,
        reduced=placed.reduced,
        digits=placed.digits,
        loads=tuple(zip((name for name, _ in loads), forms[: len(loads)], strict=True)),
        stores=tuple(zip((name for name, _ in stores), forms[len(loads) : first_value], strict=True)),
        values=forms[first_value:],
        scalars=tuple(collector.scalars),
        work=sum(count * work_of(op) for op, count in collector.ops.items()),
        device=node.outputs[0].device,
        is_reduction=node.reduction is not None,
        keeps_order=node.reduction in _ORDERED_REDUCTIONS,
    )


def _facts_like(other: LoopNode, names: Mapping[str, str], known: Known) -> NodeFacts:
    facts: NodeFacts | None = known.get(id(other))
    if facts is None:
        facts = known[id(other)] = collect_facts(other, known)
    return replace(
        facts,
        loads=tuple((names[name], form) for name, form in facts.loads),
        stores=tuple((names[name], form) for name, form in facts.stores),
        scalars=tuple(names[name] for name in facts.scalars),
    )


def _place(node: LoopNode, indices: Sequence[sympy.Expr], symbols: list[sympy.Symbol]) -> _Placed:
    sizes = [integer_of(n) for n in (*node.ranges, *node.reduce_ranges) if not surely_equal(n, 1)]
    reduced = [False] * sum(not surely_equal(n, 1) for n in node.ranges)
    reduced += [True] * sum(not surely_equal(n, 1) for n in node.reduce_ranges)
    whole: dict[sympy.Symbol, Digits] = {s: ((atom, 1),) for atom, s in enumerate(symbols)}
    forms = [to_form(expr, whole, sizes) for expr in indices]
    digits = whole
    splits = _choose_splits(forms, sizes)
    if splits:
        digits, sizes, reduced = _split_atoms(symbols, sizes, reduced, splits)
        forms = [to_form(expr, digits, sizes) for expr in indices]
    return _Placed(tuple(sizes), tuple(reduced), digits, tuple(forms))


def _choose_splits(forms: list[Form], sizes: list[int]) -> dict[int, list[int]]:
    """For each atom the inner sizes to split at, ascending, each dividing the next and the last the atom's size."""
    wanted: dict[int, set[int]] = {}
    for form in forms:
        for atom, low in wanted_splits(form, sizes):
            wanted.setdefault(atom, set()).add(low)
    chosen: dict[int, list[int]] = {}
    for atom, lows in wanted.items():
        chain: list[int] = []
        for low in sorted(lows, key=hint):
            if not chain or divides(chain[-1], low):
                chain.append(low)
        chosen[atom] = chain
    return chosen


def _split_atoms(
    symbols: list[sympy.Symbol], sizes: list[int], reduced: list[bool], splits: dict[int, list[int]]
) -> tuple[dict[sympy.Symbol, Digits], list[int], list[bool]]:
    digits: dict[sympy.Symbol, Digits] = {}
    new_sizes: list[int] = []
    new_reduced: list[bool] = []
    for atom, symbol in enumerate(symbols):
        strides = [1, *splits.get(atom, [])]
        bounds = [*strides[1:], sizes[atom]]
        places = []
        for stride, bound in reversed(list(zip(strides, bounds, strict=True))):
            places.append((len(new_sizes), stride))
            new_sizes.append(bound // stride)
            new_reduced.append(reduced[atom])
        digits[symbol] = tuple(places)
    return digits, new_sizes, new_reduced

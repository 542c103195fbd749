"""Kernel axes from a fused group: which order the loops run in, which of them merge, and the nodes rewritten onto them.

Loops are ordered by how most bytes are walked, so the innermost parallel axis has stride 1 where the buffers allow it.
Neighbouring loops then merge wherever every index of every statement steps evenly across both: a contiguous pointwise
kernel becomes one flat axis, whatever the shapes in it were.

Invariant: a placed node computes what the original computes; its ranges are the kernel's axes themselves (and the
reduce axes, for a pointwise node that runs over them), and each of its outputs' strides are told over these ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import sympy
import torch
from torchlazy.inductor.access import NodeFacts
from torchlazy.inductor.analyses import node_index
from torchlazy.inductor.axes import Space
from torchlazy.inductor.fusion_group import Group
from torchlazy.inductor.index import Index, axis
from torchlazy.inductor.index_form import Digits, Form, affine_parts, remap, select, to_expr, to_form
from torchlazy.inductor.ir import Axis, Buffer, LoopNode
from torchlazy.inductor.ops_handler import OpsHandler
from torchlazy.prims.size_int import hint, integer_of, same_sizes, surely_equal


@dataclass(frozen=True)
class AxisPlan:
    """The kernel's axes. `parallel` and `reduce` list each axis's atoms, outermost first."""

    space: Space
    parallel: tuple[tuple[int, ...], ...]
    reduce: tuple[tuple[int, ...], ...]
    axes: tuple[Axis, ...]
    reduce_axes: tuple[Axis, ...]

    @property
    def step(self) -> int:
        """How far accesses go along an axis that has no atoms."""
        return 1 if self.parallel == ((),) else 0

    @property
    def index(self) -> Index:
        return tuple(a.symbol for a in self.axes)

    @property
    def reduce_index(self) -> Index:
        return tuple(a.symbol for a in self.reduce_axes)


@dataclass(frozen=True)
class PlacedNode:
    """A node's indices over the group's atoms."""

    node: LoopNode
    facts: NodeFacts
    mapping: tuple[Digits, ...]
    loads: tuple[tuple[str, Form], ...]
    stores: tuple[tuple[str, Form], ...]
    values: tuple[Form, ...]

    @property
    def forms(self) -> list[Form]:
        return [*(form for _, form in self.stores), *(form for _, form in self.loads), *self.values]

    def runs_over(self, reduced: Sequence[bool]) -> bool:
        """Whether the node has a value for each point of the reduce atoms."""
        return not self.facts.is_reduction and any(reduced[atom] for places in self.mapping for atom, _ in places)


def place_node(node: LoopNode, facts: NodeFacts, places: tuple[Digits, ...] | None, space: Space) -> PlacedNode:
    """The node's indices told over the space's atoms."""
    if places is None:
        mapping = tuple(((atom, 1),) for atom in range(len(facts.sizes)))
        return PlacedNode(node, facts, mapping, facts.loads, facts.stores, facts.values)

    def move(form: Form) -> Form:
        return remap(form, places, space.sizes)

    return PlacedNode(
        node,
        facts,
        places,
        tuple((name, move(form)) for name, form in facts.loads),
        tuple((name, move(form)) for name, form in facts.stores),
        tuple(map(move, facts.values)),
    )


def plan_axes(group: Group, placed: Sequence[PlacedNode], itemsize: dict[str, int]) -> AxisPlan:
    """Order the group's atoms and merge neighbours that every index walks as one."""
    space = group.space
    accesses = [
        (form, itemsize.get(name, 4) * (2 if is_store else 1))
        for member in placed
        for is_store, accesses in ((True, member.stores), (False, member.loads))
        for name, form in accesses
    ]
    rows = list({row: None for member in placed for form in member.forms for row in affine_parts(form)})
    parallel = [atom for atom, reduced in enumerate(space.reduced) if not reduced]
    reduce = [atom for atom, reduced in enumerate(space.reduced) if reduced]
    parallel = _order(parallel, accesses, space.sizes)
    if not any(member.facts.keeps_order for member in placed):
        reduce = _order(reduce, accesses, space.sizes)
    parallel_axes = _merge(parallel, rows, space.sizes)
    reduce_axes = _merge(reduce, rows, space.sizes)
    axes = tuple(_axis(f"x{k}", atoms, space.sizes) for k, atoms in enumerate(parallel_axes))
    inner = tuple(_axis(f"r{k}", atoms, space.sizes) for k, atoms in enumerate(reduce_axes))
    if group.is_reduction and not inner:
        # A reduction over one element still needs a loop to stand in.
        inner = (Axis(axis("r0", 1), 1),)
        reduce_axes = [()]
    if not group.is_reduction and not axes:
        # One point is a flat loop of one element, in which any step is right: with a step of one it is the same
        # kernel as that of longer buffers, and they may share a launch.
        axes = (Axis(axis("x0", 1), 1),)
        parallel_axes = [()]
    return AxisPlan(space, tuple(parallel_axes), tuple(reduce_axes), axes, inner)


def _axis(name: str, atoms: Sequence[int], sizes: Sequence[int]) -> Axis:
    size = prod(sizes[atom] for atom in atoms)
    return Axis(axis(name, size), size)


def _order(atoms: list[int], accesses: Sequence[tuple[Form, int]], sizes: Sequence[int]) -> list[int]:
    """The order, outermost first, in which most bytes are walked with falling strides; ties keep the given order."""
    if len(atoms) < 2:
        return atoms
    votes: dict[tuple[int, ...], int] = {tuple(atoms): 0}
    widest = 0
    ballots: list[tuple[int, tuple[int, ...], int]] = []
    for form, weight in accesses:
        steps = {atom: abs(hint(form.coefs[atom])) for atom in atoms}
        walked = sum(1 for step in steps.values() if step)
        # Atoms that the access does not walk go outermost: the walked ones are what coalesces.
        order = tuple(sorted(atoms, key=lambda atom: -steps[atom] if steps[atom] else -(1 << 62)))
        elements = prod(hint(size) for coef, size in zip(form.coefs, sizes, strict=True) if hint(coef))
        ballots.append((walked, order, weight * elements))
        widest = max(widest, walked)
    for walked, order, weight in ballots:
        if walked == widest and walked > 0:
            votes[order] = votes.get(order, 0) + weight
    best = max(votes.values())
    return list(next(order for order, count in votes.items() if count == best))


def _merge(atoms: list[int], rows: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> list[tuple[int, ...]]:
    axes: list[tuple[int, ...]] = []
    for atom in atoms:
        if axes and all(surely_equal(row[axes[-1][-1]], row[atom] * sizes[atom]) for row in rows):
            axes[-1] = (*axes[-1], atom)
        else:
            axes.append((atom,))
    return axes


def rewrite_node(placed: PlacedNode, plan: AxisPlan) -> tuple[LoopNode, Index, Index]:
    """The node over the kernel's axes, and the indices to call its body with."""
    node = placed.node
    over_reduce = placed.runs_over(plan.space.reduced)
    inner = [atoms[-1] if atoms else None for atoms in plan.parallel]
    inner_reduce = [atoms[-1] if atoms else None for atoms in plan.reduce]
    sizes = tuple(integer_of(a.size) for a in plan.axes)
    reduce_sizes = tuple(integer_of(a.size) for a in plan.reduce_axes)
    index, reduce_index = plan.index, plan.reduce_index
    chosen: list[int | None]
    ranges: tuple[int, ...]
    reduce_ranges: tuple[int, ...]
    if over_reduce:
        chosen, ranges, reduce_ranges = [*inner, *inner_reduce], sizes + reduce_sizes, ()
        index, reduce_index = index + reduce_index, ()
    elif placed.facts.is_reduction:
        chosen, ranges, reduce_ranges = [*inner, *inner_reduce], sizes, reduce_sizes
    else:
        chosen, ranges, reduce_ranges = [*inner], sizes, ()
        reduce_index = ()
    if _is_already_placed(placed, chosen, ranges, reduce_ranges):
        return node, index, reduce_index
    rank = len(ranges)
    outputs = tuple(
        _over_axes(buffer, _choose(form, chosen, plan.step), ranges, rank)
        for buffer, (_, form) in zip(node.outputs, placed.stores, strict=True)
    )
    digits = {
        symbol: tuple((atom, m * k) for old, m in places for atom, k in placed.mapping[old])
        for symbol, places in placed.facts.digits.items()
    }
    own_index, own_reduce_index = node_index(node)
    body = PlacedBody(node, own_index, own_reduce_index, digits, plan.space.sizes, tuple(chosen), plan.step)
    return (
        replace(node, outputs=outputs, ranges=ranges, reduce_ranges=reduce_ranges, body=body, like=None),
        index,
        reduce_index,
    )


def _is_already_placed(
    placed: PlacedNode, chosen: list[int | None], ranges: tuple[int, ...], reduce_ranges: tuple[int, ...]
) -> bool:
    """Whether the node's own loops are the kernel's, one to one and in order."""
    node = placed.node
    return (
        same_sizes(node.ranges, ranges)
        and same_sizes(node.reduce_ranges, reduce_ranges)
        and chosen == list(range(len(placed.facts.sizes)))
        and placed.mapping == tuple(((atom, 1),) for atom in range(len(placed.facts.sizes)))
        and all(len(places) == 1 for places in placed.facts.digits.values())
    )


def _choose(form: Form, chosen: Sequence[int | None], step: int = 0) -> Form:
    """The form over the axes: each keeps its innermost atom's coefficient, an axis without atoms has `step`."""
    if None not in chosen:
        return select(form, chosen)  # type: ignore[arg-type]
    padded = _pad(form, step if form.is_affine else 0)
    return select(padded, [len(form.coefs) if atom is None else atom for atom in chosen])


def _pad(form: Form, step: int) -> Form:
    terms = tuple(replace(term, args=tuple(_pad(arg, 0) for arg in term.args)) for term in form.terms)
    return Form((*form.coefs, step), form.const, terms)


def _over_axes(buffer: Buffer, form: Form, ranges: tuple[int, ...], rank: int) -> Buffer:
    assert form.is_affine, f"{buffer.name}: a store is a sum of strides"
    return replace(buffer, shape=ranges, strides=form.coefs[:rank], offset=form.const)


@dataclass(frozen=True)
class PlacedBody:
    """A body called with the indices of kernel axes: each index expression of the original is told over them."""

    node: LoopNode
    index: Index
    reduce_index: Index
    digits: dict[sympy.Symbol, Digits]
    sizes: tuple[int, ...]
    chosen: tuple[int | None, ...]
    step: int = 0
    known: dict[tuple[Any, ...], dict[tuple[sympy.Expr, int], Any]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def __call__(self, ops: OpsHandler, index: Index, reduce_index: Index) -> Any:
        axes = (*index, *reduce_index)
        known = self.known.setdefault(axes, {})
        return self.node.body(_Rewriter(ops, self, axes, known), self.index, self.reduce_index)

    def rewrite(self, expr: sympy.Expr, axes: tuple[Any, ...], step: int) -> Any:
        """`expr` of the node's symbols as an expression of the axes' indices."""
        form = to_form(expr, self.digits, self.sizes)
        return to_expr(_choose(form, self.chosen, step), axes)


class _Rewriter:
    """An `OpsHandler` in front of another one; only indices pass through it changed."""

    __slots__ = ("axes", "body", "known", "ops")

    def __init__(
        self, ops: OpsHandler, body: PlacedBody, axes: tuple[Any, ...], known: dict[tuple[sympy.Expr, int], Any]
    ) -> None:
        self.ops = ops
        self.body = body
        self.axes = axes
        self.known = known

    def _move(self, expr: sympy.Expr, step: int) -> Any:
        moved = self.known.get((expr, step))
        if moved is None:
            moved = self.known[expr, step] = self.body.rewrite(sympy.sympify(expr), self.axes, step)
        return moved

    def load(self, name: str, index: sympy.Expr) -> Any:
        return self.ops.load(name, self._move(index, self.body.step))

    def store(self, name: str, index: sympy.Expr, value: Any) -> None:
        self.ops.store(name, self._move(index, self.body.step), value)

    def index_expr(self, expr: sympy.Expr, dtype: torch.dtype) -> Any:
        return self.ops.index_expr(self._move(expr, 0), dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ops, name)

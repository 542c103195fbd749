"""What backward keeps of forward and what it computes again, with the price: the plan that a set of kept values gives.

Invariant: a plan is closed: each value that backward reads is available, saved, or recomputed from such values; what is
saved is read by backward or by a recipe.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass

from torch import fx
from torchlazy.autograd.cost import (
    Recompute,
    bytes_of,
    product_in_bytes,
    recompute_kind,
    storage_of,
    work_in_bytes,
)
from torchlazy.autograd.step import BACKWARD, FORWARD, TrainingStep
from torchlazy.prims.errors import GraphError, place_of


@dataclass(frozen=True)
class RecomputePlan:
    """`saved`: values held from forward to backward. `recomputed`: forward nodes that get a copy in the backward; both
    in the graph's order. `held_bytes`: the most that is held of them at once during the backward, copies that lie in
    memory included. `added_cost`: bytes of traffic, or arithmetic of the same duration. `reasons` say why, for each."""

    saved: tuple[fx.Node, ...]
    recomputed: tuple[fx.Node, ...]
    saved_bytes: int
    held_bytes: int
    added_cost: int
    reasons: dict[fx.Node, str]


def kept_by_autograd(step: TrainingStep) -> dict[fx.Node, None]:
    """The storages that eager would hold: what backward reads of results of whole ATen operators.

    A value inside an ATen operator's formula crosses only because its backward has a part of the formula in common with
    it, or reads the operand in another dtype: eager holds the operands and computes it again.
    """
    found: dict[fx.Node, None] = {}
    seen: dict[fx.Node, None] = {}
    stack = list(step.crossing)
    while stack:
        node = storage_of(stack.pop())
        if node in seen or step.is_available(node):
            continue
        seen[node] = None
        if node.op != "placeholder" and _is_inside_operator(step, node):
            stack.extend(node.all_input_nodes)
        else:
            found[node] = None
    return dict.fromkeys(sorted(found, key=step.order.__getitem__))


def _is_inside_operator(step: TrainingStep, node: fx.Node) -> bool:
    origin = node.meta.get("origin")
    if not origin or step.sides[node] == BACKWARD or recompute_kind(node) is not Recompute.FUSED:
        return False
    readers = [user for user in node.users if user.op == "output" or step.sides[user] == FORWARD]
    return bool(readers) and all(reader.meta.get("origin") == origin for reader in readers)


def plan_keeping(
    step: TrainingStep, kept: Collection[fx.Node], reasons: dict[fx.Node, str] | None = None
) -> RecomputePlan:
    """The plan that holds no storages but `kept` (as far as they are read). GraphError where that is impossible."""
    again: dict[fx.Node, None] = {}
    saved: dict[fx.Node, None] = {}
    stack = list(step.crossing)
    while stack:
        node = stack.pop()
        if node in again or step.is_available(node):
            continue
        base = storage_of(node)
        if base in kept or step.sides.get(base) == BACKWARD:
            saved[base] = None
            continue
        if recompute_kind(node) is Recompute.NEVER or node.op == "placeholder":
            what = f"the plan computes {node.name} again, which must not be called twice"
            raise GraphError(f"{what}\n  {place_of(node)}\n  keep its results")
        again[node] = None
        stack.extend(node.all_input_nodes)
    return _priced(step, _sorted(step, saved), _sorted(step, again), reasons or {})


def _sorted(step: TrainingStep, nodes: dict[fx.Node, None]) -> tuple[fx.Node, ...]:
    return tuple(sorted(nodes, key=step.order.__getitem__))


def _priced(
    step: TrainingStep, saved: tuple[fx.Node, ...], recomputed: tuple[fx.Node, ...], reasons: dict[fx.Node, str]
) -> RecomputePlan:
    again = dict.fromkeys(recomputed)
    price = sum(_price(step, node, again) for node in recomputed)
    told = {node: reasons.get(node) or _reason(step, node, node in again) for node in (*saved, *recomputed)}
    saved_bytes = sum(map(bytes_of, saved))
    return RecomputePlan(saved, recomputed, saved_bytes, _held_bytes(step, saved, recomputed), price, told)


# --- the price of a copy ---


def is_stored_again(step: TrainingStep, node: fx.Node, again: Collection[fx.Node]) -> bool:
    """Whether the copy of a recomputed value goes into memory in the backward."""
    kind = recompute_kind(node)
    if kind in (Recompute.PASS, Recompute.PRODUCT):
        return node.target is operator.getitem or not isinstance(node.meta["val"], tuple)
    if kind not in (Recompute.FUSED, Recompute.INDEXED):
        return False
    readers = step.memory_readers.get(node, ())
    return any(reader in again or step.sides[reader] == BACKWARD for reader in readers)


def _price(step: TrainingStep, node: fx.Node, again: Collection[fx.Node]) -> int:
    kind, chain = recompute_kind(node), step.chains[node]
    if node.target is operator.getitem:
        return 0
    if kind is Recompute.PRODUCT:
        return product_in_bytes(node)
    work = work_in_bytes(node, chain.total_work)
    if kind is Recompute.PASS:
        return max(work, chain.total_reads) + bytes_of(node)
    price = 0
    if is_stored_again(step, node, again):  # in the worst case by a kernel of its own
        price = max(work, chain.total_reads) + bytes_of(node)
    elif node in step.too_long:
        price = max(work, chain.total_reads) - bytes_of(node)
    return max(0, price)


# --- how much is held ---


def _held_bytes(step: TrainingStep, saved: tuple[fx.Node, ...], recomputed: tuple[fx.Node, ...]) -> int:
    """The peak over the backward: saved values from its start to their last use, stored copies from first to last use.

    A copy inside a kernel holds its sources until the last kernel that contains it has run.
    """
    again = dict.fromkeys(recomputed)
    first: dict[fx.Node, int] = {}
    last: dict[fx.Node, int] = {}

    def use(node: fx.Node, begin: int, end: int) -> None:
        for value in {node: None, storage_of(node): None}:
            first[value] = min(first.get(value, begin), begin)
            last[value] = max(last.get(value, end), end)

    for node, readers in step.crossing.items():
        use(node, step.order[readers[0]], step.order[readers[-1]])
    for node in reversed(recomputed):
        end = first[node] if is_stored_again(step, node, again) else last[node]
        for operand in node.all_input_nodes:
            use(operand, first[node], end)
    start = min(first.values(), default=0)
    changes: dict[int, int] = {}
    for node in saved:
        _count(changes, start, last[node], bytes_of(node))
    for node in recomputed:
        if is_stored_again(step, node, again):
            _count(changes, first[node], last[node], bytes_of(node))
    held = most = 0
    for position in sorted(changes):
        held += changes[position]
        most = max(most, held)
    return most


def _count(changes: dict[int, int], begin: int, end: int, size: int) -> None:
    changes[begin] = changes.get(begin, 0) + size
    changes[end + 1] = changes.get(end + 1, 0) - size


# --- reasons ---


def library_reader(step: TrainingStep, node: fx.Node) -> fx.Node | None:
    """The first backward node that takes the value from memory."""
    readers = step.memory_readers.get(node, ())
    return next((reader for reader in readers if step.sides[reader] == BACKWARD), None)


def _reason(step: TrainingStep, node: fx.Node, is_again: bool) -> str:
    kind = recompute_kind(node)
    if is_again:
        sources = ", ".join(source.name for source in step.chains[node].reads) or "nothing"
        return f"{kind.value}; reads {sources}"
    if node.op == "placeholder":
        return "an input that may change before backward runs"
    if step.sides[node] != FORWARD:
        return "a recipe reads it"
    if kind in (Recompute.NEVER, Recompute.PRODUCT, Recompute.PASS):
        return kind.value
    reader = library_reader(step, node)
    if reader is not None:
        return f"{reader.name} reads it from memory"
    return step.too_long.get(node) or "the least bytes from which the rest is computed"

"""What crosses from forward to backward: a minimum cut over bytes, or what fits a memory budget.

Each forward value is two nodes of a flow network, joined by an edge that costs the value's bytes: to cut it is to hold
the value. What cannot be computed again for free hangs on the source, what backward reads hangs on the sink. Inputs,
outputs and constants are there anyway and do not appear. Of the cheapest cuts the one nearest to the backward is taken:
it computes least again.

Invariant: with budget None the plan adds no pass over memory and no library call to the step.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import fx
from torchlazy.autograd.budget import plan_for_bytes, plan_for_share
from torchlazy.autograd.cost import Recompute, bytes_of, is_alias, recompute_kind, storage_of
from torchlazy.autograd.flow import INFINITY, Network
from torchlazy.autograd.plan import RecomputePlan, kept_by_autograd, library_reader, plan_keeping
from torchlazy.autograd.step import BACKWARD, Stages, TrainingStep, analyse, split_point
from torchlazy.prims.errors import GraphError


def plan_recompute(
    graph: fx.Graph, *, stages: Stages, budget: float | int | None = None, lost: Collection[str] = ()
) -> RecomputePlan:
    """Choose what backward keeps and what it computes again in a verified prims graph of a whole step.

    budget None: the least bytes that can be held without making the step slower. A float: the share of the way from the
    least that can be held (0.0) to all that eager's autograd would hold (1.0). An int: bytes. Below what is free,
    library products and passes over memory are bought, the cheapest for its bytes first; a budget that cannot be met
    gives the plan that holds least. `lost`: names of inputs that are overwritten before the backward runs.
    """
    step = analyse(graph, stages)
    if not lost:
        return plan_within(step, budget, kept_by_autograd(step), cut_values(step))
    step = replace(step, lost=frozenset(n for n in step.order if n.op == "placeholder" and n.name in lost))
    return plan_within(step, budget, kept_by_autograd(step), cut_values(step))


def plan_within(
    step: TrainingStep, budget: float | int | None, everything: Collection[fx.Node], least: Collection[fx.Node]
) -> RecomputePlan:
    """The plan for a budget between holding `everything` that eager holds and the `least` that costs nothing."""
    if budget is not None and (
        isinstance(budget, bool) or not 0 <= budget < 1 << 62 or (isinstance(budget, float) and budget > 1.0)
    ):
        raise ValueError(f"memory budget {budget!r} is neither / pass a share 0.0 to 1.0, an int of bytes, or None")
    if budget is None:
        return plan_keeping(step, least)
    eager = plan_keeping(step, everything)
    if budget >= (1.0 if isinstance(budget, float) else eager.held_bytes):
        return eager
    free = plan_keeping(step, least)
    if isinstance(budget, float):
        return plan_for_share(step, free, eager, budget)
    return free if free.held_bytes <= budget else plan_for_bytes(step, free, budget)


def cut_values(step: TrainingStep, holdable: Collection[fx.Node] | None = None) -> tuple[fx.Node, ...]:
    """The storages to hold so that backward computes the rest inside its own kernels, of the least bytes in all.

    `holdable` are the only ones that can be held (None: any).
    """
    network = Network()
    source, sink = network.add_node(), network.add_node()
    ends: dict[fx.Node, tuple[int, int]] = {}
    holding: dict[int, fx.Node] = {}
    pending: list[fx.Node] = []

    def ends_of(node: fx.Node) -> tuple[int, int]:
        if node not in ends:
            ends[node] = network.add_node(), network.add_node()
            pending.append(node)
        return ends[node]

    for node in step.crossing:
        if not step.is_available(node):
            network.add_edge(ends_of(node)[1], sink, INFINITY)
    while pending:
        node = pending.pop()
        begin, end = ends[node]
        can_hold = _can_hold(node) and (holdable is None or node in holdable)
        edge = network.add_edge(begin, end, bytes_of(node) if can_hold else INFINITY)
        if can_hold:
            holding[edge] = node
        if _must_hold(step, node) and (can_hold or not _can_repeat(step, node)):
            network.add_edge(source, begin, INFINITY)
            continue
        for operand in node.all_input_nodes:
            if not step.is_available(operand):
                network.add_edge(ends_of(operand)[1], begin, INFINITY)
    if not ends:
        return ()
    cut = network.min_cut(source, sink, nearest="sink")
    return tuple(holding[edge] for edge in cut.edges)


def _can_hold(node: fx.Node) -> bool:
    """Views are held as their base, a node with several results as its parts."""
    return not is_alias(node) and not isinstance(node.meta["val"], tuple)


def _must_hold(step: TrainingStep, node: fx.Node) -> bool:
    """Whether nothing before the value will do: computing it again is a call or a pass of its own."""
    if node in step.lost and node.op == "placeholder":
        return True
    if step.sides[node] == BACKWARD or node in step.whole:
        return True
    if is_alias(node):
        return False
    kind = recompute_kind(node)
    if kind in (Recompute.NEVER, Recompute.PRODUCT, Recompute.PASS):
        return True
    return node in step.too_long or library_reader(step, node) is not None


def _can_repeat(step: TrainingStep, node: fx.Node) -> bool:
    """Whether a value that should be held may be computed again all the same: it is a part of an operator's rule that
    the backward's rule looks at, and no value that a program can hand over (the window numbers of a max pool)."""
    return node.op == "call_function" and step.sides[node] != BACKWARD and recompute_kind(node) is not Recompute.NEVER


__all__ = ["GraphError", "RecomputePlan", "cut_values", "plan_recompute", "split_point", "storage_of"]

"""The recompute stage: what the backward half of a whole training step computes again instead of keeping.

Invariant: the new graph computes the same values bit for bit; a graph in which no backward was seen comes back itself.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx
from torchlazy.autograd.cost import bytes_of
from torchlazy.autograd.partition import RecomputePlan, plan_recompute
from torchlazy.autograd.rematerialise import rematerialise
from torchlazy.autograd.step import STAGE, split_point


def recompute(
    graph: fx.Graph, budget: float | int | None = None, *, lost: Collection[str] = ()
) -> tuple[fx.Graph, RecomputePlan | None]:
    """A prims graph in which backward recomputes what is free to recompute inside its own kernels, or what it
    must so that no more is held than `budget` (as for `plan_recompute`); and the plan, if a backward was seen.
    `lost`: the names of inputs that are overwritten before the backward runs."""
    if not any(node.meta.get(STAGE) == "backward" for node in graph.nodes):
        return graph, None
    stages = split_point(graph)
    plan = plan_recompute(graph, stages=stages, budget=budget, lost=lost)
    return rematerialise(graph, plan, stages=stages), plan


def format_plan(plan: RecomputePlan | None) -> str:
    """What crosses from forward to backward: sums, then each value that is held with its reason, largest first, and
    each that is computed again; empty without a plan."""
    if plan is None:
        return ""
    mib = 1 << 20
    lines = [
        f"from forward to backward: {plan.held_bytes / mib:.2f} MiB held in {len(plan.saved)} values, "
        f"{len(plan.recomputed)} computed again at the price of {plan.added_cost / mib:.2f} MiB of memory traffic"
    ]
    for node in sorted(plan.saved, key=lambda node: -bytes_of(node)):
        lines.append(f"  held {bytes_of(node) / mib:10.3f} MiB  {node.name}: {plan.reasons[node]}")
    lines += [f"  again  {node.name}: {plan.reasons[node]}" for node in plan.recomputed]
    return "\n".join(lines)

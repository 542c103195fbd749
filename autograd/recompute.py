"""The recompute stage: what the backward half of a whole training step computes again instead of keeping.

Invariant: the new graph computes the same values bit for bit; a graph in which no backward was seen comes back itself.
"""

from __future__ import annotations

from torch import fx
from torchlazy.autograd.partition import plan_recompute
from torchlazy.autograd.rematerialise import rematerialise
from torchlazy.autograd.step import STAGE, split_point


def recompute(graph: fx.Graph, budget: float | int | None = None) -> fx.Graph:
    """A verified prims graph in which backward recomputes what is free to recompute inside its own kernels, or what it
    must so that no more is held than `budget` (as for `plan_recompute`)."""
    if not any(node.meta.get(STAGE) == "backward" for node in graph.nodes):
        return graph
    stages = split_point(graph)
    return rematerialise(graph, plan_recompute(graph, stages=stages, budget=budget), stages=stages)

"""Carry out a plan: backward readers of recomputed values read copies of their recipes.

Invariant: the new graph has the same placeholders and outputs and computes the same values bit for bit. Each recomputed
value has at most one copy, placed right before its first reader in the backward. The result must not go through common
subexpression elimination again: that would undo it.
"""

from __future__ import annotations

from torch import fx
from torchlazy.autograd.plan import RecomputePlan
from torchlazy.autograd.step import BACKWARD, STAGE, Stages, sides_of
from torchlazy.prims.passes.graph_passes import erase_dead_code
from torchlazy.prims.plan_graph import PlanGraph

COPY_OF = "copy_of"
"""The key of `node.meta` of a copy: the name of the forward node that it computes again. Lowering knows it too, and
keeps copies from running earlier than here."""


def rematerialise(graph: fx.Graph, plan: RecomputePlan, *, stages: Stages) -> fx.Graph:
    """A new graph in which `plan` is carried out; forward nodes that only backward read are gone."""
    sides = sides_of(graph, stages)
    again = dict.fromkeys(plan.recomputed)
    new = PlanGraph()
    originals: dict[fx.Node, fx.Node] = {}
    copies: dict[fx.Node, fx.Node] = {}

    def in_backward(node: fx.Node) -> fx.Node:
        return copies[node] if node in again else originals[node]

    for node in graph.nodes:
        if sides.get(node) != BACKWARD:
            originals[node] = new.node_copy(node, originals.__getitem__)
            continue
        for part in _missing(node, again, copies):
            copy = copies[part] = new.node_copy(part, in_backward)
            copy.meta.update({STAGE: BACKWARD, COPY_OF: part.name})
        originals[node] = new.node_copy(node, in_backward)
    erase_dead_code(new)
    return new


def _missing(reader: fx.Node, again: dict[fx.Node, None], copies: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """The recomputed values that `reader` needs and that have no copy yet, operands before what reads them."""
    found: list[fx.Node] = []
    seen: dict[fx.Node, None] = {}
    stack = [(operand, False) for operand in reversed(reader.all_input_nodes)]
    while stack:
        node, is_ready = stack.pop()
        if is_ready:
            found.append(node)
        elif node in again and node not in copies and node not in seen:
            seen[node] = None
            stack.append((node, True))
            stack.extend((operand, False) for operand in reversed(node.all_input_nodes))
    return found

"""A planned step split at a cut: the program before it, the program after it, and what crosses.

The graph is one of primitives, of both programs together, as the passes over the whole left it: what the first part
keeps for the second has been chosen, the second's copies of recipes stand in it, and values lie as their readers want.

Invariant: run one after the other, the halves compute what the graph computes; nothing is computed in both but views,
constants, and the copies that the plan put there. A value crosses in the form in which the whole graph would have
stored it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx
from torchlazy.autograd.cost import Recompute, is_alias, recompute_kind
from torchlazy.autograd.step import BACKWARD, FORWARD, STAGE, ancestors
from torchlazy.prims import ops
from torchlazy.prims.errors import GraphError
from torchlazy.prims.passes.graph_passes import MEMORY_DTYPE, erase_dead_code
from torchlazy.prims.plan_graph import PlanGraph

HELD = "held"
"""Placeholders of the second half: `held0`, ... are what crosses, `result0`, ... outputs of the first half."""
RESULT = "result"


@dataclass(frozen=True)
class Halves:
    """`first`: the given inputs -> its results, then what crosses. `second`: what crosses (`held`), results of the
    first (`result`) and inputs, each by its name -> the other results. `crossing`: nodes of the whole graph."""

    first: fx.Graph
    second: fx.Graph
    crossing: tuple[fx.Node, ...]


def split_step(
    graph: fx.Graph, *, inputs: Sequence[str], results: int, lost: Collection[str] = (), written: Collection[str] = ()
) -> Halves:
    """The halves of a graph whose calls are marked "forward" and "backward" in `meta["stage"]`.

    `inputs`: names of the placeholders that the first half has (all of them, read or not); `results`: how many outputs
    are the first half's; `lost`: inputs that the first half overwrites; `written`: placeholders that the second half
    needs whether or not it reads them, because it writes into their memory. GraphError where a result of the first
    half depends on the second.
    """
    told = graph.output_node().args[0]
    assert isinstance(told, tuple)
    outputs: tuple[fx.Node, ...] = tuple(node for node in told if isinstance(node, fx.Node))
    later = _later(graph, outputs[:results])
    bad = next((node for node in outputs[:results] if node in later), None)
    if bad is not None:
        raise GraphError(
            f"{bad.name} is a result before the cut, but depends on what comes after / plan them separately"
        )
    results_of = {node: i for i, node in reversed(list(enumerate(outputs[:results]))) if node.op == "call_function"}

    read = _read_first(graph, outputs[results:], later)
    order = {node: position for position, node in enumerate(graph.nodes)}
    needed = [n for n in sorted(read, key=order.__getitem__) if n not in results_of and _crosses(n, lost)]
    stored_as = {node: _rounded_form(node, later) for node in needed}
    crossing = tuple(dict.fromkeys(stored_as.values()))
    second = _second(graph, outputs[results:], later, read, stored_as, results_of, written)
    first = PlanGraph()
    env: dict[fx.Node, fx.Node] = {}
    first_inputs = dict.fromkeys(inputs)
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in first_inputs:
            env[node] = first.node_copy(node)
        elif node.op == "call_function" and node not in later and all(o in env for o in node.all_input_nodes):
            env[node] = first.node_copy(node, env.__getitem__)
    first.output(tuple(env[node] for node in outputs[:results]) + tuple(_as_held(first, env[n]) for n in crossing))
    erase_dead_code(first)
    return Halves(first, second, crossing)


def _later(graph: fx.Graph, results: Sequence[fx.Node]) -> dict[fx.Node, None]:
    """The calls after the cut: those that are marked so, and what depends on them; of those without a mark (copies
    that give an output the layout which it promised) what the first results do not need."""
    needed = ancestors(results)
    later: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        stage = node.meta.get(STAGE)
        is_marked = stage == BACKWARD or (stage != FORWARD and node not in needed)
        if is_marked or any(operand in later for operand in node.all_input_nodes):
            later[node] = None
    return later


def _crosses(node: fx.Node, lost: Collection[str]) -> bool:
    return node.name in lost if node.op == "placeholder" else not _is_made_again(node)


def _second(
    graph: fx.Graph,
    outputs: Sequence[fx.Node],
    later: dict[fx.Node, None],
    read: dict[fx.Node, None],
    stored_as: dict[fx.Node, fx.Node],
    results_of: dict[fx.Node, int],
    written: Collection[str],
) -> fx.Graph:
    made = PlanGraph()
    env: dict[fx.Node, fx.Node] = {}
    held: dict[fx.Node, fx.Node] = {}
    for number, node in enumerate(dict.fromkeys(stored_as.values())):
        held[node] = made.create_node("placeholder", f"{HELD}{number}")
        held[node].meta["val"] = replace(node.meta["val"], dtype=_held_dtype(node))
    for node, number in results_of.items():
        if node in read and not _is_made_again(node):
            env[node] = made.create_node("placeholder", f"{RESULT}{number}")
            env[node].meta["val"] = node.meta["val"]
    for node in graph.nodes:
        if node.op != "placeholder" or node in stored_as:
            continue
        if node in read or node.name in written:
            env[node] = made.node_copy(node)
    for node, form in stored_as.items():
        env[node] = held[form]
        if held[form].meta["val"].dtype != node.meta["val"].dtype:
            env[node] = made.call_function(ops.convert, (held[form],), {"dtype": node.meta["val"].dtype})
            env[node].meta.update({**node.meta, STAGE: BACKWARD})
    for node in graph.nodes:
        if node.op == "call_function" and node not in env and (node in later or node in read):
            env[node] = made.node_copy(node, env.__getitem__)
    made.output(tuple(env[node] for node in outputs))
    erase_dead_code(made)
    return made


def _read_first(graph: fx.Graph, outputs: Sequence[fx.Node], later: dict[fx.Node, None]) -> dict[fx.Node, None]:
    """What the second half reads of what stands before the cut; of views and constants what they are made of, too."""
    read: dict[fx.Node, None] = {}
    stack = [operand for node in later for operand in node.all_input_nodes if operand not in later]
    stack += [node for node in outputs if node not in later]
    while stack:
        node = stack.pop()
        if node not in read:
            read[node] = None
            if _is_made_again(node):
                stack.extend(node.all_input_nodes)
    return read


def _is_made_again(node: fx.Node) -> bool:
    """Whether the second half has the value for nothing: as a view, or from no memory at all."""
    if node.op != "call_function":
        return False
    return is_alias(node) or recompute_kind(node) is Recompute.CONSTANT


def _rounded_form(node: fx.Node, later: dict[fx.Node, None]) -> fx.Node:
    """The half of a value that may be stored as one, where the first half has it: one memory, not two."""
    dtype = node.meta.get(MEMORY_DTYPE)
    if dtype is None or dtype == node.meta["val"].dtype:
        return node
    halves = (user for user in node.users if user.target is ops.convert and user.kwargs["dtype"] == dtype)
    return next((half for half in halves if half not in later and MEMORY_DTYPE not in half.meta), node)


def _held_dtype(node: fx.Node) -> torch.dtype:
    """The dtype in which the whole graph would have stored the value."""
    found: torch.dtype = node.meta.get(MEMORY_DTYPE, node.meta["val"].dtype)
    return found


def _as_held(graph: PlanGraph, node: fx.Node) -> fx.Node:
    dtype = _held_dtype(node)
    if dtype == node.meta["val"].dtype:
        return node
    rounded = graph.call_function(ops.convert, (node,), {"dtype": dtype})
    rounded.meta.update({key: node.meta[key] for key in ("frame", STAGE) if key in node.meta})
    rounded.meta["val"] = replace(node.meta["val"], dtype=dtype)
    return rounded

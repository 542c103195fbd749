"""How much memory a graph's intermediate values take, step by step in the graph's order.

Inputs and outputs do not count: both are the caller's, and no plan changes them. Views count as their base, constants
as nothing.

Invariant: pure functions of a graph of primitives; each value lives from its node to its last reader, that of a value
inside a kernel being the last reader of the kernel's results.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass

from torch import fx
from torchlazy.autograd.cost import Recompute, bytes_of, recompute_kind, storage_of
from torchlazy.autograd.step import FORWARD, chains_of, memory_readers_of


@dataclass(frozen=True)
class Liveness:
    """`peak_bytes` are first live right after node `peak` ran; `live_at_peak` are the values, largest first."""

    peak_bytes: int
    peak: fx.Node | None
    live_at_peak: tuple[fx.Node, ...]


def all_values(graph: fx.Graph) -> dict[fx.Node, None]:
    """Every value in memory: how a graph runs operator by operator."""
    return {node: None for node in graph.nodes if _can_be_stored(node)}


def fused_values(graph: fx.Graph) -> dict[fx.Node, None]:
    """A model of what a fusing compiler puts into memory: results of library calls and reductions, what these calls
    read, and what several kernels read unless loading it takes longer than computing it in each."""
    stored: dict[fx.Node, None] = {}
    calls = {node: FORWARD for node in graph.nodes if node.op == "call_function"}
    memory_readers = memory_readers_of(calls)
    in_memory = {*memory_readers, *(storage_of(result) for result in graph.output_node().all_input_nodes)}
    _, too_long = chains_of(calls, memory_readers)
    sinks: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in reversed(graph.nodes):
        readers: frozenset[fx.Node] = frozenset()
        for user in node.users:
            readers |= sinks.get(user, frozenset((user,)))
        is_inlined = recompute_kind(node) in (Recompute.VIEW, Recompute.FUSED, Recompute.INDEXED)
        if is_inlined and not (_can_be_stored(node) and (node in in_memory or (len(readers) > 1 and node in too_long))):
            sinks[node] = readers
        elif _can_be_stored(node):
            stored[node] = None
    return dict(reversed(stored.items()))


def _can_be_stored(node: fx.Node) -> bool:
    if node.op != "call_function" or isinstance(node.meta["val"], tuple):
        return False
    return recompute_kind(node) not in (Recompute.VIEW, Recompute.CONSTANT)


def live_bytes(graph: fx.Graph, stored: Collection[fx.Node] | None = None) -> Liveness:
    """The peak of the bytes of `stored` values (all, if None) over the graph."""
    values = all_values(graph) if stored is None else stored
    caller = {storage_of(result) for result in graph.output_node().all_input_nodes}
    order = {node: position for position, node in enumerate(graph.nodes)}
    last: dict[fx.Node, int] = {}
    for node in reversed(graph.nodes):
        # A value inside a kernel reads its operands when that kernel runs: with its own last reader.
        when = order[node] if node in values or not _is_inside(node) else last.get(node, order[node])
        for operand in node.all_input_nodes:
            last[operand] = max(last.get(operand, 0), when)
    live: dict[fx.Node, None] = {}
    ends: dict[int, list[fx.Node]] = {}
    held, best = 0, Liveness(0, None, ())
    for node, position in order.items():
        if node in values and node not in caller:
            live[node] = None
            held += bytes_of(node)
            ends.setdefault(max(position, last.get(node, 0)), []).append(node)
        if held > best.peak_bytes:
            best = Liveness(held, node, tuple(sorted(live, key=lambda value: (-bytes_of(value), order[value]))))
        for value in ends.pop(position, ()):
            del live[value]
            held -= bytes_of(value)
    return best


def _is_inside(node: fx.Node) -> bool:
    """Whether the node runs only within its readers: views, and fused values that are not stored."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    return recompute_kind(node) in (Recompute.VIEW, Recompute.FUSED, Recompute.INDEXED)

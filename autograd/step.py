"""A whole training step as the partition sees it: the side of each value, what crosses, what exists anyway.

A step's graph holds forward, loss, backward and optimizer. Forward is what the loss is computed from; all the rest,
the optimizer included, is backward. What backward reads of forward must be held until it does, or computed again.

Invariant: a `TrainingStep` describes one unchanged graph, all its tables are in the graph's order, nothing here edits
nodes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from torch import fx
from torchlazy.autograd.cost import (
    Recompute,
    bytes_of,
    is_alias,
    recompute_kind,
    storage_of,
    work_in_bytes,
    work_of,
)
from torchlazy.prims.errors import GraphError

FORWARD = "forward"
BACKWARD = "backward"
STAGE = "stage"
"""The key of `node.meta` under which the side that an operator was recorded on travels through decomposition."""

Stages = Callable[[fx.Node], str]

READ_PER_BYTE = 2.0
"""A fused value may read this many bytes for each of its own when it is computed again: holding it takes a store and a
load, and a value that no library call reads need not be stored at all in the forward if nothing holds it."""

READ_PER_STORED_BYTE = 1.25
"""The same for a value that the forward stores in any case, because a library call reads it: only the load is saved.
The quarter is for row statistics and weights, which the cache serves (lowering allows the same slack)."""


def split_point(graph: fx.Graph, loss: fx.Node | None = None) -> Stages:
    """Which side each node is on, as a function of the node: "forward" or "backward".

    With `loss`, forward is the loss and what it is computed from. Without, it is what the recorder marked in
    `meta["stage"]`; where it marked one side only, the nodes without a mark are the other side. Inputs are forward.
    """
    if loss is not None:
        return _ancestry(graph, loss)
    calls = [node for node in graph.nodes if node.op == "call_function"]
    marks = {node.meta.get(STAGE) for node in calls} - {None, ""}
    if not marks or marks - {FORWARD, BACKWARD}:
        found = f"marks {sorted(map(str, marks))}" if marks else "no marks"
        raise GraphError(
            f"the nodes have {found} in meta['{STAGE}'], so forward and backward cannot be distinguished"
            f" / mark ATen nodes '{FORWARD}' or '{BACKWARD}', or pass the loss"
        )
    default = FORWARD if FORWARD not in marks else BACKWARD
    sides = {node: node.meta.get(STAGE) or default for node in calls}
    return lambda node: sides.get(node, FORWARD)


def _ancestry(graph: fx.Graph, loss: fx.Node) -> Stages:
    needed = {loss: None}
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(dict.fromkeys(node.all_input_nodes))
    for node in graph.nodes:  # a saved second result is no ancestor of the loss, but there with the first
        if node.target is operator.getitem and node.args[0] in needed:
            needed[node] = None
    return lambda node: FORWARD if node in needed or node.op == "placeholder" else BACKWARD


@dataclass(frozen=True)
class Chain:
    """A value as a kernel computes it from what is in memory: the operations, and the bytes read of each source."""

    work: dict[fx.Node, int] = field(default_factory=dict)
    reads: dict[fx.Node, int] = field(default_factory=dict)

    @property
    def total_work(self) -> int:
        return sum(self.work.values())

    @property
    def total_reads(self) -> int:
        return sum(self.reads.values())


@dataclass(frozen=True)
class TrainingStep:
    """The facts about one graph that every plan for it shares."""

    order: dict[fx.Node, int]
    sides: dict[fx.Node, str]  # of calls
    crossing: dict[fx.Node, tuple[fx.Node, ...]]  # forward calls that backward reads -> its readers
    outputs: frozenset[fx.Node]  # storages that the caller gets, held whatever the plan
    memory_readers: dict[fx.Node, tuple[fx.Node, ...]]  # storage -> readers that need it in memory
    chains: dict[fx.Node, Chain]  # of forward calls
    too_long: dict[fx.Node, str]  # fused values that are dearer to compute again than to load, and why
    lost: frozenset[fx.Node] = frozenset()  # inputs and outputs that need not be there any more when backward runs
    whole: frozenset[fx.Node] = frozenset()  # results to hold rather than what they are computed from

    def is_available(self, node: fx.Node) -> bool:
        """Whether backward reads the value at no cost: inputs and outputs are held anyway, constants take no memory."""
        base = storage_of(node)
        if base in self.lost:
            return False
        return base in self.outputs or recompute_kind(base) in (Recompute.GIVEN, Recompute.CONSTANT)


def analyse(graph: fx.Graph, stages: Stages) -> TrainingStep:
    """The facts about a verified prims graph."""
    order = {node: position for position, node in enumerate(graph.nodes)}
    outputs = frozenset(storage_of(result) for result in graph.output_node().all_input_nodes)
    sides = sides_of(graph, stages)
    crossing = {}
    for node, side in sides.items():
        if side == FORWARD:
            readers = [user for user in node.users if sides.get(user) == BACKWARD]
            if readers:
                crossing[node] = tuple(sorted(readers, key=order.__getitem__))
    memory_readers = memory_readers_of(order)
    chains, too_long = chains_of(sides, memory_readers)
    return TrainingStep(order, sides, crossing, outputs, memory_readers, chains, too_long)


def sides_of(graph: fx.Graph, stages: Stages) -> dict[fx.Node, str]:
    """Which side each call is on, in the graph's order; a part of a result is where the whole is."""
    sides: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            sides[node] = sides[node.all_input_nodes[0]] if node.target is operator.getitem else stages(node)
    return sides


def needs_in_memory(reader: fx.Node, operand: fx.Node) -> bool:
    """Whether `reader` takes this operand from memory, not from registers: library calls, indexing and windows do."""
    kind = recompute_kind(reader)
    if kind is Recompute.INDEXED:
        return reader.args[0] is operand
    return kind in (Recompute.PRODUCT, Recompute.NEVER) and reader.target is not operator.getitem


def memory_readers_of(order: Iterable[fx.Node]) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """For each storage its readers that need it in memory, in the graph's order."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in order:
        if node.op == "call_function":
            for operand in node.all_input_nodes:
                if needs_in_memory(node, operand):
                    found.setdefault(storage_of(operand), []).append(node)
    return {node: tuple(readers) for node, readers in found.items()}


def chains_of(
    sides: dict[fx.Node, str], memory_readers: dict[fx.Node, tuple[fx.Node, ...]]
) -> tuple[dict[fx.Node, Chain], dict[fx.Node, str]]:
    """The chain of each forward value, cut where computing it in the backward would take longer than loading it."""
    chains: dict[fx.Node, Chain] = {}
    too_long: dict[fx.Node, str] = {}
    for node, side in sides.items():
        if side != FORWARD:
            continue
        chain = chains[node] = _chain(node, chains, too_long)
        if recompute_kind(node) in (Recompute.FUSED, Recompute.INDEXED):
            is_stored = any(sides[reader] == FORWARD for reader in memory_readers.get(node, ()))
            reason = _why_too_long(node, chain, is_stored)
            if reason:
                too_long[node] = reason
    return chains, too_long


def _chain(node: fx.Node, chains: dict[fx.Node, Chain], too_long: dict[fx.Node, str]) -> Chain:
    work = {node: work_of(node)}
    reads: dict[fx.Node, int] = {}
    for operand in node.all_input_nodes:
        base, inner = storage_of(operand), chains.get(operand)
        if needs_in_memory(node, operand):
            reads[operand] = min(bytes_of(operand), bytes_of(node))
        elif inner is None or base in too_long or not _is_inlined(base):
            reads[base] = max(reads.get(base, 0), min(bytes_of(base), bytes_of(operand)))
        else:
            work.update(inner.work)
            for source, count in inner.reads.items():
                seen = min(count, bytes_of(operand)) if is_alias(operand) else count
                reads[source] = max(reads.get(source, 0), seen)
    return Chain(work, reads)


def _is_inlined(base: fx.Node) -> bool:
    return recompute_kind(base) in (Recompute.FUSED, Recompute.INDEXED, Recompute.CONSTANT)


def _why_too_long(node: fx.Node, chain: Chain, is_stored: bool) -> str:
    size = bytes_of(node)
    held = size if is_stored else 2 * size
    work = work_in_bytes(node, chain.total_work)
    if work > held:
        return f"computing it takes the time of {work} bytes, holding it moves {held}"
    allowed = READ_PER_STORED_BYTE if is_stored else READ_PER_BYTE
    if chain.total_reads > allowed * size:
        return f"its recipe reads {chain.total_reads} bytes for {size}"
    source = node.args[0] if recompute_kind(node) is Recompute.INDEXED else None
    if isinstance(source, fx.Node) and recompute_kind(storage_of(source)) is not Recompute.GIVEN:
        return f"it reads {source.name} at computed positions, which would have to be in memory again"
    return ""


def ancestors(results: Collection[fx.Node]) -> dict[fx.Node, None]:
    """The nodes that some results are computed from, themselves included."""
    found: dict[fx.Node, None] = {}
    stack = list(results)
    while stack:
        node = stack.pop()
        if node not in found:
            found[node] = None
            stack.extend(node.all_input_nodes)
    return found

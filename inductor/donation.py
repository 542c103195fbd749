"""Donated outputs: which may be written straight into an input's memory, and which go through a copy at the end.

A donated output is written in place where its node's store cannot meet a reader of the old value: every other reader
runs before it (an order edge) and its own reads of the input are at the element it writes. Where that cannot be (a
reader needs the output itself, the layouts differ, an extern call or another input is the output) the output keeps
memory of its own and a copy node, after all readers, moves it into the input.

Invariant: in the planned graph every donated output is written by a pointwise loop node or a reduction with the
input's layout, and the order edges keep the graph acyclic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy
from torchlazy.inductor.access import NodeFacts, collect_facts
from torchlazy.inductor.dependencies import ancestors, collect_dependencies, topological
from torchlazy.inductor.ir import Buffer, LoopGraph, LoopNode, Node, ViewNode
from torchlazy.inductor.ops_handler import OpsHandler


@dataclass(frozen=True)
class DonationPlan:
    """The nodes with copies appended, their facts, the outputs by their new names, and (reader, overwriter) edges."""

    nodes: tuple[Node, ...]
    facts: tuple[NodeFacts | None, ...]
    outputs: tuple[str, ...]
    donations: dict[str, str]
    anti: tuple[tuple[int, int], ...]
    dropped: tuple[tuple[str, str, str], ...]  # (output, input, why it is not written in place)


def plan_donations(graph: LoopGraph, nodes: Sequence[Node], facts: Sequence[NodeFacts | None]) -> DonationPlan:
    """Decide for each donation; the copies of those that are not direct come last in the node list."""
    return _DonationPlanner(graph, nodes, facts).plan()


class _DonationPlanner:
    def __init__(self, graph: LoopGraph, nodes: Sequence[Node], facts: Sequence[NodeFacts | None]) -> None:
        self.graph = graph
        self.nodes = list(nodes)
        self.facts = list(facts)
        self.inputs = {buffer.name: buffer for buffer in graph.inputs}
        self.dependencies = collect_dependencies(nodes, facts)
        self.windows = _windows(nodes)
        order = topological(self.dependencies.before, lambda position: position)
        self.needs = ancestors(self.dependencies.before, order)
        self.followers: list[list[int]] = [[] for _ in nodes]  # who needs a node directly, order edges included
        for position, sources in enumerate(self.dependencies.before):
            for source in sources:
                self.followers[source].append(position)
        self.anti: list[tuple[int, int]] = []
        self.kept_outputs = frozenset(name for name in graph.outputs if name not in graph.donations)
        self.renamed: dict[str, str] = {}
        self.dropped: list[tuple[str, str, str]] = []

    def plan(self) -> DonationPlan:
        donations: dict[str, str] = {}
        copied: list[tuple[str, str]] = []
        taken: set[str] = set()
        snapshots = self._snapshot_inputs()
        for output, target in self.graph.donations.items():
            if output == target:
                donations[output] = target
                taken.add(target)
                continue
            if self._is_wanted_old(target) or target in taken:
                self.dropped.append((output, target, "the input is donated twice, or its old value is an output"))
                continue
            taken.add(target)
            reason = self._try_in_place(output, target)
            if reason:
                self.dropped.append((output, target, f"copied at the end: {reason}"))
                copied.append((output, target))
            else:
                donations[output] = target
        for output, target in copied:
            name = f"{output}_into_{target}"
            copy = self._append_copy(snapshots.get(output, output), self.inputs[target], name)
            self._order_after_readers(target, copy)
            self.renamed[output] = name
            donations[name] = target
        outputs = tuple(self.renamed.get(name, name) for name in self.graph.outputs)
        return DonationPlan(
            tuple(self.nodes), tuple(self.facts), outputs, donations, tuple(self.anti), tuple(self.dropped)
        )

    def _snapshot_inputs(self) -> dict[str, str]:
        """An output that is another input is read into memory of its own first: that input may be overwritten too."""
        snapshots: dict[str, str] = {}
        for output, target in self.graph.donations.items():
            if output not in self.inputs or output == target:
                continue
            name = f"{output}_before_{target}"
            position = self._append_copy(output, self.inputs[target], name)
            readers = self.dependencies.readers
            readers[output] = (*readers.get(output, ()), position)
            snapshots[output] = name
        return snapshots

    def _is_wanted_old(self, target: str) -> bool:
        """Whether the input, or a window on it, is an output in its own right and not overwritten itself."""
        names = {target, *self.windows.get(target, ())}
        return not self.kept_outputs.isdisjoint(names)

    def _readers(self, target: str) -> list[int]:
        names = [target, *self.windows.get(target, ())]
        return [reader for name in names for reader in self.dependencies.readers.get(name, ())]

    def _try_in_place(self, output: str, target: str) -> str:
        """Record the order edges that make writing in place safe, or say why it is not."""
        memory = self.inputs[target]
        position = self.dependencies.producer.get(output)
        if position is None:
            return "the output is another input"
        node, facts = self.nodes[position], self.facts[position]
        if not isinstance(node, LoopNode) or facts is None:
            return "the output is not computed by a loop"
        buffer = next(b for b in node.outputs if b.name == output)
        if not _is_same_layout(buffer, memory):
            return "the layouts differ"
        store = next(form for name, form in facts.stores if name == output)
        for name, form in facts.loads:
            if name in self.windows.get(target, ()) or (name == target and (facts.is_reduction or form != store)):
                return "its own node reads other elements of the input"
        readers = [r for r in self._readers(target) if r != position and not isinstance(self.nodes[r], ViewNode)]
        for reader in readers:
            if self.needs[reader] >> position & 1:
                return "a reader of the old value needs the new one"
        for reader in readers:
            self._add_order(reader, position)
        return ""

    def _add_order(self, reader: int, writer: int) -> None:
        self.anti.append((reader, writer))
        self.followers[reader].append(writer)
        extra = (self.needs[reader] | 1 << reader) & ~self.needs[writer]
        if not extra:
            return
        waiting = [writer]  # everybody who needs the writer; who has all of it already has told those behind it
        while waiting:
            position = waiting.pop()
            if extra & ~self.needs[position]:
                self.needs[position] |= extra
                waiting.extend(self.followers[position])

    def _order_after_readers(self, target: str, copy: int) -> None:
        for reader in self._readers(target):
            if not isinstance(self.nodes[reader], ViewNode):
                self._add_order(reader, copy)

    def _append_copy(self, source: str, layout: Buffer, name: str) -> int:
        """A pointwise node that reads `source` and writes a buffer with the shape and layout of `layout`."""
        read_from = self._buffer(source)
        output = Buffer(name, layout.dtype, layout.shape, layout.strides, layout.device, layout.offset)

        def body(ops: OpsHandler, index: tuple[sympy.Expr, ...], _: tuple[sympy.Expr, ...]) -> object:
            return ops.load(source, read_from.element(index))

        node = LoopNode((output,), tuple(layout.shape), body, origins=("donation copy",))
        self.nodes.append(node)
        self.facts.append(collect_facts(node))
        position = len(self.nodes) - 1
        mask = 0
        producer = self.dependencies.producer.get(source)
        if producer is not None:
            mask = self.needs[producer] | 1 << producer
        self.needs.append(mask)
        self.followers.append([])
        if producer is not None:
            self.followers[producer].append(position)
        self.dependencies.producer[name] = position
        return position

    def _buffer(self, name: str) -> Buffer:
        if name in self.inputs:
            return self.inputs[name]
        node = self.nodes[self.dependencies.producer[name]]
        if isinstance(node, ViewNode):
            return node.output
        return next(buffer for buffer in node.outputs if buffer is not None and buffer.name == name)


def _windows(nodes: Sequence[Node]) -> dict[str, tuple[str, ...]]:
    """For each buffer the views of it and the views of those."""
    windows: dict[str, list[str]] = {}
    roots: dict[str, list[str]] = {}
    for node in nodes:
        if isinstance(node, ViewNode):
            above = [node.source, *roots.get(node.source, ())]
            roots[node.output.name] = above
            for name in above:
                windows.setdefault(name, []).append(node.output.name)
    return {name: tuple(views) for name, views in windows.items()}


def _is_same_layout(a: Buffer, b: Buffer) -> bool:
    """Equal elements at equal places: strides of dimensions of size 1 mean nothing."""
    if a.dtype != b.dtype or tuple(a.shape) != tuple(b.shape) or a.offset != b.offset or a.device != b.device:
        return False
    return all(n == 1 or s == t for n, s, t in zip(a.shape, a.strides, b.strides, strict=True))

"""What must run before what: data dependencies, and memory that a donated output overwrites.

Invariant: `Dependencies` is a DAG over node positions. `before[n]` holds the producers of what node n reads, and,
where n writes into a donated input, every other reader of that input (`anti` says which of the edges are of this
kind).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torchlazy.inductor.access import NodeFacts
from torchlazy.inductor.ir import BufferRef, ExternNode, LoopNode, Node


@dataclass(frozen=True)
class Dependencies:
    """Edges by node position; `producer` and `readers` by buffer name (loads, extern arguments and view sources)."""

    before: tuple[tuple[int, ...], ...]
    anti: frozenset[tuple[int, int]]
    producer: dict[str, int]
    readers: dict[str, tuple[int, ...]]


def extern_refs(node: ExternNode) -> list[BufferRef]:
    """The buffers and scalars among an extern call's arguments, each as often as it stands there."""
    found: list[BufferRef] = []
    pending: list[Any] = [node.kwargs, node.args]
    while pending:
        value = pending.pop()
        if isinstance(value, BufferRef):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            pending += reversed(value)
        elif isinstance(value, dict):
            pending += reversed(value.values())
    return found


def extern_reads(node: ExternNode) -> tuple[str, ...]:
    """The buffers among an extern call's arguments, each once."""
    return tuple(dict.fromkeys(ref.name for ref in extern_refs(node) if not ref.scalar))


def node_reads(node: Node, facts: NodeFacts | None) -> tuple[str, ...]:
    """The buffers a node needs."""
    if isinstance(node, LoopNode):
        assert facts is not None
        return facts.reads
    if isinstance(node, ExternNode):
        return extern_reads(node)
    return (node.source,)


def node_writes(node: Node) -> tuple[str, ...]:
    """The buffers a node defines."""
    if isinstance(node, (LoopNode, ExternNode)):
        return tuple(buffer.name for buffer in node.outputs if buffer is not None)
    return (node.output.name,)


def collect_dependencies(
    nodes: Sequence[Node], facts: Sequence[NodeFacts | None], anti: Sequence[tuple[int, int]] = ()
) -> Dependencies:
    """Data edges of the nodes, and the given (reader, overwriter) edges."""
    producer: dict[str, int] = {}
    for position, node in enumerate(nodes):
        for name in node_writes(node):
            producer[name] = position
    readers: dict[str, list[int]] = {}
    before: list[dict[int, None]] = []
    for position, node in enumerate(nodes):
        sources: dict[int, None] = {}
        for name in node_reads(node, facts[position]):
            readers.setdefault(name, []).append(position)
            if name in producer:
                sources[producer[name]] = None
        before.append(sources)
    for reader, writer in anti:
        before[writer][reader] = None
    return Dependencies(
        before=tuple(tuple(sources) for sources in before),
        anti=frozenset(anti),
        producer=producer,
        readers={name: tuple(positions) for name, positions in readers.items()},
    )


def topological(before: Sequence[Sequence[int]], key: Callable[[int], Any]) -> list[int]:
    """Positions, each after all in its `before`; among the ready ones the least key first."""
    waiting = [len(set(sources)) for sources in before]
    after: list[list[int]] = [[] for _ in before]
    for position, sources in enumerate(before):
        for source in set(sources):
            after[source].append(position)
    ready = [(key(position), position) for position, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, position = heapq.heappop(ready)
        order.append(position)
        for follower in after[position]:
            waiting[follower] -= 1
            if waiting[follower] == 0:
                heapq.heappush(ready, (key(follower), follower))
    if len(order) != len(before):
        stuck = [position for position, count in enumerate(waiting) if count > 0]
        raise ValueError(
            f"dependencies: nodes {stuck[:10]} wait for each other\n"
            "  a loop graph must be listed in an order that respects its dependencies: check what lowering emitted"
        )
    return order


def ancestors(before: Sequence[Sequence[int]], order: Sequence[int]) -> list[int]:
    """For each position the bit mask of all positions it needs, directly or not."""
    masks = [0] * len(before)
    for position in order:
        mask = 0
        for source in before[position]:
            mask |= masks[source] | (1 << source)
        masks[position] = mask
    return masks


def bits(mask: int) -> Iterator[int]:
    """The positions of the set bits, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low

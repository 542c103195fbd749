"""Which nodes need inputs that come late: an optimizer's, behind a backward that needs only what the forward had.

A program that is launched in stages, while its inputs come, must not wait for these in a kernel that could run before.

Invariant: what reads a late node's output is late.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torchlazy.inductor.access import NodeFacts
from torchlazy.inductor.dependencies import node_reads, node_writes
from torchlazy.inductor.ir import Buffer, Node

_LEAST_SHARE = 8  # of the nodes that must lie between


def late_nodes(inputs: Sequence[Buffer], nodes: Sequence[Node], facts: Sequence[NodeFacts | None]) -> frozenset[int]:
    """Positions of the nodes behind the longest stretch that reads no new input, as far as they depend on inputs that
    come there. Empty where no stretch is an eighth of the nodes."""
    reads = [node_reads(node, fact) for node, fact in zip(nodes, facts, strict=True)]
    first: dict[str, int] = {}
    names = {buffer.name for buffer in inputs}
    for position, read in enumerate(reads):
        for name in read:
            if name in names:
                first.setdefault(name, position)
    begins = sorted(set(first.values()))
    gaps = [(after - before, after) for before, after in pairwise(begins)]
    length, begin = max(gaps, default=(0, 0))
    if length * _LEAST_SHARE < len(nodes):
        return frozenset()
    late = {name for name, position in first.items() if position >= begin}
    found: set[int] = set()
    for position, node in enumerate(nodes):
        if not late.isdisjoint(reads[position]):
            found.add(position)
            late.update(node_writes(node))
    return frozenset(found)

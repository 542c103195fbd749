"""Maximum flow and minimum cut on a directed graph with integer capacities. Knows no tensors.

Invariant: the result is a function of the network alone, edges in the order they were added: equal networks give equal
cuts in every process. Among the minimum cuts it is the one nearest to the source or to the sink, as asked.

The algorithm is Dinic's: breadth-first levels, then a blocking flow along them with a current edge a node; both loops
are iterative, so that depth of the graph is not bounded by Python's stack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

INFINITY = 1 << 62
"""The capacity of an edge that no cut may contain."""


class UnboundedCutError(ValueError):
    """Every cut contains an edge of capacity INFINITY: a path of such edges leads from source to sink."""


@dataclass(frozen=True, slots=True)
class MinimumCut:
    """A minimum cut. `edges` are the numbers, in order, of the edges that lead from the source's side to the sink's."""

    value: int
    source_side: frozenset[int]
    edges: tuple[int, ...]


class Network:
    """Nodes 0..n-1 and directed edges with capacities; parallel edges and self-loops are legal."""

    def __init__(self) -> None:
        self._adjacent: list[list[int]] = []  # arcs that leave each node: 2 * edge, or 2 * edge + 1 for its reverse
        self._heads: list[int] = []  # by arc
        self._capacities: list[int] = []  # by edge

    @property
    def node_count(self) -> int:
        return len(self._adjacent)

    @property
    def edge_count(self) -> int:
        return len(self._capacities)

    def add_node(self) -> int:
        """The number of a new node."""
        self._adjacent.append([])
        return len(self._adjacent) - 1

    def add_edge(self, tail: int, head: int, capacity: int) -> int:
        """The number of a new edge; capacity >= 0, from INFINITY on it counts as unbounded."""
        if not (0 <= tail < self.node_count and 0 <= head < self.node_count):
            raise ValueError(f"edge {tail} -> {head}: the network has nodes 0..{self.node_count - 1} / add_node first")
        if capacity < 0:
            raise ValueError(f"edge {tail} -> {head}: capacity {capacity} is negative / pass an int >= 0")
        number = len(self._capacities)
        self._capacities.append(capacity)
        self._heads += (head, tail)
        self._adjacent[tail].append(2 * number)
        self._adjacent[head].append(2 * number + 1)
        return number

    def min_cut(self, source: int, sink: int, *, nearest: Literal["source", "sink"] = "source") -> MinimumCut:
        """A minimum cut between two nodes; UnboundedCutError where each one has an edge of capacity INFINITY."""
        if source == sink:
            raise ValueError(f"node {source} is both source and sink / a cut parts two nodes")
        # Any cut of finite edges weighs less than this, so it stands for INFINITY without big sums.
        unbounded = sum(c for c in self._capacities if c < INFINITY) + 1
        residual: list[int] = []
        for capacity in self._capacities:
            residual += (capacity if capacity < INFINITY else unbounded, 0)
        value = _max_flow(self._adjacent, self._heads, residual, source, sink, unbounded)
        if value >= unbounded:
            raise UnboundedCutError(f"no finite cut parts {source} from {sink} / make one edge of each path finite")
        if nearest == "source":
            side = _reached(self._adjacent, self._heads, residual, source)
        else:
            side = set(range(self.node_count)) - _reaching(self._adjacent, self._heads, residual, sink)
        edges = tuple(
            number
            for number in range(self.edge_count)
            if self._heads[2 * number + 1] in side and self._heads[2 * number] not in side
        )
        return MinimumCut(value, frozenset(side), edges)


def _max_flow(
    adjacent: list[list[int]], heads: list[int], residual: list[int], source: int, sink: int, unbounded: int
) -> int:
    """The flow's value, or some number >= unbounded as soon as that is reached; `residual` is updated in place."""
    total = 0
    while total < unbounded:
        levels = _levels(adjacent, heads, residual, source, sink)
        if levels[source] < 0:
            break
        total += _blocking_flow(adjacent, heads, residual, levels, source, sink, unbounded - total)
    return total


def _levels(adjacent: list[list[int]], heads: list[int], residual: list[int], source: int, sink: int) -> list[int]:
    """Distances to the sink, -1 where it cannot be reached or lies farther than the source does."""
    levels = [-1] * len(adjacent)
    levels[sink] = 0
    frontier, distance = [sink], 0
    while frontier and levels[source] < 0:
        distance += 1
        following: list[int] = []
        for node in frontier:
            for arc in adjacent[node]:
                tail = heads[arc]
                if levels[tail] < 0 and residual[arc ^ 1]:
                    levels[tail] = distance
                    following.append(tail)
        frontier = following
    return levels


def _blocking_flow(
    adjacent: list[list[int]],
    heads: list[int],
    residual: list[int],
    levels: list[int],
    source: int,
    sink: int,
    limit: int,
) -> int:
    """Depth-first along falling levels; an edge once found useless is not looked at again."""
    untried = [list(reversed(arcs)) if level >= 0 else [] for arcs, level in zip(adjacent, levels, strict=True)]
    total, node = 0, source
    path: list[int] = []
    while total < limit:
        if node == sink:
            amount = min(residual[arc] for arc in path)
            total += amount
            first_full = len(path)
            for position in range(len(path) - 1, -1, -1):
                arc = path[position]
                residual[arc] -= amount
                residual[arc ^ 1] += amount
                if not residual[arc]:
                    first_full = position
            node = heads[path[first_full] ^ 1]
            del path[first_full:]
            continue
        arcs, wanted = untried[node], levels[node] - 1
        while arcs and not (residual[arcs[-1]] and levels[heads[arcs[-1]]] == wanted):
            arcs.pop()
        if arcs:
            path.append(arcs[-1])
            node = heads[arcs[-1]]
        elif path:
            arc = path.pop()
            node = heads[arc ^ 1]
            untried[node].pop()
        else:
            break
    return total


def _reached(adjacent: list[list[int]], heads: list[int], residual: list[int], source: int) -> set[int]:
    """Nodes that more could flow to from the source."""
    found, stack = {source}, [source]
    while stack:
        for arc in adjacent[stack.pop()]:
            if residual[arc] and heads[arc] not in found:
                found.add(heads[arc])
                stack.append(heads[arc])
    return found


def _reaching(adjacent: list[list[int]], heads: list[int], residual: list[int], sink: int) -> set[int]:
    """Nodes that more could flow from to the sink."""
    found, stack = {sink}, [sink]
    while stack:
        for arc in adjacent[stack.pop()]:
            if residual[arc ^ 1] and heads[arc] not in found:
                found.add(heads[arc])
                stack.append(heads[arc])
    return found

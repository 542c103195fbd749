"""The minimum cut against all cuts of small networks, and its cost on a large one."""

from __future__ import annotations

import random
import time
from itertools import combinations

import pytest
from torchlazy.autograd.flow import INFINITY, Network, UnboundedCutError

Edges = list[tuple[int, int, int]]


def network_of(nodes: int, edges: Edges) -> Network:
    network = Network()
    for _ in range(nodes):
        network.add_node()
    for tail, head, capacity in edges:
        network.add_edge(tail, head, capacity)
    return network


def all_minimum_sides(nodes: int, edges: Edges) -> tuple[int, list[frozenset[int]]]:
    """The least weight of a cut between node 0 and the last one, and each source side that has it."""
    best, sides = INFINITY * len(edges) + 1, []
    inner = range(1, nodes - 1)
    for count in range(nodes - 1):
        for chosen in combinations(inner, count):
            side = frozenset((0, *chosen))
            weight = sum(c for a, b, c in edges if a in side and b not in side)
            if weight < best:
                best, sides = weight, []
            if weight == best:
                sides.append(side)
    return best, sides


def random_edges(rng: random.Random, nodes: int, count: int, infinite: float) -> Edges:
    return [
        (rng.randrange(nodes), rng.randrange(nodes), INFINITY if rng.random() < infinite else rng.randrange(6))
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(150))
def test_minimum_cut_of_small_networks_is_the_best_of_all(seed):
    rng = random.Random(seed)
    nodes = rng.randrange(2, 9)
    edges = random_edges(rng, nodes, rng.randrange(22), rng.choice([0.0, 0.2]))
    best, sides = all_minimum_sides(nodes, edges)
    network = network_of(nodes, edges)
    if best >= INFINITY:
        with pytest.raises(UnboundedCutError, match="no finite cut"):
            network.min_cut(0, nodes - 1)
        return
    near_source = network.min_cut(0, nodes - 1)
    near_sink = network.min_cut(0, nodes - 1, nearest="sink")
    assert near_source.value == near_sink.value == best
    assert near_source.source_side == frozenset.intersection(*sides)
    assert near_sink.source_side == frozenset.union(*sides)
    for cut in (near_source, near_sink):
        crossing = [i for i, (a, b, _) in enumerate(edges) if a in cut.source_side and b not in cut.source_side]
        assert list(cut.edges) == crossing
        assert sum(edges[i][2] for i in crossing) == best


def test_a_deep_chain_needs_no_deep_stack():
    nodes = 20_000
    cut = network_of(nodes, [(i, i + 1, 5 + (i != 777)) for i in range(nodes - 1)]).min_cut(0, nodes - 1)
    assert (cut.value, cut.edges) == (5, (777,))


def test_values_beyond_64_bits_are_exact():
    cut = network_of(3, [(0, 1, INFINITY - 1), (0, 1, INFINITY - 1), (1, 2, INFINITY)]).min_cut(0, 2)
    assert cut.value == 2 * (INFINITY - 1)


def test_bad_edges_and_equal_ends_are_told():
    network = network_of(2, [])
    with pytest.raises(ValueError, match="the network has nodes"):
        network.add_edge(0, 2, 1)
    with pytest.raises(ValueError, match="negative"):
        network.add_edge(0, 1, -1)
    with pytest.raises(ValueError, match="both source and sink"):
        network.min_cut(1, 1)


@pytest.mark.parametrize("shape", ["random", "layered", "step"])
def test_five_thousand_nodes_take_less_than_half_a_second(shape):
    rng = random.Random(1)
    nodes, count = 5000, 20_000
    if shape == "random":
        edges = [(rng.randrange(nodes), rng.randrange(nodes), rng.randrange(1, 1 << 20)) for _ in range(count)]
    elif shape == "layered":
        edges = [(i, min(nodes - 1, i + rng.randrange(1, 60)), rng.randrange(1, 1 << 20)) for i in range(nodes - 1)] * 4
    else:  # like a training step: values split in two, in pairs of edges; few sources and many readers
        edges = [(2 * i, 2 * i + 1, rng.choice([4096, 1024, INFINITY])) for i in range(1, nodes // 2 - 1)]
        edges += [(2 * i + 1, 2 * min(nodes // 2 - 2, i + rng.randrange(1, 9)), INFINITY) for i in range(1, 2000)] * 3
        edges += [(0, 2 * i, INFINITY) for i in range(1, 2000, 7)]
        edges += [(2 * i + 1, nodes - 1, 1 << 20) for i in range(1, 2000, 5)]
    network = network_of(nodes, edges)
    best = min(_seconds(network, nodes) for _ in range(3))
    assert best < 0.5


def _seconds(network: Network, nodes: int) -> float:
    start = time.thread_time()
    network.min_cut(0, nodes - 1)
    return time.thread_time() - start

"""The liveness walk on graphs whose peak can be counted by hand."""

from __future__ import annotations

from torchlazy.autograd.liveness import all_values, fused_values, live_bytes
from torchlazy.prims import ops

from tests.autograd.small_graphs import Maker

SIZE = 16 * 16 * 4


def test_a_value_lives_until_its_last_reader():
    g = Maker()
    x = g.input(16, 16)
    a = g.mm(x, x)
    b = g.mm(a, x)
    c = g.mm(b, x)
    d = g.mm(c, a)
    graph = g.output(d)
    found = live_bytes(graph)
    assert (found.peak_bytes, found.peak, found.live_at_peak) == (3 * SIZE, c, (a, b, c))


def test_views_keep_their_base_and_take_nothing():
    g = Maker()
    x = g.input(16, 16)
    a = g.mm(x, x)
    view = g(ops.permute, a, dims=(1, 0))
    b = g.mm(x, x)
    c = g.mm(view, b)
    assert live_bytes(g.output(g.mm(c, x))).peak_bytes == 3 * SIZE


def test_what_stays_inside_a_kernel_takes_nothing_but_keeps_its_sources():
    g = Maker()
    x = g.input(16, 16)
    a = g.mm(x, x)
    inside = g(ops.neg, g(ops.exp, a))
    b = g.mm(x, x)
    graph = g.output(g(ops.add, inside, b))
    stored = fused_values(graph)
    assert list(stored) == [a, b, graph.output_node().args[0][0]]
    assert live_bytes(graph, stored).peak_bytes == 2 * SIZE
    assert inside in all_values(graph)


def test_a_value_that_two_kernels_read_is_stored_unless_it_is_as_cheap_as_loading_it():
    g = Maker()
    x = g.input(16, 16)
    a, b, c = g.mm(x, x), g.mm(x, x), g.mm(x, x)
    cheap = g(ops.neg, a)
    dear = g(ops.add, g(ops.add, a, b), c)
    rows, columns = (g(ops.sum, g(ops.mul, cheap, dear), axes=(axis,)) for axis in (0, 1))
    graph = g.output(rows, columns)
    stored = fused_values(graph)
    assert dear in stored
    assert cheap not in stored


def test_unread_values_live_for_a_moment():
    g = Maker()
    x = g.input(16, 16)
    g.mm(x, x)
    graph = g.output(g.mm(x, x))
    assert live_bytes(graph).peak_bytes == SIZE


def test_empty_graphs_take_nothing():
    g = Maker()
    assert live_bytes(g.output(g.input(4))).peak_bytes == 0

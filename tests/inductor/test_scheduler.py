"""Schedules: order, donations, sweeps, and equality with running the nodes one by one on random graphs."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torchlazy.inductor.ir import Buffer, BufferRef, ExternNode, Kernel, LoopGraph, LoopNode, ViewNode
from torchlazy.inductor.scheduler import Schedule, schedule
from torchlazy.inductor.sweeps import Member, PlannedSweep, plan_sweeps

from tests.inductor.kernel_interpreter import Lambda, buffer, check, pointwise, reduction
from tests.inductor.random_loops import random_graph


def load(name: str) -> Lambda:
    return lambda o, i, _: o.load(name, i[0])


def add(a: str, b: str) -> Lambda:
    return lambda o, i, _: o.add(o.load(a, i[0]), o.load(b, i[0]))


def half(name: str) -> Lambda:
    return lambda o, i, _: o.mul(o.load(name, i[0]), o.constant(0.5, torch.float32))


def mm(a: Buffer, b: Buffer, out: Buffer) -> ExternNode:
    return ExternNode(torch.ops.aten.mm.default, (BufferRef(a.name), BufferRef(b.name)), {}, (out,))


def dropped(plan: Schedule) -> list[str]:
    return [str(decision) for decision in plan.decisions if decision.reason.startswith("donation")]


def test_a_donated_update_is_written_in_place() -> None:
    p, g, new = buffer("p", 8), buffer("g", 8), buffer("new", 8)
    graph = LoopGraph((p, g), (), (pointwise(new, add("p", "g")),), ("new",), {"new": "p"})
    plan = check(graph, [torch.randn(8), torch.randn(8)])
    (kernel,) = plan.kernels
    assert kernel.aliases == (("new", "p"),) and plan.donations == {"new": "p"} and not dropped(plan)


def test_readers_of_the_old_value_run_first() -> None:
    """The update stands before a product that needs the old parameter: the schedule turns them round."""
    p, g, new, out = buffer("p", 4, 4), buffer("g", 4, 4), buffer("new", 4, 4), buffer("out", 4, 4)
    body = lambda o, i, _: o.add(o.load("p", p.element(i)), o.load("g", g.element(i)))  # noqa: E731
    graph = LoopGraph((p, g), (), (pointwise(new, body), mm(p, g, out)), ("new", "out"), {"new": "p"})
    plan = check(graph, [torch.randn(4, 4), torch.randn(4, 4)])
    assert isinstance(plan.items[0], ExternNode) and isinstance(plan.items[1], Kernel)
    assert not dropped(plan)


def test_a_reader_at_the_same_point_may_share_the_kernel() -> None:
    p, g, new, norm = buffer("p", 8), buffer("g", 8), buffer("new", 8), buffer("norm")
    nodes = (
        pointwise(new, add("p", "g")),
        reduction("sum", norm, (8,), lambda o, i, r: o.mul(o.load("p", r[0]), o.load("g", r[0]))),
    )
    plan = check(LoopGraph((p, g), (), nodes, ("new", "norm"), {"new": "p"}), [torch.randn(8), torch.randn(8)])
    assert not dropped(plan)


def test_an_update_by_the_norm_of_the_parameter_stores_last() -> None:
    """LAMB's shape: the parameter is read by a reduction and by the update that overwrites it."""
    p, norm, new = buffer("p", 4, 8), buffer("norm", 4), buffer("new", 4, 8)
    nodes = (
        reduction("sum", norm, (8,), lambda o, i, r: o.load("p", p.element((i[0], r[0])))),
        pointwise(new, lambda o, i, _: o.div(o.load("p", p.element(i)), o.load("norm", i[0]))),
    )
    plan = check(LoopGraph((p,), (), nodes, ("new",), {"new": "p"}), [torch.rand(4, 8) + 1])
    (kernel,) = plan.kernels
    assert kernel.aliases == (("new", "p"),) and len(kernel.sweeps) == 2


def test_a_reader_that_needs_the_new_value_forces_a_copy() -> None:
    p, new, both = buffer("p", 8), buffer("new", 8), buffer("both", 8)
    nodes = (pointwise(new, half("p")), pointwise(both, add("new", "p")))
    plan = check(LoopGraph((p,), (), nodes, ("new", "both"), {"new": "p"}), [torch.randn(8)])
    assert "a reader of the old value needs the new one" in dropped(plan)[0]
    assert plan.outputs == ("new_into_p", "both") and plan.donations == {"new_into_p": "p"}


def test_a_flip_onto_itself_is_copied() -> None:
    p, new = buffer("p", 8), buffer("new", 8)
    graph = LoopGraph((p,), (), (pointwise(new, lambda o, i, _: o.load("p", 7 - i[0])),), ("new",), {"new": "p"})
    plan = check(graph, [torch.randn(8)])
    assert len(plan.kernels) == 2 and "other elements" in dropped(plan)[0]


def test_swapped_inputs() -> None:
    a, b = buffer("a", 8), buffer("b", 8)
    plan = check(LoopGraph((a, b), (), (), ("b", "a"), {"b": "a", "a": "b"}), [torch.randn(8), torch.randn(8)])
    assert set(plan.donations.values()) == {"a", "b"}


def test_rotated_inputs_and_an_update_beside_them() -> None:
    names = ("a", "b", "c")
    inputs = tuple(buffer(name, 8) for name in names)
    new = buffer("new", 8)
    graph = LoopGraph(inputs, (), (pointwise(new, add("b", "c")),), ("b", "c", "new"), {"b": "a", "c": "b", "new": "c"})
    plan = check(graph, [torch.randn(8) for _ in names])
    assert set(plan.donations.values()) == {"a", "b", "c"}


def test_an_extern_result_is_copied_into_the_donated_input() -> None:
    p, g, new = buffer("p", 4, 4), buffer("g", 4, 4), buffer("new", 4, 4)
    plan = check(
        LoopGraph((p, g), (), (mm(p, g, new),), ("new",), {"new": "p"}), [torch.randn(4, 4), torch.randn(4, 4)]
    )
    assert "not computed by a loop" in dropped(plan)[0] and len(plan.kernels) == 1


def test_another_layout_is_copied() -> None:
    p, new = buffer("p", 4, 6), buffer("new", 4, 6, strides=(1, 4))
    node = pointwise(new, lambda o, i, _: o.exp(o.load("p", p.element(i))))
    plan = check(LoopGraph((p,), (), (node,), ("new",), {"new": "p"}), [torch.randn(4, 6)])
    assert "the layouts differ" in dropped(plan)[0]
    assert len(plan.kernels) == 1, "the copy is fused, and its reads are at the element it writes"


def test_an_old_value_that_is_an_output_is_never_overwritten() -> None:
    p, new = buffer("p", 8), buffer("new", 8)
    plan = check(LoopGraph((p,), (), (pointwise(new, half("p")),), ("new", "p"), {"new": "p"}), [torch.randn(8)])
    assert plan.donations == {} and "an output" in dropped(plan)[0]


def test_readers_through_a_view_count() -> None:
    p, new = buffer("p", 4, 4), buffer("new", 4, 4)
    window, out = Buffer("window", torch.float32, (4, 4), (1, 4), "cpu"), buffer("out", 4, 4)
    nodes = (
        ViewNode(window, "p"),
        pointwise(new, lambda o, i, _: o.neg(o.load("p", p.element(i)))),
        mm(window, window, out),
    )
    plan = check(LoopGraph((p,), (), nodes, ("new", "out"), {"new": "p"}), [torch.randn(4, 4)])
    assert isinstance(plan.items[-1], Kernel) and not dropped(plan)


def test_a_view_keeps_its_source_in_memory() -> None:
    x, y, out = buffer("x", 4, 4), buffer("y", 4, 4), buffer("out", 4, 4)
    turned = Buffer("turned", torch.float32, (4, 4), (1, 4), "cpu")
    nodes = (
        pointwise(y, lambda o, i, _: o.exp(o.load("x", x.element(i)))),
        ViewNode(turned, "y"),
        mm(turned, x, out),
    )
    plan = check(LoopGraph((x,), (), nodes, ("out",)), [torch.randn(4, 4)])
    assert plan.removed == ()


def test_dead_nodes_are_left_out() -> None:
    x, y, z = buffer("x", 8), buffer("y", 8), buffer("z", 8)
    plan = check(LoopGraph((x,), (), (pointwise(y, half("x")), pointwise(z, load("x"))), ("z",)), [torch.randn(8)])
    assert [b.name for kernel in plan.kernels for b in kernel.writes] == ["z"]


def test_order_follows_the_graph() -> None:
    """Independent kernels keep the order in which they were recorded."""
    inputs = tuple(buffer(f"x{k}", 4 + k) for k in range(5))
    nodes = tuple(pointwise(buffer(f"y{k}", 4 + k), half(f"x{k}")) for k in range(5))
    plan = check(LoopGraph(inputs, (), nodes, tuple(f"y{k}" for k in range(5))), [torch.randn(4 + k) for k in range(5)])
    assert [kernel.writes[0].name for kernel in plan.kernels] == [f"y{k}" for k in range(5)]


def test_one_point_is_a_flat_axis() -> None:
    s, t = buffer("s"), buffer("t")
    node = pointwise(t, lambda o, i, _: o.add(o.load("s", s.element(i)), o.constant(1.0, torch.float32)))
    (kernel,) = check(LoopGraph((s,), (), (node,), ("t",)), [torch.tensor(2.0)]).kernels
    assert [int(axis.size) for axis in kernel.axes] == [1]


# ---- sweeps


def member(over_reduce: bool, *needs: int, reduces: bool = False, stored: bool = False, over: bool = False) -> Member:
    return Member(0, over_reduce, reduces, needs, stored, over)


def test_sweeps_store_a_recomputed_value_once() -> None:
    """e is needed beside two reductions and stored: it is computed in each sweep and stored in one."""
    e, s = member(True, stored=True), member(True, 0, reduces=True)
    q = member(True, 0, 1, reduces=True, stored=True)
    assert plan_sweeps([e, s, q]) == [
        PlannedSweep(True, ((0, False), (1, False))),
        PlannedSweep(True, ((0, True), (2, True))),
    ]


def test_sweeps_put_point_values_between() -> None:
    s = member(True, reduces=True)
    r = member(False, 0)
    y = member(True, 1, stored=True)
    assert [sweep.over_reduce for sweep in plan_sweeps([s, r, y])] == [True, False, True]


def test_sweeps_drop_what_nobody_wants() -> None:
    assert plan_sweeps([member(False), member(False, stored=True)]) == [PlannedSweep(False, ((1, True),))]


def test_sweeps_store_over_donated_memory_last() -> None:
    w = member(False, stored=True, over=True)
    s = member(True, reduces=True, stored=True)
    assert plan_sweeps([s, w]) == [PlannedSweep(True, ((0, True),)), PlannedSweep(False, ((1, True),))]


# ---- random graphs, and time


@pytest.mark.parametrize("seed", range(120))
def test_random_graphs(seed: int) -> None:
    graph, inputs = random_graph(seed)
    check(graph, inputs)


def test_a_thousand_nodes_take_little_time() -> None:
    """100 layers of (pointwise, row softmax, product), about 1200 nodes."""
    n, d = 64, 64
    nodes: list[LoopNode | ExternNode] = []
    last = x = buffer("x", n, d)
    w = buffer("w", d, d)
    for layer in range(120):

        def made(name: str, *shape: int, layer: int = layer) -> Buffer:
            return buffer(f"{name}{layer}", *shape)

        def point(out: Buffer, op: str, *sources: Buffer) -> LoopNode:
            return pointwise(
                out,
                lambda o, i, _: getattr(o, op)(*(o.load(s.name, s.element(i[: len(s.shape)])) for s in sources)),
            )

        def rows(kind: str, out: Buffer, source: Buffer) -> LoopNode:
            return reduction(kind, out, (d,), lambda o, i, r: o.load(source.name, source.element((i[0], r[0]))))

        y, m, c, e, s, q, z, h = (
            made("y", n, d), made("m", n), made("c", n, d), made("e", n, d), made("s", n), made("q", n, d),
            made("z", n, d), made("h", n, d),
        )  # fmt: skip
        nodes += [
            mm(last, w, y), rows("max", m, y), point(c, "sub", y, m), point(e, "exp", c), rows("sum", s, e),
            point(q, "div", e, s), mm(q, w, z), point(h, "tanh", z), point(made("t", n, d), "add", h, last),
            point(made("u", n, d), "exp", made("t", n, d)),
        ]  # fmt: skip
        last = made("u", n, d)
    graph = LoopGraph((x, w), (), tuple(nodes), (last.name,))
    start = time.thread_time()
    plan = schedule(graph)
    seconds = time.thread_time() - start
    assert len(plan.kernels) == 240
    assert seconds < 3.0, f"{len(nodes)} nodes took {seconds:.2f} s"


def test_a_gradient_fused_with_its_update_does_not_wait_for_the_optimizer() -> None:
    """The reduction of dy, fused with the update of b, runs before the layers that follow, so dy dies early."""
    dy, b, w = buffer("dy", 8, 4), buffer("b", 4), buffer("w", 4, 4)
    g, new, h, k = buffer("g", 4), buffer("new", 4), buffer("h", 8, 4), buffer("k", 8, 4)
    nodes = (
        reduction("sum", g, (8,), lambda o, i, r: o.load("dy", dy.element((r[0], i[0])))),
        mm(dy, w, h),
        mm(h, w, k),
        pointwise(new, add("b", "g")),
    )
    graph = LoopGraph((dy, b, w), (), nodes, ("k", "new"), {"new": "b"})
    plan = check(graph, [torch.randn(8, 4), torch.randn(4), torch.randn(4, 4)])
    assert isinstance(plan.items[0], Kernel) and len(plan.kernels) == 1


@pytest.mark.parametrize("is_late", [False, True])
def test_what_is_computed_again_is_not_moved_to_where_it_was_computed_first(is_late: bool) -> None:
    """Two chains read x, the second one after a product: computed again there, it must not join the first's kernel."""
    x, w = buffer("x", 4, 4), buffer("w", 4, 4)
    first, product, again, out = (buffer(name, 4, 4) for name in ("first", "product", "again", "out"))
    copy = pointwise(again, lambda o, i, _: o.exp(o.load("x", x.element(i))))
    nodes = (
        pointwise(first, lambda o, i, _: o.exp(o.load("x", x.element(i)))),
        mm(first, w, product),
        replace(copy, is_late=is_late),
        mm(again, product, out),
    )
    plan = check(LoopGraph((x, w), (), nodes, ("out",)), [torch.randn(4, 4), torch.randn(4, 4)])
    assert len(plan.kernels) == (2 if is_late else 1)
    if is_late:
        position = next(i for i, item in enumerate(plan.items) if isinstance(item, Kernel) and item.is_late)
        assert isinstance(plan.items[position - 1], ExternNode)

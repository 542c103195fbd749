"""What fuses, what does not, and the reasons given."""

from __future__ import annotations

import pytest
import torch
from torchlazy.inductor.fusion import FusionOptions
from torchlazy.inductor.ir import Buffer, LoopGraph, LoopNode
from torchlazy.inductor.scheduler import Schedule, ScheduleOptions, format_schedule, schedule

from tests.inductor.kernel_interpreter import buffer, check, pointwise, reduction, statements


def unary(op: str, out: Buffer, source: Buffer) -> LoopNode:
    return pointwise(out, lambda ops, i, _: getattr(ops, op)(ops.load(source.name, source.element(i))))


def binary(op: str, out: Buffer, a: Buffer, b: Buffer) -> LoopNode:
    return pointwise(
        out, lambda ops, i, _: getattr(ops, op)(ops.load(a.name, a.element(i)), ops.load(b.name, b.element(i)))
    )


def rows(kind: str, out: Buffer | tuple[Buffer, ...], source: Buffer) -> LoopNode:
    return reduction(
        kind, out, (source.shape[1],), lambda ops, i, r: ops.load(source.name, source.element((i[0], r[0])))
    )


def columns(kind: str, out: Buffer, source: Buffer) -> LoopNode:
    return reduction(
        kind, out, (source.shape[0],), lambda ops, i, r: ops.load(source.name, source.element((r[0], i[0])))
    )


def reasons(plan: Schedule) -> str:
    return "\n".join(str(decision) for decision in plan.decisions)


def softmax(x: Buffer, y: Buffer, prefix: str = "") -> tuple[LoopNode, ...]:
    n, d = x.shape
    m, e, s = buffer(f"{prefix}m", n), buffer(f"{prefix}e", n, d), buffer(f"{prefix}s", n)
    return (
        rows("max", m, x),
        pointwise(e, lambda o, i, _: o.exp(o.sub(o.load(x.name, x.element(i)), o.load(m.name, m.element(i[:1]))))),
        rows("sum", s, e),
        pointwise(y, lambda o, i, _: o.div(o.load(e.name, e.element(i)), o.load(s.name, s.element(i[:1])))),
    )


def test_a_chain_becomes_one_flat_kernel() -> None:
    b = [buffer(f"b{k}", 4, 6) for k in range(6)]
    nodes = tuple(unary(op, b[k + 1], b[k]) for k, op in enumerate(("exp", "neg", "abs", "sqrt", "tanh")))
    plan = check(LoopGraph((b[0],), (), nodes, ("b5",)), [torch.randn(4, 6)])
    (kernel,) = plan.kernels
    assert [int(a.size) for a in kernel.axes] == [24]
    assert plan.removed == ("b1", "b2", "b3", "b4")
    assert [x.name for x in kernel.reads] == ["b0"] and [x.name for x in kernel.writes] == ["b5"]
    assert [s.stored for s in statements(kernel)] == [(), (), (), (), ("b5",)]


def test_a_chain_through_a_reshape_is_one_flat_kernel() -> None:
    x, y, z = buffer("x", 2, 3, 4), buffer("y", 6, 4), buffer("z", 24)
    nodes = (
        pointwise(y, lambda o, i, _: o.exp(o.load("x", 4 * i[0] + i[1]))),
        pointwise(z, lambda o, i, _: o.neg(o.load("y", i[0]))),
    )
    plan = check(LoopGraph((x,), (), nodes, ("z",)), [torch.randn(2, 3, 4)])
    (kernel,) = plan.kernels
    assert [int(a.size) for a in kernel.axes] == [24]


def test_softmax_is_one_kernel_of_three_sweeps() -> None:
    x, y = buffer("x", 6, 8), buffer("y", 6, 8)
    plan = check(LoopGraph((x,), (), softmax(x, y), ("y",)), [torch.randn(6, 8)])
    (kernel,) = plan.kernels
    assert [sweep.over_reduce_axes for sweep in kernel.sweeps] == [True, True, True]
    assert [[s.node.outputs[0].name for s in sweep.statements] for sweep in kernel.sweeps] == [
        ["m"], ["e", "s"], ["e", "y"],
    ]  # fmt: skip
    assert plan.removed == ("m", "e", "s")


def test_layer_norm_forward() -> None:
    x, w, y = buffer("x", 5, 8), buffer("w", 8), buffer("y", 5, 8)
    mean, m2, count, rstd = (buffer(name, 5) for name in ("mean", "m2", "count", "rstd"))
    nodes = (
        rows("welford", (mean, m2, count), x),
        pointwise(
            rstd,
            lambda o, i, _: o.rsqrt(
                o.add(o.div(o.load("m2", i[0]), o.constant(8.0, torch.float32)), o.constant(1e-5, torch.float32))
            ),
        ),
        pointwise(
            y,
            lambda o, i, _: o.mul(
                o.mul(o.sub(o.load("x", x.element(i)), o.load("mean", i[0])), o.load("rstd", i[0])),
                o.load("w", i[1]),
            ),
        ),
    )
    plan = check(LoopGraph((x, w), (), nodes, ("y", "mean", "rstd")), [torch.randn(5, 8), torch.randn(8)])
    (kernel,) = plan.kernels
    assert [sweep.over_reduce_axes for sweep in kernel.sweeps] == [True, False, True]
    assert statements(kernel)[0].stored == ("mean",)
    assert plan.removed == ("m2", "count")


def layer_norm_backward(n: int, d: int) -> LoopGraph:
    g, xhat, w, rstd = buffer("g", n, d), buffer("xhat", n, d), buffer("w", d), buffer("rstd", n)
    gw, s1, s2, dx = buffer("gw", n, d), buffer("s1", n), buffer("s2", n), buffer("dx", n, d)
    dw, db = buffer("dw", d), buffer("db", d)
    nodes = (
        pointwise(gw, lambda o, i, _: o.mul(o.load("g", g.element(i)), o.load("w", i[1]))),
        rows("sum", s1, gw),
        reduction(
            "sum", s2, (d,),
            lambda o, i, r: o.mul(o.load("gw", gw.element((i[0], r[0]))), o.load("xhat", xhat.element((i[0], r[0])))),
        ),
        pointwise(
            dx,
            lambda o, i, _: o.mul(
                o.load("rstd", i[0]),
                o.sub(
                    o.sub(o.load("gw", gw.element(i)), o.mul(o.load("s1", i[0]), o.constant(1 / d, torch.float32))),
                    o.mul(
                        o.load("xhat", xhat.element(i)),
                        o.mul(o.load("s2", i[0]), o.constant(1 / d, torch.float32)),
                    ),
                ),
            ),
        ),
        reduction(
            "sum", dw, (n,),
            lambda o, i, r: o.mul(o.load("g", g.element((r[0], i[0]))), o.load("xhat", xhat.element((r[0], i[0])))),
        ),
        columns("sum", db, g),
    )  # fmt: skip
    return LoopGraph((g, xhat, w, rstd), (), nodes, ("dx", "dw", "db"))


def test_layer_norm_backward_is_a_row_and_a_column_kernel() -> None:
    graph = layer_norm_backward(6, 8)
    plan = check(graph, [torch.randn(6, 8), torch.randn(6, 8), torch.randn(8), torch.rand(6)])
    assert len(plan.kernels) == 2
    by_output = {tuple(b.name for b in kernel.writes): kernel for kernel in plan.kernels}
    assert len(by_output["dx",].sweeps) == 2
    assert len(by_output["dw", "db"].sweeps) == 1, "two reductions over one input share a sweep"
    assert [b.name for b in by_output["dw", "db"].reads] == ["g", "xhat"]


def test_reductions_over_one_input_share_a_kernel() -> None:
    x, a, b = buffer("x", 6, 8), buffer("a", 6), buffer("b", 6)
    plan = check(LoopGraph((x,), (), (rows("sum", a, x), rows("max", b, x)), ("a", "b")), [torch.randn(6, 8)])
    (kernel,) = plan.kernels
    assert len(kernel.sweeps) == 1
    assert "is read once" in reasons(plan)


def test_row_and_column_reductions_stay_apart() -> None:
    x, a, b = buffer("x", 6, 6), buffer("a", 6), buffer("b", 6)
    plan = check(LoopGraph((x,), (), (rows("sum", a, x), columns("sum", b, x)), ("a", "b")), [torch.randn(6, 6)])
    assert len(plan.kernels) == 2 and "not alike" in reasons(plan)


def test_channels_last_runs_in_memory_order() -> None:
    x = buffer("x", 2, 3, 4, 5, strides=(60, 1, 15, 3))
    y = buffer("y", 2, 3, 4, 5, strides=(60, 1, 15, 3))
    plan = check(
        LoopGraph((x,), (), (unary("exp", y, x),), ("y",)),
        [torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)],
    )
    (kernel,) = plan.kernels
    assert [int(a.size) for a in kernel.axes] == [120]


def test_a_permuted_copy_is_innermost_along_its_output() -> None:
    x, y = buffer("x", 3, 5), buffer("y", 5, 3)
    node = pointwise(y, lambda o, i, _: o.load("x", x.element((i[1], i[0]))))
    (kernel,) = check(LoopGraph((x,), (), (node,), ("y",)), [torch.randn(3, 5)]).kernels
    assert [int(a.size) for a in kernel.axes] == [5, 3]


def test_a_transposed_reader_fuses_with_its_producer() -> None:
    x, y, z = buffer("x", 3, 5), buffer("y", 3, 5), buffer("z", 5, 3)
    nodes = (unary("exp", y, x), pointwise(z, lambda o, i, _: o.neg(o.load("y", y.element((i[1], i[0]))))))
    plan = check(LoopGraph((x,), (), nodes, ("z",)), [torch.randn(3, 5)])
    assert len(plan.kernels) == 1 and plan.removed == ("y",)


def test_a_shifted_reader_does_not_fuse() -> None:
    x, y, z = buffer("x", 9), buffer("y", 9), buffer("z", 8)
    nodes = (
        unary("exp", y, x),
        pointwise(z, lambda o, i, _: o.sub(o.load("y", i[0] + 1), o.load("y", i[0]))),
    )
    plan = check(LoopGraph((x,), (), nodes, ("z",)), [torch.randn(9)])
    assert len(plan.kernels) == 2 and "numbers of points differ: 9 and 8" in reasons(plan)
    z2 = buffer("z", 9)
    turned = (nodes[0], pointwise(z2, lambda o, i, _: o.load("y", 8 - i[0])))
    plan = check(LoopGraph((x,), (), turned, ("z",)), [torch.randn(9)])
    assert len(plan.kernels) == 2 and "at a shift of 8" in reasons(plan)


def test_a_gather_does_not_fuse_with_the_producer_of_its_source() -> None:
    x, idx, y, z = buffer("x", 6), buffer("idx", 6, dtype=torch.int64), buffer("y", 6), buffer("z", 6)

    def gather(o, i, _):
        return o.load("y", o.indirect(o.load("idx", i[0]), 6, "gather"))

    graph = LoopGraph((x, idx), (), (unary("exp", y, x), pointwise(z, gather)), ("z",))
    plan = check(graph, [torch.randn(6), torch.randint(0, 6, (6,))])
    assert len(plan.kernels) == 2 and "depend on data" in reasons(plan)


def test_no_cycle_through_a_third_kernel() -> None:
    """y -> s (over all) -> z, and z reads y: y and z may not share a kernel that s must run between."""
    x, y, s, z = buffer("x", 6, 4), buffer("y", 6, 4), buffer("s", 4), buffer("z", 6, 4)
    nodes = (
        unary("exp", y, x),
        columns("sum", s, y),
        pointwise(z, lambda o, i, _: o.div(o.load("y", y.element(i)), o.load("s", i[1]))),
    )
    apart = ScheduleOptions(fusion=FusionOptions(serial_points=0))
    plan = check(LoopGraph((x,), (), nodes, ("z", "y")), [torch.randn(6, 4)], options=apart)
    assert len(plan.kernels) == 3
    assert "another node stands between them" in reasons(plan)


def test_few_parallel_points_do_not_store_full_size_results() -> None:
    x, s, z = buffer("x", 2, 1 << 14), buffer("s", 2), buffer("z", 2, 1 << 14)
    nodes = (rows("sum", s, x), pointwise(z, lambda o, i, _: o.div(o.load("x", x.element(i)), o.load("s", i[0]))))
    plan = schedule(LoopGraph((x,), (), nodes, ("z",)))
    assert len(plan.kernels) == 2 and "too few to run in parallel" in reasons(plan)


def test_argmax_keeps_the_order_of_its_axes() -> None:
    x = buffer("x", 2, 3, 4, strides=(1, 8, 2))
    p, m = buffer("p", 2, dtype=torch.int64), buffer("m", 2)

    def body(o, i, r):
        return o.load("x", x.element((i[0], *r)))

    nodes = (reduction("max", m, (3, 4), body), reduction("argmax", p, (3, 4), body))
    data = torch.randint(0, 5, (24,)).float().as_strided((2, 3, 4), (1, 8, 2))
    plan = check(LoopGraph((x,), (), nodes, ("m", "p")), [data])
    assert len(plan.kernels) == 1


def test_limits_are_kept() -> None:
    b = [buffer(f"b{k}", 4) for k in range(9)]
    nodes = tuple(unary("neg", b[k + 1], b[k]) for k in range(8))
    options = ScheduleOptions(fusion=FusionOptions(max_statements=4))
    plan = check(LoopGraph((b[0],), (), nodes, ("b8",)), [torch.randn(4)], options=options)
    assert len(plan.kernels) == 2 and "statements, more than 4" in reasons(plan)
    inputs = [buffer(f"i{k}", 4) for k in range(8)]
    sums = [buffer(f"s{k}", 4) for k in range(8)]
    adds = tuple(binary("add", sums[k], sums[k - 1] if k else inputs[0], inputs[k]) for k in range(8))
    options = ScheduleOptions(fusion=FusionOptions(max_buffers=4))
    plan = check(LoopGraph(tuple(inputs), (), adds, ("s7",)), [torch.randn(4) for _ in inputs], options=options)
    assert all(len(kernel.reads) + len(kernel.writes) <= 4 for kernel in plan.kernels)


def test_no_fusion_when_told_so() -> None:
    x, y = buffer("x", 6, 8), buffer("y", 6, 8)
    graph = LoopGraph((x,), (), softmax(x, y), ("y",))
    assert len(check(graph, [torch.randn(6, 8)], options=ScheduleOptions(fuse=False)).kernels) == 4


def test_dumps_tell_kernels_sweeps_and_reasons() -> None:
    x, y = buffer("x", 6, 8), buffer("y", 6, 8)
    text = format_schedule(schedule(LoopGraph((x,), (), softmax(x, y), ("y",))))
    assert "kernel [x0:6] reduce [r0:8]" in text
    assert "m = max" in text and "y = pointwise, store y" in text
    assert "because m + e: reduction -> pointwise: m stays in registers" in text


@pytest.mark.parametrize("shape", [(1, 6), (6, 1), (1, 1)])
def test_sizes_of_one(shape: tuple[int, int]) -> None:
    x, y = buffer("x", *shape), buffer("y", *shape)
    plan = check(LoopGraph((x,), (), softmax(x, y), ("y",)), [torch.randn(*shape)])
    assert len(plan.kernels) == 1


def test_empty_loops() -> None:
    x, y, z, s = buffer("x", 0, 4), buffer("y", 0, 4), buffer("z", 0, 4), buffer("s", 4)
    nodes = (unary("exp", y, x), unary("exp", z, y), columns("sum", s, x))
    plan = check(LoopGraph((x,), (), nodes, ("z", "s")), [torch.randn(0, 4)])
    assert {b.name for kernel in plan.kernels for b in kernel.writes} >= {"z", "s"}


def test_heavy_kernels_are_not_made_heavier() -> None:
    b = [buffer(f"b{k}", 4) for k in range(5)]
    nodes = tuple(unary("exp", b[k + 1], b[k]) for k in range(4))
    options = ScheduleOptions(fusion=FusionOptions(max_work=30))
    plan = check(LoopGraph((b[0],), (), nodes, ("b4",)), [torch.randn(4)], options=options)
    assert len(plan.kernels) == 2 and "additions a point" in reasons(plan)


def _two_sums(chunks: int, size: int, width: int) -> tuple[Buffer, ...]:
    names = ("x", "y", "p", "q", "s", "t", "out")
    shapes = [(chunks, size, width)] * 2 + [(chunks, width)] * 2 + [(width,)] * 2 + [(chunks, size, width)]
    return tuple(buffer(name, *shape) for name, shape in zip(names, shapes, strict=True))


@pytest.mark.parametrize("are_read", [True, False])
def test_second_stages_of_sums_that_one_kernel_made_share_a_kernel(are_read: bool) -> None:
    """Not where nobody waits for them: then they may share launches with others of their kind."""
    x, y, p, q, s, t, out = _two_sums(4, 5, 6)

    def partial(target: Buffer, op: str) -> LoopNode:
        def body(o, i, r):
            at = (i[0], r[0], i[1])
            return getattr(o, op)(o.load(x.name, x.element(at)), o.load(y.name, y.element(at)))

        return reduction("sum", target, (5,), body)

    nodes: tuple[LoopNode, ...] = (partial(p, "mul"), partial(q, "add"), columns("sum", s, p), columns("sum", t, q))
    if are_read:
        nodes += (
            pointwise(
                out,
                lambda o, i, _: o.add(
                    o.mul(o.load(x.name, x.element(i)), o.load(s.name, s.element(i[2:]))),
                    o.load(t.name, t.element(i[2:])),
                ),
            ),
        )
    results = ("s", "t", *(["out"] if are_read else []))
    plan = check(LoopGraph((x, y), (), nodes, results), [torch.randn(4, 5, 6), torch.randn(4, 5, 6)])
    assert len(plan.kernels) == 3, "two first stages, two second stages, and what reads them; or three without it"
    assert ("of partial results that one kernel makes" in reasons(plan)) == are_read

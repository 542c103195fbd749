"""Lowering of reductions: kinds, splits, welford, and the norms and softmax built of them."""

from __future__ import annotations

import math

import pytest
import torch
from torchlazy.inductor import choices
from torchlazy.inductor.ir import LoopNode
from torchlazy.inductor.lowering import lower
from torchlazy.inductor.printer import print_loop_graph
from torchlazy.inductor.scheduler import schedule

from tests.inductor.prim_graphs import GraphMaker, check, counts

AXES = [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2), ()]


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("op", ["sum", "prod", "amax", "amin", "argmax", "argmin"])
def test_kinds_and_axes(op, axes):
    g = GraphMaker()
    x = g.input("x", 3, 4, 5)
    check(g, getattr(g, op)(g.neg(x), axes=axes), [torch.randn(3, 4, 5)])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.float64, torch.bfloat16])
def test_dtypes(dtype):
    g = GraphMaker()
    x = g.input("x", 3, 50, dtype=dtype)
    outputs = (g.amax(x, axes=(1,)), g.argmin(x, axes=(1,)))
    if dtype != torch.bfloat16:
        outputs += (g.sum(x, axes=(1,)),)
    check(g, outputs, [(torch.randn(3, 50).abs() * 20).to(dtype)], exact=dtype != torch.float64)


@pytest.mark.parametrize("op", ["any", "all", "amax", "amin"])
def test_bools(op):
    g = GraphMaker()
    x = g.input("x", 6, 5, dtype=torch.bool)
    check(g, getattr(g, op)(x, axes=(1,)), [torch.rand(6, 5) > 0.5], exact=True)


def test_nan_wins():
    x = torch.randn(4, 6)
    x[1, 3] = x[2, 5] = x[2, 1] = float("nan")
    g = GraphMaker()
    n = g.input("x", 4, 6)
    check(g, (g.amax(n, axes=(1,)), g.amin(n, axes=(1,)), g.argmax(n, axes=(1,)), g.argmin(n, axes=(1,))), [x])


@pytest.mark.parametrize(
    ("shape", "axes", "clean"),
    [
        ((400, 300), (0, 1), True),
        ((397, 401), (0, 1), False),
        ((4099, 24), (0,), False),
        ((4096, 24), (0,), True),
        ((16, 512, 24), (0, 1), True),
        ((2, 70000), (1,), True),
    ],
)
@pytest.mark.parametrize("op", ["sum", "amax", "any"])
def test_large_reductions_take_two_stages(op, shape, axes, clean):
    g = GraphMaker()
    x = g.input("x", *shape)
    value = g.gt(x, g.full(shape=shape, value=3.9, dtype=torch.float32, device="cpu")) if op == "any" else x
    loops = check(g, getattr(g, op)(value, axes=axes), [torch.randn(shape)], atol=2e-3)  # sums of 160000 numbers
    assert counts(loops) == (2, 0, 0)
    text = print_loop_graph(loops)
    assert ("//" not in text and "masked" not in text) == clean, text
    # partial results lie as the first stage writes them: adjacent columns, or an output's partials together
    partial = loops.nodes[0].outputs[0]
    kept_last = len(partial.shape) > 1 and axes[-1] != len(shape) - 1
    assert partial.strides[-1 if kept_last else 0] == 1


def test_small_or_wide_reductions_take_one():
    for shape, axes in (((64, 64), (0, 1)), ((4096, 1024), (1,)), ((128, 4096), (0,))):
        g = GraphMaker()
        x = g.input("x", *shape)
        assert counts(check(g, g.sum(x, axes=axes), [torch.randn(shape)]))[0] == 1


@pytest.mark.parametrize(
    ("shape", "axes", "loops_expected"),
    [
        ((6, 768), (1,), 2),  # two passes over a cached row
        ((32, 6, 40, 40), (0, 2, 3), 3),  # few channels: welford of chunks, combined by two sums
        ((40, 70001), (1,), 1),  # long rows: read once
        ((1, 65537), (0, 1), 4),  # does not divide into chunks: two passes, each split
        ((0, 3), (0,), 1),
    ],
)
def test_welford(shape, axes, loops_expected):
    g = GraphMaker()
    x = g.input("x", *shape)
    mean, m2, count = g.welford(x, axes=axes)
    loops = check(g, (g.neg(mean), g.div(m2, count)) if 0 not in shape else (mean, m2), [torch.randn(shape) + 3])
    assert sum(isinstance(n, LoopNode) and n.reduction is not None for n in loops.nodes) == (
        loops_expected if 0 not in shape else 0
    )


def softmax(g, x, shape):
    top = g.broadcast(g.amax(x, axes=(1,)), shape, 1)
    e = g.exp(g.sub(x, top))
    return g.div(e, g.broadcast(g.sum(e, axes=(1,)), shape, 1))


def test_softmax():
    g = GraphMaker()
    loops = check(g, softmax(g, g.input("x", 5, 33), (5, 33)), [torch.randn(5, 33)])
    # amax, exp (it stands in the sum and in the quotient), sum, quotient
    assert counts(loops) == (4, 0, 0)


def test_layer_norm():
    shape = (8, 48)
    g = GraphMaker()
    x = g.input("x", *shape, dtype=torch.bfloat16)
    w, b = g.input("w", 48), g.input("b", 48)
    wide = g.convert(x, dtype=torch.float32)
    mean, m2, count = g.welford(wide, axes=(1,))
    eps = g.full(shape=(8,), value=1e-5, dtype=torch.float32, device="cpu")
    rstd = g.rsqrt(g.add(g.div(m2, count), eps))
    centred = g.sub(wide, g.broadcast(mean, shape, 1))
    normal = g.mul(centred, g.broadcast(rstd, shape, 1))
    y = g.add(g.mul(normal, g.broadcast(w, shape, 0)), g.broadcast(b, shape, 0))
    out = g.convert(y, dtype=torch.bfloat16)
    loops = check(g, (out, mean, rstd), [torch.randn(shape).bfloat16(), torch.randn(48), torch.randn(48)])
    # sum, squared deviations, rstd once a row, the output, and mean because it is asked for
    assert counts(loops) == (5, 0, 0)
    assert max(node.outputs[0].dtype.itemsize * len(node.ranges) for node in loops.nodes) <= 4  # nothing wide is stored


def test_split_counts():
    assert choices.split_count("cuda:0", 1, 1 << 24, "row") == 528
    assert choices.split_count("cuda:0", 1024, 8192, "column") == 33
    assert choices.split_count("cuda:0", 4096, 4096, "row") == 1
    assert choices.split_count("cpu", 1, 10_000, "row") == 2


def residual_norm(device: str) -> tuple[GraphMaker, tuple]:
    """Layer norm of a sum that later layers read too, over many rows, and what its backward computes again."""
    shape = (8, 512, 768)
    g = GraphMaker()
    stream, branch = (g.input("x", *shape, device=device), g.input("y", *shape, dtype=torch.bfloat16, device=device))
    grad, w = g.input("g", *shape, dtype=torch.bfloat16, device=device), g.input("w", 768, device=device)
    total = g.add(stream, g.convert(branch, dtype=torch.float32))
    mean, m2, count = g.welford(total, axes=(2,))
    eps = g.full(shape=(8, 512), value=1e-5, dtype=torch.float32, device=device)
    rstd = g.rsqrt(g.add(g.div(m2, count), eps))
    normal = g.mul(g.sub(total, g.broadcast(mean, shape, 2)), g.broadcast(rstd, shape, 2))
    weight = g.expand(g.reshape(w, shape=(1, 1, 768)), shape=shape)
    out = g.convert(g.mul(normal, weight), dtype=torch.bfloat16)
    wide = g.convert(grad, dtype=torch.float32)
    columns = g.sum(g.mul(wide, normal), axes=(0, 1))
    return g, (out, total, columns, g.sum(wide, axes=(0, 1)))


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_layer_norm_of_many_rows_is_one_kernel_and_its_column_sums_share_theirs(device):
    g, outputs = residual_norm(device)
    g.graph.output(outputs)
    plan = schedule(lower(g.graph))
    forward, *columns = plan.kernels
    rows = math.prod(int(axis.size) for axis in forward.axes)
    assert (rows, [int(axis.size) for axis in forward.reduce_axes]) == (4096, [768])
    written = {buffer.name for buffer in forward.writes}
    assert written >= set(plan.outputs[:2])
    # Nothing as large as the input is written beside the two results: backward computes the normal values again.
    assert sum(int(buffer.meta.numel) == 8 * 512 * 768 for kernel in plan.kernels for buffer in kernel.writes) == 2
    first = columns[0]
    assert len(first.writes) == 2 and math.prod(int(axis.size) for axis in first.axes) >= 768


def test_transcendentals_are_computed_again_on_a_gpu_and_stored_on_a_cpu():
    for device, nodes in (("cuda:0", 2), ("cpu", 3)):
        g = GraphMaker()
        x, grad = g.input("x", 64, 4096, device=device), g.input("g", 64, 4096, device=device)
        inner = g.erf(x)
        g.graph.output((g.mul(inner, x), g.mul(grad, inner)))
        assert counts(lower(g.graph)) == (nodes, 0, 0)


def test_a_literal_is_never_stored_however_many_read_it():
    g = GraphMaker()
    one = g.full(shape=(4, 8), value=2.5, dtype=torch.float32, device="cpu")
    outputs = tuple(g.mul(g.input(f"x{n}", 4, 8), one) for n in range(40))
    g.graph.output(outputs)
    loops = lower(g.graph)
    assert counts(loops) == (40, 0, 0)


@pytest.mark.parametrize("axes", AXES)
def test_logsumexp_is_a_maximum_and_a_sum(axes):
    g = GraphMaker()
    x = torch.randn(3, 4, 5) * 50
    x[1] = -math.inf
    x[2, 3, 1] = math.inf
    largest, total = g.logsumexp(g.neg(g.input("x", 3, 4, 5)), axes=axes)
    check(g, (largest, total), [-x])


@pytest.mark.parametrize(("shape", "axes"), [((0, 3), (0,)), ((3, 0), (0,)), ((2, 70000), (1,)), ((1, 65537), (0, 1))])
def test_logsumexp_of_nothing_and_of_long_rows(shape, axes):
    g = GraphMaker()
    x = torch.randn(shape)
    x.reshape(-1)[:1] = math.nan
    largest, total = g.logsumexp(g.input("x", *shape), axes=axes)
    check(g, (largest, total), [x], atol=1e-2)

"""Lowering of pointwise, view, indexing and extern primitives, checked against their eager references."""

from __future__ import annotations

import pytest
import torch
from torchlazy.inductor import interpret
from torchlazy.inductor.analyses import analyse
from torchlazy.inductor.ir import ExternNode, LoopNode, ViewNode
from torchlazy.inductor.lowering import RULES, LoweringError, lower
from torchlazy.inductor.lowerings.value import count
from torchlazy.inductor.printer import print_loop_graph
from torchlazy.prims.ops import PRIMS, Kind

from tests.inductor.prim_graphs import GraphMaker, check, counts


def test_every_primitive_has_a_rule():
    """A rule for each primitive that loops compute; the others are one ATen call, lowered by one rule for all."""
    assert set(RULES) == {name for name, prim in PRIMS.items() if prim.overload is None}
    assert all(prim.is_kind(Kind.EXTERN) for prim in PRIMS.values() if prim.overload is not None)


def test_a_chain_is_one_loop():
    g = GraphMaker()
    x, y = g.input("x", 4, 6), g.input("y", 4, 6)
    z = g.mul(g.exp(g.add(x, y)), g.sub(x, y))
    loops = check(g, z, [torch.randn(4, 6), torch.randn(4, 6)])
    assert counts(loops) == (1, 0, 0)
    assert loops.nodes[0].origins == ("add", "exp", "sub", "mul")


def test_a_value_shared_within_one_loop_is_computed_once():
    g = GraphMaker()
    x = g.input("x", 8)
    t = g.tanh(x)
    for _ in range(6):  # as a tree this would be 64 tanh
        t = g.mul(t, t)
    loops = check(g, t, [torch.rand(8)])
    assert counts(loops) == (1, 0, 0)
    assert print_loop_graph(loops).count("buf0") == 3
    assert analyse(loops.nodes[0]).ops == {"tanh": 1, "mul": 6}


def test_a_heavy_value_in_two_loops_is_stored_a_light_one_is_not():
    for op, expected in (("exp", 3), ("neg", 2)):
        g = GraphMaker()
        x = g.input("x", 4, 6)
        t = getattr(g, op)(x)
        loops = check(g, (g.sum(t, axes=(1,)), g.mul(t, x)), [torch.randn(4, 6)])
        assert counts(loops)[0] == expected, op


def test_long_chains_are_cut():
    g = GraphMaker()
    x = g.input("x", 4)
    t = x
    for _ in range(150):
        t = g.add(t, x)
    assert counts(check(g, t, [torch.rand(4)]))[0] == 3
    g = GraphMaker()
    xs = [g.input(f"x{k}", 4) for k in range(30)]
    t = xs[0]
    for x in xs[1:]:
        t = g.add(t, x)
    loops = check(g, t, [torch.rand(4) for _ in xs])
    assert all(len(analyse(node).read_names) <= 13 for node in loops.nodes)


def test_views_are_index_maps():
    g = GraphMaker()
    x = g.input("x", 4, 6)
    t = g.neg(x)
    t = g.permute(g.reshape(t, shape=(2, 2, 6)), dims=(2, 0, 1))
    t = g.slice(g.flip(t, axes=(0,)), starts=(1, 0, 0), stops=(6, 2, 2), steps=(2, 1, 1))
    t = g.expand(g.reshape(t, shape=(3, 1, 4)), shape=(3, 5, 4))
    loops = check(g, g.mul(t, t), [torch.randn(4, 6)])
    assert counts(loops) == (1, 0, 0)


def test_reshape_of_a_recipe_keeps_affine_indices():
    g = GraphMaker()
    x = g.input("x", 8, 16, 12, 64)
    t = g.reshape(g.neg(x), shape=(8, 16, 768))
    t = g.permute(g.reshape(g.abs(t), shape=(8, 16, 12, 64)), dims=(0, 2, 1, 3))
    loops = check(g, g.neg(t), [torch.randn(8, 16, 12, 64)])
    assert "//" not in print_loop_graph(loops) and "%" not in print_loop_graph(loops)


def test_channels_last_and_permuted_layouts():
    g = GraphMaker()
    x = g.input("x", 2, 3, 4, 5, strides=(60, 1, 15, 3))
    t = g.add(x, x, layout=(60, 1, 15, 3))
    heavy = g.exp(t)  # an inner temporary: contiguous by its metadata, stored as its operand lies
    out = g.permute(g.neg(t), dims=(0, 2, 3, 1), layout=(60, 15, 3, 1))
    loops = check(
        g,
        (t, out, g.neg(heavy), g.sum(heavy, axes=(1,))),
        [torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)],
    )
    stored = [node.outputs[0] for node in loops.nodes if node.origins == ("exp",)]
    assert stored and stored[0].strides == (60, 1, 15, 3)


@pytest.mark.parametrize("pieces", [1, 2, 3, 6])
def test_cat(pieces):
    g = GraphMaker()
    xs = [g.input(f"x{k}", 3, k + 1) for k in range(pieces)]
    empty = g.input("empty", 3, 0)
    t = g.cat(*map(g.neg, xs), empty, axis=1)
    loops = check(g, g.mul(t, t), [*(torch.randn(3, k + 1) for k in range(pieces)), torch.zeros(3, 0)])
    assert counts(loops)[:2] == ((1, 0) if pieces <= 4 else (7, 1))


def test_pad_and_scatters():
    g = GraphMaker()
    x, y = g.input("x", 3, 5), g.input("y", 2, 2)
    s = g.scalar("s", float)
    outputs = (
        g.pad(g.exp(x), low=(1, 0), high=(2, 3), value=2.5),
        g.pad(x, low=(0, 1), high=(0, 0), value=s),
        g.slice_scatter(x, y, starts=(1, 1), stops=(3, 5), steps=(1, 2)),
        g.slice_scatter(x, g.abs(x), starts=(0, 0), stops=(3, 5), steps=(1, 1)),
        g.as_strided_scatter(x, y, shape=(2, 2), strides=(5, 2), offset=1),
        g.as_strided_scatter(x, y, shape=(2, 2), strides=(1, 10), offset=2),
        g.as_strided_scatter(x, y, shape=(2, 2), strides=(2, 1), offset=4),
        g.as_strided_scatter(x, y, shape=(2, 2), strides=(6, 3), offset=0),
        g.as_strided(g.abs(x), shape=(2, 2, 2), strides=(5, 1, 2), offset=3),
    )
    loops = check(g, outputs, [torch.randn(3, 5), torch.randn(2, 2)], [1.5])
    assert [str(n.op) for n in loops.nodes if isinstance(n, ExternNode)] == ["aten.as_strided_scatter.default"]


def test_pad_of_nothing():
    g = GraphMaker()
    x = g.input("x", 0, 3)
    check(g, g.pad(x, low=(1, 0), high=(1, 1), value=7.0), [torch.zeros(0, 3)])


def test_indexing():
    g = GraphMaker()
    x, n = g.input("x", 5, 4), g.input("n", 2, 3, dtype=torch.int64)
    rows = g.index(g.neg(x), n, dims=(0,))
    both = g.index(x, n, n, dims=(0, 1))
    m = g.input("m", 5, 2, dtype=torch.int32)
    picked = g.gather(g.exp(g.mul(x, x)), m, axis=1)
    few = g.gather(g.exp(x), g.slice(m, starts=(0, 0), stops=(5, 1), steps=(1, 1)), axis=1)
    tensors = [torch.randn(5, 4), torch.randint(-4, 4, (2, 3)), torch.randint(0, 4, (5, 2), dtype=torch.int32)]
    loops = check(g, (rows, both, picked, few), tensors)
    assert counts(loops)[0] == 5  # exp(x * x) is stored, neg(x) and what is read in a few places are not
    with pytest.raises(IndexError, match="index: dimension 0 of size 5: index 7"):
        interpret.run(loops, [tensors[0], torch.full((2, 3), 7), tensors[2]])


def test_creation_and_scalars():
    g = GraphMaker()
    lr, seed = g.scalar("lr", float), g.scalar("seed", int)
    filled = g.full(shape=(3, 4), value=lr, dtype=torch.bfloat16, device="cpu")
    tenth = g.full(shape=(3, 4), value=0.1, dtype=torch.bfloat16, device="cpu")
    count = g.iota(length=6, start=3, step=-2, dtype=torch.int64, device="cpu")
    ramp = g.iota(length=6, start=0.5, step=0.25, dtype=torch.float16, device="cpu")
    bits = g.random_bits(shape=(3, 4), seed=seed, stream=2, device="cpu")
    check(g, (filled, tenth, count, ramp, bits), [], [0.3, 11], exact=True)


def test_half_arithmetic_rounds_where_it_says():
    g = GraphMaker()
    x = g.input("x", 100, dtype=torch.bfloat16)
    wide = g.convert(x, dtype=torch.float32)
    rounded = g.convert(g.mul(wide, wide), dtype=torch.bfloat16)
    again = g.convert(rounded, dtype=torch.float32)
    fused = g.convert(g.add(again, wide), dtype=torch.bfloat16)
    flags = g.convert(g.convert(x, dtype=torch.bool), dtype=torch.float16)
    loops = check(g, (fused, flags), [torch.randn(100).bfloat16()], exact=True)
    assert counts(loops)[0] == 2


def test_convert_to_its_own_dtype_is_a_copy_in_another_layout():
    g = GraphMaker()
    x = g.input("x", 4, 6, strides=(1, 4))
    clone = g.convert(x, dtype=torch.float32, layout=(6, 1))
    product = g.extern(torch.ops.aten.mm.default, clone, g.permute(x, dims=(1, 0), layout=(4, 1)))
    loops = check(g, (product, clone, g.convert(x, dtype=torch.float32, layout=(1, 4))), [torch.randn(6, 4).t()])
    assert counts(loops) == (2, 1, 1)


def test_extern_operands_are_windows_without_copies():
    g = GraphMaker()
    x, w = g.input("x", 8, 6), g.input("w", 10, 6)
    wt = g.permute(w, dims=(1, 0), layout=(1, 6))
    hidden = g.extern(torch.ops.aten.mm.default, g.neg(x), wt)
    left = g.slice(hidden, starts=(0, 0), stops=(8, 5), steps=(1, 1), layout=(10, 1))
    right = g.permute(
        g.slice(hidden, starts=(0, 5), stops=(8, 10), steps=(1, 1), layout=(10, 1)), dims=(1, 0), layout=(1, 10)
    )
    product = g.extern(torch.ops.aten.mm.default, left, right)
    act = g.tanh(product)
    heads = g.permute(g.reshape(act, shape=(2, 4, 8)), dims=(0, 2, 1), layout=(32, 1, 8))
    out = g.extern(torch.ops.aten.bmm.default, heads, g.reshape(act, shape=(2, 4, 8)))
    loops = check(g, out, [torch.randn(8, 6), torch.randn(10, 6)])
    assert counts(loops) == (2, 3, 5)
    assert [n.outputs[0].shape for n in loops.nodes if isinstance(n, LoopNode)] == [(8, 6), (8, 8)]


def test_extern_of_expanded_operand_and_lists():
    g = GraphMaker()
    x = g.input("x", 1, 6)
    tall = g.expand(g.exp(x), shape=(4, 6), layout=(0, 1))
    s = g.scalar("s", float)
    y = g.extern(torch.ops.aten.mul.Scalar, tall, s)
    parts = g.extern(torch.ops.aten.split.Tensor, y, 2)
    z = g.extern(torch.ops.aten.stack.default, [parts[0], g.abs(parts[1])])
    loops = check(g, (z, parts[1]), [torch.randn(1, 6)], [3.0])
    assert counts(loops)[1] == 3
    stored = next(n.outputs[0] for n in loops.nodes if isinstance(n, LoopNode))
    assert stored.shape == (1, 6)  # once, and repeated by a window


def test_extern_of_expanded_rows_that_are_padded():
    """Rows of 6 in a pitch of 16, for all heads: what attention's kernels ask of a mask."""
    g = GraphMaker()
    x = g.input("x", 3, 6)
    mask = g.reshape(g.exp(x), shape=(1, 1, 3, 6), layout=(48, 48, 16, 1))
    tall = g.expand(mask, shape=(2, 4, 3, 6), layout=(0, 0, 16, 1))
    loops = check(g, g.extern(torch.ops.aten.add.Tensor, tall, tall), [torch.randn(3, 6)])
    (extern,) = (n for n in loops.nodes if isinstance(n, ExternNode))
    handed = next(n.output for n in loops.nodes if isinstance(n, ViewNode) and n.output.name == extern.args[0].name)
    assert handed.strides == (0, 0, 16, 1)
    assert max(count(n.outputs[0].shape) for n in loops.nodes if isinstance(n, LoopNode)) == 18


def test_outputs_that_share_memory():
    g = GraphMaker()
    x = g.input("x", 4, 6)
    view = g.permute(x, dims=(1, 0), layout=(1, 6))
    y = g.neg(x)
    product = g.extern(torch.ops.aten.mm.default, y, view)
    turned = g.permute(product, dims=(1, 0), layout=(1, 4))
    loops = check(g, (x, view, y, y, turned, g.expand(g.sum(x, axes=(0, 1)), shape=())), [torch.randn(4, 6)])
    names = loops.outputs
    assert names[0] != "x" and names[2] != names[3]
    assert len(set(names)) == len(names)
    # mm's transposed result is a window on it; x, the view of x and the second y are copies
    assert counts(loops)[2] == 2


def test_donations_are_carried():
    g = GraphMaker()
    p, grad, lr = g.input("p", 4), g.input("grad", 4), g.scalar("lr", float)
    rate = g.full(shape=(4,), value=lr, dtype=torch.float32, device="cpu")
    new = g.sub(p, g.mul(grad, rate))
    loops = check(g, (new, p), [torch.randn(4), torch.randn(4)], [0.1], donations={0: "p"})
    assert loops.donations == {loops.outputs[0]: "p"}
    with pytest.raises(LoweringError, match="output 0 is donated to 'q', which is no input"):
        lower(g.graph, donations={0: "q"})


def test_empty_and_zero_dimensional():
    g = GraphMaker()
    x, s = g.input("x", 0, 3), g.input("s")
    empty = g.exp(x)
    total = g.sum(empty, axes=(0,))
    wide = g.expand(g.reshape(g.neg(s), shape=(1,)), shape=(3,))
    outputs = (empty, total, g.prod(x, axes=(0, 1)), g.mul(total, wide), g.neg(s), g.any(g.isnan(x), axes=(0,)))
    check(g, outputs, [torch.zeros(0, 3), torch.tensor(2.0)])


def test_a_cpu_scalar_tensor_among_cuda_tensors_is_moved():
    g = GraphMaker()
    x, step = g.input("x", 4, device="cuda:0"), g.input("step")
    decay = g.reshape(g.exp(step), shape=(1,))
    decay.meta["val"] = type(decay.meta["val"])((1,), torch.float32, (1,), "cuda:0")
    wide = g.expand(decay, shape=(4,))
    out = g.mul(x, wide)
    next_step = g.add(step, step)
    g.graph.output((out, next_step))
    loops = lower(g.graph, donations={})
    externs = [node for node in loops.nodes if isinstance(node, ExternNode)]
    assert [node.kwargs["device"].type for node in externs] == ["cuda", "cpu"]
    assert all(out.device == "cuda:0" for n in loops.nodes if isinstance(n, LoopNode) for out in n.outputs)
    device_of = {n.outputs[0].name: n.outputs[0].device for n in loops.nodes}
    assert [device_of[name] for name in loops.outputs] == ["cuda:0", "cpu"]


def test_values_that_may_be_rounded_lie_in_memory_as_halves():
    """A bfloat16 residual stream: one buffer for the float32 arithmetic that follows and for the product."""
    g = GraphMaker()
    x, y = (g.input(name, 128, 512, dtype=torch.bfloat16) for name in "xy")
    total = g.add(g.convert(x, dtype=torch.float32), g.convert(y, dtype=torch.float32))
    total.meta["memory_dtype"] = torch.bfloat16  # as graph passes note it
    half = g.convert(total, dtype=torch.bfloat16)
    product = g.extern(torch.ops.aten.mm.default, half, g.permute(half, dims=(1, 0), layout=(1, 512)))
    g.graph.output((product, g.sum(g.exp(total), axes=(1,)), g.mul(total, total)))
    loops = lower(g.graph)
    stored = [
        b for node in loops.nodes if isinstance(node, LoopNode) for b in node.outputs if b.meta.numel == 128 * 512
    ]
    assert [b.dtype for b in stored] == [torch.bfloat16, torch.float32]  # the sum, and the square that is an output
    tensors = [torch.randn(128, 512).bfloat16() for _ in "xy"]
    rounded = tensors[0] + tensors[1]
    products, sums, squares = interpret.run(loops, tensors)
    torch.testing.assert_close(products, rounded @ rounded.t())
    torch.testing.assert_close(sums, rounded.float().exp().sum(1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(squares, rounded.float().square(), rtol=0, atol=0)


def test_a_rounded_value_is_handed_out_in_its_own_dtype():
    g = GraphMaker()
    x = g.input("x", 128, 512)
    wide = g.exp(x)
    wide.meta["memory_dtype"] = torch.bfloat16
    turned = g.permute(wide, dims=(1, 0))
    g.graph.output((g.sum(wide, axes=(0,)), g.sum(wide, axes=(1,)), g.mul(wide, wide), turned))
    results = interpret.run(lower(g.graph), [torch.randn(128, 512)])
    assert all(result.dtype == torch.float32 for result in results)

"""Analyses, the printer and the interpreter on loop nodes made by hand."""

from __future__ import annotations

import pytest
import torch
from torchlazy.inductor import interpret
from torchlazy.inductor.analyses import BufferRead, analyse, node_index
from torchlazy.inductor.index import axis, dot, flatten
from torchlazy.inductor.ir import Buffer, BufferRef, ExternNode, LoopGraph, LoopNode, ViewNode
from torchlazy.inductor.printer import print_loop_graph
from torchlazy.prims.meta import contiguous_strides
from torchlazy.prims.random_bits import philox_reference


def buffer(name, *shape, dtype=torch.float32, strides=None, offset=0):
    return Buffer(name, dtype, shape, contiguous_strides(shape) if strides is None else strides, "cpu", offset)


X = buffer("x", 4, 6)
Y = buffer("y", 4)


def softmax_sum(ops, i, r):
    return ops.exp(ops.load("x", X.element((*i, *r))))


def row_sum(body=softmax_sum, kind="sum", outputs=(Y,), accumulate=torch.float32):
    return LoopNode(outputs, (4,), body, (6,), kind, accumulate, ("prims.sum",))


def run(nodes, inputs, outputs, *tensors, scalars=(), values=()):
    return interpret.run(LoopGraph(tuple(inputs), tuple(scalars), tuple(nodes), outputs), tensors, values)


def test_facts_of_a_reduction():
    facts = analyse(row_sum())
    i, r = axis("i0", 4), axis("r0", 6)
    assert facts.reads == (BufferRead("x", 6 * i + r),)
    assert facts.writes == (("y", i),)
    assert facts.ops == {"exp": 1} and facts.heavy == 1 and facts.work == 15


def test_facts_mark_indirect_and_guarded_reads():
    def body(ops, i, r):
        at = ops.indirect(ops.load("n", i[0]), 4, "row")
        condition = ops.lt(ops.index_expr(i[0], torch.int64), ops.constant(2, torch.int64))
        return ops.masked(condition, lambda: ops.load("x", at * 6), 0.0)

    facts = analyse(LoopNode((buffer("y", 3),), (3,), body))
    assert [(read.name, read.indirect, read.guarded) for read in facts.reads] == [
        ("n", False, False),
        ("x", True, True),
    ]


@pytest.mark.parametrize("kind", ["sum", "prod", "max", "min", "argmax", "argmin"])
def test_reductions(kind):
    x = torch.randn(4, 6)
    dtype = torch.int64 if kind.startswith("arg") else torch.float32
    node = row_sum(lambda ops, i, r: ops.load("x", X.element((*i, *r))), kind, (buffer("y", 4, dtype=dtype),))
    expected = getattr(torch, {"max": "amax", "min": "amin"}.get(kind, kind))(x, 1)
    assert torch.equal(run([node], [X], ("y",), x)[0], expected)


def test_welford_and_bool_reductions():
    x = torch.randn(4, 6)
    outputs = tuple(buffer(name, 4) for name in ("mean", "m2", "count"))
    node = row_sum(lambda ops, i, r: ops.load("x", X.element((*i, *r))), "welford", outputs)
    mean, m2, count = run([node], [X], ("mean", "m2", "count"), x)
    torch.testing.assert_close(mean, x.mean(1))
    torch.testing.assert_close(m2 / count, x.var(1, correction=0))
    positive = lambda ops, i, r: ops.gt(ops.load("x", X.element((*i, *r))), ops.constant(0.0, torch.float32))  # noqa: E731
    node = row_sum(positive, "any", (buffer("y", 4, dtype=torch.bool),), torch.bool)
    assert torch.equal(run([node], [X], ("y",), x)[0], (x > 0).any(1))


def test_halves_are_float32_inside():
    h = buffer("h", 5, dtype=torch.bfloat16)

    def body(ops, i, r):
        x = ops.load("h", i[0])
        return ops.add(x, ops.to_dtype(ops.mul(x, x), torch.bfloat16))

    x = torch.randn(5).bfloat16()
    node = LoopNode((buffer("y", 5, dtype=torch.bfloat16),), (5,), body)
    assert torch.equal(run([node], [h], ("y",), x)[0], x + x * x)


def test_random_bits_are_the_definition():
    def body(ops, i, r):
        counter = ops.index_expr(flatten(i, (3, 5)), torch.int64)
        return ops.random_bits(ops.scalar("seed", torch.int64), ops.constant(7, torch.int32), counter)

    node = LoopNode((buffer("y", 3, 5, dtype=torch.int32),), (3, 5), body)
    for seed in (1, -5, 1 << 40):
        (y,) = run([node], [], ("y",), scalars=[("seed", int)], values=[seed])
        assert torch.equal(y.reshape(-1), torch.from_numpy(philox_reference(seed, 7, 15)))


def test_indirect_wraps_and_raises():
    n, table = buffer("n", 3, dtype=torch.int64), buffer("t", 4)
    node = LoopNode(
        (buffer("y", 3),), (3,), lambda ops, i, r: ops.load("t", ops.indirect(ops.load("n", i[0]), 4, "t[n]"))
    )
    t = torch.arange(4.0)
    assert run([node], [n, table], ("y",), torch.tensor([0, -1, 2]), t)[0].tolist() == [0, 3, 2]
    with pytest.raises(IndexError, match=r"t\[n\]: index 4 is out of range for a dimension of size 4"):
        run([node], [n, table], ("y",), torch.tensor([0, 4, 2]), t)


def test_a_load_outside_is_a_compiler_error():
    node = LoopNode((buffer("y", 4),), (4,), lambda ops, i, r: ops.load("x", i[0] + 30))
    with pytest.raises(interpret.InterpretError, match="of 24 elements"):
        run([node], [X], ("y",), torch.zeros(4, 6))


def test_masked_loads_do_not_touch_memory():
    def body(ops, i, r):
        condition = ops.ge(ops.index_expr(i[0], torch.int64), ops.constant(2, torch.int64))
        return ops.masked(condition, lambda: ops.load("x", i[0] - 2), -1.0)

    x = torch.arange(24.0).reshape(4, 6)
    assert run([LoopNode((buffer("y", 5),), (5,), body)], [X], ("y",), x)[0].tolist() == [-1, -1, 0, 1, 2]


def test_views_offsets_and_extern_calls():
    x = torch.arange(48.0)[3:27].reshape(4, 6)
    window = buffer("w", 6, 2, strides=(1, 6), offset=6)  # rows 1 and 2, transposed
    product = ExternNode(
        torch.ops.aten.mm.default, (BufferRef("x"), BufferRef("w")), {}, (buffer("p", 4, 2, strides=(1, 4)),)
    )
    double = LoopNode((buffer("y", 4, 2),), (4, 2), lambda ops, i, r: ops.add(*[ops.load("p", dot(i, (1, 4)))] * 2))
    y, p = run([ViewNode(window, "x"), product, double], [X], ("y", "p"), x)
    torch.testing.assert_close(p, x @ x[1:3].t())
    assert p.stride() == (1, 4) and torch.equal(y, 2 * p)


def test_text():
    node = row_sum()
    scale = LoopNode(
        (buffer("z", 4, strides=(2,)),),
        (4,),
        lambda ops, i, r: ops.mul(ops.load("y", i[0]), ops.scalar("s", torch.float32)),
    )
    text = print_loop_graph(LoopGraph((X,), (("s", float),), (node, scale), ("z",), {"z": "x"}))
    assert text == (
        "inputs:\n  x: float32[4, 6] on cpu\n  s: float\n"
        "y: float32[4] on cpu  # prims.sum\n  for i0<4 reduce r0<6:\n    y[i0] = sum<float32>(exp(x[i0 * 6 + r0]))\n"
        "z: float32[4] strides (2,) on cpu\n  for i0<4:\n    z[i0 * 2] = (y[i0] * float32(s))\n"
        "outputs: z\ndonated: z into x\n"
    )
    assert node_index(node) == ((axis("i0", 4),), (axis("r0", 6),))

"""Sums of rows with one value: found in the gradient of a cross-entropy, left alone elsewhere, the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torchlazy.prims import eager, ops
from torchlazy.prims.builder import Builder
from torchlazy.prims.decompose import decompose
from torchlazy.prims.decomps.value import Value, iota
from torchlazy.prims.meta import meta_of
from torchlazy.prims.passes.graph_passes import run_passes
from torchlazy.prims.verify import PRIMS, verify

aten = torch.ops.aten


def _sums(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is ops.sum]


def _gradient_graph(logits: torch.Tensor, target: torch.Tensor, dim: int, reduction: int) -> tuple[fx.Graph, Any]:
    """log_softmax's backward of nll_loss's backward, of metadata and as eager computes it."""
    y = torch.log_softmax(logits, dim)
    loss, weight = aten.nll_loss_forward(y, target, None, reduction, -100)
    grad = torch.full_like(loss, 0.7)
    graph = fx.Graph()

    def given(name: str, x: torch.Tensor) -> fx.Node:
        node = graph.placeholder(name)
        node.meta["val"] = meta_of(x)
        return node

    def call(op: torch._ops.OpOverload, *args: Any) -> fx.Node:
        node = graph.call_function(op, args)
        node.meta["val"] = meta_of(logits)
        return node

    inputs = (grad, y, target, weight)
    g, out, t, w = (given(name, x) for name, x in zip(("g", "y", "t", "w"), inputs, strict=True))
    slope = call(aten.nll_loss_backward.default, g, out, t, None, reduction, -100, w)
    graph.output((call(aten._log_softmax_backward_data.default, slope, out, dim, logits.dtype),))
    wanted = aten._log_softmax_backward_data(
        aten.nll_loss_backward(grad, y, target, None, reduction, -100, weight), y, dim, logits.dtype
    )
    return graph, (inputs, wanted)


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_gradient_of_cross_entropy_needs_no_sum(reduction: int) -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(6, 11), torch.tensor([0, 10, -100, 3, 3, -100])
    graph, (inputs, wanted) = _gradient_graph(logits, target, 1, reduction)
    before = decompose(graph)
    assert len(_sums(before)) == 1
    after = run_passes(before)
    verify(after, PRIMS)
    assert not _sums(after)
    (found,) = eager.run(after, list(inputs))
    torch.testing.assert_close(found, wanted)
    assert torch.equal(found, eager.run(before, list(inputs))[0])


def _graph(build: Callable[[Builder, Value], Value], x: torch.Tensor) -> fx.Graph:
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = meta_of(x)
    graph.output((build(Builder(graph), Value(Builder(graph), node)).node,))
    return run_passes(graph)


def _rows(b: Builder, shape: tuple[int, ...], axis: int) -> Value:
    return iota(b, shape[axis], "cpu").reshape(tuple(n if i == axis else 1 for i, n in enumerate(shape)))


TARGETS = torch.tensor([[2], [0], [-1], [4], [5]])


def test_positions_outside_of_the_row_add_nothing() -> None:
    def one_hot(b: Builder, t: Value) -> Value:
        hit = _rows(b, (5, 5), 1).eq(t)
        return hit.where(t.to(torch.float32), t.to(torch.float32).like(0.0)).sum((1,))

    graph = _graph(one_hot, TARGETS)
    assert not _sums(graph)
    assert eager.run(graph, [TARGETS])[0].tolist() == [2.0, 0.0, 0.0, 4.0, 0.0]


@pytest.mark.parametrize("why", ["value varies along the row", "another axis", "both axes", "positions repeat"])
def test_other_sums_stay(why: str) -> None:
    def build(b: Builder, t: Value) -> Value:
        along = _rows(b, (5, 5), 1)
        value = along if why == "value varies along the row" else t
        axes = {"another axis": (0,), "both axes": (0, 1)}.get(why, (1,))
        if why == "positions repeat":
            along = Value(b, b.prim(ops.iota, length=5, start=0, step=2, dtype=torch.int64, device="cpu")).reshape(
                (1, 5)
            )
        return along.eq(t).where(value.to(torch.float32), 0.0).sum(axes)

    graph = _graph(build, TARGETS)
    assert len(_sums(graph)) == 1
    i, t = torch.arange(5)[None], TARGETS
    i = i * 2 if why == "positions repeat" else i
    value = i if why == "value varies along the row" else t
    axes = {"another axis": (0,), "both axes": (0, 1)}.get(why, (1,))
    wanted = torch.where(i == t, value.expand(5, 5).float(), torch.tensor(0.0)).sum(axes)
    assert torch.equal(eager.run(graph, [TARGETS])[0], wanted)

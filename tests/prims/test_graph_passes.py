"""Passes over prims graphs: what each fold does, and that random graphs keep their values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torchlazy.prims import eager, ops
from torchlazy.prims.builder import Builder
from torchlazy.prims.decompose import decompose
from torchlazy.prims.meta import TensorMeta, contiguous_strides
from torchlazy.prims.passes import graph_passes
from torchlazy.prims.verify import PRIMS, verify
from torchlazy.tests.prims.graphs import aten_graph

aten = torch.ops.aten
Build = Callable[[Builder, fx.Node], Any]


def build(make: Build, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (3, 4)) -> fx.Graph:
    """A prims graph of one operand."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = TensorMeta(shape, dtype, contiguous_strides(shape))
    result = make(Builder(graph), x)
    graph.output(result if isinstance(result, tuple) else (result,))
    verify(graph, PRIMS)
    return graph


def names(graph: fx.Graph) -> list[str]:
    """The primitives of a graph in order."""
    return [node.target.__name__ for node in graph.nodes if node.op == "call_function"]


def optimised(
    make: Build, dtype: torch.dtype = torch.float32, precision: graph_passes.Precision = "fused"
) -> list[str]:
    graph = graph_passes.run_passes(build(make, dtype), precision)
    verify(graph, PRIMS)
    return names(graph)


HALF, FLOAT = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    "make, expected",
    [
        (lambda b, x: b.prim(ops.mul, x, 1.0), []),
        (lambda b, x: b.prim(ops.mul, b.full_like(x, 1.0), x), []),
        (lambda b, x: b.prim(ops.div, x, 1.0), []),
        (lambda b, x: b.prim(ops.sub, x, 0.0), []),
        (lambda b, x: b.prim(ops.add, x, 0.0), ["full", "add"]),
        (lambda b, x: b.prim(ops.add, x, -0.0), []),
        (lambda b, x: b.prim(ops.sub, x, -0.0), ["full", "sub"]),
        (lambda b, x: b.prim(ops.sub, b.full_like(x, 0.0), x), ["full", "sub"]),
        (lambda b, x: b.prim(ops.neg, b.prim(ops.neg, x)), []),
        (lambda b, x: b.convert(b.convert(x, torch.float64), FLOAT), []),
        (lambda b, x: b.convert(b.convert(x, torch.float64), HALF), ["convert"]),
        (lambda b, x: b.convert(b.convert(x, torch.int64), FLOAT), ["convert", "convert"]),
        (lambda b, x: b.convert(b.convert(x, HALF), FLOAT), []),
        (lambda b, x: b.reshape(b.reshape(x, (12,)), (4, 3)), ["reshape"]),
        (lambda b, x: b.reshape(b.reshape(x, (12,)), (3, 4)), []),
        (lambda b, x: b.permute(b.permute(x, (1, 0)), (1, 0)), []),
        (lambda b, x: b.broadcast(b.broadcast(b.reshape(x, (1, 12)), (2, 12)), (2, 12)), ["reshape", "expand"]),
        (lambda b, x: b.prim(ops.where, b.full((3, 4), True, torch.bool, "cpu"), x, 0.0), []),
        (lambda b, x: b.prim(ops.mul, x, b.prim(ops.sub, b.full_like(x, 3.0), 2.0)), []),
        (lambda b, x: b.prim(ops.mul, b.prim(ops.exp, x), b.prim(ops.exp, x)), ["exp", "mul"]),
        (lambda b, x: (b.prim(ops.exp, x), b.prim(ops.sin, x))[0], ["exp"]),
    ],
)
def test_folds(make: Build, expected: list[str]) -> None:
    assert optimised(make) == expected


def test_expand_of_constant_is_a_constant() -> None:
    def make(b: Builder, x: fx.Node) -> fx.Node:
        row = b.prim(ops.full, shape=(1, 4), value=2.0, dtype=FLOAT, device="cpu")
        return b.prim(ops.expand, row, shape=(3, 4))

    assert optimised(make) == ["full"]


def test_eager_precision_keeps_roundings() -> None:
    make = lambda b, x: b.convert(b.convert(x, HALF), FLOAT)  # noqa: E731
    assert optimised(make, precision="eager") == ["convert", "convert"]


def test_rounded_constants_stay_rounded() -> None:
    graph = build(lambda b, x: b.prim(ops.mul, x, b.convert(b.full((3, 4), 0.1, HALF, "cpu"), FLOAT)))
    (out,) = eager.run(graph_passes.run_passes(graph), [torch.ones(3, 4)])
    assert out[0, 0].item() == torch.tensor(0.1).to(HALF).item()


def test_another_layout_is_kept() -> None:
    graph, inputs, expected = aten_graph(aten.clone.default, torch.randn(2, 3, 4, 5), memory_format=torch.channels_last)
    prims = graph_passes.run_passes(decompose(graph, strict=True))
    assert names(prims) == ["convert"]
    assert eager.run(prims, inputs)[0].stride() == expected.stride()


def test_constants_of_different_types_and_signs_stay_apart() -> None:
    def make(b: Builder, x: fx.Node) -> Any:
        zeros = [b.prim(ops.add, x, v) for v in (0.0, -0.0)]
        return (b.prim(ops.copysign, x, b.full_like(x, 0.0)), b.prim(ops.copysign, x, b.full_like(x, -0.0)), *zeros)

    graph = graph_passes.run_passes(build(make))
    plus, minus, *_ = eager.run(graph, [torch.ones(3, 4)])
    assert plus[0, 0] == 1 and minus[0, 0] == -1


def test_random_externs_are_neither_dropped_nor_shared() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = TensorMeta((3,), FLOAT, (1,))
    b = Builder(graph)
    first, second = (b.extern(aten.bernoulli.default, x) for _ in range(2))
    b.extern(aten.bernoulli.default, x)
    graph.output((first, second))
    assert names(graph_passes.run_passes(graph)) == ["extern_aten_bernoulli_default"] * 3


def test_random_bits_are_shared_and_dropped() -> None:
    def make(b: Builder, x: fx.Node) -> fx.Node:
        bits = [b.prim(ops.random_bits, shape=(3, 4), seed=1, stream=s, device="cpu") for s in (0, 0, 1)]
        return b.prim(ops.bitwise_xor, bits[0], bits[1])

    assert optimised(make) == ["random_bits", "bitwise_xor"]


def test_gelu_in_half_keeps_its_value_within_one_rounding() -> None:
    torch.manual_seed(0)
    x = torch.randn(64).to(HALF)
    graph, inputs, expected = aten_graph(aten.gelu.default, x)
    for precision in ("fused", "eager"):
        (actual,) = eager.run(graph_passes.run_passes(decompose(graph, strict=True), precision), inputs)  # type: ignore
        torch.testing.assert_close(actual, expected)


def test_nan_constants_are_shared() -> None:
    make = lambda b, x: b.prim(ops.add, b.prim(ops.add, x, math.nan), math.nan)  # noqa: E731
    assert optimised(make) == ["full", "add", "add"]


def test_values_that_stay_unrounded_know_the_dtype_that_they_may_be_stored_in() -> None:
    def make(b: Builder, x: fx.Node) -> tuple[fx.Node, ...]:
        rounded = b.convert(b.prim(ops.exp, x), HALF)
        inner = b.prim(ops.sin, x)  # read unrounded by the rule itself
        return b.prim(ops.neg, b.convert(rounded, FLOAT)), b.prim(ops.neg, inner), b.convert(inner, HALF)

    graph = graph_passes.run_passes(build(make))
    memory = {n.target.__name__: n.meta.get(graph_passes.MEMORY_DTYPE) for n in graph.nodes if n.op == "call_function"}
    assert memory["exp"] == HALF and memory["sin"] is None and memory["neg"] is None
    assert names(graph) == ["exp", "sin", "neg", "neg", "convert"]

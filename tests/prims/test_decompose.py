"""The driver: what stays extern and why, metadata of the new graph, layouts, runtime scalars, printing."""

from __future__ import annotations

import copy
import pickle
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx
from torchlazy.prims import builder, eager, ops
from torchlazy.prims.builder import Builder, Fallback
from torchlazy.prims.decompose import RuleError, decompose, rule
from torchlazy.prims.errors import GraphError
from torchlazy.prims.meta import TensorMeta
from torchlazy.prims.size_expr import Symbol
from torchlazy.prims.size_int import SizeSpace, is_tracked, value_now
from torchlazy.prims.verify import PRIMS, verify
from torchlazy.tests.prims.graphs import Runtime, aten_graph, check, externs

aten = torch.ops.aten


def test_metadata_of_the_new_graph() -> None:
    graph, _, _ = aten_graph(aten.add.Tensor, torch.ones(2, 3).half(), torch.ones(3), alpha=2)
    prims = decompose(graph)
    verify(prims, PRIMS)
    for node in prims.nodes:
        if node.op == "call_function":
            assert node.meta["frame"] == "test.py:1" and node.meta["origin"] == "aten.add.Tensor"


@cache
def foreign_operator() -> torch._ops.OpOverload:
    """An operator of a user's own: nobody knows more of it than that it can be called."""
    torch.library.define("torchlazy_test_decompose::twice", "(Tensor x) -> Tensor")
    torch.library.impl("torchlazy_test_decompose::twice", "CompositeExplicitAutograd", lambda x: x * 2)
    return torch.ops.torchlazy_test_decompose.twice.default


def test_an_operator_without_rule_becomes_extern_and_is_told() -> None:
    graph, inputs, expected = aten_graph(foreign_operator(), torch.eye(3))
    report: list[Fallback] = []
    prims = decompose(graph, report=report)
    assert externs(prims) == ["extern_torchlazy_test_decompose_twice_default"]
    assert report == [Fallback("torchlazy_test_decompose.twice.default", "no rule", "test.py:1")]
    torch.testing.assert_close(eager.run(prims, inputs)[0], expected)


def test_calls_that_stay_extern_by_choice_are_told_from_gaps() -> None:
    def only_fallback(overload: torch._ops.OpOverload, *args: Any) -> Fallback:
        report: list[Fallback] = []
        decompose(aten_graph(overload, *args)[0], report=report)
        (fallback,) = report
        return fallback

    square, positions = torch.eye(3), torch.zeros(3, 2, dtype=torch.int64)
    assert only_fallback(aten.mm.default, square, square).by_choice  # has no rule on purpose
    assert only_fallback(aten.addmm.default, square, square, square).by_choice  # its rule covers beta=0 only
    assert only_fallback(aten.scatter_add.default, square, 1, positions, square).by_choice
    assert only_fallback(aten.cholesky.default, square).by_choice  # neither a rule nor a primitive, for a reason
    assert not only_fallback(foreign_operator(), square).by_choice
    assert not only_fallback(aten.add.Tensor, square.to(torch.complex64), square).by_choice  # not covered by its rule


def test_a_wrong_rule_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(b: Builder, x: fx.Node) -> fx.Node:
        return b.prim(ops.sum, x, axes=(0,))

    monkeypatch.setitem(builder.RULES, aten.exp.default, wrong)
    graph, inputs, expected = aten_graph(aten.exp.default, torch.ones(3))
    with pytest.raises(RuleError, match=r"aten\.exp\.default"):
        decompose(graph, strict=True)
    report: list[Fallback] = []
    prims = decompose(graph, report=report)
    assert "rule failed" in report[0].reason
    assert [n.target.name for n in prims.nodes if n.op == "call_function"] == ["extern_aten_exp_default"]
    torch.testing.assert_close(eager.run(prims, inputs)[0], expected)


def test_one_rule_an_overload() -> None:
    with pytest.raises(ValueError, match="two rules"):
        rule(aten.add.Tensor)(lambda b, x: x)
    rule("no_such_operator.default")(lambda b, x: x)


def test_several_results_of_an_extern() -> None:
    graph, inputs, expected = aten_graph(aten.linalg_qr.default, torch.randn(3, 3))
    prims = decompose(graph)
    verify(prims, PRIMS)
    for actual, want in zip(eager.run(prims, inputs), expected, strict=True):
        torch.testing.assert_close(actual, want)


def test_illegal_nodes() -> None:
    graph = fx.Graph()
    node = graph.get_attr("weight")
    graph.output((node,))
    with pytest.raises(GraphError, match="get_attr"):
        decompose(graph)


def test_strides_are_eagers() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for overload, args in (
        (aten.exp.default, (x,)),
        (aten.add.Tensor, (x, x)),
        (aten.permute.default, (x, [1, 0, 3, 2])),
        (aten.select.int, (x, 1, 2)),
        (aten.expand.default, (torch.ones(3, 1), [3, 4])),
    ):
        graph, _, expected = aten_graph(overload, *args)
        output = decompose(graph).output_node().args[0][0]
        meta = output.meta["val"]
        assert builder.is_same_layout(meta, TensorMeta(meta.shape, meta.dtype, tuple(expected.stride())))


def test_an_alias_is_the_same_node() -> None:
    graph, _, _ = aten_graph(aten.detach.default, torch.ones(3))
    prims = decompose(graph)
    assert prims.output_node().args[0][0].op == "placeholder"


def test_a_number_on_the_cpu_beside_a_cuda_tensor_moves() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    x.meta["val"] = TensorMeta((3,), torch.float32, (1,), "cuda:0")
    y.meta["val"] = TensorMeta((), torch.float32, (), "cpu")
    node = graph.call_function(aten.mul.Tensor, (x, y))
    node.meta["val"] = TensorMeta((3,), torch.float32, (1,), "cuda:0")
    graph.output((node,))
    report: list[Fallback] = []
    prims = decompose(graph, report=report, strict=True)
    verify(prims, PRIMS)
    assert externs(prims) == ["extern_aten__to_copy_default"] and not report


def test_what_a_gpus_program_computes_on_the_host_is_the_librarys() -> None:
    """RMSprop counts its steps in numbers on the host, which nothing reads."""
    host, there = TensorMeta((), torch.float32, (), "cpu"), TensorMeta((3,), torch.float32, (1,), "cuda:0")
    graph = fx.Graph()
    x, steps = graph.placeholder("x"), graph.placeholder("steps")
    x.meta["val"], steps.meta["val"] = there, host
    one = graph.call_function(aten.full.default, ([], 1.0), {"dtype": torch.float32, "device": torch.device("cpu")})
    counted = graph.call_function(aten.add.Tensor, (steps, one))
    shifted = graph.call_function(aten.add.Tensor, (x, one))
    one.meta["val"], counted.meta["val"], shifted.meta["val"] = host, host, there
    graph.output((counted, shifted))
    report: list[Fallback] = []
    prims = decompose(graph, report=report, strict=True)
    verify(prims, PRIMS)
    assert [f.reason for f in report if f.op == "aten.add.Tensor"] == ["values on the host, in a program for cuda:0"]
    assert externs(prims)[:2] == ["extern_aten_full_default", "extern_aten_add_Tensor"]
    assert [node.name for node in prims.nodes if node.target is ops.add and node.meta["val"] == there]


def test_runtime_scalars() -> None:
    torch.manual_seed(0)
    x = torch.randn(3)
    check(aten.addcdiv.default, x, x, x + 5, value=Runtime(-0.1))
    check(aten.pow.Tensor_Scalar, x.abs(), Runtime(1.5))
    check(aten.sub.Tensor, x, Runtime(2))
    graph, _, _ = aten_graph(aten.mul.Tensor, x, Runtime(2.0))
    (full,) = (n for n in decompose(graph).nodes if n.target is ops.full)
    assert isinstance(full.kwargs["value"], fx.Node)


def test_nested_operators_decompose_too() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = TensorMeta((3,), torch.float16, (1,))
    b = Builder(graph)
    result: Any = b.aten(aten.gelu.default, x)
    assert b.dtype(result) == torch.float16 and not b.fallbacks
    b.aten(aten.cholesky.default, b.full((2, 2), 1.0, torch.float32, "cpu"))
    assert [f.op for f in b.fallbacks] == ["aten.cholesky.default"]


def test_printed_graphs_run() -> None:
    graph, inputs, expected = aten_graph(aten.add.Tensor, torch.ones(2, 3), torch.ones(3), alpha=2)
    module = fx.GraphModule(torch.nn.Module(), decompose(graph))
    assert "torchlazy_prims_ops_add(" in module.code
    torch.testing.assert_close(module(*inputs)[0], expected)


def test_primitives_keep_their_identity() -> None:
    assert pickle.loads(pickle.dumps(ops.add)) is ops.add
    extern = ops.extern(aten.mm.default)
    assert ops.extern(aten.mm.default) is extern and pickle.loads(pickle.dumps(extern)) is extern
    assert copy.deepcopy(ops.add) is ops.add
    for prim in ops.PRIMS.values():
        assert prim.__doc__ and prim.kinds


@pytest.mark.parametrize("overload, dtype, rest", [
    (aten.mul.Tensor, torch.complex64, ()), (aten.cummax.default, torch.float32, (1,)),
    (aten.cumsum.default, None, (1,)), (aten.digamma.default, torch.float32, ()),
    (aten.masked_fill.Scalar, torch.complex64, ()),
])  # fmt: skip
def test_calls_that_a_rule_leaves_to_aten_keep_tracked_sizes(overload: Any, dtype: Any, rest: tuple[Any, ...]) -> None:
    rows = SizeSpace([Symbol("a", 12, 20, 2)]).symbol("a")
    b = Builder(fx.Graph())
    x = b.graph.placeholder("x")
    x.meta["val"] = TensorMeta((rows, 5), dtype or torch.float32, (5, 1), "cpu")
    others: dict[Any, tuple[Any, ...]] = {
        aten.mul.Tensor: (x,),
        aten.masked_fill.Scalar: (b.full((rows, 5), True, torch.bool, "cpu"), 1.0),
    }
    found = b.aten(overload, x, *others.get(overload, rest))
    for node in found if isinstance(found, tuple) else (found,):
        assert is_tracked(b.shape(node)[0]) and value_now(b.shape(node)[0]) == 12
        assert b.meta(node).strides == (5, 1)

"""Remembered decompositions give the very graph that running each rule gives; quick graphs are torch's graphs."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx
from torchlazy.prims import ops
from torchlazy.prims.decompose import decompose
from torchlazy.prims.meta import ScalarMeta, TensorMeta, contiguous_strides
from torchlazy.prims.plan_graph import PlanGraph
from torchlazy.prims.rule_memo import RuleMemo
from torchlazy.prims.size_expr import Symbol
from torchlazy.prims.size_int import SizeSpace

aten = torch.ops.aten


def meta(*shape: Any, dtype: torch.dtype = torch.float32) -> TensorMeta:
    return TensorMeta(tuple(shape), dtype, contiguous_strides(tuple(shape)))


def described(graph: fx.Graph) -> list[Any]:
    """All that later stages read of a graph."""
    return [(n.op, n.name, n.target, str(n.args), str(n.kwargs), n.meta) for n in graph.nodes]


class Aten:
    """An ATen graph under construction."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.calls = 0

    def placeholder(self, name: str, value: Any) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        return node

    def call(self, op: Any, value: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(op, args, kwargs)
        self.calls += 1
        node.meta.update(val=value, frame=f"model.py:{self.calls}", stage=("forward", "backward")[self.calls % 2])
        return node

    def decomposed(self, *results: fx.Node) -> tuple[fx.Graph, fx.Graph]:
        """With memory and without."""
        self.graph.output(results)
        return decompose(self.graph), decompose(self.graph, memoise=False)


def rules_run(monkeypatch: pytest.MonkeyPatch, op: Any) -> list[Any]:
    """A list that grows by one whenever the rule of `op` runs."""
    from torchlazy.prims.builder import RULES

    runs: list[Any] = []
    rule = RULES[op]

    def counted(b: Any, *args: Any, **kwargs: Any) -> Any:
        runs.append(args)
        return rule(b, *args, **kwargs)

    monkeypatch.setitem(RULES, op, counted)
    return runs


def test_equal_layers_run_each_rule_once_and_keep_lines_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = rules_run(monkeypatch, aten.native_layer_norm.default)
    g = Aten()
    x = g.placeholder("x", meta(4, 8))
    weight, bias = g.placeholder("weight", meta(8)), g.placeholder("bias", meta(8))
    statistics = meta(4, 1)
    for _ in range(5):
        normed = g.call(
            aten.native_layer_norm.default, (meta(4, 8), statistics, statistics), x, [8], weight, bias, 1e-5
        )
        x = g.call(operator.getitem, meta(4, 8), normed, 0)
        x = g.call(aten.gelu.default, meta(4, 8), x)
    quick, plain = g.decomposed(x)
    assert described(quick) == described(plain)
    assert len(runs) == 1 + 5
    assert len({node.meta["frame"] for node in quick.nodes if node.op == "call_function"}) == 10


@pytest.mark.parametrize(
    ("first", "second"),
    [((1.0,), (1,)), ((0.0,), (-0.0,)), ((2.0,), (3.0,)), ((True,), (1,)), ((float("nan"),), (float("inf"),))],
)
def test_numbers_that_compare_equal_but_are_not_stay_apart(first: Any, second: Any) -> None:
    g = Aten()
    x = g.placeholder("x", meta(3))
    a = g.call(aten.add.Scalar, meta(3), x, *first)
    b = g.call(aten.add.Scalar, meta(3), x, *second)
    quick, plain = g.decomposed(a, b)
    assert described(quick) == described(plain)


def test_one_operand_twice_is_not_two_operands() -> None:
    g = Aten()
    x, y = g.placeholder("x", meta(3)), g.placeholder("y", meta(3))
    results = [g.call(aten.mul.Tensor, meta(3), *pair) for pair in ((x, y), (x, x), (y, x), (y, y))]
    quick, plain = g.decomposed(*results)
    assert described(quick) == described(plain)
    products = [node.args for node in quick.nodes if node.target is ops.mul]
    assert [tuple(str(n) for n in args) for args in products] == [("x", "y"), ("x", "x"), ("y", "x"), ("y", "y")]


def test_constants_are_told_apart_by_their_number() -> None:
    g = Aten()
    x = g.placeholder("x", meta(2, 3))
    results = []
    for number in (0.5, 0.25, 0.5):
        constant = g.call(aten.full.default, meta(3), [3], number)
        results.append(g.call(aten.mul.Tensor, meta(2, 3), x, constant))
    quick, plain = g.decomposed(*results)
    assert described(quick) == described(plain)


def test_foreach_lists_and_scalars_of_the_run() -> None:
    g = Aten()
    rate = g.placeholder("rate", ScalarMeta(float))
    tensors = [g.placeholder(f"p{i}", meta(4)) for i in range(20)]
    grads = [g.placeholder(f"g{i}", meta(4)) for i in range(20)]
    wanted = tuple(meta(4) for _ in tensors)
    scaled = g.call(aten._foreach_mul.Scalar, wanted, grads, rate)
    parts = [g.call(operator.getitem, meta(4), scaled, i) for i in range(20)]
    moved = g.call(aten._foreach_addcdiv.Scalar, wanted, tensors, parts, grads, -0.5)
    quick, plain = g.decomposed(*[g.call(operator.getitem, meta(4), moved, i) for i in range(20)])
    assert described(quick) == described(plain)


def test_pooling_positions_go_their_own_way() -> None:
    g = Aten()
    x = g.placeholder("x", meta(1, 2, 8, 8))
    results = []
    for kernel in ([2, 2], [2, 2]):
        value = (meta(1, 2, 4, 4), meta(1, 2, 4, 4, dtype=torch.int64))
        pooled = g.call(aten.max_pool2d_with_indices.default, value, x, kernel, kernel)
        positions = g.call(operator.getitem, value[1], pooled, 1)
        upper = g.call(operator.getitem, value[0], pooled, 0)
        args = (upper, x, kernel, kernel, [0, 0], [1, 1], False, positions)
        results.append(g.call(aten.max_pool2d_with_indices_backward.default, meta(1, 2, 8, 8), *args))
    quick, plain = g.decomposed(*results)
    assert described(quick) == described(plain)


def test_nothing_is_remembered_beside_tracked_sizes() -> None:
    g = Aten()
    size = SizeSpace([Symbol("s0", 6, 6, 2)]).symbol("s0")
    g.placeholder("x", meta(size, 3))
    assert not RuleMemo(g.graph).is_on


def names_of(graph: fx.Graph) -> list[str]:
    x = graph.placeholder("x")
    for target in (ops.add, ops.add, ops.sum, ops.sum, ops.log1p, ops.log1p, ops.add):
        x = graph.call_function(target, (x,))
    for name in ("add", "add_2", "add_7", "x_1", "in0", "in0", "_3", "log1p_1", "conv_02"):
        x = graph.create_node("call_function", ops.mul, (x,), {}, name=name)
    graph.call_function(ops.add, (x,))
    graph.create_node("call_function", ops.neg, (x,), {}, name="neg_4")
    for _ in range(3):
        graph.call_function(ops.neg, (x,))
    return [node.name for node in graph.nodes]


def test_quick_graphs_give_the_names_that_torch_gives() -> None:
    assert names_of(PlanGraph()) == names_of(fx.Graph())


def test_quick_graphs_are_graphs() -> None:
    graph = PlanGraph()
    x = graph.placeholder("x")
    y = graph.call_function(ops.add, (x, x))
    z = graph.call_function(ops.neg, (y,))
    graph.output((z,))
    graph.lint()
    assert graph.find_nodes(op="call_function", target=ops.neg) == [z]
    assert list(x.users) == [y] and len(graph.nodes) == 4
    copy = PlanGraph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        env[node] = copy.node_copy(node, env.__getitem__)
    copy.lint()
    assert str(copy) == str(graph)
    graph.erase_node(graph.output_node())
    graph.erase_node(z)
    assert not list(y.users)

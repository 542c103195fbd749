"""Joint graphs as graphs: what the split saves, that it is closed, and that both halves compute what the whole does."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torchlazy.autograd.joint import JointGraph, split_graphs, split_joint
from torchlazy.prims.meta import meta_of

aten = torch.ops.aten


class Maker:
    """ATen graphs by hand, with metadata from running each call on small tensors."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.values: dict[fx.Node, torch.Tensor] = {}
        self.stage = "forward"

    def input(self, name: str, *shape: int) -> fx.Node:
        """A tensor input."""
        return self._placed(self.graph.placeholder(name), torch.randn(shape))

    def __call__(self, op: torch._ops.OpOverload, *args: object) -> fx.Node:
        node = self.graph.call_function(op, args)
        node.meta["stage"] = self.stage
        node.meta["frame"] = ""
        return self._placed(node, op(*fx.map_arg(args, self.values.__getitem__)))

    def _placed(self, node: fx.Node, value: torch.Tensor) -> fx.Node:
        self.values[node] = value
        node.meta["val"] = meta_of(value)
        return node


def mlp() -> tuple[Maker, JointGraph]:
    """y = tanh(exp(x @ w) + b) and the gradients of x, w and b."""
    m = Maker()
    x, w, b, tangent = m.input("x", 4, 3), m.input("w", 3, 5), m.input("b", 4, 5), m.input("tangent", 4, 5)
    product = m(aten.mm.default, x, w)
    e = m(aten.exp.default, product)
    y = m(aten.tanh.default, m(aten.add.Tensor, e, b))
    m.stage = "backward"
    before = m(aten.tanh_backward.default, tangent, y)
    inner = m(aten.mul.Tensor, before, e)
    gw = m(aten.mm.default, m(aten.t.default, x), inner)
    gx = m(aten.mm.default, inner, m(aten.t.default, w))
    m.graph.output((y, gx, gw, before))
    return m, JointGraph(m.graph, 1, (tangent,))


def run(graph: fx.Graph, values: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(fx.Interpreter(fx.GraphModule({}, graph)).run(*values))


@pytest.mark.parametrize("budget", [None, 1.0, 0.5, 0.0])
def test_both_halves_compute_what_the_whole_does(budget: float | None) -> None:
    m, joint = mlp()
    split = split_joint(joint, budget)
    forward, backward = split_graphs(joint, split)
    by_name = {node.name: value for node, value in m.values.items()}
    results = run(forward, [by_name[n.name] for n in forward.nodes if n.op == "placeholder"])
    saved = iter(results[joint.results :])
    inputs = [
        next(saved) if n.name.startswith("saved") else by_name[n.name] for n in backward.nodes if n.op == "placeholder"
    ]
    for have, node in zip([*results[: joint.results], *run(backward, inputs)], joint.outputs, strict=True):
        torch.testing.assert_close(have, m.values[node])


def test_what_is_free_is_computed_again_and_told_why() -> None:
    _, joint = mlp()
    split = split_joint(joint)
    names = {node.name for node in split.saved}
    assert names == {"exp_default", "tanh_default"}, "not the product, nor the sum, which nothing reads again"
    assert set(split.reasons) == set(split.saved) and all(split.reasons.values())
    assert {"x", "w", "tangent"} <= {node.name for node in split.given}
    assert "b" not in {node.name for node in split.given}, "eager does not hold b, so it may change"


def test_an_overwritten_input_is_not_counted_on() -> None:
    m, joint = mlp()
    x = next(node for node in m.graph.nodes if node.name == "x")
    split = split_joint(JointGraph(joint.graph, joint.results, joint.tangents, (x,)))
    assert x in split.saved and x not in split.given


def test_a_call_that_must_not_be_repeated_is_saved() -> None:
    m = Maker()
    x, tangent = m.input("x", 4, 4), m.input("tangent", 4, 4)
    values = m(aten.cumsum.default, m(aten.sin.default, x), 0)
    y = m(aten.mul.Tensor, values, x)
    m.stage = "backward"
    m.graph.output((y, m(aten.mul.Tensor, tangent, values)))
    split = split_joint(JointGraph(m.graph, 1, (tangent,)), 0.0)
    assert values in split.saved and values not in split.repeated

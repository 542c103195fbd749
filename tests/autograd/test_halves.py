"""A planned step taken apart: run one after the other, its halves give what it gives, and hold what the plan holds."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torchlazy.autograd.halves import Halves, split_step
from torchlazy.autograd.recompute import recompute
from torchlazy.autograd.step import STAGE
from torchlazy.prims import eager, ops
from torchlazy.prims.errors import GraphError
from torchlazy.prims.passes.graph_passes import MEMORY_DTYPE

from tests.autograd import steps
from tests.autograd.small_graphs import Maker

pytestmark = pytest.mark.usefixtures("device_in_python")  # where traces are caught

RECORDED = {"mlp": steps.mlp_once, "blocks": steps.normed_blocks_once, "gpt": steps.gpt_once}


def names(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.nodes if node.op == "placeholder"]


def run_both(halves: Halves, results: int, inputs: dict[str, object]) -> list[torch.Tensor]:
    """Results of both halves, each given what it names."""
    first = eager.run(halves.first, [inputs[name] for name in names(halves.first)])
    held = {f"held{i}": value for i, value in enumerate(first[results:])}
    shown = {f"result{i}": value for i, value in enumerate(first[:results])}
    everything = {**inputs, **held, **shown}
    return [*first[:results], *eager.run(halves.second, [everything[name] for name in names(halves.second)])]


@pytest.mark.parametrize("budget", [None, 0.0])
@pytest.mark.parametrize("name", RECORDED)
def test_the_halves_give_every_bit_of_the_whole(name: str, budget: float | None):
    recorded = RECORDED[name]()
    marked = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in recorded.graph.nodes:
        if node.op != "output":
            env[node] = marked.node_copy(node, env.__getitem__)
            if node.op == "call_function":
                env[node].meta[STAGE] = recorded.stages(node)
    outputs = recorded.graph.output_node().args[0]
    early = [n for n in outputs if n.op == "placeholder" or env[n].meta[STAGE] == "forward"]
    late = [n for n in outputs if n not in early]
    assert late
    marked.output(tuple(env[n] for n in (*early, *late)))
    graph, plan = recompute(marked, budget)
    assert plan is not None
    given = dict(zip(names(graph), recorded.inputs, strict=True))
    halves = split_step(graph, inputs=names(graph), results=len(early))
    wanted = eager.run(graph, recorded.inputs)
    found = run_both(halves, len(early), given)
    assert len(found) == len(wanted)
    assert all(torch.equal(w, f) for w, f in zip(wanted, found, strict=True))
    assert {node.name for node in halves.crossing} == {node.name for node in plan.saved}


def test_views_and_constants_do_not_cross():
    g = Maker("cpu")
    x = g.input(4, 6)
    y = g(ops.exp, x)
    turned = g(ops.permute, y, dims=(1, 0))
    zeros = g(ops.full, shape=(6, 4), value=0.5, dtype=torch.float32, device="cpu")
    loss = g(ops.sum, y, axes=(0, 1))
    g.backward()
    result = g(ops.add, turned, zeros)
    halves = split_step(g.output(loss, result), inputs=["in0"], results=1)
    assert [node.name for node in halves.crossing] == [y.name]
    assert names(halves.second) == ["held0"]
    value = torch.randn(4, 6)
    found = run_both(halves, 1, {"in0": value})
    assert torch.equal(found[1], value.exp().t() + 0.5)


def test_a_value_stored_as_a_half_crosses_once_as_that_half():
    g = Maker("cpu")
    x = g.input(8)
    whole = g(ops.exp, x)
    whole.meta[MEMORY_DTYPE] = torch.bfloat16
    half = g(ops.convert, whole, dtype=torch.bfloat16)
    first = g(ops.neg, half)
    g.backward()
    again = g(ops.convert, half, dtype=torch.float32)
    result = g(ops.mul, whole, again)
    halves = split_step(g.output(first, result), inputs=["in0"], results=1)
    assert len(halves.crossing) == 1
    held = next(node for node in halves.second.nodes if node.op == "placeholder")
    assert held.meta["val"].dtype == torch.bfloat16
    value = torch.randn(8)
    rounded = value.exp().bfloat16().float()
    assert torch.equal(run_both(halves, 1, {"in0": value})[1], rounded * rounded)


def test_an_overwritten_input_crosses_as_a_copy_and_a_written_one_is_always_there():
    g = Maker("cpu")
    x, state, target = g.input(4), g.input(4), g.input(4)
    new = g(ops.add, x, state)
    g.backward()
    result = g(ops.mul, state, state)
    graph = g.output(new, result)
    halves = split_step(graph, inputs=["in0", "in1"], results=1, lost={"in1"}, written={"in2"})
    assert [node.name for node in halves.crossing] == ["in1"]
    assert names(halves.second) == ["held0", "in2"]
    assert target.name == "in2"


def test_a_result_that_the_second_half_reads_is_not_held_beside():
    g = Maker("cpu")
    x = g.input(4)
    y = g(ops.exp, x)
    g.backward()
    halves = split_step(g.output(y, g(ops.neg, y)), inputs=["in0"], results=1)
    assert halves.crossing == () and names(halves.second) == ["result0"]


def test_a_first_result_that_depends_on_the_second_half_is_refused():
    g = Maker("cpu")
    x = g.input(4)
    g.backward()
    late = g(ops.exp, x)
    with pytest.raises(GraphError, match="depends on what comes after"):
        split_step(g.output(late), inputs=["in0"], results=1)

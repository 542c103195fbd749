"""Carrying out a plan changes no bit of a training step, and less is held between forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx
from torchlazy.autograd.liveness import fused_values, live_bytes
from torchlazy.autograd.partition import plan_recompute
from torchlazy.autograd.rematerialise import COPY_OF, rematerialise
from torchlazy.autograd.step import BACKWARD, analyse, split_point
from torchlazy.prims import eager, ops
from torchlazy.prims.ops import Kind

from tests.autograd import steps
from tests.autograd.small_graphs import Maker
from tests.autograd.steps import RecordedStep

pytestmark = pytest.mark.usefixtures("device_in_python")  # where traces are caught

RECORDED = {
    "mlp": steps.mlp_once,
    "blocks": steps.normed_blocks_once,
    "gpt": steps.gpt_once,
}


def copies(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if COPY_OF in node.meta]


@pytest.mark.parametrize("budget", [1.0, None, 0.6, 0.0])
@pytest.mark.parametrize("name", RECORDED)
def test_every_result_keeps_its_bits(name: str, budget: float | None):
    recorded: RecordedStep = RECORDED[name]()
    plan = plan_recompute(recorded.graph, stages=recorded.stages, budget=budget)
    graph = rematerialise(recorded.graph, plan, stages=recorded.stages)
    wanted, found = eager.run(recorded.graph, recorded.inputs), eager.run(graph, recorded.inputs)
    assert len(wanted) == len(found) > 2
    for w, f in zip(wanted, found, strict=True):
        assert torch.equal(w, f)
        assert w.stride() == f.stride()


@pytest.mark.parametrize("budget", [None, 0.0])
@pytest.mark.parametrize("name", RECORDED)
def test_backward_reads_only_what_the_plan_holds(name: str, budget: float | None):
    recorded: RecordedStep = RECORDED[name]()
    plan = plan_recompute(recorded.graph, stages=recorded.stages, budget=budget)
    graph = rematerialise(recorded.graph, plan, stages=recorded.stages)
    made = copies(graph)
    assert sorted(node.meta[COPY_OF] for node in made) == sorted(node.name for node in plan.recomputed)
    after = analyse(graph, split_point(graph))
    held = {node.name for node in plan.saved}
    crossing = {node for node in after.crossing if not after.is_available(node)}
    assert {_base(node).name for node in crossing} == held
    assert all(split_point(graph)(node) == BACKWARD for node in made)


def _base(node: fx.Node) -> fx.Node:
    while node.target in (ops.reshape, ops.permute, ops.expand, ops.slice):
        node = node.args[0]  # type: ignore[assignment]
    return node


def test_copies_stand_right_before_their_first_reader_and_are_shared():
    recorded = steps.gpt_once()
    plan = plan_recompute(recorded.graph, stages=recorded.stages, budget=0.0)
    graph = rematerialise(recorded.graph, plan, stages=recorded.stages)
    made = dict.fromkeys(copies(graph))
    order = list(graph.nodes)
    for position, node in enumerate(order[:-1]):
        if node in made:
            following = next(other for other in order[position + 1 :] if other not in made)
            reached, stack = set(), [following]
            while stack:
                for operand in stack.pop().all_input_nodes:
                    if operand in made and operand not in reached:
                        reached.add(operand)
                        stack.append(operand)
            assert node in reached, f"{node} is made before it is needed"


def test_dropout_is_computed_again_from_its_seed():
    recorded = steps.gpt_once()
    plan = plan_recompute(recorded.graph, stages=recorded.stages, budget=0.0)
    again = [node for node in plan.recomputed if isinstance(node.target, ops.Prim) and node.target.is_kind(Kind.RANDOM)]
    assert again, "at the smallest budget masks are drawn again"


def test_a_graph_without_anything_to_compute_again_stays_as_it_is():
    g = Maker()
    y = g.mm(g.input(4, 4), g.input(4, 4))
    g.backward()
    graph = g.output(g(ops.neg, y))
    plan = plan_recompute(graph, stages=split_point(graph))
    assert str(rematerialise(graph, plan, stages=split_point(graph))) == str(graph)


Measured = Callable[[], RecordedStep]


@pytest.mark.parametrize(("make", "most"), [(steps.gpt_once, 0.9), (steps.gpt_on_cuda_once, 0.85)])
def test_peaks_fall_with_the_budget(make: Measured, most: float):
    recorded = make()
    before = live_bytes(recorded.graph).peak_bytes
    peaks = []
    for budget in (None, 0.6):
        plan = plan_recompute(recorded.graph, stages=recorded.stages, budget=budget)
        graph = rematerialise(recorded.graph, plan, stages=recorded.stages)
        peaks.append(live_bytes(graph).peak_bytes)
        assert live_bytes(graph, fused_values(graph)).peak_bytes <= live_bytes(graph).peak_bytes
    assert peaks[0] <= most * before
    assert peaks[1] < peaks[0]

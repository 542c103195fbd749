"""What crosses from forward to backward: small graphs with known answers, random ones against all choices, a GPT."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest
import torch
from torch import fx
from torchlazy.autograd.budget import format_table, pareto_table
from torchlazy.autograd.cost import Recompute, bytes_of, is_alias, recompute_kind
from torchlazy.autograd.partition import cut_values, plan_recompute
from torchlazy.autograd.plan import RecomputePlan, library_reader, plan_keeping
from torchlazy.autograd.step import BACKWARD, FORWARD, TrainingStep, analyse, split_point
from torchlazy.prims import ops
from torchlazy.prims.errors import GraphError

from tests.autograd import steps
from tests.autograd.small_graphs import Maker, aten

pytestmark = pytest.mark.usefixtures("device_in_python")  # where traces are caught

F32 = torch.float32


def plan_of(graph: fx.Graph, budget: float | int | None = None) -> RecomputePlan:
    return plan_recompute(graph, stages=split_point(graph), budget=budget)


def names(nodes: tuple[fx.Node, ...]) -> list[str]:
    return [node.name for node in nodes]


# --- small graphs ---


def test_a_chain_of_pointwise_operations_is_held_where_it_is_smallest():
    g = Maker()
    x, w = g.input(64, 64), g.input(64, 64)
    product = g.mm(x, w)
    half = g(ops.convert, product, dtype=torch.bfloat16)
    wide = g(ops.mul, g(ops.convert, half, dtype=F32), g(ops.convert, half, dtype=F32))
    g.backward()
    graph = g.output(g(ops.add, wide, product))
    assert names(plan_of(graph).saved) == [product.name], (
        "backward reads the product itself, so the rest follows from it"
    )

    g = Maker()
    product = g.mm(g.input(64, 64), g.input(64, 64))
    half = g(ops.convert, product, dtype=torch.bfloat16)
    wide = g(ops.convert, half, dtype=F32)
    g.backward()
    plan = plan_of(g.output(g(ops.neg, wide)))
    assert names(plan.saved) == [half.name]
    assert names(plan.recomputed) == [wide.name]
    assert plan.saved_bytes == 64 * 64 * 2
    assert plan.added_cost == 0


def test_what_a_library_call_reads_in_the_backward_is_held():
    g = Maker()
    x, w = g.input(64, 64), g.input(64, 64)
    y = g(ops.exp, g.mm(x, w))
    z = g.mm(y, w)
    g.backward()
    gradient = g.mm(y, z)
    plan = plan_of(g.output(gradient))
    assert names(plan.saved) == [y.name, z.name]
    assert gradient.name in plan.reasons[y]


def test_inputs_outputs_and_constants_are_free_to_read():
    g = Maker()
    x = g.input(64, 64)
    ones = g(ops.full, shape=(64, 64), value=1.0, dtype=F32, device="cuda:0")
    loss = g(ops.add, x, ones)
    shown = g.mm(x, x)
    g.backward()
    graph = g.output(shown, g(ops.mul, g(ops.mul, loss, ones), shown))
    plan = plan_of(graph)
    assert (plan.saved, plan.saved_bytes) == ((), 0)
    assert names(plan.recomputed) == [loss.name]


def test_random_bits_are_held_as_their_mask_and_random_library_calls_as_their_result():
    g = Maker("cpu")
    x, seed = g.input(64, 64), g.scalar()
    bits = g(ops.random_bits, shape=(64, 64), seed=seed, stream=0, device="cpu")
    zero = g(ops.full, shape=(64, 64), value=0, dtype=torch.int32, device="cpu")
    mask = g(ops.gt, bits, zero)
    scale = g(ops.convert, mask, dtype=F32)
    drawn = g.extern(aten.rand_like.default, x)
    g.backward()
    graph = g.output(g(ops.mul, g(ops.mul, x, scale), drawn))
    plan = plan_of(graph)
    assert names(plan.saved) == [mask.name, drawn.name]
    least = plan_of(graph, 0.0)
    assert names(least.saved) == [drawn.name], "bits can be bought, a draw from the generator cannot"
    assert least.added_cost > 0


def test_long_recipes_are_cut():
    g = Maker()
    value = source = g.mm(g.input(64, 64), g.input(64, 64))
    chain = []
    for _ in range(12):
        value = g(ops.exp, value)
        chain.append(value)
    g.backward()
    plan = plan_of(g.output(g(ops.add, value, source)))
    assert source in plan.saved
    assert len(plan.saved) == 2
    assert plan.saved[1] in chain
    assert "takes the time of" in plan.reasons[plan.saved[1]]


def test_a_value_that_many_tensors_are_summed_into_is_held_instead_of_them():
    g = Maker()
    w = g.input(64, 64)
    total = g.mm(w, w)
    for _ in range(6):
        total = g(ops.add, total, g.mm(w, w))
    g.backward()
    assert names(plan_of(g.output(g(ops.neg, total))).saved) == [total.name]


def test_views_are_held_as_their_base():
    g = Maker()
    base = g.mm(g.input(64, 64), g.input(64, 64))
    turned = g(ops.permute, g(ops.reshape, base, shape=(8, 8, 64)), dims=(2, 0, 1))
    g.backward()
    plan = plan_of(g.output(g(ops.neg, turned)))
    assert (names(plan.saved), plan.recomputed) == ([base.name], ())


def test_forward_that_reads_what_an_earlier_backward_made():
    g = Maker()
    weight = g.input(64, 64)
    first = g.mm(weight, weight)
    g.backward()
    stepped = g(ops.sub, weight, g.mm(first, weight))
    g.stage = FORWARD
    second = g(ops.exp, g(ops.mul, stepped, stepped))
    g.backward()
    plan = plan_of(g.output(g(ops.neg, second)))
    assert names(plan.saved) == [first.name, stepped.name] or names(plan.saved) == [first.name, second.name]


# --- stages ---


def test_the_loss_alone_tells_the_stages():
    recorded = steps.normed_blocks_once()
    forward = [node for node in recorded.graph.nodes if node.op == "call_function" and recorded.stages(node) == FORWARD]
    by_loss = split_point(recorded.graph, forward[-1])
    assert by_loss(forward[-1]) == FORWARD
    assert all(recorded.stages(node) == FORWARD for node in forward if by_loss(node) == FORWARD)
    plan = plan_recompute(recorded.graph, stages=by_loss)
    assert plan.saved_bytes == plan_recompute(recorded.graph, stages=recorded.stages).saved_bytes


def test_a_part_of_a_result_goes_with_the_whole():
    g = Maker("cpu")
    q = g.input(2, 3, 8, 4)
    call = g.extern(aten._scaled_dot_product_flash_attention_for_cpu.default, q, q, q)
    result, row_sums = (g.part(call, position) for position in (0, 1))
    loss = g(ops.neg, result)
    graph = g.output(loss, g(ops.exp, row_sums))
    step = analyse(graph, split_point(graph, loss))
    assert step.sides[row_sums] == FORWARD
    assert list(step.crossing) == [row_sums]


def test_marks_of_one_side_are_enough_and_none_are_an_error():
    g = Maker()
    a = g(ops.exp, g.input(4))
    b = g(ops.exp, a)
    graph = g.output(b)
    del a.meta["stage"], b.meta["stage"]
    with pytest.raises(GraphError, match="pass the loss"):
        split_point(graph)
    a.meta["stage"] = FORWARD
    assert split_point(graph)(b) == BACKWARD
    del a.meta["stage"]
    b.meta["stage"] = BACKWARD
    assert split_point(graph)(a) == FORWARD


@pytest.mark.parametrize("budget", [True, -1, 1.5, float("nan"), -0.1])
def test_budgets_that_are_none_are_told(budget):
    with pytest.raises(ValueError, match="memory budget"):
        plan_of(_random_graph(random.Random(0)), budget)


# --- against all choices ---


def _random_graph(rng: random.Random) -> fx.Graph:
    """Products, pointwise operations and conversions, some of which backward reads."""
    g = Maker()
    values = [g.input(16, 16), g.input(16, 16)]
    for _ in range(rng.randrange(3, 10)):
        x, y = rng.choice(values), rng.choice(values)
        match rng.randrange(6):
            case 0:
                value = g.mm(x, y)
            case 1:
                value = g(ops.add, x, y)
            case 2:
                value = g(ops.convert, g(ops.convert, x, dtype=torch.bfloat16), dtype=F32)
            case 3:
                value = g(ops.permute, x, dims=(1, 0))
            case 4:
                value = g(ops.where, g(ops.gt, x, y), x, y)
            case _:
                value = g(ops.neg, x)
        values.append(value)
    g.backward()
    results = [g(ops.neg, rng.choice(values)) for _ in range(rng.randrange(1, 4))]
    if rng.random() < 0.5:
        results.append(g.mm(rng.choice(values), results[0]))
    return g.output(*results)


def _is_free(step: TrainingStep, plan: RecomputePlan) -> bool:
    """Whether nothing is computed again that the cut must not ask for."""
    return not any(
        recompute_kind(node) in (Recompute.PRODUCT, Recompute.PASS, Recompute.NEVER)
        or node in step.too_long
        or (library_reader(step, node) is not None and not is_alias(node))
        for node in plan.recomputed
    )


@pytest.mark.parametrize("seed", range(40))
def test_the_cut_holds_the_least_bytes_of_all_free_plans(seed):
    graph = _random_graph(random.Random(seed))
    step = analyse(graph, split_point(graph))
    candidates = [
        node
        for node, side in step.sides.items()
        if side == FORWARD and not is_alias(node) and not step.is_available(node)
    ]
    free = []
    for count in range(len(candidates) + 1):
        for kept in combinations(candidates, count):
            plan = plan_keeping(step, kept)
            if _is_free(step, plan):
                free.append(plan.saved_bytes)
        if len(candidates) > 10 and count == 4:
            break
    chosen = plan_keeping(step, cut_values(step))
    assert _is_free(step, chosen)
    assert chosen.saved_bytes == sum(map(bytes_of, chosen.saved)) <= min(free)


# --- a whole step ---


def test_the_free_plan_of_a_gpt_is_smaller_than_eagers_and_costs_nothing():
    recorded = steps.gpt_on_cuda_once()
    eager, free = plan_of(recorded.graph, 1.0), plan_of(recorded.graph)
    assert free.added_cost == eager.added_cost == 0
    assert free.saved_bytes < 0.93 * eager.saved_bytes
    assert all(recompute_kind(node) not in (Recompute.PRODUCT, Recompute.PASS) for node in free.recomputed)
    assert set(free.reasons) == {*free.saved, *free.recomputed}
    assert all(free.reasons.values())


def test_less_memory_costs_more_and_budgets_are_kept():
    recorded = steps.gpt_on_cuda_once()
    eager = plan_of(recorded.graph, 1.0)
    shares = (0.95, 0.75, 0.6, 0.5, 0.0)
    plans = [plan_of(recorded.graph, share) for share in shares]
    least = plans[-1].held_bytes
    for plan, share in zip(plans, shares, strict=True):
        assert plan.held_bytes <= least + (share + 0.01) * (eager.held_bytes - least)
    assert least < 0.6 * eager.held_bytes
    assert [plan.held_bytes for plan in plans] == sorted((plan.held_bytes for plan in plans), reverse=True)
    assert [plan.added_cost for plan in plans] == sorted(plan.added_cost for plan in plans)
    in_bytes = plan_of(recorded.graph, int(0.6 * eager.saved_bytes))
    assert least < in_bytes.held_bytes <= 0.6 * eager.saved_bytes
    assert plan_of(recorded.graph, 10 * eager.saved_bytes).saved == eager.saved


def test_the_table_of_offers_is_undominated_and_equal_every_time():
    recorded = steps.gpt_on_cuda_once()
    step = analyse(recorded.graph, recorded.stages)
    free = plan_recompute(recorded.graph, stages=recorded.stages)
    rows = pareto_table(step, free)
    assert len(rows) > 3
    assert all(a.held_bytes > b.held_bytes and a.added_cost < b.added_cost for a, b in pairwise(rows))
    assert rows == pareto_table(step, free)
    assert format_table(rows).count("\n") == len(rows)

"""CUDA graphs without a GPU: a device that keeps what is launched while it captures, and runs it at a replay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchlazy.prims.meta import TensorMeta
from torchlazy.runtime.cuda.graph import GraphedProgram
from torchlazy.runtime.program.stages import Border, Stage

from tests.lazy.cpu_graphs import GraphDevice


class Momentum:
    """m = m * beta + x, in place; returns (m, m.sum())."""

    def __init__(self, device: GraphDevice) -> None:
        metas = [TensorMeta((4,), torch.float32, (1,), "cuda:0")] * 2
        beta = TensorMeta((), torch.float32, (), "cuda:0")
        self.device = 0
        self.runs = 0
        self.prepared = 0
        self.stages, self.border = (), None
        self.on = device
        self.program = SimpleNamespace(
            inputs=(("m", metas[0]), ("x", metas[1]), ("beta", beta)), scalars=(), donations=((0, 0),), steps=()
        )

    def run(self, inputs: list[torch.Tensor], scalars: Any) -> list[torch.Tensor]:
        m, x, beta = inputs
        inputs.clear()
        total = torch.full((), torch.nan)

        def kernel() -> None:
            self.runs += 1
            m.mul_(beta).add_(x)
            total.copy_(m.sum())

        self.on.launch(kernel)
        return [m, total]

    def prepare_capture(self) -> None:
        self.prepared += 1

    def fill_tables(self) -> None:
        assert self.prepared


def _graph(refusals: int) -> tuple[GraphedProgram, Momentum, torch.Tensor]:
    return _graph_on(GraphDevice(refusals))


def _graph_on(device: GraphDevice) -> tuple[GraphedProgram, Momentum, torch.Tensor]:
    program = Momentum(device)
    m = torch.arange(4.0)
    graph = GraphedProgram(program, [m, torch.empty(4)], [True, False], 1, device)  # type: ignore[arg-type]
    return graph, program, m


@pytest.mark.parametrize("refusals", [0, 1])
def test_a_capture_leaves_the_state_to_the_run(refusals: int) -> None:
    graph, program, m = _graph(refusals)
    want = torch.arange(4.0)
    for number, x in enumerate((torch.ones(4), torch.full((4,), 2.0), torch.zeros(4))):
        beta = 0.5 + number
        found, total = (graph.run if number else graph.capture)([m, x], [beta])
        want = want * beta + x
        assert found is m and torch.equal(m, want) and torch.equal(total, want.sum())
    assert program.runs == 3 + refusals  # nothing is run before a capture, but where one was refused
    assert program.on.beside == refusals


def test_results_stay_as_they_are_when_the_graph_runs_again() -> None:
    graph, _, m = _graph(0)
    _, first = graph.capture([m, torch.ones(4)], [1.0])
    before = first.clone()
    graph.run([m, torch.ones(4)], [1.0])
    assert torch.equal(first, before)


def test_a_program_that_is_refused_leaves_the_state() -> None:
    graph, _, m = _graph(2)
    with pytest.raises(RuntimeError, match="not permitted"):
        graph.capture([m, torch.ones(4)], [0.5])
    assert torch.equal(m, torch.arange(4.0))


def test_memory_that_moved_is_told() -> None:
    graph, _, m = _graph(0)
    graph.capture([m, torch.ones(4)], [0.5])
    assert graph.moved([m, torch.zeros(4)]) == []
    assert graph.moved([m.clone(), torch.ones(4)]) == [0]


def test_memory_that_moves_and_is_overwritten_is_copied_there_and_back() -> None:
    device = GraphDevice()
    graph = GraphedProgram(Momentum(device), [torch.zeros(4), torch.ones(4)], [False, True], 1, device)  # type: ignore[arg-type]
    x = graph._inputs[1]
    for number in range(3):
        m = torch.arange(4.0) + number
        want = m * 2.0 + x
        found, total = (graph.run if number else graph.capture)([m, x], [2.0])
        assert found is m and torch.equal(m, want) and torch.equal(total, want.sum())


class InStages:
    """y = x * beta, then m = m * gamma + y, in place; returns (m, y)."""

    def __init__(self, device: GraphDevice) -> None:
        metas = [TensorMeta((4,), torch.float32, (1,), "cuda:0")] * 2 + [
            TensorMeta((), torch.float32, (), "cuda:0")
        ] * 2
        self.device, self.on, self.border = 0, device, Border()
        self.stages = Stage(1, (1, 3), 0), Stage(2, (0, 2), 0)
        names = ("m", "x", "gamma", "beta")
        self.program = SimpleNamespace(
            inputs=tuple(zip(names, metas, strict=True)), scalars=(), donations=((0, 0),), steps=()
        )

    def run(self, inputs: list[torch.Tensor], scalars: Any) -> list[torch.Tensor]:
        m, x, gamma, beta = inputs
        y = torch.full((4,), torch.nan)
        self.on.made.append(y)
        self.on.launch(lambda: torch.mul(x, beta, out=y))
        self.border()
        self.on.launch(lambda: m.mul_(gamma).add_(y))
        return [m, y]

    def prepare_capture(self) -> None:
        pass

    fill_tables = prepare_capture


def test_a_stage_runs_before_the_other_inputs_are_known() -> None:
    device = GraphDevice()
    m, x = torch.arange(4.0), torch.ones(4)
    graph = GraphedProgram(InStages(device), [m, x], [True, False], 2, device)  # type: ignore[arg-type]
    other, _, k = _graph_on(device)
    other.capture([k, torch.ones(4)], [0.5])
    graph.capture([m, x], [0.5, 3.0])
    assert [(reads.inputs, reads.scalars) for reads in graph.reads] == [((1,), (1,)), ((0,), (0,))]
    for turn in range(4):
        x, want = torch.full((4,), turn + 1.0), m * 0.5 + (turn + 1.0) * 2
        assert graph.launch(0, {1: x}, {1: 2.0})
        if turn == 2:  # another graph runs in the same memory
            other.run([k, torch.ones(4)], [0.5])
            assert not graph.holds_launched()
        found, y = graph.run([m, x], [0.5, 2.0], 1 if graph.holds_launched() else 0)
        assert found is m and torch.equal(m, want) and torch.equal(y, x * 2)


def test_a_later_stage_is_refused_where_another_graph_ran() -> None:
    device = GraphDevice()
    m, x = torch.arange(4.0), torch.ones(4)
    graph = GraphedProgram(InStages(device), [m, x], [True, False], 2, device)  # type: ignore[arg-type]
    graph.capture([m, x], [0.5, 3.0])
    other, _, k = _graph_on(device)
    other.capture([k, torch.ones(4)], [0.5])
    assert graph.launch(0, {1: x}, {1: 2.0})
    other.run([k, torch.ones(4)], [0.5])
    assert not graph.launch(1, {0: m}, {0: 0.5})
    assert not graph.holds_launched()

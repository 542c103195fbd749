"""CUDA graphs without a GPU: a device that keeps what is launched while it captures, and runs it at a replay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchlazy.prims.meta import TensorMeta
from torchlazy.runtime.cuda.graph import GraphedProgram

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
    device = GraphDevice(refusals)
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


def test_memory_that_moved_is_refused() -> None:
    graph, _, m = _graph(0)
    graph.capture([m, torch.ones(4)], [0.5])
    with pytest.raises(ValueError, match="has moved"):
        graph.run([m.clone(), torch.ones(4)], [0.5])
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

"""Which CUDA graph runs a native trace's program: with stand-ins for the graphs, which need no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchlazy
from torchlazy.lazy.native import graphs
from torchlazy.lazy.native.graphs import MAX_CAPTURES, MAX_GRAPHS, RunsInPython


class Graph:
    """As `GraphedProgram`: it notes where its inputs lie."""

    made: list[Graph] = []  # noqa: RUF012

    def __init__(self, run: Any, inputs: list[torch.Tensor], stays: list[bool], scalars: int) -> None:
        self.stays, self.places = stays, [one.data_ptr() for one in inputs]
        self.replays = 0
        self.made.append(self)

    def moved(self, inputs: list[torch.Tensor]) -> list[int]:
        pairs = enumerate(zip(inputs, self.places, self.stays, strict=True))
        return [number for number, (one, place, stays) in pairs if stays and one.data_ptr() != place]

    def capture(self, inputs: list[torch.Tensor], scalars: list[Any]) -> list[torch.Tensor]:
        return [torch.stack(inputs).sum(0)]

    def run(self, inputs: list[torch.Tensor], scalars: list[Any]) -> list[torch.Tensor]:
        assert not self.moved(inputs)
        self.replays += 1
        return [torch.stack(inputs).sum(0)]


class Driver:
    """As the driver: a program that adds its inputs."""

    def run_compiled(self, compiled: Any, trace: Any, memory: list[torch.Tensor], scalars: list[Any]) -> list[Any]:
        return [torch.stack(memory).sum(0)]

    def program_for_replay(self, trace: Any, frame: str, form: str) -> tuple[Any, str]:
        return self, ""

    run = None


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> RunsInPython:
    monkeypatch.setattr(graphs, "GraphedProgram", Graph)
    monkeypatch.setattr(graphs, "compute_device", lambda trace: "cuda:0")
    Graph.made.clear()
    return RunsInPython(Driver(), object(), object(), "")  # type: ignore[arg-type]


def inputs(count: int) -> list[torch.Tensor]:
    return [torch.rand(3) for _ in range(count)]


def played(program: RunsInPython, memory: list[torch.Tensor], turns: int) -> None:
    for _ in range(turns):
        torch.testing.assert_close(program(list(memory), []), [torch.stack(memory).sum(0)])


def test_models_that_are_alike_have_graphs_of_their_own(program: RunsInPython) -> None:
    student, teacher = inputs(12), inputs(12)
    for _ in range(3):
        played(program, student, 6)
        played(program, teacher, 6)
    assert [all(graph.stays) for graph in Graph.made] == [True, True]
    assert [graph.replays for graph in Graph.made] == [3 + 6 + 6] * 2
    assert not any("CUDA graph" in reason for reason in torchlazy.metrics()["fallbacks"])


def test_a_batch_that_moves_is_copied_and_a_parameter_that_moves_is_captured_again(program: RunsInPython) -> None:
    model = inputs(4)
    for _ in range(8):
        played(program, [*model, torch.rand(3)], 1)
    assert [graph.stays for graph in Graph.made] == [[True] * 4 + [False]]
    model[2] = torch.rand(3)
    played(program, [*model, torch.rand(3)], 4)
    assert [graph.stays for graph in Graph.made][1:] == [[True, True, False, True, False]]
    assert Graph.made[1].replays == 3


def test_what_moves_again_and_again_runs_without_a_graph_and_says_so(program: RunsInPython) -> None:
    model = inputs(2 * MAX_CAPTURES + 3)
    for turn in range(MAX_CAPTURES + 2):
        played(program, model, 5)
        model[turn] = torch.rand(3)
    assert len(Graph.made) == MAX_CAPTURES
    assert any("moved again and again" in reason for reason in torchlazy.metrics()["fallbacks"])


def test_models_in_turns_settle_nowhere_and_many_models_have_few_graphs(program: RunsInPython) -> None:
    student, teacher = inputs(12), inputs(12)
    for _ in range(8):
        played(program, student, 1)
        played(program, teacher, 1)
    assert not Graph.made
    models = [inputs(12) for _ in range(MAX_GRAPHS + 2)]
    for model in models:
        played(program, model, 6)
    assert len(Graph.made) == MAX_GRAPHS


def test_a_few_small_inputs_that_move_are_copied_though_they_are_the_most(program: RunsInPython) -> None:
    parameter, *batches = inputs(17)
    for turn in range(8):
        played(program, [parameter, *batches[2 * turn : 2 * turn + 2]], 1)
    assert [graph.stays for graph in Graph.made] == [[True, False, False]] and Graph.made[0].replays == 5


def test_large_inputs_that_move_once_are_not_copied(program: RunsInPython, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new model gets some of the memory of one that is gone."""
    monkeypatch.setattr(graphs, "_SMALL", 0)
    model = inputs(12)
    played(program, model, 6)
    model = [*model[:7], *inputs(5)]
    played(program, model, 6)
    assert [all(graph.stays) for graph in Graph.made] == [True, True]
    assert Graph.made[1].replays == 5
    model[9] = torch.rand(3)
    played(program, model, 3)
    assert [number for number, stays in enumerate(Graph.made[2].stays) if not stays] == [9]

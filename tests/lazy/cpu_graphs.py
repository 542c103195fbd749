"""CUDA graphs without a GPU: what is launched while a capture goes on is kept, and run at each replay.

`cpu_graphs(monkeypatch)` makes `mode="reduce-overhead"` capture programs for the CPU: their steps are run by the very
programs, everything else (what stays, what is copied, which memory is whose) by the code that a GPU runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchlazy.lazy.compiled.replay import handle as replay_handle
from torchlazy.lazy.joint import graphs as joint_graphs
from torchlazy.runtime.cuda import graph as cuda_graph
from torchlazy.runtime.cuda import graphed_pair
from torchlazy.runtime.program.program import ExternCall
from torchlazy.runtime.program.stages import Border


class GraphDevice:
    """What `GraphMemory` is to a GPU. `refusals`: how many captures are refused."""

    def __init__(self, refusals: int = 0) -> None:
        self.device = torch.device("cpu")
        self.refusals = refusals
        self.tape: list[Callable[[], None]] | None = None
        self.beside = 0
        self.captures = 0
        self.rooms: list[int] = []
        self.made: list[torch.Tensor] = []  # by what is captured
        self.others: list[Pool] = []
        self.pool = Pool(self)

    @property
    def replays(self) -> int:
        """Of all graphs."""
        return self.pool.replays + sum(pool.replays for pool in self.others)

    def of_its_own(self) -> Pool:
        """Memory in which no other graphs work."""
        self.others.append(Pool(self))
        return self.others[-1]

    def launch(self, kernel: Callable[[], None]) -> None:
        """Run it, or keep it for the graph that is captured."""
        if self.tape is None:
            kernel()
        else:
            self.tape.append(kernel)

    def captured(self, function: Callable[[], Any], room: int = 0) -> tuple[Any, Any]:
        return self.pool.captured(function, room)

    def captured_in_stages(self, function: Callable[[], Any], border: Border, room: int = 0) -> tuple[Any, Any]:
        graphs: list[Any] = []

        def go_on() -> None:
            graphs.append(self.tape)
            self.tape = []

        border.then = go_on
        try:
            last, result = self.capture(function, room)
        finally:
            border.then = None
        self.pool.holds([*graphs, last], self.made)
        return [*graphs, last], result

    def capture(self, function: Callable[[], Any], room: int) -> tuple[Any, Any]:
        self.rooms.append(room)
        self.tape, self.made = [], []
        try:
            result = function()
            if self.refusals:
                self.refusals -= 1
                raise RuntimeError("operation not permitted when stream is capturing")
            self.captures += 1
            return self.tape, result
        finally:
            self.tape = None

    def run_beside(self, function: Callable[[], object]) -> None:
        self.beside += 1
        function()

    def wait_for_last(self) -> None:
        pass

    def replay(self, graph: list[Callable[[], None]]) -> None:
        self.pool.replay(graph)


class Pool:
    """Memory that graphs work in, one after the other: when one has run, what others have left there is lost."""

    def __init__(self, of: GraphDevice) -> None:
        self.device = of.device
        self.replays = 0
        self._of = of
        self._made: list[tuple[list[Any], list[torch.Tensor]]] = []  # by graphs that work together

    def holds(self, graphs: list[Any], made: list[torch.Tensor]) -> None:
        """What these graphs leave for one another."""
        self._made.append((graphs, made))

    def captured(self, function: Callable[[], Any], room: int = 0) -> tuple[Any, Any]:
        found = self._of.capture(function, room)
        self.holds([found[0]], self._of.made)
        return found

    def run_beside(self, function: Callable[[], object]) -> None:
        self._of.run_beside(function)

    def wait_for_last(self) -> None:
        pass

    def replay(self, graph: list[Callable[[], None]]) -> None:
        self.replays += 1
        for kernel in graph:
            kernel()
        for others, left in self._made:
            if all(other is not graph for other in others):
                for value in left:
                    value.fill_(77)


def _there(meta: Any) -> Any:
    return None if meta is None else replace(meta, device="cuda:0")


@dataclass(eq=False)
class Capturable:
    """A program for the CPU in the guise of one for a GPU."""

    real: Any
    on: GraphDevice
    device: int = 0
    stages: tuple[()] = ()
    border: None = None

    def __post_init__(self) -> None:
        program = self.real.program
        inputs = tuple((name, _there(meta)) for name, meta in program.inputs)
        steps = tuple(
            replace(step, metas=tuple(map(_there, step.metas))) if isinstance(step, ExternCall) else step
            for step in program.steps
        )
        self.program = SimpleNamespace(inputs=inputs, scalars=program.scalars, donations=program.donations, steps=steps)

    def run(self, inputs: list[torch.Tensor], scalars: Any) -> list[torch.Tensor]:
        if self.on.tape is None:
            found: list[torch.Tensor] = self.real.run(inputs, scalars)
            return found
        given = list(inputs)
        inputs.clear()
        donated = dict(self.real.program.donations)
        outputs = [
            given[donated[number]]
            if number in donated
            else torch.empty_strided(meta.shape, meta.strides, dtype=meta.dtype).fill_(77)
            for number, meta in enumerate(self.real.program.output_metas)
        ]

        self.on.made += [output for number, output in enumerate(outputs) if number not in donated]

        def kernels() -> None:
            for number, result in enumerate(self.real.run(list(given), scalars)):
                if number not in donated:
                    outputs[number].copy_(result)

        self.on.launch(kernels)
        return list(outputs)

    def prepare_capture(self) -> None:
        pass

    def fill_tables(self) -> None:
        pass


def cpu_graphs(monkeypatch: pytest.MonkeyPatch, refusals: int = 0) -> GraphDevice:
    """The device on which compiled calls capture from now on."""
    on = GraphDevice(refusals)
    monkeypatch.setattr(replay_handle, "compute_device", lambda trace: "cuda:0")
    monkeypatch.setattr(joint_graphs, "compute_device", lambda trace: "cuda:0")
    monkeypatch.setattr(joint_graphs, "prepared", lambda run: Capturable(run, on))
    monkeypatch.setattr(joint_graphs, "memory_of_its_own", lambda device: on.of_its_own())
    for module in (cuda_graph, graphed_pair):
        monkeypatch.setattr(module, "graph_memory", lambda device: on)
    monkeypatch.setattr(graphed_pair, "memory_of_its_own", lambda device: on.of_its_own())
    monkeypatch.setattr(replay_handle.ProgramHandle, "with_tuned_kernels", lambda handle, run: Capturable(run, on))
    return on

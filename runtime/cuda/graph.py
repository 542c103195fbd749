"""A program as one CUDA graph: what it launches is captured once and then replayed, without Python between kernels.

A graph's addresses are frozen. Inputs that stay where they are (parameters, optimizer state) are read and written
where they are; those that move from run to run (a batch) are copied into memory of the graph's own; numbers that change
from run to run are tensors there (a program compiled with its scalars in memory). What the program allocates is the
graphs', so results are copied out of it before anybody sees them; an input that moves and is overwritten is copied
there and back.

A capture runs nothing, so that it holds no more than a run does. Where it is refused, the program is run first, as
libraries may want, on state that is kept on the host meanwhile, and captured again.

Invariant: a replay gives what `Executable.run` gives for the same inputs; it is refused where an input that was said to
stay has moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torchlazy.runtime.cuda.graph_memory import GraphMemory, graph_memory
from torchlazy.runtime.executor import Executable
from torchlazy.runtime.program.memory_plan import peak_bytes
from torchlazy.runtime.program.program import ExternCall


class CannotCapture(RuntimeError):
    """The program does something that a CUDA graph cannot hold; the message says what."""


class GraphedProgram:
    """A captured program. `stays[i]`: input i is the same memory at each run. `memory`: the device's, unless given."""

    def __init__(
        self,
        run: Executable,
        inputs: Sequence[torch.Tensor],
        stays: Sequence[bool],
        scalars: int,
        memory: GraphMemory | None = None,
    ) -> None:
        program = run.program
        reason = why_not(run, len(inputs), scalars)
        if reason:
            raise CannotCapture(reason)
        self._donated = dict(program.donations)
        self._memory = memory or graph_memory(torch.device(f"cuda:{run.device}"))
        device = self._memory.device
        self.numbers = GraphNumbers([meta.dtype for _, meta in program.inputs[len(inputs) :]], device)
        self._addresses = [tensor.data_ptr() if stay else 0 for tensor, stay in zip(inputs, stays, strict=True)]
        self._stays = tuple(stays)
        self._inputs = [tensor if stay else room_like(tensor) for tensor, stay in zip(inputs, stays, strict=True)]
        self._moving = [i for i, stay in enumerate(stays) if not stay]
        self._graph: Any = None
        self._outputs: list[torch.Tensor] = []
        self._run = run

    @property
    def bytes(self) -> int:
        """Memory of the graph's own: copies of moving inputs, and results."""
        own = [self._inputs[i] for i in self._moving] + [
            t for i, t in enumerate(self._outputs) if i not in self._donated
        ]
        return sum(tensor.untyped_storage().nbytes() for tensor in own)

    def capture(self, inputs: Sequence[torch.Tensor], scalars: Sequence[float]) -> list[torch.Tensor]:
        """Capture the program, and run it once: the outputs for these inputs."""
        run = self._run
        room = peak_bytes(run.program.steps)
        run.prepare_capture()
        try:
            self._graph, self._outputs = self._memory.captured(self._launch, room)
        except RuntimeError:
            self._load(inputs, scalars)
            written = [self._inputs[given] for given in set(self._donated.values())]
            run_and_take_back(self._memory, self._launch, written)
            run.prepare_capture()
            self._graph, self._outputs = self._memory.captured(self._launch, room)
        run.fill_tables()
        return self.run(inputs, scalars)

    def run(self, inputs: Sequence[torch.Tensor], scalars: Sequence[float]) -> list[torch.Tensor]:
        """The outputs for these inputs: donated ones in place, the others in new memory. ValueError if one moved."""
        if self.moved(inputs):
            raise ValueError("GraphedProgram.run: an input that stays has moved; capture the program again")
        self._load(inputs, scalars)
        self._memory.replay(self._graph)
        outputs: list[torch.Tensor] = []
        for position, output in enumerate(self._outputs):
            given = self._donated.get(position)
            if given is not None and not self._stays[given]:
                inputs[given].copy_(output)
            outputs.append(output.clone() if given is None else inputs[given])
        return outputs

    def moved(self, inputs: Sequence[torch.Tensor]) -> list[int]:
        """Which of the inputs that stay are elsewhere now."""
        each = zip(self._stays, inputs, self._addresses, strict=True)
        return [i for i, (stay, tensor, address) in enumerate(each) if stay and tensor.data_ptr() != address]

    def _launch(self) -> list[torch.Tensor]:
        return self._run.run([*self._inputs, *self.numbers.tensors], ())

    def _load(self, inputs: Sequence[torch.Tensor], scalars: Sequence[float]) -> None:
        for position in self._moving:
            self._inputs[position].copy_(inputs[position])
        self.numbers.load(scalars)


class GraphNumbers:
    """The numbers of a graph in memory: all floats in one tensor and all ints in another, so that each kind is copied
    once. `tensors`: one of no dimensions for each number."""

    def __init__(self, dtypes: Sequence[torch.dtype], device: torch.device) -> None:
        self._packs: list[tuple[torch.Tensor, list[int]]] = []
        kinds: dict[torch.dtype, list[int]] = {}
        for number, dtype in enumerate(dtypes):
            kinds.setdefault(dtype, []).append(number)
        found: dict[int, torch.Tensor] = {}
        for dtype, numbers in kinds.items():
            memory = torch.zeros(2 * len(numbers), dtype=dtype, device=device)  # kernels expect 16-byte alignment
            self._packs.append((memory, numbers))
            found |= {number: memory[2 * i] for i, number in enumerate(numbers)}
        self.tensors = [found[number] for number in range(len(dtypes))]

    def load(self, scalars: Sequence[float]) -> None:
        """Bring these numbers there, in the order of the current stream."""
        for memory, numbers in self._packs:
            spread = [value for i in numbers for value in (scalars[i], 0)]
            host = torch.tensor(spread, dtype=memory.dtype, pin_memory=memory.is_cuda)
            # Pinned memory goes back to torch's allocator, which waits for the copy before it gives it out again.
            memory.copy_(host, non_blocking=True)


def room_like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory laid out as the tensor is."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def run_and_take_back(memory: GraphMemory, launch: Any, written: Sequence[torch.Tensor]) -> None:
    """Run something on the stream that captures use, and give what it writes its values again. These are kept on the
    host: a copy on the device would be the largest thing that a capture holds."""
    before = [tensor.to("cpu", copy=True) for tensor in written]
    try:
        memory.run_beside(launch)
    finally:
        for tensor, value in zip(written, before, strict=True):
            tensor.copy_(value)


def why_not(run: Executable, tensors: int, scalars: int) -> str:
    """Why a program cannot be captured; empty where it can, as far as its data tells."""
    program = run.program
    if run.device is None:
        return "it computes on the CPU"
    if program.scalars:
        return "it takes numbers from the host"
    if len(program.inputs) != tensors + scalars:
        return "its inputs are not the tensors and scalars that it is given"
    host = [name for name, meta in program.inputs if not meta.device.startswith("cuda")]
    if host:
        return f"its input {host[0]} is a tensor on the host"
    for step in program.steps:
        if isinstance(step, ExternCall) and any(meta is not None and meta.device == "cpu" for meta in step.metas):
            return f"{step.op} makes a tensor on the host"
    return ""

"""A program as one CUDA graph: what it launches is captured once and then replayed, without Python between kernels.

A graph's addresses are frozen. Inputs that stay where they are (parameters, optimizer state) are read and written
where they are; those that move from run to run (a batch) are copied into memory of the graph's own; numbers that change
from run to run are tensors there (a program compiled with its scalars in memory). What the program allocates is the
graphs', so results are copied out of it before anybody sees them; an input that moves and is overwritten is copied
there and back.

A program in stages (`Executable.in_stages`) becomes a graph for each: `launch` runs one before the inputs of the others
are known, and `run` then what is left.

A capture runs nothing, so that it holds no more than a run does. Where it is refused, the program is run first, as
libraries may want, on state that is kept on the host meanwhile, and captured again.

Invariant: a replay gives what `Executable.run` gives for the same inputs, if none that was said to stay has moved
(`moved`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any, Protocol, TypeVar

import torch
from torchlazy.runtime.cuda.graph_memory import GraphMemory, graph_memory
from torchlazy.runtime.executor import Executable
from torchlazy.runtime.program.memory_plan import peak_bytes
from torchlazy.runtime.program.program import ExternCall
from torchlazy.runtime.program.stages import Border

T_co = TypeVar("T_co", covariant=True)
# A tensor's own method asks first what is deferred, inside a native block; the one that it overrides does not.
address_of: Any = getattr(torch.Tensor.__mro__[1], "data_ptr")  # noqa: B009


class ByPosition(Protocol[T_co]):
    """Inputs or scalars by position: of the whole program, or those of a stage."""

    def __getitem__(self, position: int, /) -> T_co: ...


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
        self._stages = [
            _StageGraph(reads, GraphNumbers([program.inputs[len(inputs) + n][1].dtype for n in reads.scalars], device))
            for reads in reads_of_stages(run, len(inputs), scalars)
        ]
        self._addresses = [address_of(tensor) if stay else 0 for tensor, stay in zip(inputs, stays, strict=True)]
        self._stays = tuple(stays)
        self._fixed = [(i, self._addresses[i]) for i, stay in enumerate(stays) if stay]
        self._inputs = [tensor if stay else room_like(tensor) for tensor, stay in zip(inputs, stays, strict=True)]
        self._moving = [i for i, stay in enumerate(stays) if not stay]
        self._launched_at = -1  # how many graphs the device had replayed after the last stage that was launched
        self._outputs: list[torch.Tensor] = []
        self._run = run

    @property
    def reads(self) -> list[StageReads]:
        """What each stage is the first to read."""
        return [stage.reads for stage in self._stages]

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
            graphs, self._outputs = self._memory.captured_in_stages(self._launch, run.border or Border(), room)
        except RuntimeError:
            for stage in self._stages:
                self._load(stage, inputs, scalars)
            written = [self._inputs[given] for given in set(self._donated.values())]
            run_and_take_back(self._memory, self._launch, written)
            run.prepare_capture()
            graphs, self._outputs = self._memory.captured_in_stages(self._launch, run.border or Border(), room)
        for stage, graph in zip(self._stages, graphs, strict=True):
            stage.graph = graph
        run.fill_tables()
        return self.run(inputs, scalars)

    def launch(self, stage: int, inputs: Mapping[int, torch.Tensor], scalars: Mapping[int, float]) -> bool:
        """Run one stage, whose inputs and scalars these are by position; its values stay in the graphs' memory. False,
        and nothing is run, if an input that stays has moved, or what earlier stages left is gone. They go in order."""
        if stage and not self.holds_launched():
            return False
        if any(self._stays[i] and address_of(tensor) != self._addresses[i] for i, tensor in inputs.items()):
            return False
        self._replay(self._stages[stage], inputs, scalars)
        self._launched_at = self._memory.replays
        return True

    def holds_launched(self) -> bool:
        """Whether the values of the stages that were launched are still there: another graph may have run since."""
        return self._launched_at == self._memory.replays

    def run(self, inputs: Sequence[torch.Tensor], scalars: Sequence[float], launched: int = 0) -> list[torch.Tensor]:
        """The outputs for these inputs: donated ones in place, the others in new memory. So many stages were launched
        for them before. The caller has asked `moved`."""
        for stage in self._stages[launched:]:
            self._replay(stage, inputs, scalars)
        back = [(given, self._outputs[at]) for at, given in self._donated.items() if not self._stays[given]]
        copy_all([inputs[given] for given, _ in back], [output for _, output in back])
        fresh = iter(copies_of([output for at, output in enumerate(self._outputs) if at not in self._donated]))
        return [inputs[self._donated[at]] if at in self._donated else next(fresh) for at in range(len(self._outputs))]

    def moved(self, inputs: Sequence[torch.Tensor]) -> list[int]:
        """Which of the inputs that stay are elsewhere now."""
        return [i for i, address in self._fixed if address_of(inputs[i]) != address]

    def _launch(self) -> list[torch.Tensor]:
        pairs = [zip(stage.reads.scalars, stage.numbers.tensors, strict=True) for stage in self._stages]
        numbers = [tensor for _, tensor in sorted(chain(*pairs), key=itemgetter(0))]
        return self._run.run([*self._inputs, *numbers], ())

    def _replay(self, stage: _StageGraph, inputs: ByPosition[torch.Tensor], scalars: ByPosition[float]) -> None:
        self._load(stage, inputs, scalars)
        self._memory.replay(stage.graph)

    def _load(self, stage: _StageGraph, inputs: ByPosition[torch.Tensor], scalars: ByPosition[float]) -> None:
        self._memory.wait_for_last()
        moving = [position for position in stage.reads.inputs if not self._stays[position]]
        copy_all([self._inputs[position] for position in moving], [inputs[position] for position in moving])
        stage.numbers.load([scalars[n] for n in stage.reads.scalars])


@dataclass(frozen=True)
class StageReads:
    """What a stage is the first to read: positions among the tensors and among the scalars of the program; and how many
    operators have taken random numbers when it is done."""

    inputs: tuple[int, ...]
    scalars: tuple[int, ...]
    draws: int


def reads_of_stages(run: Executable, tensors: int, scalars: int) -> list[StageReads]:
    """What each stage reads first, of a program of so many tensors and scalars; the last has what nobody reads."""
    found: list[StageReads] = []
    left = dict.fromkeys(range(tensors + scalars))
    for stage in run.stages[:-1]:
        for position in stage.inputs:
            del left[position]
        found.append(_reads(stage.inputs, tensors, stage.draws))
    return [*found, _reads(left, tensors, -1)]


def _reads(positions: Iterable[int], tensors: int, draws: int) -> StageReads:
    inputs = tuple(n for n in positions if n < tensors)
    return StageReads(inputs, tuple(n - tensors for n in positions if n >= tensors), draws)


@dataclass
class _StageGraph:
    """A stage as a graph."""

    reads: StageReads
    numbers: GraphNumbers
    graph: Any = None


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
        self._loaded: list[float] = []

    def load(self, scalars: Sequence[float]) -> None:
        """Bring these numbers there, in the order of the current stream."""
        if scalars == self._loaded and 0 not in scalars:  # 0.0 is equal to -0.0
            return
        self._loaded = list(scalars)
        for memory, numbers in self._packs:
            spread = [value for i in numbers for value in (scalars[i], 0)]
            host = torch.tensor(spread, dtype=memory.dtype, pin_memory=memory.is_cuda)
            # Pinned memory goes back to torch's allocator, which waits for the copy before it gives it out again.
            memory.copy_(host, non_blocking=True)


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source to its target: one launch for all of a dtype."""
    kinds: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        to, of = kinds.setdefault((target.dtype, source.dtype), ([], []))
        to.append(target)
        of.append(source)
    for to, of in kinds.values():
        torch.ops.aten._foreach_copy_.default(to, of)


def copies_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same values in new memory."""
    made = [torch.empty_like(tensor) for tensor in tensors]
    copy_all(made, tensors)
    return made


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

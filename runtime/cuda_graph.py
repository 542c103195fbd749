"""A program as one CUDA graph: what it launches is captured once and then replayed, without Python between kernels.

A graph's addresses are frozen. Inputs that stay where they are (parameters, optimizer state) are read and written
where they are; those that move from run to run (a batch) are copied into memory of the graph's own; numbers that change
from run to run are tensors there (a program compiled with its scalars in memory). What the program allocates is the
graph's, so results are copied out of it before anybody sees them.

Invariant: a replay gives what `Executable.run` gives for the same inputs; it is refused where an input that was said to
stay has moved.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torchlazy.runtime.executor import Executable

_WARM_UPS = 2  # runs on a side stream before the capture: libraries pick algorithms and allocate workspaces


class CannotCapture(RuntimeError):
    """The program does something that a CUDA graph cannot hold; the message says what."""


class GraphedProgram:
    """A captured program. `stays[i]`: input i is the same memory at each run."""

    def __init__(self, run: Executable, inputs: Sequence[torch.Tensor], stays: Sequence[bool], scalars: int) -> None:
        program = run.program
        reason = why_not(run, len(inputs), scalars)
        if reason:
            raise CannotCapture(reason)
        device = torch.device(f"cuda:{run.device}")
        self._scalars: list[torch.Tensor] = []
        self._packs: list[tuple[torch.Tensor, list[int]]] = []
        self._pack_scalars(program.inputs[len(inputs) :], device)
        self._addresses = [tensor.data_ptr() if stay else 0 for tensor, stay in zip(inputs, stays, strict=True)]
        self._stays = tuple(stays)
        self._inputs = [
            tensor if stay else torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            for tensor, stay in zip(inputs, stays, strict=True)
        ]
        self._moving = [i for i, stay in enumerate(stays) if not stay]
        self._donated = dict(program.donations)
        for output, given in self._donated.items():
            if given < len(inputs) and not stays[given]:
                raise CannotCapture(f"output {output} overwrites an input that moves from run to run")
        self._graph = torch.cuda.CUDAGraph()
        self._outputs: list[torch.Tensor] = []
        self._run = run
        self._device = device

    @property
    def bytes(self) -> int:
        """Memory of the graph's own: copies of moving inputs, and results."""
        own = [self._inputs[i] for i in self._moving] + [
            t for i, t in enumerate(self._outputs) if i not in self._donated
        ]
        return sum(tensor.untyped_storage().nbytes() for tensor in own)

    def capture(self, inputs: Sequence[torch.Tensor], scalars: Sequence[float]) -> list[torch.Tensor]:
        """Capture the program, and run it once: the outputs for these inputs.

        What the warm-up runs write into donated memory is taken back before the real run.
        """
        kept = [(self._inputs[given], self._inputs[given].clone()) for given in set(self._donated.values())]
        self._load(inputs, scalars)
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            try:
                for _ in range(_WARM_UPS):
                    self._run.run([*self._inputs, *self._scalars], ())
            finally:  # a program that cannot be captured runs as it is, on the values of before
                for target, before in kept:
                    target.copy_(before)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        del kept
        self._run.prepare_capture()
        pool = _pool(self._device)
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._outputs = self._run.run([*self._inputs, *self._scalars], ())
        self._run.fill_tables()
        return self.run(inputs, scalars)

    def run(self, inputs: Sequence[torch.Tensor], scalars: Sequence[float]) -> list[torch.Tensor]:
        """The outputs for these inputs: donated ones in place, the others in new memory. ValueError if one moved."""
        for stay, tensor, address in zip(self._stays, inputs, self._addresses, strict=True):
            if stay and tensor.data_ptr() != address:
                raise ValueError("GraphedProgram.run: an input that stays has moved; capture the program again")
        self._load(inputs, scalars)
        self._graph.replay()
        outputs: list[torch.Tensor] = []
        for position, output in enumerate(self._outputs):
            given = self._donated.get(position)
            outputs.append(output.clone() if given is None else inputs[given])
        return outputs

    def _load(self, inputs: Sequence[torch.Tensor], scalars: Sequence[float]) -> None:
        for position in self._moving:
            self._inputs[position].copy_(inputs[position])
        for memory, numbers in self._packs:
            spread = [value for i in numbers for value in (scalars[i], 0)]
            # Pinned memory goes back to torch's allocator, which waits for the copy before it gives it out again.
            memory.copy_(torch.tensor(spread, dtype=memory.dtype, pin_memory=True), non_blocking=True)

    def _pack_scalars(self, places: Sequence[tuple[str, object]], device: torch.device) -> None:
        """All floats in one tensor and all ints in another, so that a run copies each once."""
        kinds: dict[torch.dtype, list[int]] = {}
        for number, (_, meta) in enumerate(places):
            kinds.setdefault(meta.dtype, []).append(number)  # type: ignore[attr-defined]
        found: dict[int, torch.Tensor] = {}
        for dtype, numbers in kinds.items():
            memory = torch.zeros(2 * len(numbers), dtype=dtype, device=device)  # kernels expect 16-byte alignment
            self._packs.append((memory, numbers))
            found |= {number: memory[2 * i] for i, number in enumerate(numbers)}
        self._scalars = [found[number] for number in range(len(places))]


@functools.cache
def _pool(device: torch.device) -> Any:
    """One pool for all graphs of a device: they run one after the other, and results are copied out at once."""
    return torch.cuda.graph_pool_handle()


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
    return ""

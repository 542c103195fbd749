"""A known trace's program as the native recorder's library calls it in Python; on a GPU as a CUDA graph once its memory
stays where it is.

An input stays where it was at the last runs, or it is copied into memory of the graph's own: a small one once it was
elsewhere, a large one once it was so twice. Results are copied out of
the graph, but for memory that the program writes in place. Where most of the inputs are elsewhere, another model of the
same kind runs (a teacher, a second copy): it gets a graph of its own.

Invariant: the outputs are those of the program; where a graph cannot be, the program runs as it is, and
`metrics.fallbacks` has the reason.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torchlazy.lazy.config import config
from torchlazy.lazy.record.recorder import current
from torchlazy.lazy.report import metrics
from torchlazy.lazy.torch_private.patches import exclude_from_dynamo
from torchlazy.lazy.trace.trace import CutTrace, compute_device
from torchlazy.runtime.cuda.graph import GraphedProgram, address_of
from torchlazy.runtime.executor import Executable

_SETTLED = 3  # runs whose inputs are compared before a graph is captured
MAX_CAPTURES = 4  # of one graph anew, since inputs moved that were assumed to stay
MAX_GRAPHS = 4  # of models that are alike
_FEW, _SMALL = 8, 1 << 20  # inputs, and their bytes, that cost little to copy


class RunsInPython:
    """A program: memory and scalars -> the outputs' values."""

    def __init__(self, driver: Any, compiled: Any, trace: CutTrace, frame: str) -> None:
        self._driver, self._compiled, self._trace, self._frame = driver, compiled, trace, frame
        self._may_be_graph = compute_device(trace).startswith("cuda")
        self._graphs: list[GraphedProgram] = []
        self._captures = 0
        self._runs = 0  # in a row, of one model
        self._addresses: list[int] = []  # of the inputs of the run before
        self._moves: Counter[int] = Counter()  # by input, how often it was elsewhere than in the run before
        self._moving: set[int] = set()  # inputs that are copied
        self._staged: Executable | None = None  # the program that graphs in stages are made of
        self._ahead: GraphedProgram | None = None  # whose first stages run already

    def is_final(self) -> bool:
        """Whether it runs as it will from now on: not where a graph is still to come, which launches far faster."""
        return not self._may_be_graph or config.cuda_graphs == "off" or bool(self._graphs)

    def stages(self) -> list[tuple[tuple[int, ...], tuple[int, ...], int]] | None:
        """What each stage that can be launched ahead is the first to read: inputs and scalars by position, and how many
        operators have taken random numbers by then. None as long as the graph is not captured in stages; asked where
        the host waits for the device."""
        if not self._may_be_graph or config.cuda_graphs == "off":
            return []
        if self._staged is None:
            found, reason = self._program("stages")
            if found is None:
                return [] if reason else None
            self._staged = found.run.in_stages()
            if self._staged is found.run:  # it has none
                return []
            self._graphs.clear()
            self._runs = _SETTLED
        if not self._graphs:
            return None
        return [(reads.inputs, reads.scalars, reads.draws) for reads in self._graphs[0].reads[:-1]]

    def launch(self, stage: int, memory: list[torch.Tensor], scalars: list[Any]) -> bool:
        """Run one stage of the graph ahead of the cut, with its inputs and scalars; False where that cannot be."""
        if stage == 0:
            self._ahead = None
        for graph in [self._ahead] if self._ahead is not None else self._graphs:
            reads = graph.reads[stage]
            given = dict(zip(reads.inputs, memory, strict=True))
            if graph.launch(stage, given, dict(zip(reads.scalars, scalars, strict=True))):
                self._ahead = graph
                metrics.launched_ahead += 1
                return True
        return False

    def __call__(self, memory: list[torch.Tensor], scalars: list[Any], launched: int = 0) -> list[torch.Tensor] | None:
        """The outputs' values. `launched`: so many stages run already for these inputs; None, and nothing is run, where
        what they left is gone."""
        if launched:
            graph, self._ahead = self._ahead, None
            if graph is None or graph not in self._graphs or graph.moved(memory) or not graph.holds_launched():
                return None
            metrics.hits += 1
            metrics.graph_replays += 1
            return graph.run(memory, scalars, launched)
        metrics.hits += 1
        if self._may_be_graph and config.cuda_graphs != "off":
            values = self._run_graph(memory, scalars)
            if values is not None:
                return values
        found: list[Any] = self._driver.run_compiled(self._compiled, self._trace, memory, scalars)
        error = next((value for value in found if isinstance(value, BaseException)), None)
        if error is not None:
            raise error
        return found

    def _run_graph(self, memory: list[torch.Tensor], scalars: list[Any]) -> list[torch.Tensor] | None:
        """What the graph gives, captured now if memory has settled; None, and nothing was run, where there is none."""
        for graph in self._graphs:
            moved = graph.moved(memory)
            if not moved:
                metrics.graph_replays += 1
                return graph.run(memory, scalars)
            if not _is_another(moved, memory):
                self._note(moved, memory)
                self._graphs.remove(graph)
                self._captures += 1
                break
        else:
            self._look(memory)
            if (self._runs < _SETTLED and config.cuda_graphs == "auto") or len(self._graphs) >= MAX_GRAPHS:
                return None
        if self._captures >= MAX_CAPTURES:
            return self._without("memory that was assumed to stay in place has moved again and again")
        run = self._staged
        if run is None:
            compiled, reason = self._program("memory")
            if compiled is None:
                return self._without(reason) if reason else None
            run = compiled.run
        stays = [number not in self._moving for number in range(len(memory))]
        try:
            graph = GraphedProgram(run, memory, stays, len(scalars))
            values = graph.capture(memory, scalars)
        except Exception as error:  # a library call that a capture refuses: the program runs as it is
            return self._without(f"{type(error).__name__}: {error}")
        self._graphs.append(graph)
        self._runs = 0
        return values

    def _program(self, form: str) -> tuple[Any, str]:
        lock = current().lock
        if not lock.acquire(blocking=False):  # its holder may wait for this thread
            return None, ""
        try:
            return self._driver.program_for_replay(self._trace, self._frame, form)  # type: ignore[no-any-return]
        finally:
            lock.release()

    def _look(self, memory: list[torch.Tensor]) -> None:
        addresses = [address_of(tensor) for tensor in memory]
        if self._runs:
            pairs = zip(addresses, self._addresses, strict=True)
            moved = [number for number, (now, before) in enumerate(pairs) if now != before]
            if _is_another(moved, memory):
                self._runs = 0
            else:
                self._note(moved, memory)
        self._addresses = addresses
        self._runs += 1

    def _note(self, moved: list[int], memory: list[torch.Tensor]) -> None:
        """These inputs were elsewhere. Large ones that are so once are of a new model, which got some of an old one's
        memory, or were replaced: to copy them at each run would cost more than the graph saves."""
        self._moves.update(moved)
        is_small = sum(memory[number].nbytes for number in moved) <= _SMALL
        self._moving.update(number for number in moved if is_small or self._moves[number] > 1)

    def _without(self, reason: str) -> list[torch.Tensor] | None:
        self._may_be_graph = False
        metrics.fallbacks[f"no CUDA graph: {reason.splitlines()[0][:200]}"] += 1
        return None


def _is_another(moved: list[int], memory: list[torch.Tensor]) -> bool:
    """Whether what moved says that another model runs: parameters are the most of the inputs and of their bytes. A few
    small inputs are copied, whosever they are."""
    nbytes = sum(memory[n].nbytes for n in moved)
    if 2 * len(moved) <= len(memory) or (len(moved) <= _FEW and nbytes <= _SMALL):
        return False
    return 2 * nbytes > sum(tensor.nbytes for tensor in memory)


exclude_from_dynamo(RunsInPython.__call__, RunsInPython.is_final, RunsInPython.stages, RunsInPython.launch)

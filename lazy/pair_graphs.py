"""The halves of a pair as CUDA graphs: captured together once both programs are there, and again when state has moved.

Invariant: results are those of the pair's segments. Before the first graph runs it is certain that the second can.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torchlazy.lazy.call_template import FromData, FromGradient, FromState, Memory, Segment
from torchlazy.lazy.half_programs import HalfPrograms
from torchlazy.lazy.joined_trace import Joined
from torchlazy.lazy.program_handle import MAX_CAPTURES, ProgramHandle, inputs_that_stay, moving_inputs
from torchlazy.lazy.report import metrics
from torchlazy.lazy.tensor import LazyTensor
from torchlazy.runtime.graphed_pair import GraphedPair


class PairGraphs:
    """The graphs of one pair. `is_given_up`: there will be none; its segments were told why."""

    def __init__(
        self, driver: Any, joined: Joined, first: Segment, second: Segment, handles: Sequence[ProgramHandle],
        *, is_nested: bool = False,
    ) -> None:  # fmt: skip
        """`is_nested`: other segments run between the two."""
        self._programs = HalfPrograms(driver, joined, first.trace, second.frame, scalars="memory")
        self._joined = joined
        self._first = first
        self._second = second
        # Inputs that turned out to be elsewhere at other calls.
        self._moving: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())
        self._handles = handles
        self._is_nested = is_nested
        self._graphs: GraphedPair | None = None
        self._captures = 0
        self.is_given_up = False

    @property
    def are_there(self) -> bool:
        """Whether both programs are there."""
        return self._programs.are_there and not self.is_given_up

    def find(self) -> bool:
        """Ask for the programs, or see whether they have come by now; whether they are there."""
        if not self._programs.find() and self._programs.is_given_up:
            self._give_up("the halves of the step have no programs that take their numbers from memory")
        return self.are_there

    def run_first(self, memory: list[torch.Tensor], scalars: list[Any]) -> list[Any] | None:
        """The first segment's outputs, None for hidden ones; None, and nothing was run, where there are no graphs."""
        later = self._later()
        made = None
        if self._graphs is not None:
            try:
                made = self._graphs.run_first(memory, scalars, later)
            except ValueError:  # parameters were moved, or gradients
                moved = zip(self._moving, (self._first, self._second), self._graphs.moved(memory, later), strict=True)
                early, late = (known | moving_inputs(segment, found) for known, segment, found in moved)
                self._moving = early, late
                later = self._later()
                self._graphs = None
        if made is None:
            self._graphs = self._captured(memory, scalars, later)
            if self._graphs is None:
                return None
            made = self._graphs.run_first(memory, scalars, later)
        metrics.graph_replays += 1
        metrics.hits += 1
        memory.clear()
        return self._programs.visible(made)

    def run_second(self, memory: list[torch.Tensor], scalars: Sequence[Any]) -> list[Any]:
        """The second segment's outputs. `scalars`: of both. Empties `memory`."""
        assert self._graphs is not None
        values = self._graphs.run_second(memory, scalars)
        metrics.graph_replays += 1
        metrics.hits += 1
        memory.clear()
        return values

    def _captured(
        self, memory: Sequence[torch.Tensor], scalars: Sequence[Any], later: Sequence[torch.Tensor | None]
    ) -> GraphedPair | None:
        if self._captures >= MAX_CAPTURES:
            self._give_up("memory that was taken to stay has moved again and again")
            return None
        self._captures += 1
        runs = zip(self._handles, self._programs.executables, strict=True)
        first, second = (handle.with_tuned_kernels(run) for handle, run in runs)
        try:
            shown = len(self._joined.visible)
            found = GraphedPair(first, second, self._programs.wires, shown, is_nested=self._is_nested)
            found.capture(memory, inputs_that_stay(self._first, self._moving[0]), scalars, later)
        except Exception as error:  # a library call that a capture refuses: the programs run as they are
            self._give_up(f"{type(error).__name__}: {error}")
            return None
        return found

    def _later(self) -> list[torch.Tensor | None]:
        """What the second half will be given, as far as it stays and is nothing that the first half makes."""
        stays = inputs_that_stay(self._second, self._moving[1])
        return [
            _real(source) if stay and place is not None else None
            for source, stay, place in zip(self._second.inputs, stays, self._joined.second_inputs, strict=True)
        ]

    def _give_up(self, reason: str) -> None:
        self.is_given_up = True
        for handle in self._handles:
            handle.without_graph(reason)


def _real(source: Memory) -> torch.Tensor | None:
    """The memory of what stays, before the first half runs; None for what only the call's state knows."""
    if isinstance(source, FromState):
        return source.storage.real
    found = source.tensor(()) if isinstance(source, (FromData, FromGradient)) else None
    return found._storage_.real if isinstance(found, LazyTensor) else found

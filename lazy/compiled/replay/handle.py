"""The program of a captured segment, held by the replay that runs it: found once, then run without a lookup.

Invariant: results are those of a cut of the same trace.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from torchlazy.lazy.compiled.template.template import FromState, Segment
from torchlazy.lazy.native.device import DEVICE
from torchlazy.lazy.report import metrics
from torchlazy.lazy.run.dynamic_program import BoundRun
from torchlazy.lazy.run.foreign_backend import compile_with
from torchlazy.lazy.trace.trace import compute_device
from torchlazy.runtime.cuda.graph import GraphedProgram
from torchlazy.runtime.toolchains.kernel_tuning import tuned
from torchlazy.runtime.toolchains.toolchain import load_kernels

MAX_CAPTURES = 4


class SegmentDriver(Protocol):
    """What runs cut traces (run/driver.py)."""

    listeners: list[Any]
    cache: Any  # of kernels
    last_compiled: Any  # the program that ran the last cut; None while tier 0 serves it
    graphs: Any  # a weak set of handles that have captured a graph

    def __call__(
        self, trace: Any, memory: list[torch.Tensor], scalars: list[Any], cause: str, frame: str
    ) -> list[torch.Tensor | BaseException]: ...

    def program_for_replay(self, trace: Any, frame: str) -> tuple[Any, str]:
        """The form of the program with its scalars in memory, or None and why there will be none ("": not yet)."""

    def run_compiled(
        self, compiled: Any, trace: Any, memory: list[torch.Tensor], scalars: list[Any]
    ) -> list[torch.Tensor | BaseException]: ...


class ProgramHandle:
    """Runs a segment on memory. `graphs`: on CUDA, as a CUDA graph once the program is there. `tunes`: the launch facts
    of its kernels are measured before, and it is called with each decision."""

    def __init__(
        self,
        driver: SegmentDriver,
        segment: Segment,
        backend: Callable[..., Any] | None,
        *,
        graphs: bool,
        tunes: Callable[[str], None] | None = None,
    ) -> None:
        self._driver = driver
        self._segment = segment
        self._compiled: Any = None
        self._foreign = None if backend is None else compile_with(backend, segment.trace)
        self._wants_graph = graphs and compute_device(segment.trace).startswith("cuda")
        self._graph: GraphedProgram | None = None
        self._captures = 0
        self._moving: frozenset[int] = frozenset()  # inputs whose memory moved between calls
        self._tunes = tunes
        self._tuned: tuple[Any, Any] = (None, None)  # an executable, and what tuning made of it
        self.waits_for_pair = False  # whether a graph of this segment alone is not wanted, or not yet

    @property
    def has_program(self) -> bool:
        """Whether the last run was by a compiled program."""
        return self._compiled is not None

    @property
    def compiled(self) -> Any:
        """That program; None for one of another compiler."""
        return self._compiled

    @property
    def is_for_all_sizes(self) -> bool:
        """Whether that program serves other sizes as well."""
        return self._compiled is not None and isinstance(self._compiled.run, BoundRun)

    @property
    def can_be_paired(self) -> bool:
        """Whether the segment is run by programs of this compiler."""
        return self._foreign is None

    @property
    def wants_graph(self) -> bool:
        """Whether runs are to replay a CUDA graph, now or once it is there."""
        return self._wants_graph

    def run(self, memory: list[torch.Tensor], scalars: list[Any]) -> list[torch.Tensor | BaseException]:
        """The segment's outputs for this memory and these scalars, or the error of each that has none."""
        segment, driver = self._segment, self._driver
        if self._foreign is not None:
            return list(self._foreign.run([DEVICE.unmarked(one) for one in memory], scalars))
        if self._compiled is not None and not driver.listeners:
            if self._wants_graph and not self.waits_for_pair:
                values = self._run_graph(memory, scalars)
                if values is not None:
                    return values
            return driver.run_compiled(self._compiled, segment.trace, memory, scalars)
        values = driver(segment.trace, memory, scalars, segment.cause, segment.frame)
        self._compiled = driver.last_compiled
        return values

    @property
    def trace(self) -> Any:
        """The segment's."""
        return self._segment.trace

    def run_as_captured(self, memory: list[torch.Tensor], scalars: list[Any]) -> list[Any] | None:
        """What the graph gives; None, and nothing was run, where there is none over this memory."""
        if self._graph is None or self._graph.moved(memory):
            return None
        values = self._graph.run(memory, scalars)
        metrics.graph_replays += 1
        return list(values)

    def _run_graph(self, memory: list[torch.Tensor], scalars: list[Any]) -> list[torch.Tensor | BaseException] | None:
        """Run by the graph, captured now if its program is there; None where there is none (yet)."""
        values = self.run_as_captured(memory, scalars)
        if values is not None:
            return values
        if self._graph is not None:
            self._moving |= moving_inputs(self._segment, self._graph.moved(memory))
        self._graph = None
        if self._captures >= MAX_CAPTURES:
            self.without_graph("memory that was assumed to stay in place has moved again and again")
            return None
        compiled, reason = self._driver.program_for_replay(self._segment.trace, self._segment.frame)
        if compiled is None:
            if reason:
                self.without_graph(reason)
            return None
        stays = inputs_that_stay(self._segment, self._moving)
        self._captures += 1
        try:
            graph = GraphedProgram(self.with_tuned_kernels(compiled.run), memory, stays, len(scalars))
            values = graph.capture(memory, scalars)
        except Exception as error:  # a library call that a capture refuses: the program runs as it is
            self.without_graph(f"{type(error).__name__}: {error}")
            return None
        self._graph = graph
        self._driver.graphs.add(self)
        return list(values)

    def with_tuned_kernels(self, run: Any) -> Any:
        """The program with the launch facts that were measured, where that is wanted."""
        if self._tunes is None:
            return run
        if self._tuned[0] is not run:
            found, decisions = tuned(run, load_kernels(run.program.kernels, cache=self._driver.cache))
            self._tuned = run, found
            for decision in decisions:
                self._tunes(f"max-autotune: {decision.kernel}: {decision.reason}")
        return self._tuned[1]

    def without_graph(self, reason: str) -> None:
        """There will be no graph, for this reason."""
        self._wants_graph = False
        metrics.fallbacks[f"no CUDA graph: {reason.splitlines()[0][:200]}"] += 1


def inputs_that_stay(segment: Segment, moving: Collection[int]) -> list[bool]:
    """Which inputs are the same memory at each call: state, and what the segment overwrites (a gradient that is added
    to, a cache among the arguments), but for those that were seen to move."""
    written = {given for _, given in segment.trace.donations}
    return [
        isinstance(source, FromState) or (number in written and number not in moving)
        for number, source in enumerate(segment.inputs)
    ]


def moving_inputs(segment: Segment, moved: Sequence[int]) -> frozenset[int]:
    """Those that are not state: the caller may pass others at each call."""
    return frozenset(number for number in moved if not isinstance(segment.inputs[number], FromState))

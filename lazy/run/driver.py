"""What happens at a cut: find the trace's program and run it, or interpret the recorded operators one by one.

Invariant: the results are the same whichever of the two runs, and so is the memory that they are in.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torchlazy.lazy.config import config
from torchlazy.lazy.deferred import DeferredModule
from torchlazy.lazy.plan.loaded import Compiled
from torchlazy.lazy.report import account, diagnosed, metrics
from torchlazy.lazy.run.failure import values_after_failure, values_left
from torchlazy.lazy.run.programs import KnownTrace, Tiers
from torchlazy.lazy.run.segments.device import CutHalves
from torchlazy.lazy.run.segments.programs import HalfFailed
from torchlazy.lazy.run.segments.watch import same_trace
from torchlazy.lazy.run.straight_line import ByOperators
from torchlazy.lazy.torch_private.dispatch import below_autograd
from torchlazy.lazy.trace.diff import Divergence, SeenTraces
from torchlazy.lazy.trace.to_fx import needed_entries
from torchlazy.lazy.trace.trace import CutTrace, compute_device
from torchlazy.runtime.executor import take_untold_runs
from torchlazy.runtime.toolchains.kernel_cache import KernelCache

debug_text = DeferredModule("torchlazy.lazy.run.text")


@dataclass(frozen=True)
class CutEvent:
    """One cut, for dumps and debug printing. `compiled` is None where tier 0 ran."""

    number: int
    cause: str
    frame: str
    trace: CutTrace
    outcome: str  # "hit", "compiled" (ran compiled for the first time), "stored", "tier 0: ..."
    compiled: Compiled | None
    seconds: float
    divergence: Divergence | None = None  # for a trace that was new


WhichTrace: TypeAlias = "CutTrace | Callable[[], CutTrace]"  # or what makes it when it is needed
Shadow = Callable[[Compiled, CutTrace, "list[torch.Tensor]", "list[Any]", str, str], "list[Any]"]


class Driver:
    """Runs cut traces. `listeners` are called after each cut."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[CutEvent], None]] = []
        self.tiers = Tiers()
        self.last_compiled: Compiled | None = None  # the program that ran the last cut; None if operators ran
        self._cuts = 0
        self._seen = SeenTraces()
        self._reported: weakref.WeakKeyDictionary[KnownTrace, Compiled] = (
            weakref.WeakKeyDictionary()
        )  # counted in the account
        self.halves = CutHalves(self)  # runs the recorder's cuts
        self.shadow: Shadow | None = None  # runs the cuts that have a program, and checks it
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()  # program handles that have captured a CUDA graph

    @property
    def cache(self) -> KernelCache:
        return self.tiers.cache

    def by_graph(self, trace: CutTrace, memory: list[torch.Tensor], scalars: list[Any]) -> list[Any] | None:
        """The outputs, by a CUDA graph of this trace over this memory; None, and nothing was run, without one.

        Audited calls of a step that is a graph are run by it as well: running the program instead would need the
        graph's working memory a second time.
        """
        if self.listeners or self.shadow is not None or config.debug:
            return None
        for handle in tuple(self.graphs):
            if same_trace(handle.trace, trace):
                with below_autograd():
                    values = handle.run_as_captured(memory, scalars)
                if values is not None:
                    memory.clear()
                    metrics.hits += 1
                    found: list[Any] = values
                    return found
        return None

    def forget(self) -> None:
        """Drop every program of this process; kernels on disk stay."""
        self.tiers.forget()
        self.halves.forget()
        self._seen.forget()

    def __call__(
        self, trace: CutTrace, memory: list[torch.Tensor], scalars: list[Any], cause: str, frame: str
    ) -> list[torch.Tensor | BaseException]:
        start = time.perf_counter()
        known, outcome = self._look_up(trace, cause, frame)
        self._cuts += 1
        divergence = self._note(known, trace, frame)
        with below_autograd():
            if known.compiled is None:
                inputs = [weakref.ref(value) for value in memory] if trace.writes else []
                known.by_operators = known.by_operators or ByOperators()
                values = values_left(trace, known.by_operators.run(trace, memory, scalars), inputs, scalars)
                metrics.extern_calls.update(str(trace.entries[i].op) for i in needed_entries(trace))
            elif self.shadow is not None:
                values = self.shadow(known.compiled, trace, memory, scalars, cause, frame)
            else:
                values = run_compiled(known.compiled, trace, memory, scalars)
        self.last_compiled = known.compiled
        if known.compiled is not None:
            known.by_operators = None
        if self.listeners or config.debug:
            seconds = time.perf_counter() - start
            event = CutEvent(self._cuts, cause, frame, trace, outcome, known.compiled, seconds, divergence)
            if config.debug:
                diagnosed("debug", None, print_event, event)
            for listener in self.listeners:
                listener(event)
        return values

    def run_compiled(
        self, compiled: Compiled, trace: WhichTrace, memory: list[torch.Tensor], scalars: list[Any]
    ) -> list[torch.Tensor | BaseException]:
        """`run_compiled`, for callers that hold a program which a cut found before (`last_compiled`). They are below
        autograd and autocast: under it a product of float32 would come back narrower than its memory is."""
        return run_compiled(compiled, trace, memory, scalars)

    def program_of_half(self, trace: CutTrace, frame: str, scalars: str = "arguments") -> KnownTrace:
        """What is known of one half of a joined trace, whose program is compiled at the first sight; `scalars`: how it
        gets its scalars (`CompileOptions.scalars`)."""
        return self.tiers.look_up(trace, compute_device(trace), frame, scalars)[0]

    def run_half(
        self, compiled: Compiled, first: CutTrace | None, memory: list[torch.Tensor], scalars: list[Any]
    ) -> list[Any]:
        """Run a half of a joined trace. Raises what the program raises; where `first` is given, the first trace as it
        was cut, HalfFailed with that trace's values."""
        count_run(compiled.run)
        inputs = [] if first is None else [weakref.ref(value) for value in memory]
        with below_autograd():
            try:
                return list(compiled.run(memory, scalars))
            except Exception as error:
                if first is None:
                    raise
                values = values_after_failure(compiled.run, first, error, inputs, scalars)
                raise HalfFailed(values, error) from None

    def program_for_replay(self, trace: CutTrace, frame: str, scalars: str = "memory") -> tuple[Compiled | None, str]:
        """The form of the trace's program that takes its scalars from memory, once there is one; else why not.
        `scalars`: "stages" for one that is launched in stages."""
        known, outcome = self.tiers.look_up(trace, compute_device(trace), frame, scalars)
        return known.compiled, known.failure if known.compiled is None else outcome

    def _look_up(self, trace: CutTrace, cause: str, frame: str) -> tuple[KnownTrace, str]:
        return self.tiers.look_up(trace, compute_device(trace), frame)

    def _note(self, known: KnownTrace, trace: CutTrace, frame: str) -> Divergence | None:
        """For the account: where a new trace diverges from those seen before, and a new program's library calls."""
        divergence = None
        if known.seen == 1:
            divergence = diagnosed("divergence", None, self._seen.divergence, trace, self._cuts, frame)
            if divergence is not None:
                account.divergences.append(divergence)
        self._seen.record_seen(known, trace, self._cuts)
        if known.compiled is not None and self._reported.get(known) is not known.compiled:
            self._reported[known] = known.compiled
            for fallback in known.compiled.fallbacks:
                account.externs[fallback.op, fallback.reason, fallback.frame, fallback.by_choice] += 1
        return divergence


def run_compiled(
    compiled: Compiled, trace: WhichTrace, memory: list[torch.Tensor], scalars: list[Any]
) -> list[torch.Tensor | BaseException]:
    """Run a trace's program: its outputs, or the error of each that has none. Empties `memory`. `trace`: the trace, or
    what makes it where the program fails."""
    count_run(compiled.run)
    inputs = list(map(weakref.ref, memory))
    try:
        return list(compiled.run(memory, scalars))
    except Exception as error:  # the program's own error: an index out of range, a bad extern argument
        whole = trace() if callable(trace) else trace
        return values_after_failure(compiled.run, whole, error, inputs, scalars)


def count_untold_runs() -> None:
    """Count the runs of programs that the native recorder made without Python."""
    for executable, runs in take_untold_runs():
        count_run(executable, runs)
        metrics.hits += runs


def count_run(run: Any, runs: int = 1) -> None:
    """Count so many runs of a program."""
    counts = run.counts
    metrics.kernels += runs * (counts.launches + counts.foreach_launches)
    for name, times in counts.extern_calls.items():  # `Counter.update` checks its argument's type first: slow
        metrics.extern_calls[name] += runs * times
    metrics.bytes += runs * counts.allocated_bytes


def print_event(event: CutEvent) -> None:
    """TORCHLAZY_DEBUG: 1 cuts, 2 timings, 3 fusion decisions, 4 source, 5 every pass."""
    out = sys.stderr
    print(
        debug_text.cut_line(
            event.number,
            event.cause,
            event.frame,
            ops=len(event.trace.entries),
            outcome=event.outcome,
            seconds=event.seconds,
        ),
        file=out,
    )
    compiled = event.compiled
    if compiled is None or event.outcome != "compiled":
        return
    from_stage = config.debug
    if from_stage >= 2:
        print(debug_text.timings_text(compiled.timings), file=out)
    if from_stage >= 3:
        print(compiled.texts()["fusion"], file=out)
    if from_stage >= 4:
        for source in compiled.program.kernels:
            print(source.text, file=out)
        print(compiled.run.source, file=out)
    if from_stage >= 5:
        print(debug_text.graph_text(compiled.aten, "aten"), file=out)
        print(debug_text.graph_text(compiled.prims, "prims"), file=out)
        print(compiled.texts()["loop_ir"], file=out)

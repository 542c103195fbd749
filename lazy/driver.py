"""What happens at a cut: look the trace's program up, run it, or run the recorded operators and compile.

Invariant: the user never sees a compiler error. What cannot be compiled runs operator by operator (tier 0), is counted under
`fallbacks`, and warned of once.
"""

from __future__ import annotations

import sys
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torchlazy.inductor.codegen import backends
from torchlazy.lazy import debug_text
from torchlazy.lazy.config import config
from torchlazy.lazy.failed_run import values_after_failure
from torchlazy.lazy.fx_graph import needed_entries
from torchlazy.lazy.pipeline import Compiled, CompileOptions, compile_trace
from torchlazy.lazy.report import metrics
from torchlazy.lazy.tier0 import run_entries
from torchlazy.lazy.torch_private import below_autograd
from torchlazy.lazy.trace import CutTrace
from torchlazy.runtime.kernel_cache import KernelCache, open_cache

_MAX_KNOWN = 1024  # trace structures remembered; those seen least are forgotten first


@dataclass(frozen=True)
class CutEvent:
    """One cut, for dumps and debug printing. `compiled` is None where tier 0 ran."""

    number: int
    cause: str
    frame: str
    trace: CutTrace
    outcome: str  # "hit", "compiled", "tier 0: ..."
    compiled: Compiled | None
    seconds: float


@dataclass
class _Known:
    """A trace structure that was seen: how often, and its program once there is one."""

    seen: int = 0
    compiled: Compiled | None = None
    failure: str = ""


class Driver:
    """Runs cut traces. `listeners` are told of each cut afterwards."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[CutEvent], None]] = []
        self._known: dict[tuple[Any, ...], _Known] = {}
        self._cache: KernelCache | None = None
        self._cuts = 0

    @property
    def cache(self) -> KernelCache:
        if self._cache is None:
            self._cache = open_cache()
        return self._cache

    def forget(self) -> None:
        """Drop every program of this process; kernels on disk stay."""
        self._known.clear()

    def __call__(
        self, trace: CutTrace, memory: list[torch.Tensor], scalars: list[Any], cause: str, frame: str
    ) -> list[torch.Tensor | BaseException]:
        start = time.perf_counter()
        known, outcome = self._look_up(trace, cause, frame)
        with below_autograd():
            if known.compiled is None:
                values = run_entries(trace, memory, scalars)
                metrics.extern_calls.update(str(trace.entries[i].op) for i in needed_entries(trace))
            else:
                values = _run_compiled(known.compiled, trace, memory, scalars)
        self._cuts += 1
        if self.listeners or config.debug:
            event = CutEvent(self._cuts, cause, frame, trace, outcome, known.compiled, time.perf_counter() - start)
            if config.debug:
                print_event(event)
            for listener in self.listeners:
                listener(event)
        return values

    def _look_up(self, trace: CutTrace, cause: str, frame: str) -> tuple[_Known, str]:
        options = CompileOptions(backends.language_for(_compute_device(trace)), config.precision)
        key = (options, trace.signature())
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known = {k: v for k, v in self._known.items() if v.compiled is not None and v.seen > 2}
            known = self._known[key] = _Known()
        known.seen += 1
        if known.compiled is not None:
            metrics.hits += 1
            return known, "hit"
        metrics.misses += 1
        if known.failure:
            return known, f"tier 0: {known.failure}"
        if known.seen == 1 and config.tiers == "on":
            return known, "tier 0: first sight"
        if not options.language:
            known.failure = f"no code generator for {_compute_device(trace)}"
            metrics.fallbacks[known.failure] += 1
            return known, f"tier 0: {known.failure}"
        return known, self._compile(known, trace, options, frame)

    def _compile(self, known: _Known, trace: CutTrace, options: CompileOptions, frame: str) -> str:
        start = time.perf_counter()
        try:
            with below_autograd():
                known.compiled = compile_trace(trace, options, self.cache)
        except Exception as error:
            if config.strict:
                raise
            known.failure = f"cannot compile: {type(error).__name__}"
            metrics.fallbacks[known.failure] += 1
            warnings.warn(
                f"torchlazy: a program of {len(trace.entries)} operators, cut at {frame or '?'}, cannot be compiled and "
                f"runs operator by operator: {type(error).__name__}: {str(error)[:500]}",
                RuntimeWarning,
                stacklevel=2,
            )
            return f"tier 0: {known.failure}"
        metrics.compiles += 1
        metrics.compile_seconds += time.perf_counter() - start
        for fallback in known.compiled.fallbacks:
            if fallback.reason:
                metrics.fallbacks[f"{fallback.op}: {fallback.reason}"] += 1
        return "compiled"


def _run_compiled(
    compiled: Compiled, trace: CutTrace, memory: list[torch.Tensor], scalars: list[Any]
) -> list[torch.Tensor | BaseException]:
    counts = compiled.run.counts
    metrics.kernels += counts.launches + counts.foreach_launches
    metrics.extern_calls.update(counts.extern_calls)
    metrics.bytes += counts.allocated_bytes
    inputs = [weakref.ref(value) for value in memory]
    try:
        return list(compiled.run(memory, scalars))
    except Exception as error:  # the program's own error: an index out of range, a bad extern argument
        return values_after_failure(compiled.run, trace, error, inputs, scalars)


def _compute_device(trace: CutTrace) -> str:
    """The device that the trace computes on: an accelerator if any value is on one."""
    devices = {geom.compute for _, geom in trace.outputs} | {geom.compute for _, geom in trace.inputs}
    return next((device for device in sorted(devices) if device != "cpu"), "cpu")


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

"""The way from a trace to a program, as a column of stages. Read this first.

Invariant: each stage takes the last one's result and returns a new one; nothing is changed in place. The same trace and
options give the same program in every process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from torch import fx
from torchlazy.autograd.recompute import recompute
from torchlazy.inductor import emit, lowering, printer, scheduler
from torchlazy.inductor.codegen import backends
from torchlazy.inductor.ir import LoopGraph
from torchlazy.lazy.fx_graph import trace_to_graph
from torchlazy.lazy.trace import CutTrace
from torchlazy.prims import graph_passes
from torchlazy.prims.builder import Fallback
from torchlazy.prims.decompose import decompose
from torchlazy.prims.verify import ATEN, PRIMS, verify
from torchlazy.runtime import executor, program_text, toolchain
from torchlazy.runtime.build_ahead import build_kernels
from torchlazy.runtime.collector import paused_collector
from torchlazy.runtime.kernel_cache import KernelCache
from torchlazy.runtime.program import Program
from torchlazy.runtime.program_store import StoredProgram
from torchlazy.runtime.target_facts import TritonTarget

T = TypeVar("T")


@dataclass(frozen=True)
class CompileOptions:
    """What a program depends on beside its trace."""

    language: str  # "cpp", "numba" or "triton"
    precision: str  # "fused" or "eager"
    recompute: str = "on"  # "on": backward computes again what is free inside its own kernels; "off"


@dataclass(frozen=True)
class Forms:
    """What a trace was on its way to a program."""

    aten: fx.Graph
    prims: fx.Graph
    loops: LoopGraph
    schedule: scheduler.Schedule


@dataclass(frozen=True)
class Planned:
    """A program whose kernels are not compiled yet."""

    program: Program
    forms: Forms
    fallbacks: tuple[Fallback, ...]
    timings: dict[str, float]


@dataclass(frozen=True)
class Compiled:
    """A loaded program. The forms that it went through are made again when somebody looks at them: a program that
    another process compiled came without them, and they are large."""

    run: executor.Executable
    program: Program
    trace: CutTrace
    options: CompileOptions
    fallbacks: tuple[Fallback, ...]
    timings: dict[str, float] = field(default_factory=dict)

    @cached_property
    def forms(self) -> Forms:
        return plan_trace(self.trace, self.options).forms

    @property
    def aten(self) -> fx.Graph:
        return self.forms.aten

    @property
    def prims(self) -> fx.Graph:
        return self.forms.prims

    def texts(self) -> dict[str, str]:
        """The later stages as text, for dumps and debug printing."""
        return {
            "loop_ir": printer.print_loop_graph(self.forms.loops),
            "fusion": scheduler.format_schedule(self.forms.schedule),
            "program": program_text.format_program(self.program),
            "memory": program_text.format_memory(self.program),
        }


@paused_collector()
def plan_trace(trace: CutTrace, options: CompileOptions) -> Planned:
    """All stages up to the program, in order."""
    timings: dict[str, float] = {}
    fallbacks: list[Fallback] = []
    backend = backends.backend(options.language)
    donations = {out: f"in{given}" for out, given in trace.donations}

    aten = _timed(timings, "aten", trace_to_graph, trace)
    _timed(timings, "verify aten", verify, aten, ATEN)
    graph = _timed(timings, "prims", decompose, aten, report=fallbacks)
    graph = _timed(timings, "passes", graph_passes.run_passes, graph, options.precision)
    if options.recompute == "on":
        graph = _timed(timings, "recompute", recompute, graph)
    _timed(timings, "verify prims", verify, graph, PRIMS)
    loops = _timed(timings, "loop_ir", lowering.lower, graph, donations=donations)
    schedule = _timed(timings, "fusion", scheduler.schedule, loops, scheduler.ScheduleOptions())
    program = _timed(timings, "program", emit.emit_program, schedule, loops, backend.emit)
    return Planned(program, Forms(aten, graph, loops, schedule), tuple(fallbacks), timings)


def compile_trace(trace: CutTrace, options: CompileOptions, cache: KernelCache) -> Compiled:
    """All stages, in this process."""
    planned = plan_trace(trace, options)
    return _load(planned.program, trace, options, cache, planned.fallbacks, planned.timings)


def compile_ahead(
    trace: CutTrace, options: CompileOptions, cache: KernelCache, target: TritonTarget | None
) -> tuple[StoredProgram, dict[str, float]]:
    """All stages but the loading, for another process, and the seconds of each; kernels go to the disk cache."""
    planned = plan_trace(trace, options)
    preludes = backends.backend(options.language).preludes
    _timed(planned.timings, "kernels", build_kernels, planned.program, cache=cache, preludes=preludes, target=target)
    return stored_form(planned.program, planned.fallbacks, planned.timings), planned.timings


def stored_form(program: Program, fallbacks: Sequence[Fallback], timings: dict[str, float]) -> StoredProgram:
    """A program as the store keeps it."""
    plain = tuple((f.op, f.reason, f.frame, f.by_choice) for f in fallbacks)
    return StoredProgram(program, plain, sum(timings.values()))


def load_stored(
    stored: StoredProgram,
    trace: CutTrace,
    options: CompileOptions,
    cache: KernelCache,
    timings: dict[str, float] | None = None,
) -> Compiled:
    """A program that another process compiled from this trace, or from one of the same structure."""
    fallbacks = tuple(Fallback(*facts) for facts in stored.fallbacks)
    return _load(stored.program, trace, options, cache, fallbacks, dict(timings or {}))


def _load(
    program: Program,
    trace: CutTrace,
    options: CompileOptions,
    cache: KernelCache,
    fallbacks: tuple[Fallback, ...],
    timings: dict[str, float],
) -> Compiled:
    preludes = backends.backend(options.language).preludes
    stage = "kernels" if "kernels" not in timings else "load kernels"
    kernels = _timed(timings, stage, toolchain.load_kernels, program.kernels, cache=cache, preludes=preludes)
    run = _timed(timings, "load", executor.load, program, kernels)
    return Compiled(run, program, trace, options, fallbacks, timings)


def _timed(timings: dict[str, float], stage: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    start = time.perf_counter()
    result = function(*args, **kwargs)
    timings[stage] = time.perf_counter() - start
    return result

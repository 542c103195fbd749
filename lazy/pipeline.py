"""The way from a trace to a program, as a column of stages. Read this first.

Invariant: each stage takes the last one's result and returns a new one; nothing is changed in place, and every stage's
result is kept in `Compiled` for dumps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import fx

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
from torchlazy.runtime.kernel_cache import KernelCache
from torchlazy.runtime.program import Program

T = TypeVar("T")


@dataclass(frozen=True)
class CompileOptions:
    """What a program depends on beside its trace."""

    language: str  # "cpp", "numba" or "triton"
    precision: str  # "fused" or "eager"


@dataclass(frozen=True)
class Compiled:
    """A loaded program with every form that it went through."""

    run: executor.Executable
    program: Program
    aten: fx.Graph
    prims: fx.Graph
    loops: LoopGraph
    schedule: scheduler.Schedule
    fallbacks: tuple[Fallback, ...]
    timings: dict[str, float] = field(default_factory=dict)


def compile_trace(trace: CutTrace, options: CompileOptions, cache: KernelCache) -> Compiled:
    """All stages, in order."""
    timings: dict[str, float] = {}
    fallbacks: list[Fallback] = []
    backend = backends.backend(options.language)
    donations = {out: f"in{given}" for out, given in trace.donations}

    aten = _timed(timings, "aten", trace_to_graph, trace)
    _timed(timings, "verify aten", verify, aten, ATEN)
    graph = _timed(timings, "prims", decompose, aten, report=fallbacks)
    graph = _timed(timings, "passes", graph_passes.run_passes, graph, options.precision)
    _timed(timings, "verify prims", verify, graph, PRIMS)
    loops = _timed(timings, "loop_ir", lowering.lower, graph, donations=donations)
    schedule = _timed(timings, "fusion", scheduler.schedule, loops, scheduler.ScheduleOptions())
    program = _timed(timings, "program", emit.emit_program, schedule, loops, backend.emit)
    kernels = _timed(timings, "kernels", toolchain.load_kernels, program.kernels, cache=cache, preludes=backend.preludes)
    run = _timed(timings, "load", executor.load, program, kernels)
    return Compiled(run, program, aten, graph, loops, schedule, tuple(fallbacks), timings)


def _timed(timings: dict[str, float], stage: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    start = time.perf_counter()
    result = function(*args, **kwargs)
    timings[stage] = time.perf_counter() - start
    return result


def describe(compiled: Compiled) -> dict[str, str]:
    """Texts of the later stages, for dumps."""
    return {
        "loop_ir": printer.print_loop_graph(compiled.loops),
        "fusion": scheduler.format_schedule(compiled.schedule),
        "program": program_text.format_program(compiled.program),
    }

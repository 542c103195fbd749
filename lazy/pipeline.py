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

try:
    from torchlazy.prims import graph_passes
except ImportError:

    class graph_passes:
        run_passes = staticmethod(lambda g, p: g)


from torchlazy.prims.builder import Fallback
from torchlazy.prims.decompose import decompose

try:
    from torchlazy.prims.verify import ATEN, PRIMS, verify
except ImportError:
    ATEN = PRIMS = None
    verify = lambda *a: None
from torchlazy.runtime import executor, toolchain

try:
    from torchlazy.runtime import program_text
except ImportError:
    pass
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

    def texts(self) -> dict[str, str]:
        """The later stages as text, for dumps and debug printing."""
        return {
            "loop_ir": printer.print_loop_graph(self.loops),
            "fusion": scheduler.format_schedule(self.schedule),
            "program": program_text.format_program(self.program),
            "memory": program_text.format_memory(self.program),
        }


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
    kernels = _timed(
        timings, "kernels", toolchain.load_kernels, program.kernels, cache=cache, preludes=backend.preludes
    )
    run = _timed(timings, "load", executor.load, program, kernels)
    return Compiled(run, program, aten, graph, loops, schedule, tuple(fallbacks), timings)


def _timed(timings: dict[str, float], stage: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    start = time.perf_counter()
    result = function(*args, **kwargs)
    timings[stage] = time.perf_counter() - start
    return result

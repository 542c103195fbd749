"""The way from a trace to a program, as a column of stages. Read this first.

Invariant: each stage takes the last one's result and returns a new one; nothing is changed in place. The same trace and
options give the same program in every process.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx
from torchlazy.autograd.recompute import format_plan, recompute
from torchlazy.inductor import emit, lowering, scheduler
from torchlazy.inductor.codegen import backends, languages
from torchlazy.inductor.ir import LoopGraph
from torchlazy.lazy.fx_graph import trace_to_graph
from torchlazy.lazy.joined_trace import half_of, overwritten
from torchlazy.lazy.loaded import Compiled, CompileOptions, load_program, load_stored, stored_form, timed
from torchlazy.lazy.memory_budget import budget_of
from torchlazy.lazy.trace import CutTrace, compute_device
from torchlazy.prims import graph_passes
from torchlazy.prims.conv_forms import other_forms
from torchlazy.prims.conv_layout import channels_last_convolutions
from torchlazy.prims.decompose import decompose
from torchlazy.prims.fallback import Fallback
from torchlazy.prims.pad_products import pad_products
from torchlazy.prims.scalar_memory import scalars_in_memory
from torchlazy.prims.verify import ATEN, PRIMS, verify
from torchlazy.runtime.build_ahead import build_kernels
from torchlazy.runtime.collector import paused_collector
from torchlazy.runtime.kernel_cache import KernelCache
from torchlazy.runtime.program import Program
from torchlazy.runtime.program_store import StoredProgram
from torchlazy.runtime.target_facts import TritonTarget


@dataclass(frozen=True)
class Forms:
    """What a trace was on its way to a program."""

    aten: fx.Graph
    prims: fx.Graph
    loops: LoopGraph
    schedule: scheduler.Schedule
    held: str = ""  # what backward keeps of forward and what it computes again, with reasons


@dataclass(frozen=True)
class Planned:
    """A program whose kernels are not compiled yet."""

    program: Program
    forms: Forms
    fallbacks: tuple[Fallback, ...]
    timings: dict[str, float]


@paused_collector()
def plan_trace(trace: CutTrace, options: CompileOptions) -> Planned:
    """All stages up to the program, in order."""
    timings: dict[str, float] = {}
    fallbacks: list[Fallback] = []
    backend = backends.backend(options.language)
    half = trace.half
    donations = {out: f"in{given}" for out, given in trace.donations}

    aten = timed(timings, "aten", trace_to_graph, trace, backward=None if half is None else half.entries)
    timed(timings, "verify aten", verify, aten, ATEN)
    graph = timed(timings, "prims", decompose, aten, report=fallbacks)
    graph = timed(timings, "passes", graph_passes.run_passes, graph, options.precision)
    plan = None
    if options.recompute != "off":
        lost = () if half is None else overwritten(trace)
        graph, plan = timed(timings, "recompute", recompute, graph, budget_of(options.recompute), lost=lost)
    graph = timed(timings, "convolutions", other_forms, graph)
    graph = timed(timings, "layout", channels_last_convolutions, graph)
    graph = timed(timings, "products", pad_products, graph)
    if half is not None:
        graph, donations = timed(timings, "halves", half_of, graph, trace)
    timed(timings, "verify prims", verify, graph, PRIMS)
    if options.scalars == "memory":
        graph = timed(timings, "scalars", scalars_in_memory, graph, compute_device(trace))
    loops = timed(timings, "loop_ir", lowering.lower, graph, donations=donations)
    schedule = timed(timings, "fusion", scheduler.schedule, loops, scheduler.ScheduleOptions())
    program = timed(timings, "program", emit.emit_program, schedule, loops, backend.emit)
    return Planned(program, Forms(aten, graph, loops, schedule, format_plan(plan)), tuple(fallbacks), timings)


def compile_trace(trace: CutTrace, options: CompileOptions, cache: KernelCache) -> Compiled:
    """All stages, in this process."""
    planned = plan_trace(trace, options)
    return load_program(planned.program, trace, options, cache, planned.fallbacks, planned.timings)


def compile_ahead(
    trace: CutTrace, options: CompileOptions, cache: KernelCache, target: TritonTarget | None
) -> tuple[StoredProgram, dict[str, float]]:
    """All stages but the loading, for another process, and the seconds of each; kernels go to the disk cache."""
    planned = plan_trace(trace, options)
    preludes = languages.preludes(options.language)
    timed(planned.timings, "kernels", build_kernels, planned.program, cache=cache, preludes=preludes, target=target)
    return stored_form(planned.program, planned.fallbacks, planned.timings), planned.timings


__all__ = [
    "CompileOptions",
    "Compiled",
    "Forms",
    "Planned",
    "compile_ahead",
    "compile_trace",
    "load_stored",
    "plan_trace",
    "stored_form",
]

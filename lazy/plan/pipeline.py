"""The pipeline from a trace to a program, one function per stage. Read this first.

A joined trace has two halves: what planning one of them found is kept for the other one, which is requested next.

Invariant: each stage takes the last one's result and returns a new one; nothing is changed in place. The same trace and
options give the same program in every process. Nothing is kept between calls but what was found for the other half,
until that takes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from torch import fx
from torchlazy.autograd.recompute import format_plan, recompute
from torchlazy.inductor import emit, lowering, scheduler
from torchlazy.inductor.codegen import backends, languages
from torchlazy.inductor.fingerprint import EmitOnce
from torchlazy.inductor.ir import LoopGraph
from torchlazy.lazy.config import budget_of
from torchlazy.lazy.plan.join_schedules import HalfSchedule, join_loops, lower_both, schedule_both, split_schedule
from torchlazy.lazy.plan.join_traces import halves_of, overwritten
from torchlazy.lazy.plan.layers.names import NotPeriodic
from torchlazy.lazy.plan.layers.program import check_loops, fallbacks_of, first_that_repeats, long_interface
from torchlazy.lazy.plan.layers.shorten import shorten
from torchlazy.lazy.plan.layers.slot_places import SlotPlaces
from torchlazy.lazy.plan.loaded import Compiled, CompileOptions, load_program, load_stored, stored_form, timed
from torchlazy.lazy.trace.to_fx import trace_to_graph
from torchlazy.lazy.trace.trace import CutTrace, Half, compute_device
from torchlazy.prims.decompose import decompose
from torchlazy.prims.fallback import Fallback
from torchlazy.prims.passes import graph_passes
from torchlazy.prims.passes.conv_forms import other_forms
from torchlazy.prims.passes.conv_layout import channels_last_convolutions
from torchlazy.prims.passes.pad_products import pad_products
from torchlazy.prims.scalar_memory import ScalarStaysArgument, scalars_in_memory
from torchlazy.prims.verify import ATEN, PRIMS, verify
from torchlazy.runtime.collector import paused_collector
from torchlazy.runtime.program.program import Program
from torchlazy.runtime.program.store import StoredProgram
from torchlazy.runtime.toolchains.build_ahead import build_kernels
from torchlazy.runtime.toolchains.kernel_cache import KernelCache
from torchlazy.runtime.toolchains.target_facts import TritonTarget

Found = TypeVar("Found")

_kept: dict[str, tuple[CompileOptions, Any, Any]] = {}
"""By stage: the options and the signature of the half that will take it, and what was found."""


def for_both(stage: str, trace: CutTrace, half: Half, options: CompileOptions, find: Callable[[], Found]) -> Found:
    """What `find` gives for both halves of the trace; not called where it just was for the other half."""
    kept = _kept.pop(stage, None)
    if kept is not None and kept[0] == options and kept[1] == trace.signature():
        found: Found = kept[2]
        return found
    found = find()
    other = replace(trace, half=replace(half, is_second=not half.is_second))
    _kept[stage] = options, other.signature(), found
    return found


log = logging.getLogger("torchlazy.lazy")


@dataclass(frozen=True)
class Forms:
    """What a trace was on its way to a program."""

    aten: fx.Graph
    prims: fx.Graph
    loops: LoopGraph
    schedule: scheduler.Schedule
    held: str = ""  # what backward keeps of forward and what it rematerializes, with reasons


@dataclass(frozen=True)
class Planned:
    """A program whose kernels are not compiled yet."""

    program: Program
    forms: Forms
    fallbacks: tuple[Fallback, ...]
    timings: dict[str, float]


@dataclass(frozen=True)
class PlannedAhead:
    """A program without the forms that its trace had on the way."""

    program: Program
    fallbacks: tuple[Fallback, ...]
    timings: dict[str, float]


@dataclass(frozen=True)
class _Graphs:
    """A trace as a graph, of ATen operators and of primitives; joined traces are not split yet."""

    aten: fx.Graph
    prims: fx.Graph
    held: str
    fallbacks: tuple[Fallback, ...]


@dataclass(frozen=True)
class _Repeated:
    """What programs of many equal layers are emitted from: one, or one of each half of a joined trace."""

    programs: tuple[HalfSchedule, ...]
    emit_once: EmitOnce
    fallbacks: tuple[Fallback, ...]

    def of(self, trace: CutTrace) -> HalfSchedule:
        return self.programs[0 if trace.half is None else int(trace.half.is_second)]


def emitting(options: CompileOptions) -> emit.EmitOptions:
    """In stages no kernel runs earlier than it must, to share a launch: its inputs may not be there yet."""
    return emit.EmitOptions(hoisted_bytes=0) if options.in_stages else emit.EmitOptions()


@paused_collector()
def plan_trace(trace: CutTrace, options: CompileOptions) -> Planned:
    """All stages up to the program, in order."""
    timings: dict[str, float] = {}
    fallbacks: list[Fallback] = []
    forms = _plan_schedule(trace, options, timings, fallbacks)
    backend = backends.backend(options.language)
    program = timed(timings, "program", emit.emit_program, forms.schedule, forms.loops, backend.emit, emitting(options))
    return Planned(program, forms, tuple(fallbacks), timings)


def _plan_schedule(
    trace: CutTrace,
    options: CompileOptions,
    timings: dict[str, float],
    fallbacks: list[Fallback],
    places: SlotPlaces | None = None,
    look: Callable[[LoopGraph], None] | None = None,
) -> Forms:
    """All stages up to the schedule; `places` follows the trace's slots on the way, and `look`, which may raise, is
    called before the schedule is made. For a joined trace: the half that it names, with `places` of both."""
    half = trace.half
    plan_graphs = partial(_plan_graphs, trace, options, timings, places)
    if half is None or places is not None:
        graphs = plan_graphs()
    else:
        graphs = for_both("graphs", trace, half, options, plan_graphs)
    fallbacks.extend(graphs.fallbacks)
    if half is not None and places is not None:
        return _schedule_both(trace, half, graphs, options, timings, places, look)
    graph, donations = graphs.prims, {out: f"in{given}" for out, given in trace.donations}
    if half is not None:
        graph, donations = timed(timings, "halves", halves_of, graph, trace).of(trace)
    timed(timings, "verify prims", verify, graph, PRIMS)
    if options.in_memory:
        graph = timed(timings, "scalars", scalars_in_memory, graph, compute_device(trace))
    told = {} if places is None else {"values": places.lowered, "partials": places.partials}
    loops = timed(timings, "loop_ir", lowering.lower, graph, donations=donations, **told)
    if look is not None:
        look(loops)
    schedule = timed(
        timings, "fusion", scheduler.schedule, loops, scheduler.ScheduleOptions(in_stages=options.in_stages)
    )
    return Forms(graphs.aten, graph, loops, schedule, graphs.held)


def _plan_graphs(
    trace: CutTrace, options: CompileOptions, timings: dict[str, float], places: SlotPlaces | None
) -> _Graphs:
    """All stages before the graph of a joined trace is split."""
    half = trace.half
    fallbacks: list[Fallback] = []
    slots, became = (None, None) if places is None else (places.aten, places.prims)
    begins = None if half is None else half.entries
    aten = timed(timings, "aten", trace_to_graph, trace, backward=begins, nodes=slots)
    timed(timings, "verify aten", verify, aten, ATEN)
    graph = timed(timings, "prims", decompose, aten, report=fallbacks, values=became)
    if places is not None:
        places.mark()
    graph = timed(timings, "passes", graph_passes.run_passes, graph, options.precision)
    plan = None
    if options.recompute != "off":
        lost = () if half is None else overwritten(trace)
        graph, plan = timed(timings, "recompute", recompute, graph, budget_of(options.recompute), lost=lost)
    graph = timed(timings, "convolutions", other_forms, graph)
    graph = timed(timings, "layout", channels_last_convolutions, graph)
    graph = timed(timings, "products", pad_products, graph)
    return _Graphs(aten, graph, format_plan(plan), tuple(fallbacks))


def _schedule_both(
    trace: CutTrace, half: Half, graphs: _Graphs, options: CompileOptions, timings: dict[str, float],
    places: SlotPlaces, look: Callable[[LoopGraph], None] | None,
) -> Forms:  # fmt: skip
    """The rest of `_plan_schedule` for both halves of a joined trace, as one schedule."""
    places.count(graphs.prims)
    halves = timed(timings, "halves", halves_of, graphs.prims, trace)
    for graph in (halves.first, halves.second):
        timed(timings, "verify prims", verify, graph, PRIMS)
    if options.in_memory:
        device = compute_device(trace)
        first, second = (timed(timings, "scalars", scalars_in_memory, g, device) for g in (halves.first, halves.second))
        halves = replace(halves, first=first, second=second)
    early, late = timed(timings, "loop_ir", lower_both, halves, half.outputs, places)
    loops = join_loops(early, late)
    if look is not None:
        look(loops)
    schedule = timed(timings, "fusion", schedule_both, early, late, half.outputs)
    return Forms(graphs.aten, graphs.prims, loops, schedule, graphs.held)


@paused_collector()
def plan_repeated(trace: CutTrace, options: CompileOptions) -> PlannedAhead | None:
    """The program of a trace of many equal layers, planned through a shorter one; None where there are none, or where
    it cannot be proved to be the program that `plan_trace` gives."""
    timings: dict[str, float] = {}
    if options.recompute not in ("on", "off"):
        return None  # a budget is for the whole trace
    repeat = partial(_repeat, trace, options, timings)
    found = repeat() if trace.half is None else for_both("repeated", trace, trace.half, options, repeat)
    if found is None:
        return None
    own = found.of(trace)
    program = timed(
        timings, "program", emit.emit_program, own.schedule, own.interface, found.emit_once, emitting(options)
    )
    return PlannedAhead(program, found.fallbacks, timings)


def _repeat(trace: CutTrace, options: CompileOptions, timings: dict[str, float]) -> _Repeated | None:
    in_memory = options.in_memory
    attempts = shorten(trace)
    while (traces := timed(timings, "shorten", next, attempts, None)) is not None:
        fallbacks: list[Fallback] = []
        places = SlotPlaces(traces.short, traces.short_calls)
        emit_once = EmitOnce(backends.backend(options.language).emit)
        try:
            look = partial(check_loops, traces)
            forms = _plan_schedule(traces.short, options, timings, fallbacks, places, look)
            told = forms.schedule, emit_once, places
            traces, schedule = timed(timings, "repeat", first_that_repeats, traces, *told)
            more = fallbacks_of(traces, fallbacks)
            if trace.half is None:
                programs: tuple[HalfSchedule, ...] = (HalfSchedule(schedule, long_interface(trace, in_memory)),)
            else:
                programs = timed(timings, "repeat", split_schedule, schedule, trace, in_memory=in_memory)
        except NotPeriodic as reason:
            log.debug("leaving out %d entries: %s", len(trace.entries) - len(traces.short.entries), reason)
            continue
        return _Repeated(programs, emit_once, more)
    return None


def _plan_repeated_or_not(trace: CutTrace, options: CompileOptions) -> PlannedAhead | None:
    """`plan_repeated`; if that fails with an error, the whole trace is planned instead."""
    try:
        return plan_repeated(trace, options)
    except ScalarStaysArgument:
        raise  # nor can the whole be planned
    except Exception:
        log.warning("planning by equal layers failed, all of them are planned", exc_info=True)
        return None


def compile_trace(trace: CutTrace, options: CompileOptions, cache: KernelCache) -> Compiled:
    """All stages, in this process."""
    planned = _plan_repeated_or_not(trace, options) or plan_trace(trace, options)
    return load_program(planned.program, trace, options, cache, planned.fallbacks, planned.timings)


def compile_ahead(
    trace: CutTrace, options: CompileOptions, cache: KernelCache, target: TritonTarget | None
) -> tuple[StoredProgram, dict[str, float]]:
    """All stages but the loading, for another process, and the seconds of each; kernels go to the disk cache."""
    planned = _plan_repeated_or_not(trace, options) or plan_trace(trace, options)
    preludes = languages.preludes(options.language)
    timed(planned.timings, "kernels", build_kernels, planned.program, cache=cache, preludes=preludes, target=target)
    return stored_form(planned.program, planned.fallbacks, planned.timings), planned.timings


__all__ = [
    "CompileOptions",
    "Compiled",
    "Forms",
    "Planned",
    "PlannedAhead",
    "compile_ahead",
    "compile_trace",
    "load_stored",
    "plan_repeated",
    "plan_trace",
    "stored_form",
]

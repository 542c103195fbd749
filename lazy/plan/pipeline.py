"""The pipeline from a trace to a program, one function per stage. Read this first.

A joined trace has two halves: what planning one of them found is kept for the other one, which is requested next.

Invariant: each stage takes the last one's result and returns a new one; nothing is changed in place. The same trace and
options give the same program in every process. Nothing is kept between calls but what was found for the other half,
until that takes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from torch import fx
from torchlazy.autograd.recompute import format_plan, recompute
from torchlazy.inductor import emit, lowering, scheduler
from torchlazy.inductor.codegen import backends, languages
from torchlazy.inductor.ir import LoopGraph
from torchlazy.lazy.config import budget_of
from torchlazy.lazy.plan.join_traces import halves_of, overwritten
from torchlazy.lazy.plan.layers.link import Unlinkable, fallbacks_at, interface, link
from torchlazy.lazy.plan.layers.units import Unit, split
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
class PlannedByLayers:
    """A program whose kernels are not compiled yet, and the last of the forms that its trace had on the way."""

    program: Program
    loops: LoopGraph
    schedule: scheduler.Schedule
    fallbacks: tuple[Fallback, ...]
    timings: dict[str, float]


@dataclass(frozen=True)
class _Lowered:
    """A trace as loops; of a joined trace `prims` and `loops` of both halves."""

    aten: fx.Graph
    prims: tuple[fx.Graph, ...]
    loops: tuple[LoopGraph, ...]
    held: str
    fallbacks: tuple[Fallback, ...]


@paused_collector()
def plan_trace(trace: CutTrace, options: CompileOptions) -> Planned:
    """All stages up to the program, in order, for the whole trace at once."""
    timings: dict[str, float] = {}
    lower = partial(_lower, trace, options, timings)
    lowered = lower() if trace.half is None else for_both("lowered", trace, trace.half, options, lower)
    side = _side(trace)
    schedule, program = _emit(lowered.loops[side], options, timings)
    forms = Forms(lowered.aten, lowered.prims[side], lowered.loops[side], schedule, lowered.held)
    return Planned(program, forms, lowered.fallbacks, timings)


@paused_collector()
def plan_by_layers(trace: CutTrace, options: CompileOptions) -> PlannedByLayers | None:
    """The same for a trace of many equal layers: those that are equal are lowered once, and their loops linked. None
    where there are none."""
    timings: dict[str, float] = {}
    if options.recompute not in ("on", "off"):
        return None  # a budget is for the whole trace
    lower = partial(_lower_by_layers, trace, options, timings)
    lowered = lower() if trace.half is None else for_both("by layers", trace, trace.half, options, lower)
    if lowered is None:
        return None
    linked, fallbacks = lowered
    loops = linked[_side(trace)]
    schedule, program = _emit(loops, options, timings)
    return PlannedByLayers(program, loops, schedule, fallbacks, timings)


def forms_of(trace: CutTrace, options: CompileOptions) -> Forms:
    """What a trace was on its way to the program that it has: by layers the graphs are those of the whole."""
    planned, whole = _plan_by_layers_or_not(trace, options), plan_trace(trace, options).forms
    return whole if isinstance(planned, Planned) else replace(whole, loops=planned.loops, schedule=planned.schedule)


def _side(trace: CutTrace) -> int:
    return 0 if trace.half is None else int(trace.half.is_second)


def _lower(
    trace: CutTrace, options: CompileOptions, timings: dict[str, float], backward: int | None = None, device: str = ""
) -> _Lowered:
    """All stages up to the loops. `backward`: where it begins, if that is not to be searched; `device`: where numbers
    lie, if not on the trace's."""
    half = trace.half
    fallbacks: list[Fallback] = []
    begins = backward if half is None else half.entries
    aten = timed(timings, "aten", trace_to_graph, trace, backward=begins)
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
    if half is None:
        sides = [(graph, {output: f"in{given}" for output, given in trace.donations})]
    else:
        halves = timed(timings, "halves", halves_of, graph, trace)
        sides = [(halves.first, halves.early), (halves.second, halves.late)]
    prims, loops = [], []
    for one, donations in sides:
        timed(timings, "verify prims", verify, one, PRIMS)
        if options.in_memory:
            one = timed(timings, "scalars", scalars_in_memory, one, device or compute_device(trace))
        prims.append(one)
        loops.append(timed(timings, "loop_ir", lowering.lower, one, donations=donations))
    return _Lowered(aten, tuple(prims), tuple(loops), format_plan(plan), tuple(fallbacks))


def _lower_by_layers(
    trace: CutTrace, options: CompileOptions, timings: dict[str, float]
) -> tuple[tuple[LoopGraph, ...], tuple[Fallback, ...]] | None:
    found = timed(timings, "layers", split, trace)
    if isinstance(found, str):
        log.debug("planned as a whole: %s", found)
        return None
    known: dict[Hashable, tuple[Unit, _Lowered]] = {}
    lowered: list[tuple[Unit, tuple[LoopGraph, ...]]] = []
    fallbacks: list[Fallback] = []
    for unit in found.units:
        if unit.key() not in known:
            known[unit.key()] = unit, _lower(unit.trace, options, timings, unit.backward, compute_device(trace))
        like, of = known[unit.key()]
        lowered.append((like, of.loops))
        fallbacks += fallbacks_at(unit, like, of.fallbacks)
    try:
        given = interface(trace, in_memory=options.in_memory)
        return timed(timings, "link", link, trace, found, lowered, given), tuple(fallbacks)
    except Unlinkable as reason:
        log.debug("planned as a whole: %s", reason)
        return None


def _emit(loops: LoopGraph, options: CompileOptions, timings: dict[str, float]) -> tuple[scheduler.Schedule, Program]:
    """In stages no kernel runs earlier than it must, to share a launch: its inputs may not be there yet."""
    how = scheduler.ScheduleOptions(in_stages=options.in_stages)
    schedule = timed(timings, "fusion", scheduler.schedule, loops, how)
    emitting = emit.EmitOptions(hoisted_bytes=0) if options.in_stages else emit.EmitOptions()
    write = backends.backend(options.language).emit
    return schedule, timed(timings, "program", emit.emit_program, schedule, loops, write, emitting)


def _plan_by_layers_or_not(trace: CutTrace, options: CompileOptions) -> PlannedByLayers | Planned:
    """`plan_by_layers`; where there are none, or that fails with an error, the whole trace at once."""
    try:
        planned = plan_by_layers(trace, options)
    except ScalarStaysArgument:
        raise  # nor can the whole be planned
    except Exception:
        log.warning("planning by equal layers failed, all of them are planned", exc_info=True)
        planned = None
    return planned or plan_trace(trace, options)


def compile_trace(trace: CutTrace, options: CompileOptions, cache: KernelCache) -> Compiled:
    """All stages, in this process."""
    planned = _plan_by_layers_or_not(trace, options)
    return load_program(planned.program, trace, options, cache, planned.fallbacks, planned.timings)


def compile_ahead(
    trace: CutTrace, options: CompileOptions, cache: KernelCache, target: TritonTarget | None
) -> tuple[StoredProgram, dict[str, float]]:
    """All stages but the loading, for another process, and the seconds of each; kernels go to the disk cache."""
    planned = _plan_by_layers_or_not(trace, options)
    preludes = languages.preludes(options.language)
    timed(planned.timings, "kernels", build_kernels, planned.program, cache=cache, preludes=preludes, target=target)
    return stored_form(planned.program, planned.fallbacks, planned.timings), planned.timings


__all__ = [
    "CompileOptions",
    "Compiled",
    "Forms",
    "Planned",
    "PlannedByLayers",
    "compile_ahead",
    "compile_trace",
    "forms_of",
    "load_stored",
    "plan_by_layers",
    "plan_trace",
    "stored_form",
]

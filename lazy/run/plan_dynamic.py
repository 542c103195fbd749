"""Plans a program for all sizes (a template) from two samples of one trace: planned twice, kept if both plans agree.

The second planning has the other sample's values, and the first one's as hints for heuristics. Where some code used a
plain number without recording it, the two programs differ, and there is no template.

Invariant: a template is right for every trace that its matcher accepts and whose symbols fulfil its guards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeAlias

from torchlazy.inductor.codegen import languages
from torchlazy.lazy.numbers.matcher import UnifiedTrace
from torchlazy.lazy.numbers.unify import CannotUnify, unify
from torchlazy.lazy.plan.loaded import CompileOptions, stored_form, timed
from torchlazy.lazy.plan.pipeline import Planned, plan_trace
from torchlazy.lazy.trace.skeleton import DecomposedTrace, decompose_trace, skeleton_digest
from torchlazy.lazy.trace.trace import CutTrace
from torchlazy.prims.size_expr import Symbol
from torchlazy.prims.size_int import SizeSpace
from torchlazy.runtime.program.program import KernelSource, Program
from torchlazy.runtime.program.store import StoredProgram
from torchlazy.runtime.program.symbolic import finish, guard_function, guard_text
from torchlazy.runtime.toolchains.build_ahead import build_kernels
from torchlazy.runtime.toolchains.kernel_cache import KernelCache
from torchlazy.runtime.toolchains.target_facts import TritonTarget

NUMBERS, SKELETON = "numbers", "skeleton"  # notes of a stored template: its `UnifiedTrace`; whose template it is


_REMEDY = "keep that number the same from call to call, or leave it: such sizes are compiled one by one"


class NoTemplate(Exception):
    """These samples have no program for all sizes; the message says why, where, and what to do."""


Sample: TypeAlias = "tuple[CutTrace, DecomposedTrace]"


def plan_some(samples: Sequence[Sample], options: CompileOptions) -> tuple[Planned, UnifiedTrace]:
    """A template that serves the last sample and as many of the others as possible; NoTemplate where there is none."""
    try:
        return plan_template(samples, options)
    except NoTemplate as error:
        reason = error
    for other in reversed(samples[:-1] if len(samples) > 2 else ()):
        try:
            return plan_template([other, samples[-1]], options)
        except NoTemplate:
            continue
    raise reason


def plan_template(samples: Sequence[Sample], options: CompileOptions) -> tuple[Planned, UnifiedTrace]:
    """The program that serves all samples and what else its guards admit, and what their numbers are."""
    traces = [trace for trace, _ in samples]
    try:
        unified = unify(samples)
    except CannotUnify as error:
        raise NoTemplate(str(error)) from error
    values = [unified.symbols_of(parts.ints) for _, parts in samples]
    hints = values[-1]
    planned, space = _plan(unified, traces[-1], values[-1], hints, options)
    program = finish(planned.program, space)
    holds = guard_function(program)
    for sample in values:
        if not holds(*sample):
            raise NoTemplate(_refusal(space, sample))
    others = [sample for sample in values if sample != hints]
    if others:  # else the samples differ in floats only
        other, other_space = _plan(unified, traces[-1], others[0], hints, options)
        difference = _difference(program, finish(other.program, other_space))
        if difference:
            raise NoTemplate(f"{difference}; {_pins(space)}; {_REMEDY}")
    return replace(planned, program=program), unified


def compile_template_ahead(
    traces: Sequence[CutTrace], options: CompileOptions, cache: KernelCache, target: TritonTarget | None
) -> tuple[StoredProgram, dict[str, float]]:
    """As `pipeline.compile_ahead`, of a template from these samples; its numbers stand among the program's notes."""
    samples = [(trace, decompose_trace(trace)) for trace in traces]
    planned, unified = plan_some(samples, options)
    preludes = languages.preludes(options.language)
    timed(planned.timings, "kernels", build_kernels, planned.program, cache=cache, preludes=preludes, target=target)
    program = with_numbers(planned.program, unified, samples[-1][1])
    return stored_form(program, planned.fallbacks, planned.timings), planned.timings


def with_numbers(program: Program, unified: UnifiedTrace, parts: DecomposedTrace) -> Program:
    """The program with what its matcher needs among its notes, and the name of its skeleton."""
    notes = ((NUMBERS, unified.to_json()), (SKELETON, skeleton_digest(parts)))
    return replace(program, notes=(*program.notes, *notes))


def _plan(
    unified: UnifiedTrace, trace: CutTrace, values: Sequence[int], hints: Sequence[int], options: CompileOptions
) -> tuple[Planned, SizeSpace]:
    symbols = [
        Symbol(name, value, hint, low) for (name, low), value, hint in zip(unified.symbols, values, hints, strict=True)
    ]
    space = SizeSpace(symbols)
    try:
        return plan_trace(unified.trace_in(space, trace), options), space
    except Exception as error:
        text = str(error).strip().partition("\n\n")[0][:400]
        raise NoTemplate(f"planning with sizes unknown: {type(error).__name__}: {text}") from error


def _refusal(space: SizeSpace, sample: Sequence[int]) -> str:
    symbols = ", ".join(f"{s.name} = {v}" for s, v in zip(space.exprs.symbols, sample, strict=True))
    for guard in space.guards.values():
        program = Program((), (), (), (), (), (), symbols=tuple(s.name for s in space.exprs.symbols),
                          guards=((guard.kind, guard.expr),))  # fmt: skip
        if not guard_function(program)(*sample):
            return (
                f"the plan holds for some sizes only: {guard_text(guard.kind, guard.expr)} was decided at {guard.why}, "
                f"and does not hold for {symbols}; {_pins(space)}; {_REMEDY}"
            )
    return "a guard does not hold"


def _pins(space: SizeSpace) -> str:
    if not space.pins:
        return "no plain number was taken knowingly"
    return f"plain numbers taken: {'; '.join(dict.fromkeys(space.pins[:3]))}"


def _difference(a: Program, b: Program) -> str:
    """The first thing in which two plannings of one trace differ, or nothing."""
    for item in fields(Program):
        if item.name in ("guards", "notes"):
            continue
        left, right = getattr(a, item.name), getattr(b, item.name)
        if left == right:
            continue
        if isinstance(left, tuple) and isinstance(right, tuple):
            for number, (x, y) in enumerate(zip(left, right, strict=False)):
                if x != y:
                    return f"{item.name} {number} depends on the sizes: {_first_difference(x, y)}"
        return f"{item.name} depend on the sizes: {len(left)} against {len(right)}"
    return ""


def _first_difference(a: Any, b: Any) -> str:
    """The first line of two sources that differs, or the two values."""
    if isinstance(a, KernelSource) and isinstance(b, KernelSource):
        lines = zip(a.text.splitlines(), b.text.splitlines(), strict=False)
        x, y = next(((x.strip(), y.strip()) for x, y in lines if x != y), (a.sizes, b.sizes))
        return f"kernel line {x!r} against {y!r}"
    return f"{str(a)[:300]} against {str(b)[:300]}"

"""`torchlazy.explain(fn, *args)`: what one call of a function did to the recorder and the compiler, and why.

Invariant: the function runs once, for real, as it would without; beside it only the user's lines are kept. What ran
operator by operator is planned (not compiled, not run) to report what its program will be.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torchlazy.inductor.codegen import backends
from torchlazy.lazy.config import config
from torchlazy.lazy.device.mode import recorded_in_python
from torchlazy.lazy.plan.pipeline import CompileOptions, plan_trace
from torchlazy.lazy.record.recorder import current
from torchlazy.lazy.report import EagerUse, ExternUse, eager_line, extern_line, heading
from torchlazy.lazy.run.driver import CutEvent, compute_device
from torchlazy.lazy.run.sync_policy import Kind, Sync, kind_of, sync_budget
from torchlazy.lazy.run.text import byte_text, duration_text
from torchlazy.lazy.torch_private.dispatch import below_autograd
from torchlazy.lazy.trace import user_frames
from torchlazy.lazy.trace.diff import Divergence
from torchlazy.lazy.trace.to_fx import needed_entries
from torchlazy.lazy.trace.trace import CutTrace
from torchlazy.prims.builder import Fallback
from torchlazy.runtime.executor import ProgramCounts, count_steps


@dataclass(frozen=True)
class CutReport:
    """One cut. Its number counts all cuts of the process.

    `divergence` is where a new trace left the known ones, None for a known one. The program is what ran;
    where operators ran one by one (`is_planned`), it is what the compiler would make of them. `bytes` is the memory
    that a run of it allocates, `compile_seconds` how long compiling (or planning) took, `problem` why there is no
    program.
    """

    number: int
    cause: str
    kind: Kind
    frame: str
    operators: int
    outcome: str
    divergence: Divergence | None
    is_planned: bool
    kernels: int
    library_calls: int
    bytes: int
    compile_seconds: float
    externs: tuple[ExternUse, ...]
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "divergence": None if self.divergence is None else self.divergence.to_dict()}

    def __str__(self) -> str:
        where = self.frame or "?"
        lines = [f"cut {self.number}: {self.cause} ({self.kind}) at {where}: {self.operators} ops, {self.outcome}"]
        if self.divergence is not None:
            lines.append(f"    new: {self.divergence}")
            if self.divergence.remedy:
                lines.append(f"        {self.divergence.remedy}")
        if self.problem:
            lines.append(f"    no program: {self.problem}")
        else:
            verb, took = ("would be", "planned") if self.is_planned else ("ran", "compiled")
            lines.append(
                f"    {verb} {self.kernels} kernels and {self.library_calls} library calls, "
                f"{byte_text(self.bytes)} allocated; {took} in {duration_text(self.compile_seconds)}"
            )
        lines += [f"    extern {extern_line(use)}" for use in self.externs]
        return "\n".join(lines)


@dataclass(frozen=True)
class Explanation:
    """What one call did; print it, or use `to_dict()`. `result` is what the function returned."""

    cuts: tuple[CutReport, ...]
    syncs: tuple[Sync, ...]  # reads on the host, also of values that were computed already
    eager: tuple[EagerUse, ...]
    result: Any = field(default=None, repr=False, compare=False)

    @property
    def divergences(self) -> tuple[Divergence, ...]:
        """Where traces that were new left the known ones."""
        return tuple(cut.divergence for cut in self.cuts if cut.divergence is not None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without the result."""
        return {
            "cuts": [cut.to_dict() for cut in self.cuts],
            "syncs": [asdict(sync) for sync in self.syncs],
            "eager": [asdict(use) for use in self.eager],
        }

    def __str__(self) -> str:
        head = (
            f"torchlazy.explain: {len(self.cuts)} cuts, {len(self.syncs)} syncs, {len(self.divergences)} new traces, "
            f"{sum(use.count for use in self.eager)} operators that ran at once"
        )
        syncs = (f"{n} x {sync.cause} at {sync.frame or '?'}" for sync, n in Counter(self.syncs).items())
        return "\n".join(
            [
                head,
                *map(str, self.cuts),
                *heading("syncs", syncs),
                *heading("ran at once", map(eager_line, self.eager)),
            ]
        )


def explain(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Run `fn(*args, **kwargs)` once and report every cut, miss, library call and fallback, with the user's lines.

    The call is real: parameters change, random numbers are drawn, its exceptions come through. What was pending before
    is flushed first, and what the call leaves pending is flushed at its end, so that it is reported too. Call it twice
    to see a step that is known. The result of the function is in `.result`.
    """
    recorder = current()
    driver: Any = recorder.driver
    recorder.cut("explain window opens")
    events: list[CutEvent] = []
    eager: Counter[tuple[str, str, str]] = Counter()
    count, kept = recorder.on_eager, recorder.keep_frames

    def note(op: torch._ops.OpOverload, reason: str) -> None:
        eager[str(op), reason, user_frames.user_frame()] += 1
        count(op, reason)

    recorder.keep_frames = True
    recorder.on_eager = note  # type: ignore[method-assign,assignment]
    driver.listeners.append(events.append)
    reads = sync_budget(sys.maxsize)
    try:
        with recorded_in_python(), reads:
            result = fn(*args, **kwargs)
        recorder.cut("explain window closes")
    finally:
        driver.listeners.remove(events.append)
        recorder.on_eager = count  # type: ignore[method-assign]
        recorder.keep_frames = kept
    uses = tuple(EagerUse(op, reason, frame, n) for (op, reason, frame), n in eager.items())
    return Explanation(tuple(map(report_cut, events)), tuple(reads.syncs), uses, result)


def report_cut(event: CutEvent) -> CutReport:
    """The report on a cut."""
    counts, seconds, fallbacks, problem = _program_of(event)
    return CutReport(
        number=event.number,
        cause=event.cause,
        kind=kind_of(event.cause),
        frame=event.frame,
        operators=len(event.trace.entries),
        outcome=event.outcome,
        divergence=event.divergence,
        is_planned=event.compiled is None,
        kernels=counts.launches + counts.foreach_launches if counts is not None else 0,
        library_calls=sum(counts.extern_calls.values()) if counts is not None else 0,
        bytes=counts.allocated_bytes if counts is not None else 0,
        compile_seconds=seconds,
        externs=extern_uses(event.trace, fallbacks),
        problem=problem,
    )


def _program_of(event: CutEvent) -> tuple[ProgramCounts | None, float, tuple[Fallback, ...], str]:
    """What a run of the cut's program does, the seconds of making it, its library calls; or why there is none."""
    compiled = event.compiled
    if compiled is not None:
        return compiled.run.counts, sum(compiled.timings.values()), compiled.fallbacks, ""
    device = compute_device(event.trace)
    language = backends.language_for(device)
    if not language:
        return None, 0.0, (), f"no code generator for {device}"
    try:
        with below_autograd():
            planned = plan_trace(event.trace, CompileOptions(language, config.precision, config.recompute))
    except Exception as error:  # the compiler's own error, which the user sees only here
        return None, 0.0, (), f"{type(error).__name__}: {error}"
    return count_steps(planned.program), sum(planned.timings.values()), planned.fallbacks, ""


def extern_uses(trace: CutTrace, fallbacks: Iterable[Fallback]) -> tuple[ExternUse, ...]:
    """Library calls by operator, reason and line. Programs that were made without lines get them from the trace."""
    fallbacks = tuple(fallbacks)
    wanted = {fallback.op for fallback in fallbacks}
    lines: dict[str, list[str]] = {}
    needed = needed_entries(trace)
    for position, frame in enumerate(trace.frames):
        name = str(trace.entries[position].op)
        if name in wanted and position in needed:
            lines.setdefault(name, []).append(frame)
    calls = Counter(fallback.op for fallback in fallbacks)
    seen: Counter[str] = Counter()
    uses: Counter[tuple[str, str, str, bool]] = Counter()
    for fallback in fallbacks:
        known = lines.get(fallback.op, [])
        frame = fallback.frame
        if not frame and len(known) == calls[fallback.op]:
            frame = known[seen[fallback.op]]
        seen[fallback.op] += 1
        uses[fallback.op, fallback.reason, frame, fallback.by_choice] += 1
    return tuple(ExternUse(op, reason, frame, n, choice) for (op, reason, frame, choice), n in uses.items())

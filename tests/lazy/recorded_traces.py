"""Traces of whole steps, recorded for a CPU or a GPU and never run; and the comparison of their two plannings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torchlazy
from torchlazy.lazy.api import recorder
from torchlazy.lazy.plan import pipeline
from torchlazy.lazy.plan.loaded import CompileOptions
from torchlazy.lazy.trace.trace import CutTrace
from torchlazy.prims.meta import TensorMeta
from torchlazy.runtime.program.memory_plan import plan_report
from torchlazy.runtime.program.program import ExternCall, ForeachLaunch, Launch

OPTIONS = {language: CompileOptions(language, "fused") for language in ("cpp", "triton")}
TARGETS = {"cpu": "cpp", "cuda:0": "triton"}


@contextmanager
def recorded(target: str | None = None) -> Iterator[list[CutTrace]]:
    """Every cut inside, for `target`, none of them run: results have no elements."""
    found: list[CutTrace] = []
    held: list[torch.Tensor] = []

    def catch(trace: CutTrace, memory: list[torch.Tensor], *_: Any) -> list[torch.Tensor]:
        metas = [geometry.meta for _, geometry in trace.outputs]
        made = [torch.empty_strided(m.shape, m.strides, dtype=m.dtype, device="meta") for m in metas]
        donated = dict(trace.donations)
        held.extend(made)
        found.append(trace)
        return [memory[donated[i]] if i in donated else value for i, value in enumerate(made)]

    torchlazy.sync()
    kept = recorder.driver, recorder.target
    recorder.driver = catch  # type: ignore[assignment]
    if target is not None:
        recorder.target = target
    try:
        yield found
    finally:
        recorder.driver, recorder.target = kept


def on_lazy(make: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
    """What `make` gives on the lazy device; nothing of it is computed, and its data are zeros."""
    with torch.device("meta"):
        model, *data = make()
    return model.to_empty(device="lazy"), *(torch.zeros_like(one, device="lazy") for one in data)


def longest_of(run: Callable[[], Any], found: list[CutTrace], times: int = 2) -> CutTrace:
    """The longest trace of the last of so many runs, each up to its flush; what `run` gives is alive until then."""
    for _ in range(times):
        torchlazy.flush()
        found.clear()
        kept = run()
        torchlazy.flush()
        del kept
    return max(found, key=lambda trace: len(trace.entries))


def assert_as_good(trace: CutTrace, language: str, **more: Any) -> None:
    """Planned by layers, the program takes and gives what that of the whole does, by as many launches and library
    calls, in as much memory, and keeps as much for the backward, or nearly so; `more`: options."""
    options = replace(OPTIONS[language], **more)
    planned, whole = pipeline.plan_by_layers(trace, options), pipeline.plan_trace(trace, options)
    assert planned is not None
    ours, all_at_once = planned.program, whole.program
    is_second = trace.half is not None and trace.half.is_second
    results = len(trace.outputs) if trace.half is None else trace.half.outputs
    if not is_second:
        assert ours.inputs == all_at_once.inputs and ours.scalars == all_at_once.scalars
        assert ours.output_metas[:results] == all_at_once.output_metas[:results]
        assert sorted(ours.donations) == sorted(all_at_once.donations)
    else:
        assert ours.output_metas == all_at_once.output_metas
    counts = [Counter(type(step) for step in program.steps) for program in (ours, all_at_once)]
    assert counts[0][ExternCall] <= counts[1][ExternCall] + 1
    launches = [found[Launch] + found[ForeachLaunch] for found in counts]
    assert launches[0] <= launches[1] + 3, launches
    held = [sum(map(_bytes, program.output_metas)) for program in (ours, all_at_once)]
    assert held[0] <= 1.04 * held[1], held
    peaks = [plan_report(program.steps).peak_bytes for program in (ours, all_at_once)]
    assert peaks[0] <= 1.05 * peaks[1], peaks
    assert sorted(set(map(str, planned.fallbacks))) == sorted(set(map(str, whole.fallbacks)))


def _bytes(meta: TensorMeta) -> int:
    return math.prod(meta.shape) * meta.dtype.itemsize

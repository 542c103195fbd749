"""Traces of whole steps, recorded for a CPU or a GPU and never run; and the comparison of their two plannings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
import torchlazy
from torchlazy.lazy.api import recorder
from torchlazy.lazy.plan import pipeline
from torchlazy.lazy.plan.loaded import CompileOptions
from torchlazy.lazy.trace.trace import CutTrace

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


def assert_same(trace: CutTrace, language: str, **more: Any) -> None:
    """The program by way of fewer layers is that of all, to the last name; `more`: options."""
    options = replace(OPTIONS[language], **more)
    repeated = pipeline.plan_repeated(trace, options)
    whole = pipeline.plan_trace(trace, options)
    assert repeated is not None
    assert "program" in repeated.timings and "repeat" in repeated.timings
    for field in fields(whole.program):
        assert repr(getattr(repeated.program, field.name)) == repr(getattr(whole.program, field.name)), field.name
    assert repeated.program == whole.program
    assert repeated.fallbacks == whole.fallbacks

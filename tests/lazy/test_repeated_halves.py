"""A step whose loss is read before its backward: both programs by way of a few of its layers, planned once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torchlazy
from torchlazy.lazy.plan import pipeline
from torchlazy.lazy.plan.join_traces import Joined, match_programs
from torchlazy.lazy.plan.layers.names import NotPeriodic
from torchlazy.lazy.plan.loaded import CompileOptions
from torchlazy.lazy.run.segments import watch
from torchlazy.lazy.trace.trace import CutTrace
from torchlazy.runtime.program.program import Program

from tests.lazy.joined_traces import joined_step
from tests.lazy.recorded_traces import OPTIONS, TARGETS
from tests.lazy.test_repeated_layers import ROWS, WIDTH, adamw, sgd, transformer


def step_of(
    target: str, optimize: Callable[..., torch.optim.Optimizer], layers: int = 18, *, amp: bool = False
) -> Joined:
    return joined_step(lambda: transformer(layers=layers), (ROWS, 16, WIDTH), target, optimize, amp=amp)


def facts_of(program: Program) -> dict[str, Any]:
    """What is the same whatever buffers are called; memory is freed and taken over in an order of their names."""
    steps = [(type(step), getattr(step, "kernel", None), getattr(step, "op", None)) for step in program.steps]
    return {
        "steps": steps,
        "inputs": sorted(repr(meta) for _, meta in program.inputs),
        "kernels": [kernel.text for kernel in program.kernels],
        "scalars": sorted(program.scalars),
        "results": program.output_metas,
        "donations": len(program.donations),
        "notes": program.notes,
    }


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("more", [{}, {"scalars": "memory"}])
def test_both_programs_are_those_of_all_layers(target: str, more: dict[str, Any]) -> None:
    joined = step_of(target, adamw)
    options = replace(OPTIONS[TARGETS[target]], **more)
    repeated = [pipeline.plan_repeated(trace, options) for trace in (joined.first, joined.second)]
    whole = [pipeline.plan_trace(trace, options) for trace in (joined.first, joined.second)]
    assert repeated[0] is not None and repeated[1] is not None
    assert "repeat" in repeated[0].timings and "repeat" not in repeated[1].timings
    assert repeated[0].program == whole[0].program
    assert facts_of(repeated[1].program) == facts_of(whole[1].program)
    assert [found.fallbacks for found in repeated if found] == [found.fallbacks for found in whole]
    crossing = [name for name, _ in repeated[1].program.inputs if name.startswith("buf")]
    assert crossing and set(crossing) <= set(repeated[0].program.outputs)


def test_halves_under_autocast() -> None:
    """Where the schedule repeats with each third layer, what is beside the layers may be chosen otherwise."""
    joined = step_of("cuda:0", sgd, 36, amp=True)
    for trace in (joined.first, joined.second):
        repeated = pipeline.plan_repeated(trace, OPTIONS["triton"])
        whole = pipeline.plan_trace(trace, OPTIONS["triton"]).program
        assert repeated is not None
        assert abs(len(repeated.program.steps) - len(whole.steps)) <= 2
        metas = (sorted(repr(meta) for _, meta in program.inputs) for program in (repeated.program, whole))
        assert next(metas) == next(metas)


def test_training_by_both_halves_is_training(compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LEAST_BYTES", 0)
    monkeypatch.setattr(torchlazy.config, "dynamic", "off")
    repeated: list[bool] = []
    plan = pipeline.plan_repeated

    def watched(trace: CutTrace, options: CompileOptions) -> pipeline.PlannedAhead | None:
        planned = plan(trace, options)
        if trace.half is not None:
            repeated.append(planned is not None)
        return planned

    monkeypatch.setattr(pipeline, "plan_repeated", watched)
    losses: dict[str, list[float]] = {}
    for device in ("cpu", "lazy"):
        torch.manual_seed(1)
        model = transformer(layers=18).to(device)
        x = torch.rand(ROWS, 16, WIDTH).to(device)
        optimizer = adamw(model.parameters())
        losses[device] = []
        for _ in range(5):
            loss = (model(x) - 0.5).square().mean()
            losses[device].append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert repeated == [True, True]
    torch.testing.assert_close(losses["lazy"], losses["cpu"], rtol=1e-4, atol=1e-5)
    assert losses["cpu"][-1] < losses["cpu"][0]


def test_programs_that_do_not_belong_together_are_told() -> None:
    """Where one half was planned by a few layers and the other by all: what crosses has other names."""
    joined = step_of("cpu", sgd)
    options = OPTIONS["cpp"]
    first, second = (pipeline.plan_repeated(trace, options) for trace in (joined.first, joined.second))
    assert first is not None and second is not None
    found = match_programs(joined, first.program, second.program)
    assert found is not None and len(found.inputs) == len(second.program.inputs)
    renamed = replace(first.program, outputs=tuple(f"{name}0" for name in first.program.outputs))
    assert match_programs(joined, renamed, second.program) is None


def test_what_one_half_was_planned_with_is_there_for_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = step_of("cpu", sgd, 2)
    decomposed: list[int] = []
    decompose = pipeline.decompose
    monkeypatch.setattr(pipeline, "decompose", lambda *a, **k: (decomposed.append(1), decompose(*a, **k))[1])
    pipeline._kept.clear()
    split_schedule = []
    for trace in (joined.second, joined.first):
        split_schedule.append(pipeline.plan_trace(trace, OPTIONS["cpp"]))
        pipeline._kept.clear()
    assert len(decomposed) == 2
    shared = [pipeline.plan_trace(trace, OPTIONS["cpp"]) for trace in (joined.second, joined.first)]
    assert len(decomposed) == 3 and not pipeline._kept
    assert [one.program for one in shared] == [one.program for one in split_schedule]
    pipeline.plan_trace(joined.first, OPTIONS["cpp"])
    pipeline.plan_trace(joined.first, OPTIONS["cpp"])  # the same half again is planned again
    assert len(decomposed) == 5


def test_items_on_the_wrong_side_of_the_cut_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule in which what comes after the cut would be read before it has no programs."""
    joined = step_of("cpu", sgd)
    pipeline._kept.clear()
    cuts: list[int] = []
    split_schedule = pipeline.split_schedule

    def moved(schedule: Any, *rest: Any, **more: Any) -> Any:
        cuts.append(schedule.cut)
        with pytest.raises(NotPeriodic, match="given after it"):
            split_schedule(replace(schedule, cut=len(schedule.items)), *rest, **more)
        return split_schedule(schedule, *rest, **more)

    monkeypatch.setattr(pipeline, "split_schedule", moved)
    assert pipeline.plan_repeated(joined.first, OPTIONS["cpp"]) is not None
    assert len(cuts) == 1
    pipeline._kept.clear()

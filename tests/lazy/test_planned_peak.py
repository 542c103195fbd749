"""What a step holds by its plan: less with less budget, and little more where the loss is read before `backward()`."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import planned_peak

BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.0)


@pytest.mark.parametrize("model", ["gpt", "resnet50"])
def test_a_cut_before_backward_costs_little_on_a_gpu(model: str) -> None:
    whole, cut = (
        planned_peak.planned(planned_peak.step_of(model, True, reads_loss=reads), "none") for reads in (False, True)
    )
    assert len(whole.programs) == 1 and len(cut.programs) == 2
    assert cut.peak <= 1.1 * whole.peak
    assert cut.kernels <= 1.1 * whole.kernels
    assert cut.library_calls == whole.library_calls  # nothing is executed twice


def test_the_peak_on_a_gpu_falls_with_the_budget() -> None:
    """At full width: what kernels that share a launch may keep waiting is as much as all that a small model holds."""
    cuts = planned_peak.step_of("gpt", False, reads_loss=False, layers=3)
    peaks = [planned_peak.planned(cuts, str(budget)).peak for budget in BUDGETS]
    assert all(less <= more for more, less in itertools.pairwise(peaks)), peaks
    assert peaks[-1] < 0.7 * peaks[0], peaks

"""What a step holds by its plan: less with less budget, and little more where the loss is read before `backward()`."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import planned_peak

pytestmark = pytest.mark.usefixtures("device_in_python")

BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.0)


@pytest.mark.parametrize("model", ["gpt", "resnet50", "gpt2_head"])
def test_a_cut_before_backward_costs_little_on_a_gpu(model: str) -> None:
    whole, cut = (planned_peak.step_of(model, True, reads_loss=reads) for reads in (False, True))
    paired = planned_peak.step_together(model, True)
    wanted, apart, together = (planned_peak.planned(cuts, "none") for cuts in (whole, cut, paired))
    assert len(wanted.programs) == 1 and len(apart.programs) == len(together.programs) == 2
    for found in (apart, together):
        assert found.library_calls == wanted.library_calls  # nothing is executed twice
        assert found.kernels <= 1.1 * wanted.kernels
    assert apart.peak <= (1.1 if model != "gpt2_head" else 2.5) * wanted.peak
    assert together.peak <= 1.06 * wanted.peak


def test_the_peak_on_a_gpu_falls_with_the_budget() -> None:
    """At full width: what kernels that share a launch may keep waiting is as much as all that a small model holds."""
    cuts = planned_peak.step_of("gpt", False, reads_loss=False, layers=3)
    peaks = [planned_peak.planned(cuts, str(budget)).peak for budget in BUDGETS]
    assert all(less <= more for more, less in itertools.pairwise(peaks)), peaks
    assert peaks[-1] < 0.7 * peaks[0], peaks

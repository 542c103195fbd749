"""Real training steps of many equal layers are planned by way of a few, on both targets."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.lazy.recorded_traces import TARGETS, assert_same, longest_of, on_lazy, recorded

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import compile_time


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("steps", [1, 2])
def test_the_benchmark_of_compile_seconds(target: str, steps: int) -> None:
    """Its width decides that sums are taken in parts; the first step has no optimizer states yet."""
    with recorded(target) as found:
        model, codes = on_lazy(lambda: compile_time.gpt_and_codes(20, 128))
        trace = longest_of(compile_time.training_step(model, model, codes), found, steps)
    assert_same(trace, TARGETS[target])

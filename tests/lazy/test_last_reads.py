"""What a replay lets go of behind each step."""

from __future__ import annotations

import torch
from torchlazy.lazy.compiled.replay.pairs import last_reads
from torchlazy.lazy.compiled.template.template import (
    CallTemplate,
    Collective,
    FromStep,
    LazyItem,
    TensorOperand,
    TensorResult,
)
from torchlazy.lazy.trace.geometry import geometry_like


def test_memory_that_only_a_collective_reads_is_freed_behind_it():
    geometry = geometry_like(torch.empty(4), torch.device("cpu"), "cpu")
    windows = [TensorOperand(FromStep(place), geometry) for place in range(4)]

    def reduced(*of):
        return Collective(torch.ops.c10d.allreduce_.default, (tuple(of),), (), tuple(of), ())

    first, second = reduced(*windows[:3]), reduced(windows[1], windows[3])
    steps = (first, LazyItem(FromStep(2), geometry, 0), second)
    result = TensorResult(FromStep(3), geometry, False, False, 0)
    template = CallTemplate(steps, (), (), (), 1, (), (result,), None, (), (), (), 4, 0, 0)
    assert last_reads(template) == {id(first): [0], id(second): [1]}

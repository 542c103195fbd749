"""Programs for all sizes on a GPU, as far as they can be seen without one: recorded for it, planned, never run.

Invariant: the driver is put back, and nothing that was recorded for the absent device outlives a test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchlazy
from torch import Tensor
from torch.nn import functional as F
from torchlazy.lazy.api import recorder
from torchlazy.lazy.numbers.matcher import Matcher
from torchlazy.lazy.plan.loaded import CompileOptions
from torchlazy.lazy.run.plan_dynamic import plan_template
from torchlazy.lazy.trace.skeleton import DecomposedTrace, decompose_trace
from torchlazy.lazy.trace.trace import CutTrace
from torchlazy.runtime.program.program import ExternCall
from torchlazy.runtime.program.symbolic import guard_function

pytestmark = pytest.mark.usefixtures("device_in_python")

Sample = tuple[CutTrace, DecomposedTrace]


@pytest.fixture
def record() -> Iterator[Callable[[Callable[[], Any]], Sample]]:
    """The last trace of a call, whose results live until it is cut, recorded for cuda:0."""
    found: list[CutTrace] = []

    def catch(trace: CutTrace, *_: Any) -> list[Tensor]:
        found.append(trace)
        metas = [geometry.meta for _, geometry in trace.outputs]
        return [torch.empty_strided(meta.shape, meta.strides, dtype=meta.dtype, device="meta") for meta in metas]

    def run(call: Callable[[], Any]) -> Sample:
        torchlazy.flush()
        found.clear()
        results = call()
        torchlazy.flush()
        del results
        return found[-1], decompose_trace(found[-1])

    torchlazy.sync()
    driver, target = recorder.driver, recorder.target
    recorder.driver, recorder.target = catch, "cuda:0"
    try:
        yield run
    finally:
        recorder.driver, recorder.target = driver, target


def attention_step(batch: int, length: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Attention of four heads of width 8, and its gradients."""
    x = torch.ones(batch, length, 96, device="lazy", dtype=dtype).mul_(2).requires_grad_()
    torchlazy.flush()
    q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in x.split(32, -1))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    (grad,) = torch.autograd.grad((attended * attended).sum(), x)
    return attended, grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["tiled", "flash"])
def test_attention_over_lengths(record: Callable[[Callable[[], Any]], Sample], dtype: torch.dtype) -> None:
    """In float32 the kernel keeps its row sums in tiles of 32: those of 16 and 24 rows are as many, those of 33 not."""
    lengths = (16, 24, 33, 100, 7, 2, 64, 300)
    samples = [record(lambda n=length: attention_step(3, n, dtype)) for length in lengths]  # type: ignore[misc]
    planned, unified = plan_template(samples[:2], CompileOptions("triton", "fused", "on"))
    matcher, holds = Matcher(unified), guard_function(planned.program)
    for length, (_, parts) in zip(lengths, samples, strict=True):
        matched = matcher.match(parts)
        assert matched == ((length,), ()) and holds(length)
    assert any(isinstance(step, ExternCall) and "attention_backward" in step.op for step in planned.program.steps)

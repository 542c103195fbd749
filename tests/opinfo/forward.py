"""The samples of an operator, forward or with gradients: each run on the CPU and on the lazy device, and compared.

Invariant: a sample that eager refuses is left out and counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

from tests.opinfo.batch import Case
from tests.opinfo.compare import compare
from tests.opinfo.report import Report, describe
from tests.opinfo.samples import Call, name_of, on_cpu, on_gpu, on_lazy, samples_of, seed, widened

# Results that are memory as it was found: only their metadata can be compared.
UNINITIALISED = frozenset(
    {
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
    }
)


def forward_cases(
    op: OpInfo, dtype: torch.dtype, gradient: bool, limit: int, report: Report, device: str = "cpu"
) -> list[Case]:
    """A case for each of the samples (`limit` of them, 0: all) that eager runs on "cpu" or "cuda"."""
    eagerly = on_cpu if device == "cpu" else on_gpu
    cases = []
    for number, sample in enumerate(samples_of(op, dtype, gradient=gradient, limit=limit)):
        try:
            want = outcome(op, number, Call(op, sample, eagerly), gradient)
        except Exception:
            report.refused += 1
            continue
        cases.append(_case(op, number, sample, want, gradient))
    return cases


def _case(op: OpInfo, number: int, sample: SampleInput, want: Any, gradient: bool) -> Case:
    def run(place: Callable[[Any], Any]) -> Any:
        return outcome(op, number, Call(op, sample, place), gradient)

    def check(have: Any) -> bool:
        return compare(have, want, values=op.name not in UNINITIALISED, exact=lambda: run(widened))

    return Case(number, describe(sample), lambda: run(on_lazy), check)


def outcome(op: OpInfo, number: int, call: Call, gradient: bool) -> Any:
    """The results, or the gradients of the leaves for one random cotangent per result."""
    seed(name_of(op), number)
    result = call()
    return gradients(call.process(result), call.leaves) if gradient else result


def gradients(result: Any, leaves: list[torch.Tensor]) -> Any:
    """The gradients of the leaves for one random cotangent per result that has a gradient."""
    outputs = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor) and x.requires_grad]
    cotangents = [_cotangent(x, position) for position, x in enumerate(outputs)]
    return torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)


def _cotangent(x: torch.Tensor, position: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(position)
    wide = torch.randn(x.shape, generator=generator, dtype=torch.complex128 if x.dtype.is_complex else torch.float64)
    return wide.to(x.dtype).to(x.device)

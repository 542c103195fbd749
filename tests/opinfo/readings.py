"""One operator in one reading: its samples run eagerly on the CPU and on the lazy device, and compared.

The lazy runs of all samples are one program: one cut, one run of the compiler. Only where that fails is each sample
run for itself, to tell which of them is to blame.
Invariant: a sample that eager refuses is left out; every other one ends as passed or as one Failure.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torchlazy
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree
from torchlazy.lazy.api import driver, recorder

from tests.opinfo.compare import Difference, compare
from tests.opinfo.engines import engine
from tests.opinfo.samples import Call, name_of, on_cpu, on_lazy, samples_of, seed

READINGS = {"a": ("prims", False), "b": ("compiler", False), "c": ("compiler", True)}  # engine, with gradients
BATCH = 24  # samples in one program

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


@dataclass(frozen=True)
class Failure:
    """What went wrong with one sample."""

    sample: int
    kind: str  # "value", "stride", "dtype", "shape", "structure", "record", "compile", "run"
    text: str


@dataclass
class Report:
    """The outcome of one operator in one reading and dtype."""

    op: str
    reading: str
    dtype: str
    passed: int = 0
    by_exact: int = 0  # of those, beyond the tolerance but as close to the float64 result as eager
    refused: int = 0  # samples that eager does not run
    failures: list[Failure] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            "op": self.op, "reading": self.reading, "dtype": self.dtype, "passed": self.passed,
            "by_exact": self.by_exact, "refused": self.refused,
            "failures": [[f.sample, f.kind, f.text] for f in self.failures],
        }  # fmt: skip


def run_reading(op: OpInfo, reading: str, dtype: torch.dtype, *, limit: int, through: str | None = None) -> Report:
    """All samples of `op`; `through` names another engine than the reading's own."""
    engine_name, gradient = READINGS[reading]
    report = Report(name_of(op), reading, str(dtype).removeprefix("torch."))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = list(enumerate(samples_of(op, dtype, gradient=gradient, limit=limit)))
        eager = {}
        for number, sample in samples:
            try:
                eager[number] = _outcome(op, number, Call(op, sample, on_cpu), gradient)
            except Exception:
                report.refused += 1
        samples = [(number, sample) for number, sample in samples if number in eager]
        with engine(through or engine_name):
            for start in range(0, len(samples), BATCH):
                _run_batch(op, samples[start : start + BATCH], eager, gradient, report)
                driver.forget()
    return report


def _outcome(op: OpInfo, number: int, call: Call, gradient: bool) -> Any:
    """The results, or the gradients of the leaves for one random cotangent per result."""
    seed(name_of(op), number)
    result = call()
    if not gradient:
        return result
    outputs = [x for x in pytree.tree_leaves(call.process(result)) if isinstance(x, torch.Tensor) and x.requires_grad]
    cotangents = [_cotangent(x, position) for position, x in enumerate(outputs)]
    return torch.autograd.grad(outputs, call.leaves, cotangents, allow_unused=True)


def _cotangent(x: torch.Tensor, position: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(position)
    wide = torch.randn(x.shape, generator=generator, dtype=torch.complex128 if x.dtype.is_complex else torch.float64)
    return wide.to(x.dtype).to(x.device)


def _run_batch(
    op: OpInfo, samples: list[tuple[int, SampleInput]], eager: dict[int, Any], gradient: bool, report: Report
) -> None:
    lazy: dict[int, Any] = {}
    failed: dict[int, Failure] = {}
    for number, sample in samples:
        try:
            lazy[number] = _outcome(op, number, Call(op, sample, on_lazy), gradient)
        except Exception as error:
            failed[number] = Failure(number, "record", _text(error))
    try:
        torchlazy.sync()
    except Exception as error:
        _discard()
        if len(samples) > 1:
            lazy.clear()
            for one in samples:
                _run_batch(op, [one], eager, gradient, report)
            return
        failed[samples[0][0]] = Failure(samples[0][0], "compile", _text(error))
    for number, sample in samples:
        if number not in failed:
            failure = _check(op, number, sample, lazy[number], eager[number], gradient, report)
            if failure is None:
                report.passed += 1
                continue
            failed[number] = failure
        report.failures.append(failed[number])


def _check(
    op: OpInfo, number: int, sample: SampleInput, have: Any, want: Any, gradient: bool, report: Report
) -> Failure | None:
    try:
        plain = compare(have, want, values=op.name not in UNINITIALISED, exact=_exact(op, number, sample, gradient))
    except Difference as difference:
        return Failure(number, difference.kind, f"{difference} [{_describe(sample)}]")
    except Exception as error:
        _discard()
        return Failure(number, "run", f"{_text(error)} [{_describe(sample)}]")
    report.by_exact += not plain
    return None


def _exact(op: OpInfo, number: int, sample: SampleInput, gradient: bool) -> Callable[[], Any]:
    def place(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and (value.dtype.is_floating_point or value.dtype.is_complex):
            wide = torch.complex128 if value.dtype.is_complex else torch.float64
            return value.detach().to(wide).requires_grad_(value.requires_grad)
        if isinstance(value, torch.dtype) and value.is_floating_point:
            return torch.float64
        return on_cpu(value)

    return lambda: _outcome(op, number, Call(op, sample, place), gradient)


def _discard() -> None:
    """Forget what a failed program left in the trace."""
    recorder._start_trace()


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def _describe(sample: SampleInput) -> str:
    def short(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            plain = value.is_contiguous() if value.layout is torch.strided else True
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" + (
                "" if plain else f"/{value.stride()}"
            )
        return value

    tree = pytree.tree_map(short, (sample.input, *sample.args))
    return f"{tree} {pytree.tree_map(short, dict(sample.kwargs))}"[:300]

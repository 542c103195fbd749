"""What comes out of a reading: how many samples passed, and what went wrong with each of the others.

Invariant: a report is plain data; a worker prints it as one line of JSON.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Failure:
    """What went wrong with one sample."""

    sample: int
    kind: str  # "value", "stride", "dtype", "shape", "structure", "alias", "error", "late", "record", "compile", "run"
    text: str


@dataclass
class Report:
    """The outcome of one operator in one reading and dtype."""

    op: str
    reading: str
    dtype: str
    limit: int  # samples asked for, 0 for all
    passed: int = 0
    by_exact: int = 0  # of those, beyond the tolerance but as close to the float64 result as eager
    refused: int = 0  # samples that eager does not run
    late: int = 0  # errors of the values themselves, raised where the values are computed
    failures: list[Failure] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)  # passed, by label

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON can hold it."""
        return {
            "op": self.op, "reading": self.reading, "dtype": self.dtype, "limit": self.limit, "passed": self.passed,
            "by_exact": self.by_exact, "refused": self.refused, "late": self.late, "counts": dict(self.counts),
            "failures": [[f.sample, f.kind, f.text] for f in self.failures],
        }  # fmt: skip


def text_of(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def describe(sample: SampleInput) -> str:
    """A sample's arguments in one line."""

    def short(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            plain = value.is_contiguous() if value.layout is torch.strided else True
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" + (
                "" if plain else f"/{value.stride()}"
            )
        return value

    tree = pytree.tree_map(short, (sample.input, *sample.args))
    return f"{tree} {pytree.tree_map(short, dict(sample.kwargs))}"[:300]

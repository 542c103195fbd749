"""Compares two results of one computation: tolerances by dtype, and which outputs are defined at all.

Invariant: equal values always agree; NaN equals NaN. Tolerances are those of `torch.testing.assert_close`; values that
are no floats must be equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchlazy.lazy.trace.trace import CutTrace, slots_in

# dtype: (relative, absolute)
TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex64: (1.3e-6, 1e-5),
    torch.complex128: (1e-7, 1e-7),
}
_MARGIN = 10.0
_EMPTY = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided")
# They read nothing of their first operand's values, or overwrite them all.
_GEOMETRY_ONLY = (
    "aten::copy", "aten::fill", "aten::zero", "aten::zeros_like", "aten::ones_like", "aten::full_like",
    "aten::empty_like", "aten::new_zeros", "aten::new_ones", "aten::new_full", "aten::new_empty",
    "aten::new_empty_strided",
)  # fmt: skip


@dataclass(frozen=True)
class Mismatch:
    """Where two tensors differ most: how many elements differ of how many, and the worst of them."""

    differing: int
    numel: int
    index: tuple[int, ...]
    actual: str
    expected: str
    distance: float

    def __str__(self) -> str:
        return (
            f"{self.differing} of {self.numel} elements differ, most at {list(self.index)}: {self.actual} compiled, "
            f"{self.expected} operator by operator"
        )


def compare(actual: torch.Tensor, expected: torch.Tensor, factor: float = 1.0) -> Mismatch | None:
    """Where `actual` is not close to `expected`; None if it is everywhere. `factor` widens the tolerances of floats."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        kinds = f"{actual.dtype}{list(actual.shape)}", f"{expected.dtype}{list(expected.shape)}"
        return Mismatch(expected.numel(), expected.numel(), (), *kinds, math.inf)
    if expected.numel() == 0:
        return None
    if expected.dtype not in TOLERANCES:
        wrong = actual != expected
        distance = wrong.to(torch.float64)
    else:
        relative, absolute = TOLERANCES[expected.dtype]
        close = torch.isclose(actual, expected, rtol=factor * relative, atol=factor * absolute, equal_nan=True)
        wrong = ~close
        wide = torch.complex128 if expected.dtype.is_complex else torch.float64
        distance = (actual.to(wide) - expected.to(wide)).abs().nan_to_num(math.inf, math.inf)
        distance = torch.where(wrong, distance, 0.0)
    count = int(wrong.sum())
    if count == 0:
        return None
    flat = int(distance.reshape(-1).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), expected.shape))
    one, other = (str(t.reshape(-1)[flat].item()) for t in (actual, expected))
    return Mismatch(count, expected.numel(), index, one, other, float(distance.reshape(-1)[flat]))


def is_rounding(actual: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether two values differ no more than their dtype must, `exact` being the same computed with float64.

    In units of the tolerance at each element, `actual` may be ten times as far from the exact value as `expected` is
    where that is worst: both lose the same digits where terms cancel.
    """
    if expected.dtype not in TOLERANCES or actual.shape != exact.shape:
        return False
    relative, absolute = TOLERANCES[expected.dtype]
    wide = torch.complex128 if expected.dtype.is_complex else torch.float64
    target = exact.to(wide)
    unit = absolute + relative * target.abs()
    distances = []
    for value in (actual, expected):
        value = value.to(wide)
        same = (value == target) | (value.isnan() & target.isnan())
        distances.append(torch.where(same, 0.0, ((value - target).abs() / unit).nan_to_num(math.inf, math.inf)))
    found, allowed = distances
    return bool((found <= 1 + _MARGIN * allowed.max()).all()) and bool(allowed.isfinite().all())


def compare_all(actual: Sequence[Any], expected: Sequence[Any], positions: Sequence[int]) -> dict[int, Mismatch]:
    """The mismatches of the outputs at these positions. Where both failed there is nothing to compare."""
    found: dict[int, Mismatch] = {}
    for position in positions:
        one, other = actual[position], expected[position]
        failed = isinstance(one, BaseException), isinstance(other, BaseException)
        if all(failed):
            continue
        if any(failed):
            found[position] = Mismatch(0, 0, (), _short(one), _short(other), math.inf)
            continue
        mismatch = compare(one, other)
        if mismatch is not None:
            found[position] = mismatch
    return found


def _short(value: Any) -> str:
    return f"{type(value).__name__}: {value}"[:200] if isinstance(value, BaseException) else "a value"


def defined_outputs(trace: CutTrace) -> list[int]:
    """Positions of the outputs that do not depend on memory that was never written (`torch.empty`)."""
    undefined: set[int] = set()
    for entry in trace.entries:
        name = entry.op._schema.name
        operands = slots_in(entry.args)
        if name in _GEOMETRY_ONLY:
            operands = operands[1:]
        reads = (*operands, *slots_in(tuple(value for _, value in entry.kwargs)))
        if name in _EMPTY or any(found.number in undefined for found in reads):
            undefined.update(found.number for found in slots_in(entry.outputs))
    return [position for position, (number, _) in enumerate(trace.outputs) if number.number not in undefined]

"""Means and deviations that normalisation divides by, as accurate as ATen's.

Invariant: on the CPU they are computed in float64 where ATen accumulates so, or where a row is so long that float32
shows; what is returned besides is in the operand's dtype, rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchlazy.prims.decomps.value import Number, Value, welford
from torchlazy.prims.size_int import is_tracked

_LONG_ROW = 8192
"""From here on the rounding of a mean shows in rows whose mean is large beside their deviation (one of 65536 elements,
mean 1e4 and deviation 1e-2, was 5 to 9 times as far off as ATen's)."""


def statistics(x: Value, axes: Sequence[int]) -> tuple[Value, Value]:
    """Mean and sum of squared distances from it: on the CPU in float64, as ATen's kernels of batch norm there.

    The distances are from the first element of each row, where it is finite, so that one pass serves:
    with d = x - first, mean = first + sum(d) / n and m2 = sum(d * d) - sum(d)**2 / n.
    """
    n = x.count(axes)
    if x.meta.device != "cpu" or x.dtype == torch.float64 or (not is_tracked(n) and n == 0):
        return welford(x, axes, keepdim=True)
    ends = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
    first = x.slice([0] * x.rank, ends, [1] * x.rank)
    first = (first - first).eq(0.0).where(first, 0.0).to(torch.float64)
    d = x.to(torch.float64) - first
    total, squares = d.sum(axes, keepdim=True), (d * d).sum(axes, keepdim=True)
    m2 = squares - total * total / n
    return first + total / n, m2.lt(0.0).where(0.0, m2)


def normalised(x: Value, axes: Sequence[int], eps: Number) -> tuple[Value, Value, Value]:
    """(x - mean) * rstd, mean and rstd; of long rows on the CPU in float64, each rounded once."""
    count = x.count(axes)
    is_long = not is_tracked(count) and isinstance(count, int) and count >= _LONG_ROW
    wide = x.to(torch.float64) if is_long and x.meta.device == "cpu" else x
    mean, m2 = welford(wide, axes, keepdim=True)
    rstd = (m2 / count + eps).rsqrt().to(x.dtype)
    return (wide - mean).to(x.dtype) * rstd, mean.to(x.dtype), rstd

"""Calls that torch's meta kernels let pass and eager refuses: what the geometries already tell.

Invariant: a call that is refused here is run for real, which raises eager's own error at the call; nothing else is lost
where eager takes it after all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torchlazy.lazy.geometry import Geometry

aten = torch.ops.aten
_MAX_DIMENSIONS = 64  # of reductions, elementwise and other operators


def _as_strided_scatter(
    x: Geometry, src: Geometry, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> bool:
    """The window must lie within the memory of x."""
    if not all(size):
        return False
    last = (x.offset if offset is None else offset) + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    return last >= x.span


def _index_add(x: Geometry, dim: int, index: Geometry, source: Geometry, **_: Any) -> bool:
    """Source and x differ in size along `dim` only, where source has as many rows as there are indices."""
    if len(source.shape) != max(len(x.shape), 1) and (x.shape and source.shape):
        return True
    rows = index.numel
    if not x.shape or not source.shape:
        return source.numel != rows
    dim %= len(x.shape)
    return source.shape[dim] != rows or any(
        a != b for i, (a, b) in enumerate(zip(x.shape, source.shape, strict=True)) if i != dim
    )


def _bucketize(x: Geometry, boundaries: Geometry, **_: Any) -> bool:
    return len(boundaries.shape) != 1


_CHECKS: dict[torch._ops.OpOverload, Callable[..., bool]] = {
    aten.as_strided_scatter.default: _as_strided_scatter,
    aten.index_add.default: _index_add,
    aten.index_add_.default: _index_add,
    aten.bucketize.Tensor: _bucketize,
}


def is_refused(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether eager raises for operands of these geometries (a Geometry stands where a tensor does)."""
    if any(type(value) is Geometry and len(value.shape) > _MAX_DIMENSIONS for value in args):
        return True  # some kernels take them: running for real is right then too
    check = _CHECKS.get(op)
    return check is not None and check(*args, **kwargs)

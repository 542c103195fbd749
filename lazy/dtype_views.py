"""Views that read a storage's bytes as another dtype: of memory, and in operators of a trace, with writes through them.

Invariant: bytes that a view of another dtype cannot reach keep what they are.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torchlazy.lazy.geometry import Geometry, flat
from torchlazy.lazy.trace import Slot

_aten = torch.ops.aten


class Appends(Protocol):
    """A trace that grows."""

    def append(self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: tuple[Any, ...], results: Any) -> Any:
        """The slots of the results of one more operator."""


def memory_as(real: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The memory from where `real` begins as one row, in the order in which it lies, whichever the strides of `real`
    are; a rest that is smaller than an element is left out."""
    size = real.element_size()
    nbytes = real.untyped_storage().nbytes() - real.storage_offset() * size
    nbytes -= nbytes % max(size, dtype.itemsize)
    return real.as_strided((nbytes // size,), (1,), real.storage_offset()).view(dtype)


def as_dtype(trace: Appends, base_slot: Slot, base: Geometry, dtype: torch.dtype) -> tuple[Slot, Geometry]:
    """A storage's bytes as one row of elements of another dtype; a rest that is smaller than one is left out."""
    count = base.span * base.dtype.itemsize // dtype.itemsize
    used = flat(count * dtype.itemsize // base.dtype.itemsize, base.dtype, base.device, base.compute)
    if used is not base:
        base_slot = trace.append(_aten.as_strided.default, (base_slot, used.shape, (1,), 0), (), used)
    if used.nbytes != base.nbytes:  # torch wants memory of whole elements under some operators
        base_slot = trace.append(_aten.clone.default, (base_slot,), (), used)
    whole = flat(count, dtype, base.device, base.compute)
    return trace.append(_aten.view.dtype, (base_slot, dtype), (), whole), whole


def written_as_dtype(trace: Appends, old: Slot, base: Geometry, value: Slot, geom: Geometry) -> Slot:
    """The storage's value `old` after a write of `value` through a view of another dtype."""
    row, whole = as_dtype(trace, old, base, geom.dtype)
    if geom.is_plain and geom.numel == whole.numel:
        row = value if geom is whole else trace.append(_aten.view.default, (value, whole.shape), (), whole)
    else:
        window = (geom.shape, geom.strides, geom.offset)
        row = trace.append(_aten.as_strided_scatter.default, (row, value, *window), (), whole)
    count = whole.nbytes // base.dtype.itemsize
    used = flat(count, base.dtype, base.device, base.compute)
    row = trace.append(_aten.view.dtype, (row, base.dtype), (), used)
    if used is base:
        return row
    if count == base.span:
        return trace.append(_aten.as_strided.default, (row, base.shape, base.strides, 0), (), base)
    everything = flat(base.span, base.dtype, base.device, base.compute)  # with the rest that no view can reach
    if everything is not base:
        old = trace.append(_aten.as_strided.default, (old, everything.shape, (1,), 0), (), everything)
    row = trace.append(_aten.as_strided_scatter.default, (old, row, used.shape, (1,), 0), (), everything)
    if everything is base:
        return row
    return trace.append(_aten.as_strided.default, (row, base.shape, base.strides, 0), (), base)

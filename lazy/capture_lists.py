"""`tolist()` in a captured call: the numbers of a small tensor, each followed as `item()` follows one.

A replay reads each number where it lies. An int whose value the call goes on with (a length, a position) is a size that
the data decides.

Invariant: the list is the plain one but for numbers that behave like theirs; of larger tensors it is plain, and
the call runs its Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchlazy.lazy.geometry import geometry
from torchlazy.lazy.tensor import LazyTensor
from torchlazy.lazy.traced_numbers import as_seen

if TYPE_CHECKING:
    from torchlazy.lazy.capture import Capture

_MOST_FLOATS = 64
_MOST_INTS = 8  # as many sizes as a template lets the data decide


def listed(capture: Capture, tensor: LazyTensor) -> Any:
    """The tensor's numbers in nested lists; NotImplemented where they are too many to be followed one by one."""
    most = _MOST_FLOATS if tensor.dtype.is_floating_point else 0 if tensor.dtype.is_complex else _MOST_INTS
    if not tensor.dim() or not 0 < tensor.numel() <= most:
        return NotImplemented
    if capture.fullgraph:
        capture.lets_cut("tolist")
    recorder = capture.recorder
    with recorder.lock:
        real = recorder.real(tensor, "tolist")
    with recorder.apart():
        values = real.cpu().tolist()
    return _numbers(capture, tensor, values, 0, tensor._geometry.offset)


def _numbers(capture: Capture, tensor: LazyTensor, values: Any, dim: int, offset: int) -> Any:
    whole = tensor._geometry
    if type(values) is list:
        step = whole.strides[dim]
        return [_numbers(capture, tensor, v, dim + 1, offset + i * step) for i, v in enumerate(values)]
    if type(values) is float:
        capture.of_lists.add(capture.sources)
    one = geometry((), (), offset, whole.dtype, whole.device, whole.compute, whole.bits)
    return as_seen(capture.item_of(tensor._storage_, one, values))


__all__ = ["listed"]

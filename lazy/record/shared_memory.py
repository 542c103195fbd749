"""Memory shared outside of torch: with NumPy arrays, consumers of DLPack, mapped files, other processes.

Such memory is read and written without any call of torch. Under `lazy_mode` an operator that reads it is recorded with
a copy of its current values, and one that writes it is run before it returns.

Invariant: all shared memory is known here, perhaps more than that, with two exceptions that are taken for the
program's own: memory whose address a caller kept, and memory of parameters in files or shared between processes.
"""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torchlazy.lazy.record.tensor import LazyTensor
from torchlazy.lazy.torch_private.dispatch import memory_key
from torchlazy.lazy.torch_private.holders import is_held_raw
from torchlazy.lazy.trace.geometry import Geometry
from torchlazy.lazy.trace.storage import LazyStorage

if TYPE_CHECKING:
    from torchlazy.lazy.record.recorder import Recorder
    from torchlazy.lazy.trace.op_schema import OpPlan


class SharedMemory:
    """The storages whose memory is shared outside of torch."""

    def __init__(self) -> None:
        self._storages: weakref.WeakSet[LazyStorage] = weakref.WeakSet()
        self._holders: dict[int, list[weakref.ref[Any]]] = {}  # by the memory's identity; each holder keeps it alive
        self._raw: dict[int, weakref.ref[Any]] = {}  # raw storages that the program asked for, by their identity

    def add(self, storage: LazyStorage) -> None:
        """This storage's memory is shared as long as it lives."""
        self._storages.add(storage)

    def add_holder(self, tensor: torch.Tensor, holder: Any) -> None:
        """The memory of an ordinary tensor is shared as long as `holder` lives, which keeps that memory alive."""
        key = memory_key(tensor)
        self._holders.setdefault(key, []).append(weakref.ref(holder, lambda gone: self._let_go(key, gone)))

    def _let_go(self, key: int, gone: weakref.ref[Any]) -> None:
        held = [ref for ref in self._holders.pop(key, ()) if ref is not gone]
        if held:
            self._holders[key] = held

    def add_raw(self, tensor: torch.Tensor) -> None:
        """Somebody has the memory as a raw storage: others hold it as long as he does."""
        with torch._C.DisableTorchFunction():
            memory = tensor.untyped_storage()
        key = memory._cdata
        self._raw[key] = weakref.ref(memory, lambda gone: self._raw.pop(key, None))  # it lives as long as the memory

    def _is_held_raw(self, storage: LazyStorage) -> bool:
        if storage.real is None or (key := memory_key(storage.real)) not in self._raw:
            return False
        if is_held_raw(storage.real):
            return True
        del self._raw[key]
        return False

    def add_if_foreign(self, storage: LazyStorage, tensor: torch.Tensor) -> None:
        """Memory of an ordinary tensor that did not come from torch's allocator may be shared."""
        if tensor.device.type == "cpu" and not isinstance(tensor, torch.nn.Parameter):
            with torch._C.DisableTorchFunction():
                if not tensor.untyped_storage().resizable():
                    self.add(storage)

    def __contains__(self, storage: LazyStorage) -> bool:
        if storage in self._storages or (self._raw and self._is_held_raw(storage)):
            return True
        return bool(self._holders) and storage.real is not None and memory_key(storage.real) in self._holders

    def __bool__(self) -> bool:
        return bool(self._holders) or bool(self._storages) or bool(self._raw)


def accepts_copies(plan: OpPlan, position: int | str) -> bool:
    """Whether the operator only reads this argument and returns no view of it, so that a copy will do."""
    if plan.kind not in ("pure", "inplace", "out"):
        return False
    return not any(plan.names[i] == position or i == position for i in plan.written)


def copy_of_now(recorder: Recorder, tensor: LazyTensor) -> LazyTensor:
    """A lazy tensor of the same value and geometry (but for where it begins) on memory of its own."""
    geom = tensor._geometry
    with recorder.apart():
        real = recorder.real(tensor, "shared memory")
        return recorder.new_real_tensor(_copied(real, geom), geom.device)


def _copied(real: torch.Tensor, geom: Geometry) -> torch.Tensor:
    """A copy with strides of the same order: the very strides, unless there are gaps between the elements."""
    once = tuple(1 if stride == 0 else n for n, stride in zip(geom.shape, geom.strides, strict=True))
    used = geom.span - geom.offset
    if math.prod(once) >= used:
        row = real.as_strided((used,), (1,), real.storage_offset()).clone()
        return row.as_strided(geom.shape, geom.strides, 0)
    # Gaps, perhaps large ones: a view of a mapped file.
    order = sorted(range(real.dim()), key=lambda d: (-geom.strides[d], d))
    places = sorted(range(real.dim()), key=order.__getitem__)
    window = real.as_strided(once, geom.strides, real.storage_offset())
    dense = window.permute(order).clone(memory_format=torch.contiguous_format).permute(places)
    return dense.expand(geom.shape)

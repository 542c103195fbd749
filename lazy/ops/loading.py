"""Lazy tensors read from files and pickles: tensors that share memory there share it here.

Invariant: host memory of a file becomes one lazy storage as long as a host tensor on it is alive, which is while the
file is read; each tensor is the view of it that was saved.
"""

from __future__ import annotations

import weakref

import torch
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.record.saving import refuse_old_files
from torchlazy.lazy.record.tensor import LAZY, LazyTensor, wrap
from torchlazy.lazy.torch_private.dispatch import below_autograd, without_bits
from torchlazy.lazy.trace.geometry import geometry_like
from torchlazy.lazy.trace.storage import LazyStorage


class LoadedMemory:
    """Memory that is being read, by its identity on the host."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[LazyStorage]]] = {}

    def tensor(self, host: torch.Tensor) -> LazyTensor | None:
        """The lazy tensor for one of a file; None where it is better moved by itself."""
        recorder = self._recorder
        if isinstance(host, LazyTensor) or recorder.mode_depth or recorder.capture is not None:
            return None
        with recorder.lock, below_autograd():
            memory = host.untyped_storage()
            if host.device.type != "cpu" or memory.nbytes() % host.itemsize:
                return None
            self._known = {key: pair for key, pair in self._known.items() if pair[0]() is not None}
            storage = self._known[memory._cdata][1]() if memory._cdata in self._known else None
            if storage is None or storage.base.compute != recorder.target:
                storage = loaded_storage(recorder, host)
            self._known[memory._cdata] = weakref.ref(host), weakref.ref(storage)
            return loaded_view(storage, host)


def loaded_storage(recorder: Recorder, host: torch.Tensor) -> LazyStorage:
    """All of the tensor's memory, on the compute device: in the tensor's own geometry where it covers all of it."""
    refuse_old_files("_legacy_load")
    memory, host = host.untyped_storage(), without_bits(host.detach())
    if not host.is_contiguous() or host.nbytes != memory.nbytes():
        count = memory.nbytes() // host.itemsize
        host = torch.empty(0, dtype=host.dtype, device="cpu").set_(memory, 0, (count,), (1,))  # type: ignore[call-overload]
    return recorder.new_real_tensor(host.to(recorder.target, copy=True), LAZY)._storage_


def loaded_view(storage: LazyStorage, host: torch.Tensor) -> LazyTensor:
    """The view of the storage that the tensor is of its own memory."""
    return wrap(storage, geometry_like(host, LAZY, storage.base.compute), None, -1)


__all__ = ["LoadedMemory", "loaded_storage", "loaded_view"]

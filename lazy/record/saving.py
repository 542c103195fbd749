"""Lazy tensors in files and pickles: they are saved as views of a host copy of their memory.

Invariant: tensors that share memory are saved as views of one copy of it, as long as one of these views is alive (the
pickler holds it) and nothing was written since.
"""

from __future__ import annotations

import sys
import weakref

import torch
from torchlazy.lazy.trace.geometry import Geometry, show_bits
from torchlazy.lazy.trace.storage import LazyStorage


def refuse_old_files(function: str) -> None:
    """Raise an error inside of this function of torch's: its files list tensors first and their memory later, so that
    lazy tensors, whose memory is copied at once, would get uninitialised values."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_globals.get("__name__") == "torch.serialization":
            raise RuntimeError(
                "lazy tensors cannot be in files of torch's old format (_use_new_zipfile_serialization=False) / save "
                "them in the new one, or tensor.cpu(); read such a file with map_location='cpu' and move its tensors"
            )
        frame = frame.f_back


def host_view(storage: LazyStorage, geom: Geometry, real: torch.Tensor, epoch: int) -> torch.Tensor:
    """The view of a host copy of the storage's memory `real`; call it where nothing is recorded."""
    now = (epoch, storage.version, real._version, storage.base)
    then, window = storage.saved or (None, None)
    last = None if window is None or then != now else window()
    row = _copied(storage.base, real) if last is None else _row_of(last, storage.base)
    if geom.dtype != storage.base.dtype:
        count = row.nbytes // geom.dtype.itemsize
        row = row.view(torch.uint8)[: count * geom.dtype.itemsize].view(geom.dtype)
    (found,) = show_bits([row.as_strided(geom.shape, geom.strides, geom.offset)], geom.bits)
    storage.saved = now, weakref.ref(found)
    return found


def _copied(base: Geometry, real: torch.Tensor) -> torch.Tensor:
    """All memory that views can reach, as one row on the host."""
    row = real.as_strided((base.span,), (1,), real.storage_offset())
    return row.clone() if row.device.type == "cpu" else row.cpu()


def _row_of(window: torch.Tensor, base: Geometry) -> torch.Tensor:
    row = torch.empty(0, dtype=base.dtype, device="cpu")
    return row.set_(window.untyped_storage(), 0, (base.span,), (1,))  # type: ignore[call-overload, no-any-return]


__all__ = ["host_view", "refuse_old_files"]

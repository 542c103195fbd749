"""Memory of the lazy device that others hold as well: raw storages, sparse tensors, consumers of DLPack.

They read and write it without a word to the recorder: an operator that meets it in a trace is run before it returns.

Invariant: a lent storage is pinned, and nothing of it is recorded between two operators. Once nobody else holds its
memory it is an ordinary storage again, from the next time that somebody asks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torchlazy.lazy.torch_private.dispatch import below_autograd, memory_key
from torchlazy.lazy.torch_private.holders import other_holders
from torchlazy.lazy.trace.geometry import flat
from torchlazy.lazy.trace.storage import LazyStorage, storage_of

if TYPE_CHECKING:
    from torchlazy.lazy.record.recorder import Recorder
    from torchlazy.lazy.record.tensor import LazyTensor


class LentStorage(LazyStorage):
    """A storage on the lazy device whose memory others hold. Walks, which know ordinary ones only, leave it alone."""


def is_lent(storage: LazyStorage, target: str) -> bool:
    """Whether others hold the storage's memory where the target is; else it becomes an ordinary one."""
    if type(storage) is not LentStorage:
        return False
    if storage.base.compute == target and storage.real is not None and other_holders(storage.real):
        return True
    _let_go(storage)
    return False


def _let_go(storage: LazyStorage) -> None:
    storage.__class__ = LazyStorage
    storage.pinned = False


def is_pinned(storage: LazyStorage) -> bool:
    """Whether new values must be written into the storage's own memory: as `pinned` says, if it is not lent in vain."""
    return storage.pinned and (type(storage) is not LentStorage or is_lent(storage, storage.base.compute))


def stays_lent(recorder: Recorder, storage: LazyStorage) -> bool:
    """Whether others hold the memory that becomes an input of the trace, which is then cut behind this operator."""
    if not is_lent(storage, recorder.target):
        return False
    recorder.is_overdue, recorder.path = True, None
    if recorder.capture is not None:
        recorder.capture.refuse("it uses memory that others hold, too: a raw storage, a sparse tensor")
    return True


def is_held_memory_pending(recorder: Recorder) -> bool:
    """Whether the trace has a new value for memory that others hold as well."""
    waiting = [storage for ref in recorder._written if (storage := ref()) is not None]
    return any(storage.pinned and storage.dirty and storage.epoch == recorder.epoch for storage in waiting)


def lend(recorder: Recorder, tensor: LazyTensor, cause: str) -> torch.Tensor:
    """The memory of a tensor on the lazy device for one who keeps it."""
    storage = tensor._storage_
    with recorder.lock:
        if storage.epoch == recorder.epoch:  # what was recorded may read it
            recorder.cut(cause)
        real = recorder.real(tensor, cause)
        if storage.real is not None and not storage.pinned:
            with recorder.apart():
                storage.real = _whole(storage, storage.real)
            real = recorder.real(tensor, cause)
        recorder.rematerialize_pending([real])
        mark_lent(recorder, storage)
        return real


def storage_on(recorder: Recorder, raw: torch.UntypedStorage, dtype: torch.dtype, device: torch.device) -> LazyStorage:
    """The lazy storage whose memory this raw storage is: the one that lent it, or a new one on the same memory."""
    found = recorder.lent.get(raw._cdata)
    if found is not None and found.real is not None and memory_key(found.real) == raw._cdata:
        return found
    with below_autograd():
        count = raw.nbytes() // dtype.itemsize
        row = torch.empty(0, dtype=dtype, device=raw.device).set_(raw, 0, (count,), (1,))  # type: ignore[call-overload]
    made = storage_of(flat(count, dtype, device, str(row.device)), row)
    mark_lent(recorder, made)
    return made


def keep_lent(storage: LazyStorage) -> None:
    """Other processes hold the memory, which no count tells: it stays lent as long as the storage lives."""
    assert storage.real is not None
    storage.kept = storage.real.detach()  # type: ignore[attr-defined]


def mark_lent(recorder: Recorder, storage: LazyStorage) -> None:
    """Others may hold the storage's memory, which is there; whether they do is seen when it is next met."""
    if storage.base.device.type != "lazy" or storage.real is None:
        return
    if type(storage) is LazyStorage:
        storage.__class__ = LentStorage
        storage.pinned = True
    if storage.epoch == recorder.epoch:  # the trace has it, and is cut behind this operator
        recorder.is_overdue, recorder.path = True, None
    recorder.lent[memory_key(storage.real)] = storage


def _whole(storage: LazyStorage, real: torch.Tensor) -> torch.Tensor:
    """The storage's memory, as all of a piece of memory: places in it are places in the raw storage."""
    base = storage.base
    if not real.storage_offset() and real.untyped_storage().nbytes() == base.nbytes:
        return real
    row = real.as_strided((base.span,), (1,), real.storage_offset()).clone()
    return row.as_strided(base.shape, base.strides, 0)


__all__ = [
    "LentStorage", "is_held_memory_pending", "is_lent", "is_pinned", "keep_lent", "lend", "mark_lent", "stays_lent",
    "storage_on",
]  # fmt: skip

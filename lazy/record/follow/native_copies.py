"""Private torch API by which native code makes tensors: see `runtime/native/tensor_copies.py`.

Why private: every operator on the lazy device makes a tensor, and torch's one function for that has fifteen arguments,
whose parsing takes longer than all the rest. The functions used here are in no header that could be included without
seconds of compiling. So they are used only with the versions of torch that they were tested with, and only after a few
tensors made by them were found to be correct.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import torch
from torchlazy.lazy.record.tensor import make_tensor, making
from torchlazy.lazy.torch_private.dispatch import above_dispatch, tensor_readers
from torchlazy.lazy.trace.geometry import Geometry
from torchlazy.runtime.native.tensor_copies import Prototype, TensorCopies

_TRIED = ("2.11.", "2.12.", "2.13.")
_FUNCTIONS = (
    "_ZNK2at10TensorBase13variable_dataEv",
    "_ZN3c1017make_storage_implENS_11StorageImpl15use_byte_size_tENS_6SymIntENS_7DataPtrEPNS_9AllocatorEbSt8optional"
    "INS_6DeviceEE",
    "_ZN3c104impl28tls_is_dispatch_key_excludedENS_11DispatchKeyE",
    "_ZN3c104impl29tls_set_dispatch_key_excludedENS_11DispatchKeyEb",
    "_ZN3c1013InferenceMode10is_enabledEv",
    "_Z16THPVariable_WrapRKN2at10TensorBaseEP11_typeobject",
    "aoti_torch_delete_tensor_object",
    "_Znwm",
)
_ALLOCATOR_OF = "_ZN3c1012GetAllocatorERKNS_10DeviceTypeE"
_WORDS = 24  # of 8 bytes; an implementation has more


def tensor_copies() -> TensorCopies | None:
    """How native code copies tensors; None where that is not known to work."""
    readers = tensor_readers()
    if not torch.__version__.startswith(_TRIED) or readers is None or sys.byteorder != "little":
        return None
    library = ctypes.CDLL(torch._C.__file__)
    functions = [getattr(library, name, None) for name in _FUNCTIONS]
    allocator_of: Any = getattr(library, _ALLOCATOR_OF, None)
    meta: Any = getattr(library, "aoti_torch_device_type_meta", None)
    if allocator_of is None or meta is None or not all(functions):
        return None
    allocator_of.restype, allocator_of.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    with above_dispatch(), torch._C.DisableTorchFunction(), torch.inference_mode(False):
        bare, number = torch.zeros(2, device="cpu"), torch.zeros(3, dtype=torch.int64, device="meta")
        keys = _place(bare, number, lambda tensor: torch._C._dispatch_keys(tensor).raw_repr())  # type: ignore[attr-defined]
        storage = _place(bare, number, lambda tensor: tensor.untyped_storage()._cdata)
    if keys is None or storage is None:
        return None
    allocator = allocator_of(ctypes.byref(ctypes.c_int8(meta())))
    addresses: Any = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]  # type: ignore[arg-type]
    python_key: Any = torch._C.DispatchKey.Python  # type: ignore[attr-defined]
    ordinary = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView).raw_repr()  # type: ignore[attr-defined]
    return TensorCopies((*addresses, allocator, int(python_key), 8 * readers.words[0], keys, ordinary, storage))


def prototype_of(geom: Geometry, copies: TensorCopies) -> Prototype:
    """The tensor that tensors of this geometry are copied from.

    It has no storage: else each copy would count as a reference to it. A sparse tensor, which has none either, takes it
    over. It is not the user's tensor: a search for tensors among the objects that Python collects must not find it.
    """
    place = copies.words[-1]
    with above_dispatch(), torch._C.DisableTorchFunction(), torch.inference_mode(False):
        kept: torch.Tensor = make_tensor(*(geom.making or making(geom)))
        nbytes = torch.Tensor.untyped_storage(kept).nbytes()
        sparse = torch.zeros(1, device="cpu").to_sparse()
        ours, other = (ctypes.c_int64.from_address(tensor._cdata + place) for tensor in (kept, sparse))
        storage, ours.value = ours.value, 0  # an interrupt after this leaks it, which is better than to free it twice
        other.value = storage
        del sparse
    ctypes.pythonapi.PyObject_GC_UnTrack(ctypes.py_object(kept))
    return Prototype(kept, nbytes)


def is_same(copy: Callable[[Any], torch.Tensor], geom: Geometry, copies: TensorCopies) -> bool:
    """Whether copies of the prototype of this geometry equal what `make_tensor` makes."""
    prototype = prototype_of(geom, copies).for_native()
    first, second = copy(prototype), copy(prototype)
    with above_dispatch(), torch._C.DisableTorchFunction(), torch.inference_mode(False):
        made = make_tensor(*(geom.making or making(geom)))
        memories = {torch.Tensor.untyped_storage(tensor)._cdata for tensor in (first, second, made)}
        return _facts(first) == _facts(second) == _facts(made) and len(memories) == 3


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    keys = torch._C._dispatch_keys(tensor).raw_repr()  # type: ignore[attr-defined]
    storage = torch.Tensor.untyped_storage(tensor)
    return (
        type(tensor), keys, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device,
        torch.Tensor.requires_grad.__get__(tensor), tensor.is_leaf, tensor._version, tensor.is_inference(),  # type: ignore[attr-defined]
        tensor.layout, storage.nbytes(), torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(tensor),  # type: ignore[attr-defined]
    )  # fmt: skip


def _place(one: torch.Tensor, other: torch.Tensor, fact: Callable[[torch.Tensor], int]) -> int | None:
    """The offset of this word in tensors' implementations, in bytes; None if it is not found exactly once."""
    found = [
        i for i in range(1, _WORDS) if all(_word(tensor, i) == fact(tensor) % (1 << 64) for tensor in (one, other))
    ]
    return 8 * found[0] if len(found) == 1 else None


def _word(tensor: torch.Tensor, place: int) -> int:
    return ctypes.c_uint64.from_address(tensor._cdata + 8 * place).value

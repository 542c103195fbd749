"""Methods of torch that read memory, or order a GPU's streams, without an operator: the native recorder is told before.

Why private: torch has no hook for them. Their C functions are exchanged in place, once, so that each method stays the
object that it was: to function modes, to subclasses, and to tables of other code.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch._tensor_str

# They may be called on an alias that was there before its memory was written; Python's methods (`storage`, `__array__`,
# `__deepcopy__`, ...) come down to these.
_READERS = (
    "tolist", "numpy", "data_ptr", "const_data_ptr", "mutable_data_ptr", "untyped_storage", "pin_memory", "apply_",
    "map_", "map2_",
)  # fmt: skip
_OF_STORAGES = (
    "__getitem__", "__setitem__", "copy_", "fill_", "data_ptr", "_byteswap", "_write_file", "_set_from_file", "resize_",
    "_share_filename_cpu_", "_share_fd_cpu_", "_share_cuda_",
)  # fmt: skip
_EXPORTS = ("_to_dlpack", "_to_dlpack_versioned")  # `__dlpack__`
# `torch.cuda.Stream`'s own methods come down to these.
_ORDERS = (("_CudaEventBase", "record"), ("_CudaEventBase", "wait"), ("_CudaStreamBase", "synchronize"))
_SYNCHRONIZE = "_cuda_synchronize"  # `torch.cuda.synchronize`


def watch_methods(library: Any) -> None:
    """From here on the loaded C++ is asked before each of them. `print` cuts once; its own operators go unrecorded."""
    base: Any = torch.Tensor.__base__
    native = torch._C
    reading = {name: getattr(base, name) for name in _READERS if hasattr(base, name)}
    storage = native.StorageBase
    reading |= {f"Storage.{name}": getattr(storage, name) for name in _OF_STORAGES if hasattr(storage, name)}
    reading |= {"__dlpack__" + name[10:]: getattr(native, name) for name in _EXPORTS if hasattr(native, name)}
    ordering = {}
    if torch.cuda.is_available():
        ordering = {f"{kind[5:-4]}.{name}": getattr(getattr(native, kind), name) for kind, name in _ORDERS}
        ordering["torch.cuda.synchronize"] = getattr(native, _SYNCHRONIZE)
    library.watch_methods(reading, {"set_": base.set_}, ordering)
    _watch_printing(library)


def _watch_printing(library: Any) -> None:
    original = torch._tensor_str._str
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def told(self: torch.Tensor, *, tensor_contents: Any = None) -> str:
        if not library.before_read("print", self):
            return original(self, tensor_contents=tensor_contents)  # type: ignore[no-any-return, no-untyped-call]
        before = library.pause()
        try:
            return original(self, tensor_contents=tensor_contents)  # type: ignore[no-any-return, no-untyped-call]
        finally:
            library.restore(before)

    torch._tensor_str._str = told

"""Who else holds a tensor's memory, or an object's attributes: told by torch's and CPython's counts of references."""

from __future__ import annotations

import sys

import torch


def other_holders(tensor: torch.Tensor) -> int:
    """How many hold the tensor's memory beside it: tensors (parts of sparse ones too), capsules, raw storages.

    Why private: torch's count of who holds a storage has no public name. It counts a raw storage that Python has once,
    however often Python holds it, and whether it still does: that, CPython's own count tells.
    """
    with torch._C.DisableTorchFunction():
        memory = tensor.untyped_storage()
        return torch._C._storage_Use_Count(memory._cdata) + sys.getrefcount(memory) - _ALONE  # type: ignore[attr-defined, no-any-return]


def is_held_raw(tensor: torch.Tensor) -> bool:
    """Whether somebody in Python holds the tensor's memory as a raw storage, typed or not.

    Why private: torch tells only by the object's count of references, and asking must not look like a read by the user.
    """
    with torch._C.DisableTorchFunction():
        memory = tensor.untyped_storage()
        return sys.getrefcount(memory) > _UNHELD


def is_scripted(value: object) -> bool:
    """Whether C++ holds the object's attributes: a scripted or traced module, one of its methods, or an object of it.

    Why private: methods and plain objects have no public class.
    """
    return isinstance(value, _SCRIPTED)


_SCRIPTED = (
    torch.jit.ScriptModule, torch.jit.RecursiveScriptClass, torch._C.ScriptObject, torch._C.ScriptMethod
)  # type: ignore[attr-defined]  # fmt: skip
_ALONE = _UNHELD = 0


def _calibrate() -> None:
    """What the counts are for a tensor that is alone on its memory: this differs from version to version."""
    global _ALONE, _UNHELD
    tensor = torch.empty(1, device="cpu")
    _ALONE = other_holders(tensor)
    while is_held_raw(tensor):
        _UNHELD += 1


_calibrate()

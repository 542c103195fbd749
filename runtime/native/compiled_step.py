"""Follows a known trace natively: the steps of `lazy/record/follow/compiled_step.py` in one C++ function.

The function is given to torch as a callable of Python's; what it compares with and makes stands in tuples that
`lazy/record/follow/native.py` fills. It calls Python's C functions through addresses that ctypes gives, as the guards'
native pass does (`runtime/native/identity_check.py`), and needs no headers of Python's or torch's.

Invariant: it makes new objects first. From its first read of a tensor to its last change of the trace it calls nothing
that could run Python code, so that no other thread, signal handler or finalizer comes in between. Whatever is not as
the tuple says is left to the general way, with nothing changed.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchlazy.runtime.native import compiled_step_kinds, compiled_step_source, tensor_copies
from torchlazy.runtime.native.code import NativeCode, native_function, python_addresses
from torchlazy.runtime.native.tensor_copies import COPIES, TensorCopies

_FUNCTIONS = (
    "PyObject_Call", "PyObject_CallNoArgs", "PyObject_Vectorcall", "PyDict_GetItemWithError", "PyDict_SetItem",
    "PyDict_Copy", "PyDict_Size", "PyObject_GenericGetDict", "PyObject_GenericSetDict", "PyTuple_Size", "PyTuple_Pack",
    "PyList_Size", "PyList_GetItem", "PyList_SetItem", "PyList_Append", "PyObject_RichCompareBool", "PyNumber_Add",
    "Py_IncRef", "Py_DecRef", "PyErr_Occurred", "PyErr_Clear", "PyList_New", "PyTuple_New",
    "PyLong_FromSsize_t", "PyFloat_AsDouble",
)  # fmt: skip
# What the table of one recorder has behind the functions: objects, then places within objects, in bytes.
OBJECTS = (
    "none", "yes", "no", "zero", "one", "tuple_type", "list_type", "dict_type", "int_type", "float_type",
    "tensor_type", "storage_type", "is_scalar", "general", "general_detach", "state", "made", "make_tensor",
    "unknown", "is_grad_enabled", "is_inference", "writes_with_grad", "at", "trace_epoch", "inputs", "input_memory",
    "input_versions", "target", "counted", "has_mode_tensors", "storage", "geometry", "slot", "epoch", "seen", "real",
    "poison", "tensor_is_inference", "make_otherwise", "enter_numbers", "general_drawn",
    "raise_versions", "add_prototype",
)  # fmt: skip
PLACES = (
    "record", "idle", "base", "dirty", "storage_epoch", "storage_slot", "version", "making", "compute", "prototype",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class NativeWalk:
    """What torch is to call for an operator that is walked to, and for a detach; `copy` copies prototypes."""

    walk: Callable[..., Any]
    detach: Callable[..., Any]
    copy: Callable[[Any], torch.Tensor] | None


def native_walk(objects: Sequence[Any], places: Sequence[int], copies: TensorCopies | None) -> NativeWalk | None:
    """The functions of a walk; None where there is no compiler, and until they are compiled.

    `objects` are those that `OBJECTS` names, in that order, and `places` those of `PLACES`, in bytes. The functions
    keep the objects alive.
    """
    found = _loaded()
    if found is None:
        return None
    methods, size = found
    addresses = python_addresses(_FUNCTIONS)
    words = (0,) * len(COPIES) if copies is None else copies.words
    count = len(addresses) + len(OBJECTS) + len(PLACES) + len(COPIES)
    table = (ctypes.c_void_p * count)(*addresses, *map(id, objects), *places, *words)
    if ctypes.sizeof(table) != size or (len(objects), len(places)) != (len(OBJECTS), len(PLACES)):
        raise RuntimeError("torchlazy: internal error: the table of a native walk has another size; please report this")
    own, kept = bytes(table), tuple(objects)
    walk, detach, copy = (native_function(method, own, kept) for method in methods)
    return NativeWalk(walk, detach, None if copies is None else copy)


def is_coming() -> bool:
    """Whether the functions are being compiled in the background, which begins with the first question."""
    return _loaded() is None and CODE.is_coming


def _text() -> str:
    return (
        (compiled_step_source.TEXT + tensor_copies.TEXT + compiled_step_kinds.TEXT)
        .replace("OBJECTS_", ", ".join(OBJECTS))
        .replace("PLACES_", ", ".join(PLACES))
        .replace("COPIES_", ", ".join(COPIES))
    )


CODE = NativeCode("native_walk", _text, (*_FUNCTIONS, "PyCFunction_NewEx"), "known traces are followed in Python")


def _loaded() -> tuple[tuple[int, ...], int] | None:
    """Where the three functions are described, and the size of their table; None where they cannot be compiled, and
    until they are."""
    address = CODE.if_there()
    return None if address is None else _described(address)


@functools.cache
def _described(address: int) -> tuple[tuple[int, ...], int]:
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    # Where bytes and tuples have what is in them: their sizes of nothing, but for the zero at the end of bytes.
    layout = (ctypes.c_int64 * 2)(bytes.__basicsize__ - 1, tuple.__basicsize__)
    answer = (ctypes.c_int64 * 3)()
    size = kind(address)(ctypes.addressof(layout), ctypes.addressof(answer))
    return tuple(answer), size

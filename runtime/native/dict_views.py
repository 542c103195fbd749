"""Which dicts show what is in them to C code as they do to Python code, in the same order.

Invariant: looking runs no code of the dict's class.
"""

from __future__ import annotations

import ctypes
import functools
from collections import OrderedDict
from typing import Any


def keeps_order(container: Any) -> bool:
    """Whether it is a dict whose entries the native pass meets as Python code does."""
    kind: Any = type(container)
    return _is_plain_dict(kind)


def shows_all(container: Any) -> type | None:
    """`dict` or `OrderedDict`, if its live views show what that class's do, whatever items it gives; else None."""
    kind: Any = type(container)
    return next((base for base in (OrderedDict, dict) if _shows_as(kind, base)), None)


_ASKED_OF_VIEWS = ("__iter__", "__len__", "keys", "values")


@functools.cache
def _shows_as(kind: Any, base: Any) -> bool:
    return issubclass(kind, base) and all(getattr(kind, name) is getattr(base, name) for name in _ASKED_OF_VIEWS)


@functools.cache
def _is_plain_dict(kind: Any) -> bool:
    return _shows_as(kind, dict) and kind.__getitem__ is dict.__getitem__


def is_without_gaps(container: dict[Any, Any]) -> bool:
    """Whether the place of each entry, as PyDict_Next counts them, is its number; where some were deleted it is not."""
    key, value, place = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_ssize_t(len(container) - 1)
    if not keeps_order(container) or not container:
        return False
    found = _dict_next(container, ctypes.byref(place), ctypes.byref(key), ctypes.byref(value))
    return bool(found) and key.value == id(next(reversed(container)))


_Next = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_dict_next = _Next(("PyDict_Next", ctypes.pythonapi))

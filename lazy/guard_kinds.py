"""Things of Python's own libraries that hold what code reads: context variables, thread locals, weak references,
read-only views of dicts, memory of plain bytes, and things that give something else each time they are asked.

Invariant: looking changes nothing: no iterator is advanced, no code of the user's is run.
"""

from __future__ import annotations

import array
import contextvars
import ctypes
import gc
import io
import multiprocessing.sharedctypes
import operator
import os
import queue
import random
import threading
import types
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy
from torchlazy.lazy.guard_code import is_library
from torchlazy.lazy.guard_places import GONE

_Data: type = ctypes.c_int.__mro__[-2]  # what all of ctypes' data derives from
_Shared: type = multiprocessing.sharedctypes.SynchronizedBase
_BYTES = (bytearray, array.array, memoryview, _Data)
_QUEUES = (queue.Queue, queue.SimpleQueue)


@dataclass(frozen=True, eq=False)
class Held:
    """Values that a thing gives to whoever asks it, each with its name, and how another one is put there."""

    read: Callable[[], Iterable[Any]]
    names: tuple[str, ...]
    store: Callable[[int, Any], None] | None = None


def held_by(value: Any) -> Held | None:
    """What the thing holds, if it is one whose contents are asked of it; else None."""
    if isinstance(value, contextvars.ContextVar):
        return Held(lambda: (value.get(GONE),), ("the value of {}",), lambda _, item: _set(value, item))
    if isinstance(value, threading.local):
        names = tuple(value.__dict__)
        read = lambda: tuple(value.__dict__.get(name, GONE) for name in names)  # noqa: E731
        return Held(read, tuple(f"{{}}.{name}" for name in names), lambda i, item: setattr(value, names[i], item))
    if isinstance(value, weakref.WeakMethod):
        return Held(lambda: (value() is None,), ("whether {} is dead",))
    if isinstance(value, weakref.ReferenceType):
        return Held(lambda: (value(),), ("what {} refers to",))
    return None


def _set(variable: contextvars.ContextVar[Any], value: Any) -> None:
    variable.set(value)


def number_held(value: Any) -> Callable[[], int] | None:
    """How many values there are, where that is no length."""
    return (lambda: len(value.__dict__)) if isinstance(value, threading.local) else None


def inside(value: Any) -> Any:
    """The one thing behind a view, a proxy or a bound method of Python's own; GONE if it is no such thing."""
    if isinstance(value, types.MappingProxyType):
        found: Any = gc.get_referents(value)[0]
        return found
    if isinstance(value, (weakref.WeakValueDictionary, weakref.WeakKeyDictionary)):
        return value.data  # type: ignore[union-attr]
    if isinstance(value, os._Environ):
        return value._data  # type: ignore[attr-defined]
    if isinstance(value, _Shared):
        return value._obj  # type: ignore[attr-defined]
    if isinstance(value, weakref.WeakMethod):
        return value()
    if isinstance(value, weakref.ProxyTypes):
        try:
            return value.__init__.__self__  # type: ignore[misc, union-attr]
        except (ReferenceError, AttributeError):
            return GONE
    if isinstance(value, types.BuiltinFunctionType) and not isinstance(value.__self__, (types.ModuleType, type)):
        return value.__self__  # `append = items.append`
    return GONE


def is_memory(value: Any) -> bool:
    """Whether it is memory of plain bytes that anybody may write to."""
    return isinstance(value, _BYTES)


def names_asked_by(value: Any) -> frozenset[str]:
    """The attributes that the thing reads of what it is called with."""
    if not isinstance(value, (operator.attrgetter, operator.methodcaller)):
        return frozenset()
    given = value.__reduce__()[1]
    return frozenset(part for text in given if isinstance(text, str) for part in text.split("."))


def why_unrepeatable(value: Any) -> str:
    """Why a call that reads the thing must run its Python each time; empty if nothing speaks against a replay."""
    if isinstance(value, _QUEUES):
        return "a queue, from which calls take"
    if isinstance(value, io.IOBase):
        try:
            return "a file that is open for reading" if value.readable() else ""
        except ValueError:  # it is closed
            return ""
    if isinstance(value, weakref.ProxyTypes):  # their class has all methods
        return ""
    if is_library(type(value)) and hasattr(type(value), "__next__"):
        return "an iterator, from which calls take"
    return ""


def state_reader(value: Any) -> Callable[[], Any] | None:
    """Reads the state of a generator of Python's or NumPy's random numbers, to be compared; None for other things."""
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else value.getstate
    if isinstance(value, numpy.random.Generator):
        return lambda: repr(value.bit_generator.state)
    if isinstance(value, numpy.random.RandomState):
        return lambda: _plain(value.get_state())
    return None


def generators_of_the_process() -> tuple[tuple[Callable[[], Any], str], ...]:
    """Readers of the generators that `random` and `numpy.random` draw from by themselves, with their names."""
    return (random.getstate, "Python's `random`"), (lambda: _plain(numpy.random.get_state()), "`numpy.random`")


def _plain(state: Any) -> tuple[Any, ...]:
    return tuple(part.tobytes() if isinstance(part, numpy.ndarray) else part for part in state)

"""State inside objects of Python's standard library that code reads, and objects that make a call unrepeatable.

Context variables, thread locals, weak references, caches of functions' results, registrations with abstract classes,
read-only views of dicts, memory of plain bytes; and queues, iterators, files, which give something else each time.

Invariant: looking changes nothing: no iterator is advanced, none of the user's code runs.
"""

from __future__ import annotations

import _abc
import abc
import array
import contextvars
import ctypes
import dataclasses
import functools
import gc
import io
import logging
import multiprocessing.sharedctypes
import operator
import os
import queue
import random
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import numpy
import torch
from torch.utils.weak import WeakIdKeyDictionary
from torchlazy.lazy.compiled.guards.reached import GONE
from torchlazy.lazy.torch_private.holders import is_scripted
from torchlazy.lazy.trace.library_code import is_library

_Data: type = ctypes.c_int.__mro__[-2]  # the base class of all ctypes data
_Shared: type = multiprocessing.sharedctypes.SynchronizedBase
_BYTES = (bytearray, array.array, memoryview, _Data)
_QUEUES = (queue.Queue, queue.SimpleQueue)
_CACHED: Any = type(functools.lru_cache(int))
_LINK: Any = next(
    kind for kind in gc.get_referents(functools.lru_cache(int)) if "list_elem" in getattr(kind, "__name__", "")
)
_LOCK: Any = type(threading.Lock())
_VIEWS: tuple[Any, ...] = tuple(
    type(view)
    for kind in (dict[Any, Any], OrderedDict[Any, Any])
    for view in (kind().keys(), kind().values(), kind().items())
)
_RENAMED = (id, hash, globals, eval, exec)  # what they do depends on the name by which code calls them
_MANY = 64  # most results in a cache that are guarded


@dataclass(frozen=True, eq=False)
class HeldValues:
    """Values that an object holds, how to read them, the name of each, and how to store another one."""

    read: Callable[[], Iterable[Any]]
    names: tuple[str, ...]
    store: Callable[[int, Any], None] | None = None


def held_by(value: Any) -> HeldValues | None:
    """What the object holds, if it is one of these kinds; else None."""
    if isinstance(value, contextvars.ContextVar):
        return HeldValues(lambda: (value.get(GONE),), ("the value of {}",), lambda _, item: _set(value, item))
    if isinstance(value, contextvars.Context):
        variables = tuple(value)
        told = ("the number of values in {}", *(f"{{}}[{variable.name}]" for variable in variables))
        return HeldValues(lambda: (len(value), *(value.get(variable, GONE) for variable in variables)), told)
    if isinstance(value, threading.local):
        names = tuple(value.__dict__)
        read = lambda: tuple(value.__dict__.get(name, GONE) for name in names)  # noqa: E731
        return HeldValues(read, tuple(f"{{}}.{name}" for name in names), lambda i, item: setattr(value, names[i], item))
    if isinstance(value, weakref.WeakMethod):
        return HeldValues(lambda: (value() is None,), ("whether {} is dead",))
    if isinstance(value, weakref.ReferenceType):
        return HeldValues(lambda: (value(),), ("what {} refers to",))
    if isinstance(value, _CACHED):
        return _results_of(value)
    if isinstance(value, _LOCK):
        return HeldValues(lambda: (value.locked(),), ("whether {} is locked",))
    if isinstance(value, threading.Semaphore):
        return HeldValues(lambda: (value._value,), ("the count of {}",))  # type: ignore[attr-defined]
    if isinstance(value, BaseException):
        return HeldValues(lambda: (value.args,), ("{}.args",), lambda _, item: setattr(value, "args", item))
    if isinstance(value, dataclasses.Field):
        names = ("default", "default_factory", "metadata")
        return HeldValues(lambda: [getattr(value, name) for name in names], tuple(f"{{}}.{name}" for name in names))
    if isinstance(value, threading.Event):
        return HeldValues(lambda: (value.is_set(),), ("whether {} is set",), lambda _, item: _set_event(value, item))
    return None


def settings_of_logger(value: Any) -> list[tuple[dict[str, Any], list[tuple[str, str]]]]:
    """Where a logger's level is stored: entries of dicts, with their names in messages; of other objects none."""
    if not isinstance(value, logging.Logger):
        return []
    found: list[tuple[dict[str, Any], list[tuple[str, str]]]] = [
        (vars(value.manager), [("_disable", "levels disabled")])
    ]
    told, logger = "the {} of {{}}", cast("logging.Logger | None", value)
    while logger is not None:
        found.append((vars(logger), [(name, told.format(name)) for name in ("level", "parent", "disabled")]))
        told, logger = f"{told}'s parent", logger.parent
    return found


def _results_of(function: Any) -> HeldValues | None:
    """The results in a function's cache, if there are tensors among them: these are state. For others see
    `results_kept`."""
    table, results = _cache_of(function)
    if len(table) > _MANY or not any(map(_has_tensor, results)):
        return None
    told = ("how many results {} keeps", *(f"result {i} that {{}} keeps" for i in range(len(table))))
    return HeldValues(lambda: (len(table), *table.values()), told)


def table_of_results(function: Any) -> dict[Any, Any]:
    """The dict in which a function's cache keeps its results."""
    return _cache_of(function)[0]


def results_kept(function: Any) -> Callable[[], bool] | None:
    """A test whether a cache still has the results that are in it now; None where there are none. Those that a full
    cache evicted do not count: computing them again gives the same, from guarded state."""
    table, _ = _cache_of(function)
    then, limit, misses = list(table.values()), function.cache_parameters()["maxsize"], function.cache_info().misses

    def kept() -> bool:
        if len(table) >= len(then) and all(map(operator.is_, table.values(), then)):
            return True
        return limit is not None and len(table) >= limit and function.cache_info().misses > misses

    return kept if then else None


def results_in(function: Any) -> list[Any]:
    """The results that a function's cache keeps."""
    return _cache_of(function)[1]


def is_cache(value: Any) -> bool:
    """Whether it is a function that keeps its results (`functools.lru_cache`)."""
    return isinstance(value, _CACHED)


class Registrations:
    """Which classes are registered with abstract ones, and with those that derive from them."""

    def __init__(self, classes: Iterable[type]) -> None:
        self._classes = tuple(classes)
        self._token, self._found = abc.get_cache_token(), self._look()

    def __call__(self) -> tuple[Any]:
        """One value, which stays the same object while nothing is registered with these classes."""
        token = abc.get_cache_token()  # changes with each registration in the process
        if token != self._token:
            self._token, now = token, self._look()
            self._found = self._found if now == self._found else now
        return (self._found,)

    @property
    def questions(self) -> tuple[tuple[Any, ...], ...]:
        """The C function whose result shows whether the value stays."""
        return ((_abc.get_cache_token,),)

    def _look(self) -> frozenset[tuple[int, int]]:
        found, met, todo = set(), set(self._classes), list(self._classes)
        while todo:
            kind = todo.pop()
            found |= {(id(kind), id(entry())) for entry in _abc._get_dump(kind)[0]}
            below: list[type] = type.__subclasses__(kind)
            derived = [other for other in below if isinstance(other, abc.ABCMeta) and other not in met]
            met.update(derived)
            todo += derived
        return frozenset(found)


def abstract_class(value: Any) -> type | None:
    """The abstract class that a value is, or (of `typing`) is an alias of."""
    if type(value).__module__ == "typing":
        value = getattr(value, "__origin__", None)
    return value if isinstance(value, abc.ABCMeta) else None


def _cache_of(function: Any) -> tuple[dict[Any, Any], list[Any]]:
    """The table of a function's cache, and the results in it. In caches of limited size the table has links of a list,
    whose contents the function itself reports to the collector: a key, a result and the links' type each."""
    count, shown = function.cache_info().currsize, gc.get_referents(function)
    tables = [
        found for found in shown if type(found) is dict and found is not function.__dict__ and len(found) == count
    ]
    if function.cache_parameters()["maxsize"] is None:
        return (tables[0], list(tables[0].values())) if tables else ({}, [])
    places = [i for i, found in enumerate(shown) if found is _LINK][:count]
    table = next((found for found in tables if all(type(item) is _LINK for item in found.values())), {})
    return table, [shown[i - 1] for i in places]


def _has_tensor(value: Any) -> bool:
    if type(value) in (tuple, list):
        return any(map(_has_tensor, value))
    return any(map(_has_tensor, value.values())) if type(value) is dict else isinstance(value, torch.Tensor)


def _set_event(event: threading.Event, value: Any) -> None:
    event.set() if value else event.clear()


def _set(variable: contextvars.ContextVar[Any], value: Any) -> None:
    variable.set(value)


def number_held(value: Any) -> Callable[[], int] | None:
    """Reads the number of values, where the object has no length."""
    return (lambda: len(value.__dict__)) if isinstance(value, threading.local) else None


def inside(value: Any) -> Any:
    """The object behind a view, a proxy or a bound builtin method; GONE for other objects."""
    if isinstance(value, (types.MappingProxyType, *_VIEWS)):
        found: Any = gc.get_referents(value)[0]
        return found
    if isinstance(value, (weakref.WeakValueDictionary, weakref.WeakKeyDictionary, WeakIdKeyDictionary)):
        return value.data  # type: ignore[union-attr]
    if isinstance(value, weakref.WeakSet):
        return value.data  # type: ignore[attr-defined]
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
    if isinstance(value, _CACHED):
        table, results = _cache_of(value)
        kept = [found for found in (*table, *results) if _has_tensor(found)]  # an argument may be one of the keys
        return (value.__wrapped__, *kept) if kept else value.__wrapped__
    if isinstance(value, types.BuiltinFunctionType) and not isinstance(value.__self__, (types.ModuleType, type)):
        return value.__self__  # `append = items.append`
    return GONE


_WEAK: Any = (
    weakref.ReferenceType, weakref.WeakValueDictionary, weakref.WeakKeyDictionary, WeakIdKeyDictionary, weakref.WeakSet,
    *weakref.ProxyTypes,
)  # fmt: skip
_ALIVE = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)


def is_weak(value: Any) -> bool:
    """Whether it refers weakly to others."""
    return isinstance(value, _WEAK)


def targets_of(value: Any) -> list[Any]:
    """What a weak reference, or a container of such, refers to, as far as it lives; without functions and classes."""
    if type(value) in weakref.ProxyTypes:
        found = [inside(value)]
    elif isinstance(value, weakref.WeakMethod):
        found = [getattr(value(), "__self__", None)]
    elif isinstance(value, weakref.ReferenceType):
        found = [value()]
    else:
        found = list(value.values() if isinstance(value, weakref.WeakValueDictionary) else value)
    return [one for one in found if one is not None and one is not GONE and not isinstance(one, _ALIVE)]


def is_memory(value: Any) -> bool:
    """Whether it is memory of plain bytes that any code may write to."""
    return isinstance(value, _BYTES)


def names_asked_by(value: Any) -> frozenset[str]:
    """The attributes that the object reads of what it is called with."""
    if not isinstance(value, (operator.attrgetter, operator.methodcaller)):
        return frozenset()
    given = value.__reduce__()[1]
    return frozenset(part for text in given if isinstance(text, str) for part in text.split("."))


def why_unrepeatable(value: Any) -> str:
    """Why a call that reads the object must run its Python each time; empty if it may be replayed."""
    if any(value is known for known in _RENAMED):
        return f"which is Python's `{value.__name__}` under another name"
    if is_scripted(value):
        return "whose attributes TorchScript holds, unseen"
    if isinstance(value, _QUEUES):
        return "a queue, from which calls remove items"
    if isinstance(value, io.IOBase):
        try:
            return "a file that is open for reading" if value.readable() else ""
        except ValueError:  # it is closed
            return ""
    if isinstance(value, weakref.ProxyTypes):  # their class has every method
        return ""
    if is_library(type(value)) and hasattr(type(value), "__next__"):
        return "an iterator, which calls advance"
    return ""


def state_reader(value: Any) -> Callable[[], Any] | None:
    """Reads the state of a random generator of Python or NumPy, to be compared; None for other objects."""
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else value.getstate
    if isinstance(value, numpy.random.Generator):
        return lambda: repr(value.bit_generator.state)
    if isinstance(value, numpy.random.RandomState):
        return lambda: _plain(value.get_state())
    return None


def generators_of_the_process() -> tuple[tuple[Callable[[], Any], str], ...]:
    """Readers of the global generators of `random` and `numpy.random`, with their names."""
    return (random.getstate, "Python's `random`"), (lambda: _plain(numpy.random.get_state()), "`numpy.random`")


def _plain(state: Any) -> tuple[Any, ...]:
    return tuple(part.tobytes() if isinstance(part, numpy.ndarray) else part for part in state)

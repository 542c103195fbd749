"""Dicts and functions that the interpreter itself watches: while none of them was changed, one word says so.

Python 3.12 and newer report to callbacks that something is about to be stored in a dict, or that a function gets other
code or defaults (`PyDict_Watch`, `PyFunction_AddWatcher`). A report counts up the object's version, and a word of each
group of users that look at it. Objects that change often count up their version alone.

Invariant: one watcher of dicts and one of functions serve the process, of the eight that an interpreter has; there is
none where not each way of changing a dict that is tried here is reported. The users keep the objects alive.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torchlazy.runtime.native.object_layout import word_at

_GROUPS = 64
_Number = ctypes.c_int64
_FUNCTIONS = 6
_DICT_CHANGES, _FUNCTION_CHANGES, _BEGIN, _WATCH, _FORGET, _GROUP_CHANGES = range(_FUNCTIONS)
_PYTHON = ("PyDict_Watch", "PyDict_Unwatch", "PyDict_AddWatcher", "PyDict_ClearWatcher", "PyInterpreterState_Get")


@dataclass(frozen=True, eq=False)
class Watcher:
    """How objects are watched.

    `tell` and `tell_no_more` are the interpreter's, of dicts. `watch` takes an object's address and a group, and gives
    the address of the object's record, whose first word is its version, or 0; `forget` takes that, and gives whether it
    was the last user's. `dict_changes` takes what the interpreter tells.
    """

    tell: Callable[[Any], Any]
    tell_no_more: Callable[[Any], Any]
    of_functions: bool  # whether the interpreter reports changes of functions, too
    watch: Callable[[int, int], int]
    forget: Callable[[int], int]
    dict_changes: Callable[[int, int, int, int], int]
    group_changes: int  # the address of the first group's word
    groups: Iterator[int]


class WatchedObjects:
    """Objects that are watched for one user. `versions`: where the version of each is; `changes`: where the number of
    their changes is, but for those that change `often`."""

    def __init__(self, watcher: Watcher, objects: Sequence[Any]) -> None:
        """Raises MemoryError."""
        self._watcher, self._objects = watcher, list(objects)
        self._after: list[Callable[[], Any]] = []
        self.versions: list[int] = []
        group = next(watcher.groups)
        self.changes = watcher.group_changes + 8 * group
        for value in self._objects:
            if isinstance(value, dict):
                watcher.tell(value)
            record = watcher.watch(id(value), group)
            if not record:
                raise MemoryError
            self.versions.append(record)

    def at_end(self, done: Callable[[], Any]) -> None:
        """Call this before the versions are gone."""
        self._after.append(done)

    def end(self) -> None:
        """The objects are watched no more for this user."""
        for done in self._after:
            done()
        self._after.clear()
        objects = self._objects
        while self.versions:
            value, record = objects[len(self.versions) - 1], self.versions.pop()
            if self._watcher.forget(record) and isinstance(value, dict):
                self._watcher.tell_no_more(value)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.end()


@functools.cache
def watcher_of(description: int) -> Watcher | None:
    """The one watcher, by the functions that stand at this address; None where objects are not watched."""
    api = ctypes.pythonapi
    if not all(hasattr(api, name) for name in _PYTHON):
        return None
    words = [word_at(description + 8 * place) for place in range(_FUNCTIONS)]
    api.PyInterpreterState_Get.restype = ctypes.c_void_p
    if not _function(words[_BEGIN], 1)(api.PyInterpreterState_Get()):
        return None  # another interpreter of this process has it
    number = _registered(api.PyDict_AddWatcher, words[_DICT_CHANGES])
    if number is None:
        return None
    add = getattr(api, "PyFunction_AddWatcher", None)
    of_functions = add is not None and _registered(add, words[_FUNCTION_CHANGES]) is not None
    asked = [ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.py_object)((name, api)) for name in _PYTHON[:2]]
    found = watcher_with(words, *(functools.partial(ask, number) for ask in asked), of_functions=of_functions)
    if not _reports_each_change(found):
        api.PyDict_ClearWatcher(number)
        return None
    return found


def watcher_with(
    words: Sequence[int], tell: Callable[[Any], Any], tell_no_more: Callable[[Any], Any], *, of_functions: bool
) -> Watcher:
    """A watcher of these native functions."""
    groups = itertools.cycle(range(_GROUPS))
    watch, forget, changes = (
        _function(words[at], count) for at, count in ((_WATCH, 2), (_FORGET, 1), (_DICT_CHANGES, 4))
    )
    return Watcher(tell, tell_no_more, of_functions, watch, forget, changes, words[_GROUP_CHANGES], groups)


def _function(address: int, count: int) -> Any:
    return ctypes.PYFUNCTYPE(_Number, *[_Number] * count)(address)


def _registered(add: Any, function: int) -> int | None:
    """The watcher's number; None where the interpreter has none left."""
    add.argtypes, add.restype = [ctypes.c_void_p], ctypes.c_int
    try:
        number: int = add(function)
    except RuntimeError:
        return None
    return number if number >= 0 else None


class _WatchedSample:
    def __init__(self) -> None:
        self.value = 0


def _store(thing: _WatchedSample, number: int) -> None:
    thing.value = number


def _reports_each_change(watcher: Watcher) -> bool:
    """Whether each of these changes is reported."""
    table: dict[Any, Any] = {"a": 1, "b": 2}
    ordered: OrderedDict[str, int] = OrderedDict(a=1)
    missing: defaultdict[str, list[int]] = defaultdict(list)
    empty: dict[str, Any] = {}
    space: dict[str, Any] = {"number": 0}
    thing, other_thing, kind = _WatchedSample(), _WatchedSample(), type("Probe", (), {})
    own, other_own = thing.__dict__, other_thing.__dict__
    of_class = next(found for found in gc.get_referents(kind) if type(found) is dict)
    exec("def count():\n global number\n number += 1", space)

    def probe(first: Any = (1, 2), *, second: Any = ()) -> None:
        """Whose parts are exchanged."""

    def other() -> int:
        return 3

    changes: list[tuple[Any, Callable[[], Any]]] = [
        (table, lambda: table.update(a=3)), (table, lambda: table.pop("b")), (table, lambda: table.setdefault("c", 1)),
        (table, table.popitem), (table, lambda: table.__ior__({"d": 1})), (table, table.clear),
        (ordered, lambda: ordered.update(b=2)), (ordered, lambda: ordered.popitem(last=False)),
        (ordered, lambda: ordered.__setitem__("c", 1)), (ordered, ordered.clear),
        (missing, lambda: missing["here"]), (empty, lambda: empty.update({"e": 5, "f": 6})),
        (own, lambda: setattr(thing, "value", 1)), (own, lambda: delattr(thing, "value")),
        (own, lambda: setattr(thing, "late", 1)), (of_class, lambda: setattr(kind, "late", 1)),
        (of_class, lambda: setattr(kind, "late", 2)), (of_class, lambda: delattr(kind, "late")),
        # By the time that these end the interpreter stores by shorter ways.
        *((other_own, functools.partial(_store, other_thing, number)) for number in range(64)),
        *((space, space["count"]) for _ in range(64)),
    ]  # fmt: skip
    if watcher.of_functions:
        changes += [
            (probe, lambda: setattr(probe, "__code__", other.__code__)),
            (probe, lambda: setattr(probe, "__defaults__", None)),
            (probe, lambda: setattr(probe, "__kwdefaults__", {"second": 1})),
        ]
    objects = list({id(value): value for value, _ in changes}.values())
    watched = WatchedObjects(watcher, objects)
    try:
        places = dict(zip(map(id, objects), watched.versions, strict=True))
        for owner, change in changes:
            before = word_at(places[id(owner)])
            change()
            if word_at(places[id(owner)]) == before:
                return False
    finally:
        watched.end()
    return True

"""Offsets, in words of 8 bytes, at which Python's own objects keep what guards read: found by trying.

Reading such a word takes a nanosecond, asking for an attribute 20. The version of a dict is a number that no two states
of any dicts have in common: while it stays, so does all that is in the dict. Python 3.10 to 3.12 have it, 3.13 has not.

Invariant: a place is given only where a change of the object changed that very word as it should; else None, and who
asks takes a slower way.
"""

from __future__ import annotations

import ctypes
import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any


@dataclass(frozen=True)
class ObjectLayout:
    """Places of words. `function`: of code, defaults and keyword defaults. `dict_slot(value, own)` gives the address of
    the word that names the object's dict `own`, or 0."""

    dict_size: int | None
    dict_version: int | None
    set_size: int | None
    function: tuple[int, int, int] | None
    bases: int | None
    cell: int | None
    order: int | None  # of an OrderedDict: another word after each change of its order
    dict_slot: Callable[[Any, dict[str, Any]], int]


def word_at(address: int) -> int:
    """The word in memory at the address, which must be an object's that is alive."""
    return ctypes.c_int64.from_address(address).value


@functools.cache
def layout() -> ObjectLayout:
    """The places of this interpreter."""
    return ObjectLayout(
        _dict_size(), _dict_version(), _set_size(), _function(), _bases(), _cell(), _order(), _dict_slot()
    )


def _words_of(value: Any, kind: type) -> list[int]:
    return [word_at(id(value) + 8 * place) for place in range(kind.__basicsize__ // 8)]


def _only(found: list[int]) -> int | None:
    return found[0] if len(found) == 1 else None


def _where(value: Any, kind: type, wanted: int) -> list[int]:
    """Places of the word `wanted`, after the object's count of references and class."""
    return [place for place, word in enumerate(_words_of(value, kind)) if word == wanted and place > 1]


def _size_of(container: Any, kind: type, grow: Callable[[int], Any]) -> int | None:
    for number in range(11):
        grow(number)
    before = _where(container, kind, 11)
    for number in range(11, 20):
        grow(number)
    return _only([place for place in _where(container, kind, 20) if place in before])


def _dict_size() -> int | None:
    table: dict[int, None] = {}
    return _size_of(table, dict, lambda number: table.setdefault(number))


def _set_size() -> int | None:
    """Sets count their places in use too, which only differ from their items after one was taken out."""
    items = set(range(40, 50))
    items.discard(45)
    place = _where(items, set, 9)
    items.discard(46)
    return _only([at for at in _where(items, set, 8) if at in place])


class _Thing:
    def __init__(self) -> None:
        self.value = 0


def _dict_version() -> int | None:
    table: dict[Any, Any] = {"a": 1, "b": 2}
    thing = _Thing()
    own = thing.__dict__
    found = _changed(table, lambda: table.__setitem__("a", 3))
    if len(found) != 1 or found[0] == _dict_size():
        return None

    def store_often() -> None:
        for number in range(64):  # by then the interpreter stores by a shorter way
            before = word_at(id(own) + 8 * found[0])
            thing.value = number + 1
            if word_at(id(own) + 8 * found[0]) == before:
                raise LookupError

    changes: list[Callable[[], Any]] = [
        lambda: table.update(a=4), lambda: table.pop("b"), lambda: table.setdefault("c", 1), lambda: table.popitem(),
        lambda: table.__ior__({"d": 1}), table.clear, lambda: table.update({"e": 5, "f": 6}),
    ]  # fmt: skip
    looks: list[Callable[[], Any]] = [lambda: table.get("e"), lambda: list(table.items()), table.copy]
    try:
        store_often()
    except LookupError:
        return None
    seen = all(found[0] in _changed(table, change) for change in changes)
    return found[0] if seen and not any(_changed(table, look) for look in looks) else None


def _changed(table: dict[Any, Any], change: Callable[[], Any]) -> list[int]:
    before = _words_of(table, dict)
    change()
    return [place for place, now in enumerate(_words_of(table, dict)) if now != before[place] and place > 1]


def _function() -> tuple[int, int, int] | None:
    def probe(first: Any = (1, 2), *, second: Any = ()) -> None:
        """Whose parts are exchanged."""

    def other() -> int:
        return 3

    parts = ("__code__", "__defaults__", "__kwdefaults__")
    others: tuple[Any, ...] = (other.__code__, ([],), {"second": []})
    found: list[int | None] = []
    for name, exchanged in zip(parts, others, strict=True):
        before = _where(probe, FunctionType, id(getattr(probe, name)))
        setattr(probe, name, exchanged)
        after = _where(probe, FunctionType, id(exchanged))
        found.append(_only([place for place in after if place in before]))
    code, defaults, keyword_defaults = found
    if code is None or defaults is None or keyword_defaults is None:
        return None
    return code, defaults, keyword_defaults


def _bases() -> int | None:
    first, second = type("First", (), {}), type("Second", (), {})
    probe: Any = type("Probe", (first,), {})
    before = _where(probe, type, id(probe.__mro__))
    probe.__bases__ = (second,)
    return _only([place for place in _where(probe, type, id(probe.__mro__)) if place in before])


def _cell() -> int | None:
    values: list[list[int]] = [[], []]
    cell = CellType(values[0])
    before = _where(cell, CellType, id(values[0]))
    cell.cell_contents = values[1]
    return _only([place for place in _where(cell, CellType, id(values[1])) if place in before])


def _order() -> int | None:
    """Where an OrderedDict counts its changes, those of its order too, which the dict that it is does not see."""
    table = OrderedDict.fromkeys(range(5))
    seen: list[list[int]] = [_words_of(table, OrderedDict)]
    for key in (0, 1, 2, 3, 4):  # after these the order is the first one again
        table.move_to_end(key)
        seen.append(_words_of(table, OrderedDict))
    places = range(dict.__basicsize__ // 8, OrderedDict.__basicsize__ // 8)
    found = _only([place for place in places if len({words[place] for words in seen}) == len(seen)])
    for look in (lambda: list(table.items()), lambda: table.get(3)):
        look()
    return None if found is None or _words_of(table, OrderedDict)[found] != seen[-1][found] else found


def _dict_slot() -> Callable[[Any, dict[str, Any]], int]:
    find = getattr(ctypes.pythonapi, "_PyObject_GetDictPtr", None)
    if find is None:
        return _nowhere
    ask = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(("_PyObject_GetDictPtr", ctypes.pythonapi))

    def slot(value: Any, own: dict[str, Any]) -> int:
        address = ask(value)
        return address if address and word_at(address) == id(own) else 0

    thing, other = _Thing(), dict[str, Any]()
    place = slot(thing, thing.__dict__)
    thing.__dict__ = other
    return slot if place and word_at(place) == id(other) else _nowhere


def _nowhere(value: Any, own: dict[str, Any]) -> int:
    return 0

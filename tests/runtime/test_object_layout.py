"""Places of words in Python's objects: what is read there is what Python says, through every way of changing it.

Invariant: each test changes objects by ways that the search for the places did not take.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from types import CellType
from typing import Any

import pytest
from torchlazy.runtime.native.object_layout import layout, word_at

FOUND = layout()


def _read(value: Any, place: int) -> int:
    return word_at(id(value) + 8 * place)


def test_all_places_are_found() -> None:
    """On the interpreters that there are; 3.13 has no versions of dicts."""
    if sys.version_info >= (3, 14) or not sys.version_info[:2] >= (3, 10):
        pytest.skip("an interpreter that nobody tried")
    assert None not in (FOUND.dict_size, FOUND.set_size, FOUND.function, FOUND.bases, FOUND.cell, FOUND.order)
    assert (FOUND.dict_version is None) == (sys.version_info >= (3, 13))


def test_sizes() -> None:
    assert FOUND.dict_size is not None and FOUND.set_size is not None
    table: dict[Any, Any] = {}
    items: set[int] = set()
    for number in range(300):
        table[number] = number
        items.add(number)
        if number % 3 == 0:
            del table[number]
            items.discard(number)
        assert _read(table, FOUND.dict_size) == len(table) and _read(items, FOUND.set_size) == len(items)


def test_orders() -> None:
    assert FOUND.order is not None
    table = OrderedDict(a=1, b=2)
    met = {_read(table, FOUND.order)}
    for change in (
        lambda: table.move_to_end("a"), lambda: table.move_to_end("a", last=False), lambda: table.popitem(last=False),
        lambda: table.update(a=1), lambda: table.move_to_end("b"),
    ):  # fmt: skip
        change()
        met.add(_read(table, FOUND.order))
    assert len(met) == 6
    assert list(table.items()) == [("a", 1), ("b", 2)] and _read(table, FOUND.order) in met


class Plain:
    def __init__(self) -> None:
        self.first, self.second = 1, 2


class Derived(Plain):
    """Whose objects have more attributes than fit beside them."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(60):
            setattr(self, f"attribute_{number}", number)


@pytest.mark.skipif(FOUND.dict_version is None, reason="no versions of dicts here")
@pytest.mark.parametrize("kind", [Plain, Derived])
def test_every_store_makes_another_version(kind: type) -> None:
    """Also those that the interpreter has found shorter ways for."""
    assert FOUND.dict_version is not None
    thing: Any = kind()
    own, place = thing.__dict__, FOUND.dict_version

    def store(number: int) -> None:
        thing.first = number

    def store_in(number: int) -> None:
        own["second"] = number

    def store_anew(number: int) -> None:
        del thing.first
        thing.first = number

    def update(number: int) -> None:
        own.update(first=number)

    known = {_read(own, place)}
    for change in (store, store_in, store_anew, update):
        for number in range(1000, 1400):
            change(number)
            now = _read(own, place)
            assert now not in known, (change.__name__, number)
            known.add(now)
    looked = _read(own, place)
    for _ in range(200):
        assert thing.first and own["second"] and list(own) and vars(thing) is own
    assert _read(own, place) == looked


def counted() -> None:
    global COUNT
    COUNT += 1


COUNT = 1000


@pytest.mark.skipif(FOUND.dict_version is None, reason="no versions of dicts here")
def test_versions_of_globals_and_of_classes() -> None:
    from torchlazy.lazy.compiled.guards.globals import dict_of_class

    assert FOUND.dict_version is not None
    own, members = globals(), dict_of_class(Plain)
    for number in range(200):
        before = _read(own, FOUND.dict_version), _read(members, FOUND.dict_version)
        counted()
        Plain.rate = number  # type: ignore[attr-defined]
        assert _read(own, FOUND.dict_version) != before[0] and _read(members, FOUND.dict_version) != before[1]
    del Plain.rate  # type: ignore[attr-defined]


def test_functions_cells_and_classes() -> None:
    assert FOUND.function is not None and FOUND.cell is not None and FOUND.bases is not None

    def function(first: int = 1000, *, second: int = 2000) -> int:
        return first + second

    parts = function.__code__, function.__defaults__, function.__kwdefaults__
    for _ in range(200):
        assert function() == 3000  # until calls of it are short
    assert [_read(function, place) for place in FOUND.function] == list(map(id, parts))
    function.__defaults__, function.__kwdefaults__ = (1,), {"second": 2}
    assert _read(function, FOUND.function[1]) == id(function.__defaults__)
    assert _read(function, FOUND.function[2]) == id(function.__kwdefaults__)
    function.__defaults__ = None
    assert _read(function, FOUND.function[1]) != id(parts[1])
    value = object()
    cell = CellType(value)
    assert _read(cell, FOUND.cell) == id(value)
    del cell.cell_contents
    assert _read(cell, FOUND.cell) != id(value)
    assert all(_read(kind, FOUND.bases) == id(kind.__mro__) for kind in (Plain, Derived))


@pytest.mark.parametrize("kind", [Plain, Derived])
def test_the_word_that_names_an_object_s_dict(kind: type) -> None:
    thing, other = kind(), kind()
    own = thing.__dict__
    address = FOUND.dict_slot(thing, own)
    assert address and word_at(address) == id(own)
    for number in range(100):
        thing.first = number
    assert word_at(address) == id(own)
    thing.__dict__ = other.__dict__
    assert word_at(address) == id(other.__dict__)
    assert FOUND.dict_slot(thing, own) == 0 and FOUND.dict_slot(3, {}) == 0

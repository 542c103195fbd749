"""Which attributes of the user's objects the code behind a call can ask for: those whose names stand in it.

A trainer keeps its history, its timers and its best loss beside what its step reads; they change at each call, and are
no reason for another capture.

Invariant: a name is left out only where no code that a call can run has it, as a name or as a string, and none of it
reaches attributes by another way.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torchlazy.lazy.guard_code import functions_of, is_library

# Names of what reaches attributes by other ways than their names in code.
_BY_ANY_NAME = frozenset(
    {"vars", "dir", "locals", "eval", "exec", "asdict", "astuple", "attrgetter", "methodcaller", "getmembers"}
    | {"__dict__", "__getattribute__", "__getstate__", "__reduce__", "__reduce_ex__"}
)
_BY_GIVEN_NAME = frozenset({"getattr", "setattr", "hasattr", "delattr", "__setattr__", "__getattr__", "__delattr__"})
_MAKES_OBJECTS = ("__init__", "__new__", "__post_init__")
_OWN_CLASS = frozenset({"type", "__class__"})


class NamesAskedFor:
    """The names in the code that was found so far.

    A method counts as code of the call once some code names it, one that Python or a library calls by itself at once.
    """

    def __init__(self) -> None:
        self._names: set[str] | None = set()  # None: code may ask for any name
        self._waiting: dict[str, list[types.CodeType]] = {}  # methods that nothing has named, by name
        self._makers: list[tuple[type, types.CodeType]] = []  # what runs when an object of the class is made
        self._made: set[type] = set()

    def among(self, names: Iterable[str]) -> list[str]:
        """Those of the names that code may ask for."""
        known = self._names
        return list(names) if known is None else [name for name in names if name in known]

    def runs(self, found: types.FunctionType | type) -> None:
        """A function that the call may run, or a class that it may make an object of."""
        if isinstance(found, type):
            self._made.update(found.__mro__)
            self._settle()
        else:
            self._read(found.__code__)

    def has_member(self, kind: type, name: str, member: Any, all_of: type) -> None:
        """A member of `kind`, a class of the user's among the bases of `all_of`."""
        functions = [member] if isinstance(member, types.FunctionType) else functions_of(member)
        codes = [function.__code__ for function in functions if isinstance(function, types.FunctionType)]
        if name in _MAKES_OBJECTS:
            self._makers += [(kind, code) for code in codes]
        elif name.startswith("__") or any(is_library(base) and hasattr(base, name) for base in all_of.__mro__):
            for code in codes:
                self._read(code)
        else:
            self._waiting.setdefault(name, []).extend(codes)
        self._settle()

    def _read(self, code: types.CodeType) -> None:
        if self._names is None:
            return
        found = attribute_names(code)
        if found is None:
            self._names = None
        elif not found <= self._names:
            self._names |= found
            self._settle()

    def _settle(self) -> None:
        """Take in what the names so far lead to."""
        names = self._names
        if names is None:
            return
        for name in [name for name in self._waiting if name in names]:
            for code in self._waiting.pop(name, ()):
                self._read(code)
        waiting, self._makers = self._makers, []
        for kind, code in waiting:
            if kind in self._made or kind.__name__ in names or not _OWN_CLASS.isdisjoint(names):
                self._read(code)
            else:
                self._makers.append((kind, code))


@functools.lru_cache(maxsize=65536)
def attribute_names(code: types.CodeType) -> frozenset[str] | None:
    """Names of attributes that the code, and functions defined in it, can ask for; None if it may ask for any.

    A string in the code may be such a name too (`getattr(self, "scale", 1.0)`). Where a name is computed, or the
    attributes are taken all together (`vars`, a tree of a registered class), it may be any.
    """
    names = set(code.co_names)
    if not _BY_ANY_NAME.isdisjoint(names) or any(name.startswith("tree_") for name in names):
        return None
    if not _BY_GIVEN_NAME.isdisjoint(names) and not _gives_names(code):
        return None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = attribute_names(constant)
            if inner is None:
                return None
            names |= inner
        else:
            names |= set(_strings_in(constant))
    return frozenset(names)


def _strings_in(constant: Any) -> Iterator[str]:
    if isinstance(constant, str):
        yield constant
    elif isinstance(constant, (tuple, frozenset)):
        for item in constant:
            yield from _strings_in(item)


def _gives_names(code: types.CodeType) -> bool:
    """Whether each `getattr` and its like is called with a name that stands in the code, right after a plain object."""
    waits = 0  # for the name: how many instructions after the function's
    for found in dis.get_instructions(code):
        if found.argval in _BY_GIVEN_NAME and found.opname.startswith("LOAD_"):
            if waits:
                return False
            waits = 1
        elif waits and found.opname == "LOAD_CONST":
            if not isinstance(found.argval, str):
                return False
            waits = 0
        elif waits and not found.opname.startswith(("LOAD_", "PUSH_NULL", "CACHE", "EXTENDED_ARG")):
            return False
    return not waits

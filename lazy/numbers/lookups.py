"""Tracked numbers that a captured call's Python looks up in sets and dictionaries: an epoch among milestones.

C code hashes such a number, compares it with entries of the same hash, and does not report the outcome. The container
is found from the instruction that looks the number up, where names and attributes alone lead to it; a replay is then
valid for all numbers with the same outcome, as with a comparison.

Invariant: a container that was found is the one that the instruction looks in, and finding it ran none of the
program's code; None means that the plain value escapes and is guarded as usual.
"""

from __future__ import annotations

import dis
import functools
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from types import CodeType, FrameType, ModuleType
from typing import Any

_TABLES = (dict, Counter, OrderedDict, defaultdict)
_SETS = (set, frozenset)
_KEYS = frozenset({int, float, bool, str, bytes, type(None)})
_NUMBERS = frozenset({int, float, bool})
_MOST = 1024  # keys
_LOCALS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_NAME")
_PLAIN_LOOK_UPS = (object.__getattribute__, ModuleType.__getattribute__)
_MISSING = object()


def lookup_outcome(frame: FrameType, value: Any) -> tuple[frozenset[Any], bool] | None:
    """For a lookup of the value at the frame's current instruction: keys, and whether the value is one of them. The
    outcome depends on nothing else."""
    found = container_at(frame)
    if found is None:
        return None
    container, is_asked = found
    keys = frozenset(key for key in container if type(key) in _NUMBERS)
    if is_asked or value not in keys:
        return keys, value in keys
    taken = container[value]
    return frozenset(key for key in keys if _is_same(container[key], taken)), True


def container_at(frame: FrameType) -> tuple[Any, bool] | None:
    """The container in which the frame looks something up at its current instruction, and whether it is a membership
    test; None where that is unknown."""
    path = _path_at(frame.f_code, frame.f_lasti)
    if path is None:
        return None
    is_asked, names_of, what, attributes = path
    container = getattr(frame, names_of).get(what, _MISSING) if names_of else what
    for name in attributes:
        container = _attribute(container, name)
    kinds = (*_TABLES, *_SETS) if is_asked else _TABLES
    if type(container) not in kinds or len(container) > _MOST or not _KEYS.issuperset(map(type, container)):
        return None
    return container, is_asked


@functools.lru_cache(maxsize=1024)
def _path_at(code: CodeType, position: int) -> tuple[bool, str, Any, tuple[str, ...]] | None:
    """Whether the instruction is a membership test, and how its container is reached."""
    before = []
    for instruction in dis.get_instructions(code):
        if instruction.offset == position:
            break
        if instruction.opname not in ("CACHE", "EXTENDED_ARG", "NOP"):
            before.append(instruction)
    else:
        return None
    is_asked = instruction.opname == "CONTAINS_OP"
    is_table = instruction.opname == "BINARY_SUBSCR" or instruction.argrepr == "[]"
    if not (is_asked or is_table) or instruction.is_jump_target:
        return None
    loads = _loads_before(before)
    path = _path(loads)
    if is_table and path is not None:  # the key was loaded last
        path = _path(loads)
    return None if path is None else (is_asked, *path)


def _loads_before(instructions: list[dis.Instruction]) -> Iterator[tuple[str, Any]]:
    """Plain loads from the last one back, (name, what), as far as each was reached from the one before."""
    for instruction in reversed(instructions):
        name, what = instruction.opname.replace("_BORROW", "").replace("_CHECK", ""), instruction.argval
        if name == "LOAD_FAST_LOAD_FAST":
            yield "LOAD_FAST", what[1]
            yield "LOAD_FAST", what[0]
        else:
            yield name, what
        if instruction.is_jump_target:
            return


def _path(loads: Iterator[tuple[str, Any]]) -> tuple[str, Any, tuple[str, ...]] | None:
    """Where a value is loaded from: a frame's names, the name among these (none: the value itself), attributes."""
    names: list[str] = []
    for name, what in loads:
        if name == "LOAD_ATTR":
            names.insert(0, what)
        elif name in _LOCALS:
            return ("f_locals", what, tuple(names))
        elif name == "LOAD_GLOBAL":
            return ("f_globals", what, tuple(names))
        elif name in ("LOAD_CONST", "LOAD_SMALL_INT"):
            return ("", what, tuple(names))
        else:
            break
    return None


def _attribute(owner: Any, name: str) -> Any:
    """The owner's own attribute, where reading it calls nothing."""
    kind = type(owner)
    if kind.__getattribute__ not in _PLAIN_LOOK_UPS or not hasattr(owner, "__dict__"):
        return _MISSING
    of_class = next((vars(one)[name] for one in kind.__mro__ if name in vars(one)), _MISSING)
    if hasattr(type(of_class), "__set__") or hasattr(type(of_class), "__delete__"):
        return _MISSING
    found = vars(owner).get(name, of_class)
    return found if found is not of_class or not hasattr(type(of_class), "__get__") else _MISSING


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and type(a) in _KEYS and a == b and repr(a) == repr(b))


__all__ = ["container_at", "lookup_outcome"]

"""Where the code behind a call calls `float(x)`, `int(x)` and `range(n)` as the builtins.

The builtins always give and take plain numbers. While a call is captured, globals of these names stand before them in
the modules of its code: the first two give tracked numbers of tensors, as `.item()` does, `range` tells which size it
was called with.

Invariant: a module has such globals only where all of its code that can be found calls the names, or asks `isinstance`
about them. Code that hands them on (`dtype=float`, `map(float, x)`) would see that they are not the builtins.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torchlazy.lazy.compiled.guards.code import functions_of, global_names

_WITH_NULL = sys.version_info >= (3, 11)  # a global that is called next is marked as such
_SKIPPED = frozenset({"CACHE", "EXTENDED_ARG", "PUSH_NULL", "RESUME", "KW_NAMES", "NOP", "PRECALL"})
_KIND_AND_VALUE = 2  # arguments of `isinstance`


def spaces_calling(
    functions: Iterable[types.FunctionType], builtin_names: Sequence[str]
) -> list[tuple[dict[str, Any], list[str]]]:
    """The globals of the functions, each with those of the names that may stand before a builtin there."""
    found: dict[int, tuple[dict[str, Any], list[str], set[types.CodeType]]] = {}
    for function in functions:
        names = [name for name in builtin_names if name in global_names(function.__code__)]
        if names:
            space = function.__globals__
            known = found.setdefault(id(space), (space, [], set(_codes_in(space))))
            known[1].extend(name for name in names if name not in known[1] and name not in space)
            known[2].add(function.__code__)
    return [
        (space, safe)
        for space, names, codes in found.values()
        if (safe := [name for name in names if all(_only_calls(code, name) for code in codes)])
    ]


def calls_otherwise(
    functions: Iterable[types.FunctionType], name: str, spaces: Iterable[tuple[dict[str, Any], list[str]]]
) -> bool:
    """Whether some function names the builtin where none of these globals may stand before it."""
    covered = {id(space) for space, names in spaces if name in names}
    return any(name in global_names(f.__code__) and id(f.__globals__) not in covered for f in functions)


def _codes_in(space: dict[str, Any]) -> Iterator[types.CodeType]:
    """The code of a module's functions and methods."""
    for value in list(space.values()):
        if isinstance(value, type):
            members = list(vars(value).values()) if value.__module__ == space.get("__name__") else []
            for member in members:
                yield from (_code_of(one, space) for one in (functions_of(member) or [member]) if _code_of(one, space))
        elif code := _code_of(value, space):
            yield code


def _code_of(value: Any, space: dict[str, Any]) -> Any:
    """The code of a function of this module, also behind a decorator; None for anything else."""
    if isinstance(value, types.FunctionType) or "__wrapped__" in getattr(value, "__dict__", ()):
        function = inspect.unwrap(value)
        if isinstance(function, types.FunctionType) and function.__globals__ is space:
            return function.__code__
    return None


@functools.lru_cache(maxsize=65536)
def _only_calls(code: types.CodeType, name: str) -> bool:
    """Whether each use of the global in the code is a call of it, or `isinstance(x, name)`."""
    if not all(_only_calls(inner, name) for inner in code.co_consts if isinstance(inner, types.CodeType)):
        return False
    if name not in code.co_names:
        return True
    found = [one for one in dis.get_instructions(code) if one.opname not in _SKIPPED]
    for place, one in enumerate(found):
        if one.argval != name or one.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_CONST"):
            continue
        is_call = _WITH_NULL and one.opname == "LOAD_GLOBAL" and (one.arg or 0) & 1
        if not is_call and not (one.opname == "LOAD_GLOBAL" and _is_asked_about(found, place)):
            return False
    return True


def _is_asked_about(found: list[dis.Instruction], place: int) -> bool:
    """Whether the global is the second argument of a call of `isinstance`, alone or in a tuple."""
    after = place + 1
    while after < len(found) and found[after].opname == "LOAD_GLOBAL" and not (found[after].arg or 0) & 1:
        after += 1
    if after < len(found) and found[after].opname == "BUILD_TUPLE":
        after += 1
    ends = after < len(found) and found[after].opname == "CALL" and found[after].arg == _KIND_AND_VALUE
    calls = [one.argval for one in found[:place] if one.opname == "LOAD_GLOBAL" and (one.arg or 0) & 1]
    return _WITH_NULL and ends and calls[-1:] == ["isinstance"]


__all__ = ["calls_otherwise", "spaces_calling"]

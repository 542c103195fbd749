"""What code can read by name: the names in it, the globals and members of classes that are worth a guard, and whether
it looks at the types of numbers.

Invariant: code is looked at, never run; of libraries (Python's own, torch, NumPy) nothing is guarded.
"""

from __future__ import annotations

import argparse
import collections
import dis
import functools
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch
from torchlazy.lazy.library_code import INSTALLED, is_library, is_library_function

# Objects of torch that training steps change beside modules and optimizers.
STATEFUL = (
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
    torch.distributions.Distribution,
    torch.distributions.Transform,
)
# Classes of the standard library that programs keep their settings in.
SETTINGS = (
    argparse.Namespace, types.SimpleNamespace, collections.UserDict, collections.UserList, collections.ChainMap,
)  # fmt: skip
# Names of what looks at a number's C type, which nobody can answer for (`type(lr) is float`, JSON's encoder).
_TYPE_ASKERS = frozenset({"json", "orjson", "msgpack", "ctypes"})
_NUMBER_TYPES = frozenset({"float", "int"})
_COMPARISONS = frozenset({"IS_OP", "COMPARE_OP", "CONTAINS_OP"})
_COMPARED_WITHIN = 16  # instructions


@functools.lru_cache(maxsize=65536)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """Names of globals and attributes in the code, and in functions that are defined in it; each once."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= dict.fromkeys(names_in(constant))
    return tuple(names)


@functools.lru_cache(maxsize=65536)
def global_names(code: types.CodeType) -> frozenset[str]:
    """Names that the code, and functions defined in it, look up as globals; `names_in` has attributes' as well.

    `dis` tells the same, with much else, in ten times the time.
    """
    bytecode, names, high = code.co_code, code.co_names, 0
    found = set()
    for place in range(0, len(bytecode), 2):
        operation = bytecode[place]
        if operation == dis.EXTENDED_ARG:
            high = (high | bytecode[place + 1]) << 8
            continue
        shift = _ASKS_FOR_GLOBALS.get(operation)
        if shift is not None:
            found.add(names[(high | bytecode[place + 1]) >> shift])
        high = 0
    inner = [global_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(found).union(*inner)


@functools.lru_cache(maxsize=65536)
def imported_names(code: types.CodeType) -> tuple[str, ...]:
    """Names of modules that the code, and functions defined in it, import as they run; relative ones without dots."""
    found: dict[str, None] = {}
    if any(code.co_code[place] == _IMPORT for place in range(0, len(code.co_code), 2)):
        found.update((one.argval, None) for one in dis.get_instructions(code) if one.opcode == _IMPORT)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found.update(dict.fromkeys(imported_names(constant)))
    return tuple(found)


_IMPORT = dis.opmap["IMPORT_NAME"]


# Operations whose argument is the number of a global's name, and by how many bits that is shifted: LOAD_GLOBAL has a
# flag in the lowest one since Python 3.11. What stands between operations (caches) is zero, and none of these.
_ASKS_FOR_GLOBALS = {
    number: int(name == "LOAD_GLOBAL" and sys.version_info >= (3, 11))
    for name, number in dis.opmap.items()
    if name.endswith(("_GLOBAL", "_GLOBALS", "_NAME")) and number in dis.hasname
}


def is_guarded_global(value: Any) -> bool:
    """Whether code that names a global with this value depends on what is in it, or may put another value there."""
    if isinstance(value, types.FunctionType):
        return not is_library_function(value)
    if isinstance(value, type):
        return not is_library(value)
    return not isinstance(value, (types.ModuleType, types.BuiltinFunctionType))


def is_class_value(name: str, member: Any) -> bool:
    """Whether code may read the member of a class, and somebody may set another one."""
    if is_method(member):
        return True
    if name.startswith("__"):
        return False
    if isinstance(member, type):
        return not is_library(member)
    return not isinstance(member, (types.MemberDescriptorType, types.GetSetDescriptorType))


def is_method(member: Any) -> bool:
    """Whether the member of a class is a function, or has functions behind it."""
    return isinstance(member, types.FunctionType) or bool(functions_of(member))


def functions_of(member: Any) -> list[Any]:
    """The functions behind a member of a class that is no function itself."""
    if isinstance(member, property):
        return [function for function in (member.fget, member.fset) if function is not None]
    if isinstance(member, (classmethod, staticmethod)):
        return [member.__func__]
    if isinstance(member, (functools.cached_property, functools.partialmethod)):
        return [member.func]
    if isinstance(member, functools.singledispatchmethod):
        return [member.func, member.dispatcher]
    return []


def looks_at_types(codes: Iterable[types.CodeType]) -> bool:
    """Whether code may tell a float from what only behaves as one."""
    return any(map(_looks_at_types, codes))


@functools.lru_cache(maxsize=65536)
def _looks_at_types(code: types.CodeType) -> bool:
    if any(_looks_at_types(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)):
        return True
    names = set(code.co_names)
    if not _TYPE_ASKERS.isdisjoint(names) and not any(part in code.co_filename for part in INSTALLED):
        return True
    if "type" not in names or names.isdisjoint(_NUMBER_TYPES):
        return False
    before: collections.deque[Any] = collections.deque(maxlen=_COMPARED_WITHIN)
    for instruction in dis.get_instructions(code):  # `type(x) is float`, `type(x) in (int, float)`
        if instruction.opname in _COMPARISONS and "type" in before and not _NUMBER_TYPES.isdisjoint(before):
            return True
        before.append(instruction.argval if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") else None)
    return False


def slots_of(kind: type) -> list[str]:
    """The names that this very class keeps outside of a dictionary."""
    return [
        name
        for name, member in kind.__dict__.items()
        if isinstance(member, types.MemberDescriptorType) and not is_library(kind)
    ]

"""What code can read by name: globals, class members and attributes, and whether it looks at the types of numbers.

Only attributes whose names occur in the code behind a call are guarded. A trainer keeps its history, its timers and its
best loss beside what its step reads; they change at each call, and must not cause another capture.

Invariant: code is inspected, never run; of libraries (Python's own, torch, NumPy) nothing is guarded. A name is left
out only where no code that a call can run has it, as a name or as a string, and none of it reaches attributes in
another way.
"""

from __future__ import annotations

import argparse
import collections
import configparser
import dis
import functools
import inspect
import re
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torchlazy.lazy.trace.library_code import INSTALLED, is_library, is_library_function

# Objects of torch beside modules and optimizers that training steps change.
STATEFUL = (
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
    torch.distributions.Distribution,
    torch.distributions.Transform,
    configparser.RawConfigParser,
    configparser.SectionProxy,
)
# Classes of the standard library that programs keep their settings in.
SETTINGS = (
    argparse.Namespace, types.SimpleNamespace, collections.UserDict, collections.UserList, collections.ChainMap,
)  # fmt: skip
# What looks at a number's C type, which a tracked number cannot imitate (JSON's encoder).
_TYPE_ASKERS = frozenset({"json", "orjson", "msgpack", "ctypes", "decimal", "Decimal", "timedelta", "ldexp"})
_CONSTRUCTORS = frozenset({"fromhex", "from_bytes"})  # of the number types; their other members take numbers
_GENERATOR_METHODS = frozenset({"manual_seed", "set_offset"})  # they do, too; functions of torch by these names do not
_SEEDERS = frozenset({"Generator", "manual_seed", "set_state", "set_offset"})
_PLAIN_RESULTS = frozenset({"__hash__", "__index__", "__int__", "__float__", "__complex__", "__length_hint__"})
_CONVERSIONS = frozenset({"hash", "int", "float", "complex", "index", "len", "id"})
_NUMBER_TYPES = frozenset({"float", "int"})
_COMPARISONS = frozenset({"IS_OP", "COMPARE_OP", "CONTAINS_OP"})
_COMPARED_WITHIN = 16  # instructions
_MODULAR = 3  # arguments of `pow` with a modulus


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

    `dis` gives the same, with much else, in ten times the time.
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
# flag in the lowest one since Python 3.11. Inline caches between operations are zero, which is none of these.
_ASKS_FOR_GLOBALS = {
    number: int(name == "LOAD_GLOBAL" and sys.version_info >= (3, 11))
    for name, number in dis.opmap.items()
    if name.endswith(("_GLOBAL", "_GLOBALS", "_NAME")) and number in dis.hasname
}


def is_guarded_global(value: Any) -> bool:
    """Whether code that names a global with this value depends on its contents, or may store another value there."""
    if isinstance(value, types.FunctionType):
        return not is_library_function(value)
    if isinstance(value, type):
        return not is_library(value)
    return not isinstance(value, (types.ModuleType, types.BuiltinFunctionType))


def is_class_value(name: str, member: Any) -> bool:
    """Whether code may read the member of a class, and the user may replace it."""
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
    """The functions behind a member of a class (a property, a class method); none of a function."""
    if isinstance(member, property):
        return [function for function in (member.fget, member.fset) if function is not None]
    if isinstance(member, (classmethod, staticmethod)):
        return [member.__func__]
    if isinstance(member, (functools.cached_property, functools.partialmethod)):
        return [member.func]
    if isinstance(member, functools.singledispatchmethod):
        return [member.func, member.dispatcher]
    return []


def looks_at_types(codes: Sequence[types.CodeType]) -> bool:
    """Whether code may distinguish a float from a tracked number. The called function's code comes first."""
    return any(map(_looks_at_types, codes)) or any(map(_has_generator_method, _named_from(codes)))


def _named_from(codes: Sequence[types.CodeType]) -> set[types.CodeType]:
    """The first code, and those whose names it or another of them mentions."""
    found, waiting = set[types.CodeType](), list(codes[:1])
    while waiting:
        code = waiting.pop()
        if code not in found:
            found.add(code)
            named = names_in(code)
            waiting += [other for other in codes if other.co_name in named]
    return found


@functools.lru_cache(maxsize=65536)
def _looks_at_types(code: types.CodeType) -> bool:
    if any(_looks_at_types(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)):
        return True
    names = set(code.co_names)
    is_own = not any(part in code.co_filename for part in INSTALLED)
    if is_own and code.co_name in _PLAIN_RESULTS and names.isdisjoint(_CONVERSIONS):
        return True  # Python takes no tracked number there
    if is_own and (not _TYPE_ASKERS.isdisjoint(names) or _asks_in_c(code, names) or _looks_up_types(code, names)):
        return True
    return "type" in names and not names.isdisjoint(_NUMBER_TYPES) and _compares_types(code)


def _asks_in_c(code: types.CodeType, names: set[str]) -> bool:
    """Whether code may call `pow` with three arguments, or a method of `int` or `float` by its class: `int.__add__`."""
    if "pow" not in names and names.isdisjoint(_NUMBER_TYPES):
        return False
    owner, powers, of_three = None, False, False
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        if instruction.opname in ("LOAD_METHOD", "LOAD_ATTR") and owner in _NUMBER_TYPES and name not in _CONSTRUCTORS:
            return True
        owner = name if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") else None
        powers = powers or owner == "pow"
        of_three = of_three or (instruction.opname.startswith("CALL") and instruction.arg == _MODULAR)
    return powers and of_three


def _looks_up_types(code: types.CodeType, names: set[str]) -> bool:
    """Whether code has the type of a value as a key: `table[type(x)]`."""
    if "type" not in names:
        return False
    owner, before = None, ""
    for instruction in dis.get_instructions(code):
        is_look_up = "BINARY_SUBSCR" in instruction.opname or instruction.argrepr == "[]"  # the latter from 3.14 on
        if owner == "type" and before.startswith("CALL") and is_look_up:
            return True
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            owner = instruction.argval
        before = instruction.opname
    return False


def _compares_types(code: types.CodeType) -> bool:
    before: collections.deque[Any] = collections.deque(maxlen=_COMPARED_WITHIN)
    for instruction in dis.get_instructions(code):  # `type(x) is float`, `type(x) in (int, float)`
        if instruction.opname in _COMPARISONS and "type" in before and not _NUMBER_TYPES.isdisjoint(before):
            return True
        before.append(instruction.argval if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") else None)
    return False


@functools.lru_cache(maxsize=65536)
def _has_generator_method(code: types.CodeType) -> bool:
    """Whether code names a method of random generators, of an object that is not the module `torch`."""
    if any(_has_generator_method(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)):
        return True
    if _GENERATOR_METHODS.isdisjoint(code.co_names):
        return False
    owner: Any = None
    for instruction in dis.get_instructions(code):
        if instruction.argval in _GENERATOR_METHODS and owner != "torch":
            return True
        owner = instruction.argval if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") else None
    return False


def may_seed(codes: Iterable[types.CodeType]) -> bool:
    """Whether code may make a random generator of torch, seed one, or set its state."""
    return any(not _SEEDERS.isdisjoint(names_in(code)) for code in codes)


def slots_of(kind: type) -> list[str]:
    """The `__slots__` of this very class."""
    return [
        name
        for name, member in kind.__dict__.items()
        if isinstance(member, types.MemberDescriptorType) and not is_library(kind)
    ]


# Names of functions that reach attributes without naming them in code.
_BY_ANY_NAME = frozenset(
    {"vars", "dir", "locals", "eval", "exec", "asdict", "astuple", "attrgetter", "methodcaller"}
    | {"getmembers", "getmembers_static", "getattr_static", "classify_class_attrs"}
    | {"__dict__", "__getattribute__", "__getstate__", "__reduce__", "__reduce_ex__"}
)
_BY_GIVEN_NAME = frozenset({"getattr", "setattr", "hasattr", "delattr", "__setattr__", "__getattr__", "__delattr__"})
_MAKES_OBJECTS = ("__init__", "__new__", "__post_init__")
_OWN_CLASS = frozenset({"type", "__class__"})


# What a call of a module or an optimizer runs without any code naming it.
_RUN_BY_CALLS = frozenset({"forward", "step", "_call_impl", "_wrapped_call_impl"})
_CALLED = (torch.nn.Module, torch.optim.Optimizer)


class NamesAskedFor:
    """The names in the code that was found so far.

    A method counts as code of the call once some code names it; one that Python or a library calls counts at once.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._called: set[str] = set(_RUN_BY_CALLS)  # names of methods that libraries' code calls
        self._any = False  # code may ask for names that do not occur in it
        self._waiting: dict[str, list[tuple[types.CodeType, bool]]] = {}  # methods that no code has named, by name
        self._makers: list[tuple[type, types.CodeType]] = []  # code that runs when an object of the class is made
        self._made: set[type] = set()
        self._foreign: dict[type, list[type]] = {}  # of each class its bases from libraries

    def among(self, names: Iterable[str]) -> list[str]:
        """Those of the names that code may ask for."""
        return list(names) if self._any else self.standing(names)

    def missing_in(self, space: Iterable[str]) -> list[str]:
        """The names that occur in code and not among these, in order."""
        return sorted(self._names.difference(space))

    def standing(self, names: Iterable[str]) -> list[str]:
        """Those of the names that occur in code."""
        known = self._names
        return [name for name in names if name in known]

    def may_call(self, name: str, kind: type) -> bool:
        """Whether the call may run the method of the class `kind`."""
        return self.is_called(name) or self.runs_unnamed(name, kind)

    def is_called(self, name: str) -> bool:
        """Whether the user's code or a library's calls a method of this name."""
        return name in self._names or name in self._called

    def asks(self, names: Iterable[str]) -> None:
        """A function reads these attributes of its arguments (`operator.attrgetter`)."""
        self._add(frozenset(names))

    def runs(self, found: types.FunctionType | type) -> None:
        """A function that the call may run, or a class that it may make an object of."""
        if isinstance(found, type):
            if not self._made.issuperset(found.__mro__):
                self._made.update(found.__mro__)
                self._make()
        else:
            self._read(found.__code__)

    def runs_unnamed(self, name: str, kind: type) -> bool:
        """Whether Python or a library may call the method of the class `kind` although no code names it."""
        if name.startswith("__") or (name in _RUN_BY_CALLS and issubclass(kind, _CALLED)):
            return True
        foreign = self._foreign.get(kind)
        if foreign is None:
            foreign = [base for base in kind.__mro__ if is_library(base) and not issubclass(base, _CALLED)]
            self._foreign[kind] = foreign
        return any(hasattr(base, name) for base in foreign)

    def has_member(self, kind: type, name: str, member: Any, all_of: type) -> None:
        """A member of `kind`, one of the user's classes among the bases of `all_of`."""
        functions = [member] if isinstance(member, types.FunctionType) else functions_of(member)
        codes = [function.__code__ for function in functions if isinstance(function, types.FunctionType)]
        if name in _MAKES_OBJECTS:
            self._makers += [(kind, code) for code in codes]
            self._make()
        elif self.may_call(name, all_of):
            for code in codes:
                self._read(code)
        elif codes:
            self._waiting.setdefault(name, []).extend((code, False) for code in codes)

    def has_library_members(self, kind: type) -> None:
        """A library's class of modules or optimizers: its methods call others, also the user's, by name."""
        for name, member in kind.__dict__.items():
            if isinstance(member, types.FunctionType) and not name.startswith("__"):
                codes = [(member.__code__, True), (inspect.unwrap(member).__code__, True)]
                self._waiting.setdefault(name, []).extend(codes)
        self._settle(self._names | self._called)

    def _read(self, code: types.CodeType, is_foreign: bool = False) -> None:
        found, asks_any = _asked_names(code)
        if is_foreign:  # attributes that a library reads are known: only what it calls matters
            new = found - self._called
            self._called |= new
            self._settle(new)
        else:
            self._any = self._any or asks_any
            self._add(found)

    def _add(self, names: frozenset[str]) -> None:
        """Add the names, and those in code that they make callable."""
        new = names - self._names
        if new:
            self._names |= new
            self._settle(new)
            self._make()

    def _settle(self, names: Iterable[str]) -> None:
        """Read the methods of these names that were waiting."""
        for name in self._waiting.keys() & names:
            for code, is_foreign in self._waiting.pop(name, ()):
                self._read(code, is_foreign)

    def _make(self) -> None:
        """Read constructors of the classes whose objects may be made, as far as known now."""
        waiting, self._makers = self._makers, []
        for kind, code in waiting:
            of_own_class = not _OWN_CLASS.isdisjoint(self._names) and not issubclass(kind, _CALLED)  # `type(self)(...)`
            if kind in self._made or kind.__name__ in self._names or of_own_class:
                self._read(code)
            else:
                self._makers.append((kind, code))


def attribute_names(code: types.CodeType) -> frozenset[str] | None:
    """Names of attributes that the code, and functions defined in it, can ask for; None if it may ask for any.

    A string in the code may be such a name too (`getattr(self, "scale", 1.0)`). Where a name is computed, or all
    attributes are read together (`vars`, a tree of a registered class), it may be any.
    """
    found, asks_any = _asked_names(code)
    return None if asks_any else found


@functools.lru_cache(maxsize=65536)
def _asked_names(code: types.CodeType) -> tuple[frozenset[str], bool]:
    """The names that occur in the code, and whether it may ask for others too."""
    names = set(code.co_names)
    asks_any = not _BY_ANY_NAME.isdisjoint(names) or any(name.startswith("tree_") for name in names)
    asks_any = asks_any or (not _BY_GIVEN_NAME.isdisjoint(names) and not _gives_names(code))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner, inner_asks_any = _asked_names(constant)
            names |= inner
            asks_any = asks_any or inner_asks_any
        else:
            names |= set(_strings_in(constant))
    return frozenset(names), asks_any


def _strings_in(constant: Any) -> Iterator[str]:
    if isinstance(constant, str):
        yield constant
    elif isinstance(constant, (tuple, frozenset)):
        for item in constant:
            yield from _strings_in(item)


def _gives_names(code: types.CodeType) -> bool:
    """Whether each `getattr` and the like is called with a constant name, right after a plain object."""
    waits = False  # for the name
    height = 0  # of the stack from the name on, while the name is on it
    for found in dis.get_instructions(code):
        kind = found.opname
        if kind in _NO_STEP:
            continue
        if height:
            if found.opcode in dis.hasjrel or found.opcode in dis.hasjabs or _takes(found) >= height:
                if not kind.startswith(("CALL", "PRECALL")):
                    return False  # the name is only a part of another one, or one of several
                height = 0
            else:
                height += dis.stack_effect(found.opcode, found.arg)
                continue
        if found.argval in _BY_GIVEN_NAME and kind.startswith("LOAD_"):
            if waits:
                return False
            waits = True
        elif waits and kind == "LOAD_CONST":
            if not isinstance(found.argval, str):
                return False
            waits, height = False, 1
        elif waits and not kind.startswith("LOAD_"):
            return False
    return not waits


_NO_STEP = frozenset({"CACHE", "EXTENDED_ARG", "PUSH_NULL", "RESUME", "KW_NAMES", "NOP"})


def _takes(found: dis.Instruction) -> int:
    """How many values the instruction pops from the stack, at most."""
    kind, count = found.opname, found.arg or 0
    if kind.startswith(("LOAD_FAST", "LOAD_CONST", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLOSURE")):
        return 0
    if kind.startswith(("CALL", "PRECALL")):
        return count + (1 if "KW" in kind else 0)
    if kind.startswith("BUILD_"):
        return 2 * count if kind == "BUILD_MAP" else count
    if kind.startswith(("BINARY_", "COMPARE_", "IS_OP", "CONTAINS_")):
        return 3 if kind == "BINARY_SLICE" else 2
    return 1 if kind.startswith(("LOAD_ATTR", "LOAD_METHOD", "UNARY_", "FORMAT_SIMPLE")) else 4


@functools.lru_cache(maxsize=65536)
def strings_named(code: types.CodeType) -> tuple[str, ...]:
    """Names in strings of the code, where it reaches globals or attributes by strings (`globals()["scale"]`,
    `getattr(settings, "scale")`)."""
    inner = [names for constant in code.co_consts if isinstance(constant, types.CodeType)
             for names in strings_named(constant)]  # fmt: skip
    if _BY_STRING.isdisjoint(code.co_names):
        return tuple(inner)
    texts = [text for constant in code.co_consts for text in _strings_in(constant)]
    return tuple(dict.fromkeys([*inner, *(name for text in texts for name in _WORD.findall(text))]))


def asks_for_any(code: types.CodeType) -> bool:
    """Whether the code, or a function defined in it, may ask for attributes whose names do not occur in it."""
    return _asked_names(code)[1]


@functools.lru_cache(maxsize=65536)
def owners_asked(code: types.CodeType) -> frozenset[str]:
    """Names among the arguments of `getattr` and its like, up to the first that is computed: `F` and `self` of
    `getattr(F, self.activation)`."""
    found: set[str] = set()
    is_argument = False
    for one in dis.get_instructions(code):
        if one.opname in _NO_STEP:
            continue
        is_load = one.opname.startswith("LOAD_")
        if is_load and is_argument:
            found.add(str(one.argval))
        is_argument = is_load and (is_argument or one.argval in _BY_GIVEN_NAME or one.argval in _BY_ANY_NAME)
    inner = [owners_asked(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(found).union(*inner)


@functools.lru_cache(maxsize=65536)
def asks_for_any_global(code: types.CodeType) -> bool:
    """Whether the code, or a function defined in it, may read globals whose names do not occur in it."""
    if any(asks_for_any_global(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)):
        return True
    if not _RUNS_TEXT.isdisjoint(code.co_names):
        return True
    if "globals" not in code.co_names:
        return False
    found = [one for one in dis.get_instructions(code) if one.opname not in _NO_STEP]
    return any(
        one.argval == "globals" and not (one.opname.startswith("LOAD_") and _is_asked_by_text(found[place + 1 :]))
        for place, one in enumerate(found)
    )


def _is_asked_by_text(after: Sequence[dis.Instruction]) -> bool:
    """Whether a table that a call gives is asked for a constant key, and is not kept."""
    rest = iter([one for one in after[:8] if not one.opname.startswith(("CALL", "PRECALL"))])
    one = next(rest, None)
    ends: tuple[str, ...]
    if one is not None and one.argval in ("get", "pop", "setdefault"):
        one, ends = next(rest, None), ("LOAD_CONST", "POP_TOP", "STORE_", "RETURN_VALUE")
    else:
        ends = ("BINARY_SUBSCR", "STORE_SUBSCR", "DELETE_SUBSCR")
    found = next(rest, None)
    if one is None or found is None or type(one.argval) is not str or one.opname != "LOAD_CONST":
        return False
    return found.opname.startswith(ends) or (found.opname == "BINARY_OP" and found.argrepr == "[]")


_RUNS_TEXT = frozenset({"eval", "exec"})
_BY_STRING = _BY_ANY_NAME | _BY_GIVEN_NAME | {"globals", "modules", "import_module", "__import__"}
_WORD = re.compile(r"[A-Za-z_]\w*")

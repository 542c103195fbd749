"""Whether containers and attributes hold the very objects that they held, thousands of them in one native pass.

In Python such a pass takes some 15 ns for each object, more than half of it for the loop; here it takes 1 to 10, and a
dict whose version tells that nothing was stored in it takes 1 whatever it holds. The pass is C++ that the kernels' own
toolchain compiles once (`runtime/native/identity_check.cpp`); it calls Python's C functions through addresses
that ctypes gives, so that it needs no headers of Python's, and is called as a builtin function, without ctypes.

Single words are read first, in the order of their addresses: what a step has driven out of the caches comes back
soonest so.

Invariant: a check compares identities and lengths, and plain values of functions in C. It runs no code of the objects
that it looks at but the getters of attributes and the functions that it was told to ask, and it changes nothing;
whoever made it keeps alive what it compares with.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import BuiltinFunctionType, CellType, FunctionType
from typing import Any

import torch
from torchlazy.runtime.errors import ToolchainMissing
from torchlazy.runtime.native.code import NativeCode, native_function, python_addresses, text_of
from torchlazy.runtime.native.dict_views import is_without_gaps
from torchlazy.runtime.native.object_layout import layout, word_at
from torchlazy.runtime.native.watched import WatchedObjects, Watcher, watcher_of
from torchlazy.runtime.plain_answers import PlainQuestion

_SIZE, _ENTRY, _VALUES, _KEYS, _ITEMS, _ATTRIBUTE, _TENSOR, _GRADIENT, _WORDS, _SECTIONS, _MEMBERS = range(11)
VERSIONS, _ANSWER, _CONTEXT, _WATCHED, _ENDED, _BYTES, _DIRECT, _PLAIN_ANSWERS = range(11, 19)
_PYTHON = (
    "PyDict_Next", "PyDict_Size", "PyDict_GetItemWithError", "PyList_Size", "PyList_GetItem", "PyObject_GetAttr",
    "Py_DecRef", "PyErr_Clear", "_PySet_NextEntry", "PyContextVar_Get", "PyObject_CallNoArgs", "PyObject_CallOneArg",
    "PyObject_RichCompareBool", "Py_IncRef",
)  # fmt: skip
_OPTIONAL = frozenset({"_PySet_NextEntry"})
_FUNCTION_PARTS = ("__code__", "__defaults__", "__kwdefaults__")


@dataclass(frozen=True)
class TensorReaders:
    """How tensors are read natively.

    `functions` are addresses of C functions. Five take the address of a C++ tensor and one to write the answer to, and
    return 0 where that went well: data_ptr, dtype's number, number of dimensions, sizes, strides. Two take the address
    of a tensor's implementation: requires_grad returns a bool, grad the address of a C++ tensor. `words` are places in
    a tensor's Python object, counted in words of 8 bytes: the address of its implementation, its two tables of hooks.
    `counter` is the place in its implementation where the address of its version is, less 16; -1 if that is not known.
    `gradients` are places in bytes, if they are known: in its implementation where the address of what autograd keeps
    of it is, 0 if nothing; in that where its gradient's implementation is, and a byte that is 1 if it requires one.
    `graph` is the place of a word of it that is 0 where no recorded operator gave the tensor; -1 if it is not known.
    `number_of` gives the number of a tensor's dtype, `gradient_of` the address of the implementation of its gradient,
    or of what stands for none.
    """

    functions: tuple[int, int, int, int, int, int, int]
    words: tuple[int, int, int]
    number_of: Callable[[torch.Tensor], int]
    gradient_of: Callable[[torch.Tensor], int]
    counter: int = -1
    gradients: tuple[int, int, int] | None = None
    graph: int = -1


class IdentityCheck:
    """Rows of what is to be found; `holds()` says whether it is. Make one only where `is_available()`."""

    def __init__(self, readers: TensorReaders | None = None) -> None:
        self._rows = array("q")
        self._pairs = array("q")  # addresses of words, and the words
        self._of_dicts: dict[int, array[int]] = {}  # rows that hold while the dict's version stays
        self._sizes: dict[int, tuple[dict[Any, Any], int]] = {}  # of dicts
        self._pass: Callable[[], bool] | None = None  # over all of it
        self._kept: list[Any] = []  # whose identities the rows name
        self._later: tuple[list[int], list[int], list[int]] = ([], [], [])  # words behind those words, then bytes
        self._direct: list[int] = []  # questions to functions in C
        self._plain: dict[PlainQuestion, tuple[int, ...]] = {}  # their rows
        self._watched: dict[int, tuple[Any, array[int]]] = {}  # rows that hold while the object is not changed
        self._readers = readers
        self._layout = layout()
        self._watcher = watcher()

    @property
    def reads_tensors(self) -> bool:
        """Whether `geometry` and `gradient` may be called."""
        return self._readers is not None

    @property
    def reads_sets(self) -> bool:
        """Whether `members` may be called."""
        return hasattr(ctypes.pythonapi, "_PySet_NextEntry")

    def _row(self, kind: int, owner: Any, *words: int) -> None:
        self._pass = None
        self._kept.append(owner)
        rows = self._rows
        if kind in _OF_DICTS and self._watcher is not None:
            rows = self._rows_of(owner)
        elif kind in _OF_DICTS and self._layout.dict_version is not None:
            rows = self._of_dicts.setdefault(id(owner), array("q"))
        rows.extend((kind, id(owner), *words))

    def _word(self, address: int) -> None:
        """The word at the address, in an object that is kept, stays as it is."""
        self._pass = None
        self._pairs.extend((address, word_at(address)))

    def _rows_of(self, owner: Any) -> array[int]:
        """What is looked at where the watched object was changed."""
        return self._watched.setdefault(id(owner), (owner, array("q")))[1]

    def size(self, container: dict[Any, Any], count: int) -> None:
        """The dict has so many entries."""
        self._pass = None
        if self._sizes.setdefault(id(container), (container, count))[1] != count:
            raise ValueError("a dict has one number of entries")

    def set_size(self, container: set[Any]) -> bool:
        """The set has as many items as it has now. False, and nothing is entered, where its length cannot be read."""
        place = self._layout.set_size
        if place is None or word_at(id(container) + 8 * place) != len(container):
            return False
        self._kept.append(container)
        self._word(id(container) + 8 * place)
        return True

    def entries(self, container: dict[Any, Any], values: Mapping[Any, Any]) -> None:
        """These very values are found under these keys, and (where nothing was deleted before) at these places."""
        order = {}
        if len(values) > 1 and is_without_gaps(container):
            order = {key: (place, key) for place, key in enumerate(container)}
        for key, value in values.items():
            place, own = order.get(key, (-1, key))
            self._kept += (own, value)
            self._row(_ENTRY, container, id(own), id(value), place)

    def absent(self, container: dict[Any, Any], keys: Sequence[Any]) -> None:
        """None of these is a key of the dict."""
        for key in keys:
            self._kept.append(key)
            self._row(_ENTRY, container, id(key), 0, -1)

    def values(self, container: dict[Any, Any], values: Sequence[Any]) -> None:
        """The dict's values are these, in order, and no others."""
        self._kept += values
        self._row(_VALUES, container, len(values), *map(id, values))

    def keys(self, container: dict[Any, Any], keys: Sequence[Any]) -> None:
        """The dict's keys are these, in order, and no others."""
        self._kept += keys
        self._row(_KEYS, container, len(keys), *map(id, keys))

    def items(self, container: list[Any], items: Sequence[Any]) -> None:
        """The list holds these, in order, and no others."""
        self._kept += items
        self._row(_ITEMS, container, len(items), *map(id, items))

    def order(self, container: OrderedDict[Any, Any]) -> bool:
        """The OrderedDict's order is the one of now; False, and nothing is entered, where that cannot be read."""
        place = self._layout.order
        if place is None:
            return False
        self._kept.append(container)
        self._word(id(container) + 8 * place)
        return True

    def members(self, container: set[Any], items: Sequence[Any]) -> None:
        """The set holds these, in the order in which it gives them, and no others. Only with `reads_sets`."""
        self._kept += items
        self._row(_MEMBERS, container, len(items), *map(id, items))

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """`getattr(owner, name)` is this very value: for attributes that C code gives without making new objects."""
        self._kept += (name, value)
        self._row(_ATTRIBUTE, owner, id(name), id(value))

    def function(self, function: FunctionType) -> None:
        """The function keeps its code and its defaults."""
        parts = [getattr(function, name) for name in _FUNCTION_PARTS]
        self._kept += (function, *parts)
        if self._layout.function is None:
            for name, value in zip(_FUNCTION_PARTS, parts, strict=True):
                self.attribute(function, name, value)
        elif self._watcher is not None and self._watcher.of_functions:
            self._pass, rows = None, self._rows_of(function)
            if not rows:
                rows.extend((_WORDS, len(parts)))
                for place in self._layout.function:
                    rows.extend((id(function) + 8 * place, word_at(id(function) + 8 * place)))
        else:
            for place in self._layout.function:
                self._word(id(function) + 8 * place)

    def bases(self, kind: type) -> None:
        """The class keeps the order of its bases."""
        place = self._layout.bases
        self._kept += (kind, kind.__mro__)
        if place is None or word_at(id(kind) + 8 * place) != id(kind.__mro__):
            self.attribute(kind, "__mro__", kind.__mro__)
        else:
            self._word(id(kind) + 8 * place)

    def cell(self, cell: CellType, value: Any) -> None:
        """The cell holds this very value."""
        place = self._layout.cell
        self._kept += (cell, value)
        if place is None or word_at(id(cell) + 8 * place) != id(value):
            self.attribute(cell, "cell_contents", value)
        else:
            self._word(id(cell) + 8 * place)

    def dict_of(self, owner: Any, own: dict[str, Any]) -> None:
        """The object's `__dict__` is this very dict, whatever it holds."""
        address = self._layout.dict_slot(owner, own)
        self._kept += (owner, own)
        if address:
            self._word(address)
        else:
            self.attribute(owner, "__dict__", own)

    def classes(self, instances: Sequence[Any]) -> bool:
        """The objects are instances of the classes that they are of now. False, and nothing is entered, where an object
        does not name its class at the usual place."""
        if any(word_at(id(value) + 8) != id(type(value)) for value in instances):
            return False
        for value in instances:
            self._kept += (value, type(value))
            self._word(id(value) + 8)
        return True

    def geometry(self, tensor: torch.Tensor) -> None:
        """The strided tensor has the memory, dtype, sizes, strides and hooks that it has now. Only with `readers`."""
        assert self._readers is not None
        shape, dtype = tensor.shape, self._readers.number_of(tensor)
        words = [word_at(id(tensor) + 8 * place) for place in self._readers.words]
        self._row(_TENSOR, tensor, *words, tensor.data_ptr(), dtype, len(shape), *shape, *tensor.stride())

    def gradient(self, tensor: torch.Tensor, *, present: bool = False) -> None:
        """The tensor requires gradients as it does now; with `present` its `grad` is none, or the tensor that it is now
        (which the caller keeps alive). Only with `readers`."""
        assert self._readers is not None
        implementation = word_at(id(tensor) + 8 * self._readers.words[0])
        gradient = self._readers.gradient_of(tensor) if present else 0
        if self._leaf(tensor, implementation, gradient):
            return
        self._row(_GRADIENT, tensor, implementation, tensor.requires_grad, gradient)

    def _leaf(self, tensor: torch.Tensor, implementation: int, gradient: int) -> bool:
        """The same by words alone; False, and nothing is entered, where it takes more than words to tell."""
        assert self._readers is not None
        if self._readers.gradients is None:
            return False
        place, of_gradient, of_flag = self._readers.gradients
        kept = word_at(implementation + place)  # by autograd
        required = ctypes.c_ubyte.from_address(kept + of_flag).value if kept else 0
        graph = self._readers.graph
        if required != tensor.requires_grad or (kept and not required and graph < 0):
            return False  # a result of what was recorded
        self._kept.append(tensor)
        self._word(id(tensor) + 8 * self._readers.words[0])
        words, inner, flags = self._later
        words += (implementation + place, kept)
        if kept:
            flags += (kept + of_flag, required)
            inner += () if required else (kept + graph, 0)
            inner += (kept + of_gradient, gradient) if gradient else ()
        return True

    def context_value(self, variable: ContextVar[Any], none: Any) -> None:
        """The context variable has the value that it has now, or none, for which `none` stands."""
        value = variable.get(none)
        self._kept += (none, value)
        self._row(_CONTEXT, variable, id(none), id(value))

    def answer(self, function: Callable[..., Any], *argument: Any) -> bool:
        """A function in C gives what it gives now, without an argument or with one. False, and nothing is entered,
        where that is no plain value."""
        if type(function) is not BuiltinFunctionType:
            return False
        value = function(*argument)
        if type(value) not in _PLAIN:
            return False
        self._kept += (*argument, value)
        flags = _flags_of(function)
        if flags == (_ONE_ARGUMENT if argument else _NO_ARGUMENTS):
            self._pass = None
            self._kept.append(function)
            given = id(argument[0]) if argument else 0
            self._direct += (*_inside(function), given, id(value), type(value) in _EQUAL)
            return True
        self._row(_ANSWER, function, id(argument[0]) if argument else 0, id(value), type(value) in _EQUAL)
        return True

    def plain(self, question: PlainQuestion) -> None:
        """The question has the answer that it has now."""
        self._pass = None
        self._plain.setdefault(question, question.row())

    def holds(self) -> bool:
        """Whether everything is as the rows say."""
        return self.complete()()

    def complete(self) -> Callable[[], bool]:
        """What `holds` does, as one function in C; for rows entered later another one is made."""
        if self._pass is None:
            rows, watched = self._in_order()
            self._pass = native_pass(self._readers, rows, (self._kept, watched))
        return self._pass

    def _in_order(self) -> tuple[array[int], WatchedObjects | None]:
        """All rows one after the other: single words first, then dicts by their versions, or what is watched."""
        words, pairs = array("q"), set(zip(self._pairs[::2], self._pairs[1::2], strict=True))
        sections = {container: array("q", rows) for container, rows in self._of_dicts.items()}
        rest, place, watched = array("q"), self._layout.dict_size, dict(self._watched)
        for container, (table, count) in self._sizes.items():
            if self._watcher is not None:
                rows = watched[container][1] if container in watched else array("q")
                watched[container] = table, rows + array("q", (_SIZE, container, count))
            elif container in sections:
                sections[container].extend((_SIZE, container, count))
            elif place is None or len(table) != count:
                rest.extend((_SIZE, container, count))
            else:
                pairs.add((container + 8 * place, word_at(container + 8 * place)))
        if self._plain:
            words.extend((_PLAIN_ANSWERS, len(self._plain), *itertools.chain(*self._plain.values())))
        if self._direct:
            words.extend((_DIRECT, len(self._direct) // 5, *self._direct))
        _extend_by_pairs(words, _WORDS, pairs)
        for kind, later in zip((_WORDS, _WORDS, _BYTES), self._later, strict=True):  # each behind what leads to it
            _extend_by_pairs(words, kind, set(zip(later[::2], later[1::2], strict=True)))
        if sections:
            assert self._layout.dict_version is not None
            version = 8 * self._layout.dict_version
            words.extend((_SECTIONS, len(sections), sum(map(len, sections.values()))))
            for container in sorted(sections):
                # The rows are looked at when first asked.
                words.extend((container + version, _NO_VERSION, len(sections[container])))
            for container in sorted(sections):
                words.extend(sections[container])
        watching = self._extend_by_watched(words, list(watched.values())) if watched else None
        words.extend(rest)
        words.extend(self._rows)
        return words, watching

    def _extend_by_watched(self, words: array[int], found: list[tuple[Any, array[int]]]) -> WatchedObjects:
        """The rows of watched objects, which are left alone while none of these is changed."""
        assert self._watcher is not None
        watched, start = WatchedObjects(self._watcher, [owner for owner, _ in found]), len(words)
        lengths = [len(rows) for _, rows in found]
        words.extend((_WATCHED, watched.changes, _NO_VERSION, len(found), sum(lengths), 0))
        begins = itertools.accumulate(lengths, initial=0)
        for version, begin, length in zip(watched.versions, begins, lengths, strict=False):
            words.extend((version, _NO_VERSION, begin, length))  # the rows are looked at when first asked
        for _, rows in found:
            words.extend(rows)
        words.extend([0] * len(found))  # for the numbers of those that change often
        watched.at_end(functools.partial(words.__setitem__, start, _ENDED))
        return watched


_OF_DICTS = frozenset({_ENTRY, _VALUES, _KEYS})
_NO_VERSION = -1  # no dict has it
_EQUAL = frozenset({int, str})  # of which there may be several that are equal
_METHOD_WORDS = 4  # of what describes a function in C
_PLAIN = _EQUAL | {bool, type(None), torch.dtype}


def _extend_by_pairs(words: array[int], kind: int, pairs: set[tuple[int, int]]) -> None:
    if pairs:
        words.extend((kind, len(pairs)))
        for pair in sorted(pairs):
            words.extend(pair)


_NO_ARGUMENTS, _ONE_ARGUMENT = 0x4, 0x8  # METH_NOARGS, METH_O


def _flags_of(function: Callable[..., Any]) -> int:
    """How a function in C takes its arguments."""
    ask = ctypes.pythonapi.PyCFunction_GetFlags
    ask.argtypes = [ctypes.py_object]
    return int(ask(function))


def _inside(function: Callable[..., Any]) -> tuple[int, int]:
    """The function of C itself, and its first argument."""
    found = []
    for name in ("PyCFunction_GetFunction", "PyCFunction_GetSelf"):
        ask = getattr(ctypes.pythonapi, name)
        ask.argtypes, ask.restype = [ctypes.py_object], ctypes.c_void_p
        found.append(ask(function) or 0)
    return found[0], found[1]


def is_available() -> bool:
    """Whether there is a native pass here: the first question may compile it, which takes a tenth of a second."""
    return _loaded() is not None


def is_ready() -> bool:
    """Whether there is a native pass by now; it is compiled in the background where that may be."""
    return CODE.if_there() is not None and is_available()


def watcher() -> Watcher | None:
    """What tells of changes of dicts and functions; None where the interpreter tells nobody."""
    return watcher_of(_native() + 8 * _METHOD_WORDS)


def native_pass(readers: TensorReaders | None, rows: array[int], kept: Any = None) -> Callable[[], bool]:
    """A function in C that tells whether the rows hold, and keeps what they name. Only where `is_available()`."""
    table = _table(readers)
    content = struct.pack("=QQq", ctypes.addressof(table), *rows.buffer_info())
    return native_function(_native(), content, (table, rows, kept))


def _native() -> int:
    found = _loaded()
    if found is None:
        raise ToolchainMissing("an identity check needs a C++ compiler: install g++ or clang++, or set CXX to one")
    return found


_NEEDED = (*(name for name in _PYTHON if name not in _OPTIONAL), "PyCFunction_NewEx")
CODE = NativeCode("identity_check", lambda: text_of("identity_check.cpp"), _NEEDED, "guards are checked in Python")


@functools.cache
def _loaded() -> int | None:
    """Where the pass is described; None where it cannot be compiled."""
    address = CODE.wait()
    if address is None:
        return None
    # Where bytes have what is in them: their size of nothing, but for the zero at the end.
    return ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int64)(address)(bytes.__basicsize__ - 1)  # type: ignore[no-any-return]


@functools.cache
def _table(readers: TensorReaders | None) -> Any:
    """`struct Python`: Python's functions and truths, the readers of tensors and where these have what is read."""
    there = [name for name in _PYTHON if hasattr(ctypes.pythonapi, name)]
    found = dict(zip(there, python_addresses(there), strict=True))
    addresses = [*(found.get(name) for name in _PYTHON), id(True), id(False)]
    addresses += (*readers.functions, *readers.words, readers.counter) if readers is not None else (0,) * 11
    return (ctypes.c_void_p * len(addresses))(*addresses)

"""Whether containers and attributes hold the very objects that they held, thousands of them in one native pass.

In Python such a pass takes some 15 ns for each object, more than half of it for the loop; here it takes 1 to 10, and a
dict whose version tells that nothing was stored in it takes 1 whatever it holds. The pass is C++ that the kernels' own
toolchain compiles once; it calls Python's C functions through addresses that ctypes gives, so that it needs no headers
of Python's.

Invariant: a check compares identities and lengths only. It runs no code of the objects that it looks at but the getters
of attributes that it was told to read, and it changes nothing; whoever made it keeps alive what it compares with.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import torch
from torchlazy.runtime.dict_views import is_without_gaps
from torchlazy.runtime.errors import ToolchainMissing
from torchlazy.runtime.native_code import load_native, python_addresses
from torchlazy.runtime.object_layout import layout, word_at

_SIZE, _ENTRY, _VALUES, _KEYS, _ITEMS, _ATTRIBUTE, _TENSOR, _GRADIENT, _WORDS, _SECTIONS, _MEMBERS, VERSIONS = range(12)
_PYTHON = (
    "PyDict_Next", "PyDict_Size", "PyDict_GetItemWithError", "PyList_Size", "PyList_GetItem", "PyObject_GetAttr",
    "Py_DecRef", "PyErr_Clear", "_PySet_NextEntry",
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
    `number_of` gives the number of a tensor's dtype, `gradient_of` the address of the implementation of its gradient,
    or of what stands for none.
    """

    functions: tuple[int, int, int, int, int, int, int]
    words: tuple[int, int, int]
    number_of: Callable[[torch.Tensor], int]
    gradient_of: Callable[[torch.Tensor], int]
    counter: int = -1


# Rows of 64-bit words, one after the other, each first its kind: see the methods of `IdentityCheck`.
_TEXT = r"""
#include <cstdint>
typedef void* object;
struct Python {
    int (*next)(object, intptr_t*, object*, object*);
    intptr_t (*dict_size)(object);
    object (*dict_item)(object, object);
    intptr_t (*list_size)(object);
    object (*list_item)(object, intptr_t);
    object (*attribute)(object, object);
    void (*release)(object);
    void (*forget_error)();
    int (*set_next)(object, intptr_t*, object*, intptr_t*);
    int (*data_ptr)(void*, void**);
    int (*dtype)(void*, int32_t*);
    int (*dim)(void*, int64_t*);
    int (*sizes)(void*, int64_t**);
    int (*strides)(void*, int64_t**);
    bool (*requires_grad)(int64_t);
    const int64_t* (*grad)(int64_t);
    int64_t implementation, hooks, late_hooks, counter;
};
static bool dict_holds(const Python* py, object dict, bool keys, int64_t count, const int64_t* kept) {
    intptr_t position = 0;
    object key, value;
    int64_t found = 0;
    while (py->next(dict, &position, &key, &value)) {
        if (found == count || (int64_t)(keys ? key : value) != kept[found]) return false;
        ++found;
    }
    return found == count;
}
// kept: key, value, and where the entry stands among the others, or -1
static bool entry_holds(const Python* py, object dict, const int64_t* kept) {
    object key, value;
    intptr_t position = kept[2];
    if (position >= 0)
        return py->next(dict, &position, &key, &value) && (int64_t)key == kept[0] && (int64_t)value == kept[1];
    value = py->dict_item(dict, (object)kept[0]);
    if (!value) py->forget_error();
    return (int64_t)value == kept[1];
}
static bool list_holds(const Python* py, object list, int64_t count, const int64_t* kept) {
    if (py->list_size(list) != count) return false;
    for (int64_t i = 0; i < count; ++i)
        if ((int64_t)py->list_item(list, i) != kept[i]) return false;
    return true;
}
static bool set_holds(const Python* py, object set, int64_t count, const int64_t* kept) {
    intptr_t position = 0, hash;
    object item;
    int64_t found = 0;
    while (py->set_next(set, &position, &item, &hash)) {
        if (found == count || (int64_t)item != kept[found]) return false;
        ++found;
    }
    return found == count;
}
// kept: three words of the Python object, then data pointer, dtype, number of dimensions, sizes, strides
static bool tensor_holds(const Python* py, object tensor, const int64_t* kept) {
    const int64_t* words = (const int64_t*)tensor;
    int64_t here = words[py->implementation];
    if (here != kept[0] || words[py->hooks] != kept[1] || words[py->late_hooks] != kept[2]) return false;
    void* handle = &here;  // a tensor of C++ is one pointer to its implementation
    void* data;
    int32_t dtype;
    int64_t dim, *sizes, *strides;
    if (py->data_ptr(handle, &data) || (int64_t)data != kept[3]) return false;
    if (py->dtype(handle, &dtype) || dtype != kept[4]) return false;
    if (py->dim(handle, &dim) || dim != kept[5]) return false;
    if (py->sizes(handle, &sizes) || py->strides(handle, &strides)) return false;
    for (int64_t i = 0; i < dim; ++i)
        if (sizes[i] != kept[6 + i] || strides[i] != kept[6 + dim + i]) return false;
    return true;
}
// kept: the implementation, whether gradients are required, the gradient's implementation or 0 where any will do
static bool gradient_holds(const Python* py, object tensor, const int64_t* kept) {
    int64_t here = ((const int64_t*)tensor)[py->implementation];
    if (here != kept[0] || py->requires_grad(here) != (bool)kept[1]) return false;
    return !kept[2] || *py->grad(here) == kept[2];
}
// kept: of each tensor its Python object and its version, which is written there where `notes`; -1: it has none
static bool versions_hold(const Python* py, bool notes, int64_t count, int64_t* kept) {
    for (int64_t i = 0; i < count; ++i, kept += 2) {
        int64_t here = ((const int64_t*)kept[0])[py->implementation];
        int64_t counter = ((const int64_t*)here)[py->counter];
        int64_t now = counter ? (int64_t)*(const uint32_t*)(counter + 16) : -1;
        if (notes) kept[1] = now;
        else if (now < 0 || now != kept[1]) return false;
    }
    return true;
}
// row: number of sections, length of all their rows; of each the address of its dict's version, the version, and the
// length of its rows; then these. They are looked at where the version is another one; if they hold, it is the one.
static bool rows_hold(const Python* py, int64_t* row, const int64_t* end);
static bool sections_hold(const Python* py, int64_t* row) {
    int64_t* section = row + 3;
    int64_t* rows = section + 3 * row[1];
    for (int64_t i = 0; i < row[1]; ++i, section += 3) {
        int64_t version = *(const int64_t*)section[0];
        if (version != section[1]) {
            if (!rows_hold(py, rows, rows + section[2])) return false;
            section[1] = version;
        }
        rows += section[2];
    }
    return true;
}
static bool rows_hold(const Python* py, int64_t* row, const int64_t* end) {
    while (row < end) {
        object owner = (object)row[1];
        int64_t count = row[2];
        switch (row[0]) {
        case 0:
            if (py->dict_size(owner) != count) return false;
            row += 3;
            break;
        case 1:
            if (!entry_holds(py, owner, row + 2)) return false;
            row += 5;
            break;
        case 2:
        case 3:
            if (!dict_holds(py, owner, row[0] == 3, count, row + 3)) return false;
            row += 3 + count;
            break;
        case 4:
            if (!list_holds(py, owner, count, row + 3)) return false;
            row += 3 + count;
            break;
        case 5: {
            object found = py->attribute(owner, (object)count);
            if (!found) py->forget_error();
            if (found) py->release(found);
            if ((int64_t)found != row[3]) return false;
            row += 4;
            break;
        }
        case 6:
            if (!tensor_holds(py, owner, row + 2)) return false;
            row += 8 + 2 * row[7];
            break;
        case 7:
            if (!gradient_holds(py, owner, row + 2)) return false;
            row += 5;
            break;
        case 8: {  // row: number of pairs; of each the address of a word, and the word
            const int64_t* pair = row + 2;
            const int64_t* last = pair + 2 * row[1];
            for (; pair < last; pair += 2)
                if (*(const int64_t*)pair[0] != pair[1]) return false;
            row += 2 + 2 * row[1];
            break;
        }
        case 9:
            if (!sections_hold(py, row)) return false;
            row += 3 + 3 * row[1] + row[2];
            break;
        case 11:
            if (!versions_hold(py, row[1], count, row + 3)) return false;
            row += 3 + 2 * count;
            break;
        default:
            if (!set_holds(py, owner, count, row + 3)) return false;
            row += 3 + count;
        }
    }
    return true;
}
extern "C" int kernel(const void* table, void* rows, int64_t words) {
    int64_t* row = (int64_t*)rows;
    return !rows_hold((const Python*)table, row, row + words);
}
"""


class IdentityCheck:
    """Rows of what is to be found; `holds()` says whether it is. Make one only where `is_available()`."""

    def __init__(self, readers: TensorReaders | None = None) -> None:
        self._rows = array("q")
        self._pairs = array("q")  # addresses of words, and the words
        self._of_dicts: dict[int, array[int]] = {}  # rows that hold while the dict's version stays
        self._words = array("q")  # all of it, as the native pass takes it
        self._is_complete = False
        self._kept: list[Any] = []  # whose identities the rows name
        self._readers = readers
        self._layout = layout()
        self._function, self._table = native_pass(readers)

    @property
    def reads_tensors(self) -> bool:
        """Whether `geometry` and `gradient` may be called."""
        return self._readers is not None

    @property
    def reads_sets(self) -> bool:
        """Whether `members` may be called."""
        return bool(self._table[_PYTHON.index("_PySet_NextEntry")])

    def _row(self, kind: int, owner: Any, *words: int) -> None:
        self._is_complete = False
        self._kept.append(owner)
        rows = self._rows
        if kind in _OF_DICTS and self._layout.dict_version is not None:
            rows = self._of_dicts.setdefault(id(owner), array("q"))
        rows.extend((kind, id(owner), *words))

    def _word(self, address: int) -> None:
        """The word at the address, in an object that is kept, stays as it is."""
        self._is_complete = False
        self._pairs.extend((address, word_at(address)))

    def size(self, container: dict[Any, Any], count: int) -> None:
        """The dict has so many entries."""
        place = self._layout.dict_size
        if place is None or len(container) != count:
            self._row(_SIZE, container, count)
        else:
            self._kept.append(container)
            self._word(id(container) + 8 * place)

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
        self._row(_GRADIENT, tensor, implementation, tensor.requires_grad, gradient)

    def holds(self) -> bool:
        """Whether everything is as the rows say."""
        if not self._is_complete:
            self._complete()
        address, words = self._words.buffer_info()
        return not self._function(self._table, address, words)

    def _complete(self) -> None:
        """All rows one after the other: single words first, then dicts by their versions."""
        self._words = words = array("q")
        if self._pairs:
            words.extend((_WORDS, len(self._pairs) // 2))
            words.extend(self._pairs)
        if self._of_dicts:
            assert self._layout.dict_version is not None
            place = 8 * self._layout.dict_version
            words.extend((_SECTIONS, len(self._of_dicts), sum(map(len, self._of_dicts.values()))))
            for container, rows in self._of_dicts.items():
                words.extend((container + place, _NO_VERSION, len(rows)))  # the rows are looked at when first asked
            for rows in self._of_dicts.values():
                words.extend(rows)
        words.extend(self._rows)
        self._is_complete = True


_OF_DICTS = frozenset({_ENTRY, _VALUES, _KEYS})
_NO_VERSION = -1  # no dict has it


def is_available() -> bool:
    """Whether there is a native pass here: the first question may compile it, which takes a tenth of a second."""
    return _loaded() is not None


def native_pass(readers: TensorReaders | None) -> tuple[Callable[..., int], Any]:
    """The pass, and the table that it takes first. Only where `is_available()`."""
    return _native(), _table(readers)


def _native() -> Callable[..., int]:
    found = _loaded()
    if found is None:
        raise ToolchainMissing("an identity check needs a C++ compiler: install g++ or clang++, or set CXX to one")
    return found


@functools.cache
def _loaded() -> Callable[..., int] | None:
    """The pass, called with the interpreter's lock held; None where it cannot be compiled."""
    needed = [name for name in _PYTHON if name not in _OPTIONAL]
    address = load_native("identity_check", _TEXT, needed, "guards are checked in Python")
    if address is None:
        return None
    kind = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    return kind(address)


@functools.cache
def _table(readers: TensorReaders | None) -> Any:
    """The addresses of `struct Python`: Python's functions, the readers of tensors, an attribute's name."""
    there = [name for name in _PYTHON if hasattr(ctypes.pythonapi, name)]
    found = dict(zip(there, python_addresses(there), strict=True))
    addresses = [found.get(name) for name in _PYTHON]
    addresses += (*readers.functions, *readers.words, readers.counter) if readers is not None else (0,) * 11
    return (ctypes.c_void_p * len(addresses))(*addresses)

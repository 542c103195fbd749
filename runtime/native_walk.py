"""Following a known trace natively: what `lazy/walk.py` has a Python function for at each step, as one C++ function.

The function is given to torch as a callable of Python's; what it compares with and makes stands in tuples that
`lazy/native_steps.py` fills. It calls Python's C functions through addresses that ctypes gives, as the guards' native
pass does (`runtime/identity_check.py`), and needs no headers of Python's or torch's.

Invariant: it makes new objects first. From its first look at a tensor to its last change of the trace it calls nothing
that could run Python code, so that no other thread, signal handler or finalizer comes in between. Whatever is not as
the tuple says is left to the general way, with nothing changed.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torchlazy.runtime.errors import KernelCompileError, ToolchainMissing
from torchlazy.runtime.kernel_cache import open_cache
from torchlazy.runtime.program import KernelSource
from torchlazy.runtime.toolchain_cpp import has_cpp, load

log = logging.getLogger("torchlazy.runtime")

_FUNCTIONS = (
    "PyObject_Call", "PyObject_CallNoArgs", "PyObject_Vectorcall", "PyDict_GetItemWithError", "PyDict_SetItem",
    "PyDict_Copy", "PyDict_Size", "PyObject_GenericGetDict", "PyObject_GenericSetDict", "PyTuple_Size", "PyTuple_Pack",
    "PyList_Size", "PyList_GetItem", "PyList_SetItem", "PyList_Append", "PyObject_RichCompareBool", "PyNumber_Add",
    "Py_IncRef", "Py_DecRef", "PyErr_Occurred", "PyErr_Clear",
)  # fmt: skip
# What the table of one recorder has behind the functions: objects, then places within objects, in bytes.
OBJECTS = (
    "none", "yes", "no", "zero", "one", "tuple_type", "list_type", "dict_type", "int_type", "tensor_type",
    "storage_type", "general", "general_detach", "state", "made", "make_tensor", "unknown", "is_grad_enabled",
    "is_inference", "writes_with_grad", "at", "trace_epoch", "inputs", "input_memory", "input_versions", "target",
    "counted", "has_mode_tensors", "storage", "geometry", "slot", "epoch", "seen", "real", "poison",
)  # fmt: skip
PLACES = ("record", "base", "dirty", "storage_epoch", "storage_slot", "version", "making", "compute")

# Kinds of steps, and of their arguments: see `lazy/native_steps.py`.
_TEXT = r"""
#include <cstdint>
typedef void* object;
struct Table {
    object (*call)(object, object, object);
    object (*call_none)(object);
    object (*vectorcall)(object, object const*, uintptr_t, object);
    object (*dict_item)(object, object);
    int (*dict_set)(object, object, object);
    object (*dict_copy)(object);
    intptr_t (*dict_size)(object);
    object (*dict_of)(object, void*);
    int (*set_dict)(object, object, void*);
    intptr_t (*tuple_size)(object);
    object (*pack)(intptr_t, ...);
    intptr_t (*list_size)(object);
    object (*list_item)(object, intptr_t);
    int (*list_set)(object, intptr_t, object);
    int (*append)(object, object);
    int (*compare)(object, object, int);
    object (*add)(object, object);
    void (*retain)(object);
    void (*release)(object);
    object (*error)();
    void (*forget_error)();
    object OBJECTS_;
    intptr_t PLACES_;
};
struct Layout { intptr_t bytes, items; };  // where bytes and tuples have what is in them
struct Method { const char* name; void* function; int flags; const char* text; };
struct Found { object storage, geometry, dict; };
static Layout layout;
static const int most = 16, fixed = 7;

template <class T> static T* inside(object owner, intptr_t place) { return (T*)((char*)owner + place); }
static object type_of(object value) { return ((object*)value)[1]; }
static object read(object owner, intptr_t place) { return *inside<object>(owner, place); }

static void put(const Table* t, object owner, intptr_t place, object value) {
    object* field = inside<object>(owner, place);
    object before = *field;
    t->retain(value);
    *field = value;
    if (before) t->release(before);
}

static bool is_true(const Table* t, object question) {
    object answer = t->call_none(question);
    if (!answer) t->forget_error();
    if (answer) t->release(answer);
    return answer == t->yes;
}

static bool is_constant(const Table* t, char kind, object given, object want) {
    if (given == want) return true;
    if (kind == 'N') return type_of(given) == type_of(want) && t->compare(given, want, 2) == 1;
    if (kind != 'L' || type_of(given) != t->list_type) return false;
    intptr_t count = t->list_size(want);
    if (t->list_size(given) != count) return false;
    for (intptr_t i = 0; i < count; ++i) {
        object one = t->list_item(given, i), other = t->list_item(want, i);
        if (one != other && (type_of(one) != t->int_type || t->compare(one, other, 2) != 1)) return false;
    }
    return true;
}

static bool look(const Table* t, object tensor, Found* found) {
    if (type_of(tensor) != t->tensor_type) return false;
    object dict = t->dict_of(tensor, nullptr);
    if (!dict) { t->forget_error(); return false; }
    t->release(dict);  // the tensor holds it
    found->dict = dict;
    found->storage = t->dict_item(dict, t->storage);
    found->geometry = t->dict_item(dict, t->geometry);
    return found->storage && found->geometry && type_of(found->storage) == t->storage_type;
}

// The slot of a tensor's value: its storage's, where it is a window on the whole, or its own while nobody wrote there.
static bool holds(const Table* t, const Found& f, object want, object epoch) {
    object storage = f.storage;
    if (read(storage, t->storage_slot) == want && read(storage, t->storage_epoch) == epoch
        && f.geometry == read(storage, t->base)) return true;
    return t->dict_item(f.dict, t->slot) == want && t->dict_item(f.dict, t->epoch) == epoch
        && t->dict_item(f.dict, t->seen) == read(storage, t->version);
}

// The memory with which a storage becomes an input of the trace here; none where it is one, or is not to be.
static object enters(const Table* t, const Found& f, object geometry, object epoch) {
    object storage = f.storage;
    if (f.geometry != geometry || read(storage, t->base) != geometry) return nullptr;
    if (t->compare(read(storage, t->storage_epoch), epoch, 2) != 0) return nullptr;
    if (t->compare(read(geometry, t->compute), t->dict_item(t->state, t->target), 2) != 1) return nullptr;
    object dict = t->dict_of(storage, nullptr);
    if (!dict) { t->forget_error(); return nullptr; }
    t->release(dict);
    object poison = t->dict_item(dict, t->poison), real = t->dict_item(dict, t->real);
    return (poison && poison != t->none) || real == t->none ? nullptr : real;
}

struct Walk {
    const Table* t;
    object at;
    object const* items;  // of the record
    const char* kinds;
    object const* args;
    intptr_t count;
    object epoch;
    Found found[most];
    object pairs[most], memory[most];  // of arguments that become inputs

    object want(intptr_t i) const { return items[fixed + 2 * i]; }

    bool constants() const {
        for (intptr_t i = 0; i < count; ++i)
            if (kinds[i] != 'T' && kinds[i] != 'E' && !is_constant(t, kinds[i], args[i], want(i))) return false;
        return true;
    }
    // Objects for the inputs, made before anything is looked at that must not change meanwhile.
    bool prepare() {
        for (intptr_t i = 0; i < count; ++i) pairs[i] = nullptr;
        for (intptr_t i = 0; i < count; ++i) {
            if (kinds[i] != 'E') continue;
            if (!look(t, args[i], found + i)) return false;
            pairs[i] = t->pack(2, want(i), found[i].storage);
            if (!pairs[i]) return false;
        }
        return true;
    }
    bool stands() {
        if (t->dict_item(t->state, t->at) != at) return false;
        epoch = t->dict_item(t->state, t->trace_epoch);
        for (intptr_t i = 0; i < count; ++i) {
            if (kinds[i] != 'T' && kinds[i] != 'E') continue;
            if (!look(t, args[i], found + i)) return false;
            if (kinds[i] == 'T') {
                if (!holds(t, found[i], want(i), epoch)) return false;
                continue;
            }
            memory[i] = enters(t, found[i], items[fixed + 2 * i + 1], epoch);
            if (!memory[i] || inside<object>(pairs[i], layout.items)[1] != found[i].storage) return false;
            for (intptr_t j = 0; j < i; ++j)
                if (kinds[j] == 'E' && found[j].storage == found[i].storage) return false;
        }
        return true;
    }
    // Lists only grow where there is memory for it: of an error it is told after all that can be done is done.
    void move_on() {
        for (intptr_t i = 0; i < count; ++i) {
            if (kinds[i] != 'E') continue;
            object storage = found[i].storage;
            t->append(t->dict_item(t->state, t->inputs), pairs[i]);
            t->append(t->dict_item(t->state, t->input_memory), memory[i]);
            t->append(t->dict_item(t->state, t->input_versions), read(storage, t->version));
            put(t, storage, t->storage_slot, want(i));
            put(t, storage, t->storage_epoch, epoch);
            put(t, storage, t->dirty, t->no);
        }
        t->dict_set(t->state, t->at, items[2]);
    }
    void end() {
        for (intptr_t i = 0; i < count; ++i)
            if (pairs[i]) t->release(pairs[i]);
    }
};

static void drop(const Table* t, object value) { if (value) t->release(value); }

static object new_value(Walk& w) {
    const Table* t = w.t;
    object const* r = w.items;
    object storage = t->call_none(t->storage_type), tensor = storage ? t->call(t->make_tensor, r[3], nullptr) : nullptr;
    object dict = tensor ? t->dict_copy(t->unknown) : nullptr;
    if (!dict || !w.prepare() || !w.stands()) {
        drop(t, dict);
        drop(t, tensor);
        drop(t, storage);
        return nullptr;
    }
    put(t, storage, t->base, r[4]);
    put(t, storage, t->storage_slot, r[5]);
    put(t, storage, t->version, t->zero);
    put(t, storage, t->dirty, t->yes);
    put(t, storage, t->storage_epoch, w.epoch);
    t->dict_set(dict, t->storage, storage);
    t->dict_set(dict, t->geometry, r[4]);
    t->set_dict(tensor, dict, nullptr);
    w.move_on();
    t->append(t->made, storage);
    t->release(dict);
    t->release(storage);
    return tensor;
}

static object view(Walk& w) {
    const Table* t = w.t;
    object const* r = w.items;
    // Under inference_mode a view of an ordinary tensor is an ordinary tensor.
    if (is_true(t, t->is_inference)) return nullptr;
    object tensor = t->call(t->make_tensor, r[3], nullptr);
    object dict = tensor ? t->dict_copy(t->unknown) : nullptr;
    if (!dict || !w.prepare() || !w.stands() || w.found[0].geometry != r[6]) {
        drop(t, dict);
        drop(t, tensor);
        return nullptr;
    }
    object storage = w.found[0].storage;
    t->dict_set(dict, t->storage, storage);
    t->dict_set(dict, t->geometry, r[4]);
    t->dict_set(dict, t->slot, r[5]);
    t->dict_set(dict, t->epoch, w.epoch);
    t->dict_set(dict, t->seen, read(storage, t->version));
    t->set_dict(tensor, dict, nullptr);
    w.move_on();
    t->release(dict);
    return tensor;
}

static object write(Walk& w) {
    const Table* t = w.t;
    object const* r = w.items;
    bool has_grad = is_true(t, t->is_grad_enabled);
    if (!w.prepare() || !w.stands()) return nullptr;
    object storage = w.found[0].storage;
    if (w.found[0].geometry != r[6] || read(storage, t->base) != r[6]) return nullptr;
    if (read(storage, t->dirty) != t->yes) return nullptr;
    for (intptr_t i = 1; i < w.count; ++i)  // whether two windows on one memory overlap is for the general way to say
        if ((w.kinds[i] == 'T' || w.kinds[i] == 'E') && w.found[i].storage == storage) return nullptr;
    object version = t->add(read(storage, t->version), t->one);  // numbers are made without a look for garbage
    object writes = has_grad ? t->add(t->list_item(t->writes_with_grad, 0), t->one) : nullptr;
    if (!version || (has_grad && !writes)) {
        drop(t, version);
        return nullptr;
    }
    w.move_on();
    put(t, storage, t->storage_slot, r[5]);
    put(t, storage, t->version, version);
    t->release(version);
    if (writes) t->list_set(t->writes_with_grad, 0, writes);
    t->retain(w.args[0]);
    return w.args[0];
}

static object step(const Table* t, object at, object record, object const* given) {
    Walk w;
    w.t = t;
    w.at = at;
    w.items = inside<object>(record, layout.items);
    w.kinds = inside<char>(w.items[0], layout.bytes) + 1;
    if (w.items[1] != given[1] || type_of(given[3]) != t->tuple_type) return nullptr;
    if (given[4] != t->none && (type_of(given[4]) != t->dict_type || t->dict_size(given[4]))) return nullptr;
    w.args = inside<object>(given[3], layout.items);
    w.count = (t->tuple_size(record) - fixed) / 2;
    if (t->tuple_size(given[3]) != w.count || !w.constants()) return nullptr;
    for (intptr_t i = 0; i < w.count; ++i) w.pairs[i] = nullptr;
    char kind = w.kinds[-1];
    object made = kind == 'N' ? new_value(w) : kind == 'V' ? view(w) : write(w);
    w.end();
    return made;
}

static object walk(object self, object const* given, intptr_t count) {
    const Table* t = inside<Table>(self, layout.bytes);
    object at = t->dict_item(t->state, t->at);
    object record = at && count == 5 ? read(at, t->record) : nullptr;
    if (record && record != t->none) {
        t->retain(at);
        t->retain(record);
        object made = step(t, at, record, given);
        t->release(record);
        t->release(at);
        if (t->error()) {
            drop(t, made);
            return nullptr;
        }
        if (made) return made;
    }
    return t->vectorcall(t->general, given, count, nullptr);
}

// The same window on the same storage; nothing is recorded.
static object twin(const Table* t, object source) {
    Found f;
    if (t->dict_item(t->state, t->has_mode_tensors) != t->no || is_true(t, t->is_inference)) return nullptr;
    if (!look(t, source, &f)) return nullptr;
    object geometry = f.geometry, making = read(geometry, t->making);
    if (!making || type_of(making) != t->tuple_type) return nullptr;
    t->retain(making);
    object tensor = t->call(t->make_tensor, making, nullptr);
    t->release(making);
    object dict = tensor ? t->dict_copy(t->unknown) : nullptr;
    object counted = dict ? t->add(t->dict_item(t->state, t->counted), t->one) : nullptr;
    if (!counted || !look(t, source, &f) || f.geometry != geometry) {
        drop(t, counted);
        drop(t, dict);
        drop(t, tensor);
        return nullptr;
    }
    t->dict_set(t->state, t->counted, counted);
    t->dict_set(dict, t->storage, f.storage);
    t->dict_set(dict, t->geometry, geometry);
    if (geometry != read(f.storage, t->base)) {  // else the storage knows its value
        t->dict_set(dict, t->slot, t->dict_item(f.dict, t->slot));
        t->dict_set(dict, t->epoch, t->dict_item(f.dict, t->epoch));
        t->dict_set(dict, t->seen, t->dict_item(f.dict, t->seen));
    }
    t->set_dict(tensor, dict, nullptr);
    t->release(counted);
    t->release(dict);
    return tensor;
}

static object detach(object self, object const* given, intptr_t count) {
    const Table* t = inside<Table>(self, layout.bytes);
    if (count == 5 && type_of(given[3]) == t->tuple_type && t->tuple_size(given[3]) == 1) {
        object made = twin(t, *inside<object>(given[3], layout.items));
        if (t->error()) {
            drop(t, made);
            return nullptr;
        }
        if (made) return made;
    }
    return t->vectorcall(t->general_detach, given, count, nullptr);
}

static Method methods[] = {{"walk", (void*)walk, 0x80, nullptr}, {"detach", (void*)detach, 0x80, nullptr}};

extern "C" int kernel(const void* places, void* answer) {
    layout = *(const Layout*)places;
    ((void**)answer)[0] = methods;
    ((void**)answer)[1] = methods + 1;
    return (int)sizeof(Table);
}
"""


def functions_for(
    objects: Sequence[Any], places: Sequence[int]
) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """What torch is to call for an operator that is walked to, and for a detach; None where there is no compiler.

    `objects` are those that `OBJECTS` names, in that order, and `places` those of `PLACES`, in bytes. The functions
    keep the objects alive.
    """
    found = _loaded()
    if found is None:
        return None
    methods, size = found
    addresses = [ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value for name in _FUNCTIONS]
    table = (ctypes.c_void_p * (len(addresses) + len(OBJECTS) + len(PLACES)))(*addresses, *map(id, objects), *places)
    if ctypes.sizeof(table) != size or (len(objects), len(places)) != (len(OBJECTS), len(PLACES)):
        raise RuntimeError("torchlazy: internal error: the table of a native walk has another size; please report this")
    words, kept = bytes(table), tuple(objects)
    make = ctypes.pythonapi.PyCFunction_NewEx  # of a description, its `self`, and what else it refers to
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.py_object, ctypes.py_object]
    return make(methods[0], words, kept), make(methods[1], words, kept)


@functools.cache
def _loaded() -> tuple[tuple[int, int], int] | None:
    """Where the two functions are described, and the size of their table; None where they cannot be compiled."""
    has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
    needed = (*_FUNCTIONS, "PyCFunction_NewEx")
    if not has_lock or not has_cpp() or not all(hasattr(ctypes.pythonapi, name) for name in needed):
        return None
    text = _TEXT.replace("OBJECTS_", ", ".join(OBJECTS)).replace("PLACES_", ", ".join(PLACES))
    source = KernelSource("cpp", "native_walk", text, pointers=())
    try:
        functions, failed = load([(source, "")], open_cache())
    except (OSError, ToolchainMissing) as error:
        log.warning("known traces are followed in Python: the native walk cannot be built (%s)", error)
        return None
    if failed:
        log.warning("known traces are followed in Python: %s", KernelCompileError(source, failed[0].log))
        return None
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    address = ctypes.cast(functions[source.key], ctypes.c_void_p).value  # type: ignore[arg-type]
    assert address is not None
    # Where bytes and tuples have what is in them: their sizes of nothing, but for the zero at the end of bytes.
    layout = (ctypes.c_int64 * 2)(bytes.__basicsize__ - 1, tuple.__basicsize__)
    answer = (ctypes.c_void_p * 2)()
    size = kind(address)(ctypes.addressof(layout), ctypes.addressof(answer))
    first, second = answer[0], answer[1]
    assert first is not None and second is not None
    return (first, second), size

"""The C++ of the native follower, continued: a new tensor as a copy of one that was kept, by torch's own functions.

`Tensor._make_wrapper_subclass` takes 7,700 instructions, of which most are reading its fifteen arguments; a copy of a
tensor of the same geometry, with a memory of its own, takes 2,100. Torch's functions are found by their names, and are
declared here by hand: its headers would take seconds to compile.

Invariant: a copy differs in nothing from what `_make_wrapper_subclass` would have made, but that torch believes its
memory, which has no address, to be on the device "meta". Two tensors never share a memory: whoever asks torch whether
one is an alias of the other (DistributedDataParallel's reducer) would be told so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# What the table of the native walk has last: addresses of torch's functions and objects, then numbers.
COPIES = (
    "copy_tensor", "new_storage", "is_excluded", "exclude", "in_inference", "wrap", "let_go", "allocate", "allocator",
    "python_key", "implementation", "keys", "ordinary", "storage_place",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorCopies:
    """How tensors are copied natively: a word for each name in `COPIES`.

    The functions: of a tensor's address, a copy of its metadata; a storage; whether dispatch to a key is left out in
    this thread; leave it out, or no more; whether inference_mode is on; the Python object of a tensor, of this class;
    delete a tensor; memory of so many bytes for one. Then the allocator of storages without memory; the number of the
    key by which torch dispatches to Python; in bytes, where a tensor's Python object has the address of its
    implementation, and that its keys and storage; before the last, the keys that tensors of inference_mode lack.
    """

    words: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prototype:
    """What tensors of one geometry are copies of: `kept` without a storage, and the size of the storage of each."""

    kept: torch.Tensor
    nbytes: int

    def for_native(self) -> tuple[torch.Tensor, bytes]:
        """As native code reads it."""
        return self.kept, self.nbytes.to_bytes(8, "little", signed=True)


TEXT = r"""
#include <new>
// Classes of torch's as far as calls are concerned: they are passed and returned by their address.
struct Size { int64_t number; Size(int64_t n) : number(n) {} Size(const Size&); ~Size() {} };
struct Memory {
    void* words[3] = {nullptr, nullptr, nullptr};
    int8_t type = 0, index = -1;
    Memory() {}
    Memory(const Memory&);
    ~Memory() {}
};
struct MaybeDevice { int8_t type = 0, index = 0; bool is_there = false; };
struct InBytes {};
struct Returned { void* address; Returned(const Returned&) = delete; ~Returned() {} };  // whoever gets it drops it

static object copy_of(const Table* t, object prototype) {
    object const* items = inside<object>(prototype, layout.items);
    object kept = read(items[0], t->implementation);
    int64_t size = *inside<int64_t>(items[1], layout.bytes);
    uint16_t key = (uint16_t)t->python_key;
    auto is_excluded = (bool (*)(uint16_t))t->is_excluded;
    auto exclude = (void (*)(uint16_t, bool))t->exclude;
    // By torch's `operator new`: a call of ours would need the C++ library, without which units are linked.
    object* tensor = ((object* (*)(size_t))t->allocate)(sizeof(object));
    bool was = is_excluded(key);
    if (!was) exclude(key, true);  // else torch asks Python for the copy
    new (tensor) Returned(((Returned (*)(const object*))t->copy_tensor)(&kept));
    if (!was) exclude(key, false);
    typedef Returned (*NewStorage)(InBytes, Size, Memory, void*, bool, MaybeDevice);
    auto new_storage = (NewStorage)t->new_storage;
    new (inside<object>(*tensor, t->storage_place))
        Returned(new_storage(InBytes(), Size(size), Memory(), (void*)t->allocator, true, MaybeDevice()));
    *inside<int64_t>(*tensor, t->keys) = *inside<int64_t>(kept, t->keys);
    object made = ((object (*)(const object*, object))t->wrap)(tensor, t->tensor_type);
    ((int (*)(object*))t->let_go)(tensor);
    return made;
}

// Whether it is no tensor of inference_mode.
static bool is_ordinary(const Table* t, object tensor) {
    return *inside<int64_t>(read(tensor, t->implementation), t->keys) & (int64_t)t->ordinary;
}
"""

"""The C++ behind `runtime/native/argument_check.py`: whether the arguments of a call are like those of another one.

Invariant: it runs no code of the arguments' classes.
"""

from __future__ import annotations

# Follows what stands before it in `runtime/native/identity_check_source.py`. Rows: number of arguments; the class of
# recorded tensors, the names of what each has in its dict, in order, the name of what tells a memory's form; a dict of
# memories by their addresses; the gradient of what has none; then of each argument how it is looked at, and two words.
TEXT = r"""
enum { same, of_class, recorded, of_bits, own_names = 5 };
// The memory that the recorded tensor is on, where it is of this form, on one of that, neither needs nor has a
// gradient, and was not made where none are recorded; else null. `names`: of what its dict holds, first its memory,
// then its form.
static object memory_of(const Python* py, object tensor, const int64_t* names, int64_t form, int64_t form_of_memory) {
    int64_t here = ((const int64_t*)tensor)[py->implementation];
    if (!((const int64_t*)here)[py->counter] || py->requires_grad(here)) return nullptr;
    if (*py->grad(here) != names[own_names + 2]) return nullptr;
    object own = py->dict_of(tensor, nullptr);
    if (!own) {
        py->forget_error();
        return nullptr;
    }
    py->release(own);  // the tensor holds it
    object key, value, found[own_names];
    intptr_t position = 0;
    for (int i = 0; i < own_names; ++i)
        if (!py->next(own, &position, &key, &found[i]) || (int64_t)key != names[i]) return nullptr;
    if (py->next(own, &position, &key, &value) || (int64_t)found[1] != form) return nullptr;
    object base = py->attribute(found[0], (object)names[own_names]);
    if (!base) py->forget_error();
    else py->release(base);  // the memory holds it
    return (int64_t)base == form_of_memory ? found[0] : nullptr;
}
static bool is_among(const Python* py, object memories, object memory) {
    object number = py->number(memory);
    bool found = !number || py->dict_item(memories, number);
    py->forget_error();
    if (number) py->release(number);
    return found;
}
static bool arguments_fit(const Python* py, object given, const int64_t* rows) {
    int64_t count = rows[0];
    const int64_t* names = rows + 2;
    const int64_t* kept = names + own_names + 3;
    if (py->tuple_size(given) != count) return false;
    object met[16];
    int several = 0;
    for (int64_t i = 0; i < count; ++i, kept += 3) {
        object value = py->tuple_item(given, i);
        object its_class = ((object*)value)[1];
        if (kept[0] == same) {
            if ((int64_t)value == kept[1]) continue;
            if (!kept[2] || (int64_t)its_class != kept[2]) return false;
            if (py->compare(value, (object)kept[1], 2) != 1) return false;
        } else if (kept[0] == of_class) {
            if ((int64_t)its_class != kept[1]) return false;
        } else if (kept[0] == of_bits) {
            if ((int64_t)its_class != kept[2] || ((int64_t*)value)[2] != kept[1]) return false;
        } else {
            if ((int64_t)its_class != rows[1]) return false;
            object memory = memory_of(py, value, names, kept[1], kept[2]);
            if (!memory || is_among(py, (object)names[own_names + 1], memory)) return false;
            for (int other = 0; other < several; ++other)
                if (met[other] == memory) return false;
            met[several++] = memory;
        }
    }
    return true;
}
"""

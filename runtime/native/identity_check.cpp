// The C++ of the native pass behind `runtime/native/identity_check.py`, which describes its rows.
//
// Invariant: it includes nothing of Python's or torch's. Objects are addresses, and Python's functions come in a table.
//
// Rows of 64-bit words, one after the other, each first its kind: see the methods of `IdentityCheck`.
#include <cstdint>

#include "watched.h"

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
    int (*context_value)(object, object, object*);
    object (*call)(object);
    object (*call_with)(object, object);
    int (*compare)(object, object, int);
    void (*retain)(object);
    object yes, no;
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
// kept: what a function gave: that very object, or (where that is said) one of its type that is equal
static bool answer_is(const Python* py, object found, const int64_t* kept) {
    if (!found) {
        py->forget_error();
        return false;
    }
    object then = (object)kept[0];
    bool alike = kept[1] && ((object*)found)[1] == ((object*)then)[1];
    bool holds = found == then || (alike && py->compare(found, then, 2) == 1);
    py->release(found);
    return holds;
}
// row: number of functions; of each its function of C, its first argument and second one, and what is kept as above.
// All of them are asked for from memory before the first one is called.
static bool direct_answers_hold(const Python* py, const int64_t* row) {
    const int64_t* last = row + 2 + 5 * row[1];
    for (const int64_t* one = row + 2; one < last; one += 5)
        for (int line = 0; line < 2; ++line) __builtin_prefetch((const char*)one[0] + 64 * line);
    for (const int64_t* one = row + 2; one < last; one += 5) {
        object found = ((object (*)(object, object))one[0])((object)one[1], (object)one[2]);
        if (!answer_is(py, found, one + 3)) return false;
    }
    return true;
}
// row: number of questions; of each what `PlainQuestion.row` says (runtime/plain_answers.py), last the answer
static bool plain_answers_hold(const int64_t* row) {
    const int64_t* last = row + 2 + 7 * row[1];
    for (const int64_t* one = row + 2; one < last; one += 7) __builtin_prefetch((const void*)one[1]);
    for (const int64_t* one = row + 2; one < last; one += 7) {
        int64_t now;
        if (one[0] == 3) {
            now = *(const unsigned char*)one[1] & one[4];
        } else {
            now = ((int64_t(*)(int64_t))one[1])(one[2]);
            if (one[0] == 1) now = *(const unsigned char*)(now + one[3]);
            if (one[0] == 2) now = *(const int64_t*)(now + one[3]) == *(const int64_t*)(now + one[5]);
            else now &= one[4];
        }
        if (now != one[6]) return false;
    }
    return true;
}
// kept: what stands for no value, and the value
static bool context_holds(const Python* py, object variable, const int64_t* kept) {
    object found = nullptr;
    if (py->context_value(variable, (object)kept[0], &found) < 0) py->forget_error();
    if (found) py->release(found);
    return (int64_t)found == kept[1];
}
// row: number of sections, length of all their rows; of each the address of its dict's version, the version, and the
// length of its rows; then these. They are looked at where the version is another one; if they hold, it is the one.
static bool rows_hold(const Python* py, int64_t* row, const int64_t* end);
static const int64_t ahead = 16;  // so many words are asked for from memory before they are read
static bool words_hold(const int64_t* pair, int64_t count) {
    int64_t others = 0;
    for (; count > 2 * ahead; count -= ahead) {
        for (int64_t i = ahead; i < 2 * ahead; ++i) __builtin_prefetch((const void*)pair[2 * i]);
        for (int64_t i = 0; i < ahead; ++i, pair += 2) others |= *(const int64_t*)pair[0] ^ pair[1];
        if (others) return false;
    }
    for (; count > 0; --count, pair += 2)
        if (*(const int64_t*)pair[0] != pair[1]) return false;
    return true;
}
static bool sections_hold(const Python* py, int64_t* row) {
    int64_t* section = row + 3;
    int64_t* rows = section + 3 * row[1];
    for (int64_t i = 0; i < row[1]; ++i, section += 3) {
        if (i + ahead < row[1]) __builtin_prefetch((const void*)section[3 * ahead]);
        int64_t version = *(const int64_t*)section[0];
        if (version != section[1]) {
            if (!rows_hold(py, rows, rows + section[2])) return false;
            section[1] = version;
        }
        rows += section[2];
    }
    return true;
}
// row: where changes of watched objects are counted, the count at the last look, the number of objects, the length of
// all their rows, the number of objects that change often; of each object where its version is, the version, where its
// rows begin, their length; then these rows, and the numbers of the objects that change often.
static bool object_holds(const Python* py, int64_t* kept, int64_t* rows) {
    int64_t version = *(const int64_t*)kept[0];
    if (version == kept[1]) return true;
    if (!rows_hold(py, rows + kept[2], rows + kept[2] + kept[3])) return false;
    kept[1] = version;
    return true;
}
static bool watched_hold(const Python* py, int64_t* row) {
    int64_t now = *(const int64_t*)row[1], count = row[3], changing = 0;
    int64_t* objects = row + 6;
    int64_t* rows = objects + 4 * count;
    int64_t* numbers = rows + row[4];
    if (now == row[2]) {
        for (int64_t i = 0; i < row[5]; ++i)
            if (!object_holds(py, objects + 4 * numbers[i], rows)) return false;
        return true;
    }
    row[2] = -1;  // until all were found to hold
    for (int64_t i = 0; i < count; ++i) {
        if (!object_holds(py, objects + 4 * i, rows)) return false;
        if (((const Record*)objects[4 * i])->changes >= often) numbers[changing++] = i;
    }
    row[5] = changing;
    row[2] = now;
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
        case 8:  // row: number of pairs; of each the address of a word, and the word
            if (!words_hold(row + 2, row[1])) return false;
            row += 2 + 2 * row[1];
            break;
        case 9:
            if (!sections_hold(py, row)) return false;
            row += 3 + 3 * row[1] + row[2];
            break;
        case 11:
            if (!versions_hold(py, row[1], count, row + 3)) return false;
            row += 3 + 2 * count;
            break;
        case 12:  // row: the function, its argument or 0, and what it gave
            if (!answer_is(py, row[2] ? py->call_with(owner, (object)row[2]) : py->call(owner), row + 3)) return false;
            row += 5;
            break;
        case 13:
            if (!context_holds(py, owner, row + 2)) return false;
            row += 4;
            break;
        case 14:
            if (!watched_hold(py, row)) return false;
            row += 6 + 5 * row[3] + row[4];
            break;
        case 16: {  // row: number of pairs; of each the address of a byte, and the byte
            const int64_t* pair = row + 2;
            const int64_t* last = pair + 2 * row[1];
            for (; pair < last; pair += 2)
                if (*(const unsigned char*)pair[0] != pair[1]) return false;
            row += 2 + 2 * row[1];
            break;
        }
        case 17:
            if (!direct_answers_hold(py, row)) return false;
            row += 2 + 5 * row[1];
            break;
        case 18:
            if (!plain_answers_hold(row)) return false;
            row += 2 + 7 * row[1];
            break;
        case 15:  // what was watched is so no more
            return false;
        default:
            if (!set_holds(py, owner, count, row + 3)) return false;
            row += 3 + count;
        }
    }
    return true;
}
struct Pass { const Python* table; int64_t* rows; int64_t words; };
struct Method { const char* name; void* function; int flags; const char* text; };
static int64_t content;  // where bytes have what is in them
static object holds(object self, object) {
    const Pass* pass = (const Pass*)((char*)self + content);
    const Python* py = pass->table;
    object answer = rows_hold(py, pass->rows, pass->rows + pass->words) ? py->yes : py->no;
    py->retain(answer);
    return answer;
}
struct Description { Method method; void* watching[6]; };
static Description description = {
    {"holds", (void*)holds, 0x4, nullptr},
    {(void*)dict_changes, (void*)function_changes, (void*)begin_watching, (void*)watch_object, (void*)forget_object,
     (void*)group_changes},
};
extern "C" void* kernel(int64_t place) {
    content = place;
    return &description;
}

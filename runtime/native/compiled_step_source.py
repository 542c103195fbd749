"""The C++ of the native follower, without the members that other modules name: OBJECTS_, PLACES_ and COPIES_.

Invariant: it includes nothing of Python's or torch's. Objects are addresses; what is read inside of them lies at places
that `lazy/record/follow/native.py` found in objects of their classes.
"""

from __future__ import annotations

# Kinds of steps, and of their arguments: see `lazy/record/follow/native.py`.
TEXT = r"""
#include <cstdint>
#include <cstdlib>
#include <cstring>
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
    object (*new_list)(intptr_t);
    object (*new_tuple)(intptr_t);
    object (*number)(intptr_t);
    double (*real_number)(object);
    object OBJECTS_;
    intptr_t PLACES_;
    intptr_t COPIES_;  // all zero where tensors are not copied
};
struct Layout { intptr_t bytes, items; };  // where bytes and tuples have what is in them
struct Method { const char* name; void* function; int flags; const char* text; };
struct Found { object storage, geometry, dict; };
static Layout layout;
static const int fixed = 10;

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

static bool is_storage_s(const Table* t, const Found& f, object want, object epoch) {
    return read(f.storage, t->storage_slot) == want && read(f.storage, t->storage_epoch) == epoch
        && f.geometry == read(f.storage, t->base);
}

// The slot of a tensor's value: its storage's, where it is a window on the whole, or its own while nobody wrote there.
static bool holds(const Table* t, const Found& f, object want, object epoch) {
    return is_storage_s(t, f, want, epoch)
        || (t->dict_item(f.dict, t->slot) == want && t->dict_item(f.dict, t->epoch) == epoch
            && t->dict_item(f.dict, t->seen) == read(f.storage, t->version));
}

// Whether the trace has the tensor's value.
static bool is_known(const Table* t, const Found& f, object epoch) {
    if (f.geometry == read(f.storage, t->base) && read(f.storage, t->storage_epoch) == epoch) return true;
    return t->dict_item(f.dict, t->epoch) == epoch && t->dict_item(f.dict, t->seen) == read(f.storage, t->version);
}

// The memory with which a storage becomes an input of the trace here; none where it is one, or is not to be.
static object enters(const Table* t, const Found& f, object window, object geometry, object epoch) {
    object storage = f.storage;
    if (f.geometry != window || read(storage, t->base) != geometry) return nullptr;
    if (t->compare(read(storage, t->storage_epoch), epoch, 2) != 0) return nullptr;
    if (t->compare(read(geometry, t->compute), t->dict_item(t->state, t->target), 2) != 1) return nullptr;
    object dict = t->dict_of(storage, nullptr);
    if (!dict) { t->forget_error(); return nullptr; }
    t->release(dict);
    object poison = t->dict_item(dict, t->poison), real = t->dict_item(dict, t->real);
    return (poison && poison != t->none) || real == t->none ? nullptr : real;
}

static void drop(const Table* t, object value) { if (value) t->release(value); }

// One argument, or one item of a list that is an argument.
struct Item {
    object given, want, extra;
    object pair, memory;  // of one that becomes an input
    Found found;
    char kind;
    bool is_written() const { return kind == 't' || kind == 'e' || kind == 'x'; }
    bool is_input() const { return kind == 'E' || kind == 'e' || kind == 'Y'; }
    // A window that is read first: its geometry, that of its memory, its slot then.
    bool is_read() const { return kind == 'Y' || kind == 'y'; }
    bool is_tensor() const { return kind && strchr("TtEeYyxzAGH", kind); }
};

struct Walk {
    const Table* t;
    object at, epoch;
    object began = nullptr;  // the epoch before anything was called
    const Item* last = nullptr;  // the number that was found to be one of the trace's before
    object const* r;  // what is in the record
    Item few[16];
    Item* items = few;
    object* seen = nullptr;  // a table of the storages that become inputs, twice as large as there are items
    object* wrote = nullptr;  // another of those that are written to
    intptr_t count = 0, inputs = 0, reads = 0, width = 32;

    // The items, flat; false where the arguments have another form or are other constants.
    bool take(object record, object given, object named) {
        began = t->dict_item(t->state, t->trace_epoch);
        t->retain(began);
        if (type_of(given) != t->tuple_type || (named != t->none && type_of(named) != t->dict_type)) return false;
        const char* kinds = inside<char>(r[0], layout.bytes) + 1;
        object const* args = inside<object>(given, layout.items);
        intptr_t told = (t->tuple_size(record) - fixed) / 2, most = t->tuple_size(given), next = 0, within = 0;
        object const* names = r[8] == t->none ? nullptr : inside<object>(r[8], layout.items);
        intptr_t name = 0, called = names ? t->tuple_size(r[8]) : 0;
        if ((named == t->none ? 0 : t->dict_size(named)) != called) return false;
        if (told > 16) {
            while (width < 2 * told) width *= 2;
            items = (Item*)calloc(told, sizeof(Item));
            seen = (object*)calloc(2 * width, sizeof(object));
            if (!items || !seen) return false;
            wrote = seen + width;
        }
        object list = nullptr;
        bool by_name = false;
        for (intptr_t i = 0; i < told; ++i) {
            char kind = kinds[i];
            if (kind == ']') {
                if (within != t->list_size(list)) return false;
                list = nullptr;
                continue;
            }
            if (kind == '|') {
                if (next != most) return false;
                by_name = true;
                continue;
            }
            object value;
            if (list) value = within < t->list_size(list) ? t->list_item(list, within++) : nullptr;
            else if (by_name) value = t->dict_item(named, names[name++]);
            else value = next < most ? args[next++] : nullptr;
            if (!value) return false;
            if (kind == '[') {
                list = value;
                within = 0;
                if (type_of(list) != t->list_type) return false;
                continue;
            }
            Item& item = items[count];
            item.given = value;
            item.want = r[fixed + 2 * i];
            item.extra = r[fixed + 2 * i + 1];
            item.kind = kind;
            item.pair = nullptr;
            ++count;
            inputs += item.is_input();
            reads += item.is_read();
            if (!item.is_tensor() && !is_constant(item)) return false;
            if (kind == 'S') last = &item;
        }
        return next == most && name == called;
    }
    bool is_constant(const Item& item) const {
        object given = item.given, want = item.want;
        if (item.kind == 'S') return type_of(given) == t->float_type && is_scalar(item);
        if (given == want) return true;
        if (item.kind == 'F') {  // zeros of two signs are equal, and no nan is
            if (type_of(given) != t->float_type) return false;
            double one = t->real_number(given), other = t->real_number(want);
            return !memcmp(&one, &other, sizeof one);
        }
        if (item.kind == 'N' || item.kind == 'D')
            return type_of(given) == type_of(want) && t->compare(given, want, 2) == 1;
        if (item.kind != 'L' || type_of(given) != t->list_type) return false;
        intptr_t length = t->list_size(want);
        if (t->list_size(given) != length) return false;
        for (intptr_t i = 0; i < length; ++i) {
            object one = t->list_item(given, i), other = t->list_item(want, i);
            if (one != other && (type_of(one) != t->int_type || t->compare(one, other, 2) != 1)) return false;
        }
        return true;
    }
    // A number that may vary is one of the trace's numbers, which Python counts: before anything is looked at.
    // Equal ones are the same: a list of step sizes is mostly one number.
    bool is_scalar(const Item& item) const {
        if (last && last->want == item.want) {
            double one = t->real_number(last->given), other = t->real_number(item.given);
            if (!memcmp(&one, &other, sizeof one)) return true;
        }
        object given[] = {item.given, item.want, item.extra};
        object answer = t->vectorcall(t->is_scalar, given, 3, nullptr);
        if (answer) t->release(answer);
        return answer == t->yes;
    }
    // Objects for the inputs, made before anything is looked at that must not change meanwhile.
    bool prepare() {
        for (intptr_t i = 0; inputs && i < count; ++i) {
            Item& item = items[i];
            if (!item.is_input() || item.pair) continue;
            if (!look(t, item.given, &item.found)) return false;
            item.pair = t->pack(2, item.want, item.found.storage);
            if (!item.pair) return false;
        }
        return true;
    }
    bool is_new(object storage) {
        object* table = seen;
        if (!table) {  // few: compared with each other
            for (intptr_t i = 0; i < count; ++i)
                if (items[i].is_input() && items[i].memory && items[i].found.storage == storage) return false;
            return true;
        }
        object& entry = place_of(table, storage);
        bool was_there = entry == storage;
        entry = storage;
        return !was_there;
    }
    object& place_of(object* table, object storage) const {
        uintptr_t place = ((uintptr_t)storage >> 4) * 0x9E3779B97F4A7C15u;
        for (place ^= place >> 32;; ++place) {
            object& entry = table[place & (width - 1)];
            if (!entry || entry == storage) return entry;
        }
    }
    bool stands() {
        if (t->dict_item(t->state, t->at) != at) return false;
        epoch = t->dict_item(t->state, t->trace_epoch);
        if (epoch != began) return false;  // numbers were entered into another trace
        for (intptr_t i = 0; i < count; ++i) items[i].memory = nullptr;
        if (seen) memset(seen, 0, 2 * width * sizeof(object));
        for (intptr_t i = 0; i < count; ++i) {
            Item& item = items[i];
            if (item.kind == 'D' && t->compare(item.extra, t->dict_item(t->state, t->target), 2) != 1) return false;
            if (!item.is_tensor()) continue;
            if (!look(t, item.given, &item.found)) return false;
            if (!item.is_input()) {
                if (!is_there(item)) return false;
                continue;
            }
            object const* its = item.is_read() ? inside<object>(item.extra, layout.items) : nullptr;
            object memory = enters(t, item.found, its ? its[0] : item.extra, its ? its[1] : item.extra, epoch);
            if (!memory || inside<object>(item.pair, layout.items)[1] != item.found.storage) return false;
            if (!is_new(item.found.storage)) return false;
            item.memory = memory;
        }
        return r[7] == t->none || writes_apart();
    }
    bool is_there(const Item& item) const {
        const Found& f = item.found;
        if (item.kind == 'T' || item.kind == 'z') return holds(t, f, item.want, epoch);
        if (item.kind == 't') return is_storage_s(t, f, item.want, epoch);
        if (item.kind == 'A') return true;
        if (item.kind == 'y') {
            object const* its = inside<object>(item.extra, layout.items);
            return f.geometry == its[0] && read(f.storage, t->base) == its[1] && !is_known(t, f, epoch)
                && read(f.storage, t->storage_slot) == item.want && read(f.storage, t->storage_epoch) == epoch;
        }
        if (item.kind == 'x') {
            object const* its = inside<object>(item.extra, layout.items);  // geometry, that of its memory, slot of that
            return f.geometry == its[0] && read(f.storage, t->base) == its[1]
                && read(f.storage, t->storage_slot) == its[2] && read(f.storage, t->storage_epoch) == epoch
                && holds(t, f, item.want, epoch);
        }
        return f.geometry == item.extra && (item.kind == 'G' || is_known(t, f, epoch));
    }
    // Whole storages of different values are different ones. Whether windows overlap what is written to is for the
    // general way to say, and whether an argument is: of a list, a step has each value at its own place only. What is
    // written to are different storages, for they hold different slots.
    bool writes_apart() const {
        bool is_list = strchr("wl", inside<char>(r[0], layout.bytes)[0]);
        for (intptr_t i = 0; wrote && i < count; ++i)
            if (items[i].is_written()) place_of(wrote, items[i].found.storage) = items[i].found.storage;
        for (intptr_t i = 0; i < count; ++i) {
            const Item& item = items[i];
            if (!item.is_tensor() || item.is_written()) continue;
            if (item.kind == 'z') {
                const Found& first = items[0].found;
                if (item.found.storage != first.storage || item.found.geometry != first.geometry) return false;
                continue;
            }
            if (is_list && (item.is_input() || is_storage_s(t, item.found, item.want, epoch))) continue;
            if (wrote && place_of(wrote, item.found.storage)) return false;
            for (intptr_t k = 0; !wrote && k < count; ++k)
                if (items[k].is_written() && items[k].found.storage == item.found.storage) return false;
        }
        return true;
    }
    // Lists only grow where there is memory for it: of an error it is told after all that can be done is done.
    void move_on() {
        for (intptr_t i = 0; inputs && i < count; ++i) {
            Item& item = items[i];
            if (!item.is_input()) continue;
            object storage = item.found.storage;
            t->append(t->dict_item(t->state, t->inputs), item.pair);
            t->append(t->dict_item(t->state, t->input_memory), item.memory);
            t->append(t->dict_item(t->state, t->input_versions), read(storage, t->version));
            put(t, storage, t->storage_slot, item.want);
            put(t, storage, t->storage_epoch, epoch);
            put(t, storage, t->dirty, t->no);
        }
        for (intptr_t i = 0; reads && i < count; ++i) {
            Item& item = items[i];
            if (!item.is_read()) continue;
            t->dict_set(item.found.dict, t->slot, inside<object>(item.extra, layout.items)[2]);
            t->dict_set(item.found.dict, t->epoch, epoch);
            t->dict_set(item.found.dict, t->seen, read(item.found.storage, t->version));
        }
        t->dict_set(t->state, t->at, r[2]);
    }
    void end() {
        for (intptr_t i = 0; inputs && i < count; ++i) drop(t, items[i].pair);  // of others it is null
        if (began) t->release(began);
        if (items != few) free(items);
        free(seen);
    }
};
"""

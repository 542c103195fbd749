"""The C++ of the native follower, continued: what a step makes and writes to, once its arguments are as they were.

Invariant: as `native_walk_source.py` says, objects are made first; between the last look and the last change nothing is
called that could run Python code.
"""

from __future__ import annotations

TEXT = r"""
struct Made { object tensor, dict, storage; };

static void drop(const Table* t, const Made& made) {
    drop(t, made.dict);
    drop(t, made.tensor);
    drop(t, made.storage);
}

// A view is a tensor of inference_mode where what it is a view of is one; what is made else, where the mode is on.
static object new_tensor(const Table* t, object making, object geometry, object viewed) {
    object prototype = t->copy_tensor ? read(geometry, t->prototype) : nullptr;
    if (prototype && type_of(prototype) == t->tuple_type && (!viewed || is_ordinary(t, viewed))
        && !((bool (*)())t->in_inference)())
        return copy_of(t, prototype);
    if (viewed) {
        object answer = t->vectorcall(t->tensor_is_inference, &viewed, 1, nullptr);
        if (!answer) return nullptr;
        t->release(answer);
        if ((answer == t->yes) != is_true(t, t->is_inference))
            return t->vectorcall(t->make_otherwise, &making, 1, nullptr);
    }
    return t->call(t->make_tensor, making, nullptr);
}

// A tensor of which is known what is known of it before anything is looked at. `viewed`: what it is a view of.
static bool make(const Table* t, Made* made, object making, object geometry, object value, object viewed) {
    made->storage = made->tensor = made->dict = nullptr;
    if (!viewed && !(made->storage = t->call_none(t->storage_type))) return false;
    made->tensor = new_tensor(t, making, geometry, viewed);
    made->dict = made->tensor ? t->dict_copy(t->unknown) : nullptr;
    if (!made->dict) return false;
    t->dict_set(made->dict, t->geometry, geometry);
    t->set_dict(made->tensor, made->dict, nullptr);
    if (viewed) {
        t->dict_set(made->dict, t->slot, value);
        return true;
    }
    put(t, made->storage, t->base, geometry);
    put(t, made->storage, t->storage_slot, value);
    put(t, made->storage, t->version, t->zero);
    put(t, made->storage, t->dirty, t->yes);
    put(t, made->storage, t->storage_epoch, t->none);
    t->dict_set(made->dict, t->storage, made->storage);
    return true;
}

// It is part of the trace: a value of its own, or a window on the memory of the first argument. The tensor is left.
static object finish(Walk& w, Made& made) {
    const Table* t = w.t;
    if (made.storage) {
        put(t, made.storage, t->storage_epoch, w.epoch);
        t->append(t->made, made.storage);
        t->release(made.storage);
    } else {
        object storage = w.items[0].found.storage;
        t->dict_set(made.dict, t->storage, storage);
        t->dict_set(made.dict, t->epoch, w.epoch);
        t->dict_set(made.dict, t->seen, read(storage, t->version));
    }
    t->release(made.dict);
    return made.tensor;
}

// What a step makes: one tensor, several, or none.
struct Makes {
    Made few[2];
    Made* all = few;
    object result = nullptr;  // the list or tuple of several
    intptr_t length = 0, ready = 0;
    object const *makings, *geometries, *values;

    bool prepare(Walk& w, char kind) {
        const Table* t = w.t;
        bool is_view = kind == 'V' || kind == 'v', is_one = kind < 'a';
        object viewed = is_view ? w.items[0].given : nullptr;
        makings = is_one ? w.r + 3 : inside<object>(w.r[3], layout.items);
        geometries = is_one ? w.r + 4 : inside<object>(w.r[4], layout.items);
        values = is_one ? w.r + 5 : inside<object>(w.r[5], layout.items);
        length = is_one ? 1 : t->tuple_size(w.r[5]);
        if (!is_one && !(result = is_view ? t->new_list(length) : t->new_tuple(length))) return false;
        if (length > 2 && !(all = (Made*)calloc(length, sizeof(Made)))) return false;
        for (; ready < length; ++ready) {
            if (values[ready] == t->none) continue;
            if (make(t, all + ready, makings[ready], geometries[ready], values[ready], viewed)) continue;
            drop(t, all[ready]);
            return false;
        }
        return true;
    }
    object finished(Walk& w, char kind) {
        if (!result) return finish(w, all[0]);
        for (intptr_t i = 0; i < length; ++i) {
            object item = geometries[i];  // what the operator returns beside its tensors
            if (values[i] == w.t->none) w.t->retain(item);
            else item = finish(w, all[i]);
            if (kind == 'v') w.t->list_set(result, i, item);
            else inside<object>(result, layout.items)[i] = item;
        }
        return result;
    }
    void drop_all(Walk& w) {
        for (intptr_t i = 0; i < ready; ++i)
            if (values[i] != w.t->none) drop(w.t, all[i]);
        drop(w.t, result);
    }
    void end() {
        if (all != few) free(all);
    }
};

// Storages that hold other values from now on.
struct Writes {
    object few[2];
    object* versions = few;
    object sum = nullptr;  // of writes with gradients
    intptr_t length = 0, ready = 0;

    // Nothing is changed yet. Numbers are made without a look for garbage.
    bool prepare(Walk& w, bool has_grad) {
        const Table* t = w.t;
        length = t->tuple_size(w.r[7]);
        if (length > 2 && !(versions = (object*)calloc(length, sizeof(object)))) return false;
        if (has_grad) {
            object more = t->number(length);
            sum = more ? t->add(t->list_item(t->writes_with_grad, 0), more) : nullptr;
            drop(t, more);
            if (!sum) return false;
        }
        for (intptr_t i = 0; i < w.count; ++i) {
            if (!w.items[i].is_written()) continue;
            object version = t->add(read(w.items[i].found.storage, t->version), t->one);
            if (!version) return false;
            versions[ready++] = version;
        }
        return ready == length;
    }
    void carry_out(Walk& w) {
        const Table* t = w.t;
        object const* values = inside<object>(w.r[7], layout.items);
        for (intptr_t i = 0, k = 0; i < w.count; ++i) {
            if (!w.items[i].is_written()) continue;
            object storage = w.items[i].found.storage;
            if (read(storage, t->dirty) != t->yes) t->append(t->made, storage);
            put(t, storage, t->dirty, t->yes);
            object const* of_window = w.items[i].kind == 'x' ? inside<object>(values[k], layout.items) : nullptr;
            put(t, storage, t->storage_slot, of_window ? of_window[1] : values[k]);
            put(t, storage, t->version, versions[k]);
            if (of_window) {
                object dict = w.items[i].found.dict;
                t->dict_set(dict, t->slot, of_window[0]);
                t->dict_set(dict, t->epoch, w.epoch);
                t->dict_set(dict, t->seen, versions[k]);
            }
            t->release(versions[k++]);
        }
        if (sum) t->list_set(t->writes_with_grad, 0, sum);
    }
    void drop_all(Walk& w) {
        for (intptr_t i = 0; i < ready; ++i) drop(w.t, versions[i]);
        drop(w.t, sum);
    }
    void end() {
        if (versions != few) free(versions);
    }
};

static bool holds_still(Walk& w, char kind) {
    if (!w.prepare() || !w.stands()) return false;
    return (kind != 'V' && kind != 'v') || w.items[0].found.geometry == w.r[6];
}

// Numbers are the trace's before all is looked at once more. `was_drawn`: a seed among them is lost if that fails.
static bool has_numbers(Walk& w, char kind, bool* was_drawn) {
    if (w.r[9] == w.t->none) return true;
    if (!holds_still(w, kind)) return false;
    object answer = w.t->vectorcall(w.t->enter_numbers, w.r + 9, 1, nullptr);
    if (!answer) return false;
    w.t->release(answer);
    *was_drawn = answer != w.t->none;
    return answer == w.t->yes;
}

// A function of C, in which nobody is interrupted; the call is recorded, whatever it says of tensors of inference_mode.
static void raise_versions(const Table* t, object list) {
    object answer = t->vectorcall(t->raise_versions, &list, 1, nullptr);
    if (answer) t->release(answer);
    else t->forget_error();
}

static object step(const Table* t, object at, object record, object const* given, bool* was_drawn) {
    object const* r = inside<object>(record, layout.items);
    char kind = inside<char>(r[0], layout.bytes)[0];
    Walk w;
    w.t = t;
    w.at = at;
    w.r = r;
    Makes makes;
    Writes writes;
    object made = nullptr;
    bool is_write = strchr("Wwulm", kind), is_written = r[7] != t->none;
    bool has_grad = is_written && is_true(t, t->is_grad_enabled);
    if (w.take(record, given[3], given[4]) && (is_write || makes.prepare(w, kind)) && has_numbers(w, kind, was_drawn)
        && holds_still(w, kind) && (!is_written || writes.prepare(w, has_grad))) {
        w.move_on();
        made = !is_write ? makes.finished(w, kind) : kind == 'W' ? w.items[0].given : t->none;
        if (is_write) t->retain(made);
        if (is_written) writes.carry_out(w);  // last, as handlers do: a trace's outputs stand in this order
        if (strchr("lm", kind)) raise_versions(t, inside<object>(given[3], layout.items)[0]);
    } else {
        if (!is_write) makes.drop_all(w);
        writes.drop_all(w);
    }
    makes.end();
    writes.end();
    w.end();
    return made;
}

// Where twins of one geometry are made again, they are copied from then on.
static bool is_told_again(const Table* t, object geometry) {
    object prototype = t->copy_tensor ? read(geometry, t->prototype) : nullptr;
    if (prototype == t->none) put(t, geometry, t->prototype, t->no);
    if (prototype != t->no) return true;
    object answer = t->vectorcall(t->add_prototype, &geometry, 1, nullptr);
    drop(t, answer);
    return answer;
}

// The same window on the same storage; nothing is recorded. `is_ours`: it is known not to be made under `lazy_mode`.
static object twin(const Table* t, object source, bool is_ours) {
    Found f;
    if (!look(t, source, &f)) return nullptr;
    object geometry = f.geometry, making = read(geometry, t->making);
    if (!making || type_of(making) != t->tuple_type) return nullptr;
    if (!is_ours && t->dict_item(t->state, t->has_mode_tensors) != t->no) {
        // Its keys, which come last, tell a tensor of the lazy device from one that `lazy_mode` made.
        intptr_t size = t->tuple_size(making);
        if (!size || inside<object>(making, layout.items)[size - 1] == t->none) return nullptr;
    }
    if (!is_told_again(t, geometry)) return nullptr;
    t->retain(making);
    object tensor = new_tensor(t, making, geometry, source);
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

// A call that records nothing here: it returns what it is given first.
static object idle(const Table* t, object at, object const* given) {
    object records = read(at, t->idle), made = nullptr;
    if (!records || records == t->none) return nullptr;
    t->retain(records);
    intptr_t count = t->tuple_size(records);
    for (intptr_t i = 0; i < count && !made && !t->error(); ++i) {
        object record = inside<object>(records, layout.items)[i];
        object const* r = inside<object>(record, layout.items);
        if (r[1] != given[1]) continue;
        Walk w;
        w.t = t;
        w.at = at;
        w.r = r;
        if (w.take(record, given[3], given[4]) && w.stands()) made = twin(t, w.items[0].given, true);
        w.end();
    }
    t->release(records);
    return made;
}

static object walk(object self, object const* given, intptr_t count) {
    const Table* t = inside<Table>(self, layout.bytes);
    object at = t->dict_item(t->state, t->at), made = nullptr;
    bool was_drawn = false;
    if (at && count == 5) {
        object record = read(at, t->record);
        t->retain(at);
        if (record && record != t->none && inside<object>(record, layout.items)[1] == given[1]) {
            t->retain(record);
            made = step(t, at, record, given, &was_drawn);
            t->release(record);
        }
        if (!made && !was_drawn && !t->error()) made = idle(t, at, given);
        t->release(at);
        if (t->error()) {
            drop(t, made);
            return nullptr;
        }
        if (made) return made;
    }
    return t->vectorcall(was_drawn ? t->general_drawn : t->general, given, count, nullptr);
}

static object detach(object self, object const* given, intptr_t count) {
    const Table* t = inside<Table>(self, layout.bytes);
    if (count == 5 && type_of(given[3]) == t->tuple_type && t->tuple_size(given[3]) == 1) {
        object made = twin(t, *inside<object>(given[3], layout.items), false);
        if (t->error()) {
            drop(t, made);
            return nullptr;
        }
        if (made) return made;
    }
    return t->vectorcall(t->general_detach, given, count, nullptr);
}

// A tensor that is a copy of this prototype.
static object copy(object self, object const* given, intptr_t count) {
    return copy_of(inside<Table>(self, layout.bytes), given[0]);
}

static Method methods[] = {
    {"walk", (void*)walk, 0x80, nullptr},
    {"detach", (void*)detach, 0x80, nullptr},
    {"copy", (void*)copy, 0x80, nullptr},
};

extern "C" int kernel(const void* places, void* answer) {
    layout = *(const Layout*)places;
    ((void**)answer)[0] = methods;
    ((void**)answer)[1] = methods + 1;
    ((void**)answer)[2] = methods + 2;
    return (int)sizeof(Table);
}
"""

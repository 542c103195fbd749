// The C++ behind `runtime/native/watched.py`: the callbacks for changes of dicts and functions, and what they note.
//
// Invariant: it runs under the interpreter's lock, calls nothing that runs code, and never fails. Of an object without
// users nothing is kept.
//
// What `runtime/native/watched.py` calls stands behind the pass's own description (identity_check.cpp).
#include <cstdlib>
// One for each watched object. `changes` counts what `version` does, and stays when it is often.
struct Record { int64_t version; uint64_t groups; int64_t owner; int32_t users, changes; };
static const int32_t often = 64;
static int64_t group_changes[64];  // of objects that do not change often
static Record** records;  // by the addresses of objects, each at the first free place from its own on
static uint64_t places, in_use;
static int64_t interpreter;
static uint64_t place_of(int64_t owner) { return ((uint64_t)owner >> 4) * 0x9E3779B97F4A7C15u >> 20; }
static uint64_t find_record(int64_t owner) {
    uint64_t at = place_of(owner) & (places - 1);
    while (records[at] && records[at]->owner != owner) at = (at + 1) & (places - 1);
    return at;
}
static void note_change(void* owner) {
    Record* found = places ? records[find_record((int64_t)owner)] : nullptr;
    if (!found) return;
    ++found->version;
    if (found->changes >= often) return;  // who watches it looks at its version
    ++found->changes;
    for (uint64_t left = found->groups; left; left &= left - 1) ++group_changes[__builtin_ctzll(left)];
}
static int dict_changes(int, void* dict, void*, void*) {
    note_change(dict);
    return 0;
}
static int function_changes(int event, void* function, void*) {
    if (event > 1) note_change(function);  // 0 and 1: one is made, or dies
    return 0;
}
static bool grow_records() {
    uint64_t wanted = places ? 2 * places : 1024, before = places;
    Record** made = (Record**)calloc(wanted, sizeof(Record*));
    if (!made) return false;
    Record** old = records;
    records = made;
    places = wanted;
    for (uint64_t i = 0; i < before; ++i)
        if (old[i]) records[find_record(old[i]->owner)] = old[i];
    free(old);
    return true;
}
// Whether this interpreter's objects may be watched: one interpreter's of the process.
static int64_t begin_watching(int64_t here) {
    if (!interpreter) interpreter = here;
    return interpreter == here;
}
// Where the record of the object is, for one more user in this group; 0: there is no memory for it.
static int64_t watch_object(int64_t owner, int64_t group) {
    if (2 * in_use >= places && !grow_records()) return 0;
    uint64_t at = find_record(owner);
    if (!records[at]) {
        Record* made = (Record*)calloc(1, sizeof(Record));
        if (!made) return 0;
        made->owner = owner;
        records[at] = made;
        ++in_use;
    }
    records[at]->groups |= (uint64_t)1 << group;
    ++records[at]->users;
    return (int64_t)records[at];
}
// One user less; whether it was the last, and the object is watched no more.
static int64_t forget_object(int64_t address) {
    Record* found = (Record*)address;
    if (--found->users) return 0;
    uint64_t gap = find_record(found->owner);
    for (uint64_t at = (gap + 1) & (places - 1); records[at]; at = (at + 1) & (places - 1)) {
        uint64_t own = place_of(records[at]->owner) & (places - 1);
        if (((at - own) & (places - 1)) < ((at - gap) & (places - 1))) continue;  // found from its own place on
        records[gap] = records[at];
        gap = at;
    }
    records[gap] = nullptr;
    --in_use;
    free(found);
    return 1;
}

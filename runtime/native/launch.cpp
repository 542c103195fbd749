// Launches one variant of a Triton kernel: the C++ of `runtime/native/launch.py`, which describes it (`Variant`).
//
// It calls the driver and Python's C functions through addresses that it is given, and includes nothing of theirs.
#include <cstdint>
typedef void* object;
struct Variant {
    unsigned long long (*address)(object);
    long long (*integer)(object);
    double (*real)(object);
    object (*error)();
    void (*set_error)(object, const char*);
    object (*vectorcall)(object, object const*, uintptr_t, object);
    void* (*release_lock)();
    void (*take_lock)(void*);
    void (*retain)(object);
    int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
    int (*text)(int, const char**);
    object unaligned, zero, runtime_error;
    void* function;
    int64_t grid, xblock, threads, shared, pointers, fixed, scalars, sizes, moving;
    int64_t words[1];  // the fixed addresses, the sizes, whether each scalar is a float
};
static intptr_t place;

static object done(const Variant* v) {
    v->retain(v->zero);
    return v->zero;
}

static object launch(object self, object const* given, intptr_t count) {
    const Variant* v = (const Variant*)((char*)self + place);
    if (count != 1 + v->pointers + v->scalars + v->moving) {
        v->set_error(v->runtime_error, "torchlazy: internal error: a kernel got another number of arguments");
        return nullptr;
    }
    union { uint64_t word; double real; } values[128];
    void* parameters[130];
    int used = 0;
    object const* next = given + 1;
    uint64_t low = 0;
    for (int64_t i = 0; i < v->pointers; i++) {
        values[used].word = v->address(*next++);
        low |= values[used++].word;
    }
    if ((low & 15) && v->unaligned && !v->error()) return v->vectorcall(v->unaligned, given, (uintptr_t)count, nullptr);
    const int64_t* words = v->words;
    for (int64_t i = 0; i < v->fixed; i++) values[used++].word = (uint64_t)*words++;
    const int64_t* sizes = words;
    words += v->sizes;
    for (int64_t i = 0; i < v->scalars; i++) {
        if (*words++) values[used++].real = v->real(*next++);
        else values[used++].word = (uint64_t)v->integer(*next++);
    }
    for (int64_t i = 0; i < v->sizes; i++) values[used++].word = (uint64_t)*sizes++;
    int first = used;
    for (int64_t i = 0; i < v->moving; i++) values[used++].word = (uint64_t)v->integer(*next++);
    void* stream = (void*)v->address(given[0]);
    if (v->error()) return nullptr;
    int64_t grid = v->xblock ? ((int64_t)values[first].word + v->xblock - 1) / v->xblock : v->grid;
    if (!grid) return done(v);
    values[used].word = 0;  // scratch memory of the kernel and of a profiler: none
    for (int i = 0; i < used; i++) parameters[i] = &values[i];
    parameters[used] = parameters[used + 1] = &values[used];
    void* thread = v->release_lock();
    int status = v->launch(v->function, (unsigned)grid, 1, 1, (unsigned)v->threads, 1, 1, (unsigned)v->shared, stream,
                           parameters, nullptr);
    v->take_lock(thread);
    if (!status) return done(v);
    const char* text = nullptr;
    v->text(status, &text);
    v->set_error(v->runtime_error, text ? text : "CUDA: a kernel cannot be launched");
    return nullptr;
}

static struct { const char* name; void* function; int flags; const char* text; } method =
    {"launch", (void*)launch, 0x80, nullptr};

extern "C" void* kernel(int64_t inside_bytes) {
    place = (intptr_t)inside_bytes;
    return &method;
}

// The native recorder: one boxed fallback at one dispatch key, below autograd and Python's modes, above all kernels.
//
// What is seen for the first time runs at once, on the real tensors, and is logged. Where a known trace begins, operators
// are compared with its entries and deferred: results are tensors with geometry and no memory. At a cut the trace's
// program runs. A difference runs the deferred entries one by one, and the rest goes on at once.
//
// Invariant: whoever reads a value gets eager's. All that the recorder knows is guarded by `lock`; a thread that waits for
// it does not hold the interpreter's lock, and one that holds it may ask for the interpreter's.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/ScopeExit.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <bit>
#include <chrono>
#include <map>
#include <mutex>
#include <thread>

#include "deferred.h"
#include "device.h"
#include "known.h"
#include "log.h"
#include "memory.h"
#include "operators.h"
#include "program.h"
#include "readers.h"
#include "replayed_call.h"
#include "watched_calls.h"

namespace torchlazy {
namespace {

constexpr bool ABOVE_PYTHON = uint16_t(KEY) > uint16_t(DispatchKey::Python);  // of older versions of torch
const DispatchKeySet BELOW_KEY(DispatchKeySet::FULL_AFTER, KEY);
constexpr size_t MOST_ENTRIES = 20000;  // a longer one is cut
constexpr int PARTINGS = 2;             // so often traces part at one entry before they are cut there
constexpr size_t A_STEP = 512;          // so long a trace may be a training step: the first ones make an optimizer's state
constexpr int PARTINGS_OF_SIZES = 5;    // the same where they differ in sizes only, which one path may serve
constexpr size_t MOST_BRANCHES = 1 << 18;
constexpr int64_t RUNS_TOLD = 128;  // of a program for all sizes at one of them, which may get a program of its own
constexpr size_t MOST_SERVED = 1 << 12;  // sizes of one path, whose program is kept
constexpr int64_t FREE_LEARNING_NS = 8000000000, LEARNING_SHARE = 20;  // and then a twentieth of the time
// So many entries of traces that do not come again (and so many times the longest), more than of those that do, and
// operators run unrecorded for a while; then half as many are enough, and each rest is twice as long as the one before.
constexpr int64_t STRANGE = 1 << 12, STRANGE_TRACES = 16, SHORTEST_REST = 1 << 16, LONGEST_REST = 1 << 20;
constexpr int64_t LONG_NS = 100000;     // a short trace that takes so long may be worth a program
constexpr size_t MOST_KNOWN = 1 << 14;  // traces; those that came once go first
constexpr uint64_t FORGOTTEN = 4000;    // traces, after which the program of one that did not come goes
constexpr uint64_t LOOKS = 1024;        // traces from look to look at what is old
constexpr uint32_t SAMPLES = 3;         // sizes from which a path for all sizes is made
constexpr uint32_t MOST_ATTEMPTS = 4;   // so often it is made for one family
constexpr uint32_t HOT_SIZE = 8;        // a trace that came so often gets a program of its own
const std::string NOT_FASTER = "its program is not faster than its operators";
constexpr int MOST_POSTPONED = 20;
constexpr int64_t FIRST_LOOK = 12, LAST_LOOK = 60;  // runs after which a program that is much slower, or slower, is given up
constexpr size_t SURELY_REPETITION = 8192;  // entries of a log in which equal parts are taken for turns, though nothing comes again
constexpr size_t FIRST_REPETITION = 512, REPETITIONS = 4;  // entries after which they are looked for, and how many there must be
constexpr size_t WORTH_STAGES = 64;     // entries of a trace that may be launched in stages
constexpr int WAITS = 3;                // so often in a row the host waited for the device a tenth of the time: stages pay
constexpr int MOST_IN_VAIN = 4;         // stages that were launched for nothing
constexpr int MOST_MISSES = 4;          // so often a program may lack values before its trace is given up

int64_t now_ns() { return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// What this thread has worked.
int64_t cpu_ns() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

// Real operators below: nothing above the kernels takes part, whatever the program has switched on.
struct OnMemory {
  c10::InferenceMode inference{false};
  c10::impl::ForceDispatchKeyGuard keys{DispatchKeySet(DispatchKey::BackendSelect), excluded()};
  at::impl::TorchFunctionDisabledState function_state = at::impl::PythonTorchFunctionTLS::get_disabled_state();
  OnMemory() {
    ++busy;
    at::impl::PythonTorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  }
  ~OnMemory() {
    --busy;
    at::impl::PythonTorchFunctionTLS::set_disabled_state(function_state);
  }
  static DispatchKeySet excluded() {
    return c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
        DispatchKeySet({KEY, DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::PythonDispatcher,
                        DispatchKey::FuncTorchDynamicLayerFrontMode, DispatchKey::FuncTorchDynamicLayerBackMode});
  }
};

// Work goes to the stream that the trace's operators came on, whatever is current where it is cut.
struct OnStream {
  std::optional<c10::Stream> before;
  explicit OnStream(const std::optional<c10::Stream>& wanted) {
    if (!wanted) return;
    const c10::impl::VirtualGuardImpl cuda(wanted->device_type());
    if (cuda.getStream(wanted->device()) != *wanted) before = cuda.exchangeStream(*wanted);
  }
  ~OnStream() {
    if (before) c10::impl::VirtualGuardImpl(before->device_type()).exchangeStream(*before);
  }
};

// The current stream of the first tensor among the arguments that is on a GPU.
std::optional<c10::Stream> stream_of(const Stack& stack, uint32_t arguments) {
  static const bool any_gpu = at::globalContext().hasCUDA();
  if (!any_gpu) return {};
  for (size_t i = stack.size() - arguments; i < stack.size(); ++i) {
    const IValue& v = stack[i];
    const TensorImpl* t = nullptr;
    if (v.isTensor()) t = v.unsafeToTensorImpl();
    else if (v.isTensorList() && v.toTensorList().size()) t = v.toTensorList().get(0).unsafeGetTensorImpl();
    if (t && t != c10::UndefinedTensorImpl::singleton() && t->device_type() == c10::kCUDA)
      return c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(t->device());
  }
  return {};
}

// Where the generator of a GPU is: what it draws next depends on this alone.
struct Place {
  uint64_t seed, offset;
  bool operator==(const Place&) const = default;
};

Place place_of(at::Generator generator) {
  std::lock_guard<std::mutex> hold(generator.mutex());
  return {generator.current_seed(), generator.get_offset()};
}

void move_to(at::Generator generator, const Place& place) {
  std::lock_guard<std::mutex> hold(generator.mutex());
  if (generator.current_seed() != place.seed) generator.set_current_seed(place.seed);
  generator.set_offset(place.offset);
}

// A trace's random operators: they draw one behind the other from their device's generator, whenever they run.
struct Draws {
  std::optional<at::Generator> generator;
  Place begin, end;  // before the first, and behind the last
};

// Inside, the generator is where it was when the first of them was called.
struct AtDraws {
  const Draws& draws;
  std::optional<Place> before;
  explicit AtDraws(const Draws& draws) : draws(draws) {
    if (!draws.generator) return;
    before = place_of(*draws.generator);
    move_to(*draws.generator, draws.begin);
  }
  ~AtDraws() {
    if (before) move_to(*draws.generator, *before);
  }
};

// Python is called in the midst of a trace: no finalizer of a cycle may compute there, with what waits for its value.
struct InPython {
  py::gil_scoped_acquire gil;
  const int was_on = PyGC_Disable();
  ~InPython() {
    if (was_on) PyGC_Enable();
  }
};

struct Counts {
  int64_t logged = 0, deferred = 0, at_once = 0, views = 0, cuts = 0, programs = 0, entries_run = 0, partings = 0, reads = 0, rested = 0;
};

template <class F>
void each_tensor(const IValue& value, const F& f) {
  if (value.isTensor()) {
    if (value.unsafeToTensorImpl() != c10::UndefinedTensorImpl::singleton()) f(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& t : value.toTensorVector())
      if (t.defined()) f(t);
  } else if (value.isList() && !value.isIntList() && !value.isDoubleList() && !value.isBoolList()) {
    for (const IValue& item : value.toListRef()) each_tensor(item, f);
  }
}

std::atomic<int> blocks{0};  // threads whose operators are recorded

// Asked before a value is read, in all threads; it may raise. None: nobody watches.
py::object* gate = nullptr;
std::atomic<bool> has_gate{false};

template <class F>
void ask_gate(const F& cause) {
  if (!has_gate.load(std::memory_order_relaxed)) return;
  py::gil_scoped_acquire gil;
  if (const py::object asked = *gate; !asked.is_none()) asked(cause());
}

bool makes_meta(const Operator& op, const Stack& stack) {  // it reads no values
  if (op.device < 0) return false;
  const IValue& device = stack[stack.size() - op.arguments + op.device];
  return device.isDevice() && device.toDevice().is_meta();
}

// Whether it gives values to tensors whose operators do not come here: they cannot wait for them.
bool gives_to_others(const Operator& op, const Stack& stack) {
  if (makes_meta(op, stack)) return false;
  if (!marks && op.kind != Kind::FREE) return true;
  bool found = false;
  for (uint32_t a = 0; op.writes >> a; ++a)
    if (op.writes >> a & 1) each_tensor(stack[stack.size() - op.arguments + a], [&](const at::Tensor& t) { found |= !is_marked(t); });
  return found;
}

class Recorder {
 public:
  std::recursive_mutex lock;
  Counts counts;
  std::map<std::string, int64_t> causes;   // of cuts
  std::map<std::string, int64_t> at_once;  // operators that made one, with the reason
  py::object* hooks = nullptr;
  Operators operators;
  std::unordered_map<uint64_t, Known> known;
  std::unordered_map<uint64_t, Family> families;  // by skeleton
  Cuts cut_points;
  bool compares_times = true;  // false: nothing depends on how long it takes
  size_t least_entries = 8;  // a shorter trace is not worth a program, if its operators take little time

  void operator_comes(const c10::OperatorHandle& handle, DispatchKeySet keys, Stack* stack);
  void cut(const std::string& cause);
  void compute_for(StorageImpl* storage);
  void forget();
  void forget_origin(const StorageImpl* storage) { origins_.forget(storage); }
  bool varies_in_planned_sizes() const { return planned_sizes_.size() >= SAMPLES; }
  bool reads_pending() const { return pending_memories.load() != 0; }
  bool is_pending(const at::Tensor& t) {
    auto* m = memories_.find(storage_of(t.unsafeGetTensorImpl()));
    return m && m->pending;
  }

 private:
  enum class State : uint8_t { START, LOGS, FOLLOWS } state_ = State::START;
  Memories memories_;
  Origins origins_;
  Log log_;  // of the running trace; while a path is followed only its floats
  std::vector<uint64_t> words_;
  Paths paths_{&Path::hashes}, size_paths_{&Path::skeletons};
  Path* path_ = nullptr;
  Bound bound_;  // of a path with sizes
  size_t position_ = 0;
  uint64_t hash_ = 0, skeleton_ = 0;  // of what came
  int64_t begun_ns_ = 0;
  bool is_odd_ = false;  // nothing is learned from this trace
  uint64_t begin_hash_ = 0;
  size_t look_at_ = 0, cut_at_ = 0;  // entries after which the log is looked at for repetitions, and is cut (0: not known)
  std::optional<c10::Stream> stream_;  // of the running trace's operators on a GPU
  Draws draws_;
  size_t launched_ = 0;          // stages of the followed path's program that run already
  bool may_launch_ = true;       // more of them, in this trace
  std::optional<Place> drawn_;   // where the generator is after them
  std::atomic<int64_t> waited_ns_{0};  // in operators that run at once and between traces: for the device, maybe
  int64_t waits_since_ns_ = 0;
  int64_t ended_ns_ = 0;         // the last trace
  int waits_ = 0;                // long traces in a row of whose time much was waiting
  std::unordered_map<uint64_t, uint64_t> draws_at_;  // by operator and sizes
  bool is_cutting_ = false;
  int64_t learning_ns_ = 0, first_ns_ = 0;
  int64_t strange_ = 0, longest_strange_ = 0, rest_ = 0, rest_left_ = 0;
  bool rests_ = false;  // what comes runs, and is not logged, up to a cut
  uint64_t trace_number_ = 0;
  std::unordered_set<uint64_t> planned_sizes_;  // of operators that build something for each size
  struct Branch {
    uint64_t next, next_skeleton;
    int partings, partings_of_sizes;
  };
  struct Parting {  // of this trace from another one
    uint64_t at;  // the hash of what came before
    size_t entries;
    bool of_sizes;
  };
  std::vector<Parting> partings_;
  std::unordered_map<uint64_t, Branch> branches_;  // by the hash of what came before: what came next

  static void below(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    c10::impl::ExcludeDispatchKeyGuard guard{DispatchKeySet(KEY)};
    op.redispatchBoxed(keys & BELOW_KEY, stack);
  }
  void run_now(Operator& op, DispatchKeySet keys, Stack* stack);
  void run_timed(Operator& op, DispatchKeySet keys, Stack* stack);
  void find_stages(Path& path);
  void launch_ahead();
  void leave_stages();
  Draws draws_left() const { return {draws_.generator, drawn_.value_or(draws_.begin), draws_.end}; }
  at::Tensor memory_of(const Input& in);
  void run_at_once(Operator& op, DispatchKeySet keys, Stack* stack, const char* reason);
  void run_view(Operator& op, DispatchKeySet keys, Stack* stack);
  void run_free(Operator& op, DispatchKeySet keys, Stack* stack);
  bool reads_known(Stack* stack);
  std::optional<ConstantRead> constant_read(const at::Tensor& t);
  void run_logged(Operator& op, DispatchKeySet keys, Stack* stack, size_t floats, std::unique_lock<std::recursive_mutex>& held, const std::optional<at::Generator>& generator);
  void record(Operator& op, DispatchKeySet keys, Stack* stack, std::unique_lock<std::recursive_mutex>& held, bool draws = false);
  void dropout(Operator& op, DispatchKeySet keys, Stack* stack, std::unique_lock<std::recursive_mutex>& held);
  bool follow(Operator& op, Stack* stack, size_t floats, const std::optional<at::Generator>& generator);
  bool matches(const Path& path, size_t at, const Operator& op, size_t floats, Bound& bound) const;
  bool has_come(const Path& path, Bound& bound) const;
  bool has_constants_of(const Path& path) const;
  Path* another_path(const Operator& op, size_t floats);
  Path* path_that_ends_here();
  void take_path(Path* path, Bound&& bound);
  void log_what_came();
  uint64_t draws_at(Operator& op, const Stack& stack, at::Generator generator);
  const Log& followed() const { return path_->sizes ? log_ : path_->log; }
  void defer(Operator& op, const Entry& entry, Stack* stack, size_t floats, uint64_t draws);
  at::Tensor deferred_result(const Geometry& g);
  void mark_written(Operator& op, Stack* stack, bool pending);
  bool is_on_host(const Operator& op, const Stack& stack);
  void draw(const at::Generator& generator, const Place& before, const Place& after) {
    if (!draws_.generator) draws_ = {generator, before, before};
    draws_.end = after;
  }
  void begin();
  void stop_following();
  void run_entries(const Path& path, size_t n);
  void place(uint32_t number, const at::Tensor& value, std::vector<c10::intrusive_ptr<StorageImpl>>* env);
  void all_are_there();
  std::vector<uint32_t> alive();
  uint64_t bytes();  // of all memory that the running trace has met
  void finish_path();
  void set_native(Path::Run& run, const py::object& given, size_t scalars);
  Path::Run* at_these_sizes(Path& path);
  bool run_program(Path& path);
  void finish_log();
  void learn(Known& known, const std::vector<uint32_t>& wanted);
  bool may_learn();
  void count_trace(int64_t entries, bool is_strange, bool is_awaited = false);
  void note_sizes(bool is_new);
  std::shared_ptr<Sample> sample();
  void adopt(Known& known, const py::tuple& plan, Log&& log, const std::vector<Sample::Fact>& memories);
  void retire(Known& known, const std::string& reason);
  bool is_final(Path& path);
  void forget_old();
  void part_at(uint64_t hash, size_t entries);
  void part_here();
  void note_branch(uint64_t before);
  void count_partings();
  bool is_turn(size_t period);
  void look_for_repetition();
  void start_over();
};

py::dict dump(const Sample& sample, int64_t only);
std::unique_ptr<Sizes> sizes_of(const Log& log, const py::dict& given);

Recorder* recorder = new Recorder();  // never freed: tensors may outlive everything

// The recorder's lock, waited for without the interpreter's.
std::unique_lock<std::recursive_mutex> acquire() {
  std::unique_lock<std::recursive_mutex> hold(recorder->lock, std::try_to_lock);
  if (!hold.owns_lock()) {
    if (PyGILState_Check()) {
      py::gil_scoped_release release;
      hold.lock();
    } else {
      hold.lock();
    }
  }
  return hold;
}

// ------------------------------------------------------------------------------------------ operators that run at once

void Recorder::run_now(Operator& op, DispatchKeySet keys, Stack* stack) {
  {
    ++busy;
    auto done = c10::make_scope_exit([] { --busy; });
    below(op.handle, keys, stack);
  }
  for (uint32_t r = 0; r < op.returns; ++r)
    if (op.returned_argument[r] < 0 && !(op.has_host_lengths && r)) each_tensor((*stack)[stack->size() - op.returns + r], made);
    else each_tensor((*stack)[stack->size() - op.returns + r], watch);
}

// The same of an operator that may wait for the device.
void Recorder::run_timed(Operator& op, DispatchKeySet keys, Stack* stack) {
  const int64_t begun = now_ns();
  run_now(op, keys, stack);
  waited_ns_ += now_ns() - begun;
}

// Factories, and what reads no values.
void Recorder::run_free(Operator& op, DispatchKeySet keys, Stack* stack) {
  uint64_t origin = reinterpret_cast<uint64_t>(&op);
  if (op.is_constant) {
    std::vector<uint64_t> words;
    std::vector<double> floats;
    Writer writer{words, floats, nullptr, false};
    for (size_t i = stack->size() - op.arguments; i < stack->size(); ++i) writer.value((*stack)[i]);
    for (uint64_t w : words) origin = mixed(origin, w);
    for (double f : floats) origin = mixed(origin, std::bit_cast<uint64_t>(f));
    if (writer.why_not) origin = 0;
  }
  run_now(op, keys, stack);
  if (!op.is_constant || !origin) return;
  const IValue& made = stack->back();
  auto* storage = made.isTensor() ? storage_of(made.unsafeToTensorImpl()) : nullptr;
  if (!storage || why_other(made.unsafeToTensorImpl())) return;
  auto hold = acquire();
  origins_.add(storage, origin);
}

// Whether the number follows from what factories made, in this trace: such a read cuts nothing.
std::optional<ConstantRead> Recorder::constant_read(const at::Tensor& t) {
  auto* storage = storage_of(t.unsafeGetTensorImpl());
  const uint32_t* number = storage ? memories_.number_of(storage) : nullptr;
  if (!number || state_ != State::LOGS || is_odd_) return {};
  ConstantRead read{uint32_t(log_.entries.size()), *number, t.storage_offset(), t.scalar_type(), {}, {}, {}};
  enum : uint8_t { NO, YES, FILLED };  // whether the number depends on what memory held before this entry
  std::vector<uint8_t> needed(memories_.size(), NO);
  bool is_known = true;
  const auto need = [&](uint32_t n) {
    const Memory& m = memories_[n];
    if (needed[n] != NO) return;
    needed[n] = YES;
    is_known &= m.made || m.written || m.origin;
  };
  need(*number);
  for (size_t e = log_.entries.size(); is_known && e-- > 0;) {
    const Entry& entry = log_.entries[e];
    const uint64_t* p = log_.words.data() + entry.begin;
    std::vector<uint32_t> others;
    bool gives = false;
    const auto no_number = [](NumberKind, const uint64_t*) {};
    for (uint32_t a = 0; p < log_.words.data() + entry.end; ++a) {
      const bool is_argument = p < log_.words.data() + entry.results, is_given = !is_argument || (entry.op->writes >> a & 1);
      p = walk(p, true, no_number, [&](const uint64_t* w) {
        if (tag_of(*w) != TENSOR) return;
        const uint32_t n = TensorWord{*w}.number();
        if (is_given && needed[n] == YES) gives = true;
        if (is_argument) others.push_back(n);
      });
    }
    if (!gives) continue;
    is_known &= !entry.draws;
    for (uint32_t f = entry.floats; f < entry.floats_end; ++f) read.floats.emplace_back(f, log_.floats[f]);
    if (entry.op->fills) {
      const uint64_t* first = log_.words.data() + entry.begin;
      const Geometry g = read_tensor(first);
      int64_t elements = 1;
      bool is_whole = !g.offset;
      for (size_t d = g.sizes.size(); d-- > 0; elements *= g.sizes[d]) is_whole &= g.sizes[d] == 1 || g.strides[d] == elements;
      if (is_whole && elements * int64_t(c10::elementSize(g.dtype)) == int64_t(memories_[g.number].bytes)) needed[g.number] = FILLED;
      others.erase(others.begin());
    }
    for (uint32_t n : others) need(n);
  }
  for (uint32_t n = 0; n < needed.size(); ++n)
    if (needed[n] == YES && !memories_[n].made) {
      is_known &= memories_[n].origin != 0;
      read.origins.emplace_back(n, memories_[n].origin);
    }
  if (!is_known) return {};
  return read;
}

// A read of what is deferred, whose number the known trace has.
bool Recorder::reads_known(Stack* stack) {
  if (state_ != State::FOLLOWS || path_->sizes || path_->log.reads.empty()) return false;
  const at::Tensor t = stack->back().toTensor();
  auto* storage = storage_of(t.unsafeGetTensorImpl());
  const uint32_t* number = storage ? memories_.number_of(storage) : nullptr;
  if (!number) return false;
  for (const ConstantRead& read : path_->log.reads) {
    if (read.before != position_ || read.number != *number || read.offset != t.storage_offset() || read.dtype != t.scalar_type()) continue;
    for (auto [n, origin] : read.origins)
      if (memories_[n].origin != origin) return false;
    for (auto [f, value] : read.floats)
      if (std::memcmp(&log_.floats[f], &value, 8)) return false;
    stack->back() = read.value;
    return true;
  }
  return false;
}

void Recorder::run_at_once(Operator& op, DispatchKeySet keys, Stack* stack, const char* reason) {
  const auto cause = [&] {
    const auto name = toString(op.handle.operator_name());
    if (name == "aten::_local_scalar_dense") return std::string("item");
    return leaves && name == "aten::_to_copy" ? std::string("cpu") : name.substr(name.find("::") + 2) + ": " + reason;
  };
  std::optional<ConstantRead> constant;
  if (op.is_read) {
    auto hold = acquire();
    if (reads_known(stack)) return;
    constant = constant_read(stack->back().toTensor());
  }
  if (!constant) ask_gate(cause);
  {
    auto hold = acquire();
    bool touches = false;
    for (uint32_t a = 0; a < op.arguments; ++a) {
      const IValue& value = (*stack)[stack->size() - op.arguments + a];
      if (value.isStorage())
        if (auto* m = memories_.find(value.toStorage().unsafeGetStorageImpl())) touches |= m->made || m->written;
      each_tensor(value, [&](const at::Tensor& t) {
        if (auto* storage = storage_of(t.unsafeGetTensorImpl())) {
          if (auto* m = memories_.find(storage)) touches |= m->made || m->written || (op.writes >> a & 1);
          if (op.writes >> a & 1) origins_.forget(storage);
        }
      });
    }
    ++counts.at_once;
    if (touches && !constant) {
      ++at_once[toString(op.handle.operator_name()) + ": " + reason];
      cut(cause());
    }
  }
  const uint64_t trace = trace_number_;
  run_timed(op, keys, stack);
  if (!constant) return;
  auto hold = acquire();
  if (trace != trace_number_ || constant->before != log_.entries.size()) return;  // another thread was faster
  constant->value = stack->back();
  log_.reads.push_back(std::move(*constant));
}

void Recorder::run_view(Operator& op, DispatchKeySet keys, Stack* stack) {
  auto hold = acquire();
  ++counts.views;
  if (state_ == State::START || (state_ == State::FOLLOWS && !path_->sizes) || is_odd_) {
    hold.unlock();
    return run_now(op, keys, stack);
  }
  // Logged for whoever turns the log into a graph: nothing is compared with it.
  const uint32_t begin = log_.view_words.size(), floats = log_.view_floats.size();
  Writer writer{log_.view_words, log_.view_floats, nullptr, false};
  StorageImpl* storage = nullptr;
  for (size_t i = stack->size() - op.arguments; i < stack->size(); ++i) {
    if (!storage && (*stack)[i].isTensor()) storage = storage_of((*stack)[i].unsafeToTensorImpl());
    writer.value((*stack)[i]);
  }
  const uint32_t results = log_.view_words.size();
  const uint32_t* number = storage ? memories_.number_of(storage) : nullptr;
  const int64_t known = number ? *number : -1;
  c10::weak_intrusive_ptr<StorageImpl> weak(storage && !number ? c10::intrusive_ptr<StorageImpl>::reclaim_copy(storage) : nullptr);
  run_now(op, keys, stack);
  for (size_t i = stack->size() - op.returns; i < stack->size(); ++i) writer.value((*stack)[i], true);
  if (writer.why_not || !storage) {
    log_.view_words.resize(begin), log_.view_floats.resize(floats);
    return;
  }
  log_.views.push_back({&op, uint32_t(log_.entries.size()), begin, results, uint32_t(log_.view_words.size()), floats, known, std::move(weak)});
}

// Only 0-dimensional tensors in memory that the trace has not met: an optimizer's step counts. The host needs them soon.
bool Recorder::is_on_host(const Operator& op, const Stack& stack) {
  bool any = false, host = true;
  for (size_t i = stack.size() - op.arguments; host && i < stack.size(); ++i) {
    const IValue& v = stack[i];
    if (v.isTensor()) {
      auto* t = v.unsafeToTensorImpl();
      if (t == c10::UndefinedTensorImpl::singleton()) continue;
      if (t->dim() != 0) return false;
      if (t->is_wrapped_number()) continue;
      any = true;
      host = t->device_type() == c10::kCPU && !t->requires_grad() && t->unsafe_storage() && !memories_.find(storage_of(t));
    } else if (v.isTensorList()) {
      each_tensor(v, [&](const at::Tensor& x) {
        auto* t = x.unsafeGetTensorImpl();
        any = true;
        host = host && t->dim() == 0 && t->device_type() == c10::kCPU && !t->requires_grad() && t->unsafe_storage() && !memories_.find(storage_of(t));
      });
    }
  }
  return any && host;
}

// ------------------------------------------------------------------------------------------ the fallback

void Recorder::operator_comes(const c10::OperatorHandle& handle, DispatchKeySet keys, Stack* stack) {
  if (busy || at::in_parallel_region()) return below(handle, keys, stack);  // a kernel's own, perhaps in a thread of its
  auto hold = acquire();
  Operator& op = operators[handle];
  if (op.kind == Kind::COMPOSITE) {
    hold.unlock();
    if (keys.has(DispatchKey::NestedTensor)) return run_at_once(op, keys, stack, "a nested tensor");
    return handle.callBoxedForDispatchKey(op.moves ? DispatchKey::AutogradCPU : DispatchKey::CompositeImplicitAutograd, *stack);
  }
  const Marking marking(op, *stack);
  if (marking.moves_to_lazy) {
    hold.unlock();
    return run_at_once(op, keys, stack, "to lazy");
  }
  if (any_marked && !c10::impl::tls_is_dispatch_key_included(KEY) && op.kind != Kind::AT_ONCE && gives_to_others(op, *stack)) {
    hold.unlock();
    return run_at_once(op, keys, stack, "its result is not on the lazy device");
  }
  if (ABOVE_PYTHON && op.kind != Kind::FREE && c10::impl::TorchDispatchModeTLS::any_modes_set()) {
    hold.unlock();
    return run_at_once(op, keys, stack, "another mode sees it");
  }
  if (rests_ && state_ == State::START && op.kind != Kind::AT_ONCE) {
    ++counts.rested;
    if (--rest_left_ < -rest_) rests_ = false;  // no cut comes
    hold.unlock();
    return run_now(op, keys, stack);
  }
  switch (op.kind) {
    case Kind::COMPOSITE: break;  // above
    case Kind::FREE: hold.unlock(); return run_free(op, keys, stack);
    case Kind::VIEW: return run_view(op, keys, stack);
    case Kind::AT_ONCE: hold.unlock(); return run_at_once(op, keys, stack, op.reason.c_str());
    case Kind::DROPOUT: return dropout(op, keys, stack, hold);
    case Kind::ENTRY: return record(op, keys, stack, hold);
  }
}

// On a GPU an entry as it is. On a CPU the mask is drawn at once, as F.dropout has it, and the entry is the product.
void Recorder::dropout(Operator& op, DispatchKeySet keys, Stack* stack, std::unique_lock<std::recursive_mutex>& hold) {
  const size_t n = stack->size();
  const at::Tensor x = (*stack)[n - 3].toTensor();
  const double p = (*stack)[n - 2].toDouble();
  if (p <= 0 || p >= 1 || ((*stack)[n - 1].isBool() && !(*stack)[n - 1].toBool())) {
    hold.unlock();
    return run_at_once(op, keys, stack, "random");
  }
  if (x.is_cuda()) return record(op, keys, stack, hold, true);
  hold.unlock();
  torch::jit::drop(*stack, 3);
  at::Tensor mask;
  {
    OnMemory guard;  // the numbers depend on how x lies in memory, not on its values
    mask = std::get<1>(at::native_dropout(at::empty_strided(x.sizes(), x.strides(), x.options()), p, true));
    made(mask);
  }
  hold = acquire();
  static const auto product = c10::Dispatcher::singleton().findSchemaOrThrow("aten::native_dropout_backward", "");
  torch::jit::push(*stack, x, mask, 1. / (1. - p));
  record(operators[product], keys, stack, hold);
  torch::jit::push(*stack, std::move(mask));
}

void Recorder::record(Operator& op, DispatchKeySet keys, Stack* stack, std::unique_lock<std::recursive_mutex>& hold, bool draws) {
  if (op.dropout >= 0 && (*stack)[stack->size() - op.arguments + op.dropout].toDouble() != 0) {
    draws = (*stack)[stack->size() - op.arguments].toTensor().is_cuda();
    if (!draws) {
      hold.unlock();
      return run_at_once(op, keys, stack, "random");
    }
  }
  if (makes_meta(op, *stack) || is_on_host(op, *stack)) {
    hold.unlock();
    return run_timed(op, keys, stack);
  }
  if (op.gradients >= 0) (*stack)[stack->size() - op.arguments + op.gradients] = at::GradMode::is_enabled();
  if (op.plans_sizes && !varies_in_planned_sizes()) {
    uint64_t sizes = 0;
    for (int64_t size : (*stack)[stack->size() - op.arguments].toTensor().sizes()) sizes = mixed(sizes, size);
    planned_sizes_.insert(sizes);
  }
  const auto stream = stream_of(*stack, op.arguments);
  if (stream && stream_ && *stream != *stream_) cut("another stream");
  std::optional<at::Generator> generator;
  if (draws) {
    generator = at::globalContext().defaultGenerator(stream->device());
    if (draws_.generator && !(*generator == *draws_.generator && place_of(*generator) == draws_.end)) cut("another state of the generator");
  }
  for (bool again = true; again;) {
    again = false;
    if (state_ == State::START) begin();
    if (stream) stream_ = stream;
    words_.clear();
    const size_t floats = log_.floats.size(), met = memories_.size();
    Writer writer{words_, log_.floats, &memories_, state_ != State::LOGS && !(paths_.empty() && size_paths_.empty())};
    for (size_t i = stack->size() - op.arguments; i < stack->size(); ++i) writer.value((*stack)[i]);
    if (writer.why_not) {
      log_.floats.resize(floats);
      hold.unlock();
      return run_at_once(op, keys, stack, writer.why_not);
    }
    if (Origins::any)
      for (size_t n = met; n < memories_.size(); ++n)
        if (auto storage = memories_[n].weak.lock()) memories_[n].origin = origins_.of(storage.get());
    if (state_ == State::LOGS) return run_logged(op, keys, stack, floats, hold, generator);
    if (follow(op, stack, floats, generator)) return;
    if (state_ == State::FOLLOWS && position_ == path_->size()) {  // the known trace is whole: its program runs
      part_here();
      cut("end of a known trace");
      again = true;
      continue;
    }
    const auto current = std::vector<double>(log_.floats.begin() + floats, log_.floats.end());
    if (state_ == State::FOLLOWS) {
      ++counts.partings;
      const auto skeleton = hash_skeleton(skeleton_, &op, c10::InferenceMode::is_enabled(), words_.data(), words_.size());
      if (skeleton != path_->skeletons[position_ + 1]) partings_.push_back({path_->sizes ? skeleton_ : hash_, position_, false});
      stop_following();
    }
    for (Memory& m : memories_) m.held.reset();
    state_ = State::LOGS;
    log_.floats.resize(floats);
    log_.floats.insert(log_.floats.end(), current.begin(), current.end());
    return run_logged(op, keys, stack, floats, hold, generator);
  }
}

void Recorder::begin() {
  begun_ns_ = now_ns();
  if (ended_ns_) waited_ns_ += begun_ns_ - ended_ns_;
  hash_ = mixed(uint64_t(c10::typeMetaToScalarType(at::get_default_dtype())), at::globalContext().deterministicAlgorithms());
  begin_hash_ = skeleton_ = hash_;
  position_ = 0, path_ = nullptr, is_odd_ = false;
  look_at_ = FIRST_REPETITION, cut_at_ = 0;
}

void Recorder::run_logged(Operator& op, DispatchKeySet keys, Stack* stack, size_t floats, std::unique_lock<std::recursive_mutex>& hold, const std::optional<at::Generator>& generator) {
  ++counts.logged;
  const bool inference = c10::InferenceMode::is_enabled();
  auto words = std::move(words_);  // of this entry: another thread may come while the kernel runs
  auto own_floats = std::vector<double>(log_.floats.begin() + floats, log_.floats.end());
  log_.floats.resize(floats);
  mark_written(op, stack, false);
  const uint64_t trace = trace_number_;
  const uint32_t met = memories_.size(), entries = log_.entries.size();
  hold.unlock();
  at::Tensor first;  // of a written list, whose versions the kernel raises itself
  uint32_t version = 0;
  if (op.writes) {
    const IValue& v = (*stack)[stack->size() - op.arguments + __builtin_ctzll(op.writes)];
    if (v.isTensorList() && v.toTensorList().size()) first = v.toTensorList().get(0);
    if (first.defined() && !first.is_inference()) version = first._version();
  }
  std::optional<Place> before_draw;
  if (generator) before_draw = place_of(*generator);
  try {
    ++busy;
    auto done = c10::make_scope_exit([] { --busy; });
    below(op.handle, keys, stack);
  } catch (...) {
    hold = acquire();
    is_odd_ = true;
    throw;
  }
  hold = acquire();
  if (first.defined() && !first.is_inference()) op.bumps = first._version() != version;  // each tensor's once; several may share a counter
  if (trace != trace_number_) return;                      // another thread has cut: the results are inputs of what comes
  // Threads record side by side: no such trace comes again.
  if (log_.entries.size() != entries || memories_.size() != met) is_odd_ = true;
  const uint32_t begin = log_.words.size(), float_begin = log_.floats.size();
  log_.words.insert(log_.words.end(), words.begin(), words.end());
  log_.floats.insert(log_.floats.end(), own_floats.begin(), own_floats.end());
  const uint32_t results = log_.words.size();
  Writer writer{log_.words, log_.floats, &memories_, false};
  for (uint32_t r = 0; r < op.returns; ++r) {
    IValue& v = (*stack)[stack->size() - op.returns + r];
    each_tensor(v, watch);
    if (op.returned_argument[r] >= 0) continue;
    each_tensor(v, made);
    const uint32_t before = memories_.size();
    if (v.isTensor() && v.toTensor().defined()) {  // memory of an argument, which the schema does not declare?
      const uint32_t* number = memories_.number_of(storage_of(v.unsafeToTensorImpl()));
      if (number && *number < before) op.kind = Kind::VIEW, is_odd_ = true;
    }
    writer.value(v, true);
  }
  if (writer.why_not) op.kind = Kind::AT_ONCE, op.reason = writer.why_not, is_odd_ = true;
  log_.entries.push_back({&op, begin, results, uint32_t(log_.words.size()), float_begin, uint32_t(log_.floats.size()), met, inference});
  if (generator) {
    draw(*generator, *before_draw, place_of(*generator));
    log_.entries.back().draws = draws_.end.offset - before_draw->offset;
  }
  const uint64_t before = hash_;
  hash_ = hash_entry(hash_, &op, inference, log_.words.data() + begin, results - begin);
  skeleton_ = hash_skeleton(skeleton_, &op, inference, log_.words.data() + begin, results - begin);
  note_branch(before);
  words_ = std::move(words);
  if (cut_points.at(hash_) || cut_points.at(skeleton_)) cut("known traces part here");
  else if (log_.entries.size() >= MOST_ENTRIES) cut("trace length limit");
  else if (log_.entries.size() == cut_at_) cut("operators repeat");
  else if (log_.entries.size() == look_at_ && !cut_at_) look_for_repetition();
}

void Recorder::mark_written(Operator& op, Stack* stack, bool pending) {
  for (uint32_t a = 0; op.writes >> a; ++a)
    if (op.writes >> a & 1) {
      IValue& v = (*stack)[stack->size() - op.arguments + a];
      each_tensor(v, [&](const at::Tensor& t) {
        auto* storage = storage_of(t.unsafeGetTensorImpl());
        origins_.forget(storage);
        Memory* m = memories_.find(storage);
        if (!m) return;
        m->written = true;
        watch(t);
        if (!pending) return;
        if (v.isTensorList() && !t.is_inference())
          for (int i = 0; i < op.bumps; ++i) t.unsafeGetTensorImpl()->bump_version();
        if (!m->pending) m->pending = true, ++pending_memories, forbid_access(storage);
      });
    }
}

// ------------------------------------------------------------------------------------------ following

bool Recorder::matches(const Path& path, size_t at, const Operator& op, size_t floats, Bound& bound) const {
  if (at >= path.size()) return false;
  const Entry& e = path.log.entries[at];
  if (e.op != &op || e.results - e.begin != words_.size() || e.inference != c10::InferenceMode::is_enabled() || e.met != memories_.size()) return false;
  if (path.sizes ? !path.sizes->fits(path.log, e, words_, bound)
                 : std::memcmp(path.log.words.data() + e.begin, words_.data(), 8 * words_.size())) return false;
  if (log_.floats.size() - floats != e.floats_end - e.floats) return false;
  for (uint32_t i = e.floats; i < e.floats_end; ++i)
    if (path.fixed[i] && std::memcmp(&path.log.floats[i], &log_.floats[floats + i - e.floats], 8)) return false;
  return true;
}

// Whether the numbers that came so far are those that the path's program has as constants: hashes are without them.
bool Recorder::has_constants_of(const Path& path) const {
  const uint32_t n = position_ ? path.log.entries[position_ - 1].floats_end : 0;
  for (uint32_t i = 0; i < n; ++i)
    if (path.fixed[i] && std::memcmp(&path.log.floats[i], &log_.floats[i], 8)) return false;
  return true;
}

// Whether what has been followed so far fits a path with sizes; its symbols become known.
bool Recorder::has_come(const Path& path, Bound& bound) const {
  if (!has_constants_of(path)) return false;
  std::vector<uint64_t> words;
  for (size_t e = 0; e < position_; ++e) {
    const Log& log = followed();
    const Entry& entry = log.entries[e];
    words.assign(log.words.begin() + entry.begin, log.words.begin() + entry.results);
    if (!path.sizes->fits(path.log, path.log.entries[e], words, bound)) return false;
  }
  return true;
}

// A path on which the trace goes on with this operator, where the one that was followed does not have it.
Path* Recorder::another_path(const Operator& op, size_t floats) {
  Bound bound;
  for (Path* candidate : paths_.after(hash_))
    if (position_ < candidate->size() && candidate->hashes[position_] == hash_ && has_constants_of(*candidate) && matches(*candidate, position_, op, floats, bound)) {
      take_path(candidate, {});
      return candidate;
    }
  for (Path* candidate : size_paths_.after(skeleton_)) {
    bound = {};
    if (position_ < candidate->size() && candidate->skeletons[position_] == skeleton_ && has_come(*candidate, bound) && matches(*candidate, position_, op, floats, bound)) {
      take_path(candidate, std::move(bound));
      return candidate;
    }
  }
  return nullptr;
}

Path* Recorder::path_that_ends_here() {
  for (Path* candidate : paths_.after(hash_))
    if (candidate->size() == position_ && has_constants_of(*candidate)) {
      take_path(candidate, {});
      return candidate;
    }
  for (Path* candidate : size_paths_.after(skeleton_))
    if (Bound bound; candidate->size() == position_ && has_come(*candidate, bound)) {
      take_path(candidate, std::move(bound));
      return candidate;
    }
  return nullptr;
}

// On a path with sizes the log has what came; on another the path has it.
void Recorder::log_what_came() {
  const Log& from = path_->log;
  const Entry* last = position_ ? &from.entries[position_ - 1] : nullptr;
  log_.entries.assign(from.entries.begin(), from.entries.begin() + position_);
  log_.words.assign(from.words.begin(), from.words.begin() + (last ? last->end : 0));
  log_.views.clear(), log_.view_words = from.view_words, log_.view_floats = from.view_floats;
  for (const View& v : from.views)
    if (v.before <= position_) log_.views.push_back(v);
  log_.reads.clear();
  for (const ConstantRead& read : from.reads)
    if (read.before <= position_) log_.reads.push_back(read);
}

void Recorder::take_path(Path* path, Bound&& bound) {
  if (path_ && path->sizes && !path_->sizes) log_what_came();
  leave_stages();
  path_ = path, bound_ = std::move(bound), state_ = State::FOLLOWS;
}

// By how much an operator moves the generator for tensors of these sizes: found out once, on memory without values.
uint64_t Recorder::draws_at(Operator& op, const Stack& stack, at::Generator generator) {
  uint64_t key = reinterpret_cast<uint64_t>(&op);
  const auto as = [&](const at::Tensor& t) {
    key = mixed(key, uint64_t(t.scalar_type()));
    for (int64_t size : t.sizes()) key = mixed(key, size);
    for (int64_t stride : t.strides()) key = mixed(key, stride);
  };
  for (size_t i = stack.size() - op.arguments; i < stack.size(); ++i) each_tensor(stack[i], as);
  auto [found, is_new] = draws_at_.try_emplace(key, 0);
  if (!is_new) return found->second;
  OnMemory guard;
  const Place before = place_of(generator);
  auto back = c10::make_scope_exit([&] { move_to(generator, before); });
  Stack other(stack.end() - op.arguments, stack.end());
  for (IValue& v : other)
    if (v.isTensor() && v.toTensor().defined()) v = at::empty_strided(v.toTensor().sizes(), v.toTensor().strides(), v.toTensor().options());
  try {
    op.handle.callBoxed(&other);
  } catch (...) {
    draws_at_.erase(key);
    throw;
  }
  return draws_at_[key] = place_of(generator).offset - before.offset;
}

bool Recorder::follow(Operator& op, Stack* stack, size_t floats, const std::optional<at::Generator>& generator) {
  if (state_ == State::START || !matches(*path_, position_, op, floats, bound_))
    if (!another_path(op, floats)) return false;
  const Entry& entry = path_->log.entries[position_];
  const uint64_t draws = generator && path_->sizes ? draws_at(op, *stack, *generator) : entry.draws;
  if (generator) {
    const Place before = place_of(*generator);
    draw(*generator, before, {before.seed, before.offset + draws});
    move_to(*generator, draws_.end);
  }
  ++counts.deferred;
  ++position_;
  hash_ = path_->sizes ? hash_entry(hash_, &op, entry.inference, words_.data(), words_.size()) : path_->hashes[position_];
  skeleton_ = path_->skeletons[position_];
  defer(op, entry, stack, floats, draws);
  if (C10_UNLIKELY(may_launch_ && launched_ < path_->stages.size() && position_ >= path_->stages[launched_].at)) launch_ahead();
  return true;
}

at::Tensor Recorder::deferred_result(const Geometry& g) {
  TORCH_INTERNAL_ASSERT(g.first, "torchlazy: a result on memory that was there");
  auto* allocator = g.device.is_cpu() ? c10::GetCPUAllocator() : c10::GetAllocator(g.device.type());
  auto storage = c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), g.bytes, c10::DataPtr(nullptr, g.device), allocator, true);
  const uint32_t number = memories_.add(storage.get(), true, false);
  TORCH_INTERNAL_ASSERT(number == g.number, "torchlazy: memory is numbered otherwise than in the known trace");
  memories_[number].pending = true;
  ++pending_memories;
  forbid_access(storage.get());
  auto impl = c10::make_intrusive<Deferred>(c10::Storage(std::move(storage)),
      DispatchKeySet(g.device.is_cpu() ? DispatchKey::CPU : DispatchKey::CUDA), c10::scalarTypeToTypeMeta(g.dtype));
  impl->set_sizes_and_strides(g.sizes, g.strides, g.offset);
  if (marks) impl->mark(true);
  return at::Tensor(std::move(impl));
}

void Recorder::defer(Operator& op, const Entry& entry, Stack* stack, size_t floats, uint64_t draws) {
  if (op.writes) mark_written(op, stack, true);
  if (path_->sizes) {
    const uint32_t begin = log_.words.size(), results = begin + words_.size();
    log_.words.insert(log_.words.end(), words_.begin(), words_.end());
    path_->sizes->append_results(path_->log, entry, bound_, log_.words);
    log_.entries.push_back({&op, begin, results, uint32_t(log_.words.size()), uint32_t(floats), uint32_t(log_.floats.size()), entry.met, entry.inference, draws});
  }
  const uint64_t* p = followed().words.data() + followed().entries[position_ - 1].results;
  c10::SmallVector<IValue, 4> results;
  for (uint32_t r = 0; r < op.returns; ++r) {
    if (op.returned_argument[r] >= 0) {
      results.push_back((*stack)[stack->size() - op.arguments + op.returned_argument[r]]);
      continue;
    }
    const double* none = nullptr;
    results.push_back(read_value(p, none, c10::TypePtr(), [&](const Geometry& g) { return deferred_result(g); }));
  }
  torch::jit::drop(*stack, op.arguments);
  for (IValue& v : results) stack->push_back(std::move(v));
}

// The deferred entries run one by one, and the trace goes on as a logged one.
void Recorder::stop_following() {
  Path& path = *path_;
  leave_stages();
  run_entries(path, position_);
  const Entry* last = position_ ? &followed().entries[position_ - 1] : nullptr;
  log_.floats.resize(last ? last->floats_end : 0);
  if (!path.sizes) log_what_came();
  path_ = nullptr;
  state_ = State::LOGS;
}

// ------------------------------------------------------------------------------------------ memory gets its values

at::Tensor tensor_on(c10::intrusive_ptr<StorageImpl> storage, c10::ScalarType dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset) {
  const auto key = storage->device().is_cpu() ? DispatchKey::CPU : DispatchKey::CUDA;
  auto t = at::detail::make_tensor<TensorImpl>(c10::Storage(std::move(storage)), DispatchKeySet(key), c10::scalarTypeToTypeMeta(dtype));
  t.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return t;
}

at::Tensor Recorder::memory_of(const Input& in) { return tensor_on(memories_[in.number].held, in.dtype, in.sizes, in.strides, in.offset); }

at::Tensor bytes_of(c10::intrusive_ptr<StorageImpl> storage, int64_t from, int64_t bytes) {
  return tensor_on(std::move(storage), c10::kByte, {bytes}, {1}, from);
}

void Recorder::place(uint32_t number, const at::Tensor& value, std::vector<c10::intrusive_ptr<StorageImpl>>* env) {
  Memory& m = memories_[number];
  auto* source = storage_of(value.unsafeGetTensorImpl());
  auto own = env ? (*env)[number] : m.weak.lock();
  if (!own) {  // the program has dropped it
    if (env) (*env)[number] = c10::intrusive_ptr<StorageImpl>::reclaim_copy(source);
    return;
  }
  if (own.get() == source || !m.made) return;
  if (value.storage_offset() == 0 && source->nbytes() == own->nbytes() && value.storage().use_count() == 1 && source->resizable()) {
    own->set_data_ptr_noswap(std::move(source->_mutable_data_ptr_no_checks()));
    source->set_nbytes(size_t(0));
    return;
  }
  // A window on memory that others have, too: a copy of what it spans.
  if (!own->_mutable_data_ptr_no_checks().get()) own->set_data_ptr_noswap(own->allocator()->allocate(own->nbytes()));
  const int64_t from = value.storage_offset() * int64_t(value.itemsize());
  const int64_t bytes = std::min<int64_t>(own->nbytes(), int64_t(source->nbytes()) - from);
  bytes_of(own, 0, bytes).copy_(bytes_of(c10::intrusive_ptr<StorageImpl>::reclaim_copy(source), from, bytes));
}

// Readers may come again: no memory waits from here on.
void Recorder::all_are_there() {
  int done = 0;
  for (Memory& m : memories_) {
    if (!m.pending) continue;
    m.pending = false, ++done;
    if (auto storage = m.weak.lock()) {
      if (m.made && !storage->_mutable_data_ptr_no_checks().get() && storage->nbytes()) {  // its computation failed
        auto memory = storage->allocator()->allocate(storage->nbytes());
        if (storage->device().is_cpu()) std::memset(memory.get(), 0xff, storage->nbytes());
        storage->set_data_ptr_noswap(std::move(memory));
      }
    }
  }
  pending_memories -= done;
}

void Recorder::run_entries(const Path& path, size_t n) {
  for (Memory& m : memories_)
    if (m.pending)
      if (auto storage = m.weak.lock()) allow_access(storage.get());
  auto done = c10::make_scope_exit([&] { all_are_there(); });
  OnMemory guard;
  const AtDraws at_draws(draws_);
  const Log& log = path.sizes ? log_ : path.log;
  std::vector<c10::intrusive_ptr<StorageImpl>> env;  // other threads may let go of memory meanwhile
  for (Memory& m : memories_) env.push_back(m.weak.lock());
  const auto tensor_of = [&](const Geometry& g) {
    auto storage = env[g.number];
    TORCH_INTERNAL_ASSERT(storage, "torchlazy: memory of a deferred entry is gone");
    return tensor_on(std::move(storage), g.dtype, g.sizes, g.strides, g.offset);
  };
  std::vector<std::vector<uint32_t>> gone(n);
  for (uint32_t number = 0; number < env.size() && number < path.last_use.size(); ++number)
    if (path.last_use[number] < n && memories_[number].made) gone[path.last_use[number]].push_back(number);
  Stack stack;
  for (size_t e = 0; e < n; ++e) {
    const Entry& entry = log.entries[e];
    const uint64_t* p = log.words.data() + entry.begin;
    const double* f = log_.floats.data() + entry.floats;
    const auto& arguments = entry.op->handle.schema().arguments();
    stack.clear();
    for (const auto& argument : arguments) stack.push_back(read_value(p, f, argument.real_type(), tensor_of));
    {
      const AsRecorded mode(entry.op->gradients, stack);
      entry.op->handle.callBoxed(&stack);
    }
    ++counts.entries_run;
    p = log.words.data() + entry.results;
    for (uint32_t r = 0; r < entry.op->returns; ++r) {
      if (entry.op->returned_argument[r] >= 0) continue;
      std::vector<at::Tensor> made;
      const double* none = nullptr;
      if (!stack[r].isTensor() && !stack[r].isTensorList()) {
        read_value(p, none, c10::TypePtr(), [](const Geometry&) { return at::Tensor(); });
        continue;
      }
      if (stack[r].isTensor()) made.push_back(std::move(stack[r]).toTensor());
      else made = stack[r].toTensorVector(), stack[r] = IValue();
      size_t at = 0;
      read_value(p, none, c10::TypePtr(), [&](const Geometry& g) {
        at::Tensor value = std::move(made[at++]);
        if (value.sizes() != g.sizes || value.strides() != g.strides || value.storage_offset() != g.offset) {
          at::Tensor as = at::empty_strided(g.sizes, g.strides, value.options());
          value = as.copy_(value);
        }
        place(g.number, value, &env);
        return at::Tensor();
      });
    }
    for (uint32_t number : gone[e]) env[number].reset();
  }
}

std::vector<uint32_t> Recorder::alive() {
  std::vector<uint32_t> found;
  for (uint32_t n = 0; n < memories_.size(); ++n) {
    Memory& m = memories_[n];
    if ((m.made || m.written) && m.weak.use_count() > size_t(bool(m.held))) found.push_back(n);
  }
  return found;
}

uint64_t Recorder::bytes() {
  uint64_t found = 0;
  for (const Memory& m : memories_) found += m.bytes;
  return found;
}

// ------------------------------------------------------------------------------------------ cuts

void Recorder::compute_for(StorageImpl* storage) {
  Memory* m = memories_.find(storage);
  if (!m || !m->pending) return;
  ++counts.reads;
  if (state_ == State::FOLLOWS && position_ < path_->size() && ++path_->stops[position_] >= PARTINGS) part_here();
  cut("memory is read");
}

void Recorder::part_at(uint64_t hash, size_t entries) {
  if (entries < least_entries || !cut_points.hashes.insert(hash).second) return;
  for (Paths* paths : {&paths_, &size_paths_})
    for (Path* path : std::vector<Path*>(paths->after(hash)))
      if (path->size() > entries) retire(*path->known, "traces part within it: it is followed in parts");
}

void Recorder::part_here() { part_at(path_->sizes ? skeleton_ : hash_, position_); }

void Recorder::note_branch(uint64_t before) {
  if (branches_.size() >= MOST_BRANCHES) branches_.clear();
  auto [found, is_new] = branches_.try_emplace(before, Branch{hash_, skeleton_, 0, 0});
  if (is_new || found->second.next == hash_) return;
  const bool in_sizes_only = found->second.next_skeleton == skeleton_;
  found->second.next = hash_, found->second.next_skeleton = skeleton_;
  if (partings_.empty() || partings_.back().at != before) partings_.push_back({before, log_.entries.size() - 1, in_sizes_only});
}

// The trace came for the first time as a whole. Where such traces part from others again and again they end from then on,
// whether or not one of them has a program yet; those that come again as a whole have programs of their own.
void Recorder::count_partings() {
  const int most = PARTINGS + (log_.entries.size() >= A_STEP);
  for (const Parting& parting : partings_) {
    Branch& branch = branches_.try_emplace(parting.at, Branch{hash_, skeleton_, 0, 0}).first->second;
    if (parting.of_sizes ? ++branch.partings_of_sizes >= PARTINGS_OF_SIZES : ++branch.partings >= most) part_at(parting.at, parting.entries);
  }
}

// Whether the log's last `period` operators are a turn of a loop, and no layer of a model that has several alike: what came
// from outside and is met again is met each turn; layers have weights of their own, which come again after all of them.
bool Recorder::is_turn(size_t period) {
  const size_t n = log_.entries.size();
  std::unordered_map<uint32_t, size_t> last;  // by number: the operator that used it last
  size_t met = 0, met_again = 0;
  for (size_t i = 0; i < n; ++i) {
    const Entry& e = log_.entries[i];
    const uint64_t* p = log_.words.data() + e.begin;
    while (p < log_.words.data() + e.results)
      p = walk(p, true, [](NumberKind, const uint64_t*) {}, [&](const uint64_t* w) {
        const uint32_t number = TensorWord{*w}.number();
        if (tag_of(*w) != TENSOR || number >= memories_.size() || memories_[number].made) return;
        const auto [before, is_new] = last.try_emplace(number, i);
        const size_t used = is_new ? n : before->second;
        before->second = i;
        if (i < n - period) return;
        ++met;
        if (used < n - period) met_again += i - used <= period ? 1 : n;
      });
  }
  return met_again < n && (met_again || !met || n >= SURELY_REPETITION);
}

// A loop in which nothing is read: where the log ends with one sequence of operators again and again, it is cut between two
// of them, and from then on each is a trace.
void Recorder::look_for_repetition() {
  const auto& e = log_.entries;
  const size_t n = e.size();
  look_at_ = 2 * n;
  // What each does, from the last one on, and where among the values made here its arguments come from.
  std::vector<uint64_t> does(n);
  for (size_t i = 0; i < n; ++i) {
    uint64_t& hash = does[n - 1 - i] = mixed(reinterpret_cast<uint64_t>(e[i].op), e[i].inference);
    const uint64_t* p = log_.words.data() + e[i].begin;
    while (p < log_.words.data() + e[i].results)
      p = walk(p, true, [](NumberKind, const uint64_t*) {}, [&](const uint64_t* w) {
        const uint32_t number = TensorWord{*w}.number();
        if (tag_of(*w) == TENSOR) hash = mixed(hash, number < memories_.size() && memories_[number].made ? e[i].met - number : 0);
      });
  }
  std::vector<uint32_t> border(n, 0);  // of each beginning: its longest proper part that it begins and ends with
  size_t period = 0;
  for (size_t i = 1, k = 0; i < n; ++i) {
    while (k && does[i] != does[k]) k = border[k - 1];
    if (does[i] == does[k]) ++k;
    border[i] = k;
    const size_t found = i + 1 - k;
    if (found >= least_entries && found * REPETITIONS <= i + 1 && found != period && is_turn(found)) period = found;
  }
  if (!period) return;
  cut_at_ = (n / period + 1) * period;
  uint64_t hash = begin_hash_;
  for (size_t i = 0; i < period; ++i) hash = hash_entry(hash, e[i].op, e[i].inference, log_.words.data() + e[i].begin, e[i].results - e[i].begin);
  part_at(hash, period);
}

void Recorder::retire(Known& known, const std::string& reason) {
  known.reason = reason;
  known.state = Known::REFUSED;
  if (hooks && reason == NOT_FASTER) {
    const InPython in_python;
    hooks->attr("given_up")(reason);
  }
  (known.path->sizes ? size_paths_ : paths_).remove(known.path.get());
  if (known.path.get() == path_ && state_ == State::FOLLOWS) return;  // still being followed: freed with the next forget
}

// Programs of traces that no longer come, and the memory of their graphs; traces that came once, where there are many.
void Recorder::forget_old() {
  for (auto it = known.begin(); it != known.end();) {
    Known& k = it->second;
    const bool is_old = trace_number_ - k.last > FORGOTTEN;
    const bool goes = k.path ? is_old && k.path.get() != path_ : known.size() > MOST_KNOWN / 2 && (k.count < 2 || is_old);
    if (goes && k.path) paths_.remove(k.path.get());
    it = goes ? known.erase(it) : std::next(it);
  }
  for (auto it = families.begin(); it != families.end();) {
    Known& k = it->second.known;
    const bool is_old = trace_number_ - k.last > FORGOTTEN;
    const bool goes = is_old && k.path.get() != path_ && (k.path || families.size() > MOST_KNOWN / 2);
    if (goes && k.path) size_paths_.remove(k.path.get());
    it = goes ? families.erase(it) : std::next(it);
  }
}

void Recorder::cut(const std::string& cause) {
  if (is_cutting_) return;
  if (state_ == State::START) {
    if (memories_.size()) start_over();
    if (rest_left_ <= 0) rests_ = false;
    return;
  }
  is_cutting_ = true;
  auto done = c10::make_scope_exit([&] { is_cutting_ = false; });
  ++counts.cuts, ++causes[cause];
  if (hooks && Py_IsInitialized()) {  // it is counted with the line that the program is at
    const InPython in_python;
    hooks->attr("cut")(cause, state_ == State::FOLLOWS ? position_ : log_.entries.size());
  }
  const OnStream on_its_stream(stream_);
  auto finally = c10::make_scope_exit([&] { start_over(); });
  if (state_ == State::FOLLOWS) {
    if (position_ < path_->size()) path_that_ends_here();
    if (position_ == path_->size()) return finish_path();
    stop_following();
  }
  finish_log();
}

void Recorder::start_over() {
  auto old = memories_.take();
  log_.clear();
  stream_.reset(), draws_.generator.reset();
  launched_ = 0, may_launch_ = true, drawn_.reset();
  partings_.clear();
  ended_ns_ = now_ns();
  state_ = State::START, path_ = nullptr, position_ = 0;
  ++trace_number_;
}

void Recorder::finish_path() {
  Path& path = *path_;
  Known& known = *path.known;
  ++known.count, ++path.follows, known.last = trace_number_;
  count_trace(path.size(), false);
  const auto wanted = alive();
  bool has_all = true, are_equal = true;
  for (uint32_t n : wanted) has_all &= path.gives[n] != 0;
  for (auto [a, b] : path.equal) are_equal &= log_.floats[a] == log_.floats[b];  // else one input cannot serve both
  if (!has_all || !are_equal) {
    leave_stages();
    run_entries(path, path.size());
    if (++known.misses > MOST_MISSES) return retire(known, "other values are wanted each time");
    (path.sizes ? size_paths_ : paths_).remove(&path);
    known.state = Known::WAITING;
    const InPython in_python;
    hooks->attr("want")(known.learned, wanted, are_equal);
    return;
  }
  if (path.size() >= WORTH_STAGES) {
    waits_ = !compares_times || waited_ns_ * 10 > begun_ns_ - waits_since_ns_ ? waits_ + 1 : 0;
    waited_ns_ = 0, waits_since_ns_ = begun_ns_;
  }
  if (!run_program(path)) return run_entries(path, path.size());
  const int64_t taken = now_ns() - begun_ns_;
  if (taken < path.least_ns) path.least_ns = taken, path.least_bytes = bytes();
  if (path.sizes && hooks) {
    Known& exact = this->known[hash_];
    exact.hash = hash_, exact.entries = log_.entries.size(), exact.last = trace_number_;
    if (++exact.count >= HOT_SIZE && exact.state < Known::FOLLOWED && may_learn()) learn(exact, wanted);
  }
  if (!compares_times || known.least_ns == INT64_MAX) return;
  if (path.sizes && path.least_bytes > known.least_bytes) return;  // sizes have grown since: times say nothing
  if (path.follows != FIRST_LOOK && path.follows != LAST_LOOK) return;
  if (!is_final(path)) {
    path.follows = 0, path.least_ns = INT64_MAX;
    return;
  }
  // The least of few runs says little on a machine with other work.
  if (path.least_ns > (path.follows == FIRST_LOOK ? known.least_ns / 2 * 3 : known.least_ns)) retire(known, NOT_FASTER);
}

// Whether the program runs as it always will: on a GPU it becomes a graph once that is compiled, and memory has settled.
bool Recorder::is_final(Path& path) {
  if (path.run.native || path.sizes || path.postponed >= MOST_POSTPONED) return true;
  const InPython in_python;
  if (py::cast<bool>(path.run.program.attr("is_final")())) return true;
  ++path.postponed;
  return false;
}

// `given`: the program in C++, its scalars behind so many of the trace, and what gives these two anew; or None.
void Recorder::set_native(Path::Run& run, const py::object& given, size_t scalars) {
  run.native.reset(), run.last.clear(), run.runs = 0;
  if (given.is_none()) return;
  auto t = py::cast<py::tuple>(given);
  run.native = py::cast<std::shared_ptr<NativeProgram>>(t[0]);
  for (auto value : py::cast<py::tuple>(t[1])) run.last.push_back(run.native->word_of(scalars + run.last.size(), value));
  run.again = t[2].is_none() ? py::object() : py::object(t[2]);
}

// The program for the sizes of the running trace; none where its guards do not hold.
Path::Run* Recorder::at_these_sizes(Path& path) {
  if (auto found = path.served.find(bound_.symbols); found != path.served.end()) return &found->second;
  const InPython in_python;
  py::object program = path.run.program.attr("at")(bound_.symbols);
  if (program.is_none()) return path.sizes->refused.insert(bound_.symbols), nullptr;
  if (path.served.size() >= MOST_SERVED) path.served.clear();
  Path::Run run{program};
  set_native(run, program.attr("native"), path.scalars.size());
  return &path.served.emplace(bound_.symbols, std::move(run)).first->second;
}

// False, and nothing has happened, where the program does not serve these sizes.
bool Recorder::run_program(Path& path) {
  Path::Run* run = &path.run;
  if (path.sizes && !(run = at_these_sizes(path))) return false;
  for (Memory& m : memories_)
    if (m.pending && !m.made)
      if (auto storage = m.weak.lock()) allow_access(storage.get());
  auto done = c10::make_scope_exit([&] { all_are_there(); });
  OnMemory guard;
  const Draws draws = draws_left();
  std::optional<AtDraws> at_draws(std::in_place, draws);
  ++counts.programs;
  std::vector<at::Tensor> memory;
  memory.reserve(path.inputs.size());
  for (const Input& given : path.inputs) memory.push_back(memory_of(given.at(bound_)));
  std::vector<double> scalars;
  for (uint32_t place : path.scalars) scalars.push_back(log_.floats[place]);
  std::vector<at::Tensor> values;
  if (run->native && run->again && ++run->runs == RUNS_TOLD) {
    const InPython in_python;
    set_native(*run, py::object(run->again)(RUNS_TOLD), path.scalars.size());
  }
  if (run->native) {
    NativeProgram::Words words;
    for (double value : scalars) words.push_back(run->native->word_of(words.size(), value));
    words.insert(words.end(), run->last.begin(), run->last.end());
    values = run->native->run(memory, words);
    run->native->count_untold();
  } else {
    const InPython in_python;
    py::list given = py::cast(memory);
    memory.clear();
    py::object list = launched_ ? run->program(given, py::cast(scalars), launched_) : py::none();
    if (list.is_none()) {
      if (launched_) {  // what the stages gave is lost
        at_draws.reset();
        at_draws.emplace(draws_);
        leave_stages();
      }
      list = run->program(std::move(given), py::cast(scalars));
    }
    if (!path.sizes && !path.knows_stages && waits_ >= WAITS) find_stages(path);
    for (auto item : py::cast<py::list>(list)) values.push_back(item.is_none() ? at::Tensor() : py::cast<at::Tensor>(item));
  }
  for (size_t i = 0; i < path.outputs.size(); ++i) {
    if (!values[i].defined()) continue;
    Memory& m = memories_[path.outputs[i]];
    if (m.made) {
      if (auto own = m.weak.lock()) allow_access(own.get());
      place(path.outputs[i], values[i], nullptr);
    } else if (storage_of(values[i].unsafeGetTensorImpl()) != m.held.get()) {
      const at::Tensor& value = values[i];
      tensor_on(m.held, value.scalar_type(), value.sizes(), value.strides(), value.storage_offset()).copy_(value);
    }
    values[i].reset();
  }
  return true;
}

// ------------------------------------------------------------------------------------------ stages of a program

// Of a program that the host waits for: which stages there are, and after which entries what they read is there.
void Recorder::find_stages(Path& path) {
  const py::object found = path.run.program.attr("stages")();
  if (found.is_none()) return;
  path.knows_stages = true;
  std::vector<size_t> drawing;  // entries
  for (size_t e = 0; e < path.size(); ++e)
    if (path.log.entries[e].draws) drawing.push_back(e);
  const auto after = [&](const auto& has_come) {
    size_t e = 0;
    while (e < path.size() && !has_come(path.log.entries[e])) ++e;
    return e + 1;
  };
  size_t at = 1;
  for (auto item : py::cast<py::list>(found)) {
    auto [inputs, scalars, draws] = py::cast<std::tuple<std::vector<uint32_t>, std::vector<uint32_t>, size_t>>(item);
    if (draws > drawing.size()) break;
    for (uint32_t i : inputs) at = std::max(at, after([&](const Entry& e) { return e.met > path.inputs[i].number; }));
    for (uint32_t i : scalars) at = std::max(at, after([&](const Entry& e) { return e.floats_end > path.scalars[i]; }));
    if (draws) at = std::max(at, drawing[draws - 1] + 1);
    path.stages.push_back({std::move(inputs), std::move(scalars), at});
  }
}

void Recorder::launch_ahead() {
  Path& path = *path_;
  const OnStream on_its_stream(stream_);
  OnMemory guard;
  const Draws draws = draws_left();
  const AtDraws at_draws(draws);
  const InPython in_python;
  if (!launched_) ++path.launches;
  for (; launched_ < path.stages.size() && position_ >= path.stages[launched_].at; ++launched_) {
    const Path::Stage& stage = path.stages[launched_];
    std::vector<at::Tensor> memory;
    std::vector<c10::intrusive_ptr<StorageImpl>> written;  // by deferred entries: what was there before is there yet
    auto closed_again = c10::make_scope_exit([&] {
      for (const auto& storage : written) forbid_access(storage.get());
    });
    for (uint32_t i : stage.inputs) {
      const Input& in = path.inputs[i];
      if (memories_[in.number].pending) {
        written.push_back(memories_[in.number].held);
        allow_access(written.back().get());
      }
      memory.push_back(memory_of(in));
    }
    std::vector<double> scalars;
    for (uint32_t i : stage.scalars) scalars.push_back(log_.floats[path.scalars[i]]);
    if (!py::cast<bool>(path.run.program.attr("launch")(launched_, memory, scalars))) {
      may_launch_ = false;
      return leave_stages();
    }
  }
  if (draws.generator) drawn_ = place_of(*draws.generator);
}

// What was launched is of no use: the trace goes another way, or the rest of its inputs is elsewhere.
void Recorder::leave_stages() {
  if (!launched_) return;
  launched_ = 0, drawn_.reset();
  if (++path_->in_vain >= MOST_IN_VAIN && path_->in_vain * 8 > path_->launches) path_->stages.clear();
}

// ------------------------------------------------------------------------------------------ learning

void Recorder::finish_log() {
  if (!hooks) return;
  const int64_t taken = now_ns() - begun_ns_;
  if (is_odd_ || log_.entries.size() < (taken < LONG_NS ? least_entries : 2)) {
    count_partings();
    return count_trace(log_.entries.size(), true);
  }
  if (trace_number_ % LOOKS == LOOKS - 1) {
    const InPython in_python;
    forget_old();
  }
  Known& now = known[hash_];
  now.hash = hash_, now.entries = log_.entries.size(), now.last = trace_number_;
  if (!now.count++) count_partings();
  now.least_ns = std::min(now.least_ns, taken);
  Family& family = families[skeleton_];
  if (taken < family.known.least_ns) family.known.least_ns = taken, family.known.least_bytes = bytes();
  const bool is_awaited = family.known.state == Known::WAITING;  // a program for its sizes is being compiled
  count_trace(log_.entries.size(), now.state == Known::REFUSED || now.count == 1, is_awaited);
  if (now.state != Known::FOLLOWED) note_sizes(now.count == 1);
  // Where sizes vary their common program comes first.
  if (now.count < (family.distinct >= SAMPLES && family.known.state != Known::REFUSED ? HOT_SIZE : 2) || now.state == Known::REFUSED || now.state == Known::FOLLOWED || log_.entries.empty()) return;
  learn(now, alive());
}

// A program whose traces do not come again must not pay for it that they are looked at.
void Recorder::count_trace(int64_t entries, bool is_strange, bool is_awaited) {
  strange_ = is_strange ? strange_ + entries : std::max<int64_t>(0, strange_ - entries);
  if (is_strange) longest_strange_ = std::max(longest_strange_, entries);
  else if (!strange_) longest_strange_ = rest_ = 0;
  if (!compares_times || strange_ < std::max(STRANGE, STRANGE_TRACES * longest_strange_) / (rest_ ? 2 : 1)) return;
  strange_ = longest_strange_ = 0, rests_ = true;
  rest_left_ = rest_ = std::clamp(2 * rest_, SHORTEST_REST, is_awaited ? SHORTEST_REST : LONGEST_REST);
  origins_.clear();  // whose memory is written to is not noticed
  const InPython in_python;
  hooks->attr("rest")();
}

// Traces that come in ever new shapes must not cost more than they could give.
bool Recorder::may_learn() {
  const int64_t begun = now_ns();
  if (!first_ns_) first_ns_ = begun;
  return !compares_times || learning_ns_ <= FREE_LEARNING_NS || learning_ns_ <= (begun - first_ns_) / LEARNING_SHARE;
}

void Recorder::learn(Known& now, const std::vector<uint32_t>& wanted) {
  const InPython in_python;
  const int64_t begun = cpu_ns();
  auto counted = c10::make_scope_exit([&] { now.learning_ns += cpu_ns() - begun, learning_ns_ += cpu_ns() - begun; });
  if (now.state == Known::SEEN) {
    if (!may_learn()) return;
    now.sample = sample();
    py::object learned = hooks->attr("learn")(dump(*now.sample, -1), wanted);
    if (learned.is_none()) return;
    if (py::isinstance<py::str>(learned)) {
      now.state = Known::REFUSED, now.reason = py::cast<std::string>(learned);
      return;
    }
    now.learned = std::move(learned), now.state = Known::WAITING;
  }
  py::object plan = hooks->attr("plan")(now.learned, wanted);
  if (py::isinstance<py::str>(plan)) now.state = Known::REFUSED, now.reason = py::cast<std::string>(plan);
  else if (!plan.is_none()) adopt(now, py::cast<py::tuple>(plan), Log(now.sample->log), now.sample->memories);
}

// A trace came that differs from others in its sizes, or came again while a path for all sizes is on its way.
void Recorder::note_sizes(bool is_new) {
  Family& family = families[skeleton_];
  Known& now = family.known;
  now.hash = skeleton_, now.entries = log_.entries.size(), now.last = trace_number_;
  family.distinct += is_new;
  if (now.state == Known::REFUSED || family.distinct < 2 || !may_learn()) return;
  if (now.state == Known::FOLLOWED) {
    if (!is_new || family.attempts >= MOST_ATTEMPTS || ++family.outside < SAMPLES) return;
  }
  const auto wanted = alive();
  const InPython in_python;
  if (now.state == Known::FOLLOWED) now.state = Known::SEEN, now.learned = py::object(), family.outside = 0;
  const int64_t begun = cpu_ns();
  auto counted = c10::make_scope_exit([&] { now.learning_ns += cpu_ns() - begun, learning_ns_ += cpu_ns() - begun; });
  if (now.state == Known::SEEN) {
    if (!is_new) return;
    now.learned = hooks->attr("sizes")(now.learned ? now.learned : py::none(), sample(), wanted);
    if (py::cast<size_t>(now.learned.attr("count")) < SAMPLES) return;
    now.state = Known::WAITING, ++family.attempts;
  }
  py::object plan = hooks->attr("plan_sizes")(now.learned, wanted);
  if (py::isinstance<py::str>(plan)) now.state = Known::REFUSED, now.reason = py::cast<std::string>(plan);
  else if (!plan.is_none()) {
    auto whole = py::cast<py::tuple>(plan);
    const auto first = py::cast<std::shared_ptr<Sample>>(now.learned.attr("first"));
    adopt(now, whole, Log(first->log), first->memories);
  }
}

// The running trace, its views with the numbers of their memory.
std::shared_ptr<Sample> Recorder::sample() {
  auto found = std::make_shared<Sample>();
  found->log = log_;
  for (View& view : found->log.views) {
    if (view.number >= 0) continue;
    if (const uint32_t* number = memories_.number_of(view.storage._unsafe_get_target())) view.number = *number;
    view.storage.reset();
  }
  for (Memory& m : memories_) found->memories.push_back({m.made, m.written, m.bytes, m.device});
  return found;
}

// `plan`: the program, its inputs, scalars, equal floats, fixed floats, outputs, the native program; for all sizes the
// sizes, too.
void Recorder::adopt(Known& now, const py::tuple& plan, Log&& log, const std::vector<Sample::Fact>& memories) {
  if (now.path) (now.path->sizes ? size_paths_ : paths_).remove(now.path.get());
  now.path = std::make_unique<Path>();
  Path& path = *now.path;
  path.known = &now;
  path.log = std::move(log);
  path.run.program = plan[0];
  for (auto item : plan[1]) {
    auto t = py::cast<py::tuple>(item);
    path.inputs.push_back({py::cast<uint32_t>(t[0]), py::cast<c10::ScalarType>(t[1]), py::cast<int64_t>(t[2]),
                           py::cast<std::vector<int64_t>>(t[3]), py::cast<std::vector<int64_t>>(t[4])});
    if (t.size() > 5)
      for (auto [place, expression] : py::cast<std::vector<std::pair<uint32_t, uint32_t>>>(t[5])) path.inputs.back().moved.push_back({place, expression});
  }
  if (plan.size() > 8) path.sizes = sizes_of(path.log, py::cast<py::dict>(plan[8]));
  path.scalars = py::cast<std::vector<uint32_t>>(plan[2]);
  path.equal = py::cast<std::vector<std::pair<uint32_t, uint32_t>>>(plan[3]);
  path.fixed.assign(path.log.floats.size(), 0);
  for (uint32_t i : py::cast<std::vector<uint32_t>>(plan[4])) path.fixed[i] = 1;
  path.outputs = py::cast<std::vector<uint32_t>>(plan[5]);
  set_native(path.run, plan[7], path.scalars.size());
  path.gives.assign(memories.size(), 0);
  for (auto n : plan[6]) path.gives[py::cast<uint32_t>(n)] = 1;  // what it leaves as it was
  for (uint32_t n : path.outputs) path.gives[n] = 1;
  path.last_use.assign(memories.size(), 0);
  uint64_t hash = mixed(uint64_t(c10::typeMetaToScalarType(at::get_default_dtype())), at::globalContext().deterministicAlgorithms());
  uint64_t skeleton = hash;
  path.hashes.push_back(hash), path.skeletons.push_back(skeleton);
  for (size_t e = 0; e < path.size(); ++e) {
    const Entry& entry = path.log.entries[e];
    const uint64_t* words = path.log.words.data() + entry.begin;
    hash = hash_entry(hash, entry.op, entry.inference, words, entry.results - entry.begin);
    skeleton = hash_skeleton(skeleton, entry.op, entry.inference, words, entry.results - entry.begin);
    path.hashes.push_back(hash), path.skeletons.push_back(skeleton);
    const auto note = [&](const uint64_t* p) {
      if (tag_of(*p) == TENSOR) path.last_use[TensorWord{*p}.number()] = e;
    };
    const auto no_tag = [](NumberKind, const uint64_t*) {};
    for (const uint64_t* p = words; p < path.log.words.data() + entry.end;) p = walk(p, true, no_tag, note);
  }
  now.state = Known::FOLLOWED;
  learning_ns_ -= std::exchange(now.learning_ns, 0);  // it was worth it
  (path.sizes ? size_paths_ : paths_).add(&path);
}

void Recorder::forget() {
  for (auto& [hash, k] : known)
    if (k.path) paths_.remove(k.path.get());
  for (auto& [hash, family] : families)
    if (family.known.path) size_paths_.remove(family.known.path.get());
  known.clear(), families.clear(), planned_sizes_.clear();
  strange_ = longest_strange_ = rest_ = rest_left_ = 0, rests_ = false;
  branches_.clear();
  cut_points.hashes.clear();
}

// The log for Python: entries (operator, arguments, results, writes), where a tensor is (memory, sizes, strides, offset, dtype).
py::object shown(const uint64_t*& p, const double*& f, const double* floats, int64_t memory) {
  const uint64_t first = *p, n = value_of(first);
  const auto tagged = [](const char* kind, py::object value) { return py::make_tuple(kind, std::move(value)); };
  const auto flt = [&] { return tagged("float", py::make_tuple(f - floats, *f)); };
  switch (tag_of(first)) {
    case NONE: case UNDEFINED: return ++p, py::none();
    case TENSOR: {
      const Geometry g = read_tensor(p);
      return tagged("tensor", py::make_tuple(memory >= 0 ? uint32_t(memory) : g.number, g.sizes.vec(), g.strides.vec(), g.offset, g.dtype));
    }
    case INT: return p += 2, py::int_(int64_t(p[-1]));
    case BOOL: return ++p, py::bool_(n != 0);
    case DEVICE: return ++p, tagged("device", py::cast(c10::Device(c10::DeviceType(n >> 8), int8_t(n & 0xff)).str()));
    case FLOAT: { ++p; auto v = flt(); ++f; return v; }
    case NUMBER: {
      ++p;
      if (c10::ScalarType(n) == c10::kDouble) { auto v = flt(); ++f; return v; }
      if (c10::ScalarType(n) == c10::kBool) return py::bool_(*p++ != 0);
      return py::int_(int64_t(*p++));
    }
    case INTS: { py::list l; ++p; for (uint64_t i = 0; i < n; ++i) l.append(int64_t(*p++)); return std::move(l); }
    case FLOATS: { py::list l; ++p; for (uint64_t i = 0; i < n; ++i, ++f) l.append(flt()); return std::move(l); }
    case TENSORS: case LIST: { py::list l; ++p; for (uint64_t i = 0; i < n; ++i) l.append(shown(p, f, floats, memory)); return std::move(l); }
    case TEXT: { std::string text(reinterpret_cast<const char*>(++p), n); p += (n + 7) / 8; return py::str(text); }
  }
  return py::none();
}

// With `only`, that entry alone, as if all memory had been there before.
py::dict dump(const Sample& sample, int64_t only) {
  const Log& log = sample.log;
  py::list entries, memories;
  const auto add = [&](Operator& op, const std::vector<uint64_t>& words, uint32_t begin, uint32_t end, const std::vector<double>& floats, uint32_t float_begin, int64_t memory, bool is_view) {
    const uint64_t* p = words.data() + begin;
    const double* f = floats.data() + float_begin;
    py::list arguments, results;
    for (uint32_t a = 0; a < op.arguments; ++a) arguments.append(shown(p, f, floats.data(), memory));
    while (p < words.data() + end) results.append(shown(p, f, floats.data(), memory));
    entries.append(py::make_tuple(op.handle.schema().name(), op.handle.schema().overload_name(), arguments, results, is_view));
  };
  size_t view = 0;
  for (size_t e = std::max(only, int64_t(0)); e < (only < 0 ? log.entries.size() : only + 1); ++e) {
    for (; only < 0 && view < log.views.size() && log.views[view].before <= e; ++view) {
      const View& v = log.views[view];
      if (v.number >= 0) add(*v.op, log.view_words, v.begin, v.end, log.view_floats, v.floats, v.number, true);
    }
    const Entry& entry = log.entries[e];
    add(*entry.op, log.words, entry.begin, entry.end, log.floats, entry.floats, -1, false);
  }
  for (const auto& m : sample.memories) memories.append(py::make_tuple(m.made && only < 0, m.written, m.bytes, m.device.str()));
  py::dict found;
  found["entries"] = entries, found["memories"] = memories, found["floats"] = log.floats;
  found["dtype"] = py::cpp_function([](int number) { return c10::ScalarType(number); });
  return found;
}

// Each number of a sample: where it is (of a view: beyond the entries' words), its kind, and whether a result has it.
struct NumberPlace {
  uint32_t word;
  NumberKind kind;
  bool is_result;
  int64_t entry;  // -1: of a view
};

std::vector<NumberPlace> number_places(const Log& log) {
  std::vector<NumberPlace> found;
  const auto add = [&](const Operator& op, const std::vector<uint64_t>& words, uint32_t begin, uint32_t results, uint32_t end, int64_t entry) {
    const uint64_t* p = words.data() + begin;
    for (uint32_t a = 0; p < words.data() + end; ++a) {
      const bool is_result = p >= words.data() + results;
      p = walk(p, is_result || (op.numbers >> a & 1), [&](NumberKind kind, const uint64_t* w) { found.push_back({uint32_t(w - words.data()), kind, is_result, entry}); }, [](const uint64_t*) {});
    }
  };
  for (size_t e = 0; e < log.entries.size(); ++e) {
    const Entry& entry = log.entries[e];
    add(*entry.op, log.words, entry.begin, entry.results, entry.end, e);
  }
  for (const View& v : log.views)
    if (v.number >= 0) add(*v.op, log.view_words, v.begin, v.results, v.end, -1);
  return found;
}

std::vector<int64_t> numbers_of(const Log& log) {
  std::vector<int64_t> found;
  for (const NumberPlace& place : number_places(log)) found.push_back(int64_t((place.entry < 0 ? log.view_words : log.words)[place.word]));
  return found;
}

// The sample as it were with other numbers.
py::dict dump_with(const Sample& sample, const std::vector<int64_t>& numbers, int64_t only) {
  Sample other = sample;
  size_t at = 0;
  for (const NumberPlace& place : number_places(sample.log)) {
    (place.entry < 0 ? other.log.view_words : other.log.words)[place.word] = uint64_t(numbers.at(at++));
    if (place.kind == NumberKind::BYTES) {  // the first meeting: the tensor's word stands before
      const uint32_t number = TensorWord{other.log.words[place.word - 1]}.number();
      other.memories[number].bytes = uint64_t(numbers[at - 1]);
    }
  }
  return dump(other, only);
}

std::unique_ptr<Sizes> sizes_of(const Log& log, const py::dict& given) {
  auto sizes = std::make_unique<Sizes>();
  const auto places = number_places(log);
  for (auto code : given["expressions"]) sizes->expressions.emplace_back(py::cast<std::vector<std::pair<int64_t, int64_t>>>(code));
  for (auto [number, expression] : py::cast<std::vector<std::pair<uint32_t, uint32_t>>>(given["moved"]))
    if (places.at(number).entry >= 0) sizes->moved.push_back({places[number].word, expression});
  std::sort(sizes->moved.begin(), sizes->moved.end(), [](const auto& a, const auto& b) { return a.word < b.word; });
  for (auto [expression, symbol] : py::cast<std::vector<std::pair<uint32_t, uint32_t>>>(given["checks"])) sizes->checks.push_back({expression, symbol});
  for (auto [number, factor, shift] : py::cast<std::vector<std::tuple<uint32_t, int64_t, int64_t>>>(given["bindings"]))
    sizes->bindings.push_back({places.at(number).word, factor, shift});
  sizes->low = py::cast<std::vector<int64_t>>(given["low"]), sizes->high = py::cast<std::vector<int64_t>>(given["high"]);
  return sizes;
}

void fallback(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  with_errors_of_python([&] { recorder->operator_comes(op, keys, stack); });
}

}  // namespace

void forget_origin(const StorageImpl* storage) {
  auto hold = acquire();
  recorder->forget_origin(storage);
}

void compute_for_reader(StorageImpl* storage) {
  auto hold = acquire();
  with_errors_of_python([&] { recorder->compute_for(storage); });
}

bool is_recording() {  // whether a block is open in this thread
  const auto& keys = c10::impl::tls_local_dispatch_key_set();
  return keys.included_.has(KEY) && !keys.excluded_.has(KEY);
}

// A method that reads memory without an operator comes: perhaps past Deferred, by an alias that was there before.
bool before_read(const std::string& method, const std::vector<Readers::Memory>& given) {
  const auto& keys = c10::impl::tls_local_dispatch_key_set();
  const bool is_apart = keys.excluded_.has(KEY), is_recorded = keys.included_.has(KEY);
  const auto is_lazy = [](const Readers::Memory& m) { return m.tensor && m.tensor->defined() && is_marked(*m.tensor); };
  if (!is_apart && (is_recorded || (any_marked && std::any_of(given.begin(), given.end(), is_lazy)))) ask_gate([&] { return method; });
  if (!busy && recorder->reads_pending()) {
    auto hold = acquire();
    if (blocks) recorder->cut("memory is read");  // of other memory, too: here the method may read more than it is given
    for (const auto& m : given)
      if (m.storage || m.tensor->defined())
        if (auto* storage = m.storage ? m.storage : storage_of(m.tensor->unsafeGetTensorImpl())) recorder->compute_for(storage);
  }
  return !is_apart && (is_recorded || (any_marked && has_gate));
}

// An operator comes that takes a storage, and is not recorded where its tensors are ordinary ones.
bool before_share(const std::string& method, const std::vector<Readers::Memory>& given) {
  if (!busy && recorder->reads_pending()) {
    auto hold = acquire();
    for (const auto& m : given)
      if (m.storage) recorder->compute_for(m.storage);
  }
  return false;
}

// A GPU's streams are told of each other, or waited for: what is deferred is launched before.
bool before_order(const std::string& method, const std::vector<Readers::Memory>&) {
  if (!busy && (blocks || any_marked)) { auto hold = acquire(); recorder->cut(method); }
  return false;
}

void settle_pending() {
  if (!pending_memories.load(std::memory_order_relaxed)) return;
  auto hold = acquire();
  recorder->cut("compiled call");
}

}  // namespace torchlazy

TORCH_LIBRARY_IMPL(_, Fake, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&torchlazy::fallback>()); }

TORCH_LIBRARY_IMPL(aten, AutogradCPU, m) { m.impl("to.dtype_layout", &torchlazy::moved), m.impl("to.device", &torchlazy::moved_to_device); }
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) { m.impl("to.dtype_layout", &torchlazy::moved), m.impl("to.device", &torchlazy::moved_to_device); }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace torchlazy;
  py::class_<NativeProgram, std::shared_ptr<NativeProgram>>(m, "Program")
      .def(py::init<const py::dict&>())
      .def("run", torch::wrap_pybind_function([](const NativeProgram& program, py::list given, const py::sequence& scalars) {
        const NativeProgram::Words words = program.words_of(scalars);
        std::vector<at::Tensor> inputs;
        if (is_recording()) settle_pending();  // it reads memory past what is deferred
        const c10::impl::ExcludeDispatchKeyGuard alone{DispatchKeySet(KEY)};
        for (auto item : given) inputs.push_back(py::cast<at::Tensor>(item));
        given.attr("clear")();
        try {
          py::gil_scoped_release release;
          return program.run(inputs, words);
        } catch (...) {  // whoever recovers finds what is still there
          for (at::Tensor& t : inputs) given.append(t.defined() ? py::cast(t) : py::none());
          throw;
        }
      }))
      .def("take_untold", &NativeProgram::take_untold)
      .def_property_readonly("has_run", &NativeProgram::has_run)
      .def_property_readonly_static("failed", [](py::object) { return NativeProgram::failed; });
  py::class_<ArgumentCheck, std::shared_ptr<ArgumentCheck>>(m, "ArgumentCheck")
      .def(py::init<const py::tuple&, const std::unordered_set<size_t>&, std::unordered_set<uintptr_t>>())
      .def("fit", [](const ArgumentCheck& check, const py::tuple& given) { return check.fit(given.ptr()); });
  py::class_<ReplayedCall>(m, "ReplayedCall")
      .def(py::init<const py::dict&>())
      .def("run", torch::wrap_pybind_function([](const ReplayedCall& call, const py::tuple& given) { return call.run(given); }));
  py::class_<GraphRoom, std::shared_ptr<GraphRoom>>(m, "GraphRoom").def(py::init<>());
  py::class_<GraphedJoint, std::shared_ptr<GraphedJoint>>(m, "GraphedJoint")
      .def(py::init<const py::dict&>())
      .def("forward", torch::wrap_pybind_function([](const GraphedJoint& graphs, const std::vector<at::Tensor>& inputs, const py::object& numbers) -> py::object {
        const AsProgram as_program;
        auto found = graphs.forward(inputs, numbers);
        if (!found) return py::none();
        return py::make_tuple(found->first, py::capsule(new GraphedJoint::Lease(std::move(found->second)), [](void* lease) { delete static_cast<GraphedJoint::Lease*>(lease); }));
      }))
      .def("backward", torch::wrap_pybind_function([](const GraphedJoint& graphs, const py::list& given, const py::object& numbers) {
        const AsProgram as_program;
        std::vector<at::Tensor> tangents;
        for (auto item : given) tangents.push_back(item.is_none() ? at::Tensor() : py::cast<at::Tensor>(item));
        return graphs.backward(tangents, numbers);
      }));
  m.def("keeps_graph", [] { return torch::autograd::get_current_graph_task_keep_graph(); });
  py::class_<Sample, std::shared_ptr<Sample>>(m, "Sample")
      .def("log", [](const Sample& s) { return dump(s, -1); })
      .def("log_with", &dump_with, py::arg("numbers"), py::arg("only") = -1)
      .def("operators", [](const Sample& s) {
        std::vector<std::string> found;
        for (const Entry& e : s.log.entries) found.push_back(e.op->handle.schema().name());
        return found;
      })
      .def("numbers", [](const Sample& s) { return numbers_of(s.log); })
      .def("places", [](const Sample& s) {  // of each number: kind, whether a result has it, its entry (-1: a view)
        std::vector<std::tuple<int, bool, int64_t>> found;
        for (const auto& place : number_places(s.log)) found.emplace_back(int(place.kind), place.is_result, place.entry);
        return found;
      });
  Pool::install();
  m.def("exchange_works", &exchange_works);
  m.def("pooled_bytes", [] { return Pool::the().held(); });  // that no tensor has
  m.def("set_hooks", [](py::object hooks) { recorder->hooks = new py::object(std::move(hooks)); });
  m.def("is_recording", &is_recording);
  m.def("include", [](bool on) {  // whether this thread's operators are recorded; returns whether they were
    const bool was = c10::impl::tls_is_dispatch_key_included(KEY);
    c10::impl::tls_set_dispatch_key_included(KEY, on);
    blocks += int(on) - int(was);
    return was;
  });
  // This thread's operators are not recorded until `restore` gets what this returns.
  m.def("pause", &Pause::begin);
  m.def("restore", &Pause::end);
  m.def("use_device", [](const std::string& device, py::type tensor) {  // from here on there are lazy tensors, and this computes them
    target = at::Device(device);
    if (!any_marked.exchange(true)) install_in_python(tensor);
  });
  // Call a factory, whose result is on the lazy device; it comes to the recorder as those in blocks do.
  m.def("make", [](py::object factory, py::args args, py::kwargs kwargs) {
    const bool was = c10::impl::tls_is_dispatch_key_included(KEY);
    if (!args.size() || !THPVariable_Check(args[0].ptr())) c10::impl::tls_set_dispatch_key_included(KEY, true);  // else it moves a tensor
    auto done = c10::make_scope_exit([&] { c10::impl::tls_set_dispatch_key_included(KEY, was); });
    py::object found = factory(*args, **kwargs);
    mark_all(found.ptr());
    return found;
  });
  m.def("watch_calls", &WatchedCalls::begin);
  m.def("end_watch", &WatchedCalls::end);
  m.def("mark", [](const at::Tensor& t, bool on) { mark(t, on); });
  m.def("tell_target", [](bool on) { return std::exchange(tells_target, on); });
  m.def("mark_all", [](py::handle value) { mark_all(value.ptr()); });
  m.def("mark_result", [](py::handle result, py::handle args, py::handle kwargs) { mark_result(result.ptr(), args.ptr(), kwargs.ptr()); });
  m.def("any_marked", [](py::handle value) { return any_marked_in(value.ptr()); });
  m.def("unmarked", &unmarked);
  m.def("lend", [](const at::Tensor& t) {  // somebody else may write to its memory: from now on operators on it run at once
    storage_of(t.unsafeGetTensorImpl())->set_resizable(false);
    return unmarked(t);
  });
  m.def("is_marked", [](const at::Tensor& t) { return is_marked(t); });
  m.def("is_told_lazy", [](const at::Tensor& t) { return is_marked(t) && !c10::impl::tls_is_dispatch_key_excluded(KEY); });  // what Python is told
  m.def("cut", [](const std::string& cause) { auto hold = acquire(); recorder->cut(cause); });
  m.def("before_read", [](const std::string& method, const at::Tensor& t) { return before_read(method, {{&t, nullptr}}); });
  m.def("watch_methods", [](const py::dict& reading, const py::dict& sharing, const py::dict& ordering) {  // from here on, by what a report calls them
    const auto install = [](const py::dict& methods, Readers::Before before) {
      for (auto [name, found] : methods) Readers::install(py::reinterpret_borrow<py::object>(found), py::cast<std::string>(name), before);
    };
    install(reading, &before_read), install(sharing, &before_share), install(ordering, &before_order);
  });
  m.def("set_gate", [](py::object asked) {  // called with the cause before a value is read; None: no more
    if (!gate) gate = new py::object();
    has_gate = !asked.is_none();
    *gate = std::move(asked);
  });
  m.def("varies_in_planned_sizes", [] { auto hold = acquire(); return recorder->varies_in_planned_sizes(); });
  m.def("is_deferred", [](const at::Tensor& t) { auto hold = acquire(); return recorder->is_pending(t); });
  // No other thread has the recorder while this one forks, where it lets go in time; in the child the lock is a new one.
  static bool has_lock = false;
  m.def("before_fork", [](int64_t patience_ms) {
    has_lock = recorder->lock.try_lock();
    py::gil_scoped_release release;
    for (; !has_lock && patience_ms; --patience_ms) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      has_lock = recorder->lock.try_lock();
    }
  });
  m.def("after_fork", [](bool is_child) {
    if (is_child) new (&recorder->lock) std::recursive_mutex, Pool::the().after_fork();
    else if (has_lock) recorder->lock.unlock();
    has_lock = false;
  });
  m.def("forget", [] { auto hold = acquire(); recorder->cut("forget"); recorder->forget(); Pool::the().empty(); });
  m.def("for_tests", [](size_t least, bool compares) { recorder->least_entries = least, recorder->compares_times = compares; });
  m.def("counts", [] {
    auto hold = acquire();
    const auto& c = recorder->counts;
    return std::map<std::string, int64_t>{{"logged", c.logged}, {"deferred", c.deferred}, {"at_once", c.at_once}, {"views", c.views},
        {"cuts", c.cuts}, {"programs", c.programs}, {"entries_run", c.entries_run}, {"partings", c.partings}, {"reads", c.reads}, {"rested", c.rested}};
  });
  m.def("reset_counts", [] { auto hold = acquire(); recorder->counts = {}; recorder->causes.clear(); recorder->at_once.clear(); });
  m.def("causes", [] { auto hold = acquire(); return recorder->causes; });
  m.def("ran_at_once", [] { auto hold = acquire(); return recorder->at_once; });
  m.def("traces", [] {  // what is known: (entries, how often it came, state, reason)
    auto hold = acquire();
    std::vector<std::tuple<size_t, uint32_t, int, std::string>> found;
    for (auto& [hash, k] : recorder->known) found.emplace_back(k.entries, k.count, int(k.state), k.reason);
    return found;
  });
  m.def("families", [] {  // traces that differ in sizes only: (entries, sizes that came, state, reason, how often followed)
    auto hold = acquire();
    std::vector<std::tuple<size_t, uint32_t, int, std::string, int64_t>> found;
    for (auto& [hash, f] : recorder->families)
      if (f.distinct > 1) found.emplace_back(f.known.entries, f.distinct, int(f.known.state), f.known.reason, f.known.path ? f.known.path->follows : 0);
    return found;
  });
  m.def("run_at_once", [](const std::string& name, const std::string& overload, const std::string& reason) {
    auto hold = acquire();
    auto& op = recorder->operators[c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str())];
    op.kind = Kind::AT_ONCE, op.reason = reason;
  });
}

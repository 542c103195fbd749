// A call of a compiled callable without Python: its arguments are compared, its guards asked, its program run.
//
// Invariant: arguments that fit have the facts (lazy/compiled/template/argument_facts.py) of those that the check was
// made with: none has hooks or keeps a gradient, no two are on one memory, and none on memory of the state.
#pragma once

#include <c10/core/AutogradState.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <unordered_set>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/custom_class.h>

#include "deferred.h"
#include "graphed_joint.h"
#include "program.h"

namespace torchlazy {

class ArgumentCheck {
 public:
  // `free`: positions of numbers whose values do not matter; `memories`: those of the state.
  ArgumentCheck(const py::tuple& given, const std::unordered_set<size_t>& free, std::unordered_set<uintptr_t> memories) : memories_(std::move(memories)) {
    for (size_t i = 0; i < given.size(); ++i) rows_.push_back(row_of(given[i], free.count(i)));
    TORCH_CHECK_VALUE(fit(given.ptr()), "arguments whose facts are not told by the check");
  }

  bool fit(PyObject* given) const {
    if (size_t(PyTuple_GET_SIZE(given)) != rows_.size()) return false;
    const StorageImpl* met[MOST_TENSORS];
    size_t several = 0;
    for (size_t i = 0; i < rows_.size(); ++i) {
      PyObject* value = PyTuple_GET_ITEM(given, i);
      const Row& row = rows_[i];
      if (value == row.value.ptr() && row.kind == SAME) continue;
      if (row.kind == OBJECT) {
        if (PyWeakref_GetObject(row.value.ptr()) != value) return false;
        continue;
      }
      if (Py_TYPE(value) != row.type) return false;
      switch (row.kind) {
        case ANY: case OBJECT: break;
        case BITS: if (bits_of(value) != row.bits) return false; break;
        case SAME: {
          const int equal = row.is_plain ? PyObject_RichCompareBool(value, row.value.ptr(), Py_EQ) : 0;
          if (equal < 0) PyErr_Clear();
          if (equal != 1) return false;
          break;
        }
        case TENSOR: {
          const StorageImpl* memory = fits(value, row);
          if (!memory || std::find(met, met + several, memory) != met + several) return false;
          met[several++] = memory;
        }
      }
    }
    return true;
  }

 private:
  static constexpr size_t MOST_TENSORS = 16;
  enum RowKind { SAME, ANY, BITS, TENSOR, OBJECT };  // OBJECT: one that guards follow, held weakly
  struct Row {
    RowKind kind = SAME;
    PyTypeObject* type = nullptr;
    py::object value;  // kept: an address is not given to another
    bool is_plain = false;
    int64_t bits = 0;
    DispatchKeySet keys;
    at::Device device{at::kCPU};
    NativeProgram::Layout layout;
    int64_t offset = 0;
    size_t nbytes = 0;
    bool requires_grad = false, is_leaf = true, has_gradient = false;
  };
  std::vector<Row> rows_;
  std::unordered_set<uintptr_t> memories_;
  size_t tensors_ = 0;

  static int64_t bits_of(PyObject* number) {
    const double value = PyFloat_AS_DOUBLE(number);
    int64_t bits;
    std::memcpy(&bits, &value, 8);
    return bits;
  }

  Row row_of(const py::handle& value, bool is_free) {
    Row row;
    PyObject* o = value.ptr();
    row.type = Py_TYPE(o);
    row.value = py::reinterpret_borrow<py::object>(value);
    if (THPVariable_Check(o)) {
      TORCH_CHECK_VALUE(THPVariable_CheckExact(o) && ++tensors_ <= MOST_TENSORS, "a tensor of another class, or too many");
      const at::Tensor& t = THPVariable_Unpack(o);
      TORCH_CHECK_VALUE(t.layout() == at::kStrided && t.has_storage(), "a tensor without memory");
      row.kind = TENSOR, row.value = py::none(), row.keys = t.key_set(), row.device = t.device();
      row.layout = {t.sizes().vec(), t.strides().vec(), t.scalar_type()};
      row.offset = t.storage_offset(), row.nbytes = t.storage().nbytes();
      row.requires_grad = t.requires_grad(), row.is_leaf = t.is_leaf();
      row.has_gradient = row.requires_grad && row.is_leaf && t.grad().defined();
    } else if (is_free) {
      row.kind = ANY;
    } else if (PyFloat_CheckExact(o)) {
      row.kind = BITS, row.bits = bits_of(o);
    } else {
      row.is_plain = PyLong_CheckExact(o) || PyBool_Check(o) || PyUnicode_CheckExact(o) || PyBytes_CheckExact(o) || o == Py_None;
      if (row.is_plain) return row;
      row.kind = OBJECT, row.value = py::reinterpret_steal<py::object>(PyWeakref_NewRef(o, nullptr));
      if (!row.value) PyErr_Clear();
      TORCH_CHECK_VALUE(row.value, "an argument of another kind");
    }
    return row;
  }

  static bool graph_fits(const at::Tensor& t, const Row& row) {
    const auto* autograd = t.unsafeGetTensorImpl()->autograd_meta();
    if (!row.requires_grad) return !autograd || !(autograd->requires_grad() || autograd->grad().defined());
    if (!t.requires_grad() || t.is_leaf() != row.is_leaf || t.retains_grad()) return false;
    if (row.is_leaf && autograd->grad().defined() != row.has_gradient) return false;
    return torch::autograd::impl::hooks(t).empty() && !torch::autograd::impl::post_acc_grad_hooks(t);
  }

  const StorageImpl* fits(PyObject* value, const Row& row) const {
    const at::Tensor& t = THPVariable_Unpack(value);
    const TensorImpl* impl = t.unsafeGetTensorImpl();
    if (impl->key_set() != row.keys || t.scalar_type() != row.layout.dtype || t.device() != row.device) return nullptr;
    if (t.sizes() != c10::IntArrayRef(row.layout.sizes) || t.strides() != c10::IntArrayRef(row.layout.strides) || t.storage_offset() != row.offset) return nullptr;
    if (!graph_fits(t, row)) return nullptr;
    const StorageImpl* memory = impl->unsafe_storage().unsafeGetStorageImpl();
    if (!memory || memory->nbytes() != row.nbytes || memories_.count(reinterpret_cast<uintptr_t>(memory))) return nullptr;
    PyObject* own = PyObject_GenericGetDict(value, nullptr);
    if (!own) return PyErr_Clear(), nullptr;
    const bool is_bare = !PyDict_GET_SIZE(own);
    Py_DECREF(own);
    return is_bare ? memory : nullptr;
  }
};

// A tensor that a replay names: an argument of the call by its position, or one that is kept (position -1).
struct Given {
  int64_t argument;
  at::Tensor kept;
  explicit Given(const py::handle& h) : argument(THPVariable_Check(h.ptr()) ? -1 : py::cast<int64_t>(h)) {
    if (argument < 0) kept = THPVariable_Unpack(h.ptr());
  }
  const at::Tensor& in(const py::tuple& given) const { return argument < 0 ? kept : THPVariable_Unpack(PyTuple_GET_ITEM(given.ptr(), argument)); }
};

// Of a call whose results need gradients: the program of its backward, and what connects the two (lazy/plan/joint.py).
struct JointPart {
  enum Kind { INPUT, RESULT, SAVED };
  struct Source { Kind kind; int64_t index; };  // of a result, or of an output of the forward
  struct BackwardInput { bool is_tangent; int64_t index; NativeProgram::Layout layout; };  // index of a held tensor, or a tangent
  std::shared_ptr<NativeProgram> backward;
  std::vector<Given> wanted;
  std::vector<int64_t> tangents;  // by the forward's results: the number of the gradient, -1 for none
  std::vector<Source> held;       // what the backward reads, and where it is after the forward
  std::vector<Given> inputs;      // those of kind INPUT
  std::vector<BackwardInput> reads;
  std::vector<std::pair<int64_t, int64_t>> scalars;  // a scalar of the forward, or (-1) this word
  std::vector<int64_t> gradients;                    // by wanted input: the backward's output, -1 for none
  std::vector<std::vector<int64_t>> needs;           // by wanted input: tangents without which it has no gradient
  std::vector<std::pair<int64_t, std::vector<int64_t>>> inner;  // results that others are computed from, and these
  py::object python;                                            // the backward in Python

  explicit JointPart(const py::dict& spec) : backward(py::cast<std::shared_ptr<NativeProgram>>(spec["backward"])), python(spec["python"]) {
    for (auto item : spec["wanted"]) wanted.emplace_back(item);
    for (auto item : spec["inputs"]) inputs.emplace_back(item);
    tangents = py::cast<std::vector<int64_t>>(spec["tangents"]);
    for (auto [kind, index] : py::cast<std::vector<std::pair<std::string, int64_t>>>(spec["held"]))
      held.push_back({kind == "input" ? INPUT : kind == "result" ? RESULT : SAVED, index});
    for (auto item : spec["reads"]) {
      auto t = py::cast<py::tuple>(item);
      reads.push_back({py::cast<bool>(t[0]), py::cast<int64_t>(t[1]), NativeProgram::layout_of(t[2])});
    }
    for (auto item : spec["scalars"]) {  // (number, None), or (-1, value)
      auto t = py::cast<py::tuple>(item);
      const int64_t number = py::cast<int64_t>(t[0]);
      scalars.emplace_back(number, number < 0 ? backward->word_of(scalars.size(), t[1]) : 0);
    }
    gradients = py::cast<std::vector<int64_t>>(spec["gradients"]);
    needs = py::cast<std::vector<std::vector<int64_t>>>(spec["needs"]);
    inner = py::cast<decltype(inner)>(spec["inner"]);
  }
};

void settle_pending();  // what the recorder has deferred is computed: programs read memory past it

// What Python raised in a hook, as torch's own bindings expect it.
template <class F>
void with_errors_of_python(const F& function) {
  try {
    function();
  } catch (py::error_already_set& error) {
    py::gil_scoped_acquire gil;
    error.restore();
    python_error raised;
    raised.persist();
    throw raised;
  }
}

// Below autograd, autocast, inference mode and the recorder: as a program runs.
struct AsProgram {
  c10::InferenceMode apart{false};
  at::AutoDispatchBelowAutograd below;
  c10::impl::ExcludeDispatchKeyGuard alone{c10::autocast_dispatch_keyset | DispatchKeySet(KEY)};
};

// What a backward needs of the call that made its graph.
struct JointState : torch::CustomClassHolder {
  std::shared_ptr<const JointPart> joint;
  NativeProgram::Words scalars;  // the forward's
  std::vector<c10::weak_intrusive_ptr<TensorImpl, c10::UndefinedTensorImpl>> inner;  // results that others are computed from
  std::vector<int64_t> versions;  // of the wanted inputs, and of the tensors among the arguments
  py::object given, numbers;      // the arguments, and the scalars as Python has them
  std::shared_ptr<const GraphedJoint> graphs;  // that ran the forward, if they did
  GraphedJoint::Lease lease;                   // as long as the other one can run
  ~JointState() override {
    if (Py_IsInitialized()) {
      py::gil_scoped_acquire gil;
      given = py::object(), numbers = py::object(), joint.reset();
    } else {
      given.release(), numbers.release(), new auto(std::move(joint));
    }
  }
};

// What a node saved, which only the engine may let go of: it does so after the node is done, when the peak is over.
template <auto Member>
struct Opened {
  friend auto& saved_of(torch::autograd::AutogradContext& ctx) { return ctx.*Member; }
};
auto& saved_of(torch::autograd::AutogradContext& ctx);
template struct Opened<&torch::autograd::AutogradContext::saved_variables_>;

// Results of the forward's program, with a graph whose backward is the other program.
struct JointFunction : torch::autograd::Function<JointFunction> {
  using variable_list = torch::autograd::variable_list;

  static variable_list forward(torch::autograd::AutogradContext* ctx, c10::intrusive_ptr<JointState> state, const std::vector<at::Tensor>* made, const std::vector<at::Tensor>* inputs, const std::vector<int64_t>* positions, at::TensorList) {
    const JointPart& joint = *state->joint;
    variable_list results, fixed, held;
    for (size_t i = 0; i < positions->size(); ++i) {
      results.push_back((*made)[(*positions)[i]]);
      if (joint.tangents[i] < 0) fixed.push_back(results.back());
    }
    ctx->mark_non_differentiable(fixed);
    size_t next = 0;
    for (const auto& [kind, index] : joint.held)
      held.push_back(kind == JointPart::INPUT ? (*inputs)[next++] : kind == JointPart::RESULT ? results[index] : (*made)[index]);
    ctx->save_for_backward(std::move(held));
    ctx->set_materialize_grads(false);
    ctx->saved_data["state"] = c10::IValue::make_capsule(state);
    return results;
  }

  static variable_list backward(torch::autograd::AutogradContext* ctx, const variable_list& grads) {
    const auto state = c10::static_intrusive_pointer_cast<JointState>(ctx->saved_data.at("state").toCapsule());
    const JointPart& joint = *state->joint;
    refuse_looks_inside(*state, grads);
    settle_pending();
    variable_list held = ctx->get_saved_variables();
    TORCH_CHECK(held.size() == joint.held.size(), "torchlazy: the backward of a compiled call failed, and what it had saved is gone / run the forward again");
    size_t count = 0;
    for (int64_t t : joint.tangents) count += t >= 0;
    variable_list tangents(count);
    bool is_plain = !at::GradMode::is_enabled(), has_some = false;
    for (size_t i = 0; i < joint.tangents.size(); ++i) {
      if (joint.tangents[i] < 0 || !grads[i].defined()) continue;
      tangents[joint.tangents[i]] = grads[i], has_some = true;
      is_plain &= grads[i].layout() == at::kStrided && !grads[i].key_set().has_any(NOT_PLAIN);
    }
    std::vector<bool> is_needed;
    for (size_t i = 0; i < joint.wanted.size(); ++i) is_needed.push_back(ctx->needs_input_grad(i));
    const size_t before = 4;  // arguments of `forward` that are no tensors
    variable_list found(before + joint.wanted.size());
    if (!has_some) return found.resize(before + std::max<size_t>(1, joint.wanted.size())), found;
    const auto in_python = [&] {
      py::gil_scoped_acquire gil;
      py::list gradients;
      for (const at::Tensor& g : grads) gradients.append(g.defined() ? py::cast(g) : py::none());
      py::list made;
      with_errors_of_python([&] { made = joint.python(state->given, state->versions, state->numbers, py::cast(held), gradients, py::cast(is_needed)); });
      for (size_t i = 0; i < made.size() && i < joint.wanted.size(); ++i)
        if (!made[i].is_none()) found[before + i] = py::cast<at::Tensor>(made[i]);
      return found;
    };
    if (!is_plain) return in_python();
    const bool is_proven = joint.backward->has_run(), is_kept = torch::autograd::get_current_graph_task_keep_graph();
    std::vector<at::Tensor> made;
    if (state->lease && !is_kept) {
      py::gil_scoped_acquire gil;
      const AsProgram as_program;
      const GraphedJoint::Lease lease = std::move(state->lease);
      saved_of(*ctx).clear();
      held.clear();
      py::list numbers;
      for (size_t i = 0; i < joint.scalars.size(); ++i) {
        const auto& [number, word] = joint.scalars[i];
        numbers.append(number < 0 ? joint.backward->number_of(i, word) : state->numbers.is_none() ? joint.backward->number_of(i, state->scalars[number]) : py::object(state->numbers[py::int_(number)]));
      }
      with_errors_of_python([&] { made = state->graphs->backward(tangents, numbers); });
    } else try {
      const AsProgram as_program;
      std::vector<at::Tensor> memory;
      for (const auto& [is_tangent, index, layout] : joint.reads) {
        if (!is_tangent) memory.push_back(NativeProgram::window(held[index], layout, 0));
        else memory.push_back(tangent(tangents[index], layout, joint.backward->device()));
      }
      NativeProgram::Words scalars;
      for (const auto& [number, word] : joint.scalars) scalars.push_back(number < 0 ? word : state->scalars[number]);
      if (is_proven && !is_kept) {  // each value goes after its last reader
        saved_of(*ctx).clear();  // as the engine does once the node is done
        held.clear();
      }
      made = joint.backward->run(memory, scalars);
    } catch (const std::exception&) {
      if (is_proven) throw;
      return in_python();
    }
    for (size_t i = 0; i < joint.wanted.size(); ++i) {
      const auto& needs = joint.needs[i];
      const bool is_missing = !needs.empty() && std::none_of(needs.begin(), needs.end(), [&](int64_t t) { return tangents[t].defined(); });
      if (joint.gradients[i] >= 0 && is_needed[i] && !is_missing) found[before + i] = made[joint.gradients[i]];
    }
    return found;
  }

 private:
  // To torch the results are separate: what passes through one on the way from others is not seen at it.
  static void refuse_looks_inside(const JointState& state, const variable_list& grads) {
    for (size_t n = 0; n < state.inner.size(); ++n) {
      const auto& users = state.joint->inner[n].second;
      if (std::none_of(users.begin(), users.end(), [&](int64_t user) { return grads[user].defined(); })) continue;
      const at::Tensor result(state.inner[n].lock());
      if (!result.defined()) continue;
      py::gil_scoped_acquire gil;
      const py::object seen = py::cast(result);
      const bool is_watched = result.retains_grad() || py::bool_(seen.attr("_backward_hooks"));
      TORCH_CHECK(!is_watched, "torchlazy: a result of a compiled call has a hook or retains its gradient, and other results of the call are computed from it: the gradient that comes by way of these is not seen there / register the hook inside the function, or compute what is differentiated outside of it");
    }
  }

  inline static const DispatchKeySet NOT_PLAIN{
      DispatchKey::Python, DispatchKey::FuncTorchBatched, DispatchKey::BatchedNestedTensor, DispatchKey::FuncTorchGradWrapper,
      DispatchKey::Batched, DispatchKey::Functionalize, DispatchKey::ZeroTensor, DispatchKey::Conjugate, DispatchKey::Negative};

  // The memory of a gradient, all of it, laid out as the program has it.
  static at::Tensor tangent(const at::Tensor& g, const NativeProgram::Layout& layout, at::Device device) {
    const auto options = at::TensorOptions().dtype(layout.dtype).device(device);
    if (!g.defined()) return at::empty_strided(layout.sizes, layout.strides, options).zero_();
    const bool is_whole = g.scalar_type() == layout.dtype && layout.fits(g) && !g.storage_offset() && g.storage().nbytes() == at::detail::computeStorageNbytes(layout.sizes, layout.strides, c10::elementSize(layout.dtype));
    if (is_whole) return NativeProgram::window(g, layout, 0);
    return at::empty_strided(layout.sizes, layout.strides, options).copy_(g);
  }
};

// What the Python of a replay would do (lazy/compiled/replay/replay.py), where that is one program, or a joint.
class ReplayedCall {
 public:
  explicit ReplayedCall(const py::dict& spec)
      : arguments_(py::cast<std::shared_ptr<ArgumentCheck>>(spec["arguments"])), holds_(spec["holds"]), program_(py::cast<std::shared_ptr<NativeProgram>>(spec["program"])) {
    if (py::isinstance<py::sequence>(spec["scalars"])) scalars_ = program_->words_of(spec["scalars"]);
    else numbers_ = spec["scalars"];
    for (auto item : spec["inputs"]) {  // (tensor or position, layout)
      auto t = py::cast<py::tuple>(item);
      Input input{Given(t[0]), NativeProgram::layout_of(t[1])};
      if (input.given.argument < 0) input.given.kept = NativeProgram::window(input.given.kept, input.layout, 0);
      inputs_.push_back(std::move(input));
    }
    for (auto item : spec["made"]) {  // (position among the program's outputs, layout, offset, is marked)
      auto t = py::cast<py::tuple>(item);
      made_.push_back({py::cast<int64_t>(t[0]), NativeProgram::layout_of(t[1]), py::cast<int64_t>(t[2]), py::cast<bool>(t[3])});
    }
    for (auto item : spec["results"]) {  // ("made", number), ("leaf", number), ("argument", position), ("object", value)
      auto t = py::cast<py::tuple>(item);
      const auto kind = py::cast<std::string>(t[0]);
      Result r{kind == "made" ? MADE : kind == "leaf" ? LEAF : kind == "argument" ? ARGUMENT : OBJECT, 0, py::none()};
      if (r.kind == OBJECT) r.value = t[1];
      else r.number = py::cast<int64_t>(t[1]);
      results_.push_back(std::move(r));
    }
    for (auto item : spec["raised"]) raised_.push_back(py::cast<at::Tensor>(item));
    writes_ = py::cast<bool>(spec["writes"]);
    if (!spec["before"].is_none()) before_ = spec["before"];
    if (!spec["graphs"].is_none()) graphs_ = py::cast<std::shared_ptr<const GraphedJoint>>(spec["graphs"]);
    if (!spec["joint"].is_none()) joint_ = std::make_shared<JointPart>(py::cast<py::dict>(spec["joint"]));
  }

  // The results in flat order; None where the call is another one, or the program raised: nothing was done then.
  py::object run(const py::tuple& given) const {
    if (!arguments_->fit(given.ptr()) || !py::cast<bool>(holds_())) return py::none();
    if (before_) before_();
    py::object numbers;
    NativeProgram::Words drawn;
    if (numbers_) numbers = numbers_(given), drawn = program_->words_of(numbers);
    const NativeProgram::Words& scalars = numbers_ ? drawn : scalars_;
    std::vector<at::Tensor> outputs;
    GraphedJoint::Lease lease;
    try {
      settle_pending();
      std::vector<at::Tensor> inputs;
      inputs.reserve(inputs_.size());
      for (const Input& i : inputs_) inputs.push_back(i.given.argument < 0 ? i.given.kept : NativeProgram::window(i.given.in(given), i.layout, 0));
      const AsProgram as_program;
      if (graphs_)
        if (auto found = graphs_->forward(inputs, numbers ? numbers : program_->numbers_of(scalars))) std::tie(outputs, lease) = std::move(*found);
      if (!lease) {
        py::gil_scoped_release release;
        outputs = program_->run(inputs, scalars);
      }
    } catch (const std::exception&) {
      if (writes_) throw;
      return py::none();  // Python does it again, and says what is wrong
    }
    for (const at::Tensor& t : raised_) t.unsafeGetTensorImpl()->bump_version();
    std::vector<at::Tensor> made;
    for (const Made& m : made_) {
      made.push_back(NativeProgram::window(outputs[m.output], m.layout, m.offset));
      if (m.is_marked) mark(made.back());
    }
    if (joint_) made = with_graph(outputs, made, given, scalars, numbers, std::move(lease));
    py::list found(results_.size());
    for (size_t n = 0; n < results_.size(); ++n) {
      const Result& r = results_[n];
      switch (r.kind) {
        case MADE: found[n] = py::cast(made[r.number]); break;
        case LEAF: made[r.number].set_requires_grad(true), found[n] = py::cast(made[r.number]); break;
        case ARGUMENT: found[n] = py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(given.ptr(), r.number)); break;
        case OBJECT: found[n] = r.value;
      }
    }
    return found;
  }

 private:
  struct Input { Given given; NativeProgram::Layout layout; };
  struct Made { int64_t output; NativeProgram::Layout layout; int64_t offset; bool is_marked; };
  enum ResultKind { MADE, LEAF, ARGUMENT, OBJECT };
  struct Result { ResultKind kind; int64_t number; py::object value; };

  std::shared_ptr<ArgumentCheck> arguments_;
  py::object holds_, before_, numbers_;  // before_: what is done on the host first
  std::shared_ptr<NativeProgram> program_;
  NativeProgram::Words scalars_;
  std::vector<Input> inputs_;
  std::vector<Made> made_;
  std::vector<Result> results_;
  std::vector<at::Tensor> raised_;  // written tensors whose version tells so
  bool writes_ = false;
  std::shared_ptr<const JointPart> joint_;
  std::shared_ptr<const GraphedJoint> graphs_;

  std::vector<at::Tensor> with_graph(std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& made, const py::tuple& given, const NativeProgram::Words& scalars, const py::object& numbers, GraphedJoint::Lease lease) const {
    auto state = c10::make_intrusive<JointState>();
    state->joint = joint_, state->scalars = scalars, state->given = given;
    state->numbers = numbers ? numbers : py::none();
    if (lease) state->graphs = graphs_, state->lease = std::move(lease);
    std::vector<int64_t> positions;
    for (size_t n = 0; n < made_.size(); ++n) positions.push_back(made_[n].output), outputs[made_[n].output] = made[n];
    std::vector<at::Tensor> inputs, wanted;
    for (const Given& g : joint_->inputs) inputs.push_back(g.in(given));
    bool needs_any = false, has_tangents = false;
    for (const Given& g : joint_->wanted) wanted.push_back(g.in(given)), needs_any |= wanted.back().requires_grad();
    for (int64_t t : joint_->tangents) has_tangents |= t >= 0;
    for (const at::Tensor& t : wanted) state->versions.push_back(t._version());
    for (auto value : given)
      if (THPVariable_Check(value.ptr())) state->versions.push_back(THPVariable_Unpack(value.ptr())._version());
    if (has_tangents && !needs_any) wanted.push_back(at::empty({0}, at::TensorOptions().requires_grad(true)));  // its gradients lead to leaves of its own alone
    const auto results = JointFunction::apply(state, &outputs, &inputs, &positions, at::TensorList(wanted));
    for (const auto& [number, users] : joint_->inner) state->inner.emplace_back(results[number].getIntrusivePtr());
    return results;
  }
};

}  // namespace torchlazy

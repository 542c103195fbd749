// A program as a list of calls: kernels through pointers, ATen operators boxed, no Python between its steps.
//
// Made from the same steps as the Python function of a program (runtime/program/code.py).
#pragma once

#include <ATen/ops/copy.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <bit>
#include <variant>

#include "cuda_launch.h"
#include "log.h"
#include "operators.h"
#include "pool.h"
#include "sizes.h"

namespace torchlazy {

namespace py = pybind11;

class NativeProgram {
 public:
  explicit NativeProgram(const py::dict& spec);
  using Words = std::vector<int64_t>;  // the program's scalars: whole numbers, and floats by their bits
  int64_t word_of(size_t place, double value) const { return scalar_is_float_.at(place) ? std::bit_cast<int64_t>(value) : int64_t(value); }
  int64_t word_of(size_t place, const py::handle& value) const {  // a seed has more digits than a double
    return scalar_is_float_.at(place) ? std::bit_cast<int64_t>(py::cast<double>(value)) : int64_t(PyLong_AsUnsignedLongLongMask(value.ptr()));
  }
  Words words_of(const py::sequence& values) const {
    Words found;
    for (auto value : values) found.push_back(word_of(found.size(), value));
    if (PyErr_Occurred()) throw py::error_already_set();
    return found;
  }
  py::object number_of(size_t place, int64_t word) const { return scalar_is_float_.at(place) ? py::object(py::float_(std::bit_cast<double>(word))) : py::object(py::int_(word)); }
  py::list numbers_of(const Words& words) const {
    py::list found;
    for (size_t i = 0; i < words.size(); ++i) found.append(number_of(i, words[i]));
    return found;
  }
  // The outputs; what an output's donation could not be computed in is copied there. Empties `inputs`; where a step
  // raises, `failed` is its number and `inputs` has those that are still held.
  std::vector<at::Tensor> run(std::vector<at::Tensor>& inputs, const Words& scalars) const;
  static thread_local size_t failed;
  void count_untold() const { ++untold_; }
  int64_t take_untold() const { return untold_.exchange(0); }  // runs that Python has not counted yet
  bool has_run() const { return has_run_; }  // whether a run has ended without an error
  at::Device device() const { return device_ < 0 ? at::Device(at::kCPU) : at::Device(at::kCUDA, device_); }

  // Places in a list of numbers, each with the expression of the program's symbols that a run puts there.
  using Moved = std::vector<std::pair<int, int>>;
  struct Layout {
    std::vector<int64_t> sizes, strides;
    c10::ScalarType dtype;
    Moved moved = {};  // places of the sizes, then of the strides
    bool fits(const at::Tensor& t) const { return t.strides() == c10::IntArrayRef(strides); }
  };
  static Layout layout_of(const py::handle& h) {
    auto t = py::cast<py::tuple>(h);
    return {py::cast<std::vector<int64_t>>(t[0]), py::cast<std::vector<int64_t>>(t[1]), py::cast<c10::ScalarType>(t[2]), t.size() > 3 ? py::cast<Moved>(t[3]) : Moved()};
  }
  static at::Tensor window(const at::Tensor& on, const Layout& layout, int64_t offset) {
    const int64_t item = c10::elementSize(layout.dtype), bytes = on.storage_offset() * int64_t(on.itemsize());
    TORCH_CHECK(bytes % item == 0, "a window begins within an element");
    auto t = at::detail::make_tensor<TensorImpl>(c10::Storage(on.unsafeGetTensorImpl()->unsafe_storage()), DispatchKeySet(on.is_cpu() ? DispatchKey::CPU : DispatchKey::CUDA), c10::scalarTypeToTypeMeta(layout.dtype));
    t.unsafeGetTensorImpl()->set_sizes_and_strides(layout.sizes, layout.strides, bytes / item + offset);
    return t;
  }
  static int64_t address(const at::Tensor& t) {
    return reinterpret_cast<int64_t>(static_cast<char*>(t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get()) + t.storage_offset() * t.itemsize());
  }

 private:
  struct Allocate { int slot, reuse; Layout layout; at::Device device; };
  struct Window { int slot, source; Layout layout; int64_t offset; int moved_offset; };  // -1: it is the number
  using Function = int (*)(const int64_t*);
  struct Launch {
    std::variant<Function, CudaLaunch> function;
    std::vector<int> buffers, scalars;
    std::vector<int64_t> sizes;
    Moved moved;
    std::vector<std::string> checks;
  };
  struct Row { std::vector<int> buffers; std::vector<int64_t> sizes; Moved moved; std::vector<int> scalars; };
  struct Foreach { std::variant<Function, std::shared_ptr<CudaForeach>> function; std::vector<Row> rows; std::vector<int> scalars; std::vector<std::string> checks; };
  struct Argument {
    // NUMBER: a scalar where a tensor is expected; SIZE: an expression of the symbols, FLOAT_SIZE where a float is.
    enum Kind { CONSTANT, VALUE, SCALAR, NUMBER, SIZE, FLOAT_SIZE, LIST } kind = CONSTANT;
    IValue constant;
    int place = 0;
    std::vector<Argument> items;
    c10::TypePtr element;
  };
  struct Extern {
    c10::OperatorHandle op;
    int8_t gradients;
    std::vector<Argument> arguments;
    std::vector<std::pair<int, Layout>> outputs;  // slot -1: not wanted
  };
  struct Free { std::vector<int> slots; };
  using Step = std::variant<Allocate, Window, Launch, Foreach, Extern, Free>;

  std::vector<int> inputs_, outputs_;
  std::vector<bool> scalar_is_float_;
  std::vector<Expression> sizes_;  // of the program's last scalars, its symbols
  size_t symbols_;
  std::vector<std::pair<int, int>> donations_;  // output, input
  std::vector<Step> steps_;
  size_t slots_;
  int device_;  // -1: the CPU
  mutable std::atomic<bool> has_run_ = false;
  mutable std::atomic<int64_t> untold_ = 0;

  static void check(int status, const std::vector<std::string>& checks) {
    if (!status) return;
    const std::string what = status > 0 && size_t(status) <= checks.size() ? checks[status - 1] : "status " + std::to_string(status);
    if (what.rfind("value: ", 0) == 0) TORCH_CHECK(false, what.substr(7));
    TORCH_CHECK_INDEX(false, "index out of range in ", what);
  }
  static Argument argument_of(const py::handle& h, c10::TypePtr type);
  static at::Tensor as_tensor(const at::Scalar& number) {
    at::Tensor t = c10::scalar_to_tensor(number);
    t.unsafeGetTensorImpl()->set_wrapped_number(true);
    return t;
  }
  IValue value_of_argument(const Argument& a, const std::vector<at::Tensor>& values, const Words& scalars, const Words& sizes) const;
  static void put(const Words& sizes, const Moved& moved, int64_t* numbers) {
    for (auto [place, size] : moved) numbers[place] = sizes[size];
  }
  // The layout of this run; `made` is where it is put together, if it has to be.
  static const Layout& now(const Layout& layout, const Words& sizes, Layout& made) {
    if (layout.moved.empty()) return layout;
    made.sizes = layout.sizes, made.strides = layout.strides, made.dtype = layout.dtype;
    const int dims = made.sizes.size();
    for (auto [place, size] : layout.moved) (place < dims ? made.sizes[place] : made.strides[place - dims]) = sizes[size];
    return made;
  }
};

inline thread_local size_t NativeProgram::failed = 0;

inline NativeProgram::Argument NativeProgram::argument_of(const py::handle& h, c10::TypePtr type) {
  const auto optional = type->cast<c10::OptionalType>();
  const bool is_optional = bool(optional);
  if (optional) type = optional->getElementType();
  Argument a;
  if (h.is_none()) {  // also where a tensor is expected that a library call did not give
    if (type->kind() == c10::TypeKind::TensorType && !is_optional) a.constant = at::Tensor();
    return a;
  }
  if (py::isinstance<py::tuple>(h) && py::len(h) == 2 && py::isinstance<py::str>(py::cast<py::tuple>(h)[0])) {  // ("value" or "scalar", place)
    auto t = py::cast<py::tuple>(h);
    const bool is_number = type->kind() == c10::TypeKind::TensorType;
    const auto what = py::cast<std::string>(t[0]);
    a.kind = what == "value" ? Argument::VALUE : is_number ? Argument::NUMBER : Argument::SCALAR;
    if (what == "size") {
      TORCH_CHECK(!is_number, "a size where a tensor is expected");
      a.kind = type->kind() == c10::TypeKind::FloatType ? Argument::FLOAT_SIZE : Argument::SIZE;
    }
    a.place = py::cast<int>(t[1]);
    return a;
  }
  if (py::isinstance<py::list>(h) || py::isinstance<py::tuple>(h)) {
    auto list = type->cast<c10::ListType>();
    TORCH_CHECK(list, "a list where ", type->str(), " is expected");
    a.element = list->getElementType();
    bool constant = true;
    for (auto item : h) a.items.push_back(argument_of(item, a.element)), constant &= a.items.back().kind == Argument::CONSTANT;
    a.kind = Argument::LIST;
    if (!constant) return a;
    c10::impl::GenericList values(a.element);
    for (auto& item : a.items) values.push_back(item.constant);
    // Lists of ints, floats and bools have types of their own.
    if (a.element->kind() == c10::TypeKind::IntType || a.element->kind() == c10::TypeKind::SymIntType) {
      c10::List<int64_t> ints;
      for (auto& item : a.items) ints.push_back(item.constant.toInt());
      a.constant = ints;
    } else if (a.element->kind() == c10::TypeKind::FloatType) {
      c10::List<double> floats;
      for (auto& item : a.items) floats.push_back(item.constant.toDouble());
      a.constant = floats;
    } else if (a.element->kind() == c10::TypeKind::BoolType) {
      c10::List<bool> bools;
      for (auto& item : a.items) bools.push_back(item.constant.toBool());
      a.constant = bools;
    } else {
      TORCH_CHECK(a.element->kind() == c10::TypeKind::NumberType || a.items.empty() || a.element->kind() == c10::TypeKind::OptionalType, "a list of ", a.element->str());
      a.constant = values;
    }
    a.kind = Argument::CONSTANT, a.items.clear();
    return a;
  }
  switch (type->kind()) {
    case c10::TypeKind::ScalarTypeType: a.constant = int64_t(py::cast<c10::ScalarType>(h)); return a;
    case c10::TypeKind::LayoutType: a.constant = int64_t(py::cast<at::Layout>(h)); return a;
    case c10::TypeKind::MemoryFormatType: a.constant = int64_t(py::cast<at::MemoryFormat>(h)); return a;
    case c10::TypeKind::DeviceObjType: a.constant = py::cast<c10::Device>(h); return a;
    case c10::TypeKind::BoolType: a.constant = py::cast<bool>(h); return a;
    case c10::TypeKind::FloatType: a.constant = py::cast<double>(h); return a;
    case c10::TypeKind::StringType: a.constant = py::cast<std::string>(h); return a;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType: a.constant = py::cast<int64_t>(h); return a;
    case c10::TypeKind::NumberType:
    case c10::TypeKind::TensorType: {
      at::Scalar number;
      if (py::isinstance<py::bool_>(h)) number = py::cast<bool>(h);
      else if (py::isinstance<py::int_>(h)) number = py::cast<int64_t>(h);
      else if (py::isinstance<py::float_>(h)) number = py::cast<double>(h);
      else TORCH_CHECK(false, "a constant of another type");
      if (type->kind() == c10::TypeKind::NumberType) a.constant = number;
      else a.constant = as_tensor(number);
      return a;
    }
    default: TORCH_CHECK(false, "an argument of type ", type->str());
  }
}

inline NativeProgram::NativeProgram(const py::dict& spec) {
  slots_ = py::cast<size_t>(spec["slots"]);
  inputs_ = py::cast<std::vector<int>>(spec["inputs"]);
  outputs_ = py::cast<std::vector<int>>(spec["outputs"]);
  scalar_is_float_ = py::cast<std::vector<bool>>(spec["scalars"]);
  donations_ = py::cast<std::vector<std::pair<int, int>>>(spec["donations"]);
  symbols_ = py::cast<size_t>(spec["symbols"]);
  for (auto code : spec["sizes"]) sizes_.emplace_back(py::cast<std::vector<std::pair<int64_t, int64_t>>>(code));
  device_ = py::cast<int>(spec["device"]);
  const auto function = [](const py::handle& h) { return reinterpret_cast<Function>(py::cast<uintptr_t>(h)); };
  for (auto item : spec["steps"]) {
    auto t = py::cast<py::tuple>(item);
    const auto kind = py::cast<std::string>(t[0]);
    if (kind == "allocate") steps_.push_back(Allocate{py::cast<int>(t[1]), py::cast<int>(t[2]), layout_of(t[3]), at::Device(py::cast<std::string>(t[4]))});
    else if (kind == "window") steps_.push_back(Window{py::cast<int>(t[1]), py::cast<int>(t[2]), layout_of(t[3]), py::cast<int64_t>(t[4]), py::cast<int>(t[5])});
    else if ((kind == "launch" || kind == "foreach") && t[1].is_none()) steps_.push_back(Free{});  // nothing to compute
    else if (kind == "launch") {
      std::variant<Function, CudaLaunch> launched;
      if (py::isinstance<py::tuple>(t[1])) launched = CudaLaunch(py::cast<py::tuple>(t[1]));
      else launched = function(t[1]);
      steps_.push_back(Launch{std::move(launched), py::cast<std::vector<int>>(t[2]), py::cast<std::vector<int>>(t[3]), py::cast<std::vector<int64_t>>(t[4]), py::cast<Moved>(t[5]), py::cast<std::vector<std::string>>(t[6])});
    } else if (kind == "foreach") {
      std::variant<Function, std::shared_ptr<CudaForeach>> launched;
      if (py::isinstance<py::tuple>(t[1])) launched = std::make_shared<CudaForeach>(CudaLaunch(py::cast<py::tuple>(t[1])));
      else launched = function(t[1]);
      Foreach f{std::move(launched), {}, py::cast<std::vector<int>>(t[3]), py::cast<std::vector<std::string>>(t[4])};
      for (auto row : t[2]) {
        auto r = py::cast<py::tuple>(row);
        f.rows.push_back({py::cast<std::vector<int>>(r[0]), py::cast<std::vector<int64_t>>(r[1]), py::cast<Moved>(r[2]), py::cast<std::vector<int>>(r[3])});
      }
      steps_.push_back(std::move(f));
    } else if (kind == "extern") {
      const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(py::cast<std::string>(t[1]).c_str(), py::cast<std::string>(t[2]).c_str());
      const auto& schema = op.schema();
      Extern e{op, place_of_gradients(schema)};
      auto args = py::cast<py::list>(t[3]);
      auto kwargs = py::cast<py::dict>(t[4]);
      for (size_t i = 0; i < schema.arguments().size(); ++i) {
        const auto& argument = schema.arguments()[i];
        py::str name(argument.name());
        if (i < args.size()) e.arguments.push_back(argument_of(args[i], argument.real_type()));
        else if (kwargs.contains(name)) e.arguments.push_back(argument_of(kwargs[name], argument.real_type()));
        else {
          TORCH_CHECK(argument.default_value(), "no value for ", argument.name());
          e.arguments.push_back(Argument{Argument::CONSTANT, *argument.default_value()});
        }
      }
      for (auto output : t[5]) {
        if (output.is_none()) e.outputs.emplace_back(-1, Layout());
        else {
          auto o = py::cast<py::tuple>(output);
          e.outputs.emplace_back(py::cast<int>(o[0]), layout_of(o[1]));
        }
      }
      steps_.push_back(std::move(e));
    } else steps_.push_back(Free{py::cast<std::vector<int>>(t[1])});
  }
}

inline IValue NativeProgram::value_of_argument(const Argument& a, const std::vector<at::Tensor>& values, const Words& scalars, const Words& sizes) const {
  switch (a.kind) {
    case Argument::CONSTANT: return a.constant;
    case Argument::VALUE: return values[a.place];
    case Argument::SCALAR: return scalar_is_float_[a.place] ? IValue(std::bit_cast<double>(scalars[a.place])) : IValue(scalars[a.place]);
    case Argument::NUMBER: return as_tensor(scalar_is_float_[a.place] ? at::Scalar(std::bit_cast<double>(scalars[a.place])) : at::Scalar(scalars[a.place]));
    case Argument::SIZE: return sizes[a.place];
    case Argument::FLOAT_SIZE: return double(sizes[a.place]);
    case Argument::LIST:
      if (a.element->kind() == c10::TypeKind::TensorType) {
        c10::List<at::Tensor> list;
        list.reserve(a.items.size());
        for (const auto& item : a.items) list.push_back(value_of_argument(item, values, scalars, sizes).toTensor());
        return list;
      }
      if (a.element->kind() == c10::TypeKind::IntType || a.element->kind() == c10::TypeKind::SymIntType) {
        c10::List<int64_t> list;
        list.reserve(a.items.size());
        for (const auto& item : a.items) list.push_back(value_of_argument(item, values, scalars, sizes).toInt());
        return list;
      }
      c10::impl::GenericList list(a.element);
      list.reserve(a.items.size());
      for (const auto& item : a.items) list.push_back(value_of_argument(item, values, scalars, sizes));
      return list;
  }
  return {};
}

inline std::vector<at::Tensor> NativeProgram::run(std::vector<at::Tensor>& inputs, const Words& scalars) const {
  const Pool::Use pooled;
  c10::OptionalDeviceGuard on_device;
  void* stream = nullptr;
  if (device_ >= 0) on_device.reset_device(device()), stream = raw_stream(device_);
  std::vector<at::Tensor> v(slots_);
  for (size_t i = 0; i < inputs_.size(); ++i) v[inputs_[i]] = inputs[i];
  std::vector<at::Tensor> donated(donations_.size());
  for (size_t i = 0; i < donations_.size(); ++i) donated[i] = inputs[donations_[i].second];
  inputs.clear();
  Words sizes;
  if (!sizes_.empty()) {
    const Words symbols(scalars.end() - symbols_, scalars.end());
    sizes.reserve(sizes_.size());
    for (const Expression& size : sizes_) sizes.push_back(size.at(symbols));
  }
  Layout made_layout;
  std::vector<int64_t> words;
  Stack stack;
  const Step* step_now = steps_.data();
  auto failing = c10::make_scope_exit([&] {
    failed = step_now - steps_.data();
    for (int slot : inputs_) inputs.push_back(std::move(v[slot]));
  });
  for (const Step& step : steps_) {
    step_now = &step;
    if (const auto* s = std::get_if<Extern>(&step)) {
      stack.clear();
      for (const Argument& a : s->arguments) stack.push_back(value_of_argument(a, v, scalars, sizes));
      {
        const AsRecorded mode(s->gradients, stack);
        s->op.callBoxed(&stack);
      }
      size_t at = 0;
      const auto keep = [&](at::Tensor t) {
        if (at >= s->outputs.size()) return;
        const auto& [slot, given] = s->outputs[at++];
        if (slot < 0) return;
        const Layout& layout = now(given, sizes, made_layout);
        TORCH_CHECK(t.defined(), "a library call gave nothing where a tensor was promised");
        if (!layout.fits(t)) {
          bool same = t.numel() == 0;
          if (!same) {
            same = true;
            for (int64_t d = 0; d < t.dim(); ++d) same &= t.size(d) == 1 || t.stride(d) == layout.strides[d];
          }
          t = same ? window(t, layout, 0) : at::empty_strided(layout.sizes, layout.strides, t.options()).copy_(t);
        }
        v[slot] = std::move(t);
      };
      for (IValue& r : stack) {
        if (r.isTensor()) keep(std::move(r).toTensor());
        else if (r.isTensorList()) for (at::Tensor& t : r.toTensorVector()) keep(std::move(t));
        else ++at;
      }
    } else if (const auto* s = std::get_if<Launch>(&step)) {
      words.clear();
      for (int b : s->buffers) words.push_back(address(v[b]));
      for (int n : s->scalars) words.push_back(scalars[n]);
      if (const auto* cuda = std::get_if<CudaLaunch>(&s->function)) cuda->run(stream, words, s->buffers.size());
      else {
        words.insert(words.end(), s->sizes.begin(), s->sizes.end());
        put(sizes, s->moved, words.data() + words.size() - s->sizes.size());
        check(std::get<Function>(s->function)(words.data()), s->checks);
      }
    } else if (const auto* s = std::get_if<Window>(&step)) {
      v[s->slot] = window(v[s->source], now(s->layout, sizes, made_layout), s->moved_offset < 0 ? s->offset : sizes[s->moved_offset]);
    } else if (const auto* s = std::get_if<Allocate>(&step)) {
      const Layout& layout = now(s->layout, sizes, made_layout);
      if (s->reuse >= 0) v[s->slot] = window(v[s->reuse], layout, 0), v[s->reuse].reset();
      else if (s->device.is_cpu()) v[s->slot] = at::detail::empty_strided_cpu(layout.sizes, layout.strides, layout.dtype);
      else v[s->slot] = at::empty_strided(layout.sizes, layout.strides, at::TensorOptions().dtype(layout.dtype).device(s->device));
    } else if (const auto* s = std::get_if<Foreach>(&step)) {
      words.clear();
      for (const Row& row : s->rows) {
        for (int b : row.buffers) words.push_back(address(v[b]));
        words.insert(words.end(), row.sizes.begin(), row.sizes.end());
        put(sizes, row.moved, words.data() + words.size() - row.sizes.size());
        for (int n : row.scalars) words.push_back(scalars[n]);
      }
      std::vector<int64_t> call;
      if (const auto* cuda = std::get_if<std::shared_ptr<CudaForeach>>(&s->function)) {
        const at::Tensor table = (*cuda)->table(stream, words, device());
        call.push_back(address(table));
        for (int n : s->scalars) call.push_back(scalars[n]);
        (*cuda)->launch.run(stream, call, 1);
        continue;
      }
      call = {reinterpret_cast<int64_t>(words.data()), int64_t(s->rows.size())};
      for (int n : s->scalars) call.push_back(scalars[n]);
      check(std::get<Function>(s->function)(call.data()), s->checks);
    } else {
      for (int slot : std::get<Free>(step).slots) v[slot].reset();
    }
  }
  std::vector<at::Tensor> results;
  for (int slot : outputs_) results.push_back(v[slot]);
  for (size_t i = 0; i < donations_.size(); ++i) {
    at::Tensor& made = results[donations_[i].first];
    at::Tensor& given = donated[i];
    const bool is_alike = made.sizes() == given.sizes() && made.strides() == given.strides() && made.scalar_type() == given.scalar_type();
    at::Tensor into = is_alike ? given : window(given, {made.sizes().vec(), made.strides().vec(), made.scalar_type()}, 0);
    if (address(made) != address(given)) into.copy_(made);
    made = std::move(into);
  }
  failing.release();
  has_run_ = true;
  return results;
}

}  // namespace torchlazy

// A call of a compiled callable without Python: its arguments are compared, its guards asked, its program run.
//
// Invariant: arguments that fit have the facts (lazy/compiled/template/argument_facts.py) of those that the check was
// made with: none needs or has a gradient, no two are on one memory, and none on memory of the state.
#pragma once

#include <c10/core/AutogradState.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <unordered_set>

#include "deferred.h"
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
      if (Py_TYPE(value) != row.type) return false;
      switch (row.kind) {
        case ANY: break;
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
  enum RowKind { SAME, ANY, BITS, TENSOR };
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
    } else if (is_free) {
      row.kind = ANY;
    } else if (PyFloat_CheckExact(o)) {
      row.kind = BITS, row.bits = bits_of(o);
    } else {
      row.is_plain = PyLong_CheckExact(o) || PyBool_Check(o) || PyUnicode_CheckExact(o) || PyBytes_CheckExact(o) || o == Py_None;
      TORCH_CHECK_VALUE(row.is_plain, "an argument of another kind");
    }
    return row;
  }

  const StorageImpl* fits(PyObject* value, const Row& row) const {
    const at::Tensor& t = THPVariable_Unpack(value);
    const TensorImpl* impl = t.unsafeGetTensorImpl();
    if (impl->key_set() != row.keys || t.scalar_type() != row.layout.dtype || t.device() != row.device) return nullptr;
    if (t.sizes() != c10::IntArrayRef(row.layout.sizes) || t.strides() != c10::IntArrayRef(row.layout.strides) || t.storage_offset() != row.offset) return nullptr;
    const auto* autograd = const_cast<TensorImpl*>(impl)->autograd_meta();
    if (autograd && (autograd->requires_grad() || autograd->grad().defined())) return nullptr;
    const StorageImpl* memory = impl->unsafe_storage().unsafeGetStorageImpl();
    if (!memory || memory->nbytes() != row.nbytes || memories_.count(reinterpret_cast<uintptr_t>(memory))) return nullptr;
    PyObject* own = PyObject_GenericGetDict(value, nullptr);
    if (!own) return PyErr_Clear(), nullptr;
    const bool is_bare = !PyDict_GET_SIZE(own);
    Py_DECREF(own);
    return is_bare ? memory : nullptr;
  }
};

// What the Python of a replay would do (lazy/compiled/replay/replay.py), where that is one program which writes nothing.
class ReplayedCall {
 public:
  struct Input { int64_t argument; at::Tensor kept; NativeProgram::Layout layout; };
  // An output of the program, seen so; or an argument (output -1); or an object.
  struct Result { int64_t output, argument; NativeProgram::Layout layout; int64_t offset; bool is_marked; py::object value; };

  ReplayedCall(std::shared_ptr<ArgumentCheck> arguments, py::object holds, std::shared_ptr<NativeProgram> program, const py::sequence& scalars, const py::list& inputs, const py::list& results)
      : arguments_(std::move(arguments)), holds_(std::move(holds)), program_(std::move(program)), scalars_(program_->words_of(scalars)) {
    for (auto item : inputs) {  // (position of the argument, None, layout), or (-1, tensor, layout)
      auto t = py::cast<py::tuple>(item);
      Input input{py::cast<int64_t>(t[0]), {}, NativeProgram::layout_of(t[2])};
      if (input.argument < 0) input.kept = NativeProgram::window(py::cast<at::Tensor>(t[1]), input.layout, 0);
      inputs_.push_back(std::move(input));
    }
    for (auto item : results) {  // ("output", number, layout, offset, is marked), ("argument", position), ("object", value)
      auto t = py::cast<py::tuple>(item);
      const auto kind = py::cast<std::string>(t[0]);
      Result r{-1, -1, {}, 0, false, py::none()};
      if (kind == "output") r.output = py::cast<int64_t>(t[1]), r.layout = NativeProgram::layout_of(t[2]), r.offset = py::cast<int64_t>(t[3]), r.is_marked = py::cast<bool>(t[4]);
      else if (kind == "argument") r.argument = py::cast<int64_t>(t[1]);
      else r.value = t[1];
      results_.push_back(std::move(r));
    }
  }

  // The results in flat order; None where the call is another one, or the program raised: nothing was done then.
  py::object run(const py::tuple& given) const {
    if (!arguments_->fit(given.ptr())) return py::none();
    if (!py::cast<bool>(holds_())) return py::none();
    std::vector<at::Tensor> made;
    try {
      settle_pending();
      std::vector<at::Tensor> inputs;
      inputs.reserve(inputs_.size());
      for (const Input& i : inputs_)
        inputs.push_back(i.argument < 0 ? i.kept : NativeProgram::window(THPVariable_Unpack(PyTuple_GET_ITEM(given.ptr(), i.argument)), i.layout, 0));
      py::gil_scoped_release release;
      c10::InferenceMode apart(false);
      at::AutoDispatchBelowAutograd below;
      c10::impl::ExcludeDispatchKeyGuard alone(c10::autocast_dispatch_keyset | DispatchKeySet(KEY));
      made = program_->run(inputs, scalars_);
    } catch (const py::error_already_set&) {
      throw;
    } catch (const std::exception&) {
      return py::none();  // Python does it again, and says what is wrong
    }
    py::list found(results_.size());
    for (size_t n = 0; n < results_.size(); ++n) {
      const Result& r = results_[n];
      if (r.output >= 0) {
        at::Tensor t = NativeProgram::window(made[r.output], r.layout, r.offset);
        if (r.is_marked) mark(t);
        found[n] = py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(t)));
      } else {
        found[n] = r.argument >= 0 ? py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(given.ptr(), r.argument)) : r.value;
      }
    }
    return found;
  }

 private:
  std::shared_ptr<ArgumentCheck> arguments_;
  py::object holds_;
  std::shared_ptr<NativeProgram> program_;
  NativeProgram::Words scalars_;
  std::vector<Input> inputs_;
  std::vector<Result> results_;

  static void settle_pending();  // what the recorder has deferred is computed: the program reads memory past it
};

}  // namespace torchlazy

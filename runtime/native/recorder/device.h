// The device "lazy": which results of an operator are on it, and how tensors come there and leave.
//
// To all of torch's C++ a lazy tensor is one of the device that computes it. Python is told "lazy": its `device`, and
// where it says so as a destination.
#pragma once

#include <ATen/ATen.h>
#include <ATen/ops/to_compositeimplicitautograd_dispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <string_view>

#include "deferred.h"
#include "operators.h"

namespace torchlazy {

inline thread_local bool marks = false;  // what the operator that came makes is on the lazy device
inline std::atomic<bool> any_marked{false};
inline at::Device target{at::kCPU};  // which computes it
inline thread_local bool tells_target = false;  // Python is told the device that computes, whoever asks
inline thread_local bool leaves = false;        // Python asks for a tensor on another device

// Whether torchlazy's own Python asks, which is told the device that computes: it does where this thread's operators are
// not recorded here (in a compiled call, and in its backward), beside the user's code that runs there.
inline bool asks_itself() {
  if (tells_target) return true;
  if (!c10::impl::tls_is_dispatch_key_excluded(KEY)) return false;
  PyObject* globals = PyEval_GetGlobals();
  PyObject* name = globals ? PyDict_GetItemString(globals, "__name__") : nullptr;
  const char* text = name && PyUnicode_Check(name) ? PyUnicode_AsUTF8(name) : nullptr;
  return !text || std::string_view(text).substr(0, 10) == "torchlazy.";  // generated code has no name
}

inline void check_index(const at::Device& device) {
  TORCH_CHECK(!device.is_lazy() || device.index() <= 0, "torchlazy: there is no device '", device.str(), "': write 'lazy'");
}

inline void made(const at::Tensor& t) {
  if (marks && t.device() == target) mark(t);
  else watch(t);
}

// Whether results of an operator are on the lazy device, as long as it lives.
struct Marking {
  bool before = marks;
  bool moves_to_lazy = false;  // which the kernels of the lazy device do: they know what kind of tensor is made
  Marking(const Operator& op, torch::jit::Stack& stack) {
    if (!any_marked.load(std::memory_order_relaxed)) return;
    const size_t first = stack.size() - op.arguments;
    const TensorImpl* marked = nullptr;
    for (size_t i = first; !marked && i < stack.size(); ++i) {
      const auto look = [&](const at::Tensor& t) {
        if (!marked && t.defined() && is_marked(t)) marked = t.unsafeGetTensorImpl();
      };
      if (stack[i].isTensor()) {
        if (is_marked(stack[i].unsafeToTensorImpl())) marked = stack[i].unsafeToTensorImpl();
      } else if (stack[i].isTensorList()) {
        for (const at::Tensor& t : stack[i].toTensorVector()) look(t);
      } else if (stack[i].isList() && !stack[i].isIntList() && !stack[i].isDoubleList() && !stack[i].isBoolList()) {
        for (const c10::IValue& item : stack[i].toListRef())
          if (item.isTensor()) look(item.toTensor());
      }
    }
    marks = marked;
    if (op.device < 0 || !stack[first + op.device].isDevice()) return;
    const at::Device wanted = stack[first + op.device].toDevice();
    check_index(wanted);
    if (wanted.is_lazy() && !marked) {
      moves_to_lazy = true;
    } else if (wanted.is_lazy()) {
      stack[first + op.device] = target;
    } else if (marked) {
      marks = wanted == marked->device() && !leaves;  // torch's own C++ names the device of its argument
    }
  }
  ~Marking() { marks = before; }
  Marking(const Marking&) = delete;
};

// A copy to the lazy device whose gradient goes back to where the tensor was.
struct ToLazy : torch::autograd::Function<ToLazy> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return at::_to_copy(x, x.options().device(at::kLazy)); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list gradients) {
    at::Tensor& g = gradients[0];
    if (!g.defined() || !is_marked(g)) return gradients;
    const bool before = leaves;
    leaves = true;
    g = at::_to_copy(g, g.options());
    leaves = before;
    return gradients;
  }
};

// `Tensor.to`, which compares devices: a lazy tensor is on the lazy device, and not on the one that computes it.
inline at::Tensor moved(
    const at::Tensor& self, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout, std::optional<at::Device> device,
    std::optional<bool> pin_memory, bool non_blocking, bool copy, std::optional<at::MemoryFormat> format) {
  if (device) check_index(*device);
  if (device && is_marked(self)) {
    if (leaves && !device->is_lazy()) copy = true;
    else if (device->is_lazy() || *device == self.device()) device.reset();
  } else if (device && device->is_lazy() && self.requires_grad() && at::GradMode::is_enabled()) {
    return at::compositeimplicitautograd::to(ToLazy::apply(self), dtype, layout, {}, pin_memory, non_blocking, false, format);
  }
  return at::compositeimplicitautograd::to(self, dtype, layout, device, pin_memory, non_blocking, copy, format);
}

inline at::Tensor moved_to_device(
    const at::Tensor& self, at::Device device, at::ScalarType dtype, bool non_blocking, bool copy, std::optional<at::MemoryFormat> format) {
  return moved(self, dtype, {}, device, {}, non_blocking, copy, format);
}

// Python's `Tensor.device`, `is_cpu` and `is_cuda`.
template <int I>
struct Fact {
  static inline getter original = nullptr;
  static inline void* closure = nullptr;
  static PyObject* get(PyObject* self, void*) {
    if (any_marked.load(std::memory_order_relaxed) && THPVariable_Check(self) && is_marked(THPVariable_Unpack(self)) &&
        !asks_itself()) {
      if constexpr (I == 0) return THPDevice_New(at::Device(at::kLazy));
      Py_RETURN_FALSE;
    }
    return original(self, closure);
  }
  static inline PyGetSetDef definition{};
  static void install(PyTypeObject* kind, const char* name) {
    const pybind11::object found = pybind11::reinterpret_borrow<pybind11::object>(reinterpret_cast<PyObject*>(kind)).attr(name);
    TORCH_CHECK(Py_TYPE(found.ptr()) == &PyGetSetDescr_Type, "torchlazy: Tensor.", name, " is no attribute of torch's own C++");
    auto* descriptor = reinterpret_cast<PyGetSetDescrObject*>(found.ptr());
    definition = *descriptor->d_getset;
    original = definition.get, closure = definition.closure;
    definition.get = &get;
    descriptor->d_getset = &definition;
  }
};

// Python's `Tensor.to`, `cpu` and `cuda`: that they name a device is not seen below, nor that another tensor is lazy.
template <int I>
struct Move {
  static inline PyCFunctionWithKeywords original = nullptr;
  static PyObject* call(PyObject* self, PyObject* args, PyObject* kwargs) {
    const Py_ssize_t n = PyTuple_GET_SIZE(args);
    if (!THPVariable_Check(self)) return original(self, args, kwargs);
    pybind11::list given;
    pybind11::dict words = kwargs ? pybind11::reinterpret_steal<pybind11::dict>(PyDict_Copy(kwargs)) : pybind11::dict();
    bool names_device = I;
    for (Py_ssize_t i = 0; i < n; ++i) given.append(pybind11::handle(PyTuple_GET_ITEM(args, i)));
    if constexpr (!I) {
      const bool is_word = !n && words.contains("other");
      const pybind11::object first = n ? pybind11::object(given[0]) : is_word ? pybind11::object(words["other"]) : pybind11::object();
      if (first && THPVariable_Check(first.ptr())) {
        if (is_word) words.attr("pop")("other");
        else given.attr("pop")(0);
        given.insert(0, first.attr("dtype"));
        given.insert(0, first.attr("device"));
        names_device = true;
      } else {
        names_device = words.contains("device") || (first && (THPDevice_Check(first.ptr()) || PyUnicode_Check(first.ptr()) || PyLong_Check(first.ptr())));
      }
    }
    const bool before = leaves;
    if (!asks_itself()) leaves = names_device && is_marked(THPVariable_Unpack(self));  // else a mode of ours passes it on
    PyObject* result = original(self, pybind11::tuple(given).ptr(), words.ptr());
    leaves = before;
    return result;
  }
  static inline PyMethodDef definition{};
};

// The tensor of the device that computes, on the same memory. Not for operators that are recorded: they come there unseen.
inline at::Tensor unmarked(const at::Tensor& t) {
  at::Tensor same = t.detach();
  mark(same, false);
  return same;
}

// Python's `new_tensor` and `new`, which look for a tensor's device among its keys.
template <int I>
struct New {
  static inline PyCFunctionWithKeywords original = nullptr;
  static PyObject* call(PyObject* self, PyObject* args, PyObject* kwargs) {
    const bool is_lazy = THPVariable_Check(self) && is_marked(THPVariable_Unpack(self));
    if (!is_lazy) return original(self, args, kwargs);
    const pybind11::object same = pybind11::cast(unmarked(THPVariable_Unpack(self)));
    PyObject* result = original(same.ptr(), args, kwargs);
    if (result && !asks_itself() && !(kwargs && PyDict_GetItemString(kwargs, "device"))) mark(THPVariable_Unpack(result));
    return result;
  }
  static inline PyMethodDef definition{};
};

// Mark the tensors in what a call gave: in tuples, lists and dictionaries.
inline void mark_all(PyObject* value) {
  if (THPVariable_Check(value)) {
    const at::Tensor& t = THPVariable_Unpack(value);
    if (t.defined() && t.device() == target) mark(t);
  } else if (PyTuple_Check(value)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) mark_all(PyTuple_GET_ITEM(value, i));
  } else if (PyList_Check(value)) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i) mark_all(PyList_GET_ITEM(value, i));
  } else if (PyDict_Check(value)) {
    PyObject *key, *item;
    for (Py_ssize_t at = 0; PyDict_Next(value, &at, &key, &item);) mark_all(item);
  }
}

inline bool any_marked_in(PyObject* value) {
  if (THPVariable_Check(value)) return is_marked(THPVariable_Unpack(value));
  if (PyTuple_Check(value)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i)
      if (any_marked_in(PyTuple_GET_ITEM(value, i))) return true;
  } else if (PyList_Check(value)) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i)
      if (any_marked_in(PyList_GET_ITEM(value, i))) return true;
  } else if (PyDict_Check(value)) {
    PyObject *key, *item;
    for (Py_ssize_t at = 0; PyDict_Next(value, &at, &key, &item);)
      if (any_marked_in(item)) return true;
  }
  return false;
}

// Mark what an operator made that was not recorded here, as `Marking` does.
inline void mark_result(PyObject* result, PyObject* args, PyObject* kwargs) {
  PyObject* device = PyDict_GetItemString(kwargs, "device");
  const bool names_lazy = device && THPDevice_Check(device) && reinterpret_cast<THPDevice*>(device)->device.is_lazy();
  if (names_lazy || (!(device && leaves) && (any_marked_in(args) || any_marked_in(kwargs)))) mark_all(result);
}

// In place: the method stays the very object that tables of other code hold.
template <class M>
void install_method(PyTypeObject* kind, const char* name) {
  const pybind11::object found = pybind11::reinterpret_borrow<pybind11::object>(reinterpret_cast<PyObject*>(kind)).attr(name);
  TORCH_CHECK(Py_TYPE(found.ptr()) == &PyMethodDescr_Type, "torchlazy: Tensor.", name, " is no method of torch's own C++");
  auto* descriptor = reinterpret_cast<PyMethodDescrObject*>(found.ptr());
  TORCH_CHECK(descriptor->d_method->ml_flags == (METH_VARARGS | METH_KEYWORDS), "torchlazy: Tensor.", name, " takes other arguments");
  M::definition = *descriptor->d_method;
  M::original = reinterpret_cast<PyCFunctionWithKeywords>(reinterpret_cast<void (*)()>(M::definition.ml_meth));
  M::definition.ml_meth = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&M::call));
  descriptor->d_method = &M::definition;
}

inline void install_in_python(pybind11::type tensor) {
  auto* kind = reinterpret_cast<PyTypeObject*>(tensor.ptr());
  Fact<0>::install(kind, "device");
  Fact<1>::install(kind, "is_cpu");
  Fact<2>::install(kind, "is_cuda");
  install_method<Move<0>>(kind, "to");
  install_method<Move<1>>(kind, "cpu");
  install_method<Move<2>>(kind, "cuda");
  install_method<New<0>>(kind, "new_tensor");
  install_method<New<1>>(kind, "new");
}

}  // namespace torchlazy

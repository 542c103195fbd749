// Tells Python which C functions of a list Python code calls in this thread, such as those that read a clock.
#pragma once

#include <torch/csrc/python_headers.h>
#include <pybind11/pybind11.h>

#include <unordered_set>

namespace torchlazy {

namespace py = pybind11;

// Methods are compared by what implements them: `datetime.now` is another object each time that it is looked up.
class WatchedCalls {
 public:
  // False where a profiler sees the calls of this thread already, which then keeps its place.
  static bool begin(const py::list& functions, py::object told) {
    if (profiled()) return false;
    auto& watch = the();
    watch.methods_.clear();
    for (auto function : functions) watch.methods_.insert(method_of(function.ptr()));
    PyEval_SetProfile(&saw, told.ptr());
    return true;
  }
  static void end() { PyEval_SetProfile(nullptr, nullptr); }

 private:
  static bool profiled() { return !py::module_::import("sys").attr("getprofile")().is_none(); }

  static WatchedCalls& the() {
    static auto* watch = new WatchedCalls;
    return *watch;
  }

  static const PyMethodDef* method_of(PyObject* function) {
    if (PyCFunction_Check(function)) return reinterpret_cast<PyCFunctionObject*>(function)->m_ml;
    if (Py_IS_TYPE(function, &PyMethodDescr_Type)) return reinterpret_cast<PyMethodDescrObject*>(function)->d_method;
    return nullptr;
  }

  // What the interpreter calls for each call and return; `told` gets the function.
  static int saw(PyObject* told, PyFrameObject*, int what, PyObject* function) {
    if (what != PyTrace_C_CALL || !function) return 0;
    const PyMethodDef* method = method_of(function);
    if (!method || !the().methods_.count(method)) return 0;
    PyObject* answer = PyObject_CallOneArg(told, function);
    if (!answer) return -1;
    Py_DECREF(answer);
    return 0;
  }

  std::unordered_set<const PyMethodDef*> methods_;
};

}  // namespace torchlazy

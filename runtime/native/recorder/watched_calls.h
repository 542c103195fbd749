// Tells Python which C functions of a list are called in this thread, such as those that read a clock.
#pragma once

#include <torch/csrc/python_headers.h>
#include <pybind11/pybind11.h>

#include <array>
#include <stdexcept>
#include <utility>
#include <vector>

namespace torchlazy {

namespace py = pybind11;

// While it watches, the definitions of these functions lead through functions of ours. Every way to a function reads
// its definition: other names, subclasses, calls from C, and instructions that are specialized for it. The interpreter
// goes on as always, which under a profiler, that would see calls too, takes twice the time.
class WatchedCalls {
 public:
  // `told` gets the function of the list that is called, and may raise. False where another thread watches.
  static bool begin(const py::list& functions, py::object told) {
    if (!watched().empty()) return false;
    for (auto function : functions) {
      PyMethodDef* definition = definition_of(function.ptr());
      if (!definition || is_watched(definition)) continue;
      if (watched().size() == MOST) throw std::length_error("torchlazy: more functions than WatchedCalls::MOST");
      auto ours = through(watched().size(), definition->ml_flags);
      if (!ours) continue;
      watched().push_back({definition, definition->ml_meth, function.ptr()});
      definition->ml_meth = ours;
      Py_INCREF(function.ptr());
    }
    thread() = PyThreadState_Get();
    told_of() = told.release().ptr();
    return true;
  }

  static void end() {
    for (auto& one : watched()) one.definition->ml_meth = one.real;
    auto before = std::move(watched());
    watched().clear();
    for (auto& one : before) Py_DECREF(one.function);
    Py_CLEAR(told_of());
  }

 private:
  static constexpr size_t MOST = 128;
  struct Watched {
    PyMethodDef* definition;
    PyCFunction real;
    PyObject* function;
  };

  static std::vector<Watched>& watched() {
    static auto* all = new std::vector<Watched>;
    return *all;
  }
  static PyThreadState*& thread() {
    static PyThreadState* of = nullptr;
    return of;
  }
  static PyObject*& told_of() {
    static PyObject* told = nullptr;
    return told;
  }

  static PyMethodDef* definition_of(PyObject* function) {
    if (PyCFunction_Check(function)) return reinterpret_cast<PyCFunctionObject*>(function)->m_ml;
    if (Py_IS_TYPE(function, &PyMethodDescr_Type)) return reinterpret_cast<PyMethodDescrObject*>(function)->d_method;
    return nullptr;
  }
  static bool is_watched(PyMethodDef* definition) {
    for (auto& one : watched())
      if (one.definition == definition) return true;
    return false;
  }

  // The real function `at`; null where `told` raised.
  template <class Function>
  static Function real(size_t at) {
    auto found = reinterpret_cast<Function>(reinterpret_cast<void*>(watched()[at].real));
    PyObject* told = told_of();
    if (!told || PyThreadState_Get() != thread()) return found;
    thread() = nullptr;  // what `told` itself calls does not count
    PyObject* answer = PyObject_CallOneArg(told, watched()[at].function);
    thread() = PyThreadState_Get();
    Py_XDECREF(answer);
    return answer ? found : nullptr;
  }

  // Ours, one for each place and each way of passing arguments.
  template <size_t at>
  struct Through {
    static PyObject* one(PyObject* self, PyObject* arguments) {
      auto function = real<PyCFunction>(at);
      return function ? function(self, arguments) : nullptr;
    }
    static PyObject* named(PyObject* self, PyObject* arguments, PyObject* names) {
      auto function = real<PyCFunctionWithKeywords>(at);
      return function ? function(self, arguments, names) : nullptr;
    }
    static PyObject* fast(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
      auto function = real<PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t)>(at);
      return function ? function(self, arguments, count) : nullptr;
    }
    static PyObject* fast_named(PyObject* self, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
      auto function = real<PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*)>(at);
      return function ? function(self, arguments, count, names) : nullptr;
    }
    static PyObject* of_class(
        PyObject* self, PyTypeObject* kind, PyObject* const* arguments, size_t count, PyObject* names) {
      auto function = real<PyCMethod>(at);
      return function ? function(self, kind, arguments, count, names) : nullptr;
    }
  };

  struct Ways {
    PyCFunction one, named, fast, fast_named, of_class;
  };
  template <size_t... at>
  static constexpr std::array<Ways, sizeof...(at)> ways(std::index_sequence<at...>) {
    return {Ways{
        &Through<at>::one, (PyCFunction)(void (*)(void))&Through<at>::named,
        (PyCFunction)(void (*)(void))&Through<at>::fast, (PyCFunction)(void (*)(void))&Through<at>::fast_named,
        (PyCFunction)(void (*)(void))&Through<at>::of_class}...};
  }

  static PyCFunction through(size_t at, int flags) {
    static const auto all = ways(std::make_index_sequence<MOST>());
    switch (flags & (METH_VARARGS | METH_KEYWORDS | METH_NOARGS | METH_O | METH_FASTCALL | METH_METHOD)) {
      case METH_NOARGS:
      case METH_O:
      case METH_VARARGS:
        return all[at].one;
      case METH_VARARGS | METH_KEYWORDS:
        return all[at].named;
      case METH_FASTCALL:
        return all[at].fast;
      case METH_FASTCALL | METH_KEYWORDS:
        return all[at].fast_named;
      case METH_METHOD | METH_FASTCALL | METH_KEYWORDS:
        return all[at].of_class;
      default:
        return nullptr;
    }
  }
};

}  // namespace torchlazy

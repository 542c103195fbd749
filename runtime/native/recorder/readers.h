// Methods of torch's own C++ that read a tensor's memory, or tell a GPU's streams of each other, without an operator.
#pragma once

#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <pybind11/pybind11.h>

#include "device.h"

#include <array>
#include <deque>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace torchlazy {

namespace py = pybind11;

// Inside, this thread's operators are not recorded.
struct Pause {
  const int before = begin();
  Pause() = default;
  Pause(const Pause&) = delete;
  ~Pause() { end(before); }
  static int begin() {
    const auto& keys = c10::impl::tls_local_dispatch_key_set();
    const int before = keys.included_.has(KEY) | keys.excluded_.has(KEY) << 1;
    c10::impl::tls_set_dispatch_key_included(KEY, false);
    c10::impl::tls_set_dispatch_key_excluded(KEY, true);
    return before;
  }
  static void end(int before) {
    c10::impl::tls_set_dispatch_key_included(KEY, before & 1);
    c10::impl::tls_set_dispatch_key_excluded(KEY, before & 2);
  }
};

// What is deferred is computed before such a method runs. Its C function is exchanged in place, once: it stays the very
// object that tables of other code and function modes know, and nothing is switched where a block begins or ends.
class Readers {
 public:
  // One of the two that a method is called with.
  struct Memory {
    const at::Tensor* tensor;
    StorageImpl* storage;
  };
  // What is done before a method is called; returns whether its own operators are not to be recorded. It may raise.
  using Before = bool (*)(const std::string& name, const std::vector<Memory>& given);

  static void install(const py::object& found, const std::string& name, Before before) {
    static auto* installed = new std::unordered_set<PyObject*>;  // methods live as long as torch
    if (!installed->insert(found.ptr()).second) return;
    const size_t number = slots().size();
    TORCH_CHECK(number < MOST, "torchlazy: more than ", MOST, " methods to watch");
    Slot& slot = slots().emplace_back(Slot{nullptr, name, before, {}});
    if (Py_IS_TYPE(found.ptr(), &PyWrapperDescr_Type)) {  // a slot's
      auto* descriptor = reinterpret_cast<PyWrapperDescrObject*>(found.ptr());
      slot.original = reinterpret_cast<Any>(descriptor->d_wrapped);
      descriptor->d_wrapped = reinterpret_cast<void*>(name.ends_with("__setitem__") ? as_any(all_sets(All())[number]) : as_any(all_plain(All())[number]));
      return;
    }
    const bool is_method = Py_IS_TYPE(found.ptr(), &PyMethodDescr_Type);
    TORCH_CHECK(is_method || PyCFunction_CheckExact(found.ptr()), "torchlazy: ", name, " is no method of torch's own C++");
    auto& definition = is_method ? reinterpret_cast<PyMethodDescrObject*>(found.ptr())->d_method : reinterpret_cast<PyCFunctionObject*>(found.ptr())->m_ml;
    const int takes = definition->ml_flags & ~METH_COEXIST;
    const bool has_words = takes == (METH_VARARGS | METH_KEYWORDS);  // else without arguments, with one or with a tuple of them
    TORCH_CHECK(has_words || takes == METH_NOARGS || takes == METH_O || takes == METH_VARARGS, "torchlazy: ", name, " takes other arguments");
    slot.original = as_any(definition->ml_meth);
    slot.definition = *definition;
    slot.definition.ml_meth = reinterpret_cast<PyCFunction>(has_words ? as_any(all_with_words(All())[number]) : as_any(all_plain(All())[number]));
    definition = &slot.definition;
  }

 private:
  static constexpr size_t MOST = 48;
  using All = std::make_index_sequence<MOST>;
  using Any = void (*)();
  using Sets = int (*)(PyObject*, PyObject*, PyObject*);
  struct Slot {
    Any original;
    std::string name;
    Before before;
    PyMethodDef definition;
  };
  static std::deque<Slot>& slots() {  // which stay where they are
    static auto* slots = new std::deque<Slot>;
    return *slots;
  }
  template <class F>
  static Any as_any(F function) { return reinterpret_cast<Any>(function); }

  // Tensors and storages that a call is given: itself, its only argument or those of a tuple.
  static std::vector<Memory> memory_of(PyObject* self, PyObject* args) {
    std::vector<Memory> found;
    const auto add = [&](PyObject* value) {
      if (!value) return;
      if (THPVariable_Check(value)) found.push_back({&THPVariable_Unpack(value), nullptr});
      else if (torch::isStorage(value)) found.push_back({nullptr, torch::createStorage(value).unsafeGetStorageImpl()});  // typed ones, too
    };
    add(self);
    if (!args || !PyTuple_Check(args)) add(args);
    else for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) add(PyTuple_GET_ITEM(args, i));
    return found;
  }
  // `original` as soon as what it reads is there; `failed` with Python's error where that raises.
  template <class F, class R>
  static R call(const Slot& slot, PyObject* self, PyObject* args, const F& original, R failed) {
    if (!pending_memories && !any_marked && !c10::impl::tls_is_dispatch_key_included(KEY)) return original();
    bool is_apart = false;
    try {
      is_apart = slot.before(slot.name, memory_of(self, args));
    } catch (py::error_already_set& error) {
      error.restore();
      return failed;
    } catch (const std::exception&) {
      torch::translate_exception_to_python(std::current_exception());
      return failed;
    }
    if (!is_apart) return original();
    const Pause pause;
    return original();
  }
  // A function of C has nothing that says which it is: one for each place.
  template <size_t I>
  static PyObject* plain(PyObject* self, PyObject* args) {
    const Slot& slot = slots()[I];
    return call(slot, self, args, [&] { return reinterpret_cast<PyCFunction>(slot.original)(self, args); }, static_cast<PyObject*>(nullptr));
  }
  template <size_t I>
  static PyObject* with_words(PyObject* self, PyObject* args, PyObject* words) {
    const Slot& slot = slots()[I];
    return call(slot, self, args, [&] { return reinterpret_cast<PyCFunctionWithKeywords>(slot.original)(self, args, words); }, static_cast<PyObject*>(nullptr));
  }
  template <size_t I>
  static int sets(PyObject* self, PyObject* key, PyObject* value) {
    const Slot& slot = slots()[I];
    return call(slot, self, key, [&] { return reinterpret_cast<Sets>(slot.original)(self, key, value); }, -1);
  }
  template <size_t... I>
  static std::array<PyCFunction, MOST> all_plain(std::index_sequence<I...>) { return {&plain<I>...}; }
  template <size_t... I>
  static std::array<PyCFunctionWithKeywords, MOST> all_with_words(std::index_sequence<I...>) { return {&with_words<I>...}; }
  template <size_t... I>
  static std::array<Sets, MOST> all_sets(std::index_sequence<I...>) { return {&sets<I>...}; }
};

}  // namespace torchlazy

// A tensor whose memory may not have its value yet: whoever asks for the memory gets it computed first.
//
// Every access to data, torch's own and that of kernels compiled elsewhere, passes has_storage() or storage(). The class
// adds no data members, so that a plain TensorImpl becomes one by exchanging its vtable pointer. That is undefined in
// C++, and holds for the compilers that build torch: `exchange_works` tests it when the library is loaded.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/TensorBase.h>
#include <Python.h>
#include <c10/core/Allocator.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <atomic>

#include "memory.h"

namespace torch::autograd {
int get_current_graph_task_id();
}

namespace torchlazy {

inline std::atomic<int> pending_memories{0};  // how many memories wait for their value
inline thread_local int busy = 0;             // this thread runs operators for the recorder, or knows what it does
void compute_for_reader(StorageImpl* storage);
void forget_origin(const StorageImpl* storage);

constexpr c10::DispatchKey KEY = c10::DispatchKey::Fake;  // below autograd, autocast and Python's modes, above all kernels

struct Deferred final : TensorImpl {
  using TensorImpl::TensorImpl;
  void need() const {
    if (busy) return;
    auto* storage = storage_.unsafeGetStorageImpl();
    if (!storage) return;
    if (Origins::any.load(std::memory_order_relaxed)) forget_origin(storage);  // who has its address may write there
    if (C10_LIKELY(!pending_memories.load(std::memory_order_relaxed))) return;
    // The backward engine asks whether it may add in place, without the interpreter's lock: it reads no values.
    if (torch::autograd::get_current_graph_task_id() != -1 && !PyGILState_Check()) return;
    compute_for_reader(storage);
  }
  bool has_storage() const override { return need(), bool(storage_); }
  const c10::Storage& storage() const override { return need(), storage_; }
  void mark(bool on) { key_set_ = on ? key_set_.add(KEY) : key_set_.remove(KEY); }
  template <class Version>
  c10::intrusive_ptr<TensorImpl> copied(Version&& version, bool allow) const {
    auto copy = c10::make_intrusive<Deferred>(VIEW, c10::Storage(storage_), key_set_, data_type_);
    copy_tensor_metadata(this, copy.get(), std::forward<Version>(version), allow);
    return copy;
  }
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version, bool allow) const override {
    return a_mode_makes_it() ? TensorImpl::shallow_copy_and_detach(version, allow) : copied(version, allow);
  }
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version, bool allow) const override {
    return a_mode_makes_it() ? TensorImpl::shallow_copy_and_detach(std::move(version), allow) : copied(std::move(version), allow);
  }
  static bool a_mode_makes_it() {  // a mode in Python, which TensorImpl asks for a detached tensor
    return c10::impl::TorchDispatchModeTLS::stack_len() > 0 && !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python);
  }
};
static_assert(sizeof(Deferred) == sizeof(TensorImpl));

using Vtable = const void*;
inline Vtable& vtable_of(const TensorImpl* t) { return *reinterpret_cast<Vtable*>(const_cast<TensorImpl*>(t)); }
inline Vtable plain_vtable = nullptr, deferred_vtable = nullptr;

// Readers of its memory are seen from now on; a tensor of Python's dispatch has none, and copies of its own.
inline void watch(const at::TensorBase& t) {
  if (t.defined() && !t.unsafeGetTensorImpl()->is_python_dispatch() && vtable_of(t.unsafeGetTensorImpl()) == plain_vtable) vtable_of(t.unsafeGetTensorImpl()) = deferred_vtable;
}

// A tensor of the device "lazy" is one of the device that computes it which carries the key: its operators come to the
// recorder from wherever they are called. Views, detached and saved tensors carry what they are made of.
inline bool is_marked(const TensorImpl* t) { return t->key_set().has(KEY); }
inline bool is_marked(const at::TensorBase& t) { return is_marked(t.unsafeGetTensorImpl()); }

inline void mark(const at::TensorBase& t, bool on = true) {
  watch(t);
  if (t.defined()) static_cast<Deferred*>(t.unsafeGetTensorImpl())->mark(on);  // adds no data members: see above
}

inline bool exchange_works() {
  auto plain = at::detail::empty_cpu({1}, at::kFloat);
  auto deferred = c10::make_intrusive<Deferred>(c10::DispatchKeySet(c10::DispatchKey::CPU), caffe2::TypeMeta::Make<float>(), at::kCPU);
  plain_vtable = vtable_of(plain.unsafeGetTensorImpl());
  deferred_vtable = vtable_of(deferred.get());
  watch(plain);
  const TensorImpl* volatile impl = plain.unsafeGetTensorImpl();
  return plain_vtable != deferred_vtable && vtable_of(impl) == deferred_vtable && impl->has_storage() &&
      plain.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(), true)->has_storage();
}

// Memory without a value gives an error to whoever reads it past Deferred (an old alias, in C++), not a wrong number:
// where torch can take that back (2.11 cannot).
template <class S>
void forbid_access(S* storage) {
  if constexpr (requires { storage->clear_data_ptr_access_error_msg_(); })
    storage->release_data_and_set_meta_custom_data_ptr_error_msg_("torchlazy: this memory waits for a deferred value; call torchlazy.flush() before other code reads it");
}
template <class S>
void allow_access(S* storage) {
  if constexpr (requires { storage->clear_data_ptr_access_error_msg_(); }) storage->clear_data_ptr_access_error_msg_();
}

}  // namespace torchlazy

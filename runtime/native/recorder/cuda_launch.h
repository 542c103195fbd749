// Kernels of Triton, launched through the driver: what runtime/native/launch.py does for Python.
#pragma once

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <torch/csrc/utils/pybind.h>

#include <list>
#include <mutex>

namespace torchlazy {

namespace py = pybind11;

// The current stream of a device as the driver knows it. The library is not linked with torch's for CUDA, which is not
// there in builds for the CPU.
inline void* raw_stream(int device) {
  using Handle = void* (*)(const c10::Stream*);  // CUDAStream::stream() of a CUDAStream, which is a Stream
  static const Handle handle = [] {
    void* library = dlopen("libc10_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    void* found = library ? dlsym(library, "_ZNK3c104cuda10CUDAStream6streamEv") : nullptr;
    TORCH_CHECK(found, "torch's streams are not where they were");
    return reinterpret_cast<Handle>(found);
  }();
  const c10::Stream current = c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(at::Device(at::kCUDA, device));
  return handle(&current);
}

// Whether somebody captures a CUDA graph on the stream.
inline bool is_capturing(void* stream) {
  using Ask = int (*)(void*, int*);
  static const Ask ask = [] {
    void* library = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY);
    return library ? reinterpret_cast<Ask>(dlsym(library, "cuStreamIsCapturing")) : nullptr;
  }();
  int status = 0;
  return ask && !ask(stream, &status) && status;
}

// A Python object that C++ keeps, and may let go of without the interpreter's lock.
inline std::shared_ptr<PyObject> kept_object(const py::handle& h) {
  return {h.inc_ref().ptr(), [](PyObject* object) {
            if (!Py_IsInitialized()) return;
            py::gil_scoped_acquire gil;
            Py_DECREF(object);
          }};
}

struct CudaLaunch {
  static constexpr size_t MOST_PARAMETERS = 120;
  using Driver = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  using Text = int (*)(int, const char**);
  Driver driver;
  Text text;
  void* function;
  unsigned threads, shared, grid;
  std::vector<int64_t> fixed, sizes;            // addresses behind the pointers, and numbers behind the scalars
  std::shared_ptr<PyObject> unaligned, memory;  // the launcher for addresses that are no multiples of 16, or None

  explicit CudaLaunch(const py::tuple& t)
      : driver(reinterpret_cast<Driver>(py::cast<uintptr_t>(t[0]))), text(reinterpret_cast<Text>(py::cast<uintptr_t>(t[1]))), function(reinterpret_cast<void*>(py::cast<uintptr_t>(t[2]))), threads(py::cast<unsigned>(t[3])), shared(py::cast<unsigned>(t[4])), grid(py::cast<unsigned>(t[5])), fixed(py::cast<std::vector<int64_t>>(t[6])), sizes(py::cast<std::vector<int64_t>>(t[7])), unaligned(kept_object(t[8])), memory(kept_object(t[9])) {
    TORCH_CHECK_VALUE(grid, "a launch of nothing");
  }

  // `words`: addresses, `pointers` of them, then scalars.
  void run(void* stream, const std::vector<int64_t>& words, size_t pointers) const {
    int64_t low = 0;
    for (size_t i = 0; i < pointers; ++i) low |= words[i];
    if ((low & 15) && unaligned.get() != Py_None) return run_in_python(stream, words);
    void* parameters[MOST_PARAMETERS + 2];
    size_t used = 0;
    TORCH_CHECK(words.size() + fixed.size() + sizes.size() <= MOST_PARAMETERS, "a kernel of too many parameters");
    const auto add = [&](const int64_t& word) { parameters[used++] = const_cast<int64_t*>(&word); };
    for (size_t i = 0; i < pointers; ++i) add(words[i]);
    for (const int64_t& word : fixed) add(word);
    for (size_t i = pointers; i < words.size(); ++i) add(words[i]);
    for (const int64_t& word : sizes) add(word);
    static const int64_t none = 0;
    add(none), add(none);  // scratch memory of the kernel and of a profiler
    check(driver(function, grid, 1, 1, threads, 1, 1, shared, stream, parameters, nullptr));
  }

 private:
  void check(int status) const {
    if (!status) return;
    const char* what = nullptr;
    text(status, &what);
    TORCH_CHECK(false, what ? what : "CUDA: a kernel cannot be launched");
  }

  void run_in_python(void* stream, const std::vector<int64_t>& words) const {
    py::gil_scoped_acquire gil;
    const py::object shape = py::reinterpret_borrow<py::object>(memory.get());
    const auto kinds = py::cast<py::tuple>(shape.attr("scalars"));
    const size_t pointers = words.size() - kinds.size();
    py::list given;
    given.append(reinterpret_cast<uintptr_t>(stream));
    for (size_t i = 0; i < words.size(); ++i) {
      const bool is_float = i >= pointers && kinds[i - pointers].ptr() == reinterpret_cast<PyObject*>(&PyFloat_Type);
      if (is_float) given.append(std::bit_cast<double>(words[i]));
      else given.append(words[i]);
    }
    py::reinterpret_borrow<py::object>(unaligned.get())(*given);
  }
};

// Its table is copied to the device where its contents are new; other contents get other memory, so that launches in
// flight keep theirs.
class CudaForeach {
 public:
  explicit CudaForeach(CudaLaunch launch) : launch(std::move(launch)) {}
  const CudaLaunch launch;

  at::Tensor table(void* stream, const std::vector<int64_t>& words, at::Device device) {
    TORCH_CHECK(!is_capturing(stream), "a foreach launch is captured in a CUDA graph, which would keep the address of its table");
    const std::lock_guard hold(lock_);
    for (auto it = kept_.begin(); it != kept_.end(); ++it)
      if (it->stream == stream && it->words == words) return kept_.splice(kept_.begin(), kept_, it), kept_.front().table;
    at::Tensor host = at::empty({int64_t(words.size())}, at::TensorOptions().dtype(at::kLong).pinned_memory(true));
    std::memcpy(host.mutable_data_ptr(), words.data(), 8 * words.size());
    kept_.push_front({stream, words, host.to(device, /*non_blocking=*/true)});
    if (kept_.size() > MOST_TABLES) kept_.pop_back();
    return kept_.front().table;
  }

 private:
  static constexpr size_t MOST_TABLES = 8;
  struct Table { void* stream; std::vector<int64_t> words; at::Tensor table; };
  std::list<Table> kept_;
  std::mutex lock_;
};

}  // namespace torchlazy

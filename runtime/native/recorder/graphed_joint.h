// A joint's forward and backward as two CUDA graphs (runtime/cuda/graphed_pair.py). What the forward keeps for the backward
// lies in the graphs' memory, and is lent to autograd: as long as somebody holds some of it, nothing else is replayed there.
#pragma once

#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/_foreach_copy.h>

#include "program.h"

namespace torchlazy {

// The memory that the graphs of one callable work in: of one call at a time.
struct GraphRoom {
  std::weak_ptr<const void> taken;
};

class GraphedJoint : public std::enable_shared_from_this<GraphedJoint> {
 public:
  using Lease = std::shared_ptr<const void>;  // of the room, and of the graphs that work in it

  explicit GraphedJoint(const py::dict& spec)
      : room_(py::cast<std::shared_ptr<GraphRoom>>(spec["room"])), device_(py::cast<c10::Device>(spec["device"])), begins_(spec["begins"]), first_(spec["first"]), second_(spec["second"]), moved_(spec["moved"]) {
    for (auto item : spec["inputs"]) {  // (0, memory that it is copied to), or (its address, None)
      auto t = py::cast<py::tuple>(item);
      inputs_.push_back({py::cast<int64_t>(t[0]), t[1].is_none() ? at::Tensor() : py::cast<at::Tensor>(t[1])});
    }
    for (auto item : spec["outputs"]) {  // an input's number, memory that is copied from, or (address, bytes, layout)
      Output output;
      if (py::isinstance<py::int_>(item)) output.input = py::cast<int64_t>(item);
      else if (THPVariable_Check(item.ptr())) output.result = py::cast<at::Tensor>(item);
      else {
        auto t = py::cast<py::tuple>(item);
        output.address = py::cast<int64_t>(t[0]), output.bytes = py::cast<int64_t>(t[1]), output.layout = NativeProgram::layout_of(t[2]);
      }
      outputs_.push_back(std::move(output));
    }
    for (auto item : spec["tangents"]) tangents_.push_back(item.is_none() ? at::Tensor() : py::cast<at::Tensor>(item));
    gradients_ = py::cast<std::vector<at::Tensor>>(spec["gradients"]);
  }
  ~GraphedJoint() {
    if (Py_IsInitialized()) {
      py::gil_scoped_acquire gil;
      begins_ = first_ = second_ = moved_ = py::object();
    } else begins_.release(), first_.release(), second_.release(), moved_.release();
  }

  // The forward's outputs, and what the call holds until its backward is done; nothing where its memory is taken, an input
  // that stays has moved, or hooks are to see what is saved. Runs as a program does, with the GIL.
  std::optional<std::pair<std::vector<at::Tensor>, Lease>> forward(const std::vector<at::Tensor>& inputs, const py::object& numbers) const {
    if (room_->taken.lock() || at::SavedTensorDefaultHooks::get_hooks()) return std::nullopt;
    for (size_t i = 0; i < inputs_.size(); ++i)
      if (inputs_[i].address && NativeProgram::address(inputs[i]) != inputs_[i].address) return moved_(), std::nullopt;
    const auto lease = std::make_shared<const std::shared_ptr<const GraphedJoint>>(shared_from_this());
    room_->taken = lease;  // before Python runs, which may let another thread go on
    if (!py::cast<bool>(begins_(true))) return std::nullopt;
    std::vector<at::Tensor> rooms, given;
    for (size_t i = 0; i < inputs_.size(); ++i)
      if (!inputs_[i].address) rooms.push_back(inputs_[i].room), given.push_back(inputs[i]);
    copy(rooms, given);
    first_(numbers);
    std::vector<at::Tensor> found;
    for (const Output& output : outputs_) {
      if (output.input >= 0) found.push_back(inputs[output.input]);
      else if (output.result.defined()) found.push_back(copied(output.result));
      else found.push_back(lent(output, lease));
    }
    return std::make_pair(std::move(found), Lease(lease));
  }

  // The gradients, of a call that holds the lease and reads what it kept no more.
  std::vector<at::Tensor> backward(const std::vector<at::Tensor>& tangents, const py::object& numbers) const {
    TORCH_CHECK(py::cast<bool>(begins_(false)), "torchlazy: the forward of a compiled call was replayed outside of a torch.cuda.graph, and its backward is captured inside / run both inside of it, or compile with mode='default'");
    std::vector<at::Tensor> rooms, given;
    for (size_t i = 0; i < tangents_.size(); ++i) {
      if (!tangents_[i].defined()) continue;
      if (tangents.at(i).defined()) rooms.push_back(tangents_[i]), given.push_back(tangents[i]);
      else at::Tensor(tangents_[i]).zero_();
    }
    copy(rooms, given);
    second_(numbers);
    std::vector<at::Tensor> found;
    for (const at::Tensor& g : gradients_) found.push_back(at::empty_strided(g.sizes(), g.strides(), g.options()));
    copy(found, gradients_);
    return found;
  }

 private:
  struct Input { int64_t address; at::Tensor room; };
  struct Output { int64_t input = -1; at::Tensor result; int64_t address = 0; size_t bytes = 0; NativeProgram::Layout layout; };
  std::shared_ptr<GraphRoom> room_;
  at::Device device_;
  std::vector<Input> inputs_;
  std::vector<Output> outputs_;
  std::vector<at::Tensor> tangents_, gradients_;  // memory that the backward reads, if it does, and that it leaves gradients in
  py::object begins_, first_, second_, moved_;    // whether a half may be replayed now; load the numbers and replay

  static at::Tensor copied(const at::Tensor& t) { return at::empty_strided(t.sizes(), t.strides(), t.options()).copy_(t); }

  // One launch for all of a dtype.
  static void copy(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from) {
    std::map<std::pair<c10::ScalarType, c10::ScalarType>, std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>>> kinds;
    for (size_t i = 0; i < to.size(); ++i) {
      auto& [targets, sources] = kinds[{to[i].scalar_type(), from[i].scalar_type()}];
      targets.push_back(to[i]), sources.push_back(from[i]);
    }
    for (auto& [_, lists] : kinds) at::_foreach_copy_(lists.first, lists.second);
  }

  at::Tensor lent(const Output& output, const Lease& lease) const {
    at::DataPtr memory(reinterpret_cast<void*>(output.address), new Lease(lease), [](void* held) { delete static_cast<Lease*>(held); }, device_);
    const c10::Storage storage(c10::Storage::use_byte_size_t(), output.bytes, std::move(memory), nullptr, false);
    auto t = at::detail::make_tensor<TensorImpl>(c10::Storage(storage), DispatchKeySet(device_.is_cpu() ? DispatchKey::CPU : DispatchKey::CUDA), c10::scalarTypeToTypeMeta(output.layout.dtype));
    t.unsafeGetTensorImpl()->set_sizes_and_strides(output.layout.sizes, output.layout.strides, 0);
    return t;
  }
};

}  // namespace torchlazy

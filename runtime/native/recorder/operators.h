// What the recorder does with an operator: decided once, from its schema and tags.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/util/SmallVector.h>

#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "memory.h"

namespace torchlazy {

enum class Kind : uint8_t {
  ENTRY,      // logged, and deferred where the trace is known
  VIEW,       // makes tensors over memory of its argument, reads no values: runs at once
  COMPOSITE,  // made of other operators (seen whole in inference mode only)
  FREE,       // reads no values and writes none that others have: runs at once
  AT_ONCE,    // runs at once; what it reads is computed before
  DROPOUT,    // native_dropout
};

struct Operator {
  c10::OperatorHandle handle;
  Kind kind = Kind::ENTRY;
  uint32_t arguments, returns;
  uint64_t writes = 0;                            // bit i: it writes to argument i
  uint64_t numbers = 0;                           // bit i: argument i's ints are sizes or values; others choose what it does
  c10::SmallVector<int8_t, 4> returned_argument;  // for each result: the argument that it is, or -1
  int8_t dropout = -1;                            // the argument that makes it random where it is not zero
  int8_t device = -1;                             // the argument that names the device of its result
  bool moves = false;                             // it is Tensor.to, for which the lazy device has rules
  bool has_host_lengths = false;                  // its second result is a tensor of the CPU, whatever the first one's device
  bool is_read = false;                           // `Tensor.item`
  bool fills = false;                             // it gives its first argument values that follow from the others
  bool is_constant = false;                       // a factory whose values follow from its arguments
  bool plans_sizes = false;                       // it builds something anew for each size of its first argument
  int8_t gradients = -1;                          // see place_of_gradients
  int bumps = 0;                                  // how often its kernel raises the versions of a written list
  std::string reason;                             // why it runs at once
};

inline const std::unordered_set<std::string_view>& reads_no_values() {
  static const std::unordered_set<std::string_view> names = {
      "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "rand_like", "randn_like",
      "randint_like", "_fused_sdp_choice", "is_same_size", "_assert_tensor_metadata", "result_type",
      "can_cast", "_has_same_storage_numel", "_is_zerotensor", "sym_size", "sym_numel", "sym_stride",
      "sym_storage_offset", "_version", "is_leaf", "output_nr", "retains_grad", "dim", "numel",
  };
  return names;
}

inline const std::unordered_set<std::string_view>& makes_constants() {
  static const std::unordered_set<std::string_view> names = {
      "arange", "eye", "full", "linspace", "ones", "scalar_tensor", "tril_indices", "triu_indices", "zeros",
  };
  return names;
}

inline bool is_number(c10::TypePtr type) {
  for (;;) {
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    else if (auto list = type->cast<c10::ListType>()) type = list->getElementType();
    else return type->kind() == c10::TypeKind::SymIntType || type->kind() == c10::TypeKind::NumberType || type->kind() == c10::TypeKind::TensorType;
  }
}

// Of an operator whose kernel asks the thread whether gradients are on: the argument that says so in what is recorded.
inline int8_t place_of_gradients(const c10::FunctionSchema& schema) {
  return schema.name() == "aten::mkldnn_rnn_layer" ? int8_t(schema.arguments().size()) - 1 : -1;
}

// Inside, gradients are on or off as they were when an operator was recorded: programs run in any mode.
struct AsRecorded {
  AsRecorded(int8_t place, const torch::jit::Stack& arguments) {
    if (place >= 0) mode.emplace(arguments[place].toBool());
  }
  std::optional<c10::AutoGradMode> mode;
};

inline Operator describe(const c10::OperatorHandle& handle) {
  const auto& schema = handle.schema();
  Operator op{handle, Kind::ENTRY, uint32_t(schema.arguments().size()), uint32_t(schema.returns().size())};
  std::string_view name = schema.name();
  const bool is_aten = name.substr(0, 6) == "aten::";
  if (is_aten) name.remove_prefix(6);
  bool has_tensor = false, has_other = false;
  const auto is_tensor = [](const c10::TypePtr& type) {
    return type->isSubtypeOf(*c10::TensorType::get()) ||
        type->isSubtypeOf(*c10::OptionalType::create(c10::TensorType::get())) ||
        type->isSubtypeOf(*c10::ListType::ofTensors()) ||
        type->isSubtypeOf(*c10::ListType::create(c10::OptionalType::create(c10::TensorType::get())));
  };
  for (uint32_t i = 0; i < op.arguments; ++i) {
    const auto& argument = schema.arguments()[i];
    if (argument.alias_info() && argument.alias_info()->isWrite()) op.writes |= 1ull << i;
    if (is_number(argument.real_type())) op.numbers |= 1ull << i;
    has_tensor |= is_tensor(argument.type());
    has_other |= argument.type()->kind() == c10::TypeKind::StorageType ||
        argument.type()->kind() == c10::TypeKind::StreamObjType;
    // A backward takes the numbers that its forward drew.
    if (argument.name() == "dropout_p" && name.find("backward") == name.npos) op.dropout = int8_t(i);
    if (argument.name() == "device") op.device = int8_t(i);
  }
  op.has_host_lengths = is_aten && (name == "_pack_padded_sequence" || name == "_pad_packed_sequence");
  op.is_read = is_aten && name == "_local_scalar_dense";
  op.fills = is_aten && (name == "fill_" || name == "zero_");
  op.is_constant = is_aten && makes_constants().count(name);
  op.moves = is_aten && name == "to" && handle.hasKernelForDispatchKey(c10::DispatchKey::AutogradCPU);
  op.gradients = place_of_gradients(schema);
  op.plans_sizes = is_aten && name == "_scaled_dot_product_cudnn_attention";  // 64 ms for GPT-2's twelve layers
  // Its numbers are lengths: they follow from the arguments' sizes.
  const bool is_attention = is_aten && name.find("_scaled_dot_product_") == 0;
  bool is_view = op.returns > 0, gives_other = op.returns == 0 && !op.writes;
  for (const auto& result : schema.returns()) {
    const auto* alias = result.alias_info();
    is_view &= alias && !alias->isWrite();
    gives_other |= !is_attention && !result.type()->isSubtypeOf(*c10::TensorType::get()) &&
        !result.type()->isSubtypeOf(*c10::ListType::ofTensors());
    int8_t from = -1;
    if (alias && alias->isWrite())
      for (uint32_t i = 0; i < op.arguments; ++i)
        if (const auto* given = schema.arguments()[i].alias_info(); given && given->beforeSets() == alias->beforeSets()) from = int8_t(i);
    op.returned_argument.push_back(from);
  }
  // Writes that schemas do not declare.
  if (is_aten && (name == "native_batch_norm" || name == "cudnn_batch_norm" || name == "miopen_batch_norm")) op.writes |= 0x18;
  bool is_random = false, has_data_shape = false, moves_geometry = false;
  for (auto tag : handle.getTags()) {
    is_random |= tag == at::Tag::nondeterministic_seeded;
    has_data_shape |= tag == at::Tag::dynamic_output_shape || tag == at::Tag::data_dependent_output;
    moves_geometry |= tag == at::Tag::inplace_view;
  }
  const auto at_once = [&](const char* reason) { op.kind = Kind::AT_ONCE, op.reason = reason; };
  const bool has_own_kernel = handle.hasKernelForDispatchKey(c10::DispatchKey::CPU) || handle.hasKernelForDispatchKey(c10::DispatchKey::CUDA);
  if (handle.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) && !has_own_kernel) op.kind = Kind::COMPOSITE;
  else if (is_aten && reads_no_values().count(name)) op.kind = Kind::FREE;
  else if (!has_tensor && !has_other) op.kind = Kind::FREE;  // a factory
  else if (!is_aten) at_once("not one of torch's own operators");
  else if (has_other) at_once("an argument of type Storage");
  else if (name == "set_" || name == "resize_" || name == "resize_as_") at_once("changes the size of memory");
  else if (moves_geometry) op.kind = Kind::FREE;  // t_, unsqueeze_: they change sizes and strides only
  else if (is_view || name == "_unsafe_view") op.kind = Kind::VIEW;
  else if (op.has_host_lengths) at_once("its result's shape depends on the lengths");
  else if (has_data_shape) at_once("data-dependent shape");
  else if (gives_other) at_once("does not return tensors");
  else if (name == "native_dropout") op.kind = Kind::DROPOUT;
  else if (is_random && op.dropout < 0 && name.find("_backward") == name.npos) at_once("random");
  if (op.arguments > 64 || op.returned_argument.size() > 64) at_once("has many arguments");
  return op;
}

class Operators {
 public:
  Operator& operator[](const c10::OperatorHandle& handle) {
    const void* key = &handle.schema();
    if (const uint32_t* found = numbers_.find(key)) return all_[*found];
    all_.push_back(describe(handle));
    numbers_.put(key, all_.size() - 1);
    return all_.back();
  }
  std::deque<Operator>& all() { return all_; }

 private:
  PointerTable numbers_;
  std::deque<Operator> all_;  // addresses stay
};

}  // namespace torchlazy

// A trace as words: each entry's arguments and results, self-contained, so that equal entries are equal words.
//
// A tensor is the number of its memory and a geometry on it. Floats stand apart: they are inputs of a program.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <cstring>

#include "deferred.h"
#include "memory.h"
#include "operators.h"

namespace torchlazy {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::Stack;

enum Tag : uint64_t { NONE = 1, UNDEFINED, TENSOR, INT, FLOAT, BOOL, INTS, TENSORS, LIST, FLOATS, DEVICE, TEXT, NUMBER };

inline uint64_t word(Tag tag, uint64_t value) { return uint64_t(tag) << 56 | value; }
inline Tag tag_of(uint64_t word) { return Tag(word >> 56); }
inline uint64_t value_of(uint64_t word) { return word & 0xffffffffffffffull; }

// A TENSOR word: bits 0-31 number, 32-39 dimensions, 40-47 dtype, 48 first meeting (bytes and device follow), 49 inference.
struct TensorWord {
  uint64_t w;
  uint32_t number() const { return uint32_t(w); }
  uint32_t dim() const { return w >> 32 & 0xff; }
  c10::ScalarType dtype() const { return c10::ScalarType(w >> 40 & 0xff); }
  bool first() const { return w >> 48 & 1; }
  bool inference() const { return w >> 49 & 1; }
};

struct Geometry {
  uint32_t number;
  c10::ScalarType dtype;
  bool first, inference;
  uint64_t bytes = 0;
  c10::Device device = c10::Device(c10::kCPU);
  int64_t offset;
  c10::IntArrayRef sizes, strides;
};

inline Geometry read_tensor(const uint64_t*& p) {
  const TensorWord t{*p++};
  Geometry g{t.number(), t.dtype(), t.first(), t.inference()};
  if (g.first) {
    g.bytes = *p++;
    g.device = c10::Device(c10::DeviceType(*p >> 8), int8_t(*p & 0xff));
    ++p;
  }
  g.offset = int64_t(*p++);
  g.sizes = {reinterpret_cast<const int64_t*>(p), t.dim()};
  g.strides = {reinterpret_cast<const int64_t*>(p) + t.dim(), t.dim()};
  p += 2 * t.dim();
  return g;
}

struct Entry {
  Operator* op;
  uint32_t begin, results, end;  // words
  uint32_t floats, floats_end;
  uint32_t met;  // how many memories the trace had met with its arguments
  bool inference;
  uint64_t draws = 0;  // by how much it moves the offset of its device's generator
};

// One value's words: `number(kind, word)` for those that are numbers, which traces may differ in, `plain(word)` for the
// others. `varies`: whether the ints of this argument are numbers. Returns where the next value begins.
enum class NumberKind : int { SIZE, STRIDE, OFFSET, BYTES, VALUE };
template <class Number, class Plain>
const uint64_t* walk(const uint64_t* p, bool varies, const Number& number, const Plain& plain) {
  const uint64_t n = value_of(*p);
  const Tag tag = tag_of(*p);
  const auto ints = [&](uint64_t count) {
    for (uint64_t i = 0; i < count; ++i, ++p)
      if (varies) number(NumberKind::VALUE, p);
      else plain(p);
  };
  plain(p++);
  switch (tag) {
    case TENSOR: {
      const TensorWord t{p[-1]};
      if (t.first()) number(NumberKind::BYTES, p++), plain(p++);
      number(NumberKind::OFFSET, p++);
      for (uint32_t d = 0; d < t.dim(); ++d) number(NumberKind::SIZE, p++);
      for (uint32_t d = 0; d < t.dim(); ++d) number(NumberKind::STRIDE, p++);
      break;
    }
    case INT: ints(1); break;
    case INTS: ints(n); break;
    case NUMBER:
      if (c10::ScalarType(n) == c10::kLong) number(NumberKind::VALUE, p++);
      else if (c10::ScalarType(n) == c10::kBool) plain(p++);
      break;
    case TEXT: for (uint64_t i = 0; i < (n + 7) / 8; ++i) plain(p++); break;
    case TENSORS: case LIST: for (uint64_t i = 0; i < n; ++i) p = walk(p, varies, number, plain); break;
    default: break;
  }
  return p;
}

struct View {  // its memory may get its number from the operators that use the view
  Operator* op;
  uint32_t before;  // how many entries stood before it
  uint32_t begin, results, end;  // words
  uint32_t floats;
  int64_t number;  // of its memory; -1 where no operator had met it
  c10::weak_intrusive_ptr<StorageImpl> storage;  // of that, so that no other gets its address
};

// What the program read where it depends on nothing but what factories made (`origins`, by number of memory) and on
// these floats of the log.
struct ConstantRead {
  uint32_t before;  // how many entries stood before it
  uint32_t number;
  int64_t offset;
  c10::ScalarType dtype;
  IValue value;
  std::vector<std::pair<uint32_t, uint64_t>> origins;
  std::vector<std::pair<uint32_t, double>> floats;
};

struct Log {
  std::vector<Entry> entries;
  std::vector<uint64_t> words;
  std::vector<double> floats;
  std::vector<View> views;
  std::vector<uint64_t> view_words;
  std::vector<double> view_floats;
  std::vector<ConstantRead> reads;
  void clear() {
    reads.clear();
    entries.clear(), words.clear(), floats.clear(), views.clear(), view_words.clear(), view_floats.clear();
  }
};

inline uint64_t mixed(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15ull;
  return hash ^ hash >> 29;
}
inline uint64_t hash_entry(uint64_t hash, const Operator* op, bool inference, const uint64_t* words, size_t n) {
  hash = mixed(hash, reinterpret_cast<uint64_t>(op) + inference);
  for (size_t i = 0; i < n; ++i) hash = mixed(hash, words[i]);
  return hash;
}

// The same without its numbers: equal for traces that differ in sizes only.
inline uint64_t hash_skeleton(uint64_t hash, const Operator* op, bool inference, const uint64_t* words, size_t n) {
  hash = mixed(hash, reinterpret_cast<uint64_t>(op) + inference);
  const uint64_t* p = words;
  for (uint32_t a = 0; p < words + n; ++a)
    p = walk(p, op->numbers >> a & 1, [](NumberKind, const uint64_t*) {}, [&](const uint64_t* w) { hash = mixed(hash, *w); });
  return hash;
}

// Tensors of other kinds have rules of their own: they never stand in an entry.
inline const DispatchKeySet& other_kinds() {
  static const DispatchKeySet keys({DispatchKey::Conjugate, DispatchKey::Negative, DispatchKey::ZeroTensor, DispatchKey::Python,
                                    DispatchKey::Quantized, DispatchKey::Sparse, DispatchKey::SparseCsr, DispatchKey::NestedTensor});
  return keys;
}
inline const char* why_other(const TensorImpl* t) {
  if (t->key_set().has_any(other_kinds())) return "a tensor of another kind";
  if (t->layout() != c10::kStrided || !t->unsafe_storage()) return "a tensor of another layout";
  const auto type = t->device_type();
  if (type != c10::kCPU && type != c10::kCUDA) return "a tensor on another device";
  // Memory that NumPy, a file or another process has, too. Parameters on mapped files are the program's own.
  if (type == c10::kCPU && !storage_of(t)->resizable() && !t->requires_grad()) return "memory shared outside of torch";
  return nullptr;
}

struct Writer {
  std::vector<uint64_t>& words;
  std::vector<double>& floats;
  Memories* memories;  // null: a view, whose memory is not numbered
  bool hold;           // what is met first is kept alive until the cut
  const char* why_not = nullptr;
  c10::DeviceType device = c10::kCPU;

  void tensor(const at::Tensor& t, bool result) {
    const auto* impl = t.unsafeGetTensorImpl();
    if (!t.defined()) return words.push_back(word(UNDEFINED, 0));
    if (impl->is_wrapped_number() && !result) return number(impl);
    if (const char* why = why_other(impl)) return why_not = why, words.push_back(word(UNDEFINED, 1));
    if (is_marked(impl)) watch(t);  // `Tensor.data` was set: the class of the tensor object is as it was
    auto* storage = storage_of(impl);
    uint32_t number = 0;
    bool first = false;
    if (memories) {
      const uint32_t* found = memories->number_of(storage);
      first = !found;
      number = found ? *found : memories->add(storage, result, hold);
    }
    if (impl->device_type() != c10::kCPU) device = impl->device_type();
    const uint64_t dim = impl->dim(), dtype = uint64_t(c10::typeMetaToScalarType(impl->dtype()));
    const uint64_t inference = !impl->key_set().has(DispatchKey::ADInplaceOrView);
    const size_t at = words.size();
    words.resize(at + 2 + 2 * first + 2 * dim);
    uint64_t* p = words.data() + at;
    *p++ = word(TENSOR, number | dim << 32 | dtype << 40 | uint64_t(first) << 48 | inference << 49);
    if (first) *p++ = storage->nbytes(), *p++ = uint64_t(uint8_t(impl->device_type())) << 8 | uint8_t(impl->device().index());
    *p++ = uint64_t(impl->storage_offset());
    std::memcpy(p, impl->sizes().data(), 8 * dim);
    std::memcpy(p + dim, impl->strides().data(), 8 * dim);
  }
  void number(const TensorImpl* impl) {  // a Python number that stands where a tensor is expected
    const auto dtype = c10::typeMetaToScalarType(impl->dtype());
    const void* at = static_cast<const char*>(storage_of(impl)->data()) + impl->storage_offset() * impl->itemsize();
    words.push_back(word(NUMBER, uint64_t(dtype)));
    if (dtype == c10::kDouble) floats.push_back(*static_cast<const double*>(at));
    else if (dtype == c10::kLong) words.push_back(uint64_t(*static_cast<const int64_t*>(at)));
    else if (dtype == c10::kBool) words.push_back(*static_cast<const bool*>(at));
    else why_not = "a complex number";
  }
  void value(const IValue& v, bool result = false) {
    if (v.isTensor()) return tensor(v.toTensor(), result);
    if (v.isNone()) return words.push_back(word(NONE, 0));
    if (v.isInt()) return words.push_back(word(INT, 0)), words.push_back(uint64_t(v.toInt()));
    if (v.isDouble()) return words.push_back(word(FLOAT, 0)), floats.push_back(v.toDouble());
    if (v.isBool()) return words.push_back(word(BOOL, v.toBool()));
    if (v.isDevice()) return words.push_back(word(DEVICE, uint64_t(uint8_t(v.toDevice().type())) << 8 | uint8_t(v.toDevice().index())));
    if (v.isIntList()) {
      const auto list = v.toIntList();
      words.push_back(word(INTS, list.size()));
      for (int64_t i : list) words.push_back(uint64_t(i));
      return;
    }
    if (v.isTensorList()) {
      const auto list = v.toTensorList();
      words.push_back(word(TENSORS, list.size()));
      for (size_t i = 0; i < list.size(); ++i) tensor(list.get(i), result);
      return;
    }
    if (v.isDoubleList()) {
      const auto list = v.toDoubleList();
      words.push_back(word(FLOATS, list.size()));
      for (double d : list) floats.push_back(d);
      return;
    }
    if (v.isString()) {
      const auto& text = v.toStringRef();
      words.push_back(word(TEXT, text.size()));
      const size_t at = words.size();
      words.resize(at + (text.size() + 7) / 8, 0);
      std::memcpy(words.data() + at, text.data(), text.size());
      return;
    }
    if (v.isList()) {
      const auto list = v.toListRef();
      words.push_back(word(LIST, list.size()));
      for (const IValue& item : list) value(item, result);
      return;
    }
    why_not = "an argument of another type";
  }
};

// Words back to a value; `tensor_of` makes the tensors. `type` is the schema's, for the elements of lists.
template <class TensorOf>
IValue read_value(const uint64_t*& p, const double*& f, const c10::TypePtr& type, const TensorOf& tensor_of) {
  const uint64_t first = *p, n = value_of(first);
  switch (tag_of(first)) {
    case NONE: return ++p, IValue();
    case UNDEFINED: return ++p, at::Tensor();
    case TENSOR: return tensor_of(read_tensor(p));
    case INT: return p += 2, int64_t(p[-1]);
    case FLOAT: return ++p, *f++;
    case BOOL: return ++p, bool(n);
    case DEVICE: return ++p, c10::Device(c10::DeviceType(n >> 8), int8_t(n & 0xff));
    case NUMBER: {
      ++p;
      const auto dtype = c10::ScalarType(n);
      at::Scalar number;
      if (dtype == c10::kDouble) number = *f++;
      else if (dtype == c10::kLong) number = int64_t(*p++);
      else number = bool(*p++);
      at::Tensor t = c10::scalar_to_tensor(number);
      t.unsafeGetTensorImpl()->set_wrapped_number(true);
      return t;
    }
    case INTS: {
      c10::List<int64_t> list;
      list.reserve(n);
      for (++p; list.size() < n;) list.push_back(int64_t(*p++));
      return list;
    }
    case FLOATS: {
      c10::List<double> list;
      for (++p; list.size() < n;) list.push_back(*f++);
      return list;
    }
    case TENSORS: {
      c10::List<at::Tensor> list;
      list.reserve(n);
      for (++p; list.size() < n;) list.push_back(read_value(p, f, type, tensor_of).toTensor());
      return list;
    }
    case TEXT: {
      std::string text(reinterpret_cast<const char*>(++p), n);
      p += (n + 7) / 8;
      return text;
    }
    case LIST: {
      auto whole = type;
      if (auto optional = whole->cast<c10::OptionalType>()) whole = optional->getElementType();
      const auto element = whole->expect<c10::ListType>()->getElementType();
      c10::impl::GenericList list(element);
      for (++p; list.size() < n;) list.push_back(read_value(p, f, element, tensor_of));
      return list;
    }
  }
  TORCH_INTERNAL_ASSERT(false, "torchlazy: a word without meaning");
}

}  // namespace torchlazy

// Storages of a trace: numbered in the order in which operators meet them, found again by their address.
//
// A weak reference keeps the StorageImpl object (not its memory) alive until the trace is cut, so that no other storage
// can get the same address meanwhile: addresses are used again hundreds of times within one training step.
#pragma once

#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace torchlazy {

using c10::StorageImpl;
using c10::TensorImpl;

inline StorageImpl* storage_of(const TensorImpl* tensor) {
  return tensor->unsafe_storage().unsafeGetStorageImpl();
}

// Pointer -> number. Emptied by raising its epoch, so that a cut costs nothing for what it forgets.
class PointerTable {
 public:
  const uint32_t* find(const void* pointer) const {
    for (size_t i = place(pointer);; i = (i + 1) & mask_) {
      const Row& row = rows_[i];
      if (row.epoch != epoch_) return nullptr;
      if (row.pointer == pointer) return &row.number;
    }
  }
  void put(const void* pointer, uint32_t number) {
    if (++used_ * 2 > rows_.size()) grow();
    insert(pointer, number);
  }
  void clear() { ++epoch_, used_ = 0; }

 private:
  struct Row {
    const void* pointer = nullptr;
    uint32_t number = 0, epoch = 0;
  };
  size_t place(const void* pointer) const {
    return (reinterpret_cast<uint64_t>(pointer) >> 4) * 0x9E3779B97F4A7C15ull >> 32 & mask_;
  }
  void insert(const void* pointer, uint32_t number) {
    size_t i = place(pointer);
    while (rows_[i].epoch == epoch_) i = (i + 1) & mask_;
    rows_[i] = {pointer, number, epoch_};
  }
  void grow() {
    std::vector<Row> old(rows_.size() * 2);
    old.swap(rows_);
    mask_ = rows_.size() - 1;
    for (const Row& row : old)
      if (row.epoch == epoch_) insert(row.pointer, row.number);
  }
  std::vector<Row> rows_ = std::vector<Row>(1 << 12);
  size_t mask_ = (1 << 12) - 1;
  uint32_t epoch_ = 1;
  size_t used_ = 0;
};

struct Memory {
  c10::weak_intrusive_ptr<StorageImpl> weak;
  c10::intrusive_ptr<StorageImpl> held;  // what a deferred entry reads or writes lives until the cut
  uint64_t bytes;
  c10::Device device;
  bool made;             // by an entry of this trace
  bool written = false;  // by an entry of this trace
  bool pending = false;  // its value is deferred
  uint64_t origin = 0;   // not 0: it has what a factory made, and this tells which and of what
};

// Memory that a factory has filled, as long as nothing was written to it and nobody got its address.
class Origins {
 public:
  void add(StorageImpl* storage, uint64_t origin) {
    if (all_.size() >= MOST) all_.clear();
    all_.insert_or_assign(storage, Row{c10::weak_intrusive_ptr<StorageImpl>(c10::intrusive_ptr<StorageImpl>::reclaim_copy(storage)), origin});
    any = true;
  }
  uint64_t of(const StorageImpl* storage) const {
    const auto found = all_.find(storage);
    return found == all_.end() ? 0 : found->second.origin;
  }
  void clear() { all_.clear(), any = false; }
  void forget(const StorageImpl* storage) {
    all_.erase(storage);
    any = !all_.empty();
  }
  static inline std::atomic<bool> any{false};

 private:
  static constexpr size_t MOST = 256;
  struct Row {
    c10::weak_intrusive_ptr<StorageImpl> weak;  // no other storage gets its address
    uint64_t origin;
  };
  std::unordered_map<const StorageImpl*, Row> all_;
};

class Memories {
 public:
  Memory* find(const StorageImpl* storage) {
    const uint32_t* number = table_.find(storage);
    return number ? &all_[*number] : nullptr;
  }
  const uint32_t* number_of(const StorageImpl* storage) const { return table_.find(storage); }
  uint32_t add(StorageImpl* storage, bool made, bool hold) {
    const uint32_t number = all_.size();
    table_.put(storage, number);
    auto strong = c10::intrusive_ptr<StorageImpl>::reclaim_copy(storage);
    all_.push_back({c10::weak_intrusive_ptr<StorageImpl>(strong), nullptr, storage->nbytes(), storage->device(), made});
    if (hold) all_.back().held = std::move(strong);
    return number;
  }
  Memory& operator[](uint32_t number) { return all_[number]; }
  uint32_t size() const { return all_.size(); }
  std::vector<Memory>::iterator begin() { return all_.begin(); }
  std::vector<Memory>::iterator end() { return all_.end(); }
  std::vector<Memory> take() {  // freed by the caller, outside of what must not be interrupted
    table_.clear();
    return std::exchange(all_, {});
  }

 private:
  PointerTable table_;
  std::vector<Memory> all_;
};

}  // namespace torchlazy

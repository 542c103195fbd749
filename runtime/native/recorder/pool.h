// Memory of programs on the CPU: what a run frees serves the next one.
//
// The C library gives large blocks back to the system, and the next run pays for each of their pages again: as much as
// for what it computes there. Only what programs allocate comes from here; everything else passes to torch's own.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <unistd.h>

#include <list>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace torchlazy {

class Pool final : public c10::Allocator {
 public:
  static Pool& the() {
    static Pool* pool = new Pool(c10::GetCPUAllocator());  // lives as long as the last block: longer than statics
    return *pool;
  }
  static void install() { c10::SetCPUAllocator(&the()); }

  // Memory that this thread allocates is a program's.
  struct Use {
    bool before = in_use;
    Use() { in_use = true; }
    ~Use() { in_use = before; }
    Use(const Use&) = delete;
  };

  c10::DataPtr allocate(size_t bytes) override {
    if (!in_use || bytes < LEAST) return base_->allocate(bytes);
    const size_t size = (bytes + PAGE - 1) / PAGE * PAGE;
    c10::DataPtr memory = take(size);
    if (!memory) memory = base_->allocate(size);
    void* data = memory.get();
    {
      std::lock_guard hold(lock_);
      given_.emplace(data, Block{std::move(memory), size});
    }
    return {data, data, &give_back, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

  void empty() {
    std::list<Block> gone;
    std::lock_guard hold(lock_);
    gone.swap(free_), by_size_.clear(), held_ = 0;
  }
  size_t held() {
    std::lock_guard hold(lock_);
    return held_;
  }
  void after_fork() { new (&lock_) std::mutex; }  // in the child, whose parent's other threads may have had it

 private:
  struct Block { c10::DataPtr memory; size_t size; };
  using Place = std::list<Block>::iterator;
  static constexpr size_t LEAST = 1 << 17, PAGE = 4096;  // smaller blocks stay with the C library
  static inline thread_local bool in_use = false;

  c10::Allocator* base_;
  const size_t most_ = size_t(sysconf(_SC_PHYS_PAGES)) * size_t(sysconf(_SC_PAGE_SIZE)) / 16;
  std::mutex lock_;
  std::unordered_map<void*, Block> given_;
  std::list<Block> free_;  // the last one freed first
  std::unordered_map<size_t, std::vector<Place>> by_size_;
  size_t held_ = 0;

  explicit Pool(c10::Allocator* base) : base_(base) {}

  c10::DataPtr take(size_t size) {
    std::lock_guard hold(lock_);
    const auto found = by_size_.find(size);
    if (found == by_size_.end() || found->second.empty()) return {};
    const Place place = found->second.back();
    found->second.pop_back();
    c10::DataPtr memory = std::move(place->memory);
    free_.erase(place), held_ -= size;
    return memory;
  }

  static void give_back(void* data) {
    Pool& pool = the();
    std::list<Block> gone;  // freed without the lock
    std::unique_lock hold(pool.lock_);
    const auto found = pool.given_.find(data);
    if (found == pool.given_.end()) {
      hold.unlock();
      return pool.base_->raw_deleter()(data);
    }
    pool.free_.push_front(std::move(found->second));
    pool.given_.erase(found);
    pool.by_size_[pool.free_.front().size].push_back(pool.free_.begin());
    pool.held_ += pool.free_.front().size;
    while (pool.held_ > pool.most_) {  // the oldest goes
      const Place last = std::prev(pool.free_.end());
      auto& alike = pool.by_size_[last->size];
      alike.erase(std::find(alike.begin(), alike.end(), last));
      if (alike.empty()) pool.by_size_.erase(last->size);
      pool.held_ -= last->size;
      gone.splice(gone.end(), pool.free_, last);
    }
  }
};

}  // namespace torchlazy

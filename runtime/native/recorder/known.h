// What is known of traces: how often each came, and the programs of those that are followed.
#pragma once

#include <pybind11/pybind11.h>

#include <map>
#include <memory>
#include <unordered_map>
#include <unordered_set>

#include "log.h"
#include "program.h"
#include "sizes.h"

namespace torchlazy {

namespace py = pybind11;

struct Known;

struct Input {  // of a program: this geometry on the memory of this number
  uint32_t number;
  c10::ScalarType dtype;
  int64_t offset;
  std::vector<int64_t> sizes, strides;
  struct Moved { uint32_t place, expression; };  // of offset, sizes, strides in a row: those that are expressions
  std::vector<Moved> moved;
  Input at(const Bound& bound) const {
    Input found = *this;
    for (auto [place, expression] : moved) {
      const int64_t value = bound.values[expression];
      if (place == 0) found.offset = value;
      else if (place <= sizes.size()) found.sizes[place - 1] = value;
      else found.strides[place - 1 - sizes.size()] = value;
    }
    return found;
  }
};

// A trace and its memory, kept for Python.
struct Sample {
  Log log;
  struct Fact { bool made, written; uint64_t bytes; c10::Device device; };
  std::vector<Fact> memories;
};

// A trace that has a program: the entries to compare with, and how the program's inputs and outputs stand in it.
struct Path {
  Log log;
  std::vector<uint64_t> hashes, skeletons;  // before each entry, and at the end
  std::unique_ptr<Sizes> sizes;             // where it serves traces of other sizes, too
  std::vector<uint32_t> last_use;  // by number: the last entry that reads or writes it
  std::vector<uint8_t> fixed;      // by float: 1 where the program has it as a constant
  std::vector<uint32_t> scalars;   // floats that are the program's scalars
  std::vector<std::pair<uint32_t, uint32_t>> equal;  // floats that share a scalar
  std::vector<Input> inputs;
  std::vector<uint32_t> outputs;  // numbers
  std::vector<uint8_t> gives;     // by number: 1 for an output
  struct Run {
    py::object program;                     // in Python: memory and scalars -> the outputs' values
    std::shared_ptr<NativeProgram> native;  // the same without Python, where it can be
    NativeProgram::Words last;              // its scalars behind the trace's: a program for all sizes gets these
    py::object again;                       // gives `native` and `last` anew; told how often they ran
    int64_t runs = 0;
  };
  struct Stage {  // of the program, that can be launched before the cut
    std::vector<uint32_t> inputs, scalars;  // that it is the first to read
    size_t at;                              // the entries after which they are there
  };
  std::vector<Stage> stages;
  bool knows_stages = false;
  int launches = 0, in_vain = 0;  // traces of which stages were launched, and those that went another way then
  Run run;                                       // with `sizes` its program has `at`, which gives the one for symbols
  std::map<std::vector<int64_t>, Run> served;    // by symbols
  Known* known = nullptr;
  std::unordered_map<uint32_t, int> stops;  // entry -> how often it was left there
  int64_t follows = 0, least_ns = INT64_MAX;
  int postponed = 0;  // how often its times were not judged, since its program was to become another one
  uint64_t least_bytes = 0;  // of the trace that took the least
  size_t size() const { return log.entries.size(); }
};

// A trace by its hash: how often it came, and what was made of it.
struct Known {
  enum State { SEEN, WAITING, FOLLOWED, REFUSED } state = SEEN;
  uint32_t count = 0;
  int64_t least_ns = INT64_MAX;  // operator by operator
  uint64_t least_bytes = 0;      // of the trace that took the least
  int64_t learning_ns = 0;       // the time that it took so far
  uint64_t hash = 0;
  size_t entries = 0;
  std::shared_ptr<Sample> sample;  // the trace that was learned: its program has constants of this very one
  py::object learned;
  std::unique_ptr<Path> path;
  std::string reason;
  uint64_t last = 0;  // the number of the trace when it came last
  int misses = 0;  // values were wanted that its program does not give
};

// Traces that differ in sizes only, by what they have in common.
struct Family {
  Known known;
  uint32_t distinct = 0;  // sizes that came
  uint32_t outside = 0;   // of those since it has a path, those that the path does not serve
  uint32_t attempts = 0;
};

struct Cuts {  // where traces part again and again: they end there from then on
  std::unordered_set<uint64_t> hashes;
  bool at(uint64_t hash) const { return !hashes.empty() && hashes.count(hash); }
};

class Paths {
 public:
  explicit Paths(std::vector<uint64_t> Path::*keys) : keys_(keys) {}
  void add(Path* path) {
    for (uint64_t hash : path->*keys_) at_[hash].push_back(path);
  }
  void remove(Path* path) {
    for (uint64_t hash : path->*keys_)
      if (auto found = at_.find(hash); found != at_.end()) {
        std::erase(found->second, path);
        if (found->second.empty()) at_.erase(found);
      }
  }
  const std::vector<Path*>& after(uint64_t hash) const {
    static const std::vector<Path*> none;
    auto found = at_.find(hash);
    return found == at_.end() ? none : found->second;
  }
  bool empty() const { return at_.empty(); }

 private:
  std::vector<uint64_t> Path::*keys_;
  std::unordered_map<uint64_t, std::vector<Path*>> at_;
};

}  // namespace torchlazy

// Traces that differ in sizes only: one path for all of them, whose words are expressions of a few symbols.
//
// A trace follows such a path where each number among its operators' arguments is what the symbols say, which are read
// off the first numbers that they determine. The sizes of results are what the expressions say: whoever makes them
// has held them against the operators' shapes at other sizes (lazy/native/sizes.py).
#pragma once

#include <set>

#include "log.h"

namespace torchlazy {

// An expression in postfix form over ints: a stack of values.
class Expression {
 public:
  enum Code : int64_t { NUMBER, SYMBOL, ADD, SUBTRACT, MULTIPLY, DIVIDE, REMAINDER };
  explicit Expression(std::vector<std::pair<int64_t, int64_t>> code) : code_(std::move(code)) {
    for (auto [what, value] : code_)
      if (what == SYMBOL) needs_ = std::max(needs_, size_t(value) + 1);
  }
  size_t needs() const { return needs_; }  // so many symbols have to be known
  int64_t at(const std::vector<int64_t>& symbols) const {
    c10::SmallVector<int64_t, 16> stack;
    for (auto [what, value] : code_) {
      if (what == NUMBER || what == SYMBOL) {
        stack.push_back(what == NUMBER ? value : symbols[value]);
        continue;
      }
      const int64_t b = stack.pop_back_val();
      int64_t& result = stack.back();
      const int64_t a = result;
      if (what == ADD) result = a + b;
      else if (what == SUBTRACT) result = a - b;
      else if (what == MULTIPLY) result = a * b;
      else {
        TORCH_INTERNAL_ASSERT(b > 0, "torchlazy: an expression of sizes divides by ", b);
        const int64_t rest = (a % b + b) % b;  // as in Python
        result = what == REMAINDER ? rest : (a - rest) / b;
      }
    }
    return stack.back();
  }

 private:
  std::vector<std::pair<int64_t, int64_t>> code_;
  size_t needs_ = 0;
};

// What the symbols are in the running trace, as far as they are known, and the expressions' values.
struct Bound {
  std::vector<int64_t> symbols, values;
};

class Sizes {
 public:
  struct Moved { uint32_t word, expression; };  // this word of the log is that expression
  struct Binding { uint32_t word; int64_t factor, shift; };  // word = factor * symbol + shift
  struct Check { uint32_t expression, symbol; };  // which have to be equal once both are known
  std::vector<Expression> expressions;
  std::vector<Check> checks;
  std::vector<Moved> moved;          // ascending
  std::vector<Binding> bindings;     // by symbol, ascending
  std::vector<int64_t> low, high;    // of the symbols
  std::set<std::vector<int64_t>> refused;  // the program does not serve them

  // Whether these are the words of the entry's arguments. Symbols that it determines become known.
  bool fits(const Log& log, const Entry& entry, const std::vector<uint64_t>& words, Bound& bound) const {
    while (bound.symbols.size() < bindings.size()) {
      const size_t symbol = bound.symbols.size();
      const Binding& b = bindings[symbol];
      if (b.word >= entry.results) break;
      const int64_t rest = int64_t(words[b.word - entry.begin]) - b.shift;
      const int64_t value = rest / b.factor;
      if (rest % b.factor || value < low[symbol] || value > high[symbol]) return false;
      bound.symbols.push_back(value);
      if (refused.count(bound.symbols)) return false;
      bound.values.resize(expressions.size());
      for (size_t i = 0; i < expressions.size(); ++i)
        if (expressions[i].needs() == symbol + 1) bound.values[i] = expressions[i].at(bound.symbols);
      for (const Check& c : checks)
        if (std::max(expressions[c.expression].needs(), size_t(c.symbol) + 1) == symbol + 1 && bound.values[c.expression] != bound.symbols[c.symbol]) return false;
    }
    const uint64_t* expected = log.words.data() + entry.begin;
    size_t at = 0;
    const auto same_until = [&](size_t end) { return !std::memcmp(expected + at, words.data() + at, 8 * (end - at)); };
    for (auto m = first_of(entry.begin); m != moved.end() && m->word < entry.results; ++m) {
      const size_t word = m->word - entry.begin;
      if (!same_until(word) || int64_t(words[word]) != bound.values[m->expression]) return false;
      at = word + 1;
    }
    return same_until(words.size());
  }
  // The words of an entry's results.
  void append_results(const Log& log, const Entry& entry, const Bound& bound, std::vector<uint64_t>& words) const {
    const size_t begin = words.size();
    words.insert(words.end(), log.words.begin() + entry.results, log.words.begin() + entry.end);
    for (auto m = first_of(entry.results); m != moved.end() && m->word < entry.end; ++m)
      words[begin + m->word - entry.results] = uint64_t(bound.values[m->expression]);
  }

 private:
  std::vector<Moved>::const_iterator first_of(uint32_t word) const {
    return std::lower_bound(moved.begin(), moved.end(), word, [](const Moved& m, uint32_t w) { return m.word < w; });
  }
};

}  // namespace torchlazy

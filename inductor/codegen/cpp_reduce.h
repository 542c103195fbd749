// Accumulators, vector loops and the division of work between threads. Included by cpp_prelude.h only.
//
// Invariant: an accumulator starts as the identity of its reduction, `add` takes one value (a scalar, or a vector whose
// real lanes `lanes` tells), `merge` takes another accumulator that stands later in the order, and `fold` turns lanes
// into one scalar accumulator. The order of merging is fixed by sizes, never by the number of threads.
#pragma once

#define TL_LOOP __attribute__((always_inline))

namespace tl {

template <class T> TL_INLINE T lowest() {
  if constexpr (same<T, float> || same<T, double>) return T(-__builtin_inf());
  else if constexpr (is_signed<T>) return T(typename Unsigned<T>::type(1) << (8 * sizeof(T) - 1));
  else return T(0);
}
template <class T> TL_INLINE T highest() {
  if constexpr (same<T, float> || same<T, double>) return T(__builtin_inf());
  else return T(~lowest<T>());
}
template <class V, class Lanes> TL_INLINE V keep(V value, V other, Lanes lanes) {
  if constexpr (is_full<Lanes>) return value;
  else return where(lane_mask(lanes), value, other);
}
struct Whole {};  // scalars have no lanes
template <> constexpr bool is_full<Whole> = true;

#define TL_ACCUMULATOR(Name, identity, combine)                                      \
  template <class V> struct Name {                                                   \
    typedef Element<V> T;                                                            \
    V v = V{} + T(identity);                                                         \
    template <class Lanes = Whole> TL_INLINE void add(V x, Lanes lanes = {}) {       \
      if constexpr (is_full<Lanes>) v = combine(v, x);                               \
      else v = keep(combine(v, x), v, lanes);                                        \
    }                                                                                \
    TL_INLINE void merge(const Name& o) { v = combine(v, o.v); }                     \
    TL_INLINE V value() const { return v; }                                          \
    TL_INLINE Name<T> fold() const {                                                 \
      T part[lanes_of<V>];                                                           \
      __builtin_memcpy(part, &v, sizeof(v));                                         \
      for (int n = lanes_of<V> / 2; n; n /= 2)                                       \
        for (int k = 0; k < n; ++k) part[k] = combine(part[k], part[k + n]);         \
      return {part[0]};                                                              \
    }                                                                                \
  };
TL_ACCUMULATOR(Sum, 0, tl::add)
TL_ACCUMULATOR(Prod, 1, tl::mul)
TL_ACCUMULATOR(Max, lowest<T>(), tl::maximum)
TL_ACCUMULATOR(Min, highest<T>(), tl::minimum)
#undef TL_ACCUMULATOR

// M: bool or a mask
template <class M> struct Any {
  M v = M{};
  template <class Lanes = Whole> TL_INLINE void add(M x, Lanes lanes = {}) { v = M(v | keep_mask(x, lanes)); }
  template <class Lanes> static TL_INLINE M keep_mask(M x, Lanes lanes) {
    if constexpr (is_full<Lanes>) return x;
    else return active(x, lanes);
  }
  TL_INLINE void merge(const Any& o) { v = M(v | o.v); }
  TL_INLINE M value() const { return v; }
  TL_INLINE Any<bool> fold() const { return {any_lane(v)}; }
};
template <class M> struct All {
  Any<M> none;  // some value is false
  template <class Lanes = Whole> TL_INLINE void add(M x, Lanes lanes = {}) { none.add(bitwise_not(x), lanes); }
  TL_INLINE void merge(const All& o) { none.merge(o.none); }
  TL_INLINE M value() const { return bitwise_not(none.v); }
  TL_INLINE All<bool> fold() const { return {none.fold()}; }
};

// First extremum; a nan is one. `at` < 0: nothing seen yet.
template <class T> TL_INLINE bool beats(T a, T b, int sign) {
  if constexpr (is_float<T>) {
    if (a != a) return b == b;
    if (b != b) return false;
  }
  return sign > 0 ? a > b : a < b;
}
template <class V, int Sign, bool = is_vector<V>> struct ArgBest {
  V best{};
  int64_t at = -1;
  TL_INLINE void add(V x, int64_t position) {
    if (at < 0 || beats(x, best, Sign)) {
      best = x;
      at = position;
    }
  }
  TL_INLINE void merge(const ArgBest& o) {
    if (o.at < 0) return;
    if (at < 0 || beats(o.best, best, Sign) || (!beats(best, o.best, Sign) && o.at < at)) *this = o;
  }
  TL_INLINE int64_t value() const { return at; }
};
template <class V, int Sign> struct ArgBest<V, Sign, true> {
  static constexpr int L = lanes_of<V>;
  typedef Vec<int64_t, L> P;
  V best{};
  P at = P{} - 1;
  template <class Lanes = Whole> TL_INLINE void add(V x, P position, Lanes lanes = {}) {
    auto better = as_mask(Sign > 0 ? x > best : x < best);
    if constexpr (is_float<V>) better = (better & as_mask(best == best)) | as_mask((x != x) & (best == best));
    take(x, position, keep_lanes(better | as_mask(at < 0), lanes));
  }
  template <class Lanes = Whole> TL_INLINE void add(V x, int64_t position, Lanes lanes = {}) { add(x, P{} + position, lanes); }
  template <class Lanes> static TL_INLINE Mask<L> keep_lanes(Mask<L> mask, Lanes lanes) {
    if constexpr (is_full<Lanes>) return mask;
    else return active(mask, lanes);
  }
  TL_INLINE void take(V x, P position, Mask<L> mask) {
    best = where(mask, x, best);
    at = where(mask, position, at);
  }
  TL_INLINE void merge(const ArgBest& o) {
    for (int k = 0; k < L; ++k) {
      ArgBest<Element<V>, Sign> mine{best[k], at[k]};
      mine.merge({o.best[k], o.at[k]});
      best[k] = mine.best;
      at[k] = mine.at;
    }
  }
  TL_INLINE P value() const { return at; }
  TL_INLINE ArgBest<Element<V>, Sign> fold() const {
    ArgBest<Element<V>, Sign> all;
    for (int k = 0; k < L; ++k) all.merge({best[k], at[k]});
    return all;
  }
};
template <class V> using ArgMax = ArgBest<V, 1>;
template <class V> using ArgMin = ArgBest<V, -1>;

// Mean and sum of squared deviations, every lane for itself; Chan's formula merges.
template <class V> struct Welford {
  typedef Element<V> T;
  V average{}, squares{}, weight{};
  template <class Lanes = Whole> TL_INLINE void add(V x, Lanes lanes = {}) {
    const V n = weight + T(1);
    const V d = x - average;
    const V next = average + d / n;
    const V more = squares + d * (x - next);
    average = keep(next, average, lanes);
    squares = keep(more, squares, lanes);
    weight = keep(n, weight, lanes);
  }
  TL_INLINE void merge(const Welford& o) {
    const V total = weight + o.weight;
    const V share = where(ne(total, V{}), V(o.weight / total), V{});
    const V d = o.average - average;
    average = average + d * share;
    squares = squares + (o.squares + d * d * weight * share);
    weight = total;
  }
  TL_INLINE V mean() const { return average; }
  TL_INLINE V m2() const { return squares; }
  TL_INLINE V count() const { return weight; }
  TL_INLINE Welford<T> fold() const {
    Welford<T> part[lanes_of<V>];
    for (int k = 0; k < lanes_of<V>; ++k) part[k] = {average[k], squares[k], weight[k]};
    for (int n = lanes_of<V> / 2; n; n /= 2)
      for (int k = 0; k < n; ++k) part[k].merge(part[k + n]);
    return part[0];
  }
};

// Partial results in order: pairwise, so that errors grow with the logarithm.
template <class A> TL_INLINE A merge_tree(A* part, int64_t n) {
  for (int64_t step = 1; step < n; step *= 2)
    for (int64_t k = 0; k + step < n; k += 2 * step) part[k].merge(part[k + step]);
  return part[0];
}
template <class A, int U> TL_INLINE auto fold_all(A (&part)[U]) {
  for (int n = U / 2; n; n /= 2)
    for (int k = 0; k < n; ++k) part[k].merge(part[k + n]);
  return part[0].fold();
}

// Partial tiles of `width` accumulators each: merged column by column into `result`.
template <class A> TL_INLINE void merge_columns(A* part, int64_t chunks, int width, A* result) {
  for (int64_t step = 1; step < chunks; step *= 2)
    for (int64_t k = 0; k + step < chunks; k += 2 * step)
      for (int t = 0; t < width; ++t) part[k * width + t].merge(part[(k + step) * width + t]);
  for (int t = 0; t < width; ++t) result[t] = part[t];
}

// ---------------------------------------------------------------- loops
template <int K> struct Index { static constexpr int value = K; constexpr operator int() const { return K; } };

// body(i, lanes, u) for all vectors of [begin, end); u < U names the accumulator so that U chains run side by side.
template <int L, int U, class Body> TL_INLINE void each_vector(int64_t begin, int64_t end, Body body) {
  int64_t i = begin;
  if constexpr (U == 2) {
    for (; i + 2 * L <= end; i += 2 * L) {
      body(i, Full<L>{}, Index<0>{});
      body(i + L, Full<L>{}, Index<1>{});
    }
  }
  if constexpr (U == 4) {
    for (; i + 4 * L <= end; i += 4 * L) {
      body(i, Full<L>{}, Index<0>{});
      body(i + L, Full<L>{}, Index<1>{});
      body(i + 2 * L, Full<L>{}, Index<2>{});
      body(i + 3 * L, Full<L>{}, Index<3>{});
    }
  }
  for (; i + L <= end; i += L) body(i, Full<L>{}, Index<0>{});
  if (i < end) body(i, Tail<L>{int(end - i)}, Index<0>{});
}
// body(i, lanes, t): t counts the vectors.
template <int L, class Body> TL_INLINE void each_tile_vector(int64_t begin, int64_t end, Body body) {
  int64_t i = begin;
  int t = 0;
  for (; i + L <= end; i += L, ++t) body(i, Full<L>{}, t);
  if (i < end) body(i, Tail<L>{int(end - i)}, t);
}

// ---------------------------------------------------------------- threads
struct Range { int64_t begin, end; };
TL_INLINE Range share(int64_t tasks) {  // this thread's contiguous part
  const int64_t n = omp_get_num_threads(), k = omp_get_thread_num();
  const int64_t each = tasks / n, more = tasks % n;
  const int64_t begin = k * each + (k < more ? k : more);
  return {begin, begin + each + (k < more)};
}
// One unit of work is one simple vectorised operation on one element. Serial and two threads met at 2^18 units: adding
// 64 K floats (4.1 us against 3.5), gelu of 16 K (3.3 against 3.5); 16 K additions took 1.4 us alone, 2.5 shared.
TL_INLINE bool worth_threads(int64_t tasks, int64_t work_each) {
  return tasks > 1 && tasks * work_each >= (1 << 18) && omp_get_max_threads() > 1 && !omp_in_parallel();
}
template <class T> struct Scratch {  // aligned memory for partial results
  T* at;
  explicit Scratch(int64_t n) : at((T*)__builtin_malloc(uint64_t(n) * sizeof(T) + 64)), base(at) {
    at = (T*)((uintptr_t(at) + 63) & ~uintptr_t(63));
    for (int64_t k = 0; k < n; ++k) at[k] = T();
  }
  ~Scratch() { __builtin_free(base); }
  Scratch(const Scratch&) = delete;
  TL_INLINE T& operator[](int64_t k) { return at[k]; }

 private:
  T* base;
};

}  // namespace tl

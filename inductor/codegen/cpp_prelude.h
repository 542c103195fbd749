// What generated C++ kernels are made of: vectors, memory access, arithmetic with ATen's meaning, reductions, threads.
//
// Invariant: a function template means the same on a scalar and on every lane of a vector. A vector of bool is a `Mask`
// (0 or -1 a lane, as wide in bytes as the machine's vectors); masks and integers of that width are one C++ type, so
// generated code says which it means. Halves exist in memory only: `load` widens to float, `store` rounds to nearest even.
// Kept light on purpose (no STL, builtins in place of <cmath>): each translation unit parses it once.
#pragma once
#include <cstdint>
#include <omp.h>

#define TL_INLINE inline __attribute__((always_inline))
// Bodies that are called twice, by one thread and by many, are compiled once: g++ takes 5 to 10 % less, kernels run alike.
#if defined(__clang__)
#define TL_APART __attribute__((noinline))
#else
#define TL_APART __attribute__((noinline, noclone))
#endif
#if defined(__AVX512F__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && defined(__AVX512BW__) && !defined(__clang__)
#define TL_AVX512 1  // GCC's generic lowering of conversions between lane widths is poor: use the instructions
#endif
#pragma GCC diagnostic ignored "-Wpragmas"
#pragma GCC diagnostic ignored "-Wpsabi"
#pragma GCC diagnostic ignored "-Wignored-attributes"

namespace tl {

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
constexpr int kLanes4 = kBytes / 4;  // lanes of a kernel whose widest vector value has 4 bytes
constexpr int kLanes8 = kBytes / 8;

// ---------------------------------------------------------------- types
template <class T, int L> struct VecOf { typedef T type __attribute__((vector_size(sizeof(T) * L))); };
template <class T, int L> using Vec = typename VecOf<T, L>::type;

template <class A, class B> constexpr bool same = false;
template <class A> constexpr bool same<A, A> = true;
template <class T> T&& declare();
template <class T> struct Bare { typedef T type; };
template <class T> struct Bare<T&> { typedef T type; };
template <class T> struct Bare<const T> { typedef T type; };
template <class T> struct Bare<const T&> { typedef T type; };
template <class T> using bare = typename Bare<T>::type;

template <class V, class = void> struct Traits {
  typedef V element;
  static constexpr int lanes = 0;
};
template <class V> struct Traits<V, decltype(void(declare<V&>()[0]))> {
  typedef bare<decltype(declare<V&>()[0])> element;
  static constexpr int lanes = int(sizeof(V) / sizeof(element));
};
template <class V> using Element = typename Traits<V>::element;
template <class V> constexpr int lanes_of = Traits<V>::lanes;
template <class V> constexpr bool is_vector = lanes_of<V> != 0;
template <class V> constexpr bool is_float = same<Element<V>, float> || same<Element<V>, double>;
template <class V> constexpr bool is_signed = is_float<V> || Element<V>(-1) < Element<V>(0);

template <int Bytes, bool Signed = true> struct IntOf;
template <> struct IntOf<1, true> { typedef int8_t type; };
template <> struct IntOf<2, true> { typedef int16_t type; };
template <> struct IntOf<4, true> { typedef int32_t type; };
template <> struct IntOf<8, true> { typedef int64_t type; };
template <> struct IntOf<1, false> { typedef uint8_t type; };
template <> struct IntOf<2, false> { typedef uint16_t type; };
template <> struct IntOf<4, false> { typedef uint32_t type; };
template <> struct IntOf<8, false> { typedef uint64_t type; };
template <class V> struct UnsignedOf { typedef typename IntOf<sizeof(V), false>::type type; };
template <class T, int L> using IntVec = Vec<typename IntOf<sizeof(T)>::type, L>;
template <class V, bool = is_vector<V>> struct Unsigned { typedef typename IntOf<sizeof(V), false>::type type; };
template <class V> struct Unsigned<V, true> {
  typedef Vec<typename IntOf<sizeof(Element<V>), false>::type, lanes_of<V>> type;
};

template <int L> using Mask = Vec<typename IntOf<kBytes / L>::type, L>;

struct BFloat16 { uint16_t bits; };
struct Half { uint16_t bits; };

// Which lanes of a vector are real: all of them, or the first n at the end of a row.
template <int L> struct Full { static constexpr int n = L; };
template <int L> struct Tail { int n; };
template <class Lanes> constexpr bool is_full = false;
template <int L> constexpr bool is_full<Full<L>> = true;

template <class To, class From> TL_INLINE To bits_to(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits_to: sizes differ");
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

template <class T, int L> TL_INLINE Vec<T, L> splat(T value) {
  return value - Vec<T, L>{};  // x - 0 is x, also for -0 and nan
}
template <int L> TL_INLINE Mask<L> splat_mask(bool value) {
  return Mask<L>{} - Element<Mask<L>>(value);
}
template <class T, int L> TL_INLINE Vec<T, L> iota(int64_t first, int64_t step) {
  Vec<typename IntOf<(sizeof(T) < 4 ? 4 : sizeof(T))>::type, L> r;
  for (int k = 0; k < L; ++k) r[k] = k;
  return __builtin_convertvector(r * Element<decltype(r)>(step) + Element<decltype(r)>(first), Vec<T, L>);
}

// ---------------------------------------------------------------- conversion
template <class T, class V> TL_INLINE Vec<T, lanes_of<V>> convert_vector(V v) {
  constexpr int L = lanes_of<V>;
  typedef Element<V> S;
  typedef Vec<T, L> R;
  if constexpr (same<S, T>) {
    return v;
  } else if constexpr (!is_float<V> && (same<T, float> || same<T, double>)) {
    if constexpr (sizeof(S) < 4) return __builtin_convertvector(convert_vector<int32_t>(v), R);
    else return __builtin_convertvector(v, R);
  } else if constexpr (is_float<V> && !(same<T, float> || same<T, double>)) {
    if constexpr (sizeof(T) < 4) return convert_vector<T>(__builtin_convertvector(v, Vec<int32_t, L>));
    else return __builtin_convertvector(v, R);
#ifdef TL_AVX512
  } else if constexpr (L == 16 && sizeof(S) == 1 && sizeof(T) == 4) {
    typedef Vec<char, 16> A;
    typedef Vec<int, 16> B;
    if constexpr (is_signed<V>) return (R)__builtin_ia32_pmovsxbd512_mask((A)v, B{}, (uint16_t)-1);
    else return (R)__builtin_ia32_pmovzxbd512_mask((A)v, B{}, (uint16_t)-1);
  } else if constexpr (L == 16 && sizeof(S) == 2 && sizeof(T) == 4) {
    typedef Vec<short, 16> A;
    typedef Vec<int, 16> B;
    if constexpr (is_signed<V>) return (R)__builtin_ia32_pmovsxwd512_mask((A)v, B{}, (uint16_t)-1);
    else return (R)__builtin_ia32_pmovzxwd512_mask((A)v, B{}, (uint16_t)-1);
  } else if constexpr (L == 8 && sizeof(S) == 4 && sizeof(T) == 8) {
    typedef Vec<int, 8> A;
    typedef Vec<long long, 8> B;
    if constexpr (is_float<V>) return __builtin_convertvector(v, R);
    else if constexpr (is_signed<V>) return (R)__builtin_ia32_pmovsxdq512_mask((A)v, B{}, (uint8_t)-1);
    else return (R)__builtin_ia32_pmovzxdq512_mask((A)v, B{}, (uint8_t)-1);
  } else if constexpr (L == 16 && sizeof(S) == 4 && sizeof(T) == 1) {
    return (R)__builtin_ia32_pmovdb512_mask((Vec<int, 16>)v, Vec<char, 16>{}, (uint16_t)-1);
  } else if constexpr (L == 16 && sizeof(S) == 4 && sizeof(T) == 2) {
    return (R)__builtin_ia32_pmovdw512_mask((Vec<int, 16>)v, Vec<short, 16>{}, (uint16_t)-1);
  } else if constexpr (L == 8 && sizeof(S) == 8 && sizeof(T) == 4 && !is_float<V>) {
    return (R)__builtin_ia32_pmovqd512_mask((Vec<long long, 8>)v, Vec<int, 8>{}, (uint8_t)-1);
#endif
  } else {
    return __builtin_convertvector(v, R);
  }
}

template <class V> TL_INLINE Mask<lanes_of<V>> as_mask(V wide) {  // comparison result (0 or -1) of any width
  return convert_vector<Element<Mask<lanes_of<V>>>>(wide);
}
template <class T, int L> TL_INLINE IntVec<T, L> mask_for(Mask<L> mask) {  // a mask as wide as T
  return convert_vector<Element<IntVec<T, L>>>(mask);
}
template <class V> TL_INLINE V where(Mask<lanes_of<V>> mask, V a, V b) {
  return mask_for<Element<V>, lanes_of<V>>(mask) ? a : b;
}
template <class V> TL_INLINE V where(bool condition, V a, V b) { return condition ? a : b; }
template <class M> TL_INLINE M where_mask(M mask, M a, M b) { return (mask & a) | (~mask & b); }

template <class T, class V> TL_INLINE auto convert(V v) {
  if constexpr (is_vector<V>) return convert_vector<T>(v);
  else if constexpr (same<T, bool>) return v != V(0);
  else if constexpr (is_float<V> && !(same<T, float> || same<T, double>) && sizeof(T) < 4) return T(int32_t(v));
  else return T(v);
}
template <class V> TL_INLINE auto to_mask(V v) { return as_mask(v != V{}); }  // x != 0
template <class T, class M> TL_INLINE Vec<T, lanes_of<M>> from_mask(M mask) {  // 1 where true
  constexpr int L = lanes_of<M>;
  if constexpr (same<T, float> || same<T, double>) return where(mask, splat<T, L>(T(1)), Vec<T, L>{});
  else return -(Vec<T, L>)mask_for<T, L>(mask);
}

template <class M> TL_INLINE uint32_t mask_bits(M mask) {
#ifdef TL_AVX512
  if constexpr (sizeof(Element<M>) == 4 && lanes_of<M> == 16) return uint16_t(__builtin_ia32_cvtd2mask512((Vec<int, 16>)mask));
  else if constexpr (sizeof(Element<M>) == 8 && lanes_of<M> == 8)
    return uint8_t(__builtin_ia32_cvtq2mask512((Vec<long long, 8>)mask));
  else
#elif defined(__AVX2__)
  if constexpr (sizeof(Element<M>) == 4 && lanes_of<M> == 8) return uint32_t(__builtin_ia32_movmskps256((Vec<float, 8>)mask));
  else if constexpr (sizeof(Element<M>) == 8 && lanes_of<M> == 4)
    return uint32_t(__builtin_ia32_movmskpd256((Vec<double, 4>)mask));
  else
#endif
  {
    uint32_t bits = 0;
    for (int k = 0; k < lanes_of<M>; ++k) bits |= uint32_t(mask[k] & 1) << k;
    return bits;
  }
}
template <class T> TL_INLINE auto round_bf16_bits(T u) {  // T: uint32_t or a vector of it, the bits of a float
  return (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
}
TL_INLINE uint16_t to_bf16(float x) {
  const uint32_t u = bits_to<uint32_t>(x);
  return uint16_t(x == x ? round_bf16_bits(u) : (u >> 16) | 0x40u);
}
TL_INLINE float from_bf16(uint16_t bits) { return bits_to<float>(uint32_t(bits) << 16); }

// fp16 by arithmetic on float bits, lanes alike: V is float or a vector, U and I its unsigned and signed integers.
template <class V, class U> TL_INLINE V widen_half(U h) {
  const U sign = (h & 0x8000u) << 16;
  const U body = (h & 0x7fffu) << 13;
  const V scaled = bits_to<V>(body) * bits_to<float>(uint32_t(0x77800000u));  // 2^112: normals and denormals alike
  const U special = bits_to<U>(scaled) | 0x7f800000u;
  const U is_special = (U)(body >= 0x0f800000u);
  U bits;
  if constexpr (is_vector<V>) bits = (is_special & special) | (~is_special & bits_to<U>(scaled));
  else bits = is_special ? special : bits_to<U>(scaled);
  return bits_to<V>(bits | sign);
}
TL_INLINE uint16_t to_half(float x) {
  const uint32_t u = bits_to<uint32_t>(x), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return uint16_t(sign | 0x7e00u | ((a >> 13) & 0x3ffu));
  if (a >= 0x477ff000u) return uint16_t(sign | 0x7c00u);
  if (a < 0x38800000u)  // denormal: adding 0.5 lets the machine round at 2^-24
    return uint16_t(sign | (bits_to<uint32_t>(bits_to<float>(a) + 0.5f) - 0x3f000000u));
  return uint16_t(sign | ((a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13));
}
TL_INLINE float from_half(uint16_t bits) { return widen_half<float, uint32_t>(uint32_t(bits)); }

template <class V> TL_INLINE auto to_bf16_vector(V x) {
  constexpr int L = lanes_of<V>;
  typedef Vec<uint32_t, L> U;
  const U u = (U)x;
  const U r = (x == x) ? round_bf16_bits(u) : (u >> 16) | 0x40u;
  return convert_vector<uint16_t>(r);
}
template <class V> TL_INLINE auto to_half_vector(V x) {
  constexpr int L = lanes_of<V>;
  typedef Vec<uint32_t, L> U;
#ifdef TL_AVX512
  if constexpr (L == 16)
    return (Vec<uint16_t, L>)__builtin_ia32_vcvtps2ph512_mask((Vec<float, 16>)x, 4, Vec<short, 16>{}, (uint16_t)-1);
  else
#endif
  {
    const U u = (U)x, sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
    const U small = (U)((V)a + 0.5f) - 0x3f000000u;
    const U normal = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13;
    U r = (a < 0x38800000u) ? small : normal;
    r = (a >= 0x477ff000u) ? U{} + 0x7c00u : r;
    r = (a > 0x7f800000u) ? ((a >> 13) & 0x3ffu) | 0x7e00u : r;
    return convert_vector<uint16_t>(r | sign);
  }
}
template <class V> TL_INLINE V round_to_bf16(V x) {
  if constexpr (is_vector<V>) return (V)(convert_vector<uint32_t>(to_bf16_vector(x)) << 16);
  else return from_bf16(to_bf16(x));
}
template <class V> TL_INLINE V round_to_half(V x) {
  if constexpr (is_vector<V>) return widen_half<V, Vec<uint32_t, lanes_of<V>>>(convert_vector<uint32_t>(to_half_vector(x)));
  else return from_half(to_half(x));
}

// ---------------------------------------------------------------- memory
template <class T> TL_INLINE T load(const T* p) { return *p; }
TL_INLINE float load(const BFloat16* p) { return from_bf16(p->bits); }
TL_INLINE float load(const Half* p) { return from_half(p->bits); }
template <class T> TL_INLINE void store(T* p, T value) { *p = value; }
TL_INLINE void store(BFloat16* p, float value) { p->bits = to_bf16(value); }
TL_INLINE void store(Half* p, float value) { p->bits = to_half(value); }

template <int Bytes> TL_INLINE void copy_ladder(char* to, const char* from, int bytes, int& at) {
  if (bytes & Bytes) {
    __builtin_memcpy(to + at, from + at, Bytes);
    at += Bytes;
  }
}
TL_INLINE void copy_some(void* to, const void* from, int bytes) {  // fewer than 128
  int at = 0;
  copy_ladder<64>((char*)to, (const char*)from, bytes, at);
  copy_ladder<32>((char*)to, (const char*)from, bytes, at);
  copy_ladder<16>((char*)to, (const char*)from, bytes, at);
  copy_ladder<8>((char*)to, (const char*)from, bytes, at);
  copy_ladder<4>((char*)to, (const char*)from, bytes, at);
  copy_ladder<2>((char*)to, (const char*)from, bytes, at);
  copy_ladder<1>((char*)to, (const char*)from, bytes, at);
}
template <class T, int L> TL_INLINE Vec<T, L> load_raw(const void* p, Full<L>) {
  Vec<T, L> v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
template <class T, int L> TL_INLINE Vec<T, L> load_raw(const void* p, Tail<L> lanes) {
#ifdef TL_AVX512
  if constexpr (sizeof(T) == 4 && L == 16)
    return (Vec<T, L>)__builtin_ia32_loaddqusi512_mask((const int*)p, Vec<int, 16>{}, uint16_t((1u << lanes.n) - 1));
  else if constexpr (sizeof(T) == 8 && L == 8)
    return (Vec<T, L>)__builtin_ia32_loaddqudi512_mask((const long long*)p, Vec<long long, 8>{},
                                                       uint8_t((1u << lanes.n) - 1));
  else
#endif
  {
    Vec<T, L> v{};
    copy_some(&v, p, lanes.n * int(sizeof(T)));
    return v;
  }
}
template <class V, int L> TL_INLINE void store_raw(void* p, V v, Full<L>) { __builtin_memcpy(p, &v, sizeof(v)); }
template <class V, int L> TL_INLINE void store_raw(void* p, V v, Tail<L> lanes) {
#ifdef TL_AVX512
  if constexpr (sizeof(Element<V>) == 4 && L == 16)
    __builtin_ia32_storedqusi512_mask((int*)p, (Vec<int, 16>)v, uint16_t((1u << lanes.n) - 1));
  else if constexpr (sizeof(Element<V>) == 8 && L == 8)
    __builtin_ia32_storedqudi512_mask((long long*)p, (Vec<long long, 8>)v, uint8_t((1u << lanes.n) - 1));
  else
#endif
    copy_some(p, &v, lanes.n * int(sizeof(Element<V>)));
}

template <int L, class T, class Lanes> TL_INLINE auto load(const T* p, Lanes lanes) {
  if constexpr (same<T, BFloat16>) {
    return (Vec<float, L>)(convert_vector<uint32_t>(load_raw<uint16_t, L>(p, lanes)) << 16);
  } else if constexpr (same<T, Half>) {
    const auto bits = load_raw<uint16_t, L>(p, lanes);
#ifdef TL_AVX512
    if constexpr (L == 16)
      return (Vec<float, L>)__builtin_ia32_vcvtph2ps512_mask((Vec<short, 16>)bits, Vec<float, 16>{}, (uint16_t)-1, 4);
    else
#endif
      return widen_half<Vec<float, L>, Vec<uint32_t, L>>(convert_vector<uint32_t>(bits));
  } else if constexpr (same<T, bool>) {
    return to_mask(convert_vector<Element<Mask<L>>>(load_raw<uint8_t, L>(p, lanes)));
  } else {
    return load_raw<T, L>(p, lanes);
  }
}
template <class T, class V, class Lanes> TL_INLINE void store(T* p, V value, Lanes lanes) {
  if constexpr (same<T, BFloat16>) store_raw(p, to_bf16_vector(value), lanes);
  else if constexpr (same<T, Half>) store_raw(p, to_half_vector(value), lanes);
  else if constexpr (same<T, bool>) store_raw(p, convert_vector<uint8_t>(value) & uint8_t(1), lanes);
  else store_raw(p, value, lanes);
}

template <class M> TL_INLINE bool any_lane(M mask) { return mask_bits(mask) != 0; }
TL_INLINE bool any_lane(bool condition) { return condition; }

template <int L> TL_INLINE Mask<L> lane_mask(Full<L>) { return splat_mask<L>(true); }
// The count is hidden from the optimiser: GCC 12 at -O3 folds a choice between two vectors it knows into one of them.
template <int L> TL_INLINE Mask<L> lane_mask(Tail<L> lanes) {
  int n = lanes.n;
  __asm__("" : "+r"(n));
  return as_mask(iota<Element<Mask<L>>, L>(0, 1) < Element<Mask<L>>(n));
}
template <class M, int L> TL_INLINE M active(M mask, Full<L>) { return mask; }
template <class M, int L> TL_INLINE M active(M mask, Tail<L> lanes) { return mask & lane_mask(lanes); }

template <class R, int L> struct Gathered { typedef Vec<R, L> type; };
template <int L> struct Gathered<bool, L> { typedef Mask<L> type; };

// One scalar load a lane: `at(k)` is lane k's value. The mask form asks only for the lanes that hold.
template <int L, class Lanes, class At> TL_INLINE auto gather(Lanes lanes, At at) {
  typedef bare<decltype(at(0))> R;
  typename Gathered<R, L>::type v{};
  for (int k = 0; k < (is_full<Lanes> ? L : lanes.n); ++k) {
    if constexpr (same<R, bool>) v[k] = -Element<Mask<L>>(at(k));
    else v[k] = at(k);
  }
  return v;
}
template <int L, class At> TL_INLINE auto gather_masked(Mask<L> mask, At at) {
  typedef bare<decltype(at(0))> R;
  typename Gathered<R, L>::type v{};
  for (uint32_t bits = mask_bits(mask); bits; bits &= bits - 1) {
    const int k = __builtin_ctz(bits);
    if constexpr (same<R, bool>) v[k] = -Element<Mask<L>>(at(k));
    else v[k] = at(k);
  }
  return v;
}
template <int L, class T> TL_INLINE auto load_masked(const T* p, Mask<L> mask) {
  const uint32_t bits = mask_bits(mask);
  if (__builtin_expect(bits == uint32_t((uint64_t(1) << L) - 1), 1)) return load<L>(p, Full<L>{});
  return gather_masked<L>(mask, [&](int k) { return load(p + k); });
}
// One of log2(L) steps of a transpose: exchanges the H lanes beside the diagonal between rows i and i + H.
template <int H, class V> TL_INLINE void transpose_step(V* rows) {
  constexpr int L = lanes_of<V>;
  typedef IntVec<Element<V>, L> I;
  if constexpr (H < L) {
#define TL_LO(j) (((j)&H) == 0 ? (j) : L + (j)-H)
#define TL_HI(j) (((j)&H) == 0 ? (j) + H : L + (j))
    for (int i = 0; i < L; ++i) {
      if (i & H) continue;
      const V a = rows[i], b = rows[i + H];
#if defined(__clang__)
      for (int j = 0; j < L; ++j) {
        rows[i][j] = (j & H) == 0 ? a[j] : b[j - H];
        rows[i + H][j] = (j & H) == 0 ? a[j + H] : b[j];
      }
#else
      I lo, hi;
      for (int j = 0; j < L; ++j) {
        lo[j] = TL_LO(j);
        hi[j] = TL_HI(j);
      }
      rows[i] = __builtin_shuffle(a, b, lo);
      rows[i + H] = __builtin_shuffle(a, b, hi);
#endif
    }
    transpose_step<2 * H>(rows);
#undef TL_LO
#undef TL_HI
  }
}
// out[j] = the vector over k of p[k * stride + j], for j < count: rows are read whole, then turned.
template <int L, class V, class T, class Lanes>
TL_INLINE void load_transposed(V* out, const T* p, int64_t stride, Lanes lanes, int count) {
  V rows[L];
  if (is_full<Lanes> && count == L) {
    for (int k = 0; k < L; ++k) rows[k] = load<L>(p + k * stride, Full<L>{});
  } else {
    for (int k = 0; k < L; ++k) rows[k] = k < lanes.n ? load<L>(p + k * stride, Tail<L>{count}) : V{};
  }
  transpose_step<1>(rows);
  for (int k = 0; k < L; ++k) out[k] = rows[k];
}
template <class Lanes, class V, class Put> TL_INLINE void scatter(Lanes lanes, V value, Put put) {
  for (int k = 0; k < (is_full<Lanes> ? lanes_of<V> : lanes.n); ++k) put(k, value[k]);
}
template <class V, class F> TL_INLINE V lanewise(V v, F f) {
  V r;
  for (int k = 0; k < lanes_of<V>; ++k) r[k] = f(v[k]);
  return r;
}
template <class V, class F> TL_INLINE V lanewise(V a, V b, F f) {
  V r;
  for (int k = 0; k < lanes_of<V>; ++k) r[k] = f(a[k], b[k]);
  return r;
}

// ---------------------------------------------------------------- indirect access
TL_INLINE void report(int* error, int position) {
  if (__atomic_load_n(error, __ATOMIC_RELAXED) == 0) __atomic_store_n(error, position, __ATOMIC_RELAXED);
}
template <class T> TL_INLINE int64_t wrap_index(T value, int64_t size, int* error, int position) {
  int64_t i = int64_t(value);
  if (i < 0) i += size;
  if (__builtin_expect(uint64_t(i) >= uint64_t(size), 0)) {
    report(error, position);
    i = 0;
  }
  return i;
}
template <int L> struct Indices {
  int64_t at[L];
  TL_INLINE int64_t operator[](int k) const { return at[k]; }
};
template <int L, class V> TL_INLINE Indices<L> wrap_indices(V value, int64_t size, Mask<L> valid, int* error, int position) {
  Indices<L> r;
  for (int k = 0; k < L; ++k) r.at[k] = valid[k] ? wrap_index(Element<V>(value[k]), size, error, position) : 0;
  return r;
}

TL_INLINE int64_t min_index(int64_t a, int64_t b) { return a < b ? a : b; }
TL_INLINE int64_t max_index(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace tl

#include "cpp_math.h"
#include "cpp_arith.h"
#include "cpp_reduce.h"

// The operations of loop bodies by name, on scalars and vectors alike, with ATen's meaning for every edge.
//
// Invariant: one name means the same for every number type. float32 vectors take the functions of cpp_math.h, float64 and
// rare functions go to libm lane by lane. Integers wrap around; a division by zero never traps. Included by
// cpp_prelude.h only.
#pragma once

namespace tl {

// ---------------------------------------------------------------- float operations by name
#define TL_FLOAT1(name)                                                                                      \
  template <class V> TL_INLINE V name(V x) {                                                                 \
    if constexpr (is_vector<V>) return lanewise(x, [](Element<V> a) { return scalar_##name(a); });           \
    else return scalar_##name(x);                                                                            \
  }
#define TL_FLOAT1_VECTOR(name, vector_form)                                                                  \
  template <class V> TL_INLINE V name(V x) {                                                                 \
    if constexpr (is_float_vector<V>) return vector_form(x);                                                 \
    else if constexpr (is_vector<V>) return lanewise(x, [](Element<V> a) { return scalar_##name(a); });      \
    else return scalar_##name(x);                                                                            \
  }
#define TL_FLOAT2(name)                                                                                      \
  template <class V> TL_INLINE V name(V x, V y) {                                                            \
    if constexpr (is_vector<V>) return lanewise(x, y, [](Element<V> a, Element<V> b) { return scalar_##name(a, b); }); \
    else return scalar_##name(x, y);                                                                         \
  }
TL_FLOAT1_VECTOR(exp, vector_exp) TL_FLOAT1_VECTOR(exp2, vector_exp2) TL_FLOAT1_VECTOR(expm1, vector_expm1)
TL_FLOAT1_VECTOR(log, vector_log) TL_FLOAT1_VECTOR(log2, vector_log2) TL_FLOAT1_VECTOR(log10, vector_log10)
TL_FLOAT1_VECTOR(log1p, vector_log1p) TL_FLOAT1_VECTOR(tanh, vector_tanh) TL_FLOAT1_VECTOR(erf, vector_erf)
TL_FLOAT1_VECTOR(sin, sincos<false>) TL_FLOAT1_VECTOR(cos, sincos<true>)
TL_FLOAT1(tan) TL_FLOAT1(asin) TL_FLOAT1(acos) TL_FLOAT1(atan) TL_FLOAT1(sinh) TL_FLOAT1(cosh) TL_FLOAT1(asinh)
TL_FLOAT1(acosh) TL_FLOAT1(atanh) TL_FLOAT1(erfc) TL_FLOAT1(lgamma)
TL_FLOAT2(atan2) TL_FLOAT2(hypot) TL_FLOAT2(nextafter)
#undef TL_FLOAT1
#undef TL_FLOAT1_VECTOR
#undef TL_FLOAT2

template <class V> TL_INLINE V rsqrt(V x) { return Element<V>(1) / sqrt(x); }
template <class V> TL_INLINE V reciprocal(V x) { return Element<V>(1) / x; }
template <class V> TL_INLINE V copysign(V a, V b) {
  if constexpr (is_vector<V>) return with_sign(a, b);
  else return scalar_copysign(a, b);
}

// Inverse error function in double: Winitzki's closed form of w = -log(1 - x^2) to start with, then Halley's steps.
TL_INLINE double scalar_erfinv(double y) {
  const double a = scalar_fabs(y);
  if (!(a < 1.0)) return a == 1.0 ? scalar_copysign(__builtin_inf(), y) : __builtin_nan("");
  const double w = -scalar_log1p(-y * y), c = 4.330746750799873 - w * 0.5;  // 2 / (pi * 0.147)
  double x = scalar_copysign(scalar_sqrt(scalar_sqrt(c * c + w * 6.802721088435374) - c), y);
  x = a < 1e-8 ? y * 0.8862269254527580 : x;
  const double rest = 1.0 - a;
  for (int k = 0; k < 4; ++k) {  // Halley; the complement keeps the digits near 1
    const double t = scalar_fabs(x);
    const double difference = a > 0.5 ? rest - scalar_erfc(t) : scalar_erf(t) - a;
    const double step = difference / (1.1283791670955126 * scalar_exp(-t * t));
    const double next = t - step / (1.0 + t * step);
    x = scalar_copysign(next, y);
  }
  return x;
}
template <class V> TL_INLINE V erfinv(V x) {
  if constexpr (is_vector<V>) return lanewise(x, [](Element<V> a) { return Element<V>(scalar_erfinv(double(a))); });
  else return V(scalar_erfinv(double(x)));
}

// ---------------------------------------------------------------- operations on every number type
template <class V> using UnsignedV = typename Unsigned<V>::type;
#define TL_WRAPPING(name, op)                                                        \
  template <class V> TL_INLINE V name(V a, V b) {                                    \
    if constexpr (is_float<V>) return a op b;                                        \
    else if constexpr (!is_vector<V> && sizeof(V) < 4) return V(int32_t(a) op int32_t(b)); \
    else return V(UnsignedV<V>(a) op UnsignedV<V>(b));                               \
  }
TL_WRAPPING(add, +) TL_WRAPPING(sub, -) TL_WRAPPING(mul, *)
#undef TL_WRAPPING
template <class V> TL_INLINE V div(V a, V b) { return a / b; }
template <class V> TL_INLINE V neg(V x) {
  if constexpr (is_float<V>) return -x;
  else return sub(V{}, x);
}
template <class V> TL_INLINE V abs(V x) {
  if constexpr (is_float<V> && is_vector<V>) return fabs(x);
  else if constexpr (is_float<V>) return scalar_fabs(x);
  else if constexpr (!is_signed<V>) return x;
  else return x < V{} ? neg(x) : x;
}
template <class V> TL_INLINE V sign(V x) {  // nan: 0, as ATen
  typedef Element<V> T;
  if constexpr (is_vector<V>) return (x > V{} ? spread<V>(T(1)) : V{}) - (x < V{} ? spread<V>(T(1)) : V{});
  else return V(x > V(0)) - V(x < V(0));
}
#define TL_ROUNDING(name)                            \
  template <class V> TL_INLINE V name(V x) {         \
    if constexpr (is_float<V>) return name##_float(x); \
    else return x;                                   \
  }
TL_ROUNDING(floor) TL_ROUNDING(ceil) TL_ROUNDING(trunc) TL_ROUNDING(round)
#undef TL_ROUNDING

#define TL_COMPARE(name, op)                                     \
  template <class V> TL_INLINE auto name(V a, V b) {             \
    if constexpr (is_vector<V>) return as_mask(a op b);          \
    else return a op b;                                          \
  }
TL_COMPARE(eq, ==) TL_COMPARE(ne, !=) TL_COMPARE(lt, <) TL_COMPARE(le, <=) TL_COMPARE(gt, >) TL_COMPARE(ge, >=)
#undef TL_COMPARE
template <class V> TL_INLINE auto isnan(V x) { return ne(x, x); }
template <class V> TL_INLINE auto isinf(V x) {
  if constexpr (is_float<V>) return eq(abs(x), V(V{} + Element<V>(__builtin_inf())));
  else return ne(x, x);
}
template <class V> TL_INLINE auto signbit(V x) {
  if constexpr (is_float<V> && is_vector<V>) return as_mask((Bits<V>)x < Bits<V>{});
  else if constexpr (is_float<V>) return bool(__builtin_signbit(x));
  else return lt(x, V{});
}
template <class V> TL_INLINE auto logical_not(V x) { return eq(x, V{}); }
template <class V> TL_INLINE V bitwise_not(V x) { return V(~x); }
TL_INLINE bool bitwise_not(bool x) { return !x; }
template <class V> TL_INLINE V bitwise_and(V a, V b) { return V(a & b); }
template <class V> TL_INLINE V bitwise_or(V a, V b) { return V(a | b); }
template <class V> TL_INLINE V bitwise_xor(V a, V b) { return V(a ^ b); }

// A nan in either operand wins; of equal ones the second, as zeros have signs (ATen's vectors).
template <class V> TL_INLINE V maximum(V a, V b) {
  if constexpr (is_float<V>) return a != a ? a : (a > b ? a : b);
  else return a > b ? a : b;
}
template <class V> TL_INLINE V minimum(V a, V b) {
  if constexpr (is_float<V>) return a != a ? a : (a < b ? a : b);
  else return a < b ? a : b;
}
// A nan loses; of equal ones the first stays, as zeros have signs.
template <class V> TL_INLINE V fmax(V a, V b) {
  if constexpr (is_float<V> && is_vector<V>) return ((a >= b) | (b != b)) ? a : b;
  else if constexpr (is_float<V>) return a >= b || b != b ? a : b;
  else return a > b ? a : b;
}
template <class V> TL_INLINE V fmin(V a, V b) {
  if constexpr (is_float<V> && is_vector<V>) return ((a <= b) | (b != b)) ? a : b;
  else if constexpr (is_float<V>) return a <= b || b != b ? a : b;
  else return a < b ? a : b;
}

// ---------------------------------------------------------------- division in all its roundings
// An integer divided by 0 gives 0 (ATen raises; a machine trap would end the process).
template <class T> TL_INLINE T scalar_trunc_div(T a, T b) {
  if constexpr (is_float<T>) return scalar_trunc(a / b);
  else if constexpr (is_signed<T>) return b == T(-1) ? neg(a) : b == T(0) ? T(0) : T(a / b);
  else return b == T(0) ? T(0) : T(a / b);
}
template <class T> TL_INLINE T scalar_fmod_any(T a, T b) {
  if constexpr (is_float<T>) return scalar_fmod(a, b);
  else if constexpr (is_signed<T>) return b == T(-1) || b == T(0) ? T(0) : T(a % b);
  else return b == T(0) ? T(0) : T(a % b);
}
template <class T> TL_INLINE T scalar_remainder(T a, T b) {
  const T r = scalar_fmod_any(a, b);
  if constexpr (!is_signed<T>) return r;
  else return r != T(0) && (r < T(0)) != (b < T(0)) ? T(r + b) : r;
}
template <class T> TL_INLINE T scalar_floor_div(T a, T b) {
  if constexpr (is_float<T>) {
    if (b == T(0)) return a / b;
    const T r = scalar_fmod(a, b);
    T quotient = (a - r) / b;
    if (r != T(0) && (b < T(0)) != (r < T(0))) quotient -= T(1);
    if (quotient == T(0)) return scalar_copysign(T(0), a / b);
    const T low = scalar_floor(quotient);
    return quotient - low > T(0.5) ? low + T(1) : low;
  } else if constexpr (is_signed<T>) {
    const T quotient = scalar_trunc_div(a, b);
    return b != T(0) && b != T(-1) && (a < T(0)) != (b < T(0)) && a % b != T(0) ? T(quotient - 1) : quotient;
  } else {
    return scalar_trunc_div(a, b);
  }
}
template <class T> TL_INLINE T scalar_shift_left(T a, T b) {
  constexpr int bits = 8 * sizeof(T);
  return b < T(0) || b >= T(bits) ? T(0) : T(typename Unsigned<T>::type(a) << int(b));
}
template <class T> TL_INLINE T scalar_shift_right(T a, T b) {
  constexpr int bits = 8 * sizeof(T);
  if constexpr (is_signed<T>) return T(a >> (b < T(0) || b >= T(bits) ? bits - 1 : int(b)));
  else return b >= T(bits) ? T(0) : T(a >> int(b));
}
template <class T> TL_INLINE T scalar_pow_any(T a, T b) {
  if constexpr (is_float<T>) {
    return scalar_pow(a, b);
  } else {
    if (b < T(0)) return a == T(1) ? T(1) : a == T(-1) ? (b & 1 ? T(-1) : T(1)) : T(0);
    T result = 1;
    for (; b; b = T(b >> 1), a = mul(a, a))
      if (b & 1) result = mul(result, a);
    return result;
  }
}
#define TL_LANES2(name, scalar)                                                                                 \
  template <class V> TL_INLINE V name(V a, V b) {                                                               \
    if constexpr (is_vector<V>) return lanewise(a, b, [](Element<V> x, Element<V> y) { return scalar(x, y); });   \
    else return scalar(a, b);                                                                                   \
  }
TL_LANES2(floor_div, scalar_floor_div) TL_LANES2(remainder, scalar_remainder) TL_LANES2(fmod, scalar_fmod_any)
TL_LANES2(shift_left, scalar_shift_left) TL_LANES2(shift_right, scalar_shift_right)
#undef TL_LANES2
template <class V> TL_INLINE V trunc_div(V a, V b) {
  if constexpr (is_float<V>) return trunc_float(a / b);
  else if constexpr (is_vector<V>) return lanewise(a, b, [](Element<V> x, Element<V> y) { return scalar_trunc_div(x, y); });
  else return scalar_trunc_div(a, b);
}
template <class V> TL_INLINE V pow(V a, V b) {
  if constexpr (is_float_vector<V>) return vector_pow(a, b);
  else if constexpr (is_vector<V>) return lanewise(a, b, [](Element<V> x, Element<V> y) { return scalar_pow_any(x, y); });
  else return scalar_pow_any(a, b);
}

// ---------------------------------------------------------------- Philox4x32-10, word 0 of the result
template <class U> TL_INLINE U wide_product(U a, uint32_t b) {  // low halves, 32 x 32 -> 64 bits
#ifdef TL_AVX512
  if constexpr (lanes_of<U> == 8)
    return (U)__builtin_ia32_pmuludq512_mask((Vec<int, 16>)a, (Vec<int, 16>)(U{} + uint64_t(b)), Vec<long long, 8>{}, (uint8_t)-1);
  else
#endif
    return (a & uint64_t(0xffffffffu)) * uint64_t(b);
}
template <class U> TL_INLINE U philox_word(uint64_t seed, uint32_t stream, U counter) {  // U: uint64_t or a vector of it
  const uint64_t low = 0xffffffffu;
  U a = counter & low, b = counter >> 32, c = U{} + uint64_t(stream), d = U{};
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const U p = wide_product(a, 0xD2511F53u), q = wide_product(c, 0xCD9E8D57u);
    a = (q >> 32) ^ b ^ uint64_t(k0);
    b = q & low;
    c = (p >> 32) ^ d ^ uint64_t(k1);
    d = p & low;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return a;
}
template <class V> TL_INLINE auto random_bits(int64_t seed, int32_t stream, V counter) {
  if constexpr (is_vector<V>)
    return convert_vector<int32_t>((V)philox_word((uint64_t)seed, (uint32_t)stream, (UnsignedV<V>)counter));
  else return int32_t(uint32_t(philox_word<uint64_t>(uint64_t(seed), uint32_t(stream), uint64_t(counter))));
}

}  // namespace tl

// Functions of float32 vectors: exp, log, sin, erf, pow ... and the machine operations that they need.
//
// Invariant: within about 2 units in the last place, exact for nan, infinities and denormals. Coefficients are our own
// least-maximum fits of the series named beside them. Included by cpp_prelude.h only.
#pragma once

namespace tl {

// ---------------------------------------------------------------- machine operations without an operator
#define TL_LIBM1(name)                                                                        \
  TL_INLINE float scalar_##name(float x) { return __builtin_##name##f(x); }                   \
  TL_INLINE double scalar_##name(double x) { return __builtin_##name(x); }
#define TL_LIBM2(name)                                                                        \
  TL_INLINE float scalar_##name(float x, float y) { return __builtin_##name##f(x, y); }       \
  TL_INLINE double scalar_##name(double x, double y) { return __builtin_##name(x, y); }
TL_LIBM1(floor) TL_LIBM1(ceil) TL_LIBM1(trunc) TL_LIBM1(rint) TL_LIBM1(sqrt) TL_LIBM1(exp) TL_LIBM1(exp2) TL_LIBM1(expm1)
TL_LIBM1(log) TL_LIBM1(log2) TL_LIBM1(log10) TL_LIBM1(log1p) TL_LIBM1(sin) TL_LIBM1(cos) TL_LIBM1(tan) TL_LIBM1(asin)
TL_LIBM1(acos) TL_LIBM1(atan) TL_LIBM1(sinh) TL_LIBM1(cosh) TL_LIBM1(tanh) TL_LIBM1(asinh) TL_LIBM1(acosh) TL_LIBM1(atanh)
TL_LIBM1(erf) TL_LIBM1(erfc) TL_LIBM1(lgamma) TL_LIBM1(fabs)
TL_LIBM2(pow) TL_LIBM2(atan2) TL_LIBM2(copysign) TL_LIBM2(hypot) TL_LIBM2(nextafter) TL_LIBM2(fmod)
#undef TL_LIBM1
#undef TL_LIBM2
TL_INLINE float scalar_fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
TL_INLINE double scalar_fma(double x, double y, double z) { return __builtin_fma(x, y, z); }

template <class V> constexpr bool is_float_vector = is_vector<V> && same<Element<V>, float>;
template <class V> using Bits = IntVec<Element<V>, lanes_of<V>>;
template <class V> TL_INLINE V spread(Element<V> x) { return splat<Element<V>, lanes_of<V>>(x); }

#ifdef TL_AVX512
#define TL_ROUND512(name, mode, fallback)                                                                              \
  template <class V> TL_INLINE V name(V x) {                                                                           \
    if constexpr (same<Element<V>, float> && lanes_of<V> == 16)                                                        \
      return __builtin_ia32_rndscaleps_mask(x, mode, x, (uint16_t)-1, 4);                                              \
    else if constexpr (same<Element<V>, float> && lanes_of<V> == 8)                                                    \
      return __builtin_ia32_roundps256(x, mode);                                                                       \
    else if constexpr (same<Element<V>, double> && lanes_of<V> == 8)                                                   \
      return __builtin_ia32_rndscalepd_mask(x, mode, x, (uint8_t)-1, 4);                                               \
    else if constexpr (is_vector<V>) return lanewise(x, [](Element<V> a) { return scalar_##fallback(a); });            \
    else return scalar_##fallback(x);                                                                                  \
  }
#elif defined(__AVX__) && !defined(__clang__)
#define TL_ROUND512(name, mode, fallback)                                                                              \
  template <class V> TL_INLINE V name(V x) {                                                                           \
    if constexpr (same<Element<V>, float> && lanes_of<V> == 8) return __builtin_ia32_roundps256(x, mode);              \
    else if constexpr (same<Element<V>, double> && lanes_of<V> == 4) return __builtin_ia32_roundpd256(x, mode);        \
    else if constexpr (is_vector<V>) return lanewise(x, [](Element<V> a) { return scalar_##fallback(a); });            \
    else return scalar_##fallback(x);                                                                                  \
  }
#else
#define TL_ROUND512(name, mode, fallback)                                                                              \
  template <class V> TL_INLINE V name(V x) {                                                                           \
    if constexpr (is_vector<V>) return lanewise(x, [](Element<V> a) { return scalar_##fallback(a); });                 \
    else return scalar_##fallback(x);                                                                                  \
  }
#endif
TL_ROUND512(round_float, 8, rint)
TL_ROUND512(floor_float, 9, floor)
TL_ROUND512(ceil_float, 10, ceil)
TL_ROUND512(trunc_float, 11, trunc)
#undef TL_ROUND512

template <class V> TL_INLINE V sqrt(V x) {
#ifdef TL_AVX512
  if constexpr (same<Element<V>, float> && lanes_of<V> == 16) return __builtin_ia32_sqrtps512_mask(x, x, (uint16_t)-1, 4);
  else if constexpr (same<Element<V>, double> && lanes_of<V> == 8) return __builtin_ia32_sqrtpd512_mask(x, x, (uint8_t)-1, 4);
  else
#endif
#if defined(__AVX__) && !defined(__clang__)
  if constexpr (same<Element<V>, float> && lanes_of<V> == 8) return __builtin_ia32_sqrtps256(x);
  else if constexpr (same<Element<V>, double> && lanes_of<V> == 4) return __builtin_ia32_sqrtpd256(x);
  else
#endif
  if constexpr (is_vector<V>) return lanewise(x, [](Element<V> a) { return scalar_sqrt(a); });
  else return scalar_sqrt(x);
}
template <class V> TL_INLINE V fma(V a, V b, V c) {  // fused where the machine can; only our own series ask for it
#if defined(__FMA__) && !defined(__clang__)
#ifdef TL_AVX512
  if constexpr (same<Element<V>, float> && lanes_of<V> == 16) return __builtin_ia32_vfmaddps512_mask(a, b, c, (uint16_t)-1, 4);
  else if constexpr (same<Element<V>, double> && lanes_of<V> == 8)
    return __builtin_ia32_vfmaddpd512_mask(a, b, c, (uint8_t)-1, 4);
  else
#endif
  if constexpr (same<Element<V>, float> && lanes_of<V> == 8) return __builtin_ia32_vfmaddps256(a, b, c);
  else if constexpr (same<Element<V>, float> && lanes_of<V> == 4) return __builtin_ia32_vfmaddps(a, b, c);
  else if constexpr (same<Element<V>, double> && lanes_of<V> == 4) return __builtin_ia32_vfmaddpd256(a, b, c);
  else
#endif
#ifdef __FMA__
  if constexpr (is_vector<V>) {
    for (int k = 0; k < lanes_of<V>; ++k) c[k] = scalar_fma(a[k], b[k], c[k]);
    return c;
  } else return scalar_fma(a, b, c);
#else
  return a * b + c;
#endif
}
template <class V> TL_INLINE V horner(V, V value) { return value; }
template <class V, class... Rest> TL_INLINE V horner(V x, V value, float next, Rest... rest) {  // highest power first
  return horner(x, fma(value, x, spread<V>(next)), rest...);
}

// max(x, low) and min(x, high); nan stays.
template <class V> TL_INLINE V clamp_below(V x, float low) {
#ifdef TL_AVX512
  if constexpr (lanes_of<V> == 16) return __builtin_ia32_maxps512_mask(spread<V>(low), x, x, (uint16_t)-1, 4);
#endif
  return x < low ? spread<V>(low) : x;
}
template <class V> TL_INLINE V clamp_above(V x, float high) {
#ifdef TL_AVX512
  if constexpr (lanes_of<V> == 16) return __builtin_ia32_minps512_mask(spread<V>(high), x, x, (uint16_t)-1, 4);
#endif
  return x > high ? spread<V>(high) : x;
}
template <class V> TL_INLINE V fabs(V x) {
  typedef Bits<V> I;
  return (V)((I)x & (I{} + Element<I>(~(Element<I>(1) << (8 * sizeof(Element<I>) - 1)))));
}
template <class V> TL_INLINE V with_sign(V magnitude, V sign) {
  typedef Bits<V> I;
  const I bit = I{} + Element<I>(Element<I>(1) << (8 * sizeof(Element<I>) - 1));
  return (V)(((I)magnitude & ~bit) | ((I)sign & bit));
}
template <class V> TL_INLINE V power_of_two(V n) {  // 2^n for integral n in the normal range
  typedef Bits<V> I;
  return (V)((__builtin_convertvector(n, I) + 127) << 23);
}
template <class V> TL_INLINE V scale(V x, V n) {  // x * 2^n, |n| up to about 250
#ifdef TL_AVX512
  if constexpr (lanes_of<V> == 16) return __builtin_ia32_scalefps512_mask(x, n, x, (uint16_t)-1, 4);
#endif
  const V half = round_float(n * 0.5f);
  return x * power_of_two(half) * power_of_two(n - half);
}

// ---------------------------------------------------------------- float32 vectors: exponentials
// exp(r) - 1 on |r| <= ln(2) / 2: r + r^2 * series
template <class V> TL_INLINE V expm1_reduced(V r) {
  const V p = horner(r, spread<V>(1.9845965e-04f), 1.3941653e-03f, 8.3333915e-03f, 4.1666348e-02f, 1.6666666e-01f, 0.5f);
  return fma(p, r * r, r);
}
template <class V> TL_INLINE V reduce_ln2(V x, V& n) {
  n = round_float(x * 1.44269504f);
  const V r = fma(n, spread<V>(-0.693145751953125f), x);  // 16 bits of ln 2: the product is exact
  return fma(n, spread<V>(-1.4286068e-06f), r);
}
template <class V> TL_INLINE V vector_exp(V x) {
  x = clamp_above(clamp_below(x, -104.0f), 89.0f);  // below: 0, above: inf, by scaling
  V n;
  const V r = reduce_ln2(x, n);
  const V p = horner(r, spread<V>(1.381314e-03f), 8.36942e-03f, 4.1668456e-02f, 1.6666515e-01f, 4.9999994e-01f);
  return scale(fma(p, r * r, r) + 1.0f, n);
}
template <class V> TL_INLINE V vector_exp2(V x) {
  x = clamp_above(clamp_below(x, -151.0f), 129.0f);
  const V n = round_float(x), r = x - n;
  const V p = horner(r, spread<V>(1.5195022e-05f), 1.5468022e-04f, 1.333395e-03f, 9.618035e-03f, 5.5504102e-02f,
                     2.402265e-01f, 6.931472e-01f);
  return scale(fma(p, r, spread<V>(1.0f)), n);
}
template <class V> TL_INLINE V vector_expm1(V x) {
  const V tiny = x;
  x = clamp_above(clamp_below(x, -30.0f), 89.0f);
  V n;
  const V p = expm1_reduced(reduce_ln2(x, n));
  const V half = power_of_two(n - 1.0f);
  const V r = fma(half, p, half - 0.5f) * 2.0f;
  return fabs(tiny) < 1e-20f ? tiny : r;
}
template <class V> TL_INLINE V vector_tanh(V x) {
  const V a = clamp_above(fabs(x), 10.0f);
  V n;
  const V p = expm1_reduced(reduce_ln2(a * 2.0f, n));
  const V power = power_of_two(n);
  const V t = fma(power, p, power - 1.0f);
  return with_sign(t / (t + 2.0f), x);
}

// ---------------------------------------------------------------- float32 vectors: logarithms
// x = m * 2^e with m in [sqrt(1/2), sqrt(2)); returns log(m), f = m - 1: f - f^2 / 2 + f^3 * series
template <class V> struct Log { V e, f, tail; };  // log(x) = e * ln 2 + f + tail
template <class V> TL_INLINE Log<V> split_log(V x) {
  typedef Bits<V> I;
  const I small = x < 1.17549435e-38f;
  const V y = small ? x * 8388608.0f : x;
  const I shifted = (I)y - 0x3f3504f3;
  const V e = __builtin_convertvector((shifted >> 23) - (small & 23), V);
  const V f = (V)((shifted & 0x007fffff) + 0x3f3504f3) - 1.0f;
  const V p = horner(f, spread<V>(6.746391e-02f), -1.16957046e-01f, 1.1899035e-01f, -1.2403309e-01f, 1.4217897e-01f,
                     -1.6668051e-01f, 2.0002194e-01f, -2.500001e-01f, 3.333331e-01f);
  const V z = f * f;
  return {e, f, fma(p * f, z, z * -0.5f)};
}
template <class V> TL_INLINE V log_edges(V x, V result) {
  const float inf = __builtin_inff();
  result = x == inf ? x : result;
  result = x == 0.0f ? spread<V>(-inf) : result;
  return x < 0.0f ? spread<V>(__builtin_nanf("")) : (x != x ? x : result);
}
template <class V> TL_INLINE V vector_log(V x) {
  const Log<V> s = split_log(x);
  const V low = fma(s.e, spread<V>(1.4286068e-06f), s.tail);
  return log_edges(x, fma(s.e, spread<V>(0.693145751953125f), s.f + low));
}
template <class V> TL_INLINE V vector_log2(V x) {
  const Log<V> s = split_log(x);  // log2(e) = 1.4427 = 1.44140625 + 0.00128879
  const V low = fma(s.tail, spread<V>(1.44269504f), s.f * 1.2887904e-03f);
  return log_edges(x, s.e + fma(s.f, spread<V>(1.44140625f), low));
}
template <class V> TL_INLINE V vector_log10(V x) {
  const Log<V> s = split_log(x);  // log10(e) = 0.4342945 = 0.434326171875 - 3.1689971e-05
  V low = fma(s.tail, spread<V>(4.3429448e-01f), s.f * -3.1689971e-05f);
  low = fma(s.e, spread<V>(4.605039e-06f), low);
  return log_edges(x, fma(s.e, spread<V>(0.301025390625f), fma(s.f, spread<V>(0.434326171875f), low)));
}
template <class V> TL_INLINE V vector_log1p(V x) {
  const V u = x + 1.0f;
  const V correction = (x - (u - 1.0f)) / u;  // what the addition lost
  const Log<V> s = split_log(u);
  const V low = fma(s.e, spread<V>(1.4286068e-06f), s.tail + correction);
  const V r = fma(s.e, spread<V>(0.693145751953125f), s.f + low);
  return fabs(x) < 1e-20f ? x : log_edges(u, r);
}

// ---------------------------------------------------------------- float32 vectors: sine, error function, power
template <bool Cosine, class V> TL_INLINE V vector_sincos(V x) {
  typedef Bits<V> I;
  const V n = round_float(x * 0.636619772f);
  V r = fma(n, spread<V>(-0x1.921fb6p+0f), x);
  r = fma(n, spread<V>(0x1.777a5cp-25f), r);
  r = fma(n, spread<V>(0x1.ee59dap-50f), r);
  const I q = __builtin_convertvector(n, I) + (Cosine ? 1 : 0);
  const V z = r * r;
  const V s = fma(horner(z, spread<V>(2.7179397e-06f), -1.9839295e-04f, 8.333329e-03f, -1.6666667e-01f) * z, r, r);
  const V c = fma(horner(z, spread<V>(-2.7206787e-07f), 2.479948e-05f, -1.3888883e-03f, 4.1666668e-02f) * z - 0.5f, z,
                  spread<V>(1.0f));
  V value = (q & 1) != 0 ? c : s;
  value = (V)((I)value ^ ((q & 2) << 30));
  if constexpr (!Cosine) value = r == 0.0f ? x : value;  // keeps -0
  return value;
}
template <bool Cosine, class V> TL_INLINE V sincos(V x) {
#ifdef __FMA__
  const auto far = as_mask(~(fabs(x) < 20000.0f));  // nan and inf too: libm knows
  if (__builtin_expect(!any_lane(far), 1)) return vector_sincos<Cosine>(x);
#endif
  return lanewise(x, [](float a) { return Cosine ? scalar_cos(a) : scalar_sin(a); });
}
#ifdef TL_AVX512
// erf(t) / t as a polynomial in t - centre on each quarter of [0, 4): 16 coefficients of one power fill one register.
const Vec<float, 16> kErf0 = {
    1.1225296e+00f, 1.0776451e+00f, 9.971854e-01f, 8.960858e-01f, 7.8967845e-01f, 6.8957824e-01f, 6.021192e-01f,
    5.290614e-01f, 4.6933928e-01f, 4.2072296e-01f, 3.8087416e-01f, 3.4780943e-01f, 3.1999683e-01f, 2.9629576e-01f,
    2.7586198e-01f, 2.580645e-01f};
const Vec<float, 16> kErf1 = {
    -9.3154944e-02f, -2.5944608e-01f, -3.738974e-01f, -4.2438942e-01f, -4.190262e-01f, -3.7761343e-01f,
    -3.210135e-01f, -2.6427495e-01f, -2.150581e-01f, -1.7545958e-01f, -1.4465763e-01f, -1.20876245e-01f,
    -1.02378264e-01f, -8.778756e-02f, -7.609925e-02f, -6.65972e-02f};
const Vec<float, 16> kErf2 = {
    -3.656423e-01f, -2.8849527e-01f, -1.6526486e-01f, -3.9730947e-02f, 5.419181e-02f, 1.0426741e-01f, 1.1707473e-01f,
    1.0740139e-01f, 8.8863485e-02f, 6.9871515e-02f, 5.3959895e-02f, 4.17537e-02f, 3.269627e-02f, 2.5998358e-02f,
    2.0990666e-02f, 1.7186025e-02f};
const Vec<float, 16> kErf3 = {
    5.5377237e-02f, 1.429849e-01f, 1.7534402e-01f, 1.5160084e-01f, 9.622989e-02f, 3.9033387e-02f, -1.373768e-03f,
    -2.1311423e-02f, -2.627085e-02f, -2.3638323e-02f, -1.8693205e-02f, -1.4000457e-02f, -1.0334825e-02f,
    -7.675794e-03f, -5.7853796e-03f, -4.4342554e-03f};
const Vec<float, 16> kErf4 = {
    1.0605443e-01f, 6.269836e-02f, 1.9803424e-03f, -4.4400144e-02f, -6.03375e-02f, -5.0438963e-02f, -2.9786704e-02f,
    -1.1271397e-02f, -1.273611e-04f, 4.3760245e-03f, 5.041308e-03f, 4.2129303e-03f, 3.131422e-03f, 2.2355006e-03f,
    1.5898738e-03f, 1.1445109e-03f};
const Vec<float, 16> kErf5 = {
    -1.944424e-02f, -4.62022e-02f, -4.6420395e-02f, -2.5504326e-02f, -6.5011566e-04f, 1.4384685e-02f, 1.6899468e-02f,
    1.2043949e-02f, 5.9129377e-03f, 1.677947e-03f, -3.056198e-04f, -8.637168e-04f, -8.14759e-04f, -6.128945e-04f,
    -4.273901e-04f, -2.931737e-04f};
TL_INLINE Vec<float, 16> table_erf(Vec<float, 16> x) {
  typedef Vec<float, 16> V;
  const V t = clamp_above(fabs(x), 3.9999998f);
  const Vec<int32_t, 16> quarter = __builtin_convertvector(t * 4.0f, Bits<V>);
  const V u = t - (__builtin_convertvector(quarter, V) * 0.25f + 0.125f);
  V p = fma(__builtin_shuffle(kErf5, quarter), u, __builtin_shuffle(kErf4, quarter));
  p = fma(p, u, __builtin_shuffle(kErf3, quarter));
  p = fma(p, u, __builtin_shuffle(kErf2, quarter));
  p = fma(p, u, __builtin_shuffle(kErf1, quarter));
  p = fma(p, u, __builtin_shuffle(kErf0, quarter));
  return with_sign(t > 3.92f ? spread<V>(1.0f) : clamp_above(p * t, 1.0f), x);  // exactly 1: gelu multiplies the rest
}
#endif
template <class V> TL_INLINE V vector_erf(V x) {
#ifdef TL_AVX512
  if constexpr (lanes_of<V> == 16) return table_erf(x);
#endif
  const V t = fabs(x);
  const V z = x * x;
  const V small = fma(horner(z, spread<V>(-9.680133e-06f), 1.12705435e-04f, -8.484711e-04f, 5.221075e-03f, -2.6865445e-02f,
                             1.1283783e-01f, -3.7612638e-01f, 1.2837917e-01f), x, x);
  const V u = t > 4.0f ? spread<V>(4.0f) : t;  // 1 - erf(4) is below half a unit of 1
  const V g = horner(u, spread<V>(-9.1096176e-08f), 2.2996172e-05f, -4.494019e-04f, 4.232382e-03f, -2.5267044e-02f,
                     1.0849654e-01f, 6.331565e-01f, 1.1296073e+00f, -1.9370823e-04f);  // -log(erfc(u))
  V n;
  const V r = reduce_ln2(-g, n);
  const V e = (expm1_reduced(r) + 1.0f) * power_of_two(n);
  const V large = with_sign(1.0f - e, x);
  return t > 1.0f ? large : small;  // nan: small
}
template <class D> TL_INLINE D log2_double(D x) {  // |x|, normal double, or 0 or inf; absolute error about 2^-44
  typedef Bits<D> I;
  const I shifted = (I)x - INT64_C(0x3fe6a09e667f3bcd);
  const D e = __builtin_convertvector(shifted >> 52, D);
  const D m = (D)((shifted & INT64_C(0x000fffffffffffff)) + INT64_C(0x3fe6a09e667f3bcd));
  const D s = (m - 1.0) / (m + 1.0), z = s * s;
  D p = fma(spread<D>(0.27577247963573587), z, spread<D>(0.2583598461360522));
  p = fma(p, z, spread<D>(0.32072394908168705));
  p = fma(p, z, spread<D>(0.4121967134455223));
  p = fma(p, z, spread<D>(0.5770780285537556));
  p = fma(p, z, spread<D>(0.9617966939008498));
  p = fma(p, z, spread<D>(2.885390081777925));
  return fma(p, s, e);
}
template <class D> TL_INLINE D exp2_double(D x) {
  typedef Bits<D> I;
  x = x < -300.0 ? spread<D>(-300.0) : x;
  x = x > 300.0 ? spread<D>(300.0) : x;
  const D n = round_float(x), r = x - n;
  D p = fma(spread<D>(1.3264282564877905e-06), r, spread<D>(1.531031115692281e-05));
  p = fma(p, r, spread<D>(0.0001540341058007878));
  p = fma(p, r, spread<D>(0.0013333449695449486));
  p = fma(p, r, spread<D>(0.009618129230140207));
  p = fma(p, r, spread<D>(0.055504109421193985));
  p = fma(p, r, spread<D>(0.2402265069545889));
  p = fma(p, r, spread<D>(0.6931471805457035));
  p = fma(p, r, spread<D>(1.0));
  return p * (D)((__builtin_convertvector(n, I) + 1023) << 52);
}
template <class D> TL_INLINE D pow_double(D x, D y) {  // x >= 0
  const double inf = __builtin_inf();
  D l = log2_double(x);
  l = x == 0.0 ? spread<D>(-inf) : (x == inf ? x : l);
  l = x != x ? x : l;
  return exp2_double(y * l);
}
template <class V> TL_INLINE V vector_pow(V x, V y) {
  constexpr int L = lanes_of<V>;
  const float inf = __builtin_inff();
  const V a = fabs(x);
  V r;
  if constexpr (L > kLanes8) {  // two halves in double precision
    typedef Vec<float, L / 2> H;
    struct Pair { H lo, hi; };
    const Pair b = bits_to<Pair>(a), e = bits_to<Pair>(y);
    const H lo = convert_vector<float>(pow_double(convert_vector<double>(b.lo), convert_vector<double>(e.lo)));
    const H hi = convert_vector<float>(pow_double(convert_vector<double>(b.hi), convert_vector<double>(e.hi)));
    r = bits_to<V>(Pair{lo, hi});
  } else {
    r = convert_vector<float>(pow_double(convert_vector<double>(a), convert_vector<double>(y)));
  }
  const auto whole = trunc_float(y) == y;
  const V half = y * 0.5f;
  const auto odd = whole & (trunc_float(half) != half);
  const auto negative = Bits<V>(Bits<V>(x) < 0);
  r = (negative & odd) ? -r : r;
  r = ((x < 0.0f) & (x != -inf) & ~whole & (fabs(y) != inf)) ? spread<V>(__builtin_nanf("")) : r;
  r = ((a == 1.0f) & (fabs(y) == inf)) ? spread<V>(1.0f) : r;
  return ((x == 1.0f) | (y == 0.0f)) ? spread<V>(1.0f) : r;
}

}  // namespace tl

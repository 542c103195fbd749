// prelude: cpp
static void body(const float *__restrict in_ptr0, const float *__restrict in_ptr1, const float *__restrict in_ptr2, float *__restrict out_ptr0, float *__restrict out_ptr1, int64_t begin, int64_t end, int *error) {
  using namespace tl;
  constexpr int L = kLanes4;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t x0 = task;
    Welford<Vec<float, L>> acc0[2];
    each_vector<L, 2>(0, 768, [&](const int64_t r0, const auto lanes, const auto u) TL_LOOP {
      const auto t0 = load<L>(in_ptr0 + r0 + x0 * 768, lanes);
      acc0[u].add(t0, lanes);
    });
    const Welford<float> acc0_all = fold_all(acc0);
    const float t1 = acc0_all.mean();
    const float t2 = acc0_all.m2();
    const float t3 = acc0_all.count();
    const float t4 = tl::div(t2, t3);
    const float t5 = tl::add(t4, 1e-05f);
    const float t6 = tl::rsqrt(t5);
    store(out_ptr0 + x0, t6);
    each_vector<L, 1>(0, 768, [&](const int64_t r0, const auto lanes, const auto u) TL_LOOP {
      const auto t7 = load<L>(in_ptr0 + r0 + x0 * 768, lanes);
      const auto t8 = tl::sub(t7, splat<float, L>(t1));
      const auto t9 = tl::mul(t8, splat<float, L>(t6));
      const auto t10 = load<L>(in_ptr1 + r0, lanes);
      const auto t11 = tl::mul(t9, t10);
      const auto t12 = load<L>(in_ptr2 + r0, lanes);
      const auto t13 = tl::add(t11, t12);
      store(out_ptr1 + r0 + x0 * 768, t13, lanes);
    });
  }
}
extern "C" int kernel(const float *__restrict in_ptr0, const float *__restrict in_ptr1, const float *__restrict in_ptr2, float *__restrict out_ptr0, float *__restrict out_ptr1) {
  int error = 0;
  body(in_ptr0, in_ptr1, in_ptr2, out_ptr0, out_ptr1, 0, 8, &error);
  return error;
}

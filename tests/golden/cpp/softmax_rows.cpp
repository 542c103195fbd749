// prelude: cpp
TL_APART static void body(const float *__restrict in_ptr0, float *__restrict out_ptr0, int64_t begin, int64_t end, int *error) {
  using namespace tl;
  constexpr int L = kLanes4;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t x0 = task;
    Max<Vec<float, L>> acc0[4];
    each_vector<L, 4>(0, 1000, [&](const int64_t r0, const auto lanes, const auto u) TL_LOOP {
      const auto t0 = load<L>(in_ptr0 + r0 + x0 * 1000, lanes);
      acc0[u].add(t0, lanes);
    });
    const Max<float> acc0_all = fold_all(acc0);
    const float t1 = acc0_all.value();
    Sum<Vec<float, L>> acc1[2];
    each_vector<L, 2>(0, 1000, [&](const int64_t r0, const auto lanes, const auto u) TL_LOOP {
      const auto t2 = load<L>(in_ptr0 + r0 + x0 * 1000, lanes);
      const auto t3 = tl::sub(t2, splat<float, L>(t1));
      const auto t4 = tl::exp(t3);
      acc1[u].add(t4, lanes);
    });
    const Sum<float> acc1_all = fold_all(acc1);
    const float t5 = acc1_all.value();
    each_vector<L, 1>(0, 1000, [&](const int64_t r0, const auto lanes, const auto u) TL_LOOP {
      const auto t6 = load<L>(in_ptr0 + r0 + x0 * 1000, lanes);
      const auto t7 = tl::sub(t6, splat<float, L>(t1));
      const auto t8 = tl::exp(t7);
      const auto t9 = tl::div(t8, splat<float, L>(t5));
      store(out_ptr0 + r0 + x0 * 1000, t9, lanes);
    });
  }
}
extern "C" int kernel(const float *__restrict in_ptr0, float *__restrict out_ptr0) {
  int error = 0;
  if (tl::worth_threads(8, 42000)) {
    #pragma omp parallel
    {
      const tl::Range part = tl::share(8);
      if (part.begin < part.end) body(in_ptr0, out_ptr0, part.begin, part.end, &error);
    }
  } else body(in_ptr0, out_ptr0, 0, 8, &error);
  return error;
}

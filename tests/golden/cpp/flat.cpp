// prelude: cpp
TL_APART static void body(const float *__restrict in_ptr0, float *__restrict out_ptr0, int64_t begin, int64_t end, int *error) {
  using namespace tl;
  constexpr int L = kLanes4;
  each_vector<L, 1>(begin, end, [&](const int64_t x0, const auto lanes, const auto u) TL_LOOP {
    const auto t0 = load<L>(in_ptr0 + x0, lanes);
    const auto t1 = tl::exp(t0);
    store(out_ptr0 + x0, t1, lanes);
  });
}
extern "C" int kernel(const float *__restrict in_ptr0, float *__restrict out_ptr0, int64_t size0) {
  int error = 0;
  if (tl::worth_threads((size0 + 1023) / 1024, 17408)) {
    #pragma omp parallel
    {
      const tl::Range part = tl::share((size0 + 1023) / 1024);
      if (part.begin < part.end) body(in_ptr0, out_ptr0, part.begin * 1024, tl::min_index(part.end * 1024, size0), &error);
    }
  } else body(in_ptr0, out_ptr0, 0, size0, &error);
  return error;
}

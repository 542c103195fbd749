// prelude: cpp
static void body(const int64_t *__restrict in_ptr0, const float *__restrict in_ptr1, float *__restrict out_ptr0, int64_t begin, int64_t end, int *error) {
  using namespace tl;
  constexpr int L = kLanes4;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t x0 = task;
    const int64_t from = 0, to = 768;
    const int64_t t0 = load(in_ptr0 + x0);
    const auto at1 = wrap_index(t0, 30000, error, 1);
    each_vector<L, 1>(from, to, [&](const int64_t x1, const auto lanes, const auto u) TL_LOOP {
      const auto t2 = load<L>(in_ptr1 + at1 * 768 + x1, lanes);
      store(out_ptr0 + x0 * 768 + x1, t2, lanes);
    });
  }
}
extern "C" int kernel(const int64_t *__restrict in_ptr0, const float *__restrict in_ptr1, float *__restrict out_ptr0) {
  int error = 0;
  body(in_ptr0, in_ptr1, out_ptr0, 0, 64, &error);
  return error;
}

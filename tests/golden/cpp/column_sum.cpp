// prelude: cpp
static void body(const float *__restrict in_ptr0, float *__restrict out_ptr0, int64_t begin, int64_t end, int *error) {
  using namespace tl;
  constexpr int L = kLanes4;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t from = 0, to = 1024;
    Scratch<Sum<Vec<float, L>>> part0(512 * ((1024 + L - 1) / L));
    #pragma omp parallel for schedule(static) if (!omp_in_parallel())
    for (int64_t chunk = 0; chunk < 512; ++chunk) {
      const int64_t chunk_begin = chunk * 32, chunk_end = min_index(chunk_begin + 32, 16384);
      Sum<Vec<float, L>> acc0[(1024 + L - 1) / L];
      for (int64_t r0 = chunk_begin; r0 < chunk_end; ++r0) {
        each_tile_vector<L>(from, to, [&](const int64_t x0, const auto lanes, const int t) TL_LOOP {
          const auto t0 = load<L>(in_ptr0 + r0 * 1024 + x0, lanes);
          acc0[t].add(t0);
        });
      }
      for (int t = 0; t < (1024 + L - 1) / L; ++t) part0[chunk * ((1024 + L - 1) / L) + t] = acc0[t];
    }
    Sum<Vec<float, L>> acc0[(1024 + L - 1) / L];
    merge_columns(part0.at, 512, (1024 + L - 1) / L, acc0);
    each_tile_vector<L>(from, to, [&](const int64_t x0, const auto lanes, const int t) TL_LOOP {
      const auto t1 = acc0[t].value();
      store(out_ptr0 + x0, t1, lanes);
    });
  }
}
extern "C" int kernel(const float *__restrict in_ptr0, float *__restrict out_ptr0) {
  int error = 0;
  body(in_ptr0, out_ptr0, 0, 1, &error);
  return error;
}

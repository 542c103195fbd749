// prelude: cpp
static void body(const float *__restrict in_ptr0, float *__restrict out_ptr0, int64_t begin, int64_t end, int *error) {
  using namespace tl;
  constexpr int L = kLanes4;
  for (int64_t task = begin; task < end; ++task) {
    Scratch<Sum<float>> part0(32);
    #pragma omp parallel for schedule(static) if (!omp_in_parallel())
    for (int64_t chunk = 0; chunk < 32; ++chunk) {
      const int64_t chunk_begin = chunk * 32768, chunk_end = min_index(chunk_begin + 32768, 1048576);
      Sum<Vec<float, L>> acc0[4];
      Sum<Vec<float, L>> acc0_long[4];
      for (int64_t block = chunk_begin; block < chunk_end; block += 2048) {
        each_vector<L, 4>(block, min_index(block + 2048, chunk_end), [&](const int64_t r0, const auto lanes, const auto u) TL_LOOP {
          const auto t0 = load<L>(in_ptr0 + r0, lanes);
          acc0[u].add(t0, lanes);
        });
        for (int u = 0; u < 4; ++u) { acc0_long[u].merge(acc0[u]); acc0[u] = {}; }
      }
      for (int u = 0; u < 4; ++u) { acc0[u].merge(acc0_long[u]); }
      part0[chunk] = fold_all(acc0);
    }
    const Sum<float> acc0_all = merge_tree(part0.at, 32);
    const float t1 = acc0_all.value();
    store(out_ptr0, t1);
  }
}
extern "C" int kernel(const float *__restrict in_ptr0, float *__restrict out_ptr0) {
  int error = 0;
  body(in_ptr0, out_ptr0, 0, 1, &error);
  return error;
}

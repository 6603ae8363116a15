// How many multiply-adds a core does at most: twelve sums that do not wait for each other, all in registers.
// Behind gemm.h, which says how wide a vector is.

extern "C" float multiply_adds(int64_t count, float factor, float term) {
  constexpr int SUMS = 12;
  using V = typename comera::Vector<float, comera::WIDTH<float>>::type;
  V sum[SUMS];
  for (int i = 0; i < SUMS; ++i) sum[i] = V{} + static_cast<float>(i);
  for (int64_t k = 0; k < count; ++k)
    for (int i = 0; i < SUMS; ++i) sum[i] = sum[i] * factor + term;
  V all = sum[0];
  for (int i = 1; i < SUMS; ++i) all += sum[i];
  float made = 0;
  for (int i = 0; i < comera::WIDTH<float>; ++i) made += all[i];
  return made;
}

extern "C" int64_t operations_a_count() { return 2 * 12 * comera::WIDTH<float>; }

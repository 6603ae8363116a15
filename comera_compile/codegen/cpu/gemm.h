// C[m x n] (+)= A[m x k] B[k x n] for small operands in cache. A has any strides, since its elements are broadcast; rows
// of B and C are contiguous. Vectors are those of the compiler: as wide as the processor's, any element type.

#include <cstdint>
#include <cstring>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class T>
struct Vector {
  static constexpr int kSize = kVectorBytes / static_cast<int>(sizeof(T));
  typedef T Type __attribute__((vector_size(kVectorBytes)));
};

// One tile of ROWS x (VECTORS vectors). Of the last vector `cols` elements are stored; all of B's are read.
template <class T, int ROWS, int VECTORS>
inline __attribute__((always_inline)) void tile(int64_t k, const T* a, int64_t a_row, int64_t a_col, const T* b,
                                                int64_t b_row, T* c, int64_t c_row, int cols, bool add) {
  using V = typename Vector<T>::Type;
  constexpr int kSize = Vector<T>::kSize;
  V sum[ROWS][VECTORS];
  for (int i = 0; i < ROWS; ++i)
    for (int v = 0; v < VECTORS; ++v) sum[i][v] = V{};
  for (int64_t p = 0; p < k; ++p, a += a_col, b += b_row) {
    V right[VECTORS];
    for (int v = 0; v < VECTORS; ++v) std::memcpy(&right[v], b + v * kSize, sizeof(V));
    for (int i = 0; i < ROWS; ++i)
      for (int v = 0; v < VECTORS; ++v) sum[i][v] += a[i * a_row] * right[v];
  }
  for (int i = 0; i < ROWS; ++i)
    for (int v = 0; v < VECTORS; ++v) {
      T* to = c + i * c_row + v * kSize;
      if (v + 1 < VECTORS || cols == kSize) {
        V old = V{};
        if (add) std::memcpy(&old, to, sizeof(V));
        sum[i][v] += old;
        std::memcpy(to, &sum[i][v], sizeof(V));
      } else {
        for (int j = 0; j < cols; ++j) to[j] = sum[i][v][j] + (add ? to[j] : T(0));
      }
    }
}

template <class T, int VECTORS>
void panel(int64_t m, int64_t k, const T* a, int64_t a_row, int64_t a_col, const T* b, int64_t b_row, T* c,
           int64_t c_row, int cols, bool add) {
  int64_t i = 0;
  for (; i + 6 <= m; i += 6)
    tile<T, 6, VECTORS>(k, a + i * a_row, a_row, a_col, b, b_row, c + i * c_row, c_row, cols, add);
  for (; i + 2 <= m; i += 2)
    tile<T, 2, VECTORS>(k, a + i * a_row, a_row, a_col, b, b_row, c + i * c_row, c_row, cols, add);
  for (; i < m; ++i) tile<T, 1, VECTORS>(k, a + i * a_row, a_row, a_col, b, b_row, c + i * c_row, c_row, cols, add);
}

template <class T>
void gemm(int64_t m, int64_t n, int64_t k, const T* a, int64_t a_row, int64_t a_col, const T* b, int64_t b_row, T* c,
          int64_t c_row, bool add) {
  constexpr int kSize = Vector<T>::kSize;
  int64_t j = 0;
  for (; j + 2 * kSize <= n; j += 2 * kSize) panel<T, 2>(m, k, a, a_row, a_col, b + j, b_row, c + j, c_row, kSize, add);
  const int rest = static_cast<int>(n - j);
  if (rest == 0) return;
  // The last columns of B with zeros behind them: whole vectors can be read there too.
  const int width = rest > kSize ? 2 * kSize : kSize;
  std::vector<T> tail(static_cast<size_t>(k * width), T(0));
  for (int64_t p = 0; p < k; ++p) std::memcpy(&tail[p * width], b + j + p * b_row, static_cast<size_t>(rest) * sizeof(T));
  if (rest > kSize) {
    panel<T, 2>(m, k, a, a_row, a_col, tail.data(), width, c + j, c_row, rest - kSize, add);
  } else {
    panel<T, 1>(m, k, a, a_row, a_col, tail.data(), width, c + j, c_row, rest, add);
  }
}

}  // namespace

// Transposed copies of small matrices.
#ifndef COMERA_TRANSPOSE_H
#define COMERA_TRANSPOSE_H
#include <algorithm>
#include <cstdint>
#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace comera {

constexpr int64_t BLOCK = 8;  // rows and columns that are turned at once

// A block of BLOCK by BLOCK; rows that are not there are zero.
template <class T>
inline void turn_block(T* to, int64_t to_row, const T* from, int64_t from_row, int64_t rows) {
  for (int64_t j = 0; j < BLOCK; j++)
    for (int64_t x = 0; x < BLOCK; x++) to[j * to_row + x] = x < rows ? from[x * from_row + j] : T(0);
}

#if defined(__AVX__)
// Pairs of rows are woven twice, which turns blocks of four; then the halves of registers are put together.
template <>
inline void turn_block(float* to, int64_t to_row, const float* from, int64_t from_row, int64_t rows) {
  __m256 line[BLOCK], pair[BLOCK], four[BLOCK];
  for (int x = 0; x < BLOCK; x++) line[x] = x < rows ? _mm256_loadu_ps(from + x * from_row) : _mm256_setzero_ps();
  for (int x = 0; x < BLOCK; x += 2) {
    pair[x] = _mm256_unpacklo_ps(line[x], line[x + 1]);
    pair[x + 1] = _mm256_unpackhi_ps(line[x], line[x + 1]);
  }
  for (int x = 0; x < BLOCK; x += 4) {
    four[x] = _mm256_shuffle_ps(pair[x], pair[x + 2], 0x44);
    four[x + 1] = _mm256_shuffle_ps(pair[x], pair[x + 2], 0xEE);
    four[x + 2] = _mm256_shuffle_ps(pair[x + 1], pair[x + 3], 0x44);
    four[x + 3] = _mm256_shuffle_ps(pair[x + 1], pair[x + 3], 0xEE);
  }
  for (int x = 0; x < 4; x++) {
    _mm256_storeu_ps(to + x * to_row, _mm256_permute2f128_ps(four[x], four[x + 4], 0x20));
    _mm256_storeu_ps(to + (x + 4) * to_row, _mm256_permute2f128_ps(four[x], four[x + 4], 0x31));
  }
}
#endif

// `to`[columns][to_row] from `from`[rows][columns], zeros behind the rows.
template <class T>
inline void transpose(T* to, int64_t to_row, const T* from, int64_t from_row, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < to_row; i += BLOCK) {
    const int64_t there = std::max<int64_t>(0, rows - i), room = std::min(BLOCK, to_row - i);
    int64_t j = 0;
    for (; room == BLOCK && j + BLOCK <= columns; j += BLOCK)
      turn_block(to + j * to_row + i, to_row, from + i * from_row + j, from_row, std::min(there, BLOCK));
    for (; j < columns; j++)
      for (int64_t x = 0; x < room; x++) to[j * to_row + i + x] = x < there ? from[(i + x) * from_row + j] : T(0);
  }
}

}  // namespace comera
#endif

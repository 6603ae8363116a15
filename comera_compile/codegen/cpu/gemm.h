// Small matrix products for one thread: C (+)= A B, with any number of rows, terms and columns.
//
// A is read one scalar at a time and broadcast, so it may have any strides (a transposed A costs nothing). Rows of B
// and C are contiguous. Nothing is packed: operands are meant to lie in the first or second cache already.
// Widths follow the processor that the compiler is told to build for (AVX-512, AVX, or 16-byte vectors).
#ifndef COMERA_GEMM_H
#define COMERA_GEMM_H
#include <cstdint>
#include <utility>

namespace comera {

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64, ACCUMULATORS = 24;
#elif defined(__AVX__)
constexpr int VECTOR_BYTES = 32, ACCUMULATORS = 12;
#else
constexpr int VECTOR_BYTES = 16, ACCUMULATORS = 12;
#endif

// Elements of one vector register.
template <class T>
constexpr int64_t WIDTH = VECTOR_BYTES / sizeof(T);

// `size` rounded up to a multiple of `unit`.
inline int64_t padded(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

template <class T, int W>
struct Vector {
  typedef T type __attribute__((vector_size(W * sizeof(T))));
  // as it lies in memory: no alignment but that of its elements
  typedef T stored __attribute__((vector_size(W * sizeof(T)), aligned(alignof(T)), may_alias));
};

// The left operand: element (i, k) is at data[i * row + k * term].
template <class T>
struct Left {
  const T* data;
  int64_t row, term;
};

// R rows times P panels of W columns, all sums in registers. Panel p of B starts at b[p], of C at c[p].
// The left operand comes in three numbers: a struct would be stored in parts and read as a whole, which stalls.
template <class T, int W, int R, int P>
void tile(int64_t terms, const T* a, int64_t a_row, int64_t a_term, const T* const* b, int64_t b_row, T* const* c,
          int64_t c_row, bool add) {
  using V = typename Vector<T, W>::type;
  using Stored = typename Vector<T, W>::stored;
  V sum[R][P] = {};
  const T* from[P];
  for (int p = 0; p < P; p++) from[p] = b[p];
  for (int64_t k = 0; k < terms; k++) {
    V right[P];
#pragma GCC unroll 3
    for (int p = 0; p < P; p++) {
      right[p] = *(const Stored*)from[p];
      from[p] += b_row;
    }
#pragma GCC unroll 24
    for (int i = 0; i < R; i++)
#pragma GCC unroll 3
      for (int p = 0; p < P; p++) sum[i][p] += a[i * a_row] * right[p];
    a += a_term;
  }
#pragma GCC unroll 24
  for (int i = 0; i < R; i++)
#pragma GCC unroll 3
    for (int p = 0; p < P; p++) {
      // C is added to the finished sum: a chain of roundings of few additions where C collects many products
      Stored* to = (Stored*)(c[p] + i * c_row);
      *to = add ? sum[i][p] + *to : sum[i][p];
    }
}

template <class T>
using Tile = void (*)(int64_t, const T*, int64_t, int64_t, const T* const*, int64_t, T* const*, int64_t, bool);

template <class T, int W, int P, int... R>
Tile<T> pick(int64_t rows, std::integer_sequence<int, R...>) {
  static constexpr Tile<T> made[] = {tile<T, W, R + 1, P>...};
  return made[rows - 1];
}

// All rows of P panels, in tiles of nearly equal height.
template <class T, int W, int P>
void column(int64_t rows, int64_t terms, Left<T> a, const T* const* b, int64_t b_row, T* const* c, int64_t c_row,
            bool add) {
  constexpr int TALL = P == 1 ? 12 : ACCUMULATORS / P;
  const int64_t tiles = (rows + TALL - 1) / TALL, least = rows / tiles, taller = rows - least * tiles;
  for (int64_t t = 0, i = 0; t < tiles; t++) {
    const int64_t height = least + (t < taller);
    T* to[P];
    for (int p = 0; p < P; p++) to[p] = c[p] + i * c_row;
    const Tile<T> run = pick<T, W, P>(height, std::make_integer_sequence<int, TALL>{});
    run(terms, a.data + i * a.row, a.row, a.term, b, b_row, to, c_row, add);
    i += height;
  }
}

// C (+)= A B by panels of W columns that may lie anywhere: panel p of B starts at b[p], of C at c[p].
template <class T, int W = WIDTH<T>>
void panels(int64_t rows, int64_t count, int64_t terms, Left<T> a, const T* const* b, int64_t b_row, T* const* c,
            int64_t c_row, bool add) {
  int64_t p = 0;
  for (; p + 4 <= count || p + 2 == count; p += 2) column<T, W, 2>(rows, terms, a, b + p, b_row, c + p, c_row, add);
  if (p + 3 == count) column<T, W, 3>(rows, terms, a, b + p, b_row, c + p, c_row, add);
  if (p + 1 == count) column<T, W, 1>(rows, terms, a, b + p, b_row, c + p, c_row, add);
}

// The last columns, fewer than a vector: with zeros beside them they are one.
template <class T, int W>
void last_columns(int64_t rows, int64_t columns, int64_t terms, Left<T> a, const T* b, int64_t b_row, T* c,
                  int64_t c_row, bool add) {
  constexpr int64_t TALL = 48, DEEP = 64;
  T right[DEEP * W] = {}, sums[TALL * W];
  const T* from = right;
  T* to = sums;
  for (int64_t i = 0; i < rows; i += TALL) {
    const int64_t height = rows - i < TALL ? rows - i : TALL;
    for (int64_t k = 0; k < terms; k += DEEP) {
      const int64_t depth = terms - k < DEEP ? terms - k : DEEP;
      for (int64_t x = 0; x < depth; x++)
        for (int64_t j = 0; j < columns; j++) right[x * W + j] = b[(k + x) * b_row + j];
      const Left<T> block{a.data + i * a.row + k * a.term, a.row, a.term};
      column<T, W, 1>(height, depth, block, &from, W, &to, W, k > 0);
    }
    for (int64_t x = 0; x < height; x++)
      for (int64_t j = 0; j < columns; j++) {
        T* place = c + (i + x) * c_row + j;
        *place = (terms > 0 ? sums[x * W + j] : T(0)) + (add ? *place : T(0));
      }
  }
}

// C[rows, columns] (+)= A[rows, terms] B[terms, columns]. Fastest where `columns` is a multiple of twice the width.
template <class T, int W = WIDTH<T>>
void gemm(int64_t rows, int64_t columns, int64_t terms, Left<T> a, const T* b, int64_t b_row, T* c, int64_t c_row,
          bool add) {
  int64_t j = 0;
  for (; j + 2 * W <= columns; j += 2 * W) {
    const T* from[] = {b + j, b + j + W};
    T* to[] = {c + j, c + j + W};
    column<T, W, 2>(rows, terms, a, from, b_row, to, c_row, add);
  }
  if (j + W <= columns) {
    const T* from = b + j;
    T* to = c + j;
    column<T, W, 1>(rows, terms, a, &from, b_row, &to, c_row, add);
    j += W;
  }
  if (j < columns) last_columns<T, W>(rows, columns - j, terms, a, b + j, b_row, c + j, c_row, add);
}

}  // namespace comera
#endif

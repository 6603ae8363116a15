// What products of many rows with a thin matrix [bond, size] are put together from: packing, tiles, shares of threads.
#ifndef COMERA_SKINNY_PARTS_H
#define COMERA_SKINNY_PARTS_H
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace comera {

template <class T>
constexpr int64_t PANEL = 2 * WIDTH<T>;  // columns of a tile
template <class T>
constexpr int64_t CHUNK = 6 * PANEL<T>;  // columns that are copied and used while they lie in the first cache
constexpr int64_t BLOCK = 48;            // rows, likewise
constexpr int64_t DEPTH = 256;           // terms of a narrow product summed in registers

struct Free {
  void operator()(void* data) const { std::free(data); }
};

// Uninitialised memory on a line of the cache: a vector across two lines is read twice.
template <class T>
std::unique_ptr<T[], Free> room(int64_t count) {
  T* made = static_cast<T*>(std::aligned_alloc(64, comera::padded(std::max<int64_t>(count, 1) * sizeof(T), 64)));
  if (made == nullptr) throw std::bad_alloc();
  return std::unique_ptr<T[], Free>(made);
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A matrix of `bond` rows and `size` columns, and its bias or null.
template <class T>
struct Half {
  const T* data;
  const T* bias;
  int64_t bond, size;

  int64_t terms() const { return bond + (bias != nullptr); }
};

// Columns [first, first + count) of a half as rows of `width`, zeros behind its bond: what a narrow product reads.
template <class T>
void pack_transposed(const Half<T>& half, int64_t first, int64_t count, int64_t width, T* to) {
  constexpr int64_t STEP = 16;  // one line of the first cache
  for (int64_t k = 0; k < count; k += STEP) {
    const int64_t some = std::min(STEP, count - k);
    for (int64_t i = 0; i < width; ++i) {
      const T* from = half.data + i * half.size + first + k;
      for (int64_t j = 0; j < some; ++j) to[(k + j) * width + i] = i < half.bond ? from[j] : T(0);
    }
  }
}

// One panel of a half, its bias as the last row, zeros behind its last column: what a wide product reads.
template <class T>
void pack_panel(const Half<T>& half, int64_t panel, T* to) {
  const int64_t first = panel * PANEL<T>, some = std::min(PANEL<T>, half.size - first);
  for (int64_t i = 0; i < half.terms(); ++i) {
    const T* from = (i < half.bond ? half.data + i * half.size : half.bias) + first;
    for (int64_t j = 0; j < PANEL<T>; ++j) to[i * PANEL<T> + j] = j < some ? from[j] : T(0);
  }
}

// Rows of h, with a 1 behind each if there is a bias.
template <class T>
void take_rows(const T* from, int64_t rows, int64_t bond, int64_t width, T* to) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < width; ++j) to[i * width + j] = j < bond ? from[i * bond + j] : T(1);
}

// C (+)= A B for contiguous B and C of `width` columns, a multiple of the vector width.
template <class T>
void narrow_tiles(int64_t rows, int64_t terms, const T* a, int64_t a_row, const T* b, int64_t width, T* c, bool add) {
  for (int64_t k = 0; k < terms; k += DEPTH) {
    const Left<T> block{a + k, a_row, 1};
    gemm<T>(rows, width, std::min(DEPTH, terms - k), block, b + k * width, width, c, width, add || k > 0);
  }
}

// Columns of one panel of y, of which there may be fewer than a panel has.
template <class T>
void wide_tiles(int64_t rows, int64_t terms, const T* h, int64_t h_row, const T* panel, T* y, int64_t y_row,
                int64_t columns, T* spare) {
  constexpr int W = WIDTH<T>;
  const bool whole = columns >= PANEL<T>;
  T* made = whole ? y : spare;
  const int64_t made_row = whole ? y_row : PANEL<T>;
  const T* from[] = {panel, panel + W};
  T* to[] = {made, made + W};
  column<T, W, 2>(rows, terms, {h, h_row, 1}, from, PANEL<T>, to, made_row, false);
  for (int64_t i = 0; !whole && i < rows; ++i) std::copy_n(spare + i * PANEL<T>, columns, y + i * y_row);
}

// A part of x side by side: `width` columns, those behind the last one zero.
template <class T>
void copy_chunk(const T* from, int64_t row, int64_t rows, int64_t columns, int64_t width, T* to) {
  for (int64_t i = 0; i < rows; ++i, from += row, to += width) {
    std::copy_n(from, columns, to);
    std::fill(to + columns, to + width, T(0));
  }
}

// Runs body(number of this thread, threads, meet). There may be fewer than were asked for: OpenMP has limits of its own.
template <class Body>
void each_thread(int64_t most, const Body& body) {
  if (most <= 1) {
    body(0, 1, [] {});
    return;
  }
#pragma omp parallel num_threads(static_cast<int>(most))
  body(omp_get_thread_num(), omp_get_num_threads(), [] {
#pragma omp barrier
  });
}

// More threads than there are units of the columns have nothing to do.
inline int64_t useful_threads(int64_t most, int64_t columns, int64_t unit) {
  return std::max<int64_t>(1, std::min(most, ceil_div(columns, unit)));
}

// Share number `k` of `count` things dealt out in units.
struct Share {
  int64_t first, last;

  Share(int64_t first, int64_t last) : first(first), last(last) {}
  Share(int64_t count, int64_t unit, int64_t k, int64_t shares) {
    const int64_t units = ceil_div(count, unit);
    first = std::min(count, units * k / shares * unit);
    last = std::min(count, units * (k + 1) / shares * unit);
  }
};

// Gradients that one thread is answerable for: columns [first, last) of a half, in chunks side by side.
template <class T>
struct Columns {
  int64_t first, last, terms;
  std::unique_ptr<T[], Free> sums;

  Columns(const Share& share, int64_t terms)
      : first(share.first), last(share.last), terms(terms), sums(room<T>(padded() * terms)) {
    std::fill_n(sums.get(), padded() * terms, T(0));
  }

  int64_t padded() const { return comera::padded(last - first, PANEL<T>); }

  int64_t width(int64_t column) const { return std::min(CHUNK<T>, first + padded() - column); }

  // sums += left^T part, for `rows` rows of each; left has `left_row` elements a row, of which `terms` count
  void add(int64_t column, int64_t rows, const T* left, int64_t left_row, const T* part) {
    const int64_t columns = width(column);
    T* to = sums.get() + (column - first) * terms;
    gemm<T>(terms, columns, rows, {left, 1, left_row}, part, columns, to, columns, true);
  }

  // Row `term` of the gradient, this thread's columns of it.
  void hand_over(int64_t term, T* to) const {
    for (int64_t c = first; c < last; c += CHUNK<T>)
      std::copy_n(sums.get() + (c - first) * terms + term * width(c), std::min(CHUNK<T>, last - c), to + c);
  }
};

// Rows [first, last) of the sum of `count` parts, in order: from [rows, width] each to [rows, bond].
template <class T>
void sum_parts(const T* parts, int64_t count, int64_t rows, int64_t width, int64_t bond, const Share& share, T* to) {
  for (int64_t i = share.first; i < share.last; ++i)
    for (int64_t j = 0; j < bond; ++j) {
      T sum = parts[i * width + j];
      for (int64_t k = 1; k < count; ++k) sum += parts[(k * rows + i) * width + j];
      to[i * bond + j] = sum;
    }
}

}  // namespace comera
#endif

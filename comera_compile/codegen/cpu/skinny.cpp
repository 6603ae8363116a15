// Products of many rows with a thin matrix [bond, size], as a merged tensor-train half is one, and all their gradients.
//
//   narrow:    h = x A^T            [rows, bond]  from x [rows, size]
//   wide:      y = h B + bias       [rows, size]  from h [rows, bond]
//   backward:  of y = (x A^T) B + bias: every tensor of `rows` rows is read or written once.
//
// A library packs and tiles for large square products; here one side of the tile is the bond. Operands of the tiles are
// packed contiguous: rows of a [bond, size] matrix are a power of two or a multiple of 3 KiB apart, which in the first
// cache is the same few places for all of them. The bias is one more row of B, and its h is 1.
//
// Forward, threads share the rows. Backward, they share the columns: then each gradient of a half belongs to one thread,
// and only the sum over columns in dh = dy B^T is put together from as many parts as there are threads, in order.

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <memory>

namespace {

template <class T>
constexpr int64_t PANEL = 2 * comera::WIDTH<T>;  // columns of a tile
template <class T>
constexpr int64_t CHUNK = 6 * PANEL<T>;  // columns that are copied and used while they lie in the first cache
constexpr int64_t BLOCK = 48;            // rows, likewise
constexpr int64_t DEPTH = 256;           // terms of a narrow product summed in registers

template <class T>
std::unique_ptr<T[]> room(int64_t count) {
  return std::unique_ptr<T[]>(new T[std::max<int64_t>(count, 1)]);
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
    const comera::Left<T> block{a + k, a_row, 1};
    comera::gemm<T>(rows, width, std::min(DEPTH, terms - k), block, b + k * width, width, c, width, add || k > 0);
  }
}

// Columns of one panel of y, of which there may be fewer than a panel has.
template <class T>
void wide_tiles(int64_t rows, int64_t terms, const T* h, int64_t h_row, const T* panel, T* y, int64_t y_row,
                int64_t columns, T* spare) {
  constexpr int W = comera::WIDTH<T>;
  const bool whole = columns >= PANEL<T>;
  T* made = whole ? y : spare;
  const int64_t made_row = whole ? y_row : PANEL<T>;
  const T* from[] = {panel, panel + W};
  T* to[] = {made, made + W};
  comera::column<T, W, 2>(rows, terms, {h, h_row, 1}, from, PANEL<T>, to, made_row, false);
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

// Share number `k` of `count` things dealt out in units.
struct Share {
  int64_t first, last;

  Share(int64_t count, int64_t unit, int64_t k, int64_t shares) {
    const int64_t units = ceil_div(count, unit);
    first = std::min(count, units * k / shares * unit);
    last = std::min(count, units * (k + 1) / shares * unit);
  }
};

template <class T>
void narrow(int64_t rows, const T* x, const Half<T>& a, T* h, int64_t most) {
  const int64_t width = comera::padded(a.bond, comera::WIDTH<T>);
  most = std::min(most, ceil_div(rows, 6));
  const auto packed = room<T>(a.size * width);
  each_thread(most, [&](int64_t me, int64_t threads, auto meet) {
    const Share columns(a.size, 16, me, threads), mine(rows, 6, me, threads);
    pack_transposed(a, columns.first, columns.last - columns.first, width, packed.get() + columns.first * width);
    meet();
    const auto spare = room<T>(BLOCK * width);
    for (int64_t i = mine.first; i < mine.last; i += BLOCK) {
      const int64_t some = std::min(BLOCK, mine.last - i);
      T* made = width == a.bond ? h + i * width : spare.get();
      narrow_tiles(some, a.size, x + i * a.size, a.size, packed.get(), width, made, false);
      for (int64_t k = 0; width != a.bond && k < some; ++k)
        std::copy_n(made + k * width, a.bond, h + (i + k) * a.bond);
    }
  });
}

template <class T>
void wide(int64_t rows, const T* h, const Half<T>& b, T* y, int64_t most) {
  const int64_t panels = ceil_div(b.size, PANEL<T>), terms = b.terms(), step = terms * PANEL<T>;
  most = std::min(most, ceil_div(rows, 6));
  const auto packed = room<T>(panels * step);
  each_thread(most, [&](int64_t me, int64_t threads, auto meet) {
    const Share share(panels, 1, me, threads), mine(rows, 6, me, threads);
    for (int64_t p = share.first; p < share.last; ++p) pack_panel(b, p, packed.get() + p * step);
    meet();
    const auto left = room<T>(BLOCK * terms), spare = room<T>(BLOCK * PANEL<T>);
    for (int64_t i = mine.first; i < mine.last; i += BLOCK) {
      const int64_t some = std::min(BLOCK, mine.last - i);
      take_rows(h + i * b.bond, some, b.bond, terms, left.get());
      for (int64_t p = 0; p < panels; ++p)
        wide_tiles(some, terms, left.get(), terms, packed.get() + p * step, y + i * b.size + p * PANEL<T>, b.size,
                   b.size - p * PANEL<T>, spare.get());
    }
  });
}

// Gradients that one thread is answerable for: columns [first, last) of a half, in chunks side by side.
template <class T>
struct Columns {
  int64_t first, last, terms;
  std::unique_ptr<T[]> sums;

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
    comera::gemm<T>(terms, columns, rows, {left, 1, left_row}, part, columns, to, columns, true);
  }

  // Row `term` of the gradient, this thread's columns of it.
  void hand_over(int64_t term, T* to) const {
    for (int64_t c = first; c < last; c += CHUNK<T>)
      std::copy_n(sums.get() + (c - first) * terms + term * width(c), std::min(CHUNK<T>, last - c), to + c);
  }
};

template <class T>
struct Backward {
  int64_t rows;
  const T *x, *h, *dy;
  Half<T> a, b;
  T *dx, *da, *db, *dbias;

  int64_t width() const { return comera::padded(b.bond, comera::WIDTH<T>); }

  // This thread's columns of dy: gradients of B and the bias, and this part of dh.
  void outer_side(const Share& share, T* dh) const {
    if (share.first == share.last) {
      std::fill_n(dh, rows * width(), T(0));
      return;
    }
    Columns<T> made(share, b.bond + (dbias != nullptr));
    const int64_t count = made.padded();
    const auto packed = room<T>(count * width()), part = room<T>(BLOCK * CHUNK<T>), left = room<T>(BLOCK * made.terms);
    std::fill_n(packed.get(), count * width(), T(0));
    pack_transposed(b, share.first, share.last - share.first, width(), packed.get());
    for (int64_t i = 0; i < rows; i += BLOCK) {
      const int64_t some = std::min(BLOCK, rows - i);
      take_rows(h + i * b.bond, some, b.bond, made.terms, left.get());
      for (int64_t c = share.first; c < share.last; c += CHUNK<T>) {
        const int64_t columns = made.width(c);
        copy_chunk(dy + i * b.size + c, b.size, some, std::min(CHUNK<T>, share.last - c), columns, part.get());
        narrow_tiles(some, columns, part.get(), columns, packed.get() + (c - share.first) * width(), width(),
                     dh + i * width(), c > share.first);
        made.add(c, some, left.get(), made.terms, part.get());
      }
    }
    for (int64_t k = 0; k < b.bond; ++k) made.hand_over(k, db + k * b.size);
    if (dbias != nullptr) made.hand_over(b.bond, dbias);
  }

  // This thread's columns of x: the gradient of A, and dx.
  void inner_side(const Share& share, const T* parts, int64_t count) const {
    if (share.first == share.last) return;
    Columns<T> made(share, a.bond);
    const int64_t panels = made.padded() / PANEL<T>, step = a.bond * PANEL<T>, before = share.first / PANEL<T>;
    const auto packed = room<T>(dx == nullptr ? 0 : panels * step);
    for (int64_t p = 0; dx != nullptr && p < panels; ++p) pack_panel(a, before + p, packed.get() + p * step);
    const auto part = room<T>(BLOCK * CHUNK<T>), dh = room<T>(BLOCK * width()), spare = room<T>(BLOCK * PANEL<T>);
    for (int64_t i = 0; i < rows; i += BLOCK) {
      const int64_t some = std::min(BLOCK, rows - i);
      std::copy_n(parts + i * width(), some * width(), dh.get());
      for (int64_t k = 1; k < count; ++k)
        for (int64_t j = 0; j < some * width(); ++j) dh[j] += parts[(k * rows + i) * width() + j];
      for (int64_t c = share.first; c < share.last; c += CHUNK<T>) {
        const int64_t columns = made.width(c);
        copy_chunk(x + i * a.size + c, a.size, some, std::min(CHUNK<T>, share.last - c), columns, part.get());
        made.add(c, some, dh.get(), width(), part.get());
        for (int64_t j = c; dx != nullptr && j < std::min(c + CHUNK<T>, share.last); j += PANEL<T>)
          wide_tiles(some, a.bond, dh.get(), width(), packed.get() + (j - share.first) / PANEL<T> * step,
                     dx + i * a.size + j, a.size, a.size - j, spare.get());
      }
    }
    for (int64_t k = 0; k < a.bond; ++k) made.hand_over(k, da + k * a.size);
  }

  void run(int64_t most) const {
    most = std::min(most, ceil_div(std::max(a.size, b.size), PANEL<T>));
    const auto dh = room<T>(std::max<int64_t>(1, most) * rows * width());
    each_thread(most, [&](int64_t me, int64_t threads, auto meet) {
      outer_side(Share(b.size, PANEL<T>, me, threads), dh.get() + me * rows * width());
      meet();
      inner_side(Share(a.size, PANEL<T>, me, threads), dh.get(), threads);
    });
  }
};

}  // namespace

#define COMERA_SKINNY(NAME, T)                                                                                          \
  extern "C" void narrow_##NAME(int64_t rows, int64_t size, int64_t bond, const T* x, const T* a, T* h,               \
                                int64_t threads) {                                                                      \
    narrow<T>(rows, x, Half<T>{a, nullptr, bond, size}, h, threads);                                                    \
  }                                                                                                                     \
  extern "C" void wide_##NAME(int64_t rows, int64_t size, int64_t bond, const T* h, const T* b, const T* bias, T* y,  \
                              int64_t threads) {                                                                        \
    wide<T>(rows, h, Half<T>{b, bias, bond, size}, y, threads);                                                         \
  }                                                                                                                     \
  extern "C" void backward_##NAME(int64_t rows, int64_t inputs, int64_t outputs, int64_t bond, const T* x, const T* h, \
                                  const T* dy, const T* a, const T* b, T* dx, T* da, T* db, T* dbias,                 \
                                  int64_t threads) {                                                                    \
    Backward<T>{rows, x,  h,  dy, {a, nullptr, bond, inputs}, {b, nullptr, bond, outputs}, dx, da, db, dbias}          \
        .run(threads);                                                                                                  \
  }

COMERA_SKINNY(f32, float)
COMERA_SKINNY(f64, double)

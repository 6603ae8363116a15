// Dropout without a mask in memory. Whether an element is kept follows from its row, its column and a seed alone, so the
// backward finds the same elements again, in whatever blocks and with however many threads it goes through them.
#ifndef COMERA_DROPOUT_H
#define COMERA_DROPOUT_H
#include <cstdint>

namespace comera {

template <class T>
using Numbers = typename Vector<uint32_t, WIDTH<T>>::type;

// MurmurHash3's finalizer: each bit of x changes each bit of the result in about half of all cases.
template <class N>
N mixed(N x) {
  x ^= x >> 16;
  x *= 0x85ebca6bu;
  x ^= x >> 13;
  x *= 0xc2b2ae35u;
  return x ^ x >> 16;
}

template <class T>
struct Dropout {
  uint32_t low, high, least;  // an element is kept if its number is at least this
  T scale;                    // of what is kept

  // Each element is dropped with probability p, 0 to 1; with 0 nothing is done.
  // Seeds that are near each other must not give the same rows or columns in another order.
  Dropout(double p, int64_t seed)
      : low(mixed(static_cast<uint32_t>(seed) + mixed(static_cast<uint32_t>(seed >> 32)))),
        high(mixed(low + static_cast<uint32_t>(seed >> 32))),
        least(p < 1 ? static_cast<uint32_t>(p * 4294967296.0) : UINT32_MAX),
        scale(p < 1 ? static_cast<T>(1 / (1 - p)) : T(0)) {}

  bool there() const { return least > 0; }

  uint32_t of_row(int64_t row) const {
    return mixed(mixed(static_cast<uint32_t>(row) ^ low) + static_cast<uint32_t>(row >> 32));
  }

  Numbers<T> of_columns(int64_t first) const {
    Numbers<T> column;
    for (int64_t i = 0; i < WIDTH<T>; ++i) column[i] = static_cast<uint32_t>(first + i);
    return mixed(column ^ high);
  }

  // Rows [row, row + rows) and columns [first, first + columns) of each block, which are contiguous: multiplied by the
  // scale or by 0. At most BLOCK rows; columns are a whole number of vectors, fewer than 2^32.
  template <class... Blocks>
  void apply(int64_t row, int64_t rows, int64_t first, int64_t columns, Blocks*... blocks) const {
    if (!there()) return;
    using Stored = typename Vector<T, WIDTH<T>>::stored;
    uint32_t of_rows[BLOCK];
    for (int64_t i = 0; i < rows; ++i) of_rows[i] = of_row(row + i);
    for (int64_t j = 0; j < columns; j += WIDTH<T>) {
      const Numbers<T> of_column = of_columns(first + j);
      for (int64_t i = 0; i < rows; ++i) {
        const auto kept = mixed(of_column ^ of_rows[i]) >= least;  // -1 or 0 in each lane
        const Lanes<T> factor = __builtin_convertvector(kept, Lanes<T>) * -scale;
        ((*(Stored*)(blocks + i * columns + j) *= factor), ...);
      }
    }
  }
};

}  // namespace comera
#endif

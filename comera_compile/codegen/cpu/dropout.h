// Dropout without a mask in memory. Whether an element is kept follows from its row, its column and a seed alone, so the
// backward finds the same elements again, in whatever blocks and with however many threads it goes through them.
#ifndef COMERA_DROPOUT_H
#define COMERA_DROPOUT_H
#include <algorithm>
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

  // Another matrix under the same seed.
  Dropout part(int64_t number) const {
    Dropout other = *this;
    other.low = of(number, low), other.high = mixed(of(number, high) + 1);
    return other;
  }

  // Rows [row, row + rows) and columns [first, first + columns) of a matrix that lie at `to`, `apart` from row to row:
  // multiplied by the scale or by 0. Columns are a whole number of vectors.
  void apply(int64_t row, int64_t rows, int64_t first, int64_t columns, T* to, int64_t apart) const {
    for (int64_t i = 0; there() && i < rows; i += BLOCK)
      apply_block(row + i, std::min(BLOCK, rows - i), first, columns, to + i * apart, apart);
  }

 private:
  static uint32_t of(int64_t index, uint32_t key) {
    return mixed(mixed(static_cast<uint32_t>(index) ^ key) + static_cast<uint32_t>(index >> 32));
  }

  void apply_block(int64_t row, int64_t rows, int64_t first, int64_t columns, T* to, int64_t apart) const {
    using Lanes = typename Vector<T, WIDTH<T>>::type;
    using Stored = typename Vector<T, WIDTH<T>>::stored;
    uint32_t of_rows[BLOCK];
    for (int64_t i = 0; i < rows; ++i) of_rows[i] = of(row + i, low);
    for (int64_t j = 0; j < columns; j += WIDTH<T>) {
      Numbers<T> of_columns;
      for (int64_t i = 0; i < WIDTH<T>; ++i) of_columns[i] = of(first + j + i, high);
      for (int64_t i = 0; i < rows; ++i) {
        const auto kept = mixed(of_columns ^ of_rows[i]) >= least;  // -1 or 0 in each lane
        *(Stored*)(to + i * apart + j) *= __builtin_convertvector(kept, Lanes) * -scale;
      }
    }
  }
};

}  // namespace comera
#endif

// What forward and backward of the attention block share: sizes, memory, shares of threads.
#ifndef COMERA_ATTEND_PARTS_H
#define COMERA_ATTEND_PARTS_H
#include <algorithm>
#include <cstdint>
#include <vector>

namespace comera {

// Elements from row to row of a matrix in scratch memory: whole lines of the cache, an odd number of them. An even
// number apart, the rows of a panel would share few places of the first cache.
template <class T>
int64_t apart(int64_t columns) {
  constexpr int64_t LINE = 64 / sizeof(T);
  return (std::max<int64_t>(1, ceil_div(columns, LINE)) | 1) * LINE;
}

template <class T>
using Lines = decltype(room<T>(0));

template <class T>
struct Matrix {
  T* data;
  int64_t row;

  Left<T> left() const { return {data, row, 1}; }
  Left<T> transposed() const { return {data, 1, row}; }
  Matrix from(int64_t i) const { return {data + i * row, row}; }
};

// Matrices that live as long as this does. Their rows start at lines of the cache.
template <class T>
class Scratch {
 public:
  Matrix<T> matrix(int64_t rows, int64_t columns) {
    const int64_t row = apart<T>(columns);
    held.push_back(room<T>(rows * row));
    return {held.back().get(), row};
  }

 private:
  std::vector<Lines<T>> held;
};

// C (+)= A B, a multiple of the vector width of columns.
template <class T>
void product(int64_t rows, int64_t columns, int64_t terms, Left<T> a, Matrix<T> b, Matrix<T> c, bool add = false) {
  for (int64_t k = 0; k == 0 || k < terms; k += DEPTH) {
    const Left<T> part{a.data + k * a.term, a.row, a.term};
    gemm<T>(rows, columns, std::min(DEPTH, terms - k), part, b.data + k * b.row, b.row, c.data, c.row, add || k > 0);
  }
}

// The inputs. hq: [batch, queries, bond of q], hk, hv: [batch, keys, bond]; q: [bond, heads * dim], k, v: [bond,
// kv_heads * dim], first: [bond of the result, heads * dim]; mask: [batch, heads, queries, keys] by strides, or null.
template <class T>
struct Problem {
  int64_t batch, queries, keys, heads, kv_heads, dim;
  Half<T> q, k, v, first;
  const T *hq, *hk, *hv, *mask;
  int64_t mask_stride[4];
  T scale;
  bool causal;
  Dropout<T> dropout;

  int64_t group() const { return heads / kv_heads; }
  int64_t blocks() const { return ceil_div(queries, block()); }

  // Queries that are worked on at a time: their scores and the gradients of these stay in the second cache.
  int64_t block() const {
    constexpr int64_t ROOM = 384 << 10, LEAST = 16;
    const int64_t fit = ROOM / (2 * int64_t(sizeof(T)) * std::max<int64_t>(1, keys)) / LEAST * LEAST;
    return std::max<int64_t>(1, std::min(queries, std::min(BLOCK, std::max(LEAST, fit))));
  }
  // keys that the queries before `end` may see
  int64_t seen(int64_t end) const { return causal ? std::min(keys, end) : keys; }
};

// Batch entries of one head that a thread works on. All heads one after the other are dealt out in equal shares: while
// there are no more threads than heads, most heads have one thread.
struct Task {
  int64_t first, last;

  Task(int64_t batch, int64_t heads, int64_t head, int64_t me, int64_t threads) {
    const Share mine(batch * heads, 1, me, threads);
    first = std::max<int64_t>(0, mine.first - head * batch);
    last = std::min(batch, mine.last - head * batch);
  }

  bool empty() const { return first >= last; }
};

}  // namespace comera
#endif

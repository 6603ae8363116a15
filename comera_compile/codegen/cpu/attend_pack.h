// Operands of the attention block, packed: rows of the bonds once for all heads, and of the halves what a head makes of
// two of them.
#ifndef COMERA_ATTEND_PACK_H
#define COMERA_ATTEND_PACK_H

namespace comera {

// `count` rows of h as columns, below them ones if there is a bias, which is one more row of the half; zeros beside.
template <class T>
void take_columns(const T* h, int64_t count, int64_t bond, int64_t terms, Matrix<T> to) {
  for (int64_t j = 0; j < terms; j++) {
    T* row = to.data + j * to.row;
    for (int64_t i = 0; i < count; i++) row[i] = j < bond ? h[i * bond + j] : T(1);
    std::fill(row + count, row + to.row, T(0));
  }
}

// Rows that belong to queries, transposed block by block: what is read while the queries of one block are worked on.
template <class T>
struct QueryColumns {
  int64_t blocks, terms, row;
  Lines<T> all;

  QueryColumns(const Problem<T>& p, int64_t terms)
      : blocks(p.blocks()), terms(terms), row(apart<T>(p.block())), all(room<T>(p.batch * blocks * terms * row)) {}

  Matrix<T> block(int64_t entry, int64_t number) const {
    return {all.get() + (entry * blocks + number) * terms * row, row};
  }

  void take(const Problem<T>& p, const T* h, int64_t bond, int64_t me, int64_t threads) {
    const Share mine(p.batch * blocks, 1, me, threads);
    for (int64_t k = mine.first; k < mine.last; k++) {
      const int64_t first = k % blocks * p.block(), some = std::min(p.block(), p.queries - first);
      take_columns(h + (k / blocks * p.queries + first) * bond, some, bond, terms, block(k / blocks, k % blocks));
    }
  }
};

// Rows of one entry of the batch after those of another, a one behind each if there is a bias, then zeros.
template <class T>
struct Rows {
  int64_t count, entries, terms, row;
  Lines<T> all;

  Rows(int64_t entries, int64_t count, int64_t terms)
      : count(count), entries(entries), terms(terms), row(apart<T>(terms)), all(room<T>(entries * count * row)) {}

  Matrix<T> from(int64_t entry, int64_t i) const { return {all.get() + (entry * count + i) * row, row}; }

  void take(const T* h, int64_t bond, int64_t me, int64_t threads) {
    const Share mine(entries * count, 1, me, threads);
    for (int64_t i = mine.first; i < mine.last; i++) {
      T* to = all.get() + i * row;
      std::copy_n(h + i * bond, bond, to);
      std::fill(to + bond, to + terms, T(1));
      std::fill(to + terms, to + row, T(0));
    }
  }
};

// The bonds of q, k and v.
template <class T>
struct Bonds {
  QueryColumns<T> q;
  Rows<T> k, v;

  explicit Bonds(const Problem<T>& p)
      : q(p, p.q.terms()), k(p.batch, p.keys, p.k.terms()), v(p.batch, p.keys, p.v.terms()) {}

  void take(const Problem<T>& p, int64_t me, int64_t threads) {
    q.take(p, p.hq, p.q.bond, me, threads);
    k.take(p.hk, p.k.bond, me, threads);
    v.take(p.hv, p.v.bond, me, threads);
  }
};

// Columns of one head of a half, times `scale`, the bias as the last row; zeros behind the last column.
template <class T>
void pack_head(const Half<T>& half, int64_t head, int64_t dim, T scale, Matrix<T> to) {
  for (int64_t i = 0; i < half.terms(); i++) {
    const T* from = (i < half.bond ? half.data + i * half.size : half.bias) + head * dim;
    T* row = to.data + i * to.row;
    for (int64_t j = 0; j < dim; j++) row[j] = scale * from[j];
    std::fill(row + dim, row + to.row, T(0));
  }
}

// A matrix transposed; zeros behind the last column.
template <class T>
void turn(Matrix<T> from, int64_t rows, int64_t columns, Matrix<T> to) {
  for (int64_t j = 0; j < columns; j++) {
    for (int64_t i = 0; i < rows; i++) to.data[j * to.row + i] = from.data[i * from.row + j];
    std::fill(to.data + j * to.row + rows, to.data + (j + 1) * to.row, T(0));
  }
}

// What a head makes of two halves a and b, [terms, dim] each: a b^T, and that transposed. Rows of a's bond times it are
// to those of b's bond as the rows of q are to those of k: no row of the width of a head is ever made.
template <class T>
struct Pair {
  Half<T> left, right;
  int64_t dim;
  Matrix<T> a, b, b_turned, plain, turned;

  Pair(Scratch<T>& scratch, const Half<T>& left, const Half<T>& right, int64_t dim)
      : left(left), right(right), dim(dim), a(scratch.matrix(left.terms(), dim)), b(scratch.matrix(right.terms(), dim)),
        b_turned(scratch.matrix(dim, right.terms())), plain(scratch.matrix(left.terms(), right.terms())),
        turned(scratch.matrix(right.terms(), left.terms())) {}

  void make(int64_t left_head, int64_t right_head, T scale) {
    pack_head(left, left_head, dim, T(1), a);
    pack_head(right, right_head, dim, scale, b);
    turn(b, right.terms(), dim, b_turned);
    product(left.terms(), padded(right.terms(), WIDTH<T>), dim, a.left(), b_turned, plain);
    turn(plain, left.terms(), right.terms(), turned);
  }
};

}  // namespace comera
#endif

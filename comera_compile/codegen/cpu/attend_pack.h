// Operands of the attention block, packed: rows of the bonds once for all heads, halves for one group of heads.
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
struct QueryRows {
  int64_t blocks, terms, row;
  Lines<T> all;

  QueryRows(const Problem<T>& p, int64_t terms)
      : blocks(p.blocks()), terms(terms), row(apart<T>(p.block())), all(room<T>(p.batch * blocks * terms * row)) {}

  Matrix<T> block(int64_t entry, int64_t number) const {
    return {all.get() + (entry * blocks + number) * terms * row, row};
  }

  void take(const Problem<T>& p, const T* h, int64_t bond, int64_t me, int64_t threads) {
    const Share mine(p.batch * blocks, 1, me, threads);
    for (int64_t k = mine.first; k < mine.last; k++) {
      const int64_t first = k % blocks * BLOCK, some = std::min(BLOCK, p.queries - first);
      take_columns(h + (k / blocks * p.queries + first) * bond, some, bond, terms, block(k / blocks, k % blocks));
    }
  }
};

// Rows that belong to keys.
template <class T>
struct KeyRows {
  int64_t keys, terms;
  Lines<T> all;

  KeyRows(const Problem<T>& p, const Half<T>& half)
      : keys(p.keys), terms(half.terms()), all(room<T>(p.batch * keys * terms)) {}

  Matrix<T> entry(int64_t number) const { return {all.get() + number * keys * terms, terms}; }

  void take(const Problem<T>& p, const T* h, int64_t bond, int64_t me, int64_t threads) {
    const Share mine(p.batch * keys, 1, me, threads);
    take_rows(h + mine.first * bond, mine.last - mine.first, bond, terms, all.get() + mine.first * terms);
  }
};

// The bonds of q, k and v.
template <class T>
struct Bonds {
  QueryRows<T> q;
  KeyRows<T> k, v;

  explicit Bonds(const Problem<T>& p) : q(p, p.q.terms()), k(p, p.k), v(p, p.v) {}

  void take(const Problem<T>& p, int64_t me, int64_t threads) {
    q.take(p, p.hq, p.q.bond, me, threads);
    k.take(p, p.hk, p.k.bond, me, threads);
    v.take(p, p.hv, p.v.bond, me, threads);
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

// The same as rows, without the bias; zeros behind the bond.
template <class T>
void pack_head_transposed(const Half<T>& half, int64_t head, int64_t dim, T scale, Matrix<T> to) {
  for (int64_t j = 0; j < dim; j++) {
    T* row = to.data + j * to.row;
    for (int64_t i = 0; i < half.bond; i++) row[i] = scale * half.data[i * half.size + head * dim + j];
    std::fill(row + half.bond, row + to.row, T(0));
  }
}

// One half for the heads of a group, one behind the other: [terms, dim], and, where wanted, [dim, bond].
template <class T>
struct GroupHalf {
  Half<T> half;
  int64_t heads, dim;
  Matrix<T> plain, turned;

  GroupHalf(Scratch<T>& scratch, const Half<T>& half, int64_t heads, int64_t dim, bool needs_plain, bool needs_turned)
      : half(half), heads(heads), dim(dim), plain(scratch.matrix(needs_plain ? heads * half.terms() : 0, dim)),
        turned(scratch.matrix(needs_turned ? heads * dim : 0, half.bond)), has_plain(needs_plain),
        has_turned(needs_turned) {}

  void pack(int64_t group, T scale) {
    for (int64_t h = 0; h < heads; h++) {
      if (has_plain) pack_head(half, group * heads + h, dim, scale, of(h));
      if (has_turned) pack_head_transposed(half, group * heads + h, dim, scale, turned_of(h));
    }
  }

  Matrix<T> of(int64_t h) const { return plain.from(h * half.terms()); }
  Matrix<T> turned_of(int64_t h) const { return turned.from(h * dim); }

 private:
  bool has_plain, has_turned;
};

// All halves for one group. The scale belongs to q.
template <class T>
struct Group {
  GroupHalf<T> q, k, v, first;

  Group(Scratch<T>& scratch, const Problem<T>& p, bool backward)
      : q(scratch, p.q, p.group(), p.dim, true, backward), k(scratch, p.k, 1, p.dim, true, backward),
        v(scratch, p.v, 1, p.dim, true, backward), first(scratch, p.first, p.group(), p.dim, backward, !backward) {}

  void pack(int64_t group, T scale) {
    q.pack(group, scale);
    k.pack(group, T(1));
    v.pack(group, T(1));
    first.pack(group, T(1));
  }
};

}  // namespace comera
#endif

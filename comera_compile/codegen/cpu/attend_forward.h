// Forward of the attention block: scores, softmax and output of one block of queries at a time.
#ifndef COMERA_ATTEND_FORWARD_H
#define COMERA_ATTEND_FORWARD_H

namespace comera {

// A block of queries of one head: its place, and how many keys it sees.
struct Place {
  int64_t entry, head, number, first, some, seen;

  template <class T>
  Place(const Problem<T>& p, int64_t entry, int64_t head, int64_t number)
      : entry(entry), head(head), number(number), first(number * BLOCK), some(std::min(BLOCK, p.queries - first)),
        seen(p.seen(first + some)) {}

  template <class T>
  int64_t columns() const { return padded(some, WIDTH<T>); }
};

// scores[key, query] += mask[query, key].
template <class T>
void add_mask(const Problem<T>& p, const Place& at, Matrix<T> scores) {
  constexpr int64_t SOME = 16;  // keys: lines of `scores` that stay in the first cache from query to query
  const int64_t* stride = p.mask_stride;
  const T* mask = p.mask + at.entry * stride[0] + at.head * stride[1] + at.first * stride[2];
  for (int64_t key = 0; key < at.seen; key += SOME) {
    const int64_t end = std::min(key + SOME, at.seen);
    if (stride[2] == 0) {
      for (int64_t k = key; k < end; k++)
        for (int64_t i = 0; i < at.some; i++) scores.data[k * scores.row + i] += mask[k * stride[3]];
      continue;
    }
    for (int64_t i = 0; i < at.some; i++)
      for (int64_t k = key; k < end; k++) scores.data[k * scores.row + i] += mask[i * stride[2] + k * stride[3]];
  }
}

// What one thread needs for the scores of a block: k and v of one head, q and the scores transposed. The scores of a
// query are a column: softmax then works on vectors of queries, and only k, not its transpose, is needed.
template <class T>
struct Heads {
  const Problem<T>& p;
  const Bonds<T>& bonds;
  Scratch<T> scratch;
  Group<T> group;
  Matrix<T> k, v, q_turned, weights, inverse, mixed;

  Heads(const Problem<T>& p, const Bonds<T>& bonds, bool backward)
      : p(p), bonds(bonds), group(scratch, p, backward), k(scratch.matrix(p.keys, p.dim)),
        v(scratch.matrix(p.keys, p.dim)), q_turned(scratch.matrix(p.dim, p.block())),
        weights(scratch.matrix(p.keys, p.block())), inverse(scratch.matrix(1, p.block())),
        mixed(scratch.matrix(p.block(), p.dim)) {}

  void make_keys(int64_t entry) {
    product(p.keys, p.columns(), p.k.terms(), bonds.k.entry(entry).left(), group.k.of(0), k);
    product(p.keys, p.columns(), p.v.terms(), bonds.v.entry(entry).left(), group.v.of(0), v);
  }

  // weights[key, query]: exp of the scores less the largest; inverse: one over their sums; mixed = weights^T v.
  void attend(const Place& at) {
    const int64_t columns = at.columns<T>();
    const Matrix<T> half = group.q.of(at.head % p.group());
    product(p.dim, columns, p.q.terms(), half.transposed(), bonds.q.block(at.entry, at.number), q_turned);
    product(at.seen, columns, p.dim, k.left(), q_turned, weights);
    if (p.mask != nullptr) add_mask(p, at, weights);
    for (int64_t key = at.first + 1; p.causal && key < at.seen; key++)
      std::fill_n(weights.data + key * weights.row, key - at.first, -std::numeric_limits<T>::infinity());
    exp_columns(at.seen, columns, weights.data, weights.row, inverse.data);
    product(at.some, p.columns(), at.seen, weights.transposed(), v, mixed);
  }
};

// Rows summed by each thread on its own, then put together in the order of the threads.
template <class T>
struct Parts {
  int64_t rows, bond, width;
  Lines<T> all;

  Parts(int64_t rows, int64_t bond, int64_t threads)
      : rows(rows), bond(bond), width(padded(bond, WIDTH<T>)), all(room<T>(threads * rows * width)) {}

  Matrix<T> of(int64_t thread) const { return {all.get() + thread * rows * width, width}; }

  void clear(int64_t thread) { std::fill_n(of(thread).data, rows * width, T(0)); }

  void join(T* to, int64_t me, int64_t threads) const {
    sum_parts(all.get(), threads, rows, width, bond, Share(rows, 1, me, threads), to);
  }
};

template <class T>
void attend_group(Heads<T>& heads, int64_t number, const Task& task, Matrix<T> result) {
  const Problem<T>& p = heads.p;
  heads.group.pack(number, p.scale);
  for (int64_t entry = task.first; entry < task.last; entry++) {
    heads.make_keys(entry);
    for (int64_t k = 0; k < p.group() * p.blocks(); k++) {
      const Place at(p, entry, number * p.group() + k / p.blocks(), k % p.blocks());
      heads.attend(at);
      for (int64_t i = 0; i < at.some; i++)
        for (int64_t j = 0; j < p.columns(); j++) heads.mixed.from(i).data[j] *= heads.inverse.data[i];
      product(at.some, result.row, p.dim, heads.mixed.left(), heads.group.first.turned_of(k / p.blocks()),
              result.from(entry * p.queries + at.first), true);
    }
  }
}

template <class T>
void attend(const Problem<T>& p, T* result, int64_t most) {
  most = std::min(most, std::max<int64_t>(1, p.batch * p.kv_heads));
  Bonds<T> bonds(p);
  Parts<T> parts(p.batch * p.queries, p.first.bond, most);
  each_thread(most, [&](int64_t me, int64_t threads, auto meet) {
    bonds.take(p, me, threads);
    parts.clear(me);
    meet();
    Heads<T> heads(p, bonds, false);
    for (int64_t group = 0; group < p.kv_heads; group++) {
      const Task task(p.batch, p.kv_heads, group, me, threads);
      if (!task.empty()) attend_group(heads, group, task, parts.of(me));
    }
    meet();
    parts.join(result, me, threads);
  });
}

}  // namespace comera
#endif

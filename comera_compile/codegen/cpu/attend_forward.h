// Forward of the attention block: scores, softmax and output of one block of queries at a time.
#ifndef COMERA_ATTEND_FORWARD_H
#define COMERA_ATTEND_FORWARD_H

namespace comera {

// A block of queries of one head: its place, and how many keys it sees.
struct Place {
  int64_t entry, head, number, first, some, seen;

  template <class T>
  Place(const Problem<T>& p, int64_t entry, int64_t head, int64_t number)
      : entry(entry), head(head), number(number), first(number * p.block()),
        some(std::min(p.block(), p.queries - first)), seen(p.seen(first + some)) {}

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

// What one thread needs for the weights of a block. The scores of a query are a column: softmax then works on vectors
// of queries.
//
// With hq, hk, hv the bonds with their ones and Q, K, V, F one head's columns of the halves with their biases, scores
// are hk (K Q^T) hq^T and the result is (weights^T hv) (V F^T): both inner matrices are small and made once for a head.
template <class T>
struct Heads {
  const Problem<T>& p;
  const Bonds<T>& bonds;
  Scratch<T> scratch;
  Pair<T> keys, values;  // K Q^T scaled, V F^T
  Matrix<T> k, v, weights, inverse;

  Heads(const Problem<T>& p, const Bonds<T>& bonds)
      : p(p), bonds(bonds), keys(scratch, p.k, p.q, p.dim), values(scratch, p.v, p.first, p.dim),
        k(scratch.matrix(p.keys, p.q.terms())), v(scratch.matrix(p.keys, p.first.bond)),
        weights(scratch.matrix(p.keys, p.block())), inverse(scratch.matrix(1, p.block())) {}

  void make_head(int64_t head) {
    keys.make(head / p.group(), head, p.scale);
    values.make(head / p.group(), head, T(1));
  }

  // k and v: rows of the keys that meet the bonds of q and of the result.
  void make_keys(int64_t entry) {
    constexpr int64_t W = WIDTH<T>;
    product(p.keys, padded(p.q.terms(), W), p.k.terms(), bonds.k.from(entry, 0).left(), keys.plain, k);
    product(p.keys, padded(p.first.bond, W), p.v.terms(), bonds.v.from(entry, 0).left(), values.plain, v);
  }

  // weights[key, query]: exp of the scores less the largest; inverse: one over their sums.
  void attend(const Place& at) {
    const int64_t columns = at.columns<T>();
    product(at.seen, columns, p.q.terms(), k.left(), bonds.q.block(at.entry, at.number), weights);
    if (p.mask != nullptr) add_mask(p, at, weights);
    for (int64_t key = at.first + 1; p.causal && key < at.seen; key++)
      std::fill_n(weights.data + key * weights.row, key - at.first, -std::numeric_limits<T>::infinity());
    exp_columns(at.seen, columns, weights.data, weights.row, inverse.data);
  }

  // Dropout of what lies as the weights do; their sums stay those of all keys.
  void drop(const Place& at, Matrix<T> from) const {
    const Dropout<T> dropout = p.dropout.part(at.entry * p.heads + at.head);
    dropout.apply(0, at.seen, at.first, at.columns<T>(), from.data, from.row);
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
void attend_head(Heads<T>& heads, int64_t head, const Task& task, Matrix<T> mixed, Matrix<T> result) {
  const Problem<T>& p = heads.p;
  heads.make_head(head);
  for (int64_t entry = task.first; entry < task.last; entry++) {
    heads.make_keys(entry);
    for (int64_t number = 0; number < p.blocks(); number++) {
      const Place at(p, entry, head, number);
      heads.attend(at);
      heads.drop(at, heads.weights);
      product(at.some, result.row, at.seen, heads.weights.transposed(), heads.v, mixed);
      const Matrix<T> to = result.from(entry * p.queries + at.first);
      for (int64_t i = 0; i < at.some; i++)
        for (int64_t j = 0; j < result.row; j++)
          to.data[i * to.row + j] += heads.inverse.data[i] * mixed.data[i * mixed.row + j];
    }
  }
}

template <class T>
void attend(const Problem<T>& p, T* result, int64_t most) {
  most = std::min(most, std::max<int64_t>(1, p.batch * p.heads));
  Bonds<T> bonds(p);
  Parts<T> parts(p.batch * p.queries, p.first.bond, most);
  each_thread(most, [&](int64_t me, int64_t threads, auto meet) {
    bonds.take(p, me, threads);
    parts.clear(me);
    meet();
    Heads<T> heads(p, bonds);
    const Matrix<T> mixed = heads.scratch.matrix(p.block(), p.first.bond);
    for (int64_t head = 0; head < p.heads; head++) {
      const Task task(p.batch, p.heads, head, me, threads);
      if (!task.empty()) attend_head(heads, head, task, mixed, parts.of(me));
    }
    meet();
    parts.join(result, me, threads);
  });
}

}  // namespace comera
#endif

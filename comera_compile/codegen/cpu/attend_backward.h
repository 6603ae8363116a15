// Backward of the attention block. Everything is made again from the bonds, one block of queries at a time.
#ifndef COMERA_ATTEND_BACKWARD_H
#define COMERA_ATTEND_BACKWARD_H

namespace comera {

// Where the gradients go; laid out as what they belong to. Those of absent biases are null.
template <class T>
struct Gradients {
  T *hq, *hk, *hv, *second_q, *bias_q, *second_k, *bias_k, *second_v, *bias_v, *first;
};

// Sums for the halves of one group of heads: [terms, dim] each.
template <class T>
struct HalfSums {
  int64_t row, size;
  Matrix<T> q, k, v, first;

  HalfSums(const Problem<T>& p, T* at) : row(apart<T>(p.dim)) {
    q = {at, row};
    k = q.from(p.group() * p.q.terms());
    v = k.from(p.k.terms());
    first = v.from(p.v.terms());
    size = first.from(p.group() * p.first.bond).data - at;
  }
};

// Sums for the halves from every thread that works on a group. Threads come in the order of the groups, so thread +
// group tells all pairs apart that can be.
template <class T>
struct AllHalfSums {
  const Problem<T>& p;
  int64_t size;
  Lines<T> all;

  AllHalfSums(const Problem<T>& p, int64_t threads)
      : p(p), size(HalfSums<T>(p, nullptr).size), all(room<T>((threads + p.kv_heads) * size)) {}

  HalfSums<T> of(int64_t thread, int64_t group) const { return {p, all.get() + (thread + group) * size}; }

  // Adds the sums of all threads for a group, in their order, into the first; zeros where no thread worked on it.
  HalfSums<T> join(int64_t group, int64_t threads) const {
    T* sum = nullptr;
    for (int64_t t = 0; t < threads; t++) {
      if (Task(p.batch, p.kv_heads, group, t, threads).empty()) continue;
      T* more = all.get() + (t + group) * size;
      for (int64_t j = 0; sum != nullptr && j < size; j++) sum[j] += more[j];
      sum = sum == nullptr ? more : sum;
    }
    if (sum == nullptr) std::fill_n(sum = all.get() + group * size, size, T(0));
    return {p, sum};
  }
};

// One head's columns of the gradients of a half and its bias.
template <class T>
void hand_over(const Half<T>& half, int64_t head, int64_t dim, T scale, Matrix<T> sums, T* to, T* bias) {
  for (int64_t i = 0; i < half.terms(); i++) {
    T* row = (i < half.bond ? to + i * half.size : bias) + head * dim;
    for (int64_t j = 0; j < dim; j++) row[j] = scale * sums.data[i * sums.row + j];
  }
}

template <class T>
void hand_over_group(const Problem<T>& p, int64_t group, const HalfSums<T>& sums, const Gradients<T>& to) {
  for (int64_t h = 0; h < p.group(); h++) {
    const int64_t head = group * p.group() + h;
    hand_over(p.q, head, p.dim, p.scale, sums.q.from(h * p.q.terms()), to.second_q, to.bias_q);
    hand_over(p.first, head, p.dim, T(1), sums.first.from(h * p.first.bond), to.first, static_cast<T*>(nullptr));
  }
  hand_over(p.k, group, p.dim, T(1), sums.k, to.second_k, to.bias_k);
  hand_over(p.v, group, p.dim, T(1), sums.v, to.second_v, to.bias_v);
}

// Gradients of the bonds, of each thread.
template <class T>
struct BondParts {
  Parts<T> q, k, v;

  BondParts(const Problem<T>& p, int64_t threads)
      : q(p.batch * p.queries, p.q.bond, threads), k(p.batch * p.keys, p.k.bond, threads),
        v(p.batch * p.keys, p.v.bond, threads) {}

  void clear(int64_t me) { q.clear(me), k.clear(me), v.clear(me); }

  void join(const Gradients<T>& to, int64_t me, int64_t threads) {
    q.join(to.hq, me, threads), k.join(to.hk, me, threads), v.join(to.hv, me, threads);
  }
};

// d_scores, in place, from dP: e (dP - r D), where D is the sum of e dP down each column. Made of the same dP, D
// cancels it to the last digit where one key has nearly all of the weight.
template <class T>
void softmax_gradient(int64_t keys, int64_t columns, Matrix<T> weights, const T* inverse, Matrix<T> d_scores) {
  constexpr int W = WIDTH<T>;
  using Stored = typename Vector<T, W>::stored;
  for (int64_t i = 0; i < columns; i += W) {
    typename Vector<T, W>::type sum = {};
    const T* const e = weights.data + i;
    T* const d = d_scores.data + i;
    for (int64_t first = 0; first < keys; first += CHAIN) {
      typename Vector<T, W>::type part = {};
      for (int64_t k = first; k < std::min(first + CHAIN, keys); k++)
        part += *(const Stored*)(e + k * weights.row) * *(const Stored*)(d + k * d_scores.row);
      sum += part;
    }
    sum *= *(const Stored*)(inverse + i);
    for (int64_t k = 0; k < keys; k++) {
      Stored* const place = (Stored*)(d + k * d_scores.row);
      *place = *(const Stored*)(e + k * weights.row) * (*place - sum);
    }
  }
}

// One thread's backward. With weights e and inverse sums r, the probabilities are e r; r goes into the gradient of the
// result instead, so that no block of scores is divided: with g = r grad, dO = g first and dP = dO v^T, dv is e^T dO
// and the gradient of the scores e (dP - r rowsum(e dP)).
template <class T>
struct BackwardHeads {
  Heads<T> heads;
  const QueryRows<T>& grads;
  const BondParts<T>& parts;
  int64_t me;
  Matrix<T> q, grad, d_mixed, d_mixed_turned, d_scores, d_q, d_k, d_v;

  BackwardHeads(const Problem<T>& p, const Bonds<T>& bonds, const QueryRows<T>& grads, const BondParts<T>& parts,
                int64_t me)
      : heads(p, bonds, true), grads(grads), parts(parts), me(me) {
    Scratch<T>& scratch = heads.scratch;
    for (Matrix<T>* m : {&q, &d_mixed, &d_q}) *m = scratch.matrix(p.block(), p.dim);
    for (Matrix<T>* m : {&d_k, &d_v}) *m = scratch.matrix(p.keys, p.dim);
    grad = scratch.matrix(p.first.bond, p.block());
    d_mixed_turned = scratch.matrix(p.dim, p.block());
    d_scores = scratch.matrix(p.keys, p.block());
  }

  void run(int64_t number, const Task& task, const HalfSums<T>& sums) {
    const Problem<T>& p = heads.p;
    heads.group.pack(number, p.scale);
    std::fill_n(sums.q.data, sums.size, T(0));
    for (int64_t entry = task.first; entry < task.last; entry++) {
      heads.make_keys(entry);
      for (const Matrix<T>& m : {d_k, d_v}) std::fill_n(m.data, p.keys * m.row, T(0));
      for (int64_t k = 0; k < p.group() * p.blocks(); k++) {
        const Place at(p, entry, number * p.group() + k / p.blocks(), k % p.blocks());
        heads.attend(at);
        result_side(at, sums);
        scores_side(at, sums);
      }
      keys_side(p.k, heads.group.k, heads.bonds.k.entry(entry), d_k, sums.k, parts.k.of(me).from(entry * p.keys));
      keys_side(p.v, heads.group.v, heads.bonds.v.entry(entry), d_v, sums.v, parts.v.of(me).from(entry * p.keys));
    }
  }

 private:
  // grad = r times the gradient of the result, transposed; from it dO, its transpose, and the gradient of `first`.
  void result_side(const Place& at, const HalfSums<T>& sums) {
    const Problem<T>& p = heads.p;
    const int64_t columns = at.columns<T>(), bond = p.first.bond, head = at.head % p.group();
    const Matrix<T> first = heads.group.first.of(head), given = grads.block(at.entry, at.number);
    for (int64_t k = 0; k < bond; k++)
      for (int64_t i = 0; i < columns; i++)
        grad.data[k * grad.row + i] = given.data[k * given.row + i] * heads.inverse.data[i];
    product(at.some, p.columns(), bond, grad.transposed(), first, d_mixed);
    product(p.dim, columns, bond, first.transposed(), grad, d_mixed_turned);
    product(bond, p.columns(), at.some, grad.left(), heads.mixed, sums.first.from(head * bond), true);
  }

  // Gradients of v and the scores, and from these of k, q and q's bond and half.
  void scores_side(const Place& at, const HalfSums<T>& sums) {
    const Problem<T>& p = heads.p;
    const int64_t columns = at.columns<T>(), head = at.head % p.group();
    const Matrix<T> bond = heads.bonds.q.block(at.entry, at.number), half = heads.group.q.of(head);
    product(at.seen, p.columns(), at.some, heads.weights.left(), d_mixed, d_v, true);
    product(at.seen, columns, p.dim, heads.v.left(), d_mixed_turned, d_scores);
    softmax_gradient(at.seen, columns, heads.weights, heads.inverse.data, d_scores);
    product(at.some, p.columns(), p.q.terms(), bond.transposed(), half, q);
    product(at.seen, p.columns(), at.some, d_scores.left(), q, d_k, true);
    product(at.some, p.columns(), at.seen, d_scores.transposed(), heads.k, d_q);
    product(p.q.terms(), p.columns(), at.some, bond.left(), d_q, sums.q.from(head * p.q.terms()), true);
    const Matrix<T> to = parts.q.of(me).from(at.entry * p.queries + at.first);
    product(at.some, to.row, p.dim, d_q.left(), heads.group.q.turned_of(head), to, true);
  }

  // Gradients of the bond and the half of k or v from its own.
  void keys_side(const Half<T>& half, const GroupHalf<T>& group, Matrix<T> bond, Matrix<T> d_rows, Matrix<T> d_half,
                 Matrix<T> d_bond) {
    const Problem<T>& p = heads.p;
    product(half.terms(), p.columns(), p.keys, bond.transposed(), d_rows, d_half, true);
    product(p.keys, d_bond.row, p.dim, d_rows.left(), group.turned_of(0), d_bond, true);
  }
};

template <class T>
void attend_backward(const Problem<T>& p, const T* grad, const Gradients<T>& to, int64_t most) {
  most = std::min(most, std::max<int64_t>(1, p.batch * p.kv_heads));
  Bonds<T> bonds(p);
  QueryRows<T> grads(p, p.first.bond);
  BondParts<T> parts(p, most);
  const AllHalfSums<T> sums(p, most);
  each_thread(most, [&](int64_t me, int64_t threads, auto meet) {
    bonds.take(p, me, threads);
    grads.take(p, grad, p.first.bond, me, threads);
    parts.clear(me);
    meet();
    BackwardHeads<T> heads(p, bonds, grads, parts, me);
    for (int64_t group = 0; group < p.kv_heads; group++) {
      const Task task(p.batch, p.kv_heads, group, me, threads);
      if (!task.empty()) heads.run(group, task, sums.of(me, group));
    }
    meet();
    parts.join(to, me, threads);
    const Share mine(p.kv_heads, 1, me, threads);
    for (int64_t group = mine.first; group < mine.last; group++)
      hand_over_group(p, group, sums.join(group, threads), to);
  });
}

}  // namespace comera
#endif

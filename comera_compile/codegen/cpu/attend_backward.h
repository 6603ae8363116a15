// Backward of the attention block. Everything is made again from the bonds, one block of queries at a time.
#ifndef COMERA_ATTEND_BACKWARD_H
#define COMERA_ATTEND_BACKWARD_H

namespace comera {

// Where the gradients go; laid out as what they belong to. Those of absent biases are null.
template <class T>
struct Gradients {
  T *hq, *hk, *hv, *second_q, *bias_q, *second_k, *bias_k, *second_v, *bias_v, *first;
};

// Sums for the two inner matrices of one head.
template <class T>
struct HeadSums {
  int64_t size;
  Matrix<T> keys, values;

  HeadSums(const Problem<T>& p, T* at) : keys{at, apart<T>(p.q.terms())} {
    values = {keys.from(p.k.terms()).data, apart<T>(p.first.bond)};
    size = values.from(p.v.terms()).data - at;
  }
};

// The same from every thread that works on a head. Threads come in the order of the heads, so thread + head tells all
// pairs apart that can be.
template <class T>
struct AllHeadSums {
  const Problem<T>& p;
  int64_t size;
  Lines<T> all;

  AllHeadSums(const Problem<T>& p, int64_t threads)
      : p(p), size(HeadSums<T>(p, nullptr).size), all(room<T>((threads + p.heads) * size)) {}

  HeadSums<T> of(int64_t thread, int64_t head) const { return {p, all.get() + (thread + head) * size}; }

  // Adds the sums of all threads for a head, in their order, into the first; zeros where no thread worked on it.
  HeadSums<T> join(int64_t head, int64_t threads) const {
    T* sum = nullptr;
    for (int64_t t = 0; t < threads; t++) {
      if (Task(p.batch, p.heads, head, t, threads).empty()) continue;
      T* more = all.get() + (t + head) * size;
      for (int64_t j = 0; sum != nullptr && j < size; j++) sum[j] += more[j];
      sum = sum == nullptr ? more : sum;
    }
    if (sum == nullptr) std::fill_n(sum = all.get() + head * size, size, T(0));
    return {p, sum};
  }
};

// One head's columns of the gradients of a half and its bias, which may have other heads' in them already.
template <class T>
void hand_over(const Half<T>& half, int64_t head, int64_t dim, T scale, Matrix<T> sums, T* to, T* bias) {
  for (int64_t i = 0; i < half.terms(); i++) {
    T* row = (i < half.bond ? to + i * half.size : bias) + head * dim;
    for (int64_t j = 0; j < dim; j++) row[j] = scale * sums.data[i * sums.row + j];
  }
}

// Gradients of the halves that one group of heads has, from those of the inner matrices: of a b^T = m they are dm b and
// dm^T a.
template <class T>
struct HalfGradients {
  const Problem<T>& p;
  Scratch<T> scratch;
  Pair<T> keys, values;
  Matrix<T> dq, dk, dv, d_first;

  explicit HalfGradients(const Problem<T>& p)
      : p(p), keys(scratch, p.k, p.q, p.dim), values(scratch, p.v, p.first, p.dim),
        dq(scratch.matrix(p.q.terms(), p.dim)), dk(scratch.matrix(p.k.terms(), p.dim)),
        dv(scratch.matrix(p.v.terms(), p.dim)), d_first(scratch.matrix(p.first.bond, p.dim)) {}

  void run(int64_t group, const AllHeadSums<T>& all, int64_t threads, const Gradients<T>& to) {
    const int64_t columns = padded(p.dim, WIDTH<T>);
    for (int64_t h = 0; h < p.group(); h++) {
      const int64_t head = group * p.group() + h;
      const HeadSums<T> sums = all.join(head, threads);
      pack_head(p.k, group, p.dim, T(1), keys.a);
      pack_head(p.q, head, p.dim, p.scale, keys.b);
      pack_head(p.v, group, p.dim, T(1), values.a);
      pack_head(p.first, head, p.dim, T(1), values.b);
      product(p.k.terms(), columns, p.q.terms(), sums.keys.left(), keys.b, dk, h > 0);
      product(p.q.terms(), columns, p.k.terms(), sums.keys.transposed(), keys.a, dq);
      product(p.v.terms(), columns, p.first.bond, sums.values.left(), values.b, dv, h > 0);
      product(p.first.bond, columns, p.v.terms(), sums.values.transposed(), values.a, d_first);
      hand_over(p.q, head, p.dim, p.scale, dq, to.second_q, to.bias_q);
      hand_over(p.first, head, p.dim, T(1), d_first, to.first, static_cast<T*>(nullptr));
    }
    hand_over(p.k, group, p.dim, T(1), dk, to.second_k, to.bias_k);
    hand_over(p.v, group, p.dim, T(1), dv, to.second_v, to.bias_v);
  }
};

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

// What the backward reads beside what the forward did: bonds of q as rows, and the gradient of the result both ways.
template <class T>
struct Given {
  Rows<T> q;
  QueryColumns<T> turned;
  const T* grad;

  Given(const Problem<T>& p, const T* grad)
      : q(p.batch, p.queries, p.q.terms()), turned(p, p.first.bond), grad(grad) {}

  void take(const Problem<T>& p, int64_t me, int64_t threads) {
    q.take(p.hq, p.q.bond, me, threads);
    turned.take(p, grad, p.first.bond, me, threads);
  }
};

// One thread's backward. With weights e and inverse sums r, the probabilities are e r; r goes into the gradient of the
// result instead, so that no block of scores is divided: with g = r grad, dP is g v^T, the gradient of v is e^T g, and
// that of the scores e (dP - r rowsum(e dP)). With dropout, dP and the e in the gradient of v are what it leaves.
template <class T>
struct BackwardHeads {
  Heads<T> heads;
  const Given<T>& given;
  const BondParts<T>& parts;
  int64_t me;
  Matrix<T> grad, grad_turned, d_scores, d_k, d_v;

  BackwardHeads(const Problem<T>& p, const Bonds<T>& bonds, const Given<T>& given, const BondParts<T>& parts,
                int64_t me)
      : heads(p, bonds), given(given), parts(parts), me(me) {
    Scratch<T>& scratch = heads.scratch;
    grad = scratch.matrix(p.block(), p.first.bond);
    grad_turned = scratch.matrix(p.first.bond, p.block());
    d_scores = scratch.matrix(p.keys, p.block());
    d_k = scratch.matrix(p.keys, p.q.terms());
    d_v = scratch.matrix(p.keys, p.first.bond);
  }

  void run(int64_t head, const Task& task, const HeadSums<T>& sums) {
    const Problem<T>& p = heads.p;
    heads.make_head(head);
    std::fill_n(sums.keys.data, sums.size, T(0));
    for (int64_t entry = task.first; entry < task.last; entry++) {
      heads.make_keys(entry);
      for (const Matrix<T>& m : {d_k, d_v}) std::fill_n(m.data, p.keys * m.row, T(0));
      for (int64_t number = 0; number < p.blocks(); number++) {
        const Place at(p, entry, head, number);
        heads.attend(at);
        take_grad(at);
        block(at);
      }
      keys_side(heads.keys, heads.bonds.k.from(entry, 0), d_k, sums.keys, parts.k.of(me).from(entry * p.keys));
      keys_side(heads.values, heads.bonds.v.from(entry, 0), d_v, sums.values, parts.v.of(me).from(entry * p.keys));
    }
  }

 private:
  // r times the gradient of the result, and that transposed.
  void take_grad(const Place& at) {
    const Problem<T>& p = heads.p;
    const int64_t columns = at.columns<T>(), bond = p.first.bond;
    const Matrix<T> turned = given.turned.block(at.entry, at.number);
    const T* const r = heads.inverse.data;
    for (int64_t k = 0; k < bond; k++)
      for (int64_t i = 0; i < columns; i++)
        grad_turned.data[k * grad_turned.row + i] = turned.data[k * turned.row + i] * r[i];
    const T* from = given.grad + (at.entry * p.queries + at.first) * bond;
    for (int64_t i = 0; i < at.some; i++) {
      for (int64_t k = 0; k < bond; k++) grad.data[i * grad.row + k] = from[i * bond + k] * r[i];
      std::fill(grad.data + i * grad.row + bond, grad.data + (i + 1) * grad.row, T(0));
    }
  }

  // Gradients of v, the scores, k and the bond of q.
  void block(const Place& at) {
    constexpr int64_t W = WIDTH<T>;
    const Problem<T>& p = heads.p;
    const int64_t columns = at.columns<T>(), bond = p.first.bond;
    product(at.seen, columns, bond, heads.v.left(), grad_turned, d_scores);
    heads.drop(at, d_scores);
    softmax_gradient(at.seen, columns, heads.weights, heads.inverse.data, d_scores);
    heads.drop(at, heads.weights);
    product(at.seen, padded(bond, W), at.some, heads.weights.left(), grad, d_v, true);
    product(at.seen, padded(p.q.terms(), W), at.some, d_scores.left(), given.q.from(at.entry, at.first), d_k, true);
    const Matrix<T> to = parts.q.of(me).from(at.entry * p.queries + at.first);
    product(at.some, to.row, at.seen, d_scores.transposed(), heads.k, to, true);
  }

  // Gradients of an inner matrix and of the bond that it was applied to.
  void keys_side(const Pair<T>& pair, Matrix<T> bond, Matrix<T> d_rows, Matrix<T> d_pair, Matrix<T> d_bond) {
    const int64_t keys = heads.p.keys, columns = padded(pair.right.terms(), WIDTH<T>);
    product(pair.left.terms(), columns, keys, bond.transposed(), d_rows, d_pair, true);
    product(keys, d_bond.row, pair.right.terms(), d_rows.left(), pair.turned, d_bond, true);
  }
};

template <class T>
void attend_backward(const Problem<T>& p, const T* grad, const Gradients<T>& to, int64_t most) {
  most = std::min(most, std::max<int64_t>(1, p.batch * p.heads));
  Bonds<T> bonds(p);
  Given<T> given(p, grad);
  BondParts<T> parts(p, most);
  const AllHeadSums<T> sums(p, most);
  each_thread(most, [&](int64_t me, int64_t threads, auto meet) {
    bonds.take(p, me, threads);
    given.take(p, me, threads);
    parts.clear(me);
    meet();
    BackwardHeads<T> heads(p, bonds, given, parts, me);
    for (int64_t head = 0; head < p.heads; head++) {
      const Task task(p.batch, p.heads, head, me, threads);
      if (!task.empty()) heads.run(head, task, sums.of(me, head));
    }
    meet();
    parts.join(to, me, threads);
    const Share mine(p.kv_heads, 1, me, threads);
    HalfGradients<T> halves(p);
    for (int64_t group = mine.first; group < mine.last; group++) halves.run(group, sums, threads, to);
  });
}

}  // namespace comera
#endif

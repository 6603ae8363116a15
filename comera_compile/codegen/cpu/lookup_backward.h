// Gradient of the packed cores from that of the rows.
//
// Prefixes are taken in the order of their last digit: the slice of the core, and its gradient, stay in the cache while
// one digit lasts. Each part has sums of its own for what several parts contribute to (the last core, values of the
// prefixes one digit shorter, the digit at which it begins); they are added in the order of the parts, so the result
// depends on the number of threads only.
#ifndef COMERA_LOOKUP_BACKWARD_H
#define COMERA_LOOKUP_BACKWARD_H

namespace comera {

// The parts' sums would take too much memory: many long prefixes of a table of high order.
struct TooLarge {};

template <class T, int L>
class Backward {
 public:
  Backward(const Sizes<T>& size, const Index& index, const T* packed, const T* grad, T* total,
           const Limits& limits)
      : work(size, index, packed, limits), given{size, index, grad}, size(size), index(index), total(total) {
    const int64_t k = work.joined(), leaf = size.before[size.last] * size.leaf;
    at_once = std::max<int64_t>(1, std::min<int64_t>(8, 4096 / leaf));
    batch = k == 0 ? 1 : std::max<int64_t>(1, std::min<int64_t>({16, 48 / size.before[k], 16384 / size.value(k)}));
    slice = work.largest_slice(), prefixes = parents = 0;
    for (int64_t j = 0; j <= k; j++) prefixes = std::max(prefixes, padded(batch * size.value(j), 16));
    for (int64_t j = 0; j < k; j++) parents = std::max(parents, padded(batch * size.value(j), 16));
    sums = padded(size.row_mode[size.last] * size.leaf_slice(), 16);
    above = 0;
    for (int64_t j = 0; j < k; j++) above = std::max(above, padded(index.level[j].count() * size.value(j), 16));
    if (above * work.parts > limits.most_sums) throw TooLarge();
    scratch = 4 * slice + 2 * parents + 2 * prefixes + padded(at_once * leaf, 16) +
              padded(at_once * size.leaf_turned(), 16);
    memory = Buffer<T>(work.parts * (scratch + sums + above));
    turned_leaves = Buffer<T>(size.row_mode[size.last] * size.leaf_turned());
    for (int64_t j = 1; j < k; j++) value_grad[j] = Buffer<T>(index.level[j].count() * size.value(j));
    carried.resize(work.parts);
    per_id = size.leaf / L;
    from.resize(work.parts * at_once * per_id);
    to.resize(from.size());
  }

  void run() {
#pragma omp parallel num_threads(work.parts) if (work.parts > 1)
    {
      work.values([&](int64_t part) { return own(part).slice; },
                  [&](int64_t part) {
                    turn_leaves(part);
                    clear(part);
                  });
      for (int64_t k = work.joined(); k > 0 || k == work.joined(); k--) {
        each_part(work.parts, [&](int64_t part) { run_level(k, part); });
        each_part(work.parts, [&](int64_t part) { add_up(k, part); });
      }
    }
  }

 private:
  Work<T> work;
  Rows<T, L> given;
  const Sizes<T>& size;
  const Index& index;
  T* total;
  int64_t batch, at_once, per_id;                              // prefixes; ids of a prefix; vectors
  int64_t slice, parents, prefixes, sums, above, scratch;      // elements
  Buffer<T> memory, turned_leaves, value_grad[MAX_ORDER];
  std::vector<int64_t> carried;  // digit that each part began in the middle of, or -1
  std::vector<const T*> from;
  std::vector<T*> to;

  // A part's own memory.
  struct Own {
    T *slice, *turned, *slice_grad, *carry, *parents, *parents_grad, *value, *value_grad, *rows, *leaves, *sums, *above;
  };

  Own own(int64_t part) const {
    Own o;
    o.slice = memory.get() + part * (scratch + sums + above);
    o.turned = o.slice + slice, o.slice_grad = o.turned + slice, o.carry = o.slice_grad + slice;
    o.parents = o.carry + slice, o.parents_grad = o.parents + parents;
    o.value = o.parents_grad + parents, o.value_grad = o.value + prefixes, o.rows = o.value_grad + prefixes;
    o.leaves = o.rows + padded(at_once * size.before[size.last] * size.leaf, 16);
    o.sums = o.leaves + padded(at_once * size.leaf_turned(), 16), o.above = o.sums + sums;
    return o;
  }

  // Sums start at zero; so do gradients of slices that no id needs.
  void clear(int64_t part) {
    const Own o = own(part);
    std::memset(o.rows, 0, at_once * size.before[size.last] * size.leaf * sizeof(T));
    std::memset(o.sums, 0, sums * sizeof(T));
    for (int64_t k = 0; k <= size.last; k++) {
      const Range mine = even(size.row_mode[k], part, work.parts);
      for (int64_t digit = mine.begin; digit < mine.end; digit++)
        for (int64_t a = 0; !work.used[k][digit] && a < size.rank[k]; a++)
          std::memset(total + size.at(k, a, digit), 0, size.column_mode[k] * size.rank[k + 1] * sizeof(T));
    }
  }

  void turn_leaves(int64_t part) {
    const Range mine = even(size.row_mode[size.last], part, work.parts);
    for (int64_t d = mine.begin; d < mine.end; d++)
      if (work.used[size.last][d])
        transpose(turned_leaves.get() + d * size.leaf_turned(), size.wide[size.last],
                  work.leaves.get() + d * size.leaf_slice(), size.leaf, size.rank[size.last], size.leaf);
  }

  // Gradients of the slices of core k, and of the values one digit shorter.
  void run_level(int64_t k, int64_t part) {
    const Own o = own(part);
    const Prefixes& level = index.level[k];
    const bool deepest = k == work.joined();
    const Range mine = deepest ? work.share(part) : even(level.count(), part, work.parts);
    if (k > 0) std::memset(o.above, 0, index.level[k - 1].count() * size.value(k - 1) * sizeof(T));
    carried[part] = -1;
    int64_t digit = -1;
    for (int64_t n = mine.begin, count; n < mine.end; n += count) {
      count = work.alike(k, n, mine.end, batch);
      const int64_t i = work.nth(k, n);
      if (k > 0 && level.digit[i] != digit) {
        if (digit >= 0) put_slice(k, part, digit, mine.begin);
        begin_digit(k, digit = level.digit[i], o);
      }
      int64_t lines = 256;  // asked for while the values are made
      for (int64_t j = 0; deepest && j < count; j++) {
        const int64_t next = work.nth(k, n + j);
        given.fetch(level.child[next], level.child[next + 1], &lines);
      }
      if (k > 0) work.gather_parents(k, n, count, o.parents);
      if (deepest && k > 0) work.join(k, count, o.parents, o.slice, o.value);
      for (int64_t j = 0; j < count; j++) value_gradient(k, part, work.nth(k, n + j), j, o);
      if (k > 0) pair_gradients(k, n, count, o);
      if (k == 0) put(0, level.digit[i], o.value_grad, false);
    }
    if (digit >= 0) put_slice(k, part, digit, mine.begin);
  }

  // The gradient of the value of prefix i, to the j-th place: from its ids, or from what the level after it left.
  void value_gradient(int64_t k, int64_t part, int64_t i, int64_t j, const Own& o) {
    T* made = o.value_grad + j * size.value(k);
    if (k == work.joined())
      leaf_gradients(part, i, k > 0 ? o.value + j * size.value(k) : work.value_of(0, i), made, o);
    else
      std::memcpy(made, value_grad[k].get() + i * size.value(k), size.value(k) * sizeof(T));
  }

  void begin_digit(int64_t k, int64_t digit, const Own& o) {
    work.pack_slice(k, digit, o.slice);
    transpose(o.turned, size.wide[k], o.slice, size.slice_row(k), size.rank[k], size.slice_row(k));
    std::memset(o.slice_grad, 0, size.slice(k) * sizeof(T));
  }

  // From gradients of values of `count` prefixes of one last digit to those of its slice and of the parents' values.
  void pair_gradients(int64_t k, int64_t n, int64_t count, const Own& o) {
    const int64_t row = size.slice_row(k), rows = count * size.before[k], wide = size.wide[k];
    gemm(size.rank[k], row, rows, Left<T>{o.parents, 1, wide}, o.value_grad, row, o.slice_grad, row, true);
    gemm(rows, wide, row, Left<T>{o.value_grad, row, 1}, o.turned, wide, o.parents_grad, wide, false);
    const int64_t elements = size.value(k - 1);
    for (int64_t j = 0; j < count; j++) {
      T* sum = o.above + index.level[k].parent[work.nth(k, n + j)] * elements;
      const T* made = o.parents_grad + j * elements;
      scaled<true>(sum, made, elements, T(1));
    }
  }

  // From the rows of the ids of a prefix to the last core's sums and the gradient of the prefix's value.
  void leaf_gradients(int64_t part, int64_t i, const T* value, T* made, const Own& o) {
    const Prefixes& level = index.level[work.joined()];
    const int64_t tall = size.before[size.last], wide = size.wide[size.last], r = size.rank[size.last];
    for (int64_t first = level.child[i]; first < level.child[i + 1]; first += at_once) {
      const int64_t count = std::min(at_once, level.child[i + 1] - first), row = count * size.leaf;
      for (int64_t j = 0; j < count; j++) given.sum_places(first + j, o.rows + j * size.leaf, row);
      const T** b = from.data() + part * at_once * per_id;
      T** c = to.data() + part * at_once * per_id;
      for (int64_t j = 0; j < count; j++)
        for (int64_t p = 0; p < per_id; p++) {
          b[j * per_id + p] = o.rows + j * size.leaf + p * L;
          c[j * per_id + p] = o.sums + index.level[size.last].digit[first + j] * size.leaf_slice() + p * L;
        }
      panels<T, L>(r, count * per_id, tall, Left<T>{value, 1, wide}, b, row, c, size.leaf, true);
      gemm(tall, wide, row, Left<T>{o.rows, row, 1}, side_by_side(first, count, o.leaves), wide, made, wide,
           first > level.child[i]);
    }
  }

  // Transposed slices of some ids, one below the other.
  const T* side_by_side(int64_t first, int64_t count, T* to_slices) const {
    const int64_t elements = size.leaf_turned();
    const auto turned = [&](int64_t id) { return turned_leaves.get() + index.level[size.last].digit[id] * elements; };
    if (count == 1) return turned(first);
    for (int64_t j = 0; j < count; j++) std::memcpy(to_slices + j * elements, turned(first + j), elements * sizeof(T));
    return to_slices;
  }

  // Writes the gradient of a slice, unless the digit began in the part before: then it is added later.
  void put_slice(int64_t k, int64_t part, int64_t digit, int64_t begin) {
    const Own o = own(part);
    const Prefixes& level = index.level[k];
    const bool first = carried[part] < 0 && level.digit[work.nth(k, begin)] == digit;
    if (first && begin > 0 && level.digit[work.nth(k, begin - 1)] == digit) {
      carried[part] = digit;
      std::memcpy(o.carry, o.slice_grad, size.slice(k) * sizeof(T));
    } else {
      put(k, digit, o.slice_grad, false);
    }
  }

  void put(int64_t k, int64_t digit, const T* slice_grad, bool add) {
    for (int64_t a = 0; a < size.rank[k]; a++)
      narrow_rows(total + size.at(k, a, digit), size.rank[k + 1], slice_grad + a * size.slice_row(k), size.wide[k + 1],
                  size.column_mode[k], size.scale, add);
  }

  // What the parts have each for themselves, after level k.
  void add_up(int64_t k, int64_t part) {
    if (k == work.joined()) add_leaves(part);
    if (k == 0) return;
    if (part == 0)
      for (int64_t p = 0; p < work.parts; p++)
        if (carried[p] >= 0) put(k, carried[p], own(p).carry, true);
    const int64_t elements = size.value(k - 1);
    const Range mine = even(index.level[k - 1].count(), part, work.parts);
    for (int64_t i = mine.begin; i < mine.end; i++) {
      T* sum = own(0).above + i * elements;
      for (int64_t p = 1; p < work.parts; p++) {
        scaled<true>(sum, own(p).above + i * elements, elements, T(1));
      }
      if (k == 1)
        put(0, index.level[0].digit[i], sum, false);
      else
        std::memcpy(value_grad[k - 1].get() + i * elements, sum, elements * sizeof(T));
    }
  }

  void add_leaves(int64_t part) {
    const int64_t elements = size.leaf_slice(), mode = size.column_mode[size.last];
    const Range mine = even(size.row_mode[size.last], part, work.parts);
    for (int64_t d = mine.begin; d < mine.end; d++) {
      if (!work.used[size.last][d]) continue;
      T* sum = own(0).sums + d * elements;
      for (int64_t p = 1; p < work.parts; p++) {
        scaled<true>(sum, own(p).sums + d * elements, elements, T(1));
      }
      for (int64_t a = 0; a < size.rank[size.last]; a++)
        scaled<false>(total + size.at(size.last, a, d), sum + a * size.leaf, mode, size.scale);
    }
  }
};

}  // namespace comera
#endif

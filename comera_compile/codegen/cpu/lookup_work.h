// What forward and backward of a lookup share: sizes, slices of the cores, values of the prefixes.
//
// A slice of a core is what one digit picks: (left rank, columns * right rank). The value of a prefix of k + 1 digits
// is the product of its slices, (columns so far, right rank). Ranks are padded with zeros to whole vectors everywhere,
// so no product has a tail.
#ifndef COMERA_LOOKUP_WORK_H
#define COMERA_LOOKUP_WORK_H

namespace comera {

template <class T>
struct Sizes : Table {
  T scale;
  int64_t wide[MAX_ORDER + 1];    // ranks, padded
  int64_t before[MAX_ORDER + 1];  // columns of a prefix of so many digits
  int64_t core[MAX_ORDER];        // where each core starts
  int64_t last, leaf;             // the last level; columns of its slices, padded
  int64_t numel;

  Sizes(const Table& table, double scale_, int64_t leaf_width) : Table(table), scale((T)scale_), last(order - 1) {
    before[0] = 1, numel = 0;
    for (int64_t k = 0; k < order; k++) {
      wide[k] = padded(rank[k], WIDTH<T>);
      before[k + 1] = before[k] * column_mode[k];
      core[k] = numel;
      numel += rank[k] * row_mode[k] * column_mode[k] * rank[k + 1];
    }
    wide[order] = 1;
    leaf = padded(column_mode[last], leaf_width);
  }
  int64_t value(int64_t k) const { return before[k + 1] * wide[k + 1]; }           // elements, k < last
  int64_t slice_row(int64_t k) const { return column_mode[k] * wide[k + 1]; }      // elements, k < last
  int64_t slice(int64_t k) const { return rank[k] * slice_row(k); }                // elements, 0 < k < last
  int64_t turned(int64_t k) const { return slice_row(k) * wide[k]; }               // elements, 0 < k < last
  int64_t leaf_slice() const { return rank[last] * leaf; }                         // elements
  int64_t leaf_turned() const { return leaf * wide[last]; }                        // elements
  bool cropped() const { return before[order] != columns; }
  // offset of row `a` of the slice of a digit in the packed vector
  int64_t at(int64_t k, int64_t a, int64_t digit) const {
    return core[k] + (a * row_mode[k] + digit) * column_mode[k] * rank[k + 1];
  }
};

template <class T>
struct Work {
  const Sizes<T>& size;
  const Index& index;
  const T* packed;
  int64_t parts;
  Buffer<T> value[MAX_ORDER];  // of every prefix, up to the level before the one that is joined as it is needed
  Buffer<T> leaves;            // slices of the last core, by digit
  std::vector<char> used[MAX_ORDER];  // by level: which digits occur
  std::vector<int64_t> cost;   // of the prefixes that ids hang on, in their order, summed up

  Work(const Sizes<T>& size_, const Index& index_, const T* packed_, const Limits& limits)
      : size(size_), index(index_), packed(packed_) {
    for (int64_t k = 0; k < size.order; k++) {
      used[k].assign(size.row_mode[k], 0);
      for (int64_t digit : index.level[k].digit) used[k][digit] = 1;
    }
    for (int64_t k = 0; k < std::max<int64_t>(1, size.last - 1); k++)
      value[k] = Buffer<T>(index.level[k].count() * size.value(k));
    leaves = Buffer<T>(size.row_mode[size.last] * size.leaf_slice());
    add_costs();
    parts = std::max<int64_t>(1, std::min(limits.threads, cost.back() / limits.least_work));
  }

  int64_t joined() const { return size.last - 1; }  // level of the prefixes that ids hang on
  int64_t nth(int64_t k, int64_t i) const { return k == 0 ? i : index.level[k].ordered[i]; }
  const T* value_of(int64_t k, int64_t i) const { return value[k].get() + i * size.value(k); }

  // In multiplications: products, and what it takes to move slices and rows.
  void add_costs() {
    constexpr int64_t MOVED = 6, TURNED = 20;
    const int64_t k = joined(), count = index.level[k].count();
    const int64_t pair = k == 0 ? 0 : size.before[k] * size.slice(k);
    const int64_t leaf = size.before[size.last] * size.leaf_slice();
    cost.assign(count + 1, 0);
    for (int64_t i = 0; i < count; i++) {
      const int64_t own = nth(k, i), first = index.level[k].child[own], end = index.level[k].child[own + 1];
      const bool begins = k > 0 && (i == 0 || index.level[k].digit[own] != index.level[k].digit[nth(k, i - 1)]);
      const int64_t places = index.first[end] - index.first[first];
      cost[i + 1] = cost[i] + pair + (begins ? TURNED * size.slice(k) : 0) + (end - first) * leaf +
                    places * size.columns * MOVED;
    }
  }

  // A part's share of the prefixes that ids hang on, about equal in cost.
  Range share(int64_t part) const {
    const auto cut = [&](int64_t p) {
      return std::lower_bound(cost.begin(), cost.end(), cost.back() * p / parts) - cost.begin();
    };
    return {cut(part), part + 1 == parts ? (int64_t)cost.size() - 1 : cut(part + 1)};
  }

  void pack_slice(int64_t k, int64_t digit, T* to) const {
    for (int64_t a = 0; a < size.rank[k]; a++)
      widen(to + a * size.slice_row(k), size.wide[k + 1], packed + size.at(k, a, digit), size.rank[k + 1],
            size.column_mode[k], size.scale);
  }

  void pack_leaf(int64_t digit, T* to) const {
    for (int64_t a = 0; a < size.rank[size.last]; a++)
      widen(to + a * size.leaf, size.leaf, packed + size.at(size.last, a, digit), size.column_mode[size.last], 1,
            size.scale);
  }

  // Values of the first digits, and slices of the last core.
  void prepare(int64_t part) const {
    const Prefixes& first = index.level[0];
    const Range mine = even(first.count(), part, parts);
    for (int64_t i = mine.begin; i < mine.end; i++) pack_slice(0, first.digit[i], value[0].get() + i * size.value(0));
    const Range digits = even(size.row_mode[size.last], part, parts);
    for (int64_t d = digits.begin; d < digits.end; d++)
      if (used[size.last][d]) pack_leaf(d, leaves.get() + d * size.leaf_slice());
  }

  // How many of the prefixes from the n-th on have its last digit: at most `most`, and none at `end`.
  int64_t alike(int64_t k, int64_t n, int64_t end, int64_t most) const {
    if (k == 0) return 1;
    const std::vector<int64_t>&digit = index.level[k].digit, &ordered = index.level[k].ordered;
    int64_t count = 1;
    while (count < most && n + count < end && digit[ordered[n + count]] == digit[ordered[n]]) count++;
    return count;
  }

  // Values of the parents of `count` prefixes from the n-th on, one below the other.
  void gather_parents(int64_t k, int64_t n, int64_t count, T* to) const {
    for (int64_t j = 0; j < count; j++)
      std::memcpy(to + j * size.value(k - 1), value_of(k - 1, index.level[k].parent[nth(k, n + j)]),
                  size.value(k - 1) * sizeof(T));
  }

  // Values of prefixes from those of their parents and the slice of their last digit.
  void join(int64_t k, int64_t count, const T* parents, const T* slice, T* to) const {
    const int64_t row = size.slice_row(k);
    gemm(count * size.before[k], row, size.rank[k], Left<T>{parents, size.wide[k], 1}, slice, row, to, row, false);
  }

  // Values of the prefixes of a level whose values are kept. `slice`: memory for one.
  void join_level(int64_t k, int64_t part, T* slice) const {
    const Range mine = even(index.level[k].count(), part, parts);
    int64_t digit = -1;
    for (int64_t n = mine.begin; n < mine.end; n++) {
      const int64_t i = nth(k, n);
      if (index.level[k].digit[i] != digit) pack_slice(k, digit = index.level[k].digit[i], slice);
      join(k, 1, value_of(k - 1, index.level[k].parent[i]), slice, value[k].get() + i * size.value(k));
    }
  }

  // All that comes before the prefixes that ids hang on; within a parallel region. `also(part)` runs after the part's
  // own slices of the last core are there.
  template <class F, class G>
  void values(const F& slice_of_part, const G& also) const {
    each_part(parts, [&](int64_t part) {
      prepare(part);
      also(part);
    });
    for (int64_t k = 1; k < joined(); k++)
      each_part(parts, [&](int64_t part) { join_level(k, part, slice_of_part(part)); });
  }

  int64_t largest_slice() const {
    int64_t most = 0;
    for (int64_t k = 1; k < size.last; k++) most = std::max(most, std::max(size.slice(k), size.turned(k)));
    return padded(most, 16);
  }
};

}  // namespace comera
#endif

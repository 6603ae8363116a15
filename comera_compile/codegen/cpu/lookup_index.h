// What a lookup has to do, from its ids alone: distinct ids, the distinct prefixes of their digits, who is whose.
#ifndef COMERA_LOOKUP_INDEX_H
#define COMERA_LOOKUP_INDEX_H
#include <algorithm>
#include <cstdint>
#include <vector>

namespace comera {

constexpr int MAX_ORDER = 8;

// A table in tensor-train-matrix form. Digits run from the most significant one, 0, to order - 1.
struct Table {
  int64_t order, rows, columns, zero_row;  // zero_row: -1 if there is none
  int64_t row_mode[MAX_ORDER], column_mode[MAX_ORDER], rank[MAX_ORDER + 1];
};

// Distinct prefixes of one length, in ascending order.
struct Prefixes {
  std::vector<int64_t> digit;    // their last digit
  std::vector<int64_t> parent;   // index of the prefix one digit shorter
  std::vector<int64_t> child;    // those one digit longer: child[i] up to child[i + 1]
  std::vector<int64_t> ordered;  // indices, by last digit

  int64_t count() const { return (int64_t)digit.size(); }

  void order_by_digit(int64_t digits) {
    std::vector<int64_t> first(digits + 1, 0);
    for (int64_t d : digit) first[d + 1]++;
    for (int64_t d = 0; d < digits; d++) first[d + 1] += first[d];
    ordered.resize(digit.size());
    for (int64_t i = 0; i < count(); i++) ordered[first[digit[i]]++] = i;
  }
};

struct Index {
  Prefixes level[MAX_ORDER];       // level[k]: prefixes of k + 1 digits; the last level are the distinct ids
  std::vector<int64_t> position;   // places of the ids, those of one id side by side, ascending
  std::vector<int64_t> first;      // places of distinct id i: position[first[i]] up to position[first[i + 1]]
  std::vector<int64_t> zero;       // places of the padding row, which is not among the distinct ids
};

// The smallest and the largest id, and whether they ascend.
template <class I>
void limits(const I* ids, int64_t count, int64_t* smallest, int64_t* largest, bool* ascending) {
  int64_t low = ids[0], high = ids[0], sorted = 1;
  for (int64_t i = 1; i < count; i++) {
    sorted &= ids[i - 1] <= ids[i];
    low = std::min<int64_t>(low, ids[i]);
    high = std::max<int64_t>(high, ids[i]);
  }
  *smallest = low, *largest = high, *ascending = sorted != 0;
}

// Words of (id - base) << shift | place, sorted: by counting, a digit of the id at a time, or by comparison if few.
template <class I>
std::vector<uint64_t> sorted_words(const I* ids, int64_t count, int64_t base, int64_t range, int shift, bool sorted) {
  constexpr int MOST = 11;
  std::vector<uint64_t> words(count);
  for (int64_t i = 0; i < count; i++) words[i] = (uint64_t)(ids[i] - base) << shift | (uint64_t)i;
  if (sorted) return words;
  if (count <= 256) {
    std::sort(words.begin(), words.end());
    return words;
  }
  int bits = 0;
  while (range >> bits) bits++;
  const int passes = std::max(1, (bits + MOST - 1) / MOST), step = (bits + passes - 1) / passes;
  std::vector<uint64_t> other(count);
  for (int bit = 0; bit < bits; bit += step) {
    uint32_t first[(1 << MOST) + 1] = {};
    const auto digit = [&](uint64_t word) { return word >> (shift + bit) & ((1 << step) - 1); };
    for (uint64_t word : words) first[digit(word) + 1]++;
    for (int d = 0; d < 1 << step; d++) first[d + 1] += first[d];
    for (uint64_t word : words) other[first[digit(word)]++] = word;
    words.swap(other);
  }
  return words;
}

// Adds a distinct id, larger than all before, and those of its prefixes that are new.
inline void add_id(const Table& table, Index& index, int64_t* last, uint64_t id) {
  for (int64_t k = table.order - 1; k >= 0; k--) {
    Prefixes& at = index.level[k];
    if (at.count() && last[k] == (int64_t)id) return;
    last[k] = (int64_t)id;
    if (k + 1 < table.order) at.child.push_back(index.level[k + 1].count() - 1);
    const uint64_t mode = (uint64_t)table.row_mode[k];
    // 32-bit divisions take a fraction of the time of 64-bit ones
    const uint64_t above = k == 0 ? 0 : id <= UINT32_MAX ? (uint32_t)id / (uint32_t)mode : id / mode;
    at.digit.push_back((int64_t)(id - above * mode));
    if (k > 0) {
      const Prefixes& before = index.level[k - 1];
      at.parent.push_back(before.count() - (before.count() && last[k - 1] == (int64_t)above));
    }
    id = above;
  }
}

// Room for as many prefixes as there can be.
inline void reserve(const Table& table, Index& index, int64_t ids) {
  int64_t most = 1;
  for (int64_t k = 0; k < table.order; k++) {
    most = std::min(ids, most * table.row_mode[k]);
    Prefixes& at = index.level[k];
    at.digit.reserve(most);
    if (k > 0) at.parent.reserve(most);
    if (k + 1 < table.order) at.child.reserve(most + 1);
  }
  index.position.reserve(ids);
  index.first.reserve(ids + 1);
}

// The index of at least one id; all of them lie between `smallest` and `largest`.
template <class I>
Index make_index(const Table& table, const I* ids, int64_t count, int64_t smallest, int64_t largest, bool ascending) {
  int shift = 0;
  while (count >> shift) shift++;
  const auto words = sorted_words(ids, count, smallest, largest - smallest, shift, ascending);
  Index index;
  reserve(table, index, count);
  int64_t last[MAX_ORDER];
  for (int64_t i = 0; i < count;) {
    const uint64_t key = words[i] >> shift, id = key + (uint64_t)smallest;
    const bool zero = (int64_t)id == table.zero_row;
    if (!zero) {
      index.first.push_back((int64_t)index.position.size());
      add_id(table, index, last, id);
    }
    for (; i < count && words[i] >> shift == key; i++)
      (zero ? index.zero : index.position).push_back((int64_t)(words[i] & (((uint64_t)1 << shift) - 1)));
  }
  index.first.push_back((int64_t)index.position.size());
  for (int64_t k = 0; k + 1 < table.order; k++) index.level[k].child.push_back(index.level[k + 1].count());
  for (int64_t k = 1; k + 1 < table.order; k++) index.level[k].order_by_digit(table.row_mode[k]);
  return index;
}

}  // namespace comera
#endif

// Rows of a table by id: each distinct id once, straight to the first of its places, from there to the others.
#ifndef COMERA_LOOKUP_FORWARD_H
#define COMERA_LOOKUP_FORWARD_H

namespace comera {

// L: columns of a vector in the products with slices of the last core.
template <class T, int L>
class Forward {
 public:
  Forward(const Sizes<T>& size, const Index& index, const T* packed, T* rows, const Limits& limits)
      : work(size, index, packed, limits), size(size), rows(rows) {
    const int64_t k = work.joined();
    batch = k == 0 ? 1 : std::max<int64_t>(1, std::min<int64_t>(16, 4096 / size.value(k)));
    slice = work.largest_slice(), parents = k == 0 ? 0 : padded(batch * size.value(k - 1), 16);
    prefixes = padded(batch * size.value(k), 16);
    scratch = slice + parents + prefixes + padded(AT_ONCE * size.before[size.last] * size.leaf, 16);
    memory = Buffer<T>(work.parts * scratch);
    per_id = size.leaf / L;
    from.resize(work.parts * AT_ONCE * per_id);
    to.resize(from.size());
  }

  void run() {
#pragma omp parallel num_threads(work.parts) if (work.parts > 1)
    {
      work.values([&](int64_t part) { return memory.get() + part * scratch; }, [](int64_t) {});
      each_part(work.parts, [&](int64_t part) { run_part(part); });
    }
  }

 private:
  static constexpr int64_t AT_ONCE = 8;  // ids
  Work<T> work;
  const Sizes<T>& size;
  T* rows;
  int64_t batch, slice, parents, prefixes, scratch, per_id;  // prefixes at once; elements; vectors
  Buffer<T> memory;
  std::vector<const T*> from;
  std::vector<T*> to;

  void run_part(int64_t part) {
    T *own = memory.get() + part * scratch, *above = own + slice, *made = above + parents, *apart = made + prefixes;
    const int64_t k = work.joined();
    const Prefixes& level = work.index.level[k];
    const Range mine = work.share(part);
    int64_t digit = -1;
    for (int64_t n = mine.begin, count; n < mine.end; n += count) {
      count = work.alike(k, n, mine.end, batch);
      const int64_t i = work.nth(k, n);
      if (k > 0) {
        if (level.digit[i] != digit) work.pack_slice(k, digit = level.digit[i], own);
        work.gather_parents(k, n, count, above);
        work.join(k, count, above, own, made);
      }
      for (int64_t j = 0; j < count; j++)
        write_children(part, work.nth(k, n + j), k > 0 ? made + j * size.value(k) : work.value_of(0, i), apart);
    }
  }

  void write_children(int64_t part, int64_t i, const T* value, T* apart) {
    const std::vector<int64_t>& child = work.index.level[work.joined()].child;
    for (int64_t id = child[i]; id < child[i + 1]; id += AT_ONCE)
      write(part, value, id, std::min(AT_ONCE, child[i + 1] - id), apart);
  }

  // Rows of some ids of one prefix. `apart`: memory for the rows of slices with a tail.
  void write(int64_t part, const T* value, int64_t first, int64_t count, T* apart) {
    const bool direct = size.leaf == size.column_mode[size.last] && !size.cropped();
    const int64_t tall = size.before[size.last];
    const T** b = from.data() + part * AT_ONCE * per_id;
    T** c = to.data() + part * AT_ONCE * per_id;
    for (int64_t j = 0; j < count; j++)
      for (int64_t p = 0; p < per_id; p++) {
        const int64_t digit = work.index.level[size.last].digit[first + j];
        b[j * per_id + p] = work.leaves.get() + digit * size.leaf_slice() + p * L;
        c[j * per_id + p] = (direct ? row(first + j) : apart + j * tall * size.leaf) + p * L;
      }
    panels<T, L>(tall, count * per_id, size.rank[size.last], Left<T>{value, size.wide[size.last], 1}, b, size.leaf, c,
                 size.leaf, false);
    for (int64_t j = 0; j < count; j++) {
      if (!direct) crop(row(first + j), apart + j * tall * size.leaf);
      repeat(first + j);
    }
  }

  T* row(int64_t id) const { return rows + work.index.position[work.index.first[id]] * size.columns; }

  void crop(T* to_row, const T* from_row) const {
    const int64_t mode = size.column_mode[size.last];
    for (int64_t at = 0; at < size.columns; at += mode, from_row += size.leaf) {
      const int64_t used = std::min(mode, size.columns - at);
      for (int64_t j = 0; j < used; j++) to_row[at + j] = from_row[j];
    }
  }

  void repeat(int64_t id) const {
    const T* made = row(id);
    for (int64_t p = work.index.first[id] + 1; p < work.index.first[id + 1]; p++)
      std::memcpy(rows + work.index.position[p] * size.columns, made, size.columns * sizeof(T));
  }
};

}  // namespace comera
#endif

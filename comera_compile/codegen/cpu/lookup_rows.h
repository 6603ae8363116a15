// Gradients of the rows as they came, and how those of one id are added.
#ifndef COMERA_LOOKUP_ROWS_H
#define COMERA_LOOKUP_ROWS_H

namespace comera {

template <class T, int L>
struct Rows {
  const Sizes<T>& size;
  const Index& index;
  const T* grad;

  const T* at(int64_t place) const { return grad + index.position[place] * size.columns; }

  // Asks for the rows that the ids from `first` to `end` will read first; `lines`: how many cache lines may still be.
  void fetch(int64_t first, int64_t end, int64_t* lines) const {
    constexpr int64_t LINE = 64;
    for (int64_t p = index.first[first]; p < index.first[end] && *lines > 0; p++) {
      const char *row = (const char*)at(p), *after = (const char*)(at(p) + size.columns);
      for (; row < after && *lines > 0; row += LINE, --*lines) __builtin_prefetch(row);
    }
  }

  // The gradients of all places of an id, added, in rows of one slice's columns. The row after the one that is added is
  // asked for meanwhile: rows lie anywhere in memory.
  void sum_places(int64_t id, T* to_rows, int64_t to_row) const {
    const bool whole = size.column_mode[size.last] == L && !size.cropped();
    const int64_t end = (int64_t)index.position.size() - 1;
    for (int64_t p = index.first[id]; p < index.first[id + 1]; p++) {
      const T* source = at(p);
      const T* after = at(std::min(p + 1, end));
      if (!whole)
        add_elements(to_rows, to_row, source, p > index.first[id]);
      else if (p > index.first[id])
        add_vectors<true>(to_rows, to_row, source, after);
      else
        add_vectors<false>(to_rows, to_row, source, after);
    }
  }

  template <bool ADD>
  void add_vectors(T* to_rows, int64_t to_row, const T* source, const T* after) const {
    using V = typename Vector<T, L>::stored;
    const int64_t count = size.before[size.last];
    for (int64_t i = 0; i < count; i++) {
      __builtin_prefetch(after + i * L);
      V* to_place = (V*)(to_rows + i * to_row);
      *to_place = *(const V*)(source + i * L) + (ADD ? *to_place : V{});
    }
  }

  void add_elements(T* to_rows, int64_t to_row, const T* source, bool add) const {
    const int64_t mode = size.column_mode[size.last];
    for (int64_t i = 0; i < size.before[size.last]; i++) {
      const int64_t used = std::max<int64_t>(0, std::min(mode, size.columns - i * mode));
      for (int64_t j = 0; j < used; j++)
        to_rows[i * to_row + j] = source[i * mode + j] + (add ? to_rows[i * to_row + j] : T(0));
      for (int64_t j = used; j < mode; j++) to_rows[i * to_row + j] = T(0);
    }
  }
};

}  // namespace comera
#endif

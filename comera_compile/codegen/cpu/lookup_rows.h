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

  // The gradients of all places of an id, added, in rows of one slice's columns: up to four at a time, so that sums go
  // through memory less often. The rows after those that are added are asked for meanwhile: they lie anywhere in memory.
  void sum_places(int64_t id, T* to_rows, int64_t to_row) const {
    const bool whole = size.column_mode[size.last] % L == 0 && !size.cropped();
    const int64_t begin = index.first[id], end = index.first[id + 1];
    for (int64_t p = begin; p < end;) {
      if (!whole)
        add_elements(to_rows, to_row, at(p), p > begin), p++;
      else if (p == begin)
        p += add_some<false>(to_rows, to_row, p, end - p);
      else
        p += add_some<true>(to_rows, to_row, p, end - p);
    }
  }

  // Adds the rows of the next places, at most `left`; how many it were.
  template <bool ADD>
  int64_t add_some(T* to_rows, int64_t to_row, int64_t p, int64_t left) const {
    if (left >= 4) return add_vectors<ADD, 4>(to_rows, to_row, p);
    if (left >= 2) return add_vectors<ADD, 2>(to_rows, to_row, p);
    return add_vectors<ADD, 1>(to_rows, to_row, p);
  }

  template <bool ADD, int N>
  int64_t add_vectors(T* to_rows, int64_t to_row, int64_t p) const {
    using V = typename Vector<T, L>::stored;
    const int64_t mode = size.column_mode[size.last], end = (int64_t)index.position.size() - 1;
    const T *from[N], *after[N];
    for (int n = 0; n < N; n++) from[n] = at(p + n), after[n] = at(std::min(p + N + n, end));
    for (int64_t i = 0, j = 0; i < size.before[size.last]; i++, to_rows += to_row)
      for (int64_t column = 0; column < mode; column += L, j += L) {
        V* to_place = (V*)(to_rows + column);
        V sum = *(const V*)(from[0] + j);
        for (int n = 1; n < N; n++) sum += *(const V*)(from[n] + j);
        for (int n = 0; n < N; n++) __builtin_prefetch(after[n] + j);
        *to_place = sum + (ADD ? *to_place : V{});
      }
    return N;
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

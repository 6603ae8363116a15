// What a lookup is put together from: memory, parts of the work for the threads, rows copied between layouts.
#ifndef COMERA_LOOKUP_PARTS_H
#define COMERA_LOOKUP_PARTS_H
#include <omp.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

namespace comera {

// Uninitialised memory on a cache line.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t size = 0) {
    if (size == 0) return;
    data_.reset((T*)std::aligned_alloc(64, padded(size * (int64_t)sizeof(T), 64)));
    if (!data_) throw std::bad_alloc();
  }
  T* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(T* data) const { std::free(data); }
  };
  std::unique_ptr<T, Free> data_;
};

// One phase: all parts, by as many threads as the team has; then everybody waits.
template <class F>
void each_part(int64_t parts, const F& run) {
  for (int64_t part = omp_get_thread_num(); part < parts; part += omp_get_num_threads()) run(part);
#pragma omp barrier
}

// How many threads, and how much memory.
struct Limits {
  int64_t threads, least_work, most_sums;  // work: multiplications worth a thread; sums: elements of all parts' sums
};

struct Range {
  int64_t begin, end;
};

inline Range even(int64_t count, int64_t part, int64_t parts) {
  return {count * part / parts, count * (part + 1) / parts};
}

// to = from * scale, or added to it. Vectors by hand: compilers cannot know that the two do not overlap.
template <bool ADD, class T>
inline void scaled(T* to, const T* from, int64_t count, T scale) {
  using V = typename Vector<T, WIDTH<T>>::stored;
  int64_t j = 0;
  for (; j + WIDTH<T> <= count; j += WIDTH<T>)
    *(V*)(to + j) = *(const V*)(from + j) * scale + (ADD ? *(const V*)(to + j) : V{});
  for (; j < count; j++) to[j] = from[j] * scale + (ADD ? to[j] : T(0));
}

// Copies scaled rows of `used` elements into rows of `row` elements, zeros behind.
template <class T>
inline void widen(T* to, int64_t row, const T* from, int64_t used, int64_t count, T scale) {
  if (row == used) return scaled<false>(to, from, used * count, scale);
  for (int64_t i = 0; i < count; i++, to += row, from += used) {
    scaled<false>(to, from, used, scale);
    for (int64_t j = used; j < row; j++) to[j] = T(0);
  }
}

// The inverse: back to rows of `used` elements, scaled; put there or added.
template <class T>
inline void narrow_rows(T* to, int64_t used, const T* from, int64_t row, int64_t count, T scale, bool add) {
  for (int64_t i = 0; i < count; i++, to += used, from += row)
    if (add)
      scaled<true>(to, from, used, scale);
    else
      scaled<false>(to, from, used, scale);
}

}  // namespace comera
#endif

// Runs a list of small contractions for each of several layers: what merges the cores of a tensor-train weight, and the
// way back. The list is made by merge_program.py, which also says what each number in it means.
//
// The list comes in parts that have nothing to do with each other, as the two halves of a weight. Parts of layers are
// dealt out to the threads where there are enough of them; otherwise the threads share the rows of each large product.
// Threads meet as rarely as that allows: on a machine that others use too, each meeting can cost a time slice.

#include <omp.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace {

constexpr int64_t kRows = 48;          // rows of a product that one task computes
constexpr int64_t kShared = 1 << 19;  // multiplications from which on a product is shared by the threads

enum Kind : int64_t { kProduct = 0, kCopy = 1, kZero = 2, kScale = 3, kScaleGradient = 4 };

// Where an operand of a product lies: element (i, j) is at row(i) + column(j), each of which is an even step or a table
// of offsets. Columns lie side by side in runs.
struct Place {
  int64_t buffer, offset, run;
  int64_t row_step = 0, col_step = 0;
  const int64_t *rows = nullptr, *cols = nullptr;

  Place(const int64_t* words, const int64_t* tables) : buffer(words[0]), offset(words[1]), run(words[2]) {
    if (words[3] & 1) row_step = words[4]; else rows = tables + words[4];
    if (words[3] & 2) col_step = words[5]; else cols = tables + words[5];
  }

  int64_t row(int64_t i) const { return rows == nullptr ? i * row_step : rows[i]; }
  int64_t column(int64_t j) const { return cols == nullptr ? j * col_step : cols[j]; }

  bool has_plain_rows(int64_t width) const {
    return rows == nullptr && cols == nullptr && (col_step == 1 || width == 1);
  }

  // Whether columns lie in whole vectors, in every row at the same distance from the one before.
  template <class T>
  bool has_panels(int64_t width) const {
    return rows == nullptr && run % comera::WIDTH<T> == 0 && width % comera::WIDTH<T> == 0;
  }
};

constexpr int kPlaceWords = 6;

// A run is short: a loop over eights, whose length the compiler knows, and the rest.
template <class T>
void copy_run(const T* from, int64_t count, T* to) {
  int64_t r = 0;
  for (; r + 8 <= count; r += 8)
    for (int k = 0; k < 8; ++k) to[r + k] = from[r + k];
  for (; r < count; ++r) to[r] = from[r];
}

// Elements one by one: a square that stays in the first cache at a time, since one side of the copy is read or written
// across its rows.
template <class Move>
void each_element(int64_t rows, int64_t cols, const Move& move) {
  constexpr int64_t SIDE = 16;
  for (int64_t i = 0; i < rows; i += SIDE)
    for (int64_t j = 0; j < cols; j += SIDE)
      for (int64_t y = i; y < rows && y < i + SIDE; ++y)
        for (int64_t x = j; x < cols && x < j + SIDE; ++x) move(y, x);
}

template <class T>
void gather(const Place& place, const T* from, int64_t first, int64_t rows, int64_t cols, T* to) {
  if (place.run == 1) {
    each_element(rows, cols,
                 [&](int64_t i, int64_t j) { to[i * cols + j] = from[place.row(first + i) + place.column(j)]; });
    return;
  }
  for (int64_t i = 0; i < rows; ++i, to += cols) {
    const T* row = from + place.row(first + i);
    for (int64_t j = 0; j < cols; j += place.run) copy_run(row + place.column(j), place.run, to + j);
  }
}

template <class T>
void scatter(const Place& place, const T* from, int64_t first, int64_t rows, int64_t cols, T* to) {
  if (place.run == 1) {
    each_element(rows, cols,
                 [&](int64_t i, int64_t j) { to[place.row(first + i) + place.column(j)] = from[i * cols + j]; });
    return;
  }
  for (int64_t i = 0; i < rows; ++i, from += cols) {
    T* row = to + place.row(first + i);
    for (int64_t j = 0; j < cols; j += place.run) copy_run(from + j, place.run, row + place.column(j));
  }
}

// Where the vectors of a row begin.
template <class T>
std::vector<T*> panels_of(const Place& place, T* data, int64_t width) {
  std::vector<T*> found;
  for (int64_t j = 0; j < width; j += comera::WIDTH<T>) found.push_back(data + place.column(j));
  return found;
}

// A part of one layer: the layer's buffers, its packed vector with its scale and gradient, and room for what a product
// rearranges.
template <class T>
struct Part {
  const int64_t* tables;
  std::vector<T*> buffers;
  const T* cores;
  T* grads;
  T scale;
  std::unique_ptr<T[]> right_room, task_room;
  int64_t left_size, task_size;
  int threads;

  T* at(const Place& place) const { return buffers[place.buffer] + place.offset; }

  void product(const int64_t* words) {
    const int64_t m = words[0], n = words[1], k = words[2];
    const Place left(words + 3, tables), right(words + 3 + kPlaceWords, tables), out(words + 3 + 2 * kPlaceWords, tables);
    const Right b = take_right(right, k, n, out.has_plain_rows(n));
    const bool direct = !b.panels.empty() && out.has_panels<T>(n);
    const std::vector<T*> to = direct ? panels_of(out, at(out), n) : std::vector<T*>();
    const int64_t tasks = (m + kRows - 1) / kRows;
    const auto one = [&](int64_t task, T* room) {
      const int64_t first = task * kRows, some = m - first < kRows ? m - first : kRows;
      rows(left, out, first, some, n, k, b, to, room);
    };
    if (threads == 1 || m * n * k < kShared) {
      for (int64_t task = 0; task < tasks; ++task) one(task, task_room.get());
      return;
    }
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t task = 0; task < tasks; ++task) one(task, task_room.get() + omp_get_thread_num() * task_size);
  }

  // Rows of the right operand side by side, or where their vectors begin.
  struct Right {
    const T* data;
    int64_t row;
    std::vector<const T*> panels;
  };

  Right take_right(const Place& place, int64_t terms, int64_t columns, bool plain_result) {
    Right found{at(place), place.row_step, {}};
    const bool plain = place.has_plain_rows(columns);
    if (!plain && (plain_result || !place.has_panels<T>(columns))) {
      gather(place, found.data, 0, terms, columns, right_room.get());
      found.data = right_room.get(), found.row = columns;
    } else if (!plain) {
      found.panels = panels_of(place, found.data, columns);
      return found;
    }
    for (int64_t j = 0; !plain_result && columns % comera::WIDTH<T> == 0 && j < columns; j += comera::WIDTH<T>)
      found.panels.push_back(found.data + j);
    return found;
  }

  // Some rows of a product. Its panels may go straight to where they belong.
  void rows(const Place& left, const Place& out, int64_t first, int64_t m, int64_t n, int64_t k, const Right& b,
            const std::vector<T*>& to, T* room) const {
    comera::Left<T> a{at(left) + left.row(first), left.row_step, left.col_step};
    if (left.rows != nullptr || left.cols != nullptr) {
      gather(left, at(left), first, m, k, room);
      a = {room, k, 1};
    }
    if (out.has_plain_rows(n)) {
      comera::gemm<T>(m, n, k, a, b.data, b.row, at(out) + out.row(first), out.row_step, false);
      return;
    }
    if (!to.empty()) {
      std::vector<T*> here(to);
      for (T*& panel : here) panel += out.row(first);
      comera::panels<T>(m, here.size(), k, a, b.panels.data(), b.row, here.data(), out.row_step, false);
      return;
    }
    T* made = room + left_size;
    if (b.panels.empty()) {
      comera::gemm<T>(m, n, k, a, b.data, b.row, made, n, false);
    } else {
      std::vector<T*> here;
      for (int64_t j = 0; j < n; j += comera::WIDTH<T>) here.push_back(made + j);
      comera::panels<T>(m, here.size(), k, a, b.panels.data(), b.row, here.data(), n, false);
    }
    scatter(out, made, first, m, n, at(out));
  }

  void copy(const int64_t* words) const {
    const T* from = buffers[words[0]];
    T* to = buffers[words[1]];
    const int64_t count = words[2], length = words[3];
    const int64_t *source = tables + words[4], *target = tables + words[5];
    for (int64_t i = 0; i < count; ++i)
      for (int64_t j = 0; j < length; ++j) to[target[i] + j] = from[source[i] + j];
  }

  void zero(const int64_t* words) const {
    T* to = buffers[words[0]] + words[1];
    for (int64_t j = 0; j < words[2]; ++j) to[j] = T(0);
  }

  void run(const int64_t* words, int64_t count) {
    for (int64_t k = 0; k < count; words += words[1], ++k) {
      if (words[0] == kProduct) product(words + 2);
      if (words[0] == kCopy) copy(words + 2);
      if (words[0] == kZero) zero(words + 2);
      if (words[0] == kScale)
        for (int64_t j = words[2]; j < words[3]; ++j) buffers[0][j] = cores[j] * scale;
      if (words[0] == kScaleGradient)
        for (int64_t j = words[2]; j < words[3]; ++j) grads[j] *= scale;
    }
  }
};

constexpr int kHead = 5;

// program: number of parts, elements of the largest left block, right operand and result block of a product, elements
// of a layer's cores; for each part where its instructions begin and how many they are; then the instructions.
// buffers: for each its first layer; strides: from layer to layer.
template <class T>
void run(const int64_t* program, const int64_t* tables, int64_t layers, T* const* buffers, const int64_t* strides,
         int64_t count, const T* const* cores, const double* scales, T* grads, int64_t threads) {
  const int64_t parts = program[0], size = program[4], task_size = program[1] + program[3];
  const auto one = [&](int64_t task, int inner) {
    const int64_t layer = task / parts, *part = program + kHead + 2 * (task % parts);
    Part<T> state{tables, {}, cores[layer], grads == nullptr ? nullptr : grads + layer * size};
    state.scale = static_cast<T>(scales[layer]);
    state.right_room.reset(new T[program[2]]), state.task_room.reset(new T[inner * task_size]);
    state.left_size = program[1], state.task_size = task_size, state.threads = inner;
    for (int64_t k = 0; k < count; ++k) state.buffers.push_back(buffers[k] + layer * strides[k]);
    state.run(program + part[0], part[1]);
  };
  const int64_t tasks = layers * parts;
  if (tasks < threads || threads == 1) {
    // Not inside a parallel region, not even one of a single thread: teams inside another are made anew each time.
    for (int64_t task = 0; task < tasks; ++task) one(task, static_cast<int>(threads));
    return;
  }
#pragma omp parallel for schedule(dynamic) num_threads(static_cast<int>(threads))
  for (int64_t task = 0; task < tasks; ++task) one(task, 1);
}

}  // namespace

extern "C" void merge(const int64_t* program, const int64_t* tables, int64_t layers, ELEMENT* const* buffers,
                      const int64_t* strides, int64_t count, const ELEMENT* const* cores, const double* scales,
                      ELEMENT* grads, int64_t threads) {
  run<ELEMENT>(program, tables, layers, buffers, strides, count, cores, scales, grads, threads);
}

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

// Where an operand of a product lies: element (i, j) is at rows[i] + cols[j], or at i * row_step + j * col_step. Columns
// lie side by side in runs.
struct Place {
  int64_t buffer, offset, run;
  bool even;
  int64_t row_step, col_step;
  const int64_t *rows, *cols;

  Place(const int64_t* words, const int64_t* tables)
      : buffer(words[0]), offset(words[1]), run(words[2]), even(words[3] != 0) {
    row_step = col_step = 0;
    rows = cols = nullptr;
    if (even) {
      row_step = words[4], col_step = words[5];
    } else {
      rows = tables + words[4], cols = tables + words[5];
    }
  }

  int64_t at(int64_t i, int64_t j) const { return even ? i * row_step + j * col_step : rows[i] + cols[j]; }

  bool has_plain_rows(int64_t width) const { return even && (col_step == 1 || width == 1); }
};

constexpr int kPlaceWords = 6;

template <class T>
void gather(const Place& place, const T* from, int64_t first, int64_t rows, int64_t cols, T* to) {
  for (int64_t i = 0; i < rows; ++i, to += cols)
    for (int64_t j = 0; j < cols; j += place.run) {
      const T* part = from + place.at(first + i, j);
      for (int64_t r = 0; r < place.run; ++r) to[j + r] = part[r];
    }
}

template <class T>
void scatter(const Place& place, const T* from, int64_t first, int64_t rows, int64_t cols, T* to) {
  for (int64_t i = 0; i < rows; ++i, from += cols)
    for (int64_t j = 0; j < cols; j += place.run) {
      T* part = to + place.at(first + i, j);
      for (int64_t r = 0; r < place.run; ++r) part[r] = from[j + r];
    }
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
    const T* b = at(right);
    int64_t b_row = right.row_step;
    if (!right.has_plain_rows(n)) {
      gather(right, b, 0, k, n, right_room.get());
      b = right_room.get(), b_row = n;
    }
    const int64_t tasks = (m + kRows - 1) / kRows;
    const auto one = [&](int64_t task, T* room) {
      rows(left, out, task * kRows, m - task * kRows < kRows ? m - task * kRows : kRows, n, k, b, b_row, room);
    };
    if (threads == 1 || m * n * k < kShared) {
      for (int64_t task = 0; task < tasks; ++task) one(task, task_room.get());
      return;
    }
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t task = 0; task < tasks; ++task) one(task, task_room.get() + omp_get_thread_num() * task_size);
  }

  void rows(const Place& left, const Place& out, int64_t first, int64_t m, int64_t n, int64_t k, const T* b,
            int64_t b_row, T* room) const {
    const T* a = at(left) + first * left.row_step;
    int64_t a_row = left.row_step, a_col = left.col_step;
    if (!left.even) {
      gather(left, at(left), first, m, k, room);
      a = room, a_row = k, a_col = 1;
    }
    T* c = at(out);
    if (out.has_plain_rows(n)) {
      comera::gemm<T>(m, n, k, {a, a_row, a_col}, b, b_row, c + first * out.row_step, out.row_step, false);
      return;
    }
    T* made = room + left_size;
    comera::gemm<T>(m, n, k, {a, a_row, a_col}, b, b_row, made, n, false);
    scatter(out, made, first, m, n, c);
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

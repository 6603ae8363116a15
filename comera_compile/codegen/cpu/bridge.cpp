// From the bond of one tensor-train linear through a pointwise function to the bond of the next, and all gradients. The
// wide tensor between them, and its gradient, exist in blocks only.
//
//   u = h B + bias,  g = act(u),  result = g A^T     [rows, bond] -> [rows, width] -> [rows, bond of A]
//   with a gate:     g = act(h' B' + bias') (h B + bias)
//   with dropout:    each element of g times 0 or 1 / (1 - p)
//
// A block is BLOCK rows by CHUNK columns: made, worked on and used up while it lies in the cache. Backward it is made again
// from h. Threads share the columns, in both directions: then B, A and their gradients are read and made by one thread
// each, and only the sums over columns (result, dh) are put together from as many parts as there are threads, in order.

namespace comera {

// One wide tensor h B + bias, and where its gradients go: dbias is null without a bias, all of them are null forward.
template <class T>
struct Side {
  const T* h;
  Half<T> b;  // of bond 0 for a gate that is not there: where there are no rows or columns, any pointer may be null
  T *dh, *db, *dbias;

  bool there() const { return b.bond > 0; }
  bool trained() const { return dh != nullptr || db != nullptr; }
  int64_t width() const { return padded(b.bond, WIDTH<T>); }
};

// What all threads have of a side: rows of h with a 1 behind each if there is a bias, and room for a part of dh a thread.
template <class T>
struct Shared {
  const Side<T>& side;
  std::unique_ptr<T[], Free> rows_of_h, parts;

  Shared(const Side<T>& side, int64_t rows, int64_t threads)
      : side(side),
        rows_of_h(room<T>(side.there() ? rows * side.b.terms() : 0)),
        parts(room<T>(side.trained() ? threads * rows * side.width() : 0)) {}

  void fill(const Share& rows) const {
    const int64_t terms = side.b.terms();
    if (side.there())
      take_rows(side.h + rows.first * side.b.bond, rows.last - rows.first, side.b.bond, terms,
                rows_of_h.get() + rows.first * terms);
  }

  // Rows of dh, from the parts of all threads.
  void sum(int64_t rows, int64_t threads, const Share& mine) const {
    if (side.trained()) sum_parts(parts.get(), threads, rows, side.width(), side.b.bond, mine, side.dh);
  }
};

// Columns [first, first + columns) of a half as panels: what a wide product reads.
template <class T>
void pack_panels(const Half<T>& half, int64_t first, int64_t columns, T* to) {
  for (int64_t j = 0; j < columns; j += PANEL<T>) pack_panel(half, (first + j) / PANEL<T>, to + j * half.terms());
}

// Rows of a wide product side by side; `columns` is a multiple of PANEL.
template <class T>
void make_block(int64_t rows, int64_t terms, const T* left, const T* panels, int64_t columns, T* block) {
  for (int64_t j = 0; j < columns; j += PANEL<T>)
    wide_tiles<T>(rows, terms, left, terms, panels + j * terms, block + j, columns, PANEL<T>, nullptr);
}

// One thread's work on one side.
template <class T>
struct Worker {
  const Shared<T>& shared;
  const Side<T>& side;
  T* part;  // of dh
  std::unique_ptr<T[], Free> panels, across, block;
  std::unique_ptr<Columns<T>> sums;

  Worker(const Shared<T>& shared, int64_t rows, int64_t me)
      : shared(shared),
        side(shared.side),
        part(shared.parts.get() + me * rows * side.width()),
        panels(room<T>(side.there() ? CHUNK<T> * side.b.terms() : 0)),
        across(room<T>(side.trained() ? CHUNK<T> * side.width() : 0)),
        block(room<T>(side.there() ? BLOCK * CHUNK<T> : 0)) {}

  void take(const Share& chunk, int64_t columns) {
    if (!side.there()) return;
    pack_panels(side.b, chunk.first, columns, panels.get());
    if (!side.trained()) return;
    pack_transposed(side.b, chunk.first, chunk.last - chunk.first, side.width(), across.get());
    sums = std::make_unique<Columns<T>>(chunk, side.b.terms());
  }

  // Rows [i, i + some) of the wide tensor.
  void make(int64_t i, int64_t some, int64_t columns) const {
    const int64_t terms = side.b.terms();
    if (side.there()) make_block(some, terms, shared.rows_of_h.get() + i * terms, panels.get(), columns, block.get());
  }

  // Gradients, from that of these rows of the wide tensor.
  void use(const Share& chunk, int64_t i, int64_t some, int64_t columns, const T* grad, bool add) const {
    const int64_t terms = side.b.terms();
    sums->add(chunk.first, some, shared.rows_of_h.get() + i * terms, terms, grad);
    narrow_tiles(some, chunk.last - chunk.first, grad, columns, across.get(), side.width(), part + i * side.width(), add);
  }

  void hand_over() const {
    for (int64_t k = 0; side.trained() && k < side.b.bond; ++k) sums->hand_over(k, side.db + k * side.b.size);
    if (side.dbias != nullptr) sums->hand_over(side.b.bond, side.dbias);
  }

  void nothing(int64_t rows) const {
    if (side.trained()) std::fill_n(part, rows * side.width(), T(0));
  }
};

template <class T>
struct Bridge {
  int64_t rows;
  Side<T> value, gate;
  Half<T> a;
  Pointwise<T> act;
  Dropout<T> dropout;

  int64_t width() const { return padded(a.bond, WIDTH<T>); }

  // Runs body(chunk, its columns up to a whole panel) for a share of the columns.
  template <class Body>
  void each_chunk(const Share& share, const Body& body) const {
    for (int64_t c = share.first; c < share.last; c += CHUNK<T>) {
      const Share chunk(c, std::min(c + CHUNK<T>, share.last));
      body(chunk, padded(chunk.last - c, PANEL<T>));
    }
  }

  void forward_columns(const Share& share, Worker<T>& value, Worker<T>& gate, T* part) const {
    if (share.first == share.last) std::fill_n(part, rows * width(), T(0));
    const auto across = room<T>(CHUNK<T> * width());
    each_chunk(share, [&](const Share& chunk, int64_t columns) {
      value.take(chunk, columns);
      gate.take(chunk, columns);
      pack_transposed(a, chunk.first, chunk.last - chunk.first, width(), across.get());
      for (int64_t i = 0; i < rows; i += BLOCK) {
        const int64_t some = std::min(BLOCK, rows - i);
        value.make(i, some, columns);
        gate.make(i, some, columns);
        if (gate.side.there())
          act.gated(some * columns, gate.block.get(), value.block.get());
        else
          act.forward(some * columns, value.block.get());
        dropout.apply(i, some, chunk.first, columns, value.block.get(), columns);
        narrow_tiles<T>(some, chunk.last - chunk.first, value.block.get(), columns, across.get(), width(),
                        part + i * width(), chunk.first > share.first);
      }
    });
  }

  void backward_columns(const Share& share, Worker<T>& value, Worker<T>& gate, const T* grad, T* da) const {
    if (share.first == share.last) value.nothing(rows), gate.nothing(rows);
    const auto panels = room<T>(CHUNK<T> * a.bond), block = room<T>(BLOCK * CHUNK<T>);
    T *g = value.block.get(), *u = gate.block.get(), *d = block.get();
    each_chunk(share, [&](const Share& chunk, int64_t columns) {
      value.take(chunk, columns);
      gate.take(chunk, columns);
      pack_panels(a, chunk.first, columns, panels.get());
      Columns<T> sums(chunk, a.bond);
      const bool add = chunk.first > share.first;
      for (int64_t i = 0; i < rows; i += BLOCK) {
        const int64_t some = std::min(BLOCK, rows - i);
        value.make(i, some, columns);
        gate.make(i, some, columns);
        make_block(some, a.bond, grad + i * a.bond, panels.get(), columns, d);
        dropout.apply(i, some, chunk.first, columns, d, columns);
        if (gate.side.there()) {
          act.gated_backward(some * columns, u, g, d);
          gate.use(chunk, i, some, columns, u, add);
        } else {
          act.backward(some * columns, g, d);
        }
        value.use(chunk, i, some, columns, d, add);
        dropout.apply(i, some, chunk.first, columns, g, columns);
        sums.add(chunk.first, some, grad + i * a.bond, a.bond, g);
      }
      value.hand_over();
      gate.hand_over();
      for (int64_t k = 0; k < a.bond; ++k) sums.hand_over(k, da + k * a.size);
    });
  }

  // Runs body(columns of this thread, its work on both sides, its number), then finish(its rows, threads).
  template <class Body, class Finish>
  void run(int64_t most, const Body& body, const Finish& finish) const {
    const Shared<T> values(value, rows, most), gates(gate, rows, most);
    each_thread(most, [&](int64_t me, int64_t threads, auto meet) {
      const Share mine(rows, 1, me, threads);
      values.fill(mine);
      gates.fill(mine);
      meet();
      Worker<T> value(values, rows, me), gate(gates, rows, me);
      body(Share(a.size, PANEL<T>, me, threads), value, gate, me);
      meet();
      values.sum(rows, threads, mine);
      gates.sum(rows, threads, mine);
      finish(mine, threads);
    });
  }

  void forward(T* result, int64_t most) const {
    most = useful_threads(most, a.size, PANEL<T>);
    const auto parts = room<T>(most * rows * width());
    const auto body = [&](const Share& share, Worker<T>& value, Worker<T>& gate, int64_t me) {
      forward_columns(share, value, gate, parts.get() + me * rows * width());
    };
    run(most, body, [&](const Share& mine, int64_t threads) {
      sum_parts(parts.get(), threads, rows, width(), a.bond, mine, result);
    });
  }

  void backward(const T* grad, T* da, int64_t most) const {
    const auto body = [&](const Share& share, Worker<T>& value, Worker<T>& gate, int64_t) {
      backward_columns(share, value, gate, grad, da);
    };
    run(useful_threads(most, a.size, PANEL<T>), body, [](const Share&, int64_t) {});
  }
};

}  // namespace comera

using T = ELEMENT;

// sizes: rows, width, bond of the value's side, of the gate's, of A; the activation; the seed of dropout, whose probability
// is p.
extern "C" void bridge(const int64_t* sizes, double p, const T* h, const T* b, const T* bias, const T* h_gate,
                       const T* b_gate, const T* bias_gate, const T* a, T* result, int64_t threads) {
  const comera::Side<T> value{h, {b, bias, sizes[2], sizes[1]}, nullptr, nullptr, nullptr};
  const comera::Side<T> gate{h_gate, {b_gate, bias_gate, sizes[3], sizes[1]}, nullptr, nullptr, nullptr};
  const comera::Half<T> half{a, nullptr, sizes[4], sizes[1]};
  comera::Bridge<T>{sizes[0], value, gate, half, comera::pointwise<T>(sizes[5]), {p, sizes[6]}}.forward(result, threads);
}

extern "C" void bridge_backward(const int64_t* sizes, double p, const T* h, const T* b, const T* bias, const T* h_gate,
                                const T* b_gate, const T* bias_gate, const T* a, const T* grad, T* dh, T* db, T* dbias,
                                T* dh_gate, T* db_gate, T* dbias_gate, T* da, int64_t threads) {
  const comera::Side<T> value{h, {b, bias, sizes[2], sizes[1]}, dh, db, dbias};
  const comera::Side<T> gate{h_gate, {b_gate, bias_gate, sizes[3], sizes[1]}, dh_gate, db_gate, dbias_gate};
  const comera::Half<T> half{a, nullptr, sizes[4], sizes[1]};
  comera::Bridge<T>{sizes[0], value, gate, half, comera::pointwise<T>(sizes[5]), {p, sizes[6]}}
      .backward(grad, da, threads);
}

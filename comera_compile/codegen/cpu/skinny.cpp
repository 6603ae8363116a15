// Products of many rows with a thin matrix [bond, size], as a merged tensor-train half is one, and all their gradients.
//
//   narrow:    h = x A^T            [rows, bond]  from x [rows, size]
//   wide:      y = h B + bias       [rows, size]  from h [rows, bond]
//   backward:  of y = (x A^T) B + bias: every tensor of `rows` rows is read or written once. Also of each alone.
//
// A library packs and tiles for large square products; here one side of the tile is the bond. Operands of the tiles are
// packed contiguous: rows of a [bond, size] matrix are a power of two or a multiple of 3 KiB apart, which in the first
// cache is the same few places for all of them. The bias is one more row of B, and its h is 1.
//
// Forward, threads share the rows. Backward, they share the columns: then each gradient of a half belongs to one thread,
// and only the sum over columns in dh = dy B^T is put together from as many parts as there are threads, in order.

namespace comera {

template <class T>
void narrow(int64_t rows, const T* x, const Half<T>& a, T* h, int64_t most) {
  const int64_t width = padded(a.bond, WIDTH<T>);
  most = std::min(most, ceil_div(rows, 6));
  const auto packed = room<T>(a.size * width);
  each_thread(most, [&](int64_t me, int64_t threads, auto meet) {
    const Share columns(a.size, 16, me, threads), mine(rows, 6, me, threads);
    pack_transposed(a, columns.first, columns.last - columns.first, width, packed.get() + columns.first * width);
    meet();
    const auto spare = room<T>(BLOCK * width);
    for (int64_t i = mine.first; i < mine.last; i += BLOCK) {
      const int64_t some = std::min(BLOCK, mine.last - i);
      T* made = width == a.bond ? h + i * width : spare.get();
      narrow_tiles(some, a.size, x + i * a.size, a.size, packed.get(), width, made, false);
      for (int64_t k = 0; width != a.bond && k < some; ++k)
        std::copy_n(made + k * width, a.bond, h + (i + k) * a.bond);
    }
  });
}

template <class T>
void wide(int64_t rows, const T* h, const Half<T>& b, T* y, int64_t most) {
  const int64_t panels = ceil_div(b.size, PANEL<T>), terms = b.terms(), step = terms * PANEL<T>;
  most = std::min(most, ceil_div(rows, 6));
  const auto packed = room<T>(panels * step);
  each_thread(most, [&](int64_t me, int64_t threads, auto meet) {
    const Share share(panels, 1, me, threads), mine(rows, 6, me, threads);
    for (int64_t p = share.first; p < share.last; ++p) pack_panel(b, p, packed.get() + p * step);
    meet();
    const auto left = room<T>(BLOCK * terms), spare = room<T>(BLOCK * PANEL<T>);
    for (int64_t i = mine.first; i < mine.last; i += BLOCK) {
      const int64_t some = std::min(BLOCK, mine.last - i);
      take_rows(h + i * b.bond, some, b.bond, terms, left.get());
      for (int64_t p = 0; p < panels; ++p)
        wide_tiles(some, terms, left.get(), terms, packed.get() + p * step, y + i * b.size + p * PANEL<T>, b.size,
                   b.size - p * PANEL<T>, spare.get());
    }
  });
}

// The way back through y = h B + bias. There may be no bias, then dbias is null.
template <class T>
struct Outer {
  int64_t rows;
  const T *h, *dy;
  Half<T> b;
  T *db, *dbias;

  int64_t width() const { return padded(b.bond, WIDTH<T>); }

  // This thread's columns of dy: gradients of B and the bias, and this part of dh, in rows of `width`.
  void run(const Share& share, T* dh) const {
    if (share.first == share.last) {
      std::fill_n(dh, rows * width(), T(0));
      return;
    }
    Columns<T> made(share, b.bond + (dbias != nullptr));
    const int64_t count = made.padded();
    const auto packed = room<T>(count * width()), part = room<T>(BLOCK * CHUNK<T>), left = room<T>(BLOCK * made.terms);
    std::fill_n(packed.get(), count * width(), T(0));
    pack_transposed(b, share.first, share.last - share.first, width(), packed.get());
    for (int64_t i = 0; i < rows; i += BLOCK) {
      const int64_t some = std::min(BLOCK, rows - i);
      take_rows(h + i * b.bond, some, b.bond, made.terms, left.get());
      for (int64_t c = share.first; c < share.last; c += CHUNK<T>) {
        const int64_t columns = made.width(c);
        copy_chunk(dy + i * b.size + c, b.size, some, std::min(CHUNK<T>, share.last - c), columns, part.get());
        narrow_tiles(some, columns, part.get(), columns, packed.get() + (c - share.first) * width(), width(),
                     dh + i * width(), c > share.first);
        made.add(c, some, left.get(), made.terms, part.get());
      }
    }
    for (int64_t k = 0; k < b.bond; ++k) made.hand_over(k, db + k * b.size);
    if (dbias != nullptr) made.hand_over(b.bond, dbias);
  }
};

// The way back through h = x A^T. dx may be null, and A with it.
template <class T>
struct Inner {
  int64_t rows;
  const T* x;
  Half<T> a;
  T *dx, *da;

  // This thread's columns of x: the gradient of A, and dx. dh is the sum of `count` parts in rows of `width`.
  void run(const Share& share, const T* parts, int64_t count, int64_t width) const {
    if (share.first == share.last) return;
    Columns<T> made(share, a.bond);
    const int64_t panels = made.padded() / PANEL<T>, step = a.bond * PANEL<T>, before = share.first / PANEL<T>;
    const auto packed = room<T>(dx == nullptr ? 0 : panels * step);
    for (int64_t p = 0; dx != nullptr && p < panels; ++p) pack_panel(a, before + p, packed.get() + p * step);
    const auto part = room<T>(BLOCK * CHUNK<T>), dh = room<T>(BLOCK * width), spare = room<T>(BLOCK * PANEL<T>);
    for (int64_t i = 0; i < rows; i += BLOCK) {
      const int64_t some = std::min(BLOCK, rows - i);
      std::copy_n(parts + i * width, some * width, dh.get());
      for (int64_t k = 1; k < count; ++k)
        for (int64_t j = 0; j < some * width; ++j) dh[j] += parts[(k * rows + i) * width + j];
      for (int64_t c = share.first; c < share.last; c += CHUNK<T>) {
        const int64_t columns = made.width(c);
        copy_chunk(x + i * a.size + c, a.size, some, std::min(CHUNK<T>, share.last - c), columns, part.get());
        made.add(c, some, dh.get(), width, part.get());
        for (int64_t j = c; dx != nullptr && j < std::min(c + CHUNK<T>, share.last); j += PANEL<T>)
          wide_tiles(some, a.bond, dh.get(), width, packed.get() + (j - share.first) / PANEL<T> * step,
                     dx + i * a.size + j, a.size, a.size - j, spare.get());
      }
    }
    for (int64_t k = 0; k < a.bond; ++k) made.hand_over(k, da + k * a.size);
  }
};

template <class T>
void wide_backward(const Outer<T>& outer, T* dh, int64_t most) {
  const int64_t rows = outer.rows, width = outer.width();
  most = useful_threads(most, outer.b.size, PANEL<T>);
  const auto parts = room<T>(most * rows * width);
  each_thread(most, [&](int64_t me, int64_t threads, auto meet) {
    outer.run(Share(outer.b.size, PANEL<T>, me, threads), parts.get() + me * rows * width);
    meet();
    sum_parts(parts.get(), threads, rows, width, outer.b.bond, Share(rows, 1, me, threads), dh);
  });
}

template <class T>
void narrow_backward(const Inner<T>& inner, const T* dh, int64_t most) {
  each_thread(useful_threads(most, inner.a.size, PANEL<T>), [&](int64_t me, int64_t threads, auto) {
    inner.run(Share(inner.a.size, PANEL<T>, me, threads), dh, 1, inner.a.bond);
  });
}

// Both at once: dh is put together as it is read.
template <class T>
void backward(const Outer<T>& outer, const Inner<T>& inner, int64_t most) {
  const int64_t part = outer.rows * outer.width();
  most = useful_threads(most, std::max(inner.a.size, outer.b.size), PANEL<T>);
  const auto dh = room<T>(most * part);
  each_thread(most, [&](int64_t me, int64_t threads, auto meet) {
    outer.run(Share(outer.b.size, PANEL<T>, me, threads), dh.get() + me * part);
    meet();
    inner.run(Share(inner.a.size, PANEL<T>, me, threads), dh.get(), threads, outer.width());
  });
}

}  // namespace comera

using T = ELEMENT;

extern "C" void narrow(int64_t rows, int64_t size, int64_t bond, const T* x, const T* a, T* h, int64_t threads) {
  comera::narrow<T>(rows, x, {a, nullptr, bond, size}, h, threads);
}

extern "C" void wide(int64_t rows, int64_t size, int64_t bond, const T* h, const T* b, const T* bias, T* y,
                     int64_t threads) {
  comera::wide<T>(rows, h, {b, bias, bond, size}, y, threads);
}

extern "C" void wide_backward(int64_t rows, int64_t size, int64_t bond, const T* h, const T* dy, const T* b, T* dh, T* db,
                              T* dbias, int64_t threads) {
  comera::wide_backward<T>({rows, h, dy, {b, nullptr, bond, size}, db, dbias}, dh, threads);
}

extern "C" void narrow_backward(int64_t rows, int64_t size, int64_t bond, const T* x, const T* dh, const T* a, T* dx,
                                T* da, int64_t threads) {
  comera::narrow_backward<T>({rows, x, {a, nullptr, bond, size}, dx, da}, dh, threads);
}

extern "C" void backward(int64_t rows, int64_t inputs, int64_t outputs, int64_t bond, const T* x, const T* h, const T* dy,
                         const T* a, const T* b, T* dx, T* da, T* db, T* dbias, int64_t threads) {
  comera::backward<T>({rows, h, dy, {b, nullptr, bond, outputs}, db, dbias},
                      {rows, x, {a, nullptr, bond, inputs}, dx, da}, threads);
}

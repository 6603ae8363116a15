// A whole tensor-train linear in one call each way, from its packed vector: merge.cpp, then skinny.cpp.
//
// kept holds the half that meets x, [bond, inputs], behind it the other, [bond, outputs], and behind that the bond of all
// rows, [rows, bond]. The plan's own order of the halves is the other way round where `swapped`.

namespace {

template <class T>
struct Linear {
  const int64_t *program, *tables, *strides;
  int64_t rows, inputs, outputs, bond, swapped, threads;

  // merge.cpp on one layer: halves are read or written, grads is null or takes the gradient of the packed vector.
  void merge(double scale, const T* packed, T* halves, T* grads) const {
    const auto scratch = comera::room<T>(strides[0]);
    T *first = halves, *second = halves + bond * inputs;
    T* buffers[] = {scratch.get(), swapped ? second : first, swapped ? first : second, grads};
    run<T>(program, tables, 1, buffers, strides, grads == nullptr ? 3 : 4, &packed, &scale, grads, threads);
  }

  void forward(double scale, const T* packed, const T* x, const T* bias, T* kept, T* y) const {
    T *second = kept + bond * inputs, *h = second + bond * outputs;
    merge(scale, packed, kept, nullptr);
    comera::narrow<T>(rows, x, {kept, nullptr, bond, inputs}, h, threads);
    comera::wide<T>(rows, h, {second, bias, bond, outputs}, y, threads);
  }

  void backward(double scale, const T* packed, const T* x, const T* kept, const T* dy, T* dx, T* dbias, T* grads) const {
    const T *second = kept + bond * inputs, *h = second + bond * outputs;
    const auto halves = comera::room<T>(bond * (inputs + outputs));
    comera::backward<T>({rows, h, dy, {second, nullptr, bond, outputs}, halves.get() + bond * inputs, dbias},
                        {rows, x, {kept, nullptr, bond, inputs}, dx, halves.get()}, threads);
    merge(scale, packed, halves.get(), grads);
  }
};

}  // namespace

extern "C" void linear_forward(const int64_t* program, const int64_t* tables, const int64_t* strides, int64_t rows,
                               int64_t inputs, int64_t outputs, int64_t bond, int64_t swapped, double scale,
                               const T* packed, const T* x, const T* bias, T* kept, T* y, int64_t threads) {
  const Linear<T> layer{program, tables, strides, rows, inputs, outputs, bond, swapped, threads};
  layer.forward(scale, packed, x, bias, kept, y);
}

// dx and dbias may be null.
extern "C" void linear_backward(const int64_t* program, const int64_t* tables, const int64_t* strides, int64_t rows,
                                int64_t inputs, int64_t outputs, int64_t bond, int64_t swapped, double scale,
                                const T* packed, const T* x, const T* kept, const T* dy, T* dx, T* dbias, T* grads,
                                int64_t threads) {
  const Linear<T> layer{program, tables, strides, rows, inputs, outputs, bond, swapped, threads};
  layer.backward(scale, packed, x, kept, dy, dx, dbias, grads);
}

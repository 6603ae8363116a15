// A whole tensor-train linear in one call each way, from its packed vector: merge.cpp, then skinny.cpp.
//
// halves holds the one that meets x, [bond, inputs], and behind it the other, [bond, outputs]. The plan's own order of
// them is the other way round where `swapped`.

namespace {

template <class T>
struct Linear {
  const int64_t *program, *tables, *strides;
  int64_t rows, inputs, outputs, bond, swapped;

  // merge.cpp on one layer: halves are read or written, grads is null or takes the gradient of the packed vector.
  void merge(double scale, const T* packed, T* halves, T* grads, int64_t threads) const {
    const auto scratch = comera::room<T>(strides[0]);
    T *first = halves, *second = halves + bond * inputs;
    T* buffers[] = {scratch.get(), swapped ? second : first, swapped ? first : second, grads};
    run<T>(program, tables, 1, buffers, strides, grads == nullptr ? 3 : 4, &packed, &scale, grads, threads);
  }
};

}  // namespace

// sizes: rows, inputs, outputs, bond, swapped.
extern "C" void linear_forward(const int64_t* program, const int64_t* tables, const int64_t* strides, const int64_t* sizes,
                               double scale, const T* packed, const T* x, const T* bias, T* halves, T* h, T* y,
                               int64_t threads) {
  const Linear<T> layer{program, tables, strides, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]};
  layer.merge(scale, packed, halves, nullptr, threads);
  comera::narrow<T>(layer.rows, x, {halves, nullptr, layer.bond, layer.inputs}, h, threads);
  comera::wide<T>(layer.rows, h, {halves + layer.bond * layer.inputs, bias, layer.bond, layer.outputs}, y, threads);
}

// dx and dbias may be null.
extern "C" void linear_backward(const int64_t* program, const int64_t* tables, const int64_t* strides, const int64_t* sizes,
                                double scale, const T* packed, const T* x, const T* halves, const T* h, const T* dy, T* dx,
                                T* dbias, T* dpacked, int64_t threads) {
  const Linear<T> layer{program, tables, strides, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]};
  const T* second = halves + layer.bond * layer.inputs;
  const auto gradients = comera::room<T>(layer.bond * (layer.inputs + layer.outputs));
  T *first_gradient = gradients.get(), *second_gradient = first_gradient + layer.bond * layer.inputs;
  comera::backward<T>({layer.rows, h, dy, {second, nullptr, layer.bond, layer.outputs}, second_gradient, dbias},
                      {layer.rows, x, {halves, nullptr, layer.bond, layer.inputs}, dx, first_gradient}, threads);
  layer.merge(scale, packed, gradients.get(), dpacked, threads);
}

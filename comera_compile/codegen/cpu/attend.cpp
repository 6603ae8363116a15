// The middle of a tensor-train attention block: from the bonds of q, k and v to the bond of the output projection.
//
//   result = concat_heads(softmax(scale q k^T + mask) v) first^T,   q = hq second_q + bias_q, and so on
//
// No tensor of full width is made, nor one of a head's width: products of two halves carry the rows from bond to bond
// (see Heads), and a bond is narrower than a head. A thread works on one head of one entry of the batch; the scores of
// one block of queries are all that it holds, whatever the number of queries. Rows of the bonds are read by many heads:
// their gradients, and the result, are summed by each thread and put together in the order of the threads, so the same
// number of threads gives the same bits.

namespace comera {

// sizes: batch, queries, keys, heads, kv_heads, dim, bonds of q, k, v and the result, causal, four strides of the mask,
// seed of dropout.
// tensors: hq, hk, hv, then half and bias of q, k and v, then first and mask.
template <class T>
Problem<T> read_problem(const int64_t* sizes, const T* const* tensors, double scale, double dropout) {
  Problem<T> p{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {},
               {dropout, sizes[15]}};
  p.q = {tensors[3], tensors[4], sizes[6], p.heads * p.dim};
  p.k = {tensors[5], tensors[6], sizes[7], p.kv_heads * p.dim};
  p.v = {tensors[7], tensors[8], sizes[8], p.kv_heads * p.dim};
  p.first = {tensors[9], nullptr, sizes[9], p.heads * p.dim};
  p.hq = tensors[0], p.hk = tensors[1], p.hv = tensors[2], p.mask = tensors[10];
  p.causal = sizes[10] != 0;
  std::copy_n(sizes + 11, 4, p.mask_stride);
  p.scale = T(scale);
  return p;
}

template <class T>
Gradients<T> read_gradients(T* const* to) {
  return {to[0], to[1], to[2], to[3], to[4], to[5], to[6], to[7], to[8], to[9]};
}

}  // namespace comera

using T = ELEMENT;

extern "C" void attend(const int64_t* sizes, double scale, double dropout, const T* const* tensors, T* result,
                       int64_t threads) {
  comera::attend(comera::read_problem<T>(sizes, tensors, scale, dropout), result, threads);
}

extern "C" void attend_backward(const int64_t* sizes, double scale, double dropout, const T* const* tensors,
                                const T* grad, T* const* gradients, int64_t threads) {
  comera::attend_backward(comera::read_problem<T>(sizes, tensors, scale, dropout), grad,
                          comera::read_gradients<T>(gradients), threads);
}

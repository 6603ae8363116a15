// Softmax down the columns of a block of scores: vectors lie across columns, so no sum or maximum crosses their lanes.
#ifndef COMERA_SOFTMAX_H
#define COMERA_SOFTMAX_H
#include <algorithm>
#include <cstdint>
#include <limits>

namespace comera {

// Rows that are added one to the next before their sum is added to that of all: weights whose sum is a little off shift
// all gradients of their scores alike.
constexpr int64_t CHAIN = 32;

// What exp is made of: x = n ln 2 + r, e^r by TERMS terms of its series, 2^n by the bits of the exponent. SHIFT leaves
// n in the last digits of a sum, LN2_HIGH is short, so that n * LN2_HIGH is exact. Below LOWEST the result is no
// longer a normal number, and 0 here.
template <class T>
struct Exponential;

template <>
struct Exponential<float> {
  using Whole = int32_t;
  static constexpr float SHIFT = 12582912.0f, LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f, LOWEST = -87.3f;
  static constexpr int TERMS = 7, BIAS = 127, DIGITS = 23;
};

template <>
struct Exponential<double> {
  using Whole = int64_t;
  static constexpr double SHIFT = 6755399441055744.0, LN2_HIGH = 6.93147180369123816490e-01,
                          LN2_LOW = 1.90821492927058770002e-10, LOWEST = -708.3;
  static constexpr int TERMS = 13, BIAS = 1023, DIGITS = 52;
};

// One over k!.
template <class T>
constexpr T inverse_factorial(int k) {
  double product = 1;
  for (int i = 2; i <= k; i++) product *= i;
  return T(1 / product);
}

// e^x for x <= 0, 2 units of the last digit off at most; NaN stays NaN.
template <class T, int W>
inline typename Vector<T, W>::type exp_vector(typename Vector<T, W>::type x) {
  using V = typename Vector<T, W>::type;
  using E = Exponential<T>;
  using Bits = typename Vector<typename E::Whole, W>::type;
  constexpr T LOG2_E = T(1.44269504088896340736);
  const V shifted = x * LOG2_E + E::SHIFT, n = shifted - E::SHIFT;
  const V r = (x - n * E::LN2_HIGH) - n * E::LN2_LOW;
  V sum = r * inverse_factorial<T>(E::TERMS) + inverse_factorial<T>(E::TERMS - 1);
#pragma GCC unroll 16
  for (int k = E::TERMS - 2; k >= 0; k--) sum = sum * r + inverse_factorial<T>(k);
  const V power = (V)(((Bits)shifted + E::BIAS) << E::DIGITS);
  return x < E::LOWEST ? V{} : sum * power;
}

// P vectors of columns side by side; see exp_columns.
template <class T, int P>
void exp_strip(int64_t rows, T* scores, int64_t row, T* inverse) {
  constexpr int W = WIDTH<T>;
  using V = typename Vector<T, W>::type;
  using Stored = typename Vector<T, W>::stored;
  const V lowest = V{} - std::numeric_limits<T>::infinity();
  V largest[P], sum[P] = {};
  for (int p = 0; p < P; p++) largest[p] = lowest;
  for (int64_t i = 0; i < rows; i++)
    for (int p = 0; p < P; p++) {
      const V score = *(const Stored*)(scores + i * row + p * W);
      largest[p] = score > largest[p] ? score : largest[p];
    }
  // with nothing but -inf, or NaN, in a column: -inf - 0 gives 0, NaN stays NaN
  for (int p = 0; p < P; p++) largest[p] = largest[p] == lowest ? V{} : largest[p];
  for (int64_t i = 0; i < rows; i += CHAIN) {
    V part[P] = {};
    for (int64_t k = i; k < std::min(i + CHAIN, rows); k++)
      for (int p = 0; p < P; p++) {
        Stored* const place = (Stored*)(scores + k * row + p * W);
        const V weight = exp_vector<T, W>(*place - largest[p]);
        *place = weight;
        part[p] += weight;
      }
    for (int p = 0; p < P; p++) sum[p] += part[p];
  }
  for (int p = 0; p < P; p++) *(Stored*)(inverse + p * W) = sum[p] == V{} ? V{} : T(1) / sum[p];
}

// scores[rows, columns] become exp(score - largest of its column), `inverse` one over the sums of the columns. A column
// of -inf becomes zeros, and so does its inverse. `columns` is a multiple of the vector width.
template <class T>
void exp_columns(int64_t rows, int64_t columns, T* scores, int64_t row, T* inverse) {
  constexpr int64_t W = WIDTH<T>;
  int64_t j = 0;
  for (; j + 2 * W <= columns; j += 2 * W) exp_strip<T, 2>(rows, scores + j, row, inverse + j);
  if (j < columns) exp_strip<T, 1>(rows, scores + j, row, inverse + j);
}

}  // namespace comera
#endif

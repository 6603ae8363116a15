// Activations and their derivatives, a vector at a time. NaN and infinity go where they go in torch's own functions.
#ifndef COMERA_POINTWISE_H
#define COMERA_POINTWISE_H
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace comera {

template <class T>
using Lanes = typename Vector<T, WIDTH<T>>::type;
template <class T>
using Integer = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
template <class T>
using Whole = typename Vector<Integer<T>, WIDTH<T>>::type;

template <class T, class F>
Lanes<T> each_lane(Lanes<T> x, const F& function) {
  for (int64_t i = 0; i < WIDTH<T>; ++i) x[i] = function(x[i]);
  return x;
}

template <class T>
Lanes<T> magnitude(Lanes<T> x) {
  return (Lanes<T>)((Whole<T>)x & std::numeric_limits<Integer<T>>::max());  // all bits but the sign
}

// 2^y for y <= 0, within 1e-7 of itself; 0 below 2^-126, where only denormal numbers are.
inline Lanes<float> falling_power(Lanes<float> y) {
  y = -127.f > y ? Lanes<float>{} - 127.f : y;  // in this order NaN stays
  // toward zero, so this is the whole number nearest to y
  const Whole<float> whole = __builtin_convertvector(y - 0.5f, Whole<float>);
  const Lanes<float> rest = y - __builtin_convertvector(whole, Lanes<float>);
  Lanes<float> power = 9.671874538e-3f + rest * 1.340724282e-3f;
  power = 5.550308409e-2f + rest * power;
  power = 2.402223464e-1f + rest * power;
  power = 6.931472149e-1f + rest * power;
  power = 1.f + rest * power;
  return power * (Lanes<float>)((whole + 127) << 23);
}

// e^(scale x), which is to be no more than 1.
inline Lanes<float> falling_exp(Lanes<float> x, double scale) {
  return falling_power(x * static_cast<float>(scale * 1.44269504088896340736));
}
inline Lanes<double> falling_exp(Lanes<double> x, double scale) {
  return each_lane<double>(x, [scale](double value) { return std::exp(scale * value); });
}

// erfc(a / sqrt 2) / 2 for a >= 0, of which e is e^(-a a / 2): how much of a normal distribution lies beyond a.
inline Lanes<float> normal_tail(Lanes<float> a, Lanes<float> e) {
  const Lanes<float> t = 1.f / (1.f + 0.278f * a);  // the polynomial is the minimax one for this 0.278, within 8e-9 / a
  Lanes<float> tail = 4.162593305e-1f + t * -1.099449543e-1f;
  tail = -2.766248908e-1f + t * tail;
  tail = 2.964243171e-1f + t * tail;
  tail = 5.675579622e-2f + t * tail;
  tail = 1.171303940e-1f + t * tail;
  return tail * t * e;
}
inline Lanes<double> normal_tail(Lanes<double> a, Lanes<double>) {
  return each_lane<double>(a, [](double value) { return 0.5 * std::erfc(value * 0.70710678118654752440); });
}

// The share of a normal distribution below u, and its density there.
template <class T>
struct Normal {
  Lanes<T> share, density;

  explicit Normal(Lanes<T> u) {
    const Lanes<T> e = falling_exp(u * u, -0.5), tail = normal_tail(magnitude<T>(u), e);
    share = u < T(0) ? tail : T(1) - tail;
    density = e * T(0.39894228040143267794);
  }
};

// 1 / (1 + e^-u), and 1 minus it: neither is made as a difference of near numbers.
template <class T>
struct Logistic {
  Lanes<T> value, rest;

  explicit Logistic(Lanes<T> u) {
    const Lanes<T> e = falling_exp(magnitude<T>(u), -1.0), most = T(1) / (T(1) + e), least = e * most;
    value = u < T(0) ? least : most;
    rest = u < T(0) ? most : least;
  }
};

// Each has at(u), and back(u, d, made): from d, the gradient of at(u), that of u; `made` becomes at(u).
struct None {
  template <class T>
  static Lanes<T> at(Lanes<T> u) {
    return u;
  }
  template <class T>
  static Lanes<T> back(Lanes<T> u, Lanes<T> d, Lanes<T>& made) {
    made = u;
    return d;
  }
};

struct Relu {
  template <class T>
  static Lanes<T> at(Lanes<T> u) {
    return u <= T(0) ? Lanes<T>{} : u;
  }
  template <class T>
  static Lanes<T> back(Lanes<T> u, Lanes<T> d, Lanes<T>& made) {
    made = at<T>(u);
    return u <= T(0) ? Lanes<T>{} : d;
  }
};

// u times the share of a normal distribution below u.
struct Gelu {
  template <class T>
  static Lanes<T> at(Lanes<T> u) {
    return u * Normal<T>(u).share;
  }
  template <class T>
  static Lanes<T> back(Lanes<T> u, Lanes<T> d, Lanes<T>& made) {
    const Normal<T> normal(u);
    made = u * normal.share;
    return d * (normal.share + u * normal.density);
  }
};

// The same with a logistic function in the place of the share.
struct GeluTanh {
  static constexpr double SCALE = 1.5957691216057307, CUBE = 0.044715;

  template <class T>
  static Lanes<T> at(Lanes<T> u) {
    return u * Logistic<T>(u * (T(SCALE) + T(SCALE * CUBE) * u * u)).value;
  }
  template <class T>
  static Lanes<T> back(Lanes<T> u, Lanes<T> d, Lanes<T>& made) {
    const Logistic<T> share(u * (T(SCALE) + T(SCALE * CUBE) * u * u));
    made = u * share.value;
    return d * (share.value + made * share.rest * (T(SCALE) + T(3 * SCALE * CUBE) * u * u));
  }
};

struct Silu {
  template <class T>
  static Lanes<T> at(Lanes<T> u) {
    return u * Logistic<T>(u).value;
  }
  template <class T>
  static Lanes<T> back(Lanes<T> u, Lanes<T> d, Lanes<T>& made) {
    const Logistic<T> share(u);
    made = u * share.value;
    return d * share.value * (T(1) + u * share.rest);
  }
};

struct Sigmoid {
  template <class T>
  static Lanes<T> at(Lanes<T> u) {
    return Logistic<T>(u).value;
  }
  template <class T>
  static Lanes<T> back(Lanes<T> u, Lanes<T> d, Lanes<T>& made) {
    const Logistic<T> share(u);
    made = share.value;
    return d * share.value * share.rest;
  }
};

struct Tanh {
  template <class T>
  static Lanes<T> at(Lanes<T> u) {
    const Logistic<T> share(u + u);
    return share.value - share.rest;
  }
  template <class T>
  static Lanes<T> back(Lanes<T> u, Lanes<T> d, Lanes<T>& made) {
    const Logistic<T> share(u + u);
    made = share.value - share.rest;
    return d * (T(4) * share.value * share.rest);
  }
};

// What is done to a block of `count` elements, a whole number of vectors. With a gate, u is what the activation is of and
// v what it is multiplied with. d is the gradient of the result.
template <class T>
struct Pointwise {
  void (*forward)(int64_t count, T* u);                     // u becomes the result
  void (*gated)(int64_t count, const T* u, T* v);           // v becomes the result
  void (*backward)(int64_t count, T* u, T* d);              // u becomes the result, d the gradient of u
  void (*gated_backward)(int64_t count, T* u, T* v, T* d);  // v becomes the result, u and d the gradients of u and v
};

template <class A, class T>
Pointwise<T> pointwise() {
  constexpr int64_t W = WIDTH<T>;
  using V = Lanes<T>;
  using Stored = typename Vector<T, WIDTH<T>>::stored;
  return {
      [](int64_t count, T* u) {
        for (int64_t i = 0; i < count; i += W) *(Stored*)(u + i) = A::template at<T>(*(Stored*)(u + i));
      },
      [](int64_t count, const T* u, T* v) {
        for (int64_t i = 0; i < count; i += W) *(Stored*)(v + i) *= A::template at<T>(*(const Stored*)(u + i));
      },
      [](int64_t count, T* u, T* d) {
        for (int64_t i = 0; i < count; i += W) {
          V made;
          *(Stored*)(d + i) = A::template back<T>(*(Stored*)(u + i), *(Stored*)(d + i), made);
          *(Stored*)(u + i) = made;
        }
      },
      [](int64_t count, T* u, T* v, T* d) {
        for (int64_t i = 0; i < count; i += W) {
          const V factor = *(Stored*)(v + i), grad = *(Stored*)(d + i);
          V made;
          *(Stored*)(u + i) = A::template back<T>(*(Stored*)(u + i), grad * factor, made);
          *(Stored*)(v + i) = made * factor;
          *(Stored*)(d + i) = made * grad;
        }
      },
  };
}

// In the order of ACTIVATIONS in bridge_kernels.py.
template <class T>
Pointwise<T> pointwise(int64_t activation) {
  switch (activation) {
    case 1: return pointwise<Relu, T>();
    case 2: return pointwise<Gelu, T>();
    case 3: return pointwise<GeluTanh, T>();
    case 4: return pointwise<Silu, T>();
    case 5: return pointwise<Sigmoid, T>();
    case 6: return pointwise<Tanh, T>();
    default: return pointwise<None, T>();
  }
}

}  // namespace comera
#endif

// Activations of rows, alone or times a second half of the row, and the functions that they are made of.
//
// Intermediate results are rounded to the input's format where torch, which makes them one after the other, does so.
#pragma once

#include "functions.h"
#include "threads.h"

namespace octavo {

constexpr int64_t BLOCK = 1024;  // elements of a row that a thread takes at once

struct Relu {
  template <class T>
  static OCTAVO_INLINE_MEMBER Vector of(Vector x, const T*) {
    return x < 0.0f ? Vector{} : x;
  }
};

struct SquaredRelu {
  template <class T>
  static OCTAVO_INLINE_MEMBER Vector of(Vector x, const T* format) {
    const Vector positive = Relu::of(x, format);
    return positive * positive;
  }
};

struct Gelu {
  template <class T>
  static OCTAVO_INLINE_MEMBER Vector of(Vector x, const T*) {
    return x * 0.5f * (1.0f + error_function(x * 0.70710678f));
  }
};

struct GeluTanh {
  template <class T>
  static OCTAVO_INLINE_MEMBER Vector of(Vector x, const T*) {
    const Vector inner = 0.79788456f * fma(x * x * x, all(0.044715f), x);
    return 0.5f * x * (1.0f + hyperbolic_tangent(inner));
  }
};

struct QuickGelu {
  template <class T>
  static OCTAVO_INLINE_MEMBER Vector of(Vector x, const T* format) {
    return x * rounded(logistic(rounded(1.702f * x, format)), format);
  }
};

struct Silu {
  template <class T>
  static OCTAVO_INLINE_MEMBER Vector of(Vector x, const T*) {
    return x / (1.0f + exponential(-x));
  }
};

struct Tanh {
  template <class T>
  static OCTAVO_INLINE_MEMBER Vector of(Vector x, const T*) {
    return hyperbolic_tangent(x);
  }
};

// What the tests measure.
struct Exponential {
  template <class T>
  static OCTAVO_INLINE_MEMBER Vector of(Vector x, const T*) {
    return exponential(x);
  }
};

struct Logistic {
  template <class T>
  static OCTAVO_INLINE_MEMBER Vector of(Vector x, const T*) {
    return logistic(x);
  }
};

struct Erf {
  template <class T>
  static OCTAVO_INLINE_MEMBER Vector of(Vector x, const T*) {
    return error_function(x);
  }
};

template <class T>
struct ActivationRows {
  const T* x;     // rows of `width` elements, or of twice as many: those of the gate first
  const T* bias;  // added to a row of x; null for nothing
  T* out;         // side by side
  int64_t rows, width, x_stride, gated;

  OCTAVO_INLINE_MEMBER int64_t blocks() const { return (width + BLOCK - 1) / BLOCK; }
  OCTAVO_INLINE_MEMBER bool worth_sharing() const { return rows * blocks() > 1 && rows * width >= WORTH_SHARING / 2; }
};

template <class Function, class T>
OCTAVO_INLINE void walk(const ActivationRows<T>& a, int thread, int threads) {
  const int64_t blocks = a.blocks();
  const Share own = share(a.rows * blocks, thread, threads);
  for (int64_t piece = own.first; piece < own.last; ++piece) {
    const int64_t row = piece / blocks, first = piece % blocks * BLOCK;
    const int64_t size = smaller(BLOCK, a.width - first);
    const T* gate = a.x + row * a.x_stride + first;
    const T* up = gate + a.width;
    const T* bias = a.bias ? a.bias + first : nullptr;
    T* out = a.out + row * a.width + first;
    each(size, [&](auto v) {
      Vector value = v.read(gate);
      if (bias) value = rounded(value + v.read(bias), gate);
      value = Function::of(value, gate);
      if (a.gated) {
        Vector factor = v.read(up);
        if (bias) factor = rounded(factor + v.read(bias + a.width), gate);
        value = rounded(value, gate) * factor;
      }
      v.write(out, value);
    });
  }
}

// Calls work(function), whose `of` is the function of a number: those of activations.py.
template <class Work>
OCTAVO_INLINE void with_function(int64_t function, const Work& work) {
  switch (function) {
    case 0: return work(Relu{});
    case 1: return work(SquaredRelu{});
    case 2: return work(Gelu{});
    case 3: return work(GeluTanh{});
    case 4: return work(QuickGelu{});
    case 5: return work(Silu{});
    case 6: return work(Tanh{});
    case 7: return work(Exponential{});
    case 8: return work(Logistic{});
    case 9: return work(Erf{});
  }
}

template <class T>
static void activate_part(const ActivationRows<T>& a, int64_t function, int thread, int threads) {
  with_function(function, [&](auto named) { walk<decltype(named)>(a, thread, threads); });
}

}  // namespace octavo

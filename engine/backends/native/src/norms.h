// RMSNorm and LayerNorm of rows, alone or of the sum of two.
#pragma once

#include "threads.h"
#include "vector.h"

namespace octavo {

// Where the product with the weight happens.
enum Product : int64_t {
  ROUNDED = 0,  // after the norm was rounded to the input's format
  EXACT = 1,    // in float32
  OFFSET = 2,   // in float32, with 1 + weight
};

template <class T>
struct NormRows {
  const T* x;         // outer * inner rows of `size` elements
  const T* residual;  // side by side, added to x; null for nothing
  T* sum;             // side by side, x + residual if there is one; may be x
  const T* weight;    // null for ones; of LayerNorm one for each of `weights` rows, which take turns
  const T* bias;      // null for zeros; likewise
  T* out;             // rows of its own strides; may be x
  int64_t outer, inner, size, outer_stride, inner_stride, out_outer_stride, out_inner_stride;
  float eps;
  int64_t product, weights;

  OCTAVO_INLINE_MEMBER int64_t count() const { return outer * inner; }
  OCTAVO_INLINE_MEMBER T* result(int64_t row) const {
    return out + row / inner * out_outer_stride + row % inner * out_inner_stride;
  }
  OCTAVO_INLINE_MEMBER const T* own(const T* parameter, int64_t row) const {
    return parameter ? parameter + row % weights * size : nullptr;
  }
  OCTAVO_INLINE_MEMBER bool worth_sharing() const { return count() > 1 && count() * size >= WORTH_SHARING; }
};

// The row that is normed: x, or the sum, which is written first.
template <class T>
OCTAVO_INLINE const T* begin(const NormRows<T>& a, int64_t row) {
  const T* x = a.x + row / a.inner * a.outer_stride + row % a.inner * a.inner_stride;
  if (!a.residual) return x;
  const T* residual = a.residual + row * a.size;
  T* sum = a.sum + row * a.size;
  each(a.size, [&](auto v) { v.write(sum, v.read(x) + v.read(residual)); });
  return sum;
}

template <class T>
static void rms_norm_part(const NormRows<T>& a, int thread, int threads) {
  const Share own = share(a.count(), thread, threads);
  for (int64_t row = own.first; row < own.last; ++row) {
    const T* x = begin(a, row);
    T* out = a.result(row);
    const float squares = total(a.size, [&](auto v, Vector before) {
      const Vector value = v.read(x);
      return fma(value, value, before);
    });
    const Vector scale = all(1.0f / __builtin_sqrtf(squares / static_cast<float>(a.size) + a.eps));
    if (!a.weight) {
      each(a.size, [&](auto v) { v.write(out, v.read(x) * scale); });
    } else if (a.product == ROUNDED) {
      each(a.size, [&](auto v) { v.write(out, rounded(v.read(x) * scale, x) * v.read(a.weight)); });
    } else if (a.product == EXACT) {
      each(a.size, [&](auto v) { v.write(out, v.read(x) * scale * v.read(a.weight)); });
    } else {
      each(a.size, [&](auto v) { v.write(out, v.read(x) * scale * (v.read(a.weight) + 1.0f)); });
    }
  }
}

template <class T>
static void layer_norm_part(const NormRows<T>& a, int thread, int threads) {
  const Share own = share(a.count(), thread, threads);
  for (int64_t row = own.first; row < own.last; ++row) {
    const T* x = begin(a, row);
    T* out = a.result(row);
    const float mean =
        total(a.size, [&](auto v, Vector before) { return before + v.read(x); }) / static_cast<float>(a.size);
    const float squares = total(a.size, [&](auto v, Vector before) {
      const Vector distance = v.kept(v.read(x) - mean);
      return fma(distance, distance, before);
    });
    const Vector scale = all(1.0f / __builtin_sqrtf(squares / static_cast<float>(a.size) + a.eps));
    const T* weight = a.own(a.weight, row);
    const T* bias = a.own(a.bias, row);
    each(a.size, [&](auto v) {
      Vector value = (v.read(x) - mean) * scale;
      if (weight) value *= v.read(weight);
      if (bias) value += v.read(bias);
      v.write(out, value);
    });
  }
}

}  // namespace octavo

// Rows of activations as int8, each with a scale of its own, for products with int8 weights.
#pragma once

#include "threads.h"
#include "vector.h"

namespace octavo {

template <class T>
struct QuantiseRows {
  const T* x;
  uint8_t* steps;  // rows of `steps_stride`, what is behind `size` of it becomes 0 (that is, `offset`)
  float* scales;   // one a row
  int32_t* sums;   // of a row's steps without the offset; null where nobody asks
  int64_t rows, size, x_stride, steps_stride, offset;

  OCTAVO_INLINE_MEMBER bool worth_sharing() const { return rows > 1 && rows * size >= WORTH_SHARING; }
};

// x becomes round(x * 127 / largest), halves to even, so that x = step * scale within half a scale, scale being
// largest / 127. A row that is not finite everywhere has steps of 0 and a scale of NaN; one below 2^-100 everywhere,
// which no product would notice, is 0.
template <class T>
static void quantise_part(const QuantiseRows<T>& a, int thread, int threads) {
  const Share own = share(a.rows, thread, threads);
  for (int64_t row = own.first; row < own.last; ++row) {
    const T* x = a.x + row * a.x_stride;
    uint8_t* steps = a.steps + row * a.steps_stride;
    Vector top{};
    Vector odd{};  // 0 as long as all is finite
    each(a.size, [&](auto v) {
      const Vector value = v.read(x);
      top = maximum(magnitude(value), top);
      odd += value * 0.0f;
    });
    const float most = largest(top), finite = sum(odd);
    const bool nothing = !(most >= 0x1p-100f) || finite != 0.0f;
    const float factor = nothing ? 0.0f : 127.0f / most;
    a.scales[row] = finite != finite ? finite : nothing ? 0.0f : most / 127.0f;
    Integers counted{};
    each(a.size, [&](auto v) {
      constexpr float SHIFT = 12582912.0f;  // 1.5 * 2^23
      const Vector shifted = (nothing || finite != finite ? Vector{} : v.read(x) * factor) + SHIFT;
      const Integers step = (Integers)shifted - 0x4b400000;
      counted += step;
      v.write(steps, step + static_cast<int32_t>(a.offset));
    });
    for (int64_t i = a.size; i < a.steps_stride; ++i) steps[i] = static_cast<uint8_t>(a.offset);
    if (a.sums) {
      int32_t total = 0;
      for (int64_t i = 0; i < WIDTH; ++i) total += counted[i];
      a.sums[row] = total;
    }
  }
}

}  // namespace octavo

// How pages hold a key or a value: as engine/backends/attention/formats.py says, bit for bit.
#pragma once

#include "half.h"

namespace octavo {

// The numbers are those of pages.py.
enum PageFormat : int64_t { PAGE_F32 = 0, PAGE_BF16 = 1, PAGE_F16 = 2, PAGE_INT8 = 3 };

// 16-bit floating point: infinity, which may be a number that does not fit, becomes NaN.
OCTAVO_INLINE uint16_t without_infinity(uint16_t bits, uint16_t infinity) {
  return (bits & 0x7fff) == infinity ? static_cast<uint16_t>(infinity | infinity >> 1) : bits;
}

OCTAVO_INLINE bfloat16 as_bfloat16(float value) {
  bfloat16 out;
  store_part(&out, all(value), 1);
  return out;
}

// One vector of `size` numbers, symmetric with a scale in bfloat16. One that is not finite everywhere gets steps of
// which 0 times the scale is NaN.
OCTAVO_INLINE void quantise_vector(const float* from, int64_t size, int8_t* steps, bfloat16* scale) {
  Vector top{}, odd{};
  each(size, [&](auto v) {
    const Vector value = v.read(from);
    top = maximum(magnitude(value), top);
    odd += value == value ? Vector{} : value;
  });
  const float undefined = sum(odd);
  const float most = undefined != undefined ? undefined : largest(top);
  const float exact = most / 127.0f;
  *scale = as_bfloat16(exact < 0x1p-126f ? 0x1p-126f : exact);
  const uint32_t bits = static_cast<uint32_t>(scale->bits) << 16;
  float divisor;
  __builtin_memcpy(&divisor, &bits, sizeof divisor);
  each(size, [&](auto v) {
    constexpr float SHIFT = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to an integer
    const Vector quotient = v.read(from) / divisor;
    const Vector shifted = (quotient == quotient ? quotient : Vector{}) + SHIFT;
    v.write(reinterpret_cast<uint8_t*>(steps), (Integers)shifted - 0x4b400000);
  });
}

// Numbers that were in format T, to where element `at` of a page's tensor is. `same`: T is the page's format.
OCTAVO_INLINE void write_vector(const float* from, int64_t size, void* page, int64_t at, int64_t format, bool same) {
  switch (format) {
    case PAGE_F32: {
      float* to = static_cast<float*>(page) + at;
      const Vector nan = all(__builtin_nanf(""));
      each(size, [&](auto v) {
        const Vector value = v.read(from);
        v.write(to, same || magnitude(value) < __builtin_inff() ? value : nan);
      });
      return;
    }
    case PAGE_BF16: {
      bfloat16* to = static_cast<bfloat16*>(page) + at;
      each(size, [&](auto v) { v.write(to, v.read(from)); });
      if (!same)
        for (int64_t i = 0; i < size; ++i) to[i].bits = without_infinity(to[i].bits, 0x7f80);
      return;
    }
    case PAGE_F16: {
      uint16_t* to = static_cast<uint16_t*>(page) + at;
      for (int64_t i = 0; i < size; ++i) to[i] = without_infinity(half_bits(from[i]), 0x7c00);
      return;
    }
  }
}

}  // namespace octavo

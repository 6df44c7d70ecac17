// Rows of activations in pairs of bfloat16, and products of pairs.
#pragma once

#include "gemm.h"

namespace octavo::gemm {

// acc + the products of pairs of bfloat16, the even one in the lower half.
OCTAVO_INLINE Vector pairs(Vector acc, Integers weights, uint32_t x) {
#if defined(__AVX512BF16__)
  return (Vector)_mm512_dpbf16_ps((__m512)acc, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(static_cast<int>(x)));
#else
  const Integers value = static_cast<int32_t>(x) - Integers{};
  const Integers upper = Integers{} + static_cast<int32_t>(0xffff0000);
  acc = fma((Vector)(weights << 16), (Vector)(value << 16), acc);
  return fma((Vector)(weights & upper), (Vector)(value & upper), acc);
#endif
}

OCTAVO_INLINE void copy_rounded(const bfloat16* x, int64_t size, bfloat16* to) {
  __builtin_memcpy(to, x, static_cast<size_t>(size) * sizeof *to);
}

OCTAVO_INLINE void copy_rounded(const float* x, int64_t size, bfloat16* to) {
  each(size, [&](auto place) { place.write(to, place.read(x)); });
}

// x as [inputs / 2][rows][2]; an odd input's partner is 0.
template <class T>
OCTAVO_INLINE void prepare_pairs(const T* x, int64_t stride, int64_t rows, int64_t inputs, char* to) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == sizeof(bfloat16))
    if (rows >= WIDE && inputs % 2 == 0) {  // units as they lie
      uint32_t* units = reinterpret_cast<uint32_t*>(to);
      return interleave_wide(x, 2 * stride, inputs / 2, rows, units, units + inputs / 2 * rows);
    }
#endif
  lay_out(rows, (inputs + 1) / 2, reinterpret_cast<uint32_t*>(to),
          [&](int64_t row, int64_t first, int64_t count, uint32_t* units) {
            const int64_t size = smaller(2 * count, inputs - 2 * first);
            bfloat16* halves = reinterpret_cast<bfloat16*>(units);
            copy_rounded(x + row * stride + 2 * first, size, halves);
            if (size % 2) halves[size].bits = 0;
          });
}

}  // namespace octavo::gemm

// Groups of numbers multiplied by a Hadamard matrix, of which each element is 1 or -1: a number that is much larger than its
// neighbours is shared out among them, so that fewer of a group's few steps are spent on it. The matrix times itself is the
// group's size, so that two rotated vectors have the product of the plain ones, that many times.
//
// Ashkboos et al.: QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs, 2024; here within the groups that have a scale.
#pragma once

#include "vector.h"

namespace octavo {

// Element i and element i ^ STEP change places.
template <int64_t STEP>
OCTAVO_INLINE Vector swapped(Vector v) {
#if defined(__AVX512F__)
  if constexpr (STEP == 8) return _mm512_shuffle_f32x4(v, v, 0b01'00'11'10);
  if constexpr (STEP == 4) return _mm512_shuffle_f32x4(v, v, 0b10'11'00'01);
  if constexpr (STEP == 2) return _mm512_permute_ps(v, 0b01'00'11'10);
  if constexpr (STEP == 1) return _mm512_permute_ps(v, 0b10'11'00'01);
#elif defined(__AVX2__)
  if constexpr (STEP == 4) return _mm256_permute2f128_ps(v, v, 1);
  if constexpr (STEP == 2) return _mm256_permute_ps(v, 0b01'00'11'10);
  if constexpr (STEP == 1) return _mm256_permute_ps(v, 0b10'11'00'01);
#elif defined(OCTAVO_NEON)
  if constexpr (STEP == 2) return (Vector)vextq_f32((float32x4_t)v, (float32x4_t)v, 2);
  if constexpr (STEP == 1) return (Vector)vrev64q_f32((float32x4_t)v);
#else
  Vector other;
  for (int64_t i = 0; i < WIDTH; ++i) other[i] = v[i ^ STEP];
  return other;
#endif
}

// Sums of elements STEP apart in the first one's place, differences in the second's.
template <int64_t STEP>
OCTAVO_INLINE Vector added(Vector v) {
  Words signs;
  for (int64_t i = 0; i < WIDTH; ++i) signs[i] = i & STEP ? 0x80000000u : 0;
  return swapped<STEP>(v) + (Vector)((Words)v ^ signs);
}

template <int64_t STEP, int64_t COUNT>
OCTAVO_INLINE void rotate_from(Vector (&v)[COUNT]) {
  if constexpr (STEP >= WIDTH) {
    for (int64_t i = 0; i < COUNT; ++i)
      if (!(i & (STEP / WIDTH))) {
        const Vector first = v[i], second = v[i + STEP / WIDTH];
        v[i] = first + second;
        v[i + STEP / WIDTH] = first - second;
      }
  } else {
    for (int64_t i = 0; i < COUNT; ++i) v[i] = added<STEP>(v[i]);
  }
  if constexpr (STEP > 1) rotate_from<STEP / 2>(v);
}

// `size` numbers of a group of GROUP, times `factor`, rotated; what is missing is 0.
template <int64_t GROUP, class T>
OCTAVO_INLINE void rotate(const T* x, int64_t size, float factor, float* to) {
  Vector v[GROUP / WIDTH] = {};
  each(size, [&](auto place) { v[place.at / WIDTH] = place.read(x) * all(factor); });
  rotate_from<GROUP / 2>(v);
  for (int64_t i = 0; i < GROUP / WIDTH; ++i) store(to + i * WIDTH, v[i]);
}

}  // namespace octavo

// A square of vectors, turned: v[i][j] and v[j][i] change places.
#pragma once

#include "vector.h"

namespace octavo {

#if defined(__AVX512F__)

OCTAVO_INLINE void transpose(Vector (&v)[WIDTH]) {
  __m512 a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_ps(v[i], v[i + 1]);
    a[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      b[i + 2 * j] = (__m512)_mm512_unpacklo_pd((__m512d)a[i + j], (__m512d)a[i + j + 2]);
      b[i + 2 * j + 1] = (__m512)_mm512_unpackhi_pd((__m512d)a[i + j], (__m512d)a[i + j + 2]);
    }
  }
  // b[4 i + j] holds column 4 lane + j of rows 4 i to 4 i + 3.
  for (int j = 0; j < 4; ++j) {
    const __m512 low_even = _mm512_shuffle_f32x4(b[j], b[4 + j], 0x88);
    const __m512 low_odd = _mm512_shuffle_f32x4(b[j], b[4 + j], 0xdd);
    const __m512 high_even = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0x88);
    const __m512 high_odd = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0xdd);
    v[j] = _mm512_shuffle_f32x4(low_even, high_even, 0x88);
    v[4 + j] = _mm512_shuffle_f32x4(low_odd, high_odd, 0x88);
    v[8 + j] = _mm512_shuffle_f32x4(low_even, high_even, 0xdd);
    v[12 + j] = _mm512_shuffle_f32x4(low_odd, high_odd, 0xdd);
  }
}

#elif defined(__AVX2__)

OCTAVO_INLINE void transpose(Vector (&v)[WIDTH]) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps(v[i], v[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int j = 0; j < 2; ++j) {
      b[i + 2 * j] = (__m256)_mm256_unpacklo_pd((__m256d)a[i + j], (__m256d)a[i + j + 2]);
      b[i + 2 * j + 1] = (__m256)_mm256_unpackhi_pd((__m256d)a[i + j], (__m256d)a[i + j + 2]);
    }
  }
  for (int j = 0; j < 4; ++j) {
    v[j] = _mm256_permute2f128_ps(b[j], b[4 + j], 0x20);
    v[4 + j] = _mm256_permute2f128_ps(b[j], b[4 + j], 0x31);
  }
}

#elif defined(OCTAVO_NEON)

OCTAVO_INLINE void transpose(Vector (&v)[WIDTH]) {
  const auto even = [](Vector a, Vector b) { return (float64x2_t)vtrn1q_f32((float32x4_t)a, (float32x4_t)b); };
  const auto odd = [](Vector a, Vector b) { return (float64x2_t)vtrn2q_f32((float32x4_t)a, (float32x4_t)b); };
  const float64x2_t a = even(v[0], v[1]), b = odd(v[0], v[1]), c = even(v[2], v[3]), d = odd(v[2], v[3]);
  v[0] = (Vector)vtrn1q_f64(a, c);
  v[1] = (Vector)vtrn1q_f64(b, d);
  v[2] = (Vector)vtrn2q_f64(a, c);
  v[3] = (Vector)vtrn2q_f64(b, d);
}

#else

OCTAVO_INLINE void transpose(Vector (&v)[WIDTH]) {
  for (int64_t i = 0; i < WIDTH; ++i)
    for (int64_t j = 0; j < i; ++j) {
      const float below = v[i][j];
      v[i][j] = v[j][i];
      v[j][i] = below;
    }
}

#endif

}  // namespace octavo

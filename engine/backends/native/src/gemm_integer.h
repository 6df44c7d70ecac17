// What the products of integers share: rows of activations as int8 with a scale, and dot products of four of them.
#pragma once

#include "gemm.h"
#include "gemm_sums.h"

namespace octavo::gemm {

// Weights of int8 are stored with OFFSET added where the processor multiplies unsigned by signed bytes.
#if defined(__AVX512VNNI__)
constexpr int32_t OFFSET = 128;
#else
constexpr int32_t OFFSET = 0;
#endif
constexpr uint32_t FLIPPED = OFFSET ? 0x80808080u : 0;  // adds OFFSET to each byte of a word

OCTAVO_INLINE Integers integers(int32_t value) { return value - Integers{}; }

#if defined(OCTAVO_NEON)
// acc + four products of signed bytes in each element. Exact: sums of two pairs stay within 16 bits.
OCTAVO_INLINE Integers dot_signed(Integers acc, Integers weights, int32_t x) {
  const int8x16_t w = (int8x16_t)weights, value = vreinterpretq_s8_s32(vdupq_n_s32(x));
#if defined(__ARM_FEATURE_DOTPROD)
  return (Integers)vdotq_s32((int32x4_t)acc, w, value);
#else
  const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(value)), high = vmull_high_s8(w, value);
  return (Integers)vpadalq_s16((int32x4_t)acc, vpaddq_s16(low, high));
#endif
}
#endif

// acc + four products in each element; weights are from 0 to 127. Exact.
OCTAVO_INLINE Integers dot_small(Integers acc, Integers weights, int32_t x) {
#if defined(__AVX512VNNI__)
  return (Integers)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)weights, _mm512_set1_epi32(x));
#elif defined(__AVX2__)
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32(x));
  return acc + (Integers)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(OCTAVO_NEON)
  return dot_signed(acc, weights, x);
#else
  const Integers value = integers(x);
  acc += (weights & 0xff) * (value << 24 >> 24);
  acc += (weights >> 8 & 0xff) * (value << 16 >> 24);
  acc += (weights >> 16 & 0xff) * (value << 8 >> 24);
  return acc + (weights >> 24 & 0xff) * (value >> 24);
#endif
}

// The same for weights of 8 bits, OFFSET added. Exact: nothing saturates, x being from -127 to 127.
OCTAVO_INLINE Integers dot_bytes(Integers acc, Integers weights, int32_t x) {
#if defined(__AVX512VNNI__)
  return (Integers)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)weights, _mm512_set1_epi32(x));
#elif defined(__AVX2__)
  const __m256i signed_weights = (__m256i)weights, value = _mm256_set1_epi32(x);
  const __m256i pairs =
      _mm256_maddubs_epi16(_mm256_abs_epi8(signed_weights), _mm256_sign_epi8(value, signed_weights));
  return acc + (Integers)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(OCTAVO_NEON)
  return dot_signed(acc, weights, x);
#else
  const Integers value = integers(x);
  acc += (weights << 24 >> 24) * (value << 24 >> 24);
  acc += (weights << 16 >> 24) * (value << 16 >> 24);
  acc += (weights << 8 >> 24) * (value << 8 >> 24);
  return acc + (weights >> 24) * (value >> 24);
#endif
}

// ---- activations

OCTAVO_INLINE int32_t sum_of(Integers v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#elif defined(__AVX2__)
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1)));
#elif defined(OCTAVO_NEON)
  return vaddvq_s32((int32x4_t)v);
#else
  return v[0] + v[1] + v[2] + v[3];
#endif
}

OCTAVO_INLINE int32_t largest_of(Integers v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)v);
#elif defined(__AVX2__)
  const __m128i four = _mm_max_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  const __m128i two = _mm_max_epi32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 1)));
#elif defined(OCTAVO_NEON)
  return vmaxvq_s32((int32x4_t)v);
#else
  return larger(larger(v[0], v[1]), larger(v[2], v[3]));
#endif
}

// The largest magnitude of part of a row; NaN or infinity if there is one, NaN before infinity.
template <class T>
OCTAVO_INLINE float peak(const T* x, int64_t size) {
  Integers most{};
  each(size, [&](auto place) {
    const Integers bits = (Integers)place.read(x) & 0x7fffffff;  // ordered as the numbers are
    most = bits > most ? bits : most;
  });
  const int32_t bits = largest_of(most);
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

// How a row, or a group of it, becomes integers: round(x * 127 / peak), halves to even. Its scale is peak / 127; NaN if it
// is not finite everywhere, which makes NaN of all that comes from it.
struct Steps {
  float reciprocal, scale;

  template <class T>
  OCTAVO_INLINE_MEMBER static Steps of(const T* x, int64_t size) {
    const float most = peak(x, size);
    if (!(most < __builtin_inff())) return {0, __builtin_nanf("")};
    if (most < 0x1p-100f) return {0, 0};  // no product would notice it
    return {127.0f / most, most / 127.0f};
  }

  // Counts steps of another scale, which is kept; 0 or NaN: nothing is counted.
  OCTAVO_INLINE_MEMBER void count(float kept) {
    if (reciprocal != 0) reciprocal = kept > 0 ? 1 / kept : 0;
  }

  // Writes integers from -127 to 127, and returns their sum. Where the scale is 0 or NaN they are 0.
  template <class T>
  OCTAVO_INLINE_MEMBER int32_t write(const T* x, int64_t size, int8_t* to) const {
    constexpr float SHIFT = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the last bits
    Integers sums{};
    each(size, [&](auto place) {
      const Vector shifted = (reciprocal == 0 ? Vector{} : place.read(x) * all(reciprocal)) + all(SHIFT);
      const Integers steps = (Integers)shifted - (Integers)all(SHIFT);
      sums += steps;
      place.write(reinterpret_cast<uint8_t*>(to), steps);
    });
    return sum_of(sums);
  }
};

}  // namespace octavo::gemm

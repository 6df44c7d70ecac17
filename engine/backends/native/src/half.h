// IEEE halves: how they become float32, and float32 becomes them.
#pragma once

#include "vector.h"

namespace octavo {

// Halves to even; infinity from 65520 on.
OCTAVO_INLINE uint16_t half_bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return 0x7e00;
  if (bits >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
  if (bits < 0x38800000) {  // subnormal: next to 0.5, a float32 has the same steps as they have
    const float near = __builtin_fabsf(value) + 0.5f;
    __builtin_memcpy(&bits, &near, sizeof bits);
    return static_cast<uint16_t>(sign | (bits - 0x3f000000));
  }
  return static_cast<uint16_t>(sign | ((bits + 0xfff + (bits >> 13 & 1) - 0x38000000) >> 13));
}

OCTAVO_INLINE float widened(float16 half) {
  const uint32_t sign = static_cast<uint32_t>(half.bits & 0x8000) << 16, rest = half.bits & 0x7fff;
  const uint32_t largest = rest >= 0x7c00 ? 0x70000000u : 0;  // infinite or not a number
  uint32_t bits = (rest << 13) + largest;
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  value *= 0x1p112f;  // the difference of the exponents' biases; subnormal numbers become normal
  if (largest) {
    bits = 0x7f800000u | rest << 13;
    __builtin_memcpy(&value, &bits, sizeof value);
  }
  __builtin_memcpy(&bits, &value, sizeof bits);
  bits |= sign;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

OCTAVO_INLINE Vector load(const float16* from) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(OCTAVO_NEON)
  uint64_t four;
  __builtin_memcpy(&four, from, sizeof four);
  return (Vector)vcvt_f32_f16(vreinterpret_f16_u64(vcreate_u64(four)));
#else
  Vector v;
  for (int64_t i = 0; i < WIDTH; ++i) v[i] = widened(from[i]);
  return v;
#endif
}

OCTAVO_INLINE Vector load_part(const float16* from, int64_t count) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << count) - 1), from));
#else
  float16 parts[WIDTH] = {};
  for (int64_t i = 0; i < count; ++i) parts[i] = from[i];
  return load(parts);
#endif
}

}  // namespace octavo

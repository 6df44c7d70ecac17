// What attention multiplies: units of 32 bits, and how they are read from what pages and queries hold.
//
// A unit is one float32 (`Single`), or two bfloat16 of neighbouring features or keys (`Pair`) where the processor
// multiplies those. Sums are float32 in both cases.
#pragma once

#include "pages.h"

namespace octavo {
namespace {

using Unit = uint32_t;

// ---- float32 from the formats that only attention reads; `count` elements of a vector, the others are 0

OCTAVO_INLINE float widened(bfloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float wide;
  __builtin_memcpy(&wide, &bits, sizeof wide);
  return wide;
}

OCTAVO_INLINE Vector read(const float* from, int64_t count) {
  return count >= WIDTH ? load(from) : load_part(from, count);
}

OCTAVO_INLINE Vector read(const bfloat16* from, int64_t count) {
  return count >= WIDTH ? load(from) : load_part(from, count);
}

OCTAVO_INLINE Vector read(const float16* from, int64_t count) {
  return count >= WIDTH ? load(from) : load_part(from, count);
}

OCTAVO_INLINE Vector read(const int8_t* from, int64_t count) {
#if defined(__AVX512F__)
  const auto mask = static_cast<__mmask16>(count >= WIDTH ? 0xffff : (1u << count) - 1);
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, from)));
#else
  typedef int8_t Bytes __attribute__((vector_size(WIDTH)));
  Bytes parts{};
  __builtin_memcpy(&parts, from, static_cast<size_t>(smaller(count, WIDTH)));
  return __builtin_convertvector(__builtin_convertvector(parts, Integers), Vector);
#endif
}

// ---- float32 to what queries come in

OCTAVO_INLINE void write(float* to, Vector v, int64_t count) {
  count >= WIDTH ? store(to, v) : store_part(to, v, count);
}

OCTAVO_INLINE void write(bfloat16* to, Vector v, int64_t count) {
  count >= WIDTH ? store(to, v) : store_part(to, v, count);
}

OCTAVO_INLINE void write(float16* to, Vector v, int64_t count) {
  float values[WIDTH];
  store(values, v);
  for (int64_t i = 0; i < smaller(count, WIDTH); ++i) to[i].bits = half_bits(values[i]);
}

// ---- units

// One float32 a unit.
struct Single {
  static constexpr int64_t HELD = 1;

  // WIDTH units of a vector from its element `at` on; those past its end are 0.
  template <class T>
  OCTAVO_INLINE Vector units(const T* vector, int64_t at, int64_t size) {
    return read(vector + at, size - at);
  }

  // acc + unit * b
  OCTAVO_INLINE Vector add(Vector acc, Unit unit, Vector b) {
    float value;
    __builtin_memcpy(&value, &unit, sizeof value);
    return fma(all(value), b, acc);
  }

  // Weights of two vectors of keys to memory.
  OCTAVO_INLINE void put(Unit* to, Vector first, Vector second) {
    store(reinterpret_cast<float*>(to), first);
    store(reinterpret_cast<float*>(to) + WIDTH, second);
  }

  // What was put, added to acc.
  OCTAVO_INLINE Vector add_all(Vector acc, Vector first, Vector second) { return acc + (first + second); }
};

#if defined(__AVX512BF16__)
#define OCTAVO_PAIRS  // the CPU multiplies pairs

// Two bfloat16 a unit.
struct Pair {
  static constexpr int64_t HELD = 2;

  OCTAVO_INLINE Vector units(const bfloat16* vector, int64_t at, int64_t size) {
    const int64_t left = size - at;
    if (left >= 2 * WIDTH) return (Vector)_mm512_loadu_si512(vector + at);
    return (Vector)_mm512_maskz_loadu_epi16(static_cast<__mmask32>((1u << left) - 1), vector + at);
  }

  // Whole numbers up to 127 are exact in bfloat16.
  OCTAVO_INLINE Vector units(const int8_t* vector, int64_t at, int64_t size) {
    const int64_t left = size - at;
    const Vector low = read(vector + at, left);
    const Vector high = left > WIDTH ? read(vector + at + WIDTH, left - WIDTH) : Vector{};
    return (Vector)_mm512_cvtne2ps_pbh(high, low);
  }

  OCTAVO_INLINE Vector add(Vector acc, Unit unit, Vector b) {
    return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_set1_epi32(static_cast<int>(unit)), (__m512bh)b);
  }

  OCTAVO_INLINE void put(Unit* to, Vector first, Vector second) {
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(second, first));
  }

  // The sum of the values, rounded to bfloat16.
  OCTAVO_INLINE Vector add_all(Vector acc, Vector first, Vector second) {
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    return _mm512_dpbf16_ps(acc, _mm512_cvtne2ps_pbh(second, first), ones);
  }
};

#elif defined(OCTAVO_NEON) && defined(__ARM_FEATURE_BF16)
#define OCTAVO_PAIRS

struct Pair {
  static constexpr int64_t HELD = 2;

  OCTAVO_INLINE Vector units(const bfloat16* vector, int64_t at, int64_t size) {
    Vector pairs{};
    const int64_t left = size - at;
    const int64_t some = smaller(left, 2 * WIDTH);
    __builtin_memcpy(&pairs, vector + at, static_cast<size_t>(some) * sizeof *vector);
    return pairs;
  }

  // Whole numbers up to 127 are exact in bfloat16.
  OCTAVO_INLINE Vector units(const int8_t* vector, int64_t at, int64_t size) {
    const int64_t left = size - at;
    return narrowed(read(vector + at, left), left > WIDTH ? read(vector + at + WIDTH, left - WIDTH) : Vector{});
  }

  OCTAVO_INLINE Vector add(Vector acc, Unit unit, Vector b) { return dot(acc, (Vector)vdupq_n_u32(unit), b); }

  OCTAVO_INLINE void put(Unit* to, Vector first, Vector second) {
    store(reinterpret_cast<float*>(to), narrowed(first, second));
  }

  // The sum of the values, rounded to bfloat16.
  OCTAVO_INLINE Vector add_all(Vector acc, Vector first, Vector second) {
    return dot(acc, narrowed(first, second), (Vector)vdupq_n_u16(0x3f80));
  }

 private:
  OCTAVO_INLINE Vector narrowed(Vector first, Vector second) {
    return (Vector)vcombine_u16((uint16x4_t)narrow(first), (uint16x4_t)narrow(second));
  }

  OCTAVO_INLINE Vector dot(Vector acc, Vector a, Vector b) {
    return (Vector)vbfdotq_f32((float32x4_t)acc, (bfloat16x8_t)a, (bfloat16x8_t)b);
  }
};

#endif

}  // namespace
}  // namespace octavo

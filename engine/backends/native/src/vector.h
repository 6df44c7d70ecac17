// Vectors of float32 as wide as the instruction set has them, in the vector extensions of GCC and Clang.
//
// A row is walked in full vectors and one part of a vector at its end, whose missing elements are 0: all elements pass
// through the same instructions, so that what becomes of one depends on its row alone.
#pragma once

#include "common.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__ARM_NEON) && !defined(OCTAVO_PORTABLE)
#define OCTAVO_NEON
#include <arm_neon.h>
#endif

namespace octavo {

#if defined(__AVX512F__) || defined(OCTAVO_NEON)
constexpr int REGISTERS = 32;  // that hold a vector: kernels keep as many sums as these have room for
#else
constexpr int REGISTERS = 16;
#endif

#if defined(__AVX512F__)
constexpr int64_t WIDTH = 16;
#elif defined(__AVX2__)
constexpr int64_t WIDTH = 8;
#else
constexpr int64_t WIDTH = 4;
#endif

typedef float Vector __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Integers __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));
typedef uint8_t Bytes __attribute__((vector_size(WIDTH)));

OCTAVO_INLINE Vector all(float value) { return value - Vector{}; }

// a * b + c, rounded once where the processor can.
OCTAVO_INLINE Vector fma(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(OCTAVO_NEON)
  return (Vector)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// The second one where either is NaN.
#if defined(__AVX512F__)
OCTAVO_INLINE Vector maximum(Vector a, Vector b) { return _mm512_max_ps(a, b); }
OCTAVO_INLINE Vector minimum(Vector a, Vector b) { return _mm512_min_ps(a, b); }
#else
OCTAVO_INLINE Vector maximum(Vector a, Vector b) { return a > b ? a : b; }
OCTAVO_INLINE Vector minimum(Vector a, Vector b) { return a < b ? a : b; }
#endif
OCTAVO_INLINE Vector magnitude(Vector a) { return (Vector)((Integers)a & 0x7fffffff); }

// ---- memory

OCTAVO_INLINE Vector load(const float* from) {
  Vector v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

OCTAVO_INLINE void store(float* to, Vector v) { __builtin_memcpy(to, &v, sizeof v); }

// What __builtin_convertvector does, in one instruction each.
#if defined(__AVX512F__)
OCTAVO_INLINE Words to_words(Halves halves) { return (Words)_mm512_cvtepu16_epi32((__m256i)halves); }
OCTAVO_INLINE Halves to_halves(Words words) { return (Halves)_mm512_cvtepi32_epi16((__m512i)words); }
OCTAVO_INLINE Bytes to_bytes(Integers integers) { return (Bytes)_mm512_cvtepi32_epi8((__m512i)integers); }
#elif defined(__AVX2__)
OCTAVO_INLINE Words to_words(Halves halves) { return (Words)_mm256_cvtepu16_epi32((__m128i)halves); }
OCTAVO_INLINE Halves to_halves(Words words) {
  const __m256i packed = _mm256_packus_epi32((__m256i)(words & 0xffff), _mm256_setzero_si256());
  return (Halves)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0b1000));
}
OCTAVO_INLINE Bytes to_bytes(Integers integers) { return __builtin_convertvector(integers, Bytes); }
#elif defined(OCTAVO_NEON)
OCTAVO_INLINE Words to_words(Halves halves) { return (Words)vmovl_u16((uint16x4_t)halves); }
OCTAVO_INLINE Halves to_halves(Words words) { return (Halves)vmovn_u32((uint32x4_t)words); }
OCTAVO_INLINE Bytes to_bytes(Integers integers) {
  const uint16x4_t halves = vmovn_u32((uint32x4_t)integers);
  const uint32_t four = vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(halves, halves))), 0);
  Bytes bytes;
  __builtin_memcpy(&bytes, &four, sizeof bytes);
  return bytes;
}
#else
OCTAVO_INLINE Words to_words(Halves halves) { return __builtin_convertvector(halves, Words); }
OCTAVO_INLINE Halves to_halves(Words words) { return __builtin_convertvector(words, Halves); }
OCTAVO_INLINE Bytes to_bytes(Integers integers) { return __builtin_convertvector(integers, Bytes); }
#endif

OCTAVO_INLINE Vector widen(Halves halves) { return (Vector)(to_words(halves) << 16); }

// bfloat16, rounded to nearest even as torch does it: subnormal numbers stay, NaN stays NaN.
OCTAVO_INLINE Halves narrow(Vector v) {
#if defined(__AVX512BF16__)
  constexpr int UNLIKE = 0x20 | 0x01 | 0x80;  // subnormal numbers and NaN, of which the instruction makes something else
  if (_mm512_fpclass_ps_mask((__m512)v, UNLIKE) == 0) [[likely]]
    return (Halves)_mm512_cvtneps_pbh((__m512)v);
#elif defined(OCTAVO_NEON) && defined(__ARM_FEATURE_BF16)
  // The instruction returns other NaNs than the code below.
  const uint16x4_t made = vreinterpret_u16_bf16(vcvt_bf16_f32((float32x4_t)v));
  return (Halves)vbsl_u16(vmovn_u32(vceqq_f32((float32x4_t)v, (float32x4_t)v)), made, vdup_n_u16(0x7fc0));
#endif
  const Words bits = (Words)v;
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words chosen = v == v ? rounded : (Words)(Integers{} + 0x7fc0);
  return to_halves(chosen);
}

OCTAVO_INLINE Vector load(const bfloat16* from) {
  Halves halves;
  __builtin_memcpy(&halves, from, sizeof halves);
  return widen(halves);
}

OCTAVO_INLINE void store(bfloat16* to, Vector v) {
  const Halves halves = narrow(v);
  __builtin_memcpy(to, &halves, sizeof halves);
}

#if defined(__AVX512F__)

OCTAVO_INLINE Vector load_part(const float* from, int64_t count) {
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), from);
}

OCTAVO_INLINE void store_part(float* to, Vector v, int64_t count) {
  _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << count) - 1), v);
}

OCTAVO_INLINE Vector load_part(const bfloat16* from, int64_t count) {
  return widen((Halves)_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << count) - 1), from));
}

OCTAVO_INLINE void store_part(bfloat16* to, Vector v, int64_t count) {
  _mm256_mask_storeu_epi16(to, static_cast<__mmask16>((1u << count) - 1), (__m256i)narrow(v));
}

#else

OCTAVO_INLINE Vector load_part(const float* from, int64_t count) {
  float parts[WIDTH] = {};
  for (int64_t i = 0; i < count; ++i) parts[i] = from[i];
  return load(parts);
}

OCTAVO_INLINE void store_part(float* to, Vector v, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = v[i];
}

OCTAVO_INLINE Vector load_part(const bfloat16* from, int64_t count) {
  bfloat16 parts[WIDTH] = {};
  for (int64_t i = 0; i < count; ++i) parts[i] = from[i];
  return load(parts);
}

OCTAVO_INLINE void store_part(bfloat16* to, Vector v, int64_t count) {
  const Halves halves = narrow(v);
  for (int64_t i = 0; i < count; ++i) to[i].bits = halves[i];
}

#endif

#if defined(OCTAVO_NEON)
OCTAVO_INLINE uint32x4_t words_of_bytes(const uint8_t* from) {
  uint32_t four;
  __builtin_memcpy(&four, from, sizeof four);
  return vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)))));
}
#endif

OCTAVO_INLINE Vector load(const uint8_t* from) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#elif defined(OCTAVO_NEON)
  return (Vector)vcvtq_f32_u32(words_of_bytes(from));
#else
  Bytes bytes;
  __builtin_memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, Vector);
#endif
}

OCTAVO_INLINE void store(uint8_t* to, Integers v) {
  const Bytes bytes = to_bytes(v);
  __builtin_memcpy(to, &bytes, sizeof bytes);
}

OCTAVO_INLINE void store_part(uint8_t* to, Integers v, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<uint8_t>(v[i]);
}

// A number as a format holds it.
OCTAVO_INLINE Vector rounded(Vector v, const float*) { return v; }
OCTAVO_INLINE Vector rounded(Vector v, const bfloat16*) { return widen(narrow(v)); }

// ---- over all elements, always in the same order

#if defined(__AVX2__)
// The operation on one half of the elements and the other, until one is left.
template <class Operation>
OCTAVO_INLINE float fold(Vector v, const Operation& operation) {
#if defined(__AVX512F__)
  const __m256 eight = operation(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
#else
  const __m256 eight = v;
#endif
  const __m128 four = operation(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = operation(four, _mm_movehl_ps(four, four));
  return operation(two, _mm_shuffle_ps(two, two, 1))[0];
}
#elif defined(OCTAVO_NEON)
template <class Operation>
OCTAVO_INLINE float fold(Vector v, const Operation& operation) {
  const Vector two = operation(v, (Vector)vextq_f32((float32x4_t)v, (float32x4_t)v, 2));
  return operation(two, (Vector)vextq_f32((float32x4_t)two, (float32x4_t)two, 1))[0];
}
#else
template <class Operation>
OCTAVO_INLINE float fold(Vector v, const Operation& operation) {
  const Vector two = operation(v, Vector{v[2], v[3]});
  return operation(two, Vector{two[1]})[0];
}
#endif

OCTAVO_INLINE float sum(Vector v) {
  return fold(v, [](auto a, auto b) { return a + b; });
}

OCTAVO_INLINE float largest(Vector v) {
  return fold(v, [](auto a, auto b) { return a > b ? a : b; });
}

// The vectors that `each` hands to its body: their place in a row, how they are read and written there.
struct Full {
  int64_t at;
  template <class T>
  OCTAVO_INLINE_MEMBER Vector read(const T* row) const {
    return load(row + at);
  }
  template <class T, class Values>
  OCTAVO_INLINE_MEMBER void write(T* row, Values v) const {
    store(row + at, v);
  }
  OCTAVO_INLINE_MEMBER Vector kept(Vector v) const { return v; }
};

struct Part {
  int64_t at, count;
  template <class T>
  OCTAVO_INLINE_MEMBER Vector read(const T* row) const {
    return load_part(row + at, count);
  }
  template <class T, class Values>
  OCTAVO_INLINE_MEMBER void write(T* row, Values v) const {
    store_part(row + at, v, count);
  }
  // 0 again where a calculation has made something else of what is missing.
  OCTAVO_INLINE_MEMBER Vector kept(Vector v) const {
    for (int64_t i = count; i < WIDTH; ++i) v[i] = 0;
    return v;
  }
};

// Calls body for each vector of a row, in order; the last one may be a part.
template <class Body>
OCTAVO_INLINE void each(int64_t size, const Body& body) {
  int64_t at = 0;
  for (; at + WIDTH <= size; at += WIDTH) body(Full{at});
  if (at < size) body(Part{at, size - at});
}

// The sum of what term(vector, before) adds to `before`, in four running sums, so that additions do not wait for each
// other.
template <class Term>
OCTAVO_INLINE float total(int64_t size, const Term& term) {
  Vector a{}, b{}, c{}, d{};
  int64_t at = 0;
  for (; at + 4 * WIDTH <= size; at += 4 * WIDTH) {
    a = term(Full{at}, a);
    b = term(Full{at + WIDTH}, b);
    c = term(Full{at + 2 * WIDTH}, c);
    d = term(Full{at + 3 * WIDTH}, d);
  }
  for (; at + WIDTH <= size; at += WIDTH) a = term(Full{at}, a);
  if (at < size) b = term(Part{at, size - at}, b);
  return sum((a + b) + (c + d));
}

}  // namespace octavo

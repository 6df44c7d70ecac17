// Vectors of float32 as wide as the instruction set has them, in the vector extensions of GCC and Clang.
//
// A row is walked in full vectors and one part of a vector at its end, whose missing elements are 0: all elements pass
// through the same instructions, so that what becomes of one depends on its row alone.
#pragma once

#include "common.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace octavo {

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
#else
  return a * b + c;
#endif
}

OCTAVO_INLINE Vector maximum(Vector a, Vector b) { return a > b ? a : b; }
OCTAVO_INLINE Vector minimum(Vector a, Vector b) { return a < b ? a : b; }
OCTAVO_INLINE Vector magnitude(Vector a) { return (Vector)((Integers)a & 0x7fffffff); }

// ---- memory

OCTAVO_INLINE Vector load(const float* from) {
  Vector v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

OCTAVO_INLINE void store(float* to, Vector v) { __builtin_memcpy(to, &v, sizeof v); }

OCTAVO_INLINE Vector widen(Halves halves) { return (Vector)(__builtin_convertvector(halves, Words) << 16); }

// bfloat16, rounded to nearest even as torch does it: subnormal numbers stay, NaN stays NaN.
OCTAVO_INLINE Halves narrow(Vector v) {
  const Words bits = (Words)v;
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words chosen = v == v ? rounded : (Words)(Integers{} + 0x7fc0);
  return __builtin_convertvector(chosen, Halves);
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

OCTAVO_INLINE void store(uint8_t* to, Integers v) {
  const Bytes bytes = __builtin_convertvector(v, Bytes);
  __builtin_memcpy(to, &bytes, sizeof bytes);
}

OCTAVO_INLINE void store_part(uint8_t* to, Integers v, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<uint8_t>(v[i]);
}

// A number as a format holds it.
OCTAVO_INLINE Vector rounded(Vector v, const float*) { return v; }
OCTAVO_INLINE Vector rounded(Vector v, const bfloat16*) { return widen(narrow(v)); }

// ---- over all elements, always in the same order

template <class Operation>
OCTAVO_INLINE float fold(Vector v, const Operation& operation) {
  float parts[WIDTH];
  store(parts, v);
  for (int64_t half = WIDTH / 2; half; half /= 2)
    for (int64_t i = 0; i < half; ++i) parts[i] = operation(parts[i], parts[i + half]);
  return parts[0];
}

OCTAVO_INLINE float sum(Vector v) {
  return fold(v, [](float a, float b) { return a + b; });
}

OCTAVO_INLINE float largest(Vector v) {
  return fold(v, [](float a, float b) { return larger(a, b); });
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

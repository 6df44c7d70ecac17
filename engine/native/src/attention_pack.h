// A chunk of keys and values, laid out for the products: keys turned, so that a vector holds one unit of WIDTH keys.
#pragma once

#include "attention_formats.h"

namespace octavo {
namespace {

// Keys are walked in chunks that begin at multiples of this position.
constexpr int64_t CHUNK = 128;

#if defined(__AVX512F__)

OCTAVO_INLINE void turn(Vector (&v)[WIDTH]) {
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

OCTAVO_INLINE void turn(Vector (&v)[WIDTH]) {
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

#else

OCTAVO_INLINE void turn(Vector (&v)[WIDTH]) {
  for (int64_t i = 0; i < WIDTH; ++i)
    for (int64_t j = 0; j < i; ++j) {
      const float below = v[i][j];
      v[i][j] = v[j][i];
      v[j][i] = below;
    }
}

#endif

// Where the keys and values of a chunk lie; those that no query sees are a vector of zeros elsewhere.
template <class T>
struct Rows {
  const T *keys[CHUNK], *values[CHUNK];
};

// Keys, of which those of the vectors [first, last) are read, to units [units of a key, CHUNK]. Calls ahead(group) for
// each vector of keys, so that memory works on what comes next while the processor packs.
template <class Form, class T, class Ahead>
OCTAVO_INLINE void pack_keys(const Rows<T>& rows, int64_t first, int64_t last, int64_t size, Unit* to,
                             const Ahead& ahead) {
  const int64_t units = (size + Form::HELD - 1) / Form::HELD;
  for (int64_t group = first; group < last; ++group) {
    ahead(group);
    const T* const* of = rows.keys + group * WIDTH;
    for (int64_t unit = 0; unit < units; unit += WIDTH) {
      Vector v[WIDTH];
      for (int64_t i = 0; i < WIDTH; ++i) v[i] = Form::units(of[i], unit * Form::HELD, size);
      turn(v);
      float* place = reinterpret_cast<float*>(to + unit * CHUNK + group * WIDTH);
      const int64_t some = smaller(WIDTH, units - unit);
      if (some == WIDTH) {
        for (int64_t i = 0; i < WIDTH; ++i) store(place + i * CHUNK, v[i]);
      } else {
        for (int64_t i = 0; i < some; ++i) store(place + i * CHUNK, v[i]);
      }
    }
  }
}

// Values, of which those of the vectors [first, last) are read, to [CHUNK / held, width] units.
template <class T, class Ahead>
OCTAVO_INLINE void pack_values(Single, const Rows<T>& rows, int64_t first, int64_t last, int64_t size, int64_t width,
                               Unit* to, const Ahead& ahead) {
  for (int64_t group = first; group < last; ++group) {
    ahead(group);
    for (int64_t key = group * WIDTH; key < (group + 1) * WIDTH; ++key)
      for (int64_t at = 0; at < size; at += WIDTH)
        store(reinterpret_cast<float*>(to + key * width + at), read(rows.values[key] + at, size - at));
  }
}

#if defined(__AVX512BF16__)

template <class T, class Ahead>
OCTAVO_INLINE void pack_values(Pair, const Rows<T>& rows, int64_t first, int64_t last, int64_t size, int64_t width,
                               Unit* to, const Ahead& ahead) {
  alignas(64) static constexpr uint16_t LOW[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                   8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(LOW), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int64_t group = first; group < last; ++group) {
    ahead(group);
    for (int64_t key = group * WIDTH; key < (group + 1) * WIDTH; key += 2) {
      const T *one = rows.values[key], *other = rows.values[key + 1];
      Unit* row = to + key / 2 * width;
      for (int64_t at = 0; at < size; at += 2 * WIDTH) {
        const __m512i a = (__m512i)Pair::units(one, at, size), b = (__m512i)Pair::units(other, at, size);
        _mm512_storeu_si512(row + at, _mm512_permutex2var_epi16(a, low, b));
        if (at + WIDTH < size) _mm512_storeu_si512(row + at + WIDTH, _mm512_permutex2var_epi16(a, high, b));
      }
    }
  }
}

#endif

}  // namespace
}  // namespace octavo

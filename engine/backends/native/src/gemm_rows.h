// How rows of activations are laid out for a tile: in units of 4 bytes, unit 0 of all rows, unit 1 of all rows ...
#pragma once

#include "transpose.h"

namespace octavo::gemm {

constexpr int64_t MOST_ROWS = 16;  // of a tile
constexpr int64_t CHUNK = 128;     // units of a row that are made at a time

// 4 units of 4 rows, whose first units lie `from_stride` apart, to where those of a unit lie side by side and the next
// unit's `to_stride` further on.
OCTAVO_INLINE void interleave_4_by_4(const uint32_t* from, int64_t from_stride, uint32_t* to, int64_t to_stride) {
#if defined(__AVX2__)
  const auto row = [&](int64_t i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * from_stride)); };
  const __m128i a = row(0), b = row(1), c = row(2), d = row(3);
  const __m128i ab = _mm_unpacklo_epi32(a, b), cd = _mm_unpacklo_epi32(c, d);
  const __m128i ef = _mm_unpackhi_epi32(a, b), gh = _mm_unpackhi_epi32(c, d);
  const auto put = [&](int64_t i, __m128i v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i * to_stride), v); };
  put(0, _mm_unpacklo_epi64(ab, cd));
  put(1, _mm_unpackhi_epi64(ab, cd));
  put(2, _mm_unpacklo_epi64(ef, gh));
  put(3, _mm_unpackhi_epi64(ef, gh));
#elif defined(OCTAVO_NEON)
  Vector v[4];
  for (int64_t i = 0; i < 4; ++i) v[i] = load(reinterpret_cast<const float*>(from + i * from_stride));
  transpose(v);
  for (int64_t i = 0; i < 4; ++i) store(reinterpret_cast<float*>(to + i * to_stride), v[i]);
#else
  for (int64_t i = 0; i < 4; ++i)
    for (int64_t row = 0; row < 4; ++row) to[i * to_stride + row] = from[row * from_stride + i];
#endif
}

#if defined(__AVX512F__)
constexpr int64_t WIDE = 5;  // rows that are worth turning WIDTH units of at a time

// Units of rows that lie `stride` bytes apart. Stores are whole vectors, as far as `end`; what they write beyond a
// unit's rows is written again by those that follow.
OCTAVO_INLINE void interleave_wide(const void* from, int64_t stride, int64_t units, int64_t rows, uint32_t* to,
                                   const uint32_t* end) {
  for (int64_t i = 0; i < units; i += WIDTH) {
    const int64_t some = smaller(WIDTH, units - i);
    const auto read = static_cast<__mmask16>((1u << some) - 1);
    Vector v[WIDTH];
    for (int64_t row = 0; row < WIDTH; ++row)
      v[row] = row < rows ? (Vector)_mm512_maskz_loadu_epi32(read, static_cast<const char*>(from) + row * stride + 4 * i)
                          : Vector{};
    transpose(v);
    for (int64_t j = 0; j < some; ++j) {
      float* place = reinterpret_cast<float*>(to + (i + j) * rows);
      if (to + (i + j) * rows + WIDTH <= end)
        store(place, v[j]);
      else
        store_part(place, v[j], rows);
    }
  }
}
#endif

// Rows of CHUNK units, of which `units` count; `end` is that of all that is laid out.
OCTAVO_INLINE void interleave(const uint32_t* from, int64_t units, int64_t rows, uint32_t* to,
                              [[maybe_unused]] const uint32_t* end) {
#if defined(__AVX512F__)
  if (rows >= WIDE) return interleave_wide(from, 4 * CHUNK, units, rows, to, end);
#endif
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4) {
    int64_t i = 0;
    for (; i + 4 <= units; i += 4) interleave_4_by_4(from + row * CHUNK + i, CHUNK, to + i * rows + row, rows);
    for (; i < units; ++i)
      for (int64_t j = row; j < row + 4; ++j) to[i * rows + j] = from[j * CHUNK + i];
  }
  for (; row < rows; ++row)
    for (int64_t i = 0; i < units; ++i) to[i * rows + row] = from[row * CHUNK + i];
}

// Lays `rows` rows of `units` units out. make(row, first, count, to) writes units of a row.
template <class Make>
OCTAVO_INLINE void lay_out(int64_t rows, int64_t units, uint32_t* to, const Make& make) {
  if (units == 0) return;
  if (rows == 1) return make(0, 0, units, to);
  uint32_t plain[MOST_ROWS * CHUNK];
  for (int64_t first = 0; first < units; first += CHUNK) {
    const int64_t count = smaller(CHUNK, units - first);
    for (int64_t row = 0; row < rows; ++row) make(row, first, count, plain + row * CHUNK);
    interleave(plain, count, rows, to + first * rows, to + units * rows);
  }
}

}  // namespace octavo::gemm

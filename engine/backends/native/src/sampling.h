// Rows of logits, and what is picked from them without ever sorting one.
//
// One walk over a row leaves the largest logit of each chunk of columns. From then on the search for large logits
// passes over the chunks that have none: the k-th largest of these maxima is a bound that at least k logits reach, and
// few more do.
#pragma once

#include "attention_math.h"
#include "threads.h"

namespace octavo {

constexpr int64_t CHUNK = 64;     // columns that share a maximum
constexpr int64_t PIECE = 4096;   // columns that share a sum of exponentials, and that one thread takes

OCTAVO_INLINE int64_t chunks_of(int64_t columns) { return (columns + CHUNK - 1) / CHUNK; }
OCTAVO_INLINE int64_t pieces_of(int64_t columns) { return (columns + PIECE - 1) / PIECE; }

struct Logits {
  float* values;
  int64_t rows, columns, stride;
  float* tops;  // [rows, chunks] the largest of each chunk

  OCTAVO_INLINE_MEMBER int64_t chunks() const { return chunks_of(columns); }
  OCTAVO_INLINE_MEMBER float* row(int64_t number) const { return values + number * stride; }
  OCTAVO_INLINE_MEMBER float* tops_of(int64_t number) const { return tops + number * chunks(); }
  OCTAVO_INLINE_MEMBER int64_t width_of(int64_t chunk) const { return smaller(CHUNK, columns - chunk * CHUNK); }
};

namespace {

constexpr float INFINITE = __builtin_inff();

// ---- reductions

// The largest of `count` numbers, -inf for none. NaN may hide others, or be hidden.
OCTAVO_INLINE float top_of(const float* from, int64_t count) {
  Vector best = all(-INFINITE);
  int64_t at = 0;
  for (; at + WIDTH <= count; at += WIDTH) best = maximum(best, load(from + at));
  float top = largest(best);
  for (; at < count; ++at) top = larger(top, from[at]);
  return top;
}

// Running sums in float64, one for each element of a vector.
class Sums {
 public:
  OCTAVO_INLINE_MEMBER void add(Vector v) {
#if defined(__AVX512F__)
    low_ += (Half)_mm512_cvtps_pd(_mm512_castps512_ps256(v));
    high_ += (Half)_mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1));
#elif defined(__AVX2__)
    low_ += (Half)_mm256_cvtps_pd(_mm256_castps256_ps128(v));
    high_ += (Half)_mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
#elif defined(OCTAVO_NEON)
    low_ += (Half)vcvt_f64_f32(vget_low_f32((float32x4_t)v));
    high_ += (Half)vcvt_high_f64_f32((float32x4_t)v);
#else
    low_ += Half{v[0], v[1]};
    high_ += Half{v[2], v[3]};
#endif
  }

  OCTAVO_INLINE_MEMBER double total() const {
    const Half both = low_ + high_;
#if defined(__AVX512F__)
    return _mm512_reduce_add_pd((__m512d)both);
#else
    double sum = 0;
    for (int64_t i = 0; i < WIDTH / 2; ++i) sum += both[i];
    return sum;
#endif
  }

 private:
  typedef double Half __attribute__((vector_size(4 * WIDTH)));
  Half low_{}, high_{};
};

// A bit for each element that is all ones.
OCTAVO_INLINE uint32_t bits_of(Integers truth) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)truth);
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps((__m256)truth));
#elif defined(OCTAVO_NEON)
  return vaddvq_u32(vandq_u32((uint32x4_t)truth, uint32x4_t{1, 2, 4, 8}));
#else
  uint32_t bits = 0;
  for (int64_t i = 0; i < WIDTH; ++i) bits |= static_cast<uint32_t>(truth[i] & 1) << i;
  return bits;
#endif
}

// Calls body(column) for each of the columns first, ..., first + count - 1 whose number reaches the bound, in order.
template <class Body>
OCTAVO_INLINE void each_reaching(const float* row, int64_t first, int64_t count, float bound, const Body& body) {
  int64_t at = 0;
  for (; at + WIDTH <= count; at += WIDTH)
    for (uint32_t bits = bits_of(load(row + first + at) >= bound); bits; bits &= bits - 1)
      body(first + at + __builtin_ctz(bits));
  for (; at < count; ++at)
    if (row[first + at] >= bound) body(first + at);
}

OCTAVO_INLINE int64_t count_reaching(const float* values, int64_t count, float bound) {
  int64_t found = 0, at = 0;
  Integers several{};
  for (; at + WIDTH <= count; at += WIDTH) several -= (Integers)(load(values + at) >= bound);
  for (int64_t i = 0; i < WIDTH; ++i) found += several[i];
  for (; at < count; ++at) found += values[at] >= bound;
  return found;
}

// ---- order

// Integers in the order of the numbers; -0 comes before 0.
OCTAVO_INLINE int32_t ordered(float value) {
  const int32_t bits = __builtin_bit_cast(int32_t, value);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

OCTAVO_INLINE float unordered(int32_t place) {
  return __builtin_bit_cast(float, place ^ ((place >> 31) & 0x7fffffff));
}

// What sorts numbers from the largest down, equal ones by their columns.
OCTAVO_INLINE uint64_t key_of(float value, int64_t column) {
  const uint32_t place = static_cast<uint32_t>(ordered(value + 0.0f)) ^ 0x80000000u;  // -0 becomes 0
  return static_cast<uint64_t>(~place) << 32 | static_cast<uint32_t>(column);
}

OCTAVO_INLINE int64_t column_of(uint64_t key) { return static_cast<int64_t>(key & 0xffffffffu); }
OCTAVO_INLINE float value_of(uint64_t key) {
  return unordered(static_cast<int32_t>(~static_cast<uint32_t>(key >> 32) ^ 0x80000000u));
}

// Sorts keys upwards; `spare` has room for as many.
inline void sort(uint64_t* keys, uint64_t* spare, int64_t count) {
  constexpr int64_t RUN = 16;
  for (int64_t first = 0; first < count; first += RUN) {
    const int64_t last = smaller(first + RUN, count);
    for (int64_t i = first + 1; i < last; ++i) {
      const uint64_t key = keys[i];
      int64_t to = i;
      for (; to > first && keys[to - 1] > key; --to) keys[to] = keys[to - 1];
      keys[to] = key;
    }
  }
  uint64_t *from = keys, *to = spare;
  for (int64_t run = RUN; run < count; run *= 2) {
    for (int64_t first = 0; first < count; first += 2 * run) {
      const int64_t middle = smaller(first + run, count), last = smaller(first + 2 * run, count);
      int64_t left = first, right = middle;
      for (int64_t at = first; at < last; ++at) {
        const bool take_left = right == last || (left < middle && from[left] <= from[right]);
        to[at] = take_left ? from[left++] : from[right++];
      }
    }
    uint64_t* const sorted = to;
    to = from;
    from = sorted;
  }
  if (from != keys) __builtin_memcpy(keys, from, static_cast<size_t>(count) * sizeof *keys);
}

// ---- selection

// A bound that at least `wanted` numbers reach, and no more than `wanted + slack` unless they are equal.
inline float bound_for(const float* values, int64_t count, float top, int64_t wanted, int64_t slack) {
  int64_t reached = ordered(-INFINITE), missed = static_cast<int64_t>(ordered(top + 0.0f)) + 1;
  while (missed - reached > 1) {
    const int64_t middle = reached + (missed - reached) / 2;
    const int64_t found = count_reaching(values, count, unordered(static_cast<int32_t>(middle)));
    if (found < wanted) {
      missed = middle;
    } else {
      reached = middle;
      if (found <= wanted + slack) break;
    }
  }
  return unordered(static_cast<int32_t>(reached));
}

// Leaves the `wanted` first of keys that are in the order of their columns, in that order.
inline int64_t leave_best(uint64_t* keys, int64_t count, int64_t wanted) {
  // The half of a key that holds the number, of the last one that stays.
  uint64_t low = 0, high = 0xffffffffu;
  while (low < high) {
    const uint64_t middle = low + (high - low) / 2;
    int64_t found = 0;
    for (int64_t i = 0; i < count; ++i) found += (keys[i] >> 32) <= middle;
    if (found < wanted)
      low = middle + 1;
    else
      high = middle;
  }
  int64_t better = 0, kept = 0;
  for (int64_t i = 0; i < count; ++i) better += (keys[i] >> 32) < low;
  for (int64_t i = 0, equal = wanted - better; i < count; ++i) {
    const uint64_t place = keys[i] >> 32;
    if (place < low || (place == low && equal-- > 0)) keys[kept++] = keys[i];
  }
  return kept;
}

// The keys of the `wanted` largest logits of a row, sorted; fewer only where some are not numbers. Both memories have
// room for a key of each column.
inline int64_t select(const Logits& a, int64_t number, int64_t wanted, uint64_t* keys, uint64_t* spare) {
  const float *row = a.row(number), *tops = a.tops_of(number);
  const int64_t chunks = a.chunks();
  const float top = top_of(tops, chunks);
  // Maxima of chunks say little where most chunks are wanted.
  const float bound = wanted <= chunks / 2 ? bound_for(tops, chunks, top, wanted, 0)
                                           : bound_for(row, a.columns, top, wanted, wanted / 8);
  int64_t count = 0;
  each_reaching(tops, 0, chunks, bound, [&](int64_t chunk) {
    each_reaching(row, chunk * CHUNK, a.width_of(chunk), bound,
                  [&](int64_t column) { keys[count++] = key_of(row[column], column); });
  });
  if (count > 4 * wanted + CHUNK) count = leave_best(keys, count, wanted);
  sort(keys, spare, count);
  return smaller(count, wanted);
}

}  // namespace
}  // namespace octavo

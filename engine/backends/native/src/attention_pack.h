// A chunk of keys and values, laid out for the products: keys turned, so that a vector holds one unit of WIDTH keys.
#pragma once

#include "attention_formats.h"
#include "transpose.h"

namespace octavo {
namespace {

// Keys are walked in chunks that begin at multiples of this position.
constexpr int64_t CHUNK = 128;

// Where the keys or the values of a chunk lie; those that no query sees are a vector of zeros elsewhere.
template <class T>
struct Lines {
  const T* from;
  const int64_t* places;  // [CHUNK] elements from there on, of the keys [low, high)
  int64_t low, high;
  const T* nothing;

  OCTAVO_INLINE_MEMBER const T* operator[](int64_t key) const {
    return key >= low && key < high ? from + places[key] : nothing;
  }

  OCTAVO_INLINE_MEMBER void vector(int64_t first, const T* (&of)[WIDTH]) const {
    if (first >= low && first + WIDTH <= high)
      for (int64_t i = 0; i < WIDTH; ++i) of[i] = from + places[first + i];
    else
      for (int64_t i = 0; i < WIDTH; ++i) of[i] = (*this)[first + i];
  }
};

// WIDTH units of WIDTH keys, turned: v[i] is unit `unit` + i of all keys. `WHOLE`: keys have so many left.
template <class Form, bool WHOLE, class T>
OCTAVO_INLINE void turned_units(const T* const (&of)[WIDTH], int64_t unit, int64_t size, Vector (&v)[WIDTH]) {
  const int64_t at = unit * Form::HELD;
  for (int64_t i = 0; i < WIDTH; ++i) v[i] = Form::units(of[i], at, WHOLE ? at + WIDTH * Form::HELD : size);
  transpose(v);
}

// Keys, of which those of the vectors [first, last) are read, to units [units of a key, ROW]. `ahead` is told of the
// vectors that are made, so that memory works on what comes next while the processor packs.
template <class Form, int64_t ROW = CHUNK, class T, class Ahead>
OCTAVO_INLINE void pack_keys(const Lines<T>& keys, int64_t first, int64_t last, int64_t size, Unit* to, Ahead& ahead) {
  const int64_t units = (size + Form::HELD - 1) / Form::HELD;
  for (int64_t group = first; group < last; ++group) {
    const T* of[WIDTH];
    keys.vector(group * WIDTH, of);
    for (int64_t unit = 0; unit < units; unit += WIDTH) {
      Vector v[WIDTH];
      ahead.fetch(WIDTH);
      turned_units<Form, false>(of, unit, size, v);
      float* place = reinterpret_cast<float*>(to + unit * ROW + group * WIDTH);
      const int64_t some = smaller(WIDTH, units - unit);
      if (some == WIDTH) {
        for (int64_t i = 0; i < WIDTH; ++i) store(place + i * ROW, v[i]);
      } else {
        for (int64_t i = 0; i < some; ++i) store(place + i * ROW, v[i]);
      }
    }
  }
}

// Values, of which those of the vectors [first, last) are read, to [CHUNK / held, width] units.
template <class T, class Ahead>
OCTAVO_INLINE void pack_values(Single, const Lines<T>& values, int64_t first, int64_t last, int64_t size, int64_t width,
                               Unit* to, Ahead& ahead) {
  for (int64_t group = first; group < last; ++group) {
    for (int64_t key = group * WIDTH; key < (group + 1) * WIDTH; ++key) {
      const T* from = values[key];
      ahead.fetch(width / WIDTH);
      for (int64_t at = 0; at < size; at += WIDTH)
        store(reinterpret_cast<float*>(to + key * width + at), read(from + at, size - at));
    }
  }
}

#if defined(OCTAVO_PAIRS)

// Two rows of features as rows of units: [a0 b0 a1 b1 ...], the first half of the features and the other.
struct Zip {
#if defined(OCTAVO_NEON)
  OCTAVO_INLINE_MEMBER Vector first(Vector a, Vector b) const {
    return (Vector)vzip1q_u16((uint16x8_t)a, (uint16x8_t)b);
  }
  OCTAVO_INLINE_MEMBER Vector second(Vector a, Vector b) const {
    return (Vector)vzip2q_u16((uint16x8_t)a, (uint16x8_t)b);
  }
#else
  __m512i low, high;

  OCTAVO_INLINE_MEMBER Zip() {
    alignas(64) static constexpr uint16_t LOW[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                     8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    low = _mm512_load_si512(LOW), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  }

  OCTAVO_INLINE_MEMBER Vector first(Vector a, Vector b) const {
    return (Vector)_mm512_permutex2var_epi16((__m512i)a, low, (__m512i)b);
  }
  OCTAVO_INLINE_MEMBER Vector second(Vector a, Vector b) const {
    return (Vector)_mm512_permutex2var_epi16((__m512i)a, high, (__m512i)b);
  }
#endif
};

template <class T, class Ahead>
OCTAVO_INLINE void pack_values(Pair, const Lines<T>& values, int64_t first, int64_t last, int64_t size, int64_t width,
                               Unit* to, Ahead& ahead) {
  const Zip zip;
  for (int64_t group = first; group < last; ++group) {
    for (int64_t key = group * WIDTH; key < (group + 1) * WIDTH; key += 2) {
      const T *one = values[key], *other = values[key + 1];
      float* row = reinterpret_cast<float*>(to + key / 2 * width);
      ahead.fetch(width / WIDTH);
      for (int64_t at = 0; at < size; at += 2 * WIDTH) {
        const Vector a = Pair::units(one, at, size), b = Pair::units(other, at, size);
        store(row + at, zip.first(a, b));
        if (at + WIDTH < size) store(row + at + WIDTH, zip.second(a, b));
      }
    }
  }
}

#endif

}  // namespace
}  // namespace octavo

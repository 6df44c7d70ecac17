// Few queries over a chunk of keys and values that stay where they are.
//
// Packing pays where many queries meet what was packed. Few meet some vectors of keys as soon as those are turned, and
// values as pages hold them. What is added to what, and in which order, is the same as over packed keys, so results are
// the same to the bit.
#pragma once

#include "attention_chunk.h"

namespace octavo {
namespace {

// The most queries that meet keys where they lie.
constexpr int FEW = 8;

// Sums that stay in registers.
constexpr int KEPT = REGISTERS == 32 ? 24 : 12;

// Vectors of keys that are met together at most, and keys of whose values the next lines are found at once.
constexpr int TOGETHER = 4, STEP = 8;

// Adds values of the keys [low, high), features from `column` on. `WHOLE`: values have so many.
template <int R, int C, bool WHOLE, class T, class Ahead>
OCTAVO_INLINE void add_values(Single, const Lines<T>& values, const Unit (&weights)[R][CHUNK], int64_t low,
                              int64_t high, int64_t column, int64_t size, Ahead& ahead, Vector (&acc)[R][C]) {
  for (int64_t key = low; key < high; ++key) {
    const T* from = values[key] + column;
    ahead.template take<C>();
    for (int c = 0; c < C; ++c) {
      const Vector v = read(from + c * WIDTH, WHOLE ? WIDTH : size - column - c * WIDTH);
      for (int r = 0; r < R; ++r) acc[r][c] = Single::add(acc[r][c], weights[r][key], v);
    }
  }
}

#if defined(OCTAVO_PAIRS)

template <int R, int C, bool WHOLE, class T, class Ahead>
OCTAVO_INLINE void add_values(Pair, const Lines<T>& values, const Unit (&weights)[R][CHUNK / 2], int64_t low,
                              int64_t high, int64_t column, int64_t size, Ahead& ahead, Vector (&acc)[R][C]) {
  const Zip zip;
  const int64_t end = WHOLE ? column + (C + 1) / 2 * 2 * WIDTH : size;
  for (int64_t key = low & ~int64_t{1}; key < high; key += 2) {
    const T *one = values[key], *other = values[key + 1];
    ahead.template take<C>();
    for (int c = 0; c < C; c += 2) {
      const int64_t at = column + c * WIDTH;
      const Vector a = Pair::units(one, at, end), b = Pair::units(other, at, end);
      const Vector first = zip.first(a, b);
      for (int r = 0; r < R; ++r) acc[r][c] = Pair::add(acc[r][c], weights[r][key / 2], first);
      if (c + 1 < C) {
        const Vector second = zip.second(a, b);
        for (int r = 0; r < R; ++r) acc[r][c + 1] = Pair::add(acc[r][c + 1], weights[r][key / 2], second);
      }
    }
  }
}

#endif

// Keys and values where they lie, as a source for attend_rows.
template <class Form, class T, class Ahead>
struct Direct {
  Lines<T> keys, values;
  int64_t units, size;  // of a key
  Ahead& ahead;

  // Values are walked as they lie, whichever rows see them.
  static OCTAVO_INLINE_MEMBER const Chunk& narrowed(const Chunk& chunk, const Query*, int64_t) { return chunk; }

  template <int R>
  OCTAVO_INLINE_MEMBER void products(const Unit* queries, int64_t first, int64_t last, float (&to)[R][CHUNK]) const {
    // While one sum waits for the one before it, others go on.
    constexpr int G = R <= 2 ? TOGETHER : 2;
    int64_t group = first;
    for (; group + G <= last; group += G) meet_keys<R, G>(queries, group, to);
    if constexpr (G > 2)
      if (group + 2 <= last) meet_keys<R, 2>(queries, group, to), group += 2;
    for (; group < last; ++group) meet_keys<R, 1>(queries, group, to);
  }

  template <int R, class Done>
  OCTAVO_INLINE_MEMBER void sums(const Unit (&weights)[R][CHUNK / Form::HELD], int64_t, int64_t,
                                 const Done& done) const {
    constexpr int C = 4 * R <= KEPT ? 4 : 2;
    int64_t column = 0;
    for (; column + C * WIDTH <= size; column += C * WIDTH) add_column<C, true>(weights, column, done);
    for (; column < size; column += WIDTH) add_column<1, false>(weights, column, done);
  }

 private:
  // R queries and G vectors of keys.
  template <int R, int G>
  OCTAVO_INLINE_MEMBER void meet_keys(const Unit* queries, int64_t group, float (&to)[R][CHUNK]) const {
    alignas(64) Vector v[TOGETHER * WIDTH];
    Vector acc[R][G];
    for (int r = 0; r < R; ++r)
      for (int g = 0; g < G; ++g) acc[r][g] = Vector{};
    for (int64_t unit = 0; unit < units; unit += WIDTH) {
      turn_keys(group, G, unit, v);
      const int64_t some = smaller(WIDTH, units - unit);
      const Unit* of = queries + unit;
      for (int64_t i = 0; i < some; ++i) {
        ahead.template take<G>();
        for (int r = 0; r < R; ++r)
          for (int g = 0; g < G; ++g) acc[r][g] = Form::add(acc[r][g], of[r * units + i], v[g * WIDTH + i]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int g = 0; g < G; ++g) store(&to[r][(group + g) * WIDTH], acc[r][g]);
  }

  // WIDTH units of some vectors of keys, turned, to v [vectors, WIDTH].
  __attribute__((noinline)) void turn_keys(int64_t group, int64_t vectors, int64_t unit, Vector* v) const {
    ahead.prepare(vectors * WIDTH);
    for (int64_t g = 0; g < vectors; ++g, v += WIDTH) {
      const T* of[WIDTH];
      keys.vector((group + g) * WIDTH, of);
      Vector turned[WIDTH];
      if ((unit + WIDTH) * Form::HELD <= size)
        turned_units<Form, true>(of, unit, size, turned);
      else
        turned_units<Form, false>(of, unit, size, turned);
      for (int64_t i = 0; i < WIDTH; ++i) v[i] = turned[i];
    }
  }

  template <int C, bool WHOLE, int R, class Done>
  OCTAVO_INLINE_MEMBER void add_column(const Unit (&weights)[R][CHUNK / Form::HELD], int64_t column,
                                       const Done& done) const {
    Vector acc[R][C];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) acc[r][c] = Vector{};
    for (int64_t key = values.low, high; key < values.high; key = high) {
      high = smaller(rounded_up(key + 1, STEP), values.high);
      ahead.prepare(STEP / Form::HELD * C);
      add_values<R, C, WHOLE>(Form{}, values, weights, key, high, column, size, ahead, acc);
    }
    done(column, acc);
  }
};

}  // namespace
}  // namespace octavo

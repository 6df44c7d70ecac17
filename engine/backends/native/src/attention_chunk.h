// Some queries over one chunk of keys: scores, their softmax, the weighted sum of values.
#pragma once

#include "attention_math.h"
#include "attention_pack.h"

namespace octavo {
namespace {

// Queries computed together, and vectors of the other side: their sums fill the registers.
constexpr int ROWS = 6, COLUMNS = REGISTERS == 32 ? 4 : 2;

// A number of queries, as a type.
template <int R>
struct Rows {};

constexpr float LOWEST = -3.402823466e38f, LOG2_E = 1.44269504f;

// What has been added up for some queries: softmax with a running maximum (arXiv:1805.02867).
struct Running {
  float* best;   // [queries] largest score so far, times log2(e)
  float* total;  // [queries] sum of 2^(score - best)
  float* sums;   // [queries, width] sum of 2^(score - best) * value
};

// One query of a head.
struct Query {
  int64_t low, high;   // keys of the chunk that it sees
  const float* bias;   // line of its head's biases, null for none
  int64_t bias_shift;  // column of the chunk's first key
  float centre;        // score of what was subtracted from all keys
};

// A chunk of keys as far as weights depend on it.
struct Chunk {
  const float* key_scales;    // [CHUNK] null for none
  const float* value_scales;  // [CHUNK] null for none
  int64_t first, last;        // vectors of keys that some query sees
};

// What is the same for all chunks of a batch.
struct Scores {
  int64_t units, width;  // of a key; of a value, in whole vectors
  float scale, softcap;  // softcap 0 for none
  int64_t bias_columns;
  bool plain;  // a score is nothing but a product times `rest`
  float rest;  // what scores are still multiplied with before 2 is taken to their power
};

OCTAVO_INLINE int64_t rounded_up(int64_t size, int64_t to) { return (size + to - 1) / to * to; }

// acc[r][c] = sum over k of a[r][k] b[k][c], in the order of k.
template <class Form, int R, int C>
OCTAVO_INLINE void multiply(const Unit* a, int64_t a_row, const Unit* b, int64_t b_row, int64_t depth,
                            Vector (&acc)[R][C]) {
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = Vector{};
  for (int64_t k = 0; k < depth; ++k, b += b_row) {
    Vector right[C];
    for (int c = 0; c < C; ++c) right[c] = load(reinterpret_cast<const float*>(b) + c * WIDTH);
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) acc[r][c] = Form::add(acc[r][c], a[r * a_row + k], right[c]);
  }
}

OCTAVO_INLINE Integers places(int64_t first) {
  Integers v;
  for (int32_t i = 0; i < WIDTH; ++i) v[i] = i;
  return v + static_cast<int32_t>(first);
}

// Biases of WIDTH keys; columns beyond either end of a line take the end's.
OCTAVO_INLINE Vector biases(const float* line, int64_t column, int64_t columns) {
  if (column >= 0 && column + WIDTH <= columns) return load(line + column);
  if (column >= columns - 1) return all(line[columns - 1]);
  if (column + WIDTH <= 1) return all(line[0]);
  float found[WIDTH];
  for (int64_t i = 0; i < WIDTH; ++i) found[i] = line[smaller(larger(column + i, int64_t{0}), columns - 1)];
  return load(found);
}

// Scores of one query, from products: to the power of 2 they are weights. Returns the largest.
OCTAVO_INLINE float score(const Query& query, const Chunk& chunk, const Scores& how, float* scores) {
  const int64_t first = query.low / WIDTH, last = (query.high + WIDTH - 1) / WIDTH;
  Vector largest_so_far = all(LOWEST);
  for (int64_t at = first; at < last; ++at) {
    Vector score = load(scores + at * WIDTH);
    if (!how.plain) {
      score = score * how.scale;
      if (chunk.key_scales) score = score * load(chunk.key_scales + at * WIDTH);
      if (how.softcap != 0.0f) score = hyperbolic_tangent((score + query.centre) / how.softcap) * how.softcap;
      if (query.bias) score = score + biases(query.bias, query.bias_shift + at * WIDTH, how.bias_columns);
      score = score * LOG2_E;
    }
    if (at * WIDTH < query.low || (at + 1) * WIDTH > query.high) {
      const Integers place = places(at * WIDTH);
      const Vector hidden = all(-__builtin_inff());
      score = place >= static_cast<int32_t>(query.low) ? score : hidden;
      score = place < static_cast<int32_t>(query.high) ? score : hidden;
      store(scores + at * WIDTH, score);
    } else if (!how.plain) {
      store(scores + at * WIDTH, score);
    }
    largest_so_far = maximum(score, largest_so_far);
  }
  return largest(largest_so_far);
}

// Turns products [CHUNK] of one query into weights of the chunk's keys; returns the largest score and the sum of weights.
// Vectors are taken in pairs that begin at even ones, so that a sum depends on nothing but the keys that a query sees.
template <class Form>
__attribute__((noinline)) void weigh(const Query& query, const Chunk& chunk, const Scores& how, float* scores,
                                     Unit* weights, float* best, float* sum_of) {
  const int64_t first = query.low / WIDTH, last = (query.high + WIDTH - 1) / WIDTH;
  const float rest = how.rest, largest_score = score(query, chunk, how, scores) * rest;
  const float top = largest_score < LOWEST ? LOWEST : largest_score;  // where no key is seen
  Vector sums{};
  const auto weight = [&](int64_t at) {
    if (at < first || at >= last) return Vector{};
    return power_of_two<Form::HELD == 1>(fma(load(scores + at * WIDTH), all(rest), all(-top)));
  };
  const auto scaled = [&](Vector weight, int64_t at) {
    return at < chunk.first || at >= chunk.last ? weight : weight * load(chunk.value_scales + at * WIDTH);
  };
  for (int64_t at = chunk.first & ~int64_t{1}; at < chunk.last; at += 2) {
    const Vector one = weight(at), other = weight(at + 1);
    Unit* to = weights + at * WIDTH / Form::HELD;
    if (chunk.value_scales) {
      Form::put(to, scaled(one, at), scaled(other, at + 1));
      sums = sums + (one + other);
    } else {
      Form::put(to, one, other);
      sums = Form::add_all(sums, one, other);
    }
  }
  *best = top;
  *sum_of = sum(sums);
}

// How two sums that are taken relative to different maxima become one.
struct Merge {
  float before[WIDTH], added[WIDTH];

  // Merges the next `count` queries' maxima and sums into those of `to`.
  OCTAVO_INLINE_MEMBER void begin(float* to_best, float* to_total, const float* best, const float* sum_of,
                                  int64_t count) {
    const Vector was = read(to_best, count), is = read(best, count);
    const Vector now = is > was ? is : was;
    const Vector keep = power_of_two<true>(was - now), take = power_of_two<true>(is - now);
    write(to_total, fma(read(sum_of, count), take, read(to_total, count) * keep), count);
    write(to_best, now, count);
    store(before, keep);
    store(added, take);
  }

  OCTAVO_INLINE_MEMBER Vector both(Vector was, Vector is, int64_t query) const {
    return fma(is, all(added[query]), was * before[query]);
  }
};

// Keys and values that were packed.
template <class Form>
struct Packed {
  const Unit* keys;    // [units, CHUNK]
  const Unit* values;  // [CHUNK / held, width]
  int64_t units, width;

  // The vectors of keys that some of the queries see.
  static OCTAVO_INLINE_MEMBER Chunk narrowed(Chunk chunk, const Query* of, int64_t queries) {
    int64_t low = CHUNK, high = 0;
    for (int64_t i = 0; i < queries; ++i)
      if (of[i].high > of[i].low) low = smaller(low, of[i].low), high = larger(high, of[i].high);
    chunk.first = smaller(low, high) / WIDTH, chunk.last = (high + WIDTH - 1) / WIDTH;
    return chunk;
  }

  // Products of R queries and the keys of the vectors [first, last).
  template <int R>
  OCTAVO_INLINE_MEMBER void products(const Unit* queries, int64_t first, int64_t last, float (&to)[R][CHUNK]) const {
    int64_t at = first;
    const auto some = [&]<int C>(Vector(&acc)[R][C]) {
      multiply<Form>(queries, units, keys + at * WIDTH, CHUNK, units, acc);
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) store(&to[r][(at + c) * WIDTH], acc[r][c]);
      at += C;
    };
    while (at + COLUMNS <= last) {
      Vector acc[R][COLUMNS];
      some(acc);
    }
    while (at < last) {
      Vector acc[R][1];
      some(acc);
    }
  }

  // Calls done(column, sums) with the weighted sums of the same keys' values.
  template <int R, class Done>
  OCTAVO_INLINE_MEMBER void sums(const Unit (&weights)[R][CHUNK / Form::HELD], int64_t first, int64_t last,
                                 const Done& done) const {
    const int64_t begin = first * WIDTH / Form::HELD, depth = (last - first) * WIDTH / Form::HELD;
    int64_t column = 0;
    const auto some = [&]<int C>(Vector(&acc)[R][C]) {
      multiply<Form>(&weights[0][begin], CHUNK / Form::HELD, values + begin * width + column, width, depth, acc);
      done(column, acc);
      column += C * WIDTH;
    };
    while (column + COLUMNS * WIDTH <= width) {
      Vector acc[R][COLUMNS];
      some(acc);
    }
    while (column < width) {
      Vector acc[R][1];
      some(acc);
    }
  }
};

// R queries over a chunk of keys and values from a source. `kept`: the chunk's own result is written to `to`, otherwise
// it is merged into it.
template <class Form, int R, class Source>
OCTAVO_INLINE void attend_rows(const Unit* queries, const Query* of, const Source& source, const Chunk& chunk,
                               const Scores& how, const Running& to, bool kept) {
  alignas(64) float scores[R][CHUNK];
  alignas(64) Unit weights[R][CHUNK / Form::HELD];
  float best[WIDTH < R ? R : WIDTH], sums[WIDTH < R ? R : WIDTH];
  const Chunk seen = Source::narrowed(chunk, of, R);
  source.template products<R>(queries, seen.first, seen.last, scores);
  for (int r = 0; r < R; ++r) weigh<Form>(of[r], seen, how, scores[r], weights[r], best + r, sums + r);

  Merge merge[(R + WIDTH - 1) / WIDTH];
  if (kept) {
    for (int r = 0; r < R; ++r) to.best[r] = best[r], to.total[r] = sums[r];
  } else {
    for (int64_t r = 0; r < R; r += WIDTH)
      merge[r / WIDTH].begin(to.best + r, to.total + r, best + r, sums + r, smaller(R - r, WIDTH));
  }
  source.template sums<R>(weights, seen.first, seen.last, [&]<int C>(int64_t column, const Vector(&acc)[R][C]) {
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) {
        float* place = to.sums + r * how.width + column + c * WIDTH;
        store(place, kept ? acc[r][c] : merge[r / WIDTH].both(load(place), acc[r][c], r % WIDTH));
      }
  });
}

// All queries of a tile over a chunk, in blocks of much the same size, of at most MOST queries.
template <class Form, int MOST, class Source>
OCTAVO_INLINE void attend_chunk(const Unit* queries, const Query* of, int64_t count, const Source& source,
                                const Chunk& chunk, const Scores& how, const Running& to, bool kept) {
  int64_t some;
  for (int64_t row = 0; row < count; row += some) {
    const int64_t left = count - row, blocks = (left + MOST - 1) / MOST;
    some = (left + blocks - 1) / blocks;
    const Unit* units = queries + row * how.units;
    const Running own{to.best + row, to.total + row, to.sums + row * how.width};
    const auto attend = [&]<int R>(Rows<R>) {
      if constexpr (R <= MOST) attend_rows<Form, R>(units, of + row, source, chunk, how, own, kept);
    };
    switch (some) {
      case 1: attend(Rows<1>{}); break;
      case 2: attend(Rows<2>{}); break;
      case 3: attend(Rows<3>{}); break;
      case 4: attend(Rows<4>{}); break;
      case 5: attend(Rows<5>{}); break;
      case 6: attend(Rows<6>{}); break;
      case 7: attend(Rows<7>{}); break;
      default: attend(Rows<8>{});
    }
  }
}

// Merges one more chunk's own result.
OCTAVO_INLINE void merge_chunk(const Running& to, const Running& chunk, int64_t count, int64_t width) {
  for (int64_t row = 0; row < count; row += WIDTH) {
    const int64_t some = smaller(count - row, WIDTH);
    Merge merge;
    merge.begin(to.best + row, to.total + row, chunk.best + row, chunk.total + row, some);
    for (int64_t r = 0; r < some; ++r)
      for (int64_t column = 0; column < width; column += WIDTH) {
        float* place = to.sums + (row + r) * width + column;
        store(place, merge.both(load(place), load(chunk.sums + (row + r) * width + column), r));
      }
  }
}

}  // namespace
}  // namespace octavo

// Operations that carry a state from token to token: each row's is read from one slot and written to others.
//
// Every token takes one step of the recurrence, in float32, so that what a row's tokens get does not depend on how they
// are divided into steps, nor on what runs beside them.
#pragma once

#include "functions.h"
#include "threads.h"

namespace octavo {

// A layer's slots, the first of which is zeros and never written.
struct StateMemory {
  float* slots;
  int64_t size;  // numbers of a slot
};

// Of a step's rows the slots that each reads and writes; a snapshot is of the state after its first `afters` tokens, and
// 0 for none. Where they are null, states begin as zeros and are not kept.
struct StateRows {
  const int32_t *sources, *targets, *snapshots, *afters;
  const int32_t* starts;  // [rows + 1] first token of each
  int64_t rows;
};

// What is made of a convolution: silu(convolution(x)), b * convolution(a * values) of x = [a | b | values], or itself.
enum Form : int64_t { SILU = 0, GATED = 1, PLAIN = 2 };

template <class T>
struct Convolved {
  const T* x;
  T* out;
  const float *weight, *bias;  // [taps, width]; [width], or null
  int64_t x_stride, out_stride, width, taps, form;
};

template <class T>
OCTAVO_INLINE void convolve_part(const Convolved<T>& c, const StateMemory& memory, const StateRows& r, int thread,
                                 int threads) {
  constexpr int64_t PIECE = 64;
  const Share own = share(c.width, thread, threads, PIECE);
  const int64_t kept = c.taps - 1, size = own.last - own.first;
  if (size <= 0) return;
  for (int64_t row = 0; row < r.rows; ++row) {
    const int64_t start = r.starts[row], count = r.starts[row + 1] - start;
    const float* before = r.sources ? memory.slots + r.sources[row] * memory.size : nullptr;
    // The input of a token, or of one before the row's first, which the state has.
    const auto input = [&](auto v, int64_t token) -> Vector {
      if (token < 0) return before ? v.read(before + (kept + token) * c.width + own.first) : Vector{};
      const T* x = c.x + (start + token) * c.x_stride + own.first;
      if (c.form != GATED) return v.read(x);
      return rounded(v.read(x) * v.read(x + 2 * c.width), x);
    };
    for (int64_t token = 0; token < count; ++token) {
      T* out = c.out + (start + token) * c.out_stride + own.first;
      const T* x = c.x + (start + token) * c.x_stride + own.first;
      each(size, [&](auto v) {
        Vector total = input(v, token - kept) * v.read(c.weight + own.first);
        for (int64_t tap = 1; tap < c.taps; ++tap)
          total = total + input(v, token - kept + tap) * v.read(c.weight + tap * c.width + own.first);
        if (c.bias) total = total + v.read(c.bias + own.first);
        total = rounded(total, out);
        if (c.form == SILU) total = total / (1.0f + exponential(-total));
        v.write(out, c.form == GATED ? total * v.read(x + c.width) : total);
      });
    }
    if (!r.sources) continue;
    const auto keep = [&](int64_t slot, int64_t tokens) {
      float* after = memory.slots + slot * memory.size + own.first;
      for (int64_t place = 0; place < kept; ++place, after += c.width)
        each(size, [&](auto v) { v.write(after, input(v, tokens - kept + place)); });
    };
    if (r.snapshots[row]) keep(r.snapshots[row], r.afters[row]);
    keep(r.targets[row], count);
  }
}

// The gated delta rule: of each value head a matrix S [key_dim, value_dim], and for each token
//   S = d * S; S = S + k * (b * (v - k S)); out = q S
// d is a number, or one for each row of S. Columns do not depend on each other, so that threads share heads and pieces of
// their columns.
template <class T>
struct Delta {
  const T* x;      // queries and keys of each key head, values of each value head
  const T* rates;  // of each value head the number that b is `most` times the sigmoid of, then the one that d follows from
  const T* fading;  // of each value head and feature of a key the number that d follows from; null: they are in `rates`
  const T* opening;
  T* out;
  const float *decay, *offset, *norm;  // [value_heads]; [value_heads], or [value_heads, key_dim]; [value_dim]
  int64_t x_stride, rates_stride, fading_stride, opening_stride, out_stride, begin, key_heads, value_heads, key_dim,
      value_dim, alternate, logistic;  // logistic: gates are the sigmoid of openings, and not silu
  float eps, most;
};

template <class T>
OCTAVO_INLINE float number(const T* from) {
  return load_part(from, 1)[0];
}

// log(1 + e^x); error at most 3.
OCTAVO_INLINE Vector soft_plus(Vector x) {
  // log(1 + y) = 2 artanh(z) of z = y / (2 + y), at most 1/3, in powers of z².
  constexpr float REST[] = {2.0f, 2.0f / 3, 2.0f / 5, 2.0f / 7, 2.0f / 9, 2.0f / 11, 2.0f / 13, 2.0f / 15};
  const Vector y = exponential(-magnitude(x)), z = y / (2.0f + y);
  return maximum(x, Vector{}) + z * polynomial(z * z, REST);
}

// q or k as float32, of length `length`.
template <class T>
OCTAVO_INLINE void unit(const T* from, float* to, int64_t size, float length) {
  const float squares = total(size, [&](auto v, Vector before) {
    const Vector value = v.read(from);
    return fma(value, value, before);
  });
  const float scale = length / __builtin_sqrtf(squares + 1e-6f);
  each(size, [&](auto v) { v.write(to, v.read(from) * scale); });
}

constexpr int64_t LONGEST_KEY = 256;
constexpr int64_t COLUMNS = 4;  // vectors of a piece
constexpr int64_t PIECE_COLUMNS = COLUMNS * WIDTH;

// A piece of the columns of a matrix, in memory with rows of `stride`. Columns that are missing are 0.
struct Columns {
  int64_t size, stride;

  template <class T>
  OCTAVO_INLINE_MEMBER Vector read(const T* from, int64_t n) const {
    const int64_t left = size - n * WIDTH;
    return left >= WIDTH ? load(from + n * WIDTH) : left > 0 ? load_part(from + n * WIDTH, left) : Vector{};
  }
  template <class T>
  OCTAVO_INLINE_MEMBER void write(T* to, int64_t n, Vector v) const {
    const int64_t left = size - n * WIDTH;
    if (left >= WIDTH)
      store(to + n * WIDTH, v);
    else if (left > 0)
      store_part(to + n * WIDTH, v, left);
  }
};

// FADING: rows of a matrix decay each at a rate of its own.
template <bool FADING, class T>
OCTAVO_INLINE void delta_part(const Delta<T>& d, const StateMemory& memory, const StateRows& r, int thread,
                              int threads) {
  const int64_t pieces = (d.value_dim + PIECE_COLUMNS - 1) / PIECE_COLUMNS;
  const Share own = share(d.value_heads * pieces, thread, threads);
  const int64_t widths = d.key_heads * d.key_dim, shared = d.value_heads / d.key_heads;
  const float length = 1.0f / __builtin_sqrtf(static_cast<float>(d.key_dim));
  float query[LONGEST_KEY], key[LONGEST_KEY], last_key[LONGEST_KEY], decays[LONGEST_KEY], last_decays[LONGEST_KEY];
  Vector matrix[LONGEST_KEY][COLUMNS];
  for (int64_t piece = own.first; piece < own.last; ++piece) {
    const int64_t head = piece / pieces, column = piece % pieces * PIECE_COLUMNS;
    const int64_t key_head = d.alternate ? head % d.key_heads : head / shared;
    const Columns columns{smaller(PIECE_COLUMNS, d.value_dim - column), d.value_dim};
    const int64_t place = d.begin + head * d.key_dim * d.value_dim + column;
    for (int64_t row = 0; row < r.rows; ++row) {
      const float* before = r.sources ? memory.slots + r.sources[row] * memory.size + place : nullptr;
      for (int64_t i = 0; i < d.key_dim; ++i)
        for (int64_t n = 0; n < COLUMNS; ++n)
          matrix[i][n] = before ? columns.read(before + i * d.value_dim, n) : Vector{};
      // The last token's change is made when the next one reads the matrix, so that each token passes over it once.
      Vector change[COLUMNS]{}, decay = all(1.0f);
      const auto decay_of = [&](int64_t i) { return FADING ? all(last_decays[i]) : decay; };
      for (int64_t i = 0; i < d.key_dim; ++i) last_key[i] = 0.0f, last_decays[i] = 1.0f;
      const auto keep = [&](int64_t slot) {
        float* after = memory.slots + slot * memory.size + place;
        for (int64_t i = 0; i < d.key_dim; ++i)
          for (int64_t n = 0; n < COLUMNS; ++n)
            columns.write(after + i * d.value_dim, n, fma(all(last_key[i]), change[n], matrix[i][n] * decay_of(i)));
      };
      for (int64_t token = r.starts[row]; token < r.starts[row + 1]; ++token) {
        const T* x = d.x + token * d.x_stride;
        unit(x + key_head * d.key_dim, query, d.key_dim, length);
        unit(x + widths + key_head * d.key_dim, key, d.key_dim, 1.0f);
        if (FADING) {
          const T* fading = d.fading + token * d.fading_stride + head * d.key_dim;
          const float* offset = d.offset + head * d.key_dim;
          each(d.key_dim, [&](auto v) {
            v.write(decays, exponential(-d.decay[head] * soft_plus(v.read(fading) + v.read(offset))));
          });
        }
        Vector known[COLUMNS]{}, result[COLUMNS]{};
        for (int64_t i = 0; i < d.key_dim; ++i) {
          // What this token reads of a row has decayed at its rate; the row itself does so when the next one reads it.
          const float left = FADING ? decays[i] : 1.0f;
          const Vector was = all(last_key[i]), now = all(key[i] * left), asked = all(query[i] * left), kept = decay_of(i);
          for (int64_t n = 0; n < COLUMNS; ++n) {
            const Vector value = fma(was, change[n], matrix[i][n] * kept);
            matrix[i][n] = value;
            known[n] = fma(value, now, known[n]);
            result[n] = fma(value, asked, result[n]);
          }
        }
        const T* rates = d.rates + token * d.rates_stride + head;
        const Vector part = all(logistic(all(number(rates)))[0] * d.most);
        if (!FADING)
          decay = exponential(-d.decay[head] * soft_plus(all(number(rates + d.value_heads) + d.offset[head])));
        const Vector match = all(total(d.key_dim, [&](auto v, Vector sum) {
          return fma(v.read(query), v.read(key), sum);
        }));
        const T* values = x + 2 * widths + head * d.value_dim + column;
        T* out = d.out + token * d.out_stride + head * d.value_dim + column;
        for (int64_t n = 0; n < COLUMNS; ++n) {
          change[n] = (columns.read(values, n) - known[n] * decay) * part;
          columns.write(out, n, fma(match, change[n], result[n] * decay));
        }
        for (int64_t i = 0; i < d.key_dim; ++i) {
          last_key[i] = key[i];
          if (FADING) last_decays[i] = decays[i];
        }
        if (r.sources && r.snapshots[row] && token + 1 - r.starts[row] == r.afters[row]) keep(r.snapshots[row]);
      }
      if (r.sources) keep(r.targets[row]);
    }
  }
}

// out = norm(out) of each head, times silu(opening), or the sigmoid: then it is rounded once.
template <class T>
OCTAVO_INLINE void delta_norm_part(const Delta<T>& d, int64_t tokens, int thread, int threads) {
  const Share own = share(tokens * d.value_heads, thread, threads);
  for (int64_t piece = own.first; piece < own.last; ++piece) {
    const int64_t token = piece / d.value_heads, head = piece % d.value_heads;
    T* out = d.out + token * d.out_stride + head * d.value_dim;
    const T* opening = d.opening + token * d.opening_stride + head * d.value_dim;
    const float squares = total(d.value_dim, [&](auto v, Vector before) {
      const Vector value = v.read(out);
      return fma(value, value, before);
    });
    const Vector scale = all(1.0f / __builtin_sqrtf(squares / static_cast<float>(d.value_dim) + d.eps));
    each(d.value_dim, [&](auto v) {
      const Vector gate = v.read(opening), scaled = v.read(out) * scale;
      if (d.logistic) return v.write(out, scaled * v.read(d.norm) * logistic(gate));
      const Vector normed = rounded(rounded(scaled, out) * v.read(d.norm), out);
      v.write(out, normed * (gate / (1.0f + exponential(-gate))));
    });
  }
}

}  // namespace octavo

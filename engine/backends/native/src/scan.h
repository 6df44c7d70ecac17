// The selective scan of Mamba-2: of each head a matrix S [size, head_dim], and for each token
//   S = e^(-t a) S + B (t x); out = C S + d x
// Columns do not depend on each other, so that threads share heads and pieces of their columns. What a token adds does
// not depend on S: several tokens pass over a row of S while it is in registers, each in its turn, so that every number
// takes the same steps however a prompt is divided.
#pragma once

#include "states.h"

namespace octavo {

template <class T>
struct Scan {
  const T* x;      // x of each head, B of each group, C of each group
  const T* rates;  // of each head the number that t follows from; null: t is 1
  const T* opening;  // null: neither gates nor a norm
  T* out;
  const float *decay, *offset, *skip, *norm;  // [heads] each; norm: [heads * head_dim], or null
  int64_t x_stride, rates_stride, opening_stride, out_stride, begin, heads, head_dim, groups, size, norm_first;
  float eps;
};

constexpr int64_t SCAN_COLUMNS = 2;  // vectors of a piece
constexpr int64_t SCAN_PIECE = SCAN_COLUMNS * WIDTH;
constexpr int64_t SCAN_TOKENS = 4;  // that pass over a matrix at once

// Some tokens of a row, in a piece of a head's columns.
template <int64_t TOKENS, class T>
OCTAVO_INLINE void scan_tokens(const Scan<T>& s, int64_t head, int64_t column, const Columns& columns, int64_t token,
                               Vector (&matrix)[LONGEST_KEY][SCAN_COLUMNS]) {
  const int64_t width = s.heads * s.head_dim, group = head / (s.heads / s.groups);
  float before[TOKENS][LONGEST_KEY], after[TOKENS][LONGEST_KEY];
  Vector decay[TOKENS], added[TOKENS][SCAN_COLUMNS], result[TOKENS][SCAN_COLUMNS]{};
  for (int64_t t = 0; t < TOKENS; ++t) {
    const T* x = s.x + (token + t) * s.x_stride;
    const T *from = x + width + group * s.size, *to = from + s.groups * s.size;
    each(s.size, [&](auto v) {
      v.write(before[t], v.read(from));
      v.write(after[t], v.read(to));
    });
    Vector step = all(1.0f);
    if (s.rates) step = soft_plus(all(number(s.rates + (token + t) * s.rates_stride + head) + s.offset[head]));
    decay[t] = exponential(-s.decay[head] * step);
    for (int64_t n = 0; n < SCAN_COLUMNS; ++n)
      added[t][n] = columns.read(x + head * s.head_dim + column, n) * all(step[0]);
  }
  for (int64_t i = 0; i < s.size; ++i) {
    for (int64_t n = 0; n < SCAN_COLUMNS; ++n) {
      Vector value = matrix[i][n];
#pragma GCC unroll 4
      for (int64_t t = 0; t < TOKENS; ++t) {
        value = fma(all(before[t][i]), added[t][n], value * decay[t]);
        result[t][n] = fma(all(after[t][i]), value, result[t][n]);
      }
      matrix[i][n] = value;
    }
  }
  for (int64_t t = 0; t < TOKENS; ++t) {
    const T* x = s.x + (token + t) * s.x_stride + head * s.head_dim + column;
    T* out = s.out + (token + t) * s.out_stride + head * s.head_dim + column;
    for (int64_t n = 0; n < SCAN_COLUMNS; ++n)
      columns.write(out, n, fma(all(s.skip[head]), columns.read(x, n), result[t][n]));
  }
}

template <class T>
OCTAVO_INLINE void scan_part(const Scan<T>& s, const StateMemory& memory, const StateRows& r, int thread, int threads) {
  const int64_t pieces = (s.head_dim + SCAN_PIECE - 1) / SCAN_PIECE;
  const Share own = share(s.heads * pieces, thread, threads);
  Vector matrix[LONGEST_KEY][SCAN_COLUMNS];
  for (int64_t piece = own.first; piece < own.last; ++piece) {
    const int64_t head = piece / pieces, column = piece % pieces * SCAN_PIECE;
    const Columns columns{smaller(SCAN_PIECE, s.head_dim - column), s.head_dim};
    const int64_t place = s.begin + head * s.size * s.head_dim + column;
    for (int64_t row = 0; row < r.rows; ++row) {
      const float* known = r.sources ? memory.slots + r.sources[row] * memory.size + place : nullptr;
      for (int64_t i = 0; i < s.size; ++i)
        for (int64_t n = 0; n < SCAN_COLUMNS; ++n)
          matrix[i][n] = known ? columns.read(known + i * s.head_dim, n) : Vector{};
      const auto keep = [&](int64_t slot) {
        float* left = memory.slots + slot * memory.size + place;
        for (int64_t i = 0; i < s.size; ++i)
          for (int64_t n = 0; n < SCAN_COLUMNS; ++n) columns.write(left + i * s.head_dim, n, matrix[i][n]);
      };
      const auto advance = [&](int64_t first, int64_t end) {
        int64_t token = first;
        for (; token + SCAN_TOKENS <= end; token += SCAN_TOKENS)
          scan_tokens<SCAN_TOKENS>(s, head, column, columns, token, matrix);
        for (; token < end; ++token) scan_tokens<1>(s, head, column, columns, token, matrix);
      };
      const int64_t start = r.starts[row], end = r.starts[row + 1];
      const int64_t middle = r.sources && r.snapshots[row] ? start + r.afters[row] : start;
      advance(start, middle);
      if (middle > start) keep(r.snapshots[row]);
      advance(middle, end);
      if (r.sources) keep(r.targets[row]);
    }
  }
}

// out = norm(silu(opening) * out), or silu(opening) * norm(out), in groups.
template <class T>
OCTAVO_INLINE void scan_norm_part(const Scan<T>& s, int64_t tokens, int thread, int threads) {
  const Share own = share(tokens * s.groups, thread, threads);
  const int64_t size = s.heads * s.head_dim / s.groups;
  for (int64_t piece = own.first; piece < own.last; ++piece) {
    const int64_t token = piece / s.groups, begin = piece % s.groups * size;
    T* out = s.out + token * s.out_stride + begin;
    const T* opening = s.opening + token * s.opening_stride + begin;
    const auto opened = [&](auto v) {
      const Vector gate = v.read(opening);
      return v.read(out) * (gate / (1.0f + exponential(-gate)));
    };
    if (!s.norm) {
      each(size, [&](auto v) { v.write(out, opened(v)); });
      continue;
    }
    const auto value = [&](auto v) { return s.norm_first ? v.read(out) : opened(v); };
    const float squares = total(size, [&](auto v, Vector before) {
      const Vector one = v.kept(value(v));
      return fma(one, one, before);
    });
    const Vector scale = all(1.0f / __builtin_sqrtf(squares / static_cast<float>(size) + s.eps));
    each(size, [&](auto v) {
      const Vector normed = rounded(rounded(value(v) * scale, out) * v.read(s.norm + begin), out);
      if (!s.norm_first) return v.write(out, normed);
      const Vector gate = v.read(opening);
      v.write(out, normed * (gate / (1.0f + exponential(-gate))));
    });
  }
}

}  // namespace octavo

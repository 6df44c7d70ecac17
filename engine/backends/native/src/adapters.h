// Low-rank additions to a product: y += up * (down * x), each token with the adapter of its slot.
//
// Tokens come in runs of equal slots, so that a block of them shares what is read of an adapter. Each number is added up
// in one order, whatever block its token is in: bits do not depend on the other tokens.
#pragma once

#include "threads.h"
#include "vector.h"

namespace octavo {

// Some ranks of an adapter, whose changes reach the same outputs.
struct LowRank {
  const void* down;  // [rank, inputs]
  const void* up;    // [panels, rank, PANEL]: PANEL outputs side by side, zeros after the last one
  int64_t down_wide, up_wide, rank, first, outputs;  // wide: float32, else bfloat16; outputs from `first` on
};

struct AdapterSlot {
  const LowRank* parts;
  int64_t count;
};

// Tokens that follow each other and have one slot.
struct Run {
  int64_t first, count, slot;
};

namespace adapters {

constexpr int64_t PANEL = 64;
#if defined(__AVX512F__)
constexpr int64_t BLOCK = 4, EXPANDED = 4;  // tokens at a time
#else
constexpr int64_t BLOCK = 2, EXPANDED = 1;
#endif
constexpr int64_t RANKS = 8;  // that a thread takes at a time

template <int64_t ROWS, int64_t COUNT, class T, class W>
OCTAVO_INLINE void dots(const T* x, int64_t stride, const W* down, int64_t inputs, float* thin, int64_t thin_stride) {
  Vector sums[ROWS][COUNT] = {};
  each(inputs, [&](auto v) {
    Vector weights[COUNT];
    for (int64_t rank = 0; rank < COUNT; ++rank) weights[rank] = v.read(down + rank * inputs);
    for (int64_t row = 0; row < ROWS; ++row) {
      const Vector values = v.read(x + row * stride);
      for (int64_t rank = 0; rank < COUNT; ++rank) sums[row][rank] = fma(values, weights[rank], sums[row][rank]);
    }
  });
  for (int64_t row = 0; row < ROWS; ++row)
    for (int64_t rank = 0; rank < COUNT; ++rank) thin[row * thin_stride + rank] = sum(sums[row][rank]);
}

// thin[row][rank] of `ranks` ranks, at most RANKS.
template <int64_t ROWS, class T, class W>
OCTAVO_INLINE void shrink(const T* x, int64_t stride, const W* down, int64_t inputs, int64_t ranks, float* thin,
                          int64_t thin_stride) {
  int64_t rank = 0;
  if (ROWS == 1 && ranks == RANKS) return dots<ROWS, RANKS>(x, stride, down, inputs, thin, thin_stride);
  for (; rank + 4 <= ranks; rank += 4) dots<ROWS, 4>(x, stride, down + rank * inputs, inputs, thin + rank, thin_stride);
  for (; rank < ranks; ++rank) dots<ROWS, 1>(x, stride, down + rank * inputs, inputs, thin + rank, thin_stride);
}

// y[row] += up * thin[row], of one panel.
template <int64_t ROWS, class T, class W>
OCTAVO_INLINE void expand(const float* thin, int64_t thin_stride, const W* up, int64_t rank, T* y, int64_t stride,
                          int64_t outputs) {
  constexpr int64_t VECTORS = PANEL / WIDTH;
  Vector sums[ROWS][VECTORS] = {};
  for (int64_t r = 0; r < rank; ++r, up += PANEL)
    for (int64_t i = 0; i < VECTORS; ++i) {
      const Vector weights = load(up + i * WIDTH);
      for (int64_t row = 0; row < ROWS; ++row) sums[row][i] = fma(all(thin[row * thin_stride + r]), weights, sums[row][i]);
    }
  for (int64_t row = 0; row < ROWS; ++row) {
    T* out = y + row * stride;
    if (outputs >= PANEL) {
      for (int64_t i = 0; i < VECTORS; ++i) store(out + i * WIDTH, load(out + i * WIDTH) + sums[row][i]);
      continue;
    }
    float rest[PANEL];
    for (int64_t i = 0; i < VECTORS; ++i) store(rest + i * WIDTH, sums[row][i]);
    each(outputs, [&](auto v) { v.write(out, v.read(out) + v.read(rest)); });
  }
}

// Calls body(part, first rank of the part, first token, tokens) for blocks of at most `block` tokens.
template <class Body>
OCTAVO_INLINE void each_block(const Run* runs, int64_t count, const AdapterSlot* slots, int64_t block, const Body& body) {
  for (int64_t i = 0; i < count; ++i) {
    const AdapterSlot& slot = slots[runs[i].slot];
    int64_t before = 0;
    for (int64_t p = 0; p < slot.count; before += slot.parts[p++].rank)
      for (int64_t row = 0; row < runs[i].count; row += block)
        body(slot.parts[p], before, runs[i].first + row, smaller(block, runs[i].count - row));
  }
}

template <class T, class W>
OCTAVO_INLINE void shrink_rows(const T* x, int64_t stride, const W* down, int64_t inputs, int64_t ranks, float* thin,
                               int64_t thin_stride, int64_t rows) {
  if (rows == BLOCK) return shrink<BLOCK>(x, stride, down, inputs, ranks, thin, thin_stride);
  for (int64_t row = 0; row < rows; ++row)
    shrink<1>(x + row * stride, stride, down, inputs, ranks, thin + row * thin_stride, thin_stride);
}

template <class T, class W>
OCTAVO_INLINE void expand_rows(const float* thin, int64_t thin_stride, const W* up, int64_t rank, T* y, int64_t stride,
                               int64_t outputs, int64_t rows) {
  if (rows == EXPANDED) return expand<EXPANDED>(thin, thin_stride, up, rank, y, stride, outputs);
  for (int64_t row = 0; row < rows; ++row)
    expand<1>(thin + row * thin_stride, thin_stride, up, rank, y + row * stride, stride, outputs);
}

// A thread's share of thin = down * x.
template <class T>
void shrink_part(const Run* runs, int64_t count, const AdapterSlot* slots, const T* x, int64_t stride, int64_t inputs,
                 float* thin, int64_t thin_stride, int thread, int threads) {
  int64_t unit = 0;
  each_block(runs, count, slots, BLOCK, [&](const LowRank& part, int64_t before, int64_t row, int64_t rows) {
    for (int64_t rank = 0; rank < part.rank; rank += RANKS) {
      if (unit++ % threads != thread) continue;
      const int64_t ranks = smaller(RANKS, part.rank - rank);
      const T* from = x + row * stride;
      float* to = thin + row * thin_stride + before + rank;
      if (part.down_wide)
        shrink_rows(from, stride, static_cast<const float*>(part.down) + rank * inputs, inputs, ranks, to, thin_stride, rows);
      else
        shrink_rows(from, stride, static_cast<const bfloat16*>(part.down) + rank * inputs, inputs, ranks, to, thin_stride, rows);
    }
  });
}

// A thread's share of y += up * thin.
template <class T>
void expand_part(const Run* runs, int64_t count, const AdapterSlot* slots, const float* thin, int64_t thin_stride, T* y,
                 int64_t stride, int thread, int threads) {
  int64_t unit = 0;
  each_block(runs, count, slots, EXPANDED, [&](const LowRank& part, int64_t before, int64_t row, int64_t rows) {
    for (int64_t panel = 0; panel * PANEL < part.outputs; ++panel) {
      if (unit++ % threads != thread) continue;
      const int64_t outputs = smaller(PANEL, part.outputs - panel * PANEL), place = panel * part.rank * PANEL;
      const float* from = thin + row * thin_stride + before;
      T* to = y + row * stride + part.first + panel * PANEL;
      if (part.up_wide)
        expand_rows(from, thin_stride, static_cast<const float*>(part.up) + place, part.rank, to, stride, outputs, rows);
      else
        expand_rows(from, thin_stride, static_cast<const bfloat16*>(part.up) + place, part.rank, to, stride, outputs, rows);
    }
  });
}

}  // namespace adapters
}  // namespace octavo

// Low-rank additions to a product: y += up * (down * x), each token with the adapter of its slot.
//
// Tokens come in runs of equal slots, so that a block of them shares what is read of an adapter. Each number is added up
// in one order, whatever block its token is in: bits do not depend on the other tokens.
#pragma once

#include "half.h"
#include "threads.h"

namespace octavo {

// How numbers are stored; those of adapters.py.
enum NumberFormat : int64_t { NUMBER_F32 = 0, NUMBER_BF16 = 1, NUMBER_F16 = 2 };

// Some ranks of an adapter, whose changes reach the same outputs.
struct LowRank {
  const void* down;  // [rank, inputs]
  const void* up;    // [panels, rank, PANEL]: PANEL outputs side by side, zeros after the last one
  int64_t down_format, up_format, rank, first, outputs;  // outputs from `first` on
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
constexpr int64_t BLOCK = REGISTERS == 32 ? 4 : 2, EXPANDED = REGISTERS == 32 ? 4 : 1;  // tokens at a time
constexpr int64_t RANKS = 8;    // of `down`, that a thread takes at a time
constexpr int64_t TAKEN = 64;   // rows of panels of `up`, likewise

// Asks for some lines of 64 bytes of what a thread reads next.
template <int64_t LINES>
OCTAVO_INLINE void ask(const void* next, int64_t turn) {
  const char* from = static_cast<const char*>(next) + turn * LINES * 64;
  for (int64_t line = 0; line < LINES; ++line) __builtin_prefetch(from + line * 64, 0, 2);
}

template <int64_t ROWS, int64_t COUNT, class T, class W>
OCTAVO_INLINE void dots(const T* x, int64_t stride, const W* down, int64_t inputs, float* thin, int64_t thin_stride,
                        const void* next) {
  Vector sums[ROWS][COUNT] = {};
  each(inputs, [&](auto v) {
    ask<(COUNT * WIDTH * static_cast<int64_t>(sizeof(W)) + 63) / 64>(next, v.at / WIDTH);
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
                          int64_t thin_stride, const W* next) {
  int64_t rank = 0;
  if (ROWS == 1 && ranks == RANKS) return dots<ROWS, RANKS>(x, stride, down, inputs, thin, thin_stride, next);
  for (; rank + 4 <= ranks; rank += 4)
    dots<ROWS, 4>(x, stride, down + rank * inputs, inputs, thin + rank, thin_stride, next + rank * inputs);
  for (; rank < ranks; ++rank)
    dots<ROWS, 1>(x, stride, down + rank * inputs, inputs, thin + rank, thin_stride, next + rank * inputs);
}

// y[row] += up * thin[row], of one panel.
template <int64_t ROWS, class T, class W>
OCTAVO_INLINE void expand(const float* thin, int64_t thin_stride, const W* up, int64_t rank, T* y, int64_t stride,
                          int64_t outputs, const W* next) {
  constexpr int64_t VECTORS = PANEL / WIDTH;
  Vector sums[ROWS][VECTORS] = {};
  for (int64_t r = 0; r < rank; ++r, up += PANEL) {
    ask<PANEL * static_cast<int64_t>(sizeof(W)) / 64>(next, r);
    for (int64_t i = 0; i < VECTORS; ++i) {
      const Vector weights = load(up + i * WIDTH);
      for (int64_t row = 0; row < ROWS; ++row) sums[row][i] = fma(all(thin[row * thin_stride + r]), weights, sums[row][i]);
    }
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

// What a thread does at a time: for `rows` tokens from `row` on, `count` ranks or panels of a part from `first` on.
struct Unit {
  const LowRank* part;
  int64_t before, row, rows, first, count;
};

// Does units one by one, each with the place of what the next one reads.
template <class Do>
struct Ahead {
  const Do& carry_out;
  Unit waiting{};

  OCTAVO_INLINE_MEMBER void add(const Unit& unit) {
    if (waiting.part) carry_out(waiting, unit);
    waiting = unit;
  }
  OCTAVO_INLINE_MEMBER void end() {
    if (waiting.part) carry_out(waiting, waiting);
  }
};

template <class T, class W>
OCTAVO_INLINE void shrink_unit(const Unit& unit, const Unit& next, const T* x, int64_t stride, int64_t inputs, float* thin,
                               int64_t thin_stride) {
  const W* from = static_cast<const W*>(unit.part->down) + unit.first * inputs;
  const W* ahead = static_cast<const W*>(next.part->down) + next.first * inputs;
  x += unit.row * stride, thin += unit.row * thin_stride + unit.before + unit.first;
  if (unit.rows == BLOCK) return shrink<BLOCK>(x, stride, from, inputs, unit.count, thin, thin_stride, ahead);
  for (int64_t row = 0; row < unit.rows; ++row)
    shrink<1>(x + row * stride, stride, from, inputs, unit.count, thin + row * thin_stride, thin_stride, ahead);
}

template <class T, class W>
OCTAVO_INLINE void expand_unit(const Unit& unit, const Unit& next, const float* thin, int64_t thin_stride, T* y,
                               int64_t stride) {
  const LowRank& part = *unit.part;
  const W* ahead = static_cast<const W*>(next.part->up) + next.first * next.part->rank * PANEL;
  thin += unit.row * thin_stride + unit.before, y += unit.row * stride + part.first;
  for (int64_t panel = unit.first; panel < unit.first + unit.count; ++panel, ahead += part.rank * PANEL) {
    const W* from = static_cast<const W*>(part.up) + panel * part.rank * PANEL;
    const int64_t at = panel * PANEL, outputs = smaller(PANEL, part.outputs - at);
    if (unit.rows == EXPANDED) {
      expand<EXPANDED>(thin, thin_stride, from, part.rank, y + at, stride, outputs, ahead);
      continue;
    }
    for (int64_t row = 0; row < unit.rows; ++row)
      expand<1>(thin + row * thin_stride, thin_stride, from, part.rank, y + row * stride + at, stride, outputs, ahead);
  }
}

// A thread's share of thin = down * x.
template <class T>
void shrink_part(const Run* runs, int64_t count, const AdapterSlot* slots, const T* x, int64_t stride, int64_t inputs,
                 float* thin, int64_t thin_stride, int thread, int threads) {
  const auto carry_out = [&](const Unit& unit, const Unit& next) {
    switch (unit.part->down_format) {
      case NUMBER_F32: return shrink_unit<T, float>(unit, next, x, stride, inputs, thin, thin_stride);
      case NUMBER_F16: return shrink_unit<T, float16>(unit, next, x, stride, inputs, thin, thin_stride);
      default: return shrink_unit<T, bfloat16>(unit, next, x, stride, inputs, thin, thin_stride);
    }
  };
  Ahead<decltype(carry_out)> units{carry_out};
  int64_t number = 0;
  each_block(runs, count, slots, BLOCK, [&](const LowRank& part, int64_t before, int64_t row, int64_t rows) {
    for (int64_t rank = 0; rank < part.rank; rank += RANKS)
      if (number++ % threads == thread) units.add({&part, before, row, rows, rank, smaller(RANKS, part.rank - rank)});
  });
  units.end();
}

// A thread's share of y += up * thin.
template <class T>
void expand_part(const Run* runs, int64_t count, const AdapterSlot* slots, const float* thin, int64_t thin_stride, T* y,
                 int64_t stride, int thread, int threads) {
  const auto carry_out = [&](const Unit& unit, const Unit& next) {
    switch (unit.part->up_format) {
      case NUMBER_F32: return expand_unit<T, float>(unit, next, thin, thin_stride, y, stride);
      case NUMBER_F16: return expand_unit<T, float16>(unit, next, thin, thin_stride, y, stride);
      default: return expand_unit<T, bfloat16>(unit, next, thin, thin_stride, y, stride);
    }
  };
  Ahead<decltype(carry_out)> units{carry_out};
  int64_t number = 0;
  each_block(runs, count, slots, EXPANDED, [&](const LowRank& part, int64_t before, int64_t row, int64_t rows) {
    const int64_t panels = (part.outputs + PANEL - 1) / PANEL, some = larger<int64_t>(TAKEN / part.rank, 1);
    for (int64_t panel = 0; panel < panels; panel += some)
      if (number++ % threads == thread) units.add({&part, before, row, rows, panel, smaller(some, panels - panel)});
  });
  units.end();
}

}  // namespace adapters
}  // namespace octavo

// How weights are laid out for tiles: in units of 4 bytes, unit 0 of a panel's columns, unit 1 of these ...
#pragma once

#include "gemm.h"

namespace octavo::gemm {

OCTAVO_INLINE void store_words(void* to, Words words) { __builtin_memcpy(to, &words, sizeof words); }

// The lower halves.
OCTAVO_INLINE void store_halves(void* to, Words words) {
  const Halves halves = to_halves(words);
  __builtin_memcpy(to, &halves, sizeof halves);
}

// Calls put(unit, column, words) for every unit and each WIDTH columns of a panel, with that unit of these columns. A row of
// `from`, which has `size` bytes, is a column of the panel; bytes and rows that do not exist are 0. A square of WIDTH rows
// and units is read at a time. `stride` is in bytes.
template <class Put>
OCTAVO_INLINE void transpose_rows(const void* from, int64_t stride, int64_t size, int64_t rows, int64_t units, const Put& put) {
  for (int64_t unit = 0; unit < units; unit += WIDTH) {
    const int64_t left = size - 4 * unit, some = smaller(WIDTH, units - unit);
    for (int64_t column = 0; column < PANEL; column += WIDTH) {
      Vector square[WIDTH];
      for (int64_t i = 0; i < WIDTH; ++i) {
        square[i] = Vector{};
        if (column + i >= rows || left <= 0) continue;
        const char* row = static_cast<const char*>(from) + (column + i) * stride + 4 * unit;
        if (left >= 4 * WIDTH) {
          __builtin_memcpy(&square[i], row, 4 * WIDTH);
        } else {
          char part[4 * WIDTH] = {};
          __builtin_memcpy(part, row, static_cast<size_t>(left));
          __builtin_memcpy(&square[i], part, 4 * WIDTH);
        }
      }
      transpose(square);
      for (int64_t i = 0; i < some; ++i) put(unit + i, column, (Words)square[i]);
    }
  }
}

// Calls pack(panel, first, rows) for each panel of `outputs`: its first output, and how many it has.
template <class Pack>
OCTAVO_INLINE void each_panel(int64_t outputs, int64_t inputs, const Pack& pack) {
  parallel(outputs * inputs >= 1 << 16, [&](int thread, int threads) {
    const Share mine = share((outputs + PANEL - 1) / PANEL, thread, threads);
    for (int64_t panel = mine.first; panel < mine.last; ++panel)
      pack(panel, panel * PANEL, smaller(PANEL, outputs - panel * PANEL));
  });
}

}  // namespace octavo::gemm

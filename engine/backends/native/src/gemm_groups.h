// What the products share whose weights have a scale for each GROUP inputs of an output, and whose activations become int8
// with a scale for each GROUP inputs of a row.
//
// Sums within a group are integers and exact; groups are added in float32, in order.
#pragma once

#include "gemm_integer.h"
#include "rotation.h"

namespace octavo::gemm {

constexpr int64_t GROUP = 32;
constexpr int64_t UNIT = 4;  // integers that an instruction multiplies and adds up
constexpr int64_t UNITS = GROUP / UNIT;
constexpr int64_t ROW_GROUP_BYTES = GROUP + 8;  // of a row of x
// Of a panel: integers, then scales, and of 4 bits minima.
constexpr int64_t INT8_GROUP_BYTES = PANEL * (GROUP + 2);
// Of rotated groups the integers of a panel come first, then all scales, a byte each, then what these count, [PANEL]
// float32, which is multiplied in last.
constexpr int64_t ROTATED_GROUP_BYTES = PANEL * (GROUP + 1);
constexpr int64_t rotated_panel_bytes(int64_t groups) { return (groups * ROTATED_GROUP_BYTES + 4 * PANEL + 63) / 64 * 64; }
constexpr int64_t INT4_GROUP_BYTES = PANEL * (GROUP / 2 + 4);

OCTAVO_INLINE int64_t groups_of(int64_t inputs) { return (inputs + GROUP - 1) / GROUP; }

// ROTATED: the group is rotated first, and divided by its size. `to` then gets all of a group's integers.
template <bool ROTATED, class T, class Number, class Note>
OCTAVO_INLINE void make_group(const T* x, int64_t size, int8_t* to, float& scale, Number& noted, const Note& note) {
  if constexpr (ROTATED) {
    float rotated[GROUP];
    rotate<GROUP>(x, size, 1.0f / GROUP, rotated);
    make_group<false>(rotated, GROUP, to, scale, noted, note);
  } else {
    const Steps steps = Steps::of(x, size);
    scale = steps.scale;
    noted = note(steps.scale, steps.write(x, size, to));
  }
}

// x: for each group of SIZE inputs [SIZE / 4][rows][4], then scales [rows], then what `note` makes of the scale and of
// the sum of the row's int8 in the group, [rows] of 4 bytes.
template <class Number, bool ROTATED, int64_t SIZE = GROUP, class T, class Note>
OCTAVO_INLINE void prepare_groups(const T* x, int64_t stride, int64_t rows, int64_t inputs, char* to, const Note& note) {
  static_assert(sizeof(Number) == 4 && (!ROTATED || SIZE == GROUP));
  constexpr int64_t OWN_UNITS = SIZE / UNIT;
  for (int64_t at = 0; at < inputs; at += SIZE) {
    const int64_t size = smaller(SIZE, inputs - at);
    uint32_t* out = reinterpret_cast<uint32_t*>(to) + at / SIZE * (OWN_UNITS + 2) * rows;
    float* scales = reinterpret_cast<float*>(out + OWN_UNITS * rows);
    Number* noted = reinterpret_cast<Number*>(scales + rows);
    lay_out(rows, OWN_UNITS, out, [&](int64_t row, int64_t, int64_t count, uint32_t* made) {
      const T* from = x + row * stride + at;
      int8_t* bytes = reinterpret_cast<int8_t*>(made);
      if (size < SIZE) {
        __builtin_memset(made, 0, static_cast<size_t>(count) * UNIT);
        make_group<ROTATED>(from, size, bytes, scales[row], noted[row], note);
      } else {
        make_group<ROTATED>(from, SIZE, bytes, scales[row], noted[row], note);  // a size that the compiler knows
      }
    });
  }
}

}  // namespace octavo::gemm

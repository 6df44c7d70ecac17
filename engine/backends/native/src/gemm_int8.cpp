// Products of int8 weights, with a scale for each GROUP inputs of an output, and activations that become int8, with a
// scale for each GROUP inputs of a row: of plain groups, or of rotated ones, where both are (see rotation.h).
//
// Sums within a group are integers and exact; groups are added in float32, in order.
#include "gemm_groups.h"
#include "gemm_look_up.h"
#include "gemm_panels.h"
#include "half.h"

#include <type_traits>

namespace octavo::gemm {
namespace {

constexpr int64_t INTEGERS = PANEL * GROUP;  // bytes of a group of a panel
constexpr int64_t AHEAD = 8;                 // groups

// Weights: for each group [UNITS][PANEL][4], then float16 scales [PANEL]; of rotated ones see ROTATED_GROUP_BYTES. x:
// see `prepare_groups`; what is noted is what the offset of the weights adds to the sum, negated.
template <bool ROTATED>
struct Int8 : ByVectors<Int8<ROTATED>> {
  static constexpr int ROWS = REGISTERS == 32 ? 8 : 4;
  static int64_t row_bytes(int64_t inputs) { return groups_of(inputs) * ROW_GROUP_BYTES; }
  static int64_t panel_bytes(int64_t inputs) {
    if constexpr (ROTATED) return rotated_panel_bytes(groups_of(inputs));
    return groups_of(inputs) * INT8_GROUP_BYTES;
  }

  template <class T>
  static void prepare(const T* x, int64_t stride, int64_t rows, int64_t inputs, char* to) {
    prepare_groups<int32_t, ROTATED>(x, stride, rows, inputs, to, [](float, int32_t sum) { return -OFFSET * sum; });
  }

  template <int N>
  static void multiply(const char* tile, const char* panel, int64_t inputs, float* sums) {
    const int64_t groups = groups_of(inputs);
    const int32_t* x = reinterpret_cast<const int32_t*>(tile);
    Vector total[N][2] = {};
    using Scale = std::conditional_t<ROTATED, uint8_t, float16>;
    constexpr int64_t STEP = ROTATED ? INTEGERS : INT8_GROUP_BYTES;  // to the next group's integers
    constexpr int64_t SCALES = ROTATED ? PANEL : INT8_GROUP_BYTES;   // and scales
    const char* scales_at = panel + (ROTATED ? groups : 1) * INTEGERS;
    for (int64_t group = 0; group < groups; ++group, x += (UNITS + 2) * N, panel += STEP, scales_at += SCALES) {
      const float* row_scales = reinterpret_cast<const float*>(x + UNITS * N);
      const int32_t* corrections = x + (UNITS + 1) * N;
      const Scale* scales = reinterpret_cast<const Scale*>(scales_at);
      __builtin_prefetch(scales_at + AHEAD * SCALES, 0, 2);
      Sums<Integers, N, 2> acc;
      acc.begin([=](int row) { return OFFSET ? integers(corrections[row]) : Integers{}; });
      const auto weights = [&](int64_t i) {
        const char* unit = panel + i * UNIT * PANEL;
        for (int64_t line = 0; line < UNIT * PANEL; line += 64) __builtin_prefetch(unit + AHEAD * STEP + line, 0, 2);
        return Sides{{load_integers(unit), load_integers(unit + UNIT * WIDTH)}};
      };
      add_units(acc, UNITS, x, weights,
                [](Integers sum, Integers unit, int32_t of_row) { return dot_bytes(sum, unit, of_row); });
      const Vector low = load(scales), high = load(scales + WIDTH);
#pragma GCC unroll 16
      for (int row = 0; row < N; ++row) {
        const Vector scale = all(row_scales[row]);
        total[row][0] = fma(__builtin_convertvector(acc.of(row, 0), Vector) * scale, low, total[row][0]);
        total[row][1] = fma(__builtin_convertvector(acc.of(row, 1), Vector) * scale, high, total[row][1]);
      }
    }
    if constexpr (ROTATED) {
      const float* counted = reinterpret_cast<const float*>(scales_at);
      const Vector low = load(counted), high = load(counted + WIDTH);
      for (int row = 0; row < N; ++row) {
        total[row][0] *= low;
        total[row][1] *= high;
      }
    }
#pragma GCC unroll 16
    for (int row = 0; row < N; ++row) {
      store(sums + row * PANEL, total[row][0]);
      store(sums + row * PANEL + WIDTH, total[row][1]);
    }
  }

  // The weights of an output.
  template <class T>
  static void read(const char* data, int64_t output, int64_t inputs, T* to) {
    const int64_t groups = groups_of(inputs), column = output % PANEL;
    const char* panel = data + output / PANEL * panel_bytes(inputs);
    for (int64_t group = 0; group < groups; ++group) {
      const char* integers = panel + group * (ROTATED ? INTEGERS : INT8_GROUP_BYTES);
      const char* scales = panel + groups * INTEGERS;
      const float scale = ROTATED ? static_cast<float>(read_as<uint8_t>(scales + group * PANEL + column)) *
                                        read_as<float>(scales + groups * PANEL + column * 4)
                                  : widened(read_as<float16>(integers + INTEGERS + column * 2));
      float numbers[GROUP];
      for (int64_t i = 0; i < GROUP; ++i) {
        const uint32_t word = word_of(integers, i / UNIT, output) ^ FLIPPED;
        numbers[i] = static_cast<float>(static_cast<int8_t>(word >> i % UNIT * 8)) * scale;
      }
      if constexpr (ROTATED) rotate<GROUP>(numbers, GROUP, 1.0f / GROUP, numbers);
      write_numbers(numbers, to + group * GROUP, smaller(GROUP, inputs - group * GROUP));
    }
  }
};

}  // namespace

// q [outputs, inputs], scales [outputs, groups].
OCTAVO_EXPORT(gemm_pack_int8)(const int8_t* q, const float16* scales, int8_t* to, int64_t outputs, int64_t inputs) {
  const int64_t groups = groups_of(inputs);
  each_panel(outputs, inputs, [&](int64_t panel, int64_t first, int64_t rows) {
    int8_t* out = to + panel * groups * INT8_GROUP_BYTES;
    transpose_rows(q + first * inputs, inputs, inputs, rows, groups * UNITS,
                   [&](int64_t unit, int64_t column, Words words) {
                     int8_t* group = out + unit / UNITS * INT8_GROUP_BYTES;
                     store_words(group + (unit % UNITS * PANEL + column) * UNIT, words ^ FLIPPED);
                   });
    // A word is the scales of two groups.
    transpose_rows(scales + first * groups, 2 * groups, 2 * groups, rows, (groups + 1) / 2,
                   [&](int64_t pair, int64_t column, Words words) {
                     int8_t* place = out + 2 * pair * INT8_GROUP_BYTES + INTEGERS + 2 * column;
                     store_halves(place, words);
                     if (2 * pair + 1 < groups) store_halves(place + INT8_GROUP_BYTES, words >> 16);
                   });
  });
}

// q [outputs, groups, GROUP]; scales [outputs, 4 + groups]: a float32 and how many times that each group's scale is.
OCTAVO_EXPORT(gemm_pack_int8_rotated)(const int8_t* q, const uint8_t* scales, int8_t* to, int64_t outputs,
                                      int64_t inputs) {
  const int64_t groups = groups_of(inputs), size = 4 + groups;
  each_panel(outputs, inputs, [&](int64_t panel, int64_t first, int64_t rows) {
    int8_t* out = to + panel * Int8<true>::panel_bytes(inputs);
    int8_t* out_scales = out + groups * INTEGERS;
    transpose_rows(q + first * groups * GROUP, groups * GROUP, groups * GROUP, rows, groups * UNITS,
                   [&](int64_t unit, int64_t column, Words words) {
                     store_words(out + (unit * PANEL + column) * UNIT, words ^ FLIPPED);
                   });
    const uint8_t* from = scales + first * size;
    transpose_rows(from, size, 4, rows, 1, [&](int64_t, int64_t column, Words words) {
      store_words(out_scales + groups * PANEL + column * 4, words);
    });
    for (int64_t group = 0; group < groups; ++group)
      for (int64_t column = 0; column < PANEL; ++column)
        out_scales[group * PANEL + column] = column < rows ? static_cast<int8_t>(from[column * size + 4 + group]) : 0;
  });
}

OCTAVO_EXPORT_LOOK_UP(int8, Int8<false>)
OCTAVO_EXPORT_LOOK_UP(int8_rotated, Int8<true>)
OCTAVO_EXPORT_PRODUCT(int8, Int8<false>)
OCTAVO_EXPORT_PRODUCT(int8_rotated, Int8<true>)

}  // namespace octavo::gemm

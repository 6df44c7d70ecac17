// Products of int8 weights, with a scale for each output, and activations that become int8, with a scale for each row:
// the fast ones, see gemm_int8.cpp for the exact ones.
//
// Sums are integers and exact. Rows of x are quantised by the product itself: round(x * 127 / largest magnitude).
#include "gemm_integer.h"
#include "gemm_look_up.h"
#include "gemm_panels.h"

namespace octavo::gemm {
namespace {

constexpr int64_t UNIT = 4;
constexpr int64_t AHEAD = 8192;

OCTAVO_INLINE int64_t units_of(int64_t inputs) { return (inputs + UNIT - 1) / UNIT; }

// Weights [inputs / 4][PANEL][4], then scales [PANEL]; x [inputs / 4][rows][4], then scales [rows], then what the
// offset of the weights adds to the sums, negated, [rows].
struct Int8Fast : ByVectors<Int8Fast> {
  static constexpr int ROWS = REGISTERS == 32 ? 12 : 4;
  static int64_t row_bytes(int64_t inputs) { return UNIT * units_of(inputs) + 8; }
  static int64_t panel_bytes(int64_t inputs) { return PANEL * (UNIT * units_of(inputs) + 4); }

  template <class T>
  static void prepare(const T* x, int64_t stride, int64_t rows, int64_t inputs, char* to) {
    const int64_t units = units_of(inputs);
    uint32_t* out = reinterpret_cast<uint32_t*>(to);
    float* scales = reinterpret_cast<float*>(out + units * rows);
    int32_t* corrections = reinterpret_cast<int32_t*>(scales + rows);
    float reciprocals[MOST_ROWS];
    for (int64_t row = 0; row < rows; ++row) {
      const Steps steps = Steps::of(x + row * stride, inputs);
      reciprocals[row] = steps.reciprocal;
      scales[row] = steps.scale;
      corrections[row] = 0;
    }
    lay_out(rows, units, out, [&](int64_t row, int64_t first, int64_t count, uint32_t* made) {
      const int64_t at = UNIT * first, size = smaller(UNIT * count, inputs - at);
      made[count - 1] = 0;
      const Steps steps{reciprocals[row], 0};
      corrections[row] -= OFFSET * steps.write(x + row * stride + at, size, reinterpret_cast<int8_t*>(made));
    });
  }

  template <int N>
  static void multiply(const char* tile, const char* panel, int64_t inputs, float* sums) {
    const int64_t units = units_of(inputs);
    const int32_t* x = reinterpret_cast<const int32_t*>(tile);
    const int32_t* corrections = x + units * N + N;
    Sums<Integers, N, 2> acc;
    acc.begin([=](int row) { return integers(corrections[row]); });
    const auto weights = [&](int64_t i) {
      const char* unit = panel + i * UNIT * PANEL;
      for (int64_t line = 0; line < UNIT * PANEL; line += 64) __builtin_prefetch(unit + AHEAD + line);
      return Sides{{load_integers(unit), load_integers(unit + UNIT * WIDTH)}};
    };
    add_units(acc, units, x, weights,
              [](Integers sum, Integers unit, int32_t of_row) { return dot_bytes(sum, unit, of_row); });
    const float* row_scales = reinterpret_cast<const float*>(x + units * N);
    panel += units * UNIT * PANEL;
    const Vector low = load(reinterpret_cast<const float*>(panel));
    const Vector high = load(reinterpret_cast<const float*>(panel) + WIDTH);
#pragma GCC unroll 16
    for (int row = 0; row < N; ++row) {
      const Vector scale = all(row_scales[row]);
      store(sums + row * PANEL, __builtin_convertvector(acc.of(row, 0), Vector) * (low * scale));
      store(sums + row * PANEL + WIDTH, __builtin_convertvector(acc.of(row, 1), Vector) * (high * scale));
    }
  }

  // The weights of an output.
  template <class T>
  static void read(const char* data, int64_t output, int64_t inputs, T* to) {
    const char* panel = data + output / PANEL * panel_bytes(inputs);
    const float scale = read_as<float>(panel + (units_of(inputs) * PANEL + output % PANEL) * UNIT);
    for (int64_t at = 0; at < inputs; at += UNIT) {
      const uint32_t word = word_of(panel, at / UNIT, output) ^ FLIPPED;
      float numbers[UNIT];
      for (int64_t i = 0; i < UNIT; ++i) numbers[i] = static_cast<float>(static_cast<int8_t>(word >> 8 * i)) * scale;
      write_numbers(numbers, to + at, smaller(UNIT, inputs - at));
    }
  }
};

}  // namespace

// q [outputs, inputs] from -127 to 127, scales [outputs].
OCTAVO_EXPORT(gemm_pack_int8_fast)(const int8_t* q, const float* scales, int8_t* to, int64_t outputs,
                                   int64_t inputs) {
  const int64_t units = units_of(inputs);
  each_panel(outputs, inputs, [&](int64_t panel, int64_t first, int64_t rows) {
    int8_t* out = to + panel * Int8Fast::panel_bytes(inputs);
    transpose_rows(q + first * inputs, inputs, inputs, rows, units, [&](int64_t unit, int64_t column, Words words) {
      store_words(out + (unit * PANEL + column) * UNIT, words ^ FLIPPED);
    });
    transpose_rows(scales + first, 4, 4, rows, 1, [&](int64_t, int64_t column, Words words) {
      store_words(out + (units * PANEL + column) * UNIT, words);
    });
  });
}

OCTAVO_EXPORT_LOOK_UP(int8_fast, Int8Fast)
OCTAVO_EXPORT_PRODUCT(int8_fast, Int8Fast)

}  // namespace octavo::gemm

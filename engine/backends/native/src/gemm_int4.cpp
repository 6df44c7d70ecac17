// Products of 4-bit weights, with a scale for each GROUP inputs of an output, and activations that become int8, with a
// scale for each GROUP inputs of a row.
//
// A weight is (q - 8) * scale, q from 0 to 15. Sums within a group are integers and exact; groups are added in float32,
// in order.
#include "gemm_groups.h"

namespace octavo::gemm {
namespace {

constexpr int64_t GROUP_BYTES = PANEL * (GROUP / 2 + 2);  // of a panel
constexpr int64_t AHEAD = 8192;
constexpr int32_t ZERO = 8;

// Weights: for each group [UNITS / 2][PANEL][4] bytes, whose lower halves are one unit of inputs and whose upper halves
// the next, then bfloat16 scales [PANEL]. x: for each group [UNITS][rows][4], then scales [rows], then -8 times the
// sums of the row's int8 in the group [rows].
struct Int4 : ByVectors<Int4> {
#if defined(__AVX512F__)
  static constexpr int ROWS = 8;
#else
  static constexpr int ROWS = 3;
#endif
  static int64_t row_bytes(int64_t inputs) { return groups_of(inputs) * ROW_GROUP_BYTES; }
  static int64_t panel_bytes(int64_t inputs) { return groups_of(inputs) * GROUP_BYTES; }

  template <class T>
  static void prepare(const T* x, int64_t stride, int64_t rows, int64_t inputs, char* to) {
    prepare_groups<int32_t>(x, stride, rows, inputs, to, [](float, int32_t sum) { return -ZERO * sum; });
  }

  template <int N>
  static void multiply(const char* tile, const char* panel, int64_t inputs, float* sums) {
    const int64_t groups = groups_of(inputs);
    const int32_t* x = reinterpret_cast<const int32_t*>(tile);
    Vector total[N][2] = {};
    for (int64_t group = 0; group < groups; ++group, x += (UNITS + 2) * N) {
      for (int64_t line = 0; line < GROUP_BYTES; line += 64) __builtin_prefetch(panel + AHEAD + line);
      const int32_t* corrections = x + (UNITS + 1) * N;
      const float* row_scales = reinterpret_cast<const float*>(x + UNITS * N);
      const bfloat16* scales = reinterpret_cast<const bfloat16*>(panel + UNITS / 2 * UNIT * PANEL);
#pragma GCC unroll 2
      for (int side = 0; side < 2; ++side) {
        // Units of x are read again for the other side, rather than kept in registers that there are not.
        __asm__ volatile("" ::: "memory");
        Integers acc[N];
#pragma GCC unroll 16
        for (int row = 0; row < N; ++row) acc[row] = integers(corrections[row]);
#pragma GCC unroll 4
        for (int64_t i = 0; i < UNITS; i += 2) {
          const Integers both = load_integers(panel + (i * PANEL / 2 + side * WIDTH) * UNIT);
          const Integers first = both & 0x0f0f0f0f, second = both >> 4 & 0x0f0f0f0f;
#pragma GCC unroll 16
          for (int row = 0; row < N; ++row) acc[row] = dot_nibbles(acc[row], first, x[i * N + row]);
#pragma GCC unroll 16
          for (int row = 0; row < N; ++row) acc[row] = dot_nibbles(acc[row], second, x[(i + 1) * N + row]);
        }
        const Vector scale = load(scales + side * WIDTH);
#pragma GCC unroll 16
        for (int row = 0; row < N; ++row) {
          const Vector sum = __builtin_convertvector(acc[row], Vector) * all(row_scales[row]);
          total[row][side] = fma(sum, scale, total[row][side]);
        }
      }
      panel += GROUP_BYTES;
    }
#pragma GCC unroll 16
    for (int row = 0; row < N; ++row) {
      store(sums + row * PANEL, total[row][0]);
      store(sums + row * PANEL + WIDTH, total[row][1]);
    }
  }
};

}  // namespace

// q [outputs, groups, GROUP / 2], see gemm_quantise.cpp, scales [outputs, groups].
OCTAVO_EXPORT(gemm_pack_int4)(const uint8_t* q, const bfloat16* scales, uint8_t* to, int64_t outputs, int64_t inputs) {
  constexpr uint32_t ZEROS = ZERO * 0x11111111u;
  const int64_t panels = (outputs + PANEL - 1) / PANEL, groups = groups_of(inputs);
  parallel(outputs * inputs >= 1 << 16, [&](int thread, int threads) {
    const Share mine = share(panels * groups, thread, threads);
    for (int64_t block = mine.first; block < mine.last; ++block) {
      uint8_t* out = to + block * GROUP_BYTES;
      bfloat16* out_scales = reinterpret_cast<bfloat16*>(out + PANEL * GROUP / 2);
      const int64_t group = block % groups;
      for (int64_t column = 0; column < PANEL; ++column) {
        const int64_t output = block / groups * PANEL + column;
        const bool real = output < outputs;
        const uint8_t* from = q + (output * groups + group) * (GROUP / 2);
        out_scales[column] = real ? scales[output * groups + group] : bfloat16{0};
        for (int64_t i = 0; i < UNITS / 2; ++i) {
          uint32_t word = ZEROS;
          if (real) __builtin_memcpy(&word, from + i * UNIT, UNIT);
          __builtin_memcpy(out + (i * PANEL + column) * UNIT, &word, UNIT);
        }
      }
    }
  });
}

OCTAVO_EXPORT_PRODUCT(int4, Int4)

}  // namespace octavo::gemm

// Products of 4-bit weights, with a scale and a minimum for each GROUP inputs of an output, and activations that become
// int8, with a scale for each GROUP inputs of a row.
//
// A weight is q * scale + minimum, q from 0 to 15. Sums within a group are integers and exact; groups are added in
// float32, in order: of each what q comes to, and then the minimum times the sum of the activations.
#include "gemm_groups.h"
#include "gemm_look_up.h"
#include "gemm_panels.h"
#include "half.h"

namespace octavo::gemm {
namespace {

constexpr int64_t GROUP_BYTES = INT4_GROUP_BYTES;
constexpr int64_t AHEAD = 8192;

// Weights: for each group [UNITS / 2][PANEL][4] bytes, whose lower halves are one unit of inputs and whose upper halves
// the next, then float16 scales [PANEL] and minima [PANEL]. x: see `prepare_groups`; what is noted is the sum of the
// group.
struct Int4 : ByVectors<Int4> {
  static constexpr int ROWS = REGISTERS == 32 ? 8 : 3;
  static int64_t row_bytes(int64_t inputs) { return groups_of(inputs) * ROW_GROUP_BYTES; }
  static int64_t panel_bytes(int64_t inputs) { return groups_of(inputs) * GROUP_BYTES; }

  template <class T>
  static void prepare(const T* x, int64_t stride, int64_t rows, int64_t inputs, char* to) {
    prepare_groups<float, false>(x, stride, rows, inputs, to,
                                 [](float scale, int32_t sum) { return scale * static_cast<float>(sum); });
  }

  template <int N>
  static void multiply(const char* tile, const char* panel, int64_t inputs, float* sums) {
    const int64_t groups = groups_of(inputs);
    const int32_t* x = reinterpret_cast<const int32_t*>(tile);
    Vector total[N][2] = {};
    for (int64_t group = 0; group < groups; ++group, x += (UNITS + 2) * N) {
      for (int64_t line = 0; line < GROUP_BYTES; line += 64) __builtin_prefetch(panel + AHEAD + line, 0, 2);
      const float* row_scales = reinterpret_cast<const float*>(x + UNITS * N);
      const float* row_sums = row_scales + N;
      const float16* scales = reinterpret_cast<const float16*>(panel + UNITS / 2 * UNIT * PANEL);
#pragma GCC unroll 2
      for (int side = 0; side < 2; ++side) {
        // Units of x are read again for the other side, rather than kept in registers that there are not.
        __asm__ volatile("" ::: "memory");
        Sums<Integers, N, 1> acc;
        acc.begin([](int) { return Integers{}; });
#pragma GCC unroll 4
        for (int64_t i = 0; i < UNITS; i += 2) {
          const Integers both = load_integers(panel + (i * PANEL / 2 + side * WIDTH) * UNIT);
          acc.add({both & 0x0f0f0f0f}, {both >> 4 & 0x0f0f0f0f}, x + i * N,
                  [](Integers sum, Integers weights, int32_t unit) { return dot_small(sum, weights, unit); });
        }
        const Vector scale = load(scales + side * WIDTH), least = load(scales + PANEL + side * WIDTH);
#pragma GCC unroll 16
        for (int row = 0; row < N; ++row) {
          const Vector sum = __builtin_convertvector(acc.of(row, 0), Vector) * all(row_scales[row]);
          total[row][side] = fma(all(row_sums[row]), least, fma(sum, scale, total[row][side]));
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

  // The weights of an output.
  template <class T>
  static void read(const char* data, int64_t output, int64_t inputs, T* to) {
    const char* group = data + output / PANEL * panel_bytes(inputs);
    for (int64_t at = 0; at < inputs; at += GROUP, group += GROUP_BYTES) {
      const char* scales = group + PANEL * GROUP / 2 + output % PANEL * 2;
      const float scale = widened(read_as<float16>(scales)), least = widened(read_as<float16>(scales + 2 * PANEL));
      float numbers[GROUP];
      for (int64_t i = 0; i < GROUP; ++i) {
        const uint32_t word = word_of(group, i / (2 * UNIT), output) >> i % UNIT * 8 >> i / UNIT % 2 * 4;
        numbers[i] = static_cast<float>(word & 15) * scale + least;
      }
      write_numbers(numbers, to + at, smaller(GROUP, inputs - at));
    }
  }
};

}  // namespace

// q [outputs, groups, GROUP / 2], see gemm_quantise.cpp, scales and minima [outputs, groups, 2].
OCTAVO_EXPORT(gemm_pack_int4)(const uint8_t* q, const float16* scales, uint8_t* to, int64_t outputs, int64_t inputs) {
  constexpr int64_t WORDS = UNITS / 2;  // of a group of an output
  const int64_t groups = groups_of(inputs), size = groups * GROUP / 2;
  each_panel(outputs, inputs, [&](int64_t panel, int64_t first, int64_t rows) {
    uint8_t* out = to + panel * groups * GROUP_BYTES;
    transpose_rows(q + first * size, size, size, rows, groups * WORDS, [&](int64_t word, int64_t column, Words words) {
      store_words(out + word / WORDS * GROUP_BYTES + (word % WORDS * PANEL + column) * UNIT, words);
    });
    // A word is the scale and the minimum of a group.
    transpose_rows(scales + 2 * first * groups, 4 * groups, 4 * groups, rows, groups,
                   [&](int64_t group, int64_t column, Words words) {
                     uint8_t* place = out + group * GROUP_BYTES + PANEL * GROUP / 2 + 2 * column;
                     store_halves(place, words);
                     store_halves(place + 2 * PANEL, words >> 16);
                   });
  });
}

OCTAVO_EXPORT_LOOK_UP(int4, Int4)
OCTAVO_EXPORT_PRODUCT(int4, Int4)

}  // namespace octavo::gemm

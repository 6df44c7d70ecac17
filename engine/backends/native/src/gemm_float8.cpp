// Products with weights of float8_e4m3fn, with a float32 scale for each 128 inputs of an output. Activations are rounded to
// bfloat16. Products are exact; the sums of a group are float32, and are multiplied by its scale and added in order.
//
// A weight has 4 bits of an exponent with a bias of 7, and 3 of a fraction. Moved to their place in bfloat16 or float32,
// whose bias is 127, the bits are 2^-120 of the weight, which costs few instructions. Activations are multiplied by 2^60, so
// that products stay normal numbers, and scales by 2^60 as well; activations from 2^68 on become infinite. No weight is NaN:
// Python refuses them.
#include "gemm_look_up.h"
#include "gemm_panels.h"

namespace octavo::gemm {
namespace {

constexpr int64_t GROUP_INPUTS = 128, BLOCK_BYTES = GROUP_INPUTS + 4;  // of an output, as Python has them
constexpr int64_t UNIT_BYTES = 2 * PANEL;                              // of a pair of inputs
constexpr int64_t SCALE_BYTES = 4 * PANEL;
constexpr int64_t AHEAD = 8192;

OCTAVO_INLINE int64_t pairs_of(int64_t inputs) { return (inputs + 1) / 2; }

OCTAVO_INLINE float number_of(uint8_t byte) {
  const uint32_t bits = static_cast<uint32_t>(byte & 0x80) << 24 | static_cast<uint32_t>(byte & 0x7f) << 20;
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value * 0x1p120f;
}

// Adds the products of WIDTH pairs: the even and the odd one of weights, in float32, and x, two bfloat16.
OCTAVO_INLINE Vector add_pairs(Vector acc, Words even, Words odd, uint32_t x) {
  const uint32_t pair[] = {x << 16, x & 0xffff0000};
  float values[2];
  __builtin_memcpy(values, pair, sizeof values);
  return fma((Vector)odd, all(values[1]), fma((Vector)even, all(values[0]), acc));
}

// Adds a unit's products, of both sides of a panel with N rows.
template <int N>
OCTAVO_INLINE void add_unit(const char* weights, const uint32_t* x, Vector (&acc)[N][2]) {
#if defined(__AVX512BF16__)
  const auto pairs_at = [&](const char* from) {
    const __m512i words = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    return _mm512_and_si512(_mm512_slli_epi16(words, 4), _mm512_set1_epi16(static_cast<int16_t>(0x87f0)));
  };
  const __m512i low = pairs_at(weights), high = pairs_at(weights + 2 * WIDTH);
  // Products of bfloat16 take subnormal numbers for 0. Few units have some, or have zeros.
  if (_mm512_testn_epi8_mask(_mm512_loadu_si512(weights), _mm512_set1_epi8(0x78))) [[unlikely]] {
    const Words upper = Words{} + 0xffff0000;
#pragma GCC unroll 16
    for (int row = 0; row < N; ++row) {
      acc[row][0] = add_pairs(acc[row][0], (Words)low << 16, (Words)low & upper, x[row]);
      acc[row][1] = add_pairs(acc[row][1], (Words)high << 16, (Words)high & upper, x[row]);
    }
    return;
  }
#pragma GCC unroll 16
  for (int row = 0; row < N; ++row) {
    const __m512bh value = (__m512bh)_mm512_set1_epi32(static_cast<int>(x[row]));
    acc[row][0] = (Vector)_mm512_dpbf16_ps((__m512)acc[row][0], (__m512bh)low, value);
    acc[row][1] = (Vector)_mm512_dpbf16_ps((__m512)acc[row][1], (__m512bh)high, value);
  }
#else
#pragma GCC unroll 2
  for (int side = 0; side < 2; ++side) {
    Halves halves;
    __builtin_memcpy(&halves, weights + side * 2 * WIDTH, sizeof halves);
    const Words words = to_words(halves);
    const Words even = (words << 24 & 0x80000000) | (words << 20 & 0x07f00000);
    const Words odd = (words << 16 & 0x80000000) | (words << 12 & 0x07f00000);
#pragma GCC unroll 16
    for (int row = 0; row < N; ++row) acc[row][side] = add_pairs(acc[row][side], even, odd, x[row]);
  }
#endif
}

// Weights: for each group of inputs [inputs / 2][PANEL][2] bytes, then scales [PANEL]. x:
// [inputs / 2][rows][2]; an odd input's partner is 0.
struct Float8 : ByVectors<Float8> {
  static constexpr int ROWS = REGISTERS == 32 ? 12 : 4;
  static int64_t row_bytes(int64_t inputs) { return 4 * pairs_of(inputs); }
  static int64_t panel_bytes(int64_t inputs) {
    const int64_t groups = (inputs + GROUP_INPUTS - 1) / GROUP_INPUTS;
    return rounded_up(pairs_of(inputs) * UNIT_BYTES + groups * SCALE_BYTES, 64);
  }

  template <class T>
  static void prepare(const T* x, int64_t stride, int64_t rows, int64_t inputs, char* to) {
    lay_out(rows, pairs_of(inputs), reinterpret_cast<uint32_t*>(to),
            [&](int64_t row, int64_t first, int64_t count, uint32_t* units) {
              const T* from = x + row * stride + 2 * first;
              const int64_t size = smaller(2 * count, inputs - 2 * first);
              bfloat16* halves = reinterpret_cast<bfloat16*>(units);
              each(size, [&](auto place) { place.write(halves, place.read(from) * 0x1p60f); });
              if (size % 2) halves[size].bits = 0;
            });
  }

  template <int N>
  static void multiply(const char* tile, const char* panel, int64_t inputs, float* sums) {
    const uint32_t* x = reinterpret_cast<const uint32_t*>(tile);
    for (int64_t i = 0; i < N * PANEL; i += WIDTH) store(sums + i, Vector{});
    for (int64_t at = 0; at < inputs; at += GROUP_INPUTS) {
      const int64_t units = pairs_of(smaller(GROUP_INPUTS, inputs - at));
      Vector acc[N][2] = {};
      for (int64_t i = 0; i < units; ++i, x += N, panel += UNIT_BYTES) {
        __builtin_prefetch(panel + AHEAD, 0, 2);
        add_unit<N>(panel, x, acc);
      }
      const float* scales = reinterpret_cast<const float*>(panel);
      const Vector low = load(scales) * 0x1p60f, high = load(scales + WIDTH) * 0x1p60f;
#pragma GCC unroll 16
      for (int row = 0; row < N; ++row) {
        float* sum = sums + row * PANEL;
        store(sum, fma(acc[row][0], low, load(sum)));
        store(sum + WIDTH, fma(acc[row][1], high, load(sum + WIDTH)));
      }
      panel += SCALE_BYTES;
    }
  }

  // The weights of an output.
  template <class T>
  static void read(const char* data, int64_t output, int64_t inputs, T* to) {
    const char* group = data + output / PANEL * panel_bytes(inputs);
    for (int64_t at = 0; at < inputs; at += GROUP_INPUTS) {
      const int64_t size = smaller(GROUP_INPUTS, inputs - at);
      const char* scales = group + pairs_of(size) * UNIT_BYTES;
      const float scale = read_as<float>(scales + output % PANEL * 4);
      float numbers[GROUP_INPUTS];
      for (int64_t i = 0; i < size; ++i)
        numbers[i] = number_of(read_as<uint8_t>(group + i / 2 * UNIT_BYTES + output % PANEL * 2 + i % 2)) * scale;
      write_numbers(numbers, to + at, size);
      group = scales + SCALE_BYTES;
    }
  }
};

}  // namespace

// Rows of blocks: 128 numbers, 0 past a row's end, and a scale.
OCTAVO_EXPORT(gemm_pack_e4m3)(const uint8_t* blocks, char* to, int64_t outputs, int64_t inputs) {
  const int64_t groups = (inputs + GROUP_INPUTS - 1) / GROUP_INPUTS;
  each_panel(outputs, inputs, [&](int64_t panel, int64_t first, int64_t rows) {
    char* out = to + panel * Float8::panel_bytes(inputs);
    if (rows < PANEL) __builtin_memset(out, 0, static_cast<size_t>(Float8::panel_bytes(inputs)));
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t units = pairs_of(smaller(GROUP_INPUTS, inputs - group * GROUP_INPUTS));
      for (int64_t row = 0; row < rows; ++row) {
        const uint8_t* from = blocks + ((first + row) * groups + group) * BLOCK_BYTES;
        for (int64_t i = 0; i < units; ++i) __builtin_memcpy(out + i * UNIT_BYTES + row * 2, from + 2 * i, 2);
        __builtin_memcpy(out + units * UNIT_BYTES + row * 4, from + GROUP_INPUTS, 4);
      }
      out += units * UNIT_BYTES + SCALE_BYTES;
    }
  });
}

OCTAVO_EXPORT_LOOK_UP(e4m3, Float8)
OCTAVO_EXPORT_PRODUCT(e4m3, Float8)

}  // namespace octavo::gemm

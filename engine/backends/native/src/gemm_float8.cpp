// Products with weights of float8_e4m3fn, with a float32 scale for each 128 inputs of an output. Activations are rounded to
// bfloat16. Products are exact; the sums of a group are float32, and are multiplied by its scale and added in order.
//
// 4 bits of an exponent with a bias of 7, and 3 of a fraction: moved to their place in bfloat16 or float32, whose bias is
// 127, the bits are 2^-120 of the number. No weight is NaN: Python refuses them.
#include "gemm_look_up.h"
#include "gemm_pairs.h"
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

#if defined(__AVX512BF16__)
// WIDTH pairs of bfloat16. Products of that format take subnormal numbers for 0, so those of 8 bits are looked up.
struct Weights {
  Integers pair;
  OCTAVO_INLINE_MEMBER static Weights load(const char* from) {
    static constexpr uint16_t SUBNORMAL[32] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};  // 2^-9 each
    const __m512i words = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    const __m512i moved = _mm512_and_si512(_mm512_slli_epi16(words, 4), _mm512_set1_epi16(0x07f0));
    const __m512i normal = _mm512_add_epi16(moved, _mm512_set1_epi16(120 << 7));
    const __mmask32 small = _mm512_testn_epi16_mask(words, _mm512_set1_epi16(0x78));
    const __m512i size = _mm512_mask_permutexvar_epi16(normal, small, words, _mm512_loadu_si512(SUBNORMAL));
    // size | words & 0x8000
    return {(Integers)_mm512_ternarylogic_epi32(size, words, _mm512_set1_epi16(-0x8000), 0xf8)};
  }
  OCTAVO_INLINE_MEMBER Vector add(Vector acc, uint32_t x) const { return pairs(acc, pair, x); }
};
#else
// WIDTH even inputs and WIDTH odd ones, in float32.
struct Weights {
  Vector even, odd;
  OCTAVO_INLINE_MEMBER static Weights load(const char* from) {
    Halves halves;
    __builtin_memcpy(&halves, from, sizeof halves);
    const Words words = to_words(halves);
    const Words first = (words << 24 & 0x80000000) | (words << 20 & 0x07f00000);
    const Words second = (words << 16 & 0x80000000) | (words << 12 & 0x07f00000);
    return {(Vector)first * 0x1p120f, (Vector)second * 0x1p120f};
  }
  OCTAVO_INLINE_MEMBER Vector add(Vector acc, uint32_t x) const {
    const uint32_t pair[] = {x << 16, x & 0xffff0000};
    float values[2];
    __builtin_memcpy(values, pair, sizeof values);
    return fma(odd, all(values[1]), fma(even, all(values[0]), acc));
  }
};
#endif

// Weights: for each group of inputs [inputs / 2][PANEL][2] bytes, then scales [PANEL]; x: see `prepare_pairs`.
struct Float8 : ByVectors<Float8> {
#if defined(__AVX512F__)
  static constexpr int ROWS = 12;
#else
  static constexpr int ROWS = 4;
#endif
  static int64_t row_bytes(int64_t inputs) { return 4 * pairs_of(inputs); }
  static int64_t panel_bytes(int64_t inputs) {
    const int64_t groups = (inputs + GROUP_INPUTS - 1) / GROUP_INPUTS;
    return rounded_up(pairs_of(inputs) * UNIT_BYTES + groups * SCALE_BYTES, 64);
  }

  template <class T>
  static void prepare(const T* x, int64_t stride, int64_t rows, int64_t inputs, char* to) {
    prepare_pairs(x, stride, rows, inputs, to);
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
        const Weights low = Weights::load(panel), high = Weights::load(panel + 2 * WIDTH);
#pragma GCC unroll 16
        for (int row = 0; row < N; ++row) {
          acc[row][0] = low.add(acc[row][0], x[row]);
          acc[row][1] = high.add(acc[row][1], x[row]);
        }
      }
      const float* scales = reinterpret_cast<const float*>(panel);
      const Vector low = load(scales), high = load(scales + WIDTH);
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

// Products with weights of float32 and bfloat16, summed in float32.
#include "gemm_look_up.h"
#include "gemm_panels.h"
#include "gemm_sums.h"

namespace octavo::gemm {
namespace {

// Weights [inputs][PANEL]; x [inputs][rows].
struct Float32 : ByVectors<Float32> {
  static constexpr int ROWS = VECTOR_ROWS;
  static constexpr int64_t UNIT_BYTES = 4 * PANEL;  // of a unit of inputs
  static int64_t row_bytes(int64_t inputs) { return 4 * inputs; }
  static int64_t panel_bytes(int64_t inputs) { return 4 * PANEL * inputs; }

  template <class T>
  static void prepare(const T* x, int64_t stride, int64_t rows, int64_t inputs, char* to) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == sizeof(float))
      if (rows >= WIDE) {  // units as they lie
        uint32_t* units = reinterpret_cast<uint32_t*>(to);
        return interleave_wide(x, 4 * stride, inputs, rows, units, units + inputs * rows);
      }
#endif
    lay_out(rows, inputs, reinterpret_cast<uint32_t*>(to),
            [&](int64_t row, int64_t first, int64_t count, uint32_t* units) {
              const T* from = x + row * stride + first;
              each(count, [&](auto place) { place.write(reinterpret_cast<float*>(units), place.read(from)); });
            });
  }

  template <int N>
  static void multiply(const char* tile, const char* panel, int64_t inputs, float* sums, auto ahead) {
    const float* x = reinterpret_cast<const float*>(tile);
    const float* w = reinterpret_cast<const float*>(panel);
    Vector acc[N][2] = {};
#pragma GCC unroll 2
    for (int64_t i = 0; i < inputs; ++i, x += N, w += PANEL) {
      ahead.fetch(i);
      const Vector low = load(w), high = load(w + WIDTH);
#pragma GCC unroll 16
      for (int row = 0; row < N; ++row) {
        const Vector value = all(x[row]);
        acc[row][0] = fma(value, low, acc[row][0]);
        acc[row][1] = fma(value, high, acc[row][1]);
      }
    }
#pragma GCC unroll 16
    for (int row = 0; row < N; ++row) {
      store(sums + row * PANEL, acc[row][0]);
      store(sums + row * PANEL + WIDTH, acc[row][1]);
    }
  }

  // The weights of an output.
  template <class T>
  static void read(const char* data, int64_t output, int64_t inputs, T* to) {
    const char* panel = data + output / PANEL * panel_bytes(inputs);
    for (int64_t at = 0; at < inputs; ++at) {
      const uint32_t word = word_of(panel, at, output);
      write_numbers(reinterpret_cast<const float*>(&word), to + at, 1);
    }
  }
};

// acc + the products of pairs of bfloat16, the even one in the lower half.
OCTAVO_INLINE Vector pairs(Vector acc, Integers weights, uint32_t x) {
#if defined(__AVX512BF16__)
  return (Vector)_mm512_dpbf16_ps((__m512)acc, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(static_cast<int>(x)));
#elif defined(OCTAVO_NEON) && defined(__ARM_FEATURE_BF16)
  return (Vector)vbfdotq_f32((float32x4_t)acc, (bfloat16x8_t)weights, vreinterpretq_bf16_u32(vdupq_n_u32(x)));
#else
  const Integers value = static_cast<int32_t>(x) - Integers{};
  const Integers upper = Integers{} + static_cast<int32_t>(0xffff0000);
  acc = fma((Vector)(weights << 16), (Vector)(value << 16), acc);
  return fma((Vector)(weights & upper), (Vector)(value & upper), acc);
#endif
}

// Weights [inputs / 2][PANEL][2]; x [inputs / 2][rows][2]; an odd input's partner is 0.
struct Bfloat16 : ByVectors<Bfloat16> {
  static constexpr int ROWS = VECTOR_ROWS;
  static constexpr int64_t UNIT_BYTES = 4 * PANEL;  // of a unit of inputs
  static int64_t row_bytes(int64_t inputs) { return 4 * ((inputs + 1) / 2); }
  static int64_t panel_bytes(int64_t inputs) { return 4 * PANEL * ((inputs + 1) / 2); }

  template <class T>
  static void prepare(const T* x, int64_t stride, int64_t rows, int64_t inputs, char* to) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == sizeof(bfloat16))
      if (rows >= WIDE && inputs % 2 == 0) {  // units as they lie
        uint32_t* units = reinterpret_cast<uint32_t*>(to);
        return interleave_wide(x, 2 * stride, inputs / 2, rows, units, units + inputs / 2 * rows);
      }
#endif
    lay_out(rows, (inputs + 1) / 2, reinterpret_cast<uint32_t*>(to),
            [&](int64_t row, int64_t first, int64_t count, uint32_t* units) {
              const int64_t size = smaller(2 * count, inputs - 2 * first);
              bfloat16* halves = reinterpret_cast<bfloat16*>(units);
              copy(x + row * stride + 2 * first, size, halves);
              if (size % 2) halves[size].bits = 0;
            });
  }

  template <int N>
  static void multiply(const char* tile, const char* panel, int64_t inputs, float* sums, auto ahead) {
    const uint32_t* x = reinterpret_cast<const uint32_t*>(tile);
    Sums<Vector, N, 2> acc;
    acc.begin([](int) { return Vector{}; });
    const int64_t units = (inputs + 1) / 2;
    const auto weights = [&](int64_t i) {
      ahead.fetch(i);
      const char* unit = panel + i * UNIT_BYTES;
      return Sides{{load_integers(unit), load_integers(unit + 4 * WIDTH)}};
    };
    add_units(acc, units, x, weights,
              [](Vector sum, Integers unit, uint32_t of_row) { return pairs(sum, unit, of_row); });
#pragma GCC unroll 16
    for (int row = 0; row < N; ++row) {
      store(sums + row * PANEL, acc.of(row, 0));
      store(sums + row * PANEL + WIDTH, acc.of(row, 1));
    }
  }

  // The weights of an output.
  template <class T>
  static void read(const char* data, int64_t output, int64_t inputs, T* to) {
    const char* panel = data + output / PANEL * panel_bytes(inputs);
    for (int64_t at = 0; at < inputs; at += 2) {
      const uint32_t word = word_of(panel, at / 2, output);
      const uint32_t pair[] = {word << 16, word & 0xffff0000};
      write_numbers(reinterpret_cast<const float*>(pair), to + at, smaller<int64_t>(2, inputs - at));
    }
  }

  static void copy(const bfloat16* x, int64_t size, bfloat16* to) {
    __builtin_memcpy(to, x, static_cast<size_t>(size) * sizeof *to);
  }
  static void copy(const float* x, int64_t size, bfloat16* to) {
    each(size, [&](auto place) { place.write(to, place.read(x)); });
  }
};

// Lays weights [outputs, inputs] out in panels of words, which are one float32 or two bfloat16; what is missing is 0.
template <class T>
void pack(const T* weight, int64_t stride, T* to, int64_t outputs, int64_t inputs) {
  constexpr int64_t BYTES = sizeof(T);
  const int64_t units = (inputs * BYTES + 3) / 4;
  each_panel(outputs, inputs, [&](int64_t panel, int64_t first, int64_t rows) {
    char* out = reinterpret_cast<char*>(to) + panel * units * PANEL * 4;
    transpose_rows(weight + first * stride, stride * BYTES, inputs * BYTES, rows, units,
                   [&](int64_t unit, int64_t column, Words words) {
                     store_words(out + (unit * PANEL + column) * 4, words);
                   });
  });
}

}  // namespace

OCTAVO_EXPORT(gemm_pack_float32)(const float* weight, int64_t stride, float* to, int64_t outputs, int64_t inputs) {
  pack(weight, stride, to, outputs, inputs);
}

OCTAVO_EXPORT(gemm_pack_bfloat16)(const bfloat16* weight, int64_t stride, bfloat16* to, int64_t outputs,
                                  int64_t inputs) {
  pack(weight, stride, to, outputs, inputs);
}

OCTAVO_EXPORT_LOOK_UP(float32, Float32)
OCTAVO_EXPORT_LOOK_UP(bfloat16, Bfloat16)
OCTAVO_EXPORT_PRODUCT(float32, Float32)
OCTAVO_EXPORT_PRODUCT(bfloat16, Bfloat16)

}  // namespace octavo::gemm

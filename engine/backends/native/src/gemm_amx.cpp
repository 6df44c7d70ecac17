// Products by the matrix tiles of Intel's AMX, which multiply bfloat16 and sum in float32: for weights of bfloat16, and for
// those of float32, whose numbers are sums of three bfloat16.
//
// Of float32, the first part holds the first 8 bits, the next one those of what is left, and the third one all that is
// left then, but for numbers below 2^-110, which lose their last bits. x * w is the sum of six products of such parts; the
// three that are left out are less than one rounding of float32 (Henry, Tang, Heinecke: Leveraging the bfloat16 Artificial
// Intelligence Datatype for Higher-Precision Computations, 2019). That is as exact as a chain of products and additions in
// float32. Infinities become NaN, and subnormal bfloat16 are 0.
#include "gemm.h"
#include "tiles.h"

namespace octavo::gemm {

#if defined(OCTAVO_AMX)
namespace {

constexpr int64_t SIDE = TILE_ROWS;  // rows, or columns, of a tile
constexpr int64_t DEPTH = 32;        // inputs of a tile
constexpr TileShapes SHAPES;

// Of 32 numbers, `low` ones first, the nearest bfloat16; subnormal numbers are 0.
OCTAVO_INLINE __m512i nearest(Vector low, Vector high) {
#if defined(OCTAVO_TILES_EMULATED)
  const auto half = [](Vector v) { return (__m256i)narrow(without_subnormals(v)); };
  return _mm512_inserti64x4(_mm512_castsi256_si512(half(low)), half(high), 1);
#else
  return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
#endif
}

// 32 numbers, which leave what a bfloat16 does not hold of them.
OCTAVO_INLINE __m512i take_part(Vector& low, Vector& high) {
  const __m512i part = nearest(low, high);
  low -= widen((Halves)_mm512_castsi512_si256(part));
  high -= widen((Halves)_mm512_extracti64x4_epi64(part, 1));
  return part;
}

// The same of two rows of weights, of which each pair of numbers lies together; cut, not rounded.
OCTAVO_INLINE Words take_pairs(Vector& even, Vector& odd) {
  const Words first = (Words)even & 0xffff0000, second = (Words)odd & 0xffff0000;
  even -= (Vector)first;
  odd -= (Vector)second;
  return first >> 16 | second;
}

// Tiles 0 to 3 are sums, 4 and 5 rows of x, 6 and 7 columns of the panel.
template <int HALVES>
OCTAVO_AMX OCTAVO_INLINE void load_rows(TileRegisters& registers, const char* from) {
  registers.load<4>(from, TILE_LINE);
  if constexpr (HALVES == 2) registers.load<5>(from + TILE_BYTES, TILE_LINE);
}

OCTAVO_AMX OCTAVO_INLINE void load_columns(TileRegisters& registers, const char* from, int64_t apart, int64_t stride) {
  registers.load<6>(from, stride);
  registers.load<7>(from + apart, stride);
}

template <int HALVES>
OCTAVO_AMX OCTAVO_INLINE void multiply_tiles(TileRegisters& registers) {
  registers.multiply_bfloat16<0, 4, 6>();
  registers.multiply_bfloat16<1, 4, 7>();
  if constexpr (HALVES == 2) {
    registers.multiply_bfloat16<2, 5, 6>();
    registers.multiply_bfloat16<3, 5, 7>();
  }
}

// PARTS of each number: x [inputs / DEPTH][PARTS][2][SIDE][DEPTH], of which rows from 17 on are the second half. Weights
// are those of the kernels for vectors: [inputs][PANEL] float32, or [inputs / 2][PANEL][2] bfloat16.
template <int PARTS>
struct ByTiles {
  static constexpr int ROWS = 2 * SIDE;
  static constexpr int64_t ROW_UNIT = SIDE;
  static constexpr int64_t CACHE = 5 << 18;
  static constexpr int64_t CHUNK = 64;     // inputs of a panel in the first level of the cache, read tile after tile
  static constexpr int64_t SLICE = 768;    // those that are taken apart at a time, if there are enough tiles for it
  static constexpr int64_t MOST = 16;      // tiles that share them
  static constexpr int64_t AHEAD = 16384;  // numbers of a panel that are asked for before they are needed
  static constexpr int64_t BLOCK = PARTS * 2 * TILE_BYTES;

  static int64_t row_bytes(int64_t inputs) { return 2 * PARTS * inputs; }
  static int64_t panel_bytes(int64_t inputs) { return (PARTS == 1 ? 2 : 4) * PANEL * inputs; }
  // Sums of some inputs can wait for the next ones in y.
  static int64_t slice(const Product& p) {
    return PARTS > 1 && p.y_format == FLOAT32 ? smaller(p.inputs, SLICE) : p.inputs;
  }

  template <class T>
  static void prepare(const T* x, int64_t stride, int64_t rows, int64_t inputs, char* to) {
    for (int64_t row = 0; row < rows; ++row) {
      char* out = to + row / SIDE * TILE_BYTES + row % SIDE * TILE_LINE;
      for (int64_t i = 0; i < inputs; i += DEPTH, out += BLOCK) {
        const T* from = x + row * stride + i;
        if constexpr (PARTS == 1 && sizeof(T) == sizeof(bfloat16)) {
          __builtin_memcpy(out, from, TILE_LINE);
        } else {
          Vector low = load(from), high = load(from + WIDTH);
          for (int64_t part = 0; part < PARTS; ++part)
            _mm512_store_si512(out + part * 2 * TILE_BYTES, take_part(low, high));
        }
      }
    }
  }

  OCTAVO_AMX static void multiply_panel(const Product& p, const Tiles& tiles, int64_t first, int64_t last,
                                        const char* x, int64_t bytes, int64_t panel, int64_t input) {
    const char* weight = static_cast<const char*>(p.weight) + panel * panel_bytes(p.inputs);
    const int64_t column = panel * PANEL;
    alignas(64) float sums[MOST][ROWS * PANEL];
    alignas(64) char parts[PARTS == 1 ? 1 : SLICE / DEPTH * BLOCK];
    const int64_t end = smaller(input + slice(p), p.inputs);
    Product whole = p;
    if (end < p.inputs) whole.bias = nullptr;
    TileRegisters registers;
    registers.configure(SHAPES);
    for (; first < last; first += MOST, x += MOST * bytes) {
      const int64_t some = smaller(MOST, last - first);
      const auto rows = [&](int64_t i) { return static_cast<int>(tiles.size(first + i)); };
      if (input)
        for (int64_t i = 0; i < some; ++i) resume(sums[i], rows(i), p, tiles.start(first + i), column);
      const int64_t step = PARTS == 1 ? 2 * CHUNK : some <= 2 ? CHUNK : SLICE;
      for (int64_t at = input; at < end; at += step) {
        const int64_t inputs = smaller(step, end - at);
        const char* columns = weight + panel_bytes(at);
        if constexpr (PARTS > 1) {
          take_apart(reinterpret_cast<const float*>(columns), inputs, parts);
          columns = parts;
        }
        for (int64_t i = 0; i < some; ++i) {
          const char* from = x + i * bytes + at * row_bytes(ROWS);
          if (rows(i) > SIDE)
            multiply<2>(registers, from, columns, inputs, sums[i], at == 0);
          else
            multiply<1>(registers, from, columns, inputs, sums[i], at == 0);
        }
      }
      for (int64_t i = 0; i < some; ++i) finish_tile(sums[i], rows(i), whole, tiles.start(first + i), column);
    }
    registers.release();
  }

 private:
  // Sums of the inputs before.
  static void resume(float* sums, int rows, const Product& p, int64_t row, int64_t column) {
    const float* y = static_cast<const float*>(p.y) + row * p.y_stride + column;
    for (int i = 0; i < rows; ++i, y += p.y_stride, sums += PANEL)
      each(smaller(p.outputs - column, PANEL), [&](auto place) { place.write(sums, place.read(y)); });
  }

  // Inputs of a panel [inputs][PANEL] as [inputs / DEPTH][PARTS][2][DEPTH / 2][SIDE][2].
  static void take_apart(const float* weight, int64_t inputs, char* to) {
    for (int64_t i = 0; i < inputs; i += 2, weight += 2 * PANEL)
      for (int64_t half = 0; half < 2; ++half) {
        const float* from = weight + half * SIDE;
        __builtin_prefetch(from + AHEAD, 0, 2);
        __builtin_prefetch(from + AHEAD + PANEL, 0, 2);
        Vector even = load(from), odd = load(from + PANEL);
        char* out = to + i / DEPTH * BLOCK + half * TILE_BYTES + i % DEPTH / 2 * TILE_LINE;
        for (int64_t part = 0; part < PARTS; ++part)
          _mm512_store_si512(out + part * 2 * TILE_BYTES, (__m512i)take_pairs(even, odd));
      }
  }

  template <int HALVES>
  OCTAVO_AMX static void multiply(TileRegisters& registers, const char* x, const char* weight, int64_t inputs,
                                  float* sums, bool anew) {
    float* below = sums + SIDE * PANEL;
    constexpr int64_t LINE = 4 * PANEL;
    if (anew) {
      registers.zero<0>();
      registers.zero<1>();
      registers.zero<2>();
      registers.zero<3>();
    } else {
      registers.load<0>(sums, LINE);
      registers.load<1>(sums + SIDE, LINE);
      if constexpr (HALVES == 2) {
        registers.load<2>(below, LINE);
        registers.load<3>(below + SIDE, LINE);
      }
    }
    for (int64_t i = 0; i < inputs; i += DEPTH, x += BLOCK, weight += PARTS == 1 ? DEPTH / 2 * LINE : BLOCK) {
      if constexpr (PARTS == 1) {
        load_rows<HALVES>(registers, x);
        load_columns(registers, weight, TILE_LINE, LINE);
        multiply_tiles<HALVES>(registers);
      } else {
        // Small products first; what the next one needs, too, stays in its tiles.
        const auto rows = [&](int64_t part) OCTAVO_AMX { load_rows<HALVES>(registers, x + part * 2 * TILE_BYTES); };
        const auto columns = [&](int64_t part) OCTAVO_AMX {
          load_columns(registers, weight + part * 2 * TILE_BYTES, TILE_BYTES, TILE_LINE);
        };
        rows(2), columns(0), multiply_tiles<HALVES>(registers);
        rows(1), multiply_tiles<HALVES>(registers);
        columns(1), multiply_tiles<HALVES>(registers);
        rows(0), multiply_tiles<HALVES>(registers);
        columns(2), multiply_tiles<HALVES>(registers);
        columns(0), multiply_tiles<HALVES>(registers);
      }
    }
    registers.store<0>(sums, LINE);
    registers.store<1>(sums + SIDE, LINE);
    if constexpr (HALVES == 2) {
      registers.store<2>(below, LINE);
      registers.store<3>(below + SIDE, LINE);
    }
  }
};

}  // namespace

OCTAVO_EXPORT(gemm_ask_for_amx)(int64_t* given) { *given = ask_for_tiles(); }
OCTAVO_EXPORT_PRODUCT(amx_float32, ByTiles<3>)
OCTAVO_EXPORT_PRODUCT(amx_bfloat16, ByTiles<1>)

#else

OCTAVO_EXPORT(gemm_ask_for_amx)(int64_t* given) { *given = 0; }
void amx_float32_part(const Product&, int, int) {}
void amx_bfloat16_part(const Product&, int, int) {}

#endif

}  // namespace octavo::gemm

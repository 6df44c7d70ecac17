// Products by matrix tiles of the weights of gemm_int8.cpp and gemm_int4.cpp, for many rows.
//
// Tiles make a group's sums, which are integers and exact. They are scaled and added in float32 by the operations of those
// kernels, in their order, so that a result is the same to the bit whichever computes it: fewer rows than fill a tile go by
// vectors. Weights are those that the other kernels read; some groups of a panel at a time are written out as
// signed bytes, for all rows.
#include "gemm_groups.h"
#include "half.h"
#include "tiles.h"

namespace octavo::gemm {

#if defined(OCTAVO_AMX)
namespace {

constexpr int64_t SIDE = TILE_ROWS;                  // rows, or columns, of a tile
constexpr int64_t SIDES = PANEL / SIDE;              // tiles that are side by side in a panel
constexpr int64_t HALF_TILE = UNITS * TILE_LINE;     // bytes of a group's weights, or of its x
constexpr int64_t X_BYTES = SIDE * ROW_GROUP_BYTES;  // of a group

// Tiles 0 and 1 are sums; 2 is x, and 3 are weights: of both, a group is half a tile.
constexpr TileShapes SHAPES{.row_bytes = {64, 64, GROUP, 64}, .rows = {16, 16, 16, UNITS}};

// Where a panel has what belongs to a group: integers GROUP_BYTES apart, and scales.
template <bool OF_ROTATED>
struct Int8 {
  static constexpr int64_t GROUP_BYTES = OF_ROTATED ? PANEL * GROUP : INT8_GROUP_BYTES;
  static constexpr bool ROTATED = OF_ROTATED;
  static constexpr bool HAS_MINIMA = false;

  static int64_t panel_bytes(int64_t groups) {
    return OF_ROTATED ? rotated_panel_bytes(groups) : groups * INT8_GROUP_BYTES;
  }

  static OCTAVO_INLINE_MEMBER Vector scale(const char* panel, int64_t groups, int64_t group, int64_t side) {
    if constexpr (OF_ROTATED)
      return load(reinterpret_cast<const uint8_t*>(panel) + groups * GROUP_BYTES + group * PANEL + side * SIDE);
    else
      return load(reinterpret_cast<const float16*>(panel + group * GROUP_BYTES + PANEL * GROUP) + side * SIDE);
  }

  // What the scales of rotated groups count, [PANEL].
  static OCTAVO_INLINE_MEMBER const float* counted(const char* panel, int64_t groups) {
    return reinterpret_cast<const float*>(panel + groups * ROTATED_GROUP_BYTES);
  }

  // Units 2 * i and 2 * i + 1 of the columns from 16 * side on.
  static OCTAVO_INLINE_MEMBER void read(const char* group, int64_t i, int64_t side, Integers (&units)[2]) {
    static_assert(OFFSET == 128);
    for (int64_t j = 0; j < 2; ++j)
      units[j] = load_integers(group + ((2 * i + j) * PANEL + side * SIDE) * UNIT) ^ static_cast<int32_t>(0x80808080);
  }
};

struct Int4 {
  static constexpr int64_t GROUP_BYTES = INT4_GROUP_BYTES;
  static constexpr bool ROTATED = false;
  static constexpr bool HAS_MINIMA = true;

  static int64_t panel_bytes(int64_t groups) { return groups * GROUP_BYTES; }

  static OCTAVO_INLINE_MEMBER Vector scale(const char* panel, int64_t, int64_t group, int64_t side) {
    return load(reinterpret_cast<const float16*>(panel + group * GROUP_BYTES + PANEL * GROUP / 2) + side * SIDE);
  }

  static OCTAVO_INLINE_MEMBER Vector least(const char* panel, int64_t group, int64_t side) {
    return load(reinterpret_cast<const float16*>(panel + group * GROUP_BYTES + PANEL * GROUP / 2) + PANEL + side * SIDE);
  }

  static OCTAVO_INLINE_MEMBER void read(const char* group, int64_t i, int64_t side, Integers (&units)[2]) {
    const Integers both = load_integers(group + (i * PANEL + side * SIDE) * UNIT);
    units[0] = both & 0x0f0f0f0f;
    units[1] = both >> 4 & 0x0f0f0f0f;
  }
};

// x: for each group [SIDE][GROUP] int8, then scales [SIDE], then what they come to times the sums of the int8, [SIDE].
template <class Weights>
struct ByTiles {
  static constexpr int ROWS = SIDE;
  static constexpr int64_t ROW_UNIT = 1;
  static constexpr int64_t CACHE = 5 << 18;
  static constexpr int64_t CHUNK = 16;  // groups that are written out at a time: 16 KB
  static constexpr int64_t MOST = 16;   // tiles that share them

  static int64_t row_bytes(int64_t inputs) { return groups_of(inputs) * ROW_GROUP_BYTES; }
  static int64_t panel_bytes(int64_t inputs) { return Weights::panel_bytes(groups_of(inputs)); }
  static int64_t slice(const Product& p) { return p.inputs; }

  template <class T>
  static void prepare(const T* x, int64_t stride, int64_t rows, int64_t inputs, char* to) {
    const auto note = [](float scale, int32_t sum) { return scale * static_cast<float>(sum); };
    if (rows < SIDE) __builtin_memset(to, 0, static_cast<size_t>(groups_of(inputs) * X_BYTES));
    for (int64_t row = 0; row < rows; ++row) {
      const T* from = x + row * stride;
      char* group = to;
      for (int64_t left = inputs; left > 0; left -= GROUP, from += GROUP, group += X_BYTES) {
        int8_t* integers = reinterpret_cast<int8_t*>(group) + row * GROUP;
        float* scales = reinterpret_cast<float*>(group + SIDE * GROUP);
        if (left < GROUP) {
          __builtin_memset(integers, 0, GROUP);
          make_group<Weights::ROTATED>(from, left, integers, scales[row], scales[SIDE + row], note);
        } else {
          // A size that the compiler knows.
          make_group<Weights::ROTATED>(from, GROUP, integers, scales[row], scales[SIDE + row], note);
        }
      }
    }
  }

  OCTAVO_AMX static void multiply_panel(const Product& p, const Tiles& tiles, int64_t first, int64_t last,
                                        const char* x, int64_t bytes, int64_t panel, int64_t) {
    const int64_t groups = groups_of(p.inputs);
    const char* weight = static_cast<const char*>(p.weight) + panel * panel_bytes(p.inputs);
    alignas(64) float sums[MOST][SIDE * PANEL];
    alignas(64) char written[CHUNK][SIDES][HALF_TILE];
    TileRegisters registers;
    registers.configure(SHAPES);
    for (; first < last; first += MOST, x += MOST * bytes) {
      const int64_t some = smaller(MOST, last - first);
      __builtin_memset(sums, 0, static_cast<size_t>(some) * sizeof sums[0]);
      for (int64_t group = 0; group < groups; group += CHUNK) {
        const int64_t count = smaller(CHUNK, groups - group);
        write_out(weight + group * Weights::GROUP_BYTES, count, written);
        for (int64_t i = 0; i < some; ++i)
          for (int64_t side = 0; side < SIDES; ++side)
            multiply(registers, x + i * bytes + group * X_BYTES, written[0][side], {weight, groups, group, group + count},
                     side, sums[i]);
      }
      if constexpr (Weights::ROTATED) {
        const float* counted = Weights::counted(weight, groups);
        for (int64_t at = 0; at < some * SIDE * PANEL; at += SIDE)
          store(sums[0] + at, load(sums[0] + at) * load(counted + at % PANEL));
      }
      for (int64_t i = 0; i < some; ++i)
        finish_tile(sums[i], static_cast<int>(tiles.size(first + i)), p, tiles.start(first + i), panel * PANEL);
    }
    registers.release();
  }

 private:
  static OCTAVO_INLINE_MEMBER void write_out(const char* weight, int64_t count, char (*to)[SIDES][HALF_TILE]) {
    for (int64_t group = 0; group < count; ++group, weight += Weights::GROUP_BYTES)
      for (int64_t i = 0; i < UNITS / 2; ++i)
        for (int64_t side = 0; side < SIDES; ++side) {
          Integers units[2];
          Weights::read(weight, i, side, units);
          __builtin_memcpy(to[group][side] + 2 * i * TILE_LINE, units, sizeof units);
        }
  }

  // Some of the groups of a panel.
  struct Groups {
    const char* panel;
    int64_t groups, first, last;
  };

  // Adds some groups to the sums of a tile of x and of SIDE columns. A group's integers are multiplied while those of the
  // one before are scaled.
  OCTAVO_AMX static void multiply(TileRegisters& registers, const char* x, const char* columns, const Groups& w,
                                  int64_t side, float* sums) {
    alignas(64) int32_t products[2][SIDE * SIDE];
    Vector total[SIDE];
    sums += side * SIDE;
#pragma GCC unroll 16
    for (int64_t row = 0; row < SIDE; ++row) total[row] = load(sums + row * PANEL);
    start<0>(registers, x, columns, products[0]);
    for (int64_t group = w.first; group < w.last; ++group, x += X_BYTES) {
      const bool odd = (group - w.first) % 2;
      columns += SIDES * HALF_TILE;
      if (group + 1 < w.last) {
        if (odd)
          start<0>(registers, x + X_BYTES, columns, products[0]);
        else
          start<1>(registers, x + X_BYTES, columns, products[1]);
      }
      const int32_t* made = products[odd];
      const float* row_scales = reinterpret_cast<const float*>(x + SIDE * GROUP);
      const Vector scale = Weights::scale(w.panel, w.groups, group, side);
      Vector least{};
      if constexpr (Weights::HAS_MINIMA) least = Weights::least(w.panel, group, side);
#pragma GCC unroll 16
      for (int64_t row = 0; row < SIDE; ++row) {
        const Vector sum = __builtin_convertvector(load_integers(made + row * SIDE), Vector) * all(row_scales[row]);
        total[row] = fma(sum, scale, total[row]);
        if constexpr (Weights::HAS_MINIMA) total[row] = fma(all(row_scales[SIDE + row]), least, total[row]);
      }
    }
#pragma GCC unroll 16
    for (int64_t row = 0; row < SIDE; ++row) store(sums + row * PANEL, total[row]);
  }

  template <int SUM>
  OCTAVO_AMX OCTAVO_INLINE_MEMBER static void start(TileRegisters& registers, const char* x, const char* columns,
                                                    int32_t* to) {
    registers.zero<SUM>();
    registers.load<2>(x, GROUP);
    registers.load<3>(columns, TILE_LINE);
    registers.multiply_int8<SUM, 2, 3>();
    registers.store<SUM>(to, TILE_LINE);
  }
};

// Room for a tile here is room for two of the kernels for vectors.
using Part = void(const Product& p, int thread, int threads);

template <class Weights>
OCTAVO_INLINE void part_by(Part& by_vectors, const Product& p, int thread, int threads) {
  if (p.rows >= SIDE) return product_part<ByTiles<Weights>>(p, thread, threads);
  Product few = p;
  few.workspace_tiles *= 2;
  by_vectors(few, thread, threads);
}

}  // namespace

void amx_int8_part(const Product& p, int thread, int threads) { part_by<Int8<false>>(int8_part, p, thread, threads); }
void amx_int8_rotated_part(const Product& p, int thread, int threads) {
  part_by<Int8<true>>(int8_rotated_part, p, thread, threads);
}
void amx_int4_part(const Product& p, int thread, int threads) { part_by<Int4>(int4_part, p, thread, threads); }
OCTAVO_EXPORT_PART(amx_int8, ByTiles<Int8<false>>)
OCTAVO_EXPORT_PART(amx_int8_rotated, ByTiles<Int8<true>>)
OCTAVO_EXPORT_PART(amx_int4, ByTiles<Int4>)

#else

void amx_int8_part(const Product&, int, int) {}
void amx_int8_rotated_part(const Product&, int, int) {}
void amx_int4_part(const Product&, int, int) {}

#endif

}  // namespace octavo::gemm

// Products y = x @ W.T + bias of any number of rows with weights that were laid out once.
//
// A tile is up to Kernel::ROWS rows of x, in units of Kernel::ROW_UNIT, by PANEL columns of y. The weights of PANEL columns
// lie together, in the order in which a tile reads them; rows of x are laid out likewise before they are read (`prepare`).
// An element of y is one chain of additions along K, the same one however many rows there are and whichever thread makes
// it.
#pragma once

#include "gemm_rows.h"
#include "threads.h"

namespace octavo::gemm {

constexpr int64_t PANEL = 2 * WIDTH;

// Kinds of products, as Python numbers them.
enum Kind : int64_t {
  BY_FLOAT32,
  BY_BFLOAT16,
  BY_INT8,
  BY_INT8_ROTATED,
  BY_INT8_FAST,
  BY_INT4,
  BY_AMX_FLOAT32,
  BY_AMX_BFLOAT16,
  BY_AMX_INT8,
  BY_AMX_INT8_ROTATED,
  BY_AMX_INT4,
  BY_Q4_0,
  BY_Q5_0,
  BY_Q5_1,
  BY_Q2_K,
  BY_Q3_K,
  BY_Q4_K,
  BY_Q5_K,
  BY_Q6_K,
  BY_IQ4_NL,
  BY_IQ4_XS,
  BY_MXFP4,
  BY_INT4_128,
  BY_E4M3,
  BY_PARTS,
};

constexpr int VECTOR_ROWS = REGISTERS == 32 ? 12 : 6;  // of a tile of the kernels for float32 and bfloat16

constexpr int64_t FEW = 12;  // rows that BY_FLOAT32 multiplies sooner than BY_AMX_FLOAT32, which reads the same weights

// Rows of activations and of results are either.
enum Format : int64_t { BFLOAT16 = 0, FLOAT32 = 1 };

struct Product {
  const void* x;
  void* y;
  const void* weight;  // as it was packed
  const float* bias;   // null for none
  void* workspace;     // aligned to 64; room for one tile more than the rows need, and better for one more a thread
  int64_t workspace_tiles;
  int64_t x_format, y_format;
  int64_t x_stride, y_stride;
  int64_t rows, outputs, inputs;
  Ticket* tickets = nullptr;  // one for each thread, all 0: threads may take each other's columns; null: they do not
};

constexpr int64_t rounded_up(int64_t size, int64_t to) { return (size + to - 1) / to * to; }

// Rows, at least one, are cut into equal tiles of whole units, of which the first ones have a unit more.
struct Tiles {
  int64_t first, end, unit, count, units_of_last, longer;
  OCTAVO_INLINE_MEMBER Tiles(int64_t first, int64_t rows, int64_t most, int64_t unit)
      : first(first), end(first + rows), unit(unit), count((rows + most - 1) / most) {
    const int64_t units = (rows + unit - 1) / unit;
    units_of_last = units / count;
    longer = units % count;
  }
  OCTAVO_INLINE_MEMBER int64_t start(int64_t tile) const {
    return first + (units_of_last * tile + smaller(tile, longer)) * unit;
  }
  OCTAVO_INLINE_MEMBER int64_t size(int64_t tile) const {
    return smaller((units_of_last + (tile < longer)) * unit, end - start(tile));
  }
};

// How threads divide a product: `row_parts` parts of the rows, as few as serve, each of them shared by
// threads / row_parts threads that take different columns. Every part reads all weights.
OCTAVO_INLINE int row_parts(int64_t rows, int64_t panels, int64_t panel_bytes, int threads) {
  // What reading a panel takes, in rows that are multiplied by it: from memory, and from a core's cache.
  constexpr int64_t FAR = 20, NEAR = 2, CACHE = 1 << 20;
  const int64_t reading = panels * panel_bytes > CACHE ? FAR : NEAR;
  int best = 1;
  int64_t least = INT64_MAX;
  for (int parts = 1; parts <= threads; ++parts) {
    if (threads % parts || parts > rows) continue;
    const int64_t part = (rows + parts - 1) / parts;
    const int64_t columns = (panels + threads / parts - 1) / (threads / parts);
    const int64_t cost = columns * (part + reading);
    if (cost < least) {
      least = cost;
      best = parts;
    }
  }
  return best;
}

// Adds the bias to a tile's sums, `rows` rows of PANEL, and writes those that are columns of y.
template <class T>
__attribute__((noinline)) void write_tile(const float* sums, int rows, const float* bias, int64_t columns, T* y,
                                          int64_t stride) {
  for (int row = 0; row < rows; ++row, sums += PANEL, y += stride)
    each(smaller(columns, PANEL), [&](auto place) {
      const Vector sum = load(sums + place.at);
      place.write(y, bias ? sum + place.read(bias) : sum);
    });
}

// Finishes a tile of y from its sums.
OCTAVO_INLINE void finish_tile(const float* sums, int rows, const Product& p, int64_t row, int64_t column) {
  const float* bias = p.bias ? p.bias + column : nullptr;
  const int64_t at = row * p.y_stride + column;
  if (p.y_format == FLOAT32)
    write_tile(sums, rows, bias, p.outputs - column, static_cast<float*>(p.y) + at, p.y_stride);
  else
    write_tile(sums, rows, bias, p.outputs - column, static_cast<bfloat16*>(p.y) + at, p.y_stride);
}

// Weights that are asked for before they are needed: of a panel that is read once, some way ahead.
template <int64_t UNIT>
struct OwnAhead {
  const char* panel;
  static constexpr int64_t AHEAD = 8192;  // bytes

  OCTAVO_INLINE_MEMBER void fetch(int64_t unit) const {
    for (int64_t line = 0; line < UNIT; line += 64) __builtin_prefetch(panel + AHEAD + unit * UNIT + line, 0, 2);
  }
};

// Where several tiles read a panel, each asks for a part of the next one, to the second cache: the first is theirs.
struct NextAhead {
  const char* part;
  int64_t step;  // bytes, a line at most, with each unit of inputs

  OCTAVO_INLINE_MEMBER void fetch(int64_t unit) const { __builtin_prefetch(part + unit * step, 0, 2); }
};

// What kernels share whose `multiply<N>` takes the sums of N rows at a time in vectors.
template <class Kernel>
struct ByVectors {
  static constexpr int64_t ROW_UNIT = 1;
  static constexpr int64_t CACHE = 1 << 19;  // of a core's second level, what tiles of x may take
  static int64_t slice(const Product& p) { return p.inputs; }  // inputs that are multiplied before the next ones

  // Some tiles of rows, which lie at x, by a panel, and by the inputs of a slice.
  static void multiply_panel(const Product& p, const Tiles& tiles, int64_t first, int64_t last, const char* x,
                             int64_t bytes, int64_t panel, int64_t) {
    const int64_t size = Kernel::panel_bytes(p.inputs), count = last - first;
    const char* weight = static_cast<const char*>(p.weight) + panel * size;
    alignas(64) float sums[Kernel::ROWS * PANEL];
    for (int64_t i = 0; i < count; ++i, x += bytes) {
      const int rows = static_cast<int>(tiles.size(first + i));
      if constexpr (requires { Kernel::UNIT_BYTES; }) {
        if (count > 1)
          multiply_rows<Kernel::ROWS>(rows, x, weight, p.inputs, sums,
                                      NextAhead{weight + size + i * (size / count), Kernel::UNIT_BYTES / count});
        else
          multiply_rows<Kernel::ROWS>(rows, x, weight, p.inputs, sums, OwnAhead<Kernel::UNIT_BYTES>{weight});
      } else {
        multiply_rows<Kernel::ROWS>(rows, x, weight, p.inputs, sums);
      }
      finish_tile(sums, rows, p, tiles.start(first + i), panel * PANEL);
    }
  }

 private:
  template <int N>
  OCTAVO_INLINE_MEMBER static void multiply_rows(int rows, const char* x, const char* weight, int64_t inputs,
                                                 float* sums, auto... ahead) {
    if constexpr (N > 1)
      if (rows < N) return multiply_rows<N - 1>(rows, x, weight, inputs, sums, ahead...);
    Kernel::template multiply<N>(x, weight, inputs, sums, ahead...);
  }
};

template <class Kernel>
OCTAVO_INLINE int64_t tile_bytes(int64_t inputs) {
  return larger<int64_t>(rounded_up(Kernel::ROWS * Kernel::row_bytes(inputs), 64), 64);
}

// One thread's share of a product; all threads of a region call it.
template <class Kernel>
OCTAVO_INLINE void product_part(const Product& p, int thread, int threads) {
  if (p.rows == 0 || p.outputs == 0) return;
  const int64_t panels = (p.outputs + PANEL - 1) / PANEL;
  const int64_t bytes = tile_bytes<Kernel>(p.inputs);
  const int64_t spare = p.workspace_tiles - (p.rows + Kernel::ROWS - 1) / Kernel::ROWS;
  const int working = static_cast<int>(smaller<int64_t>(threads, spare));
  const int parts = row_parts(p.rows, panels, Kernel::panel_bytes(p.inputs), working), columns = working / parts;
  // A lone tile is laid out by every thread for itself, which takes no longer and needs no waiting for each other.
  const bool alone = p.rows <= Kernel::ROWS * parts;
  const bool meet = !alone && columns > 1;
  if (thread >= working) {
    if (meet) barrier(threads);
    return;
  }
  const int part = thread / columns, column = thread % columns;
  const Share rows = share(p.rows, part, parts);
  const Tiles tiles(rows.first, rows.last - rows.first, Kernel::ROWS, Kernel::ROW_UNIT);
  // The second sum counts at least the tiles of the parts before.
  char* x = static_cast<char*>(p.workspace) + (alone ? thread : rows.first / Kernel::ROWS + part) * bytes;
  const Share prepared = alone ? Share{0, 1} : share(tiles.count, column, columns);
  for (int64_t i = prepared.first; i < prepared.last; ++i) {
    const int64_t at = tiles.start(i) * p.x_stride;
    if (p.x_format == FLOAT32)
      Kernel::prepare(static_cast<const float*>(p.x) + at, p.x_stride, tiles.size(i), p.inputs, x + i * bytes);
    else
      Kernel::prepare(static_cast<const bfloat16*>(p.x) + at, p.x_stride, tiles.size(i), p.inputs, x + i * bytes);
  }
  if (meet) barrier(threads);

  const Share mine = share(panels, column, columns);
  const int64_t slice = Kernel::slice(p);
  if (p.tickets && alone && parts == 1 && slice >= p.inputs) {
    // Each thread has the tile for itself, so any of them can multiply any panel.
    constexpr int64_t BYTES = 1 << 16;  // that are taken at a time
    const int64_t some = larger<int64_t>(BYTES / larger<int64_t>(Kernel::panel_bytes(p.inputs), 1), 1);
    each_taken(p.tickets, panels, column, columns, some, [&](int64_t panel) {
      Kernel::multiply_panel(p, tiles, 0, tiles.count, x, bytes, panel, 0);
    });
    return;
  }
  const int64_t block = larger<int64_t>(Kernel::CACHE / tile_bytes<Kernel>(slice), 4);
  int64_t input = 0;
  do {  // once where there are no inputs: y is the bias then
    for (int64_t start = 0; start < tiles.count; start += block)
      for (int64_t panel = mine.first; panel < mine.last; ++panel)
        Kernel::multiply_panel(p, tiles, start, smaller(start + block, tiles.count), x + start * bytes, bytes, panel,
                               input);
    input += slice;
  } while (input < p.inputs);
}

// All of it; part(p, thread, threads) is one thread's share.
template <class Part>
OCTAVO_INLINE void product(const Product& p, const Part& part) {
  constexpr int64_t WORTH = 1 << 17;  // products below this are over before other threads have begun
  constexpr int MOST = 64;            // threads that take each other's columns
  Ticket tickets[MOST] = {};
  parallel(p.rows * p.outputs * p.inputs >= WORTH, [&](int thread, int threads) {
    Product own = p;
    if (threads <= MOST) own.tickets = tickets;
    part(own, thread, threads);
  });
}

// What an allocation has to know: bytes of packed weights, most rows of a tile, bytes of a tile in the workspace,
// columns of a panel.
template <class Kernel>
OCTAVO_INLINE void layout(int64_t outputs, int64_t inputs, int64_t* to) {
  to[0] = (outputs + PANEL - 1) / PANEL * Kernel::panel_bytes(inputs);
  to[1] = Kernel::ROWS;
  to[2] = tile_bytes<Kernel>(inputs);
  to[3] = PANEL;
}

// What Python calls for weights of one kind, and one thread's share within an open parallel region.
void float32_part(const Product& p, int thread, int threads);
void bfloat16_part(const Product& p, int thread, int threads);
void int8_part(const Product& p, int thread, int threads);
void int8_rotated_part(const Product& p, int thread, int threads);
void int8_fast_part(const Product& p, int thread, int threads);
void int4_part(const Product& p, int thread, int threads);
void amx_float32_part(const Product& p, int thread, int threads);
void amx_bfloat16_part(const Product& p, int thread, int threads);
void amx_int8_part(const Product& p, int thread, int threads);
void amx_int8_rotated_part(const Product& p, int thread, int threads);
void amx_int4_part(const Product& p, int thread, int threads);
void q4_0_part(const Product& p, int thread, int threads);
void q5_0_part(const Product& p, int thread, int threads);
void q5_1_part(const Product& p, int thread, int threads);
void q2_k_part(const Product& p, int thread, int threads);
void q3_k_part(const Product& p, int thread, int threads);
void q4_k_part(const Product& p, int thread, int threads);
void q5_k_part(const Product& p, int thread, int threads);
void q6_k_part(const Product& p, int thread, int threads);
void iq4_nl_part(const Product& p, int thread, int threads);
void iq4_xs_part(const Product& p, int thread, int threads);
void mxfp4_part(const Product& p, int thread, int threads);
void int4_128_part(const Product& p, int thread, int threads);
void e4m3_part(const Product& p, int thread, int threads);
void parts_part(const Product& p, int thread, int threads);

// A thread's share of a product of any kind.
void part_of(int64_t kind, const Product& p, int thread, int threads);

#define OCTAVO_EXPORT_PRODUCT(kind, Kernel)                                                                           \
  void kind##_part(const Product& p, int thread, int threads) { product_part<Kernel>(p, thread, threads); }           \
  OCTAVO_EXPORT_PART(kind, Kernel)

// Where `kind`_part is written out.
#define OCTAVO_EXPORT_PART(kind, Kernel)                                                                              \
  OCTAVO_EXPORT(gemm_layout_##kind)(int64_t outputs, int64_t inputs, int64_t* to) {                                   \
    layout<Kernel>(outputs, inputs, to);                                                                              \
  }                                                                                                                   \
  OCTAVO_EXPORT(gemm_##kind)(const void* x, void* y, const void* weight, const float* bias, void* workspace,          \
                             int64_t workspace_tiles, int64_t x_format, int64_t y_format, int64_t x_stride,           \
                             int64_t y_stride, int64_t rows, int64_t outputs, int64_t inputs) {                       \
    product({x, y, weight, bias, workspace, workspace_tiles, x_format, y_format, x_stride, y_stride, rows, outputs,   \
             inputs},                                                                                                 \
            kind##_part);                                                                                             \
  }

}  // namespace octavo::gemm

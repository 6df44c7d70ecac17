// How a batch of attention is cut into work, and the memory of a thread.
#pragma once

#include "attention.h"
#include "attention_chunk.h"
#include "threads.h"

namespace octavo {
namespace {

// Queries that a tile has, heads that share keys included.
constexpr int64_t TILE = 96;
// What loading a key costs, in queries that are computed with it.
constexpr int64_t LOADING = 12;
// How much of a chunk is fetched ahead: a part of the cache that each core has for itself.
constexpr int64_t AHEAD_BYTES = 1 << 18;
// The most memory for shared work, in float32.
constexpr int64_t SHARED_LIMIT = 1 << 24;

OCTAVO_INLINE int64_t rounded_up(int64_t size, int64_t to) { return (size + to - 1) / to * to; }

OCTAVO_INLINE int64_t tile_queries(const Attention& a) { return larger(TILE / (a.heads / a.kv_heads), int64_t{1}); }

// Some queries of one row.
struct Tile {
  int64_t row, token, count;  // first token, number of queries
  int64_t position;           // of the first query
  int64_t low, high;          // positions [low, high) are seen by some query
  int64_t context;

  OCTAVO_INLINE_MEMBER int64_t keys() const { return larger(high - low, int64_t{0}); }
  OCTAVO_INLINE_MEMBER int64_t first_chunk() const { return low / CHUNK; }
  OCTAVO_INLINE_MEMBER int64_t chunks() const { return keys() ? (high - 1) / CHUNK + 1 - low / CHUNK : 0; }
};

// Calls body(tile, next tile or null) for each tile, in order.
template <class Body>
OCTAVO_INLINE void each_tile(const Attention& a, const Body& body) {
  const int64_t width = tile_queries(a);
  Tile before;
  bool any = false;
  for (int64_t row = 0; row < a.rows; ++row) {
    const int64_t start = a.query_start[row], queries = a.query_start[row + 1] - start, context = a.context[row];
    const int64_t origin = a.causal ? context - queries : 0;
    for (int64_t begin = 0; begin < queries; begin += width) {
      Tile tile{row, start + begin, smaller(width, queries - begin), origin + begin, 0, context, context};
      const int64_t end = tile.position + tile.count;
      if (a.causal) tile.high = smaller(tile.high, end);
      if (a.left >= 0) {
        tile.low = larger(tile.position - a.left, int64_t{0});
        tile.high = smaller(tile.high, end + a.right);
      }
      if (any) body(before, &tile);
      before = tile, any = true;
    }
  }
  if (any) body(before, static_cast<const Tile*>(nullptr));
}

// Key heads that a tile with few queries computes together: what pages hold of a token then comes in one piece.
OCTAVO_INLINE int64_t heads_together(const Attention& a, const Tile& tile) {
  const int64_t size = a.kv_format == PAGE_F32 ? 4 : a.kv_format == PAGE_INT8 ? 1 : 2;
  const int64_t fetched = AHEAD_BYTES / (2 * CHUNK * a.head_dim * size);
  const int64_t most = smaller(TILE / (tile.count * (a.heads / a.kv_heads)), fetched);
  return smaller(larger(most, int64_t{1}), a.kv_heads);
}

// What a key of one head of a tile costs.
OCTAVO_INLINE int64_t key_cost(const Attention& a, const Tile& tile) {
  return tile.count * (a.heads / a.kv_heads) + LOADING;
}

// What `heads` key heads of a tile cost.
OCTAVO_INLINE int64_t tile_cost(const Attention& a, const Tile& tile, int64_t heads) {
  return heads * (tile.keys() * key_cost(a, tile) + 1);
}

// The memory of one thread, in the order in which it lies.
struct Workspace {
  Unit *keys, *values, *queries;
  Query* of;
  float *state, *key_scales, *value_scales;
  void* rows[2];  // `Rows` of a chunk and of the next
  void* nothing;  // a vector of zeros
  int64_t bytes;

  Workspace(const Attention& a, char* from) {
    const int64_t count = larger(TILE, a.heads / a.kv_heads), width = rounded_up(a.head_dim, WIDTH);
    int64_t used = 0;
    const auto take = [&]<class T>(T*& place, int64_t size) {
      place = reinterpret_cast<T*>(from + used);
      used = rounded_up(used + size * static_cast<int64_t>(sizeof(T)), 64);
    };
    take(keys, width * CHUNK);
    take(values, width * CHUNK);
    take(queries, width * count);
    take(of, count);
    take(state, (width + 2) * count);
    take(key_scales, CHUNK);
    take(value_scales, CHUNK);
    for (void*& place : rows) {
      Rows<float>* found;  // all have the same size
      take(found, 1);
      place = found;
    }
    Unit* zeros;
    take(zeros, width);
    nothing = zeros;
    bytes = used;
  }
};

OCTAVO_INLINE Running running(float* from, int64_t count) { return {from, from + count, from + 2 * count}; }

}  // namespace
}  // namespace octavo

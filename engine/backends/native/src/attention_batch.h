// How a batch of attention is cut into work, and the memory of a thread.
#pragma once

#include "attention.h"
#include "attention_direct.h"
#include "threads.h"

namespace octavo {
namespace {

// Queries that a tile has, heads that share keys included: the more, the less often keys are packed. Large tiles are
// taken where each thread has so many of them that none waits long for another; what a core's cache holds of its own
// says how large.
constexpr int64_t TILE = 96, LARGE_TILE = 384, LARGEST_TILE = 768, TILES_EACH = 8;
// What packing a key costs, in queries that are computed with it, and what reading it where it lies does.
constexpr int64_t LOADING = 12, READING = 4;
// How much of a chunk is fetched ahead: half of the cache that each core has for itself, and at least so much.
constexpr int64_t AHEAD_BYTES = 1 << 18;
// Distances between a tile's queries and the keys of a chunk, rounded up to whole vectors.
constexpr int64_t DISTANCES = TILE + CHUNK;
// The most memory for shared work, in float32.
constexpr int64_t SHARED_LIMIT = 1 << 24;

// Some queries of one row.
struct Tile {
  int64_t row, token, count;  // first token, number of queries
  int64_t position;           // of the first query
  int64_t low, high;          // positions [low, high) are seen by some query
  int64_t context;
  int32_t two_way;  // 1: its queries see all later keys; 2: all keys of their row

  OCTAVO_INLINE_MEMBER int64_t keys() const { return larger(high - low, int64_t{0}); }
  OCTAVO_INLINE_MEMBER int64_t first_chunk() const { return low / CHUNK; }
  OCTAVO_INLINE_MEMBER int64_t chunks() const { return keys() ? (high - 1) / CHUNK + 1 - low / CHUNK : 0; }
  // Its chunk n has keys [begin(n), begin(n + 1)).
  OCTAVO_INLINE_MEMBER int64_t begin(int64_t nth) const {
    return smaller(larger((first_chunk() + nth) * CHUNK, low), high);
  }
};

// The tiles of a batch, in order, and what they cost.
struct Tiles {
  const Attention& a;
  const int64_t fold, width;  // heads that share keys; tokens of a tile

  explicit OCTAVO_INLINE_MEMBER Tiles(const Attention& a)
      : a(a), fold(a.heads / a.kv_heads), width(larger(a.tile / fold, int64_t{1})) {
    const int64_t size = a.kv_format == PAGE_F32 ? 4 : a.kv_format == PAGE_INT8 ? 1 : 2;
    fetched = larger(AHEAD_BYTES, a.cache / 2) / (2 * CHUNK * a.head_dim * size);
    begin_row();
  }

  // The next tile; false after the last one.
  OCTAVO_INLINE_MEMBER bool next(Tile& tile) {
    while (begin >= queries) {
      if (++row >= a.rows) return false;
      begin_row();
    }
    const int64_t context = a.context[row], position = (a.causal ? context - queries : 0) + begin;
    tile = {row, a.query_start[row] + begin, smaller(width, queries - begin), position, 0, context, context,
            a.two_way ? a.two_way[row] : 0};
    const int64_t end = position + tile.count;
    if (a.causal && !tile.two_way) tile.high = smaller(tile.high, end);
    if (a.left >= 0) {
      tile.low = larger(position - a.left, int64_t{0});
      if (!tile.two_way) tile.high = smaller(tile.high, end + a.right);
    }
    if (a.chunk) tile.low = position - position % a.chunk;
    if (tile.two_way == 2) tile.low = 0;
    begin += width;
    return true;
  }

  // Key heads that a tile with few queries computes together: what pages hold of a token then comes in one piece.
  OCTAVO_INLINE_MEMBER int64_t heads_together(const Tile& tile) const {
    const int64_t most = smaller(TILE / (tile.count * fold), fetched);
    return smaller(larger(most, int64_t{1}), a.kv_heads);
  }

  OCTAVO_INLINE_MEMBER bool few(const Tile& tile) const { return tile.count * fold <= FEW; }

  // What a key of one head of a tile costs.
  OCTAVO_INLINE_MEMBER int64_t key_cost(const Tile& tile) const {
    return tile.count * fold + (few(tile) ? READING : LOADING);
  }

  // What `heads` key heads of a tile cost.
  OCTAVO_INLINE_MEMBER int64_t cost(const Tile& tile, int64_t heads) const {
    return heads * (tile.keys() * key_cost(tile) + 1);
  }

 private:
  int64_t fetched, row = 0, begin, queries;

  OCTAVO_INLINE_MEMBER void begin_row() {
    begin = 0, queries = row < a.rows ? a.query_start[row + 1] - a.query_start[row] : 0;
  }
};

// The memory of one thread, in the order in which it lies.
struct Workspace {
  Unit *keys, *values, *queries;
  Query* of;
  float *state, *key_scales, *value_scales;
  int64_t *key_places, *value_places;
  void* nothing;  // a vector of zeros
  // For terms of contents and distances (attention_content.h).
  Unit *distances, *key_units;
  int64_t* distance_places;
  float *products, *terms;
  int64_t bytes;

  Workspace(const Attention& a, char* from) {
    const int64_t count = larger(a.tile, a.heads / a.kv_heads), width = rounded_up(a.head_dim, WIDTH);
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
    take(key_places, CHUNK);
    take(value_places, CHUNK);
    Unit* zeros;
    take(zeros, width);
    nothing = zeros;
    const int64_t some = a.content ? 1 : 0;
    take(distances, some * width * DISTANCES);
    take(key_units, some * WIDTH * (width + 1));
    take(distance_places, some * DISTANCES);
    take(products, some * (larger(WIDTH, int64_t{ROWS}) * DISTANCES + WIDTH));
    products += WIDTH;  // what lies before the first row may be read
    take(terms, some * TILE * CHUNK);
    bytes = used;
  }
};

OCTAVO_INLINE Running running(float* from, int64_t count) { return {from, from + count, from + 2 * count}; }

}  // namespace
}  // namespace octavo

// Attention of a ragged batch over keys and values in pages, or laid end to end.
//
// Work is cut into tiles of queries, all heads that share keys together, and each tile walks chunks of keys that begin
// at multiples of CHUNK. A chunk's softmax and sums are made of its own scores alone and merged in the order of chunks,
// and within a chunk every number is made of the same operations in the same order: so a query's result has the same
// bits whatever else is in the batch or the tile, however a prompt was cut and however many threads share the work.
#include "attention_batch.h"

namespace octavo {

namespace {

// Terms of contents and distances have memory for small tiles; what threads share has a limit, which longer contexts
// reach with smaller tiles.
int64_t tile_size(const Attention& a) {
  if (!a.rows || a.content) return TILE;
  const int64_t width = rounded_up(a.head_dim, WIDTH), queries = a.query_start[a.rows] * a.heads;
  int64_t most = smaller(larger(a.cache / (32 * width), LARGE_TILE), LARGEST_TILE);
  most = smaller(most, queries / (a.threads * TILES_EACH));
  if (most <= TILE) return TILE;
  int64_t longest = 0;
  for (int64_t row = 0; row < a.rows; ++row) longest = larger<int64_t>(longest, a.context[row]);
  if (a.threads > 1) most = smaller(most, SHARED_LIMIT / (a.threads * (longest / CHUNK + 1) * (width + 2)));
  return larger(most / ROWS * ROWS, TILE);
}

}  // namespace

void attention_sizes(Attention& a) {
  a.tile = tile_size(a);
  a.workspace_bytes = Workspace(a, nullptr).bytes;
  a.whole = 0;
  int64_t most = 0;
  Tiles tiles(a);
  for (Tile tile; tiles.next(tile);) {
    a.whole += tiles.cost(tile, a.kv_heads);
    most = larger(most, tile.chunks() * tile.count * tiles.fold * (rounded_up(a.head_dim, WIDTH) + 2));
  }
  a.shared_floats = a.threads > 1 && most * a.threads <= SHARED_LIMIT ? most : 0;
}

void attention_part(Attention& a, int64_t thread, int64_t threads) {
  threads = smaller(threads, a.threads);
  if (thread >= threads) return;
#if defined(OCTAVO_PAIRS)
  if (a.q_format == PAGE_BF16 && (a.kv_format == PAGE_BF16 || a.kv_format == PAGE_INT8))
    return attend_pairs(a, thread, threads);
#endif
  attend_singles(a, thread, threads);
}

}  // namespace octavo

OCTAVO_EXPORT(attention_sizes)(octavo::Attention* a) { octavo::attention_sizes(*a); }

OCTAVO_EXPORT(attention)(octavo::Attention* a) {
  // A region costs as much as some ten thousand multiplications.
  const bool worth = a->threads > 1 && a->whole * a->head_dim > 1 << 19;
  octavo::parallel(worth, [=](int thread, int threads) { octavo::attention_part(*a, thread, threads); });
}

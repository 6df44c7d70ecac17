// Which part of a batch a thread computes, and what it will read.
//
// Work lies on a line of costs, of which each thread has a piece. Key heads of a tile that are computed together are
// taken apart where pieces meet; there, a head with many chunks is shared, and one with few is whose piece has more of
// it.
#pragma once

#include "attention_batch.h"

namespace octavo {
namespace {

// A head with fewer chunks is not shared: threads that meet cost as much.
constexpr int64_t SHARED_CHUNKS = 4;

// Of key heads [head, head + heads) of a tile, chunks [begin, end) of all their chunks.
struct Item {
  Tile tile;
  int64_t head, heads, begin, end, chunks;
  int64_t at, key_cost;  // where it begins on the line, what a key of it costs
  bool few;

  OCTAVO_INLINE_MEMBER bool shared() const { return end - begin < chunks; }
};

// The items of a thread, in order.
struct Work {
  Work(const Attention& a, int64_t thread, int64_t threads)
      : a(a), threads(threads), from(bound(thread)), to(bound(thread + 1)), tiles(a) {
    open();
  }

  // The next item; false after the last one.
  OCTAVO_INLINE_MEMBER bool next(Item& item) {
    for (; more && at < to; head < a.kv_heads ? void() : open()) {
      item = {tile, head, smaller(together, a.kv_heads - head), 0, 0, tile.chunks(), at, key_cost, tiles.few(tile)};
      const int64_t each = tile.keys() * key_cost + 1;
      if (item.heads > 1 && (parts(from, each * item.heads) || parts(to, each * item.heads))) item.heads = 1;
      const int64_t cost = each * item.heads;
      const bool reached = at + cost > from;
      if (reached && !item.chunks) item.begin = 0, item.end = 0;
      if (reached && item.chunks) item.begin = cut(item, from), item.end = cut(item, to);
      const bool own = reached && (item.chunks ? item.begin < item.end : at >= from);
      at += cost, head += item.heads;
      if (own) {
        if (head >= a.kv_heads) open();
        return true;
      }
    }
    return false;
  }

  // Whose memory the threads that share an item meet in, and how many chunks are merged there from the beginning on.
  OCTAVO_INLINE_MEMBER void meet(const Item& item, int64_t thread, int64_t& place, int64_t& merged) const {
    place = thread;
    while (bound(place) > item.at) --place;
    int64_t first = place;
    while (!(merged = cut(item, bound(first + 1)))) ++first;
  }

 private:
  const Attention& a;
  const int64_t threads, from, to;
  Tiles tiles;
  Tile tile;
  bool more;
  int64_t at = 0, head, together, key_cost;

  int64_t bound(int64_t thread) const { return a.whole * thread / threads; }

  OCTAVO_INLINE_MEMBER bool parts(int64_t point, int64_t cost) const { return point > at && point < at + cost; }

  void open() {
    more = tiles.next(tile);
    if (more) head = 0, together = tiles.heads_together(tile), key_cost = tiles.key_cost(tile);
  }

  // How many chunks of an item lie before a point of the line.
  int64_t cut(const Item& item, int64_t point) const {
    const int64_t each = item.heads * item.key_cost, keys = item.tile.keys();
    if (point <= item.at) return 0;
    if (point >= item.at + keys * each + item.heads) return item.chunks;
    const auto near = [&](int64_t key) { return item.at + key * each; };
    if (item.chunks < SHARED_CHUNKS || !a.shared_floats) return 2 * point >= near(0) + near(keys) ? item.chunks : 0;
    int64_t nth = 0;  // the first one whose middle lies behind the point
    while (nth < item.chunks) {
      const int64_t first = item.tile.begin(nth) - item.tile.low, last = item.tile.begin(nth + 1) - item.tile.low;
      if (near(first) + near(last) > 2 * point) break;
      ++nth;
    }
    return nth;
  }
};

// Fetches what a thread's items read, some way ahead of it: pages are scattered, and no hardware guesses where. Lines
// come a few at a time between what is computed, since what is read at once would wait behind many.
template <class Form, class T>
struct Ahead {
  Ahead(const Attention& a, const Work& work) : a(a), work(work) { open(); }

  // `count` vectors of units are made next of what pages hold. Loops that have their sums in registers call nothing, so
  // the lines that they take are found here; what does not lie in one piece is fetched at once.
  __attribute__((noinline)) void prepare(int64_t count) {
    read(count);
    if (lead >= FAR) return;
    const int64_t wanted = lines(count);
    int64_t now = lead < NEAR ? (FASTER - 1) * wanted : 0;
    if (end - at < wanted * LINE) now += larger(end - at, int64_t{0}) / LINE + 1;
    fetch_lines(now);
    stop = smaller(end, at + wanted * LINE);
    lead += larger(stop - at, int64_t{0});
  }

  // Of the lines that were found, N or none; what is left comes with the next.
  template <int N>
  OCTAVO_INLINE_MEMBER void take() {
    if (stop - at < N * LINE) return;
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) __builtin_prefetch(at + i * LINE, 0, 2);
    at += N * LINE;
  }

  // As many lines at once.
  __attribute__((noinline)) void fetch(int64_t count) {
    read(count);
    if (lead >= FAR) return;
    fetch_lines(lead < NEAR ? FASTER * lines(count) : lines(count));
  }

 private:
  static constexpr int64_t LINE = 64, BYTES = WIDTH * Form::HELD * static_cast<int64_t>(sizeof(T));
  // How many bytes ahead; below NEAR they come faster than they are read.
  static constexpr int64_t FAR = 128 << 10, NEAR = 96 << 10;
  static constexpr int64_t FASTER = 3;
  const Attention& a;
  Work work;
  Item item;
  const char *at = nullptr, *stop = nullptr, *end = nullptr;  // what is fetched next; of what lies in one piece
  int64_t lead = 0;
  int64_t chunk, key, last;   // keys [key, last) of a chunk
  int64_t slot, left;         // of the key, as many follow it
  bool values;                // keys have come, values do

  // Counts what is read; lines that no loop has taken come later.
  void read(int64_t count) {
    lead -= count * BYTES + larger(stop - at, int64_t{0});
    stop = at;
  }

  // How many lines go with so many vectors.
  static int64_t lines(int64_t count) { return larger(count * smaller(BYTES, LINE) / LINE, int64_t{1}); }

  void fetch_lines(int64_t count) {
    while (count > 0 && (at < end || piece())) {
      const char* from = at;
      const int64_t some = smaller(count, (end - from + LINE - 1) / LINE);
      for (int64_t i = 0; i < some; ++i) __builtin_prefetch(from + i * LINE, 0, 2);
      at = from + some * LINE, lead += some * LINE, count -= some;
    }
  }

  // Begins the next piece; false after the last one.
  bool piece() {
    if (lead >= NEVER) return false;
    while (key >= last) {
      values = !values;
      if (!values && ++chunk == item.end) {
        open();
        if (lead >= NEVER) return false;
      }
      enter();
    }
    if (!left) find();
    const int64_t token = values ? a.value_token : a.key_token, head = values ? a.value_head : a.key_head;
    const T* from = static_cast<const T*>(values ? a.values : a.keys) + slot * token + item.head * head;
    int64_t elements = (item.heads - 1) * head + a.head_dim, some = 1;
    if (elements == token) some = smaller(left, last - key), elements *= some;
    if (sizeof(T) == 1) {  // scales, of which many tokens share a line
      const bfloat16* scales = (values ? a.value_scales : a.key_scales) + slot * a.kv_heads;
      for (int64_t i = 0; i <= some * a.kv_heads; i += LINE / 2) __builtin_prefetch(scales + i, 0, 2);
    }
    key += some, slot += some, left -= some;
    at = reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(from) & ~uintptr_t{LINE - 1});
    end = reinterpret_cast<const char*>(from + elements);
    return true;
  }

  static constexpr int64_t NEVER = int64_t{1} << 40;

  void open() {
    bool more;
    do more = work.next(item);
    while (more && item.begin == item.end);
    if (!more) {
      lead = 2 * NEVER;
      return;
    }
    chunk = item.begin, values = false;
    enter();
  }

  void enter() {
    key = item.tile.begin(chunk), last = item.tile.begin(chunk + 1);
    find();
  }

  void find() {
    if (!a.block_size) {
      slot = a.where[item.tile.row] + key, left = last - key;
    } else {
      const int64_t page = key / a.block_size, offset = key - page * a.block_size;
      slot = a.where[item.tile.row * a.where_row + page] * a.block_size + offset, left = a.block_size - offset;
    }
  }
};

}  // namespace
}  // namespace octavo

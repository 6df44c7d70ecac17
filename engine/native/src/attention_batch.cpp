// Attention of a ragged batch over keys and values in pages, or laid end to end.
//
// Work is cut into tiles of queries, all heads that share keys together, and each tile walks chunks of keys that begin
// at multiples of CHUNK. A chunk's softmax and sums are made of its own scores alone and merged in the order of chunks,
// and within a chunk every number is made of the same operations in the same order: so a query's result has the same
// bits whatever else is in the batch or the tile, however a prompt was cut and however many threads share the work.
#include "attention_batch.h"

namespace octavo {
namespace {

// What of a tile a thread does: of key heads [head, head + heads), chunks [begin, end) of all their chunks.
struct Item {
  const Tile& tile;
  int64_t head, heads, begin, end, chunks;
  const Tile* next;  // what comes after it, null for nothing
  int64_t next_head;
};

template <class Form, class T>
struct Worker {
  Attention& a;
  const Workspace own;
  const Scores how;
  const int64_t fold;

  Worker(Attention& a, char* memory)
      : a(a),
        own(a, memory),
        how{(a.head_dim + Form::HELD - 1) / Form::HELD, rounded_up(a.head_dim, WIDTH), static_cast<float>(a.scale),
            static_cast<float>(a.softcap), a.bias_columns},
        fold(a.heads / a.kv_heads) {
    __builtin_memset(own.nothing, 0, static_cast<size_t>(4 * how.width));
  }

  int64_t count(const Tile& tile) const { return tile.count * fold; }

  template <class Q>
  const Q* query(const Tile& tile, int64_t head, int64_t m) const {
    return static_cast<const Q*>(a.q) + (tile.token + m / fold) * a.q_token + (head * fold + m % fold) * a.q_head;
  }

  template <class Q>
  void load_queries_of(const Tile& tile, int64_t head, int64_t place) const {
    const bool capped = a.centre && a.softcap != 0.0;
    for (int64_t m = 0; m < count(tile); ++m) {
      const Q* from = query<Q>(tile, head, m);
      Unit* to = own.queries + (place + m) * how.units;
      if constexpr (Form::HELD == 2) {
        to[how.units - 1] = 0;
        __builtin_memcpy(to, from, static_cast<size_t>(2 * a.head_dim));
      } else {
        for (int64_t at = 0; at < a.head_dim; at += WIDTH)
          write(reinterpret_cast<float*>(to) + at, read(from + at, a.head_dim - at), a.head_dim - at);
      }
      Vector sums{};
      for (int64_t at = 0; capped && at < a.head_dim; at += WIDTH) {
        const int64_t left = a.head_dim - at;
        sums = fma(read(from + at, left), read(a.centre + head * a.head_dim + at, left), sums);
      }
      own.of[place + m].centre = sum(sums) * how.scale;
      own.of[place + m].bias = a.bias_kind ? a.bias + (head * fold + m % fold) * a.bias_columns : nullptr;
    }
  }

  void load_queries(const Tile& tile, int64_t head, int64_t place) const {
    if constexpr (Form::HELD == 2) return load_queries_of<bfloat16>(tile, head, place);
    if (a.q_format == PAGE_BF16) return load_queries_of<bfloat16>(tile, head, place);
    if (a.q_format == PAGE_F16) return load_queries_of<float16>(tile, head, place);
    load_queries_of<float>(tile, head, place);
  }

  // Which keys of the chunk at a position each query sees.
  void aim(const Tile& tile, int64_t heads, int64_t position) const {
    for (int64_t m = 0; m < heads * count(tile); ++m) {
      const int64_t at = tile.position + m % count(tile) / fold;
      int64_t low = 0, high = tile.context;
      if (a.causal) high = smaller(high, at + 1);
      if (a.left >= 0) low = larger(low, at - a.left), high = smaller(high, at + a.right + 1);
      Query& query = own.of[m];
      query.low = larger(low - position, int64_t{0});
      query.high = smaller(high - position, CHUNK);
      if (query.low >= query.high) query.low = query.high = 0;
      query.bias_shift = position + (a.bias_kind == BY_DISTANCE ? a.bias_zero - at : 0);
    }
  }

  // A part of a row's keys that lie side by side: keys [first, last) of a chunk from a slot on.
  template <class Body>
  bool each_run(const Tile& tile, int64_t position, const Body& body) const {
    const int64_t low = larger(tile.low - position, int64_t{0}), high = smaller(tile.high - position, CHUNK);
    if (!a.block_size) {
      const int64_t slot = a.where[tile.row] + position + low;
      if (slot < 0 || slot + high - low > a.slots) return false;
      body(low, high, slot);
      return true;
    }
    const int32_t* table = a.where + tile.row * a.where_row;
    int64_t page = (position + low) / a.block_size, offset = (position + low) % a.block_size;
    for (int64_t key = low; key < high; ++page, offset = 0) {
      const int64_t some = smaller(a.block_size - offset, high - key), slot = table[page] * a.block_size + offset;
      if (slot < 0 || slot + some > a.slots) return false;
      body(key, key + some, slot);
      key += some;
    }
    return true;
  }

  // Where the keys and values of the chunk at a position lie; false where some lie outside.
  bool find(const Tile& tile, int64_t head, int64_t position, Rows<T>& rows) const {
    const int64_t low = larger(tile.low - position, int64_t{0}), high = smaller(tile.high - position, CHUNK);
    const T* nothing = static_cast<const T*>(own.nothing);
    for (int64_t key = 0; key < low; ++key) rows.keys[key] = rows.values[key] = nothing;
    for (int64_t key = larger(high, int64_t{0}); key < CHUNK; ++key) rows.keys[key] = rows.values[key] = nothing;
    return each_run(tile, position, [&](int64_t first, int64_t last, int64_t slot) {
      const T* keys = static_cast<const T*>(a.keys) + slot * a.key_token + head * a.key_head;
      const T* values = static_cast<const T*>(a.values) + slot * a.value_token + head * a.value_head;
      for (int64_t key = first; key < last; ++key, keys += a.key_token, values += a.value_token)
        rows.keys[key] = keys, rows.values[key] = values;
    });
  }

  // Packs the nth head's part of a chunk, and fetches its part of the next: so many of the next chunk's keys with all
  // their heads.
  void load_chunk(const Item& item, int64_t nth, int64_t position, const Rows<T>& rows, const Rows<T>* next,
                  Chunk& chunk) const {
    const Tile& tile = item.tile;
    const int64_t low = larger(tile.low - position, int64_t{0}), high = smaller(tile.high - position, CHUNK);
    const int64_t head = item.head + nth;
    chunk = {own.keys, own.values, nullptr, nullptr, low / WIDTH, (high + WIDTH - 1) / WIDTH};
    // Keys of the next chunk for each vector of keys of this one, in 16.16 bits, so that nothing is divided there.
    const int64_t step = (WIDTH << 16) / item.heads + 1;
    const auto fetch = [&](const T* const* of, int64_t stride) {
      return [=, this](int64_t group) {
        if (!next) return;
        const int64_t part = nth * (CHUNK / WIDTH) + group, size = (item.heads - 1) * stride + a.head_dim;
        const int64_t end = smaller((part + 1) * step >> 16, CHUNK);
        for (int64_t key = part * step >> 16; key < end; ++key)
          for (int64_t at = 0; at < size; at += 64 / static_cast<int64_t>(sizeof(T)))
            __builtin_prefetch(of[key] + at, 0, 2);
      };
    };
    pack_keys<Form>(rows, chunk.first, chunk.last, a.head_dim, own.keys,
                    fetch(next ? next->keys : nullptr, a.key_head));
    pack_values(Form{}, rows, chunk.first, chunk.last, a.head_dim, how.width, own.values,
                fetch(next ? next->values : nullptr, a.value_head));
    if (a.kv_format != PAGE_INT8) return;
    for (int64_t key = chunk.first * WIDTH; key < chunk.last * WIDTH; ++key)
      own.key_scales[key] = own.value_scales[key] = 0.0f;
    each_run(tile, position, [&](int64_t first, int64_t last, int64_t slot) {
      for (int64_t key = first; key < last; ++key, ++slot) {
        own.key_scales[key] = widened(a.key_scales[slot * a.kv_heads + head]);
        own.value_scales[key] = widened(a.value_scales[slot * a.kv_heads + head]);
      }
    });
    chunk.key_scales = own.key_scales, chunk.value_scales = own.value_scales;
  }

  void clear(const Running& state, int64_t queries) const {
    for (int64_t m = 0; m < queries; ++m) state.best[m] = LOWEST, state.total[m] = 0.0f;
    __builtin_memset(state.sums, 0, static_cast<size_t>(4 * queries * how.width));
  }

  template <class Q>
  void finish_as(const Tile& tile, int64_t head, const Running& state) const {
    for (int64_t m = 0; m < count(tile); ++m) {
      Q* to = static_cast<Q*>(a.out) +
              ((tile.token + m / fold) * a.heads + head * fold + m % fold) * a.head_dim;
      // No key seen: 0 / tiny. NaN stays.
      const Vector sum_of = all(state.total[m] < 1.17549435e-38f ? 1.17549435e-38f : state.total[m]);
      for (int64_t at = 0; at < a.head_dim; at += WIDTH)
        write(to + at, load(state.sums + m * how.width + at) / sum_of, a.head_dim - at);
    }
  }

  void finish(const Tile& tile, int64_t head, const Running& state) const {
    if (a.q_format == PAGE_BF16) return finish_as<bfloat16>(tile, head, state);
    if (a.q_format == PAGE_F16) return finish_as<float16>(tile, head, state);
    finish_as<float>(tile, head, state);
  }

  void finish(const Item& item, const Running& state) const {
    const int64_t queries = count(item.tile);
    for (int64_t nth = 0; nth < item.heads; ++nth) finish(item.tile, item.head + nth, part(state, nth * queries));
  }

  Running part(const Running& of, int64_t query) const {
    return {of.best + query, of.total + query, of.sums + query * how.width};
  }

  // Chunks of an item; from its first chunk on they are merged at once, others lie in `shared` one by one.
  void compute(const Item& item, float* shared) const {
    const Tile& tile = item.tile;
    const int64_t queries = count(tile), every = item.heads * queries, size = every * (how.width + 2);
    for (int64_t nth = 0; nth < item.heads; ++nth) load_queries(tile, item.head + nth, nth * queries);
    const Running state = running(shared ? shared : own.state, every);
    if (!item.begin) clear(state, every);
    const auto position = [](const Tile& tile, int64_t nth) { return (tile.first_chunk() + nth) * CHUNK; };
    bool inside = true;
    for (int64_t at = item.begin; at < item.end && inside; ++at) {
      Rows<T>&rows = *static_cast<Rows<T>*>(own.rows[0]), &next = *static_cast<Rows<T>*>(own.rows[1]);
      bool another = at + 1 < item.end;
      if (another)
        inside = find(tile, item.head, position(tile, at + 1), next);
      else if (item.next && item.next->keys())
        another = find(*item.next, item.next_head, position(*item.next, 0), next);
      aim(tile, item.heads, position(tile, at));
      const bool kept = item.begin > 0;
      const Running to = kept ? running(shared + at * size, every) : state;
      for (int64_t nth = 0; nth < item.heads && inside; ++nth) {
        if (!(inside = find(tile, item.head + nth, position(tile, at), rows))) break;
        Chunk chunk;
        load_chunk(item, nth, position(tile, at), rows, another ? &next : nullptr, chunk);
        attend_chunk<Form>(own.queries + nth * queries * how.units, own.of + nth * queries, queries, chunk, how,
                           part(to, nth * queries), kept);
      }
    }
    if (!inside) __atomic_store_n(&a.outside, 1, __ATOMIC_RELAXED);
    if (!shared) finish(item, state);
  }

  // Makes the result of an item that several threads worked on.
  void combine(const Item& item, int64_t merged, float* shared) const {
    const int64_t every = item.heads * count(item.tile), size = every * (how.width + 2);
    const Running state = running(shared, every);
    for (int64_t nth = merged; nth < item.chunks; ++nth)
      merge_chunk(state, running(shared + nth * size, every), every, how.width);
    finish(item, state);
  }
};

// The share of one thread. Work lies on a line of costs, of which each thread has a piece; a tile's chunks belong to
// the threads in whose pieces they begin. Who finishes the last chunk of a shared tile merges all.
template <class Form, class T>
void attend_share(Attention& a, int64_t whole, int64_t thread, int64_t threads) {
  const Worker<Form, T> worker(a, a.workspace + thread * a.workspace_bytes);
  const auto bound = [&](int64_t of) { return whole * of / threads; };
  const int64_t from = bound(thread), to = bound(thread + 1);
  int64_t at = 0;
  each_tile(a, [&](const Tile& tile, const Tile* following) {
    const int64_t together = heads_together(a, tile), chunks = tile.chunks();
    for (int64_t head = 0, cost; head < a.kv_heads; head += together, at += cost) {
      const int64_t heads = smaller(together, a.kv_heads - head), each = heads * key_cost(a, tile);
      cost = tile_cost(a, tile, heads);
      if (at + cost <= from || at >= to) continue;
      // How many chunks begin before a point of the line.
      const auto before = [&](int64_t point) {
        int64_t nth = 0;
        while (nth < chunks) {
          const int64_t key = larger((tile.first_chunk() + nth) * CHUNK, tile.low) - tile.low;
          if (at + key * each >= point) break;
          ++nth;
        }
        return nth;
      };
      const bool more = head + together < a.kv_heads;
      Item item{tile, head, heads, at < from ? before(from) : 0, before(to), chunks,
                more ? &tile : following, more ? head + together : 0};
      if (!chunks || !a.shared_floats || threads == 1) {
        item.begin = 0, item.end = chunks;
        if (at >= from) worker.compute(item, nullptr);
        continue;
      }
      if (item.begin == 0 && item.end == chunks && at >= from) {
        worker.compute(item, nullptr);
        continue;
      }
      const int64_t own = item.end - item.begin;
      if (!own) continue;
      int64_t first = thread;
      while (bound(first) > at) --first;
      float* shared = a.shared + first * a.shared_floats;
      worker.compute(item, shared);
      if (__atomic_add_fetch(a.finished + first, static_cast<int32_t>(own), __ATOMIC_ACQ_REL) == chunks) {
        __atomic_store_n(a.finished + first, 0, __ATOMIC_RELAXED);
        worker.combine(item, before(bound(first + 1)), shared);
      }
    }
  });
  const int64_t used = a.rows ? a.query_start[a.rows] : 0, row = a.heads * a.head_dim;
  const int64_t bytes = a.q_format == PAGE_F32 ? 4 : 2;
  const Share rest = share(a.tokens - used, static_cast<int>(thread), static_cast<int>(threads));
  __builtin_memset(static_cast<char*>(a.out) + (used + rest.first) * row * bytes, 0,
                   static_cast<size_t>((rest.last - rest.first) * row * bytes));
}

int64_t whole_cost(const Attention& a) {
  int64_t whole = 0;
  each_tile(a, [&](const Tile& tile, const Tile*) { whole += tile_cost(a, tile, a.kv_heads); });
  return whole;
}

}  // namespace

void attention_sizes(Attention& a) {
  a.workspace_bytes = Workspace(a, nullptr).bytes;
  int64_t most = 0;
  each_tile(a, [&](const Tile& tile, const Tile*) {
    const int64_t queries = heads_together(a, tile) * tile.count * (a.heads / a.kv_heads);
    most = larger(most, tile.chunks() * queries * (rounded_up(a.head_dim, WIDTH) + 2));
  });
  a.shared_floats = a.threads > 1 && most * a.threads <= SHARED_LIMIT ? most : 0;
}

void attention_part(Attention& a, int64_t thread, int64_t threads) {
  threads = smaller(threads, a.threads);
  if (thread >= threads) return;
  const int64_t whole = whole_cost(a);
#if defined(__AVX512BF16__)
  if (a.q_format == PAGE_BF16) {
    if (a.kv_format == PAGE_BF16) return attend_share<Pair, bfloat16>(a, whole, thread, threads);
    if (a.kv_format == PAGE_INT8) return attend_share<Pair, int8_t>(a, whole, thread, threads);
  }
#endif
  switch (a.kv_format) {
    case PAGE_F32: return attend_share<Single, float>(a, whole, thread, threads);
    case PAGE_BF16: return attend_share<Single, bfloat16>(a, whole, thread, threads);
    case PAGE_F16: return attend_share<Single, float16>(a, whole, thread, threads);
    default: return attend_share<Single, int8_t>(a, whole, thread, threads);
  }
}

}  // namespace octavo

OCTAVO_EXPORT(attention_sizes)(octavo::Attention* a) { octavo::attention_sizes(*a); }

OCTAVO_EXPORT(attention)(octavo::Attention* a) {
  // A region costs as much as some ten thousand multiplications.
  const bool worth = a->threads > 1 && octavo::whole_cost(*a) * a->head_dim > 1 << 19;
  octavo::parallel(worth, [=](int thread, int threads) { octavo::attention_part(*a, thread, threads); });
}

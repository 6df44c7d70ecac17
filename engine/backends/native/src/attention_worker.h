// What one thread does of a batch: loads queries, walks chunks of keys, merges, writes results.
#pragma once

#include "attention_content.h"
#include "attention_share.h"

namespace octavo {
namespace {

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
            static_cast<float>(a.softcap), by_content() ? CHUNK : a.bias_columns, is_plain(a),
            is_plain(a) ? static_cast<float>(a.scale) * LOG2_E : 1.0f},
        fold(a.heads / a.kv_heads) {
    __builtin_memset(own.nothing, 0, static_cast<size_t>(4 * how.width));
  }

  bool by_content() const { return a.bias_kind == BY_CONTENT; }

  static bool is_plain(const Attention& a) {
    return a.kv_format != PAGE_INT8 && a.softcap == 0.0 && !a.bias_kind && a.scale > 0.0;
  }

  int64_t count(const Tile& tile) const { return tile.count * fold; }

  // Calls body(m, token, head of queries) for each query of a tile's key head.
  template <class Body>
  void each_query(const Tile& tile, int64_t head, const Body& body) const {
    for (int64_t token = 0, m = 0; token < tile.count; ++token)
      for (int64_t i = 0; i < fold; ++i, ++m) body(m, tile.token + token, head * fold + i);
  }

  template <class Q>
  void load_queries_of(const Tile& tile, int64_t head, int64_t place) const {
    const bool centred = a.centre && (a.softcap != 0.0 || a.sinks);
    each_query(tile, head, [&](int64_t m, int64_t token, int64_t query_head) {
      const Q* from = static_cast<const Q*>(a.q) + token * a.q_token + query_head * a.q_head;
      Unit* to = own.queries + (place + m) * how.units;
      if constexpr (Form::HELD == 2) {
        to[how.units - 1] = 0;
        __builtin_memcpy(to, from, static_cast<size_t>(2 * a.head_dim));
      } else {
        for (int64_t at = 0; at < a.head_dim; at += WIDTH)
          write(reinterpret_cast<float*>(to) + at, read(from + at, a.head_dim - at), a.head_dim - at);
      }
      Vector sums{};
      for (int64_t at = 0; centred && at < a.head_dim; at += WIDTH) {
        const int64_t left = a.head_dim - at;
        sums = fma(read(from + at, left), read(a.centre + head * a.head_dim + at, left), sums);
      }
      own.of[place + m].centre = sum(sums) * how.scale;
      own.of[place + m].bias = by_content() ? own.terms + m * CHUNK
                               : a.bias_kind ? a.bias + query_head * a.bias_columns
                                             : nullptr;
    });
  }

  void load_queries(const Tile& tile, int64_t head, int64_t place) const {
    if constexpr (Form::HELD == 2) return load_queries_of<bfloat16>(tile, head, place);
    if (a.q_format == PAGE_BF16) return load_queries_of<bfloat16>(tile, head, place);
    if (a.q_format == PAGE_F16) return load_queries_of<float16>(tile, head, place);
    load_queries_of<float>(tile, head, place);
  }

  // Which keys of the chunk at a position each query sees.
  void aim(const Tile& tile, int64_t heads, int64_t position) const {
    Query* query = own.of;
    for (int64_t head = 0; head < heads; ++head)
      for (int64_t token = 0; token < tile.count; ++token) {
        const int64_t at = tile.position + token;
        int64_t low = 0, high = tile.context;
        if (a.causal && !tile.two_way) high = smaller(high, at + 1);
        if (a.left >= 0) {
          low = larger(low, at - a.left);
          if (!tile.two_way) high = smaller(high, at + a.right + 1);
        }
        if (a.chunk) low = at - at % a.chunk;
        if (tile.two_way == 2) low = 0;
        low = larger(low - position, int64_t{0}), high = smaller(high - position, CHUNK);
        if (low >= high) low = high = 0;
        const int64_t shift = by_content() ? 0 : position + (a.bias_kind == BY_DISTANCE ? a.bias_zero - at : 0);
        for (int64_t m = 0; m < fold; ++m, ++query) query->low = low, query->high = high, query->bias_shift = shift;
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

  // Finds the keys and values of the chunk at a position; false where some lie outside.
  bool find(const Tile& tile, int64_t position) const {
    return each_run(tile, position, [&](int64_t first, int64_t last, int64_t slot) {
      for (int64_t key = first; key < last; ++key, ++slot) {
        own.key_places[key] = slot * a.key_token;
        own.value_places[key] = slot * a.value_token;
      }
    });
  }

  // Scales of a head's keys and values.
  void load_scales(const Tile& tile, int64_t head, int64_t position, Chunk& chunk) const {
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

  // The nth head's queries over the chunk at a position.
  void attend(const Item& item, int64_t nth, int64_t position, const Running& to, bool kept,
              Ahead<Form, T>& ahead) const {
    const Tile& tile = item.tile;
    const int64_t head = item.head + nth, queries = count(tile);
    const int64_t low = larger(tile.low - position, int64_t{0}), high = smaller(tile.high - position, CHUNK);
    const T* nothing = static_cast<const T*>(own.nothing);
    const Lines<T> keys{static_cast<const T*>(a.keys) + head * a.key_head, own.key_places, low, high, nothing};
    const Lines<T> values{static_cast<const T*>(a.values) + head * a.value_head, own.value_places, low, high, nothing};
    Chunk chunk{nullptr, nullptr, low / WIDTH, (high + WIDTH - 1) / WIDTH};
    if (a.kv_format == PAGE_INT8) load_scales(tile, head, position, chunk);
    const Unit* units = own.queries + nth * queries * how.units;
    const Query* of = own.of + nth * queries;
    const Running state = part(to, nth * queries);
    if (by_content()) {
      const int64_t shift = position - tile.position - queries + 1;
      Content<Form, T>{a, own, how.units}.fill(units, queries, keys, chunk.first, chunk.last, head, shift);
    }
    if (item.few) {
      const Direct<Form, T, Ahead<Form, T>> direct{keys, values, how.units, a.head_dim, ahead};
      return attend_chunk<Form, FEW>(units, of, queries, direct, chunk, how, state, kept);
    }
    pack_keys<Form>(keys, chunk.first, chunk.last, a.head_dim, own.keys, ahead);
    pack_values(Form{}, values, chunk.first, chunk.last, a.head_dim, how.width, own.values, ahead);
    attend_chunk<Form, ROWS>(units, of, queries, Packed<Form>{own.keys, own.values, how.units, how.width}, chunk, how,
                             state, kept);
  }

  void clear(const Running& state, int64_t queries) const {
    for (int64_t m = 0; m < queries; ++m) state.best[m] = LOWEST, state.total[m] = 0.0f;
    __builtin_memset(state.sums, 0, static_cast<size_t>(4 * queries * how.width));
  }

  template <class Q>
  void finish_as(const Tile& tile, int64_t head, int64_t place, const Running& state) const {
    each_query(tile, head, [&](int64_t m, int64_t token, int64_t query_head) {
      Q* to = static_cast<Q*>(a.out) + (token * a.heads + query_head) * a.head_dim;
      float total = state.total[m];
      if (a.sinks) {
        // The keys' scores lack the centre, unless they were capped.
        const float lacking = a.softcap == 0.0 ? own.of[place + m].centre : 0.0f;
        const float best = state.best[m], sink = (a.sinks[query_head] - lacking) * LOG2_E;
        const float top = sink > best ? sink : best;
        const float keep = power_of_two<true>(all(best - top))[0];
        total = total * keep + power_of_two<true>(all(sink - top))[0];
        for (int64_t at = 0; at < how.width; at += WIDTH) {
          float* sums = state.sums + m * how.width + at;
          store(sums, load(sums) * keep);
        }
      }
      // No key seen: 0 / tiny. NaN stays.
      const Vector sum_of = all(total < 1.17549435e-38f ? 1.17549435e-38f : total);
      for (int64_t at = 0; at < a.head_dim; at += WIDTH)
        write(to + at, load(state.sums + m * how.width + at) / sum_of, a.head_dim - at);
    });
  }

  // The queries of a key head, which were loaded from `place` on.
  void finish(const Tile& tile, int64_t head, int64_t place, const Running& state) const {
    if (a.q_format == PAGE_BF16) return finish_as<bfloat16>(tile, head, place, state);
    if (a.q_format == PAGE_F16) return finish_as<float16>(tile, head, place, state);
    finish_as<float>(tile, head, place, state);
  }

  void finish(const Item& item, const Running& state) const {
    const int64_t queries = count(item.tile);
    for (int64_t nth = 0; nth < item.heads; ++nth)
      finish(item.tile, item.head + nth, nth * queries, part(state, nth * queries));
  }

  Running part(const Running& of, int64_t query) const {
    return {of.best + query, of.total + query, of.sums + query * how.width};
  }

  // Chunks of an item; from its first chunk on they are merged at once, others lie in `shared` one by one.
  void compute(const Item& item, float* shared, Ahead<Form, T>& ahead) const {
    const Tile& tile = item.tile;
    const int64_t queries = count(tile), every = item.heads * queries, size = every * (how.width + 2);
    for (int64_t nth = 0; nth < item.heads; ++nth) load_queries(tile, item.head + nth, nth * queries);
    const Running state = running(shared ? shared : own.state, every);
    if (!item.begin) clear(state, every);
    for (int64_t at = item.begin; at < item.end; ++at) {
      const int64_t position = (tile.first_chunk() + at) * CHUNK;
      if (!find(tile, position)) {
        __atomic_store_n(&a.outside, 1, __ATOMIC_RELAXED);
        break;
      }
      aim(tile, item.heads, position);
      const bool kept = item.begin > 0;
      const Running to = kept ? running(shared + at * size, every) : state;
      for (int64_t nth = 0; nth < item.heads; ++nth) attend(item, nth, position, to, kept, ahead);
    }
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

// The share of one thread. The thread that finishes the last chunk of a shared item merges all.
template <class Form, class T>
void attend_share(Attention& a, int64_t thread, int64_t threads) {
  const Worker<Form, T> worker(a, a.workspace + thread * a.workspace_bytes);
  Work work(a, thread, threads);
  Ahead<Form, T> ahead(a, work);
  for (Item item; work.next(item);) {
    if (!item.shared()) {
      worker.compute(item, nullptr, ahead);
      continue;
    }
    int64_t place, merged;
    work.meet(item, thread, place, merged);
    float* shared = a.shared + place * a.shared_floats;
    worker.compute(item, shared, ahead);
    const auto own = static_cast<int32_t>(item.end - item.begin);
    if (__atomic_add_fetch(a.finished + place, own, __ATOMIC_ACQ_REL) == item.chunks) {
      __atomic_store_n(a.finished + place, 0, __ATOMIC_RELAXED);
      worker.combine(item, merged, shared);
    }
  }
  const int64_t used = a.rows ? a.query_start[a.rows] : 0, row = a.heads * a.head_dim;
  const int64_t bytes = a.q_format == PAGE_F32 ? 4 : 2;
  const Share rest = share(a.tokens - used, static_cast<int>(thread), static_cast<int>(threads));
  __builtin_memset(static_cast<char*>(a.out) + (used + rest.first) * row * bytes, 0,
                   static_cast<size_t>((rest.last - rest.first) * row * bytes));
}

}  // namespace
}  // namespace octavo

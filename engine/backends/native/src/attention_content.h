// Terms of the scores that depend on distance and on what stands there (arXiv:2006.03654, 3.1): queries meet vectors of
// distances, and so do keys.
//
// A tile and a chunk have `queries` + CHUNK - 1 distances between them, whose vectors are packed side by side like keys.
// In the products of one query with those, the terms of its keys are neighbours, which begin one place further back for
// the next query. So a few queries meet little more than the distances that they have. Of a few keys the terms lie
// along diagonals, which a square of vectors turned makes into rows.
#pragma once

#include "attention_batch.h"

namespace octavo {
namespace {

// Nothing is fetched ahead: the vectors of distances are few, and read again by every tile.
struct NotAhead {
  OCTAVO_INLINE_MEMBER void fetch(int64_t) {}
};

// The terms of a head's queries over a chunk.
template <class Form, class T>
struct Content {
  const Attention& a;
  const Workspace& own;
  int64_t units;  // of a vector

  // Fills rows of CHUNK terms, times the scale, for keys of the vectors [first, last).
  // `shift`: distance of the chunk's first key and the tile's last query; `of`: the queries' units.
  void fill(const Unit* of, int64_t queries, const Lines<T>& keys, int64_t first, int64_t last, int64_t head,
            int64_t shift) const {
    const auto* by_key = static_cast<const T*>(a.distance_queries);
    const auto* by_query = static_cast<const T*>(a.distance_keys);
    const int64_t begin = first * WIDTH, end = last * WIDTH + queries - 1;
    place(begin, end, shift);
    if (by_query) {
      pack(by_query, head, begin, end);
      some_at_a_time(queries, [&]<int R>(Rows<R>, int64_t query) { meet_query<R>(of, query, queries, first, last); });
    } else {
      __builtin_memset(own.terms, 0, static_cast<size_t>(4 * queries * CHUNK));
    }
    if (by_key) {
      pack(by_key, head, begin, end);
      for (int64_t at = first; at < last; ++at) meet_keys(keys, at, queries);
    }
    const Vector scale = all(static_cast<float>(a.scale));
    for (int64_t m = 0; m < queries; ++m)
      for (int64_t at = first; at < last; ++at) {
        float* to = own.terms + m * CHUNK + at * WIDTH;
        store(to, load(to) * scale);
      }
  }

 private:
  // Where the vectors of the distances [begin, end), counted from `shift`, lie in a head's table.
  void place(int64_t begin, int64_t end, int64_t shift) const {
    for (int64_t at = begin; at < end; ++at) {
      const int64_t column = smaller(larger(at + shift + a.bias_zero, int64_t{0}), a.bias_columns - 1);
      own.distance_places[at] = a.distance_columns[column] * a.head_dim;
    }
  }

  void pack(const T* table, int64_t head, int64_t begin, int64_t end) const {
    const Lines<T> lines{table + head * a.distances * a.head_dim, own.distance_places, begin, end,
                         static_cast<const T*>(own.nothing)};
    NotAhead ahead;
    pack_keys<Form, DISTANCES>(lines, begin / WIDTH, (end + WIDTH - 1) / WIDTH, a.head_dim, own.distances, ahead);
  }

  // Products of R vectors with the distances of the vectors [first, last), to rows of DISTANCES.
  template <int R>
  OCTAVO_INLINE_MEMBER void products(const Unit* of, int64_t first, int64_t last, float* to) const {
    int64_t at = first;
    const auto some = [&]<int C>(Vector(&acc)[R][C]) {
      multiply<Form>(of, units, own.distances + at * WIDTH, DISTANCES, units, acc);
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) store(to + r * DISTANCES + (at + c) * WIDTH, acc[r][c]);
      at += C;
    };
    while (at + COLUMNS <= last) {
      Vector acc[R][COLUMNS];
      some(acc);
    }
    while (at < last) {
      Vector acc[R][1];
      some(acc);
    }
  }

  template <int R>
  void meet_query(const Unit* of, int64_t query, int64_t queries, int64_t first, int64_t last) const {
    // The place of a query's first key: the later the query, the earlier.
    const int64_t least = queries - query - R + first * WIDTH, most = queries - query - 1 + last * WIDTH;
    products<R>(of + query * units, least / WIDTH, (most + WIDTH - 1) / WIDTH, own.products);
    for (int r = 0; r < R; ++r)
      for (int64_t at = first; at < last; ++at)
        store(own.terms + (query + r) * CHUNK + at * WIDTH,
              load(own.products + r * DISTANCES + queries - 1 - query - r + at * WIDTH));
  }

  // The terms of the keys of one vector.
  void meet_keys(const Lines<T>& keys, int64_t at, int64_t queries) const {
    Unit* held = own.key_units;
    const int64_t last = (at * WIDTH + WIDTH + queries - 1 + WIDTH - 1) / WIDTH;
    for (int64_t i = 0; i < WIDTH; ++i)
      for (int64_t unit = 0; unit < units; unit += WIDTH)
        store(reinterpret_cast<float*>(held + i * units + unit),
              Form::units(keys[at * WIDTH + i], unit * Form::HELD, a.head_dim));
    some_at_a_time(WIDTH, [&]<int R>(Rows<R>, int64_t key) {
      products<R>(held + key * units, at, last, own.products + key * DISTANCES);
    });
    for (int64_t query = 0; query < queries; query += WIDTH) {
      Vector v[WIDTH];
      // v[i][j]: key i and query `query` + WIDTH - 1 - j; those past the last query read what lies before the row.
      for (int64_t i = 0; i < WIDTH; ++i)
        v[i] = load(own.products + i * DISTANCES + at * WIDTH + i + queries - query - WIDTH);
      transpose(v);
      for (int64_t j = 0; j < smaller(WIDTH, queries - query); ++j) {
        float* to = own.terms + (query + j) * CHUNK + at * WIDTH;
        store(to, load(to) + v[WIDTH - 1 - j]);
      }
    }
  }

  // Calls body(R, first) for blocks of much the same size.
  template <class Body>
  static OCTAVO_INLINE_MEMBER void some_at_a_time(int64_t count, const Body& body) {
    int64_t some;
    for (int64_t at = 0; at < count; at += some) {
      const int64_t left = count - at, blocks = (left + ROWS - 1) / ROWS;
      some = (left + blocks - 1) / blocks;
      switch (some) {
        case 1: body(Rows<1>{}, at); break;
        case 2: body(Rows<2>{}, at); break;
        case 3: body(Rows<3>{}, at); break;
        case 4: body(Rows<4>{}, at); break;
        case 5: body(Rows<5>{}, at); break;
        default: body(Rows<6>{}, at);
      }
    }
  }
};

}  // namespace
}  // namespace octavo

// A batch of attention as the caller describes it.
#pragma once

#include "common.h"

namespace octavo {

enum Biased : int64_t { UNBIASED = 0, BY_DISTANCE = 1, BY_POSITION = 2, BY_CONTENT = 3 };

// All of one call; engine/backends/native has the same structure. Strides count elements, features lie side by side.
struct Attention {
  const void *q, *keys, *values;
  void* out;  // [tokens, heads, head_dim], in the format of q
  int64_t q_format, kv_format, q_token, q_head, key_token, key_head, value_token, value_head;
  const bfloat16 *key_scales, *value_scales;  // [slots, kv_heads] of int8 pages
  const float* centre;                        // [kv_heads, head_dim] that is added to int8 keys, null for nothing
  const int32_t* where;                       // [rows, where_row] pages; without pages, [rows] first tokens
  int64_t where_row, block_size, slots;       // block_size 0 without pages
  const int32_t *query_start, *context;       // [rows + 1], [rows]
  const int32_t* two_way;  // [rows] 1: causal queries see all later keys, too; 2: all keys; null: 0 for all rows
  int64_t rows, tokens, heads, kv_heads, head_dim;
  int64_t causal, left, right, chunk;  // left < 0: no window; chunk: tokens of one, 0 for none
  double scale, softcap;        // softcap 0: none
  const float *bias, *sinks;    // [heads, bias_columns]; [heads] one more score of each query, null for none
  int64_t bias_kind, bias_columns, bias_zero;
  // What queries and keys are multiplied with where the bias is BY_CONTENT: [heads, distances, head_dim] in the format
  // of keys, null for no such term; of [bias_columns] distances the vector that each has. No heads share keys then.
  const void *distance_keys, *distance_queries;
  const int64_t* distance_columns;
  int64_t distances, content;  // content: there is memory for that
  int64_t threads;      // that there is memory for
  int64_t cache;        // bytes of the cache that a core has for itself; 0: not known
  char* workspace;      // [threads, workspace_bytes]
  float* shared;        // [threads, shared_floats], for what several threads work on
  int32_t* finished;    // [threads] zeros
  int64_t workspace_bytes, shared_floats;  // shared_floats 0: nothing is shared
  int64_t whole;                           // cost of all, in the unit of `Tiles`
  int64_t tile;                            // queries that a tile has at most, heads that share keys included
  int64_t outside;      // result: 1 where a page or token lies outside keys
};

// Sets workspace_bytes, shared_floats, whole and tile.
void attention_sizes(Attention& a);

// One thread's share of a call. All threads of a region make it, and the result is there when all have.
void attention_part(Attention& a, int64_t thread, int64_t threads);

// The same for one kind of products (attention_formats.h).
void attend_singles(Attention& a, int64_t thread, int64_t threads);
void attend_pairs(Attention& a, int64_t thread, int64_t threads);

}  // namespace octavo

// A stack of layers as a list of operations, which run one after the other in one region of threads.
//
// Calling kernels one by one from Python costs more than a small model's arithmetic. Here a step costs one call: what
// does not change from step to step is written down once, what does is a `Step`. engine/backends/native/program.py has the same
// structures, and makes the lists.
#pragma once

#include "adapters.h"
#include "attention.h"
#include "channels.h"
#include "ranks.h"
#include "scan.h"
#include "states.h"

namespace octavo {

// Rows of activations: of each token a row, `stride` elements from one to the next.
struct Place {
  int64_t buffer, offset, stride;  // buffer < 0: nothing
};

enum Kind : int64_t { NORM = 0, PRODUCT = 1, ROTATE = 2, ATTEND = 3, ACTIVATE = 4, ADD = 5, CLIP = 6, EXPERTS = 7, GATHER = 8, OPEN = 9, SHRINK = 10, EXPAND = 11, CONVOLVE = 12, DELTA = 13, SCAN = 14, REDUCE = 15, CHANNELS = 16, RECURRENCE = 17 };

struct Operation {
  int64_t kind;
  const void* what;  // one of the structures below
  int64_t barrier;   // the next operation begins when all threads have done this one
};

// What lies outside: of a row a page, of a token its slot or its position, for which there are no angles. Or that other
// ranks do not compute the step: see `Step::met`.
enum Outside : int64_t { PAGE = 1, SLOT = 2, POSITION = 3, RANKS = 4 };

struct Step {
  void* const* buffers;
  int64_t tokens;            // rows of all buffers
  int64_t stored;            // of them, those whose keys and values go to pages: the first ones
  const int64_t* positions;  // [tokens]
  const int64_t* slots;      // [stored]
  Attention* const* calls;   // what attentions of one kind share in this step
  const int32_t* starts;     // [rows + 1] first token of each row
  int64_t rows;
  const Run* runs;           // [num_runs] of tokens with an adapter
  int64_t num_runs;
  void* workspace;           // for products: room for the tiles of all tokens, and for `spare` more
  int64_t spare;
  const int32_t *sources, *targets, *snapshots, *afters;  // [rows] state slots, see StateRows
  void* tickets;             // [operations, spare] Ticket, for products
  int64_t* times;            // [operations, 2] nanoseconds of the first thread: at work, waiting; null: not wanted
  int64_t outside;           // result: 0, or an `Outside`
  int64_t met;               // result: what `meet` returned last
};

// out = norm(sum = x + residual), each of `inner` pieces of a row for itself.
struct NormWhat {
  Place x, residual, sum, out;
  const void *weight, *bias;
  double eps;
  int64_t centred, rounding, inner, size, weights;  // centred: LayerNorm
};

struct ProductWhat {
  Place x, y;
  const void* weight;
  const float* bias;
  int64_t kind, tile_rows, outputs, inputs;  // kind: a gemm::Kind
};

// Pages of a layer: where keys and values are, how they are written, how they are read.
struct Pages {
  void *keys, *values;
  bfloat16 *key_scales, *value_scales;
  const float* centre;
  int64_t format, slots;  // slots: of all pages together
};

struct RotateWhat {
  Place heads;  // queries, keys, values
  const void *cosines, *sines;  // of `length` positions
  int64_t length, query_heads, kv_heads, head_dim, dim, interleaved, in_float32;
  const Pages* pages;  // null: keys are turned where they lie, and nothing is stored
};

struct AttendWhat {
  Place q, k, v, out;  // k and v where there are no pages
  const Pages* pages;
  const float *bias, *sinks;
  // Of a bias of contents; see `Attention`.
  const void *distance_keys, *distance_queries;
  const int64_t* distance_columns;
  int64_t call, centred, bias_kind, bias_columns, bias_zero, distances;  // centred: the pages' centre is these keys'
  double scale, softcap;
};

struct ActivateWhat {
  Place x, out;
  int64_t width, gated, function;
};

// `rows`, `wide` and `hidden` have a row for each token and each of its experts, `routes` room for three numbers of 32
// bits. What experts read lies in `rows`, and then what they answer.
struct ExpertsWhat {
  Place routed, x, rows, wide, hidden, routes, out;
  const void* const* up;    // [count] weights
  const void* const* down;  // [count]
  int64_t* starts;          // [count + 1] room
  int64_t up_kind, down_kind, up_tile_rows, down_tile_rows, count, active, normalize, function, gated, size, width;
};

// out = the `taps` tokens around each, side by side; zeros where a token's row has none.
struct GatherWhat {
  Place x, out;
  int64_t width, taps;
};

struct AddWhat {
  Place x, y, out;
  int64_t width;
};

// x = function(opening) * x; an opening is a number of each of as many pieces of a row.
struct OpenWhat {
  Place opening, x;
  int64_t width, pieces, function;  // function: as of activate_part
};

// thin = down * x of the tokens with an adapter, in float32.
struct ShrinkWhat {
  Place x, thin;
  const AdapterSlot* slots;
  int64_t inputs;
};

// y += up * thin.
struct ExpandWhat {
  Place thin, y;
  const AdapterSlot* slots;
};

// See Convolved in states.h.
struct ConvolveWhat {
  Place x, out;
  const float *weight, *bias;
  const StateMemory* memory;
  int64_t width, taps, form;
};

// The gated delta rule, see Delta in states.h.
struct DeltaWhat {
  Place x, rates, fading, opening, out;
  const float *decay, *offset, *norm;
  const StateMemory* memory;
  int64_t begin, key_heads, value_heads, key_dim, value_dim, alternate, logistic;
  double eps, most;
};

// The selective scan, see Scan in scan.h.
struct ScanWhat {
  Place x, rates, opening, out;
  const float *decay, *offset, *skip, *norm;
  const StateMemory* memory;
  int64_t begin, heads, head_dim, groups, size, norm_first;
  double eps;
};

// Mamba's scan, see ChannelScan in channels.h.
struct ChannelsWhat {
  Place x, before, after, steps, opening, out;
  const float *decay, *skip;
  const StateMemory* memory;
  int64_t begin, width, size;
};

// RG-LRU, see Recurrence in channels.h.
struct RecurrenceWhat {
  Place x, inputs, decays, out;
  const float* speed;
  const StateMemory* memory;
  int64_t begin, width;
};

// x = the sum of all ranks' x, in the order of ranks.
struct ReduceWhat {
  Place x;
  int64_t width;
  Ranks* ranks;
};

struct ClipWhat {
  Place x;
  int64_t width;
  double limit;
};

}  // namespace octavo

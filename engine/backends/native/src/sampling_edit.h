// Penalties, biases and bans, where they touch a row.
#pragma once

#include "sampling.h"

namespace octavo {

enum EditKind : int32_t { BIAS, SOURCE, HISTORY, DRY, BAN, FORCE };

// The layout is that of `EDIT` in engine/interface/sampling_table.py.
struct Edit {
  int32_t row, token, kind;
  float value;
};

// The layout is that of `_Edits` in engine/backends/native/sampling.py. Edits of row r are start[r], ..., start[r + 1] - 1.
struct Edits {
  const int64_t* start;
  const Edit* edits;
  const float *repetition, *frequency, *presence;  // [rows]
  const uint8_t* apart;  // [rows] edits begin with log-probabilities, stay here, and leave -inf in the row
  // Memory for as many as there are edits; what is made of row r lies from start[r] on.
  int64_t* counts;    // [rows]
  int32_t* columns;   // ascending
  float* values;      // what the tokens' logits, or log-probabilities, become
  float* before;      // what the row had there
  uint64_t* keys;     // for twice as many
};

}  // namespace octavo

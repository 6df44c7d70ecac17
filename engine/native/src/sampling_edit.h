// Penalties, biases and bans, where they touch a row.
#pragma once

#include "sampling.h"

namespace octavo {

// Tokens of rows: those of row r are start[r], ..., start[r + 1] - 1.
struct Tokens {
  const int64_t* start;
  const int32_t* tokens;
};

// The layout is that of `_Edits` in engine/native/sampling.py.
struct Edits {
  Tokens bias, source, history, ban;
  const float* bias_value;
  const uint8_t* history_is_output;
  const float *source_reward, *repetition, *frequency, *presence;  // [rows]
  const uint8_t* apart;  // [rows] edits begin with log-probabilities, stay here, and leave -inf in the row
  // Memory for as many as there are tokens in all four; what is made of row r lies from first(r) on.
  int64_t* counts;    // [rows]
  int32_t* columns;   // ascending
  float* values;      // what the tokens' logits, or log-probabilities, become
  float* before;      // what the row had there
  uint64_t* keys;     // for twice as many

  OCTAVO_INLINE_MEMBER int64_t first(int64_t row) const {
    return bias.start[row] + source.start[row] + history.start[row] + ban.start[row];
  }
};

}  // namespace octavo

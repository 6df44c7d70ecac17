// The most probable tokens of rows, and how many are more probable than a given one.
#include "sampling_edit.h"

namespace octavo {
namespace {

struct Best {
  Logits logits;
  const float* peak;      // [rows]
  const float* log_sum;   // [rows]
  const int32_t* chosen;  // [count] rows
  const int32_t* wanted;  // [count] tokens of each
  int64_t width;
  const Edits* edits;     // null for none
  int32_t* columns;       // [count, width]
  float* scores;          // [count, width] log-probabilities
};

// Puts tokens in whose log-probabilities the edits keep; keys are of log-probabilities from here on.
int64_t merge(const Best& a, int64_t row, uint64_t* keys, uint64_t* spare, int64_t count) {
  const int64_t first = a.edits->start[row], edited = a.edits->counts[row];
  const int32_t* columns = a.edits->columns + first;
  const float *values = a.edits->values + first, peak = a.peak[row], log_sum = a.log_sum[row];
  int64_t kept = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float value = value_of(keys[i]) - peak - log_sum;
    const int64_t column = column_of(keys[i]);
    bool twice = false;
    if (value == -INFINITE)
      for (int64_t j = 0; j < edited && !twice; ++j) twice = columns[j] == column && values[j] > -INFINITE;
    if (!twice) keys[kept++] = key_of(value, column);
  }
  for (int64_t j = 0; j < edited; ++j)
    if (values[j] > -INFINITE) keys[kept++] = key_of(values[j], columns[j]);
  sort(keys, spare, kept);
  return kept;
}

void best_of(const Best& a, int64_t i, uint64_t* keys) {
  const int64_t row = a.chosen[i], wanted = smaller<int64_t>(a.wanted[i], a.logits.columns);
  int32_t* columns = a.columns + i * a.width;
  float* scores = a.scores + i * a.width;
  const float peak = a.peak[row], log_sum = a.log_sum[row];
  int64_t found = 0;
  if (log_sum == log_sum && wanted > 0) {
    uint64_t* spare = keys + a.logits.columns;
    found = select(a.logits, row, wanted, keys, spare);
    const bool merged = a.edits && a.edits->apart[row] && a.edits->counts[row];
    if (merged) found = smaller(merge(a, row, keys, spare, found), wanted);
    for (int64_t j = 0; j < found; ++j) {
      const float value = value_of(keys[j]);
      columns[j] = static_cast<int32_t>(column_of(keys[j]));
      scores[j] = merged ? value : value - peak - log_sum;
    }
  }
  for (int64_t j = found; j < a.width; ++j) {
    columns[j] = j < wanted ? static_cast<int32_t>(j) : 0;
    scores[j] = j < wanted ? __builtin_nanf("") : -INFINITE;
  }
}

int64_t rank_of(const Logits& a, int64_t row, float value) {
  const float *values = a.row(row), *tops = a.tops_of(row);
  int64_t larger_ones = 0;
  for (int64_t chunk = 0; chunk < a.chunks(); ++chunk) {
    if (!(tops[chunk] > value)) continue;
    const float* from = values + chunk * CHUNK;
    for (int64_t i = 0; i < a.width_of(chunk); ++i) larger_ones += from[i] > value;
  }
  return larger_ones + 1;
}

}  // namespace
}  // namespace octavo

using namespace octavo;

// `workspace` is [threads, 2, columns].
OCTAVO_EXPORT(logits_best)(float* values, int64_t rows, int64_t columns, int64_t stride, float* tops,
                           const float* peak, const float* log_sum, const int32_t* chosen, const int32_t* wanted,
                           int64_t count, int64_t width, const Edits* edits, int32_t* best, float* scores,
                           uint64_t* workspace, int64_t most_threads) {
  const Best a{{values, rows, columns, stride, tops}, peak, log_sum, chosen, wanted, width, edits, best, scores};
  const bool worth = count > 1 && count * chunks_of(columns) >= WORTH_SHARING / 16;
  parallel(worth, [&](int thread, int threads) {
    threads = static_cast<int>(smaller<int64_t>(threads, most_threads));
    if (thread >= threads) return;
    const Share own = share(count, thread, threads);
    for (int64_t i = own.first; i < own.last; ++i) best_of(a, i, workspace + thread * 2 * columns);
  });
}

// How many of a row's numbers are larger than those of the given columns [count, width], and one.
OCTAVO_EXPORT(logits_ranks)(float* values, int64_t rows, int64_t columns, int64_t stride, float* tops,
                            const int32_t* chosen, const int32_t* tokens, int64_t count, int64_t width,
                            int32_t* ranks) {
  const Logits logits{values, rows, columns, stride, tops};
  parallel(count * width * chunks_of(columns) >= WORTH_SHARING, [&](int thread, int threads) {
    const Share own = share(count, thread, threads);
    for (int64_t i = own.first * width; i < own.last * width; ++i) {
      const int64_t row = chosen[i / width];
      ranks[i] = static_cast<int32_t>(rank_of(logits, row, logits.row(row)[tokens[i]]));
    }
  });
}

// Penalties, biases and bans are written into the rows themselves, and taken back.
#include "sampling_edit.h"

namespace octavo {
namespace {

constexpr int64_t PLACE_BITS = 29;

// What is to be done to a row: a key is the column, then the kind, then the place among the row's edits.
int64_t collect(const Edits& a, int64_t row, int64_t vocabulary, uint64_t* keys) {
  const int64_t first = a.start[row];
  int64_t count = 0;
  for (int64_t i = first; i < a.start[row + 1]; ++i) {
    const Edit& edit = a.edits[i];
    // Tokens of an encoder with a vocabulary of its own may lie outside of the decoder's.
    if (edit.token < 0 || edit.token >= vocabulary || edit.kind >= FORCE) continue;
    keys[count++] = static_cast<uint64_t>(edit.token) << 32 | static_cast<uint64_t>(edit.kind) << PLACE_BITS |
                    static_cast<uint64_t>(i - first);
  }
  return count;
}

// Sorts keys by their columns, and leaves those of one column in their order.
void sort_by_column(uint64_t* keys, uint64_t* spare, int64_t count, int64_t vocabulary) {
  constexpr int64_t BITS = 9, DIGITS = 1 << BITS, FEW = 64;
  if (count <= FEW) return sort(keys, spare, count);
  uint64_t *from = keys, *to = spare;
  for (int64_t shift = 0; (vocabulary - 1) >> shift; shift += BITS) {
    const auto digit = [=](uint64_t key) { return key >> (32 + shift) & (DIGITS - 1); };
    int64_t places[DIGITS + 1] = {};
    for (int64_t i = 0; i < count; ++i) ++places[digit(from[i]) + 1];
    for (int64_t i = 1; i < DIGITS; ++i) places[i] += places[i - 1];
    for (int64_t i = 0; i < count; ++i) to[places[digit(from[i])]++] = from[i];
    uint64_t* const sorted = to;
    to = from;
    from = sorted;
  }
  if (from != keys) __builtin_memcpy(keys, from, static_cast<size_t>(count) * sizeof *keys);
}

// What the keys of one column make of its value.
float edited(const Edits& a, int64_t row, float value, const uint64_t* keys, int64_t count) {
  bool known = false;
  float outputs = 0, taken = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Edit& edit = a.edits[a.start[row] + static_cast<int64_t>(keys[i] & ((1 << PLACE_BITS) - 1))];
    if (edit.kind == BIAS) {
      value += edit.value;
    } else if (edit.kind == SOURCE) {
      value = value < 0 ? value * edit.value : value / edit.value;
    } else if (edit.kind == HISTORY) {
      known = true;
      outputs += edit.value;
    } else if (edit.kind == DRY) {
      taken = edit.value;
    } else {
      return -INFINITE;
    }
  }
  if (!known) return value - taken;
  const float repetition = a.repetition[row];
  value = value < 0 ? value * repetition : value / repetition;
  return value - (a.frequency[row] * outputs + a.presence[row] * (outputs > 0 ? 1.0f : 0.0f)) - taken;
}

// The row's changed columns hold other numbers now.
void refresh(const Logits& logits, int64_t row, const int32_t* columns, int64_t count) {
  for (int64_t i = 0, last = -1; i < count; ++i) {
    const int64_t chunk = columns[i] / CHUNK;
    if (chunk == last) continue;
    logits.tops_of(row)[chunk] = top_of(logits.row(row) + chunk * CHUNK, logits.width_of(chunk));
    last = chunk;
  }
}

void edit_row(const Logits& logits, const Edits& a, const float* peak, const float* log_sum, int64_t row) {
  const int64_t first = a.start[row], room = a.start[row + 1] - first;
  uint64_t* keys = a.keys + 2 * first;
  const int64_t count = collect(a, row, logits.columns, keys);
  sort_by_column(keys, keys + room, count, logits.columns);
  float* const values = logits.row(row);
  int64_t made = first;
  for (int64_t i = 0, next; i < count; i = next) {
    const int64_t column = static_cast<int64_t>(keys[i] >> 32);
    for (next = i + 1; next < count && static_cast<int64_t>(keys[next] >> 32) == column;) ++next;
    const float before = values[column];
    const float start = a.apart[row] ? before - peak[row] - log_sum[row] : before;
    const float value = edited(a, row, start, keys + i, next - i);
    a.columns[made] = static_cast<int32_t>(column);
    a.values[made] = value;
    a.before[made++] = before;
    values[column] = a.apart[row] ? -INFINITE : value;
  }
  a.counts[row] = made - first;
  refresh(logits, row, a.columns + first, made - first);
}

void restore_row(const Logits& logits, const Edits& a, int64_t row) {
  const int64_t first = a.start[row];
  for (int64_t i = first; i < first + a.counts[row]; ++i) logits.row(row)[a.columns[i]] = a.before[i];
  refresh(logits, row, a.columns + first, a.counts[row]);
}

// Rows in which some tokens are impossible for a while.
struct Confined {
  Logits logits;
  const int32_t* chosen;  // [count] rows
  const uint32_t* masks;  // [count, words]
  int64_t words;
  uint8_t* written;  // [count] whether chunks without a possible token hold -inf, or only their maxima do
  float* before;     // [count, chunks + columns] the maxima of chunks, then what was written over, side by side

  // The possible ones among the columns of a chunk, a bit each; all of its bits.
  OCTAVO_INLINE_MEMBER uint64_t possible(int64_t i, int64_t chunk, uint64_t& every) const {
    static_assert(CHUNK == 64);
    const uint32_t* mask = masks + i * words;
    uint64_t bits = mask[2 * chunk];
    if (2 * chunk + 1 < words) bits |= static_cast<uint64_t>(mask[2 * chunk + 1]) << 32;
    every = ~uint64_t{0} >> (CHUNK - logits.width_of(chunk));
    return bits & every;
  }
};

// Calls body(chunk, impossible) for each chunk that has impossible tokens, a bit each, and whose numbers show it.
template <class Body>
void each_written(const Confined& a, int64_t i, const Body& body) {
  uint64_t every;
  for (int64_t chunk = 0; chunk < a.logits.chunks(); ++chunk) {
    const uint64_t possible = a.possible(i, chunk, every);
    if (possible != every && (possible || a.written[i])) body(chunk, every & ~possible);
  }
}

void confine_row(const Confined& a, int64_t i) {
  const int64_t row = a.chosen[i], chunks = a.logits.chunks();
  float *values = a.logits.row(row), *tops = a.logits.tops_of(row), *before = a.before + i * (chunks + a.logits.columns);
  __builtin_memcpy(before, tops, static_cast<size_t>(chunks) * sizeof *tops);
  before += chunks;
  uint64_t every;
  for (int64_t chunk = 0; chunk < chunks && !a.written[i]; ++chunk)
    if (!a.possible(i, chunk, every)) tops[chunk] = -INFINITE;
  each_written(a, i, [&](int64_t chunk, uint64_t impossible) {
    bool changed = false;
    for (; impossible; impossible &= impossible - 1) {
      float& value = values[chunk * CHUNK + __builtin_ctzll(impossible)];
      changed |= !(value < tops[chunk]);
      *before++ = value;
      value = -INFINITE;
    }
    if (changed) tops[chunk] = top_of(values + chunk * CHUNK, a.logits.width_of(chunk));
  });
}

void release_row(const Confined& a, int64_t i) {
  const int64_t row = a.chosen[i], chunks = a.logits.chunks();
  float* values = a.logits.row(row);
  const float* before = a.before + i * (chunks + a.logits.columns);
  __builtin_memcpy(a.logits.tops_of(row), before, static_cast<size_t>(chunks) * sizeof *before);
  before += chunks;
  each_written(a, i, [&](int64_t chunk, uint64_t impossible) {
    for (; impossible; impossible &= impossible - 1)
      values[chunk * CHUNK + __builtin_ctzll(impossible)] = *before++;
  });
}

}  // namespace
}  // namespace octavo

using namespace octavo;

OCTAVO_EXPORT(logits_confine)(float* values, int64_t rows, int64_t columns, int64_t stride, float* tops,
                              const int32_t* chosen, int64_t count, const uint32_t* masks, int64_t words,
                              uint8_t* written, float* before, int64_t release) {
  const Confined a{{values, rows, columns, stride, tops}, chosen, masks, words, written, before};
  parallel(count > 1 && count * columns >= WORTH_SHARING, [&](int thread, int threads) {
    const Share own = share(count, thread, threads);
    for (int64_t i = own.first; i < own.last; ++i) {
      if (release) {
        release_row(a, i);
        continue;
      }
      confine_row(a, i);
      if (a.written[i] || top_of(a.logits.tops_of(chosen[i]), a.logits.chunks()) > -INFINITE) continue;
      release_row(a, i);
      a.written[i] = 1;  // where no token is possible, all numbers show it
      confine_row(a, i);
    }
  });
}

OCTAVO_EXPORT(logits_edit)(float* values, int64_t rows, int64_t columns, int64_t stride, float* tops,
                           const float* peak, const float* log_sum, const Edits* edits) {
  const Logits logits{values, rows, columns, stride, tops};
  parallel(edits->start[rows] >= WORTH_SHARING / 64, [&](int thread, int threads) {
    const Share own = share(rows, thread, threads);
    for (int64_t row = own.first; row < own.last; ++row) edit_row(logits, *edits, peak, log_sum, row);
  });
}

OCTAVO_EXPORT(logits_restore)(float* values, int64_t rows, int64_t columns, int64_t stride, float* tops,
                              const Edits* edits) {
  const Logits logits{values, rows, columns, stride, tops};
  parallel(edits->start[rows] >= WORTH_SHARING / 16, [&](int thread, int threads) {
    const Share own = share(rows, thread, threads);
    for (int64_t row = own.first; row < own.last; ++row) restore_row(logits, *edits, row);
  });
}

// Makes tokens impossible whose bit is 0 in the mask [words] of one of the chosen rows.
OCTAVO_EXPORT(logits_mask)(float* values, int64_t columns, int64_t stride, const int32_t* chosen, int64_t count,
                           const uint32_t* masks, int64_t words) {
  parallel(count > 1 && count * columns >= WORTH_SHARING, [&](int thread, int threads) {
    const Share own = share(count, thread, threads);
    for (int64_t i = own.first; i < own.last; ++i) {
      float* row = values + chosen[i] * stride;
      for (int64_t word = 0; word < words; ++word) {
        const uint32_t bits = masks[i * words + word];
        if (bits == ~0u) continue;
        const int64_t first = word * 32, last = smaller(first + 32, columns);
        for (int64_t column = first; column < last; ++column)
          if (!(bits >> (column - first) & 1)) row[column] = -INFINITE;
      }
    }
  });
}

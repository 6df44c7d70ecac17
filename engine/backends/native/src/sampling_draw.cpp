// Draws from rows: temperature, top-k, top-p, min-p, then the inverse of the distribution in vocabulary order.
#include "sampling.h"
#include "twins.h"

namespace octavo {
namespace {

// Tokens that a nucleus is looked for among, before all are asked: a quarter as many as there are chunks.
constexpr int64_t LEAST = 16, FEW = 256;
// Tokens of which the rest of a nucleus is sorted out, once the others are known to be in or out.
constexpr int64_t REST = 512;

// The layout is that of `TABLE` in engine/interface/sampling_table.py. Filters after min-p are neutral in rows that are
// drawn from here.
struct Row {
  int64_t seed;
  int32_t choice, position, num_draws, beam_width, renormalize, num_logprobs;
  float temperature;
  int32_t top_k;
  float top_p, min_p;
  float top_n_sigma, typical_p, xtc_probability, xtc_threshold;
  float repetition_penalty, presence_penalty, frequency_penalty;
};

struct Drawing {
  Logits logits;
  const int32_t* chosen;     // [count] rows
  const Row* table;          // [count]
  const double* uniforms;    // [count, most draws]
  int64_t most_draws;
  int32_t* tokens;           // [count, most draws]
  int32_t* wide;             // [count] whether all tokens were looked at for the nucleus
};

// A row's weights: exp((logit - peak) / temperature), rounded as torch rounds it.
struct Weights {
  const Logits& logits;
  int64_t row;
  float temperature, peak;
  float lowest, least;  // scaled logits and weights below are out
  double* sums;         // [chunks] of the weights that are in

  OCTAVO_INLINE_MEMBER Vector scaled(Vector v) const { return temperature == 1.0f ? v : v / temperature; }
  OCTAVO_INLINE_MEMBER float scaled(float value) const { return temperature == 1.0f ? value : value / temperature; }
  OCTAVO_INLINE_MEMBER Vector weight(Vector v) const { return falling(scaled(v) - peak); }
  OCTAVO_INLINE_MEMBER float weight(float value) const { return weight(all(value))[0]; }
  OCTAVO_INLINE_MEMBER Integers in(Vector v) const { return (scaled(v) >= lowest) & (weight(v) >= least); }
  OCTAVO_INLINE_MEMBER Vector filtered(Vector v) const { return in(v) ? weight(v) : Vector{}; }
};

// Adds up the weights of each chunk, and all of them.
double sum_up(const Weights& a) {
  const float *row = a.logits.row(a.row), *tops = a.logits.tops_of(a.row);
  const int64_t chunks = a.logits.chunks();
  double whole = 0;
  if (a.lowest == -INFINITE && !(a.least > 0)) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      a.sums[chunk] = 0;
      if (tops[chunk] == -INFINITE) continue;  // no token of it is possible, whatever the row holds
      Sums sums;
      each(a.logits.width_of(chunk), [&](auto v) { sums.add(v.kept(a.weight(v.read(row + chunk * CHUNK)))); });
      whole += a.sums[chunk] = sums.total();
    }
    return whole;
  }
  __builtin_memset(a.sums, 0, static_cast<size_t>(chunks) * sizeof *a.sums);
  each(chunks, [&](auto v) {
    const Integers any = (Integers)v.kept((Vector)a.in(v.read(tops)));
    for (uint32_t bits = bits_of(any); bits; bits &= bits - 1) {
      const int64_t chunk = v.at + __builtin_ctz(bits);
      Sums sums;
      each(a.logits.width_of(chunk), [&](auto u) { sums.add(u.kept(a.filtered(u.read(row + chunk * CHUNK)))); });
      whole += a.sums[chunk] = sums.total();
    }
  });
  return whole;
}

// How many of sorted weights have to be taken until they reach a sum; `sum` is what is there already, and is added to.
// One more than there are if all are not enough.
int64_t reach(const Weights& a, const uint64_t* keys, int64_t count, double goal, double& sum) {
  for (int64_t i = 0; i < count; ++i) {
    sum += static_cast<double>(a.weight(value_of(keys[i])));
    if (sum >= goal) return i + 1;
  }
  return count + 1;
}

// The weights of logits that reach a bound, and how many they are.
double sum_reaching(const float* row, const float* weights, int64_t columns, float bound, int64_t& count) {
  Sums sums;
  Integers found{};
  each(columns, [&](auto v) {
    const Integers in = v.read(row) >= bound;
    sums.add(v.kept((Vector)((Integers)v.read(weights) & in)));
    found -= (Integers)v.kept((Vector)in);
  });
  count = 0;
  for (int64_t i = 0; i < WIDTH; ++i) count += found[i];
  return sums.total();
}

// The smallest scaled logit of a nucleus that is not within the largest few, whose last logit is `known`: closes in from
// a logit whose nucleus is too large and one whose is too small, then sorts what is left between them.
float search(const Weights& a, double goal, float known, uint64_t* keys, uint64_t* spare, float* weights) {
  const float* row = a.logits.row(a.row);
  const int64_t columns = a.logits.columns;
  Vector least = all(known);
  each(columns, [&](auto v) {
    const Vector value = v.read(row);
    v.write(weights, a.weight(value));
    least = minimum(value, least);  // the 0 of what is missing only lowers it
  });
  // What scaled lies this far below the peak has no weight.
  float large = larger(-largest(-least), (a.peak - 104.0f) * a.temperature), small = unordered(ordered(known) + 1);
  int64_t many = 0, few = 0, counted = 0;
  double sum = sum_reaching(row, weights, columns, small, few);
  double over = sum_reaching(row, weights, columns, large, many) - goal, under = goal - sum;
  // False position; a side that stays is weakened (the Illinois rule).
  for (int64_t step = 0, side = 0; many - few > REST; ++step) {
    float middle = small - (small - large) * static_cast<float>(under / (over + under));
    if (step > 20 || !(middle > large && middle < small)) {  // equal halves of the floats that there are
      const int64_t low = ordered(large), high = ordered(small);
      if (high - low < 2) return a.scaled(large);  // only equal ones are left
      middle = unordered(static_cast<int32_t>(low + (high - low) / 2));
    }
    const double found = sum_reaching(row, weights, columns, middle, counted);
    if (found >= goal) {
      if (side > 0) under *= 0.5;
      large = middle, many = counted, over = found - goal, side = 1;
    } else {
      if (side < 0) over *= 0.5;
      small = middle, few = counted, sum = found, under = goal - found, side = -1;
    }
  }
  int64_t count = 0;
  each_reaching(row, 0, columns, large, [&](int64_t column) {
    if (row[column] < small) keys[count++] = key_of(row[column], column);
  });
  sort(keys, spare, count);
  const int64_t taken = smaller(reach(a, keys, count, goal, sum), count);
  return a.scaled(taken ? value_of(keys[taken - 1]) : large);
}

// Sets `lowest` to what top-k and top-p leave. Whether all tokens had to be looked at for that.
bool filter(Weights& a, int64_t top_k, double top_p, uint64_t* keys, uint64_t* spare, float* weights) {
  const int64_t columns = a.logits.columns;
  const bool nucleus = top_p < 1;
  if (top_k > 0 && top_k < columns) {
    const int64_t count = select(a.logits, a.row, top_k, keys, spare);
    int64_t taken = count;
    if (nucleus) {
      double whole = 0, sum = 0;
      for (int64_t i = 0; i < count; ++i) whole += static_cast<double>(a.weight(value_of(keys[i])));
      taken = smaller(reach(a, keys, count, top_p * whole, sum), count);
    }
    a.lowest = a.scaled(value_of(keys[taken - 1]));
    return false;
  }
  if (!nucleus) return false;
  const double goal = top_p * sum_up(a);
  if (!(goal >= 0)) return false;  // not a number
  const int64_t first = smaller(columns, larger(LEAST, smaller(FEW, a.logits.chunks() / 4)));
  const int64_t count = select(a.logits, a.row, first, keys, spare);
  double sum = 0;
  const int64_t taken = reach(a, keys, count, goal, sum);
  if (taken <= count || count == columns) {
    a.lowest = a.scaled(value_of(keys[smaller(taken, count) - 1]));
    return false;
  }
  a.lowest = search(a, goal, value_of(keys[count - 1]), keys, spare, weights);
  return true;
}

// The token at which running sums of the weights pass u of the whole.
int64_t find(const Weights& a, double u) {
  const int64_t chunks = a.logits.chunks();
  const double whole = a.sums[chunks - 1], goal = u * whole;
  // Rounding may put the goal at the very end: then it is the chunk in which the whole is reached.
  int64_t chunk = 0, last = chunks - 1;
  while (chunk < last) {
    const int64_t middle = chunk + (last - chunk) / 2;
    if (a.sums[middle] > goal || a.sums[middle] >= whole)
      last = middle;
    else
      chunk = middle + 1;
  }
  float weights[CHUNK];
  const float* row = a.logits.row(a.row) + chunk * CHUNK;
  each(a.logits.width_of(chunk), [&](auto v) { v.write(weights, a.filtered(v.read(row))); });
  double sum = chunk ? a.sums[chunk - 1] : 0;
  int64_t possible = 0;
  for (int64_t i = 0; i < a.logits.width_of(chunk); ++i) {
    sum += static_cast<double>(weights[i]);
    if (weights[i] > 0) possible = i;
    if (sum > goal) break;
  }
  return chunk * CHUNK + possible;
}

void draw_row(const Drawing& a, int64_t i, double* sums, uint64_t* keys, float* weights) {
  const int64_t row = a.chosen[i], chunks = a.logits.chunks();
  const Row& how = a.table[i];
  int32_t* tokens = a.tokens + i * a.most_draws;
  for (int64_t draw = 0; draw < a.most_draws; ++draw) tokens[draw] = 0;
  a.wide[i] = 0;
  const float peak = top_of(a.logits.tops_of(row), chunks);
  if (!(peak > -INFINITE && peak < INFINITE)) return;
  Weights w{a.logits, row, how.temperature, 0, -INFINITE, 0, sums};
  w.peak = w.scaled(peak);
  uint64_t* spare = keys + a.logits.columns;
  a.wide[i] = filter(w, how.top_k, static_cast<double>(how.top_p), keys, spare, weights);
  w.least = how.min_p;
  sum_up(w);
  for (int64_t chunk = 1; chunk < chunks; ++chunk) sums[chunk] += sums[chunk - 1];
  if (!(sums[chunks - 1] > 0)) return;
  for (int64_t draw = 0; draw < how.num_draws; ++draw)
    tokens[draw] = static_cast<int32_t>(find(w, a.uniforms[i * a.most_draws + draw]));
}

}  // namespace
}  // namespace octavo

using namespace octavo;

OCTAVO_TWIN(Row)

// `sums` is [threads, chunks], `keys` [threads, 2, columns], `weights` [threads, columns].
OCTAVO_EXPORT(logits_draw)(float* values, int64_t rows, int64_t columns, int64_t stride, float* tops,
                           const int32_t* chosen, int64_t count, const void* table, const double* uniforms,
                           int64_t most_draws, int32_t* tokens, int32_t* wide, double* sums,
                           uint64_t* keys, float* weights, int64_t most_threads) {
  const Drawing a{{values, rows, columns, stride, tops}, chosen, static_cast<const Row*>(table), uniforms, most_draws,
                  tokens, wide};
  parallel(count > 1 && count * columns >= WORTH_SHARING, [&](int thread, int threads) {
    threads = static_cast<int>(smaller<int64_t>(threads, most_threads));
    if (thread >= threads) return;
    const Share own = share(count, thread, threads);
    for (int64_t i = own.first; i < own.last; ++i)
      draw_row(a, i, sums + thread * chunks_of(columns), keys + thread * 2 * columns, weights + thread * columns);
  });
}

// Mixtures of experts (arXiv:1701.06538): which experts each token goes to, and the way of rows to them and back.
//
// Rows are laid out expert by expert, so that each expert multiplies all of its rows at once. A token adds its experts'
// results up in the order of their numbers: what it gets does not depend on the others.
#pragma once

#include "functions.h"
#include "threads.h"

namespace octavo {

constexpr int64_t MOST_EXPERTS = 1024;

// T: rows. `chosen`, `slots` and `weights` are [tokens, active]: a token's experts in the order of their numbers, the
// row that each of them reads it in, and what its result is multiplied with.
template <class T>
struct Experts {
  const T* routed;  // [tokens, count] the router's numbers
  const T* x;
  T* rows;  // [tokens * active, size] of each expert one after the other: what it reads, then what it answers
  T* out;
  int32_t *chosen, *slots;
  float* weights;
  int64_t* starts;  // [count + 1] the first row of each expert
  int64_t tokens, count, active, size, routed_stride, x_stride, out_stride, normalize;
};

// Of each token of a thread's share the likeliest experts; of those alike the first.
template <class T>
static void route_part(const Experts<T>& a, int thread, int threads) {
  const Share own = share(a.tokens, thread, threads);
  for (int64_t token = own.first; token < own.last; ++token) {
    float odds[MOST_EXPERTS];
    const T* row = a.routed + token * a.routed_stride;
    each(a.count, [&](auto v) { v.write(odds, v.read(row)); });
    float most = odds[0], all_odds = 0.0f;
    for (int64_t e = 1; e < a.count; ++e) most = odds[e] > most ? odds[e] : most;
    each(a.count, [&](auto v) { v.write(odds, exponential(v.read(odds) - most)); });
    for (int64_t e = 0; e < a.count; ++e) all_odds += odds[e];
    int32_t* chosen = a.chosen + token * a.active;
    float* weights = a.weights + token * a.active;
    bool taken[MOST_EXPERTS] = {};
    for (int64_t k = 0; k < a.active; ++k) {
      int64_t best = -1;
      for (int64_t e = 0; e < a.count; ++e)
        if (!taken[e] && (best < 0 || odds[e] > odds[best])) best = e;
      taken[best] = true;
    }
    float kept = 0.0f;
    for (int64_t e = 0, k = 0; e < a.count; ++e) {
      if (!taken[e]) continue;
      chosen[k] = static_cast<int32_t>(e);
      weights[k] = odds[e] / all_odds;
      kept += weights[k++];
    }
    if (a.normalize)
      for (int64_t k = 0; k < a.active; ++k) weights[k] /= kept;
  }
}

// Where each token's rows are; for one thread.
template <class T>
static void group(const Experts<T>& a) {
  const int64_t pairs = a.tokens * a.active;
  for (int64_t e = 0; e <= a.count; ++e) a.starts[e] = 0;
  for (int64_t i = 0; i < pairs; ++i) ++a.starts[a.chosen[i] + 1];
  for (int64_t e = 0; e < a.count; ++e) a.starts[e + 1] += a.starts[e];
  int64_t next[MOST_EXPERTS];
  for (int64_t e = 0; e < a.count; ++e) next[e] = a.starts[e];
  for (int64_t i = 0; i < pairs; ++i) a.slots[i] = static_cast<int32_t>(next[a.chosen[i]]++);
}

template <class T>
static void gather_part(const Experts<T>& a, int thread, int threads) {
  const Share own = share(a.tokens * a.active, thread, threads);
  for (int64_t i = own.first; i < own.last; ++i)
    __builtin_memcpy(a.rows + a.slots[i] * a.size, a.x + i / a.active * a.x_stride, a.size * sizeof(T));
}

// Rounded as often as torch rounds, which multiplies, rounds and adds one expert after the other.
template <class T>
static void combine_part(const Experts<T>& a, int thread, int threads) {
  const Share own = share(a.tokens, thread, threads);
  for (int64_t token = own.first; token < own.last; ++token) {
    T* out = a.out + token * a.out_stride;
    const int32_t* slots = a.slots + token * a.active;
    const float* weights = a.weights + token * a.active;
    each(a.size, [&](auto v) {
      Vector total{};
      for (int64_t k = 0; k < a.active; ++k)
        total = rounded(total + rounded(v.read(a.rows + slots[k] * a.size) * weights[k], out), out);
      v.write(out, total);
    });
  }
}

}  // namespace octavo

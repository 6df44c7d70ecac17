// Recurrences of features that each have a state of their own, of a few numbers: Mamba's scan and RG-LRU. A vector holds
// neighbouring features, and threads share these.
#pragma once

#include "states.h"

namespace octavo {

// Of each feature and number i, for each token: s_i = e^(-t a_i) s_i + B_i (t x); out = (C s + d x) silu(opening).
// t is softplus(steps). All features share B and C.
template <class T>
struct ChannelScan {
  const T *x, *before, *after, *steps, *opening;  // before, after: B and C
  T* out;
  const float *decay, *skip;  // a, [size, width]; d, [width]
  int64_t x_stride, before_stride, after_stride, steps_stride, opening_stride, out_stride, begin, width, size;
};

// For each token: h = a h + sqrt(1 - a²) i x; out = h, where a = e^(speed r), and i and r are sigmoids. For the first
// token of a sequence h = i x.
template <class T>
struct Recurrence {
  const T *x, *inputs, *decays;
  T* out;
  const float* speed;        // [width]
  const int64_t* positions;  // of each token
  int64_t x_stride, inputs_stride, decays_stride, out_stride, begin, width;
};

// Calls advance(v, state, token) for the tokens of all rows, in order, where v is a vector of features and `state` their
// numbers, from `begin` on, and keeps these. A state has `size` numbers of each feature, one after the other.
template <class Advance>
OCTAVO_INLINE void each_feature(int64_t width, int64_t size, int64_t begin, const StateMemory& memory, const StateRows& r,
                                int thread, int threads, const Advance& advance) {
  const Share own = share(width, thread, threads, WIDTH);
  Vector state[LONGEST_KEY];
  const auto visit = [&](auto v) {
    for (int64_t row = 0; row < r.rows; ++row) {
      const float* known = r.sources ? memory.slots + r.sources[row] * memory.size + begin : nullptr;
      for (int64_t i = 0; i < size; ++i) state[i] = known ? v.read(known + i * width) : Vector{};
      const auto keep = [&](int64_t slot) {
        for (int64_t i = 0; i < size; ++i) v.write(memory.slots + slot * memory.size + begin + i * width, state[i]);
      };
      for (int64_t token = r.starts[row]; token < r.starts[row + 1]; ++token) {
        advance(v, state, token);
        if (r.sources && r.snapshots[row] && token + 1 - r.starts[row] == r.afters[row]) keep(r.snapshots[row]);
      }
      if (r.sources) keep(r.targets[row]);
    }
  };
  int64_t at = own.first;
  for (; at + WIDTH <= own.last; at += WIDTH) visit(Full{at});
  if (at < own.last) visit(Part{at, own.last - at});
}

template <class T>
OCTAVO_INLINE void channel_scan_part(const ChannelScan<T>& s, const StateMemory& memory, const StateRows& r, int thread,
                                     int threads) {
  float before[LONGEST_KEY], after[LONGEST_KEY];
  each_feature(s.width, s.size, s.begin, memory, r, thread, threads, [&](auto v, Vector* state, int64_t token) {
    each(s.size, [&](auto w) {
      w.write(before, w.read(s.before + token * s.before_stride));
      w.write(after, w.read(s.after + token * s.after_stride));
    });
    const Vector x = v.read(s.x + token * s.x_stride), gate = v.read(s.opening + token * s.opening_stride);
    const Vector step = soft_plus(v.read(s.steps + token * s.steps_stride)), added = x * step;
    Vector result = x * v.read(s.skip);
    for (int64_t i = 0; i < s.size; ++i) {
      state[i] = fma(all(before[i]), added, state[i] * exponential(-step * v.read(s.decay + i * s.width)));
      result = fma(all(after[i]), state[i], result);
    }
    v.write(s.out + token * s.out_stride, result * (gate / (1.0f + exponential(-gate))));
  });
}

OCTAVO_INLINE Vector square_root(Vector x) {
  for (int64_t i = 0; i < WIDTH; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
}

template <class T>
OCTAVO_INLINE void recurrence_part(const Recurrence<T>& s, const StateMemory& memory, const StateRows& r, int thread,
                                   int threads) {
  each_feature(s.width, 1, s.begin, memory, r, thread, threads, [&](auto v, Vector* state, int64_t token) {
    const Vector input = v.read(s.x + token * s.x_stride) * logistic(v.read(s.inputs + token * s.inputs_stride));
    const Vector logarithm = logistic(v.read(s.decays + token * s.decays_stride)) * v.read(s.speed);
    if (s.positions[token] == 0)
      state[0] = input;
    else
      state[0] = fma(state[0], exponential(logarithm), input * square_root(1.0f - exponential(2.0f * logarithm)));
    v.write(s.out + token * s.out_stride, state[0]);
  });
}

}  // namespace octavo

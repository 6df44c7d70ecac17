// Operations that carry a state from token to token: each row's is read from one slot and written to others.
//
// Every token takes one step of the recurrence, in float32, so that what a row's tokens get does not depend on how they
// are divided into steps, nor on what runs beside them.
#pragma once

#include "functions.h"
#include "threads.h"

namespace octavo {

// A layer's slots, the first of which is zeros and never written.
struct StateMemory {
  float* slots;
  int64_t size;  // numbers of a slot
};

// Of a step's rows the slots that each reads and writes; a snapshot is of the state after its first `afters` tokens, and
// 0 for none. Where they are null, states begin as zeros and are not kept.
struct StateRows {
  const int32_t *sources, *targets, *snapshots, *afters;
  const int32_t* starts;  // [rows + 1] first token of each
  int64_t rows;
};

template <class T>
struct Convolved {
  const T* x;  // [a | b | values], or the values alone
  T* out;
  const float *weight, *bias;  // [taps, width]; [width], or null
  int64_t x_stride, out_stride, width, taps, gated;
};

// out = b * convolution(a * values), or silu(convolution(values)).
template <class T>
OCTAVO_INLINE void convolve_part(const Convolved<T>& c, const StateMemory& memory, const StateRows& r, int thread,
                                 int threads) {
  constexpr int64_t PIECE = 64;
  const Share own = share(c.width, thread, threads, PIECE);
  const int64_t kept = c.taps - 1, size = own.last - own.first;
  if (size <= 0) return;
  for (int64_t row = 0; row < r.rows; ++row) {
    const int64_t start = r.starts[row], count = r.starts[row + 1] - start;
    const float* before = r.sources ? memory.slots + r.sources[row] * memory.size : nullptr;
    // The input of a token, or of one before the row's first, which the state has.
    const auto input = [&](auto v, int64_t token) -> Vector {
      if (token < 0) return before ? v.read(before + (kept + token) * c.width + own.first) : Vector{};
      const T* x = c.x + (start + token) * c.x_stride + own.first;
      if (!c.gated) return v.read(x);
      return rounded(v.read(x) * v.read(x + 2 * c.width), x);
    };
    for (int64_t token = 0; token < count; ++token) {
      T* out = c.out + (start + token) * c.out_stride + own.first;
      const T* x = c.x + (start + token) * c.x_stride + own.first;
      each(size, [&](auto v) {
        Vector total = input(v, token - kept) * v.read(c.weight + own.first);
        for (int64_t tap = 1; tap < c.taps; ++tap)
          total = total + input(v, token - kept + tap) * v.read(c.weight + tap * c.width + own.first);
        if (c.bias) total = total + v.read(c.bias + own.first);
        total = rounded(total, out);
        v.write(out, c.gated ? total * v.read(x + c.width) : total / (1.0f + exponential(-total)));
      });
    }
    if (!r.sources) continue;
    const auto keep = [&](int64_t slot, int64_t tokens) {
      float* after = memory.slots + slot * memory.size + own.first;
      for (int64_t place = 0; place < kept; ++place, after += c.width)
        each(size, [&](auto v) { v.write(after, input(v, tokens - kept + place)); });
    };
    if (r.snapshots[row]) keep(r.snapshots[row], r.afters[row]);
    keep(r.targets[row], count);
  }
}

}  // namespace octavo

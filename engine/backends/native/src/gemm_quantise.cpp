// Weights of few bits, made from float32 or bfloat16 once, at load.
#include "gemm_groups.h"

namespace octavo::gemm {
namespace {

constexpr int64_t VECTORS = GROUP / WIDTH;
constexpr float LOWEST = -8, HIGHEST = 7;

// Weights of a group, and how well a scale serves them.
struct Group {
  Vector values[VECTORS];

  // The nearest of the 16 integers to each weight over the scale whose reciprocal is given.
  OCTAVO_INLINE_MEMBER Vector level(int64_t i, float reciprocal) const {
    constexpr float SHIFT = 12582912.0f;
    const Vector wanted = minimum(maximum(values[i] * all(reciprocal), all(LOWEST)), all(HIGHEST));
    return wanted + all(SHIFT) - all(SHIFT);
  }

  // For the integers that a reciprocal gives: their products with the weights, and with themselves, summed.
  OCTAVO_INLINE_MEMBER void sums(float reciprocal, float& with_weights, float& with_themselves) const {
    Vector products{}, squares{};
    for (int64_t i = 0; i < VECTORS; ++i) {
      const Vector q = level(i, reciprocal);
      products += q * values[i];
      squares += q * q;
    }
    with_weights = sum(products);
    with_themselves = sum(squares);
  }
};

OCTAVO_INLINE float nearest_bfloat16(float value, bfloat16& rounded) {
  const Vector all_of_it = all(value);
  rounded.bits = narrow(all_of_it)[0];
  return widen(narrow(all_of_it))[0];
}

// The scale of least squared error among those tried; -8 of it come near the weight of the largest magnitude.
OCTAVO_INLINE float best_scale(const Group& group, float extreme) {
  constexpr int TRIED = 4;
  const float inverse = 1 / extreme;
  float best = 0, highest = 0;
  for (int i = -TRIED; i <= TRIED; ++i) {
    float with_weights, with_themselves;
    group.sums((LOWEST + 0.25f * static_cast<float>(i)) * inverse, with_weights, with_themselves);
    // With these integers the best scale is a / b, and the squared error is that of 0 less a * a / b. One of the
    // integers is at least 6, so that b is not 0.
    const float scale = with_weights / with_themselves, gain = with_weights * scale;
    best = gain > highest ? scale : best;
    highest = gain > highest ? gain : highest;
  }
  return best;
}

template <class T>
OCTAVO_INLINE void quantise_group(const T* weights, int64_t size, uint8_t* q, bfloat16& scale) {
  constexpr float TINY = 1e-17f;  // squares of smaller weights vanish
  const float most = peak(weights, size);
  const bool finite = most < __builtin_inff();
  Group group{};
  Integers lowest{};
  for (int64_t i = 0; finite && i < VECTORS; ++i) {
    const int64_t left = larger<int64_t>(size - i * WIDTH, 0);
    if (left) group.values[i] = left >= WIDTH ? load(weights + i * WIDTH) : load_part(weights + i * WIDTH, left);
    lowest |= group.values[i] == -most;
  }
  float reciprocal = 0;
  scale.bits = finite ? 0 : 0x7fc0;
  if (finite && most > TINY) {
    const float extreme = sum_of(lowest) ? -most : most;
    const float kept = nearest_bfloat16(best_scale(group, extreme), scale);
    if (kept != 0) reciprocal = 1 / kept;
  }
  uint8_t levels[GROUP];
  for (int64_t i = 0; i < VECTORS; ++i) {
    // Adding this leaves the integers in the last bits.
    constexpr float SHIFT = 12582912.0f;
    const Vector level = reciprocal == 0 ? Vector{} : group.level(i, reciprocal);
    store(levels + i * WIDTH, ((Integers)(level + all(SHIFT)) & 15) ^ 8);
  }
  for (int64_t i = 0; i < GROUP / 2; ++i) {
    const int64_t first = i / UNIT * 2 * UNIT + i % UNIT;
    q[i] = static_cast<uint8_t>(levels[first] | levels[first + UNIT] << 4);
  }
}

template <class T>
void quantise_int8_fast(const T* weight, int64_t stride, int8_t* q, float* scales, int64_t outputs, int64_t inputs) {
  parallel(outputs * inputs >= 1 << 14, [&](int thread, int threads) {
    const Share mine = share(outputs, thread, threads);
    for (int64_t output = mine.first; output < mine.last; ++output) {
      const T* row = weight + output * stride;
      const Steps steps = Steps::of(row, inputs);
      steps.write(row, inputs, q + output * inputs);
      scales[output] = steps.scale;
    }
  });
}

// Integers count steps of the scale that is kept. It is at most a 512th part smaller than the one that puts the largest
// weight at 127, which then comes to less than 127.5.
template <class T>
void quantise_int8(const T* weight, int64_t stride, int8_t* q, bfloat16* scales, int64_t outputs, int64_t inputs) {
  const int64_t groups = groups_of(inputs);
  parallel(outputs * inputs >= 1 << 14, [&](int thread, int threads) {
    const Share mine = share(outputs * groups, thread, threads);
    for (int64_t i = mine.first; i < mine.last; ++i) {
      const int64_t output = i / groups, at = i % groups * GROUP, size = smaller(GROUP, inputs - at);
      const T* from = weight + output * stride + at;
      Steps steps = Steps::of(from, size);
      const float kept = nearest_bfloat16(steps.scale, scales[i]);
      if (steps.reciprocal != 0) steps.reciprocal = 1 / kept;
      steps.write(from, size, q + output * inputs + at);
    }
  });
}

template <class T>
void quantise_int4(const T* weight, int64_t stride, uint8_t* q, bfloat16* scales, int64_t outputs, int64_t inputs) {
  const int64_t groups = groups_of(inputs);
  parallel(outputs * inputs >= 1 << 14, [&](int thread, int threads) {
    const Share mine = share(outputs * groups, thread, threads);
    for (int64_t i = mine.first; i < mine.last; ++i) {
      const int64_t at = i % groups * GROUP;
      quantise_group(weight + i / groups * stride + at, smaller(GROUP, inputs - at), q + i * (GROUP / 2), scales[i]);
    }
  });
}

}  // namespace

// q [outputs, inputs] from -127 to 127, scales [outputs]: weight is about q * scale.
OCTAVO_EXPORT(gemm_quantise_int8_fast_f32)(const float* weight, int64_t stride, int8_t* q, float* scales,
                                           int64_t outputs, int64_t inputs) {
  quantise_int8_fast(weight, stride, q, scales, outputs, inputs);
}

OCTAVO_EXPORT(gemm_quantise_int8_fast_bf16)(const bfloat16* weight, int64_t stride, int8_t* q, float* scales,
                                            int64_t outputs, int64_t inputs) {
  quantise_int8_fast(weight, stride, q, scales, outputs, inputs);
}

// The same with scales [outputs, groups].
OCTAVO_EXPORT(gemm_quantise_int8_f32)(const float* weight, int64_t stride, int8_t* q, bfloat16* scales,
                                      int64_t outputs, int64_t inputs) {
  quantise_int8(weight, stride, q, scales, outputs, inputs);
}

OCTAVO_EXPORT(gemm_quantise_int8_bf16)(const bfloat16* weight, int64_t stride, int8_t* q, bfloat16* scales,
                                       int64_t outputs, int64_t inputs) {
  quantise_int8(weight, stride, q, scales, outputs, inputs);
}

// q [outputs, groups, GROUP / 2], two integers from 0 to 15 in a byte: i in the lower half, i + 4 in the upper one, four
// bytes for every eight; 8 past the end of a row. scales [outputs, groups]: weight is about (integer - 8) * scale.
OCTAVO_EXPORT(gemm_quantise_int4_f32)(const float* weight, int64_t stride, uint8_t* q, bfloat16* scales,
                                      int64_t outputs, int64_t inputs) {
  quantise_int4(weight, stride, q, scales, outputs, inputs);
}

OCTAVO_EXPORT(gemm_quantise_int4_bf16)(const bfloat16* weight, int64_t stride, uint8_t* q, bfloat16* scales,
                                       int64_t outputs, int64_t inputs) {
  quantise_int4(weight, stride, q, scales, outputs, inputs);
}

}  // namespace octavo::gemm

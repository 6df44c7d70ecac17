// Weights of few bits, made from float32 or bfloat16 once, at load.
#include "gemm_groups.h"
#include "pages.h"

namespace octavo::gemm {
namespace {

OCTAVO_INLINE float nearest_bfloat16(float value) { return widen(narrow(all(value)))[0]; }

// Integers of numbers that have no fraction.
OCTAVO_INLINE Integers whole(Vector v) { return __builtin_convertvector(v, Integers); }

constexpr int64_t VECTORS = GROUP / WIDTH;
constexpr float STEPS = 15;    // from the least integer to the largest
constexpr float MIDDLE = 8;    // the integer that stands for 0 where the minimum is -8 scales
constexpr float TINY = 1e-17f;  // squares of smaller weights vanish
constexpr int TRIED = 4;       // scales on either side of the plain one

// How weights are kept: for our own kernels, or with scales that have the bits of bfloat16, as other programs keep them.
enum Form { PLAIN, PORTABLE };

// What integers are multiplied by, and what is then added.
struct Line {
  float scale, least;
};

// Weights of a group, and how well lines serve them. Where a row ends within the group, its last weight stands again.
struct Group {
  Vector values[VECTORS];
  float lowest, highest;

  template <class T>
  OCTAVO_INLINE_MEMBER Group(const T* weights, int64_t size) {
    Vector low = all(__builtin_inff()), high = all(-__builtin_inff());
    T padded[GROUP];
    if (size < GROUP) {
      for (int64_t i = 0; i < GROUP; ++i) padded[i] = weights[smaller(i, size - 1)];
      weights = padded;
    }
    for (int64_t i = 0; i < VECTORS; ++i) {
      values[i] = load(weights + i * WIDTH);
      low = minimum(low, values[i]);
      high = maximum(high, values[i]);
    }
    highest = largest(high);
    lowest = -largest(-low);
  }

  // The nearest integer to each weight, from 0 to STEPS.
  OCTAVO_INLINE_MEMBER Vector level(int64_t i, float least, float reciprocal) const {
    constexpr float SHIFT = 12582912.0f;
    const Vector wanted = minimum(maximum((values[i] - all(least)) * all(reciprocal), Vector{}), all(STEPS));
    return wanted + all(SHIFT) - all(SHIFT);
  }

  // Of several lines the one of least squared error: for the integers that a scale near the plain one gives, the line
  // through the weights is that of linear regression. Weights are counted from the lowest, so that nothing cancels.
  OCTAVO_INLINE_MEMBER Line best() const {
    constexpr float COUNT = GROUP;
    const float range = highest - lowest;
    if (!(range > TINY)) return {0, lowest + range / 2};
    Vector weights{};
    for (int64_t i = 0; i < VECTORS; ++i) weights += values[i] - all(lowest);
    const float weight = sum(weights);
    Line best{};
    float highest_gain = 0;
    for (int i = -TRIED; i <= TRIED; ++i) {
      const float reciprocal = (STEPS + 0.2f * static_cast<float>(i)) / range;
      Vector integers{}, squares{}, products{};
      for (int64_t j = 0; j < VECTORS; ++j) {
        const Vector q = level(j, lowest, reciprocal);
        integers += q;
        squares += q * q;
        products += q * (values[j] - all(lowest));
      }
      const float integer = sum(integers), square = sum(squares), product = sum(products);
      // The integers differ, so that nothing is divided by 0. The squared error is that of 0 less the gain.
      const float scale = (COUNT * product - integer * weight) / (COUNT * square - integer * integer);
      const float least = (weight - scale * integer) / COUNT, gain = scale * product + least * weight;
      if (gain > highest_gain) {
        highest_gain = gain;
        best = {scale, least};
      }
    }
    return {best.scale, lowest + best.least};
  }

  // The same of lines through 0, whose minimum is -MIDDLE scales: that integer comes near the weight of the largest
  // magnitude. Scales have the bits of bfloat16, in which other programs keep them.
  OCTAVO_INLINE_MEMBER Line best_symmetric() const {
    const float extreme = -lowest >= highest ? lowest : highest;
    if (!(__builtin_fabsf(extreme) > TINY)) return {0, 0};
    float best = 0, highest_gain = 0;
    for (int i = -TRIED; i <= TRIED; ++i) {
      const float reciprocal = (0.25f * static_cast<float>(i) - MIDDLE) / extreme;
      Vector products{}, squares{};
      for (int64_t j = 0; j < VECTORS; ++j) {
        const Vector q = level(j, -MIDDLE / reciprocal, reciprocal) - all(MIDDLE);
        products += q * values[j];
        squares += q * q;
      }
      // One of the integers is at least 6, so that nothing is divided by 0.
      const float product = sum(products), scale = product / sum(squares), gain = product * scale;
      best = gain > highest_gain ? scale : best;
      highest_gain = gain > highest_gain ? gain : highest_gain;
    }
    const float scale = nearest_bfloat16(best);
    return {scale, -MIDDLE * scale};
  }
};

template <Form FORM, class T>
OCTAVO_INLINE void quantise_group(const T* weights, int64_t size, uint8_t* q, float16* line) {
  uint8_t levels[GROUP] = {};
  line[0].bits = line[1].bits = 0x7e00;  // not a number
  if (peak(weights, size) < __builtin_inff()) {
    const Group group(weights, size);
    const Line best = FORM == PORTABLE ? group.best_symmetric() : group.best();
    line[0].bits = without_infinity(half_bits(best.scale), 0x7c00);
    line[1].bits = without_infinity(half_bits(best.least), 0x7c00);
    const float scale = widened(line[0]), least = widened(line[1]);
    const float reciprocal = scale != 0 ? 1 / scale : 0;
    for (int64_t i = 0; i < VECTORS; ++i) store(levels + i * WIDTH, whole(group.level(i, least, reciprocal)));
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

// The half that is nearest; of a scale so small that halves are far apart the next larger one.
OCTAVO_INLINE float16 kept_scale(float scale) {
  constexpr float SMALLEST = 0x1p-14f;  // of normal halves
  float16 near{without_infinity(half_bits(scale), 0x7c00)};
  if (scale < SMALLEST && widened(near) < scale) ++near.bits;
  return near;
}

// Integers count steps of the scale that is kept. It is at most a 512th part smaller than the one that puts the largest
// weight at 127, which then comes to less than 127.5.
template <Form FORM, class T>
void quantise_int8(const T* weight, int64_t stride, int8_t* q, float16* scales, int64_t outputs, int64_t inputs) {
  const int64_t groups = groups_of(inputs);
  parallel(outputs * inputs >= 1 << 14, [&](int thread, int threads) {
    const Share mine = share(outputs * groups, thread, threads);
    for (int64_t i = mine.first; i < mine.last; ++i) {
      const int64_t output = i / groups, at = i % groups * GROUP, size = smaller(GROUP, inputs - at);
      const T* from = weight + output * stride + at;
      Steps steps = Steps::of(from, size);
      scales[i] = kept_scale(FORM == PORTABLE ? nearest_bfloat16(steps.scale) : steps.scale);
      steps.count(widened(scales[i]));
      steps.write(from, size, q + output * inputs + at);
    }
  });
}

// Rotated groups of an output are much alike, so that their scales are whole numbers of steps, up to 255, of one float32:
// each is the least that is no smaller than the one that puts the group's largest weight at 127.
template <class T>
void quantise_rotated(const T* weight, int64_t stride, int8_t* q, uint8_t* scales, int64_t outputs, int64_t inputs) {
  constexpr float MOST = 255;
  const int64_t groups = groups_of(inputs);
  parallel(outputs * inputs >= 1 << 14, [&](int thread, int threads) {
    const Share mine = share(outputs, thread, threads);
    const auto each_group = [&](int64_t output, const auto& act) {
      for (int64_t group = 0; group < groups; ++group) {
        float rotated[GROUP];
        const int64_t at = group * GROUP;
        rotate<GROUP>(weight + output * stride + at, smaller(GROUP, inputs - at), 1.0f, rotated);
        act(group, rotated, Steps::of(rotated, GROUP));
      }
    };
    for (int64_t output = mine.first; output < mine.last; ++output) {
      float largest = 0;
      each_group(output, [&](int64_t, const float*, const Steps& steps) {
        if (largest == largest && !(steps.scale <= largest)) largest = steps.scale;  // NaN stays
      });
      const float counted = largest / MOST;
      uint8_t* to = scales + output * (4 + groups);
      __builtin_memcpy(to, &counted, 4);
      each_group(output, [&](int64_t group, const float* rotated, Steps steps) {
        const float times = counted > 0 ? __builtin_ceilf(steps.scale / counted) : 0;
        to[4 + group] = static_cast<uint8_t>(smaller(times, MOST));
        steps.count(counted * static_cast<float>(to[4 + group]));
        steps.write(rotated, GROUP, q + (output * groups + group) * GROUP);
      });
    }
  });
}

template <Form FORM, class T>
void quantise_int4(const T* weight, int64_t stride, uint8_t* q, float16* lines, int64_t outputs, int64_t inputs) {
  const int64_t groups = groups_of(inputs);
  parallel(outputs * inputs >= 1 << 14, [&](int thread, int threads) {
    const Share mine = share(outputs * groups, thread, threads);
    for (int64_t i = mine.first; i < mine.last; ++i) {
      const int64_t at = i % groups * GROUP;
      const T* from = weight + i / groups * stride + at;
      quantise_group<FORM>(from, smaller(GROUP, inputs - at), q + i * (GROUP / 2), lines + i * 2);
    }
  });
}

}  // namespace

// From weights of either format.
#define OCTAVO_QUANTISE(kind, quantise, Integer, Scale)                                                             \
  OCTAVO_QUANTISE_FROM(kind##_f32, quantise, Integer, Scale, float)                                                 \
  OCTAVO_QUANTISE_FROM(kind##_bf16, quantise, Integer, Scale, bfloat16)
#define OCTAVO_QUANTISE_FROM(name, quantise, Integer, Scale, T)                                                     \
  OCTAVO_EXPORT(gemm_quantise_##name)(const T* weight, int64_t stride, Integer* q, Scale* scales, int64_t outputs,  \
                                      int64_t inputs) {                                                             \
    quantise(weight, stride, q, scales, outputs, inputs);                                                           \
  }

// q [outputs, inputs] from -127 to 127, scales [outputs]: weight is about q * scale.
OCTAVO_QUANTISE(int8_fast, quantise_int8_fast, int8_t, float)

// The same with scales [outputs, groups].
OCTAVO_QUANTISE(int8_plain, quantise_int8<PLAIN>, int8_t, float16)
OCTAVO_QUANTISE(int8_portable, quantise_int8<PORTABLE>, int8_t, float16)

// Rotated: q [outputs, groups, GROUP]; scales [outputs, 4 + groups]: a float32 and how many times that each scale is.
OCTAVO_QUANTISE(int8_rotated, quantise_rotated, int8_t, uint8_t)

// q [outputs, groups, GROUP / 2], two integers from 0 to 15 in a byte: i in the lower half, i + 4 in the upper one, four
// bytes for every eight; what is past the end of a row is not used. scales [outputs, groups, 2], with minima: weight is
// about integer * scale + minimum. Portable: minima are -8 scales.
OCTAVO_QUANTISE(int4_plain, quantise_int4<PLAIN>, uint8_t, float16)
OCTAVO_QUANTISE(int4_portable, quantise_int4<PORTABLE>, uint8_t, float16)

}  // namespace octavo::gemm

// Powers of e and of 2 whose exponents are not above 0.
#pragma once

#include "functions.h"

namespace octavo {
namespace {

// exp(x) for x up to 0: 0 below -87.33, where `exponential` would give subnormal numbers, exactly 1 at 0; error at
// most 2 units of the last place. NaN stays NaN.
//
// x = n ln 2 + r, and exp(r) = 1 + r + r^2 p(r), with the p of degree 4 whose largest relative error is least for
// |r| <= ln 2 / 2 (3e-9, by Remez' exchange).
OCTAVO_INLINE Vector falling(Vector x) {
  constexpr float REST[] = {0.49999993f, 0.1666652f, 0.04166839f, 0.00836878f, 0.00138145f};
  const Vector shifted = fma(x, all(1.44269504f), all(0x1.8p23f));  // n in the last bits
  const Vector n = shifted - 0x1.8p23f;
  const Vector r = fma(n, all(2.12194440e-4f), fma(n, all(-0.693359375f), x));
  const Vector value = fma(r * r, polynomial(r, REST), r) + 1.0f;
  const Vector power = (Vector)(((Integers)shifted + 127) << 23);
  return x < -87.33f ? Vector{} : value * power;
}

// 2^x for x up to 0, or a rounding above it: exactly 1 at 0, 0 or subnormal below -126, 0 at -infinity. NaN stays NaN.
// `FINE`: error at most 2 units of the last place; otherwise 3.6e-6, far below what rounding to bfloat16 takes away.
//
// x = n + r, and 2^r = 1 + r p(r), with the p whose largest relative error is least (by Remez' exchange).
#if defined(__AVX512F__)

// 0 <= r <= 1: n is x rounded down, as the last instruction rounds it. Of -infinity r is 0.
template <bool FINE>
OCTAVO_INLINE Vector power_of_two(Vector x) {
  constexpr float LONG[] = {0.693147063f, 0.240229309f, 0.0554852821f, 0.00967545155f, 0.0012467847f, 0.000216129149f};
  constexpr float SHORT[] = {0.693044841f, 0.241280198f, 0.0522424728f, 0.0134266838f};
  const Vector r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  return _mm512_scalef_ps(fma(r, FINE ? polynomial(r, LONG) : polynomial(r, SHORT), all(1.0f)), x);
}

#else

// |r| <= 1/2: n is x rounded to the nearest. The factor 2^n is 0 for n = -127.
template <bool FINE>
OCTAVO_INLINE Vector power_of_two(Vector x) {
  constexpr float LONG[] = {0.693147242f, 0.240226522f, 0.0555031039f, 0.00961769279f, 0.00134066434f, 0.000155946778f};
  constexpr float SHORT[] = {0.693113625f, 0.240207106f, 0.0559768826f, 0.00978291221f};
  x = maximum(all(-127.0f), x);  // the order keeps NaN
  const Vector shifted = x + (0x1.8p23f + 127);  // n + 127, the exponent's bits, in the last bits
  const Vector r = x - (shifted - (0x1.8p23f + 127));
  const Vector value = fma(r, FINE ? polynomial(r, LONG) : polynomial(r, SHORT), all(1.0f));
  return value * (Vector)((Integers)shifted << 23);
}

#endif

}  // namespace
}  // namespace octavo

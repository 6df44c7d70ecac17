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

// 2^x for x up to 0, or a rounding above it: exactly 1 at 0, 0 or subnormal below -126. NaN stays NaN. `FINE`: error at
// most 2 units of the last place; otherwise 3.6e-6, far below what rounding to bfloat16 takes away.
//
// x = n + r with |r| <= 1/2, and 2^r = 1 + r p(r), with the p whose largest relative error is least (by Remez' exchange).
template <bool FINE>
OCTAVO_INLINE Vector power_of_two(Vector x) {
  constexpr float LONG[] = {0.693147242f, 0.240226522f, 0.0555031039f, 0.00961769279f, 0.00134066434f, 0.000155946778f};
  constexpr float SHORT[] = {0.693113625f, 0.240207106f, 0.0559768826f, 0.00978291221f};
  x = maximum(all(-200.0f), x);  // the order keeps NaN
#if defined(__AVX512F__)
  const Vector n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const Vector shifted = x + 0x1.8p23f;  // n in the last bits
  const Vector n = shifted - 0x1.8p23f;
#endif
  const Vector r = x - n;
  const Vector value = fma(r, FINE ? polynomial(r, LONG) : polynomial(r, SHORT), all(1.0f));
#if defined(__AVX512F__)
  return _mm512_scalef_ps(value, n);
#else
  return x < -126.0f ? Vector{} : value * (Vector)(((Integers)shifted + 127) << 23);
#endif
}

}  // namespace
}  // namespace octavo

// exp of what is not above 0.
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

}  // namespace
}  // namespace octavo

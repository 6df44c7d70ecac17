// Functions of vectors: exponential, tanh, erf. Their polynomials were fitted to the functions themselves (weighted
// least squares, reweighted towards the smallest largest error); tests hold the errors that are stated here, in units of
// the last place of float32, with and without fused products.
#pragma once

#include "vector.h"

namespace octavo {

template <int COUNT>
OCTAVO_INLINE Vector polynomial(Vector x, const float (&coefficients)[COUNT]) {
  Vector value = all(coefficients[COUNT - 1]);
#pragma GCC unroll 16
  for (int i = COUNT - 2; i >= 0; --i) value = fma(value, x, all(coefficients[i]));
  return value;
}

// e^x, 0 below the smallest float32 and infinity above the largest; error at most 1.5.
OCTAVO_INLINE Vector exponential(Vector x) {
  // x = n ln 2 + r. The first part of ln 2 has so few bits that its product with n is exact.
  constexpr float SHIFT = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to an integer
  constexpr float REST[] = {0.5f, 1.666651815e-01f, 4.166620597e-02f, 8.368889801e-03f, 1.395048923e-03f};
  x = minimum(all(89.0f), maximum(all(-104.0f), x));  // the order keeps NaN
  const Vector shifted = fma(x, all(1.44269504f), all(SHIFT));
  const Vector n = shifted - SHIFT;
  const Vector r = fma(n, all(2.12194440e-4f), fma(n, all(-0.693359375f), x));
  const Vector value = fma(r * r, polynomial(r, REST), r) + 1.0f;
  // 2^n in two factors, because n may leave the range of exponents while the product does not.
  const Integers whole = (Integers)shifted - 0x4b400000, half = whole >> 1;
  return value * (Vector)((half + 127) << 23) * (Vector)((whole - half + 127) << 23);
}

// 1 / (1 + e^-x); error at most 2.5.
OCTAVO_INLINE Vector logistic(Vector x) { return 1.0f / (1.0f + exponential(-x)); }

OCTAVO_INLINE Vector with_sign(Vector magnitude, Vector sign) {
  return (Vector)((Integers)magnitude | ((Integers)sign & static_cast<int32_t>(0x80000000)));
}

// tanh(x); error at most 2.5.
OCTAVO_INLINE Vector hyperbolic_tangent(Vector x) {
  constexpr float NEAR[] = {-3.333328366e-01f, 1.333149076e-01f, -5.374349654e-02f, 2.065057866e-02f,
                            -5.717036780e-03f};
  const Vector size = magnitude(x), square = x * x;
  const Vector near = fma(size * square, polynomial(square, NEAR), size);
  const Vector far = 1.0f - 2.0f / (exponential(size + size) + 1.0f);
  return with_sign(size < 0.625f ? near : far, x);
}

// erf(x); error at most 2.
OCTAVO_INLINE Vector error_function(Vector x) {
  // Up to 1, erf(x) / x - 1 in powers of x²; beyond, -log(1 - erf(x)), until nothing is left between erf and 1.
  constexpr float NEAR[] = {1.283791659e-01f, -3.761262596e-01f, 1.128360033e-01f, -2.685444430e-02f,
                            5.189535208e-03f, -8.020839887e-04f, 7.889116387e-05f};
  constexpr float FAR[] = {-1.880402415e-04f, 1.129578471e+00f,  6.332198977e-01f,  1.084185764e-01f,
                           -2.520825714e-02f, 4.204561934e-03f, -4.413363931e-04f, 2.168685023e-05f};
  const Vector size = minimum(all(4.0f), magnitude(x));
  const Vector near = fma(size, polynomial(size * size, NEAR), size);
  const Vector far = 1.0f - exponential(-polynomial(size, FAR));
  return with_sign(size < 1.0f ? near : far, x);
}

}  // namespace octavo

// The norms of norms.h as functions of the library.
#include "norms.h"

using namespace octavo;

#define OCTAVO_NORMS(T, suffix) \
  OCTAVO_EXPORT(rms_norm_##suffix)(const T* x, const T* residual, T* sum, const T* weight, T* out, int64_t outer, \
                                   int64_t inner, int64_t size, int64_t outer_stride, int64_t inner_stride, \
                                   float eps, int64_t product) { \
    const NormRows<T> a{x,    residual,     sum,          weight,       nullptr, out, outer,  inner, \
                        size, outer_stride, inner_stride, inner * size, size,    eps, product, 1}; \
    parallel(a.worth_sharing(), [&](int thread, int threads) { rms_norm_part(a, thread, threads); }); \
  } \
  OCTAVO_EXPORT(layer_norm_##suffix)(const T* x, const T* residual, T* sum, const T* weight, const T* bias, T* out, \
                                     int64_t outer, int64_t inner, int64_t size, int64_t outer_stride, \
                                     int64_t inner_stride, int64_t weights, float eps) { \
    const NormRows<T> a{x,    residual,     sum,          weight,       bias, out, outer,  inner, \
                        size, outer_stride, inner_stride, inner * size, size, eps, ROUNDED, weights}; \
    parallel(a.worth_sharing(), [&](int thread, int threads) { layer_norm_part(a, thread, threads); }); \
  }

OCTAVO_NORMS(float, f32)
OCTAVO_NORMS(bfloat16, bf16)

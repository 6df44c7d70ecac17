// The activations of activations.h as functions of the library.
#include "activations.h"

using namespace octavo;

#define OCTAVO_ACTIVATIONS(T, suffix) \
  OCTAVO_EXPORT(activate_##suffix)(const T* x, const T* bias, T* out, int64_t rows, int64_t width, \
                                   int64_t x_stride, int64_t gated, int64_t function) { \
    const ActivationRows<T> a{x, bias, out, rows, width, x_stride, gated}; \
    parallel(a.worth_sharing(), [&](int thread, int threads) { activate_part(a, function, thread, threads); }); \
  }

OCTAVO_ACTIVATIONS(float, f32)
OCTAVO_ACTIVATIONS(bfloat16, bf16)

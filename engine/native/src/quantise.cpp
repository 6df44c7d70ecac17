// The rows of quantise.h as a function of the library.
#include "quantise.h"

using namespace octavo;

#define OCTAVO_QUANTISE(T, suffix) \
  OCTAVO_EXPORT(quantise_##suffix)(const T* x, uint8_t* steps, float* scales, int32_t* sums, int64_t rows, \
                                   int64_t size, int64_t x_stride, int64_t steps_stride, int64_t offset) { \
    const QuantiseRows<T> a{x, steps, scales, sums, rows, size, x_stride, steps_stride, offset}; \
    parallel(a.worth_sharing(), [&](int thread, int threads) { quantise_part(a, thread, threads); }); \
  }

OCTAVO_QUANTISE(float, f32)
OCTAVO_QUANTISE(bfloat16, bf16)

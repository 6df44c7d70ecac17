// What rotary.h does as functions of the library.
#include "rotary.h"

using namespace octavo;

#define OCTAVO_ROTATE(T, R, suffix) \
  OCTAVO_EXPORT(rotate_##suffix)(T* turning, const T* values, const R* cosines, const R* sines, const int64_t* slots, \
                               void* keys_page, void* values_page, bfloat16* key_scales, bfloat16* value_scales, \
                               const float* centre, int64_t tokens, int64_t stored, int64_t heads, int64_t kv_heads, \
                               int64_t head_dim, int64_t dim, int64_t turning_stride, int64_t values_stride, \
                               int64_t interleaved, int64_t format, int64_t same) { \
    const Rotate<T, R> a{turning,    values,       cosines, sines,  nullptr, slots,    keys_page, values_page, \
                       key_scales, value_scales, centre,  tokens, stored,  heads,    kv_heads,  head_dim, \
                       dim,        turning_stride,        values_stride,   interleaved,         format,    same}; \
    parallel(a.worth_sharing(), [&](int thread, int threads) { rotate_part(a, thread, threads); }); \
  }

OCTAVO_ROTATE(float, float, f32)
OCTAVO_ROTATE(bfloat16, bfloat16, bf16)
OCTAVO_ROTATE(bfloat16, float, bf16_exact)

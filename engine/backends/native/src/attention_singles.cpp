// Attention whose products are float32.
#include "attention_worker.h"

namespace octavo {

void attend_singles(Attention& a, int64_t thread, int64_t threads) {
  switch (a.kv_format) {
    case PAGE_F32: return attend_share<Single, float>(a, thread, threads);
    case PAGE_BF16: return attend_share<Single, bfloat16>(a, thread, threads);
    case PAGE_F16: return attend_share<Single, float16>(a, thread, threads);
    default: return attend_share<Single, int8_t>(a, thread, threads);
  }
}

}  // namespace octavo

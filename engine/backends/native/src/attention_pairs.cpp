// Attention whose products are bfloat16, where the processor has them.
#include "attention_worker.h"

#if defined(OCTAVO_PAIRS)

namespace octavo {

void attend_pairs(Attention& a, int64_t thread, int64_t threads) {
  if (a.kv_format == PAGE_BF16) return attend_share<Pair, bfloat16>(a, thread, threads);
  attend_share<Pair, int8_t>(a, thread, threads);
}

}  // namespace octavo

#endif

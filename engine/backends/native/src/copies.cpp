// Copies of whole pages in many tensors at once.
#include "threads.h"

using namespace octavo;

// Copies pages pairs[i][0] to pages pairs[i][1] of each tensor, whose pages have bytes[tensor] bytes. No page is both a
// source and a destination.
OCTAVO_EXPORT(copy_pages)(char* const* tensors, const int64_t* bytes, int64_t count, const int32_t* pairs,
                          int64_t copies) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += bytes[i];
  parallel(total * copies >= WORTH_SHARING * 4, [&](int thread, int threads) {
    const Share own = share(count * copies, thread, threads);
    for (int64_t item = own.first; item < own.last; ++item) {
      const int64_t tensor = item / copies, size = bytes[tensor];
      const int32_t* pair = pairs + item % copies * 2;
      __builtin_memcpy(tensors[tensor] + pair[1] * size, tensors[tensor] + pair[0] * size, static_cast<size_t>(size));
    }
  });
}

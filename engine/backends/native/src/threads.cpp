// How many threads a region has, as the threads themselves see it.
#include "threads.h"

using namespace octavo;

OCTAVO_EXPORT(count_threads)(int64_t* count) {
  *count = 0;
  parallel(true, [&](int, int threads) {
    __atomic_fetch_add(count, 1, __ATOMIC_RELAXED);
    barrier(threads);
  });
}

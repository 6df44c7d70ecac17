// How many threads a region has, as the threads themselves see it, and who takes pieces of work where one comes late.
#include "threads.h"

using namespace octavo;

OCTAVO_EXPORT(count_threads)(int64_t* count) {
  *count = 0;
  parallel(true, [&](int, int threads) {
    __atomic_fetch_add(count, 1, __ATOMIC_RELAXED);
    barrier(threads);
  });
}

// Adds to takers[piece] 100 and the number of the thread that took it. The thread `late` begins once the others have
// taken all.
OCTAVO_EXPORT(take_pieces)(int64_t* takers, int64_t count, int64_t some, int64_t late) {
  constexpr int MOST = 64;
  Ticket tickets[MOST] = {};
  int64_t left = count;
  parallel(true, [&](int thread, int threads) {
    if (threads > MOST) return;
    if (thread == late && threads > 1)
      while (__atomic_load_n(&left, __ATOMIC_ACQUIRE)) sched_yield();
    each_taken(tickets, count, thread, threads, some, [&](int64_t piece) {
      __atomic_fetch_add(&takers[piece], 100 + thread, __ATOMIC_RELAXED);
      __atomic_fetch_sub(&left, 1, __ATOMIC_RELEASE);
    });
  });
}

// Thread 0 comes to a barrier this many nanoseconds late, on crowded cores. used[thread]: the CPU time of the wait, in
// nanoseconds.
OCTAVO_EXPORT(wait_for_late)(int64_t* used, int64_t late) {
  Barrier others;
  Barrier::expect_crowd(monotonic_nanoseconds() + 10 * late);
  const auto clock = [] {
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return time.tv_sec * 1000000000 + time.tv_nsec;
  };
  parallel(true, [&](int thread, int threads) {
    if (thread == 0) {
      const timespec pause = {late / 1000000000, late % 1000000000};
      nanosleep(&pause, nullptr);
    }
    const int64_t begun = clock();
    others.wait(threads);
    used[thread] = clock() - begun;
  });
  Barrier::expect_crowd(0);
}

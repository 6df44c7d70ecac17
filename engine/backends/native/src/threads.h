// Threads: those of the OpenMP library that torch has loaded, so that one pool serves both.
//
// Its entry points are looked up when this library is loaded, in what the process has open already; nothing is linked.
// Where there are none, everything runs in the calling thread. A region costs one to three microseconds while the
// threads still spin, and it always takes all of them: a pool that is asked for fewer lets the rest go, and makes new
// threads for the next region.
#pragma once

#include <sched.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "common.h"

extern "C" {
void GOMP_parallel(void (*part)(void*), void* data, unsigned threads, unsigned flags) __attribute__((weak));
void GOMP_barrier(void) __attribute__((weak));
int omp_get_thread_num(void) __attribute__((weak));
int omp_get_num_threads(void) __attribute__((weak));
int omp_get_max_threads(void) __attribute__((weak));
int omp_in_parallel(void) __attribute__((weak));
}

namespace octavo {

// A region is worth its costs from so many numbers on that are read and written once.
constexpr int64_t WORTH_SHARING = 1 << 14;

// How many threads a region has that is opened here.
OCTAVO_INLINE int max_threads() {
  if (!GOMP_parallel || !GOMP_barrier || !omp_get_thread_num || !omp_get_num_threads || !omp_get_max_threads ||
      !omp_in_parallel || omp_in_parallel())
    return 1;
  return omp_get_max_threads();
}

// Calls part(thread, threads) in each thread of the pool if `worth`, or else part(0, 1) here.
template <class Part>
OCTAVO_INLINE void parallel(bool worth, const Part& part) {
  const int threads = worth ? max_threads() : 1;
  if (threads == 1) {
    part(0, 1);
    return;
  }
  GOMP_parallel(
      [](void* data) {
        (*static_cast<const Part*>(data))(omp_get_thread_num(), omp_get_num_threads());
      },
      const_cast<Part*>(&part), static_cast<unsigned>(threads), 0);
}

// All threads of a region wait for each other.
OCTAVO_INLINE void barrier(int threads) {
  if (threads > 1) GOMP_barrier();
}

inline int64_t monotonic_nanoseconds() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000 + time.tv_nsec;
}

OCTAVO_INLINE void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// A cheaper barrier, for regions with hundreds of them: a thread that waits looks again and again, and soon lets others
// have the core, since one of these may be the thread that is waited for: where there are more threads than free cores,
// looking 20 times as long makes slow steps three times as slow. GOMP_barrier takes 0.5 microseconds, this a fifth.
//
// Where a core is free, sched_yield returns at once, and no thread has to be woken. Where it is not, sched_yield must
// not be called again and again: since Linux 6.18 it gives up the rest of the slice and charges the thread for it. Beside
// two busy threads on two cores, steps then took 15 times as long as if threads slept.
class Barrier {
 public:
  OCTAVO_INLINE_MEMBER void wait(int threads) {
    if (threads == 1) return;
    const int32_t round = __atomic_load_n(&round_, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&arrived_, 1, __ATOMIC_ACQ_REL) == threads) {
      __atomic_store_n(&arrived_, 0, __ATOMIC_RELAXED);
      __atomic_store_n(&round_, round + 1, __ATOMIC_SEQ_CST);
      if (__atomic_load_n(&sleeping_, __ATOMIC_SEQ_CST)) wake();
      return;
    }
    for (int looked = 0; __atomic_load_n(&round_, __ATOMIC_ACQUIRE) == round; ++looked) {
      if (looked < PATIENCE)
        relax();
      else
        leave_core(round);
    }
  }

  // Threads of all barriers sleep, instead of yielding, until then.
  static void expect_crowd(int64_t until) { __atomic_store_n(&crowded_, until, __ATOMIC_RELAXED); }

 private:
  static constexpr int PATIENCE = 500;
  // Nanoseconds. A yield that takes so long has let another thread run; then the cores count as crowded for a while.
  static constexpr int64_t SLOW_YIELD = 50'000, CROWDED_FOR = 100'000'000;

#if defined(__linux__)
  void leave_core(int32_t round) {
    const int64_t begun = monotonic_nanoseconds();
    if (begun < __atomic_load_n(&crowded_, __ATOMIC_RELAXED)) return sleep(round);
    sched_yield();
    const int64_t ended = monotonic_nanoseconds();
    if (ended - begun > SLOW_YIELD) expect_crowd(ended + CROWDED_FOR);
  }

  // Returns once the round is over, or earlier for no reason. The count comes first and the kernel looks at the round
  // itself. So the thread that ends the round sees the count, or the kernel sees the new round.
  void sleep(int32_t round) {
    __atomic_add_fetch(&sleeping_, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &round_, FUTEX_WAIT_PRIVATE, round, nullptr);
    __atomic_sub_fetch(&sleeping_, 1, __ATOMIC_RELAXED);
  }

  void wake() { syscall(SYS_futex, &round_, FUTEX_WAKE_PRIVATE, INT32_MAX); }
#else
  void leave_core(int32_t) { sched_yield(); }
  void wake() {}
#endif

  static inline int64_t crowded_ = 0;  // on the clock of monotonic_nanoseconds

  alignas(64) int32_t arrived_ = 0;
  int32_t sleeping_ = 0;
  alignas(64) int32_t round_ = 0;
};

struct Share {
  int64_t first, last;
};

// What of `count` things, in pieces of `piece`, belongs to a thread.
OCTAVO_INLINE Share share(int64_t count, int thread, int threads, int64_t piece = 1) {
  const int64_t pieces = (count + piece - 1) / piece;
  const int64_t first = pieces * thread / threads * piece;
  const int64_t last = pieces * (thread + 1) / threads * piece;
  return {smaller(first, count), smaller(last, count)};
}

// How many pieces of a thread's share have been taken: from its front in the upper half, from its back in the lower one.
struct Ticket {
  alignas(64) uint64_t taken;
};

// Takes up to `some` pieces of a share that nobody has: its own thread from the front, others from the back. A thread
// that the system has sent away, or whose memory is slower, holds up the others less. Nothing if all are taken.
OCTAVO_INLINE Share take(Ticket& ticket, Share whole, int64_t some, bool back) {
  uint64_t seen = __atomic_load_n(&ticket.taken, __ATOMIC_RELAXED);
  for (;;) {
    const int64_t front = static_cast<int64_t>(seen >> 32), rear = static_cast<int64_t>(seen & 0xffffffff);
    const int64_t left = whole.last - whole.first - front - rear;
    if (left <= 0) return {0, 0};
    const int64_t count = smaller(some, left);
    const uint64_t next = seen + (static_cast<uint64_t>(count) << (back ? 0 : 32));
    if (!__atomic_compare_exchange_n(&ticket.taken, &seen, next, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) continue;
    if (back) return {whole.last - rear - count, whole.last - rear};
    return {whole.first + front, whole.first + front + count};
  }
}

// Calls body(piece) for some of `count` pieces, with which all threads of a region together get each of them once. A
// thread takes `some` at a time, first of its own share, then of the others'.
template <class Body>
OCTAVO_INLINE void each_taken(Ticket* tickets, int64_t count, int thread, int threads, int64_t some, const Body& body) {
  for (int i = 0; i < threads; ++i) {
    const int whose = (thread + i) % threads;
    for (;;) {
      const Share taken = take(tickets[whose], share(count, whose, threads), some, i > 0);
      if (taken.first == taken.last) break;
      for (int64_t piece = taken.first; piece < taken.last; ++piece) body(piece);
    }
  }
}

}  // namespace octavo

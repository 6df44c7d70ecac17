// Ranks: processes that compute one step together, each with a part of every layer. They meet in shared memory.
//
// Each rank has a line, which says how far it has come, and two buffers, which it fills in turn. A rank fills the buffer
// for its next meeting while others may still read the one of the last meeting. No rank reads an older one:
// a rank that comes to a meeting has read everything of the meeting before.
#pragma once

#include <limits.h>

#include "threads.h"

namespace octavo {

struct RankLine {
  int64_t arrived;  // the last meeting that the rank has come to
  int64_t failed;   // the last order that it failed to carry out
  int32_t bell;     // changes with the two numbers above: waiting ranks sleep on it
  int32_t sleeping;
  char spare[104];  // lines of the cache that ranks do not share
};

// What one rank knows. `order`: number of the order that is carried out; all ranks have the same.
struct Ranks {
  int64_t rank, count;
  int64_t capacity;  // bytes of a buffer
  void* memory;      // [count] RankLine, then [count, 2, capacity] buffers
  int64_t order, meeting;
  int64_t patience;  // nanoseconds that one rank waits for another; 0: no limit
};

OCTAVO_INLINE RankLine& line_of(const Ranks& ranks, int64_t rank) {
  return static_cast<RankLine*>(ranks.memory)[rank];
}

// The buffer of a rank for a meeting.
OCTAVO_INLINE char* buffer_of(const Ranks& ranks, int64_t rank, int64_t meeting) {
  char* buffers = static_cast<char*>(ranks.memory) + ranks.count * static_cast<int64_t>(sizeof(RankLine));
  return buffers + (2 * rank + (meeting & 1)) * ranks.capacity;
}

inline void ring(RankLine& own) {
  __atomic_add_fetch(&own.bell, 1, __ATOMIC_SEQ_CST);
#if defined(__linux__)
  if (__atomic_load_n(&own.sleeping, __ATOMIC_SEQ_CST)) syscall(SYS_futex, &own.bell, FUTEX_WAKE, INT_MAX);
#endif
}

// Sleeps until the bell is no longer at `seen`, for a tenth of a second at most.
inline void sleep_until_rung(RankLine& other, int32_t seen) {
#if defined(__linux__)
  const timespec most = {0, 100'000'000};
  __atomic_add_fetch(&other.sleeping, 1, __ATOMIC_SEQ_CST);
  syscall(SYS_futex, &other.bell, FUTEX_WAIT, seen, &most);
  __atomic_sub_fetch(&other.sleeping, 1, __ATOMIC_SEQ_CST);
#else
  const timespec moment = {0, 50'000};
  if (__atomic_load_n(&other.bell, __ATOMIC_SEQ_CST) == seen) nanosleep(&moment, nullptr);
#endif
}

// Comes to the next meeting and waits for the other ranks: it looks for a moment, then it sleeps. What this rank wrote
// before is seen by the others afterwards. One thread of a rank calls it. Returns 0, or 1 + a rank that failed to carry out
// the order, or -1 - a rank that did not come.
inline int64_t meet(Ranks& ranks) {
  constexpr int LOOKS = 2000;
  const int64_t meeting = ++ranks.meeting;
  RankLine& own = line_of(ranks, ranks.rank);
  __atomic_store_n(&own.arrived, meeting, __ATOMIC_SEQ_CST);
  ring(own);
  int64_t begun = 0;
  for (int64_t rank = 0; rank < ranks.count; ++rank) {
    RankLine& other = line_of(ranks, rank);
    for (int looked = 0;; ++looked) {
      const int32_t seen = __atomic_load_n(&other.bell, __ATOMIC_SEQ_CST);
      if (__atomic_load_n(&other.failed, __ATOMIC_SEQ_CST) == ranks.order) return 1 + rank;
      if (__atomic_load_n(&other.arrived, __ATOMIC_SEQ_CST) >= meeting) break;
      if (looked < LOOKS) {
        relax();
        continue;
      }
      if (!begun) begun = monotonic_nanoseconds();
      if (ranks.patience && monotonic_nanoseconds() - begun > ranks.patience) return -1 - rank;
      sleep_until_rung(other, seen);
    }
  }
  return 0;
}

}  // namespace octavo

// Intel's matrix tiles (AMX): eight registers of up to 16 rows of 64 bytes, and products of two that are added to a third.
//
// A build with OCTAVO_TILES_EMULATED keeps them in memory, and gives the bits that the instructions give (Intel 64 and
// IA-32 Architectures Software Developer's Manual, volume 2: LDTILECFG, TILELOADD, TDPBF16PS, TDPBSSD). So what is made of
// tiles is tested on CPUs that have AVX-512 without them. That build is for tests alone, see build.py.
//
// OCTAVO_AMX is defined where there are tiles, and stands before functions that use them.
#pragma once

#include "vector.h"

#if defined(OCTAVO_TILES_EMULATED)
#define OCTAVO_AMX
#elif defined(__AVX512BF16__) && defined(__x86_64__) && defined(__linux__) && \
    (__has_include(<amxint8intrin.h>) || __has_include(<amxintrin.h>))  // of GCC, of Clang: they know the instructions
#define OCTAVO_AMX __attribute__((target("amx-tile,amx-bf16,amx-int8")))
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(OCTAVO_AMX)
namespace octavo {

constexpr int64_t TILE_ROWS = 16;
constexpr int64_t TILE_LINE = 64;  // bytes of a row
constexpr int64_t TILE_BYTES = TILE_ROWS * TILE_LINE;

// Shapes of the registers, as LDTILECFG reads them: whole ones if nothing else is said.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileShapes) == 64);

#if defined(OCTAVO_TILES_EMULATED)

// Each number that is subnormal becomes 0 of its sign.
OCTAVO_INLINE Vector without_subnormals(Vector v) {
  const Words bits = (Words)v;
  return (Vector)((bits & 0x7f800000) == 0 ? bits & 0x80000000 : bits);
}

// Whether this process may use tiles.
OCTAVO_INLINE bool ask_for_tiles() { return true; }

class TileRegisters {
 public:
  void configure(const TileShapes& shapes) {
    shapes_ = shapes;
    __builtin_memset(rows_, 0, sizeof rows_);
  }

  void release() {}

  template <int TILE>
  void zero() {
    __builtin_memset(rows_[TILE], 0, sizeof rows_[TILE]);
  }

  template <int TILE>
  void load(const void* from, int64_t stride) {
    zero<TILE>();
    for (int64_t row = 0; row < shapes_.rows[TILE]; ++row)
      __builtin_memcpy(rows_[TILE][row], static_cast<const char*>(from) + row * stride, shapes_.row_bytes[TILE]);
  }

  template <int TILE>
  void store(void* to, int64_t stride) const {
    for (int64_t row = 0; row < shapes_.rows[TILE]; ++row)
      __builtin_memcpy(static_cast<char*>(to) + row * stride, rows_[TILE][row], shapes_.row_bytes[TILE]);
  }

  // SUM += A @ B of bfloat16, whose pairs lie together in a row of A and in a column of B. Products of even and of odd
  // inputs are added up apart from 0 on, each product and sum rounded once; then both are added, and then that to SUM.
  // Subnormal numbers are 0, as factors, sums and results.
  template <int SUM, int A, int B>
  void multiply_bfloat16() {
    for (int64_t row = 0; row < shapes_.rows[SUM]; ++row) {
      Vector even{}, odd{};
      for (int64_t i = 0; i < shapes_.row_bytes[A] / 4; ++i) {
        const Words pair = word(A, row, i) - Words{}, pairs = (Words)line(B, i);
        even = multiply_and_add(pair << 16, pairs << 16, even);
        odd = multiply_and_add(pair & 0xffff0000, pairs & 0xffff0000, odd);
      }
      const Vector before = without_subnormals((Vector)line(SUM, row));
      put(SUM, row, (Integers)without_subnormals(before + without_subnormals(even + odd)));
    }
  }

  // SUM += A @ B of signed bytes, four of which lie together, in int32. Exact.
  template <int SUM, int A, int B>
  void multiply_int8() {
    for (int64_t row = 0; row < shapes_.rows[SUM]; ++row) {
      Integers sum = line(SUM, row);
      for (int64_t i = 0; i < shapes_.row_bytes[A] / 4; ++i) {
        const Integers four = (Integers)(word(A, row, i) - Words{}), fours = line(B, i);
        sum += (four << 24 >> 24) * (fours << 24 >> 24);
        sum += (four << 16 >> 24) * (fours << 16 >> 24);
        sum += (four << 8 >> 24) * (fours << 8 >> 24);
        sum += (four >> 24) * (fours >> 24);
      }
      put(SUM, row, sum);
    }
  }

 private:
  static_assert(4 * WIDTH == TILE_LINE);

  static Vector multiply_and_add(Words a, Words b, Vector sum) {
    return without_subnormals(fma(without_subnormals((Vector)a), without_subnormals((Vector)b), sum));
  }

  uint32_t word(int tile, int64_t row, int64_t i) const {
    uint32_t value;
    __builtin_memcpy(&value, rows_[tile][row] + 4 * i, 4);
    return value;
  }

  Integers line(int tile, int64_t row) const {
    Integers v;
    __builtin_memcpy(&v, rows_[tile][row], sizeof v);
    return v;
  }

  void put(int tile, int64_t row, Integers v) { __builtin_memcpy(rows_[tile][row], &v, shapes_.row_bytes[tile]); }

  TileShapes shapes_;
  alignas(64) char rows_[8][TILE_ROWS][TILE_LINE];
};

#else

// Whether the CPU has the tiles and the system lets this process use them, which it has to ask for.
OCTAVO_INLINE bool ask_for_tiles() {
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM
  constexpr unsigned ALL = 1 << 22 | 1 << 24 | 1 << 25;  // bfloat16, tiles, int8
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & ALL) == ALL &&
         syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

// Written as instructions: GCC's intrinsics take a register's number as text alone, and do not say that memory is read.
class TileRegisters {
 public:
  OCTAVO_AMX OCTAVO_INLINE_MEMBER void configure(const TileShapes& shapes) {
    __asm__ volatile("ldtilecfg %0" ::"m"(shapes));
  }

  OCTAVO_AMX OCTAVO_INLINE_MEMBER void release() { __asm__ volatile("tilerelease"); }

  template <int TILE>
  OCTAVO_AMX OCTAVO_INLINE_MEMBER void zero() {
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(TILE));
  }

  template <int TILE>
  OCTAVO_AMX OCTAVO_INLINE_MEMBER void load(const void* from, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
  }

  template <int TILE>
  OCTAVO_AMX OCTAVO_INLINE_MEMBER void store(void* to, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
  }

  template <int SUM, int A, int B>
  OCTAVO_AMX OCTAVO_INLINE_MEMBER void multiply_bfloat16() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
  }

  template <int SUM, int A, int B>
  OCTAVO_AMX OCTAVO_INLINE_MEMBER void multiply_int8() {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
  }
};

#endif

}  // namespace octavo
#endif

// Sums of the products of N rows of activations and SIDES vectors of outputs, in units of 4 bytes of both.
//
// Arm's products of matrices (SMMLA, BFMMLA) take two rows and two outputs by two units. They add to each sum what its
// products of one unit (SDOT, BFDOT) would, in the same order and rounded alike (Arm Architecture Reference Manual,
// BFMatMulAdd), so a row has the same bits whether there is a second one or not.
#pragma once

#include "vector.h"

namespace octavo::gemm {

OCTAVO_INLINE Integers load_integers(const void* from) {
  Integers v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

#if defined(OCTAVO_NEON) && defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_BF16)

OCTAVO_INLINE Integers multiply_matrices(Integers acc, uint32x4_t rows, uint32x4_t outputs) {
  return (Integers)vmmlaq_s32((int32x4_t)acc, vreinterpretq_s8_u32(rows), vreinterpretq_s8_u32(outputs));
}

OCTAVO_INLINE Vector multiply_matrices(Vector acc, uint32x4_t rows, uint32x4_t outputs) {
  return (Vector)vbfmmlaq_f32((float32x4_t)acc, vreinterpretq_bf16_u32(rows), vreinterpretq_bf16_u32(outputs));
}

template <class Sum, int N, int SIDES>
class Sums {
 public:
  static constexpr bool TWO = true;  // units at a time

  // Sets the sums of each row to start(row), for all outputs.
  template <class Start>
  OCTAVO_INLINE_MEMBER void begin(const Start& start) {
    for (int pair = 0; pair < N / 2; ++pair)
      for (int side = 0; side < SIDES; ++side)
        pairs_[pair][side][0] = pairs_[pair][side][1] = lower(start(2 * pair), start(2 * pair + 1));
    for (int side = 0; N % 2 && side < SIDES; ++side) last_[side] = start(N - 1);
  }

  // Adds two units: x [2][N]. dot(sum, weights, x) adds one.
  template <class Word, class Dot>
  OCTAVO_INLINE_MEMBER void add(const Integers (&first)[SIDES], const Integers (&second)[SIDES], const Word* x,
                                const Dot& dot) {
    add_pairs(first, second, [=](int row) { return vcombine_u32(two(x + row), two(x + N + row)); });
    for (int side = 0; N % 2 && side < SIDES; ++side)
      last_[side] = dot(dot(last_[side], first[side], x[N - 1]), second[side], x[2 * N - 1]);
  }

  template <class Word, class Dot>
  OCTAVO_INLINE_MEMBER void add(const Integers (&only)[SIDES], const Word* x, const Dot& dot) {
    add_pairs(only, {}, [=](int row) { return vcombine_u32(two(x + row), vdup_n_u32(0)); });
    for (int side = 0; N % 2 && side < SIDES; ++side) last_[side] = dot(last_[side], only[side], x[N - 1]);
  }

  OCTAVO_INLINE_MEMBER Sum of(int row, int side) const {
    if (row == N - 1 && N % 2) return last_[side];
    const Sum(&pair)[2] = pairs_[row / 2][side];
    return row % 2 ? upper(pair[0], pair[1]) : lower(pair[0], pair[1]);
  }

 private:
  static OCTAVO_INLINE_MEMBER uint32x2_t two(const void* words) {
    uint64_t both;
    __builtin_memcpy(&both, words, sizeof both);
    return vcreate_u32(both);
  }

  static OCTAVO_INLINE_MEMBER Sum lower(Sum a, Sum b) { return (Sum)vzip1q_u64((uint64x2_t)a, (uint64x2_t)b); }
  static OCTAVO_INLINE_MEMBER Sum upper(Sum a, Sum b) { return (Sum)vzip2q_u64((uint64x2_t)a, (uint64x2_t)b); }

  // units(row): the first units of this row and of the next one, then the second units of both.
  template <class Units>
  OCTAVO_INLINE_MEMBER void add_pairs(const Integers (&first)[SIDES], const Integers (&second)[SIDES],
                                      const Units& units) {
    if constexpr (N > 1) {
      uint32x4_t outputs[SIDES][2];
      for (int side = 0; side < SIDES; ++side) {
        outputs[side][0] = vzip1q_u32((uint32x4_t)first[side], (uint32x4_t)second[side]);
        outputs[side][1] = vzip2q_u32((uint32x4_t)first[side], (uint32x4_t)second[side]);
      }
#pragma GCC unroll 16
      for (int pair = 0; pair < N / 2; ++pair) {
        const uint32x4_t apart = units(2 * pair), rows = vzip1q_u32(apart, vextq_u32(apart, apart, 2));
        for (int side = 0; side < SIDES; ++side)
          for (int half = 0; half < 2; ++half)
            pairs_[pair][side][half] = multiply_matrices(pairs_[pair][side][half], rows, outputs[side][half]);
      }
    }
  }

  Sum pairs_[N > 1 ? N / 2 : 1][SIDES][2];  // of outputs 0 and 1 of a row and of the next one; of outputs 2 and 3
  Sum last_[SIDES];                         // of the last row, if N is odd
};

#else

template <class Sum, int N, int SIDES>
class Sums {
 public:
  static constexpr bool TWO = false;

  // Sets the sums of each row to start(row), for all outputs.
  template <class Start>
  OCTAVO_INLINE_MEMBER void begin(const Start& start) {
#pragma GCC unroll 16
    for (int row = 0; row < N; ++row)
      for (int side = 0; side < SIDES; ++side) sums_[row][side] = start(row);
  }

  // Adds two units: x [2][N]. dot(sum, weights, x) adds one.
  template <class Word, class Dot>
  OCTAVO_INLINE_MEMBER void add(const Integers (&first)[SIDES], const Integers (&second)[SIDES], const Word* x,
                                const Dot& dot) {
    add(first, x, dot);
    add(second, x + N, dot);
  }

  template <class Word, class Dot>
  OCTAVO_INLINE_MEMBER void add(const Integers (&only)[SIDES], const Word* x, const Dot& dot) {
#pragma GCC unroll 16
    for (int row = 0; row < N; ++row)
      for (int side = 0; side < SIDES; ++side) sums_[row][side] = dot(sums_[row][side], only[side], x[row]);
  }

  OCTAVO_INLINE_MEMBER Sum of(int row, int side) const { return sums_[row][side]; }

 private:
  Sum sums_[N][SIDES];
};

#endif

// A unit of both sides of a panel.
struct Sides {
  Integers of[2];
};

// Adds `units` units of x, [units][N]; weights(i) gives the Sides of one.
template <class Sum, int N, class Word, class Weights, class Dot>
OCTAVO_INLINE void add_units(Sums<Sum, N, 2>& sums, int64_t units, const Word* x, const Weights& weights,
                             const Dot& dot) {
  int64_t i = 0;
  // x stays where it is: while it moved, GCC did not unroll the loop for full tiles of int8.
  if constexpr (Sums<Sum, N, 2>::TWO)
    for (; i + 2 <= units; i += 2) {
      const Sides first = weights(i), second = weights(i + 1);
      sums.add(first.of, second.of, x + i * N, dot);
    }
#pragma GCC unroll 2
  for (; i < units; ++i) {
    const Sides only = weights(i);
    sums.add(only.of, x + i * N, dot);
  }
}

}  // namespace octavo::gemm

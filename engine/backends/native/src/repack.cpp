// Matrices of 4 bits, as checkpoints hold them, in the order of our own 4 bits.
#include "threads.h"
#include "transpose.h"

using namespace octavo;

namespace {

constexpr int64_t EIGHT = 8;  // integers in a word
// From the lowest bits on, which of eight inputs a word of ours has, and which of eight outputs one of AWQ's.
constexpr int64_t INPUTS[EIGHT] = {0, 4, 1, 5, 2, 6, 3, 7}, AWQ_OUTPUTS[EIGHT] = {0, 2, 4, 6, 1, 3, 5, 7};

// Eight neighbours, the first in the lowest bits, in our order.
template <class T>
OCTAVO_INLINE T placed(T word) {
  T change = (word ^ word >> 8) & 0x0000ff00;  // the two bytes in the middle change places
  word ^= change ^ change << 8;
  change = (word ^ word >> 4) & 0x00f000f0;  // and so do the two halves in the middle of each two bytes
  return word ^ change ^ change << 4;
}

// A square of integers, turned: the j-th of words[i] and the i-th of words[j] change places.
OCTAVO_INLINE void turn(Words (&words)[EIGHT]) {
  constexpr uint32_t LOWER[] = {0, 0x0f0f0f0f, 0x00ff00ff, 0, 0x0000ffff};
  for (int64_t step = EIGHT / 2; step > 0; step /= 2) {
    const uint32_t lower = LOWER[step];
    const int bits = static_cast<int>(4 * step);
    for (int64_t i = 0; i < EIGHT; ++i) {
      if (i & step) continue;
      const Words first = words[i], second = words[i + step];
      words[i] = (first & lower) | (second & lower) << bits;
      words[i + step] = (first >> bits & lower) | (second & ~lower);
    }
  }
}

OCTAVO_INLINE Words words_at(const uint32_t* from, int64_t count) {
  const float* bits = reinterpret_cast<const float*>(from);
  return (Words)(count == WIDTH ? load(bits) : load_part(bits, count));
}

OCTAVO_INLINE void put(uint32_t* to, Vector words, int64_t count) {
  float* bits = reinterpret_cast<float*>(to);
  if (count == WIDTH)
    store(bits, words);
  else
    store_part(bits, words, count);
}

// Words [eights * OUTPUTS, outputs / OUTPUTS], each of OUTPUTS outputs: of one input if these are EIGHT, of eight inputs
// if that is 1. As many squares of words as there are outputs in one fit the nearest cache, where they are turned.
template <int64_t OUTPUTS>
OCTAVO_INLINE void repack_columns(const uint32_t* words, uint32_t* values, int64_t outputs, int64_t eights) {
  const int64_t columns = outputs / OUTPUTS;
  parallel(outputs * eights >= WORTH_SHARING, [&](int thread, int threads) {
    const Share own = share(columns, thread, threads, WIDTH);
    Vector squares[OUTPUTS][WIDTH] = {};
    for (int64_t row = 0; row < eights; row += WIDTH) {
      const int64_t tall = smaller(WIDTH, eights - row);
      for (int64_t column = own.first; column < own.last; column += WIDTH) {
        const int64_t wide = smaller(WIDTH, own.last - column);
        for (int64_t i = 0; i < tall; ++i) {
          Words read[OUTPUTS];
          for (int64_t k = 0; k < OUTPUTS; ++k)
            read[k] = words_at(words + ((row + i) * OUTPUTS + INPUTS[k]) * columns + column, wide);
          if constexpr (OUTPUTS == EIGHT)
            turn(read);
          else
            read[0] = placed(read[0]);
          for (int64_t k = 0; k < OUTPUTS; ++k) squares[k][i] = (Vector)read[k];
        }
        for (int64_t k = 0; k < OUTPUTS; ++k) {
          transpose(squares[k]);
          for (int64_t j = 0; j < wide; ++j)
            put(values + ((column + j) * OUTPUTS + AWQ_OUTPUTS[k]) * eights + row, squares[k][j], tall);
        }
      }
    }
  });
}

}  // namespace

// values [outputs, eights], as gemm_quantise_int4 makes them; a word has eight inputs of one output.

// words [8 eights, outputs / 8]; the outputs are a multiple of 8.
OCTAVO_EXPORT(repack_awq)(const uint32_t* words, uint32_t* values, int64_t outputs, int64_t eights) {
  repack_columns<EIGHT>(words, values, outputs, eights);
}

// words [eights, outputs].
OCTAVO_EXPORT(repack_gptq)(const uint32_t* words, uint32_t* values, int64_t outputs, int64_t eights) {
  repack_columns<1>(words, values, outputs, eights);
}

// words [outputs, eights].
OCTAVO_EXPORT(repack_rows)(const uint32_t* words, uint32_t* values, int64_t outputs, int64_t eights) {
  parallel(outputs * eights >= WORTH_SHARING, [&](int thread, int threads) {
    const Share own = share(outputs * eights, thread, threads, WIDTH);
    for (int64_t i = own.first; i < own.last; i += WIDTH) {
      const int64_t count = smaller(WIDTH, own.last - i);
      put(values + i, (Vector)placed(words_at(words + i, count)), count);
    }
  });
}

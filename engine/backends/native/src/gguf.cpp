// Blocks of GGUF's Q4_K and Q4_1 as groups of our own 4 bits, those of Q8_0 as our own 8 bits, and the numbers of Q6_K.
#include "half.h"
#include "threads.h"

using namespace octavo;

namespace {

constexpr int64_t BLOCK_BYTES = 144, GROUPS = 8, WORDS = 4;  // of our own, a group has as many words
constexpr int64_t Q6_BYTES = 210, Q6_NUMBERS = 256;
constexpr int64_t Q4_1_BYTES = 20, Q8_BYTES = 34, GROUP = 32;
constexpr uint32_t LOWER = 0x0f0f0f0f;  // of each byte

OCTAVO_INLINE uint32_t word_at(const uint8_t* from) {
  uint32_t word;
  __builtin_memcpy(&word, from, sizeof word);
  return word;
}

// A group's scale and minimum of 6 bits each: the later four have their upper bits beside those of the first four.
OCTAVO_INLINE void sixths(const uint8_t* packed, int64_t group, int& scale, int& minimum) {
  if (group < 4) {
    scale = packed[group] & 63;
    minimum = packed[group + 4] & 63;
  } else {
    scale = (packed[group + 4] & 15) | packed[group - 4] >> 6 << 4;
    minimum = packed[group + 4] >> 4 | packed[group] >> 6 << 4;
  }
}

}  // namespace

// values [count, GROUPS, WORDS], as gemm_quantise_int4 makes them; lines [count, GROUPS, 2]: scales and minima as halves.
OCTAVO_EXPORT(gguf_q4_k)(const uint8_t* blocks, uint32_t* values, uint16_t* lines, int64_t count) {
  parallel(count * GROUPS * WORDS >= WORTH_SHARING, [&](int thread, int threads) {
    const Share own = share(count, thread, threads);
    for (int64_t i = own.first; i < own.last; ++i) {
      const uint8_t* block = blocks + i * BLOCK_BYTES;
      float16 halves[2];
      __builtin_memcpy(halves, block, sizeof halves);
      const float scale = widened(halves[0]), minimum = widened(halves[1]);
      for (int64_t group = 0; group < GROUPS; ++group) {
        int steps, least;
        sixths(block + 4, group, steps, least);
        uint16_t* line = lines + (i * GROUPS + group) * 2;
        line[0] = half_bits(scale * static_cast<float>(steps));
        line[1] = half_bits(-(minimum * static_cast<float>(least)));
      }
      // Lower halves of 32 bytes are one group, upper halves the next.
      for (int64_t pair = 0; pair < GROUPS / 2; ++pair) {
        const uint8_t* from = block + 16 + pair * 32;
        uint32_t* to = values + (i * GROUPS + 2 * pair) * WORDS;
        for (int64_t j = 0; j < WORDS; ++j) {
          const uint32_t first = word_at(from + 8 * j), second = word_at(from + 8 * j + 4);
          to[j] = (first & LOWER) | (second & LOWER) << 4;
          to[WORDS + j] = (first >> 4 & LOWER) | (second & ~LOWER);
        }
      }
    }
  });
}

// values [count, WORDS], lines [count, 2]: the same of groups that have halves already. Lower halves of 16 bytes come first.
OCTAVO_EXPORT(gguf_q4_1)(const uint8_t* blocks, uint32_t* values, uint16_t* lines, int64_t count) {
  parallel(count * GROUP >= WORTH_SHARING, [&](int thread, int threads) {
    const Share own = share(count, thread, threads);
    for (int64_t i = own.first; i < own.last; ++i) {
      const uint8_t* block = blocks + i * Q4_1_BYTES;
      __builtin_memcpy(lines + 2 * i, block, 4);
      uint32_t* to = values + i * WORDS;
      for (int64_t j = 0; j < WORDS / 2; ++j) {
        const uint32_t first = word_at(block + 4 + 8 * j), second = word_at(block + 8 + 8 * j);
        to[j] = (first & LOWER) | (second & LOWER) << 4;
        to[WORDS / 2 + j] = (first >> 4 & LOWER) | (second & ~LOWER);
      }
    }
  });
}

// values [count, GROUP], scales [count], halves.
OCTAVO_EXPORT(gguf_q8_0)(const uint8_t* blocks, int8_t* values, uint16_t* scales, int64_t count) {
  parallel(count * GROUP >= WORTH_SHARING, [&](int thread, int threads) {
    const Share own = share(count, thread, threads);
    for (int64_t i = own.first; i < own.last; ++i) {
      __builtin_memcpy(scales + i, blocks + i * Q8_BYTES, 2);
      __builtin_memcpy(values + i * GROUP, blocks + i * Q8_BYTES + 2, GROUP);
    }
  });
}

// found: how many of the halves at `place` in `count` blocks of `size` bytes are infinite or not numbers.
OCTAVO_EXPORT(gguf_infinite_halves)(const uint8_t* blocks, int64_t count, int64_t size, int64_t place, int64_t* found) {
  int64_t infinite = 0;
  parallel(count * GROUP >= WORTH_SHARING, [&](int thread, int threads) {
    const Share own = share(count, thread, threads);
    int64_t mine = 0;
    for (int64_t i = own.first; i < own.last; ++i) {
      uint16_t half;
      __builtin_memcpy(&half, blocks + i * size + place, sizeof half);
      mine += (half & 0x7c00) == 0x7c00;
    }
    __atomic_fetch_add(&infinite, mine, __ATOMIC_RELAXED);
  });
  *found = infinite;
}

// numbers [count, Q6_NUMBERS], 16 groups of 16, with a scale of 8 bits each, which a half scales.
OCTAVO_EXPORT(gguf_q6_k)(const uint8_t* blocks, float* numbers, int64_t count) {
  parallel(count * Q6_NUMBERS >= WORTH_SHARING, [&](int thread, int threads) {
    const Share own = share(count, thread, threads);
    for (int64_t i = own.first; i < own.last; ++i) {
      const uint8_t* block = blocks + i * Q6_BYTES;
      float16 half;
      __builtin_memcpy(&half, block + 208, sizeof half);
      const float scale = widened(half);
      // Of 128 numbers, 64 bytes have the lower four bits of the first 64 and of the last, 32 bytes the upper two of 32.
      for (int64_t part = 0; part < 8; ++part) {
        const uint8_t* low = block + (part / 4) * 64 + (part % 2) * 32;
        const uint8_t* high = block + 128 + (part / 4) * 32;
        const uint8_t* steps = block + 192 + part * 2;
        const int down = part % 4 / 2 * 4, up = static_cast<int>(part % 4) * 2;
        float* to = numbers + i * Q6_NUMBERS + part * 32;
        for (int64_t group = 0; group < 2; ++group) {
          const float step = scale * static_cast<float>(static_cast<int8_t>(steps[group]));
          for (int64_t j = group * 16; j < group * 16 + 16; ++j) {
            const int level = (low[j] >> down & 15) | (high[j] >> up & 3) << 4;
            to[j] = static_cast<float>(level - 32) * step;
          }
        }
      }
    }
  });
}

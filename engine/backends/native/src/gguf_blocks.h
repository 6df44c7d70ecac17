// The blocks of GGUF's formats of few bits: what a block's bytes mean is told by ggml's reference (ggml-quants.c). And those
// of our own 4 bits whose scales and minima are of 128 inputs, as AWQ and GPTQ have them.
#pragma once

#include "common.h"

namespace octavo {

// What scales, and minima, a block's groups have.
enum Scales {
  OF_BLOCKS,        // halves of the whole block
  BYTES_OF_GROUPS,  // a byte for each, times a half of the block
  SIGNED_BYTES,     // the same, of either sign
  NIBBLES,          // the same, scale and minimum in one byte
  EXPONENTS,        // a byte for each: 2^(byte - 128)
};

// A block, its integers in their order. Halves are those of scales and of minima.
struct UnpackedBlock {
  uint8_t q[256], scales[16], minima[8];
  uint16_t halves[2];
};

// Lower halves of `width` bytes, then upper halves.
OCTAVO_INLINE void take_halves(const uint8_t* from, int64_t width, uint8_t* q) {
  for (int64_t i = 0; i < width; i += 4) {
    uint32_t four;
    __builtin_memcpy(&four, from + i, 4);
    const uint32_t lower = four & 0x0f0f0f0f, upper = four >> 4 & 0x0f0f0f0f;
    __builtin_memcpy(q + i, &lower, 4);
    __builtin_memcpy(q + width + i, &upper, 4);
  }
}

// Sets bit 4 of 32 integers by the bits of 4 bytes, the lowest first.
OCTAVO_INLINE void take_fifths(const uint8_t* from, uint8_t* q) {
  for (int64_t i = 0; i < 4; ++i) {
    uint64_t eight;
    __builtin_memcpy(&eight, q + 8 * i, 8);
    const uint64_t bits = uint64_t{from[i]} * 0x0101010101010101 & 0x8040201008040201;  // each of a byte of its own
    eight |= (bits + 0x7f7f7f7f7f7f7f7f) >> 3 & 0x1010101010101010;
    __builtin_memcpy(q + 8 * i, &eight, 8);
  }
}

// 256 integers of 2 bits: of each 32 bytes, the lowest bits come first.
OCTAVO_INLINE void take_twos(const uint8_t* from, uint8_t* q) {
  for (int64_t i = 0; i < 8; ++i)
    for (int64_t j = 0; j < 32; ++j) q[32 * i + j] = from[i / 4 * 32 + j] >> 2 * (i % 4) & 3;
}

// The scale and the minimum of a group, of 6 bits each: the later four have their upper bits beside those of the first four.
OCTAVO_INLINE void take_sixths(const uint8_t* from, uint8_t* scales, uint8_t* minima) {
  for (int64_t i = 0; i < 4; ++i) {
    scales[i] = from[i] & 63;
    minima[i] = from[i + 4] & 63;
    scales[i + 4] = static_cast<uint8_t>((from[i + 8] & 15) | from[i] >> 6 << 4);
    minima[i + 4] = static_cast<uint8_t>(from[i + 8] >> 4 | from[i + 4] >> 6 << 4);
  }
}

struct Q4_0 {
  static constexpr int64_t NUMBERS = 32, SIZE = 18, GROUP = 32;
  static constexpr int BITS = 4, ZERO = 8;
  static constexpr bool MINIMA = false;
  static constexpr Scales SCALES = OF_BLOCKS;
  static void unpack(const uint8_t* from, UnpackedBlock& to) {
    __builtin_memcpy(to.halves, from, 2);
    take_halves(from + 2, 16, to.q);
  }
};

struct Q5_0 {
  static constexpr int64_t NUMBERS = 32, SIZE = 22, GROUP = 32;
  static constexpr int BITS = 5, ZERO = 16;
  static constexpr bool MINIMA = false;
  static constexpr Scales SCALES = OF_BLOCKS;
  static void unpack(const uint8_t* from, UnpackedBlock& to) {
    __builtin_memcpy(to.halves, from, 2);
    take_halves(from + 6, 16, to.q);
    take_fifths(from + 2, to.q);
  }
};

struct Q5_1 {
  static constexpr int64_t NUMBERS = 32, SIZE = 24, GROUP = 32;
  static constexpr int BITS = 5, ZERO = 0;
  static constexpr bool MINIMA = true, SUBTRACTED = false;
  static constexpr Scales SCALES = OF_BLOCKS;
  static void unpack(const uint8_t* from, UnpackedBlock& to) {
    __builtin_memcpy(to.halves, from, 4);
    take_halves(from + 8, 16, to.q);
    take_fifths(from + 4, to.q);
  }
};

// The integers as gemm_quantise_int4 makes them: of eight, four bytes with the first four in the lower halves.
struct INT4_128 {
  static constexpr int64_t NUMBERS = 128, SIZE = 68, GROUP = 128;
  static constexpr int BITS = 4, ZERO = 0;
  static constexpr bool MINIMA = true, SUBTRACTED = false;
  static constexpr Scales SCALES = OF_BLOCKS;
  static void unpack(const uint8_t* from, UnpackedBlock& to) {
    for (int64_t i = 0; i < 16; ++i) take_halves(from + 4 * i, 4, to.q + 8 * i);
    __builtin_memcpy(to.halves, from + 64, 4);
  }
};

struct Q2_K {
  static constexpr int64_t NUMBERS = 256, SIZE = 84, GROUP = 16;
  static constexpr int BITS = 2, ZERO = 0;
  static constexpr bool MINIMA = true, SUBTRACTED = true;
  static constexpr Scales SCALES = NIBBLES;
  static void unpack(const uint8_t* from, UnpackedBlock& to) {
    __builtin_memcpy(to.scales, from, 16);
    take_twos(from + 16, to.q);
    __builtin_memcpy(to.halves, from + 80, 4);
  }
};

struct Q3_K {
  static constexpr int64_t NUMBERS = 256, SIZE = 110, GROUP = 16;
  static constexpr int BITS = 3, ZERO = 4;
  static constexpr bool MINIMA = false;
  static constexpr Scales SCALES = SIGNED_BYTES;
  static void unpack(const uint8_t* from, UnpackedBlock& to) {
    take_twos(from + 32, to.q);
    for (int64_t i = 0; i < 8; ++i)
      for (int64_t j = 0; j < 32; ++j) to.q[32 * i + j] |= static_cast<uint8_t>((from[j] >> i & 1) << 2);
    const uint8_t* sixths = from + 96;
    for (int64_t i = 0; i < 16; ++i) {
      const int low = i < 8 ? sixths[i] & 15 : sixths[i - 8] >> 4, high = sixths[8 + i % 4] >> 2 * (i / 4) & 3;
      to.scales[i] = static_cast<uint8_t>((low | high << 4) - 32);
    }
    __builtin_memcpy(to.halves, from + 108, 2);
  }
};

struct Q4_K {
  static constexpr int64_t NUMBERS = 256, SIZE = 144, GROUP = 32;
  static constexpr int BITS = 4, ZERO = 0;
  static constexpr bool MINIMA = true, SUBTRACTED = true;
  static constexpr Scales SCALES = BYTES_OF_GROUPS;
  static void unpack(const uint8_t* from, UnpackedBlock& to) {
    __builtin_memcpy(to.halves, from, 4);
    take_sixths(from + 4, to.scales, to.minima);
    for (int64_t i = 0; i < 4; ++i) take_halves(from + 16 + 32 * i, 32, to.q + 64 * i);
  }
};

struct Q5_K {
  static constexpr int64_t NUMBERS = 256, SIZE = 176, GROUP = 32;
  static constexpr int BITS = 5, ZERO = 0;
  static constexpr bool MINIMA = true, SUBTRACTED = true;
  static constexpr Scales SCALES = BYTES_OF_GROUPS;
  static void unpack(const uint8_t* from, UnpackedBlock& to) {
    __builtin_memcpy(to.halves, from, 4);
    take_sixths(from + 4, to.scales, to.minima);
    for (int64_t i = 0; i < 4; ++i) take_halves(from + 48 + 32 * i, 32, to.q + 64 * i);
    for (int64_t i = 0; i < 8; ++i)
      for (int64_t j = 0; j < 32; ++j) to.q[32 * i + j] |= static_cast<uint8_t>((from[16 + j] >> i & 1) << 4);
  }
};

struct Q6_K {
  static constexpr int64_t NUMBERS = 256, SIZE = 210, GROUP = 16;
  static constexpr int BITS = 6, ZERO = 32;
  static constexpr bool MINIMA = false;
  static constexpr Scales SCALES = SIGNED_BYTES;
  // Of 128 numbers, 64 bytes have the lower four bits of the first 64 and of the last, 32 bytes the upper two of 32.
  static void unpack(const uint8_t* from, UnpackedBlock& to) {
    for (int64_t i = 0; i < 2; ++i) take_halves(from + 64 * i, 64, to.q + 128 * i);
    for (int64_t i = 0; i < 8; ++i)
      for (int64_t j = 0; j < 32; ++j)
        to.q[32 * i + j] |= static_cast<uint8_t>((from[128 + i / 4 * 32 + j] >> 2 * (i % 4) & 3) << 4);
    __builtin_memcpy(to.scales, from + 192, 16);
    __builtin_memcpy(to.halves, from + 208, 2);
  }
};

struct IQ4_NL {
  static constexpr int64_t NUMBERS = 32, SIZE = 18, GROUP = 32;
  static constexpr int BITS = 4;
  static constexpr bool MINIMA = false;
  static constexpr Scales SCALES = OF_BLOCKS;
  static constexpr int8_t TABLE[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  static void unpack(const uint8_t* from, UnpackedBlock& to) { Q4_0::unpack(from, to); }
};

struct IQ4_XS {
  static constexpr int64_t NUMBERS = 256, SIZE = 136, GROUP = 32;
  static constexpr int BITS = 4;
  static constexpr bool MINIMA = false;
  static constexpr Scales SCALES = SIGNED_BYTES;
  static constexpr const int8_t (&TABLE)[16] = IQ4_NL::TABLE;
  static void unpack(const uint8_t* from, UnpackedBlock& to) {
    __builtin_memcpy(to.halves, from, 2);
    for (int64_t i = 0; i < 8; ++i) {
      const int low = from[4 + i / 2] >> 4 * (i % 2) & 15, high = from[2 + i / 4] >> 2 * (i % 4) & 3;
      to.scales[i] = static_cast<uint8_t>((low | high << 4) - 32);
      take_halves(from + 8 + 16 * i, 16, to.q + 32 * i);
    }
  }
};

struct MXFP4 {
  static constexpr int64_t NUMBERS = 32, SIZE = 17, GROUP = 32;
  static constexpr int BITS = 4;
  static constexpr bool MINIMA = false;
  static constexpr Scales SCALES = EXPONENTS;
  static constexpr int8_t TABLE[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // doubled
  static void unpack(const uint8_t* from, UnpackedBlock& to) {
    to.scales[0] = from[0];
    take_halves(from + 1, 16, to.q);
  }
};

}  // namespace octavo

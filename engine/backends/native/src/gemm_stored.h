// Products of weights in the formats of GGUF files, in the bits that they have there, and activations that become int8 with
// a scale for each group of a row.
//
// A weight is scale * (q - ZERO), or scale * q less a minimum or plus one. A format's blocks (gguf_blocks.h) say what
// scales and minima are: halves, or bytes times the halves of their block. Sums within a group are integers and exact;
// groups are added in float32, in order.
//
// A panel is two sides of WIDTH outputs. Of a block of inputs come the integers of the one side and of the other, chunk
// after chunk, and then what scales each. Of a chunk's units of 4 inputs there are, for each output of a side:
//   lower 4 bits   4 words, each of two units: one in the lower halves of its bytes, the next in the upper halves
//   2 bits         2 words, each of four units, the first one in the lowest bits of its bytes
//   1 bit          1 word of eight units
// as many of these as the format has bits, most of them first. What scales a block are the bytes of its groups, [WIDTH]
// for each, those of minima after all of scales, and then its halves, [WIDTH] of scales and of minima.
#pragma once

#include "gemm_groups.h"
#include "gemm_look_up.h"
#include "gemm_panels.h"
#include "gguf_blocks.h"
#include "half.h"

#include <type_traits>

namespace octavo::gemm {

constexpr int64_t CHUNK_INPUTS = 32;

template <int BITS, class Word>
OCTAVO_INLINE Word moved(Word word) {
  if constexpr (BITS >= 0)
    return word << BITS;
  else
    return word >> -BITS;
}

// Each byte is that element of the table.
OCTAVO_INLINE Integers look_up(const int8_t* table, Integers places) {
#if defined(__AVX512F__)
  const __m512i entries = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return (Integers)_mm512_shuffle_epi8(entries, (__m512i)places);
#elif defined(__AVX2__)
  const __m256i entries = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return (Integers)_mm256_shuffle_epi8(entries, (__m256i)places);
#elif defined(OCTAVO_NEON)
  return (Integers)vqtbl1q_s8(vld1q_s8(table), (uint8x16_t)places);
#else
  int8_t bytes[sizeof(Integers)];
  __builtin_memcpy(bytes, &places, sizeof places);
  for (int8_t& byte : bytes) byte = table[byte];
  return load_integers(bytes);
#endif
}

// What a table's entries are stored with added, as weights of int8 are.
template <class Blocks>
struct Table {
  alignas(16) int8_t entries[16];
  constexpr Table() : entries{} {
    for (int i = 0; i < 16; ++i) entries[i] = static_cast<int8_t>(Blocks::TABLE[i] + OFFSET);
  }
};

template <class Blocks>
concept Listed = requires { Blocks::TABLE; };

// Where things are in a panel, and what they are.
template <class Blocks>
struct Layout {
  static constexpr int BITS = Blocks::BITS;
  static constexpr int64_t GROUPS = Blocks::NUMBERS / Blocks::GROUP;  // of a block, that have scales of their own
  static constexpr int64_t CHUNKS = Blocks::NUMBERS / CHUNK_INPUTS;
  static constexpr bool BYTES = Blocks::SCALES != OF_BLOCKS;
  static constexpr int64_t MINIMA_AT = GROUPS * WIDTH;
  static constexpr int64_t HALVES_AT = BYTES ? MINIMA_AT * (Blocks::MINIMA && Blocks::SCALES != NIBBLES ? 2 : 1) : 0;
  static constexpr int64_t HALVES = Blocks::SCALES == EXPONENTS ? 0 : Blocks::MINIMA ? 2 : 1;
  // Of a block of a side.
  static constexpr int64_t INTEGERS = CHUNKS * BITS * 4 * WIDTH;
  static constexpr int64_t SCALING = HALVES_AT + HALVES * 2 * WIDTH;
  static constexpr int64_t TWOS_AT = BITS >= 4 ? 4 : 0;                // vectors of a chunk
  static constexpr int64_t ONES_AT = TWOS_AT + (BITS & 2 ? 2 : 0);

  static constexpr int64_t BLOCK = 2 * (INTEGERS + SCALING);  // of both sides

  static int64_t panel_bytes(int64_t inputs) { return rounded_up(inputs / Blocks::NUMBERS * BLOCK, 64); }
  static constexpr int64_t integers_at(int64_t side) { return side * INTEGERS; }
  static constexpr int64_t scaling_at(int64_t side) { return 2 * INTEGERS + side * SCALING; }

  // Units 2 * PAIR and 2 * PAIR + 1 of a chunk; read(i) gives word i of an output, or of all of a side.
  template <int PAIR, class Word, class Read>
  static OCTAVO_INLINE_MEMBER void units(const Read& read, Word& first, Word& second) {
    constexpr int UNIT_OF_FOUR = 2 * (PAIR % 2);
    if constexpr (BITS >= 4) {
      const Word both = read(PAIR);
      first = both & 0x0f0f0f0f;
      second = both >> 4 & 0x0f0f0f0f;
      if constexpr (BITS == 6) {
        const Word twos = read(TWOS_AT + PAIR / 2);
        first |= moved<4 - 2 * UNIT_OF_FOUR>(twos) & 0x30303030;
        second |= moved<2 - 2 * UNIT_OF_FOUR>(twos) & 0x30303030;
      } else if constexpr (BITS == 5) {
        const Word ones = read(ONES_AT);
        first |= moved<4 - 2 * PAIR>(ones) & 0x10101010;
        second |= moved<3 - 2 * PAIR>(ones) & 0x10101010;
      }
    } else {
      const Word twos = read(TWOS_AT + PAIR / 2);
      first = moved<-2 * UNIT_OF_FOUR>(twos) & 0x03030303;
      second = moved<-2 * UNIT_OF_FOUR - 2>(twos) & 0x03030303;
      if constexpr (BITS == 3) {
        const Word ones = read(ONES_AT);
        first |= moved<2 - 2 * PAIR>(ones) & 0x04040404;
        second |= moved<1 - 2 * PAIR>(ones) & 0x04040404;
      }
    }
  }

  // The scales and minima of a group of a side's block.
  static OCTAVO_INLINE_MEMBER void scaling(const char* block, int64_t group, Vector& scale, Vector& least) {
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(block) + group * WIDTH;
    const float16* halves = reinterpret_cast<const float16*>(block + HALVES_AT);
    if constexpr (Blocks::SCALES == EXPONENTS) {
      scale = power_of_two(load_bytes(bytes));
    } else {
      scale = load(halves);
      if constexpr (Blocks::MINIMA) least = load(halves + WIDTH);
    }
    if constexpr (Blocks::SCALES == NIBBLES) {
      const Integers both = load_bytes(bytes);
      scale *= __builtin_convertvector(both & 15, Vector);
      least *= __builtin_convertvector(both >> 4, Vector);
    } else if constexpr (Blocks::SCALES == BYTES_OF_GROUPS) {
      scale *= load(bytes);
      if constexpr (Blocks::MINIMA) least *= load(bytes + MINIMA_AT);
    } else if constexpr (Blocks::SCALES == SIGNED_BYTES) {
      scale *= __builtin_convertvector(load_bytes(reinterpret_cast<const int8_t*>(bytes)), Vector);
    }
  }

 private:
  static OCTAVO_INLINE_MEMBER Integers load_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
    return (Integers)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
    return (Integers)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#elif defined(OCTAVO_NEON)
    return (Integers)words_of_bytes(from);
#else
    Bytes bytes;
    __builtin_memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, Integers);
#endif
  }

  static OCTAVO_INLINE_MEMBER Integers load_bytes(const int8_t* from) {
    return (load_bytes(reinterpret_cast<const uint8_t*>(from)) ^ 128) - 128;
  }

  // 2^(e - 128).
  static OCTAVO_INLINE_MEMBER Vector power_of_two(Integers e) {
    return (Vector)(e >= 2 ? e - 1 << 23 : e + 1 << 21);  // the smallest two are subnormal
  }
};

template <class Blocks>
struct Stored : ByVectors<Stored<Blocks>> {
  static constexpr int ROWS = REGISTERS == 32 ? 8 : 4;
  using Own = Layout<Blocks>;
  static constexpr int64_t SIZE = Blocks::GROUP < CHUNK_INPUTS ? Blocks::GROUP : CHUNK_INPUTS;  // inputs whose activations have one scale
  static constexpr int64_t SIZE_UNITS = SIZE / UNIT;
  static constexpr int64_t AHEAD = 8192;

  static int64_t row_bytes(int64_t inputs) { return inputs / SIZE * (SIZE + 8); }
  static int64_t panel_bytes(int64_t inputs) { return Own::panel_bytes(inputs); }

  template <class T>
  static void prepare(const T* x, int64_t stride, int64_t rows, int64_t inputs, char* to) {
    if constexpr (Blocks::MINIMA)
      prepare_groups<float, false, SIZE>(x, stride, rows, inputs, to, [](float scale, int32_t sum) {
        return Blocks::SUBTRACTED ? -(scale * static_cast<float>(sum)) : scale * static_cast<float>(sum);
      });
    else
      prepare_groups<int32_t, false, SIZE>(x, stride, rows, inputs, to,
                                           [](float, int32_t sum) { return -ZERO * sum; });
  }

  template <int N>
  static void multiply(const char* tile, const char* panel, int64_t inputs, float* sums) {
    const int64_t blocks = inputs / Blocks::NUMBERS;
    const int32_t* x = reinterpret_cast<const int32_t*>(tile);
    Vector low[N] = {}, high[N] = {};
    for (int64_t block = 0; block < blocks; ++block, panel += Own::BLOCK) {
      for (int64_t line = 0; line < 2 * Own::SCALING; line += 64)
        __builtin_prefetch(panel + Own::scaling_at(0) + AHEAD + line, 0, 2);
      add_block<N>(panel + Own::integers_at(0), panel + Own::scaling_at(0), x, low);
      // Units of x are read again for the other side, rather than kept in registers that there are not.
      __asm__ volatile("" ::: "memory");
      add_block<N>(panel + Own::integers_at(1), panel + Own::scaling_at(1), x, high);
      x += Blocks::NUMBERS / SIZE * (SIZE_UNITS + 2) * N;
    }
#pragma GCC unroll 16
    for (int row = 0; row < N; ++row) {
      store(sums + row * PANEL, low[row]);
      store(sums + row * PANEL + WIDTH, high[row]);
    }
  }

  // Lays rows of blocks out.
  static void pack(const uint8_t* from, char* to, int64_t outputs, int64_t inputs) {
    const int64_t blocks = inputs / Blocks::NUMBERS, row_size = blocks * Blocks::SIZE;
    each_panel(outputs, inputs, [&](int64_t panel, int64_t first, int64_t rows) {
      char* out = to + panel * panel_bytes(inputs);
      if (rows < PANEL) __builtin_memset(out, 0, static_cast<size_t>(panel_bytes(inputs)));
      const uint8_t* block = from + first * row_size;
      UnpackedBlock unpacked[PANEL];
      for (int64_t i = 0; i < blocks; ++i, out += Own::BLOCK, block += Blocks::SIZE) {
        for (int64_t row = 0; row < rows; ++row) Blocks::unpack(block + row * row_size, unpacked[row]);
        put_integers(unpacked, rows, out);
        for (int64_t row = 0; row < rows; ++row)
          put_scaling(unpacked[row], out + Own::scaling_at(row / WIDTH), row % WIDTH);
      }
    });
  }

  // The weights of an output.
  template <class T>
  static void read(const char* data, int64_t output, int64_t inputs, T* to) {
    const int64_t side = output % PANEL / WIDTH, column = output % WIDTH;
    const char* panel = data + output / PANEL * panel_bytes(inputs);
    for (int64_t at = 0; at < inputs; at += CHUNK_INPUTS) {
      const char* block = panel + at / Blocks::NUMBERS * Own::BLOCK;
      const char* chunk =
          block + Own::integers_at(side) + at % Blocks::NUMBERS / CHUNK_INPUTS * Own::BITS * 4 * WIDTH + column * 4;
      const auto word = [&](int64_t i) { return read_as<uint32_t>(chunk + i * 4 * WIDTH); };
      uint32_t words[8];
      Own::template units<0>(word, words[0], words[1]);
      Own::template units<1>(word, words[2], words[3]);
      Own::template units<2>(word, words[4], words[5]);
      Own::template units<3>(word, words[6], words[7]);
      uint8_t q[CHUNK_INPUTS];
      __builtin_memcpy(q, words, sizeof q);
      float numbers[CHUNK_INPUTS];
      for (int64_t i = 0; i < CHUNK_INPUTS; i += SIZE) {
        Vector scale{}, least{};
        Own::scaling(block + Own::scaling_at(side), (at + i) % Blocks::NUMBERS / Blocks::GROUP, scale, least);
        for (int64_t j = i; j < i + SIZE; ++j) numbers[j] = value(q[j], scale[column], least[column]);
      }
      write_numbers(numbers, to + at, CHUNK_INPUTS);
    }
  }

 private:
  static constexpr int32_t ZERO = [] {
    if constexpr (Listed<Blocks>)
      return OFFSET;
    else
      return Blocks::ZERO;
  }();

  static OCTAVO_INLINE_MEMBER float value(int32_t q, float scale, float least) {
    if constexpr (Listed<Blocks>)
      return static_cast<float>(Blocks::TABLE[q]) * scale;
    else if constexpr (Blocks::MINIMA)
      return static_cast<float>(q) * scale + (Blocks::SUBTRACTED ? -least : least);
    else
      return static_cast<float>(q - ZERO) * scale;
  }

  template <int N>
  static OCTAVO_INLINE_MEMBER void add_block(const char* integers, const char* scaling, const int32_t* x,
                                             Vector (&total)[N]) {
    for (int64_t chunk = 0; chunk < Own::CHUNKS; ++chunk, integers += Own::BITS * 4 * WIDTH) {
      for (int64_t line = 0; line < Own::BITS * 4 * WIDTH; line += 64) __builtin_prefetch(integers + AHEAD + line, 0, 2);
      if constexpr (SIZE == CHUNK_INPUTS) {
        add_group<N, 0, 4>(integers, scaling, chunk * CHUNK_INPUTS / Blocks::GROUP, x, total);
      } else {
        add_group<N, 0, 2>(integers, scaling, 2 * chunk, x, total);
        add_group<N, 2, 2>(integers, scaling, 2 * chunk + 1, x, total);
      }
    }
  }

  // Adds PAIRS pairs of units, from pair FIRST of a chunk on: they are a group of the activations, x, which goes on to the
  // next.
  template <int N, int FIRST, int PAIRS>
  static OCTAVO_INLINE_MEMBER void add_group(const char* chunk, const char* scaling_at, int64_t group, const int32_t*& x,
                                             Vector (&total)[N]) {
    Sums<Integers, N, 1> acc;
    acc.begin([&](int row) {
      return !Blocks::MINIMA && ZERO ? integers(x[(SIZE_UNITS + 1) * N + row]) : Integers{};
    });
    add_pair<N, FIRST>(chunk, x, acc);
    add_pair<N, FIRST + 1>(chunk, x + 2 * N, acc);
    if constexpr (PAIRS == 4) {
      add_pair<N, FIRST + 2>(chunk, x + 4 * N, acc);
      add_pair<N, FIRST + 3>(chunk, x + 6 * N, acc);
    }
    x += SIZE_UNITS * N;
    const float* row_scales = reinterpret_cast<const float*>(x);
    Vector scale{}, least{};
    Own::scaling(scaling_at, group, scale, least);
#pragma GCC unroll 16
    for (int row = 0; row < N; ++row) {
      total[row] = fma(__builtin_convertvector(acc.of(row, 0), Vector) * all(row_scales[row]), scale, total[row]);
      if constexpr (Blocks::MINIMA) total[row] = fma(all(row_scales[N + row]), least, total[row]);
    }
    x += 2 * N;
  }

  template <int N, int PAIR>
  static OCTAVO_INLINE_MEMBER void add_pair(const char* chunk, const int32_t* x, Sums<Integers, N, 1>& acc) {
    Integers first, second;
    Own::template units<PAIR>([&](int64_t i) { return load_integers(chunk + i * 4 * WIDTH); }, first, second);
    if constexpr (Listed<Blocks>) {
      static constexpr Table<Blocks> TABLE;
      first = look_up(TABLE.entries, first), second = look_up(TABLE.entries, second);
    }
    acc.add({first}, {second}, x, [](Integers sum, Integers weights, int32_t unit) { return dot(sum, weights, unit); });
  }

  static OCTAVO_INLINE_MEMBER Integers dot(Integers acc, Integers weights, int32_t x) {
    if constexpr (Listed<Blocks>)
      return dot_bytes(acc, weights, x);
    else
      return dot_small(acc, weights, x);
  }

  // The integers of a block of each of a panel's rows.
  static OCTAVO_INLINE_MEMBER void put_integers(const UnpackedBlock* blocks, int64_t rows, char* to) {
    constexpr int64_t UNITS_OF_CHUNK = CHUNK_INPUTS / UNIT;
    Words units[2][Blocks::NUMBERS / UNIT];  // of each side
    transpose_rows(blocks->q, sizeof *blocks, sizeof blocks->q, rows, Blocks::NUMBERS / UNIT,
                   [&](int64_t unit, int64_t column, Words words) { units[column / WIDTH][unit] = words; });
    for (int64_t side = 0; side < 2; ++side)
      for (int64_t chunk = 0; chunk < Own::CHUNKS; ++chunk) {
        const Words* from = units[side] + chunk * UNITS_OF_CHUNK;
        char* out = to + Own::integers_at(side) + chunk * Own::BITS * 4 * WIDTH;
        const auto put = [&](int64_t i, Words words) { store_words(out + i * 4 * WIDTH, words); };
        if constexpr (Own::BITS >= 4)
          for (int64_t i = 0; i < 4; ++i) put(i, (from[2 * i] & 0x0f0f0f0f) | (from[2 * i + 1] & 0x0f0f0f0f) << 4);
        if constexpr (Own::BITS & 2) {
          constexpr int AT = Own::BITS == 6 ? 4 : 0;
          for (int64_t i = 0; i < 2; ++i) {
            Words words{};
            for (int k = 0; k < 4; ++k) words |= (from[4 * i + k] >> AT & 0x03030303) << 2 * k;
            put(Own::TWOS_AT + i, words);
          }
        }
        if constexpr (Own::BITS & 1) {
          constexpr int AT = Own::BITS == 5 ? 4 : 2;
          Words words{};
          for (int k = 0; k < 8; ++k) words |= (from[k] >> AT & 0x01010101) << k;
          put(Own::ONES_AT, words);
        }
      }
  }

  // What scales a block of a row.
  static OCTAVO_INLINE_MEMBER void put_scaling(const UnpackedBlock& block, char* scaling_to, int64_t column) {
    if constexpr (Own::BYTES)
      for (int64_t group = 0; group < Own::GROUPS; ++group) {
        scaling_to[group * WIDTH + column] = static_cast<char>(block.scales[group]);
        if constexpr (Blocks::MINIMA && Blocks::SCALES != NIBBLES)
          scaling_to[Own::MINIMA_AT + group * WIDTH + column] = static_cast<char>(block.minima[group]);
      }
    for (int64_t i = 0; i < Own::HALVES; ++i)
      __builtin_memcpy(scaling_to + Own::HALVES_AT + (i * WIDTH + column) * 2, block.halves + i, 2);
  }
};

#define OCTAVO_EXPORT_STORED(kind, Blocks)                                                                            \
  OCTAVO_EXPORT(gemm_pack_##kind)(const uint8_t* blocks, char* to, int64_t outputs, int64_t inputs) {                 \
    Stored<Blocks>::pack(blocks, to, outputs, inputs);                                                                \
  }                                                                                                                   \
  OCTAVO_EXPORT_LOOK_UP(kind, Stored<Blocks>)                                                                         \
  OCTAVO_EXPORT_PRODUCT(kind, Stored<Blocks>)

}  // namespace octavo::gemm

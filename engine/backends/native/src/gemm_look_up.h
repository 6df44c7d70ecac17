// Rows of packed weights as plain numbers: what an embedding looks up.
#pragma once

#include "gemm.h"

namespace octavo::gemm {

// `Weights::read` writes the numbers of an output.
template <class Weights>
OCTAVO_INLINE void look_up(const char* data, const int64_t* outputs, void* to, int64_t format, int64_t count,
                           int64_t inputs) {
  parallel(count * inputs >= WORTH_SHARING, [&](int thread, int threads) {
    const Share own = share(count, thread, threads);
    for (int64_t i = own.first; i < own.last; ++i) {
      if (format == FLOAT32)
        Weights::read(data, outputs[i], inputs, static_cast<float*>(to) + i * inputs);
      else
        Weights::read(data, outputs[i], inputs, static_cast<bfloat16*>(to) + i * inputs);
    }
  });
}

// Writes some numbers to their place.
template <class T>
OCTAVO_INLINE void write_numbers(const float* from, T* to, int64_t count) {
  each(count, [&](auto place) { place.write(to, place.read(from)); });
}

template <class T>
OCTAVO_INLINE T read_as(const char* from) {
  T value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

// Of an output its unit of 4 bytes, where panels hold units of all outputs, `first` bytes from the panel's start.
OCTAVO_INLINE uint32_t word_of(const char* panel, int64_t unit, int64_t output) {
  return read_as<uint32_t>(panel + (unit * PANEL + output % PANEL) * 4);
}

#define OCTAVO_EXPORT_LOOK_UP(kind, ...)                                                                              \
  OCTAVO_EXPORT(gemm_rows_##kind)(const char* data, const int64_t* outputs, void* to, int64_t format, int64_t count,  \
                                  int64_t inputs) {                                                                   \
    look_up<__VA_ARGS__>(data, outputs, to, format, count, inputs);                                                   \
  }

}  // namespace octavo::gemm

// What all kernels share: how a function is exported, how bfloat16 is written.
//
// Every source is compiled once for each instruction set, into a library of its own. So nothing in a header may keep
// state, and no library of C++ is linked: kernels are plain functions on raw pointers, without exceptions.
#pragma once

#include <stddef.h>
#include <stdint.h>

// OCTAVO_EXPORT(name)(arguments) { ... } is found from Python as "name". Sizes are int64_t, strides count elements.
#define OCTAVO_EXPORT(name) extern "C" __attribute__((visibility("default"))) void octavo_##name

#define OCTAVO_INLINE static inline __attribute__((always_inline))
#define OCTAVO_INLINE_MEMBER inline __attribute__((always_inline))

namespace octavo {

// The upper half of a float32. A type of its own, so that templates can tell it from an integer.
struct bfloat16 {
  uint16_t bits;
};

// An IEEE half, which pages and the scales of weights of few bits hold.
struct float16 {
  uint16_t bits;
};

template <class T>
OCTAVO_INLINE T smaller(T a, T b) {
  return a < b ? a : b;
}

template <class T>
OCTAVO_INLINE T larger(T a, T b) {
  return a > b ? a : b;
}

}  // namespace octavo

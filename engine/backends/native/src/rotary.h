// Rotary positions, and new keys and values on their way into pages: queries are turned where they lie, keys are turned
// and stored, values are stored, in one walk over the tokens.
#pragma once

#include "pages.h"
#include "threads.h"

namespace octavo {

constexpr int64_t LONGEST_HEAD = 1024;  // features

// T: heads; R: the format that rotation happens in, that of cosines and sines.
template <class T, class R>
struct Rotate {
  T* turning;       // of each token `heads` queries, then `kv_heads` keys
  const T* values;  // of each token `kv_heads` values
  const R* cosines;  // of each token, or of each position
  const R* sines;
  const int64_t* positions;  // of tokens; null where angles are those of tokens already
  const int64_t* slots;  // null where keys are turned in place and values stay
  void* keys_page;
  void* values_page;
  bfloat16* key_scales;
  bfloat16* value_scales;
  const float* centre;
  int64_t tokens, stored, heads, kv_heads, head_dim, dim, turning_stride, values_stride, interleaved, format, same;

  OCTAVO_INLINE_MEMBER bool worth_sharing() const {
    return tokens > 1 && tokens * (heads + 2 * kv_heads) * head_dim >= WORTH_SHARING;
  }
};

// A pair of vectors, rounded where torch rounds: after the first product, and after the sum.
template <class R>
OCTAVO_INLINE void rotate_pair(Vector& first, Vector& second, Vector cos1, Vector cos2, Vector sin, const R* format) {
  const Vector a = rounded(rounded(first * cos1, format) - second * sin, format);
  second = rounded(rounded(second * cos2, format) + first * sin, format);
  first = a;
}

// One head to `out`, which may be `x`.
template <class T, class R, class Out>
OCTAVO_INLINE void turn(const Rotate<T, R>& a, const T* x, const R* cos, const R* sin, Out* out) {
  const int64_t half = a.dim / 2;
  if (a.interleaved) {
    // What belongs together is put apart first, so that it can be turned like halves.
    float firsts[LONGEST_HEAD / 2], seconds[LONGEST_HEAD / 2], cosines[LONGEST_HEAD / 2];
    float whole[LONGEST_HEAD], wide[LONGEST_HEAD];
    each(a.dim, [&](auto v) {
      v.write(whole, v.read(x));
      v.write(wide, v.read(cos));
    });
    for (int64_t i = 0; i < half; ++i) {
      firsts[i] = whole[2 * i];
      seconds[i] = whole[2 * i + 1];
      cosines[i] = wide[2 * i];
    }
    each(half, [&](auto v) {
      Vector first = v.read(firsts), second = v.read(seconds);
      const Vector both = v.read(cosines);
      rotate_pair(first, second, both, both, v.read(sin), cos);
      v.write(firsts, first);
      v.write(seconds, second);
    });
    for (int64_t i = 0; i < half; ++i) {
      whole[2 * i] = firsts[i];
      whole[2 * i + 1] = seconds[i];
    }
    each(a.dim, [&](auto v) { v.write(out, v.read(whole)); });
  } else {
    each(half, [&](auto v) {
      Vector first = v.read(x), second = v.read(x + half);
      rotate_pair(first, second, v.read(cos), v.read(cos + half), v.read(sin), cos);
      v.write(out, first);
      v.write(out + half, second);
    });
  }
  if (static_cast<const void*>(out) != x)
    each(a.head_dim - a.dim, [&](auto v) { v.write(out + a.dim, v.read(x + a.dim)); });
}

template <class T, class R>
OCTAVO_INLINE void save(const Rotate<T, R>& a, int64_t token, int64_t head, float* vector, bool key) {
  const int64_t place = a.slots[token] * a.kv_heads + head;
  void* page = key ? a.keys_page : a.values_page;
  if (a.format != PAGE_INT8) return write_vector(vector, a.head_dim, page, place * a.head_dim, a.format, a.same);
  if (key && a.centre) {
    const float* centre = a.centre + head * a.head_dim;
    each(a.head_dim, [&](auto v) { v.write(vector, v.read(vector) - v.read(centre)); });
  }
  bfloat16* scales = key ? a.key_scales : a.value_scales;
  quantise_vector(vector, a.head_dim, static_cast<int8_t*>(page) + place * a.head_dim, scales + place);
}

template <class T, class R>
static void rotate_part(const Rotate<T, R>& a, int thread, int threads) {
  const Share own = share(a.tokens, thread, threads);
  for (int64_t token = own.first; token < own.last; ++token) {
    const int64_t angle = a.positions ? a.positions[token] : token;
    const R* cos = a.cosines + angle * a.head_dim;
    const R* sin = a.sines + angle * (a.dim / 2);
    T* turning = a.turning + token * a.turning_stride;
    const int64_t in_place = a.slots ? a.heads : a.heads + a.kv_heads;
    if (a.dim)
      for (int64_t head = 0; head < in_place; ++head)
        turn(a, turning + head * a.head_dim, cos, sin, turning + head * a.head_dim);
    if (!a.slots || token >= a.stored) continue;
    for (int64_t head = 0; head < a.kv_heads; ++head) {
      float vector[LONGEST_HEAD];
      T rounded_key[LONGEST_HEAD];
      const T* key = turning + (a.heads + head) * a.head_dim;
      const T* value = a.values + token * a.values_stride + head * a.head_dim;
      if (a.dim) {
        turn(a, key, cos, sin, rounded_key);
        key = rounded_key;
      }
      each(a.head_dim, [&](auto v) { v.write(vector, v.read(key)); });
      save(a, token, head, vector, true);
      each(a.head_dim, [&](auto v) { v.write(vector, v.read(value)); });
      save(a, token, head, vector, false);
    }
  }
}

}  // namespace octavo

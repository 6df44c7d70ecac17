// What everything else begins with: the largest logit of each row and each chunk, and the sum of exponentials.
#include "sampling.h"

namespace octavo {
namespace {

// Exponentials that are added up in float32.
constexpr int64_t PART = 512;

struct Summary {
  Logits logits;
  float* peak;      // [rows] the largest logit; 0 where the sum is NaN
  float* log_sum;   // [rows] log of the sum of exp(logit - peak); NaN where the row has NaN or inf, or only -inf
  int32_t* place;   // [rows] the first column that has the peak
  float* maxima;    // [rows, pieces]
  double* sums;     // [rows, pieces] of exp(logit - maximum of the piece)
};

// The natural logarithm of a number from 1 up, to the last bits of float64.
double logarithm(double x) {
  const uint64_t bits = __builtin_bit_cast(uint64_t, x);
  int64_t exponent = static_cast<int64_t>(bits >> 52) - 1023;
  double fraction = __builtin_bit_cast(double, (bits & 0xfffffffffffffull) | 0x3ff0000000000000ull);
  if (fraction > 1.4142135623730951) {
    fraction *= 0.5;
    ++exponent;
  }
  // log(f) = 2 artanh(s), s = (f - 1) / (f + 1)
  const double s = (fraction - 1) / (fraction + 1), square = s * s;
  double series = 0;
  for (int64_t power = 23; power >= 1; power -= 2) series = series * square + 1.0 / static_cast<double>(power);
  return static_cast<double>(exponent) * 0.6931471805599453 + 2 * s * series;
}

void summarise_piece(const Summary& a, int64_t number, int64_t piece) {
  const Logits& logits = a.logits;
  const int64_t first = piece * PIECE, count = smaller(PIECE, logits.columns - first);
  const float* from = logits.row(number) + first;
  float* tops = logits.tops_of(number) + first / CHUNK;
  float maximum = -INFINITE;
  for (int64_t at = 0; at < count; at += CHUNK) {
    const float top = top_of(from + at, smaller(CHUNK, count - at));
    tops[at / CHUNK] = top;
    maximum = larger(maximum, top);
  }
  // Nothing is subtracted from -inf alone, so that only what is no number makes the sum one.
  const Vector base = all(maximum == -INFINITE ? 0.0f : maximum);
  const int64_t at = number * pieces_of(logits.columns) + piece;
  a.maxima[at] = maximum;
  double sum = 0;
  for (int64_t part = 0; part < count; part += PART)
    sum += static_cast<double>(total(smaller(PART, count - part), [&](auto v, Vector before) {
      return before + v.kept(falling(v.read(from + part) - base));
    }));
  a.sums[at] = sum;
}

void finish_row(const Summary& a, int64_t number) {
  const Logits& logits = a.logits;
  const int64_t pieces = pieces_of(logits.columns);
  const float* maxima = a.maxima + number * pieces;
  const double* sums = a.sums + number * pieces;
  float peak = -INFINITE;
  for (int64_t piece = 0; piece < pieces; ++piece) peak = larger(peak, maxima[piece]);
  double sum = 0;
  for (int64_t piece = 0; piece < pieces; ++piece)
    sum += sums[piece] * static_cast<double>(falling(all(maxima[piece] - peak))[0]);
  const bool valid = sum >= 1 && sum < 1e30;
  a.peak[number] = valid ? peak : 0.0f;
  a.log_sum[number] = valid ? static_cast<float>(logarithm(sum)) : __builtin_nanf("");
  a.place[number] = 0;
  if (!valid) return;
  int64_t chunk = 0, column = 0;
  for (int64_t piece = 0; maxima[piece] != peak; ++piece) chunk += PIECE / CHUNK;
  for (const float* tops = logits.tops_of(number); tops[chunk] != peak; ++chunk) {}
  for (const float* chosen = logits.row(number) + chunk * CHUNK; chosen[column] != peak; ++column) {}
  a.place[number] = static_cast<int32_t>(chunk * CHUNK + column);
}

}  // namespace
}  // namespace octavo

using namespace octavo;

OCTAVO_EXPORT(logits_summary)(float* values, int64_t rows, int64_t columns, int64_t stride, float* tops, float* peak,
                              float* log_sum, int32_t* place, float* maxima, double* sums) {
  const Summary a{{values, rows, columns, stride, tops}, peak, log_sum, place, maxima, sums};
  const int64_t pieces = pieces_of(columns);
  parallel(rows * columns >= WORTH_SHARING, [&](int thread, int threads) {
    const Share own = share(rows * pieces, thread, threads);
    for (int64_t i = own.first; i < own.last; ++i) summarise_piece(a, i / pieces, i % pieces);
    barrier(threads);
    const Share finished = share(rows, thread, threads);
    for (int64_t row = finished.first; row < finished.last; ++row) finish_row(a, row);
  });
}

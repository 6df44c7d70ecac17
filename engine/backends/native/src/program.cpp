// Runs what program.h describes.
#include "program.h"

#include "activations.h"
#include "experts.h"
#include "gemm.h"
#include "norms.h"
#include "rotary.h"

namespace octavo {
namespace {

template <class T>
struct Runner {
  Step& step;
  Barrier& others;
  int thread, threads;

  T* at(const Place& place) const {
    return place.buffer < 0 ? nullptr : static_cast<T*>(step.buffers[place.buffer]) + place.offset;
  }

  void run(const NormWhat& o) const {
    const NormRows<T> a{at(o.x),
                        at(o.residual),
                        at(o.sum),
                        static_cast<const T*>(o.weight),
                        static_cast<const T*>(o.bias),
                        at(o.out),
                        step.tokens,
                        o.inner,
                        o.size,
                        o.x.stride,
                        o.size,
                        o.out.stride,
                        o.size,
                        static_cast<float>(o.eps),
                        o.rounding,
                        o.weights};
    if (o.centred) return layer_norm_part(a, thread, threads);
    rms_norm_part(a, thread, threads);
  }

  void run(const ProductWhat& o, Ticket* tickets) const {
    if (o.kind != gemm::BY_AMX_FLOAT32)
      return multiply(o.kind, o.tile_rows, at(o.x), o.x.stride, at(o.y), o.y.stride, o.weight, o.bias, step.tokens,
                      o.outputs, o.inputs, tickets);
    // Tiles would be slow for a short input alone. So that its numbers do not depend on what else is computed, its tokens
    // go by vectors in any company. Rows should come by their length: then there are two runs at most.
    const auto is_short = [&](int64_t row) { return step.starts[row + 1] - step.starts[row] <= gemm::FEW; };
    for (int64_t row = 0, next = 1; row < step.rows; row = next++) {
      while (next < step.rows && is_short(next) == is_short(row)) ++next;
      if (row) others.wait(threads);  // the tiles of these rows lie where those of the others do
      const int64_t first = step.starts[row], end = next < step.rows ? step.starts[next] : step.tokens;
      const bool few = is_short(row);
      multiply(few ? gemm::BY_FLOAT32 : o.kind, few ? gemm::VECTOR_ROWS : o.tile_rows, at(o.x) + first * o.x.stride,
               o.x.stride, at(o.y) + first * o.y.stride, o.y.stride, o.weight, o.bias, end - first, o.outputs, o.inputs);
    }
  }

  void multiply(int64_t kind, int64_t tile_rows, const T* x, int64_t x_stride, T* y, int64_t y_stride,
                const void* weight, const float* bias, int64_t rows, int64_t outputs, int64_t inputs,
                Ticket* tickets = nullptr) const {
    constexpr int64_t format = sizeof(T) == 4 ? gemm::FLOAT32 : gemm::BFLOAT16;
    const int64_t tiles = (rows + tile_rows - 1) / tile_rows + step.spare;
    const gemm::Product p{x,      y,        weight,   bias, step.workspace, tiles, format,
                          format, x_stride, y_stride, rows, outputs,        inputs,         tickets};
    gemm::part_of(kind, p, thread, threads);
  }

  // The products of all experts with their rows. Threads meet wherever a product's tiles lie where those of the last one
  // did, unless each thread has laid out a tile for itself both times (product_part).
  void multiply_each(const ExpertsWhat& o, int64_t kind, int64_t tile_rows, const T* x, int64_t inputs, T* y,
                     int64_t outputs, const void* const* weights) const {
    const bool tiled = (kind >= gemm::BY_AMX_FLOAT32 && kind <= gemm::BY_AMX_INT4) || kind == gemm::BY_PARTS;
    bool was_lone = true;
    for (int64_t e = 0; e < o.count; ++e) {
      const int64_t first = o.starts[e], rows = o.starts[e + 1] - first;
      if (!rows) continue;
      const bool lone = rows <= tile_rows && !tiled;
      if (!lone || !was_lone) others.wait(threads);
      was_lone = lone;
      multiply(kind, tile_rows, x + first * inputs, inputs, y + first * outputs, outputs, weights[e], nullptr, rows,
               outputs, inputs);
    }
    others.wait(threads);
  }

  void run(const ExpertsWhat& o) const {
    const int64_t pairs = step.tokens * o.active;
    auto* routes = reinterpret_cast<int32_t*>(at(o.routes));
    const Experts<T> a{at(o.routed),
                       at(o.x),
                       at(o.rows),
                       at(o.out),
                       routes,
                       routes + pairs,
                       reinterpret_cast<float*>(routes + 2 * pairs),
                       o.starts,
                       step.tokens,
                       o.count,
                       o.active,
                       o.size,
                       o.routed.stride,
                       o.x.stride,
                       o.out.stride,
                       o.normalize};
    route_part(a, thread, threads);
    others.wait(threads);
    if (thread == 0) group(a);
    others.wait(threads);
    gather_part(a, thread, threads);
    others.wait(threads);
    const int64_t wide = o.gated ? 2 * o.width : o.width;
    multiply_each(o, o.up_kind, o.up_tile_rows, at(o.rows), o.size, at(o.wide), wide, o.up);
    const ActivationRows<T> hidden{at(o.wide), nullptr, at(o.hidden), pairs, o.width, wide, o.gated};
    activate_part(hidden, o.function, thread, threads);
    others.wait(threads);
    multiply_each(o, o.down_kind, o.down_tile_rows, at(o.hidden), o.width, at(o.rows), o.size, o.down);
    combine_part(a, thread, threads);
  }

  template <class R>
  void rotate_as(const RotateWhat& o) const {
    const Pages pages = o.pages ? *o.pages : Pages{};
    T* heads = at(o.heads);
    const bool same = pages.format == (sizeof(T) == 4 ? PAGE_F32 : PAGE_BF16);
    const Rotate<T, R> a{heads,
                       heads + (o.query_heads + o.kv_heads) * o.head_dim,
                       static_cast<const R*>(o.cosines),
                       static_cast<const R*>(o.sines),
                       step.positions,
                       o.pages ? step.slots : nullptr,
                       pages.keys,
                       pages.values,
                       pages.key_scales,
                       pages.value_scales,
                       pages.centre,
                       step.tokens,
                       step.stored,
                       o.query_heads,
                       o.kv_heads,
                       o.head_dim,
                       o.dim,
                       o.heads.stride,
                       o.heads.stride,
                       o.interleaved,
                       pages.format,
                       same};
    rotate_part(a, thread, threads);
  }

  void run(const RotateWhat& o) const {
    if (o.in_float32) return rotate_as<float>(o);
    rotate_as<T>(o);
  }

  void run(const AttendWhat& o) const {
    Attention a = *step.calls[o.call];
    a.q = at(o.q), a.out = at(o.out);
    a.q_token = o.q.stride, a.q_head = a.head_dim;
    a.key_head = a.value_head = a.head_dim;
    if (o.pages) {
      const Pages& pages = *o.pages;
      a.keys = pages.keys, a.values = pages.values;
      a.key_scales = pages.key_scales, a.value_scales = pages.value_scales;
      a.key_token = a.value_token = a.kv_heads * a.head_dim;
      a.centre = o.centred ? pages.centre : nullptr;
    } else {
      a.keys = at(o.k), a.values = at(o.v);
      a.key_token = o.k.stride, a.value_token = o.v.stride;
    }
    a.sinks = o.sinks;
    a.bias = o.bias, a.bias_kind = o.bias_kind, a.bias_columns = o.bias_columns, a.bias_zero = o.bias_zero;
    a.distance_keys = o.distance_keys, a.distance_queries = o.distance_queries;
    a.distance_columns = o.distance_columns, a.distances = o.distances;
    a.scale = o.scale, a.softcap = o.softcap;
    a.outside = 0;
    attention_part(a, thread, threads);
    if (a.outside) __atomic_store_n(&step.outside, PAGE, __ATOMIC_RELAXED);
  }

  void run(const ActivateWhat& o) const {
    const ActivationRows<T> a{at(o.x), nullptr, at(o.out), step.tokens, o.width, o.x.stride, o.gated};
    activate_part(a, o.function, thread, threads);
  }

  // Calls body(row) for each row of a thread's share.
  template <class Body>
  void each_row(const Body& body) const {
    const Share own = share(step.tokens, thread, threads);
    for (int64_t row = own.first; row < own.last; ++row) body(row);
  }

  // The rows of tokens form one range; a thread's tokens are some of it.
  void run(const GatherWhat& o) const {
    int64_t row = 0;
    each_row([&](int64_t token) {
      while (row < step.rows && token >= step.starts[row + 1]) ++row;
      T* out = at(o.out) + token * o.out.stride;
      for (int64_t tap = 0; tap < o.taps; ++tap, out += o.width) {
        const int64_t place = token + tap - o.taps / 2;
        if (row < step.rows && place >= step.starts[row] && place < step.starts[row + 1])
          __builtin_memcpy(out, at(o.x) + place * o.x.stride, static_cast<size_t>(o.width) * sizeof(T));
        else
          __builtin_memset(out, 0, static_cast<size_t>(o.width) * sizeof(T));
      }
    });
  }

  void run(const AddWhat& o) const {
    each_row([&](int64_t row) {
      const T *x = at(o.x) + row * o.x.stride, *y = at(o.y) + row * o.y.stride;
      T* out = at(o.out) + row * o.out.stride;
      each(o.width, [&](auto v) { v.write(out, v.read(x) + v.read(y)); });
    });
  }

  // All threads come to the same end: they see what the first one wrote before they go on.
  void run(const ReduceWhat& o) const {
    Ranks& ranks = *o.ranks;
    const int64_t at_once = larger<int64_t>(ranks.capacity / (o.width * static_cast<int64_t>(sizeof(T))), 1);
    for (int64_t first = 0; first < step.tokens; first += at_once) {
      const int64_t meeting = ranks.meeting + 1;
      const Share own = share(smaller(at_once, step.tokens - first), thread, threads);
      T* x = at(o.x) + first * o.x.stride;
      T* mine = reinterpret_cast<T*>(buffer_of(ranks, ranks.rank, meeting));
      for (int64_t row = own.first; row < own.last; ++row)
        __builtin_memcpy(mine + row * o.width, x + row * o.x.stride, static_cast<size_t>(o.width) * sizeof(T));
      others.wait(threads);
      if (thread == 0 && (step.met = meet(ranks))) step.outside = RANKS;
      others.wait(threads);
      if (step.met) return;
      const T* parts = reinterpret_cast<const T*>(buffer_of(ranks, 0, meeting));
      const int64_t apart = 2 * ranks.capacity / static_cast<int64_t>(sizeof(T));
      for (int64_t row = own.first; row < own.last; ++row) {
        const T* part = parts + row * o.width;
        T* out = x + row * o.x.stride;
        each(o.width, [&](auto v) {
          Vector sum = v.read(part);
          for (int64_t rank = 1; rank < ranks.count; ++rank) sum = sum + v.read(part + rank * apart);
          v.write(out, sum);
        });
      }
    }
  }

  void run(const OpenWhat& o) const {
    const int64_t size = o.width / o.pieces;
    with_function(o.function, [&](auto function) {
      each_row([&](int64_t row) {
        const T* opening = at(o.opening) + row * o.opening.stride;
        T* x = at(o.x) + row * o.x.stride;
        const auto opened = [&](Vector v) { return rounded(decltype(function)::of(v, opening), opening); };
        if (size == 1) return each(o.width, [&](auto v) { v.write(x, v.read(x) * opened(v.read(opening))); });
        for (int64_t piece = 0; piece < o.pieces; ++piece, x += size) {
          const Vector factor = all(opened(all(number(opening + piece)))[0]);
          each(size, [&](auto v) { v.write(x, v.read(x) * factor); });
        }
      });
    });
  }

  // The rows of `thin` are float32, whatever the others are.
  float* thin_at(const Place& place) const { return reinterpret_cast<float*>(at(place)); }
  static int64_t thin_stride(const Place& place) { return place.stride * static_cast<int64_t>(sizeof(T)) / 4; }

  void run(const ShrinkWhat& o) const {
    adapters::shrink_part(step.runs, step.num_runs, o.slots, at(o.x), o.x.stride, o.inputs, thin_at(o.thin),
                          thin_stride(o.thin), thread, threads);
  }

  void run(const ExpandWhat& o) const {
    adapters::expand_part(step.runs, step.num_runs, o.slots, thin_at(o.thin), thin_stride(o.thin), at(o.y), o.y.stride,
                          thread, threads);
  }

  StateRows state_rows() const {
    return {step.sources, step.targets, step.snapshots, step.afters, step.starts, step.rows};
  }

  void run(const ConvolveWhat& o) const {
    const Convolved<T> a{at(o.x), at(o.out), o.weight, o.bias, o.x.stride, o.out.stride, o.width, o.taps, o.form};
    convolve_part(a, *o.memory, state_rows(), thread, threads);
  }

  void run(const DeltaWhat& o) const {
    const Delta<T> a{at(o.x),
                     at(o.rates),
                     at(o.fading),
                     at(o.opening),
                     at(o.out),
                     o.decay,
                     o.offset,
                     o.norm,
                     o.x.stride,
                     o.rates.stride,
                     o.fading.stride,
                     o.opening.stride,
                     o.out.stride,
                     o.begin,
                     o.key_heads,
                     o.value_heads,
                     o.key_dim,
                     o.value_dim,
                     o.alternate,
                     o.logistic,
                     static_cast<float>(o.eps),
                     static_cast<float>(o.most)};
    if (a.fading)
      delta_part<true>(a, *o.memory, state_rows(), thread, threads);
    else
      delta_part<false>(a, *o.memory, state_rows(), thread, threads);
    others.wait(threads);
    delta_norm_part(a, step.starts[step.rows], thread, threads);
  }

  void run(const ScanWhat& o) const {
    const Scan<T> a{at(o.x),  at(o.rates), at(o.opening),  at(o.out),        o.decay,      o.offset,
                    o.skip,   o.norm,      o.x.stride,     o.rates.stride,   o.opening.stride,
                    o.out.stride, o.begin, o.heads,        o.head_dim,       o.groups,     o.size,
                    o.norm_first, static_cast<float>(o.eps)};
    scan_part(a, *o.memory, state_rows(), thread, threads);
    if (!a.opening) return;
    others.wait(threads);
    scan_norm_part(a, step.starts[step.rows], thread, threads);
  }

  void run(const ChannelsWhat& o) const {
    const ChannelScan<T> a{at(o.x),        at(o.before),    at(o.after),     at(o.steps),      at(o.opening),
                           at(o.out),      o.decay,         o.skip,          o.x.stride,       o.before.stride,
                           o.after.stride, o.steps.stride,  o.opening.stride, o.out.stride,    o.begin,
                           o.width,        o.size};
    channel_scan_part(a, *o.memory, state_rows(), thread, threads);
  }

  void run(const RecurrenceWhat& o) const {
    const Recurrence<T> a{at(o.x),         at(o.inputs),    at(o.decays),    at(o.out),    o.speed, step.positions,
                          o.x.stride, o.inputs.stride, o.decays.stride, o.out.stride, o.begin, o.width};
    recurrence_part(a, *o.memory, state_rows(), thread, threads);
  }

  void run(const ClipWhat& o) const {
    const Vector most = all(static_cast<float>(o.limit)), least = all(static_cast<float>(-o.limit));
    each_row([&](int64_t row) {
      T* x = at(o.x) + row * o.x.stride;
      each(o.width, [&](auto v) {
        const Vector value = v.read(x);
        v.write(x, value > most ? most : value < least ? least : value);  // NaN stays
      });
    });
  }

  void run(const Operation& o, Ticket* tickets) const {
    switch (o.kind) {
      case NORM: return run(*static_cast<const NormWhat*>(o.what));
      case PRODUCT: return run(*static_cast<const ProductWhat*>(o.what), tickets);
      case ROTATE: return run(*static_cast<const RotateWhat*>(o.what));
      case ATTEND: return run(*static_cast<const AttendWhat*>(o.what));
      case ACTIVATE: return run(*static_cast<const ActivateWhat*>(o.what));
      case ADD: return run(*static_cast<const AddWhat*>(o.what));
      case CLIP: return run(*static_cast<const ClipWhat*>(o.what));
      case EXPERTS: return run(*static_cast<const ExpertsWhat*>(o.what));
      case GATHER: return run(*static_cast<const GatherWhat*>(o.what));
      case OPEN: return run(*static_cast<const OpenWhat*>(o.what));
      case SHRINK: return run(*static_cast<const ShrinkWhat*>(o.what));
      case EXPAND: return run(*static_cast<const ExpandWhat*>(o.what));
      case SCAN: return run(*static_cast<const ScanWhat*>(o.what));
      case REDUCE: return run(*static_cast<const ReduceWhat*>(o.what));
      case DELTA: return run(*static_cast<const DeltaWhat*>(o.what));
      case CHANNELS: return run(*static_cast<const ChannelsWhat*>(o.what));
      case RECURRENCE: return run(*static_cast<const RecurrenceWhat*>(o.what));
      case CONVOLVE: return run(*static_cast<const ConvolveWhat*>(o.what));
    }
  }
};

// Whether there are angles and pages for all tokens.
int64_t find_outside(const Step& step, const Operation* operations, int64_t count) {
  uint64_t positions = UINT64_MAX, slots = UINT64_MAX;
  for (int64_t i = 0; i < count; ++i) {
    if (operations[i].kind != ROTATE) continue;
    const RotateWhat& o = *static_cast<const RotateWhat*>(operations[i].what);
    if (o.dim) positions = smaller(positions, static_cast<uint64_t>(o.length));
    if (o.pages) slots = smaller(slots, static_cast<uint64_t>(o.pages->slots));
  }
  // What is negative is large without a sign.
  for (int64_t i = 0; i < step.tokens; ++i)
    if (static_cast<uint64_t>(step.positions[i]) >= positions && positions != UINT64_MAX) return POSITION;
  for (int64_t i = 0; i < step.stored && slots != UINT64_MAX; ++i)
    if (static_cast<uint64_t>(step.slots[i]) >= slots) return SLOT;
  return 0;
}

template <class T>
void run_program(Step& step, const Operation* operations, int64_t count) {
  step.met = 0;
  if ((step.outside = find_outside(step, operations, count))) return;
  Barrier others;
  auto* tickets = static_cast<Ticket*>(step.tickets);
  __builtin_memset(step.tickets, 0, static_cast<size_t>(count * step.spare) * sizeof(Ticket));
  parallel(true, [&](int thread, int threads) {
    const Runner<T> runner{step, others, thread, threads};
    const bool timed = step.times && thread == 0;
    int64_t begun = timed ? monotonic_nanoseconds() : 0;
    for (int64_t i = 0; i < count; ++i) {
      if ((operations[i].kind == SHRINK || operations[i].kind == EXPAND) && !step.num_runs) {
        if (timed) step.times[2 * i] = step.times[2 * i + 1] = 0;
        continue;
      }
      runner.run(operations[i], threads <= step.spare ? tickets + i * step.spare : nullptr);
      if (operations[i].kind == REDUCE && step.met) return;
      const int64_t done = timed ? monotonic_nanoseconds() : 0;
      if (operations[i].barrier) others.wait(threads);
      if (!timed) continue;
      step.times[2 * i] = done - begun;
      begun = monotonic_nanoseconds();
      step.times[2 * i + 1] = begun - done;
    }
  });
}

}  // namespace
}  // namespace octavo

using namespace octavo;

OCTAVO_EXPORT(program_f32)(Step* step, const Operation* operations, int64_t count) {
  run_program<float>(*step, operations, count);
}

OCTAVO_EXPORT(program_bf16)(Step* step, const Operation* operations, int64_t count) {
  run_program<bfloat16>(*step, operations, count);
}

// Comes to the next meeting of ranks. met: what `meet` returns.
OCTAVO_EXPORT(meet_ranks)(Ranks* ranks, int64_t* met) { *met = meet(*ranks); }

// Says that this rank fails to carry out the order: ranks that wait for it return.
OCTAVO_EXPORT(fail_rank)(Ranks* ranks) {
  RankLine& own = line_of(*ranks, ranks->rank);
  __atomic_store_n(&own.failed, ranks->order, __ATOMIC_SEQ_CST);
  ring(own);
}

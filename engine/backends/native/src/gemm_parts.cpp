// Products of any kind, by its number, and of several matrices of different kinds whose outputs lie one after the other.
#include "gemm.h"

namespace octavo::gemm {
namespace {

struct Part {
  int64_t kind, outputs;
  const void* weight;
};

}  // namespace

void part_of(int64_t kind, const Product& p, int thread, int threads) {
  switch (kind) {
    case BY_FLOAT32: return float32_part(p, thread, threads);
    case BY_BFLOAT16: return bfloat16_part(p, thread, threads);
    case BY_INT8: return int8_part(p, thread, threads);
    case BY_INT8_ROTATED: return int8_rotated_part(p, thread, threads);
    case BY_INT8_FAST: return int8_fast_part(p, thread, threads);
    case BY_INT4: return int4_part(p, thread, threads);
    case BY_AMX_FLOAT32: return amx_float32_part(p, thread, threads);
    case BY_AMX_BFLOAT16: return amx_bfloat16_part(p, thread, threads);
    case BY_AMX_INT8: return amx_int8_part(p, thread, threads);
    case BY_AMX_INT8_ROTATED: return amx_int8_rotated_part(p, thread, threads);
    case BY_AMX_INT4: return amx_int4_part(p, thread, threads);
    case BY_Q4_0: return q4_0_part(p, thread, threads);
    case BY_Q5_0: return q5_0_part(p, thread, threads);
    case BY_Q5_1: return q5_1_part(p, thread, threads);
    case BY_Q2_K: return q2_k_part(p, thread, threads);
    case BY_Q3_K: return q3_k_part(p, thread, threads);
    case BY_Q4_K: return q4_k_part(p, thread, threads);
    case BY_Q5_K: return q5_k_part(p, thread, threads);
    case BY_Q6_K: return q6_k_part(p, thread, threads);
    case BY_IQ4_NL: return iq4_nl_part(p, thread, threads);
    case BY_IQ4_XS: return iq4_xs_part(p, thread, threads);
    case BY_MXFP4: return mxfp4_part(p, thread, threads);
    case BY_INT4_128: return int4_128_part(p, thread, threads);
    case BY_E4M3: return e4m3_part(p, thread, threads);
    default: return parts_part(p, thread, threads);
  }
}

// The weight is how many parts there are, and then these. The workspace has room for the largest tiles of any.
void parts_part(const Product& p, int thread, int threads) {
  const int64_t count = *static_cast<const int64_t*>(p.weight);
  const Part* parts = reinterpret_cast<const Part*>(static_cast<const int64_t*>(p.weight) + 1);
  Product own = p;
  own.tickets = nullptr;  // they are those of one product
  for (int64_t i = 0; i < count; ++i) {
    if (i) barrier(threads);  // the tiles of this part lie where those of the last do
    own.weight = parts[i].weight;
    own.outputs = parts[i].outputs;
    part_of(parts[i].kind, own, thread, threads);
    own.y = static_cast<char*>(own.y) + own.outputs * (p.y_format == FLOAT32 ? 4 : 2);
    if (own.bias) own.bias += own.outputs;
  }
}

OCTAVO_EXPORT(gemm_parts)(const void* x, void* y, const void* weight, const float* bias, void* workspace,
                          int64_t workspace_tiles, int64_t x_format, int64_t y_format, int64_t x_stride,
                          int64_t y_stride, int64_t rows, int64_t outputs, int64_t inputs) {
  product({x, y, weight, bias, workspace, workspace_tiles, x_format, y_format, x_stride, y_stride, rows, outputs, inputs},
          parts_part);
}

}  // namespace octavo::gemm

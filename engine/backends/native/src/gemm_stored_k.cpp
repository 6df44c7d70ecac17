// Products of weights in Q4_K, Q5_K and Q6_K.
#include "gemm_stored.h"

namespace octavo::gemm {

OCTAVO_EXPORT_STORED(q4_k, Q4_K)
OCTAVO_EXPORT_STORED(q5_k, Q5_K)
OCTAVO_EXPORT_STORED(q6_k, Q6_K)

}  // namespace octavo::gemm

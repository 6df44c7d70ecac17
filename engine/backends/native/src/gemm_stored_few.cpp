// Products of weights in Q2_K and Q3_K, and in formats whose integers stand for entries of a table.
#include "gemm_stored.h"

namespace octavo::gemm {

OCTAVO_EXPORT_STORED(q2_k, Q2_K)
OCTAVO_EXPORT_STORED(q3_k, Q3_K)
OCTAVO_EXPORT_STORED(iq4_nl, IQ4_NL)
OCTAVO_EXPORT_STORED(iq4_xs, IQ4_XS)
OCTAVO_EXPORT_STORED(mxfp4, MXFP4)

}  // namespace octavo::gemm

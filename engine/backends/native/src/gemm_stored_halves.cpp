// Products of weights in Q4_0, Q5_0 and Q5_1, and in our own 4 bits with scales of 128 inputs. Q4_1 and Q8_0 are what gemm_int4.cpp and gemm_int8.cpp multiply.
#include "gemm_stored.h"

namespace octavo::gemm {

OCTAVO_EXPORT_STORED(q4_0, Q4_0)
OCTAVO_EXPORT_STORED(q5_0, Q5_0)
OCTAVO_EXPORT_STORED(q5_1, Q5_1)
OCTAVO_EXPORT_STORED(int4_128, INT4_128)

}  // namespace octavo::gemm

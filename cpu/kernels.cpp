// One instruction set's kernels. CMake compiles this file once for each, with its flags and
// SPARK_KERNELS set to the name of the table. Everything here has internal linkage: an inline
// function shared between sets could be linked from the wrong one.
#include "kernels.h"

#if defined(__AVX512BW__)
#include "vector_avx512.h"
#elif defined(__AVX2__)
#include "vector_avx2.h"
#else
#include "vector_portable.h"
#endif

#include "attention.h"
#include "delta.h"
#include "product.h"
#include "recall.h"

namespace spark {

// In the order of kernels.h.
extern const Kernels SPARK_KERNELS = {product, quantize, quantize_block, arrange, block_of, rms_norm, rotate,
                                      store_f16, store_q8, store_q4, silu_mul, gelu_mul, add, scale, sigmoid, softcap, fold_experts,
                                      exp_minus, sum32, attend, summarize, choose, convolve, unit, delta_gates, delta_step};

} // namespace spark

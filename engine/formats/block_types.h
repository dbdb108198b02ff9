/* The block types that have kernels, a record each. There is no other list of them: C and C++ (cpu/spark_cpu.h), CUDA
 * (cuda/types.cuh) and Python (block_types.py beside this file, which takes a line of X(...) as a record) read this one.
 * docs/kernels.md, "Adding a block type", has what else a type needs.
 *
 *   X(name, id, elements, bytes, kind, stage, scales)
 *
 * name, id: as in the GGUF format. elements, bytes: of a block; types without blocks have one element in each.
 * kind: how steps of up to 32 tokens multiply it, one of BLOCK_KINDS.
 * stage, scales: of CUDA's products of longer steps (cuda/dequantize.cuh): weights of a row that are copied together,
 * and the words of scales that are made of them.
 */
#pragma once

#define BLOCK_TYPES(X)                      \
    X(F32, 0, 1, 4, PLAIN, 64, 0)           \
    X(F16, 1, 1, 2, PLAIN, 64, 0)           \
    X(BF16, 30, 1, 2, PLAIN, 64, 0)         \
    X(Q8_0, 8, 32, 34, WHOLE, 128, 4)       \
    X(Q4_0, 2, 32, 18, WHOLE, 256, 8)       \
    X(Q4_1, 3, 32, 20, WHOLE, 256, 8)       \
    X(Q5_0, 6, 32, 22, WHOLE, 256, 8)       \
    X(Q5_1, 7, 32, 24, WHOLE, 256, 8)       \
    X(Q2_K, 10, 256, 84, HALVES, 256, 16)   \
    X(Q3_K, 11, 256, 110, FOURS, 256, 8)    \
    X(Q4_K, 12, 256, 144, PAIRS, 256, 8)    \
    X(Q5_K, 13, 256, 176, WHOLE, 256, 8)    \
    X(Q6_K, 14, 256, 210, HALVES, 256, 8)   \
    X(IQ2_XXS, 16, 256, 66, WHOLE, 256, 8)  \
    X(IQ2_XS, 17, 256, 74, HALVES, 256, 8)  \
    X(IQ3_XXS, 18, 256, 98, WHOLE, 256, 8)  \
    X(IQ4_NL, 20, 32, 18, WHOLE, 256, 8)    \
    X(IQ3_S, 21, 256, 110, WHOLE, 256, 8)   \
    X(IQ2_S, 22, 256, 82, HALVES, 256, 8)   \
    X(IQ4_XS, 23, 256, 136, WHOLE, 256, 8)  \
    X(MXFP4, 39, 32, 17, WHOLE, 256, 8)     \
    X(NVFP4, 40, 64, 36, SIXTEENS, 256, 8)

/* PLAIN: a float type; activations are not quantized. WHOLE: a scale for 32 weights. HALVES: integer factors for each
 * 16 of the 32 besides, of the scale and, where there is one, of the minimum. SIXTEENS: a scale for each 16. PAIRS: as
 * WHOLE; for one token on CUDA, two lanes share the bytes of two blocks (split_term). FOURS: as HALVES; there four lanes
 * share those of four (quad_term). */
#define BLOCK_KINDS(X) X(PLAIN) X(WHOLE) X(HALVES) X(SIXTEENS) X(PAIRS) X(FOURS)

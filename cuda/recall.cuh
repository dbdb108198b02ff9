// What the kernels of recall share: the parts of a sketch (engine/ops/sketches.py), and masses (docs/arithmetic.md, "Recall").
// Macros, where sketches are read or made: SKETCHES, and HEAD_DIM, at most 512.
#pragma once

#include "arithmetic.cuh"

constexpr i32 KV_BLOCK = 64, TAIL_BLOCKS = 3; // engine/ops/__init__.py

#ifdef SKETCHES
// The parts of a sketch (engine/ops/sketches.py): codes of the kept channels from byte 0 on, and where the others begin.
constexpr i32 KEPT = HEAD_DIM / 2, RANKS = 16, WORDS = (KEPT + RANKS - 1) / RANKS, MASKS = (HEAD_DIM + WARP - 1) / WARP;
constexpr i32 MASK_AT = WORDS * KV_BLOCK * 4, BASE_AT = MASK_AT + 4 * MASKS, STEP_AT = BASE_AT + 2 * HEAD_DIM;
constexpr i32 SKETCH_BYTES = (STEP_AT + 2 * KEPT + 3) / 4 * 4;
#endif

constexpr u32 NAN_BITS = 0x7fc00000u;
#define LEAST __int_as_float((i32)0xff800000u)

constexpr i32 CHUNK = 8; // blocks whose masses are summed together: CHUNK_BLOCKS of engine/ops/__init__.py

// The largest number of some; what is none is skipped.
DEVICE float largest(float a, float b) { return b > a ? b : a; }

// Added to a float of less than 2^22, it rounds it to an integer, to even, which is in the last bits: ROUNDING_BITS more than that.
constexpr float ROUNDING = 12582912.0f; // 1.5 * 2^23
constexpr i32 ROUNDING_BITS = 0x4b400000;

// exponential(x) where x is not above 0, or NaN, without conversions, of which there are few a cycle.
DEVICE float decay(float x) {
    const float shifted = x * 0x1.715476p+0f + ROUNDING;
    const float result =
        exponential_fraction(x, shifted - ROUNDING) * __int_as_float((__float_as_int(shifted) << 23) + 0x3f800000);
    return x < -87.0f ? 0.0f : result;
}

// What a chunk's masses are multiplied with to have the top of all.
DEVICE float factor_of(float top_of_chunk, float top) { return top_of_chunk == LEAST ? 0.0f : decay(top_of_chunk - top); }

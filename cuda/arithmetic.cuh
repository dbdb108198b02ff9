// The pieces of docs/arithmetic.md that kernels share. Twin: the same names in engine/ops/arithmetic.py.
//
// Compiled with --fmad=false: an fma is written __fmaf_rn, everything else rounds after each operation.
#pragma once

#include "ptx.cuh"

// The tree over the 32 lanes. Addition commutes, so the exchange leaves lane 0's result in every lane.
DEVICE float fold(float acc) {
#pragma unroll
    for (i32 o = 16; o > 0; o >>= 1)
        acc = acc + __shfl_xor_sync(FULL_WARP, acc, o);
    return acc;
}

// The tree over N (a power of two, at most 32) accumulators at once: lane i returns the fold of acc[i / (32 / N)].
// At each step half of the accumulators stay and the others are handed over, so N = 8 takes 9 exchanges, not 40.
template <i32 N>
DEVICE float fold_rows(float (&acc)[N]) {
    const i32 lane = threadIdx.x % WARP;
    i32 n = N;
#pragma unroll
    for (i32 o = 16; o > 0; o >>= 1) {
        const bool upper = lane & o;
        if (n > 1) {
            n >>= 1;
#pragma unroll
            for (i32 r = 0; r < N / 2; r++)
                if (r < n) {
                    const float sent = upper ? acc[r] : acc[r + n];
                    acc[r] = (upper ? acc[r + n] : acc[r]) + __shfl_xor_sync(FULL_WARP, sent, o);
                }
        } else {
            acc[0] = acc[0] + __shfl_xor_sync(FULL_WARP, acc[0], o);
        }
    }
    return acc[0];
}

// e^x / 2^n, where n is x / ln 2, rounded.
DEVICE float exponential_fraction(float x, float n) {
    float r = __fmaf_rn(n, -0x1.62e400p-1f, x);
    r = __fmaf_rn(n, -0x1.7f7d1cp-20f, r);
    float p = 0x1.6c16c2p-10f;
    p = __fmaf_rn(p, r, 0x1.111112p-7f);
    p = __fmaf_rn(p, r, 0x1.555556p-5f);
    p = __fmaf_rn(p, r, 0x1.555556p-3f);
    p = __fmaf_rn(p, r, 0.5f);
    p = __fmaf_rn(p, r, 1.0f);
    return __fmaf_rn(p, r, 1.0f); // a NaN reaches it through r
}

DEVICE float exponential(float x) {
    const float clamped = x > 88.0f ? 88.0f : x; // NaN stays
    const float n = rintf(clamped * 0x1.715476p+0f);
    // n is in [-126, 127] wherever the result is used; the clamp only keeps a NaN's or a small x's shift defined.
    const i32 exponent = min(max(__float2int_rn(n), -126), 127);
    const float result = exponential_fraction(clamped, n) * __int_as_float((exponent + 127) << 23);
    return clamped < -87.0f ? 0.0f : result;
}

DEVICE float silu(float x) { return x / (1.0f + exponential(-x)); }

DEVICE float gelu(float x) {
    return x / (1.0f + exponential((-x) * __fmaf_rn(0x1.2444f2p-4f, x * x, 0x1.988454p+0f)));
}

// cap * tanh(x / cap)
DEVICE float softcap(float x, float cap) {
    const float u = x / cap, tanh = 1.0f - 2.0f / (exponential(u + u) + 1.0f);
    return tanh * cap;
}

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

DEVICE float softplus(float x) {
    const float y = exponential(-fabsf(x)), s = y / (2.0f + y), square = s * s;
    float p = 1.0f / 17;
#pragma unroll
    for (i32 n = 15; n > 0; n -= 2)
        p = __fmaf_rn(p, square, 1.0f / (float)n);
    return fmaxf(x, 0.0f) + (s + s) * p; // a NaN is in p
}

// A block of 32 activations, one a lane: the lane's q; d and the integer sum of the block in every lane.
DEVICE i32 quantize_one(float x, float& d, i32& sum) {
    // Magnitudes order as their bits do, and what is not finite comes last.
    const u32 top = __reduce_max_sync(FULL_WARP, __float_as_uint(x) & 0x7fffffffu);
    const float amax = __uint_as_float(top);
    const bool plain = top < 0x7f800000u && amax >= 0x1p-100f;
    d = plain ? amax / 127.0f : (top < 0x7f800000u ? 0.0f : __uint_as_float(0x7fc00000u));
    const float inverse = plain ? 127.0f / amax : 0.0f;
    const i32 q = plain ? __float2int_rn(x * inverse) : 0;
    sum = __reduce_add_sync(FULL_WARP, q);
    return q;
}

// The lane's element of a block of 32 in 4 bits, 0 to 15, as GGUF's Q4_0. Twin: quantize_nibbles.
DEVICE u32 quantize_nibble(float x, float& d) {
    const u32 magnitude = __float_as_uint(x) & 0x7fffffffu, top = __reduce_max_sync(FULL_WARP, magnitude);
    const float extreme = __shfl_sync(FULL_WARP, x, __ffs(__ballot_sync(FULL_WARP, magnitude == top)) - 1);
    const bool finite = top < 0x7f800000u, plain = finite && __uint_as_float(top) >= 0x1p-100f;
    d = finite ? extreme / -8.0f : __uint_as_float(0x7fc00000u);
    return plain ? min((i32)__fmaf_rn(x, 1.0f / d, 8.5f), 15) : 8;
}

// dot32(x, x) of a row, by one warp; n elements in shared memory, or with a larger `unroll` in global memory.
template <i32 unroll = 8>
DEVICE float square_sum(const float* x, i32 n) {
    float acc = 0.0f;
#pragma unroll unroll
    for (i32 i = threadIdx.x % WARP; i < n; i += WARP) {
        const float v = x[i];
        acc = __fmaf_rn(v, v, acc);
    }
    return fold(acc);
}

// The scale of an RMS norm; an element is then (x * scale) * weight.
DEVICE float norm_scale(float squares, i32 n, float eps) {
    return 1.0f / __fsqrt_rn(squares / (float)n + eps);
}

// A block of 32 activations in eight neighboring lanes, four in each: the lane's four q, packed; d and the sum in
// every lane of the eight. The whole warp takes part, so it does four blocks at once.
DEVICE u32 quantize4(const float (&x)[4], float& d, i32& sum) {
    u32 top = 0;
#pragma unroll
    for (i32 i = 0; i < 4; i++)
        top = max(top, __float_as_uint(x[i]) & 0x7fffffffu);
#pragma unroll
    for (i32 o = 1; o < 8; o <<= 1)
        top = max(top, __shfl_xor_sync(FULL_WARP, top, o));
    const float amax = __uint_as_float(top);
    const bool plain = top < 0x7f800000u && amax >= 0x1p-100f;
    d = plain ? amax / 127.0f : (top < 0x7f800000u ? 0.0f : __uint_as_float(0x7fc00000u));
    const float inverse = plain ? 127.0f / amax : 0.0f;
    u32 packed = 0;
#pragma unroll
    for (i32 i = 0; i < 4; i++)
        packed |= (u32)((plain ? __float2int_rn(x[i] * inverse) : 0) & 0xff) << (8 * i);
    sum = __dp4a((i32)packed, 0x01010101, 0);
#pragma unroll
    for (i32 o = 1; o < 8; o <<= 1)
        sum += __shfl_xor_sync(FULL_WARP, sum, o);
    return packed;
}

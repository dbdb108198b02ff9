// Activations as halves for the tensor cores. Twin: rms_norm, then rounding.
//
// Row t of values [T, stride] and scale [T] from row rows[t] (or t, where rows is null) of x [.., K], RMS-normed first
// where weight [K] is given; h [T, K], where given, gets the same in float32. x ~ values * scale, scale a power of two
// that brings the row's largest magnitude to 2^14..2^15; a row with a NaN or an infinity has scale NaN. stride: K
// rounded up to 64; the rest are zeros. Within each 16 elements the even ones come first (gemm_tile.cuh says why).
// Grid T, block 256, shared memory K floats.
#include "ptx.cuh"

#define HALVES_WARPS 8

DEVICE float block_sum(float v) {
    __shared__ float sums[HALVES_WARPS];
#pragma unroll
    for (i32 o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(FULL_WARP, v, o);
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = v;
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (i32 i = 0; i < HALVES_WARPS; ++i) total += sums[i];
    return total;
}

DEVICE u32 block_max(u32 v) {
    __shared__ u32 tops[HALVES_WARPS];
    v = __reduce_max_sync(FULL_WARP, v);
    if (threadIdx.x % WARP == 0) tops[threadIdx.x / WARP] = v;
    __syncthreads();
    u32 top = 0;
#pragma unroll
    for (i32 i = 0; i < HALVES_WARPS; ++i) top = max(top, tops[i]);
    return top;
}

KERNEL to_halves(const float* x, const i32* rows, const float* weight, float eps, i32 K, i32 stride, u16* values,
                 float* scale, float* h) {
    DYNAMIC_SHARED(float, row);
    const u64 t = blockIdx.x;
    const i32 n = blockDim.x;
    x += (rows ? (u64)(u32)rows[t] : t) * (u32)K;
    float squares = 0.0f;
    u32 top = 0;  // magnitudes order as their bits do, and what is not finite comes last
#pragma unroll 8
    for (i32 i = threadIdx.x; i < K; i += n) {
        const float v = x[i];
        row[i] = v;
        squares = __fmaf_rn(v, v, squares);
        top = max(top, __float_as_uint(v) & 0x7fffffffu);
    }
    if (weight) {
        const float norm = 1.0f / __fsqrt_rn(block_sum(squares) / (float)K + eps);
        top = 0;
        for (i32 i = threadIdx.x; i < K; i += n) {
            const float v = (row[i] * norm) * weight[i];
            row[i] = v;
            if (h) h[t * (u32)K + i] = v;
            top = max(top, __float_as_uint(v) & 0x7fffffffu);
        }
    }
    top = block_max(top);  // also a barrier: every thread's part of the row is there
    const bool finite = top < 0x7f800000u;
    const i32 exponent = max((i32)(top >> 23) - 127, -100) - 14;
    const float inverse = finite ? __uint_as_float((u32)(127 - exponent) << 23) : 0.0f;
    if (threadIdx.x == 0) scale[t] = __uint_as_float(finite ? (u32)(127 + exponent) << 23 : 0x7fc00000u);
    u32* const out = (u32*)(values + t * (u32)stride);
    for (i32 i = threadIdx.x; i < stride / 2; i += n) {
        const i32 first = i / 8 * 16 + i % 4 * 4 + i % 8 / 4;  // and first + 2
        const float low = first < K ? row[first] : 0.0f, high = first + 2 < K ? row[first + 2] : 0.0f;
        out[i] = finite ? pack_halves(low * inverse, high * inverse) : 0;
    }
}

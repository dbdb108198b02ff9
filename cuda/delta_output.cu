// Norm and gate of a gated DeltaNet's heads, and the result as the output's product takes it. Twin: delta_output.
//
// h [T, n_heads, DV] = (y * scale) * norm * silu(z), scale of the RMS norm of each head. -DDV: a multiple of 32.
// gate_quantize: h in 8 bits, or where `plain` is given as floats; a warp a head, any grid of blocks of 256; may
// overlap the kernel ahead, which writes y. gate_halves: values [T, stride] and scale [T] as halves.cu makes them.
// Grid T, block 256, shared memory n_heads * DV floats.
#include "arithmetic.cuh"

constexpr i32 THREADS = 256, WARPS = THREADS / WARP, EACH = DV / WARP;

DEVICE void load_norm(float (&weights)[EACH], const float* norm) {
#pragma unroll
    for (i32 i = 0; i < EACH; i++)
        weights[i] = norm[i * WARP + threadIdx.x % WARP];
}

// Elements lane, lane + 32, ... of a head.
DEVICE void gated(float (&h)[EACH], const float* y, const float* z, const float (&weights)[EACH], float eps) {
    const i32 lane = threadIdx.x % WARP;
    float squares = 0.0f;
#pragma unroll
    for (i32 i = 0; i < EACH; i++) {
        h[i] = y[i * WARP + lane];
        squares = __fmaf_rn(h[i], h[i], squares);
    }
    const float scale = norm_scale(fold(squares), DV, eps);
#pragma unroll
    for (i32 i = 0; i < EACH; i++)
        h[i] = ((h[i] * scale) * weights[i]) * silu(z[i * WARP + lane]);
}

KERNEL __launch_bounds__(THREADS)
    gate_quantize(const float* y, const float* z, const float* norm, float eps, i32 n_heads, i8* q, float* d, i32* sums,
                  float* plain) {
    const i32 lane = threadIdx.x % WARP;
    float weights[EACH];
    dependency_release();
    load_norm(weights, norm);
    dependency_wait();
    for (i64 head = blockIdx.x * WARPS + threadIdx.x / WARP; head < n_heads; head += gridDim.x * WARPS) {
        float h[EACH];
        gated(h, y + head * DV, z + head * DV, weights, eps);
#pragma unroll
        for (i32 i = 0; i < EACH; i++) {
            const i64 block = head * EACH + i;
            if (plain) {
                plain[block * WARP + lane] = h[i];
                continue;
            }
            float scale;
            i32 sum;
            q[block * WARP + lane] = (i8)quantize_one(h[i], scale, sum);
            if (lane == 0) {
                d[block] = scale;
                sums[block] = sum;
            }
        }
    }
}

KERNEL __launch_bounds__(THREADS)
    gate_halves(const float* y, const float* z, const float* norm, float eps, i32 n_heads, i32 stride, u16* values,
                float* scale) {
    DYNAMIC_SHARED(float, row);
    __shared__ u32 tops[WARPS];
    const i64 t = blockIdx.x;
    const i32 n = n_heads * DV, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    float weights[EACH];
    load_norm(weights, norm);
    u32 top = 0; // magnitudes order as their bits do, and what is not finite comes last
#pragma unroll 2
    for (i32 head = warp; head < n_heads; head += WARPS) {
        float h[EACH];
        gated(h, y + t * n + head * DV, z + t * n + head * DV, weights, eps);
#pragma unroll
        for (i32 i = 0; i < EACH; i++) {
            row[head * DV + i * WARP + lane] = h[i];
            top = max(top, __float_as_uint(h[i]) & 0x7fffffffu);
        }
    }
    top = __reduce_max_sync(FULL_WARP, top);
    if (lane == 0)
        tops[warp] = top;
    __syncthreads();
#pragma unroll
    for (i32 i = 0; i < WARPS; i++)
        top = max(top, tops[i]);
    const bool finite = top < 0x7f800000u;
    const i32 exponent = max((i32)(top >> 23) - 127, -100) - 14;
    const float inverse = finite ? __uint_as_float((u32)(127 - exponent) << 23) : 0.0f;
    if (threadIdx.x == 0)
        scale[t] = __uint_as_float(finite ? (u32)(127 + exponent) << 23 : 0x7fc00000u);
    u32* const out = (u32*)(values + t * stride);
    for (i32 i = threadIdx.x; i < stride / 2; i += THREADS) {
        const i32 first = i / 8 * 16 + i % 4 * 4 + i % 8 / 4; // and first + 2, in the order of halves.cu
        const float low = first < n ? row[first] : 0.0f, high = first + 2 < n ? row[first + 2] : 0.0f;
        out[i] = finite ? pack_halves(low * inverse, high * inverse) : 0;
    }
}

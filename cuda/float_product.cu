// Products with a matrix of floats in about float32 accuracy: a router's logits for many tokens. Twin: product.
//
// y [T, N] = w [N, K] x, x float32 [T, K]; TYPE: the weights' (F32, F16, BF16). Each number is split in two of the
// tensor cores' 11 bits, and the product of the two small parts dropped: relative error about 2^-21. A block of 4
// warps does 64 rows of w against 32 tokens. Grid (N / 64 rounded up, T / 32 rounded up), block 128.
#include "dequantize.cuh"
#include "tf32.cuh"

#define TILE_ROWS 64
#define TILE_TOKENS 32
#define TILE_K 32
#define PITCH (TILE_K + 4)  // so that 8 rows of fragments lie in different banks

DEVICE float load_weight(const u8* w, u64 i) {
    if (TYPE == F32) return ((const float*)w)[i];
    static_assert(TYPE == F32 || TYPE == F16 || TYPE == BF16, "TYPE: not a float type");
    const u16 bits = ((const u16*)w)[i];
    return TYPE == F16 ? half_to_float(bits) : bfloat_to_float(bits);
}

KERNEL __launch_bounds__(128) float_product(const u8* w, const float* x, float* y, i32 T, i32 N, i32 K) {
    __shared__ float ws[TILE_ROWS * PITCH], xs[TILE_TOKENS * PITCH];
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, c = lane % 4;
    const i32 row = blockIdx.x * TILE_ROWS, token = blockIdx.y * TILE_TOKENS;
    float next_w[TILE_ROWS / 4], next_x[TILE_TOKENS / 4];
    const auto load = [&](i32 k) {
        k += lane;
#pragma unroll
        for (i32 i = 0; i < TILE_ROWS / 4; ++i) {
            const i32 r = row + 4 * i + warp;
            next_w[i] = r < N && k < K ? load_weight(w, (u64)(u32)r * (u32)K + k) : 0.0f;
        }
#pragma unroll
        for (i32 i = 0; i < TILE_TOKENS / 4; ++i) {
            const i32 t = token + 4 * i + warp;
            next_x[i] = t < T && k < K ? x[(u64)(u32)t * (u32)K + k] : 0.0f;
        }
    };
    float sum[TILE_TOKENS / 8][4] = {};
    load(0);
    for (i32 k0 = 0; k0 < K; k0 += TILE_K) {
        __syncthreads();
#pragma unroll
        for (i32 i = 0; i < TILE_ROWS / 4; ++i) ws[(4 * i + warp) * PITCH + lane] = next_w[i];
#pragma unroll
        for (i32 i = 0; i < TILE_TOKENS / 4; ++i) xs[(4 * i + warp) * PITCH + lane] = next_x[i];
        __syncthreads();
        if (k0 + TILE_K < K) load(k0 + TILE_K);
#pragma unroll
        for (i32 k = 0; k < TILE_K; k += 8) {
            u32 a[2][4];  // high and low parts
#pragma unroll
            for (i32 i = 0; i < 4; ++i)
                split(ws[(16 * warp + g + 8 * (i % 2)) * PITCH + k + c + 4 * (i / 2)], a[0][i], a[1][i]);
#pragma unroll
            for (i32 n = 0; n < TILE_TOKENS / 8; ++n) {
                u32 b[2][2];
#pragma unroll
                for (i32 i = 0; i < 2; ++i) split(xs[(8 * n + g) * PITCH + k + c + 4 * i], b[0][i], b[1][i]);
                mma_tf32(sum[n], a[1], b[0][0], b[0][1]);
                mma_tf32(sum[n], a[0], b[1][0], b[1][1]);
                mma_tf32(sum[n], a[0], b[0][0], b[0][1]);
            }
        }
    }
#pragma unroll
    for (i32 n = 0; n < TILE_TOKENS / 8; ++n)
#pragma unroll
        for (i32 i = 0; i < 4; ++i) {
            const i32 r = row + 16 * warp + g + 8 * (i / 2), t = token + 8 * n + 2 * c + i % 2;
            if (r < N && t < T) y[(u64)(u32)t * (u32)N + r] = sum[n][i];
        }
}

// Products with a matrix of floats in about float32 accuracy: a router's logits for many tokens. Twin: product.
//
// y [T, N] = w [N, K] x, x float32 [T, K]; TYPE: the weights' (F32, F16, BF16). Each number is split in two of the
// tensor cores' 11 bits, and the product of the two small parts dropped: relative error about 2^-21. A block of 8
// warps has 32 rows of w and 32 tokens. Rows are few, so what a product takes is latency: each warp takes every eighth
// part of 32 columns, straight from memory, and the warps' sums are added in order. So a token's result does not depend on
// how many there are. Grid (N / 32 rounded up, T / 32 rounded up), block 256.
#include "dequantize.cuh"
#include "tf32.cuh"

#define TILE 32
#define WARPS 8
#define EACH 8 // columns of a part that a lane has of its rows, one after the other

// Columns k .. k + EACH of a row; zeros behind its end, or if there is no such row.
DEVICE void load_floats(float (&to)[EACH], const float* row, bool exists, i32 k, i32 K) {
    if (K % 4 == 0 && k + EACH <= K && exists) {
        const float4 low = *(const float4*)(row + k), high = *(const float4*)(row + k + 4);
        to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
        to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
        return;
    }
#pragma unroll
    for (i32 i = 0; i < EACH; ++i) to[i] = exists && k + i < K ? row[k + i] : 0.0f;
}

DEVICE void load_weights(float (&to)[EACH], const u8* w, i32 r, bool exists, i32 k, i32 K) {
    static_assert(TYPE == F32 || TYPE == F16 || TYPE == BF16, "TYPE: not a float type");
    if (TYPE == F32) {
        load_floats(to, (const float*)w + (u64)(u32)r * (u32)K, exists, k, K);
        return;
    }
    const u16* const row = (const u16*)w + (u64)(u32)r * (u32)K;
    u16 bits[EACH];
    if (K % 8 == 0 && k + EACH <= K && exists) {
        const uint4 all = *(const uint4*)(row + k);
        const u32 words[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
        for (i32 i = 0; i < EACH; ++i) bits[i] = (u16)(words[i / 2] >> (i % 2 * 16));
    } else {
#pragma unroll
        for (i32 i = 0; i < EACH; ++i) bits[i] = exists && k + i < K ? row[k + i] : 0;
    }
#pragma unroll
    for (i32 i = 0; i < EACH; ++i) to[i] = TYPE == F16 ? half_to_float(bits[i]) : bfloat_to_float(bits[i]);
}

KERNEL __launch_bounds__(WARPS* WARP) float_product(const u8* w, const float* x, float* y, i32 T, i32 N, i32 K) {
    __shared__ float sums[WARPS][TILE][TILE + 1];  // [warp][token][row]
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, c = lane % 4;
    const i32 row = blockIdx.x * TILE, token = blockIdx.y * TILE, parts = (K + TILE - 1) / TILE;
    float next_w[4][EACH], next_x[4][EACH];  // of rows and tokens g + 8 * i
    const auto load = [&](i32 part) {
        const i32 k = part * TILE + c * EACH;
#pragma unroll
        for (i32 i = 0; i < 4; ++i) {
            const i32 r = row + g + 8 * i, t = token + g + 8 * i;
            load_weights(next_w[i], w, r, r < N, k, K);
            load_floats(next_x[i], x + (u64)(u32)t * (u32)K, t < T, k, K);
        }
    };
    float sum[2][4][4] = {};  // [16 rows][8 tokens]
    if (warp < parts) load(warp);
#pragma unroll 1
    for (i32 part = warp; part < parts; part += WARPS) {
        float own_w[4][EACH], own_x[4][EACH];
#pragma unroll
        for (i32 i = 0; i < 4; ++i)
#pragma unroll
            for (i32 e = 0; e < EACH; ++e) own_w[i][e] = next_w[i][e], own_x[i][e] = next_x[i][e];
        if (part + WARPS < parts) load(part + WARPS);
        // Which columns meet in a product does not matter, if they do for both: columns 2 * j and 2 * j + 1 of each lane.
#pragma unroll
        for (i32 j = 0; j < EACH / 2; ++j) {
            u32 a[2][2][4];  // [16 rows][high and low parts]
#pragma unroll
            for (i32 m = 0; m < 2; ++m)
#pragma unroll
                for (i32 i = 0; i < 4; ++i) split(own_w[2 * m + i % 2][2 * j + i / 2], a[m][0][i], a[m][1][i]);
#pragma unroll
            for (i32 n = 0; n < 4; ++n) {
                u32 b[2][2];
#pragma unroll
                for (i32 i = 0; i < 2; ++i) split(own_x[n][2 * j + i], b[0][i], b[1][i]);
#pragma unroll
                for (i32 m = 0; m < 2; ++m) {
                    mma_tf32(sum[m][n], a[m][1], b[0][0], b[0][1]);
                    mma_tf32(sum[m][n], a[m][0], b[1][0], b[1][1]);
                    mma_tf32(sum[m][n], a[m][0], b[0][0], b[0][1]);
                }
            }
        }
    }
#pragma unroll
    for (i32 m = 0; m < 2; ++m)
#pragma unroll
        for (i32 n = 0; n < 4; ++n)
#pragma unroll
            for (i32 i = 0; i < 4; ++i) sums[warp][8 * n + 2 * c + i % 2][16 * m + g + 8 * (i / 2)] = sum[m][n][i];
    __syncthreads();
#pragma unroll
    for (i32 t0 = 0; t0 < TILE; t0 += WARPS) {
        const i32 t = t0 + warp;
        float total = sums[0][t][lane];
#pragma unroll
        for (i32 p = 1; p < WARPS; ++p) total += sums[p][t][lane];
        if (row + lane < N && token + t < T) y[(u64)(u32)(token + t) * (u32)N + row + lane] = total;
    }
}

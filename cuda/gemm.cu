// Dense products with many tokens. Twin: product, but for rounding to halves.
//
// y [T, N] = w_scale times w [N, K] x, or y += it. x: halves with a scale a row, as halves.cu makes them. Grid: (N / (32 * WARPS)
// rounded up, T / TOKENS rounded up), block 32 * WARPS, dynamic shared memory: tile_bytes of engine/ops/cuda/gemm.py.
// TYPE: the weights'. TOKENS: 32, 64 or 128.
#include "gemm_tile.cuh"

template <int tokens>
DEVICE void dense_tile(u8* shared, const Rows& w, const u16* x, const float* x_scale, i32 x_stride, float* y, i32 T,
                       i32 N, i32 K, i32 add, float w_scale) {
    const i32 first = blockIdx.y * TOKENS, lane = threadIdx.x % WARP;
    i32* const token_rows = (i32*)shared;
    for (i32 i = threadIdx.x; i < tokens; i += THREADS) token_rows[i] = min(first + i, T - 1);
    float sum[2][tokens / 8][4];
    multiply<TYPE, 2, tokens>(sum, shared + TOKENS * 4, token_rows, w, x, x_stride, K);
#pragma unroll
    for (i32 n = 0; n < tokens / 8; ++n)
#pragma unroll
        for (i32 e = 0; e < 2; ++e) {
            const i32 t = first + 8 * n + 2 * (lane % 4) + e;
            if (t >= T) continue;
            const float scale = x_scale[t] * w_scale;
#pragma unroll
            for (i32 m = 0; m < 2; ++m)
#pragma unroll
                for (i32 h = 0; h < 2; ++h) {
                    const i32 r = w.row + threadIdx.x / WARP * 32 + 16 * m + 8 * h + lane / 4;
                    if (r >= N) continue;
                    float* const to = y + (u64)t * (u32)N + r;
                    const float value = sum[m][n][2 * h + e] * scale;
                    *to = add ? *to + value : value;
                }
        }
}

KERNEL __launch_bounds__(THREADS, BLOCKS)
    gemm(const u8* w, const u16* x, const float* x_scale, float* y, i32 T, i32 N, i32 K, i32 x_stride, i32 row_bytes,
         i32 add, float w_scale) {
    DYNAMIC_SHARED(u8, shared);
    const Rows rows = {w, nullptr, (i32)blockIdx.x * (32 * WARPS), N - 1, row_bytes};
    const i32 left = T - blockIdx.y * TOKENS;
    if (left > TOKENS / 2)
        dense_tile<TOKENS>(shared, rows, x, x_scale, x_stride, y, T, N, K, add, w_scale);
    else
        dense_tile<TOKENS / 2>(shared, rows, x, x_scale, x_stride, y, T, N, K, add, w_scale);
}

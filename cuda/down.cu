// The second half of the expert FFN with many tokens: y = down z, for some of down's rows. Twin: expert_ffn.
//
// Tiles, source and z (with a scale a row, after join_exponents) as in grouped.cu and gate_up.cu. Row `pair` of y,
// halves [T * A, y_stride] with exponents (store_sixteen), gets down's rows first_row .. first_row + columns - 1;
// y_stride = columns rounded up to 16. TYPE: down's. Grid (columns / (32 * WARPS) rounded up, tiles at most), block
// 32 * WARPS, dynamic shared memory: see gemm.py.
#include "gemm_tile.cuh"

template <int tokens>
DEVICE void down_tile(u8* shared, const Rows& w, const i32* pairs, i32 first, i32 count, const u16* z,
                      const float* z_scale, i32 z_stride, i32 F, u16* y, i8* exponents, i32 row, i32 columns) {
    const i32 lane = threadIdx.x % WARP, y_stride = (columns + 15) / 16 * 16;
    i32* const token_rows = (i32*)shared;
    for (i32 i = threadIdx.x; i < tokens; i += THREADS) token_rows[i] = first + min(i, count - 1);
    float sum[2][tokens / 8][4];
    multiply<TYPE, 2, tokens>(sum, shared + TOKENS * 4, token_rows, w, z, z_stride, F);
#pragma unroll
    for (i32 n = 0; n < tokens / 8; ++n) {
        float scale[2];
        i32 pair[2];
#pragma unroll
        for (i32 e = 0; e < 2; ++e) {
            const i32 token = 8 * n + 2 * (lane % 4) + e;
            scale[e] = z_scale[token_rows[token]];
            pair[e] = token < count ? pairs[token_rows[token]] : -1;
        }
#pragma unroll
        for (i32 m = 0; m < 2; ++m) {
            const i32 sixteen = row / 16 + threadIdx.x / WARP * 2 + m;
            if (16 * sixteen >= y_stride) continue;
            float v[2][2];
#pragma unroll
            for (i32 e = 0; e < 2; ++e)
#pragma unroll
                for (i32 i = 0; i < 2; ++i)
                    v[e][i] = 16 * sixteen + 8 * i + lane / 4 < columns ? sum[m][n][2 * i + e] * scale[e] : 0.0f;
            store_sixteen(v, pair, y, exponents, y_stride, sixteen);
        }
    }
}

KERNEL __launch_bounds__(THREADS, BLOCKS)
    down(const u64* source, const int4* tiles, const i32* n_tiles, const i32* pairs, const u16* z, const float* z_scale,
         i32 z_stride, i32 F, i32 row_bytes, u16* y, i8* exponents, i32 first_row, i32 columns) {
    DYNAMIC_SHARED(u8, shared);
    if ((i32)blockIdx.y >= *n_tiles) return;
    const int4 tile = tiles[blockIdx.y];
    const i32 row = blockIdx.x * (32 * WARPS);
    const Rows rows = {(const u8*)source[3 * tile.x + 2], nullptr, first_row + row, first_row + columns - 1, row_bytes};
    if (tile.z > TOKENS / 2)
        down_tile<TOKENS>(shared, rows, pairs, tile.y, tile.z, z, z_scale, z_stride, F, y, exponents, row, columns);
    else if (tile.z > TOKENS / 4 && TOKENS > 32)
        down_tile<TOKENS / 2>(shared, rows, pairs, tile.y, tile.z, z, z_scale, z_stride, F, y, exponents, row, columns);
    else
        down_tile<(TOKENS > 32 ? TOKENS / 4 : 16)>(shared, rows, pairs, tile.y, tile.z, z, z_scale, z_stride, F, y,
                                                   exponents, row, columns);
}

// The first half of an FFN with many tokens: z = act(gate h) * up h, act silu or, with GELU = 1, gelu. Twins: expert_ffn
// and dense_ffn.
//
// Tiles as group_tokens makes them (grouped.cu): one expert's tokens, at most TOKENS. source u64 [E, 3]: where an
// expert's gate [F, D], up [F, D] and down are. h: halves with a scale a row (halves.cu). z: halves [pairs in sorted
// order, z_stride], z_stride = F rounded up to 64, with exponents (store_sixteen). gate_scales [E] or null, or gate_scale and
// up_scale: what the products are multiplied by. TYPE, UP_TYPE: of the two
// matrices; two types take twice the loads. Grid (z_stride / (16 * WARPS) rounded up, tiles at most), block 32 *
// WARPS, dynamic shared memory: see gemm.py.
//
// gate_up_dense (DENSE = 1): one pair of matrices for all tokens, TOKENS of them a tile, whose rows of z are their own.
#include "gemm_tile.cuh"

#ifndef GELU
#define GELU 0
#endif
#ifndef DENSE
#define DENSE 0
#endif

DEVICE float activate(float x) {
    const float u = GELU ? x * __fmaf_rn(0.0713548163f, x * x, 1.595769122f) : x;
    return x * reciprocal_fast(1.0f + exp2_fast(u * -1.442695041f));
}

// The row of h of a tile's place i; with DENSE, `A` is the tile's first token.
DEVICE i32 token_at(const i32* pairs, i32 A, i32 i) { return DENSE ? A + i : pairs[i] / A; }

template <int tokens>
DEVICE void gate_up_tile(u8* shared, const u8* gate, const u8* up, const i32* pairs, i32 count, i32 A, const u16* h,
                         const float* h_scale, i32 h_stride, i32 D, i32 F, i32 gate_bytes, i32 up_bytes, u16* z,
                         i32 z_stride, i8* exponents, float gate_scale, float up_scale) {
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    i32* const token_rows = (i32*)shared;
    for (i32 i = threadIdx.x; i < tokens; i += THREADS) token_rows[i] = token_at(pairs, A, min(i, count - 1));
    float sum[2][tokens / 8][4];
    const i32 first = blockIdx.x * (16 * WARPS);
    if (TYPE == UP_TYPE) {
        const Rows rows = {gate, up, first, F - 1, gate_bytes};
        multiply<TYPE, 2, tokens>(sum, shared + TOKENS * 4, token_rows, rows, h, h_stride, D);
    } else {
        const Rows gate_rows = {gate, nullptr, first, F - 1, gate_bytes};
        const Rows up_rows = {up, nullptr, first, F - 1, up_bytes};
        multiply<TYPE, 1, tokens>(sum, shared + TOKENS * 4, token_rows, gate_rows, h, h_stride, D);
        multiply<UP_TYPE, 1, tokens>(sum + 1, shared + TOKENS * 4, token_rows, up_rows, h, h_stride, D);
    }

    const i32 sixteen = first / 16 + warp;
    if (16 * sixteen >= z_stride) return;
#pragma unroll
    for (i32 n = 0; n < tokens / 8; ++n) {
        float v[2][2];
        i32 row[2];
#pragma unroll
        for (i32 e = 0; e < 2; ++e) {
            const i32 token = 8 * n + 2 * (lane % 4) + e;
            const float scale = h_scale[token_rows[token]];
            row[e] = token < count ? token : -1;
#pragma unroll
            for (i32 i = 0; i < 2; ++i) {
                const float a = sum[0][n][2 * i + e] * scale * gate_scale;
                const float b = sum[1][n][2 * i + e] * scale * up_scale;
                v[e][i] = 16 * sixteen + 8 * i + lane / 4 < F ? activate(a) * b : 0.0f;
            }
        }
        store_sixteen(v, row, z, exponents, z_stride, sixteen);
    }
}

#if DENSE
KERNEL __launch_bounds__(THREADS, BLOCKS)
    gate_up_dense(const u8* gate, const u8* up, i32 T, const u16* h, const float* h_scale, i32 h_stride, i32 D, i32 F,
                  i32 gate_bytes, i32 up_bytes, u16* z, i32 z_stride, i8* exponents, float gate_scale, float up_scale) {
    DYNAMIC_SHARED(u8, shared);
    const i32 A = blockIdx.y * TOKENS;
    const int4 tile = {0, A, min(TOKENS, T - A), 0};
    const i32* const pairs = nullptr;
#else
KERNEL __launch_bounds__(THREADS, BLOCKS)
    gate_up(const u64* source, const int4* tiles, const i32* n_tiles, const i32* pairs, i32 A, const u16* h,
            const float* h_scale, i32 h_stride, i32 D, i32 F, i32 gate_bytes, i32 up_bytes, u16* z, i32 z_stride,
            i8* exponents, const float* gate_scales) {
    DYNAMIC_SHARED(u8, shared);
    if ((i32)blockIdx.y >= *n_tiles) return;
    const int4 tile = tiles[blockIdx.y];
    const float gate_scale = gate_scales ? gate_scales[tile.x] : 1.0f, up_scale = 1.0f;
    const u8* const gate = (const u8*)source[3 * tile.x];
    const u8* const up = (const u8*)source[3 * tile.x + 1];
    pairs += tile.y;
#endif
    z += (u64)(u32)tile.y * (u32)z_stride;
    exponents += (u64)(u32)tile.y * (z_stride / 16);
    if (tile.z > TOKENS / 2)
        gate_up_tile<TOKENS>(shared, gate, up, pairs, tile.z, A, h, h_scale, h_stride, D, F, gate_bytes, up_bytes, z,
                             z_stride, exponents, gate_scale, up_scale);
    else if (tile.z > TOKENS / 4 && TOKENS > 32)
        gate_up_tile<TOKENS / 2>(shared, gate, up, pairs, tile.z, A, h, h_scale, h_stride, D, F, gate_bytes, up_bytes,
                                 z, z_stride, exponents, gate_scale, up_scale);
    else
        gate_up_tile<(TOKENS > 32 ? TOKENS / 4 : 16)>(shared, gate, up, pairs, tile.z, A, h, h_scale, h_stride, D, F,
                                                      gate_bytes, up_bytes, z, z_stride, exponents, gate_scale, up_scale);
}

// The queries of a block of attention.cu: how its rows are dealt out to warps, and each as a sum of two halves, after an
// exact scaling that brings the row's largest element near 1.
//
// -DROWS=8, 16, 32 or 64 (attention.cu).
#pragma once

#include "chunks.cuh"
#include "kv.cuh"

constexpr i32 MAX_TOKENS = 32; // of a launch
constexpr i32 PART = 16, PARTS = KV_TILE / PART;
constexpr i32 SHARES = BLOCK_TILES; // of the output's dimensions
constexpr i32 TILES = (ROWS + 15) / 16, TILE_ROWS = TILES * 16;
// Row tiles of a warp: what is loaded of keys and values serves all of them.
constexpr i32 HAS = TILES == 4 ? 2 : 1;
constexpr i32 GROUP = TILES / HAS * SHARES * WARP; // threads of a part
constexpr i32 THREADS = PARTS * GROUP;
constexpr bool PACKED = ROWS == 8;  // the high and low halves of 8 rows of q make up one row tile
constexpr bool HELD = PACKED && HEAD_DIM <= 256; // in registers
constexpr i32 OWN = PACKED ? 1 : 2; // rows of a thread in a row tile
constexpr i32 STEPS = (HEAD_DIM + 15) / 16;
constexpr i32 COLUMNS = (HEAD_DIM + 31) / 32 * 4 / SHARES;      // of 8 dimensions, of a warp's output
constexpr i32 Q_STRIDE = STEPS * 16 + 8;                        // halves
constexpr i32 Q_LOW = PACKED ? 8 : TILE_ROWS, Q_ROWS = 2 * Q_LOW; // the low halves of row r are row Q_LOW + r
constexpr i32 MERGE_ROWS = PACKED ? 8 : TILE_ROWS;

// All rows of a chunk, their dimensions in the order of a key's (key_dimension): halves to queries [Q_ROWS, Q_STRIDE],
// from products to scores by row_factor.
DEVICE void store_queries(u16* queries, i32* row_head, i32* row_position, float* row_factor, const float* q,
                          const i32* last, const Chunk& chunk, i32 group, i32 head, i32 n_head, float scale) {
    constexpr i32 WARPS = THREADS / WARP, MINE = MERGE_ROWS / WARPS, PAIRS = (STEPS * 8 + WARP - 1) / WARP;
    const i32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    float2 x[MINE][PAIRS];
#pragma unroll
    for (i32 i = 0; i < MINE; i++) {
        const i32 row = warp + i * WARPS;
        const bool used = row < chunk.n * group;
        i32 t = chunk.first, member = row; // of the group
#pragma unroll 1
        for (; used && member >= group; member -= group)
            t++;
        const i32 h = t * n_head + head * group + member;
#pragma unroll
        for (i32 j = 0; j < PAIRS; j++) {
            const i32 dimension = 2 * (lane + j * WARP);
            x[i][j] = used && dimension < HEAD_DIM ? *(const float2*)(q + (i64)h * HEAD_DIM + dimension)
                                                   : float2{0.0f, 0.0f};
        }
        if (lane == 0) {
            row_head[row] = used ? h : -1;
            row_position[row] = used ? last[t] : -1;
        }
    }
#pragma unroll
    for (i32 i = 0; i < MINE; i++) {
        const i32 row = warp + i * WARPS;
        u32 top = 0;
#pragma unroll
        for (i32 j = 0; j < PAIRS; j++)
            top = max(top, max(__float_as_uint(x[i][j].x) & 0x7fffffffu, __float_as_uint(x[i][j].y) & 0x7fffffffu));
        top = __reduce_max_sync(FULL_WARP, top);
        const i32 exponent = min(max((i32)(top >> 23), 1), 253);
        const float down = __int_as_float((254 - exponent) << 23);
        if (lane == 0)
            row_factor[row] = __int_as_float(exponent << 23) * scale;
#pragma unroll
        for (i32 j = 0; j < PAIRS; j++) {
            const i32 pair = lane + j * WARP, within = pair % 8;
            const i32 column = pair / 8 * 16 + (Keys::BYTES ? within / 2 * 2 + within % 2 * 8 : within * 2);
            const float a = x[i][j].x * down, b = x[i][j].y * down;
            const u32 high = pack_halves(a, b);
            const u32 low = pack_halves(a - half_to_float((u16)high), b - half_to_float((u16)(high >> 16)));
            if (pair < STEPS * 8) {
                *(u32*)(queries + row * Q_STRIDE + column) = high;
                *(u32*)(queries + (Q_LOW + row) * Q_STRIDE + column) = low;
            }
        }
    }
}

// Row operands of mma_f16: 16 rows from `row` on, 16 dimensions.
DEVICE void load_query(u32 (&a)[4], const u16* queries, i32 row, i32 step) {
    const i32 lane = threadIdx.x % WARP;
    load_matrix4(a, queries + (row + lane % 16) * Q_STRIDE + step * 16 + lane / 16 * 8);
}

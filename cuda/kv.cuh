// The paged KV cache: a block of 64 positions of one kv head as a tile in shared memory, and its tensor core fragments.
//
// -DHEAD_DIM=128 (a multiple of 8, at most 256) and -DKV_Q8_0=0 or 1 (q8_0 needs a multiple of 32). The cache is
// [n_slots, K, HEAD_DIM], halves or bytes, with half scales [n_slots, K, HEAD_DIM / 32] for q8_0; the slot of a
// position is table[position / 64] * 64 + position % 64. Arrays are aligned to 16 bytes. Twin: KVLayer of
// engine/ops/__init__.py.
#pragma once

#include "ptx.cuh"

constexpr i32 KV_BLOCK = 64;
constexpr i32 KV_ROW_BYTES = HEAD_DIM * (KV_Q8_0 ? 1 : 2);
// A row of a tile: whole matrix loads (32 halves, or 64 bytes), and 16 bytes more, so that rows start in other banks.
constexpr i32 KV_STRIDE = (KV_ROW_BYTES + 63) / 64 * 64 + 16;
constexpr i32 KV_SCALES = KV_Q8_0 ? HEAD_DIM / 32 : 0; // of a row
constexpr i32 KV_SCALE_WORDS = (KV_SCALES + 1) / 2;
constexpr i32 KV_TILE_BYTES = KV_BLOCK * KV_STRIDE; // multiples of 16
constexpr i32 KV_TILE_SCALE_BYTES = KV_BLOCK * KV_SCALE_WORDS * 4;

// Start copying the first `valid` positions of a physical block; the rest of the tile becomes zeros. The caller
// commits.
template <i32 n_threads>
DEVICE void copy_kv_tile(u8* tile, u8* tile_scales, const u8* cache, const u16* scales, i32 block, i32 valid, i32 head,
                         i32 n_head_kv) {
    constexpr i32 PIECES = KV_ROW_BYTES / 16, COPIES = KV_BLOCK * PIECES;
    constexpr bool ALIKE = n_threads % PIECES == 0; // a thread's copies are of one piece of several rows
    const i64 row0 = (i64)block * KV_BLOCK * n_head_kv + head;
    const u8* const from = cache + row0 * KV_ROW_BYTES;
    const i32 row_step = n_head_kv * KV_ROW_BYTES, thread = threadIdx.x;
#pragma unroll
    for (i32 j = 0; j < (COPIES + n_threads - 1) / n_threads; j++) {
        const i32 i = j * n_threads + thread;
        const i32 position = ALIKE ? thread / PIECES + j * (n_threads / PIECES) : i / PIECES;
        const i32 piece = ALIKE ? thread % PIECES : i % PIECES;
        if (COPIES % n_threads == 0 || i < COPIES)
            copy16_async_if(tile + position * KV_STRIDE + piece * 16, from + position * row_step + piece * 16,
                            position < valid);
    }
#if KV_Q8_0
    // Words: where a row has an odd number of scales, half of the rows begin in the middle of one.
    constexpr i32 WORDS = KV_BLOCK * KV_SCALE_WORDS;
#pragma unroll
    for (i32 j = 0; j < (WORDS + n_threads - 1) / n_threads; j++) {
        const i32 i = j * n_threads + thread, position = i / KV_SCALE_WORDS, word = i % KV_SCALE_WORDS;
        const i64 first = (row0 + (i64)position * n_head_kv) * KV_SCALES / 2 + word;
        if (WORDS % n_threads == 0 || i < WORDS)
            copy4_async_if(tile_scales + i * 4, (const u32*)scales + first, position < valid);
    }
#endif
}

// Dimensions past HEAD_DIM that matrix products read; copies leave them alone, so once is enough.
template <i32 n_threads>
DEVICE void zero_kv_padding(u8* tile) {
    constexpr i32 PIECES = KV_STRIDE / 16 - KV_ROW_BYTES / 16;
    for (i32 i = threadIdx.x; i < KV_BLOCK * PIECES; i += n_threads)
        *(uint4*)(tile + i / PIECES * KV_STRIDE + KV_ROW_BYTES + i % PIECES * 16) = uint4{0, 0, 0, 0};
}

// The scale of 32 dimensions of a position. Read by words: neighboring scales are then one access.
DEVICE u16 kv_scale_bits(const u8* tile_scales, i32 position, i32 part, i32 head, i32 n_head_kv) {
    const i32 i = part + (KV_SCALES % 2 ? (position * n_head_kv + head) % 2 : 0); // KV_BLOCK rows are an even number
    return (u16)(((const u32*)tile_scales)[position * KV_SCALE_WORDS + i / 2] >> i % 2 * 16);
}

DEVICE void set_kv_scale(u8* tile_scales, i32 position, i32 part, i32 head, i32 n_head_kv, u16 bits) {
    const i32 i = part + (KV_SCALES % 2 ? (position * n_head_kv + head) % 2 : 0);
    ((u16*)tile_scales)[position * KV_SCALE_WORDS * 2 + i] = bits;
}

// Two of four signed bytes, whose top bits were flipped, as halves: 1024 + (b + 128) has the byte as its mantissa.
template <u32 selector>
DEVICE u32 bytes_to_halves(u32 flipped) {
    return half2_add(__byte_perm(flipped, 0x64646464u, selector), 0xe480e480u); // - 1152
}

// Dimensions of one mma step, as its column operand holds them: thread c of a group of four has k = 2c, 2c + 1 (first
// register) and 2c + 8, 2c + 9 (second). Bytes come from a matrix load four at a time, so there k is permuted.
DEVICE i32 key_dimension(i32 c, i32 second) { return KV_Q8_0 ? 4 * c + 2 * second : 2 * c + 8 * second; }

constexpr i32 KEY_STEPS = KV_Q8_0 ? 4 : 2; // steps of 16 dimensions in one matrix load

// Keys of 8 positions, KEY_STEPS steps of 16 dimensions from `dimension` on: the column operands of q k^T, unscaled.
DEVICE void key_fragments(u32 (&b)[KEY_STEPS][2], const u8* tile, i32 position, i32 dimension) {
    const i32 lane = threadIdx.x % WARP;
    u32 r[4];
    load_matrix4(r, tile + (position + lane % 8) * KV_STRIDE + dimension * (KV_Q8_0 ? 1 : 2) + lane / 8 * 16);
#if KV_Q8_0
#pragma unroll
    for (i32 step = 0; step < 4; step++) {
        const u32 flipped = r[step] ^ 0x80808080u;
        b[step][0] = bytes_to_halves<0x4140>(flipped);
        b[step][1] = bytes_to_halves<0x4342>(flipped);
    }
#else
    b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
#endif
}

// Values of 32 positions and a slice of 16 dimensions: b[step][tile][.], two steps of 16 positions, two tiles of 8
// dimensions. Column n of tile t is dimension 8 t + n of the slice; for q8_0, rounded to halves, dimension 2 n + t.
DEVICE void value_fragments(u32 (&b)[2][2][2], const u8* tile, const u8* tile_scales, i32 position, i32 dimension,
                            i32 head, i32 n_head_kv) {
    const i32 lane = threadIdx.x % WARP;
#if KV_Q8_0
    u32 r[4];
    load_matrix4_transposed(r, tile + (position + lane) * KV_STRIDE + dimension);
#pragma unroll
    for (i32 i = 0; i < 4; i++) {
        const i32 at = position + 8 * i + lane % 4 * 2;
        const u32 scale = kv_scale_bits(tile_scales, at, dimension / 32, head, n_head_kv) |
                          (u32)kv_scale_bits(tile_scales, at + 1, dimension / 32, head, n_head_kv) << 16;
        const u32 flipped = r[i] ^ 0x80808080u;
        b[i / 2][0][i % 2] = half2_mul(bytes_to_halves<0x4240>(flipped), scale);
        b[i / 2][1][i % 2] = half2_mul(bytes_to_halves<0x4341>(flipped), scale);
    }
#else
#pragma unroll
    for (i32 step = 0; step < 2; step++) {
        u32 r[4];
        const u8* const row = tile + (position + 16 * step + lane % 16) * KV_STRIDE;
        load_matrix4_transposed(r, row + (dimension + lane / 16 * 8) * 2);
        b[step][0][0] = r[0], b[step][0][1] = r[1], b[step][1][0] = r[2], b[step][1][1] = r[3];
    }
#endif
}

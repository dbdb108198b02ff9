// The paged KV cache: a block of 64 positions of one kv head as a tile in shared memory, and its tensor core fragments.
//
// -DHEAD_DIM=128 (a multiple of 8, at most 256; or 384 or 512), -DK_TYPE and -DV_TYPE (kv_types.cuh; types with scales
// need a multiple of 32). The cache is [n_slots, K, HEAD_DIM], halves, bytes or nibbles, with half scales [n_slots, K,
// HEAD_DIM / 32] but for f16; the slot of a position is table[position / 64] * 64 + position % 64. Arrays are aligned
// to 16 bytes. A tile is a block, or with -DTILE=32 or 16 a half or a quarter of one; in it nibbles become bytes, so that
// q4_0 is read as q8_0 is. Twin: KVLayer of engine/ops/__init__.py.
#pragma once

#include "kv_types.cuh"

#ifndef TILE
#define TILE 64
#endif

constexpr i32 KV_BLOCK = 64, KV_TILE = TILE; // positions

// Keys, or values: in the cache, and in a tile.
template <i32 type>
struct Rows {
    static constexpr bool BYTES = type != KV_F16, PACKED = type == KV_Q4_0; // in a tile; in the cache
    static constexpr i32 CACHED_BYTES = KV_ROW_BYTES<type, HEAD_DIM>;
    static constexpr i32 TILE_ROW_BYTES = HEAD_DIM * (BYTES ? 1 : 2);
    // A row of a tile: whole matrix loads (32 halves, or 64 bytes), and 16 bytes more, so that rows start in other
    // banks.
    static constexpr i32 STRIDE = (TILE_ROW_BYTES + 63) / 64 * 64 + 16;
    static constexpr i32 SCALES = BYTES ? HEAD_DIM / 32 : 0; // of a row
    static constexpr i32 SCALE_WORDS = (SCALES + 1) / 2;
    static constexpr i32 TILE_BYTES = KV_TILE * STRIDE; // multiples of 16
    static constexpr i32 TILE_SCALE_BYTES = KV_TILE * SCALE_WORDS * 4;
};
typedef Rows<K_TYPE> Keys;
typedef Rows<V_TYPE> Values;

constexpr i32 KV_SLOT_BYTES =
    Keys::TILE_BYTES + Values::TILE_BYTES + Keys::TILE_SCALE_BYTES + Values::TILE_SCALE_BYTES;

// A tile in shared memory.
struct KvTiles {
    u8 *k, *v, *k_scale, *v_scale;
};

DEVICE KvTiles kv_tiles(u8* slot) {
    constexpr i32 TILES = Keys::TILE_BYTES + Values::TILE_BYTES;
    return {slot, slot + Keys::TILE_BYTES, slot + TILES, slot + TILES + Keys::TILE_SCALE_BYTES};
}

// A copy of 16 bytes from the cache is the lower half of its 32 bytes in the tile where they are nibbles.
template <class R>
constexpr i32 PIECE_BYTES = R::PACKED ? 32 : 16;

// What `copy_kv_rows` does, for keys, values or both, whose rows are R.
template <i32 n_threads, bool windowed, class R, bool of_k, bool of_v>
DEVICE void copy_rows(const KvTiles& tiles, const u8* k, const u8* v, const u16* k_scale, const u16* v_scale, i64 slot,
                      i32 first, i32 from, i32 to, bool with_scales, i32 lowest, i32 valid, i32 head, i32 n_head_kv,
                      i32 thread) {
    constexpr i32 PIECES = R::CACHED_BYTES / 16, COPIES = 16 * PIECES;
    constexpr bool ALIKE = n_threads % PIECES == 0; // a thread's copies are of one piece of several rows
    const i64 row0 = slot * n_head_kv + head;
    const i32 row_bytes = n_head_kv * R::CACHED_BYTES;
    const i64 offset0 = row0 * R::CACHED_BYTES + (first + thread / PIECES) * row_bytes + thread % PIECES * 16;
    const u8 *k_source = k + offset0, *v_source = v + offset0;
    const u32 n_wanted = max(to - from, 0);
#pragma unroll
    for (i32 j = 0; j < (COPIES + n_threads - 1) / n_threads; j++) {
        const i32 i = j * n_threads + thread;
        const i32 position = first + (ALIKE ? thread / PIECES + j * (n_threads / PIECES) : i / PIECES);
        const i32 piece = ALIKE ? thread % PIECES : i % PIECES, target = position * R::STRIDE + piece * PIECE_BYTES<R>;
        if (!ALIKE) {
            const i64 offset = row0 * R::CACHED_BYTES + position * row_bytes + piece * 16;
            k_source = k + offset, v_source = v + offset;
        }
        if ((COPIES % n_threads == 0 || i < COPIES) && (u32)(position - from) < n_wanted) {
            const bool real = position < valid && (!windowed || position >= lowest);
            if (of_k)
                copy16_async_if(tiles.k + target, k_source, real);
            if (of_v)
                copy16_async_if(tiles.v + target, v_source, real);
        }
        k_source += n_threads / PIECES * row_bytes, v_source += n_threads / PIECES * row_bytes;
    }
    if constexpr (R::BYTES) {
        // Words: where a row has an odd number of scales, half of the rows begin in the middle of one.
        constexpr i32 WORDS = 16 * R::SCALE_WORDS;
#pragma unroll
        for (i32 j = 0; j < (WORDS + n_threads - 1) / n_threads; j++) {
            const i32 i = j * n_threads + thread, position = first + i / R::SCALE_WORDS, word = i % R::SCALE_WORDS;
            const i64 at = (row0 + (i64)position * n_head_kv) * R::SCALES / 2 + word;
            const i32 target = (position * R::SCALE_WORDS + word) * 4;
            if ((WORDS % n_threads == 0 || i < WORDS) && with_scales) {
                const bool real = position < valid && (!windowed || position >= lowest);
                if (of_k)
                    copy4_async_if(tiles.k_scale + target, (const u32*)k_scale + at, real);
                if (of_v)
                    copy4_async_if(tiles.v_scale + target, (const u32*)v_scale + at, real);
            }
        }
    }
}

// Start copying the 16 positions from `first` on of the tile that begins at a slot, of those the ones in [from, to);
// from `valid` on, and if `windowed` before `lowest`, they become zeros. Scales, which pass through L1, where they would
// go stale, come all at once if `with_scales`. By n_threads threads, of which this one is `thread`. The caller commits.
template <i32 n_threads, bool windowed>
DEVICE void copy_kv_rows(const KvTiles& tiles, const u8* k, const u8* v, const u16* k_scale, const u16* v_scale,
                         i64 slot, i32 first, i32 from, i32 to, bool with_scales, i32 lowest, i32 valid, i32 head,
                         i32 n_head_kv, i32 thread) {
    constexpr bool BOTH = K_TYPE == V_TYPE;
    copy_rows<n_threads, windowed, Keys, true, BOTH>(tiles, k, v, k_scale, v_scale, slot, first, from, to, with_scales,
                                                     lowest, valid, head, n_head_kv, thread);
    if constexpr (!BOTH)
        copy_rows<n_threads, windowed, Values, false, true>(tiles, k, v, k_scale, v_scale, slot, first, from, to,
                                                            with_scales, lowest, valid, head, n_head_kv, thread);
}

// Nibbles to bytes, in place: what this thread copied of 16 positions, so it need only have waited for its own copies.
template <i32 n_threads, class R>
DEVICE void unpack_rows(u8* tile, i32 first, i32 thread) {
    if constexpr (R::PACKED) {
        constexpr i32 PIECES = R::CACHED_BYTES / 16, COPIES = 16 * PIECES;
#pragma unroll
        for (i32 j = 0; j < (COPIES + n_threads - 1) / n_threads; j++) {
            const i32 i = j * n_threads + thread;
            if (COPIES % n_threads != 0 && i >= COPIES)
                break;
            uint4* const at = (uint4*)(tile + (first + i / PIECES) * R::STRIDE + i % PIECES * PIECE_BYTES<R>);
            const uint4 packed = *at;
#pragma unroll
            for (i32 half = 0; half < 2; half++) {
                const auto bytes = [&](u32 word) { return nibbles_to_flipped(word, 4 * half) ^ 0x80808080u; };
                at[half] = uint4{bytes(packed.x), bytes(packed.y), bytes(packed.z), bytes(packed.w)};
            }
        }
    }
}

// Dimensions past HEAD_DIM that matrix products read; copies leave them alone, so once is enough.
template <i32 n_threads, class R>
DEVICE void zero_kv_padding(u8* tile) {
    constexpr i32 PIECES = R::STRIDE / 16 - R::TILE_ROW_BYTES / 16;
    for (i32 i = threadIdx.x; i < KV_TILE * PIECES; i += n_threads)
        *(uint4*)(tile + i / PIECES * R::STRIDE + R::TILE_ROW_BYTES + i % PIECES * 16) = uint4{0, 0, 0, 0};
}

// The scale of 32 dimensions of a position. Read by words: neighboring scales are then one access.
template <class R>
DEVICE u16 kv_scale_bits(const u8* tile_scales, i32 position, i32 part, i32 head, i32 n_head_kv) {
    const i32 i = part + (R::SCALES % 2 ? (position * n_head_kv + head) % 2 : 0); // KV_TILE rows are an even number
    return (u16)(((const u32*)tile_scales)[position * R::SCALE_WORDS + i / 2] >> i % 2 * 16);
}

// The same without its neighbor in the word, which another warp may be changing.
template <class R>
DEVICE u16 lone_kv_scale_bits(const u8* tile_scales, i32 position, i32 part, i32 head, i32 n_head_kv) {
    const i32 i = part + (R::SCALES % 2 ? (position * n_head_kv + head) % 2 : 0);
    return ((const u16*)tile_scales)[position * R::SCALE_WORDS * 2 + i];
}

template <class R>
DEVICE void set_kv_scale(u8* tile_scales, i32 position, i32 part, i32 head, i32 n_head_kv, u16 bits) {
    const i32 i = part + (R::SCALES % 2 ? (position * n_head_kv + head) % 2 : 0);
    ((u16*)tile_scales)[position * R::SCALE_WORDS * 2 + i] = bits;
}

// Two of four signed bytes, whose top bits were flipped, as halves: 1024 + (b + 128) has the byte as its mantissa.
template <u32 selector>
DEVICE u32 bytes_to_halves(u32 flipped) {
    return half2_add(__byte_perm(flipped, 0x64646464u, selector), 0xe480e480u); // - 1152
}

// Dimensions of one mma step, as its column operand holds them: thread c of a group of four has k = 2c, 2c + 1 (first
// register) and 2c + 8, 2c + 9 (second). Bytes come from a matrix load four at a time, so there k is permuted.
DEVICE i32 key_dimension(i32 c, i32 second) { return Keys::BYTES ? 4 * c + 2 * second : 2 * c + 8 * second; }

constexpr i32 KEY_STEPS = Keys::BYTES ? 4 : 2; // steps of 16 dimensions in one matrix load

// Keys of 8 positions, KEY_STEPS steps of 16 dimensions from `dimension` on: the column operands of q k^T, unscaled.
DEVICE void key_fragments(u32 (&b)[KEY_STEPS][2], const u8* tile, i32 position, i32 dimension) {
    const i32 lane = threadIdx.x % WARP;
    u32 r[4];
    load_matrix4(r, tile + (position + lane % 8) * Keys::STRIDE + dimension * (Keys::BYTES ? 1 : 2) + lane / 8 * 16);
    if constexpr (Keys::BYTES) {
#pragma unroll
        for (i32 step = 0; step < 4; step++) {
            const u32 flipped = r[step] ^ 0x80808080u;
            b[step][0] = bytes_to_halves<0x4140>(flipped);
            b[step][1] = bytes_to_halves<0x4342>(flipped);
        }
    } else {
        b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
    }
}

// Values of 16 positions and 32 dimensions: the column operands of four products with 8 dimensions each. Column n of
// product t is dimension value_dimension(t, n) of the 32. Those with scales are rounded to halves.
DEVICE i32 value_dimension(i32 t, i32 n) { return Values::BYTES ? t / 2 * 16 + 2 * n + t % 2 : 8 * t + n; }

DEVICE void value_fragments(u32 (&b)[4][2], const u8* tile, const u8* tile_scales, i32 position, i32 dimension,
                            i32 head, i32 n_head_kv) {
    const i32 lane = threadIdx.x % WARP;
    const u8* const row = tile + (position + lane % 16) * Values::STRIDE;
    if constexpr (Values::BYTES) {
        u32 r[4];
        load_matrix4_transposed(r, row + dimension + lane / 16 * 16);
#pragma unroll
        for (i32 i = 0; i < 2; i++) {
            const i32 at = position + 8 * i + lane % 4 * 2;
            const u32 scale = kv_scale_bits<Values>(tile_scales, at, dimension / 32, head, n_head_kv) |
                              (u32)kv_scale_bits<Values>(tile_scales, at + 1, dimension / 32, head, n_head_kv) << 16;
#pragma unroll
            for (i32 half = 0; half < 2; half++) {
                const u32 flipped = r[2 * half + i] ^ 0x80808080u;
                b[2 * half][i] = half2_mul(bytes_to_halves<0x4240>(flipped), scale);
                b[2 * half + 1][i] = half2_mul(bytes_to_halves<0x4341>(flipped), scale);
            }
        }
    } else {
#pragma unroll
        for (i32 half = 0; half < 2; half++) {
            u32 r[4];
            load_matrix4_transposed(r, row + (dimension + half * 16 + lane / 16 * 8) * 2);
            b[2 * half][0] = r[0], b[2 * half][1] = r[1], b[2 * half + 1][0] = r[2], b[2 * half + 1][1] = r[3];
        }
    }
}

// Brings blocks of a layer's cache from their homes, in host memory, to the staging area, where attention reads them. Twin:
// stage of engine/ops/reference.py.
//
// absent: how many, then which; block absent[1 + j] of the homes becomes block j of the staging area. block_bytes: of a block
// of keys, and of values; scale_bytes: of its scales, 0: none. Multiples of 16, as are addresses. Any grid, blocks of THREADS.
#include "ptx.cuh"

#define THREADS 256
#define PIECES 4 // that a thread has under way: the link to the host is long

DEVICE void copy_part(u8* to, const u8* from, i32 n_bytes, i32 begin) {
    uint4 held[PIECES];
#pragma unroll
    for (i32 i = 0; i < PIECES; i++) {
        const i32 at = begin + (i * THREADS + (i32)threadIdx.x) * 16;
        if (at < n_bytes)
            held[i] = *(const uint4*)(from + at);
    }
#pragma unroll
    for (i32 i = 0; i < PIECES; i++) {
        const i32 at = begin + (i * THREADS + (i32)threadIdx.x) * 16;
        if (at < n_bytes)
            *(uint4*)(to + at) = held[i];
    }
}

KERNEL stage(const i32* absent, const u8* k, const u8* v, const u8* k_scale, const u8* v_scale, u8* to_k, u8* to_v,
             u8* to_k_scale, u8* to_v_scale, i32 block_bytes, i32 scale_bytes) {
    constexpr i32 PART = THREADS * PIECES * 16;
    const i32 parts = (block_bytes + PART - 1) / PART, scale_parts = (scale_bytes + PART - 1) / PART;
    const i32 each = 2 * (parts + scale_parts), n = absent[0] * each;
    for (i32 u = blockIdx.x; u < n; u += gridDim.x) {
        const i32 j = u / each, unit = u % each, part = unit / 2;
        const i64 from = absent[1 + j], to = j;
        const bool is_v = unit % 2;
        if (part < parts)
            copy_part((is_v ? to_v : to_k) + to * block_bytes, (is_v ? v : k) + from * block_bytes, block_bytes, part * PART);
        else
            copy_part((is_v ? to_v_scale : to_k_scale) + to * scale_bytes,
                      (is_v ? v_scale : k_scale) + from * scale_bytes, scale_bytes, (part - parts) * PART);
    }
}

// Brings blocks of a layer's cache from their homes, in host memory, to the staging area, where attention reads them. Twin:
// stage of engine/ops/reference.py.
//
// absent: how many, then which; block absent[1 + j] of the homes becomes block j of the staging area. k_bytes, v_bytes:
// of a block of keys, of values; k_scale_bytes, v_scale_bytes: of its scales, 0: none. Multiples of 16, as are
// addresses. Any grid, blocks of THREADS.
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
             u8* to_k_scale, u8* to_v_scale, i32 k_bytes, i32 v_bytes, i32 k_scale_bytes, i32 v_scale_bytes) {
    constexpr i32 PART = THREADS * PIECES * 16;
    const auto parts = [](i32 n_bytes) { return (n_bytes + PART - 1) / PART; };
    const i32 k_end = parts(k_bytes), v_end = k_end + parts(v_bytes);
    const i32 k_scale_end = v_end + parts(k_scale_bytes), each = k_scale_end + parts(v_scale_bytes);
    const i32 n = absent[0] * each;
    for (i32 u = blockIdx.x; u < n; u += gridDim.x) {
        const i64 from = absent[1 + u / each], to = u / each;
        const i32 part = u % each;
        const auto copy = [&](u8* target, const u8* source, i32 n_bytes, i32 first) {
            copy_part(target + to * n_bytes, source + from * n_bytes, n_bytes, (part - first) * PART);
        };
        if (part < k_end)
            copy(to_k, k, k_bytes, 0);
        else if (part < v_end)
            copy(to_v, v, v_bytes, k_end);
        else if (part < k_scale_end)
            copy(to_k_scale, k_scale, k_scale_bytes, v_end);
        else
            copy(to_v_scale, v_scale, v_scale_bytes, k_scale_end);
    }
}

// Brings blocks of a layer's cache from their homes, in host memory, to the staging area, where attention reads them. Twin:
// stage of engine/ops/reference.py.
//
// absent: how many, then which; block absent[1 + j] of the homes becomes block j of the staging area. k_bytes, v_bytes:
// of a block of keys, of values; k_scale_bytes, v_scale_bytes: of its scales, 0: none. Multiples of 16, as are
// addresses. Any grid, blocks of THREADS.
// With -DN_HEAD=K, at most MOST_HEADS, wanted [K, stride] says what of them: of KV head h as many blocks as wanted[h][0],
// those of the staging area that follow it there. All else of the area stays as it is.
#include "ptx.cuh"

#define THREADS 256
#define PIECES 4 // that a thread has under way: the link to the host is long
#define MOST_HEADS 128

constexpr i32 PART = THREADS * PIECES * 16;
DEVICE i32 parts_of(i32 n_bytes) { return (n_bytes + PART - 1) / PART; }

// One array of a layer: of n_bytes a block.
struct Copied {
    u8* to;
    const u8* from;
    i32 n_bytes;
};

// Pieces of 16 bytes of n_bytes; place(at) says where one lies that is `at` bytes behind the first, from a multiple of 16.
template <typename Place> DEVICE void copy_part(u8* to, const u8* from, i32 n_bytes, i32 part, Place place) {
    uint4 held[PIECES];
#pragma unroll
    for (i32 i = 0; i < PIECES; i++) {
        const i32 at = part * PART + (i * THREADS + (i32)threadIdx.x) * 16;
        if (at < n_bytes)
            held[i] = *(const uint4*)(from + place(at));
    }
#pragma unroll
    for (i32 i = 0; i < PIECES; i++) {
        const i32 at = part * PART + (i * THREADS + (i32)threadIdx.x) * 16;
        if (at < n_bytes)
            *(uint4*)(to + place(at)) = held[i];
    }
}

#ifdef N_HEAD

constexpr i32 KV_BLOCK = 64; // engine/ops/__init__.py
static_assert(N_HEAD <= MOST_HEADS, "counts in shared memory");

// What a head has in each row of a block: of scales that may be 2 bytes.
DEVICE void copy_head(const Copied& of, i64 from, i64 to, i32 head, i32 part) {
    const i32 row_bytes = of.n_bytes / KV_BLOCK, own_bytes = row_bytes / N_HEAD;
    const auto place = [&](i32 at) { return at / own_bytes * row_bytes + head * own_bytes + at % own_bytes; };
    u8* const target = of.to + to * of.n_bytes;
    const u8* const source = of.from + from * of.n_bytes;
    if (own_bytes % 16 == 0)
        return copy_part(target, source, KV_BLOCK * own_bytes, part, place);
    const i32 end = min((part + 1) * PART, KV_BLOCK * own_bytes);
    for (i32 at = part * PART + 2 * (i32)threadIdx.x; at < end; at += 2 * THREADS)
        *(u16*)(target + place(at)) = *(const u16*)(source + place(at));
}

#endif

KERNEL stage(const i32* absent, const u8* k, const u8* v, const u8* k_scale, const u8* v_scale, u8* to_k, u8* to_v,
             u8* to_k_scale, u8* to_v_scale, i32 k_bytes, i32 v_bytes, i32 k_scale_bytes, i32 v_scale_bytes
#ifdef N_HEAD
             , const i32* wanted, i32 stride
#endif
) {
#ifdef N_HEAD
    constexpr i32 SHARES = N_HEAD;
    __shared__ i32 counts[N_HEAD];
    for (i32 h = threadIdx.x; h < N_HEAD; h += THREADS)
        counts[h] = wanted[(i64)h * stride];
    __syncthreads();
    i32 n_blocks = 0;
    for (i32 h = 0; h < N_HEAD; h++)
        n_blocks += counts[h];
#else
    constexpr i32 SHARES = 1;
    const i32 n_blocks = absent[0];
#endif
    const i32 k_end = parts_of(k_bytes / SHARES), v_end = k_end + parts_of(v_bytes / SHARES);
    const i32 k_scale_end = v_end + parts_of(k_scale_bytes / SHARES);
    const i32 each = k_scale_end + parts_of(v_scale_bytes / SHARES);
    for (i32 u = blockIdx.x; u < n_blocks * each; u += gridDim.x) {
        const i32 part = u % each;
        i32 to = u / each;
#ifdef N_HEAD
        i32 head = 0;
        for (; to >= counts[head]; head++)
            to -= counts[head];
        to = wanted[(i64)head * stride + 1 + to];
#endif
        const i64 from = absent[1 + to];
        const auto copy = [&](const Copied& of, i32 first) {
#ifdef N_HEAD
            copy_head(of, from, to, head, part - first);
#else
            copy_part(of.to + (i64)to * of.n_bytes, of.from + from * of.n_bytes, of.n_bytes, part - first,
                      [](i32 at) { return at; });
#endif
        };
        if (part < k_end)
            copy({to_k, k, k_bytes}, 0);
        else if (part < v_end)
            copy({to_v, v, v_bytes}, k_end);
        else if (part < k_scale_end)
            copy({to_k_scale, k_scale, k_scale_bytes}, v_end);
        else
            copy({to_v_scale, v_scale, v_scale_bytes}, k_scale_end);
    }
}

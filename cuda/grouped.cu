// Tokens grouped by expert, and what lies between the grouped products of gate_up.cu and down.cu.
//
// A pair p = t * A + a is the use of expert experts[t][a] by token t. `group_tokens` sorts pairs by expert (stably)
// and cuts each expert's pairs in tiles of at most tile_tokens: {expert, first position among the sorted, count, 0}.
#include "ptx.cuh"

#define GROUP_WARPS 32
#define AHEAD 8

// The sum of v over the threads before this one, and over all in `total`. sums: [32] in shared memory, free again
// when the caller has passed a barrier.
DEVICE i32 sum_before(i32 v, i32* sums, i32& total) {
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    i32 inclusive = v;
#pragma unroll
    for (i32 o = 1; o < WARP; o <<= 1) {
        const i32 other = __shfl_up_sync(FULL_WARP, inclusive, o);
        if (lane >= o) inclusive += other;
    }
    if (lane == WARP - 1) sums[warp] = inclusive;
    __syncthreads();
    i32 before = inclusive - v;
    total = 0;
    for (i32 i = 0; i < GROUP_WARPS; ++i) {
        if (i < warp) before += sums[i];
        total += sums[i];
    }
    return before;
}

// The expert of a pair, or -1 where its token is of the other kind: mask [tokens], where given, has 1 for those of one.
DEVICE i32 expert_of(const i32* experts, i32 pair, const u8* mask, i32 kind, i32 n_used) {
    return mask && mask[pair / n_used] != kind ? -1 : experts[pair];
}

// experts [n_pairs]; pairs [n_pairs], tiles [n_pairs / tile_tokens + n_experts] and n_tiles [1] are written. One
// block of 1024; shared memory 32 * n_experts words. n_experts <= 1024. With a mask only pairs of tokens that have
// `kind` there are sorted; n_used: pairs of a token.
KERNEL __launch_bounds__(GROUP_WARPS* WARP)
    group_tokens(const i32* experts, i32 n_pairs, i32 n_experts, i32 tile_tokens, i32* pairs, int4* tiles,
                 i32* n_tiles, const u8* mask, i32 kind, i32 n_used) {
    DYNAMIC_SHARED(i32, counts);  // [warp][expert]: of the warp's run of pairs; later where its next one goes
    __shared__ i32 sums[2][GROUP_WARPS];
    const i32 thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    const i32 run = (n_pairs + GROUP_WARPS * WARP - 1) / (GROUP_WARPS * WARP) * WARP;
    const i32 begin = warp * run, end = min(begin + run, n_pairs);
    for (i32 i = thread; i < GROUP_WARPS * n_experts; i += GROUP_WARPS * WARP) counts[i] = 0;
    __syncthreads();
    i32* const mine = counts + warp * n_experts;
    // Several loads at a time: one block has nobody to hide their latency.
    for (i32 at = begin + lane; at < end; at += AHEAD * WARP) {
        i32 expert[AHEAD];
#pragma unroll
        for (i32 i = 0; i < AHEAD; ++i)
            expert[i] = at + i * WARP < end ? expert_of(experts, at + i * WARP, mask, kind, n_used) : -1;
#pragma unroll
        for (i32 i = 0; i < AHEAD; ++i)
            if (expert[i] >= 0) atomicAdd(&mine[expert[i]], 1);
    }
    __syncthreads();

    i32 n = 0;
    if (thread < n_experts) {
#pragma unroll 8
        for (i32 w = 0; w < GROUP_WARPS; ++w) {
            const i32 before = n;
            n += counts[w * n_experts + thread];
            counts[w * n_experts + thread] = before;
        }
    }
    i32 total;
    const i32 first = sum_before(n, sums[0], total);
    i32 tile = sum_before((n + tile_tokens - 1) / tile_tokens, sums[1], total);
    if (thread < n_experts) {
#pragma unroll 8
        for (i32 w = 0; w < GROUP_WARPS; ++w) counts[w * n_experts + thread] += first;
        for (i32 i = 0; i < n; i += tile_tokens) {
            int4 record;
            record.x = thread, record.y = first + i, record.z = min(tile_tokens, n - i), record.w = 0;
            tiles[tile++] = record;
        }
    }
    if (thread == 0) *n_tiles = total;
    __syncthreads();

    for (i32 at = begin; at < end; at += AHEAD * WARP) {
        i32 expert[AHEAD];
#pragma unroll
        for (i32 i = 0; i < AHEAD; ++i) {
            const i32 pair = at + i * WARP + lane;
            expert[i] = pair < end ? expert_of(experts, pair, mask, kind, n_used) : -1;
        }
#pragma unroll
        for (i32 i = 0; i < AHEAD; ++i) {
            const u32 same = __match_any_sync(FULL_WARP, expert[i]);
            const i32 rank = __popc(same & ((1u << lane) - 1));
            if (expert[i] >= 0) pairs[mine[expert[i]] + rank] = at + i * WARP + lane;
            __syncwarp();
            if (expert[i] >= 0 && rank == 0) mine[expert[i]] += __popc(same);
            __syncwarp();
        }
    }
}

// Rows of z [n_pairs, stride] that gate_up.cu wrote with an exponent for each 16 elements (int8 [n_pairs, stride /
// 16], 127: not finite) get their largest exponent throughout, and scale [n_pairs], times the sigmoid of gate [n_pairs]
// where that is given. A warp a row. A row of small numbers, as nearly all are, has equal exponents and is not touched.
KERNEL join_exponents(u16* z, const i8* exponents, float* scale, i32 n_pairs, i32 stride, const float* gate) {
    const i32 lane = threadIdx.x % WARP, p = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, n = stride / 16;
    if (p >= n_pairs) return;
    const i8* const own = exponents + (u64)p * (u32)n;
    i32 top = -128;
    for (i32 i = lane; i < n; i += WARP) top = max(top, (i32)own[i]);
    top = __reduce_max_sync(FULL_WARP, top);
    if (lane == 0) {
        const float factor = gate ? reciprocal_fast(1.0f + exp2_fast(gate[p] * -1.442695041f)) : 1.0f;
        scale[p] = __uint_as_float(top == 127 ? 0x7fc00000u : (u32)(127 + top) << 23) * factor;
    }
    for (i32 i = lane; i < n; i += WARP) {
        const i32 shift = top - own[i];
        if (shift == 0) continue;
        const float factor = shift > 60 ? 0.0f : __uint_as_float((u32)(127 - shift) << 23);
        u32* const words = (u32*)(z + (u64)p * (u32)stride + 16 * i);
        for (i32 k = 0; k < 8; ++k)
            words[k] = pack_halves(half_to_float((u16)words[k]) * factor,
                                   half_to_float((u16)(words[k] >> 16)) * factor);
    }
}

// x [T, D] += (or with `add` 0 becomes) the weighted sum of a token's A rows of y (halves with exponents [T * A, columns rounded up to 16], see
// store_sixteen), in rank order, for columns from `first` on, a multiple of 4. 4 columns a thread; grid (columns /
// 512 rounded up, T), block 128. mask: tokens that have 1 there are left as they are.
KERNEL fold_ranks(const u16* y, const i8* exponents, const float* weights, float* x, i32 A, i32 D, i32 first,
                  i32 columns, i32 add, const u8* mask) {
    const i32 i = (blockIdx.x * blockDim.x + threadIdx.x) * 4, n = (columns + 15) / 16;
    const u64 t = blockIdx.y;
    if (i >= columns || (mask && mask[t])) return;
    // Elements i, i + 2; four words on: i + 1, i + 3.
    const u32* const even = (const u32*)(y + t * A * (n * 16) + i / 16 * 16) + i / 4 % 4;
    float r[4] = {};
#pragma unroll 8
    for (i32 a = 0; a < A; ++a) {
        const u32 words[2] = {even[a * n * 8], even[a * n * 8 + 4]};
        const i32 exponent = exponents[(t * A + a) * n + i / 16];
        const float unit = __uint_as_float(exponent == 127 ? 0x7fc00000u : (u32)(127 + exponent) << 23);
        const float w = weights[t * A + a];
#pragma unroll
        for (i32 e = 0; e < 4; ++e)
            r[e] = __fmaf_rn(w, half_to_float((u16)(words[e % 2] >> (e / 2 * 16))) * unit, r[e]);
    }
    float* const to = x + t * (u32)D + first + i;
    if (D % 4 == 0) {
        float4 sum = make_float4(r[0], r[1], r[2], r[3]);
        if (add) {
            const float4 old = *(const float4*)to;
            sum.x += old.x, sum.y += old.y, sum.z += old.z, sum.w += old.w;
        }
        *(float4*)to = sum;
    } else {
        for (i32 e = 0; e < 4; ++e)
            if (i + e < columns) to[e] = add ? to[e] + r[e] : r[e];
    }
}

// The same of floats y [T * A, columns], with the order and the roundings of docs/arithmetic.md, of the tokens that have 1
// in `mask`, where it is given. A column a thread; grid (columns / block rounded up, T).
KERNEL fold_floats(const float* y, const float* weights, float* x, i32 A, i32 D, i32 first, i32 columns, i32 add,
                   const u8* mask) {
    const i32 i = blockIdx.x * blockDim.x + threadIdx.x;
    const u64 t = blockIdx.y;
    if (i >= columns || (mask && !mask[t])) return;
    float r = 0.0f;
#pragma unroll 8
    for (i32 a = 0; a < A; ++a) r = __fmaf_rn(weights[t * A + a], y[(t * A + a) * (u32)columns + i], r);
    float* const to = x + t * (u32)D + first + i;
    *to = add ? *to + r : r;
}

// The end of attention of small batches: folds what attention.cu found in the splits of each row, multiplies it by its
// gate where there is one, and quantizes it.
//
// -DHEAD_DIM, -DSPLITS, -DWINDOW (splits.cuh), -DGATE, -DGATE_BY_HEAD (gate.cuh); -DEACH=1 or 4: elements of the output that
// a lane has, neighbors; HEAD_DIM is a multiple of it. Grid (ceil(H * HEAD_DIM / 32 / EACH), T), blocks of 256 threads.
// partial_o [T, H, max_splits, HEAD_DIM], partial_ml [T, H, max_splits, 2] as attention.cu leaves
// them; out [T, H * HEAD_DIM]; gate [T, H] or, unless GATE_BY_HEAD, [T, H * HEAD_DIM]. Unless q8
// is null, H * HEAD_DIM is a multiple of 32, and q8 [T, H * HEAD_DIM], d and sums [T, H * HEAD_DIM / 32] get the row in
// 8 bits (`quantize_activations` of engine/ops/arithmetic.py). With -DLISTED=1 positions are [T, H / group], and missed
// [T, H] gets the share of a query's mass that blocks have which were not read: by masses, list and left as recall.cu left
// them, of which left [T, H, 2] then has the top and the mass of these blocks. May overlap the kernel ahead of it, which
// does not write the positions, and with LISTED has waited for who did.
#include "gate.cuh"
#include "recall.cuh"
#include "splits.cuh"

#ifndef LISTED
#define LISTED 0
#endif

#ifndef EACH
#define EACH 1
#endif

constexpr i32 WARPS = 8, MINE = (MOST_SPLITS + WARPS - 1) / WARPS;

#if LISTED
// The mass of the first n blocks of a list, for all lanes. mass: of a head's blocks, then the tops of their chunks.
DEVICE float mass_of(const float* mass, const i32* list, i32 n, i32 width, float top) {
    float sum = 0.0f;
#pragma unroll 4
    for (i32 i = threadIdx.x % WARP; i < n; i += WARP) {
        const i32 b = load_fresh(list + i);
        sum = sum + load_fresh(mass + b) * factor_of(load_fresh(mass + width + b / CHUNK), top);
    }
    return fold(sum);
}
#endif

// A lane's elements, of one head.
struct __align__(4 * EACH) Elements {
    float of[EACH];
};

// Warp w folds splits w, w + 8 ...; then the warps' results are folded in order.
KERNEL __launch_bounds__(WARPS* WARP)
attention_combine(const float* partial_o, const float* partial_ml, const i32* positions, i32 n_head, i32 group,
                  i32 max_blocks, i32 max_splits, float* out, i8* q8, float* d, i32* sums, const float* gate,
                  const float* masses, const i32* list, float* left, float* missed) {
    dependency_release();
    __shared__ float warp_m[WARPS][WARP], warp_l[WARPS][WARP];
    __shared__ Elements warp_o[WARPS][WARP];
    const i32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const i32 t = blockIdx.y, width = n_head * HEAD_DIM;
    const i32 first_element = EACH * WARP * (i32)blockIdx.x, own = first_element + EACH * lane;
    const i32 element = min(own, width - EACH); // the lane's first
    const i64 pair = ((i64)t * n_head + element / HEAD_DIM) * max_splits;
    const float* const from_o = partial_o + pair * HEAD_DIM + element % HEAD_DIM;
    const float2* const from_ml = (const float2*)partial_ml + pair;
    const i32 row = LISTED ? t * (n_head / group) + element / HEAD_DIM / group : t;
    const i32 n = count_splits(clamped_position(LISTED ? load_fresh(positions + row) : positions[row], max_blocks));
#if LISTED
    __shared__ float rests[WARP]; // the mass of what a head does not read, by the lane of its first element
    const bool is_first = element % HEAD_DIM == 0 && own < width;
    if (warp == WARPS - 1) // while attention runs
        for (u32 firsts = __ballot_sync(FULL_WARP, is_first); firsts; firsts &= firsts - 1) {
            const i32 from = __ffs((i32)firsts) - 1, head = (first_element + EACH * from) / HEAD_DIM;
            const i64 of = (i64)t * n_head + head, of_kv = (i64)t * (n_head / group) + head / group;
            const float top = load_fresh(left + 2 * of), total = load_fresh(left + 2 * of + 1);
            const i32 n_listed = load_fresh(positions + of_kv) / KV_BLOCK + 1;
            const i32 n_behind = total == 0.0f ? 0 : n_listed - (TAIL_BLOCKS + 1); // the tail comes last
            const float* const mass = masses + of * 2 * max_blocks;
            const float rest = total - mass_of(mass, list + of_kv * max_blocks, n_behind, max_blocks, top);
            rests[from] = rest < 0.0f ? 0.0f : rest;
        }
#endif
    dependency_wait();

    float2 ml[MINE];
    Elements x[MINE];
#pragma unroll
    for (i32 i = 0; i < MINE; i++) {
        const i32 split = min(warp + i * WARPS, n - 1);
        ml[i] = from_ml[split];
        x[i] = *(const Elements*)(from_o + (i64)split * HEAD_DIM);
    }
    float m = ml[0].x, l = 0.0f;
    Elements o = {};
#pragma unroll
    for (i32 i = 1; i < MINE; i++)
        m = fmaxf(m, ml[i].x); // beyond the last split, the last again
    const float above = m == -INFINITE ? 0.0f : m; // where no block of these splits is there
#pragma unroll
    for (i32 i = 0; i < MINE; i++)
        if (warp + i * WARPS < n) {
            const float weight = exp2_fast(ml[i].x - above);
            l = __fmaf_rn(ml[i].y, weight, l);
#pragma unroll
            for (i32 e = 0; e < EACH; e++)
                o.of[e] = __fmaf_rn(x[i].of[e], weight, o.of[e]);
        }
    warp_m[warp][lane] = m;
    warp_l[warp][lane] = l;
    warp_o[warp][lane] = o;
    __syncthreads();
    if (warp > 0)
        return;
    float top = m;
#pragma unroll
    for (i32 i = 1; i < WARPS; i++)
        if (i < n)
            top = fmaxf(top, warp_m[i][lane]);
    const float weight = exp2_fast(m - top);
    l *= weight;
#pragma unroll
    for (i32 e = 0; e < EACH; e++)
        o.of[e] *= weight;
#pragma unroll
    for (i32 i = 1; i < WARPS; i++)
        if (i < n) {
            const float other = exp2_fast(warp_m[i][lane] - top);
            l = __fmaf_rn(warp_l[i][lane], other, l);
            const Elements& y = warp_o[i][lane];
#pragma unroll
            for (i32 e = 0; e < EACH; e++)
                o.of[e] = __fmaf_rn(y.of[e], other, o.of[e]);
        }
#if LISTED
    if (is_first) {
        const i64 row = (i64)t * n_head + element / HEAD_DIM;
        const float rest = rests[lane], mass = rest * exp2_fast(left[2 * row] * 0x1.715476p+0f - top);
        left[2 * row + 1] = rest;
        missed[row] = rest == 0.0f ? 0.0f : 1.0f / (1.0f + l / P_SCALE / mass);
    }
#endif
#pragma unroll
    for (i32 e = 0; e < EACH; e++)
        o.of[e] = gated(o.of[e] / l, gate, (i64)t * n_head + element / HEAD_DIM, element % HEAD_DIM + e);
    const bool is_there = own < width;
    if (is_there)
        *(Elements*)(out + (i64)t * width + element) = o;
    if (q8) { // width is a multiple of 32 then
        float block_d;
        i32 block_sum;
        const i64 block = (i64)t * (width / 32) + element / 32;
#if EACH == 4
        const u32 codes = quantize4(o.of, block_d, block_sum);
        if (is_there)
            *(u32*)(q8 + (i64)t * width + element) = codes;
#else
        q8[(i64)t * width + element] = (i8)quantize_one(o.of[0], block_d, block_sum);
#endif
        if (is_there && element % 32 == 0) {
            d[block] = block_d;
            sums[block] = block_sum;
        }
    }
}

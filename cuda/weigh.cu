// Masses of the blocks of keys before a row's tail, by their sketches: the first part of a choice (recall.cu has the rest, the
// twin and where masses are). Grid (K, any, T), blocks of WEIGHERS warps.
//
// Products with codes are those of tensor cores (m16n8k32): keys are rows, 16 at a time, query heads columns, eight at a
// time. Lane 4 * g + t has keys g and g + 8 of each 16 and words t, t + 4 ... of their codes, and of column g the queries
// at these ranks; of the results heads 2 * t and 2 * t + 1 of the same keys.
//
// Macros: HEAD_DIM; GROUP, query heads of a KV head, at most 16; WEIGHERS, 8, 4 or 2; STAGES, sketches of a warp under way;
// RESIDENT, how many blocks a multiprocessor has at a time.
#define SKETCHES
#include "recall.cuh"

constexpr i32 TILES = KV_BLOCK / 16, QUADS = (WORDS + 3) / 4; // of keys; of words
constexpr i32 HEADS = 8, FOLDED = HEAD_DIM <= 256 ? 8 : 4;    // columns; those that share registers
constexpr i32 PLANE = 4 * KV_BLOCK + 32;                      // of a word of all keys: its four lanes read other banks
constexpr i32 UNIT = SKETCH_BYTES % 16 || WORDS % 2 ? 4 : 16, GAP = WORDS * (PLANE - 4 * KV_BLOCK);
constexpr i32 STAGE = (SKETCH_BYTES + GAP + 15) / 16 * 16;
constexpr i32 COUNTED = (QUADS | 1) * 4;                      // of a head in 16 bytes, an odd number of 64 bytes: again banks
constexpr i32 RANK_WARPS = (KEPT + WARP - 1) / WARP, PLANES = (GROUP + 3) / 4; // of ranks; of four heads
constexpr i32 BLOCKS = CHUNK / WEIGHERS;                      // of a warp, in a chunk
static_assert(CHUNK % WEIGHERS == 0, "a warp has whole blocks of each chunk");

// The number of a sum of integers that began with ROUNDING_BITS.
DEVICE float number(i32 sum) { return __int_as_float(sum) - ROUNDING; }

// A sketch on its way to shared memory, by a warp. The planes of codes lie further apart there.
DEVICE void fetch_sketch(u8* to, const u8* from) {
    constexpr i32 STEP = UNIT * WARP, SKIP = PLANE - 4 * KV_BLOCK;
    const i32 first = UNIT * (threadIdx.x % WARP);
    if constexpr (UNIT == 16) { // two planes a step: constant distances, an address for all
        u8* const codes = to + first + first / (4 * KV_BLOCK) * SKIP;
        to += first, from += first;
#pragma unroll
        for (i32 i = 0; i < WORDS / 2; i++)
            copy16_async(codes + i * 2 * PLANE, from + i * STEP);
#pragma unroll
        for (i32 i = MASK_AT; i < SKETCH_BYTES; i += STEP)
            if (i + STEP <= SKETCH_BYTES || first < SKETCH_BYTES - i)
                copy16_async(to + i + GAP, from + i);
    } else {
        for (i32 i = first; i < SKETCH_BYTES; i += STEP)
            copy4_async(to + i + min(i / (4 * KV_BLOCK), WORDS) * SKIP, from + i);
    }
}

// What a warp keeps of a sketch for all query heads.
struct Channels {
    float base[MASKS], step[RANK_WARPS]; // of channel m * WARP + lane; of rank r * WARP + lane
    i32 of_rank[RANK_WARPS];             // its channel, or -1
};

// `ranked`: room for a number for each kept channel.
DEVICE void load_channels(const u8* stage, u16* ranked, Channels& to) {
    const i32 lane = threadIdx.x % WARP;
    const u8* const rest = stage + GAP;
    u32 masks[MASKS]; // all loads before the first store, which they would wait for
    u16 base[MASKS];
#pragma unroll
    for (i32 m = 0; m < MASKS; m++) {
        const i32 c = m * WARP + lane;
        masks[m] = ((const u32*)(rest + MASK_AT))[m];
        base[m] = HEAD_DIM % WARP == 0 || c < HEAD_DIM ? ((const u16*)(rest + BASE_AT))[c] : 0;
    }
    i32 before = 0;
#pragma unroll
    for (i32 m = 0; m < MASKS; m++) {
        if (masks[m] >> lane & 1)
            ranked[before + __popc(masks[m] & ((1u << lane) - 1))] = (u16)(m * WARP + lane);
        before += __popc(masks[m]);
        to.base[m] = half_to_float(base[m]);
    }
    __syncwarp();
#pragma unroll
    for (i32 r = 0; r < RANK_WARPS; r++) {
        const i32 rank = r * WARP + lane;
        const bool there = KEPT % WARP == 0 || rank < KEPT;
        to.of_rank[r] = there ? ranked[rank] : -1;
        to.step[r] = there ? half_to_float(((const u16*)(rest + STEP_AT))[rank]) : 0.0f;
    }
}

// Query heads h0 to h0 + FOLDED - 1: their products with the steps in 8 bits to counted[h], by rank. Returns the product with
// the bases of head h0 + lane / (WARP / FOLDED), and in lane h the scale of head h0 + h.
DEVICE float count_queries(const float4* queries, const Channels& of, i32 h0, int4* counted, float& own_unit) {
    const i32 lane = threadIdx.x % WARP;
    float rest[FOLDED] = {}, x[RANK_WARPS][FOLDED], magnitudes[FOLDED] = {};
    const auto four = [&](i32 n, i32 c, float (&to)[4]) {
        const i32 plane = h0 / 4 + n;
        const float4 v = plane < PLANES ? queries[plane * HEAD_DIM + c] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    };
#pragma unroll
    for (i32 m = 0; m < MASKS; m++) {
        const i32 c = m * WARP + lane;
        if (HEAD_DIM % WARP && c >= HEAD_DIM)
            continue;
#pragma unroll
        for (i32 n = 0; n < FOLDED / 4; n++) {
            float query[4];
            four(n, c, query);
#pragma unroll
            for (i32 h = 0; h < 4; h++)
                rest[4 * n + h] = __fmaf_rn(query[h], of.base[m], rest[4 * n + h]);
        }
    }
#pragma unroll
    for (i32 r = 0; r < RANK_WARPS; r++)
#pragma unroll
        for (i32 n = 0; n < FOLDED / 4; n++) {
            float query[4] = {};
            if (KEPT % WARP == 0 || of.of_rank[r] >= 0)
                four(n, of.of_rank[r], query);
#pragma unroll
            for (i32 h = 0; h < 4; h++) {
                const i32 at = 4 * n + h;
                x[r][at] = query[h] * of.step[r];
                magnitudes[at] = larger_or_nan(magnitudes[at], fabsf(x[r][at]));
            }
        }
    u32 own = 0; // of head `lane`, whose scale this lane computes for all
#pragma unroll
    for (i32 h = 0; h < FOLDED; h++) {
        const u32 bits = __reduce_max_sync(FULL_WARP, __float_as_uint(magnitudes[h]));
        own = lane == h ? bits : own;
    }
    const float amax = __uint_as_float(own);
    const bool plain = own < 0x7f800000u && amax >= 0x1p-100f;
    own_unit = plain ? amax / 127.0f : own < 0x7f800000u ? 0.0f : __uint_as_float(NAN_BITS);
    const float own_inverse = plain ? 127.0f / amax : 0.0f;
#pragma unroll
    for (i32 h = 0; h < FOLDED; h++) {
        const float inverse = __shfl_sync(FULL_WARP, own_inverse, h);
        i8* const to = (i8*)(counted + h * COUNTED);
#pragma unroll
        for (i32 r = 0; r < RANK_WARPS; r++) // rounded to even; under a scale that is NaN any bytes do
            if (KEPT % WARP == 0 || r * WARP + lane < KEPT)
                to[r * WARP + lane] = (i8)__float_as_int(x[r][h] * inverse + ROUNDING);
    }
    return fold_rows(rest);
}

// Codes of 64 keys times what is counted of eight heads.
DEVICE void multiply_codes(const u8* stage, const int4* counted, i32 (&sums)[TILES][4]) {
    const i32 g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
    for (i32 m = 0; m < TILES; m++)
#pragma unroll
        for (i32 i = 0; i < 4; i++)
            sums[m][i] = ROUNDING_BITS;
#pragma unroll
    for (i32 j = 0; j < QUADS; j++) {
        const i32 word = 4 * j + t;
        const bool there = WORDS % 4 == 0 || word < WORDS;
        const int4 b = counted[g * COUNTED + word];
        const u32* const plane = (const u32*)(stage + (there ? word : 0) * PLANE) + g;
#pragma unroll
        for (i32 m = 0; m < TILES; m++) {
            const u32 first = there ? plane[16 * m] : 0, second = there ? plane[16 * m + 8] : 0;
            const u32 low[4] = {first & 0x03030303u, second & 0x03030303u, first >> 2 & 0x03030303u, second >> 2 & 0x03030303u};
            const u32 high[4] = {first >> 4 & 0x03030303u, second >> 4 & 0x03030303u, first >> 6 & 0x03030303u,
                                 second >> 6 & 0x03030303u};
            mma_s8(sums[m], low, (u32)b.x, (u32)b.y);
            mma_s8(sums[m], high, (u32)b.z, (u32)b.w);
        }
    }
}

// Of heads 2 * t and 2 * t + 1, with scale and product with the bases of each: the largest score and the sum of exponentials,
// of the first in lanes below 16, of the other in those above.
DEVICE float weigh_keys(const i32 (&sums)[TILES][4], const float (&unit)[2], const float (&rest)[2], float scale, float& top) {
    const bool upper = threadIdx.x & 16;
    i32 largest_sum[2];
    float tops[2], z[2];
#pragma unroll
    for (i32 e = 0; e < 2; e++) {
        largest_sum[e] = max(sums[0][e], sums[0][2 + e]);
#pragma unroll
        for (i32 m = 1; m < TILES; m++)
            largest_sum[e] = max(largest_sum[e], max(sums[m][e], sums[m][2 + e]));
    }
    i32 own = upper ? largest_sum[1] : largest_sum[0];
    own = max(own, __shfl_xor_sync(FULL_WARP, upper ? largest_sum[0] : largest_sum[1], 16));
    own = max(own, __shfl_xor_sync(FULL_WARP, own, 8));
    own = max(own, __shfl_xor_sync(FULL_WARP, own, 4));
    const i32 other = __shfl_xor_sync(FULL_WARP, own, 16);
#pragma unroll
    for (i32 e = 0; e < 2; e++) {
        // Scores are ordered as their sums are, unless all are NaN, which is lost here and reaches z.
        const float found = __fmaf_rn(unit[e], number(upper == (e == 1) ? own : other), rest[e]) * scale;
        tops[e] = found == found ? found : LEAST;
        float term[TILES][2];
#pragma unroll
        for (i32 m = 0; m < TILES; m++)
#pragma unroll
            for (i32 i = 0; i < 2; i++)
                term[m][i] = decay(__fmaf_rn(unit[e], number(sums[m][2 * i + e]), rest[e]) * scale - tops[e]);
        // As sum32 has them: key k and k + 32, then 16 apart, 8, and among lanes 4, 2, 1.
        z[e] = ((term[0][0] + term[2][0]) + (term[1][0] + term[3][0])) +
               ((term[0][1] + term[2][1]) + (term[1][1] + term[3][1]));
    }
    top = upper ? tops[1] : tops[0];
    float sum = (upper ? z[1] : z[0]) + __shfl_xor_sync(FULL_WARP, upper ? z[0] : z[1], 16);
    sum = sum + __shfl_xor_sync(FULL_WARP, sum, 8);
    return sum + __shfl_xor_sync(FULL_WARP, sum, 4);
}

// Masses of the blocks of a chunk, by a warp. zs, tops [heads, CHUNK]; z is -1 where there is no block.
DEVICE void store_chunk(const float (*zs)[CHUNK], const float (*tops)[CHUNK], float* masses, i32 width, i32 chunk, i32 behind) {
    constexpr i32 EACH = CHUNK / 4; // four lanes a head
    const i32 lane = threadIdx.x % WARP, n_chunks = (width + CHUNK - 1) / CHUNK;
#pragma unroll
    for (i32 h0 = 0; h0 < GROUP; h0 += WARP / 4) {
        const i32 h = h0 + lane / 4;
        const bool there = GROUP % (WARP / 4) == 0 || h < GROUP;
        float mass[EACH], top = LEAST;
#pragma unroll
        for (i32 i = 0; i < EACH; i++)
            top = largest(top, there ? tops[h][lane % 4 + 4 * i] : LEAST);
        top = largest(top, __shfl_xor_sync(FULL_WARP, top, 1));
        top = largest(top, __shfl_xor_sync(FULL_WARP, top, 2));
        float* const to = masses + (i64)2 * h * width;
#pragma unroll
        for (i32 i = 0; i < EACH; i++) {
            const i32 at = lane % 4 + 4 * i;
            const float z = there ? zs[h][at] : -1.0f;
            mass[i] = z < 0.0f ? 0.0f : z * decay(tops[there ? h : 0][at] - top);
            if (there && chunk * CHUNK + at < behind)
                to[chunk * CHUNK + at] = mass[i];
        }
        static_assert(EACH == 2, "sum32: eight numbers, 4 apart, then 2, 1");
        float sum = mass[0] + mass[1];
        sum = sum + __shfl_xor_sync(FULL_WARP, sum, 2);
        sum = sum + __shfl_xor_sync(FULL_WARP, sum, 1);
        if (there && lane % 4 == 0)
            to[width + chunk] = top, to[width + n_chunks + chunk] = sum;
    }
}

// Chunks blockIdx.y, blockIdx.y + gridDim.y ...; a warp has a block of keys at a time, and STAGES under way.
KERNEL __launch_bounds__(WEIGHERS * WARP, RESIDENT)
weigh(const float* q, const u8* sketches, const i32* blocks, const i32* sequence, const i32* positions, const i32* most,
      i32 n_head, i32 width, float scale, float* masses) {
    dependency_release();
    __shared__ float zs[2][PLANES * 4][CHUNK], tops[2][PLANES * 4][CHUNK];
    __shared__ u16 ranked[WEIGHERS][KEPT];
    DYNAMIC_SHARED(u8, memory);
    float4* const queries = (float4*)memory; // [PLANES, HEAD_DIM]
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, t = lane % 4;
    int4* const counted = (int4*)(queries + PLANES * HEAD_DIM) + warp * HEADS * COUNTED;
    u8* const stages = memory + 16 * (PLANES * HEAD_DIM + WEIGHERS * HEADS * COUNTED) + warp * STAGES * STAGE;
    const i32 head = blockIdx.x, n_head_kv = gridDim.x, row = blockIdx.z, s = sequence[row];
    const i32 behind = max(positions[row] / KV_BLOCK - TAIL_BLOCKS, 0), n_chunks = (behind + CHUNK - 1) / CHUNK;
    const i64 first = (i64)row * n_head + head * GROUP; // of the query heads
    if (most[row] < 0 || n_chunks <= (i32)blockIdx.y) {
        dependency_wait(); // kernels behind this one count on those ahead of it
        return;
    }
    // The n-th block of keys of the warp.
    const auto place = [&](i32 n) {
        return ((i32)blockIdx.y + n / BLOCKS * (i32)gridDim.y) * CHUNK + warp + n % BLOCKS * WEIGHERS;
    };
    const auto own_ids = [&](i32 n) { // where sketches of the next 32 are, a lane each
        const i32 b = place(n + lane);
        return b < behind ? blocks[(i64)s * width + b] : -1;
    };
    i32 coming = own_ids(0), ids = coming;
    const auto issue = [&](i32 n) {
        if (n && n % WARP == 0)
            coming = own_ids(n);
        const i32 block = __shfl_sync(FULL_WARP, coming, n % WARP);
        if (block >= 0)
            fetch_sketch(stages + n % STAGES * STAGE, sketches + ((i64)block * n_head_kv + head) * SKETCH_BYTES);
        copies_commit();
    };
#pragma unroll
    for (i32 n = 0; n < STAGES; n++)
        issue(n);
    for (i32 i = lane; i < HEADS * COUNTED; i += WARP) // what is behind the last rank stays 0
        counted[i] = make_int4(0, 0, 0, 0);
    __syncwarp();
    i32 n = 0;
#pragma unroll 1
    for (i32 chunk = blockIdx.y, turn = 0; chunk < n_chunks; chunk += gridDim.y, turn++) {
        float(*const z_to)[CHUNK] = zs[turn % 2];
        float(*const top_to)[CHUNK] = tops[turn % 2];
#pragma unroll 1
        for (i32 of_chunk = 0; of_chunk < BLOCKS; of_chunk++, n++) {
            const i32 i = warp + of_chunk * WEIGHERS;
            if (n && n % WARP == 0)
                ids = own_ids(n);
            copies_wait<STAGES - 1>();
            __syncwarp(); // what other lanes have brought is there
            const u8* const stage = stages + n % STAGES * STAGE;
            const bool there = __shfl_sync(FULL_WARP, ids, n % WARP) >= 0;
            Channels channels;
            if (there)
                load_channels(stage, ranked[warp], channels);
            if (n == 0) { // sketches are as old as the step, queries are not
                dependency_wait();
                for (i32 i = threadIdx.x; i < PLANES * 4 * HEAD_DIM; i += WEIGHERS * WARP) {
                    const i32 h = i / HEAD_DIM, c = i % HEAD_DIM;
                    ((float*)queries)[(h / 4 * HEAD_DIM + c) * 4 + h % 4] = h < GROUP ? q[(first + h) * HEAD_DIM + c] : 0.0f;
                }
                __syncthreads();
            }
            if (!there) {
                for (i32 h = lane; h < GROUP; h += WARP)
                    z_to[h][i] = -1.0f, top_to[h][i] = LEAST;
            } else {
#pragma unroll 1
                for (i32 h0 = 0; h0 < GROUP; h0 += HEADS) {
                    float unit[2] = {}, rest[2] = {};
#pragma unroll
                    for (i32 part = 0; part < HEADS; part += FOLDED) {
                        float own_unit;
                        const float own = count_queries(queries, channels, h0 + part, counted + part * COUNTED, own_unit);
#pragma unroll
                        for (i32 e = 0; e < 2; e++) {
                            const i32 h = (2 * t + e) % FOLDED;
                            const float a = __shfl_sync(FULL_WARP, own_unit, h);
                            const float b = __shfl_sync(FULL_WARP, own, h * (WARP / FOLDED));
                            if (FOLDED == HEADS || (2 * t + e) / FOLDED * FOLDED == part)
                                unit[e] = a, rest[e] = b;
                        }
                    }
                    __syncwarp(); // what is counted is there
                    i32 sums[TILES][4];
                    multiply_codes(stage, counted, sums);
                    float top;
                    const float z = weigh_keys(sums, unit, rest, scale, top);
                    const i32 h = h0 + 2 * t + lane / 16;
                    if ((lane & 12) == 0 && h < GROUP)
                        z_to[h][i] = z, top_to[h][i] = top;
                    __syncwarp(); // the next heads are counted there
                }
            }
            __syncwarp(); // the stage is free
            issue(n + STAGES);
        }
        __syncthreads(); // one a chunk: whoever stores the last one is done before the next is
        if (warp == turn % WEIGHERS)
            store_chunk(z_to, top_to, masses + first * 2 * width, width, chunk, behind);
    }
}

// Reading a part of a context: sketches of blocks of keys, and which blocks each row of a step reads by them. Twins:
// summarize and choose of engine/ops/reference.py (docs/arithmetic.md, "Recall"), bit for bit.
//
// Kernels.
//   summarize   sketches [n_blocks, K, SKETCH_BYTES] of blocks[i], which lies at places[i]    (n, K)
//   weigh       masses [T, H, 2, W]: of each block before the tail, by its chunk's top; tops
//               and sums of the chunks                                                        (ceil(W / CHUNK), K, T)
//   score       scores of these blocks, and of all of them the top and the sum                (ceil(W / SPAN), K, T)
//   choose      what a row reads                                                              (K, T)
// Blocks have WARPS warps; of summarize SUMMING_THREADS threads. What follows from a choice is in chosen.cu.
// choose writes chosen uint8 [T, K, W], left [T, H, 2], read int32 [T, K], how many blocks that are, and what attention
// goes by: list int32 [T, K, W], the blocks that are read one after the other, and last int32 [T, K], the row's position
// among them. Before, list is scratch for scores.
//
// Macros: HEAD_DIM, at most 512; of summarize K_TYPE (kv_types.cuh), HOMES (homes.cuh) and SUMMING_THREADS, those of a block;
// of the others GROUP, query heads of a KV head, at most 16, and STAGES, sketches of a warp under way: 4, 2, 1, or 0: they
// are read where they lie.
#include "arithmetic.cuh"
#include "homes.cuh"
#include "kv_types.cuh"

constexpr i32 KV_BLOCK = 64, TAIL_BLOCKS = 3; // engine/ops/__init__.py
constexpr i32 WARPS = 16;

// The parts of a sketch (engine/ops/sketches.py): codes of the kept channels from byte 0 on, and where the others begin.
constexpr i32 KEPT = HEAD_DIM / 2, RANKS = 16, WORDS = (KEPT + RANKS - 1) / RANKS, MASKS = (HEAD_DIM + WARP - 1) / WARP;
constexpr i32 MASK_AT = WORDS * KV_BLOCK * 4, BASE_AT = MASK_AT + 4 * MASKS, STEP_AT = BASE_AT + 2 * HEAD_DIM;
constexpr i32 SKETCH_BYTES = (STEP_AT + 2 * KEPT + 3) / 4 * 4;
constexpr u32 NAN_BITS = 0x7fc00000u;

#ifdef K_TYPE

constexpr u16 NAN_HALF = 0x7e00;
DEVICE float load_key(const u8* keys, const u16* scales, i64 row, i32 i) {
    const u8* const of = keys + row * KV_ROW_BYTES<K_TYPE, HEAD_DIM>;
    if (K_TYPE == KV_F16)
        return half_to_float(((const u16*)of)[i]);
    const float d = half_to_float(scales[row * (HEAD_DIM / 32) + i / 32]);
    if (K_TYPE == KV_Q8_0)
        return (float)((const i8*)of)[i] * d;
    return (float)((i32)(of[i / 32 * 16 + i % 16] >> i % 32 / 16 * 4 & 15) - 8) * d;
}

// A thread has a channel at a time; then a word of 16 codes of a key.
KERNEL summarize(const u8* k, const u16* k_scale, const i32* places, const i32* blocks, u8* sketches HOME_PARAMETERS) {
    dependency_release();
    dependency_wait();
    constexpr i32 STRIDE = RANKS * WORDS + 4; // bytes of a key's codes, so that neighboring keys lie in other banks
    __shared__ i32 spreads[HEAD_DIM];
    __shared__ u32 masks[MASKS], codes[KV_BLOCK * STRIDE / 4];
    const i32 n_head_kv = gridDim.y, head = blockIdx.y, lane = threadIdx.x % WARP, n_threads = blockDim.x;
    const CachedBlock block = cached_block(places[blockIdx.x], {k, k, k_scale, k_scale} HOME_ARGUMENTS);
    u8* const to = sketches + ((i64)blocks[blockIdx.x] * n_head_kv + head) * SKETCH_BYTES;
    u16 *const base = (u16*)(to + BASE_AT), *const steps = (u16*)(to + STEP_AT);
    const auto key = [&](i32 j, i32 c) {
        const i64 slot = (i64)block.index * KV_BLOCK + j;
        return load_key(block.in.k, block.in.k_scale, slot * n_head_kv + head, c);
    };
    for (i32 i = threadIdx.x; i < KV_BLOCK * STRIDE / 4; i += n_threads)
        codes[i] = 0;

    constexpr i32 MOST = (HEAD_DIM + SUMMING_THREADS - 1) / SUMMING_THREADS; // channels of a thread
    float least[MOST], range[MOST], mean[MOST];
    bool finite[MOST];
#pragma unroll
    for (i32 i = 0; i < MOST; i++) {
        const i32 c = threadIdx.x + i * n_threads;
        if (c >= HEAD_DIM)
            continue;
        float low = 0.0f, high = 0.0f, sum = 0.0f;
        finite[i] = true;
        for (i32 j = 0; j < KV_BLOCK; j++) {
            const float x = key(j, c);
            low = j && !(x < low) ? low : x;
            high = j && !(x > high) ? high : x;
            finite[i] = finite[i] && x - x == 0.0f;
            sum = sum + x;
        }
        least[i] = low + 0.0f; // no -0
        range[i] = (high + 0.0f) - least[i];
        mean[i] = sum * (1.0f / KV_BLOCK);
        spreads[c] = finite[i] ? __float_as_int(range[i]) : (i32)NAN_BITS;
    }
    __syncthreads();
    bool kept[MOST];
#pragma unroll
    for (i32 i = 0; i < MOST; i++) { // the KEPT largest, the lower channels first
        const i32 c = threadIdx.x + i * n_threads, own = c < HEAD_DIM ? spreads[c] : -1;
        i32 before = 0;
        for (i32 other = 0; other < HEAD_DIM; other++)
            before += spreads[other] > own || (spreads[other] == own && other < c);
        kept[i] = c < HEAD_DIM && before < KEPT;
        const u32 mask = __ballot_sync(FULL_WARP, kept[i]);
        if (lane == 0 && c < HEAD_DIM)
            masks[c / WARP] = mask;
    }
    __syncthreads();
#pragma unroll
    for (i32 i = 0; i < MOST; i++) {
        const i32 c = threadIdx.x + i * n_threads;
        if (c >= HEAD_DIM)
            continue;
        const u16 own = finite[i] ? float_to_half(kept[i] ? least[i] : mean[i]) : NAN_HALF;
        base[c] = own;
        if (!kept[i])
            continue;
        i32 rank = __popc(masks[c / WARP] & ((1u << lane) - 1));
        for (i32 word = 0; word < c / WARP; word++)
            rank += __popc(masks[word]);
        const u16 step = finite[i] ? float_to_half(range[i] / 3.0f) : NAN_HALF;
        steps[rank] = step;
        const float from = half_to_float(own), in_one = 1.0f / half_to_float(step);
        for (i32 j = 0; j < KV_BLOCK; j++) {
            const float v = (key(j, c) - from) * in_one; // rounded to even below; a NaN counts nothing
            ((u8*)codes)[j * STRIDE + rank] = (v > 0.5f) + (v >= 1.5f) + (v > 2.5f);
        }
    }
    __syncthreads();
    for (i32 i = threadIdx.x; i < WORDS * KV_BLOCK; i += n_threads) {
        const u32* const of = codes + (i % KV_BLOCK * STRIDE + i / KV_BLOCK * RANKS) / 4;
        ((u32*)to)[i] = of[0] | of[1] << 2 | of[2] << 4 | of[3] << 6;
    }
    for (i32 i = threadIdx.x; i < MASKS; i += n_threads)
        ((u32*)(to + MASK_AT))[i] = masks[i];
    if (threadIdx.x == 0 && SKETCH_BYTES > STEP_AT + 2 * KEPT)
        steps[KEPT] = 0;
}

#else

constexpr i32 CHUNK = 64, SPAN = WARPS * WARP; // blocks whose masses are summed together; of a thread block
#define LEAST __int_as_float((i32)0xff800000u)
constexpr i32 ROUNDED = GROUP <= 1 ? 1 : GROUP <= 2 ? 2 : GROUP <= 4 ? 4 : 8;
constexpr i32 FOLDED = HEAD_DIM <= 128 ? 8 : HEAD_DIM <= 256 ? 4 : 2; // as there are registers
constexpr i32 HEADS = ROUNDED < FOLDED ? ROUNDED : FOLDED, EACH = WARP / HEADS; // done together; lanes that hold one's sum

// The largest number of some; what is none is skipped.
DEVICE float largest(float a, float b) { return b > a ? b : a; }

// Of a head, for all lanes: the largest score of any key, and the sum of all masses. chunks: its largest and its sums.
struct Whole {
    float top, total;
};

DEVICE float factor_of(float top_of_chunk, float top) {
    return top_of_chunk == LEAST ? 0.0f : exponential(top_of_chunk - top);
}

DEVICE Whole whole_of(const float* chunks, i32 n, i32 n_most) {
    const i32 lane = threadIdx.x % WARP;
    float top = LEAST, sum = 0.0f;
    for (i32 c = lane; c < n; c += WARP)
        top = largest(top, chunks[c]);
#pragma unroll
    for (i32 o = 16; o > 0; o >>= 1)
        top = largest(top, __shfl_xor_sync(FULL_WARP, top, o));
    for (i32 c = lane; c < n; c += WARP)
        sum = sum + chunks[n_most + c] * factor_of(chunks[c], top);
    return {top, fold(sum)};
}

// A sketch on its way to shared memory, by a warp.
constexpr i32 UNIT = SKETCH_BYTES % 16 ? 4 : 16, STAGE = (SKETCH_BYTES + 15) / 16 * 16, BLOCKS = CHUNK / WARPS; // of a warp
DEVICE void fetch_sketch(u8* to, const u8* from) {
    for (i32 i = UNIT * (threadIdx.x % WARP); i < SKETCH_BYTES; i += UNIT * WARP) {
        if constexpr (UNIT == 16)
            copy16_async(to + i, from + i);
        else
            copy4_async(to + i, from + i);
    }
}

// A warp has a block at a time: a lane has every 32nd channel, then two keys. Sketches of STAGES blocks are under way.
KERNEL __launch_bounds__(WARPS * WARP)
weigh(const float* q, const u8* sketches, const i32* blocks, const i32* sequence, const i32* positions, const i32* most,
      i32 n_head, i32 width, float scale, float* masses) {
    dependency_release();
    dependency_wait();
    __shared__ float queries[GROUP][HEAD_DIM], zs[GROUP][CHUNK], tops[GROUP][CHUNK];
    __shared__ int4 counted[WARPS][HEADS][WORDS]; // queries times steps in 8 bits, by rank
    DYNAMIC_SHARED(u8, memory);
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const i32 head = blockIdx.y, n_head_kv = gridDim.y, t = blockIdx.z, s = sequence[t];
    const i32 behind = max(positions[t] / KV_BLOCK - TAIL_BLOCKS, 0), b0 = blockIdx.x * CHUNK;
    const i64 first = (i64)t * n_head + head * GROUP; // of the query heads
    if (most[s] < 0 || behind <= b0)
        return;
    constexpr i32 RING = STAGES > 0 ? STAGES : 1;
    u8* const stages = memory + warp * STAGES * STAGE;
    const i32 own_block = lane < BLOCKS && b0 + warp + lane * WARPS < behind
                              ? blocks[(i64)s * width + b0 + warp + lane * WARPS] : -1;
    const auto sketch_of = [&](i32 block) { return sketches + ((i64)block * n_head_kv + head) * SKETCH_BYTES; };
    const auto issue = [&](i32 n) {
        if (STAGES == 0)
            return;
        const i32 block = n < BLOCKS ? __shfl_sync(FULL_WARP, own_block, n) : -1;
        if (block >= 0)
            fetch_sketch(stages + n % RING * STAGE, sketch_of(block));
        copies_commit();
    };
#pragma unroll
    for (i32 n = 0; n < STAGES; n++)
        issue(n);
    for (i32 i = threadIdx.x; i < GROUP * HEAD_DIM; i += blockDim.x)
        queries[i / HEAD_DIM][i % HEAD_DIM] = q[first * HEAD_DIM + i];
    for (i32 i = lane; i < HEADS * WORDS; i += WARP) // what is behind the last rank stays 0
        counted[warp][i / WORDS][i % WORDS] = make_int4(0, 0, 0, 0);
    __syncthreads();
#pragma unroll 1
    for (i32 n = 0; n < BLOCKS; n++) {
        const i32 i = warp + n * WARPS;
        const i32 block = __shfl_sync(FULL_WARP, own_block, n);
        copies_wait<RING - 1>();
        __syncwarp(); // what other lanes have brought is there
        if (block < 0) {
            for (i32 h = lane; h < GROUP; h += WARP)
                zs[h][i] = 0.0f, tops[h][i] = LEAST;
            issue(n + STAGES);
            continue;
        }
        const u8* const of = STAGES ? stages + n % RING * STAGE : sketch_of(block);
        u32 codes[WORDS][2];
#pragma unroll
        for (i32 w = 0; w < WORDS; w++)
#pragma unroll
            for (i32 j = 0; j < 2; j++)
                codes[w][j] = ((const u32*)of)[w * KV_BLOCK + j * WARP + lane];
#pragma unroll 1
        for (i32 h0 = 0; h0 < GROUP; h0 += HEADS) {
            float acc[HEADS] = {}, x[MASKS][HEADS], unit[HEADS];
            u32 magnitudes[HEADS] = {};
            i32 ranks[MASKS], before = 0; // -1: not kept
#pragma unroll
            for (i32 m = 0; m < MASKS; m++) {
                const i32 c = m * WARP + lane;
                const u32 mask = ((const u32*)(of + MASK_AT))[m];
                const bool kept = mask >> lane & 1;
                ranks[m] = kept ? before + __popc(mask & ((1u << lane) - 1)) : -1;
                before += __popc(mask);
                if (HEAD_DIM % WARP && c >= HEAD_DIM)
                    continue;
                const float base = half_to_float(((const u16*)(of + BASE_AT))[c]);
                const float step = kept ? half_to_float(((const u16*)(of + STEP_AT))[ranks[m]]) : 0.0f;
#pragma unroll
                for (i32 h = 0; h < HEADS; h++)
                    if (h0 + h < GROUP) {
                        const float query = queries[h0 + h][c];
                        acc[h] = __fmaf_rn(query, base, acc[h]);
                        x[m][h] = query * step;
                        if (kept)
                            magnitudes[h] = max(magnitudes[h], __float_as_uint(x[m][h]) & 0x7fffffffu);
                    }
            }
            u32 own = 0; // of head `lane`, whose scale this lane computes for all
#pragma unroll
            for (i32 h = 0; h < HEADS; h++) {
                const u32 bits = __reduce_max_sync(FULL_WARP, magnitudes[h]);
                own = lane == h ? bits : own;
            }
            const float amax = __uint_as_float(own);
            const bool plain = own < 0x7f800000u && amax >= 0x1p-100f;
            const float own_unit = plain ? amax / 127.0f : own < 0x7f800000u ? 0.0f : __uint_as_float(NAN_BITS);
            const float own_inverse = plain ? 127.0f / amax : 0.0f;
#pragma unroll
            for (i32 h = 0; h < HEADS; h++) {
                unit[h] = __shfl_sync(FULL_WARP, own_unit, h);
                const float inverse = __shfl_sync(FULL_WARP, own_inverse, h);
#pragma unroll
                for (i32 m = 0; m < MASKS; m++)
                    if (ranks[m] >= 0 && h0 + h < GROUP) // under a scale that is NaN any bytes do
                        ((i8*)counted[warp][h])[ranks[m]] = (i8)__float2int_rn(x[m][h] * inverse);
            }
            __syncwarp();
            i32 sums[HEADS][2] = {};
#pragma unroll
            for (i32 w = 0; w < WORDS; w++)
#pragma unroll
                for (i32 h = 0; h < HEADS; h++) {
                    const int4 of_ranks = counted[warp][h][w];
#pragma unroll
                    for (i32 j = 0; j < 2; j++) {
                        sums[h][j] = __dp4a((i32)(codes[w][j] & 0x03030303u), of_ranks.x, sums[h][j]);
                        sums[h][j] = __dp4a((i32)(codes[w][j] >> 2 & 0x03030303u), of_ranks.y, sums[h][j]);
                        sums[h][j] = __dp4a((i32)(codes[w][j] >> 4 & 0x03030303u), of_ranks.z, sums[h][j]);
                        sums[h][j] = __dp4a((i32)(codes[w][j] >> 6 & 0x03030303u), of_ranks.w, sums[h][j]);
                    }
                }
            __syncwarp(); // the next heads and blocks write there
            const float rest = fold_rows(acc); // lane l has that of head l / EACH
            float own_top = LEAST;
#pragma unroll
            for (i32 h = 0; h < HEADS; h++) {
                const float other = __shfl_sync(FULL_WARP, rest, h * EACH);
                // Scores are ordered as their sums are, unless all are NaN, which is lost here and reaches z.
                const i32 largest_sum = __reduce_max_sync(FULL_WARP, max(sums[h][0], sums[h][1]));
                const float found = __fmaf_rn(unit[h], (float)largest_sum, other) * scale, top = found == found ? found : LEAST;
                const float e = exponential(__fmaf_rn(unit[h], (float)sums[h][0], other) * scale - top);
                acc[h] = e + exponential(__fmaf_rn(unit[h], (float)sums[h][1], other) * scale - top);
                own_top = lane / EACH == h ? top : own_top;
            }
            const float z = fold_rows(acc);
            const i32 h = h0 + lane / EACH;
            if (lane % EACH == 0 && h < GROUP)
                zs[h][i] = z, tops[h][i] = own_top;
        }
        __syncwarp(); // the stage is free
        issue(n + STAGES);
    }
    __syncthreads();
    for (i32 h = warp; h < GROUP; h += WARPS) {
        float top = LEAST, sum = 0.0f, *const to = masses + (first + h) * 2 * width;
        for (i32 i = lane; i < CHUNK; i += WARP)
            top = largest(top, tops[h][i]);
#pragma unroll
        for (i32 o = 16; o > 0; o >>= 1)
            top = largest(top, __shfl_xor_sync(FULL_WARP, top, o));
        for (i32 i = lane; i < CHUNK; i += WARP) {
            const i32 b = b0 + i;
            const bool there = b < behind && blocks[(i64)s * width + b] >= 0;
            const float mass = there ? zs[h][i] * exponential(tops[h][i] - top) : 0.0f;
            sum = sum + mass;
            if (b < behind)
                to[b] = mass;
        }
        sum = fold(sum);
        if (lane == 0)
            to[width + blockIdx.x] = top, to[width + gridDim.x + blockIdx.x] = sum;
    }
}

// A block's threads have SPAN blocks of keys; the first writes `left`, in which the sum is that of all masses.
KERNEL __launch_bounds__(WARPS * WARP)
score(const i32* blocks, const i32* sequence, const i32* positions, const i32* most, const u8* keep, i32 n_head,
      i32 width, const float* masses, float* left, i32* scores) {
    dependency_release();
    dependency_wait();
    __shared__ float factors[GROUP][SPAN / CHUNK], totals[GROUP];
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const i32 head = blockIdx.y, n_head_kv = gridDim.y, t = blockIdx.z, s = sequence[t];
    const i32 behind = max(positions[t] / KV_BLOCK - TAIL_BLOCKS, 0), b = blockIdx.x * SPAN + threadIdx.x;
    const i32 n_chunks = (behind + CHUNK - 1) / CHUNK, most_chunks = (width + CHUNK - 1) / CHUNK;
    if (most[s] < 0 || behind <= (i32)blockIdx.x * SPAN)
        return;
    masses += ((i64)t * n_head + head * GROUP) * 2 * width, left += ((i64)t * n_head + head * GROUP) * 2;
    for (i32 h = warp; h < GROUP; h += WARPS) {
        const float* const chunks = masses + 2 * h * width + width;
        const Whole whole = whole_of(chunks, n_chunks, most_chunks);
        const i32 chunk = blockIdx.x * (SPAN / CHUNK) + lane;
        if (lane < SPAN / CHUNK && chunk < n_chunks)
            factors[h][lane] = factor_of(chunks[chunk], whole.top);
        if (lane == 0)
            totals[h] = whole.total;
        if (lane == 0 && blockIdx.x == 0)
            left[2 * h] = whole.top, left[2 * h + 1] = whole.total;
    }
    __syncthreads();
    if (b >= behind)
        return;
    i32 best = b == 0 || keep[(i64)s * width + b] || blocks[(i64)s * width + b] < 0 ? -1 : 0;
#pragma unroll
    for (i32 h = 0; h < GROUP; h++) {
        const float share = masses[2 * h * width + b] * factors[h][threadIdx.x / CHUNK] / totals[h];
        if (best >= 0)
            best = max(best, (i32)(share == share ? __float_as_uint(share) : NAN_BITS));
    }
    scores[((i64)t * n_head_kv + head) * width + b] = best;
}

// The sum of what all threads of a block have, for all of them.
DEVICE i32 sum_of_block(i32 own, i32 (&sums)[WARPS]) {
    own = __reduce_add_sync(FULL_WARP, own);
    __syncthreads(); // nobody reads what was there before
    if (threadIdx.x % WARP == 0)
        sums[threadIdx.x / WARP] = own;
    __syncthreads();
    i32 sum = 0;
#pragma unroll
    for (i32 i = 0; i < WARPS; i++)
        sum += sums[i];
    return sum;
}

// Scores of n_held blocks have room in shared memory, which all passes over them read: all of a row's, or they stay where
// they are.
KERNEL __launch_bounds__(WARPS * WARP)
choose(const i32* sequence, const i32* positions, const i32* most, const i32* leave, i32 n_head, i32 width,
       const float* masses, u8* chosen, float* left, i32* read, i32* list, i32* last, i32 n_held) {
    dependency_release();
    dependency_wait();
    __shared__ i32 counts[256], found[2], sums[2][WARPS];
    DYNAMIC_SHARED(i32, held);
    __shared__ u32 units[GROUP][256], below[GROUP], digits[GROUP];
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n_threads = WARPS * WARP;
    const i32 head = blockIdx.x, n_head_kv = gridDim.x, t = blockIdx.y, s = sequence[t];
    const i32 position = positions[t], row_block = position / KV_BLOCK, behind = max(row_block - TAIL_BLOCKS, 0);
    const i64 first = (i64)t * n_head + head * GROUP;
    chosen += ((i64)t * n_head_kv + head) * width, list += ((i64)t * n_head_kv + head) * width;
    masses += first * 2 * width, left += first * 2, read += t * n_head_kv + head, last += t * n_head_kv + head;

    const bool holds = behind <= n_held;
    i32* const scores = holds ? held : list;
    i32 wanted = most[s], candidates = 0;
    for (i32 b = threadIdx.x; b < behind && wanted >= 0; b += n_threads) { // who wrote one reads it, or waits below
        const i32 score = list[b];
        candidates += score >= 0;
        if (holds)
            held[b] = score;
    }
    candidates = sum_of_block(candidates, sums[0]);
    const i32 may_leave = leave[s];
    const bool all = wanted < 0 || !candidates || (may_leave < 0 && candidates <= wanted);
    for (i32 b = threadIdx.x; b < width; b += n_threads)
        chosen[b] = b <= row_block;
    if (all) {
        for (i32 b = threadIdx.x; b <= row_block; b += n_threads)
            list[b] = b;
        for (i32 h = threadIdx.x; h < GROUP; h += n_threads)
            left[2 * h] = LEAST, left[2 * h + 1] = 0.0f;
        if (threadIdx.x == 0)
            *last = position, *read = row_block + 1;
        return;
    }

    wanted = min(wanted, candidates);
    if (may_leave >= 0) { // the largest `least`, byte by byte, below which no head has more units than it may leave
        u32 least = 0;
        for (i32 h = threadIdx.x; h < GROUP; h += n_threads)
            below[h] = 0;
#pragma unroll 1
        for (i32 shift = 24; shift >= 0; shift -= 8) {
            for (i32 i = threadIdx.x; i < GROUP * 256; i += n_threads)
                units[i / 256][i % 256] = 0;
            __syncthreads();
            for (i32 b = threadIdx.x; b < behind; b += n_threads) {
                const i32 score = scores[b];
                if (score < 0 || (shift < 24 && score >> (shift + 8) != (i32)(least >> (shift + 8))))
                    continue;
                for (i32 h = 0; h < GROUP; h++) {
                    const float *const mass = masses + 2 * h * width, factor = factor_of(mass[width + b / CHUNK], left[2 * h]);
                    const float share = mass[b] * factor / left[2 * h + 1];
                    atomicAdd(&units[h][score >> shift & 255],
                              share >= 1.0f ? 1u << 24 : share > 0.0f ? (u32)(share * 0x1p24f) : 0u);
                }
            }
            __syncthreads();
            for (i32 h = warp; h < GROUP; h += WARPS) { // a lane has eight digits, the largest ones in the last lane
                u32 mine = 0;
                for (i32 i = 0; i < 8; i++)
                    mine += units[h][lane * 8 + i];
                u32 up_to = mine;
#pragma unroll
                for (i32 o = 1; o < WARP; o <<= 1) {
                    const u32 other = __shfl_sync(FULL_WARP, up_to, max(lane - o, 0));
                    up_to += lane >= o ? other : 0;
                }
                u32 left_out = below[h] + up_to - mine;
                i32 n = 0; // digits with no more than that below them
                for (i32 i = 0; i < 8; i++) {
                    n += left_out <= (u32)may_leave;
                    left_out += units[h][lane * 8 + i];
                }
                n = __reduce_add_sync(FULL_WARP, n);
                if (lane == 0)
                    digits[h] = n - 1;
            }
            __syncthreads();
            u32 digit = 255;
            for (i32 h = 0; h < GROUP; h++)
                digit = min(digit, digits[h]);
            for (i32 h = warp; h < GROUP; h += WARPS) {
                u32 sum = 0;
                for (i32 i = lane; i < (i32)digit; i += WARP)
                    sum += units[h][i];
                sum = __reduce_add_sync(FULL_WARP, sum);
                if (lane == 0)
                    below[h] += sum;
            }
            least |= digit << shift;
            __syncthreads();
        }
        least = min(least, NAN_BITS);
        i32 needed = 0;
        for (i32 b = threadIdx.x; b < behind; b += n_threads)
            needed += scores[b] >= (i32)least;
        wanted = min(wanted, sum_of_block(needed, sums[0]));
    }

    // The `wanted`-th largest score, byte by byte; how many of its like are read.
    i32 bound = 0, ties = wanted;
#pragma unroll 1
    for (i32 shift = 24; shift >= 0 && wanted; shift -= 8) {
        for (i32 i = threadIdx.x; i < 256; i += n_threads)
            counts[i] = 0;
        __syncthreads();
        for (i32 b = threadIdx.x; b < behind; b += n_threads) {
            const i32 score = scores[b];
            if (score >= 0 && (shift == 24 || score >> (shift + 8) == bound >> (shift + 8)))
                atomicAdd(&counts[score >> shift & 255], 1);
        }
        __syncthreads();
        if (warp == 0) { // a lane has eight counts, the largest bytes in the last lane
            i32 mine = 0;
            for (i32 i = 0; i < 8; i++)
                mine += counts[lane * 8 + i];
            i32 above = mine; // of this lane and those behind it
#pragma unroll
            for (i32 o = 1; o < WARP; o <<= 1) {
                const i32 other = __shfl_sync(FULL_WARP, above, min(lane + o, WARP - 1));
                above += lane + o < WARP ? other : 0;
            }
            above -= mine;
            if (above < ties && above + mine >= ties)
                for (i32 i = 7; i >= 0; i--) {
                    const i32 n = counts[lane * 8 + i];
                    if (above + n >= ties) {
                        found[0] = lane * 8 + i, found[1] = above;
                        break;
                    }
                    above += n;
                }
        }
        __syncthreads();
        bound |= found[0] << shift;
        ties -= found[1];
        __syncthreads();
    }
    if (!wanted)
        bound = 0x7fffffff;

    // A warp has so many blocks, in order.
    const i32 each = (behind + WARPS * WARP - 1) / (WARPS * WARP) * WARP, begin = warp * each;
    const i32 end = min(begin + each, behind);
    i32 n_ties = 0;
    for (i32 b0 = begin; b0 < end; b0 += WARP)
        n_ties += __popc(__ballot_sync(FULL_WARP, b0 + lane < end && scores[b0 + lane] == bound));
    __syncthreads(); // nobody reads the sums of before
    if (lane == 0)
        sums[0][warp] = n_ties;
    __syncthreads();
    for (i32 i = 0; i < warp; i++)
        ties -= sums[0][i];
    i32 n_read = 0;
    for (i32 b0 = begin; b0 < end; b0 += WARP) {
        const i32 b = b0 + lane, score = b < end ? scores[b] : 0;
        const bool tie = b < end && score == bound;
        const u32 alike = __ballot_sync(FULL_WARP, tie);
        const bool reads = b < end && (score < 0 || score > bound || (tie && __popc(alike & ((1u << lane) - 1)) < ties));
        ties -= __popc(alike);
        n_read += __popc(__ballot_sync(FULL_WARP, reads));
        if (b < end)
            chosen[b] = reads;
        if (b < end && holds)
            held[b] = reads;
    }
    if (lane == 0)
        sums[1][warp] = n_read;
    __syncthreads();
    i32 at = 0, n_listed = 0;
    for (i32 i = 0; i < WARPS; i++) {
        at += i < warp ? sums[1][i] : 0;
        n_listed += sums[1][i];
    }
    for (i32 b0 = begin; b0 < end; b0 += WARP) {
        const bool reads = b0 + lane < end && (holds ? held[b0 + lane] != 0 : chosen[b0 + lane] != 0);
        const u32 listed = __ballot_sync(FULL_WARP, reads);
        if (reads)
            list[at + __popc(listed & ((1u << lane) - 1))] = b0 + lane;
        at += __popc(listed);
    }
    for (i32 b = behind + threadIdx.x; b <= row_block; b += n_threads)
        list[n_listed + b - behind] = b;
    if (threadIdx.x == 0) {
        *last = (n_listed + row_block - behind) * KV_BLOCK + position % KV_BLOCK;
        *read = n_listed + row_block - behind + 1;
    }
    __syncthreads(); // the list is there
    if (wanted == candidates) {
        for (i32 h = threadIdx.x; h < GROUP; h += n_threads)
            left[2 * h] = LEAST, left[2 * h + 1] = 0.0f;
        return;
    }
    for (i32 h = warp; h < GROUP; h += WARPS) {
        const float *const mass = masses + 2 * h * width, *const chunks = mass + width;
        float sum = 0.0f;
        for (i32 i = lane; i < n_listed; i += WARP) {
            const i32 b = list[i];
            sum = sum + mass[b] * factor_of(chunks[b / CHUNK], left[2 * h]);
        }
        const float rest = left[2 * h + 1] - fold(sum);
        if (lane == 0)
            left[2 * h + 1] = rest < 0.0f ? 0.0f : rest;
    }
}

#endif

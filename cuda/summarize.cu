// Sketches of blocks of keys (docs/arithmetic.md, "Recall"): sketches [n_blocks, K, SKETCH_BYTES] of blocks[i], which lies at
// places[i]. Twin: summarize of engine/ops/reference.py, bit for bit. Grid (n, K), blocks of SUMMING_THREADS threads.
//
// Macros: HEAD_DIM, K_TYPE (kv_types.cuh), HOMES (homes.cuh), SUMMING_THREADS.
#include "homes.cuh"
#include "kv_types.cuh"
#define SKETCHES
#include "recall.cuh"

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

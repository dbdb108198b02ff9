// The choice of experts and what the slots make of it, for one MoE layer; settle.cuh has the macros.
//
// route         T <= 32. One block of a multiple of 32 threads, at least max(E, T * A) and at most MOST_THREADS: choice,
//               tables, active table. A token's imposed experts are distinct.
// choose        any T. A warp a row, blocks of 256 threads.
// follow        the tables alone, after `choose`; one block of 1024 threads.
#include "settle.cuh"

#define CHOOSE_WARPS 8
#define MOST_THREADS (EXPERTS <= 128 ? 1024 : 512) // of `route`: registers

// --- the choice -------------------------------------------------------------------------------------

KERNEL choose(const float* logits, int T, int renormalize, const float* bias, float scale, const float* expert_scale,
              const i32* imposed, i32* experts, float* weights) {
    __shared__ i32 picked[CHOOSE_WARPS][USED];
    const int lane = threadIdx.x % WARP, t = (int)((blockIdx.x * blockDim.x + threadIdx.x) / WARP);
    if (t >= T)
        return;
    float x[PER_LANE], biases[PER_LANE];
    load_row(logits + t * EXPERTS, lane, x);
    if (BIAS)
        load_row(bias, lane, biases);
    const Pick pick = pick_row(logits + t * EXPERTS, x, biases, imposed ? imposed + t * USED : nullptr, lane,
                               picked[threadIdx.x / WARP]);
    const float weight = weigh_row(logits + t * EXPERTS, pick, {renormalize, scale, expert_scale}, lane);
    if (lane < USED) {
        experts[t * USED + lane] = pick.expert;
        weights[t * USED + lane] = weight;
    }
}

KERNEL __launch_bounds__(MOST_THREADS) route(ROUTE_PARAMETERS) {
    __shared__ Step step;
    const Route r = ROUTE_ARGUMENTS;
    settle_step(step, r, r.T > 1 || EXPERTS <= 128, {}); // ptx.cuh
}

// `source` [E, 3], if given, gets where every expert was before the step.
KERNEL follow(const i32* experts, int T, const u8* counted, int layer, int memory, const i32* slot_begin,
               i32* slot_of, i32* expert_of, i64* heat_of, const u8* pinned, i64* clock, i64* counts, i64* hits,
               i64* misses, u64* expert_ptr, const u64* home_ptr, const u64* slot_ptr, i32* fetch_rows, i32* fetch_count,
               u64* source) {
    __shared__ Step step;
    const int i = threadIdx.x, n = blockDim.x;
    const Slots s = {slot_of + layer * EXPERTS,  expert_of,      heat_of + layer * EXPERTS, pinned,
                     clock + layer,              counts + layer * EXPERTS, hits + layer, misses + layer,
                     expert_ptr + layer * EXPERTS * 3, home_ptr + layer * EXPERTS * 3, slot_ptr};
    const int begin = slot_begin[layer], end = slot_begin[layer + 1];
    const i64 now = *s.clock + 1;
    const i32 slot = i < EXPERTS ? s.slot_of[i] : 0;
    const i64 heat = i < EXPERTS ? s.heat[i] : 0;
    if (source)
        for (int j = i; j < EXPERTS * 3; j += n)
            source[j] = s.expert_ptr[j];
    clear(step);
    __syncthreads();
    const OwnSlot own = load_slot(s, begin, end);
#pragma unroll 4
    for (int pair = i; pair < T * USED; pair += n) {
        const i32 expert = experts[pair];
        if (counted[pair / USED])
            atomicAdd(&step.counted[expert], 1u);
    }
    const int recent = min(T, RECENT_TOKENS), skipped = (T - recent) * USED;
    if (i < recent * USED) {
        const i32 expert = experts[skipped + i];
        step.chosen[i] = expert;
        atomicAdd(&step.uses[expert], 1u);
        atomicMin(&step.first_pair[expert], i);
    }
    if (i < EXPERTS)
        step.resident[i] = slot >= 0;
    __syncthreads();
    settle<false>(step, s, own, end - begin, recent * USED, now, memory, heat, fetch_rows, fetch_count, nullptr, nullptr,
                  nullptr, {});
}

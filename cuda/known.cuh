// What the blocks of the kernel that reads experts know of the choice by themselves, of one token or two, while one of them makes
// it (settle.cuh). -DRECENT_TOKENS=1 or 2.
#pragma once

#include "settle.cuh"

// The layer's tables before the step, if `settled` says afterwards that they did not move; and the choice of two tokens.
struct Known {
    u64 source[EXPERTS * 3];
    i32 slot[EXPERTS], chosen[WARP];
};

// Of shared memory, for Step or Known (engine/ops/cuda/routing.py).
constexpr i32 CHOICE_BYTES = 2048 + 56 * EXPERTS + 48 * RECENT_TOKENS * USED;
static_assert(RECENT_TOKENS > 2 || (sizeof(Step) <= CHOICE_BYTES && sizeof(Known) <= CHOICE_BYTES), "CHOICE_BYTES");

// By a block, before it waits for the kernel ahead. A barrier has to follow.
DEVICE void load_tables(Known& known, const Route& r) {
    const Slots s = r.slots();
    for (i32 j = threadIdx.x; j < EXPERTS * 3; j += (i32)blockDim.x)
        known.source[j] = load_fresh(s.expert_ptr + j);
    for (i32 j = threadIdx.x; j < EXPERTS; j += (i32)blockDim.x)
        known.slot[j] = load_fresh(s.slot_of + j);
    __threadfence(); // `settled` is read afterwards
}

#if RECENT_TOKENS == 1
// The record of a rank, by a warp: its words (experts.cuh), if the expert is resident. Else false is returned, and they are
// to be read when the tables are settled.
DEVICE bool own_record(u64* words, const Known& known, const Route& r, i32 rank, i32 lane) {
    const u64 state = load_fresh(r.settled);
    const bool is_active = !r.active_step || *r.active_step;
    float x[PER_LANE], biases[PER_LANE];
    load_row(r.logits, lane, x);
    if (BIAS)
        load_row(r.bias, lane, biases);
    i32 expert;
    if (r.imposed) {
        expert = r.imposed[rank];
    } else {
        u32 order[PER_LANE];
        Pick pick;
        order_row(r.logits, x, biases, lane, order, pick);
        expert = expert_of_rank(order, rank, lane);
    }
    if (state || (is_active && known.slot[expert] < 0))
        return false;
    if (lane < 3)
        words[lane] = known.source[expert * 3 + lane], words[3 + lane] = 0;
    if (lane == 3)
        words[6] = (u64)(u32)rank << 32 | (u32)expert, words[7] = 1, words[8] = is_active;
    return true;
}
#else
// The choice of two tokens, by a block: whether all experts are resident. If not, and where the step does nothing, the active
// table is to be read when it is settled.
DEVICE bool own_choice(Known& known, const Route& r) {
    const i32 lane = threadIdx.x % WARP, t = threadIdx.x / WARP;
    bool is_open = load_fresh(r.settled) || (r.active_step && !*r.active_step);
    if (t < r.T) {
        float x[PER_LANE], biases[PER_LANE];
        load_row(r.logits + t * EXPERTS, lane, x);
        if (BIAS)
            load_row(r.bias, lane, biases);
        const Pick pick = pick_row(r.logits + t * EXPERTS, x, biases, r.imposed ? r.imposed + t * USED : nullptr, lane,
                                   known.chosen + t * USED);
        is_open |= known.slot[pick.expert] < 0;
    }
    return !__syncthreads_or(is_open);
}

// A lane's word of record i, by a warp (experts.cuh), and in lanes 0 and 1 the pairs of its uses. False: there is no such record.
DEVICE bool own_record(u64& word, i32& pair, const Known& known, i32 n_pairs, i32 i, i32 lane) {
    const i32 of = lane < n_pairs ? known.chosen[lane] : -1;
    const u32 alike = __match_any_sync(FULL_WARP, of), before = (1u << lane) - 1;
    const bool first = of >= 0 && !(alike & before);
    const u32 firsts = __ballot_sync(FULL_WARP, first);
    const u32 found = __ballot_sync(FULL_WARP, first && __popc(firsts & before) == i);
    if (!found)
        return false;
    const i32 expert = __shfl_sync(FULL_WARP, of, __ffs((i32)found) - 1);
    const u32 uses = __shfl_sync(FULL_WARP, alike, __ffs((i32)found) - 1);
    pair = __ffs((i32)(lane ? uses & (uses - 1) : uses)) - 1;
    word = lane < 3 ? known.source[expert * 3 + lane] : lane == 6 ? (u32)expert : lane == 7 ? __popc(uses) : 0;
    return true;
}
#endif

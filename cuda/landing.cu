// The guesses of a layer, beside the kernels of the layer before: scores of its experts from the residual that enters that
// one, and the bytes of the likeliest that are not resident (landing.cuh). Twins: `Trained.scores` and `Router.scores` of
// engine/formats/pregate.py, `margins` and `ranked` of engine/placing/guesses.py. Nothing here changes a bit of a step: the
// residual may change while it is read, and `route` may move the tables, which makes for other guesses and no other bytes.
//
// -DEXPERTS=E (<= 512), -DUSED=A (<= 16).
//
// score   out [N] = weight [N, D] x / rms(x) + bias [N] + more [N, H] hidden [H]; RELU: no less than 0. Weights are halves,
//         D a multiple of 8. bias, more may be null. Blocks of 8 warps, a warp a row.
// bring   any grid, blocks of 512 threads.
#include "landing.cuh"

#define SCORE_WARPS 8

DEVICE float sum_of(float v) {
#pragma unroll
    for (int j = WARP / 2; j; j /= 2)
        v += __shfl_xor_sync(FULL_WARP, v, j);
    return v;
}

KERNEL score(const u16* weight, const float* bias, const float* x, i32 D, i32 N, float eps, const u16* more,
             const float* hidden, i32 H, i32 relu, const i32* active_step, const u64* words, float* out) {
    const i32 lane = threadIdx.x % WARP, row = blockIdx.x * SCORE_WARPS + threadIdx.x / WARP;
    if (row >= N || !guesses_now(words) || (active_step && !*active_step))
        return;
    float sum = 0.0f, squares = 0.0f;
#pragma unroll 4
    for (i32 d = 8 * lane; d < D; d += 8 * WARP) {
        const uint4 w = load_once16(weight + (i64)row * D + d);
        const u32 pairs[4] = {w.x, w.y, w.z, w.w};
        const float4 v[2] = {*(const float4*)(x + d), *(const float4*)(x + d + 4)};
        const float xs[8] = {v[0].x, v[0].y, v[0].z, v[0].w, v[1].x, v[1].y, v[1].z, v[1].w};
#pragma unroll
        for (i32 i = 0; i < 8; i++) {
            sum += half_to_float((u16)(pairs[i / 2] >> 16 * (i % 2))) * xs[i];
            squares += xs[i] * xs[i];
        }
    }
    sum = sum_of(sum) / sqrtf(sum_of(squares) / (float)D + eps);
    float beside = 0.0f;
    if (more)
        for (i32 i = lane; i < H; i += WARP)
            beside += half_to_float(more[(i64)row * H + i]) * hidden[i];
    const float s = sum + sum_of(beside) + (bias ? bias[row] : 0.0f);
    if (lane == 0)
        out[row] = relu ? max(s, 0.0f) : s;
}

enum { BY_SCORE, BY_SIGMOID, BY_SHARE }; // plus the bias of the choice

// Bytes of a unit, of both matrices at once: many reads are under way.
DEVICE void bring_two(u8* to0, const u8* from0, i64 n0, u8* to1, const u8* from1, i64 n1) {
    constexpr i32 UNROLL = 6;
    const i64 a = (n0 + 15) / 16, n = a + (n1 + 15) / 16, step = (i64)blockDim.x * UNROLL;
    for (i64 start = threadIdx.x; start < n; start += step) {
        uint4 v[UNROLL];
#pragma unroll
        for (i32 i = 0; i < UNROLL; i++) {
            const i64 at = start + i * (i64)blockDim.x;
            if (at < n)
                v[i] = load_once16(at < a ? from0 + 16 * at : from1 + 16 * (at - a));
        }
#pragma unroll
        for (i32 i = 0; i < UNROLL; i++) {
            const i64 at = start + i * (i64)blockDim.x;
            if (at < n)
                *(uint4*)(at < a ? to0 + 16 * at : to1 + 16 * (at - a)) = v[i];
        }
    }
}

// Copies what the layer is likely to miss: at most LANDING_SLOTS experts that are not resident, of those whose margins exceed
// least_margin the likeliest; or those of `imposed` [LANDING_SLOTS], -1: none. Their units in this order, of each first its
// n_groups of gate and up, then its copiers' of down; a block begins none of an expert that `route` did not miss.
//
// Bytes are those of home_ptr [E, 3] of the layer, which nobody moves while a step runs. landing: the set's slots, slot_bytes
// each, with gate, and up and down at up_at and down_at. gate_bytes, up_bytes: of LANDING_ROWS rows.
KERNEL __launch_bounds__(512)
    bring(const float* scores, i32 rule, const float* bias, float least_margin, const i32* imposed,
          const i32* active_step, i32 layer, const i32* slot_of, const u64* home_ptr, i64 gate_bytes, i64 up_bytes,
          i64 gate_size, i64 up_size, i64 down_size, i32 n_groups, i32 copiers, u8* landing, i64 slot_bytes, i64 up_at,
          i64 down_at, u64* words, u64* set_words, i32 most_units) {
    __shared__ float values[EXPERTS], last, beyond;
    __shared__ i32 order[EXPERTS]; // of a candidate, its rank; else EXPERTS
    __shared__ i32 chosen[LANDING_SLOTS], goes_on;
    const LandingSet set = {set_words, most_units};
    const i32 i = threadIdx.x;
    if (!guesses_now(words) || (active_step && !*active_step))
        return;
    const u64 step = load_fresh(words + LANDING_STEP);
    const bool is_away = i < EXPERTS && load_fresh(slot_of + i) < 0 && home_ptr[3 * i];
    if (i < LANDING_SLOTS)
        chosen[i] = -1;
    if (imposed) {
        __shared__ bool away[EXPERTS];
        if (i < EXPERTS)
            away[i] = is_away;
        __syncthreads();
        if (i < LANDING_SLOTS && imposed[i] >= 0 && away[imposed[i]])
            chosen[i] = imposed[i];
    } else {
        float s = i < EXPERTS ? scores[i] : 0.0f;
        if (i < EXPERTS)
            values[i] = s;
        __syncthreads();
        if (rule == BY_SIGMOID)
            s = 1.0f / (1.0f + exp2f(-1.4426950408889634f * s));
        if (rule == BY_SHARE) {
            float most = values[0], sum = 0.0f;
            for (i32 j = 1; j < EXPERTS; j++)
                most = max(most, values[j]);
            for (i32 j = 0; j < EXPERTS; j++)
                sum += exp2f(1.4426950408889634f * (values[j] - most));
            s = exp2f(1.4426950408889634f * (s - most)) / sum;
        }
        __syncthreads();
        if (bias && i < EXPERTS)
            s += bias[i];
        if (i < EXPERTS)
            values[i] = s;
        __syncthreads();
        i32 rank = 0;
        if (i < EXPERTS) {
#pragma unroll 8
            for (i32 j = 0; j < EXPERTS; j++)
                rank += values[j] > s || (values[j] == s && j < i);
            if (rank == USED - 1)
                last = s;
            if (rank == (USED < EXPERTS ? USED : EXPERTS - 1))
                beyond = s;
        }
        __syncthreads();
        const bool is_likely = is_away && s - (0.5f * last + 0.5f * beyond) > least_margin;
        if (i < EXPERTS)
            order[i] = is_likely ? rank : EXPERTS;
        __syncthreads();
        if (is_likely) {
            i32 ahead = 0;
#pragma unroll 8
            for (i32 j = 0; j < EXPERTS; j++)
                ahead += order[j] < rank;
            if (ahead < LANDING_SLOTS)
                chosen[ahead] = i;
        }
    }
    __syncthreads();
    if (blockIdx.x == 0 && i < LANDING_SLOTS) {
        if (chosen[i] >= 0)
            atomicAdd(words + LANDING_MADE, (u64)1);
        *(volatile u64*)set.tag(i) = chosen[i] < 0 ? 0 : landing_tag(step, layer, chosen[i]);
    }
    const i32 n_units = n_groups + copiers;
    for (i32 n = blockIdx.x; n < LANDING_SLOTS * n_units; n += gridDim.x) {
        const i32 slot = n / n_units, place = n % n_units, expert = chosen[slot];
        if (expert < 0)
            continue;
        const u64 tag = landing_tag(step, layer, expert);
        const i32 group = place < n_groups ? place : -1, unit = group < 0 ? place - n_groups : copiers + group;
        u64* const word = set.unit(slot, unit);
        if (i == 0) {
            const u64 ended = load_fresh(set.ended()), seen = load_fresh(word);
            const u64 own = landing_layer(step, layer); // a later layer, or step, has this set by now: too late
            const bool is_over = ended / 256 > own || (ended / 256 == own && !(ended >> slot & 1));
            goes_on = !is_over && seen / 4 != tag && atomicCAS(word, seen, tag * 4 + UNIT_BEGUN) == seen;
        }
        __syncthreads();
        const bool begins = goes_on;
        i64 n_bytes = 0;
        if (begins) {
            u8* const to = landing + slot * slot_bytes;
            const u64* const from = home_ptr + 3 * expert;
            if (group >= 0) {
                const i64 at0 = group * gate_bytes, at1 = group * up_bytes;
                const i64 n0 = min(gate_bytes, gate_size - at0), n1 = min(up_bytes, up_size - at1);
                bring_two(to + at0, (const u8*)from[0] + at0, n0, to + up_at + at1, (const u8*)from[1] + at1, n1);
                n_bytes = n0 + n1;
            } else {
                const i64 each = share_of(down_size, copiers), at = unit * each;
                n_bytes = max((i64)0, min(each, down_size - at));
                bring_two(to + down_at + at, (const u8*)from[2] + at, n_bytes, nullptr, nullptr, 0);
            }
            __threadfence();
        }
        __syncthreads();
        if (begins && i == 0) {
            __threadfence(); // of all that the barrier has gathered
            *(volatile u64*)word = tag * 4 + UNIT_LANDED;
            atomicAdd(words + LANDING_BROUGHT, (u64)n_bytes);
        }
    }
}

// The guesses of a step, beside its other kernels: scores of a layer's experts from the residual that enters the layer
// before, and the bytes of the likeliest that are not resident (landing.cuh). Twins: `Trained.scores` and `Router.scores`
// of engine/formats/pregate.py, `margins` and `ranked` of engine/placing/guesses.py. Nothing here changes a bit of a step:
// the residual may change while it is read, and `route` may move the tables, which makes for other guesses and no other
// bytes.
//
// -DEXPERTS=E (<= 512), -DUSED=A (<= 16).
//
// bring   layers first .. last of a step, of which the first one's residual is there, and the others' is waited for. So one launch
//         can run beside all of a step. At most 32 blocks of a multiple of 32 threads, which wait for one another: they get room
//         sooner or later, as nobody waits for them but for a unit that has begun. Whoever waits for longer than patience_ns
//         leaves, and the step has no more guesses.
#include "landing.cuh"

DEVICE float sum_of(float v) {
#pragma unroll
    for (int j = WARP / 2; j; j /= 2)
        v += __shfl_xor_sync(FULL_WARP, v, j);
    return v;
}

enum { BY_SCORE, BY_SIGMOID, BY_SHARE }; // plus the bias of the choice

// Of a layer (engine/ops/cuda/landing.py). Scores are weight [E, D] x / rms(x) + bias [E] + output [E, H] z, where z is
// max(0, hidden_weight [H, D] x / rms(x) + hidden_bias [H]) of n_hidden units, if any. Weights are halves. gate_bytes,
// up_bytes: of LANDING_ROWS rows. home_ptr [E, 3]: bytes that nobody moves while a step runs. landing: the set's slots.
struct LandingLayer {
    const u16* weight;
    const float* bias;
    const u16* hidden_weight;
    const float* hidden_bias;
    const u16* output_weight;
    const float* choice_bias;
    const i32* imposed; // [LANDING_SLOTS] in place of what is likely, -1: none; or null
    const i32* slot_of;
    const u64* home_ptr;
    u8* landing;
    u64* set_words;
    i64 gate_bytes, up_bytes, gate_size, up_size, down_size;
    i32 n_hidden, rule, n_groups;
    float least_margin;
};

// What a warp makes at once, so that x is loaded for several rows.
#define SCORE_ROWS 2

// out [N] of the grid's warps together. What is read was written while the kernel ran, so it comes from the L2 cache.
DEVICE void score(const u16* weight, const float* bias, const float* x, i32 D, i32 N, float eps, const u16* more,
                  const float* hidden, i32 H, bool relu, float* out) {
    const i32 lane = threadIdx.x % WARP, n_warps = blockDim.x / WARP, step = gridDim.x * n_warps;
    for (i32 first = blockIdx.x * n_warps + threadIdx.x / WARP; first < N; first += SCORE_ROWS * step) {
        float sums[SCORE_ROWS] = {}, squares = 0.0f;
#pragma unroll 1
        for (i32 d = 8 * lane; d < D; d += 8 * WARP) {
            const uint4 v[2] = {load_shared16(x + d), load_shared16(x + d + 4)};
            const float xs[8] = {__uint_as_float(v[0].x), __uint_as_float(v[0].y), __uint_as_float(v[0].z),
                                 __uint_as_float(v[0].w), __uint_as_float(v[1].x), __uint_as_float(v[1].y),
                                 __uint_as_float(v[1].z), __uint_as_float(v[1].w)};
#pragma unroll
            for (i32 i = 0; i < 8; i++)
                squares += xs[i] * xs[i];
#pragma unroll
            for (i32 k = 0; k < SCORE_ROWS; k++) {
                const i32 row = min(first + k * step, N - 1);
                const uint4 w = load_once16(weight + (i64)row * D + d);
                const u32 pairs[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
                for (i32 i = 0; i < 8; i++)
                    sums[k] += half_to_float((u16)(pairs[i / 2] >> 16 * (i % 2))) * xs[i];
            }
        }
        const float rms = sqrtf(sum_of(squares) / (float)D + eps);
#pragma unroll
        for (i32 k = 0; k < SCORE_ROWS; k++) {
            const i32 row = first + k * step;
            if (row >= N)
                break;
            float beside = 0.0f;
            if (more)
                for (i32 i = lane; i < H; i += WARP)
                    beside += half_to_float(more[(i64)row * H + i]) * *(const volatile float*)(hidden + i);
            const float s = sum_of(sums[k]) / rms + sum_of(beside) + (bias ? bias[row] : 0.0f);
            if (lane == 0)
                *(volatile float*)(out + row) = relu ? max(s, 0.0f) : s;
        }
    }
}

// All blocks are as far as this; false: some do not come.
DEVICE bool meet(u64* words, u64 place, i64 patience_ns) {
    __threadfence();
    __syncthreads();
    const u64 begin = clock_ns();
    volatile u64* const arrived = words + LANDING_ARRIVED;
    if (threadIdx.x == 0)
        arrived[blockIdx.x] = place;
    bool is_there = true;
    if (threadIdx.x < gridDim.x && threadIdx.x != blockIdx.x)
        while (arrived[threadIdx.x] < place && is_there)
            is_there = clock_ns() - begin < (u64)patience_ns;
    const bool missing = __syncthreads_or(!is_there);
    __threadfence();
    return !missing;
}

// Which experts are guessed, -1: none, the likeliest first; by a block. scores: raw ones, of all experts.
DEVICE void choose(i32* chosen, const LandingLayer& l, const float* scores) {
    __shared__ float raw[EXPERTS], values[EXPERTS], last, beyond;
    __shared__ i32 order[EXPERTS]; // of a candidate, its rank; else EXPERTS
    auto is_away = [&](i32 e) { return load_fresh(l.slot_of + e) < 0 && l.home_ptr[3 * e]; };
    if (threadIdx.x < LANDING_SLOTS) {
        const i32 e = l.imposed ? l.imposed[threadIdx.x] : -1;
        chosen[threadIdx.x] = e >= 0 && is_away(e) ? e : -1;
    }
    if (l.imposed)
        return;
    for (i32 e = threadIdx.x; e < EXPERTS; e += blockDim.x)
        raw[e] = *(const volatile float*)(scores + e);
    __syncthreads();
    for (i32 e = threadIdx.x; e < EXPERTS; e += blockDim.x) {
        float s = raw[e];
        if (l.rule == BY_SIGMOID)
            s = 1.0f / (1.0f + exp2f(-1.4426950408889634f * s));
        if (l.rule == BY_SHARE) {
            float most = raw[0], sum = 0.0f;
            for (i32 j = 1; j < EXPERTS; j++)
                most = max(most, raw[j]);
            for (i32 j = 0; j < EXPERTS; j++)
                sum += exp2f(1.4426950408889634f * (raw[j] - most));
            s = exp2f(1.4426950408889634f * (s - most)) / sum;
        }
        values[e] = l.choice_bias ? s + l.choice_bias[e] : s;
    }
    __syncthreads();
    for (i32 e = threadIdx.x; e < EXPERTS; e += blockDim.x) {
        const float s = values[e];
        i32 rank = 0;
#pragma unroll 8
        for (i32 j = 0; j < EXPERTS; j++)
            rank += values[j] > s || (values[j] == s && j < e);
        if (rank == USED - 1)
            last = s;
        if (rank == (USED < EXPERTS ? USED : EXPERTS - 1))
            beyond = s;
        order[e] = is_away(e) ? rank : EXPERTS;
    }
    __syncthreads();
    for (i32 e = threadIdx.x; e < EXPERTS; e += blockDim.x)
        if (!(values[e] - (0.5f * last + 0.5f * beyond) > l.least_margin)) // nor what is no number
            order[e] = EXPERTS;
    __syncthreads();
    for (i32 e = threadIdx.x; e < EXPERTS; e += blockDim.x) {
        const i32 rank = order[e];
        if (rank == EXPERTS)
            continue;
        i32 ahead = 0;
#pragma unroll 8
        for (i32 j = 0; j < EXPERTS; j++)
            ahead += order[j] < rank;
        if (ahead < LANDING_SLOTS)
            chosen[ahead] = e;
    }
}

// Bytes of a unit, of both matrices at once: many reads are under way.
DEVICE void bring_two(u8* to0, const u8* from0, i64 n0, u8* to1, const u8* from1, i64 n1) {
    constexpr i32 UNROLL = 6;
    const i32 a = (i32)((n0 + 15) / 16), n = a + (i32)((n1 + 15) / 16), n_threads = blockDim.x;
    const i64 from_gap = from1 - from0 - 16 * (i64)a, to_gap = to1 - to0 - 16 * (i64)a;
    for (i32 start = threadIdx.x; start < n; start += n_threads * UNROLL) {
        uint4 v[UNROLL];
#pragma unroll
        for (i32 i = 0; i < UNROLL; i++) {
            const i32 at = start + i * n_threads;
            if (at < n)
                v[i] = load_once16(from0 + 16 * (i64)at + (at < a ? 0 : from_gap));
        }
#pragma unroll
        for (i32 i = 0; i < UNROLL; i++) {
            const i32 at = start + i * n_threads;
            if (at < n)
                *(uint4*)(to0 + 16 * (i64)at + (at < a ? 0 : to_gap)) = v[i];
        }
    }
}

// A unit of a slot's expert, by a block: its bytes.
struct Slots {
    i64 bytes, up_at, down_at;
    i32 copiers;
};
DEVICE i64 bring_unit(const LandingLayer& l, const Slots& s, i32 slot, i32 expert, i32 unit) {
    u8* const to = l.landing + slot * s.bytes;
    const u64* const from = l.home_ptr + 3 * expert;
    if (unit < s.copiers) {
        const i64 each = share_of(l.down_size, s.copiers), at = unit * each;
        const i64 n = max((i64)0, min(each, l.down_size - at));
        bring_two(to + s.down_at + at, (const u8*)from[2] + at, n, nullptr, nullptr, 0);
        return n;
    }
    const i32 group = unit - s.copiers;
    const i64 at0 = group * l.gate_bytes, at1 = group * l.up_bytes;
    const i64 n0 = min(l.gate_bytes, l.gate_size - at0), n1 = min(l.up_bytes, l.up_size - at1);
    bring_two(to + at0, (const u8*)from[0] + at0, n0, to + s.up_at + at1, (const u8*)from[1] + at1, n1);
    return n0 + n1;
}

enum { GOES_ON, IS_THERE, OVER, LATE };

// By one thread: GOES_ON once a word is as large, or OVER once the layer has been routed.
DEVICE i32 await(const LandingSet& set, u64 own, const u64* word, u64 least, i64 patience_ns) {
    const u64 begin = clock_ns();
    while (load_fresh(word) < least) {
        if (set.is_over(own))
            return OVER;
        if (clock_ns() - begin > (u64)patience_ns)
            return LATE;
    }
    return set.is_over(own) ? OVER : GOES_ON;
}

// The same once nothing crosses the link that is waited for.
DEVICE i32 await_link(const LandingSet& set, u64 own, const u64* words, i64 patience_ns) {
    const u64 begin = clock_ns();
    while ((i64)load_fresh(words + LANDING_BUSY) > 0) {
        if (set.is_over(own))
            return OVER;
        if (clock_ns() - begin > (u64)patience_ns)
            return LATE;
    }
    return set.is_over(own) ? OVER : GOES_ON;
}

KERNEL __launch_bounds__(256, 3) // it shares multiprocessors with the kernels of the step
    bring(const LandingLayer* layers, i32 first, i32 last, const float* x, i32 D, float eps, const i32* active_step,
          float* hidden, i32 most_hidden, float* scores, u64* words, i32 most_units, i64 slot_bytes, i64 up_at,
          i64 down_at, i32 copiers, i64 patience_ns) {
    __shared__ i32 chosen[LANDING_SLOTS], state;
    __shared__ LandingLayer l; // in registers it would be most of them
    const u64 step = load_fresh(words + LANDING_STEP); // the first layer's `route` has counted it
    if (active_step && !*active_step)
        return;
    for (i32 layer = first; layer < last; layer++) {
        if (threadIdx.x < sizeof(LandingLayer) / 8)
            ((u64*)&l)[threadIdx.x] = ((const u64*)(layers + layer))[threadIdx.x];
        __syncthreads();
        const LandingSet set = {l.set_words, most_units};
        const u64 own = landing_layer(step, layer);
        if (threadIdx.x == 0)
            state = await(set, own, words + LANDING_ENTERED, layer == first ? 0 : own, patience_ns);
        __syncthreads();
        i32 now = state;
        __syncthreads(); // of the next turn
        if (now == LATE)
            return;
        // A block that comes too late says so, as the others wait for it.
        float *const of_layer = scores + layer % 2 * EXPERTS, *const z = hidden + layer % 2 * most_hidden;
        if (now != OVER && !l.imposed && l.n_hidden)
            score(l.hidden_weight, l.hidden_bias, x, D, l.n_hidden, eps, nullptr, nullptr, 0, true, z);
        if (!l.imposed && l.n_hidden && !meet(words, own * 4 + 1, patience_ns))
            return;
        if (now != OVER && !l.imposed)
            score(l.weight, l.bias, x, D, EXPERTS, eps, l.output_weight, z, l.n_hidden, false, of_layer);
        if (!meet(words, own * 4 + 2, patience_ns))
            return;
        if (now == OVER)
            continue; // nobody reads `l` behind `meet`
        choose(chosen, l, of_layer);
        __syncthreads();
        if (blockIdx.x == 0 && threadIdx.x < LANDING_SLOTS) {
            const i32 e = chosen[threadIdx.x];
            if (e >= 0)
                atomicAdd(words + LANDING_MADE, (u64)1);
            *(volatile u64*)set.tag(threadIdx.x) = e < 0 ? 0 : landing_tag(step, layer, e);
        }
        // Of each expert first gate and up, whose rows a block of gate_up needs before it can compute.
        const i32 n_units = l.n_groups + copiers;
        for (i32 n = blockIdx.x; n < LANDING_SLOTS * n_units; n += gridDim.x) {
            const i32 slot = n / n_units, place = n % n_units, expert = chosen[slot];
            if (expert < 0)
                continue;
            const u64 tag = landing_tag(step, layer, expert);
            const i32 unit = place < l.n_groups ? copiers + place : place - l.n_groups;
            u64* const word = set.unit(slot, unit);
            if (threadIdx.x == 0) {
                state = await_link(set, own, words, patience_ns);
                const u64 seen = load_fresh(word);
                if (state == GOES_ON && (seen / 4 >= tag || atomicCAS(word, seen, tag * 4 + UNIT_BEGUN) != seen))
                    state = IS_THERE;
            }
            __syncthreads();
            now = state;
            __syncthreads();
            if (now == LATE)
                return;
            if (now == OVER)
                break;
            if (now == IS_THERE)
                continue;
            const i64 n_bytes = bring_unit(l, {slot_bytes, up_at, down_at, copiers}, slot, expert, unit);
            __syncthreads();
            if (threadIdx.x == 0) {
                __threadfence(); // of all that the barrier has gathered
                *(volatile u64*)word = tag * 4 + UNIT_LANDED;
                atomicAdd(words + LANDING_BROUGHT, (u64)n_bytes);
            }
        }
        __syncthreads(); // `chosen` is free
    }
}

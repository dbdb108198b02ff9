// From logits [V] to a token, and to the inputs of the next step. Twin: `sample` of engine/running/sampling.py, the same token
// (docs/arithmetic.md, "Sampling"); weights are integers, so sums may be taken in any order, by atomics too.
//
//   largest   penalties, mask, finite check and the maximum; greedy decoding ends here
//   weigh     weights; without top-k and top-p the draw ends here, else a histogram bounds what can be kept
//   collect   what can be kept, in a list; the exact choice in it, and the draw
//
// Each kernel's last block does what needs all blocks. Grids cover V with 4 (`collect`: 1) tokens a thread, blocks of
// 256 (`collect`: 512) threads. V <= 2^20. scratch u64 [N_SCRATCH], bin_mass and bin_count [N_BINS] are zero before the
// first step, and are left so. values float [V], masses u64 [a block of `weigh` each], list u32 [3, V]. The grid's rows
// are requests, each with a row of logits and of all these arrays; rows of values end with whole vectors.
#include "arithmetic.cuh"
#include "block.cuh"
#include "order.cuh"
#include "ptx.cuh"
#include "step.cuh"

#define PER_THREAD 4
#define THREADS 256
#define BLOCK_TOKENS (THREADS * PER_THREAD)
#define COLLECT_THREADS 512
#define N_BINS 2048
#define ID_BITS 20
#define SHARED_LIST 1024
#define SHORT_LIST 256
#define LOWEST -23.0f
#define NEGATIVE_INFINITY __uint_as_float(0xff800000u)

// BEST: order of the largest logit and the complement of its id, 0 = the step is over. CUT: 1 + the last bin to collect.
// TOTAL: the sum of all weights where top-k keeps all, else 0.
enum Scratch { BEST, BAD, BLOCKS_DONE, CUT, TOTAL, N_LISTED };
#define N_SCRATCH 8

DEVICE i64 row_of_values(int V) { return (i64)blockIdx.y * ((V + 3) / 4 * 4); }

// --- arithmetic -------------------------------------------------------------------------------------

DEVICE u64 read_u64(const i32* control, int field) { return (u32)control[field] | (u64)(u32)control[field + 1] << 32; }

DEVICE float read_float(const i32* control, int field) { return __int_as_float(control[field]); }

DEVICE u64 weight_of(float logit, float top, float temperature) {
    const float s = __fdiv_rn(logit - top, temperature);
    return s >= LOWEST ? (u64)rintf(exponential(s) * 4294967296.0f) : 0;
}

// Bins of falling logits, for what has a weight; any monotone map will do.
DEVICE int bin_of(float logit, float top, float temperature) {
    return min(max(__float2int_rz((top - logit) / temperature * (N_BINS / 24.0f)), 0), N_BINS - 1);
}

// The high half of a product of 128 bits.
DEVICE u64 high_product(u64 a, u64 b) {
    const u64 a0 = (u32)a, a1 = a >> 32, b0 = (u32)b, b1 = b >> 32;
    const u64 low = a0 * b1, high = a1 * b0, middle = ((a0 * b0) >> 32) + (u32)low + (u32)high;
    return a1 * b1 + (low >> 32) + (high >> 32) + (middle >> 32);
}

// ceil(p * mass / 2^32); p < 2^32, mass < 2^63.
DEVICE u64 target_of(u64 p, u64 mass) { return p * (mass >> 32) + ((p * (u32)mass + 0xffffffffu) >> 32); }

DEVICE u64 random_bits(u64 seed, u64 position) {
    u64 z = seed * 0x9e3779b97f4a7c15ull + position + 1;
    for (int i = 0; i < 2; i++) {
        z += 0x9e3779b97f4a7c15ull;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        z ^= z >> 31;
    }
    return z;
}

// --- the largest logit ------------------------------------------------------------------------------

// values: null where the request is greedy; else gets the logits after penalties and mask (-infinity: not allowed).
KERNEL largest(const float* logits, int V, const u32* allowed, float* values, u64* scratch, STEP_PARAMETERS) {
    __shared__ u32 repeated[BLOCK_TOKENS / 32];
    __shared__ u64 best_of_warp[THREADS / WARP];
    const int i = threadIdx.x, lane = i % WARP, begin = blockIdx.x * BLOCK_TOKENS, id = begin + i * PER_THREAD;
    float x[PER_THREAD] = {0.0f, 0.0f, 0.0f, 0.0f};
    begin_row(V, STEP_ROW);
    logits += (i64)blockIdx.y * V, allowed += (i64)blockIdx.y * ((V + 31) / 32), scratch += blockIdx.y * N_SCRATCH;
    values += values ? row_of_values(V) : 0;
    dependency_release();
    dependency_wait();
    if (id + PER_THREAD <= V) {
        const float4 v = *(const float4*)(logits + id);
        x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    } else {
        for (int j = 0; id + j < V; j++)
            x[j] = logits[id + j];
    }
    const float penalty = read_float(control, PENALTY);
    const i32 recent = history[i], n_recent = min(control[POSITION], HISTORY_TOKENS);
    const bool masked = control[MASKED];
    if (!control[ACTIVE])
        return;
    if (penalty != 1.0f) {
        if (i < BLOCK_TOKENS / 32)
            repeated[i] = 0;
        __syncthreads();
        const int at = recent - begin;
        if (i < n_recent && at >= 0 && at < BLOCK_TOKENS)
            atomicOr(&repeated[at / 32], 1u << at % 32);
        __syncthreads();
        const u32 bits = repeated[i * PER_THREAD / 32] >> i * PER_THREAD % 32;
#pragma unroll
        for (int j = 0; j < PER_THREAD; j++)
            if (bits >> j & 1)
                x[j] = x[j] > 0.0f ? __fdiv_rn(x[j], penalty) : x[j] * penalty;
    }
    if (counts_reply(control) && id < V) { // the arrays of counts end with whole vectors
        const float frequency = read_float(control, FREQUENCY), presence = read_float(control, PRESENCE);
        const int4 n = *(const int4*)(counts + id);
        const i32 seen[PER_THREAD] = {n.x, n.y, n.z, n.w};
#pragma unroll
        for (int j = 0; j < PER_THREAD; j++)
            if (seen[j])
                x[j] = x[j] - (frequency * (float)seen[j] + presence);
    }
    const u32 open = !masked || id >= V ? 15u : allowed[id / 32] >> id % 32;
    u32 order = 0, place = 0xffffffffu;
    bool bad = false;
#pragma unroll
    for (int j = 0; j < PER_THREAD; j++) {
        if (id + j >= V)
            continue;
        bad |= (__float_as_uint(x[j]) & 0x7f800000u) == 0x7f800000u;
        const u32 mine = order_of(x[j]);
        if ((open >> j & 1) && mine > order)
            order = mine, place = id + j;
        if (!(open >> j & 1))
            x[j] = NEGATIVE_INFINITY;
    }
    if (values) {
        if (id + PER_THREAD <= V) {
            *(float4*)(values + id) = make_float4(x[0], x[1], x[2], x[3]);
        } else {
            for (int j = 0; id + j < V; j++)
                values[id + j] = x[j];
        }
    }
    const u32 top = __reduce_max_sync(FULL_WARP, order);
    const u32 first = __reduce_min_sync(FULL_WARP, order == top ? place : 0xffffffffu);
    const bool any_bad = __any_sync(FULL_WARP, bad);
    if (lane == 0) {
        best_of_warp[i / WARP] = (u64)top << 32 | (u32)~first;
        if (any_bad)
            atomicAdd(scratch + BAD, (u64)1);
    }
    __syncthreads();
    if (i == 0) {
        u64 best = 0;
        for (int w = 0; w < THREADS / WARP; w++)
            best = max(best, best_of_warp[w]);
        atomicMax(scratch + BEST, best);
    }
    if (!is_last_block(scratch + BLOCKS_DONE))
        return;
    const u64 best = load_fresh(scratch + BEST);
    const bool failed = load_fresh(scratch + BAD) != 0 || best >> 32 == 0;
    if (!failed && values && read_float(control, TEMPERATURE) > 0.0f)
        return;
    __syncthreads();
    if (i == 0)
        scratch[BEST] = scratch[BAD] = 0;
    finish_step(failed ? -1 : (i32)~(u32)best, STEP_ARGUMENTS);
}

// --- weights ----------------------------------------------------------------------------------------

KERNEL weigh(const float* values, int V, u64* masses, u64* bin_mass, u32* bin_count, u64* scratch, STEP_PARAMETERS) {
    __shared__ u64 rest;
    __shared__ i32 chosen;
    const int i = threadIdx.x, id = blockIdx.x * BLOCK_TOKENS + i * PER_THREAD;
    begin_row(V, STEP_ROW);
    values += row_of_values(V), masses += (i64)blockIdx.y * gridDim.x, scratch += blockIdx.y * N_SCRATCH;
    bin_mass += blockIdx.y * N_BINS, bin_count += blockIdx.y * N_BINS;
    dependency_release();
    dependency_wait();
    const u64 best = scratch[BEST];
    if (best == 0)
        return;
    const float top = value_of((u32)(best >> 32)), temperature = read_float(control, TEMPERATURE);
    const u64 top_p = read_u64(control, TOP_P), min_p = read_u64(control, MIN_P);
    const u32 top_k = (u32)control[TOP_K];
    const bool is_plain = top_k == 0 && top_p >> 32;
    u64 mass = 0;
    int turn = 0;
#pragma unroll
    for (int j = 0; j < PER_THREAD; j++)
        if (id + j < V) {
            const u64 w = weight_of(values[id + j], top, temperature);
            if (!is_plain && w) {
                const int bin = bin_of(values[id + j], top, temperature);
                atomicAdd(bin_mass + bin, w);
                atomicAdd(bin_count + bin, 1u);
            }
            mass += w >= min_p ? w : 0;
        }
    if (is_plain) {
        mass = block_sum(mass, turn);
        if (i == 0)
            masses[blockIdx.x] = mass;
    }
    if (!is_last_block(scratch + BLOCKS_DONE))
        return;

    if (!is_plain) { // the last bin that top-k or top-p can reach into
        constexpr int share = N_BINS / THREADS;
        u64 count_before, mass_before, n_all, mass_all, count_here = 0, mass_here = 0;
        for (int b = i * share; b < (i + 1) * share; b++)
            count_here += bin_count[b], mass_here += bin_mass[b];
        count_before = block_scan(count_here, n_all);
        mass_before = block_scan(mass_here, mass_all);
        const bool by_count = top_k && top_k < n_all;
        const u64 target = top_p >> 32 ? mass_all : target_of(top_p, mass_all);
        for (int b = i * share; b < (i + 1) * share; b++) {
            const u64 before = by_count ? count_before : mass_before, goal = by_count ? top_k : target;
            count_before += bin_count[b], mass_before += bin_mass[b];
            if (before < goal && (by_count ? count_before : mass_before) >= goal)
                scratch[CUT] = b + 1;
            bin_count[b] = 0, bin_mass[b] = 0;
        }
        if (i == 0)
            scratch[TOTAL] = by_count ? 0 : mass_all;
        return;
    }

    // The draw: which block of tokens, which thread's tokens, which token.
    const int n_blocks = gridDim.x, share = (n_blocks + THREADS - 1) / THREADS;
    u64 here = 0, total;
    for (int b = i * share; b < min((i + 1) * share, n_blocks); b++)
        here += masses[b];
    u64 before = block_scan(here, total);
    const u64 drawn = high_product(random_bits(read_u64(control, SEED), (u32)control[POSITION]), total);
    if (before <= drawn && drawn < before + here) {
        int b = i * share;
        while (before + masses[b] <= drawn)
            before += masses[b++];
        chosen = b, rest = drawn - before;
    }
    __syncthreads();
    const int first = chosen * BLOCK_TOKENS + i * PER_THREAD;
    const u64 wanted = rest;
    u64 w[PER_THREAD];
    here = 0;
#pragma unroll
    for (int j = 0; j < PER_THREAD; j++) {
        w[j] = first + j < V ? weight_of(values[first + j], top, temperature) : 0;
        w[j] = w[j] >= min_p ? w[j] : 0;
        here += w[j];
    }
    before = block_scan(here, total);
#pragma unroll
    for (int j = 0; j < PER_THREAD; j++) {
        if (before <= wanted && wanted < before + w[j])
            chosen = first + j;
        before += w[j];
    }
    if (i == 0)
        scratch[BEST] = 0;
    __syncthreads();
    finish_step(chosen, STEP_ARGUMENTS);
}

// --- top-k and top-p --------------------------------------------------------------------------------

// What can be kept: orders of logits, ids, weights less one.
struct List {
    const u32 *order, *id, *weight;
    int n;
    __device__ u64 rank(int i) const { return (u64)order[i] << ID_BITS | (((1u << ID_BITS) - 1) ^ id[i]); }
    __device__ u64 mass(int i) const { return (u64)weight[i] + 1; }
};

// The sum of value(i) over the list, in every thread.
template <class Value>
DEVICE u64 list_sum(int n, int& turn, Value value) {
    u64 sum = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        sum += value(i);
    return block_sum(sum, turn);
}

// What a choice in a long list is made with.
struct Room {
    u64 bins[N_BINS], ranks[SHORT_LIST], values[SHORT_LIST], reached;
    int n_near;
};

// Which bin of N_BINS has the `target`-th unit (from 0) of a sum over bins, and how much is before that bin.
struct Bin {
    int index;
    u64 before;
};

DEVICE Bin bin_reaching(const u64* bins, u64 target) {
    __shared__ Bin found;
    constexpr int share = N_BINS / COLLECT_THREADS;
    u64 here = 0, total;
    const int first = threadIdx.x * share;
    for (int b = first; b < first + share; b++)
        here += bins[b];
    u64 before = block_scan(here, total);
    for (int b = first; b < first + share; before += bins[b++])
        if (before <= target && target < before + bins[b])
            found = {b, before};
    __syncthreads();
    return found;
}

// The sums of value(i), of which bin(i) has one. All threads see them.
template <class Place, class Value>
DEVICE void fill_bins(u64* bins, int n, Place bin, Value value) {
    for (int b = threadIdx.x; b < N_BINS; b += blockDim.x)
        bins[b] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        if (const u64 v = value(i))
            atomicAdd(bins + bin(i), v);
    __syncthreads();
}

// The largest rank such that the values of all ranks from it on add up to `target`; the total must reach it. A histogram says
// which bin of logits has it. Few are in that, and are compared with each other; of many the rank is found by halving.
template <class Place, class Value>
DEVICE u64 rank_reaching(const List& list, u64 target, Room& room, int& turn, Place bin, Value value) {
    const int thread = threadIdx.x;
    if (thread == 0)
        room.n_near = 0;
    fill_bins(room.bins, list.n, bin, value);
    const Bin last = bin_reaching(room.bins, target - 1);
    for (int i = thread; i < list.n; i += blockDim.x)
        if (bin(i) == last.index)
            if (const u64 v = value(i)) {
                const int at = atomicAdd(&room.n_near, 1);
                if (at < SHORT_LIST)
                    room.ranks[at] = list.rank(i), room.values[at] = v;
            }
    __syncthreads();
    const u64 wanted = target - last.before;
    if (room.n_near <= SHORT_LIST) {
        if (thread < room.n_near) {
            u64 before = 0;
            for (int j = 0; j < room.n_near; j++)
                before += room.ranks[j] > room.ranks[thread] ? room.values[j] : 0;
            if (before < wanted && wanted <= before + room.values[thread])
                room.reached = room.ranks[thread];
        }
        __syncthreads();
        return room.reached;
    }
    u64 rank = 0;
    for (u64 bit = 1ull << (ID_BITS + 31); bit; bit >>= 1) {
        const u64 trial = rank | bit;
        const auto from_trial = [&](int i) { return bin(i) == last.index && list.rank(i) >= trial ? value(i) : 0; };
        if (list_sum(list.n, turn, from_trial) >= wanted)
            rank = trial;
    }
    return rank;
}

// What the request asks for: top-k (none: the largest number), top-p in units of 2^-32, min-p, the random bits. total:
// the sum of weights that top-p is a share of, or 0 if it is that of what top-k keeps.
struct Rules {
    u64 top_k, top_p, min_p, bits, total;
    // Sums of weights before a token reach this where top-p drops it.
    __device__ u64 target(u64 mass) const { return top_p >> 32 ? ~0ull : target_of(top_p, mass); }
};

// The draw from a list of at most SHORT_LIST, a token a thread: what comes before it, in either order, is added up.
DEVICE u32 draw_short(const List& list, const Rules& rules, int& turn) {
    __shared__ u64 kept[SHORT_LIST];
    __shared__ u32 token;
    const int i = threadIdx.x;
    const bool mine = i < list.n;
    const u64 rank = mine ? list.rank(i) : 0, mass = mine ? list.mass(i) : 0;
    u64 n_before = 0, mass_before = 0;
    if (mine)
        for (int j = 0; j < list.n; j++)
            if (list.rank(j) > rank)
                n_before++, mass_before += list.mass(j);
    const bool in_top_k = mine && n_before < rules.top_k;
    const u64 total = rules.total ? rules.total : block_sum(in_top_k ? mass : 0, turn);
    const bool keep = in_top_k && mass_before < rules.target(total) && mass >= rules.min_p;
    if (mine)
        kept[i] = keep ? mass : 0;
    const u64 drawn = high_product(rules.bits, block_sum(keep ? mass : 0, turn)); // its barrier shows `kept` to all
    if (keep) {
        u64 before = 0;
        for (int j = 0; j < list.n; j++)
            before += list.id[j] < list.id[i] ? kept[j] : 0;
        if (before <= drawn && drawn < before + mass)
            token = list.id[i];
    }
    __syncthreads();
    return token;
}

// The draw from any list. weight(id) is a token's, 0 where it is none; bin(i): its bin of logits.
template <class Place, class Weight>
DEVICE u32 draw_long(const List& list, const Rules& rules, int V, Room& room, int& turn, Place bin, Weight weight) {
    __shared__ u32 token;
    u64 lowest = 0; // rank of the last token that is kept
    if (rules.top_k < (u64)list.n)
        lowest = rank_reaching(list, rules.top_k, room, turn, bin, [](int) { return (u64)1; });
    if (rules.top_p >> 32 == 0) {
        const auto in_top_k = [&](int j) { return list.rank(j) >= lowest ? list.mass(j) : 0; };
        const u64 total = rules.total ? rules.total : list_sum(list.n, turn, in_top_k);
        lowest = max(lowest, rank_reaching(list, rules.target(total), room, turn, bin, in_top_k));
    }
    // The draw: which range of ids, which of its tokens. A range has at most a token a thread.
    const u32 range = (V + N_BINS - 1) / N_BINS;
    const auto range_of = [&](int j) { return list.id[j] / range; };
    const auto kept = [&](int j) { return list.rank(j) >= lowest && list.mass(j) >= rules.min_p ? list.mass(j) : 0; };
    const u64 drawn = high_product(rules.bits, list_sum(list.n, turn, kept));
    fill_bins(room.bins, list.n, range_of, kept);
    const Bin chosen = bin_reaching(room.bins, drawn);
    const u32 id = chosen.index * range + threadIdx.x;
    const u64 weighs = threadIdx.x < range && id < V ? weight(id, lowest) : 0, wanted = drawn - chosen.before;
    const u64 mass = weighs >= rules.min_p ? weighs : 0;
    u64 total;
    const u64 before = block_scan(mass, total);
    if (before <= wanted && wanted < before + mass)
        token = id;
    __syncthreads();
    return token;
}

KERNEL collect(const float* values, int V, u32* list, u64* scratch, STEP_PARAMETERS) {
    __shared__ u32 near_list[3][SHARED_LIST];
    __shared__ Room room;
    const int i = threadIdx.x, lane = i % WARP, id = blockIdx.x * COLLECT_THREADS + i;
    begin_row(V, STEP_ROW);
    values += row_of_values(V), list += (i64)blockIdx.y * 3 * V, scratch += blockIdx.y * N_SCRATCH;
    dependency_release();
    dependency_wait();
    const u64 cut = scratch[CUT], best = scratch[BEST], total = scratch[TOTAL];
    if (cut == 0)
        return;
    const float top = value_of((u32)(best >> 32)), temperature = read_float(control, TEMPERATURE);
    const float x = id < V ? values[id] : NEGATIVE_INFINITY;
    const u64 w = weight_of(x, top, temperature);
    const bool listed = w && bin_of(x, top, temperature) < (int)cut;
    const u32 mask = __ballot_sync(FULL_WARP, listed);
    if (mask) {
        u64 base = 0;
        if (lane == 0)
            base = atomicAdd(scratch + N_LISTED, (u64)__popc(mask));
        base = __shfl_sync(FULL_WARP, base, 0) + __popc(mask & ((1u << lane) - 1));
        if (listed) {
            list[base] = order_of(x);
            list[V + base] = id;
            list[2 * V + base] = (u32)(w - 1);
        }
    }
    if (!is_last_block(scratch + BLOCKS_DONE))
        return;

    List all = {list, list + V, list + 2 * V, (int)load_fresh(scratch + N_LISTED)};
    if (all.n <= SHARED_LIST) {
        for (int j = i; j < all.n; j += COLLECT_THREADS)
            for (int k = 0; k < 3; k++)
                near_list[k][j] = list[k * V + j];
        all.order = near_list[0], all.id = near_list[1], all.weight = near_list[2];
    }
    const u32 top_k = (u32)control[TOP_K];
    const Rules rules = {top_k ? top_k : ~0ull, read_u64(control, TOP_P), read_u64(control, MIN_P),
                         random_bits(read_u64(control, SEED), (u32)control[POSITION]), total};
    int turn = 0;
    __syncthreads();
    const auto bin = [&](int j) { return bin_of(value_of(all.order[j]), top, temperature); };
    const auto weight = [&](u32 j, u64 lowest) {
        const u64 rank = (u64)order_of(values[j]) << ID_BITS | (((1u << ID_BITS) - 1) ^ j);
        return rank >= lowest ? weight_of(values[j], top, temperature) : 0;
    };
    const u32 token = all.n <= SHORT_LIST ? draw_short(all, rules, turn) : draw_long(all, rules, V, room, turn, bin, weight);
    if (i == 0)
        scratch[BEST] = scratch[CUT] = scratch[TOTAL] = scratch[N_LISTED] = 0;
    finish_step((i32)token, STEP_ARGUMENTS);
}

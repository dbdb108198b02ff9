// The choice of experts and what the slots make of it, for one MoE layer, by one block: that of `route` (route.cu), or one
// of the kernel that reads the experts (experts.cu, several.cu). Twins: `route` of engine/ops/reference.py and `advance` of
// engine/placing/policy.py; the decisions are those of docs/residency.md, bit for bit.
//
// The macros of choice.cuh, and these. A layer has at most E slots. |heat| < 2^53.
// -DRECENT_TOKENS: of a step at most, 32 unless it is given.
// -DJOBS=1: of one token's experts that miss and enter no slot, the last ones are the CPU's: their records have a job, and jobs
// has the numbers (jobs.cuh). division[how many miss], [A + 1], says how many: experts | units << 8. units: of gate and up of
// the one before these, 0: it is not divided. It is written between steps.
// -DJOBS=2: the same of several tokens' experts (several_jobs.cuh), whole ones that few tokens use: division [E + 1] says how
// many. Their records come last.
// -DGUESSES=1: records of one token's experts that miss name their landing slot in place of a job where they were guessed, and
// then are not the CPU's, or say that they cross the link (landing.cuh). is_first, is_last: whether the layer is the step's;
// these take the time, also of a step without guesses: is_last is 2 there.
//
// What a step is worth is latency, not work: every load is issued before the first barrier that needs it, the
// block meets four times, and nothing is loaded after the last one.
#pragma once

#include "choice.cuh"
#include "jobs.cuh"
#include "landing.cuh"
#include "settled.cuh"
#include "several_jobs.cuh"

#ifndef RECENT_TOKENS
#define RECENT_TOKENS 32
#endif
#define MAX_PAIRS ((RECENT_TOKENS * USED + WARP - 1) / WARP * WARP)
#define NOBODY 0x7fffffffffffffffll // a sort key of no expert and of no slot
#define COLDEST (-(1ll << 62))      // of an empty slot
#define USE 65536                   // what a use adds to an expert's heat
#ifndef JOBS
#define JOBS 0
#endif
#ifndef GUESSES
#define GUESSES 0
#endif
#ifndef POISON
#define POISON 0
#endif

// engine.placing.policy.SlotState of one layer: what is indexed by expert begins at the layer, by slot at slot 0.
struct Slots {
    i32 *slot_of, *expert_of;
    i64* heat;
    const u8* pinned;
    i64 *clock, *counts, *hits, *misses;
    u64* expert_ptr;
    const u64 *home_ptr, *slot_ptr;
};

// The step, as the block sees it.
struct Step {
    u32 uses[EXPERTS];       // by recent tokens
    u32 counted[EXPERTS];    // by counted tokens
    u8 resident[EXPERTS];    // before the step
    i32 first_pair[EXPERTS]; // the first recent pair (token, rank) that uses it
    i32 chosen[MAX_PAIRS];
    i64 missing[MAX_PAIRS];    // sort keys of the missing experts, at their first pairs
    // Only with an active table: a bit for each token that uses an expert; and of each 32 pairs which are first ones,
    // which of these miss, how many uses those experts have, and how many those of the first pairs ahead of each.
    u32 tokens[EXPERTS], firsts[MAX_PAIRS / WARP], absent[MAX_PAIRS / WARP];
    i32 n_uses[MAX_PAIRS / WARP], uses_ahead[MAX_PAIRS];
    i64 victim[EXPERTS];       // sort keys of the candidates, by slot of the layer
    u64 source[EXPERTS * 3];   // expert_ptr of the layer before the step; only with an active table
    i16 entering[MAX_PAIRS + 1]; // by rank: first pairs of experts, -1 beyond the last
    i16 leaving[MAX_PAIRS + 1];  // by rank: slots of the layer, -1 beyond the last
    u64 leaving_ptr[MAX_PAIRS][3];
    u64 guessed[LANDING_SLOTS]; // tags
#if JOBS == 2
    u32 free[MAX_PAIRS / WARP];    // of each 32 pairs, those whose experts may be the CPU's
    i16 division[EXPERTS + 1];
#endif
};

static_assert(sizeof(Step) <= 48 << 10, "what a block may have without asking for it");

// What a thread knows of the slot that is its own, if any.
struct OwnSlot {
    i32 slot, expert; // slot < 0: none
    i64 heat;         // of the expert
    bool evictable;
    u64 ptr[3];
};

DEVICE void clear(Step& step) {
    const int i = threadIdx.x;
    if (i < EXPERTS) {
        step.uses[i] = 0;
        step.counted[i] = 0;
        step.tokens[i] = 0;
        step.first_pair[i] = MAX_PAIRS;
    }
    for (int r = i; r < MAX_PAIRS; r += blockDim.x)
        step.missing[r] = NOBODY;
    for (int r = i; r < MAX_PAIRS + 1; r += blockDim.x) {
        step.entering[r] = -1;
        step.leaving[r] = -1;
    }
}

DEVICE OwnSlot load_slot(const Slots& s, int begin, int end) {
    OwnSlot own;
    own.slot = begin + (int)threadIdx.x < end ? begin + (int)threadIdx.x : -1;
    if (own.slot >= 0) {
        own.expert = s.expert_of[own.slot];
        own.heat = own.expert >= 0 ? s.heat[own.expert] : 0;
        own.evictable = !s.pinned[own.slot];
        for (int part = 0; part < 3; part++)
            own.ptr[part] = s.slot_ptr[own.slot * 3 + part];
    }
    return own;
}

// An expert's heat after a step with so many uses of it.
DEVICE i64 warmed(i64 heat, u32 uses, i64 clock, int memory) {
    if (memory)
        return heat + (i64)uses * USE - (heat >> memory);
    return uses ? 64 * clock + uses : heat;
}

// `advance` of the twin. On entry (after a barrier) uses, counted, resident, first_pair and chosen are set; heat: of expert
// `threadIdx.x` before the step. With a table, the active experts are written too (records of 64 bytes: source, target,
// expert, first, count, 0). Experts that miss and enter no slot pass through `bypass` memory, place by record, while there
// are places. Several tokens' records begin with those that miss, so that their bytes are under way first and these get
// the places; one token's are in order of rank.
struct Division {
    i32 of_misses; // the entry of as many misses as the thread's lane says
    u64* jobs;     // the words of jobs.cuh
    u64 next;      // the number of the next job
};
struct Landings {
    u64 *words, *routed; // the set's, null: there are no guesses for the layer
    u64 layer;           // landing_layer
    i32 n_blocks;        // of gate_up, for an expert
};
// Of a step of several: the number of the layer's first job, the words of several_jobs.cuh, and how many jobs the layer
// before had.
struct Handing {
    u64 next, *jobs, *several, before;
};
struct Bypass {
    u64 base;
    i64 expert_bytes, up_at, down_at;
    i32 n_places;
};

template <bool with_table>
DEVICE void settle(Step& step, const Slots& s, const OwnSlot& own, int n_slots, int n_pairs, i64 clock, int memory,
                   i64 heat, i32* fetch_rows, i32* fetch_count, u64* active, i32* n_active, i32* pairs, const Bypass& bypass,
                   const Division& division = {}, const Landings& landings = {}, const Handing& handing = {},
                   u64* settled = nullptr) {
    const int i = threadIdx.x, lane = i % WARP;

    const u32 counted = i < EXPERTS ? step.counted[i] : 0;
    const bool resident = i < EXPERTS && step.resident[i];
    if (counted)
        atomicAdd((u64*)s.counts + i, (u64)counted);
    const u32 hits = __reduce_add_sync(FULL_WARP, resident ? counted : 0u);
    const u32 misses = __reduce_add_sync(FULL_WARP, resident ? 0u : counted);
    if (lane == 0 && hits)
        atomicAdd((u64*)s.hits, (u64)hits);
    if (lane == 0 && misses)
        atomicAdd((u64*)s.misses, (u64)misses);
    if (i == 0)
        *s.clock = clock;

    i64 victim = NOBODY;
    u64 home[3] = {0, 0, 0};
    if (own.slot >= 0) {
        const bool used = own.expert >= 0 && step.uses[own.expert];
        if (own.evictable && !used) {
            victim = (own.expert < 0 ? COLDEST : warmed(own.heat, 0, clock, memory) * EXPERTS) + i;
            if (own.expert >= 0)
                for (int part = 0; part < 3; part++)
                    home[part] = s.home_ptr[own.expert * 3 + part];
        }
        step.victim[i] = victim;
    }
    bool is_missing = false;
    if (i < EXPERTS) {
        const u32 uses = step.uses[i];
        const i64 now = warmed(heat, uses, clock, memory);
        s.heat[i] = now;
        is_missing = uses && !resident;
        if (is_missing)
            step.missing[step.first_pair[i]] = i - now * EXPERTS; // hottest first, then by index
    }

    i32 expert = 0;
    bool first = false;
    u64 source[3] = {0, 0, 0};
    if (with_table && i / WARP * WARP < n_pairs) {
        if (i < n_pairs) {
            expert = step.chosen[i];
            first = step.first_pair[expert] == i;
        }
        const i32 uses = first ? (i32)step.uses[expert] : 0;
        i32 sum = uses;
#pragma unroll
        for (int j = 1; j < WARP; j *= 2) {
            const i32 ahead = __shfl_up_sync(FULL_WARP, sum, j);
            sum += lane >= j ? ahead : 0;
        }
        step.uses_ahead[i] = sum - uses;
        const u32 firsts = __ballot_sync(FULL_WARP, first);
        const u32 absent = __ballot_sync(FULL_WARP, first && !step.resident[expert]);
        if (lane == WARP - 1) {
            step.firsts[i / WARP] = firsts;
            step.absent[i / WARP] = absent;
            step.n_uses[i / WARP] = sum;
        }
        if (first)
            for (int part = 0; part < 3; part++)
                source[part] = step.source[expert * 3 + part];
    }
    const bool any_missing = __syncthreads_or(is_missing);
    if (any_missing && i == 0 && settled) { // seen by who sees a table change, which nobody does before the next barrier
        store_told(settled, SETTLED_MOVES);
        __threadfence();
    }

    // Ranks by counting: victims by (heat, slot), missing experts by key. The first of the ones meet the first of
    // the others; a victim is no expert of these tokens, so nothing that enters can leave again.
    int rank = -1, wanted = -1;
    if (any_missing) {
        if (victim != NOBODY) {
            rank = 0;
#pragma unroll 8
            for (int j = 0; j < n_slots; j++)
                rank += step.victim[j] < victim;
            if (rank < n_pairs) {
                step.leaving[rank] = (i16)i;
                for (int part = 0; part < 3; part++)
                    step.leaving_ptr[rank][part] = own.ptr[part];
            }
        }
        const i64 missing = i < n_pairs ? step.missing[i] : NOBODY;
        if (missing != NOBODY) {
            wanted = 0;
#pragma unroll 8
            for (int j = 0; j < n_pairs; j++)
                wanted += step.missing[j] < missing;
            step.entering[wanted] = (i16)i;
        }
    }
    int record = 0, start = 0, n_firsts = 0;
    if (with_table && i < n_pairs) {
        const bool apart = any_missing && n_pairs > USED, misses = apart && !step.resident[expert];
        const int own = step.first_pair[expert];
        start = step.uses_ahead[own];
        for (int j = 0; j < (n_pairs + WARP - 1) / WARP; j++) {
            const u32 all = step.firsts[j], absent = apart ? step.absent[j] : 0;
            const u32 ahead = j < own / WARP ? FULL_WARP : j > own / WARP ? 0 : (1u << own % WARP) - 1;
            start += j < own / WARP ? step.n_uses[j] : 0;
            record += misses ? __popc(absent & ahead) : __popc(absent) + __popc(all & ~absent & ahead);
            n_firsts += __popc(all);
        }
        pairs[start + __popc(step.tokens[expert] & ((1u << i / USED) - 1))] = i;
        if (i == 0)
            *n_active = n_firsts;
    }
    if (any_missing)
        __syncthreads();

    // Whether the missing expert of a rank is hotter than what the slot of that rank holds. From the first that is not on
    // none is: the one get colder, the others hotter.
    auto enters_at = [&](int r) {
        const int pair = step.entering[r], slot = step.leaving[r];
        return pair >= 0 && slot >= 0 && step.victim[slot] < step.chosen[pair] - step.missing[pair];
    };
    if (rank >= 0 && rank < n_pairs && enters_at(rank)) {
        const i32 enters = step.chosen[step.entering[rank]];
        if (own.expert >= 0)
            s.slot_of[own.expert] = -1;
        s.slot_of[enters] = own.slot;
        s.expert_of[own.slot] = enters;
        for (int part = 0; part < 3; part++) {
            if (own.expert >= 0)
                s.expert_ptr[own.expert * 3 + part] = home[part];
            s.expert_ptr[enters * 3 + part] = own.ptr[part];
        }
        fetch_rows[rank * 3] = enters;
        fetch_rows[rank * 3 + 1] = own.slot;
        fetch_rows[rank * 3 + 2] = own.expert;
        if (!enters_at(rank + 1))
            *fetch_count = rank + 1;
    }
    if (i == 0 && (!any_missing || !enters_at(0)))
        *fetch_count = 0;

    i32 job = 0;
#if JOBS == 2
    if (with_table) {
        i32 n_jobs = 0;
        if (any_missing) {
            const bool may = first && wanted >= 0 && !enters_at(wanted) && step.uses[expert] <= MOST_HANDED;
            const u32 own = __ballot_sync(FULL_WARP, may);
            if (lane == 0 && i < n_pairs)
                step.free[i / WARP] = own;
            __syncthreads();
            i32 n_missed = 0, n_free = 0, behind = 0; // behind: in order of first use
            for (int j = 0; j < (n_pairs + WARP - 1) / WARP; j++) {
                n_missed += __popc(step.absent[j]);
                n_free += __popc(step.free[j]);
                behind += __popc(j > i / WARP ? step.free[j] : j == i / WARP ? own & ~((2u << lane) - 1) : 0);
            }
            n_jobs = min((i32)step.division[n_missed], n_free);
            job = may && behind < n_jobs ? n_jobs - behind : 0;
            const i32 ahead = wanted >= 0 ? max(0, n_jobs - behind - may) : n_jobs; // jobs that a record would come behind
            record = job ? n_firsts - n_jobs + job - 1 : record - ahead;
        }
        if (i == 0) {
            handing.jobs[JOBS_FIRST] = handing.next;
            handing.jobs[JOBS_NEXT] = handing.next + (u64)n_jobs;
            handing.several[SEVERAL_COUNT] = (u64)n_jobs;
            handing.several[SEVERAL_BEFORE] = handing.before;
        }
    }
#endif
    bool is_guessed = false;
    if (GUESSES && with_table && n_pairs == USED && i < WARP) {
        u32 useful = 0;
        const u32 misses = __ballot_sync(FULL_WARP, first && wanted >= 0);
#pragma unroll
        for (int slot = 0; slot < LANDING_SLOTS; slot++) {
            const bool is_it = first && wanted >= 0 && step.guessed[slot] == (landings.layer << 10 | (u64)expert);
            job = is_it ? FIRST_GUESSED - slot : job;
            useful += __ballot_sync(FULL_WARP, is_it) ? 1 : 0;
        }
        is_guessed = job < 0;
        if (lane == 0 && landings.routed) {
            *(volatile u64*)landings.routed = landings.layer;
            if (useful)
                atomicAdd(landings.words + LANDING_USEFUL, (u64)useful);
            if (misses)
                atomicAdd(landings.words + LANDING_MISSES, (u64)__popc(misses));
        }
    }
    if (JOBS == 1 && with_table && n_pairs == USED && i < WARP) {
        const i32 n_missed = __popc(__ballot_sync(FULL_WARP, first && wanted >= 0));
        const u32 misses = __ballot_sync(FULL_WARP, first && wanted >= 0 && !is_guessed);
        const u32 free = __ballot_sync(FULL_WARP, first && wanted >= 0 && !is_guessed && !enters_at(wanted));
        const i32 entry = __shfl_sync(FULL_WARP, division.of_misses, __popc(misses));
        const i32 of_cpu = min(entry & 255, __popc(free)), units = __popc(free) > of_cpu ? entry >> 8 : 0;
        const i32 behind = __popc(free & ~((2u << lane) - 1)), n_jobs = of_cpu + (units > 0); // behind: of later ranks
        if (free >> lane & 1 && behind < n_jobs) // by rank, as blocks begin
            job = n_jobs - behind | (behind == of_cpu ? units << 8 : 0) | __popc(misses) << 24;
        if (lane == 0 && n_jobs) {
            division.jobs[JOBS_FIRST] = division.next;
            division.jobs[JOBS_NEXT] = division.next + (u64)n_jobs;
            division.jobs[JOBS_ALONE] = of_cpu == n_missed;
        }
    }
    if (GUESSES && with_table && n_pairs == USED && i < WARP) { // what is brought ahead waits for it
        job = first && wanted >= 0 && job == 0 ? CROSSES : job;
        const i32 n_blocks = job < 0 ? landings.n_blocks : job_units(job) ? landings.n_blocks - job_units(job) : 0;
        const i32 crossing = __reduce_add_sync(FULL_WARP, n_blocks);
        if (lane == 0)
            *(volatile u64*)(landings.words + LANDING_BUSY) = (u64)crossing;
    }
    if (with_table && first) {
        const bool enters = wanted >= 0 && enters_at(wanted);
        const bool passes = wanted >= 0 && !enters && (JOBS != 2 || !job) && record < bypass.n_places;
        const u64 place = bypass.base + record * bypass.expert_bytes;
        u64* const r = active + record * 8;
        for (int part = 0; part < 3; part++) {
            const u64 at = place + (part == 0 ? 0 : part == 1 ? bypass.up_at : bypass.down_at);
            r[part] = source[part];
            r[3 + part] = enters ? step.leaving_ptr[wanted][part] : passes ? at : 0;
        }
        *(int4*)(r + 6) = make_int4(expert, start, (int)step.uses[expert], job);
    }
}

// What a step's choice goes by and what it writes (engine/ops/cuda/routing.py). settled: null, or settled.cuh's word.
#if JOBS == 2
#define JOB_FIELDS(X) X(const i32*, of_misses) X(u64*, jobs) X(u64*, several)
#elif JOBS
#define JOB_FIELDS(X) X(const i32*, of_misses) X(u64*, jobs)
#else
#define JOB_FIELDS(X)
#endif
#if GUESSES
#define LANDING_FIELDS(X) X(u64*, landing_words) X(u64*, landing_set) X(i32, n_blocks) X(i32, is_first) X(i32, is_last)
#else
#define LANDING_FIELDS(X)
#endif
#define ROUTE_FIELDS(X)                                                                                                \
    X(const float*, logits) X(i32, T) X(i32, renormalize) X(const float*, bias) X(float, scale)                        \
    X(const float*, expert_scale) X(const i32*, imposed) X(const u8*, counted) X(const i32*, active_step)              \
    X(i32, layer) X(i32, memory) X(const i32*, slot_begin) X(i32*, slot_of) X(i32*, expert_of) X(i64*, heat_of)        \
    X(const u8*, pinned) X(i64*, clock) X(i64*, counts) X(i64*, hits) X(i64*, misses) X(u64*, expert_ptr)              \
    X(const u64*, home_ptr) X(const u64*, slot_ptr) X(i32*, experts) X(float*, weights) X(i32*, fetch_rows)            \
    X(i32*, fetch_count) X(u64*, active) X(i32*, n_active) X(i32*, pairs) X(u64, bypass) X(i64, expert_bytes)          \
    X(i64, up_at) X(i64, down_at) X(i32, n_places) JOB_FIELDS(X) LANDING_FIELDS(X)
#define FIELD(type, name) type name;
struct Route {
    ROUTE_FIELDS(FIELD)
    u64* settled;

    __device__ Slots slots() const {
        return {slot_of + layer * EXPERTS, expert_of, heat_of + layer * EXPERTS, pinned, clock + layer,
                counts + layer * EXPERTS, hits + layer, misses + layer, expert_ptr + layer * EXPERTS * 3,
                home_ptr + layer * EXPERTS * 3, slot_ptr};
    }
};
// The parameters of a kernel, and a Route of them.
#define PARAMETER(type, name) type route_##name,
#define ARGUMENT(type, name) route_##name,
#define ROUTE_PARAMETERS ROUTE_FIELDS(PARAMETER) u64* route_settled
#define ROUTE_ARGUMENTS {ROUTE_FIELDS(ARGUMENT) route_settled}

#if GUESSES
// What the step took, with guesses or without, and all counts to the board; by a warp.
DEVICE void note_step(u64* words, bool with, int lane) {
    if (lane == 0) {
        words[LANDING_STEPS + with] += 1;
        words[LANDING_NS + with] += clock_ns() - load_fresh(words + LANDING_BEGAN_NS);
    }
    __syncwarp();
    u64* const board = (u64*)load_fresh(words + LANDING_BOARD);
    if (lane < LANDING_COUNTS)
        *(volatile u64*)(board + lane) = load_fresh(words + LANDING_MADE + lane);
}
#endif

#if POISON
// By a block that has met since it wrote the fetches: 0xFF to the slots that experts enter, before anybody copies them there.
DEVICE void poison_fetched(const Route& r, const i64 (&part_bytes)[3]) {
    for (i32 i = 0; i < load_fresh(r.fetch_count); i++)
        for (i32 part = 0; part < 3; part++) {
            u32* const to = (u32*)load_fresh(r.slot_ptr + (i64)load_fresh(r.fetch_rows + 3 * i + 1) * 3 + part);
            for (i64 j = threadIdx.x; j < part_bytes[part] / 4; j += (i32)blockDim.x)
                to[j] = 0xffffffffu;
        }
}
#endif

// The choice of a step of at most RECENT_TOKENS tokens, its tables and active table, by a block of at least max(E, T * A)
// threads. It waits for the kernel ahead by itself, and releases the one behind: before that, or, if it is late, after.
// part_bytes: with -DPOISON=1, for tests, the bytes of gate, up and down.
DEVICE void settle_step(Step& step, const Route& r, bool is_late, const i64 (&part_bytes)[3]) {
    const i32 i = threadIdx.x, lane = i % WARP, n_warps = blockDim.x / WARP;
    const Weighing rule = {r.renormalize, r.scale, r.expert_scale};
    const Slots s = r.slots();
    // The first rows are the last warps', which weigh them while the first ones write the active table.
    const i32 first = n_warps - 1 - i / WARP;
    if (!is_late)
        dependency_release();
    // The tables of this layer were last written a token ago: they are loaded while the router still computes.
    const i32 begin = r.slot_begin[r.layer], end = r.slot_begin[r.layer + 1];
    const bool is_active = !r.active_step || *r.active_step;
    const i64 now = *s.clock + 1;
    const i32 slot = i < EXPERTS ? s.slot_of[i] : 0;
    const i64 heat = i < EXPERTS ? s.heat[i] : 0;
    const u8 counts_row = first < r.T ? r.counted[first] : 0;
    const OwnSlot own = load_slot(s, begin, end);
#if JOBS == 1
    Division division = {r.of_misses[min(lane, USED)], r.jobs};
#else
    const Division division = {};
#endif
    float x[PER_LANE], biases[PER_LANE];
    if (BIAS)
        load_row(r.bias, lane, biases);
    for (i32 j = i; j < EXPERTS * 3; j += (i32)blockDim.x)
        step.source[j] = s.expert_ptr[j];
#if JOBS == 2
    for (i32 j = i; j <= EXPERTS; j += (i32)blockDim.x)
        step.division[j] = (i16)r.of_misses[j];
#endif
    clear(step);
    __syncthreads();
    dependency_wait();
    if (is_late)
        dependency_release();
#if JOBS == 1
    division.next = load_fresh(r.jobs + JOBS_NEXT);
#endif
#if JOBS == 2
    const Handing handing = {load_fresh(r.jobs + JOBS_NEXT), r.jobs, r.several, load_fresh(r.several + SEVERAL_COUNT)};
#else
    const Handing handing = {};
#endif
    if (first < r.T)
        load_row(r.logits + first * EXPERTS, lane, x);
#if GUESSES
    const u64 number = load_fresh(r.landing_words + LANDING_STEP) + (r.is_first ? 1 : 0);
    if (i < LANDING_SLOTS)
        step.guessed[i] = r.landing_set ? load_fresh(r.landing_set + 1 + i) : NO_TAG;
    const Landings landings = {r.landing_words, r.landing_set, landing_layer(number, r.layer), r.n_blocks};
#else
    const Landings landings = {};
#endif
    if (!is_active) { // nothing moves, and neither the expert FFN nor a copy finds work of the step before
        if (i == 0)
            *r.n_active = *r.fetch_count = 0;
#if JOBS == 2
        if (i == 0)
            r.several[SEVERAL_COUNT] = 0, r.several[SEVERAL_BEFORE] = handing.before;
#endif
        if (i == 0 && r.settled)
            store_told(r.settled, SETTLED);
        return;
    }
    Pick pick;
    auto weigh = [&](i32 t) {
        const float weight = weigh_row(r.logits + t * EXPERTS, pick, rule, lane);
        if (lane < USED)
            r.weights[t * USED + lane] = weight;
    };
    i32 last = -1;
    for (i32 t = first; t < r.T; last = t, t += n_warps) {
        if (last >= 0) {
            weigh(last);
            load_row(r.logits + t * EXPERTS, lane, x);
        }
        pick = pick_row(r.logits + t * EXPERTS, x, biases, r.imposed ? r.imposed + t * USED : nullptr, lane,
                        step.chosen + t * USED);
        const u32 counts_here = (t == first ? counts_row : r.counted[t]) != 0;
        if (lane < USED) {
            const i32 pair = t * USED + lane;
            r.experts[pair] = pick.expert;
            atomicAdd(&step.uses[pick.expert], 1u);
            atomicAdd(&step.counted[pick.expert], counts_here);
            atomicMin(&step.first_pair[pick.expert], pair);
            atomicOr(&step.tokens[pick.expert], 1u << t);
        }
    }
    if (i < EXPERTS)
        step.resident[i] = slot >= 0;
    __syncthreads();
    settle<true>(step, s, own, end - begin, r.T * USED, now, r.memory, heat, r.fetch_rows, r.fetch_count, r.active,
                 r.n_active, r.pairs, {r.bypass, r.expert_bytes, r.up_at, r.down_at, r.n_places}, division, landings,
                 handing, r.settled);
    if (r.settled) { // what all have written is seen before this
        __syncthreads();
#if POISON
        poison_fetched(r, part_bytes);
        __syncthreads();
#endif
        if (i == 0)
            store_told(r.settled, SETTLED);
    }
    if (last >= 0)
        weigh(last);
#if GUESSES
    if (i == 0 && r.is_first) {
        r.landing_words[LANDING_STEP] = number;
        r.landing_words[LANDING_BEGAN_NS] = clock_ns();
    }
    if (r.is_last && i < WARP)
        note_step(r.landing_words, r.is_last == 1, lane);
#endif
}

// Missed experts of a step of 33 to 256 tokens: the CPU's threads take some while the others cross PCIe (jobs.cuh).
// Twin of what comes of it: expert_ffn of engine/ops/reference.py, without the fold over ranks.
//
// plan_jobs      which missing experts enter no slot and are offered to the CPU, those with the fewest tokens first
// hand_rows      the activations of all tokens to host memory, if there are jobs
// share_experts  posts the jobs, and copies what misses to staging memory: first what has no job, then the jobs'
//                experts, the last one first. Before it copies one of these it takes its job back. Threads claim jobs
//                in order, so they come from the other end, and where both meet nothing is left
// collect_jobs   waits for the answers, and puts y of the CPU's experts where the FFN puts those of the others
//
// -DEXPERTS=E (<= 512). `items` [E]: the experts that miss, in the order in which they are copied, those without a job
// first; item i has place i of the staging memory, as far as that goes: what is beyond it is read where it lies. masks
// [64, 8]: of each job, in the order of posting, the tokens that use its expert. state: words as below. source [E, 3]:
// where each expert is during the step; zeros: nowhere, its y are the CPU's.
#include "jobs.cuh"
#include "pieces.cuh"

// Of the layer: the number of its first job, how many there are, and items without one; items whose copies have nearly
// ended; blocks that have ended; the longest wait of one of them. Of all layers: those that had jobs, jobs done, jobs
// taken back, and ns that layers waited for answers. And, for each job of the layer, 4 * number and whose it is, as of
// JOBS_KNOWN.
enum {
    LONG_FIRST, LONG_JOBS, LONG_PLAIN, LONG_BEGUN, LONG_ENDED, LONG_LONGEST,
    LONG_LAYERS, LONG_DONE, LONG_TAKEN, LONG_WAITED_NS,
    LONG_KNOWN = 16,
};
constexpr i32 N_COUNTS = 4; // from LONG_LAYERS on; the board has the same
constexpr i32 MASKS = SPARK_JOB_ROWS / 32;
constexpr i32 RECORD_FIRST = 8, RECORD_WORDS = 16; // words of a record that who posts fills
constexpr i32 AHEAD = 3; // pieces that a warp still has to copy of an expert when it is asked whose the next one is
#define NOBODY 0x7fffffff


// Where a job's y go.
DEVICE u64 place_of(u64 number, u64 outputs, i64 output_bytes) {
    return outputs + (number - 1) % SPARK_JOB_RECORDS * (u64)output_bytes;
}

// Of the threads up to E: how many below this one have the flag, and how many have it. By all; flags: [E], shared.
DEVICE i32 count_before(u8* flags, bool flag, i32& total) {
    const i32 i = threadIdx.x;
    if (i < EXPERTS)
        flags[i] = flag;
    total = __syncthreads_count(i < EXPERTS && flag);
    i32 before = 0;
    if (i < EXPERTS && flag)
        for (i32 j = 0; j < i; j++)
            before += flags[j];
    return before;
}

// After `follow`, which wrote `source`. experts [T, A], T <= 256; fetches as of it. A block of at least E threads.
KERNEL __launch_bounds__(1024)
    plan_jobs(const i32* experts, i32 T, i32 A, const u64* home_ptr, const i32* fetch_rows, const i32* fetch_count,
              const float* gate_scales, i32 D, i32 bank, i32 most, u64 input, u64 input_scales, u64 outputs,
              i64 output_bytes, i64 gate_bytes, i64 up_bytes, i64 down_bytes, u8* staging, i64 n_bytes, u64* words,
              u64* state, i32* items, u32* masks, u64* source) {
    __shared__ u32 rows_of[EXPERTS][MASKS];
    __shared__ i32 keys[EXPERTS];
    __shared__ u8 enters[EXPERTS], flags[EXPERTS];
    __shared__ spark_job records[SPARK_JOB_RECORDS];
    const i32 i = threadIdx.x, n = blockDim.x;
    const i64 bytes[3] = {gate_bytes, up_bytes, down_bytes};
    const u64 first = load_fresh(words + JOBS_NEXT);
    if (i < EXPERTS) {
        enters[i] = 0;
        for (i32 w = 0; w < MASKS; w++)
            rows_of[i][w] = 0;
    }
    __syncthreads();
    for (i32 pair = i; pair < T * A; pair += n)
        atomicOr(&rows_of[experts[pair]][pair / A / 32], 1u << (pair / A % 32));
    for (i32 r = i; r < *fetch_count; r += n)
        enters[fetch_rows[r * 3]] = 1;
    __syncthreads();
    i32 count = 0;
    if (i < EXPERTS)
        for (i32 w = 0; w < MASKS; w++)
            count += __popc(rows_of[i][w]);
    // It was at home before the step. What leaves its slot is there until the FFN has ended.
    const bool is_missing = count > 0 && source[i * 3] == home_ptr[i * 3];
    const bool may_be = is_missing && !enters[i] && count <= SPARK_JOB_TOKENS;
    const i32 key = may_be ? count * EXPERTS + i : NOBODY;
    if (i < EXPERTS)
        keys[i] = key;
    const i32 n_jobs = min(__syncthreads_count(may_be), most);
    i32 job = 0; // its place among the layer's, from 1 on
    if (may_be) {
        for (i32 j = 0; j < EXPERTS; j++)
            job += keys[j] < key;
        job = job < n_jobs ? job + 1 : 0;
    }
    i32 n_plain;
    i32 item = count_before(flags, is_missing && !job, n_plain);
    if (job)
        item = n_plain + n_jobs - job;
    if (is_missing) {
        const i64 stride = aligned(bytes[0]) + aligned(bytes[1]) + aligned(bytes[2]);
        items[item] = i;
        if (job) {
            spark_job& to = records[job - 1];
            for (i32 part = 0; part < 3; part++)
                to.source[part] = source[i * 3 + part];
            to.input = input, to.input_scales = input_scales;
            to.output = place_of(first + (u64)(job - 1), outputs, output_bytes), to.output_scales = 0;
            to.gate_scale = gate_scales ? gate_scales[i] : 1.0f;
            to.bank = bank, to.part = SPARK_JOB_BOTH, to.first = 0, to.last = D, to.count = count;
            i32 k = 0;
            for (i32 w = 0; w < MASKS; w++) {
                masks[(job - 1) * MASKS + w] = rows_of[i][w];
                for (u32 mask = rows_of[i][w]; mask; mask &= mask - 1)
                    to.token[k++] = (u8)(w * 32 + __ffs((i32)mask) - 1);
            }
            for (; k < SPARK_JOB_TOKENS; k++)
                to.token[k] = 0;
            for (i32 j = 0; j < (i32)sizeof to.more; j++)
                to.more[j] = 0;
        }
        u8* at = staging + item * stride;
        if ((item + 1) * stride <= n_bytes)
            for (i32 part = 0; part < 3; part++) {
                source[i * 3 + part] = (u64)at;
                at += aligned(bytes[part]);
            }
    }
    __syncthreads();
    const u64 ring = load_fresh(words + JOBS_RING);
    for (i32 w = i; w < n_jobs * RECORD_WORDS; w += n) {
        const i32 j = w / RECORD_WORDS, word = RECORD_FIRST + w % RECORD_WORDS;
        ((u64*)job_of(ring, SPARK_JOB_RECORDS, first + (u64)j))[word] = ((const u64*)&records[j])[word];
    }
    if (i == 0) {
        words[JOBS_NEXT] = first + (u64)n_jobs;
        state[LONG_FIRST] = first;
        state[LONG_JOBS] = (u64)n_jobs;
        state[LONG_PLAIN] = (u64)n_plain;
        state[LONG_BEGUN] = state[LONG_LONGEST] = 0;
    }
}

// h of all tokens to host memory: n floats x, or n bytes q, a multiple of 32, and a float of d for each 32. Any grid.
KERNEL hand_rows(const float* x, const i8* q, const float* d, i64 n, u64 input, u64 input_scales, const u64* state) {
    if (!state[LONG_JOBS])
        return;
    const i64 thread = blockIdx.x * (i64)blockDim.x + threadIdx.x, n_threads = gridDim.x * (i64)blockDim.x;
    const u32* const from = x ? (const u32*)x : (const u32*)q;
    for (i64 i = thread; i < (x ? n : n / 4); i += n_threads)
        ((u32*)input)[i] = from[i];
    for (i64 i = thread; i < (x ? 0 : n / 32); i += n_threads)
        ((float*)input_scales)[i] = d[i];
}

// By one thread, of a job that is posted: SPARK_JOB_CLAIMED, it is the CPU's; SPARK_JOB_DECLINED, it is the GPU's, as
// nobody claimed it within bound_ns (0: so far), or the CPU declined it. Who claimed it and says no more is not waited
// for longer than patience_ns: then there will be no answer either.
DEVICE i32 settle_job(spark_job* job, u64 number, u64 bound_ns, u64 patience_ns) {
    const u64 begin = clock_ns();
    bool taken = false;
    while (true) {
        const u64 waited = clock_ns() - begin;
        if (!taken && waited >= bound_ns) {
            store_system(&job->back, number);
            fence_system(); // the CPU claims, then looks at `back`: one of the two sees the other
            taken = true;
        }
        const u64 answer = load_system(&job->answer);
        if (answer / 4 == number) { // else of a job before
            if (answer % 4 == SPARK_JOB_DECLINED)
                return SPARK_JOB_DECLINED;
            if (answer % 4 == SPARK_JOB_DONE || load_system(&job->accepted) == number || waited > patience_ns)
                return SPARK_JOB_CLAIMED;
        } else if (taken) {
            return SPARK_JOB_DECLINED;
        }
    }
}

// A layer's jobs and items, as all blocks read them when `share_experts` begins.
struct Shared {
    u64 first;
    i32 n_jobs, n_plain;
    u64 *words, *state;
    const i32* items;

    __device__ i32 expert(i32 job) const { return items[n_plain + n_jobs - job]; } // jobs count from 1 on
    __device__ u64 number(i32 job) const { return first + (u64)(job - 1); }
    __device__ spark_job* record(i32 job) const {
        return job_of(load_fresh(words + JOBS_RING), SPARK_JOB_RECORDS, number(job));
    }
};

// By one thread: tell the copiers, and the FFN, whose a job is.
DEVICE void tell_job(const Shared& s, i32 job, i32 whose, u64* source) {
    if (whose == SPARK_JOB_CLAIMED) {
        for (i32 part = 0; part < 3; part++)
            source[s.expert(job) * 3 + part] = 0;
    } else {
        atomicAdd(s.state + LONG_TAKEN, (u64)1);
    }
    store_told(s.state + LONG_KNOWN + job - 1, 4 * s.number(job) + (u64)whose);
}

// By one warp, which copies nothing, so that its trips over the link are on nobody's way: post the jobs, and take them
// back from the last on, each while the copy of the item before it ends. It waits for copiers pace_ns at most: they may
// not have begun, and a job that is taken back too early costs time and nothing else.
DEVICE void lead(const Shared& s, u64 pace_ns, u64* source) {
    const i32 lane = threadIdx.x;
    const u64 patience_ns = load_fresh(s.words + JOBS_PATIENCE_NS), bound_ns = load_fresh(s.words + JOBS_BOUND_NS);
    for (i32 job = 1 + lane; job <= s.n_jobs; job += WARP)
        post_job(s.record(job), s.number(job));
    __syncwarp();
    u64 since = clock_ns();
    i32 left = s.n_jobs, whose = SPARK_JOB_DECLINED;
    while (left && whose != SPARK_JOB_CLAIMED) {
        if (lane == 0) {
            const u64 begun = (u64)(s.n_plain + s.n_jobs - left);
            while (load_fresh(s.state + LONG_BEGUN) < begun && clock_ns() - since < pace_ns) {
            }
            whose = settle_job(s.record(left), s.number(left), 0, patience_ns);
            since = clock_ns();
            tell_job(s, left, whose, source);
        }
        whose = __shfl_sync(FULL_WARP, whose, 0);
        left--;
    }
    // Those before one that is claimed are, too, or their threads are about to, or were stopped: each is asked.
    for (i32 job = left - lane; job > 0; job -= WARP)
        tell_job(s, job, settle_job(s.record(job), s.number(job), bound_ns, patience_ns), source);
}

// The first block leads, its first warp alone; the others copy. At least two blocks, any of them with the same threads.
KERNEL share_experts(const u64* home_ptr, i64 gate_bytes, i64 up_bytes, i64 down_bytes, u8* staging, i64 n_bytes,
                     i64 pace_ns, u64* words, u64* state, const i32* items, u64* source) {
    const i64 bytes[3] = {gate_bytes, up_bytes, down_bytes};
    const i32 lane = threadIdx.x % WARP, n_warps = blockDim.x / WARP;
    const Shared s = {state[LONG_FIRST], (i32)state[LONG_JOBS], (i32)state[LONG_PLAIN], words, state, items};
    if (blockIdx.x == 0) {
        if (threadIdx.x < WARP && s.n_jobs)
            lead(s, (u64)pace_ns, source);
        return;
    }
    const i32 n_copiers = (gridDim.x - 1) * n_warps, copier = (blockIdx.x - 1) * n_warps + threadIdx.x / WARP;
    const i64 stride = aligned(bytes[0]) + aligned(bytes[1]) + aligned(bytes[2]);
    const i32 per_expert = pieces_of(bytes[0]) + pieces_of(bytes[1]) + pieces_of(bytes[2]), n = s.n_plain + s.n_jobs;
    i32 piece = copier; // warps go on where those before them ended, so that all have as many
    for (i32 item = 0; item < n; item++) {
        bool is_copied = (item + 1) * stride <= n_bytes;
        if (item >= s.n_plain) {
            const i32 job = n - item;
            u64 told = 0;
            if (lane == 0)
                while ((told = load_told(state + LONG_KNOWN + job - 1)) / 4 != s.number(job)) {
                }
            is_copied &= (i32)__shfl_sync(FULL_WARP, (i32)(told % 4), 0) != SPARK_JOB_CLAIMED;
        }
        bool told = copier > 0 || lane > 0;
        for (; is_copied && piece < per_expert; piece += n_copiers) {
            if (!told && piece + AHEAD * n_copiers >= per_expert) {
                *(volatile u64*)(state + LONG_BEGUN) = (u64)(item + 1);
                told = true;
            }
            stage_piece(staging, item, home_ptr + items[item] * 3, piece, bytes, lane);
        }
        if (!told)
            *(volatile u64*)(state + LONG_BEGUN) = (u64)(item + 1);
        piece -= is_copied ? per_expert : 0;
    }
}

// Of job blockIdx.x: once it is answered, columns of its rows of host memory, from the first on, to y [n_tokens * A,
// columns], at the pairs of n_tokens tokens, from first_token on, that use its expert; zeros, and a word that says so,
// where there is no answer. experts: of all tokens. counts: it is the layer's first such launch, whose last block tells
// the host what came of the layer. 64 blocks of at least 256 threads.
KERNEL collect_jobs(const i32* experts, i32 A, i32 D, u64 outputs, i64 output_bytes, float* y, i32 first_token,
                    i32 n_tokens, i32 first, i32 columns, i32 counts, u64* board, u64* words, u64* state,
                    const i32* items, const u32* masks) {
    __shared__ i32 pairs[SPARK_JOB_TOKENS];
    __shared__ bool done;
    const Shared s = {state[LONG_FIRST], (i32)state[LONG_JOBS], (i32)state[LONG_PLAIN], words, state, items};
    const i32 job = blockIdx.x + 1, i = threadIdx.x;
    if (!s.n_jobs)
        return;
    if (job <= s.n_jobs && state[LONG_KNOWN + job - 1] % 4 == SPARK_JOB_CLAIMED) {
        const u64 number = s.number(job);
        const u32* const mask = masks + (job - 1) * MASKS;
        const i32 expert = s.expert(job);
        i32 count = 0, before = 0;
        for (i32 w = 0; w < MASKS; w++) {
            before += w < i / 32 ? __popc(mask[w]) : 0;
            count += __popc(mask[w]);
        }
        if (i < SPARK_JOB_ROWS && mask[i / 32] >> (i % 32) & 1) {
            i32 a = 0;
            while (a < A - 1 && experts[i * A + a] != expert)
                a++;
            const i32 t = i - first_token;
            pairs[before + __popc(mask[i / 32] & ((1u << (i % 32)) - 1))] = t >= 0 && t < n_tokens ? t * A + a : -1;
        }
        if (i == 0) {
            u64 waited_ns;
            done = await_done(s.record(job), number, counts ? load_fresh(words + JOBS_PATIENCE_NS) : 0, waited_ns);
            if (!done)
                words[JOBS_FAILED] = number;
            if (done && counts)
                atomicAdd(state + LONG_DONE, (u64)1);
            atomicMax(state + LONG_LONGEST, waited_ns);
        }
        __syncthreads();
        const u8* const from = (const u8*)place_of(number, outputs, output_bytes);
        if ((D | first | columns) % 2 == 0) {
            constexpr i32 UNROLL = 8; // reads under way a thread
            const i32 twos = columns / 2, size = count * twos;
            for (i32 start = i; start < size; start += UNROLL * blockDim.x) {
                u64 v[UNROLL];
#pragma unroll
                for (i32 k = 0; k < UNROLL; k++) {
                    const i32 at = start + k * (i32)blockDim.x;
                    v[k] = 0;
                    if (done && at < size && pairs[at / twos] >= 0)
                        v[k] = load_fresh((const u64*)(from + 4 * ((i64)(at / twos) * D + first + at % twos * 2)));
                }
#pragma unroll
                for (i32 k = 0; k < UNROLL; k++) {
                    const i32 at = start + k * (i32)blockDim.x;
                    if (at < size && pairs[at / twos] >= 0)
                        *(u64*)(y + (i64)pairs[at / twos] * columns + at % twos * 2) = v[k];
                }
            }
        } else {
            for (i32 at = i; at < count * columns; at += blockDim.x)
                if (const i32 row = at / columns, column = at % columns; pairs[row] >= 0)
                    y[(i64)pairs[row] * columns + column] =
                        done ? ((const volatile float*)from)[(i64)row * D + first + column] : 0.0f;
        }
    }
    if (i == 0 && counts) {
        __threadfence();
        if (atomicAdd(state + LONG_ENDED, (u64)1) + 1 < gridDim.x)
            return;
        __threadfence();
        state[LONG_ENDED] = 0;
        state[LONG_LAYERS] = load_fresh(state + LONG_LAYERS) + 1;
        state[LONG_WAITED_NS] = load_fresh(state + LONG_WAITED_NS) + load_fresh(state + LONG_LONGEST);
        for (i32 k = 0; k < N_COUNTS; k++)
            ((volatile u64*)board)[k] = load_fresh(state + LONG_LAYERS + k);
        ((volatile u64*)load_fresh(words + JOBS_BOARD))[BOARD_FAILED] = load_fresh(words + JOBS_FAILED);
    }
}

// The expert FFN of one token, the second half of two tokens', and the first half of a dense one. Twins: expert_ffn,
// dense_ffn.
//
// Record a of the active experts (experts.cuh) is that of rank a where there is one token.
//
// Kernels.
//   kernel          writes                                           grid                                block
//   gate_up         z [A, F] = act(gate h) * (up h)                  (records, copiers + ceil(F / 32))   WARPS warps
//   gate_up_dense   z [F] of one token, of matrices gate and up      ceil(F / Z_ROWS), SHARED: + 1       WARPS warps
//   gated           z [T, F] of the products of both, g and u        n_blocks, SHARED: + T               WARPS warps
//   down_one        x [D] += the fold over ranks                     ceil(D / 8)                         a warp a rank
// act is silu or gelu. z is in 8 bits (zq, zd, zsums), or floats. Where `add` is 0, x becomes the fold. What enters a slot is
// copied there first: a block's own rows of gate and up before it reads them there, and the down part by the first
// `copiers` blocks of a record meanwhile.
//
// Macros, and those of experts.cuh.
//   ROWS             of each matrix at a time a warp: 1, 2 or 4. In down_one 4
//   STAGES           of those in flight
//   WARPS            at most 8; of gate_up 16
//   USED             experts a token: A (down_one)
//   FOUND            in down_one 1: there are several tokens, whose records are looked for among the pairs
//   Z_ROWS           32, or with DOWN_FLOAT a smaller multiple of ROWS * WARPS: few rows on many multiprocessors
//   APART            1: gated in place of the other two; four elements a thread
//   SETTLES          1: the first block of gate_up, whose grid has a row more, chooses the experts; the others choose by themselves
//                    (settled.cuh, known.cuh), and down_one waits for the active table. JOBS: blocks of that row hand over
//   WEIGHTED         in gate_up_dense 1: products are multiplied by gate_scale and up_scale
//   BESIDE           1: the grid has one record more
//   SHARED           the record's copiers, in gate_up_dense one more block, in gated T, make row_scale
//   BESIDE_DOWN      its type in down_one, a float one if DOWN is: a warp more, and then x += row_scale[0], if any,
//                    times the matrix `beside` times the last z
//
// Shared memory.
//   gate_up          unless registers hold it, the input as in product.cu; then 2 * STAGES * stage_bytes a warp, a
//                    stage being ROWS rows and 32 bytes or more; with SHARED 8 * D bytes at least
//   down_one         a warp: HeldRow::base_bytes; then STAGES * stage_bytes, each four rows and 32
#include "experts.cuh"

#include "divided.cuh"
#include "landing.cuh"

#include "joined.cuh"

#if GUESSES
#define LANDING , u64* landing_words, u64* landing_set, i32 most_units, u8* landing, i64 slot_bytes, i64 up_at, i64 down_at
#else
#define LANDING
#endif
#if JOBS
#define JOB_WORDS , u64* jobs
#define JOB_BANK , u64* jobs, i32 bank
#else
#define JOB_WORDS
#define JOB_BANK
#endif

#ifdef APART

KERNEL gated(const float* g, const float* u, i32 n_elements, i32 n_blocks, float* z, i8* zq, float* zd, i32* zsums,
             const u8* shared_gate, const float* h, float* row_scale) {
    dependency_release();
#ifdef SHARED
    if ((i32)blockIdx.x >= n_blocks) {
        DYNAMIC_SHARED(float, shared);
        const i32 t = blockIdx.x - n_blocks;
        shared_scale(shared, shared_gate, h + (i64)t * COLS, row_scale + t);
        return;
    }
#endif
    dependency_wait();
    const i32 i = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
#if DOWN_FLOAT
    for (i32 j = i; j < min(i + 4, n_elements); j++)
        z[j] = activate(g[j]) * u[j];
#else
    const float4 a = four_of(g, n_elements, i), b = four_of(u, n_elements, i);
    const float4 v = {activate(a.x) * b.x, activate(a.y) * b.y, activate(a.z) * b.z, activate(a.w) * b.w};
    quantize_four(global_input(nullptr, zq, zd, zsums), v, false, v, 1.0f, nullptr, n_elements, i);
#endif
}

#elif defined GATE

#if JOBS
// What a block hands over of the layer but the record: it may be loaded before that is known. By all of its threads.
struct Handed {
    // Activations as they lie in the job's place, by words: in 8 bits with their scales behind them, or floats.
    static constexpr i32 N_Q = is_float(GATE) ? 0 : COLS / 4, N_WORDS = is_float(GATE) ? COLS : N_Q + COLS / 32;
    static constexpr i32 EACH = (N_WORDS + WARPS * WARP - 1) / (WARPS * WARP);
    u32 words[EACH];
    u64 ring, inputs, input_bytes, outputs, output_bytes;

    __device__ Handed(const u64* jobs, const Input& given) {
        const u32* const rest = is_float(GATE) ? (const u32*)given.x : (const u32*)given.d;
#pragma unroll
        for (i32 j = 0; j < EACH; j++)
            if (const i32 i = threadIdx.x + j * WARPS * WARP; i < N_WORDS)
                words[j] = i < N_Q ? ((const u32*)given.q)[i] : rest[i - N_Q];
        ring = load_fresh(jobs + JOBS_RING);
        inputs = load_fresh(jobs + JOBS_INPUTS), input_bytes = load_fresh(jobs + JOBS_INPUT_BYTES);
        outputs = load_fresh(jobs + JOBS_OUTPUTS), output_bytes = load_fresh(jobs + JOBS_OUTPUT_BYTES);
    }

    // The record's job is posted when it ends. first: the number of the layer's first one. F: rows of gate and up.
    __device__ void over(u64* jobs, u64 first, const ActiveExpert& expert, i32 bank, float gate_scale, i32 F) const {
        const u64 number = first + (u64)(job_place(expert.job) - 1), place = (number - 1) % SPARK_JOB_RECORDS;
        const u64 input = inputs + place * input_bytes;
#pragma unroll
        for (i32 j = 0; j < EACH; j++)
            if (const i32 i = threadIdx.x + j * WARPS * WARP; i < N_WORDS)
                ((u32*)input)[i] = words[j];
        spark_job* const to = job_of(ring, SPARK_JOB_RECORDS, number);
        if (threadIdx.x == 0) {
#pragma unroll
            for (i32 part = 0; part < 3; part++)
                to->source[part] = (u64)expert.source[part];
            to->input = input;
            to->input_scales = input + COLS;
            to->output = outputs + place * output_bytes;
            to->output_scales = to->output + F; // of z
            to->gate_scale = gate_scale;
            to->bank = bank;
            const bool divided = job_units(expert.job) > 0;
            to->part = divided ? SPARK_JOB_FIRST : SPARK_JOB_BOTH;
            to->first = divided ? JOB_ROWS * job_first(expert.job, F) : 0, to->last = divided ? F : COLS;
            to->count = 1, to->token[0] = 0;
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            if (job_place(expert.job) == 1)
                jobs[JOBS_POSTED_NS] = clock_ns(); // who sees the answer sees this
            post_job(to, number);
        }
    }
};
#endif

#if JOBS && SETTLES
// By a block for each record: its job, if it is one, when the first of these blocks has settled which.
DEVICE void hand_over(const u8* active, const i32* n_active, u64* jobs, const Input& given, i32 bank, const float* gate_scales,
                      i32 F, const u64* settled) {
    __shared__ u64 words[RECORD_WORDS], first;
    if (blockIdx.x > 0)
        dependency_wait_first();
    const Handed handed(jobs, given);
    if (threadIdx.x == 0 && blockIdx.x > 0)
        await_settled(settled);
    __syncthreads();
    if (threadIdx.x == WARP)
        first = load_fresh(jobs + JOBS_FIRST);
    fetch_record(words, active, n_active, blockIdx.x, threadIdx.x);
    __syncthreads();
    ActiveExpert record;
    if (read_record(words, record) && record.job > 0)
        handed.over(jobs, first, record, bank, WEIGHTED ? gate_scales[record.expert] : 1.0f, F);
}
#endif

#ifndef DENSE
#define DENSE 0
#endif
#ifndef Z_ROWS
#define Z_ROWS 32
#endif
static_assert(Z_ROWS == 32 || (DENSE && DOWN_FLOAT), "a block of activations is quantized where it is made");

#if DENSE
KERNEL __launch_bounds__(WARPS * WARP, 2)
    gate_up_dense(const u8* gate_matrix, const u8* up_matrix, i32 F, const float* x, const i8* q, const float* d,
                  const i32* sums, float* z, i8* zq, float* zd, i32* zsums, const u8* shared_gate, const float* h,
                  float* row_scale, i32 stage_bytes, float gate_scale, float up_scale) {
#else
KERNEL __launch_bounds__(WARPS * WARP, 2)
    gate_up(const u8* active, const i32* n_active, const i32* pairs, i32 n_used, i32 F, const float* x, const i8* q,
            const float* d, const i32* sums, float* z, i8* zq, float* zd, i32* zsums, const u8* beside_gate,
            const u8* beside_up, i32 n_tokens, const u8* shared_gate, const float* h, float* row_scale, i32 copiers,
            i64 down_bytes, i32 stage_bytes, const float* gate_scales JOB_BANK LANDING CHOICE) {
#endif
    constexpr i32 GATE_BYTES = row_bytes_of(GATE, COLS), UP_BYTES = row_bytes_of(UP, COLS);
    // All of a row of activations is in registers, straight from global memory.
    constexpr bool IN_REGISTERS =
        !is_float(GATE) && held_alike(GATE, UP) && COLS <= 1024 * n_held(GATE, COLS);
    __shared__ float gs[1][33], us[1][33];
    DYNAMIC_SHARED(u8, shared);
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#if DENSE
    dependency_release();
    const i32 row0 = blockIdx.x * Z_ROWS, rows = min(Z_ROWS, F - row0);
#ifdef SHARED
    if (rows <= 0) {
        shared_scale((float*)shared, shared_gate, h, row_scale);
        return;
    }
#endif
    const u8* const gate = gate_matrix + (i64)row0 * GATE_BYTES;
    const u8* const up = up_matrix + (i64)row0 * UP_BYTES;
#else
    const i32 block = (i32)blockIdx.y - SETTLES; // of a record's blocks
    const bool beside = BESIDE && blockIdx.x + 1 == gridDim.x;
#if SETTLES
    const Route route = ROUTE_ARGUMENTS;
    if (block < 0) {
        if (blockIdx.x == 0)
            settle_step(*(Step*)shared, route, true, {(i64)F * GATE_BYTES, (i64)F * UP_BYTES, down_bytes});
#if JOBS
        if (!beside)
            hand_over(active, n_active, jobs, global_input(x, q, d, sums), bank, gate_scales, F, route.settled);
#endif
        return;
    }
    Known& known = *(Known*)shared;
    if (!beside) {
        load_tables(known, route);
        __syncthreads();
    }
#endif
    if (block >= copiers)
        fill_grids<GATE, UP>();
    dependency_wait_first(); // down_one reads the table before it waits
    ActiveExpert record = {{beside_gate, beside_up}, {}, -1, 0, 1, 0};
    if (!beside) {
        __shared__ u64 words[RECORD_WORDS];
#if SETTLES
        if (warp == 0 && !own_record(words, known, route, blockIdx.x, lane)) {
            if (lane == 0)
                await_settled(route.settled);
            __syncwarp();
            fetch_record(words, active, n_active, blockIdx.x, lane);
        }
#else
        fetch_record(words, active, n_active, blockIdx.x, threadIdx.x);
#endif
        __syncthreads();
        if (!read_record(words, record))
            return;
    }
#if JOBS
    // The first block of the record hands it over, unless one ahead of it does. The first one of what the CPU may compute asks
    // whose it is, and tells the others of that, which come behind it. What else there is of a divided expert goes on meanwhile.
    if (record.job > 0) {
        __shared__ i32 whose;
        const LayerJob job(jobs, job_place(record.job));
        const i32 units = job_units(record.job), asking = units ? copiers + job_first(record.job, F) : 0;
        if (!SETTLES && block == 0)
            Handed(jobs, global_input(x, q, d, sums))
                .over(jobs, load_fresh(jobs + JOBS_FIRST), record, bank, WEIGHTED ? gate_scales[record.expert] : 1.0f, F);
        if (block >= asking) {
            const bool asks = block == asking;
            if (threadIdx.x == 0) {
                // A job is claimed when those before it leave somebody time, so its bound is as many times longer.
                const u64 bound_ns = load_fresh(jobs + JOBS_BOUND_NS) * (u64)job_place(record.job), begin = clock_ns();
                whose = asks ? await_claim(job.record, job.number, bound_ns, load_fresh(jobs + JOBS_PATIENCE_NS))
                             : job.heard(-1);
                if (asks && whose == SPARK_JOB_DECLINED) {
                    u64* const part = jobs + JOBS_PARTS + job_part(record.job);
                    atomicAdd(part + PART_TAKEN, (u64)1);
                    atomicAdd(part + PART_WAITED_NS, clock_ns() - begin);
                    if (units)
                        jobs[JOBS_ANSWERED_NS] = 0;
#if GUESSES
                    atomicAdd(landing_words + LANDING_BUSY, (u64)(units ? units : gridDim.y - SETTLES));
#endif
                }
                if (asks)
                    job.tell(whose);
            }
            __syncthreads();
            if (whose != SPARK_JOB_DECLINED) {
                if (asks && units)
                    fetch_z(job, jobs, {z, zq, zd, zsums, F}, blockIdx.x, record.job);
                return;
            }
        }
    }
#endif
#if GUESSES
    const i64 share = share_of(down_bytes, copiers); // of a copier, where the expert was guessed
    const i32 slot = FIRST_GUESSED - record.job;
    // By a block whose share of a missed expert has crossed the link.
    auto has_crossed = [&] {
        if (!record.job)
            return;
        __syncthreads();
        if (threadIdx.x == 0)
            atomicAdd(landing_words + LANDING_BUSY, ~0ull);
    };
    if (record.job < 0 && slot < LANDING_SLOTS) {
        __shared__ i32 landed;
        if (threadIdx.x == 0) {
            landed = take_unit({landing_set, most_units}, slot, block);
            const i64 of_down = min(share, down_bytes - (i64)block * share);
            const i64 of_rows = (i64)min(32, F - (block - copiers) * 32) * (GATE_BYTES + UP_BYTES);
            if (landed)
                atomicAdd(landing_words + LANDING_TAKEN,
                          (u64)(block < copiers ? max((i64)0, of_down) : of_rows));
        }
        __syncthreads();
        if (landed) {
            const u8* const at = landing + slot * slot_bytes;
            record.source[0] = at, record.source[1] = at + up_at, record.source[2] = at + down_at;
        }
    }
#endif
    if (block < copiers) {
#if GUESSES
        if (record.target[2] && record.job < 0 && slot < LANDING_SLOTS) {
            const i64 at = block * share;
            copy_part(record.target[2] + at, record.source[2] + at, min(share, down_bytes - at), 0, 1);
        } else
#endif
        if (record.target[2])
            copy_part(record.target[2], record.source[2], down_bytes, block, copiers);
#if GUESSES
        has_crossed();
#endif
#ifdef SHARED
        if (beside)
            for (i32 t = block; t < n_tokens; t += copiers) {
                __syncthreads(); // of the row before
                shared_scale((float*)shared, shared_gate, h + (i64)t * COLS, row_scale + t);
            }
#endif
#if JOBS
        if (record.target[2])
            note_own(jobs);
#endif
        return;
    }
    const i32 row0 = (block - copiers) * 32, rows = min(32, F - row0);
    const OwnRows brought = own_rows({record.source[0], record.source[1]}, {record.target[0], record.target[1]}, row0, rows,
                                 GATE_BYTES, UP_BYTES);
    const u8 *const gate = brought.gate, *const up = brought.up;
    if (record.target[0] || record.target[1]) {
        __syncthreads();
#if JOBS
        note_own(jobs);
#endif
    }
#if GUESSES
    has_crossed();
#endif
    const float gate_scale = WEIGHTED && !beside ? gate_scales[record.expert] : 1.0f, up_scale = 1.0f;
#endif
    u8* stages = shared + 2 * warp * STAGES * stage_bytes;
    if (!IN_REGISTERS)
        stages += shared_input_bytes<GATE>(COLS);
    auto issue = [&](i32 r, u8* stage) {
        if (r < rows)
            stage_rows<ROWS * GATE_BYTES, GATE_BYTES>(stage, gate + r * GATE_BYTES, min(ROWS, rows - r) * GATE_BYTES);
        copies_commit();
        if (r < rows)
            stage_rows<ROWS * UP_BYTES, UP_BYTES>(stage + stage_bytes, up + r * UP_BYTES,
                                                  min(ROWS, rows - r) * UP_BYTES);
        copies_commit();
    };
#pragma unroll
    for (i32 i = 0; i < STAGES; i++)
        issue((warp + i * WARPS) * ROWS, stages + 2 * i * stage_bytes);
#if DENSE
    fill_grids<GATE, UP>();
    dependency_wait();
#endif

    Input input = global_input(x, q, d, sums);
    typename HeldOf<GATE>::Block held[n_held(GATE, COLS)];
    if constexpr (IN_REGISTERS) {
        hold_activations<has_halves(GATE) || has_halves(UP)>(input, COLS, held);
    } else {
        const Input local = shared_input<GATE>(shared, COLS);
        copy_input<GATE>(local, 0, input, 0, COLS, threadIdx.x, blockDim.x);
        __syncthreads();
        input = local;
        if constexpr (!is_float(GATE))
            hold_activations<has_halves(GATE) || has_halves(UP)>(input, COLS, held);
    }

    for (i32 r = warp * ROWS, i = 0; r < rows; r += WARPS * ROWS, i = i + 1 < STAGES ? i + 1 : 0) {
        constexpr i32 EACH = WARP / 2 / ROWS; // lanes that hold the same sum
        u8* const stage = stages + 2 * i * stage_bytes;
        const i32 skew_gate = skew_of<GATE_BYTES>(gate + r * GATE_BYTES);
        const i32 skew_up = skew_of<UP_BYTES>(up + r * UP_BYTES);
        float acc[2 * ROWS] = {};
        const i32 token[1] = {0}; // of `input`
        stage_wait<2 * STAGES - 1>();
        multiply<GATE, ROWS, 1>(acc, stage, skew_gate, COLS, input, held, token, 1);
        stage_wait<2 * STAGES - 2>();
        multiply<UP, ROWS, 1>(acc + ROWS, stage + stage_bytes, skew_up, COLS, input, held, token, 1);
        const float sum = fold_rows(acc); // of the gate in the lower half of the warp, of up in the other
        const i32 row = r + lane / EACH % ROWS;
        if (lane % EACH == 0 && row < rows)
            (lane < WARP / 2 ? gs : us)[0][row] = WEIGHTED ? (lane < WARP / 2 ? gate_scale : up_scale) * sum : sum;
        __syncwarp(); // the stage is free
        if (Z_ROWS > STAGES * ROWS * WARPS) {
            issue(r + STAGES * WARPS * ROWS, stage);
        } else { // a warp has no more rows, but its groups of copies are counted
            copies_commit();
            copies_commit();
        }
    }
    __syncthreads();

    const Halves made{gs, us, 1, rows};
    const Z to{z, zq, zd, zsums, F};
    auto place = [&](i32) -> i64 { return DENSE ? 0 : blockIdx.x; };
    if constexpr (!DOWN_FLOAT)
        store_one(made, to, place(0), row0);
    else
        store_z<WARPS>(made, to, place, row0);
}

#endif
#ifdef DOWN

#ifndef FOUND
#define FOUND 0
#endif

constexpr i32 UNITS = 2; // a warp's rows: units, one after the other

// A warp's rows of one down matrix of the type: `begin` loads them, `finish` makes ys, the products with z. base: its
// shared memory, as said above.
template <Type type>
struct Rank {
    static constexpr i32 ROW_BYTES = row_bytes_of(type, COLS);
    u8* const base;
    const u8* const part;
    i32 row0, D, stage_bytes;

    __device__ u8* stage(i32 i) const { return base + HeldRow<type>::base_bytes() + i % STAGES * stage_bytes; }
    __device__ void issue(i32 i) const {
        const i32 row = row0 + i * ROWS;
        if (row < D)
            stage_rows<ROWS * ROW_BYTES, ROW_BYTES>(stage(i), part + (i64)row * ROW_BYTES, min(ROWS, D - row) * ROW_BYTES);
        copies_commit();
    }
    __device__ void begin() const {
#pragma unroll
        for (i32 i = 0; i < STAGES; i++)
            issue(i);
    }
    // z: row `row` of the first halves' results.
    __device__ void finish(const Input& z, i32 row, float* ys) const {
        const i32 lane = threadIdx.x % WARP;
        HeldRow<type> held;
        held.take(z, row, base);
#pragma unroll
        for (i32 i = 0; i < UNITS; i++) {
            const i32 offset = skew_of<ROW_BYTES>(part + (i64)(row0 + i * ROWS) * ROW_BYTES);
            stage_wait<STAGES - 1>();
            const float y = held.products(stage(i), offset, base);
            if (lane % (WARP / ROWS) == 0)
                ys[i * ROWS + lane / (WARP / ROWS)] = y;
            __syncwarp(); // the stage and the terms are free
            if (i + STAGES < UNITS)
                issue(i + STAGES);
            else
                copies_commit();
        }
    }
};

#ifdef BESIDE_DOWN
constexpr i32 RANKS = USED + 1;
#else
constexpr i32 RANKS = USED;
#define BESIDE_DOWN DOWN
#endif

// Records of a token's ranks, -1 where the table has none; by the first warp, for the block.
DEVICE void find_records(i32 (&places)[USED], const u8* active, i32 n_active, const i32* pairs, i32 t) {
    if (threadIdx.x >= WARP)
        return;
    const i32 lane = threadIdx.x;
    if (lane < USED)
        places[lane] = -1;
    __syncwarp();
    for (i32 i = lane; i < n_active; i += WARP) {
        const u64* const words = (const u64*)(active + (i64)i * 64);
        const i32 first = (i32)(load_fresh(words + 6) >> 32), count = (i32)load_fresh(words + 7);
        for (i32 j = first; j < first + count; j++)
            if (const i32 pair = load_fresh(pairs + j); pair / USED == t)
                places[pair % USED] = i;
    }
}

#include "answers.cuh"

// The bound: as many blocks as a multiprocessor gets of two tokens' (experts.py), which is then one round of them.
KERNEL __launch_bounds__(RANKS * WARP, FOUND ? 32 / RANKS : 0)
    down_one(const u8* active, const i32* n_active, const i32* pairs, const float* weights, i32 D, const float* z,
             const i8* zq, const float* zd, const i32* zsums, float* x, i32 add, const u8* beside,
             const float* row_scale, i32 stage_bytes JOB_WORDS CHOICE) {
    __shared__ float ys[RANKS][UNITS * ROWS], ws[RANKS];
    DYNAMIC_SHARED(u8, shared);
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const i32 row0 = blockIdx.x * UNITS * ROWS, row = row0 + threadIdx.x, t = blockIdx.y;
    u8* const base = shared + warp * (HeldRow<DOWN>::base_bytes() + STAGES * stage_bytes);
    const bool valid = threadIdx.x < UNITS * ROWS && row < D, is_beside = RANKS > USED && warp == USED;
    constexpr bool IS_LATE = RANKS == USED || FOUND; // ptx.cuh
    if (!IS_LATE)
        dependency_release();
#if SETTLES
    meet_settled(settled);
#endif
    // The source of the down part, its target, and whether there is such a record: as fetch_record, no more than needed.
    __shared__ u64 words[RANKS][3 + JOBS];
    i32 place = warp;
    if constexpr (FOUND) {
        __shared__ i32 places[USED];
        find_records(places, active, load_fresh(n_active), pairs, t);
        __syncthreads();
        place = is_beside ? 0 : places[warp];
    }
    if (!is_beside && lane < 2)
        words[warp][lane] = load_fresh((const u64*)(active + (i64)max(place, 0) * 64) + (lane ? 5 : 2));
    else if (lane == 2)
        words[warp][2] = !is_beside && (FOUND ? place >= 0 : place < load_fresh(n_active));
    else if (JOBS && !is_beside && lane == 3)
        words[warp][2 + JOBS] = load_fresh((const u64*)(active + (i64)max(place, 0) * 64) + 7);
    __syncwarp();
    const bool active_rank = words[warp][2] != 0;
    const u8* const target = active_rank ? (const u8*)words[warp][1] : nullptr;
    const Rank<DOWN> rank{base, target ? target : (const u8*)words[warp][0], row0, D, stage_bytes};
    const Rank<BESIDE_DOWN> last{base, beside, row0, D, stage_bytes};
    if (!is_beside && (!active_rank || target)) // gate_up writes what enters a slot; the rest is there already
        dependency_wait();
    bool of_cpu = false;
#if JOBS
    const i32 job = active_rank ? max(0, (i32)(words[warp][3] >> 32)) : 0;
    if (job && !job_units(job)) { // gate_up has made z of a divided one as of any
        dependency_wait(); // gate_up has told whose it is
        of_cpu = LayerJob(jobs, job_place(job)).heard(-1) != SPARK_JOB_DECLINED;
    }
    __shared__ JobSeen seen[USED];
    if (!is_beside && lane == 0)
        seen[warp] = {job, of_cpu, 0, 0};
#endif
    if (active_rank && !of_cpu)
        rank.begin();
    if (is_beside)
        last.begin();
    fill_grids<DOWN, BESIDE_DOWN>();
    dependency_wait();
    if (IS_LATE)
        dependency_release();
    float* const to = x + (i64)t * D + row;
    const float old = add && valid ? *to : 0.0f;
    if (lane == 0)
        ws[warp] = active_rank ? weights[t * USED + warp] : is_beside && row_scale ? row_scale[t] : 0.0f;
    const Input input = global_input(z, zq, zd, zsums);
#if JOBS
    if (of_cpu)
        fetch_result(LayerJob(jobs, job_place(job)), jobs, row0, D, ys[warp], seen[warp]);
#endif
    if (active_rank && !of_cpu)
        rank.finish(input, t * USED + warp, ys[warp]);
    else if (is_beside)
        last.finish(input, gridDim.y * USED + t, ys[warp]);
    else if (!of_cpu && lane < UNITS * ROWS) // a step that does nothing has an empty table
        ys[warp][lane] = 0.0f;
    __syncthreads();
    if (valid) {
        float r = 0.0f;
#pragma unroll
        for (i32 a = 0; a < USED; a++)
            r = __fmaf_rn(ws[a], ys[a][threadIdx.x], r);
        r = add ? old + r : r;
        if (RANKS > USED)
            r = r + (row_scale ? ws[RANKS - 1] * ys[RANKS - 1][threadIdx.x] : ys[RANKS - 1][threadIdx.x]);
        *to = r;
    }
#if JOBS
    if (blockIdx.x == 0 && threadIdx.x == 0)
        note_jobs(jobs, seen);
#endif
}

#endif

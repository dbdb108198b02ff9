// The expert FFN of a step of 2 to 32 tokens. Twin: expert_ffn.
//
// Records of experts that are used and their pairs are those of experts.cuh. Most experts of such a step have one token
// or two. A warp multiplies its rows of an expert with each of them in turn, as it would with one token's, so a byte of
// the expert is read once.
//
// Kernels.
//   kernel            writes                                 grid                                        block
//   gate_up_several   z [T * A, F] = act(gate h) * (up h)    copiers + records * ceil(F / 32)            WARPS warps
//   down_several      y [T * A, D] = down z                  (ceil(D / STAGES / ROWS / WARPS), records)  WARPS warps
//   combine           x [T, D] += the fold of y over ranks   (ceil(D / block), T)                        any
//   combine_norm      the same, and q, d, sums of x's norm   T                                           any
// A block of gate_up_several has 32 rows of an expert, since a block of z has one scale. What enters a slot is copied
// there first, by the block whose rows they are, or all copiers in turn for the down part. Where `add` is 0, x becomes
// the fold. combine_norm saves the launch of an rms_norm, in whose place its results are read; D is a multiple of 32.
//
// Macros, and those of experts.cuh. FOLD alone: combine and combine_norm.
//   TOKENS           at most: 8 or 32
//   ROWS             of a matrix at a time a warp: 1, 2 or 4
//   KEPT             tokens that a warp of gate_up_several keeps: 1 or 2
//   STAGES           times ROWS rows has a warp of down_several
//   WARPS            of a block; 32 is a multiple of WARPS * ROWS
//   PER_SM           of a multiprocessor at a time
//   SHARED           the copiers make row_scale
//   SETTLES          1, of two tokens: the first block of gate_up_several, whose grid has one more, chooses the experts; the others
//                    choose by themselves (settled.cuh, known.cuh), and what comes behind waits for the active table
//   JOBS             2: the last records may be the CPU's (several_jobs.cuh)
//
// Shared memory.
//   gate_up_several  2 * stage_bytes a warp, a stage being ROWS rows and 32 bytes or more; with SHARED 8 * D at least
//   down_several     a warp: HeldRow::base_bytes, then STAGES * stage_bytes
//   combine_norm     8 * D
#include "experts.cuh"
#include "several_jobs.cuh"

#include "joined.cuh"

#if JOBS
#define JOB_WORDS , u64* jobs, u64* several
#else
#define JOB_WORDS
#endif

#ifdef GATE

#if JOBS
// A job's record and activations, those of its tokens one after the other, by a block; then it is posted. record: the
// expert's words.
DEVICE void hand_over(u64* jobs, u64* several, i32 place, u64 record, const i32* pairs, i32 n_used, i32 bank,
                      const Input& given, const float* gate_scales) {
    const LayerJob job(jobs, place, several + SEVERAL_KNOWN);
    const Uses uses = uses_of(record);
    const i32 own = own_pair(pairs, uses) / n_used;
    const u64 input = load_fresh(several + SEVERAL_INPUTS) + job.place * load_fresh(several + SEVERAL_INPUT_BYTES);
    const u64 scales = is_float(GATE) ? 0 : input + uses.count * COLS;
    for (i32 use = 0; use < uses.count; use++) {
        const Input row = row_of(given, __shfl_sync(FULL_WARP, own, use), COLS);
        if constexpr (is_float(GATE)) {
            for (i32 i = threadIdx.x; i < COLS; i += blockDim.x)
                ((float*)input)[use * COLS + i] = row.x[i];
        } else {
            for (i32 i = threadIdx.x; i < COLS / 4; i += blockDim.x)
                ((u32*)input)[use * (COLS / 4) + i] = ((const u32*)row.q)[i];
            for (i32 i = threadIdx.x; i < COLS / 32; i += blockDim.x)
                ((float*)scales)[use * (COLS / 32) + i] = row.d[i];
        }
    }
    u64 source[3];
#pragma unroll
    for (i32 part = 0; part < 3; part++)
        source[part] = word_of(record, part);
    const i32 expert = (i32)word_of(record, 6);
    if (threadIdx.x == 0) {
        spark_job* const to = job.record;
#pragma unroll
        for (i32 part = 0; part < 3; part++)
            to->source[part] = source[part];
        to->input = input, to->input_scales = scales;
        to->output = load_fresh(several + SEVERAL_OUTPUTS) + job.place * load_fresh(several + SEVERAL_OUTPUT_BYTES);
        to->output_scales = 0;
        to->gate_scale = WEIGHTED ? gate_scales[expert] : 1.0f;
        to->bank = bank, to->part = SPARK_JOB_BOTH, to->first = 0, to->last = COLS, to->count = uses.count;
        for (i32 use = 0; use < uses.count; use++)
            to->token[use] = (u8)use;
    }
    __syncthreads();
    if (threadIdx.x == 0)
        post_job(job.record, job.number);
}
#define JOB_BANK JOB_WORDS, i32 bank
#else
#define JOB_BANK
#endif

KERNEL __launch_bounds__(WARPS * WARP, PER_SM)
    gate_up_several(const u8* active, const i32* n_active, const i32* pairs, i32 n_used, i32 F, const float* x,
                    const i8* q, const float* d, const i32* sums, float* z, i8* zq, float* zd, i32* zsums,
                    const u8* beside_gate, const u8* beside_up, i32 n_tokens, const u8* shared_gate, const float* h,
                    float* row_scale, i32 copiers, i64 down_bytes, i32 stage_bytes, const float* gate_scales JOB_BANK CHOICE) {
    constexpr i32 GATE_BYTES = row_bytes_of(GATE, COLS), UP_BYTES = row_bytes_of(UP, COLS);
    __shared__ float gs[TOKENS][33], us[TOKENS][33];
    DYNAMIC_SHARED(u8, shared);
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, block = (i32)blockIdx.x - SETTLES;
#if SETTLES
    const Route route = ROUTE_ARGUMENTS;
    if (block < 0) {
        settle_step(*(Step*)shared, route, true, {(i64)F * GATE_BYTES, (i64)F * UP_BYTES, down_bytes});
        return;
    }
    Known& known = *(Known*)shared;
    load_tables(known, route);
    __syncthreads();
#endif
    dependency_wait_first(); // down_several reads the table before it waits
#if SETTLES
    const bool knows = own_choice(known, route); // all that the block needs
    if (!knows || (JOBS && block == 0))
        meet_settled(route.settled);
#else
    constexpr bool knows = false;
#endif
    const i32 n_active_now = knows ? 0 : load_fresh(n_active);
    if (block < copiers) {
#if JOBS
        const i32 n_jobs = knows ? 0 : (i32)load_fresh(several + SEVERAL_COUNT);
        for (i32 place = 1 + block; place <= n_jobs; place += copiers)
            hand_over(jobs, several, place, record_word(active, n_active_now - n_jobs + place - 1), pairs, n_used, bank,
                      global_input(x, q, d, sums), gate_scales);
        if (block == 0 && threadIdx.x == 0)
            tell_layer(several);
#endif
        copy_downs(active, n_active_now, down_bytes, block, copiers);
#ifdef SHARED
        for (i32 t = block; t < n_tokens; t += copiers) {
            __syncthreads(); // of the row before
            shared_scale((float*)shared, shared_gate, h + (i64)t * COLS, row_scale + t);
        }
#endif
        return;
    }
    // The expert that every token uses comes first: its blocks take as long as those of one token's several times over.
    const i32 each = (F + 31) / 32, unit = block - copiers, expert = unit / each - BESIDE, row0 = unit % each * 32;
    if (!knows && expert >= n_active_now)
        return;
    const bool beside = BESIDE && expert < 0;
    u64 record;
    __shared__ i32 own_pairs[2];
    i32 mine = 0;
#if SETTLES
    if (knows && !beside) {
        if (!own_record(record, mine, known, route.T * n_used, expert, lane))
            return;
        if (threadIdx.x < 2)
            own_pairs[lane] = mine;
    }
    __syncthreads(); // the rows' memory is free
#endif
    if (beside)
        record = lane == 0   ? (u64)beside_gate
                 : lane == 1 ? (u64)beside_up
                 : lane == 6 ? (u64)(u32)(n_tokens * n_used) << 32
                 : lane == 7 ? n_tokens
                             : 0;
    else if (!knows)
        record = record_word(active, expert);

#if JOBS
    // The first block of a job's record asks whose it is, and tells the others, which come behind it.
    if (const i32 place = (i32)(word_of(record, 7) >> 32); place > 0) {
        __shared__ i32 whose;
        const LayerJob job(jobs, place, several + SEVERAL_KNOWN);
        if (threadIdx.x == 0 && row0 > 0) {
            whose = job.heard(-1);
        } else if (threadIdx.x == 0) {
            // Claims are in order, so its bound begins when the one before it is claimed; nobody is there for it where that was
            // not.
            const LayerJob before(jobs, max(1, place - 1), several + SEVERAL_KNOWN);
            const bool is_hopeless = place > 1 && before.heard(-1) == SPARK_JOB_DECLINED;
            whose = await_claim(job.record, job.number, is_hopeless ? 0 : load_fresh(jobs + JOBS_BOUND_NS),
                                load_fresh(jobs + JOBS_PATIENCE_NS));
            if (whose == SPARK_JOB_DECLINED)
                atomicAdd(several + SEVERAL_TAKEN, (u64)1);
            job.tell(whose);
        }
        __syncthreads();
        if (whose != SPARK_JOB_DECLINED)
            return;
    }
#endif
    // The block's rows, which it brings to their slots first where they come from the host.
    const i32 rows = min(32, F - row0);
    u8* const gate_slot = (u8*)word_of(record, 3);
    u8* const up_slot = (u8*)word_of(record, 4);
    const OwnRows brought = own_rows({(const u8*)word_of(record, 0), (const u8*)word_of(record, 1)}, {gate_slot, up_slot}, row0,
                                 rows, GATE_BYTES, UP_BYTES);
    const u8 *const gate = brought.gate, *const up = brought.up;
    if (gate_slot || up_slot)
        __syncthreads();

    constexpr i32 STEPS = 2 * (32 / (WARPS * ROWS)); // ROWS rows of gate, the same of up, and so on
    u8* const stages = shared + 2 * warp * stage_bytes; // of gate's rows and of up's
    auto issue = [&](i32 s) {
        const i32 r = (s / 2 * WARPS + warp) * ROWS, n = min(ROWS, rows - r);
        if (n > 0 && s & 1)
            stage_rows<ROWS * UP_BYTES, UP_BYTES>(stages + stage_bytes, up + r * UP_BYTES, n * UP_BYTES);
        else if (n > 0)
            stage_rows<ROWS * GATE_BYTES, GATE_BYTES>(stages, gate + r * GATE_BYTES, n * GATE_BYTES);
        copies_commit();
    };
    issue(0);
    issue(1);
    fill_grids<GATE, UP>();
    const Uses uses = uses_of(record);
    const i32 own = beside ? lane : (knows ? mine : own_pair(pairs, uses)) / n_used; // tokens
    Input input[KEPT];
    typename HeldOf<GATE>::Block held[KEPT][n_held(GATE, COLS)];
    auto take = [&](i32 i0) { // tokens of the expert's uses from the i0-th on
#pragma unroll
        for (i32 j = 0; j < KEPT; j++)
            if (i0 + j < uses.count) {
                const i64 token = __shfl_sync(FULL_WARP, own, i0 + j);
                input[j] = row_of(global_input(x, q, d, sums), token, COLS);
                if constexpr (!is_float(GATE))
                    hold_activations<has_halves(GATE) || has_halves(UP)>(input[j], COLS, held[j]);
            }
    };
    take(0);
#pragma unroll 1
    for (i32 s = 0; s < STEPS; s++) {
        const bool is_up = s & 1;
        u8* const stage = stages + (is_up ? stage_bytes : 0);
        const i32 r = (s / 2 * WARPS + warp) * ROWS, n = min(ROWS, rows - r);
        const i32 skew = (row0 + r) * (is_up ? UP_BYTES : GATE_BYTES) & 15; // parts are aligned
        stage_wait<1>();
#pragma unroll 1
        for (i32 i0 = 0; i0 < uses.count; i0 += KEPT) {
            if (i0 || (s && uses.count > KEPT))
                take(i0);
#pragma unroll
            for (i32 j = 0; j < KEPT; j++) {
                if (i0 + j >= uses.count)
                    break;
                const i32 token[1] = {0};
                float acc[ROWS] = {};
                if (GATE == UP || !is_up)
                    multiply<GATE, ROWS, 1>(acc, stage, skew, COLS, input[j], held[j], token, 1);
                else
                    multiply<UP, ROWS, 1>(acc, stage, skew, COLS, input[j], held[j], token, 1);
                float sum = fold_rows(acc);
                if (WEIGHTED && !is_up && !beside)
                    sum = gate_scales[(i32)word_of(record, 6)] * sum;
                constexpr i32 EACH = WARP / ROWS; // lanes that hold the same sum
                if (lane % EACH == 0 && lane / EACH < n)
                    (is_up ? us : gs)[i0 + j][r + lane / EACH] = sum;
            }
        }
        __syncwarp(); // the stage is free
        if (s + 2 < STEPS)
            issue(s + 2);
        else
            copies_commit(); // groups of copies are counted
    }
    __syncthreads();
    const auto pair_of = [&](i32 i) -> i64 {
        return beside ? uses.first + i : knows ? own_pairs[i] : pairs[uses.first + i];
    };
    store_z<WARPS>({gs, us, uses.count, rows}, {z, zq, zd, zsums, F}, pair_of, row0);
}

#endif
#ifdef DOWN

#if JOBS
// What the CPU has computed of an expert, the block's rows, to y of its pairs; false: it was taken back. Where no answer
// comes in time they become zeros, and a word says so. The first block asks, and tells the others.
DEVICE bool take_answer(const LayerJob& job, u64* jobs, u64* several, const Uses& uses, const i32* pairs, i32 D, float* y) {
    constexpr i32 MINE = WARPS * STAGES * ROWS;
    __shared__ i32 whose;
    if (threadIdx.x == 0) {
        whose = job.heard(-1);
        if (blockIdx.x == 0 && whose == SPARK_JOB_CLAIMED) {
            u64 waited_ns;
            const bool done = await_done(job.record, job.number, load_fresh(jobs + JOBS_PATIENCE_NS), waited_ns);
            if (!done) {
                jobs[JOBS_FAILED] = job.number;
                ((volatile u64*)load_fresh(jobs + JOBS_BOARD))[BOARD_FAILED] = job.number;
            }
            whose = done ? SPARK_JOB_DONE : NEVER_ANSWERED;
            job.tell(whose);
            atomicAdd(several + SEVERAL_DONE, (u64)done);
            atomicMax(several + SEVERAL_LONGEST, waited_ns);
        } else if (whose == SPARK_JOB_CLAIMED) {
            whose = job.heard(SPARK_JOB_CLAIMED);
        }
    }
    __syncthreads();
    if (whose == SPARK_JOB_DECLINED)
        return false;
    const u64 from = load_fresh(several + SEVERAL_OUTPUTS) + job.place * load_fresh(several + SEVERAL_OUTPUT_BYTES);
    const i32 first = blockIdx.x * MINE;
    for (i32 at = threadIdx.x; at < uses.count * MINE; at += blockDim.x) {
        const i32 use = at / MINE, row = first + at % MINE;
        if (row < D)
            y[(i64)load_fresh(pairs + uses.first + use) * D + row] =
                whose == SPARK_JOB_DONE ? load_fresh((const float*)from + (i64)use * D + row) : 0.0f;
    }
    return true;
}
#endif

KERNEL __launch_bounds__(WARPS * WARP, PER_SM)
    down_several(const u8* active, const i32* n_active, const i32* pairs, i32 D, const float* z, const i8* zq,
                 const float* zd, const i32* zsums, float* y, i32 stage_bytes JOB_WORDS CHOICE) {
    constexpr i32 ROW_BYTES = row_bytes_of(DOWN, COLS);
    DYNAMIC_SHARED(u8, shared);
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const i32 row0 = (blockIdx.x * WARPS + warp) * STAGES * ROWS;
    constexpr bool IS_LATE = STAGES * ROWS <= 8; // ptx.cuh; of few tokens, which have no more rows a warp
    if (!IS_LATE)
        dependency_release();
    u8* const base = shared + warp * (HeldRow<DOWN>::base_bytes() + STAGES * stage_bytes);
    u8* const stages = base + HeldRow<DOWN>::base_bytes();
#if SETTLES
    meet_settled(settled);
#endif
    // The table is complete since gate_up began, or now.
    const bool works = row0 < D && (i32)blockIdx.y < load_fresh(n_active);
    const u64 record = record_word(active, blockIdx.y);
    const Uses uses = uses_of(record);
#if JOBS
    if (const i32 place = (i32)(word_of(record, 7) >> 32); place > 0 && (i32)blockIdx.y < load_fresh(n_active)) {
        dependency_wait();
        if (take_answer({jobs, place, several + SEVERAL_KNOWN}, jobs, several, uses, pairs, D, y))
            return;
    }
#endif
    const i32 own = works ? own_pair(pairs, uses) : 0;
    if (works) {
        const u8* const slot = (const u8*)word_of(record, 5);
        if (slot) // gate_up writes what enters a slot; the rest is there already
            dependency_wait();
        const u8* const part = slot ? slot : (const u8*)word_of(record, 2);
#pragma unroll
        for (i32 i = 0; i < STAGES; i++) {
            const i32 row = row0 + i * ROWS;
            if (row < D)
                stage_rows<ROWS * ROW_BYTES, ROW_BYTES>(stages + i * stage_bytes, part + (i64)row * ROW_BYTES,
                                                        min(ROWS, D - row) * ROW_BYTES);
        }
        copies_commit();
    }
    fill_grids<DOWN>();
    dependency_wait();
    if (IS_LATE)
        dependency_release();
    if (!works)
        return;
    const Input input = global_input(z, zq, zd, zsums);
    for (i32 i = 0; i < uses.count; i++) {
        const i64 pair = __shfl_sync(FULL_WARP, own, i);
        HeldRow<DOWN> held;
        held.take(input, pair, base);
        stage_wait<0>();
#pragma unroll
        for (i32 j = 0; j < STAGES; j++) {
            const i32 row = row0 + j * ROWS;
            const float sum = held.products(stages + j * stage_bytes, (i32)((i64)row * ROW_BYTES & 15), base);
            if (lane % (WARP / ROWS) == 0 && row + lane / (WARP / ROWS) < D)
                y[pair * D + row + lane / (WARP / ROWS)] = sum;
            __syncwarp(); // the terms are free
        }
    }
}

#endif
#ifdef FOLD

KERNEL combine(const float* y, const float* weights, i32 n_used, i32 D, float* x, i32 add) {
    const i32 i = blockIdx.x * blockDim.x + threadIdx.x;
    const i64 t = blockIdx.y;
    dependency_release();
    dependency_wait();
    if (i >= D)
        return;
    float r = 0.0f;
#pragma unroll 8
    for (i32 a = 0; a < n_used; a++)
        r = __fmaf_rn(weights[t * n_used + a], y[(t * n_used + a) * D + i], r);
    x[t * D + i] = add ? x[t * D + i] + r : r;
}

KERNEL combine_norm(const float* y, const float* weights, i32 n_used, i32 D, float* x, i32 add, const float* norm,
                    float eps, i8* q, float* d, i32* sums) {
    DYNAMIC_SHARED(float, xs);
    float* const norms = xs + D;
    const i64 t = blockIdx.x;
    const bool is_late = gridDim.x <= 4; // tokens: ptx.cuh
    if (!is_late)
        dependency_release();
    copy_floats(norms, norm, D);
    copies_commit();
    dependency_wait();
    if (is_late)
        dependency_release();
    for (i32 i = 4 * threadIdx.x; i < D; i += 4 * blockDim.x) {
        float4* const to = (float4*)(x + t * D + i);
        const float4 old = add ? *to : float4{0.0f, 0.0f, 0.0f, 0.0f};
        float4 r = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
        for (i32 a = 0; a < n_used; a++) {
            const float weight = weights[t * n_used + a];
            const float4 of = *(const float4*)(y + (t * n_used + a) * D + i);
            r = {__fmaf_rn(weight, of.x, r.x), __fmaf_rn(weight, of.y, r.y), __fmaf_rn(weight, of.z, r.z),
                 __fmaf_rn(weight, of.w, r.w)};
        }
        if (add)
            r = {old.x + r.x, old.y + r.y, old.z + r.z, old.w + r.w};
        *to = *(float4*)(xs + i) = r;
    }
    copies_wait<0>();
    __syncthreads();
    __shared__ float found;
    if (threadIdx.x < WARP) { // a warp: others would only compete with it
        const float made = norm_scale(square_sum<32>(xs, D), D, eps);
        if (threadIdx.x == 0)
            found = made;
    }
    __syncthreads();
    const float scale = found;
    quantize_row(global_input(nullptr, q + t * D, d + t * (D / 32), sums + t * (D / 32)), xs, norms, scale, nullptr, D,
                 threadIdx.x / WARP, blockDim.x / WARP);
}

#endif

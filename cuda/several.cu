// The expert FFN of a step of 2 to 32 tokens. Twin: expert_ffn.
//
// Records of experts that are used and their pairs are those of experts.cuh. Most experts of such a step have one token
// or two. A warp multiplies its rows of an expert with each of them in turn, as it would with one token's, so a byte of
// the expert is read once. Workers take work from several experts, one after the other, and load what comes next while
// they compute: nobody waits for memory again when an expert begins.
//
// Kernels.
//   kernel            writes                                     grid                   block
//   gate_up_several   z [T * A, F] = act(gate h) * (up h)        copiers + workers      WARPS warps
//   down_several      y [T * A, D] = down z                      workers                WARPS warps
//   combine           x [T, D] += the fold of y over ranks       (ceil(D / block), T)   any
// A worker is a block in gate_up_several, which takes 32 rows of an expert at a time (a block of z has one scale), and a
// warp in down_several, which takes ROWS. What enters a slot is written there from shared memory, by who multiplies it;
// the down part is copied by the copiers meanwhile. Where `add` is 0, x becomes the fold.
//
// Macros, and those of experts.cuh.
//   TOKENS           at most: 8 or 32
//   ROWS             of a matrix at a time a warp: 1, 2 or 4
//   STAGES           of those in flight, in down_several
//   WARPS            of a block; 32 is a multiple of WARPS * ROWS
//   PER_SM           of a multiprocessor at a time
//   SHARED           the copiers make row_scale
//
// Shared memory.
//   gate_up_several  2 * stage_bytes a warp, a stage being ROWS rows and 32 bytes or more; with SHARED 8 * D at least
//   down_several     a warp: HeldRow::base_bytes, then STAGES * stage_bytes
#include "experts.cuh"

// Words of a record, each in a lane. All warps begin with the same few records: a load each, not one for every field.
DEVICE u64 record_word(const u8* active, i32 i) {
    const i32 lane = threadIdx.x % WARP;
    return lane < 8 ? load_fresh((const u64*)(active + (i64)i * 64) + lane) : 0;
}

DEVICE u64 word_of(u64 record, i32 i) { return __shfl_sync(FULL_WARP, record, i); }

// Uses of an expert: pairs[first .. first + count].
struct Uses {
    i32 first, count;
};

DEVICE Uses uses_of(u64 record) { return {(i32)(word_of(record, 6) >> 32), (i32)word_of(record, 7)}; }

#ifdef GATE

// ROWS rows in shared memory, by the warp, to where the part lies whose row begins at `to`; whole pieces of 16 bytes: those
// at both ends may belong to others too, who write the same bytes.
DEVICE void store_rows(u8* to, const u8* stage, i32 skew, i32 n_bytes) {
    for (i32 i = 16 * (threadIdx.x % WARP); i < skew + n_bytes; i += 16 * WARP)
        *(uint4*)(to - skew + i) = *(const uint4*)(stage + i);
}

// Rows of an expert's gate and up.
struct Rows {
    const u8 *gate, *up;
    i32 n;
};

KERNEL __launch_bounds__(WARPS * WARP, PER_SM)
    gate_up_several(const u8* active, const i32* n_active, const i32* pairs, i32 n_used, i32 F, const float* x,
                    const i8* q, const float* d, const i32* sums, float* z, i8* zq, float* zd, i32* zsums,
                    const u8* beside_gate, const u8* beside_up, i32 n_tokens, const u8* shared_gate, const float* h,
                    float* row_scale, i32 copiers, i64 down_bytes, i32 stage_bytes, const float* gate_scales) {
    constexpr i32 GATE_BYTES = row_bytes_of(GATE, COLS), UP_BYTES = row_bytes_of(UP, COLS), HALVES = 32 / (WARPS * ROWS);
    __shared__ float gs[2][TOKENS][33], us[2][TOKENS][33]; // by turns, so that one barrier is enough
    DYNAMIC_SHARED(u8, shared);
    // In this order: when the kernel behind begins, the table is complete (down_several reads it before it waits).
    dependency_wait();
    dependency_release();
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n_active_now = load_fresh(n_active);
    if ((i32)blockIdx.x < copiers) {
        for (i32 i = 0; i < n_active_now; i += WARP) {
            const u64* const parts = (const u64*)(active + (i64)(i + lane) * 64);
            const bool enters = i + lane < n_active_now && load_fresh(parts + 5);
            for (u32 left = __ballot_sync(FULL_WARP, enters); left; left &= left - 1) {
                const u64* const found = (const u64*)(active + (i64)(i + __ffs((i32)left) - 1) * 64);
                copy_part((u8*)load_fresh(found + 5), (const u8*)load_fresh(found + 2), down_bytes, blockIdx.x, copiers);
            }
        }
#ifdef SHARED
        for (i32 t = blockIdx.x; t < n_tokens; t += copiers) {
            __syncthreads(); // of the row before
            shared_scale((float*)shared, shared_gate, h + (i64)t * COLS, row_scale + t);
        }
#endif
        return;
    }
    const i32 each = (F + 31) / 32, n_units = (n_active_now + BESIDE) * each, n_workers = gridDim.x - copiers;
    u8* const gate_stage = shared + 2 * warp * stage_bytes;
    u8* const up_stage = gate_stage + stage_bytes;

    auto is_beside = [&](i32 unit) { return BESIDE && unit >= n_active_now * each; };
    auto fetch = [&](i32 unit) -> u64 {
        if (!is_beside(unit))
            return record_word(active, unit / each);
        const u64 pairs_of_it = (u64)(u32)(n_tokens * n_used) << 32;
        return lane == 0 ? (u64)beside_gate : lane == 1 ? (u64)beside_up : lane == 6 ? pairs_of_it : lane == 7 ? n_tokens : 0;
    };
    auto rows_of = [&](i32 unit, u64 record) -> Rows {
        const i32 row0 = unit % each * 32;
        return {(const u8*)word_of(record, 0) + (i64)row0 * GATE_BYTES,
                (const u8*)word_of(record, 1) + (i64)row0 * UP_BYTES, min(32, F - row0)};
    };
    auto issue_gate = [&](const Rows& from, i32 r) {
        if (r < from.n)
            stage_rows<ROWS * GATE_BYTES, GATE_BYTES>(gate_stage, from.gate + r * GATE_BYTES,
                                                      min(ROWS, from.n - r) * GATE_BYTES);
        copies_commit();
    };
    auto issue_up = [&](const Rows& from, i32 r) {
        if (r < from.n)
            stage_rows<ROWS * UP_BYTES, UP_BYTES>(up_stage, from.up + r * UP_BYTES, min(ROWS, from.n - r) * UP_BYTES);
        copies_commit();
    };

    i32 unit = blockIdx.x - copiers;
    u64 ahead = 0; // the record of the unit whose rows are loaded next
    Rows rows = {nullptr, nullptr, 0};
    if (unit < n_units) {
        ahead = fetch(unit);
        rows = rows_of(unit, ahead);
    }
    issue_gate(rows, warp * ROWS);
    issue_up(rows, warp * ROWS);
    fill_grids<GATE, UP>();
    Input input = global_input(x, q, d, sums);
    typename HeldOf<GATE>::Block held[n_held(GATE, COLS)];
    for (i32 turn = 0; unit < n_units; unit += n_workers, turn ^= 1) {
        const u64 record = ahead;
        const bool more = unit + n_workers < n_units, beside = is_beside(unit);
        if (more)
            ahead = fetch(unit + n_workers);
        const Uses uses = uses_of(record);
        auto pair_of = [&](i32 i) -> i64 { return beside ? uses.first + i : pairs[uses.first + i]; };
        auto take = [&](i32 i) {
            input = row_of(global_input(x, q, d, sums), beside ? i : pair_of(i) / n_used, COLS);
            if constexpr (!is_float(GATE))
                hold_activations<has_halves(GATE) || has_halves(UP)>(input, COLS, held);
        };
        const float scale = WEIGHTED && !beside ? gate_scales[(i32)word_of(record, 6)] : 1.0f;
        u8* const gate_slot = (u8*)word_of(record, 3);
        u8* const up_slot = (u8*)word_of(record, 4);
        take(0);
        Rows next = rows;
#pragma unroll 1
        for (i32 half = 0; half < HALVES; half++) {
            const i32 r = (half * WARPS + warp) * ROWS, n = min(ROWS, rows.n - r);
            const i32 gate_skew = skew_of<GATE_BYTES>(rows.gate + r * GATE_BYTES);
            const i32 up_skew = skew_of<UP_BYTES>(rows.up + r * UP_BYTES);
            const i64 row = unit % each * 32 + r; // of the expert's
            i32 next_r = r + WARPS * ROWS;
            if (half + 1 == HALVES) {
                next_r = warp * ROWS;
                next = more ? rows_of(unit + n_workers, ahead) : Rows{nullptr, nullptr, 0};
            }
#pragma unroll 1
            for (i32 i = 0; i < uses.count; i++) {
                const bool last = i + 1 == uses.count;
                const i32 token[1] = {0};
                float acc[2 * ROWS] = {};
                if (i || (half && uses.count > 1))
                    take(i);
                stage_wait<1>();
                if (i == 0 && gate_slot && n > 0)
                    store_rows(gate_slot + row * GATE_BYTES, gate_stage, gate_skew, n * GATE_BYTES);
                multiply<GATE, ROWS, 1>(acc, gate_stage, gate_skew, COLS, input, held, token, 1);
                if (last) {
                    __syncwarp(); // the stage is free
                    issue_gate(next, next_r);
                    stage_wait<1>();
                } else {
                    stage_wait<0>();
                }
                if (i == 0 && up_slot && n > 0)
                    store_rows(up_slot + row * UP_BYTES, up_stage, up_skew, n * UP_BYTES);
                multiply<UP, ROWS, 1>(acc + ROWS, up_stage, up_skew, COLS, input, held, token, 1);
                if (last) {
                    __syncwarp();
                    issue_up(next, next_r);
                }
                const float sum = fold_rows(acc); // of the gate in the lower half of the warp, of up in the other
                constexpr i32 EACH = WARP / 2 / ROWS;  // lanes that hold the same sum
                if (lane % EACH == 0 && lane / EACH % ROWS < n)
                    (lane < WARP / 2 ? gs : us)[turn][i][r + lane / EACH % ROWS] =
                        WEIGHTED && lane < WARP / 2 ? scale * sum : sum;
            }
        }
        __syncthreads();
        store_z<WARPS>({gs[turn], us[turn], uses.count, rows.n}, {z, zq, zd, zsums, F}, pair_of, unit % each * 32);
        rows = next;
    }
}

#endif
#ifdef DOWN

KERNEL __launch_bounds__(WARPS * WARP, PER_SM)
    down_several(const u8* active, const i32* n_active, const i32* pairs, i32 D, const float* z, const i8* zq,
                 const float* zd, const i32* zsums, float* y, i32 stage_bytes) {
    constexpr i32 ROW_BYTES = row_bytes_of(DOWN, COLS);
    DYNAMIC_SHARED(u8, shared);
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    dependency_release();
    u8* const base = shared + warp * (HeldRow<DOWN>::base_bytes() + STAGES * stage_bytes);
    u8* const stages = base + HeldRow<DOWN>::base_bytes();
    // Units of ROWS rows of one expert after the other; a warp's are neighbors. The table is complete since gate_up began.
    const i64 each = (D + ROWS - 1) / ROWS, n_units = load_fresh(n_active) * each;
    const i32 worker = blockIdx.x * WARPS + warp, n_workers = gridDim.x * WARPS;
    const i32 begin = (i32)(n_units * worker / n_workers), end = (i32)(n_units * (worker + 1) / n_workers);

    bool waited = false;
    u64 ahead = 0; // the record of the unit that is loaded next
    const u8* part = nullptr;
    auto enter = [&](i32 i) {
        ahead = record_word(active, i);
        const u8* const slot = (const u8*)word_of(ahead, 5);
        part = slot ? slot : (const u8*)word_of(ahead, 2);
        if (slot && !waited) { // gate_up writes what enters a slot; the rest is there already
            dependency_wait();
            waited = true;
        }
    };
    i32 loaded = begin, loaded_record = (i32)(begin / each), loaded_row = (i32)(begin - loaded_record * each) * ROWS;
    auto issue = [&](u8* stage) {
        if (loaded < end) {
            if (loaded_row >= D)
                loaded_row = 0, enter(++loaded_record);
            stage_rows<ROWS * ROW_BYTES, ROW_BYTES>(stage, part + (i64)loaded_row * ROW_BYTES,
                                                    min(ROWS, D - loaded_row) * ROW_BYTES);
            loaded_row += ROWS, loaded++;
        }
        copies_commit();
    };
    i32 record = loaded_record, row = loaded_row;
    if (begin < end)
        enter(record);
    u64 words = ahead;
#pragma unroll
    for (i32 i = 0; i < STAGES; i++)
        issue(stages + i * stage_bytes);
    fill_grids<DOWN>();
    if (!waited)
        dependency_wait();
    waited = true;

    const Input input = global_input(z, zq, zd, zsums);
    HeldRow<DOWN> held;
    Uses uses = uses_of(words);
    i64 pair = 0;
    auto take = [&](i32 i) {
        pair = pairs[uses.first + i];
        held.take(input, pair, base);
    };
    if (begin < end)
        take(0);
    for (i32 unit = begin, s = 0; unit < end; unit++, s = s + 1 < STAGES ? s + 1 : 0) {
        if (row >= D) {
            row = 0;
            words = record_word(active, ++record);
            uses = uses_of(words);
            take(0);
        }
        u8* const stage = stages + s * stage_bytes;
        const i32 offset = (i32)((i64)row * ROW_BYTES % 16);
        stage_wait<STAGES - 1>();
        for (i32 i = 0; i < uses.count; i++) {
            if (uses.count > 1)
                take(i);
            const float sum = held.products(stage, offset, base);
            if (lane % (WARP / ROWS) == 0 && row + lane / (WARP / ROWS) < D)
                y[pair * D + row + lane / (WARP / ROWS)] = sum;
            __syncwarp(); // the stage and the terms are free
        }
        row += ROWS;
        issue(stage);
    }
}

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

#endif

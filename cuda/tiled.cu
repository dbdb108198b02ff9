// The expert FFN of a step of several tokens, on tensor cores. Twin: expert_ffn.
//
// A table has entries: an expert, and its pairs of token and rank, at most 32. With TILES = 0 they are the records of
// experts.cuh. With TILES = 1 they are tiles {expert, first, count, 0} of grouped.cu, and source [E, 3] says where each
// expert's matrices are; 0: somebody else computes it.
//
// A warp takes 16 rows of a matrix with TOKENS of an entry's pairs at a time (wide.cuh), all by itself: it takes the runs of
// its rows in such an order that three sets of accumulators are enough to meet them as docs/arithmetic.md has it, and waits for
// no other warp. What is left of an entry's pairs is multiplied with the same rows again, which are in the L2 cache then.
//
// Kernels.
//   kernel          writes                                  grid                                               block
//   gate_up_tiled   z [T * A, F] = act(gate h) * (up h)     copiers + (entries + beside) * ceil(F / 32)        4 warps
//   down_tiled      y [T * A, columns] = down z             (ceil(columns / 64), entries)                      4 warps
// A block of gate_up_tiled has 32 rows of an expert, two warps those of gate and two of up. Copiers are as in several.cu;
// with TILES nothing enters a slot and there are none. beside: with BESIDE one for every TOKENS tokens of the step.
// down_tiled has rows first .. first + columns of down.
//
// Macros, and those of experts.cuh. Types are block formats, COLS is a multiple of 32.
//   FEW      1: TOKENS is 4, and two blocks of columns share a product; 0: it is 8
//   STAGES   runs of 256 columns that a warp has in flight, 2 to 4
//   PER_SM   blocks of a multiprocessor at a time
//   SHARED   the copiers make row_scale
//
// Shared memory: TOKENS rows of q, COLS rounded up to 48 more than a multiple of 128 each; 8 * TOKENS bytes for 32 columns,
// twice as many where a type has halves; for each warp the constants of a run, 4 KiB where a type has a grid, and the stages.
// With SHARED 8 * COLS at least.
#ifndef TILES
#define TILES 0
#endif
#define WARPS 4
#include "experts.cuh"
#include "wide.cuh"

constexpr i32 TOKENS = FEW ? FEW_TOKENS : GROUP, PAIRS = TOKENS / 2, BLOCKS = COLS / 32;
constexpr i32 THREADS = WARPS * WARP;

// What the kernel of one or two types needs of shared memory, in this order.
template <Type a, Type b>
struct Layout {
    static constexpr i32 OFFSET = same_offset(half_offset<a>(), half_offset<b>());
    static constexpr bool HALVES = has_halves(a) || has_halves(b), BEGUN = OFFSET > 0;
    static constexpr i32 SKEW = Fragments<a>::PAIRED || Fragments<b>::PAIRED ? 32 : 48; // as in wide.cu
    static constexpr i32 STRIDE = (COLS + 95) / 128 * 128 + SKEW;
    static constexpr i32 PREPARED_AT = TOKENS * STRIDE, WARPS_AT = PREPARED_AT + BLOCKS * PAIRS * 16 * (1 + HALVES);
    static constexpr i32 CONSTANTS = constants_bytes(HALVES), UNPACKED = has_grid(a) || has_grid(b) ? 16 * 32 * RUN : 0;
    static constexpr i32 A_BYTES = Runs<a, COLS>::STAGE_BYTES, B_BYTES = Runs<b, COLS>::STAGE_BYTES;
    static constexpr i32 STAGE = A_BYTES > B_BYTES ? A_BYTES : B_BYTES, OF_WARP = CONSTANTS + UNPACKED + STAGES * STAGE;
};

// An entry's place in the list of uses, and how many it has.
struct Entry {
    i32 expert;
    Uses uses;
    const u8* part[3]; // where matrices are read
    u8* slot[3];       // and written first; 0: nowhere
};

// By a whole warp; false: the table does not have so many, or it is not to be computed.
DEVICE bool entry_at(const u8* table, const i32* n_entries, const u64* source, i32 i, Entry& to) {
    if (i >= load_fresh(n_entries))
        return false;
#if TILES
    const int4 tile = ((const int4*)table)[i];
    to.expert = tile.x;
    to.uses = {tile.y, tile.z};
#pragma unroll
    for (i32 part = 0; part < 3; part++) {
        to.part[part] = (const u8*)source[tile.x * 3 + part];
        to.slot[part] = nullptr;
    }
    return to.part[0] != nullptr;
#else
    const u64 record = record_word(table, i);
    to.expert = (i32)word_of(record, 6);
    to.uses = uses_of(record);
#pragma unroll
    for (i32 part = 0; part < 3; part++) {
        to.part[part] = (const u8*)word_of(record, part);
        to.slot[part] = (u8*)word_of(record, 3 + part);
    }
    return true;
#endif
}

// The runs of 16 rows, one after the other: those of parts 0, 2, 1 and 3, and so again for every TOKENS pairs.
constexpr i32 N_RUNS = (BLOCKS + RUN - 1) / RUN;
DEVICE constexpr i32 runs_of(i32 part) { return (N_RUNS - part + PARTS - 1) / PARTS; }
DEVICE i32 run_at(i32 i) {
    constexpr i32 TWO = runs_of(0), ONE = TWO + runs_of(2), THREE = ONE + runs_of(1);
    return i < TWO ? PARTS * i : i < ONE ? 2 + PARTS * (i - TWO) : i < THREE ? 1 + PARTS * (i - ONE) : 3 + PARTS * (i - THREE);
}

// A warp's rows: where they are, how many there are (0: none), and its copies that run ahead.
template <class L>
struct Rows {
    const u8* from;
    i32 left;
    u8* stages;
    i32 ahead, to_come, at; // the next run, how many are still to be copied, and the stage that is used next

    template <Type type>
    DEVICE void issue(Rows& r, u8* stage) {
        if (r.to_come > 0) {
            copy_run<type, COLS>(stage, r.from, r.left, run_at(r.ahead));
            r.ahead = r.ahead + 1 < N_RUNS ? r.ahead + 1 : 0;
            r.to_come--;
        }
        copies_commit();
    }
    // Begin, for so many times all runs.
    template <Type type>
    DEVICE void begin(Rows& r, i32 times) {
        r.ahead = r.at = 0;
        r.to_come = r.left > 0 ? times * N_RUNS : 0;
#pragma unroll
        for (i32 i = 0; i < STAGES; i++)
            issue<type>(r, r.stages + i * L::STAGE);
    }
};

// The products of a warp's rows with TOKENS rows of activations: of rows lane / 4 + i / 2 * 8, tokens 2 * (lane % 4) + i % 2,
// of few tokens 2 * (lane % 2) + i % 2.
template <Type type, class L>
DEVICE void multiply_rows(float (&sum)[4], Rows<L>& rows, Constants* constants, u8* unpacked, const WideInput& x) {
    constexpr i32 HELD = HELD_RUN<FEW>;
    float even[HELD][4] = {}, odd[HELD][4] = {}; // parts 0 and 2, and the others
#pragma unroll 1
    for (i32 i = 0, part = 0; i < PARTS; i++, part = part == 0 ? 2 : part == 2 ? 1 : 3) {
        float acc[1][HELD][4] = {};
#pragma unroll 1
        for (i32 s = part; s < N_RUNS; s += PARTS) {
            u8* const stage = rows.stages + rows.at * L::STAGE;
            rows.at = rows.at + 1 < STAGES ? rows.at + 1 : 0;
            stage_wait<STAGES - 1>();
            if (rows.left > 0) {
                const u32 from = (u32)(u64)rows.from + s * Runs<type, COLS>::BYTES;
                const Tile tile = {stage, constants, unpacked, from, rows.left - 1, min(RUN, BLOCKS - s * RUN)};
                multiply_run<type, COLS, 1, L::BEGUN, FEW>(acc, tile, s * RUN, x);
            }
            __syncwarp(); // the stage is free
            Rows<L>::template issue<type>(rows, stage);
        }
#pragma unroll
        for (i32 j = 0; j < HELD; j++)
#pragma unroll
            for (i32 c = 0; c < 4; c++) {
                const float v = acc[0][j][c];
                even[j][c] = i == 0 ? v : i == 1 ? even[j][c] + v : even[j][c];
                odd[j][c] = i == 2 ? v : odd[j][c];
                if (i == 3)
                    even[j][c] = even[j][c] + (odd[j][c] + v);
            }
    }
#pragma unroll
    for (i32 o = HELD / 2; o; o /= 2)
#pragma unroll
        for (i32 j = 0; j < o; j++)
#pragma unroll
            for (i32 c = 0; c < 4; c++)
                even[j][c] = even[j][c] + even[j + o][c];
#pragma unroll
    for (i32 c = 0; c < 4; c++) // of few tokens, two lanes have the even blocks and the odd ones
        sum[c] = FEW ? even[0][c] + __shfl_xor_sync(FULL_WARP, even[0][c], 2) : even[0][c];
}

// The activations of n pairs, of which lane i of every warp knows row i: to shared memory, by the block.
template <class L>
DEVICE WideInput take_input(u8* shared, i32 own_row, i32 n, const i8* q, const float* d, const i32* sums) {
    i8* const local = (i8*)shared;
    float4 *const scaled = (float4*)(shared + L::PREPARED_AT), *const halves = scaled + BLOCKS * PAIRS;
    constexpr i32 PIECES = COLS / 16;
    static_assert(COLS % 32 == 0, "whole blocks");
#pragma unroll 1
    for (i32 t = 0; t < n; t++) {
        const i64 row = __shfl_sync(FULL_WARP, own_row, t);
        for (i32 i = threadIdx.x; i < PIECES; i += THREADS)
            copy16_async(local + t * L::STRIDE + 16 * i, q + row * COLS + 16 * i);
    }
    copies_commit();
    const i32 of_last = n - 1;
#pragma unroll 1
    for (i32 i0 = 0; i0 < BLOCKS * PAIRS; i0 += THREADS) {
        const i32 i = i0 + threadIdx.x, pair = i % PAIRS;
        const i64 rows[2] = {__shfl_sync(FULL_WARP, own_row, min(2 * pair, of_last)),
                             __shfl_sync(FULL_WARP, own_row, min(2 * pair + 1, of_last))};
        if (i < BLOCKS * PAIRS)
            prepare<PAIRS, L::OFFSET>(scaled, halves, i, TOKENS, [&](i32 t, i32 block) -> OfBlock {
                const i64 from = (t % 2 ? rows[1] : rows[0]) * BLOCKS + block;
                return {d[from], sums[from], q + from * 32};
            });
    }
    copies_wait<0>(); // and for the weights before it, which are on their way for longer
    __syncthreads();
    return {local, scaled, halves, L::STRIDE, of_last};
}

#ifdef GATE

KERNEL __launch_bounds__(THREADS, PER_SM)
    gate_up_tiled(const u8* table, const i32* n_entries, const u64* source, const i32* pairs, i32 n_used, i32 F,
                  const i8* q, const float* d, const i32* sums, float* z, i8* zq, float* zd, i32* zsums,
                  const u8* beside_gate, const u8* beside_up, i32 n_tokens, const u8* shared_gate, const float* h,
                  float* row_scale, i32 copiers, i64 down_bytes, const float* gate_scales) {
    typedef Layout<GATE, UP> L;
    constexpr i32 GATE_BYTES = row_bytes_of(GATE, COLS), UP_BYTES = row_bytes_of(UP, COLS);
    __shared__ float gs[TOKENS][33], us[TOKENS][33];
    DYNAMIC_SHARED(u8, shared);
    dependency_wait();
    dependency_release(); // when the kernel behind begins, the table is complete
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if ((i32)blockIdx.x < copiers) {
        copy_downs(table, load_fresh(n_entries), down_bytes, blockIdx.x, copiers);
#ifdef SHARED
        for (i32 t = blockIdx.x; t < n_tokens; t += copiers) {
            __syncthreads(); // of the row before
            shared_scale((float*)shared, shared_gate, h + (i64)t * COLS, row_scale + t);
        }
#endif
        return;
    }
    // The expert that every token uses comes first: its blocks begin with the others.
    const i32 each = (F + 31) / 32, unit = blockIdx.x - copiers, row0 = unit % each * 32;
    const i32 n_beside = BESIDE ? (n_tokens + TOKENS - 1) / TOKENS : 0, i = unit / each - n_beside;
    const bool beside = BESIDE && i < 0;
    Entry entry;
    if (beside) {
        const i32 first = (i + n_beside) * TOKENS;
        entry = {0, {n_tokens * n_used + first, min(TOKENS, n_tokens - first)}, {beside_gate, beside_up, nullptr}, {}};
    } else if (!entry_at(table, n_entries, source, i, entry)) {
        return;
    }
    // The block's rows, which it brings to their slots first where they come from the host.
    const i32 rows = min(32, F - row0);
    const u8* const gate = own_rows(entry.part[0], entry.slot[0], (i64)row0 * GATE_BYTES, rows * GATE_BYTES);
    const u8* const up = own_rows(entry.part[1], entry.slot[1], (i64)row0 * UP_BYTES, rows * UP_BYTES);
    if (entry.slot[0] || entry.slot[1])
        __syncthreads();

    const bool is_up = warp / 2;
    const i32 own_row0 = warp % 2 * TILE_ROWS, passes = (entry.uses.count + TOKENS - 1) / TOKENS;
    u8* const own_memory = shared + L::WARPS_AT + warp * L::OF_WARP;
    Constants* const constants = (Constants*)own_memory;
    u8* const unpacked = own_memory + L::CONSTANTS;
    Rows<L> own = {(is_up ? up : gate) + own_row0 * (is_up ? UP_BYTES : GATE_BYTES), rows - own_row0, unpacked + L::UNPACKED};
    if (GATE == UP || !is_up)
        Rows<L>::template begin<GATE>(own, passes);
    else
        Rows<L>::template begin<UP>(own, passes);
    const i32 pair = beside ? lane : own_pair(pairs, entry.uses); // of the entry's, one a lane
    const i32 token = beside ? (i + n_beside) * TOKENS + lane : pair / n_used;
#pragma unroll 1
    for (i32 i0 = 0; i0 < entry.uses.count; i0 += TOKENS) {
        const i32 n = min(TOKENS, entry.uses.count - i0);
        if (i0)
            __syncthreads(); // of those before
        const WideInput x = take_input<L>(shared, __shfl_sync(FULL_WARP, token, (lane + i0) % WARP), n, q, d, sums);
        float sum[4];
        if (GATE == UP || !is_up)
            multiply_rows<GATE, L>(sum, own, constants, unpacked, x);
        else
            multiply_rows<UP, L>(sum, own, constants, unpacked, x);
#pragma unroll
        for (i32 c = 0; c < 4; c++) {
            const i32 t = (FEW ? lane % 2 : lane % 4) * 2 + c % 2, row = own_row0 + lane / 4 + c / 2 * 8;
            float v = sum[c];
            if (WEIGHTED && !is_up && !beside)
                v = gate_scales[entry.expert] * v;
            if (t < n && row < rows)
                (is_up ? us : gs)[t][row] = v;
        }
        __syncthreads();
        const auto place = [&](i32 t) -> i64 {
            return beside ? entry.uses.first + i0 + t : pairs[entry.uses.first + i0 + t];
        };
        store_z<WARPS>({gs, us, n, rows}, {z, zq, zd, zsums, F}, place, row0);
    }
}

#endif
#ifdef DOWN

KERNEL __launch_bounds__(THREADS, PER_SM)
    down_tiled(const u8* table, const i32* n_entries, const u64* source, const i32* pairs, const i8* zq, const float* zd,
               const i32* zsums, float* y, i32 first, i32 columns) {
    typedef Layout<DOWN, DOWN> L;
    DYNAMIC_SHARED(u8, shared);
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, row0 = (blockIdx.x * WARPS + warp) * TILE_ROWS;
    dependency_release();
    // The table is complete since gate_up began.
    Entry entry;
    const bool works = entry_at(table, n_entries, source, blockIdx.y, entry);
    const i32 passes = works ? (entry.uses.count + TOKENS - 1) / TOKENS : 0;
    u8* const own_memory = shared + L::WARPS_AT + warp * L::OF_WARP;
    Constants* const constants = (Constants*)own_memory;
    u8* const unpacked = own_memory + L::CONSTANTS;
    Rows<L> own = {nullptr, columns - row0, unpacked + L::UNPACKED};
    i32 pair = 0;
    if (works) {
        if (entry.slot[2]) // gate_up writes what enters a slot; the rest is there already
            dependency_wait();
        const u8* const part = entry.slot[2] ? entry.slot[2] : entry.part[2];
        own.from = part + (i64)(first + row0) * row_bytes_of(DOWN, COLS);
        Rows<L>::template begin<DOWN>(own, passes);
        pair = own_pair(pairs, entry.uses);
    }
    dependency_wait();
#pragma unroll 1
    for (i32 i = 0; i < passes; i++) {
        const i32 i0 = i * TOKENS, n = min(TOKENS, entry.uses.count - i0);
        if (i)
            __syncthreads(); // of those before
        const i32 of_pass = __shfl_sync(FULL_WARP, pair, (lane + i0) % WARP);
        const WideInput x = take_input<L>(shared, of_pass, n, zq, zd, zsums);
        float sum[4];
        multiply_rows<DOWN, L>(sum, own, constants, unpacked, x);
#pragma unroll
        for (i32 c = 0; c < 4; c++) {
            const i32 t = (FEW ? lane % 2 : lane % 4) * 2 + c % 2, row = row0 + lane / 4 + c / 2 * 8;
            const i64 to = __shfl_sync(FULL_WARP, of_pass, t);
            // Of few tokens two lanes have the same results: each writes one of its two rows.
            if (t < n && row < columns && (!FEW || lane % 4 / 2 == c / 2))
                y[to * columns + row] = sum[c];
        }
    }
}

#endif

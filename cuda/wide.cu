// Matrix products of 2 to 32 rows of activations with at most four quantized matrices, on tensor cores. Twin: product.
//
// y_m [T, n_m] = w_m [n_m, COLS] of x, or y_m += it where `add` is 1; before that, with WEIGHTED = 1, it is multiplied by
// scale_m, with SCALED = 1, row t is multiplied by row_scale[t], and with CAPPED = 1 each element becomes
// cap * tanh(element / cap). Types TYPE0, TYPE1, TYPE2 and, of a fourth matrix, TYPE3 are block formats; COLS is a multiple
// of 32. The input is q [T, COLS], d and sums [T, COLS / 32]. T is at most 8 * GROUPS (1, 2, 4), with FEW = 1 at most 4.
//
// Units of 16 rows are dealt to QUADS times four warps a block; a warp has STAGES runs of 256 columns in flight, across
// units, and nobody else reads them. With STAGED > 0, for at most as many tokens and COLS a multiple of 256, all of the input
// comes with the weights of a run. Else q is in shared memory with SHARED = 1, or is read from global memory. Grid: any;
// block: 128 * QUADS threads.
// Shared memory: with SHARED = 1 q, COLS rounded up to 48 more than a multiple of 128 a token; 64 * GROUPS bytes, with FEW
// 32, for 32 columns (types with halves: twice as many), or with STAGED > 0 for a run's and each warp; 16 KiB a quad, 8 with
// FEW and types without grids; then the constants of a run and STAGES stages a warp, each the weights of a run and
// STAGED * 368 bytes at most.
#include "wide.cuh"

#ifndef WEIGHTED
#define WEIGHTED 0
#endif
#ifndef SCALED
#define SCALED 0
#endif
#ifndef CAPPED
#define CAPPED 0
#endif

#ifndef STAGED
#define STAGED 0
#endif
#ifndef FEW
#define FEW 0
#endif

#ifdef TYPE3
#define FOUR
#define OF_FOURTH const u8 *w3, i32 n3, float *y3,
#else
#define OF_FOURTH
#define TYPE3 TYPE2
#endif
DEVICE constexpr i32 larger(i32 a, i32 b) { return a > b ? a : b; }
constexpr bool FIRST = has_halves(TYPE0) || has_halves(TYPE1) || has_halves(TYPE2) || has_halves(TYPE3);
constexpr i32 HALF_OFFSET = same_offset(same_offset(half_offset<TYPE0>(), half_offset<TYPE1>()),
                                        same_offset(half_offset<TYPE2>(), half_offset<TYPE3>()));
constexpr bool BEGUN = HALF_OFFSET > 0; // what sums of halves start at is worked out once a block
constexpr i32 RUN_BYTES = larger(larger(Runs<TYPE0, COLS>::STAGE_BYTES, Runs<TYPE1, COLS>::STAGE_BYTES),
                                 larger(Runs<TYPE2, COLS>::STAGE_BYTES, Runs<TYPE3, COLS>::STAGE_BYTES));
constexpr i32 BLOCKS = COLS / 32, N_RUNS = Runs<TYPE0, COLS>::N, ROUNDS = (N_RUNS + PARTS - 1) / PARTS;
// Of a row of q: eight rows' words or, where a type is read by twos, four rows' lie in different banks.
constexpr bool BY_TWOS = Fragments<TYPE0>::PAIRED || Fragments<TYPE1>::PAIRED || Fragments<TYPE2>::PAIRED ||
                         Fragments<TYPE3>::PAIRED;
constexpr i32 SKEW = BY_TWOS ? 32 : 48, Q_STRIDE = (COLS + 95) / 128 * 128 + SKEW;
// Of a staged run: its weights, each token's columns, then each token's scales and sums.
constexpr i32 RUN_COLUMNS = 32 * RUN, STAGED_STRIDE = RUN_COLUMNS + SKEW, STAGED_SCALES = 8 * RUN;
constexpr i32 SCALES_AT = RUN_BYTES + STAGED * STAGED_STRIDE, STAGE_BYTES = SCALES_AT + STAGED * STAGED_SCALES;
static_assert(!FEW || GROUPS == 1, "few tokens are one group");
static_assert(!STAGED || (!SHARED && COLS % RUN_COLUMNS == 0), "whole runs of the input are staged");
constexpr i32 PAIRS = FEW ? FEW_TOKENS / 2 : GROUP / 2 * GROUPS, THREADS = QUADS * PARTS * WARP;
constexpr i32 PREPARED = STAGED ? RUN : BLOCKS, PREPARED_BYTES = PREPARED * PAIRS * 16 * (1 + FIRST); // for terms
constexpr i32 CONSTANTS_BYTES = constants_bytes(FIRST);
constexpr i32 WARP_BYTES = (STAGED ? PREPARED_BYTES : 0) + CONSTANTS_BYTES + STAGES * STAGE_BYTES;
constexpr i32 RESIDENT = (GROUPS == 1 ? 4 : GROUPS == 2 ? 3 : 2) / QUADS; // blocks that registers have to allow
constexpr bool UNPACKS = has_grid(TYPE0) || has_grid(TYPE1) || has_grid(TYPE2) || has_grid(TYPE3); // where sums meet
// Of few tokens half of the lanes have sums of their own. Where weights are unpacked a part's sums stay in its own quarter
// all the same, since the others may still be at work.
constexpr bool NARROW = FEW && !UNPACKS;
constexpr i32 FOLD_LANES = NARROW ? WARP / 2 : WARP;
constexpr i32 FOLD_FLOATS = PARTS * 4 * FOLD_LANES * RUN; // of a quad

// 16 rows of a matrix of n rows, or the `left` ones that there are; y: of the first one and token 0.
struct Unit {
    const u8* from;
    float* y;
    i32 matrix, left, n;
};

template <Type type>
DEVICE Unit unit_at(const u8* w, float* y, i32 matrix, i32 u, i32 n) {
    return {w + (i64)u * (TILE_ROWS * row_bytes_of(type, COLS)), y + u * TILE_ROWS, matrix, n - u * TILE_ROWS, n};
}

// Start copying the input of run s, of all tokens.
DEVICE void copy_input(u8* stage, const i8* q, const float* d, const i32* sums, i32 n_tokens, i32 s) {
    constexpr i32 P = RUN_COLUMNS / 16;
    const i32 lane = threadIdx.x % WARP;
#pragma unroll
    for (i32 i = 0; i < STAGED; i += WARP / P) {
        const i32 t = i + lane / P;
        if (t < n_tokens)
            copy16_async(stage + RUN_BYTES + t * STAGED_STRIDE + lane % P * 16,
                         q + (i64)t * COLS + s * RUN_COLUMNS + lane % P * 16);
    }
#pragma unroll
    for (i32 i = 0; i < STAGED; i += WARP / 4) {
        const i32 t = i + lane / 4;
        if (t < n_tokens) {
            const i32 from = t * BLOCKS + s * RUN + lane % 2 * 4;
            copy16_async(stage + SCALES_AT + t * STAGED_SCALES + lane % 4 * 16,
                         lane & 2 ? (const void*)(sums + from) : (const void*)(d + from));
        }
    }
}

template <Type type>
DEVICE void multiply_unit(float (&acc)[GROUPS][HELD_RUN<FEW>][4], const u8* stage, Constants* constants, u8* unpacked,
                          const Unit& unit, i32 s, const WideInput& x) {
    const u32 from = (u32)(u64)unit.from + s * Runs<type, COLS>::BYTES;
    const Tile tile = {stage, constants, unpacked, from, unit.left - 1, min(RUN, BLOCKS - s * RUN)};
    multiply_run<type, COLS, GROUPS, BEGUN, FEW>(acc, tile, STAGED ? 0 : s * RUN, x);
}

// The sum of the 32 accumulators of one result of the unit, by the tree of docs/arithmetic.md: thread 32 * p + l of the
// quad gets row l / 4 + p / 2 * 8 and token 2 * (l % 4) + p % 2. fold: FOLD_FLOATS, where part, result and lane have
// eight accumulators, of which every other four lanes have the two halves the other way round, for the banks' sake. Of few
// tokens a lane has every other one, and the lane two further the others: both have one place, and what the second gets
// is the first's, since it has no token.
DEVICE float fold_parts(const float (&acc)[HELD_RUN<FEW>][4], float* fold, i32 part) {
    const i32 lane = threadIdx.x % WARP, half = lane & 4;
    const i32 place = NARROW ? lane / 4 * 2 + lane % 2 : FEW ? lane & ~2 : lane;
#pragma unroll
    for (i32 c = 0; c < 4; c++) {
        if constexpr (FEW) {
            float* const to = fold + ((part * 4 + c) * FOLD_LANES + place) * RUN;
#pragma unroll
            for (i32 i = 0; i < RUN / 2; i++)
                to[(2 * i + (lane & 2) / 2) ^ half] = acc[i][c];
        } else {
            float* const to = fold + ((part * 4 + c) * FOLD_LANES + place) * RUN;
            *(float4*)(to + half) = make_float4(acc[0][c], acc[1][c], acc[2][c], acc[3][c]);
            *(float4*)(to + (half ^ 4)) = make_float4(acc[4][c], acc[5][c], acc[6][c], acc[7][c]);
        }
    }
    __syncthreads();
    float v[PARTS][RUN];
#pragma unroll
    for (i32 p = 0; p < PARTS; p++) {
        const float* const from = fold + ((p * 4 + part) * FOLD_LANES + place) * RUN;
        const float4 low = *(const float4*)(from + half), high = *(const float4*)(from + (half ^ 4));
        v[p][0] = low.x, v[p][1] = low.y, v[p][2] = low.z, v[p][3] = low.w;
        v[p][4] = high.x, v[p][5] = high.y, v[p][6] = high.z, v[p][7] = high.w;
    }
    __syncthreads();
    float sum[RUN];
#pragma unroll
    for (i32 j = 0; j < RUN; j++)
        sum[j] = (v[0][j] + v[2][j]) + (v[1][j] + v[3][j]);
#pragma unroll
    for (i32 o = RUN / 2; o; o /= 2)
#pragma unroll
        for (i32 j = 0; j < o; j++)
            sum[j] = sum[j] + sum[j + o];
    return sum[0];
}

KERNEL __launch_bounds__(THREADS, RESIDENT)
    wide(const u8* w0, i32 n0, float* y0, const u8* w1, i32 n1, float* y1, const u8* w2, i32 n2, float* y2,
         OF_FOURTH const i8* q, const float* d, const i32* sums, i32 n_tokens, i32 add, const float* row_scale, float cap,
         float scale0, float scale1, float scale2, float scale3) {
    DYNAMIC_SHARED(u8, shared);
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, quad = warp / PARTS, part = warp % PARTS;
    const i32 units0 = (n0 + TILE_ROWS - 1) / TILE_ROWS, units1 = (n1 + TILE_ROWS - 1) / TILE_ROWS;
    const i32 units2 = (n2 + TILE_ROWS - 1) / TILE_ROWS;
#ifdef FOUR
    const i32 units3 = (n3 + TILE_ROWS - 1) / TILE_ROWS;
#else
    const i32 units3 = 0;
#endif
    const i32 n_units = units0 + units1 + units2 + units3, step = gridDim.x * QUADS;
    auto unit_of = [&](i32 u) -> Unit {
        if (u < units0)
            return unit_at<TYPE0>(w0, y0, 0, u, n0);
        u -= units0;
        if (u < units1)
            return unit_at<TYPE1>(w1, y1, 1, u, n1);
        u -= units1;
#ifdef FOUR
        if (u >= units2)
            return unit_at<TYPE3>(w3, y3, 3, u - units2, n3);
#endif
        return unit_at<TYPE2>(w2, y2, 2, u, n2);
    };

    u8* at = shared;
    i8* const local_q = (i8*)at;
    if (SHARED)
        at += n_tokens * Q_STRIDE;
    u8* prepared = at;
    if (!STAGED)
        at += PREPARED_BYTES;
    float* const fold = (float*)at + quad * FOLD_FLOATS;
    at += QUADS * FOLD_FLOATS * 4 + warp * WARP_BYTES;
    if (STAGED)
        prepared = at, at += PREPARED_BYTES;
    float4 *const scaled = (float4*)prepared, *const halves = scaled + PREPARED * PAIRS;
    Constants* const constants = (Constants*)at;
    u8* const stages = at + CONSTANTS_BYTES;

    // Copies run ahead of what is multiplied, on into the next units.
    const i32 first = blockIdx.x + gridDim.x * quad; // so that no block has more than its share
    i32 ahead_u = first, ahead_run = part;
    Unit ahead = unit_of(ahead_u);
    auto issue = [&](u8* stage, bool first) {
        if (ahead_u < n_units && ahead_run < N_RUNS) {
            if (STAGED && !first)
                copy_input(stage, q, d, sums, n_tokens, ahead_run);
            if constexpr (TYPE0 == TYPE1 && TYPE0 == TYPE2 && TYPE0 == TYPE3) {
                copy_run<TYPE0, COLS>(stage, ahead.from, ahead.left, ahead_run);
            } else {
                if (ahead.matrix == 0)
                    copy_run<TYPE0, COLS>(stage, ahead.from, ahead.left, ahead_run);
                else if (ahead.matrix == 1)
                    copy_run<TYPE1, COLS>(stage, ahead.from, ahead.left, ahead_run);
                else if (TYPE2 == TYPE3 || ahead.matrix == 2)
                    copy_run<TYPE2, COLS>(stage, ahead.from, ahead.left, ahead_run);
                else
                    copy_run<TYPE3, COLS>(stage, ahead.from, ahead.left, ahead_run);
            }
        }
        copies_commit();
        ahead_run += PARTS;
        if (ahead_run >= ROUNDS * PARTS) {
            ahead_run = part, ahead_u += step;
            ahead = unit_of(ahead_u);
        }
    };
    if (FEW) // else late: ptx.cuh
        dependency_release();
#pragma unroll
    for (i32 i = 0; i < STAGES; i++)
        issue(stages + i * STAGE_BYTES, true);
    dependency_wait();
    if (!FEW)
        dependency_release();

    if (STAGED) { // of the runs whose weights are on their way, the first unit's or, where that has no more, later ones'
        for (i32 i = 0, s = part, u = first; i < STAGES; i++) {
            if (u < n_units && s < N_RUNS)
                copy_input(stages + i * STAGE_BYTES, q, d, sums, n_tokens, s);
            s += PARTS;
            if (s >= ROUNDS * PARTS)
                s = part, u += step;
        }
        copies_commit();
    }

    if (SHARED) {
#pragma unroll 4
        for (i32 i = threadIdx.x; i < n_tokens * (COLS / 16); i += THREADS)
            copy16_async(local_q + i / (COLS / 16) * Q_STRIDE + i % (COLS / 16) * 16, q + (i64)i * 16);
        copies_commit();
    }
    if (!STAGED)
#pragma unroll 2
        for (i32 i = threadIdx.x; i < BLOCKS * PAIRS; i += THREADS)
            prepare<PAIRS, HALF_OFFSET>(scaled, halves, i, n_tokens, [&](i32 t, i32 block) -> OfBlock {
                const i32 from = t * BLOCKS + block;
                return {d[from], sums[from], q + (i64)from * 32};
            });
    if (SHARED || STAGED)
        copies_wait<0>(); // and for the weights before it, which are on their way for longer
    __syncthreads();
    const i32 stride = SHARED ? Q_STRIDE : STAGED ? STAGED_STRIDE : COLS;
    WideInput x = {SHARED ? local_q : q, scaled, halves, stride, n_tokens - 1};

    const i32 my_row = lane / 4 + part / 2 * 8, my_token = lane % 4 * 2 + part % 2;
    i32 i = 0;
    for (i32 u = first; u - first + (i32)blockIdx.x < n_units; u += step) { // all quads in step
        const Unit unit = unit_of(u);
        const bool exists = u < n_units && my_row < unit.left;
        float old[GROUPS], of_row[GROUPS];
        float* const y = unit.y + my_row;
#pragma unroll
        for (i32 g = 0; g < GROUPS; g++) {
            const i32 t = GROUP * g + my_token;
            const bool valid = exists && t < n_tokens;
            old[g] = add && valid ? y[(i64)t * unit.n] : 0.0f;
            of_row[g] = SCALED && valid ? row_scale[t] : 1.0f;
        }
        float acc[GROUPS][HELD_RUN<FEW>][4] = {};
#pragma unroll 1
        for (i32 s = part; s < ROUNDS * PARTS; s += PARTS, i = i + 1 < STAGES ? i + 1 : 0) {
            u8* const stage = stages + i * STAGE_BYTES;
            stage_wait<STAGES - 1>();
            if (u < n_units && s < N_RUNS) {
                u8* const unpacked = (u8*)fold + part * (FOLD_FLOATS * 4 / PARTS);
                if (STAGED) {
                    x.q = (const i8*)stage + RUN_BYTES;
#pragma unroll
                    for (i32 i = lane; i < RUN * PAIRS; i += WARP)
                        prepare<PAIRS, HALF_OFFSET>(scaled, halves, i, n_tokens, [&](i32 t, i32 block) -> OfBlock {
                            const u8* const scales = stage + SCALES_AT + t * STAGED_SCALES;
                            return {((const float*)scales)[block], ((const i32*)scales)[RUN + block],
                                    x.q + t * STAGED_STRIDE + 32 * block};
                        });
                }
                if constexpr (TYPE0 == TYPE1 && TYPE0 == TYPE2 && TYPE0 == TYPE3) {
                    multiply_unit<TYPE0>(acc, stage, constants, unpacked, unit, s, x);
                } else {
                    if (unit.matrix == 0)
                        multiply_unit<TYPE0>(acc, stage, constants, unpacked, unit, s, x);
                    else if (unit.matrix == 1)
                        multiply_unit<TYPE1>(acc, stage, constants, unpacked, unit, s, x);
                    else if (TYPE2 == TYPE3 || unit.matrix == 2)
                        multiply_unit<TYPE2>(acc, stage, constants, unpacked, unit, s, x);
                    else
                        multiply_unit<TYPE3>(acc, stage, constants, unpacked, unit, s, x);
                }
            }
            __syncwarp(); // the stage is free
            issue(stage, false);
        }
        const i32 matrix = unit.matrix;
#pragma unroll
        for (i32 g = 0; g < GROUPS; g++) {
            const i32 t = GROUP * g + my_token;
            float sum = fold_parts(acc[g], fold, part);
            if (WEIGHTED)
                sum = (matrix == 0 ? scale0 : matrix == 1 ? scale1 : matrix == 2 ? scale2 : scale3) * sum;
            if (SCALED)
                sum = of_row[g] * sum;
            if (CAPPED)
                sum = softcap(sum, cap);
            if (exists && t < n_tokens)
                y[(i64)t * unit.n] = add ? old[g] + sum : sum;
        }
    }
}

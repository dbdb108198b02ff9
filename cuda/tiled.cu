// The expert FFN of rows of activations in 8 bits, on tensor cores: the short rows of a long step. Twin: expert_ffn.
//
// A tile {expert, first, count, 0} of grouped.cu is an expert, and TOKENS at most of its pairs of token and rank. source [E, 3]
// says where each expert's matrices are; of one that has 0 there nothing is computed.
//
// An item is a tile and some rows of its matrices, 16 a unit (wide.cuh): 32 of gate and the same of up, or BLOCK_ROWS of down. Of long
// rows two warps share a unit: one takes the parts 0 and 2 of their runs, the other one the parts 1 and 3; rows of up to three
// runs have a warp. Blocks stay, and have equal shares of the items, one after the other: items of a tile share its activations, and copies
// of rows run ahead into the next item.
//
//   kernel          writes
//   gate_up_tiled   z [T * A, F] = act(gate h) * (up h)
//   down_tiled      y [T * A, columns] = down z, of rows first .. first + columns
// Grid: any; block: 8 warps.
//
// Macros: GATE, UP, DOWN, DOWN_FLOAT, GELU, WEIGHTED as in experts.cuh; types are block formats. COLS, a multiple of 32.
//   FEW      1: TOKENS is 4, and two blocks of columns share a product; 0: it is 8
//   STAGES   runs of 256 columns that a warp has in flight, 1 to 4
//   PER_SM   blocks of a multiprocessor at a time
//
// Shared memory: TOKENS rows of q, COLS rounded up to 48 more than a multiple of 128 each; 8 * TOKENS bytes for 32 columns,
// twice as many where a type has halves; TOKENS * 4 KiB where sums wait and meet; for each warp the constants of a run, 4 KiB where a
// type has a grid, and the stages.
#define WARPS 8
#include "experts.cuh"
#include "wide.cuh"

constexpr i32 TOKENS = FEW ? FEW_TOKENS : GROUP, PAIRS = TOKENS / 2, BLOCKS = COLS / 32, N_RUNS = (BLOCKS + RUN - 1) / RUN;
constexpr i32 THREADS = WARPS * WARP, HELD = HELD_RUN<FEW>;
constexpr i32 SPLIT = N_RUNS <= 3 ? 1 : 2, UNITS = WARPS / SPLIT; // warps of a unit
constexpr i32 Z_ROWS = 32, BLOCK_ROWS = UNITS * TILE_ROWS;
static_assert(COLS % 32 == 0, "whole blocks");

// What the kernel of one or two types needs of shared memory, in this order.
template <Type a, Type b>
struct Layout {
    static constexpr i32 OFFSET = same_offset(half_offset<a>(), half_offset<b>());
    static constexpr bool HALVES = has_halves(a) || has_halves(b), BEGUN = OFFSET > 0;
    static constexpr i32 SKEW = Fragments<a>::PAIRED || Fragments<b>::PAIRED ? 32 : 48; // as in wide.cu
    static constexpr i32 STRIDE = (COLS + 95) / 128 * 128 + SKEW;
    static constexpr i32 PREPARED_AT = TOKENS * STRIDE, MEET_AT = PREPARED_AT + BLOCKS * PAIRS * 16 * (1 + HALVES);
    static constexpr i32 WARPS_AT = MEET_AT + WARPS * WARP * HELD * 16;
    // Where no type has scales besides factors, these are not there, and constants begin as much earlier.
    static constexpr bool NO_SCALE = has_halves(a) && !BlockCode<a>::MINIMUM && has_halves(b) && !BlockCode<b>::MINIMUM;
    static constexpr i32 MISSING = NO_SCALE ? sizeof(Constants::scale) : 0;
    static constexpr i32 CONSTANTS = constants_bytes(HALVES) - MISSING, UNPACKED = has_grid(a) || has_grid(b) ? 16 * 32 * RUN : 0;
    static constexpr i32 A_BYTES = Runs<a, COLS>::STAGE_BYTES, B_BYTES = Runs<b, COLS>::STAGE_BYTES;
    static constexpr i32 STAGE = A_BYTES > B_BYTES ? A_BYTES : B_BYTES, OF_WARP = CONSTANTS + UNPACKED + STAGES * STAGE;
};


// --- a warp's rows ----------------------------------------------------------------------------------

// The runs of a warp, one after the other: of parts 0, 2, 1 where it has all of a unit's, which are three; of part `half`, then of
// part half + 2 where it has half of them.
DEVICE constexpr i32 runs_of(i32 part) { return part < N_RUNS ? (N_RUNS - part + PARTS - 1) / PARTS : 0; }
DEVICE i32 n_own(i32 half) { return SPLIT == 1 ? N_RUNS : half ? runs_of(1) + runs_of(3) : runs_of(0) + runs_of(2); }
DEVICE i32 run_at(i32 half, i32 i) {
    if (SPLIT == 1)
        return N_RUNS < 3 ? i : i == 0 ? 0 : 3 - i;
    const i32 n = half ? runs_of(1) : runs_of(0);
    return i < n ? half + PARTS * i : half + 2 + PARTS * (i - n);
}

// Items that a block takes in a row. Of a tile there are `each`.
struct Items {
    const int4* tiles;
    const u64* source;
    i32 begin, end, each;
};

// What a warp has of every item: rows of a matrix of `part`, the first of them `row` behind `step` rows for each item of a tile.
struct Own {
    i32 part, half, row, step, rows; // rows: of the matrix
    u8* stages;
    Constants* constants;
    u8* unpacked;
    bool second; // whether its type is the second one
};

// A warp's rows of an item. left: how many there are; 0 or less: none, or they are not to be computed.
template <Type a, Type b>
struct Rows {
    i32 tile;
    const u8 *matrix, *from;
    i32 left;

    __device__ void locate(const Items& items, const Own& own, i32 i) {
        const i32 of = i / items.each;
        if (of != tile) {
            tile = of;
            matrix = (const u8*)items.source[items.tiles[of].x * 3 + own.part];
        }
        const i32 first = i % items.each * own.step + own.row;
        from = matrix + (i64)first * (own.second ? row_bytes_of(b, COLS) : row_bytes_of(a, COLS));
        left = matrix ? own.rows - first : 0;
    }
};

// Copies that run ahead of what is multiplied, into the items that follow.
template <Type a, Type b, class L>
struct Ahead {
    Rows<a, b> rows;
    i32 item, run, at; // at: the stage that is multiplied next

    __device__ void issue(const Items& items, const Own& own, u8* stage) {
        if (item < items.end) {
            if (rows.left > 0) {
                if (a == b || !own.second)
                    copy_run<a, COLS>(stage, rows.from, rows.left, run_at(own.half, run));
                else
                    copy_run<b, COLS>(stage, rows.from, rows.left, run_at(own.half, run));
            }
            if (++run >= n_own(own.half)) {
                run = 0;
                if (++item < items.end)
                    rows.locate(items, own, item);
            }
        }
        copies_commit();
    }
    __device__ void begin(const Items& items, const Own& own) {
        run = at = 0;
        item = items.begin;
        if (item < items.end)
            rows.locate(items, own, item);
#pragma unroll
        for (i32 i = 0; i < STAGES; i++)
            issue(items, own, own.stages + i * L::STAGE);
    }
};

// The sums of a warp's rows, and of what another warp has of them: of rows lane / 4 + 8 * h and token own_token() + i of[2 * h + i],
// or, where two warps share them, by the block, of[i] of rows lane / 4 of the first warp and 8 behind of the second. Sums of a part
// wait in `meet` for those of the next, since registers would not hold both and what a product takes.
template <Type a, Type b, class L>
DEVICE void multiply_item(float (&of)[4 / SPLIT], Ahead<a, b, L>& ahead, const Rows<a, b>& rows, const Items& items, const Own& own,
                          const WideInput& x, float4* meet) {
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    float4* const mine = meet + warp * (HELD * WARP) + lane;
    float acc[1][HELD][4];
#pragma unroll 1
    for (i32 i = 0, run = 0; i < n_own(own.half);) {
        const i32 part = run_at(own.half, i) % PARTS;
#pragma unroll
        for (i32 j = 0; j < HELD; j++)
#pragma unroll
            for (i32 c = 0; c < 4; c++)
                acc[0][j][c] = 0.0f;
#pragma unroll 1
        for (; i < n_own(own.half) && (run = run_at(own.half, i)) % PARTS == part; i++) {
            u8* const stage = own.stages + ahead.at * L::STAGE;
            ahead.at = ahead.at + 1 < STAGES ? ahead.at + 1 : 0;
            stage_wait<STAGES - 1>();
            if (rows.left > 0) {
                const i32 n_blocks = min(RUN, BLOCKS - run * RUN);
                if (a == b || !own.second) {
                    const Tile tile = {stage, own.constants, own.unpacked, (u32)(u64)rows.from + run * Runs<a, COLS>::BYTES,
                                       rows.left - 1, n_blocks};
                    multiply_run<a, COLS, 1, L::BEGUN, FEW>(acc, tile, run * RUN, x);
                } else {
                    const Tile tile = {stage, own.constants, own.unpacked, (u32)(u64)rows.from + run * Runs<b, COLS>::BYTES,
                                       rows.left - 1, n_blocks};
                    multiply_run<b, COLS, 1, L::BEGUN, FEW>(acc, tile, run * RUN, x);
                }
            }
            __syncwarp(); // the stage is free
            ahead.issue(items, own, stage);
        }
        if (part != own.half)
#pragma unroll
            for (i32 j = 0; j < HELD; j++) {
                const float4 first = mine[j * WARP];
                acc[0][j][0] = first.x + acc[0][j][0], acc[0][j][1] = first.y + acc[0][j][1];
                acc[0][j][2] = first.z + acc[0][j][2], acc[0][j][3] = first.w + acc[0][j][3];
            }
        if (i < n_own(own.half))
#pragma unroll
            for (i32 j = 0; j < HELD; j++)
                mine[j * WARP] = make_float4(acc[0][j][0], acc[0][j][1], acc[0][j][2], acc[0][j][3]);
    }
    constexpr i32 N = 4 / SPLIT;
    float all[HELD][N];
    if constexpr (SPLIT == 2) {
        const float4* const other = meet + (warp ^ 1) * (HELD * WARP) + lane;
#pragma unroll
        for (i32 j = 0; j < HELD; j += 2) // what the other warp makes
            mine[j / 2 * WARP] = own.half ? make_float4(acc[0][j][0], acc[0][j][1], acc[0][j + 1][0], acc[0][j + 1][1])
                                          : make_float4(acc[0][j][2], acc[0][j][3], acc[0][j + 1][2], acc[0][j + 1][3]);
        __syncthreads();
#pragma unroll
        for (i32 j = 0; j < HELD; j += 2) {
            const float4 more = other[j / 2 * WARP];
#pragma unroll
            for (i32 k = 0; k < 2; k++) {
                all[j + k][0] = (own.half ? acc[0][j + k][2] : acc[0][j + k][0]) + (k ? more.z : more.x);
                all[j + k][1] = (own.half ? acc[0][j + k][3] : acc[0][j + k][1]) + (k ? more.w : more.y);
            }
        }
    } else {
#pragma unroll
        for (i32 j = 0; j < HELD; j++)
#pragma unroll
            for (i32 c = 0; c < N; c++)
                all[j][c] = acc[0][j][c];
    }
#pragma unroll
    for (i32 o = HELD / 2; o; o /= 2)
#pragma unroll
        for (i32 j = 0; j < o; j++)
#pragma unroll
            for (i32 c = 0; c < N; c++)
                all[j][c] = all[j][c] + all[j + o][c];
#pragma unroll
    for (i32 c = 0; c < N; c++) // of few tokens, two lanes have the even blocks and the odd ones
        of[c] = FEW ? all[0][c] + __shfl_xor_sync(FULL_WARP, all[0][c], 2) : all[0][c];
}

// The token of a tile that a lane's first result of `multiply_item` is of, and the row of a unit that of[c] is of.
DEVICE i32 own_token() { return 2 * (threadIdx.x % (FEW ? 2 : 4)); }
DEVICE i32 own_row(i32 half, i32 c) { return threadIdx.x % WARP / 4 + 8 * (SPLIT == 2 ? half : c / 2); }

// The activations of n pairs, of which lane i of every warp knows row i: to shared memory, by the block.
template <class L>
DEVICE WideInput take_input(u8* shared, i32 own_row, i32 n, const i8* q, const float* d, const i32* sums) {
    i8* const local = (i8*)shared;
    float4 *const scaled = (float4*)(shared + L::PREPARED_AT), *const halves = scaled + BLOCKS * PAIRS;
    constexpr i32 PIECES = COLS / 16;
#pragma unroll 1
    for (i32 i = threadIdx.x; i < (n * PIECES + WARP - 1) / WARP * WARP; i += THREADS) {
        const i32 t = min(i / PIECES, n - 1), piece = i % PIECES;
        // Neighbors may be of two rows, and every lane has to be there for both.
        const i64 row = __shfl_sync(FULL_WARP, own_row, t);
        if (i < n * PIECES)
            copy16_async(local + t * L::STRIDE + 16 * piece, q + row * COLS + 16 * piece);
    }
    copies_commit();
#pragma unroll 1
    for (i32 i0 = 0; i0 < BLOCKS * PAIRS; i0 += THREADS) {
        const i32 i = i0 + threadIdx.x, pair = i % PAIRS;
        const i64 rows[2] = {__shfl_sync(FULL_WARP, own_row, min(2 * pair, n - 1)),
                             __shfl_sync(FULL_WARP, own_row, min(2 * pair + 1, n - 1))};
        if (i < BLOCKS * PAIRS)
            prepare<PAIRS, L::OFFSET>(scaled, halves, i, TOKENS, [&](i32 t, i32 block) -> OfBlock {
                const i64 from = (t % 2 ? rows[1] : rows[0]) * BLOCKS + block;
                return {d[from], sums[from], q + from * 32};
            });
    }
    copies_wait<0>(); // and for the weights before it, which are on their way for longer
    __syncthreads();
    return {local, scaled, halves, L::STRIDE, n - 1};
}

// The block's equal share of n items, number i of m.
DEVICE i32 share(i32 n, i32 i, i32 m) { return (i32)((i64)n * i / m); }

#ifdef GATE

KERNEL __launch_bounds__(THREADS, PER_SM)
    gate_up_tiled(const u64* source, const int4* tiles, const i32* n_tiles, const i32* pairs, i32 n_used, i32 F, const i8* q,
                  const float* d, const i32* sums, float* z, i8* zq, float* zd, i32* zsums, const float* gate_scales) {
    typedef Layout<GATE, UP> L;
    constexpr i32 AT_ONCE = UNITS / 4; // times 32 rows of z that an item has
    __shared__ float gs[AT_ONCE][TOKENS][33], us[AT_ONCE][TOKENS][33];
    __shared__ i32 places[2][TOKENS]; // rows of z of this tile's pairs and of the last one's
    DYNAMIC_SHARED(u8, shared);
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, unit = warp / SPLIT;
    const i32 each = (F + AT_ONCE * Z_ROWS - 1) / (AT_ONCE * Z_ROWS), n_items = *n_tiles * each;
    const Items items = {tiles, source, share(n_items, blockIdx.x, gridDim.x), share(n_items, blockIdx.x + 1, gridDim.x), each};
    u8* const memory = shared + L::WARPS_AT + warp * L::OF_WARP;
    const i32 of_z = unit / 4, row_of_z = unit % 2 * TILE_ROWS; // which of the 32 rows, and where in them
    const bool is_up = unit % 4 / 2;
    const Own own = {is_up, warp % SPLIT, of_z * Z_ROWS + row_of_z, AT_ONCE * Z_ROWS, F, memory + L::CONSTANTS + L::UNPACKED,
                     (Constants*)(memory - L::MISSING), memory + L::CONSTANTS, GATE != UP && is_up};
    Ahead<GATE, UP, L> ahead;
    Rows<GATE, UP> rows;
    ahead.rows.tile = rows.tile = -1;
    if (items.begin < items.end)
        ahead.begin(items, own);
    i32 loaded = -1, n = 0, which = 0; // the tile whose activations are there, how many of them
    float factor = 1.0f;
    WideInput x = {};
#pragma unroll 1
    for (i32 i = items.begin; i < items.end; i++) {
        rows.locate(items, own, i);
        if (rows.tile != loaded) {
            loaded = rows.tile, which ^= 1;
            const int4 tile = tiles[loaded];
            const i32 pair = lane < tile.z ? pairs[tile.y + lane] : 0;
            n = tile.z;
            if (threadIdx.x < TOKENS)
                places[which][lane] = pair;
            if (WEIGHTED)
                factor = gate_scales[tile.x];
            x = take_input<L>(shared, pair / n_used, n, q, d, sums);
        }
        float of[4 / SPLIT];
        multiply_item(of, ahead, rows, items, own, x, (float4*)(shared + L::MEET_AT));
        const i32 row0 = i % each * (AT_ONCE * Z_ROWS);
#pragma unroll
        for (i32 c = 0; c < 4 / SPLIT; c++) {
            const i32 t = own_token() + c % 2, row = row_of_z + own_row(own.half, c);
            if (t < n)
                (is_up ? us : gs)[of_z][t][row] = WEIGHTED && !is_up ? factor * of[c] : of[c];
        }
        __syncthreads();
        const i32* const place = places[which];
        if (rows.matrix) // else somebody else computes it
#pragma unroll
            for (i32 k = 0; k < AT_ONCE; k++)
                if (row0 + k * Z_ROWS < F)
                    store_z<WARPS>({gs[k], us[k], n, min(Z_ROWS, F - row0 - k * Z_ROWS)}, {z, zq, zd, zsums, F},
                                   [&](i32 t) -> i64 { return place[t]; }, row0 + k * Z_ROWS);
        if (SPLIT == 1)
            __syncthreads(); // before sums of the next item take their place
    }
}

#endif
#ifdef DOWN

KERNEL __launch_bounds__(THREADS, PER_SM)
    down_tiled(const u64* source, const int4* tiles, const i32* n_tiles, const i32* pairs, const i8* zq, const float* zd,
               const i32* zsums, float* y, i32 first, i32 columns) {
    typedef Layout<DOWN, DOWN> L;
    __shared__ i32 places[2][TOKENS];
    DYNAMIC_SHARED(u8, shared);
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, unit = warp / SPLIT;
    const i32 each = (columns + BLOCK_ROWS - 1) / BLOCK_ROWS, n_items = *n_tiles * each;
    const Items items = {tiles, source, share(n_items, blockIdx.x, gridDim.x), share(n_items, blockIdx.x + 1, gridDim.x), each};
    u8* const memory = shared + L::WARPS_AT + warp * L::OF_WARP;
    const Own own = {2, warp % SPLIT, first + unit * TILE_ROWS, BLOCK_ROWS, first + columns, memory + L::CONSTANTS + L::UNPACKED,
                     (Constants*)(memory - L::MISSING), memory + L::CONSTANTS, false};
    Ahead<DOWN, DOWN, L> ahead;
    Rows<DOWN, DOWN> rows;
    ahead.rows.tile = rows.tile = -1;
    if (items.begin < items.end)
        ahead.begin(items, own);
    i32 loaded = -1, n = 0, which = 0;
    WideInput x = {};
#pragma unroll 1
    for (i32 i = items.begin; i < items.end; i++) {
        rows.locate(items, own, i);
        if (rows.tile != loaded) {
            loaded = rows.tile, which ^= 1;
            const int4 tile = tiles[loaded];
            const i32 pair = lane < tile.z ? pairs[tile.y + lane] : 0;
            n = tile.z;
            if (threadIdx.x < TOKENS)
                places[which][lane] = pair;
            __syncthreads(); // the activations of the tile before are free
            x = take_input<L>(shared, pair, n, zq, zd, zsums);
        }
        float of[4 / SPLIT];
        multiply_item(of, ahead, rows, items, own, x, (float4*)(shared + L::MEET_AT));
        const i32 t0 = own_token(), row0 = i % each * BLOCK_ROWS + unit * TILE_ROWS;
#pragma unroll
        for (i32 c = 0; c < 4 / SPLIT; c++) { // of few tokens two lanes have the same, and each writes one
            const i32 t = t0 + c % 2, row = row0 + own_row(own.half, c);
            if (t < n && row < columns && rows.matrix && (!FEW || lane % 4 / 2 == c % 2))
                y[(i64)places[which][t] * columns + row] = of[c];
        }
        if (SPLIT == 2)
            __syncthreads(); // sums have met
    }
}

#endif

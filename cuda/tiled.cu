// The expert FFN of a step of several tokens, on tensor cores. Twin: expert_ffn.
//
// A tile is an expert, and TOKENS at most of its pairs of token and rank. With TILES = 1 the table has tiles {expert, first,
// count, 0} of grouped.cu, and source [E, 3] says where each expert's matrices are; 0: somebody else computes it. With TILES
// = 0 it has the records of experts.cuh, at most MOST_RECORDS, each of which is cut in tiles by every block for itself.
//
// An item is a tile and 64 rows of its matrices: 32 of gate and the same of up, or 64 of down. Two warps share 16 rows
// (wide.cuh): one takes the parts 0 and 2 of the runs, the other one the parts 1 and 3, so that each keeps two sets of
// accumulators at most. Blocks stay, and have equal shares of the items, one after the other: items of a tile share its
// activations, and copies of rows run ahead into the next item. Only items whose rows come from the host are dealt one by
// one, to as many blocks as there are.
//
// Kernels.
//   kernel          writes                                  grid                 block
//   gate_up_tiled   z [T * A, F] = act(gate h) * (up h)     copiers + workers    8 warps
//   down_tiled      y [T * A, columns] = down z             workers              8 warps
// Copiers are as in several.cu; with TILES nothing enters a slot and there are none. BESIDE: the expert that every token uses
// has the first tiles. down_tiled has rows first .. first + columns of down.
//
// Macros, and those of experts.cuh. Types are block formats, COLS is a multiple of 32.
//   FEW      1: TOKENS is 4, and two blocks of columns share a product; 0: it is 8
//   STAGES   runs of 256 columns that a warp has in flight, 2 to 4
//   PER_SM   blocks of a multiprocessor at a time
//   SHARED   the copiers make row_scale
//
// Shared memory: TOKENS rows of q, COLS rounded up to 48 more than a multiple of 128 each; 8 * TOKENS bytes for 32 columns,
// twice as many where a type has halves; TOKENS * 4 KiB where sums meet; for each warp the constants of a run, 4 KiB where a
// type has a grid, and the stages. With SHARED 8 * COLS at least.
#ifndef TILES
#define TILES 0
#endif
#define WARPS 8
#include "experts.cuh"
#include "wide.cuh"

constexpr i32 TOKENS = FEW ? FEW_TOKENS : GROUP, PAIRS = TOKENS / 2, BLOCKS = COLS / 32, N_RUNS = (BLOCKS + RUN - 1) / RUN;
constexpr i32 THREADS = WARPS * WARP, UNITS = WARPS / 2, ITEM_ROWS = UNITS * TILE_ROWS, HELD = HELD_RUN<FEW>;
constexpr i32 MOST_RECORDS = 512;
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

// --- tiles ------------------------------------------------------------------------------------------

// What a table has, as every thread of a block knows it. Tiles before n_beside are those of the expert beside.
struct Table {
    const u8* entries;
    const u64* source;
    const i32* pairs;
    i32 n_entries, n_beside, n_tiles, n_missing; // missing: tiles up to the last that enters a slot: what misses comes first
};

// With records, the first tile of each, behind those beside; one more than there are records.
DEVICE i32* first_tiles() {
    __shared__ i32 made[MOST_RECORDS + 1];
    return made;
}

DEVICE i32 tiles_of(i32 count) { return (count + TOKENS - 1) / TOKENS; }

// By the whole block.
DEVICE Table open_table(const u8* entries, const i32* n_entries, const u64* source, const i32* pairs, i32 n_beside) {
    Table t = {entries, source, pairs, load_fresh(n_entries), n_beside, 0, 0};
    if (TILES) {
        t.n_tiles = t.n_entries;
        return t;
    }
    // A warp has 32 records at a time: all do the same sums, so nobody waits for more than the one barrier.
    i32* const firsts = first_tiles();
    const i32 lane = threadIdx.x % WARP;
    constexpr i32 AT_ONCE = 4; // loads that are under way
    for (i32 r0 = 0; r0 < t.n_entries; r0 += AT_ONCE * WARP) {
        i32 counts[AT_ONCE];
        bool misses[AT_ONCE];
#pragma unroll
        for (i32 k = 0; k < AT_ONCE; k++) {
            const i32 r = r0 + k * WARP + lane;
            const u64* const record = (const u64*)(entries + (i64)r * 64);
            counts[k] = r < t.n_entries ? (i32)load_fresh(record + 7) : 0;
            misses[k] = r < t.n_entries && load_fresh(record + 3);
        }
#pragma unroll
        for (i32 k = 0; k < AT_ONCE; k++) {
            const i32 n = tiles_of(counts[k]);
            i32 sum = n;
#pragma unroll
            for (i32 o = 1; o < WARP; o *= 2) {
                const i32 before = __shfl_up_sync(FULL_WARP, sum, o);
                sum += lane >= o ? before : 0;
            }
            if (threadIdx.x < WARP && n)
                firsts[r0 + k * WARP + lane] = t.n_tiles + sum - n;
            t.n_missing = max(t.n_missing, (i32)__reduce_max_sync(FULL_WARP, misses[k] ? t.n_tiles + sum : 0));
            t.n_tiles += __shfl_sync(FULL_WARP, sum, WARP - 1);
        }
    }
    if (threadIdx.x == 0)
        firsts[t.n_entries] = t.n_tiles;
    __syncthreads();
    return t;
}

// By a whole warp. i: of a tile that is not beside the others; the record that it is of.
DEVICE i32 record_at(const Table& t, i32 i) {
    const i32* const firsts = first_tiles();
    i32 low = 0, high = t.n_entries; // firsts[low] <= i < firsts[high]
    while (high - low > 1) {
        const i32 middle = (low + high) / 2;
        low = firsts[middle] <= i ? middle : low;
        high = firsts[middle] <= i ? high : middle;
    }
    return low;
}

// Of a tile: its expert and pairs.
struct TileUses {
    i32 expert, first, count;
};

DEVICE TileUses uses_at(const Table& t, i32 tile) {
    const i32 i = tile - t.n_beside;
    if (TILES) {
        const int4 entry = ((const int4*)t.entries)[i];
        return {entry.x, entry.y, entry.z};
    }
    const i32 r = record_at(t, i), before = (i - first_tiles()[r]) * TOKENS;
    const u64* const record = (const u64*)(t.entries + (i64)r * 64);
    const u64 ids = load_fresh(record + 6);
    return {(i32)ids, (i32)(ids >> 32) + before, min(TOKENS, (i32)load_fresh(record + 7) - before)};
}

// Where a matrix of its expert is read, the slot's if it enters one; null: it is not to be computed.
DEVICE const u8* matrix_at(const Table& t, i32 tile, i32 part) {
    const i32 i = tile - t.n_beside;
    if (TILES)
        return (const u8*)t.source[((const int4*)t.entries)[i].x * 3 + part];
    const u64* const record = (const u64*)(t.entries + (i64)record_at(t, i) * 64);
    const u64 slot = load_fresh(record + 3 + part);
    return (const u8*)(slot ? slot : load_fresh(record + part));
}

// --- a warp's rows ----------------------------------------------------------------------------------

// The runs of a warp: of part `half`, then of part half + 2.
DEVICE constexpr i32 runs_of(i32 part) { return part < N_RUNS ? (N_RUNS - part + PARTS - 1) / PARTS : 0; }
DEVICE i32 run_at(i32 half, i32 i) {
    const i32 n = half ? runs_of(1) : runs_of(0);
    return i < n ? half + PARTS * i : half + 2 + PARTS * (i - n);
}

// Items that a block takes in a row. Those from `from` on lie `skipped` further in the order of tiles, of which each has `each`.
struct Items {
    i32 begin, end, from, skipped, each;
    __device__ i32 at(i32 i) const { return i + (i >= from ? skipped : 0); }
    __device__ i32 tile(i32 i) const { return at(i) / each; }
    __device__ i32 slice(i32 i) const { return at(i) % each; }
};

// What a warp has of every item: rows of a matrix of `part`, the first of them `row` behind `step` rows for each slice.
struct Own {
    i32 part, half, row, step, rows; // rows: of the matrix
    const u8 *beside;                // the matrix of tiles before n_beside
    u8* stages;
    Constants* constants;
    u8* unpacked;
    bool second;                     // whether its type is the second one
};

// A warp's rows of an item. left: how many there are; 0 or less: none, or they are not to be computed.
template <Type a, Type b>
struct Rows {
    i32 tile;
    const u8 *matrix, *from;
    i32 left;

    __device__ void locate(const Table& t, const Items& items, const Own& own, i32 i) {
        const i32 of = items.tile(i);
        if (of != tile) {
            tile = of;
            matrix = BESIDE && of < t.n_beside ? own.beside : matrix_at(t, of, own.part);
        }
        const i32 first = items.slice(i) * own.step + own.row;
        from = matrix + (i64)first * (own.second ? row_bytes_of(b, COLS) : row_bytes_of(a, COLS));
        left = matrix ? own.rows - first : 0;
    }
};

// Copies that run ahead of what is multiplied, into the items that follow.
template <Type a, Type b, class L>
struct Ahead {
    Rows<a, b> rows;
    i32 item, run, at; // at: the stage that is multiplied next

    __device__ void issue(const Table& t, const Items& items, const Own& own, u8* stage) {
        if (item < items.end) {
            if (rows.left > 0) {
                if (a == b || !own.second)
                    copy_run<a, COLS>(stage, rows.from, rows.left, run_at(own.half, run));
                else
                    copy_run<b, COLS>(stage, rows.from, rows.left, run_at(own.half, run));
            }
            if (++run >= (own.half ? runs_of(1) + runs_of(3) : runs_of(0) + runs_of(2))) {
                run = 0;
                if (++item < items.end)
                    rows.locate(t, items, own, item);
            }
        }
        copies_commit();
    }
    __device__ void begin(const Table& t, const Items& items, const Own& own) {
        run = at = 0;
        item = own.half && runs_of(1) == 0 ? items.end : items.begin; // a row of one run is one warp's alone
        if (item < items.end)
            rows.locate(t, items, own, item);
#pragma unroll
        for (i32 i = 0; i < STAGES; i++)
            issue(t, items, own, own.stages + i * L::STAGE);
    }
};

// A warp's sums of its two parts, each accumulator for itself, in the warp's share of `meet`: those of the first part wait there
// for the second's, since registers would not hold both and what a product takes. Then both warps of some rows put theirs together,
// by the block: the first warp gets rows lane / 4, the second those 8 behind. of[i]: of token own_token() + i. A barrier has to
// follow before the next call.
template <Type a, Type b, class L>
DEVICE void multiply_item(float (&of)[2], Ahead<a, b, L>& ahead, const Rows<a, b>& rows, const Table& t, const Items& items,
                          const Own& own, const WideInput& x, float4* meet) {
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    float4 *const mine = meet + warp * (HELD * WARP) + lane, *const other = meet + (warp ^ 1) * (HELD * WARP) + lane;
    float acc[1][HELD][4];
#pragma unroll 1
    for (i32 part = own.half; part < PARTS; part += 2) {
#pragma unroll
        for (i32 j = 0; j < HELD; j++)
#pragma unroll
            for (i32 c = 0; c < 4; c++)
                acc[0][j][c] = 0.0f;
#pragma unroll 1
        for (i32 s = part; s < N_RUNS; s += PARTS) {
            u8* const stage = own.stages + ahead.at * L::STAGE;
            ahead.at = ahead.at + 1 < STAGES ? ahead.at + 1 : 0;
            stage_wait<STAGES - 1>();
            if (rows.left > 0) {
                const i32 n_blocks = min(RUN, BLOCKS - s * RUN);
                if (a == b || !own.second) {
                    const Tile tile = {stage, own.constants, own.unpacked, (u32)(u64)rows.from + s * Runs<a, COLS>::BYTES,
                                       rows.left - 1, n_blocks};
                    multiply_run<a, COLS, 1, L::BEGUN, FEW>(acc, tile, s * RUN, x);
                } else {
                    const Tile tile = {stage, own.constants, own.unpacked, (u32)(u64)rows.from + s * Runs<b, COLS>::BYTES,
                                       rows.left - 1, n_blocks};
                    multiply_run<b, COLS, 1, L::BEGUN, FEW>(acc, tile, s * RUN, x);
                }
            }
            __syncwarp(); // the stage is free
            ahead.issue(t, items, own, stage);
        }
        if (part < 2) {
#pragma unroll
            for (i32 j = 0; j < HELD; j++)
                mine[j * WARP] = make_float4(acc[0][j][0], acc[0][j][1], acc[0][j][2], acc[0][j][3]);
        } else {
#pragma unroll
            for (i32 j = 0; j < HELD; j++) {
                const float4 first = mine[j * WARP];
                acc[0][j][0] = first.x + acc[0][j][0], acc[0][j][1] = first.y + acc[0][j][1];
                acc[0][j][2] = first.z + acc[0][j][2], acc[0][j][3] = first.w + acc[0][j][3];
            }
        }
    }
#pragma unroll
    for (i32 j = 0; j < HELD; j += 2) // what the other warp makes
        mine[j / 2 * WARP] = own.half ? make_float4(acc[0][j][0], acc[0][j][1], acc[0][j + 1][0], acc[0][j + 1][1])
                                      : make_float4(acc[0][j][2], acc[0][j][3], acc[0][j + 1][2], acc[0][j + 1][3]);
    __syncthreads();
    float all[HELD][2];
#pragma unroll
    for (i32 j = 0; j < HELD; j += 2) {
        const float4 more = other[j / 2 * WARP];
#pragma unroll
        for (i32 k = 0; k < 2; k++) {
            all[j + k][0] = (own.half ? acc[0][j + k][2] : acc[0][j + k][0]) + (k ? more.z : more.x);
            all[j + k][1] = (own.half ? acc[0][j + k][3] : acc[0][j + k][1]) + (k ? more.w : more.y);
        }
    }
#pragma unroll
    for (i32 o = HELD / 2; o; o /= 2)
#pragma unroll
        for (i32 j = 0; j < o; j++)
#pragma unroll
            for (i32 i = 0; i < 2; i++)
                all[j][i] = all[j][i] + all[j + o][i];
#pragma unroll
    for (i32 i = 0; i < 2; i++) // of few tokens, two lanes have the even blocks and the odd ones
        of[i] = FEW ? all[0][i] + __shfl_xor_sync(FULL_WARP, all[0][i], 2) : all[0][i];
}

// The token of a tile that a lane's first result of `meet_sums` is of.
DEVICE i32 own_token() { return 2 * (threadIdx.x % (FEW ? 2 : 4)); }

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
    gate_up_tiled(const u8* entries, const i32* n_entries, const u64* source, const i32* pairs, i32 n_used, i32 F,
                  const i8* q, const float* d, const i32* sums, float* z, i8* zq, float* zd, i32* zsums,
                  const u8* beside_gate, const u8* beside_up, i32 n_tokens, const u8* shared_gate, const float* h,
                  float* row_scale, i32 copiers, i64 down_bytes, const float* gate_scales) {
    typedef Layout<GATE, UP> L;
    constexpr i32 GATE_BYTES = row_bytes_of(GATE, COLS), UP_BYTES = row_bytes_of(UP, COLS);
    __shared__ float gs[TOKENS][33], us[TOKENS][33];
    __shared__ i32 places[2][TOKENS]; // rows of z of this tile's pairs and of the last one's
    DYNAMIC_SHARED(u8, shared);
    dependency_wait();
    dependency_release(); // when the kernel behind begins, the table is complete
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if ((i32)blockIdx.x < copiers) {
        copy_downs(entries, load_fresh(n_entries), down_bytes, blockIdx.x, copiers);
#ifdef SHARED
        for (i32 t = blockIdx.x; t < n_tokens; t += copiers) {
            __syncthreads(); // of the row before
            shared_scale((float*)shared, shared_gate, h + (i64)t * COLS, row_scale + t);
        }
#endif
        return;
    }
    const Table table = open_table(entries, n_entries, source, pairs, BESIDE ? tiles_of(n_tokens) : 0);
    const i32 worker = blockIdx.x - copiers, workers = gridDim.x - copiers, each = (F + 31) / 32, unit = warp / 2;
    const i32 n_missing = table.n_missing * each, n_others = (table.n_beside + table.n_tiles) * each - n_missing;
    u8* const memory = shared + L::WARPS_AT + warp * L::OF_WARP;
    const Own own = {unit / 2, warp % 2, unit % 2 * TILE_ROWS, 32, F, unit / 2 ? beside_up : beside_gate,
                     memory + L::CONSTANTS + L::UNPACKED, (Constants*)(memory - L::MISSING), memory + L::CONSTANTS, GATE != UP && unit / 2};
    Ahead<GATE, UP, L> ahead;
    Rows<GATE, UP> rows;
    ahead.rows.tile = rows.tile = -1;
    i32 loaded = -1, n = 0, which = 0; // the tile whose activations are there, how many of them
    float factor = 1.0f;
    WideInput x = {};
    for (i32 batch = worker;; batch += workers) {
        const bool missing = batch < n_missing;
        Items items;
        if (missing) { // rows from the host, which the block brings to their slots first
            const i32 begin = table.n_beside * each + batch;
            items = {begin, begin + 1, 0, 0, each};
            const i32 row0 = items.slice(begin) * 32, n_rows = min(32, F - row0);
            const u64* const record = (const u64*)(entries + (i64)record_at(table, items.tile(begin) - table.n_beside) * 64);
            own_rows((const u8*)load_fresh(record), (u8*)load_fresh(record + 3), (i64)row0 * GATE_BYTES, n_rows * GATE_BYTES);
            own_rows((const u8*)load_fresh(record + 1), (u8*)load_fresh(record + 4), (i64)row0 * UP_BYTES,
                     n_rows * UP_BYTES);
            __syncthreads();
        } else {
            items = {share(n_others, worker, workers), share(n_others, worker + 1, workers), table.n_beside * each,
                     n_missing, each};
        }
        if (items.begin < items.end)
            ahead.begin(table, items, own);
#pragma unroll 1
        for (i32 i = items.begin; i < items.end; i++) {
            rows.locate(table, items, own, i);
            if (rows.tile != loaded) {
                loaded = rows.tile;
                const bool beside = BESIDE && loaded < table.n_beside;
                const i32 first = loaded * TOKENS;
                const TileUses uses =
                    beside ? TileUses{0, n_tokens * n_used + first, min(TOKENS, n_tokens - first)} : uses_at(table, loaded);
                const i32 pair = beside ? uses.first + lane : lane < uses.count ? load_fresh(pairs + uses.first + lane) : 0;
                n = uses.count, which ^= 1;
                if (threadIdx.x < TOKENS)
                    places[which][lane] = pair;
                if (WEIGHTED)
                    factor = beside ? 1.0f : gate_scales[uses.expert];
                x = take_input<L>(shared, beside ? first + lane : pair / n_used, n, q, d, sums);
            }
            float of[2];
            multiply_item(of, ahead, rows, table, items, own, x, (float4*)(shared + L::MEET_AT));
            const i32 row0 = items.slice(i) * 32, n_rows = min(32, F - row0);
            const i32 t = own_token(), row = own.row + lane / 4 + 8 * own.half;
#pragma unroll
            for (i32 k = 0; k < 2; k++)
                if (t + k < n && row < n_rows) {
                    if (own.part)
                        us[t + k][row] = of[k];
                    else
                        gs[t + k][row] = WEIGHTED && !(BESIDE && loaded < table.n_beside) ? factor * of[k] : of[k];
                }
            __syncthreads();
            const i32* const place = places[which];
            if (rows.matrix) // else somebody else computes it
                store_z<WARPS>({gs, us, n, n_rows}, {z, zq, zd, zsums, F}, [&](i32 t) -> i64 { return place[t]; }, row0);
        }
        if (!missing)
            return;
    }
}

#endif
#ifdef DOWN

KERNEL __launch_bounds__(THREADS, PER_SM)
    down_tiled(const u8* entries, const i32* n_entries, const u64* source, const i32* pairs, const i8* zq, const float* zd,
               const i32* zsums, float* y, i32 first, i32 columns) {
    typedef Layout<DOWN, DOWN> L;
    __shared__ i32 places[2][TOKENS];
    DYNAMIC_SHARED(u8, shared);
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    dependency_release();
    // The table is complete since gate_up began.
    const Table table = open_table(entries, n_entries, source, pairs, 0);
    const i32 each = (columns + ITEM_ROWS - 1) / ITEM_ROWS, n_items = table.n_tiles * each, workers = gridDim.x;
    const Items items = {share(n_items, blockIdx.x, workers), share(n_items, blockIdx.x + 1, workers), 0, 0, each};
    u8* const memory = shared + L::WARPS_AT + warp * L::OF_WARP;
    const Own own = {2, warp % 2, first + warp / 2 * TILE_ROWS, ITEM_ROWS, first + columns, nullptr,
                     memory + L::CONSTANTS + L::UNPACKED, (Constants*)(memory - L::MISSING), memory + L::CONSTANTS, false};
    Ahead<DOWN, DOWN, L> ahead;
    Rows<DOWN, DOWN> rows;
    ahead.rows.tile = rows.tile = -1;
    if (table.n_missing) // gate_up writes what enters a slot; the rest is there already
        dependency_wait();
    if (items.begin < items.end)
        ahead.begin(table, items, own);
    dependency_wait();
    i32 loaded = -1, n = 0, which = 0;
    WideInput x = {};
#pragma unroll 1
    for (i32 i = items.begin; i < items.end; i++) {
        rows.locate(table, items, own, i);
        if (rows.tile != loaded) {
            loaded = rows.tile;
            const TileUses uses = uses_at(table, loaded);
            const i32 pair = lane < uses.count ? load_fresh(pairs + uses.first + lane) : 0;
            n = uses.count, which ^= 1;
            if (threadIdx.x < TOKENS)
                places[which][lane] = pair;
            x = take_input<L>(shared, pair, n, zq, zd, zsums);
        }
        float of[2];
        multiply_item(of, ahead, rows, table, items, own, x, (float4*)(shared + L::MEET_AT));
        const i32 t = own_token(), row = items.slice(i) * ITEM_ROWS + warp / 2 * TILE_ROWS + lane / 4 + 8 * own.half;
#pragma unroll
        for (i32 k = 0; k < 2; k++) // of few tokens two lanes have the same, and each writes one
            if (t + k < n && row < columns && rows.matrix && (!FEW || lane % 4 / 2 == k))
                y[(i64)places[which][t + k] * columns + row] = of[k];
        __syncthreads(); // sums have met
    }
}

#endif

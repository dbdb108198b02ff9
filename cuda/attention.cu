// Attention of few rows (at most 32 tokens a launch) over the paged KV cache. Twin: `attention` of
// engine/ops/reference.py, within rounding: sums are split by position, and probabilities are rounded to halves. A
// row's bits depend on its query, its position and the cached keys and values that it sees, alone.
//
// -DHEAD_DIM, -DK_TYPE, -DV_TYPE, -DTILE (kv.cuh); -DROWS=8, 16, 32 or 64: so many rows (query heads of a kv head,
// times tokens) share a tile of keys and values; -DSTAGES: tiles of each in flight; -DSPLITS, -DWINDOW (splits.cuh).
//
// The positions that a row sees are cut into splits, always at the same places for the same last position. In a split,
// the sixteenths of all tiles are parts (four, of blocks of 64), each with a warp for every 16 rows (every 32 where there
// are 64), a running maximum and sums of its own; the parts meet at the end of the split. Where tiles are smaller, because heads are large, a
// part's warps share the dimensions of the output, and each computes the scores. A pair of a split and a kv head gives
// each row a maximum m, a sum l and a vector o; combine.cu folds them.
//
// Grid (K, n_workers), any n_workers, blocks of THREADS; dynamic shared memory
// STAGES * KV_SLOT_BYTES + Q_ROWS * Q_STRIDE * 2 + 4 * MERGE_ROWS * MERGE_STRIDE * 4
// bytes. q [T, H, HEAD_DIM] is aligned to 16 bytes. partial_o [T, H, max_splits, HEAD_DIM], partial_ml [T, H,
// max_splits, 2]. Tiles of a negative block in `table` are passed over; positions are clamped to the table. May overlap
// the kernel ahead of it, which writes q and the cache at positions from the least of a sequence's on, and nothing else
// that is read here. With -DHOMES=1 blocks from n_pool on lie elsewhere (homes.cuh). With -DLISTED=1 a row of head h reads
// the blocks list[t, h], [T, K, max_blocks], and its position positions[t, h] is one among these. recall.cu has just written
// them, so each block waits first, and lets combine.cu begin behind that, which then reads them before it waits.
#include "arithmetic.cuh"
#include "chunks.cuh"
#include "homes.cuh"
#include "kv.cuh"
#include "queries.cuh"
#include "splits.cuh"
#include "taken_out.cuh"

#ifndef LISTED
#define LISTED 0
#endif

constexpr i32 MERGE_COLUMNS = TILES == 1 && HEAD_DIM <= 128 ? COLUMNS : 4, MERGE_DIMS = MERGE_COLUMNS * 8; // at a time
constexpr i32 MERGE_STRIDE = MERGE_DIMS + 8;
constexpr i32 AHEAD = STAGES > 1 ? STAGES - 1 : 1; // tiles that are loaded before the dependency

// What the products of a step take: PACKED ones from registers, where rows 8 .. 15 are the low halves.
struct Query {
    u32 packed[HELD ? STEPS : 1][4];
    const u16* rows;
};

// A step's products of 16 positions' keys with one row tile; packed ones have the low halves in `high`, too.
DEVICE void multiply(float (&high)[2][4], float (&low)[2][4], const Query& query, i32 tile, i32 step,
                     const u32 (&b)[2][KEY_STEPS][2], i32 i) {
    u32 a[4];
    if (HELD) {
#pragma unroll
        for (i32 j = 0; j < 4; j++)
            a[j] = query.packed[HELD ? step : 0][j];
    } else {
        load_query(a, query.rows, tile * 16, step);
    }
#pragma unroll
    for (i32 t = 0; t < 2; t++)
        mma_f16(high[t], a, b[t][i][0], b[t][i][1]);
    if (PACKED)
        return;
    load_query(a, query.rows, Q_LOW + tile * 16, step);
#pragma unroll
    for (i32 t = 0; t < 2; t++)
        mma_f16(low[t], a, b[t][i][0], b[t][i][1]);
}

// Scores, before the row's factor, of the thread's rows in each row tile against 16 positions: s[.][t][2 * row + i] is
// for position 8 t + 2 (lane % 4) + i. Sums of CHAIN steps each; with scales, of the two that have the same one.
constexpr i32 CHAIN = Keys::BYTES ? 2 : (STEPS + 3) / 4 * 2;

DEVICE void products(float (&s)[HAS][2][2 * OWN], const Query& query, const u8* keys, const u8* scales, i32 position,
                     i32 head, i32 n_head_kv) {
    float high[HAS][2][4], low[HAS][2][4];
    u32 b[2][KEY_STEPS][2];
#pragma unroll
    for (i32 e = 0; e < HAS * 4 * OWN; e++)
        s[e / (4 * OWN)][e / (2 * OWN) % 2][e % (2 * OWN)] = 0.0f;
#pragma unroll
    for (i32 step = 0; step < STEPS; step++) {
        if (step % KEY_STEPS == 0)
#pragma unroll
            for (i32 t = 0; t < 2; t++)
                key_fragments(b[t], keys, position + 8 * t, step * 16);
        if (step % CHAIN == 0)
#pragma unroll
            for (i32 e = 0; e < HAS * 8; e++)
                high[e / 8][e / 4 % 2][e % 4] = low[e / 8][e / 4 % 2][e % 4] = 0.0f;
#pragma unroll
        for (i32 w = 0; w < HAS; w++)
            multiply(high[w], low[w], query, w, step, b, step % KEY_STEPS);
        if (step % CHAIN < CHAIN - 1 && step < STEPS - 1)
            continue;
#pragma unroll
        for (i32 t = 0; t < 2; t++) {
            float d[2] = {1.0f, 1.0f};
            if constexpr (Keys::BYTES) {
#pragma unroll
                for (i32 j = 0; j < 2; j++)
                    d[j] = half_to_float(kv_scale_bits<Keys>(scales, position + 8 * t + threadIdx.x % 4 * 2 + j,
                                                             step / 2, head, n_head_kv));
            }
#pragma unroll
            for (i32 w = 0; w < HAS; w++)
#pragma unroll
                for (i32 e = 0; e < 2 * OWN; e++) {
                    const float x = high[w][t][e] + (PACKED ? high[w][t][e + 2] : low[w][t][e]);
                    s[w][t][e] = Keys::BYTES ? __fmaf_rn(x, d[e % 2], s[w][t][e]) : step < CHAIN ? x : s[w][t][e] + x;
                }
        }
    }
}

// --- kernels ---

// Of the threads that share a part's tiles. A part of one warp waits for no other but where they meet.
DEVICE void part_barrier() {
    if (GROUP == WARP)
        __syncwarp();
    else
        __syncthreads();
}

KERNEL __launch_bounds__(THREADS, PACKED && HEAD_DIM <= 128 ? 3 : 1) // MAX_BLOCKS of attention.py
attention_splits(const float* q, const u8* k, const u8* v, const u16* k_scale, const u16* v_scale, const i32* table,
                 const i32* sequence, const i32* positions, i32 T, i32 n_head, i32 n_head_kv, i32 max_blocks,
                 i32 max_splits, float scale, float* partial_o, float* partial_ml, const i32* list HOME_PARAMETERS) {
    if (LISTED)
        dependency_wait_first();
    else
        dependency_release();
    DYNAMIC_SHARED(u8, memory);
    __shared__ Chunk chunks[MAX_TOKENS];
    __shared__ i32 found_chunks, token_sequence[MAX_TOKENS], token_position[MAX_TOKENS];
    __shared__ i32 row_head[MERGE_ROWS], row_position[MERGE_ROWS]; // t * H + h, largest position seen; -1 if unused
    __shared__ float row_factor[MERGE_ROWS], part_m[PARTS][MERGE_ROWS], part_l[PARTS][MERGE_ROWS];
    __shared__ TakenOut taken_out[PARTS][HEAD_DIM];
    constexpr i32 SLOT = KV_SLOT_BYTES;
    u16* const queries = (u16*)(memory + STAGES * SLOT);
    float* const merged = (float*)(queries + Q_ROWS * Q_STRIDE); // [SHARES, PARTS, MERGE_ROWS, MERGE_STRIDE]

    const i32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    constexpr i32 ACROSS = TILES / HAS; // warps with other rows
    const i32 part = warp / (ACROSS * SHARES), row0 = warp % ACROSS * HAS * 16, position0 = part * PART;
    const i32 share = SHARES == 1 ? 0 : warp / ACROSS % SHARES, dimension0 = share * COLUMNS * 8;
    const i32 head = blockIdx.x, worker = blockIdx.y, n_workers = gridDim.y, group = n_head / n_head_kv;

    if (threadIdx.x < T) {
        token_sequence[threadIdx.x] = LISTED ? threadIdx.x : sequence[threadIdx.x];
        const i32 row = LISTED ? threadIdx.x * n_head_kv + head : threadIdx.x;
        token_position[threadIdx.x] = clamped_position(positions[row], max_blocks);
    }
    __syncwarp();
    if (threadIdx.x < WARP) {
        const i32 n = find_chunks(chunks, token_sequence, token_position, T, group);
        if (threadIdx.x == 0)
            found_chunks = n;
    }
    if (HEAD_DIM % 32)
        for (i32 i = 0; i < STAGES; i++) {
            zero_kv_padding<THREADS, Keys>(kv_tiles(memory + i * SLOT).k);
            zero_kv_padding<THREADS, Values>(kv_tiles(memory + i * SLOT).v);
        }
    __syncthreads();
    const i32 n_chunks = found_chunks;
    Cursor loading = {0, worker, 0, 0};
    seek(loading, chunks, n_chunks);
    if (loading.chunk == n_chunks)
        return;
    Cursor at = loading;

    // The loading side runs ahead. A lane has one of 32 neighboring entries of the table.
    i32 entries = -1, entries0 = 0, loading_slot = 0;
    const auto load_entries = [&]() {
        entries0 = loading.block / SHARES;
        if (loading.chunk < n_chunks) {
            const Chunk& of = chunks[loading.chunk];
            i64 row = of.sequence;
            i32 block = min(entries0 + lane, LISTED ? of.last / KV_BLOCK : max_blocks - 1);
            if (LISTED) {
                block = list[(row * n_head_kv + head) * max_blocks + block];
                row = sequence[row];
            }
            entries = table[row * max_blocks + block];
        }
    };
    load_entries();
    const i32 first_entries = entries;

    const i32 own0 = row0 + lane / 4, column = lane % 4 * 2; // row r of row tile w is own0 + 16 w + 8 r
    Query query;
    query.rows = queries + row0 * Q_STRIDE;
    i32 limit[HAS][OWN] = {}, n_rows = 0;
    float factor[HAS][OWN] = {}, m[HAS][OWN];
    float o[HAS][COLUMNS][4], l[HAS][4]; // elements 0 and 1 are of the first own row, 2 and 3 of the second
    const auto reset = [&]() {
#pragma unroll
        for (i32 w = 0; w < HAS; w++) {
#pragma unroll
            for (i32 r = 0; r < OWN; r++)
                m[w][r] = -INFINITE;
#pragma unroll
            for (i32 e = 0; e < 4; e++) {
                l[w][e] = 0.0f;
#pragma unroll
                for (i32 n = 0; n < COLUMNS; n++)
                    o[w][n][e] = 0.0f;
            }
        }
    };
    reset();
    // Turns before AHEAD copy what is older than this step, of the first tiles; then, with the kernel ahead at its end,
    // as many the rest of these tiles where there is any; then each turn works on a tile and copies another one, if
    // there is but one stage when it is done with its own.
    bool missing = false;
    u32 absent = 0; // a bit a slot: its tile is of a negative block
    i32 slot = 0, chunk = -1;
    // Start copying the next tile: of its rows those older than this step, the others, or all.
    const auto load = [&](bool early, bool late) {
        if (loading.chunk < n_chunks) {
            const Chunk& from = chunks[loading.chunk];
            const i32 physical = __shfl_sync(FULL_WARP, entries, loading.block / SHARES - entries0);
            const i32 valid = physical < 0 ? 0 : from.last + 1 - loading.block * KV_TILE;
            const i32 fresh = LISTED ? KV_TILE : from.fresh - loading.block * KV_TILE;
            const CachedBlock block = cached_block(max(physical, 0), {k, v, k_scale, v_scale} HOME_ARGUMENTS);
            const i64 first_slot = (i64)block.index * KV_BLOCK + loading.block % SHARES * KV_TILE;
            missing |= early && fresh < KV_TILE;
            absent = (absent & ~(1u << loading_slot)) | (u32)(physical < 0) << loading_slot;
            copy_kv_rows<GROUP, WINDOW != 0>(
                kv_tiles(memory + loading_slot * SLOT), block.in.k, block.in.v, block.in.k_scale, block.in.v_scale,
                first_slot, position0,
                late ? fresh : 0, early ? fresh : KV_TILE, fresh < KV_TILE ? !early : !late,
                window_begin(from.lowest) - loading.block * KV_TILE, valid, head, n_head_kv, threadIdx.x % GROUP);
            if (advance(loading, n_workers, chunks, n_chunks) || loading.block / SHARES - entries0 == WARP)
                load_entries();
            loading_slot = loading_slot + 1 == STAGES ? 0 : loading_slot + 1;
        }
        copies_commit();
    };
#pragma unroll 1
    for (i32 turn = 0;; turn++) {
        if (turn == AHEAD) {
            if (!LISTED)
                dependency_wait();
            if (missing)
                loading = at, entries = first_entries, entries0 = at.block / SHARES, loading_slot = 0;
            else
                turn = 2 * AHEAD;
        }
        const bool early = turn < AHEAD, late = !early && turn < 2 * AHEAD;
        if (!early && !late) {
            if (at.chunk == n_chunks)
                break;
            if (at.chunk != chunk) {
                chunk = at.chunk;
                n_rows = chunks[chunk].n * group;
                __syncthreads();
                store_queries(queries, row_head, row_position, row_factor, q, token_position, chunks[chunk], group,
                              head, n_head, scale * 0x1.715476p+0f);
                __syncthreads();
#pragma unroll
                for (i32 i = 0; i < HAS * OWN; i++) {
                    const i32 w = i / OWN, r = i % OWN;
                    limit[w][r] = row_position[own0 + 16 * w + 8 * r];
                    factor[w][r] = row_factor[own0 + 16 * w + 8 * r];
                }
                if (HELD)
#pragma unroll
                    for (i32 step = 0; step < STEPS; step++)
                        load_query(query.packed[HELD ? step : 0], queries, 0, step);
            }
            if (missing)
                copies_wait<0>(); // the first tile came in several groups
            else
                copies_wait<AHEAD - 1>();
            missing = false;
            unpack_rows<GROUP, Keys>(kv_tiles(memory + slot * SLOT).k, position0, threadIdx.x % GROUP);
            unpack_rows<GROUP, Values>(kv_tiles(memory + slot * SLOT).v, position0, threadIdx.x % GROUP);
            part_barrier();
        }
        if (STAGES > 1 || early || late)
            load(early, late);
        if (early || late)
            continue;

        const i32 base = at.block * KV_TILE;
        const KvTiles tiles = kv_tiles(memory + slot * SLOT);
        // Whether only some rows see some of the positions; before the first row's window all is zeros.
        const auto only_some = [&](i32 first, i32 last) {
            return n_rows > group && (base + last > chunks[chunk].lowest ||
                                      (WINDOW && base + first <= chunks[chunk].last - WINDOW));
        };
        const bool ragged = only_some(position0, position0 + PART - 1);
        if (ragged)
            take_out_values(taken_out[part], tiles.v, tiles.v_scale, position0, head, n_head_kv);
        if (GROUP == WARP ? ragged : only_some(0, KV_TILE - 1)) // all threads come to a barrier of the block
            part_barrier();
        if (row0 < n_rows && base + position0 <= chunks[chunk].last && !(absent >> slot & 1u)) {
            // Scores.
            float s[HAS][2][2 * OWN];
            u32 p[HAS][4] = {};
            products(s, query, tiles.k, tiles.k_scale, position0, head, n_head_kv);
#pragma unroll
            for (i32 w = 0; w < HAS; w++) {
                float top[OWN];
                bool higher = false;
#pragma unroll
                for (i32 r = 0; r < OWN; r++)
                    top[r] = m[w][r];
#pragma unroll
                for (i32 j = 0; j < 2; j++)
#pragma unroll
                    for (i32 e = 0; e < 2 * OWN; e++) {
                        s[w][j][e] *= factor[w][e / 2];
                        if (sees(base + position0 + 8 * j + column + e % 2, limit[w][e / 2]))
                            top[e / 2] = fmaxf(top[e / 2], s[w][j][e]);
                    }
#pragma unroll
                for (i32 r = 0; r < OWN; r++) {
                    top[r] = fmaxf(top[r], __shfl_xor_sync(FULL_WARP, top[r], 1));
                    top[r] = fmaxf(top[r], __shfl_xor_sync(FULL_WARP, top[r], 2));
                    higher |= top[r] > m[w][r];
                }
                if (__any_sync(FULL_WARP, higher)) {
#pragma unroll
                    for (i32 r = 0; r < OWN; r++) {
                        const float decay = top[r] > m[w][r] ? exp2_fast(m[w][r] - top[r]) : 1.0f;
#pragma unroll
                        for (i32 e = 2 * r; e < 2 * r + 2; e++) {
                            l[w][e] *= decay;
#pragma unroll
                            for (i32 n = 0; n < COLUMNS; n++)
                                o[w][n][e] *= decay;
                        }
                        m[w][r] = top[r];
                    }
                }

                // Probabilities: their places in the products with keys are those that the products with values want.
#pragma unroll
                for (i32 j = 0; j < 2; j++)
#pragma unroll
                    for (i32 r = 0; r < OWN; r++) {
                        float x[2];
#pragma unroll
                        for (i32 e = 0; e < 2; e++) {
                            const bool seen = sees(base + position0 + 8 * j + column + e, limit[w][r]);
                            x[e] = exp2_fast(seen ? s[w][j][2 * r + e] - m[w][r] : -INFINITE) * P_SCALE;
                        }
                        p[w][2 * j + r] = pack_halves(x[0], x[1]);
                    }
                mma_f16(l[w], p[w], 0x3c003c00u, 0x3c003c00u); // times ones
            }

            // Output.
#pragma unroll
            for (i32 n = 0; n < COLUMNS; n += 4) {
                u32 b[4][2];
                value_fragments(b, tiles.v, tiles.v_scale, position0, dimension0 + n * 8, head, n_head_kv);
#pragma unroll
                for (i32 w = 0; w < HAS; w++)
#pragma unroll
                    for (i32 i = 0; i < 4; i++)
                        mma_f16(o[w][n + i], p[w], b[i][0], b[i][1]);
            }
            if (ragged) {
#pragma unroll
                for (i32 i = 0; i < HAS * COLUMNS * 2 * OWN; i++) {
                    const i32 w = i / (COLUMNS * 2 * OWN), n = i / (2 * OWN) % COLUMNS, e = i % (2 * OWN);
                    const i32 dimension = dimension0 + n / 4 * 32 + value_dimension(n % 4, column + e % 2);
                    if (dimension < HEAD_DIM && misses(taken_out[part][dimension], base, position0, limit[w][e / 2]))
                        o[w][n][e] = __uint_as_float(0x7fc00000u);
                }
            }
        }
        if (at.block + 1 == at.end) { // the parts meet
            const i32 split = first_split(chunks[chunk].lowest) + at.split;
            const i32 begin = split * chunks[chunk].blocks * KV_BLOCK;
#pragma unroll
            for (i32 i = 0; i < HAS * OWN; i++) {
                const i32 w = i / OWN, r = i % OWN, row = own0 + 16 * w + 8 * r;
                if (lane % 4 == 0 && share == 0) {
                    part_m[part][row] = m[w][r];
                    part_l[part][row] = l[w][2 * r];
                }
            }
#pragma unroll
            for (i32 n0 = 0; n0 < COLUMNS; n0 += MERGE_COLUMNS) {
#pragma unroll
                for (i32 n = n0; n < n0 + MERGE_COLUMNS; n += 2)
#pragma unroll
                    for (i32 i = 0; i < HAS * OWN; i++) {
                        const i32 w = i / OWN, e = i % OWN * 2;
                        const i32 row = (share * PARTS + part) * MERGE_ROWS + own0 + 16 * w + 4 * e;
                        float* const to = merged + row * MERGE_STRIDE + (n - n0) * 8;
                        if constexpr (Values::BYTES) {
                            *(float4*)(to + 2 * column) =
                                float4{o[w][n][e], o[w][n + 1][e], o[w][n][e + 1], o[w][n + 1][e + 1]};
                        } else {
                            *(float2*)(to + column) = float2{o[w][n][e], o[w][n][e + 1]};
                            *(float2*)(to + 8 + column) = float2{o[w][n + 1][e], o[w][n + 1][e + 1]};
                        }
                    }
                __syncthreads();
                constexpr i32 PIECES = MERGE_ROWS * MERGE_DIMS / 4; // of a share
                for (i32 i = threadIdx.x; i < SHARES * PIECES; i += THREADS) {
                    const i32 of = SHARES == 1 ? 0 : i / PIECES;
                    const i32 row = (i - of * PIECES) / (MERGE_DIMS / 4), dimension = i % (MERGE_DIMS / 4) * 4;
                    const i32 target = of * COLUMNS * 8 + n0 * 8 + dimension;
                    if (begin > row_position[row] || target >= HEAD_DIM)
                        continue;
                    if (WINDOW && split < first_split(row_position[row]))
                        continue;
                    float top = part_m[0][row];
#pragma unroll
                    for (i32 j = 1; j < PARTS; j++)
                        top = fmaxf(top, part_m[j][row]);
                    const float above = top == -INFINITE ? 0.0f : top; // where no block of the split is there
                    float sum = 0.0f;
                    float4 x = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                    for (i32 j = 0; j < PARTS; j++) {
                        const float weight = exp2_fast(part_m[j][row] - above);
                        const float4 y = *(const float4*)(
                            merged + ((of * PARTS + j) * MERGE_ROWS + row) * MERGE_STRIDE + dimension);
                        sum = __fmaf_rn(part_l[j][row], weight, sum);
                        x.x = __fmaf_rn(y.x, weight, x.x);
                        x.y = __fmaf_rn(y.y, weight, x.y);
                        x.z = __fmaf_rn(y.z, weight, x.z);
                        x.w = __fmaf_rn(y.w, weight, x.w);
                    }
                    const i64 pair = (i64)row_head[row] * max_splits + split - first_split(row_position[row]);
                    *(float4*)(partial_o + pair * HEAD_DIM + target) = x;
                    if (target == 0)
                        *(float2*)(partial_ml + pair * 2) = float2{top, sum};
                }
                __syncthreads();
            }
            reset();
        }
        advance(at, n_workers, chunks, n_chunks);
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        if (STAGES == 1) {
            part_barrier();
            load(false, false);
        }
    }
}

// Attention of few rows (at most 8 tokens a launch) over the paged KV cache. Twin: `attention` of
// engine/ops/reference.py, within rounding: sums are split by position. A row's bits depend on its query, its position
// and the cached keys and values that it sees, alone.
//
// -DHEAD_DIM, -DKV_Q8_0 (kv.cuh); -DROWS=8, 16, 32 or 64: so many rows (query heads of a kv head, times tokens) share a
// tile of keys and values; -DSTAGES: tiles of each in flight.
//
// The positions of a sequence are cut into splits, always at the same places (split_begin). A pair of a split and a kv
// head gives each row a maximum m, a sum l and a vector o; combine.cu folds them.
//
// Grid n_workers * K blocks of THREADS, any n_workers; dynamic shared memory
// 2 * STAGES * (KV_TILE_BYTES + KV_TILE_SCALE_BYTES) + 2 * TILE_ROWS * P_STRIDE * 2 bytes. q [T, H, HEAD_DIM] is
// aligned to 16 bytes. partial_o [T, H, max_splits, HEAD_DIM], partial_ml [T, H, max_splits, 2]. A negative
// block in `table` is read as zeros; positions are clamped to the table.
#include "arithmetic.cuh"
#include "kv.cuh"
#include "splits.cuh"

constexpr i32 MAX_TOKENS = 8; // of a launch
constexpr i32 WARPS = ROWS <= 16 ? 4 : 8, THREADS = WARPS * WARP;
constexpr i32 BLOCKS_PER_SM = ROWS <= 16 && HEAD_DIM <= 128 ? 3 : 1; // that registers allow
constexpr i32 TILES = (ROWS + 15) / 16, TILE_ROWS = TILES * 16;
constexpr bool PACKED = ROWS == 8;               // the high and low halves of 8 rows of q make up one row tile
constexpr i32 OWN = PACKED ? 1 : 2;              // rows of a thread in a row tile of scores
constexpr i32 PARTS = WARPS / TILES;             // warps that share a tile's scores,
constexpr i32 PART_TILES = KV_BLOCK / PARTS / 8; // so many times 8 positions each,
constexpr i32 AT_ONCE = PART_TILES < 2 ? 1 : 2;  // this many in interleaved chains of matrix products
constexpr i32 STEPS = (HEAD_DIM + 15) / 16;
constexpr i32 SLICES = (STEPS + WARPS - 1) / WARPS; // of 16 dimensions, of a warp's output
constexpr i32 P_STRIDE = KV_BLOCK + 8;              // halves
constexpr float P_SCALE = 0x1p14f; // keeps probabilities in halves clear of subnormals; cancels in o / l

// --- work ---

// Neighboring tokens of one sequence, as many as fit in ROWS, read its cache together.
struct Chunk {
    i32 first, n, sequence, lowest, last, splits; // first token, tokens; smallest, largest position; splits up to that
};

// What a worker visits: splits worker, worker + n_workers ... of the chunks' splits in a row, block by block.
struct Cursor {
    i32 chunk, split, block, end;
};

DEVICE void seek(Cursor& at, const Chunk* chunks, i32 n_chunks) {
    while (at.chunk < n_chunks && at.split >= chunks[at.chunk].splits)
        at.split -= chunks[at.chunk++].splits;
    if (at.chunk < n_chunks) {
        at.block = split_begin(at.split);
        at.end = min(split_begin(at.split + 1), chunks[at.chunk].last / KV_BLOCK + 1);
    }
}

DEVICE void advance(Cursor& at, i32 n_workers, const Chunk* chunks, i32 n_chunks) {
    if (++at.block == at.end) {
        at.split += n_workers;
        seek(at, chunks, n_chunks);
    }
}

DEVICE i32 find_chunks(Chunk* chunks, const i32* sequence, const i32* positions, i32 T, i32 group, i32 max_blocks) {
    i32 sequence_of[MAX_TOKENS], position_of[MAX_TOKENS], n = 0;
#pragma unroll
    for (i32 t = 0; t < MAX_TOKENS; t++)
        if (t < T) {
            sequence_of[t] = sequence[t];
            position_of[t] = clamped_position(positions[t], max_blocks);
        }
#pragma unroll
    for (i32 t = 0; t < MAX_TOKENS; t++) {
        if (t >= T)
            break;
        const i32 position = position_of[t];
        if (t > 0 && sequence_of[t] == chunks[n - 1].sequence && (chunks[n - 1].n + 1) * group <= ROWS) {
            chunks[n - 1].n++;
            chunks[n - 1].lowest = min(chunks[n - 1].lowest, position);
            chunks[n - 1].last = max(chunks[n - 1].last, position);
        } else {
            chunks[n++] = {t, 1, sequence_of[t], position, position, 0};
        }
    }
    for (i32 i = 0; i < n; i++)
        chunks[i].splits = split_of(chunks[i].last / KV_BLOCK) + 1;
    return n;
}

// --- queries: each a sum of two halves, after an exact scaling that brings the row's largest element near 1 ---

struct Query {
    // Row operands of mma_f16. Elements 2 * second and 1 + 2 * second are of the thread's rows; PACKED: of the high and
    // of the low halves of its row.
    u32 high[STEPS][4], low[PACKED ? 1 : STEPS][4];
    float factor[OWN]; // from products to scores
};

DEVICE float2 query_pair(const float* row, i32 dimension) {
    return row && dimension < HEAD_DIM ? *(const float2*)(row + dimension) : float2{0.0f, 0.0f};
}

DEVICE void load_query(Query& query, const float* const (&rows)[OWN], float scale) {
    const i32 c = threadIdx.x % 4;
#pragma unroll
    for (i32 r = 0; r < OWN; r++) {
        u32 top = 0;
#pragma unroll
        for (i32 i = 0; i < 2 * STEPS; i++) {
            const float2 x = query_pair(rows[r], i / 2 * 16 + key_dimension(c, i % 2));
            top = max(top, max(__float_as_uint(x.x) & 0x7fffffffu, __float_as_uint(x.y) & 0x7fffffffu));
        }
        top = max(top, __shfl_xor_sync(FULL_WARP, top, 1));
        top = max(top, __shfl_xor_sync(FULL_WARP, top, 2));
        const i32 exponent = min(max((i32)(top >> 23), 1), 253);
        const float down = __int_as_float((254 - exponent) << 23);
        query.factor[r] = __int_as_float(exponent << 23) * scale;
#pragma unroll
        for (i32 i = 0; i < 2 * STEPS; i++) {
            const float2 x = query_pair(rows[r], i / 2 * 16 + key_dimension(c, i % 2));
            const float a = x.x * down, b = x.y * down;
            const u32 high = pack_halves(a, b);
            const u32 low = pack_halves(a - half_to_float((u16)high), b - half_to_float((u16)(high >> 16)));
            query.high[i / 2][r + i % 2 * 2] = high;
            (PACKED ? query.high[i / 2][1 + i % 2 * 2] : query.low[i / 2][r + i % 2 * 2]) = low;
        }
    }
}

// Scores, before the row's factor, of the thread's rows against 8 * AT_ONCE positions, for s[first] and on:
// s[.][2 * row + i] is for position 2 (lane % 4) + i of 8.
DEVICE void products(float (&s)[PART_TILES][2 * OWN], i32 first, const Query& query, const u8* keys, const u8* scales,
                     i32 position, i32 head, i32 n_head_kv) {
#if KV_Q8_0
#pragma unroll
    for (i32 t = 0; t < AT_ONCE; t++)
#pragma unroll
        for (i32 e = 0; e < 2 * OWN; e++)
            s[first + t][e] = 0.0f;
#else
    float high[AT_ONCE][2][4] = {}, low[AT_ONCE][2][4] = {}; // even and odd steps
#endif
#pragma unroll
    for (i32 step0 = 0; step0 < STEPS; step0 += KEY_STEPS) {
        u32 b[AT_ONCE][KEY_STEPS][2];
#pragma unroll
        for (i32 t = 0; t < AT_ONCE; t++)
            key_fragments(b[t], keys, position + 8 * t, step0 * 16);
#if KV_Q8_0
#pragma unroll
        for (i32 i = 0; i < KEY_STEPS && step0 + i < STEPS; i += 2) {
            float high[AT_ONCE][4] = {}, low[AT_ONCE][4] = {};
#pragma unroll
            for (i32 j = i; j < i + 2; j++)
#pragma unroll
                for (i32 t = 0; t < AT_ONCE; t++) {
                    mma_f16(high[t], query.high[step0 + j], b[t][j][0], b[t][j][1]);
                    if (!PACKED)
                        mma_f16(low[t], query.low[step0 + j], b[t][j][0], b[t][j][1]);
                }
#pragma unroll
            for (i32 t = 0; t < AT_ONCE; t++) {
                float d[2];
#pragma unroll
                for (i32 j = 0; j < 2; j++)
                    d[j] = half_to_float(kv_scale_bits(scales, position + 8 * t + threadIdx.x % 4 * 2 + j,
                                                       (step0 + i) / 2, head, n_head_kv));
#pragma unroll
                for (i32 e = 0; e < 2 * OWN; e++)
                    s[first + t][e] =
                        __fmaf_rn(high[t][e] + (PACKED ? high[t][e + 2] : low[t][e]), d[e % 2], s[first + t][e]);
            }
        }
#else
#pragma unroll
        for (i32 i = 0; i < KEY_STEPS && step0 + i < STEPS; i++)
#pragma unroll
            for (i32 t = 0; t < AT_ONCE; t++) {
                mma_f16(high[t][i], query.high[step0 + i], b[t][i][0], b[t][i][1]);
                if (!PACKED)
                    mma_f16(low[t][i], query.low[step0 + i], b[t][i][0], b[t][i][1]);
            }
#endif
    }
#if !KV_Q8_0
#pragma unroll
    for (i32 t = 0; t < AT_ONCE; t++)
#pragma unroll
        for (i32 e = 0; e < 2 * OWN; e++)
            s[first + t][e] = (high[t][0][e] + high[t][1][e]) +
                              (PACKED ? high[t][0][e + 2] + high[t][1][e + 2] : low[t][0][e] + low[t][1][e]);
#endif
}

// --- values that are not finite ---

// Zero times infinity is NaN, so a value that some row must not see spoils that row in a matrix product. In a block
// with positions that only some rows see, such values become zeros first, and the rows that do see them NaN later.
// first[dimension] is the first such position, or KV_BLOCK.
DEVICE void take_out_values(u8* first, u8* tile, u8* scales, i32 head, i32 n_head_kv) {
    for (i32 dimension = threadIdx.x; dimension < HEAD_DIM; dimension += THREADS) {
        i32 found = KV_BLOCK;
        for (i32 position = KV_BLOCK - 1; position >= 0; position--) {
#if KV_Q8_0
            i8* const value = (i8*)tile + position * KV_STRIDE + dimension;
            const float d = half_to_float(kv_scale_bits(scales, position, dimension / 32, head, n_head_kv));
            if ((float_to_half(d * (float)*value) & 0x7c00u) == 0x7c00u) {
                found = position;
                *value = 0;
            }
            __syncwarp(); // a warp has all dimensions of a scale, which is not finite for all of them or for none
            if (dimension % 32 == 0 && !(fabsf(d) < INFINITE))
                set_kv_scale(scales, position, dimension / 32, head, n_head_kv, 0);
            __syncwarp();
#else
            u16* const value = (u16*)(tile + position * KV_STRIDE) + dimension;
            if ((*value & 0x7c00u) == 0x7c00u) {
                found = position;
                *value = 0;
            }
#endif
        }
        first[dimension] = (u8)found;
    }
}

// --- kernels ---

// Per stage of 64 positions: a warp computes scores of one row tile against 64 / PARTS positions; the maxima meet in
// shared memory; probabilities go there as sums of two halves; then a warp computes SLICES slices of o for all rows.
KERNEL __launch_bounds__(THREADS, BLOCKS_PER_SM)
attention_splits(const float* q, const u8* k, const u8* v, const u16* k_scale, const u16* v_scale, const i32* table,
                 const i32* sequence, const i32* positions, i32 T, i32 n_head, i32 n_head_kv, i32 n_sequences,
                 i32 max_blocks, i32 max_splits, float scale, float* partial_o, float* partial_ml) {
    DYNAMIC_SHARED(u8, memory);
    __shared__ Chunk chunks[MAX_TOKENS];
    __shared__ i32 found_chunks;
    __shared__ i32 row_head[TILE_ROWS], row_position[TILE_ROWS]; // t * H + h, largest position seen; -1 if unused
    __shared__ float part_max[TILE_ROWS][PARTS], row_decay[TILE_ROWS];
    __shared__ u8 first_taken_out[HEAD_DIM];
    constexpr i32 SLOT = KV_TILE_BYTES + KV_TILE_SCALE_BYTES;
    u8* const key_tiles = memory;
    u8* const value_tiles = memory + STAGES * SLOT;
    u16* const p_high = (u16*)(memory + 2 * STAGES * SLOT); // [TILE_ROWS, P_STRIDE]
    u16* const p_low = p_high + TILE_ROWS * P_STRIDE;

    const i32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const i32 head = blockIdx.x % n_head_kv, group = n_head / n_head_kv;
    const i32 worker = blockIdx.x / n_head_kv, n_workers = gridDim.x / n_head_kv;

    // With one sequence, where to start is known before its length is.
    const bool alone = n_sequences == 1 && worker < max_splits;
    const i32 first_physical = alone ? table[split_begin(worker)] : -1;
    if (threadIdx.x == 0)
        found_chunks = find_chunks(chunks, sequence, positions, T, group, max_blocks);
    if (HEAD_DIM % 16)
        for (i32 i = 0; i < STAGES; i++)
            zero_kv_padding<THREADS>(key_tiles + i * SLOT);
    __syncthreads();
    const i32 n_chunks = found_chunks;

    // The loading side runs ahead: keys of stage i + STAGES follow the last use of the keys of stage i, and values of
    // stage i + STAGES - 1 that of the values of stage i - 1.
    Cursor loading = {0, worker, 0, 0};
    seek(loading, chunks, n_chunks);
    const auto physical_block = [&]() {
        return loading.chunk < n_chunks ? table[(i64)chunks[loading.chunk].sequence * max_blocks + loading.block] : -1;
    };
    i32 next_physical = alone && loading.chunk == 0 ? first_physical : physical_block(), physical = -1, valid = 0;
    i32 key_slot = 0, value_slot = 0;
    const auto copy_keys = [&]() {
        physical = next_physical;
        if (loading.chunk < n_chunks) {
            valid = physical < 0 ? 0 : chunks[loading.chunk].last + 1 - loading.block * KV_BLOCK;
            physical = max(physical, 0);
            u8* const tile = key_tiles + key_slot * SLOT;
            copy_kv_tile<THREADS>(tile, tile + KV_TILE_BYTES, k, k_scale, physical, valid, head, n_head_kv);
            advance(loading, n_workers, chunks, n_chunks);
            next_physical = physical_block();
        }
        copies_commit();
        key_slot = key_slot + 1 == STAGES ? 0 : key_slot + 1;
    };
    const auto copy_values = [&]() {
        if (physical >= 0) {
            u8* const tile = value_tiles + value_slot * SLOT;
            copy_kv_tile<THREADS>(tile, tile + KV_TILE_BYTES, v, v_scale, physical, valid, head, n_head_kv);
        }
        copies_commit();
        value_slot = value_slot + 1 == STAGES ? 0 : value_slot + 1;
    };
#pragma unroll
    for (i32 i = 0; i < STAGES; i++) {
        copy_keys();
        if (i < STAGES - 1)
            copy_values();
    }

    // In the first role (scores) a thread has rows own0 and own0 + 8; in the second (output) two of each row tile.
    const i32 tile = warp % TILES, part = warp / TILES, own0 = tile * 16 + lane / 4;
    const i32 column = lane % 4 * 2;
    Query query;
    i32 limit[OWN] = {}, n_rows = 0;
    float m[OWN] = {};
    float o[TILES][SLICES][2][4], l[TILES][4]; // l in the last warp only
    const auto reset = [&]() {
#pragma unroll
        for (i32 r = 0; r < OWN; r++)
            m[r] = -INFINITE;
#pragma unroll
        for (i32 i = 0; i < TILES; i++)
#pragma unroll
            for (i32 e = 0; e < 4; e++) {
                l[i][e] = 0.0f;
#pragma unroll
                for (i32 j = 0; j < 2 * SLICES; j++)
                    o[i][j / 2][j % 2][e] = 0.0f;
            }
    };
    reset();
    Cursor at = {0, worker, 0, 0};
    seek(at, chunks, n_chunks);
    for (i32 slot = 0, chunk = -1; at.chunk < n_chunks; slot = slot + 1 == STAGES ? 0 : slot + 1) {
        if (at.chunk != chunk) {
            chunk = at.chunk;
            n_rows = chunks[chunk].n * group;
            __syncthreads();
            if (threadIdx.x < TILE_ROWS) {
                const i32 row = threadIdx.x, t = chunks[chunk].first + row / group;
                row_head[row] = row < n_rows ? t * n_head + head * group + row % group : -1;
                row_position[row] = row < n_rows ? clamped_position(positions[t], max_blocks) : -1;
            }
            __syncthreads();
            const float* rows[OWN];
#pragma unroll
            for (i32 r = 0; r < OWN; r++) {
                const i32 row = row_head[own0 + 8 * r];
                rows[r] = row < 0 ? nullptr : q + (i64)row * HEAD_DIM;
                limit[r] = row_position[own0 + 8 * r];
            }
            load_query(query, rows, scale);
        }

        // Scores.
        copies_wait<2 * (STAGES - 1)>();
        __syncthreads();
        copy_values();
        float s[PART_TILES][2 * OWN];
        const i32 position0 = part * (KV_BLOCK / PARTS);
        const bool busy = tile * 16 < n_rows;
        if (busy) {
            float top[OWN];
#pragma unroll
            for (i32 r = 0; r < OWN; r++)
                top[r] = m[r];
            const u8* const keys = key_tiles + slot * SLOT;
#pragma unroll
            for (i32 j = 0; j < PART_TILES; j++) {
                if (j % AT_ONCE == 0)
                    products(s, j, query, keys, keys + KV_TILE_BYTES, position0 + 8 * j, head, n_head_kv);
#pragma unroll
                for (i32 e = 0; e < 2 * OWN; e++) {
                    s[j][e] *= query.factor[e / 2];
                    if (at.block * KV_BLOCK + position0 + 8 * j + column + e % 2 <= limit[e / 2])
                        top[e / 2] = fmaxf(top[e / 2], s[j][e]);
                }
            }
#pragma unroll
            for (i32 r = 0; r < OWN; r++) {
                top[r] = fmaxf(top[r], __shfl_xor_sync(FULL_WARP, top[r], 1));
                top[r] = fmaxf(top[r], __shfl_xor_sync(FULL_WARP, top[r], 2));
                if (lane % 4 == 0)
                    part_max[own0 + 8 * r][part] = top[r];
            }
        }
        __syncthreads();

        // Probabilities.
        copy_keys();
        if (busy) {
#pragma unroll
            for (i32 r = 0; r < OWN; r++) {
                const i32 row = own0 + 8 * r;
                float top = part_max[row][0];
#pragma unroll
                for (i32 i = 1; i < PARTS; i++)
                    top = fmaxf(top, part_max[row][i]);
                if (part == 0 && lane % 4 == 0)
                    row_decay[row] = exponential(m[r] - top);
                m[r] = top;
#pragma unroll
                for (i32 j = 0; j < PART_TILES; j++) {
                    float p[2];
#pragma unroll
                    for (i32 e = 0; e < 2; e++) {
                        const bool seen = at.block * KV_BLOCK + position0 + 8 * j + column + e <= limit[r];
                        p[e] = seen ? exponential(s[j][2 * r + e] - top) * P_SCALE : 0.0f;
                    }
                    const u32 high = pack_halves(p[0], p[1]);
                    const i32 i = row * P_STRIDE + position0 + 8 * j + column;
                    *(u32*)(p_high + i) = high;
                    *(u32*)(p_low + i) =
                        pack_halves(p[0] - half_to_float((u16)high), p[1] - half_to_float((u16)(high >> 16)));
                }
            }
        }
        copies_wait<2 * (STAGES - 1) + 1>();
        __syncthreads();

        // Output.
        u8* const values = value_tiles + slot * SLOT;
        const bool ragged = n_rows > group && at.block * KV_BLOCK + KV_BLOCK - 1 > chunks[chunk].lowest;
        if (ragged) {
            take_out_values(first_taken_out, values, values + KV_TILE_BYTES, head, n_head_kv);
            __syncthreads();
        }
#pragma unroll
        for (i32 i = 0; i < TILES; i++)
            if (i * 16 < n_rows) {
                const float decay[2] = {row_decay[i * 16 + lane / 4], row_decay[i * 16 + lane / 4 + 8]};
#pragma unroll
                for (i32 e = 0; e < 4; e++) {
                    l[i][e] *= decay[e / 2];
#pragma unroll
                    for (i32 j = 0; j < 2 * SLICES; j++)
                        o[i][j / 2][j % 2][e] *= decay[e / 2];
                }
            }
#pragma unroll
        for (i32 position = 0; position < KV_BLOCK; position += 32) {
            u32 b[SLICES][2][2][2];
#pragma unroll
            for (i32 j = 0; j < SLICES; j++)
                if (warp * SLICES + j < STEPS)
                    value_fragments(b[j], values, values + KV_TILE_BYTES, position, (warp * SLICES + j) * 16, head,
                                    n_head_kv);
#pragma unroll
            for (i32 i = 0; i < TILES; i++)
                if (i * 16 < n_rows) {
#pragma unroll
                    for (i32 step = 0; step < 2; step++) {
                        const i32 from = (i * 16 + lane % 16) * P_STRIDE + position + 16 * step + lane / 16 * 8;
                        u32 high[4], low[4];
                        load_matrix4(high, p_high + from);
                        load_matrix4(low, p_low + from);
#pragma unroll
                        for (i32 j = 0; j < SLICES; j++)
                            if (warp * SLICES + j < STEPS) {
                                mma_f16(o[i][j][0], high, b[j][step][0][0], b[j][step][0][1]);
                                mma_f16(o[i][j][1], high, b[j][step][1][0], b[j][step][1][1]);
                                mma_f16(o[i][j][0], low, b[j][step][0][0], b[j][step][0][1]);
                                mma_f16(o[i][j][1], low, b[j][step][1][0], b[j][step][1][1]);
                            }
                        if (warp == WARPS - 1) { // times ones
                            mma_f16(l[i], high, 0x3c003c00u, 0x3c003c00u);
                            mma_f16(l[i], low, 0x3c003c00u, 0x3c003c00u);
                        }
                    }
                }
        }

        if (ragged) {
#pragma unroll
            for (i32 i = 0; i < TILES * SLICES * 8; i++) {
                const i32 e = i % 4, n = i / 4 % 2, j = i / 8 % SLICES;
                const i32 row = i / 8 / SLICES * 16 + e / 2 * 8 + lane / 4, c = column + e % 2;
                const i32 dimension = (warp * SLICES + j) * 16 + (KV_Q8_0 ? 2 * c + n : 8 * n + c);
                if (dimension < HEAD_DIM && first_taken_out[dimension] < KV_BLOCK &&
                    at.block * KV_BLOCK + first_taken_out[dimension] <= row_position[row])
                    o[i / 8 / SLICES][j][n][e] = __uint_as_float(0x7fc00000u);
            }
        }

        if (at.block + 1 == at.end) {
            const i32 begin = split_begin(at.split) * KV_BLOCK;
#pragma unroll
            for (i32 r = 0; r < OWN; r++)
                if (part == 0 && lane % 4 == 0 && begin <= limit[r])
                    partial_ml[((i64)row_head[own0 + 8 * r] * max_splits + at.split) * 2] = m[r];
#pragma unroll
            for (i32 i = 0; i < 2 * TILES; i++) {
                const i32 row = i * 8 + lane / 4, e = i % 2 * 2;
                if (begin > row_position[row])
                    continue;
                const i64 pair = (i64)row_head[row] * max_splits + at.split;
                if (warp == WARPS - 1 && lane % 4 == 0)
                    partial_ml[pair * 2 + 1] = l[i / 2][e];
#pragma unroll
                for (i32 j = 0; j < SLICES; j++) {
                    const float(&x)[2][4] = o[i / 2][j];
                    const i32 slice = (warp * SLICES + j) * 16;
                    float* const to = partial_o + pair * HEAD_DIM + slice;
#if KV_Q8_0
                    if (slice < HEAD_DIM)
                        *(float4*)(to + 2 * column) = float4{x[0][e], x[1][e], x[0][e + 1], x[1][e + 1]};
#else
                    if (slice < HEAD_DIM)
                        *(float2*)(to + column) = float2{x[0][e], x[0][e + 1]};
                    if (slice + 8 < HEAD_DIM)
                        *(float2*)(to + 8 + column) = float2{x[1][e], x[1][e + 1]};
#endif
                }
            }
            reset();
        }
        advance(at, n_workers, chunks, n_chunks);
    }
}

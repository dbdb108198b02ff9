// Causal attention of many rows over a paged KV cache, on tensor cores (prefill).
//
// Twin: reference.attention, within an NMSE bound (q is rounded to halves, and so are the probabilities).
// Macros: HEAD_DIM (multiple of 8, at most 256; or 384 or 512), GROUP (query heads of a kv head, at most 64 and ROWS),
// K_TYPE and V_TYPE (kv_types.cuh; HEAD_DIM a multiple of 32 but for f16), WINDOW (a row sees so many last positions;
// 0: all), GATE and GATE_BY_HEAD (gate.cuh), HOMES (homes.cuh).
//
// flash: a block of 4 warps computes ROWS rows of one kv head, each warp 16 M_TILES of them, or where HEAD_DIM > 256 two
// warps half of the output's dimensions each (both compute the scores). A row is a pair of a token and a query head of the
// group, so a tile of keys and values is loaded once for the whole group. Tiles start at multiples of TILE positions,
// and a row passes over those it does not see without a change, so its bits do not depend on the rows it shares a block
// with. Scores are in units of log2: q is multiplied by scale * log2(e) before it is rounded.
// q [T, H, HEAD_DIM]; k, v by slot [n_slots, K, HEAD_DIM], halves, or others with scales [n_slots, K, HEAD_DIM / 32];
// block_table [n_sequence, max_blocks]; sequence, positions [T], in spans of one sequence with positions that ascend by
// one; out [T, H * HEAD_DIM]. Slots past the last position of a span are not read, nor tiles before the window of its
// first row; tiles of a negative block are passed over. A NaN in a value reaches every row that sees it, and may reach
// other rows of the same block (0 * NaN). q 32-byte, the rest 16-byte aligned. gate [T, H] or, unless GATE_BY_HEAD, [T,
// H * HEAD_DIM].
// Grid (K, ceil(T / TOKENS), n_split), 128 threads; dynamic shared memory Q_BYTES + TILES_BYTES + K_RAW_BYTES +
// V_RAW_BYTES + 2 * SCALES for each of keys and values that have such (at most 96 KB).
// Split z covers the KV blocks from z * split_blocks on. With `partial` it is given unnormalized, partial
// [n_split, T, H, HEAD_DIM], stats [n_split, T, H, 2] (maximum, sum); rows that see none of a split leave it as it is.
//
// flash_combine: joins the splits that a row sees, in order. A warp a row: grid ceil(T * H / 4), 128 threads.
#include "gate.cuh"
#include "homes.cuh"
#include "kv_types.cuh"

#ifndef WINDOW
#define WINDOW 0
#endif

#define KV_BLOCK 64
#define THREADS 128
#define M_TILES (HEAD_DIM <= 128 ? 2 : 1)      // of 16 rows, a warp; two halve the reads of k and v fragments
#define SHARES (HEAD_DIM <= 256 ? 1 : 2)       // of the output's dimensions
#define ROWS (64 * M_TILES / SHARES)
#define TOKENS (ROWS / GROUP)
#define TILE (HEAD_DIM <= 128 ? 64 : HEAD_DIM <= 256 ? 32 : 16) // positions
#define K_STEPS ((HEAD_DIM + 15) / 16)
#define O_STEPS (K_STEPS / SHARES)             // of a warp's output
#define N_STEPS (TILE / 16)
#define CHUNKS (2 * K_STEPS)                   // pieces of 16 bytes in a row of halves
#define STRIDE ((HEAD_DIM + 63) / 64 * 128)    // bytes of a row in shared memory
#define TILE_BYTES (TILE * STRIDE)
#define Q_BYTES (ROWS * STRIDE)
#define SCALES (TILE * (HEAD_DIM / 32))        // of a tile that has such
#define MY_SCALES (SCALES ? (SCALES + THREADS - 1) / THREADS : 1)
#define MINUS_INFINITY __int_as_float(0xff800000)

// Halves come straight to their tiles, of which there are two; others are dequantized from raw bytes to their one tile.
constexpr bool K_RAW = K_TYPE != KV_F16, V_RAW = V_TYPE != KV_F16;
constexpr int K_RAW_BYTES = K_RAW ? TILE * KV_ROW_BYTES<K_TYPE, HEAD_DIM> : 0;
constexpr int V_RAW_BYTES = V_RAW ? TILE * KV_ROW_BYTES<V_TYPE, HEAD_DIM> : 0;
constexpr int TILES_BYTES = (4 - K_RAW - V_RAW) * TILE_BYTES;
constexpr int K_STAGE = 2 * TILE_BYTES, V_STAGE = (K_RAW ? 1 : 2) * TILE_BYTES; // from a tile to the second

// Rows are swizzled: ldmatrix reads the same chunk of 8 consecutive rows, which then lie in 8 groups of banks.
DEVICE int swizzled(int row, int chunk) { return row * STRIDE + ((chunk ^ (row & 7)) << 4); }

// The same for chunk 2 * step + (x >> 4 ^ row & 7), where x is a lane's and step a constant of an unrolled loop.
DEVICE int fragment_offset(int x, int step) { return ((step * 32) & ~127) + (((step * 32) & 127) ^ x); }

// Start to copy the `TILE` rows of a tile, chunks of 16 bytes, `chunks` each of which the first `real` are there. Rows
// from n_valid on, and chunks that are not there, become zeros, so that 0 * v is 0. `place` gives a chunk's address.
template <int chunks, int real, class Place>
DEVICE void copy_tile(const u8* rows, size_t row_bytes, int n_valid, Place place) {
    const int copies = (TILE * chunks + THREADS - 1) / THREADS;
    if (THREADS % chunks == 0 && real == chunks) {  // a thread copies a column
        const int row = threadIdx.x / chunks, chunk = threadIdx.x % chunks, step = THREADS / chunks;
        rows += row * row_bytes + chunk * 16;
        row_bytes *= step;
        if (n_valid >= TILE) {
#pragma unroll
            for (int j = 0; j < copies; j++) copy16_async(place(row + j * step, chunk), rows + j * row_bytes);
            return;
        }
#pragma unroll 1
        for (int j = 0; j < copies; j++)
            copy16_async_if(place(row + j * step, chunk), rows + j * row_bytes, row + j * step < n_valid);
        return;
    }
#pragma unroll
    for (int j = 0; j < copies; j++) {
        int i = threadIdx.x + j * THREADS, row = i / chunks, chunk = i % chunks;
        if (TILE * chunks % THREADS != 0 && i >= TILE * chunks) break;
        copy16_async_if(place(row, chunk), rows + row * row_bytes + chunk * 16, row < n_valid && chunk < real);
    }
}

// This thread's scales of a tile; 0 for rows that do not count.
template <int blocks>
DEVICE void load_scales(u16 (&d)[MY_SCALES], const u16* scales, int stride, size_t slot, int n_valid) {
#pragma unroll
    for (int j = 0; j < MY_SCALES; j++) {
        int i = threadIdx.x + j * THREADS, row = i / blocks;
        d[j] = row < min(n_valid, TILE) ? scales[(slot + row) * stride + i % blocks] : (u16)0;
    }
}

DEVICE void store_scales(u16* shared, const u16 (&d)[MY_SCALES]) {
#pragma unroll
    for (int j = 0; j < MY_SCALES; j++)
        if (SCALES % THREADS == 0 || threadIdx.x + j * THREADS < SCALES) shared[threadIdx.x + j * THREADS] = d[j];
}

// To halves: 1024 + (q + 128) by its bits, minus 1152, times the scale. Nibbles become such bytes first.
template <int type>
DEVICE void dequantize_tile(u8* shared, const u8* raw, const u16* scales) {
#pragma unroll
    for (int j = 0; j < TILE * HEAD_DIM / 8 / THREADS; j++) {
        int i = threadIdx.x + j * THREADS, row = i / (HEAD_DIM / 8), chunk = i % (HEAD_DIM / 8);
        constexpr bool PACKED = type == KV_Q4_0;
        const int shift = i % 4 / 2 * 4;
        uint2 bytes = *(const uint2*)(raw + (PACKED ? i / 4 * 16 + i % 2 * 8 : i * 8));
        u32 scale = scales[i / 4] * 0x10001u;
        u32 low = PACKED ? nibbles_to_flipped(bytes.x, shift) : bytes.x ^ 0x80808080u;
        u32 high = PACKED ? nibbles_to_flipped(bytes.y, shift) : bytes.y ^ 0x80808080u;
        uint4 halves;
        halves.x = half2_mul(half2_add(__byte_perm(low, 0x64646464u, 0x4140), 0xe480e480u), scale);
        halves.y = half2_mul(half2_add(__byte_perm(low, 0x64646464u, 0x4342), 0xe480e480u), scale);
        halves.z = half2_mul(half2_add(__byte_perm(high, 0x64646464u, 0x4140), 0xe480e480u), scale);
        halves.w = half2_mul(half2_add(__byte_perm(high, 0x64646464u, 0x4342), 0xe480e480u), scale);
        *(uint4*)(shared + swizzled(row, chunk)) = halves;
    }
}

// Start to copy the rows of a tile from the cache, to the tile, `offset` bytes from `tiles`, or to raw bytes.
template <int type, int offset>
DEVICE void copy_rows(u8* tiles, u8* raw, const u8* rows, size_t row_bytes, int n_valid) {
    if constexpr (type == KV_F16) {
        auto place = [&](int row, int chunk) { return tiles + offset + swizzled(row, chunk); };
        copy_tile<CHUNKS, HEAD_DIM / 8>(rows, row_bytes, n_valid, place);
    } else {
        constexpr int own_bytes = KV_ROW_BYTES<type, HEAD_DIM>, chunks = own_bytes / 16;
        auto place = [&](int row, int chunk) { return raw + row * own_bytes + chunk * 16; };
        copy_tile<chunks, chunks>(rows, row_bytes, n_valid, place);
    }
}

// Queries of the block to shared memory as halves; rows that are none become zeros.
DEVICE void load_queries(u8* shared, const float* q, int first_token, int n_tokens, int kv_head, int n_heads,
                         float factor) {
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
        int row = i / CHUNKS, chunk = i % CHUNKS, token = first_token + row / GROUP;
        uint4 halves = make_uint4(0, 0, 0, 0);
        if (row < TOKENS * GROUP && token < n_tokens && chunk * 8 < HEAD_DIM) {
            size_t head = (size_t)token * n_heads + kv_head * GROUP + row % GROUP;
            const float4* from = (const float4*)(q + head * HEAD_DIM + chunk * 8);
            float4 a = from[0], b = from[1];
            halves.x = pack_halves(a.x * factor, a.y * factor);
            halves.y = pack_halves(a.z * factor, a.w * factor);
            halves.z = pack_halves(b.x * factor, b.y * factor);
            halves.w = pack_halves(b.z * factor, b.w * factor);
        }
        *(uint4*)(shared + swizzled(row, chunk)) = halves;
    }
}

// The end, at most `end`, of the span that begins with token `first`: one sequence, ascending positions.
DEVICE int end_of_span(const i32* sequence, const i32* positions, int first, int end) {
    int inside = first;  // `end` is not inside, or the end of all
    const int own = sequence[first], position = positions[first];
    while (inside + 1 < end) {
        int middle = (inside + end) / 2;
        if (sequence[middle] == own && positions[middle] - position == middle - first)
            inside = middle;
        else
            end = middle;
    }
    return end;
}

KERNEL __launch_bounds__(THREADS, 2)
    flash(const float* q, const u8* k, const u8* v, const u16* k_scale, const u16* v_scale, const i32* block_table,
          const i32* sequence, const i32* positions, float* out, float* partial, float* stats, float factor,
          i32 n_tokens, i32 n_kv_heads, i32 max_blocks, i32 split_blocks, const float* gate HOME_PARAMETERS) {
    DYNAMIC_SHARED(u8, shared);
    u8* const tiles = shared + Q_BYTES;
    u8 *const k_raw = tiles + TILES_BYTES, *const v_raw = k_raw + K_RAW_BYTES;
    u16 *const k_shared = (u16*)(v_raw + V_RAW_BYTES), *const v_shared = k_shared + (K_RAW ? SCALES : 0);
    u16 k_scales[MY_SCALES], v_scales[MY_SCALES];
    const int lane = threadIdx.x % WARP, first_row = threadIdx.x / WARP / SHARES * (16 * M_TILES);
    const int share = SHARES == 1 ? 0 : threadIdx.x / WARP % SHARES;
    const int kv_head = blockIdx.x, n_heads = n_kv_heads * GROUP;
    // The last tokens see the most: they go first.
    const int block_begin = (gridDim.y - 1 - blockIdx.y) * TOKENS, block_end = min(block_begin + TOKENS, n_tokens);
    const int z_begin = blockIdx.z * split_blocks * (KV_BLOCK / TILE);
    constexpr int K_ROW = KV_ROW_BYTES<K_TYPE, HEAD_DIM>, V_ROW = KV_ROW_BYTES<V_TYPE, HEAD_DIM>;
    const size_t k_bytes = (size_t)n_kv_heads * K_ROW, v_bytes = (size_t)n_kv_heads * V_ROW; // from a slot to the next
    const size_t k_head = (size_t)kv_head * K_ROW, v_head = (size_t)kv_head * V_ROW;
    const int scale_stride = n_kv_heads * (HEAD_DIM / 32), head_scales = kv_head * (HEAD_DIM / 32);

    // Fragments by ldmatrix: this lane's row, and its chunk times 16. The four 8x8 matrices of queries and values are
    // rows 0-7 and 8-15 of a chunk and then those of the next; of keys, both chunks of rows 0-7 and then of rows 8-15.
    const int row_a = lane % 16, x_a = (lane / 16 ^ lane % 8) << 4;
    const int row_b = lane % 8 + lane / 16 * 8, x_b = (lane / 8 % 2 ^ lane % 8) << 4;
    const u8* const q_rows = shared + (first_row + row_a) * STRIDE;

    load_queries(shared, q, block_begin, n_tokens, kv_head, n_heads, factor);

    // One span after the other, nearly always one: rows of another span are computed too and not written.
    for (int span = block_begin; span < block_end;) {
        const int span_end = end_of_span(sequence, positions, span, block_end);
        const int first_position = positions[span], n_positions = first_position + span_end - span;
        const i32* blocks = block_table + (size_t)sequence[span] * max_blocks;
        const int split_begin = WINDOW ? max(z_begin, (first_position - WINDOW + 1) / TILE) : z_begin;
        const int tile_end = min((n_positions + TILE - 1) / TILE, z_begin + split_blocks * (KV_BLOCK / TILE));
        const int this_span = span;
        span = span_end;
        if (split_begin >= tile_end) continue;

        float o[M_TILES][2 * O_STEPS][4], top[M_TILES][2], sum[M_TILES][2];
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            top[m][0] = top[m][1] = MINUS_INFINITY;
            sum[m][0] = sum[m][1] = 0;
#pragma unroll
            for (int n = 0; n < 2 * O_STEPS; n++) o[m][n][0] = o[m][n][1] = o[m][n][2] = o[m][n][3] = 0;
        }

        int next_block = blocks[split_begin * TILE / KV_BLOCK];
        bool loaded = false;  // whether the tile that was to be loaded last is of a block that is there
        // Start to load a tile; the block that the next call needs is looked up ahead.
        auto load = [&](int tile, int stage) {
            loaded = next_block >= 0;
            const CachedBlock block = cached_block(max(next_block, 0), {k, v, k_scale, v_scale} HOME_ARGUMENTS);
            size_t slot = (size_t)block.index * KV_BLOCK + tile * TILE % KV_BLOCK;
            int n_valid = loaded ? n_positions - tile * TILE : 0;
            const u8* k_from = block.in.k + k_head + slot * k_bytes;
            const u8* v_from = block.in.v + v_head + slot * v_bytes;
            copy_rows<K_TYPE, 0>(tiles + stage * K_STAGE, k_raw, k_from, k_bytes, n_valid);
            copy_rows<V_TYPE, TILE_BYTES>(tiles + stage * V_STAGE, v_raw, v_from, v_bytes, n_valid);
            constexpr int of_row = HEAD_DIM / 32;
            if constexpr (K_RAW)
                load_scales<of_row>(k_scales, block.in.k_scale + head_scales, scale_stride, slot, n_valid);
            if constexpr (V_RAW)
                load_scales<of_row>(v_scales, block.in.v_scale + head_scales, scale_stride, slot, n_valid);
            copies_commit();
            if (tile + 1 < tile_end) next_block = blocks[(tile + 1) * TILE / KV_BLOCK];
        };
        __syncthreads();  // the tiles of the span before are no longer read
        load(split_begin, 0);

        for (int tile = split_begin, stage = 0; tile < tile_end; tile++) {
            const bool there = loaded;
            copies_wait<0>();
            if constexpr (K_RAW) store_scales(k_shared, k_scales);
            if constexpr (V_RAW) store_scales(v_shared, v_scales);
            __syncthreads();
            if constexpr (K_RAW) dequantize_tile<K_TYPE>(tiles, k_raw, k_shared);
            if constexpr (V_RAW) dequantize_tile<V_TYPE>(tiles + TILE_BYTES, v_raw, v_shared);
            if constexpr (K_RAW || V_RAW) __syncthreads();
            if (tile + 1 < tile_end) load(tile + 1, K_RAW && V_RAW ? 0 : stage ^ 1);
            const u8* k_rows = tiles + (K_RAW ? 0 : stage * K_STAGE) + row_b * STRIDE;
            const u8* v_rows =
                tiles + (V_RAW ? 0 : stage * V_STAGE) + TILE_BYTES + row_a * STRIDE + share * (O_STEPS * 32);
            if (!K_RAW || !V_RAW) stage ^= 1;
            if (!there) continue;

            // Scores.
            float s[M_TILES][2 * N_STEPS][4];
#pragma unroll
            for (int m = 0; m < M_TILES; m++)
#pragma unroll
                for (int n = 0; n < 2 * N_STEPS; n++) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0;
#pragma unroll
            for (int step = 0; step < K_STEPS; step++) {
                u32 a[M_TILES][4];
#pragma unroll
                for (int m = 0; m < M_TILES; m++)
                    load_matrix4(a[m], q_rows + m * 16 * STRIDE + fragment_offset(x_a, step));
#pragma unroll
                for (int n = 0; n < N_STEPS; n++) {
                    u32 b[4];
                    load_matrix4(b, k_rows + n * 16 * STRIDE + fragment_offset(x_b, step));
#pragma unroll
                    for (int m = 0; m < M_TILES; m++) {
                        mma_f16(s[m][2 * n], a[m], b[0], b[1]);
                        mma_f16(s[m][2 * n + 1], a[m], b[2], b[3]);
                    }
                }
            }

            // Only tiles on the diagonal, and at the beginnings of windows, hold positions that a row of the span must
            // not see.
            if ((tile + 1) * TILE > first_position + 1 || (WINDOW && tile * TILE < n_positions - WINDOW)) {
#pragma unroll
                for (int m = 0; m < M_TILES; m++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        int row = first_row + m * 16 + half * 8 + lane / 4;
                        int seen = first_position + block_begin + row / GROUP - this_span - tile * TILE - lane % 4 * 2;
#pragma unroll
                        for (int n = 0; n < 2 * N_STEPS; n++) {
                            if (n * 8 > seen || (WINDOW && n * 8 <= seen - WINDOW)) s[m][n][2 * half] = MINUS_INFINITY;
                            if (n * 8 + 1 > seen || (WINDOW && n * 8 + 1 <= seen - WINDOW))
                                s[m][n][2 * half + 1] = MINUS_INFINITY;
                        }
                    }
            }

            // Probabilities relative to the largest score so far. A row that has seen nothing yet subtracts 0.
            float keep[M_TILES][2];
            bool kept = true;
#pragma unroll
            for (int m = 0; m < M_TILES; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float largest = top[m][half];
#pragma unroll
                    for (int n = 0; n < 2 * N_STEPS; n++)
                        largest = fmaxf(largest, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
                    largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
                    largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
                    float base = largest == MINUS_INFINITY ? 0.0f : largest;
                    keep[m][half] = exp2_fast(top[m][half] - base);
                    kept = kept && keep[m][half] == 1.0f;
                    top[m][half] = largest;
                    float total = 0;
#pragma unroll
                    for (int n = 0; n < 2 * N_STEPS; n++) {
                        float p0 = exp2_fast(s[m][n][2 * half] - base), p1 = exp2_fast(s[m][n][2 * half + 1] - base);
                        s[m][n][2 * half] = p0;
                        s[m][n][2 * half + 1] = p1;
                        total += p0 + p1;
                    }
                    sum[m][half] = __fmaf_rn(sum[m][half], keep[m][half], total);
                }
            if (!__all_sync(FULL_WARP, kept)) {  // rare once the maxima have settled
#pragma unroll
                for (int m = 0; m < M_TILES; m++)
#pragma unroll
                    for (int n = 0; n < 2 * O_STEPS; n++)
#pragma unroll
                        for (int i = 0; i < 4; i++) o[m][n][i] *= keep[m][i / 2];
            }

            // Values.
#pragma unroll
            for (int n = 0; n < N_STEPS; n++) {
                u32 a[M_TILES][4];
#pragma unroll
                for (int m = 0; m < M_TILES; m++) {
                    a[m][0] = pack_halves(s[m][2 * n][0], s[m][2 * n][1]);
                    a[m][1] = pack_halves(s[m][2 * n][2], s[m][2 * n][3]);
                    a[m][2] = pack_halves(s[m][2 * n + 1][0], s[m][2 * n + 1][1]);
                    a[m][3] = pack_halves(s[m][2 * n + 1][2], s[m][2 * n + 1][3]);
                }
#pragma unroll
                for (int step = 0; step < O_STEPS; step++) {
                    u32 b[4];
                    load_matrix4_transposed(b, v_rows + n * 16 * STRIDE + fragment_offset(x_a, step));
#pragma unroll
                    for (int m = 0; m < M_TILES; m++) {
                        mma_f16(o[m][2 * step], a[m], b[0], b[1]);
                        mma_f16(o[m][2 * step + 1], a[m], b[2], b[3]);
                    }
                }
            }
        }

#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float total = sum[m][half];
                total += __shfl_xor_sync(FULL_WARP, total, 1);
                total += __shfl_xor_sync(FULL_WARP, total, 2);
                int row = first_row + m * 16 + half * 8 + lane / 4, token = block_begin + row / GROUP;
                if (row >= TOKENS * GROUP || token < this_span || token >= span_end) continue;
                size_t head = (size_t)token * n_heads + kv_head * GROUP + row % GROUP;
                float inverse = 1.0f / total;
                float* to = out + head * HEAD_DIM;
                if (partial) {
                    size_t row_of_split = head + (size_t)blockIdx.z * n_tokens * n_heads;
                    inverse = 1;
                    to = partial + row_of_split * HEAD_DIM;
                    if (lane % 4 == 0 && share == 0)
                        *(float2*)(stats + 2 * row_of_split) = make_float2(top[m][half], total);
                }
#pragma unroll
                for (int n = 0; n < HEAD_DIM / 8 / SHARES; n++) {
                    const int dimension = share * (O_STEPS * 16) + n * 8 + lane % 4 * 2;
                    float2 result = make_float2(o[m][n][2 * half] * inverse, o[m][n][2 * half + 1] * inverse);
                    if (GATE && !partial) {
                        result.x = gated(result.x, gate, head, dimension);
                        result.y = gated(result.y, gate, head, dimension + 1);
                    }
                    *(float2*)(to + dimension) = result;
                }
            }
    }
}

KERNEL __launch_bounds__(THREADS)
    flash_combine(const float* partial, const float* stats, const i32* positions, float* out, i32 n_tokens, i32 n_heads,
                  i32 split_blocks, const float* gate) {
    const int row = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const size_t n_rows = (size_t)n_tokens * n_heads;
    if (row >= n_tokens * n_heads) return;
    const int n_split = positions[row / n_heads] / (split_blocks * KV_BLOCK) + 1;

    float top = MINUS_INFINITY;
    for (int z = 0; z < n_split; z++) top = fmaxf(top, stats[2 * (z * n_rows + row)]);
    if (top == MINUS_INFINITY) top = 0;
    float sum = 0;
    for (int z = 0; z < n_split; z++) {
        const float* of = stats + 2 * (z * n_rows + row);
        sum = __fmaf_rn(exp2_fast(of[0] - top), of[1], sum);
    }
    for (int d = lane * 4; d < HEAD_DIM; d += WARP * 4) {
        float4 o = make_float4(0, 0, 0, 0);
#pragma unroll 4
        for (int z = 0; z < n_split; z++) {
            float weight = exp2_fast(stats[2 * (z * n_rows + row)] - top);
            float4 part = *(const float4*)(partial + (z * n_rows + row) * HEAD_DIM + d);
            o.x = __fmaf_rn(weight, part.x, o.x);
            o.y = __fmaf_rn(weight, part.y, o.y);
            o.z = __fmaf_rn(weight, part.z, o.z);
            o.w = __fmaf_rn(weight, part.w, o.w);
        }
        *(float4*)(out + (size_t)row * HEAD_DIM + d) =
            make_float4(gated(o.x / sum, gate, row, d), gated(o.y / sum, gate, row, d + 1),
                        gated(o.z / sum, gate, row, d + 2), gated(o.w / sum, gate, row, d + 3));
    }
}

// The gated delta rule for many tokens, in chunks of 64, with the convolution, the norms and the gates before it.
// Twin: delta, within rounding; all products by tf32.cuh.
//
// In a chunk, with K and Q its normed keys and queries, G the sums of log decays up to each token, D_ij = exp(G_i - G_j)
// for j <= i (0 elsewhere), b the rates and S the state before it (all as matrices with a row a token):
//   U = (I + strictly lower part of b (K K^T) D)^-1 (b (V - exp(G) K S)),    out = exp(G) Q S + (Q K^T) D U,
//   S' = exp(G_last) S + K^T (exp(G_last - G) U)
// (Yang et al., "Parallelizing linear transformers with the delta rule over sequence length" and "Gated Delta
// Networks", 2024.) delta_table cuts the step's sequences in chunks; delta_prepare makes what does not need S, all
// chunks at once; delta_scan walks through the chunks of a head, S in its registers. To bound the scratch memory, the
// last two take turns with the chunks first_chunk .. end_chunk.
//
// -DDK, -DDV: of a head, multiples of 32, at most 128; -DTAPS: of the convolution, 2 or more; -DSTAGES: buffers of
// keys in delta_scan, 1 or 2. Shapes as in engine/ops/delta.py; positions of a sequence ascend by one.
//
// table [max_chunks, 4]: a chunk's first row, its rows (and 256 where its sequence ends with it), its sequence, and
// how it begins; n_chunks [1]. Of each chunk from first_chunk on: keys [H_k, 2, 64, DK] (Q, then K), inverse and
// scores [H_v, 64, 64] (what is inverted above; (Q K^T) D), scalars [H_v, 2, 64] (G, b); rows past the chunk are
// zeros, G excepted. delta_prepare leaves the convolved v in `out`, where delta_scan puts the result.
#include "arithmetic.cuh"
#include "tf32.cuh"

#define CHUNK 64
constexpr i32 THREADS = 256, WARPS = THREADS / WARP, KEPT = TAPS - 1, SLICE = 32;
constexpr i32 PITCH = DK + 8;      // of rows of keys: pairs of columns lie in different banks, and so do columns
constexpr i32 SCORE_PITCH = 68;    // of rows of products of keys
constexpr i32 RESULT_PITCH = 40;   // of rows of a slice of values
constexpr i32 KEY_FLOATS = CHUNK * PITCH;
constexpr i32 HALF_FLOATS = KEY_FLOATS > 2 * CHUNK * SCORE_PITCH ? KEY_FLOATS : 2 * CHUNK * SCORE_PITCH;
constexpr float LOG2_E = 1.4426950408889634f;
enum Begin : i32 { WITHIN = 0, STORED = 1, FRESH = 2 }; // where a chunk's sequence began: before it; here, from a state
                                                        // or from zeros

DEVICE float decay_of(float log) { return exp2_fast(log * LOG2_E); }

// --- chunks ---

KERNEL delta_table(const i32* sequence, const i32* positions, const i32* slots, i32 n_tokens, i32* table,
                   i32 max_chunks, i32* n_chunks) {
    const i32 lane = threadIdx.x; // one warp
    const u32 up_to = FULL_WARP >> (WARP - 1 - lane);
    i32 span = 0, count = 0; // first row of the sequence at hand; chunks so far
    constexpr i32 AHEAD = 8;
    for (i32 begin = 0; begin < n_tokens; begin += AHEAD * WARP) {
        i32 of[AHEAD], previous[AHEAD], next[AHEAD]; // sequences, -1 for a row that is not there
#pragma unroll
        for (i32 i = 0; i < AHEAD; i++) {
            const i32 t = begin + i * WARP + lane;
            const auto at = [&](i32 row) {
                const i32 valid = min(max(row, 0), n_tokens - 1), slot = slots[valid], found = sequence[valid];
                return row == valid && slot >= 0 ? found : -1;
            };
            of[i] = at(t);
            previous[i] = at(t - 1);
            next[i] = at(t + 1);
        }
#pragma unroll
        for (i32 i = 0; i < AHEAD; i++) {
            const i32 t = begin + i * WARP + lane;
            const bool there = of[i] >= 0;
            const u32 starts = __ballot_sync(FULL_WARP, there && of[i] != previous[i]);
            const i32 start = starts & up_to ? t - lane + WARP - 1 - __clz((i32)(starts & up_to)) : span;
            const i32 offset = (t - start) % CHUNK;
            const u32 firsts = __ballot_sync(FULL_WARP, there && offset == 0);
            const i32 chunk = count + __popc(firsts & up_to) - 1;
            if (there && chunk < max_chunks) {
                i32* const to = table + 4 * chunk;
                if (offset == 0) {
                    to[0] = t;
                    to[2] = of[i];
                    to[3] = t != start ? WITHIN : positions[t] == 0 ? FRESH : STORED;
                }
                const bool end = of[i] != next[i];
                if (end || offset == CHUNK - 1)
                    to[1] = offset + 1 + (end ? 256 : 0);
            }
            span = __shfl_sync(FULL_WARP, start, WARP - 1);
            count += __popc(firsts);
        }
    }
    if (lane == 0)
        *n_chunks = min(count, max_chunks);
}

struct Chunk {
    i32 first, n, sequence, begin;
    bool ends;
};

DEVICE Chunk chunk_at(const i32* table, i32 chunk) {
    const i32* const of = table + 4 * chunk;
    return {of[0], of[1] & 255, of[2], of[3], of[1] >= 256};
}

// --- what needs no state ---

// The convolution of a channel, through SiLU: sink(row, value) for the chunk's 64 rows, those past its end included.
template <class Sink>
DEVICE void convolve(const Chunk& chunk, const float* mixed, i64 n_mixed, i32 channel, const float* conv,
                     const float* kept, Sink sink) {
    float window[KEPT], weights[TAPS];
#pragma unroll
    for (i32 j = 0; j < TAPS; j++)
        weights[j] = conv[(i64)channel * TAPS + j];
#pragma unroll
    for (i32 j = 0; j < KEPT; j++)
        window[j] = chunk.begin == FRESH    ? 0.0f
                    : chunk.begin == STORED ? kept[j * n_mixed + channel]
                                            : mixed[(chunk.first - KEPT + j) * n_mixed + channel];
    const float* const from = mixed + chunk.first * n_mixed + channel;
    constexpr i32 AHEAD = 16; // rows that are loaded before anything is stored
#pragma unroll 1
    for (i32 first = 0; first < CHUNK; first += AHEAD) {
        float x[AHEAD];
#pragma unroll
        for (i32 r = 0; r < AHEAD; r++) x[r] = first + r < chunk.n ? from[(first + r) * n_mixed] : 0.0f;
#pragma unroll
        for (i32 r = 0; r < AHEAD; r++) {
            float sum = 0.0f;
#pragma unroll
            for (i32 j = 0; j < KEPT; j++) sum = __fmaf_rn(window[j], weights[j], sum);
            sink(first + r, silu(__fmaf_rn(x[r], weights[KEPT], sum)));
#pragma unroll
            for (i32 j = 0; j < KEPT; j++) window[j] = j + 1 < KEPT ? window[j + 1] : x[r];
        }
    }
}

// Column `column` of (I + lower)^-1, lower [64][64] strictly lower triangular.
DEVICE void invert_column(float (&x)[CHUNK], const float* lower, i32 column) {
#pragma unroll
    for (i32 i = 0; i < CHUNK; i++) {
        float sum[4] = {};
#pragma unroll
        for (i32 j = 0; j < i; j += 4) {
            const float4 l = *(const float4*)(lower + i * CHUNK + j);
            sum[0] = __fmaf_rn(l.x, x[j], sum[0]);
            if (j + 1 < i) sum[1] = __fmaf_rn(l.y, x[j + 1], sum[1]);
            if (j + 2 < i) sum[2] = __fmaf_rn(l.z, x[j + 2], sum[2]);
            if (j + 3 < i) sum[3] = __fmaf_rn(l.w, x[j + 3], sum[3]);
        }
        x[i] = (i == column ? 1.0f : 0.0f) - ((sum[0] + sum[1]) + (sum[2] + sum[3]));
    }
}

// A K head's share of a chunk, and that of the V heads which read it. Grid (H_k, chunks), block 256, shared memory
// 2 * HALF_FLOATS floats.
KERNEL __launch_bounds__(THREADS)
    delta_prepare(const float* mixed, const float* beta, const float* alpha, const float* conv, const float* dt_bias,
                  const float* a, float eps, const float* conv_state, const i32* states, const i32* table,
                  const i32* n_chunks, i32 first_chunk, i32 n_heads, float* keys, float* inverse, float* scores,
                  float* scalars, float* out) {
    DYNAMIC_SHARED(float, shared);
    __shared__ float sums[2][CHUNK], rates[2][CHUNK]; // of a pair of V heads: G and b
    const i32 thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP, g = lane / 4, c = lane % 4;
    const i32 n_head_k = gridDim.x, key_head = blockIdx.x, group = n_heads / n_head_k, at = blockIdx.y;
    if (first_chunk + at >= *n_chunks)
        return;
    const Chunk chunk = chunk_at(table, first_chunk + at);
    const i64 n_mixed = 2 * n_head_k * DK + n_heads * DV;
    const float* const kept = conv_state + (i64)states[2 * chunk.sequence] * KEPT * n_mixed;
    float *const q = shared, *const k = shared + HALF_FLOATS;

    for (i32 i = thread; i < 2 * DK; i += THREADS) {
        float* const to = i < DK ? q + i : k + i - DK;
        const i32 channel = i < DK ? key_head * DK + i : (n_head_k + key_head) * DK + i - DK;
        convolve(chunk, mixed, n_mixed, channel, conv, kept,
                 [&](i32 r, float y) { to[r * PITCH] = r < chunk.n ? y : 0.0f; });
    }
    for (i32 i = thread; i < group * DV; i += THREADS) {
        const i32 column = (i / DV * n_head_k + key_head) * DV + i % DV;
        float* const to = out + (i64)chunk.first * n_heads * DV + column;
        convolve(chunk, mixed, n_mixed, 2 * n_head_k * DK + column, conv, kept, [&](i32 r, float y) {
            if (r < chunk.n) to[(i64)r * n_heads * DV] = y;
        });
    }
    __syncthreads();

    keys += ((i64)at * n_head_k + key_head) * 2 * CHUNK * DK;
#pragma unroll 2
    for (i32 i = warp; i < 2 * CHUNK; i += WARPS) {
        float* const row = (i < CHUNK ? q : k) + i % CHUNK * PITCH;
        float squares = 0.0f;
#pragma unroll
        for (i32 j = lane; j < DK; j += WARP) squares = __fmaf_rn(row[j], row[j], squares);
        const float scale = (1.0f / __fsqrt_rn(fold(squares) + eps)) * (i < CHUNK ? 1.0f / __fsqrt_rn((float)DK) : 1.0f);
#pragma unroll
        for (i32 j = lane; j < DK; j += WARP) {
            const float v = row[j] * scale;
            row[j] = v;
            keys[(i64)i * DK + j] = v;
        }
    }
    __syncthreads();

    // K K^T and Q K^T, the tiles that reach below the diagonal.
    const i32 m = warp < 4 ? warp : 7 - warp; // both kinds of warps on a quarter of the processor have as much to do
    const i32 n_tiles = 2 * m + 2;
    constexpr i32 TILES = CHUNK / 16;
    float sum[2][TILES][4] = {};
    {
        const float* const rows = (warp < 4 ? k : q) + (16 * m + g) * PITCH + 2 * c;
        const float* const columns = k + g * PITCH + 2 * c;
#pragma unroll 1
        for (i32 j = 0; j < DK; j += 8) {
            const float2 low = *(const float2*)(rows + j), high = *(const float2*)(rows + 8 * PITCH + j);
            const FragmentA a[1] = {fragment_a(low.x, high.x, low.y, high.y)};
#pragma unroll
            for (i32 n = 0; n < 2; n++)
                if (TILES * n < n_tiles) {
                    FragmentB b[TILES];
#pragma unroll
                    for (i32 i = 0; i < TILES; i++) {
                        const float2 pair = *(const float2*)(columns + 8 * (TILES * n + i) * PITCH + j);
                        b[i] = fragment_b(pair.x, pair.y);
                    }
                    multiply_add(sum[n], a, b, n_tiles - TILES * n);
                }
        }
    }
    __syncthreads(); // q and k are no longer needed
    const float *const of_keys = shared, *const of_queries = shared + CHUNK * SCORE_PITCH;
    {
        float* const to = shared + (warp < 4 ? 0 : CHUNK * SCORE_PITCH) + (16 * m + g) * SCORE_PITCH + 2 * c;
#pragma unroll
        for (i32 n = 0; n < CHUNK / 8; n++)
            if (n < n_tiles) {
                const float(&tile)[4] = sum[n / TILES][n % TILES];
                *(float2*)(to + 8 * n) = make_float2(tile[0], tile[1]);
                *(float2*)(to + 8 * SCORE_PITCH + 8 * n) = make_float2(tile[2], tile[3]);
            }
    }

    // The V heads, two at a time.
    float* const lower = shared + HALF_FLOATS; // [2][64][64]
    for (i32 pair = 0; pair < group; pair += 2) {
        const i32 n_pair = min(group - pair, 2);
        const auto head_of = [&](i32 i) { return (pair + i) * n_head_k + key_head; };
        if (warp < n_pair) {
            const i32 head = head_of(warp);
            float logs[2], rate[2];
#pragma unroll
            for (i32 i = 0; i < 2; i++) {
                const i32 r = 2 * lane + i;
                const i64 from = (i64)(chunk.first + r) * n_heads + head;
                logs[i] = r < chunk.n ? a[head] * softplus(alpha[from] + dt_bias[head]) : 0.0f;
                rate[i] = r < chunk.n ? sigmoid(beta[from]) : 0.0f;
            }
            float total = logs[0] + logs[1];
#pragma unroll
            for (i32 o = 1; o < WARP; o <<= 1) {
                const float below = __shfl_up_sync(FULL_WARP, total, o);
                if (lane >= o) total = total + below;
            }
            logs[0] = total - logs[1];
            logs[1] = total;
            float* const to = scalars + ((i64)at * n_heads + head) * 2 * CHUNK;
#pragma unroll
            for (i32 i = 0; i < 2; i++) {
                sums[warp][2 * lane + i] = to[2 * lane + i] = logs[i];
                rates[warp][2 * lane + i] = to[CHUNK + 2 * lane + i] = rate[i];
            }
        }
        __syncthreads();
        for (i32 i = thread; i < n_pair * CHUNK * CHUNK; i += THREADS) {
            const i32 of = i / (CHUNK * CHUNK), row = i / CHUNK % CHUNK, column = i % CHUNK;
            float below = 0.0f, score = 0.0f;
            if (column <= row) {
                const float decay = decay_of(sums[of][row] - sums[of][column]);
                score = of_queries[row * SCORE_PITCH + column] * decay;
                if (column < row) below = rates[of][row] * (of_keys[row * SCORE_PITCH + column] * decay);
            }
            lower[i] = below;
            scores[((i64)at * n_heads + head_of(of)) * CHUNK * CHUNK + i % (CHUNK * CHUNK)] = score;
        }
        __syncthreads();
        if (thread < n_pair * CHUNK) {
            const i32 of = thread / CHUNK, column = thread % CHUNK;
            float x[CHUNK];
            invert_column(x, lower + of * CHUNK * CHUNK, column);
            float* const to = inverse + ((i64)at * n_heads + head_of(of)) * CHUNK * CHUNK + column;
#pragma unroll
            for (i32 i = 0; i < CHUNK; i++) to[i * CHUNK] = x[i];
        }
        __syncthreads();
    }
}

// --- the walk ---

// 64 rows of keys to shared memory.
DEVICE void copy_keys(float* to, const float* from) {
#pragma unroll
    for (i32 i = 0; i < CHUNK * DK / 4 / THREADS; i++) {
        const i32 piece = i * THREADS + threadIdx.x, row = piece / (DK / 4), column = piece % (DK / 4) * 4;
        copy16_async(to + row * PITCH + column, from + row * DK + column);
    }
}

// The first steps of rows 16 m .. 16 m + 15 of a lower triangular [64][64] matrix, as they are in fragments of a.
DEVICE void load_triangle(float2 (&low)[8], float2 (&high)[8], const float* matrix, i32 m) {
    const i32 lane = threadIdx.x % WARP;
    matrix += (16 * m + lane / 4) * CHUNK + 2 * (lane % 4);
#pragma unroll
    for (i32 step = 0; step < 8; step++)
        if (step < 2 * m + 2) {
            low[step] = *(const float2*)(matrix + 8 * step);
            high[step] = *(const float2*)(matrix + 8 * CHUNK + 8 * step);
        }
}

// sum += the triangle's rows times values [64][RESULT_PITCH], two tiles of 8 columns.
DEVICE void multiply_triangle(float (&sum)[2][4], const float2 (&low)[8], const float2 (&high)[8],
                              const float* values, i32 m) {
    const i32 lane = threadIdx.x % WARP;
    values += 2 * (lane % 4) * RESULT_PITCH + lane / 4;
    float tiles[4][4] = {}; // two steps at once, each with sums of its own
#pragma unroll
    for (i32 step = 0; step < 8; step += 2)
        if (step < 2 * m + 2) {
            FragmentA a[2];
            FragmentB b[4];
#pragma unroll
            for (i32 i = 0; i < 2; i++) {
                const i32 at = step + i;
                const float* const from = values + 8 * at * RESULT_PITCH;
                a[i] = fragment_a(low[at].x, high[at].x, low[at].y, high[at].y);
                b[2 * i] = fragment_b(from[0], from[RESULT_PITCH]);
                b[2 * i + 1] = fragment_b(from[8], from[RESULT_PITCH + 8]);
            }
            multiply_add(tiles, a, b);
        }
#pragma unroll
    for (i32 n = 0; n < 2; n++)
#pragma unroll
        for (i32 e = 0; e < 4; e++) sum[n][e] = sum[n][e] + (tiles[n][e] + tiles[n + 2][e]);
}

// 32 values' rows of a V head's state. Grid (DV / 32, H_v), block 256, shared memory (STAGES + 1) * KEY_FLOATS +
// 32 * PITCH + 64 * RESULT_PITCH floats.
KERNEL __launch_bounds__(THREADS, 1)
    delta_scan(const float* mixed, float* conv_state, float* state, const i32* states, const i32* table,
               const i32* n_chunks, i32 first_chunk, i32 end_chunk, i32 n_head_k, const float* keys,
               const float* inverse, const float* scores, const float* scalars, float* out) {
    DYNAMIC_SHARED(float, shared);
    __shared__ float weights[CHUNK]; // exp(G_last - G)
    const i32 thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP, g = lane / 4, c = lane % 4;
    const i32 n_heads = gridDim.y, head = blockIdx.y, key_head = head % n_head_k, slice = blockIdx.x * SLICE;
    const i64 n_mixed = 2 * n_head_k * DK + n_heads * DV, width = (i64)n_heads * DV;
    float *const q = shared, *const k = q + KEY_FLOATS, *const rows_of_state = k + STAGES * KEY_FLOATS;
    float* const results = rows_of_state + SLICE * PITCH;
    end_chunk = min(end_chunk, *n_chunks);
    if (first_chunk >= end_chunk)
        return;

    // A warp's part of a product with 64 rows: rows 16 m .. + 15, columns `half` .. + 15. Of the state: rows
    // state_row + g and + 8, columns 8 * (warp / 2 + 4 i) + 2 c and + 1.
    const i32 m = warp < 4 ? warp : 7 - warp, half = warp / 4 * 16, row = 16 * m + g, state_row = warp % 2 * 16;
    float s[DK / 32][4];
    const auto state_at = [&](i64 slot, i32 i) {
        return state + ((slot * n_heads + head) * DV + slice + state_row + g) * DK + 8 * (warp / 2 + 4 * i) + 2 * c;
    };
    const auto keys_of = [&](i32 chunk) {
        return keys + ((i64)(chunk - first_chunk) * n_head_k + key_head) * 2 * CHUNK * DK;
    };
    copy_keys(q, keys_of(first_chunk));
    copy_keys(k, keys_of(first_chunk) + CHUNK * DK);
    copies_commit();

    Chunk next = chunk_at(table, first_chunk);
    for (i32 at = first_chunk; at < end_chunk; at++) {
        const Chunk chunk = next;
        next = chunk_at(table, min(at + 1, end_chunk - 1));
        const i64 of_head = (i64)(at - first_chunk) * n_heads + head;
        if (chunk.begin == FRESH) {
#pragma unroll
            for (i32 i = 0; i < DK / 32; i++) s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0.0f;
        } else if (chunk.begin == STORED || at == first_chunk) {
            const i64 source = states[2 * chunk.sequence + (chunk.begin == STORED ? 0 : 1)];
#pragma unroll
            for (i32 i = 0; i < DK / 32; i++) {
                const float2 low = *(const float2*)state_at(source, i), high = *(const float2*)(state_at(source, i) + 8 * DK);
                s[i][0] = low.x, s[i][1] = low.y, s[i][2] = high.x, s[i][3] = high.y;
            }
        }
#pragma unroll
        for (i32 i = 0; i < DK / 32; i++) {
            float* const to = rows_of_state + (state_row + g) * PITCH + 8 * (warp / 2 + 4 * i) + 2 * c;
            *(float2*)to = make_float2(s[i][0], s[i][1]);
            *(float2*)(to + 8 * PITCH) = make_float2(s[i][2], s[i][3]);
        }
        float2 low[8], high[8];
        load_triangle(low, high, inverse + of_head * CHUNK * CHUNK, m);
        float* const values = out + (i64)(chunk.first + row) * width + head * DV + slice + half + 2 * c;
        const bool valid[2] = {row < chunk.n, row + 8 < chunk.n};
        float2 v[2][2];
        float decays[2], rates[2];
        const float* const logs = scalars + of_head * 2 * CHUNK;
#pragma unroll
        for (i32 h = 0; h < 2; h++) {
#pragma unroll
            for (i32 n = 0; n < 2; n++)
                v[n][h] = valid[h] ? *(const float2*)(values + h * 8 * width + 8 * n) : make_float2(0.0f, 0.0f);
            decays[h] = decay_of(logs[row + 8 * h]);
            rates[h] = logs[CHUNK + row + 8 * h];
        }
        const float last = logs[CHUNK - 1];
        const float* const this_k = k + (STAGES == 2 ? (at - first_chunk) % 2 : 0) * KEY_FLOATS;
        copies_wait<0>();
        __syncthreads(); // keys and state are there, the chunk before is done with
        const bool more = at + 1 < end_chunk;
        if (STAGES == 2 && more) {
            copy_keys(k + (at + 1 - first_chunk) % 2 * KEY_FLOATS, keys_of(at + 1) + CHUNK * DK);
            copies_commit();
        }
        if (thread < CHUNK) weights[thread] = decay_of(last - logs[thread]);

        // K S and Q S.
        float of_keys[4][4] = {}; // two tiles of K S, two of Q S
#pragma unroll 2
        for (i32 j = 0; j < DK; j += 8) {
            FragmentA a[2];
            FragmentB b[2];
#pragma unroll
            for (i32 i = 0; i < 2; i++) {
                const float* const from = (i ? q : this_k) + row * PITCH + j + 2 * c;
                const float2 low_pair = *(const float2*)from, high_pair = *(const float2*)(from + 8 * PITCH);
                a[i] = fragment_a(low_pair.x, high_pair.x, low_pair.y, high_pair.y);
                const float2 pair = *(const float2*)(rows_of_state + (half + 8 * i + g) * PITCH + j + 2 * c);
                b[i] = fragment_b(pair.x, pair.y);
            }
            multiply_add(of_keys, a, b);
        }
        float* const result = results + row * RESULT_PITCH + half + 2 * c;
        const auto store = [&](const float(&tile)[4], i32 n) {
            *(float2*)(result + 8 * n) = make_float2(tile[0], tile[1]);
            *(float2*)(result + 8 * RESULT_PITCH + 8 * n) = make_float2(tile[2], tile[3]);
        };
#pragma unroll
        for (i32 n = 0; n < 2; n++) {
            const float2 v0 = v[n][0], v1 = v[n][1];
            const float missing[4] = {
                rates[0] * (v0.x - decays[0] * of_keys[n][0]), rates[0] * (v0.y - decays[0] * of_keys[n][1]),
                rates[1] * (v1.x - decays[1] * of_keys[n][2]), rates[1] * (v1.y - decays[1] * of_keys[n][3])};
            store(missing, n);
        }
        __syncthreads(); // the queries have been used
        if (more) {
            copy_keys(q, keys_of(at + 1));
            copies_commit();
        }

        // U, in the place of what it is made from.
        float u[2][4] = {};
        multiply_triangle(u, low, high, results + half, m);
        load_triangle(low, high, scores + of_head * CHUNK * CHUNK, m);
        __syncthreads();
        store(u[0], 0);
        store(u[1], 1);
        __syncthreads();

        // The new state goes first: it takes no more from memory.
        const float kept = decay_of(last);
#pragma unroll
        for (i32 i = 0; i < DK / 32; i++)
#pragma unroll
            for (i32 e = 0; e < 4; e++) s[i][e] *= kept;
#pragma unroll 2
        for (i32 j = 0; j < CHUNK; j += 8) {
            const float* const from = results + (j + c) * RESULT_PITCH + state_row + g;
            const float w0 = weights[j + c], w1 = weights[j + c + 4];
            const FragmentA a[1] = {fragment_a(from[0] * w0, from[8] * w0, from[4 * RESULT_PITCH] * w1,
                                               from[4 * RESULT_PITCH + 8] * w1)};
            FragmentB b[DK / 32];
#pragma unroll
            for (i32 i = 0; i < DK / 32; i++) {
                const float* const keys_at = this_k + (j + c) * PITCH + 8 * (warp / 2 + 4 * i) + g;
                b[i] = fragment_b(keys_at[0], keys_at[4 * PITCH]);
            }
            multiply_add(s, a, b);
        }
        float result_tiles[2][4];
#pragma unroll
        for (i32 n = 0; n < 2; n++)
#pragma unroll
            for (i32 e = 0; e < 4; e++) result_tiles[n][e] = of_keys[2 + n][e] * decays[e / 2];
        multiply_triangle(result_tiles, low, high, results + half, m);
#pragma unroll
        for (i32 h = 0; h < 2; h++)
            if (valid[h])
#pragma unroll
                for (i32 n = 0; n < 2; n++)
                    *(float2*)(values + h * 8 * width + 8 * n) = make_float2(result_tiles[n][2 * h], result_tiles[n][2 * h + 1]);

        if (chunk.ends || !more) {
            const i64 target = states[2 * chunk.sequence + 1];
#pragma unroll
            for (i32 i = 0; i < DK / 32; i++) {
                *(float2*)state_at(target, i) = make_float2(s[i][0], s[i][1]);
                *(float2*)(state_at(target, i) + 8 * DK) = make_float2(s[i][2], s[i][3]);
            }
        }
        if (chunk.ends) { // the last inputs of the convolution; delta_prepare has read the old ones
            const i64 source = states[2 * chunk.sequence], target = states[2 * chunk.sequence + 1];
            const i32 n_channels = SLICE + (head < n_head_k && slice == 0 ? 2 * DK : 0);
            for (i32 i = thread; i < n_channels; i += THREADS) {
                const i32 channel = i < SLICE        ? 2 * n_head_k * DK + head * DV + slice + i
                                    : i < SLICE + DK ? head * DK + i - SLICE
                                                     : (n_head_k + head) * DK + i - SLICE - DK;
                float inputs[KEPT];
#pragma unroll
                for (i32 j = 0; j < KEPT; j++) {
                    const i32 r = chunk.n - KEPT + j; // of the chunk
                    inputs[j] = r >= 0 || chunk.begin == WITHIN ? mixed[(chunk.first + r) * n_mixed + channel]
                                : chunk.begin == FRESH ? 0.0f
                                                       : conv_state[(source * KEPT + j + chunk.n) * n_mixed + channel];
                }
#pragma unroll
                for (i32 j = 0; j < KEPT; j++) conv_state[(target * KEPT + j) * n_mixed + channel] = inputs[j];
            }
        }
        if (STAGES == 1 && more) {
            __syncthreads();
            copy_keys(k, keys_of(at + 1) + CHUNK * DK);
            copies_commit();
        }
    }
}

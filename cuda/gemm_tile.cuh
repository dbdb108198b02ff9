// One tile of a tensor-core product: rows of a quantized matrix times rows of activations in halves.
//
// A block of WARPS (4 or 8) warps holds 16 * matrices rows of weights a warp against `tokens` rows of activations,
// all of them in every warp, so that each weight is dequantized once a block, straight into the registers of the mma:
// weights are its 16-row operand, tokens its 8-column one. Raw weights come a stage ahead of their use, activations
// STAGES - 1 steps of 64 ahead, both by asynchronous copies; the words of scales of a stage are made by one thread a
// row while the stage before it is multiplied.
//
// 4 warps leave room for several blocks a multiprocessor, which hide each other's barriers. 8 warps of 128 tokens fill
// one, and read the activations half as often from the L2 cache; they meet at a barrier every other step only.
//
// Activations: halves [.., stride], stride = K rounded up to 64, zeros past K, within each 16 first the even, then
// the odd elements (as weights leave dequantize.cuh). Within a stage in shared memory, 16-byte pieces of a token's
// 128 bytes are exchanged by its number modulo 8, which keeps ldmatrix free of bank conflicts.
#pragma once

#include "dequantize.cuh"

#define THREADS (WARPS * WARP)
#define STEP 64  // elements of K
#define BLOCKS (WARPS == 8 ? 1 : TOKENS > 64 ? 2 : 3)  // of a multiprocessor, as far as registers go

// Shared memory of a tile; tile_bytes in engine/ops/cuda/gemm.py has the same sum.
template <Type type, int matrices, int tokens>
struct Tile {
    using Weights = Format<type>;
    static constexpr int ROWS = WARPS * 16 * matrices;
    static constexpr int STEPS = Weights::ELEMENTS / STEP;  // of a stage of weights
    static constexpr int WANTED = tokens > 64 ? 2 : tokens > 32 ? 3 : 4;
    static constexpr bool WHOLE = Weights::ELEMENTS == 256 && Weights::ONE_BLOCK;  // a row is a number of stages
    static constexpr int TURN = WARPS == 8 && WHOLE ? 2 : 1;  // steps between barriers
    static constexpr int TURNS = STEPS / TURN;
    static constexpr int STAGES = WANTED < TURNS ? WANTED : TURNS < 2 ? 2 : TURNS;  // turns of activations in memory
    static constexpr int PIECES = (Weights::BYTES + 16 - Weights::ALIGN + 15) / 16;  // of 16 bytes, of a row's stage
    // A row is a number of stages, each of which reaches into all of its pieces wherever it begins.
    static constexpr bool ALL = WHOLE && (Weights::BYTES + 15) / 16 == PIECES;
    static constexpr int PITCH = PIECES * 16;
    static constexpr int SKEW = PIECES % 2 ? 0 : 16;  // every 4 rows, so that 8 rows lie in different banks
    static constexpr int RAW_BYTES = ROWS * PITCH + ROWS / 4 * SKEW;
    static constexpr int X_BYTES = tokens * STEP * 2;
    static constexpr int UNITS = Weights::ELEMENTS / 32;  // of a stage
    static constexpr int EACH = Weights::SCALES > UNITS ? 2 : 1;  // words of scales of a unit
    static_assert(Weights::SCALES == 0 || Weights::SCALES == EACH * UNITS, "one or two words of scales for 32 weights");
    static constexpr int SCALE_WORDS = Weights::SCALES * ROWS;
    static constexpr int BYTES = 2 * RAW_BYTES + STAGES * TURN * X_BYTES + 2 * SCALE_WORDS * 4;
};

// Rows of the matrix, or, where a tile has two, of both: 16 of the first, the same 16 of the second, and so on.
struct Rows {
    const u8* first;
    const u8* second;
    i32 row, last;  // the tile's first row, the matrix's last
    i32 bytes;      // of a row
};

// The tile's row r; where it has two matrices, bit 4 of r says which.
template <int matrices>
DEVICE i32 row_of(const Rows& w, i32 r) {
    return matrices == 2 && w.second ? (r >> 5 << 4) + (r & 15) : r;
}

template <int matrices>
DEVICE const u8* matrix_of(const Rows& w, i32 r) {
    return matrices == 2 && w.second && (r & 16) ? w.second : w.first;
}

template <int matrices>
DEVICE const u8* row_address(const Rows& w, i32 r) {
    return matrix_of<matrices>(w, r) + (u64)(u32)(w.row + row_of<matrices>(w, r)) * (u32)w.bytes;
}

// A stage of the tile's rows to shared memory: PER_ROW neighboring threads (a power of two) copy as many pieces of a
// row.
template <class T, int matrices, int per_row, int first_piece>
DEVICE void copy_pieces(u8* to, const Rows& w, i32 stage) {
    using W = typename T::Weights;
    constexpr i32 N = THREADS / per_row;  // rows at once
    const i32 q = threadIdx.x / per_row, piece = first_piece + threadIdx.x % per_row;
    if (N > T::ROWS && q >= T::ROWS) return;
    to += q * T::PITCH + q / 4 * T::SKEW + 16 * piece;
#pragma unroll
    for (i32 i = 0; i < (N > T::ROWS ? 1 : T::ROWS / N); ++i) {
        const i32 row = w.row + row_of<matrices>(w, q) + row_of<matrices>(w, i * N);  // q and i * N share no bits
        const u8* const begin = matrix_of<matrices>(w, q | i * N) + (u64)(u32)row * (u32)w.bytes;
        const u8* from = begin + stage * W::BYTES;
        if (W::ALIGN < 16) from = (const u8*)((u64)from & ~15ull);
        from += 16 * piece;
        // A stage's pieces can lie past the row's end, and so past the tensor's.
        const bool valid = row <= w.last && (T::ALL || from < begin + w.bytes);
        copy16_async_if(to + i * N * T::PITCH + i * N / 4 * T::SKEW, from, valid);
    }
}

// sum[matrix][8 tokens][4] of this thread, fragments of mma.m16n8k16: rows lane / 4 and + 8, tokens 2 * (lane % 4) +
// 0, 1. token_rows: the rows of x, in shared memory. The block's threads all call this; shared memory is theirs until
// then.
template <Type type, int matrices, int tokens>
DEVICE void multiply(float (*sum)[tokens / 8][4], u8* shared, const i32* token_rows, const Rows& w, const u16* x,
                     i32 x_stride, i32 K) {
    using T = Tile<type, matrices, tokens>;
    using W = typename T::Weights;
    const i32 thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    u8* const raw = shared;
    u8* const xs = shared + 2 * T::RAW_BYTES;
    u32* const scales = (u32*)(xs + T::STAGES * T::TURN * T::X_BYTES);
    const i32 n_steps = (K + STEP - 1) / STEP, n_turns = n_steps / T::TURN;

    const auto load_raw = [&](i32 stage) {
        u8* const to = raw + (stage & 1) * T::RAW_BYTES;
        constexpr i32 P = T::PIECES;
        if (P & 16) copy_pieces<T, matrices, 16, 0>(to, w, stage);
        if (P & 8) copy_pieces<T, matrices, 8, (P & 16)>(to, w, stage);
        if (P & 4) copy_pieces<T, matrices, 4, (P & 24)>(to, w, stage);
        if (P & 2) copy_pieces<T, matrices, 2, (P & 28)>(to, w, stage);
        if (P & 1) copy_pieces<T, matrices, 1, (P & 30)>(to, w, stage);
    };
    const auto load_step = [&](i32 step, i32 buffer) {
        const i32 piece = thread % 8;
        const u16* const from = x + step * STEP + piece * 8;
#pragma unroll
        for (i32 i = 0; i < (tokens * 8 + THREADS - 1) / THREADS; ++i) {
            const i32 token = i * (THREADS / 8) + thread / 8;
            if (tokens * 8 < THREADS && token >= tokens) break;
            copy16_async(xs + buffer * T::X_BYTES + token * (STEP * 2) + ((piece ^ (token & 7)) << 4),
                         from + (u64)(u32)token_rows[token] * (u32)x_stride);
        }
    };
    const auto load_x = [&](i32 turn, i32 buffer) {
#pragma unroll
        for (i32 s = 0; s < T::TURN; ++s) load_step(turn * T::TURN + s, buffer * T::TURN + s);
    };
    // Where a row's stage begins in shared memory: copies begin at a multiple of 16.
    const auto begin = [&](u32 low, i32 r, i32 stage) {
        u32 at = (stage & 1) * T::RAW_BYTES + r * T::PITCH + (r / 4) * T::SKEW;
        if (W::ALIGN < 16) at += (low + stage * W::BYTES) & 15;
        return at;
    };
    const auto make_scales = [&](i32 stage) {
        if (T::ROWS < THREADS && thread >= T::ROWS) return;
        const u32 low = W::ALIGN < 16 ? (u32)(u64)row_address<matrices>(w, thread) : 0;
        W::scales(raw, begin(low, thread, stage), scales + (stage & 1) * T::SCALE_WORDS + thread, T::ROWS);
    };

    const i32 first_row = warp * 16 * matrices + lane / 4;
    u32 low[matrices][2];  // of the addresses of this lane's rows
#pragma unroll
    for (i32 m = 0; m < matrices; ++m)
#pragma unroll
        for (i32 h = 0; h < 2; ++h)
            low[m][h] = W::ALIGN < 16 ? (u32)(u64)row_address<matrices>(w, first_row + 16 * m + 8 * h) : 0;
#pragma unroll
    for (i32 m = 0; m < matrices; ++m)
#pragma unroll
        for (i32 n = 0; n < tokens / 8; ++n)
#pragma unroll
            for (i32 i = 0; i < 4; ++i) sum[m][n][i] = 0.0f;

    __syncthreads();  // token_rows; and whoever used this memory is done
    load_raw(0);
#pragma unroll
    for (i32 s = 0; s < T::STAGES - 1; ++s) {
        if (s < n_turns) load_x(s, s);
        copies_commit();
    }
    if (W::SCALES) {
        copies_wait<T::STAGES - 2>();
        __syncthreads();
        make_scales(0);
    }

    const auto step_sum = [&](i32 step, i32 buffer) {
        const i32 stage = step / T::STEPS, j = step % T::STEPS;
        // ldmatrix: lane i points to token i % 8 (+ 8 for i >= 16), first or second 8 elements of 16 by bit 3.
        const u8* const row = xs + buffer * T::X_BYTES + ((lane & 7) + (lane >> 4) * 8) * (STEP * 2);
        const u32* const words = scales + (stage & 1) * T::SCALE_WORDS + first_row;
#pragma unroll
        for (i32 unit = 0; unit < 2; ++unit) {
            if (!W::INTERLEAVED && step * STEP + 32 * unit >= K) break;
            u32 a[2][matrices][4];
#pragma unroll
            for (i32 m = 0; m < matrices; ++m)
#pragma unroll
                for (i32 h = 0; h < 2; ++h) {
                    const i32 r = 16 * m + 8 * h;
                    u32 s[2 * T::EACH] = {}, half_unit[2][2];
                    if (W::SCALES) {
#pragma unroll
                        for (i32 e = 0; e < T::EACH; ++e) {
                            const u32* const word = words + (e * T::UNITS + 2 * j) * T::ROWS + r;
                            s[2 * e] = word[W::INTERLEAVED ? 0 : unit * T::ROWS];
                            s[2 * e + 1] = W::INTERLEAVED ? word[T::ROWS] : s[2 * e];
                        }
                    }
                    W::weights(raw, begin(low[m][h], first_row + r, stage), s, j, unit, lane % 4, K - step * STEP,
                               half_unit);
#pragma unroll
                    for (i32 i = 0; i < 2; ++i) a[i][m][h] = half_unit[i][0], a[i][m][2 + h] = half_unit[i][1];
                }
#pragma unroll
            for (i32 i = 0; i < 2; ++i) {
                const i32 sixteen = W::INTERLEAVED ? unit + 2 * i : 2 * unit + i;
                const i32 piece = (2 * sixteen + ((lane >> 3) & 1)) ^ (lane & 7);
#pragma unroll
                for (i32 n = 0; n < tokens / 8; n += 2) {
                    u32 b[4];
                    load_matrix4(b, row + n * 8 * (STEP * 2) + piece * 16);
#pragma unroll
                    for (i32 m = 0; m < matrices; ++m) {
                        mma_f16(sum[m][n], a[i][m], b[0], b[1]);
                        mma_f16(sum[m][n + 1], a[i][m], b[2], b[3]);
                    }
                }
            }
        }
    };

    i32 buffer = 0;  // of the turn's activations
    for (i32 turn = 0; turn < n_turns; ++turn) {
        const i32 stage = turn / T::TURNS, place = turn % T::TURNS;
        copies_wait<T::STAGES - 2>();
        __syncthreads();
        if (turn + T::STAGES - 1 < n_turns) load_x(turn + T::STAGES - 1, buffer ? buffer - 1 : T::STAGES - 1);
        if (place == 0 && turn + T::TURNS < n_turns) load_raw(stage + 1);
        copies_commit();
        if (W::SCALES && place == T::TURNS - 1 && turn + 1 < n_turns) make_scales(stage + 1);
#pragma unroll
        for (i32 s = 0; s < T::TURN; ++s) step_sum(turn * T::TURN + s, buffer * T::TURN + s);
        buffer = buffer + 1 < T::STAGES ? buffer + 1 : 0;
    }
}

// Halves with an exponent for each 16 elements of a row: what the grouped products leave for a kernel that knows the
// row. Rows in units of 2^exponent: LEAST_EXPONENT where all 16 are below 2^7, else what brings the largest to
// 2^14..2^15; 127 where one is not finite. The 16 elements have the order of activations.
#define LEAST_EXPONENT -8

// The warp's 16 elements of 8 tokens, from an mma's fragment: v[e][i] is element lane / 4 + 8 * i of token 2 * (lane
// % 4) + e, whose row is row[e] (negative: not written). out halves [.., stride], exponents [.., stride / 16], at 16
// * sixteen.
DEVICE void store_sixteen(float (&v)[2][2], const i32 (&row)[2], u16* out, i8* exponents, i32 stride, i32 sixteen) {
    const i32 g = threadIdx.x % WARP / 4;
#pragma unroll
    for (i32 e = 0; e < 2; ++e) {
        // Magnitudes order as their bits do, and what is not finite comes last.
        u32 top = max(__float_as_uint(v[e][0]) & 0x7fffffffu, __float_as_uint(v[e][1]) & 0x7fffffffu);
#pragma unroll
        for (i32 o = 4; o < WARP; o <<= 1) top = max(top, __shfl_xor_sync(FULL_WARP, top, o));
        const i32 exponent = top < 0x7f800000u ? max((i32)(top >> 23) - 127 - 14, LEAST_EXPONENT) : 127;
        const float inverse = __uint_as_float((u32)(127 - exponent) << 23);
        v[e][0] *= inverse, v[e][1] *= inverse;
        if (g == 0 && row[e] >= 0) exponents[(u64)(u32)row[e] * (u32)(stride / 16) + sixteen] = (i8)exponent;
    }
    // Elements g and g + 2 are neighbors in memory: lanes exchange, and each writes both for one token.
    const bool lower = !(g & 2);
    const i32 own = lower ? row[0] : row[1];
    u32* const to = (u32*)(out + (u64)(u32)max(own, 0) * (u32)stride + 16 * sixteen) + 4 * (g & 1) + (g >> 2);
#pragma unroll
    for (i32 i = 0; i < 2; ++i) {
        const float other = __shfl_xor_sync(FULL_WARP, lower ? v[1][i] : v[0][i], 8);
        const u32 word = lower ? pack_halves(v[0][i], other) : pack_halves(other, v[1][i]);
        if (own >= 0) to[2 * i] = word;
    }
}

// Products of 16 rows of a quantized matrix with groups of eight rows of activations on the tensor cores, with the bits
// of docs/arithmetic.md.
//
// One mma multiplies a block of 32 weights of 16 rows (its first operand) with eight tokens (its second): the integer
// sums of 128 block terms. A lane has four of them, of rows lane / 4 and 8 further, tokens 2 * (lane % 4) and the next;
// it gives each block of a run of eight an accumulator of its own, so that no order is lost. Four warps share the
// rows: warp p takes runs p, p + 4, ..., and meets accumulators 8 * p and the seven after it. A weight is unpacked once
// for all groups.
//
// Up to four tokens fill half of an mma's eight columns. The other four then have the same tokens of the next block, which
// an mma of that block's weights needs there: both take one load of activations, a lane keeps the results of one, and
// half of what follows is left.
//
// A sum starts at 1.5 * 2^23, as an integer: its bits are then a float from which an addition takes that off again,
// with what the type's offset amounts to. So nothing is converted. Integers here are far below 2^22, and what is made of
// them below 2^24, so floats hold them exactly; sums of two products start at +0, lest a zero were negative.
#pragma once

#include "fragments.cuh"

constexpr i32 GROUP = 8;                 // tokens of an mma
constexpr i32 FEW_TOKENS = 4;            // of which two blocks take one
constexpr i32 SUM_START = 0x4b400000;
constexpr float START = 12582912.0f; // the same bits

// Activations: q [T, k] with `stride` bytes a row; the others in shared memory, of block b and tokens 2 * p and the next
// at b * PAIRS + p.
struct WideInput {
    const i8* q;
    const float4* scaled; // d of both tokens, then their sums
    const float4* halves; // sums of the first halves of both tokens, then of the second halves; or START and OFFSET of them
    i32 stride, last;     // of the tokens
};

// --- rows and activations -------------------------------------------------------------------------

// Some pieces of 16 rows' runs: per_row neighboring lanes (a power of two) copy as many pieces of a row.
template <class R, i32 per_row, i32 first_piece>
DEVICE void copy_pieces(u8* stage, const u8* from, i32 n_bytes) {
    constexpr i32 EACH = WARP / per_row, TIMES = (TILE_ROWS + EACH - 1) / EACH; // at once, and how often
    // So many of a lane's rows lie differently to a boundary of 32 bytes; those behind them as these do.
    constexpr i32 STEP = EACH * R::ROW_BYTES, OF_32 = 32 / common_divisor(STEP, 32), KINDS = OF_32 < TIMES ? OF_32 : TIMES;
    const i32 lane = threadIdx.x % WARP, row = lane / per_row, begin = 16 * (first_piece + lane % per_row);
    if (EACH > TILE_ROWS && row >= TILE_ROWS)
        return;
    u8* const to = kept_shared(stage + row * R::PITCH + begin);
    const u8* const run = from + row * R::ROW_BYTES;
#pragma unroll
    for (i32 kind = 0; kind < KINDS; kind++) {
        const i32 skew = (i32)((u64)(run + kind * STEP) & 31);
        const u8* const piece = kept_global(run + kind * STEP - skew + begin);
        // The first piece and the last ones may be none of the run's.
        if ((first_piece || begin + 16 > skew) && begin < skew + n_bytes)
#pragma unroll
            for (i32 i = kind; i < TIMES; i += KINDS)
                copy16_async(to + i * EACH * R::PITCH, piece + (i - kind) * STEP);
    }
}

// Start copying run s of 16 rows of k columns, or of the `left` ones that there are, which begin at `rows`.
template <Type type, i32 k>
DEVICE void copy_run(u8* stage, const u8* rows, i32 left, i32 s) {
    typedef Runs<type, k> R;
    const u8* const from = rows + s * R::BYTES;
    const i32 n_bytes = k % (32 * RUN) == 0 ? R::BYTES : min(R::BYTES, R::ROW_BYTES - s * R::BYTES);
    constexpr i32 P = R::PIECES;
    static_assert(P < 32, "a run of more than 496 bytes");
    if (left >= TILE_ROWS) {
        if (P & 16)
            copy_pieces<R, 16, 0>(stage, from, n_bytes);
        if (P & 8)
            copy_pieces<R, 8, (P & 16)>(stage, from, n_bytes);
        if (P & 4)
            copy_pieces<R, 4, (P & 24)>(stage, from, n_bytes);
        if (P & 2)
            copy_pieces<R, 2, (P & 28)>(stage, from, n_bytes);
    } else {
#pragma unroll 1
        for (i32 i = threadIdx.x % WARP; i < TILE_ROWS * P; i += WARP) {
            const i32 row = i / P, begin = 16 * (i % P);
            const u8* const run = from + min(row, left - 1) * R::ROW_BYTES;
            const i32 skew = (i32)((u64)run & 31);
            if (begin + 16 > skew && begin < skew + n_bytes)
                copy16_async(stage + row * R::PITCH + begin, run - skew + begin);
        }
    }
}

// --- terms ----------------------------------------------------------------------------------------

// What is taken off a type's weights, where halves are summed apart; NO_HALVES where they are not, 0 of types that differ.
constexpr i32 NO_HALVES = -1;
template <Type type>
DEVICE constexpr i32 half_offset() { return has_halves(type) ? BlockCode<type>::OFFSET : NO_HALVES; }
DEVICE constexpr i32 same_offset(i32 a, i32 b) { return a == NO_HALVES || a == b ? b : b == NO_HALVES ? a : 0; }

// A token's scale, sum and columns of a block.
struct OfBlock {
    float d;
    i32 sum;
    const i8* q;
};

// What terms need of a block and a pair of tokens, number `i`, put together, so that neighboring threads write neighboring
// banks. of(token, block): what is there; behind the last token it is again. half_offset: of `same_offset` of the types; above 0
// the halves are begun.
template <i32 pairs, i32 half_offset, class Of>
DEVICE void prepare(float4* scaled, float4* halves, i32 i, i32 n_tokens, Of of) {
    constexpr bool HALVES = half_offset != NO_HALVES, BEGUN = half_offset > 0;
    float of_d[2], of_sum[2], of_halves[2][2];
#pragma unroll
    for (i32 j = 0; j < 2; j++) {
        const OfBlock x = of(min(i % pairs * 2 + j, n_tokens - 1), i / pairs);
        of_d[j] = x.d;
        of_sum[j] = (float)x.sum;
        if (HALVES) {
            const uint4 v = *(const uint4*)x.q;
            i32 first = __dp4a((i32)v.x, 0x01010101, __dp4a((i32)v.y, 0x01010101, 0));
            first = __dp4a((i32)v.z, 0x01010101, __dp4a((i32)v.w, 0x01010101, first));
            of_halves[0][j] = BEGUN ? START + (float)(half_offset * first) : (float)first;
            of_halves[1][j] = BEGUN ? START + (float)(half_offset * (x.sum - first)) : (float)(x.sum - first);
        }
    }
    scaled[i] = {of_d[0], of_d[1], of_sum[0], of_sum[1]};
    if (HALVES)
        halves[i] = {of_halves[0][0], of_halves[0][1], of_halves[1][0], of_halves[1][1]};
}

// What a lane needs of the activations of a block: words of a token, scales and sums of two.
struct WideBlock {
    u32 b0, b1;
    float d[2], sum[2];
    float half[4]; // the first halves of both tokens, the second ones
};

// Where a lane finds them: words of a token, scales and sums of a pair of tokens.
struct Whose {
    const i8* q;
    const float4 *scaled, *halves;
};

template <Type type>
DEVICE void load_wide(const Whose& at, WideBlock& to) {
    if constexpr (!Fragments<type>::PAIRED) {
        to.b0 = *(const u32*)at.q;
        to.b1 = *(const u32*)(at.q + 16);
    } else {
        const uint2 v = *(const uint2*)at.q;
        to.b0 = v.x;
        to.b1 = v.y;
    }
    const float4 s = *at.scaled;
    to.d[0] = s.x, to.d[1] = s.y, to.sum[0] = s.z, to.sum[1] = s.w;
    if constexpr (has_halves(type)) {
        const float4 h = *at.halves;
        to.half[0] = h.x, to.half[1] = h.y, to.half[2] = h.z, to.half[3] = h.w;
    }
}

// The integer sums of a block, of the lane's two rows and two tokens, or of its halves.
template <Type type>
struct BlockSums {
    static constexpr i32 N = in_halves<type>() ? 2 : 1;
    i32 of[N][4];

    __device__ void multiply(const u32 (&a)[4], const WideBlock& x) {
        typedef BlockCode<type> Code;
        if constexpr (N == 2) {
            mma_bytes<Code::SIGNED>(of[0], a[0], a[1], x.b0, SUM_START);
            mma_bytes<Code::SIGNED>(of[1], a[2], a[3], x.b1, SUM_START);
        } else {
            mma_bytes<Code::SIGNED>(of[0], a, x.b0, x.b1, SUM_START);
        }
    }
    __device__ void choose(bool other, const BlockSums& of_other) {
#pragma unroll
        for (i32 h = 0; h < N; h++)
#pragma unroll
            for (i32 i = 0; i < 4; i++)
                of[h][i] = other ? of_other.of[h][i] : of[h][i];
    }
};

// acc += d * term. begun: x has START and OFFSET of the halves.
template <Type type, bool begun>
DEVICE void add_terms(float (&acc)[4], const BlockSums<type>& sums, const float2 (&scale)[2], const float4 (&factor)[2],
                      const WideBlock& x) {
    typedef BlockCode<type> Code;
    constexpr float OFFSET = (float)Code::OFFSET;
    if constexpr (in_halves<type>()) {
#pragma unroll
        for (i32 i = 0; i < 4; i++) {
            const i32 r = i / 2, t = i % 2;
            float half[2];
#pragma unroll
            for (i32 h = 0; h < 2; h++)
                half[h] = __int_as_float(sums.of[h][i]) - (begun         ? x.half[2 * h + t]
                                                           : Code::OFFSET ? __fmaf_rn(OFFSET, x.half[2 * h + t], START)
                                                                          : START);
            if constexpr (is_kind(type, Kind::SIXTEENS)) {
                acc[i] = __fmaf_rn(x.d[t], scale[r].x * half[0] + scale[r].y * half[1], acc[i]);
            } else {
                const float total = __fmaf_rn(factor[r].y, half[1], __fmaf_rn(factor[r].x, half[0], 0.0f));
                float term;
                if constexpr (Code::MINIMUM) {
                    const float less = __fmaf_rn(factor[r].w, x.half[2 + t], __fmaf_rn(factor[r].z, x.half[t], 0.0f));
                    term = __fmaf_rn(scale[r].x, total, -(scale[r].y * less));
                } else {
                    term = factor[r].z * total;
                }
                acc[i] = __fmaf_rn(x.d[t], term, acc[i]);
            }
        }
    } else {
#pragma unroll
        for (i32 i = 0; i < 4; i++) {
            const i32 r = i / 2, t = i % 2;
            const float sum =
                __int_as_float(sums.of[0][i]) - (Code::OFFSET ? __fmaf_rn(OFFSET, x.sum[t], START) : START);
            const float term = Code::MINIMUM ? __fmaf_rn(scale[r].x, sum, -(scale[r].y * x.sum[t])) : scale[r].x * sum;
            acc[i] = __fmaf_rn(x.d[t], term, acc[i]);
        }
    }
}

// Accumulators of a group, each of four results: one a block of a run or, of few tokens, one of every two.
template <bool few>
constexpr i32 HELD_RUN = few ? RUN / 2 : RUN;

// acc[group][j] += the terms of block j of the run in `tile`, which begins at block `first` of the rows. few: of at most
// FEW_TOKENS, in one group; a lane's are those of block 2 * j or, with lane % 4 >= 2, of the one behind it.
template <Type type, i32 k, i32 groups, bool begun, bool few>
DEVICE void multiply_run(float (&acc)[groups][HELD_RUN<few>][4], const Tile& tile, i32 first, const WideInput& x) {
    typedef Runs<type, k> R;
    typedef Fragments<type> F;
    constexpr bool NO_FACTOR = !has_halves(type), NO_SCALE = has_halves(type) && !BlockCode<type>::MINIMUM;
    constexpr bool BEGUN = begun && has_halves(type), WHOLE = k % (32 * RUN) == 0;
    constexpr i32 EACH = few ? 2 : 1, PAIRS = few ? FEW_TOKENS / 2 : GROUP / 2 * groups;
    const i32 lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4, odd = few ? t / 2 : 0;
    const i32 ahead = (F::PAIRED ? 8 : 4) * t;
    const Place at[3] = {place_of<R>(tile, lane % TILE_ROWS, 0), place_of<R>(tile, g, ahead), place_of<R>(tile, g + 8, ahead)};
    // What a lane reads of block 0 and, of few tokens, of its own of two blocks.
    const float2* const scales = kept_shared(tile.constants->scale[g] + odd);
    const float4* const factors = NO_FACTOR ? nullptr : kept_shared(tile.constants->factor[g] + odd);
    const i32 pair = (first + odd) * PAIRS + (few ? t % 2 : t), next = few ? g / FEW_TOKENS * 32 : 0;
    const float4* const scaled = kept_shared(x.scaled + pair);
    const float4* const halves = NO_FACTOR ? nullptr : kept_shared(x.halves + pair);
    const i8* q[groups];
#pragma unroll
    for (i32 group = 0; group < groups; group++)
        q[group] = x.q + min(few ? g % FEW_TOKENS : GROUP * group + g, x.last) * x.stride + 32 * first + next + ahead;
    F fragments;
    F::template begin<R::ALIGN>(fragments, tile, at);
    __syncwarp();
#pragma unroll
    for (i32 j = 0; j < RUN; j += EACH)
        if (WHOLE || j < tile.n_blocks) {
            const bool both = few && (WHOLE || j + 1 < tile.n_blocks);
            u32 a[EACH][4];
            F::template get<R::ALIGN>(fragments, tile, at, j, a[0]);
            if (both)
                F::template get<R::ALIGN>(fragments, tile, at, j + 1, a[EACH - 1]);
            const i32 own = both ? j : j - odd; // where there is one block, a lane beside it has nothing to add
            float2 scale[2];
            float4 factor[2];
#pragma unroll
            for (i32 r = 0; r < 2; r++) {
                scale[r] = NO_SCALE ? make_float2(0.0f, 0.0f) : scales[8 * r * (RUN + 2) + own];
                factor[r] = NO_FACTOR ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : factors[8 * r * (RUN + 1) + own];
            }
#pragma unroll
            for (i32 group = 0; group < groups; group++) {
                WideBlock b;
                BlockSums<type> sums;
                const i32 of_pair = own * PAIRS + (few ? 0 : GROUP / 2 * group);
                load_wide<type>({q[group] + 32 * j - (both ? 0 : next), scaled + of_pair, halves + of_pair}, b);
                if constexpr (few) {
                    sums.multiply(a[0], b);
                    if (both) {
                        BlockSums<type> others;
                        others.multiply(a[EACH - 1], b);
                        sums.choose(odd, others);
                    }
                    if (both || !odd)
                        add_terms<type, BEGUN>(acc[group][j / 2], sums, scale, factor, b);
                } else {
                    sums.multiply(a[0], b);
                    add_terms<type, BEGUN>(acc[group][j], sums, scale, factor, b);
                }
            }
        }
}

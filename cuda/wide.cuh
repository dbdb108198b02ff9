// Products of 16 rows of a quantized matrix with groups of eight rows of activations on the tensor cores, with the bits
// of docs/arithmetic.md.
//
// One mma multiplies a block of 32 weights of 16 rows (its first operand) with eight tokens (its second): the integer
// sums of 128 block terms. A lane has four of them, of rows lane / 4 and 8 further, tokens 2 * (lane % 4) and the next;
// it gives each block of a run of eight an accumulator of its own, so that no order is lost. Four warps share the
// rows: warp p takes runs p, p + 4, ..., and meets accumulators 8 * p and the seven after it. A weight is unpacked once
// for all groups.
//
// A sum starts at 1.5 * 2^23, as an integer: its bits are then a float from which an addition takes that off again,
// with what the type's offset amounts to. So nothing is converted. Integers here are far below 2^22, and what is made of
// them below 2^24, so floats hold them exactly; sums of two products start at +0, lest a zero were negative.
#pragma once

#include "rows.cuh"

constexpr i32 TILE_ROWS = 16, PARTS = 4; // rows that four warps share
constexpr i32 RUN = 8;                   // blocks of 32 that a warp takes at a time
constexpr i32 GROUP = 8;                 // tokens of an mma
constexpr i32 SUM_START = 0x4b400000;
constexpr float START = 12582912.0f; // the same bits

// Runs of rows of k columns in shared memory, from which they were copied in pieces of 16 bytes: row r at r * PITCH.
template <Type type, i32 k>
struct Runs {
    static constexpr i32 BYTES = row_bytes_of(type, 32 * RUN), ROW_BYTES = row_bytes_of(type, k);
    static constexpr i32 N = (k / 32 + RUN - 1) / RUN;
    static constexpr i32 ALIGN = common_divisor(common_divisor(BYTES, ROW_BYTES), 16); // of their addresses
    static constexpr i32 PIECES = (BYTES + 16 - ALIGN + 15) / 16;
    // Lanes read four bytes of eight rows, or where rows are aligned eight bytes of four rows, without bank conflicts.
    static constexpr i32 PITCH = ALIGN == 16 ? 16 * PIECES + (96 - 16 * PIECES % 64) % 64 : 16 * (PIECES | 1);
    static constexpr i32 STAGE_BYTES = TILE_ROWS * PITCH + 16; // a word is read beyond
};

// What a term needs besides its integer sums, of a row and a block. scale, minimum: as in Block, less the shift of q;
// SIXTEENS has its second scale in place of the minimum. factor: of the halves (HALVES), then those of the minimum or,
// without a minimum, the scale.
struct Constants {
    float2 scale[TILE_ROWS][RUN + 2];  // (2 and 1 keep the rows in different banks)
    float4 factor[TILE_ROWS][RUN + 1]; // in shared memory where a type has halves
};
DEVICE constexpr i32 constants_bytes(bool halves) { return (i32)(halves ? sizeof(Constants) : sizeof(Constants::scale)); }

// Activations: q [T, k] with `stride` bytes a row; the others in shared memory, of block b and tokens 2 * p and the next
// at b * PAIRS + p.
struct WideInput {
    const i8* q;
    const float4* scaled; // d of both tokens, then their sums
    const float4* halves; // sums of the first halves of both tokens, then of the second halves
    i32 stride, last;     // of the tokens
};

// The warp's shared memory, and where the run begins in it.
struct WideStage {
    const u8* run;
    Constants* constants;
    u8* unpacked; // 4 KiB
    i32 skew[2];  // of rows lane / 4 and 8 further
};

template <Type type>
DEVICE void put_constants(Constants& to, i32 row, i32 j, const Block& w) {
    typedef BlockCode<type> Code;
    const float shrink = Code::MINIMUM ? __uint_as_float((u32)(127 - w.shift) << 23) : 1.0f;
    if constexpr (has_halves(type)) {
        const float f0 = (float)w.factor[0], f1 = (float)w.factor[1];
        if constexpr (Code::MINIMUM)
            to.factor[row][j] = make_float4(f0, f1, (float)w.minimum_factor[0], (float)w.minimum_factor[1]);
        else
            to.factor[row][j] = make_float4(f0, f1, w.scale, 0.0f);
    }
    if constexpr (Code::MINIMUM)
        to.scale[row][j] = make_float2(w.scale * shrink, w.minimum);
    else if constexpr (is_kind(type, Kind::SIXTEENS))
        to.scale[row][j] = make_float2(w.scale, w.second);
    else if constexpr (!has_halves(type))
        to.scale[row][j] = make_float2(w.scale, 0.0f);
}

// --- fragments ------------------------------------------------------------------------------------

// A run as fragments of the mma. Lane 4 * g + t has of rows g and g + 8 words t and t + 4 of each block, or, PAIRED, words
// 2 * t and 2 * t + 1, in the order (g first, g + 8 first, g second, g + 8 second).
//   prepare   by the whole warp, once a run: the constants
//   get       the fragment of block j; blocks come in ascending order
//
// A type without a specialization: lanes unpack whole blocks as for one token, and the warp exchanges them.
template <Type type>
struct Fragments {
    static constexpr bool PAIRED = true;

    template <i32 k>
    DEVICE void prepare(const WideStage& s, i32 n_blocks) {
        typedef Runs<type, k> R;
        const i32 lane = threadIdx.x % WARP, row = lane % 16;
        // Lane 4 * (row % 8) has the skew of rows row % 8 and 8 further.
        const i32 skew0 = __shfl_sync(FULL_WARP, s.skew[0], 4 * (row % 8)), skew1 = __shfl_sync(FULL_WARP, s.skew[1], 4 * (row % 8));
#pragma unroll 1
        for (i32 j = lane / 16; j < n_blocks; j += 2) {
            Block w;
            load_block<type>(s.run, row * R::PITCH + (row < 8 ? skew0 : skew1), j, w);
            put_constants<type>(*s.constants, row, j, w);
            uint4* const to = (uint4*)(s.unpacked + row * 256 + (j ^ (row & 7)) * 32);
            to[0] = make_uint4(w.q[0], w.q[1], w.q[2], w.q[3]);
            to[1] = make_uint4(w.q[4], w.q[5], w.q[6], w.q[7]);
        }
    }

    template <i32 k>
    DEVICE void get(const WideStage& s, i32 j, u32 (&a)[4]) {
        const i32 g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
        for (i32 r = 0; r < 2; r++) {
            const u8* const block = s.unpacked + (g + 8 * r) * 256 + (j ^ g) * 32;
            if constexpr (has_halves(type) || is_kind(type, Kind::SIXTEENS)) {
                a[r] = *(const u32*)(block + 4 * t);
                a[r + 2] = *(const u32*)(block + 16 + 4 * t);
            } else {
                const uint2 v = *(const uint2*)(block + 8 * t);
                a[r] = v.x;
                a[r + 2] = v.y;
            }
        }
    }
};

// --- terms ----------------------------------------------------------------------------------------

// What a lane needs of the activations of a block: words of a token, scales and sums of two.
struct WideBlock {
    u32 b0, b1;
    float d[2], sum[2];
    float half[4]; // the first halves of both tokens, the second ones
};

template <Type type>
DEVICE constexpr bool in_halves() { return has_halves(type) || is_kind(type, Kind::SIXTEENS); }

template <Type type, i32 pairs>
DEVICE void load_wide(const WideInput& x, i32 b, i32 group, WideBlock& to) {
    const i32 lane = threadIdx.x % WARP, t = lane % 4;
    const i8* const q = x.q + (i64)min(GROUP * group + lane / 4, x.last) * x.stride + 32 * b;
    if constexpr (in_halves<type>() || !Fragments<type>::PAIRED) {
        to.b0 = *(const u32*)(q + 4 * t);
        to.b1 = *(const u32*)(q + 16 + 4 * t);
    } else {
        const uint2 v = *(const uint2*)(q + 8 * t);
        to.b0 = v.x;
        to.b1 = v.y;
    }
    const i32 at = b * pairs + GROUP / 2 * group + t;
    const float4 s = x.scaled[at];
    to.d[0] = s.x, to.d[1] = s.y, to.sum[0] = s.z, to.sum[1] = s.w;
    if constexpr (has_halves(type)) {
        const float4 h = x.halves[at];
        to.half[0] = h.x, to.half[1] = h.y, to.half[2] = h.z, to.half[3] = h.w;
    }
}

// acc += d * term, of the lane's two rows and two tokens.
template <Type type>
DEVICE void add_terms(float (&acc)[4], const u32 (&a)[4], const float2 (&scale)[2], const float4 (&factor)[2],
                      const WideBlock& x) {
    typedef BlockCode<type> Code;
    constexpr float OFFSET = (float)Code::OFFSET;
    if constexpr (in_halves<type>()) {
        i32 sums[2][4];
        mma_bytes<Code::SIGNED>(sums[0], a[0], a[1], x.b0, SUM_START);
        mma_bytes<Code::SIGNED>(sums[1], a[2], a[3], x.b1, SUM_START);
#pragma unroll
        for (i32 i = 0; i < 4; i++) {
            const i32 r = i / 2, t = i % 2;
            float half[2];
#pragma unroll
            for (i32 h = 0; h < 2; h++)
                half[h] = __int_as_float(sums[h][i]) -
                          (Code::OFFSET ? __fmaf_rn(OFFSET, x.half[2 * h + t], START) : START);
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
        i32 sums[4];
        mma_bytes<Code::SIGNED>(sums, a, x.b0, x.b1, SUM_START);
#pragma unroll
        for (i32 i = 0; i < 4; i++) {
            const i32 r = i / 2, t = i % 2;
            const float sum = __int_as_float(sums[i]) - (Code::OFFSET ? __fmaf_rn(OFFSET, x.sum[t], START) : START);
            const float term = Code::MINIMUM ? __fmaf_rn(scale[r].x, sum, -(scale[r].y * x.sum[t])) : scale[r].x * sum;
            acc[i] = __fmaf_rn(x.d[t], term, acc[i]);
        }
    }
}

// acc[group][j] += the terms of block j of the run, which begins at block `first` of the rows.
template <Type type, i32 k, i32 groups>
DEVICE void multiply_run(float (&acc)[groups][RUN][4], const WideStage& s, i32 first, const WideInput& x) {
    constexpr bool NO_FACTOR = !has_halves(type), NO_SCALE = has_halves(type) && !BlockCode<type>::MINIMUM;
    const i32 g = threadIdx.x % WARP / 4, n_blocks = min(RUN, k / 32 - first);
    Fragments<type> fragments;
    fragments.template prepare<k>(s, n_blocks);
    __syncwarp();
#pragma unroll
    for (i32 j = 0; j < RUN; j++)
        if (k % (32 * RUN) == 0 || j < n_blocks) {
            u32 a[4];
            fragments.template get<k>(s, j, a);
            float2 scale[2];
            float4 factor[2];
#pragma unroll
            for (i32 r = 0; r < 2; r++) {
                scale[r] = NO_SCALE ? make_float2(0.0f, 0.0f) : s.constants->scale[g + 8 * r][j];
                factor[r] = NO_FACTOR ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : s.constants->factor[g + 8 * r][j];
            }
#pragma unroll
            for (i32 group = 0; group < groups; group++) {
                WideBlock b;
                load_wide<type, GROUP / 2 * groups>(x, first + j, group, b);
                add_terms<type>(acc[group][j], a, scale, factor, b);
            }
        }
}

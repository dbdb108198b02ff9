// Terms with the one row of activations that a lane keeps in registers: fewer instructions than block_term.
//
// Integer instructions that are neither products nor loads (shifts, masks, permutations) run at half the rate of others
// and bound these kernels. Activations meet several rows, so they are arranged once as a type's bytes happen to lie:
// codes need not be put in order, and bits that share a byte with others are masked where they are, since dot products
// of multiples are multiples. All integers are exact, so any order gives the bits of block_term.
#pragma once

#include "blocks.cuh"

// Where block b of 32 weights of the row at `offset` begins, or the larger block that it is in.
template <Type type>
DEVICE i32 block_at(i32 offset, i32 b) {
    return offset + b / (BlockType<type>::BLOCK_ELEMENTS / 32) * BlockType<type>::BLOCK_BYTES;
}

// Activations of a block of 32 as a type takes them; at most sixteen words.
struct Arranged {
    i32 x[16];
};

// How a type does it; the general form takes block_term.
//   arrange  activations for blocks of the same alignment as one at `at`; FIXED: for all
//   term     of block b of the row at `offset`
template <Type type>
struct Single {
    static constexpr bool ARRANGED = false;
};

// --- 16 values that codes of four bits name ----------------------------------------------------------

// Four codes are selectors of two permutations. In one those below 8 name a byte and the others its sign, in the other,
// with all bits flipped, the reverse; the signs are 0, or -1 with a table that makes up for it. Both are multiplied.
struct SixteenValues {
    u32 low[2], high[2]; // high: from code 15 down to 8
};
constexpr SixteenValues IQ4_VALUES = {{0xbfad9881u, 0xf6eaddcfu}, {0x36465a72u, 0x020e1a27u}}; // signs -1, 0
constexpr SixteenValues E2M1_VALUES = {{0x04030200u, 0x0d090705u}, {0xfcfaf8f4u, 0x00fffefdu}}; // signs 0, -1 (0 of 0)

// Selectors of four codes each in their low 16 bits, and all their bits flipped.
struct Selectors {
    u32 codes[8], flipped[8];
};

// 16 bytes of codes as such. Shifts would take as long as permutations do, so halves are loaded or multiplied.
template <i32 align>
DEVICE void load_selectors(const u8* stage, i32 at, Selectors& to) {
    if constexpr (align == 2) {
#pragma unroll
        for (i32 i = 0; i < 8; i++) {
            to.codes[i] = load_half(stage, at + 2 * i);
            to.flipped[i] = ~to.codes[i];
        }
    } else {
        u32 v[4];
        load_run<align>(stage, at, v);
#pragma unroll
        for (i32 i = 0; i < 4; i++) {
            to.codes[2 * i] = v[i], to.codes[2 * i + 1] = upper_half(v[i]);
            to.flipped[2 * i] = half_flipped<false>(v[i]), to.flipped[2 * i + 1] = half_flipped<true>(v[i]);
        }
    }
}

// Selector i is of elements e, n + e, e + 1, n + e + 1; x their activations in that order.
template <const SixteenValues& V>
DEVICE void add_values(const Selectors& of, i32 i, i32 x, i32& low, i32& high) {
    low = __dp4a((i32)permute_or_sign(V.low[0], V.low[1], of.codes[i]), x, low);
    high = __dp4a((i32)permute_or_sign(V.high[0], V.high[1], of.flipped[i]), x, high);
}

// Words a and b of activations, by turns.
DEVICE void interleave(i32 a, i32 b, i32& first, i32& second) {
    first = (i32)__byte_perm((u32)a, (u32)b, 0x5140u);
    second = (i32)__byte_perm((u32)a, (u32)b, 0x7362u);
}

// A block of 16 bytes of codes, the first 16 in the low halves.
template <Type type, const SixteenValues& V>
struct ValueTerm {
    static constexpr bool ARRANGED = true, FIXED = true;

    DEVICE void arrange(const Activations& a, i32, Arranged& to) {
#pragma unroll
        for (i32 i = 0; i < 4; i++)
            interleave(a.q[i], a.q[i + 4], to.x[2 * i], to.x[2 * i + 1]);
    }
    DEVICE float term(const u8* stage, i32 offset, i32 b, const Activations&, const Arranged& x) {
        typedef BlockCode<type> Code;
        const i32 at = block_at<type>(offset, b);
        Selectors codes;
        load_selectors<Code::CODE_ALIGN>(stage, Code::codes_at(at, b), codes);
        i32 low = 0, high = 0;
#pragma unroll
        for (i32 i = 0; i < 8; i++)
            add_values<V>(codes, i, x.x[i], low, high);
        return Code::scale_at(stage, at, b) * (float)(low + high);
    }
};

template <>
struct Single<IQ4_NL> : ValueTerm<IQ4_NL, IQ4_VALUES> {};
template <>
struct Single<IQ4_XS> : ValueTerm<IQ4_XS, IQ4_VALUES> {};
template <>
struct Single<MXFP4> : ValueTerm<MXFP4, E2M1_VALUES> {};

template <>
struct Single<NVFP4> {
    static constexpr bool ARRANGED = true, FIXED = true;

    DEVICE void arrange(const Activations& a, i32, Arranged& to) {
#pragma unroll
        for (i32 i = 0; i < 4; i++) { // each eight bytes have 16 elements
            const i32 from = i / 2 * 4 + i % 2;
            interleave(a.q[from], a.q[from + 2], to.x[2 * i], to.x[2 * i + 1]);
        }
    }
    DEVICE float term(const u8* stage, i32 offset, i32 b, const Activations&, const Arranged& x) {
        const i32 at = block_at<NVFP4>(offset, b);
        Selectors codes;
        load_selectors<4>(stage, at + 4 + 16 * (b & 1), codes);
        i32 low[2] = {0, 0}, high[2] = {0, 0};
#pragma unroll
        for (i32 i = 0; i < 8; i++)
            add_values<E2M1_VALUES>(codes, i, x.x[i], low[i / 4], high[i / 4]);
        float scale[2];
        BlockCode<NVFP4>::load_scales(stage, at, b, scale);
        return scale[0] * (float)(low[0] + high[0]) + scale[1] * (float)(low[1] + high[1]);
    }
};

// --- words that begin in the middle of a block -------------------------------------------------------

// Blocks of 210 bytes begin at any even byte. Where that is no multiple of 4, words are taken as they lie and the
// activations are moved by two bytes instead, zeros behind their ends; the word in the middle has two of each half.
// x[0..3]: of the first half, x[4]: its rest in word 4, x[5]: the second half's part of word 4, x[6..9]: words 5 to 8.
DEVICE void arrange_moved(const Activations& a, bool moved, Arranged& to) {
    const i32 shift = moved ? 16 : 0;
    u32 before = 0;
#pragma unroll
    for (i32 i = 0; i < 9; i++) {
        const u32 word = i < 8 ? (u32)a.q[i] : 0;
        if (i == 4) {
            to.x[4] = (i32)__funnelshift_l(before, 0, shift);
            to.x[5] = (i32)(word << shift);
        } else {
            to.x[i < 4 ? i : i + 1] = (i32)__funnelshift_l(before, word, shift);
        }
        before = word;
    }
}

// Dot products of the bits under `mask` of nine words with each half.
DEVICE void add_masked(const u32 (&w)[9], u32 mask, const Arranged& x, i32 (&sum)[2]) {
#pragma unroll
    for (i32 i = 0; i < 9; i++) {
        const u32 bits = w[i] & mask;
        if (i <= 4)
            sum[0] = dot4_unsigned(bits, x.x[i], sum[0]);
        if (i >= 4)
            sum[1] = dot4_unsigned(bits, x.x[i + 1], sum[1]);
    }
}

template <>
struct Single<Q6_K> {
    static constexpr bool ARRANGED = true, FIXED = false;

    DEVICE void arrange(const Activations& a, i32 at, Arranged& to) { arrange_moved(a, at & 2, to); }
    DEVICE float term(const u8* stage, i32 offset, i32 b, const Activations& a, const Arranged& x) {
        const i32 s = b & 7, at = block_at<Q6_K>(offset, b);
        const i32 low_shift = 2 * (s & 2), high_shift = 2 * (s & 3);
        u32 low[9], high[9];
        load_words(stage, at + 64 * (s >> 2) + 32 * (s & 1), low);
        load_words(stage, at + 128 + 32 * (s >> 2), high);
        i32 four[2] = {0, 0}, two[2] = {0, 0};
        add_masked(low, 0x0f0f0f0fu << low_shift, x, four);
        add_masked(high, 0x03030303u << high_shift, x, two);
        const u32 factors = load_half(stage, at + 192 + 2 * s);
        const i32 first = (four[0] >> low_shift) + 16 * (two[0] >> high_shift) - 32 * a.first;
        const i32 second = (four[1] >> low_shift) + 16 * (two[1] >> high_shift) - 32 * (a.sum - a.first);
        return half_to_float(load_half(stage, at + 208)) * (float)((i8)factors * first + (i8)(factors >> 8) * second);
    }
};

// --- six bits of scale and minimum --------------------------------------------------------------------

// Where block s of a superblock of Q4_K or Q5_K has them in its first 16 bytes.
struct ScaleBits {
    u32 selector, byte, shift, low, high;
};

DEVICE ScaleBits scale_bits(u32 s) {
    const u32 j = s % 4;
    const bool first = s < 4;
    return {j | (j + 4) << 8, 0x4440u | j, first ? 0u : 2u, first ? 0x003f003fu : 0x00300030u, first ? 0 : 0x000f000fu};
}

// Scale times a factor, minimum times another, as halves; bias: -1024 times both. 1024 + n is the bits of n below the
// exponent of 1024, so all is exact.
DEVICE u32 scale_and_minimum(const uint4& h, const ScaleBits& at, u32 factor, u32 bias) {
    const u32 four = __byte_perm(h.w, 0, at.byte) * 0x1001u;
    const u32 six = and_or(__byte_perm(h.y, h.z, at.selector) >> at.shift, at.low, 0x64006400u);
    return half2_fma(and_or(four, at.high, six), factor, bias);
}

// --- fifth bits in a word of their own ----------------------------------------------------------------

// Eight bits s as the top bits of eight nibbles: bits 3, 7, 2, 6, 1, 5, 0, 4. The four copies do not meet.
DEVICE u32 spread_eight(u32 s) { return s * 0x08040201u; }

// Codes of four bits and the fifth ones are multiplied apart, all where they are. x[0..7]: in order; x[8..15]: each four from the
// last to the first, as spread_eight has them.
template <Type type>
struct FifthTerm {
    static constexpr bool ARRANGED = true, FIXED = true;

    DEVICE void arrange(const Activations& a, i32, Arranged& to) {
#pragma unroll
        for (i32 i = 0; i < 8; i++) {
            to.x[i] = a.q[i];
            to.x[8 + i] = (i32)__byte_perm((u32)a.q[i], 0, 0x0123u);
        }
    }
    // `sum` + the dot product of a word of fifth bits and four words of codes, the first 16 in the low halves.
    DEVICE i32 dot(u32 fifth, const u32* codes, const Arranged& x, i32 sum) {
        i32 high = 0, eight = 0, top = 0; // 16, 1/2 and 8 times what they mean
#pragma unroll
        for (i32 i = 0; i < 4; i++) {
            sum = dot4_unsigned(codes[i] & 0x0f0f0f0fu, x.x[i], sum);
            high = dot4_unsigned(codes[i] & 0xf0f0f0f0u, x.x[i + 4], high);
            const u32 bits = spread_eight(times_byte(fifth, i, 1));
            eight = dot4_unsigned(bits & 0x08080808u, x.x[8 + 2 * i], eight);
            top = dot4_unsigned(bits & 0x80808080u, x.x[9 + 2 * i], top);
        }
        return sum + (high >> 4) + 2 * eight + (top >> 3);
    }
};

template <>
struct Single<Q5_0> : FifthTerm<Q5_0> {
    DEVICE float term(const u8* stage, i32 offset, i32 b, const Activations& a, const Arranged& x) {
        const i32 at = block_at<Q5_0>(offset, b);
        u32 w[5];
        load_run<2>(stage, at + 2, w);
        return half_to_float(load_half(stage, at)) * (float)dot(w[0], w + 1, x, -16 * a.sum);
    }
};

template <>
struct Single<Q5_1> : FifthTerm<Q5_1> {
    DEVICE float term(const u8* stage, i32 offset, i32 b, const Activations& a, const Arranged& x) {
        u32 w[6];
        load_run<4>(stage, block_at<Q5_1>(offset, b), w);
        const float minimum = -half_to_float((u16)(w[0] >> 16));
        return __fmaf_rn(half_to_float((u16)w[0]), (float)dot(w[1], w + 2, x, 0), -(minimum * (float)a.sum));
    }
};

// --- bits that lie in planes --------------------------------------------------------------------------

// Q5_K: bit s of 32 bytes is the fifth one of block s. Both parts are masked where they are.
template <>
struct Single<Q5_K> {
    static constexpr bool ARRANGED = true, FIXED = true;

    DEVICE void arrange(const Activations& a, i32, Arranged& to) {
#pragma unroll
        for (i32 i = 0; i < 8; i++)
            to.x[i] = a.q[i];
    }
    DEVICE float term(const u8* stage, i32 offset, i32 b, const Activations& a, const Arranged& x) {
        const i32 s = b & 7, at = block_at<Q5_K>(offset, b), shift = 4 * (s & 1);
        const u32 low_mask = 0x0f0f0f0fu << shift, high_mask = 0x01010101u << s;
        const uint4 h = *(const uint4*)(stage + at);
        u32 low[8], high[8];
        load_32_bytes(stage, at + 48 + 32 * (s >> 1), low);
        load_32_bytes(stage, at + 16, high);
        i32 four = 0, fifth = 0;
#pragma unroll
        for (i32 i = 0; i < 8; i++) {
            four = dot4_unsigned(low[i] & low_mask, x.x[i], four);
            fifth = dot4_unsigned(high[i] & high_mask, x.x[i], fifth);
        }
        const i32 total = (four >> shift) + 16 * (fifth >> s);
        const u32 pair = scale_and_minimum(h, scale_bits(s), 0x3c003c00u, 0xe400e400u); // times 1
        const float scale = half_to_float((u16)h.x) * half_to_float((u16)pair);
        const float minimum = half_to_float((u16)(h.x >> 16)) * half_to_float((u16)(pair >> 16));
        return __fmaf_rn(scale, (float)total, -(minimum * (float)a.sum));
    }
};

// --- grids --------------------------------------------------------------------------------------------

// Byte i of w.
DEVICE u32 byte_of(u32 w, i32 i) { return __byte_perm(w, 0, 0x4440u + i); }

// The term of a block with these sums of its halves.
template <Type type>
DEVICE float grid_term(const u8* stage, i32 at, i32 s, i32 first, i32 second) {
    typedef GridBlock<type> G;
    const u32 scales = G::scales(stage, at, s);
    const float d = half_to_float(load_half(stage, at));
    if constexpr (has_halves(type))
        return d * G::SHRINK * (float)((i32)odd_factor(scales) * first + (i32)odd_factor(scales >> 4) * second);
    return d * (float)(i32)odd_factor(scales) * G::SHRINK * (float)(first + second);
}

// IQ2: an entry's nibbles say a level in bits 1 and 2, in the order of spread_eight, and take the sign in bit 3; moved
// down by a bit they select of three levels and their negatives.
template <Type type>
struct Iq2Term {
    static constexpr bool ARRANGED = true, FIXED = true;
    static constexpr Levels LEVELS = GridBlock<type>::LEVELS;
    static constexpr u32 NEGATIVE = (LEVELS.low ^ 0x00ffffffu) + 0x00010101u; // no level is 0

    DEVICE void arrange(const Activations& a, i32, Arranged& to) {
#pragma unroll
        for (i32 i = 0; i < 8; i += 2) {
            to.x[i] = (i32)__byte_perm((u32)a.q[i], (u32)a.q[i + 1], 0x6273u);
            to.x[i + 1] = (i32)__byte_perm((u32)a.q[i], (u32)a.q[i + 1], 0x4051u);
        }
    }
    DEVICE float term(const u8* stage, i32 offset, i32 b, const Activations&, const Arranged& x) {
        typedef GridBlock<type> G;
        const i32 s = b & 7, at = block_at<type>(offset, b);
        G g;
        G::load(g, stage, at, s);
        i32 sum[2] = {0, 0};
#pragma unroll
        for (i32 i = 0; i < 4; i++) {
            const u32 w = and_or(spread_eight(times_byte(g.signs, i, 1)), 0x88888888u, G::spread_entry(g, i));
            sum[i / 2] = __dp4a((i32)permute_or_sign(LEVELS.low, NEGATIVE, w >> 1), x.x[2 * i], sum[i / 2]);
            sum[i / 2] = __dp4a((i32)permute_or_sign(LEVELS.low, NEGATIVE, w >> 17), x.x[2 * i + 1], sum[i / 2]);
        }
        return grid_term<type>(stage, at, s, sum[0], sum[1]);
    }
};

// IQ3: an entry's bytes are the magnitudes of four weights from the last to the first, twice the negative ones off.
template <Type type>
struct Iq3Term {
    static constexpr bool ARRANGED = true, FIXED = true;

    DEVICE void arrange(const Activations& a, i32, Arranged& to) {
#pragma unroll
        for (i32 i = 0; i < 8; i++)
            to.x[i] = (i32)__byte_perm((u32)a.q[i], 0, 0x0123u);
    }
    DEVICE float term(const u8* stage, i32 offset, i32 b, const Activations&, const Arranged& x) {
        typedef GridBlock<type> G;
        const i32 s = b & 7, at = block_at<type>(offset, b);
        G g;
        G::load(g, stage, at, s);
        i32 sum = 0, negative = 0;
#pragma unroll
        for (i32 i = 0; i < 8; i++) {
            // Signs of four weights as the top bits of bytes, then as whole bytes.
            const u32 signs = spread_eight(byte_of(g.signs, i / 2)) << (i % 2 ? 0 : 4);
            const u32 magnitudes = G::magnitudes(g, i);
            sum = __dp4a((i32)magnitudes, x.x[i], sum);
            negative = __dp4a((i32)(magnitudes & permute_or_sign(signs, 0, 0xba98u)), x.x[i], negative);
        }
        return grid_term<type>(stage, at, s, sum - 2 * negative, 0);
    }
};

template <>
struct Single<IQ2_XXS> : Iq2Term<IQ2_XXS> {};
template <>
struct Single<IQ2_XS> : Iq2Term<IQ2_XS> {};
template <>
struct Single<IQ2_S> : Iq2Term<IQ2_S> {};
template <>
struct Single<IQ3_XXS> : Iq3Term<IQ3_XXS> {};
template <>
struct Single<IQ3_S> : Iq3Term<IQ3_S> {};

// --- any of them -----------------------------------------------------------------------------------------

template <Type type>
DEVICE float single_term(const u8* stage, i32 offset, i32 b, const Activations& a) {
    if constexpr (Single<type>::ARRANGED) {
        Arranged x;
        Single<type>::arrange(a, block_at<type>(offset, b), x);
        return Single<type>::term(stage, offset, b, a, x);
    } else {
        Block w;
        load_block<type>(stage, offset, b, w);
        return block_term<type>(w, a);
    }
}

// --- Q4_K for one token ---------------------------------------------------------------------------

// Two blocks share 32 bytes, one has the low halves, the other the high ones. Two neighboring lanes read 16 of the
// bytes each, add up both blocks' products there, and exchange one sum: half the loads and no shifts.

#define RECORD(name, id, elements, bytes, kind, ...) \
    static_assert(Kind::kind != Kind::PAIRS || name == Q4_K, #name ": split_term has the layout of Q4_K");
BLOCK_TYPES(RECORD)
#undef RECORD

// What a lane takes of the activations for block b: 16 elements of the block, the same 16 of its neighbor b ^ 1.
struct SplitActivations {
    i32 own[4], other[4];
    float d, sum;
};

constexpr i32 SPLIT_BYTES = 4 * BlockType<Q4_K>::BLOCK_BYTES; // that a warp reads at a time

// What differs among lanes. Lane j reads piece j % 8 of superblock j / 8 of four.
struct SplitLane {
    i32 head, at;                        // offsets of the superblock and of the piece
    u32 own, other;                      // masks of the two blocks' bits
    ScaleBits bits;
    u32 factor, bias;                    // halves: the scale makes up for bits that were not shifted down
};

DEVICE SplitLane split_lane() {
    const i32 lane = threadIdx.x % WARP;
    const u32 s = lane % 8;
    const bool odd = s & 1;
    SplitLane l;
    l.head = lane / 8 * BlockType<Q4_K>::BLOCK_BYTES;
    l.at = l.head + 16 + 16 * s;
    l.own = odd ? 0xf0f0f0f0u : 0x0f0f0f0fu;
    l.other = ~l.own;
    l.bits = scale_bits(s);
    l.factor = odd ? 0x3c002c00u : 0x3c003c00u; // (1, 1 / 16) or (1, 1)
    l.bias = odd ? 0xe400d400u : 0xe400e400u;   // 1024 times that, negative
    return l;
}

// The term of the lane's block; `head` and `piece` as SplitLane has them. The whole warp takes part.
DEVICE float split_term(const u8* head, const u8* piece, const SplitLane& l, const SplitActivations& x) {
    const uint4 h = *(const uint4*)head, v = *(const uint4*)piece;
    const u32 words[4] = {v.x, v.y, v.z, v.w};
    i32 own = 0, other = 0;
#pragma unroll
    for (i32 i = 0; i < 4; i++)
        other = dot4_unsigned(words[i] & l.other, x.other[i], other);
#pragma unroll
    for (i32 i = 0; i < 4; i++)
        own = dot4_unsigned(words[i] & l.own, x.own[i], own);
    own += __shfl_xor_sync(FULL_WARP, other, 1);
    const u32 pair = scale_and_minimum(h, l.bits, l.factor, l.bias);
    const float scale = half_to_float((u16)h.x) * half_to_float((u16)pair);
    const float minimum = half_to_float((u16)(h.x >> 16)) * half_to_float((u16)(pair >> 16));
    return __fmaf_rn(scale, (float)own, -(minimum * x.sum));
}

// --- Q3_K for one token ---------------------------------------------------------------------------

// Four blocks of a superblock, a quad, share 32 bytes, two bits of each for every block; the third bits of all eight blocks share
// 32 others. Lane j % 4 of a quad takes elements 8 j to 8 j + 8 of its four blocks and adds up what it has of each; the lanes
// then exchange sums. A lane reads 16 bytes, not 64. Its sum i is that of block j ^ i, so that no lane has to choose which to send.

#define RECORD(name, id, elements, bytes, kind, ...) \
    static_assert(Kind::kind != Kind::FOURS || name == Q3_K, #name ": quad_term has the layout of Q3_K");
BLOCK_TYPES(RECORD)
#undef RECORD

// What a lane takes of the activations: elements of block b ^ i in x[2 i] and x[2 i + 1], and minus what weights that are 4 too
// large would add to their sum; the scale is that of block b.
struct QuadActivations {
    i32 x[8], start[4];
    float d;
};

// Block i of a quad has its two bits times 2^quad_shift(i).
DEVICE i32 quad_shift(i32 i) { return 2 * i; }

// What differs among lanes.
struct QuadLane {
    u32 low[4], high[4];  // masks of two bits and of the third one, which is moved down by high_shift first
    i32 high_factor[4];   // makes of the third one four times the two bits, which are not moved
    i32 low_at, high_at;  // offsets of the lane's eight bytes
    i32 high_shift, shift;
    u32 swap;             // of the two factors, where the lane has second halves
};

DEVICE QuadLane quad_lane() {
    const i32 s = threadIdx.x % 8, j = s % 4, quad = s / 4;
    QuadLane l;
#pragma unroll
    for (i32 i = 0; i < 4; i++) {
        const i32 block = j ^ i;
        l.low[i] = 0x03030303u << quad_shift(block), l.high[i] = 0x01010101u << block;
        l.high_factor[i] = 4 << (quad_shift(block) - block);
    }
    l.low_at = 32 + 32 * quad + 8 * j, l.high_at = 8 * j;
    l.high_shift = 4 * quad, l.shift = quad_shift(j);
    l.swap = j < 2 ? 0x4410u : 0x4401u;
    return l;
}

// Eight bytes from a word on, moved down by at most 31 bits.
DEVICE void load_eight(const u8* word, i32 shift, u32 (&to)[2]) {
    u32 w[3];
    load_words(word, 0, w);
    to[0] = __funnelshift_r(w[0], w[1], shift);
    to[1] = __funnelshift_r(w[1], w[2], shift);
}

// The term of the lane's block of the superblock that begins `moved`, 0 or 2, bytes behind a word. The whole warp takes part.
DEVICE float quad_term(const u8* word, i32 moved, const QuadLane& l, const QuadActivations& a) {
    u32 low[2], high[2];
    load_eight(word + l.low_at, 8 * moved, low);
    load_eight(word + l.high_at, 8 * moved + l.high_shift, high); // bits from above come in, but not under the masks
    i32 sum[4];
#pragma unroll
    for (i32 i = 0; i < 4; i++) {
        i32 two = a.start[i], third = 0;
#pragma unroll
        for (i32 w = 0; w < 2; w++) {
            two = dot4_unsigned(low[w] & l.low[i], a.x[2 * i + w], two);
            third = dot4_unsigned(high[w] & l.high[i], a.x[2 * i + w], third);
        }
        sum[i] = third * l.high_factor[i] + two;
    }
    sum[0] += __shfl_xor_sync(FULL_WARP, sum[1], 1);
    sum[2] += __shfl_xor_sync(FULL_WARP, sum[3], 1);
    const i32 other = __shfl_xor_sync(FULL_WARP, sum[2], 2); // of the half that the lane does not have
    const u8* const at = word + moved;
    typedef BlockCode<Q3_K> Code;
    const u32 factors = __byte_perm(Code::load_factors(at, 0, threadIdx.x % 8), 0, l.swap);
    const i32 total = Code::factor(factors & 255) * sum[0] + Code::factor(factors >> 8) * other;
    return half_to_float(load_half(at, 108)) * (float)(total >> l.shift);
}

// --- lanes that share bytes ----------------------------------------------------------------------------

// Terms of the lanes' blocks, by a warp: of block 32 i + lane among those that lie at stage + offset + `at`, a multiple of the
// bytes of rows of k columns. Without `valid` there is no such block, and the term is of another one. What lanes differ in is
// found once.
template <Type type, Kind kind = BlockType<type>::KIND>
struct SharedTerm;

template <Type type>
struct SharedTerm<type, Kind::PAIRS> {
    const SplitLane l = split_lane();
    const u8* const base;

    __device__ SharedTerm(const u8* stage, i32 offset, i32) : base(stage + offset) {}
    __device__ float operator()(i32 at, i32 i, bool valid, const SplitActivations& a) const {
        const u8* const head = base + at + (valid ? i * SPLIT_BYTES + l.head : 0);
        return split_term(head, base + at + (valid ? i * SPLIT_BYTES + l.at : 0), l, a);
    }
};

// Superblocks begin at any even byte. Four of them, and all rows but those of odd numbers of superblocks, are a multiple of four
// bytes apart, so that pointers and shifts are found once.
template <Type type>
struct SharedTerm<type, Kind::FOURS> {
    static constexpr i32 BYTES = BlockType<type>::BLOCK_BYTES;
    const QuadLane l = quad_lane();
    const u8* word;
    i32 moved;

    __device__ SharedTerm(const u8* stage, i32 offset, i32 k) {
        const i32 first = offset + min((i32)threadIdx.x % WARP / 8, k / 256 - 1) * BYTES;
        word = stage + (first & ~3), moved = first & 2;
    }
    __device__ float operator()(i32 at, i32 i, bool valid, const QuadActivations& a) const {
        const i32 further = at + (valid ? 4 * i * BYTES : 0);
        if (at % 4 == 0)
            return quad_term(word + further, moved, l, a);
        const i32 from = moved + further;
        return quad_term(word + (from & ~3), from & 2, l, a);
    }
};

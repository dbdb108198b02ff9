// Weights of every native type to halves, in the registers of a tensor-core product.
//
// A product reads a row's weights in stages of ELEMENTS, copied to shared memory as they are in the file. A stage is
// cut in steps of 64 weights and a step in two units of 32. For one unit, lane c of a quad takes 4 consecutive weights
// out of each 16: `weights` gives them as pairs (0, 2) and (1, 3), which is what one mask takes out of a word of bytes
// or nibbles. Activations are kept in the same order within each 16 (halves.cu), so a product never reorders weights.
//
//   Format<type>::ELEMENTS     weights of a stage: a superblock, or several blocks
//   Format<type>::BYTES        the same in bytes
//   Format<type>::ALIGN        a row begins at a multiple of so many bytes (16 at most)
//   Format<type>::SCALES       words of scales of a stage, one or two for 32 weights; 0: none (these four are the record's)
//   Format<type>::INTERLEAVED  unit u of a step has weights 16u..16u+15 and 32+16u..32+16u+15, else 32u..32u+31
//   scales(raw, at, out, stride)             a stage's scales to out[0], out[stride]..., one for each 32 weights first
//   weights(raw, at, s, j, u, c, left, w)    unit u of step j: w[half unit][pair]; s: the scales of the two half
//                                            units, and the second words behind; left: weights of the row from this
//                                            step on
//
// `raw + at` is the stage in shared memory. Scales times sub-scales are rounded to halves once, weights once or twice:
// relative error 2^-11. F32 and BF16 weights above 65504 become infinite, and MXFP4's above 24576.
#pragma once

#include "grids.cuh"
#include "types.cuh"

// Pairs of halves.
#define HALF2_1024 0x64006400u      // 1024: its low mantissa bits count units
#define HALF2_MINUS_1024 0xe400e400u
#define HALF2_MINUS_1028 0xe404e404u
#define HALF2_MINUS_1032 0xe408e408u
#define HALF2_MINUS_1040 0xe410e410u
#define HALF2_MINUS_1056 0xe420e420u
#define HALF2_MINUS_1152 0xe480e480u
#define HALF2_SIXTEENTH 0x2c002c00u
#define HALF2_16 0x4c004c00u
#define HALF2_MINUS_64 0xd400d400u
#define HALF2_MINUS_72 0xd480d480u

template <int align>
DEVICE u32 load_word(const u8* raw, u32 at) {
    if (align >= 4) return *(const u32*)(raw + at);
    const u32* p = (const u32*)(raw + (at & ~3u));
    return __funnelshift_r(p[0], p[1], (at & (4 - align)) * 8);
}

DEVICE u32 both_low(u32 pair) { return __byte_perm(pair, pair, 0x1010); }
DEVICE u32 both_high(u32 pair) { return __byte_perm(pair, pair, 0x3232); }

// Bytes 0 and 2, or 1 and 3, of a word as the halves 1024 + byte.
DEVICE u32 even_bytes(u32 v) { return __byte_perm(v, 0x64646464u, 0x4240); }
DEVICE u32 odd_bytes(u32 v) { return __byte_perm(v, 0x64646464u, 0x4341); }

// Codes 0..31 of 32 weights, as Q5_0 and Q5_1 have them, for lane c of a quad: 4 of each 16, as bytes. bits: the
// fifth ones; at: of the other four.
template <int align>
DEVICE void five_bits(const u8* raw, u32 at, u32 bits, i32 c, u32 (&q)[2]) {
    const u32 v = load_word<align>(raw, at + 4 * c);
    q[0] = and_or(v, 0x0f0f0f0fu, fifth_bits(bits >> (4 * c)));
    q[1] = and_or(v >> 4, 0x0f0f0f0fu, fifth_bits(bits >> (16 + 4 * c)));
}

template <Type type>
struct Format; // a type without a specialization does not compile

// The part of it that the record says.
template <Type type>
struct Stage {
    typedef BlockType<type> R;
    static constexpr int BLOCK_BYTES = R::BLOCK_BYTES;
    static constexpr int ELEMENTS = R::STAGE, BYTES = R::STAGE / R::BLOCK_ELEMENTS * R::BLOCK_BYTES, SCALES = R::WORDS;
    static constexpr int DIVISOR = R::BLOCK_BYTES & -R::BLOCK_BYTES, ALIGN = DIVISOR < 16 ? DIVISOR : 16;
    static constexpr bool ONE_BLOCK = R::BLOCK_ELEMENTS == R::STAGE;  // so a row is a whole number of stages
    static_assert(R::STAGE % 64 == 0 && R::STAGE % R::BLOCK_ELEMENTS == 0, "a stage has whole steps and whole blocks");
};

// The header that Q4_K and Q5_K share: d, dmin, and eight pairs of 6-bit numbers in 12 bytes.
DEVICE void k_scales(const u8* raw, u32 at, u32* out, i32 stride) {
    const uint4 head = *(const uint4*)(raw + at);
    const u32 d = head.x ^ 0x80000000u;  // (d, -dmin)
    const u32 sc[2] = {head.y & 0x3f3f3f3fu, (head.w & 0x0f0f0f0fu) | ((head.y >> 2) & 0x30303030u)};
    const u32 mn[2] = {head.z & 0x3f3f3f3fu, ((head.w >> 4) & 0x0f0f0f0fu) | ((head.z >> 2) & 0x30303030u)};
#pragma unroll
    for (i32 b = 0; b < 8; ++b) {
        const i32 byte = b % 4;
        const u32 both = __byte_perm(sc[b / 4], mn[b / 4], byte | (byte << 4) | ((4 + byte) << 8) | ((4 + byte) << 12));
        const u32 numbers = half2_add(and_or(both, 0x00ff00ffu, HALF2_1024), HALF2_MINUS_1024);
        out[b * stride] = half2_mul(numbers, d);
    }
}

template <>
struct Format<Q4_K> : Stage<Q4_K> {
    static constexpr bool INTERLEAVED = true;

    DEVICE void scales(const u8* raw, u32 at, u32* out, i32 stride) { k_scales(raw, at, out, stride); }

    DEVICE void weights(const u8* raw, u32 at, const u32 (&s)[2], i32 j, i32 u, i32 c, i32, u32 (&w)[2][2]) {
        const u32 v = load_word<16>(raw, at + 16 + 32 * j + 16 * u + 4 * c);
#pragma unroll
        for (i32 pair = 0; pair < 2; ++pair) {
            const u32 q = v >> (8 * pair);
            const u32 low = half2_add(and_or(q, 0x000f000fu, HALF2_1024), HALF2_MINUS_1024);
            const u32 high = half2_fma(and_or(q, 0x00f000f0u, HALF2_1024), HALF2_SIXTEENTH, HALF2_MINUS_64);
            w[0][pair] = half2_fma(low, both_low(s[0]), both_high(s[0]));
            w[1][pair] = half2_fma(high, both_low(s[1]), both_high(s[1]));
        }
    }
};

template <>
struct Format<Q5_K> : Stage<Q5_K> {
    static constexpr bool INTERLEAVED = true;

    DEVICE void scales(const u8* raw, u32 at, u32* out, i32 stride) { k_scales(raw, at, out, stride); }

    DEVICE void weights(const u8* raw, u32 at, const u32 (&s)[2], i32 j, i32 u, i32 c, i32, u32 (&w)[2][2]) {
        const u32 low = load_word<16>(raw, at + 48 + 32 * j + 16 * u + 4 * c);
        const u32 fifth = load_word<16>(raw, at + 16 + 16 * u + 4 * c) >> (2 * j);
        const u32 q[2] = {and_or(low, 0x0f0f0f0fu, (fifth << 4) & 0x10101010u),
                          and_or(low >> 4, 0x0f0f0f0fu, (fifth << 3) & 0x10101010u)};
#pragma unroll
        for (i32 i = 0; i < 2; ++i) {
            const u32 even = half2_add(even_bytes(q[i]), HALF2_MINUS_1024);
            const u32 odd = half2_add(odd_bytes(q[i]), HALF2_MINUS_1024);
            w[i][0] = half2_fma(even, both_low(s[i]), both_high(s[i]));
            w[i][1] = half2_fma(odd, both_low(s[i]), both_high(s[i]));
        }
    }
};

// Scales and minimums are of 16 weights, two a word.
template <>
struct Format<Q2_K> : Stage<Q2_K> {
    static constexpr bool INTERLEAVED = true;

    DEVICE void scales(const u8* raw, u32 at, u32* out, i32 stride) {
        const u32 head = load_word<4>(raw, at + 80) ^ 0x80000000u;  // (d, -dmin)
        const u32 d[2] = {both_low(head), both_high(head)};
#pragma unroll
        for (i32 i = 0; i < 4; ++i) {
            const u32 four = load_word<4>(raw, at + 4 * i);
#pragma unroll
            for (i32 m = 0; m < 2; ++m) {
                const u32 numbers = (four >> (4 * m)) & 0x0f0f0f0fu;
                const u32 first = half2_add(__byte_perm(numbers, 0x64646464u, 0x4140), HALF2_MINUS_1024);
                const u32 second = half2_add(__byte_perm(numbers, 0x64646464u, 0x4342), HALF2_MINUS_1024);
                out[(8 * m + 2 * i) * stride] = half2_mul(first, d[m]);
                out[(8 * m + 2 * i + 1) * stride] = half2_mul(second, d[m]);
            }
        }
    }

    DEVICE void weights(const u8* raw, u32 at, const u32 (&s)[4], i32 j, i32 u, i32 c, i32, u32 (&w)[2][2]) {
        const u32 v = load_word<4>(raw, at + 16 + 32 * (j >> 1) + 16 * u + 4 * c) >> (4 * (j & 1));
#pragma unroll
        for (i32 i = 0; i < 2; ++i) {
            const u32 scale = u ? both_high(s[i]) : both_low(s[i]);
            const u32 minimum = u ? both_high(s[2 + i]) : both_low(s[2 + i]);
#pragma unroll
            for (i32 pair = 0; pair < 2; ++pair) {
                const u32 q = and_or(v >> (8 * pair + 2 * i), 0x00030003u, HALF2_1024);
                w[i][pair] = half2_fma(half2_add(q, HALF2_MINUS_1024), scale, minimum);
            }
        }
    }
};

template <>
struct Format<Q3_K> : Stage<Q3_K> {
    static constexpr bool INTERLEAVED = true;

    // Two scales a word: each is for 16 weights.
    DEVICE void scales(const u8* raw, u32 at, u32* out, i32 stride) {
        const u32 half = *(const u16*)(raw + at + 108);
        const u32 d = half | (half << 16);
        const u32 low[2] = {load_word<2>(raw, at + 96), load_word<2>(raw, at + 100)};
        const u32 top = load_word<2>(raw, at + 104);
#pragma unroll
        for (i32 i = 0; i < 4; ++i) {
            const u32 four = ((low[i & 1] >> (4 * (i >> 1))) & 0x0f0f0f0fu) | (((top >> (2 * i)) & 0x03030303u) << 4);
            const u32 first = half2_add(__byte_perm(four, 0x64646464u, 0x4140), HALF2_MINUS_1056);
            const u32 second = half2_add(__byte_perm(four, 0x64646464u, 0x4342), HALF2_MINUS_1056);
            out[2 * i * stride] = half2_mul(first, d);
            out[(2 * i + 1) * stride] = half2_mul(second, d);
        }
    }

    DEVICE void weights(const u8* raw, u32 at, const u32 (&s)[2], i32 j, i32 u, i32 c, i32, u32 (&w)[2][2]) {
        // All that is read of a row lies alike between words, so its address is rounded once.
        const u32* const h = (const u32*)(raw + (at & ~3u)) + 4 * u + c;
        const u32* const l = h + 8 + 8 * (j >> 1);
        const i32 between = (at & 2) * 8;
        const u32 high = __funnelshift_r(h[0], h[1], between) >> (2 * j);
        const u32 low = __funnelshift_r(l[0], l[1], between) >> (4 * (j & 1));
        const u32 q[2] = {and_or(low, 0x03030303u, (high << 2) & 0x04040404u),
                          and_or(low >> 2, 0x03030303u, (high << 1) & 0x04040404u)};
#pragma unroll
        for (i32 i = 0; i < 2; ++i) {
            const u32 scale = u ? both_high(s[i]) : both_low(s[i]);
            w[i][0] = half2_mul(half2_add(even_bytes(q[i]), HALF2_MINUS_1028), scale);
            w[i][1] = half2_mul(half2_add(odd_bytes(q[i]), HALF2_MINUS_1028), scale);
        }
    }
};

template <>
struct Format<Q6_K> : Stage<Q6_K> {
    static constexpr bool INTERLEAVED = true;

    // Two scales a word: each is for 16 weights.
    DEVICE void scales(const u8* raw, u32 at, u32* out, i32 stride) {
        const u32 half = *(const u16*)(raw + at + 208);
        const u32 d = half | (half << 16);
#pragma unroll
        for (i32 i = 0; i < 4; ++i) {
            const u32 four = load_word<2>(raw, at + 192 + 4 * i) ^ 0x80808080u;
            const u32 first = half2_add(__byte_perm(four, 0x64646464u, 0x4140), HALF2_MINUS_1152);
            const u32 second = half2_add(__byte_perm(four, 0x64646464u, 0x4342), HALF2_MINUS_1152);
            out[2 * i * stride] = half2_mul(first, d);
            out[(2 * i + 1) * stride] = half2_mul(second, d);
        }
    }

    // Steps 0 and 1 are the low and the high nibbles of the same bytes, and so are steps 2 and 3.
    DEVICE void weights(const u8* raw, u32 at, const u32 (&s)[2], i32 j, i32 u, i32 c, i32, u32 (&w)[2][2]) {
        // All that is read of a row lies alike between words, so its address is rounded once.
        const u32* const p = (const u32*)(raw + (at & ~3u)) + 4 * u + c;
        const u32* const l = p + 16 * (j >> 1);
        const u32* const h = p + 32 + 8 * (j >> 1);
        const i32 between = (at & 2) * 8, shift = 4 * (j & 1);
        const u32 high = __funnelshift_r(h[0], h[1], between) >> shift;
        const u32 low[2] = {__funnelshift_r(l[0], l[1], between) >> shift,
                            __funnelshift_r(l[8], l[9], between) >> shift};
        const u32 q[2] = {and_or(low[0], 0x0f0f0f0fu, (high << 4) & 0x30303030u),
                          and_or(low[1], 0x0f0f0f0fu, (high << 2) & 0x30303030u)};
#pragma unroll
        for (i32 i = 0; i < 2; ++i) {
            const u32 scale = u ? both_high(s[i]) : both_low(s[i]);
            w[i][0] = half2_mul(half2_add(even_bytes(q[i]), HALF2_MINUS_1056), scale);
            w[i][1] = half2_mul(half2_add(odd_bytes(q[i]), HALF2_MINUS_1056), scale);
        }
    }
};

// A scale and what is added begin a block of 32.
template <Type type>
struct SumFormat : Stage<type> {
    static constexpr bool INTERLEAVED = false;

    DEVICE void scales(const u8* raw, u32 at, u32* out, i32 stride) {
#pragma unroll
        for (i32 b = 0; b < 8; ++b) out[b * stride] = load_word<4>(raw, at + BlockType<type>::BLOCK_BYTES * b);
    }
};

// A scale begins a block of 32.
template <Type type>
struct ScaleFormat : Stage<type> {
    static constexpr bool INTERLEAVED = false;

    DEVICE void scales(const u8* raw, u32 at, u32* out, i32 stride) {
#pragma unroll
        for (i32 b = 0; b < Stage<type>::SCALES; ++b) {
            const u32 half = *(const u16*)(raw + at + BlockType<type>::BLOCK_BYTES * b);
            out[b * stride] = half | (half << 16);
        }
    }
};

template <>
struct Format<Q8_0> : ScaleFormat<Q8_0> {
    DEVICE void weights(const u8* raw, u32 at, const u32 (&s)[2], i32 j, i32 u, i32 c, i32, u32 (&w)[2][2]) {
#pragma unroll
        for (i32 i = 0; i < 2; ++i) {
            const u32 v = load_word<2>(raw, at + 34 * (2 * j + u) + 2 + 16 * i + 4 * c) ^ 0x80808080u;
            w[i][0] = half2_mul(half2_add(even_bytes(v), HALF2_MINUS_1152), s[i]);
            w[i][1] = half2_mul(half2_add(odd_bytes(v), HALF2_MINUS_1152), s[i]);
        }
    }
};

template <>
struct Format<Q4_0> : ScaleFormat<Q4_0> {
    DEVICE void weights(const u8* raw, u32 at, const u32 (&s)[2], i32 j, i32 u, i32 c, i32, u32 (&w)[2][2]) {
        const u32 v = load_word<2>(raw, at + 18 * (2 * j + u) + 2 + 4 * c);
#pragma unroll
        for (i32 pair = 0; pair < 2; ++pair) {
            const u32 q = v >> (8 * pair);
            const u32 low = half2_add(and_or(q, 0x000f000fu, HALF2_1024), HALF2_MINUS_1032);
            const u32 high = half2_fma(and_or(q, 0x00f000f0u, HALF2_1024), HALF2_SIXTEENTH, HALF2_MINUS_72);
            w[0][pair] = half2_mul(low, s[0]);
            w[1][pair] = half2_mul(high, s[1]);
        }
    }
};

template <>
struct Format<Q4_1> : SumFormat<Q4_1> {
    DEVICE void weights(const u8* raw, u32 at, const u32 (&s)[2], i32 j, i32 u, i32 c, i32, u32 (&w)[2][2]) {
        const u32 v = load_word<4>(raw, at + BLOCK_BYTES * (2 * j + u) + 4 + 4 * c);
#pragma unroll
        for (i32 pair = 0; pair < 2; ++pair) {
            const u32 q = v >> (8 * pair);
            const u32 low = half2_add(and_or(q, 0x000f000fu, HALF2_1024), HALF2_MINUS_1024);
            const u32 high = half2_fma(and_or(q, 0x00f000f0u, HALF2_1024), HALF2_SIXTEENTH, HALF2_MINUS_64);
            w[0][pair] = half2_fma(low, both_low(s[0]), both_high(s[0]));
            w[1][pair] = half2_fma(high, both_low(s[1]), both_high(s[1]));
        }
    }
};

template <>
struct Format<Q5_0> : ScaleFormat<Q5_0> {
    DEVICE void weights(const u8* raw, u32 at, const u32 (&s)[2], i32 j, i32 u, i32 c, i32, u32 (&w)[2][2]) {
        const u32 block = at + BLOCK_BYTES * (2 * j + u);
        u32 q[2];
        five_bits<2>(raw, block + 6, load_word<2>(raw, block + 2), c, q);
#pragma unroll
        for (i32 i = 0; i < 2; ++i) {
            w[i][0] = half2_mul(half2_add(even_bytes(q[i]), HALF2_MINUS_1040), s[i]);
            w[i][1] = half2_mul(half2_add(odd_bytes(q[i]), HALF2_MINUS_1040), s[i]);
        }
    }
};

template <>
struct Format<Q5_1> : SumFormat<Q5_1> {
    DEVICE void weights(const u8* raw, u32 at, const u32 (&s)[2], i32 j, i32 u, i32 c, i32, u32 (&w)[2][2]) {
        const u32 block = at + BLOCK_BYTES * (2 * j + u);
        u32 q[2];
        five_bits<4>(raw, block + 8, load_word<4>(raw, block + 4), c, q);
#pragma unroll
        for (i32 i = 0; i < 2; ++i) {
            const u32 even = half2_add(even_bytes(q[i]), HALF2_MINUS_1024);
            const u32 odd = half2_add(odd_bytes(q[i]), HALF2_MINUS_1024);
            w[i][0] = half2_fma(even, both_low(s[i]), both_high(s[i]));
            w[i][1] = half2_fma(odd, both_low(s[i]), both_high(s[i]));
        }
    }
};

// The high bytes of halves, whose low ones are 0: a 16th of E2M1's values, doubled.
DEVICE u32 e2m1_sixteenths(u32 codes) { return look_up<0x32302c00u, 0x3a383634u, 0xb2b0ac00u, 0xbab8b6b4u>(codes); }

// What two look-ups of a word of nibbles gave, each byte twice: low ones 0 and 2, 1 and 3, high ones 0 and 2, 1 and 3.
DEVICE void spread_codes(u32 a, u32 b, u32 (&q)[4]) {
    q[0] = __byte_perm(a, b, 0x4400);
    q[1] = __byte_perm(a, b, 0x6622);
    q[2] = __byte_perm(a, b, 0x5511);
    q[3] = __byte_perm(a, b, 0x7733);
}

// The values + 128: 1 24 45 63 79 93 106 118 129 141 153 166 181 197 217 241.
DEVICE void iq4_weights(u32 v, const u32 (&s)[2], u32 (&w)[2][2]) {
    const u32 a = look_up<0x3f2d1801u, 0x766a5d4fu, 0xa6998d81u, 0xf1d9c5b5u>(v);
    const u32 b = look_up<0x3f2d1801u, 0x766a5d4fu, 0xa6998d81u, 0xf1d9c5b5u>(v >> 16);
    u32 q[4];
    spread_codes(a, b, q);
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
        const u32 value = half2_add(and_or(q[i], 0x00ff00ffu, HALF2_1024), HALF2_MINUS_1152);
        w[i / 2][i % 2] = half2_mul(value, s[i / 2]);
    }
}

template <>
struct Format<IQ4_NL> : ScaleFormat<IQ4_NL> {
    DEVICE void weights(const u8* raw, u32 at, const u32 (&s)[2], i32 j, i32 u, i32 c, i32, u32 (&w)[2][2]) {
        iq4_weights(load_word<2>(raw, at + BLOCK_BYTES * (2 * j + u) + 2 + 4 * c), s, w);
    }
};

template <>
struct Format<IQ4_XS> : Stage<IQ4_XS> {
    static constexpr bool INTERLEAVED = false;

    DEVICE void scales(const u8* raw, u32 at, u32* out, i32 stride) {
        const u32 head = load_word<4>(raw, at);
        const u32 low = load_word<4>(raw, at + 4);
        const u32 d = both_low(head);
#pragma unroll
        for (i32 b = 0; b < 8; ++b) {
            const u32 ls = ((low >> (4 * b)) & 15) | (((head >> (16 + 2 * b)) & 3) << 4);
            const u32 number = half2_add((ls | (ls << 16)) | HALF2_1024, HALF2_MINUS_1056);
            out[b * stride] = half2_mul(number, d);
        }
    }

    DEVICE void weights(const u8* raw, u32 at, const u32 (&s)[2], i32 j, i32 u, i32 c, i32, u32 (&w)[2][2]) {
        iq4_weights(load_word<4>(raw, at + 8 + 16 * (2 * j + u) + 4 * c), s, w);
    }
};

template <>
struct Format<MXFP4> : Stage<MXFP4> {
    static constexpr bool INTERLEAVED = false;

    // 16 times the scale, and a 16th of the values: a scale below the range of halves is a weight below it.
    DEVICE void scales(const u8* raw, u32 at, u32* out, i32 stride) {
#pragma unroll
        for (i32 b = 0; b < 8; ++b) {
            const float scale = 16.0f * e8m0_to_float(raw[at + BLOCK_BYTES * b]);
            out[b * stride] = pack_halves(scale, scale);
        }
    }

    DEVICE void weights(const u8* raw, u32 at, const u32 (&s)[2], i32 j, i32 u, i32 c, i32, u32 (&w)[2][2]) {
        const u32 v = load_word<1>(raw, at + BLOCK_BYTES * (2 * j + u) + 1 + 4 * c);
        u32 q[4];
        spread_codes(e2m1_sixteenths(v), e2m1_sixteenths(v >> 16), q);
#pragma unroll
        for (i32 i = 0; i < 4; ++i) w[i / 2][i % 2] = half2_mul(q[i] & 0xff00ff00u, s[i / 2]);
    }
};

template <>
struct Format<NVFP4> : Stage<NVFP4> {
    static constexpr bool INTERLEAVED = false;

    // Two scales a word: each is for 16 weights, and 16 times its size.
    DEVICE void scales(const u8* raw, u32 at, u32* out, i32 stride) {
#pragma unroll
        for (i32 b = 0; b < 4; ++b) {
            const u32 four = load_word<4>(raw, at + BLOCK_BYTES * b);
            out[2 * b * stride] = half2_mul(ue4m3_to_halves(four), HALF2_16);
            out[(2 * b + 1) * stride] = half2_mul(ue4m3_to_halves(four >> 16), HALF2_16);
        }
    }

    DEVICE void weights(const u8* raw, u32 at, const u32 (&s)[2], i32 j, i32 u, i32 c, i32, u32 (&w)[2][2]) {
#pragma unroll
        for (i32 i = 0; i < 2; ++i) {
            // 16 weights in eight bytes, the second eight in the high halves; only even look-ups count.
            const u32 v = load_word<4>(raw, at + BLOCK_BYTES * j + 4 + 16 * u + 8 * i + 4 * (c & 1)) >> (2 * (c & 2));
            u32 q[4];
            spread_codes(e2m1_sixteenths(v), e2m1_sixteenths(v >> 16), q);
            const u32 scale = i ? both_high(s[0]) : both_low(s[0]);
#pragma unroll
            for (i32 pair = 0; pair < 2; ++pair) w[i][pair] = half2_mul(q[pair] & 0xff00ff00u, scale);
        }
    }
};

// What the types with a grid share. Words of scales are factors times d, of a block or of its halves; magnitudes are
// multiplied by SHRINK, which is exact, where a small d might not be.
template <Type type>
struct GridFormat : Stage<type> {
    static constexpr bool INTERLEAVED = false;

    DEVICE void scales(const u8* raw, u32 at, u32* out, i32 stride) {
        const u32 half = *(const u16*)(raw + at);
        const u32 d = half | (half << 16);
#pragma unroll
        for (i32 b = 0; b < 8; ++b) {
            const u32 both = GridBlock<type>::scales(raw, at, b);
            const u32 factors = odd_factor(both) | odd_factor(has_halves(type) ? both >> 4 : both) << 16;
            out[b * stride] = half2_mul(half2_add(factors | HALF2_1024, HALF2_MINUS_1024), d);
        }
    }

    DEVICE void weights(const u8* raw, u32 at, const u32 (&s)[2], i32 j, i32 u, i32 c, i32, u32 (&w)[2][2]) {
        typedef GridBlock<type> G;
        // 1, 1 / 4 or 1 / 8, and -1024 times that
        constexpr u32 factor = G::SHRINK == 1.0f ? 0x3c003c00u : G::SHRINK == 0.25f ? 0x34003400u : 0x30003000u;
        constexpr u32 bias = factor + 0xa800a800u;
        G g;
        G::load(g, raw, at, 2 * j + u);
#pragma unroll
        for (i32 i = 0; i < 2; ++i) {
            const u32 bytes = four_magnitudes<type>(g, i, c), signs = (g.signs >> (16 * i + 4 * c)) & 15;
            const u32 even = half2_fma(even_bytes(bytes), factor, bias), odd = half2_fma(odd_bytes(bytes), factor, bias);
            const u32 scale = !has_halves(type) ? s[i] : i ? both_high(s[i]) : both_low(s[i]);
            w[i][0] = half2_mul(even ^ ((signs << 15 | signs << 29) & 0x80008000u), scale);
            w[i][1] = half2_mul(odd ^ ((signs << 14 | signs << 28) & 0x80008000u), scale);
        }
    }
};

template <>
struct Format<IQ2_XXS> : GridFormat<IQ2_XXS> {};
template <>
struct Format<IQ2_XS> : GridFormat<IQ2_XS> {};
template <>
struct Format<IQ3_XXS> : GridFormat<IQ3_XXS> {};
template <>
struct Format<IQ3_S> : GridFormat<IQ3_S> {};
template <>
struct Format<IQ2_S> : GridFormat<IQ2_S> {};

// Float types: 64 weights a stage, no scales; weights past the row's end are zeros.
template <>
struct Format<F16> : Stage<F16> {
    static constexpr bool INTERLEAVED = false;

    DEVICE void scales(const u8*, u32, u32*, i32) {}

    DEVICE void weights(const u8* raw, u32 at, const u32 (&)[2], i32, i32 u, i32 c, i32 left, u32 (&w)[2][2]) {
#pragma unroll
        for (i32 i = 0; i < 2; ++i) {
            const i32 k = 32 * u + 16 * i + 4 * c;
            u32 first = load_word<2>(raw, at + 2 * k), second = load_word<2>(raw, at + 2 * k + 4);
            if (k + 4 > left) {
                first = k >= left ? 0 : k + 1 == left ? first & 0xffffu : first;
                second = k + 2 >= left ? 0 : second & 0xffffu;
            }
            w[i][0] = __byte_perm(first, second, 0x5410);
            w[i][1] = __byte_perm(first, second, 0x7632);
        }
    }
};

template <>
struct Format<BF16> : Stage<BF16> {
    static constexpr bool INTERLEAVED = false;

    DEVICE void scales(const u8*, u32, u32*, i32) {}

    DEVICE void weights(const u8* raw, u32 at, const u32 (&)[2], i32, i32 u, i32 c, i32 left, u32 (&w)[2][2]) {
#pragma unroll
        for (i32 i = 0; i < 2; ++i) {
            const i32 k = 32 * u + 16 * i + 4 * c;
            float f[4];
#pragma unroll
            for (i32 e = 0; e < 4; ++e)
                f[e] = k + e < left ? bfloat_to_float(*(const u16*)(raw + at + 2 * (k + e))) : 0.0f;
            w[i][0] = pack_halves(f[0], f[2]);
            w[i][1] = pack_halves(f[1], f[3]);
        }
    }
};

template <>
struct Format<F32> : Stage<F32> {
    static constexpr bool INTERLEAVED = false;

    DEVICE void scales(const u8*, u32, u32*, i32) {}

    DEVICE void weights(const u8* raw, u32 at, const u32 (&)[2], i32, i32 u, i32 c, i32 left, u32 (&w)[2][2]) {
#pragma unroll
        for (i32 i = 0; i < 2; ++i) {
            const i32 k = 32 * u + 16 * i + 4 * c;
            float f[4];
#pragma unroll
            for (i32 e = 0; e < 4; ++e) f[e] = k + e < left ? *(const float*)(raw + at + 4 * (k + e)) : 0.0f;
            w[i][0] = pack_halves(f[0], f[2]);
            w[i][1] = pack_halves(f[1], f[3]);
        }
    }
};

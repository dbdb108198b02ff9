// Blocks of 32 weights of every GGUF type, and the term that one gives with a block of 32 activations.
//
// docs/arithmetic.md, "A row of a product", is the specification; engine/ops/blocks.py describes the layouts. Rows are
// read from shared memory, at any offset that the type's bytes allow: two bytes of 18, 22, 34 and 210, one of 17.
#pragma once

#include "grids.cuh"
#include "types.cuh"

// A weight of a float type.
template <Type type>
DEVICE float weight_of(const u8* row, i32 i) {
    if constexpr (type == F32)
        return ((const float*)row)[i];
    else if constexpr (type == F16)
        return half_to_float(((const u16*)row)[i]);
    else {
        static_assert(type == BF16, "weight_of: no code for this type");
        return bfloat_to_float(((const u16*)row)[i]);
    }
}

// 32 activations: q packed by fours in order, their scale, their sum, and the sum of the first 16 (for HALVES only).
struct Activations {
    i32 q[8];
    float d;
    i32 sum;
    i32 first;
};

// 32 weights ready for dot products. q: bytes, SIGNED or not. scale, minimum: as in
// BlockTerms of the twin. factor, minimum_factor: of the two halves (HALVES). shift: where there is a minimum, q holds the
// weights times 2^shift.
struct Block {
    u32 q[8];
    float scale, minimum;
    float second; // SIXTEENS: the scale of the other half
    i32 factor[2], minimum_factor[2];
    i32 shift;
};

// N words, the first of which has the byte at `offset`.
template <i32 N>
DEVICE void load_words(const u8* stage, i32 offset, u32 (&w)[N]) {
    const u32* words = (const u32*)(stage + (offset & ~3));
#pragma unroll
    for (i32 i = 0; i < N; i++)
        w[i] = words[i];
}

// N words from byte `at` on, a multiple of `align`; where that is less than 4, up to a word more is read.
template <i32 align, i32 N>
DEVICE void load_run(const u8* stage, i32 at, u32 (&w)[N]) {
    if constexpr (align >= 4) {
        load_words(stage, at, w);
    } else {
        u32 words[N + 1];
        load_words(stage, at, words);
#pragma unroll
        for (i32 i = 0; i < N; i++)
            w[i] = __funnelshift_r(words[i], words[i + 1], (at & (4 - align)) * 8);
    }
}

DEVICE u16 load_half(const u8* stage, i32 offset) { return *(const u16*)(stage + offset); }

DEVICE void load_32_bytes(const u8* stage, i32 offset, u32 (&w)[8]) {
#pragma unroll
    for (i32 i = 0; i < 2; i++) {
        const uint4 v = *(const uint4*)(stage + offset + 16 * i);
        w[4 * i] = v.x;
        w[4 * i + 1] = v.y;
        w[4 * i + 2] = v.z;
        w[4 * i + 3] = v.w;
    }
}

// Scale and minimum of sub-block s of a Q4_K or Q5_K block, from its first 16 bytes.
DEVICE void load_k_scales(const u8* stage, i32 offset, i32 s, Block& w) {
    const uint4 head = *(const uint4*)(stage + offset);
    const i32 at = 8 * (s & 3);
    // The first four have six bits in a byte of their own; of the others four bits are in the last word.
    const bool own = s < 4;
    const u32 low = own ? 63 : 15, high = own ? 0 : 48;
    const u32 scale = (((own ? head.y : head.w) >> at) & low) | ((head.y >> (at + 2)) & high);
    const u32 minimum = (((own ? head.z : head.w) >> (own ? at : at + 4)) & low) | ((head.z >> (at + 2)) & high);
    w.scale = half_to_float((u16)head.x) * (float)(i32)scale;
    w.minimum = half_to_float((u16)(head.x >> 16)) * (float)(i32)minimum;
}

// 32 codes in 16 bytes: the first 16 in the low halves, the others in the high ones.
DEVICE void split_nibbles(const u32 (&v)[4], u32 (&q)[8]) {
#pragma unroll
    for (i32 i = 0; i < 4; i++) {
        q[i] = v[i] & 0x0f0f0f0fu;
        q[i + 4] = (v[i] >> 4) & 0x0f0f0f0fu;
    }
}

// The bytes that four codes in the low 16 bits stand for.
DEVICE u32 iq4_bytes(u32 codes) { return look_up<0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u>(codes); }
DEVICE u32 e2m1_bytes(u32 codes) { return look_up<0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu>(codes); } // doubled

// Eight codes as bytes: those of the low halves, those of the high ones.
template <u32 (*bytes_of)(u32)>
DEVICE void split_word(u32 codes, u32& low, u32& high) {
    const u32 a = bytes_of(codes), c = bytes_of(codes >> 16);
    low = __byte_perm(a, c, 0x6420);
    high = __byte_perm(a, c, 0x7531);
}

// As split_nibbles, the bytes.
template <u32 (*bytes_of)(u32)>
DEVICE void split_values(const u32 (&v)[4], u32 (&q)[8]) {
#pragma unroll
    for (i32 i = 0; i < 4; i++)
        split_word<bytes_of>(v[i], q[i], q[i + 4]);
}

DEVICE void add_fifth_bits(u32 bits, u32 (&q)[8]) {
#pragma unroll
    for (i32 i = 0; i < 8; i++)
        q[i] |= fifth_bits(bits >> (4 * i));
}

// What the types differ in, a specialization each: a type without one does not compile.
//   SIGNED   q are signed bytes
//   OFFSET   what is taken off every one of them
//   MINIMUM  there is a minimum
//   load     block b of the row at `offset` of `stage` (16-byte aligned)
template <Type type>
struct BlockCode;

template <>
struct BlockCode<Q2_K> : BlockType<Q2_K> {
    static constexpr bool SIGNED = false, MINIMUM = true;
    static constexpr i32 OFFSET = 0;

    DEVICE void load(const u8* stage, i32 offset, i32 b, Block& w) {
        const i32 s = b & 7;
        const i32 at = offset + (b >> 3) * BLOCK_BYTES;
        const u32* const codes = (const u32*)(stage + at + 16 + 32 * (s >> 2));
        w.shift = 2 * (s & 3);
#pragma unroll
        for (i32 i = 0; i < 8; i++)
            w.q[i] = codes[i] & (0x03030303u << w.shift);
        const u32 both = load_half(stage, at + 2 * s);
#pragma unroll
        for (i32 half = 0; half < 2; half++) {
            w.factor[half] = (both >> (8 * half)) & 15;
            w.minimum_factor[half] = (both >> (8 * half + 4)) & 15;
        }
        const u32 d = *(const u32*)(stage + at + 80);
        w.scale = half_to_float((u16)d);
        w.minimum = half_to_float((u16)(d >> 16));
    }
};

template <>
struct BlockCode<Q3_K> : BlockType<Q3_K> {
    static constexpr bool SIGNED = false, MINIMUM = false;
    static constexpr i32 OFFSET = 4;

    DEVICE void load(const u8* stage, i32 offset, i32 b, Block& w) {
        const i32 s = b & 7;
        const i32 at = offset + (b >> 3) * BLOCK_BYTES;
        u32 low[9], high[9];
        load_words(stage, at, high);
        load_words(stage, at + 32 + 32 * (s >> 2), low);
        const i32 between = (at & 2) * 8, low_shift = between + 2 * (s & 3);
#pragma unroll
        for (i32 i = 0; i < 8; i++) {
            const u32 bits = __funnelshift_r(high[i], high[i + 1], between);
            // Bit s of a byte becomes bit 2: a rotation, since it goes either way.
            w.q[i] = and_or(__funnelshift_l(bits, bits, (2 - s) & 31), 0x04040404u,
                            __funnelshift_r(low[i], low[i + 1], low_shift) & 0x03030303u);
        }
        const u32 factors = load_factors(stage, at, s);
        w.factor[0] = factor(factors & 255);
        w.factor[1] = factor(factors >> 8);
        w.scale = half_to_float(load_half(stage, at + 108));
    }
    // Those of block s, a byte for each half, and what a byte means.
    DEVICE u32 load_factors(const u8* stage, i32 at, i32 s) {
        const u32 four = load_half(stage, at + 96 + 2 * (s & 3)) >> (4 * (s >> 2));
        const u32 two = load_half(stage, at + 104 + 2 * (s & 1)) >> (2 * (s >> 1));
        return (four & 0x0f0fu) | ((two & 0x0303u) << 4);
    }
    DEVICE i32 factor(u32 byte) { return (i32)byte - 32; }
};

template <>
struct BlockCode<Q4_K> : BlockType<Q4_K> {
    static constexpr bool SIGNED = false, MINIMUM = true;
    static constexpr i32 OFFSET = 0;

    DEVICE void load(const u8* stage, i32 offset, i32 b, Block& w) {
        const i32 s = b & 7;
        const i32 at = offset + (b >> 3) * BLOCK_BYTES;
        load_k_scales(stage, at, s, w);
        load_32_bytes(stage, at + 16 + 32 * (s >> 1), w.q);
        w.shift = 4 * (s & 1);
        const u32 mask = 0x0f0f0f0fu << w.shift;
#pragma unroll
        for (i32 i = 0; i < 8; i++)
            w.q[i] &= mask;
    }
};

template <>
struct BlockCode<Q5_K> : BlockType<Q5_K> {
    static constexpr bool SIGNED = false, MINIMUM = true;
    static constexpr i32 OFFSET = 0;

    DEVICE void load(const u8* stage, i32 offset, i32 b, Block& w) {
        const i32 s = b & 7;
        const i32 at = offset + (b >> 3) * BLOCK_BYTES;
        load_k_scales(stage, at, s, w);
        w.shift = 0;
        load_32_bytes(stage, at + 48 + 32 * (s >> 1), w.q);
        u32 high[8];
        load_32_bytes(stage, at + 16, high);
#pragma unroll
        for (i32 i = 0; i < 8; i++)
            w.q[i] = ((w.q[i] >> (4 * (s & 1))) & 0x0f0f0f0fu) | (((high[i] >> s) & 0x01010101u) << 4);
    }
};

template <>
struct BlockCode<Q6_K> : BlockType<Q6_K> {
    static constexpr bool SIGNED = false, MINIMUM = false;
    static constexpr i32 OFFSET = 32;

    DEVICE void load(const u8* stage, i32 offset, i32 b, Block& w) {
        const i32 s = b & 7;
        const i32 at = offset + (b >> 3) * BLOCK_BYTES;
        u32 low[9], high[9];
        load_words(stage, at + 64 * (s >> 2) + 32 * (s & 1), low);
        const i32 low_shift = (at & 2) * 8 + 2 * (s & 2);
        // The two high bits belong four bits further up: a shift to the left is one to the right from a word before.
        const i32 shift = (at & 2) * 8 + 2 * (s & 3) - 4;
        load_words(stage, at + 128 + 32 * (s >> 2) + (shift < 0 ? -4 : 0), high);
#pragma unroll
        for (i32 i = 0; i < 8; i++)
            w.q[i] = and_or(__funnelshift_r(high[i], high[i + 1], shift & 31), 0x30303030u,
                            __funnelshift_r(low[i], low[i + 1], low_shift) & 0x0f0f0f0fu);
        const u32 factors = load_half(stage, at + 192 + 2 * s);
        w.factor[0] = (i8)factors;
        w.factor[1] = (i8)(factors >> 8);
        w.scale = half_to_float(load_half(stage, at + 208));
    }
};

template <>
struct BlockCode<Q8_0> : BlockType<Q8_0> {
    static constexpr bool SIGNED = true, MINIMUM = false;
    static constexpr i32 OFFSET = 0;

    DEVICE void load(const u8* stage, i32 offset, i32 b, Block& w) {
        const i32 at = offset + b * BLOCK_BYTES;
        load_run<2>(stage, at + 2, w.q);
        w.scale = half_to_float(load_half(stage, at));
    }
};

template <>
struct BlockCode<Q4_0> : BlockType<Q4_0> {
    static constexpr bool SIGNED = false, MINIMUM = false;
    static constexpr i32 OFFSET = 8;

    DEVICE void load(const u8* stage, i32 offset, i32 b, Block& w) {
        const i32 at = offset + b * BLOCK_BYTES;
        u32 v[4];
        load_run<2>(stage, at + 2, v);
        split_nibbles(v, w.q);
        w.scale = half_to_float(load_half(stage, at));
    }
};

template <>
struct BlockCode<Q4_1> : BlockType<Q4_1> {
    static constexpr bool SIGNED = false, MINIMUM = true;
    static constexpr i32 OFFSET = 0;

    DEVICE void load(const u8* stage, i32 offset, i32 b, Block& w) {
        u32 words[5];
        load_run<4>(stage, offset + b * BLOCK_BYTES, words);
        split_nibbles({words[1], words[2], words[3], words[4]}, w.q);
        w.shift = 0;
        w.scale = half_to_float((u16)words[0]);
        w.minimum = -half_to_float((u16)(words[0] >> 16));
    }
};

template <>
struct BlockCode<Q5_0> : BlockType<Q5_0> {
    static constexpr bool SIGNED = false, MINIMUM = false;
    static constexpr i32 OFFSET = 16;

    DEVICE void load(const u8* stage, i32 offset, i32 b, Block& w) {
        const i32 at = offset + b * BLOCK_BYTES;
        u32 words[5];
        load_run<2>(stage, at + 2, words);
        split_nibbles({words[1], words[2], words[3], words[4]}, w.q);
        add_fifth_bits(words[0], w.q);
        w.scale = half_to_float(load_half(stage, at));
    }
};

template <>
struct BlockCode<Q5_1> : BlockType<Q5_1> {
    static constexpr bool SIGNED = false, MINIMUM = true;
    static constexpr i32 OFFSET = 0;

    DEVICE void load(const u8* stage, i32 offset, i32 b, Block& w) {
        u32 words[6];
        load_run<4>(stage, offset + b * BLOCK_BYTES, words);
        split_nibbles({words[2], words[3], words[4], words[5]}, w.q);
        add_fifth_bits(words[1], w.q);
        w.shift = 0;
        w.scale = half_to_float((u16)words[0]);
        w.minimum = -half_to_float((u16)(words[0] >> 16));
    }
};

template <>
struct BlockCode<IQ4_NL> : BlockType<IQ4_NL> {
    static constexpr bool SIGNED = true, MINIMUM = false;
    static constexpr i32 OFFSET = 0;

    DEVICE void load(const u8* stage, i32 offset, i32 b, Block& w) {
        const i32 at = offset + b * BLOCK_BYTES;
        u32 v[4];
        load_run<CODE_ALIGN>(stage, codes_at(at, b), v);
        split_values<iq4_bytes>(v, w.q);
        w.scale = scale_at(stage, at, b);
    }
    // Where the block's 16 bytes of codes are, and its scale.
    static constexpr i32 CODE_ALIGN = 2;
    DEVICE i32 codes_at(i32 at, i32) { return at + 2; }
    DEVICE float scale_at(const u8* stage, i32 at, i32) { return half_to_float(load_half(stage, at)); }
};

template <>
struct BlockCode<IQ4_XS> : BlockType<IQ4_XS> {
    static constexpr bool SIGNED = true, MINIMUM = false;
    static constexpr i32 OFFSET = 0;

    DEVICE void load(const u8* stage, i32 offset, i32 b, Block& w) {
        const i32 at = offset + (b >> 3) * BLOCK_BYTES;
        const uint2* bytes = (const uint2*)(stage + codes_at(at, b));
        const uint2 v0 = bytes[0], v1 = bytes[1];
        split_values<iq4_bytes>({v0.x, v0.y, v1.x, v1.y}, w.q);
        w.scale = scale_at(stage, at, b);
    }
    static constexpr i32 CODE_ALIGN = 8;
    DEVICE i32 codes_at(i32 at, i32 b) { return at + 8 + 16 * (b & 7); }
    DEVICE float scale_at(const u8* stage, i32 at, i32 b) {
        const i32 s = b & 7;
        const uint2 head = *(const uint2*)(stage + at);
        const u32 scale = ((head.y >> (4 * s)) & 15) | (((head.x >> (16 + 2 * s)) & 3) << 4);
        return half_to_float((u16)head.x) * (float)((i32)scale - 32);
    }
};

template <>
struct BlockCode<MXFP4> : BlockType<MXFP4> {
    static constexpr bool SIGNED = true, MINIMUM = false;
    static constexpr i32 OFFSET = 0;

    DEVICE void load(const u8* stage, i32 offset, i32 b, Block& w) {
        const i32 at = offset + b * BLOCK_BYTES;
        u32 v[4];
        load_run<CODE_ALIGN>(stage, codes_at(at, b), v);
        split_values<e2m1_bytes>(v, w.q);
        w.scale = scale_at(stage, at, b);
    }
    static constexpr i32 CODE_ALIGN = 1;
    DEVICE i32 codes_at(i32 at, i32) { return at + 1; }
    DEVICE float scale_at(const u8* stage, i32 at, i32) { return e8m0_to_float(stage[at]); }
};

template <>
struct BlockCode<NVFP4> : BlockType<NVFP4> {
    static constexpr bool SIGNED = true, MINIMUM = false;
    static constexpr i32 OFFSET = 0;

    DEVICE void load(const u8* stage, i32 offset, i32 b, Block& w) {
        const i32 at = offset + (b >> 1) * BLOCK_BYTES;
        u32 v[4], q[8];
        load_run<4>(stage, at + 4 + 16 * (b & 1), v);
        split_values<e2m1_bytes>(v, q);
#pragma unroll
        for (i32 i = 0; i < 8; i++) // each eight bytes have the low halves of 8 elements, then the high ones
            w.q[i] = q[i / 4 * 2 + i % 2 + (i & 2) * 2];
        float scale[2];
        load_scales(stage, at, b, scale);
        w.scale = scale[0], w.second = scale[1];
    }
    DEVICE void load_scales(const u8* stage, i32 at, i32 b, float (&scale)[2]) {
        const u32 scales = ue4m3_to_halves(load_half(stage, at + 2 * (b & 1)));
        scale[0] = half_to_float((u16)scales), scale[1] = half_to_float((u16)(scales >> 16));
    }
};

// Four bytes, none of them zero, negative where one of four bits is set.
DEVICE u32 with_signs(u32 bytes, u32 signs) {
    const u32 ones = (signs * 0x00204081u) & 0x01010101u;  // bit k in byte k
    return (bytes ^ ones * 255u) + ones;
}

// What the types with a grid share.
template <Type type>
struct GridCode : BlockType<type> {
    static constexpr bool SIGNED = true, MINIMUM = false;
    static constexpr i32 OFFSET = 0;

    DEVICE void load(const u8* stage, i32 offset, i32 b, Block& w) {
        typedef GridBlock<type> G;
        const i32 s = b & 7;
        const i32 at = offset + (b >> 3) * BlockType<type>::BLOCK_BYTES;
        G g;
        G::load(g, stage, at, s);
#pragma unroll
        for (i32 i = 0; i < 8; i++)
            w.q[i] = with_signs(four_magnitudes<type>(g, i / 4, i % 4), (g.signs >> (4 * i)) & 15);
        const u32 scales = G::scales(stage, at, s);
        const float d = half_to_float(load_half(stage, at));
        if constexpr (has_halves(type)) {
            w.factor[0] = (i32)odd_factor(scales);
            w.factor[1] = (i32)odd_factor(scales >> 4);
            w.scale = d * G::SHRINK;
        } else {
            w.scale = d * (float)(i32)odd_factor(scales) * G::SHRINK;
        }
    }
};

template <>
struct BlockCode<IQ2_XXS> : GridCode<IQ2_XXS> {};
template <>
struct BlockCode<IQ2_XS> : GridCode<IQ2_XS> {};
template <>
struct BlockCode<IQ3_XXS> : GridCode<IQ3_XXS> {};
template <>
struct BlockCode<IQ3_S> : GridCode<IQ3_S> {};
template <>
struct BlockCode<IQ2_S> : GridCode<IQ2_S> {};

template <Type type>
DEVICE void load_block(const u8* stage, i32 offset, i32 b, Block& w) {
    BlockCode<type>::load(stage, offset, b, w);
}

// The block's term u (docs/arithmetic.md).
template <Type type>
DEVICE float block_term(const Block& w, const Activations& x) {
    typedef BlockCode<type> Code;
    i32 sum[2] = {0, 0};
    if constexpr (has_halves(type)) {
        sum[0] = -Code::OFFSET * x.first;
        sum[1] = -Code::OFFSET * (x.sum - x.first);
    } else if constexpr (Code::OFFSET != 0) {
        sum[0] = -Code::OFFSET * x.sum;
    }
#pragma unroll
    for (i32 i = 0; i < 8; i++)
        if constexpr (Code::SIGNED)
            sum[i / 4] = __dp4a((i32)w.q[i], x.q[i], sum[i / 4]);
        else
            sum[i / 4] = dot4_unsigned(w.q[i], x.q[i], sum[i / 4]);
    i32 total = sum[0] + sum[1], subtracted = x.sum;
    if constexpr (has_halves(type)) {
        total = w.factor[0] * sum[0] + w.factor[1] * sum[1];
        if constexpr (Code::MINIMUM)
            subtracted = w.minimum_factor[0] * x.first + w.minimum_factor[1] * (x.sum - x.first);
    }
    if constexpr (is_kind(type, Kind::SIXTEENS)) // the products are exact
        return w.scale * (float)sum[0] + w.second * (float)sum[1];
    if constexpr (Code::MINIMUM)
        return __fmaf_rn(w.scale, (float)(total >> w.shift), -(w.minimum * (float)subtracted));
    return w.scale * (float)total;
}

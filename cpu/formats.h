// Panels: kRows rows by 256 weights of a block format, unpacked for integer dot products.
//
// A panel holds w[p][i]: in group r, bytes 4i..4i+3 of blocks p, 2+p, 4+p, 6+p of row r. So a register of
// sums has one float lane for each block, and no sum is taken across lanes until a row ends. `load` takes
// a panel from memory; `multiply` adds its terms for one activation vector to the float lanes acc[p]
// (docs/arithmetic.md, "A row of a product"). Weights are read as they lie in the file, at any alignment.
#pragma once

#include "math.h"

namespace {

using spark::Activations;

// Of the formats that are loaded in two places (rows may end in a panel), one of which is the loop that counts: there a
// panel stays in registers.
#define SPARK_INLINE __attribute__((always_inline)) inline

struct Lanes {
    F acc[2]; // by parity of the block
};

// A panel's format: its record of block_types.h.
template <int64_t type> struct Record {
    static constexpr int64_t kType = type;
    static constexpr int kBytes = spark::block_type(type).bytes, kElements = spark::block_type(type).elements;
};

inline B group_constant(int32_t a, int32_t b, int32_t c, int32_t d) {
    const int32_t values[4] = {a, b, c, d};
    return repeat_bytes(values);
}

// The binary16 at offset + step * g (g = 0..3) of each row.
inline F strided_halves(const uint8_t *const *rows, size_t offset, size_t step) {
    alignas(64) uint16_t words[kWidth];
    for (int r = 0; r < kRows; r++)
        for (int g = 0; g < 4; g++)
            words[4 * r + g] = load_u16(rows[r] + offset + step * g);
    return load_half(words);
}

// The dword there.
inline B strided_dwords(const uint8_t *const *rows, size_t offset, size_t step) {
    alignas(64) uint32_t words[kWidth];
    for (int r = 0; r < kRows; r++)
        for (int g = 0; g < 4; g++)
            std::memcpy(words + 4 * r + g, rows[r] + offset + step * g, 4);
    return float_bytes(load(reinterpret_cast<const float *>(words)));
}

// Blocks of 16 bytes, `step` apart: elements i in the low, 16 + i in the high nibbles. code: of nibbles.
template <int step, class Code>
inline void load_nibble_halves(const uint8_t *const *rows, size_t offset, B (&w)[2][8], Code code) {
    for (int p = 0; p < 2; p++) {
        B in[4], packed[4];
        for (int g = 0; g < 4; g++)
            in[g] = load_rows(rows, offset + step * (2 * g + p));
        transpose(in, packed);
        for (int i = 0; i < 4; i++) {
            w[p][i] = code(low_nibbles(packed[i]));
            w[p][4 + i] = code(high_nibbles(packed[i]));
        }
    }
}

// `more` is added to byte k of each dword where bit 4i + k of the same dword of `bits` is set.
inline B add_where_bits(B v, B bits, int i, B more) {
    const int32_t at = 0x01010101 * (i / 2);
    const B byte = look_up(bits, group_constant(at, at + 0x04040404, at + 0x08080808, at + 0x0c0c0c0c));
    return add_where(v, byte, as_bytes(splat_int(i % 2 ? int32_t(0x80402010) : 0x08040201)), more);
}

// Five bits in place of four, of blocks `step` apart: bit i of a dword belongs to element i.
template <int step> inline void add_fifth_bits(const uint8_t *const *rows, size_t offset, B (&w)[2][8]) {
    for (int p = 0; p < 2; p++) {
        const B bits = strided_dwords(rows, offset + step * p, 2 * step);
        for (int i = 0; i < 8; i++)
            w[p][i] = add_where_bits(w[p][i], bits, i, splat_byte(16));
    }
}

inline B plain_code(B q) { return q; }

// Bytes first, first + 2, first + 4, first + 6 as dwords.
inline B spread_bytes(B v, int first) {
    const int32_t blank = int32_t(0x80808000);
    return look_up(v, group_constant(blank | first, blank | (first + 2), blank | (first + 4), blank | (first + 6)));
}

// Bytes 2q, 2q + 1 of each dword as 16-bit numbers.
inline B byte_pair(B v, int q) {
    const int32_t low = int32_t(0x80018000) + 0x00020002 * q;
    return look_up(v, group_constant(low, low + 0x00040004, low + 0x00080008, low + 0x000c000c));
}

// --- one scale a block: Q8_0, Q4_0, Q5_0, IQ4_NL, IQ4_XS, MXFP4

// minus_sum << shift starts the sums: it takes an offset of 2^shift off every weight.
template <int wide, int shift> struct ScaledPanel {
    B w[2][8];
    F scale[2];

    // Blocks of 32 that begin with a binary16.
    template <int step> void load_scales(const uint8_t *const *rows, size_t offset) {
        for (int p = 0; p < 2; p++)
            scale[p] = strided_halves(rows, offset + step * p, 2 * step);
    }

    static I start(const Activations &a, int p) {
        return shift < 0 ? zero_ints() : shift_left<shift < 0 ? 0 : shift>(repeat_ints(a.minus_sum[p]));
    }
    void finish(int p, I total, const Activations &a, Lanes &lanes) const {
        lanes.acc[p] = fma(repeat_floats(a.d[p]), scale[p] * to_float(total), lanes.acc[p]);
    }
    void multiply(const Activations &a, Lanes &lanes) const {
        for (int p = 0; p < 2; p++)
            finish(p, dot<8, wide>(start(a, p), w[p], a.q[p]), a, lanes);
    }
};
constexpr int kSignedShift = kBiasedDot ? 7 : -1;

struct Q8_0 : Record<SPARK_Q8_0>, ScaledPanel<0, kSignedShift> {
    SPARK_INLINE void load(const uint8_t *const *rows, size_t offset) {
        for (int p = 0; p < 2; p++) {
            for (int half = 0; half < 2; half++) {
                B in[4];
                for (int g = 0; g < 4; g++)
                    in[g] = load_rows(rows, offset + kBytes * (2 * g + p) + 2 + 16 * half);
                transpose(in, w[p] + 4 * half);
            }
            for (int i = 0; i < 8; i++)
                w[p][i] = biased(w[p][i]);
            scale[p] = strided_halves(rows, offset + kBytes * p, 2 * kBytes);
        }
    }
};

struct Q4_0 : Record<SPARK_Q4_0>, ScaledPanel<8, 3> {
    SPARK_INLINE void load(const uint8_t *const *rows, size_t offset) {
        load_scales<kBytes>(rows, offset);
        load_nibble_halves<kBytes>(rows, offset + 2, w, plain_code);
    }
};

struct Q5_0 : Record<SPARK_Q5_0>, ScaledPanel<4, 4> {
    SPARK_INLINE void load(const uint8_t *const *rows, size_t offset) {
        load_scales<kBytes>(rows, offset);
        load_nibble_halves<kBytes>(rows, offset + 6, w, plain_code);
        add_fifth_bits<kBytes>(rows, offset + 2, w);
    }
};

struct IQ4_NL : Record<SPARK_IQ4_NL>, ScaledPanel<0, kSignedShift> {
    SPARK_INLINE void load(const uint8_t *const *rows, size_t offset) {
        const B table = biased(repeat_bytes(kIQ4Values));
        load_scales<kBytes>(rows, offset);
        load_nibble_halves<kBytes>(rows, offset + 2, w, [table](B q) { return look_up(table, q); });
    }
};

struct IQ4_XS : Record<SPARK_IQ4_XS>, ScaledPanel<0, kSignedShift> {
    void load(const uint8_t *const *rows, size_t offset) {
        const B table = biased(repeat_bytes(kIQ4Values));
        load_scales(rows, offset);
        load_nibble_halves<16>(rows, offset + 8, w, [table](B q) { return look_up(table, q); });
    }
    void load_scales(const uint8_t *const *rows, size_t offset) {
        const B header = load_rows(rows, offset); // d, 16 bits of high scale bits, 4 bytes of low nibbles
        const F d = half_word<0>(header);
        for (int p = 0; p < 2; p++) {
            const I at = as_ints(group_constant(4 * p, 8 + 4 * p, 16 + 4 * p, 24 + 4 * p));
            const I high_at = as_ints(group_constant(16 + 2 * p, 20 + 2 * p, 24 + 2 * p, 28 + 2 * p));
            const B low = and_bytes(shift_right_by(repeat_dword<1>(header), at), as_bytes(splat_int(15)));
            const B high = and_bytes(shift_right_by(repeat_dword<0>(header), high_at), as_bytes(splat_int(3)));
            const I scales = as_ints(or_bytes(low, as_bytes(shift_left<4>(as_ints(high)))));
            scale[p] = d * to_float(add_ints(scales, splat_int(-32)));
        }
    }
};

// Codes of E2M1 as kE2M1Values + 16.
alignas(16) constexpr uint8_t kE2M1Codes[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

struct MXFP4 : Record<SPARK_MXFP4>, ScaledPanel<4, 4> {
    SPARK_INLINE void load(const uint8_t *const *rows, size_t offset) {
        const B table = repeat_bytes(kE2M1Codes);
        load_nibble_halves<kBytes>(rows, offset + 1, w, [table](B q) { return look_up(table, q); });
        for (int p = 0; p < 2; p++) {
            const B e = and_bytes(strided_dwords(rows, offset + kBytes * p, 2 * kBytes), as_bytes(splat_int(255)));
            scale[p] = two_to_half(e) * two_to_half(as_bytes(add_ints(as_ints(e), splat_int(1))));
        }
    }
    // 2^(e / 2 - 64), of a quotient rounded down: two of them make 2^(e - 128) without a factor that is subnormal.
    static F two_to_half(B e) {
        return byte_floats(as_bytes(shift_left<23>(add_ints(as_ints(shift_right_by(e, splat_int(1))), splat_int(63)))));
    }
};

// --- a scale and a minimum a block: Q4_1, Q5_1, Q4_K, Q5_K

template <int wide> struct MinimumPanel {
    B w[2][8];
    F scale[2], minimum[2];

    void finish(int p, I total, const Activations &a, Lanes &lanes) const {
        const F u = fma_minus(scale[p], to_float(total), minimum[p] * repeat_floats(a.sum[p]));
        lanes.acc[p] = fma(repeat_floats(a.d[p]), u, lanes.acc[p]);
    }
    void multiply(const Activations &a, Lanes &lanes) const {
        for (int p = 0; p < 2; p++)
            finish(p, dot<8, wide>(zero_ints(), w[p], a.q[p]), a, lanes);
    }

    // Blocks of 32 that begin with two binary16, a scale and what is added.
    template <int step> void load_scales(const uint8_t *const *rows, size_t offset) {
        for (int p = 0; p < 2; p++) {
            const B both = strided_dwords(rows, offset + step * p, 2 * step);
            scale[p] = dword_halves<0>(both);
            minimum[p] = -dword_halves<1>(both);
        }
    }

    // d, dmin and 12 bytes of 6-bit scales and minimums: four low bytes of each, four of shared high parts.
    void load_scales(const uint8_t *const *rows, size_t offset) {
        alignas(16) static constexpr uint8_t kLow[16] = {4, 5, 6, 7, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15};
        alignas(16) static constexpr uint8_t kTop[16] = {128, 128, 128, 128, 4, 5, 6, 7, 128, 128, 128, 128, 8, 9, 10, 11};
        const B header = load_rows(rows, offset);
        const B spread = look_up(header, repeat_bytes(kLow)); // [L, H, M, H]
        const B low = and_bytes(shift_right_by(spread, as_ints(group_constant(0, 0, 0, 4))),
                                group_constant(0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f));
        const B top = and_bytes(shift_right_by(look_up(header, repeat_bytes(kTop)), splat_int(2)), splat_byte(0x30));
        const B six = or_bytes(low, top); // 8 scales, 8 minimums
        const F d = half_word<0>(header), dmin = half_word<1>(header);
        for (int p = 0; p < 2; p++) {
            scale[p] = d * to_float(as_ints(spread_bytes(six, p)));
            minimum[p] = dmin * to_float(as_ints(spread_bytes(six, 8 + p)));
        }
    }

    void load_nibbles(const uint8_t *const *rows, size_t offset) {
        for (int half = 0; half < 2; half++) {
            B in[4], packed[4];
            for (int g = 0; g < 4; g++)
                in[g] = load_rows(rows, offset + 32 * g + 16 * half);
            transpose(in, packed);
            for (int i = 0; i < 4; i++) {
                w[0][4 * half + i] = low_nibbles(packed[i]);
                w[1][4 * half + i] = high_nibbles(packed[i]);
            }
        }
    }
};

struct Q4_1 : Record<SPARK_Q4_1>, MinimumPanel<8> {
    SPARK_INLINE void load(const uint8_t *const *rows, size_t offset) {
        load_scales<kBytes>(rows, offset);
        load_nibble_halves<kBytes>(rows, offset + 4, w, plain_code);
    }
};

struct Q5_1 : Record<SPARK_Q5_1>, MinimumPanel<4> {
    SPARK_INLINE void load(const uint8_t *const *rows, size_t offset) {
        load_scales<kBytes>(rows, offset);
        load_nibble_halves<kBytes>(rows, offset + 8, w, plain_code);
        add_fifth_bits<kBytes>(rows, offset + 4, w);
    }
};

struct Q4_K : Record<SPARK_Q4_K>, MinimumPanel<8> {
    void load(const uint8_t *const *rows, size_t offset) {
        load_scales(rows, offset);
        load_nibbles(rows, offset + 16);
    }
};

struct Q5_K : Record<SPARK_Q5_K>, MinimumPanel<4> {
    void load(const uint8_t *const *rows, size_t offset) {
        load_scales(rows, offset);
        load_nibbles(rows, offset + 48);
        for (int half = 0; half < 2; half++) { // bit b of byte l: the fifth bit of element l of block b
            const B high = load_rows(rows, offset + 16 + 16 * half);
            add_fifth_bit<0>(high, half);
            add_fifth_bit<1>(high, half);
            add_fifth_bit<2>(high, half);
            add_fifth_bit<3>(high, half);
        }
    }
    template <int i> void add_fifth_bit(B high, int half) {
        const B dword = repeat_dword<i>(high);
        for (int p = 0; p < 2; p++) {
            const B bit = and_bytes(shift_right_by(dword, as_ints(group_constant(p, 2 + p, 4 + p, 6 + p))), splat_byte(1));
            w[p][4 * half + i] = or_bytes(w[p][4 * half + i], as_bytes(shift_left<4>(as_ints(bit))));
        }
    }
};

// --- scales of half blocks: Q2_K, Q3_K, Q6_K, NVFP4

// An offset of 2^shift is taken off every weight, as in ScaledPanel; Activations::minus_half has one of 32.
template <int wide, int shift> struct HalvesPanel {
    B w[2][8];
    F scale, half_scale[2][2]; // [half][p]; exact integers

    static I start(const Activations &a, int half, int p) {
        const I minus = repeat_ints(a.minus_half[half][p]);
        if constexpr (shift < 0)
            return zero_ints();
        else if constexpr (shift <= 5)
            return shift_right_signed<5 - shift>(minus);
        else
            return shift_left<shift - 5>(minus);
    }
    // Integers below 2^24 all along: float arithmetic is exact here.
    F total(const Activations &a, int p) const {
        const F first = to_float(dot<4, wide>(start(a, 0, p), w[p], a.q[p]));
        const F second = to_float(dot<4, wide>(start(a, 1, p), w[p] + 4, a.q[p] + 4));
        return fma(half_scale[0][p], first, half_scale[1][p] * second);
    }
    void finish(int p, F total, const Activations &a, Lanes &lanes) const {
        lanes.acc[p] = fma(repeat_floats(a.d[p]), scale * total, lanes.acc[p]);
    }
    void multiply(const Activations &a, Lanes &lanes) const {
        for (int p = 0; p < 2; p++)
            finish(p, total(a, p), a, lanes);
    }

    // Two bits a weight in 64 bytes: bytes 32n..32n+31 have blocks 4n..4n+3, the lowest bits first.
    void load_two_bits(const uint8_t *const *rows, size_t offset) {
        for (int half = 0; half < 2; half++) {
            const B first = load_rows(rows, offset + 16 * half), second = load_rows(rows, offset + 32 + 16 * half);
            const B low[2] = {zip_low32(first, first), zip_low32(second, second)};
            const B high[2] = {zip_high32(first, first), zip_high32(second, second)};
            const B dwords[4] = {zip_low64(low[0], low[1]), zip_high64(low[0], low[1]), zip_low64(high[0], high[1]),
                                 zip_high64(high[0], high[1])};
            for (int i = 0; i < 4; i++) {
                const B codes = shift_right_by(dwords[i], as_ints(group_constant(0, 4, 0, 4)));
                w[0][4 * half + i] = and_bytes(codes, splat_byte(3));
                w[1][4 * half + i] = and_bytes(shift_right_by(codes, splat_int(2)), splat_byte(3));
            }
        }
    }
};

// Byte k of each dword, as many of its bits as `mask` has.
inline I byte_of(B v, int k, int mask) { return as_ints(and_bytes(shift_right_by(v, splat_int(8 * k)), as_bytes(splat_int(mask)))); }

struct Q2_K : Record<SPARK_Q2_K>, HalvesPanel<4, -1> {
    F minimum, half_minimum[2][2]; // [half][p]; integers over -32, which minus_half is multiplied by

    void load(const uint8_t *const *rows, size_t offset) {
        load_two_bits(rows, offset + 16);
        const B scales = load_rows(rows, offset); // dword g: the halves of blocks 2g, 2g + 1
        const B low = low_nibbles(scales), high = high_nibbles(scales);
        for (int p = 0; p < 2; p++)
            for (int half = 0; half < 2; half++) {
                half_scale[half][p] = to_float(byte_of(low, 2 * p + half, 15));
                half_minimum[half][p] = to_float(byte_of(high, 2 * p + half, 15)) * splat(-0.03125f);
            }
        const B tail = load_rows(rows, offset + kBytes - 16);
        scale = half_word<6>(tail);
        minimum = half_word<7>(tail);
    }
    void multiply(const Activations &a, Lanes &lanes) const {
        for (int p = 0; p < 2; p++) {
            const F first = to_float(repeat_ints(a.minus_half[0][p])), second = to_float(repeat_ints(a.minus_half[1][p]));
            const F sum = fma(half_minimum[0][p], first, half_minimum[1][p] * second); // exact
            const F u = fma_minus(scale, total(a, p), minimum * sum);
            lanes.acc[p] = fma(repeat_floats(a.d[p]), u, lanes.acc[p]);
        }
    }
};

struct Q3_K : Record<SPARK_Q3_K>, HalvesPanel<4, 2> {
    void load(const uint8_t *const *rows, size_t offset) {
        load_two_bits(rows, offset + 32);
        for (int half = 0; half < 2; half++) { // bit b of byte l: the third bit of element l of block b
            const B high = load_rows(rows, offset + 16 * half);
            add_third_bit<0>(high, half);
            add_third_bit<1>(high, half);
            add_third_bit<2>(high, half);
            add_third_bit<3>(high, half);
        }
        const B scales = load_scales(rows, offset);
        for (int p = 0; p < 2; p++)
            for (int half = 0; half < 2; half++)
                half_scale[half][p] = to_float(add_ints(byte_of(scales, 2 * p + half, 63), splat_int(-32)));
    }
    // d, and what the integer scales are with 32 more: dword g has the halves of blocks 2g, 2g + 1.
    B load_scales(const uint8_t *const *rows, size_t offset) {
        // Two bytes of codes, 12 of scales, d. The low four bits of 16 scales are 8 bytes, low halves first.
        alignas(16) static constexpr uint8_t kLow[16] = {2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4, 5, 6, 7, 8, 9};
        alignas(16) static constexpr uint8_t kTop[16] = {10, 11, 12, 13, 10, 11, 12, 13, 10, 11, 12, 13, 10, 11, 12, 13};
        const B tail = load_rows(rows, offset + kBytes - 16);
        const B low = shift_right_by(look_up(tail, repeat_bytes(kLow)), as_ints(group_constant(0, 0, 4, 4)));
        const B top = shift_right_by(look_up(tail, repeat_bytes(kTop)), as_ints(group_constant(0, 2, 4, 6)));
        const B high = as_bytes(shift_left<4>(as_ints(and_bytes(top, splat_byte(3)))));
        scale = half_word<7>(tail);
        return or_bytes(and_bytes(low, splat_byte(15)), high);
    }
    template <int i> void add_third_bit(B high, int half) {
        const B bits = shift_right_by(repeat_dword<i>(high), as_ints(group_constant(0, 2, 4, 6)));
        B &even = w[0][4 * half + i], &odd = w[1][4 * half + i];
        even = or_bytes(even, and_bytes(as_bytes(shift_left<2>(as_ints(bits))), splat_byte(4)));
        odd = or_bytes(odd, and_bytes(as_bytes(shift_left<1>(as_ints(bits))), splat_byte(4)));
    }
};

struct Q6_K : Record<SPARK_Q6_K>, HalvesPanel<2, 5> {
    static constexpr int kScales = 192;

    void load(const uint8_t *const *rows, size_t offset) {
        // In each half of 128: low nibbles of 64 bytes are blocks 0 and 1, high ones 2 and 3; byte l of the
        // 32 with high bits has two bits for element l of each of the four. Columns are taken in the order
        // blocks 0, 4, 1, 5 (low) and 2, 6, 3, 7 (high), so that zipping them gives 0, 2, 4, 6 and 1, 3, 5, 7.
        for (int half = 0; half < 2; half++) {
            const size_t at = offset + 16 * half;
            const B in[4] = {load_rows(rows, at), load_rows(rows, at + 64), load_rows(rows, at + 32), load_rows(rows, at + 96)};
            B packed[4];
            transpose(in, packed);
            const B first = load_rows(rows, at + 128), second = load_rows(rows, at + 160);
            const B low_pair = zip_low32(first, second), high_pair = zip_high32(first, second);
            const B bits[4] = {repeat_qword<0>(low_pair), repeat_qword<1>(low_pair), repeat_qword<0>(high_pair),
                               repeat_qword<1>(high_pair)};
            for (int i = 0; i < 4; i++) {
                const B low_bits = shift_left_by(bits[i], as_ints(group_constant(4, 4, 2, 2)));
                const B high_bits = shift_right_by(bits[i], as_ints(group_constant(0, 0, 2, 2)));
                const B low = or_bytes(low_nibbles(packed[i]), and_bytes(low_bits, splat_byte(0x30)));
                const B high = or_bytes(high_nibbles(packed[i]), and_bytes(high_bits, splat_byte(0x30)));
                w[0][4 * half + i] = zip_low32(low, high);
                w[1][4 * half + i] = zip_high32(low, high);
            }
        }
        const I scales = as_ints(load_rows(rows, offset + kScales)); // dword g: the halves of blocks 2g, 2g + 1
        half_scale[0][0] = to_float(shift_right_signed<24>(shift_left<24>(scales)));
        half_scale[1][0] = to_float(shift_right_signed<24>(shift_left<16>(scales)));
        half_scale[0][1] = to_float(shift_right_signed<24>(shift_left<8>(scales)));
        half_scale[1][1] = to_float(shift_right_signed<24>(scales));
        scale = half_word<7>(load_rows(rows, offset + kBytes - 16));
    }
};

struct NVFP4 : Record<SPARK_NVFP4> {
    B w[2][8];
    F scale[2][2]; // [half][p]

    // A block of 64: four scales, then for each 16 elements eight bytes, the first eight in the low halves.
    SPARK_INLINE void load(const uint8_t *const *rows, size_t offset) {
        alignas(16) static constexpr uint8_t kCodes[16] = {32, 33, 34, 35, 36, 38, 40, 44, 32, 31, 30, 29, 28, 26, 24, 20};
        const B table = repeat_bytes(kCodes); // kE2M1Values + 32
        for (int p = 0; p < 2; p++) {
            B in[4], packed[4];
            for (int g = 0; g < 4; g++)
                in[g] = load_rows(rows, offset + kBytes * g + 4 + 16 * p);
            transpose(in, packed);
            for (int i = 0; i < 4; i++) {
                const int at = 4 * (i / 2) + i % 2;
                w[p][at] = look_up(table, low_nibbles(packed[i]));
                w[p][at + 2] = look_up(table, high_nibbles(packed[i]));
            }
        }
        const B scales = strided_dwords(rows, offset, kBytes);
        for (int p = 0; p < 2; p++)
            for (int half = 0; half < 2; half++)
                scale[half][p] = of_ue4m3(and_bytes(shift_right_by(scales, splat_int(8 * (2 * p + half))),
                                                    as_bytes(splat_int(255))));
    }
    // ue4m3_to_float of each dword, by way of binary16, whose subnormals cost nothing.
    static F of_ue4m3(B e) {
        const I away = as_ints(and_bytes(as_bytes(add_ints(as_ints(e), splat_int(129))), as_bytes(splat_int(255)))); // from 0x7f
        const B kept = as_bytes(shift_right_signed<31>(shift_left<23>(add_ints(away, splat_int(255)))));
        const I bits = shift_left<7>(as_ints(and_bytes(e, as_bytes(splat_int(127)))));
        return dword_halves<0>(and_bytes(as_bytes(bits), kept)) * splat(128.0f);
    }
    void multiply(const Activations &a, Lanes &lanes) const {
        for (int p = 0; p < 2; p++) {
            const F first = to_float(dot<4, 2>(repeat_ints(a.minus_half[0][p]), w[p], a.q[p]));
            const F second = to_float(dot<4, 2>(repeat_ints(a.minus_half[1][p]), w[p] + 4, a.q[p] + 4));
            // Both products are exact.
            lanes.acc[p] = fma(repeat_floats(a.d[p]), scale[0][p] * first + scale[1][p] * second, lanes.acc[p]);
        }
    }
};

} // namespace

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

// --- one scale a block: Q8_0, Q4_0, IQ4_XS

// minus_sum << shift starts the sums: it takes an offset of 2^shift off every weight.
template <int wide, int shift> struct ScaledPanel {
    B w[2][8];
    F scale[2];

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
    void load(const uint8_t *const *rows, size_t offset) {
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
    static float term(const uint8_t *block, const int8_t *q) {
        // A pointer to int8_t on purpose: GCC 12 with VNNI drops the cast in int8_t(block[i]) * q[i].
        const auto *w = reinterpret_cast<const int8_t *>(block + 2);
        int32_t total = 0;
        for (int i = 0; i < 32; i++)
            total += w[i] * q[i];
        return half_to_float(load_u16(block)) * float(total);
    }
};

struct Q4_0 : Record<SPARK_Q4_0>, ScaledPanel<8, 3> {
    void load(const uint8_t *const *rows, size_t offset) {
        for (int p = 0; p < 2; p++) {
            B in[4], packed[4];
            for (int g = 0; g < 4; g++)
                in[g] = load_rows(rows, offset + kBytes * (2 * g + p) + 2);
            transpose(in, packed);
            for (int i = 0; i < 4; i++) {
                w[p][i] = low_nibbles(packed[i]);
                w[p][4 + i] = high_nibbles(packed[i]);
            }
            scale[p] = strided_halves(rows, offset + kBytes * p, 2 * kBytes);
        }
    }
    static float term(const uint8_t *block, const int8_t *q) {
        int32_t total = 0;
        for (int i = 0; i < 16; i++)
            total += ((block[2 + i] & 15) - 8) * q[i] + ((block[2 + i] >> 4) - 8) * q[16 + i];
        return half_to_float(load_u16(block)) * float(total);
    }
};

constexpr int8_t kIQ4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

struct IQ4_XS : Record<SPARK_IQ4_XS>, ScaledPanel<0, kSignedShift> {
    void load(const uint8_t *const *rows, size_t offset) {
        const B table = biased(repeat_bytes(kIQ4Values));
        load_scales(rows, offset);
        for (int p = 0; p < 2; p++) {
            B in[4], packed[4];
            for (int g = 0; g < 4; g++)
                in[g] = load_rows(rows, offset + 8 + 16 * (2 * g + p));
            transpose(in, packed);
            for (int i = 0; i < 4; i++) {
                w[p][i] = look_up(table, low_nibbles(packed[i]));
                w[p][4 + i] = look_up(table, high_nibbles(packed[i]));
            }
        }
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

// --- a scale and a minimum a block: Q4_K, Q5_K

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

// --- integer scales of half blocks: Q2_K, Q3_K, Q6_K

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

} // namespace

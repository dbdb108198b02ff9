// Panels of the types whose blocks hold indices of a grid: IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S (formats.h has the others).
//
// An index stands for the codes of 8 weights (IQ2) or 4 (IQ3): 16 bits, looked up in a table that lies in the first-level
// cache. Codes are spread to bytes, a sign is put above each, and a second table makes signed weights of both; from there
// on a panel is like any other.
#pragma once

#include <utility>

#include "formats.h"
#include "grids.h"

namespace {

// A grid with the codes of even weights in the low byte of an entry and of odd ones in the high byte.
template <int entries> struct Grid {
    alignas(64) uint16_t entry[entries + 2]; // two more than there are: look_up_words
};
template <int bits, int entries> constexpr Grid<entries> even_and_odd(const uint16_t (&grid)[entries]) {
    Grid<entries> made{};
    for (int e = 0; e < entries; e++)
        for (int k = 0; k < 16 / bits; k++) {
            const int code = grid[e] >> bits * k & ((1 << bits) - 1);
            made.entry[e] = uint16_t(made.entry[e] | code << (8 * (k & 1) + bits / 2 * (k & ~1)));
        }
    return made;
}

constexpr uint16_t kRawIQ2_XXS[] = {IQ2_XXS_GRID}, kRawIQ2_XS[] = {IQ2_XS_GRID}, kRawIQ2_S[] = {IQ2_S_GRID};
constexpr uint16_t kRawIQ3_XXS[] = {IQ3_XXS_GRID}, kRawIQ3_S[] = {IQ3_S_GRID};
constexpr Grid<256> kGridIQ2_XXS = even_and_odd<2>(kRawIQ2_XXS), kGridIQ3_XXS = even_and_odd<4>(kRawIQ3_XXS);
constexpr Grid<512> kGridIQ2_XS = even_and_odd<2>(kRawIQ2_XS), kGridIQ3_S = even_and_odd<4>(kRawIQ3_S);
constexpr Grid<1024> kGridIQ2_S = even_and_odd<2>(kRawIQ2_S);

constexpr uint8_t kSign = 8; // beside a code

struct Levels {
    int8_t of[16]; // by code, and negative ones by code and kSign
};
template <int n> constexpr Levels with_signs(const int8_t (&levels)[n]) {
    Levels made{};
    for (int i = 0; i < n; i++) {
        made.of[i] = levels[i];
        made.of[kSign + i] = int8_t(-levels[i]);
    }
    return made;
}
constexpr int8_t kIQ2[] = {IQ2_LEVELS}, kIQ3_XXS[] = {IQ3_XXS_LEVELS}, kIQ3_S[] = {IQ3_S_LEVELS};
constexpr Levels kLevelsIQ2 = with_signs(kIQ2), kLevelsIQ3_XXS = with_signs(kIQ3_XXS), kLevelsIQ3_S = with_signs(kIQ3_S);

// 64 bytes, 8 a block: dwords[2p] and dwords[2p + 1] have the first and the last four of the blocks of parity p.
inline void load_dwords(const uint8_t *const *rows, size_t offset, B *dwords) {
    B in[4];
    for (int g = 0; g < 4; g++)
        in[g] = load_rows(rows, offset + 16 * g);
    transpose(in, dwords);
}

// Eight dwords, one a block, in two registers: those of parity p.
inline B blocks_of_parity(B first, B second, int p) {
    const F a = byte_floats(first), b = byte_floats(second);
    return float_bytes(p ? odds(a, b) : evens(a, b));
}

// Seven bits of signs and their parity in each byte, of four times seven bits in a dword, the lowest first.
inline B with_parity(B seven) {
    alignas(16) static constexpr uint8_t kOdd[16] = {0, 128, 128, 0, 128, 0, 0, 128, 128, 0, 0, 128, 0, 128, 128, 0};
    const B odd = repeat_bytes(kOdd);
    return or_bytes(seven, xor_bytes(look_up(odd, low_nibbles(seven)), look_up(odd, high_nibbles(seven))));
}
inline B four_sevens(B v) {
    const I bits = as_ints(v);
    const B low = merge_words(and_bytes(v, as_bytes(splat_int(0x7f))), and_bytes(as_bytes(shift_left<2>(bits)), as_bytes(splat_int(0x7f0000))));
    const B high = merge_words(and_bytes(as_bytes(shift_left<1>(bits)), as_bytes(splat_int(0x7f00))),
                               and_bytes(as_bytes(shift_left<3>(bits)), as_bytes(splat_int(0x7f000000))));
    return with_parity(or_bytes(low, high));
}

// 2s + 1 of the low four bits of each dword.
inline F odd_factor(B v) {
    return to_float(add_ints(shift_left<1>(as_ints(and_bytes(v, as_bytes(splat_int(15))))), splat_int(1)));
}

// Dword i of the weights of blocks: words[q] has entries 2q and 2q + 1 in each dword; bits: of a code.
template <int bits, int i> inline B signed_weight(const B *words, B signs, B levels) {
    constexpr int entry = bits == 2 ? i / 2 : i, second = bits == 2 ? i % 2 : 0; // of the two dwords of an entry
    const B pair = words[entry / 2];
    // The entry in the low half and, shifted by a code, so with its next even and odd weights, in the high one.
    const B spread = entry % 2 ? merge_words(shift_right_by(pair, splat_int(16)), shift_right_by(pair, splat_int(bits)))
                               : merge_words(pair, as_bytes(shift_left<16 - bits>(as_ints(pair))));
    const B codes = second ? shift_right_by(spread, splat_int(2 * bits)) : spread;
    // look_up ignores what four-bit codes have above them: another code, so no 128.
    const B alone = bits == 2 ? and_bytes(codes, splat_byte(3)) : codes;
    return look_up(levels, add_where_bits(alone, signs, i, splat_byte(kSign)));
}
template <int bits, int... i>
SPARK_INLINE void signed_weights(const B *words, B signs, const Levels &levels, B *w, std::integer_sequence<int, i...>) {
    const B table = biased(repeat_bytes(levels.of));
    ((w[i] = signed_weight<bits, i>(words, signs, table)), ...);
}
template <int bits> SPARK_INLINE void signed_weights(const B *words, B signs, const Levels &levels, B *w) {
    signed_weights<bits>(words, signs, levels, w, std::make_integer_sequence<int, 8>());
}

struct IQ2_XXS : Record<SPARK_IQ2_XXS>, ScaledPanel<0, kSignedShift> {
    void load(const uint8_t *const *rows, size_t offset) {
        // A block is two dwords: four indices; four times seven signs and the scale.
        B dwords[4];
        load_dwords(rows, offset + 2, dwords);
        B words[4] = {byte_pair(dwords[0], 0), byte_pair(dwords[0], 1), byte_pair(dwords[2], 0), byte_pair(dwords[2], 1)};
        look_up_words<256>(kGridIQ2_XXS.entry, words);
        const F d = half_word<0>(load_rows(rows, offset)) * splat(0.125f);
        for (int p = 0; p < 2; p++) {
            const B rest = dwords[2 * p + 1];
            signed_weights<2>(words + 2 * p, four_sevens(rest), kLevelsIQ2, w[p]);
            scale[p] = d * odd_factor(shift_right_by(rest, splat_int(28)));
        }
    }
};

// Factors of 16 weights, four bits each.
struct OddHalves : HalvesPanel<0, kSignedShift> {
    void load_factors(B both, int p) {
        half_scale[0][p] = odd_factor(both);
        half_scale[1][p] = odd_factor(shift_right_by(both, splat_int(4)));
    }
};

// High bytes of the words of two dwords: four bytes.
inline B high_bytes(B first, B second) {
    const int32_t low = int32_t(0x80800301), high = 0x03018080;
    return or_bytes(look_up(first, group_constant(low, low + 0x0404, low + 0x0808, low + 0x0c0c)),
                    look_up(second, group_constant(high, high + 0x04040000, high + 0x08080000, high + 0x0c0c0000)));
}

struct IQ2_XS : Record<SPARK_IQ2_XS>, OddHalves {
    void load(const uint8_t *const *rows, size_t offset) {
        // A block is four words: an index of nine bits and seven signs.
        B dwords[4], words[4];
        load_dwords(rows, offset + 2, dwords);
        for (int i = 0; i < 4; i++)
            words[i] = and_bytes(dwords[i], as_bytes(splat_int(0x01ff01ff)));
        look_up_words<512>(kGridIQ2_XS.entry, words);
        const B tail = load_rows(rows, offset + kBytes - 16);
        for (int p = 0; p < 2; p++) {
            const B seven = shift_right_by(high_bytes(dwords[2 * p], dwords[2 * p + 1]), splat_int(1));
            signed_weights<2>(words + 2 * p, with_parity(and_bytes(seven, splat_byte(127))), kLevelsIQ2, w[p]);
            load_factors(spread_bytes(tail, 8 + p), p);
        }
        scale = half_word<0>(load_rows(rows, offset)) * splat(0.125f);
    }
};

struct IQ2_S : Record<SPARK_IQ2_S>, OddHalves {
    void load(const uint8_t *const *rows, size_t offset) {
        // Four low bytes of indices a block, four of signs, one of the indices' high bits and one of scales.
        const B low[2] = {load_rows(rows, offset + 2), load_rows(rows, offset + 18)};
        const B signs[2] = {load_rows(rows, offset + 34), load_rows(rows, offset + 50)};
        const B tail = load_rows(rows, offset + kBytes - 16);
        B words[4];
        for (int p = 0; p < 2; p++) {
            const B index = blocks_of_parity(low[0], low[1], p), high = spread_bytes(tail, p);
            const I bits = as_ints(merge_words(high, as_bytes(shift_left<14>(as_ints(high))))); // of the odd indices above
            words[2 * p] = or_bytes(byte_pair(index, 0), and_bytes(as_bytes(shift_left<8>(bits)), as_bytes(splat_int(0x03000300))));
            words[2 * p + 1] = or_bytes(byte_pair(index, 1), and_bytes(as_bytes(shift_left<4>(bits)), as_bytes(splat_int(0x03000300))));
        }
        look_up_words<1024>(kGridIQ2_S.entry, words);
        for (int p = 0; p < 2; p++) {
            signed_weights<2>(words + 2 * p, blocks_of_parity(signs[0], signs[1], p), kLevelsIQ2, w[p]);
            load_factors(spread_bytes(tail, 8 + p), p);
        }
        scale = half_word<0>(load_rows(rows, offset)) * splat(0.125f);
    }
};

// Eight indices a block, a byte each: pairs of them as words, four registers a parity.
inline void load_eight_indices(const uint8_t *const *rows, size_t offset, B (&words)[8]) {
    B dwords[4];
    load_dwords(rows, offset, dwords);
    for (int i = 0; i < 8; i++)
        words[i] = byte_pair(dwords[i / 2], i % 2);
}

struct IQ3_XXS : Record<SPARK_IQ3_XXS>, ScaledPanel<0, kSignedShift> {
    void load(const uint8_t *const *rows, size_t offset) {
        B words[8];
        load_eight_indices(rows, offset + 2, words);
        look_up_words<256>(kGridIQ3_XXS.entry, words);
        const F d = half_word<0>(load_rows(rows, offset)) * splat(0.25f);
        const B rest[2] = {load_rows(rows, offset + 66), load_rows(rows, offset + 82)};
        for (int p = 0; p < 2; p++) { // a dword a block: four times seven signs and the scale
            const B dword = blocks_of_parity(rest[0], rest[1], p);
            signed_weights<4>(words + 4 * p, four_sevens(dword), kLevelsIQ3_XXS, w[p]);
            scale[p] = d * odd_factor(shift_right_by(dword, splat_int(28)));
        }
    }
};

struct IQ3_S : Record<SPARK_IQ3_S>, ScaledPanel<0, kSignedShift> {
    void load(const uint8_t *const *rows, size_t offset) {
        B words[8];
        load_eight_indices(rows, offset + 2, words);
        const B ninth = load_rows(rows, offset + 66); // a byte a block, a bit an index
        for (int p = 0; p < 2; p++) {
            const B high = spread_bytes(ninth, p);
            const B bits = merge_words(high, as_bytes(shift_left<15>(as_ints(high)))); // of the odd indices above
            for (int q = 0; q < 4; q++)
                words[4 * p + q] = or_bytes(words[4 * p + q], and_bytes(shift_left_by(bits, splat_int(8 - 2 * q)), as_bytes(splat_int(0x01000100))));
        }
        look_up_words<512>(kGridIQ3_S.entry, words);
        const F d = half_word<0>(load_rows(rows, offset));
        const B signs[2] = {load_rows(rows, offset + 74), load_rows(rows, offset + 90)};
        const B scales = repeat_dword<3>(load_rows(rows, offset + kBytes - 16)); // a nibble a block
        for (int p = 0; p < 2; p++) {
            signed_weights<4>(words + 4 * p, blocks_of_parity(signs[0], signs[1], p), kLevelsIQ3_S, w[p]);
            scale[p] = d * odd_factor(shift_right_by(scales, as_ints(group_constant(4 * p, 8 + 4 * p, 16 + 4 * p, 24 + 4 * p))));
        }
    }
};

} // namespace

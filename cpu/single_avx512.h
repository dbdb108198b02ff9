// One activation row against four weight rows, for AVX-512: the products of decoding.
//
// formats.h gathers 16-byte pieces of four rows into a register, which costs more than the arithmetic when
// one activation row is all there is. Here each row is read 64 bytes at a time and only dwords are
// transposed: register i has dword i of each of four pieces of each of four rows, piece by piece. The
// activations are spread to match, every dword four times ("Spread"). Blocks then land in the order of
// formats.h, so scales and everything after the integer sums are the same code and the same bits.
#pragma once

#include "formats.h"

namespace {

// 256 activations as the operands of 16 dot products; a group of a register belongs to one piece.
struct Spread {
    B q[2][2][4];
    I start[2][2]; // of the sums, where a format has an offset (Q3_K, Q6_K)
    I halves[2];   // by parity: the negated sums of each block's halves, 16 bits each (Q2_K)
};

inline B load_64(const uint8_t *p) { return _mm512_loadu_si512(p); }
inline B load_32_twice(const uint8_t *p) {
    return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}
inline I by_group(int32_t a, int32_t b, int32_t c, int32_t d) {
    return _mm512_setr_epi32(a, a, a, a, b, b, b, b, c, c, c, c, d, d, d, d);
}

// Dwords first..first+3 of all four columns of parity p.
inline B dwords(const Activations &a, int p, int first) {
    return load_64(reinterpret_cast<const uint8_t *>(a.q[p][first]));
}

// Lanes of `a` (below 16) and `b` (from 16), one for each group.
inline B pick(B a, B b, int32_t q0, int32_t q1, int32_t q2, int32_t q3) {
    return _mm512_permutex2var_epi32(a, by_group(q0, q1, q2, q3), b);
}

template <int steps, int wide> inline I dot_spread(I init, const B *w, const B *q) {
    return dot_with<steps, wide>(init, w, [q](int s) { return q[s]; });
}

// Four pieces (column g, half h) of two registers: adds the halves; row r's group has columns 0..3.
inline I add_halves(I first, I second) {
    const I even = _mm512_setr_epi32(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
    const I odd = _mm512_setr_epi32(4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15, 23, 31);
    return add_ints(_mm512_permutex2var_epi32(first, even, second), _mm512_permutex2var_epi32(first, odd, second));
}

// Pieces are (column 2k, half 0), (2k, 1), (2k + 1, 0), (2k + 1, 1) of parity p.
inline void spread_columns(const Activations &a, Spread &s) {
    for (int p = 0; p < 2; p++) {
        const B low = dwords(a, p, 0), high = dwords(a, p, 4);
        for (int k = 0; k < 2; k++)
            for (int i = 0; i < 4; i++) {
                const int at = 4 * i + 2 * k;
                s.q[k][p][i] = pick(low, high, at, 16 + at, at + 1, 16 + at + 1);
            }
    }
}

// High nibbles stay where they are where the dot product has room for 16 times the sum.
inline B high_codes(B v) { return kBiasedDot ? _mm512_and_si512(v, _mm512_set1_epi8(char(0xf0))) : high_nibbles(v); }
inline I of_high_codes(I sum) { return kBiasedDot ? shift_right_signed<4>(sum) : sum; }

// The one-row variant of a format, where there is one.
template <class Format> struct Single {
    static constexpr bool kExists = false;
};

template <> struct Single<Q4_K> : Q4_K {
    static constexpr bool kExists = true;

    static void prepare(const Activations &a, Spread &s) { spread_columns(a, s); }

    void add(const uint8_t *const *rows, size_t offset, const Activations &a, const Spread &s, Lanes &lanes) {
        load_scales(rows, offset);
        I sums[2][2];
        for (int k = 0; k < 2; k++) {
            B in[4], packed[4], code[4];
            for (int r = 0; r < 4; r++)
                in[r] = load_64(rows[r] + offset + 16 + 64 * k);
            transpose(in, packed);
            for (int i = 0; i < 4; i++)
                code[i] = low_nibbles(packed[i]);
            sums[0][k] = dot_spread<4, 4>(zero_ints(), code, s.q[k][0]);
            for (int i = 0; i < 4; i++)
                code[i] = high_codes(packed[i]);
            sums[1][k] = dot_spread<4, 4>(zero_ints(), code, s.q[k][1]);
        }
        finish(0, add_halves(sums[0][0], sums[0][1]), a, lanes);
        finish(1, of_high_codes(add_halves(sums[1][0], sums[1][1])), a, lanes);
    }
};

template <> struct Single<Q5_K> : Q5_K {
    static constexpr bool kExists = true;

    static void prepare(const Activations &a, Spread &s) { spread_columns(a, s); }

    void add(const uint8_t *const *rows, size_t offset, const Activations &a, const Spread &s, Lanes &lanes) {
        load_scales(rows, offset);
        B in[4], bits[4];
        for (int r = 0; r < 4; r++)
            in[r] = load_32_twice(rows[r] + offset + 16);
        transpose(in, bits); // bit 2g + p of a byte: the fifth bit of an element of column g, parity p
        I sums[2][2];
        for (int k = 0; k < 2; k++) {
            B packed[4], code[4];
            for (int r = 0; r < 4; r++)
                in[r] = load_64(rows[r] + offset + 48 + 64 * k);
            transpose(in, packed);
            for (int p = 0; p < 2; p++) {
                const I shift = by_group(4 * k + p, 4 * k + p, 4 * k + 2 + p, 4 * k + 2 + p);
                for (int i = 0; i < 4; i++) {
                    const B bit = and_bytes(shift_right_by(bits[i], shift), splat_byte(1));
                    code[i] = or_bytes(p ? high_nibbles(packed[i]) : low_nibbles(packed[i]), as_bytes(shift_left<4>(as_ints(bit))));
                }
                sums[p][k] = dot_spread<4, 4>(zero_ints(), code, s.q[k][p]);
            }
        }
        for (int p = 0; p < 2; p++)
            finish(p, add_halves(sums[p][0], sums[p][1]), a, lanes);
    }
};

// Pieces of the 64 bytes of two-bit codes are (n, half): bits 2k, 2k + 1 are half a block, block 4n + k. So k & 1 is the
// parity and 2n + k / 2 the column.
inline void spread_quarters(const Activations &a, Spread &s) {
    for (int k = 0; k < 4; k++) {
        const B low = dwords(a, k & 1, 0), high = dwords(a, k & 1, 4);
        for (int i = 0; i < 4; i++) {
            const int at = 4 * i + k / 2;
            s.q[k / 2][k & 1][i] = pick(low, high, at, 16 + at, at + 2, 16 + at + 2);
        }
    }
}

// Where code k is in the byte that is multiplied: codes stay where the dot product has room for them.
constexpr int quarter_at(int k) { return kBiasedDot && k < 3 ? 2 * k : 0; }
inline B quarter(B v, int k) {
    return and_bytes(shift_right_by(v, splat_int(2 * k - quarter_at(k))), splat_byte(uint8_t(3 << quarter_at(k))));
}
inline I of_quarter(I sum, int k) { return as_ints(_mm512_srav_epi32(sum, splat_int(quarter_at(k)))); }

// Sums of pieces (n, half), of which `first` has columns 0 and 2 and `second` 1 and 3: row r's group has the four columns,
// the sums of a block's two halves in 16 bits each.
inline I half_pairs(I first, I second) {
    struct Order {
        uint16_t word[32];
    };
    alignas(64) static constexpr Order kOrder = [] {
        Order order{};
        for (int r = 0; r < 4; r++)
            for (int g = 0; g < 4; g++)
                for (int half = 0; half < 2; half++)
                    order.word[2 * (4 * r + g) + half] = uint16_t(2 * (4 * (g / 2 * 2 + half) + r) + g % 2);
        return order;
    }();
    const B both = merge_words(as_bytes(first), as_bytes(shift_left<16>(second)));
    return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder.word), both);
}
// Of 16-bit numbers: the products of each pair, added.
inline F add_products(I a, B b) { return to_float(_mm512_madd_epi16(a, b)); }

template <> struct Single<Q2_K> : Q2_K {
    static constexpr bool kExists = true;

    static void prepare(const Activations &a, Spread &s) {
        spread_quarters(a, s);
        for (int p = 0; p < 2; p++) {
            const I first = shift_right_signed<5>(repeat_ints(a.minus_half[0][p]));
            const I second = shift_right_signed<5>(repeat_ints(a.minus_half[1][p]));
            s.halves[p] = merge_words(first, shift_left<16>(second));
        }
    }

    void add(const uint8_t *const *rows, size_t offset, const Activations &a, const Spread &s, Lanes &lanes) {
        B in[4], packed[4];
        for (int r = 0; r < 4; r++)
            in[r] = load_64(rows[r] + offset + 16);
        transpose(in, packed);
        I sums[4];
        for (int k = 0; k < 4; k++) {
            B code[4];
            for (int i = 0; i < 4; i++)
                code[i] = quarter(packed[i], k);
            sums[k] = of_quarter(dot_spread<4, 4>(zero_ints(), code, s.q[k / 2][k & 1]), k);
        }
        const B scales = load_rows(rows, offset), low = low_nibbles(scales), high = high_nibbles(scales);
        const B tail = load_rows(rows, offset + kBytes - 16);
        scale = half_word<6>(tail);
        minimum = half_word<7>(tail);
        for (int p = 0; p < 2; p++) {
            const F total = add_products(half_pairs(sums[p], sums[2 + p]), byte_pair(low, p));
            const F u = fma(scale, total, minimum * add_products(s.halves[p], byte_pair(high, p)));
            lanes.acc[p] = fma(repeat_floats(a.d[p]), u, lanes.acc[p]);
        }
    }
};

template <> struct Single<Q3_K> : Q3_K {
    static constexpr bool kExists = true;

    static void prepare(const Activations &a, Spread &s) {
        spread_quarters(a, s);
        const I minus = _mm512_loadu_si512(a.minus_half); // [half][p][column], 32 times the sum
        for (int k = 0; k < 4; k++) {
            const int at = 4 * (k & 1) + k / 2;
            const I start = shift_right_signed<3>(pick(minus, minus, at, 8 + at, at + 2, 8 + at + 2));
            s.start[k / 2][k & 1] = as_ints(shift_left_by(as_bytes(start), splat_int(quarter_at(k))));
        }
    }

    void add(const uint8_t *const *rows, size_t offset, const Activations &a, const Spread &s, Lanes &lanes) {
        B in[4], packed[4], bits[4];
        for (int r = 0; r < 4; r++)
            in[r] = load_32_twice(rows[r] + offset);
        transpose(in, bits);
        for (int r = 0; r < 4; r++)
            in[r] = load_64(rows[r] + offset + 32);
        transpose(in, packed);
        for (int i = 0; i < 4; i++)
            bits[i] = shift_right_by(bits[i], by_group(0, 0, 4, 4)); // bit k of piece (n, half): of block 4n + k
        I sums[4];
        for (int k = 0; k < 4; k++) {
            const int up = quarter_at(k) + 2 - k;
            B code[4];
            for (int i = 0; i < 4; i++) {
                const B high = up < 0 ? shift_right_by(bits[i], splat_int(-up)) : shift_left_by(bits[i], splat_int(up));
                code[i] = or_bytes(quarter(packed[i], k), and_bytes(high, splat_byte(uint8_t(4 << quarter_at(k)))));
            }
            sums[k] = of_quarter(dot_spread<4, 4>(s.start[k / 2][k & 1], code, s.q[k / 2][k & 1]), k);
        }
        const B scales = load_scales(rows, offset);
        for (int p = 0; p < 2; p++) {
            const B pair = _mm512_sub_epi16(byte_pair(scales, p), _mm512_set1_epi16(32));
            finish(p, add_products(half_pairs(sums[p], sums[2 + p]), pair), a, lanes);
        }
    }
};

template <> struct Single<Q6_K> : Q6_K {
    static constexpr bool kExists = true;

    // Pieces of half n of a panel are (s, h): half h of block 4n + s (low nibbles) or 4n + 2 + s (high ones). So
    // s is the parity and 2n + high the column.
    static void prepare(const Activations &a, Spread &spread) {
        const I minus = _mm512_loadu_si512(a.minus_half); // [h][s][column]
        for (int n = 0; n < 2; n++)
            for (int high = 0; high < 2; high++) {
                const int column = 2 * n + high;
                for (int i = 0; i < 4; i++) {
                    const int at = 4 * i + column;
                    const B even = pick(dwords(a, 0, 0), dwords(a, 0, 4), at, 16 + at, 0, 0);
                    const B odd = pick(dwords(a, 1, 0), dwords(a, 1, 4), 0, 0, at, 16 + at);
                    spread.q[n][high][i] = _mm512_mask_mov_epi32(even, 0xff00, odd);
                }
                spread.start[n][high] = pick(minus, minus, column, 8 + column, 4 + column, 12 + column);
            }
    }

    void add(const uint8_t *const *rows, size_t offset, const Activations &a, const Spread &s, Lanes &lanes) {
        const I scales = as_ints(load_rows(rows, offset + kScales)); // dword 2n + high: bytes (s, h)
        const I of_rows = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
        F part[4]; // by column; groups are (s, h), integers all along
        for (int n = 0; n < 2; n++) {
            B in[4], packed[4], bits[4];
            for (int r = 0; r < 4; r++)
                in[r] = load_64(rows[r] + offset + 64 * n);
            transpose(in, packed);
            for (int r = 0; r < 4; r++)
                in[r] = load_32_twice(rows[r] + offset + 128 + 32 * n);
            transpose(in, bits);
            for (int high = 0; high < 2; high++) {
                const int column = 2 * n + high;
                B code[4];
                for (int i = 0; i < 4; i++) {
                    const B two = high ? shift_right_by(bits[i], by_group(0, 0, 2, 2)) : shift_left_by(bits[i], by_group(4, 4, 2, 2));
                    code[i] = or_bytes(high ? high_nibbles(packed[i]) : low_nibbles(packed[i]), and_bytes(two, splat_byte(0x30)));
                }
                const I sum = dot_spread<4, 2>(s.start[n][high], code, s.q[n][high]);
                const I four = _mm512_permutexvar_epi32(add_ints(of_rows, splat_int(column)), scales);
                const I scale_of_piece = shift_right_signed<24>(as_ints(shift_left_by(as_bytes(four), by_group(24, 16, 8, 0))));
                part[column] = to_float(scale_of_piece) * to_float(sum);
            }
        }
        scale = half_word<7>(load_rows(rows, offset + kBytes - 16));
        for (int p = 0; p < 2; p++)
            finish(p, columns(part, 2 * p) + columns(part, 2 * p + 1), a, lanes);
    }
    // Group `group` of four registers, one a column: row r's group has its four columns.
    static F columns(const F (&part)[4], int group) {
        const I lanes = _mm512_setr_epi32(0, 16, 0, 16, 1, 17, 1, 17, 2, 18, 2, 18, 3, 19, 3, 19);
        const I from = add_ints(lanes, splat_int(4 * group));
        return _mm512_mask_blend_ps(0xcccc, _mm512_permutex2var_ps(part[0], from, part[1]),
                                    _mm512_permutex2var_ps(part[2], from, part[3]));
    }
};

template <> struct Single<IQ4_XS> : IQ4_XS {
    static constexpr bool kExists = true;

    // Pieces are blocks 4k .. 4k + 3: low nibbles their first half, high ones their second.
    static void prepare(const Activations &a, Spread &spread) {
        for (int half = 0; half < 2; half++) {
            const B even = dwords(a, 0, 4 * half), odd = dwords(a, 1, 4 * half);
            for (int k = 0; k < 2; k++)
                for (int i = 0; i < 4; i++) {
                    const int at = 4 * i + 2 * k;
                    spread.q[k][half][i] = pick(even, odd, at, 16 + at, at + 1, 16 + at + 1);
                }
        }
    }

    void add(const uint8_t *const *rows, size_t offset, const Activations &a, const Spread &s, Lanes &lanes) {
        const B table = biased(repeat_bytes(kIQ4Values));
        load_scales(rows, offset);
        I sum[2];
        for (int k = 0; k < 2; k++) {
            B in[4], packed[4], code[4];
            for (int r = 0; r < 4; r++)
                in[r] = load_64(rows[r] + offset + 8 + 64 * k);
            transpose(in, packed);
            for (int i = 0; i < 4; i++)
                code[i] = look_up(table, low_nibbles(packed[i]));
            sum[k] = dot_spread<4, 0>(zero_ints(), code, s.q[k][0]);
            for (int i = 0; i < 4; i++)
                code[i] = look_up(table, high_nibbles(packed[i]));
            sum[k] = dot_spread<4, 0>(sum[k], code, s.q[k][1]);
        }
        const I even = _mm512_setr_epi32(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
        for (int p = 0; p < 2; p++) {
            const I total = _mm512_permutex2var_epi32(sum[0], add_ints(even, splat_int(4 * p)), sum[1]);
            finish(p, add_ints(total, start(a, p)), a, lanes);
        }
    }
};

} // namespace

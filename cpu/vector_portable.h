// Vectors of one row of four blocks, in GCC and Clang's vector extension: any processor.
//
// The interface that vector_avx2.h and vector_avx512.h share. A register is kRows groups of 16 bytes;
// "within groups" means that an operation does the same in each group. B: bytes, I: int32, F: float.
#pragma once

#include "half.h"

namespace {

constexpr int kRows = 1;          // rows of weights in a register
constexpr int kWidth = 4 * kRows; // floats in a register
constexpr bool kBiasedDot = false;

typedef uint8_t B __attribute__((vector_size(16)));
typedef int8_t SB __attribute__((vector_size(16)));
typedef int32_t I __attribute__((vector_size(16)));
typedef uint32_t U __attribute__((vector_size(16)));
typedef int64_t Q __attribute__((vector_size(16)));
typedef float F __attribute__((vector_size(16)));

template <class T> inline T load_as(const void *p) {
    T v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// --- loads and stores
inline B load_rows(const uint8_t *const *rows, size_t offset) { return load_as<B>(rows[0] + offset); }
inline B repeat_bytes(const void *p) { return load_as<B>(p); } // the same 16 bytes in every group
inline I repeat_ints(const int32_t *p) { return load_as<I>(p); }
inline F repeat_floats(const float *p) { return load_as<F>(p); }
inline F load(const float *p) { return load_as<F>(p); }
inline void store(float *p, F v) { std::memcpy(p, &v, sizeof v); }
inline F splat(float f) { return F{f, f, f, f}; }
inline I splat_int(int32_t i) { return I{i, i, i, i}; }
inline B splat_byte(uint8_t b) { return B{} + b; }
inline F load_half(const void *p) {
    F v{};
    for (int i = 0; i < 4; i++)
        v[i] = half_to_float(load_u16(static_cast<const uint8_t *>(p) + 2 * i));
    return v;
}
inline F load_bf16(const void *p) {
    F v{};
    for (int i = 0; i < 4; i++)
        v[i] = bf16_to_float(load_u16(static_cast<const uint8_t *>(p) + 2 * i));
    return v;
}
inline F load_int8(const int8_t *p) { return F{float(p[0]), float(p[1]), float(p[2]), float(p[3])}; }
// The low or high halves (shift 0 or 4) of kWidth bytes, less 8.
template <int shift> inline F load_nibbles(const uint8_t *p) {
    const auto q = [&](int i) { return float((p[i] >> shift & 15) - 8); };
    return F{q(0), q(1), q(2), q(3)};
}
inline void store_half(uint16_t *p, F v) {
    for (int i = 0; i < 4; i++)
        p[i] = float_to_half(v[i]);
}

// --- within groups
inline B zip_low32(B a, B b) { return (B)__builtin_shufflevector((I)a, (I)b, 0, 4, 1, 5); }
inline B zip_high32(B a, B b) { return (B)__builtin_shufflevector((I)a, (I)b, 2, 6, 3, 7); }
inline B zip_low64(B a, B b) { return (B)__builtin_shufflevector((Q)a, (Q)b, 0, 2); }
inline B zip_high64(B a, B b) { return (B)__builtin_shufflevector((Q)a, (Q)b, 1, 3); }
template <int k> inline B repeat_dword(B a) { return (B)__builtin_shufflevector((I)a, (I)a, k, k, k, k); }
template <int k> inline B repeat_qword(B a) { return (B)__builtin_shufflevector((Q)a, (Q)a, k, k); }
inline B look_up(B table, B index) { // by the low four bits of a byte; zero where it is above 127
    B v{};
    for (int i = 0; i < 16; i++)
        v[i] = index[i] & 0x80 ? 0 : table[index[i] & 15];
    return v;
}
inline F low_pairs(F a, F b) { return __builtin_shufflevector(a, b, 0, 1, 4, 5); }
inline F high_pairs(F a, F b) { return __builtin_shufflevector(a, b, 2, 3, 6, 7); }
inline F evens(F a, F b) { return __builtin_shufflevector(a, b, 0, 2, 4, 6); }
inline F odds(F a, F b) { return __builtin_shufflevector(a, b, 1, 3, 5, 7); }
template <int k> inline F half_word(B a) { return splat(half_to_float(uint16_t(a[2 * k] | a[2 * k + 1] << 8))); }
// The binary16 in word k of each dword.
template <int k> inline F dword_halves(B a) {
    F v{};
    for (int i = 0; i < 4; i++)
        v[i] = half_to_float(uint16_t(((U)a)[i] >> 16 * k));
    return v;
}

// --- bytes and integers
inline B and_bytes(B a, B b) { return a & b; }
inline B or_bytes(B a, B b) { return a | b; }
inline B xor_bytes(B a, B b) { return a ^ b; }
inline B high_nibbles(B a) { return a >> 4; }
inline B low_nibbles(B a) { return a & 15; }
inline B shift_right_by(B a, I counts) { return (B)((U)a >> (U)counts); } // each dword by its count
inline B shift_left_by(B a, I counts) { return (B)((U)a << (U)counts); }
// Bytes of a, with `more` where those of `bits` have the one bit of `mask`.
inline B add_where(B a, B bits, B mask, B more) { return a + ((B)((bits & mask) != 0) & more); }
template <int n> inline I shift_left(I a) { return (I)((U)a << n); }
template <int n> inline I shift_right_signed(I a) { return a >> n; }
inline I as_ints(B a) { return (I)a; }
inline B as_bytes(I a) { return (B)a; }
inline B float_bytes(F v) { return (B)v; }
inline F byte_floats(B v) { return (F)v; }
inline I zero_ints() { return I{}; }
inline I add_ints(I a, I b) { return a + b; }

// The low 16 bits of a's dwords with the high ones of b's.
inline B merge_words(B a, B b) { return (a & (B)splat_int(0xffff)) | (b & (B)splat_int(~0xffff)); }
// table[index] of each 16-bit index below n, a multiple of 128, in `count` registers. The table is 64-byte aligned and
// can be read two bytes beyond.
template <int n, int count> inline void look_up_words(const uint16_t *table, B (&v)[count]) {
    for (B &words : v) {
        uint16_t index[8];
        std::memcpy(index, &words, 16);
        for (uint16_t &w : index)
            w = table[w];
        words = load_as<B>(index);
    }
}

// init + the sum over `steps` of the dot products of four unsigned bytes of w with four of q. `wide`: how
// many products of two may be added up in 16 bits; 0: w is signed, or biased by 128 where kBiasedDot.
template <int steps, int wide> inline I dot(I init, const B *w, const int8_t (*q)[16]) {
    for (int s = 0; s < steps; s++)
        for (int i = 0; i < 4; i++)
            for (int b = 0; b < 4; b++)
                init[i] += (wide ? int(w[s][4 * i + b]) : int(int8_t(w[s][4 * i + b]))) * q[s][4 * i + b];
    return init;
}
inline B biased(B w) { return w; }

// --- floats
inline void keep(F &) {} // where v is: in a register, computed here and not later
inline F to_float(I v) { return __builtin_convertvector(v, F); }
inline F fma(F a, F b, F c) {
    F v{};
    for (int i = 0; i < 4; i++)
        v[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return v;
}
inline F fma_minus(F a, F b, F c) { return fma(a, b, -c); }
inline F max_of(F a, F b) { return a > b ? a : b; } // b where either is NaN
inline F clamp_above(F v, float top) { return v > splat(top) ? splat(top) : v; } // NaN stays
inline F zero_where_below(F v, F x, float bound) { return x < splat(bound) ? F{} : v; }
inline I magnitude_bits(F v) { return (I)v & 0x7fffffff; }
inline I max_ints(I a, I b) { return a > b ? a : b; }
inline int32_t largest(I v) {
    int32_t m = v[0];
    for (int i = 1; i < 4; i++)
        m = v[i] > m ? v[i] : m;
    return m;
}
inline float largest(F v) {
    float m = v[0];
    for (int i = 1; i < 4; i++)
        m = v[i] > m ? v[i] : m;
    return m;
}
// Nearest integers, ties to even, of magnitudes below 2^22; adding 1.5 * 2^23 rounds. NaN stays.
inline F round_even(F v) { return (v + splat(0x1.8p23f)) - splat(0x1.8p23f); }
inline F two_to(F n) { // n in [-126, 127]; anything for other values
    const F safe = (n >= splat(-126.0f)) & (n <= splat(127.0f)) ? n : F{};
    return (F)((__builtin_convertvector(safe, I) + 127) << 23);
}
inline void store_rounded(int8_t *p, F v) { // magnitudes of at most 127
    const I n = __builtin_convertvector(round_even(v), I);
    for (int i = 0; i < 4; i++)
        p[i] = int8_t(n[i]);
}

// v[0] + ... + v[kWidth - 1] as a tree: first j and j + kWidth / 2, then j and j + kWidth / 4, ...
inline float fold_register(F v) {
    const F pairs = v + __builtin_shufflevector(v, v, 2, 3, 0, 1);
    return pairs[0] + pairs[1];
}
// Sums of the two halves of 32 bytes.
inline void half_sums(const int8_t *q, int32_t (&sums)[2]) {
    for (int half = 0; half < 2; half++) {
        sums[half] = 0;
        for (int i = 0; i < 16; i++)
            sums[half] += q[16 * half + i];
    }
}
// Group r of register k <-> group k of register r.
inline void transpose_groups(B (&)[kRows]) {}

} // namespace

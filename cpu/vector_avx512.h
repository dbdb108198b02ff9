// Vectors of four rows of four blocks: AVX-512 F, BW, VL, DQ, and VNNI where the compiler is told so.
// The interface is vector_portable.h's.
#pragma once

#include <immintrin.h>

#include "half.h"

namespace {

constexpr int kRows = 4;
constexpr int kWidth = 4 * kRows;
#ifdef __AVX512VNNI__
constexpr bool kBiasedDot = true;
#else
constexpr bool kBiasedDot = false;
#endif

typedef __m512i B;
typedef __m512i I;
typedef __m512 F;

inline __m128i load_16(const void *p) { return _mm_loadu_si128(static_cast<const __m128i *>(p)); }

// --- loads and stores
inline B load_rows(const uint8_t *const *rows, size_t offset) {
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(load_16(rows[0] + offset)), load_16(rows[1] + offset), 1);
    const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(load_16(rows[2] + offset)), load_16(rows[3] + offset), 1);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
inline B repeat_bytes(const void *p) { return _mm512_broadcast_i32x4(load_16(p)); }
inline I repeat_ints(const int32_t *p) { return repeat_bytes(p); }
inline F repeat_floats(const float *p) { return _mm512_castsi512_ps(repeat_bytes(p)); }
inline F load(const float *p) { return _mm512_loadu_ps(p); }
inline void store(float *p, F v) { _mm512_storeu_ps(p, v); }
inline F splat(float f) { return _mm512_set1_ps(f); }
inline I splat_int(int32_t i) { return _mm512_set1_epi32(i); }
inline B splat_byte(uint8_t b) { return _mm512_set1_epi8(char(b)); }
inline F load_half(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i *>(p))); }
inline F load_bf16(const void *p) {
    const __m256i words = _mm256_loadu_si256(static_cast<const __m256i *>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}
inline F load_int8(const int8_t *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_16(p))); }
// The low or high halves (shift 0 or 4) of kWidth bytes, less 8.
template <int shift> inline F load_nibbles(const uint8_t *p) {
    const __m128i q = _mm_and_si128(_mm_srli_epi16(load_16(p), shift), _mm_set1_epi8(15));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_sub_epi8(q, _mm_set1_epi8(8))));
}
inline void store_half(uint16_t *p, F v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

// --- within groups
inline B zip_low32(B a, B b) { return _mm512_unpacklo_epi32(a, b); }
inline B zip_high32(B a, B b) { return _mm512_unpackhi_epi32(a, b); }
inline B zip_low64(B a, B b) { return _mm512_unpacklo_epi64(a, b); }
inline B zip_high64(B a, B b) { return _mm512_unpackhi_epi64(a, b); }
template <int k> inline B repeat_dword(B a) { return _mm512_shuffle_epi32(a, _MM_PERM_ENUM(k * 0x55)); }
template <int k> inline B repeat_qword(B a) { return _mm512_shuffle_epi32(a, _MM_PERM_ENUM(k ? 0xee : 0x44)); }
inline B look_up(B table, B index) { return _mm512_shuffle_epi8(table, index); }
inline F low_pairs(F a, F b) { return _mm512_shuffle_ps(a, b, 0x44); }
inline F high_pairs(F a, F b) { return _mm512_shuffle_ps(a, b, 0xee); }
inline F evens(F a, F b) { return _mm512_shuffle_ps(a, b, 0x88); }
inline F odds(F a, F b) { return _mm512_shuffle_ps(a, b, 0xdd); }
template <int k> inline F half_word(B a) {
    const __m512i rows = _mm512_set_epi64(0, 0, 0, 0, (24 + k) * 0x0001000100010001, (16 + k) * 0x0001000100010001,
                                          (8 + k) * 0x0001000100010001, k * 0x0001000100010001);
    return _mm512_cvtph_ps(_mm512_castsi512_si256(_mm512_permutexvar_epi16(rows, a)));
}
template <int k> inline F dword_halves(B a) {
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(k ? _mm512_srli_epi32(a, 16) : a));
}

// --- bytes and integers
inline B and_bytes(B a, B b) { return _mm512_and_si512(a, b); }
inline B or_bytes(B a, B b) { return _mm512_or_si512(a, b); }
inline B xor_bytes(B a, B b) { return _mm512_xor_si512(a, b); }
inline B low_nibbles(B a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
inline B high_nibbles(B a) { return low_nibbles(_mm512_srli_epi16(a, 4)); }
inline B shift_right_by(B a, I counts) { return _mm512_srlv_epi32(a, counts); }
inline B shift_left_by(B a, I counts) { return _mm512_sllv_epi32(a, counts); }
inline B add_where(B a, B bits, B mask, B more) {
    return _mm512_mask_add_epi8(a, _mm512_test_epi8_mask(bits, mask), a, more);
}
template <int n> inline I shift_left(I a) { return _mm512_slli_epi32(a, n); }
template <int n> inline I shift_right_signed(I a) { return _mm512_srai_epi32(a, n); }
inline I as_ints(B a) { return a; }
inline B as_bytes(I a) { return a; }
inline B float_bytes(F v) { return _mm512_castps_si512(v); }
inline F byte_floats(B v) { return _mm512_castsi512_ps(v); }
inline I zero_ints() { return _mm512_setzero_si512(); }
inline I add_ints(I a, I b) { return _mm512_add_epi32(a, b); }

inline B merge_words(B a, B b) { return _mm512_mask_blend_epi16(0xaaaaaaaa, a, b); }
// 128 entries at a time, in four registers, for all indices: a permutation takes the low six bits of an index.
template <int n, int count> inline void look_up_words(const uint16_t *table, B (&v)[count]) {
    B found[count];
    for (int base = 0; base < n; base += 128) {
        B part[4];
        for (int i = 0; i < 4; i++)
            part[i] = _mm512_load_si512(table + base + 32 * i);
        for (int k = 0; k < count; k++) {
            const B low = _mm512_permutex2var_epi16(part[0], v[k], part[1]), high = _mm512_permutex2var_epi16(part[2], v[k], part[3]);
            const B one = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(v[k], _mm512_set1_epi16(64)), low, high);
            const B block = _mm512_srli_epi16(v[k], 7);
            found[k] = base ? _mm512_mask_blend_epi16(_mm512_cmpeq_epi16_mask(block, _mm512_set1_epi16(int16_t(base / 128))), found[k], one) : one;
        }
    }
    for (int k = 0; k < count; k++)
        v[k] = found[k];
}

// `dot` for any operands q(0), q(1), ...
template <int steps, int wide, class Operand> inline I dot_with(I init, const B *w, Operand q) {
#ifdef __AVX512VNNI__
    for (int s = 0; s < steps; s++)
        init = _mm512_dpbusd_epi32(init, w[s], q(s));
#else
    const I ones = _mm512_set1_epi16(1);
    constexpr int group = wide ? wide : 1;
    for (int s = 0; s < steps; s += group) {
        I pairs = _mm512_setzero_si512();
        for (int t = s; t < s + group; t++) {
            const B a = q(t);
            // Signed weights: |w| times q with the sign of w; a pair stays below 2 * 128 * 127 < 2^15.
            const I two = wide ? _mm512_maddubs_epi16(w[t], a)
                               : _mm512_maddubs_epi16(_mm512_abs_epi8(w[t]),
                                                      _mm512_mask_sub_epi8(a, _mm512_movepi8_mask(w[t]),
                                                                           _mm512_setzero_si512(), a));
            pairs = t == s ? two : _mm512_add_epi16(pairs, two);
        }
        init = _mm512_add_epi32(init, _mm512_madd_epi16(pairs, ones));
    }
#endif
    return init;
}
template <int steps, int wide> inline I dot(I init, const B *w, const int8_t (*q)[16]) {
    return dot_with<steps, wide>(init, w, [q](int s) { return repeat_bytes(q[s]); });
}
inline B biased(B w) { return kBiasedDot ? _mm512_xor_si512(w, _mm512_set1_epi8(char(0x80))) : w; }

// --- floats
inline void keep(F &v) { asm volatile("" : "+v"(v)); }
inline F to_float(I v) { return _mm512_cvtepi32_ps(v); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F fma_minus(F a, F b, F c) { return _mm512_fmsub_ps(a, b, c); }
inline F max_of(F a, F b) { return _mm512_max_ps(a, b); }
inline F clamp_above(F v, float top) { return _mm512_min_ps(splat(top), v); }
inline F zero_where_below(F v, F x, float bound) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, splat(bound), _CMP_NLT_UQ), v);
}
inline I magnitude_bits(F v) { return _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7fffffff)); }
inline I max_ints(I a, I b) { return _mm512_max_epi32(a, b); }
inline int32_t largest(I v) { return _mm512_reduce_max_epi32(v); }
inline float largest(F v) { return _mm512_reduce_max_ps(v); }
inline F round_even(F v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F two_to(F n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
inline void store_rounded(int8_t *p, F v) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
}

inline float fold_register(F v) {
    const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline void half_sums(const int8_t *q, int32_t (&sums)[2]) {
    for (int half = 0; half < 2; half++) { // as unsigned bytes, 128 too large each
        const __m128i s = _mm_sad_epu8(_mm_xor_si128(load_16(q + 16 * half), _mm_set1_epi8(char(0x80))), _mm_setzero_si128());
        sums[half] = _mm_cvtsi128_si32(s) + _mm_extract_epi16(s, 4) - 16 * 128;
    }
}
inline void transpose_groups(B (&v)[kRows]) {
    const B a = _mm512_shuffle_i32x4(v[0], v[1], 0x44), b = _mm512_shuffle_i32x4(v[0], v[1], 0xee);
    const B c = _mm512_shuffle_i32x4(v[2], v[3], 0x44), d = _mm512_shuffle_i32x4(v[2], v[3], 0xee);
    v[0] = _mm512_shuffle_i32x4(a, c, 0x88);
    v[1] = _mm512_shuffle_i32x4(a, c, 0xdd);
    v[2] = _mm512_shuffle_i32x4(b, d, 0x88);
    v[3] = _mm512_shuffle_i32x4(b, d, 0xdd);
}

} // namespace

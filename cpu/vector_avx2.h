// Vectors of two rows of four blocks: AVX2 with FMA and F16C. The interface is vector_portable.h's.
#pragma once

#include <immintrin.h>

#include "half.h"

namespace {

constexpr int kRows = 2;
constexpr int kWidth = 4 * kRows;
constexpr bool kBiasedDot = false;

typedef __m256i B;
typedef __m256i I;
typedef __m256 F;

inline __m128i load_16(const void *p) { return _mm_loadu_si128(static_cast<const __m128i *>(p)); }

// --- loads and stores
inline B load_rows(const uint8_t *const *rows, size_t offset) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(load_16(rows[0] + offset)), load_16(rows[1] + offset), 1);
}
inline B repeat_bytes(const void *p) { return _mm256_broadcastsi128_si256(load_16(p)); }
inline I repeat_ints(const int32_t *p) { return repeat_bytes(p); }
inline F repeat_floats(const float *p) { return _mm256_castsi256_ps(repeat_bytes(p)); }
inline F load(const float *p) { return _mm256_loadu_ps(p); }
inline void store(float *p, F v) { _mm256_storeu_ps(p, v); }
inline F splat(float f) { return _mm256_set1_ps(f); }
inline I splat_int(int32_t i) { return _mm256_set1_epi32(i); }
inline B splat_byte(uint8_t b) { return _mm256_set1_epi8(char(b)); }
inline F load_half(const void *p) { return _mm256_cvtph_ps(load_16(p)); }
inline F load_bf16(const void *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_16(p)), 16));
}
inline F load_int8(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
}
// The low or high halves (shift 0 or 4) of kWidth bytes, less 8.
template <int shift> inline F load_nibbles(const uint8_t *p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p));
    const __m128i q = _mm_and_si128(_mm_srli_epi16(bytes, shift), _mm_set1_epi8(15));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_sub_epi8(q, _mm_set1_epi8(8))));
}
inline void store_half(uint16_t *p, F v) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

// --- within groups
inline B zip_low32(B a, B b) { return _mm256_unpacklo_epi32(a, b); }
inline B zip_high32(B a, B b) { return _mm256_unpackhi_epi32(a, b); }
inline B zip_low64(B a, B b) { return _mm256_unpacklo_epi64(a, b); }
inline B zip_high64(B a, B b) { return _mm256_unpackhi_epi64(a, b); }
template <int k> inline B repeat_dword(B a) { return _mm256_shuffle_epi32(a, k * 0x55); }
template <int k> inline B repeat_qword(B a) { return _mm256_shuffle_epi32(a, k ? 0xee : 0x44); }
inline B look_up(B table, B index) { return _mm256_shuffle_epi8(table, index); }
inline F low_pairs(F a, F b) { return _mm256_shuffle_ps(a, b, 0x44); }
inline F high_pairs(F a, F b) { return _mm256_shuffle_ps(a, b, 0xee); }
inline F evens(F a, F b) { return _mm256_shuffle_ps(a, b, 0x88); }
inline F odds(F a, F b) { return _mm256_shuffle_ps(a, b, 0xdd); }
template <int k> inline F half_word(B a) {
    const B words = _mm256_shuffle_epi8(a, _mm256_set1_epi16(int16_t((2 * k + 1) << 8 | 2 * k)));
    return _mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64(words, 0x08)));
}
template <int k> inline F dword_halves(B a) {
    const B pick = _mm256_broadcastsi128_si256(k ? _mm_setr_epi8(2, 3, 6, 7, 10, 11, 14, 15, 2, 3, 6, 7, 10, 11, 14, 15)
                                                 : _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 0, 1, 4, 5, 8, 9, 12, 13));
    return _mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_shuffle_epi8(a, pick), 0x08)));
}

// --- bytes and integers
inline B and_bytes(B a, B b) { return _mm256_and_si256(a, b); }
inline B or_bytes(B a, B b) { return _mm256_or_si256(a, b); }
inline B xor_bytes(B a, B b) { return _mm256_xor_si256(a, b); }
inline B low_nibbles(B a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
inline B high_nibbles(B a) { return low_nibbles(_mm256_srli_epi16(a, 4)); }
inline B shift_right_by(B a, I counts) { return _mm256_srlv_epi32(a, counts); }
inline B shift_left_by(B a, I counts) { return _mm256_sllv_epi32(a, counts); }
inline B add_where(B a, B bits, B mask, B more) {
    return _mm256_add_epi8(a, _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(bits, mask), mask), more));
}
template <int n> inline I shift_left(I a) { return _mm256_slli_epi32(a, n); }
template <int n> inline I shift_right_signed(I a) { return _mm256_srai_epi32(a, n); }
inline I as_ints(B a) { return a; }
inline B as_bytes(I a) { return a; }
inline B float_bytes(F v) { return _mm256_castps_si256(v); }
inline F byte_floats(B v) { return _mm256_castsi256_ps(v); }
inline I zero_ints() { return _mm256_setzero_si256(); }
inline I add_ints(I a, I b) { return _mm256_add_epi32(a, b); }

inline B merge_words(B a, B b) { return _mm256_blend_epi16(a, b, 0xaa); }
template <int n, int count> inline void look_up_words(const uint16_t *table, B (&v)[count]) {
    const int *const base = reinterpret_cast<const int *>(table); // gathers read two entries, the second of which is dropped
    for (B &words : v) {
        const B low = _mm256_i32gather_epi32(base, _mm256_and_si256(words, _mm256_set1_epi32(0xffff)), 2);
        const B high = _mm256_i32gather_epi32(base, _mm256_srli_epi32(words, 16), 2);
        words = merge_words(low, _mm256_slli_epi32(high, 16));
    }
}

template <int steps, int wide, class Operand> inline I dot_with(I init, const B *w, Operand q) {
    const I ones = _mm256_set1_epi16(1);
    constexpr int group = wide ? wide : 1;
    for (int s = 0; s < steps; s += group) {
        I pairs = _mm256_setzero_si256();
        for (int t = s; t < s + group; t++) {
            const B a = q(t);
            // Signed weights: |w| times q with the sign of w; a pair stays below 2 * 128 * 127 < 2^15.
            const I two = wide ? _mm256_maddubs_epi16(w[t], a)
                               : _mm256_maddubs_epi16(_mm256_abs_epi8(w[t]), _mm256_sign_epi8(a, w[t]));
            pairs = t == s ? two : _mm256_add_epi16(pairs, two);
        }
        init = _mm256_add_epi32(init, _mm256_madd_epi16(pairs, ones));
    }
    return init;
}
template <int steps, int wide> inline I dot(I init, const B *w, const int8_t (*q)[16]) {
    return dot_with<steps, wide>(init, w, [q](int s) { return repeat_bytes(q[s]); });
}
inline B biased(B w) { return w; }

// --- floats
inline void keep(F &v) { asm volatile("" : "+x"(v)); }
inline F to_float(I v) { return _mm256_cvtepi32_ps(v); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F fma_minus(F a, F b, F c) { return _mm256_fmsub_ps(a, b, c); }
inline F max_of(F a, F b) { return _mm256_max_ps(a, b); }
inline F clamp_above(F v, float top) { return _mm256_min_ps(splat(top), v); }
inline F zero_where_below(F v, F x, float bound) {
    return _mm256_andnot_ps(_mm256_cmp_ps(x, splat(bound), _CMP_LT_OQ), v);
}
inline I magnitude_bits(F v) { return _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7fffffff)); }
inline I max_ints(I a, I b) { return _mm256_max_epi32(a, b); }
inline int32_t largest(I v) {
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
    return _mm_cvtsi128_si32(m);
}
inline float largest(F v) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    m = _mm_max_ps(m, _mm_permute_ps(m, 0x4e));
    m = _mm_max_ps(m, _mm_permute_ps(m, 0xb1));
    return _mm_cvtss_f32(m);
}
inline F round_even(F v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F two_to(F n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline void store_rounded(int8_t *p, F v) {
    const I n = _mm256_cvtps_epi32(v);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(n), _mm256_extracti128_si256(n, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i *>(p), _mm_packs_epi16(words, words));
}

inline float fold_register(F v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
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
    const B a = _mm256_permute2x128_si256(v[0], v[1], 0x20), b = _mm256_permute2x128_si256(v[0], v[1], 0x31);
    v[0] = a;
    v[1] = b;
}

} // namespace

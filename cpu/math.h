// Reductions, exp, norms, rotation and 8-bit activations. Twins: sum32, dot32, exp, silu, rms_norm,
// _rotate and quantize_activations of engine/ops/arithmetic.py and reference.py.
#pragma once

#include "kernels.h"

namespace {

using spark::Activations;
using spark::kBlock;
using spark::kLanes;

constexpr int kRegisters = kLanes / kWidth; // that hold the 32 lanes

// Four registers of four dwords a group -> register i has dword i of each: a 4 x 4 transposition.
inline void transpose(const B (&in)[4], B *out) {
    const B a = zip_low32(in[0], in[1]), b = zip_high32(in[0], in[1]);
    const B c = zip_low32(in[2], in[3]), d = zip_high32(in[2], in[3]);
    out[0] = zip_low64(a, c);
    out[1] = zip_high64(a, c);
    out[2] = zip_low64(b, d);
    out[3] = zip_high64(b, d);
}

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// The 32 lanes of a sum, and the tree that folds them.
struct Sum {
    F lane[kRegisters];

    Sum() {
        for (F &v : lane)
            v = splat(0.0f);
    }
    float fold() const {
        F v[kRegisters];
        for (int r = 0; r < kRegisters; r++)
            v[r] = lane[r];
        for (int o = kRegisters / 2; o; o /= 2)
            for (int r = 0; r < o; r++)
                v[r] = v[r] + v[r + o];
        return fold_register(v[0]);
    }
    // The last n % 32 terms; a lane without a term must stay as it is, even if it is -0.
    template <class Term> void tail(int64_t n, Term term) {
        alignas(64) float v[kLanes];
        for (int r = 0; r < kRegisters; r++)
            store(v + r * kWidth, lane[r]);
        for (int64_t i = n / kLanes * kLanes; i < n; i++)
            v[i % kLanes] = term(i, v[i % kLanes]);
        for (int r = 0; r < kRegisters; r++)
            lane[r] = load(v + r * kWidth);
    }
};

inline float sum32(const float *x, int64_t n) {
    Sum s;
    for (int64_t i = 0; i + kLanes <= n; i += kLanes)
        for (int r = 0; r < kRegisters; r++)
            s.lane[r] = s.lane[r] + load(x + i + r * kWidth);
    if (n % kLanes)
        s.tail(n, [&](int64_t i, float lane) { return lane + x[i]; });
    return s.fold();
}

inline F exp(F x) {
    const F v = clamp_above(x, 88.0f);
    const F n = round_even(v * splat(0x1.715476p+0f));
    F r = fma(n, splat(-0x1.62e400p-1f), v);
    r = fma(n, splat(-0x1.7f7d1cp-20f), r);
    F p = splat(0x1.6c16c2p-10f);
    p = fma(p, r, splat(0x1.111112p-7f));
    p = fma(p, r, splat(0x1.555556p-5f));
    p = fma(p, r, splat(0x1.555556p-3f));
    p = fma(p, r, splat(0.5f));
    p = fma(p, r, splat(1.0f));
    p = fma(p, r, splat(1.0f));
    return zero_where_below(p * two_to(n), x, -87.0f);
}

inline F sigmoid(F x) { return splat(1.0f) / (splat(1.0f) + exp(-x)); }

inline F softplus(F x) {
    const F y = exp(byte_floats(or_bytes(float_bytes(x), float_bytes(splat(-0.0f))))); // of -|x|
    const F s = y / (splat(2.0f) + y), square = s * s;
    F p = splat(1.0f / 17);
    for (int n = 15; n > 0; n -= 2)
        p = fma(p, square, splat(1.0f / float(n)));
    return max_of(x, splat(0.0f)) + (s + s) * p; // a NaN is in p
}

// f of n elements, a register at a time; the last ones in a register padded with zeros.
template <class Function> inline void each(int64_t n, Function f) {
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth)
        f(i, kWidth);
    if (i < n)
        f(i, int(n - i));
}

inline F load_some(const float *p, int n) {
    if (n == kWidth)
        return load(p);
    alignas(64) float v[kWidth] = {};
    std::memcpy(v, p, n * sizeof(float));
    return load(v);
}

inline void store_some(float *p, F v, int n) {
    if (n == kWidth)
        return store(p, v);
    alignas(64) float all[kWidth];
    store(all, v);
    std::memcpy(p, all, n * sizeof(float));
}

void exp_minus(const float *x, float minus, int64_t n, float *y) {
    each(n, [&](int64_t i, int some) { store_some(y + i, exp(load_some(x + i, some) - splat(minus)), some); });
}

void silu_mul(const float *gate, const float *up, int64_t n, float *z) {
    each(n, [&](int64_t i, int some) {
        const F g = load_some(gate + i, some);
        const F silu = g / (splat(1.0f) + exp(-g));
        store_some(z + i, silu * load_some(up + i, some), some);
    });
}

void gelu_mul(const float *gate, const float *up, int64_t n, float *z) {
    each(n, [&](int64_t i, int some) {
        const F g = load_some(gate + i, some);
        const F u = fma(splat(0x1.2444f2p-4f), g * g, splat(0x1.988454p+0f)); // 2 sqrt(2 / pi) (1 + 0.044715 g^2)
        const F gelu = g / (splat(1.0f) + exp((-g) * u));
        store_some(z + i, gelu * load_some(up + i, some), some);
    });
}

void sigmoid(const float *x, int64_t n, float *y) {
    each(n, [&](int64_t i, int some) {
        store_some(y + i, splat(1.0f) / (splat(1.0f) + exp(-load_some(x + i, some))), some);
    });
}

void softcap(float *x, float cap, int64_t n) {
    each(n, [&](int64_t i, int some) {
        const F u = load_some(x + i, some) / splat(cap);
        const F tanh = splat(1.0f) - splat(2.0f) / (exp(u + u) + splat(1.0f));
        store_some(x + i, tanh * splat(cap), some);
    });
}

void scale(float *x, float factor, int64_t n) {
    each(n, [&](int64_t i, int some) { store_some(x + i, load_some(x + i, some) * splat(factor), some); });
}

void add(float *x, const float *y, int64_t n) {
    each(n, [&](int64_t i, int some) { store_some(x + i, load_some(x + i, some) + load_some(y + i, some), some); });
}

void fold_experts(float *x, const float *w, const float *y, const int32_t *row, int64_t stride, int64_t n_used,
                  int64_t n, bool add) {
    each(n, [&](int64_t i, int some) {
        F r = splat(0.0f);
        for (int64_t a = 0; a < n_used; a++)
            r = fma(splat(w[a]), load_some(y + row[a] * stride + i, some), r);
        store_some(x + i, add ? load_some(x + i, some) + r : r, some);
    });
}

void rms_norm(const float *x, const float *weight, int64_t n, float eps, float *y) {
    Sum s;
    for (int64_t i = 0; i + kLanes <= n; i += kLanes)
        for (int r = 0; r < kRegisters; r++) {
            const F v = load(x + i + r * kWidth);
            s.lane[r] = fma(v, v, s.lane[r]);
        }
    if (n % kLanes)
        s.tail(n, [&](int64_t i, float lane) { return __builtin_fmaf(x[i], x[i], lane); });
    const float mean = s.fold() / float(n);
    const F scale = splat(1.0f / __builtin_sqrtf(mean + eps));
    each(n, [&](int64_t i, int some) {
        store_some(y + i, (load_some(x + i, some) * scale) * load_some(weight + i, some), some);
    });
}

void rotate(float *x, const float *cosines, const float *sines, int64_t half) {
    each(half, [&](int64_t i, int some) {
        const F a = load_some(x + i, some), b = load_some(x + half + i, some);
        const F c = load_some(cosines + i, some), s = load_some(sines + i, some);
        store_some(x + i, fma_minus(a, c, b * s), some);
        store_some(x + half + i, fma(b, c, a * s), some);
    });
}

// 32 elements as 8-bit integers; returns the scale.
inline float quantize_block(const float *x, int8_t *q) {
    F v[kRegisters];
    I top = zero_ints();
    for (int r = 0; r < kRegisters; r++) {
        v[r] = load(x + r * kWidth);
        // The bits of magnitudes are ordered as integers, infinity and NaN above all numbers.
        top = max_ints(top, magnitude_bits(v[r]));
    }
    const uint32_t bits = uint32_t(largest(top));
    const float amax = bits_to_float(bits);
    if (bits >= 0x7f800000 || amax < 0x1p-100f) {
        std::memset(q, 0, kBlock);
        return bits >= 0x7f800000 ? bits_to_float(0x7fc00000) : 0.0f;
    }
    const F inverse = splat(127.0f / amax);
    for (int r = 0; r < kRegisters; r++)
        store_rounded(q + r * kWidth, v[r] * inverse);
    return amax / 127.0f;
}

// q and d become block `block` of a row of activations.
inline void arrange_block(const int8_t *q, float d, int64_t block, Activations *row) {
    Activations &a = row[block / 8];
    const int p = block & 1, g = int(block % 8) >> 1;
    a.d[p][g] = d;
    int32_t sums[2];
    half_sums(q, sums);
    for (int i = 0; i < 8; i++)
        std::memcpy(a.q[p][i] + 4 * g, q + 4 * i, 4);
    a.sum[p][g] = float(sums[0] + sums[1]);
    a.minus_sum[p][g] = -(sums[0] + sums[1]);
    a.minus_half[0][p][g] = -32 * sums[0];
    a.minus_half[1][p][g] = -32 * sums[1];
}

void quantize_block(const float *x, int64_t block, Activations *row) {
    alignas(32) int8_t q[kBlock];
    const float d = quantize_block(x, q);
    arrange_block(q, d, block, row);
}

void quantize(const float *x, int64_t n, Activations *row) {
    for (int64_t b = 0; b < n / kBlock; b++)
        quantize_block(x + b * kBlock, b, row);
}

void arrange(const int8_t *q, const float *d, int64_t n, Activations *row) {
    for (int64_t b = 0; b < n / kBlock; b++) {
        alignas(32) int8_t aligned[kBlock];
        std::memcpy(aligned, q + b * kBlock, kBlock);
        arrange_block(aligned, d[b], b, row);
    }
}

void block_of(const Activations *row, int64_t block, int8_t *q, float *d) {
    const Activations &a = row[block / 8];
    const int p = block & 1, g = int(block % 8) >> 1;
    for (int i = 0; i < 8; i++)
        std::memcpy(q + 4 * i, a.q[p][i] + 4 * g, 4);
    *d = a.d[p][g];
}

void store_f16(const float *x, int64_t n, uint16_t *y) {
    each(n, [&](int64_t i, int some) {
        if (some == kWidth)
            return store_half(y + i, load(x + i));
        alignas(64) uint16_t words[kWidth];
        store_half(words, load_some(x + i, some));
        std::memcpy(y + i, words, some * sizeof(uint16_t));
    });
}

void store_q8(const float *x, int64_t n, int8_t *q, uint16_t *scale) {
    for (int64_t b = 0; b < n / kBlock; b++)
        scale[b] = float_to_half(quantize_block(x + b * kBlock, q + b * kBlock));
}

void store_q4(const float *x, int64_t n, uint8_t *q, uint16_t *scale) {
    for (int64_t b = 0; b < n / kBlock; b++, x += kBlock, q += kBlock / 2) {
        float extreme = x[0], amax = __builtin_fabsf(x[0]);
        bool finite = true;
        for (int i = 0; i < kBlock; i++) {
            const float magnitude = __builtin_fabsf(x[i]);
            finite &= magnitude < __builtin_inff();
            if (magnitude > amax)
                amax = magnitude, extreme = x[i];
        }
        const float d = extreme / -8.0f;
        scale[b] = float_to_half(finite ? d : bits_to_float(0x7fc00000));
        if (!finite || amax < 0x1p-100f) {
            std::memset(q, 0x88, kBlock / 2);
            continue;
        }
        const float inverse = 1.0f / d;
        const auto nibble = [&](int i) {
            const int value = int(__builtin_fmaf(x[i], inverse, 8.5f));
            return value < 15 ? value : 15;
        };
        for (int i = 0; i < kBlock / 2; i++)
            q[i] = uint8_t(nibble(i) | nibble(i + kBlock / 2) << 4);
    }
}

} // namespace

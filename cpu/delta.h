// The parts of a gated DeltaNet. Twins: engine/ops/delta.py.
#pragma once

#include "math.h"

namespace {

void convolve(const float *const *tap, const float *weights, int64_t kernel, int64_t n, float *y) {
    each(n, [&](int64_t i, int some) {
        F sum = splat(0.0f);
        for (int64_t j = 0; j < kernel; j++) {
            alignas(64) float w[kWidth] = {};
            for (int c = 0; c < some; c++)
                w[c] = weights[(i + c) * kernel + j];
            sum = fma(load_some(tap[j] + i, some), load(w), sum);
        }
        store_some(y + i, sum / (splat(1.0f) + exp(-sum)), some);
    });
}

inline float dot(const float *a, const float *b, int64_t n) {
    Sum s;
    for (int64_t i = 0; i + kLanes <= n; i += kLanes)
        for (int r = 0; r < kRegisters; r++)
            s.lane[r] = fma(load(a + i + r * kWidth), load(b + i + r * kWidth), s.lane[r]);
    if (n % kLanes)
        s.tail(n, [&](int64_t i, float lane) { return __builtin_fmaf(a[i], b[i], lane); });
    return s.fold();
}

void unit(float *x, int64_t n, float eps, float factor) {
    const F inverse = splat(1.0f / __builtin_sqrtf(dot(x, x, n) + eps));
    each(n, [&](int64_t i, int some) { store_some(x + i, (load_some(x + i, some) * inverse) * splat(factor), some); });
}

void delta_gates(const float *alpha, const float *dt_bias, const float *a, int64_t n, float *decay) {
    each(n, [&](int64_t i, int some) {
        const F step = softplus(load_some(alpha + i, some) + load_some(dt_bias + i, some));
        store_some(decay + i, exp(load_some(a + i, some) * step), some);
    });
}

// dot32 of x and y, where x becomes f of it first.
template <class Function> inline float update_and_dot(float *x, const float *y, int64_t n, Function f) {
    if (n % kLanes) {
        each(n, [&](int64_t i, int some) { store_some(x + i, f(i, some, load_some(x + i, some)), some); });
        return dot(x, y, n);
    }
    Sum s;
    for (int64_t i = 0; i < n; i += kLanes)
        for (int r = 0; r < kRegisters; r++) {
            const int64_t at = i + r * kWidth;
            const F v = f(at, kWidth, load(x + at));
            store(x + at, v);
            s.lane[r] = fma(v, load(y + at), s.lane[r]);
        }
    return s.fold();
}

void delta_step(float *state, const float *q, const float *k, const float *v, int64_t d_k, int64_t d_v, float decay,
                float rate, float *out) {
    const F factor = splat(decay);
    for (int64_t row = 0; row < d_v; row++, state += d_k) {
        const float answer = update_and_dot(state, k, d_k, [&](int64_t, int, F s) { return s * factor; });
        const F correction = splat((v[row] - answer) * rate);
        out[row] = update_and_dot(state, q, d_k, [&](int64_t i, int some, F s) {
            return fma(load_some(k + i, some), correction, s);
        });
    }
}

} // namespace

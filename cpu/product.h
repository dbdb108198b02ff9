// Rows of a weight matrix against activation rows. Twin: product of engine/ops/reference.py.
//
// A panel of weights is unpacked once and meets up to kTile activation rows, whose float lanes wait in
// memory (first-level cache) in between. A row's bits do not depend on how many rows share the call.
#pragma once

#include "formats.h"
#include "math.h"

namespace {

using spark::Inputs;
using spark::kSuper;
using spark::Weights;

constexpr int64_t kTile = 32;

// Lane 8c + 2g + p of a row's sum is lane g of its group in lanes[c].acc[p]; c counts panels modulo 4.
inline F fold_lanes(const Lanes (&lanes)[4]) {
    F half[2];
    for (int p = 0; p < 2; p++) {
        F v = (lanes[0].acc[p] + lanes[2].acc[p]) + (lanes[1].acc[p] + lanes[3].acc[p]);
        v = v + swap_pairs(v);
        half[p] = v + swap_neighbors(v);
    }
    return half[0] + half[1]; // the same in all four lanes of a group
}

// Blocks past the last whole panel, one at a time.
template <class Format>
void add_last_blocks(const uint8_t *row, int64_t cols, const Activations *a, int r, Lanes (&lanes)[4]) {
    for (int64_t b = cols / kSuper * 8; b < cols / 32; b++) {
        const Activations &last = a[b / 8];
        const int p = b & 1, g = int(b % 8) >> 1;
        int8_t q[32];
        for (int i = 0; i < 8; i++)
            std::memcpy(q + 4 * i, last.q[p][i] + 4 * g, 4);
        alignas(64) float acc[kWidth];
        F &sums = lanes[b / 8 % 4].acc[p];
        store(acc, sums);
        acc[4 * r + g] = __builtin_fmaf(last.d[p][g], Format::term(row + b * Format::kBytes, q), acc[4 * r + g]);
        sums = load(acc);
    }
}

template <class Format>
void product_of(const Weights &w, int64_t first, int64_t last, const Inputs &in, const int32_t *index, int64_t n,
                float *out, int64_t stride) {
    constexpr size_t kPanelBytes = size_t(Format::kBytes) * kSuper / Format::kElements;
    const int64_t panels = w.cols / kSuper;
    Lanes lanes[kTile][4];
    for (int64_t row = first; row < last; row += kRows) {
        const uint8_t *rows[kRows]; // past the end: the last row again
        for (int r = 0; r < kRows; r++)
            rows[r] = w.data + least(row + r, last - 1) * w.row_bytes;
        for (int64_t start = 0; start < n; start += kTile) {
            const int64_t some = least(kTile, n - start);
            const Activations *a[kTile];
            for (int64_t t = 0; t < some; t++) {
                a[t] = in.quantized + (index ? index[start + t] : start + t) * in.supers;
                for (Lanes &part : lanes[t])
                    part.acc[0] = part.acc[1] = splat(0.0f);
            }
            for (int64_t s = 0; s < panels; s++) {
                Format panel;
                panel.load(rows, s * kPanelBytes);
                for (int64_t t = 0; t < some; t++)
                    panel.multiply(a[t][s], lanes[t][s % 4]);
            }
            for (int64_t t = 0; t < some; t++) {
                if constexpr (Format::kElements == 32)
                    if (w.cols % kSuper)
                        for (int r = 0; r < kRows; r++)
                            add_last_blocks<Format>(rows[r], w.cols, a[t], r, lanes[t]);
                alignas(64) float sums[kWidth];
                store(sums, fold_lanes(lanes[t]));
                float *to = out + (start + t) * stride + (row - first);
                for (int r = 0; r < kRows && row + r < last; r++)
                    to[r] = sums[4 * r];
            }
        }
    }
}

struct F32 {
    static F load_some(const uint8_t *p) { return load(reinterpret_cast<const float *>(p)); }
    static float one(const uint8_t *p) {
        float f;
        std::memcpy(&f, p, 4);
        return f;
    }
    static constexpr int kBytes = 4;
};
struct F16 {
    static F load_some(const uint8_t *p) { return load_half(p); }
    static float one(const uint8_t *p) { return half_to_float(load_u16(p)); }
    static constexpr int kBytes = 2;
};
struct BF16 {
    static F load_some(const uint8_t *p) { return load_bf16(p); }
    static float one(const uint8_t *p) { return bf16_to_float(load_u16(p)); }
    static constexpr int kBytes = 2;
};

template <class Format>
void float_product_of(const Weights &w, int64_t first, int64_t last, const Inputs &in, const int32_t *index, int64_t n,
                      float *out, int64_t stride) {
    constexpr int kTogether = 4; // rows: independent chains of fma
    for (int64_t row = first; row < last; row += kTogether) {
        const uint8_t *rows[kTogether];
        for (int r = 0; r < kTogether; r++)
            rows[r] = w.data + least(row + r, last - 1) * w.row_bytes;
        for (int64_t t = 0; t < n; t++) {
            const float *x = in.plain + (index ? index[t] : t) * in.cols;
            Sum sums[kTogether];
            for (int64_t i = 0; i + kLanes <= w.cols; i += kLanes)
                for (int k = 0; k < kRegisters; k++) {
                    const F v = load(x + i + k * kWidth);
                    for (int r = 0; r < kTogether; r++)
                        sums[r].lane[k] =
                            fma(Format::load_some(rows[r] + (i + k * kWidth) * Format::kBytes), v, sums[r].lane[k]);
                }
            for (int r = 0; r < kTogether && row + r < last; r++) {
                if (w.cols % kLanes)
                    sums[r].tail(w.cols, [&](int64_t i, float lane) {
                        return __builtin_fmaf(Format::one(rows[r] + i * Format::kBytes), x[i], lane);
                    });
                out[t * stride + row - first + r] = sums[r].fold();
            }
        }
    }
}

void product(const Weights &w, int64_t first, int64_t last, const Inputs &in, const int32_t *index, int64_t n,
             float *out, int64_t stride) {
    switch (w.type) {
    case SPARK_F32: return float_product_of<F32>(w, first, last, in, index, n, out, stride);
    case SPARK_F16: return float_product_of<F16>(w, first, last, in, index, n, out, stride);
    case SPARK_BF16: return float_product_of<BF16>(w, first, last, in, index, n, out, stride);
    case SPARK_Q4_0: return product_of<Q4_0>(w, first, last, in, index, n, out, stride);
    case SPARK_Q8_0: return product_of<Q8_0>(w, first, last, in, index, n, out, stride);
    case SPARK_Q4_K: return product_of<Q4_K>(w, first, last, in, index, n, out, stride);
    case SPARK_Q5_K: return product_of<Q5_K>(w, first, last, in, index, n, out, stride);
    case SPARK_Q6_K: return product_of<Q6_K>(w, first, last, in, index, n, out, stride);
    case SPARK_IQ4_XS: return product_of<IQ4_XS>(w, first, last, in, index, n, out, stride);
    }
}

} // namespace

// Rows of a weight matrix against activation rows. Twin: product of engine/ops/arithmetic.py.
//
// A panel of weights is unpacked once and meets up to kTile activation rows, whose float lanes wait in
// memory (first-level cache) in between. A row's bits do not depend on how many rows share the call.
#pragma once

#include "grid_formats.h"
#if defined(__AVX512BW__)
#include "single_avx512.h"
#endif

namespace {

using spark::Inputs;
using spark::kSuper;
using spark::Weights;

constexpr int64_t kTile = 32;
constexpr int64_t kTileBytes = 24 * 1024;  // of activations, half of a first-level cache
constexpr int64_t kAheadBytes = 16 * 1024; // of weights that are prefetched

// Interleaved rows defeat the processor's own prefetching. Into the second-level cache: aimed at the first,
// prefetches use up its few outstanding misses and halve the speed (docs/kernels.md).
inline void prefetch(const uint8_t *p, size_t n) {
    for (size_t b = 0; b < n; b += 64)
        __builtin_prefetch(p + b, 0, 2);
}

// What is to be prefetched while four rows from `row` on are multiplied: rows that follow, of first .. last, or what is
// read after them (`then`); nullptr where that is not known.
inline const uint8_t *ahead_of(const Weights &w, int64_t first, int64_t row, int64_t last) {
    const int64_t whole = (last - first + 3) / 4 * 4, n = least((kAheadBytes / w.row_bytes + 4) / 4 * 4, whole);
    if (row + n < last)
        return w.data + (row + n) * w.row_bytes;
    const int64_t over = row + n - first - whole;
    return w.then ? w.then + (over > 0 ? over : 0) * w.row_bytes : nullptr;
}

// Lane 8c + 2g + p of a row's sum is lane g of its group in lanes[c].acc[p]; c counts panels modulo 4. The
// first two steps of the tree are over c; a lane without terms is +0 and takes part.
inline void fold_panels(const Lanes (&lanes)[4], int64_t used, F (&v)[2]) {
    const F zero = splat(0.0f);
    for (int p = 0; p < 2; p++) {
        const F even = lanes[0].acc[p] + (used > 2 ? lanes[2].acc[p] : zero);
        const F odd = (used > 1 ? lanes[1].acc[p] : zero) + (used > 3 ? lanes[3].acc[p] : zero);
        v[p] = even + odd;
    }
}

// The last three, of four activation rows at once: group r of the result has row r's four sums.
inline F fold_blocks(const F (&v)[4][2]) {
    F half[2];
    for (int p = 0; p < 2; p++) {
        const F a = low_pairs(v[0][p], v[1][p]) + high_pairs(v[0][p], v[1][p]);
        const F b = low_pairs(v[2][p], v[3][p]) + high_pairs(v[2][p], v[3][p]);
        half[p] = evens(a, b) + odds(a, b);
    }
    return half[0] + half[1];
}

// The blocks of a row past its last whole panel, `n_blocks` of eight: which float lanes of a panel they are.
struct LastBlocks {
    B there[2], absent[2];

    explicit LastBlocks(int64_t n_blocks) {
        for (int p = 0; p < 2; p++) {
            const auto mask = [&](int g) { return 2 * g + p < n_blocks ? -1 : 0; };
            there[p] = group_constant(mask(0), mask(1), mask(2), mask(3));
            absent[p] = group_constant(~mask(0), ~mask(1), ~mask(2), ~mask(3));
        }
    }
    // Multiplies a whole panel, which has anything behind these blocks; the other lanes stay as they are, even if -0.
    template <class Format> void multiply(const Format &panel, const Activations &a, Lanes &lanes) const {
        Lanes sums = lanes;
        panel.multiply(a, sums);
        for (int p = 0; p < 2; p++)
            lanes.acc[p] = byte_floats(or_bytes(and_bytes(float_bytes(sums.acc[p]), there[p]),
                                                and_bytes(float_bytes(lanes.acc[p]), absent[p])));
    }
};

// The terms of the last blocks, `n_bytes` at `offset` of each row, of panel s. It is loaded as a whole one: what lies
// behind a row's end is of the next row, and the last rows, where `end` comes first, are copied. A function of its own,
// so that the loop over whole panels has the one inlined load.
template <class Format>
[[gnu::noinline]] void add_last_blocks(const LastBlocks &last, const uint8_t *const *rows, size_t offset, size_t n_bytes,
                                       const uint8_t *end, const Activations *const *a, int64_t s, int64_t n,
                                       Lanes (*lanes)[4]) {
    constexpr size_t kPanelBytes = size_t(Format::kBytes) * kSuper / Format::kElements;
    uint8_t copies[kRows][kPanelBytes];
    const uint8_t *copied[kRows];
    if (rows[kRows - 1] + offset + kPanelBytes > end) {
        for (int r = 0; r < kRows; r++)
            copied[r] = static_cast<uint8_t *>(std::memcpy(copies[r], rows[r] + offset, n_bytes));
        rows = copied, offset = 0;
    }
    Format panel;
    panel.load(rows, offset);
    for (int64_t t = 0; t < n; t++)
        last.multiply(panel, a[t][s], lanes[t][s % 4]);
}

template <class Format>
void product_of(const Weights &w, int64_t first, int64_t last, const Inputs &in, const int32_t *index, int64_t n,
                float *out, int64_t stride) {
    constexpr size_t kPanelBytes = size_t(Format::kBytes) * kSuper / Format::kElements;
    const int64_t panels = w.cols / kSuper, used = least(4, in.supers);
    const LastBlocks last_blocks(w.cols % kSuper / 32);
    const F scale = splat(w.scale);
    const int64_t last_bytes = w.row_bytes - panels * int64_t(kPanelBytes);
    const uint8_t *const end = w.data + w.rows * w.row_bytes;
    const int64_t fits = kTileBytes / (in.supers * int64_t(sizeof(Activations))) / 4 * 4;
    const int64_t tile = fits < 8 ? 8 : least(fits, kTile);
    Lanes lanes[kTile][4];
    for (int64_t start = 0; start < n; start += tile) {
        const int64_t some = least(tile, n - start);
        const Activations *a[kTile];
        for (int64_t t = 0; t < some; t++)
            a[t] = in.quantized + (index ? index[start + t] : start + t) * in.supers;
        for (int64_t row = first; row < last; row += kRows) {
            const uint8_t *rows[kRows]; // past the end: the last row again
            for (int r = 0; r < kRows; r++)
                rows[r] = w.data + least(row + r, last - 1) * w.row_bytes;
            const uint8_t *const ahead = start ? nullptr : ahead_of(w, first, row, last);
            for (int64_t t = 0; t < some; t++)
                for (int64_t c = 0; c < used; c++)
                    lanes[t][c].acc[0] = lanes[t][c].acc[1] = splat(0.0f);
            for (int64_t s = 0; s < panels; s++) {
                if (ahead)
                    prefetch(ahead + s * kRows * kPanelBytes, kRows * kPanelBytes);
                Format panel;
                panel.load(rows, s * kPanelBytes);
                for (int64_t t = 0; t < some; t++)
                    panel.multiply(a[t][s], lanes[t][s % 4]);
            }
            if constexpr (Format::kElements < kSuper)
                if (last_bytes) {
                    if (ahead)
                        prefetch(ahead + panels * kRows * kPanelBytes, kRows * last_bytes);
                    add_last_blocks<Format>(last_blocks, rows, panels * kPanelBytes, last_bytes, end, a, panels, some, lanes);
                }
            const int live = int(least(kRows, last - row));
            for (int64_t t = 0; t < some; t += 4) {
                F v[4][2];
                for (int k = 0; k < 4; k++)
                    fold_panels(lanes[least(t + k, some - 1)], used, v[k]);
                alignas(64) float sums[kWidth];
                store(sums, fold_blocks(v) * scale);
                for (int k = 0; k < 4 && t + k < some; k++)
                    for (int r = 0; r < live; r++)
                        out[(start + t + k) * stride + row - first + r] = sums[4 * r + k];
            }
        }
    }
}

#if defined(__AVX512BW__)
constexpr int64_t kMostSpread = 64; // panels of a row, whose spread activations fit in a second-level cache

// One activation row; 16 weight rows at a time, so that one fold serves four groups of four.
template <class Single>
void product_of_one(const Weights &w, int64_t first, int64_t last, const Activations *a, float *out) {
    constexpr size_t kPanelBytes = size_t(Single::kBytes) * kSuper / Single::kElements;
    const int64_t panels = w.cols / kSuper;
    const F scale = splat(w.scale);
    Spread spread[kMostSpread];
    for (int64_t s = 0; s < panels; s++)
        Single::prepare(a[s], spread[s]);
    for (int64_t row = first; row < last; row += 16) {
        F v[4][2];
        for (int64_t k = 0; k < 4; k++) {
            const uint8_t *rows[4];
            for (int r = 0; r < 4; r++)
                rows[r] = w.data + least(row + 4 * k + r, last - 1) * w.row_bytes;
            const uint8_t *const ahead = row + 4 * k < last ? ahead_of(w, first, row + 4 * k, last) : nullptr;
            Lanes lanes[4];
            for (Lanes &l : lanes)
                l.acc[0] = l.acc[1] = splat(0.0f);
            for (int64_t s = 0; s < panels; s++) {
                if (ahead)
                    prefetch(ahead + s * 4 * kPanelBytes, 4 * kPanelBytes);
                Single panel;
                panel.add(rows, s * kPanelBytes, a[s], spread[s], lanes[s % 4]);
            }
            fold_panels(lanes, least(4, panels), v[k]);
        }
        alignas(64) float sums[kWidth];
        store(sums, fold_blocks(v) * scale);
        for (int64_t i = 0; i < 16 && row + i < last; i++)
            out[row - first + i] = sums[4 * (i % 4) + i / 4];
    }
}

// Whether the format has a variant for one row, which then ran.
template <class Format>
bool product_with_one(const Weights &w, int64_t first, int64_t last, const Activations *a, float *out) {
    if constexpr (Single<Format>::kExists)
        product_of_one<Single<Format>>(w, first, last, a, out);
    return Single<Format>::kExists;
}
#endif

struct F32 : Record<SPARK_F32> {
    static F load_some(const uint8_t *p) { return load(reinterpret_cast<const float *>(p)); }
    static float one(const uint8_t *p) {
        float f;
        std::memcpy(&f, p, 4);
        return f;
    }
};
struct F16 : Record<SPARK_F16> {
    static F load_some(const uint8_t *p) { return load_half(p); }
    static float one(const uint8_t *p) { return half_to_float(load_u16(p)); }
};
struct BF16 : Record<SPARK_BF16> {
    static F load_some(const uint8_t *p) { return load_bf16(p); }
    static float one(const uint8_t *p) { return bf16_to_float(load_u16(p)); }
};

template <class Format>
void float_product_of(const Weights &w, int64_t first, int64_t last, const Inputs &in, const int32_t *index, int64_t n,
                      float *out, int64_t stride) {
    const float scale = w.scale; // `out` might be it, as far as the compiler sees
    constexpr int kTogether = 4; // rows: independent chains of fma
    for (int64_t row = first; row < last; row += kTogether) {
        const uint8_t *rows[kTogether];
        for (int r = 0; r < kTogether; r++)
            rows[r] = w.data + least(row + r, last - 1) * w.row_bytes;
        const int64_t rows_ahead = (kAheadBytes / w.row_bytes + kTogether) / kTogether * kTogether;
        const uint8_t *ahead = rows[0] + rows_ahead * w.row_bytes;
        for (int64_t t = 0; t < n; t++) {
            const float *x = in.plain + (index ? index[t] : t) * in.cols;
            const bool reads_ahead = t == 0 && row + rows_ahead < last;
            Sum sums[kTogether];
            for (int64_t i = 0; i + kLanes <= w.cols; i += kLanes) {
                if (reads_ahead)
                    prefetch(ahead + kTogether * i * Format::kBytes, kTogether * kLanes * Format::kBytes);
                for (int k = 0; k < kRegisters; k++) {
                    const F v = load(x + i + k * kWidth);
                    for (int r = 0; r < kTogether; r++)
                        sums[r].lane[k] =
                            fma(Format::load_some(rows[r] + (i + k * kWidth) * Format::kBytes), v, sums[r].lane[k]);
                }
            }
            for (int r = 0; r < kTogether && row + r < last; r++) {
                if (w.cols % kLanes)
                    sums[r].tail(w.cols, [&](int64_t i, float lane) {
                        return __builtin_fmaf(Format::one(rows[r] + i * Format::kBytes), x[i], lane);
                    });
                out[t * stride + row - first + r] = sums[r].fold() * scale;
            }
        }
    }
}

template <class Format, int64_t type>
void product_with(const Weights &w, int64_t first, int64_t last, const Inputs &in, const int32_t *index, int64_t n,
                  float *out, int64_t stride) {
    static_assert(Format::kType == type, "a format of this name has another type's record");
    if constexpr (spark::is_float(type))
        float_product_of<Format>(w, first, last, in, index, n, out, stride);
    else
        product_of<Format>(w, first, last, in, index, n, out, stride);
}

// A case for each record of block_types.h: one without a format of its name does not compile.
void product(const Weights &w, int64_t first, int64_t last, const Inputs &in, const int32_t *index, int64_t n,
             float *out, int64_t stride) {
#if defined(__AVX512BW__)
    if (n == 1 && w.cols % kSuper == 0 && in.supers <= kMostSpread) {
        const Activations *a = in.quantized + (index ? *index : 0) * in.supers;
        switch (w.type) {
#define SPARK_CASE(name, ...)                                                                                          \
    case SPARK_##name:                                                                                                 \
        if (product_with_one<name>(w, first, last, a, out))                                                              \
            return;                                                                                                    \
        break;
            BLOCK_TYPES(SPARK_CASE)
#undef SPARK_CASE
        }
    }
#endif
    switch (w.type) {
#define SPARK_CASE(name, ...)                                                                                          \
    case SPARK_##name: return product_with<name, SPARK_##name>(w, first, last, in, index, n, out, stride);
        BLOCK_TYPES(SPARK_CASE)
#undef SPARK_CASE
    }
    spark::no_such_type(w.type);
}

} // namespace

// Sketches of blocks of keys, and which blocks a row reads by them. Twins: summarize and choose of
// engine/ops/reference.py, sketch and key_scores of engine/ops/sketches.py (docs/arithmetic.md, "Recall").
#pragma once

#include <algorithm>

#include "attention.h"

namespace {

using spark::RecallRow;
using spark::SketchLayout;

constexpr int64_t kMostKept = spark::kMaxHeadDim / 2;
constexpr uint16_t kNaNHalf = 0x7e00;

// The largest `bound` for which at least `most` of n scores, -1 where a block is no candidate, are no less.
inline int32_t nth_largest(const int32_t *score, int64_t n, int64_t most) {
    int32_t bound = 0;
    for (int32_t bit = 1 << 30; bit; bit >>= 1) {
        int64_t above = 0;
        for (int64_t b = 0; b < n; b++)
            above += score[b] >= (bound | bit);
        if (above >= most)
            bound |= bit;
    }
    return bound;
}

// The sketch of a KV head's keys in a full block.
void summarize(const spark_kv &kv, int64_t place, int64_t kv_head, uint8_t *sketch) {
    const int64_t n = kv.head_dim;
    const SketchLayout at(n);
    float key[spark::kMaxHeadDim], least[spark::kMaxHeadDim], most[spark::kMaxHeadDim], sum[spark::kMaxHeadDim];
    float spoiled[spark::kMaxHeadDim]; // 0, or NaN where some key is not finite
    auto *const base = reinterpret_cast<uint16_t *>(sketch + at.base), *const step = reinterpret_cast<uint16_t *>(sketch + at.step);
    auto *const codes = reinterpret_cast<uint32_t *>(sketch), *const mask = reinterpret_cast<uint32_t *>(sketch + at.mask);
    std::memset(sketch, 0, at.bytes);
    std::memset(sum, 0, sizeof sum);
    std::memset(spoiled, 0, sizeof spoiled);
    with_rows(kv.k_type, kv.k, kv.k_scale, n, [&](const auto &of) {
        const auto load_key = [&](int64_t j) { load_value(of((place * kKVBlock + j) * kv.n_head_kv + kv_head), n, key); };
        load_key(0);
        std::memcpy(least, key, n * sizeof(float));
        std::memcpy(most, key, n * sizeof(float));
        for (int64_t j = 0; j < kKVBlock; j++) {
            load_key(j);
            for (int64_t c = 0; c < n; c++) {
                const float k = key[c];
                least[c] = k < least[c] ? k : least[c];
                most[c] = k > most[c] ? k : most[c];
                spoiled[c] = spoiled[c] + (k - k);
                sum[c] = sum[c] + k;
            }
        }
        int32_t spread[spark::kMaxHeadDim];
        for (int64_t c = 0; c < n; c++) {
            least[c] += 0.0f, most[c] += 0.0f; // no -0
            spread[c] = spoiled[c] == 0.0f ? int32_t(float_to_bits(most[c] - least[c])) : 0x7fc00000;
            base[c] = spoiled[c] == 0.0f ? float_to_half(sum[c] * (1.0f / kKVBlock)) : kNaNHalf;
        }
        const int32_t bound = nth_largest(spread, n, at.kept);
        int64_t ties = at.kept, r = 0; // that are kept, the lower channels first
        for (int64_t c = 0; c < n; c++)
            ties -= spread[c] > bound;
        int64_t channel[kMostKept];
        float from[kMostKept], steps_in_one[kMostKept];
        for (int64_t c = 0; c < n; c++) {
            if (spread[c] < bound || (spread[c] == bound && ties-- <= 0))
                continue;
            mask[c / 32] |= 1u << c % 32;
            if (spoiled[c] == 0.0f)
                base[c] = float_to_half(least[c]);
            step[r] = spoiled[c] == 0.0f ? float_to_half((most[c] - least[c]) / 3.0f) : kNaNHalf;
            channel[r] = c, from[r] = half_to_float(base[c]), steps_in_one[r] = 1.0f / half_to_float(step[r]);
            r++;
        }
        for (int64_t j = 0; j < kKVBlock; j++) {
            load_key(j);
            uint32_t bytes[kMostKept / 4] = {}; // a code in each
            auto *const code = reinterpret_cast<uint8_t *>(bytes);
            for (r = 0; r < at.kept; r++)
                sum[r] = key[channel[r]];
            for (r = 0; r < at.kept; r++) {
                const float v = (sum[r] - from[r]) * steps_in_one[r]; // rounded to even below; a NaN counts nothing
                code[r] = uint8_t((v > 0.5f) + (v >= 1.5f) + (v > 2.5f));
            }
            for (int64_t word = 0; word < at.words; word++) {
                const uint32_t *const four = bytes + 4 * word;
                codes[word * kKVBlock + j] = four[0] | four[1] << 2 | four[2] << 4 | four[3] << 6;
            }
        }
    });
}

constexpr int64_t kChunk = 8; // blocks whose masses are summed together

inline float dot_half(const float *x, const uint16_t *y, int64_t n) {
    Sum s;
    for (int64_t i = 0; i + kLanes <= n; i += kLanes)
        for (int r = 0; r < kRegisters; r++)
            s.lane[r] = fma(load(x + i + r * kWidth), load_half(y + i + r * kWidth), s.lane[r]);
    if (n % kLanes)
        s.tail(n, [&](int64_t i, float lane) { return __builtin_fmaf(x[i], half_to_float(y[i]), lane); });
    return s.fold();
}

// What all queries take of a sketch: the kept channels in order, and their steps.
struct Kept {
    int64_t channel[kMostKept];
    float step[kMostKept];

    Kept(const uint8_t *sketch, const SketchLayout &at) {
        const auto *const mask = reinterpret_cast<const uint32_t *>(sketch + at.mask);
        const auto *const steps = reinterpret_cast<const uint16_t *>(sketch + at.step);
        int64_t r = 0;
        for (int64_t word = 0; word < (at.base - at.mask) / 4; word++)
            for (uint32_t bits = mask[word]; bits && r < at.kept; bits &= bits - 1)
                channel[r++] = 32 * word + __builtin_ctz(bits);
        for (r = 0; r < at.kept; r++)
            step[r] = half_to_float(steps[r]);
    }
};

// A query's products with the steps of a sketch in 8 bits, four of them in each group of 16 bytes; returns their scale.
inline float quantize_steps(const float *q, const Kept &kept, const SketchLayout &at, int8_t (*to)[16]) {
    alignas(64) float x[kMostKept];
    alignas(64) int8_t small[kMostKept];
    const int64_t n = 16 * at.words;
    for (int64_t r = 0; r < n; r++)
        x[r] = r < at.kept ? q[kept.channel[r]] * kept.step[r] : 0.0f;
    I top = zero_ints();
    for (int64_t r = 0; r < n; r += kWidth)
        top = max_ints(top, magnitude_bits(load(x + r)));
    const uint32_t bits = uint32_t(largest(top));
    const float amax = bits_to_float(bits);
    if (bits >= 0x7f800000 || amax < 0x1p-100f) {
        std::memset(to, 0, 4 * n);
        return bits >= 0x7f800000 ? bits_to_float(0x7fc00000) : 0.0f;
    }
    const F inverse = splat(127.0f / amax);
    for (int64_t r = 0; r < n; r += kWidth)
        store_rounded(small + r, load(x + r) * inverse);
    for (int64_t r = 0; r < n; r += 4)
        for (int i = 0; i < 4; i++)
            std::memcpy(to[r / 4] + 4 * i, small + r, 4);
    return amax / 127.0f;
}

// The largest score that a query has with a block's keys as sketched, and the sum of exponentials beside it.
inline float mass_of(const float *q, int64_t n, const uint8_t *sketch, const SketchLayout &at, const Kept &kept, float scale,
                     float *top) {
    alignas(64) int8_t small[kMostKept / 4][16];
    const float unit = quantize_steps(q, kept, at, small);
    const float rest = dot_half(q, reinterpret_cast<const uint16_t *>(sketch + at.base), n);
    const auto *const codes = reinterpret_cast<const float *>(sketch);
    constexpr int registers = kKVBlock / kWidth;
    I sums[registers], most = splat_int(INT32_MIN);
    for (int k = 0; k < registers; k++) {
        I sum = zero_ints();
        for (int64_t word = 0; word < at.words; word++) {
            const B packed = float_bytes(load(codes + word * kKVBlock + k * kWidth));
            const B code[4] = {
                and_bytes(packed, splat_byte(3)), and_bytes(shift_right_by(packed, splat_int(2)), splat_byte(3)),
                and_bytes(shift_right_by(packed, splat_int(4)), splat_byte(3)),
                and_bytes(shift_right_by(packed, splat_int(6)), splat_byte(3))};
            sum = dot<4, 4>(sum, code, small + 4 * word);
        }
        sums[k] = sum;
        most = max_ints(most, sum);
    }
    // Scores are ordered as their sums are, unless all are NaN, which is lost here and reaches the sum of exponentials.
    const float largest_score = __builtin_fmaf(unit, float(largest(most)), rest) * scale;
    *top = largest_score == largest_score ? largest_score : -__builtin_inff();
    Sum mass;
    for (int k = 0; k < registers; k++) {
        const F score = fma(splat(unit), to_float(sums[k]), splat(rest)) * splat(scale);
        F &lane = mass.lane[k % kRegisters];
        lane = lane + exp(score - splat(*top));
    }
    return mass.fold();
}

// How many of the best candidates are read, so that no query leaves more units of its mass than it may: all that have a
// score of `least` or more, the largest that will do, byte by byte. `row.left` has the sums of all masses; what followed
// the masses of blocks is not needed any more.
inline int64_t needed(const RecallRow &row) {
    const auto units = [&](int64_t h, int64_t b, float in_one) {
        const float share = row.mass[2 * h * row.width + b] * in_one;
        return share >= 1.0f ? 1 << 24 : share > 0.0f ? int32_t(share * 0x1p24f) : 0;
    };
    const auto below = [&](int64_t h) { return reinterpret_cast<int32_t *>(row.mass + (2 * h + 1) * row.width); };
    for (int64_t h = 0; h < row.heads; h++)
        *below(h) = 0;
    uint32_t least = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        const auto is_like = [&](int64_t b) {
            return row.score[b] >= 0 && (shift == 24 || uint32_t(row.score[b]) >> (shift + 8) == least >> (shift + 8));
        };
        const auto digit_of = [&](int64_t b) { return row.score[b] >> shift & 255; };
        int32_t digit = 255;
        for (int64_t h = 0; h < row.heads; h++) {
            const float in_one = 1.0f / row.left[2 * h + 1];
            int32_t counts[256] = {}, left = *below(h), most = 0;
            for (int64_t b = 0; b < row.behind; b++)
                if (is_like(b))
                    counts[digit_of(b)] += units(h, b, in_one);
            while (most < digit && left + counts[most] <= row.leave)
                left += counts[most++];
            digit = most;
        }
        for (int64_t h = 0; h < row.heads; h++) {
            const float in_one = 1.0f / row.left[2 * h + 1];
            for (int64_t b = 0; b < row.behind; b++)
                if (is_like(b) && digit_of(b) < digit)
                    *below(h) += units(h, b, in_one);
        }
        least |= uint32_t(digit) << shift;
    }
    const auto bound = int32_t(least < 0x7fc00000 ? least : 0x7fc00000);
    int64_t n = 0;
    for (int64_t b = 0; b < row.behind; b++)
        n += row.score[b] >= bound;
    return n;
}

void choose(const RecallRow &row) {
    const int64_t n = row.head_dim, behind = row.behind;
    int64_t candidates = 0;
    std::memset(row.chosen, 0, row.width);
    std::memset(row.chosen, 1, row.last + 1);
    const auto kept = [&](int64_t b) { return b == 0 || row.keep[b] || row.blocks[b] < 0; };
    for (int64_t b = 0; b < behind; b++)
        candidates += !kept(b);
    const bool all = row.most < 0 || !candidates || (row.leave < 0 && candidates <= row.most);
    *row.read = int32_t(row.last + 1);
    for (int64_t b = 0; b < behind && !all; b++)
        row.score[b] = kept(b) ? -1 : 0;
    const float nothing = -__builtin_inff();
    const int64_t n_chunks = (behind + kChunk - 1) / kChunk;
    for (int64_t h = 0; h < row.heads; h++)
        row.left[2 * h] = nothing, row.left[2 * h + 1] = 0.0f;
    if (all)
        return;
    const SketchLayout at(n);
    for (int64_t c = 0; c < n_chunks; c++) {
        const int64_t begin = c * kChunk, count = std::min(kChunk, behind - begin);
        for (int64_t i = 0; i < count; i++) {
            const int32_t block = row.blocks[begin + i];
            const uint8_t *const sketch = row.sketches + (block < 0 ? 0 : block) * row.block_bytes;
            const Kept kept(sketch, at);
            for (int64_t h = 0; h < row.heads; h++) {
                // There is room for the tops: behind is at most width - 4.
                float *const mass = row.mass + 2 * h * row.width, *const tops = mass + row.width + 2 * n_chunks;
                mass[begin + i] = 0.0f, tops[i] = nothing;
                if (block >= 0)
                    mass[begin + i] = mass_of(row.q + h * n, n, sketch, at, kept, row.scale, tops + i);
            }
        }
        for (int64_t h = 0; h < row.heads; h++) {
            float *const mass = row.mass + 2 * h * row.width, *const tops = mass + row.width + 2 * n_chunks, top = nothing;
            for (int64_t i = 0; i < count; i++)
                top = tops[i] > top ? tops[i] : top;
            exp_minus(tops, top, count, tops);
            for (int64_t i = 0; i < count; i++)
                mass[begin + i] = row.blocks[begin + i] < 0 ? 0.0f : mass[begin + i] * tops[i];
            mass[row.width + c] = top, mass[row.width + n_chunks + c] = sum32(mass + begin, count);
            row.left[2 * h] = top > row.left[2 * h] ? top : row.left[2 * h];
        }
    }
    for (int64_t h = 0; h < row.heads; h++) {
        float *const mass = row.mass + 2 * h * row.width, *const chunk_top = mass + row.width, *const chunk_sum = chunk_top + n_chunks;
        const float top = row.left[2 * h];
        for (int64_t c = 0; c < n_chunks; c++) {
            float factor = 0.0f;
            if (chunk_top[c] != nothing)
                exp_minus(chunk_top + c, top, 1, &factor);
            chunk_sum[c] *= factor;
            for (int64_t b = c * kChunk; b < std::min(behind, (c + 1) * kChunk); b++)
                mass[b] *= factor;
        }
        const float total = sum32(chunk_sum, n_chunks), in_one = 1.0f / total;
        for (int64_t b = 0; b < behind; b++) {
            const float share = mass[b] * in_one;
            const int32_t bits = share == share ? int32_t(float_to_bits(share)) : 0x7fc00000;
            row.score[b] = row.score[b] >= 0 && bits > row.score[b] ? bits : row.score[b];
        }
        row.left[2 * h + 1] = total;
    }
    int64_t wanted = std::min(row.most, candidates);
    if (row.leave >= 0)
        wanted = std::min(wanted, needed(row));
    *row.read -= int32_t(candidates - wanted);
    const int32_t bound = wanted ? nth_largest(row.score, behind, wanted) : INT32_MAX;
    int64_t ties = wanted; // that are read, the lower blocks first
    for (int64_t b = 0; b < behind; b++)
        ties -= row.score[b] > bound;
    for (int64_t b = 0; b < behind; b++)
        if (row.score[b] >= 0 && row.score[b] <= bound)
            row.chosen[b] = row.score[b] == bound && ties-- > 0;
    for (int64_t h = 0; h < row.heads; h++) {
        if (wanted == candidates) {
            row.left[2 * h] = nothing, row.left[2 * h + 1] = 0.0f;
            continue;
        }
        float *mass = row.mass + 2 * h * row.width;
        int64_t n_read = 0;
        for (int64_t b = 0; b < behind; b++)
            if (row.chosen[b])
                mass[n_read++] = mass[b];
        const float rest = row.left[2 * h + 1] - sum32(mass, n_read);
        row.left[2 * h + 1] = rest < 0.0f ? 0.0f : rest;
    }
}

} // namespace

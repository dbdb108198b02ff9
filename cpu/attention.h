// Attention of a few queries that share a KV head. Twin: attention of engine/ops/reference.py.
//
// Each block of 64 positions is converted to float once for all queries of the tile, keys transposed:
// a score is a sum over 32 lanes of the head dimension, and with one key a register lane the lanes are
// registers and their tree is vertical adds. Scratch: keys [width][64], values [64][width], then for each
// query o [width], its maximum and its total; width is the head dimension padded to 16. A window's first block
// is walked from its first position on.
#pragma once

#include "math.h"

namespace {

using spark::AttentionTile;
using spark::kKVBlock;

struct HalfRow { // a row of an f16 cache
    const uint16_t *value;
    F some(int64_t i) const { return load_half(value + i); }
    float one(int64_t i) const { return half_to_float(value[i]); }
};

struct ByteRow { // a row of a q8_0 cache
    const int8_t *value;
    const uint16_t *scale;
    F some(int64_t i) const { return load_int8(value + i) * splat(half_to_float(scale[i / kBlock])); }
    float one(int64_t i) const { return float(value[i]) * half_to_float(scale[i / kBlock]); }
};

struct NibbleRow { // a row of a q4_0 cache; byte j of a block has dimension j below and 16 + j above
    const uint8_t *value;
    const uint16_t *scale;
    F some(int64_t i) const { // i a multiple of kWidth
        const F q = i % kBlock < kBlock / 2 ? load_nibbles<0>(byte(i)) : load_nibbles<4>(byte(i));
        return q * splat(half_to_float(scale[i / kBlock]));
    }
    float one(int64_t i) const {
        const int q = (*byte(i) >> (i % kBlock < kBlock / 2 ? 0 : 4) & 15) - 8;
        return float(q) * half_to_float(scale[i / kBlock]);
    }
    const uint8_t *byte(int64_t i) const { return value + i / kBlock * (kBlock / 2) + i % (kBlock / 2); }
};

inline HalfRow half_row(const void *values, int64_t row, int64_t n) {
    return {static_cast<const uint16_t *>(values) + row * n};
}

inline ByteRow byte_row(const void *values, const uint16_t *scales, int64_t row, int64_t n) {
    return {static_cast<const int8_t *>(values) + row * n, scales + row * (n / kBlock)};
}

inline NibbleRow nibble_row(const void *values, const uint16_t *scales, int64_t row, int64_t n) {
    return {static_cast<const uint8_t *>(values) + row * (n / 2), scales + row * (n / kBlock)};
}

// `use` with what makes a row of keys, or of values, of its number.
template <class Use>
void with_rows(int64_t type, const void *values, const uint16_t *scales, int64_t n, const Use &use) {
    if (type == SPARK_KV_F16)
        use([=](int64_t row) { return half_row(values, row, n); });
    else if (type == SPARK_KV_Q8_0)
        use([=](int64_t row) { return byte_row(values, scales, row, n); });
    else
        use([=](int64_t row) { return nibble_row(values, scales, row, n); });
}

template <class Row> void load_value(Row row, int64_t n, float *to) {
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth)
        store(to + i, row.some(i));
    for (; i < n; i++)
        to[i] = row.one(i);
}

// kWidth keys as columns: to[i * 64 + k] = row(k)[i].
template <class Rows> void load_keys(Rows row, int64_t n, float *to) {
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) {
        B columns[4][kRows]; // [d][quad of keys]; group r is dimension 4r + d
        for (int quad = 0; quad < kRows; quad++) {
            B in[4], out[4];
            for (int k = 0; k < 4; k++)
                in[k] = float_bytes(row(4 * quad + k).some(i));
            transpose(in, out);
            for (int d = 0; d < 4; d++)
                columns[d][quad] = out[d];
        }
        for (int d = 0; d < 4; d++) {
            transpose_groups(columns[d]);
            for (int r = 0; r < kRows; r++)
                store(to + (i + 4 * r + d) * kKVBlock, byte_floats(columns[d][r]));
        }
    }
    for (; i < n; i++)
        for (int k = 0; k < kWidth; k++)
            to[i * kKVBlock + k] = row(k).one(i);
}

constexpr int kColumns = kWidth > 8 ? 2 : 1; // registers of keys that a tree takes at a time
constexpr int kPair = 2;                     // queries that share the loads of keys

struct Scores {
    F v[kPair][kColumns];
};

// The tree's node over lanes j, j + o, j + 2o, ... of q . k; scores<1>(0) is the whole sum. `fixed` is n, or 0
// where it is not a common size.
template <int o, int fixed>
inline Scores scores(const float *const (&q)[kPair], const float *keys, int64_t n, int64_t j) {
    Scores s;
    if constexpr (o == kLanes) {
        for (auto &of_query : s.v)
            for (F &v : of_query)
                v = splat(0.0f);
        const int64_t end = fixed ? fixed : n;
        for (int64_t i = j; i < end; i += kLanes)
            for (int c = 0; c < kColumns; c++) {
                F k = load(keys + i * kKVBlock + c * kWidth);
                keep(k); // one load for both queries
                for (int a = 0; a < kPair; a++)
                    s.v[a][c] = fma(splat(q[a][i]), k, s.v[a][c]);
            }
    } else {
        s = scores<2 * o, fixed>(q, keys, n, j);
        const Scores other = scores<2 * o, fixed>(q, keys, n, j + o);
        for (int a = 0; a < kPair; a++)
            for (int c = 0; c < kColumns; c++) {
                s.v[a][c] = s.v[a][c] + other.v[a][c];
                keep(s.v[a][c]); // a compiler that puts all adds at the end runs out of registers
            }
    }
    return s;
}

template <int fixed>
void score_pair(const float *const (&q)[kPair], const float *keys, int64_t n, int64_t first, int64_t valid,
                float scale, float *p0, float *p1) {
    for (int64_t j = first / (kColumns * kWidth) * (kColumns * kWidth); j < valid; j += kColumns * kWidth) {
        // Keeps the broadcasts of q in the instructions that use them: hoisted, 2n registers would spill.
        asm volatile("" ::: "memory");
        const Scores s = scores<1, fixed>(q, keys + j, n, 0);
        for (int c = 0; c < kColumns; c++) {
            store(p0 + j + c * kWidth, s.v[0][c] * splat(scale));
            store(p1 + j + c * kWidth, s.v[1][c] * splat(scale));
        }
    }
}

constexpr int kQueries = 4; // that share the loads of values

// State of a query: o [width], then its maximum and its total.
template <int queries, int registers>
inline void add_values(const float (*p)[kKVBlock], const float *alpha, const float *values, int64_t width,
                       int64_t first, int64_t valid, float *const *o, int64_t i) {
    F acc[queries][registers];
    for (int a = 0; a < queries; a++)
        for (int k = 0; k < registers; k++)
            acc[a][k] = load(o[a] + i + k * kWidth) * splat(alpha[a]);
    for (int64_t j = first; j < valid; j++)
        for (int k = 0; k < registers; k++) {
            const F v = load(values + j * width + i + k * kWidth);
            for (int a = 0; a < queries; a++)
                acc[a][k] = fma(splat(p[a][j]), v, acc[a][k]);
        }
    for (int a = 0; a < queries; a++)
        for (int k = 0; k < registers; k++)
            store(o[a] + i + k * kWidth, acc[a][k]);
}

// Up to kQueries query heads of one token against the positions [first, valid) of a loaded block.
template <int fixed>
void attend_block(const float *const *q, int queries, const float *keys, const float *values, int64_t n,
                  int64_t width, int64_t first, int64_t valid, float scale, float *const *o) {
    alignas(64) float p[kQueries][kKVBlock];
    float alpha[kQueries];
    for (int a = 0; a < queries; a += kPair) {
        const float *const pair[kPair] = {q[a], q[a + 1 < queries ? a + 1 : a]};
        score_pair<fixed>(pair, keys, n, first, valid, scale, p[a], p[a + 1]);
    }
    for (int a = 0; a < queries; a++) {
        for (int64_t j = 0; j < first; j++)
            p[a][j] = -__builtin_inff(); // its exp is +0, which changes neither sums nor values
        for (int64_t j = valid; j < kKVBlock; j++)
            p[a][j] = -__builtin_inff();
        F tops = splat(o[a][width]);
        for (int j = 0; j < kKVBlock; j += kWidth)
            tops = max_of(tops, load(p[a] + j));
        const float top = largest(tops); // a NaN may be lost here; it reaches the result through p
        exp_minus(o[a] + width, top, 1, &alpha[a]);
        o[a][width] = top;
        Sum sum;
        for (int j = 0; j < kKVBlock; j += kWidth) {
            const F e = exp(load(p[a] + j) - splat(top));
            store(p[a] + j, e);
            F &lane = sum.lane[j % kLanes / kWidth];
            lane = lane + e;
        }
        o[a][width + 1] = __builtin_fmaf(o[a][width + 1], alpha[a], sum.fold());
    }
    constexpr int registers = kWidth > 8 ? 4 : 2;
    int64_t i = 0;
    if (queries == kQueries) {
        for (; i + registers * kWidth <= width; i += registers * kWidth)
            add_values<kQueries, registers>(p, alpha, values, width, first, valid, o, i);
        for (; i < width; i += kWidth)
            add_values<kQueries, 1>(p, alpha, values, width, first, valid, o, i);
    } else {
        for (int a = 0; a < queries; a++) {
            for (i = 0; i + registers * kWidth <= width; i += registers * kWidth)
                add_values<1, registers>(p + a, alpha + a, values, width, first, valid, o + a, i);
            for (; i < width; i += kWidth)
                add_values<1, 1>(p + a, alpha + a, values, width, first, valid, o + a, i);
        }
    }
}

// Float copies of `filled` positions of a block, from slot `base` on: keys [width][64], values [64][width].
void load_block(const spark_kv &kv, int64_t base, int64_t kv_head, int64_t filled, int64_t width, float *keys,
                float *values) {
    const int64_t n = kv.head_dim;
    const auto row = [&](int64_t j) { return (base + j) * kv.n_head_kv + kv_head; };
    with_rows(kv.k_type, kv.k, kv.k_scale, n, [&](const auto &of) {
        for (int64_t j = 0; j < filled; j += kWidth)
            load_keys([&](int64_t i) { return of(row(least(j + i, filled - 1))); }, n, keys + j);
    });
    with_rows(kv.v_type, kv.v, kv.v_scale, n, [&](const auto &of) {
        for (int64_t j = 0; j < filled; j++)
            load_value(of(row(j)), n, values + j * width);
    });
}

// Whether the heads of a tile read a block for token t.
inline bool reads(const AttentionTile &tile, int64_t t, int64_t block) {
    return !tile.chosen || tile.chosen[(t * tile.kv->n_head_kv + tile.kv_head) * tile.max_blocks + block];
}

// The share of mass of what was not read, beside a maximum and a total of what was.
inline float missed(const float *left, const float *state) {
    if (left[1] == 0.0f)
        return 0.0f;
    float beside;
    exp_minus(left, state[0], 1, &beside);
    return 1.0f / (1.0f + state[1] / (left[1] * beside));
}

void attend(const AttentionTile &tile) {
    const spark_kv &kv = *tile.kv;
    const int64_t n = kv.head_dim, width = spark::padded(n, 16), heads = tile.last_head - tile.first_head;
    float *keys = tile.scratch, *values = keys + width * kKVBlock, *state = values + kKVBlock * width;
    const int64_t state_floats = width + 2, queries = heads * (tile.last_token - tile.first_token);
    for (int64_t s = 0; s < queries; s++) {
        float *o = state + s * state_floats;
        std::memset(o, 0, width * sizeof(float));
        o[width] = -__builtin_inff();
        o[width + 1] = 0.0f;
    }
    int64_t longest = 0, begin = tile.position[tile.first_token];
    for (int64_t t = tile.first_token; t < tile.last_token; t++) {
        longest = tile.position[t] + 1 > longest ? tile.position[t] + 1 : longest;
        begin = least(begin, spark::window_begin(tile.position[t], tile.window));
    }
    for (int64_t start = begin / kKVBlock * kKVBlock; start < longest; start += kKVBlock) {
        bool seen = !tile.window && !tile.chosen;
        for (int64_t t = tile.first_token; t < tile.last_token; t++)
            seen |= start <= tile.position[t] && spark::window_begin(tile.position[t], tile.window) < start + kKVBlock &&
                    reads(tile, t, start / kKVBlock);
        if (!seen)
            continue; // between the windows of two tokens, or chosen by none
        if (tile.table[start / kKVBlock] < 0)
            continue; // not there: as if masked
        const int64_t filled = least(kKVBlock, longest - start);
        const int64_t base = int64_t(tile.table[start / kKVBlock]) * kKVBlock;
        load_block(kv, base, tile.kv_head, filled, width, keys, values);
        const auto attend_heads = n == 64 ? attend_block<64> : n == 128 ? attend_block<128> : attend_block<0>;
        for (int64_t t = tile.first_token; t < tile.last_token; t++) {
            const int64_t valid = least(kKVBlock, tile.position[t] + 1 - start);
            int64_t first = spark::window_begin(tile.position[t], tile.window) - start;
            first = first > 0 ? first : 0;
            if (valid <= first || !reads(tile, t, start / kKVBlock))
                continue;
            for (int64_t h = tile.first_head; h < tile.last_head; h += kQueries) {
                const int queries = int(least(kQueries, tile.last_head - h));
                const float *q[kQueries];
                float *o[kQueries];
                for (int a = 0; a < queries; a++) {
                    q[a] = tile.q + (t * tile.n_head + h + a) * n;
                    o[a] = state + ((t - tile.first_token) * heads + h + a - tile.first_head) * state_floats;
                }
                attend_heads(q, queries, keys, values, n, width, first, valid, tile.scale, o);
            }
        }
    }
    for (int64_t t = tile.first_token; t < tile.last_token; t++)
        for (int64_t h = tile.first_head; h < tile.last_head; h++) {
            const float *o = state + ((t - tile.first_token) * heads + h - tile.first_head) * state_floats;
            const F total = splat(o[width + 1]);
            const int64_t head = t * tile.n_head + h;
            if (tile.chosen)
                tile.missed[head] = missed(tile.left + 2 * head, o + width);
            float *to = tile.out + head * n;
            if (!tile.gate) {
                each(n, [&](int64_t i, int some) { store_some(to + i, load(o + i) / total, some); });
                continue;
            }
            each(n, [&](int64_t i, int some) {
                const F x = tile.gate_by_head ? splat(tile.gate[head]) : load_some(tile.gate + head * n + i, some);
                store_some(to + i, load(o + i) / total * (tile.gate_kind == SPARK_GATE_SOFTPLUS ? softplus(x) : sigmoid(x)),
                           some);
            });
        }
}

} // namespace

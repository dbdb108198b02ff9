// Attention of a few queries that share a KV head. Twin: attention of engine/ops/reference.py.
//
// Each block of 64 positions is converted to float once for all queries of the tile, keys transposed:
// a score is a sum over 32 lanes of the head dimension, and with one key a register lane the lanes are
// registers and their tree is vertical adds. Scratch: keys [width][64], values [64][width], then for each
// query o [width], its maximum and its total; width is the head dimension padded to 16.
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

inline HalfRow half_row(const void *values, int64_t row, int64_t n) {
    return {static_cast<const uint16_t *>(values) + row * n};
}

inline ByteRow byte_row(const void *values, const uint16_t *scales, int64_t row, int64_t n) {
    return {static_cast<const int8_t *>(values) + row * n, scales + row * (n / kBlock)};
}

template <class Row> void load_value(Row row, int64_t n, float *to) {
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth)
        store(to + i, row.some(i));
    for (; i < n; i++)
        to[i] = row.one(i);
}

// Four keys as columns: to[i * 64 + k] = rows[k][i].
template <class Row> void load_keys(const Row (&rows)[4], int64_t n, float *to) {
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) {
        B in[4], out[4];
        for (int k = 0; k < 4; k++)
            in[k] = float_bytes(rows[k].some(i));
        transpose(in, out);
        for (int d = 0; d < 4; d++)
            for (int r = 0; r < kRows; r++)
                store_group(to + (i + 4 * r + d) * kKVBlock, byte_floats(out[d]), r);
    }
    for (; i < n; i++)
        for (int k = 0; k < 4; k++)
            to[i * kKVBlock + k] = rows[k].one(i);
}

constexpr int kColumns = 2; // registers of keys that a score takes at a time

struct Columns {
    F v[kColumns];
};

// The tree's node over lanes j, j + o, j + 2o, ... of q . k; node<1>(0) is the whole sum.
template <int o> inline Columns scores(const float *q, const float *keys, int64_t n, int64_t j) {
    Columns c;
    if constexpr (o == kLanes) {
        for (F &v : c.v)
            v = splat(0.0f);
        for (int64_t i = j; i < n; i += kLanes)
            for (int k = 0; k < kColumns; k++)
                c.v[k] = fma(splat(q[i]), load(keys + i * kKVBlock + k * kWidth), c.v[k]);
    } else {
        c = scores<2 * o>(q, keys, n, j);
        const Columns other = scores<2 * o>(q, keys, n, j + o);
        for (int k = 0; k < kColumns; k++)
            c.v[k] = c.v[k] + other.v[k];
    }
    return c;
}

template <int registers>
inline void add_values(const float *p, const float *values, int64_t width, int64_t valid, float alpha, float *o) {
    F acc[registers];
    for (int k = 0; k < registers; k++)
        acc[k] = load(o + k * kWidth) * splat(alpha);
    for (int64_t j = 0; j < valid; j++)
        for (int k = 0; k < registers; k++)
            acc[k] = fma(splat(p[j]), load(values + j * width + k * kWidth), acc[k]);
    for (int k = 0; k < registers; k++)
        store(o + k * kWidth, acc[k]);
}

// One query against the first `valid` positions of a loaded block.
inline void attend_block(const float *q, const float *keys, const float *values, int64_t n, int64_t width,
                         int64_t valid, float scale, float *o, float &top, float &total) {
    alignas(64) float p[kKVBlock];
    for (int64_t j = 0; j < valid; j += kColumns * kWidth) {
        const Columns c = scores<1>(q, keys + j, n, 0);
        for (int k = 0; k < kColumns; k++)
            store(p + j + k * kWidth, c.v[k] * splat(scale));
    }
    float highest = top;
    for (int64_t j = 0; j < valid; j++)
        highest = p[j] > highest ? p[j] : highest; // a NaN reaches the result through p, below
    float alpha;
    exp_minus(&top, highest, 1, &alpha);
    exp_minus(p, highest, valid, p);
    total = __builtin_fmaf(total, alpha, sum32(p, valid));
    top = highest;
    int64_t i = 0;
    for (; i + 4 * kWidth <= width; i += 4 * kWidth)
        add_values<4>(p, values + i, width, valid, alpha, o + i);
    for (; i < width; i += kWidth)
        add_values<1>(p, values + i, width, valid, alpha, o + i);
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
    int64_t longest = 0;
    for (int64_t t = tile.first_token; t < tile.last_token; t++)
        longest = tile.position[t] + 1 > longest ? tile.position[t] + 1 : longest;
    for (int64_t start = 0; start < longest; start += kKVBlock) {
        const int64_t filled = least(kKVBlock, longest - start);
        const int64_t base = int64_t(tile.table[start / kKVBlock]) * kKVBlock;
        auto row = [&](int64_t j) { return (base + least(j, filled - 1)) * kv.n_head_kv + tile.kv_head; };
        for (int64_t j = 0; j < filled; j += 4) {
            float *to = keys + j;
            if (kv.k_scale) {
                const ByteRow rows[4] = {byte_row(kv.k, kv.k_scale, row(j), n), byte_row(kv.k, kv.k_scale, row(j + 1), n),
                                         byte_row(kv.k, kv.k_scale, row(j + 2), n), byte_row(kv.k, kv.k_scale, row(j + 3), n)};
                load_keys(rows, n, to);
            } else {
                const HalfRow rows[4] = {half_row(kv.k, row(j), n), half_row(kv.k, row(j + 1), n),
                                         half_row(kv.k, row(j + 2), n), half_row(kv.k, row(j + 3), n)};
                load_keys(rows, n, to);
            }
        }
        for (int64_t j = 0; j < filled; j++) {
            float *to = values + j * width;
            if (kv.v_scale)
                load_value(byte_row(kv.v, kv.v_scale, row(j), n), n, to);
            else
                load_value(half_row(kv.v, row(j), n), n, to);
        }
        for (int64_t t = tile.first_token; t < tile.last_token; t++) {
            const int64_t valid = least(kKVBlock, tile.position[t] + 1 - start);
            if (valid <= 0)
                continue;
            for (int64_t h = tile.first_head; h < tile.last_head; h++) {
                float *o = state + ((t - tile.first_token) * heads + h - tile.first_head) * state_floats;
                attend_block(tile.q + (t * tile.n_head + h) * n, keys, values, n, width, valid, tile.scale, o,
                             o[width], o[width + 1]);
            }
        }
    }
    for (int64_t t = tile.first_token; t < tile.last_token; t++)
        for (int64_t h = tile.first_head; h < tile.last_head; h++) {
            const float *o = state + ((t - tile.first_token) * heads + h - tile.first_head) * state_floats;
            const F total = splat(o[width + 1]);
            float *to = tile.out + (t * tile.n_head + h) * n;
            each(n, [&](int64_t i, int some) { store_some(to + i, load(o + i) / total, some); });
        }
}

} // namespace

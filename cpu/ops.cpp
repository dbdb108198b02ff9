// The operations around attention, the router's logits, the head and plain products: norms and 8-bit
// activations by token, then rows of weights, in parallel. Twins: engine/ops/reference.py.
#include <algorithm>
#include <cstring>

#include "inputs.h"

using namespace spark;

namespace {

// A head of one position into the cache.
void store_row(const Kernels &k, int64_t type, const float *x, int64_t n, void *to, uint16_t *scales,
               int64_t row) {
    if (type == SPARK_KV_F16)
        k.store_f16(x, n, static_cast<uint16_t *>(to) + row * n);
    else if (type == SPARK_KV_Q8_0)
        k.store_q8(x, n, static_cast<int8_t *>(to) + row * n, scales + row * (n / kBlock));
    else
        k.store_q4(x, n, static_cast<uint8_t *>(to) + row * (n / 2), scales + row * (n / kBlock));
}

} // namespace

extern "C" {

int32_t spark_product(spark_workspace *ws, const spark_matrix *w, const float *x, int64_t T, float *y) {
    if (!known(w))
        return SPARK_BAD_TYPE;
    product(*ws, weights_of(*w), quantized(*ws, x, T, w->cols, !is_float(w->type)), T, y);
    return SPARK_OK;
}

int32_t spark_attention_input(spark_workspace *ws, const float *x, int64_t T, const float *norm, float eps,
                              const spark_matrix *wq, const spark_matrix *wk, const spark_matrix *wv,
                              const float *q_norm, const float *k_norm, const float *v_norm, const float *rope,
                              int64_t n_positions, int64_t n_rot, const int32_t *positions, const spark_kv *kv,
                              const int32_t *slots, float *q, int64_t head_dim, const spark_matrix *gate,
                              float *gate_out) {
    if (!known(wq, wk, wv, gate))
        return SPARK_BAD_TYPE;
    if (out_of_range(positions, T, n_positions) || (wk && out_of_range(slots, T, kv->n_slots, -1)))
        return SPARK_BAD_INDEX;
    struct Part {
        Weights w;
        float *y;
    } parts[4];
    int n_parts = 0;
    int64_t total = 0;
    double cost = 0;
    bool needed = false;
    const auto add_part = [&](const spark_matrix *w, float *y) {
        if (!w)
            return;
        parts[n_parts++] = {weights_of(*w), y};
        total += w->rows;
        cost += row_ns(weights_of(*w), T) * double(w->rows);
        needed |= !is_float(w->type);
    };
    add_part(wq, q);
    add_part(wk, ws->keys.get());
    add_part(wv, ws->values.get());
    add_part(gate, gate_out);
    const Inputs in = normed(*ws, x, nullptr, T, wq->cols, norm, eps, needed, ws->normed.get());
    const Kernels &k = ws->kernels;
    ws->rows(total, cost / double(total), [&](int64_t first, int64_t last, int) {
        for (int64_t part = 0, begin = 0; part < n_parts; begin += parts[part++].w.rows) {
            const auto &[w, y] = parts[part];
            const int64_t from = std::max<int64_t>(first - begin, 0), to = std::min(last - begin, w.rows);
            if (from < to)
                k.product(w, from, to, in, nullptr, T, y + from, w.rows);
        }
    });
    const int64_t n = head_dim, heads = wq->rows / n, kv_heads = wk ? kv->n_head_kv : 0, half = n_rot / 2;
    ws->rows(T, double(total), [&](int64_t first, int64_t last, int) {
        for (int64_t t = first; t < last; t++) {
            const float *cosines = rope + positions[t] * n_rot, *sines = cosines + half;
            auto finish = [&](float *head, const float *weight) {
                if (weight)
                    k.rms_norm(head, weight, n, eps, head);
                k.rotate(head, cosines, sines, half);
            };
            for (int64_t h = 0; h < heads; h++)
                finish(q + (t * heads + h) * n, q_norm);
            for (int64_t h = 0; h < kv_heads; h++) {
                float *key = ws->keys.get() + (t * kv_heads + h) * n, *value = ws->values.get() + (t * kv_heads + h) * n;
                if (!wv)
                    std::memcpy(value, key, size_t(n) * sizeof(float));
                if (v_norm)
                    k.rms_norm(value, v_norm, n, eps, value);
                if (slots[t] < 0)
                    continue;
                finish(key, k_norm);
                const int64_t row = slots[t] * kv_heads + h;
                store_row(k, kv->k_type, key, n, kv->k, kv->k_scale, row);
                store_row(k, kv->v_type, value, n, kv->v, kv->v_scale, row);
            }
        }
    });
    return SPARK_OK;
}

int32_t spark_attention(spark_workspace *ws, const float *q, int64_t T, int64_t n_head, const spark_kv *kv,
                        const int32_t *block_table, int64_t n_sequence, int64_t max_blocks, const int32_t *sequence,
                        const int32_t *positions, float scale, float *out, int64_t window, const float *gate,
                        int32_t gate_by_head, int32_t gate_kind, const uint8_t *chosen, const float *left,
                        float *missed) {
    if (out_of_range(sequence, T, n_sequence) || out_of_range(positions, T, max_blocks * kKVBlock))
        return SPARK_BAD_INDEX;
    for (int64_t t = 0; t < T; t++) { // without a window a later token of a sequence sees every block of an earlier one
        const int64_t first = window_begin(positions[t], window) / kKVBlock;
        if ((window || t + 1 == T || sequence[t + 1] != sequence[t] || positions[t + 1] < positions[t]) &&
            out_of_range(block_table + sequence[t] * max_blocks + first, positions[t] / kKVBlock + 1 - first,
                         kv->n_slots / kKVBlock, -1))
            return SPARK_BAD_INDEX;
    }
    // A tile takes a few tokens of one sequence with every query head of a KV head; with few tokens, the
    // heads are split so that every thread has work.
    const int64_t group = n_head / kv->n_head_kv;
    int64_t heads = std::min(group, kTileQueries);
    while (heads > 1 && T * kv->n_head_kv * ((group + heads - 1) / heads) < ws->pool.threads())
        heads = (heads + 1) / 2;
    const int64_t splits = (group + heads - 1) / heads, most_tokens = std::max<int64_t>(1, kTileQueries / heads);
    int64_t *tiles = ws->tiles.get(), n_tiles = 0;
    for (int64_t t = 0; t < T; t++)
        if (t == 0 || sequence[t] != sequence[t - 1] || t - tiles[n_tiles - 1] == most_tokens)
            tiles[n_tiles++] = t;
    tiles[n_tiles] = T;
    // Later tiles see more positions: they go first.
    ws->pool.run(n_tiles * kv->n_head_kv * splits, [&](int64_t item, int thread) {
        const int64_t tile = n_tiles - 1 - item / (kv->n_head_kv * splits), rest = item % (kv->n_head_kv * splits);
        const int64_t kv_head = rest / splits, head = kv_head * group + rest % splits * heads;
        AttentionTile a;
        a.q = q;
        a.out = out;
        a.table = block_table + sequence[tiles[tile]] * max_blocks;
        a.position = positions;
        a.kv = kv;
        a.first_token = tiles[tile];
        a.last_token = tiles[tile + 1];
        a.first_head = head;
        a.last_head = std::min(head + heads, (kv_head + 1) * group);
        a.n_head = n_head;
        a.kv_head = kv_head;
        a.window = window;
        a.gate = gate;
        a.gate_by_head = gate_by_head;
        a.gate_kind = gate_kind;
        a.scale = scale;
        a.scratch = ws->attention_scratch.get() + thread * ws->attention_floats;
        a.chosen = chosen;
        a.max_blocks = max_blocks;
        a.left = left;
        a.missed = missed;
        ws->kernels.attend(a);
    });
    return SPARK_OK;
}

int32_t spark_attention_output(spark_workspace *ws, const float *attended, int64_t T, const spark_matrix *wo,
                               float *x, int32_t add) {
    if (!known(wo))
        return SPARK_BAD_TYPE;
    const Weights w = weights_of(*wo);
    const Inputs in = quantized(*ws, attended, T, w.cols, !is_float(w.type));
    float *y = ws->normed.get();
    ws->rows(w.rows, row_ns(w, T), [&](int64_t first, int64_t last, int) {
        ws->kernels.product(w, first, last, in, nullptr, T, (add ? y : x) + first, w.rows);
        for (int64_t t = 0; add && t < T; t++)
            ws->kernels.add(x + t * w.rows + first, y + t * w.rows + first, last - first);
    });
    return SPARK_OK;
}

int32_t spark_router(spark_workspace *ws, const float *x, int64_t T, const float *norm, float eps,
                     const spark_matrix *gate, float *h, float *logits) {
    if (!known_float(gate))
        return SPARK_BAD_TYPE;
    const Weights w = weights_of(*gate);
    ws->rows(T, double(w.cols) / 4 + row_ns(w, 1) * double(w.rows), [&](int64_t first, int64_t last, int) {
        for (int64_t t = first; t < last; t++)
            ws->kernels.rms_norm(x + t * w.cols, norm, w.cols, eps, h + t * w.cols);
        const Inputs in{nullptr, h + first * w.cols, 0, w.cols};
        ws->kernels.product(w, 0, w.rows, in, nullptr, last - first, logits + first * w.rows, w.rows);
    });
    return SPARK_OK;
}

int32_t spark_norm(spark_workspace *ws, const float *x, int64_t T, int64_t cols, const float *norm, float eps,
                   float *out) {
    normed(*ws, x, nullptr, T, cols, norm, eps, false, out);
    return SPARK_OK;
}

int32_t spark_add_norm(spark_workspace *ws, const float *y, int64_t T, int64_t cols, const float *norm, float eps,
                       float *x, float scale) {
    ws->rows(T, double(cols) / 2, [&](int64_t first, int64_t last, int) {
        for (int64_t t = first; t < last; t++) {
            float *added = ws->normed.get() + t * cols;
            ws->kernels.rms_norm(y + t * cols, norm, cols, eps, added);
            ws->kernels.add(x + t * cols, added, cols);
            if (scale != 1.0f)
                ws->kernels.scale(x + t * cols, scale, cols);
        }
    });
    return SPARK_OK;
}

int32_t spark_head(spark_workspace *ws, const float *x, int64_t T, const int32_t *rows, int64_t n_rows,
                   const float *norm, float eps, const spark_matrix *output, float *logits, float softcap) {
    if (!known(output))
        return SPARK_BAD_TYPE;
    if (out_of_range(rows, n_rows, T))
        return SPARK_BAD_INDEX;
    const Weights w = weights_of(*output);
    const Inputs in = normed(*ws, x, rows, n_rows, w.cols, norm, eps, !is_float(w.type), ws->normed.get());
    ws->rows(w.rows, row_ns(w, n_rows), [&](int64_t first, int64_t last, int) {
        ws->kernels.product(w, first, last, in, nullptr, n_rows, logits + first, w.rows);
        if (softcap > 0.0f)
            for (int64_t t = 0; t < n_rows; t++)
                ws->kernels.softcap(logits + t * w.rows + first, softcap, last - first);
    });
    return SPARK_OK;
}

void spark_exp(spark_workspace *ws, const float *x, int64_t n, float *y) { ws->kernels.exp(x, 0.0f, n, y); }

uint64_t spark_read(spark_workspace *ws, const void *data, int64_t n_bytes) {
    std::atomic<uint64_t> sum{0};
    constexpr int64_t kPiece = 256 * 1024;
    ws->pool.run((n_bytes + kPiece - 1) / kPiece, [&](int64_t i, int) {
        const auto *from = static_cast<const uint8_t *>(data) + i * kPiece;
        const int64_t n = std::min(kPiece, n_bytes - i * kPiece) / 8;
        uint64_t part[8] = {};
        for (int64_t j = 0; j + 8 <= n; j += 8) {
            uint64_t v[8];
            std::memcpy(v, from + 8 * j, 64);
            for (int k = 0; k < 8; k++)
                part[k] += v[k];
        }
        for (uint64_t p : part)
            sum.fetch_add(p, std::memory_order_relaxed);
    });
    return sum.load();
}

} // extern "C"

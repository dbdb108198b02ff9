// Gated DeltaNet layers. Twins: engine/ops/delta.py.
//
// The recurrence: 1. the convolution, by blocks of channels; 2. norms of q and k and the gates, by token; 3. the rule
// itself, by head and rows of its state, each walking through the tokens of a sequence.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "inputs.h"

using namespace spark;

namespace {

constexpr int64_t kMaxKernel = 16;
constexpr int64_t kChannels = 256; // of a thread's turn

struct Span { // rows of a sequence, and its state's slots
    int64_t first, last, source, target;
    bool fresh;
};

// The next span of rows from `first` on; its first is T where there is none.
Span next_span(int64_t first, int64_t T, const int32_t *states, const int32_t *sequence, const int32_t *positions,
               const int32_t *slots) {
    while (first < T && slots[first] < 0)
        first++;
    if (first == T)
        return {T, T, 0, 0, true};
    int64_t last = first + 1;
    while (last < T && slots[last] >= 0 && sequence[last] == sequence[first])
        last++;
    const int32_t *state = states + 2 * sequence[first];
    return {first, last, state[0], state[1], positions[first] == 0};
}

// The raw input of a token or of one before the span, `back` rows before `row`; zeros for what was never there.
const float *tap(const Span &span, int64_t row, int64_t back, const int32_t *positions, const float *mixed,
                 const spark_delta_layer &layer, const float *zeros) {
    for (int64_t r = row; back > 0; r--, back--) {
        if (positions[r] == 0)
            return zeros;
        if (r == span.first) { // `back` rows before the span
            const int64_t kept = layer.kernel - 1;
            return layer.conv + (span.source * kept + kept - back) * layer.n_mixed;
        }
        row = r - 1;
    }
    return mixed + row * layer.n_mixed;
}

} // namespace

extern "C" {

int32_t spark_delta_input(spark_workspace *ws, const float *x, int64_t T, const float *norm, float eps,
                          const spark_matrix *w_qkv, const spark_matrix *w_z, const spark_matrix *w_beta,
                          const spark_matrix *w_alpha, float *mixed, float *z, float *beta, float *alpha) {
    if (!known(w_qkv, w_z, w_beta, w_alpha))
        return SPARK_BAD_TYPE;
    const Weights parts[4] = {weights_of(*w_qkv), weights_of(*w_z), weights_of(*w_beta), weights_of(*w_alpha)};
    float *const outputs[4] = {mixed, z, beta, alpha};
    int64_t total = 0;
    double cost = 0;
    bool needed = false;
    for (const Weights &w : parts) {
        total += w.rows;
        cost += row_ns(w, T) * double(w.rows);
        needed |= !is_float(w.type);
    }
    const Inputs in = normed(*ws, x, nullptr, T, parts[0].cols, norm, eps, needed, ws->normed.get());
    ws->rows(total, cost / double(total), [&](int64_t first, int64_t last, int) {
        int64_t begin = 0;
        for (int part = 0; part < 4; begin += parts[part++].rows) {
            const int64_t from = std::max<int64_t>(first - begin, 0), to = std::min(last - begin, parts[part].rows);
            if (from < to)
                ws->kernels.product(parts[part], from, to, in, nullptr, T, outputs[part] + from, parts[part].rows);
        }
    });
    return SPARK_OK;
}

int32_t spark_delta(spark_workspace *ws, const float *mixed, int64_t T, const float *beta, const float *alpha,
                    const float *conv, const float *dt_bias, const float *a, float eps, const spark_delta_layer *layer,
                    const int32_t *states, int64_t n_sequence, const int32_t *sequence, const int32_t *positions,
                    const int32_t *slots, float *out) {
    const int64_t kernel = layer->kernel, C = layer->n_mixed, heads = layer->n_head_v, d_k = layer->d_k, d_v = layer->d_v;
    const auto span_from = [&](int64_t first) { return next_span(first, T, states, sequence, positions, slots); };
    if (kernel > kMaxKernel)
        return SPARK_BAD_INDEX;
    for (int64_t t = 0; t < T; t++)
        if (slots[t] >= 0 && (sequence[t] < 0 || sequence[t] >= n_sequence))
            return SPARK_BAD_INDEX;
    for (Span s = span_from(0); s.first < T; s = span_from(s.last))
        if (s.target < 0 || s.target >= layer->n_states || (!s.fresh && (s.source < 0 || s.source >= layer->n_states)))
            return SPARK_BAD_INDEX;

    const Kernels &k = ws->kernels;
    float *const y = ws->convolved.get(), *const decays = ws->decays.get(), *const rates = ws->rates.get();
    static const float zeros[kChannels] = {};
    ws->pool.run((C + kChannels - 1) / kChannels, [&](int64_t item, int) {
        const int64_t first = item * kChannels, n = std::min(kChannels, C - first);
        const float *taps[kMaxKernel];
        for (Span s = span_from(0); s.first < T; s = span_from(s.last)) {
            for (int64_t t = s.first; t < s.last; t++) {
                for (int64_t j = 0; j < kernel; j++) {
                    taps[j] = tap(s, t, kernel - 1 - j, positions, mixed, *layer, nullptr);
                    taps[j] = taps[j] ? taps[j] + first : zeros;
                }
                k.convolve(taps, conv + first * kernel, kernel, n, y + t * C + first);
            }
            // The oldest first: what it takes lies further on in the same state, if there.
            for (int64_t j = 0; j < kernel - 1; j++) {
                const float *from = tap(s, s.last - 1, kernel - 2 - j, positions, mixed, *layer, nullptr);
                std::memmove(layer->conv + (s.target * (kernel - 1) + j) * C + first, from ? from + first : zeros,
                             size_t(n) * sizeof(float));
            }
        }
    });

    const int64_t k_heads = (C - heads * d_v) / (2 * d_k);
    const float scale = 1.0f / std::sqrt(float(d_k));
    ws->rows(T, double(C), [&](int64_t first, int64_t last, int) {
        for (int64_t t = first; t < last; t++) {
            if (slots[t] < 0)
                continue;
            for (int64_t h = 0; h < 2 * k_heads; h++)
                k.unit(y + t * C + h * d_k, d_k, eps, h < k_heads ? scale : 1.0f);
            k.delta_gates(alpha + t * heads, dt_bias, a, heads, decays + t * heads);
            k.sigmoid(beta + t * heads, heads, rates + t * heads);
        }
    });

    const int64_t rows = d_v % 4 ? d_v : d_v / 4, parts = d_v / rows, n_state = heads * d_v * d_k;
    for (Span s = span_from(0); s.first < T; s = span_from(s.last))
        ws->pool.run(heads * parts, [&](int64_t item, int) {
            const int64_t head = item / parts, row = head * d_v + item % parts * rows;
            const int64_t q = head % k_heads * d_k, v = 2 * k_heads * d_k + row;
            float *const state = layer->state + s.target * n_state + row * d_k;
            const size_t bytes = size_t(rows * d_k) * sizeof(float);
            if (s.source != s.target && !s.fresh)
                std::memcpy(state, layer->state + s.source * n_state + row * d_k, bytes);
            for (int64_t t = s.first; t < s.last; t++) {
                if (positions[t] == 0)
                    std::memset(state, 0, bytes);
                const float *of = y + t * C;
                k.delta_step(state, of + q, of + k_heads * d_k + q, of + v, d_k, rows, decays[t * heads + head],
                             rates[t * heads + head], out + t * heads * d_v + row);
            }
        });
    return SPARK_OK;
}

int32_t spark_delta_output(spark_workspace *ws, const float *y, int64_t T, const float *z, const float *norm,
                           int64_t d_v, float eps, const spark_matrix *w_out, float *x) {
    if (!known(w_out))
        return SPARK_BAD_TYPE;
    const Weights w = weights_of(*w_out);
    const Kernels &k = ws->kernels;
    float *const h = ws->normed.get();
    const Inputs in{ws->activations.get(), h, supers(w.cols), w.cols};
    ws->rows(T, double(w.cols), [&](int64_t first, int64_t last, int) {
        for (int64_t t = first; t < last; t++) {
            float *const row = h + t * w.cols;
            for (int64_t i = 0; i < w.cols; i += d_v)
                k.rms_norm(y + t * w.cols + i, norm, d_v, eps, row + i);
            k.silu_mul(z + t * w.cols, row, w.cols, row);
            if (!is_float(w.type))
                k.quantize(row, w.cols, ws->activations.get() + t * in.supers);
        }
    });
    float *const to = ws->convolved.get();
    ws->rows(w.rows, row_ns(w, T), [&](int64_t first, int64_t last, int) {
        k.product(w, first, last, in, nullptr, T, to + first, w.rows);
        for (int64_t t = 0; t < T; t++)
            k.add(x + t * w.rows + first, to + t * w.rows + first, last - first);
    });
    return SPARK_OK;
}

} // extern "C"

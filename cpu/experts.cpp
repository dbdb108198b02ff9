// The expert FFN and the dense one. Twins: expert_ffn and dense_ffn of engine/ops/reference.py.
//
// Experts: 1. The step's fetches, in parallel. 2. Tokens are grouped by expert and the normed residual quantized.
// 3. Chunks of 32 rows of gate and up of every expert: act(gate) * up of a chunk is one block of
// activations, quantized where it was computed. 4. Chunks of rows of down, all experts of a chunk, so the
// same thread folds them in rank order and adds them to the residual. One loop each, over all experts.
// A dense FFN is an expert of every token, without fetches, groups and weights.
#include <algorithm>
#include <cstring>

#include "workspace.h"

using namespace spark;

namespace {

const uint8_t *at(uint64_t address) { return reinterpret_cast<const uint8_t *>(uintptr_t(address)); }

void fetch(spark_workspace &ws, const spark_experts &bank, const int32_t *rows, int64_t n) {
    constexpr int64_t kPiece = 128 * 1024;
    int64_t pieces[3];
    for (int part = 0; part < 3; part++)
        pieces[part] = (bank.part_bytes[part] + kPiece - 1) / kPiece;
    const int64_t of_expert = pieces[0] + pieces[1] + pieces[2];
    ws.pool.run(n * of_expert, [&](int64_t item, int) {
        const int32_t *row = rows + item / of_expert * 3;
        int64_t piece = item % of_expert;
        int part = 0;
        while (piece >= pieces[part])
            piece -= pieces[part++];
        const int64_t first = piece * kPiece, size = std::min(kPiece, bank.part_bytes[part] - first);
        auto *to = const_cast<uint8_t *>(at(bank.slot_ptr[row[1] * 3 + part])) + first;
        if (bank.poison)
            std::memset(to, 0xff, size_t(size));
        std::memcpy(to, at(bank.home_ptr[row[0] * 3 + part]) + first, size_t(size));
    });
}

// Pairs (token, rank) in the order of their experts; returns the number of experts in use.
int64_t group_pairs(spark_workspace &ws, const int32_t *experts, int64_t T, int64_t n_used, int64_t n_expert) {
    int64_t *uses = ws.uses.get(), n_groups = 0, next = 0;
    for (int64_t i = 0; i < T * n_used; i++)
        uses[experts[i]]++;
    for (int64_t e = 0; e < n_expert; e++) {
        if (!uses[e])
            continue;
        ws.groups.get()[n_groups++] = {e, next, next + uses[e]};
        const int64_t first = next;
        next += uses[e];
        uses[e] = first;
    }
    for (int64_t i = 0; i < T * n_used; i++) {
        const int64_t place = uses[experts[i]]++;
        ws.pair_token.get()[place] = int32_t(i / n_used);
        ws.place_of_pair.get()[i] = int32_t(place);
    }
    for (int64_t g = 0; g < n_groups; g++)
        uses[ws.groups.get()[g].expert] = 0;
    return n_groups;
}

auto activation_of(const Kernels &k, int64_t activation) { return activation == SPARK_GELU ? k.gelu_mul : k.silu_mul; }

} // namespace

extern "C" int32_t spark_expert_ffn(spark_workspace *ws, const float *h, int64_t T, int64_t n_used,
                                    const int32_t *experts, const float *weights, const spark_experts *bank,
                                    const int32_t *fetch_rows, const int32_t *fetch_count, float *x, int32_t add) {
    for (int64_t type : bank->type)
        if (!is_known(type))
            return SPARK_BAD_TYPE;
    const Kernels &k = ws->kernels;
    const auto activate = activation_of(k, bank->activation);
    const int64_t D = bank->n_embd, F = bank->n_ff, n_fetch = *fetch_count, ff_supers = supers(F);
    if (out_of_range(experts, T * n_used, bank->n_expert) || n_fetch < 0 || n_fetch > bank->n_expert)
        return SPARK_BAD_INDEX;
    for (int64_t i = 0; i < n_fetch; i++)
        if (out_of_range(fetch_rows + 3 * i, 1, bank->n_expert) || out_of_range(fetch_rows + 3 * i + 1, 1, bank->n_slots))
            return SPARK_BAD_INDEX;
    fetch(*ws, *bank, fetch_rows, n_fetch);

    const int64_t n_groups = group_pairs(*ws, experts, T, n_used, bank->n_expert);
    const Group *groups = ws->groups.get();
    auto part = [&](int64_t expert, int which, int64_t rows, int64_t cols) -> Weights {
        const int64_t type = bank->type[which];
        const float scale = which == 0 && bank->gate_scale ? bank->gate_scale[expert] : 1.0f;
        return {at(bank->expert_ptr[expert * 3 + which]), rows, cols, row_bytes(type, cols), type, scale};
    };
    // Row `first` of a part. A chunk is short, and what comes after it lies elsewhere: it is prefetched from there.
    auto row_of = [&](int64_t expert, int which, int64_t cols, int64_t first) {
        return at(bank->expert_ptr[expert * 3 + which]) + first * row_bytes(bank->type[which], cols);
    };
    const int64_t n_threads = ws->pool.threads(); // that take items in turn, mostly

    const Inputs in{ws->activations.get(), h, supers(D), D};
    if (!is_float(bank->type[0]) || !is_float(bank->type[1]))
        ws->rows(T, double(D) / 4, [&](int64_t first, int64_t last, int) {
            for (int64_t t = first; t < last; t++)
                k.quantize(h + t * D, D, ws->activations.get() + t * in.supers);
        });

    const bool plain = is_float(bank->type[2]);
    const int64_t ff_chunks = (F + kChunkRows - 1) / kChunkRows;
    ws->pool.run(n_groups * ff_chunks, [&](int64_t item, int thread) {
        const Group &g = groups[item / ff_chunks];
        const int64_t chunk = item % ff_chunks, first = chunk * kChunkRows, last = std::min(first + kChunkRows, F);
        Weights gate = part(g.expert, 0, F, D), up = part(g.expert, 1, F, D);
        gate.then = row_of(g.expert, 1, D, first);
        if (const int64_t next = item + n_threads; next < n_groups * ff_chunks)
            up.then = row_of(groups[next / ff_chunks].expert, 0, D, next % ff_chunks * kChunkRows);
        float *gated = ws->expert_scratch.get() + thread * ws->expert_floats, *upped = gated + kGroupTokens * kChunkRows;
        for (int64_t start = g.first; start < g.last; start += kGroupTokens) {
            const int64_t n = std::min(kGroupTokens, g.last - start);
            const int32_t *tokens = ws->pair_token.get() + start;
            k.product(gate, first, last, in, tokens, n, gated, kChunkRows);
            k.product(up, first, last, in, tokens, n, upped, kChunkRows);
            for (int64_t i = 0; i < n; i++) {
                float *z = plain ? ws->plain_hidden.get() + (start + i) * F + first : gated + i * kChunkRows;
                activate(gated + i * kChunkRows, upped + i * kChunkRows, last - first, z);
                if (!plain)
                    k.quantize_block(z, chunk, ws->hidden.get() + (start + i) * ff_supers);
            }
        }
    });

    const Inputs hidden{ws->hidden.get(), ws->plain_hidden.get(), ff_supers, F};
    const int64_t chunks = (D + kChunkRows - 1) / kChunkRows;
    ws->pool.run(T ? chunks : 0, [&](int64_t item, int thread) {
        const int64_t first = item * kChunkRows, last = std::min(first + kChunkRows, D);
        float *y = ws->expert_scratch.get() + thread * ws->expert_floats; // [pairs][kChunkRows]
        for (const Group *g = groups; g < groups + n_groups; g++) {
            const Inputs of_group{hidden.quantized + g->first * ff_supers, hidden.plain + g->first * F, ff_supers, F};
            Weights down = part(g->expert, 2, D, F);
            if (g + 1 < groups + n_groups)
                down.then = row_of(g[1].expert, 2, F, first);
            else if (item + n_threads < chunks)
                down.then = row_of(groups->expert, 2, F, (item + n_threads) * kChunkRows);
            k.product(down, first, last, of_group, nullptr, g->last - g->first, y + g->first * kChunkRows, kChunkRows);
        }
        for (int64_t t = 0; t < T; t++)
            k.fold_experts(x + t * D + first, weights + t * n_used, y, ws->place_of_pair.get() + t * n_used, kChunkRows,
                           n_used, last - first, add != 0);
    });
    return SPARK_OK;
}

extern "C" int32_t spark_dense_ffn(spark_workspace *ws, const float *h, int64_t T, const spark_matrix *gate,
                                   const spark_matrix *up, const spark_matrix *down, const spark_matrix *shared_gate,
                                   int32_t activation, float *x, int32_t add) {
    if (!known(gate, up, down) || !known_float(shared_gate))
        return SPARK_BAD_TYPE;
    const Kernels &k = ws->kernels;
    const auto activate = activation_of(k, activation);
    const Weights gates = weights_of(*gate), ups = weights_of(*up), downs = weights_of(*down);
    const int64_t D = gates.cols, F = gates.rows, ff_supers = supers(F);
    const Inputs in{ws->activations.get(), h, supers(D), D};
    float *const row_scale = ws->row_scale.get();
    ws->rows(T, double(D) / 4, [&](int64_t first, int64_t last, int) {
        if (!is_float(gates.type) || !is_float(ups.type))
            for (int64_t t = first; t < last; t++)
                k.quantize(h + t * D, D, ws->activations.get() + t * in.supers);
        if (shared_gate) {
            const Inputs rows{nullptr, h + first * D, 0, D};
            k.product(weights_of(*shared_gate), 0, 1, rows, nullptr, last - first, row_scale + first, 1);
            k.sigmoid(row_scale + first, last - first, row_scale + first);
        }
    });

    const bool plain = is_float(downs.type);
    const int64_t chunks = (F + kChunkRows - 1) / kChunkRows, groups = (T + kGroupTokens - 1) / kGroupTokens;
    ws->pool.run(chunks * groups, [&](int64_t item, int thread) {
        const int64_t chunk = item / groups, first = chunk * kChunkRows, last = std::min(first + kChunkRows, F);
        const int64_t start = item % groups * kGroupTokens, n = std::min(kGroupTokens, T - start);
        float *gated = ws->expert_scratch.get() + thread * ws->expert_floats, *upped = gated + kGroupTokens * kChunkRows;
        const Inputs some{in.quantized + start * in.supers, h + start * D, in.supers, D};
        Weights gate_rows = gates, up_rows = ups;
        gate_rows.then = ups.data + first * ups.row_bytes;
        if (const int64_t next = (item + ws->pool.threads()) / groups * kChunkRows; next < F)
            up_rows.then = gates.data + next * gates.row_bytes;
        k.product(gate_rows, first, last, some, nullptr, n, gated, kChunkRows);
        k.product(up_rows, first, last, some, nullptr, n, upped, kChunkRows);
        for (int64_t i = 0; i < n; i++) {
            float *z = plain ? ws->plain_hidden.get() + (start + i) * F + first : gated + i * kChunkRows;
            activate(gated + i * kChunkRows, upped + i * kChunkRows, last - first, z);
            if (!plain)
                k.quantize_block(z, chunk, ws->hidden.get() + (start + i) * ff_supers);
        }
    });

    const Inputs hidden{ws->hidden.get(), ws->plain_hidden.get(), ff_supers, F};
    float *const y = ws->normed.get();
    ws->rows(D, row_ns(downs, T), [&](int64_t first, int64_t last, int) {
        float *const to = add ? y : x;
        k.product(downs, first, last, hidden, nullptr, T, to + first, D);
        for (int64_t t = 0; t < T; t++) {
            if (shared_gate)
                k.scale(to + t * D + first, row_scale[t], last - first);
            if (add)
                k.add(x + t * D + first, y + t * D + first, last - first);
        }
    });
    return SPARK_OK;
}

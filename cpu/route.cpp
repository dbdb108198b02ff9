// The choice of experts and what the slots make of it. Twins: route of engine/ops/reference.py and
// advance of engine/placing/policy.py, which specifies every decision (docs/residency.md).
#include <algorithm>
#include <cmath>
#include <limits>

#include "workspace.h"

using namespace spark;

namespace {

constexpr int64_t kRecentTokens = 32; // of a step, that the slots follow: RECENT_TOKENS of the twin
constexpr int64_t kUse = 65536;        // what a use adds to an expert's heat: USE of the twin
constexpr float kLeastSum = 6.1e-5f;  // of the scores by sigmoid that are renormalized

// Larger first; NaN is smaller than everything.
inline bool larger(float a, float b) { return a > b || (b != b && a == a); }

// The n_used largest values, ties to the smaller index; always distinct.
void top_experts(const float *values, int64_t n_expert, int64_t n_used, int32_t *chosen) {
    int64_t n = 0;
    for (int64_t e = 0; e < n_expert; e++) {
        if (n == n_used && !larger(values[e], values[chosen[n - 1]]))
            continue;
        int64_t at = n < n_used ? n++ : n - 1;
        for (; at > 0 && larger(values[e], values[chosen[at - 1]]); at--)
            chosen[at] = chosen[at - 1];
        chosen[at] = int32_t(e);
    }
}

float sum_in_order(const float *x, int64_t n) {
    float total = x[0];
    for (int64_t i = 1; i < n; i++)
        total = total + x[i];
    return total;
}

void divide(float *x, float by, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        x[i] = x[i] / by;
}

// The experts of one row and their weights; scratch [2][n_expert].
void choose(const Kernels &k, const spark_gating &gating, const float *logits, int64_t n_expert, int32_t *chosen,
            int64_t n_used, float *weights, float *scratch) {
    float *scores = scratch, *sums = scratch + n_expert;
    const float *choice = logits;
    float top = -std::numeric_limits<float>::infinity(), of_all = 0.0f;
    const bool sigmoid = gating.kind == SPARK_BY_SIGMOID, all = !sigmoid && (gating.bias || !gating.renormalize);
    if (sigmoid) {
        k.sigmoid(logits, n_expert, scores);
        choice = scores;
    } else {
        for (int64_t e = 0; e < n_expert; e++)
            top = logits[e] > top ? logits[e] : top;
    }
    if (all) {
        k.exp(logits, top, n_expert, scores);
        of_all = k.sum(scores, n_expert);
    }
    if (gating.bias) {
        for (int64_t e = 0; e < n_expert; e++)
            sums[e] = (sigmoid ? scores[e] : scores[e] / of_all) + gating.bias[e];
        choice = sums;
    }
    top_experts(choice, n_expert, n_used, chosen);

    for (int64_t a = 0; a < n_used; a++)
        weights[a] = (sigmoid || all ? scores : logits)[chosen[a]];
    if (!sigmoid && !all)
        k.exp(weights, top, n_used, weights);
    if (gating.renormalize) {
        const float total = sum_in_order(weights, n_used);
        divide(weights, sigmoid && total < kLeastSum ? kLeastSum : total, n_used);
    } else if (!sigmoid) {
        divide(weights, of_all, n_used);
    }
    for (int64_t a = 0; a < n_used; a++) {
        weights[a] = weights[a] * gating.scale;
        if (gating.expert_scale)
            weights[a] = weights[a] * gating.expert_scale[chosen[a]];
    }
}

// The unpinned slot with the coldest expert, the first of equals, whose expert has no use, or -1; an empty one is coldest.
int64_t victim(const spark_slots &s, const int64_t *heat, int64_t begin, int64_t end, const int64_t *uses) {
    int64_t best = -1;
    for (int64_t slot = begin; slot < end; slot++) {
        if (s.pinned[slot])
            continue;
        if (s.expert_of[slot] < 0)
            return slot;
        if (!uses[s.expert_of[slot]] && (best < 0 || heat[s.expert_of[slot]] < heat[s.expert_of[best]]))
            best = slot;
    }
    return best;
}

int32_t advance(spark_workspace &ws, const spark_slots &s, int64_t layer, const int32_t *experts, int64_t T,
                int64_t n_used, const uint8_t *counted, int64_t memory, int32_t *fetches) {
    const int64_t E = s.n_expert, begin = s.slot_begin[layer], end = s.slot_begin[layer + 1];
    int32_t *slot_of = s.slot_of + layer * E, *missing = ws.order.get();
    int64_t *counts = s.counts + layer * E, *heat = s.heat + layer * E, *uses = ws.uses.get();
    uint64_t *expert_ptr = s.expert_ptr + layer * E * 3;
    const uint64_t *home_ptr = s.home_ptr + layer * E * 3;
    const int64_t clock = ++s.clock[layer];
    for (int64_t t = 0; t < T; t++)
        for (int64_t a = 0; a < n_used; a++) {
            const int32_t e = experts[t * n_used + a];
            uses[e] += t >= T - kRecentTokens;
            if (counted[t]) {
                counts[e]++;
                (slot_of[e] >= 0 ? s.hits : s.misses)[layer]++;
            }
        }
    int64_t n_missing = 0;
    for (int64_t e = 0; e < E; e++) {
        if (memory)
            heat[e] += uses[e] * kUse - (heat[e] >> memory);
        else if (uses[e])
            heat[e] = 64 * clock + uses[e];
        if (uses[e] && slot_of[e] < 0)
            missing[n_missing++] = int32_t(e);
    }
    std::sort(missing, missing + n_missing,
              [heat](int32_t a, int32_t b) { return heat[a] != heat[b] ? heat[a] > heat[b] : a < b; });
    int32_t n = 0;
    for (int64_t i = 0; i < n_missing; i++) {
        const int64_t slot = victim(s, heat, begin, end, uses);
        const int32_t enters = missing[i], leaves = slot < 0 ? -1 : s.expert_of[slot];
        if (slot < 0 || (leaves >= 0 && heat[leaves] >= heat[enters]))
            break; // what follows is colder, and its victims could only be hotter
        if (leaves >= 0) {
            slot_of[leaves] = -1;
            std::copy_n(home_ptr + leaves * 3, 3, expert_ptr + leaves * 3);
        }
        slot_of[enters] = int32_t(slot);
        s.expert_of[slot] = enters;
        std::copy_n(s.slot_ptr + slot * 3, 3, expert_ptr + enters * 3);
        fetches[3 * n] = enters;
        fetches[3 * n + 1] = int32_t(slot);
        fetches[3 * n + 2] = leaves;
        n++;
    }
    std::fill_n(uses, E, 0);
    return n;
}

} // namespace

extern "C" int32_t spark_route(spark_workspace *ws, const float *logits, int64_t T, int64_t n_used,
                               const spark_gating *gating, const spark_slots *state, int64_t layer,
                               const uint8_t *counted, int64_t memory, int32_t *experts, float *weights,
                               int32_t *fetch_rows, int32_t *fetch_count) {
    const int64_t E = state->n_expert;
    ws->rows(T, double(E) * 2, [&](int64_t first, int64_t last, int thread) {
        float *scratch = ws->expert_scratch.get() + thread * ws->expert_floats;
        for (int64_t t = first; t < last; t++)
            choose(ws->kernels, *gating, logits + t * E, E, experts + t * n_used, n_used, weights + t * n_used, scratch);
    });
    *fetch_count = advance(*ws, *state, layer, experts, T, n_used, counted, memory, fetch_rows);
    return SPARK_OK;
}

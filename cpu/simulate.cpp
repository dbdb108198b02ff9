// One layer's slots on recorded routing. Twin: `advance` of engine/placing/policy.py, step by step (docs/residency.md).
//
// Calibration replays a hundred candidates on every generated token that it has, so a step does no more than it must: one
// pass over the layer's heat, which the compiler makes vectors of, and a search of the slots for each expert that enters.
#include <algorithm>
#include <vector>

#include "spark_cpu.h"

namespace {

constexpr int64_t kRecentTokens = 32; // of a prefill step, that the slots follow: RECENT_TOKENS of the twin
constexpr int64_t kUse = 65536;       // what a use adds to an expert's heat: USE of the twin

struct Layer {
    std::vector<int32_t> slot_of, held; // by expert; by slot, -1 = empty
    std::vector<int64_t> heat, uses;    // by expert; uses in this step
    std::vector<int32_t> seen, missing; // the experts of this step
    const int64_t n_pinned, memory;
    int64_t clock = 0;

    Layer(int64_t n_expert, const int32_t *first_held, int64_t n_slots, int64_t n_pinned, int64_t memory)
        : slot_of(size_t(n_expert), -1), held(first_held, first_held + n_slots), heat(size_t(n_expert), 0),
          uses(size_t(n_expert), 0), n_pinned(n_pinned), memory(memory) {
        for (int64_t slot = 0; slot < n_slots; slot++)
            if (held[slot] >= 0) {
                slot_of[held[slot]] = int32_t(slot);
                heat[held[slot]] = -slot;
            }
    }

    void use(int32_t expert) {
        if (uses[expert]++ == 0) {
            seen.push_back(expert);
            if (slot_of[expert] < 0)
                missing.push_back(expert);
        }
    }

    // The unpinned slot with the coldest expert, the first of equals, whose expert has no use, or -1; an empty one is coldest.
    int64_t victim() const {
        int64_t best = -1;
        for (int64_t slot = n_pinned; slot < int64_t(held.size()); slot++) {
            if (held[slot] < 0)
                return slot;
            if (!uses[held[slot]] && (best < 0 || heat[held[slot]] < heat[held[best]]))
                best = slot;
        }
        return best;
    }

    // Ends a step of the experts used since the last one; how many entered.
    int64_t settle() {
        clock++;
        if (memory)
            for (int64_t &h : heat)
                h -= h >> memory;
        for (const int32_t e : seen)
            heat[e] = memory ? heat[e] + uses[e] * kUse : 64 * clock + uses[e];
        std::sort(missing.begin(), missing.end(),
                  [this](int32_t a, int32_t b) { return heat[a] != heat[b] ? heat[a] > heat[b] : a < b; });
        int64_t moves = 0;
        for (const int32_t enters : missing) {
            const int64_t slot = victim();
            if (slot < 0 || (held[slot] >= 0 && heat[held[slot]] >= heat[enters]))
                break; // what follows is colder, and its victims could only be hotter
            if (held[slot] >= 0)
                slot_of[held[slot]] = -1;
            slot_of[enters] = int32_t(slot);
            held[slot] = enters;
            moves++;
        }
        for (const int32_t e : seen)
            uses[e] = 0;
        seen.clear();
        missing.clear();
        return moves;
    }
};

bool all_in_range(const uint16_t *experts, int64_t n, int64_t n_expert) {
    uint16_t largest = 0;
    for (int64_t i = 0; i < n; i++)
        largest = std::max(largest, experts[i]);
    return n == 0 || largest < n_expert;
}

bool are_spans(const int64_t *spans, int64_t n_spans, int64_t T) {
    bool fine = true;
    for (int64_t i = 0; i < n_spans; i++)
        fine = fine && spans[3 * i] >= 0 && spans[3 * i] <= spans[3 * i + 1] && spans[3 * i + 1] <= T;
    return fine;
}

bool are_held(const int32_t *held, int64_t n_slots, int64_t n_pinned, int64_t n_expert) {
    bool fine = n_pinned <= n_slots;
    for (int64_t slot = 0; slot < n_slots; slot++)
        fine = fine && held[slot] >= -1 && held[slot] < n_expert;
    return fine;
}

// Goes through the steps: begins(first, end) of the tokens of each, before it; ends(token, misses, moves) of generated ones.
template <typename Begins, typename Ends>
void replay(Layer &layer, const uint16_t *experts, int64_t n_used, const int64_t *spans, int64_t n_spans, Begins begins,
            Ends ends) {
    for (int64_t i = 0; i < n_spans; i++) {
        const int64_t begin = spans[3 * i], end = spans[3 * i + 1];
        const bool generated = spans[3 * i + 2] != 0;
        if (!generated)
            begins(begin, end);
        // A run of generated tokens is a step each; a prefill step follows its last tokens.
        for (int64_t t = generated ? begin : std::max(begin, end - kRecentTokens); t < end; t++) {
            if (generated)
                begins(t, t + 1);
            for (int64_t a = 0; a < n_used; a++)
                layer.use(experts[t * n_used + a]);
            if (generated) {
                const int64_t misses = int64_t(layer.missing.size());
                ends(t, misses, layer.settle());
            }
        }
        if (!generated)
            layer.settle();
    }
}

} // namespace

extern "C" int32_t spark_simulate(const uint16_t *experts, int64_t T, int64_t n_used, int64_t n_expert,
                                  const int64_t *spans, int64_t n_spans, const int32_t *group, int64_t n_groups,
                                  const int32_t *held, int64_t n_slots, int64_t n_pinned, int64_t memory,
                                  int64_t *misses, int64_t *moves) {
    bool fine = all_in_range(experts, T * n_used, n_expert) && are_held(held, n_slots, n_pinned, n_expert) &&
                are_spans(spans, n_spans, T);
    for (int64_t t = 0; t < T; t++)
        fine = fine && group[t] >= 0 && group[t] < n_groups;
    if (!fine)
        return SPARK_BAD_INDEX;
    Layer layer(n_expert, held, n_slots, n_pinned, memory);
    replay(
        layer, experts, n_used, spans, n_spans, [](int64_t, int64_t) {},
        [&](int64_t t, int64_t missed, int64_t moved) {
            misses[group[t]] += missed;
            moves[group[t]] += moved;
        });
    return SPARK_OK;
}

extern "C" int32_t spark_residents(const uint16_t *experts, int64_t T, int64_t n_used, int64_t n_expert,
                                   const int64_t *spans, int64_t n_spans, const int32_t *held, int64_t n_slots,
                                   int64_t n_pinned, int64_t memory, const int64_t *row, int64_t n_rows,
                                   uint8_t *resident) {
    bool fine = all_in_range(experts, T * n_used, n_expert) && are_held(held, n_slots, n_pinned, n_expert) &&
                are_spans(spans, n_spans, T);
    for (int64_t t = 0; t < T; t++)
        fine = fine && row[t] >= -1 && row[t] < n_rows;
    if (!fine)
        return SPARK_BAD_INDEX;
    Layer layer(n_expert, held, n_slots, n_pinned, memory);
    replay(
        layer, experts, n_used, spans, n_spans,
        [&](int64_t first, int64_t end) {
            for (int64_t t = first; t < end; t++)
                for (int64_t e = 0; row[t] >= 0 && e < n_expert; e++)
                    resident[row[t] * n_expert + e] = layer.slot_of[e] >= 0;
        },
        [](int64_t, int64_t, int64_t) {});
    return SPARK_OK;
}

// The choice of experts for one row by one warp, and their weights. Twin: `route` of engine/ops/reference.py.
//
// -DEXPERTS=E (<= 512), -DUSED=A (<= 16, <= E).
// -DSIGMOID=1: scores are sigmoids of the logits, else probabilities. -DBIAS=1: the choice is by scores plus bias [E].
// -DSCALED=1: weights are multiplied by `scale`, then by expert_scale [E] where it is given.
#pragma once

#include "arithmetic.cuh"
#include "order.cuh"
#include "ptx.cuh"

#define PER_LANE ((EXPERTS + WARP - 1) / WARP)
#define NEGATIVE_INFINITY __uint_as_float(0xff800000u)
#define LEAST_SUM 6.1e-5f // of sigmoids that are renormalized
#ifndef SIGMOID
#define SIGMOID 0
#endif
#ifndef BIAS
#define BIAS 0
#endif
#ifndef SCALED
#define SCALED 0
#endif

// A lane holds PER_LANE logits in a row, so that the lower lane has the smaller index.
DEVICE void load_row(const float* logits, int lane, float (&x)[PER_LANE]) {
    if constexpr (EXPERTS % 128 == 0) {
#pragma unroll
        for (int j = 0; j < PER_LANE; j += 4) {
            const float4 v = *(const float4*)(logits + lane * PER_LANE + j);
            x[j] = v.x, x[j + 1] = v.y, x[j + 2] = v.z, x[j + 3] = v.w;
        }
    } else {
#pragma unroll
        for (int j = 0; j < PER_LANE; j++) {
            const int e = lane * PER_LANE + j;
            x[j] = e < EXPERTS ? logits[e] : 0.0f;
        }
    }
}

// The logits of a lane, the largest in front, the first of equals. A few are kept sorted, so that taking one is a shift;
// many are searched again.
struct Queue {
    u32 order[PER_LANE];
    int index[PER_LANE], at;

    __device__ explicit Queue(const u32 (&given)[PER_LANE]) : at(0) {
#pragma unroll
        for (int j = 0; j < PER_LANE; j++)
            order[j] = given[j], index[j] = j;
        if constexpr (SORTED) {
#pragma unroll
            for (int n = 1; n < PER_LANE; n++)
#pragma unroll
                for (int j = n; j > 0; j--)
                    exchange(j - 1, j);
        } else {
            search();
        }
    }
    __device__ u32 best() const { return SORTED ? order[0] : largest; }
    __device__ int place() const { return SORTED ? index[0] : at; }
    __device__ void pop() {
#pragma unroll
        for (int j = 0; j < PER_LANE; j++) {
            if constexpr (SORTED) {
                order[j] = j + 1 < PER_LANE ? order[(j + 1) % PER_LANE] : 0;
                index[j] = index[(j + 1) % PER_LANE];
            } else {
                order[j] = j == at ? 0 : order[j];
            }
        }
        if constexpr (!SORTED)
            search();
    }

  private:
    static constexpr bool SORTED = PER_LANE <= 8;
    u32 largest;

    // Neighbors only, and not if they are equal: so equals keep their order.
    __device__ void exchange(int a, int b) {
        const u32 first = order[a], second = order[b];
        const int i = index[a], j = index[b];
        const bool swap = second > first;
        order[a] = swap ? second : first, order[b] = swap ? first : second;
        index[a] = swap ? j : i, index[b] = swap ? i : j;
    }
    __device__ void search() {
        largest = 0;
#pragma unroll
        for (int j = 0; j < PER_LANE; j++)
            if (order[j] > largest)
                largest = order[j], at = j;
    }
};

// How scores become weights.
struct Weighing {
    int renormalize;
    float scale;
    const float* expert_scale; // [EXPERTS] or null
};

DEVICE float largest_of(const u32 (&order)[PER_LANE]) {
    u32 best = 0;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++)
        best = max(best, order[j]);
    best = __reduce_max_sync(FULL_WARP, best);
    return best > 1 ? value_of(best) : NEGATIVE_INFINITY;
}

// sum32 over all experts: term i belongs to lane i mod 32.
DEVICE float sum_of_all(const float* logits, float top, int lane) {
    float total = 0.0f;
#pragma unroll 1
    for (int e = lane; e < EXPERTS; e += WARP)
        total = total + exponential(logits[e] - top);
    return fold(total);
}

// What a lane knows of a choice: lane a < USED of the expert of rank a.
struct Pick {
    i32 expert;
    float logit, top, of_all; // of the expert; largest of the row, and sum over it, where the weights take them
};

// What a lane's experts are chosen by, the larger the sooner. x, bias: load_row's. Of a biased softmax `pick` gets its parts.
DEVICE void order_row(const float* logits, const float (&x)[PER_LANE], const float (&bias)[PER_LANE], int lane,
                      u32 (&order)[PER_LANE], Pick& pick) {
#pragma unroll
    for (int j = 0; j < PER_LANE; j++)
        order[j] = lane * PER_LANE + j < EXPERTS ? order_of(x[j]) : 0;
    if constexpr (BIAS && !SIGMOID) {
        pick.top = largest_of(order);
        pick.of_all = sum_of_all(logits, pick.top, lane);
    }
    if constexpr (BIAS || SIGMOID)
#pragma unroll
        for (int j = 0; j < PER_LANE; j++) {
            const float score = SIGMOID ? sigmoid(x[j]) : exponential(x[j] - pick.top) / pick.of_all;
            order[j] = lane * PER_LANE + j < EXPERTS ? order_of(BIAS ? score + bias[j] : score) : 0;
        }
}

// The expert that so many others are chosen before, by a warp.
DEVICE i32 expert_of_rank(const u32 (&order)[PER_LANE], int rank, int lane) {
    Queue queue(order);
#pragma unroll 1
    for (int a = 0;; a++) {
        const u32 best = __reduce_max_sync(FULL_WARP, queue.best());
        const int holder = __ffs((int)__ballot_sync(FULL_WARP, queue.best() == best)) - 1; // ties go to the lower lane
        if (a == rank)
            return __shfl_sync(FULL_WARP, lane * PER_LANE + queue.place(), holder);
        if (lane == holder)
            queue.pop();
    }
}

// One row by one warp. x, bias: load_row's. picked [USED]: shared memory, gets the experts.
DEVICE Pick pick_row(const float* logits, const float (&x)[PER_LANE], const float (&bias)[PER_LANE], const i32* imposed,
                     int lane, i32* picked) {
    u32 order[PER_LANE], mine = 0; // of the expert of rank `lane`
    Pick pick = {0, 0.0f, 0.0f, 0.0f};
    order_row(logits, x, bias, lane, order, pick);
    if (imposed) {
        if constexpr (!BIAS && !SIGMOID)
            pick.top = largest_of(order);
        pick.expert = imposed[lane < USED ? lane : 0];
        mine = order_of(logits[pick.expert]);
        if (lane < USED)
            picked[lane] = pick.expert;
    } else {
        Queue queue(order);
#pragma unroll 1
        for (int a = 0; a < USED; a++) {
            const u32 best = __reduce_max_sync(FULL_WARP, queue.best());
            const u32 holders = __ballot_sync(FULL_WARP, queue.best() == best);
            if (lane == a)
                mine = best;
            if (queue.best() == best && (holders & ((1u << lane) - 1)) == 0) { // ties go to the lower lane
                picked[a] = lane * PER_LANE + queue.place();
                queue.pop();
            }
        }
        __syncwarp();
        pick.expert = picked[lane < USED ? lane : 0];
        if constexpr (!BIAS && !SIGMOID) {
            const u32 best = __shfl_sync(FULL_WARP, mine, 0);
            pick.top = best > 1 ? value_of(best) : NEGATIVE_INFINITY;
        }
    }
    pick.logit = BIAS || SIGMOID ? logits[pick.expert] : value_of(mine);
    return pick;
}

// The weight of a lane's expert.
DEVICE float weigh_row(const float* logits, const Pick& pick, const Weighing& rule, int lane) {
    const float p = SIGMOID ? sigmoid(pick.logit) : exponential(pick.logit - pick.top);
    float weight = p;
    if (rule.renormalize) {
        float total = __shfl_sync(FULL_WARP, p, 0);
#pragma unroll
        for (int a = 1; a < USED; a++)
            total = total + __shfl_sync(FULL_WARP, p, a);
        weight = __fdiv_rn(p, SIGMOID && total < LEAST_SUM ? LEAST_SUM : total);
    } else if constexpr (!SIGMOID) {
        weight = __fdiv_rn(p, BIAS ? pick.of_all : sum_of_all(logits, pick.top, lane));
    }
    if constexpr (SCALED) {
        weight = weight * rule.scale;
        if (rule.expert_scale)
            weight = weight * rule.expert_scale[pick.expert];
    }
    return weight;
}

// A head of Q, K or V on its way into attention, by a warp: norm, rotation, a place in the cache. Twins:
// `attention_input` after its products, `_rotate` and `_store` of engine/ops/reference.py, bit for bit.
//
// -DHEAD_DIM=128 (any, to 512). A lane has the elements i = lane, lane + 32, ...
#pragma once

#include "arithmetic.cuh"
#include "kv_types.cuh"

constexpr i32 PER_LANE = (HEAD_DIM + WARP - 1) / WARP;
constexpr i32 PAIRS_PER_LANE = (HEAD_DIM / 2 + WARP - 1) / WARP;

// The loop below is over what is one lane's.
#define FOR_ELEMENTS(j, i) \
    _Pragma("unroll") for (i32 j = 0, i = threadIdx.x % WARP; j < PER_LANE; j++, i += WARP) if (i < HEAD_DIM)

// Half the columns of a row of the table of rotations, [n_pos, 2, half].
struct Rotation {
    float cosine[PAIRS_PER_LANE], sine[PAIRS_PER_LANE];
};

DEVICE void load_head(float (&x)[PER_LANE], const float* from) { FOR_ELEMENTS(j, i) x[j] = from[i]; }

DEVICE Rotation load_rotation(const float* rope, i32 half, i32 position) {
    const float* const table = rope + (i64)position * 2 * half;
    Rotation made;
#pragma unroll
    for (i32 j = 0, i = threadIdx.x % WARP; j < PAIRS_PER_LANE; j++, i += WARP)
        if (i < half) {
            made.cosine[j] = table[i];
            made.sine[j] = table[half + i];
        }
    return made;
}

DEVICE void norm_head(float (&x)[PER_LANE], const float (&weight)[PER_LANE], float eps) {
    float acc = 0.0f; // dot32(x, x)
    FOR_ELEMENTS(j, i) acc = __fmaf_rn(x[j], x[j], acc);
    const float scale = norm_scale(fold(acc), HEAD_DIM, eps);
    FOR_ELEMENTS(j, i) x[j] = (x[j] * scale) * weight[j];
}

// The rotated head is left at exchange(i), a place in shared memory for each element, for the whole warp.
template <class Exchange>
DEVICE void rotate_head(const float (&x)[PER_LANE], const Rotation& by, i32 half, Exchange exchange) {
    FOR_ELEMENTS(j, i) exchange(i) = x[j];
    __syncwarp();
#pragma unroll
    for (i32 j = 0, i = threadIdx.x % WARP; j < PAIRS_PER_LANE; j++, i += WARP)
        if (i < half) {
            const float a = exchange(i), b = exchange(half + i);
            exchange(i) = __fmaf_rn(a, by.cosine[j], -(b * by.sine[j]));
            exchange(half + i) = __fmaf_rn(b, by.cosine[j], a * by.sine[j]);
        }
    __syncwarp();
}

// Into a row of the cache [n_slots * K, HEAD_DIM].
template <i32 type>
DEVICE void store_head(const float (&x)[PER_LANE], i64 row, u16* cache, u16* scales) {
    if constexpr (type == KV_F16) {
        FOR_ELEMENTS(j, i) cache[row * HEAD_DIM + i] = float_to_half(x[j]);
    } else {
        FOR_ELEMENTS(j, i) {
            float d;
            i32 sum;
            if constexpr (type == KV_Q8_0) {
                ((i8*)cache)[row * HEAD_DIM + i] = (i8)quantize_one(x[j], d, sum);
            } else {
                const u32 q = quantize_nibble(x[j], d), above = __shfl_down_sync(FULL_WARP, q, 16);
                if (i % WARP < 16)
                    ((u8*)cache)[row * (HEAD_DIM / 2) + i / WARP * 16 + i % WARP] = (u8)(q | above << 4);
            }
            if (i % WARP == 0)
                scales[row * PER_LANE + j] = float_to_half(d);
        }
    }
}

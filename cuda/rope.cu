// Norm of each query and key head, rotation, and the keys and values into the cache. Twins: `attention_input` after its
// products, `_rotate` and `_store` of engine/ops/reference.py, bit for bit.
//
// -DHEAD_DIM=128 (any, to 512), -DK_TYPE, -DV_TYPE (kv_types.cuh). A warp a head: grid
// (ceil((H + 2 K) / 4), T), blocks of 128 threads. q_raw [T, H, HEAD_DIM], k_raw and v_raw [T, K, HEAD_DIM] (may be the
// same; with K = 0 only queries), q [T, H, HEAD_DIM] float; q_norm, k_norm, v_norm [HEAD_DIM] or null; rope
// [n_pos, 2, half], half up to HEAD_DIM / 2; k, v
// [n_slots, K, HEAD_DIM] halves, bytes or nibbles, k_scale, v_scale [n_slots, K, HEAD_DIM / 32] halves but for f16.
// Elements are aligned to their own size. A token whose slot is negative stores nothing. May overlap the kernel ahead of it, which
// writes the raw heads and neither positions nor slots.
#include "arithmetic.cuh"
#include "kv_types.cuh"

constexpr i32 HEADS = 4; // of a block
constexpr i32 PER_LANE = (HEAD_DIM + WARP - 1) / WARP;
constexpr i32 PAIRS_PER_LANE = (HEAD_DIM / 2 + WARP - 1) / WARP;

// The loops below are over what is one lane's.
#define FOR_ELEMENTS(j, i) \
    _Pragma("unroll") for (i32 j = 0, i = threadIdx.x % WARP; j < PER_LANE; j++, i += WARP) if (i < HEAD_DIM)

// One head of a token into the cache.
template <i32 type>
DEVICE void store_head(const float (&x)[PER_LANE], i64 row, u16* cache, u16* scales) {
    if constexpr (type == KV_F16) {
        FOR_ELEMENTS(j, i) cache[row * HEAD_DIM + i] = float_to_half(x[j]);
    } else {
        FOR_ELEMENTS(j, i) {
            float d;
            i32 sum;
            if constexpr (type == KV_Q8_0) {
                ((i8*)cache)[row * HEAD_DIM + i] = (i8)quantize(x[j], d, sum);
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

KERNEL __launch_bounds__(HEADS* WARP)
attention_input(const float* q_raw, const float* k_raw, const float* v_raw, const float* q_norm, const float* k_norm,
                const float* v_norm, float eps, const float* rope, i32 half, const i32* positions, const i32* slots,
                i32 H, i32 K, float* q, u16* k, u16* v, u16* k_scale, u16* v_scale) {
    dependency_release();
    __shared__ float heads[HEADS][HEAD_DIM];
    const i32 lane = threadIdx.x % WARP, head = blockIdx.x * HEADS + threadIdx.x / WARP;
    const i64 t = blockIdx.y;
    if (head >= H + 2 * K)
        return;
    const bool is_query = head < H, is_key = head >= H && head < H + K;
    const float* const from = is_query ? q_raw + (t * H + head) * HEAD_DIM
                              : is_key ? k_raw + (t * K + head - H) * HEAD_DIM
                                       : v_raw + (t * K + head - H - K) * HEAD_DIM;
    const i32 slot = K ? slots[t] : -1, position = positions[t];
    float x[PER_LANE];
    const auto normalize = [&](const float (&weight)[PER_LANE]) {
        float acc = 0.0f; // dot32(x, x)
        FOR_ELEMENTS(j, i) acc = __fmaf_rn(x[j], x[j], acc);
        const float scale = norm_scale(fold(acc), HEAD_DIM, eps);
        FOR_ELEMENTS(j, i) x[j] = (x[j] * scale) * weight[j];
    };
    if (!is_query && !is_key) {
        float weight[PER_LANE];
        if (v_norm)
            FOR_ELEMENTS(j, i) weight[j] = v_norm[i];
        dependency_wait();
        FOR_ELEMENTS(j, i) x[j] = from[i];
        if (v_norm)
            normalize(weight);
        if (slot >= 0)
            store_head<V_TYPE>(x, (i64)slot * K + head - H - K, v, v_scale);
        return;
    }

    const float* const norm = is_query ? q_norm : k_norm;
    const float* const table = rope + (i64)position * 2 * half;
    float weight[PER_LANE], cosine[PAIRS_PER_LANE], sine[PAIRS_PER_LANE];
    if (norm)
        FOR_ELEMENTS(j, i) weight[j] = norm[i];
#pragma unroll
    for (i32 j = 0, i = lane; j < PAIRS_PER_LANE; j++, i += WARP)
        if (i < half) {
            cosine[j] = table[i];
            sine[j] = table[half + i];
        }
    dependency_wait();
    FOR_ELEMENTS(j, i) x[j] = from[i];
    if (norm)
        normalize(weight);
    float* const exchange = heads[threadIdx.x / WARP];
    FOR_ELEMENTS(j, i) exchange[i] = x[j];
    __syncwarp();
#pragma unroll
    for (i32 j = 0, i = lane; j < PAIRS_PER_LANE; j++, i += WARP)
        if (i < half) {
            const float a = exchange[i], b = exchange[half + i];
            exchange[i] = __fmaf_rn(a, cosine[j], -(b * sine[j]));
            exchange[half + i] = __fmaf_rn(b, cosine[j], a * sine[j]);
        }
    __syncwarp();
    FOR_ELEMENTS(j, i) x[j] = exchange[i];
    if (is_query) {
        FOR_ELEMENTS(j, i) q[(t * H + head) * HEAD_DIM + i] = x[j];
    } else if (slot >= 0) {
        store_head<K_TYPE>(x, (i64)slot * K + head - H, k, k_scale);
    }
}

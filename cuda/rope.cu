// Norm of each query and key head, rotation, and the keys and values into the cache (heads.cuh).
//
// -DHEAD_DIM=128 (any, to 512), -DK_TYPE, -DV_TYPE (kv_types.cuh). A warp a head: grid
// (ceil((H + 2 K) / 4), T), blocks of 128 threads. q_raw [T, H, HEAD_DIM], k_raw and v_raw [T, K, HEAD_DIM] (may be the
// same; with K = 0 only queries), q [T, H, HEAD_DIM] float; q_norm, k_norm, v_norm [HEAD_DIM] or null; rope
// [n_pos, 2, half], half up to HEAD_DIM / 2; k, v
// [n_slots, K, HEAD_DIM] halves, bytes or nibbles, k_scale, v_scale [n_slots, K, HEAD_DIM / 32] halves but for f16.
// Elements are aligned to their own size. A token whose slot is negative stores nothing. May overlap the kernel ahead of it, which
// writes the raw heads and neither positions nor slots.
#include "heads.cuh"

constexpr i32 HEADS = 4; // of a block

KERNEL __launch_bounds__(HEADS* WARP)
attention_input(const float* q_raw, const float* k_raw, const float* v_raw, const float* q_norm, const float* k_norm,
                const float* v_norm, float eps, const float* rope, i32 half, const i32* positions, const i32* slots,
                i32 H, i32 K, float* q, u16* k, u16* v, u16* k_scale, u16* v_scale) {
    dependency_release();
    __shared__ float heads[HEADS][HEAD_DIM];
    const i32 head = blockIdx.x * HEADS + threadIdx.x / WARP;
    const i64 t = blockIdx.y;
    if (head >= H + 2 * K)
        return;
    const bool is_query = head < H, is_key = head >= H && head < H + K;
    const float* const from = is_query ? q_raw + (t * H + head) * HEAD_DIM
                              : is_key ? k_raw + (t * K + head - H) * HEAD_DIM
                                       : v_raw + (t * K + head - H - K) * HEAD_DIM;
    const i32 slot = K ? slots[t] : -1, position = positions[t];
    float x[PER_LANE], weight[PER_LANE];
    if (!is_query && !is_key) {
        if (v_norm)
            load_head(weight, v_norm);
        dependency_wait();
        load_head(x, from);
        if (v_norm)
            norm_head(x, weight, eps);
        if (slot >= 0)
            store_head<V_TYPE>(x, (i64)slot * K + head - H - K, v, v_scale);
        return;
    }

    const float* const norm = is_query ? q_norm : k_norm;
    if (norm)
        load_head(weight, norm);
    const Rotation rotation = load_rotation(rope, half, position);
    dependency_wait();
    load_head(x, from);
    if (norm)
        norm_head(x, weight, eps);
    float* const exchange = heads[threadIdx.x / WARP];
    rotate_head(x, rotation, half, [&](i32 i) -> float& { return exchange[i]; });
    load_head(x, exchange);
    if (is_query) {
        FOR_ELEMENTS(j, i) q[(t * H + head) * HEAD_DIM + i] = x[j];
    } else if (slot >= 0) {
        store_head<K_TYPE>(x, (i64)slot * K + head - H, k, k_scale);
    }
}

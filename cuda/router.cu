// The normed residual, its quantized form and the router's logits. Twin: router.
//
// Row t of h [T, D] = norm of row t of x [T, D], D = COLS; logits [T, E] = gate [E, D] of h, gate of the float type
// TYPE; where q is given also q [T, D], d and sums [T, D / 32] of h (D a multiple of 32). Grid (E / warps rounded
// up, T): a block has one row of the gate a warp, repeats the norm and writes its share of h. Shared memory: twice D
// floats, D rounded up to 4, then stage_bytes a warp, at least a row of the gate and 32. Arrays are 16-byte aligned.
#include "rows.cuh"

KERNEL router(const float* x, const float* norm, float eps, const u8* gate, i32 E, float* h, float* logits, i8* q,
              float* d, i32* sums, i32 stage_bytes) {
    DYNAMIC_SHARED(u8, shared);
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n_warps = blockDim.x / WARP;
    constexpr i32 D = COLS;
    const i64 t = blockIdx.y;
    const i32 expert = blockIdx.x * n_warps + warp;
    const i32 row_bytes = row_bytes_of(TYPE, D);
    float* const xs = (float*)shared;
    float* const norms = xs + (D + 3) / 4 * 4;
    u8* const stage = (u8*)(norms + (D + 3) / 4 * 4) + warp * stage_bytes;
    dependency_release();
    copy_floats(norms, norm, D);
    copies_commit();
    i32 offset = 0;
    if (expert < E)
        offset = stage_rows<COLS * 4>(stage, gate + (i64)expert * row_bytes, row_bytes);
    copies_commit();
    dependency_wait();
    if constexpr (D % 4 == 0) {
#pragma unroll 8
        for (i32 i = 4 * threadIdx.x; i < D; i += 4 * blockDim.x)
            *(float4*)(xs + i) = *(const float4*)(x + t * D + i);
    } else {
        for (i32 i = threadIdx.x; i < D; i += blockDim.x)
            xs[i] = x[t * D + i];
    }
    copies_wait<1>();
    __syncthreads();
    const float scale = norm_scale(square_sum(xs, D), D, eps);
    const i32 n_shares = gridDim.x * n_warps;
    if (q) {
        const Input to = global_input(nullptr, q + t * D, d + t * (D / 32), sums + t * (D / 32));
        quantize_row(to, xs, norms, scale, h + t * D, D, expert, n_shares);
    } else {
        for (i32 i = expert * WARP + lane; i < D; i += n_shares * WARP)
            h[t * D + i] = (xs[i] * scale) * norms[i];
    }
    if (expert >= E)
        return;
    stage_wait<0>();
    float acc = 0.0f;
#pragma unroll 8
    for (i32 i = lane; i < D; i += WARP)
        acc = __fmaf_rn(weight_of<TYPE>(stage + offset, i), (xs[i] * scale) * norms[i], acc);
    const float logit = fold(acc);
    if (lane == 0)
        logits[t * E + expert] = logit;
}

// The normed residual, its quantized form and the router's logits. Twin: router.
//
// Row t of h [T, D] = norm of row t of x [T, D], D = COLS; logits [T, E] = gate [E, D] of h, gate of the float type
// TYPE; where q is given also q [T, D], d and sums [T, D / 32] of h (D a multiple of 32). Unit i < E has row i of the
// gate, the others 128 elements of h each. Arrays are 16-byte aligned.
//
// Kernels.
//   router           a warp a unit, and every warp repeats the norm, so that none waits for another: for one token
//                    grid ((E + D / 128 rounded up) / warps rounded up, T), block at most 4 warps
//   router_several   a block's warps share the norms of TOKENS rows, and load their rows of the gate once for all of them
//                    grid (units / WARPS, T / TOKENS, both rounded up), block WARPS warps; shared memory (1 + TOKENS) * D
//                    floats, of each row D rounded up to a multiple of 4
#include "rows.cuh"

constexpr i32 D = COLS;
constexpr i32 STEPS = (D + WARP - 1) / WARP;
constexpr i32 HELD = STEPS < 64 ? STEPS : 64; // elements a lane keeps in registers of each row

template <class T>
DEVICE float element(const T& row, i32 step) {
    const i32 i = step * WARP + threadIdx.x % WARP;
    return D % WARP == 0 || i < D ? row(i) : 0.0f; // a term of +0 leaves a lane's sum as it is
}

#ifndef WARPS

KERNEL __launch_bounds__(128) router(const float* x, const float* norm, float eps, const u8* gate, i32 E, float* h,
                                     float* logits, i8* q, float* d, i32* sums, u64* settled) {
    const i32 lane = threadIdx.x % WARP, warp = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    const i64 t = blockIdx.y;
    const u8* const weights = gate + (i64)min(warp, E - 1) * row_bytes_of(TYPE, D);
    x += t * D;
    auto xs = [&](i32 i) { return x[i]; };
    auto norms = [&](i32 i) { return norm[i]; };
    auto ws = [&](i32 i) { return weight_of<TYPE>(weights, i); };
    dependency_release();
    const i32 mine = 128 * (warp - E) + 4 * lane; // the first of the four elements that a lane quantizes
    const bool quantizes = q && warp >= E;
    const float4 four_norm = four_of(quantizes ? norm : nullptr, D, mine);
    float held_x[HELD], held_norm[HELD], held_w[HELD];
#pragma unroll
    for (i32 i = 0; i < HELD; i++) {
        held_norm[i] = element(norms, i);
        held_w[i] = element(ws, i);
    }
    dependency_wait();
    if (settled && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0)
        *settled = 0;
    const float4 four = four_of(quantizes ? x : nullptr, D, mine);
#pragma unroll
    for (i32 i = 0; i < HELD; i++)
        held_x[i] = element(xs, i);
    float acc = 0.0f;
#pragma unroll
    for (i32 i = 0; i < HELD; i++)
        acc = __fmaf_rn(held_x[i], held_x[i], acc);
#pragma unroll 8
    for (i32 i = HELD; i < STEPS; i++) {
        const float v = element(xs, i);
        acc = __fmaf_rn(v, v, acc);
    }
    const float scale = norm_scale(fold(acc), D, eps);

    if (warp < E) {
        acc = 0.0f;
#pragma unroll
        for (i32 i = 0; i < HELD; i++)
            acc = __fmaf_rn(held_w[i], (held_x[i] * scale) * held_norm[i], acc);
#pragma unroll 8
        for (i32 i = HELD; i < STEPS; i++)
            acc = __fmaf_rn(element(ws, i), (element(xs, i) * scale) * element(norms, i), acc);
        const float logit = fold(acc);
        if (lane == 0)
            logits[t * E + warp] = logit;
    } else if (quantizes) {
        const Input to = global_input(nullptr, q + t * D, d + t * (D / 32), sums + t * (D / 32));
        quantize_four(to, four, true, four_norm, scale, h + t * D, D, mine);
    } else {
        const i32 first = 128 * (warp - E);
        for (i32 i = first + lane; i < min(first + 128, D); i += WARP)
            h[t * D + i] = (x[i] * scale) * norm[i];
    }
}

#else

KERNEL __launch_bounds__(WARPS * WARP, 3)
    router_several(const float* x, const float* norm, float eps, const u8* gate, i32 E, float* h, float* logits, i8* q,
                   float* d, i32* sums, u64* settled, i32 T) {
    DYNAMIC_SHARED(float, norms);
    __shared__ float scales[TOKENS];
    constexpr i32 PADDED = (D + 3) / 4 * 4;
    float* const rows = norms + PADDED;
    const i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, unit = blockIdx.x * WARPS + warp;
    const i32 t0 = blockIdx.y * TOKENS, n = min(TOKENS, T - t0);
    const u8* const weights = gate + (i64)min(unit, E - 1) * row_bytes_of(TYPE, D);
    auto ws = [&](i32 i) { return weight_of<TYPE>(weights, i); };
    copy_floats(norms, norm, D);
    copies_commit();
    float held_w[HELD];
#pragma unroll
    for (i32 i = 0; i < HELD; i++)
        held_w[i] = element(ws, i);
    dependency_wait();
    if (settled && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0)
        *settled = 0;
    dependency_release(); // late: ptx.cuh
    for (i32 j = 0; j < n; j++)
        copy_floats(rows + j * PADDED, x + (i64)(t0 + j) * D, D);
    copies_commit();
    copies_wait<0>();
    __syncthreads();
    for (i32 j = warp; j < n; j += WARPS) { // a warp a row: others would only compete with it
        const float scale = norm_scale(square_sum<16>(rows + j * PADDED, D), D, eps);
        if (lane == 0)
            scales[j] = scale;
    }
    __syncthreads();
    const i32 first = 128 * (unit - E); // of the elements that a warp without a row of the gate writes
    for (i32 j = 0; j < n && unit >= E; j++) {
        const float* const row = rows + j * PADDED;
        const i64 t = t0 + j;
        if (q && first < D) {
            const Input to = global_input(nullptr, q + t * D, d + t * (D / 32), sums + t * (D / 32));
            quantize_four(to, four_of(row, D, first + 4 * lane), true, four_of(norms, D, first + 4 * lane), scales[j],
                          h + t * D, D, first + 4 * lane);
        } else if (!q) {
            for (i32 i = first + lane; i < min(first + 128, D); i += WARP)
                h[t * D + i] = (row[i] * scales[j]) * norms[i];
        }
    }
    // The block's warps share the normed rows, too.
    if (blockIdx.x * WARPS >= E)
        return;
    __syncthreads();
    for (i32 j = 0; j < n; j++)
        for (i32 i = threadIdx.x; i < D; i += WARPS * WARP)
            rows[j * PADDED + i] = (rows[j * PADDED + i] * scales[j]) * norms[i];
    __syncthreads();
    if (unit >= E)
        return;
    float acc[TOKENS] = {};
    auto take = [&](float w, i32 step) {
#pragma unroll
        for (i32 j = 0; j < TOKENS; j++) { // beyond the last row, the last again
            const float* const row = rows + min(j, n - 1) * PADDED;
            acc[j] = __fmaf_rn(w, element([&](i32 i) { return row[i]; }, step), acc[j]);
        }
    };
#pragma unroll
    for (i32 i = 0; i < HELD; i++)
        take(held_w[i], i);
#pragma unroll 8
    for (i32 i = HELD; i < STEPS; i++)
        take(element(ws, i), i);
#pragma unroll
    for (i32 j = 0; j < TOKENS; j++) {
        const float logit = fold(acc[j]);
        if (lane == 0 && j < n)
            logits[(i64)(t0 + j) * E + unit] = logit;
    }
}

#endif

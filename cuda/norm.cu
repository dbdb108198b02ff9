// RMS norm and quantization of activations. Twins: rms_norm, quantize_activations, add_norm, softcap.
//
// rms_norm: row t of h [T, n], and where q is given q [T, n], d and sums [T, n / 32], from row rows[t] (or t, where
// rows is null) of x. Grid T, block a multiple of 32, shared memory twice n floats, n rounded up to 4. n is a
// multiple of 32 where q is given.
// quantize: q, d, sums of x [T, n] taken as one row of n_elements (a multiple of 32); 128 elements a warp. Rows of
// floats are 16-byte aligned.
// add_norm: x [T, n] = (x + the RMS norm of y [T, n]) * scale; then h0 and h1 [T, n], where they are given, are RMS norms
// of x, in 8 bits besides as rms_norm has it. Grid T, block a multiple of 32, shared memory twice n floats, n rounded up
// to 4.
// add_norms: x [T, n] = (x + the RMS norm of the sum of those of a and b [T, n]) * scale. Grid T, block a multiple of 64,
// shared memory five times n floats, n rounded up to 4.
// softcap_all: x [n] = cap * tanh(x / cap). An element a thread.
#include "rows.cuh"

// The scale of a row's norm, by a block, behind a barrier; n floats in shared memory. By a warp: others would only compete.
DEVICE float scale_of(const float* row, i32 n, float eps) {
    __shared__ float found;
    if (threadIdx.x < WARP) {
        const float made = norm_scale(square_sum<32>(row, n), n, eps);
        if (threadIdx.x == 0)
            found = made;
    }
    __syncthreads();
    return found;
}

KERNEL rms_norm(const float* x, const i32* rows, const float* weight, float eps, i32 n, float* h, i8* q, float* d,
            i32* sums) {
    DYNAMIC_SHARED(float, xs);
    float* const weights = xs + (n + 3) / 4 * 4;
    const i64 t = blockIdx.x;
    dependency_release();
    copy_floats(weights, weight, n);
    dependency_wait();
    copy_floats(xs, x + (rows ? rows[t] : t) * (i64)n, n);
    copies_commit();
    copies_wait<0>();
    __syncthreads();
    const float scale = scale_of(xs, n, eps);
    if (q) {
        const Input to = global_input(nullptr, q + t * n, d + t * (n / 32), sums + t * (n / 32));
        quantize_row(to, xs, weights, scale, h ? h + t * n : nullptr, n, threadIdx.x / WARP, blockDim.x / WARP);
    } else {
        for (i32 i = threadIdx.x; i < n; i += blockDim.x)
            h[t * n + i] = (xs[i] * scale) * weights[i];
    }
}

KERNEL quantize(const float* x, i32 n_elements, i8* q, float* d, i32* sums) {
    const i32 n_warps = blockDim.x / WARP;
    dependency_release();
    dependency_wait();
    quantize_row(global_input(nullptr, q, d, sums), x, nullptr, 1.0f, nullptr, n_elements,
                 blockIdx.x * n_warps + threadIdx.x / WARP, gridDim.x * n_warps);
}

KERNEL add_norm(const float* y, const float* weight, float eps, i32 n, float* x, float scale, const float* weight0,
                float* h0, i8* q0, float* d0, i32* sums0, const float* weight1, float* h1, i8* q1, float* d1, i32* sums1) {
    DYNAMIC_SHARED(float, ys);
    float* const weights = ys + (n + 3) / 4 * 4;
    const i64 t = blockIdx.x;
    dependency_release();
    copy_floats(weights, weight, n);
    dependency_wait();
    copy_floats(ys, y + t * n, n);
    copies_commit();
    copies_wait<0>();
    __syncthreads();
    const float of_norm = scale_of(ys, n, eps);
    for (i32 i = threadIdx.x; i < n; i += blockDim.x)
        x[t * n + i] = weights[i] = (x[t * n + i] + (ys[i] * of_norm) * weights[i]) * scale;
    if (!h0)
        return;
    __syncthreads();
    const float* const sum = weights;
    const float of_sum = scale_of(sum, n, eps);
    const i32 warp = threadIdx.x / WARP, n_warps = blockDim.x / WARP;
    auto write = [&](const float* w, float* h, i8* q, float* d, i32* sums) {
        if (q)
            quantize_row(global_input(nullptr, q + t * n, d + t * (n / 32), sums + t * (n / 32)), sum, w, of_sum,
                         h + t * n, n, warp, n_warps);
        else
            for (i32 i = threadIdx.x; i < n; i += blockDim.x)
                h[t * n + i] = (sum[i] * of_sum) * w[i];
    };
    write(weight0, h0, q0, d0, sums0);
    if (h1)
        write(weight1, h1, q1, d1, sums1);
}

KERNEL add_norms(const float* a, const float* weight_a, const float* b, const float* weight_b, const float* weight,
                 float eps, i32 n, float* x, float scale) {
    DYNAMIC_SHARED(float, as);
    __shared__ float scales[2];
    const i32 padded = (n + 3) / 4 * 4;
    float *const bs = as + padded, *const was = bs + padded, *const wbs = was + padded, *const ws = wbs + padded;
    const i64 t = blockIdx.x;
    dependency_release();
    copy_floats(was, weight_a, n);
    copy_floats(wbs, weight_b, n);
    copy_floats(ws, weight, n);
    dependency_wait();
    copy_floats(as, a + t * n, n);
    copy_floats(bs, b + t * n, n);
    copies_commit();
    copies_wait<0>();
    __syncthreads();
    if (threadIdx.x < 2 * WARP) { // a warp for each
        const bool second = threadIdx.x >= WARP;
        const float of = norm_scale(square_sum(second ? bs : as, n), n, eps);
        if (threadIdx.x % WARP == 0)
            scales[second] = of;
    }
    __syncthreads();
    for (i32 i = threadIdx.x; i < n; i += blockDim.x)
        as[i] = (as[i] * scales[0]) * was[i] + (bs[i] * scales[1]) * wbs[i];
    __syncthreads();
    const float of_sum = scale_of(as, n, eps);
    for (i32 i = threadIdx.x; i < n; i += blockDim.x)
        x[t * n + i] = (x[t * n + i] + (as[i] * of_sum) * ws[i]) * scale;
}

KERNEL softcap_all(float* x, i64 n, float cap) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    dependency_release();
    dependency_wait();
    if (i < n)
        x[i] = softcap(x[i], cap);
}

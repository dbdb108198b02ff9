// RMS norm and quantization of activations. Twins: rms_norm, quantize_activations.
//
// rms_norm: row t of h [T, n], and where q is given q [T, n], d and sums [T, n / 32], from row rows[t] (or t, where
// rows is null) of x. Grid T, block a multiple of 32, shared memory twice n floats, n rounded up to 4. n is a
// multiple of 32 where q is given.
// quantize: q, d, sums of x [T, n] taken as one row of n_elements (a multiple of 32); 128 elements a warp. Rows of
// floats are 16-byte aligned.
#include "rows.cuh"

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
    const float scale = norm_scale(square_sum(xs, n), n, eps);
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

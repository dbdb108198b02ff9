// A routing replay: recorded expert choices take the place of the router's, for benchmarks and tests.
//
// replay   choices int16 [n_tokens, n], n = L * A; imposed int32 [n] gets row `counter % n_tokens`, and the counter
//          moves on unless the step is a no-op. One block, any number of threads.
#include "ptx.cuh"

KERNEL replay(const i16* choices, int n_tokens, int n, const i32* active_step, i32* counter, i32* imposed) {
    const int row = *counter % n_tokens;
    const bool active = active_step == nullptr || *active_step != 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        imposed[i] = choices[(i64)row * n + i];
    __syncthreads();
    if (threadIdx.x == 0 && active)
        *counter = (row + 1) % n_tokens;
}

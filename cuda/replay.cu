// A routing replay: recorded expert choices take the place of the router's, for benchmarks and tests.
//
// replay   choices int16 [n_tokens, L, A], width = A; imposed int32 [L, most, A] gets rows `counter + t` % n_tokens for
//          its first n_rows t of every layer, n = L * A, and the counter moves on by `moves` unless the step is a no-op.
//          One block, any number of threads.
// replay_back: the counter goes back by n rows of n_tokens, n at most as many.
#include "ptx.cuh"

KERNEL replay(const i16* choices, int n_tokens, int n, int width, int n_rows, int moves, int most, const i32* active_step,
              i32* counter, i32* imposed) {
    const int row = *counter % n_tokens;
    const bool active = active_step == nullptr || *active_step != 0;
    for (int i = threadIdx.x; i < n * n_rows; i += blockDim.x) {
        const int t = i / n, layer = i % n / width;
        imposed[(layer * most + t) * width + i % width] = choices[(i64)((row + t) % n_tokens) * n + i % n];
    }
    __syncthreads();
    if (threadIdx.x == 0 && active)
        *counter = (row + moves) % n_tokens;
}

KERNEL replay_back(int n_tokens, int n, i32* counter) {
    *counter = (*counter + n_tokens - n) % n_tokens;
}

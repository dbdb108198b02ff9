// Integers of all threads of a block: sums, sums before a thread, the largest; and the last block of a grid.
#pragma once

#include "ptx.cuh"

DEVICE u64 warp_sum(u64 v) {
#pragma unroll
    for (int o = 16; o; o /= 2)
        v += __shfl_xor_sync(FULL_WARP, v, o);
    return v;
}

// Every thread gets the sum. `turn` alternates between two sets of partial sums, so that one barrier is enough.
DEVICE u64 block_sum(u64 v, int& turn) {
    __shared__ u64 partial[2][WARP];
    v = warp_sum(v);
    u64* const sums = partial[turn];
    turn ^= 1;
    if (threadIdx.x % WARP == 0)
        sums[threadIdx.x / WARP] = v;
    __syncthreads();
    u64 total = 0;
    for (int w = 0; w < (int)blockDim.x / WARP; w++)
        total += sums[w];
    return total;
}

DEVICE u64 warp_max(u64 v) {
    const u32 high = __reduce_max_sync(FULL_WARP, (u32)(v >> 32));
    return (u64)high << 32 | __reduce_max_sync(FULL_WARP, (u32)(v >> 32) == high ? (u32)v : 0u);
}

// Every thread gets the maximum; `turn` as for `block_sum`.
DEVICE u64 block_max(u64 v, int& turn) {
    __shared__ u64 partial[2][WARP];
    v = warp_max(v);
    u64* const tops = partial[turn];
    turn ^= 1;
    if (threadIdx.x % WARP == 0)
        tops[threadIdx.x / WARP] = v;
    __syncthreads();
    u64 top = 0;
    for (int w = 0; w < (int)blockDim.x / WARP; w++)
        top = max(top, tops[w]);
    return top;
}

// The sum over the threads before this one; `total` gets that over all.
DEVICE u64 block_scan(u64 v, u64& total) {
    __shared__ u64 sums[WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u64 upto = v;
#pragma unroll
    for (int o = 1; o < WARP; o *= 2) {
        const u64 other = __shfl_up_sync(FULL_WARP, upto, o);
        upto += lane >= o ? other : 0;
    }
    __syncthreads();
    if (lane == WARP - 1)
        sums[warp] = upto;
    __syncthreads();
    u64 before = 0;
    total = 0;
    for (int w = 0; w < (int)blockDim.x / WARP; w++) {
        before += w < warp ? sums[w] : 0;
        total += sums[w];
    }
    return before + upto - v;
}

// Whether this is the last block of the grid to come here; it then sees what the others wrote before. done: 0, and left so.
DEVICE bool is_last_block(u64* done) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)
        last = atomicAdd(done, (u64)1) == gridDim.x - 1;
    __syncthreads();
    if (last) {
        __threadfence();
        if (threadIdx.x == 0)
            *done = 0;
    }
    return last;
}

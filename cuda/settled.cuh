// Where a block of the kernel that reads experts chooses them (settle.cuh), a word tells the others how far it is. `router`
// makes it 0.
#pragma once

#include "ptx.cuh"

// Tables that others read may have begun to change; tables and active table are those of the step.
enum { SETTLED_MOVES = 1, SETTLED = 2 };

// By one thread.
DEVICE void await_settled(const u64* settled) {
    while (load_told(settled) != SETTLED) {
    }
}

// By a block of the kernel behind, which began when all blocks ahead had.
DEVICE void meet_settled(const u64* settled) {
    if (threadIdx.x == 0)
        await_settled(settled);
    __syncthreads();
}

// Jobs of the CPU in a step of 2 to 32 tokens (jobs.cuh has those of one token): `route` says which of a layer's missed
// experts are the CPU's, gate_up_several hands them over or takes them back, down_several puts what comes where theirs is.
#pragma once

#include "jobs.cuh"

// Words of device memory beside those of jobs.cuh (engine/ops/cuda/several_jobs.py): addresses and sizes of places in host
// memory, of which each record has one, and of a board there; how many jobs the layer has, which are the last records of its
// active table, and how many the one before had; the longest wait of one of these for its answer. Of all layers: those that had jobs, jobs done, jobs taken
// back, and ns that layers waited. And, for each job of a layer, what JOBS_KNOWN has.
enum {
    SEVERAL_INPUTS, SEVERAL_INPUT_BYTES, SEVERAL_OUTPUTS, SEVERAL_OUTPUT_BYTES, SEVERAL_BOARD, SEVERAL_COUNT, SEVERAL_BEFORE,
    SEVERAL_LONGEST, SEVERAL_LAYERS, SEVERAL_DONE, SEVERAL_TAKEN, SEVERAL_WAITED_NS,
    SEVERAL_KNOWN = 16,
};
constexpr i32 SEVERAL_COUNTS = 4; // from SEVERAL_LAYERS on; the board has the same
constexpr i32 MOST_HANDED = 4;    // tokens of an expert that is handed over (several_jobs.py): places have room for no more

// By one thread of gate_up_several: what came of the layer before is told to the host, if it had jobs.
DEVICE void tell_layer(u64* several) {
    if (!load_fresh(several + SEVERAL_BEFORE))
        return;
    several[SEVERAL_LAYERS] = load_fresh(several + SEVERAL_LAYERS) + 1;
    several[SEVERAL_WAITED_NS] = load_fresh(several + SEVERAL_WAITED_NS) + load_fresh(several + SEVERAL_LONGEST);
    several[SEVERAL_LONGEST] = 0;
    volatile u64* const board = (volatile u64*)load_fresh(several + SEVERAL_BOARD);
    for (i32 i = 0; i < SEVERAL_COUNTS; i++)
        board[i] = load_fresh(several + SEVERAL_LAYERS + i);
}

// Control of decoding on the device: what a sampled token does to the next step. Its twin is what the host does after a
// step that decodes nothing ahead: draw, end at a stop token or the limit, or feed the token (engine/running/).
//
// `control` is an array of int32, written by Sampler.prepare (engine/ops/cuda/sampling.py names the same fields):
//   ACTIVE     1 while a request runs; 0 makes every later step a no-op (the flag that `route` looks at, too)
//   POSITION   tokens of the sequence so far: the position of the token that is drawn next
//   N_LEFT     tokens that may still be emitted
//   STEP       draws since `prepare`, EPOCH which request it is (both go to the ring)
//   N_STOP     stop tokens in `stop`
//   FREQUENCY, PRESENCE   penalties; unless both are 0, `counts` has how often each token is in the reply so far
//   N_TOP, DESCRIBED   of logprobs.cu: how many likeliest tokens are asked for; the draw that was described last
//   the rest   parameters of sampling, see sample.cu
//
// The ring is page-locked host memory, a u64 an entry; draw n = 1, 2, ... of a request is entry (n - 1) % size:
//   bits 0-31 the token, 32-33 the status, 34-42 the epoch, 43-63 n.
#pragma once

#include "ptx.cuh"

enum Control {
    ACTIVE, POSITION, N_LEFT, STEP, EPOCH, N_STOP, TOP_K, MASKED, PENALTY, TEMPERATURE, TOP_P, MIN_P = 12, SEED = 14,
    FREQUENCY = 16, PRESENCE, N_TOP, DESCRIBED
};
enum Status { RUNNING, STOPPED, LENGTH, FAILED };

#define N_CONTROL 20
#define HISTORY_TOKENS 256
#define MAX_STOP_TOKENS 1024
#define KV_BLOCK_TOKENS 64
#define STEP_PARAMETERS                                                                                              \
    i32 *control, i32 *history, i32 *counts, const i32 *stop, const i32 *block_tables, int table_stride,              \
        int table_row, int n_groups, i32 *tokens, i32 *positions, i32 *slots, int slot_stride, u8 *counted, u64 *ring, \
        int ring_size
#define STEP_ROW_PARAMETERS                                                                                          \
    i32 *&control, i32 *&history, i32 *&counts, const i32 *&stop, const i32 *&block_tables, int table_row, i32 *&tokens, \
        i32 *&positions, i32 *&slots, u8 *&counted, u64 *&ring, int ring_size
#define STEP_ROW control, history, counts, stop, block_tables, table_row, tokens, positions, slots, counted, ring, ring_size
#define STEP_ARGUMENTS                                                                                               \
    control, history, counts, stop, block_tables, table_stride, table_row, n_groups, tokens, positions, slots, \
        slot_stride, counted, ring, ring_size

// A launch may draw for several requests, a row of the grid each, from as many rows of logits: their states lie one after
// the other, and so do what they read and write of a step. The parameters become those of a request.
DEVICE void begin_row(int V, STEP_ROW_PARAMETERS) {
    const i64 row = blockIdx.y;
    control += row * N_CONTROL, history += row * HISTORY_TOKENS, counts += row * ((V + 3) / 4 * 4);
    stop += row * MAX_STOP_TOKENS, block_tables += row * table_row;
    tokens += row, positions += row, slots += row, counted += counted ? row : 0, ring += row * ring_size;
}

// Whether a penalty depends on what the reply has; both are floats, and -0 is 0.
DEVICE bool counts_reply(const i32* control) { return ((control[FREQUENCY] | control[PRESENCE]) & 0x7fffffff) != 0; }

// The whole block ends the step with a token, or with -1 where logits were not finite. KV group g has the block table
// at block_tables + g * table_stride and the slot of the token at slots + g * slot_stride. `counted`, if it is given,
// becomes 0 where nothing follows: of a row whose step goes on for others.
DEVICE void finish_step(i32 token, STEP_PARAMETERS) {
    const i32 position = control[POSITION], left = control[N_LEFT], step = control[STEP] + 1;
    const int group = threadIdx.x;
    const bool follows = group < n_groups && left > 1;
    const i32 block = follows ? block_tables[group * table_stride + position / KV_BLOCK_TOKENS] : 0;
    bool stops = false;
    for (int i = threadIdx.x; i < control[N_STOP]; i += blockDim.x)
        stops |= stop[i] == token;
    stops = __syncthreads_or(stops);
    const u32 status = token < 0 ? FAILED : stops ? STOPPED : left <= 1 ? LENGTH : RUNNING;
    const u32 epoch = (u32)control[EPOCH] & 511;
    if (group < n_groups) // a slot of -1 stores no keys
        slots[group * slot_stride] = status == RUNNING ? block * KV_BLOCK_TOKENS + position % KV_BLOCK_TOKENS : -1;
    if (threadIdx.x)
        return;
    control[STEP] = step;
    if (status == RUNNING || status == LENGTH) {
        history[position % HISTORY_TOKENS] = token;
        if (counts_reply(control))
            counts[token]++;
        control[POSITION] = position + 1;
        control[N_LEFT] = left - 1;
    }
    if (status == RUNNING) {
        tokens[0] = token;
        positions[0] = position;
    } else {
        control[ACTIVE] = 0;
        if (counted)
            *counted = 0;
    }
    store_system(ring + (step - 1) % ring_size,
                 (u64)step << 43 | (u64)epoch << 34 | (u64)status << 32 | (u32)token);
}

// How likely the token was that the sampler drew, and which were the likeliest, from the same logits [V]: two kernels
// behind those of sample.cu, for requests that ask. Twin: `likelihood` of engine/running/sampling.py, the same numbers
// (docs/arithmetic.md, "Log-probabilities"); the logarithm is the host's.
//
//   top_logits   the N_TOP largest of each block, at least one
//   log_sum      the sum of all weights; the last block merges the lists and writes the entry
//
// Grids cover V with 4 tokens a thread, blocks of 256 threads. V <= 2^20. best u64 [blocks, MAX_TOP], masses u64 [blocks],
// done u64 [1] is zero before the first step and is left so. An entry is ENTRY u64 of page-locked host memory:
//   0 draw << 43 | epoch << 34, written last   1 sum of weights   2 the drawn token's logit   3.. id | logit << 32
// A step past the end of a request draws nothing, and nothing is written.
#include "arithmetic.cuh"
#include "block.cuh"
#include "order.cuh"
#include "ptx.cuh"
#include "step.cuh"

#define PER_THREAD 4
#define THREADS 256
#define MAX_TOP 20
#define ENTRY 24
#define MAX_LISTS 4 // of a thread: 2^20 tokens
#define LOWEST -29.0f

// Whether the sampler has drawn since; then how many of the largest are to be found.
DEVICE bool is_due(const i32* control, int& n) {
    n = min(max(control[N_TOP], 1), MAX_TOP);
    return control[STEP] != control[DESCRIBED];
}

// Larger logits have larger keys, and of equal ones smaller ids; 0 is nothing.
DEVICE u64 key_of(float x, int id) { return (u64)order_of(x) << 32 | (u32)~id; }

DEVICE void load_logits(float (&x)[PER_THREAD], const float* logits, int V, int id) {
    if (id + PER_THREAD <= V) {
        const float4 v = *(const float4*)(logits + id);
        x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    } else {
        for (int j = 0; j < PER_THREAD; j++)
            x[j] = id + j < V ? logits[id + j] : 0.0f;
    }
}

KERNEL top_logits(const float* logits, int V, const i32* control, u64* best) {
    const int id = (blockIdx.x * THREADS + threadIdx.x) * PER_THREAD;
    int n, turn = 0;
    if (!is_due(control, n))
        return;
    float x[PER_THREAD];
    load_logits(x, logits, V, id);
    u64 key[PER_THREAD];
#pragma unroll
    for (int j = 0; j < PER_THREAD; j++)
        key[j] = id + j < V ? key_of(x[j], id + j) : 0;
    for (int k = 0; k < n; k++) {
        const u64 top = block_max(max(max(key[0], key[1]), max(key[2], key[3])), turn);
#pragma unroll
        for (int j = 0; j < PER_THREAD; j++)
            key[j] = key[j] == top ? 0 : key[j];
        if (threadIdx.x == 0)
            best[blockIdx.x * MAX_TOP + k] = top;
    }
}

KERNEL log_sum(const float* logits, int V, i32* control, const i32* history, const u64* best, u64* masses, u64* done,
               u64* ring, int ring_size) {
    const int i = threadIdx.x, n_blocks = gridDim.x, id = (blockIdx.x * THREADS + i) * PER_THREAD;
    int n, turn = 0, turn_of_sum = 0;
    if (!is_due(control, n))
        return;
    u64 top = 0;
    for (int b = i; b < n_blocks; b += THREADS)
        top = max(top, best[b * MAX_TOP]);
    const float largest = value_of((u32)(block_max(top, turn) >> 32));
    float x[PER_THREAD];
    load_logits(x, logits, V, id);
    u64 mass = 0;
#pragma unroll
    for (int j = 0; j < PER_THREAD; j++) {
        const float s = x[j] - largest;
        if (id + j < V && s >= LOWEST)
            mass += (u64)rintf(exponential(s) * 1099511627776.0f);
    }
    mass = block_sum(mass, turn_of_sum);
    if (i == 0)
        masses[blockIdx.x] = mass;
    if (!is_last_block(done))
        return;

    mass = 0;
    u64 head[MAX_LISTS];
    int at[MAX_LISTS];
#pragma unroll
    for (int j = 0; j < MAX_LISTS; j++) {
        const int b = i + j * THREADS;
        mass += b < n_blocks ? load_fresh(masses + b) : 0;
        head[j] = b < n_blocks ? best[b * MAX_TOP] : 0, at[j] = 0;
    }
    mass = block_sum(mass, turn_of_sum);
    const int draw = control[STEP];
    u64* const entry = ring + (i64)((draw - 1) % ring_size) * ENTRY;
    for (int k = 0; k < n; k++) {
        u64 mine = 0;
#pragma unroll
        for (int j = 0; j < MAX_LISTS; j++)
            mine = max(mine, head[j]);
        const u64 winner = block_max(mine, turn);
#pragma unroll
        for (int j = 0; j < MAX_LISTS; j++)
            if (winner && head[j] == winner) {
                at[j]++;
                head[j] = at[j] < n ? best[(i + j * THREADS) * MAX_TOP + at[j]] : 0;
            }
        if (i == 0)
            entry[3 + k] = (u64)__float_as_uint(value_of((u32)(winner >> 32))) << 32 | (u32)~winner;
    }
    if (i)
        return;
    const i32 token = history[(control[POSITION] - 1) & (HISTORY_TOKENS - 1)];
    entry[1] = mass;
    entry[2] = (u32)token < (u32)V ? __float_as_uint(logits[token]) : 0;
    control[DESCRIBED] = draw;
    store_system(entry, (u64)draw << 43 | (u64)((u32)control[EPOCH] & 511) << 34);
}

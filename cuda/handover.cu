// A step whose experts the CPU computes, without the experts: what handing over costs. For engine/ops/cuda/handing.py, as a model loads, and
// benchmarks/handover.py.
//
// A layer is `fill` (attention and the router, for so long), `post` (route), `fill` (gate and up of the experts that the GPU has)
// and `fold` (down), each launched over all. Jobs have no rows, so the CPU reads the activations and answers.
//
// fill   works for `ns`. Any grid and block.
// post   job counter[0] + 1: activations (q [columns], d [columns / 32]) to its place in host memory, then, where `flags`, its
//        number to the record. stamps[2 * ((number - 1) % n_records)] is when. One block; nothing but the number without `on`.
// fold   waits for the answer to job counter[0]: WAIT_EVERY block does, or the first, which tells the others by `relayed`. What
//        is not claimed within bound_ns is taken back; what is claimed and not answered makes failed[0] = 1, and nobody waits
//        any more. stamps[... + 1] is when it is known. Where `on`, x [columns] += what is in host memory as the job's result,
//        or, where it was taken back, taken[0] is one more. Blocks share the columns.
// mark   a time stamp. One thread.
// reader reads [n_bytes] of host memory again and again, until stop[0], if given, or for bound_ns, or until a block has read
//        most_bytes; read [2 * grid]: bytes and ns. A thread has UNROLL loads of 16 bytes under way, so what it takes of the link's
//        room is known. One thread of a block asks whether to stop: reads of one line of host memory come one after the other, a
//        microsecond each, and a warp's each held up the bytes that were to be measured.
#include "jobs.cuh"

#ifndef UNROLL
#define UNROLL 8
#endif

constexpr i32 WAIT_NOT = 0, WAIT_EVERY = 1, WAIT_RELAYED = 2;

KERNEL fill(i64 ns) {
    dependency_release();
    dependency_wait();
    if (threadIdx.x == 0) {
        const u64 begin = clock_ns();
        while (ns && clock_ns() - begin < (u64)ns) {
        }
    }
    __syncthreads();
}

KERNEL post(u64 ring, i32 n_records, u64* counter, i32 on, i32 flags, const u8* q, const float* d, i32 columns, u64 inputs,
            u64* stamps) {
    dependency_release();
    dependency_wait();
    const u64 number = load_fresh(counter) + 1, place = (number - 1) % (u64)n_records;
    if (on) {
        u8* const to = (u8*)inputs + place * (u64)(columns + columns / 8);
        for (i32 i = threadIdx.x; i < columns / 16; i += blockDim.x)
            ((uint4*)to)[i] = ((const uint4*)q)[i];
        for (i32 i = threadIdx.x; i < columns / 32; i += blockDim.x)
            ((float*)(to + columns))[i] = d[i];
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        *counter = number;
        stamps[2 * place] = clock_ns();
        if (on && flags)
            post_job(job_of(ring, n_records, number), number);
    }
}

KERNEL fold(u64 ring, i32 n_records, const u64* counter, i32 on, i32 wait, u64* relayed, i64 bound_ns, i32 columns, u64 outputs,
            float* x, u64* stamps, i32* failed, i32* taken) {
    __shared__ i32 state;
    dependency_release();
    dependency_wait();
    const u64 number = load_fresh(counter), place = (number - 1) % (u64)n_records;
    if (threadIdx.x == 0) {
        i32 found = SPARK_JOB_DONE;
        if (on && wait != WAIT_NOT && !load_fresh(failed)) {
            if (wait == WAIT_EVERY || blockIdx.x == 0) {
                found = await_job(job_of(ring, n_records, number), number, (u64)bound_ns);
                if (!found)
                    *failed = 1;
                if (wait == WAIT_RELAYED)
                    store_told(relayed, 4 * number + (u64)found);
            } else {
                u64 told;
                while ((told = load_told(relayed)) / 4 != number) {
                }
                found = (i32)(told % 4);
            }
        }
        state = found;
        if (blockIdx.x == 0 && found == SPARK_JOB_DECLINED)
            *taken += 1; // and is the GPU's to compute
    }
    __syncthreads();
    if (threadIdx.x == 0 && blockIdx.x == 0)
        stamps[2 * place + 1] = clock_ns();
    if (on && state == SPARK_JOB_DONE) {
        const volatile float* const y = (const volatile float*)outputs + place * (u64)columns;
        for (i32 i = blockIdx.x * blockDim.x + threadIdx.x; i < columns; i += gridDim.x * blockDim.x)
            x[i] += y[i];
    }
}

KERNEL mark(u64* stamp) {
    dependency_wait();
    *stamp = clock_ns();
}

KERNEL reader(u64 data, i64 n_bytes, const u64* stop, i64 bound_ns, i64 most_bytes, u64* read, u32* sink) {
    dependency_wait();
    const u64 begin = clock_ns();
    __syncthreads();
    const i64 piece = (i64)blockDim.x * 16 * UNROLL, step = piece * gridDim.x;
    i64 at = piece * blockIdx.x;
    u64 total = 0;
    u32 sum = 0;
    __shared__ i32 goes_on;
    while (true) {
        if (threadIdx.x == 0)
            goes_on = clock_ns() - begin < (u64)bound_ns && total < (u64)most_bytes && !(stop && load_system(stop));
        __syncthreads();
        const bool ends = !goes_on;
        __syncthreads(); // of the next turn
        if (ends)
            break;
        for (i32 k = 0; k < 16; k++) {
            uint4 v[UNROLL];
#pragma unroll
            for (i32 i = 0; i < UNROLL; i++)
                v[i] = load_once16((const u8*)data + at + 16 * ((i64)i * blockDim.x + threadIdx.x));
#pragma unroll
            for (i32 i = 0; i < UNROLL; i++)
                sum ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w; // of less, it would be loaded in parts, which cross the link twice
            total += (u64)piece;
            at += step;
            if (at + piece > n_bytes)
                at = piece * blockIdx.x;
        }
    }
    if (sum == 0x9e3779b9) // hardly ever, but the loads are for something
        *sink = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        read[2 * blockIdx.x] = total;
        read[2 * blockIdx.x + 1] = clock_ns() - begin;
    }
}

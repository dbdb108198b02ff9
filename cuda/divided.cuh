// What gate_up does for an expert whose last rows of gate and up are the CPU's (jobs.cuh): their z come from host memory to
// where the blocks of these rows would have put them. So down_one knows of nothing.
#pragma once

#include "experts.cuh"
#include "jobs.cuh"

#if JOBS && defined GATE && !defined DENSE

// By a block of an expert that misses, when it has copied what is its own.
DEVICE void note_own(u64* words) {
    if (threadIdx.x == 0)
        atomicMax(words + JOBS_OWN_NS, clock_ns());
}

// By the block that asked, once the job is the CPU's: z of the last units of row `place` of Z. made_of: the job, as in its
// record. Zeros, and a word that says so, where there is no answer.
DEVICE void fetch_z(const LayerJob& job, u64* words, const Z& to, i64 place, i32 made_of) {
    __shared__ i32 done;
    const i32 units = job_units(made_of);
    // Known before the answer: what follows that is in everybody's way.
    const u64 from = load_fresh(words + JOBS_OUTPUTS) + job.place * load_fresh(words + JOBS_OUTPUT_BYTES);
    if (threadIdx.x == 0) {
        u64 waited_ns;
        done = await_done(job.record, job.number, load_fresh(words + JOBS_PATIENCE_NS), waited_ns);
        words[JOBS_ANSWERED_NS] = clock_ns();
        u64* const part = words + JOBS_PARTS + job_part(made_of);
        atomicAdd(part + PART_DIVIDED, (u64)1);
        atomicAdd(part + PART_UNITS, (u64)units);
        if (!done)
            words[JOBS_FAILED] = job.number;
    }
    __syncthreads();
    const i32 row0 = ((to.F + JOB_ROWS - 1) / JOB_ROWS - units) * JOB_ROWS;
#if DOWN_FLOAT
    const volatile float* const z = (const volatile float*)from;
    for (i32 row = row0 + threadIdx.x; row < to.F; row += blockDim.x)
        to.z[place * to.F + row] = done ? z[row] : 0.0f;
#else
    const volatile u32* const q = (const volatile u32*)from; // four each
    const volatile float* const d = (const volatile float*)(from + to.F);
    const i32 lane = threadIdx.x % WARP, n = to.F / 4;
    for (i32 i = row0 / 4 + threadIdx.x; i - lane < n; i += blockDim.x) { // whole warps
        const bool valid = i < n;
        const u32 four = valid && done ? q[i] : 0;
        const float scale = valid && done && lane % 8 == 0 ? d[i / 8] : 0.0f;
        i32 sum = __dp4a((i32)four, 0x01010101, 0);
#pragma unroll
        for (i32 o = 1; o < 8; o <<= 1)
            sum += __shfl_xor_sync(FULL_WARP, sum, o);
        const i64 at = place * to.F / 4 + i;
        if (valid)
            ((u32*)to.q)[at] = four;
        if (valid && lane % 8 == 0) {
            to.d[at / 8] = scale;
            to.sums[at / 8] = sum;
        }
    }
#endif
}

#endif

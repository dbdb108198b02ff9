// A GPU's side of the jobs that the CPU does beside it: posting one, waiting for it, taking it back (expert_job.h).
// Its twin on the host: spark_job_post and the others of cpu/jobs.cpp.
#pragma once

#include "ptx.cuh"

#include "expert_job.h"

DEVICE spark_job* job_of(u64 ring, i32 n_records, u64 number) {
    return (spark_job*)ring + (number - 1) % (u64)n_records;
}

// By one thread, behind a barrier that all who wrote of the job have reached: they are seen before the number is. The store
// waits for all of it by itself; a fence besides was a second trip over the link.
DEVICE void post_job(spark_job* job, u64 number) {
    store_system(&job->posted, number);
}

// By one thread, once it is posted: whose the job is. SPARK_JOB_CLAIMED: the CPU's, and its answer will be DONE;
// SPARK_JOB_DECLINED: the GPU's, as nobody claimed it within bound_ns, or the CPU declined it. Who claimed it and says no more
// within patience_ns will not answer either: it is the CPU's.
DEVICE i32 await_claim(spark_job* job, u64 number, u64 bound_ns, u64 patience_ns) {
    const u64 begin = clock_ns();
    bool taken = false;
    while (true) {
        const u64 answer = load_system(&job->answer);
        if (answer / 4 == number) { // else of a job before
            if (answer % 4 == SPARK_JOB_DECLINED)
                return SPARK_JOB_DECLINED;
            if (answer % 4 == SPARK_JOB_DONE || load_system(&job->accepted) == number ||
                clock_ns() - begin > bound_ns + patience_ns)
                return SPARK_JOB_CLAIMED;
        } else if (taken) {
            return SPARK_JOB_DECLINED;
        } else if (clock_ns() - begin > bound_ns) {
            store_system(&job->back, number);
            fence_system(); // the CPU claims, then looks at `back`: one of the two sees the other
            taken = true;
        }
    }
}

// By one thread: whether a job that is the CPU's was answered within bound_ns. waited_ns: 0 where the answer was there.
DEVICE bool await_done(const spark_job* job, u64 number, u64 bound_ns, u64& waited_ns) {
    const u64 begin = clock_ns();
    bool done = load_system(&job->answer) == 4 * number + SPARK_JOB_DONE;
    waited_ns = 0;
    while (!done && waited_ns <= bound_ns) {
        done = load_system(&job->answer) == 4 * number + SPARK_JOB_DONE;
        waited_ns = clock_ns() - begin;
    }
    return done;
}

// What came of the layers with jobs that missed so many: how many there were; whole experts and divided ones that were done,
// units of these; jobs that were taken back; ns that layers waited, for answers or before they took a job back, of each answer
// at most STALL_BOUNDS times the bound of a claim; and what they waited beyond that.
constexpr i32 MOST_MISSED = 16; // MAX_USED of routing.py
constexpr u64 STALL_BOUNDS = 4;
enum { PART_LAYERS, PART_DONE, PART_DIVIDED, PART_UNITS, PART_TAKEN, PART_WAITED_NS, PART_STALLED_NS, N_PART, PART_WORDS = 8 };
// Words of device memory that the kernels of a step share (engine/ops/cuda/cpu_experts.py): the numbers of the layer's first
// job and of the next one, by `route`; the last that was never answered; times; addresses and sizes of places in host memory,
// of which each record has one, and of a board there; when the layer's first job was posted; how often that was waited for where
// the layer had nothing else to do, and ns from its post to its answer then; whether all that the layer misses is whole jobs. Then of divided experts: when a block of gate_up last had what it copies; when the last one's answer was known, 0: it was
// taken back. Then what came of layers, by how many they missed.
// And, for each job of a layer, 4 * number and whose it is: SPARK_JOB_CLAIMED, DECLINED, DONE as the answers are, or
// NEVER_ANSWERED.
enum {
    JOBS_FIRST, JOBS_NEXT, JOBS_FAILED, JOBS_BOUND_NS, JOBS_PATIENCE_NS,
    JOBS_RING, JOBS_INPUTS, JOBS_INPUT_BYTES, JOBS_OUTPUTS, JOBS_OUTPUT_BYTES,
    JOBS_BOARD, JOBS_POSTED_NS, JOBS_TRIPS, JOBS_TRIPS_NS, JOBS_ALONE,
    JOBS_OWN_NS, JOBS_ANSWERED_NS,
    JOBS_PARTS, JOBS_KNOWN = JOBS_PARTS + (MOST_MISSED + 1) * PART_WORDS,
};
// What the board says, so that the host need not wait for the device to read it; parts as above.
enum { BOARD_FAILED, BOARD_TRIPS, BOARD_TRIPS_NS, BOARD_PARTS = 8 };
constexpr i32 NEVER_ANSWERED = 0;

// The job of a record (experts.cuh): its place among the layer's, from 1 on, and, from the ninth bit on, how many of the last
// units of JOB_ROWS rows of gate and up are the CPU's, which are at least one of a divided expert; 0: all of the expert. In the
// upper eight bits: how many experts the layer misses.
constexpr i32 JOB_ROWS = 32;
DEVICE i32 job_place(i32 job) { return job & 255; }
DEVICE i32 job_units(i32 job) { return job >> 8 & 0xFFFF; }
// Where what comes of its layer is counted.
DEVICE i64 job_part(i32 job) { return (i64)(job >> 24) * PART_WORDS; }
// The first of these units, of an expert of F rows.
DEVICE i32 job_first(i32 job, i32 F) { return (F + JOB_ROWS - 1) / JOB_ROWS - job_units(job); }

// A layer's job, by its place among the layer's, from 1 on.
struct LayerJob {
    u64 number, place;
    u64* known;
    spark_job* record;

    __device__ LayerJob(u64* words, i32 job) : LayerJob(words, job, words + JOBS_KNOWN) {}
    // all_known: words of each of the layer's jobs.
    __device__ LayerJob(u64* words, i32 job, u64* all_known) {
        number = load_fresh(words + JOBS_FIRST) + (u64)(job - 1);
        place = (number - 1) % SPARK_JOB_RECORDS;
        known = all_known + job - 1;
        record = job_of(load_fresh(words + JOBS_RING), SPARK_JOB_RECORDS, number);
    }
    // By one thread of another block than the one that tells: what is told of it that is not `except`.
    __device__ i32 heard(i32 except) const {
        u64 told;
        while ((told = load_told(known)) / 4 != number || (i32)(told % 4) == except) {
        }
        return (i32)(told % 4);
    }
    __device__ void tell(i32 state) const { store_told(known, 4 * number + (u64)state); }
};

// By one thread: SPARK_JOB_DONE, or SPARK_JOB_DECLINED where the job is the GPU's again. A job that nobody has claimed within
// bound_ns is taken back. One that was claimed has to be waited for: 0 if it is not answered within four times that.
DEVICE i32 await_job(spark_job* job, u64 number, u64 bound_ns) {
    const u64 begin = clock_ns();
    bool taken = false;
    while (true) {
        const u64 answer = load_system(&job->answer);
        const bool ours = answer / 4 == number; // else of a job before
        if (ours && answer % 4 != SPARK_JOB_CLAIMED)
            return (i32)(answer % 4);
        const u64 waited = clock_ns() - begin;
        if (!taken && waited > bound_ns) {
            store_system(&job->back, number);
            fence_system(); // the CPU claims, then looks at `back`: one of the two sees the other
            taken = true;
        } else if (taken && !ours)
            return SPARK_JOB_DECLINED;
        else if (waited > 4 * bound_ns)
            return 0;
    }
}

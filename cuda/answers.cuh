// What down_one does where ranks of the token are the CPU's (jobs.cuh): it takes their rows, counts, and tells the host.
#pragma once

#include "jobs.cuh"

#if JOBS
// What the first block has seen of a rank's job. job: as in its record, 0: the rank has none; of_cpu: all of it.
struct JobSeen {
    i32 job, of_cpu;
    u64 waited_ns, known_ns;
};

// By one thread of the first block, of all ranks: count, and tell the host. What it reads before the token that the step
// draws is of this step, as that comes from a later kernel. A layer that misses nothing else has waited since the post:
// its first half had nothing to wait for but the claim. For a divided expert it has waited since the last of its own copies.
DEVICE void note_jobs(u64* words, const JobSeen (&seen)[USED]) {
    i32 any = 0;
    bool divided = false;
    for (i32 a = 0; a < USED; a++) {
        any |= seen[a].job;
        divided |= job_units(seen[a].job) > 0;
    }
    if (!any) // and nothing is read, which the end of the kernel would wait for
        return;
    const i64 at = job_part(any); // all of them are of one layer, and say the same
    u64* const part = words + JOBS_PARTS + at;
    volatile u64* const board = (volatile u64*)load_fresh(words + JOBS_BOARD);
    u64 counts[N_PART]; // with what else is read here, so that one trip does
#pragma unroll
    for (i32 i = 0; i < N_PART; i++)
        counts[i] = load_fresh(part + i);
    const u64 posted = load_fresh(words + JOBS_POSTED_NS);
    const bool alone = load_fresh(words + JOBS_ALONE);
    const u64 bound = load_fresh(words + JOBS_BOUND_NS);
    u64 done = 0, longest = 0;
    for (i32 a = 0; a < USED; a++) {
        if (!seen[a].job || !seen[a].of_cpu)
            continue;
        done++;
        longest = max(longest, alone ? seen[a].known_ns - posted : seen[a].waited_ns);
        if (alone && job_place(seen[a].job) == 1 && seen[a].waited_ns) {
            words[JOBS_TRIPS] += 1;
            words[JOBS_TRIPS_NS] += seen[a].known_ns - posted;
        }
    }
    // What is read where it lies is not noted, and before the post is of another layer.
    const u64 answered = load_fresh(words + JOBS_ANSWERED_NS), own = max(posted, load_fresh(words + JOBS_OWN_NS));
    part[PART_LAYERS] = counts[PART_LAYERS] += 1;
    part[PART_DONE] = counts[PART_DONE] += done;
    const u64 waited = longest + (divided && answered > own ? answered - own : 0), most = STALL_BOUNDS * bound;
    part[PART_WAITED_NS] = counts[PART_WAITED_NS] += min(waited, most);
    part[PART_STALLED_NS] = counts[PART_STALLED_NS] += waited - min(waited, most);
    board[BOARD_FAILED] = load_fresh(words + JOBS_FAILED);
    board[BOARD_TRIPS] = words[JOBS_TRIPS];
    board[BOARD_TRIPS_NS] = words[JOBS_TRIPS_NS];
#pragma unroll
    for (i32 i = 0; i < N_PART; i++)
        board[BOARD_PARTS + at + i] = counts[i];
}

// Rows from row0 on of what the CPU computed, by a warp. The first block asks for the answer and tells the others: hundreds
// that asked over PCIe would take a good part of the link.
DEVICE void fetch_result(const LayerJob& job, u64* words, i32 row0, i32 D, float* ys, JobSeen& seen) {
    const i32 lane = threadIdx.x % WARP;
    i32 state = SPARK_JOB_CLAIMED;
    if (lane == 0 && blockIdx.x == 0) {
        const bool done = await_done(job.record, job.number, load_fresh(words + JOBS_PATIENCE_NS), seen.waited_ns);
        seen.known_ns = clock_ns();
        state = done ? SPARK_JOB_DONE : NEVER_ANSWERED;
        if (!done)
            words[JOBS_FAILED] = job.number;
        job.tell(state);
    } else if (lane == 0) {
        state = job.heard(SPARK_JOB_CLAIMED);
    }
    state = __shfl_sync(FULL_WARP, state, 0);
    __syncwarp(); // what the first lane has seen, the others see
    const u64 outputs = load_fresh(words + JOBS_OUTPUTS), each = load_fresh(words + JOBS_OUTPUT_BYTES);
    const volatile float* const y = (const volatile float*)(outputs + job.place * each);
    if (lane < UNITS * ROWS)
        ys[lane] = state == SPARK_JOB_DONE && row0 + lane < D ? y[row0 + lane] : 0.0f;
}
#endif

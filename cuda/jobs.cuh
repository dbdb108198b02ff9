// A GPU's side of the jobs that the CPU does beside it: posting one, waiting for it, taking it back (expert_job.h).
// Its twin on the host: spark_job_post and the others of cpu/jobs.cpp.
#pragma once

#include "ptx.cuh"

#include "expert_job.h"

DEVICE spark_job* job_of(u64 ring, i32 n_records, u64 number) {
    return (spark_job*)ring + (number - 1) % (u64)n_records;
}

// By one thread, behind a barrier that all who wrote of the job have reached: they are seen before the number is.
DEVICE void post_job(spark_job* job, u64 number) {
    fence_system();
    store_system(&job->posted, number);
}

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

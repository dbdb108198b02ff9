"""Whether the threads that compute experts have the cores that they were promised, as a look behind each step tells.

A thread that lost its core in the middle of a job has a layer wait for as long as others keep it: milliseconds, where a
job takes tens of microseconds. What the jobs took says so too late, so the threads say who is there.
"""

from __future__ import annotations

from engine.ground.cores import Quota
from engine.ops.jobs import Jobs

MISSING_S = 1e-3  # without a sign: an item of a job takes a tenth of that
MOST_MISSING = 0.25  # of the threads, at two looks in a row so far apart
LOOK_S = 1e-3
LONG_MISSING_S, MOST_LONG_MISSING = 4e-3, 0.5  # at one look: where the host waits for steps the next one may be late


class Crowd:
    """Who else is on the cores of a pool's threads. quota: of the process. A pool without threads misses none."""

    def __init__(self, pool: Jobs, quota: Quota) -> None:
        self.pool, self.quota = pool, quota
        self._missing_s: float | None = None  # when too many were missed first

    def why(self, now_s: float) -> str:
        """What keeps the threads from their cores; empty: nothing. When a step of one token is enqueued."""
        return self.of_quota() or self._of_others(now_s)

    def of_quota(self) -> str:
        """The same of the process's quota alone: threads that look for work use up what the others need."""
        cpus = self.quota.cpus()
        if cpus is None or int(cpus) > self.pool.n_threads:
            return ""
        return f"the quota of the cgroup is {cpus:g} CPUs now, for {self.pool.n_threads} threads and who launches steps"

    def _of_others(self, now_s: float) -> str:
        n, n_threads = self.pool.missing(MISSING_S), self.pool.n_threads
        if n <= MOST_MISSING * n_threads:
            self._missing_s = None
            return ""
        if self._missing_s is None:
            self._missing_s = now_s
        is_long = self.pool.missing(LONG_MISSING_S) > MOST_LONG_MISSING * n_threads
        if now_s - self._missing_s < LOOK_S and not is_long:
            return ""
        self._missing_s = None
        return f"{n} of {self.pool.n_threads} threads are stopped, or others have their cores"

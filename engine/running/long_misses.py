"""Missed experts of steps of 33 to 128 tokens that the CPU computes beside a GPU: whether any are offered, who wakes.

Part of engine/running/misses.py, which makes the threads. Nothing here waits for the GPU between steps.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from engine.ops import SMALL_TOKENS, Limits
from engine.ops.cuda.cpu_experts import CpuExperts
from engine.ops.cuda.device import Device
from engine.ops.cuda.long_jobs import LongJobs
from engine.placing.handed import HandedGate

# Threads are awake from when a step is enqueued: what was enqueued before may run first, and a step may take a fifth.
AWAKE_S = 1.0
# Steps in a row that handed nothing over, after which threads are awake for one in so many alone.
QUIET_STEPS, LOOK_STEPS = 4, 16

_log = logging.getLogger(__name__)


class LongMisses:
    """Steps that offer what misses. pcie_us: of an expert over PCIe. `begin` before each step of so many tokens."""

    def __init__(self, jobs: LongJobs, pcie_us: float) -> None:
        self.jobs = jobs
        self.gate = HandedGate(pcie_us)
        self._layers = self._quiet = 0

    def begin(self, is_crowded: bool = False) -> None:
        """A step is about to be enqueued: threads are awake for it and while it runs, unless nothing misses of late.

        What then misses is taken back by the GPU, and the next step finds them awake. is_crowded: threads would look
        for work on cores that others need, so the step offers nothing.
        """
        if is_crowded:
            self.jobs.is_on = False
            return
        if self.gate.look(self.jobs.tally, time.monotonic()):
            if self.gate.state == "on":
                _log.info("experts of long steps on the CPU are tried again")
            else:
                state, why = self.gate.state, self.gate.why
                said = "experts of long steps on the CPU are %s: %s"
                _log.warning(said, state, why, extra={"reason": "cpu_experts"})
        self.jobs.is_on = self.gate.state == "on"
        layers = self.jobs.tally.layers
        self._quiet, self._layers = 0 if layers > self._layers else self._quiet + 1, layers
        if self.jobs.is_on and (self._quiet <= QUIET_STEPS or self._quiet % LOOK_STEPS == 0):
            self.jobs.cpu.pool.wake(AWAKE_S)

    def takes(self, n_tokens: int) -> bool:
        """Whether a step is of so many tokens that it may offer something."""
        return SMALL_TOKENS < n_tokens <= self.jobs.n_rows

    def stats(self) -> dict[str, Any]:
        """Counters since the start."""
        return self.gate.stats(self.jobs.tally)


def made(device: Device, limits: Limits, cpu: CpuExperts) -> LongJobs | None:
    """Memory for the jobs of long steps; None where no step is long."""
    return LongJobs(device, limits, cpu) if limits.max_tokens > SMALL_TOKENS else None

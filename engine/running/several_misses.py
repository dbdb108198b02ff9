"""Missed experts of steps of 2 to 32 tokens that the CPU computes beside a GPU: how many, whether any, who is awake.

Part of engine/running/misses.py, which makes the threads. Nothing here waits for the GPU between steps.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

from engine.ops.cuda.several_jobs import SeveralJobs
from engine.ops.jobs import MAX_RECORDS
from engine.placing.division import Costs, divide
from engine.placing.handed import HandedGate, HandedTally
from engine.placing.misses import IDLE_STEPS, IDLE_TIMES, LAYER_US, LEAST_GAIN, MOST_TAKEN

AWAKE_S = 0.05  # that threads look for work behind such a step: it may take that long, where much misses
WINDOW_JOBS = 256  # after which what came of them is looked at: some steps
FOLLOW_STEPS = 8  # that a window lasts besides, as some are under way when the table changes
# How the CPU's cost follows a window. Claims are in order, so a layer waits for the CPU's last expert and no other.
SHORT_WAIT = 0.1  # of an expert over PCIe: where layers waited for less, the CPU gets more
LONG_WAIT = 0.5  # of an expert on the faster side: where they waited for longer, it gets less
FEW_TAKEN = 0.05  # of the jobs: where more were taken back, it gets less
FASTER, SLOWER = 0.95, 1.1  # by which its cost changes then
MOST_DRIFT = 3.0  # from what was measured, either way
GAIN = 0.5  # of what PCIe takes for an expert, as a rule, where the CPU computes it: the other side works meanwhile

_log = logging.getLogger(__name__)


class SeveralMisses:
    """Steps of several tokens that hand over a part of what misses. costs: that were measured, of one token's experts.

    n_layers: that may hand something over. is_on: whether the next step hands anything over. `begin` before each such
    step says so for the one behind it.
    """

    def __init__(self, jobs: SeveralJobs, costs: Costs, n_layers: int) -> None:
        self.jobs = jobs
        self.gate = HandedGate(costs.pcie_us, WINDOW_JOBS, MOST_TAKEN, "claimed in time")
        self.table, self._costs, self._rate = divided(costs), costs, 1.0
        self.is_on = any(self.table)
        self._gain_us, self._least_us = GAIN * costs.pcie_us, LAYER_US * n_layers * IDLE_STEPS
        self._is_idle, self._steps, self._idle_from = False, 0, HandedTally()
        self._followed, self._followed_steps = HandedTally(), 0
        jobs.divide(self.table)

    def takes(self, n_tokens: int) -> bool:
        """Whether a step of so many tokens hands something over now."""
        return self.is_on and self.jobs.takes(n_tokens)

    def begin(self, crowd: str = "") -> None:
        """Such a step is about to be enqueued: threads are awake for it, if it has jobs. crowd: who has their cores."""
        if not any(self.table):
            return
        now_s = time.monotonic()
        if crowd and self.is_on:
            changed = self.gate.lose(crowd, now_s, may_end=False)
        else:
            changed = self.gate.look(self.jobs.tally, now_s)
        if changed:
            if self.gate.state == "on":
                _log.info("experts of shared steps on the CPU are tried again")
            else:
                said = "experts of shared steps on the CPU are %s: %s"
                _log.warning(said, self.gate.state, self.gate.why, extra={"reason": "cpu_experts"})
        if self.is_on:
            self.jobs.cpu.pool.wake(AWAKE_S)
        self._follow()
        self._look_idle()
        was_on, self.is_on = self.is_on, self.gate.state == "on" and not self._is_idle
        if self.is_on and not was_on:  # what was seen before says nothing of what comes
            self._steps, self._idle_from = 0, self.jobs.tally
            self._followed, self._followed_steps = self.jobs.tally, 0

    def _follow(self) -> None:
        """Let the table follow what layers waited: experts were measured one token's, a few at once, on idle cores."""
        self._followed_steps += 1
        new = self.jobs.tally.since(self._followed)
        if self._followed_steps < FOLLOW_STEPS or new.done + new.taken < WINDOW_JOBS:
            return
        self._followed, self._followed_steps = self.jobs.tally, 0
        wait_us, pcie_us = new.waited_us / max(1, new.layers), self._costs.pcie_us
        long_us = LONG_WAIT * min(pcie_us, self._rate * self._costs.of_cpu(1))
        is_late = wait_us > long_us or new.taken > FEW_TAKEN * (new.done + new.taken)
        change = SLOWER if is_late else FASTER if wait_us < SHORT_WAIT * pcie_us else 1.0
        rate = min(max(self._rate * change, 1 / MOST_DRIFT), MOST_DRIFT)
        if rate == self._rate:
            return
        self._rate = rate
        table = divided(replace(self._costs, cpu_us=tuple(us * rate for us in self._costs.cpu_us)))
        if any(table) and table != self.table:  # what loses altogether is the gate's
            self.table = table
            self.jobs.divide(table)

    def _look_idle(self) -> None:
        """Be idle for a while where hardly anything is handed over: kernels that may hand over take longer."""
        self._steps += 1
        if self._is_idle:
            if self._steps < IDLE_TIMES * IDLE_STEPS:
                return
            self._is_idle = False
        elif self._steps < IDLE_STEPS:
            return
        else:
            new = self.jobs.tally.since(self._idle_from)
            self._is_idle = self.is_on and new.done * self._gain_us - new.waited_us < self._least_us
        self._steps, self._idle_from = 0, self.jobs.tally

    def stats(self) -> dict[str, Any]:
        """Counters since the start."""
        found = self.gate.stats(self.jobs.tally)
        if not any(self.table):
            found |= {"state": "off for good", "why": "PCIe alone is as fast"}
        elif self._is_idle and self.gate.state == "on":
            found |= {"state": "idle", "why": "too little misses"}
        return found


def divided(costs: Costs) -> tuple[int, ...]:
    """Of 0, 1, ... misses of a layer, as many as the ring has records, how many are the CPU's: whole experts."""
    whole = replace(costs, n_ff=0)
    found = [divide(n, whole) for n in range(MAX_RECORDS + 1)]
    most_us = (1.0 - LEAST_GAIN) * costs.pcie_us  # what gains too little is left to PCIe: costs are estimates
    return tuple(d.experts if d.us <= n * most_us else 0 for n, d in enumerate(found))

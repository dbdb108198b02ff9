"""Whether handing missed experts to the CPU pays, from what comes of it: the table of divisions, or none.

A gate that sees counters alone. What a layer saves is what its experts, or rows of one, would have taken over PCIe;
what it pays is what it waited, for an answer or before it took a job back. Where that is more, or much is taken back,
nothing is handed over any more, for a while; after that has happened again and again, never.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from engine.placing.division import COPY_US, Costs, divide

WINDOW_JOBS = 64  # after which what came of them is looked at
FEW_JOBS = 8  # taken back, after which nobody waits for more
MOST_TAKEN = 0.25  # of the jobs of a window
RETRY_S = (30.0, 120.0, 600.0)  # how long it is off, the first time and later; then for good
GOOD_WINDOWS = 16  # in a row, after which an earlier loss is forgotten
LEAST_GAIN = 0.05  # of what a layer's misses take over PCIe, for a division
NEWEST = 0.25  # of an average, what the last window counts
MOST_DRIFT = 8.0  # of the CPU's rate, up or down, in one window: more is no drift, but a thread that lost its core
BOUNDS = 2.0  # times what a claim may take until it is waited for no longer
LEAST_BOUND_US = 10.0


@dataclass(frozen=True, slots=True)
class Tally:
    """Counters since the start: experts that the CPU did, jobs that were taken back; us that layers waited for either.

    A layer waits for an answer when its own experts are there; where all that it misses is the CPU's, since the post.
    trips: layers that waited for their first job's answer; trips_us: from its post to the answer, then. divided:
    experts of which the CPU did rows of gate and up; rows: of these in all, in whole units; overs: how often one was
    waited for; overs_us: of these hand-overs, without the CPU's work.
    """

    done: int = 0
    taken: int = 0
    waited_us: float = 0.0
    trips: int = 0
    trips_us: float = 0.0
    divided: int = 0
    rows: int = 0
    overs: int = 0
    overs_us: float = 0.0

    def since(self, other: Tally) -> Tally:
        """What came after another."""
        return Tally(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


# Experts that overlapped on the CPU, of divided ones parts, and us from the first claim to the last answer.
Spans = Sequence[tuple[float, float]]
# Of 0, 1, ... misses of a layer: experts that are the CPU's, and last rows of gate and up of one more.
Table = tuple[tuple[int, int], ...]
NOTHING = (0, 0)


class MissGate:
    """What is handed over, and how long a claim is waited for. begun: the costs that were measured.

    table: of 0, 1, ... n_used misses of a layer, what is the CPU's. state: "on", "off", or "off for good"; why: it is
    not on.
    """

    def __init__(self, begun: Costs, n_used: int) -> None:
        self.begun, self.costs, self.n_used = begun, begun, n_used
        self.state, self.why = "on", ""
        self.table: Table = ()
        self._rate = 1.0  # us of experts on the CPU, of those that were measured
        self._later_us = 0.0  # of the hand-over, more than was measured
        self._lost = self._good = 0
        self._retry_s = 0.0
        self._from = Tally()
        if not self._divide():
            self._stop("off for good", f"PCIe alone is as fast: {said(begun)}")

    @property
    def bound_us(self) -> float:
        """How long the claim of a layer's first job is waited for."""
        costs = self.costs
        return max(LEAST_BOUND_US, BOUNDS * max(costs.handover_us, costs.busy_us or 0.0, costs.of_cpu(1)))

    def look(self, tally: Tally, now_s: float, spans: Callable[[], Spans]) -> bool:
        """Look at the counters; whether table or bound are others now. spans: of the last jobs."""
        if self.state != "on":
            if self.state == "off for good" or now_s < self._retry_s:
                return False
            self.state, self.why, self._from = "on", "", tally
            self.costs, self._rate, self._later_us = self.begun, 1.0, 0.0
            self._divide()
            return True
        new = tally.since(self._from)
        n = new.done + new.divided + new.taken
        if new.taken >= FEW_JOBS and new.taken > MOST_TAKEN * n:
            return self._lose(f"{new.taken} of {n} jobs were not claimed in time", now_s)
        if n < WINDOW_JOBS:
            return False
        self._from = tally
        saved_us = (new.done + self.costs.amount(new.rows)) * self.costs.pcie_us
        if new.waited_us >= saved_us:
            waited, took = new.waited_us / n, saved_us / n
            return self._lose(f"an expert was waited for {waited:.0f} us, PCIe takes {took:.0f} for as much", now_s)
        self._follow(new, spans())
        if not self._divide():
            return self._lose(f"PCIe alone is as fast now: {said(self.costs)}", now_s)
        self._good += 1
        if self._good >= GOOD_WINDOWS:
            self._lost = 0
        return True

    def _follow(self, new: Tally, spans: Spans) -> None:
        """Let the costs follow what was seen."""
        begun = self.begun
        split_us = max(0.0, begun.split_us - COPY_US)
        expected = [(begun.of_cpu(n) + (split_us if n % 1 else 0.0), us) for n, us in spans]
        ratios = sorted(us / most for most, us in expected if most > 0)
        if ratios:
            ratio = ratios[len(ratios) // 2]
            if self._rate / MOST_DRIFT <= ratio <= self._rate * MOST_DRIFT:
                self._rate += NEWEST * (ratio - self._rate)
        cpu_us = tuple(us * self._rate for us in begun.cpu_us)
        most_us = max(begun.handover_us, begun.busy_us or 0.0)
        if n := new.trips + new.overs:  # of layers with other misses, and of those with none: more than either is drift
            seen_us = max(0.0, (new.trips_us - new.trips * cpu_us[0] + new.overs_us) / n - most_us)
            self._later_us += NEWEST * (seen_us - self._later_us)
        busy_us = None if begun.busy_us is None else begun.busy_us + self._later_us
        handover_us = begun.handover_us + self._later_us
        self.costs = replace(begun, cpu_us=cpu_us, handover_us=handover_us, busy_us=busy_us)

    def _divide(self) -> bool:
        """Make the table; whether anything is the CPU's. What gains too little is left to PCIe: costs are estimates."""
        found = [divide(n, self.costs) for n in range(self.n_used + 1)]
        most_us = (1.0 - LEAST_GAIN) * self.costs.pcie_us
        self.table = tuple((d.experts, d.rows) if d.us <= n * most_us else NOTHING for n, d in enumerate(found))
        return any(entry != NOTHING for entry in self.table)

    def _lose(self, why: str, now_s: float) -> bool:
        self._good = 0
        if self._lost >= len(RETRY_S):
            return self._stop("off for good", why)
        self._retry_s = now_s + RETRY_S[self._lost]
        self._lost += 1
        return self._stop("off", why)

    def _stop(self, state: str, why: str) -> bool:
        self.state, self.why, self.table = state, why, (NOTHING,) * (self.n_used + 1)
        return True


def said(costs: Costs) -> str:
    """Costs in words."""
    times = ", ".join(f"{us:.0f}" for us in costs.cpu_us)
    busy = "" if costs.busy_us is None else f", {costs.busy_us:.0f} us while PCIe is busy"
    return (
        f"an expert takes {costs.pcie_us:.0f} us over PCIe; 1 to {len(costs.cpu_us)} on the CPU take {times} us and "
        f"{costs.handover_us:.0f} us for the hand-over{busy}"
    )

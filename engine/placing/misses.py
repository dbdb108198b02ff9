"""Whether handing missed experts to the CPU pays, from what comes of it: the table of divisions, or none.

A gate that sees counters alone. What a layer saves is what its experts, or rows of one, would have taken over PCIe;
what it pays is what it waited, for an answer or before it took a job back. Both are counted by how many experts the
layer missed, as the table is: an entry that loses is left to PCIe, and tried again later and later, in the end never.
Where nothing is left, or jobs are taken back whatever they are, nothing is handed over any more, for as long. Where too
little misses, steps go without for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import NamedTuple

from engine.placing.division import COPY_US, Costs, divide, makespan

WINDOW_JOBS = 64  # after which what came of them is looked at
FEW_JOBS = 8  # taken back, after which nobody waits for more; of an entry, to be blamed for what a window loses
MOST_TAKEN = 0.25  # of the jobs of a window
RETRY_S = (30.0, 120.0, 600.0)  # how long it is off, the first time and later; then for good
GOOD_WINDOWS = 16  # in a row, after which an earlier loss is forgotten
STALL_WINDOWS = 8  # together, in which stalls may take as much as is gained
LEAST_GAIN = 0.05  # of what a layer's misses take over PCIe, for a division
NEWEST = 0.25  # of an average, what the last window counts
MOST_DRIFT = 8.0  # of the CPU's rate, up or down, in one window: more is no drift, but a thread that lost its core
# Of what PCIe takes for an expert: a wait for the CPU after which an entry gives it more, or less; by how many
# microseconds its part is taken to be longer or shorter then, at once and at most.
SHORT_WAIT, LONG_WAIT, BALANCE, MOST_LATER = 0.04, 0.15, 0.05, 1.0
BOUNDS = 2.0  # times what a claim may take until it is waited for no longer
LEAST_BOUND_US = 10.0
IDLE_STEPS = 16  # of one token, in which as much is to be gained as jobs take where nothing is handed over:
LAYER_US = 0.6  # what kernels with jobs take longer, a layer (docs/misses.md); else it is idle
IDLE_TIMES = 15  # for as many times as many steps, of which those that try again are a sixteenth
NEVER_S = float("inf")


class Part(NamedTuple):
    """What came of layers that missed so many experts, some of which were handed over.

    layers: how many there were; done: whole experts that the CPU did; divided: those of which it did rows of gate and
    up; rows: of these in all, in whole units; taken: jobs that were taken back; waited_us: that layers waited for
    either. A layer waits for an answer when its own experts are there; where all that it misses is the CPU's, since the
    post. Of each it counts no more than some times what a claim may take; stalled_us is the rest: a thread that lost
    its core once does not say what an entry of the table is worth.
    """

    layers: int = 0
    done: int = 0
    divided: int = 0
    rows: int = 0
    taken: int = 0
    waited_us: float = 0.0
    stalled_us: float = 0.0

    @property
    def jobs(self) -> int:
        """All that was handed over."""
        return self.done + self.divided + self.taken

    def saved_us(self, costs: Costs) -> float:
        """What PCIe would have taken for what the CPU did."""
        return (self.done + costs.amount(self.rows)) * costs.pcie_us

    def plus(self, other: Part) -> Part:
        """Both."""
        return Part._make(a + b for a, b in zip(self, other, strict=True))

    def minus(self, other: Part) -> Part:
        """What came after another."""
        return Part._make(a - b for a, b in zip(self, other, strict=True))


@dataclass(frozen=True, slots=True)
class Tally:
    """Counters since the start. parts: by how many experts a layer missed, 0, 1, ...; those that lack are zeros.

    trips: layers that were the CPU's alone and waited for their first job's answer; trips_us: from its post to the
    answer, then.
    """

    parts: tuple[Part, ...] = ()
    trips: int = 0
    trips_us: float = 0.0

    def since(self, other: Tally) -> Tally:
        """What came after another."""
        return Tally(
            tuple(a.minus(b) for a, b in zip_longest(self.parts, other.parts, fillvalue=Part())),
            self.trips - other.trips, self.trips_us - other.trips_us,
        )  # fmt: skip

    @property
    def total(self) -> Part:
        """Whatever was missed."""
        return Part(*map(sum, zip(*self.parts, strict=True))) if self.parts else Part()


@dataclass(slots=True)
class _Entry:
    """What is known of an entry of the table. seen: since it was judged last; lost: how often it has lost lately.

    retry_s: until when it is left to PCIe; 0: it is not. why: it was, the last time. followed: since `later_us`, as of
    `Costs`, followed it last.
    """

    seen: Part = field(default_factory=Part)
    lost: int = 0
    good: int = 0
    retry_s: float = 0.0
    why: str = ""
    followed: Part = field(default_factory=Part)
    later_us: float = 0.0


# Experts that overlapped on the CPU, of divided ones parts, and us from the first claim to the last answer.
Spans = Sequence[tuple[float, float]]
# Of 0, 1, ... misses of a layer: experts that are the CPU's, and last rows of gate and up of one more.
Table = tuple[tuple[int, int], ...]
NOTHING = (0, 0)


class MissGate:
    """What is handed over, and how long a claim is waited for. begun: the costs that were measured.

    n_layers: that have jobs. table: of 0, 1, ... n_used misses of a layer, what is the CPU's. state: "on", "idle" while
    too little misses, "off", or "off for good"; why: it is not on.
    """

    def __init__(self, begun: Costs, n_used: int, n_layers: int = 0) -> None:
        self.begun, self.costs, self.n_used = begun, begun, n_used
        self.state, self.why = "on", ""
        self.table: Table = ()
        self._rate = 1.0  # us of experts on the CPU, of those that were measured
        self._later_us = 0.0  # of the hand-over, more than was measured
        self._lost = self._good = self._windows = 0
        self._stalls_from = Tally()
        self._retry_s = 0.0
        self._from = self._idle_from = Tally()
        self._steps, self._least_us = 0, LAYER_US * n_layers * IDLE_STEPS
        self._entries = [_Entry() for _ in range(n_used + 1)]
        if not self._divide():
            self._stop("off for good", f"PCIe alone is as fast: {said(begun)}")

    @property
    def bound_us(self) -> float:
        """How long the claim of a layer's first job is waited for."""
        costs = self.costs
        return max(LEAST_BOUND_US, BOUNDS * max(costs.handover_us, costs.busy_us or 0.0, costs.of_cpu(1)))

    @property
    def layer_us(self) -> tuple[float, ...]:
        """What 0, 1, ... misses of a layer take by the costs, divided as the table says."""
        return tuple(makespan(n, *division, self._costs_of(n)) for n, division in enumerate(self.table))

    @property
    def left(self) -> dict[int, str]:
        """Entries of the table that have lost and are left to PCIe, and why."""
        return {n: entry.why for n, entry in enumerate(self._entries) if entry.retry_s}

    def look(self, tally: Tally, now_s: float, spans: Callable[[], Spans]) -> bool:
        """Look at the counters, behind a step; whether table or bound are others now. spans: of the last jobs."""
        self._steps += 1
        if self.state != "on":
            is_due = self._steps > IDLE_TIMES * IDLE_STEPS if self.state == "idle" else now_s >= self._retry_s
            return self.state != "off for good" and is_due and self._try_again(tally, now_s)
        new = tally.since(self._from)
        found = new.total
        if found.taken >= FEW_JOBS and found.taken > MOST_TAKEN * found.jobs:
            return self.lose(f"{found.taken} of {found.jobs} jobs were not claimed in time", now_s)
        if self._steps >= IDLE_STEPS and self._is_idle(tally):
            return True
        if found.jobs < WINDOW_JOBS:
            return self._free(now_s) and self._divide()
        self._from = tally
        self._free(now_s)
        if self._judge(new, now_s):
            self._good += 1
            if self._good >= GOOD_WINDOWS:
                self._lost = 0
        else:  # what was lost is dealt with, and says nothing about how much misses
            self._idle_from, self._steps = tally, 0
        self._follow(new, spans(), now_s)
        if why := self._stalls(tally):
            return self.lose(why, now_s)
        if self._divide():
            return True
        return self._rest(now_s) or self.lose(f"PCIe alone is as fast now: {said(self.costs)}", now_s)

    def lose(self, why: str, now_s: float, may_end: bool = True) -> bool:
        """Be off, and try again later and later. may_end: in the end never; False: what others do may pass."""
        self._good = 0
        if may_end and self._lost >= len(RETRY_S):
            return self._stop("off for good", why)
        self._retry_s = now_s + RETRY_S[min(self._lost, len(RETRY_S) - 1)]
        self._lost += 1
        return self._stop("off", why)

    def _try_again(self, tally: Tally, now_s: float) -> bool:
        """Be on, unless all entries are left to PCIe for longer; if it was off, as if nothing had been seen before."""
        if self.state == "off":
            self.costs, self._rate, self._later_us, self._from = self.begun, 1.0, 0.0, tally
            self._windows, self._stalls_from = 0, tally
            for entry in self._entries:
                entry.seen, entry.followed, entry.later_us = Part(), Part(), 0.0
        self._idle_from, self._steps = tally, 0
        self._free(now_s)
        if self._divide():
            self.state, self.why = "on", ""
        else:
            self._rest(now_s)
        return True

    def _stalls(self, tally: Tally) -> str:
        """Why it loses by stalls, of some windows together; nothing: it does not, or not enough is known."""
        self._windows += 1
        if self._windows < STALL_WINDOWS:
            return ""
        new = tally.since(self._stalls_from).total
        self._windows, self._stalls_from = 0, tally
        gained_us = new.saved_us(self.costs) - new.waited_us
        if new.stalled_us <= max(0.0, gained_us):
            return ""
        return f"very late answers took {new.stalled_us / 1e3:.1f} ms, {gained_us / 1e3:.1f} were gained"

    def _is_idle(self, tally: Tally) -> bool:
        """Whether the last steps gained less than it takes that something may be handed over."""
        new = tally.since(self._idle_from).total
        gained_us = new.saved_us(self.costs) - new.waited_us
        self._idle_from, self._steps = tally, 0
        if gained_us >= self._least_us:
            return False
        least = f"{self._least_us / IDLE_STEPS:.0f} us a step for it"
        return self._stop("idle", f"too little misses: {max(0.0, gained_us) / IDLE_STEPS:.0f} us are gained, {least}")

    # --- entries of the table ---

    def _judge(self, new: Tally, now_s: float) -> bool:
        """Leave entries that lose to PCIe, of a window that gains only with jobs enough; whether the window gains."""
        parts = dict(enumerate(new.parts[: self.n_used + 1]))
        for n, part in parts.items():
            self._entries[n].seen = self._entries[n].seen.plus(part)
        gains = new.total.waited_us < new.total.saved_us(self.costs)
        if not gains:
            self._good = 0
            losing = [
                n for n, part in parts.items()
                if part.jobs and not self._entries[n].retry_s and part.waited_us >= part.saved_us(self.costs)
            ]  # fmt: skip
            for n in [n for n in losing if parts[n].jobs >= FEW_JOBS] or losing:
                self._leave(n, parts[n], now_s)
        for n, entry in enumerate(self._entries):
            if entry.seen.jobs < WINDOW_JOBS or entry.retry_s:  # those of steps that were under way
                continue
            least_us = LEAST_GAIN * n * self.costs.pcie_us * entry.seen.layers
            if entry.seen.saved_us(self.costs) - entry.seen.waited_us <= least_us:
                self._leave(n, entry.seen, now_s)
                continue
            entry.seen, entry.good = Part(), entry.good + 1
            if entry.good >= GOOD_WINDOWS:
                entry.lost = 0
        return gains

    def _leave(self, n: int, seen: Part, now_s: float) -> None:
        entry = self._entries[n]
        waited, took = seen.waited_us / seen.jobs, seen.saved_us(self.costs) / seen.jobs
        entry.why = f"an expert was waited for {waited:.0f} us, PCIe takes {took:.0f} for as much"
        entry.retry_s = now_s + RETRY_S[entry.lost] if entry.lost < len(RETRY_S) else NEVER_S
        entry.lost, entry.good, entry.seen = entry.lost + 1, 0, Part()
        entry.later_us = 0.0

    def _free(self, now_s: float) -> bool:
        """Try entries again whose time has come; whether there were any."""
        due = [entry for entry in self._entries if entry.retry_s and now_s >= entry.retry_s]
        for entry in due:
            entry.retry_s, entry.seen = 0.0, Part()
        return bool(due)

    def _rest(self, now_s: float) -> bool:
        """Where all that would be handed over is left to PCIe, be off as long; whether it is."""
        left = [e for e, entry in zip(self._entries, self._found(), strict=True) if entry != NOTHING]
        if not left:
            return False
        first = min(left, key=lambda entry: entry.retry_s)
        self._retry_s = first.retry_s
        return self._stop("off for good" if first.retry_s == NEVER_S else "off", first.why)

    # --- all of it ---

    def _follow(self, new: Tally, spans: Spans, now_s: float) -> None:
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
        if new.trips:
            seen_us = max(0.0, new.trips_us / new.trips - cpu_us[0] - begun.handover_us)
            self._later_us += NEWEST * (seen_us - self._later_us)
        self.costs = replace(begun, cpu_us=cpu_us, handover_us=begun.handover_us + self._later_us)
        for n, part in enumerate(new.parts[: self.n_used + 1]):
            self._balance(n, part, now_s)

    def _balance(self, n: int, part: Part, now_s: float) -> None:
        """Of layers that miss n the CPU gets more where its answers come before copies end, else less."""
        entry, division = self._entries[n], self.table[n]
        if entry.retry_s or division in (NOTHING, (n, 0)):  # of (n, 0) the layer has nothing else to do than wait
            entry.followed = Part()
            return
        entry.followed = seen = entry.followed.plus(part)
        if seen.jobs < WINDOW_JOBS:
            return
        entry.followed, pcie_us = Part(), self.begun.pcie_us
        wait_us = seen.waited_us / max(1, seen.layers)
        if wait_us < SHORT_WAIT * pcie_us:
            entry.later_us = max(entry.later_us - BALANCE * pcie_us, -MOST_LATER * pcie_us)
        elif wait_us > LONG_WAIT * pcie_us:
            entry.later_us = min(entry.later_us + BALANCE * pcie_us, MOST_LATER * pcie_us)
            if self._found()[n] == NOTHING:
                self._leave(n, seen, now_s)

    def _costs_of(self, n: int) -> Costs:
        """The costs of layers that miss n."""
        return replace(self.costs, later_us=self._entries[n].later_us)

    def _found(self) -> list[tuple[int, int]]:
        """The table by the costs. What gains too little is left to PCIe: costs are estimates."""
        found = [divide(n, self._costs_of(n)) for n in range(self.n_used + 1)]
        most_us = (1.0 - LEAST_GAIN) * self.costs.pcie_us
        return [(d.experts, d.rows) if d.us <= n * most_us else NOTHING for n, d in enumerate(found)]

    def _divide(self) -> bool:
        """Make the table, without the entries that are left to PCIe; whether anything is the CPU's."""
        found = zip(self._entries, self._found(), strict=True)
        self.table = tuple(NOTHING if entry.retry_s else division for entry, division in found)
        return any(division != NOTHING for division in self.table)

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

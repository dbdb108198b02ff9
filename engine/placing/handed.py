"""Whether it pays that the CPU takes a part of what steps of several tokens miss, from what comes of it.

In steps of 2 to 32 tokens a part is divided beforehand; in longer ones the CPU takes experts from one end while PCIe
brings them from the other. Either way an answer may come late, or the CPU may take nothing, which ends it for a while,
as in engine/placing/misses.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.placing.misses import GOOD_WINDOWS, RETRY_S

WINDOW_JOBS = 1024  # that were done or taken back, after which what came of them is looked at: some layers of a step


@dataclass(frozen=True, slots=True)
class HandedTally:
    """Counters since the start: layers that had jobs, jobs done, jobs taken back, us that layers waited in the end."""

    layers: int = 0
    done: int = 0
    taken: int = 0
    waited_us: float = 0.0

    @classmethod
    def read(cls, board: Sequence[int]) -> HandedTally:
        """What the GPU has written: layers, jobs done, jobs taken back, and ns."""
        layers, done, taken, waited_ns = board
        return cls(layers, done, taken, waited_ns / 1e3)

    @property
    def counters(self) -> dict[str, float]:
        """As they are told."""
        return {
            "layers": self.layers,
            "computed": self.done,
            "taken_back": self.taken,
            "waited_s": round(self.waited_us / 1e6, 6),
        }

    def since(self, other: HandedTally) -> HandedTally:
        """What came after another."""
        return HandedTally(
            self.layers - other.layers, self.done - other.done, self.taken - other.taken,
            self.waited_us - other.waited_us,
        )  # fmt: skip


class HandedGate:
    """Whether jobs are offered. pcie_us: of an expert over PCIe, as measured.

    window_jobs: after which what came of them is looked at. most_taken: of them, that may be taken back; wanted: what
    the others were, in words. state: "on", "off", or "off for good"; why: it is not on.
    """

    def __init__(
        self, pcie_us: float, window_jobs: int = WINDOW_JOBS, most_taken: float = 1.0,
        wanted: str = "claimed before PCIe had come to it",
    ) -> None:  # fmt: skip
        self.pcie_us, self._window_jobs, self._most_taken, self._wanted = pcie_us, window_jobs, most_taken, wanted
        self.state, self.why = "on", ""
        self._lost = self._good = 0
        self._retry_s = 0.0
        self._from = HandedTally()

    def look(self, tally: HandedTally, now_s: float) -> bool:
        """Look at the counters before a step; whether the state is another now."""
        if self.state == "off for good":
            return False
        if self.state == "off":
            if now_s < self._retry_s:
                return False
            self.state, self.why, self._from = "on", "", tally
            return True
        new = tally.since(self._from)
        if new.done + new.taken < self._window_jobs:
            return False
        self._from = tally
        if not new.done:
            return self.lose(f"none of {new.taken} jobs was {self._wanted}", now_s)
        if new.taken > self._most_taken * (new.done + new.taken):
            return self.lose(f"{new.taken} of {new.done + new.taken} jobs were not {self._wanted}", now_s)
        if new.waited_us >= new.done * self.pcie_us:
            each = new.waited_us / new.done
            return self.lose(f"an expert was waited for {each:.0f} us, PCIe takes {self.pcie_us:.0f}", now_s)
        self._good += 1
        if self._good >= GOOD_WINDOWS:
            self._lost = 0
        return False

    def lose(self, why: str, now_s: float, may_end: bool = True) -> bool:
        """Be off, and try again later and later; as `MissGate.lose`."""
        self._good, self.why = 0, why
        if may_end and self._lost >= len(RETRY_S):
            self.state = "off for good"
            return True
        self._retry_s = now_s + RETRY_S[min(self._lost, len(RETRY_S) - 1)]
        self._lost += 1
        self.state = "off"
        return True

    def stats(self, tally: HandedTally) -> dict[str, Any]:
        """Counters since the start, and the state."""
        return {"state": self.state, "why": self.why, **tally.counters}

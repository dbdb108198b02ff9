"""Which of a layer's missed experts the CPU computes, and which come over PCIe: the division that is done first.

Both work at the same time, so what counts is when the later one has ended. An expert can be divided, too: the CPU
computes the last rows of its gate and up and hands z over, the GPU fetches the others and down. Rows that are computed
whole have the same bits on either side (docs/arithmetic.md), so a division changes no token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor

UNIT_ROWS = 32  # of gate and up: a block of z in 8 bits
# What a divided expert costs on the GPU: z is read from host memory and written to where `down` reads it. Not measured:
# a read over PCIe, and a block that ends a little later.
COPY_US = 3.0
# What a layer takes besides, where the GPU computes a part of what it missed and the CPU another: copies that begin and
# end, z that `down` waits for, counters. Not measured as a model loads, either: benchmarks/divisions.py has it.
BOTH_US = 4.0


@dataclass(frozen=True, slots=True)
class Costs:
    """What was measured: microseconds, and the shape of an expert.

    pcie_us: an expert over PCIe. cpu_us: 1, 2, ... experts on the CPU; more cost as much more as the last did.
    handover_us: from the GPU's post to the CPU's answer, without experts. split_us: what a divided one costs besides.
    n_ff: rows of gate and up, 0 where experts are not divided. first_share: gate and up of an expert's bytes. busy_us:
    the hand-over while PCIe brings other experts; None: as long. later_us: how much later the CPU's part ends than by
    these, where PCIe brings another; it may be negative. both_us: what a layer that both have a part of takes besides.
    """

    pcie_us: float
    cpu_us: Sequence[float]
    handover_us: float
    split_us: float = 0.0
    n_ff: int = 0
    first_share: float = 2 / 3
    busy_us: float | None = None
    later_us: float = 0.0
    both_us: float = 0.0

    def __post_init__(self) -> None:
        numbers = (self.pcie_us, *self.cpu_us, self.handover_us, self.split_us, self.busy_us or 0.0, self.both_us)
        if not self.cpu_us or not all(0 <= n < float("inf") for n in numbers) or not 0 <= self.first_share <= 1:
            raise ValueError(f"costs: expected times of at least one expert, finite and not negative, got {self}")

    def amount(self, rows: int) -> float:
        """Experts, by their bytes, that so many rows of gate and up are."""
        return rows / self.n_ff * self.first_share if rows and self.n_ff else 0.0

    def of_handover(self, is_alone: bool) -> float:
        """Microseconds of the hand-over; is_alone: nothing comes over PCIe meanwhile."""
        if is_alone:
            return self.handover_us
        return (self.handover_us if self.busy_us is None else self.busy_us) + self.later_us

    def of_cpu(self, n: float) -> float:
        """Microseconds of n experts on the CPU, between those that were measured as it lies between them."""
        table = (0.0, *self.cpu_us)
        at = min(floor(n), len(table) - 2)
        return max(0.0, table[at] + (n - at) * (table[at + 1] - table[at]))


@dataclass(frozen=True, slots=True)
class Division:
    """What the CPU takes: whole experts, and the last rows of gate and up of one more; us: when all is done."""

    experts: int
    rows: int
    us: float


def divide(n_missed: int, costs: Costs) -> Division:
    """The division of a layer's misses that ends first; of equal ones that with least for the CPU.

    With experts in the order of their ranks the CPU takes the last ones. Never later than all over PCIe.
    """
    best = Division(0, 0, n_missed * costs.pcie_us)
    for experts in range(n_missed + 1):
        for rows in (0, *_rows(n_missed, experts, costs)) if experts < n_missed else (0,):
            if experts or rows:
                found = Division(experts, rows, makespan(n_missed, experts, rows, costs))
                best = min(best, found, key=lambda d: d.us)  # the first of equal ones
    return best


def makespan(n_missed: int, experts: int, rows: int, costs: Costs) -> float:
    """When the later side has ended, in microseconds, of a division of n_missed experts."""
    if not experts and not rows:
        return n_missed * costs.pcie_us
    amount = experts + costs.amount(rows)
    is_alone = experts == n_missed and not rows
    own = costs.of_handover(is_alone) + costs.of_cpu(amount) + (costs.split_us if rows else 0.0)
    return own if is_alone else max((n_missed - amount) * costs.pcie_us, own) + costs.both_us


def _rows(n_missed: int, experts: int, costs: Costs) -> list[int]:
    """Rows of a divided expert beside `experts` whole ones, of which one is best.

    Between two whole numbers of experts both sides are linear in the rows, so the later one is least where they meet,
    or at an end.
    """
    units = -(-costs.n_ff // UNIT_ROWS)
    if not units or not costs.first_share:
        return []
    step = costs.of_cpu(experts + 1) - costs.of_cpu(experts)
    own = costs.of_handover(False) + costs.of_cpu(experts) + costs.split_us
    others = (n_missed - experts) * costs.pcie_us
    meets = (others - own) / (costs.pcie_us + step) if costs.pcie_us + step > 0 else 0.0
    unit = floor(min(max(meets, 0.0), 1.0) / costs.first_share * costs.n_ff / UNIT_ROWS)
    near = {min(max(u, 1), units) for u in (1, unit - 1, unit, unit + 1, units)}
    return [min(u * UNIT_ROWS, costs.n_ff) for u in sorted(near)]

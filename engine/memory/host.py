"""Host memory for what leaves the device, under one budget: whoever wants some claims it here first.

A claim that its owner can do without says how to give it up. When room is wanted, the least recently used of these go
first, and what is in use never; what was used at one time goes from the deepest on, since that needs the others. The
memory itself is the device's, which uses arrays again that nobody holds any more, and keeps as much as the budget is,
and some for what is gone soon: files that are read, or wait to be written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from engine.ground.errors import CapacityError
from engine.memory.order import Oldest

Kind = Literal["chunks", "snapshots", "forks", "sequences"]  # what host memory is kept for
SOON_BYTES = 1 << 30  # what is read ahead of files, and what waits to be written, at most
_log = logging.getLogger(__name__)


class Memory(Protocol):
    """What the tier asks of a device (engine/ops/cuda/device.py)."""

    def host_array(self, n_bytes: int, keep_bytes: int) -> NDArray[np.uint8]:
        """Memory from which the device copies by itself; CapacityError: there is none."""


@dataclass(slots=True, eq=False)
class Claim:
    """Bytes of the budget. used: the tier's time of the last use. depth: how much had to be there before it.

    give_up: gives it up and returns True, or returns False while it is in use; None: it is in use until it is dropped.
    spare: nothing is lost with it, and it goes before all others.
    """

    kind: Kind
    n_bytes: int
    give_up: Callable[[], bool] | None
    used: int
    depth: int
    spare: bool = False

    @property
    def order(self) -> tuple[bool, int, int, bool]:
        """The least goes first."""
        return not self.spare, self.used, -self.depth, self.kind == "chunks"


class HostTier:
    """The budget of host memory, who has how much of it, and the memory.

    device: whose memory it is. budget_bytes: of all claims together; less from the time on that the machine has less.
    """

    def __init__(self, device: Memory, budget_bytes: int = 0) -> None:
        self.budget_bytes = budget_bytes
        self.n_bytes = 0
        self._spare_bytes = 0
        self.now = 0
        self._device, self._keep_bytes = device, budget_bytes + SOON_BYTES
        self._claims = Oldest[Claim](attrgetter("order"))
        self._fixed_bytes = 0  # of claims that nobody can give up

    def tick(self) -> int:
        """Go on to the next time of use, and return it."""
        self.now += 1
        return self.now

    def claim(
        self, kind: Kind, n_bytes: int, give_up: Callable[[], bool] | None = None, depth: int = 0,
        used: int | None = None,
    ) -> Claim | None:  # fmt: skip
        """Take n_bytes of the budget, for which others may have to go; None where that is not enough.

        used: when it was used last; None: now.
        """
        # What can never fit makes nobody go.
        if self._fixed_bytes + n_bytes > self.budget_bytes:
            return None
        while self.n_bytes + n_bytes > self.budget_bytes:
            if not any(held.give_up() for held in self._claims if held.give_up is not None):
                return None
        made = Claim(kind, n_bytes, give_up, self.now if used is None else used, depth)
        self._claims.add(made)
        self.n_bytes += n_bytes
        self._fixed_bytes += n_bytes if give_up is None else 0
        return made

    @property
    def room_bytes(self) -> int:
        """Bytes that can be claimed with nothing lost."""
        return self.budget_bytes - self.n_bytes + self._spare_bytes

    def spare(self, claim: Claim, spare: bool) -> None:
        """Let a claim be one that nothing is lost with, or one of the others again."""
        if claim.spare != spare:
            self._spare_bytes += claim.n_bytes if spare else -claim.n_bytes
            self._claims.remove(claim)  # its place may be before the one that it had
            claim.spare = spare
            self._claims.add(claim)

    def drop(self, claim: Claim) -> None:
        """Give a claim's bytes back, once."""
        self._claims.remove(claim)
        self.n_bytes -= claim.n_bytes
        self._spare_bytes -= claim.n_bytes if claim.spare else 0
        self._fixed_bytes -= claim.n_bytes if claim.give_up is None else 0

    def array(self, n_bytes: int) -> NDArray[np.uint8]:
        """Memory, as it was left, for what is claimed or is gone soon; CapacityError: the machine has no more.

        Claims that are spare go before that.
        """
        while True:
            try:
                return self._device.host_array(n_bytes, self._keep_bytes)
            except CapacityError:
                first = next(iter(self._claims), None)
                if first is None or not first.spare or first.give_up is None or not first.give_up():
                    raise

    def short(self) -> None:
        """Let the claims that there are now be all that there will be: the machine has less than the budget."""
        if self.budget_bytes > self.n_bytes:
            _log.warning(
                "host memory is short: prefixes keep %.2f GiB of the %.2f that they may",
                self.n_bytes / 2**30, self.budget_bytes / 2**30, extra={"reason": "host_memory"},
            )  # fmt: skip
            self.budget_bytes = self.n_bytes

    def bytes_by_kind(self) -> dict[Kind, int]:
        """Bytes that are claimed, by what for."""
        found: dict[Kind, int] = dict.fromkeys(get_args(Kind), 0)
        for claim in self._claims:
            found[claim.kind] += claim.n_bytes
        return found

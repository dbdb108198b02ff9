"""The seam for guessed experts: who is told what the rows of a step with a draft chose, and may say what comes next.

A row of a draft that was rejected went through all layers, too: its token may come a step later, or one like it, so its
experts are a forecast of those that the next steps want. What it is worth is counted by benchmarks/guesses.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.ops import I32

Expected: TypeAlias = tuple[tuple[int, ...], ...]  # of each MoE layer, experts, the likeliest first


@dataclass(frozen=True, slots=True)
class Routed:
    """What the rows of a step chose, each a token of a reply, those of one reply in order.

    experts: int32 [L, T, A], L the MoE layers. stayed: bool [T], not so of tokens of a draft that were taken back.
    replies: the serial number of each row's reply.
    """

    experts: I32
    stayed: NDArray[np.bool_]
    replies: tuple[int, ...]


class Forecast(Protocol):
    """Who listens (`Decoder.forecast`)."""

    def verified(self, routed: Routed) -> Expected | None:
        """A step with a draft was accepted; the experts that the next step is expected to use, None: nothing is known.

        Called between two steps, which wait for it. The arrays are its own.
        """

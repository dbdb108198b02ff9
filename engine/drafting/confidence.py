"""What a drafter's own chances say of its drafts: a token that it was sure of stays more often than another.

How often its tokens stay, by their place, is known from those that were tried (`outcomes.Chances`). Beside that it
counts by how much a token's log-odds are above those of their mean chance: by a slope, which is learned. A drafter that
is as right as it thinks has a slope of 1, and its chances are taken as they are; one whose chances mean nothing gets 0,
and is judged by places alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from engine.ops import F32

FADE = 0.985  # what is left of what was seen when a token is seen
_MOST_ODDS = 8.0  # log-odds, beyond which a chance says no more
_FIRST_SLOPE = 1.0
_WEIGHT = 4.0  # of the first slope: the curvature that is taken to have been seen


def sureness(logits: F32) -> list[float]:
    """The chance that a drafter gives the likeliest token of each row of logits [n, V]; 0 where they are not finite."""
    with np.errstate(invalid="ignore", over="ignore"):
        chances = 1.0 / np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1, dtype=np.float64)
    return [chance if math.isfinite(chance) else 0.0 for chance in chances.tolist()]


def odds(chance: float) -> float:
    """Its log-odds, no further than _MOST_ODDS from even."""
    least = 1.0 / (1.0 + math.exp(_MOST_ODDS))
    chance = min(max(chance, least), 1.0 - least)
    return math.log(chance / (1.0 - chance))


def chance_of(log_odds: float) -> float:
    """The inverse of `odds`."""
    return 1.0 / (1.0 + math.exp(-log_odds))


class Confidence:
    """Of one source's drafts. n_groups: of places, that have a mean of their own."""

    def __init__(self, n_groups: int) -> None:
        self.slope = _FIRST_SLOPE
        self._weight = _WEIGHT
        self._means, self._seen = [0.0] * n_groups, [0.0] * n_groups

    def chance(self, known: float, sure: float, group: int) -> float:
        """That a token stays if all before it do. known: for tokens at its place; sure: what its drafter says."""
        return chance_of(odds(known) + self.slope * self._above(sure, group))

    def learn(self, known: Sequence[float], sure: Sequence[float], groups: Sequence[int], n_stayed: int) -> None:
        """Take in tokens that were tried, as far as all before them stayed. known: by group, as it was then."""
        for place in range(min(len(sure), n_stayed + 1)):
            group = groups[place]
            above = self._above(sure[place], group)
            expected = chance_of(odds(known[group]) + self.slope * above)
            self._weight = FADE * self._weight + (1.0 - FADE) * _WEIGHT + expected * (1.0 - expected) * above * above
            self.slope = max(0.0, self.slope + ((place < n_stayed) - expected) * above / self._weight)
            self._count(sure[place], group, 1.0)

    def expect(self, sure: Sequence[float], groups: Sequence[int], stay: Sequence[float], n_tried: int) -> None:
        """Take in the tokens that are not tried, as `outcomes.Chances.expect`: they count in the mean."""
        before = stay[n_tried - 1] if n_tried else 1.0
        for place in range(n_tried, len(stay)):
            self._count(sure[place], groups[place], before)
            before = stay[place]

    def _count(self, sure: float, group: int, weight: float) -> None:
        self._seen[group] = (1.0 - (1.0 - FADE) * weight) * self._seen[group] + weight
        if weight > 0.0:
            self._means[group] += weight * (sure - self._means[group]) / self._seen[group]

    def _above(self, sure: float, group: int) -> float:
        return odds(sure) - odds(self._means[group]) if self._seen[group] else 0.0

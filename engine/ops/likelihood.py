"""How likely tokens are by a row of logits: docs/arithmetic.md, "Log-probabilities".

Weights are integers, as in sampling, so that the sum of all has the same bits in any order; the logarithm is taken by
the host on every backend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.ops import F32, arithmetic

MASS_BITS = 40  # the likeliest token weighs 2^40, and 2^20 tokens add up to 2^60 at most
EXP_CHUNK = 8192  # the temporary arrays of `exp` stay in the cache
_LOWEST = np.float32(-29)  # exp(-29) * 2^40 rounds to 0


class Likelihood(NamedTuple):
    """Natural logarithms of probabilities: of the token that was drawn, and the likeliest as (token, log p)."""

    logprob: float
    top: tuple[tuple[int, float], ...]


def likelihood(logits: F32, token: int, n: int) -> Likelihood:
    """How likely a token was by logits float32 [V], all finite, and the n likeliest tokens; docs/arithmetic.md."""
    s = logits - logits.max()
    s = s[s >= _LOWEST]
    parts = (arithmetic.exp(s[i : i + EXP_CHUNK]) for i in range(0, len(s), EXP_CHUNK))
    mass = sum(int(np.rint(p * np.float32(2.0**MASS_BITS)).astype(np.uint64).sum()) for p in parts)
    top = [(int(i), float(logits[i])) for i in largest(logits, max(n, 1))]
    return log_likelihood(float(logits[token]), mass, top, n)


def log_likelihood(logit: float, mass: int, top: Sequence[tuple[int, float]], n: int) -> Likelihood:
    """Logarithms from a token's logit, the sum of weights and the likeliest tokens' logits, the largest first."""
    total = top[0][1] + math.log(mass / (1 << MASS_BITS))
    return Likelihood(logit - total, tuple((token, value - total) for token, value in top[:n]))


def largest(logits: F32, n: int) -> NDArray[np.intp]:
    """Indices of the n largest, largest first, ties to the smaller index."""
    # Only what can be kept is sorted: sorting a vocabulary of 152K takes longer than a layer.
    found = np.arange(len(logits))
    if n < len(logits):
        found = np.flatnonzero(logits >= np.partition(logits, -n)[-n])
    return found[np.argsort(-logits[found], kind="stable")][:n]

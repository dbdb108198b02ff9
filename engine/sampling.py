"""From logits to a token, reproducibly: random numbers are keyed by (seed, position).

The order is that of most engines: repetition penalty, temperature, top-k, top-p, min-p. Temperature
0 is greedy. NaN or infinite logits are an error, not a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.errors import NumericalError
from engine.ops import F32

PENALTY_TOKENS = 256
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is drawn.

    temperature: 0 takes the largest logit. top_k: 0 keeps all. top_p, min_p: 1 and 0 keep all.
    repetition_penalty: 1 does nothing; > 1 makes the last PENALTY_TOKENS tokens less likely.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from (seed, position): two rounds of SplitMix64 (Steele et al., 2014)."""
    z = (seed * 0x9E3779B97F4A7C15 + position + 1) & _MASK
    for _ in range(2):
        z = (z + 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z ^= z >> 31
    return (z >> 11) * 2.0**-53


def check_finite(logits: F32) -> None:
    """Raise NumericalError when a logit is NaN or infinite; logits of any shape."""
    if not np.isfinite(logits).all():
        bad = int(np.count_nonzero(~np.isfinite(logits)))
        raise NumericalError(
            f"{bad} of {logits.size} logits are not finite",
            hint="the model file may be damaged; compare its checksum with the publisher's",
        )


def sample(logits: F32, params: SamplingParams, position: int, recent: Sequence[int] = ()) -> int:
    """Draw the token for `position` from logits float32 [V]; `recent`: tokens so far, oldest first."""
    check_finite(logits)
    if params.repetition_penalty != 1.0 and recent:
        seen = np.unique(np.asarray(recent[-PENALTY_TOKENS:], dtype=np.int64))
        logits = logits.copy()
        penalty = np.float32(params.repetition_penalty)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        check_finite(logits)
    if params.temperature <= 0.0:
        return int(np.argmax(logits))
    keep = np.arange(len(logits))
    if 0 < params.top_k < len(logits):
        # Only what can be kept is sorted: sorting a vocabulary of 152K takes longer than a layer.
        keep = np.flatnonzero(logits >= np.partition(logits, -params.top_k)[-params.top_k])
    keep = keep[np.argsort(-logits[keep], kind="stable")][: params.top_k or None]
    wide = logits[keep].astype(np.float64)
    with np.errstate(over="ignore"):
        p = np.exp((wide - wide[0]) / params.temperature)
    p /= p.sum()
    if params.top_p < 1.0:
        n = int(np.searchsorted(np.cumsum(p), params.top_p)) + 1
        keep, p = keep[:n], p[:n]
    if params.min_p > 0.0:
        n = int(np.count_nonzero(p >= params.min_p * p[0]))
        keep, p = keep[:n], p[:n]
    edges = np.cumsum(p)
    index = int(np.searchsorted(edges, uniform(params.seed, position) * edges[-1], side="right"))
    return int(keep[min(index, len(keep) - 1)])

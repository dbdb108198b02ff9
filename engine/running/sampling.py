"""From logits to a token, reproducibly: docs/arithmetic.md, "Sampling".

Weights are integers, so that every backend draws the same token from the same logits; random numbers are keyed
by (seed, position). The order is that of most engines: penalties, temperature, top-k, top-p, min-p. Temperature 0 is
greedy. NaN or infinite logits are an error, not a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.ground.errors import NumericalError
from engine.ground.sampling import Sampling as SamplingParams
from engine.ops import F32, arithmetic
from engine.ops.likelihood import EXP_CHUNK, Likelihood, largest

__all__ = [
    "PENALTY_TOKENS", "Drawing", "Drawn", "SamplingParams", "check_finite", "counts_reply", "fixed_point",
    "random_bits", "sample",
]  # fmt: skip

PENALTY_TOKENS = 256  # the last ones, that a repetition penalty makes less likely
UNIT_BITS = 32  # the likeliest token weighs 2^32; so probabilities are fixed-point numbers of 32 bits
LOWEST = np.float32(-23)  # exp(-23) * 2^32 rounds to 0
_MASK = (1 << 64) - 1
_SORTED = 1024  # of the likeliest tokens, before all are sorted


def fixed_point(probability: float) -> int:
    """A probability in units of 2^-32, rounded to nearest."""
    return round(probability * 2.0**UNIT_BITS)


def random_bits(seed: int, position: int) -> int:
    """64 random bits from (seed, position): two rounds of SplitMix64 (Steele et al., 2014)."""
    z = (seed * 0x9E3779B97F4A7C15 + position + 1) & _MASK
    for _ in range(2):
        z = (z + 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z ^= z >> 31
    return z


class Drawn(NamedTuple):
    """A token that was drawn, and how likely it was, where that was asked for."""

    token: int
    likelihood: Likelihood | None = None


@dataclass(frozen=True, slots=True)
class Drawing:
    """A token to be drawn from a row of a step's logits, the next of a sequence.

    number: which of those that share steps, 0, 1, ...; request: whose, no two alike; history: all its tokens, of which
    the reply are those from reply_from on; row: counted among the wanted ones. allowed: as `sample` takes it. logprobs:
    how many likeliest tokens are wanted beside the likelihood of the drawn one; None: neither.
    """

    number: int
    request: int
    history: Sequence[int]
    row: int
    params: SamplingParams
    reply_from: int
    allowed: NDArray[np.uint32] | None = None
    logprobs: int | None = None


def check_finite(logits: F32) -> None:
    """Raise NumericalError when a logit is NaN or infinite; logits of any shape."""
    if not np.isfinite(logits).all():
        bad = int(np.count_nonzero(~np.isfinite(logits)))
        raise NumericalError(
            f"{bad} of {logits.size} logits are not finite",
            hint="the model file may be damaged; compare its checksum with the publisher's",
        )


def sample(
    logits: F32,
    params: SamplingParams,
    position: int,
    recent: Sequence[int] = (),
    allowed: NDArray[np.uint32] | None = None,
    reply: Sequence[int] = (),
) -> int:
    """Draw the token for `position` from logits float32 [V].

    recent: tokens so far, oldest first. allowed: a bit for each token, uint32 [ceil(V / 32)], at least one set; None
    allows all. reply: those of them that frequency and presence penalties count.
    """
    if params.repetition_penalty != 1.0:
        logits = _penalized(logits, np.float32(params.repetition_penalty), recent)
    if counts_reply(params):
        logits = _less_of_the_same(logits, params, reply)
    check_finite(logits)
    ids = None
    if allowed is not None:
        ids = np.flatnonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little")[: len(logits)])
        logits = logits[ids]
    temperature = np.float32(params.temperature)
    top = int(np.argmax(logits))
    if temperature <= 0:
        return top if ids is None else int(ids[top])
    with np.errstate(over="ignore"):
        scaled = (logits - logits[top]) / temperature
    likely = np.flatnonzero(scaled >= LOWEST)  # the others weigh nothing
    if 0 < params.top_k < len(likely):
        likely = likely[np.sort(largest(logits[likely], params.top_k))]
    parts = (arithmetic.exp(scaled[likely[i : i + EXP_CHUNK]]) for i in range(0, len(likely), EXP_CHUNK))
    weights = np.rint(np.concatenate([*parts]) * np.float32(2.0**UNIT_BITS)).astype(np.uint64)
    if fixed_point(params.top_p) < 1 << UNIT_BITS:
        kept = _nucleus(logits[likely], weights, fixed_point(params.top_p))
        likely, weights = likely[kept], weights[kept]
    weights[weights < np.uint64(fixed_point(params.min_p))] = 0
    edges = np.cumsum(weights)
    drawn = random_bits(params.seed, position) * int(edges[-1]) >> 64
    token = likely[np.searchsorted(edges, np.uint64(drawn), side="right")]
    return int(token if ids is None else ids[token])


def counts_reply(params: SamplingParams) -> bool:
    """Whether it matters how often each token is in the reply so far."""
    return params.frequency_penalty != 0 or params.presence_penalty != 0


def _less_of_the_same(logits: F32, params: SamplingParams, reply: Sequence[int]) -> F32:
    frequency, presence = np.float32(params.frequency_penalty), np.float32(params.presence_penalty)
    seen, counts = np.unique(np.asarray(reply, dtype=np.int64), return_counts=True)
    logits = logits.copy()
    logits[seen] = logits[seen] - (frequency * counts.astype(np.float32) + presence)
    return logits


def _penalized(logits: F32, penalty: np.float32, recent: Sequence[int]) -> F32:
    seen = np.unique(np.asarray(recent[-PENALTY_TOKENS:], dtype=np.int64))
    logits = logits.copy()
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    return logits


def _nucleus(logits: F32, weights: NDArray[np.uint64], top_p: int) -> NDArray[np.intp]:
    """Indices, ascending, of the shortest prefix, largest first, with a share `top_p` of all weights."""
    target = -(-max(top_p, 1) * int(weights.sum()) >> UNIT_BITS)  # rounded up, so never nothing
    for n in (min(_SORTED, len(logits)), len(logits)):
        order = largest(logits, n)
        mass = np.cumsum(weights[order])
        if int(mass[-1]) >= target:
            break
    return np.sort(order[: int(np.searchsorted(mass, np.uint64(target))) + 1])

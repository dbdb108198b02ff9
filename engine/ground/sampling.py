"""How a token is drawn: the parameters, and what they may be. What is done with them is in running/sampling.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.ground import checks

PENALTY_MOST = 100.0  # that a logit is divided by; and its inverse, since smaller ones leave the range of a float32
PENALTY_RANGE = 2.0  # of frequency and presence penalties, either way


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is drawn: temperature 0 is greedy, `top_k` 0, `top_p` 1, `min_p` 0 and penalties of 0 are off.

    frequency_penalty, presence_penalty: -2 to 2, taken off a token's logit for each time, and once where, the reply
    has it; the prompt's tokens do not count.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0


GREEDY = Sampling()
CHECK = checks.record(
    Sampling,
    {
        "temperature": checks.number(0.0, 100.0),
        "top_k": checks.integer(0, (1 << 31) - 1),
        "top_p": checks.number(0.0, 1.0),  # 0: the likeliest token alone
        "min_p": checks.number(0.0, 1.0),
        "repetition_penalty": checks.number(1 / PENALTY_MOST, PENALTY_MOST),
        "seed": checks.integer(0, (1 << 64) - 1),
        "frequency_penalty": checks.number(-PENALTY_RANGE, PENALTY_RANGE),
        "presence_penalty": checks.number(-PENALTY_RANGE, PENALTY_RANGE),
    },
)


def sampling_from(given: Mapping[str, Any]) -> Sampling:
    """Make the sampling that decoded JSON describes; raises RequestError naming the field."""
    sampling: Sampling = CHECK("", given)
    return sampling

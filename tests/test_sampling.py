"""Sampling: distributions against exact probabilities, and the same (seed, position) the same token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import NumericalError
from engine.sampling import SamplingParams, sample, uniform

LOGITS = np.array([0.5, 3.0, -1.0, 2.0, 2.5, -9.0, 0.0], np.float32)


def frequencies(params: SamplingParams, n: int = 4000) -> np.ndarray:
    drawn = [sample(LOGITS, params, position) for position in range(n)]
    return np.bincount(drawn, minlength=len(LOGITS)) / n


def test_greedy_takes_the_first_of_the_largest() -> None:
    assert sample(LOGITS, SamplingParams(), 5) == 1
    assert sample(np.array([1, 4, 4, 2], np.float32), SamplingParams(), 0) == 1


def test_frequencies_follow_the_softmax() -> None:
    p = np.exp(LOGITS / 0.8)
    p /= p.sum()
    assert np.abs(frequencies(SamplingParams(temperature=0.8, seed=3)) - p).max() < 0.03


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(temperature=1.0, top_k=2), {1, 4}),
        (SamplingParams(temperature=1.0, top_p=0.7), {1, 4}),
        (SamplingParams(temperature=1.0, min_p=0.3), {1, 3, 4}),
        (SamplingParams(temperature=1.0, top_k=1), {1}),
        (SamplingParams(temperature=1.0, top_p=1e-9), {1}),
    ],
)
def test_filters_keep_what_they_say(params: SamplingParams, kept: set[int]) -> None:
    assert set(np.flatnonzero(frequencies(params, 600))) == kept


def test_repetition_penalty_lowers_both_signs() -> None:
    params = SamplingParams(repetition_penalty=10.0)
    assert sample(LOGITS, params, 0, [1]) == 4
    negative = np.array([-1.0, -1.5, -3.0], np.float32)
    assert sample(negative, params, 0, [0]) == 1


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31))
def test_uniform_is_in_range_and_repeats(seed: int, position: int) -> None:
    value = uniform(seed, position)
    assert 0.0 <= value < 1.0
    assert value == uniform(seed, position)


def test_uniform_is_spread_over_positions_and_seeds() -> None:
    for values in ([uniform(9, i) for i in range(4096)], [uniform(i, 9) for i in range(4096)]):
        counts, _ = np.histogram(values, bins=16, range=(0, 1))
        assert abs(np.mean(values) - 0.5) < 0.02
        assert counts.min() > 256 * 0.75


@pytest.mark.parametrize("temperature", [1e-308, 1e-12, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    assert {sample(LOGITS, SamplingParams(temperature=temperature), i) for i in range(50)} == {1}


def test_a_penalty_that_overflows_is_an_error() -> None:
    with pytest.raises(NumericalError):
        sample(LOGITS, SamplingParams(repetition_penalty=1e-300), 0, [1])


def test_top_k_keeps_the_first_of_equals() -> None:
    logits = np.array([0.0, 2.0, 2.0, 2.0, 1.0], np.float32)
    drawn = {sample(logits, SamplingParams(temperature=1.0, top_k=2), i) for i in range(200)}
    assert drawn == {1, 2}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_an_error(bad: float) -> None:
    logits = LOGITS.copy()
    logits[2] = bad
    with pytest.raises(NumericalError, match="1 of 7 logits"):
        sample(logits, SamplingParams(), 0)

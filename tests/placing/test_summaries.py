"""Summaries of keys: bounds that hold for whatever there is, estimates that are what they say, and the choice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.placing.summaries import (
    KINDS,
    Extremes,
    Means,
    Sketch,
    Summary,
    best,
    left_out,
    log_sum,
    true_masses,
)  # fmt: skip

N, D = 64, 24
FEWEST_DIGITS = 1e-9  # of a mass: sums of float64 in another order


def spiked(rng: np.random.Generator, B: int) -> np.ndarray:
    """Keys that make summaries err: a spike in each block, sinks, blocks that repeat, channels of another size."""
    keys = rng.standard_normal((B, N, D)) * np.exp(rng.normal(0, 1.5, D))
    spikes = rng.integers(N, size=B)
    keys[np.arange(B), spikes] *= rng.choice([-20.0, 1.0, 30.0], B)[:, None]
    keys[0] += 8.0
    keys[B // 2] = keys[B // 3]
    keys[-1, 1:] = keys[-1, :1]  # one key, over and over
    most = float(np.finfo(np.float16).max)  # a cache of halves holds nothing beyond
    return np.clip(keys, -most, most).astype(np.float16).astype(np.float64)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from([1e-3, 0.3, 1.0, 12.0]), towards=st.booleans())
def test_no_mass_exceeds_its_bound(kind: Summary, seed: int, size: float, towards: bool) -> None:
    rng = np.random.default_rng(seed)
    keys = spiked(rng, 7)
    q = size * rng.standard_normal((5, D))
    if towards:  # queries that look for one key
        q = size * keys[rng.integers(7, size=5), rng.integers(N, size=5)]
    estimated, at_most = kind.masses(kind.of(keys), q, D**-0.5)
    true = true_masses(keys, q, D**-0.5)
    assert estimated.shape == at_most.shape == true.shape == (5, 7)
    assert (true <= at_most + FEWEST_DIGITS * np.maximum(1, np.abs(true))).all()
    if not isinstance(kind, Extremes):
        assert (estimated <= at_most + FEWEST_DIGITS * np.maximum(1, np.abs(at_most))).all()


def test_keys_that_are_alike_are_known_exactly() -> None:
    """With one key in a block, of halves, every kind but its radius' rounding says what it is."""
    rng = np.random.default_rng(1)
    keys = np.repeat(rng.standard_normal((3, 1, D)).astype(np.float16).astype(np.float64), N, axis=1)
    q = rng.standard_normal((4, D))
    for kind in KINDS:
        estimated, at_most = kind.masses(kind.of(keys), q, D**-0.5)
        true = true_masses(keys, q, D**-0.5)
        np.testing.assert_allclose(at_most, true, atol=1e-6)
        np.testing.assert_allclose(estimated + np.log(N) * isinstance(kind, Extremes), true, atol=1e-6)


def test_more_bytes_bound_better() -> None:
    rng = np.random.default_rng(2)
    keys = rng.standard_normal((20, N, D)).astype(np.float16).astype(np.float64)
    q = rng.standard_normal((30, D))
    true = true_masses(keys, q, D**-0.5)
    over = {kind.name: float(np.median(kind.masses(kind.of(keys), q, D**-0.5)[1] - true)) for kind in KINDS}
    assert over["sketch of 4 bits"] < over["sketch of 2 bits"] < over["4 means"]
    assert over["sketch of 4 bits"] < over["extremes"] and 0 < over["sketch of 4 bits"] < 1
    sizes = [kind.n_bytes(128) for kind in (Means(1), Means(4), Extremes(), Sketch(2), Sketch(4))]
    assert sizes == [258, 1032, 512, 2688, 4736]


def test_a_sketch_keeps_keys_within_half_a_step() -> None:
    keys = spiked(np.random.default_rng(3), 9)
    for bits in (2, 4):
        kept = Sketch(bits).of(keys)
        assert kept["code"].max() == 2**bits - 1
        off = np.abs(keys - Sketch(bits).keys(kept))
        assert (off <= 0.5000001 * kept["step"].astype(np.float64)[:, None]).all()
        assert (np.linalg.norm(off, axis=2) <= kept["away"].astype(np.float64)).all()


def test_the_choice() -> None:
    masses = np.log([[8.0, 1, 5, 1, 1, 4], [1, 1, 1, 9, 1, 1]])
    kept = np.array([False, True, False, False, False, False])
    assert np.flatnonzero(best(masses, 0, kept)).tolist() == [1]
    # The second row's fourth block has 9 of 14, the first row's first one 8 of 20.
    assert np.flatnonzero(best(masses, 1, kept)).tolist() == [1, 3]
    assert np.flatnonzero(best(masses, 2, kept)).tolist() == [0, 1, 3]
    assert best(masses, 99, kept).all()
    alike = np.zeros((1, 4))
    assert np.flatnonzero(best(alike, 2, np.zeros(4, bool))).tolist() == [0, 1]


def test_what_is_left_out() -> None:
    rng = np.random.default_rng(4)
    keys, q = spiked(rng, 6), rng.standard_normal((3, D))
    masses = true_masses(keys, q, 1.0)
    read = np.array([True, False, True, False, False, True])
    weights = np.exp(masses - masses.max(axis=1, keepdims=True))
    share = weights[:, ~read].sum(axis=1) / weights.sum(axis=1)
    np.testing.assert_allclose(left_out(log_sum(masses[:, read]), log_sum(masses[:, ~read])), share, rtol=1e-9)
    assert left_out(log_sum(masses), log_sum(masses[:, :0])).tolist() == [0.0, 0.0, 0.0]

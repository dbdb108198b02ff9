"""The model of routing has the rates it claims, and imposed routing misses exactly what it was asked to."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.routing import Routing, guessed, imposed, missed, rates


@pytest.mark.slow
def test_published_rates_at_40_percent() -> None:
    found = rates(Routing(), 40.0)
    assert 0.68 <= found["static"] <= 0.73
    assert 0.90 <= found["lru"] <= 0.95
    assert 0.905 <= found["oracle"] <= 0.935
    assert 0.24 <= found["previous_token"] <= 0.45


def test_another_model_of_the_same_shapes_has_the_same_rates() -> None:
    found = rates(Routing(n_layer=12, seed=7), 40.0, calibration=8, held_out=3)
    assert 0.67 <= found["static"] <= 0.74
    assert 0.89 <= found["lru"] <= 0.95


def test_sessions_are_deterministic_and_differ() -> None:
    routing = Routing(n_layer=3, n_expert=40, n_expert_used=6)
    a, b = routing.session(150, 0), routing.session(150, 1)
    assert a.shape == (150, 3, 6)
    assert a.dtype == np.uint16
    assert a.max() < 40
    assert all(len(set(row)) == 6 for row in a.reshape(-1, 6).tolist())
    assert np.array_equal(a, routing.session(150, 0))
    assert not np.array_equal(a, b)
    trace = routing.trace(2, 150)
    assert np.array_equal(trace.experts, np.concatenate([a, b]))
    assert trace.session.tolist() == [0] * 150 + [1] * 150


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.066, 0.4, 1.0])
def test_imposed_routing_misses_exactly_its_share(rate: float) -> None:
    rng = np.random.default_rng(1)
    resident = np.zeros((5, 37), np.bool_)
    for row, n in zip(resident, (19, 20, 9, 24, 22), strict=True):
        row[rng.permutation(37)[:n]] = True
    chosen = imposed(resident, 203, 6, rate, seed=9)
    assert chosen.shape == (203, 5, 6)
    assert all(len(set(row)) == 6 for row in chosen.reshape(-1, 6).tolist())
    misses = missed(chosen, resident)
    assert misses.sum() == round(rate * chosen.size)
    if 0.05 < rate < 1:  # spread over tokens and layers, as independent draws are
        assert abs(misses.var() / (6 * rate * (1 - rate)) - 1) < 0.25
        by_layer = misses.sum(axis=0) / misses.sum()
        assert np.abs(by_layer - 0.2).max() < 0.1
    assert np.array_equal(chosen, imposed(resident, 203, 6, rate, seed=9))


@pytest.mark.slow
@pytest.mark.parametrize(("recall", "precision"), [(0.83, 0.45), (0.6, 0.9), (1.0, 1.0)])
def test_guesses_are_right_as_often_as_they_are_to_be(recall: float, precision: float) -> None:
    rng = np.random.default_rng(2)
    resident = np.zeros((5, 61), np.bool_)
    for row in resident:
        row[rng.permutation(61)[:40]] = True
    chosen = imposed(resident, 900, 6, 0.05, seed=4)
    found = guessed(chosen, resident, recall, precision, 4, seed=7)
    assert found.shape == (900, 5, 4) and found.min() >= -1 and np.array_equal(
        found, guessed(chosen, resident, recall, precision, 4, seed=7)
    )  # fmt: skip
    right = made = 0
    for t, layer in np.ndindex(900, 5):
        guesses = found[t, layer][found[t, layer] >= 0]
        assert len(set(guesses.tolist())) == len(guesses) and not resident[layer, guesses].any()
        made += len(guesses)
        right += int(np.isin(guesses, chosen[t, layer]).sum())
    assert abs(right / missed(chosen, resident).sum() - recall) < 0.03
    assert abs(right / made - precision) < 0.03


def test_imposed_routing_refuses_what_cannot_be() -> None:
    resident = np.ones((2, 9), np.bool_)
    resident[1, 0] = False
    with pytest.raises(ValueError, match="layer 0: a token needs"):
        imposed(resident, 50, 4, 0.5, seed=0)

"""Guesses: chances that rise as margins do, ranks beside sorting, and a rule of costs beside its own definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.placing import guesses
from engine.placing.guesses import (
    EARLY_WINDOWS,
    MANY_GUESSES,
    MEMORY,
    ODD_FIRST,
    ODD_WITH,
    Chances,
    Gate,
    Record,
    Timed,
)

SEEDS = st.integers(0, 2**32 - 1)
SECONDS = st.floats(0, 1, allow_subnormal=False)


@settings(deadline=None, max_examples=80)
@given(seed=SEEDS, n_used=st.integers(1, 7), shift=st.sampled_from([0.0, 64.0, -3.5]))
def test_a_margin_is_above_what_the_last_used_expert_needs(seed, n_used, shift):
    scores = np.random.default_rng(seed).permuted(np.arange(5 * 7, dtype=np.float64).reshape(5, 7) / 8, axis=1)
    found = guesses.margins(scores + shift, n_used)
    assert np.array_equal(found, guesses.margins(scores, n_used))  # what all have in common says nothing
    for row, margin in zip(scores, found, strict=True):
        best = np.argsort(-row, kind="stable")
        if n_used < 7:
            assert (margin[best[:n_used]] > 0).all() and (margin[best[n_used:]] < 0).all()
            assert margin[best[n_used - 1]] == -margin[best[n_used]]
        else:
            assert margin.min() == 0


def test_no_guess_at_all_has_no_margin():
    inf = np.inf
    found = guesses.margins(np.array([[3.0, -inf, 1.0, -inf, 7.0], [-inf] * 5, [-inf, 2.0, -inf, -inf, -inf]]), 3)
    assert found.tolist() == [[2, -inf, 0, -inf, 6], [-inf] * 5, [-inf, 0, -inf, -inf, -inf]]
    assert guesses.logistic().of(found)[1].tolist() == [0] * 5


@settings(deadline=None, max_examples=80)
@given(seed=SEEDS, n=st.integers(1, 9), chance=st.floats(0, 1))
def test_a_least_margin_is_where_chances_exceed_another(seed, n, chance):
    rng = np.random.default_rng(seed)
    table = Chances(np.cumsum(rng.random(n) + 0.1) - 3, np.sort(np.round(rng.random(n), 1)))
    least = table.least_margin(chance)
    at = np.linspace(-4, 8, 97)
    near = np.abs(at - least) < 1e-9
    assert ((table.of(at) > chance + 1e-9) <= (at > least) | near).all()
    assert ((at > least) <= (table.of(at) > chance - 1e-9) | near).all()


@settings(deadline=None, max_examples=60)
@given(seed=SEEDS, n=st.integers(1, 400), steepness=st.sampled_from([0.0, 0.3, 2.0, 50.0]), levels=st.booleans())
def test_a_fitted_table_rises_within_0_and_1_and_keeps_order(seed, n, steepness, levels):
    rng = np.random.default_rng(seed)
    margin = rng.normal(0, 3, n)
    if levels:
        margin = np.round(margin)
    used = rng.random(n) < 1 / (1 + np.exp(-steepness * margin))
    table = guesses.fit(np.where(rng.random(n) < 0.1, -np.inf, margin), used)
    assert len(table.knots) <= 49 and np.isfinite(table.knots).all()
    spread = np.linspace(margin.min() - 1, margin.max() + 1, 300)
    chances = table.of(spread)
    assert (np.diff(chances) >= 0).all() and chances[0] >= 0 and chances[-1] <= 1
    assert table.of(np.array([-np.inf]))[0] == 0


def test_a_fitted_table_says_how_many_are_used():
    rng = np.random.default_rng(5)
    margin = rng.normal(-2, 4, 60_000)
    true = 0.1 + 0.6 / (1 + np.exp(-margin))
    table = guesses.fit(margin[:40_000], rng.random(40_000) < true[:40_000])
    assert np.abs(table.of(margin[40_000:]) - true[40_000:]).mean() < 0.02
    assert np.abs(guesses.logistic().of(margin) - true).mean() > 0.1


@pytest.mark.parametrize("used", [[], [True, True], [False, False, False]])
def test_where_nothing_can_be_told_the_table_is_the_logistic_one(used):
    table = guesses.fit(np.arange(len(used), dtype=np.float64), np.array(used, bool))
    assert np.array_equal(table.values, guesses.logistic().values)
    assert table.of(np.array([0.0]))[0] == 0.5


@pytest.mark.parametrize(
    ("knots", "values"),
    [([1, 0], [0, 1]), ([0, 1], [1, 0]), ([0, 1], [0, 1.5]), ([0, 1], [0]), ([], []), ([0, np.inf], [0, 1])],
)
def test_a_table_that_is_none_is_refused(knots, values):
    with pytest.raises(ValueError):
        Chances(np.array(knots, float), np.array(values, float))


@settings(deadline=None, max_examples=100)
@given(seed=SEEDS, T=st.integers(0, 4), n=st.integers(1, 9), budget=st.integers(0, 11), threshold=st.floats(0, 1))
def test_guesses_are_the_likeliest_of_those_that_are_missing(seed, T, n, budget, threshold):
    rng = np.random.default_rng(seed)
    chances, resident = rng.integers(0, 5, (T, n)) / 4, rng.random((T, n)) < 0.4
    found = guesses.ranked(chances, resident, budget, threshold)
    assert found.shape == (T, min(budget, n)) and found.dtype == np.int32
    for row, there, guessed in zip(chances.tolist(), resident.tolist(), found.tolist(), strict=True):
        able = [e for e in range(n) if not there[e] and row[e] > threshold]
        able = sorted(able, key=lambda e: -row[e])[:budget]
        assert guessed == able + [-1] * (min(budget, n) - len(able))
    if T:
        one = guesses.ranked(chances, resident[0], budget, threshold)
        assert np.array_equal(one[0], found[0])


def test_a_step_of_several_tokens_uses_what_any_of_them_does():
    assert guesses.of_step(np.array([[0.5, 0.0, 1.0], [0.5, 0.25, 0.5]])).tolist() == [[0.75, 0.25, 1.0]]


@settings(deadline=None, max_examples=200)
@given(chance=st.floats(0, 1), saved=st.floats(-1, 1, allow_subnormal=False), delayed=SECONDS)
def test_a_guess_above_break_even_pays(chance, saved, delayed):
    least = guesses.break_even(guesses.Costs(saved, delayed))
    assert 0 <= least <= 1
    gain = chance * saved - (1 - chance) * delayed
    if abs(gain) > 1e-9:
        assert (chance > least) == (gain > 0)


@settings(deadline=None, max_examples=200)
@given(expert=SECONDS, ahead=SECONDS, queued=SECONDS, between=SECONDS)
def test_costs_are_of_what_is_not_there_in_time(expert, ahead, queued, between):
    found = guesses.costs(expert, ahead, queued, between)
    assert found.saved_s + found.delayed_s == pytest.approx(expert)
    assert -between <= found.saved_s <= expert and found.delayed_s >= between - 1e-12
    later = guesses.costs(expert, ahead, queued + 0.1, between)
    assert later.saved_s <= found.saved_s and guesses.break_even(later) >= guesses.break_even(found)


def test_costs_on_a_machine():
    """56 us an expert: a layer of 30.7 us ahead has 55% of it in time, two have all of it."""
    one, two = (guesses.break_even(guesses.costs(56e-6, n * 30.7e-6)) for n in (1, 2))
    assert one == pytest.approx(1 - 30.7 / 56) and two == 0
    assert guesses.break_even(guesses.costs(56e-6, 30.7e-6, queued_s=40e-6)) == 1


@settings(deadline=None, max_examples=50)
@given(steps=st.lists(st.tuples(st.integers(0, 2), SEEDS), max_size=30))
def test_a_record_counts(steps):
    record, literal = Record(3), np.zeros((4, 3), np.int64)
    for layer, seed in steps:
        rng = np.random.default_rng(seed)
        guessed = rng.permutation(11)[: rng.integers(0, 5)].astype(np.int32)
        missed = rng.permutation(11)[: rng.integers(0, 8)]
        record.add(layer, guessed, rng.random(len(guessed)), missed)
        literal[:, layer] += 1, len(guessed), len(set(guessed.tolist()) & set(missed.tolist())), len(missed)
    assert np.array_equal(literal, [record.steps, record.made, record.useful, record.misses])
    assert np.array_equal(record.wasted, literal[1] - literal[2])


def test_a_record_corrects_what_is_promised_and_forgets():
    record, guess = Record(2), np.array([4, 7], np.int32)
    for _ in range(1000):
        record.add(0, guess, np.array([0.9, 0.6]), np.array([4, 9]))  # one of two, where 1.5 were promised
        record.add(1, guess, np.array([0.9, 0.6]), np.array([], int))
    assert record.scale(0) == pytest.approx(1 / 1.5, abs=0.02) and record.scale(1) < 0.05
    for _ in range(20 * guesses.MEMORY_STEPS):
        record.add(1, guess[:0], np.zeros(0), np.array([], int))
    assert record.scale(1) > 0.99


def steps(before: Timed, n_without: int, n_with: int, without_us: float, with_us: float) -> Timed:
    return Timed(
        before.without + n_without, before.with_ + n_with,
        before.without_ns + int(1e3 * n_without * without_us), before.with_ns + int(1e3 * n_with * with_us),
    )  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 400), st.floats(0, 1)), max_size=30))
def test_guesses_of_which_hardly_any_is_right_are_off_at_once(steps):
    """So many guesses a step, of which such a share is right."""
    gate, made, useful = Gate(), 0, 0
    from_made = from_useful = 0
    for n, share in steps:
        made, useful, had = made + n, useful + round(n * share), gate.with_guesses
        changed = gate.weigh(made, useful)
        if made - from_made < MANY_GUESSES:
            assert not changed
            continue
        is_useless = 16 * (useful - from_useful) < made - from_made
        from_made, from_useful = made, useful
        assert changed == (had and is_useless) and gate.with_guesses == (had and not is_useless)
        assert gate.with_guesses or gate.every > ODD_WITH


def windows(gate: Gate, timed: Timed, n: int, without_us: float, with_us: float) -> tuple[Timed, int]:
    """So many of sixteen steps, and how often the gate changed."""
    changes = 0
    for _ in range(n):
        mix = (1, 15) if gate.with_guesses else (15, 1)
        timed = steps(timed, *mix, without_us, with_us)
        changes += gate.look(timed)
    return timed, changes


def test_a_gate_needs_steps_of_both_kinds_and_a_difference():
    gate, timed = Gate(), Timed(0, 0, 0, 0)
    assert gate.means_ns == (0, 0)
    timed = steps(timed, 0, 9000, 100, 900)
    assert not gate.look(timed) and gate.with_guesses
    assert gate.every == ODD_FIRST
    timed, changes = windows(gate, timed, EARLY_WINDOWS - 1, 100, 900)
    assert not changes and gate.means_ns == pytest.approx((100e3, 900e3))
    timed, changes = windows(gate, timed, 1, 100, 900)
    assert changes == 1 and not gate.with_guesses and gate.every > ODD_WITH
    _, changes = windows(Gate(), Timed(0, 0, 0, 0), 500, 100, 100.5)  # not worth a change
    assert not changes


@settings(deadline=None, max_examples=40)
@given(seed=SEEDS, noise=st.floats(0.001, 0.015))
def test_guesses_that_lose_a_twentieth_cost_less_than_a_hundredth_of_1024_steps(seed, noise):
    """As where nothing misses: 0.945 of the speed with guesses, of steps that vary by a percent or so."""
    rng, gate, timed, taken_us = np.random.default_rng(seed), Gate(), Timed(0, 0, 0, 0), 0.0
    for _ in range(1024):
        gate.look(timed)
        has_guesses = gate.next()
        us = 1500 * (1.055 if has_guesses else 1.0) * (1 + noise * rng.standard_normal())
        timed = steps(timed, 1 - has_guesses, int(has_guesses), us, us)
        taken_us += us
    assert not gate.with_guesses and 1024 * 1500 / taken_us > 0.99


@pytest.mark.parametrize("begins_with", [True, False])
def test_a_gate_follows_what_changes_and_forgets(begins_with):
    gate, timed, changes = Gate(), Timed(0, 0, 0, 0), 0
    gate.with_guesses = begins_with
    for better_with in (begins_with, not begins_with, begins_with):
        for n in range(20 * MEMORY):
            timed, changed = windows(gate, timed, 1, *((120, 100) if better_with else (100, 120)))
            changes += changed
            assert not changed or n < 4 * MEMORY
        assert gate.with_guesses is better_with
    assert changes == 2


@pytest.mark.parametrize(("gain", "noise", "wrong"), [(1.05, 0.0, 0.05), (1.05, 0.1, 0.12), (0.95, 0.1, 0.02)])
def test_steps_that_get_longer_with_the_context_fool_no_gate(gain, noise, wrong):
    """From 2 to 3 ms over 4,000 steps, and then from 2 again: neither kind is compared with another time's."""
    rng, gate, timed, n, worse, changes = np.random.default_rng(4), Gate(), Timed(0, 0, 0, 0), 6000, 0, 0
    for i in range(n):
        plain = (2000 + 1000 * (i % 250) / 250) * (1 + noise * rng.standard_normal() / 15**0.5)
        few = 1 + noise * rng.standard_normal()
        usual = gate.with_guesses
        worse += usual == (gain > 1)
        times = (plain * few, plain * gain) if usual else (plain, plain * gain * few)
        timed, changed = windows(gate, timed, 1, *times)
        changes += changed
    assert worse <= wrong * n and changes <= 9


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(seed=SEEDS, gain=st.sampled_from([0.9, 1.1]))
def test_a_gate_is_not_fooled_by_noise_for_long(seed, gain):
    """Steps that vary by a third: most of them are of the better kind."""
    rng, gate, timed, better = np.random.default_rng(seed), Gate(), Timed(0, 0, 0, 0), 0
    for n in range(3000):
        mix = (1, 15) if gate.with_guesses else (15, 1)
        times = [rng.gamma(9, 100 / 9, k).mean() * (gain if kind else 1.0) for kind, k in enumerate(mix)]
        timed = steps(timed, *mix, *times)
        gate.look(timed)
        better += n >= 300 and gate.with_guesses == (gain < 1)
    assert better > 0.9 * 2700


def test_one_step_that_took_a_second_changes_no_mind():
    gate, timed = Gate(), Timed(0, 0, 0, 0)
    timed, _ = windows(gate, timed, 300, 110, 100)
    timed = steps(timed, 1, 15, 110, 70000)  # while somebody had the GPU
    assert not gate.look(timed) and gate.with_guesses
    timed, changes = windows(gate, timed, 300, 110, 100)
    assert not changes

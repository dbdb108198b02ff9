"""Drafts that are cut by how sure their source is of each token: what is learned, and that it pays."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.drafting.confidence import Confidence, chance_of, odds, sureness
from engine.drafting.gate import Gate
from engine.drafting.outcomes import GROUP_OF, Record, Worth
from engine.drafting.source import Draft, Promise

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8)
H200 = (1.49, 2.24, 2.63, 3.03, 3.32, 3.61, 3.9, 4.18)  # ms, by WIDTHS
PRIORS = {"sure": ((0.75, 0.70, 0.65, 0.60, 0.55, 0.50),)}
N = 7  # tokens of a block


def seconds(n_tokens: int) -> float:
    return H200[n_tokens - 1] / 1000


def fits(n_tokens: int) -> bool:
    return n_tokens in WIDTHS


def test_sureness_is_the_chance_of_the_likeliest() -> None:
    logits = np.random.default_rng(3).standard_normal((5, 301)).astype(np.float32) * 4
    logits[4, 7] = np.nan
    exact = np.exp(logits.astype(np.float64))
    assert sureness(logits)[:4] == pytest.approx(exact[:4].max(1) / exact[:4].sum(1), rel=1e-5)
    assert sureness(logits)[4] == 0.0
    assert sureness(np.full((1, 9), -np.inf, np.float32)) == [0.0]


@given(st.floats(0, 1))
def test_odds_are_of_chances(chance: float) -> None:
    assert chance_of(odds(chance)) == pytest.approx(min(max(chance, chance_of(-8.0)), chance_of(8.0)), rel=1e-6)


@given(st.lists(st.tuples(st.lists(st.floats(0, 1), min_size=1, max_size=N), st.integers(0, N)), max_size=40))
def test_whatever_is_seen_chances_are_chances_and_rise_with_how_sure_it_was(
    seen: list[tuple[list[float], int]],
) -> None:
    confidence = Confidence(6)
    for sure, stayed in seen:
        confidence.learn((0.7,) * 6, sure, GROUP_OF, min(stayed, len(sure)))
    chances = [confidence.chance(0.7, sure, 1) for sure in np.linspace(0, 1, 21)]
    assert all(0.0 < chance < 1.0 for chance in chances) and chances == sorted(chances)


def test_who_is_as_right_as_it_thinks_is_taken_at_its_word() -> None:
    rng, confidence = np.random.default_rng(5), Confidence(6)
    for _ in range(4000):
        sure = rng.beta(3, 1, 1).tolist()
        confidence.learn((0.75,) * 6, sure, GROUP_OF, int(rng.random() < sure[0]))
    assert 0.8 < confidence.slope < 1.2
    for sure in (0.2, 0.5, 0.8, 0.97):
        assert confidence.chance(0.75, sure, 0) == pytest.approx(sure, abs=0.07)


def test_chances_that_mean_nothing_count_for_nothing() -> None:
    rng, confidence = np.random.default_rng(5), Confidence(6)
    for _ in range(4000):
        confidence.learn((0.75,) * 6, [float(rng.beta(3, 1))], GROUP_OF, int(rng.random() < 0.75))
    for sure in (0.3, 0.9):
        assert confidence.chance(0.75, sure, 0) == pytest.approx(0.75, abs=0.08)


@given(st.lists(st.tuples(st.lists(st.floats(0, 1), max_size=9), st.integers(0, 9)), min_size=1, max_size=9))
def test_worth_is_of_what_was_made(made: list[tuple[list[float], int]]) -> None:
    worth = Worth()
    for stay, n in made:
        worth.note(stay, min(n, len(stay)), 1.5)
    fades = [0.95**k for k in range(len(made))][::-1]
    assert worth.n == pytest.approx(sum(fades)) and worth.time == pytest.approx(1.5 * sum(fades))
    tokens = [1 + sum(stay[:n]) for stay, n in made]
    assert worth.tokens == pytest.approx(sum(f * t for f, t in zip(fades, tokens, strict=True)))
    for k in (0, 1, 5, 31):
        assert worth.at[k] == pytest.approx(sum(f * (1 + sum(s[:k])) for f, (s, _) in zip(fades, made, strict=True)))
    both = worth.plus(worth, 0.5)
    assert (both.n, both.at[3]) == pytest.approx((1.5 * worth.n, 1.5 * worth.at[3]))


class Drafting:
    """A reply whose drafter is as right as `truth` says of what it claims, token by token.

    wait_s: what it takes longer to wait for how sure it is; free: nobody has to wait, it always says so.
    """

    def __init__(self, claims: Callable[[np.random.Generator], np.ndarray], truth: Callable[[float], float]) -> None:
        self.gate, self.record, self.rng = Gate(PRIORS), Record(), np.random.default_rng(7)
        self.gate.begin({n - 1: seconds(n) for n in WIDTHS})
        self.claims, self.truth = claims, truth
        self.knows, self.free, self.wait_s, self.making_s = True, True, 0.0, 1e-4
        self.waited: list[bool] = []

    def reply(self, n_tokens: int) -> float:
        """The speed of so many tokens, over that of plain decoding."""
        tokens, taken_s, self.waited = 0, 0.0, []
        while tokens < n_tokens:
            (n,) = self.gate.share([(Promise("sure", 0, N, is_block=True), self.record)], fits, N)
            claims, making_s, draft = self.claims(self.rng), 0.0, None
            right = self.rng.random(N) < [self.truth(c) for c in claims]
            if n:
                is_known = self.knows and (self.free or self.gate.is_worth_knowing("sure", 0, self.record))
                self.waited.append(is_known)
                making_s = self.making_s + (self.wait_s if is_known else 0.0)
                draft = Draft("sure", 0, (0,) * n, sure=tuple(claims[:n]) if is_known else ())
                self.gate.made("sure", making_s, is_known)
                if is_known:
                    draft = draft.first(self.gate.cut(draft, self.record, fits))
            n = 0 if draft is None else len(draft.tokens)
            stayed = int(right[:n].cumprod().sum())
            step_s = making_s + seconds(1 + n) * self.rng.uniform(0.97, 1.03)
            if draft is None:
                self.gate.plain(1, step_s - making_s)
            else:
                self.gate.note([(draft, self.record, n, stayed)], step_s, making_s)
            tokens, taken_s = tokens + 1 + stayed, taken_s + step_s
        return tokens * seconds(1) / taken_s


def telling(rng: np.random.Generator) -> np.ndarray:
    """Some drafts are nearly sure, and some hardly."""
    return rng.beta(12, 1, N) if rng.random() < 0.5 else rng.beta(1, 2, N)


@pytest.mark.slow
def test_drafts_are_cut_where_the_drafter_is_not_sure() -> None:
    by_place, by_word = (Drafting(telling, lambda claim: claim) for _ in range(2))
    by_place.knows = False
    plain, cut = by_place.reply(6000), by_word.reply(6000)
    assert cut > 1.15 * plain and cut > 1.3


@pytest.mark.slow
def test_a_drafter_that_is_too_sure_of_itself_is_seen_through() -> None:
    """It says 0.9 of what is 0.6, and 0.99 of what is 0.95."""
    too_sure = Drafting(telling, lambda claim: claim**4)
    by_place = Drafting(telling, lambda claim: claim**4)
    by_place.knows = False
    assert too_sure.reply(6000) > 1.05 * max(1.0, by_place.reply(6000))


@pytest.mark.slow
@pytest.mark.parametrize("right", [0.2, 0.6, 0.85])
def test_chances_that_mean_nothing_cost_next_to_nothing(right: float) -> None:
    """What waits for them stops, and is tried once in a while."""
    noise, by_place = (Drafting(telling, lambda _: right) for _ in range(2))
    noise.free, noise.wait_s, by_place.knows = False, 2e-4, False
    noise.reply(3000)
    by_place.reply(3000)
    assert noise.reply(9000) > 0.97 * by_place.reply(9000)
    if right < 0.5:  # no draft pays, so each was a trial
        assert len(noise.waited) <= 40
    else:
        assert sum(noise.waited) <= 0.15 * len(noise.waited) + 8


@pytest.mark.slow
def test_what_waits_goes_on_where_it_pays() -> None:
    waits, free = (Drafting(telling, lambda claim: claim) for _ in range(2))
    waits.free, waits.wait_s = False, 1e-4
    free.reply(2000)
    waits.reply(2000)
    assert waits.reply(6000) > 0.93 * free.reply(6000)
    assert sum(waits.waited) > 0.9 * len(waits.waited)


@pytest.mark.slow
def test_what_pays_only_where_it_is_known_how_sure_it_is_goes_on() -> None:
    """Drafts of one length do not pay, so one that is made is a trial."""
    waits, free, by_place = (Drafting(telling, lambda claim: claim) for _ in range(3))
    waits.free, waits.wait_s, by_place.knows = False, 1e-4, False
    for drafting in (waits, free, by_place):
        drafting.making_s = 1e-3
        drafting.reply(2000)
    assert by_place.reply(6000) < 1.05
    assert waits.reply(6000) > max(1.1, 0.95 * free.reply(6000))


def test_text_that_it_is_not_sure_of_any_more_costs_next_to_nothing() -> None:
    """Nothing of that is tried, so nobody sees it fail; and it is drafted for again when that changes."""
    turns = Drafting(telling, lambda claim: claim)
    assert turns.reply(3000) > 1.3
    turns.claims = lambda rng: rng.uniform(0.02, 0.2, N)
    turns.reply(300)
    assert turns.reply(6000) > 0.985
    turns.claims = telling
    turns.reply(2000)
    assert turns.reply(3000) > 1.3


def test_nothing_right_is_found_out_soon() -> None:
    never = Drafting(telling, lambda _: 0.0)
    assert never.reply(3000) > 0.985


def test_what_is_cut_is_of_the_draft() -> None:
    draft = Draft("sure", 0, (3, 4, 5), sure=(0.9, 0.8, 0.1))
    assert draft.first(2) == Draft("sure", 0, (3, 4), sure=(0.9, 0.8)) and draft.first(0) is None
    assert math.isclose(Draft("sure", 0, (3, -1), sure=(0.9, 0.8)).known().sure[0], 0.9)  # type: ignore[union-attr]

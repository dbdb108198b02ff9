"""The gate: what it decides by chances and costs, that it never loses more than it may, and that it finds its way."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drafting.costs import Costs, StepCosts
from engine.drafting.gate import GAIN, Gate, _lone_choices
from engine.drafting.outcomes import MOST_TOKENS, Chances, Record, group_of
from engine.drafting.source import Draft, Promise

WIDTHS = (1, 2, 4, 8, 16, 32)
COPY, POOR = 5, 0  # grades
PRIORS = {"test": ((0.4,) * 6, (0.5,) * 6, (0.8,) * 6, (0.9,) * 6, (0.9,) * 6, (0.95,) * 6)}
H200 = (1.47, 2.25, 3.17, 4.34, 6.28, 10.15)  # ms, by WIDTHS


def captured(n_tokens: int) -> bool:
    return n_tokens in WIDTHS


def any_width(n_tokens: int) -> bool:
    return True


def seconds(n_tokens: int) -> float:
    return float(np.interp(n_tokens, WIDTHS, H200)) / 1000


class Engine:
    """Decodes a reply whose drafts' tokens stay with a chance, in steps that take what a table says."""

    def __init__(self, fits: Callable[[int], bool] = captured, cost: Callable[[int], float] = seconds) -> None:
        self.gate, self.fits, self.cost = Gate(PRIORS), fits, cost
        self.rng = np.random.default_rng(5)
        self.plain_s = self.taken_s = 0.0
        self.lengths: list[int] = []

    def reply(self, n_tokens: int, grade: int, chance: float, record: Record | None = None) -> float:
        """The speed of so many tokens, over that of plain decoding; a draft is there for every one."""
        record = record or Record()
        made, taken_s = 0, 0.0
        self.lengths = []
        while made < n_tokens:
            promise = Promise("test", grade, MOST_TOKENS)
            (n,) = self.gate.share([(promise, record)], self.fits, MOST_TOKENS)
            step_s = self.cost(1 + n) * self.rng.uniform(0.97, 1.03)
            stayed = 0
            while stayed < n and self.rng.random() < chance:
                stayed += 1
            if n:
                self.gate.note([(Draft("test", grade, (0,) * n), record, n, stayed)], step_s)
            else:
                self.gate.plain(1, step_s)
            self.lengths += [n] * (1 + stayed)
            made, taken_s = made + 1 + stayed, taken_s + step_s
        return made * self.cost(1) / taken_s


def test_positions_are_judged_by_groups() -> None:
    assert [group_of(i) for i in (0, 1, 2, 3, 4, 7, 8, 15, 16, 30)] == [0, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_a_chance_is_of_those_whose_tokens_ahead_all_stayed() -> None:
    chances = Chances()
    chances.note(4, 2)
    chances.note(4, 0)
    assert chances.seen[0] == pytest.approx(1.985) and chances.stayed[0] == pytest.approx(0.985)
    assert (chances.seen[1], chances.stayed[1]) == (1.0, 1.0)
    assert (chances.seen[2], chances.stayed[2]) == (1.0, 0.0)
    chances.fade(40_000)
    assert max(chances.seen) < 1e-3


@given(st.lists(st.tuples(st.integers(1, 31), st.floats(0.001, 1.0)), max_size=20), st.integers(1, 31))
def test_a_wider_step_is_never_taken_to_be_faster(measured: list[tuple[int, float]], n: int) -> None:
    costs = Costs()
    costs.note_plain(0.01, 1)
    for width, taken_s in measured:
        costs.note(width, taken_s)
    assert costs.of(0) == costs.plain <= costs.of(n) <= costs.of(n + 1) * (1 + 1e-12)
    assert costs.of(n, hopeful=True) <= costs.of(n) * (1 + 1e-12)


def test_what_took_long_once_is_not_believed() -> None:
    costs = Costs()
    for _ in range(20):
        costs.note_plain(0.002, 1)
    costs.note_plain(5.0, 1)
    assert costs.plain < 0.003
    costs.note(3, 5.0)  # a kernel was compiled, say
    assert costs.of(3) <= 7 * costs.plain
    for _ in range(40):
        costs.note(3, 0.004)
    assert costs.of(3) == pytest.approx(0.004, rel=0.05)
    for _ in range(300):
        costs.note_plain(0.004, 1)  # steps that stay long are believed
    assert costs.plain == pytest.approx(0.004, rel=0.01)


@given(st.lists(st.tuples(st.integers(0, 31), st.sampled_from([0.0, 1e-9, 0.001, 0.1, 1e6])), max_size=40))
def test_no_measurement_breaks_anything(measured: list[tuple[int, float]]) -> None:
    gate, record = Gate(PRIORS), Record()
    for n, taken_s in measured:
        if n:
            gate.note([(Draft("test", 2, (0,) * n), record, n, n // 2)], taken_s)
        else:
            gate.plain(1, taken_s)
        (chosen,) = gate.share([(Promise("test", 2, 31), record)], any_width, 31)
        assert 0 <= chosen <= 31
        assert all(math.isfinite(s) and s >= 0 for s in gate.costs(1).measured().values())


@pytest.mark.parametrize("fits", [captured, any_width])
@pytest.mark.parametrize(("chance", "least"), [(0.97, 2.2), (0.9, 1.4), (0.8, 1.1)])
def test_it_drafts_where_that_pays(fits: Callable[[int], bool], chance: float, least: float) -> None:
    """And nearly as well as the best fixed length, which nobody knows beforehand."""
    engine = Engine(fits)
    engine.reply(2000, COPY, chance)
    speed = engine.reply(4000, COPY, chance)
    best = max(
        sum(chance**k for k in range(n + 1)) * seconds(1) / seconds(1 + n)
        for n in range(MOST_TOKENS + 1)
        if fits(1 + n)
    )
    assert speed > least and speed > 0.95 * best


@pytest.mark.parametrize("grade", [POOR, 2, COPY])
@pytest.mark.parametrize("chance", [0.0, 0.1, 0.3])
def test_it_costs_little_where_nothing_stays(grade: int, chance: float) -> None:
    engine = Engine()
    first = engine.reply(1000, grade, chance)
    assert first > (0.98 if grade == POOR else 0.9)  # until it has been seen, what a good grade promises is believed
    assert engine.reply(4000, grade, chance) > 0.985


def test_a_machine_of_which_nothing_is_known_is_tried_with_little_first() -> None:
    engine = Engine(any_width)
    engine.reply(300, COPY, 0.97)
    first = next(n for n in engine.lengths if n)
    assert first < 16 and all(engine.lengths[200:]) and max(engine.lengths) > first


def test_it_stops_and_begins_again() -> None:
    engine = Engine()
    record = Record()
    engine.reply(500, COPY, 0.97, record)
    engine.reply(200, COPY, 0.0, record)  # the same grade turns bad
    assert not any(engine.lengths[64:])
    engine.reply(3000, POOR, 0.05, record)
    engine.reply(400, COPY, 0.97, record)
    assert all(engine.lengths[256:])
    assert engine.reply(2000, COPY, 0.97, record) > 2.0


def test_trials_cost_no_more_than_their_share() -> None:
    """Steps in which no draft can pay, and drafts that look good."""
    engine = Engine(cost=lambda n: 0.001 * n)
    engine.reply(1000, 2, 0.5)
    assert engine.reply(20_000, 2, 0.5) > 0.985


@settings(max_examples=60)
@given(st.lists(st.sampled_from([None, 0, 1, 2, 3, 4, 5]), min_size=2, max_size=6), st.integers(0, 30))
def test_replies_that_share_a_step_are_given_what_is_best_for_all(grades: list[int | None], most: int) -> None:
    gate, n = Gate(PRIORS), len(grades)
    gate.costs(n).begin({k: 0.001 * (1 + 0.1 * k) for k in range(32)})
    gate.costs(n).note_plain(0.001, 1)
    offers = [None if g is None else (Promise("test", g, 9), Record()) for g in grades]
    counts = gate.share(offers, any_width, most)

    def value(tokens: list[int]) -> float:
        gained = sum(
            math.log(sum(PRIORS["test"][g][0] ** k for k in range(t + 1)))
            for g, t in zip(grades, tokens, strict=True)
            if g is not None
        )
        return gained / n - math.log(gate.costs(n).of(sum(tokens)) / gate.costs(n).plain)

    assert sum(counts) <= most and all(c == 0 for c, g in zip(counts, grades, strict=True) if g is None)
    assert all(c <= 9 for c in counts)
    assert value(counts) >= -1e-9  # nothing is saved yet that a trial could cost
    for i, grade in enumerate(grades):  # no token more or less would be better
        for change in (-1, 1):
            other = [c + change * (j == i) for j, c in enumerate(counts)]
            if grade is not None and 0 <= other[i] <= 9 and sum(other) <= most:
                assert value(other) <= max(value(counts), math.log(GAIN)) + 1e-9


@given(
    st.lists(st.floats(0.02, 1.0), max_size=MOST_TOKENS),
    st.dictionaries(st.integers(1, 31), st.floats(1.0, 9.0), max_size=6),
    st.floats(0.0, 0.002),
    st.sampled_from([captured, any_width]),
    st.booleans(),
)
def test_one_reply_is_given_what_would_be_best_for_several(
    chances: list[float], ratios: dict[int, float], making_s: float, fits: Callable[[int], bool], hopeful: bool
) -> None:
    stay = np.cumprod(chances).tolist()
    costs = Costs()
    costs.begin({0: 0.001} | {n: 0.001 * r for n, r in ratios.items()})
    lengths = [n for n in range(1, MOST_TOKENS + 1) if fits(1 + n)]
    found = {n: (best, gain) for n, best, gain in _lone_choices(stay, lengths, costs, making_s, hopeful)}
    for n, choice in enumerate(Gate(PRIORS)._choices([stay], costs, fits, MOST_TOKENS, hopeful, making_s)):
        if n in found:
            assert found[n][1] == pytest.approx(choice.gain)
            if found[n][0] != choice.total:  # two that are as good
                gains = {0: 1.0} | {k: (1.0 + sum(stay[:k])) * costs.plain / (making_s + costs.of(k, hopeful))
                                    for k in found}  # fmt: skip
                assert gains[found[n][0]] == pytest.approx(gains[choice.total])


@given(
    st.floats(0.0, 0.02), st.sampled_from([captured, any_width]), st.sampled_from([0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 0.95])
)
def test_the_longest_trial_that_may_be_paid_is_made(
    saved_s: float, fits: Callable[[int], bool], chance: float
) -> None:
    """For promises of every length, as one after the other would be decided; what pays may be a trial's other width."""
    gate, record = Gate({"test": ((chance,) * 6,)}), Record()
    gate.begin({n - 1: seconds(n) for n in WIDTHS})
    gate.plain(1, 8 * seconds(1), 8)
    gate._saved_s = saved_s
    promise, costs = Promise("test", 0, MOST_TOKENS), gate.costs(1)
    found = gate._by_length(promise, record, fits)
    mean, hoped = (gate._stay(promise, record, hope) for hope in (0.0, 2.0))
    known = list(gate._choices([mean], costs, fits, MOST_TOKENS))
    sure = [c.total if c.gain >= GAIN else 0 for c in known]
    for n, may in enumerate(gate._choices([mean], costs, fits, MOST_TOKENS, True)):
        taken_s = costs.plain * (1 + sum(mean[: may.total])) / known[n].gain
        if sure[n] and may.gain >= GAIN * known[n].gain and costs.of(may.total) - taken_s <= saved_s:
            sure[n] = may.total
    sure += sure[-1:] * (1 + MOST_TOKENS - len(sure))
    trial = 0
    for n, may in enumerate(gate._choices([hoped], costs, fits, MOST_TOKENS, True)):
        if may.gain >= GAIN and costs.of(may.total) - costs.plain * (1 + sum(mean[: may.total])) <= saved_s:
            trial = may.total
        assert found[n] == (sure[n] or trial), n
    assert found[n + 1 :] == [one or trial for one in sure[n + 1 :]]


def test_steps_that_replies_share_are_taken_to_cost_what_those_of_one_do() -> None:
    gate = Gate(PRIORS)
    gate.plain(4, 1.0)  # the first of its kind takes long
    gate.begin({n - 1: seconds(n) for n in WIDTHS})
    gate.plain(1, 8 * seconds(1), 8)
    assert gate.costs(4).of(4) == pytest.approx(seconds(8))
    costs = gate.costs(2)
    assert not costs.is_known
    assert {n: costs.of(n) for n in (0, 2, 6, 14)} == pytest.approx({n: seconds(2 + n) for n in (0, 2, 6, 14)})
    gate.plain(2, 2 * seconds(2))  # deep contexts: all is twice as long
    assert costs.of(6) == pytest.approx(2 * seconds(8))
    assert gate.costs(32).measured() == {0: 0.0}  # of which nothing is known


def test_deep_contexts_are_judged_by_themselves() -> None:
    """What is known of short ones is where they begin, but for a plain step, which is seen before any draft."""
    engine = Engine()
    engine.gate.begin({n - 1: seconds(n) for n in WIDTHS})
    engine.reply(500, COPY, 0.95)
    engine.gate.at(40_000)
    engine.cost = lambda n: 2 * seconds(n)
    offer = Promise("test", COPY, MOST_TOKENS), Record()
    assert engine.gate.share([offer], captured, MOST_TOKENS) == [0]
    engine.gate.plain(1, 2 * seconds(1))
    assert engine.gate.share([offer], captured, MOST_TOKENS) == [15]
    assert engine.reply(500, COPY, 0.95) > 2.4
    assert engine.gate.costs(1).of(15) == pytest.approx(2 * seconds(16), rel=0.1)
    engine.gate.at(500)
    assert engine.gate.costs(1).of(15) == pytest.approx(seconds(16), rel=0.1)


def test_depths_are_doublings() -> None:
    steps = StepCosts()
    assert [steps.at(n) for n in (10, 4095, 4096, 8191, 8192, 200_000, 5)] == [0, 0, 1, 0, 1, 1, 1]


@pytest.mark.parametrize("times", [0.5, 1.0, 1.5, 4.0])
def test_what_steps_took_at_the_start_is_believed_as_multiples(times: float) -> None:
    """A context, and draws, make all steps longer than those that were tried."""
    engine = Engine(cost=lambda n: times * seconds(n))
    engine.gate.costs(1).begin({n - 1: seconds(n) for n in WIDTHS})
    assert engine.reply(1000, 3, 0.9) > 1.5
    assert engine.lengths[0] == 0  # a plain step comes first


def test_replies_that_begin_to_share_steps_are_drafted_for_once_a_step_was_seen() -> None:
    gate = Gate(PRIORS)
    for _ in range(1000):
        gate.plain(1, 0.001)
    offers = [(Promise("test", COPY, 31), Record()) for _ in range(3)]
    assert gate.share(offers, any_width, 28) == [0, 0, 0]
    gate.plain(3, 0.001)
    assert any(gate.share(offers, any_width, 28))


def test_nothing_is_proposed_before_a_plain_step_was_seen() -> None:
    assert Gate(PRIORS).share([(Promise("test", COPY, 31), Record())], captured, 31) == [0]


def test_a_plain_step_that_was_overestimated_is_found_out() -> None:
    """Nothing stays, and a draft is there for every step: only what steps with drafts take can tell."""
    engine = Engine()
    engine.gate.costs(1).begin({n - 1: 3 * seconds(1) if n == 1 else seconds(n) for n in WIDTHS})
    engine.reply(2000, COPY, 0.0)
    assert engine.gate.costs(1).plain == pytest.approx(seconds(1), rel=0.1)
    assert engine.reply(2000, COPY, 0.0) > 0.98


def test_the_first_draft_that_was_made_slowly_is_forgiven() -> None:
    gate, record = Gate(PRIORS), Record()
    gate.plain(1, 0.01, 8)
    gate.made("test", 0.5)
    for _ in range(200):
        gate.plain(1, 0.01, 8)
        if gate.share([(Promise("test", COPY, 4), record)], any_width, 31) != [0]:
            return
    raise AssertionError("it was never made again")


def test_widths_that_were_taken_for_cheap_are_found_out() -> None:
    engine = Engine()
    engine.gate.costs(1).begin({n - 1: seconds(1) * (1.0 + 0.01 * (n - 1)) for n in WIDTHS})
    assert engine.reply(2000, 2, 0.2) > 0.9
    assert engine.reply(4000, 2, 0.2) > 0.98


@pytest.mark.parametrize("chance", [0.6, 0.8, 0.93])
@pytest.mark.parametrize("disturbed", [n - 1 for n in WIDTHS if n > 1])
def test_a_width_that_was_disturbed_at_the_start_is_found_out(disturbed: int, chance: float) -> None:
    """Also where another one pays: it is not left at that."""
    speeds = []
    for times in (1.0, 2.0):
        engine = Engine()
        engine.gate.begin({n - 1: seconds(n) * (times if n - 1 == disturbed else 1.0) for n in WIDTHS})
        engine.reply(500, 2, chance)
        speeds.append(engine.reply(12_000, 2, chance))
    assert speeds[1] > 0.97 * speeds[0], speeds


def test_the_first_step_of_a_width_may_take_long() -> None:
    engine = Engine(any_width)
    engine.gate.plain(1, seconds(1), 8)
    engine.gate.note([(Draft("test", COPY, (0,)), Record(), 1, 1)], 20 * seconds(1))
    engine.reply(1500, COPY, 0.97)
    assert engine.reply(1000, COPY, 0.97) > 2.0


# --- sources that judge their drafts --------------------------------------------------------------------


def judged(chance: float, n: int = MOST_TOKENS) -> Promise:
    return Promise("judges", 0, n, tuple(chance**k for k in range(1, n + 1)))


class Judged:
    """Decodes a reply whose drafts stay with the chances that their source says, which change with every draft."""

    def __init__(self, cost: Callable[[int], float] = seconds) -> None:
        self.gate, self.record, self.cost, self.rng = Gate({}), Record(), cost, np.random.default_rng(7)
        self.gate.begin({n - 1: cost(n) for n in WIDTHS})
        self.lengths: list[int] = []

    def reply(self, n_tokens: int, chances: tuple[float, ...]) -> float:
        """The speed of so many tokens, over that of plain decoding, at one of the chances each."""
        made, taken_s, self.lengths = 0, 0.0, []
        while made < n_tokens:
            chance = float(self.rng.choice(chances))
            (n,) = self.gate.share([(judged(chance), self.record)], captured, MOST_TOKENS)
            stayed = 0
            while stayed < n and self.rng.random() < chance:
                stayed += 1
            step_s = self.cost(1 + n) * self.rng.uniform(0.97, 1.03)
            if n:
                self.gate.note([(Draft("judges", 0, (0,) * n), self.record, n, stayed)], step_s)
            else:
                self.gate.plain(1, step_s)
            self.lengths.append(n)
            made, taken_s = made + 1 + stayed, taken_s + step_s
        return made * self.cost(1) / taken_s


def test_what_a_source_says_decides_at_once() -> None:
    """No draft has to fail, or to succeed, for it to be known what the next one is worth."""
    engine = Judged()
    engine.reply(100, (0.0,))
    for chance in (0.97, 0.1, 0.9, 0.0, 0.8):
        chances = judged(chance).chances or ()
        worth = {n: (1 + sum(chances[:n])) / engine.cost(1 + n) for n in range(32) if captured(1 + n)}
        best = max(worth, key=lambda n: worth[n])
        (n,) = engine.gate.share([(judged(chance), engine.record)], captured, MOST_TOKENS)
        assert n == (best if worth[best] > 1.05 * worth[0] else 0)
        assert engine.gate.decided(judged(chance), engine.record) == n
        assert (sum(chances) < engine.gate.least(engine.record)) <= (n == 0), "what is not promised is not wanted"


def test_drafts_of_all_chances_mixed_are_used_where_they_pay() -> None:
    engine = Judged()
    engine.reply(500, (0.95, 0.5, 0.0))
    assert engine.reply(6000, (0.95, 0.5, 0.0)) > 1.25
    assert engine.reply(6000, (0.4, 0.2, 0.0)) > 0.995, "and cost next to nothing where they do not"
    assert sum(n > 0 for n in engine.lengths) < 0.01 * len(engine.lengths)


def test_a_width_that_took_long_is_tried_again() -> None:
    slow = [2.0]
    engine = Judged(lambda n: seconds(n) * (slow[0] if n > 1 else 1.0))
    engine.reply(3000, (0.9,))
    assert engine.reply(2000, (0.9,)) > 0.985 and sum(n > 0 for n in engine.lengths) < 40
    slow[0] = 1.0
    engine.reply(8000, (0.9,))
    assert engine.reply(1000, (0.9,)) > 1.4


def test_judged_drafts_of_replies_at_once() -> None:
    gate, records = Gate({}), [Record() for _ in range(3)]
    gate.begin({n - 1: seconds(n) for n in WIDTHS})
    offers = [(judged(0.95), record) for record in records]
    assert gate.share(offers, any_width, 29) == [0, 0, 0], "nothing is known of steps of three"
    for _ in range(5):
        gate.plain(3, seconds(3))
    shared = gate.share(offers, any_width, 29)
    assert min(shared) > 0 and sum(shared) <= 29
    assert gate.share([(judged(0.05), record) for record in records], any_width, 29) == [0, 0, 0]
    first, *others = gate.share([offers[0], None, (judged(0.01), records[2])], any_width, 29)
    assert first > 0 == sum(others)
    least = gate.least_of_each(3, sampled=False)
    assert gate.least_of_each(2, sampled=False) == 0.0 < least, "of what is not known nothing is too little"
    alike = [(judged(least / (1 + least)), record) for record in records]  # each has that much
    assert gate.share(alike, any_width, 29) == [0, 0, 0]

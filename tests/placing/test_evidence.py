"""What evidence chooses on traces whose answer is known, and that nothing is judged on what it was made from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import policies
from engine.placing import evidence, policy
from engine.placing.evidence import CANDIDATES, Candidate, Draws, Interval
from engine.placing.policy import Rule
from tests.placing.test_simulate import make_trace

E, A, L = 24, 3, 2


def sessions_of(likings, rng, n_token=220):
    """A trace of sessions; likings: for each the logits of the experts, [E] or [n_token, E]."""
    parts = []
    for liking in likings:
        keys = np.broadcast_to(liking, (n_token, E))[:, None] + rng.gumbel(size=(n_token, L, E))
        parts.append(np.argsort(-keys, axis=2)[:, :, :A])
    experts = np.concatenate(parts)
    session = np.repeat(np.arange(len(likings)), n_token)
    return make_trace(experts, np.ones(len(experts)), E, session, np.tile(np.arange(n_token), len(likings)))


def skewed():
    return -1.6 * np.log(np.arange(1, E + 1))


def one(trace, pct=40.0):
    (choice,) = evidence.choose(trace, [10] * L, (pct,))
    return choice


def test_steady_routing_speaks_for_pinning_or_a_long_memory():
    rng = np.random.default_rng(1)
    choice = one(sessions_of([skewed()] * 12, rng))
    assert choice.misses < choice.lru * 0.9
    assert choice.cache_fraction < 1 or choice.memory >= 6
    assert choice.misses <= choice.static * 1.02
    assert choice.low <= choice.misses <= choice.high
    assert (choice.tokens, choice.sessions, choice.residency_pct) == (12 * 220, 12, 40.0)


def test_routing_that_jumps_speaks_against_pinning():
    """Every 20 tokens the same skew falls on other experts: what was used lately is all there is to know."""
    rng = np.random.default_rng(2)
    likings = [np.repeat([rng.permutation(2 * skewed()) for _ in range(11)], 20, axis=0) for _ in range(12)]
    choice = one(sessions_of(likings, rng))
    assert choice.cache_fraction == 1.0 and choice.memory < policy.DEFAULT.memory
    assert choice.misses < choice.static * 0.8


def test_where_nothing_can_be_told_apart_the_default_stands():
    rng = np.random.default_rng(3)
    choice = one(sessions_of([np.zeros(E)] * 8, rng))
    assert (choice.cache_fraction, choice.memory) == (1.0, policy.DEFAULT.memory)


def test_a_gain_in_one_session_of_many_is_noise():
    rows = [np.full(10, 100), np.array([10] + [100] * 9)]
    draws = Draws(np.full(10, 50))
    more = draws.against(*rows)
    assert more.value > evidence.WORTH and more.low == 0
    assert not evidence.beaten(more)
    assert evidence.beaten(draws.against(np.full(10, 103), np.full(10, 100)))
    assert not evidence.beaten(draws.against(np.full(10, 101), np.full(10, 100)))  # sure, and not worth it


def test_no_misses_are_not_fewer_than_none():
    none, some = np.zeros(8, np.int64), np.full(8, 3)
    draws = Draws(np.full(8, 100))
    assert draws.against(none, none) == Interval(0, 0, 0)
    assert draws.against(some, none).low > 0 and evidence.beaten(draws.against(some, none))
    assert draws.against(none, some) == Interval(-1, -1, -1)
    alone = np.array([0, 0, 0, 0, 50]), np.array([0, 0, 0, 0, 40])
    more = Draws(np.full(5, 10)).against(*alone)  # a draw without the last session has no misses at all
    assert (more.value, more.low, more.high) == (0.25, 0, 0.25)


def test_an_interval_leaves_a_fortieth_of_the_draws_on_either_side():
    misses = np.random.default_rng(14).integers(0, 1000, 40)
    draws = Draws(np.full(40, 7))
    drawn = (draws._weights @ misses) / (draws._weights @ draws.tokens)
    found = draws.per_token(misses)
    assert found.value == misses.sum() / 280
    assert np.mean(drawn < found.low) == pytest.approx(0.025, abs=0.002)
    assert np.mean(drawn > found.high) == pytest.approx(0.025, abs=0.002)


def test_figures_of_one_miss_of_one_session_and_of_none():
    assert Draws(np.array([10])).against(np.array([3]), np.array([1])) == Interval(2, 2, 2)
    assert Draws(np.array([1])).per_token(np.array([3])) == Interval(3, 3, 3)
    nothing = np.zeros(0, np.int64)
    assert Draws(nothing).per_token(nothing) == Interval(0, 0, 0)


def test_every_layer_has_room_for_the_experts_of_a_token_first(monkeypatch: pytest.MonkeyPatch):
    seen = []
    place = evidence.place
    monkeypatch.setattr(evidence, "place", lambda *given: seen.append(given) or place(*given))
    one(sessions_of([skewed()] * 5, np.random.default_rng(15), 30))
    assert {given[3] for given in seen} == {A}
    assert {given[4] for given in seen} == set(CANDIDATES)
    counts = np.array([[9] * E, [1] + [0] * (E - 1)])
    assert evidence.place(counts, [10, 10], 10 * (2 * A + 5), A, CANDIDATES[0]).slots_per_layer == (A + 5, A)


def test_the_simpler_of_two_that_are_as_good_is_taken():
    static, others = CANDIDATES[-1], len(CANDIDATES) - 2
    draws = Draws(np.full(9, 100))
    equal = [np.full(9, 500)] * (others + 1)
    lru = np.full(9, 800)
    assert evidence._chosen(60.0, [*equal, np.full(9, 495)], lru, draws).memory == policy.DEFAULT.memory
    better = evidence._chosen(60.0, [*equal, np.full(9, 300)], lru, draws)
    assert better.cache_fraction == static.cache_fraction == 0.0
    assert (better.misses, better.lru, better.static) == (3.0, 8.0, 3.0)


def test_figures_have_four_digits():
    rows, lru = [np.full(6, 1)] * (len(CANDIDATES) - 1) + [np.full(6, 5)], np.full(6, 2)
    choice = evidence._chosen(60.0, rows, lru, Draws(np.full(6, 3)))
    assert (choice.misses, choice.low, choice.high) == (0.3333, 0.3333, 0.3333)
    assert (choice.lru, choice.static) == (0.6667, 1.6667)


def test_what_is_no_more_than_worth_it_beats_nothing():
    assert not evidence.beaten(Interval(evidence.WORTH, 0.01, 0.03))
    assert not evidence.beaten(Interval(0.5, 0.0, 0.9))
    assert evidence.beaten(Interval(0.5, 1e-9, 0.9))


@pytest.mark.parametrize("affordable", [220 * 12, 220 * 7])
def test_placements_are_made_from_all_that_is_judged_elsewhere_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, affordable
):
    """Each session is in the counts of all folds but its own; what cannot be afforded is in none."""
    trace, seen = sessions_of([skewed()] * 12, np.random.default_rng(17)), {}
    place = evidence.place
    every = len(evidence.RESIDENCIES) * (len(CANDIDATES) + 1) * L * A
    monkeypatch.setattr(evidence, "MAX_USES", affordable * every)
    monkeypatch.setattr(
        evidence, "place", lambda counts, *rest: seen.update({counts.tobytes(): counts}) or place(counts, *rest)
    )
    one(trace)
    root, _ = evidence._enough(trace)
    kept = evidence._select(trace, root >= 0)
    assert (len(kept.generated) < len(trace.generated)) == (affordable < 220 * 12)
    assert len(seen) == evidence.FOLDS
    assert np.array_equal(sum(seen.values()), (evidence.FOLDS - 1) * kept.counts())


def test_no_session_is_judged_by_counts_that_it_is_in(monkeypatch: pytest.MonkeyPatch):
    """Each session has experts of its own: counts of others say nothing about it, its own would say all."""
    likings = [np.where(np.arange(E) // 3 == i, 30.0, 0.0) for i in range(8)]
    trace = sessions_of(likings, np.random.default_rng(4), 40)
    seen = []
    place = evidence.place

    def spy(counts, *rest):
        seen.append(counts)
        return place(counts, *rest)

    monkeypatch.setattr(evidence, "place", spy)
    choice = one(trace, 12.5)  # room for the three experts of one session
    assert choice.static == pytest.approx(A * L)  # every use of every session
    assert choice.misses < 1
    whole = trace.counts()
    assert seen and all((counts <= whole).all() and counts.sum() < whole.sum() for counts in seen)


def test_segments_forks_and_agents_are_judged_with_their_root():
    rng = np.random.default_rng(5)
    trace = sessions_of([skewed()] * 6, rng)
    family = replace(trace, session_ids=("a", "a/agent", "a#2", "a~1", "a/x/y", "b"))
    assert evidence.choose(family, [10] * L) == ()  # two roots are no evidence
    assert len(evidence.choose(trace, [10] * L, (60.0, 20.0, 20.0))) == 2


def of_lengths(lengths, rng):
    trace = sessions_of([skewed()] * len(lengths), rng)
    return evidence._select(trace, trace.position < np.array(lengths)[trace.session])


@pytest.mark.parametrize(
    ("lengths", "affordable", "expected"),
    [
        ([220] * 12, 220 * 7, [154] * 10),  # a tenth each: few are left out, and none is long
        ([220] * 12, 220 * 12, [220] * 12),
        ([220] * 5, 600, [120] * 5),  # all are too long, and all speak
        ([220, 220, 220, 20, 20, 0], 400, [120, 120, 120, 20, 20]),  # what short ones leave goes to the long
        ([220, 1, 1, 1, 1], 180, [176, 1, 1, 1, 1]),
    ],
)
def test_of_what_cannot_be_afforded_each_session_has_a_share(
    monkeypatch: pytest.MonkeyPatch, lengths, affordable, expected
):
    trace = of_lengths(lengths, np.random.default_rng(6))
    every = len(evidence.RESIDENCIES) * (len(CANDIDATES) + 1) * L * A
    monkeypatch.setattr(evidence, "MAX_USES", affordable * every + every // 2)
    assert evidence.affordable(L, A) == affordable
    root, kept = evidence._enough(trace)
    assert sorted(kept[kept > 0], reverse=True) == expected
    for i in np.flatnonzero(kept):  # its beginning
        assert np.array_equal(np.flatnonzero(root == i), np.flatnonzero(trace.session == i)[: kept[i]])
    assert (root >= 0).sum() == kept.sum() <= affordable
    choice = one(trace)
    assert (choice.sessions, choice.tokens) == (len(expected), sum(expected))


@given(tokens=st.lists(st.integers(0, 12), max_size=6), most=st.integers(0, 60))
def test_the_level_is_the_highest_that_can_be_afforded(tokens, most):
    affordable = [n for n in range(max(tokens, default=0) + 1) if sum(min(t, n) for t in tokens) <= most]
    assert evidence._level(np.array(tokens, np.int64), most) == affordable[-1]


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=20))
def test_tokens_before_are_those_of_the_same_root_that_count(rows):
    root, counted = np.array([r for r, _ in rows], np.int32), np.array([c for _, c in rows], bool)
    expected = [sum(c for r, c in rows[:i] if r == own) for i, (own, _) in enumerate(rows)]
    assert evidence._before(root, counted).tolist() == expected


@given(st.lists(st.integers(0, 50), min_size=1, max_size=14).filter(any))
def test_folds_are_dealt_evenly_and_none_is_empty(tokens):
    folds = evidence._deal(np.array(tokens, np.int64))
    assert len(folds) == min(evidence.FOLDS, sum(n > 0 for n in tokens))
    assert sorted(i for fold in folds for i in fold) == list(range(len(tokens)))
    sizes = [sum(tokens[i] for i in fold) for fold in folds]
    assert min(sizes) > 0 and max(sizes) - min(sizes) <= max(tokens)


def test_the_longest_sessions_are_dealt_first_and_equals_in_order():
    assert {5} in evidence._deal(np.array([1, 1, 1, 1, 1, 10]))
    assert evidence._deal(np.full(40, 3)) == [set(range(first, 40, 5)) for first in range(5)]


def test_beginnings_are_of_roots_in_the_order_of_the_trace():
    trace = sessions_of([skewed()] * 4, np.random.default_rng(9), 10)
    family = replace(trace, session_ids=("a", "b", "a/agent", "c"))
    cut = evidence.beginnings(family, {"a": 14, "b": 3})
    assert cut.position.tolist() == [*range(10), 0, 1, 2, 0, 1, 2, 3]
    assert cut.session.tolist() == [0] * 10 + [1] * 3 + [2] * 4


def test_placements_are_made_from_what_the_profile_counts(monkeypatch: pytest.MonkeyPatch):
    trace = sessions_of([skewed()] * 6, np.random.default_rng(10), 40)
    trace = replace(trace, generated=trace.position % 4 == 0)
    seen = []
    place = evidence.place
    monkeypatch.setattr(evidence, "place", lambda counts, *rest: seen.append(counts) or place(counts, *rest))
    for count, n_tokens in (("generated", 10), ("all", 40)):
        (choice,) = evidence.choose(trace, [10] * L, (50.0,), count=count, threads=1)
        assert choice.tokens == 60
        assert {int(counts.sum()) // (L * A) for counts in seen} <= {4 * n_tokens, 5 * n_tokens}
        seen.clear()


def test_no_more_threads_than_asked_for(monkeypatch: pytest.MonkeyPatch):
    asked = []

    class Pool(evidence.ThreadPoolExecutor):
        def __init__(self, workers):
            asked.append(workers)
            super().__init__(workers)

    monkeypatch.setattr(evidence, "ThreadPoolExecutor", Pool)
    trace = sessions_of([skewed()] * 5, np.random.default_rng(11), 30)
    assert evidence.choose(trace, [10] * L, (50.0,), threads=1) == evidence.choose(trace, [10] * L, (50.0,), threads=3)
    assert asked == [1, 3]


@pytest.mark.parametrize(("cores", "expected"), [(None, 1), (1, 1), (3, 3), (8, 8), (64, 8)])
def test_as_many_threads_as_cores_up_to_eight(monkeypatch: pytest.MonkeyPatch, cores, expected):
    asked = []

    class Pool(evidence.ThreadPoolExecutor):
        def __init__(self, workers):
            asked.append(workers)
            super().__init__(1)

    monkeypatch.setattr(evidence, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(evidence.os, "cpu_count", lambda: cores)
    one(sessions_of([skewed()] * 5, np.random.default_rng(16), 10))
    assert asked == [expected]


def test_tokens_that_are_not_generated_move_slots_and_are_not_judged():
    trace = sessions_of([skewed()] * 6, np.random.default_rng(7))
    generated = trace.position % 2 == 0
    choice = one(replace(trace, generated=generated))
    assert choice.tokens == 6 * 110
    assert one(replace(trace, generated=generated, session_ids=tuple("abcdef"))) == choice
    nothing = replace(trace, generated=np.zeros(len(trace.generated), bool))
    assert evidence.choose(nothing, [10] * L) == ()


def test_progress_ends_at_its_total():
    seen = []
    trace = sessions_of([skewed()] * 5, np.random.default_rng(8), 30)
    evidence.choose(trace, [10] * L, (50.0,), lambda done, total: seen.append((done, total)))
    n = len(CANDIDATES) + 1
    assert seen == [(i, n) for i in range(1, n + 1)]


def test_policies_are_never_judged_on_what_they_were_chosen_on(monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(12)
    train, other = (sessions_of([skewed()] * 5, rng, 30) for _ in range(2))
    other = replace(other, session_ids=("x", "y", "z", "s1/agent", "w"))
    assert policies.common_roots(train, replace(train, session_ids=tuple("abcde"))) == []
    assert policies.common_roots(replace(train, session_ids=("s1#2", *"abcd")), other) == ["s1"]
    sets = {"train": replace(train, session_ids=("s1#2", *"abcd")), "other": other}
    monkeypatch.setattr(policies, "record", lambda model, given, *rest: sets[given.name])
    monkeypatch.setattr("sys.argv", ["policies.py", "m.gguf", "--choose-on", "train", "--judge-on", "other"])
    with pytest.raises(SystemExit, match="other: 1 of its sessions are among those to choose on, 's1' first"):
        policies.main()


def test_policies_compares_rules_on_the_same_draws():
    trace = sessions_of([skewed()] * 6, np.random.default_rng(13), 60)
    sizes = [1] * L
    choices = {choice.residency_pct: choice for choice in evidence.choose(trace, sizes, (40.0,))}
    rows = policies.judge("set", trace, trace.counts(), choices, sizes, with_tried=False)
    by_rule = {row["rule"]: row for row in rows}
    own = by_rule["lru"]
    assert own["against_lru_pct"] == own["against_lru_low"] == own["against_lru_high"] == 0  # so it is, if paired
    assert own["misses_low"] < own["misses_per_token"] < own["misses_high"]


def test_candidates_are_distinct_and_begin_with_the_default():
    assert len(set(CANDIDATES)) == len(CANDIDATES)
    assert CANDIDATES[0] == Candidate(1.0, policy.DEFAULT) and CANDIDATES[-1] == Candidate(0.0, Rule(0))

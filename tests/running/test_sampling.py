"""Sampling: distributions against exact probabilities, and the same (seed, position) the same token."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ground.errors import NumericalError
from engine.ops import arithmetic
from engine.ops.likelihood import likelihood
from engine.running import sampling
from engine.running.sampling import PENALTY_TOKENS, SamplingParams, check_finite, counts_reply, random_bits, sample

LOGITS = np.array([0.5, 3.0, -1.0, 2.0, 2.5, -9.0, 0.0], np.float32)


def frequencies(params: SamplingParams, n: int = 4000) -> np.ndarray:
    drawn = [sample(LOGITS, params, position) for position in range(n)]
    return np.bincount(drawn, minlength=len(LOGITS)) / n


def test_greedy_takes_the_first_of_the_largest() -> None:
    assert sample(LOGITS, SamplingParams(), 5) == 1
    assert sample(np.array([1, 4, 4, 2], np.float32), SamplingParams(), 0) == 1


@pytest.mark.slow
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


def test_penalties_count_the_reply() -> None:
    def drawn(reply: list[int], **penalties: float) -> int:
        return sample(LOGITS, SamplingParams(**penalties), 0, [1, 1, 1, 4], None, reply)

    assert drawn([], frequency_penalty=2.0, presence_penalty=2.0) == 1  # the prompt's tokens do not count
    assert drawn([1], presence_penalty=0.6) == 4
    assert drawn([1, 1], presence_penalty=0.4) == drawn([1], frequency_penalty=0.4) == 1  # 3, and 2.5
    assert drawn([1, 1], frequency_penalty=0.4) == 4
    assert drawn([3, 3], frequency_penalty=-0.6) == 3  # 2, and 1.2 for two times
    assert drawn([1] * 1000 + [4] * 500 + [3] * 300 + [6], frequency_penalty=0.01) == 0  # no window


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31))
def test_random_bits_are_in_range_and_repeat(seed: int, position: int) -> None:
    value = random_bits(seed, position)
    assert 0 <= value < 1 << 64
    assert value == random_bits(seed, position)


def split_mix(state: int) -> int:
    """One draw of SplitMix64, as its authors write it."""
    z = state + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    z = (z ^ z >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return z ^ z >> 31


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31))
def test_random_bits_are_the_same_for_ever(seed: int, position: int) -> None:
    """A seed that somebody kept draws what it drew."""
    assert split_mix(0) == 0xE220A8397B1DCDAF  # the published first number of the seed 0
    begun = (seed * 0x9E3779B97F4A7C15 + position + 1) % 2**64
    assert random_bits(seed, position) == split_mix(split_mix(begun))


def test_random_bits_are_spread_over_positions_and_seeds() -> None:
    for draws in ([random_bits(9, i) for i in range(4096)], [random_bits(i, 9) for i in range(4096)]):
        values = np.array(draws, np.float64) * 2.0**-64
        counts, _ = np.histogram(values, bins=16, range=(0, 1))
        assert abs(values.mean() - 0.5) < 0.02
        assert counts.min() > 256 * 0.75


@pytest.mark.parametrize("temperature", [1e-308, 1e-12, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    assert {sample(LOGITS, SamplingParams(temperature=temperature), i) for i in range(50)} == {1}


def test_a_penalty_that_overflows_is_an_error() -> None:
    with pytest.raises(NumericalError):
        sample(LOGITS, SamplingParams(repetition_penalty=1e-300), 0, [1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.3, seed=8),
        SamplingParams(temperature=0.7, top_k=4, seed=8),
        SamplingParams(temperature=1.0, top_p=0.95, seed=2**64 - 1),
        SamplingParams(temperature=1.0, min_p=0.1, repetition_penalty=1.2, seed=5),
    ],
)
def test_draws_pass_a_chi_square_test(params: SamplingParams) -> None:
    recent = [3, 5] if params.repetition_penalty != 1 else []
    logits = LOGITS.astype(np.float64)
    logits[recent] = np.where(logits[recent] > 0, logits[recent] / 1.2, logits[recent] * 1.2)
    p = np.exp((logits - logits.max()) / params.temperature)
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    kept = order[(np.arange(len(p)) < (params.top_k or len(p))) & (before < params.top_p * p.sum())]
    kept = kept[p[kept] >= params.min_p]
    n = 6000
    drawn = np.bincount([sample(LOGITS, params, i, recent) for i in range(n)], minlength=len(p))
    expected = n * p[kept] / p[kept].sum()
    assert set(np.flatnonzero(drawn)) <= set(kept)
    usual = expected > 5
    chi2 = ((drawn[kept] - expected)[usual] ** 2 / expected[usual]).sum()
    assert chi2 < 22.5  # 6 degrees of freedom at most: p > 0.001


def literal_sample(
    logits: np.ndarray, params: SamplingParams, position: int, recent: list[int], allowed: set[int], reply: list[int]
) -> int:
    """docs/arithmetic.md, "Sampling", one sentence after the other; exp alone is the twin's."""
    x = logits.copy()
    if params.repetition_penalty != 1:
        for token in set(recent[-256:]):
            penalty = np.float32(params.repetition_penalty)
            x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    for token in set(reply):
        frequency, presence = np.float32(params.frequency_penalty), np.float32(params.presence_penalty)
        x[token] = x[token] - (frequency * np.float32(reply.count(token)) + presence)
    check_finite(x)
    top = min(allowed, key=lambda i: (-x[i], i))
    T = np.float32(params.temperature)
    if T <= 0:
        return top
    s = (x - x[top]) / T
    e = arithmetic.exp(s)
    w = {i: 0 if s[i] < -23 else int(np.rint(e[i] * np.float32(2**32))) for i in allowed}
    kept = sorted(allowed, key=lambda i: (-x[i], i))[: params.top_k or None]
    P, W = max(1, round(params.top_p * 2**32)), sum(w[i] for i in kept)
    if P < 1 << 32:
        mass, prefix = 0, []
        for i in kept:
            if mass >= math.ceil(Fraction(P * W, 1 << 32)):
                break
            prefix.append(i)
            mass += w[i]
        kept = prefix
    kept = sorted(i for i in kept if w[i] >= round(params.min_p * 2**32))
    r, mass = random_bits(params.seed, position) * sum(w[i] for i in kept) >> 64, 0
    for i in kept:
        mass += w[i]
        if mass > r:
            return i
    raise AssertionError("r lies below the sum")


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 7.0]),
    top_k=st.sampled_from([0, 1, 3, 40, 5000]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 1e-12]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    penalty=st.sampled_from([1.0, 1.3, 0.7]),
    more=st.sampled_from([(0.0, 0.0), (0.1, 0.0), (0.0, -1.7), (2.0, 0.3), (-0.7, 2.0)]),
    masked=st.booleans(),
    size=st.sampled_from([5, 97, 2500]),
)
def test_sample_is_what_the_specification_says(
    seed: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    penalty: float,
    more: tuple[float, float],
    masked: bool,
    size: int,
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, rng.choice([0.5, 6.0]), size).astype(np.float32)
    if seed % 2:
        logits = np.round(logits)  # ties, and both zeros
    recent = rng.integers(0, size, 2 * PENALTY_TOKENS).tolist()
    bits = rng.random(size) < 0.4 if masked else np.ones(size, bool)
    bits[seed % size] = True
    words = np.packbits(np.pad(bits, (0, -size % 32)), bitorder="little").view(np.uint32)
    params = SamplingParams(temperature, top_k, top_p, min_p, penalty, seed, *more)
    reply = recent[: seed % len(recent)]
    allowed = set(np.flatnonzero(bits).tolist())
    for position in (0, 7, 2**31 - 1):
        token = sample(logits, params, position, recent, words if masked else None, reply)
        assert token == literal_sample(logits, params, position, recent, allowed, reply)


UNIT = 2.0**-32


def drawn_by(params: SamplingParams, logits: np.ndarray, positions: int = 24) -> list[int]:
    return [sample(logits, params, position) for position in range(positions)]


@pytest.mark.slow
@given(
    size=st.integers(1, 11).map(lambda k: 1 << k),
    share=st.floats(0, 1),
    unlikely=st.sampled_from([0, 5, 3000]),
    top_k=st.sampled_from([0, 64, 5000]),
    seed=st.integers(0, 2**64 - 1),
)
@settings(max_examples=80, deadline=None)
def test_top_p_ends_with_the_token_that_reaches_it(
    size: int, share: float, unlikely: int, top_k: int, seed: int
) -> None:
    """Of 2^k equal tokens n weigh exactly n / 2^k: that much keeps n, 2^-32 more one more, 2^-32 less no fewer."""
    logits = np.concatenate([np.full(unlikely, -90, np.float32), np.full(size, 1.5, np.float32)])
    n_all = min(size, top_k or size)
    n = 1 + int(share * (n_all - 1))
    for change, n_kept in ((0, n), (UNIT, min(n + 1, n_all)), (-UNIT, n)):
        params = SamplingParams(1.0, top_k, min(n / n_all + change, 1.0), seed=seed)
        expected = [unlikely + (random_bits(seed, position) * n_kept >> 64) for position in range(24)]
        assert drawn_by(params, logits) == expected


@pytest.mark.slow
@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([2, 9, 300, 3000]),
    share=st.floats(0, 1),
    spread=st.sampled_from([0.01, 1.0, 4.0]),
    top_k=st.sampled_from([0, 7, 1500]),
)
@settings(max_examples=80, deadline=None)
def test_the_largest_top_p_that_a_prefix_reaches_is_the_last(
    seed: int, size: int, share: float, spread: float, top_k: int
) -> None:
    """A prefix of mass m out of W reaches every top-p up to floor(m 2^32 / W) units, and not the next."""
    logits = np.random.default_rng(seed).normal(0, spread, size).astype(np.float32)
    order = np.argsort(-logits, kind="stable")[: top_k or size]
    weights = [int(w) for w in np.rint(arithmetic.exp(logits[order] - logits[order[0]]) * np.float32(2**32))]
    n = int(share * (len(order) - 1))  # of the prefix, one less
    units = (sum(weights[: n + 1]) << 32) // sum(weights)
    for top_p, n_kept in ((units, n + 1), (units + 1, n + 2)):
        n_kept = min(n_kept, len(order)) if top_p < 1 << 32 else len(order)
        kept = sorted(zip(order[:n_kept].tolist(), weights, strict=False))
        edges = np.cumsum([weight for _, weight in kept])
        draws = [random_bits(seed, position) * int(edges[-1]) >> 64 for position in range(24)]
        expected = [kept[int(np.searchsorted(edges, draw, side="right"))][0] for draw in draws]
        assert drawn_by(SamplingParams(1.0, top_k, min(top_p * UNIT, 1.0), seed=seed), logits) == expected


def test_what_cannot_be_drawn_changes_nothing() -> None:
    params = SamplingParams(temperature=0.9, top_p=0.97, seed=4)
    longer = np.concatenate([LOGITS, np.full(3000, -60, np.float32)])
    words = np.packbits(np.arange(3008) < 7, bitorder="little").view(np.uint32)
    for position in range(200):
        token = sample(LOGITS, params, position)
        assert sample(longer, params, position) == token
        assert sample(longer + np.float32(2), params, position) == token  # these sums are exact
        assert sample(np.where(longer < -50, np.float32(50), longer), params, position, (), words) == token


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


@pytest.mark.parametrize("size", [1, 7, 2500, 152064])
def test_log_probabilities_are_those_of_the_softmax(size: int) -> None:
    rng = np.random.default_rng(size)
    for scale in (0.0, 0.5, 4.0, 40.0):
        logits = rng.normal(-3, scale, size).astype(np.float32)
        wide = logits.astype(np.float64)
        expected = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
        order = sorted(range(size), key=lambda i: (-logits[i], i))[:20]
        for token in {0, size // 2, order[0]}:
            found = likelihood(logits, token, 20)
            assert found.logprob == pytest.approx(expected[token], abs=1e-6, rel=1e-12)
            assert [i for i, _ in found.top] == order
            assert np.abs([value - expected[i] for i, value in found.top]).max() < 1e-6
            assert dict(found.top).get(token, found.logprob) == found.logprob
        assert likelihood(logits, 0, 0) == (likelihood(logits, 0, 1).logprob, ())


def test_of_equal_logits_the_smaller_id_comes_first() -> None:
    logits = np.array([-0.0, 1.0, 0.0, 1.0, -2.0, 0.0], np.float32)
    assert [token for token, _ in likelihood(logits, 4, 5).top] == [1, 3, 0, 2, 5]


def test_a_draw_on_an_edge_is_of_the_token_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """r lies in [0, sum): a token has the numbers from those before it up to its own sum, which is the next one's."""
    for bits, token in ((0, 0), ((1 << 63) - 1, 0), (1 << 63, 1), ((1 << 64) - 1, 1)):
        monkeypatch.setattr(sampling, "random_bits", lambda seed, position, bits=bits: bits)
        assert sample(np.zeros(2, np.float32), SamplingParams(temperature=1.0), 0) == token


def test_what_min_p_drops_is_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "random_bits", lambda seed, position: 0)
    assert sample(np.array([-1, 0], np.float32), SamplingParams(temperature=1.0, min_p=0.5), 0) == 1


def test_bits_of_a_mask_beyond_the_vocabulary_are_no_tokens() -> None:
    everything = np.full(1, 0xFFFFFFFF, np.uint32)
    for params in (SamplingParams(), SamplingParams(temperature=1.0, seed=3)):
        assert sample(LOGITS, params, 4, allowed=everything) == sample(LOGITS, params, 4)


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
@pytest.mark.parametrize("value", [-2.0, 0.5, 1.0])
def test_each_penalty_of_the_reply_counts_by_itself(name: str, value: float) -> None:
    logits = np.array([1.0, 1.2 if value < 0 else 0.9], np.float32)
    params = SamplingParams(**{name: value})
    assert counts_reply(params) and not counts_reply(SamplingParams())
    assert sample(logits, params, 1, reply=[0]) == (0 if value < 0 else 1) != sample(logits, SamplingParams(), 1)
    assert sample(logits, params, 0) == sample(logits, SamplingParams(), 0)  # before anything was said


def test_a_small_negative_logit_is_penalized_as_a_negative_one() -> None:
    logits, params = np.array([-0.5, -0.75], np.float32), SamplingParams(repetition_penalty=2.0)
    assert sample(logits, params, 0, [0]) == 1 and sample(logits, params, 0, [1]) == 0


def test_weights_that_are_computed_in_parts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.random.default_rng(4).normal(0, 2, 50).astype(np.float32)
    params = SamplingParams(temperature=1.3, seed=5)
    whole = [sample(logits, params, position) for position in range(60)]
    monkeypatch.setattr(sampling, "EXP_CHUNK", 7)
    assert [sample(logits, params, position) for position in range(60)] == whole and len(set(whole)) > 9


def test_a_repetition_penalty_sees_so_many_tokens_and_no_more() -> None:
    logits, params = np.array([1.0, 0.9, -5.0], np.float32), SamplingParams(repetition_penalty=2.0)
    others = [2] * (PENALTY_TOKENS - 1)
    assert PENALTY_TOKENS == 256  # cuda/sample.cu keeps as many
    assert sample(logits, params, 0, [0, *others]) == 1 and sample(logits, params, 0, [0, 2, *others]) == 0
    assert sample(logits, params, 0) == 0


def test_what_overflows_is_no_warning_and_no_token() -> None:
    with np.errstate(all="raise"):
        wide = np.array([3e38, -3e38, 0], np.float32)
        assert sample(wide, SamplingParams(temperature=0.01, seed=1), 0) == 0
        with pytest.raises(NumericalError):
            sample(wide, SamplingParams(repetition_penalty=0.01), 0, [0])
        for token in (0, 2):  # a penalty below the range of float32 is 0
            with pytest.raises(NumericalError):
                sample(wide, SamplingParams(repetition_penalty=1e-50), 0, [0, token])

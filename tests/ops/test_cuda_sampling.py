"""Sampling and step control on the device: the tokens of `running.sampling.sample`, the loop of the scheduler."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.ground.digest import kernels
from engine.ground.errors import NumericalError
from engine.ground.protocol import MAX_STOP_TOKENS
from engine.ops import KV_BLOCK_TOKENS, Limits, arithmetic
from engine.ops.cuda.counting import CountingDevice
from engine.ops.cuda.sampling import (
    DESCRIBED_ENTRIES,
    FAILED,
    HISTORY_TOKENS,
    LENGTH,
    RING_ENTRIES,
    RUNNING,
    STOPPED,
    Draw,
    News,
    Sampler,
    SamplerStates,
)
from engine.ops.likelihood import likelihood
from engine.running.ahead import AHEAD_STEPS
from engine.running.sampling import PENALTY_TOKENS, SamplingParams, counts_reply, random_bits, sample

P = SamplingParams


def limits(V: int) -> Limits:
    return Limits(max_tokens=8, n_embd=64, n_head_dim=64, n_ff=32, n_vocab=V, n_expert=4, n_expert_used=2)


class Decoder:
    """A sampler with the arrays that a decoding step reads."""

    def __init__(self, device: Any, V: int) -> None:
        self.device, self.sampler = device, Sampler(device, limits(V))
        self.tokens, self.positions = (device.upload(np.full(1, -9, np.int32)) for _ in range(2))
        self.slots = device.upload(np.full((2, 5), -9, np.int32))  # of two KV groups, for steps of up to five tokens
        self.block_table = np.random.default_rng(1).permutation(2 * 3 * 64).astype(np.int32).reshape(2, 3, 64)
        self.table = device.upload(self.block_table)

    def step(self, logits: np.ndarray, greedy: bool = False) -> None:
        arrays = (self.tokens, self.positions, self.slots, self.table)
        self.sampler.step(self.device.upload(logits[None]), *arrays, greedy=greedy)
        self.device.synchronize()  # the ring is read behind the device's back

    def inputs(self) -> tuple[int, int, int]:
        slots = self.device.read(self.slots)
        assert (slots[:, 1:] == -9).all()
        assert (slots[0, 0] == -1) == (slots[1, 0] == -1)
        token, position = (int(self.device.read(a)[0]) for a in (self.tokens, self.positions))
        if slots[1, 0] >= 0:
            assert slots[1, 0] == self.slot(position, group=1)
        return token, position, int(slots[0, 0])

    def slot(self, position: int, group: int = 0) -> int:
        block = int(self.block_table[group, 0, position // KV_BLOCK_TOKENS])
        return block * KV_BLOCK_TOKENS + position % KV_BLOCK_TOKENS


def logits_of(seed: int, V: int, scale: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, V).astype(np.float32)


def assert_draws(device: Any, V: int, params: SamplingParams, cases: list[tuple[np.ndarray, list[int]]]) -> None:
    decoder = Decoder(device, V)
    for logits, history in cases:
        decoder.sampler.prepare(params, history, len(history), [], 5)
        if counts_reply(params):
            decoder.sampler.count(history)
        decoder.step(logits)
        expected = sample(logits, params, len(history), history, None, history)
        assert decoder.sampler.drawn(1) == Draw(expected, RUNNING)


PARAMS = [
    P(),
    P(repetition_penalty=1.4),
    P(temperature=0.8),
    P(temperature=1.0, min_p=0.05),
    P(temperature=1.0, top_k=1),
    P(temperature=1.0, top_k=40),
    P(temperature=1.0, top_p=0.9),
    P(temperature=1.5, top_p=0.999),
    P(temperature=1.2, top_k=300, top_p=0.8, min_p=0.01, repetition_penalty=1.1),
    P(temperature=0.7, top_k=100000, top_p=1e-12),
    P(temperature=1e-40),
    P(temperature=30.0, top_p=0.97),
    P(presence_penalty=1.3),
    P(temperature=1.0, frequency_penalty=0.07, presence_penalty=-0.4),
    P(temperature=0.9, top_k=40, repetition_penalty=1.1, frequency_penalty=-1.9, presence_penalty=2.0),
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_the_token_is_the_twins(device: Any, params: SamplingParams) -> None:
    V = 5003
    rng = np.random.default_rng(3)
    cases = []
    for i in range(6):
        logits = logits_of(10 + i, V, (0.3, 3.0, 8.0)[i % 3])
        if i >= 3:
            logits = np.round(logits)  # ties, and both zeros
        cases.append((logits, rng.integers(0, V, (3, 256, 700)[i % 3]).tolist()))
    for seed in (0, 2**64 - 3):
        assert_draws(device, V, replace(params, seed=seed), cases)


def test_a_flat_distribution_is_one_long_list(device: Any) -> None:
    for seed in range(3):
        params = P(temperature=1.0, top_k=4000, top_p=0.7, seed=seed)
        assert_draws(device, 5003, params, [(np.zeros(5003, np.float32), [1])])


@pytest.mark.parametrize("top_k", [0, 64, 1024])
@pytest.mark.parametrize("size", [16, 128, 512, 4096])  # of 256 listed, 1,024, and more
def test_top_p_ends_with_the_token_that_reaches_it(device: Any, size: int, top_k: int) -> None:
    """Of 2^k equal tokens n weigh exactly n / 2^k: that much keeps n, 2^-32 more one more, 2^-32 less no fewer."""
    logits, n_all = np.full(size + 37, -90, np.float32), min(size, top_k or size)
    logits[20 : 20 + size] = 1.5
    decoder, unit = Decoder(device, len(logits)), 2.0**-32
    for n in (1, n_all // 2 + 1, n_all):
        for change, n_kept in ((0, n), (unit, min(n + 1, n_all)), (-unit, n)):
            params = P(1.0, top_k, min(n / n_all + change, 1.0), seed=size + n)
            for position in (3, 4, 7, 8):
                decoder.sampler.prepare(params, [0] * position, position, [], 5)
                decoder.step(logits)
                expected = 20 + (random_bits(params.seed, position) * n_kept >> 64)
                assert (
                    decoder.sampler.drawn(1)
                    == Draw(expected, RUNNING)
                    == Draw(sample(logits, params, position), RUNNING)
                )


@pytest.mark.parametrize("size", [9, 200, 1500, 5003])
def test_the_largest_top_p_that_a_prefix_reaches_is_the_last(device: Any, size: int) -> None:
    """And the next unit of 2^-32 takes one token more, here as in the twin."""
    logits = logits_of(size, size, 0.2)
    order = np.argsort(-logits, kind="stable")
    weights = np.rint(arithmetic.exp(logits[order] - logits[order[0]]) * np.float32(2**32)).astype(np.uint64)
    masses, decoder = np.cumsum(weights), Decoder(device, size)
    seen = set()
    for n in (1, 2, size // 2, size - 1):
        units = (int(masses[n - 1]) << 32) // int(masses[-1])
        for top_p in (units, units + 1):
            params = P(1.0, top_p=top_p * 2.0**-32, seed=n)
            for position in range(1, 7):
                decoder.sampler.prepare(params, [0] * position, position, [], 5)
                decoder.step(logits)
                expected = sample(logits, params, position)
                assert decoder.sampler.drawn(1) == Draw(expected, RUNNING)
                seen.add((n, top_p - units, expected))
    assert {(n, token) for n, more, token in seen if more} != {(n, token) for n, more, token in seen if not more}


@pytest.mark.parametrize("V", [1, 31, 1024, 1025, 70001])
def test_any_size_of_vocabulary(device: Any, V: int) -> None:
    broad = P(temperature=2.0, top_p=0.95, seed=5)
    for params in (P(), P(temperature=1.0, seed=5), P(temperature=1.0, top_p=0.9, top_k=50, seed=5), broad):
        assert_draws(device, V, params, [(logits_of(1, V), [0])])


@pytest.mark.parametrize("V", [1023, 1026])
def test_counts_follow_the_draws(device: Any, V: int) -> None:
    """From a reply that is given on, beyond the window of the repetition penalty, with and without masks."""
    rng = np.random.default_rng(V)
    words = rng.integers(0, 2**32, -(-V // 32), np.uint64).astype(np.uint32)
    words[0] |= 1
    for params in (P(frequency_penalty=0.3), P(1.0, frequency_penalty=0.05, presence_penalty=0.2, seed=3)):
        decoder, reply = Decoder(device, V), [3] * 300
        prompt = [7, 7, 9]
        decoder.sampler.prepare(params, [*prompt, *reply], len(prompt + reply), [], 500)
        decoder.sampler.count(reply)
        for n in range(1, 40):
            logits = logits_of(5, V)  # the same ones: nothing but the counts changes what is drawn
            logits[3] = 20.0
            if n == 20:  # a request with a grammar is prepared for each token, and its counts go on
                decoder.sampler.prepare(params, [*prompt, *reply], len(prompt + reply), [], 500, words)
            decoder.step(logits, greedy=params.temperature == 0)
            expected = sample(logits, params, 3 + len(reply), prompt + reply, words if n >= 20 else None, reply)
            assert decoder.sampler.drawn(n if n < 20 else n - 19) == Draw(expected, RUNNING)
            reply.append(expected)
        assert len(set(reply)) > 5
        assert np.array_equal(device.read(decoder.sampler.counts)[:V], np.bincount(reply, minlength=V))
        decoder.sampler.count([])
        assert not device.read(decoder.sampler.counts).any()


def test_without_penalties_counts_are_not_looked_at(device: Any) -> None:
    """Nor written: fresh memory is full of huge numbers."""
    decoder, logits = Decoder(device, 2000), logits_of(2, 2000)
    before = device.read(decoder.sampler.counts)
    decoder.sampler.prepare(P(frequency_penalty=-0.0), [1], 1, [], 5)
    decoder.step(logits)
    assert decoder.sampler.drawn(1) == Draw(int(logits.argmax()), RUNNING)
    assert np.array_equal(device.read(decoder.sampler.counts), before)


@pytest.mark.parametrize("V", [1, 5, 1023, 1026, 5003, 300001])
def test_likelihoods_are_the_twins_bit_for_bit(device: Any, V: int) -> None:
    """Of the logits as they are: penalties and masks change what is drawn alone."""
    decoder = Decoder(device, V)
    words = np.full(-(-V // 32), 0x55555555, np.uint32)
    params = P(1.0, top_k=50, repetition_penalty=1.3, frequency_penalty=1.0, seed=V)
    flat, rounded = np.zeros(V, np.float32), np.round(logits_of(3, V))  # ties, and both zeros
    many = [flat, rounded, logits_of(4, V), logits_of(5, V, 30.0)] if V < 10000 else [rounded]
    for n, logits in zip((0, 1, 20, 3), many, strict=False):
        decoder.sampler.prepare(params, [0] * 4, 4, [], 50, words, n)
        decoder.sampler.count([0] * 3)
        given = device.upload(logits[None])
        for draw in (1, 2, 3):
            decoder.step(logits)
            assert decoder.sampler.likelihood(draw) is None
            decoder.sampler.describe(given)
            device.synchronize()
            drawn = decoder.sampler.drawn(draw)
            assert drawn is not None and drawn.token % 2 == 0
            assert decoder.sampler.likelihood(draw) == likelihood(logits, drawn.token, n)
        news = decoder.sampler.poll(1)
        assert len(news.tokens) == 2 and news.likelihoods[1] == decoder.sampler.likelihood(3)


def test_likelihoods_past_the_end_change_nothing(device: Any) -> None:
    """Steps are enqueued beyond the end, each with other logits; what was not drawn is not described."""
    V = 1500
    decoder, steps = Decoder(device, V), [logits_of(40 + i, V) for i in range(14)]
    stop = int(steps[3].argmax())
    for stops, limit, n_drawn in ([], 12, 12), ([stop], 12, 3), ([], 1, 1):
        decoder.sampler.prepare(P(), [5], 1, stops, limit, logprobs=2)
        made, found = [], []
        for i, logits in enumerate(steps):
            decoder.step(logits, greedy=True)
            decoder.sampler.describe(device.upload(logits[None]))
            device.synchronize()
            if i % 4 == 3:  # as seldom as the host may look
                news = decoder.sampler.poll(len(made))
                made, found = made + news.tokens, found + list(news.likelihoods)
                assert news.stopped == (stops != [])
        expected = [likelihood(logits, int(logits.argmax()), 2) for logits in steps[:n_drawn]]
        assert found == expected and made == [top[0][0] for _, top in expected]
    broken = steps[0].copy()
    broken[7] = np.nan
    decoder.sampler.prepare(P(), [5], 1, [], 9, logprobs=20)
    decoder.step(broken)
    decoder.sampler.describe(device.upload(broken[None]))
    assert decoder.sampler.poll(0) == News([], False, True)


def test_a_token_is_there_when_its_likelihood_is(device: Any) -> None:
    decoder, logits = Decoder(device, 40), logits_of(1, 40)
    for _ in range(2):  # entries of the request before do not pass for those of this one
        decoder.sampler.prepare(P(), [1], 1, [], 5, logprobs=1)
        decoder.step(logits, greedy=True)
        assert decoder.sampler.poll(0) == News([], False, False)
        decoder.sampler.describe(device.upload(logits[None]))
        device.synchronize()
        assert decoder.sampler.poll(0).tokens == [int(logits.argmax())]
    assert AHEAD_STEPS + 1 < DESCRIBED_ENTRIES


def test_the_mask_is_obeyed(device: Any) -> None:
    V = 1500
    decoder, logits = Decoder(device, V), logits_of(2, V)
    bits = np.random.default_rng(5).random(V) < 0.02
    words = np.packbits(np.pad(bits, (0, -V % 32)), bitorder="little").view(np.uint32)
    for params in (P(), P(temperature=1.0), P(temperature=1.0, top_k=5, top_p=0.9)):
        for position in range(1, 6):
            decoder.sampler.prepare(params, [0] * position, position, [], 5, words)
            decoder.step(logits)
            draw = decoder.sampler.drawn(1)
            assert draw is not None and bits[draw.token]
            assert draw.token == sample(logits, params, position, [0] * position, words)
        decoder.sampler.prepare(P(), [0], 1, [], 5)  # and forgotten by the next request
        decoder.step(logits)
        assert decoder.sampler.drawn(1) == Draw(int(logits.argmax()), RUNNING)


@pytest.mark.parametrize("params", [P(), P(temperature=1.0), P(temperature=1.0, top_k=3)], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_end_the_request(device: Any, params: SamplingParams, bad: float) -> None:
    decoder, logits = Decoder(device, 1300), logits_of(3, 1300)
    broken = logits.copy()
    broken[1111] = bad
    with pytest.raises(NumericalError):
        sample(broken, params, 1)
    decoder.sampler.prepare(params, [4], 1, [], 5)
    decoder.step(broken)
    assert decoder.sampler.drawn(1) == Draw(-1, FAILED)
    assert decoder.sampler.poll(0) == News([], False, True)
    assert decoder.inputs()[2] == -1 and device.read(decoder.sampler.active)[0] == 0
    decoder.sampler.prepare(params, [4], 1, [], 5)  # the next request is not concerned
    decoder.step(logits)
    assert decoder.sampler.drawn(1) == Draw(sample(logits, params, 1), RUNNING)


def scheduler_loop(
    steps: list[np.ndarray], params: SamplingParams, history: list[int], stop: set[int], limit: int
) -> list[tuple[Draw, tuple[int, int] | None]]:
    """What `_generate` of engine/serving/scheduler.py does: each draw, and the token and position that are fed next."""
    history, seen = list(history), []
    for made, logits in enumerate(steps, 1):
        token = sample(logits, params, len(history), history)
        if token in stop:
            return [*seen, (Draw(token, STOPPED), None)]
        history.append(token)
        if made == limit:
            return [*seen, (Draw(token, LENGTH), None)]
        seen.append((Draw(token, RUNNING), (token, len(history) - 1)))
    return seen


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize(("n_stop", "limit"), [(0, 1), (0, 7), (3, 40), (300, 40), (0, 300)])
def test_steps_follow_the_scheduler(device: Any, greedy: bool, n_stop: int, limit: int) -> None:
    V, prompt = 311, [5, 9, 300] * 41  # across a boundary of KV blocks, and round the history
    params = P(repetition_penalty=1.3) if greedy else P(temperature=1.1, top_k=90, repetition_penalty=1.3, seed=8)
    stop = set(np.random.default_rng(7).permutation(V)[:n_stop].tolist())
    steps = [logits_of(100 + i, V, 0.5 if i < 4 or limit > 100 else 4.0) for i in range(limit + 5)]
    if n_stop == 3:
        stop |= {int(steps[9].argmax())}
    if n_stop == 300:
        steps[0][list(stop)] = -50  # stops at the second step or soon after
    expected = scheduler_loop(steps, params, prompt, stop, limit)
    decoder = Decoder(device, V)
    decoder.sampler.prepare(params, prompt, len(prompt), stop, limit)
    for n, logits in enumerate(steps, 1):
        before = decoder.inputs()
        decoder.step(logits, greedy)
        if n > len(expected):
            assert decoder.sampler.drawn(n) is None and decoder.inputs() == before  # nothing moves past the end
            continue
        draw, fed = expected[n - 1]
        assert decoder.sampler.drawn(n) == draw
        active = device.read(decoder.sampler.active)[0]
        if fed is None:
            assert decoder.inputs() == (*before[:2], -1) and active == 0
        else:
            assert decoder.inputs() == (*fed, decoder.slot(fed[1])) and active == 1
    assert n_stop == 0 or expected[-1][0].status == STOPPED
    tokens = [draw.token for draw, _ in expected if draw.status != STOPPED]
    assert decoder.sampler.poll(0) == News(tokens, n_stop > 0, False)
    assert decoder.sampler.poll(len(tokens) - 1).tokens == tokens[-1:]


def test_the_ring_tells_requests_apart_and_wraps(device: Any) -> None:
    decoder = Decoder(device, 40)
    sampler, logits = decoder.sampler, logits_of(1, 40)
    token = int(logits.argmax())
    for _ in range(2):
        sampler.prepare(P(), [1], 1, [], 1000)
        assert sampler.drawn(1) is None
        decoder.step(logits, greedy=True)
        assert sampler.drawn(1) == Draw(token, RUNNING) and sampler.drawn(2) is None
    entry = sampler.ring[0]
    sampler.ring[:] = 0
    control = device.read(sampler.control)
    control[3] = RING_ENTRIES  # as if so many draws had been
    device.write(sampler.control, control)
    decoder.step(logits, greedy=True)
    device.synchronize()
    assert sampler.ring[0] != entry
    assert sampler.drawn(RING_ENTRIES + 1) == Draw(token, RUNNING) and sampler.drawn(1) is None


def test_bounds_are_checked(device: Any) -> None:
    assert HISTORY_TOKENS == PENALTY_TOKENS
    sampler = Sampler(device, limits(40))
    with pytest.raises(ValueError, match="stop tokens"):
        sampler.prepare(P(), [1], 1, range(2000), 3)
    with pytest.raises(ValueError, match="limit 0"):
        sampler.prepare(P(), [1], 1, [], 0)
    with pytest.raises(ValueError, match="vocabulary"):
        Sampler(device, limits(1 << 21))


def test_states_lie_as_far_apart_as_the_kernels_say() -> None:
    text = (kernels() / "step.cuh").read_text()
    found = {name: int(n) for name, n in re.findall(r"#define (\w+) (\d+)\n", text)}
    states = SamplerStates(CountingDevice(), limits(41), 2)
    assert found["MAX_STOP_TOKENS"] == MAX_STOP_TOKENS == states.stop.shape[1]
    assert found["N_CONTROL"] == states.control.shape[1] and found["HISTORY_TOKENS"] == states.history.shape[1]
    assert states.counts.shape[1] == states.values.shape[1] == 44


def test_requests_of_one_launch_draw_what_each_draws_alone(device: Any) -> None:
    V, n = 2052, 3
    rng = np.random.default_rng(3)
    logits = device.upload(rng.standard_normal((n, V), np.float32))
    params = [P(), P(temperature=0.8, top_p=0.7, seed=4), P(temperature=1.3, seed=9, presence_penalty=0.5)]
    tables = device.upload(np.arange(2 * n * 5, dtype=np.int32).reshape(2, n, 5))
    drawn = []
    for rows in ([slice(0, n)], [slice(i, i + 1) for i in range(n)]):
        states = SamplerStates(device, limits(V), n)
        samplers = [Sampler(device, limits(V), states, i) for i in range(n)]
        for i, sampler in enumerate(samplers):
            history = list(range(7 + i))
            sampler.prepare(params[i], history, len(history), {5}, 9)
            sampler.count([1, 2, 2])
        tokens, positions = (device.upload(np.full(n, -9, np.int32)) for _ in range(2))
        slots, counted = device.upload(np.full((2, n), -9, np.int32)), device.upload(np.ones(n, np.uint8))
        for own in rows:
            states.step(own, logits[own], tokens, positions, slots, tables, row=own.start, counted=counted)
        device.synchronize()
        news = [sampler.poll(0).tokens for sampler in samplers]
        drawn.append([news, *(device.read(a).tolist() for a in (tokens, positions, slots, counted))])
    assert drawn[0] == drawn[1]
    assert drawn[0][1] == [tokens[0] for tokens in drawn[0][0]] and drawn[0][2] == [7, 8, 9]

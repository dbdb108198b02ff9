"""Propose, run, accept: whatever is proposed, a reply has the tokens, the likelihoods and the cache of a plain one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from engine import models
from engine.drafting.gate import Drafting
from engine.drafting.lookup import Lookup, Memory
from engine.ground.config import EngineConfig
from engine.ground.errors import NumericalError, RequestError
from engine.ground.sampling import Sampling
from engine.models.layers import KEPT_TOKENS
from engine.ops.cuda.sampling import News, Sampler, SamplerStates
from engine.running import decoding
from engine.running.ahead import AHEAD_STEPS, NEAR_STEPS, AheadOfHost
from engine.running.decoding import Decoder, DraftedAhead, Proposal
from engine.running.loaded import Loaded, load
from engine.running.reply import Reply
from engine.running.sampling import Drawn
from engine.running.stepping import Span
from tests.engine_runs import Says, config
from tests.forms_here import FormHere
from tests.tiny_models import k_quant_mix, tiny_path, write_tiny

RNG = np.random.default_rng(13)
PROMPTS = [RNG.integers(0, 301, n).astype(np.int32) for n in (70, 41)]
PLAIN = [Sampling(), Sampling(0.9, seed=4)]
PENALIZED = Sampling(0.8, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2, seed=9)
N_TOKENS = 24


@pytest.fixture(scope="module", params=models.known())
def loaded(request: pytest.FixtureRequest) -> Iterator[Loaded]:
    made = load(EngineConfig(model=tiny_path(request.param), device="cpu", threads=1, ctx_tokens=400, chunk_tokens=64))
    yield made
    made.close()
    assert made.kv.free_blocks == made.kv.n_blocks
    assert made.kv.states is None or made.kv.states.free_blocks == made.kv.states.n_blocks


@pytest.fixture
def small() -> Iterator[Loaded]:
    made = load(EngineConfig(model=tiny_path("qwen3moe"), device="cpu", threads=1, ctx_tokens=640, chunk_tokens=64))
    yield made
    made.close()
    assert made.kv.free_blocks == made.kv.n_blocks


def begun(loaded: Loaded, prompt: np.ndarray, sampling: Sampling, limit: int = N_TOKENS, **options) -> Reply:
    """A reply whose prompt was read and whose first token is drawn."""
    sequence = loaded.kv.sequence()
    reply = Reply(prompt.tolist(), sampling, limit, sequence=sequence, logprobs=2, **options)
    for start in range(0, len(prompt), 64):
        part = prompt[start : start + 64]
        chunk = Proposal(reply, Span(sequence, part, np.zeros(len(part), bool), (len(part) - 1,)))
        result = loaded.decoder.run([chunk])
    assert loaded.decoder.accept([chunk], result) == [None]
    return reply


def ended(decoder: Decoder, replies: list[Reply]) -> int:
    """Decode all to their ends, in steps that they share; how many there were."""
    for n in range(500):
        going = [reply for reply in replies if reply.reason is None]
        if not going:
            return n
        assert decoder.step(going) == [None] * len(going)
    raise AssertionError("it does not end")


def next_logits(loaded: Loaded, reply: Reply) -> np.ndarray:
    """Of a step of the last token and two more, which shows all that is cached."""
    assert reply.sequence is not None
    tokens = np.array([reply.history[reply.sequence.length], 5, 9], np.int32)
    return loaded.steps.run([Span(reply.sequence, tokens, np.zeros(3, bool), (0, 1, 2))]).logits.copy()


def release(replies: list[Reply]) -> None:
    for reply in replies:
        assert reply.sequence is not None
        reply.sequence.release()


def said(reply: Reply) -> tuple[list[int], list[Drawn], str | None]:
    return reply.history, reply.unsent, reply.reason


def some_right(expected: list[list[int]], seed: int, most: int) -> Callable[[Reply], tuple[int, ...]]:
    """Proposes up to `most` tokens, of which the first ones, none or all, are what follows; the others never are."""
    rng = np.random.default_rng(seed)

    def propose(reply: Reply) -> tuple[int, ...]:
        (follow,) = [h[len(reply.history) :] for h in expected if h[: len(reply.history)] == reply.history]
        n = int(rng.integers(0, most + 1))
        right = follow[: int(rng.integers(0, n + 1))]
        beyond = follow[len(right) :] + [0] * most
        return tuple(right + [(token + 1) % 300 for token in beyond[: n - len(right)]])

    return propose


@pytest.mark.parametrize("samplings", [PLAIN, [PENALIZED, Sampling()]], ids=["plain", "penalized"])
def test_what_is_proposed_changes_nothing(loaded: Loaded, samplings: list[Sampling]) -> None:
    plain = [begun(loaded, *pair) for pair in zip(PROMPTS, samplings, strict=True)]
    n_plain = ended(loaded.decoder, plain)
    expected = [said(reply) for reply in plain]
    assert all(len(unsent) == N_TOKENS and reason == "length" for _, unsent, reason in expected)
    after = [next_logits(loaded, reply) for reply in plain]
    release(plain)
    for seed in range(3):
        replies = [begun(loaded, *pair) for pair in zip(PROMPTS, samplings, strict=True)]
        proposing = Decoder(loaded.steps, loaded.drawer, Says(some_right([h for h, _, _ in expected], seed, 3)))
        assert ended(proposing, replies) < n_plain
        assert [said(reply) for reply in replies] == expected
        for reply, logits in zip(replies, after, strict=True):
            assert reply.sequence is not None and reply.sequence.length == len(reply.history) - 1
            assert np.array_equal(next_logits(loaded, reply), logits)
        release(replies)


@pytest.mark.parametrize("right", [0, 1, 4, 7, 20, 31])
def test_a_step_keeps_as_many_tokens_as_are_right(small: Loaded, right: int) -> None:
    plain = begun(small, PROMPTS[0], PENALIZED, 40)
    ended(small.decoder, [plain])
    reply = begun(small, PROMPTS[0], PENALIZED, 40)
    at, most = len(reply.history), KEPT_TOKENS - 1
    follow = [*plain.history[at : at + right], *((t + 1) % 301 for t in plain.history[at + right : at + most])]
    assert len(follow) == most
    small_steps = Decoder(small.steps, small.drawer, Says(lambda _: tuple(follow)))
    assert small_steps.step([reply]) == [None]
    assert reply.history == plain.history[: at + right + 1]
    assert reply.sequence is not None and reply.sequence.length == len(reply.history) - 1
    release([reply, plain])


@pytest.mark.parametrize("end", ["stop", "length"])
def test_the_end_lies_among_what_is_proposed(small: Loaded, end: str) -> None:
    """What follows the last token in a step is right, and was never said."""
    free = begun(small, PROMPTS[0], PLAIN[1])
    ended(small.decoder, [free])
    at = len(PROMPTS[0])
    options = {"limit": 4} if end == "length" else {"stop": {free.history[at + 4]}}
    assert free.history[at + 4] not in free.history[at : at + 4]
    plain, reply = (begun(small, PROMPTS[0], PLAIN[1], **options) for _ in range(2))
    ended(small.decoder, [plain])
    proposing = Decoder(small.steps, small.drawer, Says(lambda r: tuple(free.history[len(r.history) :][:6])))
    assert ended(proposing, [reply]) == 1
    assert said(reply) == said(plain) and reply.reason == end and reply.history == free.history[: at + 4]
    assert reply.sequence is not None and plain.sequence is not None
    assert reply.sequence.length == plain.sequence.length
    release([reply, plain, free])


def test_nothing_follows_a_stop_token(small: Loaded) -> None:
    """Not even where the last token is proposed again, which then looks as if it had been drawn."""
    free = begun(small, PROMPTS[0], PLAIN[1])
    ended(small.decoder, [free])
    at = len(PROMPTS[0])
    reply = begun(small, PROMPTS[0], PLAIN[1], stop={free.history[at + 1]})
    proposing = Decoder(small.steps, small.drawer, Says(lambda r: (r.history[-1],) * 4))
    assert proposing.step([reply]) == [None]
    assert reply.reason == "stop" and reply.history == free.history[: at + 1]
    release([reply, free])


class Odd:
    """A grammar of odd tokens, whose masks are late now and then, and which fails after a while."""

    is_done = False

    def __init__(self, late: frozenset[int] = frozenset(), left: int = 99) -> None:
        self.late, self.left, self.asked = late, left, 0

    def mask(self) -> np.ndarray | None:
        self.asked += 1
        return None if self.asked in self.late else np.full(10, 0xAAAAAAAA, np.uint32)

    def accept(self, token: int) -> None:
        assert token % 2
        self.left -= 1
        if self.left < 0:
            raise RequestError("too much")


def settle(replies: list[Reply], decoder: Decoder) -> None:
    for reply in replies:
        if reply.held is not None:
            held, reply.held = reply.held, None
            decoder.draw_from(reply, held, time.monotonic())
        reply.settled(time.monotonic())


def test_a_mask_that_is_late_holds_its_reply_where_it_got_to(small: Loaded) -> None:
    plain = begun(small, PROMPTS[1], PLAIN[1], grammar=FormHere(Odd()))
    while plain.settled(0):
        assert small.decoder.step([plain]) == [None]
    at = len(PROMPTS[1])
    assert len(plain.history) == at + N_TOKENS and all(token % 2 for token in plain.history[at:])
    late = begun(small, PROMPTS[1], PLAIN[1], grammar=FormHere(Odd(frozenset({3, 4, 9}))))
    other = begun(small, PROMPTS[0], PLAIN[0])
    alone = begun(small, PROMPTS[0], PLAIN[0])
    ended(small.decoder, [alone])

    def propose(reply: Reply) -> tuple[int, ...]:
        return tuple(plain.history[len(reply.history) :][:3]) if reply is late else ()

    proposing, n_held = Decoder(small.steps, small.drawer, Says(propose)), 0
    while late.settled(0) or other.reason is None:
        going = [reply for reply in (late, other) if reply.reason is None]
        assert proposing.step(going) == [None] * len(going)
        n_held += late.held is not None
        assert late.sequence is not None and late.sequence.length == len(late.history) - (late.held is None)
        while late.held is not None:
            settle([late], proposing)
    assert n_held == 2
    assert said(late) == said(plain) and said(other) == said(alone)
    release([late, other, alone, plain])


def test_a_failure_is_its_own_replys(small: Loaded) -> None:
    fails = begun(small, PROMPTS[1], PLAIN[1], grammar=FormHere(Odd(left=2)))
    other, alone = (begun(small, PROMPTS[0], PENALIZED) for _ in range(2))
    assert small.decoder.step([fails, other]) == [None, None]
    failure, none = small.decoder.step([fails, other])
    assert isinstance(failure, RequestError) and none is None
    ended(small.decoder, [other])
    ended(small.decoder, [alone])
    assert said(other) == said(alone)
    with pytest.raises(NumericalError):
        other.take(None)
    release([fails, other, alone])


def test_one_that_is_alone_stops_where_it_is_told(small: Loaded) -> None:
    plain, reply = (begun(small, PROMPTS[0], PLAIN[1]) for _ in range(2))
    ended(small.decoder, [plain])
    steps = small.decoder.alone(reply)
    for _ in range(3):
        steps.advance()
    steps.pause()
    steps.advance()
    assert steps.ended and reply.reason is None and len(reply.unsent) == 4
    steps = small.decoder.alone(reply)
    while not steps.ended:
        steps.advance()
    assert said(reply) == said(plain)
    release([reply, plain])


# --- on a device --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_tiny(folder / "tiny.gguf", k_quant_mix, n_layer=2, n_expert_used=3)


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens come as of a device that is slower than the host, the end after them."""
    poll = Sampler.poll

    def slow(self: Sampler, made: int) -> News:
        news = poll(self, made)
        return News(news.tokens[:1], False, False, news.likelihoods[:1]) if news.tokens else news

    monkeypatch.setattr(Sampler, "poll", slow)


@pytest.mark.slow
@pytest.mark.usefixtures("on_the_device", "one_at_a_time")
def test_a_reply_pauses_in_the_middle_of_decoding_ahead(model: Path) -> None:
    """And goes on in a step of its own, with tokens proposed, and ahead again: the tokens are those of steps alone."""
    loaded = load(config(model))
    prompt, n = PROMPTS[1][:12], 17
    plain = begun(loaded, prompt, PENALIZED, n)
    ended(loaded.decoder, [plain])
    release([plain])
    reply = begun(loaded, prompt, PENALIZED, n)
    assert reply.sequence is not None
    before = loaded.residency.counters()

    def whole() -> int:
        """Tokens drawn: the last of them is not fed."""
        assert reply.sequence is not None and reply.reason is None
        assert reply.sequence.length == len(reply.history) - 1 and reply.history == plain.history[: len(reply.history)]
        return reply.made

    steps = loaded.decoder.alone(reply)
    steps.pause()
    steps.advance()
    assert steps.ended and whole() == 1  # nothing had been enqueued
    steps = loaded.decoder.alone(reply)
    assert isinstance(steps, AheadOfHost)
    steps.advance()
    assert not steps.ended
    steps.pause()
    while not steps.ended:
        steps.advance()
    made = whole()
    assert 3 < made < 8  # one was read, and more were under way
    since = loaded.residency.since(before)
    assert since["hits"] + since["misses"] == (made - 1) * 2 * 3  # and no token was fed twice
    proposing = Decoder(loaded.steps, loaded.drawer, Says(lambda r: (plain.history[len(r.history)], 300)))
    assert proposing.step([reply]) == [None]
    assert whole() == made + 2
    assert loaded.decoder.step([reply]) == [None]
    assert whole() == made + 3
    steps = loaded.decoder.alone(reply)
    while not steps.ended:
        steps.advance()
    assert said(reply) == said(plain)
    reply.sequence.release()
    assert loaded.kv.free_blocks == loaded.kv.n_blocks
    loaded.close()


@pytest.mark.slow
@pytest.mark.usefixtures("on_the_device", "one_at_a_time")
def test_fewer_steps_are_under_way_behind_a_draft(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "SOON_TOKENS", 5)
    loaded = load(config(model))
    plain, reply = (begun(loaded, PROMPTS[1][:12], PLAIN[0], 30) for _ in range(2))
    ended(loaded.decoder, [plain])
    reply.drafting = Drafting(Lookup(Memory(0)))

    def follow(r: Reply) -> tuple[int, ...]:  # more tokens than are under way
        return tuple(plain.history[len(r.history) :][:6]) if r is reply and 8 <= r.made < 12 else ()

    loaded.decoder.proposer = Says(follow)
    steps, under_way = loaded.decoder.alone(reply), dict[int, int]()
    assert isinstance(steps, DraftedAhead)
    while not steps.ended:
        steps.advance()
        if steps._ahead is not None and reply.left > AHEAD_STEPS:
            under_way[reply.made] = steps._ahead.under_way
    assert reply.history == plain.history
    drafted_at = steps._drafted_at
    assert drafted_at > 8 and max(under_way.values()) == AHEAD_STEPS, under_way
    soon = [n for made, n in under_way.items() if drafted_at < made < drafted_at + 5]
    assert soon and max(soon) == NEAR_STEPS
    assert under_way[max(under_way)] == AHEAD_STEPS
    release([plain, reply])
    loaded.close()


@pytest.mark.slow
@pytest.mark.usefixtures("on_the_device")
def test_all_rows_of_drafts_are_drawn_from_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By as many samplers, again where there are more rows; with a penalty by one sampler after the other."""
    model = write_tiny(tmp_path / "tiny.gguf", k_quant_mix, n_layer=2, n_vocab=300, n_expert_used=3)
    loaded, calls = load(config(model, parallel=4, ctx_tokens=640)), []
    step = SamplerStates.step

    def noting(self: SamplerStates, own: slice, *args: object, **options: object) -> None:
        calls.append(own.stop - own.start)
        step(self, own, *args, **options)

    def replies(which: list[int]) -> list[Reply]:
        made = []
        for number, i in enumerate(which):
            history = [7 * i + 5, *(PROMPTS[1][:4] % 300).tolist()]
            sampling = (Sampling(), Sampling(0.9, top_p=0.9, seed=4), PENALIZED)[i]
            made.append(Reply(history, sampling, 11, sequence=loaded.kv.sequence(), number=number))
            span = Span(made[-1].sequence, np.asarray(history, np.int32), np.zeros(5, bool), (4,))
            chunk = Proposal(made[-1], span)
            assert loaded.decoder.accept([chunk], loaded.decoder.run([chunk])) == [None]
        return made

    plain = replies([0, 1, 2])
    for reply in plain:
        ended(loaded.decoder, [reply])
    release(plain)
    expected = [reply.history for reply in plain]
    monkeypatch.setattr(SamplerStates, "step", noting)
    cases = ([0], 7, 4), ([1], 7, 4), ([0, 1], 3, 4), ([2], 7, 1), ([1, 2], 3, 1)
    for seed, (together, most, widest) in enumerate(cases):
        calls.clear()
        drafted = replies(together)
        ended(Decoder(loaded.steps, loaded.drawer, Says(some_right(expected, seed, most))), drafted)
        assert [reply.history for reply in drafted] == [expected[i] for i in together]
        release(drafted)
        assert max(calls) == widest, together
    loaded.close()

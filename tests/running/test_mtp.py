"""Drafts by a model's own block: the same whatever else is in a step, after any rollback, and never another token."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import pytest

from engine.drafting.source import Draft
from engine.ground.config import EngineConfig
from engine.ground.sampling import Sampling
from engine.memory import swap
from engine.memory.blocks import Sequence
from engine.running.loaded import Loaded, load
from engine.running.mtp import Asked, Fed, Predictor
from engine.running.reply import Reply
from engine.running.stepping import Span
from tests.nextn_models import FAMILIES, block_path
from tests.telling import Telling, said

RNG = np.random.default_rng(13)
PROMPTS = [RNG.integers(0, 301, n).astype(np.int32) for n in (70, 41)]
N_TOKENS = 20


def loaded_for(arch: str, **options: Any) -> Loaded:
    config: dict[str, Any] = {"ctx_tokens": 300, "chunk_tokens": 64, "threads": 1} | options
    return load(EngineConfig(**{"model": block_path(arch), "device": "cpu", "draft": "mtp"} | config))


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request: pytest.FixtureRequest) -> Iterator[Loaded]:
    made = loaded_for(request.param)
    yield made
    assert made.kv.free_blocks == made.kv.n_blocks
    made.close()


def predictor(loaded: Loaded) -> Predictor:
    assert loaded.predictor is not None
    return loaded.predictor


def feed(loaded: Loaded, parts: Many[tuple[Sequence, Many[int], int]], known: int = 1) -> None:
    """A step of the next n tokens of histories, of each of some sequences; known: tokens behind them that are told."""
    spans = [
        Span(s, np.array(history[s.length : s.length + n], np.int32), np.ones(n, bool), (n - 1,))
        for s, history, n in parts
    ]
    loaded.steps.run(spans)
    fed = [Fed(span, n, history[: s.length + known]) for span, (s, history, n) in zip(spans, parts, strict=True)]
    predictor(loaded).follow(fed)


def drafted(loaded: Loaded, sequence: Sequence, history: Many[int], most: int = 4) -> tuple[Draft | None, np.ndarray]:
    """A draft behind a history, and the logits of its last token."""
    (draft,) = predictor(loaded).drafts([Asked(sequence, history, most)])
    return draft, loaded.forward.buffers.logits[0].copy()


def plain(loaded: Loaded, history: list[int]) -> tuple[Draft | None, np.ndarray]:
    """The same of a sequence that read all of it in chunks, and never drafted."""
    sequence = loaded.kv.sequence()
    for start in range(0, len(history) - 1, 64):
        feed(loaded, [(sequence, history, min(64, len(history) - 1 - start))])
    found = drafted(loaded, sequence, history)
    assert found[0] is not None and len(found[0].tokens) == 4
    sequence.release()
    return found


def same(found: tuple[Draft | None, np.ndarray], expected: tuple[Draft | None, np.ndarray]) -> bool:
    return found[0] == expected[0] and np.array_equal(found[1].view(np.uint32), expected[1].view(np.uint32))


def test_chunks_and_other_sequences_change_no_bit(loaded: Loaded) -> None:
    history, others = PROMPTS[0].tolist(), PROMPTS[1].tolist()
    expected = plain(loaded, history)
    sequence, other = loaded.kv.sequence(), loaded.kv.sequence()
    feed(loaded, [(other, others, 7)])
    for n in (31, 1, 20):
        feed(loaded, [(other, others, 5), (sequence, history, n)])
    drafted(loaded, other, others[: other.length + 1])
    for n in (16, 1):
        feed(loaded, [(sequence, history, n)])
    assert same(drafted(loaded, sequence, history), expected)
    asked = [Asked(other, others[: other.length + 1], 2), Asked(sequence, history, 4)]
    assert predictor(loaded).drafts(asked)[1] == expected[0]
    sequence.release()
    other.release()


def test_residency_changes_no_bit(loaded: Loaded) -> None:
    few = loaded_for(loaded.source.file.architecture, residency_pct=30)
    assert same(plain(few, PROMPTS[0].tolist()), plain(loaded, PROMPTS[0].tolist()))
    few.close()


def test_a_token_that_was_not_known_may_come_later(loaded: Loaded) -> None:
    """Before the next step, or for a draft; until then there is nothing to draft from."""
    history = PROMPTS[0].tolist()
    expected, sequence = plain(loaded, history), loaded.kv.sequence()
    feed(loaded, [(sequence, history, 40)], known=0)
    assert drafted(loaded, sequence, history[:40])[0] is None
    feed(loaded, [(sequence, history, 29)], known=0)
    assert same(drafted(loaded, sequence, history), expected)
    sequence.release()


@pytest.mark.parametrize("stay", [1, 2, 3, 4, 5])
def test_after_a_rollback_drafts_are_those_of_who_never_drafted(loaded: Loaded, stay: int) -> None:
    """A step of a token and four drafts, of which all, some or none are right."""
    history, rest = PROMPTS[0].tolist(), PROMPTS[1].tolist()
    sequence, other = loaded.kv.sequence(), loaded.kv.sequence()
    feed(loaded, [(sequence, history, 64)])
    feed(loaded, [(sequence, history, len(history) - 65), (other, rest, 9)])
    draft, _ = drafted(loaded, sequence, history)
    assert draft is not None
    spans = [
        Span(s, np.array(tokens, np.int32), np.ones(len(tokens), bool), (0,), keep=True)
        for s, tokens in ((other, rest[9:11]), (sequence, [history[-1], *draft.tokens]))
    ]
    loaded.steps.run(spans)
    loaded.steps.take_back(spans, [0, 5 - stay])
    now = [*history, *draft.tokens[: stay - 1], 7]
    assert sequence.length == len(now) - 1
    predictor(loaded).follow([Fed(spans[0], 2, rest), Fed(spans[1], stay, now)])
    assert same(drafted(loaded, sequence, now), plain(loaded, now))
    assert same(drafted(loaded, other, rest[:12]), plain(loaded, rest[:12]))
    sequence.release()
    other.release()


def test_a_step_that_was_taken_back_whole_leaves_the_draft_as_it_was(loaded: Loaded) -> None:
    history = PROMPTS[1].tolist()
    sequence = loaded.kv.sequence()
    feed(loaded, [(sequence, history, 40)])
    span = Span(sequence, np.array([*history[40:], 3], np.int32), np.ones(2, bool), (0,), keep=True)
    loaded.steps.run([span])
    loaded.steps.take_back([span], [2])
    predictor(loaded).follow([Fed(span, 0, history)])
    assert same(drafted(loaded, sequence, history), plain(loaded, history))
    sequence.release()


def test_a_prefix_brings_the_blocks_cache_along(loaded: Loaded) -> None:
    """But for the entry of its last position, which is made of the token that followed: here of the same one."""
    history = RNG.integers(0, 301, 200).astype(np.int32)
    expected = plain(loaded, history.tolist())
    first = loaded.kv.sequence()
    for n in (64, 64, 64, 7):
        feed(loaded, [(first, history.tolist(), n)])
        loaded.prefixes.insert(first, history)
    first.release()
    sequence, length = loaded.resume(history)
    assert length == 192
    feed(loaded, [(sequence, history.tolist(), 7)])
    assert same(drafted(loaded, sequence, history.tolist()), expected)
    sequence.release()
    loaded.prefixes.clear()


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q8_0,q4_0"])
def test_a_sequence_that_was_moved_out_goes_on_with_the_next_step(kv_type: str) -> None:
    history, loaded = PROMPTS[0].tolist(), loaded_for("qwen35", kv_type=kv_type)
    expected, sequence = plain(loaded, history), loaded.kv.sequence()
    for n in (64, 4):
        feed(loaded, [(sequence, history, n)])
    moved = swap.swap_out(loaded.kv, sequence)
    assert moved is not None
    plain(loaded, PROMPTS[1].tolist())  # in the blocks that it had
    sequence = loaded.swap_in(moved)
    assert drafted(loaded, sequence, history[: sequence.length + 1])[0] is None
    feed(loaded, [(sequence, history, 1)])
    assert same(drafted(loaded, sequence, history), expected)
    loaded.close()


def test_the_end_of_the_context_is_the_end_of_drafts(loaded: Loaded) -> None:
    history = RNG.integers(0, 301, 299).tolist()
    sequence = loaded.kv.sequence()
    for n in (64, 64, 64, 64, 40):
        feed(loaded, [(sequence, history, n)])
        draft, _ = drafted(loaded, sequence, history[: sequence.length + 1])
        assert draft is not None and len(draft.tokens) == min(4, 299 - sequence.length)
    feed(loaded, [(sequence, history, 2)])
    draft, _ = drafted(loaded, sequence, history)
    assert draft is not None and len(draft.tokens) == 1
    sequence.release()


def test_who_was_not_told_does_not_draft(loaded: Loaded) -> None:
    history = PROMPTS[1].tolist()
    sequence = loaded.kv.sequence()
    assert drafted(loaded, sequence, history)[0] is None
    feed(loaded, [(sequence, history, 30)])
    assert drafted(loaded, sequence, [*history[:30], history[30] + 1])[0] is None
    assert drafted(loaded, sequence, history[:31], most=0)[0] is None
    loaded.steps.run([Span(sequence, np.array(history[30:32], np.int32), np.ones(2, bool))])
    assert drafted(loaded, sequence, history[:33])[0] is None
    feed(loaded, [(sequence, history, 1)])
    assert drafted(loaded, sequence, history[:34])[0] is not None
    predictor(loaded).forget(sequence)
    assert drafted(loaded, sequence, history[:34])[0] is None
    sequence.release()


def test_more_sequences_than_are_remembered(loaded: Loaded) -> None:
    """Those that were told of last draft; the others go on when they are told of again."""
    history = PROMPTS[1].tolist()
    n = len(predictor(loaded)._rows)
    (expected, _) = plain(loaded, history[:6])
    for _ in range(n + 2):
        sequence = loaded.kv.sequence()
        feed(loaded, [(sequence, history, 5)])
        assert drafted(loaded, sequence, history[:6])[0] == expected
        sequence.release()
    assert len(predictor(loaded)._tails) <= n


def test_logits_that_are_not_finite_make_no_draft(loaded: Loaded) -> None:
    history = PROMPTS[1].tolist()
    sequence = loaded.kv.sequence()
    feed(loaded, [(sequence, history, 30)])
    predictor(loaded)._rows[...] = np.nan
    assert drafted(loaded, sequence, history[:31])[0] is None
    sequence.release()


@pytest.mark.slow
@pytest.mark.parametrize("residency", [100, 30])
@pytest.mark.parametrize("arch", FAMILIES)
def test_drafts_change_no_token(arch: str, residency: int) -> None:
    """Greedy, sampled and with penalties; a random block is hardly ever right, so one that is helped, too."""
    loaded = loaded_for(arch, residency_pct=residency)

    def followed(reply: Reply) -> None:
        assert reply.sequence is not None
        assert same(drafted(loaded, reply.sequence, reply.history), plain(loaded, reply.history))

    for sampling in ([Sampling(), Sampling(0.9, seed=4)], [Sampling(0.8, repetition_penalty=1.2, seed=9)] * 2):
        expected = said(loaded, loaded.decoder, PROMPTS, sampling, N_TOKENS)
        for decoder in (Telling(loaded, 1), Telling(loaded, 3), Telling(loaded, 3, expected)):
            assert said(loaded, decoder, PROMPTS, sampling, N_TOKENS, followed) == expected
        assert decoder.n_right > 10
    assert loaded.kv.states is None or loaded.kv.states.free_blocks == loaded.kv.states.n_blocks
    loaded.close()

"""Recall: which tokens come depends on the sequence alone, and with blocks enough they are those of all blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.ground.errors import RequestError
from engine.ground.protocol import Done, Event, Generate, Tokens
from engine.ground.recall import MAX_BLOCKS, KVRecall
from engine.ops import MASS_UNITS
from engine.ops.sketches import sketch_bytes
from engine.running.recall import Part, Tally, made_of, part_of
from engine.running.stepping import Span
from engine.serving.scheduler import Engine
from engine.serving.tasks import GenerateTask
from tests.forced_drafts import force
from tests.running.test_kv_pool import CHUNK, few, model, opened, said
from tests.running.test_kv_pool import restless as restless

FAMILIES = ("qwen3moe", *(pytest.param(family, marks=pytest.mark.slow) for family in ("gemma4", "qwen35")))
PROMPT = tuple(np.random.default_rng(3).integers(0, 301, 450).tolist())


def engine(family: str = "qwen3moe", pool: str = "auto", **options: Any) -> Engine:
    return opened(model(family), "cpu", pool, **({"kv_recall_blocks": 1} | options))


def told(*args: Any, **options: Any) -> dict[int, list[int]]:
    one = engine(*args, **options)
    try:
        return said(one, few)
    finally:
        one.close()


def one(engine: Engine, request: Generate) -> tuple[list[int], Done]:
    engine.submit(request)
    events: list[Event] = []
    while engine.busy:
        events += engine.step()
    done = events[-1]
    assert isinstance(done, Done), done
    return [t for e in events if isinstance(e, Tokens) for t in e.tokens], done


@pytest.fixture
def plain() -> Iterator[Engine]:
    one = engine(ctx_tokens=700)
    yield one
    one.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_but_the_sequence_decides(family: str, restless: dict[str, int]) -> None:
    """Who shares a step, the chunks and places of the cache, and drafts; then, with enough blocks, recall itself."""
    expected = told(family)
    assert not restless["home"]
    assert told(family, parallel=1, chunk_tokens=37, prefix_gib=0.0) == expected
    assert told(family, "640") == expected and restless["home"] > 2
    drafted = engine(family, draft="auto")
    prompts = {r.id: list(r.tokens) for some in few(drafted.loaded.source.config.n_vocab) for r in some}
    force(drafted, {i: prompts[i] + tokens for i, tokens in expected.items()})
    assert said(drafted, few) == expected
    drafted.close()
    whole = told(family, kv_recall_blocks=None)
    assert whole != expected and told(family, kv_recall_blocks=9) == whole


@pytest.mark.slow
def test_the_host_computes_what_the_twin_does() -> None:
    made = []
    for device in ("cpu", "reference"):
        one_of = opened(model("qwen3moe"), device, "auto", kv_recall_blocks=0, ctx_tokens=340)
        made.append(one(one_of, Generate(1, PROMPT[:330], 4, stop_tokens=()))[0])
        one_of.close()
    assert made[0] == made[1]


def test_usage_says_what_was_read(plain: Engine) -> None:
    """With drafts or without, the same; the counters have all of it."""
    tokens, done = one(plain, Generate(1, PROMPT, 70, stop_tokens=()))
    assert done.usage.recall is not None
    # The first token is the prompt's; the others' rows lie in blocks 7 and 8, of which one and two are candidates more.
    rows = [(450 + i) // 64 for i in range(69)]
    blocks, left = sum(n + 1 for n in rows), sum(n - 3 - 1 - 1 for n in rows)
    assert (done.usage.recall["blocks"], done.usage.recall["read"]) == (blocks, blocks - left)
    assert 0 < done.usage.recall["left_out_mean"] < done.usage.recall["left_out_max"] < 1
    drafted = engine(draft="auto", ctx_tokens=700)
    force(drafted, {1: [*PROMPT, *tokens]})
    again, other = one(drafted, Generate(1, PROMPT, 70, stop_tokens=()))
    assert again == tokens and other.usage.recall == done.usage.recall and other.usage.drafts
    drafted.close()
    _, off = one(plain, Generate(2, PROMPT, 9, stop_tokens=(), kv_recall=KVRecall(off=True)))
    assert off.usage.recall is None
    stats = plain.stats()["recall"]
    assert (stats["tokens"], stats["blocks"], stats["read"]) == (69, blocks, blocks - left)
    assert stats["left_out_max"] == done.usage.recall["left_out_max"]


def test_a_request_says_how_much(plain: Engine) -> None:
    def said_with(recall: KVRecall | None) -> tuple[list[int], Any]:
        tokens, done = one(plain, Generate(1, PROMPT, 12, stop_tokens=(), kv_recall=recall))
        return tokens, done.usage.recall

    default, whole = said_with(None), said_with(KVRecall(off=True))
    assert default[0] != whole[0] == said_with(KVRecall(blocks=9))[0] == said_with(KVRecall(keep=((0, 450),)))[0]
    assert said_with(KVRecall(blocks=1)) == default == said_with(KVRecall(keep=((0, 64),)))
    kept, none = said_with(KVRecall(keep=((129, 130), (200, 256)))), said_with(KVRecall(blocks=0))
    assert kept[1]["read"] == default[1]["read"] + 2 * 11 == none[1]["read"] + 3 * 11
    assert none[1]["left_out_mean"] > default[1]["left_out_mean"] > kept[1]["left_out_mean"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("left_out", [0.2, 0.5])
def test_as_much_is_read_as_leaves_so_little_out(left_out: float, restless: dict[str, int]) -> None:
    """Whatever the pool and the chunks, and with drafts."""
    asked = Generate(1, PROMPT, 70, stop_tokens=())
    options: dict[str, Any] = {"kv_recall_blocks": None, "kv_recall": left_out, "ctx_tokens": 700}
    plain = engine(**options)
    expected, done = one(plain, asked)
    used = done.usage.recall
    assert used is not None and used["read"] < used["blocks"]
    assert 0 < used["left_out_mean"] < left_out and used["left_out_mean"] < used["left_out_max"]
    few_blocks, other = one(plain, replace(asked, kv_recall=KVRecall(blocks=1)))
    assert few_blocks != expected and other.usage.recall is not None
    both, least = (
        one(plain, replace(asked, kv_recall=KVRecall(blocks=n, left_out=left_out)))[1].usage.recall for n in (1, 99)
    )
    assert both is not None and both["read"] <= min(used["read"], other.usage.recall["read"]) and least == used
    reasons = plain.ready()["reasons"]
    assert any(f"read what leaves {left_out:.3g} of their mass out" in reason for reason in reasons)
    plain.close()
    for pool, more in (("448", {"chunk_tokens": 37, "parallel": 1}), ("auto", {"draft": "auto"})):
        again = engine(pool=pool, **(options | more))
        if "draft" in more:
            force(again, {1: [*PROMPT, *expected]})
        tokens, same = one(again, asked)
        assert tokens == expected and same.usage.recall == used
        again.close()
    assert restless["home"] > 2


@pytest.mark.slow
def test_up_to_so_many_tokens_all_is_read(plain: Engine, restless: dict[str, int]) -> None:
    """In the middle of a block, of a draft and of a shared step; whatever the pool."""
    asked = Generate(1, PROMPT, 140, stop_tokens=())
    ways = {n: KVRecall(start=n) for n in (0, 500, 520)} | {-1: KVRecall(off=True)}
    alone = {n: one(plain, replace(asked, kv_recall=way)) for n, way in ways.items()}
    whole, (tokens, done) = alone[-1][0], alone[500]
    assert tokens[:51] == whole[:51] and len({tuple(reply) for reply, _ in alone.values()}) == 4
    rows = range(450, 589)  # one candidate of a row's is read
    used, left = done.usage.recall, sum(p // 64 - 5 for p in rows if p >= 500)
    assert used is not None and used["blocks"] - used["read"] == left
    assert one(plain, replace(asked, kv_recall=KVRecall(start=588)))[1].usage.recall["left_out_max"] > 0
    assert one(plain, replace(asked, kv_recall=KVRecall(start=589)))[1].usage.recall["left_out_max"] == 0
    for i, way in enumerate(ways.values()):  # together
        plain.submit(replace(asked, id=i, kv_recall=way))
    found: dict[int, list[int]] = {i: [] for i in range(len(ways))}
    while plain.busy:
        for event in plain.step():
            if isinstance(event, Tokens):
                found[event.id] += event.tokens
    assert list(found.values()) == [reply for reply, _ in alone.values()]
    for pool, more in (("448", {"chunk_tokens": 37, "parallel": 1}), ("auto", {"draft": "auto"})):
        again = engine(pool=pool, ctx_tokens=700, kv_recall_from=500, **more)
        if "draft" in more:
            force(again, {1: [*PROMPT, *tokens]})
        same = one(again, asked)
        assert same[0] == tokens and same[1].usage.recall == used
        assert any("where there are more than 500 tokens" in reason for reason in again.ready()["reasons"])
        again.close()
    assert restless["home"] > 2


def test_nothing_less_is_all(plain: Engine) -> None:
    """Where nothing may be left out, all that weighs anything is read."""
    whole = one(plain, Generate(1, PROMPT, 12, stop_tokens=(), kv_recall=KVRecall(off=True)))[0]
    tokens, done = one(plain, Generate(2, PROMPT, 12, stop_tokens=(), kv_recall=KVRecall(left_out=0.0)))
    assert tokens == whole and done.usage.recall is not None
    assert done.usage.recall["read"] == done.usage.recall["blocks"] and done.usage.recall["left_out_max"] == 0
    plain.loaded.prefixes.clear()
    tokens, _ = one(plain, Generate(3, PROMPT, 140, stop_tokens=(), kv_recall=KVRecall(left_out=0.0)))
    _, done = one(plain, Generate(4, (*PROMPT, *tokens, 1), 1, stop_tokens=()))
    assert done.usage.cached_tokens == 576  # all of it is as any prompt has it


@pytest.mark.slow
def test_what_was_left_out_is_no_prefix_of_another(plain: Engine) -> None:
    """A next turn reads a reply as a prompt, from the first chunk on in which a token did not read all."""
    tokens, _ = one(plain, Generate(1, PROMPT, 140, stop_tokens=()))
    turn = (*PROMPT, *tokens, *PROMPT[:20])
    _, done = one(plain, Generate(2, turn, 1, stop_tokens=()))
    assert done.usage.cached_tokens == 448
    whole = KVRecall(off=True)
    after, _ = one(plain, Generate(3, turn, 20, stop_tokens=(), kv_recall=whole))
    fresh = engine(ctx_tokens=700, prefix_gib=0.0, kv_recall_blocks=None)
    assert one(fresh, Generate(1, turn, 20, stop_tokens=()))[0] == after
    fresh.close()
    plain.loaded.prefixes.clear()
    tokens, _ = one(plain, Generate(4, PROMPT, 140, stop_tokens=(), kv_recall=whole))
    _, done = one(plain, Generate(5, (*PROMPT, *tokens, 1), 1, stop_tokens=()))
    assert done.usage.cached_tokens == 576
    plain.loaded.prefixes.clear()  # rows up to position 511 have three candidates, those behind four
    tokens, _ = one(plain, Generate(6, PROMPT, 140, stop_tokens=(), kv_recall=KVRecall(blocks=3)))
    _, done = one(plain, Generate(7, (*PROMPT, *tokens, 1), 1, stop_tokens=()))
    assert done.usage.cached_tokens == 512
    plain.loaded.prefixes.clear()


@pytest.mark.parametrize("gib", [0.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_who_is_put_back_reads_what_it_would_have(gib: float) -> None:
    asked = [Generate(i, PROMPT[i : 400 + i], 30, stop_tokens=(), same_prompt_as=None) for i in (1, 2)]
    calm = engine(prefix_gib=gib, ctx_tokens=700)
    expected = {r.id: one(calm, r) for r in asked}
    calm.loaded.prefixes.clear()
    rng, events, n = np.random.default_rng(1), list[Event](), 0
    for request in asked:
        calm.submit(request)
    while calm.busy:
        events += calm.step()
        able = [t for t in calm._running if isinstance(t, GenerateTask) and t.sequence is not None]
        if able and rng.random() < 0.4:
            calm._put_back(able[int(rng.integers(len(able)))])
            calm._releases, n = calm._releases + 1, n + 1
    assert n > 2
    for i, (tokens, done) in expected.items():
        assert [t for e in events if isinstance(e, Tokens) and e.id == i for t in e.tokens] == tokens
        assert next(e for e in events if isinstance(e, Done) and e.id == i).usage.recall == done.usage.recall
    calm.close()


def test_forks_and_memory_that_went_back() -> None:
    """Choices go on from one prompt; blocks come back with other bytes in their places, and sketches stay theirs."""
    here = engine(ctx_tokens=700, prefix_gib=1.0, idle_release_s=1000.0)
    expected, _ = one(here, Generate(1, PROMPT, 20, stop_tokens=()))
    here.loaded.parking.park()
    for _ in here.loaded.parking.unpark():
        pass
    for request in (Generate(2, PROMPT, 20, stop_tokens=()), Generate(3, PROMPT, 20, stop_tokens=(), same_prompt_as=2)):
        here.submit(request)
    found: dict[int, list[int]] = {2: [], 3: []}
    while here.busy:
        for event in here.step():
            if isinstance(event, Tokens):
                found[event.id] += event.tokens
    assert found == {2: expected, 3: expected}
    other = Generate(4, PROMPT[::-1], 20, stop_tokens=())
    here.loaded.prefixes.clear()
    after, _ = one(here, other)  # in the same blocks
    here.close()
    fresh = engine(ctx_tokens=700)
    assert one(fresh, other)[0] == after
    fresh.close()


def test_sketches_are_made_where_they_are_needed(plain: Engine) -> None:
    recalling = plain.loaded.forward.recalling
    assert recalling is not None
    made = recalling.sketches._made[0]
    one(plain, Generate(1, PROMPT, 1, stop_tokens=()))
    assert not made.any()
    one(plain, Generate(2, PROMPT, 2, stop_tokens=()))
    assert made.sum() == 450 // 64 - 3
    held = np.flatnonzero(made)
    plain.loaded.prefixes.clear()
    one(plain, Generate(3, PROMPT[:100], 3, stop_tokens=()))  # takes some of them, and reads all
    assert made.sum() < len(held)


def test_without_recall_no_memory_is_taken() -> None:
    off, on = (engine(kv_recall_blocks=n) for n in (None, 4))
    plans = [one_of.loaded.plan() for one_of in (off, on)]
    recalling, c = on.loaded.forward.recalling, on.loaded.source.config
    assert off.loaded.forward.recalling is None and recalling is not None and off.stats()["recall"] == {}
    (group,) = c.kv_groups
    n_bytes = len(group.layers) * on.loaded.kv.n_blocks * group.n_head_kv * sketch_bytes(group.head_dim)
    assert plans[1]["kv_bytes"] - plans[0]["kv_bytes"] == recalling.sketches.nbytes == n_bytes
    assert plans[1]["buffers_bytes"] - plans[0]["buffers_bytes"] == recalling.buffers_bytes > 0
    ready = on.ready()
    assert ready["kv_recall_blocks"] == 4 and any("decoded tokens read 4 blocks" in r for r in ready["reasons"])
    assert off.ready()["kv_recall_blocks"] is None
    off.close()
    on.close()


def test_refusals(plain: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for recall, said_of in (
        (KVRecall(keep=((9, 9),)), r"kv_recall.keep.*found \[9, 9\]"),
        (KVRecall(off=True, blocks=3), "nothing to choose"),
    ):
        with pytest.raises(RequestError, match=said_of):
            plain.submit(Generate(1, PROMPT, 9, kv_recall=recall))
    with pytest.raises(RequestError, match="every token reads all") as refused:
        part_of(KVRecall(blocks=3), None)
    assert "--kv-recall-blocks" in refused.value.hint
    assert part_of(None, None) is part_of(KVRecall(off=True), None) is None
    served, keep, half = Part(7, leave=5), ((1, 2),), MASS_UNITS // 2
    assert part_of(None, served) == served and part_of(KVRecall(keep=keep), served) == Part(7, keep, 5)
    assert part_of(KVRecall(blocks=0, keep=keep), served) == Part(0, keep)
    assert part_of(KVRecall(left_out=0.5), served) == Part(MAX_BLOCKS, leave=half)
    assert part_of(KVRecall(blocks=3, left_out=0.5), served) == Part(3, leave=half)
    later = Part(7, leave=5, start=9)
    assert part_of(KVRecall(blocks=3), later) == Part(3, start=9)
    assert part_of(KVRecall(start=4), later) == Part(7, leave=5, start=4)
    for way in (KVRecall(off=True, left_out=0.5), KVRecall(off=True, start=0)):
        with pytest.raises(RequestError, match="nothing to choose"):
            part_of(way, served)
    assert made_of(None, None) is None and made_of(4, 0.5) == Part(4, leave=half) and made_of(4, 1.0) == Part(0)


def test_what_is_left_of_a_context() -> None:
    assert [Part(2).left(p) for p in (0, 447, 448, 511, 512, 64 * 99)] == [0, 0, 1, 1, 2, 93]
    assert Part(0, ((64, 65), (100, 193))).left(64 * 9) == 2 and Part(0, ((5, 5), (7, 9))).left(64 * 9) == 5
    assert [Part(99, leave=7).chooses(p) for p in (100, 319, 320, 600)] == [False, False, True, True]
    assert [Part(2).chooses(p) for p in (447, 448)] == [False, True]
    assert [(Part(2, start=460).chooses(p), Part(2, start=460).left(p)) for p in (459, 460)] == [(False, 0), (True, 1)]
    tally = Tally()
    tally.add(range(100, 101), Part(2), 2 * 3, 3)
    tally.add(range(440, 449), Part(2), 8 * 7 * 3 + 8 * 3, 3)  # the last one has three candidates, and read them
    assert tally.first is None
    tally.add(range(600, 601), Part(2), 7 * 3 + 1, 3, 0.3, 0.2)
    assert tally.to_json() == pytest.approx(
        {"tokens": 11, "blocks": 2 + 64 + 10, "read": 2 + 64 + 7, "left_out_max": 0.3, "left_out_mean": 0.2 / 11}
    )
    assert tally.first == 600
    tally = Tally()
    tally.add(range(440, 450), Part(2), 60, 1)
    assert tally.first == 448


def test_a_row_of_a_long_step_reads_what_it_would_alone(plain: Engine) -> None:
    """More rows than there is scratch for at a time, as where what was drawn is fed again."""
    loaded, rows, part = plain.loaded, 45, Part(1, ((130, 131),))
    made = []
    for chunks in ((rows,), (1,) * rows):
        sequence = loaded.kv.sequence()
        for first in range(0, 448, CHUNK):
            tokens = np.asarray(PROMPT[first : first + CHUNK], np.int32)
            loaded.steps.run([Span(sequence, tokens, np.zeros(len(tokens), bool))])
        logits = []
        for n in chunks:
            tokens = np.arange(sequence.length, sequence.length + n, dtype=np.int32) % 301
            span = Span(sequence, tokens, np.zeros(n, bool), tuple(range(n)), recall=part)
            logits.append(loaded.steps.run([span]).logits.copy())
        made.append(np.concatenate(logits))
        sequence.release()
    np.testing.assert_array_equal(made[0], made[1])

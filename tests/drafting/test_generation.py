"""Generation with a DFlash drafter that proposes: the tokens are those of generation without, whatever it guesses."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from engine.drafting.dflash import DFlash, Drafter, Ring, drafter_limits
from engine.drafting.drafter import open_drafter
from engine.ground.config import EngineConfig
from engine.ground.errors import SparkError, WrongModelError
from engine.ground.sampling import Sampling
from engine.ops import cpu
from engine.ops.host import HostDevice
from engine.running.decoding import Decoder, Proposal
from engine.running.loaded import Loaded, load
from engine.running.reply import Reply
from engine.running.sampling import Drawn
from engine.running.stepping import Span, StepResult
from tests.dflash_twin import Shape, random_drafter, write_drafter
from tests.engine_runs import Says
from tests.tiny_models import tiny_path

RNG = np.random.default_rng(13)
PROMPTS = [RNG.integers(0, 301, n).astype(np.int32) for n in (70, 41)]
GREEDY, SAMPLED = Sampling(), Sampling(0.9, seed=4)
N_TOKENS, BLOCK_TOKENS = 24, 7
SHAPE = Shape(captured=(2, 0), window=50)  # less than a prompt, so that the ring goes round
MODELS = ("qwen3moe", "qwen35moe", "laguna")


class Drafted(Decoder):
    """Decodes with what a drafter proposes, and tells it the features of what stays; hints: tokens that are right."""

    def __init__(self, loaded: Loaded, drafter: Drafter, hints: dict[int, list[int]]) -> None:
        super().__init__(loaded.steps, loaded.drawer, Says(self.guess))
        self.drafter, self.hints = drafter, hints
        self.sources: dict[int, DFlash] = {}
        self.rings: dict[int, Ring] = {}
        self.n_drafts = self.n_right = 0

    def begin(self, reply: Reply) -> None:
        ring = self.drafter.ring()
        assert ring is not None
        self.rings[reply.serial], self.sources[reply.serial] = ring, DFlash(self.drafter, ring)

    def guess(self, reply: Reply) -> tuple[int, ...]:
        source = self.sources[reply.serial]
        promise = source.promise(reply.history, BLOCK_TOKENS)
        draft = None if promise is None else source.draft(promise.n_tokens)
        assert draft is not None
        self.n_drafts += 1
        hint = self.hints.get(reply.number, [])[len(reply.history) :][: int(RNG.integers(0, 4))]
        return (*hint, *draft.tokens[len(hint) :])

    def accept(self, proposals: Many[Proposal], result: StepResult) -> list[SparkError | None]:
        spans = [p.span for p in proposals]
        starts = [span.sequence.length - len(span.tokens) for span in spans]
        failures = super().accept(proposals, result)
        assert result.features is not None
        row = 0
        for proposal, span, start in zip(proposals, spans, starts, strict=True):
            stays = span.sequence.length - start
            self.sources[proposal.reply.serial].feed(result.features[:, row : row + stays], start)
            self.n_right += stays - 1 if proposal.follow else 0
            row += len(span.tokens)
        return failures


def begun(loaded: Loaded, decoder: Decoder, number: int, sampling: Sampling) -> Reply:
    prompt = PROMPTS[number]
    reply = Reply(prompt.tolist(), sampling, N_TOKENS, sequence=loaded.kv.sequence(), logprobs=2, number=number)
    if isinstance(decoder, Drafted):
        decoder.begin(reply)
    assert reply.sequence is not None
    for start in range(0, len(prompt), 32):
        part = prompt[start : start + 32]
        last = start + len(part) == len(prompt)
        chunk = Proposal(reply, Span(reply.sequence, part, np.zeros(len(part), bool), (len(part) - 1,)))
        result = decoder.run([chunk])
        if last:
            assert decoder.accept([chunk], result) == [None]
        elif isinstance(decoder, Drafted):
            assert result.features is not None
            decoder.sources[reply.serial].feed(result.features, start)
    return reply


def said(reply: Reply) -> tuple[list[int], list[Drawn], str | None]:
    return reply.history, reply.unsent, reply.reason


def ended(decoder: Decoder, replies: list[Reply]) -> int:
    for n in range(500):
        going = [reply for reply in replies if reply.reason is None]
        if not going:
            return n
        assert decoder.step(going) == [None] * len(going)
    raise AssertionError("it does not end")


@pytest.fixture(scope="module", params=[(name, pct) for name in MODELS for pct in (100, 30)], ids=str)
def loaded(request: pytest.FixtureRequest) -> Iterator[Loaded]:
    name, residency_pct = request.param
    options = EngineConfig(
        model=tiny_path(name), device="cpu", threads=2, ctx_tokens=400, chunk_tokens=64, residency_pct=residency_pct
    )
    made = load(options)
    yield made
    made.close()
    assert made.kv.free_blocks == made.kv.n_blocks


@pytest.fixture(scope="module")
def plain(loaded: Loaded) -> list[list[tuple[list[int], list[Drawn], str | None]]]:
    """What is said without a drafter, before any features are kept."""
    found = []
    for samplings in ((GREEDY, SAMPLED), (SAMPLED, GREEDY)):
        replies = [begun(loaded, loaded.decoder, i, sampling) for i, sampling in enumerate(samplings)]
        ended(loaded.decoder, replies)
        found.append([said(reply) for reply in replies])
        for reply in replies:
            assert reply.sequence is not None
            reply.sequence.release()
    return found


@pytest.mark.parametrize("helped", [False, True], ids=["alone", "helped"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_drafter_changes_no_token(loaded: Loaded, plain: list, tmp_path: Path, helped: bool, which: int) -> None:
    config, forward = loaded.forward.config, loaded.forward
    shape = replace(SHAPE, n_embd=config.n_embd, n_vocab=config.n_vocab)
    write_drafter(tmp_path / "d.gguf", shape, random_drafter(shape, np.random.default_rng(3)))
    own, weights = open_drafter(tmp_path / "d.gguf", config)
    if forward.buffers.features is None:
        forward.capture_features(own.captured)
    ws = cpu.workspace(drafter_limits(own, config.n_vocab, 400), 2)
    drafter = Drafter(
        HostDevice(), cpu, ws, own, weights, forward.weights.token_embd, forward.weights.output, 400, n_rings=3
    )
    samplings = ((GREEDY, SAMPLED), (SAMPLED, GREEDY))[which]
    expected = plain[which]
    decoder = Drafted(loaded, drafter, {i: said[0] for i, said in enumerate(expected)} if helped else {})
    replies = [begun(loaded, decoder, i, sampling) for i, sampling in enumerate(samplings)]
    n_steps = ended(decoder, replies)
    assert [said(reply) for reply in replies] == expected
    assert decoder.n_drafts >= n_steps and (not helped or (decoder.n_right > 8 and n_steps < N_TOKENS - 1))
    for reply in replies:  # what it knows at the end is what it would know of the whole, fed at once
        assert reply.sequence is not None
        fresh, sequence = drafter.ring(), loaded.kv.sequence()
        assert fresh is not None
        tokens = np.array(reply.history[: reply.sequence.length], np.int32)
        for start in range(0, len(tokens), 60):
            part = tokens[start : start + 60]
            result = loaded.steps.run([Span(sequence, part, np.zeros(len(part), bool))])
            assert result.features is not None
            drafter.feed(fresh, result.features, start)
        decoder.sources[reply.serial].draft(1)  # what waits is fed
        ring = decoder.rings[reply.serial]
        assert ring.end == fresh.end
        at_once = drafter.logits(fresh, reply.history[-1], 6).copy()
        assert np.array_equal(drafter.logits(ring, reply.history[-1], 6), at_once)
        drafter.give_back(fresh)
        sequence.release()
        reply.sequence.release()
    ws.close()


def test_a_drafter_of_another_model_is_refused(tmp_path: Path) -> None:
    write_drafter(tmp_path / "d.gguf", SHAPE, random_drafter(SHAPE, RNG))
    for changes, words in (
        ({"n_embd": 2048}, "width 256, the model has width 2048"),
        ({"n_vocab": 300}, "301 tokens, the model has 300 tokens"),
        ({"n_layer": 2}, "layer 2, the model has layers 0 to 1"),
    ):
        model = SimpleNamespace(**({"n_layer": 4, "n_embd": 256, "n_vocab": 301} | changes))
        with pytest.raises(WrongModelError, match=words):
            open_drafter(tmp_path / "d.gguf", model)

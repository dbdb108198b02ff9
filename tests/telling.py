"""A decoder that tells a model's own block what became of every step, and replies that it decodes."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

import numpy as np

from engine.drafting.source import Source
from engine.ground.errors import SparkError
from engine.ground.sampling import Sampling
from engine.running.decoding import Decoder, Proposal
from engine.running.loaded import Loaded
from engine.running.mtp import ByBlock, Fed
from engine.running.reply import Reply
from engine.running.stepping import Span, StepResult
from tests.engine_runs import Says

CHUNK = 40


class Telling(Decoder):
    """A decoder that tells the block what became of every step.

    right: what replies will say: drafts begin with so much of it as a random number tells.
    """

    def __init__(self, loaded: Loaded, most: int, right: Many[list[int]] = ()) -> None:
        super().__init__(loaded.steps, loaded.drawer, Says(self._draft))
        assert loaded.predictor is not None
        self.predictor, self.most, self.sources = loaded.predictor, most, dict[Reply, Source]()
        self.right, self.rng, self.n_right = right, np.random.default_rng(2), 0

    def _draft(self, reply: Reply) -> tuple[int, ...]:
        source = self.sources.setdefault(reply, ByBlock(self.predictor, reply))
        promise = source.promise(reply.history, min(self.most, reply.left - 1))
        draft = None if promise is None else source.draft(promise.n_tokens)
        if draft is not None and draft.drawn is not None:
            self.steps.forward.device.synchronize()
            draft = draft.known()
        if draft is None:
            return ()
        follow = [h[len(reply.history) :] for h in self.right if h[: len(reply.history)] == reply.history]
        n = int(self.rng.integers(0, len(draft.tokens) + 1)) if follow else 0
        return (*(follow[0][:n] if follow else ()), *draft.tokens[n:])

    def accept(self, proposals: Many[Proposal], result: StepResult) -> list[SparkError | None]:
        sequences = [p.reply.sequence for p in proposals]
        before = [s.length for s in sequences if s is not None]
        failures = super().accept(proposals, result)
        fed = []
        for p, n in zip(proposals, before, strict=True):
            assert p.reply.sequence is not None
            stay = len(p.span.tokens) - (n - p.reply.sequence.length)
            fed.append(Fed(p.span, stay, p.reply.history))
            self.n_right += stay - 1 if p.follow else 0
        self.predictor.follow(fed)
        return failures


def said(
    loaded: Loaded, decoder: Decoder, prompts: Many[np.ndarray], sampling: Many[Sampling], limit: int,
    told: Callable[[Reply], None] = lambda reply: None,
) -> list[list[int]]:  # fmt: skip
    """What replies say that decode together; told: is called at the end of each that was told of."""
    replies = []
    for number, (prompt, one) in enumerate(zip(prompts, sampling, strict=True)):
        sequence = loaded.kv.sequence()
        reply = Reply(prompt.tolist(), one, limit, sequence=sequence, number=number)
        for start in range(0, len(prompt), CHUNK):
            part = prompt[start : start + CHUNK]
            chunk = Proposal(reply, Span(sequence, part, np.zeros(len(part), bool), (len(part) - 1,)))
            result = decoder.run([chunk])
            if isinstance(decoder, Telling) and sequence.length < len(prompt):
                decoder.predictor.follow([Fed(chunk.span, len(part), reply.history)])
        assert decoder.accept([chunk], result) == [None]
        replies.append(reply)
    while going := [reply for reply in replies if reply.reason is None]:
        assert decoder.step(going) == [None] * len(going)
    for reply in replies:
        assert reply.sequence is not None
        if isinstance(decoder, Telling):
            told(reply)
            decoder.sources[reply].close()
        reply.sequence.release()
    return [reply.history for reply in replies]

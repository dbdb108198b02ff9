"""Drafts that steps get whether they pay or not, of any length, right up to any place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from engine.drafting.gate import Offer
from engine.drafting.source import Draft, Promise
from engine.running.drafts import Drafts
from engine.serving.scheduler import Engine


class SomeRight:
    """A source that is right up to some place, and never beyond."""

    def __init__(self, expected: Sequence[int], rng: np.random.Generator) -> None:
        self.expected, self.rng, self.closed = expected, rng, False

    def promise(self, history: Sequence[int], most: int, least: float = 0.0) -> Promise | None:
        assert list(history) == list(self.expected[: len(history)]) and most > 0
        n = int(self.rng.integers(0, most + 1))
        follow = [*self.expected[len(history) :], *[0] * most][:n]
        wrong = int(self.rng.integers(0, n + 1))
        self.tokens = follow[:wrong] + [(token + 1) % 301 for token in follow[wrong:]]
        return Promise("lookup", 0, n) if n else None

    def draft(self, n_tokens: int, sure: bool = False) -> Draft:
        return Draft("lookup", 0, tuple(self.tokens[:n_tokens]))

    def close(self) -> None:
        self.closed = True


class Forced(Drafts):
    """Gives steps what sources propose, and not what pays."""

    expected: dict[int, list[int]]  # histories to the end, by request
    seed = 0

    def begin(self, reply, prediction=()) -> None:
        super().begin(reply, prediction)
        if reply.drafting is not None:
            self.rng = np.random.default_rng([self.seed, reply.id])
            reply.drafting.source = SomeRight(self.expected[reply.id], self.rng)
        self._gate.share = self.share  # type: ignore[method-assign]
        self._gate.decided = lambda promise, record: None  # type: ignore[method-assign]

    def share(self, offers: Sequence[Offer | None], fits: Callable[[int], bool], most: int) -> list[int]:
        counts = [0 if offer is None else offer[0].n_tokens for offer in offers]
        while sum(counts) > most or not fits(len(counts) + sum(counts)):
            counts[int(np.argmax(counts))] -= 1
        return counts


def force(engine: Engine, expected: dict[int, list[int]], seed: int = 0) -> None:
    drafts = Forced(engine.loaded.steps, 1 << 20)
    drafts.expected, drafts.seed = expected, seed
    object.__setattr__(engine.loaded, "drafts", drafts)
    engine.loaded.decoder.proposer = drafts

"""Drafts that a device makes and nobody waits for: the step that verifies one is enqueued behind it.

What makes a draft is captured, and ends with draws that leave the tokens where the verifying step reads them. The host
has them when it has what the model drew. So it learns what a draft takes from those few that it does wait for.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Any, overload

import numpy as np

from engine.drafting.dflash import FEED_TOKENS, NAME, Drafter, Ring
from engine.drafting.source import Draft
from engine.ground.sampling import Sampling
from engine.ops import SMALL_TOKENS
from engine.ops.cuda.device import Device
from engine.ops.cuda.sampling import FAILED, Sampler
from engine.running.stepping import Graphs

GREEDY = Sampling(temperature=0.0)
TIMED, TIME_EVERY = 3, 64  # drafts of a kind, of which the first and one in so many are waited for
KEPT_TIMES = 3
FEED_WIDTHS = (2, 8, 32)  # features of captured steps, the next larger one of which takes them
DRAFT_WIDTHS = (1, 2, 4, 8)  # tokens that a captured draft has, or those of the whole block


class UnderWay(Many[int]):
    """The tokens that a sampler draws first, when the device has been waited for: -1 from one on that it could not."""

    def __init__(self, sampler: Sampler, n: int) -> None:
        self._sampler, self._n, self._epoch = sampler, n, sampler.epoch
        self._known: list[int] = []

    def __len__(self) -> int:
        return self._n

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Many[int]: ...
    def __getitem__(self, index: int | slice) -> int | Many[int]:
        if isinstance(index, slice) and range(self._n)[index] == range(self._n):
            return self  # whoever looks on from the first does not look yet
        if not self._known:
            assert self._sampler.epoch == self._epoch, "the next draft was begun"
            for i in range(self._n):
                drawn = self._sampler.drawn(i + 1)
                if drawn is None or drawn.status == FAILED:  # nothing is drawn behind logits that are not finite
                    break
                self._known.append(drawn.token)
            self._known += [-1] * (self._n - len(self._known))
        return self._known[index]


class Timed:
    """Launches of several kinds, some of which are waited for."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self._n = Counter[Hashable]()
        self._seconds: dict[Hashable, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT_TIMES))

    def launch(self, kind: Hashable, launch: Callable[[], None]) -> tuple[float, bool]:
        """What one of the kind takes, in seconds, and whether this one was waited for."""
        nth, timings = self._n[kind], self._seconds[kind]
        self._n[kind] += 1
        is_timed = nth < TIMED or nth % TIME_EVERY == 0
        if is_timed:
            self._synchronize()
            began_s = time.perf_counter()
        launch()
        if is_timed:
            self._synchronize()
            timings.append(time.perf_counter() - began_s)
        return min(timings), is_timed  # the least: one that was disturbed counts for all that are not timed


def known_draft(source: str, sampler: Sampler, n: int, launch: Callable[[], None]) -> Draft | None:
    """A draft that is waited for: the first n tokens that a sampler draws, and how likely it found each."""
    launch()
    sampler.device.synchronize()
    draft = Draft(source, 0, UnderWay(sampler, n)).known()
    if draft is None:
        return None
    found = [sampler.likelihood(i + 1) for i in range(len(draft.tokens))]
    return replace(draft, sure=tuple(0.0 if one is None else math.exp(one.logprob) for one in found))


class CapturedDrafter(Drafter):
    """A DFlash drafter on a GPU. Its workspace and what it captures are its own; `gpu` is the device of all of it."""

    def __init__(self, gpu: Device, *arguments: Any, **named: Any) -> None:
        super().__init__(gpu, *arguments, **named)
        n_rows, B = self._output.shape[0], self.config.block_tokens
        self._graphs, self._timed = Graphs(gpu), Timed(gpu.synchronize)
        # Draws begin at whole vectors of logits; and a long block's attention is cut by where it ends.
        self._is_captured = n_rows % 4 == 0 and B <= SMALL_TOKENS
        self._widths = [*(n for n in DRAFT_WIDTHS if n < B - 1), B - 1]
        self._sampler = Sampler(gpu, replace(self._ws.limits, n_vocab=n_rows), described=B)
        self._drawn = gpu.upload(np.zeros(B - 1, np.int32))  # what is not drawn is a token all the same
        self._unused = gpu.empty(1, np.int32), gpu.empty((1, 1), np.int32)  # what else a draw writes for a next step

    def feed_waiting(self, ring: Ring, n: int, position: int) -> None:
        """As of `Drafter`."""
        width = next((width for width in FEED_WIDTHS if width >= n), 0)
        if not width:
            super().feed_waiting(ring, n, position)
            return
        self._goes_on(ring, position, n)
        self._place(ring, position, n, width)
        waiting = ring.waiting[:, :width]
        self._graphs.get(("feed", ring.number, width), lambda: self._keep(waiting)).launch()
        self._written(ring, position + n)

    def drafted(self, ring: Ring, token: int, most: int, sure: bool = False) -> Draft | None:
        """As of `Drafter`; the tokens may be under way, until the next are asked for, unless `sure` is wanted."""
        n = self._room(ring, most)
        if not n or not self._is_captured or not self._sees_all(ring):
            return super().drafted(ring, token, most)
        width = next(width for width in self._widths if width >= n)
        self._begin(ring, token)
        # Its limit is not met: all draws are made.
        self._sampler.prepare(GREEDY, (), 0, (), width + 1, logprobs=0 if sure else None)
        graph = self._graphs.get(("draft", width, sure), lambda: self._draw(width, sure))
        self._written(ring, ring.end + self.config.block_tokens)
        if sure:
            made = known_draft(NAME, self._sampler, n, graph.launch)
            return None if made is None else replace(made, tokens=self._of_target(made.tokens))
        seconds, is_known = self._timed.launch(width, graph.launch)
        draft = Draft(NAME, 0, UnderWay(self._sampler, n), self._drawn[:n], seconds)
        if self._weights.d2t is None and not is_known:
            return draft
        if not is_known:  # its ids are not the target's, and the host knows those
            self._device.synchronize()
        known = draft.known()
        return None if known is None else replace(known, tokens=self._of_target(known.tokens))

    def _draw(self, width: int, sure: bool) -> None:
        """What is captured: a block, and a draw from each of the first rows of its head; sure: and its likelihood."""
        logits = self._block(width, self.config.reach, 0)
        (position, slots), table = self._unused, self._table[None]
        for i in range(width):
            self._sampler.step(logits[i : i + 1], self._drawn[i : i + 1], position, slots, table, greedy=True)
            if sure:
                self._sampler.describe(logits[i : i + 1])

    def rehearse(self) -> None:
        """As of `Drafter`, and of every width that is captured; some of all rings."""
        super().rehearse()
        rings = []
        while (ring := self.ring()) is not None:
            rings.append(ring)
            for n in FEED_WIDTHS:
                self.feed_waiting(ring, min(n, FEED_TOKENS), 0)
            for n in self._widths if ring.number == rings[0].number else ():
                self.drafted(ring, 0, n)
                self.drafted(ring, 0, n, sure=True)
        for ring in rings:
            self.give_back(ring)

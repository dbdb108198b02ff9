"""Decoding of replies that share steps, ahead of the host: for a while all that they feed is drawn on the device."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

import numpy as np

from engine.ground.errors import CapacityError, SparkError
from engine.memory.blocks import Sequence
from engine.ops.cuda.device import Graph
from engine.ops.cuda.sampling import Sampler
from engine.running.ahead import AHEAD_STEPS, POLL_S
from engine.running.drawing import CHECK_S, DeviceDrawer
from engine.running.recall import Ahead
from engine.running.reply import Reply, not_finite
from engine.running.sampling import Drawn, counts_reply
from engine.running.stepping import Span, Steps


def can_share(steps: Steps, replies: Many[Reply]) -> bool:
    """Whether replies can decode together ahead of the host: several, in one captured step, and nobody under a form."""
    plain = all(reply.grammar is None for reply in replies)
    return len(replies) > 1 and plain and steps.shared_width(len(replies)) is not None


@dataclass(slots=True)
class _Row:
    """One reply: start: tokens before the first draw; limit: that may be drawn; accepted: tokens read."""

    reply: Reply
    sequence: Sequence
    sampler: Sampler
    start: int
    limit: int
    accepted: int = 0
    ended: bool = False
    failure: SparkError | None = None


class Together:
    """Replies that decode in steps that they share; each step feeds what the one before it drew (cuda/step.cuh).

    A reply that ends is fed no more, and stores nothing in what is still enqueued. The first end pauses all: whoever
    is left goes on in other steps. pause: asked when tokens have come, whether they are to go on otherwise.
    """

    def __init__(
        self, steps: Steps, drawer: DeviceDrawer, replies: Many[Reply], pause: Callable[[], bool] = lambda: False
    ) -> None:
        self._steps, self._forward, self._device = steps, steps.forward, steps.forward.device
        width = steps.shared_width(len(replies))
        assert width is not None and can_share(steps, replies)
        self._width, self._drawer = width, drawer
        self._samplers = [drawer.lend(i) for i in range(width)]
        self._greedy = all(reply.params.temperature <= 0 for reply in replies)
        self._drawn, self._pausing, self._pause = 0, False, pause
        self._moves = -1  # of the cache when its tables were told to the device
        self._reading: Ahead | None = None  # where replies may read a part
        self._rows: list[_Row] = []
        for reply, sampler in zip(replies, self._samplers, strict=False):
            assert reply.sequence is not None
            self._rows.append(_Row(reply, reply.sequence, sampler, len(reply.history), reply.left))

    def run(self, until: float) -> list[SparkError | None]:
        """Decode until that time (of time.perf_counter) or the first end; each reply's failure.

        Afterwards nothing is under way, and the last token of each reply that goes on is drawn and not fed.
        """
        self._begin()
        heard_s = time.monotonic()
        while any(not row.ended and row.accepted < self._drawn for row in self._rows) or not self._pausing:
            self._pausing |= time.perf_counter() >= until
            self._enqueue()
            if self._accept():
                heard_s = time.monotonic()
                self._pausing = self._pausing or self._pause()
            elif time.monotonic() - heard_s > CHECK_S:
                self._device.synchronize()  # says whether the device failed
                heard_s = time.monotonic()
            else:
                time.sleep(POLL_S)
        return [row.failure for row in self._rows]

    @property
    def n_steps(self) -> int:
        """Steps that there were."""
        return self._drawn

    def _begin(self) -> None:
        """Feed the last tokens, whose step leaves all inputs where the captured one reads them, and draw the first."""
        f, spans = self._forward, list[Span]()
        for row in self._rows:
            last = np.asarray(row.reply.history[-1:], np.int32)
            spans.append(Span(row.sequence, last, np.ones(1, bool), (0,), recall=row.reply.recall))
        self._steps.run(spans)
        if f.recalling is not None:
            f.recalling.fared([(span, 1, row.reply.recalled) for span, row in zip(spans, self._rows, strict=True)])
            reads = [(row.reply.recall, row.sequence, row.reply.recalled, row.start) for row in self._rows]
            self._reading = Ahead(f.recalling, reads, self._width, f.ops, f.ws)
        self._pausing = not self._reserved()
        for row in self._rows:
            reply = row.reply
            row.sampler.prepare(
                reply.params, reply.history, row.start, reply.stop, row.limit, logprobs=reply.logprobs
            )  # fmt: skip
            if counts_reply(reply.params):
                row.sampler.count(reply.history[reply.reply_from :])
        for sampler in self._samplers[len(self._rows) :]:
            self._device.write(sampler.active, np.zeros(1, np.int32))
        self._captured(False)
        self._draw()
        self._describe()
        self._drawn = 1

    def _captured(self, recalls: bool) -> Graph:
        """A step of the tokens that were drawn, and the draws of the next. recalls: rows may read a part of theirs."""

        def work() -> None:
            step = replace(self._steps.captured_inputs(self._width, recalls), apart=True, decoded=True)
            self._forward.run(step, self._steps.residency)
            if recalls:
                self._drawer.count_left_out(self._width)
            self._draw()

        with self._steps.handing(self._width) as hands:
            return self._steps.captured(("together", self._width, self._greedy, recalls, hands), work)

    def _draw(self) -> None:
        f, i = self._forward, self._forward.inputs
        step = self._drawer.states.step
        at_once = self._width if f.limits.n_vocab % 4 == 0 else 1  # rows of logits at whole vectors
        for row in range(0, self._width, at_once):
            own = slice(row, row + at_once)
            logits = f.buffers.logits[own] if at_once > 1 else self._drawer.aligned(row)
            step(own, logits, i.tokens, i.positions, f.slots, f.block_tables, self._greedy, row, i.counted)

    def _describe(self) -> None:
        for i, row in enumerate(self._rows):
            if row.reply.logprobs is not None:
                row.sampler.describe(self._drawer.aligned(i))

    def _enqueue(self) -> None:
        """The steps that are due."""
        behind = min((row.accepted for row in self._rows if not row.ended), default=self._drawn)
        while not self._pausing and self._drawn <= behind + AHEAD_STEPS:
            if not self._reserved():
                self._pausing = True
                return
            recalls = self._reading is not None and self._reading.next(self._drawn - 1)
            graph = self._captured(recalls)
            if self._reading is not None and recalls:
                self._reading.captured()
            self._steps.begin(self._width)
            graph.launch()
            self._describe()
            self._drawn += 1
            self._pausing |= all(self._drawn >= row.limit for row in self._rows)

    def _reserved(self) -> bool:
        """A block for the next token of each, told to the device when it is new; whether there are any: else a pause.

        Room is made between steps, by those who know what can be given up.
        """
        n_ctx, new = self._forward.limits.n_ctx, list[int]()
        for i, row in enumerate(self._rows):
            sequence, end = row.sequence, min(row.start + self._drawn + 1, n_ctx)
            if not row.ended and sequence.reserved_tokens < end:
                try:
                    sequence.reserve(end - sequence.length)
                except CapacityError:
                    return False
                new.append(i)
        self._moves = self._forward.tell_tables([row.sequence for row in self._rows], new, self._moves)
        return True

    def _accept(self) -> bool:
        """Take the tokens that are there; whether there were any, or an end."""
        heard = False
        for i, row in enumerate(self._rows):
            if row.ended:
                continue
            reply, news = row.reply, row.sampler.poll(row.accepted)
            if news.tokens:
                self._steps.check()
                row.accepted += len(news.tokens)
                reply.history.extend(news.tokens)
                reply.unsent += map(Drawn, news.tokens, news.likelihoods or itertools.repeat(None))
                row.sequence.length = row.start + row.accepted - 1
            if news.error:
                row.failure = not_finite()
            elif news.stopped:
                row.sequence.length = row.start + row.accepted  # all were fed, and the stop token was not
                reply.reason = "stop"
            elif row.accepted == row.limit:
                reply.reason = "length"
            if self._reading is not None:
                self._reading.fed(i, row.accepted - (0 if news.stopped else 1))
            row.ended = row.failure is not None or reply.reason is not None
            self._pausing |= row.ended
            heard |= row.ended or bool(news.tokens)
        return heard

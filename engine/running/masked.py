"""Decoding of replies some of which a form binds, on a device: the host waits for a token, and the device for nobody.

The device feeds each token that it drew, so the step behind a draw is enqueued before the host has read what was drawn.
While that step runs, the host tells the forms their tokens and gets their masks, which lie in the samplers before the
step's draw is enqueued. Whose mask is late keeps its row of logits and draws when it comes, without the others.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np

from engine.ground.errors import CapacityError, DeviceLostError, SparkError
from engine.memory.blocks import Sequence
from engine.ops.cuda.sampling import Sampler
from engine.running.ahead import POLL_S
from engine.running.drawing import CHECK_S, DeviceDrawer
from engine.running.reply import Reply, mask_wait_s, not_finite
from engine.running.sampling import Drawn, counts_reply
from engine.running.stepping import Span, StepResult, Steps

_FIRST_S = 0.004  # what the first step is taken for


def can_mask(steps: Steps, replies: Many[Reply]) -> bool:
    """Whether replies can decode so: a form binds one of them, all share one captured step, and read all."""
    formed = any(reply.grammar is not None for reply in replies) and all(reply.recall is None for reply in replies)
    return formed and steps.shared_width(len(replies)) is not None


@dataclass(slots=True)
class _Row:
    """One reply: start: tokens before the first draw; accepted: tokens read; ended: it draws no more in these steps."""

    reply: Reply
    sequence: Sequence
    sampler: Sampler
    start: int
    accepted: int = 0
    ended: bool = False
    failure: SparkError | None = None


class Masked:
    """Replies that decode in steps that they share, each draw from what the forms allow.

    A step runs behind every draw but the last. So one whose form is complete has been fed its last token, too.
    """

    def __init__(self, steps: Steps, drawer: DeviceDrawer, replies: Many[Reply]) -> None:
        self._steps, self._forward, self._device = steps, steps.forward, steps.forward.device
        width = steps.shared_width(len(replies))
        assert width is not None and can_mask(steps, replies)
        self._width, self._drawer = width, drawer
        self._greedy = all(reply.params.temperature <= 0 for reply in replies)
        self._drawn = 0
        self._moves = -1  # of the cache when its tables were told to the device
        self._step_s = _FIRST_S  # what a step took last, from one token to the next
        self._rows: list[_Row] = []
        for i, reply in enumerate(replies):
            assert reply.sequence is not None
            self._rows.append(_Row(reply, reply.sequence, drawer.lend(i), len(reply.history)))

    def run(self, until: float) -> list[SparkError | None]:
        """As `Together.run`; also ends where a mask is late, whose reply is `held` then."""
        self._begin()
        is_room, heard_s = self._reserved(), time.monotonic()
        late_s = mask_wait_s(row.reply for row in self._rows)
        while True:
            # A mask that comes while the step runs costs nothing.
            self._draw(heard_s + self._step_s + late_s)
            going = [row for row in self._rows if not row.ended]
            over = len(going) < len(self._rows) or time.perf_counter() >= until
            over = over or all(row.reply.left <= 1 for row in going) or not is_room or not self._reserved()
            if not over:
                self._steps.launch(self._width, apart=self._width > 1)
            self._wait(going)
            now = time.monotonic()
            self._step_s, heard_s = now - heard_s, now
            self._accept(going, fed=not over)
            if over:
                return [row.failure for row in self._rows]

    def _begin(self) -> None:
        """Feed the last tokens, whose step leaves all inputs where the captured one reads them."""
        spans = [
            Span(row.sequence, np.asarray(row.reply.history[-1:], np.int32), np.ones(1, bool), (0,))
            for row in self._rows
        ]
        self._steps.run(spans)
        nothing = np.zeros(-(-self._forward.limits.n_vocab // 32), np.uint32)
        for row in self._rows:
            reply = row.reply
            mask = None if reply.grammar is None else nothing  # the first comes before the first draw
            row.sampler.prepare(
                reply.params, reply.history, row.start, reply.stop, reply.left, mask, logprobs=reply.logprobs
            )  # fmt: skip
            if counts_reply(reply.params):
                row.sampler.count(reply.history[reply.reply_from :])

    def _draw(self, until_s: float) -> None:
        """Enqueue the draws of those that were fed and go on; whose mask has not come until then is held."""
        f, i = self._forward, self._forward.inputs
        # Those without a form first: the device can draw them meanwhile.
        for number, row in sorted(enumerate(self._rows), key=lambda item: item[1].reply.grammar is not None):
            if row.ended or not self._may_draw(row, number, until_s):
                continue
            logits = self._drawer.aligned(number)
            row.sampler.step(
                logits, i.tokens, i.positions, f.slots, f.block_tables, self._greedy, row=number, counted=i.counted
            )  # fmt: skip
            if row.reply.logprobs is not None:
                row.sampler.describe(logits)
        self._drawn += 1

    def _may_draw(self, row: _Row, number: int, until_s: float) -> bool:
        """Whether there is something to draw from, which the device is told."""
        reply = row.reply
        if reply.grammar is None:
            return True
        try:
            rows = StepResult(
                self._device, self._forward.buffers.first(self._width, self._width), check=self._steps.check
            )  # fmt: skip
            drawing = reply.drawing(lambda: rows.logits, number, until_s)
        except DeviceLostError:
            raise
        except SparkError as error:
            row.failure, row.ended = error, True
            return False
        if drawing is None:
            row.ended = True
            return False
        assert drawing.allowed is not None
        row.sampler.allow(drawing.allowed)
        return True

    def _reserved(self) -> bool:
        """A block for what the next draw gives, of each, told to the device; whether there are any."""
        n_ctx, new = self._forward.limits.n_ctx, list[int]()
        for i, row in enumerate(self._rows):
            sequence, end = row.sequence, min(row.start + self._drawn + 1, n_ctx)
            if sequence.reserved_tokens < end:
                try:
                    sequence.reserve(end - sequence.length)
                except CapacityError:
                    return False
                new.append(i)
        self._moves = self._forward.tell_tables([row.sequence for row in self._rows], new, self._moves)
        return True

    def _wait(self, rows: Many[_Row]) -> None:
        """Wait until what was drawn last can be read, of each."""
        heard_s = time.monotonic()
        for row in rows:
            while not row.sampler.is_there(self._drawn):
                if time.monotonic() - heard_s > CHECK_S:
                    self._device.synchronize()  # says whether the device failed
                    heard_s = time.monotonic()
                time.sleep(POLL_S)

    def _accept(self, rows: Many[_Row], fed: bool) -> None:
        """Take the tokens; fed: the next step has begun, and has them unless the device ended their reply."""
        self._steps.check()
        for row in rows:
            reply, news = row.reply, row.sampler.poll(row.accepted)
            try:
                for drawn in map(Drawn, news.tokens, news.likelihoods or itertools.repeat(None)):
                    row.accepted += 1
                    reply.take(drawn)
            except DeviceLostError:
                raise
            except SparkError as error:  # of its form
                row.failure = error
            row.sequence.length = row.start + row.accepted - 1
            if news.error:
                row.failure = not_finite()
            elif news.stopped:
                row.sequence.length += 1  # all were fed, and the stop token was not
                reply.reason = "stop"
            elif fed and reply.left:
                row.sequence.length += 1
            # What is at its limit under a form has the reason that `Reply.settled` finds.
            row.ended = row.failure is not None or reply.reason is not None or not reply.left

"""Decoding ahead of the host: a token is one graph launch, and the host reads behind what it has enqueued."""

from __future__ import annotations

import itertools
import time

import numpy as np

from engine.models.layers import Step
from engine.ops import I32
from engine.ops.cuda.device import Graph
from engine.ops.cuda.sampling import Sampler
from engine.ops.cuda.workspace import Workspace
from engine.ops.device import Array
from engine.running.drawing import CHECK_S, DeviceDrawer
from engine.running.recall import Ahead
from engine.running.reply import Reply, not_finite
from engine.running.sampling import Drawn, counts_reply
from engine.running.stepping import Span, StepResult, Steps

AHEAD_STEPS = 3  # enqueued beyond what was read: the device never waits for the host
NEAR_STEPS = 1  # the same where it is likely to be stopped soon: it waits where the host takes longer than a step
POLL_S = 0.0001


class AheadOfHost:
    """A reply that decodes alone on a device, which feeds each token that it draws to the next step (cuda/step.cuh).

    After a stop token, the limit or an error the device clears its own active flag, so whatever is still enqueued moves
    no state. result: of the step that fed the last token, where it was run already; its first wanted logits follow.
    most: steps that are enqueued beyond what was read, which may be changed.
    """

    def __init__(self, steps: Steps, drawer: DeviceDrawer, reply: Reply, result: StepResult | None = None) -> None:
        self.ended, self.most = False, AHEAD_STEPS
        self._steps, self._drawer, self._reply, self._result = steps, drawer, reply, result
        self._forward, self._device = steps.forward, steps.forward.device
        assert reply.sequence is not None and reply.grammar is None
        self._sequence, self._start, self._limit = reply.sequence, len(reply.history), reply.left
        self._drawn = self._accepted = 0  # draws that are enqueued, tokens read
        self._moves = -1  # of the cache when its tables were told to the device
        self._pausing = False
        self._reading: Ahead | None = None  # where it may read a part
        self._sampler: Sampler
        self._logits: Array  # a row, where the captured step leaves its own

    def advance(self) -> None:
        """As `Alone.advance`: keeps `most` steps enqueued beyond what was read."""
        if self._drawn == 0 and not self.ended and not self._pausing:
            self._begin()
        heard_s = time.monotonic()
        while not self.ended:
            if not self._pausing:
                self._run()
            if self._accept():
                return
            if time.monotonic() - heard_s > CHECK_S:
                self._device.synchronize()
                heard_s = time.monotonic()
            if not self.ended:
                # What is about to follow a pause waits for this.
                time.sleep(0 if self._pausing else POLL_S)

    @property
    def under_way(self) -> int:
        """Tokens that will come though nothing more is enqueued."""
        return self._drawn - self._accepted

    def pause(self) -> None:
        """As `Alone.pause`."""
        self._pausing = True
        self.ended |= self._drawn == 0

    def _begin(self) -> None:
        """Feed the last token, if that is still to be done, and enqueue the first draw."""
        f, reply = self._forward, self._reply
        assert self._steps.graphs is not None
        if self._result is None:
            last = np.asarray(reply.history[-1:], np.int32)
            span = Span(self._sequence, last, np.ones(1, bool), (0,), recall=reply.recall)
            self._result = self._steps.run([span])
            if f.recalling is not None:
                f.recalling.fared([(span, 1, reply.recalled)])
        self._sampler, self._greedy = self._drawer.lend(), reply.params.temperature <= 0
        self._captured(False)
        if f.recalling is not None and reply.recall is not None:
            reads = [(reply.recall, self._sequence, reply.recalled, self._start)]
            self._reading = Ahead(f.recalling, reads, 1, f.ops, f.ws)
        self._reserve(self._start + 1)
        zero = np.zeros(1, np.int32)
        f.feed(
            Step(
                tokens=zero, positions=np.full(1, self._start - 1, np.int32), sequence=zero,
                slots=tuple(np.full(1, -1, np.int32) for _ in f.kv.groups), block_table=self._tables(),
                states=np.array([self._sequence.next_states(keep=False)], np.int32), counted=np.ones(1, np.uint8),
                rows=zero,
            )
        )  # fmt: skip
        self._moves = f.kv.moves
        self._sampler.prepare(
            reply.params, reply.history, self._start, reply.stop, self._limit, logprobs=reply.logprobs
        )  # fmt: skip
        if counts_reply(reply.params):
            self._sampler.count(reply.history[reply.reply_from :])
        self._logits = self._first_row(self._result.at(0))
        self._draw(self._steps.captured_inputs(1), self._logits)
        self._describe()
        self._drawn = 1

    def _captured(self, recalls: bool, tries: bool = False) -> Graph:
        """A step of the token that was drawn, and the draw of the next. recalls: it may read a part of its context.

        tries: as of `Steps.beside`.
        """
        steps, f, ws = self._steps, self._forward, self._forward.ws
        assert steps.graphs is not None and isinstance(ws, Workspace)

        def work() -> None:
            step = steps.captured_inputs(1, recalls)
            ws.active_step = self._sampler.active
            try:
                logits = f.run(step, steps.residency).logits
            finally:
                ws.active_step = None
            if recalls:
                self._drawer.count_left_out(1)
            self._draw(step, logits)

        return steps.graphs.get(("ahead", self._greedy, recalls, *steps.beside(tries)), work)

    def _draw(self, step: Step, logits: Array) -> None:
        f = self._forward
        self._sampler.step(logits, step.tokens, step.positions, f.slots, f.block_tables, self._greedy)

    def _describe(self) -> None:
        if self._reply.logprobs is not None:  # behind the graph, so that there are not as many graphs again
            self._sampler.describe(self._logits)

    def _run(self) -> None:
        """Enqueue the steps that are due, each on the token that the one before it draws."""
        while self._drawn < min(self._limit, self._accepted + 1 + self.most):
            self._reserve(self._start + self._drawn + 1)
            recalls = self._reading is not None and self._reading.next(self._drawn - 1)
            graph = self._captured(recalls, tries=True)
            if self._reading is not None and recalls:
                self._reading.captured()
            self._steps.begin(1)
            graph.launch()
            self._steps.look()
            self._describe()
            self._drawn += 1

    def _accept(self) -> bool:
        """Take the tokens that are there; whether there were any, or it has ended."""
        reply, news = self._reply, self._sampler.poll(self._accepted)
        if news.tokens:
            self._steps.check()
            self._accepted += len(news.tokens)
            reply.history.extend(news.tokens)
            reply.unsent += map(Drawn, news.tokens, news.likelihoods or itertools.repeat(None))
            self._sequence.length = self._start + self._accepted - 1
        if news.error:
            raise not_finite()
        if news.stopped:
            self._sequence.length = self._start + self._accepted  # all were fed, and the stop token was not
            reply.reason = "stop"
        elif self._accepted == self._limit:
            reply.reason = "length"
        self.ended = reply.reason is not None or (self._pausing and self._accepted == self._drawn)
        if self._reading is not None:
            self._reading.fed(0, self._accepted - (0 if news.stopped else 1))
        return self.ended or bool(news.tokens)

    def _first_row(self, row: int) -> Array:
        """A row of the last step's logits where captured steps leave theirs."""
        logits, at = self._forward.buffers.logits, self._device.pointer
        if row:
            self._device.copy(at(logits[:1]), at(logits[row : row + 1]), logits[:1].nbytes)
        return logits[:1]

    def _tables(self) -> tuple[I32, ...]:
        return self._forward.tables([self._sequence])

    def _reserve(self, n_positions: int) -> None:
        """Blocks for the first n_positions (of the context), told to the device when there are new ones."""
        sequence, n_positions = self._sequence, min(n_positions, self._forward.limits.n_ctx)
        if sequence.reserved_tokens < n_positions:
            sequence.reserve(n_positions - sequence.length)
            self._moves = -1
        if self._drawn and self._moves != self._forward.kv.moves:
            for table, host in zip(self._forward.inputs.block_table, self._tables(), strict=True):
                self._device.write(table[:1], host)
            self._moves = self._forward.kv.moves

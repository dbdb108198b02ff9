"""Decoding on a device: a token is one graph launch, and the host reads behind what it has enqueued.

The sampled token feeds the next step on the device (cuda/step.cuh). After a stop token, the limit or an error the
device clears its own active flag, so whatever is still enqueued moves no state.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator
from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np

from engine.errors import NumericalError
from engine.forward import Forward
from engine.kv import Sequence, block_table
from engine.layers import Step
from engine.ops import F32, I32
from engine.ops.cuda.device import Array, Graph
from engine.ops.cuda.sampling import FAILED, RING_ENTRIES, Sampler
from engine.residency import Residency
from engine.sampling import Drawing, Drawn, SamplingParams, counts_reply

AHEAD_STEPS = 3  # enqueued beyond what was read: the device never waits for the host
_POLL_S = 0.0001
_CHECK_S = 1.0  # without news for so long, ask the device whether it failed


class _Known(NamedTuple):
    """What a sampler has of a request: tokens, the last of them, draws since it was prepared, whether with a mask."""

    request: int = -1
    n_tokens: int = 0
    token: int = -1
    draws: int = 0
    masked: bool = False


_NOTHING = _Known()


class Graphs:
    """Captured steps of one model on one device: decoding, and small steps of several tokens.

    forward, residency: what a step runs on; both are allocated and stay where they are.
    """

    def __init__(self, forward: Forward, residency: Residency) -> None:
        self.forward = forward
        self.residency = residency
        self.device = forward.device
        # One for each sequence of a step; the first also feeds the next step when one decodes ahead.
        self.samplers = [Sampler(forward.device, forward.limits) for _ in range(forward.limits.max_sequences)]
        self.sampler = self.samplers[0]
        self._known = [_NOTHING] * len(self.samplers)
        self._nowhere = forward.device.empty((2 + len(forward.kv.groups), 1), np.int32)
        self._row = forward.device.empty((1, forward.limits.n_vocab), np.float32)
        self._decode: dict[bool, Graph] = {}  # by whether it is greedy
        self._steps: dict[int, Graph] = {}

    def _inputs(self, T: int) -> Step:
        f = self.forward
        return f.inputs_of(T, min(T, f.limits.max_sequences), T)

    def step(self, T: int) -> None:
        """Enqueue a step of T tokens, one of GRAPH_TOKENS, on what `Forward.feed` wrote; all rows get logits."""
        if T not in self._steps:
            inputs = self._inputs(T)
            self._steps[T] = self.device.capture(lambda: self.forward.run(inputs, self.residency))
        self._steps[T].launch()

    def _decode_step(self, greedy: bool) -> Graph:
        if greedy not in self._decode:
            step, ws = self._inputs(1), self.forward.ws

            def work() -> None:
                self._sample(step, self.forward.run(step, self.residency).logits, greedy)

            ws.active_step = self.sampler.active
            try:
                self._decode[greedy] = self.device.capture(work)
            finally:
                ws.active_step = None
        return self._decode[greedy]

    def _sample(self, step: Step, logits: Array, greedy: bool) -> None:
        f = self.forward
        self.sampler.step(logits, step.tokens, step.positions, f.slots, f.block_tables, greedy)

    def decode(
        self, sequence: Sequence, history: list[int], row: int, params: SamplingParams, stop: frozenset[int],
        limit: int, reply_from: int, logprobs: int | None,
    ) -> Generator[list[Drawn], bool | None, str]:  # fmt: skip
        """Generate up to `limit` tokens after `history`, whose last token's logits are row `row` of the last step's.

        As `Runner.decode`: sent True, no further step is enqueued, and it ends when those that were are done.
        """
        f, greedy, start = self.forward, params.temperature <= 0, len(history)
        graph = self._decode_step(greedy)
        self._reserve(sequence, start + 1)
        nothing = np.zeros(1, np.int32)
        f.feed(
            Step(
                tokens=nothing, positions=np.full(1, start - 1, np.int32), sequence=nothing,
                slots=tuple(np.full(1, -1, np.int32) for _ in f.kv.groups), block_table=self._tables(sequence),
                states=np.array([sequence.next_states(keep=False)], np.int32), counted=np.ones(1, np.uint8),
                rows=nothing,
            )
        )  # fmt: skip
        self._known[0] = _NOTHING
        self.sampler.prepare(params, history, start, stop, limit, logprobs=logprobs)
        if counts_reply(params):
            self.sampler.count(history[reply_from:])
        logits = self._logits(row)
        self._sample(self._inputs(1), logits, greedy)
        if logprobs is not None:
            self.sampler.describe(logits)
        made, enqueued, heard, pausing = 0, 1, time.monotonic(), False
        while True:
            while not pausing and enqueued < min(limit, made + 1 + AHEAD_STEPS):
                self._reserve(sequence, start + enqueued + 1)
                graph.launch()
                if logprobs is not None:  # behind the graph, so that there are not as many graphs again
                    self.sampler.describe(logits)
                enqueued += 1
            news = self.sampler.poll(made)
            if news.tokens:
                heard = time.monotonic()
                made += len(news.tokens)
                history.extend(news.tokens)
                sequence.length = start + made - 1
                drawn = zip(news.tokens, news.likelihoods or itertools.repeat(None), strict=False)
                pausing = (yield [Drawn(*pair) for pair in drawn]) or pausing
            if news.error:
                raise _not_finite()
            if news.stopped:
                sequence.length = start + made  # all of them were fed, and the stop token was not
                return "stop"
            if made == limit:
                return "length"
            if pausing and made == enqueued:
                return "paused"
            if not news.tokens:
                if time.monotonic() - heard > _CHECK_S:
                    self.device.synchronize()
                    heard = time.monotonic()
                time.sleep(_POLL_S)

    def draw(self, drawings: Many[Drawing], rows: Many[int]) -> list[Drawn | None]:
        """Draw a token for each sequence, drawings[i] from row rows[i] of the last step's logits; waits for them.

        None where logits are not finite. A sampler goes on by itself with the request it had, without a mask.
        """
        for d, row in zip(drawings, rows, strict=True):
            self._draw(d, self._aligned(row))
        return self._drawn_tokens(drawings)

    def draw_from(self, logits: F32, drawing: Drawing) -> list[Drawn | None]:
        """As `draw`, from logits float32 [V] in host memory."""
        self.device.write(self._row, logits[None])
        self._draw(drawing, self._row)
        return self._drawn_tokens([drawing])

    def _draw(self, d: Drawing, logits: Array) -> None:
        """Enqueue the draw of a token from logits float32 [1, V]."""
        f, nowhere = self.forward, self._nowhere
        sampler, n = self.samplers[d.number], len(d.history)
        known = self._known[d.number]
        draws, goes_on = known.draws, (known.request, known.n_tokens, known.token) == (d.request, n, d.history[-1])
        masked = d.allowed is not None
        if masked or known.masked or not goes_on or draws == RING_ENTRIES - 1:
            sampler.prepare(d.params, d.history, n, (), f.limits.n_ctx, d.allowed, d.logprobs)
            draws = 0
        if counts_reply(d.params) and not goes_on:  # a grammar's are prepared for each token, and their counts go on
            sampler.count(d.history[d.reply_from :])
        self._known[d.number] = _Known(d.request, n + 1, -1, draws + 1, masked)
        sampler.step(logits, nowhere[0], nowhere[1], nowhere[2:], f.block_tables, d.params.temperature <= 0)
        if d.logprobs is not None:
            sampler.describe(logits)

    def _drawn_tokens(self, drawings: Many[Drawing]) -> list[Drawn | None]:
        self.device.synchronize()
        tokens: list[Drawn | None] = []
        for d in drawings:
            sampler, known = self.samplers[d.number], self._known[d.number]
            drawn = sampler.drawn(known.draws)
            assert drawn is not None
            failed = drawn.status == FAILED
            self._known[d.number] = _NOTHING if failed else known._replace(token=drawn.token)
            found = None if failed or d.logprobs is None else sampler.likelihood(known.draws)
            tokens.append(None if failed else Drawn(drawn.token, found))
        return tokens

    def _aligned(self, row: int) -> Array:
        """A row of the last step's logits, where vectors of four can be read."""
        logits = self.forward.buffers.logits[row : row + 1]
        if row * logits.shape[1] % 4 == 0:
            return logits
        self.device.copy(self.device.pointer(self._row), self.device.pointer(logits), logits.nbytes)
        return self._row

    def _logits(self, row: int) -> Array:
        """A row of the last step's logits where captured steps leave theirs."""
        logits = self.forward.buffers.logits
        if row:
            self.device.copy(
                self.device.pointer(logits[:1]), self.device.pointer(logits[row : row + 1]), logits[:1].nbytes
            )
        return logits[:1]

    def _tables(self, sequence: Sequence) -> tuple[I32, ...]:
        return tuple(block_table([sequence], g, self.forward.table_width) for g in range(len(sequence.groups)))

    def _reserve(self, sequence: Sequence, n_positions: int) -> None:
        """Blocks for the first n_positions (of the context), told to the device when there are new ones."""
        n_positions = min(n_positions, self.forward.limits.n_ctx)
        if sequence.reserved_tokens < n_positions:
            sequence.reserve(n_positions - sequence.length)
            for table, host in zip(self.forward.inputs.block_table, self._tables(sequence), strict=True):
                self.device.write(table[:1], host)


def _not_finite() -> NumericalError:
    return NumericalError(
        "the logits of a step are not finite",
        hint="the model file may be damaged; compare its checksum with the publisher's",
    )

"""What requests are while they run: a generation as a state machine, a score as a list of steps.

A generation is fed its prompt chunk by chunk, then draws tokens one by one. Between two units of work its last token is
drawn and not fed, whoever fed the ones before: a step of its own, a step shared with other sequences, or steps
enqueued ahead. So it can go from one to the other after any token, and can be put back and fed again.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.errors import NumericalError
from engine.families import Families, Family, Kept
from engine.forms import Form
from engine.forward import MAX_ROWS
from engine.kv import Sequence
from engine.ops import F32
from engine.protocol import Done, Event, Generate, Progress, Score, Timing, Tokens, Usage
from engine.runner import Runner, Span, StepResult
from engine.sampling import Drawing, Drawn, check_finite
from engine.trace import TraceWriter

MASK_WAIT_S = 0.01  # a step waits so long for a mask; whoever has none then draws when it comes, without the others
SLICE_S = 0.025  # tokens are sent in groups: at most one event of a request every 25 ms
_COUNTED = np.ones(1, bool)
_serials = itertools.count()


class GenerateTask:
    """A request to generate.

    history: the prompt and what was drawn. sequence: what is cached of it, None while it waits. decoding: the prompt
    is read. number: its place among those that run, 0, 1, ... turn: when it began, counted. reason: why it ended, None
    until then. read_tokens, reused_tokens: fed in chunks, and begun after, counted again when it is fed again.
    grammar: the form that binds it, if one does. held: logits float32 [V] of the next token, if its mask is late.
    """

    def __init__(
        self, runner: Runner, request: Generate, grammar: Form | None = None, families: Families | None = None
    ) -> None:
        self.runner = runner
        self.request = request
        self._families = families
        self.number = self.turn = 0
        self.params = request.sampling
        self.reply_from = len(request.tokens) if request.reply_from is None else request.reply_from
        self.stop = frozenset(runner.stop_tokens if request.stop_tokens is None else request.stop_tokens)
        self.grammar = grammar
        self.held: F32 | None = None
        self.history = list(request.tokens)
        self.limit = min(request.max_tokens, runner.n_ctx - len(request.tokens))
        self.serial = next(_serials)
        self.sequence: Sequence | None = None
        self.decoding = False
        self.reason: str | None = None
        self.cached_tokens: int | None = None
        self.read_tokens = self.reused_tokens = 0
        self._before = runner.residency.counters()
        self._began = time.perf_counter()
        self._reading = self._part = np.zeros(0, np.int32)  # to_read, of the sequence; its next step
        self._kept: F32 | None = None  # the logits of a prompt that another has read, to be drawn from
        self._read_s = 0.0  # when the prompt was read
        self._unsent: list[Drawn] = []
        self._sent = 0.0

    @property
    def id(self) -> int:
        """The request's."""
        return self.request.id

    @property
    def family(self) -> Family | None:
        """Those with this prompt, which one of them reads; others may join while it does."""
        return None if self._families is None else self._families.of(self.id)

    @property
    def made(self) -> int:
        """Tokens drawn so far."""
        return len(self.history) - len(self.request.tokens)

    @property
    def left(self) -> int:
        """Tokens that may still be drawn."""
        return self.limit - self.made

    @property
    def to_read(self) -> list[int]:
        """The tokens to be fed before the next is drawn: the prompt, or all but the last after a new start."""
        return self.history[:-1] if self.made else self.history

    def prepare(self) -> None:
        """Take what the next chunk, or the next token, needs of the cache; CapacityError where there is too little."""
        if self._kept is not None:
            return
        family = self.family if self.sequence is None else None
        kept = family.kept if family is not None and self.id in family.pending else None
        if kept is not None:
            self.sequence = self.runner.begin(kept.fork)
            self._kept = kept.logits
            self.cached_tokens = len(self.request.tokens)
            self.reused_tokens += self.cached_tokens
            return
        if self.sequence is None:
            self._reading = np.asarray(self.to_read, np.int32)
            self.sequence, reused = self.runner.resume(self._reading)
            self.reused_tokens += reused
            if self.cached_tokens is None:
                self.cached_tokens = min(reused, len(self.request.tokens))
        if not self.decoding:
            self._part = self.runner.next_step(self.sequence, self._reading)
        self.sequence.reserve(1 if self.decoding else len(self._part))

    def read(self) -> list[Event]:
        """Feed one more chunk, for which there is room, then draw the first token."""
        if self._kept is not None:
            return self._begin(self._kept)
        r, sequence, tokens = self.runner, self.sequence, self._reading
        assert sequence is not None
        part = self._part  # as it was when there was room: to make room, prefixes may have been given up
        last = sequence.length + len(part) == len(tokens)
        counted = np.zeros(len(part), bool)
        result = r.run([Span(sequence, part, counted, (len(part) - 1,) if last and not self.made else ())])
        check_finite(result.last_residual)  # before others are let begin after it; waits for the step
        r.remember(sequence, tokens)
        self.read_tokens += len(part)
        progress = Progress(self.id, sequence.length, len(tokens), self.cached_tokens or 0)
        if not last:
            return [progress]
        self.decoding = True
        if self.made:
            return []
        self._share(result)
        drawing = self.drawing(result, 0, time.monotonic() + MASK_WAIT_S)
        drawn = [] if drawing is None else r.draw(result, [drawing])
        self._read_s = time.perf_counter()
        return [progress, *self.go_on(*drawn)]

    def _share(self, result: StepResult) -> None:
        """Let the others of the family go on from the prompt that was read."""
        family = self.family
        if family is None:
            return
        assert self.sequence is not None
        if family.wants(self.id):
            fork = self.runner.fork(self.sequence)
            if fork is not None:
                family.keep(Kept(fork, result.logits[0].copy()))
        family.begun(self.id)

    def _begin(self, logits: F32) -> list[Event]:
        """Draw the first token after a prompt that another has read."""
        family = self.family
        assert family is not None
        self._kept, self.decoding = None, True
        family.begun(self.id)
        drawing = self.drawing(logits[None], 0, time.monotonic() + MASK_WAIT_S)
        drawn = [] if drawing is None else self.runner.draw_from(logits, drawing)
        self._read_s = time.perf_counter()
        n = len(self.request.tokens)
        return [Progress(self.id, n, n, n), *self.go_on(*drawn)]

    def drawing(self, result: StepResult | F32, row: int, until_s: float) -> Drawing | None:
        """How the next token is to be drawn from a row of a step's logits, or of float32 [n, V].

        None where the grammar allows none, the end, or where its mask has not come in time: then `held`. The mask was
        asked for when the token before was drawn, and has been made since.
        """
        allowed = None
        if self.grammar is not None:
            allowed = self.grammar.mask(until_s)
            if self.grammar.is_done:
                self.reason = "stop"
                return None
            if allowed is None:
                logits = result.logits if isinstance(result, StepResult) else result
                self.held = logits[row].copy()
                return None
        return self._drawing(row, allowed)

    def _drawing(self, row: int, allowed: NDArray[np.uint32] | None) -> Drawing:
        return Drawing(
            self.number, self.serial, self.history, row, self.params, self.reply_from, allowed, self.request.logprobs
        )  # fmt: skip

    def draw_held(self) -> list[Event]:
        """Draw the token whose mask was late, now that it is there."""
        assert self.grammar is not None and self.held is not None
        allowed = self.grammar.mask(time.monotonic())
        if self.grammar.is_done:
            self.reason = "stop"
            return self.flush()
        drawn, self.held = self.runner.draw_from(self.held, self._drawing(0, allowed)), None
        return self.go_on(*drawn)

    def settled(self, until_s: float) -> bool:
        """Whether it is known that the last token is not the end; False, too, where that takes beyond a time."""
        if self.grammar is not None and self.reason is None:
            if not self.grammar.settle(until_s):
                return False
            if self.grammar.is_done:
                self.reason = "stop"
            elif self.made == self.limit:
                self.reason = "length"
        return self.reason is None

    def go_on(self, *drawn: Drawn | None) -> list[Event]:
        """Take a token that was drawn, if one was; the events that are due."""
        for one in drawn:
            self.take(one)
        return self.flush()

    def take(self, drawn: Drawn | None) -> None:
        """Go on with a drawn token, or end; None: the logits were not finite."""
        if drawn is None:
            raise NumericalError(
                "the logits of a step are not finite",
                hint="the model file may be damaged; compare its checksum with the publisher's",
            )
        token = drawn.token
        if token in self.stop:
            self.reason = "stop"
            return
        self.history.append(token)
        self._unsent.append(drawn)
        if self.grammar is not None:
            self.grammar.accept(token)  # and what follows from that, `settled` says
        elif self.made == self.limit:
            self.reason = "length"

    def span(self) -> Span:
        """The last token, which is drawn and not fed."""
        assert self.sequence is not None
        return Span(self.sequence, np.asarray(self.history[-1:], np.int32), _COUNTED, (0,))

    def ahead(self) -> Generator[list[Drawn], bool, None]:
        """Draw tokens with steps enqueued ahead, until the end or until it is sent True; lists of them as they come.

        They are in `history` already.
        """
        r, span = self.runner, self.span()
        left = self.limit - self.made
        result = r.run([span])
        decoding = r.decode(
            span.sequence, self.history, result, self.params, self.stop, left, self.reply_from, self.request.logprobs
        )  # fmt: skip
        pause = False
        while True:
            try:
                tokens = decoding.send(pause) if pause else next(decoding)
            except StopIteration as end:
                if end.value != "paused":
                    self.reason = end.value
                return
            self._unsent += tokens
            pause = (yield tokens) or pause

    def flush(self) -> list[Event]:
        """The tokens not sent yet, if it is time or the end, and Done at the end."""
        now = time.perf_counter()
        events: list[Event] = []
        if self._unsent and (self.reason or now - self._sent >= SLICE_S):
            events.append(self._tokens())
            self._unsent, self._sent = [], now
        if self.reason is not None:
            events.append(self._done(now))
        return events

    def _tokens(self) -> Tokens:
        tokens = tuple(drawn.token for drawn in self._unsent)
        if self.request.logprobs is None:
            return Tokens(self.id, tokens)
        found = [drawn.likelihood for drawn in self._unsent if drawn.likelihood is not None]
        return Tokens(self.id, tokens, tuple(f.logprob for f in found), tuple(f.top for f in found))

    def _done(self, now: float) -> Done:
        r, read_s = self.runner, self._read_s or now
        assert self.sequence is not None
        r.remember(self.sequence, np.asarray(self.history, np.int32))
        usage = Usage(len(self.request.tokens), self.made, cached_tokens=self.cached_tokens or 0)
        timing = Timing(read_s - self._began, now - read_s)
        return Done(
            self.id, usage, timing, r.residency.since(self._before), "stop" if self.reason == "stop" else "length"
        )

    def put_back(self) -> None:
        """Give up what is cached, to be fed again later."""
        self._release()
        self.decoding, self.held = False, None

    def close(self) -> None:
        """Give back what is cached, and the form."""
        self._release()
        if self.grammar is not None:
            self.grammar.close()

    def _release(self) -> None:
        self._kept = None
        if self.sequence is not None:
            self.sequence.release()
            self.sequence = None


class ScoreTask:
    """A request to score: every step is a unit of work.

    It runs alone, so there is room for it, and nothing is read and counted twice.
    """

    decoding = False

    def __init__(self, runner: Runner, request: Score) -> None:
        self.runner = runner
        self.request = request
        self.number = self.turn = 0
        self.reason: str | None = None
        self.read_tokens = self.reused_tokens = 0
        self.sequence: Sequence | None = None
        self._work = self._score()

    @property
    def id(self) -> int:
        """The request's."""
        return self.request.id

    @property
    def to_read(self) -> list[int]:
        """The tokens to be fed."""
        return list(self.request.tokens)

    def prepare(self) -> None:
        """Nothing: the whole cache is there."""

    def read(self) -> list[Event]:
        """Feed one more chunk."""
        self.runner.capture_hidden(self.request.hidden)
        try:
            events = next(self._work)
        finally:
            self.runner.capture_hidden(False)
        if isinstance(events[-1], Done):
            self.reason = "length"
        return events

    def close(self) -> None:
        """Give back what is cached, and leave nothing of a trace but whole parts."""
        self._work.close()
        if self.sequence is not None:
            self.sequence.release()
            self.sequence = None

    def _score(self) -> Generator[list[Event], None, None]:
        r, request = self.runner, self.request
        self.sequence = sequence = r.new_sequence()
        tokens = np.asarray(request.tokens, np.int32)
        generated = np.ones(len(tokens), bool) if request.generated is None else np.asarray(request.generated)
        counted = generated if request.count == "generated" else np.ones(len(tokens), bool)
        before = r.residency.counters()
        logprobs = np.zeros(len(tokens))
        began = time.perf_counter()
        # A window is one part or more of the trace; one that fails leaves nothing behind it but whole parts.
        with self._open_trace() as trace:
            for start in range(0, len(tokens), r.chunk_tokens):
                part = slice(start, min(start + r.chunk_tokens, len(tokens)))
                want = (part.stop - part.start - 1,) if part.stop == len(tokens) else ()
                result = r.run([Span(sequence, tokens[part], counted[part], want)])
                self.read_tokens += part.stop - part.start
                check_finite(result.residual)
                if request.logprobs:
                    self._log_probabilities(tokens, part, logprobs)
                if trace is not None:
                    self._trace(trace, result, part, generated)
                if part.stop < len(tokens):
                    yield [Progress(request.id, part.stop, len(tokens))]
        done = Done(
            request.id,
            Usage(len(tokens), 0),
            Timing(time.perf_counter() - began, 0.0),
            r.residency.since(before),
            nll=float(-logprobs[generated].sum()) if request.logprobs else None,
            logprobs=tuple(logprobs[1:].tolist()) if request.logprobs else None,
        )
        yield [done]

    def _open_trace(self) -> AbstractContextManager[TraceWriter | None]:
        request, c = self.request, self.runner.config
        if request.trace_dir is None:
            return nullcontext()
        return TraceWriter(
            Path(request.trace_dir), self.runner.file.model_id, c.n_expert_used, c.n_embd, request.hidden,
            n_layer=c.n_layer, n_expert=c.n_expert,
        )  # fmt: skip

    def _log_probabilities(self, tokens: NDArray[np.int32], part: slice, out: NDArray[np.float64]) -> None:
        # Position i - 1 predicts token i; the last position of all predicts a token nobody gave.
        last = min(part.stop, len(tokens) - 1)
        for start in range(part.start, last, MAX_ROWS):
            stop = min(start + MAX_ROWS, last)
            logits = self.runner.logits(np.arange(start - part.start, stop - part.start, dtype=np.int32))
            check_finite(logits)
            out[start + 1 : stop + 1] = log_softmax_at(logits, tokens[start + 1 : stop + 1])

    def _trace(self, trace: TraceWriter, result: StepResult, part: slice, generated: NDArray[np.bool_]) -> None:
        request, c = self.request, self.runner.config
        # Windows of one session share no position, and none looks like the next token of another.
        positions = request.window * (self.runner.n_ctx + 1) + np.arange(part.start, part.stop)
        hidden = None if result.hidden is None else result.hidden[list(c.moe_layers)].swapaxes(0, 1)
        trace.append(
            request.session_id,
            positions.astype(np.int32),
            generated[part],
            c.moe_layers,
            result.experts.swapaxes(0, 1),
            result.weights.swapaxes(0, 1),
            hidden,
        )


def log_softmax_at(logits: F32, tokens: NDArray[np.int32]) -> NDArray[np.float64]:
    """log p of one token a row: logits float32 [T, V], tokens [T] -> float64 [T]."""
    wide = logits.astype(np.float64)
    top = wide.max(axis=1)
    total = np.log(np.exp(wide - top[:, None]).sum(axis=1))
    return np.asarray(wide[np.arange(len(tokens)), tokens] - top - total)

"""What requests are while they run: a generation as a state machine, a score as a list of steps.

A generation is fed its prompt chunk by chunk, then draws tokens one by one. Between two units of work its last token is
drawn and not fed, whoever fed the ones before: a step of its own, a step shared with other sequences, or steps
enqueued ahead. So it can go from one to the other after any token, and can be put back and go on later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.formats.trace import TraceWriter
from engine.ground.protocol import Done, Event, Generate, Progress, Score, Timing, Tokens, Usage
from engine.memory import swap
from engine.memory.blocks import Sequence
from engine.memory.swap import Swapped
from engine.ops import F32, SMALL_TOKENS
from engine.running.decoding import Proposal
from engine.running.drafts import tallied
from engine.running.forward import MAX_ROWS
from engine.running.loaded import Loaded
from engine.running.recall import part_of
from engine.running.reply import MASK_WAIT_S, Reply
from engine.running.sampling import check_finite
from engine.running.stepping import Span, StepResult
from engine.serving.families import Families, Family, Kept
from engine.serving.schedule import State
from engine.text.forms import Form

SLICE_S = 0.025  # tokens are sent in groups: at most one event of a request every 25 ms


class GenerateTask(Reply):
    """A request to generate: a reply, the reading of its prompt, and what its client is told.

    decoding: the prompt is read. turn: when it began, counted. passed: before one who waited longer. read_tokens,
    reused_tokens: fed in chunks, and begun after, counted again when it is fed again.
    """

    def __init__(
        self, loaded: Loaded, request: Generate, grammar: Form | None = None, families: Families | None = None
    ) -> None:
        super().__init__(
            list(request.tokens),
            request.sampling,
            min(request.max_tokens, loaded.limits.n_ctx - len(request.tokens)),
            stop=loaded.source.stop_tokens if request.stop_tokens is None else request.stop_tokens,
            reply_from=request.reply_from,
            logprobs=request.logprobs,
            grammar=grammar,
        )
        self.loaded = loaded
        self.request = request
        if loaded.drafts is not None and request.draft:
            loaded.drafts.begin(self, request.prediction or ())
        recalling = loaded.forward.recalling
        self.recall = part_of(request.kv_recall, None if recalling is None else recalling.served)
        self._families = families
        self.turn = 0
        self.passed = False
        self.decoding = False
        self.cached_tokens: int | None = None
        self.read_tokens = self.reused_tokens = 0
        self._before = loaded.residency.counters()
        self._began = time.perf_counter()
        self._reading = np.asarray(request.tokens, np.int32)
        self._part = np.zeros(0, np.int32)  # what it feeds in its next step
        self._kept: F32 | None = None  # the logits of a prompt that another has read, to be drawn from
        self._swapped: Swapped | None = None  # what it held when it was put back
        self._was_read = False  # and whether that was all that was to be read
        self._again = False  # it is read again, where that was too much to be kept
        self._read_s = 0.0  # when the prompt was read
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
    def n_to_read(self) -> int:
        """How many tokens are to be fed before the next is drawn: the prompt, or all but the last after a new start."""
        return len(self.history) - bool(self.made)

    @property
    def state(self) -> State:
        """What its next unit of work is."""
        if not self.decoding:
            return "reading"
        if self.held is None or self.grammar is None:
            return "decoding"
        return "held" if self.grammar.is_late else "due"

    def prepare(self, most: int | None = None) -> None:
        """Take what the next chunk, or the next token, needs of the cache; CapacityError where there is too little.

        most: tokens that a chunk may have; where it cannot be cut to that there is none, and `part_tokens` is 0.
        """
        if self._kept is not None:
            return
        if self._swapped is not None:
            self.sequence, self._swapped = self.loaded.swap_in(self._swapped), None
            self.decoding, self._was_read = self._was_read, False
        family = self.family if self.sequence is None else None
        kept = family.kept if family is not None and self.id in family.pending else None
        if kept is not None:
            self.sequence = self.loaded.begin(kept.fork)
            self._kept = kept.logits
            self.cached_tokens = len(self.request.tokens)
            self.reused_tokens += self.cached_tokens
            return
        if self.sequence is None:
            self.sequence, reused = self.loaded.resume(self._reading, exact=self._again)
            self.reused_tokens += reused
            if self.cached_tokens is None:
                self.cached_tokens = min(reused, len(self.request.tokens))
        if not self.decoding:
            self._part = self._next_part(self.sequence, most)
        self.sequence.reserve(1 if self.decoding else len(self._part))

    def _next_part(self, sequence: Sequence, most: int | None) -> NDArray[np.int32]:
        """The tokens of the next step: of the prompt, then, as they were fed before, of what was drawn."""
        if sequence.length < len(self._reading):
            n = self.loaded.prefixes.step_tokens(sequence, self._reading, most)
            return self._reading[sequence.length :][:n]
        end = min(self.n_to_read, sequence.length + min(SMALL_TOKENS, self.loaded.limits.max_tokens))
        fits = most is None or end - sequence.length <= most
        return np.asarray(self.history[sequence.length : end] if fits else (), np.int32)

    @property
    def part_tokens(self) -> int:
        """Tokens of the step that it is prepared for; 0: none, or `is_ready`."""
        return 0 if self.is_ready else len(self._part)

    @property
    def is_ready(self) -> bool:
        """Whether it goes on without a step (`begin`)."""
        return self._kept is not None or self.decoding

    def repeats(self, other: GenerateTask) -> bool:
        """Whether it has not begun, and can go on after what the step that `other` is prepared for computes."""
        if self.sequence is not None or self._swapped is not None or other.sequence is None:
            return False
        prefixes, before = self.loaded.prefixes, other.sequence.length
        end = (before // prefixes.chunk_tokens + 1) * prefixes.chunk_tokens  # of the first chunk that it completes
        most = min(prefixes.last_begin(len(self._reading)), before + other.part_tokens, len(other._reading))
        return end <= most and np.array_equal(self._reading[:end], other._reading[:end])

    def begin(self) -> list[Event]:
        """Go on without a step: from what another has read, or as it was when it left."""
        return [] if self._kept is None else self._begin(self._kept)

    def chunk(self) -> Proposal:
        """What it feeds in the step that it is prepared for, and the logits that it draws its first token from."""
        assert self.sequence is not None
        part = self._part  # as it was when there was room: to make room, prefixes may have been given up
        last = self.sequence.length + len(part) == self.n_to_read
        wanted = (len(part) - 1,) if last and not self.made else ()
        # What was drawn is read as it was then; a prompt reads all.
        recall = self.recall if self.sequence.length >= len(self._reading) else None
        begin = self.sequence.length
        short = self.loaded.prefixes.short_rows(begin, begin + len(part), len(self._reading))
        return Proposal(self, Span(self.sequence, part, np.zeros(len(part), bool), wanted, recall=recall, short=short))

    def fed(self, residual: F32, logits: Callable[[], F32] | None) -> list[Event]:
        """Note that the chunk was fed, of whose last token that is the residual; who has a first token to draw is told.

        logits: of the prompt's last token, where it is to be drawn from; it is not yet.
        """
        loaded, sequence = self.loaded, self.sequence
        assert sequence is not None
        check_finite(residual)  # before others are let begin after it
        if sequence.length <= len(self._reading):
            loaded.prefixes.insert(sequence, self._reading)
        if sequence.length == len(self._reading) and sequence.exact is None:
            sequence.exact = sequence.length
        self.read_tokens += len(self._part)
        self.decoding = sequence.length == self.n_to_read
        if logits is not None:
            self._share(logits)
        if self.made:  # it was put back, and its client knows that the prompt was read
            return []
        return [Progress(self.id, sequence.length, self.n_to_read, self.cached_tokens or 0)]

    def drawn(self) -> list[Event]:
        """What its client is told of the first token."""
        self._read_s = time.perf_counter()
        return self.flush()

    def _share(self, logits: Callable[[], F32]) -> None:
        """Let the others of the family go on from the prompt that was read."""
        family = self.family
        if family is None:
            return
        assert self.sequence is not None
        if family.wants(self.id):
            fork = self.loaded.prefixes.forks.make(self.sequence)
            if fork is not None:
                family.keep(Kept(fork, logits().copy()))
        family.begun(self.id)

    def _begin(self, logits: F32) -> list[Event]:
        """Draw the first token after a prompt that another has read."""
        family = self.family
        assert family is not None
        self._kept, self.decoding = None, True
        family.begun(self.id)
        self.loaded.decoder.draw_from(self, logits, time.monotonic() + MASK_WAIT_S)
        self._read_s = time.perf_counter()
        n = len(self.request.tokens)
        return [Progress(self.id, n, n, n), *self.flush()]

    def draw_held(self) -> list[Event]:
        """Draw the token whose mask was late, now that it is there."""
        assert self.held is not None
        held, self.held = self.held, None
        self.loaded.decoder.draw_from(self, held, time.monotonic())
        return self.flush()

    def flush(self) -> list[Event]:
        """The tokens not sent yet, if it is time or the end, and Done at the end."""
        now = time.perf_counter()
        events: list[Event] = []
        if self.unsent and (self.reason or now - self._sent >= SLICE_S):
            events.append(self._tokens())
            self.unsent, self._sent = [], now
        if self.reason is not None:
            events.append(self._done(now))
        return events

    def _tokens(self) -> Tokens:
        tokens = tuple(drawn.token for drawn in self.unsent)
        drafts, recall = self._drafted() or None, self._recalled()
        if self.request.logprobs is None:
            return Tokens(self.id, tokens, drafts=drafts, recall=recall)
        found = [drawn.likelihood for drawn in self.unsent if drawn.likelihood is not None]
        return Tokens(self.id, tokens, tuple(f.logprob for f in found), tuple(f.top for f in found), drafts, recall)

    def _drafted(self) -> dict[str, dict[str, int]]:
        """Tokens that were drafted for it, and accepted, by source."""
        return {} if self.drafting is None else tallied(self.drafting.record.tallies)

    def _recalled(self) -> dict[str, float] | None:
        """What its tokens have read, where that may be a part."""
        return None if self.recall is None else self.recalled.to_json()

    def _done(self, now: float) -> Done:
        loaded, read_s = self.loaded, self._read_s or now
        assert self.sequence is not None
        # Behind the first token that left something out nothing is as a prompt, or another request, has it.
        loaded.prefixes.insert(self.sequence, np.asarray(self.history, np.int32), most=self.recalled.first)
        cached = self.cached_tokens or 0
        usage = Usage(
            len(self.request.tokens), self.made, cached_tokens=cached, drafts=self._drafted(), recall=self._recalled()
        )
        timing = Timing(read_s - self._began, now - read_s)
        return Done(
            self.id, usage, timing, loaded.residency.since(self._before), "stop" if self.reason == "stop" else "length"
        )

    def put_back(self) -> None:
        """Move what is cached to host memory, to go on with later, with the bits that it has.

        Where the host's budget is short of that it is fed again: its prompt as a prompt, then what was drawn in short
        steps, which have the bits of those that drew it.
        """
        if self.sequence is not None and self.sequence.length:  # else what was moved out before still lies there
            self._swapped = swap.swap_out(self.loaded.kv, self.sequence) if self._kept is None else None
            self._was_read = self._swapped is not None and self.decoding
            self._again = self._swapped is None
            if not self._was_read:
                self.held = None
        self._release()
        self.decoding = False

    @property
    def is_moved_out(self) -> bool:
        """Whether what it had cached lies in host memory."""
        return self._swapped is not None

    def close(self) -> None:
        """Give back what is cached, and the form."""
        self._release()
        if self.loaded.drafts is not None and self.request.draft:
            self.loaded.drafts.end(self)
        if self._swapped is not None:
            swap.drop(self.loaded.kv, self._swapped)
            self._swapped = None
        if self.grammar is not None:
            self.grammar.close()

    def _release(self) -> None:
        self._kept = None
        if self.sequence is not None:
            if self.loaded.drafts is not None:
                self.loaded.drafts.leaves(self.sequence)
            self.sequence.release()
            self.sequence = None


class Rereading:
    """What was decoded, read again as a prompt while nobody wants anything: a chunk of prefixes is a unit of work.

    tokens: int32, whole chunks. A prompt that goes on behind these tokens leaves the same snapshots. No use of a chunk,
    so what is given up first stays that.
    """

    def __init__(self, loaded: Loaded, tokens: NDArray[np.int32]) -> None:
        self.loaded = loaded
        self.tokens = tokens
        self.sequence: Sequence | None = None

    def read(self) -> bool:
        """Read one more chunk; whether it was the last. CapacityError where there is no room."""
        prefixes = self.loaded.prefixes
        if self.sequence is None:
            self.sequence, _ = self.loaded.resume(self.tokens, exact=True, again=True)
        sequence, chunk = self.sequence, prefixes.chunk_tokens
        n = min(prefixes.step_tokens(sequence, self.tokens), chunk - sequence.length % chunk)
        part = self.tokens[sequence.length :][:n]
        result = self.loaded.steps.run([Span(sequence, part, np.zeros(n, bool))])  # whole chunks have no short rows
        check_finite(result.last_residual)  # waits for the step: a request waits for no more than that
        prefixes.insert(sequence, self.tokens, again=True)
        return sequence.length == len(self.tokens)

    def close(self) -> None:
        """Give back what is held; the chunks that were read stay."""
        if self.sequence is not None:
            self.sequence.release()
            self.sequence = None


class ScoreTask:
    """A request to score: every step is a unit of work.

    It runs alone, so there is room for it, and nothing is read and counted twice.
    """

    decoding = False

    def __init__(self, loaded: Loaded, request: Score) -> None:
        self.loaded = loaded
        self.request = request
        self.number = self.turn = 0
        self.passed = False
        self.reason: str | None = None
        self.read_tokens = self.reused_tokens = 0
        self.sequence: Sequence | None = None
        self._work = self._score()

    @property
    def id(self) -> int:
        """The request's."""
        return self.request.id

    def prepare(self) -> None:
        """Nothing: the whole cache is there."""

    def read(self) -> list[Event]:
        """Feed one more chunk."""
        self.loaded.forward.capture_hidden(self.request.hidden)
        try:
            events = next(self._work)
        finally:
            self.loaded.forward.capture_hidden(False)
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
        loaded, request = self.loaded, self.request
        self.sequence = sequence = loaded.kv.sequence()
        tokens = np.asarray(request.tokens, np.int32)
        generated = np.ones(len(tokens), bool) if request.generated is None else np.asarray(request.generated)
        counted = generated if request.count == "generated" else np.ones(len(tokens), bool)
        before, step_tokens = loaded.residency.counters(), loaded.limits.max_tokens
        logprobs = np.zeros(len(tokens))
        began = time.perf_counter()
        # A window is one part or more of the trace; one that fails leaves nothing behind it but whole parts.
        with self._open_trace() as trace:
            for start in range(0, len(tokens), step_tokens):
                part = slice(start, min(start + step_tokens, len(tokens)))
                want = (part.stop - part.start - 1,) if part.stop == len(tokens) else ()
                short = loaded.prefixes.short_rows(part.start, part.stop, len(tokens))  # as of a prompt
                result = loaded.steps.run([Span(sequence, tokens[part], counted[part], want, short=short)])
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
            loaded.residency.since(before),
            nll=float(-logprobs[generated].sum()) if request.logprobs else None,
            logprobs=tuple(logprobs[1:].tolist()) if request.logprobs else None,
        )
        yield [Progress(request.id, len(tokens), len(tokens)), done]

    def _open_trace(self) -> AbstractContextManager[TraceWriter | None]:
        request, c = self.request, self.loaded.source.config
        if request.trace_dir is None:
            return nullcontext()
        return TraceWriter(
            Path(request.trace_dir), self.loaded.source.file.model_id, c.n_expert_used, c.n_embd, request.hidden,
            n_layer=c.n_layer, n_expert=c.n_expert,
        )  # fmt: skip

    def _log_probabilities(self, tokens: NDArray[np.int32], part: slice, out: NDArray[np.float64]) -> None:
        # Position i - 1 predicts token i; the last position of all predicts a token nobody gave.
        last = min(part.stop, len(tokens) - 1)
        for start in range(part.start, last, MAX_ROWS):
            stop = min(start + MAX_ROWS, last)
            logits = self.loaded.forward.head(np.arange(start - part.start, stop - part.start, dtype=np.int32))
            check_finite(logits)
            out[start + 1 : stop + 1] = log_softmax_at(logits, tokens[start + 1 : stop + 1])

    def _trace(self, trace: TraceWriter, result: StepResult, part: slice, generated: NDArray[np.bool_]) -> None:
        request, c = self.request, self.loaded.source.config
        # Windows of one session share no position, and none looks like the next token of another.
        positions = request.window * (self.loaded.limits.n_ctx + 1) + np.arange(part.start, part.stop)
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

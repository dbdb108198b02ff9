"""Steps of a model that is laid out: spans of tokens go in, logits come out, and some tokens may be taken back.

A step is a list of spans, each of a sequence: a chunk of a prompt, a decoded token, tokens that are only proposed.
Several sequences can share a step. Where the device has graphs, steps of GRAPH_TOKENS are captured ones.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.ground.errors import CapacityError
from engine.memory.blocks import Sequence
from engine.memory.residency import Residency
from engine.models.layers import KEPT_TOKENS, Buffers, Step
from engine.ops import F32, I32, SMALL_TOKENS, ShortRows
from engine.ops.cuda.device import Device, Graph
from engine.ops.cuda.workspace import Workspace
from engine.ops.device import Memory
from engine.running.forward import GRAPH_TOKENS, Forward
from engine.running.landing import Guesses
from engine.running.misses import CpuMisses
from engine.running.recall import Part

TABLE_STEP = 64  # blocks: widths of the tables that are fed are multiples, so that they are few


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens that continue a sequence. counted: whose routing is counted, bool [T].

    want: indices within the span whose logits are wanted, MAX_ROWS in a step at most. keep: some of the tokens, of a
    step of at most KEPT_TOKENS, may be taken back. recall: what its rows read, None: all. drawn: the last of the tokens
    on the device, int32 [n], where the host does not know them yet; `tokens` has anything in their place. short: of a
    prompt, how many of the last tokens have experts as in a short step, whatever the step (`prefix_tree.short_rows`).
    """

    sequence: Sequence
    tokens: I32
    counted: NDArray[np.bool_]
    want: tuple[int, ...] = ()
    keep: bool = False
    recall: Part | None = None
    drawn: I32 | None = None
    short: int = 0


def short_rows(spans: Many[Span]) -> ShortRows | None:
    """The short rows of a long step, in host memory; None: there are none."""
    n = sum(span.short for span in spans)
    if not n:
        return None
    mask = np.concatenate([np.arange(len(s.tokens)) >= len(s.tokens) - s.short for s in spans])
    first = int(mask.argmax())
    return ShortRows(n, first, None if first + n == len(mask) else mask.astype(np.uint8))


class StepResult:
    """What a step computed, read from the device when asked for; the next step overwrites it.

    logits float32 [R, V] in order of the spans' wants. experts int32, weights float32 [L, T, A]; hidden
    float32 [n_layer, T, D] or None. residual float32 [T, D]: what the head reads. rows: of the wanted logits in the
    buffer, where it has others, too; T: tokens of the step, where it has been filled up. brought: the experts in
    page-locked memory, whose copy is enqueued. check: raises where the step, whose end was waited for, has failed.
    """

    def __init__(
        self, device: Memory, buffers: Buffers, rows: Many[int] | None = None, T: int | None = None,
        brought: I32 | None = None, check: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._check = check
        self.is_waited_for = False  # somebody has waited for draws behind the step, so `experts` are there
        self._device, self._buffers, self.rows, self._T, self._brought = device, buffers, rows, T, brought

    @property
    def logits(self) -> F32:
        """Logits of the wanted tokens."""
        logits: F32 = self._device.read(self._buffers.logits)
        self._check()
        return logits if self.rows is None else logits[list(self.rows)]

    def at(self, row: int) -> int:
        """Where the logits of a wanted token are in the buffer."""
        return row if self.rows is None else self.rows[row]

    @property
    def experts(self) -> I32:
        """The chosen experts; until the next step, where they were brought already."""
        if self._brought is not None:
            if not self.is_waited_for:
                self._device.synchronize()
            experts = self._brought
        else:
            experts = np.asarray(self._device.read(self._buffers.experts))
        self._check()
        return experts[:, : self._T]

    @property
    def weights(self) -> F32:
        """Their weights."""
        weights = np.asarray(self._device.read(self._buffers.weights))
        self._check()
        return weights[:, : self._T]

    @property
    def hidden(self) -> F32 | None:
        """The residual entering each layer, where it was captured."""
        if self._buffers.hidden is None:
            return None
        self._device.synchronize()
        self._check()
        return self._buffers.hidden

    @property
    def features(self) -> F32 | None:
        """What left the captured layers, float32 [n, T, D] on the device, where it was asked for."""
        return self._buffers.features

    @property
    def last_residual(self) -> F32:
        """The last token's, float32 [D]: whatever is not finite in a cache or a state reaches it."""
        return self.residual_at((len(self._buffers.x) if self._T is None else self._T) - 1)

    def residual_at(self, token: int) -> F32:
        """A token's, float32 [D]."""
        residual = np.asarray(self._device.read(self._buffers.x[token : token + 1])[0])
        self._check()
        return residual

    @property
    def residual(self) -> F32:
        """The residual that leaves the last layer."""
        residual = np.asarray(self._device.read(self._buffers.x))
        self._check()
        return residual[: self._T]


class Graphs:
    """Captured work of a device, each piece under a name, and again for each `kind` of step that there is now.

    end: what every piece ends with.
    """

    def __init__(
        self, device: Device, kind: Callable[[], Hashable] = lambda: None, end: Callable[[], None] = lambda: None
    ) -> None:
        self._device, self._kind, self._end = device, kind, end
        self._captured: dict[Hashable, Graph] = {}

    def get(self, name: Hashable, work: Callable[[], None]) -> Graph:
        """The graph of that name, captured from `work` when it is asked for first."""
        key = name, self._kind()
        graph = self._captured.get(key)
        if graph is None:

            def whole() -> None:
                try:
                    work()
                finally:  # also what fails leaves no branch behind
                    self._end()

            graph = self._captured[key] = self._device.capture(whole)
        return graph

    def forget(self) -> None:
        """What is asked for next is captured again."""
        self._captured.clear()


class Steps:
    """Runs steps of `forward`. graphs: None where nothing is captured.

    misses: who has the CPU compute a part of what misses in steps of one token; guesses: who has it brought before
    it is asked for; None: nobody.
    """

    def __init__(self, forward: Forward, residency: Residency, graphs: Graphs | None = None) -> None:
        self.forward, self.residency, self.graphs = forward, residency, graphs
        self.misses: CpuMisses | None = None
        self.guesses: Guesses | None = None
        self._device, self._limits = forward.device, forward.limits
        self._counting = np.arange(SMALL_TOKENS, dtype=np.int32)  # of what is made anew for each short step
        # Experts of a step of which tokens may be taken back, there when its draws are: to read them takes a wait more.
        L, _, A = forward.buffers.experts.shape
        self._brought: I32 | None = None
        if graphs is not None and L * A:
            self._brought = self._device.page_locked(4 * L * KEPT_TOKENS * A).view(np.int32)

    def run(self, spans: list[Span]) -> StepResult:
        """Run one step; sequences grow by their spans' tokens."""
        T, rows = 0, list[int]()
        for span in spans:
            rows += (T + w for w in span.want)
            T += len(span.tokens)
        self._check(spans, T)
        width = self._width(spans, T)
        captured = self.is_captured(width)
        step = self._inputs(spans, width, None if captured else rows)
        if captured:
            self._bring_drawn(spans, self.forward.bring(step))
            self.launch(width, 1 < len(spans) == T, step.decoded, step.recall is not None)
            buffers = self.forward.buffers.first(width, width)
            brought = self._bring(buffers.experts, spans)
            result = StepResult(self._device, buffers, rows, T, brought, self.check)
        else:
            if width == 1:
                self.beside()
            with self.handing(width):
                self.begin(width, step.short is not None and step.short.n == width)
                fed = self.forward.feed(step)
                self._bring_drawn(spans, fed)
                try:
                    buffers = self.forward.run(fed, self.residency)
                finally:
                    self.forward.join()
            if width == 1:
                self.look()
            result = StepResult(self._device, buffers, check=self.check)
        for span in spans:  # what the step alone could see of a window may serve another sequence's next chunk
            span.sequence.reserve(0)
        return result

    def _bring_drawn(self, spans: list[Span], step: Step) -> None:
        """Copy the tokens that are on the device already to where a step reads them."""
        end = 0
        for span in spans:
            end += len(span.tokens)
            if span.drawn is not None:
                to = step.tokens[end - len(span.drawn) : end]
                self._device.copy(self._device.pointer(to), self._device.pointer(span.drawn), to.nbytes)

    def _bring(self, experts: I32, spans: list[Span]) -> I32 | None:
        """Enqueue a copy of int32 [L, T, A] to page-locked memory, if tokens of the step may be taken back."""
        if self._brought is None or not any(s.keep for s in spans):
            return None
        to: I32 = self._brought[: experts.size].reshape(experts.shape)
        self._device.copy(to.ctypes.data, self._device.pointer(experts), to.nbytes)
        return to

    def launch(self, T: int, apart: bool = False, decoded: bool = False, recalls: bool = False) -> None:
        """Enqueue a captured step of T tokens, one of GRAPH_TOKENS, on what was fed; all rows get logits.

        apart: no two of the tokens are of one sequence, but for what fills the step up. decoded: as of `Step`. recalls:
        rows may read a part of their contexts.
        """
        assert self.graphs is not None
        decoded = decoded or apart

        def work() -> None:
            self.forward.features_wanted = True  # whoever follows a later one reads them
            step = replace(self.captured_inputs(T, recalls), apart=apart, decoded=decoded)
            self.forward.run(step, self.residency)

        beside = self.beside(tries=True) if T == 1 else ()
        with self.handing(T) as hands:
            graph = self.graphs.get((T, apart, decoded, recalls, hands, *beside), work)
        self.begin(T)  # right before it: who is awake for the step does not stay so while one is captured
        graph.launch()
        if T == 1:
            self.look()

    def beside(self, tries: bool = False) -> tuple[bool, bool]:
        """Whether the next step of one token has jobs of the CPU, and guesses: what is captured then has the same.

        What a gate has turned off costs nothing so. tries: it may be of the rarer kind, for comparison.
        """
        misses, guesses, ws = self.misses, self.guesses, self.forward.ws
        if misses is None and guesses is None:
            return False, False
        assert isinstance(ws, Workspace)
        self.check()
        with_jobs, with_guesses = misses is not None and misses.is_on, guesses is not None and guesses.next(tries)
        ws.share_misses(misses.cpu if misses is not None and with_jobs else None)
        ws.guess_misses(None if guesses is None else guesses.landing, with_guesses)
        return with_jobs, with_guesses

    @contextmanager
    def handing(self, T: int) -> Iterator[bool]:
        """Whether the next step, of T tokens, hands over a part of what misses; what is enqueued within does the same.

        Of 2 to 32 tokens; `beside` has those of one.
        """
        several = None if self.misses is None else self.misses.several
        if several is None or not several.takes(T):
            yield False
            return
        ws = self.forward.ws
        assert isinstance(ws, Workspace)
        self.check()
        ws.hand_misses(several.jobs)
        try:
            yield True
        finally:
            ws.hand_misses(None)

    def begin(self, T: int, is_short: bool = False) -> None:
        """A step of T tokens is about to be enqueued; of up to 32: as `beside` or `handing` said.

        is_short: it is a long one whose rows are all short.
        """
        if T == 1 and self.misses is not None:
            self.misses.begin()
        elif T <= SMALL_TOKENS and self.misses is not None:
            self.misses.begin_several()
        elif is_short and self.misses is not None:
            self.misses.begin_long(T)

    def look(self) -> None:
        """A step of one token is enqueued: gates look at those before. Who waits for the step loses nothing by it."""
        if self.misses is not None:
            self.misses.look()
        if self.guesses is not None:
            self.guesses.look()

    def check(self) -> None:
        """Raise where a step whose results can be read has failed."""
        if self.misses is not None:
            self.misses.check()

    def shared_width(self, n: int) -> int | None:
        """Tokens of the captured step that n sequences share, a token each; None where there is none."""
        fits = (w for w in GRAPH_TOKENS if n <= w <= self._limits.max_sequences and self.is_captured(w))
        return next(fits, None) if self._limits.max_tokens >= n else None

    def captured(self, name: Hashable, work: Callable[[], None]) -> Graph:
        """The graph of that name, captured from `work` when it is asked for first."""
        assert self.graphs is not None
        return self.graphs.get(name, work)

    def captured_inputs(self, T: int, recalls: bool = False) -> Step:
        """The inputs that a captured step of T tokens reads, of as many sequences as it can have."""
        n = min(T, self._limits.max_sequences)
        step, recalling = self.forward.inputs_of(T, n, T), self.forward.recalling
        return replace(step, recall=recalling.arrays.first(n, T)) if recalls and recalling is not None else step

    def take_back(self, spans: list[Span], n_tokens: list[int], result: StepResult | None = None) -> None:
        """Drop the last n_tokens[i] tokens of spans[i], those of the last step; 0 of one that was not kept.

        Sequences are as if the dropped tokens had never been: what they wrote to caches is written over before it is
        seen again, and recurrent states are replayed from before the step. With the step's result their uses of experts
        are not counted, either; heat, hits and misses are of all that the step read.
        """
        lengths = [len(s.tokens) for s in spans]
        if result is not None and self.residency.experts:
            gone = [s.counted & (np.arange(m) >= m - n) for s, n, m in zip(spans, n_tokens, lengths, strict=True)]
            self.residency.uncount(result.experts[:, np.flatnonzero(np.concatenate(gone))])
        if self.forward.replayed is not None:
            self.forward.replayed.back(sum(n_tokens))
        states = [s.sequence.take_back(n, m) for s, n, m in zip(spans, n_tokens, lengths, strict=True)]
        if not any(states):
            return
        stay = [m - n if pair else 0 for pair, n, m in zip(states, n_tokens, lengths, strict=True)]
        # The other inputs of the step are still there, or there again (`mtp.Predictor.follow_drawn`, of one span); a
        # slot of -1 is a token that is not.
        T = sum(lengths)
        captured = self.is_captured(T)
        step = self.captured_inputs(T) if captured else self.forward.inputs_of(T, len(spans), 0)
        slots = [np.where(np.arange(m) < n, 0, -1) for n, m in zip(stay, lengths, strict=True)]
        pairs = [pair or (s.sequence.state, s.sequence.state) for pair, s in zip(states, spans, strict=True)]
        self._device.write(step.slots[0], np.concatenate(slots).astype(np.int32))
        self._device.write(step.states[: len(spans)], np.array(pairs, np.int32))
        if captured:
            self.captured(("replay", T), lambda: self.forward.replay(step)).launch()
        else:
            self.forward.replay(step)

    def _check(self, spans: list[Span], T: int) -> None:
        assert 0 < T <= self._limits.max_tokens
        assert len(spans) <= self._limits.max_sequences
        assert T <= KEPT_TOKENS or not any(s.keep for s in spans)
        for span in spans:
            end = span.sequence.length + len(span.tokens)
            if end > self._limits.n_ctx:
                raise CapacityError(f"{end} tokens in a context of {self._limits.n_ctx}")

    def _inputs(self, spans: list[Span], width: int, rows: list[int] | None) -> Step:
        """What a step of `width` tokens is fed, NumPy arrays; rows: those whose logits are wanted, None: all.

        What fills a step up is the last token again, that is stored nowhere and routed where it was.
        """
        counting = self._counting[:width] if width <= len(self._counting) else np.arange(width, dtype=np.int32)
        positions = [counting[: len(s.tokens)] + np.int32(s.sequence.length) for s in spans]
        if self.forward.kv.is_pooled:
            # All of them before the first table: to make room for one, blocks of others may leave the pool.
            for s in spans:
                s.sequence.reserve(len(s.tokens))
            self.forward.kv.recall([s.sequence for s in spans])
        slots = [s.sequence.extend(len(s.tokens)) for s in spans]
        owners = [np.full(len(s.tokens), i, np.int32) for i, s in enumerate(spans)]
        sequences, groups = [s.sequence for s in spans], range(len(self.forward.kv.groups))
        forward = self.forward
        recall = None if forward.recalling is None else forward.recalling.prepare(spans, width, forward.ops, forward.ws)

        def padded(values: Many[NDArray[Any]], dtype: type, last: int | None = None) -> NDArray[Any]:
            row: NDArray[Any] = values[0] if len(values) == 1 else np.concatenate(values)
            row = row.astype(dtype, copy=False)
            if len(row) == width:
                return row
            return np.concatenate([row, np.full(width - len(row), row[-1] if last is None else last, dtype)])

        return Step(
            tokens=padded([s.tokens for s in spans], np.int32),
            positions=padded(positions, np.int32),
            sequence=padded(owners, np.int32),
            slots=tuple(padded([s[g] for s in slots], np.int32, -1) for g in groups),
            block_table=self.tables(sequences),
            states=np.array([s.sequence.next_states(s.keep) for s in spans], np.int32),
            counted=padded([s.counted for s in spans], np.uint8, 0),
            rows=counting if rows is None else np.asarray(rows, dtype=np.int32),
            # Only imposed choices ask for it of steps with drafts, which are captured once more for them.
            decoded=self.forward.replayed is not None and any(s.keep for s in spans),
            spans=tuple((len(s.tokens), s.sequence.length) for s in spans) if width > SMALL_TOKENS else (),
            recall=recall,
            short=short_rows(spans) if width > SMALL_TOKENS and self.residency.experts else None,
        )

    def tables(self, sequences: list[Sequence]) -> tuple[I32, ...]:
        """Block tables as wide as the longest of them, in round numbers: nothing looks behind a step's positions."""
        longest = max((len(blocks.held) for sequence in sequences for blocks in sequence.groups), default=0)
        return self.forward.tables(sequences, min(-(-longest // TABLE_STEP) * TABLE_STEP, self.forward.table_width))

    def is_captured(self, T: int) -> bool:
        """Whether a step of T tokens is a captured one, which computes the logits of all its rows."""
        return (
            self.graphs is not None and T in GRAPH_TOKENS and self._limits.max_rows >= T
            and self.forward.buffers.hidden is None
        )  # fmt: skip

    def _width(self, spans: list[Span], T: int) -> int:
        """Tokens of the step that T are run in: more where one token each of several sequences make up no graph."""
        larger = (n for n in GRAPH_TOKENS if T <= n <= self._limits.max_tokens and self.is_captured(n))
        return next(larger, T) if 1 < len(spans) == T else T

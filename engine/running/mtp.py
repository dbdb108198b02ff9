"""Drafts by the block that a model's file holds for them (`nextn`, engine/models/nextn.py).

The block has a cache: one more layer in the model's, with the blocks and slots of the sequence. Position p of it is
made of the model's residual at p and of the token at p + 1, so it is told of every step when it is known which of its
tokens stay and what follows them, a chunk of a prompt like a decoded token; a step that verifies a draft on a device
it follows before that, with what is drawn behind each token. A draft goes on from there alone, on what
the block itself has made; what a draft leaves in the cache is written over before it is seen again.

What it was not told of has no entry: zeros, or what a draft or another sequence left there. So it is with a prefix that
was computed without the block. The last position of a prefix has the token that followed when it was computed; whoever
goes on from there with another token has that one entry of the other's. All of that can spoil a draft, and no token.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

import numpy as np

from engine.drafting.confidence import sureness
from engine.drafting.source import Draft, Promise
from engine.formats.quants import QTensor
from engine.ground.errors import CapacityError
from engine.memory.blocks import Sequence
from engine.memory.residency import ExpertTensors, Residency, Tier, slot_bytes
from engine.models import nextn
from engine.models.layers import Buffers, ModelConfig, Pass, Step
from engine.ops import F32, I32, SMALL_TOKENS
from engine.ops.cuda.device import Device
from engine.ops.cuda.sampling import HISTORY_TOKENS, Sampler
from engine.ops.device import Array
from engine.placing import policy
from engine.placing.placement import Placement
from engine.running.device_drafts import GREEDY, Timed, UnderWay, known_draft
from engine.running.forward import GRAPH_TOKENS
from engine.running.reply import Reply
from engine.running.stepping import Span, Steps

SOURCE = "mtp"
MOST_TOKENS = 4  # of a draft: the block was trained to predict one, and each further one is less likely to stay
# Chances of a draft's tokens, as `gate.Priors`: what such blocks reach on code; the first drafts correct it.
PRIORS = ((0.75, 0.65, 0.55, 0.50, 0.50, 0.50),)
# Ids that a draft is chosen among where text has few others. They are in the order of a vocabulary's merges, frequent
# ones first, and most of what a draft reads is the head (after FR-Spec, arXiv:2502.14856).
SHORT_HEAD = 96 << 10
MOST_BEYOND = 0.03  # of the tokens, of which as many drafts end early: the head of all costs a twentieth of a step more
SOON = 1 / 128  # what one token counts of what is known of those before it


@dataclass(frozen=True, slots=True)
class Fed:
    """A span of the last step, of which `stay` tokens do. history: of the sequence, and the tokens known to follow."""

    span: Span
    stay: int
    history: Many[int]


@dataclass(frozen=True, slots=True)
class Asked:
    """A draft of at most `most` tokens that is wanted behind a history, of which all but the last token are cached."""

    sequence: Sequence
    history: Many[int]
    most: int


@dataclass(slots=True)
class _Tail:
    """Where the block stands in a sequence: behind `length` positions, the residual of whose last one lies in a row.

    token: what followed that; None: it was not known, and the residual is still the model's. beyond: how many of the
    tokens lately have ids that a short head has not.
    """

    row: int
    length: int
    token: int | None
    beyond: float = 0.0

    def told(self, ids: I32) -> None:
        """These tokens came."""
        left = (1 - SOON) ** len(ids)
        self.beyond = left * self.beyond + (1 - left) * float(np.mean(ids >= SHORT_HEAD)) if len(ids) else self.beyond


def whole(experts: tuple[ExpertTensors, ...]) -> Placement:
    """All experts of a block in slots, where they stay."""
    ids = tuple(tuple(range(e.gate.shape[0])) for e in experts)
    return Placement(tuple(map(len, ids)), ids, tuple(() for _ in ids), tuple(map(slot_bytes, experts)))


class Predictor:
    """Runs the block of a model that is laid out: its experts and buffers are allocated here, once.

    tier: where the bytes of its experts come from (None: it has none). gpu: the device, where that makes each token of
    a draft the input of the next by itself. A call writes over the inputs of the last step, and a draft over its
    logits: tokens are taken back before, and drawn, but for `follow_drawn`. Its residual stays.
    """

    def __init__(self, steps: Steps, tier: Tier | None, gpu: Device | None = None) -> None:
        forward = self.forward = steps.forward
        assert forward.block is not None, "the model was laid out without its block"
        self.steps, self.block, self.device = steps, forward.block, forward.device
        device, limits, c = self.device, forward.limits, forward.config
        self.residency: Residency | None = None
        if tier is not None:
            experts = self.block.experts
            self.residency = Residency(experts, whole(experts), policy.LRU, device=device, tier=tier)
        self._sampler = None if gpu is None else Sampler(gpu, limits)
        self._head = self.block.output or forward.weights.output
        self._short_head: tuple[QTensor, Sampler] | None = None
        if gpu is not None and limits.n_vocab >= SHORT_HEAD * 3 // 2:
            self._short_head = self._head.first(SHORT_HEAD), Sampler(gpu, replace(limits, n_vocab=SHORT_HEAD))
        self._drawn = device.upload(np.zeros(MOST_TOKENS, np.int32))  # what is not drawn is a token all the same
        self._timed = Timed(device.synchronize)  # drafts, by tokens and whether by the short head
        self._long = replace(
            forward.buffers, x=forward.buffers.y, y=forward.buffers.x, hidden=None,
            experts=device.empty((1, limits.max_tokens, c.n_expert_used), np.int32),
            weights=device.empty((1, limits.max_tokens, c.n_expert_used), np.float32),
        )  # fmt: skip
        x, y, h = (device.empty((limits.max_sequences, c.n_embd), np.float32) for _ in range(3))
        # Of drafts, in whose steps two residuals take turns.
        self._short = tuple(replace(self._long, x=a, y=b, h=h) for a, b in ((x, y), (y, x)))
        self._rows = device.empty((max(limits.places, limits.max_sequences), c.n_embd), np.float32)
        self._followed: Span | None = None  # of the last step, before it was known which of its tokens stay
        self._tails: dict[Sequence, _Tail] = {}  # in the order in which they were told
        self._kv = nextn.LastLayer(forward.kv)
        (own,), (self._group,) = self._kv.layers, self._kv.group_of
        assert own is not None
        for array in (own.k, own.v, own.k_scale, own.v_scale):  # whatever is read was written, or is zero
            if array is not None and device.name != "host memory":  # there it is, and pages that nobody wrote are none
                device.set_bytes(device.pointer(array), 0, int(array.nbytes))

    # --- following ------------------------------------------------------------------------------------

    def follow(self, fed: Many[Fed]) -> None:
        """Go on with all spans of the last step, in its order, when it is known which of their tokens stay.

        Sequences are as they are then, and none was released.
        """
        if len(fed) == 1 and fed[0].span is self._followed:
            self._followed, b = None, self._long.first(len(fed[0].span.tokens), 0)
            self._tell_last(fed[0], 0, b)
            return
        self._followed = None
        self._settle([(one.span.sequence, one.history) for one in fed if one.stay])
        lengths = [len(one.span.tokens) for one in fed]
        ends = np.cumsum(lengths).tolist()
        tokens, positions, slots = (np.full(ends[-1], value, np.int32) for value in (0, 0, -1))
        for one, n, end in zip(fed, lengths, ends, strict=True):
            sequence, at = one.span.sequence, end - n
            start = sequence.length - one.stay
            follow = one.history[start + 1 : sequence.length + 1]  # without the last one where that is not known yet
            known = slice(at, at + len(follow))
            positions[at:end] = np.arange(start, start + n)
            tokens[known] = follow
            slots[known] = self._slots(sequence, positions[known])
        b = self._long.first(len(tokens), 0)
        spans = [(n, int(positions[end - 1]) + 1) for n, end in zip(lengths, ends, strict=True)]
        of = np.repeat(np.arange(len(fed), dtype=np.int32), lengths)
        step = self._step(tokens, positions, slots, [one.span.sequence for one in fed], of, spans)
        self._run(step, b, self.forward.weights.output_norm)
        for one, n, end in zip(fed, lengths, ends, strict=True):
            self._tell_last(one, end - n, b)

    def follow_drawn(self, span: Span, history: Many[int], drawn: I32) -> None:
        """Go on with all tokens of a step of one span, before it is known which stay; `follow` is told of it then.

        history: before the step. drawn: int32 [n], what the device draws behind each token: where that token stays, it
        is what follows. What else there is in the cache then is written over before it is seen. The step's inputs are
        fed again, the same positions of the same sequence, so what is taken back then still finds them.
        """
        sequence, n = span.sequence, len(span.tokens)
        self._settle([(sequence, history)], n)
        positions, zeros = np.arange(sequence.length - n, sequence.length, dtype=np.int32), np.zeros(n, np.int32)
        slots = self._slots(sequence, positions)
        step = self._step(zeros, positions, slots, [sequence], zeros, [(n, sequence.length)])
        self.device.copy(self.device.pointer(step.tokens), self.device.pointer(drawn), 4 * n)
        self._run(step, self._long.first(n, 0), self.forward.weights.output_norm)
        self._followed = span

    def _tell_last(self, one: Fed, at: int, b: Buffers) -> None:
        """Keep where the block stands behind a span whose rows begin at `at`; the model's residual is still there."""
        if not one.stay:
            return
        sequence, last = one.span.sequence, at + one.stay - 1
        follow = one.history[sequence.length - one.stay + 1 : sequence.length + 1]
        tail = self._begin(sequence, int(follow[-1]) if len(follow) == one.stay else None)
        tail.told(np.asarray(follow, np.int32))
        x = b.y if tail.token is None else b.x
        self._copy(x[last : last + 1], self._row(tail))

    def knows(self, sequence: Sequence, history: Many[int]) -> bool:
        """Whether a draft can go on behind a history."""
        tail = self._tails.get(sequence)
        return tail is not None and tail.length == sequence.length == len(history) - 1

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended, or lies elsewhere."""
        self._tails.pop(sequence, None)

    def _begin(self, sequence: Sequence, token: int | None) -> _Tail:
        """The tail of a sequence that is told of; who was not for the longest time makes room."""
        tail = self._tails.pop(sequence, None)
        if tail is None:
            free = set(range(len(self._rows))) - {other.row for other in self._tails.values()}
            row = min(free) if free else self._tails.pop(next(iter(self._tails))).row
            tail = _Tail(row, 0, None)
        tail.length, tail.token = sequence.length, token
        self._tails[sequence] = tail
        return tail

    def _settle(self, known: Many[tuple[Sequence, Many[int]]], beyond: int = 0) -> None:
        """Go on by the one position whose next token was not known then and is in a history now.

        beyond: positions that a sequence has of a step under way.
        """
        found = [(s, t, h) for s, h in known if (t := self._tails.get(s)) and t.token is None and t.length < len(h)]
        # What lies far behind is of no use any more, and its block may have left the pool, where nothing is written.
        for sequence in [s for s, t, _ in found if t.length + SMALL_TOKENS <= s.length - beyond]:
            self.forget(sequence)
        found = [(s, t, h) for s, t, h in found if s in self._tails]
        if not found:
            return
        for i, (_, tail, history) in enumerate(found):
            self._copy(self._row(tail), self._short[0].x[i : i + 1])
            tail.token = int(history[tail.length])
        positions = np.array([tail.length - 1 for _, tail, _ in found], np.int32)
        b = self._short[1].first(len(found), 0)
        slots = np.concatenate([self._slots(s, p) for (s, _, _), p in zip(found, positions[:, None], strict=True)])
        tokens = np.array([tail.token for _, tail, _ in found], np.int32)
        step = self._step(tokens, positions, slots, [s for s, _, _ in found], np.arange(len(found), dtype=np.int32))
        self._run(step, b, self.forward.weights.output_norm)
        for i, (_, tail, _) in enumerate(found):
            self._copy(b.x[i : i + 1], self._row(tail))

    # --- drafting -------------------------------------------------------------------------------------

    def drafts(self, asked: Many[Asked], beyond: float | None = None, sure: bool = False) -> list[Draft | None]:
        """The likeliest tokens behind each of some histories, one after the other; None where the block is not there.

        As many at a time as share a step. Fewer than wanted where the context or the cache ends. Where a device draws
        them they may be under way: until the next are asked for. beyond: in place of what is known of a sequence. sure:
        as of `Source.draft`.
        """
        self._settle([(one.sequence, one.history) for one in asked])
        most = [self._room(one) for one in asked]
        going = [i for i, n in enumerate(most) if n > 0]
        if self._sampler is not None:
            both = zip(asked, most, strict=True)
            return [self._drafted(one, n, beyond, sure) if n > 0 else None for one, n in both]
        found: list[Draft | None] = [None] * len(asked)
        if going:
            drafted = self._drafted_together([asked[i] for i in going], [most[i] for i in going])
            for i, (tokens, chances) in zip(going, drafted, strict=True):
                found[i] = Draft(SOURCE, 0, tuple(tokens), sure=chances) if tokens else None
        return found

    def _drafted_together(self, asked: Many[Asked], most: Many[int]) -> list[tuple[list[int], list[float]]]:
        """Tokens of drafts, and how sure the block is of each: in steps that they share, and the host draws."""
        self._start(asked)
        sequences, found = [one.sequence for one in asked], [list[int]() for _ in asked]
        all_sure = [list[float]() for _ in asked]
        rows, norm = np.arange(len(asked), dtype=np.int32), nextn.last_norm(self.block, self.forward.weights)
        for n in range(max(most)):
            b = self._short[n % 2].first(len(asked), len(asked))
            tokens, slots = np.zeros(len(asked), np.int32), np.full(len(asked), -1, np.int32)
            positions = np.array([s.length - 1 for s in sequences], np.int32)
            going = [i for i, drafted in enumerate(found) if n == len(drafted) < most[i]]
            # The others' rows mean nothing and are stored nowhere.
            for i in going if n else ():
                tokens[i], positions[i] = found[i][-1], positions[i] + n
                slots[i : i + 1] = self._slots(sequences[i], positions[i : i + 1])
            step = self._step(tokens, positions, slots, sequences, rows, wanted=len(asked))
            if n:
                self._run(step, b, norm)
            else:
                nextn.head(self.block, self.forward.weights, self._pass(step, b))
            logits = np.asarray(self.device.read(b.logits))
            for i in going:
                token = int(logits[i].argmax())
                if np.isfinite(logits[i, token]):  # as argmax finds what is not
                    found[i].append(token)
                    all_sure[i] += sureness(logits[i : i + 1])
        return list(zip(found, all_sure, strict=True))

    def _drafted(self, one: Asked, most: int, beyond: float | None, sure: bool) -> Draft | None:
        """A draft of so many tokens, each of which the device makes the input of its next step.

        Nobody waits for the tokens, unless it is to be known how sure the block is of them: the step that verifies them
        is enqueued behind.
        """
        assert self.steps.graphs is not None and self._sampler is not None
        beyond = self._tails[one.sequence].beyond if beyond is None else beyond
        is_short = self._short_head is not None and beyond <= MOST_BEYOND
        sampler, name = self._short_head[1] if self._short_head and is_short else self._sampler, (most, is_short, sure)
        self._start([one])
        n, zeros = len(one.history) - 1, np.zeros(1, np.int32)
        self._step(zeros, zeros, zeros - 1, [one.sequence], zeros, wanted=1)
        # As the block is a position behind the model, what is drawn first is its input behind n positions. The limit is
        # not met: the last token is an input, too, of the step that verifies.
        recent = one.history[max(0, n - HISTORY_TOKENS) : n]
        sampler.prepare(GREEDY, recent, n, (), most + 1, logprobs=0 if sure else None)
        graph = self.steps.graphs.get((SOURCE, *name), lambda: self._chain(most, is_short, sure))
        if sure:
            return known_draft(SOURCE, sampler, most, graph.launch)
        seconds, is_known = self._timed.launch(name, graph.launch)
        draft = Draft(SOURCE, 0, UnderWay(sampler, most), self._drawn[:most], seconds)
        return draft.known() if is_known else draft

    def _start(self, asked: Many[Asked]) -> None:
        """Copy the tails of sequences to the first rows that a draft begins with."""
        for i, one in enumerate(asked):
            self._copy(self._row(self._tails[one.sequence]), self._short[0].x[i : i + 1])

    def _chain(self, most: int, is_short: bool, sure: bool) -> None:
        """What is captured: a head and a draw, and then steps of what was drawn, each with a head and a draw.

        sure: behind each draw, how likely the token was.
        """
        f, head, sampler = self.forward, self._head, self._sampler
        if is_short and self._short_head is not None:
            head, sampler = self._short_head
        assert sampler is not None
        step, norm = f.inputs_of(1, 1, 1), nextn.last_norm(self.block, f.weights)
        no_rows = step.rows[:0]
        for n in range(most):
            b = self._short[n % 2].first(1, 1)
            if n:
                self._work(replace(step, tokens=self._drawn[n - 1 : n], rows=no_rows), b, norm)
            logits = b.logits.reshape(-1)[: head.shape[0]].reshape(1, -1)
            nextn.head(self.block, f.weights, self._pass(step, replace(b, logits=logits)), head)
            sampler.step(logits, self._drawn[n : n + 1], step.positions, f.slots, f.block_tables, greedy=True)
            if sure:
                sampler.describe(logits)

    def _room(self, one: Asked) -> int:
        """How many tokens can be drafted; blocks of the cache are taken for them."""
        tail, length = self._tails.get(one.sequence), one.sequence.length
        if tail is None or (tail.length, tail.token) != (length, one.history[-1]) or len(one.history) != length + 1:
            return 0
        most = min(one.most, self.forward.limits.n_ctx - 1 - length)
        try:
            one.sequence.reserve(max(0, most - 1))
        except CapacityError:
            most = min(most, one.sequence.reserved_tokens - length - 1)  # the step that verifies has one token more
        return most

    def rehearse(self, n: int) -> None:
        """Enqueue a step of n tokens that mean nothing, and one of so many drafts: for who counts what is launched."""
        sequence, norm = self.forward.kv.sequence(), self.forward.weights.output_norm
        try:
            for buffers, T, wanted in ((self._long, n, 0), (self._short[0], m := min(n, len(self._short[0].x)), m)):
                zeros, positions = np.zeros(T, np.int32), np.arange(T, dtype=np.int32)
                step = self._step(zeros, positions, zeros - 1, [sequence], zeros, [(T, T)], wanted)
                self._run(step, buffers.first(T, wanted), norm)
            if self._sampler is not None:
                for is_short in {False, self._short_head is not None}:
                    self._chain(1, is_short, sure=True)
        finally:
            sequence.release()

    # --- steps ----------------------------------------------------------------------------------------

    def _step(
        self, tokens: I32, positions: I32, slots: I32, sequences: list[Sequence], of: I32,
        spans: Many[tuple[int, int]] = (), wanted: int = 0,
    ) -> Step:  # fmt: skip
        """Feed a step; of: the sequence of each token. spans: as of `Step`. wanted: logits of the first so many."""
        nowhere, groups = np.full(len(tokens), -1, np.int32), range(len(self.forward.kv.groups))
        return self.forward.feed(
            Step(
                tokens, positions, of, tuple(slots if g == self._group else nowhere for g in groups),
                self.steps.tables(sequences), np.zeros((len(sequences), 2), np.int32),
                np.zeros(len(tokens), np.uint8), np.arange(wanted, dtype=np.int32),
                spans=tuple(spans) if len(tokens) > SMALL_TOKENS else (),
            )
        )  # fmt: skip

    def _run(self, step: Step, b: Buffers, norm: F32) -> None:
        """Enqueue a step that was fed, a captured one where a step of the model would be."""
        T, graphs = len(step.tokens), self.steps.graphs
        if graphs is None or T not in GRAPH_TOKENS:
            self._work(step, b, norm)
            return
        at = self.forward.inputs_of(T, min(T, self.forward.limits.max_sequences), len(step.rows))
        name = SOURCE, T, len(step.rows), *(self.device.pointer(array) for array in (b.x, norm))
        graphs.get(name, lambda: self._work(at, b, norm)).launch()

    def _work(self, step: Step, b: Buffers, norm: F32) -> None:
        if self.forward.replayed is not None:
            self.forward.replayed.n_rows = 0  # imposed choices are of the model's own layers
        nextn.forward(self.forward.arch, self.block, self.forward.weights, self._pass(step, b), norm)

    def _pass(self, step: Step, b: Buffers) -> Pass[ModelConfig]:
        f = self.forward
        return Pass(f.config, f.ops, f.ws, step, self._kv, self.residency, f.ropes, (self.block.layer.norm,), b)

    def _slots(self, sequence: Sequence, positions: I32) -> I32:
        """Where positions of a sequence lie in the block's cache."""
        return sequence.groups[self._group].slots(positions)

    def _row(self, tail: _Tail) -> Array:
        return self._rows[tail.row : tail.row + 1]

    def _copy(self, x: Array, to: Array) -> None:
        self.forward.ops.copy(self.forward.ws, x, to)


class ByBlock:
    """What drafts for one reply by the block (`source.Source`); the predictor is told of whole steps."""

    def __init__(self, predictor: Predictor, reply: Reply) -> None:
        self._predictor, self._reply = predictor, reply

    def promise(self, history: Many[int], most: int, least: float = 0.0) -> Promise | None:
        """As `Source.promise`."""
        sequence = self._reply.sequence
        if most < 1 or sequence is None or not self._predictor.knows(sequence, history):
            return None
        return Promise(SOURCE, 0, min(most, MOST_TOKENS))

    def draft(self, n_tokens: int, sure: bool = False) -> Draft | None:
        """As `Source.draft`."""
        sequence = self._reply.sequence
        assert sequence is not None
        return self._predictor.drafts([Asked(sequence, self._reply.history, n_tokens)], sure=sure)[0]

    def close(self) -> None:
        """As `Source.close`."""
        if self._reply.sequence is not None:
            self._predictor.forget(self._reply.sequence)

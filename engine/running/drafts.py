"""Drafts of the replies of an engine: who drafts for a reply, and how much of it the next step gets.

Sources and the gate know nothing of a model (engine/drafting/); here is what a step has room for: rows whose bits are
those of single steps, widths that are captured, blocks and recurrent states. Nothing is given up for a draft.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import partial
from typing import Any

from engine.drafting import dflash, lookup
from engine.drafting.dflash import DFlash, Drafter, drafter_limits
from engine.drafting.drafter import DrafterFile
from engine.drafting.gate import Drafting, Gate
from engine.drafting.lookup import Lookup
from engine.drafting.outcomes import Record, Tally
from engine.drafting.source import Draft, Promise, Source
from engine.memory.blocks import Sequence
from engine.memory.kv import KVCache
from engine.models.layers import KEPT_TOKENS
from engine.ops import KV_BLOCK_TOKENS, Limits
from engine.ops.cuda.device import Device
from engine.ops.interface import Workspace
from engine.running import mtp
from engine.running.decoding import Proposal
from engine.running.device_drafts import CapturedDrafter
from engine.running.drawing import Behind
from engine.running.forward import Forward, Put, placed
from engine.running.mtp import ByBlock, Predictor
from engine.running.reply import Reply
from engine.running.stepping import StepResult, Steps

EVERY_WIDTH = 8  # tokens of a step up to which there is one of each width, where none are captured
TELL_EVERY = 8  # plain steps, of which the gate is told what the last one took
IDLE_STEPS = 48  # without a computed draft that is worth it, after which a reply goes on without the drafter
ODD_STEP = 1.5  # times what a step was expected to take: what takes longer is the machine's doing
MOST_LOST, MOST_WON = 6, 16  # plain steps, whose time a reply may lose by that, and what it won beforehand at most
MOST_RESTING = 15  # replies that begin without it then, at most; one each time that it happens
MOST_RINGS = 4  # replies that a drafter drafts for at a time
WIDTH_STEP = 4  # and of wider ones, those of its multiples: few enough to know what each takes


class Drafts:
    """Proposes for replies that were begun here (`decoding.Proposer`).

    memory_bytes: of texts of earlier requests. drafter: beside lookup, of as many replies at a time as it has rings; or
    predictor, the block of the model's file.
    """

    def __init__(
        self, steps: Steps, memory_bytes: int, drafter: Drafter | None = None, predictor: Predictor | None = None
    ) -> None:
        self._steps, self._limits = steps, steps.forward.limits
        self._most = min(KEPT_TOKENS, self._limits.max_tokens, self._limits.max_rows)
        self._captured = frozenset(n for n in range(1, 1 + self._most) if steps.is_captured(n))
        self._memory = lookup.Memory(memory_bytes)
        self._gate = Gate({lookup.NAME: lookup.PRIORS, dflash.NAME: dflash.PRIORS, mtp.SOURCE: mtp.PRIORS})
        self._drafter, self._predictor = drafter, predictor
        self._making_s = 0.0  # of the drafts that were proposed last
        self._untold, self._tell_at = 0, 1  # plain steps, and how many are told of at once
        self._untold_of = 1  # replies that shared each
        self._in_vain = 0  # looks, that a reply begins with
        self._unweighed = 0  # replies of which nobody knows whether it pays to follow their steps
        self._resting = self._rest = 0  # replies that are to begin without the drafter, and how many do so

    def begin(self, reply: Reply, prediction: Many[int] = ()) -> None:
        """Draft for a reply; prediction: tokens that may come in it. One under a form gets no drafts."""
        if reply.grammar is None:
            source = Lookup(self._memory, prediction[: self._limits.n_ctx])
            follower = self._follower(reply)
            record = Record(sampled=reply.params.temperature > 0, followed=follower is not None)
            reply.drafting = Drafting(source, follower, 0 if prediction else self._in_vain, record=record)

    def end(self, reply: Reply) -> None:
        """A reply has ended, or was given up."""
        if reply.drafting is not None:
            reply.drafting.source.close()
            self._in_vain = reply.drafting.in_vain // 2  # the next is much like it, and may not be
            if reply.drafting.follower is not None:
                reply.drafting.follower.close()
                if reply.drafting.won_s > 0.0:
                    self._rest = 0
                elif reply.drafting.is_unweighed:
                    # One does without, so that it is known what a reply takes then, where it tells: once in a while.
                    self._resting = max(self._resting, int(self._unweighed % MOST_RESTING == 0))
                    self._unweighed += 1
            reply.drafting = None
        self.remember(reply)

    def remember(self, reply: Reply) -> None:
        """What a reply that has ended was, its prompt with it, may come again."""
        self._memory.add(reply.history)

    def leaves(self, sequence: Sequence) -> None:
        """A sequence is given back, or moved out."""
        if self._predictor is not None:
            self._predictor.forget(sequence)

    def propose(self, replies: Many[Reply]) -> list[Draft | None] | None:
        """As `decoding.Proposer.propose`."""
        self._making_s = 0.0
        self._gate.at(_depth(replies))
        if len(replies) == 1:
            drafting = replies[0].drafting
            if drafting is None:
                return None
            if drafting.follower is None and self._is_in_vain(replies[0], drafting):
                return self._nothing(replies)
        most, room = self._most - len(replies), _Room(self._steps.forward.kv)
        sampled = any(reply.params.temperature > 0 for reply in replies)
        least = self._gate.least_of_each(len(replies), sampled) if len(replies) > 1 else 0.0
        chosen = [self._chosen(reply, most, room, len(replies), least) for reply in replies]
        offers = [None if one is None else (one[1], one[2]) for one in chosen]
        counts = self._gate.share(offers, self._fits, most) if any(offers) else [0] * len(replies)
        for reply, one, n in zip(replies, chosen, counts, strict=True):
            if one is not None and reply.drafting is not None:
                reply.drafting.looked(n > 0)
        if not any(counts):
            return self._nothing(replies)
        alone = sum(map(bool, counts)) == 1
        one = chosen[0]
        if len(replies) == 1 and one is not None:
            return [self._cut(*one, counts[0])]
        return [self._drafted(one[0], n, alone) if one and n else None for one, n in zip(chosen, counts, strict=True)]

    def _nothing(self, replies: Many[Reply]) -> list[Draft | None] | None:
        """No draft for anybody. Of most such steps nothing is told: they are short, and many."""
        n, sampled, followed = len(replies), replies[0].params.temperature > 0, self.follows(replies)
        is_told = n != self._untold_of or followed or not self._gate.costs(n, sampled).is_known
        self._untold, self._untold_of = (1 if n != self._untold_of else self._untold + 1), n
        return [None] * n if is_told or self._untold >= self._tell_at else None

    def behind(self, proposals: Many[Proposal]) -> Behind | None:
        """As `decoding.Proposer.behind`: the block follows all tokens of a step that verifies a draft."""
        predictor, p = self._predictor, proposals[0]
        if predictor is None or len(proposals) > 1 or not p.follow or p.stayed or not self.follows([p.reply]):
            return None
        return partial(predictor.follow_drawn, p.span, p.reply.history)

    def fed(self, proposals: Many[Proposal], result: StepResult) -> None:
        """As `decoding.Proposer.fed`."""
        if (self._predictor is None and self._drafter is None) or not self.follows([p.reply for p in proposals]):
            return
        stay = [len(p.span.tokens) - len(p.follow) + p.stayed for p in proposals]
        if self._predictor is not None:
            self._predictor.follow(
                [mtp.Fed(p.span, n, p.reply.history) for p, n in zip(proposals, stay, strict=True)]
            )  # fmt: skip
            return
        row = 0
        for p, n in zip(proposals, stay, strict=True):
            follower = None if p.reply.drafting is None else p.reply.drafting.follower
            if isinstance(follower, DFlash) and result.features is not None:
                follower.feed(result.features[:, row : row + n], p.span.sequence.length - n)
            row += len(p.span.tokens)

    def follows(self, replies: Many[Reply]) -> bool:
        """As `decoding.Proposer.follows`."""
        return any(reply.drafting is not None and reply.drafting.follower is not None for reply in replies)

    def reads(self, replies: Many[Reply]) -> bool:
        """As `decoding.Proposer.reads`."""
        return self.follows(replies)

    def fared(self, proposals: Many[Proposal], seconds: float) -> None:
        """As `decoding.Proposer.fared`."""
        fared = [
            None
            if p.draft is None or p.reply.drafting is None
            else (p.draft, p.reply.drafting.record, len(p.draft.tokens), p.stayed)
            for p in proposals
        ]
        if any(fared):
            self._gate.note(fared, seconds, self._making_s)
            if self._gate.is_due:
                self._tell_at = 1
        else:
            n = max(1, self._untold) if len(proposals) == self._untold_of else 1
            reply = proposals[0].reply
            self._gate.plain(
                len(proposals), (seconds - self._making_s) * n, n, reply.params.temperature > 0, self.follows([reply])
            )  # fmt: skip
            self._untold, self._tell_at = 0, TELL_EVERY
        if len(proposals) == 1:
            self._weigh(proposals[0], seconds)

    def _weigh(self, p: Proposal, seconds: float) -> None:
        """What it won or cost a reply that its steps are followed; too much is lost: it goes on without.

        A step with a computed draft is compared with steps alone, all others for what they take longer.
        """
        drafting = p.reply.drafting
        if drafting is None or drafting.follower is None:
            return
        sampled = drafting.record.sampled
        alone, followed = (self._gate.costs(1, sampled, one) for one in (False, True))
        drafting.is_unweighed = not alone.is_known
        if not (alone.is_known and followed.is_known):
            return
        if p.draft is not None and p.draft.source != lookup.NAME:
            most_s = ODD_STEP * (self._making_s + followed.of(len(p.draft.tokens)))
            won_s = alone.plain * (1 + p.stayed) - min(seconds, most_s)
        else:
            won_s = min(0.0, alone.plain - followed.plain) - self._making_s
        drafting.won_s = min(drafting.won_s + won_s, MOST_WON * alone.plain)
        if drafting.won_s < -MOST_LOST * alone.plain:
            self._drop(drafting)

    def went(self, replies: Many[Reply], seconds: float, n_steps: int) -> None:
        """As `decoding.Proposer.went`."""
        self._untold = 0
        self._gate.at(_depth(replies))
        self._gate.plain(len(replies), seconds, n_steps, replies[0].params.temperature > 0)

    def met(self, reply: Reply, draft: Draft, n: int, stayed: int) -> None:
        """As `decoding.Proposer.met`."""
        if reply.drafting is not None:
            self._gate.met(draft, reply.drafting.record, n, stayed)

    def plain_s(self, replies: Many[Reply]) -> float:
        """As `decoding.Proposer.plain_s`."""
        costs = self._gate.costs(len(replies), replies[0].params.temperature > 0)
        return costs.plain if costs.is_known else 0.0

    @property
    def widths(self) -> list[int]:
        """Tokens that steps of a reply alone may have, one of them not of a draft."""
        return [n for n in range(1, 1 + self._most) if self._fits(n)]

    def begin_costs(self, seconds: dict[int, float]) -> None:
        """What steps of so many tokens of one reply took when they were tried, one among them."""
        self._gate.begin({n - 1: s for n, s in seconds.items()})

    @property
    def nbytes(self) -> int:
        """Bytes that the drafter's buffers take of the device."""
        return 0 if self._drafter is None else self._drafter.nbytes

    def stats(self) -> dict[str, Any]:
        """Tokens drafted and accepted by source, bytes of texts, and what steps take, in ms.

        step_ms: by replies that share them (0: one that is sampled), then by tokens of drafts in them, as text; at the
        depth of the last one, of replies whose steps nobody follows. What was not seen is as it was tried at the start.
        """
        return {
            "tokens": tallied(self._gate.tallies),
            "memory_bytes": self._memory.n_tokens * lookup.TOKEN_BYTES,
            "step_ms": {
                str(n): {str(k): round(1000 * s, 4) for k, s in costs.measured().items()}
                for n, costs in self._gate.all_costs().items()
            },
        }

    def rehearse(self) -> None:
        """Have the drafter do once whatever it does, before anybody is drafted for."""
        if self._drafter is not None:
            self._drafter.rehearse()

    def close(self) -> None:
        """Forget all texts; nobody may be drafted for any more."""
        self._memory.close()
        if self._drafter is not None:
            self._drafter.close()

    def _follower(self, reply: Reply) -> Source | None:
        """What computes drafts for a reply, where it has room, and has not been found to be of no use lately."""
        if self._resting:
            self._resting -= 1
            return None
        if self._predictor is not None:
            return ByBlock(self._predictor, reply)
        ring = None if self._drafter is None else self._drafter.ring()
        return None if self._drafter is None or ring is None else DFlash(self._drafter, ring)

    def _is_in_vain(self, reply: Reply, drafting: Drafting) -> bool:
        """Whether it is known, of a reply that is alone, that its next step gets no draft.

        To look costs microseconds, and most looks find nothing: after many of these it is done for every fourth token.
        """
        if drafting.skipped:
            drafting.skipped -= 1
            return True
        gate, record = self._gate, drafting.record
        promise = drafting.source.promise(reply.history, self._most - 1, gate.least(record))
        if promise is None or gate.decided(promise, record) == 0:
            drafting.looked(found=False)
            return True
        return False

    def _chosen(
        self, reply: Reply, most: int, room: _Room, n_replies: int, least: float
    ) -> tuple[Source, Promise, Record] | None:
        """The best that may follow a reply's last token, as far as there is room for it; least: as of `promise`."""
        drafting = reply.drafting
        if drafting is None or reply.sequence is None:
            return None
        most = min(most, reply.left - 1, room.of(reply.sequence) - 1)
        if most < 1:
            return None
        if n_replies > 1 and drafting.skipped and drafting.follower is None:
            drafting.skipped -= 1
            return None
        source, promise = drafting.source, drafting.source.promise(reply.history, most, least)
        if drafting.follower is not None:
            computed = self._worth(reply, drafting, drafting.follower, promise, most, n_replies)
            if computed is not None:
                source, promise = drafting.follower, computed
        if promise is None:
            drafting.looked(found=False)
            return None
        room.take(reply.sequence, 1 + promise.n_tokens)
        return source, promise, drafting.record

    def _worth(
        self, reply: Reply, drafting: Drafting, follower: Source, other: Promise | None, most: int, n_replies: int
    ) -> Promise | None:
        """What can be computed, where it promises more than what costs nothing, and anything at all."""
        promise = follower.promise(reply.history, most)
        if promise is None:
            return None
        record, others = drafting.record, [None] * (n_replies - 1)
        if not any(self._gate.share([(promise, record), *others], self._fits, most)):
            drafting.idle_steps += 1
            if drafting.idle_steps > IDLE_STEPS:
                self._drop(drafting)
            return None
        drafting.idle_steps = 0
        if other is None:
            return promise
        mine, its = (self._gate.gain((p, record), n_replies, self._fits, most) for p in (promise, other))
        return promise if mine > its else None

    def _drop(self, drafting: Drafting) -> None:
        """Nobody computes drafts for a reply any more, nor for some that come."""
        assert drafting.follower is not None
        drafting.follower.close()
        drafting.follower = None
        self._gate.left(drafting.record)
        self._rest = self._resting = min(2 * self._rest + 1, MOST_RESTING)

    def _cut(self, source: Source, promise: Promise, record: Record, n_tokens: int) -> Draft | None:
        """A draft for a reply that is alone: what is left of so many tokens by how sure the source is of them."""
        sure = promise.chances is None and self._gate.is_worth_knowing(promise.source, promise.grade, record)
        draft = self._drafted(source, n_tokens, alone=True, sure=sure)
        return draft.first(self._gate.cut(draft, record, self._fits)) if draft is not None and draft.sure else draft

    def _drafted(self, source: Source, n_tokens: int, alone: bool, sure: bool = False) -> Draft | None:
        """The tokens; of one that computes them it is counted how long that takes.

        alone: no others are made now. sure: as of `Source.draft`.
        """
        began_s = time.perf_counter()
        draft = source.draft(n_tokens, sure)
        if draft is not None and not isinstance(source, Lookup):
            taken_s = time.perf_counter() - began_s if draft.made_s is None else draft.made_s
            self._gate.made(draft.source, taken_s, bool(draft.sure))
            self._making_s += taken_s
            if draft.drawn is not None and not alone:
                self._steps.forward.device.synchronize()
                return draft.known()
        return draft

    def _fits(self, n_tokens: int) -> bool:
        """Whether a step with drafts may have so many tokens."""
        if self._steps.graphs is not None:
            return n_tokens in self._captured and self._steps.is_captured(n_tokens)
        return n_tokens <= EVERY_WIDTH or n_tokens % WIDTH_STEP == 0


def lay_out(
    file: DrafterFile, forward: Forward, workspace: Callable[[Limits], Workspace], put: Put | None = None,
    gpu: Device | None = None,
) -> Drafter:  # fmt: skip
    """A drafter on the device of the model that it drafts for; put: as of `Forward`. gpu: it, if it captures."""
    limits, device = forward.limits, forward.device
    of = (
        forward.ops, workspace(drafter_limits(file.config, limits.n_vocab, limits.n_ctx)), file.config,
        placed(file.weights, put or device.upload), forward.weights.token_embd, forward.weights.output, limits.n_ctx,
        min(limits.places, MOST_RINGS),
    )  # fmt: skip
    return Drafter(device, *of) if gpu is None else CapturedDrafter(gpu, *of)


def _depth(replies: Many[Reply]) -> int:
    """Tokens of a reply, the mean."""
    return sum(len(reply.history) for reply in replies) // len(replies)


class _Room:
    """Blocks and recurrent states that are free, and what drafts take of them."""

    def __init__(self, kv: KVCache) -> None:
        self._blocks = min((pool.free_blocks for pool in kv.pools), default=0)
        self._states = 0 if kv.states is None else kv.states.free_blocks
        self._is_recurrent = kv.states is not None

    def of(self, sequence: Sequence) -> int:
        """Tokens that a step may have of a sequence."""
        if self._is_recurrent and not self._states:
            return 0
        return sequence.reserved_tokens - sequence.length + self._blocks * KV_BLOCK_TOKENS

    def take(self, sequence: Sequence, n_tokens: int) -> None:
        """A step has so many."""
        self._states -= 1
        beyond = n_tokens - (sequence.reserved_tokens - sequence.length)
        self._blocks -= max(0, -(-beyond // KV_BLOCK_TOKENS))


def tallied(tallies: dict[str, Tally]) -> dict[str, dict[str, int]]:
    """Tokens by source, as they are told."""
    return {source: {"drafted": t.drafted, "accepted": t.accepted} for source, t in tallies.items()}

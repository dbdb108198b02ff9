"""Drafts of the replies of an engine: who drafts for a reply, and how much of it the next step gets.

Sources and the gate know nothing of a model (engine/drafting/); here is what a step has room for: rows whose bits are
those of single steps, widths that are captured, blocks and recurrent states. Nothing is given up for a draft.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

from engine.drafting import lookup
from engine.drafting.gate import Drafting, Gate, Tally
from engine.drafting.lookup import Lookup
from engine.drafting.source import Draft
from engine.memory.blocks import Sequence
from engine.memory.kv import KVCache
from engine.models.layers import KEPT_TOKENS
from engine.ops import KV_BLOCK_TOKENS
from engine.running.decoding import Proposal
from engine.running.reply import Reply
from engine.running.stepping import Steps

EVERY_WIDTH = 8  # tokens of a step up to which there is one of each width, where none are captured
WIDTH_STEP = 4  # and of wider ones, those of its multiples: few enough to know what each takes


class Drafts:
    """Proposes for replies that were begun here (`decoding.Proposer`). memory_bytes: of texts of earlier requests."""

    def __init__(self, steps: Steps, memory_bytes: int) -> None:
        self._steps, self._limits = steps, steps.forward.limits
        self._most = min(KEPT_TOKENS, self._limits.max_tokens, self._limits.max_rows)
        self._memory = lookup.Memory(memory_bytes)
        self._gate = Gate({lookup.NAME: lookup.PRIORS})

    def begin(self, reply: Reply, prediction: Many[int] = ()) -> None:
        """Draft for a reply; prediction: tokens that may come in it. One under a form gets no drafts."""
        if reply.grammar is None:
            reply.drafting = Drafting((Lookup(self._memory, prediction),))

    def end(self, reply: Reply) -> None:
        """A reply has ended, or was given up; what it says may come again."""
        if reply.drafting is not None:
            for source in reply.drafting.sources:
                source.close()
            reply.drafting = None
        self._memory.add(reply.history)

    def propose(self, replies: Many[Reply]) -> list[Draft | None]:
        """As `decoding.Proposer.propose`."""
        most, room = self._most - len(replies), _Room(self._steps.forward.kv)
        drafts = [self._drafted(reply, most, room) for reply in replies]
        if not any(drafts):
            return drafts
        offers = [
            None if draft is None or reply.drafting is None else (draft, reply.drafting.record)
            for reply, draft in zip(replies, drafts, strict=True)
        ]
        counts = self._gate.share(offers, self._fits, most)
        return [
            Draft(draft.source, draft.grade, draft.tokens[:n]) if draft is not None and n else None
            for draft, n in zip(drafts, counts, strict=True)
        ]

    def fared(self, proposals: Many[Proposal], seconds: float) -> None:
        """As `decoding.Proposer.fared`."""
        if any(p.draft for p in proposals):
            self._gate.note(
                [
                    None
                    if p.draft is None or p.reply.drafting is None
                    else (p.draft, p.reply.drafting.record, len(p.draft.tokens), p.stayed)
                    for p in proposals
                ],
                seconds,
            )
        else:
            self._gate.plain(len(proposals), seconds)

    def went(self, replies: Many[Reply], seconds: float, n_steps: int) -> None:
        """As `decoding.Proposer.went`."""
        self._gate.plain(len(replies), seconds, n_steps)

    def plain_s(self, n_replies: int) -> float:
        """As `decoding.Proposer.plain_s`."""
        return self._gate.costs(n_replies).plain

    def begin_costs(self, seconds: dict[int, float]) -> None:
        """What steps of so many tokens of one reply took when they were tried, one among them."""
        self._gate.costs(1).begin({n - 1: s for n, s in seconds.items()})

    def stats(self) -> dict[str, Any]:
        """Tokens drafted and accepted by source, bytes of texts, and what steps take, in ms.

        step_ms: by replies that share them, then by tokens of drafts in them, as text.
        """
        return {
            "tokens": tallied(self._gate.tallies),
            "memory_bytes": self._memory.n_tokens * lookup.TOKEN_BYTES,
            "step_ms": {
                str(n): {str(k): round(1000 * s, 4) for k, s in costs.measured().items()}
                for n, costs in self._gate.all_costs().items()
            },
        }

    def close(self) -> None:
        """Forget all texts; nobody may be drafted for any more."""
        self._memory.close()

    def _drafted(self, reply: Reply, most: int, room: _Room) -> Draft | None:
        """What may follow a reply's last token, as far as there is room for it."""
        if reply.drafting is None or reply.sequence is None:
            return None
        most = min(most, reply.left - 1, room.of(reply.sequence) - 1)
        if most < 1:
            return None
        draft = next(filter(None, (source.propose(reply.history, most) for source in reply.drafting.sources)), None)
        if draft is not None:
            room.take(reply.sequence, 1 + len(draft.tokens))
        return draft

    def _fits(self, n_tokens: int) -> bool:
        """Whether a step with drafts may have so many tokens."""
        if self._steps.graphs is not None:
            return self._steps.is_captured(n_tokens)
        return n_tokens <= EVERY_WIDTH or n_tokens % WIDTH_STEP == 0


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

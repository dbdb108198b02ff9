"""Decoding: which tokens a step gets is *proposed*, the step is *run*, and what follows from it is *accepted*.

A step gets the last token of a reply, drawn and not fed yet, and may get tokens that are only proposed to follow it.
Accepting draws the token behind the first, which is kept; as long as it is the one that was proposed, the row behind
that one counts as well. What was proposed beyond is taken back, so that whatever is proposed changes no token.

`Decoder` does this with replies that share a step; who proposes is a `Proposer` (running/drafts.py). `AheadOfHost` does
it with one that is alone, and the device waits for nobody: it proposes to itself what it drew, a step is one graph
launch, and the host accepts behind what it has enqueued. So do `Together`, with several, and `Masked`, where a form
binds one of them and the host has to see each token. `DraftedAhead` goes from one to the other where a draft pays.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.drafting.source import Draft
from engine.ground.errors import DeviceLostError, SparkError
from engine.ops import F32
from engine.running.ahead import AHEAD_STEPS, NEAR_STEPS, AheadOfHost
from engine.running.drawing import Behind, DeviceDrawer, Drawer
from engine.running.forecast import Expected, Forecast, Routed
from engine.running.guessing import Guessing
from engine.running.masked import Masked, can_mask
from engine.running.reply import Reply, mask_wait_s
from engine.running.sampling import Drawing, Drawn
from engine.running.stepping import Span, StepResult, Steps
from engine.running.together import Together, can_share

SOON_TOKENS = 128  # behind a draft, within which another one is likely


@dataclass(slots=True)
class Proposal:
    """What a step gets of a reply. draft: whose tokens are the last of the span, only proposed; stayed: of these.

    The logits that the span wants are those of the tokens that stay, from the last of them on, and of the draft.
    """

    reply: Reply
    span: Span
    draft: Draft | None = None
    stayed: int = 0

    @property
    def follow(self) -> Many[int]:
        """The tokens that are only proposed."""
        return () if self.draft is None else self.draft.tokens


class Proposer(Protocol):
    """Who says what may follow the last tokens of replies, and is told what came of it."""

    def propose(self, replies: Many[Reply]) -> list[Draft | None] | None:
        """A draft for each, as much of it as the next step is to get; the step has room for all of them.

        None: none for anybody, and what comes of the step need not be told.
        """

    def fared(self, proposals: Many[Proposal], seconds: float) -> None:
        """A step with drafts, or without, took so long, and so much of them stayed."""

    def behind(self, proposals: Many[Proposal]) -> Behind | None:
        """What can be enqueued before it is known which tokens of a step stay, as `Drawer.draw` has it."""

    def fed(self, proposals: Many[Proposal], result: StepResult) -> None:
        """A step was run, and accepted where anything was proposed: what it computed can be read until the next."""

    def follows(self, replies: Many[Reply]) -> bool:
        """Whether steps of these have to be told (`fed`), one by one."""

    def reads(self, replies: Many[Reply]) -> bool:
        """Whether features of a step of these are read, where it has any."""

    def went(self, replies: Many[Reply], seconds: float, n_steps: int) -> None:
        """The replies went on without drafts for a while, in so many steps."""

    def met(self, reply: Reply, draft: Draft, n: int, stayed: int) -> None:
        """So many tokens of a draft have come to be known without a step: the first ones were right."""

    def plain_s(self, replies: Many[Reply]) -> float:
        """What such a step takes; 0.0 while nobody knows."""


class Nothing:
    """Proposes no token: every step draws one."""

    def propose(self, replies: Many[Reply]) -> list[Draft | None] | None:
        """As `Proposer.propose`."""
        return None

    def fared(self, proposals: Many[Proposal], seconds: float) -> None:
        """As `Proposer.fared`."""

    def behind(self, proposals: Many[Proposal]) -> Behind | None:
        """As `Proposer.behind`."""
        return None

    def fed(self, proposals: Many[Proposal], result: StepResult) -> None:
        """As `Proposer.fed`."""

    def follows(self, replies: Many[Reply]) -> bool:
        """As `Proposer.follows`."""
        return False

    def reads(self, replies: Many[Reply]) -> bool:
        """As `Proposer.reads`; who else is there may."""
        return True

    def went(self, replies: Many[Reply], seconds: float, n_steps: int) -> None:
        """As `Proposer.went`."""

    def met(self, reply: Reply, draft: Draft, n: int, stayed: int) -> None:
        """As `Proposer.met`."""

    def plain_s(self, replies: Many[Reply]) -> float:
        """As `Proposer.plain_s`."""
        return 0.0


class Decoder:
    """Decodes replies in steps that they share. proposer: of the tokens that may follow a reply's last.

    forecast: who is told what the rows of drafts chose, None: nobody. expected: what it said of the step that follows
    the last one with a draft. guessing: who counts guesses of experts beside the steps, None: nobody.
    """

    def __init__(self, steps: Steps, drawer: Drawer, proposer: Proposer | None = None) -> None:
        self.steps, self.drawer, self.proposer = steps, drawer, proposer or Nothing()
        self.forecast: Forecast | None = None
        self.expected: Expected | None = None
        self.guessing: Guessing | None = None

    def step(
        self, replies: Many[Reply], drafts: Many[Draft | None] | None = None, spent_s: float = 0.0
    ) -> list[SparkError | None]:
        """One step of all replies, each of which draws a token or more, ends or is `held`.

        drafts: None: to be proposed. spent_s: what it took to get here, which counts as the step's.
        Returns each reply's own failure; one that all share is raised.
        """
        began_s = time.perf_counter()
        drafts = self.proposer.propose(replies) if drafts is None else drafts
        if drafts is None:
            proposals = [self.propose(reply, None) for reply in replies]
            failures = self.accept(proposals, self.run(proposals, decodes=True))
            self._count(proposals)
            return failures
        proposals = [self.propose(reply, draft) for reply, draft in zip(replies, drafts, strict=True)]
        result = self.run(proposals, decodes=True)
        failures = self.accept(proposals, result)
        self._count(proposals)
        if self.forecast is not None:
            self._tell(self.forecast, proposals, result)
        self.proposer.fed(proposals, result)
        self.proposer.fared(proposals, time.perf_counter() - began_s + spent_s)
        return failures

    def _count(self, proposals: Many[Proposal]) -> None:
        """Count what the rows that stay have read, where any may read a part."""
        if (recalling := self.steps.forward.recalling) is not None:
            stay = (len(p.span.tokens) - len(p.follow) + p.stayed for p in proposals)
            recalling.fared([(p.span, n, p.reply.recalled) for p, n in zip(proposals, stay, strict=True)])

    def _tell(self, forecast: Forecast, proposals: Many[Proposal], result: StepResult) -> None:
        """Tell who listens of a step with a draft, in a model with experts."""
        if not self.steps.residency.experts or not any(p.follow for p in proposals):
            return
        n = [len(p.span.tokens) for p in proposals]
        stayed = [np.arange(m) < m - len(p.follow) + p.stayed for m, p in zip(n, proposals, strict=True)]
        replies = tuple(p.reply.serial for m, p in zip(n, proposals, strict=True) for _ in range(m))
        self.expected = forecast.verified(Routed(result.experts.copy(), np.concatenate(stayed), replies))

    def propose(self, reply: Reply, draft: Draft | None) -> Proposal:
        """The last token, and what may follow it."""
        assert reply.sequence is not None
        drawn = None if draft is None else draft.drawn
        follow = () if draft is None else draft.tokens if drawn is None else [0] * len(draft.tokens)
        tokens = np.array((reply.history[-1], *follow), np.int32)
        wanted = tuple(range(len(tokens)))
        span = Span(reply.sequence, tokens, np.ones(len(tokens), bool), wanted, draft is not None, reply.recall, drawn)
        return Proposal(reply, span, draft)

    def run(self, proposals: Many[Proposal], decodes: bool = False) -> StepResult:
        """Run the step. decodes: it is none of prompts, so guesses are counted."""
        self.steps.forward.features_wanted = self.proposer.reads([p.reply for p in proposals])
        spans = [proposal.span for proposal in proposals]
        return self.guessing.run(self.steps, spans) if self.guessing and decodes else self.steps.run(spans)

    def accept(self, proposals: Many[Proposal], result: StepResult) -> list[SparkError | None]:
        """Let every reply go on with what is drawn, as far as that is what was proposed, and with one token more.

        Returns as `step`.
        """
        failures: list[SparkError | None] = [None] * len(proposals)
        rows = list(itertools.accumulate((len(p.span.want) for p in proposals), initial=0))
        until_s = time.monotonic() + mask_wait_s(p.reply for p in proposals)
        going = list(range(len(proposals)))
        while going:
            drawings: list[tuple[int, Drawing]] = []
            for i in going:
                p = proposals[i]
                try:
                    drawing = p.reply.drawing(lambda: result.logits, rows[i] + p.stayed, until_s)
                except DeviceLostError:
                    raise
                except SparkError as error:  # of its grammar
                    failures[i] = error
                    continue
                if drawing is not None:
                    drawings.append((i, drawing))
            going = []
            if not drawings:
                break
            follow = [proposals[i].follow[proposals[i].stayed :] for i, _ in drawings]
            behind = self.proposer.behind(proposals) if len(drawings) == len(proposals) else None
            drawn = self.drawer.draw(result, [drawing for _, drawing in drawings], follow, behind)
            self.steps.check()
            for (i, _), tokens in zip(drawings, drawn, strict=True):
                p = proposals[i]
                try:
                    goes_on = all(self._take(p, one) for one in tokens)
                except DeviceLostError:
                    raise
                except SparkError as error:
                    failures[i] = error
                    continue
                if goes_on:
                    going.append(i)
        dropped = [len(p.follow) - p.stayed for p in proposals]
        if any(dropped):
            self.steps.take_back([p.span for p in proposals], dropped, result)
        for p in proposals:
            p.span.sequence.settle()
        return failures

    def _take(self, p: Proposal, drawn: Drawn | None) -> bool:
        """Let a reply go on with a token; whether that is the next of its draft, whose row then counts as well."""
        reply = p.reply
        reply.take(drawn)
        # With a grammar the limit is no end before `settled` has said so.
        goes_on = reply.reason is None and reply.left > 0 and p.stayed < len(p.follow)
        if not goes_on or reply.history[-1] != p.follow[p.stayed]:
            return False
        p.stayed += 1
        return True

    def draw_from(self, reply: Reply, logits: F32, until_s: float) -> None:
        """Let a reply go on from a row of logits that was kept, float32 [V]; its mask may come until then."""
        drawing = reply.drawing(lambda: logits[None], 0, until_s)
        if drawing is not None:
            reply.take(self.drawer.draw_from(logits, drawing))

    def together(self, replies: Many[Reply], until: float) -> list[SparkError | None]:
        """Steps of all replies until that time of time.perf_counter, or one at least; returns as `step`."""
        if isinstance(self.drawer, DeviceDrawer):
            if can_share(self.steps, replies):
                began_s = time.perf_counter()
                drafts = self.proposer.propose(replies)
                if any(drafts or ()) or self.proposer.follows(replies):
                    return self.step(replies, drafts, time.perf_counter() - began_s)
                ahead = Together(self.steps, self.drawer, replies, lambda: self._has_long(replies))
                failures = ahead.run(until)
                self.proposer.went(replies, time.perf_counter() - began_s, ahead.n_steps)
                return failures
            if can_mask(self.steps, replies):
                return Masked(self.steps, self.drawer, replies).run(until)
        return self.step(replies)

    def _has_long(self, replies: Many[Reply]) -> bool:
        return any(map(_is_long, self.proposer.propose(replies) or ()))

    def alone(self, reply: Reply) -> Alone:
        """Decode a reply that no other shares steps with: ahead of the host, where steps are captured."""
        if not isinstance(self.drawer, DeviceDrawer):
            return StepByStep(self, reply)
        if reply.drafting is None:
            return AheadOfHost(self.steps, self.drawer, reply)
        return DraftedAhead(self, self.drawer, reply)


class Alone(Protocol):
    """A reply that decodes alone.

    ended: the reply has, or it paused: nothing is under way, and the last token is drawn and not fed.
    """

    ended: bool

    def advance(self) -> None:
        """Let the reply go on by a token or more, unless it has ended; waits for them."""

    def pause(self) -> None:
        """Run no further step: it ends when those that were begun are accepted."""


class StepByStep:
    """A reply that decodes alone where the host waits for every step."""

    def __init__(self, decoder: Decoder, reply: Reply) -> None:
        self._decoder, self._reply = decoder, reply
        self.ended = False

    def advance(self) -> None:
        """As `Alone.advance`: one step."""
        if self.ended:
            return
        (failure,) = self._decoder.step([self._reply])
        if failure is not None:
            raise failure
        self.ended = self._reply.reason is not None

    def pause(self) -> None:
        """As `Alone.pause`: nothing is ever under way."""
        self.ended = True


def _is_long(draft: Draft | None, under_way: int = AHEAD_STEPS) -> bool:
    """Whether a draft is worth a stop of what runs ahead: as many tokens as are under way come by themselves."""
    return draft is not None and len(draft.tokens) > under_way


class DraftedAhead:
    """A reply that decodes alone on a device: ahead of the host, but for steps with a draft, which the host waits for.

    Where there has been a draft lately there is likely to be another, so fewer steps are under way. What it takes to
    stop what runs ahead and to begin it again is a part of what a draft costs. The tokens that come meanwhile tell what
    the draft was worth.
    """

    def __init__(self, decoder: Decoder, drawer: DeviceDrawer, reply: Reply) -> None:
        self._decoder, self._drawer, self._reply = decoder, drawer, reply
        self._ahead: AheadOfHost | None = None
        self._is_steady = False  # steps are under way, as many as there will be
        self._pausing = False
        self._for: tuple[Draft, int] | None = None  # what it stopped for, and where that begins
        self._drafted_at = -SOON_TOKENS  # where the last draft ended
        self._changing_s = 0.0  # since the last draft, beyond what the tokens that came would have taken
        self.ended = False

    def advance(self) -> None:
        """As `Alone.advance`."""
        if self.ended:
            return
        proposer = self._decoder.proposer
        if self._ahead is None:
            began_s = time.perf_counter()
            (draft,) = proposer.propose([self._reply]) or (None,)
            if draft is not None or proposer.follows([self._reply]):
                self._step(draft, time.perf_counter() - began_s)
                return
            self._ahead = AheadOfHost(self._decoder.steps, self._drawer, self._reply)
            self._is_steady = False
        self._ahead.most = NEAR_STEPS if self._reply.made < self._drafted_at + SOON_TOKENS else AHEAD_STEPS
        began_s, made = time.perf_counter(), self._reply.made
        self._ahead.advance()
        self._went(time.perf_counter() - began_s, self._reply.made - made)
        if self._ahead.ended:
            self._ahead = None
            self.ended = self._pausing or self._reply.reason is not None
            self._learn()
        elif self._is_steady:
            (draft,) = proposer.propose([self._reply]) or (None,)
            if draft is not None and _is_long(draft, self._ahead.under_way):
                self._ahead.pause()
                self._for = draft, len(self._reply.history)
                self._is_steady = False
        else:
            self._is_steady = self._for is None

    def pause(self) -> None:
        """As `Alone.pause`."""
        self._pausing = True
        if self._ahead is None:
            self.ended = True
        else:
            self._ahead.pause()

    def _step(self, draft: Draft | None, spent_s: float) -> None:
        changing_s, self._changing_s = self._changing_s, 0.0
        (failure,) = self._decoder.step([self._reply], [draft], changing_s + spent_s)
        if draft is not None:
            self._drafted_at = self._reply.made
        if failure is not None:
            raise failure
        self.ended = self._reply.reason is not None

    def _went(self, seconds: float, n_tokens: int) -> None:
        if self._is_steady:
            if n_tokens:
                self._decoder.proposer.went([self._reply], seconds, n_tokens)
        else:
            each_s = self._decoder.proposer.plain_s([self._reply])
            self._changing_s += max(0.0, seconds - n_tokens * each_s) if each_s else 0.0

    def _learn(self) -> None:
        """What it stopped for has met the tokens that were under way."""
        if self._for is not None:
            draft, begin = self._for
            self._for = None
            came = self._reply.history[begin : begin + len(draft.tokens)]
            same = [a == b for a, b in zip(came, draft.tokens, strict=False)]
            stayed = same.index(False) if False in same else len(same)
            self._decoder.proposer.met(self._reply, draft, len(came), stayed)

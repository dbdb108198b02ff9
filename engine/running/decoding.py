"""Decoding: which tokens a step gets is *proposed*, the step is *run*, and what follows from it is *accepted*.

A step gets the last token of a reply, drawn and not fed yet, and may get tokens that are only proposed to follow it.
Accepting draws the token behind the first, which is kept; as long as it is the one that was proposed, the row behind
that one counts as well. What was proposed beyond is taken back, so that whatever is proposed changes no token.

`Decoder` does this with replies that share a step; what it proposes is a function, today one that proposes nothing.
`AheadOfHost` does it with one that is alone, and the device waits for nobody: it proposes to itself what it drew,
a step is one graph launch, and the host accepts behind what it has enqueued. So do `Together`, with several, and
`Masked`, where a form binds one of them and the host has to see each token.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from engine.ground.errors import DeviceLostError, SparkError
from engine.ops import F32
from engine.running.ahead import AheadOfHost
from engine.running.drawing import DeviceDrawer, Drawer
from engine.running.masked import Masked, can_mask
from engine.running.reply import Reply, mask_wait_s
from engine.running.sampling import Drawing
from engine.running.stepping import Span, StepResult, Steps
from engine.running.together import Together, can_share


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a step gets of a reply. follow: the last tokens of the span, those that are only proposed.

    The logits that the span wants are those of the tokens that stay, from the last of them on, and of `follow`.
    """

    reply: Reply
    span: Span
    follow: tuple[int, ...] = ()


Propose: TypeAlias = Callable[[Reply], tuple[int, ...]]


def nothing(reply: Reply) -> tuple[int, ...]:
    """Propose no token: every step draws one."""
    return ()


class Decoder:
    """Decodes replies in steps that they share. propose: the tokens that may follow a reply's last."""

    def __init__(self, steps: Steps, drawer: Drawer, propose: Propose = nothing) -> None:
        self.steps, self.drawer, self._propose = steps, drawer, propose

    def step(self, replies: Many[Reply]) -> list[SparkError | None]:
        """One step of all replies, each of which draws a token or more, ends or is `held`.

        Returns each reply's own failure; one that all share is raised.
        """
        proposals = [self.propose(reply) for reply in replies]
        return self.accept(proposals, self.run(proposals))

    def propose(self, reply: Reply) -> Proposal:
        """The last token, and what may follow it."""
        follow = self._propose(reply)
        assert reply.sequence is not None
        tokens = np.array((reply.history[-1], *follow), np.int32)
        wanted = tuple(range(len(tokens)))
        return Proposal(
            reply, Span(reply.sequence, tokens, np.ones(len(tokens), bool), wanted, keep=bool(follow)), follow
        )  # fmt: skip

    def run(self, proposals: Many[Proposal]) -> StepResult:
        """Run the step."""
        return self.steps.run([proposal.span for proposal in proposals])

    def accept(self, proposals: Many[Proposal], result: StepResult) -> list[SparkError | None]:
        """Let every reply go on with what is drawn, as far as that is what was proposed, and with one token more.

        Returns as `step`.
        """
        failures: list[SparkError | None] = [None] * len(proposals)
        rows = list(itertools.accumulate((len(p.span.want) for p in proposals), initial=0))
        until_s = time.monotonic() + mask_wait_s(p.reply for p in proposals)
        stay = [0] * len(proposals)  # of the tokens that were proposed
        going = list(range(len(proposals)))
        while going:
            drawings: list[tuple[int, Drawing]] = []
            for i in going:
                try:
                    drawing = proposals[i].reply.drawing(lambda: result.logits, rows[i] + stay[i], until_s)
                except DeviceLostError:
                    raise
                except SparkError as error:  # of its grammar
                    failures[i] = error
                    continue
                if drawing is not None:
                    drawings.append((i, drawing))
            drawn = self.drawer.draw(result, [drawing for _, drawing in drawings]) if drawings else []
            going = []
            for (i, _), one in zip(drawings, drawn, strict=True):
                reply, follow = proposals[i].reply, proposals[i].follow
                try:
                    reply.take(one)
                except DeviceLostError:
                    raise
                except SparkError as error:
                    failures[i] = error
                    continue
                # With a grammar the limit is no end before `settled` has said so.
                goes_on = reply.reason is None and reply.left > 0 and stay[i] < len(follow)
                if goes_on and reply.history[-1] == follow[stay[i]]:
                    stay[i] += 1
                    going.append(i)
        dropped = [len(p.follow) - n for p, n in zip(proposals, stay, strict=True)]
        if any(dropped):
            self.steps.take_back([p.span for p in proposals], dropped)
        return failures

    def draw_from(self, reply: Reply, logits: F32, until_s: float) -> None:
        """Let a reply go on from a row of logits that was kept, float32 [V]; its mask may come until then."""
        drawing = reply.drawing(lambda: logits[None], 0, until_s)
        if drawing is not None:
            reply.take(self.drawer.draw_from(logits, drawing))

    def together(self, replies: Many[Reply], until: float) -> list[SparkError | None]:
        """Steps of all replies until that time of time.perf_counter, or one at least; returns as `step`."""
        if isinstance(self.drawer, DeviceDrawer):
            if can_share(self.steps, replies):
                return Together(self.steps, self.drawer, replies).run(until)
            if can_mask(self.steps, replies):
                return Masked(self.steps, self.drawer, replies).run(until)
        return self.step(replies)

    def alone(self, reply: Reply) -> Alone:
        """Decode a reply that no other shares steps with: ahead of the host, where steps are captured."""
        if isinstance(self.drawer, DeviceDrawer):
            return AheadOfHost(self.steps, self.drawer, reply)
        return StepByStep(self, reply)


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

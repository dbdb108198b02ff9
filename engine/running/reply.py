"""What a request says while it is decoded, whoever runs the steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from engine.drafting.gate import Drafting
from engine.ground.errors import NumericalError
from engine.memory.blocks import Sequence
from engine.ops import F32
from engine.running.recall import Part, Tally
from engine.running.sampling import Drawing, Drawn, SamplingParams
from engine.text.forms import Form

MASK_WAIT_S = 0.01  # a step waits so long for a mask; whoever has none then draws when it comes, without the others
LATE_S = 0.001  # and so long where some of the others have no form: these must not be slowed

_serials = itertools.count()


class Reply:
    """What one request says: its tokens so far, how the next one is drawn, and when it is the last.

    history: the prompt and what was drawn. limit: tokens that may be drawn. stop: tokens that end it and are no part
    of it. sequence: what is cached of `history`, None while nothing is; between two units of work all but the last
    token. number: its place among those that run, 0, 1, ... reply_from: where in `history` the reply begins that
    penalties count, by default behind the prompt. logprobs: as in `Drawing`. grammar: the form that binds it, if one
    does. held: logits float32 [V] of the next token, if its mask is late. unsent: tokens drawn, for whoever takes
    them. reason: why it ended, "stop" or "length", None until then. drafting: who drafts for it, if anybody does.
    recall: what decoded rows read, None: all; recalled: what that came to.
    """

    def __init__(
        self, history: list[int], params: SamplingParams, limit: int, *, stop: Iterable[int] = (),
        reply_from: int | None = None, logprobs: int | None = None, grammar: Form | None = None,
        sequence: Sequence | None = None, number: int = 0,
    ) -> None:  # fmt: skip
        self.history, self.params, self.limit = history, params, limit
        self.stop = frozenset(stop)
        self.reply_from = len(history) if reply_from is None else reply_from
        self.logprobs = logprobs
        self.grammar = grammar
        self.sequence = sequence
        self.number = number
        self.serial = next(_serials)  # no two alike, as ids of requests may be
        self.held: F32 | None = None
        self.unsent: list[Drawn] = []
        self.reason: str | None = None
        self.drafting: Drafting | None = None
        self.recall: Part | None = None
        self.recalled = Tally()
        self._n_prompt = len(history)

    @property
    def made(self) -> int:
        """Tokens drawn so far."""
        return len(self.history) - self._n_prompt

    @property
    def left(self) -> int:
        """Tokens that may still be drawn."""
        return self.limit - self.made

    def drawing(self, logits: Callable[[], F32], row: int, until_s: float) -> Drawing | None:
        """How the next token is to be drawn from row `row` of logits float32 [n, V].

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
                self.held = logits()[row].copy()
                return None
        return Drawing(
            self.number, self.serial, self.history, row, self.params, self.reply_from, allowed, self.logprobs
        )

    def take(self, drawn: Drawn | None) -> None:
        """Go on with a drawn token, or end; None: the logits were not finite."""
        if drawn is None:
            raise not_finite()
        token = drawn.token
        if token in self.stop:
            self.reason = "stop"
            return
        self.history.append(token)
        self.unsent.append(drawn)
        if self.grammar is not None:
            self.grammar.accept(token)  # and what follows from that, `settled` says
        elif self.made == self.limit:
            self.reason = "length"

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


def mask_wait_s(replies: Iterable[Reply]) -> float:
    """How long a step of replies waits for a mask."""
    return LATE_S if any(reply.grammar is None for reply in replies) else MASK_WAIT_S


def not_finite() -> NumericalError:
    """What is said where logits are not finite."""
    return NumericalError(
        "the logits of a step are not finite",
        hint="the model file may be damaged; compare its checksum with the publisher's",
    )

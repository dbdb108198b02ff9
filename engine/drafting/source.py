"""A draft, and what a source of drafts is.

A source may propose anything: what is not what the model draws is taken back, so a draft changes speed and no token
(engine/running/decoding.py). What it is worth, the gate finds out.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may follow a reply's last, the next one first; source, grade: as of `Promise`.

    drawn: where a device that is still at it leaves them, int32 [n]; the host has `tokens` when what is enqueued behind
    has been waited for. made_s: what it takes to make them, where nobody waits for that. sure: the chance that its
    source gives each of them, if it says so, which is not its chance to stay.
    """

    source: str
    grade: int
    tokens: Sequence[int]
    drawn: Any = None
    made_s: float | None = None
    sure: Sequence[float] = ()

    def first(self, n: int) -> Draft | None:
        """Its first n tokens; None: nothing."""
        return replace(self, tokens=self.tokens[:n], sure=self.sure[:n]) if n else None

    def known(self) -> Draft | None:
        """The same when the device has been waited for, up to the first token that it could not draw; None: nothing."""
        tokens = tuple(itertools.takewhile(lambda token: token >= 0, self.tokens))
        return replace(self, tokens=tokens, drawn=None, sure=self.sure[: len(tokens)]) if tokens else None


class Promise(NamedTuple):
    """A draft that a source can make: what is known of it before anybody wants its tokens.

    source: who makes it. grade: 0, 1, ...: how sure it is; drafts of one source and grade are judged by how those
    before them fared. n_tokens: that it has at most. chances: of its first tokens to be right, each with all before it,
    by a source that judges them by itself; None: it does not. is_block: to make all takes no longer than to make one.
    """

    source: str
    grade: int
    n_tokens: int
    chances: tuple[float, ...] | None = None
    is_block: bool = False


class Source(Protocol):
    """What drafts for one reply. It is asked for a promise with every token, which costs next to nothing."""

    def promise(self, history: Sequence[int], most: int, least: float = 0.0) -> Promise | None:
        """What can be proposed behind `history`, a prompt and a reply so far, at most `most` tokens; None: nothing.

        history: that of the call before with more tokens behind it, of which the source need not have been told. least:
        tokens of a draft that must be expected to be right for anybody to want it; who does not judge drafts promises.
        """

    def draft(self, n_tokens: int, sure: bool = False) -> Draft | None:
        """So many tokens of what was promised last; a source that computes them takes its time here.

        sure: it is to say how sure it is of them, if that is known, even where a device has to be waited for.
        """

    def close(self) -> None:
        """The reply has ended; gives back what it took."""

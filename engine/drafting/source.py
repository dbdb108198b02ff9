"""A draft, and what a source of drafts is.

A source may propose anything: what is not what the model draws is taken back, so a draft changes speed and no token
(engine/running/decoding.py). What it is worth, the gate finds out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may follow a reply's last, the next one first.

    source: who proposes them. grade: 0, 1, ...: how sure the source is; drafts of one source and grade are judged by
    how those before them fared.
    """

    source: str
    grade: int
    tokens: tuple[int, ...]


class Source(Protocol):
    """What drafts for one reply; to ask it costs next to nothing."""

    def propose(self, history: Sequence[int], most: int) -> Draft | None:
        """At most `most` tokens that may follow `history`, a prompt and a reply so far; None: nothing.

        history: that of the call before with more tokens behind it, of which the source need not have been told.
        """

    def close(self) -> None:
        """The reply has ended; gives back what it took."""


class Follower(Source, Protocol):
    """A source that computes drafts from what the model made of the tokens so far. That takes time: it is asked last.

    name: of its drafts, which have one grade, 0. most: tokens of a draft.
    """

    name: str
    most: int

    def knows(self, history: Sequence[int]) -> bool:
        """Whether there is all that a draft behind the last token is made from."""

"""How drafts fared: tokens by how often they stayed, of all replies and of one."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count

MOST_TOKENS = 31  # of a draft: the longest step whose rows have the bits of single steps has one more
GROUPS = (1, 2, 4, 8, 16)  # positions of a draft that are judged together begin here, counted from 0
_FADE = 0.985  # what is left of what was seen at a position when it is seen again
_FADE_TOKENS = 4000.0  # decoded tokens after which 1/e is left of it
_MADE_FADE = 0.95  # what is left of what drafts were worth when another is made

Decisions = dict[tuple[str, int], tuple[int, list[int]]]


def group_of(position: int) -> int:
    """Which positions of a draft are judged together with one: 0, 1, 2-3, 4-7, 8-15, from 16 on."""
    return bisect_right(GROUPS, position)


GROUP_OF = tuple(map(group_of, range(MOST_TOKENS)))


@dataclass(slots=True)
class Chances:
    """How often tokens of one kind of draft stayed, given that all before them did; by groups of positions."""

    stayed: list[float] = field(default_factory=lambda: [0.0] * (len(GROUPS) + 1))
    seen: list[float] = field(default_factory=lambda: [0.0] * (len(GROUPS) + 1))
    at: int = 0  # decoded tokens, of all replies, when it was looked at last
    n_noted: int = 0

    def note(self, n_drafted: int, n_stayed: int) -> None:
        """Take in how a draft fared."""
        self.n_noted += 1
        for position in range(min(n_drafted, n_stayed + 1)):
            group = group_of(position)
            self.stayed[group] = self.stayed[group] * _FADE + (position < n_stayed)
            self.seen[group] = self.seen[group] * _FADE + 1.0

    def expect(self, stay: Sequence[float], n_tried: int) -> None:
        """Take in the tokens of a draft that are not tried, as they are expected to fare.

        stay: the chance of each to stay with all before it. Without them only those would count that a drafter is sure
        of, and nobody would see that it is sure of nothing any more.
        """
        self.n_noted += 1
        before = stay[n_tried - 1] if n_tried else 1.0
        for position in range(n_tried, len(stay)):
            group, left = group_of(position), 1.0 - (1.0 - _FADE) * before
            self.stayed[group] = self.stayed[group] * left + stay[position]
            self.seen[group] = self.seen[group] * left + before
            before = stay[position]

    def fade(self, now: int) -> None:
        """Let what was seen count less, as time passes."""
        if now > self.at + 16:
            left = math.exp((self.at - now) / _FADE_TOKENS)
            self.stayed, self.seen = ([x * left for x in values] for values in (self.stayed, self.seen))
            self.at = now


@dataclass(slots=True)
class Worth:
    """What drafts are worth that are made and then cut; sums that fade.

    n: of them. tokens, time: of the steps with what was left, as expected, the time in plain steps. at: tokens of the
    steps, had all of the drafts been cut to 0, 1, ... tokens.
    """

    n: float = 0.0
    tokens: float = 0.0
    time: float = 0.0
    at: list[float] = field(default_factory=lambda: [0.0] * (MOST_TOKENS + 1))

    def note(self, stay: Sequence[float], n_left: int, time: float) -> None:
        """Take in one more, whose tokens stay with those chances."""
        expected = [*accumulate(stay, initial=1.0)]
        self.n, self.time = 1.0 + _MADE_FADE * self.n, time + _MADE_FADE * self.time
        self.tokens = expected[n_left] + _MADE_FADE * self.tokens
        for k, before in enumerate(self.at):
            self.at[k] = expected[min(k, len(stay))] + _MADE_FADE * before

    def plus(self, other: Worth, times: float) -> Worth:
        """Both together, the other so many times."""
        a, b = ([w.n, w.tokens, w.time, *w.at] for w in (self, other))
        n, tokens, time, *at = (x + times * y for x, y in zip(a, b, strict=True))
        return Worth(n, tokens, time, at)


@dataclass(slots=True)
class Tally:
    """Tokens of drafts that were in steps, and those of them that stayed."""

    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class Record:
    """How one reply's drafts fared: chances and worth by source and grade, and tokens by source.

    sampled, followed: as of `Gate.costs`; the latter may change.
    """

    sampled: bool = False
    followed: bool = False
    number: int = field(default_factory=count().__next__)  # no two have the same
    chances: dict[tuple[str, int], Chances] = field(default_factory=dict)
    tallies: dict[str, Tally] = field(default_factory=dict)
    # By source and grade: when it was decided, and how many tokens of a draft of 0, 1, ...
    choices: Decisions = field(default_factory=dict)
    worth: dict[tuple[str, int], Worth] = field(default_factory=dict)
    least: tuple[int, float] = (-1, 0.0)  # when `Gate.least` was found, and what
    # By source, grade and hope: the chances of a draft's tokens to stay, and the state of what they were made of.
    stay: dict[tuple[str, int, float], tuple[tuple[int, int, int], list[float]]] = field(default_factory=dict)

"""Requests as the page shows them: those that are open, and how the last ones ended.

A request is one row, however many choices it has: what its prompts took is there once, what was written is summed up.
There are numbers here and words of this file, nothing of a prompt, of a reply, or of what a client calls things.
Everything runs in the event loop, so there are no locks; a reply writes three numbers an event, and rows are made of
them when a sample is.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from engine.ground.errors import SparkError
from spark.speech.conversation import Usage

OPEN_SHOWN = 16  # of the open ones: as many as run at a time by default, or the first of those that wait
ENDED_SHOWN = 20
_FINISHED = ("stop", "tool_calls", "length")  # how choices end; of several the last of these is said
# How requests fail, by the codes of errors; what is none of them is `failed`.
_FAILED = ("bad_request", "context_overflow", "capacity", "numerical", "device_lost", "cancelled", "daemon", "deadline")


@dataclass(slots=True)
class Choice:
    """What one reply has taken so far: tokens read of its prompt, those of them that were reused, tokens written.

    finish: how it ended; empty while it goes on, and where it was left.
    """

    read: int = 0
    reused: int = 0
    written: int = 0
    first_s: float | None = None  # when its first token came
    finish: str = ""

    def take(self, used: Usage, *, prompt: bool = True) -> None:
        """Note what it has taken; prompt: whether the prompt is counted here, or with another choice."""
        self.written = used.completion
        if prompt:
            self.read, self.reused = used.prompt, used.cached
        if self.first_s is None and used.completion:
            self.first_s = time.monotonic()


@dataclass(slots=True)
class RequestRow:
    """One request. number: counted from 1; prompt_tokens: of all its prompts, None until they are known."""

    number: int
    api: str
    n_choices: int
    began_s: float
    prompt_tokens: int | None = None
    failed: str = ""
    choices: list[Choice] = field(default_factory=list)

    def choice(self) -> Choice:
        """Add a reply."""
        self.choices.append(Choice())
        return self.choices[-1]

    @property
    def unread_tokens(self) -> int:
        """Tokens of its prompts that are still to be read, as far as they are known."""
        return max(0, (self.prompt_tokens or 0) - sum(choice.read for choice in self.choices))

    def fail(self, error: SparkError) -> None:
        """Say what it failed with."""
        self.failed = error.code if error.code in _FAILED else "failed"

    def figures(self, now_s: float) -> dict[str, Any]:
        """The row as the page is told: numbers, `api` and `state`.

        writing_s: since its first token. `waiting` is also who has begun and whose first step is not done.
        """
        read = sum(c.read for c in self.choices)
        firsts = [c.first_s for c in self.choices if c.first_s is not None]
        return {
            "number": self.number,
            "api": self.api,
            "choices": self.n_choices,
            "age_s": round(now_s - self.began_s, 1),
            "prompt": self.prompt_tokens,
            "read": read,
            "reused": sum(c.reused for c in self.choices),
            "written": sum(c.written for c in self.choices),
            "writing_s": round(now_s - min(firsts), 2) if firsts else 0.0,
            "state": "writing" if firsts else "reading" if read else "waiting",
        }

    def end(self) -> str:
        """How it ended."""
        finishes = [choice.finish for choice in self.choices if choice.finish]
        if self.failed or len(finishes) < self.n_choices:
            return self.failed or "left"
        return max(finishes, key=_FINISHED.index)


class Board:
    """The rows, no more than there are places for replies, and the last that ended."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[int, RequestRow] = {}  # the oldest first
        self._ended: deque[tuple[float, dict[str, Any]]] = deque(maxlen=ENDED_SHOWN)  # when, and what it was

    @contextlib.contextmanager
    def request(self, api: str, n_choices: int) -> Iterator[RequestRow]:
        """A request's row, until nothing more is done for it."""
        row = RequestRow(next(self._numbers), api, n_choices, time.monotonic())
        self._open[row.number] = row
        try:
            yield row
        except SparkError as error:
            row.fail(error)
            raise
        finally:
            del self._open[row.number]
            now_s = time.monotonic()
            self._ended.appendleft((now_s, row.figures(now_s) | {"state": "ended", "end": row.end()}))

    def figures(self) -> dict[str, Any]:
        """What the page is told: `open`, those at work first, then the oldest; how many `more` there are; `ended`.

        Of those that ended `age_s` is how long they took, `ended_s` how long that is ago; the last comes first.
        """
        now_s = time.monotonic()
        rows = [row.figures(now_s) for row in self._open.values()]
        rows.sort(key=lambda row: row["state"] == "waiting")  # stable: the oldest first
        ended = [row | {"ended_s": round(now_s - at_s, 1)} for at_s, row in self._ended]
        return {"open": rows[:OPEN_SHOWN], "more": max(0, len(rows) - OPEN_SHOWN), "ended": ended}

"""Drafts by looking up: what followed the last tokens where they occurred before.

A reply's own text (a prediction that the request carries, its prompt, what was drawn) and the texts of earlier
requests are searched for the longest run of tokens that ends like the reply; what followed it is proposed. It is the
surer the longer the run is, and where what followed the run the last times was the same. After
Saxena, "Prompt lookup decoding" (2023), and SuffixDecoding (Oliaro et al., 2024), with hashes of runs of a few lengths
in place of a suffix tree: memory is bounded, and a token is added and looked up in a microsecond (cpu/lookup.cpp).
A hash that leads elsewhere costs a draft, never a token, and what is found is compared.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.drafting.source import Draft, Promise
from engine.ground import cpu_library
from engine.ground.errors import CapacityError

NAME = "lookup"
LENGTHS = (2, 4, 8, 16, 32)  # of the runs that are hashed, as in cpu/lookup.cpp
TOKEN_BYTES = 4 * (1 + 2 * len(LENGTHS))  # of memory for a token of a text, at most
RUNS = (4, 8, 16, 32, 64)  # a draft is the surer the more of these its run is at least as long as
# How a run went on where it is found and where it was before, SPARK_ONCE, ... of cpu/spark_cpu.h, and how sure that is:
SEEN = (1, 0, 2, 3)  # once, then otherwise, then the same, then the same more than once
GRADES = (1 + len(RUNS)) * len(SEEN)
MOST_TOKENS = 64  # of a draft

# Chances of a draft's tokens by its grade, at positions 0, 1, 2-3, 4-7, 8-15 and from 16 on, each given that all before
# it stayed: of the sample sessions (drafts.py chances), the lower of their two sets, rounded down.
PRIORS = (
    (0.15, 0.50, 0.60, 0.70, 0.80, 0.85),
    (0.35, 0.50, 0.55, 0.70, 0.75, 0.85),
    (0.40, 0.50, 0.60, 0.70, 0.80, 0.85),
    (0.70, 0.50, 0.55, 0.70, 0.80, 0.85),
    (0.35, 0.60, 0.70, 0.75, 0.85, 0.90),
    (0.55, 0.65, 0.70, 0.75, 0.85, 0.90),
    (0.65, 0.70, 0.70, 0.75, 0.85, 0.90),
    (0.85, 0.65, 0.75, 0.75, 0.85, 0.90),
    (0.60, 0.80, 0.80, 0.85, 0.85, 0.90),
    (0.75, 0.80, 0.80, 0.80, 0.85, 0.90),
    (0.80, 0.80, 0.85, 0.85, 0.85, 0.90),
    (0.95, 0.85, 0.85, 0.90, 0.85, 0.90),
    (0.70, 0.85, 0.85, 0.90, 0.90, 0.90),
    (0.85, 0.85, 0.85, 0.85, 0.90, 0.90),
    (0.90, 0.90, 0.90, 0.90, 0.90, 0.90),
    (0.95, 0.85, 0.85, 0.85, 0.90, 0.90),
    (0.80, 0.85, 0.90, 0.85, 0.90, 0.90),
    (0.85, 0.90, 0.85, 0.90, 0.90, 0.90),
    (0.90, 0.90, 0.90, 0.90, 0.90, 0.90),
    (0.95, 0.90, 0.90, 0.90, 0.90, 0.90),
    (0.95, 0.95, 0.95, 0.95, 0.95, 0.95),
    (0.95, 0.95, 0.95, 0.95, 0.95, 0.95),
    (0.95, 0.95, 0.95, 0.95, 0.95, 0.95),
    (0.95, 0.95, 0.95, 0.95, 0.95, 0.95),
)


class Memory:
    """The texts of earlier requests, as many of the last ones as a budget of bytes holds; one for all requests.

    What a text has in common with one that is there, from its beginning on, is not kept twice: a session comes again
    with every turn. n_tokens: that it has room for; 0: none, it remembers nothing.
    """

    def __init__(self, budget_bytes: int) -> None:
        n = budget_bytes // TOKEN_BYTES
        self.n_tokens = min(n, (1 << 30) - 1) if n > 2 * LENGTHS[-1] else 0
        self._library = cpu_library.load()
        self.handle = self._library.spark_memory_create(self.n_tokens)
        if not self.handle:
            raise CapacityError(
                f"{budget_bytes} bytes for texts to look drafts up in are not there",
                hint="give a smaller --draft-memory",
            )

    def add(self, tokens: Sequence[int] | NDArray[np.int32]) -> None:
        """Remember a text, as far as there is memory."""
        array = np.ascontiguousarray(tokens, np.int32)
        self._library.spark_memory_add(self.handle, array.ctypes.data, len(array))

    def close(self) -> None:
        """Give the memory back; no lookup may use it any more."""
        self._library.spark_memory_destroy(self.handle)
        self.handle = None


class Lookup:
    """A source of drafts for one reply (`source.Source`). memory: texts of earlier requests, to look in as well.

    prediction: tokens that the request says may come.
    """

    def __init__(self, memory: Memory, prediction: Sequence[int] = ()) -> None:
        self._library = memory._library
        said = np.asarray(prediction, np.int32)
        text = self._library.spark_text_create(memory.handle, said.ctypes.data, len(said))
        self._look = cpu_library.LookRecord(text=text)
        self._at = ctypes.addressof(self._look)
        self._is_open = bool(text)
        self._known = 0  # tokens of the history that it has

    def promise(self, history: Sequence[int], most: int, least: int = 0) -> Promise | None:
        """As `Source.promise`."""
        look, n = self._look, len(history) - self._known
        look.n_new = 0
        if n == 1:
            look.n_new, look.tokens[0] = 1, history[-1]
        elif 1 < n <= _MOST_NEW:
            look.n_new, look.tokens[:n] = n, history[-n:]
        look.most, look.least = most, _LEAST[least]
        self._known += n
        if not self._is_open or (n > _MOST_NEW and not self._take(history[-n:])):
            return None
        self._library.spark_text_propose(self._at)
        found = look.n
        if found <= 0:
            if found < 0:  # memory has run out
                self.close()
            return None
        promise: Promise = _PROMISES[_grade(look.run, look.seen)][found]
        return promise

    def draft(self, n_tokens: int) -> Draft:
        """As `Source.draft`."""
        look = self._look
        return Draft(NAME, _grade(look.run, look.seen), tuple(look.tokens[:n_tokens]))

    def close(self) -> None:
        """As `Source.close`."""
        if self._is_open:
            self._library.spark_text_destroy(self._look.text)
            self._is_open = False

    def _take(self, tokens: Sequence[int]) -> bool:
        """Take in a prompt, or what others decoded; False where memory has run out: then it is given up."""
        more = np.asarray(tokens, np.int32)
        if self._library.spark_text_take(self._look.text, more.ctypes.data, len(more)):
            self.close()
        return self._is_open


def _grade(run: int, seen: int) -> int:
    return len(SEEN) * bisect_right(RUNS, run) + SEEN[seen]


_MOST_NEW = 8  # tokens that are handed over one by one
_LEAST = tuple(run for run in (0, *RUNS) for _ in SEEN)  # the shortest run of each grade
_PROMISES = tuple(tuple(Promise(NAME, grade, n) for n in range(MOST_TOKENS + 1)) for grade in range(GRADES))

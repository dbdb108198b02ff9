"""Drafts by looking up: what followed the last tokens where they occurred before.

A reply's own text (a prediction that the request carries, its prompt, what was drawn) and the texts of earlier
requests are searched for the longest run of tokens that ends like the reply; what followed it is proposed. After
Saxena, "Prompt lookup decoding" (2023), and SuffixDecoding (Oliaro et al., 2024), with hashes of runs of a few lengths
in place of a suffix tree: memory is bounded, and a token is added and looked up in a microsecond (cpu/lookup.cpp).
A hash that leads elsewhere costs a draft, never a token, and what is found is compared.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.drafting.source import Draft
from engine.ground import cpu_library
from engine.ground.errors import CapacityError

NAME = "lookup"
LENGTHS = (2, 4, 8, 16, 32)  # of the runs that are hashed, as in cpu/lookup.cpp
TOKEN_BYTES = 4 * (1 + 2 * len(LENGTHS))  # of memory for a token of a text, at most
GRADES = (4, 8, 16, 32, 64)  # a draft's grade is how many of these its run is at least as long as
MOST_TOKENS = 64  # of a draft

# Chances of a draft's tokens by its grade, at positions 0, 1, 2-3, 4-7, 8-15 and from 16 on, each given that all before
# it stayed: of the sample sessions (benchmarks/drafts.py), rounded down.
PRIORS = (
    (0.35, 0.50, 0.60, 0.70, 0.80, 0.85),
    (0.55, 0.65, 0.70, 0.75, 0.85, 0.90),
    (0.80, 0.80, 0.85, 0.85, 0.85, 0.90),
    (0.85, 0.85, 0.85, 0.85, 0.90, 0.90),
    (0.85, 0.85, 0.90, 0.90, 0.90, 0.90),
    (0.95, 0.95, 0.95, 0.95, 0.95, 0.95),
)


class Memory:
    """The texts of earlier requests, as many of the last ones as a budget of bytes holds; one for all requests.

    What a text has in common with one that is there, from its beginning on, is not kept twice: a session comes again
    with every turn. n_tokens: that it has room for; 0: none, it remembers nothing.
    """

    def __init__(self, budget_bytes: int) -> None:
        n = budget_bytes // TOKEN_BYTES
        self.n_tokens = min(n, (1 << 31) - 1) if n > 2 * LENGTHS[-1] else 0
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
        self._memory, self._library = memory, memory._library
        said = np.asarray(prediction, np.int32)
        self._text = self._library.spark_text_create(memory.handle, said.ctypes.data, len(said))
        self._known = 0  # tokens of the history that it has
        self._one = ctypes.c_int32()
        self._found = (ctypes.c_int32 * MOST_TOKENS)()
        self._run = ctypes.c_int64()
        self._addresses = [ctypes.addressof(a) for a in (self._one, self._found, self._run)]

    def propose(self, history: Sequence[int], most: int) -> Draft | None:
        """As `Source.propose`."""
        if not self._follow(history):
            return None
        _, found, run = self._addresses
        n = self._library.spark_text_propose(self._text, min(most, MOST_TOKENS), found, run)
        if n < 1:
            return None
        grade = sum(self._run.value >= least for least in GRADES)
        return Draft(NAME, grade, tuple(self._found[:n]))

    def close(self) -> None:
        """As `Source.close`."""
        if self._text is not None:
            self._library.spark_text_destroy(self._text)
            self._text = None

    def _follow(self, history: Sequence[int]) -> bool:
        """Take in what has been added to the history; False where memory has run out: then it is given up."""
        n = len(history) - self._known
        if n == 1:
            self._one.value = history[-1]
            at = self._addresses[0]
        elif n:
            more = np.asarray(history[self._known :], np.int32)
            at = more.ctypes.data
        if n and self._text is not None and self._library.spark_text_take(self._text, at, n):
            self.close()
        self._known = len(history)
        return self._text is not None

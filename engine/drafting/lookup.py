"""Drafts by looking up: what followed the last tokens where they occurred before.

A reply's own text (a prediction that the request carries, its prompt, what was drawn) and the texts of earlier
requests are searched for the longest run of tokens that ends like the reply; what followed it is proposed. After
Saxena, "Prompt lookup decoding" (2023), and SuffixDecoding (Oliaro et al., 2024), with hashes of runs of a few lengths
in place of a suffix tree: memory is bounded, and a token is added and looked up in a microsecond (cpu/lookup.cpp).
A hash that leads elsewhere costs a draft, never a token, and what is found is compared.

How likely each token of a draft is right is judged by how long its run is, how that went on before, and how often the
last token, two, four and eight were followed by it: by a logistic model that learns from what came, in all replies.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.drafting.source import Draft, Promise
from engine.ground import cpu_library
from engine.ground.errors import CapacityError

NAME = "lookup"
LENGTHS = (2, 4, 8, 16, 32)  # of the runs that are hashed, as in cpu/lookup.cpp
ORDERS = (1, 2, 4, 8)  # tokens of contexts whose next ones are counted
TOKEN_BYTES = 4 * (1 + 2 * len(LENGTHS)) + 8 * len(ORDERS)  # of memory for a token of a text, at most
MOST_RUN = 64  # tokens that are compared
MOST_TOKENS = 64  # of a draft
# Of drafts under this name that somebody else makes, who does not judge them: as `gate.Priors`.
PRIORS = ((0.35, 0.50, 0.60, 0.70, 0.80, 0.85),)


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

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.close()


class Lookup:
    """A source of drafts for one reply (`source.Source`). memory: texts of earlier requests, to look in as well.

    prediction: tokens that the request says may come.
    """

    def __init__(self, memory: Memory, prediction: Sequence[int] = ()) -> None:
        self._library, self._memory = memory._library, memory  # which stays as long as anybody looks there
        said = np.asarray(prediction, np.int32)
        text = self._library.spark_text_create(memory.handle, said.ctypes.data, len(said))
        self._look = cpu_library.LookRecord(text=text)
        self._at = ctypes.addressof(self._look)
        self._is_open = bool(text)
        self._known = 0  # tokens of the history that it has

    @property
    def run(self) -> int:
        """Of what was promised last: tokens that equal those ahead of where it was found, MOST_RUN at most."""
        return int(self._look.run)

    @property
    def seen(self) -> int:
        """How the run went on there and before: 0 once; else 1 otherwise than before, 2 the same, 3 often the same."""
        return int(self._look.seen)

    def promise(self, history: Sequence[int], most: int, least: float = 0.0) -> Promise | None:
        """As `Source.promise`."""
        look, n = self._look, len(history) - self._known
        look.n_new = 0
        if n == 1:
            look.n_new, look.tokens[0] = 1, history[-1]
        elif 1 < n <= _MOST_NEW:
            look.n_new, look.tokens[:n] = n, history[-n:]
        look.most, look.least = most, least
        self._known += n
        if not self._is_open or (n > _MOST_NEW and not self._take(history[-n:])):
            return None
        self._library.spark_text_propose(self._at)
        found = look.n
        if found <= 0:
            if found < 0:  # memory has run out
                self.close()
            return None
        return Promise(NAME, 0, found, tuple(look.chances[: look.n_chances]))

    def draft(self, n_tokens: int, sure: bool = False) -> Draft:
        """As `Source.draft`."""
        return Draft(NAME, 0, tuple(self._look.tokens[:n_tokens]))

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


_MOST_NEW = 8  # tokens that are handed over one by one

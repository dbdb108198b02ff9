"""ArcticInference's suffix cache as a source of drafts, to compare the index of lookup with (`drafts.py replay`).

The package wants vLLM, and its cache needs none of it. From its source distribution (PyPI, `arctic-inference`):

    cmake -B build csrc/suffix_decoding && cmake --build build      # with nanobind installed
    mkdir -p FOLDER/arctic_inference && touch FOLDER/arctic_inference/__init__.py
    cp -r arctic_inference/suffix_decoding FOLDER/arctic_inference/
    cp build/_C*.so FOLDER/arctic_inference/suffix_decoding/
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from engine.drafting.lookup import NAME
from engine.drafting.outcomes import MOST_TOKENS
from engine.drafting.source import Draft, Promise


class SuffixCache:
    """One cache, that of all requests. folder: what holds the package. n_requests: that it has had."""

    def __init__(self, folder: Path) -> None:
        sys.path.insert(0, str(folder))
        from arctic_inference.suffix_decoding import SuffixDecodingCache  # type: ignore[import-not-found]

        self.cache: Any = SuffixDecodingCache(max_tree_depth=64)
        self.n_requests = 0

    def open(self) -> SuffixSource:
        """For the next request."""
        self.n_requests += 1
        return SuffixSource(self.cache, self.n_requests)

    def add(self, tokens: Any) -> None:
        """The text of a request that has ended: it is there already."""

    def close(self) -> None:
        """Nothing to give back."""


class SuffixSource:
    """What the cache drafts for one request (`Source`), all of whose tokens are in it: tool results, too."""

    def __init__(self, cache: Any, number: int) -> None:
        self.cache, self.number, self.known = cache, number, 0
        self.made: Any = None

    def promise(self, history: Sequence[int], most: int, least: float = 0.0) -> Promise | None:
        """As `Source.promise`; the chances are the cache's: how often each token followed."""
        if not self.known:
            self.cache.start_request(self.number, list(history[:]))
        else:
            self.cache.add_active_response(self.number, list(history[self.known :]))
        self.known = len(history)
        self.made = self.cache.speculate(self.number, list(history[-64:]), max_spec_tokens=min(most, MOST_TOKENS))
        n = len(self.made.token_ids)
        return Promise(NAME, 0, n, tuple(accumulate(self.made.probs, mul))) if n else None

    def draft(self, n_tokens: int, sure: bool = False) -> Draft:
        """As `Source.draft`."""
        return Draft(NAME, 0, tuple(self.made.token_ids[:n_tokens]) if n_tokens else ())

    def close(self) -> None:
        """As `Source.close`."""
        if self.known:
            self.cache.stop_request(self.number)

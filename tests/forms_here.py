"""A form whose masks are made in the process of the test."""

from __future__ import annotations

from typing import Any

import numpy as np


class FormHere:
    """grammar: has `mask`, `accept` and `is_done`, as `engine.text.grammar.Grammar`."""

    binds = is_ready = True
    is_late = False

    def __init__(self, grammar: Any) -> None:
        self.grammar = grammar

    @property
    def is_done(self) -> bool:
        return bool(self.grammar.is_done)

    def begin(self) -> None:
        """It has begun."""

    def settle(self, until_s: float) -> bool:
        return True

    def mask(self, until_s: float) -> np.ndarray:
        words: np.ndarray = self.grammar.mask()
        return words

    def accept(self, token: int) -> None:
        self.grammar.accept(token)

    def close(self) -> None:
        """Nothing is held."""

"""Which tokens a piece of visible text was written with, and how likely they were.

Text and tokens are counted in characters of what the model wrote, reasoning, calls and marks among them, as the
detokenizer gives them out. A token that gives out no character, since its bytes only begin one, lies where that
character will be. A token belongs to the first piece of visible text that has a character of it: one that a stop string
cuts in two is there whole, one that lies in the stop string is not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from engine.text.tokenizer import Tokenizer
from spark.speech.conversation import TokenLogprob


class Aligner:
    """Takes the tokens of a reply, then gives them out with the text, in order."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._waiting: deque[tuple[int, int, TokenLogprob]] = deque()  # where it begins and ends

    def token(self, at: int, n_chars: int, token: int, logprob: float, top: Sequence[tuple[int, float]]) -> None:
        """Take a token that gave out `n_chars` characters from `at` on, and the likeliest in its place."""
        made = TokenLogprob(self._bytes(token), logprob, tuple((self._bytes(other), p) for other, p in top), at)
        self._waiting.append((at, at + max(n_chars, 1), made))

    def of(self, at: int, n_chars: int) -> tuple[TokenLogprob, ...]:
        """The tokens of the text of `n_chars` characters from `at` on; those before it are nobody's."""
        found = []
        while self._waiting and self._waiting[0][0] < at + n_chars:
            _, end, made = self._waiting.popleft()
            if end > at:
                found.append(made)
        return tuple(found)

    def clear(self) -> None:
        """Forget what has not been given out."""
        self._waiting.clear()

    def _bytes(self, token: int) -> bytes:
        return self._tokenizer.decode_bytes([token])


def entry(made: TokenLogprob) -> dict[str, Any]:
    """A token as OpenAI's chat completions and responses have it."""
    return {**_likely(made.token, made.logprob), "top_logprobs": [_likely(token, p) for token, p in made.top]}


def _likely(token: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token.decode(errors="replace"), "logprob": logprob, "bytes": list(token)}
